"""Whose keys this institution believes: a folder of pinned cards, and of keys never believed again.

    STORE/NAME.card.json              the card that was compared with its holder, or its successor by rotation
    STORE/retired/FINGERPRINT.json    the rotation or revocation that ended a key, or the owner's own record

Nothing is believed for having been here before: every reading checks who can write to the folder and the
file, the file's name, the card's own signature, and that its key is not retired. A key is retired before its
successor is pinned, so a crash leaves a name without a trusted key for a while, never with an old one. This
room knows no run and no peer's address.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from securefl.crypto.identity import Card, short_fingerprint
from securefl.crypto.keyfiles import check_guarded, read_guarded
from securefl.crypto.statements import MAX_STATEMENT, Revocation, Rotation, parse_statement
from securefl.errors import Refused, Replayed, UnknownSender, UsageError
from securefl.files import make_folder, sync_folder, write_atomic, write_new
from securefl.messages import FINGERPRINT, NAME
from securefl.release import canonical_json

_CARD = ".card.json"


class _OwnersRecord(BaseModel):
    """A key that the owner of the store retired without its holder's word."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["securefl.retired/1"] = "securefl.retired/1"
    name: str = Field(pattern=NAME)
    fingerprint: str = Field(pattern=FINGERPRINT)
    reason: str = Field(min_length=1, max_length=400)


@dataclass(frozen=True)
class Retired:
    """A key that is never believed again. successor: the fingerprint that a rotation named."""

    name: str
    fingerprint: str
    why: Literal["rotation", "revocation", "owner"]
    reason: str = ""
    successor: str | None = None


@dataclass(frozen=True)
class Applied:
    """What a statement did. card: whom the store believes under the name now.

    changed: False where it had been applied before;
    dropped: a successor of a revoked key, no longer pinned since whoever has that key may have named it.
    """

    name: str
    what: Literal["rotation", "revocation"]
    retired: str
    card: Card | None
    changed: bool
    dropped: Card | None = None


