"""What the commands share: the applications' frame, the terminal, progress, errors as one sentence.

Exit codes: 0 done, 2 bad usage or configuration, 3 refused by policy or budget, 4 protocol or verification
failure, 1 anything else. A result that cannot be written is an error (1); what is told on stderr is not the
result, and where it cannot be written the command ends as it would have. This room knows no command and
nothing of what they do.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import IO, Annotated, Any, TextIO, cast

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
_GOES_ON = {"securefl-audit": "an audit goes on where it was when it is started again"}  # of a program
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
    """Run a typer application; every error becomes one sentence and an exit code, and none a traceback.

    With SECUREFL_DEBUG=1 in the environment the traceback of a fault of our own is printed too.
    """
    _prepare_streams()
    with redirect_stderr(cast("IO[str]", _Forgiving(sys.stderr))):
        code = _run(application, program, sys.argv[1:] if arguments is None else arguments)
        try:
            sys.stdout.flush()
        except OSError as error:
            _drop(sys.stdout)
            if code == 0:
                code = 1 if isinstance(error, BrokenPipeError) else _failed(program, str(error), 1)
    return code


def _interrupted(program: str) -> int:
    goes_on = _GOES_ON.get(program, "a simulation continues with --resume where it stopped")
    return _failed(program, f"interrupted; {goes_on}", 1)


def _run(application: typer.Typer, program: str, arguments: list[str]) -> int:
    if any("\0" in argument for argument in arguments):  # no shell can, but an embedding program
        return _failed(program, "an argument holds a NUL character, which no name or path may have", 2)
    try:
        application(args=arguments, prog_name=program)
        return 0
    except SystemExit as ended:  # how the library reports its own ends, usage errors among them
        if ended.code == _INTERRUPTED:
            return _interrupted(program)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except SecureflError as error:
        return _failed(program, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _interrupted(program)
    except BrokenPipeError:
        return 1
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _failed(program, what, 2 if error.filename and error.errno in _USERS_PATH else 1)
    except MemoryError:
        return _failed(
            program, "out of memory; lower slm.max_length, slm.batch_size or the number of rows", 1
        )
    except Exception as error:
        # Only its kind: what it says, and what led to it, may quote a row or a key.
        if os.environ.get("SECUREFL_DEBUG") == "1":
            sys.stderr.write(clean("".join(traceback.format_exception(error)), keep="\n"))
        return _failed(
            program,
            f"this is a fault of securefl ({type(error).__name__}); report it, with what SECUREFL_DEBUG=1 in "
            "the environment shows (look through that first: it may quote your files)",
            1,
        )


def _failed(program: str, message: str, code: int) -> int:
    ERR.print(f"[bold red]{program}:[/] {shown(message)}", highlight=False, soft_wrap=True)
    return code


class _Forgiving:
    """stderr that may be full or gone: what cannot be told is lost, and nothing fails by it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _drop(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _drop(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _prepare_streams() -> None:
    """Make the standard streams take any character, and give those that are closed a place to write to.

    The latter before a file gets their number.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for good
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # it writes what was left in it; that fails again when it is used
                stream.reconfigure(errors="backslashreplace")


def _drop(stream: TextIO) -> None:
    """Nobody reads on: what is still buffered must not fail once more at the end."""
    with suppress(OSError):  # no file of the system's: an embedding program's own stream
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


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
    """One JSON document on stdout, as `json_text` has it; in ASCII where stdout's encoding lacks a character.

    A character that the stream escapes would not be JSON.
    """
    text = json_text(document)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(document, indent=2)
    sys.stdout.write(text + "\n")


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
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left;"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def move(amount: float, what: str) -> None:
            bar.update(task, advance=amount, description=shown(what))

        yield move
        bar.update(task, completed=total)
