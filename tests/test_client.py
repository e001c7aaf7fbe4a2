"""The client against a server that asks for more than it may, and against its own restarts and owners."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securefl.client import Client
from securefl.crypto import envelope
from securefl.crypto.identity import Identity
from securefl.errors import (
    AwaitingApproval,
    Cancelled,
    PolicyRefusal,
    Replayed,
    SecureflError,
    TooFewSilos,
    TooLarge,
    UnsupportedEnvelope,
    UsageError,
    WrongRound,
)
from securefl.exchange import Standing
from securefl.ledger import Ledger, verify_ledger
from securefl.messages import Party
from securefl.policy import Ceiling, Policy
from securefl.privacy import noise_source
from securefl.release import NonPrivate, PayloadKind, decode, fingerprint
from securefl.state import StateFolder
from tests.federation import ALL_KINDS, Parties, make_parties, tiny_config

NOISED = {"privacy": {"centroids": {"epsilon": 4.0, "clip": 5.0, "min_size": 2}}}
FEDKC = {"federation": {"method": "fedkc"}}
LAYERED = {**FEDKC, "fedkc": {"clusters": 3, "compose": "embeddings"}}
PERMIT = {
    "policy": {"allow_embedding_centroids": "the tokens of these rows can be read back from what is shared"}
}


@pytest.fixture
def make(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Callable[..., Parties]:
    def made(changes: dict[str, Any], share: bool = False, **policy: Any) -> Parties:
        parties = make_parties(tiny_config(tiny_encoder, tiny_data, **changes), tmp_path, **policy)
        if share:
            parties.play(lambda server: server.round == 2)
        return parties

    return made


def _tighten(parties: Parties, **clauses: Any) -> Client:
    """silo-1 as it is after its owner has changed the policy."""
    old = parties.clients["silo-1"]
    old.close()
    assert old.state is not None
    policy = Policy(**{**dict(old.policy), **clauses})
    new = dataclasses.replace(old, policy=policy, state=StateFolder(old.state.path))
    parties.clients["silo-1"] = new
    return new


MASKED = {"protection": {"models": "masked"}}
FOUR = {**MASKED, "data": {"split": {"by": "dirichlet", "silos": 4, "alpha": 2.0, "min_rows": 8}}}
WARD = {"silo-1": Ceiling(max_epsilon=3.9, delta=1e-5)}
# Every clause: the configuration whose plan asks for what it forbids, whether in round 2, and the clause.
DOWNGRADES: list[tuple[str, dict[str, Any], bool, dict[str, Any]]] = [
    ("simulation", {**FEDKC, **NOISED}, True, {"simulation": False}),
    ("servers", {}, False, {"servers": ("0" * 64,)}),
    ("peers", FEDKC, True, {"peers": ("0" * 64,)}),
    ("base_models", {}, False, {"base_models": ("0" * 64,)}),
    ("kinds", FEDKC, True, {"kinds": (PayloadKind.MODEL, PayloadKind.METRICS)}),
    ("nonprivate", FEDKC, True, {"nonprivate": (PayloadKind.MODEL,)}),
    ("model_protections", {}, False, {"model_protections": ("masked",)}),
    ("centroid_protections", FEDKC, True, {"centroid_protections": ("sealed",)}),
    ("min_cluster_size", FEDKC, True, {"min_cluster_size": 40}),
    ("min_noise_multiplier", {**FEDKC, **NOISED}, True, {"min_noise_multiplier": 50.0}),
    ("allow_embedding_centroids", {**LAYERED, **PERMIT}, True, {}),
    ("max_release_bytes", {}, False, {"max_release_bytes": 1000}),
    ("max_bytes_per_day", {}, False, {"max_bytes_per_day": 1000}),
    ("min_cohort", MASKED, False, {"min_cohort": 4}),
    ("min_cohort", MASKED, False, {"min_cohort": None}),
    ("min_threshold", FOUR, False, {"min_threshold": 4}),
    ("approval", {}, False, {"approval": None}),
    ("kill_switch", {}, False, {"kill_switch": "/"}),
    ("datasets", {**FEDKC, **NOISED}, True, {"datasets": WARD}),
    ("datasets", {}, False, {"datasets": {"another": WARD["silo-1"]}}),
]


@pytest.mark.parametrize(
    ("clause", "changes", "share", "clauses"), DOWNGRADES, ids=[case[0] for case in DOWNGRADES]
)
def test_a_server_that_asks_for_what_a_clause_forbids_gets_nothing(
    make: Callable[..., Parties], clause: str, changes: dict[str, Any], share: bool, clauses: dict[str, Any]
) -> None:
    """The same plan is answered while the clause permits it, so it is the clause that refuses."""
    parties = make(changes, share)
    client = _tighten(parties, **clauses)
    before = client.ledger.entries
    plan = parties.server.outgoing()["silo-1"]
    answer = client.handle(plan)
    # The server learns that nothing comes, and nothing else: neither the clause nor the reason.
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    body = decode(envelope.open_(envelope.verify(answer, parties.server.roster), parties.server.identity))
    assert (dict(body.document), dict(body.tensors)) == ({}, {})
    parties.server.receive(answer)
    # The owner learns it all.
    assert [refusal.clause for refusal in client.refusals] == [clause]
    assert [entry.clause for entry in client.ledger.refusals] == [clause]
    assert clause in client.ledger.refusals[0].reason
    assert client.ledger.entries == before, "nothing left, so nothing is charged"
    assert verify_ledger(client.ledger.path).refusals == client.ledger.refusals
    # The round goes on without the silo.
    for name in [name for name in parties.clients if name != "silo-1"]:
        parties.server.receive(parties.clients[name].handle(parties.server.outgoing()[name]))
    if changes is MASKED:
        with pytest.raises(TooFewSilos):  # of three none can be missing
            parties.server.close_step()
    else:
        parties.server.close_step()
    # The same plan again gets the same bytes: the refusal is not asked twice until it is forgotten.
    assert client.handle(plan) == answer


@pytest.mark.parametrize(("changes", "share"), [({}, False), (FEDKC, True), ({**FEDKC, **NOISED}, True)])
def test_the_same_plans_are_answered_where_no_clause_forbids_them(
    make: Callable[..., Parties], changes: dict[str, Any], share: bool
) -> None:
    parties = make(changes, share)
    answer = parties.clients["silo-1"].handle(parties.server.outgoing()["silo-1"])
    assert envelope.read_header(answer).kind in ALL_KINDS
    assert not parties.clients["silo-1"].ledger.refusals


def test_an_older_version_than_the_floor_is_refused(make: Callable[..., Parties]) -> None:
    parties = make({})
    client = _tighten(parties, min_envelope_version=2)
    with pytest.raises(UnsupportedEnvelope, match="version 1, older than the 2 required"):
        client.handle(parties.server.outgoing()["silo-1"])
    assert not client.ledger.entries


def test_the_policy_must_be_the_silos_own(make: Callable[..., Parties]) -> None:
    parties = make({})
    with pytest.raises(UsageError, match="the policy is that of silo-2, the keys are silo-1's"):
        _tighten(parties, name="silo-2")


def test_every_clause_has_its_downgrade() -> None:
    elsewhere = {"min_envelope_version", "name"}
    assert {case[0] for case in DOWNGRADES} | elsewhere == set(Policy.model_fields)


# --- approval


def _approved(client: Client, waits: AwaitingApproval, plan: Any = None) -> None:
    client.ledger.append_approval(plan=waits.plan, run=client.run, round=1, step="train")


def test_a_plan_waits_until_its_owner_approves_it(make: Callable[..., Parties]) -> None:
    parties = make({}, approval="manual")
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    with pytest.raises(AwaitingApproval) as first:
        client.handle(plan)
    with pytest.raises(AwaitingApproval) as again:
        client.handle(parties.server.outgoing()["silo-1"])  # the same plan in another envelope
    assert first.value.plan == again.value.plan
    assert not client.ledger.entries
    assert not client.ledger.refusals, "a plan that waits was not refused"
    _approved(client, first.value)
    assert envelope.read_header(client.handle(plan)).kind is PayloadKind.MODEL
    assert not list(client.state.path.glob("*.plan")), "nothing waits any more"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        lambda parties: setattr(parties.server, "model", _nudged(parties.server.model)),
        lambda parties: setattr(parties.server, "round", 2),
        lambda parties: setattr(
            parties.clients["silo-1"], "config", _relearned(parties.clients["silo-1"].config)
        ),
        lambda parties: setattr(parties.clients["silo-1"], "base_sha256", "0" * 64),
    ],
    ids=["one weight", "round", "own learning rate", "checkpoint"],
)
def test_one_changed_parameter_is_a_new_plan(
    make: Callable[..., Parties], change: Callable[[Parties], None]
) -> None:
    parties = make({}, approval="manual", base_models=())
    client = _tighten(parties, base_models=(parties.clients["silo-1"].base_sha256, "0" * 64))
    with pytest.raises(AwaitingApproval) as first:
        client.handle(parties.server.outgoing()["silo-1"])
    _approved(client, first.value)
    change(parties)
    with pytest.raises(AwaitingApproval) as second:
        client.handle(parties.server.outgoing()["silo-1"])
    assert first.value.plan != second.value.plan
    assert not client.ledger.entries


def _nudged(model: Any) -> dict[str, np.ndarray]:
    name = sorted(model)[0]
    array = model[name].copy()
    array.flat[0] += 1e-3
    return {**model, name: array}


def _relearned(config: Any) -> Any:
    return config.model_copy(update={"slm": config.slm.model_copy(update={"learning_rate": 1e-4})})


def test_only_the_newest_plan_waits(make: Callable[..., Parties]) -> None:
    """A server that sends plan after plan must not fill the silo's disk."""
    parties = make({}, approval="manual")
    client = parties.clients["silo-1"]
    for _ in range(4):
        parties.server.model = _nudged(parties.server.model)
        with pytest.raises(AwaitingApproval):
            client.handle(parties.server.outgoing()["silo-1"])
    assert client.state is not None
    assert len(list(client.state.path.glob("*.plan"))) == 1


