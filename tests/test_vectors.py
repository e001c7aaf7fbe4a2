"""The published vectors, read by this package and by the second reader of `tests/vectors/reader.py`.

The files are only read here. One that fails shows a change of the format: it is never written anew to pass.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securefl import errors
from securefl.crypto.envelope import open_, verify
from securefl.crypto.identity import Card, Identity
from securefl.crypto.statements import Revocation, Rotation, parse_statement
from securefl.errors import LedgerCorrupt
from securefl.ledger import verify_ledger
from securefl.receipt import read_receipt
from securefl.release import decode
from tests.vectors import reader
from tests.vectors.files import FOLDER, Case, cases_of, load, refused, seeds_of

PAIR, ENVELOPES, BODIES = load("envelope-1.json"), load("envelope-refusals-1.json"), load("body-1.json")
STATEMENTS, LEDGERS = load("statements-1.json"), load("ledger-refusals-1.json")


@pytest.mark.parametrize("file", [PAIR, ENVELOPES, STATEMENTS, LEDGERS], ids=lambda file: file["format"])
def test_seeds_give_the_fingerprints(file: dict[str, Any]) -> None:
    for label, seeds in seeds_of(file).items():
        one = file["identities"][label]
        name = one.get("name", label)
        assert Identity(name, seeds).card.fingerprint == one["fingerprint"]
        assert reader.fingerprint(name, reader.public(seeds)) == one["fingerprint"]


@pytest.mark.parametrize("file", [ENVELOPES, BODIES, STATEMENTS, LEDGERS], ids=lambda file: file["format"])
def test_names_are_used_once_and_every_case_says_why(file: dict[str, Any]) -> None:
    names = [case["name"] for case in file["cases"]]
    assert len(set(names)) == len(names)
    assert all(case["why"].endswith(".") for case in file["cases"])
    assert {case["error"] is None for case in file["cases"]} == {True, False}


# --- envelopes

SEEDS = seeds_of(ENVELOPES)
PEOPLE = {label: Identity(ENVELOPES["identities"][label]["name"], seeds) for label, seeds in SEEDS.items()}
KNOWN = {case["name"]: case for case in ENVELOPES["cases"]}


def envelope_of(case: Case) -> bytes:
    if "of" not in case:
        return base64.b64decode(case["envelope"], validate=True)
    data = bytearray(envelope_of(KNOWN[case["of"]]))
    del data[case.get("truncate", len(data)) :]
    data += bytes.fromhex(case.get("append", ""))
    if "flip" in case:
        byte, bit = case["flip"]
        data[byte] ^= 1 << bit
    return bytes(data)


def test_the_first_envelope_opens() -> None:
    people = {name: Identity(name, seeds) for name, seeds in seeds_of(PAIR).items()}
    data = base64.b64decode(PAIR["envelope"])
    verified = verify(data, {name: one.card for name, one in people.items()})
    assert verified.header.model_dump(mode="json") == PAIR["header"]
    roster = {name: reader.public(seeds) for name, seeds in seeds_of(PAIR).items()}
    for name in ("bob", "carol"):
        assert open_(verified, people[name]).hex() == PAIR["body"]
        assert reader.open_envelope(data, roster, name, seeds_of(PAIR)[name]).hex() == PAIR["body"]
    with pytest.raises(errors.WrongRecipient):
        open_(verified, people["alice"])


@cases_of(ENVELOPES)
def test_envelopes(case: Case) -> None:
    data = envelope_of(case)
    roster = {PEOPLE[label].name: PEOPLE[label].card for label in case["roster"]}
    if case["error"] is None:
        assert open_(verify(data, roster), PEOPLE[case["reader"]]).hex() == case["body"]
    else:
        with refused(case):
            open_(verify(data, roster), PEOPLE[case["reader"]])


@cases_of(ENVELOPES)
def test_envelopes_read_by_the_second_reader(case: Case) -> None:
    roster = {PEOPLE[label].name: reader.public(SEEDS[label]) for label in case["roster"]}
    me = PEOPLE[case["reader"]].name
    try:
        found = reader.open_envelope(envelope_of(case), roster, me, SEEDS[case["reader"]]).hex()
    except reader.Refusal as refusal:
        found = str(refusal)
    assert found == (case["error"] or case["body"])


# --- bodies

_TYPES = {"F32": "<f4", "I64": "<i8", "U8": "u1"}


@cases_of(BODIES)
def test_bodies(case: Case) -> None:
    data = bytes.fromhex(case["body"])
    if case["error"] is not None:
        with refused(case):
            decode(data)
        return
    body = decode(data)
    assert (body.kind, body.document) == (case["kind"], json.loads(case["document"]))
    assert set(body.tensors) == set(case["tensors"])
    for name, one in case["tensors"].items():
        array = body.tensors[name]
        assert (array.dtype, list(array.shape)) == (np.dtype(_TYPES[one["dtype"]]), one["shape"])
        assert array.tobytes().hex() == one["data"]


@cases_of(BODIES)
def test_bodies_read_by_the_second_reader(case: Case) -> None:
    data = bytes.fromhex(case["body"])
    if case["error"] is not None:
        with pytest.raises(reader.Refusal, match=f"^{case['error']}$"):
            reader.read_body(data)
        return
    kind, document, tensors = reader.read_body(data)
    assert (kind, document) == (case["kind"], json.loads(case["document"]))
    read = {name: {"dtype": t, "shape": s, "data": raw.hex()} for name, (t, s, raw) in tensors.items()}
    assert read == case["tensors"]
    assert reader.write_body(kind, document, tensors) == data


# --- cards, statements, receipts, identity files

TEXTS = {case["name"]: case["text"] for case in STATEMENTS["cases"] if "text" in case}


def text_of(case: Case) -> bytes:
    text: str = case["text"] if "of" not in case else TEXTS[case["of"]]
    if "replace" in case:
        old, new = case["replace"]
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text.encode("ascii")


def read(case: Case, folder: Path) -> str:
    """The fingerprint or hash that a text of the case's kind is about."""
    data, card = text_of(case), Card.model_validate(STATEMENTS["cards"][case["signer"]])
    match case["what"]:
        case "card":
            return Card.from_json(data, "a card").fingerprint
        case "receipt":
            return read_receipt(data, card).silo
        case "identity":
            file = folder / "alice.key.json"
            file.write_bytes(data)
            file.chmod(0o600)
            passphrase = case["passphrase"]
            return Identity.load(file, passphrase and passphrase.encode()).card.fingerprint
    statement = parse_statement(data, "a statement")
    if isinstance(statement, Rotation):
        statement.verify(card)
    assert isinstance(statement, {"rotation": Rotation, "revocation": Revocation}[case["what"]])
    return statement.card.fingerprint


