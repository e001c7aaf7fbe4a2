"""Attack 1 on synthetic rows with known answers: optimal where it should be, chance where nothing leaks."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import multivariate_normal
from sklearn.covariance import LedoitWolf
from sklearn.metrics import roc_auc_score

from attacks import bounds, membership
from attacks.membership import Target
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.release import GaussianSums, NonPrivate

PLAIN = NonPrivate(reason="a test")
WIDTH = 24


def rows(count: int, rng: np.random.Generator) -> membership.Vectors:
    """Correlated rows around a mean that is not zero."""
    scale = np.linspace(0.3, 2.0, WIDTH)
    return np.asarray(rng.standard_normal((count, WIDTH)) * scale + 0.5)


def claim(sigma: float, clip: float, counts: float = 1.0) -> GaussianSums:
    # Predictions get noise so large that they add nothing to mu.
    return GaussianSums(
        epsilon=1.0, delta=1e-5, mu=1 / sigma, clip=clip, noise_multiplier=sigma, count_multiplier=counts,
        prediction_multiplier=1e6, generator="test", simulated=True,
    )  # fmt: skip


def exact_groups(sizes: list[int], rng: np.random.Generator) -> tuple[Target, membership.Vectors]:
    members = rows(sum(sizes), rng)
    ends = np.cumsum(sizes)
    centroids = np.stack([part.mean(0) for part in np.split(members, ends[:-1])])
    return Target(centroids, np.array(sizes, float), PLAIN), members


def score_groups(
    sizes: list[int], rng: np.random.Generator, noise: GaussianSums | None = None, share: float = 1.0
) -> list[membership.Scores]:
    """Each random group as a release of its own, since rows of one are not nearest to its centroid.

    noise: a claim; share: how much of the noise on the sums that it claims is really added.
    """
    found = []
    for n in sizes:
        members = rows(n, rng)
        released, sums = float(n), members.sum(0)
        if noise is not None:
            released = max(1.0, n + rng.normal(0, noise.count_multiplier))
            deviation = share * noise.clip * noise.noise_multiplier
            sums = clip_rows(members, noise.clip).sum(0) + rng.normal(0, deviation, WIDTH)
        target = Target(sums[None] / released, np.array([released]), noise or PLAIN)
        found.append(membership.attack(target, rows(400, rng), members, rows(4 * n, rng), rng))
    return found


def together(found: list[membership.Scores]) -> tuple[membership.Vectors, membership.Vectors]:
    return tuple(np.concatenate([one.ratio[side] for one in found]) for side in (0, 1))  # type: ignore[return-value]


def score(target: Target, members: membership.Vectors, rng: np.random.Generator) -> membership.Scores:
    return membership.attack(target, rows(400, rng), members, rows(200, rng), rng)


def test_the_ratio_is_scipys_for_a_known_background() -> None:
    rng = np.random.default_rng(0)
    sigma, mean = np.array([[2.0, 0.6], [0.6, 1.0]]), np.array([1.0, -1.0])
    variances, basis = np.linalg.eigh(sigma)
    background = membership.Background(basis, variances, mean[None], np.array([1e12]), mean)
    n, candidates = 5, rng.standard_normal((7, 2))
    centroid = np.array([0.7, -0.4])
    target = Target(centroid[None], np.array([n], float), PLAIN)
    found = membership.likelihood_ratios(candidates, np.zeros(7, np.int64), target, background)
    without = multivariate_normal(mean, sigma / n).logpdf(centroid)
    for x, value in zip(candidates, found, strict=True):
        within = multivariate_normal(mean + (x - mean) / n, sigma * (n - 1) / n**2).logpdf(centroid)
        assert value == pytest.approx(within - without, abs=1e-6)


def test_members_of_exact_centroids_are_found() -> None:
    members, others = together(score_groups([6] * 10, np.random.default_rng(1)))
    assert bounds.auc(members, others) > 0.9
    assert bounds.auc_interval(members, others)[0] > 0.85
    # Our AUC is scikit-learn's.
    truth = np.repeat([1, 0], [len(members), len(others)])
    assert bounds.auc(members, others) == pytest.approx(roc_auc_score(truth, np.r_[members, others]))


def test_shuffled_truth_falls_to_chance_and_shows_no_epsilon() -> None:
    rng, misses, alarms = np.random.default_rng(2), 0, 0
    for _ in range(20):
        target, members = exact_groups([10] * 6, rng)
        scores = score(target, members, rng)
        mixed = rng.permutation(np.concatenate(scores.ratio))
        fake, rest = mixed[: len(members)], mixed[len(members) :]
        low, high = bounds.auc_interval(fake, rest)
        misses += not low <= 0.5 <= high
        errors = bounds.held_out_errors(fake, rest, rng, bounds.epsilon_lower_bound)
        alarms += bounds.epsilon_lower_bound(errors) > 0
    assert misses <= 4
    assert alarms <= 3


def test_rows_that_are_in_no_centroid_score_as_others_do() -> None:
    rng, misses = np.random.default_rng(3), 0
    for _ in range(20):
        target, _ = exact_groups([10] * 8, rng)
        scores = membership.attack(target, rows(400, rng), rows(60, rng), rows(100, rng), rng)
        low, high = bounds.auc_interval(*scores.ratio)
        misses += not low <= 0.5 <= high
    assert misses <= 4


def test_a_single_row_is_its_own_centroid() -> None:
    rng = np.random.default_rng(4)
    target, members = exact_groups([1] * 12, rng)
    scores = score(target, members, rng)
    assert np.isfinite(np.concatenate(scores.ratio)).all()
    assert bounds.auc(*scores.ratio) == 1.0


@pytest.mark.parametrize(("sigma", "reached"), [(0.6, 0.7), (2.0, 0.55)])
def test_a_true_gaussian_release_stays_below_its_cap(sigma: float, reached: float) -> None:
    """Repetitions with fresh noise: the interval passes the cap in at most alpha of them."""
    rng, above, values = np.random.default_rng(5), 0, []
    terms = claim(sigma, clip=3.0)
    cap = bounds.auc_cap(bounds.replace_one_mu(terms))
    for _ in range(40):
        scores = together(score_groups([8] * 6, rng, terms))
        above += bounds.auc_interval(*scores)[0] > cap
        values.append(bounds.auc(*scores))
    assert above <= 2
    # It is not below the cap for want of trying.
    assert reached < np.mean(values) < cap


def test_noise_far_smaller_than_claimed_is_caught() -> None:
    terms = claim(3.0, 3.0, counts=3.0)
    found = together(score_groups([8] * 30, np.random.default_rng(6), terms, share=0.01))
    assert bounds.auc_interval(*found)[0] > bounds.auc_cap(bounds.replace_one_mu(terms))


def test_public_seeds_decide_the_cell_also_where_some_are_withheld() -> None:
    rng = np.random.default_rng(7)
    seeds = np.array([[10.0, 0.0], [0.0, 10.0], [-10.0, 0.0]])
    auxiliary = np.concatenate([seed + rng.standard_normal((30, 2)) for seed in seeds])
    target = Target(seeds[[2, 0]] + 0.1, np.array([8.0, 8.0]), claim(0.1, 100.0), seeds)
    cells = membership.assign(seeds + 0.3, target, auxiliary)
    assert cells.tolist() == [1, -1, 0]


def test_the_encoder_alone_is_measured() -> None:
    """Members that lie elsewhere than other text are told apart without any release."""
    rng = np.random.default_rng(8)
    target, _ = exact_groups([10] * 4, rng)
    far = rows(60, rng) * 0.2
    scores = membership.attack(target, rows(400, rng), far, rows(200, rng), rng)
    assert abs(scores.encoder_alone[0] - 0.5) > 0.1
    level = membership.attack(target, rows(400, rng), rows(60, rng), rows(200, rng), rng).encoder_alone
    assert level[1] <= 0.5 <= level[2]


@pytest.mark.parametrize("broken", [np.full((30, WIDTH), np.nan), np.ones((30, WIDTH))])
def test_broken_vectors_are_an_error_and_no_low_score(broken: membership.Vectors) -> None:
    rng = np.random.default_rng(9)
    target, members = exact_groups([10] * 3, rng)
    with pytest.raises(SecureflError, match="would mean nothing"):
        membership.attack(target, rows(100, rng), broken, rows(50, rng), rng)
    with pytest.raises(SecureflError, match="would mean nothing"):
        membership.attack(target, broken, members, rows(50, rng), rng)


def test_controls_have_the_members_labels() -> None:
    members = np.array([0] * 60 + [1] * 30 + [2] * 10)
    pool = np.random.default_rng(0).integers(0, 4, 400)
    chosen = membership.match_labels(members, pool, np.random.default_rng(1), 1000)
    shares = np.bincount(pool[chosen], minlength=4) / len(chosen)
    assert shares == pytest.approx([0.6, 0.3, 0.1, 0.0], abs=0.01)
    assert len(set(chosen.tolist())) == len(chosen) > 100
    assert len(membership.match_labels(members, pool, np.random.default_rng(1), 40)) == 40
    assert not len(membership.match_labels(members, np.full(50, 3), np.random.default_rng(1), 40))


@pytest.mark.parametrize("members", [0, 9])
def test_no_row_in_a_released_cell_gives_no_score(members: int) -> None:
    """One seed's centroid was withheld and all rows of a side are its: this side has nothing to score."""
    rng = np.random.default_rng(5)
    seeds = np.stack([np.full(WIDTH, -50.0), np.full(WIDTH, 50.0)])
    auxiliary = np.concatenate([rows(30, rng) - 50, rows(30, rng) + 50])
    # The released centroid is that of the second seed; rows around the first have none.
    target = Target(np.full((1, WIDTH), 40.0), np.array([6.0]), claim(4.0, 300.0), seeds)
    own, others = rows(9, rng) - 50, rows(20, rng) + 50
    sides = (own[:members], others) if members == 0 else (own, own + 1)
    scores = membership.attack(target, auxiliary, *sides, rng)
    assert [len(side) for side in scores.ratio] == [0, 20 if members == 0 else 0]
    assert [len(side) for side in scores.dot] == [0, 20 if members == 0 else 0]
    assert scores.encoder_alone == (0.5, 0.0, 1.0)


