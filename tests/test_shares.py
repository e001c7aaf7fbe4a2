"""Shares: any threshold of them give the secret, fewer say nothing, and a wrong one is named."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from Crypto.Protocol.SecretSharing import Shamir

from securefl.crypto.shares import check, combine, commit, split
from securefl.errors import ProtocolError, TooFewSilos, UsageError

SECRET = bytes(range(32))


@pytest.mark.parametrize(("threshold", "holders"), [(2, 2), (2, 4), (3, 4), (4, 5)])
def test_any_threshold_of_shares_give_the_secret(threshold: int, holders: int) -> None:
    shares = split(SECRET, threshold, holders)
    for size in range(threshold, holders + 1):
        for chosen in itertools.combinations(range(1, holders + 1), size):
            assert combine({number: shares[number - 1] for number in chosen}, threshold) == SECRET


def _completing(known: list[tuple[int, bytes]], wanted: bytes) -> bytes:
    """The value of holder 3 with which `known` (of holders 1 and 2) combine to `wanted`, by linear algebra.

    Combining is affine over bits in the third value; its 128 columns are found by trying each bit, and the
    system is solved by elimination over GF(2).
    """

    def combined(third: int) -> int:
        return int.from_bytes(Shamir.combine([*known, (3, third.to_bytes(16, "big"))]), "big")

    base = combined(0)
    basis: dict[int, tuple[int, int]] = {}  # highest bit -> (column, the value that gives it)
    for bit in range(128):
        column, value = combined(1 << bit) ^ base, 1 << bit
        while column and column.bit_length() in basis:
            other, made = basis[column.bit_length()]
            column, value = column ^ other, value ^ made
        assert column, "the third value does not decide everything, so two would tell something"
        basis[column.bit_length()] = (column, value)
    rest, third = int.from_bytes(wanted, "big") ^ base, 0
    while rest:
        column, value = basis[rest.bit_length()]
        rest, third = rest ^ column, third ^ value
    return third.to_bytes(16, "big")


def test_fewer_shares_fit_every_secret() -> None:
    """With two shares of three every other secret is as possible: a third share that completes it exists."""
    shares = split(SECRET, 3, 5)
    for other in (bytes(32), b"\xff" * 32, SECRET[::-1]):
        halves = []
        for half in (slice(0, 16), slice(16, 32)):
            known = [(1, shares[0][half]), (2, shares[1][half])]
            halves.append(_completing(known, other[half]))
        assert combine({1: shares[0], 2: shares[1], 3: b"".join(halves)}, 3) == other
    with pytest.raises(TooFewSilos, match="2 shares of a secret that takes 3"):
        combine({1: shares[0], 2: shares[1]}, 3)


def test_shares_are_drawn_anew() -> None:
    assert split(SECRET, 3, 5) != split(SECRET, 3, 5)


def test_a_wrong_share_is_named_by_its_commitment() -> None:
    share, salt = split(SECRET, 2, 3)[1], bytes(32)
    commitment = commit(share, salt)
    assert commitment == hashlib.sha256(b"securefl/1 share" + salt + share).digest()
    check(2, share, salt, commitment)
    flipped = bytes([share[0] ^ 1]) + share[1:]
    for holder, bad_share, bad_salt in [
        (2, flipped, salt),
        (2, share, b"\x01" * 32),
        (2, share[:-1], salt),
        (0, share, salt),
        (1001, share, salt),
        (2, share, b""),
    ]:
        with pytest.raises(ProtocolError, match=f"share {holder} "):
            check(holder, bad_share, bad_salt, commitment)


def test_without_a_check_a_wrong_share_gives_another_secret() -> None:
    """What the commitments are for: the library does not notice."""
    shares = split(SECRET, 2, 3)
    flipped = bytes([shares[0][0] ^ 1]) + shares[0][1:]
    assert combine({1: flipped, 2: shares[1]}, 2) != SECRET


@pytest.mark.parametrize(("threshold", "holders"), [(1, 3), (0, 3), (4, 3), (2, 1001)])
def test_thresholds_that_protect_nothing_are_refused(threshold: int, holders: int) -> None:
    with pytest.raises(UsageError):
        split(SECRET, threshold, holders)


def test_sizes_are_checked() -> None:
    with pytest.raises(UsageError):
        split(bytes(16), 2, 3)
    with pytest.raises(UsageError):
        commit(bytes(31), bytes(32))
    with pytest.raises(ProtocolError, match="share 7"):
        combine({1: bytes(32), 7: bytes(31)}, 2)
    with pytest.raises(UsageError):
        combine({1: bytes(32)}, 1)


def test_many_holders() -> None:
    """The largest neighbourhood that a cohort of 1,000 draws is well below this."""
    shares = split(SECRET, 67, 100)
    assert combine({number: shares[number - 1] for number in range(34, 101)}, 67) == SECRET
