"""The `securefl-audit` command: reads arguments, calls one function, prints a table or one JSON document.

Exit codes are those of `securefl`; 4 also where a finding violates its claim, after the files are written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from securefl.console import ERR, OUT, new_app, progress_bar, run_app
from securefl.files import check_out

VIOLATION = 4

app = new_app("securefl-audit", "Measure what an attacker could read from what left the silos.")


def main() -> None:
    """Entry point of the `securefl-audit` command."""
    sys.exit(run_app(app, "securefl-audit"))


@app.command(epilog="Example: securefl-audit run my-run --out my-run-audit")
def run(
    run_dir: Annotated[Path, typer.Argument(help="Folder that a simulation wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for audit.json and the report.", show_default=False)],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
    ] = False,
) -> None:
    """Attack every recorded release of a run and write audit.json and an HTML report."""
    from attacks.audit import audit, report_name
    from attacks.audit_report import attack_table, not_attacked

    out = check_out(out) if out.resolve() != run_dir.resolve() else out
    with progress_bar(1.0) as move:
        done = 0.0

        def to(share: float, what: str) -> None:
            nonlocal done
            move(share - done, what)
            done = share

        result = audit(run_dir, out, to)
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        if result.findings:
            OUT.print(attack_table([(result.method, result)]))
        answers = result.verdicts
        for question, answer in (
            ("singling out", answers.singling_out),
            ("linkability", answers.linkability),
            ("inference", answers.inference),
        ):
            word = answer.replace("_", " ") if result.findings else "not tested"
            OUT.print(f"{question}: {word}", highlight=False)
        OUT.print(f"{len(result.not_run)} attacks were not run; the report says why.", highlight=False)
        untouched = [] if result.findings else not_attacked([(result.method, result)])
        for sentence in (*untouched, result.warning):
            OUT.print(sentence, highlight=False)
        OUT.print(str(out / report_name(run_dir, out)), highlight=False, soft_wrap=True, markup=False)
    if any(finding.verdict == "violates_claim" for finding in result.findings):
        ERR.print("securefl-audit: a finding lies above the cap of its claim", highlight=False)
        raise typer.Exit(VIOLATION)
