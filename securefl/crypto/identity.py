"""Who signs and who can open: a private `Identity`, its public `Card`, and hybrid signatures.

Every identity signs with Ed25519 and with ML-DSA-65 (FIPS 204), and a signature holds only if both do; it
receives under the hybrid KEM X25519 with ML-KEM-768 (FIPS 203) of HPKE (RFC 9180). So either half may fall,
the post-quantum or the classical one, and the other still protects. Private keys leave this room only
through `Identity.save`, under a passphrase where one is given; nothing here prints them, and an `Identity`
cannot be pickled. A parser's error holds what it read, so ours is raised when that one has been let go: not
even `__context__` leads from it to a private file.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey, MLDSA65PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from securefl.crypto import keyfiles
from securefl.errors import BadSignature, DecryptionFailed, SecureflError, UsageError
from securefl.files import read_limited, write_atomic, write_new
from securefl.messages import BAD_NAME, NAME
from securefl.release import canonical_json, parse_json

ED25519_SIGNATURE, MLDSA65_SIGNATURE = 64, 3309
SEALED_KEY = 1120 + 32 + 16  # bytes: encapsulation (ML-KEM-768 and X25519), a 32-byte key, AES-GCM tag
# The order is that of an encrypted file.
_SEEDS = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}
_PUBLIC = {"ed25519": 32, "mldsa65": 1952, "mlkem768": 1184, "x25519": 32}
_CARD_CONTEXT = b"securefl/1 card"
_FORMAT = "securefl.identity/1"
_CLOSED_FORMAT = "securefl.identity-encrypted/1"
_MAX_FILE = 64 * 2**10  # a card is 9 KiB and an identity half a KiB
_SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


def length_prefixed(*parts: bytes) -> bytes:
    """Each part after its length as 4 bytes, big-endian: no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _signed_message(context: bytes, digest: bytes) -> bytes:
    if len(digest) != 32:
        raise ValueError("a signature covers a 32-byte digest")
    return length_prefixed(context) + digest


def to_base64(data: bytes) -> str:
    """Standard base64 with padding."""
    return base64.b64encode(data).decode("ascii")


def from_base64(text: object, size: int) -> bytes:
    """The one canonical base64 of exactly `size` bytes. Raises ValueError, without the text, otherwise."""
    if not isinstance(text, str):
        raise ValueError("not a base64 string")
    data = b""
    with suppress(ValueError):
        data = base64.b64decode(text, validate=True)
    if len(data) != size or to_base64(data) != text:
        raise ValueError(f"not the base64 of {size} bytes")
    return data


@dataclass(frozen=True)
class Signatures:
    """Both signatures of one message: Ed25519 (64 bytes) and ML-DSA-65 (3309 bytes)."""

    ed25519: bytes
    mldsa65: bytes

    def document(self) -> dict[str, str]:
        """As JSON values (base64)."""
        return {"ed25519": to_base64(self.ed25519), "mldsa65": to_base64(self.mldsa65)}

    @classmethod
    def from_document(cls, value: object) -> Signatures:
        """The inverse of `document`. Raises ValueError for anything else."""
        if not isinstance(value, dict) or set(value) != {"ed25519", "mldsa65"}:
            raise ValueError("not a pair of signatures")
        return cls(
            from_base64(value["ed25519"], ED25519_SIGNATURE), from_base64(value["mldsa65"], MLDSA65_SIGNATURE)
        )


@dataclass(frozen=True)
class _PublicKeys:
    ed25519: Ed25519PublicKey
    mldsa65: MLDSA65PublicKey
    hybrid: hpke.MLKEM768X25519PublicKey


