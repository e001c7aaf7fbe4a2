"""What the commands share: the applications' frame, the terminal, progress, errors as one sentence.

Exit codes: 0 done, 2 bad usage or configuration, 3 refused by policy or budget, 4 protocol or verification
failure, 1 anything else. This room knows no command and nothing of what they do.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from securefl import __version__
from securefl.errors import SecureflError

_INTERRUPTED = 130  # what the library below makes of Ctrl-C
_USERS_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EROFS)


# A pipe has no width of its own; the tables are made for 110 columns.
# Where the shell has closed a stream (>&-), Python has None in its place.
OUT = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 110)
ERR = Console(stderr=True)
_INTERRUPTION = "interrupted; a simulation continues with --resume where it stopped"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def new_app(program: str, purpose: str) -> typer.Typer:
    """A typer application with --version and quiet libraries; securefl-audit is made by it too."""
    application = typer.Typer(
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        help=purpose,
    )

    def show_version(asked: bool) -> None:
        if asked:
            sys.stdout.write(f"{program} {__version__}\n")
            raise typer.Exit

    @application.callback(help=purpose)
    def root(
        # Not in Annotated: that is read as text, in which `show_version` has no meaning.
        version: bool = typer.Option(  # noqa: ARG001 - its callback acts
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Threads that wait by spinning make training several times slower on a shared machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Deprecations between the libraries below us are no news to a user.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

    return application


def run_app(application: typer.Typer, program: str, arguments: list[str] | None = None) -> int:
    """Run a typer application; every error becomes one sentence and an exit code."""
    _open_closed_streams()
    try:
        try:
            application(args=arguments, prog_name=program)
        finally:
            sys.stdout.flush()
        return 0
    except SystemExit as ended:  # how the library reports its own ends, usage errors among them
        if ended.code == _INTERRUPTED:
            return _failed(program, _INTERRUPTION, 1)
        return ended.code if isinstance(ended.code, int) else 0
    except SecureflError as error:
        return _failed(program, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed(program, _INTERRUPTION, 1)
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if error.errno == errno.ENOSPC:
            _drop_output()
        return _failed(program, what, 2 if error.filename and error.errno in _USERS_PATH else 1)
    except MemoryError:
        return _failed(
            program, "out of memory; lower slm.max_length, slm.batch_size or the number of rows", 1
        )


def _failed(program: str, message: str, code: int) -> int:
    ERR.print(f"[bold red]{program}:[/] {shown(message)}", highlight=False, soft_wrap=True)
    return code


def _open_closed_streams() -> None:
    """Give the standard streams that are closed a place to write to, before a file gets their number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for good


def _drop_output() -> None:
    """Nobody reads on: what is still buffered must not fail once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clean(text: str, keep: str = "") -> str:
    """Text for a terminal: control, format and unassigned characters become U+FFFD, but those of `keep`.

    A name out of somebody's file so can neither steer the terminal nor begin a line of its own.
    """
    return "".join(
        c if c in keep or (unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029") else "\ufffd"
        for c in text
    )


def shown(value: object) -> str:
    """A value as part of a line of markup."""
    return escape(clean(str(value)))


def say(line: str) -> None:
    """A line of the result, in markup, never wrapped, so that paths can be copied."""
    OUT.print(line, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    sys.stdout.write(json_text(document) + "\n")


def json_text(document: Any) -> str:
    """JSON that is readable in every language and in which no character steers a terminal."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return re.sub(
        "[^\\x00-\\x7e]",
        lambda m: json.dumps(m[0])[1:-1] if unicodedata.category(m[0])[0] == "C" else m[0],
        text,
    )


@contextmanager
def progress_bar(total: float) -> Iterator[Callable[[float, str], None]]:
    """Progress on stderr for `total` units; yields the function that moves it.

    A bar on a terminal; elsewhere (a log, a pipe) a line for every tenth.
    """
    if not ERR.is_terminal:
        done = told = 0.0

        def note(amount: float, what: str) -> None:
            nonlocal done, told
            done += amount
            if done >= told + total / 10 and done < total:
                told = done
                ERR.print(f"{done / total:4.0%}  {shown(what)}", highlight=False, soft_wrap=True)

        yield note
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def move(amount: float, what: str) -> None:
            bar.update(task, advance=amount, description=shown(what))

        yield move
        bar.update(task, completed=total)
