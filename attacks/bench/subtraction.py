"""Attack 7 as it is put to a run: what a silo would learn of the others' rows from the sum of all centroids.

A federation that sends centroids to peers sends each silo's by itself, which attack 1 attacks. This is the
same round as if only the sum of all silos' parts had been opened: how much of the leak a sum takes away, and
how much it leaves to a silo that subtracts its own part.
"""

from __future__ import annotations

import numpy as np

from attacks import subtraction
from attacks.adversary import SUBTRACTION, NotEnough
from attacks.attack import Attack, Progress
from attacks.bench.membership import Game, as_seen, matched_controls, membership_figures
from attacks.bounds import replace_one_mu
from attacks.evidence import Evidence, Scene
from attacks.figures import NO_CLAIM, at
from attacks.judgement import Book
from attacks.runs import Texts
from attacks.subtraction import Part, part_of_means, subtract
from securefl.release import GaussianSums, PayloadKind

NAME = "membership in a sum less one's own part, likelihood ratio"
DOT = "membership in a sum less one's own part, dot product"


def _missing(evidence: Evidence) -> str | None:
    silos = {one.silo for one in evidence.targets if one.row.kind == PayloadKind.CENTROIDS.value}
    if not silos:
        return "no pooled centroid was released"
    return None if len(silos) > 1 else "one silo alone released centroids, so there is nothing to subtract"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    rounds: dict[int, list[Scene]] = {}
    for recorded, scene in evidence.scenes(PayloadKind.CENTROIDS):
        if isinstance(scene, Scene):
            rounds.setdefault(recorded.row.round, []).append(scene)
    together = [scenes for _, scenes in sorted(rounds.items()) if len(scenes) > 1]
    if not together:
        return
    # The last round's model knows the rows best, and every round is the same game.
    scenes = together[-1]
    say(0, f"round {scenes[0].recorded.row.round}: the sum of {len(scenes)} silos' centroids")

    def attempt(page: Book) -> None:
        try:
            _attack(scenes, page)
        except NotEnough as why:
            page.skip(NAME, scenes[-1].recorded, str(why))

    book.part(" ".join(["7", *(one.recorded.sha256 for one in scenes)]), attempt)


def _attack(scenes: list[Scene], book: Book) -> None:
    own, *others = scenes
    for scene in scenes:
        scene.own_vectors()
    rng = own.rng(7)
    claims = [scene.release.claim for scene in others]
    targets = [as_seen(scene, scene.release) for scene in scenes]
    parts = [part_of_means(target.centroids, target.sizes) for target in targets]
    seeds = targets[0].seeds
    if seeds is None or any(len(part.counts) != len(seeds) for part in parts):
        # Clusters of every silo's own, or some withheld: their numbers mean something else in each.
        parts, seeds = [part.pooled() for part in parts], None
    total = Part(
        np.sum([part.sums for part in parts], axis=0), np.sum([part.counts for part in parts], axis=0)
    )
    left = subtract(total, parts[0], claims, seeds)
    members = Texts.joined([scene.rows.take(scene.members) for scene in others])
    controls = matched_controls(members, own.controls, rng)
    auxiliary, vectors = own.vectors(own.auxiliary), own.vectors(controls)
    scores = subtraction.attack(left, auxiliary, own.vectors(members), vectors, rng)
    claim = left.target.claim
    noised = isinstance(claim, GaussianSums)
    game = Game(
        number=7,
        adversary=SUBTRACTION,
        ratio=NAME,
        dot=DOT,
        target=f"the sum of {len(scenes)} silos' pooled centroids, had only it been opened, less "
        f"{own.recorded.silo}'s part",
        mu=replace_one_mu(claim) if isinstance(claim, GaussianSums) else None,
        reason=None if noised else NO_CLAIM,
        delta=claim.delta if isinstance(claim, GaussianSums) else 0.0,
    )
    details = {
        "silos": len(scenes),
        "rows": float(left.target.sizes.mean()),
        "sums": len(left.target.sizes),
        "by_cluster": seeds is not None,
    }
    place = at(others[-1].recorded, claim)
    book.figures += membership_figures(place, game, scores, details, own.rng(701))


ATTACK = Attack(7, NAME, SUBTRACTION, _missing, _run)
