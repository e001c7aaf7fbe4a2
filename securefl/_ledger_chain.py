"""What the lines of a ledger add up to, and the rules by which one follows another.

A `Chain` is made of verified lines; `check` decides whether a line may follow, for the reader and for the
writer alike, so that nothing is written that would not verify. This room reads and writes no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from securefl._ledger_lines import (
    CONSENT_CONTEXT,
    HEAD_CONTEXT,
    LINE_CONTEXT,
    MAX_HISTORY,
    MAX_LINE,
    VERSION,
    Answer,
    ApprovalEntry,
    ConfirmedEntry,
    Entry,
    Genesis,
    Head,
    Place,
    Point,
    RefusalEntry,
    ReleaseEntry,
    RestoredEntry,
    RotationEntry,
    consent_digest,
    parse_head,
    parse_line,
    require_signature,
)
from securefl.account import Account
from securefl.crypto.documents import SignedDocument, sign_document
from securefl.crypto.identity import Card, Identity, Signatures
from securefl.errors import BadSignature, BudgetExceeded, LedgerCorrupt
from securefl.release import Noised


@dataclass(frozen=True)
class Tip:
    """Where a chain stands after one of its lines.

    card: whose signatures the next one must bear. history: the genesis line and every `restored` line.
    """

    index: int
    hash: str
    time: float
    card: Card
    history: tuple[Point, ...]
    restored: bool
    accounts: Mapping[str, Account]

    def account(self, dataset: str) -> Account:
        """Of one data set; empty where nothing of it has left."""
        return self.accounts.get(dataset, Account())

    def head(self, signer: Identity) -> bytes:
        """The bytes of the head record. Raises LedgerCorrupt where it would be larger than may be read."""
        head = Head(
            index=self.index,
            hash=self.hash,
            time=self.time,
            history=self.history,
            restored=self.restored,
            accounts=dict(self.accounts),
        )
        data = sign_document(head.model_dump(mode="json"), signer, HEAD_CONTEXT)
        if len(data) > MAX_LINE:
            raise LedgerCorrupt("the ledger holds too many data sets or reasons for its head record")
        return data

    def agrees(self, head: Head) -> bool:
        """Whether `head` is the record of this line."""
        return (
            (head.index, head.hash, head.time, head.history, head.restored)
            == (self.index, self.hash, self.time, self.history, self.restored)
        ) and (
            head.accounts.keys() == self.accounts.keys()
            and all(account.matches(head.accounts[name]) for name, account in self.accounts.items())
        )


@dataclass(frozen=True)
class LastRelease:
    """The latest release of a chain, its line's hash, and the card under which it left."""

    entry: ReleaseEntry
    hash: str
    card: Card


@dataclass(frozen=True)
class Restore:
    """An unconfirmed restore. copy: the tip of the copy; released: the last release in it."""

    copy: Tip
    released: LastRelease | None


@dataclass(frozen=True)
class Link:
    """A line that may follow: its entry, its bytes, and where the chain stands after it."""

    entry: Entry
    line: bytes
    tip: Tip


@dataclass
class Chain:
    """What verified lines, from the genesis line on, add up to.

    size, digest: of all their bytes. card_line: index of the line that holds the tip's card. restored_at:
    index of the latest restore, confirmed or not; 0 without one.
    """

    tip: Tip
    size: int
    digest: Any
    cards: list[Card]
    before: Tip | None = None
    card_line: int = 0
    restore: Restore | None = None
    restored_at: int = 0
    released: LastRelease | None = None
    answers: dict[Place, Answer] = field(default_factory=dict)
    approvals: dict[str, ApprovalEntry] = field(default_factory=dict)

    @property
    def releases(self) -> Iterator[ReleaseEntry]:
        """In the order of their lines."""
        return (answer for answer in self.answers.values() if isinstance(answer, ReleaseEntry))

    @property
    def refusals(self) -> Iterator[RefusalEntry]:
        """In the order of their lines."""
        return (answer for answer in self.answers.values() if isinstance(answer, RefusalEntry))

    def add(self, link: Link) -> None:
        """Take a line that `check` has accepted."""
        entry, old = link.entry, self.tip
        self.before, self.tip = old, link.tip
        self.size += len(link.line)
        self.digest.update(link.line)
        match entry:
            case ReleaseEntry():
                self.answers[entry.place] = entry
                self.released = LastRelease(entry, link.tip.hash, old.card)
            case RefusalEntry():
                self.answers[entry.place] = entry
            case ApprovalEntry():
                self.approvals[entry.plan] = entry
            case RotationEntry():
                self.cards.append(entry.card)
                self.card_line = entry.index
            case RestoredEntry():
                self.restore = Restore(old, self.released)
                self.restored_at = entry.index
            case ConfirmedEntry():
                self.restore = None

    def since(self, restore: Restore) -> Iterator[ReleaseEntry]:
        """What left after a restore."""
        return (entry for entry in self.releases if entry.index > restore.copy.index)


