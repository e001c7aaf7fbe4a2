"""The study of inversions: its scores by hand, and a tiny one that is stopped, goes on and grows."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests import tiny

PATH = Path(__file__).resolve().parent.parent / "examples" / "inversion_study.py"
WORDS = tiny.WORDS[:50]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inversion_study", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["inversion_study"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ids(*content: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([0, *content, 1])


def test_scores_by_hand(study: ModuleType) -> None:
    group = study.Group
    scorer = study.Scorer(
        truth=group([ids(5, 6, 7), ids(2)], ["five six seven", "two"]),
        others=[group([ids(8, 9)], ["eight nine"]), group([ids(3)], ["three"])],
        random=group([ids(5), ids(9)], ["five", "nine"]),
        frequent=np.array([7, 8, 9, 5, 6]),
        special=frozenset({0, 1}),
    )
    found = scorer.scores(ids(5, 6, 8, 9), "five six eight nine")
    # Two of four tokens are in a row of three, and the same two words are the longest common subsequence.
    assert found == pytest.approx(
        {
            **{"f1": 4 / 7, "random": (2 / 4 + 0) / 2, "frequent": 4 / 7, "control": (4 / 6 + 0) / 2},
            **{"rouge": 4 / 7, "rouge_random": (2 / 4 + 0) / 2, "rouge_control": (4 / 6 + 0) / 2},
        }
    )
    # The better-matching row counts, whichever it is.
    assert scorer.scores(ids(2, 9), "two nine")["f1"] == pytest.approx(2 / 3)
    assert scorer.scores(ids(), "")["f1"] == 0


def test_intervals_are_over_targets(study: ModuleType) -> None:
    # Of two targets a resample's mean is 0, 1/2 or 1, the ends with probability 1/4 each.
    assert study.mean_interval([0.0, 1.0]) == (0.5, 0.0, 1.0)
    many = np.random.default_rng(0).normal(0.5, 0.1, 400)
    mean, low, high = study.mean_interval(many)
    assert [low, high] == pytest.approx([mean - 0.0098, mean + 0.0098], abs=0.002)
    # Each target twice its floor: what varies between targets cancels, as it would not if drawn apart.
    floor = [0.1, 0.2, 0.4, 0.05]
    assert study.ratio_interval([2 * one for one in floor], floor) == pytest.approx((2, 2, 2))
    with pytest.raises(study.argparse.ArgumentTypeError):
        study.attacks_of("9,11")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny study: an encoder of 50 words, 260 texts of them, and little effort."""
    folder, rng = tmp_path_factory.mktemp("study"), np.random.default_rng(0)
    for name, count in (("train", 220), ("test", 40)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = [
                (" ".join(rng.choice(WORDS, int(rng.integers(4, 8)), False)), "ab"[i % 2])
                for i in range(count)
            ]
            csv.writer(file).writerows([("text", "label"), *rows])
    encoder = tiny.make_encoder(folder / "encoder", width=48, vocabulary=WORDS)
    llm = tiny.make_llm(folder / "llm")
    sources = ("--train", str(folder / "train.csv"), "--test", str(folder / "test.csv"))
    models = ("--model", str(encoder), "--language-model", str(llm))
    return [
        *sources,
        *models,
        "--auxiliary",
        "200",
        "--budget",
        "300",
        "--steps",
        "20",
        "--seeds",
        "1",
        "--json",
    ]


def run(study: ModuleType, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    study.main(arguments)
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_a_study_reads_texts_and_goes_on_where_it_was_stopped(
    study: ModuleType,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [*arguments, "--out", str(tmp_path), "--attacks", "9,10"]
    first, said = run(study, [*both, "--targets", "3"], capsys)
    assert said.count("\n") == len(first["rows"]) == 6
    for line in first["summary"]:
        assert (line["targets"], line["seeds"]) == (3, 1)
        assert line["f1"][0] > line["random"][0] + 0.2
        assert line["f1"][0] > line["control"][0] + 0.2
        assert line["ratio"][0] == pytest.approx(line["f1"][0] / line["random"][0])
        assert line["cosine"][0] > 0.8
    # Of one row the proposition promises nothing: its scatter is 0.
    said_of = first["summary"][0]["proposition_3"]
    assert (said_of["vacuous"], said_of["broken"]) == (3, 0)
    assert said_of["largest_bound"] < 0 < said_of["least_distance"]

    # Stopped in the middle: what is left comes out as it would have.
    place = tmp_path / "rows.json"
    kept = json.loads(place.read_text())
    kept["rows"] = [row for row in kept["rows"] if row["target"] != 1]
    place.write_text(json.dumps(kept))
    again, said = run(study, [*both, "--targets", "3"], capsys)
    assert said.count("\n") == 2
    assert timeless(again["rows"]) == timeless(first["rows"])

    # More targets move none of those there are.
    more, said = run(study, [*both[:-1], "10", "--targets", "4"], capsys)
    assert said.count("\n") == 1
    assert more["rows"][:3] == [row for row in again["rows"] if row["attack"] == "10"]

    # With nothing left nothing is even loaded.
    monkeypatch.setattr(study, "load_slm", None)
    full, said = run(study, [*both, "--targets", "3"], capsys)
    assert (full, said) == (again, "")
    study.main([one for one in both if one != "--json"] + ["--targets", "3"])
    assert "vacuous for 3 of 3 targets, as it is of any one row" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other settings"):
        study.main([*both, "--steps", "21"])


def test_a_language_model_writes_and_without_one_it_is_said(
    study: ModuleType, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [*arguments, "--attacks", "zero-shot", "--targets", "2", "--rows-each", "2"]
    found, _ = run(study, [*alone, "--out", str(tmp_path / "with")], capsys)
    (line,) = found["summary"]
    assert line["targets"] == 2
    assert -1 <= line["cosine"][0] <= 1
    without = [*alone, "--out", str(tmp_path / "without"), "--language-model", str(tmp_path / "none")]
    found, _ = run(study, without, capsys)
    assert (found["rows"], found["summary"]) == ([], [])
    assert "needs a language model" in found["notes"][0]
