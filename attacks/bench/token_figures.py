"""The figures of attack 2: tokens by centroid and over all, rare ones, texts put together from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks import assembly, dictionary, token_scores, tokens
from attacks.adversary import TOKENS, Adversary
from attacks.evidence import Scene
from attacks.figures import MIN_TRIALS, NO_CLAIM, Figure, Proportion, Ratio, at
from attacks.findings import Question
from attacks.runs import Recorded
from securefl.release import GaussianSums

NAME = "token recovery"
TEXTS = "texts put together from recovered tokens"
# Of more texts than this n-grams of some hundred others put hardly one together, and it takes longer.
_LARGEST, _SHOWN = 16, 8
# A language model takes some seconds a cluster, and of more texts puts none together either.
FEW, _MODELLED = range(2, 5), 2
UNBOUNDED = "(epsilon, delta) bounds what one unit changes; most recovered tokens are shared by many rows"


@dataclass(frozen=True, repr=False)
class TokenScene:
    """One embedding-layer release ready for attack 2; truth and others, and the texts that they are of, are
    for the scoring. rounds: how many releases of the same rows `target` is the average of. off: how far the
    rows are from the centroids under the table at hand (`moved_table.distances`, the most of them); 0 where
    it is the table that made them."""

    scene: Scene
    rng: np.random.Generator
    target: tokens.Target
    truth: list[list[dictionary.Ids]]
    others: list[list[dictionary.Ids]]
    texts: list[list[dictionary.Ids]]
    strangers: list[list[dictionary.Ids]]
    rounds: int = 1
    off: float = 0.0


def text_figures(
    one: TokenScene, read: tokens.Recovered, score: assembly.Scorer, model: assembly.Scorer | None
) -> tuple[list[Figure], tuple[str, ...]]:
    """Texts of the smaller clusters that come out token for token, and of how many other texts that is so;
    and what some of them say.

    model: a causal language model for the first few clusters of `FEW` texts, which counts do not tell apart.
    """
    slm, right, chance, control, trials, found = one.scene.slm, 0, 0, 0, 0, []
    modelled = 0
    ends, special = dictionary.end_ids(slm), dictionary.special_ids(slm)
    small = sorted((len(texts), c) for c, texts in enumerate(one.texts) if len(texts) <= _LARGEST)
    for size, c in small:
        trials += size
        if not len(read.tokens[c][0]):
            continue
        if model is not None and size in FEW and modelled < _MODELLED:
            modelled += 1
            made = assembly.assemble(read.tokens[c], ends, model, beams=2)
        else:
            made = assembly.assemble(read.tokens[c], ends, score, beams=1)
        dealt = assembly.deal(read.tokens[c], ends, one.rng)
        right += token_scores.exact_texts(made, one.texts[c], special)
        chance += token_scores.exact_texts(dealt, one.texts[c], special)
        control += token_scores.exact_texts(made, one.strangers[c], special)
        found += made
    texts = tuple(slm.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in found[:_SHOWN])
    if trials < MIN_TRIALS:
        return [], texts
    claimed = isinstance(one.target.claim, GaussianSums)
    return [
        Figure(
            attack=TEXTS,
            number=2,
            adversary=TOKENS,
            target=_over(
                f"{len(small)} {kind_of(one.scene.layer)} centroids of at most {_LARGEST} rows", one.rounds
            ),
            metric="exact_texts",
            measure=Proportion(right, trials),
            baseline=0.0,
            cap_reason=UNBOUNDED if claimed else NO_CLAIM,
            bears_on=("singling_out", "inference", "linkability"),
            control=control / trials,
            texts=texts,
            details={
                "dealt_at_random": chance / trials,
                "language_model": "trigrams of other text",
                "with_smollm2": modelled,
            },
            **at(one.scene.recorded, one.target.claim),
        )
    ], texts


def kind_of(layer: int) -> str:
    """What centroids of a layer are called."""
    return f"layer-{layer}" if layer else "embedding-layer"


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
    *,
    layer: int = 0,
    attack: str = NAME,
    adversary: Adversary = TOKENS,
    told: Mapping[str, float] = {},
) -> list[Figure]:
    """The figures of attack 2: recall of each centroid, F1 and recall of rare tokens over all of them.

    truth, others: [centroid][position] tokens of the rows behind it, and of as many rows that are nobody's.
    rounds: how many releases of the same rows `target` is the average of. layer: of the encoder, whose
    outputs the centroids average. attack, adversary: of the setting.
    told: details of figures over all centroids.
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
                attack=attack,
                number=2,
                adversary=adversary,
                target=_over(name, rounds),
                metric=metric,
                measure=Ratio(hits, totals, int(found.true.sum()), seed),
                baseline=base,
                cap_reason=UNBOUNDED if isinstance(target.claim, GaussianSums) else NO_CLAIM,
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
            f"{kind_of(layer)} centroid {c + 1} of {len(truth)}",
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
    name, rows = f"{len(truth)} {kind_of(layer)} centroids", float(target.sizes.mean())
    stranger = token_scores.overlap(recovered.tokens, others, special)
    bag_recall = bags.recall
    figure("token_f1", name, every, guess.f1, stranger, rows=rows, recall=every.recall, bag_recall=bag_recall,
           **told)  # fmt: skip
    rare = token_scores.overlap(recovered.tokens, truth, special, only=prior.counts == 0)
    if rare.true.sum() >= MIN_TRIALS:
        # No auxiliary text has these tokens, so a frequency prior never guesses one.
        stranger = token_scores.overlap(recovered.tokens, others, special, only=prior.counts == 0)
        figure("rare_token_recall", name, rare, 0.0, stranger, rows=rows, **told)
    return figures
