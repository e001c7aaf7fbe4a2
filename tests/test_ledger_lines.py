"""Every way of altering a ledger, what only the holder of its keys could forge, and every crash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securefl.crypto.identity import Card, Identity
from securefl.errors import BudgetExceeded, LedgerCorrupt, Refused, UsageError
from securefl.ledger import Ledger, ReleaseEntry, head_path, rotate_ledger, verify_ledger
from securefl.release import canonical_json
from tests.ledgers import (
    OTHER,
    PLAN,
    RUN,
    SILO,
    charge,
    clock,
    copied,
    finished_ledger,
    gaussian,
    head_of,
    lines_of,
    point,
    rechain,
    refuse,
    signed,
    write_head,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_ledger(tmp_path_factory.mktemp("ledger") / "silo-1.jsonl")


@pytest.fixture
def path(finished: Path, tmp_path: Path) -> Path:
    return copied(finished, tmp_path)


# --- tampering

FIELDS = [*ReleaseEntry.model_fields, "signature"]


def altered(value: Any) -> Any:
    """Another value of the same form."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return {"centroids": "metrics", "release": "genesis"}.get(
            value, ("a" if value[0] != "a" else "b") + value[1:]
        )
    if isinstance(value, list):
        return [altered(value[0]), *value[1:]]
    key = sorted(value)[0]
    return {**value, key: altered(value[key])}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("line", [3, 5])
def test_every_field_altered(path: Path, field: str, line: int) -> None:
    lines = lines_of(path)
    document = json.loads(lines[line - 1])
    document[field] = altered(document[field])
    lines[line - 1] = canonical_json(document) + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerCorrupt, match=rf"silo-1\.jsonl: line {line}: "):
        verify_ledger(path, SILO.card)
    with pytest.raises(LedgerCorrupt):
        Ledger.open(path, SILO)


@pytest.mark.parametrize("field", ["time", "card", "signature", "index", "previous"])
def test_genesis_altered(path: Path, field: str) -> None:
    lines = lines_of(path)
    document = json.loads(lines[0])
    if field == "card":
        document["card"] = json.loads(OTHER.card.to_json())
    elif field == "previous":
        document["previous"] = "0" * 64
    else:
        document[field] = altered(document[field])
    path.write_bytes(b"".join([canonical_json(document) + b"\n", *lines[1:]]))
    with pytest.raises(LedgerCorrupt, match=r"line 1: "):
        verify_ledger(path)


