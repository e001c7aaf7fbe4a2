"""What left a silo: an append-only, hash-chained, signed file, and the privacy account over it.

One JSON line an entry. The first (genesis) holds the silo's card; each later one describes a release, the
account after it and the hash of the line before; each is signed. A signed head record beside the file says
which entry is the last, so a cut tail is noticed. `append` returns after the disk has it: charge first, send
after. The file holds hashes, sizes, names and claims, never what was released.

Limits: a copy of the file *and* of the head record from the same earlier moment verifies; only somebody who
noted a later head hash elsewhere can tell. Whoever holds the silo's keys can write any history.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from securefl.account import Account
from securefl.crypto.identity import Card, Identity, Signatures
from securefl.errors import BadSignature, BudgetExceeded, LedgerCorrupt, Refused, UsageError
from securefl.files import append_synced, read_limited, truncate_synced, write_atomic, write_new
from securefl.messages import FINGERPRINT, Party
from securefl.release import GaussianSums, NonPrivate, PayloadKind, PrivacyClaim, canonical_json, parse_json

_CONTEXT = b"securefl/1 ledger"
_HEAD_CONTEXT = b"securefl/1 ledger-head"
_MAX_LINE = 2**20  # an entry with 256 recipients takes some 50 KiB


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Genesis(_Record):
    """The first line: whose ledger it is."""

    version: Literal[1] = 1
    entry: Literal["genesis"] = "genesis"
    index: Literal[0] = 0
    time: float
    card: Card
    previous: None = None
    signature: dict[str, str]


class Entry(_Record):
    """One release. bytes, envelope_sha256: of the sealed envelope; body_sha256: of the body inside it."""

    version: Literal[1] = 1
    entry: Literal["release"] = "release"
    index: int = Field(ge=1)
    time: float
    run: str
    round: int
    step: str
    kind: PayloadKind
    recipients: tuple[Party, ...] = Field(min_length=1)
    protection: str = Field(pattern=r"^[a-z-]{1,16}$")
    bytes: int = Field(ge=1)
    body_sha256: str = Field(pattern=FINGERPRINT)
    envelope_sha256: str = Field(pattern=FINGERPRINT)
    claim: PrivacyClaim
    account: Account
    previous: str = Field(pattern=FINGERPRINT)
    signature: dict[str, str]

    @property
    def charge(self) -> tuple[str, int, str, str]:
        """What may be charged once only."""
        return self.run, self.round, self.step, self.kind.value


_LINE: TypeAdapter[Genesis | Entry] = TypeAdapter(Annotated[Genesis | Entry, Field(discriminator="entry")])


@dataclass(frozen=True)
class LedgerSummary:
    """A ledger that verified: whose it is, its releases in order, the account, the hash of its last line.

    entries counts the genesis line too. notes: what a crash left behind, if anything.
    """

    name: str
    fingerprint: str
    entries: int
    releases: tuple[Entry, ...]
    account: Account
    head_hash: str
    notes: tuple[str, ...] = ()


@dataclass
class _Chain:
    """A verified run of entries from the genesis line on. size: the bytes of the file that they take."""

    card: Card
    last_hash: str
    size: int
    hash_before: str | None = None
    account: Account = field(default_factory=Account)
    releases: list[Entry] = field(default_factory=list)
    charged: set[tuple[str, int, str, str]] = field(default_factory=set)

    @property
    def last(self) -> int:
        return len(self.releases)

    def add(self, entry: Entry, line: bytes) -> None:
        self.hash_before, self.last_hash = self.last_hash, _line_hash(line)
        self.size += len(line)
        self.account = entry.account
        self.releases.append(entry)
        self.charged.add(entry.charge)

    def summary(self, notes: tuple[str, ...]) -> LedgerSummary:
        return LedgerSummary(
            name=self.card.name,
            fingerprint=self.card.fingerprint,
            entries=self.last + 1,
            releases=tuple(self.releases),
            account=self.account,
            head_hash=self.last_hash,
            notes=notes,
        )


def head_path(path: Path) -> Path:
    """Where the head record of a ledger lies: NAME.jsonl has NAME.head.json."""
    return path.with_suffix(".head.json")


# --- encoding


def _digest(document: dict[str, Any]) -> bytes:
    """What is signed: SHA-256 of the canonical JSON of a document without its signature."""
    return hashlib.sha256(canonical_json({k: v for k, v in document.items() if k != "signature"})).digest()


def _signed_line(document: dict[str, Any], identity: Identity, context: bytes = _CONTEXT) -> bytes:
    signature = identity.sign(context, _digest(document)).document()
    return canonical_json({**document, "signature": signature}) + b"\n"


def _line_hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _require_signature(where: str, document: dict[str, Any], card: Card, context: bytes = _CONTEXT) -> None:
    try:
        card.verify(context, _digest(document), Signatures.from_document(document.get("signature")))
    except (BadSignature, ValueError):
        raise LedgerCorrupt(f"{where}: the signature does not hold") from None


# --- verifying


def _lines(path: Path) -> Iterator[bytes]:
    """The lines, newline included (a torn last one lacks it)."""
    try:
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE + 1):
                yield line
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def _parse_line(where: str, line: bytes) -> tuple[Genesis | Entry, dict[str, Any]]:
    """The entry and the document that is signed."""
    if len(line) > _MAX_LINE:
        raise LedgerCorrupt(f"{where}: is longer than any entry")
    try:
        entry = _LINE.validate_json(line)
    except BadSignature as error:
        raise LedgerCorrupt(f"{where}: the card does not hold: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        if first["type"] == "json_invalid":
            raise LedgerCorrupt(f"{where}: is not JSON") from None
        field_name = ".".join(str(part) for part in first["loc"][1:]) or "entry"
        raise LedgerCorrupt(f"{where}: is not an entry (field {field_name[:80]})") from None
    document = entry.model_dump(mode="json")
    if canonical_json(document) + b"\n" != line:
        raise LedgerCorrupt(f"{where}: is not in its canonical encoding")
    return entry, document


def _begin(where: str, line: bytes, card: Card | None) -> _Chain:
    entry, document = _parse_line(where, line)
    if not isinstance(entry, Genesis):
        raise LedgerCorrupt(f"{where}: is not the first entry of a ledger")
    if card is not None and card != entry.card:
        raise LedgerCorrupt(f"{where}: the ledger is that of another identity than {card.name}")
    _require_signature(where, document, entry.card)
    return _Chain(entry.card, _line_hash(line), len(line))


def _follow(where: str, line: bytes, chain: _Chain) -> None:
    entry, document = _parse_line(where, line)
    if not isinstance(entry, Entry):
        raise LedgerCorrupt(f"{where}: is a second first entry")
    if entry.index != chain.last + 1:
        raise LedgerCorrupt(f"{where}: has index {entry.index} where {chain.last + 1} is due")
    if entry.previous != chain.last_hash:
        raise LedgerCorrupt(f"{where}: the hash chain is broken: the entry before it is not the one it names")
    _require_signature(where, document, chain.card)
    if entry.charge in chain.charged:
        raise LedgerCorrupt(f"{where}: charges a second time for the same run, round, step and kind")
    try:
        account = chain.account.with_claim(entry.claim)
    except BudgetExceeded as error:
        raise LedgerCorrupt(f"{where}: {error}") from None
    if not account.matches(entry.account):
        raise LedgerCorrupt(f"{where}: the account does not follow from the claims")
    chain.add(entry, line)


def _read_chain(path: Path, card: Card | None) -> tuple[_Chain, bool]:
    """Every whole line, verified; and whether a torn line (no newline: its writing broke off) follows."""
    chain: _Chain | None = None
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}: line {number}"
        torn = not line.endswith(b"\n") and len(line) <= _MAX_LINE
        if chain is None:
            chain = _begin(where, line, card)
        elif torn:
            return chain, True
        else:
            _follow(where, line, chain)
    if chain is None:
        raise LedgerCorrupt(f"{path}: line 1: is missing; the file is empty")
    return chain, False


def _check_head(path: Path, chain: _Chain) -> bool:
    """Compare the chain with its head record; True where the head lags one entry behind (a crash)."""
    where = head_path(path)
    if not where.exists():
        raise LedgerCorrupt(f"{where}: the head record is missing, so a cut tail could not be noticed")
    try:
        document = parse_json(read_limited(where, _MAX_LINE))
        index, digest = document["index"], document["hash"]
        if set(document) != {"version", "index", "hash", "signature"} or document["version"] != 1:
            raise ValueError
        if type(index) is not int:
            raise TypeError
    except (ValueError, TypeError, KeyError):
        raise LedgerCorrupt(f"{where}: is not a head record") from None
    _require_signature(str(where), document, chain.card, _HEAD_CONTEXT)
    if index > chain.last:
        raise LedgerCorrupt(
            f"{path}: line {chain.last + 2}: is missing; by the head record the file has {index + 1} lines"
        )
    if (index, digest) == (chain.last, chain.last_hash):
        return False
    if (index, digest) == (chain.last - 1, chain.hash_before):
        return True
    raise LedgerCorrupt(f"{where}: names another last entry than line {chain.last + 1} of {path.name}")


def _verified(path: Path, card: Card | None) -> tuple[_Chain, tuple[str, ...]]:
    chain, torn = _read_chain(path, card)
    notes = []
    if _check_head(path, chain):
        notes.append("the head record is one entry behind, as a crash leaves it; that entry verifies")
    if torn:
        notes.append("the last line broke off while it was written and is not counted; nothing left for it")
    return chain, tuple(notes)


def verify_ledger(path: Path, card: Card | None = None) -> LedgerSummary:
    """Check every line, the chain, the signatures, the accounts and the head record; change nothing.

    card: whose ledger it must be; without it the ledger only proves to be that of the card inside it.
    Raises LedgerCorrupt naming file and line of the first fault, UsageError where the file cannot be read.
    """
    chain, notes = _verified(path, card)
    return chain.summary(notes)


# --- writing


class Ledger:
    """A silo's own ledger, open for appending. Made by `create` or `open`.

    Not for two writers: an append that finds the file changed by another process refuses.
    """

    def __init__(self, path: Path, identity: Identity, chain: _Chain, clock: Callable[[], float]) -> None:
        self.path = path
        self._identity = identity
        self._chain = chain
        self._clock = clock

    def __repr__(self) -> str:
        return f"Ledger({self.path}, {self._chain.last} releases)"

    @classmethod
    def create(cls, path: Path, identity: Identity, clock: Callable[[], float] = time.time) -> Ledger:
        """Begin a ledger. Raises UsageError where the file exists or cannot be written."""
        genesis = {
            "version": 1,
            "entry": "genesis",
            "index": 0,
            "time": float(clock()),
            "card": identity.card.model_dump(mode="json"),
            "previous": None,
        }
        line = _signed_line(genesis, identity)
        write_new(path, line)
        ledger = cls(path, identity, _Chain(identity.card, _line_hash(line), len(line)), clock)
        ledger._write_head()
        return ledger

    @classmethod
    def open(cls, path: Path, identity: Identity, clock: Callable[[], float] = time.time) -> Ledger:
        """Verify a ledger and go on with it, after repairing what a crash left: a lagging head, a torn line.

        Raises LedgerCorrupt or UsageError.
        """
        chain, notes = _verified(path, identity.card)
        ledger = cls(path, identity, chain, clock)
        if notes:
            truncate_synced(path, chain.size)
            ledger._write_head()
        return ledger

    def account(self) -> Account:
        """What has been released so far adds up to."""
        return self._chain.account

    def account_with(self, claim: NonPrivate | GaussianSums) -> Account:
        """The account if a release under `claim` were appended; nothing is written. Raises BudgetExceeded."""
        return self._chain.account.with_claim(claim)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every release so far, in order."""
        return tuple(self._chain.releases)

    def append(
        self,
        *,
        run: str,
        round: int,
        step: str,
        kind: PayloadKind,
        recipients: Sequence[Party],
        protection: str,
        envelope: bytes,
        body: bytes,
        claim: NonPrivate | GaussianSums,
    ) -> Entry:
        """Charge a release; when this returns the disk has it and `envelope` may be sent.

        Raises Refused where the same run, round, step and kind was charged before (a retry sends the first
        bytes again), BudgetExceeded for a claim whose noise is none, UsageError where the file cannot be
        written. Only the hashes and sizes of `envelope` and `body` are kept.
        """
        chain = self._chain
        if (run, round, step, kind.value) in chain.charged:
            raise Refused(
                f"{self.path}: {kind.value} of round {round}, {step}, was charged before; send that again"
            )
        document = {
            "version": 1,
            "entry": "release",
            "index": chain.last + 1,
            "time": float(self._clock()),
            "run": run,
            "round": round,
            "step": step,
            "kind": kind.value,
            "recipients": [party.model_dump() for party in recipients],
            "protection": protection,
            "bytes": len(envelope),
            "body_sha256": hashlib.sha256(body).hexdigest(),
            "envelope_sha256": hashlib.sha256(envelope).hexdigest(),
            "claim": claim.model_dump(mode="json"),
            "account": chain.account.with_claim(claim).model_dump(mode="json"),
            "previous": chain.last_hash,
        }
        line = _signed_line(document, self._identity)
        # What is written must be what `verify_ledger` takes, or the file would lock its owner out.
        entry, _ = _parse_line(f"{self.path}: line {chain.last + 2}", line)
        assert isinstance(entry, Entry)
        append_synced(self.path, line, chain.size)
        chain.add(entry, line)
        self._write_head()
        return entry

    def _write_head(self) -> None:
        head = {"version": 1, "index": self._chain.last, "hash": self._chain.last_hash}
        write_atomic(head_path(self.path), _signed_line(head, self._identity, _HEAD_CONTEXT))
