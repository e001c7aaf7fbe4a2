"""A ledger's copy, what a restored ledger may still do, and what lifts it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from securefl import ledger_copies
from securefl.account import Account
from securefl.crypto.identity import Identity, Signatures
from securefl.errors import BadSignature, BudgetExceeded, LedgerCorrupt, Refused, UsageError
from securefl.files import write_new
from securefl.ledger import Ledger, head_path, rotate_ledger, verify_ledger
from securefl.ledger_copies import confirm_ledger, export_ledger, restore_ledger
from securefl.receipt import make_receipt, read_receipt
from securefl.release import canonical_json
from tests.ledgers import (
    OTHER,
    RUN,
    SILO,
    charge,
    clock,
    finished_ledger,
    gaussian,
    lines_of,
    point,
    rechain,
    refuse,
    signed,
    write_head,
)

SERVER = Identity.generate("server")
ENVELOPE = b"the last envelope of the copy"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """silo-1.jsonl; its copy after entry 5; heads kept at entries 4, 5 and 7. It ends with entry 7.

    At the copy notes has mu .3 and .4, so .5; then 1.2 leaves of notes, so 1.3, and .7 of images.
    """
    folder = tmp_path_factory.mktemp("story")
    path = finished_ledger(folder / "silo-1.jsonl")
    shutil.copy(head_path(path), folder / "kept-4.json")
    ledger = Ledger.open(path, SILO, clock())
    charge(ledger, round=4, envelope=ENVELOPE)
    shutil.copy(head_path(path), folder / "kept-5.json")
    export_ledger(path, folder / "copy")
    charge(ledger, round=5, step="share", claim=gaussian(1.2))
    charge(ledger, round=5, claim=gaussian(0.7), dataset="images", envelope=b"lost")
    shutil.copy(head_path(path), folder / "kept-7.json")
    return folder


@pytest.fixture
def restored(story: Path, tmp_path: Path) -> Path:
    path = tmp_path / "silo-1.jsonl"
    restore_ledger(story / "copy", path, SILO, clock())
    return path


def receipt(by: Identity = SERVER, **fields: Any) -> bytes:
    values: dict[str, Any] = {
        "run": RUN,
        "silo": SILO.card.fingerprint,
        "sequence": 5,
        "envelope_sha256": hashlib.sha256(ENVELOPE).hexdigest(),
        "time": 1_760_000_100,
        **fields,
    }
    return make_receipt(by, **values)


def by_receipt(path: Path, data: bytes, server: Identity = SERVER) -> Any:
    file = path.with_name("receipt.json")
    file.write_bytes(data)
    return confirm_ledger(path, SILO, receipt=file, server=server.card)


def spent(mu: float, delta: float) -> dict[str, Any]:
    """The private figures of an account that one claim leads to."""
    account = Account().with_claim(gaussian(mu, delta)).model_dump(mode="json")
    return {name: account[name] for name in ("mu", "delta", "private_epsilon")}


# --- export


def test_a_copy_is_the_head_and_the_lines(story: Path) -> None:
    first, *lines = lines_of(story / "copy")
    assert lines == lines_of(story / "silo-1.jsonl")[:6]
    head = json.loads((story / "kept-5.json").read_bytes())
    assert json.loads(first) == {"format": "securefl.ledger-copy/1", "head": head}


def test_export_verifies_and_does_not_overwrite(story: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        export_ledger(story / "silo-1.jsonl", story / "copy")
    path = tmp_path / "silo-1.jsonl"
    path.write_bytes(b"".join(lines_of(story / "silo-1.jsonl")[:5]))
    shutil.copy(story / "kept-5.json", head_path(path))
    with pytest.raises(LedgerCorrupt, match="line 6: is missing"):
        export_ledger(path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_a_crash_left_is_copied_as_far_as_it_holds(story: Path, tmp_path: Path) -> None:
    """A torn line is left out; a head one behind is no fault."""
    path = tmp_path / "silo-1.jsonl"
    lines = lines_of(story / "silo-1.jsonl")
    path.write_bytes(b"".join(lines[:6]) + lines[6][:-9])
    shutil.copy(story / "kept-4.json", head_path(path))
    assert len(export_ledger(path, tmp_path / "copy").notes) == 2
    summary = restore_ledger(tmp_path / "copy", tmp_path / "again.jsonl", SILO)
    assert (summary.entries, summary.notes) == (7, ())


# --- restore


def test_a_restored_ledger_holds_the_copy_and_says_so(story: Path, restored: Path) -> None:
    summary = verify_ledger(restored, SILO.card)
    assert (summary.entries, summary.restored, summary.notes) == (7, True, ())
    assert lines_of(restored)[:6] == lines_of(story / "copy")[1:]
    last = json.loads(lines_of(restored)[-1])
    digest = hashlib.sha256(lines_of(restored)[5]).hexdigest()
    assert (last["entry"], last["head"]) == ("restored", {"index": 5, "hash": digest})
    assert Ledger.open(restored, SILO).restored
    assert not Ledger.open(story / "silo-1.jsonl", SILO).restored


def test_nothing_is_overwritten(story: Path, tmp_path: Path) -> None:
    """Least of all a head record that is left: it may be the one that shows what had left."""
    path = tmp_path / "silo-1.jsonl"
    for place in (path, head_path(path)):
        place.write_bytes(b"mine")  # a broken head record may still be of use to somebody
        with pytest.raises(UsageError, match=f"{place.name}: exists already"):
            restore_ledger(story / "copy", path, SILO)
        assert place.read_bytes() == b"mine"
        place.unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_restore_that_was_killed_is_done_again(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between head record and ledger; the head is then of a restored line that never was."""
    path = tmp_path / "silo-1.jsonl"

    def killed(place: Path, data: bytes, mode: int) -> None:
        if place == path:
            raise KeyboardInterrupt
        write_new(place, data, mode)

    monkeypatch.setattr(ledger_copies, "write_new", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            restore_ledger(story / "copy", path, SILO)
        assert list(tmp_path.iterdir()) == [head_path(path)]
    monkeypatch.undo()
    with pytest.raises(UsageError, match="is missing, but had 7 lines"):
        Ledger.create(path, SILO)
    summary = restore_ledger(story / "copy", path, SILO)
    assert (summary.entries, summary.restored, summary.notes) == (7, True, ())
    with pytest.raises(UsageError, match=r"silo-1\.jsonl: exists already"):
        restore_ledger(story / "copy", path, SILO)


def test_no_other_head_is_taken_for_that_of_a_killed_restore(
    story: Path, restored: Path, tmp_path: Path
) -> None:
    """Of the lost ledger; of the restored one, once a line follows; of what only looks like it."""
    path, lines = tmp_path / "again.jsonl", lines_of(restored)
    lost = lines_of(story / "silo-1.jsonl")
    account = json.loads(head_path(restored).read_bytes())["accounts"]["notes"]
    charge(Ledger.open(restored, SILO, clock()), round=9)
    for write in (
        lambda: write_head(path, lost[:6]),
        lambda: write_head(path, lost[:7]),
        lambda: write_head(path, lost),
        lambda: write_head(path, lines_of(restored)),
        lambda: write_head(path, lines, OTHER),
        lambda: write_head(path, lines, restored=False),
        lambda: write_head(path, lines, accounts={"notes": {**account, "nonprivate_releases": 9}}),
        lambda: write_head(path, lines, history=[point(lines, 0)]),
        lambda: write_head(path, lines, history=[point(lines, 1), point(lines, 6)]),
        lambda: head_path(path).mkdir(),
    ):
        write()
        with pytest.raises(UsageError, match=r"again\.head\.json: exists already"):
            restore_ledger(story / "copy", path, SILO)
        if head_path(path).is_file():
            head_path(path).unlink()
    head_path(path).rmdir()
    write_head(path, lines)
    assert restore_ledger(story / "copy", path, SILO).entries == 7


def test_copies_and_restored_ledgers_are_for_their_owner_alone(story: Path, restored: Path) -> None:
    for file in (story / "copy", restored, head_path(restored)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ls: [], "is not a copy of a ledger"),
        (lambda ls: ls[1:], "is not a copy of a ledger"),
        (lambda ls: [b" " + ls[0], *ls[1:]], "is not a copy of a ledger"),
        (lambda ls: [ls[0].replace(b"copy/1", b"copy/2"), *ls[1:]], "is not a copy of a ledger"),
        (lambda ls: ls[:1], "line 2: is missing"),
        (lambda ls: ls[:-1], "line 7: is missing"),
        (lambda ls: [*ls[:3], *ls[4:]], "line 4: has index 3 where 2 is due"),
        (lambda ls: [*ls[:-1], ls[-1][:-1]], "line 7: breaks off"),
        (lambda ls: [ls[0].replace(b'"index":5', b'"index":4'), *ls[1:]], "line 1: the signature does not"),
    ],
)
def test_a_spoilt_copy_is_not_restored(story: Path, tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "copy").write_bytes(b"".join(change(lines_of(story / "copy"))))
    with pytest.raises((UsageError, LedgerCorrupt), match=f"copy: {message}"):
        restore_ledger(tmp_path / "copy", tmp_path / "silo-1.jsonl", SILO)
    assert not (tmp_path / "silo-1.jsonl").exists()


