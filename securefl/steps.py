"""What a silo does for each step of a plan: share, train, consider a candidate, finish.

Everything here computes and nothing leaves: the result is a `Release` with its claim, which `client` holds
against policy and ledger. The plan was verified, agreed and permitted before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.agreement import (
    RELAYED,
    SEALED_KEY,
    brings_model,
    check_sum_chunks,
    figures,
    metric_releases,
    weighs_rows,
)
from securefl.announcement import tokenizer_sha256
from securefl.config import Config
from securefl.crypto.ckks_terms import Terms
from securefl.data import Rows
from securefl.errors import MalformedEnvelope, PayloadError, SecureflError, WrongShape
from securefl.local import (
    CentroidJob,
    LocalTraining,
    SiloData,
    derive_seed,
    knowledge_of,
    release_centroids,
)
from securefl.messages import Dropped, FedKcTerms, RoundPlan, Step
from securefl.methods.averaging import bounded_change
from securefl.methods.fedkc import Knowledge
from securefl.privacy import (
    LocalResult,
    MetricMechanism,
    Noise,
    calibrate_metrics,
    decide,
    release_counts,
    release_gradient,
    release_metrics,
    release_model,
)
from securefl.relayed import Reader, relayed_knowledge
from securefl.release import Independent, PayloadKind, Release, Tensors, check_tensors, fingerprint
from securefl.slm import Slm
from securefl.training import batch_gradient, first_batch, probabilities

# The steps of a masked round in which the server relays something: all but the first.
_RELAYING = (Step.DEAL, Step.TRAIN, Step.SIGN, Step.UNMASK)


@dataclass(frozen=True, repr=False)
class Bench:
    """What a silo computes with. stop: asked between training steps. reader: who opens peers' centroids.
    head: its own head in place of a received one, once it has trained one that it keeps to itself."""

    name: str
    config: Config
    data: SiloData
    slm: Slm
    base_sha256: str
    noise: Noise
    train: LocalTraining
    stop: Callable[[], bool]
    reader: Reader
    head: Tensors = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Done:
    """trained: what the release is of, for a sum; opened: the sum that this silo opened before. evidence: the
    truth behind the release, which stays. kept_candidate: None where there was none.
    """

    release: Release
    trained: LocalResult | None = None
    opened: Release | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[Dropped] = ()
    kept_candidate: bool | None = None


def carry_out(plan: RoundPlan, tensors: Tensors, received: Tensors | None, bench: Bench) -> Done:
    """Do what a plan asks, on the bench's own model. tensors: what came with the plan; received: of these,
    the weights (`weights_of`).

    What fails here may depend on the rows, so a caller must treat every failure alike. Raises Cancelled where
    `stop` said so; the model may then be half trained.
    """
    if received is not None and plan.step is not Step.CANDIDATE:
        bench.slm.load_state({**received, **bench.head})
    match plan.step:
        case Step.SHARE:
            return _share(plan, bench)
        case Step.TRAIN if bench.config.sends_gradients:
            return _gradient(plan, bench)
        case Step.TRAIN:
            return _train(plan, tensors, received, bench)
        case Step.CANDIDATE:
            return _consider(plan, received, bench)
        case Step.FINISH:
            return _finish(plan, bench)
        case step:
            raise MalformedEnvelope(f"{step} is nothing that is computed from rows")


def weights_of(plan: RoundPlan, tensors: Tensors, slm: Slm, summed: Terms | None) -> Tensors | None:
    """The weights that came with a plan, or the encrypted sum of them; nothing else but what is relayed.

    summed: of the encrypted sum, where one is due. Looks at no row. Raises PayloadError, WrongShape or
    NonFiniteUpdate.
    """
    relayed = {f"relay/{name}" for name in plan.relayed}
    if plan.protection == "masked" and plan.step in _RELAYING:
        relayed.add(RELAYED)
    if plan.protection == "ckks" and plan.step is not Step.KEY:
        relayed.add(SEALED_KEY)
    weights = {name: array for name, array in tensors.items() if "/" not in name}
    if relayed != set(tensors) - set(weights):
        raise PayloadError("what a plan relays is not what it says that it relays")
    if plan.model is None or not brings_model(plan.step):
        if weights:
            raise WrongShape("a plan brings tensors of which it says nothing")
        return None
    if summed is not None:
        check_sum_chunks(weights, summed)
    else:
        check_tensors(weights, slm.shapes(), "the server's model")
    if fingerprint(weights) != plan.model:
        raise WrongShape("the model that came with a plan is not the one that the plan names")
    return weights


def plan_info(plan: RoundPlan, slm: Slm, base_sha256: str) -> dict[str, Any]:
    """The public facts that travel with every release: which step of which round, and of which model."""
    return {
        "round": plan.round,
        "step": plan.step.value,
        "base": slm.name,
        "base_sha256": base_sha256,
        "max_length": slm.max_length,
        "tokenizer": tokenizer_sha256(slm),
        "labels": list(slm.labels),
    }


def _info(plan: RoundPlan, bench: Bench) -> dict[str, Any]:
    return plan_info(plan, bench.slm, bench.base_sha256)


def _share(plan: RoundPlan, bench: Bench) -> Done:
    if plan.fedkc is None:
        raise MalformedEnvelope("a plan to share knowledge does not say how")
    release, clusters = _centroids(plan, plan.fedkc, bench)
    return Done(release, evidence={"clusters": clusters})


def _centroids(plan: RoundPlan, terms: FedKcTerms, bench: Bench) -> tuple[Release, list[list[str]]]:
    # Under CKKS only silos know the weights, so what names the model is the encrypted sum.
    encoder = plan.model or fingerprint(bench.slm.state())
    info = {**_info(plan, bench), "encoder": encoder, "compose": terms.compose}
    seed = derive_seed(bench.config.federation.seed, bench.name, plan.round, "kmeans")
    # Rounds after the first share once each: the budget of the run is theirs together.
    config = bench.config
    job = CentroidJob(
        terms,
        config.privacy.centroids,
        plan.rounds - 1,
        seed,
        bench.noise,
        config.data.unit_name,
        config.privacy.adjacency,
    )
    return release_centroids(bench.slm, bench.data.train, job, info)


def _train(plan: RoundPlan, tensors: Tensors, received: Tensors | None, bench: Bench) -> Done:
    knowledge, ignored = _knowledge(plan, tensors, bench)
    seed = derive_seed(bench.config.federation.seed, bench.name, plan.round, "train")
    rows, noise = bench.data.train, bench.noise.for_purpose(plan.round, "train")
    claim = bench.train(bench.slm, rows, bench.config, plan.epochs, seed, noise, knowledge, bench.stop)
    if (claim is None) != (bench.config.privacy.dp_sgd is None):
        raise SecureflError("what was trained has another claim than the configuration asks for")
    trained = bench.slm.state()
    if received is not None:
        trained = _sent(trained, received, bench)
    result = LocalResult(trained, len(rows) if weighs_rows(bench.config) else None, claim)
    return Done(release_model(result, _info(plan, bench)), trained=result, ignored=ignored)


def _sent(trained: Mapping[str, NDArray[np.float32]], start: Tensors, bench: Bench) -> dict[str, Any]:
    """Of a trained model what goes to the server: without a head that stays, and not further than agreed."""
    sent, most = dict(trained), bench.config.protection.max_norm
    if bench.name in bench.config.federation.local_head:
        sent |= {name: np.asarray(start[name]) for name in bench.slm.head_names()}
    return sent if most is None else bounded_change(sent, start, most)


def _gradient(plan: RoundPlan, bench: Bench) -> Done:
    """The gradient of the batch that a training would begin with, at the weights that the plan names."""
    config = bench.config
    seed = derive_seed(config.federation.seed, bench.name, plan.round, "train")
    batch = first_batch(bench.data.train, config.slm.batch_size, seed)
    result = LocalResult(batch_gradient(bench.slm, batch), len(batch))
    info = {**_info(plan, bench), "encoder": plan.model}
    return Done(release_gradient(result, info), evidence={"rows": list(batch.ids)})


def _knowledge(plan: RoundPlan, tensors: Tensors, bench: Bench) -> tuple[list[Knowledge], list[Dropped]]:
    terms = plan.fedkc
    if terms is None or plan.round == 1:
        return [], []
    if terms.source == "own":
        release, _ = _centroids(plan, terms, bench)
        return [knowledge_of(release)], []
    return relayed_knowledge(tensors, plan, terms, bench.reader)


def _consider(plan: RoundPlan, candidate: Tensors | None, bench: Bench) -> Done:
    """Keep the candidate or one's own model, whichever is better on rows kept from training.

    Where figures are private the comparison is noisy and charged. Where none is told no row is looked at and
    the candidate is taken: what is kept goes into every later release.
    """
    info, told = _info(plan, bench), figures(bench.config)
    if candidate is None:
        release = release_metrics({"kept": False}, info)
        return Done(release, kept_candidate=False)
    own = bench.slm.state()
    if told == "none":
        bench.slm.load_state(candidate)
        unseen = Independent(reason="the server's model was taken without a look at any row")
        release = Release(PayloadKind.METRICS, {}, {**info, "metrics": {"kept": True}}, unseen)
        return Done(release, kept_candidate=True)
    before = _right(bench.slm, bench.data.validation)
    bench.slm.load_state(candidate)
    after = _right(bench.slm, bench.data.validation)
    claim = None
    if told == "noised":
        noise = bench.noise.for_purpose(plan.round, "candidate")
        kept, claim = decide(before, after, bench.data.validation.units, _metric_mechanism(bench), noise)
    else:
        kept = bool(after.mean() >= before.mean())
    if not kept:
        bench.slm.load_state(own)
    return Done(release_metrics({"kept": kept}, info, claim), kept_candidate=kept)


def _finish(plan: RoundPlan, bench: Bench) -> Done:
    info, rows = _info(plan, bench), bench.data.validation
    match figures(bench.config):
        case "none":
            arrived = Independent(reason="that the last model arrived, and no figure")
            return Done(Release(PayloadKind.METRICS, {}, {**info, "metrics": {}}, arrived))
        case "noised":
            noise = bench.noise.for_purpose(plan.round, "figures")
            right = _right(bench.slm, rows)
            return Done(release_counts(right, rows.units, _metric_mechanism(bench), noise, info))
    metrics: dict[str, float] = {"validation_accuracy": float(_right(bench.slm, rows).mean())}
    if not bench.config.sums_models:  # where row counts are hidden, a fixed share of them is too
        metrics["validation_rows"] = len(rows)
    return Done(release_metrics(metrics, info))


def _metric_mechanism(bench: Bench) -> MetricMechanism:
    """Of each of the run's private figures: one for every candidate, and one at the end."""
    config = bench.config
    assert config.privacy.metrics is not None
    return calibrate_metrics(
        config.privacy.metrics, config.privacy.adjacency, metric_releases(config), config.data.unit_name
    )


def _right(slm: Slm, rows: Rows) -> NDArray[np.bool_]:
    """(n,) whether the model is right on each row."""
    return np.asarray(probabilities(slm, rows.texts).argmax(axis=1) == rows.labels)
