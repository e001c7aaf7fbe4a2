"""The audit of runs whose models were only ever summed: it finds what the centroids were made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks.audit import audit
from securefl.data import load_corpus
from securefl.simulation import Simulation
from tests.federation import tiny_config


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
    assert "subtraction from an aggregate (7)" in {one.attack for one in found.not_run}
