"""Covariances of rows that come in chunks and are never held together: plain, and as Ledoit and Wolf (2004).

`numpy.cov` and scikit-learn's `LedoitWolf` are the same estimates of rows in memory, which they copy several
times. No files.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]


def sample_covariance(parts: Iterable[Vectors]) -> tuple[Vectors, Vectors]:
    """(d,) mean and (d, d) covariance, over n - 1, of the rows in all parts, (n_i, d) each, in one pass.

    Each part is centred by itself and then merged (Chan, Golub and LeVeque 1983), so that nothing cancels.
    Raises ValueError for fewer than two rows.
    """
    count, mean, moments = 0, np.zeros(0), np.zeros((0, 0))
    for rows in parts:
        own = rows.mean(0)
        centred = rows - own
        added = centred.T @ centred
        if count:
            gap, together = own - mean, count + len(rows)
            added += np.outer(gap, gap) * (count * len(rows) / together)
            own = mean + gap * (len(rows) / together)
            added += moments
        mean, moments, count = own, added, count + len(rows)
    if count < 2:
        raise ValueError(f"there is no covariance of {count} rows")
    return mean, moments / (count - 1)


def ledoit_wolf(parts: Iterable[Vectors], mean: Vectors) -> tuple[Vectors, float]:
    """(d, d) covariance of the rows in all parts, (n_i, d) each, and its shrinkage from 0 to 1.

    mean: (d,) of all rows, from a pass before: moments around 0 would cancel where the mean is large. The
    shrinkage needs the sum over all i, j of E[x_i^2 x_j^2], which is E|x|^4, and so one number for each row.
    Raises ValueError where there is no row.
    """
    width, count, fourth = len(mean), 0, 0.0
    moments = np.zeros((width, width))
    for rows in parts:
        centred = rows - mean
        moments += centred.T @ centred
        fourth += float((np.einsum("ij,ij->i", centred, centred) ** 2).sum())
        count += len(rows)
    if not count:
        raise ValueError("there is no row to take a covariance of")
    moments /= count
    scale, square = float(np.trace(moments)) / width, float((moments**2).sum())
    error = (fourth / count - square) / (width * count)  # beta of the paper: of the covariance itself
    distance = square / width - scale**2  # delta: between the covariance and a multiple of the identity
    shrinkage = min(error, distance) / distance if distance > 0 else 0.0
    moments *= 1 - shrinkage
    moments[np.diag_indices(width)] += shrinkage * scale
    return moments, shrinkage
