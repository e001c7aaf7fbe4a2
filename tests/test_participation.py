"""Who takes part in which round: draws, late joiners, leavers; and that no server decides it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare

from securefl.config import Config
from securefl.data import load_corpus
from securefl.errors import ConfigError, UnknownSender
from securefl.messages import Step
from securefl.participation import cohort, enrolled, first_round, smallest_cohort
from securefl.simulation import Simulation
from tests.federation import RUN, make_parties, tiny_config

NAMES = tuple(f"silo-{number}" for number in range(1, 7))


def config_with(**federation: Any) -> Config:
    more = {"method": "fedavg", "rounds": 5, **federation}
    return tiny_config(Path("encoder"), Path("data"), federation=more)


def test_silos_join_and_leave_by_the_schedule() -> None:
    config = config_with(join={"silo-2": 3}, leave={"silo-1": 2, "silo-3": 5})
    taking_part = [enrolled(config, NAMES[:3], number) for number in range(1, 6)]
    assert taking_part == [
        ("silo-1", "silo-3"),
        ("silo-1", "silo-3"),
        ("silo-2", "silo-3"),
        ("silo-2", "silo-3"),
        ("silo-2", "silo-3"),
    ]
    assert first_round(config, NAMES[:3], RUN, "silo-2") == 3
    assert smallest_cohort(config, 3) == 2
    assert smallest_cohort(config_with(active=4), 6) == 4
    # The last model goes to all who are there, and not to who has left.
    assert cohort(config, NAMES[:3], RUN, 5, Step.FINISH) == ("silo-2", "silo-3")


def test_as_many_as_asked_are_drawn_all_alike() -> None:
    """Over many runs each silo, and each pair of rounds, comes as often as by chance."""
    config = config_with(active=2)
    seen: Counter[str] = Counter()
    both = 0
    for number in range(3000):
        first, second = (cohort(config, NAMES, f"{number:032x}", n, Step.TRAIN) for n in (1, 2))
        assert len(first) == len(second) == 2
        assert first == cohort(config, NAMES[::-1], f"{number:032x}", 1, Step.TRAIN)
        assert cohort(config, NAMES, f"{number:032x}", 5, Step.FINISH) == NAMES
        seen.update(first)
        both += first == second
    assert chisquare([seen[name] for name in NAMES]).pvalue > 1e-3
    assert abs(both / 3000 - 1 / 15) < 0.02


@pytest.mark.parametrize(
    ("federation", "says"),
    [
        ({"join": {"silo-9": 2}}, r"federation\.join: silo-9 is none of the silos"),
        ({"leave": {"silo-9": 2}}, r"federation\.leave: silo-9 is none of the silos"),
        ({"active": 1}, r"round 1 has 1 of the 3 silos, and at least 2 are needed"),
        ({"join": {"silo-1": 2, "silo-2": 2, "silo-3": 2}}, r"round 1 has 0 of the 3 silos"),
        ({"leave": {"silo-1": 1, "silo-2": 1}}, r"round 2 has 1 of the 3 silos"),
    ],
)
def test_a_round_with_too_few_silos_is_refused_before_the_run(
    federation: dict[str, Any], says: str, tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_encoder, tiny_data, federation=federation)
    with pytest.raises(ConfigError, match=says):
        Simulation(config, load_corpus(config), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"federation": {"join": {"silo-1": 4}, "leave": {"silo-1": 3}}}, "would join after it has left"),
        ({"federation": {"join": {"silo-1": 9}}}, "after the last round"),
        ({"federation": {"active": 2}, "protection": {"models": "ckks"}}, "shares a key to the end"),
        (
            {
                "federation": {"active": 3},
                "protection": {"models": "masked"},
                "privacy": {"models": {"clip": 1.0, "epsilon": 6.0}},
            },
            "shared out among all silos",
        ),
        ({"federation": {"method": "datafree-kd", "active": 2}}, "has no rounds of several silos"),
        ({"federation": {"active": 0}}, "federation.active"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(changes: dict[str, Any], says: str) -> None:
    changes["federation"] = {"rounds": 5, **changes["federation"]}
    with pytest.raises(ConfigError, match=says):
        tiny_config(Path("encoder"), Path("data"), **changes)


METHODS: dict[str, dict[str, Any]] = {
    "fedavg sealed": {"federation": {"method": "fedavg", "active": 2}},
    "fedkc masked": {
        "federation": {"method": "fedkc", "join": {"silo-4": 3}, "leave": {"silo-1": 2}},
        "protection": {"models": "masked"},
        "data": {"split": {"by": "dirichlet", "silos": 4, "alpha": 2.0, "min_rows": 8}},
    },
    "fedkc drawn, private": {
        "federation": {"method": "fedkc", "active": 2},
        "privacy": {
            "centroids": {"epsilon": 8.0, "min_size": 2},
            "dp_sgd": {"epsilon": 8.0, "clip": 1.0, "delta": 1e-2},
        },
    },
}


@pytest.mark.parametrize("name", METHODS)
def test_only_those_of_the_round_answer(
    name: str, tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    changes = {section: dict(fields) for section, fields in METHODS[name].items()}
    changes["federation"]["rounds"] = 3
    config = tiny_config(tiny_encoder, tiny_data, **changes)
    result = Simulation(config, load_corpus(config), tmp_path / "run").run()
    names = [row.name for row in result.clients]
    for row in result.rounds:
        asked = cohort(config, names, result.run, row.round, Step.TRAIN)
        assert row.asked == list(asked)
        assert not row.dropped
        for client in result.clients:
            kinds = {one.kind for one in client.releases if one.round == row.round}
            trained = {"model", "masked-model"} & kinds
            assert bool(trained) == (client.name in asked)
            if "centroids" in kinds:
                assert client.name in asked
    for client in result.clients:
        for one in client.releases:
            if one.kind == "centroids":
                asked = cohort(config, names, result.run, one.round, Step.SHARE)
                assert set(one.readable_by) == set(asked) - {client.name}
        finished = any(one.kind == "metrics" for one in client.releases)
        assert finished == (client.name in cohort(config, names, result.run, 3, Step.FINISH)) or not finished
    if name == "fedkc masked":
        assert [row.asked for row in result.rounds] == [
            ["silo-1", "silo-2", "silo-3"], ["silo-1", "silo-2", "silo-3"], ["silo-2", "silo-3", "silo-4"],
        ]  # fmt: skip
        assert [one.silos for one in result.sums] == [row.asked for row in result.rounds]


def test_a_server_cannot_choose_whom_it_asks(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_encoder, tiny_data, federation={"active": 2})
    parties = make_parties(config, tmp_path)
    names = list(parties.clients)
    chosen = cohort(config, names, RUN, 1, Step.TRAIN)
    (left_out,) = set(names) - set(chosen)
    # A server that asks all: those of the round see another cohort than theirs, the other is not of it.
    parties.server.config = config.model_copy(
        update={"federation": config.federation.model_copy(update={"active": None})}
    )
    for name, plan in parties.server.outgoing().items():
        parties.clients[name].handle(plan)
        (refusal,) = parties.clients[name].refusals
        assert refusal.clause == "agreed.cohort"
        assert ("takes no part" in str(refusal)) == (name == left_out)


def test_an_answer_of_who_takes_no_part_is_refused(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_encoder, tiny_data, federation={"active": 2})
    parties = make_parties(config, tmp_path)
    chosen = cohort(config, list(parties.clients), RUN, 1, Step.TRAIN)
    (left_out,) = set(parties.clients) - set(chosen)
    answer = parties.clients[left_out].handle(parties.server._plan_for(left_out))  # "unavailable", signed
    with pytest.raises(UnknownSender, match="takes no part in round 1"):
        parties.server.receive(answer)


def test_a_joiner_sends_from_its_round_on_and_ends_with_all(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"federation": {"rounds": 3, "join": {"silo-3": 3}}}
    config = tiny_config(tiny_encoder, tiny_data, **changes)
    result = Simulation(config, load_corpus(config), tmp_path / "run").run()
    late = next(row for row in result.clients if row.name == "silo-3")
    assert [one.round for one in late.releases if one.kind == "model"] == [3]
    assert late.test_accuracy == result.clients[0].test_accuracy == result.server.test_accuracy
