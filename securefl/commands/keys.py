"""`securefl keygen`: the keys of a silo or a server, and whose cards it trusts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from securefl.console import Json, print_json, say, shown
from securefl.errors import UsageError
from securefl.files import check_out


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
        print_json(
            {"name": name, "key": str(key), "card": str(card), "fingerprint": identity.card.fingerprint}
        )
        return
    say(f"Private key (keep it here): {shown(key)}")
    say(f"Public card (give it out):  {shown(card)}")
    say(f"Fingerprint to compare:     {identity.card.short_fingerprint}")
    say(f"Fingerprint for policies:   {identity.card.fingerprint}")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(epilog="Example: securefl keygen hospital-a --out keys")(keygen)
