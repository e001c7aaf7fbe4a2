"""From a silo's secret results to what may leave: noise, calibration, and the claim.

With `centroid_privacy` the only producer of `Release` from private data. What training gives is a
`LocalResult`, which has no serialiser and prints nothing; what this room returns carries a claim,
`NonPrivate` with its reason or a mechanism with its parameters. No files, no keys, no model code.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr
from scipy.stats import norm

from securefl.errors import ConfigError, SecureflError
from securefl.privacy_terms import MetricPrivacy
from securefl.release import (
    ROW,
    Adjacency,
    Claim,
    DpSgd,
    GaussianCounts,
    NonPrivate,
    PayloadKind,
    Release,
    Tensors,
    canonical_json,
)


@dataclass(frozen=True, repr=False)
class LocalResult:
    """What a silo computed from its rows. Secret: it has no serialiser, and its repr shows nothing.

    tensors: arrays. rows: how many rows they come from, or None where that may not be told and every silo
    weighs the same. claim: of a training under differential privacy.
    """

    tensors: Tensors
    rows: int | None
    claim: DpSgd | None = None

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


@dataclass(frozen=True, repr=False)
class Noise:
    """Where the noise of private releases comes from, and how a claim names it.

    draw: gives the generator for one release; asked anew for each. seed: of a simulation.
    """

    draw: Callable[[], np.random.Generator]
    name: str
    simulated: bool
    seed: int | None = None

    def for_purpose(self, *parts: object) -> Noise:
        """The same source for one purpose: with a seed, what it gives depends on that and the purpose alone,
        and not on what was drawn before, so that a simulation can leave out what it has done already.
        """
        if self.seed is None:
            return self
        digest = hashlib.sha256(canonical_json([str(part) for part in parts])).digest()
        entropy = [self.seed, *np.frombuffer(digest, np.uint32).tolist()]

        def draw() -> np.random.Generator:
            return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

        return Noise(draw, self.name, self.simulated, self.seed)


def noise_source(seed: int | None) -> Noise:
    """Noise from the operating system's entropy, or from a seed, which marks every claim `simulated`.

    Without a seed every release has 256 fresh bits: a process that forks, or a machine that is resumed from a
    snapshot, must not draw the same noise twice, since the difference of two releases would be exact.
    """
    if seed is None:

        def fresh() -> np.random.Generator:
            return np.random.Generator(np.random.Philox(np.random.SeedSequence(secrets.randbits(256))))

        return Noise(fresh, "philox4x64, 128-bit key from the OS", False)
    generator = np.random.Generator(np.random.Philox(seed))
    return Noise(lambda: generator, "philox4x64 from a seed", True, seed)


def release_model(result: LocalResult, info: Mapping[str, Any]) -> Release:
    """The trained weights: under the claim of their training, or with the row count under none."""
    tensors = {name: np.asarray(array, np.float32) for name, array in result.tensors.items()}
    if result.claim is not None:
        return Release(PayloadKind.MODEL, tensors, dict(info), result.claim)
    reason = "weights trained on the rows without differential privacy, and their exact number"
    return Release(PayloadKind.MODEL, tensors, {**info, "rows": result.rows}, NonPrivate(reason=reason))


def release_gradient(result: LocalResult, info: Mapping[str, Any]) -> Release:
    """The exact gradient of one batch, with its number of rows, under no claim."""
    tensors = {name: np.asarray(array, np.float32) for name, array in result.tensors.items()}
    reason = "the exact gradient of one batch of rows, from which their texts can be read back"
    return Release(PayloadKind.GRADIENT, tensors, {**info, "rows": result.rows}, NonPrivate(reason=reason))


def release_average(tensors: Tensors, info: Mapping[str, Any], claim: Claim | None) -> Release:
    """The server's global model, which every silo of the cohort reads.

    claim: of the trainings that it was made from, where they were under differential privacy.
    """
    reason = "made from weights trained without differential privacy"
    return Release(PayloadKind.MODEL, tensors, dict(info), claim or NonPrivate(reason=reason))


def release_metrics(
    metrics: Mapping[str, float | bool], info: Mapping[str, Any], claim: GaussianCounts | None = None
) -> Release:
    """Figures computed with private models or rows: made from noisy counts under `claim`, or else exact."""
    exact = NonPrivate(reason="exact figures of a model trained on the rows")
    return Release(PayloadKind.METRICS, {}, {**info, "metrics": dict(metrics)}, claim or exact)


def check_delta(delta: float, units: int, whose: str, section: str) -> None:
    """Require delta < 1/n: with more, giving away one unit's rows as they are would be within the claim.

    section: of `[privacy]`. Raises ConfigError.
    """
    if not delta * units < 1:
        raise ConfigError(
            f'privacy.{section}.delta: {delta:g} is not below 1 / the number of units of "{whose}"; a claim '
            "with it would allow one of them to be given away whole; lower it"
        )


def unit_weights(units: Sequence[str], rows: int, unit: str) -> NDArray[np.float64]:
    """(rows,) what each row counts for: 1, or 1/m where m rows have its unit, so that a unit counts for 1.

    units: of each row, or empty where every row is one by itself; unit: the claim's. m depends on the unit's
    own rows alone, so a unit that comes or goes moves no other one's part. Whatever one unit then adds to a
    sum is the mean of what its rows would add, which no norm finds longer than the longest of them: every
    sensitivity of a row is that of a unit.

    Raises SecureflError where the units are not those of the claim.
    """
    if len(units) not in (0, rows):
        raise SecureflError(f"{rows} rows have the units of {len(units)}; nothing was released")
    if rows and bool(units) != (unit != ROW):
        raise SecureflError(f'the rows do not have the units of a claim by "{unit}"; nothing was released')
    if not units:
        return np.ones(rows)
    members = Counter(units)  # not numpy's strings, which lose a trailing NUL and would join two units
    return np.array([1 / members[one] for one in units])


@dataclass(frozen=True)
class MetricMechanism:
    """One number, or pair of numbers, of right answers with Gaussian noise.

    noise_multiplier: its standard deviation over what one unit changes at most (L2) under `adjacency`.
    """

    noise_multiplier: float
    delta: float
    unit: str = ROW
    adjacency: Adjacency = "add-remove"

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of one use."""
        return 1 / self.noise_multiplier

    def claim(self, noise: Noise) -> GaussianCounts:
        """The claim of one use."""
        return GaussianCounts(
            epsilon=gaussian_epsilon(self.mu, self.delta),
            delta=self.delta,
            mu=self.mu,
            noise_multiplier=self.noise_multiplier,
            unit=self.unit,
            adjacency=self.adjacency,
            generator=noise.name,
            simulated=noise.simulated,
        )