def three_seeds(rng: np.random.Generator) -> tuple[Target, membership.Vectors]:
    """Clipped rows around three public seeds, the centroids of the last two of which were released."""
    seeds = np.stack([np.full(WIDTH, at) for at in (-4.0, 0.0, 4.0)])
    auxiliary = np.concatenate(
        [rows(count, rng) + seed for count, seed in zip((40, 60, 51), seeds, strict=True)]
    )
    terms = claim(0.1, 12.0)
    means = [clip_rows(part, terms.clip).mean(0) for part in np.split(auxiliary, [40, 100])]
    return Target(np.stack(means[1:]), np.array([8.0, 8.0]), terms, seeds), auxiliary


@pytest.mark.parametrize("rows_at_once", [1, 7, 64, 1000])
def test_cells_in_chunks_are_those_of_one_piece(rows_at_once: int) -> None:
    target, auxiliary = three_seeds(np.random.default_rng(10))
    chunk = rows_at_once * WIDTH
    assert target.seeds is not None
    nearest = cdist(auxiliary, target.seeds).argmin(1)
    assert membership.released_by(target, auxiliary, chunk).tolist() == [-1, 0, 1]
    found = membership.assign(auxiliary.astype(np.float32), target, auxiliary, chunk)
    assert found.tolist() == (nearest - 1).tolist()
    every = replace(target, seeds=None)
    found = membership.assign(auxiliary, every, auxiliary, chunk)
    assert found.tolist() == cdist(auxiliary, every.centroids).argmin(1).tolist()
    # More centroids than a chunk has numbers.
    many = Target(rows(3 * chunk if rows_at_once == 1 else 9, np.random.default_rng(11)), np.ones(1), PLAIN)
    found = membership.assign(auxiliary, many, auxiliary, chunk)
    assert found.tolist() == cdist(auxiliary, many.centroids).argmin(1).tolist()


