"""Calibration against published values, sensitivities against brute force, and the release's form."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from scipy.stats import norm

from securefl.config import CentroidPrivacy
from securefl.errors import SecureflError
from securefl.privacy import (
    CentroidMechanism,
    LocalResult,
    Noise,
    calibrate_centroids,
    clip_rows,
    gaussian_epsilon,
    gaussian_mu,
    nearest_seed,
    noise_source,
    release_means,
    release_noisy_sums,
)
from securefl.release import GaussianSums, NonPrivate, PayloadKind, decode_release, encode_release

SILENT = Noise(lambda: np.random.default_rng(0), "test", True)


class _Zeros:
    """A generator whose noise is zero, to see what the mechanism computes before it."""

    def normal(self, loc: float, scale: float, size: object) -> np.ndarray:
        return np.zeros(size)  # type: ignore[call-overload,no-any-return]


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


def test_the_budget_of_a_run_is_spent_over_its_releases() -> None:
    terms = CentroidPrivacy(epsilon=4.0)
    mechanism = calibrate_centroids(terms, 1.0, 5)
    assert gaussian_epsilon(mechanism.mu * math.sqrt(5), 1e-5) == pytest.approx(4.0, abs=1e-6)


def test_a_noise_multiplier_is_that_of_the_sums() -> None:
    assert calibrate_centroids(
        CentroidPrivacy(noise_multiplier=1.5), 2.0, 9
    ).noise_multiplier == pytest.approx(1.5)


def _noiseless(vectors: np.ndarray, predictions: np.ndarray, assignment: np.ndarray, q: int) -> np.ndarray:
    """(S/C, count, Y) of the mechanism before noise, flattened and scaled to sensitivity 1 a block."""
    clipped = clip_rows(vectors, 1.0).reshape(len(vectors), -1)
    blocks = np.concatenate([clipped, np.ones((len(vectors), 1)), predictions], axis=1)
    total = np.zeros((q, blocks.shape[1]))
    for row, cluster in zip(blocks, assignment, strict=True):
        total[cluster] += row
    return total


def test_worst_neighbour_is_within_the_claimed_sensitivity() -> None:
    """Brute force: remove each row in turn; each block moves by at most its sensitivity, in one cluster."""
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(12, 4)) * rng.uniform(0.1, 30, (12, 1))
    predictions = rng.dirichlet(np.ones(3) * 0.2, 12)
    assignment = nearest_seed(vectors, rng.normal(size=(3, 4)))
    full = _noiseless(vectors, predictions, assignment, 3)
    for row in range(12):
        rest = np.delete(np.arange(12), row)
        gap = full - _noiseless(vectors[rest], predictions[rest], assignment[rest], 3)
        assert np.linalg.norm(gap[:, :4]) <= 1 + 1e-9
        assert np.abs(gap[:, 4]).sum() == pytest.approx(1)
        assert np.linalg.norm(gap[:, 5:]) <= 1 + 1e-9


def test_without_noise_the_release_is_the_clipped_mean() -> None:
    vectors = np.array([[3.0, 4.0], [0.6, 0.8], [0.0, 1.0], [5.0, 0.0]])
    predictions = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]])
    mechanism = CentroidMechanism(1.0, 1.0, 1.0, 1.0, 1e-5, 2)
    noise = Noise(_Zeros, "none", True)  # type: ignore[arg-type]
    local = LocalResult({"vectors": vectors, "predictions": predictions}, 4)
    release, kept = release_noisy_sums(local, np.array([0, 0, 0, 1]), 3, mechanism, noise, {})
    # Cluster 0: (0.6, 0.8) twice and (0, 1): mean (0.4, 2.6 / 3). Clusters 1 (one row) and 2 are withheld.
    assert kept.tolist() == [0]
    np.testing.assert_allclose(release.tensors["centroids"], [[0.4, 2.6 / 3]], atol=1e-6)
    np.testing.assert_allclose(release.tensors["predictions"], [[0.5, 0.5]], atol=1e-5)
    assert release.tensors["sizes"].tolist() == [3.0]


def test_noise_has_the_stated_scale() -> None:
    mechanism = CentroidMechanism(2.0, 3.0, 1e-9, 1e-9, 1e-5, 1)
    local = LocalResult({"vectors": np.zeros((2, 40_000)), "predictions": np.array([[1.0, 0.0]] * 2)}, 2)
    release, _ = release_noisy_sums(local, np.array([0, 0]), 1, mechanism, noise_source(3), {})
    # Sums have sigma 2 x 3 and the mean of two rows half of that; the standard error of a standard deviation
    # over 40,000 draws is sigma / sqrt(80,000), and 4 of them are allowed.
    assert release.tensors["centroids"].std() == pytest.approx(3.0, abs=4 * 3 / math.sqrt(80_000))


def test_suppression_looks_at_the_noisy_count_alone() -> None:
    """A cluster of 3 under a minimum of 5 is sometimes released, and an empty one too."""
    mechanism = CentroidMechanism(1.0, 1.0, 4.0, 1.0, 1e-5, 5)
    local = LocalResult({"vectors": np.zeros((3, 2)), "predictions": np.full((3, 2), 0.5)}, 3)
    seen = [
        set(release_noisy_sums(local, np.zeros(3, np.int64), 2, mechanism, noise_source(s), {})[1].tolist())
        for s in range(60)
    ]
    assert any(0 in kept for kept in seen)
    assert any(0 not in kept for kept in seen)
    assert any(1 in kept for kept in seen)


def test_the_embedding_layer_release_hides_lengths() -> None:
    mechanism = CentroidMechanism(5.0, 0.1, 0.1, 0.1, 1e-5, 1)
    vectors = np.zeros((6, 4, 3))
    vectors[:, :2] = 1
    local = LocalResult({"vectors": vectors, "predictions": np.full((6, 2), 0.5)}, 6)
    release, _ = release_noisy_sums(local, np.zeros(6, np.int64), 1, mechanism, noise_source(0), {})
    assert release.kind is PayloadKind.EMBEDDING_CENTROIDS
    assert release.tensors["mask"].tolist() == [[1, 1, 1, 1]]


def test_noise_from_the_system_differs_and_says_so_and_a_seed_is_marked() -> None:
    first, second = noise_source(None), noise_source(None)
    assert first.draw().normal() != second.draw().normal()
    assert not first.simulated
    assert noise_source(1).simulated
    assert noise_source(1).draw().normal() == noise_source(1).draw().normal()


def test_the_claim_travels_with_the_bytes() -> None:
    mechanism = calibrate_centroids(CentroidPrivacy(epsilon=2.0), 1.0, 1)
    local = LocalResult({"vectors": np.ones((9, 3)), "predictions": np.full((9, 2), 0.5)}, 9)
    release, _ = release_noisy_sums(local, np.zeros(9, np.int64), 1, mechanism, SILENT, {"round": 2})
    claim = decode_release(encode_release(release)).claim
    assert isinstance(claim, GaussianSums)
    assert claim.epsilon == pytest.approx(2.0, abs=1e-6)
    assert claim.simulated


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_row_that_overflows_does_not_show(bad: float) -> None:
    """A server could send weights that overflow on one word; with or without such a row all stays finite."""
    mechanism = CentroidMechanism(1.0, 1.0, 1.0, 1.0, 1e-5, 1)
    noise = Noise(_Zeros, "none", True)  # type: ignore[arg-type]
    vectors, predictions = np.ones((6, 3)), np.full((6, 2), 0.5)
    vectors[5], predictions[5] = bad, bad
    assignment = nearest_seed(vectors, np.eye(2, 3))
    sums = {}
    for rows in (5, 6):
        local = LocalResult({"vectors": vectors[:rows], "predictions": predictions[:rows]}, rows)
        release, _ = release_noisy_sums(local, np.zeros(rows, np.int64), 1, mechanism, noise, {})
        assert all(np.isfinite(array).all() for array in release.tensors.values())
        sums[rows] = release.tensors["centroids"][0] * release.tensors["sizes"][0]
    assert np.linalg.norm(sums[6] - sums[5]) <= 1 + 1e-6
    assert 0 <= assignment[5] < 2


def test_predictions_outside_the_simplex_count_as_uniform() -> None:
    mechanism = CentroidMechanism(1.0, 1.0, 1.0, 1.0, 1e-5, 1)
    noise = Noise(_Zeros, "none", True)  # type: ignore[arg-type]
    votes = np.array([[0.9, 0.9], [1.0, 0.0], [50.0, -49.0]])
    local = LocalResult({"vectors": np.ones((3, 3)), "predictions": votes}, 3)
    release, _ = release_noisy_sums(local, np.zeros(3, np.int64), 1, mechanism, noise, {})
    np.testing.assert_allclose(release.tensors["predictions"], [[2 / 3, 1 / 3]], atol=1e-5)


def test_no_rows_are_no_rows() -> None:
    assert clip_rows(np.zeros((0, 4, 3)), 1.0).shape == (0, 4, 3)


def test_small_clusters_do_not_slip_out_unnoised() -> None:
    means = LocalResult(
        {"centroids": np.ones((2, 3)), "predictions": np.full((2, 2), 0.5), "sizes": np.array([9.0, 3.0])}, 12
    )
    with pytest.raises(SecureflError, match="minimum size"):
        release_means(means, {}, 4)
    assert isinstance(release_means(means, {}, 3).claim, NonPrivate)


def test_a_local_result_shows_and_serialises_nothing() -> None:
    secret = LocalResult({"w": np.array([123.0])}, 5)
    assert "123" not in repr(secret)
    with pytest.raises(SecureflError):
        pickle.dumps(secret)
