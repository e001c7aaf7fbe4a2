"""The noise of every kind of release, taken from real releases: its size, its shape, and its independence.

All thresholds are six standard errors of a normal statistic (a false alarm in 5 * 10^8 checks), and the noise
is the operating system's, so each run looks at other numbers.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import kurtosis

from securefl import dp_sgd
from securefl.centroid_privacy import CentroidMechanism, noisy_sums
from securefl.config import Lora
from securefl.data import Rows
from securefl.dp_sgd import fit_private
from securefl.dp_terms import Mechanism
from securefl.gaussian import add_gaussian
from securefl.models import load_slm
from securefl.privacy import LocalResult, MetricMechanism, Noise, noise_source, release_counts

Array = NDArray[np.float64]
SIX = 6.0


def _training(folder: Path, noise: Noise, steps: int = 40) -> tuple[Array, float]:
    """(steps, d): what is added to each step's sum of a training, and the deviation that is claimed."""
    slm = load_slm(str(folder), ("a", "b"), max_length=8, train_embeddings=False, seed=0, lora=Lora(r=1))
    found: list[Array] = []

    def record(values: torch.Tensor, deviation: float, key: bytes) -> None:
        before = values.double().numpy().copy()
        add_gaussian(values, deviation, key)
        found.append(values.double().numpy() - before)

    mechanism = Mechanism(
        noise_multiplier=1.5,
        sample_rate=0.5,
        clip=0.7,
        head_share=0.5,
        steps=steps,
        delta=1e-3,
        unit="row",
        per_unit=1,
        expected_batch=2.0,
    )
    rows = Rows(("1", "2"), ("a", "the"), np.array([0, 1]))
    with patch.object(dp_sgd, "add_gaussian", record):
        claim = fit_private(
            slm, rows, mechanism, noise, learning_rate=1e-4, head_learning_rate=1e-4, physical_batch=4
        )
    return np.array(found), claim.noise_multiplier * claim.clip


def _centroids(noise: Noise, releases: int = 40) -> tuple[Array, float]:
    """(releases, q d): noisy sums of no rows, which are noise, and the claimed deviation."""
    mechanism = CentroidMechanism(
        clip=2.0,
        noise_multiplier=1.3,
        count_multiplier=3.0,
        prediction_multiplier=3.0,
        delta=1e-5,
        min_size=1,
    )
    nothing = LocalResult({"vectors": np.zeros((0, 32)), "predictions": np.zeros((0, 2))}, 0)
    found = [
        noisy_sums(nothing, np.zeros(0, np.int64), 64, mechanism, noise).sums.ravel() for _ in range(releases)
    ]
    return np.array(found), 2.0 * 1.3


def _figures(noise: Noise, releases: int = 3000) -> tuple[Array, float]:
    """(releases, 1): noisy numbers of rows, where there are 1,000."""
    mechanism = MetricMechanism(noise_multiplier=4.0, delta=1e-5)
    counts = [
        release_counts(np.ones(1000), (), mechanism, noise, {}).info["metrics"]["validation_rows"] - 1000
        for _ in range(releases)
    ]
    return np.array(counts)[:, None], 4.0 * math.sqrt(2)


@pytest.fixture(params=["training", "centroids", "figures"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _noise_of(kind: str, folder: Path, noise: Noise) -> tuple[Array, float]:
    if kind == "training":
        return _training(folder, noise)
    return _centroids(noise) if kind == "centroids" else _figures(noise)


def test_variance_and_kurtosis(kind: str, tiny_encoder: Path) -> None:
    """Of a normal distribution with the deviation that the claim states, neither less nor more."""
    noise, deviation = _noise_of(kind, tiny_encoder, noise_source(None))
    values = noise.ravel() / deviation
    size = len(values)
    assert size >= 3000
    assert abs(values.mean()) < SIX / math.sqrt(size)
    assert abs(values.var() - 1) < SIX * math.sqrt(2 / size)
    assert abs(kurtosis(values)) < SIX * math.sqrt(24 / size)


def test_coordinates_and_rounds_are_independent(kind: str, tiny_encoder: Path) -> None:
    """Neighbouring coordinates of one release, the same coordinate of two releases, and the first release
    against all others: no correlation of the numbers.
    """
    noise, deviation = _noise_of(kind, tiny_encoder, noise_source(None))
    noise = noise / deviation
    pairs = {
        "rounds": (noise[:-1], noise[1:]),
        "first": (np.broadcast_to(noise[:1], noise[1:].shape), noise[1:]),
    }
    if noise.shape[1] > 1:
        pairs["coordinates"] = (noise[:, :-1], noise[:, 1:])
    if kind == "figures":
        del pairs["first"]  # of one number each
    for name, (one, two) in pairs.items():
        product = (one * two).mean()
        assert abs(product) < SIX * float(np.sqrt((one**2).mean() / one.size)), name


def _fork(queue: Any, noise: Noise) -> None:
    queue.put(_centroids(noise, 2)[0])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_fork_draw_different_noise() -> None:
    """A source made before the fork is shared by parent and children; what they draw is not."""
    noise = noise_source(None)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_fork, args=(queue, noise)) for _ in range(2)]
    for child in children:
        child.start()
    drawn = [queue.get(timeout=60) for _ in children] + [_centroids(noise, 2)[0]]
    for child in children:
        child.join()
    for one in range(3):
        for two in range(one):
            values = drawn[one] * drawn[two] / (2.0 * 1.3) ** 2
            assert abs(values.mean()) < SIX / math.sqrt(values.size)


def test_processes_that_start_alike_draw_different_noise() -> None:
    """The same program twice, with the same hash seed: nothing of its state decides the noise."""
    code = "from securefl.privacy import noise_source; print(noise_source(None).draw().bytes(32).hex())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        ).stdout
        for _ in range(2)
    }
    assert len(said) == 2


def test_a_retry_sends_the_same_bytes_and_a_second_training_other_noise(tiny_encoder: Path) -> None:
    """Two trainings on the same rows share no noise, so their difference hides the rows as each does."""
    one, deviation = _training(tiny_encoder, noise_source(None), 2)
    two, _ = _training(tiny_encoder, noise_source(None), 2)
    values = (one * two / deviation**2).ravel()
    assert abs(values.mean()) < SIX / math.sqrt(values.size)
