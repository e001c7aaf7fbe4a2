"""Files that are either whole or absent: atomic writes, synced appends, bounded reads.

Knows nothing of what it writes. Errors name the file and the system's reason, never the content.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from securefl.errors import UsageError


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_sibling(path: Path, data: bytes, mode: int) -> Path:
    """The bytes, synced, under a temporary name in the same folder (a rename does not cross devices)."""
    sibling = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    handle = os.open(sibling, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        sibling.unlink(missing_ok=True)
        raise
    return sibling


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data`; a reader, or a crash, sees the old bytes or the new ones, whole.

    mode: permission bits of the new file, less the process's umask. Raises UsageError where it cannot be
    written; the old file is then untouched.
    """
    try:
        sibling = _write_sibling(path, data, mode)
        try:
            sibling.replace(path)
        except BaseException:
            sibling.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """As `write_atomic`, but never over an existing file: a hard link fails where a rename would replace.

    Raises UsageError where `path` exists or cannot be written.
    """
    try:
        sibling = _write_sibling(path, data, mode)
        try:
            path.hardlink_to(sibling)
        finally:
            sibling.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileExistsError as error:
        raise UsageError(f"{path}: exists already and is not overwritten; choose another place") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def read_limited(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of a file. Raises UsageError where it cannot be read or is larger."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > limit:
        raise UsageError(f"{path}: is larger than the {limit} bytes that such a file may have")
    return data


def append_synced(path: Path, data: bytes, size: int) -> None:
    """One write at the end of a file that must still have `size` bytes, synced; all of it or none.

    Raises UsageError where it cannot be written, or where another process has written since.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_size != size:
                raise UsageError(f"{path}: was changed by another process; open it again")
            try:
                if os.write(handle, data) != len(data):
                    raise OSError(0, "the disk took a part of it only")
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def truncate_synced(path: Path, size: int) -> None:
    """Keep the first `size` bytes of a file. Raises UsageError."""
    try:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
