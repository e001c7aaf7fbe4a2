"""Scores of recovered tokens and texts against the true ones. Arrays of token ids only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.dictionary import Ids


@dataclass(frozen=True)
class Overlap:
    """Multiset overlap by unit, (centroid, position) or centroid: hits, true and guessed tokens (n,)."""

    hits: NDArray[np.float64]
    true: NDArray[np.float64]
    guessed: NDArray[np.float64]

    @property
    def recall(self) -> float:
        return float(self.hits.sum() / self.true.sum())

    @property
    def f1(self) -> float:
        return float(2 * self.hits.sum() / (self.true.sum() + self.guessed.sum()))


def overlap(
    guesses: Sequence[Sequence[Ids]],
    truths: Sequence[Sequence[Ids]],
    ignore: frozenset[int],
    only: NDArray[np.bool_] | None = None,
) -> Overlap:
    """Compare guesses with true tokens, both [centroid][unit] multisets; units without truth drop out.

    ignore: special tokens, which are in every text. only: (V,) mask of the tokens that count.
    """
    rows: list[tuple[int, int, int]] = []
    for guess_row, truth_row in zip(guesses, truths, strict=True):
        for guess, truth in zip(guess_row, truth_row, strict=True):
            kept = [_content(ids, ignore, only) for ids in (guess, truth)]
            size = 1 + max((int(ids.max()) for ids in kept if len(ids)), default=0)
            first, second = (np.bincount(ids, minlength=size) for ids in kept)
            if second.sum():
                rows.append((int(np.minimum(first, second).sum()), int(second.sum()), int(first.sum())))
    table = np.array(rows, np.float64).reshape(-1, 3)
    return Overlap(table[:, 0], table[:, 1], table[:, 2])


def _content(ids: Ids, ignore: frozenset[int], only: NDArray[np.bool_] | None) -> Ids:
    kept = ids[~np.isin(ids, list(ignore))]
    return kept if only is None else kept[only[kept]]


def by_position(texts: Sequence[Ids], positions: int) -> list[Ids]:
    """The true tokens of a cluster's texts at each position."""
    return [np.array([ids[s] for ids in texts if len(ids) > s], dtype=np.int64) for s in range(positions)]


def bag(row: Sequence[Ids]) -> Ids:
    """All positions of a cluster as one multiset."""
    return np.concatenate([np.zeros(0, np.int64), *row])


def exact_texts(found: Sequence[Ids], true: Sequence[Ids], ignore: frozenset[int]) -> int:
    """How many of the true texts of a cluster came out whole, token for token; each found one counts once.

    ignore: special tokens, so that a text counts whether or not its start and end were read.
    """
    whole = [Counter(tuple(_content(ids, ignore, None).tolist()) for ids in side) for side in (found, true)]
    return sum((whole[0] & whole[1]).values())


def holds(texts: Sequence[Ids], name: Ids) -> bool:
    """Whether a sequence of tokens stands in one of the texts without a gap: a planted name, an identifier.

    Raises ValueError for an empty name, which every text would hold.
    """
    if not len(name):
        raise ValueError("a name to look for has at least one token")
    width = len(name)
    return any(
        bool((np.lib.stride_tricks.sliding_window_view(ids, width) == name).all(1).any())
        for ids in texts
        if len(ids) >= width
    )
