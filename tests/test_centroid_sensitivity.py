"""What one unit changes in noised sums, counts and predictions: brute force, and replay of recorded noise.

Every figure comes from the real `noisy_sums`: with no noise for the search of the worst neighbours, with the
same noise for both of a pair in the replay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from securefl import centroid_privacy
from securefl.centroid_privacy import CentroidMechanism, NoisySums, noisy_sums
from securefl.data import Rows
from securefl.local import CentroidJob, release_centroids
from securefl.messages import FedKcTerms
from securefl.models import load_slm
from securefl.privacy import LocalResult, Noise
from securefl.privacy_terms import CentroidPrivacy
from securefl.release import Adjacency, GaussianSums

Array = NDArray[np.float64]
Multipliers = tuple[float, float, float]
CLIP, WIDTH, LABELS, CLUSTERS = 3.0, 2, 2, 3
ADJACENCIES: tuple[Adjacency, ...] = ("add-remove", "replace-one")
# Multipliers of sums, counts and predictions. Under replace-one the worst pair of the first is in one
# cluster, that of the second in two, and under the third both are as bad.
MULTIPLIERS: tuple[Multipliers, ...] = ((0.9, 1.7, 2.2), (2.0, 0.8, 1.5), (1.3, 1.3, 1.0))


class _Zeros:
    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> Array:
        return np.zeros(size)


NONE = Noise(_Zeros, "none", True)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """vector: (d,) before clipping; cluster: of the row alone, since seeds are public; prediction: (C,)."""

    vector: Sequence[float]
    cluster: int
    prediction: Sequence[float]


Unit = tuple[Row, ...]


def mechanism_of(multipliers: Multipliers, adjacency: Adjacency, by_unit: bool) -> CentroidMechanism:
    unit = "patient_id" if by_unit else "row"
    return CentroidMechanism(CLIP, *multipliers, 1e-5, 1, unit, adjacency)


def noised(units: Sequence[Unit], mechanism: CentroidMechanism, noise: Noise) -> NoisySums:
    rows = [row for unit in units for row in unit]
    names = [f"unit {number}" for number, unit in enumerate(units) for _ in unit]
    local = LocalResult(
        {
            "vectors": np.array([row.vector for row in rows], float).reshape(-1, WIDTH),
            "predictions": np.array([row.prediction for row in rows], float).reshape(-1, LABELS),
        },
        len(rows),
    )
    assignment = np.array([row.cluster for row in rows], np.int64)
    by_unit = mechanism.unit != "row"
    return noisy_sums(local, assignment, CLUSTERS, mechanism, noise, names if by_unit else ())


def scaled(units: Sequence[Unit], mechanism: CentroidMechanism, noise: Noise = NONE) -> Array:
    """All numbers of the release, each over the standard deviation of its noise."""
    found = noised(units, mechanism, noise)
    return np.concatenate(
        [
            found.sums.ravel() / (mechanism.clip * mechanism.noise_multiplier),
            found.counts / mechanism.count_multiplier,
            found.predictions.ravel() / mechanism.prediction_multiplier,
        ]
    )


def others(seed: int, by_unit: bool) -> list[Unit]:
    """Three units that stay, of up to three rows."""
    rng = np.random.default_rng(seed)
    return [random_unit(rng, int(rng.integers(1, 4)) if by_unit else 1) for _ in range(3)]


def random_unit(rng: np.random.Generator, rows: int) -> Unit:
    return tuple(
        Row(
            (rng.normal(size=WIDTH) * rng.choice([0.1, 3.0, 50.0])).tolist(),
            int(rng.integers(CLUSTERS)),
            rng.dirichlet(np.full(LABELS, 0.3)).tolist(),
        )
        for _ in range(rows)
    )


def candidates() -> list[Row]:
    """Rows at the edges of what a row can be, and rows that are broken."""
    vectors = [[CLIP, 0.0], [-CLIP, 0.0], [0.0, 9 * CLIP], [-1e30, -1e30], [0.0, 0.0], [math.nan, 1.0]]
    vectors += [[math.inf, 0.0]]
    predictions = [[1.0, 0.0], [0.0, 1.0], [0.4, 0.6], [90.0, -89.0], [math.nan, 0.0], [1.00009, 0.0]]
    return [Row(v, k, p) for v, k, p in itertools.product(vectors, (0, 1), predictions)]


def possible_units(by_unit: bool) -> list[Unit]:
    """Every single row of the candidates; by unit also pairs and triples of a thinner choice of them."""
    rows = candidates()
    units: list[Unit] = [(row,) for row in rows]
    if by_unit:
        thin = [Row([x, 0.0], k, p) for x in (-9.0, 9.0) for k in (0, 1) for p in ([1.0, 0.0], [0.0, 1.0])]
        thin.append(Row([math.nan, 0.0], 1, [5.0, 5.0]))
        units += itertools.combinations_with_replacement(thin, 2)
        units += itertools.combinations_with_replacement(thin[:5], 3)
    return units


def neighbours(adjacency: Adjacency, first: Array, without: Array) -> Array:
    """Distances of all neighbouring pairs: (m, k) the scaled numbers with each unit, (k,) those without."""
    if adjacency == "add-remove":
        return np.asarray(np.linalg.norm(first - without, axis=1))
    return np.asarray(np.linalg.norm(first[:, None] - first[None], axis=2).ravel())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("multipliers", MULTIPLIERS)
@pytest.mark.parametrize("by_unit", [False, True], ids=["row", "unit"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_no_neighbour_is_further_than_mu_and_the_worst_is_as_far(
    adjacency: Adjacency, by_unit: bool, multipliers: Multipliers, seed: int
) -> None:
    mechanism, rest = mechanism_of(multipliers, adjacency, by_unit), others(seed, by_unit)
    found = np.array([scaled([*rest, unit], mechanism) for unit in possible_units(by_unit)])
    worst = neighbours(adjacency, found, scaled(rest, mechanism)).max()
    assert worst <= mechanism.mu * (1 + 1e-12)
    assert worst >= 0.999 * mechanism.mu


@pytest.mark.parametrize("by_unit", [False, True], ids=["row", "unit"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_an_optimiser_finds_nothing_worse(adjacency: Adjacency, by_unit: bool) -> None:
    """Clusters at random, vectors and predictions by ascent from random starts: near mu, and not over it."""
    mechanism, rest = mechanism_of(MULTIPLIERS[0], adjacency, by_unit), others(3, by_unit)
    rng, size, best = np.random.default_rng(4), 2 if by_unit else 1, 0.0
    without = scaled(rest, mechanism)

    def unit_of(point: Array, clusters: Sequence[int]) -> Unit:
        parts = point.reshape(size, WIDTH + 1)
        votes = 1 / (1 + np.exp(-parts[:, WIDTH]))
        return tuple(
            Row(part[:WIDTH].tolist(), cluster, (vote, 1 - vote))
            for part, cluster, vote in zip(parts, clusters, votes, strict=True)
        )

    for _ in range(12):
        clusters = [rng.integers(2, size=size).tolist() for _ in range(2)]

        def loss(point: Array, clusters: list[list[int]] = clusters) -> float:
            first, second = (unit_of(half, c) for half, c in zip(np.split(point, 2), clusters, strict=True))
            with_first = scaled([*rest, first], mechanism)
            base = without if adjacency == "add-remove" else scaled([*rest, second], mechanism)
            return -float(np.linalg.norm(with_first - base))

        start = rng.normal(0, 2, 2 * size * (WIDTH + 1))
        best = max(best, -minimize(loss, start, method="Powell", options={"maxfev": 500 * size}).fun)
    assert 0.9 * mechanism.mu <= best <= mechanism.mu * (1 + 1e-12)


def pairs(seed: int, by_unit: bool, adjacency: Adjacency) -> Iterator[tuple[list[Unit], list[Unit]]]:
    """Neighbouring data sets: a random one, and it without a unit or with another in its place."""
    rng = np.random.default_rng(seed)
    broken = candidates()
    for _ in range(60):
        count = int(rng.integers(1, 7))
        units = [random_unit(rng, int(rng.integers(1, 5)) if by_unit else 1) for _ in range(count)]
        place = int(rng.integers(count))
        if rng.random() < 0.5:
            units[place] = (broken[rng.integers(len(broken))], *units[place][1:])
        other = random_unit(rng, int(rng.integers(1, 5)) if by_unit else 1)
        middle = [] if adjacency == "add-remove" else [other]
        yield units, [*units[:place], *middle, *units[place + 1 :]]


def replayed(seed: int, by_unit: bool, adjacency: Adjacency) -> list[tuple[float, float, float, float]]:
    """Of each pair under the same noise: change of sums over the clip, of counts (L1), predictions, all."""
    mechanism = mechanism_of(MULTIPLIERS[seed % 3], adjacency, by_unit)
    replay = Noise(lambda: np.random.default_rng(seed), "replayed", True)
    found = []
    for first, second in pairs(seed, by_unit, adjacency):
        one, two = (noised(units, mechanism, replay) for units in (first, second))
        whole = scaled(first, mechanism, replay) - scaled(second, mechanism, replay)
        found.append(
            (
                float(np.linalg.norm(one.sums - two.sums)) / CLIP,
                float(np.abs(one.counts - two.counts).sum()),
                float(np.linalg.norm(one.predictions - two.predictions)),
                float(np.linalg.norm(whole)) / mechanism.mu,
            )
        )
    return found


def most(adjacency: Adjacency) -> tuple[float, float, float, float]:
    """What the four may be: one unit adds 1, two units differ by 2 (predictions: two clusters, sqrt 2)."""
    return (1.0, 1.0, 1.0, 1.0) if adjacency == "add-remove" else (2.0, 2.0, math.sqrt(2), 1.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by_unit", [False, True], ids=["row", "unit"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_replayed_noise_leaves_no_more_than_the_sensitivity(
    adjacency: Adjacency, by_unit: bool, seed: int
) -> None:
    for change in replayed(seed, by_unit, adjacency):
        assert all(one <= limit + 1e-9 for one, limit in zip(change, most(adjacency), strict=True))


@pytest.mark.parametrize(
    ("fault", "shows"),
    [("unit_weights", 1), ("unit_weights", 0), ("unit_weights", 3), ("clip_rows", 0), ("_simplex_rows", 2)],
)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_replay_sees_a_planted_fault(
    adjacency: Adjacency, fault: str, shows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unweighted(units: Sequence[str], rows: int, unit: str) -> Array:
        return np.ones(rows)

    def as_it_is(values: Array, clip: float = 0.0) -> Array:
        return np.nan_to_num(values, posinf=0.0, neginf=0.0)

    monkeypatch.setattr(centroid_privacy, fault, unweighted if fault == "unit_weights" else as_it_is)
    worst = max(change[shows] for change in replayed(0, True, adjacency))
    assert worst > 1.1 * most(adjacency)[shows]


class _Shifted:
    """Recorded noise, and counts lifted by 100 so that every centroid leaves and can be multiplied back."""

    def __init__(self) -> None:
        self._generator, self._calls = np.random.default_rng(6), 0

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> Array:
        self._calls += 1
        return self._generator.normal(loc, scale, size) + (100.0 if self._calls == 2 else 0.0)


@pytest.mark.parametrize("layer", ["pooled", "embeddings"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_release_of_texts_moves_by_one_patient(
    adjacency: Adjacency, layer: Literal["pooled", "embeddings"], tiny_encoder: Path
) -> None:
    """From texts to the release: each patient in turn leaves, or has other texts, under the same noise."""
    slm = load_slm(str(tiny_encoder), ("a", "b"), max_length=8, train_embeddings=False, seed=0)
    terms = FedKcTerms(compose=layer, source="peers", clusters=2, alpha=0.5, weights="uniform", per_step=None)
    privacy = CentroidPrivacy(noise_multiplier=0.5, min_size=1, clip=0.7)
    patients = {
        "p": ("the goal of the team", "a film", "the bank"),
        "q": ("a film and the bank",),
        "r": ("the team", "the goal of the bank"),
    }
    others = {name: ("a goal", f"the film of the {name}") for name in patients}

    def released(texts: dict[str, tuple[str, ...]]) -> tuple[Array, Array]:
        flat = [(name, text) for name, own in texts.items() for text in own]
        rows = Rows(
            tuple(str(i) for i in range(len(flat))),
            tuple(text for _, text in flat),
            np.zeros(len(flat), np.int64),
            tuple(name for name, _ in flat),
        )
        noise = Noise(_Shifted, "recorded", True)  # type: ignore[arg-type]
        job = CentroidJob(terms, privacy, 1, 0, noise, "patient_id", adjacency)
        release, _ = release_centroids(slm, rows, job, {})
        claim, held = release.claim, release.tensors
        assert isinstance(claim, GaussianSums)
        assert (claim.unit, claim.adjacency, claim.noise_multiplier) == ("patient_id", adjacency, 0.5)
        sizes = held["sizes"].astype(np.float64)
        return held["centroids"].reshape(2, -1).astype(np.float64) * sizes[:, None], sizes

    sums, counts = released(patients)
    for name in patients:
        rest = {one: own for one, own in patients.items() if one != name}
        if adjacency == "replace-one":
            rest[name] = others[name]
        other_sums, other_counts = released(rest)
        limit = most(adjacency)
        # Float32 of numbers near 100, and an encoder whose last bits depend on what else is in its batch.
        assert np.linalg.norm(sums - other_sums) <= 0.7 * limit[0] + 1e-3
        assert np.abs(counts - other_counts).sum() <= limit[1] + 1e-4
        assert np.linalg.norm(sums - other_sums) > 0.05


def test_a_claim_names_the_mu_of_its_mechanism() -> None:
    """The bounds above are about `mechanism.mu`, which is what a claim carries, whatever min_size is."""
    for adjacency in ADJACENCIES:
        mechanism = mechanism_of(MULTIPLIERS[1], adjacency, True)
        local = LocalResult({"vectors": np.ones((1, 2)), "predictions": np.full((1, 2), 0.5)}, 1)
        for min_size in (1, 50):
            release, _ = centroid_privacy.release_noisy_sums(
                local, np.zeros(1, np.int64), 1, replace(mechanism, min_size=min_size), NONE, {}, ("a",)
            )
            claim = release.claim
            assert isinstance(claim, GaussianSums)
            assert (claim.mu, claim.unit, claim.adjacency) == (mechanism.mu, "patient_id", adjacency)
