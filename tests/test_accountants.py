"""Accountants against published values, closed forms and each other."""

from __future__ import annotations

import math
import warnings
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securefl import accountants
from securefl.accountants import (
    Sampled,
    calibrate,
    checked_epsilon,
    composed_epsilon,
    prv_epsilon,
    renyi_epsilon,
)
from securefl.errors import BudgetExceeded, ConfigError
from securefl.privacy import gaussian_epsilon


def part(noise: float, rate: float, steps: int) -> Sampled:
    return Sampled(noise_multiplier=noise, sample_rate=rate, steps=steps)


# Published epsilons by Renyi DP. Three hundredths of slack: they are printed with few digits, and the orders
# that were tried differ.
RENYI = [
    # De, Berrada, Hayes, Smith and Balle, Unlocking High-Accuracy Differentially Private Image Classification
    # through Scale (2022), CIFAR-10 without extra data: 50,000 rows, batches of 4,096.
    pytest.param(part(10.0, 4096 / 50000, 875), 1e-5, 1.0, id="De et al., epsilon 1"),
    pytest.param(part(6.0, 4096 / 50000, 1125), 1e-5, 2.0, id="De et al., epsilon 2"),
    pytest.param(part(5.0, 4096 / 50000, 1593), 1e-5, 3.0, id="De et al., epsilon 3"),
    pytest.param(part(4.0, 4096 / 50000, 1687), 1e-5, 4.0, id="De et al., epsilon 4"),
    # The tests of TensorFlow Privacy 0.8, compute_dp_sgd_privacy.
    pytest.param(part(1.3, 150 / 60000, 6000), 1e-5, 0.7242234, id="TensorFlow Privacy, 60,000 rows"),
    pytest.param(part(1.0, 100 / 100000, 30000), 1e-7, 1.4154988, id="TensorFlow Privacy, 100,000 rows"),
]


@pytest.mark.parametrize(("sampled", "delta", "published"), RENYI)
def test_published_values(sampled: Sampled, delta: float, published: float) -> None:
    """The Renyi bound is the published one; the accountants of claims are below it and not far."""
    assert renyi_epsilon(0.0, (sampled,), delta) == pytest.approx(published, abs=0.03)
    for epsilon in (prv_epsilon(sampled, delta), composed_epsilon(0.0, (sampled,), delta)):
        assert 0.75 * published < epsilon < published + 0.03


def test_the_moments_accountant() -> None:
    """Abadi et al. 2016, section 3: sigma 4, q 0.01, 10,000 steps and delta 1e-5 have epsilon 1.26 by it."""
    sampled = part(4.0, 0.01, 10_000)
    assert 0.7 * 1.26 < checked_epsilon(sampled, 1e-5) < 1.26


@pytest.mark.parametrize("delta", [1e-5, 1e-8])
@pytest.mark.parametrize("noise", [0.8, 1.0, 3.730632, 12.0])
def test_without_sampling_it_is_the_gaussian_mechanism(noise: float, delta: float) -> None:
    """Balle and Wang 2018, in closed form; at delta 1e-5 epsilon 1 takes sigma 3.730632."""
    exact = gaussian_epsilon(math.sqrt(3) / noise, delta)
    assert composed_epsilon(0.0, (part(noise, 1.0, 3),), delta) == pytest.approx(exact, rel=5e-3)
    assert checked_epsilon(part(noise, 1.0, 3), delta) == pytest.approx(exact, rel=5e-3, abs=0.02)


def test_one_published_sigma() -> None:
    assert composed_epsilon(0.0, (part(3.730632, 1.0, 1),), 1e-5) == pytest.approx(1.0, abs=2e-3)


def test_the_gaussian_dp_approximation_is_none() -> None:
    """At sigma 0.6 Opacus's gdp accountant says 3.46 and the two that are used 5.84 and 5.83."""
    from opacus.accountants import GaussianAccountant

    sampled = part(0.6, 1000 / 67349, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it can understate, which is what this shows
        gdp = GaussianAccountant()
        gdp.history = [(0.6, 1000 / 67349, 200)]
        assert gdp.get_epsilon(1e-5) == pytest.approx(3.46, abs=0.01)
    assert prv_epsilon(sampled, 1e-5) == pytest.approx(5.84, abs=0.01)
    assert composed_epsilon(0.0, (sampled,), 1e-5) == pytest.approx(5.83, abs=0.01)


def test_gaussian_and_sampled_compose() -> None:
    """Together more than either, less than their sum; where nothing is subsampled the closed form."""
    training, mu = part(1.1572, 1 / 16, 80), 0.5
    alone, release = composed_epsilon(0.0, (training,), 1e-5), gaussian_epsilon(mu, 1e-5)
    both = composed_epsilon(mu, (training,), 1e-5)
    assert max(alone, release) < both < alone + release
    exact = gaussian_epsilon(math.hypot(0.5, 0.25), 1e-5)
    assert composed_epsilon(0.5, (part(4.0, 1.0, 1),), 1e-5) == pytest.approx(exact, rel=5e-3)


def test_trainings_of_one_kind_compose_as_one_longer_training() -> None:
    halves = (part(1.0, 0.05, 40), part(1.0, 0.05, 60))
    assert composed_epsilon(0.0, halves, 1e-5) == pytest.approx(
        composed_epsilon(0.0, (part(1.0, 0.05, 100),), 1e-5), rel=1e-3
    )


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([0.3, 1.0, 3.0, 8.0, 30.0]),
    st.sampled_from([1e-4, 1e-5, 1e-7]),
    st.sampled_from([(1 / 16, 48), (1 / 16, 160), (0.01, 1000), (0.5, 4), (1.0, 3)]),
)
def test_calibration_meets_the_target_and_wastes_little(
    epsilon: float, delta: float, sampling: tuple[float, int]
) -> None:
    """By the library that did not calibrate: at most the target, and above it with three per cent less noise.

    PRV adds its own error of 0.01 to what it finds, so small targets get more noise than they need.
    """
    rate, steps = sampling
    found = calibrate(epsilon, delta, rate, steps)
    assert (
        composed_epsilon(0.0, (part(found.noise_multiplier, rate, steps),), delta) <= found.epsilon <= epsilon
    )
    less = part(found.noise_multiplier * 0.97, rate, steps)
    assert composed_epsilon(0.0, (less,), delta) > epsilon - 0.012


def test_accountants_that_disagree_stop_the_run() -> None:
    sampled = part(1.0, 0.05, 77)
    true = composed_epsilon(0.0, (sampled,), 1e-5)
    for wrong, refused in ((true * 1.03, True), (true * 0.97, True), (true * 1.01, False)):
        with patch.object(accountants, "prv_epsilon", lambda *_, value=wrong: value):
            if refused:
                with pytest.raises(ConfigError, match="disagree"):
                    checked_epsilon(sampled, 1e-5)
            else:
                assert checked_epsilon(sampled, 1e-5) == wrong


def test_noise_that_protects_nothing_is_refused_before_it_is_computed() -> None:
    for sampled in (part(0.1, 1.0, 10_000), part(0.1, 0.5, 10**6), part(0.3, 1 / 16, 10**6)):
        with pytest.raises(BudgetExceeded, match="protects nothing"):
            composed_epsilon(0.0, (sampled,), 1e-5)
        with pytest.raises(BudgetExceeded):
            prv_epsilon(sampled, 1e-5)
    with pytest.raises(ConfigError, match="out of reach"):
        calibrate(0.001, 1e-12, 1.0, 10**6)