ABOUT = {
    "card": "alice",
    "rotation": "other-alice",
    "revocation": "alice",
    "receipt": "bob",
    "identity": "alice",
}


@cases_of(STATEMENTS)
def test_statements(case: Case, tmp_path: Path) -> None:
    if case["error"] is None:
        assert read(case, tmp_path) == STATEMENTS["identities"][ABOUT[case["what"]]]["fingerprint"]
    else:
        with refused(case):
            read(case, tmp_path)


def test_statements_read_by_the_second_reader() -> None:
    keys = {label: reader.card_keys(card) for label, card in STATEMENTS["cards"].items()}
    for label, one in keys.items():
        assert one == reader.public(seeds_of(STATEMENTS)[label])
    alice, bob, successor = (STATEMENTS["identities"][label] for label in ("alice", "bob", "other-alice"))

    rotation = reader.read_document(TEXTS["rotation"].encode(), keys["alice"], b"securefl/1 rotation")
    assert rotation["old"] == alice["fingerprint"]
    assert reader.fingerprint("alice", reader.card_keys(rotation["card"])) == successor["fingerprint"]
    revocation = reader.read_document(TEXTS["revocation"].encode(), keys["alice"], b"securefl/1 revocation")
    assert revocation["card"] == STATEMENTS["cards"]["alice"]
    receipt = reader.read_document(TEXTS["receipt"].encode(), keys["server"], b"securefl/1 receipt")
    assert (receipt["format"], receipt["silo"]) == ("securefl.receipt/1", bob["fingerprint"])
    passphrase = next(case["passphrase"] for case in STATEMENTS["cases"] if case["name"] == "encrypted")
    opened = reader.open_identity(TEXTS["encrypted"].encode(), passphrase.encode())
    assert {half: seed.hex() for half, seed in opened.items()} == alice["seeds"]


@pytest.mark.parametrize("of", ["rotation", "revocation", "receipt"])
def test_the_second_reader_wants_both_signatures(of: str) -> None:
    signer = "server" if of == "receipt" else "alice"
    keys = reader.card_keys(STATEMENTS["cards"][signer])
    altered = [case for case in STATEMENTS["cases"] if case["name"] in (f"{of}-ed25519", f"{of}-mldsa65")]
    assert len(altered) == 2
    for case in altered:
        with pytest.raises(reader.Refusal, match="BadSignature"):
            reader.read_document(text_of(case), keys, f"securefl/1 {of}".encode())


