"""A 32-byte secret in shares of which any `threshold` give it back and fewer say nothing (Shamir 1979).

On pycryptodome's `Crypto.Protocol.SecretSharing`, over GF(2^128): it shares 16 bytes, so the two halves of a
secret are shared apart. It returns garbage for a wrong share, so a dealer publishes a commitment to every
share and `check` names the one that differs. Nothing here knows whose secret it is; no messages, no files.

Cost: a split takes threshold * holders field operations and a combination threshold^2, in Python: a tenth of
a second for 64 holders, many seconds for 1,000, which is why cohorts above 64 share within neighbourhoods.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest

from Crypto.Protocol.SecretSharing import Shamir

from securefl.errors import ProtocolError, TooFewSilos, UsageError

SECRET_BYTES = 32
SALT_BYTES = 32
MAX_HOLDERS = 1000
_HALF = 16
_LABEL = b"securefl/1 share"


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """The shares, 32 bytes each, of the holders 1 .. `holders`, in that order.

    secret: 32 bytes; 2 <= threshold <= holders <= 1000 (a threshold of one would hand out the secret itself).
    The coefficients come from the operating system. Raises UsageError for other sizes.
    """
    if len(secret) != SECRET_BYTES:
        raise UsageError("a shared secret has 32 bytes")
    if not 2 <= threshold <= holders <= MAX_HOLDERS:
        raise UsageError(f"shares: a threshold from 2 to the number of holders, at most {MAX_HOLDERS}")
    halves = (Shamir.split(threshold, holders, half) for half in (secret[:_HALF], secret[_HALF:]))
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def combine(parts: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret behind shares by holder (from 1); the `threshold` with the lowest numbers are used.

    The shares must have passed `check`: a wrong one gives another secret, not an error. Raises TooFewSilos
    for fewer than `threshold`, ProtocolError naming the holder for a number or size that no share has.
    """
    if threshold < 2:
        raise UsageError("shares: a threshold of at least 2")
    for holder, share in parts.items():
        _check_form(holder, share)
    if len(parts) < threshold:
        raise TooFewSilos(f"{len(parts)} shares of a secret that takes {threshold}; nothing was recovered")
    chosen = sorted(parts)[:threshold]
    first = Shamir.combine([(holder, parts[holder][:_HALF]) for holder in chosen])
    second = Shamir.combine([(holder, parts[holder][_HALF:]) for holder in chosen])
    return first + second


def commit(share: bytes, salt: bytes) -> bytes:
    """SHA-256 of the label, the salt (32 random bytes, told to the holder alone) and the share (32 bytes).

    Both have one size, so no other pair encodes to the same bytes; the salt hides the share.
    """
    if len(share) != SECRET_BYTES or len(salt) != SALT_BYTES:
        raise UsageError("a commitment takes a share of 32 bytes and a salt of 32 bytes")
    return sha256(_LABEL + salt + share).digest()


def check(holder: int, share: bytes, salt: bytes, commitment: bytes) -> None:
    """Raises ProtocolError naming the holder unless `commitment` is that of its share."""
    _check_form(holder, share)
    if len(salt) != SALT_BYTES or not compare_digest(commit(share, salt), commitment):
        raise ProtocolError(f"share {holder} is not the one its dealer committed to; leave it out")


def _check_form(holder: int, share: bytes) -> None:
    if not 1 <= holder <= MAX_HOLDERS or len(share) != SECRET_BYTES:
        raise ProtocolError(f"share {holder} has a number or a size that no share has; leave it out")
