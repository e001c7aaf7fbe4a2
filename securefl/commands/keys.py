"""`securefl keygen, rotate, revoke, trust`: the keys of a silo or a server, and whose cards it trusts.

A passphrase comes from a file or from a hidden prompt, never from the command line, where other users of the
machine would see it.
"""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securefl.console import Json, print_json, say, shown
from securefl.errors import UsageError
from securefl.files import check_out, make_folder, read_limited, write_new

if TYPE_CHECKING:
    from securefl.crypto.identity import Card, Identity

Key = Annotated[Path, typer.Argument(metavar="KEY", help="A private file that `keygen` or `rotate` wrote.")]
Store = Annotated[Path, typer.Option(help="Folder of the cards that you trust.")]
PassphraseFile = Annotated[
    Path | None, typer.Option(help="File with the passphrase of the key (mode 0600); else you are asked.")
]
trust_app = typer.Typer(no_args_is_help=True, help="The cards of others that you trust.")


def _ask(question: str, otherwise: str) -> str:
    """What the user types, hidden. Raises UsageError where nobody is there to type."""
    if not sys.stdin.isatty():
        raise UsageError(f"there is no terminal to ask on; {otherwise}")
    try:
        return getpass.getpass(question)
    except EOFError:
        fault = "nothing was entered"
    except UnicodeDecodeError:
        fault = "what was entered is not text in the terminal's encoding"
    raise UsageError(f"{fault}; {otherwise}")  # outside: the error above holds what was entered


def _ask_new(name: str) -> str:
    otherwise = "give --passphrase-file"
    first = _ask(f"Passphrase for the new key of {name}: ", otherwise)
    if _ask("The same again: ", otherwise) != first:
        raise UsageError("the two passphrases differ; nothing was written")
    return first


def open_identity(path: Path, passphrase_file: Path | None) -> tuple[Identity, bytes | None]:
    """A private file and the passphrase that opened it: from the file, or asked for where it needs one.

    Raises UsageError.
    """
    from securefl.crypto.identity import Identity
    from securefl.crypto.keyfiles import read_passphrase

    def prompt() -> str:
        return _ask(f"Passphrase of {path}: ", f"{path} is encrypted: give --passphrase-file")

    passphrase = None
    if passphrase_file is not None or Identity.is_encrypted(path):
        passphrase = read_passphrase(passphrase_file, prompt)
    return Identity.load(path, passphrase), passphrase


def _make_room(*paths: Path) -> None:
    """See that none of the files is there, before any is written, and make their folders. Raises UsageError.

    What is written then stays, whatever befalls the next: a key that somebody may use is never removed.
    """
    for path in paths:
        if os.path.lexists(path):
            raise UsageError(f"{path}: exists already and is not overwritten; choose another place")
    for path in paths:
        make_folder(path.parent)


def _left_identity(key: Path, name: str, ask: bool, passphrase_file: Path | None) -> tuple[Identity, bool]:
    """What a `keygen` left that ended before it wrote the card, and whether it is encrypted.

    Raises UsageError, also where another user could have put it there.
    """
    from securefl.crypto.identity import Identity
    from securefl.crypto.keyfiles import check_guarded

    try:
        check_guarded(key.parent.stat(), str(key.parent), "a folder of keys", private=False, folder=True)
        encrypted = Identity.is_encrypted(key)
        if ask and not encrypted:
            raise UsageError("it is not encrypted, though --passphrase was given")
        identity, _ = open_identity(key, passphrase_file)
        if identity.name != name:
            raise UsageError(f"it is the key of {identity.name}")
    except UsageError as error:
        raise UsageError(
            f"{key}: exists already and is not overwritten, and its missing card cannot be written: {error}"
        ) from None
    return identity, encrypted


def _show_identity(document: dict[str, Any], card: Card, as_json: bool) -> None:
    document |= {"fingerprint": card.fingerprint}
    if as_json:
        print_json(document)
        return
    if document.get("continued"):
        say("The private key was there without its card; no new one was made, and the card was written now.")
    closed = "encrypted" if document["encrypted"] else "not encrypted"
    say(f"Private key (keep it here): {shown(document['key'])} ({closed})")
    say(f"Public card (give it out):  {shown(document['card'])}")
    if "rotation" in document:
        say(f"Rotation (give it out):     {shown(document['rotation'])}")
    say(f"Fingerprint to compare:     {card.short_fingerprint}")
    say(f"Fingerprint for policies:   {card.fingerprint}")


