"""Lanes with real silos, keys and envelopes; of the language model only the answers, at chosen times."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securefl.announcement import Announcement, announce, tokenizer_sha256
from securefl.client import Client
from securefl.config import Config
from securefl.crypto import envelope
from securefl.data import Rows
from securefl.errors import (
    BadSignature,
    NonFiniteUpdate,
    Replayed,
    SecureflError,
    TooFewSilos,
    UnknownSender,
    UsageError,
    WrongRound,
    WrongShape,
)
from securefl.lanes import Job, Lanes, Past
from securefl.local import SiloData
from securefl.messages import Step
from securefl.methods.fedkc import Knowledge
from securefl.models import load_slm
from securefl.privacy import Noise
from securefl.release import Tensors, decode_release, encode_release
from securefl.slm import Slm
from securefl.training import probabilities
from tests import tiny
from tests.federation import RUN, make_parties, tiny_config
from tests.test_federation import _flip

NAMES = ("silo-1", "silo-2", "silo-3")


def no_training(
    slm: Slm,
    rows: Rows,
    config: Config,
    epochs: int,
    seed: int,
    noise: Noise,
    knowledge: Sequence[Knowledge] = (),
    cancelled: Callable[[], bool] | None = None,
) -> None:
    """What a silo learned, as far as a server can tell: other weights."""
    state = slm.state()
    name = next(n for n in state if n.endswith("classifier.bias"))
    slm.load_state({**state, name: state[name] + np.float32(1e-3)})


class Play:
    """The silos and the lanes of a run of CrossLM."""

    def __init__(self, encoder: Path, data: Path, folder: Path, rounds: int = 2, **policy: Any) -> None:
        config = tiny_config(encoder, data, federation={"method": "crosslm", "rounds": rounds})
        parties = make_parties(config, folder, train=no_training, **policy)
        self.clients, server = parties.clients, parties.server
        self.announced = {name: announce(one.slm, one.base_sha256) for name, one in self.clients.items()}
        self.lanes = Lanes(
            identity=server.identity,
            roster=server.roster,
            run=RUN,
            config=config,
            announced=self.announced,
            shapes=server.shapes,
            clock=server.clock,
        )

    def answer(self, name: str) -> Step:
        """One silo answers what it is being asked for."""
        step = self.lanes.step_of(name)
        self.lanes.receive(self.clients[name].handle(self.lanes.outgoing()[name]))
        return step

    def serve(self, learned: bool = True, candidate: bool = True) -> Job:
        job = self.lanes.next_job()
        assert job is not None
        self.lanes.finish(job, job.model if candidate else None, learned=learned)
        return job


@pytest.fixture
def play(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Play:
    return Play(tiny_encoder, tiny_data, tmp_path)


def test_a_silo_is_served_while_the_others_still_train(play: Play) -> None:
    assert list(play.lanes.outgoing()) == list(NAMES)
    assert play.answer("silo-2") is Step.TRAIN
    assert list(play.lanes.outgoing()) == ["silo-1", "silo-3"]
    job = play.serve()
    assert (job.silo, job.round, job.arrival, job.labels) == ("silo-2", 1, 1, ("a", "b"))
    assert set(job.model) == set(play.clients["silo-2"].slm.shapes())
    assert play.answer("silo-2") is Step.CANDIDATE
    assert play.answer("silo-2") is Step.TRAIN
    assert play.serve().round == 2
    assert play.answer("silo-2") is Step.CANDIDATE
    assert play.answer("silo-2") is Step.FINISH
    assert list(play.lanes.outgoing()) == ["silo-1", "silo-3"]
    for name in ("silo-3", "silo-1"):
        for _ in range(2):
            play.answer(name)
            play.serve(candidate=False)  # then nothing is asked of the silo but the next training
        assert play.answer(name) is Step.FINISH
    assert play.lanes.finished
    assert not play.lanes.outgoing()
    assert [row.silo for row in play.lanes.arrivals] == [*["silo-2"] * 2, *["silo-3"] * 2, *["silo-1"] * 2]
    assert [row.candidate for row in play.lanes.arrivals] == [True, True, False, False, False, False]
    assert play.lanes.dropped == {}


def test_one_job_at_a_time_in_the_order_of_arrival_with_its_staleness(play: Play) -> None:
    """Worked out by hand. The LLM's arrivals: 3, 1, 2 of round 1, then 3, 2 and 1 of round 2."""
    for name in ("silo-3", "silo-1", "silo-2"):
        play.answer(name)
    first = play.lanes.next_job()
    assert first is not None
    assert play.lanes.next_job() is None, "one at a time"
    play.lanes.finish(first, first.model, learned=True)
    play.answer("silo-3")
    play.answer("silo-3")  # its second model stands behind silo-1 and silo-2
    jobs = [first, play.serve(), play.serve(learned=False), play.serve()]
    for name in ("silo-2", "silo-1"):
        play.answer(name)
        play.answer(name)
        jobs.append(play.serve())
    assert [job.silo for job in jobs] == ["silo-3", "silo-1", "silo-2", "silo-3", "silo-2", "silo-1"]
    assert [job.arrival for job in jobs] == [1, 2, 3, 4, 5, 6]
    assert [job.queued_behind for job in jobs] == [0, 1, 2, 2, 0, 0]
    # silo-2 of round 1 taught nothing; silo-1 last got a candidate as the second to be served.
    assert [job.staleness for job in jobs] == [0, 1, 2, 1, 1, 2]
    assert [row.staleness for row in play.lanes.arrivals] == [0, 1, 2, 1, 1, 2]


