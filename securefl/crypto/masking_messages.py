"""What clients and the server of one masked round say to each other, and what the signatures in it cover.

Frozen, strict models without secrets of their own, each with one JSON document (bytes as base64) and one set
of uint8 arrays in which it travels inside a sealed envelope. The envelope names the sender; what *peers* must
verify carries its own signature by an identity. Silos are named by the fingerprints of their cards, and every
list is in ascending order, so that nothing occurs twice. No keys, no arithmetic, no files.

The five steps: `Advert` up, `AdvertList` down; `ShareMessage` up, `Delivery` down; `MaskedInput` up,
`SurvivorList` down; `SurvivorSignature` up, `UnmaskRequest` down; `Unmasking` up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Self, get_args, get_origin

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    model_validator,
)

from securefl.crypto.identity import ED25519_SIGNATURE, MLDSA65_SIGNATURE, SEALED_KEY, length_prefixed
from securefl.crypto.masks import MAX_BITS, MIN_BITS
from securefl.crypto.shares import SALT_BYTES, SECRET_BYTES
from securefl.errors import PayloadError, TooLarge, WrongShape
from securefl.messages import FINGERPRINT, RUN
from securefl.release import Tensors, canonical_json, parse_json

ADVERT_CONTEXT = b"securefl/1 advert"
SHARES_CONTEXT = b"securefl/1 shares"
SURVIVORS_CONTEXT = b"securefl/1 survivors"

MAX_SILOS = 1000
# The largest documents are the adverts (8 KiB a silo) and the signatures (5 KiB) of 1,000 silos.
MAX_DOCUMENT = 16 * 2**20
PUBLIC_KEY = 1184 + 32  # ML-KEM-768, X25519
SIGNATURE = ED25519_SIGNATURE + MLDSA65_SIGNATURE
# Two shares with their salts, under HPKE's encapsulation and tag.
SHARE_PAIR = 2 * (SECRET_BYTES + SALT_BYTES)
SEALED_SHARES = SEALED_KEY - 32 + SHARE_PAIR


def _ascending(names: tuple[str, ...]) -> tuple[str, ...]:
    if any(first >= second for first, second in pairwise(names)):
        raise ValueError("not in ascending order, each once")
    return names


def _exactly(size: int) -> Any:
    return Field(min_length=size, max_length=size)


Silo = Annotated[str, Field(pattern=FINGERPRINT)]
Silos = Annotated[tuple[Silo, ...], Field(max_length=MAX_SILOS, fail_fast=True), AfterValidator(_ascending)]
Digest = Annotated[bytes, _exactly(32)]
PublicKey = Annotated[bytes, _exactly(PUBLIC_KEY)]
Signature = Annotated[bytes, _exactly(SIGNATURE)]
VectorName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return ((name, value) for name, value in super().__repr_args__() if not _holds_bytes(value))


def _holds_bytes(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return any(isinstance(one, bytes | memoryview) for one in inner)


class VectorSpec(_Strict):
    """One vector of a round that is summed: its name, its number of values, and the bits of its modulus."""

    name: VectorName
    length: int = Field(ge=1, le=2**31)
    bits: int = Field(ge=MIN_BITS, le=MAX_BITS)


class RoundTerms(_Strict):
    """What the server's plan says of one masked round.

    threshold: of the cohort, the fewest silos whose sum may become known. plan, model: SHA-256 of the signed
    plan and of the model that came with it; a client takes them from what *it* received.
    """

    run: str = Field(pattern=RUN)
    round: int = Field(ge=1, le=1_000_000)
    threshold: int = Field(ge=2, le=MAX_SILOS)
    plan: Digest
    model: Digest
    vectors: tuple[VectorSpec, ...] = Field(min_length=1, max_length=16)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len({vector.name for vector in self.vectors}) != len(self.vectors):
            raise ValueError("a vector is named twice")
        return self


class Message(_Strict):
    """One message of a masked round; its bytes stay out of its repr."""

    def document(self) -> dict[str, Any]:
        """As JSON values, bytes in base64."""
        return self.model_dump(mode="json")

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of `document`. Raises PayloadError, which quotes nothing, for anything else."""
        message, fault = None, "document"
        misfit = next(_misfits(document, cls, ""), None)
        if misfit is not None:
            raise PayloadError(f"the {cls._title()} is malformed (field {misfit[:60] or fault})")
        try:
            message = cls.model_validate_json(canonical_json(dict(document)))
        except ValidationError as error:
            fault = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"]) or fault
        except (ValueError, TypeError, RecursionError):
            pass
        # Raised out here: a parser's error holds what it parsed, and that may be shares of a secret.
        if message is None or message.document() != document:
            raise PayloadError(f"the {cls._title()} is malformed (field {fault[:60]})")
        return message

    def tensors(self) -> Tensors:
        """The arrays in which it travels: `message`, uint8, the canonical JSON of `document`."""
        return {"message": np.frombuffer(canonical_json(self.document()), np.uint8)}

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Self:
        """The inverse of `tensors`. Raises TooLarge, WrongShape or PayloadError."""
        if set(tensors) != {"message"}:
            raise WrongShape(f"the {cls._title()} does not travel in the one array it has")
        return cls.from_document(_document(tensors["message"], cls._title()))

    @classmethod
    def _title(cls) -> str:
        return "".join(f" {c.lower()}" if c.isupper() else c for c in cls.__name__.lstrip("_")).strip()


