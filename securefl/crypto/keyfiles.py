"""Files that decide who is trusted: who may reach them, and the passphrase that closes a private one.

Bytes in, bytes out; knows neither identities nor cards. Errors name the file, never what is in it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from securefl.errors import UsageError

SALT, NONCE, TAG = 16, 12, 16  # bytes
MAX_PASSPHRASE = 1024  # bytes
# Part of the format, never read from a file: 128 MiB and a third of a second for each guess (RFC 7914).
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**17, 8, 1


def check_passphrase(passphrase: bytes) -> bytes:
    """The passphrase, of 1 to 1024 bytes. Raises UsageError."""
    if not passphrase:
        raise UsageError("an empty passphrase protects nothing; choose another")
    if len(passphrase) > MAX_PASSPHRASE:
        raise UsageError(f"a passphrase of more than {MAX_PASSPHRASE} bytes is refused; choose another")
    return passphrase


def _cipher(passphrase: bytes, salt: bytes) -> AESGCM:
    scrypt = Scrypt(salt=salt, length=32, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P)
    return AESGCM(scrypt.derive(check_passphrase(passphrase)))


def close_with(passphrase: bytes, salt: bytes, nonce: bytes, plain: bytes, clear: bytes) -> bytes:
    """AES-256-GCM of `plain` under scrypt(passphrase, salt), bound to `clear`; 16 bytes longer. UsageError.

    salt (16 bytes) and nonce (12 bytes) are fresh for every call.
    """
    return _cipher(passphrase, salt).encrypt(nonce, plain, clear)


def open_with(passphrase: bytes, salt: bytes, nonce: bytes, closed: bytes, clear: bytes) -> bytes | None:
    """Undo `close_with`; None where the passphrase, or any byte, is another. Raises UsageError."""
    try:
        return _cipher(passphrase, salt).decrypt(nonce, closed, clear)
    except InvalidTag:
        return None


def read_passphrase(file: Path | None, prompt: Callable[[], str]) -> bytes:
    """The passphrase in a file of mode 0600 without its last line break, or what `prompt` answers, as UTF-8.

    file: at most 1 KiB; None asks. Raises UsageError for a file that others can reach, and for a passphrase
    that is empty, too long or not Unicode text.
    """
    if file is None:
        typed: bytes | None = None
        with suppress(UnicodeEncodeError):  # that error has the passphrase in it
            typed = prompt().encode("utf-8", "surrogateescape")
        if typed is None:
            raise UsageError("a passphrase with half a surrogate pair is refused; enter whole characters")
        return check_passphrase(typed)
    data = read_guarded(file, MAX_PASSPHRASE + 2, "a passphrase file", private=True)
    line = data[:-2] if data.endswith(b"\r\n") else data.removesuffix(b"\n")
    if not line or len(line) > MAX_PASSPHRASE:
        raise UsageError(f"{file}: a passphrase has 1 to {MAX_PASSPHRASE} bytes")
    return line


def read_guarded(path: Path, limit: int, what: str, *, private: bool) -> bytes:
    """The bytes of an ordinary file that `check_guarded` accepts, by the open file and not by its name.

    what: the kind of file, for messages. Raises UsageError where it cannot be read, is larger than `limit`
    bytes or within others' reach, and, unless `private`, where it is a link.
    """
    try:
        # Opening a pipe would wait for its writer without O_NONBLOCK.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if private else os.O_NOFOLLOW)
        handle = os.open(path, flags)
        try:
            check_guarded(os.fstat(handle), str(path), what, private=private)
            with os.fdopen(handle, "rb", closefd=False) as file:
                data = file.read(limit + 1)
        finally:
            os.close(handle)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"{path}: cannot be read ({reason})") from error
    if len(data) > limit:
        raise UsageError(f"{path}: is too large for {what}")
    return data


def check_guarded(
    status: os.stat_result, where: str, what: str, *, private: bool, folder: bool = False
) -> None:
    """Require a plain file (or `folder`) that nobody else can reach, if `private`, or else can change.

    What is believed, and not secret, must besides belong to this user or to root, as with ssh. Raises
    UsageError.
    """
    mode = stat.S_IMODE(status.st_mode)
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        raise UsageError(f"{where}: is not {'a folder' if folder else 'an ordinary file'}")
    if private and mode & 0o077:
        raise UsageError(f"{where}: others can reach {what} (mode {mode:04o}); chmod 600 it")
    if not private and mode & 0o022:
        raise UsageError(f"{where}: others can change {what} (mode {mode:04o}); chmod go-w it")
    if not private and status.st_uid not in (0, os.geteuid()):
        raise UsageError(f"{where}: {what} must belong to the user who runs this, or to root; chown it")
