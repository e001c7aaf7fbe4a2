"""Client and server together: every refusal by its own exception, and the round going on without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securefl import errors
from securefl.client import Client
from securefl.crypto import envelope
from securefl.crypto.identity import Identity
from securefl.errors import (
    BadSignature,
    EnvelopeError,
    MalformedEnvelope,
    NonFiniteUpdate,
    PayloadError,
    PolicyRefusal,
    ProtocolError,
    Replayed,
    TooFewSilos,
    UnknownSender,
    WrongRecipient,
    WrongRound,
    WrongRun,
    WrongShape,
)
from securefl.ledger import verify_ledger
from securefl.local import train_locally
from securefl.messages import Party, Step, parse_plan
from securefl.policy import Ceiling
from securefl.relayed import Reader, relayed_knowledge
from securefl.release import NonPrivate, PayloadKind, Release, decode, encode, encode_release
from tests.federation import Parties, make_parties, tiny_config


@pytest.fixture
def parties(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Parties:
    return make_parties(tiny_config(tiny_encoder, tiny_data), tmp_path)


@pytest.fixture
def sharing(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Parties:
    """At the step where centroids are shared (round 2)."""
    config = tiny_config(tiny_encoder, tiny_data, federation={"method": "fedkc"})
    ready = make_parties(config, tmp_path)
    ready.play(lambda server: server.round == 2)
    return ready


def _reseal(parties: Parties, name: str, body: bytes, kind: PayloadKind, **header: Any) -> bytes:
    """A message of silo `name` with chosen content, properly sealed and signed."""
    client = parties.clients[name]
    template = envelope.read_header(client.handle(parties.server.outgoing()[name]))
    recipients = header.pop("cards", [client.server])
    changed = template.model_copy(
        update={
            "kind": kind,
            "recipients": tuple(Party(name=c.name, key=c.fingerprint) for c in recipients),
            **header,
        }
    )
    return envelope.seal(body, changed, client.identity, recipients)


def _reader(client: Client) -> Reader:
    return Reader(client.identity, client.roster, client.slm, 1)


def test_the_average_is_the_mean_weighted_by_rows(parties: Parties) -> None:
    for answer in parties.answers().values():
        parties.server.receive(answer)
    parties.server.close_step()
    total = sum(len(rows) for rows in parties.corpus.train.values())
    for tensor in parties.server.model:
        by_hand = sum(
            len(client.data.train) / total * client.slm.state()[tensor].astype(np.float64)
            for client in parties.clients.values()
        )
        np.testing.assert_allclose(parties.server.model[tensor], by_hand, atol=1e-6)


Breaker = Callable[[bytes], bytes]


def _flip(message: bytes) -> bytes:
    return message[:-5000] + bytes([message[-5000] ^ 1]) + message[-4999:]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_flip, BadSignature),
        (lambda message: message[:-1], MalformedEnvelope),
        (lambda message: message[: len(message) // 2], MalformedEnvelope),
        (lambda message: message + b"\0", MalformedEnvelope),
        (lambda message: b"", MalformedEnvelope),
        (lambda message: b"not an envelope at all", MalformedEnvelope),
    ],
    ids=["tampered", "cut by a byte", "cut in half", "a byte more", "empty", "other bytes"],
)
def test_a_broken_answer_is_refused_and_the_round_goes_on(
    parties: Parties, change: Breaker, expected: type[EnvelopeError]
) -> None:
    answers = parties.answers()
    names = list(answers)
    with pytest.raises(expected):
        parties.server.receive(change(answers[names[0]]))
    for name in names[1:]:
        parties.server.receive(answers[name])
    assert set(parties.server.admitted()) == set(names[1:])
    parties.server.close_step()
    assert parties.server.round == 2


def test_after_a_broken_copy_the_true_message_is_still_admitted(parties: Parties) -> None:
    answer = parties.answers()["silo-1"]
    with pytest.raises(BadSignature):
        parties.server.receive(_flip(answer))
    parties.server.receive(answer)
    assert "silo-1" in parties.server.admitted()


def test_a_replay_is_refused(parties: Parties) -> None:
    answer = parties.answers()["silo-1"]
    parties.server.receive(answer)
    with pytest.raises(Replayed):
        parties.server.receive(answer)


def test_an_answer_of_an_earlier_round_is_refused(parties: Parties) -> None:
    late = parties.answers()
    for name in ("silo-1", "silo-2"):
        parties.server.receive(late[name])
    parties.server.close_step()
    with pytest.raises(WrongRound):
        parties.server.receive(late["silo-3"])


def test_an_answer_of_another_run_is_refused(parties: Parties) -> None:
    body = encode_release(Release(PayloadKind.MODEL, {}, {}, NonPrivate(reason="test")))
    with pytest.raises(WrongRun):
        parties.server.receive(_reseal(parties, "silo-1", body, PayloadKind.MODEL, run="f" * 32))


def test_an_answer_to_somebody_else_is_refused(parties: Parties) -> None:
    """Re-addressed by its own sender: sealed to a peer, sent to the server."""
    body = encode_release(Release(PayloadKind.MODEL, {}, {}, NonPrivate(reason="test")))
    peer = parties.clients["silo-2"].identity.card
    with pytest.raises(WrongRecipient):
        parties.server.receive(_reseal(parties, "silo-1", body, PayloadKind.MODEL, cards=[peer]))


def test_a_stranger_and_an_impostor_are_refused(parties: Parties) -> None:
    client = parties.clients["silo-1"]
    header = envelope.read_header(client.handle(parties.server.outgoing()["silo-1"]))
    for name in ("silo-9", "silo-1"):
        stranger = Identity.generate(name)
        forged = header.model_copy(update={"sender": Party(name=name, key=stranger.card.fingerprint)})
        with pytest.raises(UnknownSender):
            parties.server.receive(envelope.seal(b"x", forged, stranger, [client.server]))


def test_another_kind_than_asked_is_refused(parties: Parties) -> None:
    body = encode_release(Release(PayloadKind.METRICS, {}, {"metrics": {}}, NonPrivate(reason="test")))
    with pytest.raises(MalformedEnvelope):
        parties.server.receive(_reseal(parties, "silo-1", body, PayloadKind.METRICS))
    with pytest.raises(PayloadError):  # marked as a model, with metrics inside
        parties.server.receive(_reseal(parties, "silo-2", body, PayloadKind.MODEL))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_update_is_refused_by_the_silos_name(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, value: float
) -> None:
    def poison(slm: Any, rows: Any, *rest: Any) -> None:
        train_locally(slm, rows, *rest)
        if rows is poisoned:
            with torch.no_grad():
                slm.model.classifier.weight[0, 0] = value

    ready = make_parties(tiny_config(tiny_encoder, tiny_data), tmp_path, train=poison)
    poisoned = ready.clients["silo-2"].data.train
    answers = ready.answers()
    with pytest.raises(NonFiniteUpdate, match="silo-2"):
        ready.server.receive(answers["silo-2"])
    for name in ("silo-1", "silo-3"):
        ready.server.receive(answers[name])
    ready.server.close_step()
    assert all(np.isfinite(array).all() for array in ready.server.model.values())


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "type"])
def test_an_update_of_another_shape_is_refused(parties: Parties, change: str) -> None:
    state = dict(parties.clients["silo-1"].slm.state())
    first = sorted(state)[0]
    if change == "missing":
        del state[first]
    elif change == "extra":
        state["surprise"] = np.zeros(1, np.float32)
    elif change == "shape":
        state[first] = np.zeros(3, np.float32)
    else:
        state[first] = np.zeros(state[first].shape, np.int64)
    body = encode_release(Release(PayloadKind.MODEL, state, {"rows": 5}, NonPrivate(reason="test")))
    with pytest.raises(WrongShape, match="silo-1"):
        parties.server.receive(_reseal(parties, "silo-1", body, PayloadKind.MODEL))


@pytest.mark.parametrize("rows", [0, -3, 1.5, True, "7", None, 10**12])
def test_an_absurd_row_count_is_refused(parties: Parties, rows: object) -> None:
    state = parties.clients["silo-1"].slm.state()
    body = encode_release(Release(PayloadKind.MODEL, state, {"rows": rows}, NonPrivate(reason="test")))
    with pytest.raises(PayloadError, match="silo-1"):
        parties.server.receive(_reseal(parties, "silo-1", body, PayloadKind.MODEL))


def test_one_silo_alone_is_not_averaged(parties: Parties) -> None:
    parties.server.receive(parties.answers()["silo-1"])
    with pytest.raises(TooFewSilos):
        parties.server.close_step()


# --- centroids


def test_the_server_cannot_open_centroids_and_peers_can(sharing: Parties) -> None:
    answer = sharing.answers()["silo-1"]
    verified = envelope.verify(answer, sharing.server.roster)
    with pytest.raises(WrongRecipient):
        envelope.open_(verified, sharing.server.identity)
    for peer in ("silo-2", "silo-3"):
        assert envelope.open_(verified, sharing.clients[peer].identity)


def test_centroids_must_be_sealed_to_exactly_the_peers(sharing: Parties) -> None:
    only = [sharing.clients["silo-2"].identity.card]
    message = _reseal(sharing, "silo-1", b"anything", PayloadKind.CENTROIDS, cards=only)
    with pytest.raises(WrongRecipient):
        sharing.server.receive(message)


def test_centroids_are_the_means_of_their_rows(sharing: Parties) -> None:
    """Against numpy, from what a peer opens and the model's own pooled vectors."""
    from securefl.release import decode_release
    from securefl.training import embed

    client = sharing.clients["silo-1"]
    seen: dict[str, Any] = {}
    client.witness = lambda *arguments: seen.update(evidence=arguments[-1])
    verified = envelope.verify(client.handle(sharing.server.outgoing()["silo-1"]), sharing.server.roster)
    release = decode_release(envelope.open_(verified, sharing.clients["silo-2"].identity))
    pooled = embed(client.slm, client.data.train.texts, "pooled")
    where = {row: i for i, row in enumerate(client.data.train.ids)}
    groups = [[where[row] for row in rows] for rows in seen["evidence"]["clusters"]]
    assert len(groups) == len(release.tensors["centroids"]) > 0
    for group, centroid, size in zip(
        groups, release.tensors["centroids"], release.tensors["sizes"], strict=True
    ):
        np.testing.assert_allclose(centroid, np.mean(pooled[group], axis=0), atol=1e-5)
        assert size == len(group) >= 2


