"""Attack 10 as it is put to a run: a language model that was taught nothing writes texts near centroids.

Which release it is put to, and how a centroid of several rows is judged, is as in `attacks.bench.decoder`; it
takes some 6 seconds a centroid, so six are attacked, with less effort than the search can make. Without the
language model it is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks import zero_shot
from attacks.adversary import ZERO_SHOT, NotEnough
from attacks.attack import Attack, lacks
from attacks.bench.decoder import Exposed, Read, expose, smallest_clusters, text_figures
from attacks.dictionary import Ids, token_ids
from attacks.evidence import Scene
from attacks.figures import NO_CLAIM, UNBOUNDED, Figure, Ratio, at
from attacks.judgement import Book
from attacks.membership import Vectors, clipped
from attacks.zero_shot import Box, Effort, Proposer, text_scores
from securefl.errors import ModelError
from securefl.models import load_llm
from securefl.release import GaussianSums, PayloadKind

NAME = "embedding inversion, zero-shot"
MODEL = "builtin:smollm2"
# Of fewer targets not even a value that is higher for every one of them would be more than chance.
_MOST = 6
_EFFORT = Effort(beams=4, proposals=8, steps=20, looked_at=48)
# Texts about anything, and their tokens, to see what all vectors of the encoder have in common.
_WRITTEN, _TOKENS = 32, 12
_RANDOM = 20


def _proposer() -> Proposer:
    try:
        return Proposer(*load_llm(MODEL))
    except ModelError as why:
        raise NotEnough(f"it needs a language model: {why}") from None


def _attack(scene: Scene, book: Book) -> None:
    exposed = expose(scene, 1011, _MOST)
    proposer, rng, claim = _proposer(), scene.rng(1012), scene.release.claim

    def encode(texts: Sequence[str]) -> NDArray[Any]:
        return clipped(np.asarray(scene.evidence.source.embed(scene.slm, texts), np.float64), claim)

    centre = zero_shot.centre_of(encode(proposer.write(_WRITTEN, _TOKENS, rng)))
    box = Box(encode, proposer, centre)
    found = [zero_shot.search(box, exposed.target.centroids[c], rng, effort=_EFFORT) for c in exposed.chosen]
    texts = [one.texts[0] if one.texts else "" for one in found]
    cosines = np.array([one.cosines[0] if one.cosines else 0.0 for one in found])
    read = Read(token_ids(scene.slm, texts), cosines, _commonest(exposed, token_ids(scene.slm, texts)))
    rouge, bleu = _best(texts, [[scene.rows.texts[i] for i in scene.groups[c]] for c in exposed.chosen])
    details = {"texts_tried": float(np.mean([one.encoded for one in found])), "bleu": float(bleu.mean())}
    book.figures += text_figures(
        scene, exposed, read, name=NAME, number=10, adversary=ZERO_SHOT, rng=scene.rng(1013), details=details
    )
    book.figures.append(_rouge_figure(scene, exposed, texts, rouge, details))


def _commonest(exposed: Exposed, guesses: Sequence[Ids]) -> list[Ids]:
    counts = np.bincount(np.concatenate(exposed.auxiliary))
    counts[[token for token in exposed.special if token < len(counts)]] = 0
    order = np.argsort(-counts, kind="stable")
    return [order[: int((~np.isin(ids, list(exposed.special))).sum())].astype(np.int64) for ids in guesses]


def _best(guesses: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Vectors, Vectors]:
    """ROUGE-L and BLEU of each guess against the row of its group with the largest ROUGE-L."""
    best = []
    for guess, group in zip(guesses, rows, strict=True):
        scores = text_scores([guess] * len(group), list(group))
        at_most = int(scores.rouge_l.argmax())
        best.append((scores.rouge_l[at_most], scores.bleu[at_most]))
    table = np.array(best, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _rouge_figure(
    scene: Scene, exposed: Exposed, texts: Sequence[str], rouge: Vectors, details: dict[str, Any]
) -> Figure:
    rng = scene.rng(1014)
    behind = [[scene.rows.texts[i] for i in scene.groups[c]] for c in exposed.chosen]
    pool, others = scene.auxiliary.texts, scene.controls.texts
    random = np.mean(
        [
            _best([pool[int(i)] for i in rng.integers(0, len(pool), len(behind))], behind)[0].mean()
            for _ in range(_RANDOM)
        ]
    )
    control = None
    if others:
        drawn = [
            [[others[i] for i in rng.permutation(len(others))[: len(rows)]] for rows in behind]
            for _ in range(_RANDOM)
        ]
        control = float(np.mean([_best(texts, strangers)[0].mean() for strangers in drawn]))
    return Figure(
        attack=NAME,
        number=10,
        adversary=ZERO_SHOT,
        target=f"the {len(behind)} pooled centroids of the fewest rows",
        metric="rouge_l",
        measure=Ratio(rouge, np.ones(len(rouge)), len(rouge), int(rng.integers(2**31))),
        # What a language model writes is like any text in its common words, more than one text like another.
        baseline=max(float(random), control or 0.0),
        cap_reason=UNBOUNDED if isinstance(exposed.target.claim, GaussianSums) else NO_CLAIM,
        bears_on=("inference",),
        control=control,
        details={"rows": float(exposed.target.sizes[exposed.chosen].mean()), **details},
        **at(scene.recorded, scene.release.claim),
    )


ATTACK = Attack(
    10,
    NAME,
    ZERO_SHOT,
    lacks(PayloadKind.CENTROIDS, "pooled centroid"),
    smallest_clusters(10, NAME, _attack),
)
