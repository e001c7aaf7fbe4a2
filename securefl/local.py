"""What a silo computes from its own rows: training, and centroids that are ready to leave.

Everything here runs inside the silo and knows no server, no messages and no keys; what may leave comes back
as a `Release` with its claim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from securefl.centroid_privacy import calibrate_centroids, nearest_seed, release_means, release_noisy_sums
from securefl.config import Config
from securefl.data import Rows
from securefl.dp_sgd import fit_private
from securefl.dp_terms import training_mechanism
from securefl.errors import NonFiniteUpdate
from securefl.messages import FedKcTerms
from securefl.methods.fedkc import Composition, Knowledge, cluster, compose
from securefl.methods.fedprox import proximal_term
from securefl.models import load_slm
from securefl.privacy import LocalResult, Noise, check_delta
from securefl.privacy_terms import CentroidPrivacy
from securefl.release import MAX_MAGNITUDE, Adjacency, DpSgd, Release, canonical_json
from securefl.slm import Slm
from securefl.training import embed, fit, head_probabilities

SEED_TEXTS = ("{}", "a text about {}", "news about {}", "the topic is {}", "{}, in short", "more on {}")


@dataclass(frozen=True, repr=False)
class SiloData:
    """A silo's rows: those it trains on, and those it keeps from training to judge models."""

    train: Rows
    validation: Rows


class LocalTraining(Protocol):
    """Trains `slm` in place; a simulation passes one that remembers results. As `train_locally`."""

    def __call__(
        self,
        slm: Slm,
        rows: Rows,
        config: Config,
        epochs: int,
        seed: int,
        noise: Noise,
        knowledge: Sequence[Knowledge] = (),
        cancelled: Callable[[], bool] | None = None,
    ) -> DpSgd | None: ...


def train_locally(
    slm: Slm,
    rows: Rows,
    config: Config,
    epochs: int,
    seed: int,
    noise: Noise,
    knowledge: Sequence[Knowledge] = (),
    cancelled: Callable[[], bool] | None = None,
) -> DpSgd | None:
    """Fine-tune on a silo's rows: the cross-entropy, and what the method adds to it.

    With knowledge alpha times the consistency loss (8) of FedKC; with FedProx the proximal term around the
    weights that `slm` has at the call. Where `privacy.dp_sgd` is set, by DP-SGD with `noise`, and the claim
    on the weights is returned. cancelled: asked between steps. Raises as `training.fit` and
    `dp_sgd.fit_private`.
    """
    terms, penalty = config.slm, _penalty(slm, config, knowledge, seed)
    mechanism, private = training_mechanism(config, epochs), config.privacy.dp_sgd
    encoder_rate, head_rate = terms.learning_rates(private=private is not None)
    if mechanism is not None and private is not None:
        return fit_private(
            slm,
            rows,
            mechanism,
            noise,
            learning_rate=encoder_rate,
            head_learning_rate=head_rate,
            physical_batch=private.physical_batch,
            engine=private.engine,
            precision=private.precision,
            penalty=penalty,
            cancelled=cancelled,
        )
    fit(
        slm,
        rows,
        epochs=epochs,
        batch_size=terms.batch_size,
        learning_rate=encoder_rate,
        head_learning_rate=head_rate,
        seed=seed,
        penalty=penalty,
        cancelled=cancelled,
    )
    return None


def _penalty(
    slm: Slm, config: Config, knowledge: Sequence[Knowledge], seed: int
) -> Callable[[Slm], Tensor] | None:
    """What the method adds to the loss of a step, around the weights of now; None where it adds nothing."""
    terms, mu = config.fedkc, config.mu
    if knowledge and terms.alpha > 0:
        rng = np.random.default_rng([seed, 1])
        term = Composition(knowledge, terms.weights, terms.layer)
        return lambda model: terms.alpha * term.loss(model, terms.per_step, rng)
    if mu > 0:
        start = [parameter.detach().clone() for parameter in slm.trained()]
        return lambda model: proximal_term(model.trained(), start, mu)
    return None


def starting_slm(name: str, labels: Sequence[str], config: Config) -> Slm:
    """A checkpoint with the run's initial head and adapter, the same in every silo and in the server."""
    slm = load_slm(
        name,
        labels,
        max_length=config.slm.max_length,
        train_embeddings=config.slm.train_embeddings,
        seed=derive_seed(config.federation.seed, "head"),
        lora=config.slm.lora,
    )
    require_composed(slm, config)
    return slm


def require_composed(slm: Slm, config: Config) -> None:
    """Raises ModelError where FedKC is to compose at a layer that the encoder does not have."""
    if config.federation.method == "fedkc" and config.fedkc.layer is not None:
        slm.require_layer(config.fedkc.layer)


def derive_seed(*parts: object) -> int:
    """A 31-bit seed from the run's seed and names; the same everywhere, unlike `hash`."""
    return (
        int.from_bytes(hashlib.sha256(canonical_json([str(part) for part in parts])).digest()[:4], "big") >> 1
    )


