"""`securefl ledger`: begin, check, rotate, copy and restore a silo's record of what left it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securefl.commands.keys import PassphraseFile, open_identity
from securefl.console import OUT, Json, print_json, say, shown
from securefl.files import check_out

if TYPE_CHECKING:
    from securefl.ledger import LedgerSummary

ledger_app = typer.Typer(no_args_is_help=True, help="A silo's record of what left it.")

_Ledger = Annotated[Path, typer.Argument(metavar="PATH", help="NAME.jsonl")]
_Key = Annotated[Path, typer.Option(help="The silo's private file.")]


def _passphrase(key: str) -> Any:
    return typer.Option(help=f"File with the passphrase of the {key} key (mode 0600); else you are asked.")


def _document(summary: LedgerSummary) -> dict[str, Any]:
    return {
        "verified": True,
        "name": summary.name,
        "fingerprint": summary.fingerprint,
        "entries": summary.entries,
        "releases": len(summary.releases),
        "refusals": len(summary.refusals),
        "approvals": len(summary.approvals),
        "accounts": {name: account.model_dump(mode="json") for name, account in summary.accounts.items()},
        "restored": summary.restored,
        "head": summary.head_hash,
        "notes": list(summary.notes),
    }


def _contents(summary: LedgerSummary) -> None:
    """What an owner asks first: how much left, what was refused, what it adds up to."""
    sizes = sum(entry.bytes for entry in summary.releases)
    say(
        f"{len(summary.releases)} releases ({sizes:,} bytes), {len(summary.refusals)} refusals, "
        f"{len(summary.approvals)} approvals"
    )
    for name, account in summary.accounts.items():
        private = (
            "no private release"
            if account.private_epsilon is None
            else f"the private releases have epsilon {account.private_epsilon:.4g} at delta {account.delta:g}"
            + (" (simulated)" if account.simulated else "")
        )
        number = account.nonprivate_releases
        other = f"; {number} releases have no epsilon" if number else ""
        say(f"{shown(name)}: {private}{other}")


def _notes(summary: LedgerSummary) -> None:
    for note in summary.notes:
        OUT.print(f"note: {shown(note)}")
    if summary.restored:
        say("note: restored from a copy, so no private release is made until `securefl ledger confirm`")


@ledger_app.command("begin", epilog="Example: securefl ledger begin hospital-a.jsonl --key hospital-a.key")
def ledger_begin(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="NAME.jsonl to make; it must not exist.")],
    key: _Key,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Begin a silo's ledger, once: what left before, by another ledger, is not counted in it."""
    from securefl.ledger import Ledger

    check_out(path, file=True)
    identity, _ = open_identity(key, passphrase_file)
    card = Ledger.create(path, identity).card
    if as_json:
        print_json({"path": str(path), "name": card.name, "fingerprint": card.fingerprint})
        return
    say(f"{shown(path)}: the ledger of {card.name}; nothing has left yet")


@ledger_app.command(
    "rotate",
    epilog="Example: securefl ledger rotate hospital-a.jsonl --old-key old.key --new-key new.key",
)
def ledger_rotate(
    path: _Ledger,
    old_key: Annotated[Path, typer.Option(help="The private file whose keys it is under.")],
    new_key: Annotated[Path, typer.Option(help="The private file that `securefl rotate` made.")],
    old_passphrase_file: Annotated[Path | None, _passphrase("old")] = None,
    new_passphrase_file: Annotated[Path | None, _passphrase("new")] = None,
    as_json: Json = False,
) -> None:
    """Go on with a ledger under new keys; afterwards the old ones can append nothing."""
    from securefl.ledger import rotate_ledger

    old, _ = open_identity(old_key, old_passphrase_file)
    new, _ = open_identity(new_key, new_passphrase_file)
    changed = rotate_ledger(path, old, new)
    if as_json:
        print_json(
            {
                "path": str(path),
                "name": new.name,
                "old_fingerprint": old.card.fingerprint,
                "fingerprint": new.card.fingerprint,
                "changed": changed,
            }
        )
        return
    if not changed:
        say("Nothing to do: this was done already.")
    say(f"{shown(path)}: goes on under the key {new.card.short_fingerprint} of {new.name}")


@ledger_app.command("verify", epilog="Example: securefl ledger verify run/ledger/silo-1.jsonl")
def ledger_verify(path: _Ledger, as_json: Json = False) -> None:
    """Check the hash chain, every signature and the accounts; exit 4 names the first bad entry."""
    from securefl.ledger import verify_ledger

    summary = verify_ledger(path)
    if as_json:
        print_json(_document(summary))
        return
    say(f"{shown(path)}: {summary.entries} entries of {summary.name} verify")
    _contents(summary)
    _notes(summary)


@ledger_app.command("export", epilog="Example: securefl ledger export hospital-a.jsonl --out backup/may.copy")
def ledger_export(
    path: _Ledger,
    out: Annotated[Path, typer.Option(help="File to make.")],
    as_json: Json = False,
) -> None:
    """Verify a ledger and copy it, with its head record, into one file to keep elsewhere."""
    from securefl.ledger_copies import export_ledger

    check_out(out, file=True)
    summary = export_ledger(path, out)
    if as_json:
        print_json({**_document(summary), "out": str(out)})
        return
    say(f"{shown(out)}: a copy of {summary.entries} entries of {summary.name}")
    _notes(summary)


@ledger_app.command(
    "restore",
    epilog="Example: securefl ledger restore backup/may.copy --out hospital-a.jsonl --key hospital-a.key",
)
def ledger_restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A copy that `export` made.")],
    out: Annotated[Path, typer.Option(help="NAME.jsonl to make; it must not exist.")],
    key: _Key,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Make a ledger of a copy; what left after the copy is unknown, so its whole budget counts as spent."""
    from securefl.ledger_copies import restore_ledger

    check_out(out, file=True)
    identity, _ = open_identity(key, passphrase_file)
    summary = restore_ledger(file, out, identity)
    if as_json:
        print_json({**_document(summary), "out": str(out)})
        return
    say(f"{shown(out)}: {summary.entries} entries of {summary.name}")
    _notes(summary)


@ledger_app.command(
    "confirm",
    epilog="Example: securefl ledger confirm hospital-a.jsonl --key hospital-a.key --head kept.head.json",
)
def ledger_confirm(
    path: _Ledger,
    key: _Key,
    head: Annotated[Path | None, typer.Option(help="The newest head record that was kept elsewhere.")] = None,
    receipt: Annotated[
        Path | None, typer.Option(help="The server's receipt for the last release in the copy.")
    ] = None,
    server: Annotated[Path | None, typer.Option(help="The card of the server that signed --receipt.")] = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Show how much had left before a ledger was restored, so that its budget can be used again."""
    from securefl.crypto.identity import Card
    from securefl.ledger_copies import confirm_ledger

    identity, _ = open_identity(key, passphrase_file)
    card = None if server is None else Card.load(server)
    summary = confirm_ledger(path, identity, head, receipt, card)
    if as_json:
        print_json(_document(summary))
        return
    say(f"{shown(path)}: confirmed; {summary.entries} entries of {summary.name}")
    _contents(summary)
    what = f"the head record {head}" if head is not None else f"the receipt {receipt}"
    say(
        f"This counts what had left by {shown(what)}. If anything left after that, its budget is not counted."
    )
    _notes(summary)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(ledger_app, name="ledger")
