"""Envelopes: the round trip, and every way of tampering with the named refusal. See also test_vectors.py."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from securefl.crypto import envelope as rooms
from securefl.crypto.envelope import Limits, ReplayGuard, open_, read_header, seal, verify
from securefl.crypto.identity import Card, Identity
from securefl.errors import (
    BadSignature,
    DecryptionFailed,
    EnvelopeError,
    MalformedEnvelope,
    Replayed,
    TooLarge,
    UnknownSender,
    UnsupportedEnvelope,
    WrongRecipient,
)
from securefl.messages import Header, Party
from securefl.release import PayloadKind, canonical_json

SIZES = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}
SIGNATURES = 64 + 3309
RUN = "0123456789abcdef" * 2
BODY = b"the body of the message, long enough to span two AES blocks"


def seeds_of(name: str) -> dict[str, bytes]:
    return {half: hashlib.shake_256(f"{name} {half}".encode()).digest(size) for half, size in SIZES.items()}


ALICE, BOB, CAROL, EVE = (Identity(name, seeds_of(name)) for name in ("alice", "bob", "carol", "eve"))
ROSTER: Mapping[str, Card] = {one.name: one.card for one in (ALICE, BOB, CAROL)}


def party(card: Card) -> Party:
    return Party(name=card.name, key=card.fingerprint)


def header_of(sender: Identity = ALICE, to: tuple[Identity, ...] = (BOB, CAROL), **fields: Any) -> Header:
    values: dict[str, Any] = {
        "run": RUN,
        "round": 2,
        "step": "share",
        "sender": party(sender.card),
        "recipients": tuple(party(one.card) for one in to),
        "kind": PayloadKind.CENTROIDS,
        "sequence": 1,
        "time": 1_760_000_000,
        **fields,
    }
    return Header(**values)


def sealed(body: bytes = BODY, to: tuple[Identity, ...] = (BOB, CAROL), **fields: Any) -> bytes:
    return seal(body, header_of(to=to, **fields), ALICE, [one.card for one in to])


def signed(unsigned: bytes, by: Identity = ALICE) -> bytes:
    """`unsigned` with valid signatures: what a malicious but known sender can send."""
    signatures = by.sign(b"securefl/1 envelope", hashlib.sha256(unsigned).digest())
    return unsigned + signatures.ed25519 + signatures.mldsa65


def with_header(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The envelope with other header bytes, signed again by Alice."""
    size = int.from_bytes(data[8:12], "big")
    altered = change(data[12 : 12 + size])
    front = data[:8] + len(altered).to_bytes(4, "big") + altered
    return signed(front + data[12 + size : -SIGNATURES])


def regions(data: bytes) -> dict[str, tuple[int, int]]:
    """Where each part of an envelope lies, from the written format alone (WIRE.md)."""
    found, at = {}, 0

    def part(name: str, size: int) -> None:
        nonlocal at
        found[name] = (at, at + size)
        at += size

    part("magic", 8)
    part("header length", 4)
    part("header", int.from_bytes(data[8:12], "big"))
    part("commitment", 32)
    part("count", 2)
    for i in range(int.from_bytes(data[at - 2 : at], "big")):
        part(f"key length {i}", 2)
        part(f"key {i}", int.from_bytes(data[at - 2 : at], "big"))
    part("body length", 8)
    part("body", int.from_bytes(data[at - 8 : at], "big") - 16)
    part("tag", 16)
    part("ed25519", 64)
    part("mldsa65", 3309)
    assert at == len(data)
    return found


GOOD = sealed()
REGIONS = regions(GOOD)

# --- the round trip


@pytest.mark.parametrize("body", [b"", b"x", BODY, bytes(100_000)], ids=len)
def test_every_recipient_opens_the_body(body: bytes) -> None:
    data = sealed(body)
    assert isinstance(data, bytes)
    verified = verify(data, ROSTER)
    assert verified.header == read_header(data) == header_of()
    assert open_(verified, BOB) == open_(verified, CAROL) == body