class Card(BaseModel):
    """The public half of an identity: a name, four public keys (base64), and its own signature over them.

    A card cannot be made without a valid signature by its signing keys, so nobody can put another's signing
    key on a card of his own. It does not prove that the name is true: compare `fingerprint` with its holder
    by another way first. Cards of one fingerprint are equal (ML-DSA signatures differ from one signing to
    the next). Raises ValidationError, or BadSignature where the card's own signature does not hold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    name: str = Field(pattern=NAME)
    ed25519: str
    mldsa65: str
    mlkem768: str
    x25519: str
    signature: dict[str, str]

    @model_validator(mode="after")
    def _proves_possession(self) -> Self:
        _ = self._keys  # raises ValueError where a key does not parse
        self.verify(_CARD_CONTEXT, bytes.fromhex(self.fingerprint), Signatures.from_document(self.signature))
        return self

    @cached_property
    def _keys(self) -> _PublicKeys:
        raw = {name: from_base64(getattr(self, name), size) for name, size in _PUBLIC.items()}
        return _PublicKeys(
            Ed25519PublicKey.from_public_bytes(raw["ed25519"]),
            MLDSA65PublicKey.from_public_bytes(raw["mldsa65"]),
            hpke.MLKEM768X25519PublicKey(
                MLKEM768PublicKey.from_public_bytes(raw["mlkem768"]),
                X25519PublicKey.from_public_bytes(raw["x25519"]),
            ),
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the length-prefixed version, name and four public keys."""
        raw = [from_base64(getattr(self, name), size) for name, size in _PUBLIC.items()]
        return _fingerprint(self.name, raw)

    @property
    def short_fingerprint(self) -> str:
        """The first 128 bits in groups of four characters, to read aloud."""
        return short_fingerprint(self.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Card) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Card({self.name}, {self.short_fingerprint})"

    __str__ = __repr__

    def verify(self, context: bytes, digest: bytes, signatures: Signatures) -> None:
        """Require both signatures of `context` and the 32-byte `digest`.

        Raises BadSignature naming the signer and the half that fails.
        """
        message = _signed_message(context, digest)
        for half, verifier, signature in (
            ("Ed25519", self._keys.ed25519.verify, signatures.ed25519),
            ("ML-DSA-65", self._keys.mldsa65.verify, signatures.mldsa65),
        ):
            try:
                verifier(signature, message)
            except InvalidSignature:
                raise BadSignature(f"the {half} signature of {self.name} does not hold") from None

    def seal_key(self, key: bytes, info: bytes) -> bytes:
        """HPKE base mode: `key` (32 bytes) for this card's holder alone, bound to `info`; 1168 bytes."""
        try:
            return _SUITE.encrypt(key, self._keys.hybrid, info)
        except ValueError:
            raise UsageError(f"the card of {self.name} has a key that nothing can be sealed to") from None

    def to_json(self) -> bytes:
        """The bytes of a card file: canonical JSON and a newline."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Card:
        """Parse a card file. `where` (the file) begins the message of a UsageError or BadSignature."""
        try:
            return cls.model_validate(parse_json(data))
        except BadSignature as error:
            fault: SecureflError = BadSignature(
                f"{where}: {error}; the card was altered or is not its holder's"
            )
        except ValidationError as error:
            field = ".".join(str(part) for part in error.errors()[0]["loc"])
            fault = UsageError(f"{where}: is not a securefl card ({field or 'a key'} is not valid)")
        except ValueError:
            fault = UsageError(f"{where}: is not a securefl card (not JSON)")
        raise fault  # outside: the errors above hold the file, which may be a private one

    def save(self, path: Path) -> None:
        """Write the card file, atomically. Raises UsageError."""
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Card:
        """Read a card file. Raises UsageError or BadSignature with one sentence."""
        return cls.from_json(read_limited(path, _MAX_FILE), str(path))


def short_fingerprint(fingerprint: str) -> str:
    """`Card.short_fingerprint` of a whole one."""
    return " ".join(fingerprint[i : i + 4] for i in range(0, 32, 4))


def _fingerprint(name: str, keys: list[bytes]) -> str:
    return hashlib.sha256(length_prefixed(b"1", name.encode(), *keys)).hexdigest()


class Identity:
    """The private half. Shows its name and fingerprint only; cannot be pickled or copied into JSON.

    card: the public half.
    """

    __slots__ = ("_ed25519", "_hybrid", "_mldsa65", "_mlkem768", "_x25519", "card")

    def __init__(self, name: str, seeds: dict[str, bytes]) -> None:
        """From raw seeds: ed25519 (32 bytes), mldsa65 (32), mlkem768 (64) and x25519 (32).

        Raises ValueError for other seeds or a name that is not one.
        """
        if {half: len(seed) for half, seed in seeds.items()} != _SEEDS:
            raise ValueError("an identity is made of four seeds of 32, 32, 64 and 32 bytes")
        self._ed25519 = Ed25519PrivateKey.from_private_bytes(seeds["ed25519"])
        self._mldsa65 = MLDSA65PrivateKey.from_seed_bytes(seeds["mldsa65"])
        self._mlkem768 = MLKEM768PrivateKey.from_seed_bytes(seeds["mlkem768"])
        self._x25519 = X25519PrivateKey.from_private_bytes(seeds["x25519"])
        self._hybrid = hpke.MLKEM768X25519PrivateKey(self._mlkem768, self._x25519)
        raw = [
            self._ed25519.public_key().public_bytes_raw(),
            self._mldsa65.public_key().public_bytes_raw(),
            self._mlkem768.public_key().public_bytes_raw(),
            self._x25519.public_key().public_bytes_raw(),
        ]
        ed25519, mldsa65, mlkem768, x25519 = map(to_base64, raw)
        self.card = Card(
            name=name,
            ed25519=ed25519,
            mldsa65=mldsa65,
            mlkem768=mlkem768,
            x25519=x25519,
            signature=self.sign(_CARD_CONTEXT, bytes.fromhex(_fingerprint(name, raw))).document(),
        )

    @classmethod
    def generate(cls, name: str) -> Identity:
        """A new identity from the operating system's randomness. Raises UsageError for a bad name."""
        if re.fullmatch(NAME, name) is None:
            raise UsageError(BAD_NAME)
        return cls(name, {half: os.urandom(size) for half, size in _SEEDS.items()})

    @property
    def name(self) -> str:
        return self.card.name

    def __repr__(self) -> str:
        return f"Identity({self.name}, {self.card.short_fingerprint}, private keys hidden)"

    def __reduce__(self) -> NoReturn:
        raise SecureflError(f"the identity of {self.name} cannot be serialised; use its save")

    def sign(self, context: bytes, digest: bytes) -> Signatures:
        """Both signatures over the length-prefixed `context` and a 32-byte `digest`."""
        message = _signed_message(context, digest)
        return Signatures(self._ed25519.sign(message), self._mldsa65.sign(message))

    def open_key(self, sealed: bytes, info: bytes) -> bytes:
        """Undo `Card.seal_key`. Raises DecryptionFailed."""
        try:
            return _SUITE.decrypt(sealed, self._hybrid, info)
        except (InvalidTag, ValueError):
            raise DecryptionFailed(f"a key sealed to {self.name} does not open") from None

    def save(self, path: Path, passphrase: bytes | None = None) -> None:
        """Write the private file: mode 0600, whole or not at all, never over another file.

        passphrase: closes it (scrypt and AES-256-GCM, see WIRE.md). Raises UsageError.
        """
        seeds = {
            "ed25519": self._ed25519.private_bytes_raw(),
            "mldsa65": self._mldsa65.private_bytes_raw(),
            "mlkem768": self._mlkem768.private_bytes_raw(),
            "x25519": self._x25519.private_bytes_raw(),
        }
        document: dict[str, Any] = {"name": self.name, "fingerprint": self.card.fingerprint}
        if passphrase is None:
            document["format"] = _FORMAT
            document["seeds"] = {half: to_base64(seed) for half, seed in seeds.items()}
        else:
            salt, nonce = os.urandom(keyfiles.SALT), os.urandom(keyfiles.NONCE)
            document["format"] = _CLOSED_FORMAT
            document |= {"salt": to_base64(salt), "nonce": to_base64(nonce)}
            plain = b"".join(seeds[half] for half in _SEEDS)
            closed = keyfiles.close_with(passphrase, salt, nonce, plain, canonical_json(document))
            document["ciphertext"] = to_base64(closed)
        write_new(path, canonical_json(document) + b"\n", 0o600)

    @staticmethod
    def is_encrypted(path: Path) -> bool:
        """Whether opening the private file takes a passphrase. Raises UsageError as `load` does."""
        return bool(_private_document(path)["format"] == _CLOSED_FORMAT)

    @classmethod
    def load(cls, path: Path | str, passphrase: bytes | None = None) -> Identity:
        """Read what `save` wrote.

        Raises UsageError where others can reach the file, where it is malformed, where the passphrase is
        wrong or missing, and where one is given for a file that has none: who gives it believes it is there.
        """
        path = Path(path)
        document = _private_document(path)
        encrypted = document["format"] == _CLOSED_FORMAT
        if encrypted and passphrase is None:
            raise UsageError(
                f"{path}: is encrypted; give --passphrase-file, or enter the passphrase when asked"
            )
        if not encrypted and passphrase is not None:
            raise UsageError(
                f"{path}: is not encrypted, though a passphrase was given; leave it out, or make a new key "
                "with a passphrase"
            )
        identity, opens = None, True
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            seeds = _opened(document, passphrase) if passphrase is not None else _plain(document)
            opens = seeds is not None
            identity = None if seeds is None else cls(document["name"], seeds)
        if not opens:
            raise UsageError(f"{path}: does not open; the passphrase is wrong, or the file was altered")
        if identity is None or identity.card.fingerprint != document["fingerprint"]:
            raise _damaged(path)
        return identity


