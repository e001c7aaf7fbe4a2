"""Attack 2 by who knows less: sizes withheld, only the public token table, no rows to score by.

The figures stand beside those of the adversary who knows sizes and table, over all centroids of a release.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import binomtest

from attacks import dictionary, moved_table, token_scores, token_sizes, tokens
from attacks.adversary import TOKENS, Adversary, NotEnough
from attacks.bench.token_figures import NAME, UNBOUNDED, TokenScene
from attacks.evidence import Scene
from attacks.figures import MIN_TRIALS, NO_CLAIM, NO_NOISE, Figure, Proportion, Ratio, at
from attacks.judgement import Book
from attacks.runs import centroid_info
from securefl.errors import ProtocolError
from securefl.models import load_slm
from securefl.release import GaussianSums, NonPrivate

SIZES = f"{NAME}, sizes withheld"
AS_IT_IS = f"{NAME}, with the public table as it is"
TABLE = f"{NAME}, with the public table corrected from the release"
BLIND = f"{NAME}, positions that prove themselves"
BLIND_TABLE = f"{BLIND} with the table corrected from the release"

_How = Literal["stated", "sized", "corrected"]

_SHOWN = 8
_NO_SIZES = replace(TOKENS, knowledge=TOKENS.knowledge[:2])
PUBLIC = replace(TOKENS, role="outsider")
# Different tokens, and share of the vocabulary in the pool, with which words can be told from any words.
_FEWEST_WORDS, _MOST_OF_ALL, _ANY_WORDS = 10, 0.9, 0.01
# Rows of a centroid; of more nothing is read singly.
_MOST = 4096
# Of two centroids in one that is the mean of no few tokens: what adds up by chance.
_MIXED = 0.37


def sizes_withheld(one: TokenScene, prior: dictionary.Prior, auxiliary: Sequence[str]) -> list[Figure]:
    """The clusters of up to 16 rows, read without their sizes. Nothing where noise leaves nothing to read."""
    small = [c for c, texts in enumerate(one.texts) if len(texts) <= token_sizes.MOST]
    if not small or one.rounds > 1:
        return []
    target = replace(
        one.target,
        centroids=one.target.centroids[small],
        mask=one.target.mask[small],
        sizes=np.ones(len(small), np.float32),
    )
    slm = one.scene.slm
    if not tokens.readable(slm, target, prior, auxiliary):
        return []
    found = token_sizes.estimate_sizes(slm, target, prior, auxiliary)
    read = tokens.recover(slm, replace(target, sizes=found.sizes), prior, auxiliary)
    true = np.rint(one.target.sizes[small])
    details = {"sizes_right": float((found.sizes == true).mean())}
    return over_all(one, SIZES, _NO_SIZES, small, read, prior, details)


def as_it_is(one: TokenScene, read: tokens.Recovered, prior: dictionary.Prior) -> list[Figure]:
    """What was read of a table that was trained with the one from before, taken for the right one."""
    return over_all(one, AS_IT_IS, PUBLIC, range(len(one.truth)), read, prior, {})


def moved_by(one: TokenScene, found: moved_table.Adapted) -> dict[str, float]:
    """Of a table that was trained: how far it moved, as the rows say, and what is left of that."""
    told = {"table_still_off_by": found.slack[-1]}
    return {**told, "rows_off_by_share_of_others": one.off} if one.off else told


def public_table(one: TokenScene, prior: dictionary.Prior, auxiliary: Sequence[str]) -> list[Figure]:
    """A release of a table that a run trained, read by who has only the one from before, as it is and
    corrected. Raises NotEnough."""
    info = centroid_info(one.scene.recorded, one.scene.release)
    slm = load_slm(info.base, info.labels, max_length=info.max_length, train_embeddings=False, seed=0)
    found = moved_table.recover_moved(slm, one.target, prior, auxiliary)
    plain = as_it_is(one, tokens.recover(slm, one.target, prior, auxiliary), prior)
    return plain + over_all(
        one, TABLE, PUBLIC, range(len(one.truth)), found.recovered, prior, moved_by(one, found)
    )


def over_all(
    one: TokenScene,
    name: str,
    adversary: Adversary,
    chosen: Sequence[int],
    read: tokens.Recovered,
    prior: dictionary.Prior,
    details: dict[str, Any],
) -> list[Figure]:
    """F1 over the centroids `chosen` of what was read of them; nothing where they have few tokens."""
    special = dictionary.special_ids(one.scene.slm)
    truth, others = ([side[c] for c in chosen] for side in (one.truth, one.others))
    counts = tokens.expected_counts(one.target, prior)[list(chosen)]
    found, guess, control = (
        token_scores.overlap(*pair, special)
        for pair in ((read.tokens, truth), (tokens.guesses(prior, counts), truth), (read.tokens, others))
    )
    if found.true.sum() < MIN_TRIALS:
        return []
    return [
        Figure(
            attack=name,
            number=2,
            adversary=adversary,
            target=f"{len(chosen)} embedding-layer centroids",
            metric="token_f1",
            measure=Ratio(
                2 * found.hits,
                found.true + found.guessed,
                int(found.true.sum()),
                int(one.rng.integers(2**31)),
            ),
            # Of who is told the sizes, so that not knowing them is no excuse.
            baseline=guess.f1,
            cap_reason=UNBOUNDED if isinstance(one.target.claim, GaussianSums) else NO_CLAIM,
            bears_on=("inference", "linkability"),
            control=control.f1 if control.true.sum() else None,
            details={"recall": found.recall, "rows": float(one.target.sizes[list(chosen)].mean()), **details},
            **at(one.scene.recorded, one.target.claim),
        )
    ]


def _require_language(
    scene: Scene, found: tokens.Recovered, prior: dictionary.Prior, special: list[int]
) -> None:
    """What adds up must be words that people write. Raises ProtocolError where it is any words.

    A table with the right vectors at the wrong numbers adds up as well as the right one. Of the different
    tokens read, more must be in the pool than of all the vocabulary, by a binomial test.
    """
    read = [
        ids
        for row, sure in zip(found.tokens, found.certain, strict=True)
        for ids, is_sure in zip(row, sure.tolist(), strict=True)
        if is_sure
    ]
    known = np.setdiff1d(np.concatenate(read), special)
    words = np.setdiff1d(np.arange(len(prior.counts)), special)
    share = float((prior.counts[words] > 0).mean())
    if len(known) < _FEWEST_WORDS or share > _MOST_OF_ALL:
        return  # too few to tell, or a pool that has nearly every word
    there = int((prior.counts[known] > 0).sum())
    if binomtest(there, len(known), share, "greater").pvalue > _ANY_WORDS:
        raise ProtocolError(
            f"{scene.recorded.path}: of {len(known)} words that add up the pool has {there}, no more than of "
            "any words: this is another encoder's table, or the pool is of another language; check --encoder "
            "and --pool"
        )


def blind(scene: Scene, book: Book) -> None:
    """Where nobody says which rows are behind the centroids: the positions that tokens add up to exactly.

    Sums of a few entries of a table of thousands do not add up by chance, so what does was read. As a control
    centroids are mixed in pairs so that nothing adds up. Raises NotEnough where nothing does, which says
    nothing of what could be read with more, and ProtocolError for vectors of another width.

    Sizes and a claim of noise are what the file says, and not believed: where nothing adds up with the sizes
    they are sought, and a sum that adds up under a claim has little noise or none. Where still nothing does,
    the table is taken for one that was trained, and corrected; then sums add up but for what it is still off.
    """
    slm, tensors = scene.slm, scene.release.tensors
    centroids, mask, sizes = (np.asarray(tensors[n], np.float32) for n in ("centroids", "mask", "sizes"))
    positions, width = centroids.shape[1:]
    if width != dictionary.Layer(slm, positions).at(0, torch.zeros(1, dtype=torch.int64)).shape[1]:
        raise ProtocolError(
            f"{scene.recorded.path}: its vectors have another width than the embedding layer of the encoder"
        )
    if "weights" in tensors:
        raise NotEnough(
            "its rows do not count alike, so which weight is whose is scored by the rows (--rows)"
        )
    auxiliary = scene.auxiliary.texts
    known = dictionary.token_ids(slm, auxiliary)
    prior = dictionary.fit_prior(known, positions, dictionary.vocabulary_size(slm))
    claim = scene.release.claim
    noised = isinstance(claim, GaussianSums)
    target = tokens.Target(centroids, mask, sizes, NonPrivate(reason="read as if there were no noise"))
    special = list(dictionary.special_ids(slm))

    def read(aim: tokens.Target, how: _How) -> tuple[tokens.Recovered, int, int]:
        """What was read, at how many positions, of how many; those that all texts share do not count."""
        if how == "corrected":
            adapted = moved_table.recover_moved(slm, aim, prior, auxiliary)
            found = adapted.recovered
            if moved_table.change(slm, adapted.dictionary) > moved_table.NEARER:
                found = replace(found, certain=np.zeros_like(found.certain))
        else:
            if how == "sized":
                aim = replace(aim, sizes=token_sizes.estimate_sizes(slm, aim, prior, auxiliary).sizes)
            found = tokens.recover(slm, aim, prior, auxiliary)
        content = np.array([[not np.isin(ids, special).all() for ids in row] for row in found.tokens])
        there = (aim.mask > 0) & ~(found.certain & ~content)
        return found, int(found.certain[there].sum()), int(there.sum())

    stated = getattr(scene.evidence.source, "sizes_known", True) and not noised
    stated = stated and bool((sizes <= _MOST).all())
    # Sizes are found by what adds up to the last digit, so a table is corrected only where they are stated.
    ways: tuple[_How, ...] = ("stated", "sized", "corrected") if stated else ("sized",)
    right = 0
    for how in ways:
        with suppress(NotEnough):  # of what it takes to correct a table
            found, right, trials = read(target, how)
            if right:
                break
    if not right and noised:
        raise NotEnough(
            "under its noise no sum of tokens proves itself; give the rows behind the vectors (--rows)"
        )
    if not right:
        raise NotEnough(
            "nowhere do words of the encoder's table add up to a vector: they are means of too many texts, "
            "or rounded, or the table was trained far; what could be read is not known without the rows "
            "(--rows)"
        )
    _require_language(scene, found, prior, special)
    other = np.roll(centroids, 1, axis=0)
    mixed = replace(
        target, centroids=_MIXED * centroids + (1 - _MIXED) * other, mask=mask * np.roll(mask, 1, 0)
    )
    control = None
    if len(centroids) > 1 and mixed.mask.sum():
        with suppress(NotEnough):
            _, by_chance, of = read(mixed, how)
            control = by_chance / max(1, of)
    if how == "corrected" and (control is None or control >= right / trials):
        # A map is fitted to what it is to prove.
        raise NotEnough("sums add up with a corrected table only, and no better than mixed ones do")
    single = [c for c, row in enumerate(found.tokens) if len(row[0]) == 1 and found.certain[c].any()]
    book.figures.append(
        Figure(
            attack=BLIND_TABLE if how == "corrected" else BLIND,
            number=2,
            adversary=PUBLIC if how == "corrected" else TOKENS,
            target=f"{len(centroids)} embedding-layer centroids",
            metric="positions_read",
            measure=Proportion(right, trials),
            baseline=0.0,
            cap_reason=NO_NOISE if noised else NO_CLAIM,
            bears_on=("singling_out", "inference", "linkability"),
            control=control,
            texts=tuple(
                slm.tokenizer.decode(
                    [int(ids[0]) for ids in found.tokens[c] if len(ids)], skip_special_tokens=True
                )
                for c in single[:_SHOWN]
            ),
            details={
                "centroids": len(centroids),
                "rows": float(np.mean([len(row[0]) for row in found.tokens])),
            },
            **at(scene.recorded, claim),
        )
    )