def test_relayed_centroids_are_checked_by_the_client(sharing: Parties) -> None:
    """A server that relays one silo's centroids under another's name, or tampers with them, is found out."""
    answers = sharing.answers()
    for answer in answers.values():
        sharing.server.receive(answer)
    sharing.server.close_step()
    assert sharing.server.step is Step.TRAIN
    honest = dict(sharing.server._relay)
    for lie, expected in [
        ({"silo-2": honest["silo-3"]}, "UnknownSender"),
        ({"silo-2": _flip(honest["silo-2"])}, "BadSignature"),
        ({"silo-2": honest["silo-1"]}, "UnknownSender"),
        ({"silo-2": honest["silo-2"][:50]}, "MalformedEnvelope"),
    ]:
        sharing.server._relay = {**honest, **lie}
        client = sharing.clients["silo-1"]
        message = sharing.server.outgoing()["silo-1"]
        body = decode(envelope.open_(envelope.verify(message, {"server": client.server}), client.identity))
        plan = parse_plan(body)
        assert plan.fedkc is not None
        found, ignored = relayed_knowledge(body.tensors, plan, plan.fedkc, _reader(client))
        assert len(found) == 1, "only the centroids of silo-3 are used"
        assert [(entry.name, entry.error) for entry in ignored] == [("silo-2", expected)]


