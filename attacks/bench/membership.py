"""Attack 1 as it is put to a run: each row behind a pooled centroid against rows of strangers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attacks import membership
from attacks.adversary import MEMBERSHIP, NotEnough
from attacks.attack import Attack, Progress
from attacks.bounds import (
    auc,
    auc_cap,
    auc_interval,
    epsilon_lower_bound,
    held_out_errors,
    mu_of_auc,
    proposition_1,
    replace_one_mu,
    tpr_at,
    tpr_cap,
)
from attacks.evidence import Evidence, Scene, check_truth, label_ids
from attacks.figures import MIN_TRIALS, NO_CLAIM, Figure, Interval
from attacks.judgement import Book
from attacks.runs import Recorded
from securefl.local import public_seeds
from securefl.privacy import gaussian_epsilon
from securefl.release import GaussianSums, PayloadKind, Release

RATIO = "membership, likelihood ratio"
DOT = "membership, dot product"
FPR = 0.01
_CONTROLS_PER_MEMBER = 2


def _missing(evidence: Evidence) -> str | None:
    kinds = {one.row.kind for one in evidence.targets}
    return None if PayloadKind.CENTROIDS.value in kinds else "no pooled centroid was released"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    scenes = evidence.scenes(PayloadKind.CENTROIDS)
    for number, (recorded, scene) in enumerate(scenes):
        say(number / len(evidence.targets), f"{recorded.silo}, round {recorded.row.round}: membership")
        try:
            if isinstance(scene, NotEnough):
                raise scene
            book.figures += _attack(scene, book)
        except NotEnough as why:
            book.skip(RATIO, recorded, str(why))


def as_seen(scene: Scene, release: Release) -> membership.Target:
    """A release as its adversary sees it, public seeds included where rows were assigned by them."""
    seeds = None
    if isinstance(release.claim, GaussianSums):
        clusters = scene.evidence.run.config.fedkc.clusters
        seeds = np.asarray(public_seeds(scene.slm, clusters)[1], np.float64)
    return membership.Target(
        np.asarray(release.tensors["centroids"], np.float64),
        np.asarray(release.tensors["sizes"], np.float64),
        release.claim,
        seeds,
    )


def _attack(scene: Scene, book: Book) -> list[Figure]:
    slm, rng = scene.slm, scene.rng(1)
    vectors = scene.pooled(scene.rows)
    check_truth(scene, vectors, None)
    with torch.inference_mode():
        logits = slm.head(torch.from_numpy(vectors).float())
    measure_proposition(scene, vectors, logits.softmax(-1).numpy(), book)
    names = {label: index for index, label in enumerate(slm.labels)}
    members = scene.rows.take(scene.members)
    most = max(_CONTROLS_PER_MEMBER * len(members), 200)
    chosen = membership.match_labels(label_ids(members, names), label_ids(scene.controls, names), rng, most)
    for what, count in (("rows behind centroids", len(members)), ("control rows", len(chosen))):
        if count < MIN_TRIALS:
            raise NotEnough(f"{count} {what} with matching labels, at least {MIN_TRIALS} are needed")
    target = as_seen(scene, scene.release)
    scores = membership.attack(
        target,
        scene.pooled(scene.auxiliary),
        vectors[scene.members],
        scene.pooled(scene.controls.take(chosen.tolist())),
        rng,
    )
    if min(len(side) for side in scores.ratio) < MIN_TRIALS:
        inside, outside = (len(side) for side in scores.ratio)
        raise NotEnough(
            f"{inside} members and {outside} controls fall to a centroid that was released, "
            f"fewer rows than the {MIN_TRIALS} of each that are needed"
        )
    return membership_figures(scene.recorded, target, scores, rng)


def measure_proposition(scene: Scene, vectors: NDArray[Any], predictions: NDArray[Any], book: Book) -> None:
    """Proposition 1 on a release's true groups, into the book."""
    if scene.members:  # where noise alone kept every centroid there is no scatter to measure
        name = f"proposition 1, scatter within clusters <= total ({scene.where})"
        book.bounds.append(proposition_1(name, vectors, predictions, scene.groups))


def membership_figures(
    recorded: Recorded, target: membership.Target, scores: membership.Scores, rng: np.random.Generator
) -> list[Figure]:
    """The figures of attack 1 on one release.

    The game is replace-one and about rows; a claim of either adjacency is converted to it. A claim about a
    unit of several rows bounds it too: a unit with one row exchanged is another unit.
    """
    claim, (members, others) = target.claim, scores.ratio
    delta = claim.delta if isinstance(claim, GaussianSums) else 0.0
    errors = held_out_errors(members, others, rng, lambda found: epsilon_lower_bound(found, delta))
    shown = epsilon_lower_bound(errors, delta)
    sizes = target.sizes
    details: dict[str, Any] = {
        "rows": float(sizes.mean()),
        "members": len(members),
        "controls": len(others),
        "encoder_alone_auc": scores.encoder_alone[0],
        "smallest_cluster": float(sizes.min()),
    }
    mu = 0.0
    if isinstance(claim, GaussianSums):
        mu = replace_one_mu(claim)
        details |= {
            "claim_adjacency": claim.adjacency,
            "claim_unit": claim.unit,
            "claim_epsilon_replace_one": gaussian_epsilon(mu, claim.delta),
            "claim_auc_cap": auc_cap(mu),
            "simulated": claim.simulated,
        }
        if scores.encoder_alone[1] > 0.5:
            # The round's model was trained on these rows and this claim does not cover it, whether it has one
            # of its own or not: what it shows by itself is composed with the claim (mu adds in squares)
            # before the claim is called broken.
            mu = float(np.hypot(mu, mu_of_auc(scores.encoder_alone[2])))
            details["encoder_in_cap"] = True
    private = isinstance(claim, GaussianSums)

    def figure(attack: str, metric: str, value: float, interval: Interval, base: float, cap: float) -> Figure:
        return Figure(
            attack,
            1,
            MEMBERSHIP,
            f"{len(sizes)} pooled centroids",
            metric,
            value,
            interval,
            base,
            cap if private else None,
            None if private else NO_CLAIM,
            len(members) + len(others),
            shown if attack == RATIO else None,
            "replace-one",
            recorded,
            claim,
            details,
            bears_on=("singling_out", "linkability"),
            control=scores.encoder_alone[0] if (attack, metric) == (RATIO, "auc") else None,
        )

    def rate(alpha: float) -> tuple[float, float]:
        at = tpr_at(members, others, FPR, alpha)
        return at.low, at.high

    return [
        figure(
            RATIO,
            "auc",
            auc(members, others),
            lambda alpha: auc_interval(members, others, alpha),
            0.5,
            auc_cap(mu),
        ),
        figure(
            RATIO,
            "tpr_at_1_percent_fpr",
            tpr_at(members, others, FPR).value,
            rate,
            FPR,
            tpr_cap(mu, FPR),
        ),
        figure(
            DOT,
            "auc",
            auc(*scores.dot),
            lambda alpha: auc_interval(*scores.dot, alpha),
            0.5,
            auc_cap(mu),
        ),
    ]


ATTACK = Attack(1, RATIO, MEMBERSHIP, _missing, _run)
