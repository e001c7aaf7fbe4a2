"""From a silo's secret results to what may leave: clipping, noise, calibration, and the claim.

The only producer of `Release` from private data. What training gives is a `LocalResult`, which has no
serialiser and prints nothing; what this room returns carries a claim, `NonPrivate` with its reason or a
mechanism with its parameters. No files, no keys, no model code.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr
from scipy.stats import norm

from securefl.config import CentroidPrivacy
from securefl.errors import ConfigError, SecureflError
from securefl.release import GaussianSums, NonPrivate, PayloadKind, Release, Tensors

# How the budget mu^2 of one centroid release is spent. The sums have the most coordinates to hide and get
# most of it; a count and a mean prediction are few numbers of sensitivity 1 and stay useful with little.
SUM_SHARE, COUNT_SHARE, PREDICTION_SHARE = 0.8, 0.1, 0.1


@dataclass(frozen=True, repr=False)
class LocalResult:
    """What a silo computed from its rows. Secret: it has no serialiser, and its repr shows nothing.

    tensors: arrays; rows: how many rows they come from.
    """

    tensors: Tensors
    rows: int

    def __repr__(self) -> str:
        return "LocalResult(secret)"

    def __reduce__(self) -> NoReturn:
        raise SecureflError("a local result is secret and cannot be serialised; release it through privacy")


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta(epsilon) of a mu-Gaussian-DP mechanism (Dong, Roth and Su 2022, Corollary 2.13)."""
    second = math.exp(min(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)), 700.0))
    return float(norm.cdf(-epsilon / mu + mu / 2)) - second


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which a mu-Gaussian-DP mechanism is (epsilon, delta)-DP; 0 where delta alone does."""
    if mu <= 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
    return float(brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0.0, high, xtol=1e-10))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu whose Gaussian mechanism is (epsilon, delta)-DP; inverse of `gaussian_epsilon`."""
    high = 1.0
    while gaussian_epsilon(high, delta) < epsilon:
        high *= 2
    return float(brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1e-9, high, xtol=1e-10))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The epsilon at which a rho-zCDP mechanism is (epsilon, delta)-DP; at least 0.

    The smallest over alpha > 1 of Canonne, Kamath and Steinke (The Discrete Gaussian for Differential
    Privacy, 2020), Proposition 12; every alpha is valid, so what the search misses is slack, never a lie.
    """
    if rho <= 0:
        return 0.0
    # About where the terms that grow and fall with alpha - 1 are equal; the best is within e^8 of it.
    centre = 0.5 * math.log(-math.log(delta) / rho)

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)
        rest = -math.log(delta) - math.log1p(excess)
        return (1 + excess) * rho + rest / excess + math.log(excess) - math.log1p(excess)

    found = minimize_scalar(bound, bounds=(centre - 8, centre + 8), method="bounded", options={"xatol": 1e-9})
    return max(0.0, float(found.fun))


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The largest rho whose zCDP mechanism is (epsilon, delta)-DP; inverse of `zcdp_epsilon`."""
    high = 1.0
    while zcdp_epsilon(high, delta) < epsilon:
        high *= 2
    return float(brentq(lambda rho: zcdp_epsilon(rho, delta) - epsilon, 1e-14, high, xtol=1e-18, rtol=1e-12))


@dataclass(frozen=True)
class CentroidMechanism:
    """One centroid release as a Gaussian mechanism; multipliers are sigma over sensitivity.

    clip: L2 bound of a row's vector (its whole matrix for the embedding layer). min_size: centroids whose
    noisy count is below it are withheld, and no sum is divided by less.
    """

    clip: float
    noise_multiplier: float
    count_multiplier: float
    prediction_multiplier: float
    delta: float
    min_size: int

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter under add/remove: the three blocks are released together."""
        return math.sqrt(
            self.noise_multiplier**-2 + self.count_multiplier**-2 + self.prediction_multiplier**-2
        )


def calibrate_centroids(terms: CentroidPrivacy, clip: float, releases: int) -> CentroidMechanism:
    """The mechanism of each of `releases` centroid releases whose total is `terms`' budget.

    With `epsilon` the budget is that of all releases together (mu adds in squares); with
    `noise_multiplier` every release has that multiplier on its sums.
    """
    if terms.noise_multiplier is not None:
        mu = 1 / (terms.noise_multiplier * math.sqrt(SUM_SHARE))
    elif terms.epsilon is not None:
        mu = gaussian_mu(terms.epsilon, terms.delta) / math.sqrt(max(1, releases))
    else:
        raise ConfigError("privacy.centroids: set epsilon or noise_multiplier for a private release")
    return CentroidMechanism(
        clip=clip,
        noise_multiplier=1 / (mu * math.sqrt(SUM_SHARE)),
        count_multiplier=1 / (mu * math.sqrt(COUNT_SHARE)),
        prediction_multiplier=1 / (mu * math.sqrt(PREDICTION_SHARE)),
        delta=terms.delta,
        min_size=terms.min_size,
    )


@dataclass(frozen=True, repr=False)
class Noise:
    """Where the noise of private releases comes from, and how a claim names it.

    draw: gives the generator for one release; asked anew for each.
    """

    draw: Callable[[], np.random.Generator]
    name: str
    simulated: bool


def noise_source(seed: int | None) -> Noise:
    """Noise from the operating system's entropy, or from a seed, which marks every claim `simulated`.

    Without a seed every release has 256 fresh bits: a process that forks, or a machine that is resumed from a
    snapshot, must not draw the same noise twice, since the difference of two releases would be exact.
    """
    if seed is None:

        def fresh() -> np.random.Generator:
            return np.random.Generator(np.random.Philox(np.random.SeedSequence(secrets.randbits(256))))

        return Noise(fresh, "philox4x64, 256 bits from the OS", False)
    generator = np.random.Generator(np.random.Philox(seed))
    return Noise(lambda: generator, "philox4x64 from a seed", True)


def release_model(result: LocalResult, info: Mapping[str, Any]) -> Release:
    """The trained weights and the row count, under no privacy claim (training is not DP here)."""
    tensors = {name: np.asarray(array, np.float32) for name, array in result.tensors.items()}
    reason = "weights trained on the rows without differential privacy, and their exact number"
    return Release(PayloadKind.MODEL, tensors, {**info, "rows": result.rows}, NonPrivate(reason=reason))


def release_average(tensors: Tensors, info: Mapping[str, Any]) -> Release:
    """The server's global model, which every silo of the cohort reads."""
    reason = "made from weights trained without differential privacy"
    return Release(PayloadKind.MODEL, tensors, dict(info), NonPrivate(reason=reason))