def test_manual_approval_needs_a_place_to_wait(make: Callable[..., Parties]) -> None:
    old = make({}).clients["silo-1"]
    policy = old.policy.model_copy(update={"approval": "manual"})
    with pytest.raises(UsageError, match="state folder"):
        dataclasses.replace(old, policy=policy, state=None)


# --- what fails while it is computed


@pytest.mark.parametrize(
    "failure",
    [SecureflError("training became NaN at step 3"), ValueError("a row: the patient"), MemoryError()],
)
def test_a_failed_computation_uses_the_step_up(make: Callable[..., Parties], failure: Exception) -> None:
    """A server can make weights overflow on rows that hold a word; it may not ask again."""
    parties = make({})
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    asked = []

    def fails(*arguments: Any) -> None:
        asked.append(1)
        raise failure

    before, client.train = fingerprint(client.slm.state()), fails
    answer = client.handle(plan)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    (entry,) = client.ledger.refusals
    assert entry.clause == "computation"
    assert "patient" not in entry.reason, "the text of an error that is not ours may quote a row"
    assert fingerprint(client.slm.state()) == before
    assert client.handle(plan) == answer
    parties.server.model = _nudged(parties.server.model)
    with pytest.raises(WrongRound):
        client.handle(parties.server.outgoing()["silo-1"])
    assert len(asked) == 1


