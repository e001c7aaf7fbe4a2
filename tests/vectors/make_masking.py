"""The content of masking-1.json, the same at every making, and of masked-round-1.json, with its signatures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.agreement import UPDATE, WEIGHT, ckks_terms, fixed_points, masked_terms
from securefl.crypto import graph, masking_keys, masks, shares
from securefl.crypto.ckks_terms import chunk_name
from securefl.crypto.fixed_point import FixedPoint
from securefl.crypto.identity import Identity
from securefl.crypto.masking_client import MaskingClient
from securefl.crypto.masking_messages import Message
from securefl.crypto.masking_server import MaskingServer
from securefl.crypto.weighted import encode_weighted, weighted_mean
from securefl.messages import NoiseTerms, Party, RoundPlan, Step, SumTerms
from securefl.release import PayloadKind, Tensors, canonical_json, fingerprint, flatten
from tests.vectors import masking_reader
from tests.vectors.people import ALICE, BOB, CAROL, MALLORY, identities

RUN = "0123456789abcdef" * 2
PEOPLE = {one.name: one for one in (ALICE, BOB, CAROL, MALLORY)}
ROWS = {"alice": 100, "bob": 37, "carol": 5, "mallory": 64}
Made = dict[str, Any]


def drawn(label: str, size: int = 32) -> bytes:
    """Bytes that the label gives."""
    return hashlib.shake_256(label.encode()).digest(size)


def silo(number: int) -> str:
    """The fingerprint of a silo of whom there is nothing else."""
    return drawn(f"silo {number}").hex()


# --- masking-1.json


def _keys() -> list[Made]:
    made = []
    for dealer, holder in sorted([(silo(0), silo(1)), (silo(2), silo(3))]):
        dealer, holder = sorted((dealer, holder))
        root, blind, adverts = drawn(f"root {dealer}"), drawn(f"blind {dealer}"), drawn("adverts")
        where = (RUN, 12, dealer, holder, adverts)
        seed = masking_keys.mask_key_seed(root, RUN, 12, dealer)
        made.append(
            {
                **{"run": RUN, "round": 12, "dealer": dealer, "holder": holder, "adverts": adverts.hex()},
                "root": root.hex(),
                "mask_key_seed": seed.hex(),
                "mask_key_sha256": hashlib.sha256(masking_keys.HYBRID.key_pair(seed).public).hexdigest(),
                "pair_seed": masking_keys.pair_seed(root, *where).hex(),
                "blind": blind.hex(),
                "blind_hash": masking_keys.blind_hash(blind, adverts, dealer).hex(),
                "shares_info": masking_keys.seal_info(b"shares", *where).hex(),
                "pair_info": masking_keys.seal_info(b"pair", *where).hex(),
            }
        )
    return made


def _streams() -> list[Made]:
    made = []
    for number, (vector, parties) in enumerate(
        ((UPDATE, [silo(0)]), (WEIGHT, [silo(0)]), (UPDATE, [silo(1), silo(0)]), (UPDATE, [silo(0), silo(2)]))
    ):
        secret = drawn(f"secret {min(number, 2)}")
        seed = masks.stream_seed(secret, RUN, 12, vector, parties)
        first, zeros = np.empty(32, np.uint8), np.zeros(32, np.uint8)
        masks.Keystream(seed).fill(zeros, first)
        later = np.empty(32, np.uint8)
        masks.Keystream(seed, 4 * masks.CHUNK).fill(zeros, later)
        made.append(
            {
                "secret": secret.hex(),
                **{"run": RUN, "round": 12, "vector": vector, "parties": parties},
                "stream_seed": seed.hex(),
                "bytes_0": first.tobytes().hex(),
                "bytes_262144": later.tobytes().hex(),
            }
        )
    return made


def _masked() -> list[Made]:
    made = []
    for bits in (16, 20, 24, 32):
        values = [0, 1, 255, 256, 2**16 - 1, 2**bits // 2, 2**bits - 2, 2**bits - 1]
        streams = [masks.Stream(drawn(f"stream {sign}"), sign) for sign in (1, -1)]
        vector = np.array(values, np.uint32)
        plain = masks.pack(vector, bits)
        masks.add_masks(vector, streams, bits)
        made.append(
            {
                **{"bits": bits, "values": values, "packed": plain.hex()},
                "streams": [{"seed": one.seed.hex(), "sign": one.sign} for one in streams],
                "masked": vector.tolist(),
                "masked_packed": masks.pack(vector, bits).hex(),
            }
        )
    return made


def _packings() -> list[Made]:
    return [
        {"bits": bits, "length": length, "packed": packed, "error": error}
        for bits, length, packed, error in (
            (20, 2, "ffff0f000000", None),
            (20, 2, "ffff0f00001000", "MalformedEnvelope"),
            (20, 2, "ffff0f0000", "MalformedEnvelope"),
            (20, 2, "ffff0f000010", "PayloadError"),
            (17, 1, "000002", "PayloadError"),
            (16, 1, "ffff", None),
            (32, 1, "ffffffff", None),
        )
    ]


def _graphs() -> list[Made]:
    made = []
    for count, digest in ((4, "adverts"), (70, "adverts"), (70, "other adverts")):
        names = [silo(number) for number in range(count)]
        near = graph.neighbours(names, drawn(digest))
        made.append(
            {
                **{"silos": names, "digest": drawn(digest).hex(), "degree": graph.degree_for(count)},
                "neighbours_of_first": [names.index(one) for one in near[names[0]]],
                "neighbours_sha256": hashlib.sha256(
                    canonical_json({name: sorted(ones) for name, ones in near.items()})
                ).hexdigest(),
            }
        )
    return made


def _shares() -> Made:
    """Shares are drawn at random; here the second reader makes them, from coefficients that a label gives."""
    secret, coefficients = drawn("shared"), [drawn("x"), drawn("x^2")]
    dealt = masking_reader.split(secret, coefficients, 5)
    salt = drawn("salt")
    return {
        "secret": secret.hex(),
        "coefficients": [one.hex() for one in coefficients],
        "threshold": 3,
        "shares": [share.hex() for share in dealt],
        "salt": salt.hex(),
        "commitments": [shares.commit(share, salt).hex() for share in dealt],
    }


def _thresholds() -> list[Made]:
    return [
        {
            **{"threshold": threshold, "cohort": cohort, "advertised": advertised, "members": members},
            "needed": masking_keys.share_threshold(threshold, cohort, advertised, members),
        }
        for threshold, cohort, advertised, members in (
            (3, 4, 4, 4),
            (47, 70, 60, 60),
            (47, 70, 70, 53),
            (65, 70, 70, 53),
        )
    ]


def _fixed_points() -> list[Made]:
    made = []
    for clip, bits, silos in ((4.0, 20, 4), (0.1, 16, 3), (1.0, 32, 70)):
        numbers = FixedPoint(clip, bits, silos)
        top = silos * numbers.limit
        sums = [0, 1, 1000, top, 2**bits - top, 2**bits - 1]
        decoded = numbers.decode(np.array(sums, np.uint32)).tolist()
        case = {"clip": clip, "bits": bits, "silos": silos, "limit": numbers.limit}
        made.append({**case, "sums": sums, "values": decoded, "error": None})
        if top < 2 ** (bits - 1) - 1:
            made.append({**case, "sums": [top + 1], "values": None, "error": "PayloadError"})
    return made


def _sums(**fields: Any) -> SumTerms:
    default: dict[str, Any] = {
        **{"threshold": 3, "clip": 4.0, "bits": 20, "max_rows": 128},
        **{"post_quantum": False, "noise": None},
    }
    return SumTerms(**{**default, **fields})


def _plan(model: str, step: Step, answer: PayloadKind, **fields: Any) -> RoundPlan:
    default: dict[str, Any] = {
        **{"run": RUN, "round": 12, "rounds": 20, "method": "fedavg", "protection": "masked"},
        "cohort": tuple(Party(name=one.name, key=one.card.fingerprint) for one in PEOPLE.values()),
        **{"sums": _sums(), "epochs": 1},
    }
    return RoundPlan(**{**default, "step": step, "answer": answer, "model": model, **fields})


def _plans() -> list[Made]:
    noise = NoiseTerms(clip=1.0, epsilon=8.0, noise_multiplier=None, delta=1e-05, colluders=0)
    model = drawn("model").hex()
    plans = (
        _plan(model, Step.ADVERTISE, PayloadKind.ADVERT),
        _plan(model, Step.TRAIN, PayloadKind.MASKED_MODEL, relayed=("bob", "carol")),
        _plan(model, Step.TRAIN, PayloadKind.MASKED_MODEL, sums=_sums(noise=noise, bits=32)),
    )
    made = []
    for plan in plans:
        terms = masked_terms(plan, 6)
        vectors = {one.name: {"length": one.length, "bits": one.bits} for one in terms.vectors}
        document = canonical_json(plan.model_dump(mode="json")).decode()
        made.append({"document": document, "length": 6, "plan": terms.plan.hex(), "vectors": vectors})
    return made


def model() -> dict[str, NDArray[np.float32]]:
    """The weights of the round."""
    return {
        "weight": np.array([[0.5, -0.25, 1.0], [2.0, 0.125, -3.0]], np.float32),
        "bias": np.array([0.0, -1.5], np.float32),
    }


def _arrays(tensors: Tensors) -> Made:
    kinds = {"<f4": "F32", "<i8": "I64", "|u1": "U8"}
    return {
        name: {"dtype": kinds[one.dtype.str], "shape": list(one.shape), "data": one.tobytes().hex()}
        for name, one in tensors.items()
    }


def _models() -> list[Made]:
    models: list[Tensors] = [model()]
    models.append({"count": np.array(7, np.int64), "ckks.000000": np.arange(5, dtype=np.uint8)})
    return [{"arrays": _arrays(one), "fingerprint": fingerprint(one)} for one in models]


def _ckks() -> list[Made]:
    made = []
    for length, silos, clip, hard in (
        (2047, 3, 64.0, False),
        (2048, 3, 0.5, False),
        (300_000, 70, 64.0, True),
    ):
        sums = _sums(threshold=0, clip=clip, post_quantum=hard)
        terms = ckks_terms(sums, length, silos)
        made.append(
            {
                "sums": sums.model_dump(mode="json"),
                **{"length": length, "silos": silos, "parameters": terms.parameters.document()},
                **{"max_weight": terms.max_weight, "ciphertexts": terms.ciphertexts},
                "chunks": {chunk_name(at): terms.ciphertexts_of(at) for at in range(terms.chunks)},
                "tolerance": terms.tolerance,
            }
        )
    return made


def derivations() -> Made:
    return {
        "format": "securefl masked rounds and CKKS, version 1: what follows from what",
        "keys": _keys(),
        "streams": _streams(),
        "masked": _masked(),
        "packings": _packings(),
        "degrees": [[count, graph.degree_for(count)] for count in (3, 64, 65, 66, 70, 78, 79, 100, 256)],
        "graphs": _graphs(),
        "shares": _shares(),
        "thresholds": _thresholds(),
        "fixed_points": _fixed_points(),
        "plans": _plans(),
        "models": _models(),
        "ckks": _ckks(),
    }


# --- masked-round-1.json


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
    plan = _plan(fingerprint(model()), Step.ADVERTISE, PayloadKind.ADVERT)
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
        "model": _arrays(model()),
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
