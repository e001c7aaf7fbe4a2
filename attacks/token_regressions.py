"""Regressions from a vector to the presence of every token at once, and the choice of what to guess.

All of them come from one covariance of simulated releases, so a vocabulary costs one matrix product. Arrays
only; what the groups are and what is done with the guesses is `bag_probe`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from attacks.adversary import NotEnough
from attacks.membership import Vectors
from attacks.simulated import Ids

Single = NDArray[np.float32]

_WHITENING = 1.0
PAIR_PENALTY = 0.1  # of what the regression over pairs weighs, of the mean variance
# The mean of the texts with a token is shrunk as if the overall mean were this many more of them.
PSEUDO_ROWS = 5.0
_BINS = 4096


@dataclass(frozen=True)
class Ridge:
    """Ridge regressions of every token at once, for any penalty.

    mean: (d,) of the simulated centroids; basis: (d, d), variances: (d,) of their covariance. slopes: (d, V)
    covariance of rotated centroid and token. rate: (V,) share of groups that have the token.
    """

    mean: Vectors
    basis: Vectors
    variances: Vectors
    slopes: Single
    rate: Single

    def scores(self, centroids: Vectors, penalty: float) -> Single:
        """(g, V) linear estimate of the probability that a token is in the group."""
        shrunk = self.variances + penalty * self.variances.mean()
        turned = (centroids - self.mean) @ self.basis / shrunk
        return np.asarray(turned.astype(np.float32) @ self.slopes + self.rate, np.float32)

    def columns(self, ids: Ids) -> Ridge:
        return replace(self, slopes=self.slopes[:, ids], rate=self.rate[ids])


Blocks = Iterator[tuple[Vectors, sparse.csr_array]]


def present(blocks: Blocks, tokens: sparse.csr_array) -> Blocks:
    """Of blocks (centroids, rows of each group): (centroids, 0/1 tokens of each group)."""
    for centroids, whose in blocks:
        there = sparse.csr_array(whose @ tokens)
        there.data[:] = 1
        yield centroids, there


def fit(blocks: Blocks, width: int, vocabulary: int) -> Ridge:
    """Normal equations over blocks, around the first block's mean so that nothing cancels."""
    origin: Vectors | None = None
    groups, total, counts = 0, np.zeros(width), np.zeros(vocabulary)
    square, cross = np.zeros((width, width)), np.zeros((vocabulary, width))
    for centroids, there in blocks:
        origin = centroids.mean(0) if origin is None else origin
        moved = centroids - origin
        groups += len(moved)
        total += moved.sum(0)
        square += moved.T @ moved
        counts += there.sum(axis=0)
        cross += there.T @ moved
    if origin is None:
        raise NotEnough("no groups were simulated, so there is nothing to fit")
    mean, rate = total / groups, counts / groups
    variances, basis = np.linalg.eigh(square / groups - np.outer(mean, mean))
    slopes = basis.T @ (cross / groups - np.outer(rate, mean)).T
    floor = max(1e-12, 1e-9 * float(variances.max()))
    return Ridge(
        origin + mean,
        basis,
        np.maximum(variances, floor),
        slopes.astype(np.float32),
        rate.astype(np.float32),
    )


class Chooser:
    """The threshold with the best F1 over all (group, token) pairs, counted in bins of the score."""

    def __init__(self) -> None:
        self._ends: tuple[float, float] | None = None
        self._all, self._hits, self._true = np.zeros(_BINS), np.zeros(_BINS), 0

    def add(self, scores: Single, there: sparse.csr_array) -> None:
        """scores: (g, V); there: (g, V) 0/1 truth."""
        if self._ends is None:
            self._ends = float(scores.min()), max(float(scores.max()), float(scores.min()) + 1e-6)
        low, high = self._ends
        bins = np.clip((scores - low) * (_BINS / (high - low)), 0, _BINS - 1).astype(np.int32)
        self._all += np.bincount(bins.ravel(), minlength=_BINS)
        right = there.tocoo()
        self._hits += np.bincount(bins[right.row, right.col], minlength=_BINS)
        self._true += right.nnz

    def best(self, missed: int = 0) -> tuple[float, float]:
        """(F1, threshold): tokens scoring at least the threshold are guessed. missed: true pairs beside."""
        assert self._ends is not None
        hits, guessed = np.cumsum(self._hits[::-1])[::-1], np.cumsum(self._all[::-1])[::-1]
        f1 = 2 * hits / np.maximum(1, guessed + self._true + missed)
        at = int(f1.argmax())
        low, high = self._ends
        return float(f1[at]), low + at * (high - low) / _BINS


def best_number(counts: Vectors, order: Ids, groups: int) -> tuple[int, float]:
    """How many tokens of `order` to guess for every group, and the F1 of it, the best one.

    counts: (V,) how many of the groups have each.
    """
    hits = np.cumsum(counts[order])
    f1 = 2 * hits / np.maximum(1, groups * np.arange(1, len(order) + 1) + counts.sum())
    return int(f1.argmax()) + 1, float(f1.max())


def whitening(ridge: Ridge) -> Vectors:
    """(d,) by which rotated centroids are divided: what they vary in anyway, the noise included."""
    return np.asarray(np.sqrt(ridge.variances + _WHITENING * ridge.variances.mean()), np.float64)


def discriminant(ridge: Ridge, rows: Vectors) -> Ridge:
    """Log-likelihood ratio of "has the token" against "any group", Gaussian with one covariance; its `scores`
    take the penalty `PAIR_PENALTY`. rows: (V,) how many rows have each token."""
    means = ridge.slopes * (rows / (rows + PSEUDO_ROWS) / np.maximum(ridge.rate, 1e-9)).astype(np.float32)
    shrunk = (ridge.variances + PAIR_PENALTY * ridge.variances.mean()).astype(np.float32)
    return replace(ridge, slopes=means, rate=-0.5 * (means**2 / shrunk[:, None]).sum(0))