def test_one_recipient_and_the_most_there_can_be() -> None:
    many = tuple(Identity(f"silo-{i}", seeds_of(f"silo-{i}")) for i in range(256))
    for to in ((BOB,), many):
        verified = verify(sealed(to=to), ROSTER)
        assert {open_(verified, one) for one in (to[0], to[-1])} == {BODY}


def test_the_body_travels_once_and_never_twice_the_same() -> None:
    body = os.urandom(50_000)
    overhead = len(sealed(body)) - len(body)
    assert overhead == REGIONS["body"][0] + 16 + SIGNATURES
    start, end = regions(sealed())["body"]
    assert len({sealed()[start:end] for _ in range(4)}) == 4
    assert BODY not in sealed()


def test_a_sender_who_writes_to_himself_can_read_it() -> None:
    data = sealed(to=(ALICE, BOB))
    assert open_(verify(data, ROSTER), ALICE) == BODY


# --- what does not come from where it says


@pytest.mark.parametrize(
    ("roster", "message"),
    [
        ({}, "alice is not in the roster"),
        ({"bob": BOB.card}, "alice is not in the roster"),
        ({"alice": EVE.card}, "alice is not in the roster"),
        ({"alice": Identity.generate("alice").card}, "another key"),
    ],
)
def test_the_sender_must_be_in_the_roster_by_name_and_key(roster: dict[str, Card], message: str) -> None:
    with pytest.raises(UnknownSender, match=message):
        verify(GOOD, roster)


def test_the_roster_is_asked_before_any_signature_is_checked() -> None:
    with pytest.raises(UnknownSender):
        verify(GOOD[:-1] + bytes([GOOD[-1] ^ 1]), {})


@pytest.mark.parametrize("half", ["ed25519", "mldsa65"])
@pytest.mark.parametrize("fault", ["zeroed", "first bit", "last bit", "of eve"])
def test_both_signatures_must_hold(half: str, fault: str) -> None:
    start, end = REGIONS[half]
    good = GOOD[start:end]
    eve = EVE.sign(b"securefl/1 envelope", hashlib.sha256(GOOD[:-SIGNATURES]).digest())
    bad = {
        "zeroed": bytes(end - start),
        "first bit": bytes([good[0] ^ 1]) + good[1:],
        "last bit": good[:-1] + bytes([good[-1] ^ 128]),
        "of eve": getattr(eve, half),
    }[fault]
    with pytest.raises(BadSignature, match="alice"):
        verify(GOOD[:start] + bad + GOOD[end:], ROSTER)


def test_an_envelope_without_either_signature_is_refused() -> None:
    for half in ("ed25519", "mldsa65"):
        start, end = REGIONS[half]
        with pytest.raises(MalformedEnvelope):
            verify(GOOD[:start] + GOOD[end:], ROSTER)


def test_signed_again_by_another_identity() -> None:
    """Eve cannot pass off Alice's sealed content as from Alice, nor as her own."""
    unsigned = GOOD[:-SIGNATURES]
    with pytest.raises(BadSignature):
        verify(signed(unsigned, EVE), ROSTER)
    stolen = with_header(GOOD, lambda h: h.replace(party_json(ALICE), party_json(EVE)))
    stolen = signed(stolen[:-SIGNATURES], EVE)
    verified = verify(stolen, {**ROSTER, "eve": EVE.card})
    with pytest.raises(DecryptionFailed):
        open_(verified, BOB)


def party_json(one: Identity) -> bytes:
    return canonical_json(party(one.card).model_dump())


def test_readdressed_by_the_sender_himself() -> None:
    """Even with Alice's signature, a header that was not sealed opens for nobody."""
    data = with_header(sealed(to=(BOB,)), lambda h: h.replace(party_json(BOB), party_json(CAROL)))
    verified = verify(data, ROSTER)
    with pytest.raises(DecryptionFailed):
        open_(verified, CAROL)
    with pytest.raises(WrongRecipient, match="not addressed to bob"):
        open_(verified, BOB)


def test_somebody_else_is_not_a_recipient() -> None:
    verified = verify(sealed(to=(BOB,)), ROSTER)
    for other in (CAROL, ALICE, Identity.generate("bob")):
        with pytest.raises(WrongRecipient):
            open_(verified, other)


