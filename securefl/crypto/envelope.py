"""The sealed, signed byte string that travels: one format for 1 to 256 recipients (see WIRE.md).

Encrypt, then sign: the body is encrypted once under a fresh content key, that key is sealed to every
recipient, and both signatures cover the SHA-256 of all of it. The clear header is bound into the key's
derivation, into the body's authentication, into each sealing and into the signatures. On the way in:
sizes before allocation, strict parsing, the signatures before any decryption. This room parses no body.

Limits of what it gives: no forward secrecy (HPKE base mode to a long-lived key: who steals a recipient's
key file opens what was recorded before), and header, sizes and times are in the clear.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field, TypeAdapter, ValidationError

from securefl.crypto.identity import (
    ED25519_SIGNATURE,
    MLDSA65_SIGNATURE,
    SEALED_KEY,
    Card,
    Identity,
    Signatures,
    length_prefixed,
)
from securefl.errors import (
    DecryptionFailed,
    MalformedEnvelope,
    Replayed,
    TooLarge,
    UnknownSender,
    UnsupportedEnvelope,
    UsageError,
    WrongRecipient,
)
from securefl.files import read_limited, write_atomic
from securefl.messages import FINGERPRINT, RUN, Header, Party
from securefl.release import Limits as BodyLimits
from securefl.release import canonical_json

MAGIC = b"SECUREFL"
VERSION = 1  # of the wire format: the newest that this code reads and the one that it writes
SIGN_CONTEXT = b"securefl/1 envelope"
KEY_INFO = b"securefl/1 key"
CONTENT_INFO = b"securefl/1 content"
COMMIT_INFO = b"securefl/1 commitment"
_SIGNATURES = ED25519_SIGNATURE + MLDSA65_SIGNATURE
_TAG = 16
# The content key is used for one encryption only, so the nonce need not vary (NIST SP 800-38D, section 8).
_NONCE = bytes(12)


@dataclass(frozen=True)
class Limits:
    """Sizes that a receiver accepts; each is checked before anything of that size is allocated.

    max_header: 64 KiB; 256 recipients with the longest names take 38 KiB.
    max_recipients: 256, the largest cohort; each costs 1170 bytes and 0.1 ms.
    max_body: as `release.Limits`. It also keeps one encryption below the 2 GiB that the AES-GCM of
    `cryptography` takes at once.
    """

    max_header: int = 64 * 2**10
    max_recipients: int = 256
    max_body: int = BodyLimits().max_bytes

    @property
    def max_envelope(self) -> int:
        """The largest envelope that these limits allow, in bytes."""
        fixed = len(MAGIC) + 4 + 32 + 2 + 8 + _TAG + _SIGNATURES
        return fixed + self.max_header + self.max_recipients * (2 + SEALED_KEY) + self.max_body


DEFAULT_LIMITS = Limits()

_MAX_SEEN = 2**24  # bytes: some hundred thousand senders and runs
_SEEN = TypeAdapter(
    dict[
        Annotated[str, Field(pattern=RUN)],
        dict[Annotated[str, Field(pattern=FINGERPRINT)], Annotated[int, Field(ge=1, strict=True)]],
    ]
)


@dataclass(frozen=True, repr=False)
class Verified:
    """An envelope whose form, sender and signatures hold; still sealed. Only `verify` makes one."""

    header: Header
    encoded_header: bytes
    commitment: bytes
    sealed_keys: tuple[bytes, ...]
    ciphertext: memoryview
    digest: bytes

    def __repr__(self) -> str:
        header = self.header
        return f"Verified({header.kind} of {header.sender.name}, round {header.round}, step {header.step})"


# --- keys


def _derive(content_key: bytes, label: bytes, encoded_header: bytes) -> bytes:
    info = length_prefixed(label, hashlib.sha256(encoded_header).digest())
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(content_key)


def _content_keys(content_key: bytes, encoded_header: bytes) -> tuple[AESGCM, bytes]:
    """The body's cipher and the commitment to the content key.

    AES-GCM alone does not commit to its key: a sender could craft one ciphertext that two recipients open
    to different bodies under different keys. The commitment is a hash of the key, so only one key fits.
    """
    return (
        AESGCM(_derive(content_key, CONTENT_INFO, encoded_header)),
        _derive(content_key, COMMIT_INFO, encoded_header),
    )


def _key_info(encoded_header: bytes, recipient: Party) -> bytes:
    return length_prefixed(KEY_INFO, encoded_header, bytes.fromhex(recipient.key))


# --- sealing


def _encode_header(header: Header) -> bytes:
    return canonical_json(header.model_dump(mode="json"))


def _check_parties(header: Header, sender: Identity, recipients: Sequence[Card]) -> None:
    if header.sender != Party(name=sender.name, key=sender.card.fingerprint):
        raise UnknownSender(f"a header that names {header.sender.name} as sender was given to {sender.name}")
    if header.recipients != tuple(Party(name=card.name, key=card.fingerprint) for card in recipients):
        raise WrongRecipient("the recipients of a header are not the cards that its body is to be sealed to")


def seal(
    body: bytes, header: Header, sender: Identity, recipients: Sequence[Card], limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """The envelope of `body` from `sender` to `recipients`, who must be those of `header`, in its order.

    Raises UnknownSender or WrongRecipient where header and arguments disagree, MalformedEnvelope for a
    recipient named twice, TooLarge for a body or header above `limits`.
    """
    _check_parties(header, sender, recipients)
    _check_distinct(header)
    encoded = _encode_header(header)
    _check_size("body", len(body), limits.max_body)
    _check_size("header", len(encoded), limits.max_header)
    _check_size("list of recipients", len(recipients), limits.max_recipients)
    content_key = os.urandom(32)
    cipher, commitment = _content_keys(content_key, encoded)
    front = [MAGIC, length_prefixed(encoded), commitment, len(recipients).to_bytes(2, "big")]
    for party, card in zip(header.recipients, recipients, strict=True):
        sealed = card.seal_key(content_key, _key_info(encoded, party))
        front.append(len(sealed).to_bytes(2, "big") + sealed)
    size = len(body) + _TAG
    front.append(size.to_bytes(8, "big"))
    prefix = b"".join(front)
    # One buffer of the final size, filled in place and handed out without a copy (BytesIO gives its own bytes
    # away once no view of it is left): a body may have hundreds of megabytes.
    buffer = io.BytesIO()
    buffer.seek(len(prefix) + size + _SIGNATURES - 1)
    buffer.write(b"\0")
    with buffer.getbuffer() as view:
        view[: len(prefix)] = prefix
        cipher.encrypt_into(_NONCE, body, encoded, view[len(prefix) : len(prefix) + size])
        digest = hashlib.sha256(view[:-_SIGNATURES]).digest()
        signatures = sender.sign(SIGN_CONTEXT, digest)
        view[-_SIGNATURES:] = signatures.ed25519 + signatures.mldsa65
    return buffer.getvalue()


# --- opening


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(f"an envelope's {what} has size {size}, above the limit of {limit}")


class _Cursor:
    """Reads the envelope front to back without copying; refuses to read past the end."""

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)
        self._at = 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self._view) - self._at:
            raise MalformedEnvelope(f"an envelope ends inside its {what}")
        part = self._view[self._at : self._at + size]
        self._at += size
        return part

    def number(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what), "big")

    def finish(self) -> None:
        if self._at != len(self._view):
            raise MalformedEnvelope("an envelope has bytes after its end")


def _check_distinct(header: Header) -> None:
    names = {party.name for party in header.recipients}
    keys = {party.key for party in header.recipients}
    if not len(names) == len(keys) == len(header.recipients):
        raise MalformedEnvelope("an envelope names a recipient twice")


def _parse_header(encoded: bytes) -> Header:
    try:
        header = Header.model_validate_json(encoded)
    except ValidationError as error:
        faults = {str(e["loc"][0]): e["type"] for e in error.errors(include_input=False) if e["loc"]}
        for field in ("version", "suite", "kind"):
            if faults.get(field, "missing") != "missing":
                raise UnsupportedEnvelope(
                    f"an envelope has a {field} that this version does not know"
                ) from None
        field = min(faults, default="JSON")
        raise MalformedEnvelope(f"an envelope's header is malformed (first fault: {field[:40]})") from None
    if _encode_header(header) != encoded:
        raise MalformedEnvelope("an envelope's header is not in its canonical encoding")
    _check_distinct(header)
    return header


def _read_front(cursor: _Cursor, total: int, limits: Limits) -> tuple[Header, bytes]:
    _check_size("byte string", total, limits.max_envelope)
    if cursor.take(len(MAGIC), "first bytes") != MAGIC:
        raise MalformedEnvelope("the bytes are not a securefl envelope")
    size = cursor.number(4, "header length")
    _check_size("header", size, limits.max_header)
    encoded = bytes(cursor.take(size, "header"))
    header = _parse_header(encoded)
    _check_size("list of recipients", len(header.recipients), limits.max_recipients)
    return header, encoded


def read_header(envelope: bytes, limits: Limits = DEFAULT_LIMITS) -> Header:
    """The clear header, for routing and display. Nothing of it is proven; `verify` does that.

    Raises MalformedEnvelope, UnsupportedEnvelope or TooLarge.
    """
    return _read_front(_Cursor(envelope), len(envelope), limits)[0]


def _parse(
    envelope: bytes, limits: Limits
) -> tuple[Header, bytes, bytes, tuple[bytes, ...], memoryview, Signatures]:
    cursor = _Cursor(envelope)
    header, encoded = _read_front(cursor, len(envelope), limits)
    commitment = bytes(cursor.take(32, "key commitment"))
    if cursor.number(2, "count of keys") != len(header.recipients):
        raise MalformedEnvelope("an envelope does not hold one sealed key for each recipient")
    keys = []
    for _ in header.recipients:
        if cursor.number(2, "length of a key") != SEALED_KEY:
            raise MalformedEnvelope("an envelope holds a sealed key of another length than its suite's")
        keys.append(bytes(cursor.take(SEALED_KEY, "sealed keys")))
    size = cursor.number(8, "body length")
    _check_size("body", size, limits.max_body + _TAG)
    if size < _TAG:
        raise MalformedEnvelope("an envelope's body is shorter than its authentication tag")
    ciphertext = cursor.take(size, "body")
    signatures = Signatures(
        bytes(cursor.take(ED25519_SIGNATURE, "signatures")),
        bytes(cursor.take(MLDSA65_SIGNATURE, "signatures")),
    )
    cursor.finish()
    return header, encoded, commitment, tuple(keys), ciphertext, signatures


def verify(
    envelope: bytes, roster: Mapping[str, Card], limits: Limits = DEFAULT_LIMITS, floor: int = VERSION
) -> Verified:
    """Check everything that needs no private key: form, sender, both signatures. Decrypts nothing.

    roster: the cards of those who may send, by name; the sender must match by name and by key. Recipients
    need not be in it: a receiver does not have to know whom else a peer writes to. The result refers to
    `envelope`'s memory.

    floor: the oldest version that is read. Raises TooLarge, MalformedEnvelope, UnsupportedEnvelope,
    UnknownSender or BadSignature.
    """
    header, encoded, commitment, keys, ciphertext, signatures = _parse(envelope, limits)
    if header.version < floor:
        raise UnsupportedEnvelope(
            f"an envelope has version {header.version}, older than the {floor} required"
        )
    card = roster.get(header.sender.name)
    if card is None or card.name != header.sender.name:
        raise UnknownSender(f"{header.sender.name} is not in the roster")
    if card.fingerprint != header.sender.key:
        raise UnknownSender(f"{header.sender.name} sent with another key than the roster's")
    digest = hashlib.sha256(memoryview(envelope)[:-_SIGNATURES]).digest()
    card.verify(SIGN_CONTEXT, digest, signatures)
    return Verified(header, encoded, commitment, keys, ciphertext, digest)


def open_(verified: Verified, me: Identity) -> bytes:
    """The body. Raises WrongRecipient where `me` is not among the recipients, else DecryptionFailed."""
    mine = Party(name=me.name, key=me.card.fingerprint)
    header, encoded = verified.header, verified.encoded_header
    if mine not in header.recipients:
        raise WrongRecipient(f"an envelope of {header.sender.name} is not addressed to {me.name}")
    sealed = verified.sealed_keys[header.recipients.index(mine)]
    content_key = me.open_key(sealed, _key_info(encoded, mine))
    if len(content_key) != 32:
        raise DecryptionFailed(f"the content key that {header.sender.name} sent is not 32 bytes")
    cipher, commitment = _content_keys(content_key, encoded)
    if commitment != verified.commitment:
        raise DecryptionFailed(f"{header.sender.name} sealed another key to {me.name} than it committed to")
    try:
        return cipher.decrypt(_NONCE, verified.ciphertext, encoded)
    except InvalidTag:
        raise DecryptionFailed(f"the body that {header.sender.name} sent does not open") from None


class ReplayGuard:
    """Sequence numbers seen, per run and sender key; each must be above the last.

    `check` first, `accept` once the message is taken: one that is refused does not use up its number.
    Safe to share between threads.
    """

    def __init__(self, path: Path | None = None) -> None:
        """In memory only, or kept in a file that survives a restart: what it accepted is synced there first.

        Raises UsageError for a file that is not one of these: forgetting silently would let replays in.
        """
        self._path = path
        self._last: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        if path is not None and path.exists():
            try:
                self._last = _SEEN.validate_json(read_limited(path, _MAX_SEEN))
            except ValidationError:
                raise UsageError(f"{path}: is not a record of sequence numbers, or was damaged") from None

    def check(self, header: Header) -> None:
        """Raises Replayed where this sequence number, or a later one, was accepted before."""
        last = self._last.get(header.run, {}).get(header.sender.key, 0)
        if header.sequence <= last:
            raise Replayed(f"{header.sender.name} sent sequence {header.sequence} after {last} was accepted")

    def accept(self, header: Header) -> None:
        """Check, and remember the number."""
        with self._lock:
            self.check(header)
            seen = {**self._last.get(header.run, {}), header.sender.key: header.sequence}
            updated = {**self._last, header.run: seen}
            if self._path is not None:
                write_atomic(self._path, canonical_json(updated), 0o600)
            self._last = updated
