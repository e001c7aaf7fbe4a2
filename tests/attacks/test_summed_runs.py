"""The audit of runs whose models were only ever summed, and of those trained by DP-SGD."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks.audit import audit
from securefl.data import load_corpus
from securefl.simulation import Simulation
from tests.federation import tiny_config
from tests.test_report import check


@pytest.mark.parametrize("protection", ["masked", "ckks"])
def test_centroids_of_a_summed_run_are_attacked(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, protection: str
) -> None:
    config = tiny_config(
        tiny_encoder, tiny_data, federation={"method": "fedkc"}, protection={"models": protection}
    )
    Simulation(config, load_corpus(config), tmp_path / "run").run()
    found = audit(tmp_path / "run")
    assert {one.kind for one in found.releases} == {"centroids", "metrics"}, "nobody read a model"
    assert any(one.attack.startswith("membership") for one in found.findings)
    assert not found.weights_claimed
    # What anybody has of the weights is the average, or nothing that the server could open.
    averages = [f for f in found.findings if f.number == 12]
    assert {f.silo for f in averages} <= {"server"}
    assert averages or any("membership in a trained model" in one.attack for one in found.not_run)


@pytest.mark.parametrize("protection", ["masked", "sealed"])
def test_a_run_by_dp_sgd_is_audited_with_its_row_counts_hidden(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, protection: str
) -> None:
    """Its weights are under a claim, so nobody is told that they are the larger leak; the centroids are
    attacked as ever, and the report names every claim.
    """
    config = tiny_config(
        tiny_encoder,
        tiny_data,
        federation={"method": "fedkc"},
        protection={"models": protection},
        privacy={
            "dp_sgd": {"epsilon": 6.0, "delta": 1e-3, "sample_rate": 0.25},
            "centroids": {"epsilon": 4.0, "delta": 1e-3, "min_size": 1},
            "metrics": {"epsilon": 1.0, "delta": 1e-3},
        },
    )
    result = Simulation(config, load_corpus(config), tmp_path / "run").run()
    assert all(one.rows is None for one in result.sums)
    found = audit(tmp_path / "run", tmp_path / "out")
    claims = {release.kind: release.claim["mechanism"] for release in found.releases}
    models = {"model": "dp-sgd"} if protection == "sealed" else {}
    assert claims == {**models, "centroids": "gaussian-sums", "metrics": "gaussian-counts"}
    assert any(one.attack.startswith("membership") and one.cap is not None for one in found.findings)
    assert found.weights_claimed
    text = check(tmp_path / "out" / "report.html").text
    assert "larger leak" not in text
    assert ("training by DP-SGD, for one row, there or not" in text) == (protection == "sealed")
    assert "noised scores, for one row, there or not" in text
