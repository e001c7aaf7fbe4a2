"""Attack 2 where rows do not count alike: weights in a file from elsewhere, and silos of a run averaged.

Whoever averages centroids of several silos by size, or rows by weights, publishes a mean whose weights can be
known. Read as a plain mean little of it adds up; read by its weights it gives tokens, and whole texts where
all weights differ (`attacks.weighted_tokens`). Few rows only: more are not read singly, and take long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from attacks import dictionary, token_scores, tokens, weighted_tokens
from attacks.adversary import TOKENS, NotEnough
from attacks.bench.token_figures import NAME, TokenScene
from attacks.bench.token_settings import over_all
from attacks.evidence import Scene
from attacks.figures import MIN_TRIALS, NO_CLAIM, Figure, Proportion, at
from securefl.errors import ProtocolError

WEIGHTS: Final = f"{NAME}, weights of the rows known"
ALIKE: Final = f"{NAME}, weights of the rows withheld"
WHOLE: Final = "texts read by the weights of their rows"
AVERAGED: Final = f"{NAME}, had only the silos' average by size been opened"

# Rows of a centroid, and of all that are read: 16 rows take a core some 20 seconds for 16 positions, with the
# 30,522 tokens of BERT.
_MOST, _ROWS, _SHOWN = 16, 64, 8
_KNOWN = replace(TOKENS, knowledge=(*TOKENS.knowledge, "the weights of the rows, not which row has which"))
_MEAN = replace(TOKENS, sees="the average of all silos' embedding-layer centroids, by size")
# Of an exact mean, over its largest number, as for plain means.
_EXACT = 1e-2


def _few(sizes: Sequence[int] | NDArray[np.floating]) -> list[int]:
    """The smallest centroids, in their order, as far as there is time for them."""
    order = np.argsort(sizes, kind="stable")
    given = np.asarray(sizes)[order]
    return sorted(int(c) for c in order[(given <= _MOST) & (np.cumsum(given) <= _ROWS)])


def of_rows(scene: Scene) -> list[NDArray[np.float64]]:
    """The weights of each centroid's rows in their order; none where all count alike."""
    stated = scene.release.tensors.get("weights")
    if stated is None:
        return []
    return [
        np.asarray(row[: len(group)], np.float64) for row, group in zip(stated, scene.groups, strict=True)
    ]


def check_weighted(scene: Scene, vectors: NDArray[np.float32], mask: NDArray[np.float32]) -> None:
    """Raises ProtocolError for a centroid that is not the weighted mean of its rows.

    vectors: (n, S, d) of the rows. mask: (n, S).
    """
    centroids = scene.release.tensors["centroids"]
    if centroids.shape[1:] != vectors.shape[1:]:
        raise ProtocolError(f"{scene.recorded.path}: centroids: are not of the width of the encoder it names")
    for index, (group, weights) in enumerate(zip(scene.groups, of_rows(scene), strict=True)):
        mean = weighted_tokens.weighted_mean(vectors[group], mask[group], weights)
        if np.abs(centroids[index] - mean).max() > _EXACT * np.abs(mean).max():
            raise ProtocolError(
                f"{scene.recorded.path}: centroid {index + 1} is not the mean by its weights of the rows "
                "that the truth names for it under this encoder, so a score would mean nothing; check the "
                "order of the weights, and --group"
            )


def by_weight(
    one: TokenScene, plain: tokens.Recovered, prior: dictionary.Prior, auxiliary: Sequence[str]
) -> list[Figure]:
    """The smallest centroids read by their weights, and, `plain`, as if all rows counted alike.

    Raises NotEnough where all have more than 16 rows.
    """
    rng, weights = one.rng, of_rows(one.scene)
    small = _few([len(part) for part in weights])
    if not small:
        raise NotEnough(f"every centroid is of more than {_MOST} rows, which are not read singly")
    # Whose a weight is is not known.
    known = [rng.permutation(weights[c]) for c in small]
    alone = [np.zeros(len(part), np.int64) for part in known]
    target = weighted_tokens.WeightedTarget(one.target.centroids[small], one.target.mask[small], known, alone)
    read = weighted_tokens.recover_weighted(one.scene.slm, target, prior, auxiliary)
    alike = tokens.Recovered([plain.tokens[c] for c in small], plain.certain[small])
    by_them = tokens.Recovered(read.tokens(), read.certain)
    details = {"centroids_left_out": len(weights) - len(small)}
    return [
        *over_all(one, ALIKE, TOKENS, small, alike, prior, details),
        *over_all(one, WEIGHTS, _KNOWN, small, by_them, prior, details),
        *_whole(one, small, read),
    ]


def _whole(one: TokenScene, small: Sequence[int], read: weighted_tokens.ReadByWeight) -> list[Figure]:
    """Texts that come out token for token, and of how many other texts that is so."""
    slm, right, control, found = one.scene.slm, 0, 0, []
    special = dictionary.special_ids(slm)
    for c, rows in zip(small, read.texts, strict=True):
        made = [row[row >= 0] for row in rows]
        right += token_scores.exact_texts(made, one.texts[c], special)
        control += token_scores.exact_texts(made, one.strangers[c], special)
        found += made
    trials = sum(len(one.texts[c]) for c in small)
    texts = tuple(slm.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in found[:_SHOWN])
    if trials < MIN_TRIALS:
        return []
    return [
        Figure(
            attack=WHOLE,
            number=2,
            adversary=_KNOWN,
            target=f"{len(small)} embedding-layer centroids of at most {_MOST} rows",
            metric="exact_texts",
            measure=Proportion(right, trials),
            baseline=0.0,
            cap_reason=NO_CLAIM,
            bears_on=("singling_out", "inference", "linkability"),
            control=control / trials,
            texts=texts,
            **at(one.scene.recorded, one.target.claim),
        )
    ]


def averaged(silos: Sequence[TokenScene], prior: dictionary.Prior, auxiliary: Sequence[str]) -> list[Figure]:
    """Exact centroids of several silos and one round, averaged number by number and read with sizes known.

    Of those of up to 16 rows in all the smallest; nothing where there are none, or where silos have
    different numbers of centroids, which then do not belong together.
    """
    if len({len(one.target.sizes) for one in silos}) != 1 or len(silos) < 2:
        return []
    total = np.sum([one.target.sizes for one in silos], axis=0)
    small = _few(total)
    if not small:
        return []
    parts = [one.target for one in silos]
    parts = [
        replace(part, centroids=part.centroids[small], mask=part.mask[small], sizes=part.sizes[small])
        for part in parts
    ]
    target = weighted_tokens.merged(parts, "size")
    read = weighted_tokens.recover_weighted(silos[-1].scene.slm, target, prior, auxiliary)
    truth, others = (
        [[np.concatenate(ids) for ids in zip(*rows, strict=True)] for rows in zip(*sides, strict=True)]
        for sides in (
            [[one.truth[c] for c in small] for one in silos],
            [[one.others[c] for c in small] for one in silos],
        )
    )
    sizes = total[small].astype(np.float32)
    claim = silos[-1].target.claim
    merged = tokens.Target(target.centroids, target.mask, sizes, claim)
    whole = replace(silos[-1], target=merged, truth=truth, others=others)
    found = tokens.Recovered(read.tokens(), read.certain)
    return over_all(whole, AVERAGED, _MEAN, range(len(small)), found, prior, {"silos": len(silos)})