class TrustStore:
    """The pinned cards and retired keys below `path`; `open` makes one."""

    def __init__(self, path: Path | str) -> None:
        """Use `open`, which looks at the folder."""
        self.path = Path(path)
        self._retired = self.path / "retired"

    @classmethod
    def open(cls, path: Path | str, *, create: bool = False) -> TrustStore:
        """The store at `path`; with `create`, a new one where nothing or an empty folder is.

        Raises UsageError where it is no store, or where others can write to it.
        """
        store = cls(path)
        path = store.path
        try:
            if create and (not path.exists() or (path.is_dir() and not any(path.iterdir()))):
                make_folder(store._retired)
                sync_folder(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be made ({error.strerror})") from error
        with store._locked(fcntl.LOCK_SH):
            return store

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the store against other processes, after a look at who can write to it."""
        handles: list[int] = []
        try:
            for folder in (self.path, self._retired):
                handles.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                status = os.fstat(handles[-1])
                check_guarded(status, str(folder), "a trust store", private=False, folder=True)
            fcntl.flock(handles[0], kind)
            yield
        except OSError as error:
            raise UsageError(
                f"{self.path}: is not a usable trust store ({error.filename or 'lock'}: {error.strerror}); "
                "`securefl trust add` makes one in a new folder"
            ) from error
        finally:
            for handle in handles:
                os.close(handle)

    def _pin(self, name: str) -> Path:
        return self.path / f"{name}{_CARD}"

    def _record(self, fingerprint: str) -> Path:
        return self._retired / f"{fingerprint}.json"

    def _pinned(self, name: str) -> Card | None:
        """The card in the file of `name`, retired or not."""
        path = self._pin(name)
        if not os.path.lexists(path):
            return None
        card = Card.from_json(read_guarded(path, MAX_STATEMENT, "a card", private=False), str(path))
        if card.name != name:
            raise UsageError(f"{path}: holds the card of {card.name}; a store's file is named after its card")
        return card

    def _ended_by(self, fingerprint: str) -> Rotation | Revocation | _OwnersRecord | None:
        """What retired a key; None where it is not retired. Raises UsageError for a damaged record."""
        path = self._record(fingerprint)
        if not os.path.lexists(path):
            return None
        data = read_guarded(path, MAX_STATEMENT, "a record of a retired key", private=False)
        record = None
        with suppress(ValidationError):  # which holds the file
            record = _OwnersRecord.model_validate_json(data)
        return parse_statement(data, str(path)) if record is None else record

    def is_retired(self, fingerprint: str) -> bool:
        """Whether a key was rotated, revoked or removed; whatever its record holds. Raises UsageError."""
        if not re.fullmatch(FINGERPRINT, fingerprint):
            raise UsageError("a fingerprint is 64 hexadecimal digits")
        return os.path.lexists(self._record(fingerprint))

    def card(self, name: str) -> Card:
        """The card believed under `name`.

        Raises UnknownSender where there is none, UsageError or BadSignature for a file that is not to be
        believed.
        """
        with self._locked(fcntl.LOCK_SH):
            card = self._pinned(name) if re.fullmatch(NAME, name) else None
            if card is None:
                raise self._unknown(name)
            if not self.is_retired(card.fingerprint):
                return card
            if isinstance(self._ended_by(card.fingerprint), Rotation):
                raise UnknownSender(
                    f"the rotation of {name} was begun and not finished; finish it: securefl trust apply "
                    f"{self._record(card.fingerprint)} --store {self.path}"
                )
            raise UnknownSender(
                f"the key of {name} was revoked; enrol its new card with `securefl trust add`"
            )

    def _unknown(self, name: str) -> UnknownSender:
        if any(one.name == name for one in self._retired_keys()):
            return UnknownSender(
                f"the key of {name} was revoked or replaced; compare its new card with the holder and add it "
                f"(securefl trust add CARD --store {self.path})"
            )
        return UnknownSender(
            f"{name[:64]!r} is not enrolled in {self.path}; compare the fingerprint with its holder and add "
            f"the card: securefl trust add CARD --store {self.path}"
        )

    def cards(self) -> dict[str, Card]:
        """All cards that are believed, by name in order. Raises as `card` does for any file in the store."""
        with self._locked(fcntl.LOCK_SH):
            names = sorted(p.name.removesuffix(_CARD) for p in self.path.iterdir() if p.name.endswith(_CARD))
            found: dict[str, Card] = {}
            for name in names:
                if not re.fullmatch(NAME, name):
                    raise UsageError(f"{self._pin(name)}: is not named after a card; remove it")
                card = self._pinned(name)
                if card is not None and not self.is_retired(card.fingerprint):
                    found[name] = card
            return found

    def retired(self) -> tuple[Retired, ...]:
        """All keys never believed again, in order of name. Raises UsageError for a damaged record."""
        with self._locked(fcntl.LOCK_SH):
            return self._retired_keys()

    def _retired_keys(self) -> tuple[Retired, ...]:
        keys = [path.name.removesuffix(".json") for path in self._retired.glob("[!.]*.json")]
        return tuple(sorted(map(self._described, keys), key=lambda key: (key.name, key.fingerprint)))

    def _described(self, fingerprint: str) -> Retired:
        ended = self._ended_by(fingerprint)
        match ended:
            case _OwnersRecord():
                found = Retired(ended.name, ended.fingerprint, "owner", ended.reason)
            case Revocation():
                found = Retired(ended.card.name, ended.card.fingerprint, "revocation")
            case Rotation():
                found = Retired(ended.card.name, ended.old, "rotation", successor=ended.card.fingerprint)
            case None:
                raise UsageError(f"{self._record(fingerprint)}: was removed meanwhile; try again")
        if found.fingerprint != fingerprint:
            raise UsageError(
                f"{self._record(fingerprint)}: is the record of another key; restore or remove it"
            )
        return found

    def add(self, card: Card, expected_fingerprint: str) -> None:
        """Pin a card whose fingerprint its holder gave by another way; again changes nothing.

        expected_fingerprint: all 64 hexadecimal digits or the 32 of the short form; spaces and case do not
        matter. Raises UsageError for one that is neither and where the name has another key, UnknownSender
        where the card's is another, Refused where the key is retired.
        """
        digits = "".join(expected_fingerprint.split()).lower()
        if not re.fullmatch(r"[0-9a-f]{32}|[0-9a-f]{64}", digits):
            raise UsageError(
                "a fingerprint has 32 hexadecimal digits, or all 64; give it as its holder reads it"
            )
        if not card.fingerprint.startswith(digits):
            raise UnknownSender(
                f"the card of {card.name} has another fingerprint than the one given and is not added; get "
                "the card from its holder again"
            )
        with self._locked(fcntl.LOCK_EX):
            self._refuse_retired(card)
            there = self._pinned(card.name)
            if there == card:
                return
            if there is not None and not self.is_retired(there.fingerprint):
                raise UsageError(
                    f"{card.name} has another key pinned ({there.short_fingerprint}); apply its rotation, or "
                    f"end that key first: securefl trust revoke {card.name} --store {self.path}"
                )
            write_atomic(self._pin(card.name), card.to_json())

    def _refuse_retired(self, card: Card) -> None:
        if self.is_retired(card.fingerprint):
            raise Refused(
                f"the key {card.short_fingerprint} of {card.name} was rotated or revoked and is never "
                "believed again; ask its holder for the new card"
            )

    def apply(self, data: bytes, where: str = "the statement") -> Applied:
        """Act on the bytes of a rotation or revocation; what was applied before changes nothing.

        where: the file, for messages. Raises UsageError, BadSignature; UnknownSender for a rotation of
        nobody's, Replayed for one of the past, Refused where the successor, or the key by another word, is
        retired.
        """
        statement = parse_statement(data, where)
        with self._locked(fcntl.LOCK_EX):
            if isinstance(statement, Rotation):
                return self._rotate(statement)
            return self._revoke(statement)

    def _rotate(self, rotation: Rotation) -> Applied:
        name, new, pinned = rotation.card.name, rotation.card, self._pinned(rotation.card.name)
        if pinned is None:
            raise self._unknown(name)
        ended = self._ended_by(rotation.old)
        if pinned == new and ended == rotation and not self.is_retired(new.fingerprint):
            return Applied(name, "rotation", rotation.old, new, changed=False)
        if pinned == new:
            raise UsageError(
                f"{name} has the successor of this rotation pinned already; there is nothing to do"
            )
        old, now = short_fingerprint(rotation.old), pinned.short_fingerprint
        if pinned.fingerprint != rotation.old and ended is not None:
            raise Replayed(
                f"the rotation of {name} from the key {old} is of the past; the pinned key is {now}"
            )
        if pinned.fingerprint != rotation.old:
            raise UsageError(
                f"the rotation of {name} is from the key {old}, but the pinned one is {now}; apply the "
                f"rotation from {now} first"
            )
        rotation.verify(pinned)
        self._refuse_retired(new)
        if ended is None:
            write_new(self._record(rotation.old), rotation.data)
        elif ended != rotation:
            self._refuse_retired(pinned)
        write_atomic(self._pin(name), new.to_json())
        return Applied(name, "rotation", rotation.old, new, changed=True)

    def _revoke(self, revocation: Revocation) -> Applied:
        name, key = revocation.card.name, revocation.card.fingerprint
        pinned = self._pinned(name)
        ended, dropped = self._ended_by(key), None
        if isinstance(ended, Rotation):
            # Who stole the key may have made that rotation: its outcome has to be compared again.
            if pinned is not None and pinned.fingerprint in self._successors(ended):
                dropped = pinned
                self._unpin(name)
            write_atomic(self._record(key), revocation.data)
        elif ended is None:
            write_new(self._record(key), revocation.data)
        if pinned is not None and pinned.fingerprint == key:
            self._unpin(name)
        left = self._pinned(name)
        believed = None if left is None or self.is_retired(left.fingerprint) else left
        changed = not isinstance(ended, Revocation | _OwnersRecord)
        return Applied(name, "revocation", key, believed, changed, dropped)

    def _successors(self, rotation: Rotation) -> set[str]:
        found: set[str] = set()
        ended: Rotation | Revocation | _OwnersRecord | None = rotation
        while isinstance(ended, Rotation) and ended.card.fingerprint not in found:
            found.add(ended.card.fingerprint)
            ended = self._ended_by(ended.card.fingerprint)
        return found

    def _unpin(self, name: str) -> None:
        self._pin(name).unlink(missing_ok=True)
        sync_folder(self.path)

    def revoke(self, name: str, reason: str) -> Card:
        """Retire the pinned key of `name` for ever on the owner's own word; the card that it was.

        reason: 1 to 400 characters, kept in the store. Raises UsageError, or UnknownSender for no such name.
        """
        with self._locked(fcntl.LOCK_EX):
            card = self._pinned(name) if re.fullmatch(NAME, name) else None
            if card is None:
                raise self._unknown(name)
            try:
                record = _OwnersRecord(name=name, fingerprint=card.fingerprint, reason=reason)
            except ValidationError:
                raise UsageError("a reason has 1 to 400 characters") from None
            if not self.is_retired(card.fingerprint):
                write_new(self._record(card.fingerprint), canonical_json(record.model_dump()) + b"\n")
            self._unpin(name)
            return card
