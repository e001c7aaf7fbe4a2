"""CKKS sums: against the plain float64 sum, with the real TenSEAL; and what is refused."""

from __future__ import annotations

import json
import pickle
import resource
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow
import pytest
import tenseal
from numpy.typing import NDArray

from securefl.crypto import ckks, ckks_format, envelope
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
    public_context,
)
from securefl.crypto.ckks_terms import COLLUSION, DEFAULT, POST_QUANTUM, Parameters, Terms
from securefl.crypto.identity import Identity, length_prefixed
from securefl.errors import (
    BadSignature,
    NonFiniteUpdate,
    PayloadError,
    SecureflError,
    TooFewSilos,
    TooLarge,
    UnknownSender,
    UsageError,
    WrongRecipient,
    WrongShape,
)
from securefl.messages import Header, Party
from securefl.release import PayloadKind, decode, encode, encode_release
from tests.fuzz.encrypted import bomb, packed, seal_object, unpacked

SLOTS = 2048


@dataclass(frozen=True)
class Federation:
    """A server, three silos with one group key, and the envelopes between them."""

    server: Identity
    silos: tuple[Identity, ...]
    key: GroupKey

    def header(self, sender: Identity, recipients: Sequence[Identity]) -> Header:
        party = {p.name: Party(name=p.name, key=p.card.fingerprint) for p in (sender, *recipients)}
        return Header(
            run="0" * 32,
            round=1,
            step="train",
            sender=party[sender.name],
            recipients=tuple(party[r.name] for r in recipients),
            kind=PayloadKind.MODEL,
            sequence=1,
            time=0,
        )

    def verified(self, sealed: bytes) -> envelope.Verified:
        return envelope.verify(sealed, {p.name: p.card for p in (self.server, *self.silos)})

    def send(self, sender: Identity, to: Identity, chunks: Iterable[bytes], first: int = 0) -> Signed:
        return self.send_tensors(sender, to, chunk_tensors(first, chunks))

    def send_tensors(self, sender: Identity, to: Identity, tensors: dict[str, NDArray[Any]]) -> Signed:
        return self.received(encode(PayloadKind.MODEL, {"note": "x"}, tensors), sender, to)

    def received(self, body: bytes, sender: Identity, to: Identity) -> Signed:
        verified = self.verified(envelope.seal(body, self.header(sender, [to]), sender, [to.card]))
        return Signed(verified, decode(envelope.open_(verified, to)).tensors)

    def sum(self, terms: Terms, inputs: Sequence[tuple[NDArray[Any], float]]) -> DecryptedSum:
        total = RunningSum(terms)
        for silo, (vector, weight) in zip(self.silos, inputs, strict=False):
            total.add(self.send(silo, self.server, encrypt(self.key, terms, vector, weight)))
        return decrypt_sum(self.key, terms, [self.send(self.server, self.silos[0], total.chunks())])


@pytest.fixture(scope="module")
def fed() -> Federation:
    names = ("hospital-a", "hospital-b", "hospital-c")
    silos = tuple(Identity.generate(name) for name in names)
    return Federation(Identity.generate("server"), silos, GroupKey.generate())


def party(identity: Identity) -> Party:
    return Party(name=identity.name, key=identity.card.fingerprint)


def small(length: int = 5) -> Terms:
    return Terms(length=length, silos=3, max_weight=1000.0, clip=10.0)


# --- parameters


def test_parameter_sets_and_both_bounds_in_words() -> None:
    assert DEFAULT.is_secure
    assert not DEFAULT.is_post_quantum  # 108 bits: 109 allowed, 101 allowed
    assert POST_QUANTUM.is_post_quantum
    assert DEFAULT.security == (
        "CKKS of degree 4096 with a modulus of 108 bits is within the classical 128-bit bound of 109 bits "
        "and outside the post-quantum one of 101 bits"
    )
    with pytest.raises(UsageError, match=r"110 bits is outside .* 109 bits and outside .* 101 bits"):
        Parameters(coeff_modulus_bits=(55, 55))
    with pytest.raises(UsageError, match="degree of 4000"):
        Parameters(poly_modulus_degree=4000)
    with pytest.raises(UsageError, match="two primes"):
        Parameters(poly_modulus_degree=8192, coeff_modulus_bits=(61, 60))
    with pytest.raises(UsageError, match="scale"):
        Parameters(scale_bits=50)