@pytest.mark.parametrize("rows_at_once", [1, 7, 64, 1000])
@pytest.mark.parametrize("grouped", ["withheld", "seeds", "nearest", "anywhere"])
def test_a_background_from_chunks_is_that_of_one_piece(grouped: str, rows_at_once: int) -> None:
    """Written out here once more: means shrunk as if 30 rows more were overall ones, sklearn's covariance."""
    target, auxiliary = three_seeds(np.random.default_rng(12))
    cells = np.repeat([-1, 0, 1], [40, 60, 51])
    if grouped == "seeds":
        assert target.seeds is not None
        target, cells = replace(target, centroids=target.seeds, sizes=np.full(3, 8.0)), cells + 1
    elif grouped != "withheld":
        target = replace(target, seeds=None, claim=PLAIN, anywhere=grouped == "anywhere")
        cells = cdist(auxiliary, target.centroids).argmin(1)
    used = auxiliary if target.claim == PLAIN else clip_rows(auxiliary, 12.0)
    found = membership.fit_background(auxiliary, target, rows_at_once * WIDTH)
    np.testing.assert_allclose(found.overall, used.mean(0), rtol=1e-9)
    for cell in range(len(target.centroids)):
        own = used[:0] if target.anywhere else used[cells == cell]
        more = len(used) if target.anywhere else 30
        expected = (own.sum(0) + more * used.mean(0)) / (len(own) + more)
        np.testing.assert_allclose(found.means[cell], expected, rtol=1e-9)
        assert found.support[cell] == len(own) + more
    covariance = LedoitWolf().fit(used).covariance_
    again = found.basis * found.variances @ found.basis.T
    np.testing.assert_allclose(again, covariance, rtol=1e-9, atol=1e-9 * covariance.max())


