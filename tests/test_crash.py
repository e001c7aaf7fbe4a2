"""Kill -9 at every step of an answer: nothing is charged twice, lost, or answered in two ways.

`crashwalk` does the killing; what must hold afterwards is said here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from securefl.privacy import gaussian_mu

REPOSITORY = Path(__file__).resolve().parent.parent


def _walk(case: str, tiny_encoder: Path, tiny_data: Path, folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crashwalk", case, tiny_encoder, tiny_data, folder / "walk"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    points: list[dict[str, Any]] = json.loads(done.stdout)
    # The walk ends with the run that nothing killed, and every moment before it was a kill.
    assert [point["killed"] for point in points] == [True] * (len(points) - 1) + [False]
    return points


def _check_one_answer(points: list[dict[str, Any]]) -> None:
    """Charged at most once, before it was sent; what was charged or sent is what is answered ever after."""
    for point in points:
        assert len(point["charged"]) <= 1, point
        if point["sent"] is not None:
            assert point["charged"] == [point["sent"]], point
        if point["charged"]:
            assert point["charged"] == [point["reply"]], point
            assert point["draws"] == 0, "fresh noise was drawn for a release that was charged before"
        assert point["again"] == point["reply"], point
        assert point["files"].count(".answer") <= 2, "old answers pile up"
    # The walk has seen every stage: uncharged, charged and not sent, sent.
    assert {(bool(p["charged"]), bool(p["sent"])) for p in points} == {
        (False, False),
        (True, False),
        (True, True),
    }


def test_a_release_with_noise(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    points = _walk("noisy share", tiny_encoder, tiny_data, tmp_path)
    _check_one_answer(points)
    for point in points:
        assert point["releases"] == 2, "the model of round 1 and the centroids of round 2"
        # The one centroid release of a run of two rounds has the whole budget, once.
        assert math.isclose(point["mu"], gaussian_mu(4.0, 1e-5), rel_tol=1e-6)
        assert point["draws"] == (0 if point["charged"] else 3), "sums, counts and predictions, once"


def test_a_model_and_the_plan_after_it(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    points = _walk("plain", tiny_encoder, tiny_data, tmp_path)
    _check_one_answer(points)
    for point in points:
        assert point["releases"] == 2
        assert point["later"] > point["sequence"], "a server would refuse it as a replay"


def test_a_model_that_no_plan_brings_again(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    points = _walk("own model", tiny_encoder, tiny_data, tmp_path)
    _check_one_answer(points)
    # The restarted silo goes on from its own trained model, neither from the checkpoint nor trained twice.
    assert {point["model"] for point in points} == {points[-1]["model"]}
    assert points[-1]["model"] != points[-1]["start"]


def test_a_masked_model(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """The masks die with the process: what was charged goes out again, else the silo sits the round out."""
    points = _walk("masked model", tiny_encoder, tiny_data, tmp_path)
    _check_one_answer(points)
    for point in points:
        # The advert and the shares, and then the masked model or the refusal: never two masked models.
        due = (3, 0) if point["charged"] else (2, 1)
        assert (point["releases"], point["refusals"]) == due


def test_a_refusal(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    points = _walk("refusal", tiny_encoder, tiny_data, tmp_path)
    _check_one_answer(points)
    assert {(point["releases"], point["refusals"]) for point in points} == {(0, 1)}


def test_a_plan_that_waits(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    points = _walk("waiting", tiny_encoder, tiny_data, tmp_path)
    for point in points:
        assert (point["releases"], point["refusals"], point["sent"]) == (0, 0, None)
        assert point["files"] == ["", ".plan"], "the lock and the one plan, whole"


def test_the_walk_sees_a_planted_fault(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """A client that charges an answer which it has not kept cannot send the same bytes again."""
    with pytest.raises(AssertionError, match="a child failed"):
        _walk("forgetful", tiny_encoder, tiny_data, tmp_path)
