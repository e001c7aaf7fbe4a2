"""Mutants of sealed messages in three forms: as an outsider, an enrolled sender, or a sender who seals anew.

RAW changes the bytes on the wire. SIGNED changes them and signs again with an enrolled key, so that they pass
the signature. SEALED mutates header or body first, and seals and signs properly: they reach all code behind.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from securefl.crypto.identity import Card, Identity
from securefl.release import canonical_json
from tests.mutants import SIGNATURES, forge, mutate_body, mutate_json, mutate_layout, sign


class Form(StrEnum):
    RAW = "raw"
    SIGNED = "re-signed"
    SEALED = "re-sealed"


@dataclass(frozen=True)
class Seed:
    """A valid message to make mutants of: its bytes, and what its sender knows of it."""

    data: bytes
    header: Mapping[str, Any]
    body: bytes
    sender: Identity
    cards: tuple[Card, ...]


def party(card: Card) -> dict[str, str]:
    return {"name": card.name, "key": card.fingerprint}


def seed_of(
    rng: random.Random, body: bytes, kind: str, sender: Identity, to: Sequence[Card], **fields: Any
) -> Seed:
    """A valid message, made by the second implementation of the format."""
    header = {
        "version": 1,
        "suite": "mlkem768x25519+aes256gcm+ed25519+mldsa65",
        "sender": party(sender.card),
        "recipients": [party(card) for card in to],
        "kind": kind,
        "sequence": 5,
        "time": 1_760_000_000,
        **fields,
    }
    data = forge(rng, canonical_json(header), body, to, sender)
    return Seed(data, header, body, sender, tuple(to))


@dataclass(frozen=True)
class MessageMutants:
    """Mutants of `seeds`. known: those who can sign and be written to; strangers: those not enrolled.

    body: what mutates an opened body.
    """

    seeds: Sequence[Seed]
    known: Sequence[Identity]
    strangers: Sequence[Identity]
    body: Callable[[random.Random, bytes, Sequence[bytes]], bytes] = mutate_body

    def draw(self, rng: random.Random, form: Form) -> bytes:
        seed = rng.choice(self.seeds)
        if form is Form.SEALED:
            return self._sealed(rng, seed)
        if form is Form.SIGNED and rng.random() < 0.3:
            # Re-addressed, or sent in another's name, without sealing anew.
            header, sender, _ = self._varied(rng, seed)
            size = int.from_bytes(seed.data[8:12], "big")
            text = canonical_json(header)
            front = seed.data[:8] + len(text).to_bytes(4, "big") + text
            return sign(front + seed.data[12 + size : -SIGNATURES], sender)
        mutant = mutate_layout(rng, seed.data, [other.data for other in self.seeds])
        if form is Form.RAW:
            return mutant
        sender = seed.sender if rng.random() < 0.75 else rng.choice([*self.known, *self.strangers])
        return sign(mutant[:-SIGNATURES], sender)

    def _sealed(self, rng: random.Random, seed: Seed) -> bytes:
        header, sender, cards = canonical_json(seed.header), seed.sender, seed.cards
        body = seed.body
        draw = rng.random()
        if draw < 0.7:
            body = self.body(rng, body, [other.body for other in self.seeds])
        if draw >= 0.6:
            if rng.random() < 0.2:
                header = mutate_json(rng, dict(seed.header))
            else:
                varied, sender, cards = self._varied(rng, seed)
                header = canonical_json(varied)
        return forge(rng, header, body, cards, sender)

    def _varied(self, rng: random.Random, seed: Seed) -> tuple[dict[str, Any], Identity, tuple[Card, ...]]:
        """A well-formed header of another message, who signs it, and to whom it is sealed."""
        header: dict[str, Any] = json.loads(canonical_json(seed.header))
        sender, cards = seed.sender, seed.cards
        everyone = [*self.known, *self.strangers]
        match rng.randrange(8):
            case 0:
                header["run"] = f"{rng.getrandbits(128):032x}"
            case 1:
                header["round"] = max(1, header["round"] + rng.choice((-1, 1, 999)))
            case 2:
                steps = (
                    "share",
                    "train",
                    "candidate",
                    "finish",
                    "rest",
                    "advertise",
                    "deal",
                    "unmask",
                    "key",
                )
                header["step"] = rng.choice(steps)
            case 3:
                kinds = ("plan", "model", "centroids", "embedding-centroids", "metrics", "unavailable")
                summed = ("advert", "shares", "masked-model", "survivors", "unmasking", "encrypted-model")
                header["kind"] = rng.choice((*kinds, *summed))
            case 4:
                header["sequence"] = rng.choice((1, 4, 5, 6, 2**53))
            case 5:
                header["time"] = rng.choice((0, 1, 2**53))
            case 6:
                sender = rng.choice(everyone)
                header["sender"] = party(sender.card)
                if rng.random() < 0.3:
                    header["sender"]["key"] = rng.choice(everyone).card.fingerprint
            case _:
                chosen = rng.sample(everyone, rng.randint(1, len(everyone)))
                cards = tuple(one.card for one in chosen)
                header["recipients"] = [party(card) for card in cards]
        return header, sender, cards
