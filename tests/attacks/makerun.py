"""Makes a run's folder for the auditor without a federation: real model, rows, releases and truth.

Rows, model, releases and files are what a simulation makes, by the same functions; only keys, envelopes and
training rounds are left out, so that a test can choose the partition, the claim and the faults.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from securefl.config import CentroidPrivacy, parse_config
from securefl.data import Corpus, Rows
from securefl.local import public_seeds
from securefl.messages import RoundPlan, Step
from securefl.methods.fedkc import cluster, compose
from securefl.models import Slm, base_fingerprint
from securefl.privacy import (
    LocalResult,
    Noise,
    calibrate_centroids,
    nearest_seed,
    noise_source,
    release_means,
    release_noisy_sums,
)
from securefl.recording import RunFolder
from securefl.release import encode_release, fingerprint
from securefl.result import ClientRow, ReleaseRow, Result, RoundRow, ServerRow
from securefl.training import embed, probabilities

RUN = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Recipe:
    """layer: "pooled" or "embeddings". noise: None for exact means. random_groups: no k-means.

    info: overrides of the release's public facts. fault "no noise": the claim of a mechanism, and exact sums.
    """

    layer: str = "pooled"
    clusters: int = 3
    noise: float | None = None
    clip: float | None = None
    random_groups: bool = False
    min_size: int = 2
    silos: tuple[str, ...] = ("silo-1", "silo-2")
    method: str = "fedkc"
    seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    fault: str = ""


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


def silence() -> Noise:
    """The planted fault of a mechanism that forgets its noise."""
    return Noise(cast(Any, _NoDraw()), "planted fault", True)


def _config(slm: Slm, recipe: Recipe) -> dict[str, Any]:
    document = {
        "federation": {"method": recipe.method, "rounds": 2, "seed": recipe.seed},
        "data": {"train": "a.csv", "test": "b.csv"},
        "slm": {"models": [slm.name], "max_length": slm.max_length},
        "fedkc": {"clusters": recipe.clusters, "compose": recipe.layer},
    }
    return parse_config(document).model_dump(mode="json")


def _release(slm: Slm, rows: Rows, recipe: Recipe, seed: int) -> tuple[Any, list[list[str]]]:
    info = {
        "round": 2,
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
    if recipe.layer == "embeddings":
        vectors, mask = embed(slm, rows.texts, "embeddings")
    if recipe.noise is not None:
        assignment = nearest_seed(pooled, public_seeds(slm, recipe.clusters)[1])
        clip = recipe.clip or float(np.median(np.linalg.norm(vectors.reshape(len(vectors), -1), axis=1)))
        terms = CentroidPrivacy(noise_multiplier=recipe.noise, min_size=recipe.min_size)
        mechanism = calibrate_centroids(terms, clip, 1)
        local = LocalResult({"vectors": vectors, "predictions": predictions}, len(rows))
        source = silence() if recipe.fault == "no noise" else noise_source(seed)
        release, kept = release_noisy_sums(local, assignment, recipe.clusters, mechanism, source, info)
        return release, [[rows.ids[i] for i in np.flatnonzero(assignment == s)] for s in kept]
    if recipe.random_groups:
        assignment = np.random.default_rng(seed).permutation(len(rows)) % recipe.clusters
    else:
        assignment = cluster(pooled, recipe.clusters, seed)
    means, members = compose(vectors, mask, predictions, assignment, recipe.min_size)
    release = release_means(LocalResult(means.tensors(), len(rows)), info, recipe.min_size)
    return release, [[rows.ids[i] for i in group] for group in members]


def make_run(out: Path, slm: Slm, corpus: Corpus, recipe: Recipe) -> Path:
    """Write the folder `out` of a run in which every silo shared centroids once, in round 2."""
    folder = RunFolder(out)
    folder.open()
    folder.truth(corpus)
    folder.global_model(2, slm.state(), slm.name, slm.labels)
    clients = []
    for index, (name, rows) in enumerate(corpus.train.items()):
        sent = []
        if recipe.method != "standalone":
            release, clusters = _release(slm, rows, recipe, recipe.seed + index)
            body = encode_release(release)
            plan = RoundPlan.model_construct(round=2, step=Step.SHARE)
            folder.witness(name, plan, release.kind, body, {"clusters": clusters})
            peers = [other for other in corpus.train if other != name]
            sent = [
                ReleaseRow(
                    round=2,
                    kind=release.kind.value,
                    recipients=peers,
                    readable_by=peers,
                    bytes=len(body),
                    sha256=hashlib.sha256(body).hexdigest(),
                    claim=release.claim.model_dump(mode="json"),
                )
            ]
        clients.append(_client(name, slm, rows, sent))
    result = Result(
        method=recipe.method,
        name=recipe.method,
        run=RUN,
        seed=recipe.seed,
        config=_config(slm, recipe),
        rounds=[RoundRow(round=2, seconds=0.0, bytes_up=0, bytes_down=0)],
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


def _client(name: str, slm: Slm, rows: Rows, sent: list[ReleaseRow]) -> ClientRow:
    return ClientRow(
        name=name,
        model=slm.name,
        train_rows=len(rows),
        validation_rows=0,
        labels={},
        test_accuracy=0.5,
        test_interval=(0.0, 1.0),
        baseline_accuracy=0.5,
        epsilon=None,
        private_epsilon=None,
        delta=None,
        simulated=True,
        no_finite_epsilon=[],
        releases=sent,
        bytes_up=0,
    )
