"""Sums under CKKS: the server adds what only the silos can decrypt.

This room holds the group key and its ceremony, packing, streaming
encryption, the server's addition without any key, and decryption at a silo. It must not touch files, sockets,
models or policies. CKKS (Cheon, Kim, Kim and Song 2017) is SEAL's, reached through TenSEAL.

The limit, in one sentence that `COLLUSION` has for other pages: all silos hold one and the same key, so any
silo together with the server reads every silo's vector. CKKS protects against the server alone, and against
an outsider; against a server that has a silo on its side, use masked sums.

What is decrypted is an approximate number, and its error depends on the secret key: somebody who sees both a
ciphertext and its decryption can compute the key (Li and Micciancio 2021). So a `DecryptedSum` stays in the
silo: it has no serialiser, and no message to the server may be made from it.

Nothing parses ciphertext bytes but the methods that take a `Signed`, and a `Signed` is made from an envelope
whose signatures hold. SEAL parses some altered ciphertexts without complaint, and they decrypt to 1e31: the
signature is checked before, sizes and form next (`ckks_format`), the magnitude after decryption.

Threads do not help here: TenSEAL holds the interpreter's lock while it encrypts, and its own pool does not
reach vectors. One ciphertext is one TenSEAL vector, since it writes a warning to stdout for longer ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import tenseal
from numpy.typing import NDArray

from securefl.crypto import ckks_format, envelope
from securefl.crypto.ckks_terms import CHUNK, DEFAULT, Parameters, Terms, chunk_name
from securefl.crypto.envelope import Verified
from securefl.crypto.identity import Identity, length_prefixed
from securefl.errors import (
    NonFiniteUpdate,
    PayloadError,
    SecureflError,
    TooFewSilos,
    TooLarge,
    UnknownSender,
    UsageError,
    WrongShape,
)
from securefl.messages import Party
from securefl.release import Independent, Limits, PayloadKind, Release, Tensors, decode, release_from

_FRAME = 4  # bytes: the length before each ciphertext of a chunk
_MAX_KEY = 2**22  # bytes of a serialised secret context: 61,816 at degree 4096, eight times that at 32768
MAX_KEY_ENVELOPE = _MAX_KEY + 2**20  # with what seals it to 256 silos
_NAME = re.compile(r"ckks\.([0-9]{6})")
_WITHOUT_KEYS = {
    "save_public_key": False,
    "save_secret_key": False,
    "save_galois_keys": False,
    "save_relin_keys": False,
}
# What pybind11 makes of a C++ exception.
_CPP_ERRORS = (ValueError, RuntimeError, IndexError, OverflowError, MemoryError, TypeError, BufferError)


# --- contexts and the group key


def _quiet(context: Any, parameters: Parameters) -> Any:
    context.global_scale = 2.0**parameters.scale_bits
    context.auto_relin = context.auto_rescale = context.auto_mod_switch = False
    return context


def _new_context(parameters: Parameters) -> Any:
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        parameters.poly_modulus_degree,
        -1,
        list(parameters.coeff_modulus_bits),
        encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
        n_threads=1,
    )
    return _quiet(context, parameters)


def public_context(parameters: Parameters) -> bytes:
    """The context in which the server adds: the parameters and no key of any kind (80 bytes by default).

    It is made from a context of its own, so it cannot depend on any group's key.
    """
    return bytes(_new_context(parameters).serialize(**_WITHOUT_KEYS))


class GroupKey:
    """The secret context that all silos of a run share. Shows nothing of itself; cannot be pickled.

    To keep it over a restart keep the envelope of `seal_group_key`, which only the silos' identities open.
    """

    __slots__ = ("_context", "parameters")

    def __init__(self, context: Any, parameters: Parameters) -> None:
        """Use `generate` or `open_group_key`."""
        self._context = context
        self.parameters = parameters

    @classmethod
    def generate(cls, parameters: Parameters = DEFAULT) -> GroupKey:
        """A new key from SEAL's generator, which the operating system seeds."""
        return cls(_new_context(parameters), parameters)

    def __repr__(self) -> str:
        return f"GroupKey(degree {self.parameters.poly_modulus_degree}, secret hidden)"

    def __reduce__(self) -> NoReturn:
        raise SecureflError("a CKKS group key cannot be serialised; use seal_group_key")


