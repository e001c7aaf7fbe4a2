"""Models that are only ever summed, with the real client and server: masked rounds and CKKS.

The right sum is that of a second federation, of the same rows and seeds, whose models are sealed to the
server one by one.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from securefl.agreement import SEALED_KEY, check_cohort, sum_terms
from securefl.client import Client
from securefl.config import Config, parse_config
from securefl.crypto import envelope
from securefl.crypto.masking_messages import ShareMessage
from securefl.errors import (
    AwaitingApproval,
    ConfigError,
    MalformedEnvelope,
    PayloadError,
    Replayed,
    TooFewSilos,
    TooLarge,
    UnknownSender,
    WrongRecipient,
    WrongRound,
)
from securefl.exchange import Standing
from securefl.local import train_locally
from securefl.messages import Party, RoundPlan, Step
from securefl.methods.averaging import weighted_mean
from securefl.policy import Policy
from securefl.privacy import zcdp_epsilon
from securefl.release import (
    DistributedNoise,
    Independent,
    NonPrivate,
    PayloadKind,
    Release,
    Tensors,
    decode,
    decode_release,
    encode,
    encode_release,
    fingerprint,
    flatten,
)
from tests.federation import Parties, make_parties, tiny_config

MASKED_STEPS = (Step.ADVERTISE, Step.DEAL, Step.TRAIN, Step.SIGN, Step.UNMASK)
SILOS = ("silo-1", "silo-2", "silo-3", "silo-4")


def config_of(encoder: Path, data: Path, protection: str, /, **more: dict[str, Any]) -> Config:
    changes: dict[str, Any] = {"protection": {"models": protection}}
    for section, fields in more.items():
        changes.setdefault(section, {}).update(fields)
    changes.setdefault("data", {})["split"] = {"by": "dirichlet", "silos": 4, "alpha": 2.0, "min_rows": 8}
    return tiny_config(encoder, data, **changes)


@pytest.fixture
def masked(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Parties:
    return make_parties(config_of(tiny_encoder, tiny_data, "masked"), tmp_path)


@pytest.fixture
def encrypted(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Parties:
    return make_parties(config_of(tiny_encoder, tiny_data, "ckks"), tmp_path)


@pytest.fixture(scope="module")
def alone(
    tiny_encoder: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Tensors], dict[str, float]]:
    """Every silo's model of round 1, and its rows, as the sealed federation's server reads them."""
    folder = tmp_path_factory.mktemp("sealed")
    parties = make_parties(config_of(tiny_encoder, tiny_data, "sealed"), folder)
    found = {name: parties.opened(answer) for name, answer in parties.answers().items()}
    models = {name: one.tensors for name, one in found.items()}
    return models, {name: float(one.info["rows"]) for name, one in found.items()}


def step(parties: Parties, silent: Collection[str] = ()) -> None:
    """One step, in which some silos are not reached."""
    server = parties.server
    for name, plan in server.outgoing().items():
        if name not in silent:
            server.receive(parties.clients[name].handle(plan))
    server.close_step()


def play_round(parties: Parties, drops: Mapping[str, Step] | None = None) -> None:
    """A masked round; drops: silo to the step from which on it is silent."""
    order = {at: number for number, at in enumerate(MASKED_STEPS)}
    for at in MASKED_STEPS:
        assert parties.server.step is at
        step(parties, {name for name, since in (drops or {}).items() if order[since] <= order[at]})


def upto(parties: Parties, at: Step) -> None:
    parties.play(lambda server: server.step is at)


def assert_close(found: Tensors, right: Tensors, resolution: float) -> None:
    assert set(found) == set(right)
    for name, array in right.items():
        # Both are stored as float32.
        np.testing.assert_allclose(found[name], array, rtol=2e-7, atol=resolution + 1e-8)


# --- the sum


def test_the_masked_sum_is_the_weighted_mean(
    masked: Parties, alone: tuple[dict[str, Tensors], dict[str, float]]
) -> None:
    models, rows = alone
    before = dict(masked.server.model)
    play_round(masked)
    (opened,) = masked.server.sums
    assert opened.silos == SILOS
    assert opened.rows == sum(rows.values())
    assert opened.threshold == 3
    assert opened.faults == ()
    assert opened.resolution is not None
    # n (clip / L) (1 + 1) / sum of weights, with L = (2^31 - 1) // n and weights in 65,536ths.
    by_hand = 4 * 4.0 / ((2**31 - 1) // 4) * 2 / (sum(rows.values()) / 65_536)
    assert opened.resolution == pytest.approx(by_hand, rel=1e-6)
    right = weighted_mean(models, rows)
    assert_close(masked.server.model, right, opened.resolution)
    assert opened.tensors is not None
    for name, change in opened.tensors.items():
        np.testing.assert_allclose(change, right[name] - before[name], atol=opened.resolution + 1e-6)
    assert masked.server.round == 2


@pytest.mark.parametrize("at", MASKED_STEPS)
def test_a_silo_that_drops_out_leaves_the_exact_sum_of_the_others(
    masked: Parties, alone: tuple[dict[str, Tensors], dict[str, float]], at: Step
) -> None:
    models, rows = alone
    play_round(masked, {"silo-2": at})
    # What was sent before a silo fell silent stays in the sum.
    stays = at in (Step.SIGN, Step.UNMASK)
    survivors = [name for name in SILOS if stays or name != "silo-2"]
    (opened,) = masked.server.sums
    assert list(opened.silos) == survivors
    assert opened.rows == sum(rows[name] for name in survivors)
    assert opened.resolution is not None
    right = weighted_mean({name: models[name] for name in survivors}, {n: rows[n] for n in survivors})
    assert_close(masked.server.model, right, opened.resolution)
    # It is back in the next round, whatever it missed.
    play_round(masked)
    assert masked.server.sums[1].silos == SILOS


@pytest.mark.parametrize("first", MASKED_STEPS)
@pytest.mark.parametrize("second", MASKED_STEPS)
def test_below_the_threshold_nothing_is_revealed(masked: Parties, first: Step, second: Step) -> None:
    before = masked.server.model
    drops = {"silo-2": first, "silo-4": second}
    with pytest.raises(TooFewSilos, match="nothing was revealed"):
        play_round(masked, drops)
    assert masked.server.sums == []
    assert masked.server.model is before


def test_the_server_holds_nothing_of_one_silo(masked: Parties) -> None:
    upto(masked, Step.TRAIN)
    for name, answer in masked.answers().items():
        masked.server.receive(answer)
        assert masked.server.admitted()[name] is None


def test_masks_differ_between_rounds_and_vectors(masked: Parties, tmp_path: Path) -> None:
    """The same weights twice: what leaves has nothing in common, so no difference of plaintexts shows."""
    seen: list[np.ndarray[Any, Any]] = []
    for _ in range(2):
        upto(masked, Step.TRAIN)
        for name, plan in masked.server.outgoing().items():
            sealed = masked.clients[name].handle(plan)
            if name == "silo-1":
                seen.append(_opened_by_server(masked, sealed).tensors["vector/update"].view("<u4"))
            masked.server.receive(sealed)
        masked.server.close_step()
        step(masked)
        step(masked)
    difference = (seen[1] - seen[0]).astype(np.int64)
    # Uniform on 32 bits: its top byte takes all values alike. The plain difference would be near 0 mod 2^32.
    top = np.bincount((difference >> 24) & 255, minlength=256)
    expected = len(difference) / 256
    assert ((top - expected) ** 2 / expected).sum() < 255 + 6 * np.sqrt(2 * 255)


def _opened_by_server(parties: Parties, sealed: bytes) -> Release:
    roster = {name: client.identity.card for name, client in parties.clients.items()}
    return decode_release(envelope.open_(envelope.verify(sealed, roster), parties.server.identity))


# --- a server that cheats


class _TwoModels:
    """Gives one silo another model than the others, in the plans of the steps from `since` on."""

    def __init__(self, parties: Parties, since: Step) -> None:
        server = parties.server
        self.plan_for, self.model = server._plan_for, server.model
        self.other = {name: array + np.float32(0.5) for name, array in server.model.items()}
        self.server, self.since, self.started = server, since, False
        server._plan_for = self  # type: ignore[method-assign]

    def __call__(self, name: str) -> bytes:
        self.started |= self.server.step is self.since
        if not (self.started and name == "silo-1"):
            return self.plan_for(name)
        self.server.model = self.other
        try:
            return self.plan_for(name)
        finally:
            self.server.model = self.model


def test_two_models_are_seen_before_anything_is_masked(masked: Parties) -> None:
    _TwoModels(masked, Step.ADVERTISE)
    # The server itself would refuse silo-1's advert, so the hostile one takes all of them unread.
    machine = masked.server._sum._machine  # type: ignore[union-attr]
    adverts = {}
    from securefl.crypto.masking_messages import Advert

    for name, plan in masked.server.outgoing().items():
        release = _opened_by_server(masked, masked.clients[name].handle(plan))
        adverts[masked.clients[name].identity.card.fingerprint] = Advert.from_tensors(release.tensors)
    machine._adverts = adverts
    masked.server.close_step()
    plans = masked.server.outgoing()
    assert not plans, "the server's own record knows of no answer; hand the list out by hand"
    masked.server._sum._concerned = set(SILOS)  # type: ignore[union-attr]
    for name, plan in masked.server.outgoing().items():
        header = envelope.read_header(masked.clients[name].handle(plan))
        assert header.kind is PayloadKind.UNAVAILABLE
        (refusal,) = masked.clients[name].refusals
        assert "another model" in str(refusal) or "another plan" in str(refusal)


@pytest.mark.parametrize("since", [Step.DEAL, Step.TRAIN, Step.SIGN, Step.UNMASK])
def test_a_model_that_is_changed_within_a_round_is_seen_by_its_silo(masked: Parties, since: Step) -> None:
    _TwoModels(masked, since)
    upto_or_through = MASKED_STEPS.index(since)
    for at in MASKED_STEPS[:upto_or_through]:
        assert masked.server.step is at
        step(masked)
    answers = masked.answers()
    kinds = {name: envelope.read_header(answer).kind for name, answer in answers.items()}
    assert kinds.pop("silo-1") is PayloadKind.UNAVAILABLE
    assert PayloadKind.UNAVAILABLE not in kinds.values()
    (refusal,) = masked.clients["silo-1"].refusals
    assert "do not ask for the same" in str(refusal)


def test_a_plan_of_another_round_or_a_second_one_is_refused(masked: Parties) -> None:
    upto(masked, Step.UNMASK)
    plan = masked.server.outgoing()["silo-1"]
    client = masked.clients["silo-1"]
    once = client.handle(plan)
    assert client.handle(plan) == once, "the very same bytes, and no second unmasking"
    again = masked.server.outgoing()["silo-1"]
    with pytest.raises(Replayed):
        _without_state(client).handle(plan)
    assert client.handle(again) == once, "the same plan in another envelope is the same plan"


def _without_state(client: Client) -> Client:
    """The same silo with another memory of its answers: none."""
    return dataclasses.replace(client, state=None)


def test_a_restarted_silo_sits_the_round_out_and_is_back_in_the_next(masked: Parties) -> None:
    upto(masked, Step.TRAIN)
    client = masked.clients["silo-3"]
    masked.clients["silo-3"] = dataclasses.replace(client)  # what a new process would be: no masks
    for name, plan in masked.server.outgoing().items():
        masked.server.receive(masked.clients[name].handle(plan))
    (refusal,) = masked.clients["silo-3"].refusals
    assert refusal.clause == "masking"
    assert "restarted" in str(refusal)
    masked.server.close_step()
    step(masked)
    step(masked)
    assert masked.server.sums[0].silos == ("silo-1", "silo-2", "silo-4")
    play_round(masked)
    assert masked.server.sums[1].silos == SILOS


def test_a_cancelled_training_keeps_the_masks(masked: Parties) -> None:
    from securefl.errors import Cancelled

    upto(masked, Step.TRAIN)
    client = masked.clients["silo-1"]
    client.cancelled = lambda: True
    plan = masked.server.outgoing()["silo-1"]
    with pytest.raises(Cancelled):
        client.handle(plan)
    client.cancelled = None
    assert envelope.read_header(client.handle(plan)).kind is PayloadKind.MASKED_MODEL


def test_a_bad_share_is_named_and_the_round_goes_on(masked: Parties) -> None:
    from securefl.crypto.masking_client import MaskingClient

    upto(masked, Step.UNMASK)
    real = MaskingClient.unmask

    def lie(self: MaskingClient, request: Any) -> Any:
        given = real(self, request)
        first = given.blinds[0]
        return given.model_copy(
            update={"blinds": (first.model_copy(update={"share": bytes(32)}), *given.blinds[1:])}
        )

    plans = masked.server.outgoing()
    for name, plan in plans.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "silo-2":
                patch.setattr(MaskingClient, "unmask", lie)
            masked.server.receive(masked.clients[name].handle(plan))
    masked.server.close_step()
    (opened,) = masked.server.sums
    assert opened.silos == SILOS
    (fault,) = opened.faults
    assert fault.startswith("silo-2 gave a bad share")


# --- the silo's own limits


def _refused(parties: Parties, name: str = "silo-1") -> Any:
    answer = parties.clients[name].handle(parties.server.outgoing()[name])
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    return parties.clients[name].refusals[-1]


@pytest.mark.parametrize(
    ("clauses", "clause"),
    [
        ({"min_cohort": None}, "min_cohort"),
        ({"min_cohort": 5}, "min_cohort"),
        ({"min_threshold": 4}, "min_threshold"),
        ({"model_protections": ("sealed", "ckks")}, "model_protections"),
        ({"kinds": (PayloadKind.METRICS,)}, "kinds"),
    ],
)
def test_a_clause_keeps_a_silo_out_of_masked_rounds(
    masked: Parties, clauses: dict[str, Any], clause: str
) -> None:
    client = masked.clients["silo-1"]
    client.policy = Policy(**{**client.policy.model_dump(), **clauses})
    assert _refused(masked).clause == clause


def test_masked_weights_need_leave_to_go_without_a_bound(masked: Parties) -> None:
    upto(masked, Step.TRAIN)
    client = masked.clients["silo-1"]
    client.policy = client.policy.model_copy(update={"nonprivate": (PayloadKind.METRICS,)})
    assert _refused(masked).clause == "nonprivate"


def test_policies_speak_of_models_not_of_their_wrapping() -> None:
    with pytest.raises(ValueError, match="not listed by itself"):
        Policy(name="silo-1", kinds=(PayloadKind.MASKED_MODEL,))


@pytest.mark.parametrize(
    ("protection", "message"),
    [
        ({"threshold": 2}, "more than two thirds"),
        ({"threshold": 5}, "5 of 4 silos"),
    ],
)
def test_protections_that_cannot_be_are_refused_early(
    tiny_encoder: Path, tiny_data: Path, protection: dict[str, Any], message: str
) -> None:
    config = config_of(tiny_encoder, tiny_data, "masked", protection=protection)
    with pytest.raises(ConfigError, match=message):
        check_cohort(config, 4)


@pytest.mark.parametrize("protection", ["masked", "ckks"])
def test_two_silos_have_nothing_to_hide_in(tiny_encoder: Path, tiny_data: Path, protection: str) -> None:
    with pytest.raises(ConfigError, match="at least 3 silos"):
        check_cohort(config_of(tiny_encoder, tiny_data, protection), 2)


def test_averaged_models_are_masked_unless_said_otherwise() -> None:
    data = {"train": "x.csv", "test": "y.csv"}
    for method, due in (
        ("fedavg", "masked"),
        ("fedprox", "masked"),
        ("fedkc", "masked"),
        ("crosslm", "sealed"),
    ):
        config = parse_config({"federation": {"method": method}, "data": data})
        assert config.protection.models == due
        assert (sum_terms(config, 7) is None) == (due == "sealed")
    assert sum_terms(config_from("fedavg"), 7).threshold == 5  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="nothing to sum"):
        parse_config({"federation": {"method": "crosslm"}, "data": data, "protection": {"models": "masked"}})


def config_from(method: str) -> Config:
    return parse_config({"federation": {"method": method}, "data": {"train": "x.csv", "test": "y.csv"}})


@pytest.mark.parametrize("protection", ["masked", "ckks"])
def test_more_rows_than_can_be_hidden_are_refused_by_the_silo(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, protection: str
) -> None:
    config = config_of(tiny_encoder, tiny_data, protection, protection={"max_rows": 2})
    parties = make_parties(config, tmp_path)
    upto(parties, Step.TRAIN)
    assert "max_rows" in str(_refused(parties))


@pytest.mark.parametrize("protection", ["masked", "ckks"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_never_joins_a_sum(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, protection: str, value: float
) -> None:
    import torch

    def poison(slm: Any, rows: Any, *rest: Any) -> None:
        train_locally(slm, rows, *rest)
        if rows is poisoned:
            with torch.no_grad():
                slm.model.classifier.weight[0, 0] = value

    parties = make_parties(config_of(tiny_encoder, tiny_data, protection), tmp_path, train=poison)
    poisoned = parties.clients["silo-2"].data.train
    upto(parties, Step.TRAIN)
    for name, answer in parties.answers().items():
        kind = envelope.read_header(answer).kind
        assert (kind is PayloadKind.UNAVAILABLE) == (name == "silo-2")
        parties.server.receive(answer)
    assert "NaN or infinity" in str(parties.clients["silo-2"].refusals[-1])


def test_what_is_cut_off_is_logged_by_the_silo_alone(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_encoder, tiny_data, "masked", protection={"clip": 1e-6})
    parties = make_parties(config, tmp_path)
    with caplog.at_level(logging.WARNING):
        play_round(parties)
    assert "cut off at the agreed clip" in caplog.text
    (opened,) = parties.server.sums
    assert opened.tensors is not None
    assert opened.resolution is not None
    largest = max(float(np.abs(array).max()) for array in opened.tensors.values())
    assert largest <= 1e-6 + opened.resolution


# --- what a server must refuse


def test_a_masked_vector_comes_once_and_from_a_silo_that_shared(masked: Parties) -> None:
    upto(masked, Step.DEAL)
    step(masked, {"silo-4"})
    plans = masked.server.outgoing()
    assert set(plans) == {"silo-1", "silo-2", "silo-3"}
    answer = masked.clients["silo-1"].handle(plans["silo-1"])
    masked.server.receive(answer)
    with pytest.raises(Replayed):
        masked.server.receive(answer)
    release = _opened_by_server(masked, answer)
    with pytest.raises(UnknownSender, match="silo-4"):
        masked.server.receive(_from(masked, "silo-4", release))


@pytest.mark.parametrize("change", ["short", "long", "type", "name", "missing"])
def test_a_masked_vector_of_another_form_is_refused(masked: Parties, change: str) -> None:
    upto(masked, Step.TRAIN)
    plan = masked.server.outgoing()["silo-1"]
    answer = masked.clients["silo-1"].handle(plan)
    release = _opened_by_server(masked, answer)
    tensors = dict(release.tensors)
    vector = tensors.pop("vector/update")
    match change:
        case "short":
            tensors["vector/update"] = vector[:-4]
        case "long":
            tensors["vector/update"] = np.concatenate([vector, vector[:4]])
        case "type":
            tensors["vector/update"] = vector.view("<i8") if vector.size % 8 == 0 else vector.astype("<f4")
        case "name":
            tensors["vector/weights"] = vector
    with pytest.raises(Exception, match=r"silo-1|masked"):
        masked.server.receive(_from(masked, "silo-1", dataclasses.replace(release, tensors=tensors)))
    masked.server.receive(answer)  # the right one still counts


def _from(parties: Parties, name: str, release: Release, recipients: Any = None) -> bytes:
    """A release as a silo would seal it for the step at hand, whatever it is."""
    client, server = parties.clients[name], parties.server
    cards = recipients or [client.server]
    header = envelope.Header(
        run=server.run,
        round=server.round,
        step=server.step.value,
        sender=Party(name=name, key=client.identity.card.fingerprint),
        recipients=tuple(Party(name=card.name, key=card.fingerprint) for card in cards),
        kind=release.kind,
        sequence=client.ledger.next_sequence + 1000,
        time=0,
    )
    return envelope.seal(encode_release(release), header, client.identity, cards)


# --- CKKS


def test_the_encrypted_sum_is_the_weighted_mean(
    encrypted: Parties, alone: tuple[dict[str, Tensors], dict[str, float]]
) -> None:
    models, rows = alone
    server = encrypted.server
    upto(encrypted, Step.TRAIN)
    step(encrypted)
    (opened,) = server.sums
    assert opened.tensors is None
    assert opened.silos == SILOS
    assert all(name.startswith("ckks.") for name in server.model)
    seen: list[tuple[str, Release]] = []
    for client in encrypted.clients.values():
        client.witness = lambda silo, plan, kind, body, evidence: seen.append((silo, decode_release(body)))
        client.train = lambda *rest: None  # so that what it sends on is what it opened
    step(encrypted)
    sums = {silo: release for silo, release in seen if release.kind is PayloadKind.SUM}
    assert set(sums) == set(SILOS)
    right = weighted_mean(models, rows)
    for release in sums.values():
        assert release.info["rows"] == sum(rows.values())
        assert release.info["resolution"] < 1e-6
        assert_close(release.tensors, right, release.info["resolution"])
    assert server.step is Step.FINISH
    step(encrypted)
    for client in encrypted.clients.values():
        assert_close(client.slm.state(), right, 3e-7)


def test_the_key_is_made_by_the_first_silo_for_silos_alone(encrypted: Parties) -> None:
    plans = encrypted.server.outgoing()
    assert set(plans) == {"silo-1"}
    sealed = encrypted.clients["silo-1"].handle(plans["silo-1"])
    header = envelope.read_header(sealed)
    assert header.kind is PayloadKind.GROUP_KEY
    assert {party.name for party in header.recipients} == set(SILOS)
    encrypted.server.receive(sealed)
    encrypted.server.close_step()
    held = encrypted.server._sum.relayed("silo-2")[SEALED_KEY].tobytes()  # type: ignore[union-attr]
    verified = envelope.verify(held, {"silo-1": encrypted.clients["silo-1"].identity.card})
    with pytest.raises(WrongRecipient):
        envelope.open_(verified, encrypted.server.identity)


def test_another_silo_makes_no_key(encrypted: Parties) -> None:
    server = encrypted.server
    other = encrypted.clients["silo-2"]
    plan = server._plan_for("silo-2")
    answer = other.handle(plan)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert other.refusals[-1].clause == "agreed.key"
    release = Release(PayloadKind.GROUP_KEY, {}, {}, Independent(reason="test"))
    cards = [client.identity.card for client in encrypted.clients.values()]
    with pytest.raises(UnknownSender, match="another silo was asked"):
        server.receive(_from(encrypted, "silo-2", release, cards))
    with pytest.raises(WrongRecipient, match="group-key of silo-1"):
        server.receive(_from(encrypted, "silo-1", release, cards[:2]))


def test_without_the_key_there_is_no_sum(encrypted: Parties) -> None:
    with pytest.raises(TooFewSilos, match="silo-1, which was to make the CKKS key"):
        step(encrypted, {"silo-1"})


def test_a_silo_that_was_restarted_or_away_goes_on_under_ckks(encrypted: Parties) -> None:
    upto(encrypted, Step.TRAIN)
    step(encrypted, {"silo-4"})
    encrypted.clients["silo-1"] = dataclasses.replace(encrypted.clients["silo-1"])
    step(encrypted)
    step(encrypted)
    states = {fingerprint(client.slm.state()) for client in encrypted.clients.values()}
    assert len(states) == 1
    assert [opened.silos for opened in encrypted.server.sums] == [SILOS[:3], SILOS]


@pytest.mark.parametrize("change", ["swapped", "missing", "of another key", "plain weights"])
def test_a_silo_refuses_an_encrypted_sum_that_is_none(encrypted: Parties, change: str) -> None:
    upto(encrypted, Step.TRAIN)
    plain = encrypted.server.model
    step(encrypted)
    server, client = encrypted.server, encrypted.clients["silo-2"]
    chunks = dict(server.model)
    match change:
        case "swapped":
            (name,) = chunks
            altered = chunks[name].copy()
            altered[3000:3100] ^= 255
            chunks[name] = altered
        case "missing":
            chunks = {"ckks.000001": next(iter(chunks.values()))}
        case "of another key":
            from securefl.agreement import ckks_terms
            from securefl.crypto.ckks import GroupKey, chunk_tensors, encrypt

            terms = ckks_terms(sum_terms(server.config, 4), sum(a.size for a in plain.values()), 4)  # type: ignore[arg-type]
            zeros = np.zeros(terms.length, np.float32)
            chunks = dict(chunk_tensors(0, encrypt(GroupKey.generate(), terms, zeros, 1.0)))
        case "plain weights":
            chunks = dict(plain)
    server.model = chunks
    plan = server.outgoing()["silo-2"]
    before = fingerprint(client.slm.state())
    if change in ("missing", "plain weights"):
        with pytest.raises(Exception, match="chunks"):
            client.handle(plan)
    else:
        assert envelope.read_header(client.handle(plan)).kind is PayloadKind.UNAVAILABLE
        assert client.refusals[-1].clause == "computation"
    assert fingerprint(client.slm.state()) == before


def test_a_sum_of_two_is_not_handed_out_under_ckks(encrypted: Parties) -> None:
    upto(encrypted, Step.TRAIN)
    with pytest.raises(TooFewSilos, match="sum of fewer than 3"):
        step(encrypted, {"silo-1", "silo-3"})


# --- noise that the silos add together


def noised(encoder: Path, data: Path, **terms: Any) -> Config:
    asked = {"clip": 0.5, "noise_multiplier": 2.0, **terms}
    return config_of(encoder, data, "masked", privacy={"models": asked})


def test_the_noised_sum_is_the_mean_of_clipped_changes_and_noise(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, alone: tuple[dict[str, Tensors], dict[str, float]]
) -> None:
    """All silos weigh the same; what is left beside the clipped mean is Gaussian of the stated deviation."""
    models, _ = alone
    parties = make_parties(noised(tiny_encoder, tiny_data), tmp_path)
    before = parties.server.model
    play_round(parties)
    (opened,) = parties.server.sums
    assert opened.rows is None
    assert opened.tensors is not None
    assert opened.noise is not None
    assert isinstance(opened.claim, DistributedNoise)
    changes = [flatten(model) - flatten(before) for model in models.values()]
    norms = [float(np.linalg.norm(change.astype(np.float64))) for change in changes]
    clipped = [change * min(1.0, 0.5 / norm) for change, norm in zip(changes, norms, strict=True)]
    left = flatten(opened.tensors).astype(np.float64) - np.mean(clipped, axis=0)
    # By hand: sigma of a sum of 3 is z times the sensitivity 2 clip; 4 silos added their share of it.
    by_hand = 2.0 * (2 * 0.5) * np.sqrt(4 / 3) / 4
    assert opened.noise == pytest.approx(by_hand, rel=1e-3)
    assert stats.kstest(left / by_hand, "norm").pvalue > 1e-4
    assert float(np.std(left)) == pytest.approx(by_hand, rel=5 / np.sqrt(2 * left.size))


def test_a_silo_that_drops_out_leaves_noise_enough(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    parties = make_parties(noised(tiny_encoder, tiny_data), tmp_path)
    play_round(parties, {"silo-1": Step.TRAIN})
    (opened,) = parties.server.sums
    assert len(opened.silos) == 3
    assert opened.noise == pytest.approx(2.0 * (2 * 0.5) / 3, rel=1e-3)


def test_noised_models_leave_no_exact_figure_behind(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    parties = make_parties(noised(tiny_encoder, tiny_data), tmp_path, nonprivate=())
    parties.play(lambda server: server.finished)
    assert parties.server.metrics == {name: {} for name in SILOS}
    for client in parties.clients.values():
        account = client.ledger.account(client.dataset)
        assert account.nonprivate == ()
        # Two rounds of z = 2: rho = 2 / (2 * 4) each halved by z^2: 1 / (2 z^2) a round.
        assert account.rho == pytest.approx(2 * 1 / (2 * 2.0**2), rel=1e-3)
        assert account.epsilon is not None


@pytest.mark.parametrize(
    ("clauses", "clause"),
    [({"min_noise_multiplier": 2.5}, "min_noise_multiplier"), ({"simulation": False}, "simulation")],
)
def test_a_policy_bounds_the_noise_on_sums(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, clauses: dict[str, Any], clause: str
) -> None:
    parties = make_parties(noised(tiny_encoder, tiny_data), tmp_path)
    upto(parties, Step.TRAIN)
    client = parties.clients["silo-1"]
    client.policy = client.policy.model_copy(update=clauses)
    assert _refused(parties).clause == clause


def test_the_budget_ends_noised_rounds(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = noised(tiny_encoder, tiny_data, noise_multiplier=0.5)
    parties = make_parties(config, tmp_path)
    client = parties.clients["silo-1"]
    one = zcdp_epsilon(1 / (2 * 0.5**2), 1e-5)
    ceiling = {"silo-1": client.policy.datasets["silo-1"].model_copy(update={"max_epsilon": one * 1.01})}
    client.policy = client.policy.model_copy(update={"datasets": ceiling})
    play_round(parties)
    upto(parties, Step.TRAIN)
    assert _refused(parties).clause == "datasets"


def test_a_silo_that_claims_other_noise_is_refused(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    parties = make_parties(noised(tiny_encoder, tiny_data), tmp_path)
    upto(parties, Step.TRAIN)
    answer = parties.clients["silo-1"].handle(parties.server.outgoing()["silo-1"])
    release = _opened_by_server(parties, answer)
    assert isinstance(release.claim, DistributedNoise)
    for claim in (NonPrivate(reason="x"), release.claim.model_copy(update={"noise_multiplier": 9.0})):
        with pytest.raises(PayloadError, match="another claim"):
            parties.server.receive(_from(parties, "silo-1", dataclasses.replace(release, claim=claim)))
    parties.server.receive(answer)


# --- previews


def test_a_preview_changes_nothing_of_a_masked_round(masked: Parties) -> None:
    client = masked.clients["silo-1"]
    plan = masked.server.outgoing()["silo-1"]
    shown = client.preview(plan)
    assert shown.release is not None
    assert shown.release.kind is PayloadKind.ADVERT
    assert shown.refusals == ()
    upto(masked, Step.DEAL)
    (refusal,) = client.preview(masked.server.outgoing()["silo-1"]).refusals
    assert refusal.clause == "preview"
    upto(masked, Step.TRAIN)
    plan = masked.server.outgoing()["silo-1"]
    shown = client.preview(plan)
    assert shown.release is not None
    assert shown.release.kind is PayloadKind.MASKED_MODEL
    assert set(shown.release.tensors) == set(client.slm.shapes())
    assert "rows" not in shown.release.info
    assert isinstance(shown.release.claim, NonPrivate)
    assert envelope.read_header(client.handle(plan)).kind is PayloadKind.MASKED_MODEL


# --- plans that do not add up


@pytest.mark.parametrize("sums", [None, "other"])
def test_a_plan_with_other_terms_than_agreed_is_refused(masked: Parties, sums: str | None) -> None:
    server = masked.server
    real = server._plan

    def lie(weights: Tensors, relayed: tuple[str, ...]) -> RoundPlan:
        plan = real(weights, relayed)
        assert plan.sums is not None
        changed = None if sums is None else plan.sums.model_copy(update={"clip": 1e6})
        return plan.model_copy(update={"sums": changed})

    server._plan = lie  # type: ignore[method-assign]
    assert _refused(masked).clause == "agreed.sums"


def test_sealed_instead_of_masked_is_refused(masked: Parties) -> None:
    server = masked.server
    real = server._plan
    server._plan = lambda weights, relayed: real(weights, relayed).model_copy(  # type: ignore[method-assign]
        update={"protection": "sealed"}
    )
    refused = _refused(masked)
    assert refused.clause in ("agreed.protection", "model_protections")


def test_arrays_that_a_plan_does_not_name_are_refused(masked: Parties) -> None:
    server, client = masked.server, masked.clients["silo-1"]
    body = server._plan(server.model, ())
    for tensors in (
        {"masking/message": np.zeros(3, np.uint8)},
        {"ckks/key": np.zeros(3, np.uint8)},
        dict(server.model),
    ):
        sealed = envelope.seal(
            encode(PayloadKind.PLAN, body.model_dump(mode="json"), tensors),
            envelope.read_header(server.outgoing()["silo-1"]),
            server.identity,
            [client.identity.card],
        )
        with pytest.raises(Exception, match="a plan"):
            client.handle(sealed)


def test_nothing_is_masked_for_a_message_that_is_none(masked: Parties) -> None:
    upto(masked, Step.DEAL)
    plan = masked.server.outgoing()["silo-1"]
    opened = decode(
        envelope.open_(
            envelope.verify(plan, {"server": masked.server.identity.card}),
            masked.clients["silo-1"].identity,
        )
    )
    for message in (b"", b"{}", b"[1]", b"\xff" * 100, b'{"adverts":[]}'):
        tensors = {**opened.tensors, "masking/message": np.frombuffer(message, np.uint8)}
        body = encode(PayloadKind.PLAN, opened.document, tensors)
        sealed = envelope.seal(
            body, envelope.read_header(plan), masked.server.identity, [masked.clients["silo-1"].identity.card]
        )
        client = copy.copy(masked.clients["silo-1"])
        answer = client.preview(sealed)
        assert answer.release is None
    answer = masked.clients["silo-1"].handle(sealed)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE


def test_a_wrong_kind_is_refused(masked: Parties) -> None:
    release = Release(PayloadKind.MODEL, dict(masked.server.model), {"rows": 3}, NonPrivate(reason="x"))
    with pytest.raises(MalformedEnvelope, match="advert was due"):
        masked.server.receive(_from(masked, "silo-1", release))


# --- the graph


def test_a_sparser_graph_gives_the_same_sum(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, alone: tuple[dict[str, Tensors], dict[str, float]]
) -> None:
    """On a ring of four each silo masks with two others; the server must agree on it."""
    parties = make_parties(config_of(tiny_encoder, tiny_data, "masked", protection={"degree": 2}), tmp_path)
    step(parties)
    for name, plan in parties.server.outgoing().items():
        answer = parties.clients[name].handle(plan)
        dealt = ShareMessage.from_tensors(_opened_by_server(parties, answer).tensors)
        assert len(dealt.deals) == 3, "itself and two neighbours"
        parties.server.receive(answer)
    parties.server.close_step()
    for _ in range(3):
        step(parties)
    (opened,) = parties.server.sums
    assert opened.resolution is not None
    assert_close(parties.server.model, weighted_mean(*alone), opened.resolution)


def test_an_odd_degree_is_no_ring(tiny_encoder: Path, tiny_data: Path) -> None:
    with pytest.raises(ConfigError, match=r"protection\.degree"):
        check_cohort(config_of(tiny_encoder, tiny_data, "masked", protection={"degree": 3}), 7)


def test_the_claim_of_a_refused_message_is_not_recorded(masked: Parties) -> None:
    """It would say of the sum what nobody in it said: whose noise is simulated, for one."""
    upto(masked, Step.TRAIN)
    answer = masked.clients["silo-1"].handle(masked.server.outgoing()["silo-1"])
    release = _opened_by_server(masked, answer)
    short = {**release.tensors, "vector/update": release.tensors["vector/update"][:-4]}
    with pytest.raises(PayloadError, match="silo-1"):
        masked.server.receive(_from(masked, "silo-1", dataclasses.replace(release, tensors=short)))
    assert masked.server._sum._claim is None  # type: ignore[union-attr]
    masked.server.receive(answer)
    assert masked.server._sum._claim == release.claim  # type: ignore[union-attr]


# --- what was found by breaking it


@pytest.mark.parametrize("protection", ["sealed", "masked", "ckks"])
def test_what_peers_share_reaches_the_training_under_every_protection(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, protection: str
) -> None:
    seen: list[int] = []

    def watch(
        slm: Any, rows: Any, config: Any, epochs: int, seed: int, noise: Any, knowledge: Any, stop: Any
    ) -> None:
        seen.append(len(knowledge))

    config = config_of(tiny_encoder, tiny_data, protection, federation={"method": "fedkc", "rounds": 3})
    parties = make_parties(config, tmp_path, train=watch)
    parties.play(lambda server: server.finished)
    assert seen == [0] * 4 + [3] * 8, "none in round 1, the three others after"


def test_a_refusal_keeps_nothing_of_the_round_alive(masked: Parties) -> None:
    upto(masked, Step.DEAL)
    client = masked.clients["silo-1"]
    held = client._contributor._masked
    assert held is not None
    assert held._client._root
    client.policy = client.policy.model_copy(update={"min_cohort": 9})
    refusal = _refused(masked)
    assert (refusal.__traceback__, refusal.__context__, refusal.__cause__) == (None, None, None)
    assert not held._client._root, "its secrets are gone, whoever still holds the machine"
    for one in client.preview(masked.server.outgoing()["silo-1"]).refusals:
        assert one.__traceback__ is None


def test_one_silo_cannot_blow_the_mean_up(masked: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends minus the others' row count: what is left to divide by is next to nothing."""
    from securefl import contribution
    from securefl.agreement import fixed_points

    upto(masked, Step.TRAIN)
    terms = sum_terms(masked.server.config, 4)
    assert terms is not None
    _, counts = fixed_points(terms, 4)
    others = sum(len(one.data.train) for name, one in masked.clients.items() if name != "silo-2")
    real = contribution.encode_weighted

    def lie(*arguments: Any) -> Any:
        values, _ = real(*arguments)
        away = -int(others / terms.max_rows * counts.limit) + 3
        return values, np.array([away % 2**32], np.uint32)

    for name, plan in masked.server.outgoing().items():
        with monkeypatch.context() as patch:
            if name == "silo-2":
                patch.setattr(contribution, "encode_weighted", lie)
            masked.server.receive(masked.clients[name].handle(plan))
    masked.server.close_step()
    step(masked)
    before = masked.server.model
    with pytest.raises(PayloadError, match="none that its silos can make"):
        step(masked)
    assert masked.server.model is before