# --- an active server


def test_a_plan_from_another_server_is_refused(parties: Parties) -> None:
    impostor = Identity.generate("server")
    client = parties.clients["silo-1"]
    parties.server.identity = impostor
    with pytest.raises(UnknownSender):
        client.handle(parties.server.outgoing()["silo-1"])


def test_a_plan_is_answered_once(parties: Parties) -> None:
    client, other = parties.clients["silo-1"], _plan(parties, _set(epochs=2))
    plan = parties.server.outgoing()["silo-1"]
    answer = client.handle(plan)
    assert client.handle(plan) == answer, "the very same bytes, for a server that lost them"
    assert client.handle(parties.server.outgoing()["silo-1"]) == answer, "the same plan in another envelope"
    with pytest.raises(WrongRound, match="another plan"):
        client.handle(other)
    assert len(client.ledger.entries) == 1


def test_a_plan_for_another_silo_is_refused(parties: Parties) -> None:
    with pytest.raises(WrongRecipient):
        parties.clients["silo-2"].handle(parties.server.outgoing()["silo-1"])


def test_a_poisoned_global_model_is_refused(parties: Parties) -> None:
    first = sorted(parties.server.model)[0]
    parties.server.model = {**parties.server.model, first: np.full_like(parties.server.model[first], np.nan)}
    with pytest.raises(NonFiniteUpdate):
        parties.clients["silo-1"].handle(parties.server.outgoing()["silo-1"])


