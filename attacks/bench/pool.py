"""Attack 8 as it is put to a run: the rows behind each pooled centroid, looked for in a pool of texts.

The pool is what an outsider might hold: the silo's rows among the control rows, which are strangers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attacks import membership, pool_search
from attacks.adversary import POOL, NotEnough
from attacks.attack import Attack, Progress, each_scene, lacks
from attacks.bench.membership import as_seen
from attacks.bounds import auc, auc_interval, mu_of_auc, replace_one_mu
from attacks.evidence import Evidence, Scene
from attacks.figures import MIN_TRIALS, NO_CLAIM, NO_NOISE, Figure, Proportion, at
from attacks.judgement import Book
from attacks.membership import Background, Target, fit_background
from attacks.pool_search import Ranking, Retrieval, decompose, rank, recall_cap, retrieve
from attacks.runs import Recorded, Texts
from securefl.errors import ProtocolError
from securefl.privacy import gaussian_epsilon
from securefl.release import GaussianSums, NonPrivate, PayloadKind

RANKING = "search of a text pool, ranking"
TOGETHER = "search of a text pool, least squares"
NAMED = "search of a text pool, vectors that name themselves"
# Invented releases that show what the encoder alone tells, and rows shown to an auditor who asks.
_DRAWS = 4
_SHOWN = 20
# Of vectors of which nobody says how many texts they are the mean of.
_MOST_ROWS = 12
# Of means of texts the figure is about 1; of another encoder's vectors some tens.
_FAR = 4.0


def _attack(scene: Scene, book: Book) -> None:
    scene.own_vectors()
    # Identical texts would tie and share their weight, so each stands in the pool once.
    place = {text: i for i, text in enumerate(dict.fromkeys((*scene.rows.texts, *scene.controls.texts)))}
    texts = tuple(place)
    pool = scene.vectors(Texts(texts, texts, ("",) * len(texts)))
    behind = [sorted({place[scene.rows.texts[row]] for row in group}) for group in scene.groups]
    members = np.array(sorted({row for group in behind for row in group}), np.int64)
    strangers = np.setdiff1d([place[text] for text in scene.controls.texts], members)
    for what, count in (("different texts are behind the centroids", len(members)),
                        ("other texts are in the pool", len(strangers))):  # fmt: skip
        if count < MIN_TRIALS:
            raise NotEnough(f"{count} {what}, {MIN_TRIALS} are needed")
    target, auxiliary = as_seen(scene, scene.release), scene.vectors(scene.auxiliary)
    background = fit_background(auxiliary, target)
    ranking = rank(pool, target, background, auxiliary)
    order = ranking.order()
    beside = _encoder_alone(scene, pool, target, background, auxiliary, members, strangers)
    # As many strangers as there are members, so that chance finds about as many of either.
    some = scene.rng(803).permutation(strangers)[: min(len(members), max(1, len(strangers) // 2))]
    control = pool_search.retrieve_controls(order, members, some, len(some)).recall
    found = retrieve(order, members, len(members), len(pool))
    book.figures.append(_figure(scene, RANKING, [found], control, beside, ()))

    parts, certain, named = _together(pool, ranking, target, background, behind)
    if sum(part.members for part in parts) < MIN_TRIALS:
        why = "no cluster has as few rows as a vector has numbers and lies whole in the pool"
        book.skip(TOGETHER, scene.recorded, why)
        return
    empty = membership.invent(target, background, scene.rng(801))
    missing = rank(pool, empty, background, auxiliary)
    nothing, _, _ = _together(pool, missing, empty, background, behind)
    missed = sum(part.hits for part in nothing) / max(1, sum(part.members for part in nothing))
    figure = _figure(scene, TOGETHER, parts, missed, beside, tuple(texts[row] for row in named[:_SHOWN]))
    figure.details.update(centroids=len(parts), certain_centroids=certain)
    book.figures.append(figure)


def _together(
    pool: NDArray[np.float32],
    ranking: Ranking,
    target: Target,
    background: Background,
    behind: Sequence[Sequence[int]],
) -> tuple[list[Retrieval], int, list[int]]:
    """Each cluster by itself; how many are certain, and the rows that were named with certainty first."""
    parts: list[Retrieval] = []
    sure: list[int] = []
    likely: list[int] = []
    certain = 0
    for cell, own in enumerate(behind):
        if not own:
            continue
        try:
            one = decompose(pool, ranking, target, background, cell)
        except NotEnough:
            continue
        certain += one.certain
        (sure if one.certain else likely).extend(one.indices.tolist())
        parts.append(retrieve(one.indices, np.array(own), len(one.indices), len(pool)))
    return parts, certain, [*sure, *likely]


def _encoder_alone(
    scene: Scene,
    pool: NDArray[np.float32],
    target: Target,
    background: Background,
    auxiliary: NDArray[np.float32],
    members: pool_search.Indices,
    strangers: pool_search.Indices,
) -> float:
    """Gaussian-DP parameter of what the round's encoder, trained on the rows, tells by itself; 0 if nothing.

    The claim of the release does not cover it, so it is composed with the claim before the cap is taken.
    """
    rng, seen = scene.rng(8), []
    for _ in range(_DRAWS):
        scores = rank(pool, membership.invent(target, background, rng), background, auxiliary).scores
        own, others = scores[members], scores[strangers]
        own, others = own[np.isfinite(own)], others[np.isfinite(others)]
        if min(len(own), len(others)) > 1:
            seen.append((auc(own, others), *auc_interval(own, others)))
    if not seen:
        return 0.0
    _, low, high = np.mean(seen, axis=0).tolist()
    return mu_of_auc(high) if low > 0.5 else 0.0


def _figure(
    scene: Scene,
    name: str,
    parts: Sequence[Retrieval],
    control: float,
    beside: float,
    texts: tuple[str, ...],
) -> Figure:
    hits, members, chosen = (
        sum(getattr(part, field) for part in parts) for field in ("hits", "members", "k")
    )
    pool = parts[0].pool
    cap, reason = recall_cap(scene.release.claim, Retrieval(hits, chosen, members, pool), beside)
    guess = sum(part.recall_baseline * part.members for part in parts) / members
    claim = scene.release.claim
    game = {}
    if isinstance(claim, GaussianSums):
        game["claim_epsilon_replace_one"] = gaussian_epsilon(replace_one_mu(claim), claim.delta)
    return Figure(
        attack=name,
        number=8,
        adversary=POOL,
        target=f"{len(scene.groups)} pooled centroids, in a pool of {pool:,} texts",
        metric="recall",
        measure=Proportion(hits, members),
        baseline=guess,
        cap=cap,
        cap_reason=reason,
        adjacency="replace-one",
        bears_on=("singling_out", "linkability"),
        control=control,
        texts=texts,
        details={
            "pool": pool,
            "chosen": chosen,
            "precision": hits / chosen,
            "rows": float(np.mean(scene.release.tensors["sizes"])),
            "encoder_in_cap": beside > 0,
            **game,
        },
        **at(scene.recorded, scene.release.claim),
    )


def _blind(scene: Scene, book: Book) -> None:
    """Where nobody says which rows are behind the vectors: those that a sum of pool texts proves.

    Nothing is scored, so nothing is said but what needs no truth: weights of 0 and 1 with nothing left. That
    no vector names itself says nothing of what could be read with more, and is no figure.
    """
    texts = tuple(dict.fromkeys(scene.auxiliary.texts))
    pool = scene.vectors(Texts(texts, texts, ("",) * len(texts)))
    target = as_seen(scene, scene.release)
    claim, noised = target.claim, isinstance(target.claim, GaussianSums)
    # Sizes and a claim of noise are what the file says, and not believed.
    target = replace(target, claim=NonPrivate(reason="read as if there were no noise"))
    count, width = target.centroids.shape
    if count < MIN_TRIALS:
        raise NotEnough(f"{count} vectors, {MIN_TRIALS} are needed")
    if width != pool.shape[1]:
        raise ProtocolError(
            f"{scene.recorded.path}: its vectors have {width} numbers, and those of the encoder "
            f"{pool.shape[1]}: it was made with another one"
        )
    stated = getattr(scene.evidence.source, "sizes_known", True) and not noised
    named: dict[int, list[int]] = {}
    invented = 0
    background = fit_background(pool, target)
    # The sizes of the file, and, where it has none or nothing adds up, one after the other.
    for size in range(0 if stated else 1, _MOST_ROWS + 1):
        aim = replace(target, sizes=np.full(count, float(size))) if size else target
        for vector, rows in _certain(pool, aim, background).items():
            named.setdefault(vector, rows)
        empty = membership.invent(aim, background, scene.rng(802 + size))
        invented += len(_certain(pool, empty, background))
        if stated and named:
            break
    if not named and noised:
        raise NotEnough(
            "under its noise no sum of texts proves itself; give the rows behind the vectors (--rows)"
        )
    if not named:
        most = np.full(count, float(_MOST_ROWS))
        _check_encoder(scene, target if stated else replace(target, sizes=most), background)
        tried = f"1 to {_MOST_ROWS} texts of the pool" + (", or as many as its size says" if stated else "")
        raise NotEnough(
            f"no vector is exactly the mean of {tried}: the pool does not hold its texts, or it was rounded, "
            "or the encoder read other lengths; what could be read is not known without the rows (--rows)"
        )
    first = [row for rows in named.values() for row in rows]
    book.figures.append(
        Figure(
            attack=NAMED,
            number=8,
            adversary=POOL,
            target=f"{count} vectors, in a pool of {len(pool):,} texts",
            metric="vectors_named",
            measure=Proportion(len(named), count),
            baseline=0.0,
            cap_reason=NO_NOISE if noised else NO_CLAIM,
            bears_on=("singling_out", "linkability"),
            control=invented / count,
            texts=tuple(texts[row] for row in first[:_SHOWN]),
            details={"pool": len(pool), "rows": float(np.mean([len(rows) for rows in named.values()]))},
            **at(scene.recorded, claim),
        )
    )


def _certain(pool: NDArray[np.float32], target: Target, background: Background) -> dict[int, list[int]]:
    """The vectors that are sums of texts of the pool beyond doubt, with the texts."""
    ranking = rank(pool, target, background, pool)
    found = {}
    for cell in range(len(target.centroids)):
        try:
            one = decompose(pool, ranking, target, background, cell)
        except NotEnough:
            continue
        if one.certain:
            found[cell] = one.indices.tolist()
    return found


def _check_encoder(scene: Scene, target: Target, background: Background) -> None:
    """Raises ProtocolError for vectors that are no means of texts under this encoder.

    Mahalanobis distances in units of what a mean of so many texts varies along each axis, of which those of
    least variance hold all texts of one encoder together.
    """
    gaps = (target.centroids - background.means) @ background.basis
    variances = background.variances + 1e-6 * background.variances.max()
    spread = variances * (1 / target.sizes + 1 / background.support)[:, None]
    off = float(np.sqrt((gaps**2 / spread).mean(1)).mean())
    if off > _FAR:
        raise ProtocolError(
            f"{scene.recorded.path}: its vectors are {off:.0f} times as far from those of the pool as means "
            "of so many texts are: they are of another encoder, or their sizes are wrong; attacked so they "
            "would seem safe"
        )


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    if evidence.source.truth:
        each_scene(8, RANKING, PayloadKind.CENTROIDS, _attack)(evidence, book, say)
        return
    for recorded in evidence.targets:
        say(0, f"{recorded.path.name}: search of a pool")

        def attempt(page: Book, recorded: Recorded = recorded) -> None:
            try:
                _blind(evidence.blind(recorded), page)
            except NotEnough as why:
                page.skip(NAMED, recorded, str(why))

        book.part(f"8 {recorded.sha256}", attempt)


ATTACK = Attack(8, RANKING, POOL, lacks(PayloadKind.CENTROIDS, "pooled centroid"), _run)
