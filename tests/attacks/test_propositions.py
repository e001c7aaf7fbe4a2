"""The propositions against closed forms: scatter, ratios of distances, singular values, the bound itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attacks.adversary import NotEnough
from attacks.propositions import largest_singular_value, proposition_1, proposition_2, proposition_3
from securefl.errors import SecureflError

PLAIN = {
    "width": 400, "k": 4, "sigma": 2.0, "residuals": 0.5, "lipschitz": 3.0, "table_norm": 7.0,
    "measured": 9.0,
}  # fmt: skip


def test_scatter_within_clusters_is_at_most_the_total() -> None:
    vectors, predictions = np.array([[0.0], [2.0], [10.0], [12.0]]), np.zeros((4, 2))
    found = proposition_1("p", vectors, predictions, [[0, 1], [2, 3]])
    assert (found.bound, found.measured, found.holds, found.vacuous) == (104.0, 4.0, True, False)
    assert proposition_1("p", vectors, predictions, [[0, 1, 2, 3]]).vacuous


def test_a_scaled_copy_keeps_its_constant() -> None:
    rng = np.random.default_rng(0)
    pooled = rng.standard_normal((20, 6))
    found = proposition_2("p", 3 * pooled.reshape(20, 2, 3), pooled, rng)
    assert found.bound == pytest.approx(3)
    assert found.measured == pytest.approx(3)
    assert found.holds
    assert not found.vacuous
    assert found.name == "p: rank correlation 1.00, 0.0% of pairs break the constant of the others"


def test_distances_that_have_nothing_to_do_with_each_other_promise_nothing() -> None:
    rng = np.random.default_rng(1)
    outer, inner = rng.standard_normal((60, 4, 50)), rng.standard_normal((60, 3))
    found = proposition_2("p", outer, inner, rng)
    assert found.vacuous
    rho = float(found.name.split("correlation ")[1].split(",")[0])
    assert abs(rho) < 0.15


def test_two_texts_with_one_pooled_vector_refute_it() -> None:
    """The map of a mean: texts that differ by where their tokens stand pool alike."""
    rng = np.random.default_rng(2)
    outer = rng.standard_normal((12, 2, 3))
    outer[1::2] = outer[::2, ::-1]
    broken = 0
    for seed in range(10):
        found = proposition_2("p", outer, outer.mean(1), np.random.default_rng(seed))
        assert math.isfinite(found.bound)
        assert math.isfinite(found.measured)
        broken += not found.holds
    assert broken


def test_bad_vectors_are_refused() -> None:
    rng = np.random.default_rng(3)
    good = rng.standard_normal((20, 6))
    with pytest.raises(NotEnough, match="7 texts"):
        proposition_2("p", good[:7], good[:7], rng)
    for bad in (np.full((20, 6), np.nan), np.ones((20, 6))):
        with pytest.raises(SecureflError, match="would mean nothing"):
            proposition_2("p", good, bad, rng)
        with pytest.raises(SecureflError, match="would mean nothing"):
            proposition_2("p", bad, good, rng)
    with pytest.raises(SecureflError, match="20 embedding-layer outputs for 19"):
        proposition_2("p", good, good[:19], rng)


def test_the_local_constant_is_the_largest_singular_value_of_the_jacobian() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(8, 8, generator=generator) for _ in range(2))

    def function(x: torch.Tensor) -> torch.Tensor:
        mixed = torch.nn.functional.scaled_dot_product_attention(x[None], (x @ first)[None], x[None])[0]
        return torch.tanh(mixed @ second).mean(0)

    at = torch.randn(5, 8, generator=generator)
    jacobian = torch.autograd.functional.jacobian(function, at).reshape(8, 40)
    expected = float(torch.linalg.svdvals(jacobian)[0])
    assert largest_singular_value(function, at, np.random.default_rng(0)) == pytest.approx(expected, rel=2e-3)


def test_a_broken_derivative_is_an_error_and_a_flat_one_is_0() -> None:
    at, rng = torch.zeros(3), np.random.default_rng(0)
    assert largest_singular_value(lambda x: 0 * x * x, at, rng) == 0
    with pytest.raises(SecureflError, match="not finite"):
        largest_singular_value(lambda x: (x - 1).sqrt(), at, rng)


def test_the_bound_is_the_formula() -> None:
    found = proposition_3("p", **PLAIN)
    expected = (math.sqrt((400 - 2 * math.sqrt(400 * 3)) * 0.75) * 2 - 0.5) / 21
    assert found.bound == pytest.approx(expected)
    assert (found.measured, found.holds, found.vacuous) == (9.0, True, False)
    assert proposition_3("p", **PLAIN | {"unreached": 0.25}).bound == pytest.approx(expected - 0.25)
    assert not proposition_3("p", **PLAIN | {"measured": expected / 2}).holds


@pytest.mark.parametrize(
    "change", [{"k": 1}, {"width": 11}, {"residuals": 99.0}, {"unreached": 50.0}, {"sigma": 0.0}]
)
def test_where_it_promises_nothing_it_is_vacuous(change: dict[str, float]) -> None:
    found = proposition_3("p", **PLAIN | change)
    assert found.vacuous
    assert found.holds


@pytest.mark.parametrize(
    "change", [{"sigma": math.nan}, {"lipschitz": 0.0}, {"residuals": -1.0}, {"k": 0}, {"width": 0}]
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(SecureflError, match="is asked of"):
        proposition_3("p", **PLAIN | change)


def test_it_holds_for_a_linear_encoder_and_gaussian_vectors() -> None:
    """f linear, so that L and every minimiser are exact: the distance is never below the bound."""
    rng = np.random.default_rng(4)
    width, tokens, k = 64, 80, 4
    table = rng.standard_normal((tokens, width))
    steepness = 1.0
    broken = 0
    for _ in range(50):
        x = rng.standard_normal((k, width))
        relaxed = x @ np.linalg.pinv(table)  # |V^T z - x| = 0
        mean = x.mean(0) @ np.linalg.pinv(table)
        found = proposition_3(
            "p", width=width, k=k, sigma=1.0, residuals=0.0, lipschitz=steepness,
            table_norm=float(np.linalg.norm(table)), measured=float(np.linalg.norm(relaxed[0] - mean)),
        )  # fmt: skip
        assert not found.vacuous
        broken += not found.holds
    assert broken <= 50 * math.exp(-3) + 1
