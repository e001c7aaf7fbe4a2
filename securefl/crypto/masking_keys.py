"""The keys of one masked round: what is derived from a silo's root, what is sealed to whom, by which suite.

Shared by client and server: of two neighbours the one with the smaller fingerprint derives the pair's seed
from its root and seals it to the other's mask key, whose private half follows from the other's root. So a
pair's masks follow from either root and from nothing else. No state, no messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from securefl.crypto.graph import threshold as two_thirds
from securefl.crypto.identity import ED25519_SIGNATURE, Card, Identity, Signatures, length_prefixed
from securefl.errors import DecryptionFailed, PayloadError

KEY_SEED = 64 + 32  # bytes: ML-KEM-768, X25519
_MLKEM_PUBLIC = 1184
_SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


@dataclass(frozen=True)
class KeyPair:
    """An ephemeral key pair: the public bytes, and the private half as its suite holds it."""

    public: bytes
    private: Any = field(repr=False)


@dataclass(frozen=True)
class SharePair:
    """One holder's shares of a dealer's two secrets, each with the salt of its commitment, 32 bytes each."""

    root: bytes = field(repr=False)
    root_salt: bytes = field(repr=False)
    blind: bytes = field(repr=False)
    blind_salt: bytes = field(repr=False)

    def packed(self) -> bytes:
        """What is sealed to the holder."""
        return self.root + self.root_salt + self.blind + self.blind_salt

    @classmethod
    def unpacked(cls, data: bytes) -> SharePair:
        """The inverse of `packed`, for 128 bytes."""
        return cls(data[:32], data[32:64], data[64:96], data[96:])


class Suite(Protocol):
    """The public-key operations of a round. One exists; explorations of the protocol bring a cheap one."""

    def sign(self, identity: Identity, context: bytes, digest: bytes) -> bytes:
        """`identity`'s signature of `context` and the 32-byte digest."""
        ...

    def verify(self, card: Card, context: bytes, digest: bytes, signature: bytes) -> None:
        """Raises BadSignature unless `signature` is that of the card's holder."""
        ...

    def key_pair(self, seed: bytes) -> KeyPair:
        """The key pair of a secret seed of KEY_SEED bytes."""
        ...

    def seal(self, public: bytes, plain: bytes, info: bytes) -> bytes:
        """`plain` for the holder of `public`, bound to `info`. Raises PayloadError for a key that is none."""
        ...

    def open(self, private: Any, sealed: bytes, info: bytes) -> bytes:
        """Undo `seal`. Raises DecryptionFailed."""
        ...


class HybridSuite:
    """Ed25519 with ML-DSA-65, and HPKE (RFC 9180) over X25519 with ML-KEM-768: both halves must fall."""

    def sign(self, identity: Identity, context: bytes, digest: bytes) -> bytes:
        signatures = identity.sign(context, digest)
        return signatures.ed25519 + signatures.mldsa65

    def verify(self, card: Card, context: bytes, digest: bytes, signature: bytes) -> None:
        halves = Signatures(signature[:ED25519_SIGNATURE], signature[ED25519_SIGNATURE:])
        card.verify(context, digest, halves)

    def key_pair(self, seed: bytes) -> KeyPair:
        mlkem = MLKEM768PrivateKey.from_seed_bytes(seed[:64])
        x25519 = X25519PrivateKey.from_private_bytes(seed[64:])
        public = mlkem.public_key().public_bytes_raw() + x25519.public_key().public_bytes_raw()
        return KeyPair(public, hpke.MLKEM768X25519PrivateKey(mlkem, x25519))

    def seal(self, public: bytes, plain: bytes, info: bytes) -> bytes:
        try:
            key = hpke.MLKEM768X25519PublicKey(
                MLKEM768PublicKey.from_public_bytes(public[:_MLKEM_PUBLIC]),
                X25519PublicKey.from_public_bytes(public[_MLKEM_PUBLIC:]),
            )
            return _SUITE.encrypt(plain, key, info)
        except ValueError:
            raise PayloadError("an ephemeral key is one that nothing can be sealed to") from None

    def open(self, private: Any, sealed: bytes, info: bytes) -> bytes:
        try:
            return _SUITE.decrypt(sealed, private, info)
        except (InvalidTag, ValueError):
            raise DecryptionFailed("a sealed part of a masked round does not open") from None


HYBRID = HybridSuite()


def _derive(secret: bytes, size: int, *labels: bytes | str | int) -> bytes:
    info = length_prefixed(*(one if isinstance(one, bytes) else str(one).encode() for one in labels))
    return HKDF(algorithm=SHA256(), length=size, salt=None, info=info).derive(secret)


def mask_key_seed(root: bytes, run: str, round: int, silo: str) -> bytes:
    """The seed (KEY_SEED bytes) of a silo's mask key, from its root (32 bytes)."""
    return _derive(root, KEY_SEED, b"securefl/1 mask key", run, round, silo)


def pair_seed(root: bytes, run: str, round: int, dealer: str, holder: str, adverts: bytes) -> bytes:
    """The seed (32 bytes) of a pair's masks, from the root of the one with the smaller fingerprint."""
    return _derive(root, 32, b"securefl/1 mask pair", run, round, dealer, holder, adverts)


def blind_hash(blind: bytes, adverts: bytes, silo: str) -> bytes:
    """What a dealer publishes of its blind (32 random bytes), for whoever rebuilds it from shares."""
    return _derive(blind, 32, b"securefl/1 mask blind", silo, adverts)


def seal_info(purpose: bytes, run: str, round: int, dealer: str, holder: str, adverts: bytes) -> bytes:
    """What a sealing of a masked round is bound to. purpose: b"shares" or b"pair"."""
    labels = (run.encode(), str(round).encode(), dealer.encode(), holder.encode(), adverts)
    return length_prefixed(b"securefl/1 masked " + purpose, *labels)


def share_threshold(threshold: int, cohort: int, advertised: int, members: int) -> int:
    """How many shares rebuild a secret that is shared in a neighbourhood of `members`.

    The cohort's threshold where that is everybody who advertised; else over two thirds of the neighbourhood,
    or the cohort's part of it if that is more.
    """
    if members == advertised:
        return threshold
    return max(two_thirds(members), threshold * members // cohort)
