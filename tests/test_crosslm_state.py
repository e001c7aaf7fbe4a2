"""The server's state: to the bit what an uninterrupted server comes to, nobody served twice, no mixture."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securefl.crosslm_state import ServedWorker
from securefl.crosslm_worker import Arrival, CrossLmWorker
from securefl.errors import ModelError, ProtocolError, UsageError, WrongRound
from securefl.release import canonical_json, fingerprint
from securefl.slm import Slm
from tests.crosslm_crash import ARRIVALS, LABELS, job_of, make_model, make_worker, summary

Open = Callable[..., ServedWorker]


def test_a_killed_server_comes_to_the_same_and_serves_nobody_twice(
    tiny_encoder: Path, tiny_llm: Path, tmp_path: Path
) -> None:
    """Real processes and SIGKILL: while the language model learns, at file calls of the save, after it."""
    command = [sys.executable, "-m", "tests.crosslm_crash", tmp_path, tiny_encoder, tiny_llm, "23"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    whole, kills = said["whole"], said["kills"]
    order = [[silo, number] for silo, number, _ in ARRIVALS]
    assert whole["again"] == [False] * 3
    assert whole["served"] == order
    assert all(whole["candidates"]), "the test needs something to repeat"
    assert len({report["kl"] for report in whole["reports"]}) == 3, "and a language model that learns"
    assert len(kills) >= 5
    before = [(one["silo"], one["round"]) for one in kills[0]["found"]]
    assert before == [("silo-1", 1)]
    assert {len(kill["found"]) for kill in kills} == {1, 2}
    for kill in kills:
        after, served = kill["after"], len(kill["found"])
        assert after["again"] == [i < served for i in range(3)], kill["point"]
        for what in ("weights", "optimizer", "reports", "served", "candidates"):
            assert after[what] == whole[what], (kill["point"], what)


@pytest.fixture
def worker(tiny_encoder: Path, tiny_llm: Path) -> CrossLmWorker:
    return make_worker(tiny_encoder, tiny_llm)


@pytest.fixture
def serve(tiny_encoder: Path, tiny_llm: Path) -> Open:
    """A server on a folder, with a language model as loaded unless one is given."""

    def open_(folder: Path, worker: CrossLmWorker | None = None, **options: Any) -> ServedWorker:
        return ServedWorker(
            worker or make_worker(tiny_encoder, tiny_llm),
            folder,
            lambda _, labels: make_model(tiny_encoder, labels),
            **options,
        )

    return open_


@pytest.fixture
def slm(tiny_encoder: Path) -> Slm:
    return make_model(tiny_encoder, LABELS, 40.0)


@pytest.fixture
def other(tiny_encoder: Path) -> Slm:
    return make_model(tiny_encoder, LABELS, -25.0)


def test_an_arrival_is_answered_again_and_taught_once(
    serve: Open, slm: Slm, other: Slm, worker: CrossLmWorker, tmp_path: Path
) -> None:
    served = serve(tmp_path / "state", worker)
    first = served.arrival(slm, job_of("silo-1", 1))
    assert not first.again
    assert first.candidate is not None
    before = summary(served)
    again = served.arrival(slm, job_of("silo-1", 1))
    assert again.again
    assert again.candidate is not None
    assert fingerprint(again.candidate) == fingerprint(first.candidate)
    assert again.report == first.report
    with pytest.raises(WrongRound, match="silo-1 sent another model for round 1"):
        served.arrival(other, job_of("silo-1", 1))
    assert summary(served) == before
    served.arrival(other, job_of("silo-1", 2))
    with pytest.raises(WrongRound, match="round 1 of silo-1 is over"):
        served.arrival(slm, job_of("silo-1", 1))
    assert served.served == (("silo-1", 1), ("silo-1", 2))


def test_all_candidates_are_kept_where_a_run_is_replayed(
    serve: Open, slm: Slm, other: Slm, tmp_path: Path
) -> None:
    for keep, files in (("all", 2), ("last", 1)):
        folder = tmp_path / keep
        served = serve(folder, keep=keep)
        found = [served.arrival(slm, job_of("silo-1", 1)), served.arrival(other, job_of("silo-1", 2))]
        served.close()
        # Weights, optimizer, the model that grades, and candidates.
        assert len(list(folder.glob("*.safetensors"))) == 3 + files
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
        assert folder.stat().st_mode & 0o777 == 0o700
        if keep == "all":
            replay = serve(folder, keep="all")
            again = replay.arrival(slm, job_of("silo-1", 1))
            assert again.again
            assert fingerprint(again.candidate or {}) == fingerprint(found[0].candidate or {})


def test_graders_in_another_order_of_labels_come_back(
    serve: Open, tiny_encoder: Path, slm: Slm, tmp_path: Path
) -> None:
    """With and without a restart in between the ensemble says the same."""
    turned = make_model(tiny_encoder, ("b", "a"), 40.0)
    whole = serve(tmp_path / "whole")
    whole.arrival(turned, job_of("silo-1", 1))
    whole.arrival(slm, job_of("silo-2", 1))
    first = serve(tmp_path / "state")
    first.arrival(turned, job_of("silo-1", 1))
    first.close()
    second = serve(tmp_path / "state")
    second.arrival(slm, job_of("silo-2", 1))
    assert summary(second) == summary(whole)
    assert second.worker.reports[1]["graders"] == ["silo-1", "silo-2"]


def test_an_arrival_that_fails_leaves_the_language_model_as_before(
    serve: Open, slm: Slm, other: Slm, worker: CrossLmWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(tmp_path / "state", worker)
    served.arrival(slm, job_of("silo-1", 1))
    before = summary(served)
    real = worker.arrival

    def fail(*arguments: Any) -> Arrival:
        real(*arguments)
        raise ModelError("the language model wrote nothing usable")

    monkeypatch.setattr(worker, "arrival", fail)
    with pytest.raises(ModelError):
        served.arrival(other, job_of("silo-2", 1))
    assert summary(served) == before
    monkeypatch.undo()
    served.arrival(other, job_of("silo-2", 1))
    whole = serve(tmp_path / "whole")
    whole.arrival(slm, job_of("silo-1", 1))
    whole.arrival(other, job_of("silo-2", 1))
    assert summary(served) == summary(whole)


def test_what_was_served_is_told_to_the_lanes(
    serve: Open, slm: Slm, other: Slm, worker: CrossLmWorker, tmp_path: Path
) -> None:
    served = serve(tmp_path / "state", worker)
    answers = [
        served.arrival(slm, replace(job_of("silo-1", 1), queued_behind=2, staleness=3)),
        served.arrival(other, job_of("silo-1", 2)),
    ]
    served.close()
    past = serve(tmp_path / "state").past()
    facts = [(one.row.silo, one.row.round, one.row.arrival, one.row.candidate) for one in past]
    assert facts == [("silo-1", 1, 1, True), ("silo-1", 2, 2, True)]
    assert [(one.row.queued_behind, one.row.staleness) for one in past] == [(2, 3), (0, 0)]
    assert [one.row.seconds for one in past] == [one.report["seconds"] for one in answers]
    assert [one.learned for one in past] == [True, True]
    assert past[0].candidate is None, "it is over"
    assert fingerprint(past[1].candidate or {}) == fingerprint(answers[1].candidate or {})


# --- damage


@pytest.fixture
def folder(serve: Open, slm: Slm, tmp_path: Path) -> Path:
    """The state after one arrival."""
    served = serve(tmp_path / "state")
    served.arrival(slm, job_of("silo-1", 1))
    served.close()
    return tmp_path / "state"


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damaged_files_are_refused_by_name(
    serve: Open, folder: Path, slm: Slm, worker: CrossLmWorker, tmp_path: Path
) -> None:
    """Each file in turn: a bit, its end, all of it. What a restart needs is refused before it is used."""
    state = json.loads((folder / "state.json").read_bytes())["state"]
    needed = {state["weights"], state["optimizer"], state["held"][0]["tensors"]}
    assert needed < set(state["files"])
    before = fingerprint(worker.llm.state())

    def flip(path: Path) -> None:
        _flip(path, path.stat().st_size // 2)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    number = 0
    for name in ["state.json", *(f"{one}.safetensors" for one in state["files"])]:
        for damage in (flip, cut, Path.unlink):
            if (name, damage) == ("state.json", Path.unlink):
                continue  # then it is an empty folder
            number += 1
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(folder, copy)
            damage(copy / name)
            if name == "state.json" or name.partition(".")[0] in needed:
                with pytest.raises(ProtocolError, match=name.replace(".", r"\.")):
                    serve(copy, worker)
                assert fingerprint(worker.llm.state()) == before
                assert worker.reports == []
            else:
                served = serve(copy)
                with pytest.raises(ProtocolError, match=name.replace(".", r"\.")):
                    served.arrival(slm, job_of("silo-1", 1))


def test_a_mixture_of_two_states_is_refused(serve: Open, folder: Path, other: Slm, tmp_path: Path) -> None:
    """The record of one moment with the tensors of another, as a backup that was taken meanwhile has them."""
    late = tmp_path / "late"
    shutil.copytree(folder, late)
    served = serve(late)
    served.arrival(other, job_of("silo-2", 1))
    served.close()
    shutil.copy(folder / "state.json", late / "state.json")
    with pytest.raises(ProtocolError, match="missing"):
        serve(late)
    mixed = json.loads((folder / "state.json").read_bytes())
    mixed["state"]["served"] = []
    (folder / "state.json").write_bytes(canonical_json(mixed))
    with pytest.raises(ProtocolError, match=r"state\.json: was damaged"):
        serve(folder)


def test_sizes_are_checked_before_a_file_is_read(serve: Open, folder: Path) -> None:
    state = json.loads((folder / "state.json").read_bytes())["state"]
    path = folder / f"{state['weights']}.safetensors"
    os.truncate(path, 2**40)  # takes no room on the disk; read, it would take a terabyte
    with pytest.raises(ProtocolError, match="another size"):
        serve(folder)


@pytest.mark.parametrize("changes", [{"seed": 2}, {"learning_rate": 2e-3}, {"gammas": (1.0, 0.0, 0.1)}])
def test_the_state_of_another_run_is_refused(
    serve: Open, folder: Path, tiny_encoder: Path, tiny_llm: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="belongs to another run"):
        serve(folder, make_worker(tiny_encoder, tiny_llm, **changes))


def test_a_folder_is_for_one_server_that_owns_it(serve: Open, folder: Path) -> None:
    served = serve(folder)
    with pytest.raises(UsageError, match="another server"):
        serve(folder)
    served.close()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        serve(folder)


def test_a_model_that_is_not_as_announced_does_not_come_back(
    folder: Path, tiny_encoder: Path, worker: CrossLmWorker
) -> None:
    """The server was restarted with other models in its configuration."""
    from tests import tiny

    narrow = tiny.make_encoder(folder.parent / "narrow", width=16)
    with pytest.raises(ProtocolError, match="silo-1 announced"):
        ServedWorker(worker, folder, lambda _, labels: make_model(narrow, labels))
    assert not any(np.any(array) for name, array in worker.llm.state().items() if "lora_B" in name)
