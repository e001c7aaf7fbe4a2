"""Kills a server with SIGKILL at many moments of its second arrival, and restarts it.

Run as a program by `test_crosslm_state`, in a process of its own that may fork: the models are loaded once,
then every life of the server is a child with a fresh copy of them and of the files that the first arrival
left. Nothing is replaced. Prints one JSON document: what the server that nobody killed came to, and for every
kill what was on the disk after it, and what the restarted server came to.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from securefl.crosslm_state import ServedWorker
from securefl.crosslm_terms import CrossLm
from securefl.crosslm_worker import CrossLmWorker
from securefl.lanes import Job
from securefl.models import load_slm
from securefl.release import fingerprint
from securefl.slm import Slm
from tests.crashwalk import arm, die

LABELS = ("a", "b")
# Silo, round, and how strongly the model's head is turned: three different models.
ARRIVALS = (("silo-1", 1, 40.0), ("silo-2", 1, -25.0), ("silo-1", 2, 60.0))
_MOMENTS = 1_000  # more than any arrival has


def make_model(encoder: Path, labels: tuple[str, ...], turn: float = 1.0) -> Slm:
    """A model with opinions."""
    slm = load_slm(str(encoder), labels, max_length=16, train_embeddings=False, seed=0)
    state = slm.state()
    name = next(n for n in state if n.endswith("classifier.weight"))
    slm.load_state({**state, name: turn * state[name]})
    return slm


def make_worker(encoder: Path, llm: Path, seed: int = 1, **changes: Any) -> CrossLmWorker:
    terms: dict[str, Any] = {
        "synthetic": 16,
        "max_new_tokens": 20,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "lora_rank": 2,
    }
    terms["prompt"] = "Here is a text about {label}:"
    config = CrossLm.model_validate({"llm": str(llm), **terms, **changes})
    return CrossLmWorker(config, LABELS, seed=seed, encoder=str(encoder))


def job_of(silo: str, number: int) -> Job:
    """A job whose place in the queue is no matter."""
    return Job(silo, number, 1, 0, 0, LABELS, {})


def summary(served: ServedWorker) -> dict[str, Any]:
    """All that a server has learned, but for how long it took."""
    worker = served.worker
    reports = [{k: v for k, v in report.items() if k != "seconds"} for report in worker.reports]
    return {
        "weights": fingerprint(worker.llm.state()),
        "optimizer": fingerprint(worker.llm.optimizer_state()),
        "reports": reports,
        "served": [list(one) for one in served.served],
    }


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` gives in a process of its own; None where that process was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else json.loads(said)


def main(folder: Path, encoder: Path, llm: Path, stride: int) -> None:
    torch.set_num_threads(1)
    worker = make_worker(encoder, llm)
    models = [make_model(encoder, LABELS, turn) for _, _, turn in ARRIVALS]
    progress_steps = itertools.count(1)

    def fresh(_: str, labels: tuple[str, ...]) -> Slm:
        return make_model(encoder, labels)

    def serve(where: Path, numbers: range, tell: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        served = ServedWorker(worker, where, fresh)
        answers = [served.arrival(models[i], job_of(*ARRIVALS[i][:2]), tell) for i in numbers]
        said = [None if one.candidate is None else fingerprint(one.candidate) for one in answers]
        return {**summary(served), "candidates": said, "again": [one.again for one in answers]}

    def restart(where: Path, point: str) -> dict[str, Any]:
        found = json.loads((where / "state.json").read_bytes())["state"]["served"]
        return {"point": point, "found": found, "after": in_child(lambda: serve(where, range(3)))}

    whole = in_child(lambda: serve(folder / "whole", range(3)))
    in_child(lambda: serve(folder / "first", range(1)))
    kills = []

    def learning(done: int, units: int) -> None:
        if 2 * done > units and next(progress_steps) == 1:
            die()

    def killed(where: Path, work: Callable[[], Any], point: str) -> bool:
        shutil.copytree(folder / "first", where)
        said = in_child(work)
        if said is None:
            kills.append(restart(where, point))
        shutil.rmtree(where, ignore_errors=True)
        return said is None

    where = folder / "learning"
    assert killed(where, lambda: serve(where, range(1, 2), learning), "while it learns")
    where = folder / "answered"

    def answered() -> None:
        serve(where, range(1, 2))
        die()

    assert killed(where, answered, "before the answer leaves")
    for moment in range(1, _MOMENTS, stride):
        where = folder / f"moment-{moment}"

        def dying(where: Path = where, moment: int = moment) -> Any:
            arm(moment)
            return serve(where, range(1, 2))

        if not killed(where, dying, f"moment {moment}"):
            break
    sys.stdout.write(json.dumps({"whole": whole, "kills": kills}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