def test_a_run_whose_last_model_nobody_took_is_no_success(masked: Parties) -> None:
    masked.play(lambda server: server.step is Step.FINISH)
    with pytest.raises(TooFewSilos, match="no silo took the last model"):
        step(masked, SILOS)


def test_taking_no_part_is_said_once(masked: Parties) -> None:
    client = masked.clients["silo-1"]
    client.policy = client.policy.model_copy(update={"min_cohort": 9})
    answer = client.handle(masked.server.outgoing()["silo-1"])
    masked.server.receive(answer)
    again = _from(masked, "silo-1", Release(PayloadKind.ADVERT, {}, {}, Independent(reason="late")))
    with pytest.raises(WrongRound, match="answered this step already"):
        masked.server.receive(again)
    assert [one.name for one in masked.server.dropped] == ["silo-1"]


def test_only_the_last_sum_is_kept_in_memory(masked: Parties) -> None:
    play_round(masked)
    play_round(masked)
    assert [one.tensors is None for one in masked.server.sums] == [True, False]
    assert "array(" not in repr(masked.server)


def test_under_ckks_no_figure_is_told(encrypted: Parties) -> None:
    """A server could have one silo judge another's model, put in place of the sum."""
    encrypted.play(lambda server: server.finished)
    assert encrypted.server.metrics == {name: {} for name in SILOS}


