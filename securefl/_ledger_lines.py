"""The lines of a ledger and its head record: their models and their one encoding.

Whether a line may follow others is for `_ledger_chain` to say. This room reads and writes no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from securefl.account import Account
from securefl.crypto.documents import SignedDocument, parse_document, sign_document
from securefl.crypto.identity import Card, Identity
from securefl.errors import BadSignature, LedgerCorrupt
from securefl.messages import FINGERPRINT, NAME, RUN, Party
from securefl.release import PayloadKind, PrivacyClaim, canonical_json

LINE_CONTEXT = b"securefl/1 ledger"
HEAD_CONTEXT = b"securefl/1 ledger-head"
CONSENT_CONTEXT = b"securefl/1 ledger-rotation"
MAX_LINE = 2**20  # a release to 256 recipients takes some 50 KiB
MAX_REASON = 400  # characters
MAX_HISTORY = 64  # the genesis line, and restores: 6 KiB of a head record
VERSION: Final = 2

_Hash = Annotated[str, Field(pattern=FINGERPRINT)]
DataSet = Annotated[str, Field(pattern=NAME)]
Place = tuple[str, int, str]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    version: Literal[2] = VERSION
    time: float


class _Entry(_Record):
    index: int = Field(ge=1)
    previous: _Hash


class Genesis(_Record):
    """The first line: whose ledger it is."""

    entry: Literal["genesis"] = "genesis"
    index: Literal[0] = 0
    card: Card
    previous: None = None


class _Step(_Entry):
    """A plan by its hash, and its place in a run."""

    run: str = Field(pattern=RUN)
    round: int = Field(ge=1, le=1_000_000)
    step: str = Field(pattern=r"^[a-z]{1,16}$")
    plan: _Hash


class _Answered(_Step):
    """bytes, envelope_sha256: of the sealed envelope that answers; plan_sequence: of the plan's envelope."""

    plan_sequence: int = Field(ge=1, le=2**53)
    bytes: int = Field(ge=1)
    envelope_sha256: _Hash

    @property
    def place(self) -> Place:
        """What may be answered once only."""
        return self.run, self.round, self.step


class ReleaseEntry(_Answered):
    """One release. body_sha256: of the body inside the envelope; account: of the data set after it."""

    entry: Literal["release"] = "release"
    kind: PayloadKind
    recipients: tuple[Party, ...] = Field(min_length=1, max_length=256)
    protection: str = Field(pattern=r"^[a-z-]{1,16}$")
    body_sha256: _Hash
    dataset: DataSet
    claim: PrivacyClaim
    account: Account


class RefusalEntry(_Answered):
    """A plan that was answered "unavailable". clause: of the policy; reason: for the owner, never sent."""

    entry: Literal["refusal"] = "refusal"
    clause: str = Field(pattern=r"^[a-z_.]{1,64}$")
    reason: str = Field(min_length=1, max_length=MAX_REASON)


class ApprovalEntry(_Step):
    """An owner's yes to one plan."""

    entry: Literal["approval"] = "approval"


class RotationEntry(_Entry):
    """The last line under the old keys. card: the new one; consent: its signatures over this line's content.

    Without the consent, who stole the old keys could forge a whole past that ends in this rotation.
    """

    entry: Literal["rotation"] = "rotation"
    card: Card
    consent: dict[str, str]


class Point(BaseModel):
    """A line of a ledger, by its index and hash."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    index: int = Field(ge=0)
    hash: _Hash


class RestoredEntry(_Entry):
    """The ledger was restored from a copy, whose last line is `head`; later ones may be lost."""

    entry: Literal["restored"] = "restored"
    head: Point


class ConfirmedEntry(_Entry):
    """What had left by the time of the loss is known again.

    by: a head record that the owner kept, or a server's receipt. index, hash: of the last line that it speaks
    of. accounts: of every data set, what left since the restore included.
    """

    entry: Literal["confirmed"] = "confirmed"
    by: Literal["head", "receipt"]
    of: Point
    accounts: dict[DataSet, Account]


Entry = Genesis | ReleaseEntry | RefusalEntry | ApprovalEntry | RotationEntry | RestoredEntry | ConfirmedEntry
Answer = ReleaseEntry | RefusalEntry
_LINE: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="entry")])


class Head(_Record):
    """The record beside a ledger: which line is its last, and what its data sets add up to after it.

    history: the genesis line and every `restored` line so far. Two ledgers, and the lost and the restored end
    of one, so have different ones, and those of one ledger begin alike up to where they parted. restored: a
    restore is unconfirmed. time: of the last line.
    """

    index: int = Field(ge=0)
    hash: _Hash
    history: tuple[Point, ...] = Field(min_length=1, max_length=MAX_HISTORY)
    restored: bool
    accounts: dict[DataSet, Account]


# --- encoding


def entry_line(content: Mapping[str, Any], signer: Identity) -> bytes:
    """A line of the ledger: `content` is an entry's document."""
    return sign_document(content, signer, LINE_CONTEXT)


def sign_consent(content: Mapping[str, Any], signer: Identity) -> dict[str, str]:
    """The new keys' signatures over a rotation's document without them."""
    return signer.sign(CONSENT_CONTEXT, consent_digest(content)).document()


def consent_digest(content: Mapping[str, Any]) -> bytes:
    """What the new keys sign of a rotation's document: SHA-256 of it without their signatures."""
    unsigned = {key: value for key, value in content.items() if key != "consent"}
    return hashlib.sha256(canonical_json(unsigned)).digest()


def _parsed(where: str, line: bytes) -> SignedDocument:
    if len(line) > MAX_LINE:
        raise LedgerCorrupt(f"{where}: is longer than any entry")
    try:
        document = parse_document(line)
    except ValueError as error:
        raise LedgerCorrupt(f"{where}: {error}") from None
    if document.content.get("version") == 1:
        raise LedgerCorrupt(
            f"{where}: this ledger was written by an older version of securefl and is not read by this one; "
            "keep it as it is, and use the version that wrote it"
        )
    return document


def _require_canonical(where: str, record: BaseModel, document: SignedDocument) -> None:
    if canonical_json(record.model_dump(mode="json")) != document.encoded:
        raise LedgerCorrupt(f"{where}: is not in its canonical encoding")


def _invalid(where: str, what: str, error: ValidationError) -> LedgerCorrupt:
    first = error.errors(include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "entry"
    return LedgerCorrupt(f"{where}: is not {what} (field {name[:80]})")


def parse_line(where: str, line: bytes) -> tuple[Entry, SignedDocument]:
    """The entry of a line, its signatures not yet verified. Raises LedgerCorrupt."""
    document = _parsed(where, line)
    try:
        entry = _LINE.validate_json(document.encoded)
    except BadSignature as error:
        raise LedgerCorrupt(f"{where}: the card does not hold: {error}") from None
    except ValidationError as error:
        raise _invalid(where, "an entry", error) from None
    _require_canonical(where, entry, document)
    return entry, document


def parse_head(where: str, data: bytes) -> tuple[Head, SignedDocument]:
    """A head record, its signatures not yet verified. Raises LedgerCorrupt."""
    document = _parsed(where, data)
    try:
        head = Head.model_validate_json(document.encoded)
    except ValidationError as error:
        raise _invalid(where, "a head record", error) from None
    _require_canonical(where, head, document)
    return head, document


def require_signature(where: str, document: SignedDocument, card: Card, context: bytes) -> None:
    """Raises LedgerCorrupt unless both signatures of the holder of `card` hold."""
    try:
        document.verify(card, context)
    except BadSignature:
        raise LedgerCorrupt(f"{where}: the signature does not hold") from None