def test_only_its_owner_restores_a_copy(story: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerCorrupt, match="another identity than silo-2"):
        restore_ledger(story / "copy", tmp_path / "silo-1.jsonl", OTHER)


def test_a_restored_ledger_makes_no_private_release(restored: Path) -> None:
    """Whatever the data set; the rest goes on."""
    ledger = Ledger.open(restored, SILO, clock())
    before = restored.read_bytes()
    for dataset in ("notes", "images"):
        for act in (ledger.account_with, lambda d, claim: charge(ledger, round=9, dataset=d, claim=claim)):
            with pytest.raises(
                BudgetExceeded, match=r"was restored from .*securefl ledger confirm"
            ) as refused:
                act(dataset, gaussian(1e-3))
            assert refused.value.clause == "datasets"
    assert restored.read_bytes() == before
    charge(ledger, round=9)
    refuse(ledger, round=10)
    ledger.append_approval(plan="d" * 64, run=RUN, round=11, step="train")
    assert verify_ledger(restored).restored


def test_a_run_that_a_restore_interrupted_is_known(restored: Path, story: Path) -> None:
    ledger = Ledger.open(restored, SILO)
    other, third = "9" * 32, "8" * 32
    for first in (True, False):
        assert ledger.interrupted(RUN, first=first)
        assert not Ledger.open(story / "silo-1.jsonl", SILO).interrupted(RUN, first=first)
        assert not Ledger.open(story / "silo-1.jsonl", SILO).interrupted(other, first=first)
    assert not ledger.interrupted(other, first=True), "a run that begins now"
    assert ledger.interrupted(other, first=False), "it may have begun before the loss, after the copy"
    for run in (RUN, other):
        refuse(ledger, run=run, round=9, clause="ledger")
        assert ledger.interrupted(run, first=False), "to have refused it for that does not lift it"
    charge(ledger, run=other)
    confirm_ledger(restored, SILO, head=story / "kept-7.json")
    ledger.refresh()
    assert not ledger.interrupted(other, first=False), "its answers are all here"
    assert ledger.interrupted(RUN, first=False)
    assert ledger.interrupted(third, first=False), "confirming brings back sums, and no answers"


