"""The `securefl` command: reads arguments, calls one function, prints a table or one JSON document.

Exit codes: 0 done, 2 bad usage or configuration, 3 refused by policy or budget, 4 protocol or verification
failure, 1 anything else. Errors are one sentence on stderr. Heavy modules load inside the commands, so that
`--help` is quick.
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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.highlighter import JSONHighlighter
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from securefl import __version__
from securefl.errors import Refused, SecureflError, UsageError
from securefl.files import check_out as check_out

if TYPE_CHECKING:
    from securefl.result import Result

_INTERRUPTED = 130  # what the library below makes of Ctrl-C
_USERS_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EROFS)


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


app = new_app("securefl", "Train language models across institutions that may not pool their text.")
ledger_app = typer.Typer(no_args_is_help=True, help="Check a silo's record of what left it.")
app.add_typer(ledger_app, name="ledger")

# A pipe has no width of its own; the tables are made for 110 columns.
# Where the shell has closed a stream (>&-), Python has None in its place.
OUT = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 110)
ERR = Console(stderr=True)
_INTERRUPTION = "interrupted; a simulation continues with --resume where it stopped"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


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
    ERR.print(f"[bold red]{program}:[/] {_shown(message)}", highlight=False, soft_wrap=True)
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


def _shown(value: object) -> str:
    """A value as part of a line of markup."""
    return escape(clean(str(value)))


def main() -> None:
    """Entry point of the `securefl` command."""
    sys.exit(run_app(app, "securefl"))


def _say(line: str) -> None:
    """A line of the result, in markup, never wrapped, so that paths can be copied."""
    OUT.print(line, highlight=False, soft_wrap=True)


def _print_json(document: Any) -> None:
    sys.stdout.write(_json_text(document) + "\n")


def _json_text(document: Any) -> str:
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
                ERR.print(f"{done / total:4.0%}  {_shown(what)}", highlight=False, soft_wrap=True)

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
            bar.update(task, advance=amount, description=_shown(what))

        yield move
        bar.update(task, completed=total)


@app.command(epilog="Example: securefl demo --out my-demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder to make.")] = Path("securefl-demo"), as_json: Json = False
) -> None:
    """Run four silos through every method on BBC news, and attack what left them (about 7 minutes)."""
    from attacks.audit import audit
    from attacks.audit_report import attack_table, audit_sections
    from attacks.findings import Audit
    from securefl.demo import demo_configs, demo_units, run_demo
    from securefl.recording import RunFolder
    from securefl.report.render import accuracy_table, departures_table, write_comparison_report

    folder, configs = RunFolder(check_out(out), resume=True), demo_configs()
    audits: list[tuple[str, Audit]] = []

    def attack(run: Path, name: str) -> None:
        audits.append((name, audit(run, run)))

    with progress_bar(demo_units(configs)) as move:
        results = run_demo(
            folder, configs, move, attack, lambda text: ERR.print(_shown(text), highlight=False)
        )
    write_comparison_report(
        results,
        folder.path / "report.html",
        audit_sections(audits),
        title="What four silos shared, and what it gave away",
    )
    folder.finish()
    if as_json:
        _print_json(
            {
                "results": [json.loads(result.to_json()) for result in results],
                "audits": {name: json.loads(found.to_json()) for name, found in audits},
                "report": str(out / "report.html"),
            }
        )
        return
    for table in (accuracy_table(results), departures_table(results), attack_table(audits)):
        OUT.print(table)
        OUT.print()
    _say(f"The report, with plots: {_shown(out / 'report.html')}")


@app.command(epilog="Example: securefl keygen hospital-a --out keys")
def keygen(
    name: Annotated[str, typer.Argument(help="Name in the federation: a-z, 0-9, dot, dash, underscore.")],
    out: Annotated[
        Path, typer.Option(help="Folder for NAME.key (keep secret) and NAME.card.json (give out).")
    ],
    as_json: Json = False,
) -> None:
    """Make a silo's or a server's identity: a private file (mode 0600) and a public card."""
    from securefl.crypto.identity import Identity

    folder = check_out(out)
    identity = Identity.generate(name)
    key, card = out / f"{name}.key", out / f"{name}.card.json"
    for path in (key, card):
        if os.path.lexists(path):
            raise UsageError(f"{path}: exists already and is not overwritten; choose another place")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    identity.save(key)
    try:
        identity.card.save(card)
    except BaseException:
        key.unlink(missing_ok=True)
        raise
    if as_json:
        _print_json(
            {"name": name, "key": str(key), "card": str(card), "fingerprint": identity.card.fingerprint}
        )
        return
    _say(f"Private key (keep it here): {_shown(key)}")
    _say(f"Public card (give it out):  {_shown(card)}")
    _say(f"Fingerprint to compare:     {identity.card.short_fingerprint}")
    _say(f"Fingerprint for policies:   {identity.card.fingerprint}")


@app.command(epilog="Example: securefl simulate study.toml --out run")
def simulate(
    file: Annotated[Path, typer.Argument(help="Configuration (TOML).")],
    out: Annotated[Path, typer.Option(help="Folder to make; it must not exist, or be empty.")],
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue an interrupted run (OUT.partial); Ctrl-C loses at most one training."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a federation on your own data, all parties in this process."""
    from securefl.config import load_config
    from securefl.data import load_corpus

    target = check_out(out)
    config = load_config(file)
    if resume and os.path.lexists(target / "result.json"):
        from securefl.inspection import inspect_path

        result = _finished(target / "result.json")
        if result.config != config.model_dump(mode="json"):
            raise UsageError(
                f"{out}: is a finished run of another configuration than {file}; choose another --out"
            )
        _print_json(json.loads(result.to_json()) if as_json else inspect_path(target))
        return
    corpus = load_corpus(config)
    from securefl.report.render import accuracy_table, departures_table
    from securefl.simulation import Simulation, work_units

    with progress_bar(work_units(config, len(corpus.train))) as move:
        run = Simulation(config, corpus, target, resume=resume, progress=move)
        if corpus.test_duplicates:
            ERR.print(f"{corpus.test_duplicates} test rows are also training rows and were left out")
        result = run.run()
    refused = [refusal for client in run.clients.values() for refusal in client.refusals]
    if as_json:
        _print_json(json.loads(result.to_json()))
        _end_refused(refused)
        return
    name, first = next(iter(run.clients.items()))
    _say(f"The policy of {name}; the others differ in names and fingerprints ({_shown(out / 'policy')}):")
    _say(escape(clean(first.policy.to_toml(), keep="\n")))
    for entry in (refusal for row in result.rounds for refusal in row.refusals):
        ERR.print(f"[yellow]{_shown(entry.name)}, {entry.step}: {_shown(entry.reason)}[/]", soft_wrap=True)
    OUT.print(accuracy_table([result]))
    OUT.print(departures_table([result]))
    _say(f"The report: {_shown(out / 'report.html')}")
    _end_refused(refused)


