"""Gaussian noise for long vectors: an AES-256-CTR keystream turned into normal numbers.

The noise of a training is as long as the model at every step, so it has to be quick, and whoever could
predict it would see the gradients. Arrays in, arrays out; where the key comes from is `privacy`'s matter.

Method of Box and Muller (1958): with u and v uniform, sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v) are two
independent standard normal numbers. u has 64 bits, so that the largest number possible is above 9.4:
the probability of what lies beyond is below 6e-21 a number. With 32 bits it would be 6.8, and the millions of
numbers of one step would miss what lies beyond that. v has 32 bits. ln u is taken in float64: float32 has no
numbers between 1 - 2^-24 and 1, so that one pair in thirty million would be 0, and no noise. Results are
float32, as the weights are, so their last bits are those of float32's rounding (Mironov 2012 shows what an
attacker makes of that where a single exact release is at stake; here every number is the sum of many, and is
rounded again).
"""

from __future__ import annotations

import math
import secrets
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securefl.crypto.masks import SEED_BYTES, Keystream, in_parts
from securefl.errors import WrongShape

_CHUNK = 1 << 17  # numbers at a time: few enough for the cache, many enough that calls cost nothing
_BELOW_ONE = 1 - 2.0**-53
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
        source, pairs = Keystream(key, first // 2 * _PAIR_BYTES), _Pairs()
        for start in range(first, last, _CHUNK):
            part = values[start : min(start + _CHUNK, last)]
            pairs.add_to(part, source, deviation)

    in_parts(values.numel(), threads, work, _CHUNK)


class _Pairs:
    """Normal numbers of a chunk at a time, in memory that is used again.

    By numpy, which works in the thread that calls it: torch would start threads of its own in each of ours.
    """

    def __init__(self) -> None:
        half = _CHUNK // 2
        self._zeros = np.zeros(half * _PAIR_BYTES, np.uint8)
        self.stream = np.empty_like(self._zeros)
        self._first = self.stream[: 8 * half].view("<u8")
        self._second = self.stream[8 * half :].view("<i4")
        self._log = np.empty(half, np.float64)
        self._radius, self._angle, self._spare = (np.empty(half, np.float32) for _ in range(3))

    def add_to(self, part: Tensor, source: Keystream, deviation: float) -> None:
        """Add the chunk's next numbers times `deviation` to `part`, the first half of them cosines."""
        source.fill(self._zeros, self.stream)
        cosines, sines = self.numbers(deviation)
        half = len(cosines)
        row = part.cpu().numpy()  # of the CPU: the tensor's own memory
        row[:half] += cosines[: row.size]
        if row.size > half:
            row[half:] += sines[: row.size - half]
        if part.device.type != "cpu":
            part.copy_(torch.from_numpy(row))

    def numbers(self, deviation: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of the stream as it is: radius times cosine, and radius times sine."""
        log, radius, angle, spare = self._log, self._radius, self._angle, self._spare
        np.multiply(self._first, 2.0**-64, out=log)
        log += 2.0**-65  # u is never 0, and never 1, the next float64 below which stands for it
        np.minimum(log, _BELOW_ONE, out=log)
        np.log(log, out=log)
        log *= -2 * deviation**2
        np.sqrt(log, out=radius, casting="same_kind")
        np.add(self._second, np.float32(0.5), out=angle, casting="unsafe", dtype=np.float32)
        angle *= np.float32(math.pi * 2.0**-31)
        np.cos(angle, out=spare)
        spare *= radius
        np.sin(angle, out=angle)
        angle *= radius
        return spare, angle
