"""Attack 10 as it is put to a run: a language model that was taught nothing writes texts near centroids.

Which release it is put to, and how a centroid of several rows is judged, is as in `attacks.bench.decoder`; it
takes some 6 seconds a centroid, so six are attacked. Without the language model it is not run.
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
from attacks.word_maps import by_frequency
from attacks.zero_shot import Proposer, best_scores
from securefl.errors import ModelError
from securefl.models import load_llm
from securefl.release import GaussianSums, PayloadKind

NAME = "embedding inversion, zero-shot"
MODEL = "builtin:smollm2"
# Of fewer targets not even a value that is higher for every one of them would be more than chance.
_MOST = 6
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

    box = zero_shot.acquainted(encode, proposer, rng)
    found = [zero_shot.search(box, exposed.target.centroids[c], rng) for c in exposed.chosen]
    texts = [one.texts[0] if one.texts else "" for one in found]
    cosines = np.array([one.cosines[0] if one.cosines else 0.0 for one in found])
    guesses = token_ids(scene.slm, texts)
    read = Read(guesses, cosines, _commonest(exposed, guesses))
    scores = best_scores(texts, [[scene.rows.texts[i] for i in scene.groups[c]] for c in exposed.chosen])
    tried = float(np.mean([one.encoded for one in found]))
    details = {"texts_tried": tried, "bleu": float(scores.bleu.mean())}
    book.figures += text_figures(
        scene, exposed, read, name=NAME, number=10, adversary=ZERO_SHOT, rng=scene.rng(1013), details=details
    )
    book.figures.append(_rouge_figure(scene, exposed, texts, scores.rouge_l, details))


def _commonest(exposed: Exposed, guesses: Sequence[Ids]) -> list[Ids]:
    order = by_frequency(exposed.auxiliary, exposed.special)
    return [order[: int((~np.isin(ids, list(exposed.special))).sum())] for ids in guesses]


def _rouge_figure(
    scene: Scene, exposed: Exposed, texts: Sequence[str], rouge: Vectors, details: dict[str, Any]
) -> Figure:
    rng = scene.rng(1014)
    behind = [[scene.rows.texts[i] for i in scene.groups[c]] for c in exposed.chosen]
    pool, others = scene.auxiliary.texts, scene.controls.texts
    guesses = [[pool[int(i)] for i in rng.integers(0, len(pool), len(behind))] for _ in range(_RANDOM)]
    random = np.mean([best_scores(one, behind).rouge_l.mean() for one in guesses])
    control = None
    if others:
        drawn = [
            [[others[i] for i in rng.permutation(len(others))[: len(rows)]] for rows in behind]
            for _ in range(_RANDOM)
        ]
        control = float(np.mean([best_scores(texts, strangers).rouge_l.mean() for strangers in drawn]))
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
