"""The ledger: what it records, the account, and every way of altering it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securefl.account import Account
from securefl.crypto.identity import Card, Identity
from securefl.errors import BudgetExceeded, LedgerCorrupt, Refused, UsageError
from securefl.ledger import Entry, Ledger, head_path, verify_ledger
from securefl.messages import Party
from securefl.release import GaussianSums, NonPrivate, PayloadKind, canonical_json

RUN = "ab" * 16
SILO, OTHER = Identity.generate("silo-1"), Identity.generate("silo-2")
SERVER = Party(name="server", key="5" * 64)
PEERS = (Party(name="silo-2", key="6" * 64), Party(name="silo-3", key="7" * 64))
PLAIN = NonPrivate(reason="weights trained without differential privacy")


def gaussian(mu: float, delta: float = 1e-5, simulated: bool = False) -> GaussianSums:
    return GaussianSums(
        epsilon=1.0,  # of the one release; the account composes mu
        delta=delta,
        mu=mu,
        clip=6.0,
        noise_multiplier=2.0,
        count_multiplier=3.0,
        prediction_multiplier=3.0,
        generator="os",
        simulated=simulated,
    )


def charge(ledger: Ledger, **fields: Any) -> Entry:
    values: dict[str, Any] = {
        "run": RUN,
        "round": 1,
        "step": "train",
        "kind": PayloadKind.MODEL,
        "recipients": [SERVER],
        "protection": "sealed",
        "envelope": b"the envelope",
        "body": b"the body",
        "claim": PLAIN,
        **fields,
    }
    return ledger.append(**values)


def clock() -> Callable[[], float]:
    ticks = iter(range(10_000))
    return lambda: 1_760_000_000.5 + next(ticks)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Genesis, a model, two noised centroid releases and a last model."""
    path = tmp_path_factory.mktemp("ledger") / "silo-1.jsonl"
    ledger = Ledger.create(path, SILO, clock())
    charge(ledger)
    share = {"step": "share", "kind": PayloadKind.CENTROIDS, "recipients": PEERS, "protection": "peer"}
    charge(ledger, round=2, claim=gaussian(0.3), **share)
    charge(ledger, round=3, claim=gaussian(0.4, 1e-6, True), **share)
    charge(ledger, round=3)
    return path


@pytest.fixture
def path(finished: Path, tmp_path: Path) -> Path:
    for file in finished.parent.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path / finished.name


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def signed(document: dict[str, Any], by: Identity = SILO, context: bytes = b"securefl/1 ledger") -> bytes:
    """A line as the written format has it, signed again: what the silo's own keys can forge."""
    unsigned = {key: value for key, value in document.items() if key != "signature"}
    digest = hashlib.sha256(canonical_json(unsigned)).digest()
    return canonical_json({**unsigned, "signature": by.sign(context, digest).document()}) + b"\n"


def write_head(path: Path, index: int, digest: str, by: Identity = SILO) -> None:
    head = {"version": 1, "index": index, "hash": digest}
    head_path(path).write_bytes(signed(head, by, b"securefl/1 ledger-head"))


def rechain(path: Path, documents: list[dict[str, Any]]) -> None:
    """Every line signed and chained again, and a head: a history forged by who has the keys."""
    written: list[bytes] = []
    for document in documents:
        previous = hashlib.sha256(written[-1]).hexdigest() if written else None
        written.append(signed({**document, "previous": previous}))
    path.write_bytes(b"".join(written))
    write_head(path, len(written) - 1, hashlib.sha256(written[-1]).hexdigest())


# --- what it records


def test_a_ledger_verifies_and_says_what_left(finished: Path) -> None:
    summary = verify_ledger(finished, SILO.card)
    assert (summary.name, summary.fingerprint) == ("silo-1", SILO.card.fingerprint)
    assert (summary.entries, len(summary.releases), summary.notes) == (5, 4, ())
    assert summary.head_hash == hashlib.sha256(lines_of(finished)[-1]).hexdigest()
    first, share = summary.releases[:2]
    assert (first.index, first.time, first.run, first.round, first.step) == (
        1,
        1_760_000_001.5,
        RUN,
        1,
        "train",
    )
    assert first.envelope_sha256 == hashlib.sha256(b"the envelope").hexdigest()
    assert first.body_sha256 == hashlib.sha256(b"the body").hexdigest()
    assert (first.bytes, first.protection, first.claim) == (12, "sealed", PLAIN)
    assert (share.kind, share.recipients, share.claim) == (PayloadKind.CENTROIDS, PEERS, gaussian(0.3))
    assert verify_ledger(finished).head_hash == summary.head_hash


