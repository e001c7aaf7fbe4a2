"""Writes the vectors of this folder that are missing: `python -m tests.vectors.make`.

No test needs it. ML-DSA signatures and sealings are random, so the bytes differ from one making to the next,
and what is published stays: a file that exists is left as it is. Seeds, clock and content are fixed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from securefl.crypto.envelope import seal
from securefl.crypto.identity import Identity
from securefl.messages import SUITE, Header
from securefl.release import canonical_json
from tests.mutants import Layout, forge, sign
from tests.vectors import make_bodies, make_ledgers, make_masking, make_rounds, make_statements
from tests.vectors.people import ALICE, AMY, BOB, CAROL, EVE, OTHER_ALICE, identities

FOLDER = Path(__file__).parent
RUN = "0123456789abcdef" * 2
ROSTER = ["alice", "bob", "carol"]
MAX_BODY = 768 * 2**20 + 16


def _party(one: Identity) -> dict[str, str]:
    return {"name": one.name, "key": one.card.fingerprint}


def _header(*to: Identity, sender: Identity = ALICE, **fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "suite": SUITE,
        "run": RUN,
        "round": 2,
        "step": "share",
        "sender": _party(sender),
        "recipients": [_party(one) for one in to],
        "kind": "centroids",
        "sequence": 1,
        "time": 1_760_000_000,
        **fields,
    }


def _parts(header: Mapping[str, Any] | bytes, *to: Identity, body: bytes = b"ok") -> Layout:
    """A sealed envelope, to Bob by default, without signatures; header and body decide its content key."""
    encoded = header if isinstance(header, bytes) else canonical_json(header)
    rng = random.Random(hashlib.sha256(encoded + body).digest())
    whole = Layout.of(forge(rng, encoded, body, [one.card for one in to or (BOB,)], ALICE))
    return replace(whole, signatures=b"")


def _text(data: bytes) -> dict[str, str]:
    return {"envelope": base64.b64encode(data).decode()}


class _Cases:
    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def add(
        self, name: str, error: str | None, why: str, data: bytes | Mapping[str, Any], **more: Any
    ) -> None:
        """data: an envelope, or what to do with another one. more: reader, roster, body."""
        content = _text(data) if isinstance(data, bytes) else dict(data)
        fields = {"reader": "bob", "roster": ROSTER, "error": error, **more}
        self.made.append({"name": name, "why": why, **fields, **content})

    def header(self, name: str, error: str, why: str, header: Mapping[str, Any] | bytes) -> None:
        self.add(name, error, f"Signed and sealed by an enrolled sender, but {why}.", _signed(header))


def _signed(header: Mapping[str, Any] | bytes, *to: Identity) -> bytes:
    return sign(_parts(header, *to).joined(), ALICE)


def _forms(cases: _Cases, good: bytes, pair: bytes) -> None:
    """Step 1, the layout."""
    start = 12 + int.from_bytes(good[8:12], "big")
    length = start + 34 + 1170  # where the length of the ciphertext lies, with one recipient
    bad = "MalformedEnvelope"
    cases.add("no-bytes", bad, "Nothing is no envelope.", {"of": "good", "truncate": 0})
    cases.add("other-magic", bad, "The first byte is not S.", {"of": "good", "flip": [0, 5]})
    cases.add("ends-in-header", bad, "Cut inside the header.", {"of": "good", "truncate": 100})
    cases.add("ends-in-key", bad, "Cut inside a sealed key.", {"of": "good", "truncate": start + 500})
    cases.add("one-byte-short", bad, "Cut before its last byte.", {"of": "good", "truncate": len(good) - 1})
    cases.add("one-byte-more", bad, "A byte follows the signatures.", {"of": "good", "append": "00"})
    extra = sign(_parts(_header(BOB)).joined() + b"\0", ALICE)
    cases.add(
        "one-byte-more-signed", bad, "A byte between ciphertext and signatures, which both cover it.", extra
    )
    edges = (
        (
            "header-length-limit",
            8,
            (65_536).to_bytes(4, "big"),
            bad,
            "The header may have that length; it ends",
        ),
        (
            "header-length-above",
            8,
            (65_537).to_bytes(4, "big"),
            "TooLarge",
            "The header is declared too long",
        ),
        ("header-length-huge", 8, b"\xff" * 4, "TooLarge", "The header is declared far too long"),
        (
            "body-length-limit",
            length,
            MAX_BODY.to_bytes(8, "big"),
            bad,
            "The body may have that length; it ends",
        ),
        ("body-length-above", length, (MAX_BODY + 1).to_bytes(8, "big"), "TooLarge", "The body is too long"),
        ("body-length-huge", length, b"\xff" * 8, "TooLarge", "The body is declared far too long"),
    )
    for name, at, number, error, why in edges:
        change = {"of": "good", "truncate": at, "append": number.hex()}
        cases.add(name, error, f"{why}; refused before anything of that size is read or taken.", change)
    parts = _parts(_header(BOB))
    short = replace(parts, ciphertext=parts.ciphertext[:15])
    cases.add("no-room-for-a-tag", bad, "15 bytes of ciphertext, signed.", sign(short.joined(), ALICE))
    one_key = replace(_parts(_header(BOB, CAROL), BOB, CAROL), keys=parts.keys)
    cases.add("one-key-for-two", bad, "Two recipients and one key, signed.", sign(one_key.joined(), ALICE))
    two = replace(parts, keys=parts.keys * 2)
    cases.add("two-keys-for-one", bad, "One recipient and two keys, signed.", sign(two.joined(), ALICE))
    info = b"".join(
        len(part).to_bytes(4, "big") + part
        for part in (b"securefl/1 key", parts.header, bytes.fromhex(BOB.card.fingerprint))
    )
    small = replace(parts, keys=(BOB.card.seal_key(bytes(31), info),))
    cases.add(
        "short-content-key",
        bad,
        "A key of 31 bytes is sealed, so the sealed one has 1167; signed.",
        sign(small.joined(), ALICE),
    )
    at = 12 + int.from_bytes(pair[8:12], "big") + 34
    cases.add(
        "key-length", bad, "The first key is declared 32,768 bytes longer.", {"of": "pair", "flip": [at, 7]}
    )


def _headers(cases: _Cases) -> None:
    """Step 1, the header."""
    good, unsupported, bad = _header(BOB), "UnsupportedEnvelope", "MalformedEnvelope"
    plain = canonical_json(good)
    cases.header("version-2", unsupported, "of a version to come", {**good, "version": 2})
    other = SUITE.replace("aes256gcm", "chacha20poly1305")
    cases.header(
        "other-suite", unsupported, "of a suite that this version does not have", {**good, "suite": other}
    )
    cases.header("other-kind", unsupported, "of a kind that there is not", {**good, "kind": "gradients"})
    both = {**good, "version": 2, "round": 0}
    cases.header("version-2-round-0", unsupported, "of version 2, and of round 0, which comes after", both)
    cases.header("not-an-object", bad, "its header is a list", b"[]")
    cases.header("space", bad, "a space follows the first colon", plain.replace(b":", b": ", 1))
    unsorted = json.dumps(dict(sorted(good.items(), reverse=True)), separators=(",", ":")).encode()
    cases.header("unsorted", bad, "its keys are not in order", unsorted)
    twice = plain.replace(b'"round":2', b'"round":2,"round":2')
    cases.header("key-twice", bad, "`round` is there twice, with the same value", twice)
    cases.header("escape", bad, "a letter is written as an escape", plain.replace(b"alice", b"\\u0061lice"))
    cases.header("float", bad, "a whole number is written 2.0", plain.replace(b'"round":2', b'"round":2.0'))
    cases.header("another-field", bad, "it has a field more", {**good, "note": ""})
    no_time = {key: value for key, value in good.items() if key != "time"}
    cases.header("no-time", bad, "a field is missing", no_time)
    cases.header(
        "newline-in-step", bad, "a newline ends its `step`, which `$` overlooks", {**good, "step": "share\n"}
    )
    cases.header("capital-run", bad, "its run has a capital digit", {**good, "run": RUN[:-1] + "F"})
    cases.header("round-0", bad, "rounds begin at 1", {**good, "round": 0})
    cases.header("sequence-above", bad, "its sequence is 2^53 + 1", {**good, "sequence": 2**53 + 1})
    nobody = sign(replace(_parts(_header()), keys=()).joined(), ALICE)
    cases.add("no-recipients", bad, "Signed, but to nobody.", nobody)
    doubled = _signed(_header(BOB, BOB), BOB, BOB)
    cases.add("recipient-twice", bad, "Bob twice, with a sealed key for each; signed.", doubled)
    namesake = _header(BOB, recipients=[_party(BOB), {**_party(CAROL), "name": "bob"}])
    cases.add("name-twice", bad, "Two keys under one name; signed.", _signed(namesake, BOB, CAROL))


def _senders(cases: _Cases, good: bytes, pair: bytes) -> None:
    """Steps 2 to 4."""
    stranger = sign(_parts(_header(BOB, sender=EVE)).joined(), EVE)
    cases.add("stranger", "UnknownSender", "Rightly signed by Eve, who is not enrolled.", stranger)
    why = "Eve again, with a broken signature: who sent it is asked first."
    cases.add("stranger-unsigned", "UnknownSender", why, {"of": "stranger", "flip": [len(stranger) - 1, 0]})
    other = sign(_parts(_header(BOB, sender=OTHER_ALICE)).joined(), OTHER_ALICE)
    why = "The name of an enrolled sender, with other keys, which sign it."
    cases.add("other-key", "UnknownSender", why, other)
    why = "The same; the reader who has enrolled these other keys takes it."
    cases.add("other-key-enrolled", None, why, {"of": "other-key"}, roster=["other-alice"], body=b"ok".hex())
    crossed = _header(BOB, sender=ALICE)
    crossed["sender"] = {"name": "carol", "key": ALICE.card.fingerprint}
    why = "The key of one enrolled sender under the name of another."
    cases.add("crossed", "UnknownSender", why, _signed(crossed))

    classical, lattice = len(good) - 3309 - 1, len(good) - 1
    why = "Ed25519 broken, ML-DSA-65 valid: one is not enough."
    cases.add("broken-ed25519", "BadSignature", why, {"of": "good", "flip": [classical - 20, 0]})
    why = "ML-DSA-65 broken, Ed25519 valid: one is not enough."
    cases.add("broken-mldsa65", "BadSignature", why, {"of": "good", "flip": [lattice - 2000, 0]})
    unsigned = _parts(_header(BOB)).joined()
    digest = hashlib.sha256(unsigned).digest()
    for name, context, by in (
        ("context", b"securefl/1 receipt", ALICE),
        ("impostor", b"securefl/1 envelope", EVE),
        ("twin", b"securefl/1 envelope", AMY),
    ):
        pairs = by.sign(context, digest)
        why = {
            "context": "Both signatures are Alice's, in the context of a receipt.",
            "impostor": "Says that Alice sent it; both signatures are Eve's.",
            "twin": "The Ed25519 key is Alice's, the ML-DSA-65 key another's: a broken classical half.",
        }[name]
        cases.add(f"signed-{name}", "BadSignature", why, unsigned + pairs.ed25519 + pairs.mldsa65)
    start = 12 + int.from_bytes(pair[8:12], "big")
    for name, at in (("commitment", start), ("key", start + 34 + 500), ("tag", len(pair) - 3374)):
        why = f"A bit of the {name} is flipped: the signatures are checked before anything is opened."
        cases.add(f"flipped-{name}", "BadSignature", why, {"of": "pair", "flip": [at, 0]})
    why = "A broken signature, and not for Carol: the signatures come first."
    change = {"of": "good", "flip": [lattice, 0]}
    cases.add("flipped-not-for-me", "BadSignature", why, change, reader="carol")

    cases.add("not-for-me", "WrongRecipient", "Carol reads what is for Bob.", {"of": "good"}, reader="carol")
    why = "Its own sender is no recipient."
    cases.add("not-for-its-sender", "WrongRecipient", why, {"of": "pair"}, reader="alice")
    old = _header(BOB, recipients=[{**_party(BOB), "key": CAROL.card.fingerprint}])
    why = "To Bob by name, under a fingerprint that is not his, though the key is sealed to him."
    cases.add("my-name-other-key", "WrongRecipient", why, _signed(old))


def _contents(cases: _Cases) -> None:
    """Step 5: what only the sender can do wrong, so all of it is signed."""
    header = _header(BOB)
    parts, foreign = _parts(header), _parts(_header(BOB, round=3))
    other = _parts(header, body=b"no")  # the same header under another content key
    to_carol = _parts(header, CAROL)
    spoilt = parts.ciphertext[:-1] + bytes([parts.ciphertext[-1] ^ 1])
    for name, why, layout in (
        (
            "other-commitment",
            "The commitment is that of another key.",
            replace(parts, commitment=other.commitment),
        ),
        (
            "key-of-other-header",
            "The key was sealed under the header of round 3.",
            replace(parts, keys=foreign.keys),
        ),
        ("key-for-another", "The key was sealed to Carol's keys.", replace(parts, keys=to_carol.keys)),
        (
            "other-key-inside",
            "The sealed key opens, to another than the committed one.",
            replace(parts, keys=other.keys),
        ),
        ("broken-tag", "The body's tag is broken.", replace(parts, ciphertext=spoilt)),
        (
            "body-under-other-header",
            "The body was encrypted for round 3.",
            replace(parts, ciphertext=foreign.ciphertext),
        ),
        (
            "other-body",
            "Key and commitment agree; the body is under another key.",
            replace(parts, ciphertext=other.ciphertext),
        ),
    ):
        cases.add(name, "DecryptionFailed", f"{why} Signed again.", sign(layout.joined(), ALICE))


def envelope() -> dict[str, Any]:
    body = bytes(range(256))
    header = Header.model_validate_json(canonical_json(_header(BOB, CAROL)))
    people = {label: dict(one) for label, one in identities(ALICE, BOB, CAROL).items()}
    for one in people.values():
        del one["name"]
    return {
        "format": "securefl envelope, version 1 (securefl/crypto/WIRE.md)",
        "identities": people,
        "header": header.model_dump(mode="json"),
        "body": body.hex(),
        **_text(seal(body, header, ALICE, [BOB.card, CAROL.card])),
    }


def envelope_refusals() -> dict[str, Any]:
    cases = _Cases()
    good, pair = _signed(_header(BOB)), _signed(_header(BOB, CAROL), BOB, CAROL)
    empty = sign(_parts(_header(BOB), BOB, body=b"").joined(), ALICE)
    cases.add("good", None, "Opens; most of the others are this one, altered.", good, body=b"ok".hex())
    cases.add("pair", None, "Opens for its second recipient.", pair, reader="carol", body=b"ok".hex())
    cases.add("empty-body", None, "The smallest: a ciphertext of 16 bytes.", empty, body="")
    _forms(cases, good, pair)
    _headers(cases)
    _senders(cases, good, pair)
    _contents(cases)
    return {
        "format": "securefl envelopes, version 1: which open, and how the others are refused",
        "identities": identities(ALICE, BOB, CAROL, EVE, OTHER_ALICE),
        "cases": cases.made,
    }


def _write(name: str, value: Any) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value, indent=1).encode() + b"\n"
    with (FOLDER / name).open("xb") as file:
        file.write(data)


def main() -> None:
    for name, make in (
        ("envelope-1.json", envelope),
        ("envelope-refusals-1.json", envelope_refusals),
        ("body-1.json", make_bodies.bodies),
        ("statements-1.json", make_statements.statements),
        ("masking-1.json", make_masking.derivations),
        ("masked-round-1.json", make_rounds.masked_round),
    ):
        if not (FOLDER / name).exists():
            _write(name, make())
    if not (FOLDER / "ledger-1.jsonl").exists():
        for name, value in make_ledgers.ledger().items():
            _write(name, value)


if __name__ == "__main__":
    main()