def test_the_security_table_is_seals_own() -> None:
    # SEAL refuses what is above its own 128-bit table; the two must draw the line at the same place.
    for degree, most in ((4096, 109), (8192, 218)):
        high = most - most // 2 if degree == 4096 else 60
        chain = [high, most - high] if degree == 4096 else [60, 60, 60, most - 180]
        tenseal.context(tenseal.SCHEME_TYPE.CKKS, degree, -1, chain)
        chain[-1] += 1
        with pytest.raises(ValueError, match="encryption parameters"):
            tenseal.context(tenseal.SCHEME_TYPE.CKKS, degree, -1, chain)


def test_terms_refuse_what_could_overflow() -> None:
    assert DEFAULT.capacity == 2**22
    Terms(length=1, silos=4, max_weight=2.0**10, clip=1023.0)
    for terms in (
        {"silos": 4, "max_weight": 2.0**10, "clip": 1024.0},
        {"silos": 4, "max_weight": 2.0**20, "clip": 0.001},  # the weight itself is a coordinate
        {"silos": 4, "max_weight": 2.0**8, "clip": 256.0, "parameters": POST_QUANTUM},
    ):
        with pytest.raises(UsageError, match="overflow"):
            Terms(length=1, **terms)  # type: ignore[arg-type]
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="positive"):
            Terms(length=1, silos=2, max_weight=value, clip=1.0)
        with pytest.raises(UsageError, match="positive"):
            Terms(length=1, silos=2, max_weight=1.0, clip=value)
    with pytest.raises(UsageError, match="vectors of 1"):
        Terms(length=0, silos=2, max_weight=1.0, clip=1.0)


def test_beyond_the_bound_the_sum_is_silently_another() -> None:
    # Why `Terms` refuses: the library adds on and says nothing.
    context = ckks._new_context(DEFAULT)
    part = [2.0**20] * SLOTS
    for silos, right in ((3, True), (9, False)):
        total = tenseal.ckks_vector(context, part)
        for _ in range(silos - 1):
            total.add_(tenseal.ckks_vector(context, part))
        assert (abs(total.decrypt()[0] - silos * 2.0**20) < 1e-3) is right


# --- the right sum


@pytest.mark.parametrize("parameters", [DEFAULT, POST_QUANTUM])
@pytest.mark.parametrize("length", [1, SLOTS - 1, SLOTS, 3 * SLOTS + 7])
def test_sum_is_the_plain_weighted_sum(fed: Federation, parameters: Parameters, length: int) -> None:
    rng = np.random.default_rng(length)
    key = fed.key if parameters == DEFAULT else GroupKey.generate(parameters)
    terms = Terms(length=length, silos=3, max_weight=900.0, clip=10.0, parameters=parameters)
    weights = (1.0, 250.0, 900.0)
    inputs = [(rng.uniform(-10, 10, length).astype(np.float32), weight) for weight in weights]
    got = replace(fed, key=key).sum(terms, inputs)
    expected = np.sum([vector.astype(np.float64) * weight for vector, weight in inputs], axis=0)
    assert parameters.precision < 1e-6
    assert np.abs(got.values - expected).max() < 1e-6 * 3**0.5
    assert abs(got.weight - sum(weights)) < 1e-6 * 3**0.5
    assert np.abs(got.mean() - expected / sum(weights)).max() < 1e-6


def test_the_largest_values_that_the_terms_allow(fed: Federation) -> None:
    terms = Terms(length=SLOTS, silos=3, max_weight=1e4, clip=139.8)
    assert terms.silos * terms.max_weight * terms.clip > 0.99 * DEFAULT.capacity
    signs = np.where(np.arange(SLOTS) % 2, 1.0, -1.0)
    for vector in (np.full(SLOTS, 139.8), -np.full(SLOTS, 139.8), 139.8 * signs):
        got = fed.sum(terms, [(vector, 1e4)] * 3)
        assert np.abs(got.values - 3e4 * vector).max() < 1e-6 * 3**0.5


