"""CKKS before mutants: ciphertexts and keys altered by whoever signs them, at a server and at a silo.

Everything arrives in an envelope whose signatures hold, since nothing else reaches SEAL. What SEAL itself
allocates is seen in the size of the process.
"""

from __future__ import annotations

import random
import resource
import struct
import zlib
from typing import Any

import numpy as np
import pyarrow

from securefl.crypto import envelope
from securefl.crypto.ckks import (
    DecryptedSum,
    GroupKey,
    RunningSum,
    Signed,
    chunk_tensors,
    decrypt_sum,
    encrypt,
    group_key_release,
    open_group_key,
)
from securefl.crypto.ckks_terms import Terms
from securefl.crypto.identity import Identity, length_prefixed
from securefl.errors import ProtocolError
from securefl.messages import Party
from securefl.release import PayloadKind, canonical_json, decode, encode, encode_release
from tests.fuzz.messages import Form, Seed, seed_of
from tests.fuzz.subjects import ROSTER, RUN, SERVER, SILOS, SITTING
from tests.mutants import forge, mutate_body, mutate_bytes, with_row

TERMS = Terms(length=40, silos=len(SILOS), max_weight=100.0, clip=10.0)
_MAGIC, _HEADER = b"\x5e\xa1\x10", 16  # of an object of SEAL
_GROWTH = 2**25  # bytes that the process may grow by for one message


