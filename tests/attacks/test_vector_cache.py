"""Texts are embedded once, in whatever order they are asked for, and large sets lie on disk unseen."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attacks.vector_cache import VectorCache
from securefl.errors import UsageError


class Encoder:
    """A text's vector is its number and the number squared; counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.asked.append(len(texts))
        numbers = np.array([int(text) for text in texts], np.float32)
        return np.stack([numbers, numbers**2], axis=1)


def names(*numbers: int) -> list[str]:
    return [str(number) for number in numbers]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path))
    return tmp_path / "securefl"


def mapped(vectors: NDArray[np.float32]) -> bool:
    base: object = vectors
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


@pytest.mark.parametrize("in_memory", [2**20, 0])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_every_order_gives_each_texts_vector(in_memory: int, at_once: int) -> None:
    cache, encoder = VectorCache(in_memory, at_once), Encoder()
    for numbers in (
        [5, 3, 9, 1],  # all new
        [3, 9],  # a part of them, as they lie
        [9, 3, 9],  # neither in order nor once
        [7, 5, 8, 5, 1, 6],  # some new, some not
        [1, 7],  # the last of one block, and the first of the next
        list(range(20)),
    ):
        found = cache.take(names(*numbers), encoder)
        assert found.tolist() == [[n, n**2] for n in numbers]
        assert found.dtype == np.float32
        assert mapped(found) == (in_memory == 0)
        assert not found.flags.writeable
    assert sum(encoder.asked) == 20
    assert max(encoder.asked) <= at_once
    assert cache.nbytes == 20 * 8
    assert cache.take([], encoder).shape == (0, 2)


def test_only_what_is_large_lies_on_disk_and_under_no_name(folder: Path) -> None:
    cache, encoder = VectorCache(in_memory=10 * 8), Encoder()
    assert not mapped(cache.take(names(*range(10)), encoder))
    assert not folder.exists()
    large = cache.take(names(*range(10, 21)), encoder)
    assert mapped(large)
    assert list(folder.iterdir()) == []
    del cache
    assert large[-1].tolist() == [20, 400]


def test_a_disk_without_room_is_an_error(folder: Path) -> None:
    """Before anything but the first texts is embedded, and also where it fills up later."""
    wide = np.broadcast_to(np.float32(0), (1, 2**40))  # four terabytes each, if it were
    with pytest.raises(UsageError, match=r"no room for .* GB .* SECUREFL_CACHE"):
        VectorCache(at_once=1).take(names(*range(1000)), lambda _: wide)
    cache, encoder = VectorCache(in_memory=0, at_once=1000), Encoder()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, before[1]))
    try:
        with pytest.raises(UsageError, match=r"no room for .*File too large"):
            cache.take(names(*range(5000)), encoder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.iterdir()) == []
    # Nothing is taken for known that was not kept.
    assert cache.take(names(*range(3)), encoder).tolist() == [[0, 0], [1, 1], [2, 4]]


def test_an_encoder_that_loses_a_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        VectorCache().take(names(1, 2, 3), lambda texts: Encoder()(texts[1:]))