def test_weights_that_overflow_on_a_word_are_answered_once(make: Callable[..., Parties]) -> None:
    """The attack itself: the largest weights that are admitted make the training of every row NaN."""
    parties = make({})
    client = parties.clients["silo-1"]
    huge = {
        name: np.full_like(array, 1e6) if name.endswith("dense.weight") else array
        for name, array in parties.server.model.items()
    }
    parties.server.model = huge
    kinds = [envelope.read_header(client.handle(parties.server.outgoing()["silo-1"])).kind for _ in range(3)]
    assert len(client.ledger.entries) + len(client.ledger.refusals) == 1
    assert len(set(kinds)) == 1


def test_a_policy_that_changes_while_a_silo_trains_counts(make: Callable[..., Parties]) -> None:
    parties = make({})
    client = parties.clients["silo-1"]
    stand = Standing(client.policy, client.server, client.roster)
    client.standing = lambda: stand

    def changes(*arguments: Any) -> None:
        nonlocal stand
        stand = dataclasses.replace(stand, policy=client.policy.model_copy(update={"kinds": ()}))

    client.train = changes
    answer = client.handle(parties.server.outgoing()["silo-1"])
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert client.refusals[0].clause == "kinds"


def test_a_server_whose_key_is_revoked_while_a_silo_trains_gets_nothing(make: Callable[..., Parties]) -> None:
    parties = make({})
    client = parties.clients["silo-1"]
    stand = Standing(client.policy, client.server, client.roster)
    client.standing = lambda: stand
    after = Identity.generate("server").card

    def rotates(*arguments: Any) -> None:
        nonlocal stand
        allowed = client.policy.model_copy(update={"servers": (after.fingerprint, client.server.fingerprint)})
        stand = Standing(allowed, after, client.roster)

    client.train = rotates
    plan = parties.server.outgoing()["silo-1"]
    with pytest.raises(SecureflError):
        client.handle(plan)
    assert not client.ledger.entries