def _damaged(path: Path) -> UsageError:
    return UsageError(f"{path}: is not a securefl identity, or was damaged; restore it or make a new one")


def _private_document(path: Path) -> dict[str, Any]:
    """A private file as far as its kind: a JSON object of one of the two formats."""
    data = keyfiles.read_guarded(path, _MAX_FILE, "a private key", private=True)
    document: Any = None
    with suppress(ValueError):
        document = parse_json(data)
    if not isinstance(document, dict) or document.get("format") not in (_FORMAT, _CLOSED_FORMAT):
        raise _damaged(path)
    return document


def _plain(document: dict[str, Any]) -> dict[str, bytes]:
    if set(document) != {"format", "name", "fingerprint", "seeds"} or set(document["seeds"]) != set(_SEEDS):
        raise ValueError
    return {half: from_base64(document["seeds"][half], size) for half, size in _SEEDS.items()}


def _opened(document: dict[str, Any], passphrase: bytes) -> dict[str, bytes] | None:
    """The seeds of an encrypted file; None where it does not open. Raises ValueError for a malformed one."""
    sizes = {
        "salt": keyfiles.SALT,
        "nonce": keyfiles.NONCE,
        "ciphertext": sum(_SEEDS.values()) + keyfiles.TAG,
    }
    if set(document) != {"format", "name", "fingerprint", *sizes}:
        raise ValueError
    raw = {name: from_base64(document[name], size) for name, size in sizes.items()}
    clear = canonical_json({name: value for name, value in document.items() if name != "ciphertext"})
    plain = keyfiles.open_with(passphrase, raw["salt"], raw["nonce"], raw["ciphertext"], clear)
    if plain is None:
        return None
    ends = list(accumulate(_SEEDS.values()))
    return {half: plain[end - size : end] for (half, size), end in zip(_SEEDS.items(), ends, strict=True)}
