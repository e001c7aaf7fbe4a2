"""Centroids of a silo's rows as what may leave: noisy sums under a claim, or means under none.

With `privacy` the only producer of `Release` from private data: clipping, weighting by unit, noise, and how
much noise a cluster of which size drowns in. Arrays in, a release out; no files, no keys, no model code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.errors import ConfigError, SecureflError
from securefl.privacy import LocalResult, Noise, gaussian_epsilon, gaussian_mu, unit_weights
from securefl.privacy_terms import CentroidPrivacy
from securefl.release import ROW, Adjacency, GaussianSums, NonPrivate, PayloadKind, Release

# How the budget mu^2 of one centroid release is spent. The sums have the most coordinates to hide and get
# most of it; a count and a mean prediction are few numbers of sensitivity 1 and stay useful with little.
# Under replace-one, counts with the sums' multiplier cost nothing more (see `centroid_mu`).
SUM_SHARE, COUNT_SHARE, PREDICTION_SHARE = 0.8, 0.1, 0.1


def centroid_mu(
    noise_multiplier: float, count_multiplier: float, prediction_multiplier: float, adjacency: Adjacency
) -> float:
    """Gaussian-DP parameter of noisy sums, counts and predictions together; one formula for every claim.

    A multiplier z is standard deviation over what one unit adds at most to a block. Count each block in units
    of its noise. One row of cluster k then adds v / z_s to the sums of k (|v| <= 1, the clip), 1 / z_c to its
    count and p / z_p to its predictions (p in the simplex). A unit of several rows adds the mean of such
    points, so one of their convex hull.

    add-remove: the longest vector of the hull. A norm is largest at a corner, a single row:
        mu^2 = 1/z_s^2 + 1/z_c^2 + 1/z_p^2.
    replace-one: the largest difference of two vectors of the hull, again at two corners. In the same cluster
    the sums move by at most 2/z_s, the count by nothing and the predictions by sqrt(2)/z_p, the diameter of
    the simplex; in two clusters each of the two moves by 1/z_s, 1/z_c and 1/z_p:
        mu^2 = max(4/z_s^2, 2/z_s^2 + 2/z_c^2) + 2/z_p^2.
    """
    sums, counts, predictions = noise_multiplier**-2, count_multiplier**-2, prediction_multiplier**-2
    if adjacency == "add-remove":
        return math.sqrt(sums + counts + predictions)
    return math.sqrt(max(4 * sums, 2 * sums + 2 * counts) + 2 * predictions)


@dataclass(frozen=True)
class CentroidMechanism:
    """One centroid release as a Gaussian mechanism; multipliers are sigma over what one unit adds at most.

    clip: L2 bound of a row's vector (its whole matrix for the embedding layer). min_size: centroids whose
    noisy count is below it are withheld, and no sum is divided by less.
    """

    clip: float
    noise_multiplier: float
    count_multiplier: float
    prediction_multiplier: float
    delta: float
    min_size: int
    unit: str = ROW
    adjacency: Adjacency = "add-remove"

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter under `adjacency`: the three blocks are released together."""
        return centroid_mu(
            self.noise_multiplier, self.count_multiplier, self.prediction_multiplier, self.adjacency
        )

    def claim(self, noise: Noise) -> GaussianSums:
        """The claim on one release."""
        return GaussianSums(
            epsilon=gaussian_epsilon(self.mu, self.delta),
            delta=self.delta,
            mu=self.mu,
            clip=self.clip,
            noise_multiplier=self.noise_multiplier,
            count_multiplier=self.count_multiplier,
            prediction_multiplier=self.prediction_multiplier,
            unit=self.unit,
            adjacency=self.adjacency,
            generator=noise.name,
            simulated=noise.simulated,
        )


def _multipliers(mu: float, adjacency: Adjacency) -> tuple[float, float, float]:
    """Of sums, counts and predictions, such that `centroid_mu` is mu."""
    if adjacency == "add-remove":
        sums, counts, predictions = SUM_SHARE, COUNT_SHARE, PREDICTION_SHARE
    else:
        sums = counts = (1 - PREDICTION_SHARE) / 4
        predictions = PREDICTION_SHARE / 2
    return (
        1 / (mu * math.sqrt(sums)),
        1 / (mu * math.sqrt(counts)),
        1 / (mu * math.sqrt(predictions)),
    )


def calibrate_centroids(
    terms: CentroidPrivacy,
    clip: float,
    releases: int,
    *,
    unit: str = ROW,
    adjacency: Adjacency = "add-remove",
) -> CentroidMechanism:
    """The mechanism of each of `releases` centroid releases whose total is `terms`' budget.

    With `epsilon` the budget is that of all releases together (mu adds in squares); with
    `noise_multiplier` every release has that multiplier on its sums.
    """
    if terms.noise_multiplier is not None:
        mu = _multipliers(1.0, adjacency)[0] / terms.noise_multiplier
    elif terms.epsilon is not None:
        mu = gaussian_mu(terms.epsilon, terms.delta) / math.sqrt(max(1, releases))
    else:
        raise ConfigError("privacy.centroids: set epsilon or noise_multiplier for a private release")
    return CentroidMechanism(clip, *_multipliers(mu, adjacency), terms.delta, terms.min_size, unit, adjacency)


