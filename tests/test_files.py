"""Files that are whole or absent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from securefl.errors import UsageError
from securefl.files import check_out, read_limited, write_atomic, write_new, write_together


def test_files_written_together_are_all_old_where_one_cannot_be(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_together({first: b"1", second: b"2"}, 0o600)
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"2")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    with pytest.raises(UsageError, match="cannot be written"):
        write_together({first: b"3", tmp_path / "none" / "c": b"4"})
    assert first.read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"one", b"", b"three" * 1000):
        write_atomic(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_the_mode_is_the_one_asked_for_less_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "a", b"", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_a_failed_replacement_leaves_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UsageError, match=r"a: cannot be written \(No space left on device\)"):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(target)
    write_atomic(tmp_path / "link", b"new")
    assert target.read_bytes() == b"precious"
    with pytest.raises(UsageError, match="exists already"):
        write_new(target, b"new")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    with pytest.raises(UsageError, match="exists already"):
        write_new(tmp_path / "dangling", b"new")
    assert target.read_bytes() == b"precious"


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    for write in (write_atomic, write_new):
        with pytest.raises(UsageError, match="cannot be written"):
            write(tmp_path / "absent" / "a", b"")


def test_read_limited(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_limited(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UsageError, match="larger than the 4 bytes"):
        read_limited(tmp_path / "a", 4)
    with pytest.raises(UsageError, match="cannot be read"):
        read_limited(tmp_path / "b", 4)


def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    """At once: opening a pipe that nobody writes to, or reading an endless device, would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/zero")):
        with pytest.raises(UsageError, match=r"cannot be read \(it is not an ordinary file\)"):
            read_limited(path, 4)
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "other").symlink_to(tmp_path / "file")
    assert read_limited(tmp_path / "other", 4) == b"1"


def test_names_up_to_the_limit_of_the_file_system(tmp_path: Path) -> None:
    for name in ("x" * 255, "\u6771" * 85):
        write_atomic(tmp_path / name, b"1")
        assert (tmp_path / name).read_bytes() == b"1"
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomic(tmp_path / ("x" * 256), b"")


def places(folder: Path) -> dict[str, Path]:
    """Places for a new folder that cannot be, and none of which is touched."""
    (folder / "file").write_text("kept")
    (folder / "real").mkdir()
    (folder / "link").symlink_to(folder / "real")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "half.partial").write_text("kept")
    return {
        "root": Path("/"),
        "here": Path(),
        "up": folder / "x" / "..",
        "file": folder / "file",
        "below a file": folder / "file" / "x" / "y",
        "link": folder / "link",
        "dangling": folder / "dangling",
        "below a dangling link": folder / "dangling" / "x",
        "loop": folder / "loop",
        "below a loop": folder / "loop" / "x",
        "long": folder / ("x" * 201),
        "long in bytes": folder / ("\u6771" * 67),
        "long parent": folder / ("x" * 256) / "y",
        "deep": Path(str(folder) + "/x" * 3000),
        "partial is a file": folder / "half",
        "not UTF-8": folder / "\udcff",
        "no parent": Path("/proc/nothing/run"),
        "device": Path("/dev/null"),
    }


def test_places_that_cannot_be_made(tmp_path: Path) -> None:
    found = places(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for what, path in found.items():
        with pytest.raises(UsageError) as caught:
            check_out(path)
        assert "\n" not in str(caught.value), what
        assert len(str(caught.value)) < 500, what
    for path in (
        Path("/dev/full"),
        Path("/dev/null"),
        tmp_path / "real",
        tmp_path / "link",
        tmp_path / "dangling",
    ):
        with pytest.raises(UsageError, match=r"is there and is not a plain file|is a link"):
            check_out(path, file=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_places_that_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert check_out(Path("run")) == tmp_path.resolve() / "run"
    assert check_out(Path("a/b/c")) == tmp_path.resolve() / "a/b/c"
    assert check_out(found["link"] / "run") == tmp_path.resolve() / "real/run"
    assert check_out(tmp_path / "real") == tmp_path.resolve() / "real"
    assert check_out(tmp_path / ("x" * 200)).name == "x" * 200
    assert check_out(found["file"], file=True) == tmp_path.resolve() / "file"
    assert sorted(tmp_path.rglob("*")) == before
