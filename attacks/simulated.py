"""Releases made up from auxiliary rows, so that a probe is fitted on what the real release looks like.

A probe fitted on exact means meets a noised centroid as something it has never seen, and scores below a guess
that ignores the centroid: that looks like safety and is a bug. Groups of the released size are therefore
drawn here, clipped and noised as the claim says. Arrays only; no files, no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from attacks.adversary import NotEnough
from attacks.membership import Vectors, clipped
from securefl.release import Claim, GaussianSums

Ids = NDArray[np.int64]

# Numbers of a block of vectors held at once: 64 MB as float64.
_BLOCK = 8_000_000
_HELD_OUT = 0.25
_LEAST_ROWS = 64
# Auxiliary rows to simulate from where there are more: the probes were measured with 1,500 to 7,000, and so
# many make 2,048 groups of 16 without one repetition. 48 MiB of 384 numbers.
_ENOUGH_ROWS = 2**15
# Released sizes within this ratio share a probe, which is fitted on all of them: a rate of tokens or of an
# attribute changes little over it, and a release of many sizes stays a matter of few fits.
_RATIO = 1.5


def buckets(sizes: Vectors) -> list[Ids]:
    """Indices of released sizes (q,) in classes whose largest is at most 1.5 times the smallest."""
    classes: list[list[int]] = []
    for index in np.argsort(sizes, kind="stable").tolist():
        if not classes or sizes[index] > _RATIO * sizes[classes[-1][0]]:
            classes.append([])
        classes[-1].append(index)
    return [np.array(one, np.int64) for one in classes]


def _least_rows(largest: float) -> int:
    return max(_LEAST_ROWS, int(np.ceil(np.ceil(2 * largest) / _HELD_OUT)))


def enough_rows(largest: float) -> int:
    """Auxiliary rows beyond which a probe of centroids of up to `largest` rows gains little; never fewer than
    `split` asks for."""
    return max(_ENOUGH_ROWS, _least_rows(largest))


def split(rows: int, largest: float, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Indices of auxiliary rows to fit on and, a quarter, to choose on; no row is in both.

    largest: the largest released size; each part must hold two groups of it, or all groups drawn from it are
    nearly the same one. Raises NotEnough where they do not.
    """
    held = int(rows * _HELD_OUT)
    if rows < _LEAST_ROWS or held < 2 * largest:
        raise NotEnough(
            f"{rows} auxiliary rows; a probe of centroids of {largest:.0f} rows needs at least "
            f"{_least_rows(largest)}"
        )
    order = rng.permutation(rows)
    return order[held:].astype(np.int64), order[:held].astype(np.int64)


class _Deck:
    """Rows dealt out without repetition until fewer than asked for are left; then all are shuffled anew.

    So all rows serve equally often, which independent draws of small groups do not give.
    """

    def __init__(self, rows: Ids, rng: np.random.Generator) -> None:
        self._rows, self._rng, self._next = rng.permutation(rows), rng, 0

    def __len__(self) -> int:
        return len(self._rows)

    def deal(self, n: int) -> Ids:
        if self._next + n > len(self._rows):
            self._rng.shuffle(self._rows)
            self._next = 0
        self._next += n
        return self._rows[self._next - n : self._next].copy()


@dataclass(frozen=True)
class Simulator:
    """Auxiliary rows (m, d), unclipped, array or memory map, and the claim to imitate.

    cells: (m,) the cell of each auxiliary row (`membership.assign`) where rows were clustered: a simulated
    group then comes from one cell, as a real one does. None: the groups are random.
    """

    auxiliary: NDArray[np.floating]
    claim: Claim
    cells: Ids | None = None

    def releases(
        self, rows: Ids, sizes: Vectors, groups: int, rng: np.random.Generator
    ) -> Iterator[tuple[Vectors, sparse.csr_array]]:
        """Blocks of simulated centroids (g, d) with their group's rows, (g, m) 0/1; `groups` in all.

        rows: indices of the auxiliary rows to draw from. sizes: released sizes, taken in turn. Without a
        claim a group has as many rows; under one the size is a noisy count, so that the number of rows is
        drawn given it (a flat prior, at least 1), and the noisy sum is divided by the size, as was the real.
        """
        decks = [_Deck(rows, rng)]
        if self.cells is not None:
            cells = self.cells[rows]
            decks += [_Deck(rows[cells == cell], rng) for cell in np.unique(cells[cells >= 0])]
        rooms = [len(deck) for deck in decks]
        numbers: list[Ids] = []
        divisors: list[float] = []
        room = max(1, _BLOCK // self.auxiliary.shape[1])
        for group in range(groups):
            size = float(sizes[group % len(sizes)])
            n = size
            if isinstance(self.claim, GaussianSums):
                n -= rng.normal(0, self.claim.count_multiplier)
            count = min(max(1, round(n)), len(rows))
            fitting = [i for i in range(1, len(decks)) if rooms[i] >= 2 * count]
            deck = decks[fitting[rng.integers(len(fitting))] if fitting else 0]
            numbers.append(deck.deal(count))
            divisors.append(size if isinstance(self.claim, GaussianSums) else float(count))
            if sum(map(len, numbers)) >= room or group == groups - 1:
                yield self._release(numbers, np.array(divisors), rng)
                numbers, divisors = [], []

    def _release(
        self, numbers: list[Ids], divisors: Vectors, rng: np.random.Generator
    ) -> tuple[Vectors, sparse.csr_array]:
        ends = np.cumsum([0, *map(len, numbers)])
        drawn = np.concatenate(numbers)
        rows = np.asarray(self.auxiliary[drawn], np.float64)
        sums = np.add.reduceat(clipped(rows, self.claim), ends[:-1], axis=0)
        if isinstance(self.claim, GaussianSums):
            sums = sums + rng.normal(0, self.claim.clip * self.claim.noise_multiplier, sums.shape)
        whose = sparse.csr_array(
            (np.ones(len(drawn), np.float32), drawn, ends), shape=(len(numbers), len(self.auxiliary))
        )
        return sums / divisors[:, None], whose
