"""Attack 1 as it is put to a run: each row behind a pooled centroid against rows of strangers.

What its scores become, figures with interval, cap and control, is the same for every attack on membership in
centroids, so `membership_figures` serves the others of this package too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks import membership
from attacks.adversary import MEMBERSHIP, Adversary, NotEnough
from attacks.attack import Attack, each_scene, lacks
from attacks.bounds import (
    auc_cap,
    epsilon_lower_bound,
    held_out_errors,
    mu_of_auc,
    replace_one_mu,
    tpr_cap,
)
from attacks.evidence import Scene, label_ids
from attacks.figures import MIN_TRIALS, NO_CLAIM, Auc, Figure, Measure, RateAt, at, gaussian_curve
from attacks.judgement import Book
from attacks.propositions import proposition_1
from attacks.runs import Texts
from securefl.local import public_seeds
from securefl.privacy import gaussian_epsilon
from securefl.release import GaussianSums, PayloadKind, Release
from securefl.training import head_probabilities

RATIO = "membership, likelihood ratio"
DOT = "membership, dot product"
FPR = 0.01
_CONTROLS_PER_MEMBER = 2
_LEAST_CONTROLS = 200


def as_seen(scene: Scene, release: Release) -> membership.Target:
    """A release as its adversary sees it, public seeds included where rows were assigned by them."""
    seeds, config = None, scene.evidence.source.config
    if isinstance(release.claim, GaussianSums) and config is not None:
        seeds = np.asarray(public_seeds(scene.slm, config.fedkc.clusters)[1], np.float64)
    return membership.Target(
        np.asarray(release.tensors["centroids"], np.float64),
        np.asarray(release.tensors["sizes"], np.float64),
        release.claim,
        seeds,
        anywhere=config is None,  # who knows how another system grouped its rows
    )


def matched_controls(members: Texts, pool: Texts, rng: np.random.Generator) -> Texts:
    """Rows of the pool with the label proportions of the members, about twice as many.

    Raises NotEnough for fewer than `MIN_TRIALS` on either side.
    """
    names = {label: number for number, label in enumerate(dict.fromkeys(members.labels))}
    most = max(_CONTROLS_PER_MEMBER * len(members), _LEAST_CONTROLS)
    chosen = membership.match_labels(label_ids(members, names), label_ids(pool, names), rng, most)
    for what, count in (("rows behind centroids", len(members)), ("control rows", len(chosen))):
        if count < MIN_TRIALS:
            raise NotEnough(f"{count} {what} with matching labels, at least {MIN_TRIALS} are needed")
    return pool.take(chosen.tolist())


def _attack(scene: Scene, book: Book) -> None:
    rng = scene.rng(1)
    vectors = scene.own_vectors()
    predictions: NDArray[Any] = np.zeros((len(vectors), 0))
    if scene.evidence.source.config is not None:  # else the encoder at hand has no head that was trained
        predictions = head_probabilities(scene.slm, vectors.copy())
    measure_proposition(scene, vectors, predictions, book)
    controls = matched_controls(scene.rows.take(scene.members), scene.controls, rng)
    target, auxiliary = as_seen(scene, scene.release), scene.vectors(scene.auxiliary)
    members = vectors[scene.members]
    scores = membership.attack(target, auxiliary, members, scene.vectors(controls), rng)
    game = Game(
        number=1,
        adversary=MEMBERSHIP,
        ratio=RATIO,
        dot=DOT,
        target=f"{len(target.sizes)} pooled centroids",
        mu=replace_one_mu(target.claim) if isinstance(target.claim, GaussianSums) else None,
        reason=None if isinstance(target.claim, GaussianSums) else NO_CLAIM,
        delta=target.claim.delta if isinstance(target.claim, GaussianSums) else 0.0,
    )
    details = {
        "rows": float(target.sizes.mean()),
        "smallest_cluster": float(target.sizes.min()),
        **claim_details(target),
    }
    seen = target.anywhere | (membership.assign(members, target, auxiliary) >= 0)
    details["by_centroid"] = _by_centroid(scene, target, scores, seen)
    book.figures += membership_figures(
        at(scene.recorded, scene.release.claim), game, scores, details, scene.rng(101)
    )


def _by_centroid(
    scene: Scene, target: membership.Target, scores: membership.Scores, seen: NDArray[np.bool_]
) -> list[dict[str, float]]:
    """How exposed each centroid's rows are: which share of them scores above 99 of 100 control rows."""
    members, others = scores.ratio
    if not len(others) or not len(members):
        return []
    behind = np.repeat(np.arange(len(scene.groups)), [len(group) for group in scene.groups])[seen]
    above = members > np.quantile(others, 1 - FPR)
    return [
        {
            "centroid": float(c + 1),
            "rows": float(target.sizes[c]),
            "members": float((behind == c).sum()),
            "found": float(above[behind == c].mean()),
        }
        for c in range(len(target.sizes))
        if (behind == c).any()
    ]


