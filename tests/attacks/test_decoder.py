"""Attack 10, learned: texts of a nearly linear encoder are read back, and against others they are chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from attacks import decoder, word_maps
from attacks.adversary import NotEnough
from attacks.decoder import Climb, Decoded
from attacks.dictionary import Ids
from attacks.membership import Vectors
from attacks.token_scores import overlap
from attacks.word_maps import Reader
from securefl.errors import SecureflError
from securefl.release import Claim
from tests.attacks.synthetic import PLAIN, claim

START, END = 0, 1
SPECIAL = frozenset({START, END})
VOCABULARY, WIDTH = 60, 24
TABLE = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH))
RATES = np.r_[0, 0, np.linspace(3, 1, VOCABULARY - 2)]
RATES = RATES / RATES.sum()


def texts_of(rows: int, rng: np.random.Generator) -> list[Ids]:
    return [
        np.r_[START, rng.choice(VOCABULARY, int(rng.integers(4, 9)), False, RATES), END] for _ in range(rows)
    ]


def ask(texts: Sequence[Ids]) -> Vectors:
    """A text's vector bends what its tokens add up to, so no linear map gives it exactly."""
    return np.stack([np.tanh(TABLE[ids].mean(0) * 1.5) + 0.1 for ids in texts])


def f1(guesses: Sequence[Ids], truths: Sequence[Ids]) -> float:
    return overlap([[one] for one in guesses], [[one] for one in truths], SPECIAL).f1


def fitted(
    rng: np.random.Generator, sizes: Vectors | None = None, terms: Claim = PLAIN, rows: int = 500
) -> Reader:
    texts = texts_of(rows, rng)
    return word_maps.fit(
        ask(texts), texts, np.ones(1) if sizes is None else sizes, terms, SPECIAL, rng, groups=1500
    )


def read(reader: Reader, centroids: Vectors, seed: int = 0, budget: int = 500) -> Decoded:
    return decoder.decode(reader, ask, centroids, np.random.default_rng(seed), budget=budget, weight=0.02)


@pytest.fixture(scope="module")
def single() -> tuple[Reader, list[Ids], Decoded]:
    rng = np.random.default_rng(1)
    reader, own = fitted(rng), texts_of(12, rng)
    return reader, own, read(reader, ask(own))


def test_single_texts_are_read(single: tuple[Reader, list[Ids], Decoded]) -> None:
    reader, own, found = single
    commonest = [reader.commonest(len(one) - 2) for one in found.tokens]
    assert f1(found.tokens, own) > 0.8
    assert f1(found.tokens, own) > f1(found.start, own) + 0.05
    assert f1(found.start, own) > f1(commonest, own) + 0.2
    assert found.cosines.min() > 0.9
    assert (found.asked <= 500 + 100).all()
    for text in found.tokens:
        assert (text[0], text[-1]) == (START, END)
        assert not np.isin(text[1:-1], list(SPECIAL)).any()


def test_shuffled_truth_falls_to_a_random_text(single: tuple[Reader, list[Ids], Decoded]) -> None:
    _, own, found = single
    rng = np.random.default_rng(2)
    chance = np.mean([f1(texts_of(12, rng), own) for _ in range(20)])
    mixed = np.mean([f1(found.tokens, own[i:] + own[:i]) for i in range(1, 12)])
    assert abs(mixed - chance) < 0.08


def test_the_same_seed_reads_the_same(single: tuple[Reader, list[Ids], Decoded]) -> None:
    reader, own, _ = single
    first, second = (read(reader, ask(own[:3]), seed=5, budget=200) for _ in range(2))
    assert [t.tolist() for t in first.tokens] == [t.tolist() for t in second.tokens]


def test_a_climb_never_scores_below_its_start(single: tuple[Reader, list[Ids], Decoded]) -> None:
    reader, own, _ = single
    for text in own[:4]:
        aim = ask([text])[0]
        climb = Climb(reader, ask, aim, reader.log_probabilities(aim[None])[0], np.random.default_rng(0), 0.1)
        start = reader.start(reader.log_probabilities(aim[None])[0], 5)
        end = climb.run(start, 150)
        before, after = climb.score([start, end])
        assert after >= before


def test_words_promise_what_exchanges_bring(single: tuple[Reader, list[Ids], Decoded]) -> None:
    """What the learned map says of exchanges goes along with what the encoder then says."""
    reader, own, _ = single
    promised, brought = [], []
    for text in own[:4]:
        start = texts_of(1, np.random.default_rng(len(promised)))[0]
        aim = ask([text])[0]
        climb = Climb(reader, ask, aim, np.zeros(len(reader.vocabulary)), np.random.default_rng(0), 0.0)
        turned = reader.turned(ask([start]))
        gain = climb._gains(start, turned[0])
        for place in range(len(start) - 2):
            for column in range(0, len(reader.vocabulary), 7):
                other = start.copy()
                other[1 + place] = reader.vocabulary[column]
                promised.append(gain[place, column])
                brought.append(float((climb.score([other]) - climb.score([start]))[0]))
    assert np.corrcoef(promised, brought)[0, 1] > 0.7


