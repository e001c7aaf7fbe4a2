"""Attacks 5 and 13 as they are put to a run: which tokens, and which labels, are behind pooled centroids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attacks import attribute_probe, bag_probe, membership
from attacks.adversary import ATTRIBUTE, BAG, NotEnough
from attacks.attack import Attack, Progress, each_scene, lacks
from attacks.bench.membership import as_seen
from attacks.dictionary import Ids, special_ids, token_ids, vocabulary_size
from attacks.evidence import Evidence, Scene, label_ids
from attacks.figures import MIN_TRIALS, NO_CLAIM, UNBOUNDED, Auc, Figure, Proportion, Ratio, at
from attacks.findings import ALL_SILOS
from attacks.judgement import Book
from attacks.runs import Texts
from attacks.simulated import enough_rows
from attacks.token_scores import Overlap, overlap
from securefl.release import Claim, GaussianSums, PayloadKind

BAG_NAME = "bag-of-words probe"
ATTRIBUTE_NAME = "attribute probe"
# Simulated groups for a fit: half of the probes' own number, since an audit has many releases.
_GROUPS = 2048
_OF_GROUPS = "a claim bounds what one unit changes, and this is of a whole group"


def _cells(target: membership.Target, auxiliary: NDArray[np.float32]) -> Ids | None:
    """Where rows were clustered, a simulated group is to come from one cell too."""
    if len(target.centroids) < 2 or target.anywhere:
        return None
    return membership.assign(auxiliary, target, auxiliary)


def _reason(claim: Claim, why: str) -> str:
    return why if isinstance(claim, GaussianSums) else NO_CLAIM


def _known(scene: Scene, target: membership.Target) -> Texts:
    """As much auxiliary text as a probe of the release's largest centroid learns from."""
    return scene.some_auxiliary(enough_rows(float(target.sizes.max(initial=1.0))))


def _strangers(scene: Scene, attack: int) -> list[list[int]]:
    """For each centroid as many control rows as are behind it: what the probe's guess is no guess at."""
    rng = scene.rng(attack)
    return [rng.permutation(len(scene.controls))[: len(group)].tolist() for group in scene.groups]


def _bag(scene: Scene, book: Book) -> None:
    scene.own_vectors()
    slm, target = scene.slm, as_seen(scene, scene.release)
    known, special = _known(scene, target), special_ids(slm)
    auxiliary = scene.vectors(known)
    found = bag_probe.read(
        target, auxiliary, token_ids(slm, known.texts), vocabulary_size(slm), special, scene.rng(5),
        cells=_cells(target, auxiliary), groups=_GROUPS,
    )  # fmt: skip

    def behind(part: Texts, groups: list[list[int]]) -> list[Ids]:
        return [bag_probe.token_set(token_ids(slm, part.take(rows).texts), special) for rows in groups]

    truth, others = behind(scene.rows, scene.groups), behind(scene.controls, _strangers(scene, 501))

    def compared(guesses: Sequence[Ids], against: Sequence[Ids], rare: bool) -> Overlap:
        only = found.is_rare if rare else None
        return overlap([[ids] for ids in guesses], [[ids] for ids in against], special, only)

    every, prior, control = (
        compared(found.guesses, truth, False),
        compared(found.prior, truth, False),
        compared(found.guesses, others, False),
    )
    if every.true.sum() < MIN_TRIALS:
        raise NotEnough(f"fewer than {MIN_TRIALS} tokens are behind the centroids")
    seed = int(scene.rng(502).integers(2**31))
    details = {"rows": float(target.sizes.mean()), "recall": every.recall, "centroids": len(truth)}
    place = at(scene.recorded, target.claim)
    reason = _reason(target.claim, UNBOUNDED)
    hits, totals = 2 * every.hits, every.true + every.guessed
    book.figures.append(
        Figure(
            attack=BAG_NAME,
            number=5,
            adversary=BAG,
            target=f"{len(truth)} pooled centroids",
            metric="token_f1",
            measure=Ratio(hits, totals, int(every.true.sum()), seed),
            baseline=prior.f1,
            cap_reason=reason,
            bears_on=("inference",),
            control=control.f1 if control.true.sum() else None,
            details=details,
            **place,
        )
    )
    rare, guess = compared(found.rare, truth, True), compared(found.rare_prior, truth, True)
    if rare.true.sum() < MIN_TRIALS:
        return
    other = compared(found.rare, others, True)
    book.figures.append(
        Figure(
            attack=BAG_NAME,
            number=5,
            adversary=BAG,
            target=f"{len(truth)} pooled centroids",
            metric="rare_token_recall",
            measure=Ratio(rare.hits, rare.true, int(rare.true.sum()), seed),
            baseline=guess.recall if guess.true.sum() else 0.0,
            cap_reason=reason,
            bears_on=("inference", "singling_out"),
            control=other.recall if other.true.sum() else None,
            details={**details, "guessed": float(rare.guessed.sum())},
            **place,
        )
    )