def test_a_forged_private_release_of_a_restored_ledger_is_noticed(story: Path, restored: Path) -> None:
    documents = [json.loads(line) for line in lines_of(restored)]
    lost = json.loads(lines_of(story / "silo-1.jsonl")[6])
    rechain(restored, [*documents, lost])
    with pytest.raises(LedgerCorrupt, match="line 8: is a private release, though the restored ledger"):
        verify_ledger(restored)


def test_a_restored_line_of_another_copy_is_noticed(restored: Path) -> None:
    lines = lines_of(restored)
    document = json.loads(lines[-1])
    for head in ({"index": 4}, {"hash": "0" * 64}):
        spoilt = signed({**document, "head": {**document["head"], **head}})
        restored.write_bytes(b"".join([*lines[:-1], spoilt]))
        with pytest.raises(
            LedgerCorrupt, match="line 7: is of another copy than the one that ends before it"
        ):
            verify_ledger(restored)


# --- confirmed by a head record


def test_a_newer_head_lifts_it_with_its_own_accounts(story: Path, restored: Path) -> None:
    """What was lost counts: .5 and 1.2 in squares are 1.3; then .84 more is sqrt(1.3^2 + .84^2)."""
    charge(Ledger.open(restored, SILO, clock()), round=9)  # left between restore and confirmation
    summary = confirm_ledger(restored, SILO, head=story / "kept-7.json")
    assert not summary.restored
    notes, images = summary.accounts["notes"], summary.accounts["images"]
    assert notes.mu == pytest.approx(1.3, abs=1e-12)
    assert notes.nonprivate_releases == 4  # three by the head, and the one since
    assert notes.simulated
    assert (images.mu, images.nonprivate_releases) == (0.7, 0)
    ledger = Ledger.open(restored, SILO, clock())
    charge(ledger, round=10, claim=gaussian(0.84))
    assert ledger.account("notes").mu == pytest.approx(math.sqrt(1.3**2 + 0.84**2), abs=1e-12)
    assert verify_ledger(restored).entries == 10


