"""Attacks 5 and 13 on rows made of known vectors: read where they leak, else the prior."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge
from sklearn.metrics import f1_score, precision_recall_curve

from attacks import attribute_probe, bag_probe, bounds, token_regressions
from attacks.adversary import NotEnough
from attacks.bag_probe import token_set
from attacks.membership import Target, Vectors
from attacks.simulated import Ids, Simulator, buckets, split
from attacks.token_scores import Overlap, overlap
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.release import GaussianSums, NonPrivate

PLAIN = NonPrivate(reason="a test")
WIDTH, VOCABULARY, START = 48, 120, 3
SPECIAL = frozenset({0, 1, START})
# It is in no auxiliary text, nor is token 2.
UNSEEN = VOCABULARY - 1
TABLE = np.random.default_rng(99).standard_normal((VOCABULARY, WIDTH))


def claim(sigma: float, clip: float, counts: float = 0.5) -> GaussianSums:
    return GaussianSums(
        epsilon=1.0, delta=1e-5, mu=1 / sigma, clip=clip, noise_multiplier=sigma, count_multiplier=counts,
        prediction_multiplier=1e6, generator="test", simulated=True,
    )  # fmt: skip


def texts_of(count: int, rng: np.random.Generator) -> list[Ids]:
    """Six different content tokens with falling frequencies, behind a start token that says nothing."""
    rates = 1 / np.arange(10.0, 10 + VOCABULARY)
    rates[[*SPECIAL, 2, UNSEEN]] = 0
    return [np.r_[START, rng.choice(VOCABULARY, 6, False, rates / rates.sum())] for _ in range(count)]


def vectors_of(texts: list[Ids]) -> Vectors:
    return np.stack([TABLE[ids].mean(0) for ids in texts]) + 0.5


def release(vectors: Vectors, n: int, rng: np.random.Generator, terms: GaussianSums | None = None) -> Target:
    """Groups of n rows in order."""
    groups = vectors.reshape(-1, n, WIDTH)
    sizes = np.full(len(groups), float(n))
    if terms is None:
        return Target(groups.mean(1), sizes, PLAIN)
    sums = clip_rows(vectors, terms.clip).reshape(-1, n, WIDTH).sum(1)
    sums += rng.normal(0, terms.clip * terms.noise_multiplier, sums.shape)
    sizes = np.maximum(1.0, sizes + rng.normal(0, terms.count_multiplier, len(sizes)))
    return Target(sums / sizes[:, None], sizes, terms)


def truths(texts: list[Ids], n: int) -> list[Ids]:
    return [token_set(texts[i : i + n], SPECIAL) for i in range(0, len(texts), n)]


def compare(guesses: list[Ids], truth: list[Ids], only: NDArray[np.bool_] | None = None) -> Overlap:
    return overlap([[one] for one in guesses], [[one] for one in truth], SPECIAL, only)


def probe(
    n: int, rng: np.random.Generator, terms: GaussianSums | None = None, groups: int = 60
) -> tuple[bag_probe.Bags, list[Ids]]:
    auxiliary, own = texts_of(500, rng), texts_of(groups * n, rng)
    target = release(vectors_of(own), n, rng, terms)
    found = bag_probe.read(target, vectors_of(auxiliary), auxiliary, VOCABULARY, SPECIAL, rng, groups=1200)
    return found, truths(own, n)


# --- simulated releases


def test_sizes_that_are_close_share_a_probe() -> None:
    found = buckets(np.array([5.0, 1.0, 7.5, 100.0, 7.6, 1.0]))
    assert [sorted(one.tolist()) for one in found] == [[1, 5], [0, 2], [4], [3]]


def test_the_rows_to_choose_on_are_apart_and_large_enough() -> None:
    fitted, held = split(100, 12.0, np.random.default_rng(0))
    assert sorted([*fitted, *held]) == list(range(100))
    assert len(held) == 25
    with pytest.raises(
        NotEnough, match="100 auxiliary rows; a probe of centroids of 13 rows needs at least 104"
    ):
        split(100, 13.0, np.random.default_rng(0))
    with pytest.raises(NotEnough, match="at least 64"):
        split(63, 1.0, np.random.default_rng(0))


def test_exact_groups_are_the_means_of_their_rows() -> None:
    rng = np.random.default_rng(0)
    rows, cells = rng.standard_normal((90, WIDTH)), np.repeat([0, 1, -1], 30)
    used = np.arange(0, 90, 2)
    simulator = Simulator(rows, PLAIN, cells)
    blocks = list(simulator.releases(used, np.array([3.0, 5.0]), 41, rng))
    whose = sparse.vstack([part for _, part in blocks]).toarray()
    assert whose.shape == (41, 90)
    assert whose.sum(1).tolist() == [3, 5] * 20 + [3]
    assert set(np.unique(whose)) == {0, 1}
    assert not whose[:, 1::2].any()
    # Each group is of one cell, and all groups of both cells; -1 is no cell.
    assert all(len(set(cells[group > 0])) == 1 for group in whose)
    assert set(cells[whose.any(0)]) == {0, 1}
    means = (whose / whose.sum(1, keepdims=True)) @ rows
    np.testing.assert_allclose(np.concatenate([part for part, _ in blocks]), means, atol=1e-12)


def test_every_row_serves_equally_often() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, WIDTH))
    ((_, whose),) = Simulator(rows, PLAIN).releases(np.arange(50), np.array([1.0]), 200, rng)
    assert np.asarray(whose.sum(axis=0)).ravel().tolist() == [4] * 50


def test_noised_groups_have_the_noise_of_the_claim() -> None:
    """Clipped rows, sums and counts: moments of 4,000 simulated groups against the formula."""
    rng, terms, n = np.random.default_rng(1), claim(0.6, 2.0, counts=1.5), 12.0
    # All rows are the same after clipping, so that everything else is noise.
    rows = np.tile(np.eye(WIDTH)[0] * 7, (200, 1)) * np.linspace(1, 2, 200)[:, None]
    blocks = list(Simulator(rows, terms).releases(np.arange(200), np.array([n]), 4000, rng))
    sums = np.concatenate([part for part, _ in blocks]) * n
    counts = np.asarray(sparse.vstack([part for _, part in blocks]).sum(axis=1)).ravel()
    assert counts.mean() == pytest.approx(n, abs=0.1)
    # Rounding a count adds 1/12 to its variance.
    assert counts.var() == pytest.approx(1.5**2 + 1 / 12, rel=0.08)
    noise = sums - counts[:, None] * np.eye(WIDTH)[0] * 2.0
    assert noise.std() == pytest.approx(0.6 * 2.0, rel=0.01)
    assert noise.mean() == pytest.approx(0.0, abs=0.02)


# --- attack 5


def test_the_ridge_is_scikit_learns() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((80, WIDTH)) + 3, (rng.random((80, 7)) < 0.3).astype(np.float32)
    blocks = [(x[i : i + 30], sparse.csr_array(y[i : i + 30])) for i in (0, 30, 60)]
    fitted = token_regressions.fit(iter(blocks), WIDTH, 7)
    other = rng.standard_normal((9, WIDTH)) + 3
    alpha = 0.3 * 80 * fitted.variances.mean()
    expected = Ridge(alpha=alpha).fit(x, y).predict(other)
    np.testing.assert_allclose(fitted.scores(other, 0.3), expected, atol=1e-5)
    np.testing.assert_allclose(fitted.scores(other, np.inf), np.tile(y.mean(0), (9, 1)), atol=1e-6)


def test_the_ratio_is_that_of_two_gaussians() -> None:
    """Against scipy's densities, around the overall mean and the shrunk mean of the rows with a token."""
    rng = np.random.default_rng(14)
    y = (rng.random((90, 5)) < 0.3).astype(np.float32)
    x = rng.standard_normal((90, WIDTH)) + y @ rng.standard_normal((5, WIDTH))
    rows = y.sum(0).astype(float)
    fitted = token_regressions.fit(iter([(x, sparse.csr_array(y))]), WIDTH, 5)
    found = token_regressions.discriminant(fitted, rows).scores(x[:7], token_regressions.PAIR_PENALTY)
    covariance = np.cov(x.T, bias=True)
    covariance += token_regressions.PAIR_PENALTY * np.trace(covariance) / WIDTH * np.eye(WIDTH)
    for token in range(5):
        gap = x[y[:, token] > 0].mean(0) - x.mean(0)
        mean = x.mean(0) + gap * rows[token] / (rows[token] + token_regressions.PSEUDO_ROWS)
        expected = [multivariate_normal(at, covariance).logpdf(x[:7]) for at in (mean, x.mean(0))]
        np.testing.assert_allclose(found[:, token], expected[0] - expected[1], atol=1e-3)


