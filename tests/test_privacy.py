"""Calibration against published values, noisy figures by hand and brute force, and what stays secret."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import norm

from securefl.errors import SecureflError
from securefl.privacy import (
    LocalResult,
    MetricMechanism,
    Noise,
    calibrate_metrics,
    decide,
    gaussian_epsilon,
    gaussian_mu,
    noise_source,
    release_counts,
)
from securefl.privacy_terms import MetricPrivacy
from securefl.release import Adjacency, GaussianCounts, PayloadKind, decode_release, encode_release


# Balle and Wang 2018 calibrate the Gaussian mechanism exactly; the values are those of the method's notes.
@pytest.mark.parametrize(("epsilon", "sigma"), [(1, 3.73), (2, 1.99), (4, 1.08), (8, 0.60)])
def test_calibration_gives_the_published_multipliers(epsilon: float, sigma: float) -> None:
    assert 1 / gaussian_mu(epsilon, 1e-5) == pytest.approx(sigma, abs=0.006)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 2.5])
def test_epsilon_satisfies_the_trade_off(mu: float) -> None:
    """delta(epsilon) by numerical integration of the hockey-stick divergence of N(0,1) and N(mu,1)."""
    delta = 1e-5
    epsilon = gaussian_epsilon(mu, delta)
    x = np.linspace(-12, 12 + mu, 2_000_001)
    gap = np.maximum(norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x), 0)
    assert float(np.sum(gap) * (x[1] - x[0])) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 20.0])
def test_mu_and_epsilon_are_inverse(epsilon: float) -> None:
    assert gaussian_epsilon(gaussian_mu(epsilon, 1e-6), 1e-6) == pytest.approx(epsilon, abs=1e-6)


def test_noise_from_the_system_differs_and_says_so_and_a_seed_is_marked() -> None:
    first, second = noise_source(None), noise_source(None)
    assert first.draw().normal() != second.draw().normal()
    assert not first.simulated
    assert noise_source(1).simulated
    assert noise_source(1).draw().normal() == noise_source(1).draw().normal()


def test_a_local_result_shows_and_serialises_nothing() -> None:
    secret = LocalResult({"w": np.array([123.0])}, 5)
    assert "123" not in repr(secret)
    with pytest.raises(SecureflError):
        pickle.dumps(secret)


# --- figures


class _Fixed:
    """A generator whose noise is this number; `scales` keeps what it was asked for."""

    def __init__(self, value: float = 0.0) -> None:
        self._value = value
        self.scales: list[float] = []

    def normal(self, loc: float, scale: float, size: int) -> np.ndarray:
        self.scales.append(scale)
        return np.full(size, self._value)


def _source(generator: _Fixed) -> Noise:
    return Noise(lambda: generator, "fixed", True)  # type: ignore[arg-type,return-value]


def _counts(right: Sequence[int], units: Sequence[str], adjacency: Adjacency = "add-remove") -> np.ndarray:
    """(right answers, rows) of a release without noise."""
    mechanism = MetricMechanism(1.0, 1e-5, "patient_id" if units else "row", adjacency)
    figures = release_counts(right, units, mechanism, _source(_Fixed()), {}).info["metrics"]
    rows = figures["validation_rows"]
    return np.array([figures["validation_accuracy"] * rows, rows])


def _difference(own: Sequence[int], candidate: Sequence[int], units: Sequence[str]) -> float:
    """What `decide` compares with 0 without noise: minus the smallest noise with which it says yes."""
    mechanism = MetricMechanism(1.0, 1e-5, "patient_id" if units else "row")
    low, high = -8.0, 8.0
    while high - low > 1e-2:
        middle = (low + high) / 2
        if decide(own, candidate, units, mechanism, _source(_Fixed(middle)))[0]:
            high = middle
        else:
            low = middle
    return round(-6 * high) / 6  # units of up to three rows have sixths


def test_figures_by_hand() -> None:
    assert _counts((1, 0, 1, 1), ()).tolist() == [3, 4]
    # Patient a has half of her answers right, b and c all.
    assert _counts((1, 0, 1, 1), ("a", "a", "b", "c")).tolist() == pytest.approx([2.5, 3])
    assert _difference((1, 0, 0, 0), (0, 1, 1, 1), ()) == pytest.approx(2)
    assert _difference((1, 0, 0, 0), (0, 0, 1, 1), ("a", "a", "b", "c")) == pytest.approx(1.5)
    assert _counts((), ()).tolist() == [0, 0]


def test_equal_models_are_as_good() -> None:
    mechanism = MetricMechanism(1.0, 1e-5)
    assert decide([1, 0], [0, 1], (), mechanism, _source(_Fixed()))[0]
    assert not decide([1, 0], [0, 0], (), mechanism, _source(_Fixed()))[0]


@pytest.mark.parametrize("by_unit", [False, True])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_no_unit_moves_a_figure_further_than_its_noise_is_made_for(
    adjacency: Adjacency, by_unit: bool
) -> None:
    """Every unit of up to three rows, and every pair of them, beside two others: noise is z of the worst."""
    most = 3 if by_unit else 1
    answers = [one for m in range(1, most + 1) for one in itertools.product((0, 1), repeat=m)]
    both = [
        one
        for m in range(1, most + 1)
        for one in itertools.product(itertools.product((0, 1), repeat=2), repeat=m)
    ]

    def units(count: int) -> tuple[str, ...]:
        return ("b", "c", *["a"] * count) if by_unit else ()

    empty = _counts((1, 0), units(0))
    pairs = {one: _counts((1, 0, *one), units(len(one))) for one in answers}
    gone = _difference((1, 0), (1, 1), units(0))
    gaps = {
        one: _difference((1, 0, *(a for a, _ in one)), (1, 1, *(b for _, b in one)), units(len(one)))
        for one in both
    }
    if adjacency == "add-remove":
        pair = max(float(np.linalg.norm(one - empty)) for one in pairs.values())
        gap = max(abs(one - gone) for one in gaps.values())
    else:
        pair = max(float(np.linalg.norm(a - b)) for a in pairs.values() for b in pairs.values())
        gap = max(abs(a - b) for a in gaps.values() for b in gaps.values())
    unit = "patient_id" if by_unit else "row"
    mechanism, generator = MetricMechanism(1.7, 1e-5, unit, adjacency), _Fixed()
    release_counts((1, 0), units(0), mechanism, _source(generator), {})
    decide((1, 0), (1, 1), units(0), mechanism, _source(generator))
    assert generator.scales == pytest.approx([1.7 * pair, 1.7 * gap], rel=1e-7)


def test_figures_carry_their_claim_and_stay_within_their_range() -> None:
    mechanism = calibrate_metrics(MetricPrivacy(epsilon=2.0), "replace-one", 4, "patient_id")
    assert gaussian_epsilon(mechanism.mu * 2, 1e-5) == pytest.approx(2.0, abs=1e-6)
    assert calibrate_metrics(MetricPrivacy(noise_multiplier=3.0), "add-remove", 9).noise_multiplier == 3.0
    noise, seen = noise_source(0), set()
    for _ in range(40):
        release = release_counts((1, 1, 0), ("a", "b", "b"), mechanism, noise, {"round": 2})
        figures = release.info["metrics"]
        assert 0 <= figures["validation_accuracy"] <= 1
        assert figures["validation_rows"] >= 0
        seen.add(figures["validation_rows"])
    assert len(seen) > 20
    assert release.kind is PayloadKind.METRICS
    claim = decode_release(encode_release(release)).claim
    assert isinstance(claim, GaussianCounts)
    assert claim == decide((1,), (0,), ("a",), mechanism, noise)[1]
    assert (claim.unit, claim.adjacency, claim.simulated) == ("patient_id", "replace-one", True)
    assert claim.epsilon == pytest.approx(gaussian_epsilon(claim.mu, 1e-5))


def test_a_decision_is_as_noisy_as_it_says() -> None:
    """Two answers ahead at sigma 3: yes with probability Phi(2 / 3), within four standard errors."""
    mechanism, noise, trials = MetricMechanism(3.0, 1e-5), noise_source(1), 1500
    yes = sum(decide((0, 0, 1), (1, 1, 1), (), mechanism, noise)[0] for _ in range(trials)) / trials
    expected = float(norm.cdf(2 / 3))
    assert yes == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / trials))