def test_an_old_answer_is_not_sent_under_a_changed_policy_or_to_old_keys(
    make: Callable[..., Parties],
) -> None:
    parties = make(FEDKC, True)
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    answer, policy = client.handle(plan), client.policy
    for clauses in ({"nonprivate": ()}, {"max_bytes_per_day": 1}, {"min_cluster_size": 30}):
        client.policy = policy.model_copy(update=clauses)
        with pytest.raises(PolicyRefusal, match="the policy was changed"):
            client.handle(plan)
    client.policy = policy
    assert client.handle(plan) == answer
    rotated = Identity.generate("silo-2").card
    client.roster = {**client.roster, "silo-2": rotated}
    with pytest.raises(SecureflError):
        client.handle(plan)


def test_a_day_is_not_spent_twice_by_two_processes(make: Callable[..., Parties]) -> None:
    """Both look at the ledger, then both append: the second look is under the ledger's lock."""
    parties = make({}, max_bytes_per_day=120_000)  # one release
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]

    def meanwhile(*arguments: Any) -> None:
        other = Ledger.open(client.ledger.path, client.identity)
        other.append(
            run="9" * 32,
            round=1,
            step="train",
            plan="0" * 64,
            plan_sequence=1,
            kind=PayloadKind.MODEL,
            recipients=[Party(name="server", key=client.server.fingerprint)],
            protection="sealed",
            envelope=bytes(100_000),
            body=b"",
            dataset="silo-1",
            claim=NonPrivate(reason="another run"),
            permit=lambda account: None,
        )

    client.train = meanwhile
    answer = client.handle(plan)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert client.refusals[0].clause == "max_bytes_per_day"


@pytest.mark.parametrize("now", [float("nan"), float("inf"), -1.0, 1e18])
def test_a_clock_that_gives_no_time_stops_the_silo(make: Callable[..., Parties], now: float) -> None:
    parties = make({})
    client = parties.clients["silo-1"]
    client.clock = lambda: now
    with pytest.raises(UsageError, match="the clock"):
        client.handle(parties.server.outgoing()["silo-1"])
    assert not client.ledger.entries


def test_a_client_is_not_carried_through_a_fork(make: Callable[..., Parties]) -> None:
    parties = make({})
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    client._process += 1  # as it is in a child
    with pytest.raises(UsageError, match="fork"):
        client.handle(plan)


