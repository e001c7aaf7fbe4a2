"""The files of a ledger: the lock over one, reading its lines, the head record beside it.

What the lines mean is for `_ledger_lines` and `_ledger_chain` to say. Changes nothing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from securefl._ledger_chain import Chain, check_head, read_chain, require_card
from securefl._ledger_lines import MAX_LINE
from securefl.crypto.identity import Card
from securefl.errors import LedgerCorrupt, UsageError
from securefl.files import read_limited


def head_path(path: Path) -> Path:
    """Where the head record of a ledger lies: NAME.jsonl has NAME.head.json."""
    return path.with_suffix(".head.json")


@contextmanager
def locked(path: Path, *, writing: bool) -> Iterator[BinaryIO]:
    """A ledger's file, open at its start, while nobody who asks here writes to it; reading may be shared.

    Raises UsageError where it cannot be opened or read.
    """
    flags = os.O_RDWR | os.O_APPEND if writing else os.O_RDONLY
    try:
        with os.fdopen(os.open(path, flags | os.O_CLOEXEC), "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX if writing else fcntl.LOCK_SH)
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
