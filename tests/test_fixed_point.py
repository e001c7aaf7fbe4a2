"""Fixed point: no sum can wrap around, rounding has no bias, the sum is the plain one to the resolution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securefl.crypto.fixed_point import FixedPoint
from securefl.crypto.weighted import encode_weighted, weighted_mean
from securefl.errors import ConfigError, NonFiniteUpdate, PayloadError, UsageError, WrongShape


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sum_of(parts: list[np.ndarray], bits: int) -> np.ndarray:
    total = np.zeros(parts[0].size, np.uint64)
    for part in parts:
        total += part
    return (total % 2**bits).astype(np.uint32)


@settings(max_examples=150, deadline=None)
@given(
    bits=st.integers(16, 32),
    silos=st.integers(1, 60),
    clip=st.floats(1e-3, 1e3),
    data=st.data(),
)
def test_a_sum_of_all_silos_never_wraps_around(
    bits: int, silos: int, clip: float, data: st.DataObject
) -> None:
    """The extremes among it: every silo at full weight and beyond the clip, with one sign."""
    point = FixedPoint(clip, bits, silos)
    extreme = st.sampled_from([clip, -clip, 10 * clip, -10 * clip, 0.0, clip * (1 - 1e-7)])
    values = data.draw(st.lists(st.one_of(extreme, st.floats(-clip, clip)), min_size=silos, max_size=silos))
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 0.5, 1 / 3, 1e-9]), min_size=silos, max_size=silos)
    )
    parts, plain, top = [], 0.0, 0
    for value, weight in zip(values, weights, strict=True):
        array = np.array([value], np.float32)
        parts.append(point.encode(array, weight, rng(len(parts))))
        plain += weight * float(np.clip(array.astype(np.float64), -clip, clip)[0])
        signed = int(parts[-1][0]) - (2**bits if parts[-1][0] >= 2 ** (bits - 1) else 0)
        top = max(top, abs(signed))
    assert top <= (2 ** (bits - 1) - 1) // silos, "the bound of the proof"
    decoded = point.decode(sum_of(parts, bits))
    assert abs(decoded[0] - plain) < silos * point.resolution * (1 + 1e-6)


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_the_worst_sum_is_right_to_the_last_step(bits: int) -> None:
    """All silos at the clip: the largest sum there is, by hand silos * clip."""
    silos = 7
    point = FixedPoint(3.0, bits, silos)
    for sign in (1, -1):
        parts = [point.encode(np.full(5, sign * 3.0, np.float32), 1.0, rng(s)) for s in range(silos)]
        np.testing.assert_allclose(
            point.decode(sum_of(parts, bits)), sign * 21.0, atol=silos * point.resolution
        )


def test_rounding_has_no_bias_and_the_stated_spread() -> None:
    """100,000 roundings of .3 of a step: mean .3 within 5 standard errors (1 in 1.7 million)."""
    point = FixedPoint(1.0, 16, 1)
    n, share = 100_000, 0.3
    value = np.float32((1000 + share) * point.resolution)
    share = float(value) / point.resolution - 1000  # what float32 made of it
    steps = point.encode(np.full(n, value, np.float32), 1.0).astype(np.int64) - 1000
    assert set(np.unique(steps)) == {0, 1}
    assert abs(steps.mean() - share) < 5 * np.sqrt(share * (1 - share) / n) + 2**-17
    assert abs(steps.var() - share * (1 - share)) < 0.01


def test_two_calls_round_apart_and_a_seed_repeats() -> None:
    point = FixedPoint(1.0, 24, 4)
    values = np.linspace(-1, 1, 999, dtype=np.float32)
    assert not np.array_equal(point.encode(values, 0.7), point.encode(values, 0.7))
    assert np.array_equal(point.encode(values, 0.7, rng(1)), point.encode(values, 0.7, rng(1)))
    assert np.array_equal(point.encode(values, 0.7, rng(1), 1), point.encode(values, 0.7, rng(1), 3))


@pytest.mark.parametrize(("bits", "error"), [(32, 1e-6), (24, 3e-4)])
def test_a_weighted_mean_with_hidden_weights_is_the_plain_one(bits: int, error: float) -> None:
    silos, generator = 5, rng(3)
    values_as, weight_as = FixedPoint(1.0, bits, silos), FixedPoint(1.0, bits, silos)
    vectors = [generator.uniform(-1, 1, 1000).astype(np.float32) for _ in range(silos)]
    weights = [0.9, 0.5, 1.0, 0.25, 0.6]
    encoded = [encode_weighted(v, w, values_as, weight_as) for v, w in zip(vectors, weights, strict=True)]
    mean = weighted_mean(
        sum_of([one for one, _ in encoded], bits),
        sum_of([two for _, two in encoded], bits),
        values_as,
        weight_as,
    )
    plain = sum(w * v.astype(np.float64) for v, w in zip(vectors, weights, strict=True)) / sum(weights)
    np.testing.assert_allclose(mean, plain, atol=error)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    values = np.zeros(70_000, np.float32)
    for place in (0, 69_999):
        spoilt = values.copy()
        spoilt[place] = bad
        with pytest.raises(NonFiniteUpdate):
            FixedPoint(1.0, 32, 3).encode(spoilt, 1.0)


def test_what_cannot_be_encoded_is_refused() -> None:
    for clip, bits, silos in [
        (0.0, 32, 3),
        (-1.0, 32, 3),
        (np.nan, 32, 3),
        (np.inf, 32, 3),
        (1.0, 15, 3),
        (1.0, 33, 3),
        (1.0, 32, 0),
        (1.0, 16, 32_768),
    ]:
        with pytest.raises(ConfigError):
            FixedPoint(clip, bits, silos)
    point = FixedPoint(1.0, 24, 3)
    for weight in (-0.1, 1.1, np.nan):
        with pytest.raises(UsageError):
            point.encode(np.zeros(3, np.float32), weight)
    for array in (np.zeros(3), np.zeros((3, 1), np.float32), np.zeros(3, np.int32)):
        with pytest.raises(WrongShape):
            point.encode(array, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="does not fit"):
        point.decode(np.array([2**24], np.uint32))
    with pytest.raises(PayloadError, match="a mask is left"):
        point.decode(np.array([2**23], np.uint32))
    with pytest.raises(WrongShape):
        point.decode(np.zeros(3))  # type: ignore[arg-type]


def test_weights_that_add_up_to_nothing_give_no_mean() -> None:
    point = FixedPoint(1.0, 32, 3)
    values, weight = encode_weighted(np.ones(4, np.float32), 0.0, point, point)
    with pytest.raises(PayloadError, match="add up to nothing"):
        weighted_mean(values, weight, point, point)