def test_noise_is_drawn_anew_for_every_release_whatever_was_copied() -> None:
    """Two copies of one process, as a fork or a snapshot makes them, must not draw the same noise."""
    source = noise_source(None)
    draws = [source.draw().normal(size=4) for _ in range(2)]
    assert not np.array_equal(*draws)
    seeded = noise_source(7)
    assert not np.array_equal(seeded.draw().normal(size=4), seeded.draw().normal(size=4))
    assert np.array_equal(noise_source(7).draw().normal(size=4), noise_source(7).draw().normal(size=4))


@pytest.mark.parametrize("after", ["head", "tidy", "witness"])
def test_a_failure_after_the_charge_keeps_model_and_answer_together(
    make: Callable[..., Parties], monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The line is on the disk: the model that was sent is the one to go on from."""
    parties = make({"federation": {"method": "datafree-kd"}})
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    assert client.state is not None

    def broken(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    if after == "head":
        monkeypatch.setattr(Ledger, "_write_head", broken)
    elif after == "tidy":
        monkeypatch.setattr(StateFolder, "tidy", broken)
    else:
        client.witness = broken
    with pytest.raises(KeyboardInterrupt):
        client.handle(plan)
    monkeypatch.undo()
    client.witness = None
    sealed = client.handle(plan)
    opened = envelope.open_(envelope.verify(sealed, parties.server.roster), parties.server.identity)
    assert fingerprint(client.slm.state()) == fingerprint(decode(opened).tensors)
    assert len(verify_ledger(client.ledger.path).releases) == 1


# --- restart


def _restart(parties: Parties, name: str = "silo-1") -> Client:
    """The silo as a new process finds it: its files, and the model that it started from."""
    old = parties.clients[name]
    old.close()
    assert old.state is not None
    parties.clients[name] = dataclasses.replace(
        old, ledger=Ledger.open(old.ledger.path, old.identity), state=StateFolder(old.state.path)
    )
    return parties.clients[name]


def test_replays_are_known_after_a_restart(make: Callable[..., Parties]) -> None:
    parties = make(FEDKC)
    first = parties.server.outgoing()["silo-1"]
    answers = {name: parties.clients[name].handle(p) for name, p in parties.server.outgoing().items()}
    client = _restart(parties)
    assert client.handle(first) == answers["silo-1"], "the last answer goes out again, byte for byte"
    for answer in answers.values():
        parties.server.receive(answer)
    parties.server.close_step()
    client.handle(parties.server.outgoing()["silo-1"])
    client = _restart(parties)
    for stale in (first,):  # answered, and the answer is no longer the last
        with pytest.raises(Replayed):
            client.handle(stale)
    parties.server.round, parties.server.sequences = 1, itertools.count(1001)
    parties.server._steps = parties.server._steps_of_round()
    parties.server.model = _nudged(parties.server.model)
    earlier = parties.server.outgoing()["silo-1"]
    with pytest.raises(WrongRound):
        client.handle(earlier)
    assert len(client.ledger.entries) == 2


def test_a_server_that_counts_from_the_beginning_again_is_refused(make: Callable[..., Parties]) -> None:
    parties = make(FEDKC)
    for answer in parties.answers().values():
        parties.server.receive(answer)
    parties.server.close_step()
    client = _restart(parties)
    parties.server.sequences = itertools.count(1)
    with pytest.raises(Replayed, match="sequence 1 after"):
        client.handle(parties.server.outgoing()["silo-1"])


def test_a_lost_state_folder_never_means_a_second_release(make: Callable[..., Parties]) -> None:
    parties = make({**FEDKC, **NOISED}, True)
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    client.handle(plan)
    assert client.state is not None
    for path in client.state.path.glob("*.answer"):
        path.unlink()
    for broken in (client, _restart(parties)):
        with pytest.raises(Replayed):
            broken.handle(plan)
    assert len(verify_ledger(client.ledger.path).releases) == 2


def test_an_answer_that_was_damaged_on_the_disk_is_not_sent(make: Callable[..., Parties]) -> None:
    parties = make({})
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    client.handle(plan)
    assert client.state is not None
    (kept,) = client.state.path.glob("*.answer")
    kept.write_bytes(kept.read_bytes()[:-1] + b"\0")
    with pytest.raises(Replayed):
        client.handle(plan)


def test_a_model_of_its_own_that_is_lost_is_an_error(make: Callable[..., Parties]) -> None:
    """Going on from the checkpoint would throw the silo's rounds away without a word."""
    parties = make({"federation": {"method": "datafree-kd"}})
    client = parties.clients["silo-1"]
    client.handle(parties.server.outgoing()["silo-1"])
    trained = fingerprint(client.slm.state())
    client.slm.load_state(parties.clients["silo-2"].slm.state())  # what a new process would have loaded
    assert fingerprint(_restart(parties).slm.state()) == trained
    assert client.state is not None
    for path in client.state.path.glob("*.model"):
        path.unlink()
    with pytest.raises(UsageError, match="the model of silo-1 after round 1 is missing"):
        _restart(parties)


def test_one_client_at_a_time_has_a_state_folder(make: Callable[..., Parties]) -> None:
    client = make({}).clients["silo-1"]
    assert client.state is not None
    with pytest.raises(UsageError, match="another client is running"):
        StateFolder(client.state.path)
    client.close()
    StateFolder(client.state.path).close()
    client.state.path.chmod(0o755)
    with pytest.raises(UsageError, match="others can reach"):
        StateFolder(client.state.path)


# --- cancelling, threads, memory, logs


def test_a_cancelled_training_leaves_nothing_behind(make: Callable[..., Parties]) -> None:
    parties = make({})
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    before, asked = fingerprint(client.slm.state()), iter([False, True])
    client.cancelled = lambda: next(asked)
    with pytest.raises(Cancelled, match="after 1 of"):
        client.handle(plan)
    assert fingerprint(client.slm.state()) == before
    assert not client.ledger.entries
    assert not client.ledger.refusals
    client.cancelled = None
    assert envelope.read_header(client.handle(plan)).kind is PayloadKind.MODEL


def test_the_kill_switch_ends_a_training_that_runs(make: Callable[..., Parties], tmp_path: Path) -> None:
    parties = make({}, kill_switch=str(tmp_path / "STOP"))
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    before = fingerprint(client.slm.state())
    steps = iter(range(100))

    def thrown_meanwhile() -> bool:
        if next(steps) == 1:
            (tmp_path / "STOP").touch()
        return False

    client.cancelled = thrown_meanwhile
    answer = client.handle(plan)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert [entry.clause for entry in client.ledger.refusals] == ["kill_switch"]
    assert fingerprint(client.slm.state()) == before
    assert next(steps) == 2, "the switch was thrown at the second step, and there was no third"


def test_threads_take_turns(make: Callable[..., Parties]) -> None:
    parties = make({})
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(client.handle(plan))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert len(answers) == 4
    assert len(client.ledger.entries) == 1


def test_a_plan_larger_than_the_run_needs_is_refused_unread(make: Callable[..., Parties]) -> None:
    client = make({}).clients["silo-1"]
    weights = sum(array.nbytes for array in client.slm.state().values())
    huge = bytes(2 * weights + 2**24)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            client.handle(huge)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(huge) / 8


def test_refusals_in_memory_are_bounded(make: Callable[..., Parties]) -> None:
    client = make({}).clients["silo-1"]
    for number in range(1000):
        client.refusals.append(SecureflError(str(number)))  # type: ignore[arg-type]
    assert len(client.refusals) == 256


def test_nothing_that_is_logged_shows_a_text_a_key_or_a_number_of_a_vector(
    make: Callable[..., Parties], caplog: pytest.LogCaptureFixture
) -> None:
    """Everything at DEBUG, over whole rounds, refusals and a broken peer, searched for what is secret."""
    caplog.set_level(logging.DEBUG)
    parties = make(FEDKC, True, kinds=(PayloadKind.MODEL, PayloadKind.CENTROIDS))
    client = parties.clients["silo-1"]
    for answer in parties.answers().values():
        parties.server.receive(answer)
    parties.server.close_step()
    lied = {**parties.server._relay, "silo-2": b"no envelope"}
    parties.server._relay = lied
    for answer in parties.answers().values():
        parties.server.receive(answer)
    parties.server.close_step()
    parties.answers()  # the last step wants metrics, which the policy forbids
    logged = "\n".join(record.getMessage() for record in caplog.records) + caplog.text
    assert "centroids of silo-2 ignored" in logged
    assert "plan refused by policy (kinds)" in logged
    for text in (*client.data.train.texts, *client.data.validation.texts):
        assert text not in logged
    seeds = [
        client.identity._ed25519.private_bytes_raw(),
        client.identity._x25519.private_bytes_raw(),
    ]
    for seed in seeds:
        assert seed.hex() not in logged
        assert repr(seed) not in logged
    for name, array in client.slm.state().items():
        for value in array.reshape(-1)[:20]:
            if abs(float(value)) > 1e-3 and float(value) != 1.0:
                assert f"{float(value):.5f}"[:7] not in logged, name


# --- previews


def test_a_preview_says_what_would_leave_and_changes_nothing(make: Callable[..., Parties]) -> None:
    parties = make({**FEDKC, **NOISED}, True)
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    model, entries = fingerprint(client.slm.state()), client.ledger.entries
    assert client.state is not None
    files = {path: path.read_bytes() for path in client.state.path.iterdir()}
    found = client.preview(plan)
    assert found.release is not None
    assert found.release.kind is PayloadKind.CENTROIDS
    assert {party.name for party in found.recipients} == {"silo-2", "silo-3"}
    assert found.account is not None
    assert found.account.private_epsilon == pytest.approx(4.0, rel=1e-6)
    assert (fingerprint(client.slm.state()), client.ledger.entries) == (model, entries)
    assert {path: path.read_bytes() for path in client.state.path.iterdir()} == files
    # What then leaves has the same fields, shapes and size; without noise, the same bytes.
    client.handle(plan)
    assert found.body is not None
    assert client.ledger.entries[-1].claim == found.release.claim


def test_a_preview_of_an_exact_release_is_the_release(make: Callable[..., Parties]) -> None:
    import hashlib

    parties = make({})
    client, plan = parties.clients["silo-1"], parties.server.outgoing()["silo-1"]
    found = client.preview(plan)
    client.handle(plan)
    assert found.body is not None
    assert hashlib.sha256(found.body).hexdigest() == client.ledger.entries[0].body_sha256
    assert found.hash == client.ledger.entries[0].plan


def test_a_preview_of_a_forbidden_plan_names_the_clause(make: Callable[..., Parties]) -> None:
    parties = make({}, kinds=(PayloadKind.METRICS,))
    found = parties.clients["silo-1"].preview(parties.server.outgoing()["silo-1"])
    assert found.release is None
    assert [refusal.clause for refusal in found.refusals] == ["kinds"]
    assert not parties.clients["silo-1"].ledger.refusals


def test_a_preview_of_a_waiting_plan_shows_it(make: Callable[..., Parties]) -> None:
    parties = make({}, approval="manual")
    found = parties.clients["silo-1"].preview(parties.server.outgoing()["silo-1"])
    assert found.release is not None
    assert [type(refusal) for refusal in found.refusals] == [AwaitingApproval]


def test_noise_of_the_operating_system_is_no_simulation(make: Callable[..., Parties]) -> None:
    """With real noise the clause `simulation` has nothing to forbid."""
    parties = make({**FEDKC, **NOISED}, True)
    client = _tighten(parties, simulation=False)
    client.noise = noise_source(None)
    assert envelope.read_header(client.handle(parties.server.outgoing()["silo-1"])).kind is (
        PayloadKind.CENTROIDS
    )