def content_after(tip: Tip, entry: str, time: float, **fields: Any) -> dict[str, Any]:
    """The document, without signature, of a line that follows `tip`. fields: those of the kind of entry."""
    base = {"version": VERSION, "entry": entry, "index": tip.index + 1, "time": time, "previous": tip.hash}
    return {**base, **fields}


# --- the rules


def begin(where: str, line: bytes) -> Chain:
    """The chain of a genesis line. Raises LedgerCorrupt."""
    entry, document = parse_line(where, line)
    if not isinstance(entry, Genesis):
        raise LedgerCorrupt(f"{where}: is not the first entry of a ledger")
    require_signature(where, document, entry.card, LINE_CONTEXT)
    digest = hashlib.sha256(line)
    first = Point(index=0, hash=digest.hexdigest())
    tip = Tip(0, first.hash, entry.time, entry.card, (first,), False, {})
    return Chain(tip, len(line), digest, [entry.card])


def check(where: str, line: bytes, chain: Chain) -> Link:
    """The line as one that may follow `chain`, which is left as it is.

    Raises LedgerCorrupt for a line that is malformed, out of place, not signed by the keys of the chain's
    tip, or that says what the lines before it rule out.
    """
    entry, document = parse_line(where, line)
    tip = chain.tip
    if isinstance(entry, Genesis):
        raise LedgerCorrupt(f"{where}: is a second first entry")
    if entry.index != tip.index + 1:
        raise LedgerCorrupt(f"{where}: has index {entry.index} where {tip.index + 1} is due")
    if entry.previous != tip.hash:
        raise LedgerCorrupt(f"{where}: the hash chain is broken: the entry before it is not the one it names")
    require_signature(where, document, tip.card, LINE_CONTEXT)
    after = replace(tip, index=entry.index, hash=hashlib.sha256(line).hexdigest(), time=entry.time)
    match entry:
        case ReleaseEntry():
            _require_unanswered(where, entry, chain)
            after = replace(after, accounts={**tip.accounts, entry.dataset: _account(where, entry, tip)})
        case RefusalEntry():
            _require_unanswered(where, entry, chain)
        case ApprovalEntry():
            if entry.plan in chain.approvals:
                raise LedgerCorrupt(f"{where}: approves a second time what was approved before")
        case RotationEntry():
            _check_rotation(where, entry, document, chain)
            after = replace(after, card=entry.card)
        case RestoredEntry():
            if (entry.head.index, entry.head.hash) != (tip.index, tip.hash):
                raise LedgerCorrupt(f"{where}: is of another copy than the one that ends before it")
            if len(tip.history) == MAX_HISTORY:
                raise LedgerCorrupt(
                    f"{where}: was restored {MAX_HISTORY - 1} times, and may not be once more"
                )
            here = Point(index=after.index, hash=after.hash)
            after = replace(after, restored=True, history=(*tip.history, here))
        case ConfirmedEntry():
            _check_confirmed(where, entry, chain)
            after = replace(after, restored=False, accounts=dict(entry.accounts))
    return Link(entry, line, after)


def _require_unanswered(where: str, entry: Answer, chain: Chain) -> None:
    if entry.place in chain.answers:
        raise LedgerCorrupt(f"{where}: answers a second time for the same run, round and step")


def _account(where: str, entry: ReleaseEntry, tip: Tip) -> Account:
    if tip.restored and isinstance(entry.claim, Noised):
        raise LedgerCorrupt(f"{where}: is a private release, though the restored ledger was not confirmed")
    try:
        account = tip.account(entry.dataset).with_claim(entry.claim)
    except BudgetExceeded as error:
        raise LedgerCorrupt(f"{where}: {error}") from None
    if not account.matches(entry.account):
        raise LedgerCorrupt(f"{where}: the account does not follow from the claims")
    return entry.account


