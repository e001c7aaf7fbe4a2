"""What a configuration's private releases will claim, and what they will be worth, before anything is run.

Reads a configuration and at most a model's config.json; loads no weights, asks no hub and looks at no rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from securefl.agreement import metric_releases
from securefl.centroid_privacy import CENTROID_LENGTH, calibrate_centroids, useful_size
from securefl.config import Config
from securefl.dp_terms import run_claim, training_mechanism
from securefl.errors import ModelError
from securefl.privacy import gaussian_epsilon, noise_source
from securefl.release import ROW
from securefl.simulated_policy import exact_kinds, metric_mechanism, planned_account, refuse_total


def private_outlook(config: Config) -> dict[str, Any]:
    """What the private releases of a silo will add up to in the whole run, and the noise of its trainings.

    `epsilon` is None where nothing is private, and `note` names what leaves without a claim. Raises
    ConfigError or BudgetExceeded where the budget has no meaning or is above the configuration's ceiling.
    """
    account = planned_account(config)
    training = training_mechanism(config, config.slm.epochs)
    refuse_total(config)
    found: dict[str, Any] = {
        "epsilon": account.private_epsilon,
        "delta": account.delta,
        "unit": config.data.unit_name,
    }
    if training is not None:
        whole = run_claim(config, config.federation.rounds, noise_source(config.federation.seed))
        assert whole is not None
        found["dp_sgd"] = {
            "epsilon": whole.epsilon,
            "noise_multiplier": training.noise_multiplier,
            "clip": training.clip,
            "head_share": training.head_share,
            "sample_rate": training.sample_rate,
            "steps_in_round_1": training.steps,
            "steps": whole.steps,
        }
    metrics = metric_mechanism(config)
    if metrics is not None:
        releases = metric_releases(config)
        found["metrics"] = {
            "releases": releases,
            "epsilon_each": gaussian_epsilon(metrics.mu, metrics.delta),
            "epsilon_all_releases": gaussian_epsilon(metrics.mu * math.sqrt(releases), metrics.delta),
            "noise_multiplier": metrics.noise_multiplier,
            "note": "noise on the number of right answers, in units: among n validation units an accuracy is "
            "off by about the noise multiplier / n",
        }
    if config.federation.method != "standalone":
        exact = [kind.value for kind in exact_kinds(config)]
        if exact:
            found["note"] = f"besides, these leave without a claim, so no total is finite: {', '.join(exact)}"
        if config.sends_gradients:
            found["note"] += ". The texts of a batch can be read back from its gradient"
    return found


def centroid_outlook(config: Config) -> dict[str, Any]:
    """Figures of each centroid release of a run, and from which size on a cluster's centroid is of use.

    epsilon_each, mu: of one release; `useful_size`: see `centroid_privacy.useful_size`, in units, and left
    out with `dimension` where the model's width is not known here. Without noise there is a note only:
    nothing is claimed.
    """
    terms, releases, unit = config.privacy.centroids, config.federation.rounds - 1, config.data.unit_name
    whose = "rows" if unit == ROW else f"values of {unit}"
    if not terms.noised:
        note = (
            "nothing is claimed (NonPrivate): exact means of k-means clusters, and a minimum of "
            f"{terms.min_size} {whose} in each is not differential privacy; set privacy.centroids.epsilon "
            "for that"
        )
        return {"releases": releases, "note": note}
    one = calibrate_centroids(terms, 1.0, releases, unit=unit, adjacency=config.privacy.adjacency)
    found = {
        "releases": releases,
        "unit": unit,
        "adjacency": one.adjacency,
        "epsilon_each": gaussian_epsilon(one.mu, one.delta),
        "epsilon_all_releases": gaussian_epsilon(one.mu * math.sqrt(releases), one.delta),
        "delta": one.delta,
        "mu": one.mu,
        "noise_multiplier": one.noise_multiplier,
        "count_multiplier": one.count_multiplier,
        "prediction_multiplier": one.prediction_multiplier,
    }
    dimension = centroid_dimension(config)
    if dimension is None:
        note = "which size of a cluster is of use is not known here: slm.models names no local model"
        return {**found, "note": note}
    size = useful_size(one, dimension)
    now = "is below it" if terms.min_size < size else "is not below it"
    note = (
        f"a min_size below {size} {whose} gives centroids drowned in noise (more than half of their length, "
        f"taken to be {CENTROID_LENGTH:g} of the clip: rows differ, so their mean is shorter than they are); "
        f"privacy.centroids.min_size = {terms.min_size} {now}. What clipping takes is not counted"
    )
    return {**found, "dimension": dimension, "useful_size": size, "note": note}


def centroid_dimension(config: Config) -> int | None:
    """Numbers in a centroid by the model's config.json; None where that is not at hand or states no width."""
    from securefl._model_files import config_of, resolve  # slow to load

    name = config.slm.models[0]
    try:
        if not name.startswith("builtin:") and not Path(name).expanduser().is_dir():
            return None  # of the hub, which may be asked for it when the model is needed
        stated = config_of(resolve(name), name)
    except (ModelError, OSError, RuntimeError):
        return None
    # As BERT and its kin, DistilBERT and GPT-2 call it.
    widths = [stated[key] for key in ("hidden_size", "dim", "n_embd") if type(stated.get(key)) is int]
    if not widths or widths[0] < 1:
        return None
    return int(widths[0]) * (config.slm.max_length if config.fedkc.layer is not None else 1)