def test_the_head_of_the_copy_itself_lifts_it(story: Path, restored: Path) -> None:
    before = verify_ledger(restored)
    summary = confirm_ledger(restored, SILO, head=story / "kept-5.json")
    assert (summary.restored, summary.accounts) == (False, before.accounts)


def test_an_older_head_is_refused(story: Path, restored: Path) -> None:
    before = restored.read_bytes()
    with pytest.raises(
        Refused, match=r"kept-4\.json: is older than the restored copy \(entry 4, .* ends with 5"
    ):
        confirm_ledger(restored, SILO, head=story / "kept-4.json")
    assert restored.read_bytes() == before


def test_a_head_that_is_not_this_ledgers_is_refused(story: Path, restored: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    lines = lines_of(story / "silo-1.jsonl")
    write_head(tmp_path / "kept.jsonl", lines, OTHER)
    head_path(tmp_path / "kept.jsonl").replace(kept)
    with pytest.raises(LedgerCorrupt, match="signature does not hold, or is not by the keys of this ledger"):
        confirm_ledger(restored, SILO, head=kept)
    kept.write_bytes((story / "kept-7.json").read_bytes().replace(b'"index":7', b'"index":9'))
    with pytest.raises(LedgerCorrupt, match="signature does not hold"):
        confirm_ledger(restored, SILO, head=kept)
    other = Ledger.create(tmp_path / "second.jsonl", SILO, clock())
    for number in range(1, 9):
        charge(other, round=number)
    with pytest.raises(Refused, match="is of another ledger than the one that the copy was made from"):
        confirm_ledger(restored, SILO, head=head_path(other.path))
    with pytest.raises(Refused, match="restored and not yet confirmed"):  # its own, of after the restore
        confirm_ledger(restored, SILO, head=head_path(restored))
    write_head(tmp_path / "kept.jsonl", lines[:6], hash="0" * 64)
    with pytest.raises(Refused, match="names another entry 5"):
        confirm_ledger(restored, SILO, head=head_path(tmp_path / "kept.jsonl"))
    write_head(tmp_path / "kept.jsonl", lines, accounts={})
    with pytest.raises(LedgerCorrupt, match="accounts are not those of the data sets"):
        confirm_ledger(restored, SILO, head=head_path(tmp_path / "kept.jsonl"))
    assert verify_ledger(restored).restored


def test_what_was_not_restored_is_not_confirmed(story: Path, restored: Path) -> None:
    with pytest.raises(Refused, match="nothing to confirm"):
        confirm_ledger(story / "silo-1.jsonl", SILO, head=story / "kept-7.json")
    confirm_ledger(restored, SILO, head=story / "kept-7.json")
    with pytest.raises(Refused, match="nothing to confirm"):
        confirm_ledger(restored, SILO, head=story / "kept-7.json")


def test_one_thing_confirms(story: Path, restored: Path) -> None:
    kept = story / "kept-7.json"
    for arguments in (
        {},
        {"head": kept, "receipt": kept, "server": SERVER.card},
        {"head": kept, "server": SERVER.card},
        {"receipt": kept},
    ):
        with pytest.raises(UsageError, match="by a head record, or by a receipt"):
            confirm_ledger(restored, SILO, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["accounts"]["notes"].update(mu=0.4), "notes is lower than this ledger's own"),
        (lambda d: d["accounts"]["notes"].update(private_epsilon=0.1), "notes is lower"),
        (lambda d: d["accounts"]["notes"].update(delta=1e-4), "notes is lower"),
        (lambda d: d["accounts"]["notes"].update(private_epsilon=None, delta=None, mu=0.0), "notes is lower"),
        (lambda d: d["accounts"]["notes"].update(spent(0.4, 1e-6)), "notes is lower"),
        (lambda d: d["accounts"]["notes"].update(spent(1.3, 1e-5)), "notes is lower"),
        (lambda d: d["accounts"]["notes"].update(nonprivate=[], nonprivate_releases=0), "notes is lower"),
        (lambda d: d["accounts"]["notes"].update(nonprivate_releases=2), "notes is lower"),
        (lambda d: d["accounts"]["notes"].update(simulated=False), "notes is lower"),
        (lambda d: d["accounts"]["images"].update(private_epsilon=0.1), "images is lower .* or is none"),
        (lambda d: d["accounts"].pop("notes"), "not those of the data sets"),
        (lambda d: d["of"].update(index=4), "a head record that is older"),
        (
            lambda d: d["of"].update(index=5),
            "a head record that is older than the restored copy, or of another",
        ),
        (lambda d: d.update(by="receipt"), "another release than the last one"),
        (lambda d: d.update(by="word"), "is not an entry"),
    ],
)
def test_a_forged_confirmation_is_noticed(story: Path, restored: Path, change: Any, message: str) -> None:
    confirm_ledger(restored, SILO, head=story / "kept-7.json")
    documents = [json.loads(line) for line in lines_of(restored)]
    rechain(restored, documents)
    verify_ledger(restored)
    change(documents[-1])
    rechain(restored, documents)
    with pytest.raises(LedgerCorrupt, match=f"line 8: .*{message}"):
        verify_ledger(restored)