@pytest.mark.parametrize("resigned", [False, True])
def test_headers_of_two_valid_messages_cannot_be_swapped(resigned: bool) -> None:
    one, two = sealed(round=2), sealed(round=3)
    swapped = with_header(one, lambda _: two[12 : 12 + int.from_bytes(two[8:12], "big")])
    if not resigned:
        with pytest.raises(BadSignature):
            verify(swapped[:-SIGNATURES] + one[-SIGNATURES:], ROSTER)
        return
    with pytest.raises(DecryptionFailed):
        open_(verify(swapped, ROSTER), BOB)


@pytest.mark.parametrize("part", ["commitment", "body", "tag", "key 0"])
def test_parts_of_two_valid_messages_cannot_be_mixed_even_by_the_sender(part: str) -> None:
    one, two = sealed(), sealed()
    start, end = REGIONS[part]
    mixed = signed(one[:start] + two[start:end] + one[end:-SIGNATURES])
    with pytest.raises(DecryptionFailed):
        open_(verify(mixed, ROSTER), BOB)


def test_keys_of_two_recipients_cannot_be_exchanged() -> None:
    (a, b), (c, d) = REGIONS["key 0"], REGIONS["key 1"]
    data = signed(GOOD[:a] + GOOD[c:d] + GOOD[b:c] + GOOD[a:b] + GOOD[d:-SIGNATURES])
    for one in (BOB, CAROL):
        with pytest.raises(DecryptionFailed):
            open_(verify(data, ROSTER), one)


# --- the hybrid


@pytest.mark.parametrize("half", ["mlkem768", "x25519"])
def test_opening_needs_both_halves_of_the_hybrid_key(half: str) -> None:
    other = Identity("bob", {**seeds_of("bob"), half: seeds_of("eve")[half]})
    verified = verify(GOOD, ROSTER)
    with pytest.raises(DecryptionFailed):
        other.open_key(verified.sealed_keys[0], rooms._key_info(verified.encoded_header, party(BOB.card)))


# --- one key for all recipients


def test_an_envelope_with_two_keys_for_two_recipients_is_refused() -> None:
    """A malicious sender seals a different content key to each: only the committed one opens anything."""
    header = header_of()
    encoded = canonical_json(header.model_dump(mode="json"))
    keys = [os.urandom(32), os.urandom(32)]
    ciphers = [rooms._content_keys(key, encoded) for key in keys]
    front = b"SECUREFL" + len(encoded).to_bytes(4, "big") + encoded + ciphers[0][1] + b"\x00\x02"
    for key, one in zip(keys, (BOB, CAROL), strict=True):
        sealed_key = one.card.seal_key(key, rooms._key_info(encoded, party(one.card)))
        front += len(sealed_key).to_bytes(2, "big") + sealed_key
    ciphertext = ciphers[0][0].encrypt(bytes(12), BODY, encoded)
    verified = verify(signed(front + len(ciphertext).to_bytes(8, "big") + ciphertext), ROSTER)
    assert open_(verified, BOB) == BODY
    with pytest.raises(DecryptionFailed, match="committed"):
        open_(verified, CAROL)


def test_aes_gcm_alone_would_open_under_two_keys() -> None:
    """Why there is a commitment: one ciphertext, two keys, two bodies, both accepted by AES-GCM.

    Dodis, Grubbs, Ristenpart and Woodage, Fast Message Franking (2018), section 3. GHASH is linear in the
    ciphertext, so one free block makes the tags under both keys equal.
    """
    keys, nonce = (b"\x01" * 32, b"\x02" * 32), bytes(12)
    blocks = os.urandom(16)
    constants = []
    for key in keys:
        h = int.from_bytes(_aes(key, bytes(16)), "big")
        mask = int.from_bytes(_aes(key, nonce + b"\x00\x00\x00\x01"), "big")
        constants.append((h, mask))
    lengths = int.from_bytes((0).to_bytes(8, "big") + (256).to_bytes(8, "big"), "big")
    first = int.from_bytes(blocks, "big")
    (h1, m1), (h2, m2) = constants

    def rest(h: int, mask: int) -> int:
        cube = _multiply(_multiply(h, h), h)
        return _multiply(first, cube) ^ _multiply(lengths, h) ^ mask

    squares = _multiply(h1, h1) ^ _multiply(h2, h2)
    second = _multiply(rest(h1, m1) ^ rest(h2, m2), _inverse(squares))
    tag = _multiply(second, _multiply(h1, h1)) ^ rest(h1, m1)
    data = blocks + second.to_bytes(16, "big") + tag.to_bytes(16, "big")
    one, two = (AESGCM(key).decrypt(nonce, data, b"") for key in keys)
    assert one != two


