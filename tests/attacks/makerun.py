"""Makes a run's folder for the auditor without a federation: real model, rows, releases and truth.

Rows, model, releases, ledgers and files are what a simulation makes, by the same functions; only envelopes
and training rounds are left out, so that a test can choose the partition, the claim and the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from securefl.centroid_privacy import calibrate_centroids, nearest_seed, release_means, release_noisy_sums
from securefl.config import parse_config
from securefl.crypto.identity import Identity
from securefl.data import Corpus, Rows
from securefl.ledger import Ledger
from securefl.local import public_seeds
from securefl.messages import Party, RoundPlan, Step
from securefl.methods.fedkc import cluster, compose
from securefl.models import base_fingerprint
from securefl.privacy import LocalResult, Noise, noise_source
from securefl.privacy_terms import CentroidPrivacy
from securefl.recording import RunFolder, ledger_facts
from securefl.release import ROW, Adjacency, Release, encode_release, fingerprint
from securefl.result import ClientRow, Result, RoundRow, ServerRow
from securefl.slm import Slm
from securefl.training import embed, probabilities

RUN = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Recipe:
    """layer: "pooled", "embeddings" or a number. noise: None for exact means. random_groups: no k-means.

    per_unit: rows of one unit of privacy, in turn. rounds: in which centroids are shared, from the second on.
    info, slm: overrides of the release's public
    facts and of the configuration. fault "no noise" or "half the noise": the claim of a
    mechanism, and exact sums or half the noise.
    spoil: what a silo does to a release before it leaves, unknown to its ledger's kind and claim.
    """

    layer: str | int = "pooled"
    clusters: int = 3
    noise: float | None = None
    clip: float | None = None
    random_groups: bool = False
    min_size: int = 2
    silos: tuple[str, ...] = ("silo-1", "silo-2")
    method: str = "fedkc"
    adjacency: Adjacency = "add-remove"
    per_unit: int = 1
    seed: int = 0
    rounds: int = 1
    info: dict[str, Any] = field(default_factory=dict)
    slm: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    spoil: Callable[[Release], Release] = lambda release: release


def corpus_of(texts: list[str], labels: list[str], per_silo: int, recipe: Recipe) -> Corpus:
    """The first rows go to the silos in turn, the rest is the pool."""
    names = tuple(sorted(set(labels)))
    ids = np.array([names.index(label) for label in labels], np.int64)
    rows = Rows(tuple(f"row-{i}" for i in range(len(texts))), tuple(texts), ids)
    bounds = [per_silo * i for i in range(len(recipe.silos) + 1)]
    train = {name: rows.take(range(bounds[i], bounds[i + 1])) for i, name in enumerate(recipe.silos)}
    nothing = rows.take([])
    return Corpus(
        names, train, dict.fromkeys(train, nothing), nothing, rows.take(range(bounds[-1], len(rows)))
    )


class _NoDraw:
    """A generator whose noise is zero."""

    def normal(self, _mean: float, _deviation: float, shape: Any) -> Any:
        return np.zeros(shape)


class _HalfDraw:
    """A generator of half the noise that is asked for."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def normal(self, mean: float, deviation: float, shape: Any) -> Any:
        return self._rng.normal(mean, deviation / 2, shape)


def silence() -> Noise:
    """The planted fault of a mechanism that forgets its noise."""
    return Noise(cast(Any, _NoDraw), "planted fault", True)


def _config(slm: Slm, recipe: Recipe) -> dict[str, Any]:
    document = {
        "federation": {"method": recipe.method, "rounds": 1 + recipe.rounds, "seed": recipe.seed},
        "data": {"train": "a.csv", "test": "b.csv"},
        "slm": {"models": [slm.name], "max_length": slm.max_length, **recipe.slm},
        "fedkc": {"clusters": recipe.clusters, "compose": recipe.layer},
        "protection": {"models": "sealed"},
    }
    if recipe.noise is not None:
        terms = {"noise_multiplier": recipe.noise, "min_size": recipe.min_size, "clip": recipe.clip}
        document["privacy"] = {"centroids": terms, "adjacency": recipe.adjacency}
        if recipe.per_unit > 1:
            document["data"]["unit"] = "patient_id"
    return parse_config(document).model_dump(mode="json")