def test_a_confirmation_without_a_restore_is_noticed(story: Path, restored: Path) -> None:
    confirm_ledger(restored, SILO, head=story / "kept-7.json")
    documents = [json.loads(line) for line in lines_of(restored)]
    rechain(restored, [*documents[:-2], documents[-1]])
    with pytest.raises(LedgerCorrupt, match="line 7: confirms a ledger that was not restored"):
        verify_ledger(restored)


# --- one copy restored again and again


def lose(path: Path) -> Path:
    """The ledger is gone; its head record was kept elsewhere."""
    path.unlink()
    return head_path(path).rename(path.with_name(f"kept-{len(list(path.parent.iterdir()))}.json"))


def test_each_loss_of_one_copy_is_confirmed_by_the_newest_head(
    story: Path, restored: Path, tmp_path: Path
) -> None:
    """The same copy three times: .5, by the first head 1.3 (.5, 1.2), then .84, and then .7 in squares."""
    confirm_ledger(restored, SILO, head=story / "kept-7.json")
    charge(Ledger.open(restored, SILO, clock()), round=9, claim=gaussian(0.84))
    second = lose(restored)
    restore_ledger(story / "copy", restored, SILO, clock())
    notes = confirm_ledger(restored, SILO, head=second).accounts["notes"]
    assert notes.mu == pytest.approx(math.sqrt(1.3**2 + 0.84**2), abs=1e-12)
    charge(Ledger.open(restored, SILO, clock()), round=9, claim=gaussian(0.7))
    export_ledger(restored, tmp_path / "second-copy")
    third = lose(restored)
    history = [json.loads(head.read_bytes())["history"] for head in (second, third)]
    assert history[0][0] == history[1][0] == point(lines_of(story / "silo-1.jsonl"), 0)
    assert [[entry["index"] for entry in one] for one in history] == [[0, 6], [0, 6]]
    assert history[0][1] != history[1][1]
    restore_ledger(story / "copy", restored, SILO, clock())
    notes = confirm_ledger(restored, SILO, head=third).accounts["notes"]
    assert notes.mu == pytest.approx(math.sqrt(1.3**2 + 0.84**2 + 0.7**2), abs=1e-12)
    lose(restored)
    # A copy of the third of these ledgers is confirmed by no head of the first or the second.
    restore_ledger(tmp_path / "second-copy", restored, SILO, clock())
    for head in (story / "kept-7.json", second):
        with pytest.raises(Refused, match="is of another ledger than the one that the copy was made from"):
            confirm_ledger(restored, SILO, head=head)
    notes = confirm_ledger(restored, SILO, head=third).accounts["notes"]
    assert notes.mu == pytest.approx(math.sqrt(1.3**2 + 0.84**2 + 0.7**2), abs=1e-12)
    third_history = json.loads(head_path(restored).read_bytes())["history"]
    assert (third_history[:2], third_history[2]["index"]) == (history[1], 9)


