"""What a CKKS set is worth, and what a run agrees on before it encrypts: security, room, precision.

Numbers only; it makes no key and encrypts nothing (`ckks` does).

No overflow: a vector with slots z is encoded in coefficients of at most max |z| * scale, since the inverse
embedding averages the slots. A sum wraps where a coefficient reaches q / 2, half the first prime, and SEAL's
primes of b bits are the largest that fit, just below 2^b. `Terms` keeps every sum below 2^(b - 2) / scale, so
its coefficients stay below about q / 4; the other quarter is for noise, which is far smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from securefl.errors import UsageError

# Largest log2 q at 128 bits for a ternary secret, by ring degree: the tables of the Homomorphic Encryption
# Security Standard (Albrecht et al. 2018), classical and quantum.
CLASSICAL_128 = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
POST_QUANTUM_128 = {1024: 25, 2048: 51, 4096: 101, 8192: 202, 16384: 411, 32768: 827}
COLLUSION = (
    "Under CKKS all silos hold one group key: any one silo together with the server can read every silo's "
    "vector."
)
CHUNK = 64  # ciphertexts: 131,072 values and 4 MB at degree 4096
MAX_LENGTH = 2**28  # values of a vector
_ERROR_VARIANCE = 10.5 + 1 / 12  # SEAL's centred binomial noise (21 pairs of bits), the encoder's rounding
_SIGMAS = 7.0  # of a normal error: one value in 4e11 lies beyond


def chunk_name(number: int) -> str:
    """The name of a chunk among the arrays of a body."""
    return f"ckks.{number:06d}"


@dataclass(frozen=True)
class Parameters:
    """A symmetric CKKS set for additions only: no multiplication, so no level beyond the first is needed.

    poly_modulus_degree: N; N/2 values fit a ciphertext. coeff_modulus_bits: the first prime, which carries
    the sum, and SEAL's special prime. scale_bits: log2 of the scale. Raises UsageError for a set that is not
    within the classical 128-bit table, or has no room above the scale.
    """

    poly_modulus_degree: int = 4096
    coeff_modulus_bits: tuple[int, int] = (54, 54)
    scale_bits: int = 30

    def __post_init__(self) -> None:
        if self.poly_modulus_degree not in CLASSICAL_128:
            raise UsageError(
                f"a CKKS degree of {self.poly_modulus_degree} is not in the security table; take one of "
                f"{', '.join(map(str, CLASSICAL_128))}"
            )
        if len(self.coeff_modulus_bits) != 2 or not all(20 <= bits <= 60 for bits in self.coeff_modulus_bits):
            raise UsageError("CKKS for additions takes two primes of 20 to 60 bits")
        if not self.is_secure:
            raise UsageError(f"refused: {self.security}; take a larger degree or smaller primes")
        if not 20 <= self.scale_bits <= self.coeff_modulus_bits[0] - 8:
            raise UsageError("a CKKS scale has at least 20 bits, and 8 fewer than the first prime")

    @property
    def modulus_bits(self) -> int:
        return sum(self.coeff_modulus_bits)

    @property
    def is_secure(self) -> bool:
        """Whether it has 128 bits against classical computers."""
        return self.modulus_bits <= CLASSICAL_128[self.poly_modulus_degree]

    @property
    def is_post_quantum(self) -> bool:
        """Whether it has 128 bits against quantum computers."""
        return self.modulus_bits <= POST_QUANTUM_128[self.poly_modulus_degree]

    @property
    def security(self) -> str:
        """One sentence, without its full stop, with both bounds: for errors, `inspect` and reports."""
        degree = self.poly_modulus_degree
        classical = "within" if self.is_secure else "outside"
        quantum = "within" if self.is_post_quantum else "outside"
        return (
            f"CKKS of degree {degree} with a modulus of {self.modulus_bits} bits is {classical} the "
            f"classical 128-bit bound of {CLASSICAL_128[degree]} bits and {quantum} the post-quantum one of "
            f"{POST_QUANTUM_128[degree]} bits"
        )

    @property
    def slots(self) -> int:
        """Values in one ciphertext."""
        return self.poly_modulus_degree // 2

    @property
    def capacity(self) -> float:
        """What silos * max_weight * max(clip, 1) must stay below; 2^22 by default."""
        return float(2.0 ** (self.coeff_modulus_bits[0] - self.scale_bits - 2))

    @property
    def precision(self) -> float:
        """The largest absolute error of one silo's coordinate, at seven standard deviations: below 1e-6.

        The real part of a slot sums N error coefficients, each turned by an angle: variance N/2 * 10.58.
        The sum of n silos has sqrt(n) times as much; a weighted mean has that divided by the total weight.
        """
        return _SIGMAS * math.sqrt(self.slots * _ERROR_VARIANCE) / 2.0**self.scale_bits

    @property
    def max_ciphertext(self) -> int:
        """Bytes that one serialised ciphertext may have: two polynomials in 8-byte words, and its headers."""
        return 16 * self.poly_modulus_degree + 1024

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "degree": self.poly_modulus_degree,
            "primes": list(self.coeff_modulus_bits),
            "scale": self.scale_bits,
        }


DEFAULT = Parameters()
POST_QUANTUM = Parameters(coeff_modulus_bits=(50, 50))


@dataclass(frozen=True)
class Terms:
    """What a run agrees on before anything is encrypted; every function here is given the same.

    length: values of a vector. silos: the most that are added. max_weight: the largest weight of one.
    clip: the largest magnitude of a coordinate before it is weighted. Raises UsageError where the sum could
    overflow: CKKS would not notice.
    """

    length: int
    silos: int
    max_weight: float
    clip: float
    parameters: Parameters = DEFAULT

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH or not 1 <= self.silos <= 2**16:
            raise UsageError(f"CKKS takes vectors of 1 to {MAX_LENGTH} values from 1 to {2**16} silos")
        if not (0 < self.max_weight < math.inf and 0 < self.clip < math.inf):
            raise UsageError("CKKS needs a largest weight and a clip that are positive numbers")
        largest = self.silos * self.max_weight * max(self.clip, 1.0)
        if not largest < self.parameters.capacity:
            raise UsageError(
                f"a CKKS sum could overflow: silos * max_weight * max(clip, 1) is {largest:g} and must stay "
                f"below {self.parameters.capacity:g}; scale the weights down or lower the clip"
            )

    @property
    def ciphertexts(self) -> int:
        """Ciphertexts of a vector and its weight, which is the last value."""
        return -(-(self.length + 1) // self.parameters.slots)

    @property
    def chunks(self) -> int:
        return -(-self.ciphertexts // CHUNK)

    def ciphertexts_of(self, chunk: int) -> int:
        """Ciphertexts in the chunk of this number."""
        return min(CHUNK, self.ciphertexts - chunk * CHUNK)

    @property
    def tolerance(self) -> float:
        """The largest error of a coordinate of the sum (`Parameters.precision` times the root of silos)."""
        return self.parameters.precision * math.sqrt(self.silos)
