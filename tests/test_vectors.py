"""The published vectors, read by this package and by the second reader of `tests/vectors/reader.py`.

The files are only read here. One that fails shows a change of the format: it is never written anew to pass.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securefl import errors
from securefl.agreement import fixed_points, masked_terms
from securefl.crypto import masks, shares
from securefl.crypto.envelope import open_, verify
from securefl.crypto.fixed_point import FixedPoint
from securefl.crypto.identity import Card, Identity
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
from securefl.crypto.statements import Revocation, Rotation, parse_statement
from securefl.crypto.weighted import weighted_mean
from securefl.errors import LedgerCorrupt, SecureflError
from securefl.ledger import verify_ledger
from securefl.messages import RoundPlan
from securefl.receipt import read_receipt
from securefl.release import Tensors, decode
from tests.vectors import make_masking, masking_reader, reader

FOLDER = Path(__file__).parent / "vectors"
Case = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / name).read_text()))


def cases_of(file: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", file["cases"], ids=lambda case: case["name"])


def seeds_of(file: dict[str, Any]) -> dict[str, dict[str, bytes]]:
    return {
        label: {half: bytes.fromhex(seed) for half, seed in one["seeds"].items()}
        for label, one in file["identities"].items()
    }


@contextmanager
def refused(case: Case) -> Iterator[None]:
    """By the exception that the case names, and by none derived from it."""
    with pytest.raises(SecureflError) as caught:
        yield
    assert type(caught.value).__name__ == case["error"]


PAIR, ENVELOPES, BODIES = load("envelope-1.json"), load("envelope-refusals-1.json"), load("body-1.json")
STATEMENTS, LEDGERS = load("statements-1.json"), load("ledger-refusals-1.json")
MASKING, ROUND = load("masking-1.json"), load("masked-round-1.json")


@pytest.mark.parametrize(
    "file", [PAIR, ENVELOPES, STATEMENTS, LEDGERS, ROUND], ids=lambda file: file["format"]
)
def test_seeds_give_the_fingerprints(file: dict[str, Any]) -> None:
    for label, seeds in seeds_of(file).items():
        one = file["identities"][label]
        name = one.get("name", label)
        assert Identity(name, seeds).card.fingerprint == one["fingerprint"]
        assert reader.fingerprint(name, reader.public(seeds)) == one["fingerprint"]


@pytest.mark.parametrize(
    "file", [ENVELOPES, BODIES, STATEMENTS, LEDGERS, ROUND], ids=lambda file: file["format"]
)
def test_names_are_used_once_and_every_case_says_why(file: dict[str, Any]) -> None:
    names = [case["name"] for case in file["cases"]]
    assert len(set(names)) == len(names)
    assert all(case["why"].endswith(".") for case in file["cases"])
    assert {case["error"] is None for case in file["cases"]} == {True, False}


# --- envelopes

SEEDS = seeds_of(ENVELOPES)
PEOPLE = {label: Identity(ENVELOPES["identities"][label]["name"], seeds) for label, seeds in SEEDS.items()}
KNOWN = {case["name"]: case for case in ENVELOPES["cases"]}


def envelope_of(case: Case) -> bytes:
    if "of" not in case:
        return base64.b64decode(case["envelope"], validate=True)
    data = bytearray(envelope_of(KNOWN[case["of"]]))
    del data[case.get("truncate", len(data)) :]
    data += bytes.fromhex(case.get("append", ""))
    if "flip" in case:
        byte, bit = case["flip"]
        data[byte] ^= 1 << bit
    return bytes(data)


def test_the_first_envelope_opens() -> None:
    people = {name: Identity(name, seeds) for name, seeds in seeds_of(PAIR).items()}
    data = base64.b64decode(PAIR["envelope"])
    verified = verify(data, {name: one.card for name, one in people.items()})
    assert verified.header.model_dump(mode="json") == PAIR["header"]
    roster = {name: reader.public(seeds) for name, seeds in seeds_of(PAIR).items()}
    for name in ("bob", "carol"):
        assert open_(verified, people[name]).hex() == PAIR["body"]
        assert reader.open_envelope(data, roster, name, seeds_of(PAIR)[name]).hex() == PAIR["body"]
    with pytest.raises(errors.WrongRecipient):
        open_(verified, people["alice"])


@cases_of(ENVELOPES)
def test_envelopes(case: Case) -> None:
    data = envelope_of(case)
    roster = {PEOPLE[label].name: PEOPLE[label].card for label in case["roster"]}
    if case["error"] is None:
        assert open_(verify(data, roster), PEOPLE[case["reader"]]).hex() == case["body"]
    else:
        with refused(case):
            open_(verify(data, roster), PEOPLE[case["reader"]])


@cases_of(ENVELOPES)
def test_envelopes_read_by_the_second_reader(case: Case) -> None:
    roster = {PEOPLE[label].name: reader.public(SEEDS[label]) for label in case["roster"]}
    me = PEOPLE[case["reader"]].name
    try:
        found = reader.open_envelope(envelope_of(case), roster, me, SEEDS[case["reader"]]).hex()
    except reader.Refusal as refusal:
        found = str(refusal)
    assert found == (case["error"] or case["body"])


# --- bodies

_TYPES = {"F32": "<f4", "I64": "<i8", "U8": "u1"}


@cases_of(BODIES)
def test_bodies(case: Case) -> None:
    data = bytes.fromhex(case["body"])
    if case["error"] is not None:
        with refused(case):
            decode(data)
        return
    body = decode(data)
    assert (body.kind, body.document) == (case["kind"], json.loads(case["document"]))
    assert set(body.tensors) == set(case["tensors"])
    for name, one in case["tensors"].items():
        array = body.tensors[name]
        assert (array.dtype, list(array.shape)) == (np.dtype(_TYPES[one["dtype"]]), one["shape"])
        assert array.tobytes().hex() == one["data"]


@cases_of(BODIES)
def test_bodies_read_by_the_second_reader(case: Case) -> None:
    data = bytes.fromhex(case["body"])
    if case["error"] is not None:
        with pytest.raises(reader.Refusal, match=f"^{case['error']}$"):
            reader.read_body(data)
        return
    kind, document, tensors = reader.read_body(data)
    assert (kind, document) == (case["kind"], json.loads(case["document"]))
    read = {name: {"dtype": t, "shape": s, "data": raw.hex()} for name, (t, s, raw) in tensors.items()}
    assert read == case["tensors"]
    assert reader.write_body(kind, document, tensors) == data


# --- cards, statements, receipts, identity files

TEXTS = {case["name"]: case["text"] for case in STATEMENTS["cases"] if "text" in case}


def text_of(case: Case) -> bytes:
    text: str = case["text"] if "of" not in case else TEXTS[case["of"]]
    if "replace" in case:
        old, new = case["replace"]
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text.encode("ascii")


def read(case: Case, folder: Path) -> str:
    """The fingerprint or hash that a text of the case's kind is about."""
    data, card = text_of(case), Card.model_validate(STATEMENTS["cards"][case["signer"]])
    match case["what"]:
        case "card":
            return Card.from_json(data, "a card").fingerprint
        case "receipt":
            return read_receipt(data, card).silo
        case "identity":
            file = folder / "alice.key.json"
            file.write_bytes(data)
            file.chmod(0o600)
            passphrase = case["passphrase"]
            return Identity.load(file, passphrase and passphrase.encode()).card.fingerprint
    statement = parse_statement(data, "a statement")
    if isinstance(statement, Rotation):
        statement.verify(card)
    assert isinstance(statement, {"rotation": Rotation, "revocation": Revocation}[case["what"]])
    return statement.card.fingerprint