def test_any_order_ends_and_serves_every_silo_in_every_round(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    for seed in range(3):
        (folder := tmp_path / str(seed)).mkdir()
        play, rng = Play(tiny_encoder, tiny_data, folder), np.random.default_rng(seed)
        while not play.lanes.finished:
            waiting = list(play.lanes.outgoing())
            if not waiting or rng.random() < 0.4:
                if (job := play.lanes.next_job()) is not None:
                    play.lanes.finish(job, job.model, learned=True)
            else:
                play.answer(str(rng.choice(waiting)))
        served = [(row.silo, row.round) for row in play.lanes.arrivals]
        assert sorted(served) == [(name, number) for name in NAMES for number in (1, 2)]
        assert all(row.kept_candidate is True for row in play.lanes.arrivals), "it was as good as its own"
        for client in play.clients.values():
            assert [entry.step for entry in client.ledger.entries] == [
                "train", "candidate", "train", "candidate", "finish"
            ]  # fmt: skip


def test_the_server_counts_its_messages_over_all_lanes(play: Play) -> None:
    numbers = [envelope.read_header(play.lanes.outgoing()[name]).sequence for name in (*NAMES, *NAMES)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_silo_says_whether_it_kept_the_candidate(play: Play, sign: int) -> None:
    """A candidate that says of two labels the other one is better where one's own is mostly wrong."""
    client = play.clients["silo-1"]
    play.answer("silo-1")
    job = play.lanes.next_job()
    assert job is not None
    candidate = {n: sign * v if "classifier" in n else v for n, v in job.model.items()}
    play.lanes.finish(job, candidate, learned=True)
    rows = client.data.validation
    right = float((probabilities(client.slm, rows.texts).argmax(1) == rows.labels).mean())
    assert right != 0.5, "the test needs a better one"
    play.answer("silo-1")
    assert play.lanes.arrivals[0].kept_candidate is (sign == 1 or right < 0.5)


# --- a server that was killed


def test_a_restarted_server_goes_on_with_the_same_silos(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """It remembers what it served and nothing else. At the crash silo-1 had answered its second training,
    unserved; silo-2 had not got its candidate, silo-3 had answered its first training, unserved.
    """
    play = Play(tiny_encoder, tiny_data, tmp_path)
    past: list[Past] = []

    def serve() -> None:
        job = play.serve()
        past.append(Past(play.lanes.arrivals[-1], learned=True, candidate=job.model))

    for name in ("silo-1", "silo-2", "silo-3"):
        play.answer(name)
    serve()
    play.answer("silo-1")
    play.answer("silo-1")
    serve()
    before = {name: len(client.ledger.entries) for name, client in play.clients.items()}
    assert before == {"silo-1": 3, "silo-2": 1, "silo-3": 1}

    play.lanes = Lanes(**_fields(play.lanes), past=past)
    assert {name: play.lanes.step_of(name) for name in NAMES} == {
        "silo-1": Step.CANDIDATE, "silo-2": Step.CANDIDATE, "silo-3": Step.TRAIN
    }  # fmt: skip
    with pytest.raises(Replayed):  # it has long answered, and kept its newest answer alone
        play.answer("silo-1")
    play.lanes.drop("silo-1", SecureflError("answered before"))
    for name in ("silo-3", "silo-1"):
        assert play.answer(name) is Step.TRAIN
    assert {name: len(client.ledger.entries) for name, client in play.clients.items()} == before, (
        "the very answers that they gave, and nothing was trained or charged again"
    )
    jobs = [play.serve(), play.serve()]
    assert [(job.silo, job.round, job.arrival) for job in jobs] == [("silo-3", 1, 3), ("silo-1", 2, 4)]
    # By hand: silo-3 never got one while two were learned; then silo-1, since its first, two more.
    assert [job.staleness for job in jobs] == [2, 2]
    while not play.lanes.finished:
        for name in list(play.lanes.outgoing()):
            play.answer(name)
        if (job := play.lanes.next_job()) is not None:
            play.lanes.finish(job, job.model, learned=True)
    served = [(row.silo, row.round) for row in play.lanes.arrivals]
    assert sorted(served) == [(name, number) for name in NAMES for number in (1, 2)]
    for client in play.clients.values():
        assert len(client.ledger.entries) == 5
        assert not client.refusals


def test_a_restart_at_the_very_end_asks_for_the_end(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    play = Play(tiny_encoder, tiny_data, tmp_path, rounds=1)
    for name in NAMES:
        play.answer(name)
        play.serve(candidate=False)
    past = [Past(row, learned=True, candidate=None) for row in play.lanes.arrivals]
    play.lanes = Lanes(**_fields(play.lanes), past=past)
    assert {play.answer(name) for name in NAMES} == {Step.FINISH}
    assert play.lanes.finished
    assert not play.lanes.outgoing()


# --- silos that fail


def test_a_silo_that_refuses_misses_its_round_and_holds_nobody_up(play: Play) -> None:
    refusing = play.clients["silo-1"]
    refusing.policy = refusing.policy.model_copy(update={"max_release_bytes": 10})
    assert play.answer("silo-1") is Step.TRAIN
    assert play.lanes.round_of("silo-1") == 2
    assert [(one.name, one.error) for one in play.lanes.dropped[1]] == [("silo-1", "Unavailable")]
    refusing.policy = refusing.policy.model_copy(update={"max_release_bytes": 2**24})
    for name in ("silo-2", "silo-3"):
        for _ in range(2):
            play.answer(name)
            play.serve(candidate=False)
        play.answer(name)
    play.answer("silo-1")  # of round 2, which it takes part in
    play.serve(candidate=False)
    play.answer("silo-1")
    assert play.lanes.finished
    assert [row.round for row in play.lanes.arrivals if row.silo == "silo-1"] == [2]


def test_a_broken_answer_changes_nothing_and_may_be_dropped(play: Play) -> None:
    plan = play.lanes.outgoing()["silo-1"]
    answer = play.clients["silo-1"].handle(plan)
    with pytest.raises(BadSignature):
        play.lanes.receive(_flip(answer))
    assert "silo-1" in play.lanes.outgoing()
    assert play.lanes.next_job() is None
    play.lanes.drop("silo-1", SecureflError("its answer was cut short"))
    assert play.lanes.dropped[1][0].reason == "its answer was cut short"
    assert play.lanes.round_of("silo-1") == 2
    with pytest.raises(WrongRound):
        play.lanes.receive(answer)


def test_without_any_model_of_a_round_the_run_ends(play: Play) -> None:
    for name in ("silo-1", "silo-2"):
        play.lanes.drop(name, SecureflError("silent"))
        play.lanes.drop(name, SecureflError("silent"))  # round 2 too
    assert list(play.lanes.outgoing()) == list(NAMES), "silo-3 is still in round 1"
    play.lanes.drop("silo-3", SecureflError("silent"))
    with pytest.raises(TooFewSilos, match="round 1"):
        play.lanes.outgoing()


def test_without_any_silo_at_the_end_the_run_has_failed(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    play = Play(tiny_encoder, tiny_data, tmp_path, rounds=1)
    play.answer("silo-1")
    play.serve(candidate=False)
    play.lanes.drop("silo-1", SecureflError("silent"))
    for name in ("silo-2", "silo-3"):
        play.lanes.drop(name, SecureflError("silent"))
        play.lanes.drop(name, SecureflError("silent"))
    assert play.lanes.finished
    with pytest.raises(TooFewSilos, match="last model"):
        play.lanes.outgoing()


def test_while_a_model_waits_nothing_more_is_due_of_its_silo(play: Play) -> None:
    answer = play.clients["silo-1"].handle(play.lanes.outgoing()["silo-1"])
    play.lanes.receive(answer)
    with pytest.raises(SecureflError):
        play.lanes.receive(answer)
    with pytest.raises(UsageError, match="silo-1"):
        play.lanes.drop("silo-1", SecureflError("late"))
    job = play.lanes.next_job()
    assert job is not None
    with pytest.raises(UsageError, match="not the one"):
        play.lanes.finish(replace(job), None, learned=True)
    play.lanes.skip(job, WrongShape("it is no model"))
    assert play.lanes.arrivals[0].outcome == "skipped"
    assert play.lanes.arrivals[0].note == play.lanes.dropped[1][0].reason == "it is no model"
    assert play.lanes.round_of("silo-1") == 2
    with pytest.raises(UsageError, match="not the one"):
        play.lanes.finish(job, None, learned=True)


def test_a_stranger_has_no_lane(play: Play) -> None:
    answer = play.clients["silo-1"].handle(play.lanes.outgoing()["silo-1"])
    del play.lanes._lanes["silo-1"]
    with pytest.raises(UnknownSender):
        play.lanes.receive(answer)


def test_every_silo_must_have_announced_its_model(play: Play) -> None:
    announced = dict(itertools.islice(play.announced.items(), 2))
    with pytest.raises(UsageError, match="silo-3"):
        Lanes(**{**_fields(play.lanes), "announced": announced})


def _fields(lanes: Lanes) -> dict[str, Any]:
    names = ("identity", "roster", "run", "config", "announced", "shapes", "clock")
    return {name: getattr(lanes, name) for name in names}


# --- models of another kind than announced


def _changed(
    client: Client,
    answer: bytes,
    play: Play,
    *,
    tensors: Tensors | None = None,
    info: Mapping[str, object] | None = None,
) -> bytes:
    """The silo's release with other arrays or public facts, properly sealed and signed."""
    verified = envelope.verify(answer, play.lanes.roster)
    release = decode_release(envelope.open_(verified, play.lanes.identity))
    changed = replace(release, tensors=tensors or release.tensors, info={**release.info, **(info or {})})
    return envelope.seal(encode_release(changed), verified.header, client.identity, [client.server])


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("labels", ["a", "c"], "labels"),
        ("labels", ["a", "b", "c"], "labels"),
        ("labels", ["a", "a"], "labels"),
        ("labels", "ab", "labels"),
        ("labels", [1, 2], "labels"),
        ("labels", None, "labels"),
        ("tokenizer", "0" * 64, "tokenizer"),
        ("tokenizer", None, "tokenizer"),
        ("base_sha256", "0" * 64, "architecture"),
        ("max_length", 17, "max_length"),
    ],
)
def test_a_model_of_another_kind_than_announced_is_refused(
    play: Play, field: str, value: object, word: str
) -> None:
    client = play.clients["silo-1"]
    answer = client.handle(play.lanes.outgoing()["silo-1"])
    with pytest.raises(WrongShape, match=f"silo-1 has another {word}|{word}"):
        play.lanes.receive(_changed(client, answer, play, info={field: value}))
    assert play.lanes.next_job() is None
    play.lanes.receive(answer)
    assert play.lanes.next_job() is not None


def test_a_model_with_nan_or_of_another_architecture_is_refused(play: Play) -> None:
    client = play.clients["silo-1"]
    answer, state = client.handle(play.lanes.outgoing()["silo-1"]), client.slm.state()
    first = sorted(state)[0]
    for changed, expected in (
        ({**state, first: np.full_like(state[first], np.nan)}, NonFiniteUpdate),
        ({**state, first: np.zeros((3, 3), np.float32)}, WrongShape),
        ({name: state[name] for name in sorted(state)[1:]}, WrongShape),
    ):
        with pytest.raises(expected, match="silo-1"):
            play.lanes.receive(_changed(client, answer, play, tensors=changed))


def test_heads_in_another_order_of_labels_come_with_their_order(play: Play, tiny_encoder: Path) -> None:
    """A silo whose head and rows are in another order than the run's: the job says so, and it still votes."""
    client = play.clients["silo-1"]
    client.slm = load_slm(str(tiny_encoder), ("b", "a"), max_length=16, train_embeddings=False, seed=1)
    rows = client.data.validation
    turned = copy.copy(rows)
    object.__setattr__(turned, "labels", 1 - rows.labels)
    client.data = SiloData(client.data.train, turned)
    play.answer("silo-1")
    job = play.serve()
    assert job.labels == ("b", "a")
    assert play.answer("silo-1") is Step.CANDIDATE
    assert play.lanes.arrivals[0].kept_candidate is True


def test_what_names_a_tokenizer(tmp_path: Path, tiny_encoder: Path) -> None:
    """The same whatever it was last used for; another for one other word in the vocabulary."""
    load = {"max_length": 16, "train_embeddings": False, "seed": 0}
    slm = load_slm(str(tiny_encoder), ("a", "b"), **load)  # type: ignore[arg-type]
    before = tokenizer_sha256(slm)
    slm.tokenize(["the team won"], 12)
    assert tokenizer_sha256(slm) == before == tokenizer_sha256(copy.deepcopy(slm))
    swapped = (*tiny.WORDS[:-2], tiny.WORDS[-1], tiny.WORDS[-2])
    other = load_slm(
        str(tiny.make_encoder(tmp_path / "other", vocabulary=swapped)),
        ("a", "b"),
        **load,  # type: ignore[arg-type]
    )
    assert other.shapes() == slm.shapes()
    assert tokenizer_sha256(other) != before
    one, two = announce(slm, "0" * 64), announce(other, "0" * 64)
    assert one == Announcement("0" * 64, before, 16, ("a", "b"))
    info = {"labels": ["b", "a"], "base_sha256": "0" * 64, "tokenizer": before, "max_length": 16}
    one.check(info, "silo-1")
    with pytest.raises(WrongShape, match="silo-1 has another tokenizer"):
        two.check(info, "silo-1")