def test_the_threshold_is_the_best_one() -> None:
    rng = np.random.default_rng(3)
    scores, truth = rng.random((40, 30)).astype(np.float32), rng.random((40, 30)) < 0.2
    scores += 0.5 * truth
    chooser = token_regressions.Chooser()
    for part in (slice(0, 25), slice(25, 40)):
        chooser.add(scores[part], sparse.csr_array(truth[part].astype(np.float32)))
    f1, threshold = chooser.best()
    precision, recall, _ = precision_recall_curve(truth.ravel(), scores.ravel())
    naive = (2 * precision * recall / np.maximum(precision + recall, 1e-9)).max()
    assert f1 == pytest.approx(naive, abs=0.01)
    assert f1 == pytest.approx(f1_score(truth.ravel(), (scores >= threshold).ravel()), abs=0.01)


def test_the_number_of_frequent_tokens_is_the_best_one() -> None:
    rng = np.random.default_rng(4)
    truth = rng.random((50, 12)) < np.linspace(0.9, 0.05, 12)
    order = rng.permutation(12)
    number, f1 = token_regressions.best_number(truth.sum(0).astype(float), order, 50)
    naive = [f1_score(truth.ravel(), np.tile(np.isin(np.arange(12), order[:k]), 50)) for k in range(1, 13)]
    assert number == int(np.argmax(naive)) + 1
    assert f1 == pytest.approx(max(naive))


