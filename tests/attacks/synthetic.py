"""Vectors and claims made up for the attacks on pooled centroids: one Gaussian, wider along some axes."""

from __future__ import annotations

import numpy as np

from attacks.membership import Vectors
from securefl.release import GaussianSums, NonPrivate

PLAIN = NonPrivate(reason="a test")


def rows(count: int, rng: np.random.Generator, *, width: int) -> Vectors:
    return np.asarray(rng.standard_normal((count, width)) * np.linspace(0.3, 1.5, width) + 0.2)


def claim(sigma: float, counts: float = 1.0, *, clip: float) -> GaussianSums:
    """Predictions get noise so large that they add nothing to mu."""
    return GaussianSums(
        epsilon=1.0, delta=1e-5, mu=1 / sigma, clip=clip, noise_multiplier=sigma, count_multiplier=counts,
        prediction_multiplier=1e6, generator="test", simulated=True,
    )  # fmt: skip
