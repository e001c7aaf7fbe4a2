"""The files of a ledger: the lock over one, reading its lines, the head record beside it; what it then says.

What the lines mean is for `_ledger_lines` and `_ledger_chain` to say. Changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from securefl._ledger_chain import Chain, check_head, read_chain, require_card
from securefl._ledger_lines import MAX_LINE, ApprovalEntry, RefusalEntry, ReleaseEntry
from securefl.account import Account, only_account
from securefl.crypto.identity import Card
from securefl.errors import LedgerCorrupt, UsageError
from securefl.files import open_ordinary, read_limited

LOCK_WAIT = 30.0  # seconds; to verify and append takes a few for some 10,000 lines
_POLL = 0.02  # seconds
MODE = 0o600  # the files name peers and show when a silo was active


def head_path(path: Path) -> Path:
    """Where the head record of a ledger lies: NAME.jsonl has NAME.head.json."""
    return path.with_suffix(".head.json")


def require_name(path: Path) -> None:
    """Raises UsageError unless the name is NAME.jsonl: two ledgers would else share a head record."""
    if path.suffix != ".jsonl":
        raise UsageError(f"{path}: is no name for a ledger, which ends in .jsonl")


def _lock(path: Path, file: BinaryIO, kind: int) -> None:
    until = time.monotonic() + LOCK_WAIT
    while True:
        try:
            fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise UsageError(
                    f"{path}: is locked by another process; try again when it has finished, or end it"
                ) from None
        time.sleep(_POLL)


@contextmanager
def locked(path: Path, *, writing: bool) -> Iterator[BinaryIO]:
    """A ledger's file, open at its start, while nobody who asks here writes to it; reading may be shared.

    Raises UsageError for another name than a ledger's, and where it is no ordinary file, cannot be opened or
    read, or is still locked after LOCK_WAIT seconds.
    """
    require_name(path)
    flags = os.O_RDWR | os.O_APPEND if writing else os.O_RDONLY
    try:
        with os.fdopen(open_ordinary(path, flags), "rb") as file:
            _lock(path, file, fcntl.LOCK_EX if writing else fcntl.LOCK_SH)
            yield file
    except OSError as error:
        what = "opened for writing" if writing else "read"
        raise UsageError(f"{path}: cannot be {what} ({error.strerror})") from error


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines from where the file stands, newline included (a torn last one lacks it)."""
    while line := file.readline(MAX_LINE + 1):
        yield line


def head_lags(path: Path, chain: Chain) -> bool:
    """`check_head` for a ledger's file and the head record beside it."""
    where = head_path(path)
    if not where.exists():
        raise LedgerCorrupt(f"{where}: the head record is missing, so a cut tail could not be noticed")
    return check_head(path, where, read_limited(where, MAX_LINE), chain)


def read_locked(path: Path, file: BinaryIO, card: Card | None) -> tuple[Chain, bool, bool]:
    """The verified chain of an open ledger; whether a torn line follows, and whether the head lags."""
    chain, torn = read_chain(path, lines_of(file))
    if card is not None:
        require_card(path, card, chain)
    return chain, torn, head_lags(path, chain)


# --- what a ledger says


@dataclass(frozen=True)
class LedgerSummary:
    """A ledger that verified: whose it is, what it says in order, the accounts, the hash of its last line.

    fingerprint: of the card that signs now. entries counts every line, the genesis line too. restored: from a
    copy, and not confirmed. notes: what a crash left behind, if anything.
    """

    name: str
    fingerprint: str
    entries: int
    releases: tuple[ReleaseEntry, ...]
    refusals: tuple[RefusalEntry, ...]
    approvals: tuple[ApprovalEntry, ...]
    accounts: Mapping[str, Account]
    restored: bool
    head_hash: str
    notes: tuple[str, ...] = ()

    @property
    def account(self) -> Account:
        """Of its one data set, or empty. Raises UsageError where it has several."""
        return only_account(self.accounts)


def crash_notes(torn: bool, lags: bool) -> tuple[str, ...]:
    """What a crash left behind, in words."""
    notes = {
        "the head record is one entry behind, as a crash leaves it; that entry verifies": lags,
        "the last line broke off while it was written and is not counted; nothing left for it": torn,
    }
    return tuple(note for note, holds in notes.items() if holds)


def summary_of(chain: Chain, torn: bool = False, lags: bool = False) -> LedgerSummary:
    """A chain as a summary."""
    tip = chain.tip
    return LedgerSummary(
        name=tip.card.name,
        fingerprint=tip.card.fingerprint,
        entries=tip.index + 1,
        releases=tuple(chain.releases),
        refusals=tuple(chain.refusals),
        approvals=tuple(chain.approvals.values()),
        accounts=MappingProxyType(dict(tip.accounts)),
        restored=tip.restored,
        head_hash=tip.hash,
        notes=crash_notes(torn, lags),
    )


def verify_ledger(path: Path, card: Card | None = None) -> LedgerSummary:
    """Check every line, the chain, the signatures, the accounts and the head record; change nothing.

    card: who must hold its keys now; without it the ledger only proves to be that of the cards inside it.
    Raises LedgerCorrupt naming file and line of the first fault, UsageError where the file cannot be read.
    """
    with locked(path, writing=False) as file:
        return summary_of(*read_locked(path, file, card))
