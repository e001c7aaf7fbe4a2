"""Attack 6 on synthetic rows: more rounds find more, a difference is the row, and no claim is exceeded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from attacks import bounds, membership, rounds
from attacks.adversary import NotEnough
from attacks.membership import Target
from attacks.rounds import Round
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.release import Claim, DpSgd, GaussianSums, Independent
from tests.attacks import synthetic
from tests.attacks.synthetic import PLAIN

WIDTH = 16
CLIP = 3.0
TURNS = np.linalg.qr(np.random.default_rng(9).standard_normal((4, WIDTH, WIDTH)))[0]


rows = partial(synthetic.rows, width=WIDTH)
claim = partial(synthetic.claim, clip=CLIP)


def released(
    members: membership.Vectors, terms: Claim, rng: np.random.Generator, share: float = 1.0
) -> Target:
    """One centroid of the members; share: how much of the claimed noise is really added."""
    if not isinstance(terms, GaussianSums):
        return Target(members.mean(0)[None], np.array([float(len(members))]), terms)
    n = max(1.0, len(members) + share * rng.normal(0, terms.count_multiplier))
    noise = rng.normal(0, share * terms.clip * terms.noise_multiplier, members.shape[1])
    return Target((clip_rows(members, terms.clip).sum(0) + noise)[None] / n, np.array([n]), terms)


def game(count: int, terms: Claim, rng: np.random.Generator, n: int = 8, share: float = 1.0) -> list[Round]:
    """The same rows in `count` rounds, each with an encoder of its own: here a rotation."""
    members, controls, auxiliary = rows(n, rng), rows(2 * n, rng), rows(200, rng)
    return [
        Round(released(members @ turn, terms, rng, share), auxiliary @ turn, members @ turn, controls @ turn)
        for turn in TURNS[:count]
    ]


def together(count: int, terms: Claim, seed: int, games: int = 12, share: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    found = [rounds.attack(game(count, terms, rng, share=share), rng).ratio for _ in range(games)]
    return [np.concatenate(side) for side in zip(*found, strict=True)]


def test_one_round_is_attack_1() -> None:
    one = game(1, claim(0.6), np.random.default_rng(0))
    alone = membership.attack(
        one[0].target, one[0].auxiliary, one[0].members, one[0].controls, np.random.default_rng(1)
    )
    found = rounds.attack(one, np.random.default_rng(1))
    for mine, theirs in zip((*found.ratio, *found.dot), (*alone.ratio, *alone.dot), strict=True):
        assert np.array_equal(mine, theirs)
    assert found.encoder_alone == pytest.approx(alone.encoder_alone)


def test_rounds_add_up() -> None:
    played = game(3, claim(0.6), np.random.default_rng(2))
    found = rounds.attack(played, np.random.default_rng(3))
    each = [
        membership.attack(one.target, one.auxiliary, one.members, one.controls, np.random.default_rng(3))
        for one in played
    ]
    assert found.ratio[0] == pytest.approx(sum(one.ratio[0] for one in each))
    assert found.ratio[1] == pytest.approx(sum(one.ratio[1] for one in each))


def test_three_noised_rounds_find_more_than_one_and_shuffled_truth_nothing() -> None:
    one, three = (together(count, claim(1.5), 4, games=40) for count in (1, 3))
    assert bounds.auc(*one) + 0.06 < bounds.auc(*three)
    assert bounds.auc_interval(*three)[0] > 0.65
    mixed = np.random.default_rng(5).permutation(np.concatenate(three))
    low, high = bounds.auc_interval(mixed[: len(three[0])], mixed[len(three[0]) :])
    assert low <= 0.5 <= high


def test_controls_that_are_called_members_score_as_the_others() -> None:
    rng, misses = np.random.default_rng(6), 0
    for _ in range(20):
        played = [
            Round(one.target, one.auxiliary, one.controls[:8], one.controls[8:])
            for one in game(2, claim(0.5), rng)
        ]
        low, high = bounds.auc_interval(*rounds.attack(played, rng).ratio)
        misses += not low <= 0.5 <= high
    assert misses <= 4


def test_true_gaussian_rounds_stay_below_their_cap() -> None:
    """100 repetitions of three rounds: the interval passes the cap in at most alpha of them, or by chance."""
    terms, above, values = claim(1.0, counts=2.0), 0, []
    cap, reason = rounds.composed_cap([terms] * 3, "replace-one")
    assert cap is not None
    assert reason is None
    for repetition in range(100):
        scores = together(3, terms, 100 + repetition, games=2)
        above += bounds.auc_interval(*scores)[0] > cap
        values.append(bounds.auc(*scores))
    assert above <= 5
    assert 0.7 < np.mean(values) < cap


def test_missing_noise_is_caught_in_three_rounds() -> None:
    terms = claim(4.0, counts=4.0)
    cap, _ = rounds.composed_cap([terms] * 3, "replace-one")
    assert cap is not None
    assert bounds.auc_interval(*together(3, terms, 7, share=0.01))[0] > cap


def test_a_withheld_cell_adds_nothing_in_its_round() -> None:
    rng = np.random.default_rng(8)
    seeds = np.stack([np.full(WIDTH, -20.0), np.full(WIDTH, 20.0)])
    far = rows(5, rng) - 20, rows(5, rng) + 20
    auxiliary = np.concatenate([rows(40, rng) - 20, rows(40, rng) + 20])
    terms = claim(0.5).model_copy(update={"clip": 200.0})
    both = Target(np.stack([far[0].mean(0), far[1].mean(0)]), np.array([5.0, 5.0]), terms, seeds)
    second = Target(both.centroids[1:], both.sizes[1:], terms, seeds)
    sides = np.concatenate(far), np.concatenate([rows(3, rng) - 20, rows(3, rng) + 20])
    whole, part = (rounds.attack([Round(t, auxiliary, *sides)], rng) for t in (both, second))
    assert [len(side) for side in part.ratio] == [5, 3]
    summed = rounds.attack([Round(t, auxiliary, *sides) for t in (both, second)], rng).ratio[0]
    assert summed[:5] == pytest.approx(whole.ratio[0][:5])
    assert summed[5:] == pytest.approx(whole.ratio[0][5:] + part.ratio[0])


def test_composition_by_hand() -> None:
    # replace-one: max(4 / z^2, 2 / z^2 + 2 / c^2) = 4 at z = c = 1, so mu = 2 a round; 3 rounds: sqrt 12.
    terms = claim(1.0)
    mu, _ = rounds.composed_mu([terms] * 3, "replace-one")
    assert mu == pytest.approx(math.sqrt(12), rel=1e-6)
    assert rounds.composed_cap([terms] * 3, "replace-one")[0] == pytest.approx(norm.cdf(math.sqrt(6)))
    # add-remove: 1 + 1 a round; a round of another noise 1/4 + 1; what depends on no row nothing.
    mixed = [terms, claim(2.0), Independent(reason="a key")]
    assert rounds.composed_mu(mixed, "add-remove")[0] == pytest.approx(math.sqrt(2 + 1.25), rel=1e-6)


def test_what_is_not_private_has_no_cap() -> None:
    assert rounds.composed_cap([claim(1.0), PLAIN], "replace-one") == (
        None,
        "round 2 of 2 claims no differential privacy",
    )
    trained = DpSgd(
        epsilon=1.0, delta=1e-5, noise_multiplier=1.0, sample_rate=0.1, steps=10, clip=1.0, head_share=0.5,
        per_unit=1, accountants="prv", generator="test", simulated=True,
    )  # fmt: skip
    mu, reason = rounds.composed_mu([trained], "add-remove")
    assert mu is None
    assert reason is not None
    assert "no release of centroids" in reason
    with pytest.raises(NotEnough, match="no round"):
        rounds.composed_mu([], "add-remove")


# --- the difference of two rounds


def cells(n: int, rng: np.random.Generator) -> tuple[membership.Vectors, membership.Vectors, np.ndarray]:
    """Public seeds, n rows around them, and the cell of each."""
    seeds = np.zeros((3, WIDTH))
    seeds[np.arange(3), np.arange(3)] = 6.0
    return seeds, *around(seeds, n, rng)


def around(seeds: np.ndarray, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    drawn = seeds[rng.integers(0, 3, n)] + 0.5 * rows(n, rng)
    return drawn, ((drawn[:, None] - seeds[None]) ** 2).sum(2).argmin(1)


def pair(
    n: int, went: bool, terms: Claim, rng: np.random.Generator
) -> tuple[Target, Target, np.ndarray, np.ndarray, np.ndarray]:
    """Two rounds between which the last of the rows came or went, auxiliary rows, the row and other rows."""
    seeds, data, cell = cells(n, rng)

    def make(count: int) -> Target:
        sums, sizes = np.zeros((3, WIDTH)), np.bincount(cell[:count], minlength=3).astype(float)
        private = isinstance(terms, GaussianSums)
        np.add.at(sums, cell[:count], clip_rows(data, terms.clip)[:count] if private else data[:count])
        if private:
            sums += rng.normal(0, terms.clip * terms.noise_multiplier, sums.shape)
            sizes = np.maximum(sizes + rng.normal(0, terms.count_multiplier, 3), 1.0)
        return Target((sums / sizes[:, None]).astype(np.float32).astype(float), sizes, terms, seeds)

    targets = make(n - 1), make(n)
    before, after = reversed(targets) if went else targets
    return before, after, around(seeds, 300, rng)[0], data[-1], around(seeds, 500, rng)[0]


def test_the_differences_ratio_is_scipys_for_one_cell() -> None:
    rng = np.random.default_rng(10)
    terms, auxiliary, candidates = claim(0.2, counts=0.5), rows(500, rng), rows(6, rng)
    before = released(rows(30, rng), terms, rng)
    after = Target(before.centroids + 0.05, before.sizes + 1.2, terms)
    found = rounds.difference(before, after, auxiliary, candidates, came=True)
    background = membership.fit_background(auxiliary, after)
    change = (after.centroids * after.sizes[:, None] - before.centroids * before.sizes[:, None])[0]
    sigma = (background.basis * background.variances) @ background.basis.T * (1 + 1 / background.support[0])
    noise = 2 * (CLIP * 0.2) ** 2 * np.eye(WIDTH)
    other = multivariate_normal(background.means[0], sigma + noise).logpdf(change)
    for x, value in zip(clip_rows(candidates, CLIP), found, strict=True):
        assert value == pytest.approx(multivariate_normal(x, noise).logpdf(change) - other, abs=1e-6)


@pytest.mark.parametrize("went", [False, True])
def test_the_difference_of_exact_rounds_is_the_row(went: bool) -> None:
    """Found among 500 other candidates, though 400 rows are in the 3 clusters."""
    rng = np.random.default_rng(11)
    before, after, auxiliary, row, others = pair(400, went, PLAIN, rng)
    scores = rounds.difference(before, after, auxiliary, np.concatenate([row[None], others]))
    assert scores[0] > 0 > scores[1:].max()


def test_the_difference_of_noised_rounds_obeys_one_rounds_claim() -> None:
    """Only the later round holds the row: it is found, rows of nobody are not, and the cap holds."""
    rng, terms = np.random.default_rng(12), claim(0.6).model_copy(update={"clip": 8.0})
    own, others, more = [], [], []
    for _ in range(150):
        before, after, auxiliary, row, strangers = pair(60, False, terms, rng)
        candidates = np.concatenate([row[None], strangers[:4]])
        scores = rounds.difference(before, after, auxiliary, candidates, came=True)
        own.append(scores[:1])
        others.append(scores[1:3])
        more.append(scores[3:])
    member, other, control = (np.concatenate(part) for part in (own, others, more))
    cap, _ = rounds.composed_cap([terms], "replace-one")
    assert cap is not None
    assert bounds.auc_interval(member, other)[0] > 0.6
    assert bounds.auc(member, other) < cap
    low, high = bounds.auc_interval(control, other)
    assert low <= 0.5 <= high


def test_what_is_not_the_difference_of_one_row_is_refused() -> None:
    rng = np.random.default_rng(13)
    before, after, auxiliary, row, _ = pair(60, False, PLAIN, rng)

    def refused(first: Target, second: Target, why: str, came: bool | None = None) -> None:
        with pytest.raises(NotEnough, match=why):
            rounds.difference(first, second, auxiliary, row[None], came)

    refused(before, before, "exactly one row")
    refused(before, after, "contradict", came=False)
    moved = after.centroids + np.where(np.rint(after.sizes - before.sizes)[:, None], 0, 0.01)
    refused(before, Target(moved, after.sizes, PLAIN, after.seeds), "moved")
    refused(before, Target(after.centroids[:2], after.sizes[:2], PLAIN, after.seeds), "3 and 2 centroids")
    refused(before, Target(after.centroids, after.sizes, PLAIN), "partitions that differ")
    noised = [Target(one.centroids, one.sizes, claim(1.0), one.seeds) for one in (before, after)]
    refused(noised[0], noised[1], "say which")
    refused(before, noised[1], "differently", came=True)


def test_bad_input_is_refused() -> None:
    rng = np.random.default_rng(14)
    one, two = game(2, PLAIN, rng)
    with pytest.raises(NotEnough, match="no round"):
        rounds.attack([], rng)
    fewer = Round(two.target, two.auxiliary, two.members[1:], two.controls)
    with pytest.raises(SecureflError, match="different numbers of candidates"):
        rounds.attack([one, fewer], rng)
    for broken in (np.full_like(two.members, np.nan), np.ones_like(two.members)):
        with pytest.raises(SecureflError, match="would mean nothing"):
            rounds.attack([one, Round(two.target, two.auxiliary, broken, two.controls)], rng)
    with pytest.raises(SecureflError, match="would mean nothing"):
        rounds.difference(one.target, one.target, one.auxiliary, np.full((1, WIDTH), np.inf))


def test_rounds_are_read_one_by_one_from_the_disk(tmp_path: Path) -> None:
    """Of vectors in float32, mapped and gone before the next round is asked for, as of float64 in memory."""
    played = game(3, claim(0.6), np.random.default_rng(2))
    expected = rounds.attack(
        [replace(one, auxiliary=one.auxiliary.astype(np.float32).astype(np.float64)) for one in played],
        np.random.default_rng(3),
    )
    alive: list[weakref.ref[Round]] = []

    def mapped() -> Iterator[Round]:
        for number, one in enumerate(played):
            assert not any(before() for before in alive)
            path = tmp_path / f"{number}.f32"
            one.auxiliary.astype(np.float32).tofile(path)
            read = replace(one, auxiliary=np.memmap(path, np.float32, "r", shape=one.auxiliary.shape))
            alive.append(weakref.ref(read))
            yield read
            del read

    found = rounds.attack(mapped(), np.random.default_rng(3))
    assert len(alive) == 3
    for mine, theirs in zip((*found.ratio, *found.dot), (*expected.ratio, *expected.dot), strict=True):
        assert np.array_equal(mine, theirs)