@pytest.mark.parametrize(("n", "lift"), [(1, 0.35), (4, 0.1)])
def test_tokens_are_read_from_exact_centroids(n: int, lift: float) -> None:
    found, truth = probe(n, np.random.default_rng(5))
    reached = compare(found.guesses, truth).f1
    assert reached > compare(found.prior, truth).f1 + lift
    assert reached > compare(found.same_number, truth).f1 + lift
    assert [len(one) for one in found.same_number] == [len(one) for one in found.guesses]
    assert not any(np.isin(one, list(SPECIAL)).any() for one in found.guesses)


def test_shuffled_truth_falls_to_the_prior() -> None:
    rng = np.random.default_rng(6)
    found, truth = probe(1, rng, groups=200)
    mixed = [truth[i] for i in np.roll(np.arange(len(truth)), 7)]
    assert compare(found.guesses, mixed).f1 < compare(found.prior, mixed).f1 + 0.02


def test_a_silo_whose_texts_and_vectors_do_not_belong_together_leaks_nothing() -> None:
    """Auxiliary vectors that say nothing of their texts: the probe is the frequency prior."""
    rng = np.random.default_rng(7)
    auxiliary, own = texts_of(400, rng), texts_of(100, rng)
    target = release(vectors_of(own), 1, rng)
    vectors = vectors_of(auxiliary)[rng.permutation(400)]
    found = bag_probe.read(target, vectors, auxiliary, VOCABULARY, SPECIAL, rng, groups=1000)
    truth = truths(own, 1)
    assert abs(compare(found.guesses, truth).f1 - compare(found.prior, truth).f1) < 0.04


def test_drowning_noise_leaves_the_prior_and_not_less() -> None:
    found, truth = probe(3, np.random.default_rng(8), claim(50.0, 3.0))
    assert abs(compare(found.guesses, truth).f1 - compare(found.prior, truth).f1) < 0.03


def test_little_noise_leaves_most() -> None:
    found, truth = probe(3, np.random.default_rng(9), claim(0.05, 6.0))
    assert compare(found.guesses, truth).f1 > compare(found.prior, truth).f1 + 0.1


def test_a_token_of_no_auxiliary_text_is_missed_and_counted() -> None:
    rng = np.random.default_rng(10)
    auxiliary, own = texts_of(500, rng), texts_of(60, rng)
    for ids in own[::2]:
        ids[1] = UNSEEN
    target, truth = release(vectors_of(own), 1, rng), truths(own, 1)
    found = bag_probe.read(target, vectors_of(auxiliary), auxiliary, VOCABULARY, SPECIAL, rng, groups=800)
    assert np.flatnonzero(found.unreachable).tolist() == [2, UNSEEN]
    assert found.is_rare[UNSEEN]
    assert not found.is_rare[list(SPECIAL)].any()
    missed = compare(found.guesses, truth, found.unreachable)
    assert (missed.hits.sum(), missed.true.sum(), missed.guessed.sum()) == (0, 30, 0)


