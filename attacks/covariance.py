"""A covariance shrunk as Ledoit and Wolf (2004) do, of rows that come in chunks and are never held together.

scikit-learn's `LedoitWolf` is the same estimate of rows in memory, which it copies several times. No files.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]


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
