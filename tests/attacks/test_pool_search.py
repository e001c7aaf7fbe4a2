"""Attack 8 on synthetic pools: chunks change nothing, sums are taken apart, and noise keeps its cap."""

from __future__ import annotations

import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import nnls
from scipy.stats import hypergeom

from attacks import bounds, membership, pool_search
from attacks.adversary import NotEnough
from attacks.membership import Target
from attacks.pool_search import Ranking, Retrieval
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.release import Claim, GaussianSums
from tests.attacks import synthetic
from tests.attacks.synthetic import PLAIN

WIDTH = 40
CLIP = 5.0


rows = partial(synthetic.rows, width=WIDTH)
claim = partial(synthetic.claim, clip=CLIP)


class Game:
    """A pool, some rows of which are behind one centroid."""

    def __init__(self, pool: int, n: int, seed: int, terms: Claim = PLAIN, share: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.auxiliary = rows(400, rng)
        self.pool = rows(pool, rng).astype(np.float32)
        chosen = rng.permutation(pool)
        self.members, self.controls = np.sort(chosen[:n]), np.sort(chosen[n : 2 * n])
        data, size = self.pool[self.members].astype(float), float(n)
        if isinstance(terms, GaussianSums):
            noise = rng.normal(0, share * terms.clip * terms.noise_multiplier, WIDTH)
            size = max(1.0, n + share * rng.normal(0, terms.count_multiplier))
            total = clip_rows(data, terms.clip).sum(0) + noise
        else:
            total = data.sum(0)
        centroid = (total / size).astype(np.float32).astype(float)
        self.target = Target(centroid[None], np.array([size]), terms)
        self.background = membership.fit_background(self.auxiliary, self.target)

    def rank(self, **options: int) -> Ranking:
        return pool_search.rank(self.pool, self.target, self.background, self.auxiliary, **options)

    def decompose(self, ranking: Ranking, **options: int) -> pool_search.Decomposition:
        return pool_search.decompose(self.pool, ranking, self.target, self.background, 0, **options)


@pytest.mark.parametrize("terms", [PLAIN, claim(0.3)])
def test_chunks_give_the_scores_of_one_piece(terms: Claim) -> None:
    game = Game(700, 8, 0, terms)
    whole = game.pool.astype(float)
    cells = membership.assign(whole, game.target, game.auxiliary)
    expected = membership.likelihood_ratios(whole, cells, game.target, game.background)
    for chunk in (1, 7 * WIDTH, 2**20):
        found = game.rank(chunk=chunk)
        assert found.scores == pytest.approx(expected, rel=1e-9)
        assert found.cells.tolist() == [0] * 700
    order = game.rank().order()
    assert (np.diff(expected[order]) <= 1e-9).all()


@pytest.mark.parametrize("terms", [PLAIN, claim(0.3)])
def test_chunks_of_a_pool_that_may_be_behind_any_centroid(terms: Claim) -> None:
    """The largest of the ratios against each centroid by itself, also where they are more than numbers."""
    rng = np.random.default_rng(3)
    pool, auxiliary = rows(211, rng).astype(np.float32), rows(300, rng)
    sizes = rng.integers(1, 9, 90).astype(float)
    centroids = np.stack([pool[rng.permutation(211)[: int(n)]].astype(float).mean(0) for n in sizes])
    target = Target(centroids, sizes, terms, anywhere=True)
    background = membership.fit_background(auxiliary, target)
    whole = pool.astype(float)
    ratios = np.stack(
        [membership.likelihood_ratios(whole, np.full(211, c), target, background) for c in range(90)]
    )
    for chunk in (7 * WIDTH, 100 * 90, 2**20):
        found = pool_search.rank(pool, target, background, auxiliary, chunk)
        assert found.scores == pytest.approx(ratios.max(0), rel=1e-9)
        assert found.cells.tolist() == ratios.argmax(0).tolist()


def test_a_withheld_cell_ranks_last() -> None:
    rng = np.random.default_rng(1)
    seeds = np.stack([np.full(WIDTH, -20.0), np.full(WIDTH, 20.0)])
    auxiliary = np.concatenate([rows(40, rng) - 20, rows(40, rng) + 20])
    pool = np.concatenate([rows(30, rng) - 20, rows(30, rng) + 20])
    terms = claim(0.1).model_copy(update={"clip": 500.0})
    target = Target(pool[30:35].mean(0)[None], np.array([5.0]), terms, seeds)
    background = membership.fit_background(auxiliary, target)
    found = pool_search.rank(pool, target, background, auxiliary, chunk=WIDTH)
    assert found.cells.tolist() == [-1] * 30 + [0] * 30
    assert np.isneginf(found.scores[:30]).all()
    assert set(found.order()[:30].tolist()) == set(range(30, 60))


def test_a_pool_on_disk_is_ranked_and_searched_in_bounded_memory(tmp_path: Path) -> None:
    """Float64 copies of the 19 MB pool would be 38 MB each; one chunk has 16 thousand numbers."""
    rng, count = np.random.default_rng(2), 120_000
    pool = np.memmap(tmp_path / "pool.f32", np.float32, "w+", shape=(count, WIDTH))
    for start in range(0, count, 10_000):
        pool[start : start + 10_000] = rows(10_000, rng)
    members = np.sort(rng.choice(count, 2, replace=False))
    target = Target(pool[members].astype(float).mean(0)[None], np.array([2.0]), PLAIN)
    auxiliary = rows(300, rng)
    background = membership.fit_background(auxiliary, target)
    tracemalloc.start()
    try:
        ranking = pool_search.rank(pool, target, background, auxiliary, chunk=2**14)
        ranked = tracemalloc.get_traced_memory()[1]
        found = pool_search.decompose(pool, ranking, target, background, 0, chunk=2**14)
        searched = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Twelve bytes a row, and some arrays of a chunk.
    assert ranked < 12 * count + 12 * 8 * 2**14
    assert searched < 12e6
    assert sorted(found.indices.tolist()) == members.tolist()
    assert found.certain


def test_members_are_ranked_first_and_controls_are_not() -> None:
    found, others, shuffled = 0, 0, 0
    for seed in range(10):
        game = Game(400, 6, 10 + seed)
        order = game.rank().order()
        found += pool_search.retrieve(order, game.members, 6, 400).hits
        others += pool_search.retrieve_controls(order, game.members, game.controls, 6).hits
        fake = np.random.default_rng(seed).permutation(400)[:6]
        shuffled += pool_search.retrieve(order, fake, 6, 400).hits
    assert found >= 30
    # By chance .9 of 60 are found; 5 or more have a probability below .3 %.
    assert hypergeom(4000, 60, 60).sf(4) < 0.003
    assert others < 5
    assert shuffled < 5


def test_a_sum_is_taken_apart_where_the_ranking_fails() -> None:
    """All rows are named, and it is known without the truth."""
    for n, seed in ((1, 20), (3, 21), (6, 22), (8, 23)):
        game = Game(400, n, seed)
        found = game.decompose(game.rank(), chunk=64 * WIDTH)
        assert sorted(found.indices.tolist()) == game.members.tolist()
        assert found.weights == pytest.approx(np.ones(n), abs=1e-3)
        assert found.certain
        assert found.residual < 1e-3


def test_scans_find_the_least_squares_over_the_whole_pool() -> None:
    """The same weights as scipy's over all rows at once, though the search holds a few hundred of 3,000."""
    game = Game(3000, 3, 24, claim(0.2, counts=0.1))
    ranking = game.rank()
    found = game.decompose(ranking)
    noise = CLIP * 0.2
    scale = game.background.basis / np.sqrt(game.background.variances + noise**2)
    size = float(game.target.sizes[0])
    atoms = np.concatenate([clip_rows(game.pool, CLIP) @ scale, np.full((3000, 1), 10.0)], axis=1).T
    weights, residual = nnls(atoms, np.append(size * game.target.centroids[0] @ scale, 10.0 * size))
    best = np.argsort(-weights)[: len(found.indices)]
    assert set(best.tolist()) == set(found.indices.tolist())
    assert found.weights == pytest.approx(weights[best], abs=1e-3)
    assert residual > 0.01
    aim = np.append(size * game.target.centroids[0] @ scale, 10.0 * size)
    assert found.residual == pytest.approx(residual / np.linalg.norm(aim), abs=1e-4)
    assert not found.certain


def test_a_pool_without_the_rows_is_not_called_certain() -> None:
    game = Game(400, 5, 25)
    rest = np.setdiff1d(np.arange(400), game.members)
    ranking = pool_search.rank(game.pool[rest], game.target, game.background, game.auxiliary)
    found = pool_search.decompose(game.pool[rest], ranking, game.target, game.background, 0)
    assert not found.certain
    assert found.residual > 0.05


def test_true_gaussian_releases_stay_below_the_cap_of_recall() -> None:
    terms, above, recalls = claim(1.0, counts=2.0), 0, []
    for repetition in range(100):
        hits = []
        for part in range(3):
            game = Game(80, 8, 1000 + 3 * repetition + part, terms)
            ranking = game.rank()
            hits.append(pool_search.retrieve(ranking.order(), game.members, 8, 80))
        found = Retrieval(sum(one.hits for one in hits), 8, 24, 80)
        cap, reason = pool_search.recall_cap(terms, hits[0])
        assert cap is not None
        assert reason is None
        above += found.recall_interval()[0] > cap
        recalls.append(found.recall)
    assert above <= 5
    assert 0.15 < np.mean(recalls) < cap


def test_missing_noise_is_above_the_cap() -> None:
    terms = claim(4.0, counts=4.0)
    hits = np.zeros(2, int)
    for seed in range(8):
        game = Game(400, 8, 50 + seed, terms, share=0.001)
        ranking = game.rank()
        for search, order in enumerate((ranking.order(), game.decompose(ranking).indices)):
            hits[search] += pool_search.retrieve(order, game.members, 8, 400).hits
    cap, _ = pool_search.recall_cap(terms, Retrieval(0, 8, 8, 400))
    assert cap is not None
    for count in hits:
        assert Retrieval(int(count), 8, 64, 400).recall_interval()[0] > cap


def test_figures_by_hand() -> None:
    found = pool_search.retrieve(np.array([4, 1, 0, 2, 3]), np.array([1, 3, 4]), 2, 5)
    assert found == Retrieval(hits=2, k=2, members=3, pool=5)
    assert (found.recall, found.precision) == (pytest.approx(2 / 3), 1.0)
    assert (found.recall_baseline, found.precision_baseline) == (0.4, 0.6)
    assert found.recall_interval()[1] == bounds.upper_bound(2, 3, 0.025)
    # Without 1, 3 and 4 the order is 0, 2.
    assert pool_search.retrieve_controls(
        np.array([4, 1, 0, 2, 3]), np.array([1, 3, 4]), np.array([0]), 1
    ) == Retrieval(1, 1, 1, 2)
    assert pool_search.recall_cap(PLAIN, found)[0] is None
    assert pool_search.recall_cap(claim(1.0), found) == (1.0, None)
    # mu = 2 at multiplier 1, k of 10 in 100 others: Phi(PhiInv(.1) + 2).
    cap, _ = pool_search.recall_cap(claim(1.0, counts=10.0), Retrieval(1, 10, 10, 110))
    assert cap == pytest.approx(0.7637, abs=1e-4)


def test_bad_input_is_refused() -> None:
    game = Game(60, 5, 28)
    ranking = game.rank()
    order = ranking.order()
    with pytest.raises(NotEnough, match="first 61 of 60"):
        pool_search.retrieve(order, game.members, 61, 60)
    with pytest.raises(NotEnough, match="first 56 of 55"):
        pool_search.retrieve_controls(order, game.members, game.controls, 56)
    with pytest.raises(NotEnough, match="none in the pool"):
        pool_search.retrieve(order, np.zeros(0, np.int64), 5, 60)
    for wrong in ([1, 1], [60], [-1]):
        with pytest.raises(SecureflError, match="not distinct rows"):
            pool_search.retrieve(order, np.array(wrong), 5, 60)
    with pytest.raises(SecureflError, match="were in the data"):
        pool_search.retrieve_controls(order, game.members, game.members[:1], 5)

    def rank(pool: np.ndarray) -> Ranking:
        return pool_search.rank(pool, game.target, game.background, game.auxiliary, chunk=10 * WIDTH)

    with pytest.raises(NotEnough, match="empty"):
        rank(game.pool[:0])
    with pytest.raises(SecureflError, match="another width"):
        rank(game.pool[:, 1:])
    with pytest.raises(SecureflError, match="pool are all the same, so the audit would mean nothing"):
        rank(np.ones_like(game.pool))
    # In the middle of a chunk, and alone in the last one.
    for value, row in ((np.nan, 45), (np.inf, 45), (np.nan, 60), (-np.inf, 60)):
        broken = np.concatenate([game.pool, game.pool[:1]])
        broken[row, 3] = value
        with pytest.raises(SecureflError, match="hold NaN or infinity, so the audit would mean nothing"):
            rank(broken)


def test_a_decomposition_that_is_not_unique_is_refused() -> None:
    game = Game(60, 41, 29)
    with pytest.raises(NotEnough, match="no unique decomposition"):
        game.decompose(game.rank())
    small = Game(60, 10, 30)
    few = pool_search.rank(small.pool[:9], small.target, small.background, small.auxiliary)
    with pytest.raises(NotEnough, match="9 rows for a cluster of 10"):
        pool_search.decompose(small.pool[:9], few, small.target, small.background, 0)