def release_metrics(metrics: Mapping[str, float | bool], info: Mapping[str, Any]) -> Release:
    """Figures computed with private models or rows; exact, so no claim."""
    claim = NonPrivate(reason="exact figures of a model trained on the rows")
    return Release(PayloadKind.METRICS, {}, {**info, "metrics": dict(metrics)}, claim)


def _kind(vectors: NDArray[Any]) -> PayloadKind:
    return PayloadKind.CENTROIDS if vectors.ndim == 2 else PayloadKind.EMBEDDING_CENTROIDS


def release_means(means: LocalResult, info: Mapping[str, Any], min_size: int) -> Release:
    """KMeans centroids as they are, as the paper shares them. A minimum size is not anonymity.

    means.tensors: centroids (q, d) or (q, S, d), mask (q, S) with the latter, predictions (q, C), sizes (q,).
    Raises SecureflError where a cluster below `min_size` is among them: it should have been withheld.
    """
    sizes = means.tensors["sizes"]
    if sizes.size and sizes.min() < min_size:
        raise SecureflError(f"a cluster below the minimum size of {min_size} was about to be released")
    reason = f"exact means of k-means clusters of the rows; a minimum cluster size of {min_size} is not DP"
    tensors = {name: np.asarray(array, np.float32) for name, array in means.tensors.items()}
    return Release(_kind(tensors["centroids"]), tensors, dict(info), NonPrivate(reason=reason))


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
    """Each row as it is where it lies in the simplex, else uniform: of the row alone, as in `clip_rows`."""
    rows = np.asarray(predictions, np.float64)
    with np.errstate(invalid="ignore"):
        inside = np.isfinite(rows).all(axis=1) & (rows >= -1e-6).all(axis=1)
        inside &= np.abs(rows.sum(axis=1) - 1) <= 1e-4
    return np.where(inside[:, None], rows, 1.0 / rows.shape[1])


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


def release_noisy_sums(
    local: LocalResult,
    assignment: NDArray[np.int64],
    clusters: int,
    mechanism: CentroidMechanism,
    noise: Noise,
    info: Mapping[str, Any],
) -> tuple[Release, NDArray[np.int64]]:
    """An (epsilon, delta)-DP centroid release (spec: the end of the FedKC notes); unit row, add/remove.

    local.tensors: vectors (n, d) or (n, S, d) with absent positions zero, predictions (n, C) in the simplex.
    assignment: (n,) index of the nearest of `clusters` *public* seeds, a function of the row alone.
    For every seed, empty ones too: S_k = sum of clipped vectors + N(0, (clip z_s)^2), n_k = count +
    N(0, z_c^2), Y_k = sum of predictions + N(0, z_p^2). Centroids are S_k / max(n_k, min_size); those with
    n_k < min_size are withheld, a decision on the noisy count alone. An embedding-layer matrix is divided by
    the cluster's noisy count at every position, and its mask is all ones, so that lengths stay hidden.

    Rows that are not finite, or predictions outside the simplex, are replaced row by row (see `clip_rows`).

    Returns the release and the seed indices that it holds.
    """
    vectors = clip_rows(local.tensors["vectors"], mechanism.clip)
    predictions = _simplex_rows(local.tensors["predictions"])
    draw = noise.draw()
    sums = _sums(vectors, assignment, clusters)
    sums = sums + draw.normal(0, mechanism.clip * mechanism.noise_multiplier, sums.shape)
    counts = np.bincount(assignment, minlength=clusters) + draw.normal(
        0, mechanism.count_multiplier, clusters
    )
    votes = _sums(predictions, assignment, clusters)
    votes = votes + draw.normal(0, mechanism.prediction_multiplier, votes.shape)
    kept = np.flatnonzero(counts >= mechanism.min_size)
    divisor = np.maximum(counts[kept], mechanism.min_size)
    shares = np.maximum(votes[kept], 0) + 1e-6
    tensors: dict[str, NDArray[Any]] = {
        "centroids": (sums[kept] / divisor.reshape(-1, *[1] * (sums.ndim - 1))).astype(np.float32),
        "predictions": (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32),
        "sizes": counts[kept].astype(np.float32),
    }
    if vectors.ndim == 3:
        tensors["mask"] = np.ones(tensors["centroids"].shape[:2], np.float32)
    claim = GaussianSums(
        epsilon=gaussian_epsilon(mechanism.mu, mechanism.delta),
        delta=mechanism.delta,
        mu=mechanism.mu,
        clip=mechanism.clip,
        noise_multiplier=mechanism.noise_multiplier,
        count_multiplier=mechanism.count_multiplier,
        prediction_multiplier=mechanism.prediction_multiplier,
        generator=noise.name,
        simulated=noise.simulated,
    )
    return Release(_kind(tensors["centroids"]), tensors, dict(info), claim), kept