def group_key_release(key: GroupKey, info: Mapping[str, Any]) -> Release:
    """The key as one silo gives it to the others; whoever sends it must seal it to silos alone."""
    secret = key._context.serialize(**{**_WITHOUT_KEYS, "save_secret_key": True})
    return Release(
        PayloadKind.GROUP_KEY,
        {"context": np.frombuffer(secret, np.uint8)},
        {**info, "parameters": key.parameters.document()},
        Independent(reason="a key of the silos, drawn at random"),
    )


def open_group_key(verified: Verified, me: Identity, creator: Party, parameters: Parameters) -> GroupKey:
    """The key in an envelope that `creator`, the silo agreed on, signed.

    Raises UnknownSender for another sender, PayloadError for anything but a key of these parameters, and as
    `envelope.open_` does. Nothing of the key is in an error, nor in what led to it.
    """
    sender = verified.header.sender
    if sender != creator:
        raise UnknownSender(f"{sender.name} sent a CKKS group key; {creator.name} was to make it")
    release = release_from(decode(envelope.open_(verified, me), Limits(max_bytes=_MAX_KEY, max_tensors=1)))
    context: Any = None
    if (
        release.kind is PayloadKind.GROUP_KEY
        and release.info.get("parameters") == parameters.document()
        and set(release.tensors) == {"context"}
        and release.tensors["context"].dtype == np.uint8
    ):
        try:
            sent = release.tensors["context"].tobytes()
            own = ckks_format.secret_context(sent, public_context(parameters), parameters)
            context = _quiet(tenseal.context_from(own, 1), parameters)
            matches = context.has_secret_key()
        except _CPP_ERRORS:
            matches = False
        context = context if matches else None
    if context is None:
        raise PayloadError(f"what {sender.name} sent is not a CKKS group key of the parameters agreed on")
    return GroupKey(context, parameters)


# --- encrypting


def _weighted_blocks(vector: NDArray[Any], weight: float, terms: Terms) -> Iterator[NDArray[np.float64]]:
    """The weighted values of each ciphertext, the weight after the last of them, then zeros."""
    slots = terms.parameters.slots
    for start in range(0, terms.ciphertexts * slots, slots):
        part = vector[start : start + slots]
        block = np.zeros(slots)
        np.multiply(part, weight, out=block[: part.size], dtype=np.float64)
        if start <= terms.length < start + slots:
            block[terms.length - start] = weight
        yield block


def encrypt(key: GroupKey, terms: Terms, vector: NDArray[Any], weight: float) -> Iterator[bytes]:
    """The chunks of weight * vector and the weight itself, made one by one: `terms.chunks` of them.

    vector: 1-D, float32 or float64, `terms.length` values. Everything is checked at this call, before the
    first chunk. Raises WrongShape, NonFiniteUpdate for NaN, infinity or a value above the clip, and
    UsageError for a weight that is not above 0 and at most `terms.max_weight`, or another key's parameters.
    """
    if key.parameters != terms.parameters:
        raise UsageError("the CKKS group key has other parameters than the terms of this run")
    if not 0 < weight <= terms.max_weight:
        raise UsageError(f"a CKKS weight must be above 0 and at most {terms.max_weight:g}")
    if vector.ndim != 1 or vector.size != terms.length or vector.dtype not in (np.float32, np.float64):
        raise WrongShape(
            f"the vector to encrypt is {vector.dtype} {vector.shape}; agreed were {terms.length} float values"
        )
    # min and max carry NaN, and need no array of their own.
    low, high = float(vector.min()), float(vector.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteUpdate("the vector to encrypt holds NaN or infinity; it was refused")
    if max(-low, high) > terms.clip:
        raise NonFiniteUpdate(
            f"the vector to encrypt holds values above the clip of {terms.clip:g}; clip it, or the sum "
            "could overflow"
        )
    return _encrypt(key, terms, vector, weight)


def _encrypt(key: GroupKey, terms: Terms, vector: NDArray[Any], weight: float) -> Iterator[bytes]:
    blocks = _weighted_blocks(vector, weight, terms)
    while taken := list(islice(blocks, CHUNK)):
        yield length_prefixed(
            *(tenseal.ckks_vector(key._context, block.tolist()).serialize() for block in taken)
        )


def chunk_tensors(first: int, chunks: Iterable[bytes]) -> dict[str, NDArray[np.uint8]]:
    """Chunks from number `first` on as the arrays of a body (`release.encode`); `Signed` reads them back."""
    return {chunk_name(first + i): np.frombuffer(chunk, np.uint8) for i, chunk in enumerate(chunks)}


# --- parsing, after the signature


@dataclass(frozen=True, repr=False)
class Signed:
    """Chunks from an envelope whose signatures hold; the only thing that ciphertexts are parsed from.

    verified: that envelope. tensors: the arrays that it held, once opened. A vector may take several
    envelopes. Raises PayloadError for arrays that are not chunks.
    """

    verified: Verified
    tensors: Tensors
    chunks: dict[int, memoryview] = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.verified, Verified):
            raise TypeError("ciphertexts are parsed only from an envelope that was verified")
        chunks: dict[int, memoryview] = {}
        for name, array in self.tensors.items():
            number = _NAME.fullmatch(name)
            if number is None or array.dtype != np.uint8 or array.ndim != 1:
                raise PayloadError(f"{self.sender} sent an array that is not a chunk of CKKS ciphertexts")
            chunks[int(number[1])] = array.data
        if not chunks:
            raise PayloadError(f"{self.sender} sent no CKKS ciphertexts")
        object.__setattr__(self, "chunks", chunks)

    @property
    def sender(self) -> str:
        return self.verified.header.sender.name

    def __repr__(self) -> str:
        return f"Signed({len(self.chunks)} chunks of {self.sender})"