def test_the_start_is_the_probable_tokens_in_their_usual_order() -> None:
    rng = np.random.default_rng(3)
    texts = [np.r_[START, rng.permutation([2, 3, 4]), 9, rng.permutation([5, 6]), END] for _ in range(80)]
    vectors = rng.standard_normal((80, WIDTH))
    reader = word_maps.fit(vectors, texts, np.ones(1), PLAIN, SPECIAL, rng, groups=200)
    assert reader.vocabulary.tolist() == [2, 3, 4, 5, 6, 9]
    assert reader.longest == 6
    assert reader.start(np.log([0.9, 0.1, 0.1, 0.8, 0.1, 0.9]), 4).tolist() == [START, 2, 9, 5, END]
    assert reader.lengths(vectors[:3]).tolist() == [6, 6, 6]


def test_frames_are_what_all_texts_begin_and_end_with() -> None:
    both = [np.array([0, 5, 6, 1]), np.array([0, 5, 1])]
    prefix, suffix = word_maps.frame(both, SPECIAL)
    assert (prefix.tolist(), suffix.tolist()) == ([0], [1])
    prefix, suffix = word_maps.frame([np.array([5, 6]), np.array([5, 7])], SPECIAL)
    assert (len(prefix), len(suffix)) == (0, 0)
    with pytest.raises(NotEnough):
        word_maps.frame([], SPECIAL)


def groups_of(
    rng: np.random.Generator, n: int, sigma: float | None = None
) -> tuple[Reader, Vectors, list[list[Ids]]]:
    terms = PLAIN if sigma is None else claim(sigma, 1e-3, clip=20.0)
    reader = fitted(rng, np.array([float(n)]), terms)
    groups = [texts_of(n, rng) for _ in range(10)]
    sums = np.stack([ask(group).sum(0) for group in groups])
    if sigma is not None:
        sums = sums + rng.normal(0, 20 * sigma, sums.shape)
    return reader, sums / n, groups


def precision(guesses: Sequence[Ids], groups: Sequence[Sequence[Ids]]) -> float:
    hits = [
        np.isin(text[1:-1], np.concatenate(group)).mean() for text, group in zip(guesses, groups, strict=True)
    ]
    return float(np.mean(hits))


def test_words_of_a_group_are_read_from_its_mean() -> None:
    reader, centroids, groups = groups_of(np.random.default_rng(4), 3)
    found = read(reader, centroids, budget=200)
    commonest = [reader.whole(reader.commonest(len(one) - 2)) for one in found.tokens]
    assert precision(found.tokens, groups) > precision(commonest, groups) + 0.2
    mixed = groups[3:] + groups[:3]
    assert precision(found.tokens, mixed) < precision(found.tokens, groups) - 0.2


def test_little_noise_leaves_most_and_drowning_noise_the_commonest_tokens() -> None:
    reader, centroids, groups = groups_of(np.random.default_rng(5), 1, 0.002)
    own = [group[0] for group in groups]
    assert f1(read(reader, centroids, budget=200).tokens, own) > 0.55
    reader, centroids, groups = groups_of(np.random.default_rng(6), 1, 2.0)
    own = [group[0] for group in groups]
    found = read(reader, centroids, budget=200)
    # The linear map has no say left: all starts are the same tokens.
    assert len({tuple(sorted(one[1:5].tolist())) for one in found.start}) <= 2
    assert f1(found.tokens, own) < 0.4


def test_what_cannot_be_fitted_is_said() -> None:
    rng = np.random.default_rng(7)
    texts = texts_of(80, rng)
    good = ask(texts)
    with pytest.raises(NotEnough, match="needs at least 320"):
        word_maps.fit(good, texts, np.array([40.0]), PLAIN, SPECIAL, rng)
    with pytest.raises(NotEnough, match="at least 64"):
        word_maps.fit(good[:60], texts[:60], np.ones(1), PLAIN, SPECIAL, rng)
    with pytest.raises(NotEnough, match="no content tokens"):
        word_maps.fit(good, [np.array([START, END])] * 80, np.ones(1), PLAIN, SPECIAL, rng)
    with pytest.raises(SecureflError, match="80 auxiliary vectors for 79"):
        word_maps.fit(good, texts[1:], np.ones(1), PLAIN, SPECIAL, rng)
    for bad in (np.full_like(good, np.nan), np.ones_like(good)):
        with pytest.raises(SecureflError, match="would mean nothing"):
            word_maps.fit(bad, texts, np.ones(1), PLAIN, SPECIAL, rng)


def test_bad_targets_and_answers_are_refused(single: tuple[Reader, list[Ids], Decoded]) -> None:
    reader, own, _ = single
    with pytest.raises(SecureflError, match="would mean nothing"):
        read(reader, np.full((2, WIDTH), np.nan))
    for answer in (np.full((1, WIDTH), np.inf), np.ones((1, WIDTH - 1))):
        with pytest.raises(SecureflError, match="the encoder's answers"):
            decoder.decode(
                reader,
                lambda texts, a=answer: np.repeat(a, len(texts), 0),
                ask(own[:2]),
                np.random.default_rng(0),
            )


def test_tokens_by_falling_frequency_without_the_special_ones() -> None:
    texts = [np.array([START, 7, 5, 7, END]), np.array([START, 7, 9, 9, END])]
    assert word_maps.by_frequency(texts, frozenset({START, END})).tolist() == [7, 9, 5]
    assert word_maps.by_frequency([], SPECIAL).tolist() == []