def test_a_head_that_parted_before_the_copy_ends_does_not_know_it(story: Path, tmp_path: Path) -> None:
    """Restored from a copy after entry 3 and confirmed too early: what entries 4 and 5 spent is not in it."""
    path = tmp_path / "silo-1.jsonl"
    lines = lines_of(story / "silo-1.jsonl")
    path.write_bytes(b"".join(lines[:4]))
    write_head(path, lines[:4])
    export_ledger(path, tmp_path / "older")
    by = lose(path)
    restore_ledger(tmp_path / "older", path, SILO, clock())
    confirm_ledger(path, SILO, head=by)
    ledger = Ledger.open(path, SILO, clock())
    for number in range(10, 13):
        charge(ledger, round=number, claim=gaussian(1.2))
    more = lose(path)
    assert json.loads(more.read_bytes())["index"] > 5, "and it has more lines, and higher accounts"
    restore_ledger(story / "copy", path, SILO, clock())
    with pytest.raises(Refused, match=r"restored from an older copy \(as entry 4, this copy ends with 5\)"):
        confirm_ledger(path, SILO, head=more)
    lose(path)
    restore_ledger(tmp_path / "older", path, SILO, clock())
    assert not confirm_ledger(path, SILO, head=more).restored


def test_a_head_under_later_keys_confirms_once_the_ledger_has_them(
    story: Path, restored: Path, tmp_path: Path
) -> None:
    new = Identity.generate("silo-1")
    confirm_ledger(restored, SILO, head=story / "kept-7.json")
    ledger = Ledger.open(restored, SILO, clock())
    ledger.rotate(new)
    charge(ledger, round=9, claim=gaussian(0.84))
    kept = lose(restored)
    restore_ledger(story / "copy", restored, SILO, clock())
    with pytest.raises(LedgerCorrupt, match=r"go on under those first \(securefl ledger rotate\)"):
        confirm_ledger(restored, SILO, head=kept)
    assert rotate_ledger(restored, SILO, new)
    notes = confirm_ledger(restored, new, head=kept).accounts["notes"]
    assert notes.mu == pytest.approx(math.sqrt(1.3**2 + 0.84**2), abs=1e-12)


