"""The content of masking-1.json, which is the same at every making."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.agreement import UPDATE, WEIGHT, ckks_terms, masked_terms
from securefl.crypto import graph, masking_keys, masks, shares
from securefl.crypto.ckks_terms import chunk_name
from securefl.crypto.fixed_point import FixedPoint
from securefl.messages import NoiseTerms, Party, RoundPlan, Step, SumTerms
from securefl.release import PayloadKind, Tensors, canonical_json, fingerprint
from tests.vectors import masking_reader
from tests.vectors.people import ALICE, BOB, CAROL, MALLORY

RUN = "0123456789abcdef" * 2
PEOPLE = {one.name: one for one in (ALICE, BOB, CAROL, MALLORY)}
Made = dict[str, Any]


def drawn(label: str, size: int = 32) -> bytes:
    """Bytes that the label gives."""
    return hashlib.shake_256(label.encode()).digest(size)


def silo(number: int) -> str:
    """The fingerprint of a silo of whom there is nothing else."""
    return drawn(f"silo {number}").hex()


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
        **{"degree": None, "post_quantum": False, "noise": None},
    }
    return SumTerms(**{**default, **fields})


def plan(weights: str, step: Step, answer: PayloadKind, **fields: Any) -> RoundPlan:
    """A plan of round 12 for the four people. weights: fingerprint of the model."""
    default: dict[str, Any] = {
        **{"run": RUN, "round": 12, "rounds": 20, "method": "fedavg", "protection": "masked"},
        "cohort": tuple(Party(name=one.name, key=one.card.fingerprint) for one in PEOPLE.values()),
        **{"sums": _sums(), "epochs": 1},
    }
    return RoundPlan(**{**default, "step": step, "answer": answer, "model": weights, **fields})


def _plans() -> list[Made]:
    noise = NoiseTerms(clip=1.0, epsilon=8.0, noise_multiplier=None, delta=1e-05, colluders=0)
    weights = drawn("model").hex()
    plans = (
        plan(weights, Step.ADVERTISE, PayloadKind.ADVERT),
        plan(weights, Step.TRAIN, PayloadKind.MASKED_MODEL, relayed=("bob", "carol")),
        plan(weights, Step.TRAIN, PayloadKind.MASKED_MODEL, sums=_sums(noise=noise, bits=32)),
    )
    made = []
    for one in plans:
        terms = masked_terms(one, 6)
        vectors = {each.name: {"length": each.length, "bits": each.bits} for each in terms.vectors}
        document = canonical_json(one.model_dump(mode="json")).decode()
        made.append({"document": document, "length": 6, "plan": terms.plan.hex(), "vectors": vectors})
    return made


def model() -> dict[str, NDArray[np.float32]]:
    """The weights of the round."""
    return {
        "weight": np.array([[0.5, -0.25, 1.0], [2.0, 0.125, -3.0]], np.float32),
        "bias": np.array([0.0, -1.5], np.float32),
    }


def arrays(tensors: Tensors) -> Made:
    """As the vectors list them."""
    kinds = {"<f4": "F32", "<i8": "I64", "|u1": "U8"}
    return {
        name: {"dtype": kinds[one.dtype.str], "shape": list(one.shape), "data": one.tobytes().hex()}
        for name, one in tensors.items()
    }


def _models() -> list[Made]:
    models: list[Tensors] = [model()]
    models.append({"count": np.array(7, np.int64), "ckks.000000": np.arange(5, dtype=np.uint8)})
    return [{"arrays": arrays(one), "fingerprint": fingerprint(one)} for one in models]


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
    """The whole file."""
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