def test_a_background_of_vectors_on_disk_takes_bounded_memory(tmp_path: Path) -> None:
    """A float64 copy of the 5.8 MB would be 11.5; one chunk has 16 thousand numbers."""
    rng, count = np.random.default_rng(13), 60_000
    auxiliary = np.memmap(tmp_path / "aux.f32", np.float32, "w+", shape=(count, WIDTH))
    auxiliary[:] = rows(count, rng)
    target, _ = three_seeds(rng)
    tracemalloc.start()
    try:
        for terms in (target, replace(target, seeds=None, anywhere=True)):
            membership.fit_background(auxiliary, terms, 2**14)
        assert tracemalloc.get_traced_memory()[1] < 12 * 8 * 2**14
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rows_at_once", [1, 7, 50, 1000])
def test_what_is_broken_in_a_later_chunk_is_refused(rows_at_once: int) -> None:
    target, good = three_seeds(np.random.default_rng(14))
    for value in (np.nan, np.inf, -np.inf):
        broken = good.astype(np.float32)
        broken[-1, 3] = value
        with pytest.raises(SecureflError, match="auxiliary text hold NaN or infinity"):
            membership.fit_background(broken, target, rows_at_once * WIDTH)
    same = np.tile(good[0], (151, 1))
    with pytest.raises(SecureflError, match="auxiliary text are all the same"):
        membership.fit_background(same, target, rows_at_once * WIDTH)
    # Constant within every chunk, but not over all of them: an odd pool, and no broken encoder.
    same[-1] += 1
    membership.check_rows(same, "a test", rows_at_once * WIDTH)
