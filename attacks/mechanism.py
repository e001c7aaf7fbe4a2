"""The auditor's canary (attack 3): how much the noised sums themselves tell about one row, shown by trials.

`centroid_privacy.release_noisy_sums` is run on pairs of neighbouring data sets, and its releases are told
apart by the Neyman-Pearson statistic. What is attacked is the claim of the sums alone. It reads no run, no
files and no models; its rows are made up, so its figures are nobody's secret.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from attacks.bounds import (
    ALPHA,
    Confusion,
    best_threshold,
    confusion,
    epsilon_lower_bound,
    gaussian_epsilon_lower_bound,
    gaussian_mu_lower_bound,
)
from securefl.centroid_privacy import CentroidMechanism, centroid_mu, release_noisy_sums
from securefl.errors import SecureflError, UsageError
from securefl.privacy import LocalResult, Noise, gaussian_epsilon
from securefl.release import Adjacency

# Half of the trials choose the threshold; with fewer than 50 on the other half no bound says anything.
MIN_TRIALS = 100
# Three float64 scores a trial are kept, and copied to be split and sorted: 0.4 GB in all, and 25 s.
MAX_TRIALS = 5_000_000
# Beyond these a released float32 could not hold the sums to a ten-thousandth of their noise.
MULTIPLIERS = (0.01, 1e6)
CLIPS = (1e-6, 1e6)

# One trial is one cluster of a release; this many at once take some 20 MB and 0.02 s.
_CLUSTERS = 16_384
# Several, so that clipping each coordinate instead of the row's L2 norm shows as a longer canary.
_WIDTH = 8
_CANARY_NORM = 10.0  # in clips: each coordinate of the canary is above the clip as well
_OTHERS = 3
# Among some 512 thresholds the one with the best bound at ALPHA is often an extreme one that was lucky; the
# bound that holds for all of them at once (Bonferroni) prefers thresholds whose errors are well known.
_CHOICE = ALPHA / 512

Noising = Callable[
    [NDArray[np.float64], NDArray[np.int64], int, CentroidMechanism, Noise], NDArray[np.float64]
]
"""(rows (n, d), cluster of each row (n,), clusters q, mechanism, noise) -> noised sums (q, d)."""


def released_sums(
    rows: NDArray[np.float64],
    assignment: NDArray[np.int64],
    clusters: int,
    mechanism: CentroidMechanism,
    noise: Noise,
) -> NDArray[np.float64]:
    """The noised sums (clusters, d) as whoever reads the release recovers them: centroid times divisor.

    Exact up to the rounding of the released float32. Raises SecureflError where a centroid was withheld.
    """
    predictions = np.full((len(rows), 2), 0.5)
    local = LocalResult({"vectors": rows, "predictions": predictions}, len(rows))
    release, kept = release_noisy_sums(local, assignment, clusters, mechanism, noise, {})
    if len(kept) != clusters:
        raise SecureflError(
            "the mechanism withheld sums that it had to release; the audit saw no trial there"
        )
    divisor = np.maximum(release.tensors["sizes"].astype(np.float64), mechanism.min_size)
    return np.asarray(release.tensors["centroids"].astype(np.float64) * divisor[:, None])


class MechanismAudit(BaseModel):
    """What the trials show. Fields may be added, none renamed or removed.

    The claim is that of the sums alone: mu = 1 / noise_multiplier under add-remove, twice that under
    replace-one. The lower bounds hold at `confidence`, each by itself: `_cp` (Clopper-Pearson) for every
    mechanism, `_gdp` and `mu_lower_bound` for Gaussian ones. `trials`: on each side. `verdict` compares
    `mu_lower_bound` with `claim_mu`, so a claim that holds is called violated with probability at most
    1 - confidence, whatever the mechanism is. `simulated`: the noise came from a seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["securefl.mechanism-audit/1"] = Field("securefl.mechanism-audit/1", alias="schema")
    claim_epsilon: float
    epsilon_lower_bound_cp: float
    epsilon_lower_bound_gdp: float
    claim_mu: float
    mu_lower_bound: float
    verdict: Literal["none_shown", "violates_claim"]
    adjacency: Adjacency
    delta: float
    noise_multiplier: float
    clip: float
    trials: int
    confidence: float
    generator: str
    simulated: bool
    warning: str = (
        "A lower bound at most the claim proves nothing; one above it shows that the claim is false."
    )

    def to_json(self) -> str:
        """One JSON document."""
        return self.model_dump_json(by_alias=True, indent=2)


@dataclass(frozen=True)
class _Scores:
    """<S - S0, v> / (|v| C) of every trial, (trials,): with the canary, without, and in an earlier release.

    The earlier release is of the rows without the canary, on both sides: it costs nothing of the claim.
    """

    members: NDArray[np.float64]
    others: NDArray[np.float64]
    earlier: NDArray[np.float64]


