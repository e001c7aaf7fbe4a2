"""A JSON document with both signatures inside: how ledger lines, head records and receipts are written.

One byte string each: canonical JSON with the member `signature`, and a newline. The signatures cover the
SHA-256 of the canonical JSON without that member. What a document says is the business of who reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from securefl.crypto.identity import Card, Identity, Signatures
from securefl.errors import BadSignature
from securefl.release import canonical_json, parse_json

Content = TypeVar("Content", bound=BaseModel)


def sign_document(content: Mapping[str, Any], signer: Identity, context: bytes) -> bytes:
    """The bytes of `content` (without a member `signature`), signed; a newline ends them."""
    signatures = signer.sign(context, hashlib.sha256(canonical_json(dict(content))).digest())
    return canonical_json({**content, "signature": signatures.document()}) + b"\n"


@dataclass(frozen=True)
class SignedDocument:
    """A parsed document. content: without the signature; encoded: the canonical JSON of it."""

    content: Mapping[str, Any]
    encoded: bytes
    signatures: Signatures | None

    def verify(self, card: Card, context: bytes) -> None:
        """Require both signatures of the holder of `card`. Raises BadSignature."""
        if self.signatures is None:
            raise BadSignature(f"the signature of {card.name} is malformed")
        card.verify(context, hashlib.sha256(self.encoded).digest(), self.signatures)


def parse_document(data: bytes) -> SignedDocument:
    """The document whose one byte string is `data`; nothing in it is proven before `verify`.

    Raises ValueError, whose message has the form "is not ..." and quotes nothing.
    """
    try:
        document = parse_json(data)
    except ValueError:
        raise ValueError("is not JSON") from None
    if not isinstance(document, dict) or "signature" not in document:
        raise ValueError("is not a signed document")
    if not _is_canonical(document, data):
        raise ValueError("is not in its canonical encoding")
    signature = document.pop("signature")
    try:
        signatures = Signatures.from_document(signature)
    except ValueError:
        signatures = None
    return SignedDocument(document, canonical_json(document), signatures)


def parse_signed(data: bytes, kind: type[Content]) -> tuple[SignedDocument, Content]:
    """`parse_document` of a document that says what a `kind` says, and it; raises ValueError likewise."""
    document = parse_document(data)
    try:
        content = kind.model_validate_json(document.encoded)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"]) or "document"
        raise ValueError(f"is not one of securefl (field {field[:60]})") from None
    if canonical_json(content.model_dump(mode="json")) != document.encoded:
        raise ValueError("is not in its canonical encoding")
    return document, content


def _is_canonical(document: dict[str, Any], data: bytes) -> bool:
    try:
        return canonical_json(document) + b"\n" == data
    except (ValueError, RecursionError):  # what JSON parses and may not hold: a number beyond any float
        return False
