"""Attack 12 as it is put to a run: were these texts among the rows that a released model was trained on?

Attacked are the last model that each silo sent in the open of its recipient, and the last average, which all
silos have. Control: the same scores by the model that the run began with, which knew no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attacks import model_membership
from attacks.adversary import MODEL_MEMBERSHIP, NotEnough
from attacks.attack import Attack, Progress
from attacks.bench.membership import matched_controls
from attacks.bounds import auc
from attacks.evidence import MIN_AUXILIARY, Evidence, label_ids, some_of
from attacks.figures import NO_CLAIM, Auc, Figure, Measure, Points, RateAt
from attacks.judgement import Book
from attacks.model_membership import Candidates, TradeOff, trade_off
from attacks.runs import CENTROIDS, Run, Texts, open_recorded, open_release, pooled_vectors
from attacks.vector_cache import VectorCache
from securefl.models import base_fingerprint, load_slm
from securefl.release import CLAIM, DpSgd, PayloadKind, Tensors
from securefl.slm import Slm

NAME = "membership in a trained model"
WAYS = ("loss", "lira_online", "lira_offline", "rmia")
_WORDS = {
    "loss": "loss",
    "lira_online": "LiRA",
    "lira_offline": "LiRA, offline",
    "rmia": "RMIA",
}
FPR = 0.001
_CENTROIDS_TOO = "others trained on the silo's centroids too, which the claim of a model leaves out"
# Rows of an average over many silos that are scored; the interval is narrow enough by then.
_MOST_MEMBERS = 600
# Auxiliary rows that shadows are trained on and that RMIA ranks a text among: a thousandth of them is 16, and
# of 384 numbers each of some six copies is 48 MiB.
_MOST_AUXILIARY = 2**14
# Of the control, which is one number without an interval.
_BLIND_SHADOWS = 8


@dataclass(frozen=True, repr=False)
class _Model:
    """A released model. whose: the silos with whose rows it was made. cap: what their claims allow."""

    where: str
    silo: str
    round: int
    base: str
    state: Tensors
    whose: tuple[str, ...]
    cap: TradeOff | None
    reason: str | None
    claim_epsilon: float | None


def _missing(evidence: Evidence) -> str | None:
    run = evidence.run
    if run is None or not any(_models(run)):
        return "no trained model was released that anybody but its silo can open"
    return None


def _models(run: Run) -> Iterator[_Model]:
    last: dict[str, int] = {}
    for index, one in enumerate(run.releases):
        if one.row.kind == PayloadKind.MODEL.value:
            last[one.silo] = index
    for silo, index in sorted(last.items()):
        recorded = run.releases[index]
        release = open_recorded(recorded)
        cap, reason = _cap(run, silo, recorded.row.round)
        yield _Model(
            f"{silo}'s model, round {recorded.row.round}", silo, recorded.row.round,
            str(release.info.get("base", "")), release.tensors, (silo,), cap, reason,
            release.claim.epsilon if isinstance(release.claim, DpSgd) else None,
        )  # fmt: skip
    globals_ = sorted((run.path / "releases" / "server").glob("r*-model.safetensors"))
    if len(globals_) < 2:  # the first one is the model that the run began with
        return
    release = open_release(globals_[-1])
    silos = tuple(client.name for client in run.result.clients)
    number = len(run.result.rounds)
    caps = [_cap(run, silo, number) for silo in silos]
    reasons = [reason for _, reason in caps if reason is not None]
    loosest = max((cap for cap, _ in caps if cap is not None), key=lambda cap: cap.auc(), default=None)
    epsilons = [row.epsilon for row in run.result.clients if row.epsilon is not None]
    yield _Model(
        f"the average after round {number}", "server", number, str(release.info.get("base", "")),
        release.tensors, silos, None if reasons else loosest, reasons[0] if reasons else None,
        None if reasons or not epsilons else max(epsilons),
    )  # fmt: skip


def _cap(run: Run, silo: str, until: int) -> tuple[TradeOff | None, str | None]:
    """What a silo's claims up to a round allow to whoever sees its models, or why they bound nothing."""
    claims: list[DpSgd] = []
    for client in run.result.clients:
        if client.name != silo:
            continue
        for row in client.releases:
            claim = CLAIM.validate_python(row.claim)
            if row.round > until:
                continue
            if row.kind in CENTROIDS and len(run.result.clients) > 1:
                return (
                    None,
                    _CENTROIDS_TOO,
                )
            if row.kind in (PayloadKind.MODEL.value, PayloadKind.MASKED_MODEL.value,
                            PayloadKind.ENCRYPTED_MODEL.value):  # fmt: skip
                if not isinstance(claim, DpSgd):
                    return None, NO_CLAIM
                claims.append(claim)
    return (trade_off(claims), None) if claims else (None, NO_CLAIM)


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    run = evidence.run
    assert run is not None  # `_missing` says so
    known: dict[str, _Public] = {}
    for done, model in enumerate(_models(run)):
        say(done / (len(run.result.clients) + 1), f"{model.where}: membership")

        def attempt(page: Book, model: _Model = model) -> None:
            try:
                page.figures += _attack(run, evidence, model, known)
            except NotEnough as why:
                page.skip_at(NAME, model.where, str(why))

        book.part(f"12 {model.where}", attempt)