def test_rare_tokens_are_read_with_and_without_their_vectors() -> None:
    """Vocabulary of many tokens, each in a handful of texts: the prior names none of them."""
    rng = np.random.default_rng(11)
    many = 400
    table = rng.standard_normal((many, WIDTH))
    # A quarter of the auxiliary text's tokens never come up in it.
    texts = [rng.choice(many, 3, False) for _ in range(340)]
    auxiliary, own = texts[:240], texts[240:]
    vectors = np.stack([table[ids].mean(0) for ids in texts])
    target = Target(vectors[240:], np.ones(100), PLAIN)
    arguments = target, vectors[:240], auxiliary, many, frozenset[int]()
    truth = [token_set([ids], frozenset()) for ids in own]
    recalls = []
    for known in (None, table):
        found = bag_probe.read(*arguments, np.random.default_rng(1), token_vectors=known, groups=800)
        assert found.unreachable.sum() > 30
        scored = overlap([[one] for one in found.rare], [[one] for one in truth], frozenset(), found.is_rare)
        prior = overlap(
            [[one] for one in found.rare_prior], [[one] for one in truth], frozenset(), found.is_rare
        )
        recalls.append(scored.recall)
        assert scored.f1 > prior.f1 + 0.1
    assert recalls[1] > recalls[0] + 0.1


@pytest.mark.parametrize("broken", [np.full((80, WIDTH), np.nan), np.ones((80, WIDTH))])
def test_broken_vectors_are_an_error_and_no_low_score(broken: Vectors) -> None:
    rng = np.random.default_rng(12)
    texts = texts_of(80, rng)
    good = vectors_of(texts)
    labels = np.arange(80) % 2
    for auxiliary, target in ((broken, release(good, 1, rng)), (good, Target(broken, np.ones(80), PLAIN))):
        with pytest.raises(SecureflError, match="would mean nothing"):
            bag_probe.read(target, auxiliary, texts, VOCABULARY, SPECIAL, rng)
        with pytest.raises(SecureflError, match="would mean nothing"):
            attribute_probe.read(target, auxiliary, labels, rng)


def test_what_cannot_be_probed_is_said() -> None:
    rng = np.random.default_rng(13)
    texts = texts_of(80, rng)
    vectors = vectors_of(texts)
    target = Target(vectors[:2], np.array([40.0, 40.0]), PLAIN)
    with pytest.raises(NotEnough, match="needs at least 320"):
        bag_probe.read(target, vectors, texts, VOCABULARY, SPECIAL, rng)
    with pytest.raises(NotEnough, match="needs at least 320"):
        attribute_probe.read(target, vectors, np.arange(80) % 2, rng)
    single = release(vectors[:4], 1, rng)
    with pytest.raises(NotEnough, match="no content tokens"):
        bag_probe.read(single, vectors, [np.array([START])] * 80, VOCABULARY, SPECIAL, rng)
    with pytest.raises(SecureflError, match="outside 0 to 49"):
        bag_probe.read(single, vectors, texts, 50, SPECIAL, rng)
    with pytest.raises(SecureflError, match="80 auxiliary vectors for 79"):
        bag_probe.read(single, vectors, texts[1:], VOCABULARY, SPECIAL, rng)
    with pytest.raises(SecureflError, match="not one for every token"):
        bag_probe.read(single, vectors, texts, VOCABULARY, SPECIAL, rng, token_vectors=TABLE[:50])
    with pytest.raises(SecureflError, match="80 auxiliary vectors for 7 values"):
        attribute_probe.read(single, vectors, np.arange(7), rng)
    with pytest.raises(NotEnough, match="one value"):
        attribute_probe.read(single, vectors, np.zeros(80, np.int64), rng)
    with pytest.raises(NotEnough, match="no value of the attribute to ask about is in 16"):
        attribute_probe.read(single, vectors, np.arange(80), rng)


# --- attack 13