def _aes(key: bytes, block: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)  # noqa: S305


def _multiply(a: int, b: int) -> int:
    """GF(2^128) of GHASH (NIST SP 800-38D, algorithm 1)."""
    product, v = 0, b
    for i in range(127, -1, -1):
        if a >> i & 1:
            product ^= v
        v = (v >> 1) ^ (0xE1 << 120 if v & 1 else 0)
    return product


def _inverse(a: int) -> int:
    """a^(2^128 - 2)."""
    result, power = 1 << 127, a
    for _ in range(127):
        power = _multiply(power, power)
        result = _multiply(result, power)
    return result


# --- form


@pytest.mark.parametrize("part", [*REGIONS])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_bit_in_every_region_is_refused(part: str, where: str) -> None:
    start, end = REGIONS[part]
    at = {"first": start, "middle": (start + end) // 2, "last": end - 1}[where]
    data = GOOD[:at] + bytes([GOOD[at] ^ 1]) + GOOD[at + 1 :]
    expected: tuple[type[EnvelopeError], ...] = (MalformedEnvelope, TooLarge)
    if part in ("commitment", "body", "tag", "ed25519", "mldsa65") or part in ("key 0", "key 1"):
        expected = (BadSignature,)
    if part == "header":
        expected = (MalformedEnvelope, UnsupportedEnvelope, UnknownSender, BadSignature)
    with pytest.raises(expected):
        verify(data, ROSTER)


def test_truncated_at_every_boundary_and_one_byte_before_it() -> None:
    cuts = {at for start, end in REGIONS.values() for at in (start, start - 1, end - 1) if at >= 0}
    for cut in sorted(cuts):
        with pytest.raises(MalformedEnvelope):
            verify(GOOD[:cut], ROSTER)
        if cut >= REGIONS["header"][1]:
            assert read_header(GOOD[:cut]) == header_of()


@pytest.mark.parametrize("extra", [b"\x00", b"\n", GOOD])
def test_bytes_after_the_end(extra: bytes) -> None:
    with pytest.raises(MalformedEnvelope, match="after its end"):
        verify(GOOD + extra, ROSTER)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b'"version":1', b'"version":2', "version"),
        (b'"version":1', b'"version":0', "version"),
        (b'"version":1', b'"version":"1"', "version"),
        (b"mlkem768x25519+", b"x25519+", "suite"),
        (b'"kind":"centroids"', b'"kind":"rows"', "kind"),
    ],
)
def test_unknown_version_suite_or_kind(old: bytes, new: bytes, what: str) -> None:
    data = with_header(GOOD, lambda h: h.replace(old, new))
    for attempt in (lambda: verify(data, ROSTER), lambda: read_header(data)):
        with pytest.raises(UnsupportedEnvelope, match=what):
            attempt()


@pytest.mark.parametrize("field", ["version", "suite", "kind", "run", "sender"])
def test_a_missing_field_is_malformed(field: str) -> None:
    def without(header: bytes) -> bytes:
        return canonical_json({key: value for key, value in json.loads(header).items() if key != field})

    with pytest.raises(MalformedEnvelope):
        verify(with_header(GOOD, without), ROSTER)


