"""Noise for long vectors: distribution, independence, and that nothing but key and place decide it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import kstest, kurtosis, norm

from securefl.errors import UsageError, WrongShape
from securefl.gaussian import SystemStream, _Pairs, add_gaussian

N = 1 << 20


def _noise(key: int, length: int = N, deviation: float = 1.0, threads: int = 2) -> np.ndarray:
    values = torch.zeros(length)
    add_gaussian(values, deviation, key.to_bytes(32, "big"), threads)
    return values.numpy().astype(np.float64)


def test_it_is_box_and_muller_of_the_keystream() -> None:
    """By `cryptography` and numpy in float64, over the border of a chunk; number by number."""
    length, half = (1 << 17) + 5, 1 << 16
    zeros = bytes(2 * 12 * half)
    stream = Cipher(algorithms.AES((7).to_bytes(32, "big")), modes.CTR(bytes(16))).encryptor().update(zeros)
    expected: list[np.ndarray] = []
    for chunk in (stream[: 12 * half], stream[12 * half :]):
        word = np.frombuffer(chunk[: 8 * half], "<u8")
        log = np.log((word.astype(np.longdouble) + 0.5) / 2.0**64).astype(np.float64)
        v = (np.frombuffer(chunk[8 * half :], "<i4") + 0.5) / 2.0**32
        radius = np.sqrt(-2 * log)
        expected += [radius * np.cos(2 * math.pi * v), radius * np.sin(2 * math.pi * v)]
    np.testing.assert_allclose(_noise(7, length), np.concatenate(expected)[:length], atol=4e-6)


def test_it_is_normal() -> None:
    """Kolmogorov-Smirnov at 1e-6; variance and kurtosis within 5 of their standard errors; fixed keys."""
    values = _noise(1)
    assert kstest(values, "norm").pvalue > 1e-6
    assert abs(values.mean()) < 5 / math.sqrt(N)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / N)
    assert abs(kurtosis(values)) < 5 * math.sqrt(24 / N)


@pytest.mark.parametrize("lag", [1, 2, 1 << 16, 1 << 17])
def test_numbers_are_independent(lag: int) -> None:
    """No correlation of numbers or squares at the lags where a fault would show; 5 standard errors."""
    values = _noise(2)
    for row in (values, values**2 - 1):
        correlation = np.corrcoef(row[:-lag], row[lag:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(N - lag)


def test_other_keys_give_other_noise() -> None:
    assert abs(np.corrcoef(_noise(3), _noise(4))[0, 1]) < 5 / math.sqrt(N)


@pytest.mark.parametrize("length", [0, 1, 7, (1 << 17) - 1, (1 << 17) + 1, 5 << 17])
def test_threads_do_not_change_it(length: int) -> None:
    np.testing.assert_array_equal(_noise(5, length, threads=1), _noise(5, length, threads=3))


def test_it_is_added() -> None:
    values = torch.full((9,), 2.0)
    add_gaussian(values, 0.5, bytes(32))
    np.testing.assert_allclose(values.numpy(), 2 + 0.5 * _noise(0, 9), rtol=1e-6)


def test_the_largest_number_is_far_out() -> None:
    """What the smallest u gives, and the probability of what lies beyond it (scipy)."""
    pairs = _Pairs()
    pairs.stream[:] = 0
    largest = float(pairs.numbers(1.0)[0][0])
    assert largest > 9.4
    assert 2 * norm.sf(largest) < 6e-21


def test_what_is_no_row_is_refused() -> None:
    for values in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]):
        with pytest.raises(WrongShape):
            add_gaussian(values, 1.0, bytes(32))
    with pytest.raises(UsageError):
        add_gaussian(torch.zeros(3), 1.0, bytes(16))


def test_the_systems_stream_is_uniform_and_never_the_same() -> None:
    stream = SystemStream()
    one, two = stream.random(100_000), stream.random(100_000)
    assert kstest(one, "uniform").pvalue > 1e-7
    assert 0 <= one.min() <= one.max() < 1
    assert abs(np.corrcoef(one, two)[0, 1]) < 6 / math.sqrt(100_000)
    assert stream.bytes(32) != stream.bytes(32)
    assert stream.random(0).shape == (0,)


def test_no_number_is_without_noise() -> None:
    """The words at the ends: u next to 1, where float32 would say 1 and the noise be 0, u next to 0, and
    angles next to 0. Expected from u's distance to the nearer end; within 2^-53 of 1 from 2^-53.
    """
    pairs = _Pairs()
    half = len(pairs.stream) // 12
    top = 2**64 - 1
    for word, second in (
        (0, 0),
        (2**20, 5),
        (2**63, 0),
        (top, -1),
        (top - 2**20, 2**31 - 1),
        (top - 2**40, 3),
    ):
        pairs.stream[: 8 * half] = np.full(half, word, "<u8").view(np.uint8)
        pairs.stream[8 * half :] = np.full(half, second, "<i4").view(np.uint8)
        near = max((top - word + 0.5) / 2.0**64, 2.0**-53)
        radius = math.sqrt(-2 * (math.log1p(-near) if near < 0.5 else math.log((word + 0.5) / 2.0**64)))
        angle = 2 * math.pi * (second + 0.5) / 2.0**32
        cosines, sines = (one.astype(np.float64) for one in pairs.numbers(3.0))
        np.testing.assert_allclose(cosines[0], 3 * radius * math.cos(angle), rtol=1e-5)
        np.testing.assert_allclose(sines[0], 3 * radius * math.sin(angle), rtol=1e-5, atol=1e-6 * radius)
        assert cosines[0] != 0
        assert sines[0] != 0
