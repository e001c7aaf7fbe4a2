"""Gaussian noise for long vectors: an AES-256-CTR keystream turned into normal numbers.

The noise of a training is as long as the model at every step, so it has to be quick, and whoever could
predict it would see the gradients. Arrays in, arrays out; where the key comes from is `privacy`'s matter.

Method of Box and Muller (1958): with u and v uniform, sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v) are two
independent standard normal numbers. u has 63 bits, so that the largest number possible is 9.4: the
probability that is lost beyond it is 6e-21 a number, where 32 bits would cut at 6.7 and lose a number in
every thousand million million of a large model's delta. v has 32 bits. Results are float32, as the weights
are, so their last bits are those of float32's rounding (Mironov 2012 shows what an attacker makes of that
where a single exact release is at stake; here every number is the sum of many, and is rounded again).
"""

from __future__ import annotations

import math
import secrets
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securefl.crypto.masks import CHUNK, SEED_BYTES, Keystream, in_parts
from securefl.errors import WrongShape

_CHUNK = CHUNK  # numbers at a time: few enough for the cache, and for torch to stay on one thread
_PAIR_BYTES = 12  # 8 for u and 4 for v, which give two numbers


class Stream(Protocol):
    """Random numbers for one training: `numpy.random.Generator` is one, for simulations and tests."""

    def random(self, size: int, /) -> NDArray[np.float64]:
        """(size,) uniform in [0, 1)."""

    def bytes(self, length: int, /) -> bytes:
        """Random bytes, for a key."""


class SystemStream:
    """A `Stream` whose every call has a key of its own, 256 bits from the operating system."""

    name = "aes-256-ctr, keys of 256 bits from the OS"

    def random(self, size: int, /) -> NDArray[np.float64]:
        bits = np.zeros(size, np.uint64)
        Keystream(secrets.token_bytes(SEED_BYTES)).fill(np.zeros(8 * size, np.uint8), bits.view(np.uint8))
        return np.asarray((bits >> np.uint64(11)) * 2.0**-53)

    def bytes(self, length: int, /) -> bytes:
        return secrets.token_bytes(length)


def add_gaussian(values: Tensor, deviation: float, key: bytes, threads: int = 2) -> None:
    """Add independent N(0, deviation^2) to every one of `values`, in place.

    values: (d,) float32, contiguous, on any device. key: 32 bytes, for this call alone. The numbers depend on
    the key and their place, not on `threads`. Raises WrongShape for another tensor, UsageError for a key of
    another length.
    """
    if values.ndim != 1 or values.dtype != torch.float32 or not values.is_contiguous():
        raise WrongShape("noise is added to one contiguous row of float32")
    Keystream(key)  # says at once what is wrong with the key, and not from another thread

    def work(first: int, last: int) -> None:
        zeros = np.zeros(_CHUNK // 2 * _PAIR_BYTES, np.uint8)
        stream = np.empty_like(zeros)
        source = Keystream(key, first // 2 * _PAIR_BYTES)
        for start in range(first, last, _CHUNK):
            source.fill(zeros, stream)
            part = values[start : min(start + _CHUNK, last)]
            part.add_(_normal(stream)[: part.numel()].to(part.device), alpha=deviation)

    in_parts(values.numel(), threads, work)


def _normal(stream: NDArray[np.uint8]) -> Tensor:
    """_CHUNK standard normal numbers of as many bytes as they take."""
    half = _CHUNK // 2
    first = torch.from_numpy(stream[: 8 * half].view("<i8")).bitwise_and(2**63 - 1)
    second = torch.from_numpy(stream[8 * half :].view("<i4"))
    # ln u from the nearer end of (0, 1): float32 has no numbers between 1 - 2^-24 and 1, so that one pair in
    # thirty million would be 0, and no noise. Half a step keeps either number from being exactly 0.
    upper = first > 2**62
    nearer = torch.where(upper, 2**63 - 1 - first, first).to(torch.float32).add_(0.5).mul_(2.0**-63)
    log = torch.where(upper, torch.log1p(-nearer), nearer.log())
    radius = log.mul_(-2).sqrt_()
    angle = second.to(torch.float32).add_(0.5).mul_(math.pi * 2.0**-31)
    out = torch.empty(_CHUNK)
    torch.mul(radius, angle.cos(), out=out[:half])
    torch.mul(radius, angle.sin_(), out=out[half:])
    return out
