"""The centroid release: its form, its calibration under both adjacencies, and how much noise it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from securefl.centroid_privacy import (
    CentroidMechanism,
    calibrate_centroids,
    centroid_error,
    centroid_mu,
    clip_rows,
    nearest_seed,
    release_means,
    release_noisy_sums,
    useful_size,
)
from securefl.errors import SecureflError
from securefl.privacy import LocalResult, Noise, gaussian_epsilon, noise_source
from securefl.privacy_terms import CentroidPrivacy
from securefl.release import (
    Adjacency,
    GaussianSums,
    NonPrivate,
    PayloadKind,
    Release,
    decode_release,
    encode_release,
)

SILENT = Noise(lambda: np.random.default_rng(0), "test", True)


class _Zeros:
    """A generator whose noise is zero, to see what the mechanism computes before it."""

    def normal(self, loc: float, scale: float, size: object) -> np.ndarray:
        return np.zeros(size)  # type: ignore[call-overload,no-any-return]


def test_the_budget_of_a_run_is_spent_over_its_releases() -> None:
    terms = CentroidPrivacy(epsilon=4.0)
    mechanism = calibrate_centroids(terms, 1.0, 5)
    assert gaussian_epsilon(mechanism.mu * math.sqrt(5), 1e-5) == pytest.approx(4.0, abs=1e-6)


def test_a_noise_multiplier_is_that_of_the_sums() -> None:
    assert calibrate_centroids(
        CentroidPrivacy(noise_multiplier=1.5), 2.0, 9
    ).noise_multiplier == pytest.approx(1.5)


@pytest.mark.parametrize("releases", [1, 4])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_budget_is_met_and_a_multiplier_kept_under_either_adjacency(
    adjacency: Adjacency, releases: int
) -> None:
    terms = CentroidPrivacy(epsilon=3.0, delta=1e-6)
    found = calibrate_centroids(terms, 1.0, releases, unit="patient_id", adjacency=adjacency)
    assert gaussian_epsilon(found.mu * math.sqrt(releases), 1e-6) == pytest.approx(3.0, abs=1e-6)
    assert (found.unit, found.adjacency) == ("patient_id", adjacency)
    fixed = calibrate_centroids(CentroidPrivacy(noise_multiplier=1.5), 1.0, releases, adjacency=adjacency)
    assert fixed.noise_multiplier == pytest.approx(1.5)


def test_under_replace_one_exact_counts_would_be_no_cheaper() -> None:
    one = calibrate_centroids(CentroidPrivacy(epsilon=3.0), 1.0, 1, adjacency="replace-one")
    z = one.noise_multiplier, one.prediction_multiplier
    assert centroid_mu(z[0], math.inf, z[1], "replace-one") == pytest.approx(one.mu)
    assert centroid_mu(z[0], 0.99 * one.count_multiplier, z[1], "replace-one") > one.mu


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


class _Recorded:
    """A generator that gives these numbers, in this order, whatever the scale."""

    def __init__(self, *given: Sequence[float]) -> None:
        self._given = [np.array(one) for one in given]

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> np.ndarray:
        return self._given.pop(0).reshape(size)


def test_the_same_noisy_counts_withhold_the_same_whatever_the_rows_are() -> None:
    mechanism = CentroidMechanism(1.0, 1.0, 1.0, 1.0, 1e-5, 3)
    patterns, rng = [], np.random.default_rng(0)
    # True counts (3, 0, 5) and (1, 2, 2) with noise that makes (4, 4, 2) of both.
    for counts, noise in (((3, 0, 5), (1.0, 4.0, -3.0)), ((1, 2, 2), (3.0, 2.0, 0.0))):
        rows = sum(counts)
        local = LocalResult(
            {"vectors": rng.normal(size=(rows, 2)) * 9, "predictions": rng.dirichlet((1, 1), rows)}, rows
        )
        generator = _Recorded(rng.normal(size=6).tolist(), noise, rng.normal(size=6).tolist())
        source = Noise(lambda made=generator: made, "recorded", True)  # type: ignore[misc]
        assignment = np.repeat(np.arange(3), counts)
        release, kept = release_noisy_sums(local, assignment, 3, mechanism, source, {})
        patterns.append((kept.tolist(), release.tensors["sizes"].tolist()))
    assert patterns == [([0, 1], [4.0, 4.0])] * 2


def _by_unit(units: Sequence[str], unit: str = "patient_id") -> Release:
    """Five rows in the clusters 0, 0, 0, 0 and 1, without noise."""
    mechanism = CentroidMechanism(10.0, 1.0, 1.0, 1.0, 1e-5, 1, unit)
    vectors = np.array([[4.0, 0.0], [0.0, 4.0], [0.0, 0.0], [3.0, 3.0], [8.0, 0.0]])
    predictions = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    local = LocalResult({"vectors": vectors, "predictions": predictions}, 5)
    noise = Noise(_Zeros, "none", True)  # type: ignore[arg-type]
    return release_noisy_sums(local, np.array([0, 0, 0, 0, 1]), 2, mechanism, noise, {"round": 2}, units)[0]


def test_rows_of_a_unit_weigh_one_together() -> None:
    # a: rows 0 to 2 at 1/3; b: rows 3 and 4 at 1/2, one in each cluster, of which the second is too small.
    release = _by_unit(("a", "a", "a", "b", "b"))
    assert release.tensors["sizes"].tolist() == [1.5]
    # ((4, 0) + (0, 4)) / 3 + (3, 3) / 2 over 1.5; predictions (1, 1/2) over 1.5.
    np.testing.assert_allclose(release.tensors["centroids"], [[17 / 9, 17 / 9]], rtol=1e-6)
    np.testing.assert_allclose(release.tensors["predictions"], [[2 / 3, 1 / 3]], atol=1e-5)
    assert release.info == {"round": 2, "size_unit": "patient_id"}
    claim = decode_release(encode_release(release)).claim
    assert isinstance(claim, GaussianSums)
    assert (claim.unit, claim.adjacency) == ("patient_id", "add-remove")


@pytest.mark.parametrize(
    ("units", "unit"), [((), "patient_id"), (("a",) * 5, "row"), (("a",) * 4, "patient_id")]
)
def test_units_that_are_not_those_of_the_claim_release_nothing(units: tuple[str, ...], unit: str) -> None:
    with pytest.raises(SecureflError, match="nothing was released"):
        _by_unit(units, unit)


def test_units_that_differ_in_a_trailing_nul_are_two() -> None:
    """Joined, one would change what the other's rows weigh."""
    assert _by_unit(("a", "a", "a\0", "a\0", "b")).tensors["sizes"].tolist() == [2.0, 1.0]


