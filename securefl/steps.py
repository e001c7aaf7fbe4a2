"""What a silo does for each step of a plan: share, train, consider a candidate, finish.

Everything here computes and nothing leaves: the result is a `Release` with its claim, which `client` holds
against policy and ledger. The plan was verified, agreed and permitted before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from securefl.config import Config
from securefl.data import Rows
from securefl.errors import MalformedEnvelope, PayloadError, WrongShape
from securefl.local import (
    CentroidJob,
    LocalTraining,
    SiloData,
    derive_seed,
    knowledge_of,
    release_centroids,
)
from securefl.messages import Dropped, FedKcTerms, RoundPlan, Step
from securefl.methods.fedkc import Knowledge
from securefl.models import Slm
from securefl.privacy import LocalResult, Noise, release_metrics, release_model
from securefl.relayed import Reader, relayed_knowledge
from securefl.release import Release, Tensors, check_tensors, fingerprint
from securefl.training import probabilities


@dataclass(frozen=True, repr=False)
class Bench:
    """What a silo computes with. stop: asked between training steps. reader: who opens peers' centroids."""

    name: str
    config: Config
    data: SiloData
    slm: Slm
    base_sha256: str
    noise: Noise
    train: LocalTraining
    stop: Callable[[], bool]
    reader: Reader


@dataclass(frozen=True, repr=False)
class Done:
    """evidence: the truth behind the release, which stays. kept_candidate: None where there was none."""

    release: Release
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
        bench.slm.load_state(received)
    match plan.step:
        case Step.SHARE:
            return _share(plan, bench)
        case Step.TRAIN:
            return _train(plan, tensors, bench)
        case Step.CANDIDATE:
            return _consider(plan, received, bench)
        case Step.FINISH:
            return _finish(plan, bench)


def weights_of(plan: RoundPlan, tensors: Tensors, slm: Slm) -> Tensors | None:
    """The weights that came with a plan, if it names any; nothing else may have come but what is relayed.

    Looks at no row. Raises PayloadError, WrongShape or NonFiniteUpdate.
    """
    weights = {name: array for name, array in tensors.items() if not name.startswith("relay/")}
    if {f"relay/{name}" for name in plan.relayed} != set(tensors) - set(weights):
        raise PayloadError("what a plan relays is not what it says that it relays")
    if plan.model is None:
        if weights:
            raise WrongShape("a plan brings tensors of which it says nothing")
        return None
    check_tensors(weights, slm.shapes(), "the server's model")
    if fingerprint(weights) != plan.model:
        raise WrongShape("the model that came with a plan is not the one that the plan names")
    return weights


def _info(plan: RoundPlan, bench: Bench) -> dict[str, Any]:
    return {
        "round": plan.round,
        "step": plan.step.value,
        "base": bench.slm.name,
        "base_sha256": bench.base_sha256,
        "max_length": bench.slm.max_length,
        "labels": list(bench.slm.labels),
    }


def _share(plan: RoundPlan, bench: Bench) -> Done:
    if plan.fedkc is None:
        raise MalformedEnvelope("a plan to share knowledge does not say how")
    release, clusters = _centroids(plan, plan.fedkc, bench)
    return Done(release, {"clusters": clusters})


def _centroids(plan: RoundPlan, terms: FedKcTerms, bench: Bench) -> tuple[Release, list[list[str]]]:
    info = {**_info(plan, bench), "encoder": fingerprint(bench.slm.state()), "compose": terms.compose}
    seed = derive_seed(bench.config.federation.seed, bench.name, plan.round, "kmeans")
    # Rounds after the first share once each: the budget of the run is theirs together.
    job = CentroidJob(terms, bench.config.privacy.centroids, plan.rounds - 1, seed, bench.noise)
    return release_centroids(bench.slm, bench.data.train, job, info)


def _train(plan: RoundPlan, tensors: Tensors, bench: Bench) -> Done:
    knowledge, ignored = _knowledge(plan, tensors, bench)
    seed = derive_seed(bench.config.federation.seed, bench.name, plan.round, "train")
    bench.train(bench.slm, bench.data.train, bench.config, plan.epochs, seed, knowledge, bench.stop)
    result = LocalResult(bench.slm.state(), len(bench.data.train))
    return Done(release_model(result, _info(plan, bench)), ignored=ignored)


def _knowledge(plan: RoundPlan, tensors: Tensors, bench: Bench) -> tuple[list[Knowledge], list[Dropped]]:
    terms = plan.fedkc
    if terms is None or plan.round == 1:
        return [], []
    if terms.source == "own":
        release, _ = _centroids(plan, terms, bench)
        return [knowledge_of(release)], []
    return relayed_knowledge(tensors, plan, terms, bench.reader)


def _consider(plan: RoundPlan, candidate: Tensors | None, bench: Bench) -> Done:
    """Keep the candidate or one's own model, whichever is better on rows kept from training."""
    before = _accuracy(bench.slm, bench.data.validation)
    own = bench.slm.state()
    kept = False
    if candidate is not None:
        bench.slm.load_state(candidate)
        kept = _accuracy(bench.slm, bench.data.validation) >= before
        if not kept:
            bench.slm.load_state(own)
    return Done(release_metrics({"kept": kept}, _info(plan, bench)), kept_candidate=kept)


def _finish(plan: RoundPlan, bench: Bench) -> Done:
    rows = bench.data.validation
    metrics = {"validation_accuracy": _accuracy(bench.slm, rows), "validation_rows": len(rows)}
    return Done(release_metrics(metrics, _info(plan, bench)))


def _accuracy(slm: Slm, rows: Rows) -> float:
    return float((probabilities(slm, rows.texts).argmax(axis=1) == rows.labels).mean())
