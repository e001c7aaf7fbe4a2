"""Mutants of a silo's ledger and its head record, and the verifier that faces them.

RAW: whoever can write to the file. SIGNED: one line changed and signed again by the owner's keys. SEALED: the
lines after it chained and signed again too, and the head: a history that only the owner could forge, so that
the code behind chain and signatures is reached.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from securefl.crypto.identity import Identity
from securefl.ledger import Ledger, LedgerSummary, head_path, verify_ledger
from securefl.release import PayloadKind, canonical_json, parse_json
from tests.fuzz.messages import Form
from tests.fuzz.subjects import SILOS, seeds_of
from tests.ledgers import PEERS, PLAN, RUN, charge, clock, gaussian, head_of, lines_of, refuse, signed
from tests.mutants import mutate_bytes, mutate_json

OWNER, OTHER = SILOS[0], SILOS[1]
ROTATED = Identity(OWNER.name, seeds_of("the owner's new keys"))
_LINE, _HEAD, _CONSENT = (
    b"securefl/1 ledger",
    b"securefl/1 ledger-head",
    b"securefl/1 ledger-rotation",
)
Document = dict[str, Any]


def _digest(document: Document, without: str) -> bytes:
    return hashlib.sha256(canonical_json({k: v for k, v in document.items() if k != without})).digest()


def line_hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def packed(head: bytes, lines: list[bytes]) -> bytes:
    """Both files as one byte string, as the campaign wants its mutants."""
    return len(head).to_bytes(4, "big") + head + b"".join(lines)


def unpacked(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:4], "big")
    return data[4 : 4 + size], data[4 + size :]


def signer_of(lines: list[bytes], number: int) -> Identity:
    """Whose keys sign the line: those before or after the change of keys."""
    return ROTATED if any(b'"entry":"rotation"' in line for line in lines[:number]) else OWNER


def chained(lines: list[bytes], first: int) -> list[bytes]:
    """The lines from `first` on, each naming the one before it, consenting and signed again."""
    done = lines[:first]
    for number in range(first, len(lines)):
        document = json.loads(lines[number])
        document["previous"] = line_hash(done[-1])
        if document.get("entry") == "restored":
            document["head"] = {"index": number - 1, "hash": line_hash(done[-1])}
        if document.get("entry") == "confirmed":
            # By a head record of the copy: of its last line, the one before the restored line.
            document["of"] = {"index": number - 2, "hash": line_hash(done[-2])}
        if document.get("entry") == "rotation":
            document["consent"] = _consent(document)
        done.append(signed(document, signer_of(lines, number), _LINE))
    return done


def _consent(document: Document) -> Document:
    unsigned = {key: value for key, value in document.items() if key != "signature"}
    return ROTATED.sign(_CONSENT, _digest(unsigned, "consent")).document()


def head_bytes(lines: list[bytes], like: bytes) -> bytes:
    """The head record of these lines; where a mutant among them has no say in it, one that is `like`."""
    try:
        return signed(head_of(lines), signer_of(lines, len(lines)), _HEAD)
    except (ValueError, TypeError, KeyError, RecursionError):
        return like


class LedgerFile:
    """`verify_ledger` of a mutated file."""

    name = "ledger"
    forms = tuple(Form)

    def __init__(self, folder: Path) -> None:
        self._path = folder / "mutant.jsonl"
        short = self._written(folder / "short.jsonl", OWNER, self._released)
        long = self._written(folder / "long.jsonl", OWNER, self._released, self._changed)
        foreign = self._written(folder / "foreign.jsonl", OTHER, self._released)
        self.ledgers = [short, self._restored(*long)]
        self._others = [part for lines, record in (*self.ledgers, foreign) for part in (*lines, record)]
        for lines, record in self.ledgers:  # what is mutated must be true
            assert self.attempt(packed(record, lines)).entries == len(lines)

    # --- true ledgers

    def _written(
        self, path: Path, owner: Identity, *parts: Callable[[Ledger], None]
    ) -> tuple[list[bytes], bytes]:
        ledger = Ledger.create(path, owner, clock())
        for part in parts:
            part(ledger)
        return lines_of(path), head_path(path).read_bytes()

    def _released(self, ledger: Ledger) -> None:
        charge(ledger)
        share = {"step": "share", "kind": PayloadKind.CENTROIDS, "protection": "peer", "recipients": PEERS}
        charge(ledger, round=2, claim=gaussian(0.4), **share)

    def _changed(self, ledger: Ledger) -> None:
        ledger.append_approval(run=RUN, round=3, step="train", plan=PLAN)
        refuse(ledger, round=3)
        ledger.rotate(ROTATED)
        charge(ledger, round=4, step="finish", kind=PayloadKind.METRICS)

    def _restored(self, lines: list[bytes], record: bytes) -> tuple[list[bytes], bytes]:
        """Lines for a restore, and its confirmation by the head record of the copy, written by hand."""
        last, head = json.loads(lines[-1]), json.loads(record)
        base = {"version": 2, "time": last["time"] + 1, "previous": ""}
        restored = {**base, "entry": "restored", "index": last["index"] + 1, "head": None}
        confirmed = {**base, "entry": "confirmed", "index": last["index"] + 2, "by": "head", "of": None}
        confirmed["accounts"] = head["accounts"]
        added = [canonical_json(one) for one in (restored, confirmed)]
        whole = chained([*lines, *added], len(lines))
        return whole, head_bytes(whole, record)

    # --- mutants

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        true, record = rng.choice(self.ledgers)
        lines = list(true)
        if form is Form.RAW:
            return self._raw(rng, lines, record)
        which = rng.randrange(len(lines) + 1)
        if which == len(lines):
            return packed(self._resigned(rng, record, signer_of(lines, which), _HEAD), lines)
        lines[which] = self._resigned(rng, lines[which], signer_of(lines, which), _LINE)
        if form is Form.SEALED:
            lines = chained(lines, which + 1)
        return packed(head_bytes(lines, record) if rng.random() < 0.8 else record, lines)

    def _raw(self, rng: random.Random, lines: list[bytes], record: bytes) -> bytes:
        which = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                return packed(mutate_bytes(rng, record, self._others), lines)
            case 1:
                lines[which] = mutate_bytes(rng, lines[which], self._others)
            case 2:
                lines[which] = mutate_json(rng, json.loads(lines[which])) + b"\n"
            case 3:
                lines[which] = rng.choice(self._others)
            case 4:
                edits = (lines[:which], lines[which:], [*lines, lines[which]], lines[::-1], lines * 2)
                lines = rng.choice(edits)
            case _:
                lines = [mutate_bytes(rng, b"".join(lines), self._others)]
        return packed(record, lines)

    def _resigned(self, rng: random.Random, line: bytes, signer: Identity, context: bytes) -> bytes:
        """The line with one thing off and, where it is still an object, signatures that hold."""
        document = json.loads(line)
        del document["signature"]
        text = mutate_json(rng, document)
        if rng.random() < 0.1:
            signer = OTHER
        try:
            changed = parse_json(text)
            if changed.get("entry") == "rotation" and rng.random() < 0.8:
                changed["consent"] = _consent(changed)
            whole = signed(changed, signer, context)
        except (ValueError, AttributeError, RecursionError):
            return text + b"\n"  # no JSON object any more
        if rng.random() < 0.3 and text.endswith(b"}"):
            # The odd spelling itself, with the signature of what it means.
            return text[:-1] + b',"signature":' + canonical_json(json.loads(whole)["signature"]) + b"}\n"
        return whole

    # --- the verifier

    def attempt(self, data: bytes) -> LedgerSummary:
        record, lines = unpacked(data)
        self._path.write_bytes(lines)
        head_path(self._path).write_bytes(record)
        return verify_ledger(self._path)

    def check(self, data: bytes, taken: LedgerSummary, form: Form) -> None:
        _, content = unpacked(data)
        lines = content.splitlines(keepends=True)
        counted, torn = lines[: taken.entries], lines[taken.entries :]
        for line in counted:
            assert canonical_json(json.loads(line)) + b"\n" == line
        assert not torn or (taken.notes and not content.endswith(b"\n"))
        assert taken.head_hash == line_hash(counted[-1])
        if form is Form.RAW:
            assert counted in [true for true, _ in self.ledgers], "a history that nobody signed was taken"
