"""Attack 7 on synthetic silos: what is left after one's own part is attack 1 on the others' rows."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from attacks import bounds, membership, subtraction
from attacks.adversary import NotEnough
from attacks.membership import Target
from attacks.subtraction import Part
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.release import Claim, DpSgd, GaussianSums
from tests.attacks import synthetic
from tests.attacks.synthetic import PLAIN

WIDTH = 16
CLIP = 3.0


rows = partial(synthetic.rows, width=WIDTH)
claim = partial(synthetic.claim, clip=CLIP)


def part(data: membership.Vectors, terms: Claim, rng: np.random.Generator, share: float = 1.0) -> Part:
    """What a silo adds to the aggregate of one cluster; share: how much of the claimed noise it draws."""
    if not isinstance(terms, GaussianSums):
        return Part(data.sum(0)[None], np.array([float(len(data))]))
    noise = rng.normal(0, share * terms.clip * terms.noise_multiplier, (1, WIDTH))
    count = len(data) + share * rng.normal(0, terms.count_multiplier)
    return Part(clip_rows(data, terms.clip).sum(0)[None] + noise, np.array([count]))


def total(parts: list[Part]) -> Part:
    return Part(np.sum([one.sums for one in parts], 0), np.sum([one.counts for one in parts], 0))


def game(
    terms: Claim, rng: np.random.Generator, silos: int = 3, n: int = 4, share: float = 1.0
) -> tuple[subtraction.Left, Part, list[membership.Vectors]]:
    """What is left for the first of the silos, the aggregate, and the rows of each."""
    data = [rows(n, rng) for _ in range(silos)]
    parts = [part(own, terms, rng, share) for own in data]
    whole = total(parts)
    return subtraction.subtract(whole, parts[0], [terms] * (silos - 1)), whole, data


def score(terms: Claim, rng: np.random.Generator, n: int = 4, share: float = 1.0) -> membership.Scores:
    left, _, data = game(terms, rng, n=n, share=share)
    return subtraction.attack(left, rows(200, rng), np.concatenate(data[1:]), rows(6 * n, rng), rng)


def together(found: list[membership.Scores]) -> list[np.ndarray]:
    return [np.concatenate([one.ratio[side] for one in found]) for side in (0, 1)]


def test_what_is_left_is_the_others_release() -> None:
    """The same scores as attack 1 on the centroid of the other silos' rows."""
    rng = np.random.default_rng(0)
    data, auxiliary, controls = [rows(5, rng) for _ in range(3)], rows(300, rng), rows(20, rng)
    parts = [part(own, PLAIN, rng) for own in data]
    others = np.concatenate(data[1:])
    direct = Target(others.mean(0)[None], np.array([10.0]), PLAIN)
    expected = membership.attack(direct, auxiliary, others, controls, np.random.default_rng(1))
    whole = total(parts)
    for given in (whole, subtraction.part_of_means(whole.sums / 15, whole.counts)):
        left = subtraction.subtract(given, parts[0], [PLAIN, PLAIN])
        found = subtraction.attack(left, auxiliary, others, controls, np.random.default_rng(1))
        assert found.ratio[0] == pytest.approx(expected.ratio[0], rel=1e-6)
        assert found.ratio[1] == pytest.approx(expected.ratio[1], rel=1e-6)


def test_subtraction_finds_more_and_only_the_others_rows() -> None:
    rng, found, blunt, own = np.random.default_rng(2), [], [], []
    for _ in range(15):
        left, whole, data = game(PLAIN, rng)
        others, auxiliary, controls = np.concatenate(data[1:]), rows(300, rng), rows(36, rng)
        target = Target(whole.sums / whole.counts[:, None], whole.counts, PLAIN)
        found.append(subtraction.attack(left, auxiliary, others, controls, rng))
        own.append(subtraction.attack(left, auxiliary, data[0], controls, rng))
        blunt.append(membership.attack(target, auxiliary, others, controls, rng))
    found, blunt, own = together(found), together(blunt), together(own)
    assert bounds.auc_interval(*found)[0] > 0.72
    assert bounds.auc(*blunt) + 0.03 < bounds.auc(*found)
    low, high = bounds.auc_interval(*own)
    assert low <= 0.5 <= high
    mixed = rng.permutation(np.concatenate(found))
    low, high = bounds.auc_interval(mixed[: len(found[0])], mixed[len(found[0]) :])
    assert low <= 0.5 <= high


def test_of_two_silos_a_mean_that_weighs_them_the_same_hides_nothing() -> None:
    rng = np.random.default_rng(3)
    mine, theirs = part(rows(3, rng), PLAIN, rng), part(rows(9, rng), PLAIN, rng)
    mean = (mine.sums / 3 + theirs.sums / 9) / 2
    whole = subtraction.part_of_uniform_mean(mean, np.array([12.0]), 2, mine)
    left = subtraction.subtract(whole, mine, [PLAIN])
    assert left.target.centroids == pytest.approx(theirs.sums / 9)
    assert left.target.sizes.tolist() == [9.0]
    with pytest.raises(NotEnough, match="unknown size"):
        subtraction.part_of_uniform_mean(mean, np.array([12.0]), 3, mine)
    with pytest.raises(NotEnough, match="of one's own"):
        subtraction.part_of_uniform_mean(mean, np.array([12.0]), 2, Part(mine.sums, np.zeros(1)))