@pytest.mark.parametrize("half", ["ed25519", "mldsa65"])
def test_either_signature_altered(path: Path, half: str) -> None:
    lines = lines_of(path)
    document = json.loads(lines[2])
    document["signature"][half] = json.loads(lines[1])["signature"][half]
    path.write_bytes(b"".join([*lines[:2], canonical_json(document) + b"\n", *lines[3:]]))
    with pytest.raises(LedgerCorrupt, match="line 3: the signature does not hold"):
        verify_ledger(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ls: [*ls[:2], *ls[3:]], "line 3: has index 3 where 2 is due"),
        (lambda ls: [ls[0], ls[2], ls[1], *ls[3:]], "line 2: has index 2 where 1 is due"),
        (lambda ls: [*ls[:3], ls[2], *ls[3:]], "line 4: has index 2 where 3 is due"),
        (lambda ls: ls[1:], "line 1: is not the first entry"),
        (lambda ls: [ls[0], *ls], "line 2: is a second first entry"),
        (lambda ls: [*ls[:2], b"\n", *ls[2:]], "line 3: is not JSON"),
        (lambda ls: [*ls[:2], b"not JSON\n", *ls[3:]], "line 3: is not JSON"),
        (lambda ls: [*ls[:2], b"{}\n", *ls[3:]], "line 3: is not a signed document"),
        (lambda ls: [*ls[:2], b"[]\n", *ls[3:]], "line 3: is not a signed document"),
        (lambda ls: [*ls[:2], b'{"signature":{}}\n', *ls[3:]], "line 3: is not an entry"),
        (lambda ls: [*ls[:2], b'{"signature":0,"x":1e999}\n', *ls[3:]], "line 3: is not JSON"),
        (lambda ls: [*ls[:2], b'{"signature":0,"x":' + b"[" * 10**5 + b"\n", *ls[3:]], "line 3: is not JSON"),
        (lambda ls: [*ls[:2], b"\xff\n", *ls[3:]], "line 3: is not"),
        (lambda ls: [*ls[:2], b" " + ls[2], *ls[3:]], "line 3: is not in its canonical"),
        (lambda ls: [*ls[:2], ls[2][:-1] + b"\r\n", *ls[3:]], "line 3: is not in its canonical"),
        (lambda ls: [*ls[:2], b'{"round":2,' + ls[2][1:], *ls[3:]], "line 3: is not JSON"),
        (lambda ls: [*ls[:2], b" " * 2**20 + ls[2], *ls[3:]], "line 3: is longer than any entry"),
        (lambda ls: [*ls[:2], ls[2][:-1], *ls[3:]], "line 3: is not JSON"),
        (lambda _: [], "line 1: is missing"),
    ],
)
def test_lines_dropped_swapped_repeated_or_spoilt(
    path: Path, change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    path.write_bytes(b"".join(change(lines_of(path))))
    with pytest.raises(LedgerCorrupt, match=message):
        verify_ledger(path)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_a_cut_tail_is_noticed(path: Path, kept: int) -> None:
    path.write_bytes(b"".join(lines_of(path)[:kept]))
    message = rf"line {kept + 1}: is missing; by the head record the file has 5 lines"
    with pytest.raises(LedgerCorrupt, match=message):
        verify_ledger(path)
    with pytest.raises(LedgerCorrupt, match=message):
        Ledger.open(path, SILO)


def test_a_tail_cut_inside_its_last_line_is_noticed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LedgerCorrupt, match="line 5: is missing"):
        verify_ledger(path)


def test_a_missing_or_foreign_head(path: Path) -> None:
    head = head_path(path)
    good = json.loads(head.read_bytes())
    for spoilt in (
        b"",
        b"[]",
        b"{",
        b"null",
        head.read_bytes()[:-1],
        canonical_json({**good, "index": True}) + b"\n",
        canonical_json({**good, "index": "4"}) + b"\n",
        canonical_json({**good, "index": -1}) + b"\n",
        canonical_json({**good, "index": 3}) + b"\n",
        canonical_json({**good, "hash": "0" * 64}) + b"\n",
        canonical_json({**good, "more": 1}) + b"\n",
        canonical_json({k: v for k, v in good.items() if k != "signature"}) + b"\n",
        canonical_json({**good, "signature": None}) + b"\n",
    ):
        head.write_bytes(spoilt)
        with pytest.raises(LedgerCorrupt, match=r"silo-1\.head\.json: "):
            verify_ledger(path)
    write_head(path, lines_of(path), OTHER)
    with pytest.raises(LedgerCorrupt, match="the signature does not hold"):
        verify_ledger(path)
    head.unlink()
    with pytest.raises(LedgerCorrupt, match="head record is missing"):
        verify_ledger(path)
    with pytest.raises(LedgerCorrupt, match="head record is missing"):
        Ledger.open(path, SILO)


def test_the_head_says_what_the_lines_add_up_to(path: Path) -> None:
    lines = lines_of(path)
    written = json.loads(head_path(path).read_bytes())
    assert {name: value for name, value in written.items() if name != "signature"} == head_of(lines)
    write_head(path, lines)
    verify_ledger(path)
    account = head_of(lines)["accounts"]["notes"]
    for changed in (
        {"accounts": {}},
        {"accounts": {"notes": {**account, "mu": 0.4}}},
        {"accounts": {"notes": {**account, "nonprivate_releases": 1}}},
        {"accounts": {"notes": account, "images": account}},
        {"history": [point(lines, 1)]},
        {"history": [point(lines, 0), point(lines, 3)]},
        {"restored": True},
        {"time": 0.5},
    ):
        write_head(path, lines, **changed)
        with pytest.raises(LedgerCorrupt, match="names another last entry"):
            verify_ledger(path)


