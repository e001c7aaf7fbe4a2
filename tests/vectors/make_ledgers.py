"""A small ledger and its head record, and what a reader says of altered and forged ones."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from securefl.ledger import Ledger, head_path
from securefl.release import PayloadKind, canonical_json
from tests.ledgers import PEERS, charge, clock, gaussian, head_of, lines_of, point, refuse, signed
from tests.vectors.people import CAROL, NEXT_SILO, SILO, identities

LINE, HEAD, CONSENT = b"securefl/1 ledger", b"securefl/1 ledger-head", b"securefl/1 ledger-rotation"
Document = dict[str, Any]


def _written(path: Path) -> None:
    """Genesis, approval, model, centroids, refusal, rotation, centroids, model."""
    ledger = Ledger.create(path, SILO, clock())
    ledger.append_approval(plan="c" * 64, run="ab" * 16, round=1, step="train")
    charge(ledger)
    share: Document = {
        "step": "share",
        "kind": PayloadKind.CENTROIDS,
        "recipients": PEERS,
        "protection": "peer",
    }
    charge(ledger, round=2, plan_sequence=4, claim=gaussian(0.3), **share)
    refuse(ledger, round=2, plan_sequence=5)
    ledger.rotate(NEXT_SILO)
    charge(ledger, round=3, plan_sequence=6, claim=gaussian(0.4, 1e-6), **share)
    charge(ledger, round=3, plan_sequence=7)


def _follow(lines: list[bytes], **fields: Any) -> Document:
    """The document of a line after `lines`."""
    return {
        "version": 2,
        "index": len(lines),
        "previous": hashlib.sha256(lines[-1]).hexdigest(),
        "time": 1_760_000_100.5,
        **fields,
    }


def _fields(line: bytes) -> Document:
    """Of a line, what may stand in another place."""
    ours = ("version", "index", "previous", "time", "signature")
    return {key: value for key, value in json.loads(line).items() if key not in ours}


def _rotation(lines: list[bytes], to: Any, consenting: Any) -> Document:
    document = _follow(lines, entry="rotation", card=json.loads(to.card.to_json()))
    digest = hashlib.sha256(canonical_json(document)).digest()
    return {**document, "consent": consenting.sign(CONSENT, digest).document()}


class _Cases:
    def __init__(self) -> None:
        self.made: list[Document] = []

    def add(self, name: str, at: int | str | None, why: str, lines: list[int | bytes], **more: Any) -> None:
        """at: the line that is named, "head" for the record, or None where the ledger verifies."""
        whole = [line if isinstance(line, int) else line.decode("ascii") for line in lines]
        error = None if at is None else "LedgerCorrupt"
        self.made.append({"name": name, "why": why, "error": error, "at": at, "lines": whole, **more})


def _altered(cases: _Cases, lines: list[bytes]) -> None:
    """By somebody without keys."""
    every: list[int | bytes] = list(range(1, 9))
    cases.add("first-dropped", 1, "The first entry is missing.", every[1:])
    cases.add("third-dropped", 3, "A line is missing in the middle.", [1, 2, *every[3:]])
    cases.add("swapped", 3, "Lines 3 and 4 have changed places.", [1, 2, 4, 3, *every[4:]])
    cases.add("repeated", 4, "Line 3 is there twice.", [1, 2, 3, 3, *every[3:]])
    cases.add("empty", 1, "Nothing is no ledger.", [])
    cases.add("last-cut", 8, "By the head record a line is missing.", every[:-1])
    cases.add("two-cut", 7, "By the head record two lines are missing.", every[:-2])
    cases.add(
        "last-torn",
        8,
        "The last line lacks its newline and does not count, though the record has it.",
        [*every[:-1], lines[7][:-1]],
    )
    cases.add("blank", 4, "An empty line.", [1, 2, 3, b"\n", *every[3:]])
    spoilt = {
        "amount": (
            b'"mu":0.3,"noise',
            b'"mu":0.2,"noise',
            "A claim is altered; the line has lost its signatures.",
        ),
        "space": (b'"index":', b'"index": ', "A space: a line has one byte string."),
        "key-twice": (b'"index":', b'"index":3,"index":', "A member occurs twice."),
        "version-1": (
            b'"version":2',
            b'"version":1',
            "Of an older format, which this version does not read.",
        ),
    }
    for name, (old, new, why) in spoilt.items():
        if lines[3].count(old) != 1:
            raise ValueError(name)
        cases.add(name, 4, why, [1, 2, 3, lines[3].replace(old, new), *every[4:]])
    for half in ("ed25519", "mldsa65"):
        document = json.loads(lines[3])
        document["signature"][half] = json.loads(lines[2])["signature"][half]
        why = f"The {half} signature is that of line 3; one that holds is not enough."
        cases.add(f"signature-{half}", 4, why, [1, 2, 3, canonical_json(document) + b"\n", *every[4:]])


def _forged(cases: _Cases, lines: list[bytes]) -> None:
    """By the holder of the keys; a forged line ends the file and is refused before the head is read."""
    every: list[int | bytes] = list(range(1, 9))

    def after(
        name: str, count: int, why: str, document: Document, by: Any = SILO, context: bytes = LINE
    ) -> None:
        line = signed(document, by, context)
        cases.add(name, count + 1, f"{why} Signed.", [*every[:count], line])

    private: Document = json.loads(lines[3])
    lower = {**private, "account": {**private["account"], "private_epsilon": 0.1}}
    after("account-lower", 3, "The account does not follow from the claim.", lower)
    after(
        "claim-lower",
        3,
        "The claim is lower, the account is not.",
        {**private, "claim": {**private["claim"], "mu": 0.2}},
    )
    other = {**private, "claim": {"mechanism": "none", "reason": "another claim"}}
    after("claim-removed", 3, "A private claim became none; the account knows only the old.", other)
    after("other-previous", 3, "It names another line as the one before.", {**private, "previous": "0" * 64})
    after("index-skipped", 3, "An index is left out.", {**private, "index": 4})
    after("context", 3, "Both signatures are in the context of a head record.", private, context=HEAD)
    after("by-another", 3, "The signatures are another silo's.", private, by=CAROL)
    after("field-more", 3, "A field more.", {**private, "note": ""})
    after("whole-time", 3, "A time is written without its fraction.", {**private, "time": 1_760_000_002})
    again = _follow(lines, **_fields(lines[7]))
    after("answered-twice", 8, "A second answer for round 3, train.", again, by=NEXT_SILO)
    after(
        "refused-later",
        8,
        "A refusal of what was answered in line 8.",
        _follow(lines, **{**_fields(lines[4]), "round": 3}),
        by=NEXT_SILO,
    )
    after(
        "approved-twice",
        8,
        "A second approval of one plan.",
        _follow(lines, **_fields(lines[1])),
        by=NEXT_SILO,
    )
    after(
        "confirmed",
        8,
        "Confirms a ledger that was not restored.",
        _follow(lines, entry="confirmed", by="head", of=point(lines, 7), accounts=head_of(lines)["accounts"]),
        by=NEXT_SILO,
    )
    after(
        "other-copy",
        8,
        "Restored from a copy with another last line.",
        _follow(lines, entry="restored", head=point(lines, 6)),
        by=NEXT_SILO,
    )
    genesis = _follow(lines[:3], entry="genesis", card=json.loads(SILO.card.to_json()))
    after("second-first", 3, "A second first entry.", {**genesis, "index": 0, "previous": None})
    after("by-old-keys", 8, "By the keys that line 6 gave up.", again, by=SILO)
    early = lines[:5]
    after("no-consent", 5, "To keys whose holder did not consent.", _rotation(early, NEXT_SILO, SILO))
    after("other-name", 5, "To keys of another name.", _rotation(early, CAROL, CAROL))
    after("keys-again", 8, "Back to keys that were given up.", _rotation(lines, SILO, SILO), by=NEXT_SILO)
    foreign = {**json.loads(lines[0]), "card": json.loads(CAROL.card.to_json())}
    cases.add(
        "foreign-card",
        1,
        "The first line holds a card whose keys did not sign it.",
        [signed(foreign, SILO), *every[1:]],
    )


def _heads(cases: _Cases, lines: list[bytes], heads: list[bytes]) -> None:
    every: list[int | bytes] = list(range(1, 9))

    def add(name: str, at: int | str | None, why: str, head: bytes | None) -> None:
        cases.add(name, at, why, every, head=None if head is None else head.decode("ascii"))

    last = head_of(lines)

    def forged(**fields: Any) -> bytes:
        return signed({**last, **fields}, NEXT_SILO, HEAD)

    add("head-behind", None, "The record of line 7: a crash left it one behind.", heads[6])
    add("head-two-behind", "head", "The record of line 6.", heads[5])
    add("head-before-rotation", "head", "The record of line 5, by keys that were given up.", heads[4])
    add("head-missing", "head", "No record: a cut tail could not be noticed.", None)
    add("head-torn", "head", "The record lacks its newline.", heads[7][:-1])
    add(
        "head-by-old-keys",
        "head",
        "The record is signed by the keys that line 6 gave up.",
        signed(last, SILO, HEAD),
    )
    add(
        "head-as-line",
        "head",
        "The record is signed in the context of a line.",
        signed(last, NEXT_SILO, LINE),
    )
    add("head-hash", "head", "The record names another hash; signed.", forged(hash="0" * 64))
    add("head-account", "head", "The record leaves the account out; signed.", forged(accounts={}))
    other = [{"index": 0, "hash": "0" * 64}]
    add("head-history", "head", "The record is of another history; signed.", forged(history=other))
    add("head-history-text", "head", "The history is no list; signed.", forged(history="0" * 64))
    add("head-history-empty", "head", "The history is empty; signed.", forged(history=[]))
    add(
        "head-restored",
        "head",
        "The record says that the ledger was restored; signed.",
        forged(restored=True),
    )
    add("head-ahead", 9, "The record is of a ninth line; signed.", forged(index=8, hash="0" * 64))


def _restored(cases: _Cases, lines: list[bytes]) -> None:
    """The ledger as it was restored, once and twice, and confirmed."""

    def more(known: list[bytes], **fields: Any) -> list[bytes]:
        return [*known, signed(_follow(known, **fields), NEXT_SILO, LINE)]

    def add(name: str, at: int | str | None, why: str, whole: list[bytes], **head: Any) -> None:
        record = signed({**head_of(whole), **head}, NEXT_SILO, HEAD)
        restored = {} if at else {"restored": head_of(whole)["restored"]}
        shown: list[int | bytes] = [*range(1, 9), *whole[8:]]
        cases.add(name, at, why, shown, head=record.decode("ascii"), **restored)

    once = more(lines, entry="restored", head=point(lines, 7))
    twice = more(once, entry="restored", head=point(once, 8))
    accounts = head_of(lines)["accounts"]
    confirmed = more(once, entry="confirmed", by="head", of=point(lines, 7), accounts=accounts)
    add("restored", None, "Restored from a copy; the history has two lines.", once)
    add("restored-twice", None, "Restored from a copy of a restored ledger; three lines.", twice)
    add("restored-confirmed", None, "Confirmed by the head record of the copy.", confirmed)
    last = head_of(twice)["history"]
    for name, why, history in (
        ("last", "The history is the last restored line alone", last[2:]),
        ("first", "The history is the genesis line alone", last[:1]),
        ("gap", "The history leaves the first restored line out", [last[0], last[2]]),
        ("order", "The history has the restored lines in another order", [last[0], last[2], last[1]]),
        ("index", "The history has a wrong index", [*last[:2], {**last[2], "index": 10}]),
    ):
        add(f"history-{name}", "head", f"{why}; signed.", twice, history=history)
    private = more(once, **{**_fields(lines[6]), "round": 4})
    add("restored-private", 10, "A private release, though the restored ledger was not confirmed.", private)
    early = more(twice, entry="confirmed", by="head", of=point(twice, 8), accounts=accounts)
    add("restored-open", 11, "Confirmed by the copy's own record, itself of a ledger not confirmed.", early)


def ledger() -> dict[str, Any]:
    """The files by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger-1.jsonl"
        _written(path)
        lines = lines_of(path)
        head = head_path(path).read_bytes()
    signers = [SILO] * 5 + [NEXT_SILO] * 3
    heads = [signed(head_of(lines[: i + 1]), by, HEAD) for i, by in enumerate(signers)]
    every: list[int | bytes] = list(range(1, 9))
    cases = _Cases()
    cases.add("whole", None, "Verifies.", every)
    cases.add(
        "torn",
        None,
        "A ninth line broke off while it was written; it is not counted.",
        [*every, b'{"account":'],
    )
    _altered(cases, lines)
    _forged(cases, lines)
    _heads(cases, lines, heads)
    _restored(cases, lines)
    refusals = {
        "format": "securefl ledgers, version 2: which verify, and which line is named for the others",
        "identities": identities(SILO, NEXT_SILO),
        "cases": cases.made,
    }
    return {"ledger-1.jsonl": b"".join(lines), "ledger-1.head.json": head, "ledger-refusals-1.json": refusals}
