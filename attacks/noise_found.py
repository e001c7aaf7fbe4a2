"""What a noised release leaves once the rows behind it are taken away, and how that differs from the claim.

Under the claim it is Gaussian noise of a known size, independent in every number, on sums of clipped rows. It
may be too little, on some centroids or along some numbers only, the same on two centroids, or of another
law; rows may not have been clipped, or no noise added at all. Pure functions on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, kstest

from securefl.centroid_privacy import clip_rows
from securefl.release import GaussianSums

Vectors = NDArray[np.float64]

FALSE_ALARM = 1e-4
"""An honest release fails one of the tests less often than this, each test by itself."""
CLAIMED = "sums of clipped rows"
# Float32 on the way, and tokens cut a little differently, are not other rows.
_SLACK = 1.05
_REFUSED = 1e-6


@dataclass(frozen=True)
class Left:
    """noise: (q, D) over the claimed deviation. how: of what sums it is left. sensitivity: how many clips the
    largest row added to them has, at least 1."""

    noise: Vectors
    how: str
    sensitivity: float = 1.0

    @property
    def squares(self) -> float:
        return float((self.noise**2).sum())

    @property
    def ratio(self) -> float:
        """Its deviation over the claimed one."""
        return float(np.sqrt(self.squares / self.noise.size))

    @property
    def too_little(self) -> bool:
        return self.squares < float(chi2.ppf(FALSE_ALARM, self.noise.size))

    @property
    def too_much(self) -> bool:
        return self.squares > _SLACK**2 * float(chi2.isf(_REFUSED, self.noise.size))


def left_over(
    claim: GaussianSums,
    vectors: NDArray[np.floating],
    mask: NDArray[np.floating] | None,
    groups: Sequence[Sequence[int]],
    centroids: NDArray[np.floating],
    sizes: NDArray[np.floating],
    there: NDArray[np.floating] | None = None,
) -> list[Left]:
    """What is left of sums of clipped rows, of rows that were not clipped, and of plain means, in this order.

    vectors: (n, d), or (n, S, d) with mask (n, S); centroids and `there` (q, S) likewise; sizes: (q,), noisy.
    The noise on a sum is that on its centroid times the noisy size, by which it was divided.
    """
    flat = vectors.reshape(len(vectors), -1).astype(np.float64)
    released = centroids.reshape(len(centroids), -1).astype(np.float64)
    size = sizes.astype(np.float64)[:, None]
    columns = np.ones(flat.shape[1], bool)
    if there is not None:
        # Positions that no public length reaches are not released.
        columns = np.repeat(there.max(0) > 0, vectors.shape[-1])
    unit = claim.clip * claim.noise_multiplier
    clipped = np.stack([clip_rows(flat[group], claim.clip).sum(0) for group in groups])
    plain = np.stack([flat[group].sum(0) for group in groups])
    counts = np.array([[max(1, len(group))] for group in groups], np.float64)
    if mask is not None:
        counts = np.stack(
            [np.repeat(np.maximum(1, mask[group].sum(0)), vectors.shape[-1]) for group in groups]
        )
    members = flat[[row for group in groups for row in group]]
    largest = max(1.0, float(np.linalg.norm(members, axis=1).max()) / claim.clip)
    found = [
        Left((released * size - clipped)[:, columns] / unit, CLAIMED),
        Left((released * size - plain)[:, columns] / unit, "sums of rows that were not clipped", largest),
        Left(((released - plain / counts) * size)[:, columns] / unit, "plain means", largest),
    ]
    # Where every row is within the clip the first two are the same.
    return found if largest > 1 else [found[0], found[2]]


def explain(found: Sequence[Left]) -> Left | None:
    """How the release was made: as claimed, unless another way leaves too little for there to be noise, or is
    the only one that leaves as much as the noise. None where nothing does: these are other rows.

    On what an honest release leaves of other sums lies its noise and more, so an honest one is misjudged with
    probability `FALSE_ALARM` for each.
    """
    claimed, *others = found
    near = [one for one in found if one.too_little]
    if near:
        return min(near, key=lambda one: one.squares)
    if not claimed.too_much or any(part.too_little for part in least(claimed.noise)):
        return claimed
    return next((one for one in others if not one.too_much), None)


@dataclass(frozen=True)
class Part:
    """A part of the noise with the least of it. tests: of how many parts it is the least."""

    what: str
    squares: float
    count: int
    tests: int

    @property
    def ratio(self) -> float:
        """Claimed over found deviation."""
        return float(np.sqrt(self.count / max(self.squares, 1e-300)))

    @property
    def too_little(self) -> bool:
        return self.squares < float(chi2.ppf(FALSE_ALARM / self.tests, self.count))


def least(noise: Vectors) -> list[Part]:
    """The centroid, the number (over all centroids) and the difference or sum of two centroids with the least
    noise. noise: (q, D) over the claimed deviation.

    Noise that two centroids have alike, or with the other sign, is none to who has both of them.
    """
    q, width = noise.shape
    parts = []
    if q > 1:
        parts.append(Part("the least noised centroid", float((noise**2).sum(1).min()), width, q))
        parts.append(
            Part("the least noised number of all centroids", float((noise**2).sum(0).min()), q, width)
        )
        gram = noise @ noise.T
        square = np.diag(gram)
        pairs = np.triu_indices(q, 1)
        # Of (a - b) / sqrt(2) or (a + b) / sqrt(2), whichever is smaller.
        both = (square[:, None] + square[None])[pairs] / 2 - np.abs(gram[pairs])
        # What is left of equal numbers is rounding, and not below 0.
        smallest = max(0.0, float(both.min()))
        parts.append(Part("two centroids, one less the other", smallest, width, 2 * len(both)))
    return parts


def shape_distance(noise: Vectors) -> float:
    """Kolmogorov-Smirnov distance between all numbers and a Gaussian of their own deviation, about 0."""
    flat = noise.ravel()
    deviation = float(np.sqrt((flat**2).mean()))
    return float(kstest(flat / deviation, "norm").statistic) if deviation > 0 else 1.0
