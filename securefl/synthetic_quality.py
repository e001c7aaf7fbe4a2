"""How good a set of synthetic texts is as texts: alike, varied, long, and of which labels.

A mean reward rises as well when a language model begins to write the same text over and over; these figures
show it. Pure functions of texts and labels: no model, no file, no generator of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from securefl.methods.crosslm import distinct

MOST_DRAWN = 64  # texts that self-BLEU looks at: it takes their number squared


@dataclass(frozen=True)
class LabelCount:
    """Of one label: usable and kept texts, and their shares of all usable and of all kept texts."""

    usable: int
    kept: int
    usable_share: float
    kept_share: float


@dataclass(frozen=True)
class Quality:
    """Of the usable texts of one arrival.

    self_bleu: see `self_bleu`. distinct_1, distinct_2: different over all words and pairs of words, in lower
    case. mean_words, words_5, words_95: mean length and its 5 % and 95 % quantiles, in words. per_class: by
    label, in the order of the run's labels.
    """

    self_bleu: float | None
    distinct_1: float
    distinct_2: float
    mean_words: float
    words_5: float
    words_95: float
    per_class: dict[str, LabelCount]

    def row(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def self_bleu(texts: Sequence[str], rng: np.random.Generator, most: int = MOST_DRAWN) -> float | None:
    """Mean BLEU-4 of each text with all others as its references, in [0, 1]; None for fewer than two texts.

    Zhu et al. 2018, "Texygen"; BLEU is sacrebleu's of a sentence, in lower case, where a text of fewer than
    four tokens counts by the n-grams that it has. 1 is one text over and over. Of more than `most` texts so
    many are drawn. It grows with the number of texts: compare sets by as many of each.
    """
    if len(texts) < 2:
        return None
    drawn = list(texts)
    if len(texts) > most:
        drawn = [texts[i] for i in rng.choice(len(texts), most, replace=False).tolist()]
    bleu = BLEU(effective_order=True, lowercase=True)
    scores = [
        bleu.sentence_score(text, [*drawn[:i], *drawn[i + 1 :]]).score / 100 for i, text in enumerate(drawn)
    ]
    return min(1.0, float(np.mean(scores)))  # sacrebleu's 100 may be 100.00000000000004


def quality(
    texts: Sequence[str],
    labels: Sequence[int],
    kept: Collection[int],
    names: Sequence[str],
    rng: np.random.Generator,
) -> Quality:
    """The figures of n >= 1 texts.

    labels: (n,) positions in `names`; kept: positions of the texts that were kept. rng: for `self_bleu`.
    """
    words = [text.lower().split() for text in texts]
    lengths = np.array([len(text) for text in words])
    low, high = np.quantile(lengths, (0.05, 0.95))
    usable, chosen = Counter(labels), Counter(labels[j] for j in kept)
    per_class = {
        name: LabelCount(usable[i], chosen[i], usable[i] / len(texts), chosen[i] / max(1, len(kept)))
        for i, name in enumerate(names)
    }
    return Quality(
        self_bleu=self_bleu(texts, rng),
        distinct_1=distinct(words, 1),
        distinct_2=distinct(words, 2),
        mean_words=float(lengths.mean()),
        words_5=float(low),
        words_95=float(high),
        per_class=per_class,
    )