def _kind(vectors: NDArray[Any]) -> PayloadKind:
    return PayloadKind.CENTROIDS if vectors.ndim == 2 else PayloadKind.EMBEDDING_CENTROIDS


def release_means(means: LocalResult, info: Mapping[str, Any], min_size: int, unit: str = ROW) -> Release:
    """KMeans centroids as they are, as the paper shares them. A minimum size is not anonymity.

    means.tensors: centroids (q, d) or (q, S, d), mask (q, S) with the latter, predictions (q, C), sizes (q,)
    in rows. unit: of which every cluster has at least `min_size`, as the caller saw to.
    Raises SecureflError where a cluster of fewer rows is among them: it should have been withheld.
    """
    sizes = means.tensors["sizes"]
    if sizes.size and sizes.min() < min_size:
        raise SecureflError(f"a cluster below the minimum size of {min_size} was about to be released")
    whose = "rows" if unit == ROW else f"values of {unit}"
    reason = (
        f"exact means of k-means clusters of the rows; at least {min_size} {whose} in each is not "
        "differential privacy"
    )
    tensors = {name: np.asarray(array, np.float32) for name, array in means.tensors.items()}
    facts = {**info, "size_unit": ROW}
    return Release(_kind(tensors["centroids"]), tensors, facts, NonPrivate(reason=reason))


def clip_rows(vectors: NDArray[Any], clip: float) -> NDArray[np.float64]:
    """Each row (all axes but the first) scaled down to L2 norm `clip` around 0, the public centre.

    A row with NaN or infinity in it becomes 0. That depends on the row alone, as a sensitivity bound needs: a
    server could send weights that overflow on the rows with a certain word, and a sum that then came out as
    NaN, or was refused, would tell that such a row is there.
    """
    flat = np.asarray(vectors, np.float64).reshape(len(vectors), math.prod(vectors.shape[1:]))
    flat = np.where(np.isfinite(flat).all(axis=1, keepdims=True), flat, 0.0)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray((flat * np.minimum(1.0, clip / np.maximum(norms, 1e-30))).reshape(vectors.shape))


def _simplex_rows(predictions: NDArray[Any]) -> NDArray[np.float64]:
    """Each row that lies in the simplex but for rounding, which is taken away, else a uniform one.

    Of the row alone, as in `clip_rows`: what is left of rounding would be more than a unit may add.
    """
    rows = np.asarray(predictions, np.float64)
    with np.errstate(invalid="ignore"):
        inside = np.isfinite(rows).all(axis=1) & (rows >= -1e-6).all(axis=1)
        inside &= np.abs(rows.sum(axis=1) - 1) <= 1e-4
    rows = np.maximum(np.where(inside[:, None], rows, 1.0), 0.0)
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def nearest_seed(pooled: NDArray[Any], seeds: NDArray[Any]) -> NDArray[np.int64]:
    """Index of the closest of q public seeds (q, d) for each pooled vector (n, d)."""
    rows = np.asarray(pooled, np.float64)
    # As in `clip_rows`: what is not finite counts as 0, whatever the other rows are.
    rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
    gaps = np.linalg.norm(rows[:, None, :] - np.asarray(seeds, np.float64)[None], axis=2)
    return np.asarray(gaps.argmin(axis=1), np.int64)


def _sums(values: NDArray[np.float64], assignment: NDArray[np.int64], clusters: int) -> NDArray[np.float64]:
    total = np.zeros((clusters, *values.shape[1:]))
    np.add.at(total, assignment, values)
    return total


