"""Attack 2: exact sums are read back exactly, noise never pushes the guess below the prior."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from attacks import tokens
from attacks.pursuit import Problem, solve
from securefl.methods.fedkc import compose
from securefl.models import Slm, load_slm
from securefl.release import GaussianSums, NonPrivate
from securefl.training import embed
from tests import tiny

LENGTH = 10
PLAIN = NonPrivate(reason="a test")


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("wide") / "encoder", width=64, layers=1)
    return load_slm(str(folder), ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0)


def texts_of(rows: int, seed: int, ragged: bool = True) -> list[str]:
    made = [text for text, _ in tiny.make_texts(rows, seed=seed, length=8)]
    lengths = np.random.default_rng(seed).integers(2, 9, rows) if ragged else [8] * rows
    return [" ".join(text.split()[:n]) for text, n in zip(made, lengths, strict=True)]


def noisy(deviation: float) -> GaussianSums:
    """A claim with `deviation` on each number of a sum and a clip that cuts nothing."""
    return GaussianSums(
        epsilon=1.0, delta=1e-5, mu=1.0, clip=1e4, noise_multiplier=deviation / 1e4, count_multiplier=1.0,
        prediction_multiplier=1.0, generator="test", simulated=True,
    )  # fmt: skip


def exact_target(slm: Slm, texts: list[str], k: int) -> tokens.Target:
    vectors, mask = embed(slm, texts, "embeddings")
    means, _ = compose(vectors, mask, np.full((len(texts), 2), 0.5), np.arange(len(texts)) // k, 1)
    assert means.mask is not None
    return tokens.Target(means.vectors, means.mask, means.sizes, PLAIN)


def noisy_target(slm: Slm, texts: list[str], k: int, deviation: float) -> tokens.Target:
    vectors, _ = embed(slm, texts, "embeddings")
    q = len(texts) // k
    sums = vectors.reshape(q, k, *vectors.shape[1:]).sum(1)
    sums = sums + np.random.default_rng(9).normal(0, deviation, sums.shape)
    return tokens.Target(
        (sums / k).astype(np.float32), np.ones((q, LENGTH), np.float32), np.full(q, k, np.float32),
        noisy(deviation),
    )  # fmt: skip


def truth_of(slm: Slm, texts: list[str], k: int) -> list[list[tokens.Ids]]:
    ids = tokens.token_ids(slm, texts)
    return [tokens.by_position(ids[start : start + k], LENGTH) for start in range(0, len(ids), k)]


def prior_of(slm: Slm, auxiliary: list[str]) -> tokens.Prior:
    return tokens.fit_prior(tokens.token_ids(slm, auxiliary), LENGTH, tokens.vocabulary_size(slm))


@pytest.mark.parametrize("k", [1, 2, 6])
def test_every_token_of_an_exact_centroid_is_read_back(slm: Slm, k: int) -> None:
    texts, auxiliary = texts_of(6 * k, seed=3), texts_of(100, seed=4)
    target, truth = exact_target(slm, texts, k), truth_of(slm, texts, k)
    read = tokens.recover(slm, target, prior_of(slm, auxiliary), auxiliary)
    assert tokens.overlap(read.tokens, truth, tokens.special_ids(slm)).recall == 1.0
    # Texts end at different places, so this holds only if the number behind every position was found too.
    for row, true in zip(read.tokens, truth, strict=True):
        assert [sorted(ids) for ids in row] == [sorted(ids) for ids in true]
    assert read.certain[target.mask > 0].all()


def test_the_position_before_is_only_believed_where_it_is_certain(slm: Slm) -> None:
    """Wrong auxiliary lengths mislead the count of texts at a position; the end tokens correct it."""
    texts, k = texts_of(12, seed=5), 4
    long = texts_of(100, seed=6, ragged=False)
    read = tokens.recover(slm, exact_target(slm, texts, k), prior_of(slm, long), long)
    overlap = tokens.overlap(read.tokens, truth_of(slm, texts, k), tokens.special_ids(slm))
    assert overlap.recall == 1.0
    assert overlap.f1 == 1.0


@pytest.mark.parametrize("deviation", [0.01, 0.3, 1.0, 3.0, 10.0, 1e3])
def test_noise_never_pushes_the_guess_below_the_prior(slm: Slm, deviation: float) -> None:
    texts, auxiliary, k = texts_of(48, 7, ragged=False), texts_of(300, 8, ragged=False), 6
    target, prior = noisy_target(slm, texts, k, deviation), prior_of(slm, auxiliary)
    read = tokens.recover(slm, target, prior, auxiliary)
    guess = tokens.guesses(prior, tokens.expected_counts(target, prior))
    truth, ignore = truth_of(slm, texts, k), tokens.special_ids(slm)
    found, base = (tokens.overlap(x, truth, ignore).recall for x in (read.tokens, guess))
    assert found >= base - 0.02
    if deviation == 0.01:
        assert found > 0.85
    if deviation == 1e3:
        assert all(np.array_equal(a, b) for x, y in zip(read.tokens, guess, strict=True)
                   for a, b in zip(x, y, strict=True))  # fmt: skip


def test_a_partition_that_is_not_the_releases_falls_to_what_is_common(slm: Slm) -> None:
    """Shuffled truth: what is read of one centroid says of others no more than the prior does."""
    texts, auxiliary, k = texts_of(60, seed=10), texts_of(300, seed=11), 6
    target, prior = exact_target(slm, texts, k), prior_of(slm, auxiliary)
    read = tokens.recover(slm, target, prior, auxiliary)
    truth, ignore = truth_of(slm, texts, k), tokens.special_ids(slm)
    shifted = truth[1:] + truth[:1]
    guess = tokens.guesses(prior, tokens.expected_counts(target, prior))
    base = tokens.overlap(guess, truth, ignore).recall
    assert tokens.overlap(read.tokens, shifted, ignore).recall <= base + 0.05 < 0.5


def test_both_ways_to_the_dictionary_agree(slm: Slm) -> None:
    layer = tokens._Layer(slm, LENGTH)
    assert layer._alone
    ids = torch.arange(40)
    for position in (0, 3, LENGTH - 1):
        whole = layer._last(ids, position).detach()
        torch.testing.assert_close(layer.at(position, ids), whole, rtol=1e-5, atol=1e-5)


def test_the_guess_maximises_the_expected_overlap_of_independent_counts() -> None:
    """Brute force over all multisets of 3: the chosen one has the largest product of Poisson increments."""
    rates = np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)
    prior = tokens.Prior(rates, np.ones(1), np.ones(4, np.int64))

    def worth(multiset: tuple[int, ...]) -> float:
        value = 1.0
        for token in range(4):
            for j in range(1, multiset.count(token) + 1):
                value *= rates[0, token] / j
        return value

    best = max(itertools.combinations_with_replacement(range(4), 3), key=worth)
    assert sorted(prior.guess(0, 3).tolist()) == sorted(best)
    assert prior.guess(0, 0).size == 0


def test_overlap_by_hand() -> None:
    guess = [[np.array([5, 5, 7, 0]), np.array([9])]]
    truth = [[np.array([5, 7, 7, 0]), np.array([8])]]
    found = tokens.overlap(guess, truth, frozenset({0}))
    # 0 is special. First unit: one 5 and one 7 of three; second: none of one.
    assert (found.hits.tolist(), found.true.tolist(), found.guessed.tolist()) == ([2, 0], [3, 1], [3, 1])
    assert found.recall == pytest.approx(0.5)
    assert found.f1 == pytest.approx(0.5)
    only = np.zeros(10, bool)
    only[8] = True
    assert tokens.overlap(guess, truth, frozenset({0}), only).true.tolist() == [1]


def test_pursuit_finds_the_best_subset_that_brute_force_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    atoms = torch.randn((12, 6), generator=generator)
    problem = Problem(
        sums=torch.stack([atoms[[0, 3, 3]].sum(0), atoms[[1, 5, 11]].sum(0)]),
        due=torch.tensor([3, 3]),
        atoms=torch.nn.functional.pad(atoms, (0, 0, 0, 1)),
        log_rates=torch.zeros((2, 13)),
        variances=torch.ones(6),
        deviation=0.0,
        exact=1e-3,
    )
    chosen, error = solve(problem)
    for row, sums in zip(chosen, problem.sums, strict=True):
        every = itertools.combinations_with_replacement(range(12), 3)
        best = min(every, key=lambda c: float((sums - atoms[list(c)].sum(0)).norm()))
        assert tuple(sorted(row.tolist())) == best
    assert float(error.max()) < 1e-3


@pytest.mark.real
def test_real_tokens_of_sixteen_texts_are_read_back(minilm: str, test_data_dir: Path) -> None:
    """The published figure for random groups: recall 1.00 up to 32 texts; here 16 at ten positions."""
    path = test_data_dir / "data" / "sib200" / "eng_Latn" / "train.tsv"
    texts = [line.split("\t")[-1] for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    slm = load_slm(minilm, ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0)
    k, auxiliary = 16, texts[64:364]
    target, truth = exact_target(slm, texts[:64], k), truth_of(slm, texts[:64], k)
    prior = prior_of(slm, auxiliary)
    read = tokens.recover(slm, target, prior, auxiliary)
    ignore = tokens.special_ids(slm)
    guess = tokens.guesses(prior, tokens.expected_counts(target, prior))
    assert tokens.overlap(read.tokens, truth, ignore).recall == 1.0
    assert tokens.overlap(guess, truth, ignore).recall < 0.5
