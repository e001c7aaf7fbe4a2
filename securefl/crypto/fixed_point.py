"""Real vectors as integers mod 2^bits, so that masks can be added to them and sums of them are exact.

Clip, scale, round stochastically. The modulus is shared out among the silos beforehand, so a sum cannot wrap
around. Mathematics only: no masks, no messages; the weight it multiplies by never leaves it.

Why a sum cannot overflow. Let L = floor((2^(bits-1) - 1) / silos), the largest magnitude one encoding may
have, and v a coordinate after scaling, a float64 clipped to [-w L, w L] for the weight 0 <= w <= 1.
1. The product w L, rounded to float64, is at most L, since L is a float64 itself and rounding is monotone.
   So |v| <= L, whatever the roundings before the clipping were: the clip comes last.
2. The encoding is q = floor(v + u) with u = (r + 1/2) / 2^16 and r in 0 .. 2^16 - 1, so 0 < u < 1. From
   -L <= v <= L follows -L < v + u < L + 1, hence -L <= q <= L. The computed sum keeps this: it is formed as
   2^16 v + r + 1/2, whose bounds -2^16 L + 1/2 and 2^16 L + 2^16 - 1/2 are float64 numbers (multiples of 1/2
   below 2^48), so monotone rounding cannot leave them; dividing by 2^16 is exact, and q fits 32 bits.
3. A sum of at most `silos` encodings lies in [-silos L, silos L], and silos L <= 2^(bits-1) - 1. The
   residues mod 2^bits of the integers from -2^(bits-1) to 2^(bits-1) - 1 are distinct, so `decode` finds the
   sum itself.

What is lost. |q - v| < 1 and E[q] = v up to 2^-17 (r has 16 bits), so of k silos' sum decoded
|decode(sum of q_i) - sum w_i clip(x_i)| < k resolution, and its standard deviation is at most
sqrt(k) / 2 resolution: the float64 errors of scaling (below 2^-20) are less than what is missing to 1 above.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securefl.crypto.masks import CHUNK, MAX_BITS, MIN_BITS, SEED_BYTES, Keystream, in_parts
from securefl.errors import ConfigError, NonFiniteUpdate, PayloadError, UsageError, WrongShape

# Random bits of one rounding: the probability of rounding up is a multiple of 2^-16, the nearest to exact.
_RANDOM_BITS = 16
_ONE = 1 << _RANDOM_BITS


@dataclass(frozen=True)
class FixedPoint:
    """clip: the largest magnitude of a coordinate; bits: of the modulus, 16..32; silos: summed at most.

    All three are agreed by the cohort. Raises ConfigError for values with which nothing can be encoded.
    """

    clip: float
    bits: int
    silos: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and 1e-30 <= self.clip <= 1e30):
            raise ConfigError("clip: a positive number from 1e-30 to 1e30")
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise ConfigError(f"bits: {MIN_BITS} to {MAX_BITS}")
        if self.silos < 1 or self.limit < 1:
            raise ConfigError(f"silos: from 1 to {2 ** (self.bits - 1) - 1}, which {self.bits} bits can sum")

    @property
    def limit(self) -> int:
        """L of the proof: the largest magnitude of one encoding, at full weight and at the clip."""
        return int(2 ** (self.bits - 1) - 1) // self.silos

    @property
    def resolution(self) -> float:
        """What one step of an encoding is worth, in the values' unit."""
        return self.clip / self.limit

    def encode(
        self,
        values: NDArray[np.float32],
        weight: float,
        rng: np.random.Generator | None = None,
        threads: int = 2,
    ) -> NDArray[np.uint32]:
        """weight * values as integers mod 2^bits.

        values: float32 (d,), clipped to [-clip, clip]; weight: in [0, 1]. Rounding is stochastic from an
        AES-256-CTR keystream under 256 fresh bits of the operating system for every call; rng replaces it in
        tests. Returns uint32 (d,), below 2^bits. Raises NonFiniteUpdate for NaN or infinity, WrongShape for
        another array, UsageError for another weight.
        """
        if values.dtype != np.float32 or values.ndim != 1:
            raise WrongShape("values to be encoded are one row of float32")
        if not 0 <= weight <= 1:
            raise UsageError("weight: from 0 to 1")
        key = secrets.token_bytes(SEED_BYTES) if rng is None else rng.bytes(SEED_BYTES)
        encoded = np.empty(values.size, np.uint32)
        factor = weight * (self.limit / self.clip) * _ONE
        bound = weight * self.limit * _ONE
        top = np.uint32(2**self.bits - 1)

        def work(start: int, stop: int) -> None:
            source = Keystream(key, 2 * start)
            size = min(CHUNK, stop - start)
            zeros, stream = np.zeros(2 * size, np.uint8), np.empty(2 * size, np.uint8)
            drawn, scaled = stream.view("<u2"), np.empty(size, np.float64)
            for begin in range(start, stop, CHUNK):
                chunk = values[begin : min(begin + CHUNK, stop)]
                n = chunk.size
                if not np.isfinite(chunk).all():
                    raise NonFiniteUpdate("the vector to be masked holds NaN or infinity; nothing was masked")
                v, out = scaled[:n], encoded[begin : begin + n]
                np.copyto(v, chunk)
                v *= factor
                np.clip(v, -bound, bound, out=v)
                source.fill(zeros[: 2 * n], stream[: 2 * n])
                v += drawn[:n]
                v += 0.5
                v *= 1 / _ONE
                np.floor(v, out=v)
                # A negative integer's two's complement is its residue mod 2^32.
                np.copyto(out.view(np.int32), v, casting="unsafe")
                if self.bits < MAX_BITS:
                    out &= top

        in_parts(values.size, threads, work)
        return encoded

    def decode(self, total: NDArray[np.uint32]) -> NDArray[np.float64]:
        """The sum behind `total`, which adds at most `silos` encodings mod 2^bits.

        total: uint32 (d,). Returns float64 (d,), see the module for its error. Raises WrongShape for another
        array, PayloadError for a value that is not below 2^bits or that `silos` encodings cannot add up to.
        """
        if total.dtype != np.uint32 or total.ndim != 1:
            raise WrongShape("a sum to be decoded is one row of uint32")
        if total.size and int(total.max()) >> self.bits:
            raise PayloadError(f"a sum of masked vectors has a value that does not fit {self.bits} bits")
        signed = total.astype(np.int64)
        signed[signed >= 2 ** (self.bits - 1)] -= 2**self.bits
        if signed.size and int(np.abs(signed).max()) > self.silos * self.limit:
            raise PayloadError(
                "a sum of masked vectors is larger than its silos can make it; a mask is left in it"
            )
        return np.asarray(signed * self.resolution, np.float64)