def audit_mechanism(
    noise_multiplier: float,
    clip: float,
    delta: float,
    trials: int,
    *,
    noise: Noise,
    rng: np.random.Generator,
    adjacency: Adjacency = "add-remove",
    noising: Noising = released_sums,
    progress: Callable[[float, str], None] | None = None,
) -> MechanismAudit:
    """Attack `noising` with and without a canary, `trials` times on each side.

    Each trial is a cluster of three known rows. Under add-remove one side has a fourth, the canary v of norm
    10 * clip; under replace-one the other side has -v in its place. The statistic is <S - S0, v> / |v|, S0
    the known rows' sum, less what an earlier release of the known rows tells about the noise (nothing, where
    noise is drawn anew; its weight is fitted). Weight and threshold come from one random half of the trials,
    errors are counted on the other (Nasr et al. 2023; spec, attack 3).

    noise: of the mechanism. rng: of the auditor, for the made-up rows and the halves.
    progress: called with the number of trials just done and a word.
    Raises UsageError for parameters outside their ranges.
    """
    mechanism = sums_alone(noise_multiplier, clip, delta, adjacency)
    if not MIN_TRIALS <= trials <= MAX_TRIALS:
        raise UsageError(f"the trials must be {MIN_TRIALS:,} to {MAX_TRIALS:,} a side, not {trials:,}")
    scores = _scores(mechanism, trials, noise, rng, noising, progress or (lambda *_: None))
    by_epsilon, by_mu = _held_out(scores, delta, rng)
    # Counts and predictions that nobody sees: their noise has no end.
    claim_mu = centroid_mu(noise_multiplier, math.inf, math.inf, adjacency)
    found = gaussian_mu_lower_bound(by_mu)
    return MechanismAudit(
        claim_epsilon=gaussian_epsilon(claim_mu, delta),
        epsilon_lower_bound_cp=epsilon_lower_bound(by_epsilon, delta),
        epsilon_lower_bound_gdp=gaussian_epsilon_lower_bound(by_mu, delta),
        claim_mu=claim_mu,
        mu_lower_bound=found,
        verdict="violates_claim" if found > claim_mu else "none_shown",
        adjacency=adjacency,
        delta=delta,
        noise_multiplier=noise_multiplier,
        clip=clip,
        trials=trials,
        confidence=1 - ALPHA,
        generator=noise.name,
        simulated=noise.simulated,
    )


def sums_alone(
    noise_multiplier: float, clip: float, delta: float, adjacency: Adjacency = "add-remove"
) -> CentroidMechanism:
    """The mechanism whose sums alone are audited. Raises UsageError for parameters outside their ranges."""
    for name, value, (low, high) in (
        ("noise multiplier", noise_multiplier, MULTIPLIERS),
        ("clip", clip, CLIPS),
    ):
        if not low <= value <= high:  # refuses NaN too
            raise UsageError(f"the {name} must be a number from {low:g} to {high:g}, not {value:g}")
    if not 0 < delta < 1:
        raise UsageError(f"delta must lie between 0 and 1, not be {delta:g}")
    return CentroidMechanism(
        clip=clip,
        noise_multiplier=noise_multiplier,
        # Counts and predictions are of no interest here; this count noise never withholds three rows.
        count_multiplier=0.1,
        prediction_multiplier=1.0,
        delta=delta,
        min_size=1,
        adjacency=adjacency,
    )


def _scores(
    mechanism: CentroidMechanism,
    trials: int,
    noise: Noise,
    rng: np.random.Generator,
    noising: Noising,
    progress: Callable[[float, str], None],
) -> _Scores:
    # As many + as -: noise that is drawn once and added to every coordinate then falls out altogether.
    direction = rng.permutation(np.repeat([1.0, -1.0], _WIDTH // 2)) / math.sqrt(_WIDTH)
    canary = direction[None] * (_CANARY_NORM * mechanism.clip)
    known = rng.standard_normal((_OTHERS, _WIDTH))
    known *= mechanism.clip / 2 / np.linalg.norm(known, axis=1, keepdims=True)
    offset = known.sum(0)
    with_canary = np.concatenate([known, canary])
    without = known if mechanism.adjacency == "add-remove" else np.concatenate([known, -canary])

    def scores(data_set: NDArray[Any], clusters: int) -> NDArray[np.float64]:
        rows = np.tile(data_set, (clusters, 1))
        assignment = np.repeat(np.arange(clusters, dtype=np.int64), len(data_set))
        sums = noising(rows, assignment, clusters, mechanism, noise)
        if not np.isfinite(sums).all():
            raise SecureflError("the mechanism released sums that are not finite; the audit cannot read them")
        return np.asarray((sums - offset) @ direction / mechanism.clip)

    found = _Scores(*(np.empty(trials) for _ in range(3)))
    for start in range(0, trials, _CLUSTERS):
        part = slice(start, min(start + _CLUSTERS, trials))
        clusters = part.stop - start
        found.earlier[part] = scores(known, clusters)
        found.others[part] = scores(without, clusters)
        found.members[part] = scores(with_canary, clusters)
        progress(clusters, "trials")
    return found


def _held_out(scores: _Scores, delta: float, rng: np.random.Generator) -> tuple[Confusion, Confusion]:
    """Errors for the bound on epsilon and for that on mu, each with its own threshold of the other half."""
    order = rng.permutation(len(scores.members))
    fitted, counted = order[: len(order) // 2], order[len(order) // 2 :]
    earlier = scores.earlier[fitted] - scores.earlier[fitted].mean()
    spread = float(earlier @ earlier)
    shared = sum(float(earlier @ side[fitted]) for side in (scores.members, scores.others))
    # About 0 where the noise of two releases is independent, 1 where it is the same and can be subtracted.
    weight = shared / (2 * spread) if spread > 0 else 0.0
    members, others = (side - weight * scores.earlier for side in (scores.members, scores.others))

    def errors(bound: Callable[[Confusion], float]) -> Confusion:
        threshold = best_threshold(members[fitted], others[fitted], bound)
        return confusion(members[counted], others[counted], threshold)

    return (
        errors(lambda half: epsilon_lower_bound(half, delta, _CHOICE)),
        errors(lambda half: gaussian_mu_lower_bound(half, _CHOICE)),
    )
