"""What `securefl inspect` says of a configuration's centroids before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from securefl.centroid_privacy import CentroidMechanism, centroid_error
from securefl.config import Config, parse_config
from securefl.errors import ConfigError
from securefl.inspection import inspect_path
from securefl.outlook import centroid_dimension, centroid_outlook
from securefl.privacy import gaussian_epsilon


def configuration(model: str, compose: str = "pooled", unit: str | None = None, **privacy: Any) -> Config:
    return parse_config(
        {
            "federation": {"method": "fedkc", "rounds": 4},
            "data": {"train": "a.csv", "test": "b.csv", **({} if unit is None else {"unit": unit})},
            "slm": {"models": [model], "max_length": 16},
            "fedkc": {"compose": compose},
            "privacy": privacy,
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of which nothing but its config.json can be read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distilbert", "dim": 24}))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    return tmp_path


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("compose", "dimension"), [("pooled", 24), ("embeddings", 24 * 16)])
def test_a_noised_configuration_tells_its_claim_and_the_useful_size(
    folder: Path, compose: str, dimension: int, adjacency: str
) -> None:
    terms = {"epsilon": 6.0, "min_size": 5}
    config = configuration(str(folder), compose, "patient_id", centroids=terms, adjacency=adjacency)
    found = centroid_outlook(config)
    assert (found["releases"], found["unit"], found["adjacency"]) == (3, "patient_id", adjacency)
    assert found["epsilon_all_releases"] == pytest.approx(6.0, abs=1e-6)
    assert gaussian_epsilon(found["mu"] * 3**0.5, found["delta"]) == pytest.approx(6.0, abs=1e-6)
    assert found["epsilon_each"] == pytest.approx(gaussian_epsilon(found["mu"], found["delta"]))
    assert found["dimension"] == dimension
    mechanism = CentroidMechanism(
        1.0,
        found["noise_multiplier"],
        found["count_multiplier"],
        found["prediction_multiplier"],
        found["delta"],
        5,
    )
    size = found["useful_size"]
    errors = [centroid_error(mechanism, dimension, units) for units in (size, size - 1)]
    assert errors[0] <= 0.125 < errors[1], "half of a quarter of the clip"
    assert f"below {size} values of patient_id gives centroids drowned in noise" in found["note"]
    assert "min_size = 5 is below it" in found["note"]


def test_a_large_enough_minimum_is_not_called_too_small(folder: Path) -> None:
    config = configuration(str(folder), centroids={"noise_multiplier": 0.5, "min_size": 400})
    assert "is not below it" in centroid_outlook(config)["note"]


def test_without_noise_nothing_is_claimed(folder: Path) -> None:
    found = centroid_outlook(configuration(str(folder), centroids={"min_size": 9}))
    assert set(found) == {"releases", "note"}
    assert "nothing is claimed (NonPrivate)" in found["note"]
    assert "a minimum of 9 rows in each is not differential privacy" in found["note"]


@pytest.mark.parametrize("model", ["no-such-org/no-such-model", "builtin:nothing"])
def test_a_model_that_is_not_here_leaves_the_size_open(model: str) -> None:
    config = configuration(model, centroids={"epsilon": 2.0})
    assert centroid_dimension(config) is None
    found = centroid_outlook(config)
    assert "useful_size" not in found
    assert "slm.models names no local model" in found["note"]


def test_inspect_shows_it_for_fedkc_alone(tmp_path: Path, folder: Path) -> None:
    text = (
        '[federation]\nmethod = "{}"\n[data]\ntrain = "a.csv"\ntest = "b.csv"\n'
        f'[slm]\nmodels = ["{folder}"]\n[privacy]\ncentroids = {{{{ epsilon = 2.0 }}}}\n'
    )
    file = tmp_path / "run.toml"
    file.write_text(text.format("fedkc"))
    assert inspect_path(file)["centroids"]["dimension"] == 24
    file.write_text(text.format("fedavg"))
    with pytest.raises(ConfigError, match="fedavg shares no centroids"):
        inspect_path(file)


def test_inspect_tells_every_part_of_the_account(tmp_path: Path, folder: Path) -> None:
    """The three parts compose to the total by the accountants' own functions; what is exact is named."""
    file = tmp_path / "run.toml"
    start = (
        '[federation]\nmethod = "fedkc"\nrounds = 3\n[data]\ntrain = "a.csv"\ntest = "b.csv"\n'
        f'[slm]\nmodels = ["{folder}"]\nepochs = 2\nround_epochs = 1\n[privacy]\n'
    )
    file.write_text(
        start + "dp_sgd = { epsilon = 8 }\ncentroids = { epsilon = 4 }\nmetrics = { epsilon = 1 }\n"
    )
    found = inspect_path(file)
    parts = found["account"]
    assert parts["dp_sgd"]["epsilon"] == pytest.approx(8, abs=0.1)
    assert (parts["dp_sgd"]["steps_in_round_1"], parts["dp_sgd"]["steps"]) == (32, 64)
    assert parts["metrics"]["epsilon_all_releases"] == pytest.approx(1, abs=1e-6)
    assert parts["metrics"]["noise_multiplier"] > 1
    assert max(8, 4) < parts["epsilon"] < 8.1 + 4 + 1
    assert "note" not in parts
    assert "no row was looked at" in found["not_checked"]
    file.write_text(start + "centroids = { min_size = 4 }\n")
    parts = inspect_path(file)["account"]
    assert parts["epsilon"] is None
    assert "no total is finite: model, metrics, centroids" in parts["note"]


def test_a_budget_for_centroids_that_never_leave_is_refused(folder: Path) -> None:
    whole = configuration(str(folder), centroids={"epsilon": 2.0}).model_dump()
    whole["federation"]["rounds"] = 1
    with pytest.raises(ConfigError, match="one round shares none"):
        parse_config(whole)