def test_a_ledger_is_restored_so_often_and_no_more(tmp_path: Path) -> None:
    """The genesis line and 63 restores: the list in its head record has an end."""
    path = Ledger.create(tmp_path / "a.jsonl", SILO, clock()).path
    lines = lines_of(path)
    for _ in range(64):
        last = point(lines, len(lines) - 1)
        document = {"version": 2, "entry": "restored", "index": len(lines), "head": last}
        lines.append(signed({**document, "time": 1_760_000_100.5, "previous": last["hash"]}))
    path.write_bytes(b"".join(lines[:64]))
    write_head(path, lines[:64])
    assert verify_ledger(path).entries == 64
    assert len(json.loads(head_path(path).read_bytes())["history"]) == 64
    export_ledger(path, tmp_path / "copy")
    with pytest.raises(LedgerCorrupt, match="line 65: was restored 63 times, and may not be once more"):
        restore_ledger(tmp_path / "copy", tmp_path / "b.jsonl", SILO)
    assert not (tmp_path / "b.head.json").exists()
    path.write_bytes(b"".join(lines))
    write_head(path, lines)
    with pytest.raises(LedgerCorrupt, match="line 65: was restored 63 times"):
        verify_ledger(path)


# --- confirmed by a receipt


def test_the_receipt_for_the_last_release_lifts_it(restored: Path) -> None:
    before = verify_ledger(restored)
    charge(Ledger.open(restored, SILO, clock()), round=9)
    summary = by_receipt(restored, receipt())
    assert not summary.restored
    notes = summary.accounts["notes"]
    assert (notes.mu, notes.nonprivate_releases) == (
        before.account.mu,
        before.account.nonprivate_releases + 1,
    )
    charge(Ledger.open(restored, SILO, clock()), round=10, claim=gaussian(1.2))
    assert verify_ledger(restored).account.mu == pytest.approx(1.3, abs=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {"envelope_sha256": hashlib.sha256(b"lost").hexdigest()},
        {"envelope_sha256": hashlib.sha256(b"the envelope").hexdigest()},
        {"run": "cd" * 16},
        {"silo": OTHER.card.fingerprint},
    ],
)
def test_a_receipt_for_anything_else_does_not(restored: Path, fields: dict[str, str]) -> None:
    with pytest.raises(
        Refused, match=rf"is not for the last release .*run {RUN}, round 4, train.*is missing here"
    ):
        by_receipt(restored, receipt(**fields))
    assert verify_ledger(restored).restored


def test_a_receipt_must_be_the_servers(restored: Path) -> None:
    with pytest.raises(BadSignature, match=r"receipt\.json: the receipt does not hold"):
        by_receipt(restored, receipt(OTHER))
    with pytest.raises(UsageError, match=r"receipt\.json: the receipt is not"):
        by_receipt(restored, b"{}")
    assert verify_ledger(restored).restored


def test_a_copy_without_a_release_has_no_receipt(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "a.jsonl", SILO, clock())
    refuse(ledger)
    export_ledger(ledger.path, tmp_path / "copy")
    restore_ledger(tmp_path / "copy", tmp_path / "b.jsonl", SILO)
    with pytest.raises(Refused, match="the restored copy has none"):
        by_receipt(tmp_path / "b.jsonl", receipt())


def test_a_receipt_is_read_back(restored: Path) -> None:
    data = receipt()
    found = read_receipt(data, SERVER.card)
    assert (found.run, found.silo, found.sequence, found.time) == (
        RUN,
        SILO.card.fingerprint,
        5,
        1_760_000_100,
    )
    document = json.loads(data)
    signatures = document.pop("signature")
    digest = hashlib.sha256(canonical_json(document)).digest()
    SERVER.card.verify(b"securefl/1 receipt", digest, Signatures.from_document(signatures))
    assert document["format"] == "securefl.receipt/1"