def test_a_key_of_any_size_is_not_sent_around(encrypted: Parties) -> None:
    big = Release(
        PayloadKind.GROUP_KEY, {"context": np.zeros(2**23, np.uint8)}, {}, Independent(reason="test")
    )
    cards = [client.identity.card for client in encrypted.clients.values()]
    with pytest.raises(TooLarge, match="CKKS key"):
        encrypted.server.receive(_from(encrypted, "silo-1", big, cards))


def test_an_approval_that_is_asked_for_after_masking_is_a_refusal(masked: Parties) -> None:
    """The masks are spent by then; to wait for an owner would promise what cannot come."""
    upto(masked, Step.TRAIN)
    client = masked.clients["silo-1"]
    manual = client.policy.model_copy(update={"approval": "manual"})
    policies = iter([client.policy, manual, manual])
    client.standing = lambda: Standing(next(policies), client.server, client.roster)
    assert _refused(masked).clause == "approval"


def test_one_approval_a_round_is_enough(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    parties = make_parties(config_of(tiny_encoder, tiny_data, "masked"), tmp_path, approval="manual")
    for at in MASKED_STEPS:
        for name, plan in parties.server.outgoing().items():
            client = parties.clients[name]
            if at is Step.TRAIN:
                with pytest.raises(AwaitingApproval) as waits:
                    client.handle(plan)
                client.ledger.append_approval(plan=waits.value.plan, run=client.run, round=1, step="train")
            parties.server.receive(client.handle(plan))
        parties.server.close_step()
    assert parties.server.sums[0].silos == SILOS


# --- a server that goes silent


def test_a_silo_forgets_a_round_whose_server_was_silent_too_long(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_encoder, tiny_data, "masked", protection={"patience": 100})
    parties = make_parties(config, tmp_path)
    upto(parties, Step.TRAIN)
    trained: list[str] = []
    for name, late in (("silo-1", 101.0), ("silo-2", 99.0), ("silo-3", -5.0)):
        client = parties.clients[name]
        held = client._contributor._masked
        assert held is not None
        client.train = lambda *rest, who=name: trained.append(who)  # type: ignore[misc]
        client.clock = lambda at=client._contributor._last + late: at
        kind = envelope.read_header(client.handle(parties.server.outgoing()[name])).kind
        assert (kind is PayloadKind.MASKED_MODEL) == (name == "silo-2")
        if name != "silo-2":
            assert client.refusals[-1].clause == "masking"
            assert not held._client._root, "its secrets are out of memory"
    assert trained == ["silo-2"], "nobody trains for a round that is over"


def test_a_program_may_abandon_a_round_and_the_next_one_works(masked: Parties) -> None:
    upto(masked, Step.SIGN)
    client = masked.clients["silo-1"]
    held = client._contributor._masked
    assert held is not None
    client.abandon()
    assert not held._client._root
    for name, plan in masked.server.outgoing().items():
        masked.server.receive(masked.clients[name].handle(plan))
    assert client.refusals[-1].clause == "masking"
    masked.server.close_step()
    step(masked, {"silo-1"})
    play_round(masked)
    assert [opened.silos for opened in masked.server.sums] == [SILOS, SILOS]


def test_hidden_row_counts_are_not_told_by_the_figures(masked: Parties) -> None:
    masked.play(lambda server: server.finished)
    assert set(masked.server.metrics) == set(SILOS)
    assert all(set(figures) == {"validation_accuracy"} for figures in masked.server.metrics.values())