def _release(slm: Slm, rows: Rows, recipe: Recipe, number: int, seed: int) -> tuple[Any, list[list[str]]]:
    info = {
        "round": number,
        "step": "share",
        "encoder": fingerprint(slm.state()),
        "base": slm.name,
        "base_sha256": base_fingerprint(slm.name),
        "compose": recipe.layer,
        "max_length": slm.max_length,
        "labels": list(slm.labels),
        **recipe.info,
    }
    pooled = embed(slm, rows.texts, "pooled")
    predictions = probabilities(slm, rows.texts)
    vectors, mask = pooled, None
    if recipe.layer != "pooled":
        vectors, mask = embed(slm, rows.texts, 0 if recipe.layer == "embeddings" else int(recipe.layer))
    if recipe.noise is not None:
        assignment = nearest_seed(pooled, public_seeds(slm, recipe.clusters)[1])
        clip = recipe.clip or float(np.median(np.linalg.norm(vectors.reshape(len(vectors), -1), axis=1)))
        terms = CentroidPrivacy(noise_multiplier=recipe.noise, min_size=recipe.min_size)
        unit = ROW if recipe.per_unit == 1 else "patient_id"
        mechanism = calibrate_centroids(terms, clip, 1, unit=unit, adjacency=recipe.adjacency)
        units = () if unit == ROW else tuple(f"p{i // recipe.per_unit}" for i in range(len(rows)))
        local = LocalResult({"vectors": vectors, "predictions": predictions}, len(rows))
        source = silence() if recipe.fault == "no noise" else noise_source(seed)
        if recipe.fault == "half the noise":
            source = Noise(cast(Any, _HalfDraw), "planted fault", True)
        release, kept = release_noisy_sums(local, assignment, recipe.clusters, mechanism, source, info, units)
        return release, [[rows.ids[i] for i in np.flatnonzero(assignment == s)] for s in kept]
    if recipe.random_groups:
        assignment = np.random.default_rng(seed).permutation(len(rows)) % recipe.clusters
    else:
        assignment = cluster(pooled, recipe.clusters, seed)
    means, members = compose(vectors, mask, predictions, assignment, recipe.min_size)
    release = release_means(LocalResult(means.tensors(), len(rows)), info, recipe.min_size)
    return release, [[rows.ids[i] for i in group] for group in members]


def make_run(out: Path, slm: Slm, corpus: Corpus, recipe: Recipe) -> Path:
    """Write the folder `out` of a run in which every silo shared centroids, from round 2 on."""
    folder = RunFolder(out)
    folder.open()
    folder.truth(corpus)
    numbers = range(2, 2 + recipe.rounds)
    for number in numbers:
        folder.global_model(number, slm.state(), slm.name, slm.labels)
    clients = []
    keys = {name: Identity.generate(name) for name in corpus.train}
    (folder.path / "ledger").mkdir()
    for index, (name, rows) in enumerate(corpus.train.items()):
        folder.text(f"cards/{name}.json", keys[name].card.model_dump_json())
        ledger = Ledger.create(folder.path / "ledger" / f"{name}.jsonl", keys[name])
        for number in numbers if recipe.method != "standalone" else ():
            release, clusters = _release(slm, rows, recipe, number, recipe.seed + index + 100 * (number - 2))
            body = encode_release(recipe.spoil(release))
            plan = RoundPlan.model_construct(round=number, step=Step.SHARE)
            folder.witness(name, plan, release.kind, body, {"clusters": clusters})
            peers = [
                Party(name=other, key=keys[other].card.fingerprint) for other in corpus.train if other != name
            ]
            ledger.append(
                run=RUN,
                round=number,
                step=Step.SHARE.value,
                plan="0" * 64,
                plan_sequence=number - 1,
                kind=release.kind,
                recipients=peers,
                protection="peer",
                envelope=body,
                body=body,
                dataset=name,
                claim=release.claim,
                permit=lambda account: None,
            )
        clients.append(_client(name, slm, rows, ledger))
    result = Result(
        method=recipe.method,
        name=recipe.method,
        run=RUN,
        seed=recipe.seed,
        config=_config(slm, recipe),
        rounds=[RoundRow(round=number, seconds=0.0, bytes_up=0, bytes_down=0) for number in numbers],
        clients=clients,
        server=ServerRow(),
        difference=None,
        test_rows=0,
        seconds=0.0,
        peak_memory_bytes=0,
        versions={},
    )
    folder.text("result.json", result.to_json())
    folder.finish()
    return out


def _client(name: str, slm: Slm, rows: Rows, ledger: Ledger) -> ClientRow:
    return ClientRow(
        name=name,
        model=slm.name,
        train_rows=len(rows),
        validation_rows=0,
        labels={},
        test_accuracy=0.5,
        test_interval=(0.0, 1.0),
        baseline_accuracy=0.5,
        **ledger_facts(ledger),
        bytes_up=0,
    )
