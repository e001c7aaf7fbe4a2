"""Vectors of texts, each embedded once: float32, and on disk where there are too many for the memory.

A file on disk has no name, so nobody else can open it and nothing stays behind after a crash. This room knows
no model and no release.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray

from securefl._model_files import cache_folder
from securefl.errors import UsageError

Embed = Callable[[Sequence[str]], NDArray[np.float32]]

# Texts embedded, or vectors copied, at a time; of 384 numbers these are 24 MiB.
_AT_ONCE = 2**14
# Bytes of vectors asked for together above which they lie on disk: 175,000 of 384 numbers.
_IN_MEMORY = 2**28


class VectorCache:
    """The vectors of one encoder, in blocks of the texts that were new when they were asked for."""

    def __init__(self, in_memory: int = _IN_MEMORY, at_once: int = _AT_ONCE) -> None:
        self._in_memory, self._at_once = in_memory, at_once
        self._places: dict[str, int] = {}
        self._blocks: list[NDArray[np.float32]] = []

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def take(self, texts: Sequence[str], embed: Embed) -> NDArray[np.float32]:
        """(n, d) in the order of `texts`, read-only; an array, or a memory map of a file that has no name.

        embed: (m, d) vectors of m texts. Raises UsageError where the disk has no room for them.
        """
        if not len(texts):
            return embed(texts)
        new = [text for text in dict.fromkeys(texts) if text not in self._places]
        if new:
            made = (embed(new[start : start + self._at_once]) for start in range(0, len(new), self._at_once))
            block, start = self._stored(made, len(new)), len(self._places)
            self._places.update(zip(new, range(start, start + len(block)), strict=True))
            self._blocks.append(block)
        places = np.fromiter((self._places[text] for text in texts), np.int64, len(texts))
        starts = np.cumsum([0, *map(len, self._blocks)])
        first = int(np.searchsorted(starts, places[0], "right")) - 1
        offset, block = int(places[0] - starts[first]), self._blocks[first]
        if offset + len(places) <= len(block) and (np.diff(places) == 1).all():
            return block[offset : offset + len(places)]
        return self._stored(self._gathered(places, starts), len(places))

    def _gathered(
        self, places: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(places), self._at_once):
            some = places[start : start + self._at_once]
            which = np.searchsorted(starts, some, "right") - 1
            part = np.empty((len(some), self._blocks[0].shape[1]), np.float32)
            for number in np.unique(which).tolist():
                part[which == number] = self._blocks[number][some[which == number] - starts[number]]
            yield part

    def _stored(self, parts: Iterable[NDArray[np.float32]], count: int) -> NDArray[np.float32]:
        """Parts of `count` rows in all, one below the other."""
        parts = iter(parts)
        first = next(parts)
        size = count * first[0].nbytes
        every = chain([first], parts)
        found = np.concatenate(list(every)) if size <= self._in_memory else _on_disk(every, count, size)
        found.flags.writeable = False
        return found


def _on_disk(parts: Iterable[NDArray[np.float32]], count: int, size: int) -> NDArray[np.float32]:
    # The cache folder: the system's temporary one is often in memory.
    folder = cache_folder()
    why = f"{folder}: has no room for {size / 1e9:.1f} GB of vectors; set SECUREFL_CACHE to a folder that has"
    if shutil.disk_usage(folder).free < size:
        raise UsageError(why)
    with TemporaryFile(dir=folder) as file:
        for part in parts:
            # Written, not mapped: a full disk is an error here, and a signal that kills in a mapped page.
            try:
                file.write(np.ascontiguousarray(part, np.float32).data)
                file.flush()
            except OSError as error:
                raise UsageError(f"{why} ({os.strerror(error.errno or 0)})") from None
        mapped = np.memmap(file, np.float32, "r", shape=(count, size // count // 4))
    # The map keeps the file until the last array over it is gone.
    return np.asarray(mapped)