def public_seeds(slm: Slm, clusters: int) -> tuple[list[str], NDArray[np.float32]]:
    """q short public texts made from the label names and their pooled vectors (q, d) under `slm`.

    A private release may only partition rows by what is public; the names of the labels are.
    """
    texts = [
        SEED_TEXTS[(i // len(slm.labels)) % len(SEED_TEXTS)].format(slm.labels[i % len(slm.labels)])
        for i in range(clusters)
    ]
    return texts, np.asarray(embed(slm, texts, "pooled"), np.float32)


@dataclass(frozen=True)
class CentroidJob:
    """How one centroid release is made. releases: of the whole run, which share the budget.

    seed: of the k-means start. noise: for a private release. unit, adjacency: of its claim.
    """

    terms: FedKcTerms
    privacy: CentroidPrivacy
    releases: int
    seed: int
    noise: Noise
    unit: str
    adjacency: Adjacency


def release_centroids(
    slm: Slm, rows: Rows, job: CentroidJob, info: Mapping[str, Any]
) -> tuple[Release, list[list[str]]]:
    """A silo's centroids of its rows under `slm`, and the row ids behind each (the truth, which stays).

    Without noise: k-means on the pooled vectors and the means of the chosen layer, as FedKC shares them, and
    nothing is claimed; clusters of fewer than the minimum of units are withheld. With noise: the nearest of
    public seeds and noisy sums (`centroid_privacy.release_noisy_sums`).
    """
    terms, privacy = job.terms, job.privacy
    pooled = embed(slm, rows.texts, "pooled")
    predictions = head_probabilities(slm, pooled)
    # Only an exact release may look whether the rows gave numbers: a private one must not refuse for one row.
    if not (privacy.noised or (np.isfinite(pooled).all() and np.isfinite(predictions).all())):
        raise NonFiniteUpdate("the round's model gives NaN or infinity for a silo's rows; nothing was shared")
    mask: NDArray[Any] | None = None
    vectors = pooled
    if terms.layer is not None:
        vectors, mask = embed(slm, rows.texts, terms.layer)
    if not privacy.noised:
        assignment = cluster(pooled, terms.clusters, job.seed)
        # Many rows of one patient are no crowd.
        whole = np.flatnonzero(np.isin(assignment, _crowded(assignment, rows, privacy.min_size)))
        means, groups = compose(
            vectors[whole],
            None if mask is None else mask[whole],
            predictions[whole],
            assignment[whole],
            privacy.min_size,
        )
        members = [whole[group] for group in groups]
        release = release_means(LocalResult(means.tensors(), len(rows)), info, privacy.min_size, job.unit)
    else:
        check_delta(privacy.delta, len(rows.by_unit()), "this silo", "centroids")
        texts, seeds = public_seeds(slm, terms.clusters)
        clip = privacy.clip if privacy.clip is not None else public_clip(slm, texts, terms.layer)
        # The names of the labels and the round's model decide this, never a row.
        if not (np.isfinite(seeds).all() and 1e-6 <= clip <= MAX_MAGNITUDE):
            raise NonFiniteUpdate("the round's model gives no usable vectors for public texts")
        mechanism = calibrate_centroids(privacy, clip, job.releases, unit=job.unit, adjacency=job.adjacency)
        assignment = nearest_seed(pooled, seeds)
        local = LocalResult({"vectors": vectors, "predictions": predictions}, len(rows))
        release, kept = release_noisy_sums(
            local, assignment, terms.clusters, mechanism, job.noise, info, rows.units
        )
        members = [np.flatnonzero(assignment == seed) for seed in kept]
    return release, [[rows.ids[i] for i in group] for group in members]


def _crowded(assignment: NDArray[np.int64], rows: Rows, min_size: int) -> list[int]:
    """The clusters that at least `min_size` units have rows in."""
    units: dict[int, set[str]] = {}
    for cell, unit in zip(assignment.tolist(), rows.units or rows.ids, strict=True):
        units.setdefault(cell, set()).add(unit)
    return [cell for cell, whose in units.items() if len(whose) >= min_size]


def public_clip(slm: Slm, texts: Sequence[str], layer: int | None) -> float:
    """The typical norm of public texts' vectors; a whole matrix is taken as full to max_length."""
    if layer is None:
        return float(np.median(np.linalg.norm(embed(slm, texts, "pooled"), axis=1)))
    vectors, mask = embed(slm, texts, layer)
    token = np.median(np.linalg.norm(vectors, axis=2)[mask > 0])
    return float(token * np.sqrt(slm.max_length))


def knowledge_of(release: Release) -> Knowledge:
    """A centroid release as the arrays of the consistency loss."""
    held = release.tensors
    return Knowledge(held["centroids"], held.get("mask"), held["predictions"], held["sizes"])
