"""Bounds against published values, scipy's own intervals, and repetitions with a known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest, multivariate_normal, norm
from scipy.stats import t as student

from attacks import bounds
from attacks.bounds import Confusion
from securefl.privacy import gaussian_epsilon
from securefl.release import GaussianSums


def claim(sums: float, counts: float, predictions: float, clip: float = 1.0) -> GaussianSums:
    mu = math.sqrt(sums**-2 + counts**-2 + predictions**-2)
    return GaussianSums(
        epsilon=gaussian_epsilon(mu, 1e-5), delta=1e-5, mu=mu, clip=clip, noise_multiplier=sums,
        count_multiplier=counts, prediction_multiplier=predictions, generator="test", simulated=True,
    )  # fmt: skip


@pytest.mark.parametrize(("k", "n"), [(0, 20), (1, 20), (7, 20), (20, 20), (0, 1), (3, 5000)])
def test_clopper_pearson_is_scipys(k: int, n: int) -> None:
    exact = binomtest(k, n).proportion_ci(0.9, method="exact")
    assert bounds.upper_bound(k, n, 0.05) == pytest.approx(exact.high, abs=1e-12)
    assert bounds.lower_bound(k, n, 0.05) == pytest.approx(exact.low, abs=1e-12)


@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 3.73), (2, 1.99), (4, 1.08), (8, 0.60)])
def test_published_noise_of_the_gaussian_mechanism(epsilon: float, sigma: float) -> None:
    assert 1 / bounds.gaussian_mu_at(epsilon, 1e-5) == pytest.approx(sigma, abs=0.005)


def test_epsilon_lower_bound_is_the_formula() -> None:
    errors = Confusion(fp=1, n0=1000, fn=300, n1=1000)
    fpr = binomtest(1, 1000).proportion_ci(0.95, method="exact").high
    fnr = binomtest(300, 1000).proportion_ci(0.95, method="exact").high
    assert bounds.epsilon_lower_bound(errors, 1e-5) == pytest.approx(math.log((1 - fnr - 1e-5) / fpr))
    # The mirrored errors use the other of the two ratios.
    mirrored = Confusion(fp=300, n0=1000, fn=1, n1=1000)
    assert bounds.epsilon_lower_bound(mirrored) == pytest.approx(bounds.epsilon_lower_bound(errors), abs=1e-4)


def test_a_guess_worse_than_chance_shows_nothing() -> None:
    errors = Confusion(fp=15, n0=20, fn=15, n1=20)
    assert bounds.gaussian_mu_lower_bound(errors) == 0
    assert bounds.gaussian_epsilon_lower_bound(errors, 1e-5) == 0
    assert bounds.epsilon_lower_bound(errors) == 0


def by_epsilon(errors: Confusion) -> float:
    return bounds.epsilon_lower_bound(errors, 1e-5)


def by_gaussian(errors: Confusion) -> float:
    return bounds.gaussian_epsilon_lower_bound(errors, 1e-5)


def test_null_scores_show_no_epsilon() -> None:
    rng, alarms = np.random.default_rng(5), 0
    for n in (10, 60):
        for _ in range(100):
            errors = bounds.held_out_errors(
                rng.standard_normal(n), rng.standard_normal(n), rng, bounds.epsilon_lower_bound
            )
            alarms += bounds.epsilon_lower_bound(errors) > 0
    # At most 5 % of 200 may alarm; 20 would be so with probability below .001.
    assert alarms < 20


def test_known_epsilon_is_bounded_from_below_and_not_overstated() -> None:
    rng, mu = np.random.default_rng(6), bounds.gaussian_mu_at(4, 1e-5)
    found, classic = [], []
    for _ in range(12):
        members, others = rng.normal(mu, 1, 100_000), rng.normal(0, 1, 100_000)
        found.append(by_gaussian(bounds.held_out_errors(members, others, rng, by_gaussian)))
        classic.append(by_epsilon(bounds.held_out_errors(members, others, rng, by_epsilon)))
    assert np.median(found) >= 3.5
    assert np.median(classic) == pytest.approx(2.4, abs=0.3)
    assert sum(value > 4 for value in found) <= 2
    assert max(classic) < 4


def test_replacing_a_row_is_brute_forced() -> None:
    """No pair of rows moves the three blocks, in units of their noise, further than the formula; some do."""
    terms = claim(0.9, 1.7, 2.2, clip=3.0)
    rng = np.random.default_rng(0)
    corners = np.eye(2)
    best = 0.0
    for _ in range(4000):
        x, y = (v / np.linalg.norm(v) * 3.0 for v in rng.standard_normal((2, 2)))
        if rng.random() < 0.3:
            y = -x
        p, q = corners[rng.integers(2)], corners[rng.integers(2)]
        for same in (True, False):
            sums = np.linalg.norm(x - y) if same else math.hypot(np.linalg.norm(x), np.linalg.norm(y))
            counts = 0.0 if same else math.sqrt(2)
            votes = np.linalg.norm(p - q) if same else math.sqrt(2)
            best = max(best, math.hypot(sums / (3.0 * 0.9), counts / 1.7, votes / 2.2))
    assert best == pytest.approx(bounds.replace_one_mu(terms), abs=1e-9)


def test_replace_one_matches_the_two_block_case() -> None:
    # Sum and count alone at sigma_s = C, sigma_c = 1: 2.0, not the loose 2.83.
    assert bounds.replace_one_mu(claim(1.0, 1.0, 1e9)) == pytest.approx(2.0)
    assert bounds.replace_one_mu(claim(1.0, 0.5, 1e9)) == pytest.approx(math.sqrt(10))


def test_a_claim_of_either_adjacency_is_converted_to_the_game() -> None:
    """The mechanism is the same whichever one is named: mu^2 = 1/4 + 1/4 + 1, or 4/4 + 2/1."""
    terms = claim(2.0, 2.0, 1.0)
    for adjacency in ("add-remove", "replace-one"):
        named = terms.model_copy(update={"adjacency": adjacency})
        assert bounds.claim_mu(named, "add-remove") == pytest.approx(math.sqrt(1.5))
        assert bounds.replace_one_mu(named) == pytest.approx(math.sqrt(3.0))


def test_caps_are_those_of_two_shifted_gaussians() -> None:
    mu = 1.3
    # AUC = P[X > Y] for X ~ N(mu, 1), Y ~ N(0, 1), integrated by scipy in two dimensions.
    shifted = multivariate_normal(mean=[-mu], cov=[[2.0]]).cdf([0.0])
    assert bounds.auc_cap(mu) == pytest.approx(float(shifted), abs=1e-6)
    assert bounds.mu_of_auc(bounds.auc_cap(mu)) == pytest.approx(mu)
    threshold = norm.isf(0.01)
    assert bounds.tpr_cap(mu, 0.01) == pytest.approx(norm.sf(threshold - mu))
    assert bounds.tpr_cap(0.0, 0.01) == pytest.approx(0.01)


def test_auc_and_its_interval() -> None:
    a, b = np.array([1.0, 3.0, 3.0]), np.array([0.0, 3.0])
    wins = [1 if x > y else 0.5 if x == y else 0 for x in a for y in b]
    assert bounds.auc(a, b) == pytest.approx(np.mean(wins))
    # Perfect separation of 30 pairs: the exact bound of 30 successes, not a width of zero.
    low, high = bounds.auc_interval(np.arange(30) + 100.0, np.arange(40) * 1.0)
    assert low == pytest.approx(0.025 ** (1 / 30))
    assert high == 1


def test_auc_interval_covers() -> None:
    rng, truth, missed = np.random.default_rng(1), bounds.auc_cap(1.0), 0
    for _ in range(300):
        low, high = bounds.auc_interval(rng.normal(1, 1, 40), rng.normal(0, 1, 60))
        missed += not low <= truth <= high
    assert missed < 30


@pytest.mark.parametrize("controls", [20, 150, 1000])
def test_rate_at_one_percent_is_fair_without_information(controls: int) -> None:
    rng, values, alarms = np.random.default_rng(2), [], 0
    for _ in range(400):
        rate = bounds.tpr_at(rng.standard_normal(60), rng.standard_normal(controls))
        values.append(rate.value)
        alarms += rate.low > 0.01
        assert rate.low <= rate.value <= rate.high
    assert np.mean(values) == pytest.approx(0.01, abs=0.003)
    assert alarms <= 20


def test_rate_interval_covers_the_truth() -> None:
    rng, truth, missed = np.random.default_rng(3), bounds.tpr_cap(2.5, 0.01), 0
    for _ in range(100):
        rate = bounds.tpr_at(rng.normal(2.5, 1, 300), rng.normal(0, 1, 1500))
        missed += not rate.low <= truth <= rate.high
    assert missed <= 10


def test_ratio_interval_at_the_ends_is_exact() -> None:
    ones = np.ones(12)
    low, high = bounds.ratio_interval(ones, ones, np.random.default_rng(0))
    exact = binomtest(12, 12).proportion_ci(0.95, method="exact")
    assert (low, high) == (pytest.approx(exact.low), 1.0)


@pytest.mark.parametrize("units", [2, 4, 7])
def test_a_ratio_of_few_units_has_students_interval(units: int) -> None:
    """With equal totals it is the mean of the units' rates, and its interval the textbook one."""
    rng = np.random.default_rng(units)
    rates = rng.uniform(0.3, 0.6, units)
    low, high = bounds.ratio_interval(rates, np.ones(units), rng)
    expected = student.interval(0.95, units - 1, rates.mean(), rates.std(ddof=1) / np.sqrt(units))
    assert (low, high) == (pytest.approx(max(0, expected[0])), pytest.approx(min(1, expected[1])))


def test_one_unit_tells_nothing() -> None:
    one = np.array([0.4])
    assert bounds.ratio_interval(one, np.ones(1), np.random.default_rng(0)) == (0.0, 1.0)
