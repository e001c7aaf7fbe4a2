"""What left a silo: an append-only, hash-chained, signed file, and the privacy accounts over it.

The one durable record of a client. One JSON line an entry (`_ledger_lines` has their models, `_ledger_chain`
the rules). The first (genesis) holds the silo's card; each later one names the hash of the line before, and
each is signed. A signed head record beside the file says which entry is the last, so a cut tail is noticed.
`append` returns after the disk has it: charge first, send after. The file holds hashes, sizes, names and
claims, never what was released.

Limits: a copy of the file *and* of the head record from the same earlier moment verifies; only somebody who
noted a later head hash elsewhere can tell. Whoever holds the silo's keys can write any history.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from securefl._ledger_chain import (
    Chain,
    Restore,
    Tip,
    begin,
    check,
    content_after,
    read_chain,
)
from securefl._ledger_files import MODE, crash_notes, head_lags, lines_of, locked, read_locked, require_name
from securefl._ledger_files import LedgerSummary as LedgerSummary
from securefl._ledger_files import head_path as head_path
from securefl._ledger_files import verify_ledger as verify_ledger
from securefl._ledger_lines import (
    HEAD_CONTEXT,
    MAX_LINE,
    MAX_REASON,
    VERSION,
    Answer,
    Entry,
    Point,
    entry_line,
    parse_head,
    require_signature,
    sign_consent,
)
from securefl._ledger_lines import ApprovalEntry as ApprovalEntry
from securefl._ledger_lines import RefusalEntry as RefusalEntry
from securefl._ledger_lines import ReleaseEntry as ReleaseEntry
from securefl.account import Account
from securefl.crypto.identity import Card, Identity
from securefl.errors import BudgetExceeded, LedgerCorrupt, Refused, UsageError
from securefl.files import read_limited, write_atomic, write_new
from securefl.messages import Party
from securefl.release import Claim, Noised, PayloadKind

_BLOCK = 2**20


class Ledger:
    """A silo's own ledger, open for appending; made by `create` or `open`. Or for reading alone, by `look`.

    Several processes may append by turns: each append first reads and verifies what the others wrote, under a
    lock on the file. What this object answers is as of its last `open`, `refresh` or append. Every method
    that reads the file raises LedgerCorrupt where it was changed, and UsageError where it cannot be read.

    notes: what a crash left behind, where `look` found it and so did not repair it.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        chain: Chain,
        clock: Callable[[], float],
        *,
        notes: tuple[str, ...] = (),
        looking: bool = False,
    ) -> None:
        self.path = path
        self.notes = notes
        self._looking = looking
        self._identity = identity
        self._chain = chain
        self._clock = clock

    def __repr__(self) -> str:
        return f"Ledger({self.path}, {len(self.entries)} releases)"

    @classmethod
    def create(cls, path: Path, identity: Identity, clock: Callable[[], float] = time.time) -> Ledger:
        """Begin a ledger. Raises UsageError where the file exists, or is gone and its head record says so.

        The head is written first: a crash between the two leaves one of no releases, which is begun again.
        Both files are for their owner alone (mode 0600).
        """
        require_name(path)
        if os.path.lexists(path):
            raise UsageError(f"{path}: exists already and is not overwritten; choose another place")
        write, where = write_new, head_path(path)
        if where.exists():
            head, document = parse_head(str(where), read_limited(where, MAX_LINE))
            require_signature(str(where), document, identity.card, HEAD_CONTEXT)
            if head.index:
                raise UsageError(f"{path}: is missing, but had {head.index + 1} lines by {where}; restore it")
            write = write_atomic
        genesis = {
            "version": VERSION,
            "entry": "genesis",
            "index": 0,
            "time": float(clock()),
            "card": identity.card.model_dump(mode="json"),
            "previous": None,
        }
        line = entry_line(genesis, identity)
        chain = begin(f"{path}: line 1", line)
        write(where, chain.tip.head(identity), MODE)
        write_new(path, line, MODE)
        return cls(path, identity, chain, clock)

    @classmethod
    def open(cls, path: Path, identity: Identity, clock: Callable[[], float] = time.time) -> Ledger:
        """Verify a ledger and go on with it, after repairing what a crash left: a lagging head, a torn line.

        Raises LedgerCorrupt or UsageError.
        """
        with locked(path, writing=True) as file:
            chain, torn, lags = read_locked(path, file, identity.card)
            ledger = cls(path, identity, chain, clock)
            ledger._repair(file, torn, lags)
        return ledger

    @classmethod
    def look(cls, path: Path, identity: Identity, clock: Callable[[], float] = time.time) -> Ledger:
        """As `open`, for reading alone: nothing is repaired, and whatever would append raises UsageError.

        So does `refresh`. A torn line or a lagging head is in `notes`.
        """
        with locked(path, writing=False) as file:
            chain, torn, lags = read_locked(path, file, identity.card)
        return cls(path, identity, chain, clock, notes=crash_notes(torn, lags), looking=True)

    def refresh(self) -> None:
        """Read and verify what other processes have appended since."""
        with self._locked() as file:
            self._catch_up(file)

    def _locked(self) -> AbstractContextManager[BinaryIO]:
        if self._looking:
            raise UsageError(f"{self.path}: was opened to look at it only")
        return locked(self.path, writing=True)

    def _catch_up(self, file: BinaryIO) -> None:
        """Follow the lines that others wrote, after making sure that those known are still the same."""
        chain, digest, left = self._chain, hashlib.sha256(), self._chain.size
        while left and (block := file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
        if left or digest.digest() != chain.digest.digest():
            raise LedgerCorrupt(
                f"{self.path}: was cut or changed in its first {chain.tip.index + 1} lines while it was open"
            )
        _, torn = read_chain(self.path, lines_of(file), chain, chain.tip.index + 2)
        self._repair(file, torn, head_lags(self.path, chain))

    def _repair(self, file: BinaryIO, torn: bool, lags: bool) -> None:
        if torn:
            os.ftruncate(file.fileno(), self._chain.size)
            os.fsync(file.fileno())
        # Only the present keys can sign the head, and this object may have been opened with earlier ones.
        if lags and self._identity.card == self._chain.tip.card:
            self._write_head(file, self._chain.tip.head(self._identity))

    # --- what it answers

    @property
    def card(self) -> Card:
        """Whose signature the next line must bear."""
        return self._chain.tip.card

    def accounts(self) -> Mapping[str, Account]:
        """What has been released of every data set adds up to."""
        return MappingProxyType(dict(self._chain.tip.accounts))

    def account(self, dataset: str) -> Account:
        """What has been released of one data set adds up to; empty where nothing has."""
        return self._chain.tip.account(dataset)

    def account_with(self, dataset: str, claim: Claim) -> Account:
        """The account if a release under `claim` were appended; nothing is written.

        Raises BudgetExceeded for a claim whose noise is none, and for every private one of a ledger that was
        restored and not confirmed.
        """
        return self._account_after(self._chain.tip, dataset, claim)

    def _account_after(self, tip: Tip, dataset: str, claim: Claim) -> Account:
        if tip.restored and isinstance(claim, Noised):
            raise BudgetExceeded(
                f"{self.path}: was restored from a copy; the whole ceiling counts as spent until what had "
                "left is known again, see `securefl ledger confirm`",
                "datasets",
            )
        return tip.account(dataset).with_claim(claim)

    @property
    def restored(self) -> bool:
        """Whether it was restored from a copy and is not confirmed."""
        return self._chain.tip.restored

    def interrupted(self, run: str, *, first: bool) -> bool:
        """Whether it was restored from a copy in the middle of a run, as far as it can know.

        What was answered in that run after the copy was made is lost and might be answered differently.
        first: a plan for the first step of the run is to be answered. For any other, a ledger that was ever
        restored and has released nothing in the run since may have lost all its answers there, so a silo
        with such a ledger joins a run at its first step alone. A refusal counts for nothing: that of an
        interrupted run is one. What remains: a server that asks for the first step once more, after the
        answer was lost with the ledger, gets a second one, charged like any other.
        """
        answers = [answer for answer in self._chain.answers.values() if answer.run == run]
        if any(answer.index < self._chain.restored_at for answer in answers):
            return True
        begun = any(isinstance(answer, ReleaseEntry) for answer in answers)
        return self._chain.restored_at > 0 and not begun and not first

    @property
    def unconfirmed(self) -> Restore | None:
        """The restore that waits to be confirmed."""
        return self._chain.restore

    @property
    def entries(self) -> tuple[ReleaseEntry, ...]:
        """Every release so far, in order."""
        return tuple(self._chain.releases)

    @property
    def refusals(self) -> tuple[RefusalEntry, ...]:
        """Every refusal so far, in order."""
        return tuple(self._chain.refusals)

    def answer_at(self, run: str, round: int, step: str) -> Answer | None:
        """How a step was answered, if it was."""
        return self._chain.answers.get((run, round, step))

    def last_answer(self, run: str) -> Answer | None:
        """The latest answer within a run, if there is one."""
        answers = reversed(self._chain.answers.values())
        return next((answer for answer in answers if answer.run == run), None)

    def is_approved(self, plan: str) -> bool:
        """Whether an owner has approved the plan of that hash."""
        return plan in self._chain.approvals

    @property
    def next_sequence(self) -> int:
        """Index of the next line: a sequence number above that of every envelope this ledger charged."""
        return self._chain.tip.index + 1

    def bytes_since(self, time: float) -> int:
        """Bytes of the releases at or after `time`, Unix seconds.

        One that is dated in the future counts: a clock that was set back must not reopen a quota.
        """
        return sum(entry.bytes for entry in self.entries if entry.time >= time)

    # --- appending

    def append(
        self,
        *,
        run: str,
        round: int,
        step: str,
        plan: str,
        plan_sequence: int,
        kind: PayloadKind,
        recipients: Sequence[Party],
        protection: str,
        envelope: bytes,
        body: bytes,
        dataset: str,
        claim: Claim,
        permit: Callable[[Account], None],
    ) -> ReleaseEntry:
        """Charge a release; when this returns the disk has it and `envelope` may be sent.

        plan, plan_sequence: hash of the plan that is answered, and sequence number of its envelope. permit:
        is given the account after it, with all that other processes have charged meanwhile, and raises where
        that may not be, so that two of them cannot both spend the last of a budget. Raises Refused where the
        same run, round and step was answered before (a retry sends the first bytes again), BudgetExceeded as
        `account_with`, UsageError where the file cannot be written. Only the hashes and sizes of `envelope`
        and `body` are kept.
        """

        def fields(chain: Chain) -> dict[str, Any]:
            self._require_unanswered(chain, run, round, step)
            account = self._account_after(chain.tip, dataset, claim)
            permit(account)
            return {
                "run": run,
                "round": round,
                "step": step,
                "plan": plan,
                "plan_sequence": plan_sequence,
                "kind": kind.value,
                "recipients": [party.model_dump() for party in recipients],
                "protection": protection,
                "bytes": len(envelope),
                "body_sha256": hashlib.sha256(body).hexdigest(),
                "envelope_sha256": hashlib.sha256(envelope).hexdigest(),
                "dataset": dataset,
                "claim": claim.model_dump(mode="json"),
                "account": account.model_dump(mode="json"),
            }

        entry = self._append("release", fields)
        assert isinstance(entry, ReleaseEntry)
        return entry

    def append_refusal(
        self,
        *,
        run: str,
        round: int,
        step: str,
        plan: str,
        plan_sequence: int,
        clause: str,
        reason: str,
        envelope: bytes,
    ) -> RefusalEntry:
        """Record that a plan is answered "unavailable", by the signed `envelope`.

        reason: for the owner alone; 400 characters of it are kept. Raises as `append`.
        """

        def fields(chain: Chain) -> dict[str, Any]:
            self._require_unanswered(chain, run, round, step)
            return {
                "run": run,
                "round": round,
                "step": step,
                "plan": plan,
                "plan_sequence": plan_sequence,
                "clause": clause,
                "reason": reason[:MAX_REASON],
                "bytes": len(envelope),
                "envelope_sha256": hashlib.sha256(envelope).hexdigest(),
            }

        entry = self._append("refusal", fields)
        assert isinstance(entry, RefusalEntry)
        return entry

    def _require_unanswered(self, chain: Chain, run: str, round: int, step: str) -> None:
        if (run, round, step) in chain.answers:
            raise Refused(f"{self.path}: round {round}, {step}, was answered before; send that again")

    def append_approval(self, *, plan: str, run: str, round: int, step: str) -> None:
        """Record an owner's yes to the plan of that hash. Raises Refused where it was approved before."""

        def fields(chain: Chain) -> dict[str, Any]:
            if plan in chain.approvals:
                raise Refused(f"{self.path}: the plan {plan[:16]}... was approved before")
            return {"plan": plan, "run": run, "round": round, "step": step}

        self._append("approval", fields)

    def append_confirmation(
        self, by: Literal["head", "receipt"], of: Point, accounts: Mapping[str, Account]
    ) -> None:
        """Lift a restore; `ledger_copies.confirm_ledger` decides whether it may be.

        of: the line up to which what left is known. accounts: after it; what has left since the restore is
        added here. Raises Refused where nothing is to be confirmed, LedgerCorrupt for lower accounts.
        """

        def fields(chain: Chain) -> dict[str, Any]:
            if chain.restore is None:
                raise Refused(f"{self.path}: was not restored from a copy; there is nothing to confirm")
            added = dict(accounts)
            for entry in chain.since(chain.restore):
                added[entry.dataset] = added.get(entry.dataset, Account()).with_claim(entry.claim)
            documents = {name: account.model_dump(mode="json") for name, account in added.items()}
            return {"by": by, "of": of.model_dump(), "accounts": documents}

        self._append("confirmed", fields)

    def rotate(self, new_identity: Identity) -> None:
        """Go on under new keys of the same name; the old ones can append nothing any more.

        Raises UsageError for keys of another name, or that this ledger had before.
        """
        card = new_identity.card
        if card.name != self.card.name or card in self._chain.cards:
            raise UsageError(f"{self.path}: takes new keys of the name {self.card.name} only")
        self._append("rotation", lambda _: {"card": card.model_dump(mode="json")}, new_identity)

    def _append(
        self, kind: str, fields: Callable[[Chain], dict[str, Any]], successor: Identity | None = None
    ) -> Entry:
        """Write a line and then the head. fields: from the chain as it is under the lock."""
        chain = self._chain
        with self._locked() as file:
            self._catch_up(file)
            if self._identity.card != chain.tip.card:
                raise UsageError(f"{self.path}: has new keys since it was opened; open it with those")
            content = content_after(chain.tip, kind, float(self._clock()), **fields(chain))
            if successor is not None:
                content["consent"] = sign_consent(content, successor)
            # What is written must be what `verify_ledger` takes, or the file would lock its owner out.
            where = f"{self.path}: line {chain.tip.index + 2}"
            link = check(where, entry_line(content, self._identity), chain)
            head = link.tip.head(successor or self._identity)
            self._write(file.fileno(), link.line)
            chain.add(link)
            self._identity = successor or self._identity
            self._write_head(file, head)
        return link.entry

    def _write(self, handle: int, line: bytes) -> None:
        """All of the line, synced, or none of it."""
        try:
            try:
                if os.write(handle, line) != len(line):
                    raise OSError(0, "the disk took a part of it only")
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, self._chain.size)
                raise
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written ({error.strerror})") from error

    def _write_head(self, file: BinaryIO, data: bytes) -> None:
        # As the ledger itself: who let an auditor's group read it has not let them read half of it.
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        write_atomic(head_path(self.path), data, mode & 0o666)


def rotate_ledger(path: Path, old: Identity, new: Identity, clock: Callable[[], float] = time.time) -> bool:
    """Go on with the ledger of `old` under the keys `new`; False where that was done before.

    After a crash the same call finishes what is missing. Raises as `Ledger.open` and `Ledger.rotate`.
    """
    with locked(path, writing=False) as file:
        chain, _, _ = read_locked(path, file, None)
    if chain.tip.card == new.card and old.card in chain.cards[:-1]:
        Ledger.open(path, new, clock)  # the head may still be that of the old keys
        return False
    Ledger.open(path, old, clock).rotate(new)
    return True