def keygen(
    name: Annotated[str, typer.Argument(help="Name in the federation: a-z, 0-9, dot, dash, underscore.")],
    out: Annotated[
        Path, typer.Option(help="Folder for NAME.key (keep secret) and NAME.card.json (give out).")
    ],
    ask: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase that encrypts the private file.")
    ] = False,
    passphrase_file: Annotated[
        Path | None, typer.Option(help="File with that passphrase (mode 0600, at most 1 KiB).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a silo's or a server's identity: a private file (mode 0600) and a public card.

    Where the private file is there without its card, since an earlier run was ended in between, only the
    card is written.
    """
    from securefl.crypto.identity import Identity
    from securefl.crypto.keyfiles import read_passphrase

    if ask and passphrase_file is not None:
        raise UsageError("give --passphrase, which asks, or --passphrase-file, not both")
    check_out(out)
    identity = Identity.generate(name)  # refuses a bad name, before it becomes part of a path
    key, card = out / f"{name}.key", out / f"{name}.card.json"
    continued = os.path.lexists(key) and not os.path.lexists(card)
    if continued:
        identity, encrypted = _left_identity(key, name, ask, passphrase_file)
    else:
        passphrase, encrypted = None, ask or passphrase_file is not None
        if encrypted:
            passphrase = read_passphrase(passphrase_file, lambda: _ask_new(name))
        _make_room(key, card)
        identity.save(key, passphrase)
    write_new(card, identity.card.to_json())
    document = {
        "name": name,
        "key": str(key),
        "card": str(card),
        "encrypted": encrypted,
        "continued": continued,
    }
    _show_identity(document, identity.card, as_json)


def rotate(
    old_key: Key,
    out: Annotated[Path, typer.Option(help="Another folder, for the new key, card and NAME.rotation.json.")],
    passphrase_file: PassphraseFile = None,
    new_passphrase_file: Annotated[
        Path | None, typer.Option(help="File with the new key's passphrase; else it is that of the old key.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replace a key: a new identity of the same name, and the statement, signed by the old key, that says so.

    Give the statement to everybody who trusts the old card; they run `securefl trust apply`. Keep the old key
    until all have.
    """
    from securefl.crypto.identity import Identity
    from securefl.crypto.keyfiles import read_passphrase
    from securefl.crypto.statements import Rotation

    check_out(out)
    if out.resolve() == old_key.parent.resolve():
        raise UsageError(f"{out}: is the folder of the old key; choose another --out")
    old, passphrase = open_identity(old_key, passphrase_file)
    if new_passphrase_file is not None:
        passphrase = read_passphrase(new_passphrase_file, lambda: _ask_new(old.name))
    new = Identity.generate(old.name)
    statement = Rotation.make(old, new.card)
    key, card = out / f"{new.name}.key", out / f"{new.name}.card.json"
    rotation = out / f"{new.name}.rotation.json"
    _make_room(key, card, rotation)
    new.save(key, passphrase)
    write_new(card, new.card.to_json())
    write_new(rotation, statement.data)
    document = {
        "name": new.name,
        "key": str(key),
        "card": str(card),
        "rotation": str(rotation),
        "old_fingerprint": old.card.fingerprint,
        "encrypted": passphrase is not None,
    }
    _show_identity(document, new.card, as_json)


def revoke(
    key: Key,
    out: Annotated[Path, typer.Option(help="File for the revocation.")],
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Write the statement that a key is lost or stolen, signed by the key itself.

    Make it beforehand and keep it apart from the key: without the key it cannot be made. Who applies it never
    trusts that key again, nor a successor that the key has named until its fingerprint was compared anew.
    """
    from securefl.crypto.statements import Revocation

    check_out(out, file=True)
    identity, _ = open_identity(key, passphrase_file)
    statement = Revocation.make(identity)
    _make_room(out)
    write_new(out, statement.data)
    if as_json:
        print_json({"name": identity.name, "revocation": str(out), "fingerprint": identity.card.fingerprint})
        return
    say(f"Revocation of {identity.name}: {shown(out)}")
    say(f"Fingerprint:   {identity.card.short_fingerprint}")


def _read_out(card: Card) -> str:
    """The fingerprint as the user has it from the card's holder; it is not shown first. Raises UsageError."""
    if not sys.stdin.isatty():
        raise UsageError(
            "the fingerprint has to be compared: give --fingerprint as the card's holder reads it"
        )
    return str(typer.prompt(f"Fingerprint that the holder of {card.name} reads out (32 digits)", err=True))


@trust_app.command(
    "add",
    epilog='Example: securefl trust add hospital-a.card.json --store trusted --fingerprint "3f2a 09bc …"',
)
def trust_add(
    card_file: Annotated[Path, typer.Argument(metavar="CARD", help="NAME.card.json of somebody else.")],
    store: Store,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="As the card's holder reads it to you: 32 or 64 digits; else you are asked."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Trust a card whose fingerprint you have compared with its holder by another way, such as a call."""
    from securefl.crypto.identity import Card
    from securefl.crypto.trust import TrustStore

    card = Card.load(card_file)
    expected = _read_out(card) if fingerprint is None else fingerprint
    TrustStore.open(store, create=True).add(card, expected)
    if as_json:
        print_json({"name": card.name, "fingerprint": card.fingerprint, "store": str(store)})
        return
    say(f"{card.name} is trusted in {shown(store)}: {card.short_fingerprint}")


@trust_app.command("list", epilog="Example: securefl trust list --store trusted")
def trust_list(store: Store, as_json: Json = False) -> None:
    """Show whom you trust, and the keys that are never trusted again."""
    from securefl.crypto.identity import short_fingerprint
    from securefl.crypto.trust import TrustStore

    trusted = TrustStore.open(store)
    cards, retired = trusted.cards(), trusted.retired()
    if as_json:
        print_json(
            {
                "store": str(store),
                "cards": [{"name": name, "fingerprint": card.fingerprint} for name, card in cards.items()],
                "retired": [
                    {
                        "name": key.name,
                        "fingerprint": key.fingerprint,
                        "why": key.why,
                        "reason": key.reason,
                        "successor": key.successor,
                    }
                    for key in retired
                ],
            }
        )
        return
    for name, card in cards.items():
        say(f"trusted  {card.short_fingerprint}  {name}")
    for key in retired:
        why = {"rotation": "replaced by its holder", "revocation": "revoked by its holder"}.get(key.why)
        say(f"retired  {short_fingerprint(key.fingerprint)}  {key.name}: {shown(why or key.reason)}")
    if not cards:
        say(f"Nobody is trusted in {shown(store)}; `securefl trust add` adds a card.")


@trust_app.command("apply", epilog="Example: securefl trust apply hospital-a.rotation.json --store trusted")
def trust_apply(
    statement: Annotated[Path, typer.Argument(metavar="STATEMENT", help="A rotation or a revocation.")],
    store: Store,
    as_json: Json = False,
) -> None:
    """Act on a statement by a trusted key: trust its successor, or never trust it again."""
    from securefl.crypto.statements import MAX_STATEMENT
    from securefl.crypto.trust import TrustStore

    done = TrustStore.open(store).apply(read_limited(statement, MAX_STATEMENT), str(statement))
    if as_json:
        print_json(
            {
                "name": done.name,
                "statement": done.what,
                "changed": done.changed,
                "retired": done.retired,
                "fingerprint": done.card and done.card.fingerprint,
                "dropped": done.dropped and done.dropped.fingerprint,
            }
        )
        return
    if not done.changed:
        say(f"Nothing to do: this {done.what} of {done.name} was applied before.")
    if done.dropped is not None:
        dropped = done.dropped.short_fingerprint
        say(f"The successor that the revoked key had named is not trusted any more either: {dropped}")
    now = f"is trusted with the key {done.card.short_fingerprint}" if done.card else "is not trusted any more"
    say(f"{done.name} {now}")


@trust_app.command("revoke", epilog="Example: securefl trust revoke hospital-a --store trusted")
def trust_revoke(
    name: Annotated[str, typer.Argument(help="Whose key is never to be trusted again.")],
    store: Store,
    reason: Annotated[str, typer.Option(help="Why; kept in the store.")] = "by decision of the store's owner",
    as_json: Json = False,
) -> None:
    """Never trust the present key of NAME again, on your own word; a new card can be added later."""
    from securefl.crypto.trust import TrustStore

    card = TrustStore.open(store).revoke(name, reason)
    if as_json:
        print_json({"name": name, "retired": card.fingerprint, "reason": reason})
        return
    say(f"{name} is not trusted any more; its key {card.short_fingerprint} cannot be added again")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(epilog="Example: securefl keygen hospital-a --out keys")(keygen)
    app.command(epilog="Example: securefl rotate keys/hospital-a.key --out keys-2027")(rotate)
    app.command(epilog="Example: securefl revoke keys/hospital-a.key --out safe/hospital-a.revocation.json")(
        revoke
    )
    app.add_typer(trust_app, name="trust")
