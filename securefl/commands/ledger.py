"""`securefl ledger`: check a silo's record of what left it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from securefl.console import OUT, Json, print_json, say, shown

ledger_app = typer.Typer(no_args_is_help=True, help="Check a silo's record of what left it.")


@ledger_app.command("verify", epilog="Example: securefl ledger verify run/ledger/silo-1.jsonl")
def ledger_verify(path: Annotated[Path, typer.Argument(help="NAME.jsonl")], as_json: Json = False) -> None:
    """Check the hash chain, every signature and the account; exit 4 names the first bad entry."""
    from securefl.ledger import verify_ledger

    summary = verify_ledger(path)
    if as_json:
        print_json(
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
    say(
        f"{shown(path)}: {summary.entries} entries of {summary.name} verify",
    )
    for note in summary.notes:
        OUT.print(f"note: {shown(note)}")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(ledger_app, name="ledger")