def test_an_entrys_signature_is_no_heads(path: Path) -> None:
    head_path(path).write_bytes(signed(head_of(lines_of(path))))
    with pytest.raises(LedgerCorrupt, match="the signature does not hold"):
        verify_ledger(path)


def test_a_head_two_behind_or_of_another_entry(path: Path) -> None:
    lines = lines_of(path)
    hashes = [hashlib.sha256(line).hexdigest() for line in lines]
    write_head(path, lines[:4])
    assert "one entry behind" in verify_ledger(path).notes[0]
    write_head(path, lines[:3])
    with pytest.raises(LedgerCorrupt, match="names another last entry"):
        verify_ledger(path)
    for index, digest in ((4, hashes[3]), (3, hashes[4]), (0, hashes[4])):
        write_head(path, lines, index=index, hash=digest)
        with pytest.raises(LedgerCorrupt, match="names another last entry"):
            verify_ledger(path)


# --- what only the holder of the keys could forge


def test_a_forged_account_is_noticed(path: Path) -> None:
    documents = [json.loads(line) for line in lines_of(path)]
    rechain(path, documents)
    assert verify_ledger(path).entries == 5  # the forger's tools work
    for field, value in (
        ("mu", 0.25),
        ("private_epsilon", 0.5),
        ("private_epsilon", None),
        ("delta", 1e-4),
        ("nonprivate", []),
        ("nonprivate_releases", 0),
        ("simulated", True),
    ):
        forged = json.loads(json.dumps(documents))
        forged[2]["account"][field] = value
        rechain(path, forged)
        with pytest.raises(LedgerCorrupt, match="line 3: the account does not follow from the claims"):
            verify_ledger(path)


def forged(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    documents = [json.loads(line) for line in lines_of(path)]
    change(documents)
    rechain(path, documents)


def test_a_forged_second_answer_is_noticed(path: Path) -> None:
    forged(path, lambda ds: ds[4].update(round=1))
    with pytest.raises(LedgerCorrupt, match="line 5: answers a second time for the same run, round and step"):
        verify_ledger(path)


def test_a_forged_refusal_of_what_was_answered_is_noticed(path: Path) -> None:
    refuse(Ledger.open(path, SILO), round=9)
    forged(path, lambda ds: ds[5].update(round=3))
    with pytest.raises(LedgerCorrupt, match="line 6: answers a second time"):
        verify_ledger(path)


def test_a_forged_second_approval_is_noticed(path: Path) -> None:
    Ledger.open(path, SILO).append_approval(plan=PLAN, run=RUN, round=9, step="train")
    forged(path, lambda ds: ds.append({**ds[5], "round": 10}))
    with pytest.raises(LedgerCorrupt, match="line 7: approves a second time"):
        verify_ledger(path)


def test_a_charge_moved_to_another_data_set_is_noticed(path: Path) -> None:
    """The account after it is then that of the wrong data set."""
    forged(path, lambda ds: ds[3].update(dataset="images"))
    with pytest.raises(LedgerCorrupt, match="line 4: the account does not follow from the claims"):
        verify_ledger(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "ab"),
        ("round", 0),
        ("round", True),
        ("round", 1.0),
        ("step", "Train"),
        ("plan", "c" * 63),
        ("plan_sequence", 0),
        ("plan_sequence", "3"),
        ("bytes", 0),
        ("dataset", "Notes"),
        ("dataset", ""),
        ("recipients", []),
        ("version", 3),
        ("time", "now"),
        ("kind", "secret"),
        ("more", 1),
    ],
)
def test_fields_are_strict(path: Path, field: str, value: Any) -> None:
    forged(path, lambda ds: ds[2].update({field: value}))
    with pytest.raises(LedgerCorrupt, match=rf"line 3: is not an entry \(field release\.{field}\b"):
        verify_ledger(path)