# --- ledgers

LINES = (FOLDER / "ledger-1.jsonl").read_bytes().splitlines(keepends=True)
HEAD = (FOLDER / "ledger-1.head.json").read_bytes()


def lines_of(case: Case) -> list[bytes]:
    return [LINES[line - 1] if isinstance(line, int) else line.encode("ascii") for line in case["lines"]]


def head_of(case: Case) -> bytes:
    return case["head"].encode("ascii") if case.get("head") else HEAD


def ledger_of(case: Case, folder: Path) -> Path:
    path = folder / "ledger-1.jsonl"
    path.write_bytes(b"".join(lines_of(case)))
    if case.get("head", "") is not None:
        (folder / "ledger-1.head.json").write_bytes(head_of(case))
    return path


@cases_of(LEDGERS)
def test_ledgers(case: Case, tmp_path: Path) -> None:
    path = ledger_of(case, tmp_path)
    if case["error"] is None:
        summary = verify_ledger(path)
        whole = [line for line in case["lines"] if isinstance(line, int) or line.endswith("\n")]
        assert (summary.entries, len(summary.releases), len(summary.refusals)) == (len(whole), 4, 1)
        assert summary.restored == case.get("restored", False)
        assert summary.fingerprint == LEDGERS["identities"]["silo-1-next"]["fingerprint"]
        return
    with pytest.raises(LedgerCorrupt) as caught:
        verify_ledger(path)
    message = str(caught.value).removeprefix(f"{tmp_path}/")
    found = re.match(r"ledger-1\.jsonl: line (\d+): ", message)
    assert (int(found[1]) if found else message.partition(": ")[0]) == (
        "ledger-1.head.json" if case["at"] == "head" else case["at"]
    )


def test_the_ledger_read_by_the_second_reader() -> None:
    entries = reader.read_ledger(LINES, HEAD)
    kinds = ["genesis", "approval", "release", "release", "refusal", "rotation", "release", "release"]
    assert [entry["entry"] for entry in entries] == kinds
    squares, deltas, reasons = 0.0, [], []
    for entry in entries:
        if entry["entry"] != "release":
            continue
        if entry["claim"]["mechanism"] == "none":
            reasons.append(entry["claim"]["reason"])
        else:
            squares += entry["claim"]["mu"] ** 2
            deltas.append(entry["claim"]["delta"])
            epsilon = reader.epsilon(math.sqrt(squares), min(deltas))
            assert entry["account"]["private_epsilon"] == pytest.approx(epsilon, rel=1e-9)
        account: Mapping[str, Any] = entry["account"]
        assert account["mu"] == pytest.approx(math.sqrt(squares), rel=1e-12)
        assert account["delta"] == (min(deltas) if deltas else None)
        assert account["nonprivate"] == sorted(set(reasons))
        assert account["nonprivate_releases"] == len(reasons)


def test_the_second_reader_refuses_what_the_chain_shows() -> None:
    """Of the altered ledgers, those where no rule about the entries' meaning is needed."""
    names = [
        "third-dropped",
        "swapped",
        "repeated",
        "last-cut",
        "signature-ed25519",
        "by-old-keys",
        "no-consent",
        "head-account",
        "head-history",
        "head-restored",
        *(f"history-{what}" for what in ("last", "first", "gap", "order", "index")),
    ]
    chosen = [case for case in LEDGERS["cases"] if case["name"] in names]
    assert len(chosen) == len(names)
    for case in chosen:
        with pytest.raises(reader.Refusal):
            reader.read_ledger(lines_of(case), head_of(case))


def test_restored_ledgers_read_by_the_second_reader() -> None:
    """And what confirms them, by the second reader alone: the first has a test of its own."""
    cases = {case["name"]: case for case in LEDGERS["cases"] if case.get("restored") is not None}
    assert {name: case["restored"] for name, case in cases.items()} == {
        "restored": True,
        "restored-twice": True,
        "restored-confirmed": False,
    }
    for case in cases.values():
        assert len(reader.read_ledger(lines_of(case), head_of(case))) == len(case["lines"])
    copy, confirmed = json.loads(HEAD), json.loads(cases["restored-confirmed"]["head"])
    assert reader.may_confirm(copy, copy)
    assert reader.may_confirm(confirmed, copy)
    for name in ("restored", "restored-twice"):
        assert not reader.may_confirm(json.loads(cases[name]["head"]), copy), "itself not confirmed"
        assert not reader.may_confirm(copy, json.loads(cases[name]["head"])), "older than the copy"