def calibrate_metrics(
    terms: MetricPrivacy, adjacency: Adjacency, releases: int, unit: str = ROW
) -> MetricMechanism:
    """The mechanism of each of `releases` uses (`release_counts`, `decide`) whose total is `terms`' budget.

    With `epsilon` the budget is that of all together (mu adds in squares); with `noise_multiplier` each use
    has that one.
    """
    if terms.noise_multiplier is not None:
        return MetricMechanism(terms.noise_multiplier, terms.delta, unit, adjacency)
    if terms.epsilon is None:
        raise ConfigError("privacy.metrics: set epsilon or noise_multiplier for private figures")
    mu = gaussian_mu(terms.epsilon, terms.delta) / math.sqrt(max(1, releases))
    return MetricMechanism(1 / mu, terms.delta, unit, adjacency)


# What one unit changes at most (L2). It adds (a, 1) to the pair (right answers, rows), a in [0, 1] the share
# of its rows that is right: sqrt(2) where it comes or goes, and 1 where another takes its place, for the
# second number then stays. To a difference of two models' right answers it adds a number in [-1, 1].
_PAIR: Mapping[Adjacency, float] = {"add-remove": math.sqrt(2), "replace-one": 1.0}
_DIFFERENCE: Mapping[Adjacency, float] = {"add-remove": 1.0, "replace-one": 2.0}


def release_counts(
    right: ArrayLike,
    units: Sequence[str],
    mechanism: MetricMechanism,
    noise: Noise,
    info: Mapping[str, Any],
) -> Release:
    """The number of right answers and that of rows, noised together, and the accuracy made from them.

    right: (n,) of 0 and 1; units: see `unit_weights`. A unit's rows count for 1 together, so by unit both
    numbers are of units: `validation_rows` is noisy, and `validation_accuracy` the mean over units of each
    one's share of right answers, cut to [0, 1].
    """
    answers = _answers(right)
    weights = unit_weights(units, len(answers), mechanism.unit)
    scale = _PAIR[mechanism.adjacency] * mechanism.noise_multiplier
    check_delta(mechanism.delta, _units(units, answers), "this silo's validation", "metrics")
    pair = np.array([weights @ answers, weights.sum()]) + noise.draw().normal(0, scale, 2)
    rows = max(1.0, float(pair[1]))
    accuracy = min(1.0, max(0.0, float(pair[0]) / rows))
    metrics = {"validation_accuracy": accuracy, "validation_rows": max(0.0, float(pair[1]))}
    return release_metrics(metrics, info, mechanism.claim(noise))


def decide(
    own: ArrayLike,
    candidate: ArrayLike,
    units: Sequence[str],
    mechanism: MetricMechanism,
    noise: Noise,
) -> tuple[bool, GaussianCounts]:
    """Whether a candidate model is at least as good as one's own, by their right answers on the same rows.

    own, candidate: (n,) of 0 and 1; units: see `unit_weights`. The noisy difference of the two (weighted)
    numbers of right answers is at least 0; the claim holds for the answer and for all that follows from it.
    """
    gained = _answers(candidate) - _answers(own)
    weights = unit_weights(units, len(gained), mechanism.unit)
    scale = _DIFFERENCE[mechanism.adjacency] * mechanism.noise_multiplier
    check_delta(mechanism.delta, _units(units, gained), "this silo's validation", "metrics")
    noisy = float(weights @ gained) + float(noise.draw().normal(0, scale, 1)[0])
    return noisy >= 0, mechanism.claim(noise)


def _units(units: Sequence[str], rows: NDArray[np.float64]) -> int:
    return len(set(units)) if units else len(rows)


def _answers(right: ArrayLike) -> NDArray[np.float64]:
    # A sensitivity of 1 a row needs 0 and 1, whatever a caller passes.
    return np.asarray(right).astype(bool).astype(np.float64)
