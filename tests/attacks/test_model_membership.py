"""Attack 12: a model that learned its rows by heart is seen through, and caps come from the claim alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression

from attacks import bounds
from attacks.adversary import NotEnough
from attacks.model_membership import (
    Candidates,
    Shadows,
    TradeOff,
    attack,
    confidences,
    fit_shadows,
    lira,
    losses,
    rmia,
    trade_off,
)
from securefl.errors import SecureflError
from securefl.release import DpSgd

WIDTH, ROWS = 600, 90
# The least AUC on a model that is overfit as here.
ATTACKS = {"loss": 0.95, "lira_offline": 0.88, "lira_online": 0.93, "rmia": 0.75}


def world(seed: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and labels: one direction in 600 tells them apart, and not always."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((rows, WIDTH))
    labels = (vectors[:, 0] + rng.standard_normal(rows) > 0).astype(np.int64)
    return vectors, labels


def candidates(model: LogisticRegression, seed: int, rows: int = ROWS) -> Candidates:
    vectors, labels = world(seed, rows)
    second = model.decision_function(vectors)
    return Candidates(np.stack([np.zeros_like(second), second], axis=1), labels, vectors, vectors)


def trained_on(seed: int) -> LogisticRegression:
    return LogisticRegression(C=10.0, max_iter=5000).fit(*world(seed))


def test_an_overfit_model_gives_its_rows_away_and_shuffled_truth_does_not() -> None:
    model = trained_on(1)
    scores = attack(
        candidates(model, 1), candidates(model, 2), candidates(model, 3, 200), np.random.default_rng(0)
    )
    for name, least in ATTACKS.items():
        members, controls = getattr(scores, name)
        assert bounds.auc(members, controls) > least, name
        mixed = np.random.default_rng(1).permutation(np.concatenate([members, controls]))
        low, high = bounds.auc_interval(mixed[:ROWS], mixed[ROWS:], alpha=0.01)
        assert low < 0.5 < high, name


def test_a_model_of_other_rows_gives_nothing_away() -> None:
    model = trained_on(9)
    scores = attack(
        candidates(model, 1), candidates(model, 2), candidates(model, 3, 200), np.random.default_rng(0)
    )
    for name in ATTACKS:
        low, high = bounds.auc_interval(*getattr(scores, name), alpha=0.01)
        assert low < 0.5 < high, name


def test_difficulty_is_taken_out() -> None:
    """Where members are the harder texts the bare loss points the wrong way, and LiRA does not; a model that
    is three times as sure of everything is the same to it."""
    rng = np.random.default_rng(0)
    hard, member = np.repeat([-2.0, 2.0], 200), np.arange(400) < 200
    nobody = np.zeros((64, 400), bool)
    out, other = (hard + rng.normal(0, 0.5, (64, 400)) for _ in range(2))
    shadows = Shadows(out, nobody, other, nobody)
    confidence = hard + rng.normal(0, 0.5, 400) + member
    population = hard + rng.normal(0, 0.5, 400)
    assert bounds.auc(confidence[member], confidence[~member]) < 0.05
    scores = lira(confidence, population, shadows)
    assert bounds.auc(scores[member], scores[~member]) > 0.85
    np.testing.assert_allclose(lira(3 * confidence + 1, 3 * population + 1, shadows), scores)


def test_confidence_and_loss_against_their_definitions() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 3, (50, 4)), rng.integers(0, 4, 50)
    p = torch.from_numpy(logits).softmax(1).numpy()[np.arange(50), labels]
    np.testing.assert_allclose(confidences(logits, labels), np.log(p / (1 - p)), rtol=1e-9)
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(labels), reduction="none"
    )
    np.testing.assert_allclose(losses(logits, labels), expected.numpy(), rtol=1e-9)
    # Beyond what a float can hold of p itself.
    assert confidences(np.array([[0.0, 800.0]]), np.array([1])).tolist() == [800.0]


def invented(online: bool) -> tuple[np.ndarray, np.ndarray, Shadows]:
    rng = np.random.default_rng(3)
    inside = rng.random((80, 7)) < 0.5 if online else np.zeros((80, 7), bool)
    other = rng.random((80, 30)) < 0.5
    shadows = Shadows(rng.normal(0, 1, (80, 7)), inside, rng.normal(0, 1, (80, 30)), other)
    return rng.normal(0, 1, 7), rng.normal(0, 1, 30), shadows


@pytest.mark.parametrize("online", [False, True])
def test_lira_against_a_loop(online: bool) -> None:
    confidence, population, shadows = invented(online)
    unseen = shadows.population[~shadows.population_inside]
    matched = unseen.mean() + (confidence - population.mean()) * unseen.std() / population.std()
    expected = []
    for i, value in enumerate(matched):
        column, inside = shadows.candidates[:, i], shadows.inside[:, i]
        out = column[~inside]
        if online:
            own = column[inside]
            ratio = norm.logpdf(value, own.mean(), out.std(ddof=1))
            expected.append(ratio - norm.logpdf(value, out.mean(), out.std(ddof=1)))
        else:
            expected.append((value - out.mean()) / out.std(ddof=1))
    if online and min(shadows.inside.sum(0).min(), (~shadows.inside).sum(0).min()) < 32:
        pytest.fail("the example must have enough shadows on both sides")
    np.testing.assert_allclose(lira(confidence, population, shadows), expected)


@pytest.mark.parametrize("online", [False, True])
def test_rmia_against_a_loop(online: bool) -> None:
    confidence, population, shadows = invented(online)
    unseen = shadows.population[~shadows.population_inside]
    factor = unseen.std() / population.std()
    middle = population.mean()

    def p(logit: float) -> float:
        return 1 / (1 + math.exp(-logit))

    def ratio(target: float, column: np.ndarray, inside: np.ndarray, both: bool) -> float:
        out = np.mean([p(c) for c in column[~inside]])
        within = np.mean([p(c) for c in column[inside]]) if both else 0.3 * out + 0.7
        return p(unseen.mean() + factor * (target - middle)) / ((out + within) / 2)

    others = [
        ratio(population[j], shadows.population[:, j], shadows.population_inside[:, j], True)
        for j in range(30)
    ]
    shares = []
    for i in range(7):
        own = ratio(confidence[i], shadows.candidates[:, i], shadows.inside[:, i], online)
        shares.append(np.mean([own / other >= 2 for other in others]))
    scores = rmia(confidence, population, shadows)
    # The tie-break is less than a row of the population.
    np.testing.assert_allclose(np.floor(scores * 30 + 1e-9) / 30, shares)


def claim(noise: float, rate: float, steps: int) -> DpSgd:
    return DpSgd(
        epsilon=1.0, delta=1e-5, noise_multiplier=noise, sample_rate=rate, steps=steps, clip=1.0,
        head_share=0.5, per_unit=1, accountants="a test", generator="test", simulated=True,
    )  # fmt: skip


def test_the_cap_of_a_gaussian_is_its_own_curve() -> None:
    """One full-batch step is a Gaussian mechanism: mu = 1 / z, and twice that for a row exchanged."""
    for moves in (1, 2):
        curve = trade_off([claim(2.0, 1.0, 1)], moves)
        for fpr in (0.001, 0.01, 0.1, 0.5):
            exact = bounds.tpr_cap(moves / 2.0, fpr)
            assert exact - 1e-9 <= float(curve.tpr(fpr)) <= exact * 1.02 + 1e-4
        exact = bounds.auc_cap(moves / 2.0)
        assert exact - 1e-9 <= curve.auc() <= exact + 3e-3


def test_the_cap_of_an_epsilon_alone() -> None:
    """Under pure DP the area is e^eps / (1 + e^eps); two moves stay within that of twice the epsilon."""
    epsilon = np.array([1.0])
    for moves in (1, 2):
        curve = TradeOff(epsilon, np.zeros(1), moves)
        assert float(curve.tpr(0.01)) == pytest.approx(0.01 * math.exp(moves))
    assert TradeOff(epsilon, np.zeros(1), 1).auc() == pytest.approx(math.e / (1 + math.e), abs=1e-3)
    # Two moves: 1 - (1 - T(T)) at one half, by hand, and an area within that of twice the epsilon.
    once = 1 - 0.5 / math.e
    curve = TradeOff(epsilon, np.zeros(1), 2)
    assert float(curve.tpr(0.5)) == pytest.approx(1 - (1 - once) / math.e)
    assert math.e / (1 + math.e) < curve.auc() < 1 / (1 + math.exp(-2))
    # Group privacy by hand: 2 eps and (1 + e^eps) delta.
    curve = TradeOff(epsilon, np.array([1e-3]), 2)
    assert float(curve.tpr(0.01)) == pytest.approx(0.01 * math.exp(2) + (1 + math.e) * 1e-3)


def test_claims_compose_and_the_curve_is_a_curve() -> None:
    twice, once = trade_off([claim(1.5, 0.1, 20)] * 2), trade_off([claim(1.5, 0.1, 40)])
    grid = np.linspace(0, 1, 101)
    np.testing.assert_allclose(twice.tpr(grid), once.tpr(grid), atol=1e-6)
    assert (np.diff(once.tpr(grid)) >= 0).all()
    assert (once.tpr(grid) >= grid).all()
    assert trade_off([claim(1.5, 0.1, 20)]).auc() < once.auc() < 1
    with pytest.raises(NotEnough, match="claim"):
        trade_off([])


def test_too_few_rows_and_broken_ones() -> None:
    model = trained_on(1)
    good, few = candidates(model, 1), candidates(model, 2, 7)
    rng = np.random.default_rng(0)
    for members, controls, auxiliary in ((few, good, good), (good, few, good), (good, good, few)):
        with pytest.raises(NotEnough):
            attack(members, controls, auxiliary, rng)
    nan = np.full_like(good.base, np.nan)
    broken = {
        "NaN": Candidates(good.logits, good.labels, nan, good.trained),
        "all the same": Candidates(good.logits, good.labels, good.base, np.ones_like(nan)),
        "logits": Candidates(np.full_like(good.logits, np.inf), good.labels, good.base, good.trained),
        "same rows": Candidates(good.logits[1:], good.labels, good.base, good.trained),
        "a label": Candidates(good.logits, good.labels + 1, good.base, good.trained),
    }
    for why, one in broken.items():
        with pytest.raises(SecureflError, match=why):
            attack(one, good, good, rng)


def test_a_label_without_auxiliary_rows() -> None:
    vectors, labels = world(1)
    with pytest.raises(NotEnough, match="fewer than two"):
        fit_shadows(vectors, np.full(ROWS, 2), *world(2), np.random.default_rng(0))
    with pytest.raises(NotEnough, match="shadows need"):
        fit_shadows(vectors, labels, vectors, np.zeros(ROWS, np.int64), np.random.default_rng(0))
    shadows = fit_shadows(vectors, labels, *world(2), np.random.default_rng(0), shadows=3)
    with pytest.raises(SecureflError, match="not of the candidates"):
        lira(np.zeros(3), np.zeros(ROWS), shadows)
    with pytest.raises(SecureflError, match="auxiliary rows"):
        rmia(np.zeros(ROWS), np.zeros(3), shadows)
