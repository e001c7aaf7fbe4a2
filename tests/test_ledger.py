"""The ledger: what it records, the accounts, answers, and several writers."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securefl import _ledger_files
from securefl._ledger_lines import Point
from securefl.account import Account
from securefl.accountants import Sampled, composed_epsilon
from securefl.crypto.identity import Identity
from securefl.errors import BudgetExceeded, LedgerCorrupt, Refused, UsageError
from securefl.ledger import Ledger, head_path, rotate_ledger, verify_ledger
from securefl.ledger_copies import export_ledger, restore_ledger
from securefl.release import NonPrivate, PayloadKind
from tests.ledgers import (
    OTHER,
    PEERS,
    PLAIN,
    PLAN,
    RUN,
    SILO,
    charge,
    clock,
    copied,
    finished_ledger,
    gaussian,
    lines_of,
    refuse,
    signed,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_ledger(tmp_path_factory.mktemp("ledger") / "silo-1.jsonl")


@pytest.fixture
def path(finished: Path, tmp_path: Path) -> Path:
    return copied(finished, tmp_path)


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
    assert (first.plan, first.plan_sequence, first.dataset) == (PLAN, 3, "notes")
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
    assert ledger.accounts() == before.accounts == {"notes": before.account}
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
    with pytest.raises(UsageError, match="cannot be opened for writing"):
        Ledger.open(path.with_name("absent.jsonl"), SILO)
    with pytest.raises(UsageError, match="cannot be read"):
        verify_ledger(path.with_name("absent.jsonl"))


def test_a_ledger_that_is_gone_is_not_begun_anew(path: Path) -> None:
    """Its head record still says that something left."""
    path.unlink()
    with pytest.raises(UsageError, match=r"is missing, but had \d+ lines by .*head\.json; restore it"):
        Ledger.create(path, SILO)


def test_a_crash_between_head_and_genesis_is_begun_again(tmp_path: Path) -> None:
    fresh = tmp_path / "new.jsonl"
    Ledger.create(fresh, SILO)
    fresh.unlink()  # as a crash leaves it: the head is written first
    charge(Ledger.create(fresh, SILO))
    assert len(verify_ledger(fresh).releases) == 1


def test_a_head_of_other_keys_is_in_the_way_of_a_new_ledger(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    Ledger.create(path, OTHER)
    path.unlink()
    with pytest.raises(LedgerCorrupt, match=r"new\.head\.json: the signature does not hold"):
        Ledger.create(path, SILO)


@pytest.mark.parametrize("name", ["ledger", "ledger.json", "ledger.head.json", ".jsonl", "", "ledger.JSONL"])
def test_a_ledger_has_a_name_of_its_kind(path: Path, name: str) -> None:
    """`ledger` and `ledger.json` would have one head record, `ledger.head.json` would be its own."""
    place = path.parent / name if name else Path(name)
    export_ledger(path, path.with_name("copy"))
    if name:
        shutil.copy(path, place)
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    acts: list[Callable[[], Any]] = [
        lambda: Ledger.create(place, SILO),
        lambda: Ledger.open(place, SILO),
        lambda: Ledger.look(place, SILO),
        lambda: verify_ledger(place),
        lambda: rotate_ledger(place, SILO, OTHER),
        lambda: export_ledger(place, path.with_name("second")),
        lambda: restore_ledger(path.with_name("copy"), place, SILO),
    ]
    for act in acts:
        with pytest.raises(UsageError, match=r"is no name for a ledger, which ends in \.jsonl"):
            act()
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before


def test_what_is_no_file_is_refused_at_once(path: Path) -> None:
    """Opening a pipe would wait for whoever writes to it. The same for the head record."""
    for place in (path, head_path(path)):
        kept = place.read_bytes()
        place.unlink()
        for make in (lambda p: os.mkfifo(p), Path.mkdir, lambda p: p.symlink_to("/dev/zero")):
            make(place)
            for act in (
                lambda: Ledger.open(path, SILO),
                lambda: Ledger.look(path, SILO),
                lambda: verify_ledger(path),
                lambda: export_ledger(path, path.with_name("copy")),
            ):
                with pytest.raises(UsageError, match=rf"{place.name}: cannot be .*(ordinary|directory)"):
                    act()
            if place.is_dir():
                place.rmdir()
            else:
                place.unlink()
        place.write_bytes(kept)
    assert Ledger.open(path, SILO).notes == ()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before = os.umask(0)
    try:
        ledger = Ledger.create(path, SILO)
        assert (mode_of(path), mode_of(head_path(path))) == (0o600, 0o600)
        charge(ledger)
        assert (mode_of(path), mode_of(head_path(path))) == (0o600, 0o600)
        path.chmod(0o640)  # for an auditor of the same group
        charge(Ledger.open(path, SILO), round=2)
        assert (mode_of(path), mode_of(head_path(path))) == (0o640, 0o640)
    finally:
        os.umask(before)
    assert verify_ledger(path).entries == 3


def test_looking_changes_nothing(path: Path) -> None:
    """Not even what a crash left; and what would append says so."""
    head = head_path(path).read_bytes()
    charge(Ledger.open(path, SILO), round=4)
    head_path(path).write_bytes(head)
    with path.open("ab") as file:
        file.write(b'{"account"')
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.parent.iterdir()}
    ledger = Ledger.look(path, SILO)
    assert [note.split(" is ")[0] for note in ledger.notes] == [
        "the head record",
        "the last line broke off while it was written and",
    ]
    assert ledger.accounts() == verify_ledger(path).accounts
    assert ledger.account_with("notes", gaussian(1.2)).mu == pytest.approx(1.3, abs=1e-12)
    for act in (
        ledger.refresh,
        lambda: charge(ledger, round=5),
        lambda: refuse(ledger, round=5),
        lambda: ledger.append_approval(plan=PLAN, run=RUN, round=5, step="train"),
        lambda: ledger.append_confirmation("head", Point(index=1, hash="0" * 64), {}),
        lambda: ledger.rotate(Identity.generate("silo-1")),
    ):
        with pytest.raises(UsageError, match=r"silo-1\.jsonl: was opened to look at it only"):
            act()
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.parent.iterdir()} == before
    with pytest.raises(LedgerCorrupt, match="another identity than silo-2"):
        Ledger.look(path, OTHER)
    assert Ledger.open(path, SILO).notes == ()
    assert verify_ledger(path).notes == ()


def test_two_processes_cannot_both_spend_the_last_of_a_budget(tmp_path: Path) -> None:
    """Each has room for one release as it opened the ledger; the account that decides is the file's."""
    path = tmp_path / "silo-1.jsonl"
    first, second = Ledger.create(path, SILO), Ledger.open(path, SILO)

    def permit(account: Account) -> None:
        if account.mu > 1.0:
            raise BudgetExceeded("no room")

    charge(first, claim=gaussian(0.9), permit=permit)
    assert second.account("notes").mu == 0.0, "it has not looked since"
    with pytest.raises(BudgetExceeded, match="no room"):
        charge(second, round=2, claim=gaussian(0.9), permit=permit)
    assert len(verify_ledger(path).releases) == 1
    assert second.account("notes").mu == pytest.approx(0.9), "and now it has"