def _document(array: NDArray[Any], title: str) -> dict[str, Any]:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise WrongShape(f"the {title} is not one row of bytes")
    if array.size > MAX_DOCUMENT:
        raise TooLarge(f"the {title} has {array.size} bytes, above the limit of {MAX_DOCUMENT}")
    document, data, canonical = None, array.tobytes(), False
    with suppress(ValueError, RecursionError):
        document = parse_json(data)
        canonical = canonical_json(document) == data
    if not isinstance(document, dict):
        raise PayloadError(f"the {title} is not a JSON object")
    if not canonical:
        raise PayloadError(f"the {title} is not in its canonical encoding")
    return document


def _misfits(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Where a JSON value has other fields than a message, or a list, an object or a scalar out of place.

    Each fault that pydantic finds in an object costs a copy of all that is in it: without this, and without
    stopping at a list's first fault, a message that is none would cost hundreds of times its bytes.
    """
    if get_origin(kind) is Annotated:
        yield from _misfits(value, get_args(kind)[0], where)
    elif get_origin(kind) is tuple:
        if not isinstance(value, list) or len(value) > MAX_SILOS:
            yield where
            return
        for place, one in enumerate(value):
            yield from _misfits(one, get_args(kind)[0], f"{where}.{place}")
    elif isinstance(kind, type) and issubclass(kind, Message):
        if not isinstance(value, dict) or value.keys() != kind.model_fields.keys():
            yield where
            return
        for name, field in kind.model_fields.items():
            yield from _misfits(value[name], field.annotation, f"{where}.{name}" if where else name)
    elif not isinstance(value, str | int):
        yield where


def _statement(*parts: bytes | str | int) -> bytes:
    """SHA-256 of the parts, each with its length before it."""
    encoded = (part if isinstance(part, bytes) else str(part).encode() for part in parts)
    return hashlib.sha256(length_prefixed(*encoded)).digest()


def list_hash(silos: Iterable[str]) -> bytes:
    """SHA-256 of a set of silos."""
    return _statement(*sorted(silos))


# --- step 0


class Advert(Message):
    """A silo's two ephemeral public keys of one round, and what it was asked to compute.

    plan and model are in it so that a server which hands out two models (Pasquini, Francati and Ateniese
    2022, "Eluding Secure Aggregation in Federated Learning via Model Inconsistency") is caught before
    anything is masked. Signatures of the survivors alone would not do: a threshold of them is enough, and
    the victim's need not be among them.
    mask_key: its sealed pair seeds open with it, and a dropped silo's is rebuilt. cipher_key: never shared.
    """

    run: str = Field(pattern=RUN)
    round: int = Field(ge=1, le=1_000_000)
    silo: Silo
    plan: Digest
    model: Digest
    mask_key: PublicKey
    cipher_key: PublicKey
    signature: Signature

    def statement(self) -> bytes:
        """The digest that its signature covers."""
        return _statement(
            self.run, self.round, self.silo, self.plan, self.model, self.mask_key, self.cipher_key
        )


class AdvertList(Message):
    """The adverts of a round, as the server relays them."""

    adverts: tuple[Advert, ...] = Field(max_length=MAX_SILOS, fail_fast=True)

    @model_validator(mode="after")
    def _order(self) -> Self:
        _ascending(tuple(advert.silo for advert in self.adverts))
        return self

    def digest(self) -> bytes:
        """The adverts-hash: it names the round, its silos, their keys, the plan and the model at once.

        Without the signatures, of which one statement has many.
        """
        return _statement(*(advert.statement() for advert in self.adverts))


# --- step 1


class Deal(Message):
    """What a dealer gives one holder: two committed shares, and the pair's seed if the dealer derives it.

    sealed: (share of the root, salt, share of the blind, salt) to the holder's cipher key; empty for the
    dealer's own shares. seed: the pair's seed sealed to the holder's mask key, empty where the holder's
    fingerprint is not the larger. The server sees it, and opens it if the holder is dropped.
    """

    holder: Silo
    root_commitment: Digest
    blind_commitment: Digest
    sealed: bytes
    seed: bytes

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if len(self.sealed) not in (0, SEALED_SHARES) or len(self.seed) not in (0, SEALED_KEY):
            raise ValueError("a sealed part of another size")
        return self

    def leaf(self) -> bytes:
        """Its digest, which the dealer's signature covers."""
        return _statement(self.holder, self.root_commitment, self.blind_commitment, self.sealed, self.seed)


def shares_statement(adverts: bytes, dealer: str, blind_hash: bytes, leaves: Iterable[bytes]) -> bytes:
    """The digest that a dealer signs: over the hashes of all its deals, so that each can travel alone."""
    return _statement(adverts, dealer, blind_hash, *leaves)


class ShareMessage(Message):
    """All deals of one dealer, its own among them. blind_hash: `masking_keys.blind_hash`, to check by."""

    adverts: Digest
    dealer: Silo
    blind_hash: Digest
    deals: tuple[Deal, ...] = Field(max_length=MAX_SILOS, fail_fast=True)
    signature: Signature

    @model_validator(mode="after")
    def _order(self) -> Self:
        _ascending(tuple(deal.holder for deal in self.deals))
        return self

    def statement(self) -> bytes:
        """The digest that its signature covers."""
        return shares_statement(self.adverts, self.dealer, self.blind_hash, self.leaves())

    def leaves(self) -> tuple[bytes, ...]:
        """The hashes of its deals."""
        return tuple(deal.leaf() for deal in self.deals)

    def dealing(self, holder: str, leaves: tuple[bytes, ...] | None = None) -> Dealing:
        """What of it the server relays to one holder; who relays to many computes the leaves once."""
        (deal,) = (deal for deal in self.deals if deal.holder == holder)
        return Dealing(
            adverts=self.adverts,
            dealer=self.dealer,
            blind_hash=self.blind_hash,
            leaves=self.leaves() if leaves is None else leaves,
            deal=deal,
            signature=self.signature,
        )


class Dealing(Message):
    """One deal with the hashes of its dealer's others, under the dealer's one signature."""

    adverts: Digest
    dealer: Silo
    blind_hash: Digest
    leaves: tuple[Digest, ...] = Field(max_length=MAX_SILOS, fail_fast=True)
    deal: Deal
    signature: Signature

    def statement(self) -> bytes:
        """The digest that its signature covers."""
        return shares_statement(self.adverts, self.dealer, self.blind_hash, self.leaves)


class Delivery(Message):
    """To one client: who shared (U1), and the deals for it of those of its neighbours who did."""

    shared: Silos
    dealings: tuple[Dealing, ...] = Field(max_length=MAX_SILOS, fail_fast=True)

    @model_validator(mode="after")
    def _order(self) -> Self:
        _ascending(tuple(dealing.dealer for dealing in self.dealings))
        return self


# --- step 2


class MaskedInput(Message):
    """A client's masked vectors, packed (`masks.pack`), by name; of `from_tensors`, views of its arrays."""

    adverts: Digest
    vectors: Mapping[VectorName, bytes | InstanceOf[memoryview]] = Field(exclude=True, max_length=16)

    def tensors(self) -> Tensors:
        """`message` as for the others, and a uint8 row `vector/NAME` for each vector, not copied."""
        rows = {f"vector/{name}": np.frombuffer(data, np.uint8) for name, data in self.vectors.items()}
        return {**super().tensors(), **rows}

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Self:
        """The inverse of `tensors`, not copied. Raises TooLarge, WrongShape or PayloadError."""
        rows = {name.removeprefix("vector/"): row for name, row in tensors.items() if name != "message"}
        if {"message", *(f"vector/{name}" for name in rows)} != set(tensors):
            raise WrongShape("a masked input has arrays of other names than its vectors'")
        if any(row.dtype != np.uint8 or row.ndim != 1 for row in rows.values()):
            raise WrongShape("a masked vector is not one row of bytes")
        head = _MaskedInputHead.from_document(_document(tensors["message"], cls._title()))
        message = None
        with suppress(ValidationError):
            packed = {name: row.data.toreadonly() for name, row in rows.items()}
            message = cls(adverts=head.adverts, vectors=packed)
        if message is None:
            raise PayloadError("a masked input has more vectors than a round, or a name that is none")
        return message


class _MaskedInputHead(Message):
    adverts: Digest


# --- steps 3 and 4


class SurvivorList(Message):
    """Whose masked input the server has (U2)."""

    survivors: Silos


class SurvivorSignature(Message):
    """One client's word on the round it took part in.

    shared, survivors: `list_hash` of U1 and U2. Peers check the signature against their own view; the fields
    only say, where it does not hold, what the two views disagree on.
    """

    run: str = Field(pattern=RUN)
    round: int = Field(ge=1, le=1_000_000)
    signer: Silo
    adverts: Digest
    shared: Digest
    survivors: Digest
    plan: Digest
    model: Digest
    signature: Signature

    def statement(self) -> bytes:
        """The digest that its signature covers; the same for all who agree."""
        return _statement(
            self.run, self.round, self.adverts, self.shared, self.survivors, self.plan, self.model
        )


class UnmaskRequest(Message):
    """The signatures of the survivors. The two lists repeat what was signed; a client acts on its own."""

    survivors: Silos
    dropped: Silos
    signatures: tuple[SurvivorSignature, ...] = Field(max_length=MAX_SILOS, fail_fast=True)

    @model_validator(mode="after")
    def _order(self) -> Self:
        _ascending(tuple(signature.signer for signature in self.signatures))
        return self


class GivenShare(Message):
    """A share of a dealer's secret, and the salt of its commitment."""

    dealer: Silo
    share: bytes = _exactly(SECRET_BYTES)
    salt: bytes = _exactly(SALT_BYTES)


class Unmasking(Message):
    """One client's shares: of the blinds of survivors and of the roots of the dropped, never both of one.

    faults: dealers whose shares to this client did not open or were not those committed to.
    """

    adverts: Digest
    blinds: tuple[GivenShare, ...] = Field(max_length=MAX_SILOS, fail_fast=True)
    roots: tuple[GivenShare, ...] = Field(max_length=MAX_SILOS, fail_fast=True)
    faults: Silos = ()

    @model_validator(mode="after")
    def _order(self) -> Self:
        blinds, roots = ([one.dealer for one in kind] for kind in (self.blinds, self.roots))
        _ascending(tuple(blinds))
        _ascending(tuple(roots))
        if set(blinds) & set(roots):
            raise ValueError("both kinds of share of one silo")
        return self
