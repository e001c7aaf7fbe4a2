"""The published vectors of masked rounds and CKKS, read by this package and by the second reader.

As in `test_vectors`, a file that fails shows a change of the format: it is never written anew to pass.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from securefl.agreement import fixed_points, masked_terms
from securefl.crypto import masks, shares
from securefl.crypto.fixed_point import FixedPoint
from securefl.crypto.identity import Identity
from securefl.crypto.masking_keys import HYBRID
from securefl.crypto.masking_messages import (
    Advert,
    MaskedInput,
    Message,
    ShareMessage,
    SurvivorSignature,
    Unmasking,
)
from securefl.crypto.masking_server import MaskingServer
from securefl.crypto.weighted import weighted_mean
from securefl.messages import RoundPlan
from securefl.release import Tensors
from tests.vectors import make_masking, masking_reader, reader
from tests.vectors.files import FOLDER, Case, cases_of, load, refused, seeds_of

MASKING, ROUND = load("masking-1.json"), load("masked-round-1.json")


def test_the_cases_are_named_once_and_the_seeds_give_the_fingerprints() -> None:
    names = [case["name"] for case in ROUND["cases"]]
    assert len(set(names)) == len(names)
    assert all(case["why"].endswith(".") for case in ROUND["cases"])
    for label, seeds in seeds_of(ROUND).items():
        one = ROUND["identities"][label]
        assert Identity(one["name"], seeds).card.fingerprint == one["fingerprint"]
        assert reader.fingerprint(one["name"], reader.public(seeds)) == one["fingerprint"]


def test_the_second_reader_is_a_second_one() -> None:
    for name in ("reader.py", "masking_reader.py"):
        tree = ast.parse((FOLDER / name).read_text())
        found = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        found += [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
        assert found
        assert not [name for name in found if name.startswith("securefl")]
        assert {name for name in found if name.startswith("tests")} <= {
            "tests.vectors",
            "tests.vectors.reader",
        }


def unhex(value: Mapping[str, Any], *names: str) -> list[bytes]:
    return [bytes.fromhex(value[name]) for name in names]


def test_what_follows_from_what_is_the_same_at_every_making() -> None:
    """Keys, masks, packing, graphs, thresholds, decoding, plans and models by our own code."""
    assert make_masking.derivations() == MASKING


def test_keys_and_masks_by_the_second_reader() -> None:
    for one in MASKING["keys"]:
        root, blind, adverts = unhex(one, "root", "blind", "adverts")
        pair = (one["run"], one["round"], one["dealer"], one["holder"], adverts)
        seed = masking_reader.mask_key_seed(root, *pair[:3])
        assert seed.hex() == one["mask_key_seed"]
        public = masking_reader.public_key(seed)
        assert hashlib.sha256(public).hexdigest() == one["mask_key_sha256"]
        assert masking_reader.pair_seed(root, *pair).hex() == one["pair_seed"]
        assert masking_reader.blind_hash(blind, adverts, one["dealer"]).hex() == one["blind_hash"]
        for purpose in ("shares", "pair"):
            assert masking_reader.seal_info(purpose, *pair).hex() == one[f"{purpose}_info"]
    for one in MASKING["streams"]:
        where = one["run"], one["round"], one["vector"], one["parties"]
        seed = masking_reader.stream_seed(bytes.fromhex(one["secret"]), *where)
        assert seed.hex() == one["stream_seed"]
        stream = masking_reader.keystream(seed, 262_144 + 32)
        assert (stream[:32].hex(), stream[-32:].hex()) == (one["bytes_0"], one["bytes_262144"])
    for one in MASKING["masked"]:
        streams = [(bytes.fromhex(stream["seed"]), stream["sign"]) for stream in one["streams"]]
        assert masking_reader.pack(one["values"], one["bits"]).hex() == one["packed"]
        assert masking_reader.masked(one["values"], streams, one["bits"]) == one["masked"]
        assert masking_reader.pack(one["masked"], one["bits"]).hex() == one["masked_packed"]


@pytest.mark.parametrize("case", MASKING["packings"], ids=lambda case: f"{case['bits']}-{case['packed']}")
def test_packings(case: Case) -> None:
    data, bits, length = bytes.fromhex(case["packed"]), case["bits"], case["length"]
    if case["error"] is not None:
        with refused(case):
            masks.unpack(data, bits, length)
        with pytest.raises(reader.Refusal, match=f"^{case['error']}$"):
            masking_reader.unpack(data, bits, length)
        return
    values = masks.unpack(data, bits, length)
    assert masking_reader.unpack(data, bits, length) == values.tolist()
    assert masks.pack(values, bits) == data


def test_graphs_and_thresholds_by_the_second_reader() -> None:
    for count, degree in MASKING["degrees"]:
        assert masking_reader.degree_for(count) == degree
    for one in MASKING["graphs"]:
        near = masking_reader.neighbours(one["silos"], bytes.fromhex(one["digest"]))
        assert {len(them) for them in near.values()} == {one["degree"]}
        first = one["silos"][0]
        assert [one["silos"].index(name) for name in near[first]] == one["neighbours_of_first"]
        digest = hashlib.sha256(reader.canonical(near)).hexdigest()
        assert digest == one["neighbours_sha256"]
    for one in MASKING["thresholds"]:
        given = (one[name] for name in ("threshold", "cohort", "advertised", "members"))
        assert masking_reader.share_threshold(*given) == one["needed"]


def test_shares_of_the_second_reader_are_ours() -> None:
    one = MASKING["shares"]
    secret, salt = unhex(one, "secret", "salt")
    dealt = [bytes.fromhex(share) for share in one["shares"]]
    coefficients = [bytes.fromhex(each) for each in one["coefficients"]]
    assert masking_reader.split(secret, coefficients, len(dealt)) == dealt
    for places in ((1, 2, 3), (5, 2, 4), (1, 3, 4, 5)):
        parts = {place: dealt[place - 1] for place in places}
        assert shares.combine(parts, one["threshold"]) == secret
        assert masking_reader.combine(parts, one["threshold"]) == secret
    for place, (share, commitment) in enumerate(zip(dealt, one["commitments"], strict=True), start=1):
        shares.check(place, share, salt, bytes.fromhex(commitment))
        assert masking_reader.commitment(share, salt).hex() == commitment


@pytest.mark.parametrize(
    "case", MASKING["fixed_points"], ids=lambda case: f"{case['bits']}-{case['error'] or 'good'}"
)
def test_fixed_points(case: Case) -> None:
    terms = case["clip"], case["bits"], case["silos"]
    total = np.array(case["sums"], np.uint32)
    assert FixedPoint(*terms).limit == case["limit"]
    if case["error"] is not None:
        with refused(case):
            FixedPoint(*terms).decode(total)
        with pytest.raises(reader.Refusal, match=f"^{case['error']}$"):
            masking_reader.decode(case["sums"], *terms)
        return
    assert FixedPoint(*terms).decode(total).tolist() == case["values"]
    assert masking_reader.decode(case["sums"], *terms) == case["values"]


def test_plans_models_and_ckks_by_the_second_reader() -> None:
    for one in MASKING["plans"]:
        document = reader.strict(one["document"].encode())
        assert reader.canonical(document).decode() == one["document"]
        assert masking_reader.plan_digest(document).hex() == one["plan"]
        assert masking_reader.round_vectors(document, one["length"]) == one["vectors"]
    assert MASKING["plans"][0]["plan"] == MASKING["plans"][1]["plan"], "steps of one round"
    for one in MASKING["models"]:
        assert masking_reader.model_fingerprint(arrays_of(one["arrays"])) == one["fingerprint"]
    for one in MASKING["ckks"]:
        terms = masking_reader.ckks_terms(one["sums"], one["length"], one["silos"])
        assert terms == {name: one[name] for name in terms}


def arrays_of(listed: Mapping[str, Any]) -> dict[str, tuple[str, list[int], bytes]]:
    return {name: (one["dtype"], one["shape"], bytes.fromhex(one["data"])) for name, one in listed.items()}


ROUND_CARDS = {
    label: Identity(ROUND["identities"][label]["name"], seeds).card
    for label, seeds in seeds_of(ROUND).items()
}
KEYS = {label: card.fingerprint for label, card in ROUND_CARDS.items()}
PLAN = RoundPlan.model_validate_json(ROUND["plan"])
MESSAGES: Mapping[str, type[Message]] = {
    "advert": Advert,
    "shares": ShareMessage,
    "survivors": SurvivorSignature,
    "unmasking": Unmasking,
}


def message_of(text: str) -> Tensors:
    return {"message": np.frombuffer(text.encode(), np.uint8)}


def test_the_masked_round_is_opened() -> None:
    """What the silos sent, taken in by the server."""
    assert PLAN.sums is not None
    server = MaskingServer(ROUND_CARDS, masked_terms(PLAN, 8), threads=1)
    sent, relayed = ROUND["messages"], ROUND["relayed"]

    def digest(message: Message) -> str:
        return hashlib.sha256(message.tensors()["message"].tobytes()).hexdigest()

    for label, text in sent["advert"].items():
        server.receive_advert(KEYS[label], Advert.from_tensors(message_of(text)))
    assert digest(server.close_adverts()) == relayed["adverts"]
    for label, text in sent["shares"].items():
        server.receive_shares(KEYS[label], ShareMessage.from_tensors(message_of(text)))
    deliveries = server.close_shares()
    assert {label: digest(deliveries[KEYS[label]]) for label in KEYS} == relayed["deliveries"]
    for label, one in sent["masked"].items():
        rows = {f"vector/{name}": bytes.fromhex(data) for name, data in one["vectors"].items()}
        arrays = {name: np.frombuffer(data, np.uint8) for name, data in rows.items()}
        message = MaskedInput.from_tensors({**message_of(one["message"]), **arrays})
        server.receive_input(KEYS[label], message)
    assert digest(server.close_inputs()) == relayed["survivors"]
    for label, text in sent["survivors"].items():
        server.receive_signature(KEYS[label], SurvivorSignature.from_tensors(message_of(text)))
    assert digest(server.close_signatures()) == relayed["request"]
    for label, text in sent["unmasking"].items():
        server.receive_unmasking(KEYS[label], Unmasking.from_tensors(message_of(text)))
    result = server.result()
    assert {name: total.tolist() for name, total in result.sums.items()} == ROUND["sums"]
    mean = weighted_mean(result.sums["update"], result.sums["weight"], *fixed_points(PLAN.sums, len(KEYS)))
    assert mean.tolist() == ROUND["mean"]


def read_round() -> dict[str, dict[str, dict[str, Any]]]:
    """Every message of the round by kind and fingerprint, its signature checked, by the second reader."""
    public = {label: reader.public(seeds) for label, seeds in seeds_of(ROUND).items()}
    return {
        what: {
            KEYS[label]: masking_reader.read_message(
                what, (text if isinstance(text, str) else text["message"]).encode(), public[label]
            )
            for label, text in ROUND["messages"][what].items()
        }
        for what in masking_reader.FORMS
    }


def test_the_masked_round_is_opened_by_the_second_reader() -> None:
    plan, read, unbase64 = reader.strict(ROUND["plan"].encode()), read_round(), masking_reader.unbase64
    adverts, dealt, inputs = read["advert"], read["shares"], read["masked"]
    assert (len(adverts), len(dealt), len(inputs)) == (4, 4, 3)
    digest = masking_reader.adverts_digest(adverts[silo] for silo in sorted(adverts))
    agreed = {
        "plan": masking_reader.plan_digest(plan),
        "model": bytes.fromhex(masking_reader.model_fingerprint(arrays_of(ROUND["model"]))),
    }
    assert agreed["model"].hex() == plan["model"]
    view = {**agreed, "adverts": digest, "shared": masking_reader.list_hash(dealt)}
    view["survivors"] = masking_reader.list_hash(inputs)
    for message in (*adverts.values(), *read["survivors"].values()):
        assert (message["run"], message["round"]) == (plan["run"], plan["round"])
        assert all(unbase64(message[name]) == view[name] for name in view.keys() & message.keys())
    for message in (*dealt.values(), *inputs.values(), *read["unmasking"].values()):
        assert unbase64(message["adverts"]) == digest

    packed = {KEYS[label]: one["vectors"] for label, one in ROUND["messages"]["masked"].items()}
    vectors = masking_reader.round_vectors(
        plan, sum(len(one[2]) // 4 for one in arrays_of(ROUND["model"]).values())
    )
    sums = {}
    for name, one in vectors.items():
        rows = {
            silo: masking_reader.unpack(bytes.fromhex(row[name]), one["bits"], one["length"])
            for silo, row in packed.items()
        }
        sums[name] = masking_reader.opened_sum(
            plan, adverts, dealt, rows, read["unmasking"], name, one["bits"]
        )
    assert sums == ROUND["sums"]

    terms = plan["sums"]
    (weight,) = masking_reader.decode(sums["weight"], 1.0, 32, len(KEYS))
    assert round(weight * terms["max_rows"]) == sum(ROUND["rows"].values())
    values = masking_reader.decode(sums["update"], terms["clip"], terms["bits"], len(KEYS))
    assert [value / weight for value in values] == pytest.approx(ROUND["mean"], rel=1e-12)
    # And that is the mean of the changes by their rows, to a step of the encoding for each silo.
    step = terms["clip"] / ((2 ** (terms["bits"] - 1) - 1) // len(KEYS)) / weight
    for place, value in enumerate(ROUND["mean"]):
        total = sum(ROUND["rows"][label] * change[place] for label, change in ROUND["changes"].items())
        assert value == pytest.approx(total / sum(ROUND["rows"].values()), abs=3 * step)


def test_what_was_sealed_in_the_masked_round_opens_for_the_second_reader() -> None:
    """Shares to the holder's cipher key, and a pair's seed to its mask key."""
    plan, read, unbase64 = reader.strict(ROUND["plan"].encode()), read_round(), masking_reader.unbase64
    run, number = plan["run"], plan["round"]
    adverts, dealt = read["advert"], read["shares"]
    digest = masking_reader.adverts_digest(adverts[silo] for silo in sorted(adverts))
    group = sorted(KEYS.values())
    drawn = {KEYS[label]: one for label, one in ROUND["drawn"].items()}
    held: dict[str, dict[str, dict[int, bytes]]] = {silo: {"root": {}, "blind": {}} for silo in group}
    for dealer in group:
        root, cipher = unhex(drawn[dealer], "root", "cipher_key_seed")
        mask_key = masking_reader.mask_key_seed(root, run, number, dealer)
        assert masking_reader.public_key(mask_key) == unbase64(adverts[dealer]["mask_key"])
        assert masking_reader.public_key(cipher) == unbase64(adverts[dealer]["cipher_key"])
        for deal in dealt[dealer]["deals"]:
            holder = deal["holder"]
            assert bool(deal["sealed"]) == (holder != dealer)
            assert bool(deal["seed"]) == (holder > dealer)
            if not deal["sealed"]:
                continue
            own_root, own_cipher = unhex(drawn[holder], "root", "cipher_key_seed")
            info = masking_reader.seal_info("shares", run, number, dealer, holder, digest)
            plain = masking_reader.unseal(own_cipher, unbase64(deal["sealed"]), info)
            for kind, at in (("root", 0), ("blind", 64)):
                share, salt = plain[at : at + 32], plain[at + 32 : at + 64]
                assert masking_reader.commitment(share, salt) == unbase64(deal[f"{kind}_commitment"])
                held[dealer][kind][group.index(holder) + 1] = share
            if deal["seed"]:
                info = masking_reader.seal_info("pair", run, number, dealer, holder, digest)
                own = masking_reader.mask_key_seed(own_root, run, number, holder)
                seed = masking_reader.pair_seed(root, run, number, dealer, holder, digest)
                assert masking_reader.unseal(own, unbase64(deal["seed"]), info) == seed
        for kind, found in held[dealer].items():
            secret = masking_reader.combine(found, plan["sums"]["threshold"])
            assert secret.hex() == drawn[dealer][kind]


def test_what_each_silo_masked_is_known_to_who_knows_its_secrets() -> None:
    """A masked vector less its masks encodes the change times the hidden weight, and that weight."""
    plan, read = reader.strict(ROUND["plan"].encode()), read_round()
    run, number, terms = plan["run"], plan["round"], plan["sums"]
    digest = masking_reader.adverts_digest(read["advert"][silo] for silo in sorted(read["advert"]))
    secrets = {KEYS[label]: unhex(one, "root", "blind") for label, one in ROUND["drawn"].items()}
    for label, sent in ROUND["messages"]["masked"].items():
        me, weight = KEYS[label], ROUND["rows"][label] / terms["max_rows"]
        due = {"update": [weight * one for one in ROUND["changes"][label]], "weight": [weight]}
        for name, clip, bits in (("update", terms["clip"], terms["bits"]), ("weight", 1.0, 32)):
            streams = [(masking_reader.stream_seed(secrets[me][1], run, number, name, [me]), -1)]
            for peer in read["shares"].keys() - {me}:
                small, large = sorted((me, peer))
                pair = masking_reader.pair_seed(secrets[small][0], run, number, small, large, digest)
                seed = masking_reader.stream_seed(pair, run, number, name, [me, peer])
                streams.append((seed, 1 if peer < me else -1))
            values = masking_reader.unpack(bytes.fromhex(sent["vectors"][name]), bits, len(due[name]))
            plain = masking_reader.decode(masking_reader.masked(values, streams, bits), clip, bits, len(KEYS))
            step = clip / ((2 ** (bits - 1) - 1) // len(KEYS))
            assert plain == pytest.approx(due[name], abs=step)


def altered(case: Case) -> str:
    text: str = ROUND["messages"][case["what"]][case["of"]]
    if case["replace"]:
        old, new = case["replace"]
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@cases_of(ROUND)
def test_messages_of_a_masked_round(case: Case) -> None:
    def check() -> None:
        message: Any = MESSAGES[case["what"]].from_tensors(message_of(altered(case)))
        context = f"securefl/1 {case['what']}".encode()
        HYBRID.verify(ROUND_CARDS[case["of"]], context, message.statement(), message.signature)

    if case["error"] is None:
        check()
    else:
        with refused(case):
            check()


@cases_of(ROUND)
def test_messages_of_a_masked_round_read_by_the_second_reader(case: Case) -> None:
    keys = reader.public(seeds_of(ROUND)[case["of"]])
    if case["error"] is None:
        masking_reader.read_message(case["what"], altered(case).encode(), keys)
    else:
        with pytest.raises(reader.Refusal, match=f"^{case['error']}$"):
            masking_reader.read_message(case["what"], altered(case).encode(), keys)