@pytest.mark.parametrize("field", ["run", "silo", "sequence", "envelope_sha256", "time"])
def test_a_receipt_altered_does_not_hold(field: str) -> None:
    document = json.loads(receipt())
    value = document[field]
    document[field] = value + 1 if isinstance(value, int) else ("0" if value[0] != "0" else "1") + value[1:]
    with pytest.raises(BadSignature, match="the receipt does not hold"):
        read_receipt(canonical_json(document) + b"\n", SERVER.card)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"[]", "is not a signed document"),
        (receipt()[:-1], "is not in its canonical"),
        (b" " * 2**14 + receipt(), "is too large"),
        (canonical_json({**json.loads(receipt()), "sequence": True}) + b"\n", "field sequence"),
        (canonical_json({**json.loads(receipt()), "format": "securefl.receipt/2"}) + b"\n", "field format"),
        (canonical_json({**json.loads(receipt()), "more": 1}) + b"\n", "field more"),
    ],
)
def test_what_is_no_receipt(data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=f"the receipt .*{message}"):
        read_receipt(data, SERVER.card)


# --- restored again, and new keys


def test_what_an_earlier_restore_left_open_is_not_forgotten(
    story: Path, restored: Path, tmp_path: Path
) -> None:
    """A copy of an unconfirmed ledger: neither the newest head of it nor a receipt shows the first loss."""
    ledger = Ledger.open(restored, SILO, clock())
    charge(ledger, round=9, envelope=ENVELOPE)
    export_ledger(restored, tmp_path / "second")
    charge(ledger, round=10)
    again = tmp_path / "again.jsonl"
    restore_ledger(tmp_path / "second", again, SILO, clock())
    with pytest.raises(Refused, match="restored and not yet confirmed"):
        confirm_ledger(again, SILO, head=head_path(restored))
    with pytest.raises(Refused, match="lost before an earlier restore"):
        by_receipt(again, receipt())
    with pytest.raises(Refused, match="another ledger"):  # it does not know what the restored one released
        confirm_ledger(again, SILO, head=story / "kept-7.json")
    confirm_ledger(restored, SILO, head=story / "kept-7.json")
    summary = confirm_ledger(again, SILO, head=head_path(restored))
    assert summary.accounts["notes"].mu == pytest.approx(1.3, abs=1e-12)
    assert summary.accounts["notes"].nonprivate_releases == 5  # three by the head, entries of rounds 9 and 10


def test_a_forged_receipt_line_after_two_restores_is_noticed(restored: Path, tmp_path: Path) -> None:
    export_ledger(restored, tmp_path / "second")
    by_receipt(restored, receipt())
    confirmed = json.loads(lines_of(restored)[-1])
    again = tmp_path / "again.jsonl"
    restore_ledger(tmp_path / "second", again, SILO, clock())
    rechain(again, [*(json.loads(line) for line in lines_of(again)), confirmed])
    with pytest.raises(LedgerCorrupt, match="line 9: leaves open what was lost before an earlier restore"):
        verify_ledger(again)


def test_new_keys_between_restore_and_confirmation(story: Path, restored: Path) -> None:
    new = Identity.generate("silo-1")
    Ledger.open(restored, SILO, clock()).rotate(new)
    assert verify_ledger(restored).restored
    summary = confirm_ledger(restored, new, head=story / "kept-7.json")
    assert (summary.restored, summary.fingerprint) == (False, new.card.fingerprint)


def test_keys_from_before_the_copy_confirm_nothing(story: Path, tmp_path: Path) -> None:
    """Who stole the old keys cannot make a head that lifts a restore under the new ones."""
    path, new = tmp_path / "silo-1.jsonl", Identity.generate("silo-1")
    for file in ("silo-1.jsonl", "silo-1.head.json"):
        shutil.copy(story / file, tmp_path / file)
    Ledger.open(path, SILO, clock()).rotate(new)
    export_ledger(path, tmp_path / "copy")
    restore_ledger(tmp_path / "copy", tmp_path / "again.jsonl", new, clock())
    write_head(path, lines_of(path), SILO)
    with pytest.raises(LedgerCorrupt, match="not by the keys of this ledger"):
        confirm_ledger(tmp_path / "again.jsonl", new, head=head_path(path))
    with pytest.raises(LedgerCorrupt, match="newer keys"):
        restore_ledger(tmp_path / "copy", tmp_path / "third.jsonl", SILO)
