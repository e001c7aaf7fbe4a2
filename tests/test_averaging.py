"""The weighted mean against hand-computed numbers and numpy's average, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from securefl.errors import NonFiniteUpdate, ProtocolError, TooFewSilos, WrongShape
from securefl.methods.averaging import weighted_mean


def update(*values: float) -> dict[str, NDArray[np.float32]]:
    return {"w": np.array(values, np.float32), "b": np.array([[values[0]]], np.float32)}


def test_by_hand() -> None:
    # p = 30/40 and 10/40: .75 * 1 + .25 * 5 = 2 and .75 * 2 + .25 * -2 = 1.
    mean = weighted_mean({"one": update(1, 2), "two": update(5, -2)}, {"one": 30, "two": 10})
    assert mean["w"].tolist() == [2.0, 1.0]
    assert mean["b"].tolist() == [[2.0]]
    assert {array.dtype for array in mean.values()} == {np.dtype(np.float32)}


def test_equal_numpy_average_and_any_order_of_arrival() -> None:
    rng = np.random.default_rng(0)
    updates = {f"silo-{i}": {"w": rng.normal(size=(7, 3)).astype(np.float32)} for i in range(5)}
    weights = {name: float(rng.integers(1, 100)) for name in updates}
    mean = weighted_mean(updates, weights)
    stacked = np.stack([updates[name]["w"].astype(np.float64) for name in updates])
    expected = np.average(stacked, axis=0, weights=list(weights.values()))
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-6)
    backwards = weighted_mean(dict(reversed(updates.items())), weights)
    assert backwards["w"].tobytes() == mean["w"].tobytes()


def test_the_sum_is_kept_in_float64() -> None:
    # In float32 each 2**-5 is lost beside 2**19, whose spacing is 2**-4: the plain sum would be 2**19.
    updates = {"a": update(2.0**19), "b": update(2.0**-5), "c": update(2.0**-5)}
    mean = weighted_mean(updates, dict.fromkeys(updates, 1.0))
    assert mean["w"][0] == np.float32((2**19 + 2**-4) / 3)


def test_one_silo_and_a_silo_of_weight_zero() -> None:
    assert weighted_mean({"a": update(3, 4)}, {"a": 7})["w"].tolist() == [3.0, 4.0]
    both = weighted_mean({"a": update(3, 4), "b": update(100, 100)}, {"a": 7, "b": 0})
    assert both["w"].tolist() == [3.0, 4.0]


def test_no_update_is_refused() -> None:
    with pytest.raises(TooFewSilos):
        weighted_mean({}, {})


@pytest.mark.parametrize(
    "weights",
    [{"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.0, "b": 0.0}, {"a": 2.0, "b": -1.0}]
    + [{"a": 1.0, "b": bad} for bad in (float("nan"), float("inf"))]
    + [{"a": 1e308, "b": 1e308}],
)
def test_weights_that_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ProtocolError):
        weighted_mean({"a": update(1, 2), "b": update(3, 4)}, weights)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"w": np.zeros(2, np.float32)}, WrongShape),
        ({**update(1, 2), "extra": np.zeros(1, np.float32)}, WrongShape),
        (update(1, 2, 3), WrongShape),
        ({"w": np.zeros(2), "b": np.zeros((1, 1))}, WrongShape),
        (update(1, float("nan")), NonFiniteUpdate),
        (update(1, float("-inf")), NonFiniteUpdate),
        ({}, WrongShape),
    ],
)
def test_updates_that_are_refused_name_their_silo(
    bad: dict[str, NDArray[np.float32]], error: type[Exception]
) -> None:
    with pytest.raises(error, match="silo-b"):
        weighted_mean({"silo-a": update(1, 2), "silo-b": bad}, {"silo-a": 1, "silo-b": 1})


def test_updates_without_tensors_are_refused() -> None:
    with pytest.raises(WrongShape):
        weighted_mean({"a": {}}, {"a": 1})
