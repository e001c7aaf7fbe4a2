"""Attack 2 where something is withheld or better known: sizes, weights, rounds, the encoder's own table."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from attacks import dictionary, moved_table, token_rounds, token_scores, token_sizes, tokens, weighted_tokens
from attacks.adversary import NotEnough
from securefl.errors import SecureflError
from securefl.models import load_slm
from securefl.slm import Slm
from securefl.training import embed
from tests import tiny
from tests.attacks.centroids import LENGTH, exact_target, noisy_target, prior_of, texts_of, truth_of


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("wide") / "encoder", width=128, layers=1)
    return load_slm(str(folder), ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0)


def recall(slm: Slm, read: list[list[dictionary.Ids]], truth: list[list[dictionary.Ids]]) -> float:
    return token_scores.overlap(read, truth, dictionary.special_ids(slm)).recall


# Sizes that were withheld.


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 12, 16])
def test_the_size_of_an_exact_centroid_is_found(slm: Slm, k: int) -> None:
    texts, auxiliary = texts_of(4 * k, seed=20 + k), texts_of(100, seed=4)
    withheld = replace(exact_target(slm, texts, k), sizes=np.full(4, np.nan, np.float32))
    found = token_sizes.estimate_sizes(slm, withheld, prior_of(slm, auxiliary), auxiliary)
    assert found.sizes.tolist() == [k] * 4
    assert found.found.all()


def test_a_size_that_one_position_leaves_open_the_texts_ends_settle(slm: Slm) -> None:
    """Four texts that begin alike look like one until one of them ends."""
    texts, auxiliary = (
        ["goal match", "goal match", "goal match team", "goal match cup"],
        texts_of(100, seed=4),
    )
    target = exact_target(slm, texts, 4)
    found = token_sizes.estimate_sizes(slm, target, prior_of(slm, auxiliary), auxiliary)
    assert found.sizes.tolist() == [4]
    # Four times the same text are, by every sum, also one.
    same = exact_target(slm, ["goal match"] * 4, 4)
    assert token_sizes.estimate_sizes(slm, same, prior_of(slm, auxiliary), auxiliary).sizes.tolist() == [1]


def test_more_texts_than_are_looked_for_are_not_found(slm: Slm) -> None:
    texts, auxiliary = texts_of(14, seed=21), texts_of(100, seed=4)
    target = exact_target(slm, texts, 7)
    found = token_sizes.estimate_sizes(slm, target, prior_of(slm, auxiliary), auxiliary, most=6)
    assert not found.found.any()


@pytest.mark.parametrize(("k", "deviation"), [(3, 0.2), (8, 0.5)])
def test_the_noise_on_a_centroid_tells_its_size(slm: Slm, k: int, deviation: float) -> None:
    texts, auxiliary = texts_of(4 * k, seed=22, ragged=False), texts_of(100, seed=23, ragged=False)
    target = noisy_target(slm, texts, k, deviation)
    withheld = replace(target, sizes=np.ones(4, np.float32))
    found = token_sizes.estimate_sizes(slm, withheld, prior_of(slm, auxiliary), auxiliary, most=12)
    assert found.sizes.tolist() == [k] * 4


# Rows of unequal weight.


def weighted(
    slm: Slm, texts: list[str], weights: list[np.ndarray], seed: int
) -> weighted_tokens.WeightedTarget:
    """Weighted means of consecutive texts, computed in float64; the weights are handed over shuffled."""
    vectors, mask = embed(slm, texts, 0)
    rng, start, means, masks = np.random.default_rng(seed), 0, [], []
    for one in weights:
        rows = slice(start, start + len(one))
        share = one[:, None] * mask[rows]
        total = np.einsum("ns,nsd->sd", share.astype(np.float64), vectors[rows].astype(np.float64))
        means.append(total / np.maximum(share.sum(0), 1e-12)[:, None])
        masks.append(mask[rows].any(0))
        start += len(one)
    return weighted_tokens.WeightedTarget(
        np.array(means, np.float32), np.array(masks, np.float32), [rng.permutation(one) for one in weights],
        [np.zeros(len(one), np.int64) for one in weights],
    )  # fmt: skip


@pytest.mark.parametrize("k", [4, 6, 8])
def test_unequal_weights_give_whole_texts_away(slm: Slm, k: int) -> None:
    texts, auxiliary = texts_of(3 * k, seed=24), texts_of(100, seed=4)
    rng = np.random.default_rng(k)
    weights = [(drawn := rng.uniform(0.5, 1.5, k)) / drawn.sum() for _ in range(3)]
    read = weighted_tokens.recover_weighted(
        slm, weighted(slm, texts, weights, 1), prior_of(slm, auxiliary), auxiliary
    )
    ids = dictionary.token_ids(slm, texts)
    for c, given in enumerate(weights):
        order = np.argsort(-given)
        for place, row in enumerate(order):
            text = read.texts[c][place]
            assert text[text >= 0].tolist() == ids[c * k + row].tolist()
    assert recall(slm, read.tokens(), truth_of(slm, texts, k)) == 1.0


@pytest.mark.parametrize("how", ["uniform", "size"])
def test_an_average_of_two_silos_centroids_is_read(slm: Slm, how: str) -> None:
    """Silo 1 has two rows in a centroid, silo 2 has three; some end early, so weights change on the way."""
    first, second, auxiliary = texts_of(4, seed=25), texts_of(6, seed=26), texts_of(100, seed=4)
    parts = [exact_target(slm, first, 2), exact_target(slm, second, 3)]
    target = weighted_tokens.merged(parts, "size" if how == "size" else "uniform")
    shares = (2 / 5, 3 / 5) if how == "size" else (1 / 2, 1 / 2)
    by_hand = shares[0] * parts[0].centroids[:, 1] + shares[1] * parts[1].centroids[:, 1]
    np.testing.assert_allclose(target.centroids[:, 1], by_hand, atol=1e-6)
    read = weighted_tokens.recover_weighted(slm, target, prior_of(slm, auxiliary), auxiliary)
    truth = truth_of(slm, [*first[:2], *second[:3], *first[2:], *second[3:]], 5)
    assert recall(slm, read.tokens(), truth) == 1.0


def test_weights_that_are_none_are_refused(slm: Slm) -> None:
    target = exact_target(slm, texts_of(2, seed=1), 2)
    for bad in (np.array([0.5, 0.6]), np.array([1.5, -0.5]), np.zeros(0)):
        with pytest.raises(SecureflError):
            weighted_tokens.WeightedTarget(
                target.centroids, target.mask, [bad], [np.zeros(len(bad), np.int64)]
            )


# Several rounds.


def test_four_rounds_are_worth_half_the_noise(slm: Slm) -> None:
    texts, auxiliary, k, s = texts_of(96, 27, ragged=False), texts_of(300, 28, ragged=False), 6, 2.0
    prior, truth = prior_of(slm, auxiliary), truth_of(slm, texts, k)
    rounds = [noisy_target(slm, texts, k, s, seed) for seed in range(4)]
    together = token_rounds.average(rounds)
    assert together.deviation == pytest.approx(s / 2)

    def read(target: tokens.Target) -> float:
        return recall(slm, tokens.recover(slm, target, prior, auxiliary).tokens, truth)

    one, four, half = read(rounds[0]), read(together), read(noisy_target(slm, texts, k, s / 2, seed=9))
    assert four == pytest.approx(half, abs=0.05)
    assert four > one + 0.1


def test_averages_weigh_rounds_by_their_noise(slm: Slm) -> None:
    """By hand: variances 1 and 4 get weights .8 and .2 on the sums, and leave a variance of .8."""
    texts, k = texts_of(6, 29, ragged=False), 3
    a, b = noisy_target(slm, texts, k, 1.0, 1), noisy_target(slm, texts, k, 2.0, 2)
    both = token_rounds.average([a, b])
    assert both.deviation == pytest.approx(np.sqrt(0.8))
    np.testing.assert_allclose(both.centroids, 0.8 * a.centroids + 0.2 * b.centroids, rtol=1e-4, atol=1e-5)
    # An average of averages is the average.
    again = token_rounds.average([both, noisy_target(slm, texts, k, 2.0, 3)])
    assert again.deviation == pytest.approx((1 + 1 / 4 + 1 / 4) ** -0.5)


def test_rounds_of_a_table_that_moved_are_read_side_by_side(slm: Slm) -> None:
    texts, auxiliary, k, s = texts_of(96, 30, ragged=False), texts_of(300, 31, ragged=False), 6, 2.0
    prior, truth, other = prior_of(slm, auxiliary), truth_of(slm, texts, k), moved(slm, 0.05, 0.3)
    parts = [noisy_target(slm, texts, k, s, 1), noisy_target(other, texts, k, s, 2)]
    target, scales = token_rounds.stack(parts)
    layers = (dictionary.Layer(slm, LENGTH), dictionary.Layer(other, LENGTH))
    stacked = dictionary.Stacked(layers, scales)
    both = recall(slm, tokens.recover(slm, target, prior, auxiliary, dictionary=stacked).tokens, truth)
    one = recall(slm, tokens.recover(slm, parts[0], prior, auxiliary).tokens, truth)
    mixed = token_rounds.average(parts)
    assert both > one + 0.05
    assert both > recall(slm, tokens.recover(slm, mixed, prior, auxiliary).tokens, truth)


def test_rounds_that_do_not_belong_together_are_refused(slm: Slm) -> None:
    texts = texts_of(6, 29, ragged=False)
    noised = noisy_target(slm, texts, 3, 1.0)
    for others in ([], [noised, noisy_target(slm, texts, 2, 1.0)], [noised, exact_target(slm, texts, 3)]):
        with pytest.raises(SecureflError):
            token_rounds.average(others)
        with pytest.raises(SecureflError):
            token_rounds.stack(others)


# An encoder whose table moved.


def moved(slm: Slm, each: float, shift: float) -> Slm:
    """A copy whose embedding layer gives every token a common shift more, and a random vector of its own."""
    other = copy.deepcopy(slm)
    layer, generator = other.model.base_model.embeddings, torch.Generator().manual_seed(5)
    size = dictionary.vocabulary_size(slm)
    own = each * torch.randn((size, other.width), generator=generator)
    common = shift * torch.randn(other.width, generator=generator)

    def add(_: object, arguments: tuple[object, ...], keywords: dict[str, torch.Tensor], out: torch.Tensor):  # type: ignore[no-untyped-def]
        return out + common + own[keywords["input_ids"]]

    layer.register_forward_hook(add, with_kwargs=True)
    return other


@pytest.mark.parametrize("k", [4, 8])
def test_a_table_that_moved_is_moved_back(slm: Slm, k: int) -> None:
    texts, auxiliary = texts_of(12 * k, seed=32), texts_of(200, seed=33)
    prior, truth = prior_of(slm, auxiliary), truth_of(slm, texts, k)
    target = exact_target(moved(slm, 0.05, 0.5), texts, k)
    plain = recall(slm, tokens.recover(slm, target, prior, auxiliary).tokens, truth)
    adapted = moved_table.recover_moved(slm, target, prior, auxiliary)
    found = recall(slm, adapted.recovered.tokens, truth)
    assert plain < 0.9
    assert found >= 0.98
    # What is left is what every token moved by itself, or less where they are so few that a map fits them.
    assert adapted.slack[-1] <= 0.06


def test_a_table_that_did_not_move_stays(slm: Slm) -> None:
    texts, auxiliary = texts_of(48, seed=34), texts_of(200, seed=33)
    adapted = moved_table.recover_moved(slm, exact_target(slm, texts, 4), prior_of(slm, auxiliary), auxiliary)
    assert recall(slm, adapted.recovered.tokens, truth_of(slm, texts, 4)) == 1.0
    assert adapted.slack[-1] < 1e-3


def test_a_movement_that_cannot_be_told_is_refused(slm: Slm) -> None:
    auxiliary = texts_of(100, seed=33)
    prior = prior_of(slm, auxiliary)
    with pytest.raises(NotEnough):
        moved_table.recover_moved(slm, exact_target(slm, texts_of(2, 1), 2), prior, auxiliary)
    noised = noisy_target(slm, texts_of(24, 1, ragged=False), 4, 1.0)
    with pytest.raises(NotEnough):
        moved_table.recover_moved(slm, noised, prior, auxiliary)