def test_errors_have_the_stated_deviation() -> None:
    # N/2 = 2048 times the variance 10.58 of a coefficient, over the scale: a real slot's error.
    key, terms = GroupKey.generate(), Terms(length=20 * SLOTS - 1, silos=1, max_weight=1.0, clip=1.0)
    (chunk,) = encrypt(key, terms, np.zeros(terms.length), 1.0)
    frames = ckks._frames(memoryview(chunk), 0, terms, "hospital-a")
    errors = np.concatenate([tenseal.ckks_vector_from(key._context, f).decrypt() for f in frames])[:-1]
    assert 7 * errors.std() == pytest.approx(DEFAULT.precision, rel=0.03)


def test_streaming_in_several_envelopes_and_any_order(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("securefl.crypto.ckks_terms.CHUNK", 2)
    monkeypatch.setattr("securefl.crypto.ckks.CHUNK", 2)
    terms = small(5 * SLOTS)  # six ciphertexts with the weight's: three chunks
    vector = np.linspace(-1, 1, terms.length)
    total = RunningSum(terms)
    for silo in fed.silos[:2]:
        stream = encrypt(fed.key, terms, vector, 2.0)
        parts = [fed.send(silo, fed.server, [chunk], i) for i, chunk in enumerate(stream)]
        assert len(parts) == 3
        for part in parts[::-1]:
            total.add(part)
    assert total.finish() == ("hospital-a", "hospital-b")
    answer = [fed.send(fed.server, fed.silos[2], [c], i) for i, c in enumerate(total.chunks())]
    got = decrypt_sum(fed.key, terms, answer[::-1])
    assert np.abs(got.values - 4 * vector).max() < 1e-6 * 3**0.5
    with pytest.raises(PayloadError, match="2 of 3 chunks"):
        decrypt_sum(fed.key, terms, answer[:2])
    with pytest.raises(PayloadError, match="twice"):
        decrypt_sum(fed.key, terms, [*answer, answer[0]])


# --- keys


def test_the_servers_context_holds_no_key() -> None:
    keys = [GroupKey.generate(), GroupKey.generate()]
    public = public_context(DEFAULT)
    # One and the same for every group, so it can hold nothing of any; and too small for a polynomial.
    assert [key._context.serialize(**ckks._WITHOUT_KEYS) for key in keys] == [public, public]
    assert len(public) == 80
    context = tenseal.context_from(public)
    held = [
        context.has_secret_key(),
        context.has_galois_keys(),
        context.has_relin_keys(),
        context.is_private(),
    ]
    assert not any(held)
    with pytest.raises(ValueError, match="public_key"):
        context.has_public_key()  # a symmetric context has none to ask for
    one = tenseal.ckks_vector(keys[0]._context, [1.0] * SLOTS).serialize()
    total = tenseal.ckks_vector_from(context, one)
    total.add_(tenseal.ckks_vector_from(context, one))
    with pytest.raises(ValueError, match="secret"):
        total.decrypt()
    with pytest.raises(ValueError):
        tenseal.ckks_vector(context, [1.0])
    again = tenseal.ckks_vector_from(keys[0]._context, total.serialize())
    assert again.decrypt()[0] == pytest.approx(2.0, abs=1e-5)


def test_ceremony_gives_the_silos_one_key(fed: Federation) -> None:
    creator, *others = fed.silos
    body = encode_release(group_key_release(fed.key, {}))
    sealed = envelope.seal(body, fed.header(creator, others), creator, [o.card for o in others])
    verified = fed.verified(sealed)
    opened = open_group_key(verified, others[0], party(creator), DEFAULT)
    (chunk,) = encrypt(opened, small(), np.arange(5.0), 2.0)
    total = RunningSum(small())
    total.add(fed.send(others[0], fed.server, [chunk]))
    got = decrypt_sum(fed.key, small(), [fed.send(fed.server, creator, total.chunks())])
    assert np.abs(got.values - 2 * np.arange(5.0)).max() < 1e-6
    secret = fed.key._context.serialize(save_secret_key=True, save_public_key=False)
    assert secret[200:264] not in sealed
    with pytest.raises(WrongRecipient):
        open_group_key(verified, fed.server, party(creator), DEFAULT)
    with pytest.raises(UnknownSender, match="hospital-c was to make it"):
        open_group_key(verified, others[0], party(others[1]), DEFAULT)
    with pytest.raises(PayloadError, match="not a CKKS group key"):
        open_group_key(verified, others[0], party(creator), POST_QUANTUM)


@pytest.mark.parametrize("fault", ["garbage", "keyless", "other parameters", "type", "name", "kind"])
def test_ceremony_refuses_what_is_no_key(fed: Federation, fault: str) -> None:
    creator, other, _ = fed.silos
    name = "context"
    array: NDArray[Any] = np.frombuffer(b"\x0a\x04abcd", np.uint8)
    if fault == "keyless":
        array = np.frombuffer(public_context(DEFAULT), np.uint8)
    elif fault == "other parameters":
        wrong = GroupKey.generate(POST_QUANTUM)._context
        array = np.frombuffer(wrong.serialize(save_secret_key=True, save_public_key=False), np.uint8)
    elif fault == "type":
        array = np.zeros(4, np.float32)
    elif fault == "name":
        name = "key"
    right = group_key_release(fed.key, {})
    kind = PayloadKind.MODEL if fault == "kind" else right.kind
    tensors = right.tensors if fault == "kind" else {name: array}
    body = encode_release(replace(right, kind=kind, tensors=tensors))
    sealed = envelope.seal(body, fed.header(creator, [other]), creator, [other.card])
    with pytest.raises(PayloadError, match="not a CKKS group key"):
        open_group_key(fed.verified(sealed), other, party(creator), DEFAULT)


def test_secrets_have_no_serialiser_and_show_nothing(fed: Federation) -> None:
    got = fed.sum(small(), [(np.full(5, 3.25), 1.0)])
    for secret in (fed.key, got):
        with pytest.raises(SecureflError, match="serialised"):
            pickle.dumps(secret)
        with pytest.raises(TypeError):
            json.dumps(secret)
        assert not any(hasattr(secret, name) for name in ("__dict__", "serialize", "to_json", "save"))
        assert "3.2" not in repr(secret)
        assert "hidden" in repr(secret)
    with pytest.raises((TypeError, ValueError, AttributeError, PayloadError)):
        encode(PayloadKind.MODEL, {"sum": got}, {})
    with pytest.raises(PayloadError):
        encode(PayloadKind.MODEL, {}, {"sum": got})  # type: ignore[dict-item]
    with pytest.raises(PayloadError, match="float64"):
        encode(PayloadKind.MODEL, {}, {"sum": got.values})  # nor do its values travel as they are
    assert "any one silo together with the server" in COLLUSION


# --- what is refused before encrypting


def test_bad_vectors_are_refused_at_the_call(fed: Federation) -> None:
    good = np.zeros(5)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(NonFiniteUpdate, match="NaN or infinity"):
            encrypt(fed.key, small(), np.array([0, 0, bad, 0, 0]), 1.0)
    for beyond in (10.001, -10.001):
        with pytest.raises(NonFiniteUpdate, match="above the clip"):
            encrypt(fed.key, small(), np.array([0, 0, beyond, 0, 0]), 1.0)
    for odd in (np.zeros(4), np.zeros((5, 1)), np.zeros(5, np.int64), np.zeros(5, np.float16)):
        with pytest.raises(WrongShape, match="agreed were 5"):
            encrypt(fed.key, small(), odd, 1.0)
    for weight in (0.0, -1.0, 1000.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="weight"):
            encrypt(fed.key, small(), good, weight)
    terms = Terms(length=5, silos=2, max_weight=1.0, clip=1.0, parameters=POST_QUANTUM)
    with pytest.raises(UsageError, match="other parameters"):
        encrypt(fed.key, terms, good, 1.0)
    with pytest.raises(UsageError, match="other parameters"):
        decrypt_sum(fed.key, terms, [])


# --- what is refused after the signature


def test_nothing_is_parsed_without_a_signature(fed: Federation) -> None:
    (chunk,) = encrypt(fed.key, small(), np.zeros(5), 1.0)
    body = encode(PayloadKind.MODEL, {}, chunk_tensors(0, [chunk]))
    sealed = envelope.seal(body, fed.header(fed.silos[0], [fed.server]), fed.silos[0], [fed.server.card])
    at = len(sealed) // 2
    with pytest.raises(BadSignature):
        fed.verified(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
    for unsigned in (chunk, body, sealed):
        with pytest.raises(AttributeError):
            RunningSum(small()).add(unsigned)  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            decrypt_sum(fed.key, small(), [unsigned])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="verified"):
            Signed(unsigned, chunk_tensors(0, [chunk]))  # type: ignore[arg-type]


def test_altered_ciphertexts_are_refused_in_our_words(fed: Federation) -> None:
    """Who signs altered ciphertexts himself: they do not parse, or their magnitude gives them away."""
    terms = small(SLOTS - 1)
    (chunk,) = encrypt(fed.key, terms, np.ones(terms.length), 1.0)
    rng = np.random.default_rng(0)
    places = [*range(4, 100, 4), *rng.integers(100, len(chunk), 40)]
    reached = refused = harmless = 0
    for place in places:
        altered = bytearray(chunk)
        altered[place] ^= 1 << int(rng.integers(8))
        signed = fed.send(fed.server, fed.silos[0], [bytes(altered)])
        try:
            ckks._parse(fed.key._context, signed, 0, terms)
            reached += 1
        except PayloadError:
            refused += 1
        try:  # some bytes mean nothing to SEAL (reserved, or a field it does not read): then the sum is right
            assert np.abs(decrypt_sum(fed.key, terms, [signed]).values - 1).max() < 1e-6
            harmless += 1
        except PayloadError:
            pass
    assert refused > 0
    assert harmless < 5
    assert reached + refused == len(places)


def test_garbage_that_decrypts_is_caught_by_its_magnitude(fed: Federation) -> None:
    # Another group's ciphertexts parse: only what they decrypt to tells.
    (chunk,) = encrypt(GroupKey.generate(), small(), np.ones(5), 1.0)
    signed = fed.send(fed.server, fed.silos[0], [chunk])
    (vector,) = ckks._parse(fed.key._context, signed, 0, small())
    assert np.abs(vector.decrypt()).max() > 1e5
    with pytest.raises(NonFiniteUpdate, match="no sum of this run can have"):
        decrypt_sum(fed.key, small(), [signed])


@pytest.mark.parametrize("values", [[1e4 * 4, 1.0], [1.0, 3001.0], [1.0, 0.0], [1.0, -1.0], [1.0, 1.0, 0.5]])
def test_sums_that_the_terms_exclude(fed: Federation, values: list[float]) -> None:
    # Honest ciphertexts of a value above silos * weight * clip, of bad weights, of more than zeros behind.
    block = values + [0.0] * (SLOTS - len(values))
    chunk = length_prefixed(tenseal.ckks_vector(fed.key._context, block).serialize())
    with pytest.raises(NonFiniteUpdate):
        decrypt_sum(fed.key, small(1), [fed.send(fed.server, fed.silos[0], [chunk])])


def test_malformed_chunks(fed: Federation) -> None:
    terms = small(SLOTS)  # two ciphertexts
    (chunk,) = encrypt(fed.key, terms, np.zeros(SLOTS), 1.0)
    one = chunk[4 : 4 + int.from_bytes(chunk[:4], "big")]
    context = fed.key._context
    other_scale = tenseal.ckks_vector(context, [0.0] * SLOTS, scale=2.0**31).serialize()
    short = tenseal.ckks_vector(context, [0.0] * 7).serialize()
    cases: list[tuple[bytes, type[SecureflError]]] = [
        (b"", PayloadError),
        (chunk[:-1], PayloadError),
        (chunk + b"\0", PayloadError),
        (chunk[:70_000], PayloadError),
        (length_prefixed(one), PayloadError),
        (length_prefixed(one, b""), PayloadError),
        (length_prefixed(one, b"\xff" * 100), PayloadError),
        (length_prefixed(one, other_scale), PayloadError),
        (length_prefixed(one, short), PayloadError),
        (length_prefixed(one, bytes(DEFAULT.max_ciphertext + 1)), PayloadError),
        (bytes(2 * DEFAULT.max_ciphertext + 9), TooLarge),
    ]
    for bad, kind in cases:
        total = RunningSum(terms)
        with pytest.raises(kind, match="hospital-a"):
            total.add(fed.send(fed.silos[0], fed.server, [bad]))
        with pytest.raises(TooFewSilos):  # and nothing of it was added
            total.finish()
    with pytest.raises(WrongShape, match="chunk 7"):
        RunningSum(terms).add(fed.send(fed.silos[0], fed.server, [chunk], 7))


def test_bodies_that_are_no_chunks(fed: Federation) -> None:
    for tensors in (
        {},
        {"weights": np.zeros(3, np.uint8)},
        {"ckks.0": np.zeros(3, np.uint8)},
        {"ckks.000000": np.zeros(3, np.float32)},
        {"ckks.000000": np.zeros((3, 1), np.uint8)},
    ):
        with pytest.raises(PayloadError, match="hospital-a sent"):
            fed.send_tensors(fed.silos[0], fed.server, tensors)
    (chunk,) = encrypt(fed.key, small(), np.zeros(5), 1.0)
    signed = fed.send(fed.silos[0], fed.server, [chunk])
    assert repr(signed) == "Signed(1 chunks of hospital-a)"


def test_the_server_counts_silos_and_chunks(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("securefl.crypto.ckks_terms.CHUNK", 1)
    monkeypatch.setattr("securefl.crypto.ckks.CHUNK", 1)
    terms = Terms(length=SLOTS, silos=2, max_weight=1.0, clip=1.0)
    total = RunningSum(terms)
    with pytest.raises(TooFewSilos, match="no silo"):
        total.chunks()
    sent = [
        [fed.send(s, fed.server, [c], i) for i, c in enumerate(encrypt(fed.key, terms, np.zeros(SLOTS), 1.0))]
        for s in fed.silos
    ]
    total.add(sent[0][0])
    with pytest.raises(PayloadError, match="chunk 0 twice"):
        total.add(sent[0][0])
    with pytest.raises(TooFewSilos, match="hospital-a sent 1 of 2"):
        total.chunks()
    total.add(sent[0][1])
    for part in sent[1]:
        total.add(part)
    with pytest.raises(PayloadError, match="hospital-c is one silo more"):
        total.add(sent[2][0])
    assert total.finish() == ("hospital-a", "hospital-b")


# --- what mutants found, and one form for each ciphertext


PARAMETERS = [
    DEFAULT,
    POST_QUANTUM,
    Parameters(2048, (28, 25), 20),
    Parameters(8192, (60, 60), 40),  # its objects take more than one block of zstd
]


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_what_is_unpacked_for_seal_is_the_same_to_it(parameters: Parameters) -> None:
    terms = Terms(2 * parameters.slots - 1, silos=2, max_weight=1.0, clip=1.0, parameters=parameters)
    key = GroupKey.generate(parameters)
    (chunk,) = encrypt(key, terms, np.ones(terms.length), 1.0)
    size = int.from_bytes(chunk[:4], "big")
    frame = chunk[4 : 4 + size]
    vector = tenseal.ckks_vector_from(key._context, ckks_format.ciphertext(frame, parameters))
    assert bytes(vector.serialize()) == frame
    secret = group_key_release(key, {}).tensors["context"].tobytes()
    own = ckks_format.secret_context(secret, public_context(parameters), parameters)
    again = tenseal.context_from(own, 1)
    assert bytes(tenseal.ckks_vector_from(again, frame).serialize()) == frame
    assert tenseal.ckks_vector_from(again, frame).decrypt() == pytest.approx(
        [1.0] * parameters.slots, abs=1e-2
    )


def _object(frame: bytes) -> tuple[bytes, bytes, bytes]:
    """What is before, in and after the object of SEAL in a message of TenSEAL."""
    start, end = seal_object(frame)
    return frame[:start], frame[start:end], frame[end:]


def _around(frame: bytes, inside: bytes) -> bytes:
    """The message with another object in it; the two bytes of its slots stay, its length is written anew."""
    before, _, after = _object(frame)
    size = len(inside)
    return before[:5] + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + inside + after


PLAIN = 97 + 16 * DEFAULT.poly_modulus_degree  # bytes of a ciphertext before it is compressed
OTHER_FORMS: dict[str, Callable[[bytes], bytes]] = {
    "two sizes": lambda f: b"\x0a\x04\x80\x08\x80\x08" + f[4:],
    "a size of nothing": lambda f: b"\x0a\x03\x80\x10\x00" + f[4:],
    "a size of 33 bits": lambda f: b"\x0a\x05\x80\x90\x80\x80\x10" + f[4:],
    "another scale": lambda f: f[:-8] + struct.pack("<d", 2.0**31),
    "no scale": lambda f: f[:-9],
    "two scales": lambda f: f + f[-9:],
    "a field more": lambda f: f + b"\x22\x03abc",
    "uncompressed": lambda f: _around(f, packed(_object(f)[1][3:5], 0, unpacked(_object(f)[1], PLAIN))),
    "zlib": lambda f: _around(
        f, packed(_object(f)[1][3:5], 1, zlib.compress(unpacked(_object(f)[1], PLAIN)))
    ),
    "bytes after the end": lambda f: _around(f, packed(_object(f)[1][3:5], 2, _object(f)[1][16:] + b"\0")),
    "reserved bytes": lambda f: _around(f, _object(f)[1][:6] + b"\1\0" + _object(f)[1][8:]),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_what_seal_reads_but_does_not_write_is_refused(fed: Federation, form: str) -> None:
    """A first vector of two sizes made the sum one that no silo could open."""
    terms = small(SLOTS - 1)
    (chunk,) = encrypt(fed.key, terms, np.ones(terms.length), 1.0)
    assert _around(chunk[4:], _object(chunk[4:])[1]) == chunk[4:]
    altered = length_prefixed(OTHER_FORMS[form](chunk[4:]))
    for take in (RunningSum(terms).add, lambda signed: decrypt_sum(fed.key, terms, [signed])):
        with pytest.raises(PayloadError, match="malformed ciphertext"):
            take(fed.send(fed.silos[0], fed.server, [altered]))


@pytest.mark.parametrize("where", ["outside", "inside", "inside, packed", "key"])
def test_no_message_unpacks_to_more_than_it_must(fed: Federation, where: str) -> None:
    """33 KB of zstd for a gigabyte: SEAL before 4.3 unpacks all of it, in an object or in one within it."""
    terms = small(SLOTS - 1)
    (chunk,) = encrypt(fed.key, terms, np.ones(terms.length), 1.0)
    before, inside, _ = _object(chunk[4:])
    assert before[:2] == b"\x0a\x02"
    version, content = inside[3:5], unpacked(inside, PLAIN)
    within = content[:73] + packed(version, 2, bomb(content[89:97], 2**30))
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if where == "key":
        release = group_key_release(fed.key, {})
        context = release.tensors["context"].tobytes()
        start, end = seal_object(context, 78)
        size = 16 + len(bomb(b"", 2**30))
        lengths = [bytes([n & 127 | 128, n >> 7 & 127 | 128, n >> 14]) for n in (size + 4, size)]
        field = b"\x1a" + lengths[0] + b"\x0a" + lengths[1] + packed(version, 2, bomb(b"", 2**30))
        assert context[78:start] == b"\x1a" + context[79:82] + b"\x0a" + context[83:86]
        spoilt = replace(
            release, tensors={"context": np.frombuffer(context[:78] + field + context[end:], np.uint8)}
        )
        header = fed.header(fed.silos[0], fed.silos).model_copy(update={"kind": PayloadKind.GROUP_KEY})
        sealed = envelope.seal(
            encode_release(spoilt), header, fed.silos[0], [silo.card for silo in fed.silos]
        )
        with pytest.raises(PayloadError, match="not a CKKS group key"):
            open_group_key(fed.verified(sealed), fed.silos[1], party(fed.silos[0]), DEFAULT)
    else:
        altered = {
            "outside": packed(version, 2, bomb(content[:97], 2**30)),
            "inside": packed(version, 0, within),
            "inside, packed": packed(version, 2, pyarrow.compress(within, codec="zstd", asbytes=True)),
        }[where]
        signed = fed.send(fed.silos[0], fed.server, [length_prefixed(_around(chunk[4:], altered))])
        with pytest.raises(PayloadError, match="malformed ciphertext"):
            RunningSum(terms).add(signed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest < 2**15  # KiB


def test_chunks_are_numbered_in_one_alphabet(fed: Federation) -> None:
    (chunk,) = encrypt(fed.key, small(), np.zeros(5), 1.0)
    tensors = chunk_tensors(0, [chunk]) | {"ckks.00000\N{ARABIC-INDIC DIGIT ZERO}": np.zeros(3, np.uint8)}
    with pytest.raises(PayloadError, match="not a chunk"):
        fed.send_tensors(fed.silos[0], fed.server, tensors)
