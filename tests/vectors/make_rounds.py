"""The content of masked-round-1.json: one masked round, and messages of it that are refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.agreement import UPDATE, WEIGHT, fixed_points, masked_terms
from securefl.crypto import masking_keys
from securefl.crypto.identity import Identity
from securefl.crypto.masking_client import MaskingClient
from securefl.crypto.masking_messages import Message
from securefl.crypto.masking_server import MaskingServer
from securefl.crypto.weighted import encode_weighted, weighted_mean
from securefl.messages import RoundPlan, Step
from securefl.release import PayloadKind, canonical_json, fingerprint, flatten
from tests.vectors.make_masking import PEOPLE, Made, arrays, drawn, model
from tests.vectors.make_masking import plan as plan_of
from tests.vectors.people import ALICE, identities

ROWS = {"alice": 100, "bob": 37, "carol": 5, "mallory": 64}


def _random(label: str) -> Callable[[int], bytes]:
    """What a silo draws: its root, its blind, the seed of its cipher key, then salts, in that order."""
    left = iter(range(1000))
    return lambda size: drawn(f"{label} draws {next(left)}", size)


def _text(message: Message) -> str:
    return message.tensors()["message"].tobytes().decode()


def _hash(message: Message) -> str:
    return hashlib.sha256(_text(message).encode()).hexdigest()


def _encoded(label: str, plan: RoundPlan) -> tuple[Mapping[str, NDArray[np.uint32]], NDArray[np.float32]]:
    """A silo's vectors, and the change of the weights that they encode."""
    assert plan.sums is not None
    rng = np.random.default_rng(int.from_bytes(drawn(label, 8), "big"))
    change = rng.normal(0, 1, sum(one.size for one in model().values())).astype(np.float32)
    values, weight = encode_weighted(
        change, ROWS[label] / plan.sums.max_rows, *fixed_points(plan.sums, len(PEOPLE)), rng
    )
    return {UPDATE: values, WEIGHT: weight}, change


def masked_round() -> Made:
    """Four silos, of whom the second in the order of their fingerprints goes silent after it shared."""
    plan = plan_of(fingerprint(model()), Step.ADVERTISE, PayloadKind.ADVERT)
    assert plan.sums is not None
    terms = masked_terms(plan, flatten(model()).size)
    roster: dict[str, Identity] = {
        one.card.fingerprint: one for one in sorted(PEOPLE.values(), key=lambda one: one.card.fingerprint)
    }
    cards = {one.name: one.card for one in roster.values()}
    gone = list(roster)[1]
    clients = {key: MaskingClient(one, cards, terms, random=_random(one.name)) for key, one in roster.items()}
    server = MaskingServer(cards, terms, threads=1)
    messages: dict[str, dict[str, Any]] = {
        what: {} for what in ("advert", "shares", "masked", "survivors", "unmasking")
    }
    for key, client in clients.items():
        advert = client.advertise()
        server.receive_advert(key, advert)
        messages["advert"][roster[key].name] = _text(advert)
    adverts = server.close_adverts()
    for key, client in clients.items():
        dealt = client.share(adverts)
        server.receive_shares(key, dealt)
        messages["shares"][roster[key].name] = _text(dealt)
    deliveries = server.close_shares()
    changes = {}
    del clients[gone]
    for key, client in clients.items():
        vectors, changes[roster[key].name] = _encoded(roster[key].name, plan)
        sent = client.masked(deliveries[key], vectors)
        server.receive_input(key, sent)
        packed = {name: bytes(data).hex() for name, data in sent.vectors.items()}
        messages["masked"][roster[key].name] = {"message": _text(sent), "vectors": packed}
    survivors = server.close_inputs()
    for key, client in clients.items():
        signed = client.sign(survivors)
        server.receive_signature(key, signed)
        messages["survivors"][roster[key].name] = _text(signed)
    request = server.close_signatures()
    for key, client in clients.items():
        given = client.unmask(request)
        server.receive_unmasking(key, given)
        messages["unmasking"][roster[key].name] = _text(given)
    sums = server.result().sums
    mean = weighted_mean(sums[UPDATE], sums[WEIGHT], *fixed_points(plan.sums, len(PEOPLE)))
    return {
        "format": "securefl masked round, version 1: a whole one, and messages that are refused",
        "identities": identities(*PEOPLE.values()),
        "model": arrays(model()),
        "plan": canonical_json(plan.model_dump(mode="json")).decode(),
        "drawn": {label: _secrets(label) for label in PEOPLE},
        "rows": {label: rows for label, rows in ROWS.items() if label in changes},
        "changes": {label: change.tolist() for label, change in changes.items()},
        "messages": messages,
        "relayed": {
            "adverts": _hash(adverts),
            "deliveries": {roster[key].name: _hash(one) for key, one in deliveries.items()},
            "survivors": _hash(survivors),
            "request": _hash(request),
        },
        "sums": {name: total.tolist() for name, total in sums.items()},
        "mean": mean.tolist(),
        "cases": _refusals(messages),
    }