def _frames(chunk: memoryview, index: int, terms: Terms, sender: str) -> list[bytes]:
    """The ciphertexts' bytes, as many as the terms say, none above the largest that one can have."""
    limit = terms.parameters.max_ciphertext
    if not 0 <= index < terms.chunks:
        raise WrongShape(f"{sender} sent CKKS chunk {index}; a vector of this run has {terms.chunks}")
    count = terms.ciphertexts_of(index)
    if len(chunk) > count * (limit + _FRAME):
        raise TooLarge(
            f"CKKS chunk {index} of {sender} has {len(chunk)} bytes, more than its ciphertexts can"
        )
    frames, at = [], 0
    for _ in range(count):
        size = int.from_bytes(chunk[at : at + _FRAME], "big")
        at += _FRAME + size
        if not 0 < size <= limit or at > len(chunk):
            raise PayloadError(f"CKKS chunk {index} of {sender} is malformed")
        frames.append(bytes(chunk[at - size : at]))
    if at != len(chunk):
        raise PayloadError(f"CKKS chunk {index} of {sender} has bytes after its end")
    return frames


def _parse(context: Any, signed: Signed, index: int, terms: Terms) -> list[Any]:
    """The vectors of one chunk. Raises PayloadError or its kin; no exception of SEAL's comes out."""
    vectors = []
    for frame in _frames(signed.chunks[index], index, terms, signed.sender):
        try:
            vector = tenseal.ckks_vector_from(context, ckks_format.ciphertext(frame, terms.parameters))
            sound = not vector.ciphertext()[0].is_transparent()
        except _CPP_ERRORS:
            sound = False
        if not sound:
            raise PayloadError(f"CKKS chunk {index} of {signed.sender} holds a malformed ciphertext")
        vectors.append(vector)
    return vectors


# --- adding, at the server


