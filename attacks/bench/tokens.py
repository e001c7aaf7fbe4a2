"""Attack 2 as it is put to a run: every embedding-layer centroid release, all over one dictionary at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attacks import assembly, dictionary, membership, token_rounds, token_scores, tokens
from attacks.adversary import TOKENS, NotEnough
from attacks.attack import Attack, Progress, lacks
from attacks.bench.membership import measure_proposition
from attacks.evidence import Evidence, Scene, check_truth
from attacks.figures import MIN_TRIALS, NO_CLAIM, Figure, Proportion, Ratio, at
from attacks.findings import Question
from attacks.judgement import Book
from attacks.runs import Recorded
from securefl.release import GaussianSums, PayloadKind, canonical_json
from securefl.training import embed, probabilities

NAME = "token recovery"
TEXTS = "texts put together from recovered tokens"
# Of more texts than this n-grams of some hundred others put hardly one together, and it takes longer.
_LARGEST, _SHOWN = 16, 8
_UNBOUNDED = "(epsilon, delta) bounds what one unit changes; most recovered tokens are shared by many rows"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    # One part: the releases share a dictionary and its cost.
    book.part("2", lambda page: _attack(evidence, page, say))


def _attack(evidence: Evidence, book: Book, say: Progress) -> None:
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
    """One embedding-layer release ready for attack 2; truth and others, and the texts that they are of, are
    for the scoring. rounds: how many releases of the same rows `target` is the average of."""

    scene: Scene
    rng: np.random.Generator
    target: tokens.Target
    truth: list[list[dictionary.Ids]]
    others: list[list[dictionary.Ids]]
    texts: list[list[dictionary.Ids]]
    strangers: list[list[dictionary.Ids]]
    rounds: int = 1


def _prepare(scene: Scene, book: Book) -> _TokenScene:
    slm, release = scene.slm, scene.release
    vectors, mask = embed(slm, scene.rows.texts, "embeddings")
    membership.check_vectors(vectors[mask > 0], "the embedding layer")
    check_truth(scene, vectors, mask)
    measure_proposition(scene, vectors, probabilities(slm, scene.rows.texts), book)
    centroids, there, sizes = (
        np.asarray(release.tensors[name], np.float32) for name in ("centroids", "mask", "sizes")
    )
    target = tokens.Target(centroids, there, sizes, release.claim)
    positions = target.centroids.shape[1]
    own, known = (
        [ids[:positions] for ids in dictionary.token_ids(slm, part.texts)]
        for part in (scene.rows, scene.controls)
    )
    texts = [[own[row] for row in group] for group in scene.groups]
    truth = [token_scores.by_position(group, positions) for group in texts]
    if sum(len(ids) for row in truth for ids in row) < MIN_TRIALS:
        raise NotEnough(f"fewer than {MIN_TRIALS} tokens are behind the centroids")
    rng = scene.rng(2)
    strangers = [[known[row] for row in rng.permutation(len(known))[: len(group)]] for group in scene.groups]
    others = [token_scores.by_position(group, positions) for group in strangers]
    return _TokenScene(scene, rng, target, truth, others, texts, strangers)


def _averages(ready: list[_TokenScene]) -> list[_TokenScene]:
    """Noised releases of the same rows in several rounds, averaged; exact ones say the same every time."""
    same: dict[str, list[_TokenScene]] = {}
    for one in ready:
        if one.target.private:
            key = canonical_json([one.scene.recorded.silo, [sorted(group) for group in one.scene.groups]])
            same.setdefault(key.decode(), []).append(one)
    return [
        replace(parts[-1], target=token_rounds.average([one.target for one in parts]), rounds=len(parts))
        for parts in same.values()
        if len(parts) > 1
    ]


def _recover(ready: list[_TokenScene], book: Book, say: Progress) -> None:
    """Attack 2 on all releases over one dictionary at once: they share its cost."""
    groups: dict[str, list[_TokenScene]] = {}
    for one in ready:
        info = one.scene.release.info
        config = one.scene.evidence.source.config
        moves = config is not None and config.slm.train_embeddings
        table = info["encoder"] if moves else info["base_sha256"]
        noise = one.target.claim.model_dump(mode="json", exclude={"reason"})
        key = canonical_json([table, noise, list(one.target.centroids.shape[1:])]).decode()
        groups.setdefault(key, []).append(one)
    for key, group in list(groups.items()):
        for one in _averages(group):
            groups.setdefault(f"{one.rounds} rounds of {key}", []).append(one)
    for number, group in enumerate(groups.values()):
        slm, auxiliary = group[0].scene.slm, group[0].scene.auxiliary
        parts = [one.target for one in group]
        together = tokens.Target(
            np.concatenate([part.centroids for part in parts]),
            np.concatenate([part.mask for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            parts[0].claim,
            parts[0].rounds,
        )
        positions = together.centroids.shape[1]
        known = dictionary.token_ids(slm, auxiliary.texts)
        vocabulary = dictionary.vocabulary_size(slm)
        prior = dictionary.fit_prior(known, positions, vocabulary)
        score = assembly.NGrams([ids[:positions] for ids in known], vocabulary)

        def tell(share: float, number: int = number, all_: int = len(groups)) -> None:
            say((number + share) / all_, "reading tokens back")

        recovered = tokens.recover(slm, together, prior, auxiliary.texts, tell)
        start = 0
        for one in group:
            part = recovered.part(start, start + len(one.truth))
            start += len(one.truth)
            special = dictionary.special_ids(slm)
            book.figures += token_figures(
                one.scene.recorded, one.target, prior, part, one.truth, one.others, special, one.rng,
                one.rounds,
            )  # fmt: skip
            book.figures += _text_figures(one, part, score)


def _text_figures(one: _TokenScene, read: tokens.Recovered, score: assembly.Scorer) -> list[Figure]:
    """Texts of the smaller clusters that come out token for token, and of how many other texts that is so."""
    slm, right, chance, control, trials, found = one.scene.slm, 0, 0, 0, 0, []
    ends, special = dictionary.end_ids(slm), dictionary.special_ids(slm)
    small = sorted((len(texts), c) for c, texts in enumerate(one.texts) if len(texts) <= _LARGEST)
    for size, c in small:
        trials += size
        if not len(read.tokens[c][0]):
            continue
        made = assembly.assemble(read.tokens[c], ends, score, beams=1)
        dealt = assembly.deal(read.tokens[c], ends, one.rng)
        right += token_scores.exact_texts(made, one.texts[c], special)
        chance += token_scores.exact_texts(dealt, one.texts[c], special)
        control += token_scores.exact_texts(made, one.strangers[c], special)
        found += made
    if trials < MIN_TRIALS:
        return []
    claimed = isinstance(one.target.claim, GaussianSums)
    return [
        Figure(
            attack=TEXTS,
            number=2,
            adversary=TOKENS,
            target=_over(f"{len(small)} embedding-layer centroids of at most {_LARGEST} rows", one.rounds),
            metric="exact_texts",
            measure=Proportion(right, trials),
            baseline=0.0,
            cap_reason=_UNBOUNDED if claimed else NO_CLAIM,
            bears_on=("singling_out", "inference", "linkability"),
            control=control / trials,
            texts=tuple(
                slm.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in found[:_SHOWN]
            ),
            details={"dealt_at_random": chance / trials, "language_model": "trigrams of other text"},
            **at(one.scene.recorded, one.target.claim),
        )
    ]


def _over(name: str, rounds: int) -> str:
    return name if rounds == 1 else f"{name}, average of {rounds} rounds"


def token_figures(
    recorded: Recorded,
    target: tokens.Target,
    prior: dictionary.Prior,
    recovered: tokens.Recovered,
    truth: list[list[dictionary.Ids]],
    others: list[list[dictionary.Ids]],
    special: frozenset[int],
    rng: np.random.Generator,
    rounds: int = 1,
) -> list[Figure]:
    """The figures of attack 2: recall of each centroid, F1 and recall of rare tokens over all of them.

    truth, others: [centroid][position] tokens of the rows behind it, and of as many rows that are nobody's.
    rounds: how many releases of the same rows `target` is the average of.
    """
    counts = tokens.expected_counts(target, prior)
    guesses = tokens.guesses(prior, counts)
    seed = int(rng.integers(2**31))
    figures: list[Figure] = []

    def figure(
        metric: str,
        name: str,
        found: token_scores.Overlap,
        base: float,
        control: token_scores.Overlap,
        **details: Any,
    ) -> None:
        f1 = metric == "token_f1"
        # Few rows can have tokens that no other text has: names, identifiers.
        rare: tuple[Question, ...] = ("singling_out",) if metric == "rare_token_recall" else ()
        hits, totals = (2 * found.hits, found.true + found.guessed) if f1 else (found.hits, found.true)
        figures.append(
            Figure(
                attack=NAME,
                number=2,
                adversary=TOKENS,
                target=_over(name, rounds),
                metric=metric,
                measure=Ratio(hits, totals, int(found.true.sum()), seed),
                baseline=base,
                cap_reason=_UNBOUNDED if isinstance(target.claim, GaussianSums) else NO_CLAIM,
                # Whoever reads a row's tokens knows the text again.
                bears_on=("inference", "linkability", *rare),
                control=(control.f1 if f1 else control.recall) if control.true.sum() else None,
                details={"units": len(hits), **details},
                **at(recorded, target.claim),
            )
        )

    for c, size in enumerate(target.sizes):
        one = token_scores.overlap(recovered.tokens[c : c + 1], truth[c : c + 1], special)
        if one.true.sum() < MIN_TRIALS:
            continue
        guess = token_scores.overlap(guesses[c : c + 1], truth[c : c + 1], special)
        stranger = token_scores.overlap(recovered.tokens[c : c + 1], others[c : c + 1], special)
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
    every, guess = (token_scores.overlap(found, truth, special) for found in (recovered.tokens, guesses))
    bags = token_scores.overlap(
        [[token_scores.bag(row)] for row in recovered.tokens],
        [[token_scores.bag(row)] for row in truth],
        special,
    )
    name, rows = f"{len(truth)} embedding-layer centroids", float(target.sizes.mean())
    stranger = token_scores.overlap(recovered.tokens, others, special)
    bag_recall = bags.recall
    figure("token_f1", name, every, guess.f1, stranger, rows=rows, recall=every.recall, bag_recall=bag_recall)
    rare = token_scores.overlap(recovered.tokens, truth, special, only=prior.counts == 0)
    if rare.true.sum() >= MIN_TRIALS:
        # No auxiliary text has these tokens, so a frequency prior never guesses one.
        stranger = token_scores.overlap(recovered.tokens, others, special, only=prior.counts == 0)
        figure("rare_token_recall", name, rare, 0.0, stranger, rows=rows)
    return figures


ATTACK = Attack(2, NAME, TOKENS, lacks(PayloadKind.EMBEDDING_CENTROIDS, "embedding-layer centroid"), _run)