@pytest.mark.parametrize(
    ("clause", "value"),
    [
        ("servers", ()),
        ("base_models", ()),
        ("kinds", (PayloadKind.METRICS,)),
        ("nonprivate", (PayloadKind.METRICS,)),
        ("model_protections", ()),
        ("max_release_bytes", 100),
    ],
)
def test_what_the_policy_forbids_is_answered_with_unavailable(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, clause: str, value: Any
) -> None:
    ready = make_parties(tiny_config(tiny_encoder, tiny_data), tmp_path, **{clause: value})
    client = ready.clients["silo-1"]
    answer = client.handle(ready.server.outgoing()["silo-1"])
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    ready.server.receive(answer)
    assert "silo-1" not in ready.server.admitted()
    assert [entry.name for entry in ready.server.dropped] == ["silo-1"]
    assert clause == client.refusals[0].clause == client.ledger.refusals[0].clause
    assert clause not in ready.server.dropped[0].reason, "the server is told nothing more"
    assert len(client.ledger.entries) == 0, "nothing left, so nothing is charged"


def test_a_server_that_asks_for_the_embedding_layer_gets_nothing(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(
        tiny_encoder, tiny_data, federation={"method": "fedkc"}, fedkc={"compose": "embeddings"}
    )
    ready = make_parties(config, tmp_path)
    ready.play(lambda server: server.round == 2)
    answers = ready.answers()
    assert {envelope.read_header(answer).kind for answer in answers.values()} == {PayloadKind.UNAVAILABLE}
    refusal = ready.clients["silo-1"].refusals[0]
    assert isinstance(refusal, PolicyRefusal)
    assert "allow_embedding_centroids" in str(refusal)


def test_the_budget_stops_the_release_that_would_cross_it(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(
        tiny_encoder,
        tiny_data,
        federation={"method": "fedkc", "rounds": 3},
        privacy={"centroids": {"noise_multiplier": 1.0, "min_size": 2}},
    )
    # One release with multiplier 1 on 80 % of mu^2 has mu = 1.118: epsilon 5.5; two have 8.1 at delta 1e-5.
    ceiling = {f"silo-{n}": Ceiling(max_epsilon=7.0, delta=1e-5) for n in (1, 2, 3)}
    ready = make_parties(config, tmp_path, datasets=ceiling)
    ready.play(lambda server: server.round == 3)
    answer = ready.clients["silo-1"].handle(ready.server.outgoing()["silo-1"])
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert ready.clients["silo-1"].refusals[0].clause == "datasets"


def test_every_answer_is_in_a_ledger_that_verifies(sharing: Parties, tmp_path: Path) -> None:
    sharing.play(lambda server: server.finished)
    for name in sharing.clients:
        summary = verify_ledger(tmp_path / f"{name}.jsonl")
        kinds = [entry.kind.value for entry in summary.releases]
        assert kinds == ["model", "centroids", "model", "metrics"]
        assert [party.name for party in summary.releases[1].recipients] == sorted(
            set(sharing.clients) - {name}
        )
        assert [party.name for party in summary.releases[0].recipients] == ["server"]


def test_logs_hold_no_text(parties: Parties, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    parties.play(lambda server: server.finished)
    texts = [text for rows in parties.corpus.train.values() for text in rows.texts]
    assert not any(text in caplog.text for text in texts)


# --- malformed plans and payloads of parties that hold valid keys


def _plan(parties: Parties, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """The server's plan for silo-1 with its document and tensors changed, sealed and signed by the server."""
    client = parties.clients["silo-1"]
    verified = envelope.verify(parties.server.outgoing()["silo-1"], {"server": client.server})
    body = decode(envelope.open_(verified, client.identity))
    document, tensors = copy.deepcopy(dict(body.document)), dict(body.tensors)
    change(document, tensors)
    changed = encode(body.kind, document, tensors)
    return envelope.seal(changed, verified.header, parties.server.identity, [client.identity.card])


def _set(**fields: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda document, _: document.update(fields)


def _relaying(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(document: dict[str, Any], tensors: dict[str, Any]) -> None:
        document["relayed"] = [name]
        tensors[f"relay/{name}"] = np.zeros(9, np.uint8)

    return change


def _without_model(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    document["model"] = None
    tensors.clear()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set(epochs=-1), PayloadError),
        (_set(epochs="many"), PayloadError),
        (_set(surprise=1), PayloadError),
        (lambda document, _: document.pop("cohort"), PayloadError),
        (_set(step="dance"), PayloadError),
        (_set(relayed=["silo-2\nCRITICAL: forged"]), PayloadError),
        (_set(method="fedavg\x1b[31m"), PayloadError),
        (_set(round=7), WrongRound),
        (_set(run="e" * 32), WrongRound),
        (_set(model="0" * 64), WrongShape),
        (lambda _, tensors: tensors.clear(), WrongShape),
    ],
    ids=[
        *("epochs", "type", "extra", "missing", "step", "relayed", "method"),
        *("round", "run", "model hash", "no model"),
    ],
)
def test_a_malformed_plan_is_refused(
    parties: Parties, change: Callable[[dict[str, Any], dict[str, Any]], None], expected: type[ProtocolError]
) -> None:
    with pytest.raises(expected):
        parties.clients["silo-1"].handle(_plan(parties, change))
    assert len(parties.clients["silo-1"].ledger.entries) == 0


def test_a_cohort_with_a_planted_peer_is_refused(sharing: Parties) -> None:
    """A server that adds a silo of its own to the cohort must not receive centroids through it."""
    planted = Identity.generate("silo-9").card
    extra = {"name": "silo-9", "key": planted.fingerprint}
    message = _plan(sharing, lambda document, _: document["cohort"].append(extra))
    client = sharing.clients["silo-1"]
    answer = client.handle(message)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert "peers" in str(client.refusals[0])


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("predictions", np.full((2, 2), 0.9, np.float32)),
        ("predictions", np.array([[-1, 2], [0, 1]], np.float32)),
        ("centroids", np.zeros((2, 3), np.float32)),
        ("centroids", np.float32(1).reshape(())),
        ("sizes", np.float32(1).reshape(())),
        ("sizes", np.zeros((3,), np.float32)),
        ("centroids", np.full((2, 32), np.nan, np.float32)),
    ],
)
def test_absurd_centroids_of_a_peer_are_refused(sharing: Parties, name: str, array: np.ndarray) -> None:
    """A malicious peer signs and seals properly; what is inside does not fit."""
    victim, peer = sharing.clients["silo-1"], sharing.clients["silo-2"]
    message = sharing.server.outgoing()["silo-1"]
    verified = envelope.verify(message, {"server": victim.server})
    plan = parse_plan(decode(envelope.open_(verified, victim.identity)))
    assert plan.fedkc is not None
    plan = plan.model_copy(update={"relayed": ("silo-2",)})
    good = {
        "centroids": np.zeros((2, 32), np.float32),
        "predictions": np.full((2, 2), 0.5, np.float32),
        "sizes": np.full((2,), 4, np.float32),
    }

    def relayed(tensors: dict[str, np.ndarray]) -> tuple[list[Any], list[Any]]:
        claim = NonPrivate(reason="test")
        body = encode_release(Release(PayloadKind.CENTROIDS, tensors, {"encoder": plan.model}, claim))
        cards = [victim.identity.card, sharing.clients["silo-3"].identity.card]
        sealed = _reseal(sharing, "silo-2", body, PayloadKind.CENTROIDS, cards=cards)
        came = {"relay/silo-2": np.frombuffer(sealed, np.uint8)}
        assert plan.fedkc is not None
        return relayed_knowledge(came, plan, plan.fedkc, _reader(victim))

    assert peer.identity.name == "silo-2"
    assert [len(knowledge.sizes) for knowledge in relayed(good)[0]] == [2]
    found, ignored = relayed({**good, name: array})
    assert not found
    assert [entry.name for entry in ignored] == ["silo-2"]
    assert issubclass(getattr(errors, ignored[0].error), PayloadError)
    assert "silo-2" in ignored[0].reason


def test_a_bad_peer_does_not_silence_the_others(sharing: Parties) -> None:
    """silo-1 seals rubbish to its peers; they go on without it and name it."""
    plans = sharing.server.outgoing()
    peers = [sharing.clients[name].identity.card for name in ("silo-2", "silo-3")]
    junk = _reseal(sharing, "silo-1", b"junk", PayloadKind.CENTROIDS, cards=peers)
    sharing.server.receive(junk)
    for name in ("silo-2", "silo-3"):
        sharing.server.receive(sharing.clients[name].handle(plans[name]))
    sharing.server.close_step()
    for name, plan in sharing.server.outgoing().items():
        sharing.server.receive(sharing.clients[name].handle(plan))
    sharing.server.close_step()
    for name in ("silo-2", "silo-3"):
        assert [entry.name for entry in sharing.clients[name].ignored] == ["silo-1"]


@pytest.mark.parametrize(
    "change",
    [
        _set(rounds=1), _set(rounds=100), _set(epochs=7), _set(method="fedavg"), _set(answer="metrics"),
        lambda document, _: document["cohort"].pop(),
        lambda document, _: document["cohort"].append(document["cohort"][0]),
        lambda document, _: document["fedkc"].update(clusters=4096),
        lambda document, _: document["fedkc"].update(compose="embeddings"),
        lambda document, _: document["fedkc"].update(alpha=9.0),
        _set(fedkc=None),
        _relaying("silo-2"), _relaying("silo-9"), _without_model,
    ],
    ids=["fewer rounds", "more rounds", "epochs", "method", "answer", "cohort cut", "cohort twice",
         "clusters", "layer", "alpha", "no terms", "relay while sharing", "relay of a stranger", "no model"],
)  # fmt: skip
def test_a_plan_other_than_agreed_gets_nothing(
    sharing: Parties, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    """Fewer rounds would mean more of the budget each; a smaller cohort, readers of the server's choice."""
    client = sharing.clients["silo-1"]
    before = len(client.ledger.entries)
    answer = client.handle(_plan(sharing, change))
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert len(client.refusals) == 1
    assert len(client.ledger.entries) == before


@pytest.mark.parametrize("step", [Step.SHARE, Step.FINISH, Step.CANDIDATE])
def test_a_step_that_a_round_does_not_have_gets_nothing(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, step: Step
) -> None:
    """A share in round 1 would be one noised release more than the budget was divided by."""
    config = tiny_config(tiny_encoder, tiny_data, federation={"method": "fedkc"})
    ready = make_parties(config, tmp_path)
    ready.server._steps = [step]
    ready.server._candidates = dict.fromkeys(ready.clients, ready.server.model)
    client = ready.clients["silo-1"]
    answer = client.handle(ready.server.outgoing()["silo-1"])
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert client.refusals[0].clause == "agreed.step"
    assert not client.ledger.entries


def test_rounds_beyond_the_run_take_no_line_of_the_ledger(parties: Parties) -> None:
    """A server could ask for a million of them, and each refusal is a line."""
    parties.server.round = 3
    client = parties.clients["silo-1"]
    with pytest.raises(WrongRound, match="round 3 is beyond the 2"):
        client.handle(parties.server.outgoing()["silo-1"])
    assert not client.ledger.refusals


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _, tensors: tensors.update({"relay/silo-2": np.zeros(3, np.uint8)}), PayloadError),
        (lambda _, tensors: tensors.update({"surprise": np.zeros(3, np.float32)}), WrongShape),
    ],
    ids=["relayed unsaid", "tensor unsaid"],
)
def test_what_a_plan_does_not_say_may_not_come_with_it(
    parties: Parties, change: Callable[[dict[str, Any], dict[str, Any]], None], expected: type[ProtocolError]
) -> None:
    with pytest.raises(expected):
        parties.clients["silo-1"].handle(_plan(parties, change))


