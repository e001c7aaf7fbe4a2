"""The `securefl` command: reads arguments, calls one function, prints a table or one JSON document.

The commands over runs are here; those over keys, ledgers and one silo in `commands`. Heavy modules load
inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.highlighter import JSONHighlighter
from rich.markup import escape
from rich.text import Text

from securefl.commands import keys, ledger, silo
from securefl.console import (
    ERR,
    OUT,
    Json,
    clean,
    json_text,
    new_app,
    print_json,
    progress_bar,
    run_app,
    say,
    shown,
)
from securefl.errors import Refused, UsageError
from securefl.files import check_out

if TYPE_CHECKING:
    from securefl.result import Result

app = new_app("securefl", "Train language models across institutions that may not pool their text.")
keys.register(app)
ledger.register(app)
silo.register(app)


def main() -> None:
    """Entry point of the `securefl` command."""
    sys.exit(run_app(app, "securefl"))


@app.command(epilog="Example: securefl demo --out my-demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder to make.")] = Path("securefl-demo"), as_json: Json = False
) -> None:
    """Run four silos through every method on BBC news, and attack what left them (about 10 minutes)."""
    from attacks.audit import audit
    from attacks.audit_report import attack_table, audit_sections
    from attacks.findings import Audit
    from securefl.demo import DEMO_ATTACKS, demo_configs, demo_units, run_demo
    from securefl.recording import RunFolder
    from securefl.report.render import accuracy_table, departures_table, write_comparison_report

    folder, configs = RunFolder(check_out(out), resume=True), demo_configs()
    audits: list[tuple[str, Audit]] = []

    def attack(run: Path, name: str) -> None:
        audits.append((name, audit(run, run, attacks=DEMO_ATTACKS)))

    with progress_bar(demo_units(configs)) as move:
        results = run_demo(
            folder, configs, move, attack, lambda text: ERR.print(shown(text), highlight=False)
        )
    write_comparison_report(
        results,
        folder.path / "report.html",
        audit_sections(audits),
        title="What four silos shared, and what it gave away",
    )
    folder.finish()
    if as_json:
        print_json(
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
    say(f"The report, with plots: {shown(out / 'report.html')}")


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
        print_json(json.loads(result.to_json()) if as_json else inspect_path(target))
        return
    corpus = load_corpus(config)
    from securefl.report.render import accuracy_table, departures_table, sums_table
    from securefl.simulation import Simulation, work_units

    with progress_bar(work_units(config, len(corpus.train))) as move:
        run = Simulation(config, corpus, target, resume=resume, progress=move)
        if corpus.test_duplicates:
            ERR.print(f"{corpus.test_duplicates} test rows are also training rows and were left out")
        result = run.run()
    refused = [refusal for client in run.clients.values() for refusal in client.refusals]
    if as_json:
        print_json(json.loads(result.to_json()))
        _end_refused(refused)
        return
    name, first = next(iter(run.clients.items()))
    say(f"The policy of {name}; the others differ in names and fingerprints ({shown(out / 'policy')}):")
    say(escape(clean(first.policy.to_toml(), keep="\n")))
    for entry in (refusal for row in result.rounds for refusal in row.refusals):
        ERR.print(f"[yellow]{shown(entry.name)}, {entry.step}: {shown(entry.reason)}[/]", soft_wrap=True)
    OUT.print(accuracy_table([result]))
    OUT.print(departures_table([result]))
    if (sums := sums_table(result)) is not None:
        OUT.print(sums)
    say(f"The report: {shown(out / 'report.html')}")
    _end_refused(refused)


def _end_refused(refused: list[Refused]) -> None:
    """A run that went on without what a silo's policy forbids is written, but is not a success."""
    if refused:
        raise refused[0]


def _finished(path: Path) -> Result:
    from pydantic import ValidationError

    from securefl.files import read_limited
    from securefl.result import Result
    from securefl.verification import MAX_DOCUMENT

    try:
        return Result.model_validate_json(read_limited(path, MAX_DOCUMENT))
    except ValidationError as error:
        raise UsageError(
            f"{path}: is not the result of a finished run; remove the folder or choose another --out"
        ) from error


@app.command(epilog="Example: securefl inspect run/ledger/silo-1.jsonl")
def inspect(path: Annotated[Path, typer.Argument(help="File or folder.")], as_json: Json = False) -> None:
    """Say what a configuration, envelope, release, ledger, card, policy, checkpoint or run holds."""
    from securefl.inspection import inspect_path

    document = inspect_path(path)
    if as_json:
        print_json(document)
    else:
        OUT.print(JSONHighlighter()(Text(json_text(document))), soft_wrap=True)


@app.command(epilog="Example: securefl export run silo-1 --out model")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a finished run.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The silo whose model to take.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
) -> None:
    """Copy a trained model out of a run as a Hugging Face folder with its card."""
    from securefl.trained import export_model

    export_model(run, name, check_out(out))
    say(
        f"{shown(out)}: a Hugging Face folder; its README.md says how to load it",
    )


@app.command(epilog="Example: securefl predict model new.csv --out labels.jsonl")
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A folder that `export` made.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, TSV, JSONL or Parquet.")],
    out: Annotated[Path, typer.Option(help="JSONL file for the labels.")],
    text: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    pair: Annotated[str | None, typer.Option(help="Column with the second text, of a task on pairs.")] = None,
) -> None:
    """Classify the texts of a file."""
    from securefl.trained import predict_file

    rows = predict_file(model, file, check_out(out, file=True), text, pair)
    OUT.print(f"{rows} rows classified: {shown(out)}")