@pytest.mark.parametrize("digits", ["9" * 400, "1e400", str(2**64)])
def test_a_number_beyond_any_reader_is_noticed(path: Path, digits: str) -> None:
    """JSON has such integers, and a reader that makes floats of them gets infinity; found by mutation."""
    line = lines_of(path)[-1]
    document = json.loads(line)
    text = canonical_json({**document, "time": 12345.5}).replace(b"12345.5", digits.encode())
    path.write_bytes(b"".join(lines_of(path)[:-1]) + text + b"\n")
    with pytest.raises(LedgerCorrupt, match="line 5: is not JSON"):
        verify_ledger(path)


def test_a_number_in_another_form_is_not_canonical(path: Path) -> None:
    forged(path, lambda ds: ds[2].update(time=1_760_000_002))
    with pytest.raises(LedgerCorrupt, match="line 3: is not in its canonical encoding"):
        verify_ledger(path)


def test_a_ledger_of_the_first_version_is_refused(path: Path) -> None:
    forged(path, lambda ds: [d.update(version=1) for d in ds])
    with pytest.raises(
        LedgerCorrupt, match="line 1: this ledger was written by an older version of securefl"
    ):
        verify_ledger(path)


def test_a_broken_chain_is_named(path: Path) -> None:
    lines = lines_of(path)
    document = json.loads(lines[3])
    lines[3] = signed({**document, "previous": "0" * 64})
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerCorrupt, match="line 4: the hash chain is broken"):
        verify_ledger(path)


def test_a_consistent_ledger_of_somebody_else_needs_the_card(path: Path) -> None:
    Ledger.create(path.with_name("eve.jsonl"), Identity.generate("silo-1"))
    assert verify_ledger(path.with_name("eve.jsonl")).name == "silo-1"
    with pytest.raises(LedgerCorrupt, match="line 1: the ledger is that of another identity"):
        verify_ledger(path.with_name("eve.jsonl"), SILO.card)


# --- new keys

NEW = Identity.generate("silo-1")


@pytest.fixture
def rotated(path: Path) -> Path:
    ledger = Ledger.open(path, SILO, clock())
    ledger.rotate(NEW)
    charge(ledger, round=4)
    return path


def test_after_a_rotation_only_the_new_keys_append(path: Path) -> None:
    before = verify_ledger(path)
    ledger, stale = Ledger.open(path, SILO), Ledger.open(path, SILO)
    ledger.rotate(NEW)
    for act in (lambda: charge(stale, round=4), lambda: stale.rotate(Identity.generate("silo-1"))):
        with pytest.raises(UsageError, match="has new keys"):
            act()
    with pytest.raises(LedgerCorrupt, match="line 6: the ledger has newer keys than these of silo-1"):
        Ledger.open(path, SILO)
    charge(ledger, round=4)
    charge(Ledger.open(path, NEW), round=5)
    summary = verify_ledger(path, NEW.card)
    assert summary.fingerprint == NEW.card.fingerprint
    assert (summary.entries, summary.releases[:4]) == (8, before.releases)
    assert summary.account.mu == before.account.mu
    with pytest.raises(LedgerCorrupt, match="line 6"):
        verify_ledger(path, SILO.card)


def test_a_rotation_takes_new_keys_of_the_same_name(rotated: Path) -> None:
    ledger = Ledger.open(rotated, NEW)
    before = rotated.read_bytes()
    for identity in (OTHER, SILO, NEW):
        with pytest.raises(UsageError, match="new keys of the name silo-1 only"):
            ledger.rotate(identity)
    assert rotated.read_bytes() == before