def test_a_later_version_with_other_fields_is_unsupported_rather_than_malformed() -> None:
    data = with_header(GOOD, lambda _: b'{"version":2,"whatever":[]}')
    with pytest.raises(UnsupportedEnvelope, match="version"):
        verify(data, ROSTER)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h + b" ",
        lambda h: b" " + h,
        lambda h: h.replace(b'"round":2', b'"round": 2'),
        lambda h: h.replace(b'"round":2', b'"round":2.0'),
        lambda h: h.replace(b'"round":2', b'"round":2,"round":2'),
        lambda h: h.replace(b'"round":2', b'"round":true'),
        lambda h: h.replace(b'"round":2', b'"round":"2"'),
        lambda h: h.replace(b'"round":2', b'"round":0'),
        lambda h: h.replace(b'"round":2', b'"round":NaN'),
        lambda h: h.replace(b'"version":1', b'"version":true'),
        lambda h: h.replace(b'"version":1', b'"version":1.0'),
        lambda h: h.replace(b'"version":1,', b"").replace(b',"version":1', b""),
        lambda h: h.replace(b"share", b"\\u0073hare"),
        lambda h: h.replace(b"share", b"SHARE"),
        lambda h: h.replace(b"share", b"share\\n"),
        lambda h: h.replace(b'"step":', b'"extra":1,"step":'),
        lambda h: h.replace(b'"recipients":[', b'"recipients":[],"x":['),
        lambda h: canonical_json({**json.loads(h), "recipients": []}),
        lambda h: canonical_json({**json.loads(h), "recipients": json.loads(h)["recipients"][:1] * 2}),
        lambda h: json.dumps(json.loads(h)).encode(),
        lambda h: json.dumps(dict(reversed(json.loads(h).items())), separators=(",", ":")).encode(),
        lambda _: b"[" * 60_000,
        lambda _: b"[]",
        lambda _: b"",
        lambda _: b"\xff\xfe",
    ],
)
def test_a_header_has_one_encoding(change: Callable[[bytes], bytes]) -> None:
    data = with_header(GOOD, change)
    assert data != GOOD
    with pytest.raises(MalformedEnvelope):
        verify(data, ROSTER)
    with pytest.raises(MalformedEnvelope):
        read_header(data)


def test_the_count_of_keys_must_be_that_of_the_recipients() -> None:
    start, end = REGIONS["count"]
    for count in (0, 1, 3, 65535):
        data = signed(GOOD[:start] + count.to_bytes(2, "big") + GOOD[end:-SIGNATURES])
        with pytest.raises(MalformedEnvelope, match="one sealed key"):
            verify(data, ROSTER)


# --- sizes


def test_declared_sizes_are_refused_before_anything_is_read() -> None:
    for size in (64 * 2**10 + 1, 2**32 - 1):
        with pytest.raises(TooLarge, match="header"):
            read_header(GOOD[:8] + size.to_bytes(4, "big") + GOOD[12:])
    start, end = REGIONS["body length"]
    for size in (768 * 2**20 + 17, 2**64 - 1):
        with pytest.raises(TooLarge, match="body"):
            verify(GOOD[:start] + size.to_bytes(8, "big") + GOOD[end:], ROSTER)
    for size in range(16):
        with pytest.raises(MalformedEnvelope, match="tag"):
            verify(GOOD[:start] + size.to_bytes(8, "big") + GOOD[end:], ROSTER)


@pytest.mark.parametrize(
    ("tight", "what"),
    [
        (Limits(max_body=len(BODY) - 1), "body"),
        (Limits(max_recipients=1), "recipients"),
        (Limits(max_header=100), "header"),
    ],
)
def test_limits_hold_on_both_sides(tight: Limits, what: str) -> None:
    with pytest.raises(TooLarge, match=what):
        seal(BODY, header_of(), ALICE, [BOB.card, CAROL.card], tight)
    with pytest.raises(TooLarge):
        verify(GOOD, ROSTER, tight)


def test_the_limits_are_inclusive() -> None:
    size = REGIONS["header"][1] - REGIONS["header"][0]
    exact = Limits(max_header=size, max_recipients=2, max_body=len(BODY))
    assert open_(verify(GOOD, ROSTER, exact), BOB) == BODY
    assert exact.max_envelope == len(GOOD)
    with pytest.raises(TooLarge, match="byte string"):
        verify(GOOD + b"x", ROSTER, exact)


