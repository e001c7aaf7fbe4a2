"""A second reader of masked rounds and CKKS terms, from WIRE.md alone: nothing of securefl is imported here.

It goes on from `reader`. Numbers are Python's, so it is slow and easy to read. Silos go by fingerprint.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import comb, prod, sqrt
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tests.vectors import reader
from tests.vectors.reader import Keys, Refusal, canonical, holds, lp, require, strict

Document = Mapping[str, Any]
Stream = tuple[bytes, int]  # the stream's seed, and 1 or -1


def words(*parts: bytes | str | int) -> bytes:
    """Each with its length before it: text as ASCII, numbers in decimal digits."""
    return lp(*(part if isinstance(part, bytes) else str(part).encode() for part in parts))


def statement(*parts: bytes | str | int) -> bytes:
    return hashlib.sha256(words(*parts)).digest()


def hkdf(secret: bytes, size: int, info: bytes) -> bytes:
    return HKDF(hashes.SHA256(), size, None, info).derive(secret)


# --- keys, seeds, masks


def mask_key_seed(root: bytes, run: str, round: int, silo: str) -> bytes:
    return hkdf(root, 96, words(b"securefl/1 mask key", run, round, silo))


def private_key(seed: bytes) -> Any:
    return reader.private({"mlkem768": seed[:64], "x25519": seed[64:]})


def public_key(seed: bytes) -> bytes:
    unused = {"ed25519": bytes(32), "mldsa65": bytes(32)}
    both = reader.public({**unused, "mlkem768": seed[:64], "x25519": seed[64:]})
    return both["mlkem768"] + both["x25519"]


def pair_seed(root: bytes, run: str, round: int, dealer: str, holder: str, adverts: bytes) -> bytes:
    return hkdf(root, 32, words(b"securefl/1 mask pair", run, round, dealer, holder, adverts))


def blind_hash(blind: bytes, adverts: bytes, silo: str) -> bytes:
    return hkdf(blind, 32, words(b"securefl/1 mask blind", silo, adverts))


def seal_info(purpose: str, run: str, round: int, dealer: str, holder: str, adverts: bytes) -> bytes:
    return words(f"securefl/1 masked {purpose}", run, round, dealer, holder, adverts)


def stream_seed(secret: bytes, run: str, round: int, vector: str, parties: Iterable[str]) -> bytes:
    """The label has no length before it."""
    return hkdf(secret, 32, b"securefl/1 mask stream" + words(run, round, vector, *sorted(parties)))


def keystream(seed: bytes, size: int) -> bytes:
    return Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(size))


def masked(values: Sequence[int], streams: Iterable[Stream], bits: int) -> list[int]:
    total = list(values)
    for seed, sign in streams:
        mask = struct.unpack(f"<{len(total)}I", keystream(seed, 4 * len(total)))
        total = [value + sign * word for value, word in zip(total, mask, strict=True)]
    return [value % 2**bits for value in total]


def pack(values: Iterable[int], bits: int) -> bytes:
    return b"".join(value.to_bytes(-(-bits // 8), "little") for value in values)


def unpack(data: bytes, bits: int, length: int) -> list[int]:
    width = -(-bits // 8)
    require(len(data) == width * length, "MalformedEnvelope")
    values = [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]
    require(all(value < 2**bits for value in values), "PayloadError")
    return values


# --- the graph


def two_thirds(members: int) -> int:
    return 2 * members // 3 + 1


def degree_for(n: int) -> int:
    """The least even degree whose three odds of failure add up to 2^-40 at most; n - 1 up to 64."""
    corrupt, gone = n // 3, n // 10

    def tail(marked: int, drawn: int, least: int) -> Fraction:
        hits = range(max(least, 0), min(marked, drawn) + 1)
        return Fraction(
            sum(comb(marked, x) * comb(n - 1 - marked, drawn - x) for x in hits), comb(n - 1, drawn)
        )

    def odds(k: int) -> Fraction:
        t = two_thirds(k + 1)
        cut = prod(Fraction(max(corrupt + gone - i, 0), n - i) for i in range(k // 2))
        return n * (tail(corrupt, k, t) + cut + tail(gone, k, k + 2 - t))

    if n <= 64:
        return n - 1
    return next((k for k in range(2, n - 1, 2) if odds(k) <= Fraction(1, 2**40)), n - 1)


def neighbours(silos: Iterable[str], digest: bytes) -> dict[str, list[str]]:
    ring = sorted(
        silos, key=lambda s: hashlib.sha256(b"securefl/1 mask graph" + digest + s.encode()).digest()
    )
    n, k = len(ring), degree_for(len(ring))
    if k >= n - 1:
        return {one: sorted(set(ring) - {one}) for one in ring}
    steps = [*range(-k // 2, 0), *range(1, k // 2 + 1)]
    return {one: sorted(ring[(at + step) % n] for step in steps) for at, one in enumerate(ring)}


def share_threshold(threshold: int, cohort: int, advertised: int, members: int) -> int:
    if members == advertised:
        return threshold
    return max(two_thirds(members), threshold * members // cohort)


# --- shares: bytes as polynomials over GF(2), the first bit that of x^127, mod x^128 + x^7 + x^2 + x + 1


def times(a: int, b: int) -> int:
    product = 0
    for bit in range(128):
        product ^= (b >> bit & 1) * (a << bit)
    for bit in range(255, 127, -1):
        product ^= (product >> bit & 1) * ((1 << 128 | 0b10000111) << bit - 128)
    return product


def inverse(a: int) -> int:
    """a^(2^128 - 2)."""
    power, found = a, 1
    for _ in range(127):
        power = times(power, power)
        found = times(found, power)
    return found


def split(secret: bytes, coefficients: Sequence[bytes], holders: int) -> list[bytes]:
    """coefficients: 32 bytes each, of x, x^2 ...; a share is that polynomial at 1, 2 ..., in each half."""
    shares = []
    for place in range(1, holders + 1):
        share = b""
        for half in (slice(0, 16), slice(16, 32)):
            value = 0
            for one in reversed((secret, *coefficients)):
                value = times(value, place) ^ int.from_bytes(one[half], "big")
            share += value.to_bytes(16, "big")
        shares.append(share)
    return shares


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    require(len(shares) >= threshold, "TooFewSilos")
    places, secret = sorted(shares)[:threshold], b""
    for half in (slice(0, 16), slice(16, 32)):
        value = 0
        for place in places:
            term = int.from_bytes(shares[place][half], "big")
            for other in places:
                if other != place:
                    term = times(term, times(other, inverse(place ^ other)))
            value ^= term
        secret += value.to_bytes(16, "big")
    return secret


def commitment(share: bytes, salt: bytes) -> bytes:
    return hashlib.sha256(b"securefl/1 share" + salt + share).digest()


# --- numbers, plans, models


def decode(total: Iterable[int], clip: float, bits: int, silos: int) -> list[float]:
    limit = (2 ** (bits - 1) - 1) // silos
    signed = [value - 2**bits if value >= 2 ** (bits - 1) else value for value in total]
    require(all(abs(value) <= silos * limit for value in signed), "PayloadError")
    return [value * (clip / limit) for value in signed]


def plan_digest(plan: Document) -> bytes:
    """The hash that the plans of one masked round have in common."""
    common = {key: value for key, value in plan.items() if key not in ("step", "relayed", "answer")}
    return hashlib.sha256(b"securefl/1 masked plan" + canonical(common)).digest()


def round_vectors(plan: Document, length: int) -> dict[str, dict[str, int]]:
    update = {"length": length, "bits": plan["sums"]["bits"]}
    return (
        {"update": update}
        if plan["sums"]["noise"]
        else {"update": update, "weight": {"length": 1, "bits": 32}}
    )


def model_fingerprint(arrays: Mapping[str, tuple[str, list[int], bytes]]) -> str:
    """arrays: type, shape and little-endian bytes by name."""
    spelled = {"F32": "<f4", "I64": "<i8", "U8": "|u1"}
    digest = hashlib.sha256()
    for name in sorted(arrays):
        dtype, shape, data = arrays[name]
        digest.update(lp(canonical([name, spelled[dtype], shape])) + data)
    return digest.hexdigest()


def ckks_terms(sums: Document, length: int, silos: int) -> dict[str, Any]:
    prime = 50 if sums["post_quantum"] else 54
    ciphertexts = -(-(length + 1) // 2048)
    return {
        "parameters": {"degree": 4096, "primes": [prime, prime], "scale": 30},
        "max_weight": 2.0 ** (prime - 32) * 0.99 / (silos * max(sums["clip"], 1.0)),
        "ciphertexts": ciphertexts,
        "chunks": {f"ckks.{at // 64:06d}": min(64, ciphertexts - at) for at in range(0, ciphertexts, 64)},
        "tolerance": 7.0 * sqrt(2048 * (10.5 + 1 / 12)) / 2.0**30 * sqrt(silos),
    }


# --- messages: form, then signature


def _is_bytes(*sizes: int) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if not isinstance(value, str) or re.fullmatch(r"[A-Za-z0-9_-]*={0,2}", value) is None:
            return False
        data = unbase64(value)
        return len(data) in sizes and base64.urlsafe_b64encode(data).decode() == value

    return check


def unbase64(text: str) -> bytes:
    """With - and _, padded."""
    try:
        return base64.urlsafe_b64decode(text)
    except ValueError:
        raise Refusal("PayloadError") from None


def _is_silo(value: Any) -> bool:
    return reader.is_text("[0-9a-f]{64}", value)


def _is_list(key: str, form: Mapping[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    """Of such objects, ascending by that member."""

    def check(value: Any) -> bool:
        whole = isinstance(value, list) and len(value) <= 1000 and all(_has(one, form) for one in value)
        return whole and all(a[key] < b[key] for a, b in pairwise(value))

    return check


def _has(value: Any, form: Mapping[str, Callable[[Any], bool]]) -> bool:
    return isinstance(value, dict) and set(value) == set(form) and all(form[key](value[key]) for key in form)


_RUN = {
    "run": lambda value: reader.is_text("[0-9a-f]{32}", value),
    "round": lambda value: reader.is_number(value, 1, 10**6),
}
_HASH, _SIGNATURE = _is_bytes(32), _is_bytes(3373)
_DEAL = {
    "holder": _is_silo,
    "root_commitment": _HASH,
    "blind_commitment": _HASH,
    "sealed": _is_bytes(0, 1264),
    "seed": _is_bytes(0, 1168),
}
_GIVEN = _is_list("dealer", {"dealer": _is_silo, "share": _HASH, "salt": _HASH})
FORMS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "advert": {
        **_RUN,
        "silo": _is_silo,
        "plan": _HASH,
        "model": _HASH,
        "mask_key": _is_bytes(1216),
        "cipher_key": _is_bytes(1216),
        "signature": _SIGNATURE,
    },
    "shares": {
        "adverts": _HASH,
        "dealer": _is_silo,
        "blind_hash": _HASH,
        "deals": _is_list("holder", _DEAL),
        "signature": _SIGNATURE,
    },
    "masked": {"adverts": _HASH},
    "survivors": {
        **_RUN,
        "signer": _is_silo,
        **dict.fromkeys(("adverts", "shared", "survivors", "plan", "model"), _HASH),
        "signature": _SIGNATURE,
    },
    "unmasking": {
        "adverts": _HASH,
        "blinds": _GIVEN,
        "roots": _GIVEN,
        "faults": lambda value: (
            isinstance(value, list) and all(map(_is_silo, value)) and all(a < b for a, b in pairwise(value))
        ),
    },
}


def digest_of(what: str, message: Document) -> bytes:
    """The digest that the signature of an advert, shares or survivors covers."""
    b64 = {key: unbase64(value) for key, value in message.items() if FORMS[what][key] is _HASH}
    match what:
        case "advert":
            keys = (unbase64(message["mask_key"]), unbase64(message["cipher_key"]))
            return statement(
                message["run"], message["round"], message["silo"], b64["plan"], b64["model"], *keys
            )
        case "shares":
            leaves = [deal_leaf(deal) for deal in message["deals"]]
            return statement(b64["adverts"], message["dealer"], b64["blind_hash"], *leaves)
    named = (b64[key] for key in ("adverts", "shared", "survivors", "plan", "model"))
    return statement(message["run"], message["round"], *named)


def deal_leaf(deal: Document) -> bytes:
    rest = (unbase64(deal[key]) for key in ("root_commitment", "blind_commitment", "sealed", "seed"))
    return statement(deal["holder"], *rest)


def read_message(what: str, text: bytes, keys: Keys) -> dict[str, Any]:
    """A message of a silo with these public keys, whose signature, where it has one, holds."""
    try:
        message = strict(text)
    except ValueError:
        raise Refusal("PayloadError") from None
    require(_has(message, FORMS[what]) and canonical(message) == text, "PayloadError")
    if what == "unmasking":
        both = {one["dealer"] for one in message["blinds"]} & {one["dealer"] for one in message["roots"]}
        require(not both, "PayloadError")
    if "signature" in message:
        signature = unbase64(message["signature"])
        context = f"securefl/1 {what}".encode()
        good = holds(keys, context, digest_of(what, message), signature[:64], signature[64:])
        require(good, "BadSignature")
    return dict(message)


def adverts_digest(adverts: Iterable[Document]) -> bytes:
    """The adverts in ascending order of their silos."""
    return statement(*(digest_of("advert", advert) for advert in adverts))


def list_hash(silos: Iterable[str]) -> bytes:
    return statement(*sorted(silos))


def unseal(seed: bytes, sealed: bytes, info: bytes) -> bytes:
    """What was sealed to the key of that seed."""
    try:
        return reader.SUITE.decrypt(sealed, private_key(seed), info)
    except (InvalidTag, ValueError):
        raise Refusal("DecryptionFailed") from None


# --- the server's last step


def opened_sum(
    plan: Document,
    adverts: Mapping[str, Document],
    shares: Mapping[str, Document],
    inputs: Mapping[str, Sequence[int]],
    given: Mapping[str, Document],
    vector: str,
    bits: int,
) -> list[int]:
    """The sum of one vector over the silos of `inputs`; everything by fingerprint. given: the unmaskings."""
    run, round = plan["run"], plan["round"]
    digest = adverts_digest(adverts[silo] for silo in sorted(adverts))
    near = neighbours(adverts, digest)

    def rebuilt(dealer: str, kind: str) -> bytes:
        group = sorted((dealer, *near[dealer]))
        found: dict[int, bytes] = {}
        for holder, unmasking in given.items():
            for one in unmasking[f"{kind}s"]:
                if one["dealer"] == dealer:
                    (deal,) = (deal for deal in shares[dealer]["deals"] if deal["holder"] == holder)
                    share, salt = unbase64(one["share"]), unbase64(one["salt"])
                    require(commitment(share, salt) == unbase64(deal[f"{kind}_commitment"]), "Commitment")
                    found[group.index(holder) + 1] = share
        needed = share_threshold(plan["sums"]["threshold"], len(plan["cohort"]), len(adverts), len(group))
        return combine(found, needed)

    streams: list[Stream] = []
    for silo in inputs:
        blind = rebuilt(silo, "blind")
        require(blind_hash(blind, digest, silo) == unbase64(shares[silo]["blind_hash"]), "BlindHash")
        streams.append((stream_seed(blind, run, round, vector, [silo]), -1))
    for silo in shares.keys() - inputs.keys():
        root = rebuilt(silo, "root")
        key = mask_key_seed(root, run, round, silo)
        require(public_key(key) == unbase64(adverts[silo]["mask_key"]), "MaskKey")
        for peer in inputs.keys() & set(near[silo]):
            if silo < peer:
                secret = pair_seed(root, run, round, silo, peer, digest)
            else:
                (deal,) = (deal for deal in shares[peer]["deals"] if deal["holder"] == silo)
                secret = unseal(
                    key, unbase64(deal["seed"]), seal_info("pair", run, round, peer, silo, digest)
                )
            # The smaller of two adds a pair's mask and the larger subtracts it; the server undoes that.
            streams.append((stream_seed(secret, run, round, vector, [silo, peer]), -1 if peer < silo else 1))
    total = [sum(column) for column in zip(*inputs.values(), strict=True)]
    return masked(total, streams, bits)