def _end_refused(refused: list[Refused]) -> None:
    """A run that went on without what a silo's policy forbids is written, but is not a success."""
    if refused:
        raise refused[0]


def _finished(path: Path) -> Result:
    from pydantic import ValidationError

    from securefl.files import read_limited
    from securefl.inspection import MAX_DOCUMENT
    from securefl.result import Result

    try:
        return Result.model_validate_json(read_limited(path, MAX_DOCUMENT))
    except ValidationError as error:
        raise UsageError(
            f"{path}: is not the result of a finished run; remove the folder or choose another --out"
        ) from error


@app.command(epilog="Example: securefl inspect run/ledger/silo-1.jsonl")
def inspect(path: Annotated[Path, typer.Argument(help="File or folder.")], as_json: Json = False) -> None:
    """Say what an envelope, release, ledger, card, run or configuration holds."""
    from securefl.inspection import inspect_path

    document = inspect_path(path)
    if as_json:
        _print_json(document)
    else:
        OUT.print(JSONHighlighter()(Text(_json_text(document))), soft_wrap=True)


@ledger_app.command("verify", epilog="Example: securefl ledger verify run/ledger/silo-1.jsonl")
def ledger_verify(path: Annotated[Path, typer.Argument(help="NAME.jsonl")], as_json: Json = False) -> None:
    """Check the hash chain, every signature and the account; exit 4 names the first bad entry."""
    from securefl.ledger import verify_ledger

    summary = verify_ledger(path)
    if as_json:
        _print_json(
            {
                "verified": True,
                "name": summary.name,
                "fingerprint": summary.fingerprint,
                "entries": summary.entries,
                "head": summary.head_hash,
                "notes": list(summary.notes),
            }
        )
        return
    _say(
        f"{_shown(path)}: {summary.entries} entries of {summary.name} verify",
    )
    for note in summary.notes:
        OUT.print(f"note: {_shown(note)}")


@app.command(epilog="Example: securefl export run silo-1 --out model")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a finished run.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The silo whose model to take.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
) -> None:
    """Copy a trained model out of a run as a Hugging Face folder with its card."""
    from securefl.trained import export_model

    export_model(run, name, check_out(out))
    _say(
        f"{_shown(out)}: a Hugging Face folder; its README.md says how to load it",
    )


@app.command(epilog="Example: securefl predict model new.csv --out labels.jsonl")
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A folder that `export` made.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, TSV, JSONL or Parquet.")],
    out: Annotated[Path, typer.Option(help="JSONL file for the labels.")],
    text: Annotated[str, typer.Option(help="Column with the text.")] = "text",
) -> None:
    """Classify the texts of a file."""
    from securefl.trained import predict_file

    rows = predict_file(model, file, check_out(out, file=True), text)
    OUT.print(f"{rows} rows classified: {_shown(out)}")
