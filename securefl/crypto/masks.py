"""Masks that hide a vector until the masks of all silos are added: AES-256-CTR keystreams added mod 2^bits.

A stream's key comes from `stream_seed`, once for every run, round, vector and pair of parties, so that no two
vectors ever share a keystream: with a shared one, subtracting two masked vectors would give the difference of
what they hide. The key keeps all 256 bits of its secret. Arithmetic only: no messages, no files, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from securefl.errors import MalformedEnvelope, PayloadError, UsageError, WrongShape

SEED_BYTES = 32
MIN_BITS, MAX_BITS = 16, 32
# Values of one chunk: vector, zeros and keystream of a chunk (256 KiB each) stay together in a core's cache,
# and its steps are long enough that two threads seldom wait for the interpreter's lock.
CHUNK = 65_536
_BLOCK = 16
_LABEL = b"securefl/1 mask stream"


@dataclass(frozen=True)
class Stream:
    """One mask. seed: 32 bytes of `stream_seed`, secret, for one vector only; sign: added or subtracted."""

    seed: bytes = field(repr=False)
    sign: Literal[1, -1]

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES or self.sign not in (1, -1):
            raise UsageError("a mask stream needs a seed of 32 bytes and the sign 1 or -1")


def stream_seed(seed: bytes, run: str, round: int, vector: str, parties: Sequence[str]) -> bytes:
    """The 32-byte key of one vector's stream, HKDF-SHA256 (RFC 5869) of the secret `seed` (32 bytes).

    Bound into it, each with its length before it: the run, the round, the vector's name and the parties'
    fingerprints, one for a self-mask and two for a pair, in ascending order so that both ends derive the
    same. Raises UsageError for a seed of another size, no party, or a party named twice.
    """
    if len(seed) != SEED_BYTES:
        raise UsageError("a mask's secret has 32 bytes")
    if not parties or len(set(parties)) != len(parties):
        raise UsageError("a mask stream names one silo, or two that differ")
    fields = [
        run.encode(),
        str(round).encode(),
        vector.encode(),
        *(name.encode() for name in sorted(parties)),
    ]
    info = _LABEL + b"".join(len(one).to_bytes(4, "big") + one for one in fields)
    return HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=info).derive(seed)


class Keystream:
    """AES-256-CTR's keystream from a byte position on, written into arrays the caller owns.

    key: 32 bytes, for this stream only (the counter starts at zero, so a key never serves twice).
    position: of the first byte, a multiple of 16.
    """

    def __init__(self, key: bytes, position: int = 0) -> None:
        if len(key) != SEED_BYTES or position % _BLOCK:
            raise UsageError("a keystream has a key of 32 bytes and starts at a multiple of 16 bytes")
        counter = (position // _BLOCK).to_bytes(_BLOCK, "big")
        self._update = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update_into

    def fill(self, zeros: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """The next out.size bytes of the stream into `out`; zeros: that many zeros, to encrypt."""
        self._update(zeros.data, out.data)


def in_parts(length: int, threads: int, work: Callable[[int, int], None], chunk: int = CHUNK) -> None:
    """`work(start, stop)` over `length` values cut into `threads` ranges that begin on whole chunks.

    What a range gives must not depend on where the cuts are; the results are then those of one thread.
    """
    if threads < 1:
        raise UsageError("threads: at least one")
    chunks = -(-length // chunk)
    cuts = [min(length, chunks * part // threads * chunk) for part in range(threads)] + [length]
    ranges = [(start, stop) for start, stop in pairwise(cuts) if start < stop]
    if len(ranges) <= 1:
        for start, stop in ranges:
            work(start, stop)
        return
    with ThreadPoolExecutor(len(ranges)) as pool:
        for done in [pool.submit(work, start, stop) for start, stop in ranges]:
            done.result()


def add_masks(vector: NDArray[np.uint32], streams: Sequence[Stream], bits: int, threads: int = 2) -> None:
    """Add every stream to `vector`, in place, mod 2^bits.

    vector: uint32 (d,), contiguous and writable. A stream gives four bytes a value, little-endian, for every
    modulus: 2^bits divides 2^32, so the sums are taken mod 2^32 and reduced once. The result does not depend
    on `threads`; numpy's additions of one run beside the cipher of another. All streams go over a chunk
    while it is in cache. Raises WrongShape for another array, UsageError for bits outside 16..32 or a seed
    given twice.
    """
    _check_bits(bits)
    if vector.dtype != np.uint32 or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise WrongShape("a vector to be masked is one contiguous row of uint32")
    if len({stream.seed for stream in streams}) != len(streams):
        raise UsageError("two mask streams of one vector have the same seed; each needs its own")
    top = np.uint32((1 << bits) - 1)

    def work(start: int, stop: int) -> None:
        sources = [
            (Keystream(one.seed, 4 * start), np.add if one.sign == 1 else np.subtract) for one in streams
        ]
        size = min(CHUNK, stop - start)
        zeros, stream = np.zeros(4 * size, np.uint8), np.empty(4 * size, np.uint8)
        words = stream.view("<u4")
        for begin in range(start, stop, CHUNK):
            chunk = vector[begin : min(begin + CHUNK, stop)]
            used = 4 * chunk.size
            for source, operation in sources:
                source.fill(zeros[:used], stream[:used])
                operation(chunk, words[: chunk.size], out=chunk)
            if bits < MAX_BITS:
                np.bitwise_and(chunk, top, out=chunk)

    in_parts(vector.size, threads, work)


def value_bytes(bits: int) -> int:
    """Bytes of a packed value: 2 for 16 bits, 3 for 17..24, 4 for 25..32."""
    _check_bits(bits)
    return -(-bits // 8)


def pack(vector: NDArray[np.uint32], bits: int) -> bytes:
    """The values, each below 2^bits, little-endian in `value_bytes(bits)` bytes each.

    vector: uint32 (d,). Raises WrongShape for another array, PayloadError for a value that does not fit.
    """
    width = value_bytes(bits)
    if vector.dtype != np.uint32 or vector.ndim != 1:
        raise WrongShape("a vector to be packed is one row of uint32")
    _check_values(vector, bits)
    octets = np.ascontiguousarray(vector).astype("<u4", copy=False).view(np.uint8)
    return octets.reshape(-1, 4)[:, :width].tobytes()


def unpack(data: bytes, bits: int, length: int) -> NDArray[np.uint32]:
    """The (length,) values of `pack`; one encoding for each vector.

    Raises MalformedEnvelope for another number of bytes, before anything is allocated, and PayloadError for a
    value that is not below 2^bits.
    """
    width = value_bytes(bits)
    if length < 0 or len(data) != width * length:
        raise MalformedEnvelope(
            f"a masked vector has {len(data)} bytes instead of {width} for each of {length} values"
        )
    octets = np.zeros((length, 4), np.uint8)
    octets[:, :width] = np.frombuffer(data, np.uint8).reshape(length, width)
    vector: NDArray[np.uint32] = octets.view("<u4").reshape(length).astype(np.uint32, copy=False)
    _check_values(vector, bits)
    return vector


def _check_bits(bits: int) -> None:
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UsageError(f"masked vectors have {MIN_BITS} to {MAX_BITS} bits a value, not {bits}")


def _check_values(vector: NDArray[Any], bits: int) -> None:
    if bits < MAX_BITS and vector.size and int(vector.max()) >> bits:
        raise PayloadError(f"a masked vector has a value that does not fit {bits} bits")
