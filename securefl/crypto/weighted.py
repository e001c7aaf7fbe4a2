"""A weighted mean whose weights stay hidden: a silo masks its vector times its weight, and the weight.

Two vectors of one masked round; their opened sums give the mean and the total weight, nothing of one silo.
Mathematics only, on `fixed_point`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from securefl.crypto.fixed_point import FixedPoint
from securefl.errors import PayloadError


def encode_weighted(
    values: NDArray[np.float32],
    weight: float,
    values_as: FixedPoint,
    weight_as: FixedPoint,
    rng: np.random.Generator | None = None,
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """A silo's vector times its weight, and the weight itself (1,): both are to be masked, neither is told.

    values: float32 (d,); weight: in [0, 1]; weight_as has the clip 1; rng: see
    `FixedPoint.encode`. Raises NonFiniteUpdate for NaN or
    infinity, before anything is masked, else as `FixedPoint.encode`.
    """
    ones = np.ones(1, np.float32)
    return values_as.encode(values, weight, rng), weight_as.encode(ones, weight, rng)


def weighted_mean(
    values: NDArray[np.uint32], weights: NDArray[np.uint32], values_as: FixedPoint, weight_as: FixedPoint
) -> NDArray[np.float64]:
    """The mean behind two opened sums of `encode_weighted`: float64 (d,).

    Raises PayloadError where no weight is left to divide by, or a sum is larger than its silos can make it.
    """
    total = float(weight_as.decode(weights)[0])
    if total <= 0:
        raise PayloadError("the weights of a masked round add up to nothing")
    return values_as.decode(values) / total
