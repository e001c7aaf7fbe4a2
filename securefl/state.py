"""What a client must still have after a crash, beside its ledger: answers, plans that wait, its own model.

A folder of one silo, mode 0700, for one process at a time. Nothing in it is the record of anything: that is
the ledger alone, and a file here counts only if the ledger, or the owner's question, names it by its hash.
An answer is written here before it is charged, so after a crash either the ledger does not know it, and it
never left, or the ledger names it and the very same bytes go out again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from securefl.errors import UsageError
from securefl.files import make_folder, read_limited, write_atomic
from securefl.release import Limits

_ANSWER, _PLAN, _MODEL = ".answer", ".plan", ".model"
# The largest envelope: a body of `release.Limits` with the front and the signatures around it.
_MAX_FILE = Limits().max_bytes + 2**20


class StateFolder:
    """One silo's state folder, open and locked until `close` or the end of the process."""

    def __init__(self, path: Path, *, look: bool = False) -> None:
        """Open the folder, making it if need be. Raises UsageError where another process has it open.

        look: only to read from it (a preview), beside the client that has it open.
        """
        self.path = path
        self._lock = -1
        if look:
            return
        try:
            make_folder(path)
            if path.stat().st_mode & 0o077:
                raise UsageError(f"{path}: others can reach this folder; chmod 700 it")
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{path}: cannot be used ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(f"{path}: another client is running on this folder; stop it first") from None
        for left in path.glob(".*.tmp"):  # half a file that a crash left; it has no name yet
            left.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"StateFolder({self.path})"

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- answers

    def keep_answer(self, envelope: bytes, terms: str) -> str:
        """Write an answer before it is charged; gives its SHA-256 (hex), by which it is found again.

        terms: fingerprint (hex) of the policy that permitted it.
        """
        sha256 = hashlib.sha256(envelope).hexdigest()
        write_atomic(self._file(sha256, _ANSWER), bytes.fromhex(terms) + envelope, 0o600)
        return sha256

    def answer(self, sha256: str) -> tuple[bytes, str] | None:
        """The bytes of that hash and their terms, or None where they are not here or are not whole."""
        path = self._file(sha256, _ANSWER)
        if not path.is_file():
            return None
        data = read_limited(path, _MAX_FILE)
        terms, envelope = data[:32].hex(), data[32:]
        return (envelope, terms) if hashlib.sha256(envelope).hexdigest() == sha256 else None

    # --- the silo's own model, for methods whose plans bring none

    def keep_model(self, answer: str, body: bytes) -> None:
        """Write the model as it is once the answer of that hash is charged."""
        write_atomic(self._file(answer, _MODEL), body, 0o600)

    def model(self, answer: str) -> bytes | None:
        """The model that goes with an answer, or None."""
        path = self._file(answer, _MODEL)
        return read_limited(path, _MAX_FILE) if path.is_file() else None

    # --- plans that wait for an owner

    def pend(self, plan: str, message: bytes) -> None:
        """Keep the sealed plan of that hash until an owner has decided; only the newest waits."""
        path = self._file(plan, _PLAN)
        if not path.is_file():
            write_atomic(path, message, 0o600)
            self._forget((_PLAN,), {plan})

    # --- tidying

    def tidy(self, answer: str) -> None:
        """Forget what the charged answer of that hash has made old; what cannot be removed stays."""
        with suppress(OSError):
            self._forget((_ANSWER, _MODEL), {answer})
            self._forget((_PLAN,), set())

    def _forget(self, suffixes: tuple[str, ...], keep: Iterable[str]) -> None:
        for path in self.path.iterdir():
            if path.suffix in suffixes and path.stem not in keep:
                path.unlink(missing_ok=True)

    def _file(self, sha256: str, suffix: str) -> Path:
        return self.path / f"{sha256}{suffix}"


def waiting_plan(folder: Path, plan: str) -> bytes:
    """The sealed plan that waits in a client's folder, for `securefl approve`; takes no lock.

    Raises UsageError where no plan of that hash waits.
    """
    path = folder / f"{plan}{_PLAN}"
    if not path.is_file():
        raise UsageError(f"{folder}: no plan with the hash {plan} waits here")
    return read_limited(path, _MAX_FILE)