@pytest.mark.parametrize("value", [3e38, -2e6])
def test_values_meant_to_overflow_are_refused(parties: Parties, value: float) -> None:
    state = dict(parties.clients["silo-1"].slm.state())
    first = sorted(state)[0]
    state[first] = np.full_like(state[first], value)
    body = encode_release(Release(PayloadKind.MODEL, state, {"rows": 5}, NonPrivate(reason="test")))
    with pytest.raises(NonFiniteUpdate, match="silo-1"):
        parties.server.receive(_reseal(parties, "silo-1", body, PayloadKind.MODEL))


def test_weights_that_overflow_on_rows_are_a_refusal_without_noise_and_none_with_it(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Whether a private release is made must not depend on a row; without noise it may."""
    for number, centroids in enumerate(({"min_size": 2}, {"min_size": 2, "epsilon": 4.0, "clip": 5.0})):
        config = tiny_config(
            tiny_encoder, tiny_data, federation={"method": "fedkc"}, privacy={"centroids": centroids}
        )
        (tmp_path / str(number)).mkdir()
        ready = make_parties(config, tmp_path / str(number))
        ready.play(lambda server: server.round == 2)
        for name in ready.server.model:
            if name.endswith("output.dense.weight"):
                ready.server.model = {**ready.server.model, name: np.full_like(ready.server.model[name], 1e6)}
        client = ready.clients["silo-1"]
        answer = client.handle(ready.server.outgoing()["silo-1"])
        if envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE:
            assert number == 0
            assert [entry.clause for entry in client.ledger.refusals] == ["computation"]
        else:
            assert envelope.read_header(answer).kind is PayloadKind.CENTROIDS
            assert not client.ledger.refusals


def test_a_finished_server_refuses_a_late_message(parties: Parties) -> None:
    answer = parties.answers()["silo-1"]
    parties.server.finished = True
    with pytest.raises(WrongRound):
        parties.server.receive(answer)
    with pytest.raises(WrongRound):
        parties.server.outgoing()