# --- sealing what does not fit together


def test_seal_refuses_a_header_of_somebody_else() -> None:
    with pytest.raises(UnknownSender, match="alice"):
        seal(BODY, header_of(ALICE), EVE, [BOB.card, CAROL.card])
    twin = Identity.generate("alice")
    with pytest.raises(UnknownSender):
        seal(BODY, header_of(ALICE), twin, [BOB.card, CAROL.card])


@pytest.mark.parametrize("cards", [[], [BOB], [CAROL, BOB], [BOB, CAROL, EVE], [BOB, EVE]], ids=len)
def test_seal_refuses_other_recipients_than_the_headers(cards: list[Identity]) -> None:
    with pytest.raises(WrongRecipient):
        seal(BODY, header_of(), ALICE, [one.card for one in cards])


def test_seal_refuses_a_recipient_named_twice() -> None:
    with pytest.raises(MalformedEnvelope, match="twice"):
        sealed(to=(BOB, BOB))


# --- replay


def test_replay() -> None:
    guard = ReplayGuard()
    header = verify(sealed(sequence=3), ROSTER).header
    guard.check(header)
    guard.check(header)  # a look does not use the number up
    guard.accept(header)
    for sequence in (1, 2, 3):
        with pytest.raises(Replayed, match="alice"):
            guard.check(header_of(sequence=sequence))
        with pytest.raises(Replayed):
            guard.accept(header_of(sequence=sequence))
    guard.accept(header_of(sequence=4))
    guard.accept(header_of(sequence=1, run="f" * 32))
    guard.accept(header_of(BOB, to=(ALICE,), sequence=1))
    guard.accept(header_of(Identity.generate("alice"), sequence=1))  # the key counts, not the name


def test_one_of_many_threads_is_accepted() -> None:
    guard, wins = ReplayGuard(), []

    def attempt() -> None:
        try:
            guard.accept(header_of())
            wins.append(1)
        except Replayed:
            pass

    threads = [threading.Thread(target=attempt) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1


# --- nothing secret shows


def test_what_is_opened_and_keyed_does_not_show() -> None:
    verified = verify(GOOD, ROSTER)
    assert repr(verified) == "Verified(centroids of alice, round 2, step share)"
    for seed in (*seeds_of("alice").values(), *seeds_of("bob").values()):
        assert seed not in GOOD


# --- mutants


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_no_mutant_verifies(data: st.DataObject) -> None:
    """Bit flips, cuts, insertions and copies of stretches: each refused by an EnvelopeError."""
    mutant = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        front = data.draw(st.booleans())  # the parser's part is short: look there half of the time
        at = data.draw(st.integers(0, min(len(mutant), 700 if front else len(mutant)) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "insert", "copy"])):
            case "flip":
                mutant[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                mutant[at] = data.draw(st.integers(0, 255))
            case "cut":
                del mutant[at : at + data.draw(st.integers(1, 64))]
            case "insert":
                mutant[at:at] = data.draw(st.binary(min_size=1, max_size=16))
            case "copy":
                other = data.draw(st.integers(0, len(mutant) - 1))
                mutant[at : at + 8] = mutant[other : other + 8]
        if not mutant:
            break
    if bytes(mutant) == GOOD:
        return
    with pytest.raises(EnvelopeError):
        verify(bytes(mutant), ROSTER)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, REGIONS["body length"][0] + 8 + len(BODY) + 15), st.integers(1, 255))
def test_no_change_signed_by_the_sender_opens_to_another_body(at: int, change: int) -> None:
    """The sender may sign what he likes; who opens it gets the very body or a refusal."""
    mutant = bytearray(GOOD[:-SIGNATURES])
    mutant[at] ^= change
    try:
        verified = verify(signed(bytes(mutant)), ROSTER)
        opened = {open_(verified, one) for one in (BOB, CAROL)}
    except EnvelopeError:
        return
    assert opened == {BODY}
    raise AssertionError("an altered envelope opened")


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, GOOD[:8] + noise, GOOD[: REGIONS["header"][1]] + noise):
        with pytest.raises(EnvelopeError):
            verify(data, ROSTER)