def _secrets(label: str) -> Made:
    random = _random(label)
    sizes = {"root": 32, "blind": 32, "cipher_key_seed": masking_keys.KEY_SEED}
    return {name: random(size).hex() for name, size in sizes.items()}


def _part(text: str, member: str, size: int = 12) -> str:
    """The first letters of a member's value, with what is before them; the last of that name."""
    at = text.rindex(f'"{member}":"')
    return text[at : at + len(member) + 4 + size]


def _refusals(messages: Mapping[str, Mapping[str, Any]]) -> list[Made]:
    made: list[Made] = []

    def add(name: str, what: str, error: str | None, why: str, *swap: str) -> None:
        text = messages[what]["alice"]
        if swap and text.count(swap[0]) != 1:
            raise ValueError(f"{name}: the text to replace is there {text.count(swap[0])} times")
        made.append(
            {**{"name": name, "what": what, "of": "alice", "why": why, "error": error}, "replace": list(swap)}
        )

    def turned(text: str, member: str) -> tuple[str, str]:
        old = _part(text, member)
        head, letters = old[: len(member) + 4], old[len(member) + 4 :]
        return old, head + letters[::-1]

    for what, members in (
        ("advert", ("plan", "model", "mask_key", "cipher_key")),
        ("shares", ("adverts", "blind_hash", "root_commitment", "blind_commitment", "sealed", "seed")),
        ("survivors", ("adverts", "shared", "survivors", "plan", "model")),
    ):
        text = messages[what]["alice"]
        add(what, what, None, "As it was sent.")
        for member in members:
            why = f"Another {member}, which the signature covers."
            add(f"{what}-{member}", what, "BadSignature", why, *turned(text, member))
        for half, at in (("ed25519", 0), ("mldsa65", 400)):
            start = text.index('"signature":"') + 13 + at
            old = text[start : start + 16]
            why = f"The {half} signature is another; one that holds is not enough."
            add(f"{what}-{half}", what, "BadSignature", why, old, old[::-1])
        add(
            f"{what}-member", what, "PayloadError", "A member more.", '"signature":', '"note":"","signature":'
        )
    bad = "PayloadError"
    add("advert-round", "advert", "BadSignature", "Of another round.", '"round":12', '"round":13')
    add("advert-real", "advert", bad, "The round is written 12.0.", '"round":12', '"round":12.0')
    add("advert-space", "advert", bad, "A space after a colon.", '"round":12', '"round": 12')
    add("advert-twice", "advert", bad, "A member occurs twice.", '"round":12', '"round":12,"round":12')
    key = ALICE.card.fingerprint
    capital = key[:-1] + key[-1].upper() if key[-1].isalpha() else key.replace(*_letter(key))
    add("advert-capital", "advert", bad, "A fingerprint with a capital digit.", key, capital)
    text = messages["advert"]["alice"]
    long = text[text.index('"signature":"') + 13 :][:4500]
    letter = "-" if "-" in long else "_"
    at = long.index(letter)
    around = long[max(0, at - 12) : at + 13]
    why = "Base64 with + and / instead of - and _."
    add("advert-alphabet", "advert", bad, why, around, around.replace("-", "+").replace("_", "/"))
    add("advert-padding", "advert", bad, "Base64 without its padding.", *_unpadded(text, "model"))
    return made


def _letter(key: str) -> tuple[str, str, int]:
    letter = next(one for one in key if one.isalpha())
    return letter, letter.upper(), 1


def _unpadded(text: str, member: str) -> tuple[str, str]:
    at = text.index(f'"{member}":"') + len(member) + 4
    end = text.index('"', at)
    return text[at - 4 : end + 1], text[at - 4 : end].rstrip("=") + '"'
