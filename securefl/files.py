"""Files that are whole or absent: atomic writes, bounded reads, places to write to.

Knows nothing of what it writes. Errors name the file and the system's reason, never the content.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from securefl.errors import UsageError

_MAX_NAME = 200  # bytes of a name, of the 255 there are: .partial and temporary names are made of it
_MAX_PATH = 3500  # bytes, of 4096: a run has folders and files inside


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_sibling(path: Path, data: bytes, mode: int) -> Path:
    """The bytes, synced, under a temporary name in the same folder (a rename does not cross devices)."""
    start = os.fsdecode(os.fsencode(path.name)[:200])  # a name has room for 255 bytes
    sibling = path.with_name(f".{start}.{secrets.token_hex(8)}.tmp")
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


def _link_nameless(path: Path, data: bytes, mode: int) -> bool:
    """The bytes, synced, under the name `path`; False where the system cannot write a file without a name.

    Raises FileExistsError.
    """
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            handle = os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode, dir_fd=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
                # Only with a folder's handle does Python follow what /proc has for an open file (linkat).
                os.link(f"/proc/self/fd/{handle}", path.name, dst_dir_fd=folder)
        finally:
            os.close(folder)
    except FileExistsError:
        raise
    except OSError:  # a file system without O_TMPFILE, no /proc; any other fault shows again at the next try
        return False
    return True


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


def write_together(files: Mapping[Path, bytes], mode: int = 0o644) -> None:
    """As `write_atomic` for several files: all are written under other names before the first is replaced.

    So a full disk leaves all of the old files. Raises UsageError.
    """
    drafts: list[tuple[Path, Path]] = []
    path = Path()
    try:
        try:
            for path, data in files.items():
                drafts.append((_write_sibling(path, data, mode), path))
            for draft, path in drafts:
                draft.replace(path)
        finally:
            for draft, _ in drafts:
                draft.unlink(missing_ok=True)
        for folder in dict.fromkeys(path.parent for path in files):
            sync_folder(folder)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """As `write_atomic`, but never over an existing file: a hard link fails where a rename would replace.

    On Linux the bytes have no name until they are whole, so that a crash leaves no draft with a key in it.
    Raises UsageError where `path` exists or cannot be written.
    """
    try:
        if not _link_nameless(path, data, mode):
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


def open_ordinary(path: Path, flags: int) -> int:
    """A handle, closed in child processes, on an existing ordinary file. flags: as for `os.open`.

    Raises OSError, for a folder, pipe or device too. Never waits: opening a pipe would, for its other end.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not an ordinary file")
    return handle


def read_limited(path: Path, limit: int) -> bytes:
    """The bytes of an ordinary file. Raises UsageError where it cannot be read or is larger than `limit`."""
    try:
        with os.fdopen(open_ordinary(path, os.O_RDONLY), "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > limit:
        raise UsageError(f"{path}: is larger than the {limit} bytes that such a file may have")
    return data


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Make a folder and what is missing above it, each with `mode`, also under a umask that forbids nothing.

    Those that are there stay as they are. Raises UsageError where it cannot be made.
    """
    whole = path.absolute()
    try:
        for folder in (*reversed(whole.parents), whole):
            folder.mkdir(mode, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made ({error.strerror}); choose another place") from error


def check_out(path: Path, *, file: bool = False) -> Path:
    """The resolved place for a new folder (or, with `file`, a file), before any work is done for it.

    Nothing is written. Raises UsageError where it has no name of its own (., .., /), is a link, something
    else than a folder (a file), too long, or where its parent is not a folder that can be written to.
    """
    where = _shown_path(path)
    raw, name = os.fsencode(path.absolute()), path.name
    if name in ("", ".."):
        raise UsageError(f"{where}: has no name of its own; name a {'file' if file else 'folder'} to make")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in str(path)):
        raise UsageError(f"{where}: is not UTF-8; choose another name")
    if len(raw) > _MAX_PATH or any(len(part) > _MAX_NAME for part in _missing_names(path)):
        raise UsageError(f"{where}: is too long; a name may have {_MAX_NAME} bytes")
    try:
        _check_place(path, where, file)
        _check_parent(path.absolute().parent, where)
        return path.absolute().parent.resolve() / name
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else "its links form a circle"
        raise UsageError(f"{where}: cannot be made ({reason}); choose another --out") from error


def _shown_path(path: Path) -> str:
    text = str(path)
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."


def _missing_names(path: Path) -> list[bytes]:
    """The last name, and those above it that are still to be made."""
    above = path.absolute()
    names = [os.fsencode(above.name)]
    while not os.path.lexists(above := above.parent):
        names.append(os.fsencode(above.name))
    return names


def _check_place(path: Path, where: str, file: bool) -> None:
    beside = [] if file else [path.with_name(path.name + ".partial")]
    for place in (path, *beside):
        if not os.path.lexists(place):
            continue
        mode = place.lstat().st_mode
        shown = where if place == path else f"{where}.partial"
        if stat.S_ISLNK(mode):
            raise UsageError(f"{shown}: is a link; name the place itself")
        if file and not stat.S_ISREG(mode):
            raise UsageError(f"{shown}: is there and is not a plain file; choose another --out")
        if not file and not stat.S_ISDIR(mode):
            raise UsageError(f"{shown}: is there and is not a folder; choose another --out")


def _check_parent(parent: Path, where: str) -> None:
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{where}: {parent} is not a folder; choose another --out")
    with tempfile.TemporaryFile(dir=parent):  # has no name and leaves nothing
        pass