def test_lines_after_a_rotation_are_not_the_old_keys_to_sign(rotated: Path) -> None:
    """Nor is the rotation the new ones'; and the head is the new ones' alone."""
    lines = lines_of(rotated)
    for number, by in ((6, NEW), (7, SILO)):
        spoilt = list(lines)
        spoilt[number - 1] = signed(json.loads(lines[number - 1]), by)
        rotated.write_bytes(b"".join(spoilt[:number]))
        with pytest.raises(LedgerCorrupt, match=f"line {number}: the signature does not hold"):
            verify_ledger(rotated)
    rotated.write_bytes(b"".join(lines))
    write_head(rotated, lines, SILO)
    with pytest.raises(LedgerCorrupt, match=r"head\.json: the signature does not hold"):
        verify_ledger(rotated)


@pytest.mark.parametrize("signature", ["signature", "consent"])
@pytest.mark.parametrize("half", ["ed25519", "mldsa65"])
def test_a_rotation_needs_both_halves_of_both_keys(rotated: Path, signature: str, half: str) -> None:
    lines = lines_of(rotated)
    document, other = json.loads(lines[5]), json.loads(lines[4])["signature"]
    document[signature][half] = other[half]
    line = canonical_json(document) + b"\n" if signature == "signature" else signed(document)
    rotated.write_bytes(b"".join([*lines[:5], line]))
    message = "the signature does not hold" if signature == "signature" else "of the new keys does not hold"
    with pytest.raises(LedgerCorrupt, match=f"line 6: .*{message}"):
        verify_ledger(rotated)
    del document[signature][half]
    rotated.write_bytes(b"".join([*lines[:5], canonical_json(document) + b"\n"]))
    with pytest.raises(LedgerCorrupt, match="line 6: "):
        verify_ledger(rotated)


@pytest.mark.parametrize(
    ("identity", "message"),
    [(OTHER, "to those of another name"), (SILO, "to ones that this ledger had before")],
)
def test_a_forged_rotation_is_noticed(rotated: Path, identity: Identity, message: str) -> None:
    """To another name, or back to keys that were given up; all signatures are there."""
    lines = lines_of(rotated)
    content = {
        "version": 2,
        "entry": "rotation",
        "index": 7,
        "time": 1_760_000_100.5,
        "previous": hashlib.sha256(lines[-1]).hexdigest(),
        "card": json.loads(identity.card.to_json()),
    }
    digest = hashlib.sha256(canonical_json(content)).digest()
    content["consent"] = identity.sign(b"securefl/1 ledger-rotation", digest).document()
    rotated.write_bytes(b"".join([*lines, signed(content, NEW)]))
    with pytest.raises(LedgerCorrupt, match=f"line 8: changes the keys {message}"):
        verify_ledger(rotated)


def test_the_old_keys_alone_cannot_write_another_past_for_the_new(rotated: Path) -> None:
    """A thief of the old keys leaves charges out, and ends with the true rotation, its head one behind."""
    lines = lines_of(rotated)
    past = [json.loads(line) for line in (lines[0], lines[1], lines[5])]
    rechain(rotated, past)
    forgery = lines_of(rotated)
    write_head(rotated, forgery[:2])
    with pytest.raises(LedgerCorrupt, match="line 3: the signature of the new keys does not hold"):
        verify_ledger(rotated)


def test_a_crash_between_a_rotation_and_its_head(path: Path) -> None:
    head = head_path(path).read_bytes()
    Ledger.open(path, SILO).rotate(NEW)
    head_path(path).write_bytes(head)  # signed by the old keys
    assert "one entry behind" in verify_ledger(path).notes[0]
    with pytest.raises(LedgerCorrupt, match="newer keys"):
        Ledger.open(path, SILO)
    charge(Ledger.open(path, NEW), round=4)
    assert (verify_ledger(path, NEW.card).entries, verify_ledger(path).notes) == (7, ())


