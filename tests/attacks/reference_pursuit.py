"""The attack of `attacks.pursuit` as one would write it first: one vector, one atom at a time, plain NumPy.

What its results are held against, and what it is timed against. It knows the sum, how many atoms it has, and
the atoms with their variances; the axes need not be rotated, and no prior helps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SWEEPS = 3
SWEEP_ERROR = 0.05


def pursue(
    total: NDArray[np.float32],
    k: int,
    atoms: NDArray[np.float32],
    variances: NDArray[np.float32],
    exact: float,
) -> NDArray[np.int64]:
    """(k,) indices of the atoms (M, d) that add up to `total` (d,), in the order in which they were found.

    Each pick minimises the remaining error in the metric of half the atoms' variances (d,); then every atom
    is taken out and chosen again, until the norm of what is left is at most `exact` or nothing changes.
    """

    def best(left: NDArray[np.float32], precision: NDArray[np.float32], cost: NDArray[np.float32]) -> int:
        return int((atoms @ (precision * left) - cost).argmax())

    left = total.copy()
    chosen: list[int] = []
    precision = 1 / (max(0.5, k / 2) * variances)
    cost = 0.5 * atoms**2 @ precision
    for _ in range(k):
        chosen.append(best(left, precision, cost))
        left -= atoms[chosen[-1]]
    precision = 1 / (SWEEP_ERROR * variances)
    cost = 0.5 * atoms**2 @ precision
    for _ in range(SWEEPS):
        before = list(chosen)
        for place in range(k):
            if np.linalg.norm(left) <= exact:
                return np.array(chosen)
            left += atoms[chosen[place]]
            chosen[place] = best(left, precision, cost)
            left -= atoms[chosen[place]]
        if chosen == before:
            break
    return np.array(chosen)
