"""Attack 2, second half: texts come together where words tell what goes together, and else do not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from attacks.assembly import CausalScorer, NGrams, assemble, deal
from attacks.dictionary import Ids
from attacks.token_scores import by_position, exact_texts, holds
from securefl.errors import SecureflError
from securefl.models import load_llm

START, END = 0, 1
ENDS = np.array([END])
VOCABULARY = 402
IGNORE = frozenset({START, END})


def stories(rows: int, seed: int) -> list[Ids]:
    """Texts of one of 40 topics, whose ten words appear in no other; 3 to 8 words long."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(rows):
        topic, length = rng.integers(40), rng.integers(3, 9)
        words = 2 + 10 * topic + rng.integers(0, 10, length)
        made.append(np.array([START, *words, END]))
    return made


def distinct_topics(rows: int, seed: int) -> list[Ids]:
    found: dict[int, Ids] = {}
    for text in stories(40 * rows, seed):
        found.setdefault((int(text[1]) - 2) // 10, text)
    return list(found.values())[:rows]


@pytest.mark.parametrize("order", [2, 3])
def test_counts_of_other_text_put_texts_together(order: int) -> None:
    score = NGrams(stories(4000, 1), VOCABULARY, order=order)
    groups = [distinct_topics(6, seed) for seed in range(5)]
    for whole in groups:
        positions = by_position(whole, 10)
        assert exact_texts(assemble(positions, ENDS, score), whole, IGNORE) == 6
        # Of other texts nothing comes out, and by chance next to nothing does.
        other = distinct_topics(6, 99)
        assert exact_texts(assemble(positions, ENDS, score), other, IGNORE) == 0
    dealt = [deal(by_position(whole, 10), ENDS, np.random.default_rng(0)) for whole in groups]
    assert sum(exact_texts(a, b, IGNORE) for a, b in zip(dealt, groups, strict=True)) <= 2


def test_a_planted_name_is_read_whole() -> None:
    """A name of three words that other text has elsewhere."""
    name = np.array([2, 13, 24])
    other = [np.array([START, *name, END])] * 3 + stories(4000, 1)
    texts = [np.array([START, 32, 35, *name, 38, END]), *distinct_topics(5, 3)]
    read = assemble(by_position(texts, 10), ENDS, NGrams(other, VOCABULARY, order=3))
    assert holds(read, name)
    assert not holds(read, name[::-1])
    assert not holds(texts[1:], name)
    with pytest.raises(ValueError):
        holds(read, name[:0])


def test_a_bigram_deal_is_the_best_of_all() -> None:
    """Brute force over all 6^3 ways to deal three tokens at three positions to three texts."""
    rng = np.random.default_rng(4)
    other = [rng.integers(2, 12, 6) for _ in range(60)]
    score = NGrams(other, 12, order=2)
    positions = [rng.integers(2, 12, 3) for _ in range(4)]

    def worth(texts: Sequence[Sequence[int]]) -> float:
        pairs = [(text[:i], text[i]) for text in texts for i in range(1, len(text))]
        return sum(float(score([tuple(b)], np.array([t]))[0, 0]) for b, t in pairs)

    ways = itertools.product(itertools.permutations(range(3)), repeat=3)
    best = max(
        worth([[positions[0][row], *(positions[1 + s][way[s][row]] for s in range(3))] for row in range(3)])
        for way in ways
    )
    for beams in (1, 4):
        found = assemble(positions, ENDS, score, beams=beams)
        assert worth([text.tolist() for text in found]) == pytest.approx(best)


def test_kept_alternatives_mend_what_a_later_word_tells() -> None:
    """At the second word both deals look alike, by a hair the wrong one better; the third settles it."""
    true = [np.array([10, 20, 30]), np.array([11, 20, 31]), np.array([12, 21, 32])]

    def score(beginnings: Sequence[tuple[int, ...]], tokens: Ids) -> np.ndarray:
        table = np.full((len(beginnings), len(tokens)), -5.0)
        for i, b in enumerate(beginnings):
            for j, t in enumerate(tokens.tolist()):
                if len(b) == 1:
                    table[i, j] = -1.0 if (b[0], t) == (10, 21) else -1.1
                elif any((*b, t) == tuple(text.tolist()) for text in true):
                    table[i, j] = 0.0
        return table

    positions = by_position(true, 3)
    assert exact_texts(assemble(positions, ENDS, score, beams=1), true, frozenset()) < 3
    assert exact_texts(assemble(positions, ENDS, score, beams=4), true, frozenset()) == 3


def test_tokens_too_many_or_too_few_at_a_position_are_borne() -> None:
    score = NGrams(stories(500, 1), VOCABULARY)
    texts = distinct_topics(3, 5)
    positions = by_position(texts, 10)
    more = [*positions[:2], np.append(positions[2], 400), *positions[3:]]
    assert len(assemble(more, ENDS, score)) == 3
    fewer = assemble([*positions[:2], positions[2][:2], *positions[3:]], ENDS, score)
    assert sorted(map(len, fewer))[0] == 2
    shuffled = [np.random.default_rng(1).permutation(ids) for ids in positions]
    for a, b in zip(assemble(shuffled, ENDS, score), assemble(positions, ENDS, score), strict=True):
        assert a.tolist() == b.tolist()
    for nothing in ([], [np.zeros(0, np.int64)]):
        with pytest.raises(SecureflError):
            assemble(nothing, ENDS, score)


def test_interpolated_counts_by_hand() -> None:
    """Text 2 3 2 4 over 5 ids, strength 1: P1(3) = (1 + 1/5) / 5, P2(3 | 2) = (1 + P1(3)) / (2 + 1)."""
    score = NGrams([np.array([2, 3, 2, 4])], 5, order=2)
    unigram = (1 + 1 / 5) / 5
    assert score([()], np.array([3]))[0, 0] == pytest.approx(math.log(unigram))
    assert score([(2,)], np.array([3]))[0, 0] == pytest.approx(math.log((1 + unigram) / 3))
    for context in ((), (2,), (4,), (1, 2)):
        assert np.exp(score([context], np.arange(5))).sum() == pytest.approx(1)
    for bad in ({"order": 0}, {"strength": 0.0}):
        with pytest.raises(SecureflError):
            NGrams([], 5, **bad)  # type: ignore[arg-type]


def test_a_causal_model_scores_a_token_by_the_text_it_makes(tiny_llm: Path) -> None:
    """Against one pass for one text at a time, without padding or memory."""
    model, tokenizer = load_llm(str(tiny_llm))
    words = ["", "", "the", "goal", "of", "match"]

    def decode(ids: Sequence[int]) -> str:
        return " ".join(words[i] for i in ids)

    score = CausalScorer(model, tokenizer, decode, frozenset({START, END}), batch_size=3)

    def alone(ids: Sequence[int], ended: bool) -> float:
        start = tokenizer.eos_token_id
        row = [start, *tokenizer.encode(decode(ids), add_special_tokens=False), *([start] if ended else [])]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        return sum(float(logits[i, token]) for i, token in enumerate(row[1:]))

    found = score([(START, 2), (START, 2, 3, 4)], np.array([5, END]))
    for i, b in enumerate(((2,), (2, 3, 4))):
        assert found[i, 0] == pytest.approx(alone((*b, 5), False) - alone(b, False), abs=1e-3)
        assert found[i, 1] == pytest.approx(alone(b, True) - alone(b, False), abs=1e-3)
    texts = [np.array([START, 2, 3, END]), np.array([START, 4, 5, END])]
    read = assemble(by_position(texts, 4), ENDS, score)
    assert sorted(len(one) for one in read) == [4, 4]
