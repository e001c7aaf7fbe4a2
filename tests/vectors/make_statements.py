"""The content of statements-1.json: cards, rotations, revocations, receipts and identity files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from securefl.crypto.identity import Identity
from securefl.crypto.statements import Revocation, Rotation
from securefl.receipt import make_receipt
from tests.ledgers import signed
from tests.vectors.people import ALICE, BOB, MALLORY, OTHER_ALICE, SERVER, identities, seeds_of

PASSPHRASE = "a passphrase of the vectors"
RUN = "0123456789abcdef" * 2
ROTATION, REVOCATION, RECEIPT = b"securefl/1 rotation", b"securefl/1 revocation", b"securefl/1 receipt"


def _card(one: Identity) -> dict[str, Any]:
    return dict(json.loads(one.card.to_json()))


def _saved(passphrase: bytes | None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "alice.key.json"
        ALICE.save(path, passphrase)
        return path.read_text()


def _half(text: str, half: str) -> tuple[str, str]:
    """The first letters of the last signature of that half, and others."""
    marker = f'"{half}":"'
    at = text.rindex(marker)
    old = text[at : at + len(marker) + 12]
    return old, marker + old[len(marker) :][::-1]


class _Cases:
    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self._texts: dict[str, str] = {}

    def add(self, name: str, what: str, signer: str, error: str | None, why: str, data: bytes | str) -> str:
        text = data if isinstance(data, str) else data.decode("ascii")
        self._texts[name] = text
        fields = {"name": name, "what": what, "signer": signer, "error": error, "why": why, "text": text}
        self.made.append(fields)
        return text

    def alter(self, name: str, of: str, error: str, why: str, *swap: str, **more: Any) -> None:
        """swap: the text to replace, which is there once, and its replacement; or nothing."""
        if swap and self._texts[of].count(swap[0]) != 1:
            raise ValueError(f"{name}: the text to replace is there {self._texts[of].count(swap[0])} times")
        base = next(case for case in self.made if case["name"] == of)
        kept: dict[str, Any] = {key: base[key] for key in ("what", "signer", "passphrase") if key in base}
        case: dict[str, Any] = {"name": name, **kept, "error": error, "why": why, "of": of, **more}
        if swap:
            case["replace"] = list(swap)
        self.made.append(case)

    def halves(self, of: str) -> None:
        for half in ("ed25519", "mldsa65"):
            why = f"The {half} signature is another; one that holds is not enough."
            self.alter(f"{of}-{half}", of, "BadSignature", why, *_half(self._texts[of], half))

    def spelling(self, of: str, member: str) -> None:
        """One document has one byte string."""
        bad = "UsageError"
        self.alter(f"{of}-space", of, bad, "A space after a colon.", f'"{member}":', f'"{member}": ')
        self.alter(f"{of}-no-newline", of, bad, "The newline at the end is missing.", "}\n", "}")
        self.alter(f"{of}-two-newlines", of, bad, "A newline too many.", "}\n", "}\n\n")
        self.alter(f"{of}-key-twice", of, bad, "A member occurs twice.", '"format":', '"format":"","format":')


def _cards(cases: _Cases) -> None:
    cases.add("card", "card", "alice", None, "Alice's card.", ALICE.card.to_json())
    card = _card(ALICE)
    cases.halves("card")
    bad = "BadSignature"
    cases.alter("card-renamed", "card", bad, "Another name.", '"name":"alice"', '"name":"mallory"')
    for half in ("ed25519", "mldsa65", "mlkem768", "x25519"):
        key = getattr(BOB.card, half)
        why = f"Bob's {half} key in Alice's card."
        cases.alter(f"card-other-{half}", "card", bad, why, card[half], key)
    wrong = "UsageError"
    cases.alter("card-version-2", "card", wrong, "A version to come.", '"version":1', '"version":2')
    cases.alter("card-field", "card", wrong, "A field more.", '"version":1', '"version":1,"x":1')
    cases.alter(
        "card-no-padding", "card", wrong, "Base64 without its padding.", card["x25519"], card["x25519"][:-1]
    )
    # 32 bytes end in a letter of which two bits are unused.
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    loose = card["x25519"][:-2] + letters[letters.index(card["x25519"][-2]) + 1] + "="
    cases.alter(
        "card-loose-bits",
        "card",
        wrong,
        "The same key in base64 that is not canonical.",
        card["x25519"],
        loose,
    )
    del card["signature"]
    cases.add(
        "card-unsigned",
        "card",
        "alice",
        wrong,
        "No signature.",
        json.dumps(card, separators=(",", ":")) + "\n",
    )


def _statements(cases: _Cases) -> None:
    bad, wrong = "BadSignature", "UsageError"
    rotation = Rotation.make(ALICE, OTHER_ALICE.card)
    content = {"format": "securefl.rotation/1", "old": ALICE.card.fingerprint, "card": _card(OTHER_ALICE)}

    def rotations(name: str, error: str, why: str, data: bytes) -> None:
        cases.add(f"rotation-{name}", "rotation", "alice", error, why, data)

    cases.add("rotation", "rotation", "alice", None, "Alice names her next card.", rotation.data)
    cases.halves("rotation")
    cases.spelling("rotation", "old")
    fingerprint = ALICE.card.fingerprint
    why = "Says that another key ends."
    cases.alter("rotation-other-old", "rotation", bad, why, fingerprint, BOB.card.fingerprint)
    cases.alter("rotation-asked-of-bob", "rotation", bad, "Held against Bob's card.", signer="bob")
    rotations("context", bad, "Signed in the context of a revocation.", signed(content, ALICE, REVOCATION))
    rotations("by-the-new", bad, "Signed by the new keys.", signed(content, OTHER_ALICE, ROTATION))
    renamed = {**content, "card": _card(MALLORY)}
    rotations("renamed", wrong, "To a card of another name, signed.", signed(renamed, ALICE, ROTATION))
    kept = Identity("alice", {**seeds_of("other-alice"), "x25519": seeds_of("alice")["x25519"]})
    rotations(
        "one-key-kept",
        wrong,
        "One of four keys stays, signed.",
        signed({**content, "card": _card(kept)}, ALICE, ROTATION),
    )
    rotations("more", wrong, "A member more, signed.", signed({**content, "reason": "lost"}, ALICE, ROTATION))
    card = _card(OTHER_ALICE)
    card["signature"] = _card(ALICE)["signature"]
    broken = signed({**content, "card": card}, ALICE, ROTATION)
    rotations("card-unproven", bad, "The new card's own signature is another's; signed by the old.", broken)

    revocation = Revocation.make(ALICE)
    lost = {"format": "securefl.revocation/1", "card": _card(ALICE)}
    cases.add(
        "revocation", "revocation", "alice", None, "Alice says that her keys are lost.", revocation.data
    )
    cases.halves("revocation")
    cases.spelling("revocation", "card")
    for name, error, why, data in (
        ("context", bad, "Signed in the context of a rotation.", signed(lost, ALICE, ROTATION)),
        (
            "of-another",
            bad,
            "Bob's card, signed by Alice.",
            signed({**lost, "card": _card(BOB)}, ALICE, REVOCATION),
        ),
        ("more", wrong, "A member more, signed.", signed({**lost, "reason": "lost"}, ALICE, REVOCATION)),
    ):
        cases.add(f"revocation-{name}", "revocation", "alice", error, why, data)


def _receipts(cases: _Cases) -> None:
    bad, wrong = "BadSignature", "UsageError"
    fields: dict[str, Any] = {
        "run": RUN,
        "silo": BOB.card.fingerprint,
        "sequence": 7,
        "envelope_sha256": "5" * 64,
        "time": 1_760_000_000,
    }
    content = {"format": "securefl.receipt/1", **fields}
    good = make_receipt(SERVER, **fields)
    cases.add("receipt", "receipt", "server", None, "The server has admitted Bob's envelope.", good)
    cases.halves("receipt")
    cases.spelling("receipt", "run")
    cases.alter("receipt-time", "receipt", bad, "Another time.", '"time":1760000000', '"time":1760000001')
    for name, error, why, data in (
        (
            "context",
            bad,
            "Signed in the context of a ledger's line.",
            signed(content, SERVER, b"securefl/1 ledger"),
        ),
        ("by-another", bad, "Signed by Alice.", signed(content, ALICE, RECEIPT)),
        (
            "capital",
            wrong,
            "Hexadecimal digits are small; signed.",
            signed({**content, "run": RUN.upper()}, SERVER, RECEIPT),
        ),
        (
            "sequence-0",
            wrong,
            "Sequences begin at 1; signed.",
            signed({**content, "sequence": 0}, SERVER, RECEIPT),
        ),
        ("float-time", wrong, "Whole seconds; signed.", signed({**content, "time": 1.76e9}, SERVER, RECEIPT)),
        ("more", wrong, "A member more, signed.", signed({**content, "note": ""}, SERVER, RECEIPT)),
        (
            "version-2",
            wrong,
            "A format to come, signed.",
            signed({**content, "format": "securefl.receipt/2"}, SERVER, RECEIPT),
        ),
    ):
        cases.add(f"receipt-{name}", "receipt", "server", error, why, data)


def _identities(cases: _Cases) -> None:
    wrong = "UsageError"
    text = cases.add(
        "encrypted", "identity", "alice", None, "Alice's private keys.", _saved(PASSPHRASE.encode())
    )
    document = json.loads(text)
    cases.made[-1]["passphrase"] = PASSPHRASE
    why = "Another passphrase."
    cases.alter("encrypted-passphrase", "encrypted", wrong, why, passphrase="another")
    cases.alter("encrypted-renamed", "encrypted", wrong, "Another name, in clear.", '"alice"', '"mallory"')
    sealed = document["ciphertext"]
    other = ("B" if sealed[0] == "A" else "A") + sealed[1:]
    cases.alter(
        "encrypted-altered", "encrypted", wrong, "A byte of the ciphertext is another.", sealed, other
    )
    why = "The cost of the derivation belongs to the format; refused before it is paid."
    cases.alter("encrypted-cost", "encrypted", wrong, why, '"name"', '"n":1024,"name"')
    cases.alter(
        "encrypted-salt", "encrypted", wrong, "The salt is short.", document["salt"], document["salt"][4:]
    )
    plain = _saved(None)
    cases.add("plain", "identity", "alice", None, "Without a passphrase.", plain)
    cases.made[-1]["passphrase"] = None
    why = "A passphrase is given for a file that has none."
    cases.alter("plain-passphrase", "plain", wrong, why, passphrase=PASSPHRASE)
    mine, theirs = ALICE.card.fingerprint, BOB.card.fingerprint
    cases.alter("plain-fingerprint", "plain", wrong, "The seeds are of another fingerprint.", mine, theirs)
    cases.alter("plain-renamed", "plain", wrong, "A name belongs to the fingerprint.", '"alice"', '"mallory"')


def statements() -> dict[str, Any]:
    cases = _Cases()
    _cards(cases)
    _statements(cases)
    _receipts(cases)
    _identities(cases)
    return {
        "format": "securefl cards, statements, receipts and identity files, version 1",
        "identities": identities(ALICE, OTHER_ALICE, BOB, SERVER),
        "cards": {"alice": _card(ALICE), "bob": _card(BOB), "server": _card(SERVER)},
        "cases": cases.made,
    }