class RunningSum:
    """The server's sum of the silos' ciphertexts, in a context without keys; nothing in it can decrypt.

    Memory: one vector's ciphertexts and one part, whatever the number of silos. A part is added whole or not
    at all; a silo whose parts do not all come spoils the sum, so hand it a silo's parts when all have come.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._context = _quiet(tenseal.context_from(public_context(terms.parameters), 1), terms.parameters)
        self._sums: dict[int, list[Any]] = {}
        self._seen: dict[str, set[int]] = {}
        self._spoilt = ""

    def add(self, signed: Signed) -> None:
        """Add one part. Raises PayloadError for a chunk seen before or malformed, TooLarge or WrongShape."""
        seen = self._seen.get(signed.sender, set())
        if signed.sender not in self._seen and len(self._seen) >= self._terms.silos:
            raise PayloadError(
                f"{signed.sender} is one silo more than the {self._terms.silos} whose sum cannot overflow"
            )
        repeated = seen & set(signed.chunks)
        if repeated:
            raise PayloadError(f"{signed.sender} sent CKKS chunk {min(repeated)} twice")
        parsed = {i: _parse(self._context, signed, i, self._terms) for i in signed.chunks}
        try:
            for index, vectors in parsed.items():
                for total, vector in zip(self._sums.setdefault(index, vectors), vectors, strict=True):
                    if total is not vector:
                        total.add_(vector)
        except _CPP_ERRORS:
            self._spoilt = signed.sender  # some of its ciphertexts may be in the sum already
            raise PayloadError(f"the CKKS ciphertexts of {signed.sender} cannot be added") from None
        self._seen[signed.sender] = seen | set(signed.chunks)

    def finish(self) -> tuple[str, ...]:
        """The silos in the sum. Raises TooFewSilos where none, or only a part of one, was added."""
        if self._spoilt:
            raise TooFewSilos(f"{self._spoilt} spoilt the CKKS sum; begin it again without it")
        for name, chunks in self._seen.items():
            if len(chunks) != self._terms.chunks:
                raise TooFewSilos(
                    f"{name} sent {len(chunks)} of {self._terms.chunks} CKKS chunks; begin the sum again "
                    "without it"
                )
        if not self._seen:
            raise TooFewSilos("no silo sent a vector to add")
        return tuple(sorted(self._seen))

    def chunks(self) -> Iterator[bytes]:
        """The sum's chunks in order, each let go once given out. Raises as `finish`."""
        self.finish()
        return self._drain()

    def _drain(self) -> Iterator[bytes]:
        for index in range(self._terms.chunks):
            yield length_prefixed(*(vector.serialize() for vector in self._sums.pop(index)))


# --- decrypting, at a silo


class DecryptedSum:
    """What a silo decrypted: for this silo alone. It has no serialiser, and must never reach the server.

    values: the weighted sum, float64, of `length` values. weight: the total weight.
    """

    __slots__ = ("values", "weight")

    def __init__(self, values: NDArray[np.float64], weight: float) -> None:
        self.values = values
        self.weight = weight

    def mean(self) -> NDArray[np.float64]:
        """The weighted mean."""
        return self.values / self.weight

    def __repr__(self) -> str:
        return f"DecryptedSum({self.values.size} values, hidden)"

    def __reduce__(self) -> NoReturn:
        raise SecureflError("a decrypted CKKS sum stays in its silo; it cannot be serialised")


def decrypt_sum(key: GroupKey, terms: Terms, parts: Iterable[Signed]) -> DecryptedSum:
    """The sum in the parts that the server signed, which may come in any order.

    Raises UsageError for another key's parameters, PayloadError for chunks that are missing, repeated or
    malformed, and NonFiniteUpdate where a value is larger than the terms allow any sum to be, or the weight
    or the zeros behind it are none: such a ciphertext was altered, or made under another key.
    """
    if key.parameters != terms.parameters:
        raise UsageError("the CKKS group key has other parameters than the terms of this run")
    slots = terms.parameters.slots
    values = np.empty(terms.ciphertexts * slots)
    seen: set[int] = set()
    for signed in parts:
        for index in signed.chunks:
            if index in seen:
                raise PayloadError(f"{signed.sender} sent CKKS chunk {index} of the sum twice")
            seen.add(index)
            for i, vector in enumerate(_parse(key._context, signed, index, terms)):
                start = (index * CHUNK + i) * slots
                try:
                    values[start : start + slots] = vector.decrypt()
                except _CPP_ERRORS:
                    raise PayloadError(f"CKKS chunk {index} of {signed.sender} does not decrypt") from None
    if len(seen) != terms.chunks:
        raise PayloadError(f"the CKKS sum came with {len(seen)} of {terms.chunks} chunks")
    weight = float(values[terms.length])
    most = terms.silos * terms.max_weight
    sums, rest = values[: terms.length], values[terms.length + 1 :]
    # Written so that NaN, which no comparison holds for, is refused too.
    sound = (
        float(np.abs(sums).max()) <= most * terms.clip + terms.tolerance
        and float(np.abs(rest).max(initial=0.0)) <= terms.tolerance
        and terms.tolerance < weight <= most + terms.tolerance
    )
    if not sound:
        raise NonFiniteUpdate(
            "a decrypted CKKS sum has values that no sum of this run can have; it was altered, or is another "
            "key's"
        )
    return DecryptedSum(sums, weight)