def test_a_rotation_is_finished_and_not_made_twice(path: Path) -> None:
    before, head = path.read_bytes(), head_path(path).read_bytes()
    with pytest.raises(LedgerCorrupt, match="another identity than silo-1"):
        rotate_ledger(path, Identity.generate("silo-1"), NEW)
    assert path.read_bytes() == before
    assert rotate_ledger(path, SILO, NEW)
    lines = path.read_bytes()
    head_path(path).write_bytes(head)  # killed before the head: it is that of the old keys
    for _ in range(2):
        assert not rotate_ledger(path, SILO, NEW)
        assert (path.read_bytes(), verify_ledger(path, NEW.card).notes) == (lines, ())
    # Killed inside the line: the old keys still hold.
    path.write_bytes(lines[:-9])
    head_path(path).write_bytes(head)
    assert rotate_ledger(path, SILO, NEW)
    assert verify_ledger(path, NEW.card).entries == 6
    # Not done already: from keys that it never had, to other new ones, from a key to itself.
    with pytest.raises(LedgerCorrupt, match="another identity than silo-1"):
        rotate_ledger(path, Identity.generate("silo-1"), NEW)
    with pytest.raises(LedgerCorrupt, match="newer keys than these of silo-1"):
        rotate_ledger(path, SILO, Identity.generate("silo-1"))
    with pytest.raises(UsageError, match="new keys of the name silo-1 only"):
        rotate_ledger(path, NEW, NEW)


# --- crashes


def test_a_crash_between_entry_and_head_is_repaired(path: Path) -> None:
    head_before = head_path(path).read_bytes()
    charge(Ledger.open(path, SILO), round=4)
    head_path(path).write_bytes(head_before)
    summary = verify_ledger(path)
    assert summary.entries == 6
    assert len(summary.notes) == 1
    assert "one entry behind" in summary.notes[0]
    ledger = Ledger.open(path, SILO)
    assert verify_ledger(path).notes == ()
    with pytest.raises(Refused):  # the entry counts: its bytes may have left
        charge(ledger, round=4)


def test_a_crash_before_the_first_head_update(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ledger = Ledger.create(path, SILO)
    head_before = head_path(path).read_bytes()
    charge(ledger)
    head_path(path).write_bytes(head_before)
    assert verify_ledger(path).entries == 2
    assert Ledger.open(path, SILO).entries == ledger.entries


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_crash_inside_the_write_is_repaired(path: Path, share: float) -> None:
    before, head_before = path.read_bytes(), head_path(path).read_bytes()
    charge(Ledger.open(path, SILO), round=4)
    line = lines_of(path)[-1][:-1]
    path.write_bytes(before + line[: max(1, int(share * len(line)))])
    head_path(path).write_bytes(head_before)
    summary = verify_ledger(path)
    assert summary.entries == 5
    assert "broke off" in summary.notes[0]
    ledger = Ledger.open(path, SILO)
    assert path.read_bytes() == before
    charge(ledger, round=4)  # nothing had left for it
    assert verify_ledger(path).entries == 6


def test_a_failed_head_leaves_the_charge_standing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.open(path, SILO)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(UsageError, match=r"head\.json: cannot be written"):
        charge(ledger, round=4)
    monkeypatch.undo()
    assert "one entry behind" in verify_ledger(path).notes[0]
    with pytest.raises(Refused):
        charge(ledger, round=4)
    assert verify_ledger(path).notes == (), "a head that lags must not come to lag two behind"
    charge(ledger, round=5)
    assert verify_ledger(path).entries == 7


def test_a_claim_whose_noise_is_none_is_neither_charged_nor_believed(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match="protects nothing"):
        charge(Ledger.open(path, SILO), round=9, claim=gaussian(1e200))
    assert path.read_bytes() == before
    documents = [json.loads(line) for line in lines_of(path)]
    documents[2]["claim"]["mu"] = 1e200
    rechain(path, documents)
    with pytest.raises(LedgerCorrupt, match=r"line 3: .*protects nothing"):
        verify_ledger(path)


def test_private_keys_do_not_show(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    assert repr(ledger) == f"Ledger({path}, 4 releases)"
    assert isinstance(verify_ledger(path).releases[0], ReleaseEntry)
    assert Card.model_validate(json.loads(lines_of(path)[0])["card"]) == SILO.card
