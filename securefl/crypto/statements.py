"""What the holder of a key says about it: its successor (`Rotation`), or that it is lost (`Revocation`).

Each has exactly one byte string and is signed by both halves of the key it speaks of. What a statement does
to the cards that somebody trusts is the business of `trust`; nothing here touches files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from securefl.crypto.documents import parse_document, sign_document
from securefl.crypto.identity import Card, Identity
from securefl.errors import BadSignature, UsageError
from securefl.messages import FINGERPRINT
from securefl.release import canonical_json

MAX_STATEMENT = 64 * 2**10  # bytes; a statement is 14 KiB
ROTATION, REVOCATION = "securefl.rotation/1", "securefl.revocation/1"
_ROTATION_CONTEXT = b"securefl/1 rotation"
_REVOCATION_CONTEXT = b"securefl/1 revocation"
_KEYS = ("ed25519", "mldsa65", "mlkem768", "x25519")


@dataclass(frozen=True)
class Rotation:
    """The holder of the card with the fingerprint `old` names its successor `card`, of the same name.

    The new card proves by its own signature that its holder has the new keys. Only the old card can show
    that the statement is true, so one that was parsed means nothing before `verify`. data: its bytes.
    """

    old: str
    card: Card
    data: bytes

    @classmethod
    def make(cls, old: Identity, new: Card) -> Rotation:
        """Signed by `old`. Raises UsageError where `new` has another name or shares a key with it."""
        _check_successor(old.card, new)
        content = {"format": ROTATION, "old": old.card.fingerprint, "card": new.model_dump(mode="json")}
        return cls(old.card.fingerprint, new, sign_document(content, old, _ROTATION_CONTEXT))

    def verify(self, old: Card) -> None:
        """Require that the holder of `old` said it. Raises BadSignature, or UsageError for no successor."""
        if self.old != old.fingerprint:
            raise BadSignature(
                f"the rotation of {self.card.name} is not from the key {old.short_fingerprint}"
            )
        _check_successor(old, self.card)
        parse_document(self.data).verify(old, _ROTATION_CONTEXT)


def _check_successor(old: Card, new: Card) -> None:
    if new.name != old.name:
        raise UsageError(f"a rotation keeps the name {old.name}; this one changes it to {new.name}")
    if any(getattr(new, key) == getattr(old, key) for key in _KEYS):
        raise UsageError(f"a rotation replaces all four keys; this one keeps one of {old.name}")


@dataclass(frozen=True)
class Revocation:
    """The holder of `card` says that its keys are lost or stolen; shows its truth by itself. data: its bytes.

    One that does not verify cannot be made: raises BadSignature.
    """

    card: Card
    data: bytes

    def __post_init__(self) -> None:
        parse_document(self.data).verify(self.card, _REVOCATION_CONTEXT)

    @classmethod
    def make(cls, identity: Identity) -> Revocation:
        """Signed by the key that it revokes."""
        content = {"format": REVOCATION, "card": identity.card.model_dump(mode="json")}
        return cls(identity.card, sign_document(content, identity, _REVOCATION_CONTEXT))


def parse_statement(data: bytes, where: str) -> Rotation | Revocation:
    """The statement whose one byte string is `data`; of a Rotation only the new card is verified.

    `where` (the file) begins the message of a UsageError, or BadSignature where a signature does not hold.
    """
    if len(data) > MAX_STATEMENT:
        raise UsageError(f"{where}: is too large for a rotation or a revocation")
    content, why = None, ""
    try:
        content = parse_document(data).content
    except ValueError as error:
        why = str(error)
    if content is None:  # raised outside: the error above leads to the file, which may be a private one
        raise UsageError(f"{where}: {why}; a rotation or revocation is taken as it was written")
    fields, what = set(content), content.get("format")
    if what == ROTATION and fields == {"format", "old", "card"} and _is_fingerprint(content["old"]):
        return Rotation(content["old"], _card(content["card"], where), data)
    if what == REVOCATION and fields == {"format", "card"}:
        try:
            return Revocation(_card(content["card"], where), data)
        except BadSignature as error:
            raise BadSignature(f"{where}: {error}; the statement was altered") from None
    raise UsageError(f"{where}: is not a rotation or a revocation of securefl")


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(FINGERPRINT, value) is not None


def _card(value: Any, where: str) -> Card:
    return Card.from_json(canonical_json(value), where)