@dataclass(frozen=True, repr=False)
class _Public:
    """The model that the run began with, and its vectors of texts that were asked for already."""

    slm: Slm
    cache: VectorCache

    def vectors(self, texts: Texts) -> NDArray[np.float32]:
        return self.cache.take(texts.texts, lambda some: pooled_vectors(self.slm, some))


def _loaded(run: Run, model: _Model) -> Slm:
    config, labels = run.config, sorted_labels(run)
    return load_slm(
        model.base, labels, max_length=config.slm.max_length,
        train_embeddings=config.slm.train_embeddings, seed=run.seed, lora=config.slm.lora,
    )  # fmt: skip


def sorted_labels(run: Run) -> tuple[str, ...]:
    """The labels in the order of the models' outputs, as every recorded model states them."""
    for path in sorted((run.path / "releases").glob("*/*model*.safetensors")):
        labels = open_release(path).info.get("labels")
        if isinstance(labels, list):
            return tuple(map(str, labels))
    return ()


def _attack(run: Run, evidence: Evidence, model: _Model, known: dict[str, _Public]) -> list[Figure]:
    auxiliary, pool = evidence.halves
    auxiliary = some_of(auxiliary, _MOST_AUXILIARY, run.seed)
    if len(auxiliary) < MIN_AUXILIARY:
        raise NotEnough(f"{len(auxiliary)} auxiliary rows in the pool, at least {MIN_AUXILIARY} are needed")
    if model.base not in known:
        known[model.base] = _Public(_loaded(run, model), VectorCache())
    public, trained = known[model.base], _loaded(run, model)
    trained.load_state(model.state)
    rng = np.random.default_rng([run.seed, 12, len(model.whose), model.round, *model.silo.encode()])
    members = Texts.joined([run.rows(silo) for silo in model.whose])
    if len(members) > _MOST_MEMBERS:
        members = members.take(sorted(rng.permutation(len(members))[:_MOST_MEMBERS].tolist()))
    controls = matched_controls(members, pool, rng)
    names = {label: index for index, label in enumerate(trained.labels)}
    sides = [_candidates(trained, public, texts, names) for texts in (members, controls, auxiliary)]
    scores = model_membership.attack(sides[0], sides[1], sides[2], rng)
    blind = [_seen_before(public, side) for side in sides]
    nothing = model_membership.attack(blind[0], blind[1], blind[2], rng, _BLIND_SHADOWS)
    details: dict[str, object] = {
        "members": len(members),
        "controls": len(controls),
        "base": model.base,
        "base_sha256": base_fingerprint(model.base),
    }
    figures = []
    for way in WAYS:
        found, other = getattr(scores, way), getattr(nothing, way)
        for metric, measure, baseline in (
            ("auc", Auc(found[0], found[1]), 0.5),
            ("tpr_at_0.1_percent_fpr", RateAt(found[0], found[1], FPR), FPR),
        ):
            if metric != "auc" and way != "lira_online":
                continue
            figures.append(_figure(model, way, metric, measure, baseline, auc(*other), details))
    return figures


def _figure(
    model: _Model,
    way: str,
    metric: str,
    measure: Measure,
    baseline: float,
    blind: float,
    details: Mapping[str, object],
) -> Figure:
    cap: float | None = None
    curve: Points = ()
    if model.cap is not None:
        area = metric == "auc"
        cap = model.cap.auc() if area else float(model.cap.tpr(FPR))
        curve = _curve(model.cap) if area else ()
    return Figure(
        attack=f"{NAME}, {_WORDS[way]}",
        number=12,
        adversary=MODEL_MEMBERSHIP,
        target=model.where,
        silo=model.silo,
        round=model.round,
        metric=metric,
        measure=measure,
        baseline=baseline,
        claim_epsilon=model.claim_epsilon,
        cap=cap,
        cap_reason=model.reason,
        cap_curve=curve,
        adjacency="replace-one",
        bears_on=("singling_out", "linkability"),
        control=blind if metric == "auc" else None,
        details=dict(details),
    )


def _curve(cap: TradeOff) -> Points:
    grid = np.unique(np.concatenate([np.geomspace(1e-4, 0.1, 16), np.linspace(0, 1, 21)]))
    return tuple(zip(grid.tolist(), cap.tpr(grid).tolist(), strict=True))


def _candidates(slm: Slm, public: _Public, texts: Texts, names: Mapping[str, int]) -> Candidates:
    vectors = pooled_vectors(slm, texts.texts)
    with torch.inference_mode():
        logits = slm.head(torch.from_numpy(vectors)).numpy()
    return Candidates(
        np.asarray(logits, np.float64),
        label_ids(texts, names),
        np.asarray(public.vectors(texts), np.float64),
        np.asarray(vectors, np.float64),
    )


def _seen_before(public: _Public, one: Candidates) -> Candidates:
    """The same texts as the model that the run began with sees them."""
    with torch.inference_mode():
        logits = public.slm.head(torch.from_numpy(one.base).float()).numpy()
    return Candidates(np.asarray(logits, np.float64), one.labels, one.base, one.base)


ATTACK = Attack(12, NAME, MODEL_MEMBERSHIP, _missing, _run)