def test_the_embedding_layer_release_hides_lengths() -> None:
    mechanism = CentroidMechanism(5.0, 0.1, 0.1, 0.1, 1e-5, 1)
    vectors = np.zeros((6, 4, 3))
    vectors[:, :2] = 1
    local = LocalResult({"vectors": vectors, "predictions": np.full((6, 2), 0.5)}, 6)
    release, _ = release_noisy_sums(local, np.zeros(6, np.int64), 1, mechanism, noise_source(0), {})
    assert release.kind is PayloadKind.EMBEDDING_CENTROIDS
    assert release.tensors["mask"].tolist() == [[1, 1, 1, 1]]


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
    claim = release_means(means, {}, 3, "patient_id").claim
    assert isinstance(claim, NonPrivate)
    assert "at least 3 values of patient_id in each is not differential privacy" in claim.reason


def _released(mechanism: CentroidMechanism, dimension: int, size: int, clusters: int) -> np.ndarray:
    """Squared errors, in clips, of the centroids that are released of clusters of `size` equal rows."""
    vector = np.full(dimension, mechanism.clip / math.sqrt(dimension))
    rows = size * clusters
    local = LocalResult({"vectors": np.tile(vector, (rows, 1)), "predictions": np.full((rows, 2), 0.5)}, rows)
    assignment = np.repeat(np.arange(clusters), size)
    release, _ = release_noisy_sums(local, assignment, clusters, mechanism, noise_source(5), {})
    found: np.ndarray = ((release.tensors["centroids"] - vector) ** 2).sum(1) / mechanism.clip**2
    return found


@pytest.mark.parametrize(
    ("noise", "count", "dimension", "size", "min_size"),
    [
        (2.0, 3.0, 12, 30, 4),  # the usual case
        (0.3, 6.0, 2, 12, 3),  # the count's noise weighs most, and often withholds
        (1.0, 2.0, 4, 5, 7),  # only what the noise made large enough
    ],
)
def test_the_error_of_a_centroid_is_that_of_real_releases(
    noise: float, count: float, dimension: int, size: int, min_size: int
) -> None:
    mechanism = CentroidMechanism(2.5, noise, count, 1.0, 1e-5, min_size)
    found = _released(mechanism, dimension, size, 6000)
    assert len(found) > 150
    expected = centroid_error(mechanism, dimension, size) ** 2
    assert found.mean() == pytest.approx(expected, abs=4 * found.std() / math.sqrt(len(found)))


def test_the_error_with_exact_counts_is_the_closed_form() -> None:
    mechanism = CentroidMechanism(1.0, 2.0, 1e-9, 1.0, 1e-5, 1)
    assert centroid_error(mechanism, 100, 40) == pytest.approx(2.0 * 10 / 40)
    assert useful_size(mechanism, 100) == 160, "a centroid of a quarter of the clip, half of which is 1/8"
    assert useful_size(mechanism, 100, error=0.499) == 161
    for dimension, size in ((0, 5), (5, 0.5)):
        with pytest.raises(ValueError, match="at least one"):
            centroid_error(mechanism, dimension, size)
    with pytest.raises(ValueError, match="positive"):
        useful_size(mechanism, 100, error=0.0)


@pytest.mark.parametrize("min_size", [1, 10, 400])
def test_the_useful_size_is_the_smallest(min_size: int) -> None:
    mechanism = replace(calibrate_centroids(CentroidPrivacy(epsilon=2.0), 1.0, 1), min_size=min_size)
    size = useful_size(mechanism, 64)
    errors = [centroid_error(mechanism, 64, n) for n in range(1, 2 * size)]
    assert next(n for n, error in enumerate(errors, 1) if error <= 0.125) == size
    assert all(error <= 0.125 for error in errors[size - 1 :])
    if min_size == 10:
        assert math.sqrt(_released(mechanism, 64, size, 3000).mean()) == pytest.approx(0.125, abs=0.008)