@dataclass(frozen=True, repr=False)
class NoisySums:
    """Of every cluster, with its noise: sums (q, d) or (q, S, d), counts (q,) in units, predictions (q, C).

    As private as the release that is made from them, which holds no more.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    predictions: NDArray[np.float64]


def noisy_sums(
    local: LocalResult,
    assignment: NDArray[np.int64],
    clusters: int,
    mechanism: CentroidMechanism,
    noise: Noise,
    units: Sequence[str] = (),
) -> NoisySums:
    """All that `release_noisy_sums` takes from the rows, by one draw of the mechanism; arguments as there."""
    weights = unit_weights(units, len(assignment), mechanism.unit)
    vectors = clip_rows(local.tensors["vectors"], mechanism.clip)
    vectors *= weights.reshape(-1, *[1] * (vectors.ndim - 1))
    sums = _sums(vectors, assignment, clusters)
    counts = np.bincount(assignment, weights, minlength=clusters)
    predictions = _sums(_simplex_rows(local.tensors["predictions"]) * weights[:, None], assignment, clusters)
    draw = noise.draw()
    return NoisySums(
        sums + draw.normal(0, mechanism.clip * mechanism.noise_multiplier, sums.shape),
        counts + draw.normal(0, mechanism.count_multiplier, counts.shape),
        predictions + draw.normal(0, mechanism.prediction_multiplier, predictions.shape),
    )


def release_noisy_sums(
    local: LocalResult,
    assignment: NDArray[np.int64],
    clusters: int,
    mechanism: CentroidMechanism,
    noise: Noise,
    info: Mapping[str, Any],
    units: Sequence[str] = (),
) -> tuple[Release, NDArray[np.int64]]:
    """An (epsilon, delta)-DP centroid release (spec: the end of the FedKC notes).

    local.tensors: vectors (n, d) or (n, S, d) with absent positions zero, predictions (n, C) in the simplex.
    assignment: (n,) index of the nearest of `clusters` *public* seeds, a function of the row alone.
    units: of each row where `mechanism.unit` is not a row, else empty; a row of a unit of m weighs w = 1/m
    (`privacy.unit_weights`), and sizes are then numbers of units.
    For every seed, empty ones too: S_k = sum of w times the clipped vectors + N(0, (clip z_s)^2),
    n_k = sum of w + N(0, z_c^2), Y_k = sum of w times the predictions + N(0, z_p^2). Centroids are
    S_k / max(n_k, min_size); those with n_k < min_size are withheld, a decision on the noisy count alone. An
    embedding-layer matrix is divided by the cluster's noisy count at every position, and its mask is all
    ones, so that lengths stay hidden.

    Rows that are not finite, or predictions outside the simplex, are replaced row by row (see `clip_rows`).

    Returns the release and the seed indices that it holds. Raises SecureflError as `unit_weights` does.
    """
    noisy = noisy_sums(local, assignment, clusters, mechanism, noise, units)
    sums, counts, votes = noisy.sums, noisy.counts, noisy.predictions
    kept = np.flatnonzero(counts >= mechanism.min_size)
    divisor = np.maximum(counts[kept], mechanism.min_size)
    shares = np.maximum(votes[kept], 0) + 1e-6
    tensors: dict[str, NDArray[Any]] = {
        "centroids": (sums[kept] / divisor.reshape(-1, *[1] * (sums.ndim - 1))).astype(np.float32),
        "predictions": (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32),
        "sizes": counts[kept].astype(np.float32),
    }
    if sums.ndim == 3:
        tensors["mask"] = np.ones(tensors["centroids"].shape[:2], np.float32)
    facts = {**info, "size_unit": mechanism.unit}
    return Release(_kind(tensors["centroids"]), tensors, facts, mechanism.claim(noise)), kept


# --- how much noise that is

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)


def centroid_error(mechanism: CentroidMechanism, dimension: int, size: float) -> float:
    """Relative RMS error of a released centroid of `size` units, by the noise alone; in lengths of the clip.

    The centroid is (S + N_s) / D with D = size + N_c, and it is released where D >= min_size. Against the
    mean S / size of length at most clip, whatever its direction,

        E |(S + N_s) / D - S / size|^2 / clip^2
            <= E[ ((D - size)^2 + dimension z_s^2) / D^2  given that D >= min_size ],

    with equality where the rows' vectors have the clip's length and one direction; the expectation is over
    one Gaussian number and integrated numerically. For a large size it is near
    (dimension z_s^2 + z_c^2) / size^2. What clipping takes from longer vectors is left aside, and where the
    mean is shorter than the clip (rows that differ, or texts shorter than max_length under the embedding
    layer) the error is the same and a larger part of it.

    dimension: numbers in a centroid, d or S d. Raises ValueError where dimension or size is below 1.
    """
    if dimension < 1 or not size >= 1:
        raise ValueError("a centroid has at least one number and one unit")
    z = mechanism.count_multiplier
    # Quadrature over the noise on the count, x = N_c / z_c >= low, where its density is above exp(-40) of its
    # largest value.
    low = max((mechanism.min_size - size) / z, -10.0)
    reach = 20.0 if low <= 2 else 40.0 / low
    x = low + reach * (_NODES + 1) / 2
    density = _WEIGHTS * np.exp((max(low, 0.0) ** 2 - x**2) / 2)
    squares = ((z * x) ** 2 + dimension * mechanism.noise_multiplier**2) / (size + z * x) ** 2
    return math.sqrt(float(density @ squares) / float(density.sum()))


# Rows differ, so that their mean is shorter than they are, and they are mostly shorter than the clip, which
# comes from short public texts. With MiniLM the means of k-means clusters had .20 to .58 of the clip on film
# reviews and .14 to .20 on news.
CENTROID_LENGTH = 0.25


def useful_size(mechanism: CentroidMechanism, dimension: int, error: float = 0.5) -> int:
    """The smallest number of units in a cluster whose centroid is off by at most `error` of its own length.

    A centroid's length is known to the silo alone; here it is taken to be `CENTROID_LENGTH` of the clip, so
    that the `centroid_error` is `error` times that. A minimum size below it lets centroids leave that are
    mostly noise. Raises ValueError for an error that is not positive.
    """
    error *= CENTROID_LENGTH
    if not error > 0:
        raise ValueError("only a positive error is ever reached")
    high = max(1, mechanism.min_size)
    while centroid_error(mechanism, dimension, high) > error:
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if centroid_error(mechanism, dimension, middle) > error:
            low = middle
        else:
            high = middle
    return high
