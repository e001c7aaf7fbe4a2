"""Attack 12 on whole runs: an overfit model tells its rows, a noised one no more than its claim allows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attacks import bench
from attacks.audit import audit
from attacks.evidence import Evidence
from attacks.figures import Figure
from attacks.judgement import Book
from attacks.model_membership import trade_off
from attacks.runs import Run, pooled_vectors
from securefl.config import parse_config
from securefl.data import load_corpus
from securefl.release import CLAIM, DpSgd
from securefl.simulation import Simulation
from securefl.slm import Slm
from tests import tiny


def run_of(folder: Path, **sections: dict[str, object]) -> Run:
    encoder = tiny.make_encoder(folder / "encoder", width=32)
    # Labels that are noise can only be learned by heart.
    noise = np.random.default_rng(0)
    for name, rows in (("train.csv", 800), ("test.csv", 60)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows((text, "ab"[noise.integers(2)]) for text, _ in tiny.make_texts(rows, seed=rows))
    document: dict[str, dict[str, object]] = {
        "federation": {"method": "fedavg", "rounds": 2},
        "data": {
            "train": str(folder / "train.csv"), "test": str(folder / "test.csv"), "train_rows": 160,
            "pool_rows": 400, "split": {"by": "dirichlet", "silos": 2, "alpha": 100.0},
        },
        "slm": {"models": [str(encoder)], "max_length": 12, "epochs": 30, "round_epochs": 30,
                "learning_rate": 0.003},
        "protection": {"models": "sealed"},
    }  # fmt: skip
    for name, fields in sections.items():
        document.setdefault(name, {}).update(fields)
    config = parse_config(document)
    Simulation(config, load_corpus(config), folder / "run").run()
    return Run(folder / "run")


def attacked(run: Run) -> tuple[list[Figure], Book]:
    book = Book()
    evidence = Evidence(run)
    assert bench.models.ATTACK.missing(evidence) is None
    bench.models.ATTACK.run(evidence, book, lambda *_: None)
    return book.figures, book


@pytest.fixture(scope="module")
def overfit(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("overfit"))


def test_an_overfit_model_tells_its_rows_and_the_first_model_does_not(overfit: Run) -> None:
    figures, _ = attacked(overfit)
    areas = {(f.silo, f.attack.rpartition(", ")[2]): f for f in figures if f.metric == "auc"}
    assert {silo for silo, _ in areas} == {"silo-1", "silo-2", "server"}
    for silo in ("silo-1", "silo-2"):
        best = max(f.measure.value for (name, _), f in areas.items() if name == silo)
        assert best > 0.8
        blind = [f.control for (name, _), f in areas.items() if name == silo]
        assert all(value is not None and 0.35 < value < 0.65 for value in blind)
    assert all(f.cap is None and "no differential privacy" in str(f.cap_reason) for f in figures)
    assert {f.metric for f in figures} == {"auc", "tpr_at_0.1_percent_fpr"}


def test_of_a_large_pool_a_part_is_embedded(overfit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each model once, and by the one that the run began with once in all; the rows are still found."""
    asked: list[list[str]] = []

    def counted(slm: Slm, texts: Sequence[str]) -> NDArray[np.float32]:
        asked.append(list(texts))
        return pooled_vectors(slm, texts)

    monkeypatch.setattr(bench.models, "pooled_vectors", counted)
    monkeypatch.setattr(bench.models, "_MOST_AUXILIARY", 100)
    figures, _ = attacked(overfit)
    auxiliary = set(Evidence(overfit).halves[0].texts)
    assert len(auxiliary) > 150
    assert {len(auxiliary & set(texts)) for texts in asked} == {0, 100}
    assert sum(len(auxiliary & set(texts)) for texts in asked) == 4 * 100
    assert max(f.measure.value for f in figures if f.metric == "auc" and f.silo == "silo-1") > 0.8


def test_dp_sgd_has_the_cap_of_all_its_rounds(tmp_path: Path) -> None:
    private = {"dp_sgd": {"epsilon": 8.0, "delta": 1e-3}}
    run = run_of(tmp_path, privacy=private, slm={"epochs": 2, "round_epochs": 2})
    figures, _ = attacked(run)
    claims = [
        CLAIM.validate_python(row.claim) for row in run.result.clients[0].releases if row.kind == "model"
    ]
    assert len(claims) == 2
    allowed = trade_off([claim for claim in claims if isinstance(claim, DpSgd)]).auc()
    for f in figures:
        assert f.verdict(0.05) != "violates_claim"
        assert f.cap is not None
        if f.metric == "auc":
            assert f.cap == pytest.approx(allowed, abs=0.02)
            assert f.cap_curve[0][1] <= f.cap_curve[-1][1] == 1.0


def test_a_silos_exact_centroids_take_the_cap_away(tmp_path: Path) -> None:
    private = {"dp_sgd": {"epsilon": 8.0, "delta": 1e-3}}
    run = run_of(
        tmp_path, federation={"method": "fedkc"}, privacy=private, slm={"epochs": 1, "round_epochs": 1}
    )
    figures, _ = attacked(run)
    assert all(f.cap is None for f in figures)
    assert {str(f.cap_reason) for f in figures if f.round == 2} == {
        "others trained on the silo's centroids too, which the claim of a model leaves out"
    }


def test_masked_models_leave_only_the_average(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        protection={"models": "masked"},
        data={"split": {"by": "dirichlet", "silos": 3, "alpha": 100.0}},
    )
    figures, _ = attacked(run)
    assert {f.silo for f in figures} == {"server"}
    found = audit(run.path, attacks=frozenset({12}))
    assert {f.number for f in found.findings} == {12}
    assert any(entry.why == "it was not asked for" for entry in found.not_run)