def measure_proposition(scene: Scene, vectors: NDArray[Any], predictions: NDArray[Any], book: Book) -> None:
    """Proposition 1 on a release's true groups, into the book."""
    if scene.members:  # where noise alone kept every centroid there is no scatter to measure
        name = f"proposition 1, scatter within clusters <= total ({scene.where})"
        book.bounds.append(proposition_1(name, vectors, predictions, scene.groups))


@dataclass(frozen=True)
class Game:
    """What an attack on membership is, and what a claim allows in it.

    ratio, dot: names of its two ways to score, the second "" where there is one way. mu: Gaussian-DP
    parameter of the claims in the game, which is replace-one and about rows; None where nothing is claimed,
    for the `reason`. delta: of the bound on epsilon.
    """

    number: int
    adversary: Adversary
    ratio: str
    dot: str
    target: str
    mu: float | None
    reason: str | None
    delta: float


def claim_details(target: membership.Target) -> dict[str, Any]:
    """What the claim of one release says in the attack's game."""
    claim = target.claim
    if not isinstance(claim, GaussianSums):
        return {}
    mu = replace_one_mu(claim)
    return {
        "claim_adjacency": claim.adjacency,
        "claim_unit": claim.unit,
        "claim_epsilon_replace_one": gaussian_epsilon(mu, claim.delta),
        "claim_auc_cap": auc_cap(mu),
        "simulated": claim.simulated,
    }


def membership_figures(
    place: Mapping[str, Any],
    game: Game,
    scores: membership.Scores,
    details: Mapping[str, Any],
    rng: np.random.Generator,
) -> list[Figure]:
    """The three figures of an attack on membership. place: silo, round and claim_epsilon, see `figures.at`.

    The game is replace-one and about rows; a claim of either adjacency is converted to it. A claim about a
    unit of several rows bounds it too: a unit with one row exchanged is another unit.
    Raises NotEnough where too few candidates fall to a centroid that was released.
    """
    members, others = scores.ratio
    if min(len(members), len(others)) < MIN_TRIALS:
        raise NotEnough(
            f"{len(members)} members and {len(others)} controls fall to a centroid that was released, "
            f"fewer rows than the {MIN_TRIALS} of each that are needed"
        )
    errors = held_out_errors(members, others, rng, lambda found: epsilon_lower_bound(found, game.delta))
    shown = epsilon_lower_bound(errors, game.delta)
    told: dict[str, Any] = {
        **details,
        "members": len(members),
        "controls": len(others),
        "encoder_alone_auc": scores.encoder_alone[0],
    }
    mu = game.mu
    if mu is not None and game.delta > 0:
        told["claim_epsilon_replace_one"] = gaussian_epsilon(mu, game.delta)
    if mu is not None and scores.encoder_alone[1] > 0.5:
        # The round's model was trained on these rows and this claim does not cover it, whether it has one
        # of its own or not: what it shows by itself is composed with the claim (mu adds in squares)
        # before the claim is called broken.
        mu = float(np.hypot(mu, mu_of_auc(scores.encoder_alone[2])))
        told["encoder_in_cap"] = True

    def figure(attack: str, metric: str, measure: Measure, base: float, cap: float | None) -> Figure:
        area = metric == "auc"
        return Figure(
            attack=attack,
            number=game.number,
            adversary=game.adversary,
            target=game.target,
            metric=metric,
            measure=measure,
            baseline=base,
            cap=cap,
            cap_reason=game.reason,
            cap_curve=gaussian_curve(mu) if area and mu is not None else (),
            epsilon_lower_bound=shown if attack == game.ratio else None,
            adjacency="replace-one",
            bears_on=("singling_out", "linkability"),
            control=scores.encoder_alone[0] if area and attack == game.ratio else None,
            details=told,
            **place,
        )

    area = None if mu is None else auc_cap(mu)
    figures = [
        figure(game.ratio, "auc", Auc(members, others), 0.5, area),
        figure(
            game.ratio,
            "tpr_at_1_percent_fpr",
            RateAt(members, others, FPR),
            FPR,
            None if mu is None else tpr_cap(mu, FPR),
        ),
    ]
    return [*figures, figure(game.dot, "auc", Auc(*scores.dot), 0.5, area)] if game.dot else figures


ATTACK = Attack(
    1,
    RATIO,
    MEMBERSHIP,
    lacks(PayloadKind.CENTROIDS, "pooled centroid"),
    each_scene(1, RATIO, PayloadKind.CENTROIDS, _attack),
)