ABOUT = {
    "card": "alice",
    "rotation": "other-alice",
    "revocation": "alice",
    "receipt": "bob",
    "identity": "alice",
}


@cases_of(STATEMENTS)
def test_statements(case: Case, tmp_path: Path) -> None:
    if case["error"] is None:
        assert read(case, tmp_path) == STATEMENTS["identities"][ABOUT[case["what"]]]["fingerprint"]
    else:
        with refused(case):
            read(case, tmp_path)


def test_statements_read_by_the_second_reader() -> None:
    keys = {label: reader.card_keys(card) for label, card in STATEMENTS["cards"].items()}
    for label, one in keys.items():
        assert one == reader.public(seeds_of(STATEMENTS)[label])
    alice, bob, successor = (STATEMENTS["identities"][label] for label in ("alice", "bob", "other-alice"))

    rotation = reader.read_document(TEXTS["rotation"].encode(), keys["alice"], b"securefl/1 rotation")
    assert rotation["old"] == alice["fingerprint"]
    assert reader.fingerprint("alice", reader.card_keys(rotation["card"])) == successor["fingerprint"]
    revocation = reader.read_document(TEXTS["revocation"].encode(), keys["alice"], b"securefl/1 revocation")
    assert revocation["card"] == STATEMENTS["cards"]["alice"]
    receipt = reader.read_document(TEXTS["receipt"].encode(), keys["server"], b"securefl/1 receipt")
    assert (receipt["format"], receipt["silo"]) == ("securefl.receipt/1", bob["fingerprint"])
    passphrase = next(case["passphrase"] for case in STATEMENTS["cases"] if case["name"] == "encrypted")
    opened = reader.open_identity(TEXTS["encrypted"].encode(), passphrase.encode())
    assert {half: seed.hex() for half, seed in opened.items()} == alice["seeds"]


