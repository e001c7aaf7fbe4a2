"""The auditor's signature under an audit: who says so, and that not a byte of the files was changed.

It covers the files of a finished audit by their hashes, and knows nothing of what they say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from securefl.crypto.documents import parse_signed, sign_document
from securefl.crypto.identity import Card, Identity
from securefl.errors import BadSignature, UsageError
from securefl.files import read_limited, write_atomic
from securefl.messages import FINGERPRINT

SIGNATURE: Final = "audit.sig"
_CONTEXT = b"securefl/1 audit"
_MAX_SIGNATURE = 16 * 2**10
_MAX_FILE = 256 * 2**20


class AuditSignature(BaseModel):
    """What the auditor signs. auditor: fingerprint of their card; files: SHA-256 by name; time: Unix
    seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["securefl.audit-signature/1"] = "securefl.audit-signature/1"
    auditor: str = Field(pattern=FINGERPRINT)
    files: dict[str, str] = Field(min_length=1, max_length=16)
    time: int = Field(ge=0, le=2**53)


def sign_audit(folder: Path, names: Sequence[str], identity: Identity, time: int) -> Path:
    """Sign the named files of an audit's folder; writes `audit.sig` there and returns its path.

    Raises UsageError for a file that cannot be read.
    """
    signed = AuditSignature(auditor=identity.card.fingerprint, files=_hashes(folder, names), time=time)
    path = folder / SIGNATURE
    write_atomic(path, sign_document(signed.model_dump(mode="json"), identity, _CONTEXT))
    return path


def verify_audit(folder: Path, card: Card) -> AuditSignature:
    """The signature of the holder of `card` under the files of `folder`, which are as they were signed.

    Raises UsageError for a file that is missing or no signature, BadSignature naming a file that was changed,
    or where another signed.
    """
    path = folder / SIGNATURE
    try:
        document, signed = parse_signed(read_limited(path, _MAX_SIGNATURE), AuditSignature)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if signed.auditor != card.fingerprint:
        raise BadSignature(f"{path}: was signed by another than {card.name}; give the auditor's card")
    try:
        document.verify(card, _CONTEXT)
    except BadSignature as error:
        raise BadSignature(f"{path}: does not hold: {error}") from None
    if any(name != Path(name).name for name in signed.files):
        raise BadSignature(f"{path}: names a file outside its folder")
    for name, found in _hashes(folder, list(signed.files)).items():
        if found != signed.files[name]:
            raise BadSignature(f"{folder / name}: was changed after {card.name} signed it")
    return signed


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    return {
        name: hashlib.sha256(read_limited(folder / name, _MAX_FILE)).hexdigest() for name in sorted(names)
    }