def rows_with(values: Ids, rng: np.random.Generator, leak: float) -> Vectors:
    """Rows moved along an axis of their value's own."""
    return rng.standard_normal((len(values), WIDTH)) + leak * np.eye(WIDTH)[values]


def ask(
    n: int, rng: np.random.Generator, shares: tuple[float, ...], terms: GaussianSums | None = None,
    leak: float = 3.0,
) -> tuple[attribute_probe.Attributes, NDArray[np.bool_]]:  # fmt: skip
    known, own = (rng.choice(len(shares), m, p=shares) for m in (600, 120 * n))
    target = release(rows_with(own, rng, leak), n, rng, terms)
    found = attribute_probe.read(target, rows_with(known, rng, leak), known, rng, groups=1000)
    return found, found.truth(list(own.reshape(-1, n)))


@pytest.mark.parametrize(("n", "shares"), [(1, (0.7, 0.3)), (5, (0.5, 0.5)), (5, (0.6, 0.3, 0.1))])
def test_an_attribute_is_read_from_exact_centroids(n: int, shares: tuple[float, ...]) -> None:
    found, truth = ask(n, np.random.default_rng(20), shares)
    assert len(found.values) == (1 if len(shares) == 2 else 3)
    for value in found.values.tolist():
        sides = found.sides(truth, value)
        assert sum(map(len, sides)) == 120
        assert bounds.auc_interval(*sides)[0] > 0.6
        assert bounds.auc(*sides) > 0.75
    with_centroid, without = found.accuracy(truth)
    assert with_centroid > without + 0.05


def test_of_two_values_the_rarer_is_asked() -> None:
    found, _ = ask(1, np.random.default_rng(21), (0.7, 0.3))
    assert found.values.tolist() == [1]
    assert found.bases == pytest.approx([0.3], abs=0.06)
    # Without the centroid: one row is of the value with the base's probability.
    np.testing.assert_allclose(found.priors, np.log(found.bases / (1 - found.bases))[0], atol=0.1)


def test_shuffled_truth_falls_to_chance() -> None:
    rng, misses = np.random.default_rng(22), 0
    found, truth = ask(5, rng, (0.5, 0.5))
    for _ in range(40):
        low, high = bounds.auc_interval(*found.sides(rng.permutation(truth), int(found.values[0])))
        misses += not low <= 0.5 <= high
    assert misses <= 6


def test_vectors_that_do_not_have_the_attribute_in_them_tell_nothing() -> None:
    found, truth = ask(3, np.random.default_rng(23), (0.5, 0.5), leak=0.0)
    low, high = bounds.auc_interval(*found.sides(truth, int(found.values[0])))
    assert low <= 0.5 <= high


def test_an_attribute_drowns_in_noise_and_not_in_a_little() -> None:
    values = []
    for sigma in (0.02, 60.0):
        found, truth = ask(4, np.random.default_rng(24), (0.5, 0.5), claim(sigma, 6.0))
        values.append(bounds.auc(*found.sides(truth, int(found.values[0]))))
    assert values[0] > 0.8
    assert abs(values[1] - 0.5) < 0.2


def test_values_too_rare_to_learn_are_named_and_new_ones_count_as_none() -> None:
    rng = np.random.default_rng(25)
    known = np.r_[np.zeros(200, np.int64), np.ones(100, np.int64), [2] * 5]
    vectors = rows_with(known, rng, 3.0)
    found = attribute_probe.read(Target(vectors[:8], np.ones(8), PLAIN), vectors, known, rng, groups=300)
    assert found.values.tolist() == [0, 1]
    assert found.unasked.tolist() == [2]
    truth = found.truth([np.array([0]), np.array([1, 7]), np.array([7])])
    assert truth.tolist() == [[True, False], [False, True], [False, False]]
    with pytest.raises(SecureflError, match="no row whose attribute is known"):
        found.truth([np.zeros(0, np.int64)])


def test_a_release_of_one_answer_has_an_empty_side() -> None:
    rng = np.random.default_rng(26)
    known = np.arange(200) % 2
    vectors = rows_with(known, rng, 3.0)
    found = attribute_probe.read(release(vectors[:20:2], 1, rng), vectors, known, rng, groups=300)
    truth = found.truth([known[i : i + 1] for i in range(0, 20, 2)])
    yes, no = found.sides(truth, int(found.values[0]))
    assert sorted((len(yes), len(no))) == [0, 10]
