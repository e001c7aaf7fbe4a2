"""What is left of a noised release without its rows: honest noise passes, and no way to have too little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attacks.noise_found import CLAIMED, Left, explain, least, left_over, shape_distance
from securefl.centroid_privacy import clip_rows
from securefl.release import GaussianSums

Q, EACH, WIDTH, CLIP, SIGMA = 12, 5, 32, 2.0, 2.0
CLAIM = GaussianSums(
    epsilon=1.0, delta=1e-5, mu=1.0, clip=CLIP, noise_multiplier=SIGMA / CLIP, count_multiplier=2.0,
    prediction_multiplier=1.0, generator="test", simulated=True,
)  # fmt: skip
GROUPS = [list(range(EACH * c, EACH * (c + 1))) for c in range(Q)]


def rows(norm: float) -> Any:
    drawn = np.random.default_rng(1).standard_normal((Q * EACH, WIDTH))
    return norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def found(vectors: Any, sums: Any, sizes: Any = None) -> list[Left]:
    sizes = np.full(Q, 4.3) if sizes is None else sizes
    return left_over(CLAIM, vectors, None, GROUPS, sums / sizes[:, None], sizes)


def added(vectors: Any, clip: bool = True) -> Any:
    kept = clip_rows(vectors, CLIP) if clip else vectors
    return np.stack([kept[group].sum(0) for group in GROUPS])


def noise(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, SIGMA, (Q, WIDTH))


@pytest.mark.parametrize("norm", [1.0, 2.1, 10.0])
def test_an_honest_release_is_as_claimed(norm: float) -> None:
    for seed in range(200):
        left = explain(found(rows(norm), added(rows(norm)) + noise(seed)))
        assert left is not None
        assert left.how == CLAIMED
        np.testing.assert_allclose(left.noise * SIGMA, noise(seed), atol=1e-9)
        assert not left.too_little
        assert not any(part.too_little for part in least(left.noise))


@pytest.mark.parametrize("norm", [1.0, 10.0])
@pytest.mark.parametrize("scale", [0.0, 0.1, 0.8])
def test_too_little_noise_is_found_clipped_or_not(norm: float, scale: float) -> None:
    for clip in (True, False):
        left = explain(found(rows(norm), added(rows(norm), clip) + scale * noise()))
        assert left is not None
        assert left.ratio / left.sensitivity < 0.9
        assert clip or norm < CLIP or left.how != CLAIMED


def test_plain_means_are_known_whatever_the_size_says() -> None:
    vectors = rows(10.0)
    means = np.stack([vectors[group].mean(0) for group in GROUPS])
    for size in (0.5, 5.0, 900.0):
        sizes = np.full(Q, size)
        left = explain(found(vectors, means * size, sizes))
        assert left is not None
        assert left.how == "plain means"
        assert left.ratio < 1e-3


def test_honest_noise_on_rows_that_were_not_clipped_hides_too_little() -> None:
    left = explain(found(rows(10.0), added(rows(10.0), clip=False) + noise()))
    assert left is not None
    assert left.how == "sums of rows that were not clipped"
    assert left.sensitivity == pytest.approx(5.0)
    assert left.ratio == pytest.approx(1.0, abs=0.1)


def test_other_rows_or_random_numbers_explain_nothing() -> None:
    other = np.roll(rows(10.0), EACH, axis=0)
    assert explain(found(other, added(rows(10.0), clip=False) + noise())) is None
    assert explain(found(rows(1.0), np.random.default_rng(5).normal(0, 5, (Q, WIDTH)))) is None
    # But far too much in one place with none in the others is a mechanism that is not what it claims.
    some = np.where(np.arange(WIDTH) == 0, 20.0, 0.0) * noise()
    left = explain(found(rows(1.0), added(rows(1.0)) + some))
    assert left is not None
    assert any(part.too_little for part in least(left.noise))


def test_noise_in_a_few_places_or_twice_the_same_is_too_little_somewhere() -> None:
    drawn = noise() / SIGMA
    one_number = np.where(np.arange(WIDTH) == 0, drawn * np.sqrt(WIDTH), 0.0)
    one_centroid = np.where(np.arange(Q)[:, None] == 0, drawn * np.sqrt(Q), 0.0)
    again, against = drawn.copy(), drawn.copy()
    again[7], against[7] = drawn[2], -drawn[2]
    for broken, name in (
        (one_number, "number"),
        (one_centroid, "least noised centroid"),
        (again, "two centroids"),
        (against, "two centroids"),
    ):
        assert any(part.too_little and name in part.what for part in least(broken)), name


def test_noise_of_another_law_is_told_by_its_shape() -> None:
    honest = [shape_distance(noise(seed)) for seed in range(50)]
    assert max(honest) < 0.1
    assert shape_distance(np.sign(noise())) > 0.3
    assert shape_distance(np.zeros((3, 4))) == 1.0