@pytest.mark.parametrize("of", ["rotation", "revocation", "receipt"])
def test_the_second_reader_wants_both_signatures(of: str) -> None:
    signer = "server" if of == "receipt" else "alice"
    keys = reader.card_keys(STATEMENTS["cards"][signer])
    altered = [case for case in STATEMENTS["cases"] if case["name"] in (f"{of}-ed25519", f"{of}-mldsa65")]
    assert len(altered) == 2
    for case in altered:
        with pytest.raises(reader.Refusal, match="BadSignature"):
            reader.read_document(text_of(case), keys, f"securefl/1 {of}".encode())


# --- ledgers

LINES = (FOLDER / "ledger-1.jsonl").read_bytes().splitlines(keepends=True)
HEAD = (FOLDER / "ledger-1.head.json").read_bytes()


def lines_of(case: Case) -> list[bytes]:
    return [LINES[line - 1] if isinstance(line, int) else line.encode("ascii") for line in case["lines"]]


def head_of(case: Case) -> bytes:
    return case["head"].encode("ascii") if case.get("head") else HEAD


def ledger_of(case: Case, folder: Path) -> Path:
    path = folder / "ledger-1.jsonl"
    path.write_bytes(b"".join(lines_of(case)))
    if case.get("head", "") is not None:
        (folder / "ledger-1.head.json").write_bytes(head_of(case))
    return path


@cases_of(LEDGERS)
def test_ledgers(case: Case, tmp_path: Path) -> None:
    path = ledger_of(case, tmp_path)
    if case["error"] is None:
        summary = verify_ledger(path)
        whole = [line for line in case["lines"] if isinstance(line, int) or line.endswith("\n")]
        assert (summary.entries, len(summary.releases), len(summary.refusals)) == (len(whole), 4, 1)
        assert summary.restored == case.get("restored", False)
        assert summary.fingerprint == LEDGERS["identities"]["silo-1-next"]["fingerprint"]
        return
    with pytest.raises(LedgerCorrupt) as caught:
        verify_ledger(path)
    message = str(caught.value).removeprefix(f"{tmp_path}/")
    found = re.match(r"ledger-1\.jsonl: line (\d+): ", message)
    assert (int(found[1]) if found else message.partition(": ")[0]) == (
        "ledger-1.head.json" if case["at"] == "head" else case["at"]
    )


def test_the_ledger_read_by_the_second_reader() -> None:
    entries = reader.read_ledger(LINES, HEAD)
    kinds = ["genesis", "approval", "release", "release", "refusal", "rotation", "release", "release"]
    assert [entry["entry"] for entry in entries] == kinds
    squares, deltas, reasons = 0.0, [], []
    for entry in entries:
        if entry["entry"] != "release":
            continue
        if entry["claim"]["mechanism"] == "none":
            reasons.append(entry["claim"]["reason"])
        else:
            squares += entry["claim"]["mu"] ** 2
            deltas.append(entry["claim"]["delta"])
            epsilon = reader.epsilon(math.sqrt(squares), min(deltas))
            assert entry["account"]["private_epsilon"] == pytest.approx(epsilon, rel=1e-9)
        account: Mapping[str, Any] = entry["account"]
        assert account["mu"] == pytest.approx(math.sqrt(squares), rel=1e-12)
        assert account["delta"] == (min(deltas) if deltas else None)
        assert account["nonprivate"] == sorted(set(reasons))
        assert account["nonprivate_releases"] == len(reasons)


def test_the_second_reader_refuses_what_the_chain_shows() -> None:
    """Of the altered ledgers, those where no rule about the entries' meaning is needed."""
    names = [
        "third-dropped",
        "swapped",
        "repeated",
        "last-cut",
        "signature-ed25519",
        "by-old-keys",
        "no-consent",
        "head-account",
        "head-history",
        "head-restored",
        *(f"history-{what}" for what in ("last", "first", "gap", "order", "index")),
    ]
    chosen = [case for case in LEDGERS["cases"] if case["name"] in names]
    assert len(chosen) == len(names)
    for case in chosen:
        with pytest.raises(reader.Refusal):
            reader.read_ledger(lines_of(case), head_of(case))


def test_restored_ledgers_read_by_the_second_reader() -> None:
    """And what confirms them, by the second reader alone: the first has a test of its own."""
    cases = {case["name"]: case for case in LEDGERS["cases"] if case.get("restored") is not None}
    assert {name: case["restored"] for name, case in cases.items()} == {
        "restored": True,
        "restored-twice": True,
        "restored-confirmed": False,
    }
    for case in cases.values():
        assert len(reader.read_ledger(lines_of(case), head_of(case))) == len(case["lines"])
    copy, confirmed = json.loads(HEAD), json.loads(cases["restored-confirmed"]["head"])
    assert reader.may_confirm(copy, copy)
    assert reader.may_confirm(confirmed, copy)
    for name in ("restored", "restored-twice"):
        assert not reader.may_confirm(json.loads(cases[name]["head"]), copy), "itself not confirmed"
        assert not reader.may_confirm(copy, json.loads(cases[name]["head"])), "older than the copy"


# --- masked rounds and CKKS


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