def test_the_noises_of_all_others_make_one_claim() -> None:
    # Multipliers 3 and 4 make 5; predictions sqrt(2) 1e6 count for nothing. add-remove: 1 / 25 + 1 / 25.
    together_ = subtraction.combined_claim([claim(3.0, 3.0), claim(4.0, 4.0)])
    assert isinstance(together_, GaussianSums)
    assert together_.noise_multiplier == pytest.approx(5.0)
    assert together_.count_multiplier == pytest.approx(5.0)
    assert together_.mu == pytest.approx(math.sqrt(2) / 5, rel=1e-6)
    assert bounds.claim_mu(together_, "add-remove") == pytest.approx(together_.mu)
    alone = subtraction.combined_claim([claim(2.0)])
    assert isinstance(alone, GaussianSums)
    assert alone.noise_multiplier == 2.0
    assert subtraction.combined_claim([PLAIN, PLAIN]) == PLAIN


def test_the_attack_is_fitted_on_the_noise_of_all_others() -> None:
    """The deviation that the target states is the one that is in the sum."""
    rng, terms = np.random.default_rng(4), claim(0.7)
    data = [rows(6, rng) for _ in range(4)]
    gaps = []
    for _ in range(200):
        parts = [part(own, terms, rng) for own in data]
        left = subtraction.subtract(total(parts), parts[0], [terms] * 3)
        exact = clip_rows(np.concatenate(data[1:]), CLIP).sum(0)
        gaps.append((left.target.centroids[0] * left.target.sizes[0] - exact).std())
        stated = left.target.noise[0] * left.target.sizes[0]
    assert np.sqrt(np.mean(np.square(gaps))) == pytest.approx(stated, rel=0.05)


def test_true_gaussian_releases_stay_below_the_cap_of_their_sum() -> None:
    rng, terms, above, values = np.random.default_rng(5), claim(0.6, counts=0.8), 0, []
    together_ = subtraction.combined_claim([terms, terms])
    assert isinstance(together_, GaussianSums)
    cap = bounds.auc_cap(bounds.replace_one_mu(together_))
    for _ in range(100):
        scores = together([score(terms, rng) for _ in range(3)])
        above += bounds.auc_interval(*scores)[0] > cap
        values.append(bounds.auc(*scores))
    assert above <= 5
    assert 0.65 < np.mean(values) < cap


def test_noise_that_was_not_drawn_is_caught() -> None:
    rng, terms = np.random.default_rng(6), claim(4.0, counts=4.0)
    scores = together([score(terms, rng, share=0.01) for _ in range(15)])
    single = bounds.auc_cap(bounds.replace_one_mu(terms))
    assert bounds.auc_interval(*scores)[0] > single


def test_a_cluster_of_nobody_else_is_left_out() -> None:
    rng = np.random.default_rng(7)
    seeds = np.zeros((3, WIDTH))
    seeds[np.arange(3), np.arange(3)] = 30.0
    mine, theirs = [seeds[c] + rows(4, rng) for c in (0, 1)], [seeds[c] + rows(4, rng) for c in (0, 2)]
    own, whole = np.zeros((3, WIDTH)), np.zeros((3, WIDTH))
    own[0], own[1] = mine[0].sum(0), mine[1].sum(0)
    whole[0], whole[1], whole[2] = own[0] + theirs[0].sum(0), own[1], theirs[1].sum(0)
    left = subtraction.subtract(
        Part(whole, np.array([8.0, 4.0, 4.0])), Part(own, np.array([4.0, 4.0, 0.0])), [PLAIN], seeds
    )
    assert left.kept.tolist() == [0, 2]
    assert left.target.centroids == pytest.approx(np.stack([theirs[0].mean(0), theirs[1].mean(0)]))
    auxiliary = np.concatenate([seed + rows(40, rng) for seed in seeds])
    members = np.concatenate(theirs)
    # Rows of the cluster that only the attacker had have no score.
    controls = np.concatenate([seed + rows(5, rng) for seed in seeds])
    scores = subtraction.attack(left, auxiliary, members, controls, rng)
    assert [len(side) for side in scores.ratio] == [8, 10]
    # The background is that of the clusters that are left alone.
    kept = np.concatenate([auxiliary[:40], auxiliary[80:]])
    direct = Target(left.target.centroids, left.target.sizes, PLAIN, seeds[[0, 2]])
    expected = membership.attack(direct, kept, members, np.concatenate([controls[:5], controls[10:]]), rng)
    assert scores.ratio[0] == pytest.approx(expected.ratio[0])


