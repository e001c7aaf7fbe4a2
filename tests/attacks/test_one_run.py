"""The one-run audit: published values, closed forms, a naive second implementation, honest and faulty noise.

Everything is seeded; where it were not, each bound would pass the truth with probability at most alpha.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm

from attacks.mechanism import Noising, released_sums
from attacks.one_run import (
    OneRunAudit,
    audit_scores,
    audit_sums,
    epsilon_lower_bound_one_run,
    fair_coins,
    gaussian_mu_lower_bound_one_run,
    planned_guesses,
)
from securefl.centroid_privacy import CentroidMechanism
from securefl.errors import SecureflError, UsageError
from securefl.privacy import Noise, gaussian_epsilon, gaussian_mu, noise_source
from securefl.release import GaussianSums

DELTA, ALPHA = 1e-5, 0.05
Rows = NDArray[np.float64]
Groups = NDArray[np.int64]


@pytest.mark.parametrize(
    ("right", "guesses", "canaries", "delta", "published", "digits"),
    [
        (100, 100, 100, 1e-5, 3.49, 0.005),
        (384, 384, 384, 1e-5, 4.84, 0.005),
        (1000, 1000, 1000, 1e-5, 5.78, 0.005),
        # Steinke, Nasr and Jagielski 2023, appendix D and section 7 (the latter cut, not rounded).
        (75, 100, 1000, 1e-4, 0.673, 0.0005),
        (1439, 1510, 100_000, 1e-5, 2.675, 0.001),
    ],
)
def test_published_bounds_on_epsilon(
    right: int, guesses: int, canaries: int, delta: float, published: float, digits: float
) -> None:
    found = epsilon_lower_bound_one_run(right, guesses, canaries, delta, ALPHA)
    assert found == pytest.approx(published, abs=digits)


@pytest.mark.parametrize(
    ("right", "guesses", "epsilon"), [(60, 80, 0.5), (150, 200, 1.0), (390, 400, 3.0), (99_990, 100_000, 8.0)]
)
def test_randomised_response_attains_the_bound(right: int, guesses: int, epsilon: float) -> None:
    """Its right guesses are Bin(guesses, q), so at alpha = P[Bin >= right] the bound is epsilon (delta 0)."""
    alpha = float(binom.sf(right - 1, guesses, 1 / (1 + math.exp(-epsilon))))
    assert 0 < alpha < 1
    found = epsilon_lower_bound_one_run(right, guesses, 100_000, 1e-15, alpha)
    assert found == pytest.approx(epsilon, abs=1e-3)


def naive_p_value(right: int, guesses: int, canaries: int, delta: float, epsilon: float) -> float:
    """Term by term, over every i."""
    q = 1 / (1 + math.exp(-epsilon))
    a = max(
        sum(math.comb(guesses, j) * q**j * (1 - q) ** (guesses - j) for j in range(right - i, right)) / i
        for i in range(1, right + 1)
    )
    beta = sum(math.comb(guesses, j) * q**j * (1 - q) ** (guesses - j) for j in range(right, guesses + 1))
    return min(1.0, beta + 2 * canaries * delta * a)


@pytest.mark.parametrize(
    ("right", "guesses", "canaries", "delta"),
    [(58, 60, 60, 1e-3), (40, 55, 200, 1e-4), (70, 70, 500, 1e-5), (31, 40, 1000, 1e-6)],
)
def test_the_bound_on_epsilon_is_where_the_naive_p_value_crosses_alpha(
    right: int, guesses: int, canaries: int, delta: float
) -> None:
    found = epsilon_lower_bound_one_run(right, guesses, canaries, delta, ALPHA)
    assert found > 0
    assert naive_p_value(right, guesses, canaries, delta, found) <= ALPHA + 1e-9
    assert naive_p_value(right, guesses, canaries, delta, found + 1e-5) > ALPHA


def naive_mu(right: int, guesses: int, canaries: int, alpha: float) -> float:
    """The recursion for one mu at a time, and bisection."""

    def refuted(mu: float) -> bool:
        r, h = alpha * right / canaries, alpha * (guesses - right) / canaries
        for i in range(right - 1, -1, -1):
            last = h
            h = max(h, float(norm.cdf(norm.ppf(r) - mu)))
            r = min(1.0, r + i / (guesses - i) * (h - last))
        return r + h > guesses / canaries

    low, high = 0.0, 20.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@pytest.mark.parametrize(
    ("right", "guesses", "canaries"),
    [(40, 40, 40), (33, 40, 40), (35, 40, 300), (20, 40, 40), (12, 12, 1000)],
)
def test_the_bound_on_mu_is_the_recursions(right: int, guesses: int, canaries: int) -> None:
    found = gaussian_mu_lower_bound_one_run(right, guesses, canaries, ALPHA)
    assert found == pytest.approx(naive_mu(right, guesses, canaries, ALPHA), abs=1e-3)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("canaries", [20, 200])
def test_the_bound_on_mu_is_never_above_the_truth_at_its_exact_probability(mu: float, canaries: int) -> None:
    """Independent Gaussians all guessed at mu / 2: right is Bin(m, Phi(mu / 2)); alpha is its exact tail."""
    accuracy = float(norm.cdf(mu / 2))
    for quantile in (0.2, 0.6, 0.95, 0.9999):
        right = int(binom.ppf(quantile, canaries, accuracy))
        alpha = float(binom.sf(right - 1, canaries, accuracy))
        assert gaussian_mu_lower_bound_one_run(right, canaries, canaries, alpha) <= mu


def test_bounds_grow_with_right_guesses_and_are_zero_for_half_of_them() -> None:
    bounds = [gaussian_mu_lower_bound_one_run(right, 100, 400) for right in range(0, 101, 10)]
    assert bounds[:6] == [0.0] * 6
    assert bounds == sorted(bounds)
    assert bounds[-1] > 1
    assert epsilon_lower_bound_one_run(50, 100, 400, DELTA) == 0
    assert epsilon_lower_bound_one_run(0, 100, 400, DELTA) == 0


def test_the_largest_audit_has_finite_bounds() -> None:
    """All of 1e5 right: q^1e5 = alpha at least, and a little less for delta."""
    found = epsilon_lower_bound_one_run(100_000, 100_000, 100_000, 1e-9, ALPHA)
    q = ALPHA ** (1 / 100_000)
    assert math.log(q / (1 - q)) - 0.1 < found < math.log(q / (1 - q))
    assert 0 < gaussian_mu_lower_bound_one_run(10_000, 10_000, 100_000, ALPHA) < 5


@cache
def bounds_of(right: int, guesses: int, canaries: int) -> tuple[float, float]:
    return (
        epsilon_lower_bound_one_run(right, guesses, canaries, DELTA),
        gaussian_mu_lower_bound_one_run(right, guesses, canaries),
    )


def played(mu: float, canaries: int, guesses: int, rng: np.random.Generator) -> tuple[float, float]:
    """Both bounds of a true mu-Gaussian-DP game, one score per canary."""
    coins = fair_coins(canaries, rng)
    ranked = coins[np.argsort(rng.standard_normal(canaries) + mu * coins)]
    half = guesses // 2
    return bounds_of(int(ranked[-half:].sum() + (~ranked[:half]).sum()), guesses, canaries)


@pytest.mark.parametrize(("guesses", "canaries"), [(10, 10), (30, 60), (40, 60), (150, 300), (60, 300)])
def test_null_scores_are_called_leaks_with_probability_at_most_alpha(guesses: int, canaries: int) -> None:
    """Exactly: right guesses of scores that know nothing are Bin(guesses, 1/2)."""
    alarms = np.array([[b > 0 for b in bounds_of(right, guesses, canaries)] for right in range(guesses + 1)])
    false = binom.pmf(np.arange(guesses + 1), guesses, 0.5) @ alarms
    assert (false <= ALPHA).all()
    assert (false > 0).all()


def test_null_scores_show_nothing() -> None:
    """200 games; more than 20 alarms have probability below .002 at a rate of alpha."""
    rng = np.random.default_rng(3)
    runs = [played(0.0, 300, 150, rng) for _ in range(200)]
    assert sum(epsilon > 0 for epsilon, _ in runs) <= 20
    assert sum(mu > 0 for _, mu in runs) <= 20


@pytest.mark.parametrize(("mu", "canaries"), [(0.5, 300), (gaussian_mu(4, DELTA), 300), (2.0, 100)])
def test_the_truth_is_rarely_passed(mu: float, canaries: int) -> None:
    """200 true Gaussian games: either bound is above the truth in at most alpha of them, 10."""
    rng = np.random.default_rng(7)
    guesses = planned_guesses(canaries, mu, DELTA)
    runs = [played(mu, canaries, guesses, rng) for _ in range(200)]
    assert sum(found > gaussian_epsilon(mu, DELTA) for found, _ in runs) <= 10
    assert sum(found > mu for _, found in runs) <= 10
    assert np.median([found for _, found in runs]) > 0.25 * mu


def test_guesses_are_counted_by_hand() -> None:
    scores = np.array([5.0, 4, 3, 2, 1, 0, -1, -2, -3, -4])
    coins = np.array([True, False, True, True, False, True, False, False, True, False])
    assert audit_scores(scores, coins, 4, DELTA).right == 2  # 5 right, 4 wrong, -4 right, -3 wrong
    assert audit_scores(scores, coins, 10, DELTA).right == 6
    assert audit_scores(scores, coins, 3, DELTA).right == 2  # an odd one goes to the top
    assert audit_scores(np.zeros(10), coins, 10, DELTA).right == 4  # in the order of the canaries


def test_coins_tossed_again_show_nothing() -> None:
    """The planted leak, and the same scores with the truth shuffled."""
    rng = np.random.default_rng(1)
    coins = fair_coins(400, rng)
    leak = rng.standard_normal(400) + 4 * coins
    assert audit_scores(leak, coins, 200, DELTA).epsilon_lower_bound > 3
    assert audit_scores(leak, fair_coins(400, rng), 200, DELTA).epsilon_lower_bound == 0


def test_the_plan_is_even_within_range_and_able_to_refute() -> None:
    for canaries in (10, 11, 384, 3_840):
        for mu in (0.1, 0.925, 5.0, 100.0):
            guesses = planned_guesses(canaries, mu, DELTA)
            assert guesses % 2 == 0
            assert 2 <= guesses <= canaries
    guesses = planned_guesses(3_840, gaussian_mu(8, DELTA), DELTA)
    assert gaussian_mu_lower_bound_one_run(guesses, guesses, 3_840) > gaussian_mu(8, DELTA)


# --- the sums of the real release

FOUR = 1 / gaussian_mu(4, DELTA)


def audited(
    multiplier: float = FOUR, noising: Noising = released_sums, seed: int = 0, *, noise: Noise | None = None
) -> OneRunAudit:
    return audit_sums(
        multiplier, 2.0, DELTA, 3_840, noise=noise or noise_source(seed), rng=np.random.default_rng(seed),
        noising=noising,
    )  # fmt: skip


def test_an_honest_release_shows_about_half_of_its_claim() -> None:
    """Ten clusters of 384 dimensions; the published figure is 1.82 of 4 at 3,840 canaries."""
    runs = [audited(seed=seed) for seed in range(3)]
    assert runs[0].claim_epsilon == pytest.approx(4, abs=1e-6)
    assert (runs[0].adjacency, runs[0].claim_adjacency) == ("add-remove", "add-remove")
    assert np.median([run.epsilon_lower_bound for run in runs]) == pytest.approx(1.82, abs=0.2)
    assert 2.0 < np.median([run.epsilon_lower_bound_gdp for run in runs]) < 4
    assert not any(run.violates_claim for run in runs)
    assert all(run.mu_ceiling > FOUR**-1 for run in runs)


def half_noise(rows: Rows, groups: Groups, q: int, mechanism: CentroidMechanism, noise: Noise) -> Rows:
    half = replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2)
    return released_sums(rows, groups, q, half, noise)


def no_clip(rows: Rows, groups: Groups, q: int, mechanism: CentroidMechanism, noise: Noise) -> Rows:
    wide = replace(mechanism, clip=mechanism.clip * 1e3, noise_multiplier=mechanism.noise_multiplier / 1e3)
    return released_sums(rows, groups, q, wide, noise)


def test_planted_faults_are_caught() -> None:
    fixed = Noise(lambda: np.random.Generator(np.random.Philox(7)), "the same for every release", True)
    for run in (audited(noising=half_noise), audited(noising=no_clip), audited(noise=fixed)):
        assert run.violates_claim
        assert run.epsilon_lower_bound_gdp > 4.5


def test_few_canaries_in_few_dimensions() -> None:
    run = audit_sums(
        1.0, 1.0, DELTA, 10, noise=noise_source(1), rng=np.random.default_rng(1), dimension=4, guesses=6
    )
    assert (run.canaries, run.guesses) == (10, 6)
    assert run.mu_ceiling < 1  # so small an audit could not refute mu = 1, and says so


# --- what a claim is compared by


def test_a_replace_one_claim_is_compared_by_what_it_says_of_adding() -> None:
    """z_s = z_c = 2, no predictions: adding a row is mu^2 = 1/4 + 1/4, replacing one 4/4."""
    claim = GaussianSums(
        epsilon=gaussian_epsilon(1.0, DELTA), delta=DELTA, mu=1.0, clip=1.0, noise_multiplier=2.0,
        count_multiplier=2.0, prediction_multiplier=1e9, generator="test", simulated=True,
        adjacency="replace-one",
    )  # fmt: skip
    coins = fair_coins(50, np.random.default_rng(0))
    found = audit_scores(coins.astype(float), coins, 50, DELTA, claim=claim)
    assert (found.adjacency, found.claim_adjacency) == ("add-remove", "replace-one")
    assert found.claim_mu == pytest.approx(math.sqrt(0.5))
    assert found.violates_claim == (found.mu_lower_bound > math.sqrt(0.5))
    nothing = audit_scores(coins.astype(float), coins, 50, DELTA)
    assert (nothing.claim_mu, nothing.claim_epsilon, nothing.claim_adjacency) == (None, None, None)
    assert not nothing.violates_claim


# --- bad input


@pytest.mark.parametrize(
    ("right", "guesses", "canaries", "delta", "alpha", "why"),
    [
        (5, 5, 9, DELTA, ALPHA, "canaries"),
        (5, 5, 100_001, DELTA, ALPHA, "canaries"),
        (5, 11, 10, DELTA, ALPHA, "guesses"),
        (0, 0, 10, DELTA, ALPHA, "guesses"),
        (6, 5, 10, DELTA, ALPHA, "can be right"),
        (-1, 5, 10, DELTA, ALPHA, "can be right"),
        (5, 5, 10, 0.0, ALPHA, "delta"),
        (5, 5, 10, 1.0, ALPHA, "delta"),
        (5, 5, 10, math.nan, ALPHA, "delta"),
        (5, 5, 10, DELTA, 0.0, "alpha"),
        (5, 5, 10, DELTA, 1.0, "alpha"),
    ],
)
def test_counts_that_cannot_be_are_refused(
    right: int, guesses: int, canaries: int, delta: float, alpha: float, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        epsilon_lower_bound_one_run(right, guesses, canaries, delta, alpha)
    if why != "delta":
        with pytest.raises(UsageError, match=why):
            gaussian_mu_lower_bound_one_run(right, guesses, canaries, alpha)


def test_scores_and_coins_that_mean_nothing_are_refused() -> None:
    coins = fair_coins(100, np.random.default_rng(0))
    scores = np.arange(100.0)
    for value in (math.nan, math.inf):
        with pytest.raises(SecureflError, match="NaN or infinity"):
            audit_scores(np.where(scores == 3, value, scores), coins, 50, DELTA)
    with pytest.raises(UsageError, match="one score and one"):
        audit_scores(scores, coins[:99], 50, DELTA)
    with pytest.raises(UsageError, match="no fair coin"):
        audit_scores(scores, np.ones(100, bool), 50, DELTA)
    with pytest.raises(UsageError, match="positive mu"):
        planned_guesses(100, 0.0, DELTA)


def test_sums_out_of_range_are_refused() -> None:
    def run(
        multiplier: float = 1.0, clip: float = 1.0, canaries: int = 20, dimension: int = 8
    ) -> OneRunAudit:
        return audit_sums(
            multiplier, clip, DELTA, canaries, noise=noise_source(0), rng=np.random.default_rng(0),
            dimension=dimension,
        )  # fmt: skip

    for wrong, why in (
        ({"multiplier": 0.0}, "noise multiplier"),
        ({"multiplier": math.nan}, "noise multiplier"),
        ({"clip": -1.0}, "clip"),
        ({"canaries": 9}, "canaries"),
        ({"dimension": 1}, "dimension"),
        ({"canaries": 100_000, "dimension": 1024}, "dimension"),
    ):
        with pytest.raises(UsageError, match=why):
            run(**wrong)
    with pytest.raises(SecureflError, match="not finite"):
        audit_sums(
            1.0, 1.0, DELTA, 20, noise=noise_source(0), rng=np.random.default_rng(0), dimension=8,
            noising=lambda rows, groups, q, mechanism, noise: np.full((q, 8), np.nan),
        )  # fmt: skip