def _check_rotation(where: str, entry: RotationEntry, document: SignedDocument, chain: Chain) -> None:
    if entry.card.name != chain.tip.card.name:
        raise LedgerCorrupt(f"{where}: changes the keys to those of another name")
    if entry.card in chain.cards:
        raise LedgerCorrupt(f"{where}: changes the keys to ones that this ledger had before")
    try:
        signatures = Signatures.from_document(entry.consent)
        entry.card.verify(CONSENT_CONTEXT, consent_digest(document.content), signatures)
    except (BadSignature, ValueError):
        raise LedgerCorrupt(f"{where}: the signature of the new keys does not hold") from None


def _check_confirmed(where: str, entry: ConfirmedEntry, chain: Chain) -> None:
    restore = chain.restore
    if restore is None:
        raise LedgerCorrupt(f"{where}: confirms a ledger that was not restored")
    copy, own = restore.copy, chain.tip.accounts
    if entry.by == "receipt":
        last = restore.released
        if last is None or (last.entry.index, last.hash) != (entry.of.index, entry.of.hash):
            raise LedgerCorrupt(f"{where}: is of another release than the last one of the restored copy")
    elif entry.of.index < copy.index or (entry.of.index == copy.index and entry.of.hash != copy.hash):
        raise LedgerCorrupt(
            f"{where}: is by a head record that is older than the restored copy, or of another"
        )
    unchanged = entry.by == "receipt" or entry.of.index == copy.index
    if unchanged and copy.restored:
        raise LedgerCorrupt(f"{where}: leaves open what was lost before an earlier restore")
    if not own.keys() <= entry.accounts.keys() or (unchanged and own.keys() != entry.accounts.keys()):
        raise LedgerCorrupt(f"{where}: its accounts are not those of the data sets of this ledger")
    for name, account in entry.accounts.items():
        if not account.covers(own.get(name, Account())):
            raise LedgerCorrupt(f"{where}: the account of {name} is lower than this ledger's own, or is none")
        if unchanged and not account.matches(own[name]):
            raise LedgerCorrupt(f"{where}: the account of {name} is not this ledger's own")


# --- whole files


def read_chain(
    where: object, lines: Iterable[bytes], chain: Chain | None = None, number: int = 1
) -> tuple[Chain, bool]:
    """Every whole line, verified; and whether a torn line (no newline: its writing broke off) follows.

    chain: what goes before, added to. number: of the first line, for messages. Raises LedgerCorrupt.
    """
    for line in lines:
        place = f"{where}: line {number}"
        torn = not line.endswith(b"\n") and len(line) <= MAX_LINE
        if chain is None:
            chain = begin(place, line)
        elif torn:
            return chain, True
        else:
            chain.add(check(place, line, chain))
        number += 1
    if chain is None:
        raise LedgerCorrupt(f"{where}: line {number}: is missing; the file is empty")
    return chain, False


def check_head(where: object, head_where: object, data: bytes, chain: Chain, number: int = 1) -> bool:
    """Compare the chain with its head record; True where the head lags one entry behind (a crash).

    number: of the chain's first line, for messages. Raises LedgerCorrupt.
    """
    head, document = parse_head(str(head_where), data)
    tip, before = chain.tip, chain.before
    lags = before is not None and before.agrees(head)
    # Across a change of keys, a head that lags is still signed by the old ones.
    signer = before.card if lags and before is not None else tip.card
    require_signature(str(head_where), document, signer, HEAD_CONTEXT)
    if lags or tip.agrees(head):
        return lags
    if head.index > tip.index:
        raise LedgerCorrupt(
            f"{where}: line {tip.index + 1 + number}: is missing; by the head record the file has "
            f"{head.index + number} lines"
        )
    raise LedgerCorrupt(f"{head_where}: names another last entry than line {tip.index + number} of {where}")


def require_card(where: object, card: Card, chain: Chain, number: int = 1) -> None:
    """Raises LedgerCorrupt unless the chain's next line is to be signed by the holder of `card`."""
    if card != chain.tip.card:
        old = card in chain.cards
        what = "has newer keys than these of" if old else "is that of another identity than"
        raise LedgerCorrupt(f"{where}: line {chain.card_line + number}: the ledger {what} {card.name}")