_SPENDER = """
import sys
from pathlib import Path
from securefl.crypto.identity import Identity
from securefl.errors import BudgetExceeded
from securefl.ledger import Ledger
from tests.ledgers import charge, sampled

silo = Identity.load(Path(sys.argv[2]))
ledger, spent = Ledger.open(Path(sys.argv[1]), silo), 0

def permit(account):
    if account.epsilon > float(sys.argv[4]):
        raise BudgetExceeded("no room")

sys.stdin.readline()
for number in range(6):
    try:
        charge(ledger, run=sys.argv[3] * 32, round=number + 1, claim=sampled(10), permit=permit)
        spent += 1
    except BudgetExceeded:
        pass
print(spent)
"""


def test_processes_that_spend_at_once_stay_within_one_budget(tmp_path: Path) -> None:
    """Three processes, six trainings of ten steps each, room for four of the eighteen in all."""
    path, key = tmp_path / "silo-1.jsonl", tmp_path / "key"
    Ledger.create(path, SILO)
    SILO.save(key)
    ceiling = composed_epsilon(0.0, (Sampled(noise_multiplier=1.0, sample_rate=0.1, steps=45),), 1e-5)
    command = [sys.executable, "-c", _SPENDER, path, key]
    running = [
        subprocess.Popen(
            [*map(str, command), letter, str(ceiling)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parent.parent,
        )
        for letter in "abc"
    ]
    said = [process.communicate("go\n")[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum(map(int, said)) == 4
    account = verify_ledger(path).account
    assert account.sampled[0].steps == 40
    assert account.epsilon is not None
    assert account.epsilon <= ceiling


def test_a_step_is_answered_once(path: Path) -> None:
    """Neither another kind nor a refusal may follow a release of the same step, nor the other way round."""
    for ledger in (Ledger.open(path, SILO), Ledger.open(path, SILO)):
        before = path.read_bytes()
        for again in (
            lambda one=ledger: charge(one, round=3, body=b"fresh noise"),
            lambda one=ledger: charge(one, round=3, kind=PayloadKind.METRICS),
            lambda one=ledger: refuse(one, round=3),
        ):
            with pytest.raises(Refused, match="round 3, train, was answered before"):
                again()
        assert path.read_bytes() == before
    charge(ledger, round=3, run="cd" * 16)
    refuse(ledger, round=3, step="finish")
    with pytest.raises(Refused, match="round 3, finish, was answered before"):
        charge(ledger, round=3, step="finish")
    assert verify_ledger(path).entries == 7


def test_a_refusal_is_an_entry_and_spends_nothing(path: Path) -> None:
    ledger = Ledger.open(path, SILO, clock())
    before = ledger.accounts()
    entry = refuse(ledger, round=4, reason="r" * 500)
    assert ledger.accounts() == before
    (found,) = verify_ledger(path).refusals
    assert found == entry == ledger.answer_at(RUN, 4, "train") == ledger.last_answer(RUN)
    assert (found.index, found.clause, found.reason) == (5, "methods", "r" * 400)
    assert (found.plan, found.plan_sequence) == (PLAN, 3)
    assert (found.bytes, found.envelope_sha256) == (11, hashlib.sha256(b"unavailable").hexdigest())


def test_answers_are_found_again(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    first, share, _, last = ledger.entries
    assert ledger.answer_at(RUN, 1, "train") == first
    assert ledger.answer_at(RUN, 2, "share") == share
    assert ledger.answer_at(RUN, 2, "train") is None
    assert ledger.last_answer(RUN) == last
    assert ledger.last_answer("cd" * 16) is None
    other = charge(ledger, run="cd" * 16)
    assert (ledger.last_answer(RUN), ledger.last_answer("cd" * 16)) == (last, other)


def test_an_approval_is_of_one_plan_and_given_once(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    ledger.append_approval(plan="d" * 64, run=RUN, round=9, step="train")
    assert ledger.is_approved("d" * 64)
    assert not ledger.is_approved(PLAN), "that a plan was answered is not an approval"
    with pytest.raises(Refused, match="was approved before"):
        ledger.append_approval(plan="d" * 64, run=RUN, round=9, step="train")
    (found,) = verify_ledger(path).approvals
    assert (found.plan, found.run, found.round, found.step) == ("d" * 64, RUN, 9, "train")
    assert Ledger.open(path, SILO).is_approved("d" * 64)


def test_the_next_sequence_only_rises(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    seen = [ledger.next_sequence]
    charge(ledger, round=4)
    seen.append(ledger.next_sequence)
    refuse(ledger, round=5)
    seen.append(ledger.next_sequence)
    ledger.append_approval(plan=PLAN, run=RUN, round=6, step="train")
    seen.append(Ledger.open(path, SILO).next_sequence)
    assert seen == [5, 6, 7, 8]


def test_bytes_since_counts_what_is_dated_ahead(tmp_path: Path) -> None:
    """Releases of 1, 2 and 4 bytes at 100, 300 and, the clock set back, 200; a refusal sends no data."""
    times = iter([0.0, 100.0, 300.0, 200.0, 400.0])
    ledger = Ledger.create(tmp_path / "a.jsonl", SILO, lambda: next(times))
    for number, size in enumerate((1, 2, 4), start=1):
        charge(ledger, round=number, envelope=b"x" * size)
    refuse(ledger, round=4)
    sums = {since: ledger.bytes_since(since) for since in (0.0, 100.0, 100.5, 200.0, 250.0, 300.5)}
    assert sums == {0.0: 7, 100.0: 7, 100.5: 6, 200.0: 6, 250.0: 2, 300.5: 0}


# --- several writers


def test_two_writers_by_turns_keep_the_chain(path: Path) -> None:
    one, two = Ledger.open(path, SILO), Ledger.open(path, SILO)
    for number in range(4, 8):
        charge(one, round=2 * number)
        charge(two, round=2 * number + 1, claim=gaussian(0.1))
    with pytest.raises(Refused, match="answered before"):
        charge(one, round=9)
    summary = verify_ledger(path)
    assert (summary.entries, summary.notes) == (13, ())
    assert one.entries == two.entries == summary.releases
    assert summary.account.mu == pytest.approx(math.sqrt(0.5**2 + 4 * 0.1**2), rel=1e-12)


def test_another_process_approves_while_this_one_runs(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    SILO.save(path.with_name("key"))
    code = (
        "import sys; from pathlib import Path; from securefl.crypto.identity import Identity; "
        "from securefl.ledger import Ledger; "
        "ledger = Ledger.open(Path(sys.argv[1]), Identity.load(Path(sys.argv[2]))); "
        f"ledger.append_approval(plan='{PLAN}', run='{RUN}', round=9, step='train')"
    )
    subprocess.run([sys.executable, "-c", code, path, path.with_name("key")], check=True)
    assert not ledger.is_approved(PLAN)
    ledger.refresh()
    assert ledger.is_approved(PLAN)
    assert charge(ledger, round=4).index == 6
    assert verify_ledger(path).notes == ()


def test_an_append_waits_for_the_writer_before_it(path: Path) -> None:
    """While another holds the lock, nothing is read and nothing written."""
    before = path.read_bytes()
    ledger = Ledger.open(path, SILO)
    with path.open("rb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        waiting = threading.Thread(target=charge, args=(ledger,), kwargs={"round": 4})
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert path.read_bytes() == before
    waiting.join(30)
    assert verify_ledger(path).entries == 6


def test_a_lock_that_stays_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks shares it with others that look; nobody waits for ever."""
    monkeypatch.setattr(_ledger_files, "LOCK_WAIT", 0.0)
    ledger = Ledger.open(path, SILO)
    acts: list[Callable[[], Any]] = [lambda: Ledger.open(path, SILO), lambda: charge(ledger, round=4)]
    looks: list[Callable[[], Any]] = [lambda: Ledger.look(path, SILO), lambda: verify_ledger(path)]
    with path.open("rb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH)
        for act in looks:
            act()
        for act in acts:
            with pytest.raises(UsageError, match=r"silo-1\.jsonl: is locked by another process"):
                act()
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        for act in (*looks, *acts):
            with pytest.raises(UsageError, match=r"silo-1\.jsonl: is locked by another process"):
                act()
    charge(ledger, round=4)
    assert verify_ledger(path).entries == 6


@pytest.mark.parametrize("line", [1, 3, 5])
def test_a_change_under_an_open_ledger_is_noticed(path: Path, line: int) -> None:
    ledger = Ledger.open(path, SILO)
    lines, head = lines_of(path), head_path(path).read_bytes()
    spoilt = list(lines)
    spoilt[line - 1] = signed(json.loads(lines[line - 1]))  # other signatures, the same content and length
    path.write_bytes(b"".join(spoilt))
    for act in (ledger.refresh, lambda: charge(ledger, round=4)):
        with pytest.raises(LedgerCorrupt, match="cut or changed in its first 5 lines"):
            act()
    path.write_bytes(b"".join(lines[:4]))
    with pytest.raises(LedgerCorrupt, match="cut or changed"):
        ledger.refresh()
    path.write_bytes(b"".join(lines))
    head_path(path).unlink()
    with pytest.raises(LedgerCorrupt, match="head record is missing"):
        ledger.refresh()
    head_path(path).write_bytes(head)
    ledger.refresh()
    charge(ledger, round=4)


def test_a_bad_line_by_another_is_not_followed(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    with path.open("ab") as file:
        file.write(signed({**json.loads(lines_of(path)[1]), "index": 5}))
    with pytest.raises(LedgerCorrupt, match="line 6: the hash chain is broken"):
        charge(ledger, round=4)
    assert len(ledger.entries) == 4


def test_what_another_writer_left_torn_or_lagging_is_repaired(path: Path) -> None:
    ledger, other = Ledger.open(path, SILO), Ledger.open(path, SILO)
    head = head_path(path).read_bytes()
    charge(other, round=4)
    head_path(path).write_bytes(head)
    ledger.refresh()
    assert verify_ledger(path).notes == ()
    with path.open("ab") as file:
        file.write(b'{"account":{"del')
    charge(ledger, round=5)
    assert verify_ledger(path).entries == 7


def test_a_full_disk_leaves_the_ledger_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.open(path, SILO)
    before, account = path.read_bytes(), ledger.account("notes")
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:100]))
    with pytest.raises(UsageError, match="cannot be written"):
        charge(ledger, round=4)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert ledger.account("notes") == account
    charge(ledger, round=4)
    assert verify_ledger(path).entries == 6


def test_what_could_not_be_verified_is_not_written(path: Path) -> None:
    ledger = Ledger.open(path, SILO)
    before = path.read_bytes()
    bad: dict[str, Any]
    for bad in (
        {"protection": "NOT A WORD"},
        {"recipients": []},
        {"envelope": b""},
        {"dataset": "Not A Name"},
        {"plan": "not a hash"},
        {"plan_sequence": 0},
        {"plan_sequence": True},
        {"run": "not a run"},
        {"step": "Not A Step"},
    ):
        with pytest.raises(LedgerCorrupt):
            charge(ledger, **{"round": 9, **bad})
    for bad in ({"clause": "Not A Clause"}, {"clause": ""}, {"reason": ""}, {"round": 0}):
        with pytest.raises(LedgerCorrupt):
            refuse(ledger, **{"round": 9, **bad})
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
    assert ledger.account("notes") == Account()
    foreseen = ledger.account_with("notes", gaussian(1.0))
    assert ledger.account("notes") == Account()
    assert ledger.accounts() == {}
    charge(ledger, claim=gaussian(1.0))
    account = ledger.account("notes")
    assert account == foreseen
    assert account.epsilon == account.private_epsilon
    assert delta_of(account.epsilon or 0.0, 1.0) == pytest.approx(1e-5, rel=1e-6)
    assert not account.simulated
    charge(ledger, round=2)
    assert ledger.account("notes").epsilon is None
    assert ledger.account("notes").private_epsilon == foreseen.private_epsilon


def test_each_data_set_has_its_own_account(tmp_path: Path) -> None:
    """notes: .3 and .4 give .5 at 1e-5; images: 1.2 at 1e-6, and a model that is not private."""
    path = tmp_path / "a.jsonl"
    ledger = Ledger.create(path, SILO)
    charge(ledger, round=1, claim=gaussian(0.3))
    charge(ledger, round=2, claim=gaussian(1.2, 1e-6, True), dataset="images")
    charge(ledger, round=3, claim=gaussian(0.4))
    charge(ledger, round=4, dataset="images")
    for accounts in (ledger.accounts(), verify_ledger(path).accounts, Ledger.open(path, SILO).accounts()):
        assert set(accounts) == {"notes", "images"}
        notes, images = accounts["notes"], accounts["images"]
        assert notes.mu == pytest.approx(0.5, abs=1e-12)
        assert (notes.delta, notes.nonprivate, notes.simulated) == (1e-5, (), False)
        assert delta_of(notes.epsilon or 0.0, 0.5) == pytest.approx(1e-5, rel=1e-6)
        assert (images.mu, images.delta, images.simulated) == (1.2, 1e-6, True)
        assert (images.nonprivate, images.nonprivate_releases) == ((PLAIN.reason,), 1)
    assert ledger.account_with("images", gaussian(0.5)).mu == pytest.approx(1.3, abs=1e-12)  # 5, 12, 13
    assert [entry.account for entry in ledger.entries][2:] == [
        ledger.account("notes"),
        ledger.account("images"),
    ]
    with pytest.raises(UsageError, match="several data sets: notes, images"):
        _ = verify_ledger(path).account


def test_reasons_are_listed_once_and_counted(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.jsonl", SILO)
    for i in range(1, 4):
        charge(ledger, round=i)
    charge(ledger, round=4, claim=NonPrivate(reason="another"))
    assert ledger.account("notes").nonprivate == (PLAIN.reason, "another")
    assert ledger.account("notes").nonprivate_releases == 4