def _run_attribute(evidence: Evidence, book: Book, say: Progress) -> None:
    rounds: dict[int, list[Scene]] = {}
    for recorded, scene in evidence.scenes(PayloadKind.CENTROIDS):
        if isinstance(scene, Scene):
            rounds.setdefault(recorded.row.round, []).append(scene)
    if not rounds:
        return
    # A centroid is one trial, and later rounds are about the same rows: all silos of the last round.
    scenes = rounds[max(rounds)]
    say(0, f"round {max(rounds)}: the label behind a centroid")

    def attempt(page: Book) -> None:
        try:
            _attribute(scenes, page)
        except NotEnough as why:
            page.skip(ATTRIBUTE_NAME, scenes[-1].recorded, str(why))

    book.part(" ".join(["13", *(one.recorded.sha256 for one in scenes)]), attempt)


def _attribute(scenes: list[Scene], book: Book) -> None:
    names = {label: i for i, label in enumerate(sorted(set(scenes[0].auxiliary.labels)))}
    right = guessed = trials = 0
    sides: dict[int, tuple[list[float], list[float]]] = {}
    blind: dict[int, tuple[list[float], list[float]]] = {}
    for scene in scenes:
        scene.own_vectors()
        target = as_seen(scene, scene.release)
        known = _known(scene, target)
        auxiliary, labels = scene.vectors(known), label_ids(known, names)
        found = attribute_probe.read(
            target, auxiliary, labels, scene.rng(13), cells=_cells(target, auxiliary), groups=_GROUPS
        )
        whose = [_labels(scene.rows.labels, group, names) for group in scene.groups]
        kept = np.array([c for c, group in enumerate(whose) if len(group)], np.int64)
        if not len(kept):
            continue
        found = attribute_probe.Attributes(
            found.values, found.bases, found.chances[kept], found.priors[kept], found.unasked
        )
        truth = found.truth([whose[c] for c in kept])
        strangers = _strangers(scene, 1301)
        others = [_labels(scene.controls.labels, strangers[c], names) for c in kept]
        wrong = found.truth(others)
        right += int(((found.chances > 0) == truth).sum())
        # The majority of the true answers: at least what any guess without the centroids reaches.
        guessed += int(np.maximum(truth.sum(0), (~truth).sum(0)).sum())
        trials += truth.size
        for value in found.values.tolist():
            for pair, game in ((sides, truth), (blind, wrong)):
                for side, new in zip(pair.setdefault(value, ([], [])), found.sides(game, value), strict=True):
                    side.extend(new.tolist())
    if trials < MIN_TRIALS:
        raise NotEnough(f"{trials} answers on centroids, {MIN_TRIALS} are needed")
    claim = scenes[-1].release.claim
    words = {number: label for label, number in names.items()}
    number = sum(len(scene.groups) for scene in scenes)
    place = at(scenes[-1].recorded, claim)
    if len(scenes) > 1:
        place["silo"] = ALL_SILOS

    def figure(
        metric: str, measure: Auc | Proportion, baseline: float, control: float | None = None, **more: str
    ) -> Figure:
        return Figure(
            attack=ATTRIBUTE_NAME,
            number=13,
            adversary=ATTRIBUTE,
            target=f"the labels behind {number} pooled centroids of {len(scenes)} silos",
            metric=metric,
            measure=measure,
            baseline=baseline,
            cap_reason=_reason(claim, _OF_GROUPS),
            bears_on=("inference",),
            control=control,
            details={"centroids": number, **more},
            **place,
        )

    book.figures.append(figure("accuracy", Proportion(right, trials), guessed / trials))
    for value, (yes, no) in sides.items():
        if min(len(yes), len(no)) < MIN_TRIALS:
            continue
        other = blind[value]
        control = Auc(np.array(other[0]), np.array(other[1])).value if all(other) else None
        area = Auc(np.array(yes), np.array(no))
        book.figures.append(figure("auc", area, 0.5, control=control, attribute=words[value]))


def _labels(labels: Sequence[str], group: Sequence[int], names: dict[str, int]) -> Ids:
    return np.array([names[labels[row]] for row in group if labels[row] in names], np.int64)


BAG_ATTACK = Attack(
    5,
    BAG_NAME,
    BAG,
    lacks(PayloadKind.CENTROIDS, "pooled centroid"),
    each_scene(5, BAG_NAME, PayloadKind.CENTROIDS, _bag, last=True),
)
ATTRIBUTE_ATTACK = Attack(
    13, ATTRIBUTE_NAME, ATTRIBUTE, lacks(PayloadKind.CENTROIDS, "pooled centroid"), _run_attribute
)
