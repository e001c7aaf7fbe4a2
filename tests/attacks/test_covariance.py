"""Covariances from chunks are scikit-learn's and NumPy's from one piece."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.covariance import LedoitWolf

from attacks.covariance import ledoit_wolf, sample_covariance


@pytest.mark.parametrize(
    ("count", "width", "offset"), [(500, 20, 0.0), (300, 7, 50.0), (30, 60, 3.0), (2, 5, 0.0)]
)
def test_it_is_scikit_learns(count: int, width: int, offset: float) -> None:
    rng = np.random.default_rng(count)
    rows = rng.standard_normal((count, width)) @ rng.standard_normal((width, width)) + offset
    peer = LedoitWolf().fit(rows)
    for size in (1, 7, 64, count):
        parts = (rows[start : start + size] for start in range(0, count, size))
        covariance, shrinkage = ledoit_wolf(parts, rows.mean(0))
        assert shrinkage == pytest.approx(peer.shrinkage_, rel=1e-9)
        np.testing.assert_allclose(
            covariance, peer.covariance_, rtol=1e-9, atol=1e-9 * peer.covariance_.max()
        )


def test_by_hand() -> None:
    """Rows (1, 0), (-1, 0), (0, 2), (0, -2): variances 1/2 and 2, E|x|^4 = 17/2.

    So beta = (17/2 - 17/4) / 8 = 17/32, delta = 17/8 - (5/4)^2 = 9/16, and the shrinkage is 17/18.
    """
    rows = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    covariance, shrinkage = ledoit_wolf([rows[:3], rows[3:]], np.zeros(2))
    assert shrinkage == pytest.approx(17 / 18)
    assert covariance == pytest.approx(np.diag([0.5 / 18 + 17 / 18 * 1.25, 2 / 18 + 17 / 18 * 1.25]))


def test_what_has_no_direction_to_shrink_is_left() -> None:
    """One number a row, or rows that never differ: the covariance is a multiple of the identity already."""
    one, _ = ledoit_wolf([np.array([[1.0], [3.0]])], np.array([2.0]))
    assert one.tolist() == [[1.0]]
    none, shrinkage = ledoit_wolf([np.ones((3, 2)), np.ones((1, 2))], np.ones(2))
    assert (none.tolist(), shrinkage) == ([[0.0, 0.0], [0.0, 0.0]], 0.0)
    with pytest.raises(ValueError, match="no row"):
        ledoit_wolf([], np.zeros(2))


@pytest.mark.parametrize(("count", "width", "offset"), [(500, 20, 0.0), (300, 7, 1e6), (3, 5, 1.0)])
def test_a_plain_one_is_numpys(count: int, width: int, offset: float) -> None:
    rng = np.random.default_rng(count)
    rows = rng.standard_normal((count, width)) @ rng.standard_normal((width, width)) + offset
    expected = np.cov((rows - offset).T)
    for size in (1, 7, 64, count):
        mean, found = sample_covariance(rows[start : start + size] for start in range(0, count, size))
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7 * expected.max())


def test_one_row_has_no_covariance() -> None:
    for rows in (np.zeros((0, 2)), np.ones((1, 2))):
        with pytest.raises(ValueError, match="no covariance of"):
            sample_covariance([rows] if len(rows) else [])
