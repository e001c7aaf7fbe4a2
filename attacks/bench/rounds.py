"""Attack 6 as it is put to a run: the rows of a silo over all the rounds in which it shared centroids.

Two figures. The rows' scores summed over the rounds; and, played by the auditor on the run's last release,
one row leaving between two rounds: the release is made again without it, with noise drawn anew as claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from attacks import membership, rounds
from attacks.adversary import DIFFERENCE, ROUNDS, NotEnough
from attacks.attack import Attack, Progress
from attacks.bench.membership import Game, as_seen, claim_details, matched_controls, membership_figures
from attacks.bounds import auc, auc_interval, replace_one_mu
from attacks.evidence import Evidence, Scene
from attacks.figures import MIN_TRIALS, NO_CLAIM, at
from attacks.judgement import Book
from attacks.membership import Target, clipped
from attacks.runs import Texts
from securefl.release import ROW, GaussianSums, PayloadKind

OVER_ROUNDS = "membership over several rounds, likelihood ratio"
OVER_ROUNDS_DOT = "membership over several rounds, dot product"
LEFT = "membership, a row that left between two rounds"
_GAMES = 48


def _missing(evidence: Evidence) -> str | None:
    kinds = {one.row.kind for one in evidence.targets}
    return None if PayloadKind.CENTROIDS.value in kinds else "no pooled centroid was released"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    by_silo: dict[str, list[Scene]] = {}
    last: Scene | None = None
    for recorded, scene in evidence.scenes(PayloadKind.CENTROIDS):
        if isinstance(scene, Scene):
            by_silo.setdefault(recorded.silo, []).append(scene)
            last = scene
    for done, (silo, scenes) in enumerate(sorted(by_silo.items())):
        say(done / (len(by_silo) + 1), f"{silo}: membership over {len(scenes)} rounds")
        name = " ".join(["6", silo, *(one.recorded.sha256 for one in scenes)])
        book.part(name, _attempt(OVER_ROUNDS, scenes[-1], partial(_summed, scenes)))
    if last is not None:
        say(len(by_silo) / (len(by_silo) + 1), f"{last.where}: a row that leaves")
        book.part("6 left", _attempt(LEFT, last, partial(_left, last)))


def _attempt(name: str, scene: Scene, work: Callable[[Book], None]) -> Callable[[Book], None]:
    def attempt(page: Book) -> None:
        try:
            work(page)
        except NotEnough as why:
            page.skip(name, scene.recorded, str(why))

    return attempt


def _summed(scenes: list[Scene], book: Book) -> None:
    if len(scenes) < 2:
        raise NotEnough("centroids were shared in one round only")
    last, first = scenes[-1], scenes[0]
    for scene in scenes:
        scene.own_vectors()
    members = sorted({row for scene in scenes for row in scene.members})
    controls = matched_controls(last.rows.take(members), last.controls, last.rng(6))
    texts: Texts = last.rows.take(members)
    # One by one: each round's encoder has vectors of its own for the whole pool.
    seen = (
        rounds.Round(
            as_seen(scene, scene.release),
            scene.vectors(scene.auxiliary),
            scene.vectors(texts),
            scene.vectors(controls),
        )
        for scene in scenes
    )
    scores = rounds.attack(seen, last.rng(601))
    claims = [scene.release.claim for scene in scenes]
    mu, reason = rounds.composed_mu(claims, "replace-one")
    noised = [claim for claim in claims if isinstance(claim, GaussianSums)]
    game = Game(
        number=6,
        adversary=ROUNDS,
        ratio=OVER_ROUNDS,
        dot=OVER_ROUNDS_DOT,
        target=f"pooled centroids of {len(scenes)} rounds, {first.recorded.row.round} to "
        f"{last.recorded.row.round}",
        mu=mu,
        reason=reason if noised else NO_CLAIM,
        delta=noised[-1].delta if noised else 0.0,
    )
    sizes = [np.asarray(scene.release.tensors["sizes"], np.float64).mean() for scene in scenes]
    details = {"rounds": len(scenes), "rows": float(np.mean(sizes))}
    book.figures += membership_figures(
        at(last.recorded, last.release.claim), game, scores, details, last.rng(602)
    )


def _left(scene: Scene, book: Book) -> None:
    """The game, played `_GAMES` times: a row leaves, or a stranger's is said to have left."""
    rng, target = scene.rng(603), as_seen(scene, scene.release)
    claim = target.claim
    if isinstance(claim, GaussianSums) and claim.unit != ROW:
        raise NotEnough(f"the game is about one row, and the release's unit is {claim.unit}")
    vectors, auxiliary = scene.own_vectors(), scene.vectors(scene.auxiliary)
    leavers = [(c, row) for c, group in enumerate(scene.groups) if len(group) > 2 for row in group]
    if len(leavers) < MIN_TRIALS:
        raise NotEnough(
            f"{len(leavers)} rows could leave a cluster of more than two, {MIN_TRIALS} are needed"
        )
    chosen = rng.permutation(len(leavers))[:_GAMES].tolist()
    rows = [leavers[i][1] for i in chosen]
    strangers = matched_controls(scene.rows.take(rows), scene.controls, rng)
    others = scene.vectors(strangers)
    background = membership.fit_background(auxiliary, target)
    sides: dict[str, tuple[list[float], list[float]]] = {"left": ([], []), "stayed": ([], [])}
    for i in chosen:
        cell, row = leavers[i]
        # Where another row leaves, this one shows what the encoder and the remaining rows give away.
        other = leavers[int(rng.integers(len(leavers)))]
        for what, (c, who) in {"left": (cell, row), "stayed": other}.items():
            if what == "stayed" and who == row:
                continue
            after = _without(target, c, vectors[who], rng)
            candidates = np.stack([vectors[row], others[int(rng.integers(len(others)))]])
            found = rounds.difference(target, after, auxiliary, candidates, came=False, background=background)
            for side, score in zip(sides[what], found, strict=True):
                side.append(float(score))
    left, stayed = ((np.array(a), np.array(b)) for a, b in (sides["left"], sides["stayed"]))
    alone = (auc(*stayed), *auc_interval(*stayed)) if len(stayed[0]) > 1 else (0.5, 0.0, 1.0)
    noised = isinstance(claim, GaussianSums)
    game = Game(
        number=6,
        adversary=DIFFERENCE,
        ratio=LEFT,
        dot="",
        target=f"two releases, a row of {len(target.sizes)} pooled centroids missing in the second",
        mu=replace_one_mu(claim) if isinstance(claim, GaussianSums) else None,
        reason=None if noised else NO_CLAIM,
        delta=claim.delta if isinstance(claim, GaussianSums) else 0.0,
    )
    scores = membership.Scores(left, left, alone)
    details = {"rows": float(target.sizes.mean()), "games": len(left[0]), **claim_details(target)}
    book.figures += membership_figures(at(scene.recorded, claim), game, scores, details, scene.rng(604))


def _without(target: Target, cell: int, row: NDArray[np.float32], rng: np.random.Generator) -> Target:
    """The release of the next round, one row of a cell gone: new noise where there is a claim."""
    sums, sizes = target.centroids * target.sizes[:, None], target.sizes.copy()
    moved = np.zeros_like(sums)
    moved[cell] = clipped(np.asarray(row[None], np.float64), target.claim)[0]
    gone = np.zeros(len(sizes))
    gone[cell] = 1
    if isinstance(target.claim, GaussianSums):
        # Of the sums that were released only their noisy values are known here. Their noise must not be in
        # the second release, so it is taken to have been drawn twice as a difference: N(0, 2 sigma^2) in all.
        deviation = np.sqrt(2) * target.claim.clip * target.claim.noise_multiplier
        moved = moved - rng.normal(0, deviation, sums.shape)
        gone = gone - rng.normal(0, np.sqrt(2) * target.claim.count_multiplier, len(sizes))
    after = np.maximum(sizes - gone, 1.0)
    return Target((sums - moved) / after[:, None], after, target.claim, target.seeds)


ATTACK = Attack(6, OVER_ROUNDS, ROUNDS, _missing, _run)
