"""Mask streams: against a naive reference, against each other, and against two published mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from securefl.crypto.masks import CHUNK, Stream, add_masks, pack, stream_seed, unpack, value_bytes
from securefl.errors import MalformedEnvelope, PayloadError, UsageError, WrongShape

RUN = "0123456789abcdef" * 2
A, B = "a" * 64, "b" * 64


def naive(values: list[int], streams: list[Stream], bits: int) -> list[int]:
    """By Python integers, one keystream at a time, as the module's text has it."""
    out = list(values)
    for stream in streams:
        cipher = Cipher(algorithms.AES(stream.seed), modes.CTR(bytes(16))).encryptor()
        raw = cipher.update(bytes(4 * len(out)))
        for place in range(len(out)):
            word = int.from_bytes(raw[4 * place : 4 * place + 4], "little")
            out[place] = (out[place] + stream.sign * word) % 2**bits
    return out


def seed(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize("bits", [16, 17, 24, 31, 32])
@pytest.mark.parametrize("length", [0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 3, 2 * CHUNK + 7])
def test_masks_are_those_of_the_naive_sum(bits: int, length: int) -> None:
    rng = np.random.default_rng(length + bits)
    vector = rng.integers(0, 2**bits, length, dtype=np.uint64).astype(np.uint32)
    streams = [Stream(seed(1), 1), Stream(seed(2), -1), Stream(seed(3), 1)]
    places = sorted({*range(min(length, 9)), *range(max(0, length - 9), length), *range(0, length, 4099)})
    expected = naive(vector.tolist(), streams, bits) if length < 100 else None
    masked = vector.copy()
    add_masks(masked, streams, bits)
    if expected is None:  # the naive sum of all is slow: the keystreams whole, the arithmetic at some places
        expected = naive(vector.tolist(), streams, bits) if bits == 32 and length == CHUNK + 3 else None
    if expected is not None:
        assert masked.tolist() == expected
    for threads in (1, 3, 8):
        again = vector.copy()
        add_masks(again, streams, bits, threads)
        assert np.array_equal(again, masked), "the number of threads changed the result"
    words = [
        np.frombuffer(
            Cipher(algorithms.AES(one.seed), modes.CTR(bytes(16))).encryptor().update(bytes(4 * length)),
            "<u4",
        ).astype(object)
        for one in streams
    ]
    for place in places:
        total = int(vector[place]) + sum(
            one.sign * int(word[place]) for one, word in zip(streams, words, strict=True)
        )
        assert int(masked[place]) == total % 2**bits


def test_masks_of_a_pair_cancel() -> None:
    one, two = np.arange(1000, dtype=np.uint32), np.arange(1000, 2000, dtype=np.uint32)
    plain = one + two
    pair = stream_seed(seed(7), RUN, 1, "weights", [A, B])
    add_masks(one, [Stream(pair, 1)], 32)
    add_masks(two, [Stream(pair, -1)], 32)
    assert not np.array_equal(one, np.arange(1000, dtype=np.uint32))
    assert np.array_equal(one + two, plain)


def test_the_key_of_a_stream_is_hkdf_over_everything_it_is_for() -> None:
    """By the published construction (RFC 5869), with each field after its length."""
    fields = [RUN.encode(), b"3", b"counts", A.encode(), B.encode()]
    info = b"securefl/1 mask stream" + b"".join(len(f).to_bytes(4, "big") + f for f in fields)
    expected = HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(seed(9))
    assert stream_seed(seed(9), RUN, 3, "counts", [B, A]) == expected
    others = [
        stream_seed(seed(8), RUN, 3, "counts", [A, B]),
        stream_seed(seed(9), RUN[::-1], 3, "counts", [A, B]),
        stream_seed(seed(9), RUN, 4, "counts", [A, B]),
        stream_seed(seed(9), RUN, 3, "weights", [A, B]),
        stream_seed(seed(9), RUN, 3, "counts", [A, "c" * 64]),
        stream_seed(seed(9), RUN, 3, "counts", [A]),
    ]
    assert len({expected, *others}) == 7


def test_two_vectors_of_one_round_never_share_a_stream() -> None:
    """A hospital toolkit's published scheme masked two vectors of a round with one stream.

    Subtracting the two masked vectors then gives the difference of what they hide. Kept against that scheme,
    written out here, and against ours.
    """
    first = np.arange(64, dtype=np.uint32)
    second = np.full(64, 5, np.uint32)
    truth = first - second

    def masked(key_of: dict[str, bytes]) -> np.ndarray:
        one, two = first.copy(), second.copy()
        add_masks(one, [Stream(key_of["weights"], 1)], 32)
        add_masks(two, [Stream(key_of["counts"], 1)], 32)
        return one - two

    shared = dict.fromkeys(("weights", "counts"), stream_seed(seed(1), RUN, 1, "round", [A, B]))
    assert np.array_equal(masked(shared), truth), "the attack works against the published scheme"
    ours = {name: stream_seed(seed(1), RUN, 1, name, [A, B]) for name in ("weights", "counts")}
    assert not np.any(masked(ours) == truth), "and gives nothing against ours"


def _folded(key: bytes) -> int:
    """The published mistake (flower#7522): the exclusive or of a key's eight words, 32 bits of its 256."""
    return int(np.bitwise_xor.reduce(np.frombuffer(key, "<u4")))


def _colliding() -> tuple[bytes, bytes]:
    """Two of 2^17 secrets with one 32-bit fold; by the birthday bound 86 % of such sets have two."""
    seen: dict[int, bytes] = {}
    for number in range(2**17):
        key = stream_seed(seed(number), RUN, 2, "weights", [A, B])
        if _folded(key) in seen:
            return seen[_folded(key)], key
        seen[_folded(key)] = key
    raise AssertionError("no collision in 2^17 secrets")


def test_a_seed_is_not_folded_to_32_bits() -> None:
    """Two pairs whose folded seeds collide have one mask: it cancels and leaves their difference."""
    one, two = _colliding()
    assert one != two
    first, second = np.arange(64, dtype=np.uint32), np.full(64, 5, np.uint32)

    def wrong(vector: np.ndarray, key: bytes) -> np.ndarray:
        return vector + np.random.RandomState(_folded(key)).randint(0, 2**32, 64, np.uint32)

    def ours(vector: np.ndarray, key: bytes) -> np.ndarray:
        masked = vector.copy()
        add_masks(masked, [Stream(key, 1)], 32)
        return masked

    assert np.array_equal(wrong(first, one) - wrong(second, two), first - second), "the attack works there"
    assert not np.any(ours(first, one) - ours(second, two) == first - second), (
        "and gives nothing against ours"
    )


def test_the_peers_folded_seeds_collide() -> None:
    """The public report (flower#7522) on flwr's own generator, with two secrets that differ."""
    utils = pytest.importorskip("flwr.common.secure_aggregation.secaggplus_utils")
    (left,), (right,) = (utils.pseudo_rand_gen(key, 2**32, [(64,)]) for key in _colliding())
    assert np.array_equal(left, right)


def test_masks_refuse_what_would_weaken_them() -> None:
    good = Stream(seed(1), 1)
    for vector in (np.zeros(4, np.int32), np.zeros((2, 2), np.uint32), np.zeros(8, np.uint32)[::2]):
        with pytest.raises(WrongShape):
            add_masks(vector, [good], 32)
    with pytest.raises(UsageError, match="same seed"):
        add_masks(np.zeros(4, np.uint32), [good, Stream(seed(1), -1)], 32)
    for bits in (0, 15, 33):
        with pytest.raises(UsageError):
            add_masks(np.zeros(4, np.uint32), [good], bits)
    for bad in (b"", bytes(31), bytes(33)):
        with pytest.raises(UsageError):
            Stream(bad, 1)
        with pytest.raises(UsageError):
            stream_seed(bad, RUN, 1, "weights", [A])
    with pytest.raises(UsageError):
        Stream(seed(1), 0)  # type: ignore[arg-type]
    for parties in ([], [A, A]):
        with pytest.raises(UsageError):
            stream_seed(seed(1), RUN, 1, "weights", parties)
    assert seed(1).hex() not in repr(good)
    assert "seed" not in repr(good)


@pytest.mark.parametrize(("bits", "width"), [(16, 2), (17, 3), (24, 3), (25, 4), (32, 4)])
def test_packed_values_have_one_encoding(bits: int, width: int) -> None:
    top = 2**bits - 1
    vector = np.array([0, 1, 255, 256, top, top // 2], np.uint32)
    data = pack(vector, bits)
    assert data == b"".join(int(value).to_bytes(width, "little") for value in vector)
    assert value_bytes(bits) == width
    assert np.array_equal(unpack(data, bits, 6), vector)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(MalformedEnvelope):
            unpack(wrong, bits, 6)
    if bits < 8 * width:
        with pytest.raises(PayloadError):
            unpack(b"\xff" * (6 * width), bits, 6)
        with pytest.raises(PayloadError):
            pack(np.array([top + 1], np.uint32), bits)
    with pytest.raises(WrongShape):
        pack(vector.astype(np.int64), bits)
