"""Attack 2 on several releases of the same rows: independent noise averages out.

T rounds whose claims name the same noise leave 1/sqrt(T) of it. Where the encoder's table is the same in all
rounds their sums are averaged (`average`). Where it moved from round to round, and is known in each as the
round's model is to its peers, the releases are laid side by side and read with dictionaries laid side by side
(`stack`, `dictionary.Stacked`). Which centroids of two rounds are the same rows is for the caller to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attacks.tokens import Target
from securefl.errors import SecureflError
from securefl.release import GaussianSums


def average(targets: Sequence[Target]) -> Target:
    """One release with the noise of all: sums and counts weighted by the inverse of their noise's variance.

    targets: of the same q centroids in the same order and of the same table. Its claim is the first one's;
    `rounds` says how much less noise than that it has. Exact releases, which are equal, give their mean.
    Raises SecureflError where they differ in shape, clip or kind of claim.
    """
    first, shares, rounds = _shares(targets)
    sizes = _sizes(targets)
    if not first.private:
        centroids = np.stack([one.centroids for one in targets]).mean(0, dtype=np.float64)
    else:
        total = np.zeros(first.centroids.shape)
        for share, one in zip(shares, targets, strict=True):
            total += share * one.centroids.astype(np.float64) * one.sizes[:, None, None]
        centroids = total / sizes[:, None, None]
    return replace(
        first,
        centroids=np.asarray(centroids, np.float32),
        mask=np.max([one.mask for one in targets], axis=0),
        sizes=sizes,
        rounds=rounds,
    )


def stack(targets: Sequence[Target]) -> tuple[Target, tuple[float, ...]]:
    """Releases of the same q centroids from T tables as one of T d numbers, and the scales (T,) of `Stacked`.

    The parts are divided by scales in proportion to their noise, such that a vector keeps the length that it
    has in one table and the claim's clip goes on meaning what it meant. Raises SecureflError as `average`.
    """
    first, shares, rounds = _shares(targets)
    sizes = _sizes(targets)
    scales = tuple(float(1 / math.sqrt(share)) for share in shares)
    parts = []
    for scale, one in zip(scales, targets, strict=True):
        divisor = (one.sizes / sizes)[:, None, None] if first.private else 1.0
        parts.append(one.centroids / scale * divisor)
    target = replace(
        first,
        centroids=np.concatenate(parts, axis=2).astype(np.float32),
        mask=np.max([one.mask for one in targets], axis=0),
        sizes=sizes,
        rounds=rounds,
    )
    return target, scales


def _shares(targets: Sequence[Target]) -> tuple[Target, NDArray[np.float64], float]:
    """The first release, the weight (T,) of each, summing to 1, and how many of the first they are worth."""
    if not targets:
        raise SecureflError("there are no releases to combine")
    first = targets[0]
    for one in targets[1:]:
        if one.centroids.shape != first.centroids.shape:
            raise SecureflError(
                "releases of different numbers of centroids, positions or width do not combine"
            )
        if one.private != first.private or one.clip != first.clip:
            raise SecureflError("releases of different kinds or clips do not combine")
    if not first.private:
        return first, np.full(len(targets), 1 / len(targets)), 1.0
    precision = np.array([one.deviation**-2 for one in targets])
    return first, precision / precision.sum(), float(first.rounds * precision.sum() / precision[0])


def _sizes(targets: Sequence[Target]) -> NDArray[np.float32]:
    """(q,) the counts, each as exact as its claim's noise on it allows."""
    weights = [
        one.rounds / one.claim.count_multiplier**2 if isinstance(one.claim, GaussianSums) else 1.0
        for one in targets
    ]
    sizes = np.average([one.sizes for one in targets], axis=0, weights=weights)
    return np.asarray(sizes, np.float32)
