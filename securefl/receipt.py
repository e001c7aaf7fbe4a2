"""A server's receipt: its signed word that it has admitted one envelope of one silo.

It says nothing of the envelope's content. This room makes and reads receipts and touches no file.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from securefl.crypto.documents import parse_signed, sign_document
from securefl.crypto.identity import Card, Identity
from securefl.errors import BadSignature, UsageError
from securefl.messages import FINGERPRINT, RUN

MAX_RECEIPT = 16 * 2**10  # bytes; a receipt is 5 KiB
RECEIPT: Final = "securefl.receipt/1"
_CONTEXT = b"securefl/1 receipt"


class Receipt(BaseModel):
    """What a receipt says, without its signature.

    silo: fingerprint of the card that signed the envelope. sequence: of the envelope's header.
    envelope_sha256: of the whole envelope. time: when the server admitted it, Unix seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["securefl.receipt/1"] = RECEIPT
    run: str = Field(pattern=RUN)
    silo: str = Field(pattern=FINGERPRINT)
    sequence: int = Field(ge=1, le=2**53)
    envelope_sha256: str = Field(pattern=FINGERPRINT)
    time: int = Field(ge=0, le=2**53)


def make_receipt(
    identity: Identity, *, run: str, silo: str, sequence: int, envelope_sha256: str, time: int
) -> bytes:
    """The bytes of a receipt, signed by the server's `identity`; the arguments are `Receipt`'s fields.

    Raises ValidationError (a ValueError) for values that a receipt cannot hold.
    """
    receipt = Receipt(run=run, silo=silo, sequence=sequence, envelope_sha256=envelope_sha256, time=time)
    return sign_document(receipt.model_dump(mode="json"), identity, _CONTEXT)


def read_receipt(data: bytes, card: Card) -> Receipt:
    """The receipt whose one byte string is `data`, signed by the holder of `card`, the server.

    Raises UsageError for what is no receipt, BadSignature for one that another made or that was altered.
    """
    if len(data) > MAX_RECEIPT:
        raise UsageError("the receipt is too large for one")
    try:
        document, receipt = parse_signed(data, Receipt)
    except ValueError as error:
        raise UsageError(f"the receipt {error}") from None
    try:
        document.verify(card, _CONTEXT)
    except BadSignature as error:
        raise BadSignature(f"the receipt does not hold: {error}") from None
    return receipt