def test_the_bodies_are_not_in_it(finished: Path) -> None:
    text = finished.read_bytes() + head_path(finished).read_bytes()
    assert b"the body" not in text
    assert b"the envelope" not in text
    assert b"seed" not in text


def test_each_line_is_on_the_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write is followed by an fsync of that file before append returns."""
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def watching(handle: int) -> None:
        real(handle)
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, os.fstat(handle).st_size))

    ledger = Ledger.create(tmp_path / "l.jsonl", SILO, clock())
    monkeypatch.setattr(os, "fsync", watching)
    charge(ledger)
    assert synced[0] == ("l.jsonl", (tmp_path / "l.jsonl").stat().st_size)
    assert any(".l.head.json" in name for name, _ in synced)
    assert verify_ledger(tmp_path / "l.jsonl").entries == 2


def test_open_goes_on(path: Path) -> None:
    before = verify_ledger(path)
    ledger = Ledger.open(path, SILO, clock())
    assert ledger.account() == before.account
    assert ledger.entries == before.releases
    entry = charge(ledger, round=4)
    assert entry.index == 5
    assert entry.previous == before.head_hash
    assert verify_ledger(path).entries == 6


def test_create_does_not_overwrite_and_open_wants_its_own(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        Ledger.create(path, SILO)
    assert path.read_bytes() == before
    with pytest.raises(LedgerCorrupt, match="another identity than silo-2"):
        Ledger.open(path, OTHER)
    with pytest.raises(UsageError, match="cannot be read"):
        Ledger.open(path.with_name("absent.jsonl"), SILO)


def test_the_same_release_is_not_charged_twice(path: Path) -> None:
    for ledger in (Ledger.open(path, SILO), Ledger.open(path, SILO)):
        before = path.read_bytes()
        with pytest.raises(Refused, match="round 3, train, was charged before"):
            charge(ledger, round=3, body=b"fresh noise")
        assert path.read_bytes() == before
    charge(ledger, round=3, run="cd" * 16)
    charge(ledger, round=3, kind=PayloadKind.METRICS)
    charge(ledger, round=3, step="finish")
    assert verify_ledger(path).entries == 8


def test_two_writers_do_not_break_the_chain(path: Path) -> None:
    one, two = Ledger.open(path, SILO), Ledger.open(path, SILO)
    charge(one, round=4)
    with pytest.raises(UsageError, match="another process"):
        charge(two, round=5)
    assert verify_ledger(path).entries == 6
    charge(one, round=5)


def test_a_full_disk_leaves_the_ledger_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.open(path, SILO)
    before, account = path.read_bytes(), ledger.account()
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:100]))
    with pytest.raises(UsageError, match="cannot be written"):
        charge(ledger, round=4)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert ledger.account() == account
    charge(ledger, round=4)
    assert verify_ledger(path).entries == 6


def test_what_could_not_be_verified_is_not_written(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    before = path.read_bytes()
    bad: dict[str, Any]
    for bad in ({"protection": "NOT A WORD"}, {"recipients": []}, {"envelope": b""}):
        with pytest.raises(LedgerCorrupt):
            charge(ledger, round=9, **bad)
    assert path.read_bytes() == before


# --- the account


def delta_of(epsilon: float, mu: float) -> float:
    """Corollary 2.13, on the standard library's erfc alone."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2)


def test_the_account_composes_in_squares(finished: Path) -> None:
    """mu = hypot(.3, .4) = .5; epsilon solves Dong, Roth and Su (2022), Corollary 2.13, at the least."""
    account = verify_ledger(finished).account
    assert account.mu == pytest.approx(0.5, abs=1e-12)
    assert account.delta == 1e-6
    epsilon = account.private_epsilon
    assert epsilon is not None
    assert delta_of(epsilon, 0.5) == pytest.approx(1e-6, rel=1e-6)
    assert account.nonprivate == (PLAIN.reason,)
    assert account.nonprivate_releases == 2
    assert account.epsilon is None
    assert account.simulated


