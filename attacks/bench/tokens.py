"""Attack 2 as it is put to a run: every embedding-layer centroid release, all over one dictionary at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks import membership, tokens
from attacks.adversary import TOKENS, NotEnough
from attacks.attack import Attack, Progress
from attacks.bench.membership import measure_proposition
from attacks.bounds import ratio_interval
from attacks.evidence import Evidence, Scene, check_truth
from attacks.figures import MIN_TRIALS, NO_CLAIM, Figure
from attacks.findings import Question
from attacks.judgement import Book
from attacks.runs import Recorded
from securefl.release import GaussianSums, PayloadKind, canonical_json
from securefl.training import embed, probabilities

NAME = "token recovery"
_UNBOUNDED = "(epsilon, delta) bounds what one unit changes; most recovered tokens are shared by many rows"


def _missing(evidence: Evidence) -> str | None:
    kinds = {one.row.kind for one in evidence.targets}
    if PayloadKind.EMBEDDING_CENTROIDS.value in kinds:
        return None
    return "no embedding-layer centroid was released"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    ready = []
    for recorded, scene in evidence.scenes(PayloadKind.EMBEDDING_CENTROIDS):
        try:
            if isinstance(scene, NotEnough):
                raise scene
            ready.append(_prepare(scene, book))
        except NotEnough as why:
            book.skip(NAME, recorded, str(why))
    _recover(ready, book, say)


@dataclass(frozen=True, repr=False)
class _TokenScene:
    """One embedding-layer release ready for attack 2; truth and others are for the scoring."""

    scene: Scene
    rng: np.random.Generator
    target: tokens.Target
    truth: list[list[tokens.Ids]]
    others: list[list[tokens.Ids]]


def _prepare(scene: Scene, book: Book) -> _TokenScene:
    slm, release = scene.slm, scene.release
    vectors, mask = embed(slm, scene.rows.texts, "embeddings")
    membership.check_vectors(vectors[mask > 0], "the embedding layer")
    check_truth(scene, vectors, mask)
    measure_proposition(scene, vectors, probabilities(slm, scene.rows.texts), book)
    tensors = {name: np.asarray(release.tensors[name], np.float32) for name in ("centroids", "mask", "sizes")}
    target = tokens.Target(**tensors, claim=release.claim)
    positions = target.centroids.shape[1]
    own, strangers = (tokens.token_ids(slm, part.texts) for part in (scene.rows, scene.controls))
    truth = [tokens.by_position([own[row] for row in group], positions) for group in scene.groups]
    if sum(len(ids) for row in truth for ids in row) < MIN_TRIALS:
        raise NotEnough(f"fewer than {MIN_TRIALS} tokens are behind the centroids")
    others, rng = [], scene.rng(2)
    for group in scene.groups:
        drawn = rng.permutation(len(strangers))[: len(group)]
        others.append(tokens.by_position([strangers[row] for row in drawn], positions))
    return _TokenScene(scene, rng, target, truth, others)


def _recover(ready: list[_TokenScene], book: Book, say: Progress) -> None:
    """Attack 2 on all releases over one dictionary at once: they share its cost."""
    groups: dict[str, list[_TokenScene]] = {}
    for one in ready:
        info = one.scene.release.info
        table = info["encoder"] if one.scene.evidence.run.config.slm.train_embeddings else info["base_sha256"]
        noise = one.target.claim.model_dump(mode="json", exclude={"reason"})
        key = canonical_json([table, noise, list(one.target.centroids.shape[1:])]).decode()
        groups.setdefault(key, []).append(one)
    for number, group in enumerate(groups.values()):
        slm, auxiliary = group[0].scene.slm, group[0].scene.auxiliary
        parts = [one.target for one in group]
        together = tokens.Target(
            np.concatenate([part.centroids for part in parts]),
            np.concatenate([part.mask for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            parts[0].claim,
        )
        positions = together.centroids.shape[1]
        known = tokens.token_ids(slm, auxiliary.texts)
        prior = tokens.fit_prior(known, positions, tokens.vocabulary_size(slm))

        def tell(share: float, number: int = number, all_: int = len(groups)) -> None:
            say((number + share) / all_, "reading tokens back")

        recovered = tokens.recover(slm, together, prior, auxiliary.texts, tell)
        start = 0
        for one in group:
            part = recovered.part(start, start + len(one.truth))
            start += len(one.truth)
            book.figures += token_figures(
                one.scene.recorded, one.target, prior, part, one.truth, one.others,
                tokens.special_ids(slm), one.rng,
            )  # fmt: skip


def token_figures(
    recorded: Recorded,
    target: tokens.Target,
    prior: tokens.Prior,
    recovered: tokens.Recovered,
    truth: list[list[tokens.Ids]],
    others: list[list[tokens.Ids]],
    special: frozenset[int],
    rng: np.random.Generator,
) -> list[Figure]:
    """The figures of attack 2: recall of each centroid, F1 and recall of rare tokens over all of them.

    truth, others: [centroid][position] tokens of the rows behind it, and of as many rows that are nobody's.
    """
    counts = tokens.expected_counts(target, prior)
    guesses = tokens.guesses(prior, counts)
    seed = int(rng.integers(2**31))
    figures: list[Figure] = []

    def figure(
        metric: str, name: str, found: tokens.Overlap, base: float, control: tokens.Overlap, **details: Any
    ) -> None:
        f1 = metric == "token_f1"
        # Few rows can have tokens that no other text has: names, identifiers.
        rare: tuple[Question, ...] = ("singling_out",) if metric == "rare_token_recall" else ()
        hits, totals = (2 * found.hits, found.true + found.guessed) if f1 else (found.hits, found.true)
        figures.append(
            Figure(
                NAME,
                2,
                TOKENS,
                name,
                metric,
                float(hits.sum() / totals.sum()),
                lambda alpha: ratio_interval(hits, totals, np.random.default_rng(seed), alpha),
                base,
                None,
                _UNBOUNDED if isinstance(target.claim, GaussianSums) else NO_CLAIM,
                int(found.true.sum()),
                None,
                None,
                recorded,
                target.claim,
                {"units": len(hits), **details},
                # Whoever reads a row's tokens knows the text again.
                bears_on=("inference", "linkability", *rare),
                control=(control.f1 if f1 else control.recall) if control.true.sum() else None,
            )
        )

    for c, size in enumerate(target.sizes):
        one = tokens.overlap(recovered.tokens[c : c + 1], truth[c : c + 1], special)
        if one.true.sum() < MIN_TRIALS:
            continue
        guess = tokens.overlap(guesses[c : c + 1], truth[c : c + 1], special)
        stranger = tokens.overlap(recovered.tokens[c : c + 1], others[c : c + 1], special)
        figure(
            "token_recall",
            f"embedding-layer centroid {c + 1} of {len(truth)}",
            one,
            guess.recall,
            stranger,
            rows=float(size),
            recall_of_other_texts=stranger.recall if len(stranger.true) else None,
            certain_positions=float(recovered.certain[c][target.mask[c] > 0].mean()),
        )
    every, guess = (tokens.overlap(found, truth, special) for found in (recovered.tokens, guesses))
    bags = tokens.overlap(
        [[tokens.bag(row)] for row in recovered.tokens], [[tokens.bag(row)] for row in truth], special
    )
    name, rows = f"{len(truth)} embedding-layer centroids", float(target.sizes.mean())
    stranger = tokens.overlap(recovered.tokens, others, special)
    bag_recall = bags.recall
    figure("token_f1", name, every, guess.f1, stranger, rows=rows, recall=every.recall, bag_recall=bag_recall)
    rare = tokens.overlap(recovered.tokens, truth, special, only=prior.counts == 0)
    if rare.true.sum() >= MIN_TRIALS:
        # No auxiliary text has these tokens, so a frequency prior never guesses one.
        stranger = tokens.overlap(recovered.tokens, others, special, only=prior.counts == 0)
        figure("rare_token_recall", name, rare, 0.0, stranger, rows=rows)
    return figures


ATTACK = Attack(2, NAME, TOKENS, _missing, _run)
