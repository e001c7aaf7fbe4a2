"""How many texts are behind a centroid whose size was withheld.

An exact centroid tells: k times it is a sum of k entries of the dictionary for the true k and its multiples,
and for no other k within reach. The smallest number that adds up is sought at the first few positions; what
holds at one position only up to a factor (all texts begin alike) the next ones settle, with the texts that
ended in between. A noised one tells by its noise: c = (sum + noise) / k has noise of sigma / k, whose size
shows in everything that no tokens explain, and the posterior of k is
log N(k c - atoms; sigma^2) + d log k + log P(tokens | k), summed over positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from attacks.dictionary import Dictionary, Geometry, Ids, Layer, Prior, end_ids, geometry, token_ids
from attacks.tokens import Solver, Target, expected_counts, shortlist
from securefl.slm import Slm

MOST = 16
_POSITIONS = 4
_WIDER = 4


@dataclass(frozen=True)
class Sizes:
    """sizes: (q,) texts behind each centroid; found: (q,) whether a number within reach added up (exact
    releases), or the best one is e^3 times as likely as any other."""

    sizes: NDArray[np.float32]
    found: NDArray[np.bool_]


def estimate_sizes(
    slm: Slm,
    target: Target,
    prior: Prior,
    auxiliary: Sequence[str],
    *,
    most: int = MOST,
    positions: int = _POSITIONS,
    dictionary: Dictionary | None = None,
) -> Sizes:
    """Numbers of texts from 1 to `most`, from the first `positions` positions. `target.sizes` is not read.

    Use: `replace(target, sizes=estimate_sizes(...).sizes)`, then `tokens.recover`. Under a claim what is
    estimated is the noisy count by which the noisy sum was divided, to the nearest whole number.
    """
    positions = min(positions + 1, target.centroids.shape[1])
    dictionary = Layer(slm, target.centroids.shape[1]) if dictionary is None else dictionary
    texts = token_ids(slm, auxiliary)
    known = geometry(dictionary, texts, prior, target.centroids.shape[1], target.clip)
    if target.private:
        return _posterior(target, known, dictionary, most, positions)
    return _adding_up(target, known, dictionary, end_ids(slm), most, positions)


def _of_size(target: Target, rows: Ids, k: int) -> Target:
    """The release as if these centroids were of k texts."""
    sizes = np.ones(len(target.centroids), np.float32)
    sizes[rows] = k
    return replace(target, sizes=sizes)


def _adding_up(
    target: Target, known: Geometry, dictionary: Dictionary, end: Ids, most: int, positions: int
) -> Sizes:
    q = len(target.centroids)
    smallest, ended = np.zeros((q, positions), np.int64), np.zeros((q, positions), np.int64)
    for s in range(positions):
        for k in range(1, most + 1):
            rows = np.flatnonzero((target.mask[:, s] > 0) & (smallest[:, s] == 0))
            if not len(rows):
                break
            one, due = _of_size(target, rows, k), np.full(len(rows), k)
            ids = shortlist(one, known, rows, s, due, wider=_WIDER)
            found, good, _ = Solver(one, known, dictionary, s, ids).solve(rows, due)
            for row, read, sure in zip(rows, found, good, strict=True):
                if sure:
                    smallest[row, s], ended[row, s] = k, int(np.isin(read, end).sum())
    sizes = np.zeros(q, np.float32)
    for c in range(q):
        there = target.mask[c, :positions] > 0
        fitting = (n for n in range(1, most + 1) if _consistent(n, smallest[c], ended[c], there))
        sizes[c] = next(fitting, 0)
    return Sizes(np.where(sizes > 0, sizes, np.maximum(1, smallest.max(1))).astype(np.float32), sizes > 0)


def _consistent(n: int, smallest: Ids, ended: Ids, there: NDArray[np.bool_]) -> bool:
    """Whether n texts explain what added up at every position, given how many ended at the ones before."""
    for k, ends, is_there in zip(smallest.tolist(), ended.tolist(), there.tolist(), strict=True):
        if is_there != (n > 0):
            return False
        if not is_there:
            return True
        if k == 0 or n % k:
            return False
        n -= ends * (n // k)
    return True


def _posterior(target: Target, known: Geometry, dictionary: Dictionary, most: int, positions: int) -> Sizes:
    q, _, width = target.centroids.shape
    rows = np.arange(q)
    scores = np.zeros((q, most))
    for k in range(1, most + 1):
        one = _of_size(target, rows, k)
        counts = expected_counts(one, known.prior)
        for s in range(positions):
            ids = shortlist(one, known, rows, s, counts[:, s])
            solver = Solver(one, known, dictionary, s, ids)
            found, _, error = solver.solve(rows, counts[:, s])
            scores[:, k - 1] += width * math.log(k)
            scores[:, k - 1] -= 0.5 * (error.numpy() / target.deviation) ** 2
            scores[:, k - 1] += [_log_multinomial(read, known.prior.probability[s]) for read in found]
    order = np.sort(scores, axis=1)
    clear = order[:, -1] > order[:, -2] + 3 if most > 1 else np.ones(q, bool)
    return Sizes((scores.argmax(1) + 1).astype(np.float32), np.asarray(clear, np.bool_))


def _log_multinomial(ids: Ids, probability: NDArray[np.float32]) -> float:
    _, times = np.unique(ids, return_counts=True)
    rates = np.log(probability[ids].astype(np.float64)).sum()
    return float(gammaln(len(ids) + 1) - gammaln(times + 1).sum() + rates)