def test_what_cannot_be_identified_is_refused() -> None:
    rng = np.random.default_rng(8)
    mine, theirs = part(rows(3, rng), PLAIN, rng), part(rows(3, rng), PLAIN, rng)
    whole = total([mine, theirs])
    two = Part(np.repeat(whole.sums, 2, 0), np.repeat(whole.counts, 2))
    with pytest.raises(NotEnough, match="without public seeds"):
        subtraction.subtract(two, two, [PLAIN])
    assert two.pooled().sums == pytest.approx(2 * whole.sums)
    assert two.pooled().counts.tolist() == [12.0]
    with pytest.raises(NotEnough, match="nothing of other silos"):
        subtraction.subtract(mine, mine, [PLAIN])
    with pytest.raises(SecureflError, match="no part of it"):
        subtraction.subtract(mine, whole, [PLAIN])
    with pytest.raises(SecureflError, match="other clusters"):
        subtraction.subtract(two, mine, [PLAIN])
    with pytest.raises(SecureflError, match="seeds are not one"):
        subtraction.subtract(whole, mine, [PLAIN], np.zeros((2, WIDTH)))


def test_claims_that_make_no_single_mechanism_are_refused() -> None:
    trained = DpSgd(
        epsilon=1.0, delta=1e-5, noise_multiplier=1.0, sample_rate=0.1, steps=10, clip=1.0, head_share=0.5,
        per_unit=1, accountants="prv", generator="test", simulated=True,
    )  # fmt: skip
    other = claim(1.0).model_copy(update={"clip": 2 * CLIP})
    for claims in ([], [trained]):
        with pytest.raises(NotEnough, match="needs the claim"):
            subtraction.combined_claim(claims)
    for claims in ([claim(1.0), PLAIN], [claim(1.0), other]):
        with pytest.raises(NotEnough, match="differ in clip"):
            subtraction.combined_claim(claims)


def test_broken_arrays_are_refused() -> None:
    rng = np.random.default_rng(9)
    with pytest.raises(SecureflError, match="NaN"):
        Part(np.full((1, WIDTH), np.nan), np.ones(1))
    with pytest.raises(SecureflError, match="one count for each"):
        Part(np.zeros((2, WIDTH)), np.ones(1))
    mine, theirs = part(rows(3, rng), PLAIN, rng), part(rows(3, rng), PLAIN, rng)
    left = subtraction.subtract(total([mine, theirs]), mine, [PLAIN])
    for broken in (np.full((30, WIDTH), np.nan), np.ones((30, WIDTH))):
        with pytest.raises(SecureflError, match="would mean nothing"):
            subtraction.attack(left, rows(100, rng), broken, rows(20, rng), rng)
    with pytest.raises(NotEnough, match="auxiliary"):
        subtraction.attack(left, rows(1, rng), rows(3, rng), rows(3, rng), rng)


def test_a_large_background_of_some_clusters_is_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of clusters some of which are not left so many rows are copied, and the scores hardly move."""
    rng = np.random.default_rng(17)
    seeds = np.stack([np.full(WIDTH, 4.0), np.full(WIDTH, -4.0)])
    members, controls = rows(6, rng) + 4, rows(12, rng) + 4
    own = Part(np.stack([rows(3, rng).sum(0), rows(3, rng).sum(0)]), np.array([3.0, 3.0]))
    whole = Part(own.sums + np.stack([members.sum(0), np.zeros(WIDTH)]), own.counts + np.array([6.0, 0.0]))
    left = subtraction.subtract(whole, own, [PLAIN], seeds)
    assert left.kept.tolist() == [0]
    path = tmp_path / "auxiliary.f32"
    np.concatenate([rows(3000, rng) + 4, rows(3000, rng) - 4]).astype(np.float32).tofile(path)
    auxiliary = np.memmap(path, np.float32, "r", shape=(6000, WIDTH))
    given: list[int] = []
    fit = membership.fit_background

    def counted(found: NDArray[np.floating], target: Target) -> membership.Background:
        given.append(len(found))
        return fit(found, target)

    monkeypatch.setattr(membership, "fit_background", counted)
    every = subtraction.attack(left, auxiliary, members, controls, np.random.default_rng(1))
    monkeypatch.setattr(subtraction, "_MOST_COPIED", 2000)
    part = subtraction.attack(left, auxiliary, members, controls, np.random.default_rng(1))
    assert given == [3000, 2000]
    # The reference has the rows of the cluster in float64 and nothing else.
    near = np.asarray(auxiliary[:3000], np.float64)
    direct = Target(members.mean(0)[None], np.array([6.0]), PLAIN)
    expected = membership.attack(direct, near, members, controls, np.random.default_rng(1))
    for mine, theirs in zip(every.ratio, expected.ratio, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    for mine, theirs in zip(part.ratio, expected.ratio, strict=True):
        assert np.corrcoef(mine, theirs)[0, 1] > 0.99
