"""Figures of synthetic texts, by hand and by sacrebleu called one text at a time."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from sacrebleu import sentence_bleu

from securefl.synthetic_quality import LabelCount, quality, self_bleu


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_self_bleu_by_hand() -> None:
    # Of each: 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples are in the other; same length.
    found = self_bleu(["the cat sat on mats", "the CAT sat on rugs"], rng())
    assert found == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # The short one is all in the long one, with a brevity penalty of exp(1 - 8/4).
    found = self_bleu(["a b c d", "a b c d e f g h"], rng())
    long = (4 / 8 * 3 / 7 * 2 / 6 * 1 / 5) ** 0.25
    assert found == pytest.approx((math.exp(-1) + long) / 2)
    # The n-grams of all others count together: of "a b c d" the first has "a b", the second "c d".
    found = self_bleu(["a b", "c d", "a b c d"], rng())
    short = math.exp(1 - 2 / 2)  # the reference closest in length is the other short one
    whole = (4 / 4 * 2 / 3 * (1 / (2 * 2)) * (1 / (4 * 1))) ** 0.25  # the smoothing of mteval-v13a
    assert found == pytest.approx((2 * short + whole) / 3)


def test_self_bleu_at_its_ends() -> None:
    assert self_bleu(["one two three four five"] * 5, rng()) == 1.0
    assert self_bleu(["one two", "three four", "five six"], rng()) == 0.0
    assert self_bleu(["one two", " "], rng()) == 0.0
    assert self_bleu(["one two three four"], rng()) is None
    assert self_bleu([], rng()) is None


TEXTS = [
    "The striker scored twice as his team won the cup.",
    "The striker scored once, and his team lost the cup.",
    "Shares in the bank fell after it reported lower profits.",
    "shares in the bank rose!",
    "His team won.",
]


def test_self_bleu_is_sacrebleu_of_each_text() -> None:
    naive = [
        sentence_bleu(text, [other for other in TEXTS if other != text], lowercase=True).score / 100
        for text in TEXTS
    ]
    assert self_bleu(TEXTS, rng()) == pytest.approx(np.mean(naive))


def test_of_many_texts_some_are_drawn() -> None:
    pairs = {
        round(self_bleu([TEXTS[i], TEXTS[j]], rng()) or 0.0, 9) for i in range(5) for j in range(5) if i != j
    }
    found = [self_bleu(TEXTS, rng(seed), most=2) for seed in range(100)]
    # Ten pairs: one is missed by a hundred draws with a chance of 10 * 0.9 ** 100 = 3e-4.
    assert {round(value or 0.0, 9) for value in found} == pairs
    assert found == [self_bleu(TEXTS, rng(seed), most=2) for seed in range(100)]
    assert self_bleu(TEXTS, rng(), most=5) == self_bleu(TEXTS, rng(1))


def test_quality_by_hand() -> None:
    texts = ["a b A", "a b", "c d e f g", "h"]
    found = quality(texts, [0, 0, 1, 1], [2, 0, 1], ("x", "y", "z"), rng())
    assert found.self_bleu == self_bleu(texts, rng())
    assert found.distinct_1 == pytest.approx(8 / 11)
    assert found.distinct_2 == pytest.approx(6 / 7)  # ab ba | ab | cd de ef fg
    assert found.mean_words == 11 / 4
    # Sorted 1, 2, 3, 5: the places 0.15 and 2.85.
    assert (found.words_5, found.words_95) == pytest.approx((1.15, 4.7))
    assert found.per_class == {
        "x": LabelCount(2, 2, 0.5, 2 / 3),
        "y": LabelCount(2, 1, 0.5, 1 / 3),
        "z": LabelCount(0, 0, 0.0, 0.0),
    }
    assert json.loads(json.dumps(found.row())) == found.row()
    assert found.row()["per_class"]["y"] == {
        "usable": 2, "kept": 1, "usable_share": 0.5, "kept_share": 1 / 3,
    }  # fmt: skip


def test_quality_where_nothing_is_kept() -> None:
    found = quality(["a b"], [0], [], ("x",), rng())
    assert found.self_bleu is None
    assert found.per_class == {"x": LabelCount(1, 0, 1.0, 0.0)}