def test_the_largest_mu_still_has_an_epsilon() -> None:
    account = Account().with_claim(gaussian(1e4))
    assert account.private_epsilon == pytest.approx(1e8 / 2, rel=1e-2)


def test_only_private_releases_have_an_epsilon(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.jsonl", SILO)
    assert (ledger.account().epsilon, ledger.account().private_epsilon) == (None, None)
    foreseen = ledger.account_with(gaussian(1.0))
    assert ledger.account() == Account()
    charge(ledger, claim=gaussian(1.0))
    assert ledger.account() == foreseen
    assert ledger.account().epsilon == ledger.account().private_epsilon
    assert delta_of(ledger.account().epsilon or 0.0, 1.0) == pytest.approx(1e-5, rel=1e-6)
    assert not ledger.account().simulated
    charge(ledger, round=2)
    assert ledger.account().epsilon is None
    assert ledger.account().private_epsilon == foreseen.private_epsilon


def test_reasons_are_listed_once_and_counted(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.jsonl", SILO)
    for i in range(1, 4):
        charge(ledger, round=i)
    charge(ledger, round=4, claim=NonPrivate(reason="another"))
    assert ledger.account().nonprivate == (PLAIN.reason, "another")
    assert ledger.account().nonprivate_releases == 4


# --- tampering

FIELDS = [*Entry.model_fields]


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
        (lambda ls: [*ls[:2], b"{}\n", *ls[3:]], "line 3: is not an entry"),
        (lambda ls: [*ls[:2], b"[]\n", *ls[3:]], "line 3: is not an entry"),
        (lambda ls: [*ls[:2], b"\xff\n", *ls[3:]], "line 3: is not"),
        (lambda ls: [*ls[:2], b" " + ls[2], *ls[3:]], "line 3: is not in its canonical"),
        (lambda ls: [*ls[:2], ls[2][:-1] + b"\r\n", *ls[3:]], "line 3: is not in its canonical"),
        (lambda ls: [*ls[:2], b'{"round":2,' + ls[2][1:], *ls[3:]], "line 3: is not in its canonical"),
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
        canonical_json({**good, "index": True}),
        canonical_json({**good, "index": "4"}),
        canonical_json({**good, "index": 3}),
        canonical_json({**good, "hash": "0" * 64}),
        canonical_json({**good, "more": 1}),
        canonical_json({k: v for k, v in good.items() if k != "signature"}),
    ):
        head.write_bytes(spoilt)
        with pytest.raises(LedgerCorrupt, match=r"silo-1\.head\.json: "):
            verify_ledger(path)
    write_head(path, 4, good["hash"], OTHER)
    with pytest.raises(LedgerCorrupt, match="the signature does not hold"):
        verify_ledger(path)
    head.unlink()
    with pytest.raises(LedgerCorrupt, match="head record is missing"):
        verify_ledger(path)
    with pytest.raises(LedgerCorrupt, match="head record is missing"):
        Ledger.open(path, SILO)


def test_an_entrys_signature_is_no_heads(path: Path) -> None:
    head = {"version": 1, "index": 4, "hash": verify_ledger(path).head_hash}
    head_path(path).write_bytes(signed(head))
    with pytest.raises(LedgerCorrupt, match="the signature does not hold"):
        verify_ledger(path)


def test_a_head_two_behind_or_of_another_entry(path: Path) -> None:
    hashes = [hashlib.sha256(line).hexdigest() for line in lines_of(path)]
    for index, digest in ((2, hashes[2]), (4, hashes[3]), (3, hashes[4]), (-1, hashes[0])):
        write_head(path, index, digest)
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


def test_a_forged_second_charge_is_noticed(path: Path) -> None:
    documents = [json.loads(line) for line in lines_of(path)]
    documents[4]["round"] = 1
    rechain(path, documents)
    with pytest.raises(LedgerCorrupt, match="line 5: charges a second time"):
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
    with pytest.raises(Refused):
        charge(ledger, round=4)
    assert "one entry behind" in verify_ledger(path).notes[0]
    charge(ledger, round=5)
    assert verify_ledger(path).notes == ()


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
    assert isinstance(verify_ledger(path).releases[0], Entry)
    assert Card.model_validate(json.loads(lines_of(path)[0])["card"]) == SILO.card