def bomb(prefix: bytes, size: int) -> bytes:
    """A zstd frame of `prefix` and zeros, of `size` bytes or a few more: four of its bytes for 131,072."""
    blocks = -(-size // 2**17)
    front = b"\x28\xb5\x2f\xfd\x00\x38" + (len(prefix) << 3).to_bytes(3, "little") + prefix
    zeros = [
        ((2**17 << 3) | 2 | (number == blocks)).to_bytes(3, "little") + b"\0"
        for number in range(1, blocks + 1)
    ]
    return front + b"".join(zeros)


def seal_object(data: bytes, at: int = 0) -> tuple[int, int]:
    """Where the object of SEAL begins and ends that is the first after `at`."""
    start = data.index(_MAGIC, at)
    return start, start + int.from_bytes(data[start + 8 : start + _HEADER], "little")


def packed(version: bytes, mode: int, content: bytes) -> bytes:
    return _MAGIC + version + struct.pack("<BHQ", mode, 0, _HEADER + len(content)) + content


def unpacked(data: bytes, size: int) -> bytes:
    return bytes(pyarrow.decompress(data[_HEADER:], size, codec="zstd", asbytes=True))


def _altered(rng: random.Random, content: bytes, head: int) -> bytes:
    """What an object holds with another number in its head, or behind it, or bytes changed."""
    number = struct.pack("<Q", rng.choice((0, 1, 2, 3, 4096, 8192, 2**20, 2**32 + 2, 2**62, 2**64 - 1)))
    match rng.randrange(4):
        case 0:
            at = rng.randrange(head)
            return content[:at] + number + content[at + 8 :]
        case 1:
            at = head + 8 * rng.randrange((len(content) - head) // 8)
            return content[:at] + number + content[at + 8 :]
        case 2:
            return mutate_bytes(rng, content[:head], [bytes(head)]) + content[head:]
    return mutate_bytes(rng, content, [bytes(len(content))])


def mutate_object(rng: random.Random, data: bytes, head: int, size: int) -> bytes:
    """An object of SEAL with one thing off: its header, how it is compressed, what is in it.

    head: bytes of its content before the numbers; size: of its content.
    """
    version, content = data[3:5], unpacked(data, size)
    match rng.randrange(6):
        case 0:
            return mutate_bytes(rng, data[:_HEADER], [bytes(_HEADER)]) + data[_HEADER:]
        case 1:
            content = _altered(rng, content, head)
            mode = rng.choice((0, 1, 2, 2, 2, 3))
            body = zlib.compress(content) if mode == 1 else content
            if mode == 2:
                body = pyarrow.compress(content, codec="zstd", asbytes=True)
            return packed(version, mode, body)
        case 2:
            return packed(version, 2, bomb(content[: rng.choice((0, head, size))], 2 ** rng.randint(17, 29)))
        case 3:
            inner = head - 24  # the object in the object: the numbers with their count
            inside = packed(version, 2, bomb(content[head - 8 : head], 2 ** rng.randint(17, 29)))
            outside = content[:inner] + inside
            if rng.random() < 0.5:
                return packed(version, 2, pyarrow.compress(outside, codec="zstd", asbytes=True))
            return packed(version, 0, outside)
        case 4:
            return packed(version, 2, data[_HEADER:] + rng.choice((b"\0", data[_HEADER:])))
    return mutate_bytes(rng, data, [bytes(len(data))])


def mutate_frame(rng: random.Random, data: bytes, at: int, head: int, size: int) -> bytes:
    """A message of TenSEAL with its object mutated, or what is around it. at: where to look for that."""
    start, end = seal_object(data, at)
    before, inside, after = data[:start], data[start:end], data[end:]
    match rng.randrange(5):
        case 0:
            return mutate_bytes(rng, before, [after]) + inside + after
        case 1:
            return before + inside + mutate_bytes(rng, after, [before])
        case 2:
            sizes = rng.choice(
                (b"\x0a\x04\x80\x08\x80\x08", b"\x0a\x03\x80\x10\x00", b"\x0a\x02\x80\x10" * 2, b"")
            )
            return sizes + data[rng.choice((0, 4)) :]
    changed = mutate_object(rng, inside, head, size)
    # The lengths around it are kept true, of three bytes each as those of honest messages are.
    old, new = len(inside), len(changed)
    for more in (4, 0):
        written = [bytes([n & 127 | 128, n >> 7 & 127 | 128, n >> 14]) for n in (old + more, new + more)]
        before = before.replace(written[0], written[1])
    return before + changed + after


class Encrypted:
    """Mutants of a silo's ciphertexts at the server, of the sum's at a silo, and of the cohort's key.

    What the server refused is in no sum: at the end of a sitting the honest ciphertexts are added, and they
    decrypt to the plain weighted sum. What a silo takes is a sum that the terms allow.
    """

    name = "encrypted"
    forms = (Form.SEALED,)

    def __init__(self, rng: random.Random) -> None:
        """rng: of the silos' vectors, and what seals the honest messages."""
        self._key = GroupKey.generate(TERMS.parameters)
        numbers = np.random.default_rng(rng.getrandbits(32))
        vectors = [numbers.uniform(-10, 10, TERMS.length) for _ in SILOS]
        weights = [1.0 + number for number in range(len(SILOS))]
        self._weight = sum(weights)
        self._right = np.sum([w * v for w, v in zip(weights, vectors, strict=True)], axis=0)
        self._sent = [
            self._seed(rng, self._chunks(encrypt(self._key, TERMS, vector, weight)), "encrypted-model", silo)
            for silo, vector, weight in zip(SILOS, vectors, weights, strict=True)
        ]
        stranger = encrypt(GroupKey.generate(TERMS.parameters), TERMS, vectors[0], 1.0)
        self._strange = self._chunks(stranger)
        total = RunningSum(TERMS)
        for seed in self._sent:
            total.add(self._signed(seed.data, SERVER))
        self._sum = self._seed(rng, self._chunks(total.chunks()), "plan", SERVER)
        release = group_key_release(self._key, {"round": 1})
        self._group_key = self._seed(rng, encode_release(release), "group-key", SILOS[0])
        self._sit()

    @staticmethod
    def _chunks(chunks: Any) -> bytes:
        return encode(PayloadKind.ENCRYPTED_MODEL, {}, chunk_tensors(0, chunks))

    @staticmethod
    def _seed(rng: random.Random, body: bytes, kind: str, sender: Identity) -> Seed:
        to = SERVER if kind == "encrypted-model" else SILOS[1]
        return seed_of(rng, body, kind, sender, [to.card], run=RUN, round=1, step="train")

    @staticmethod
    def _signed(data: bytes, reader: Identity) -> Signed:
        verified = envelope.verify(data, {**ROSTER, SERVER.name: SERVER.card})
        return Signed(verified, decode(envelope.open_(verified, reader)).tensors)

    def _sit(self) -> None:
        self._total, self._faced, self._taken = RunningSum(TERMS), 0, False

    # --- mutants

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        if self._taken or self._faced == SITTING:
            self._rise()
            self._sit()
        self._faced += 1
        self._seed_at_hand = seed = rng.choice((self._sent[0], self._sent[0], self._sum, self._group_key))
        body = self._mutated_key(rng) if seed is self._group_key else self._mutated_chunk(rng, seed.body)
        return forge(rng, canonical_json(seed.header), body, seed.cards, seed.sender)

    def _mutated_chunk(self, rng: random.Random, body: bytes) -> bytes:
        if rng.random() < 0.15:
            return mutate_body(rng, body, [self._strange, self._sent[1].body])
        (chunk,) = (one.tobytes() for one in decode(body).tensors.values())
        degree = TERMS.parameters.poly_modulus_degree
        frame = mutate_frame(rng, chunk[4:], 0, 97, 97 + 16 * degree)
        changed = rng.choice(
            (length_prefixed(frame), length_prefixed(frame), mutate_bytes(rng, chunk, [chunk]))
        )
        return with_row(body, "ckks.000000", changed)

    def _mutated_key(self, rng: random.Random) -> bytes:
        body = self._group_key.body
        if rng.random() < 0.15:
            return mutate_body(rng, body, [self._sent[0].body])
        context = decode(body).tensors["context"].tobytes()
        at = context.index(_MAGIC, context.index(_MAGIC) + 60)
        numbers = 2 * TERMS.parameters.poly_modulus_degree
        return with_row(body, "context", mutate_frame(rng, context, at, 72, 72 + 8 * numbers))

    # --- taking them

    def attempt(self, data: bytes) -> Any:
        before = self._size()
        try:
            return self._take(data)
        finally:
            assert self._size() - before <= _GROWTH, "the process grew out of proportion"

    @staticmethod
    def _size() -> int:
        """The largest size of this process so far, in bytes."""
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _take(self, data: bytes) -> Any:
        if self._seed_at_hand is self._group_key:
            verified = envelope.verify(data, ROSTER)
            creator = Party(name=SILOS[0].name, key=SILOS[0].card.fingerprint)
            return open_group_key(verified, SILOS[1], creator, TERMS.parameters)
        if self._seed_at_hand is self._sum:
            return decrypt_sum(self._key, TERMS, [self._signed(data, SILOS[1])])
        try:
            self._total.add(self._signed(data, SERVER))
        except ProtocolError:
            assert vars(self._total)["_seen"] == {}
            assert not vars(self._total)["_spoilt"]
            raise
        return self._total

    def check(self, data: bytes, taken: Any, form: Form) -> None:
        match taken:
            case DecryptedSum():
                most = TERMS.silos * TERMS.max_weight
                assert np.abs(taken.values).max() <= most * TERMS.clip + TERMS.tolerance
                assert 0 < taken.weight <= most + TERMS.tolerance
            case GroupKey():
                chunks = encrypt(taken, TERMS, np.zeros(TERMS.length), 1.0)
                assert len(list(chunks)) == TERMS.chunks
            case _:
                self._taken = True

    def _rise(self) -> None:
        """Add what is left, and decrypt it."""
        for seed in self._sent[1 if self._taken else 0 :]:
            self._total.add(self._signed(seed.data, SERVER))
        chunks = dict(chunk_tensors(0, self._total.chunks()))
        verified = envelope.verify(self._sum.data, {SERVER.name: SERVER.card})
        try:
            found = decrypt_sum(self._key, TERMS, [Signed(verified, chunks)])
        except ProtocolError:
            assert self._taken
            return
        if not self._taken:
            np.testing.assert_allclose(found.values, self._right, atol=TERMS.tolerance)
            assert abs(found.weight - self._weight) <= TERMS.tolerance
