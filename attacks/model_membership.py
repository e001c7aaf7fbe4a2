"""Attack 12: was a given text among the rows that a released model was trained on?

A model is surer of the labels of rows it was trained on. How much surer than it would be of that text anyway
is told by shadows: models of the same task that never saw it, or did by design. Fine-tuning shadows takes a
machine for days; here a shadow is a logistic regression on pooled vectors, which takes milliseconds and says
how hard a text is. On top of them stand LiRA (Carlini et al., S&P 2022) and RMIA (Zarifzadeh et al., ICML
2024), beside the bare loss (Yeom et al., CSF 2018). Scores are larger for members. What a DP-SGD claim allows
to any such attack is `TradeOff`. Pure functions on arrays; nothing here reads files, texts or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logsumexp
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from attacks.adversary import NotEnough
from attacks.membership import Vectors, check_vectors
from securefl.errors import SecureflError
from securefl.release import DpSgd

SHADOWS = 32
# Fewest shadows with and without a text for a spread of its own; with fewer, all texts share one (Carlini et
# al. 2022, section VI.B).
_OWN_SPREAD = 32
_LEAST_ROWS = 8
# Of RMIA: how much likelier a row must be than one of the population, and the share of the way from the
# average out-model to 1 that an average in-model is taken to go (Zarifzadeh et al. 2024, equation 10).
_GAMMA, _OFFLINE = 2.0, 0.3


@dataclass(frozen=True)
class Candidates:
    """Texts as the adversary sees them; n of them.

    logits: (n, C) of the released model. labels: (n,) theirs, in 0 .. C-1. base: (n, d) pooled vectors of the
    public encoder; trained: (n, d) of the released one.
    """

    logits: Vectors
    labels: NDArray[np.int64]
    base: Vectors
    trained: Vectors

    def __len__(self) -> int:
        return len(self.labels)


def checked(candidates: Candidates, what: str) -> Candidates:
    """The same as float64. Raises SecureflError for NaN, constant vectors, or numbers of rows that differ."""
    logits = np.asarray(candidates.logits, np.float64)
    labels = np.asarray(candidates.labels, np.int64)
    if not np.isfinite(logits).all():
        raise SecureflError(f"the logits of {what} hold NaN or infinity, so the audit would mean nothing")
    base = check_vectors(candidates.base, what)
    trained = check_vectors(candidates.trained, what)
    if logits.ndim != 2 or {len(labels), len(base), len(trained)} != {len(logits)}:
        raise SecureflError(f"{what}: logits, labels and vectors are not of the same rows")
    if logits.shape[1] < 2 or (len(labels) and not 0 <= labels.min() <= labels.max() < logits.shape[1]):
        raise SecureflError(f"{what}: a label is not one of the {logits.shape[1]} that the model tells apart")
    return Candidates(logits, labels, base, trained)


def losses(logits: Vectors, labels: NDArray[np.int64]) -> Vectors:
    """(n,) cross-entropy of each row's label."""
    own = logits[np.arange(len(labels)), labels]
    return np.asarray(logsumexp(logits, axis=1) - own, np.float64)


def confidences(logits: Vectors, labels: NDArray[np.int64]) -> Vectors:
    """(n,) ln p / (1 - p) of the probability p of each row's label: nearly normal over models, unlike p."""
    others = logits.copy()
    rows = np.arange(len(labels))
    others[rows, labels] = -np.inf
    return np.asarray(logits[rows, labels] - logsumexp(others, axis=1), np.float64)


@dataclass(frozen=True)
class Shadows:
    """Confidences of K shadows in n candidates and m rows of the population, and who was in whose rows.

    candidates: (K, n), inside: (K, n); population: (K, m), population_inside: (K, m).
    """

    candidates: Vectors
    inside: NDArray[np.bool_]
    population: Vectors
    population_inside: NDArray[np.bool_]

    @property
    def online(self) -> bool:
        """Whether shadows were trained with candidates among their rows."""
        return bool(self.inside.any())


def _half(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.bool_]:
    """(n,) a random half of every label's rows, at least one."""
    taken = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        taken[rows[: max(1, (len(rows) + int(rng.integers(2))) // 2)]] = True
    return taken


def fit_shadows(
    vectors: Vectors,
    labels: NDArray[np.int64],
    population: Vectors,
    population_labels: NDArray[np.int64],
    rng: np.random.Generator,
    *,
    shadows: int = SHADOWS,
    online: bool = False,
    strength: float = 1.0,
) -> Shadows:
    """Train heads on random halves of the population (m, d), and score candidates (n, d) and population.

    online: candidates take part too, each in about half of the shadows. strength: inverse of the L2 penalty.
    Raises NotEnough where a candidate's label has not two rows in the population.
    """
    vectors, population = (
        check_vectors(vectors, "the candidates"), check_vectors(population, "the auxiliary text")
    )  # fmt: skip
    classes, counts = np.unique(population_labels, return_counts=True)
    if len(population) < _LEAST_ROWS or len(classes) < 2 or shadows < 2:
        raise NotEnough(
            f"shadows need at least {_LEAST_ROWS} auxiliary rows of two labels, and be two themselves"
        )
    if not np.isin(labels, classes[counts >= 2]).all():
        raise NotEnough("a candidate's label has fewer than two auxiliary rows, so no shadow knows it")
    every, truth = np.concatenate([population, vectors]), np.concatenate([population_labels, labels])
    m = len(population)
    taken = np.zeros((shadows, len(every)), bool)
    scores = np.empty((shadows, len(every)))
    places = np.searchsorted(classes, truth)
    for k in range(shadows):
        taken[k, :m] = _half(population_labels, rng)
        if online:
            taken[k, m:] = rng.random(len(vectors)) < 0.5
        head = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
        head.fit(every[taken[k]], truth[taken[k]])
        logits = np.asarray(head.decision_function(every), np.float64)
        if logits.ndim == 1:
            logits = np.stack([np.zeros(len(logits)), logits], axis=1)
        scores[k] = confidences(logits, places)
    return Shadows(scores[:, m:], taken[:, m:], scores[:, :m], taken[:, :m])


def _moments(scores: Vectors, counted: NDArray[np.bool_]) -> tuple[Vectors, Vectors]:
    """(n,) mean and standard deviation over the counted shadows; one deviation for all where they are few.

    Where a candidate has none its mean is that of all.
    """
    counts = counted.sum(0)
    overall = float(scores[counted].mean()) if counted.any() else 0.0
    sums = np.where(counted, scores, 0.0).sum(0)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), overall)
    squares = np.where(counted, (scores - means) ** 2, 0.0).sum(0)
    shared = float(np.sqrt(squares.sum() / max(1, int((counts - 1).clip(0).sum()))))
    spread = np.full(len(means), shared)
    if counts.min() >= _OWN_SPREAD:
        spread = np.sqrt(squares / (counts - 1))
    return means, np.maximum(spread, max(1e-3 * shared, 1e-9))


def _scale(population: Vectors, shadows: Shadows) -> tuple[float, float]:
    """(factor, shift) that takes a released model's confidences to the scale of its shadows'.

    It was trained longer than a head and is surer of everything; that alone says nothing of a row. So it is
    measured on the population, which was in no training of the model, against shadows without each row.
    """
    if population.shape != (shadows.population.shape[1],):
        raise SecureflError("the confidences are not of the auxiliary rows that the shadows scored")
    out = shadows.population[~shadows.population_inside]
    if not len(out):
        raise NotEnough("every shadow was trained on all auxiliary rows, so none says what an unseen row is")
    factor = float(out.std()) / max(float(population.std()), 1e-12)
    return factor, float(out.mean()) - factor * float(population.mean())


def _check(confidence: Vectors, shadows: Shadows) -> None:
    if confidence.shape != (shadows.candidates.shape[1],):
        raise SecureflError("the confidences are not of the candidates that the shadows scored")


def lira(confidence: Vectors, population: Vectors, shadows: Shadows) -> Vectors:
    """(n,) LiRA's score of the released model's confidences in candidates (n,), given those in the population
    (m,), from which their scale is taken.

    Online: ln N(c; in) / N(c; out), with the spread of the latter for both: heads fit their own rows closer
    than the model does, and with the narrow spread of the in-shadows a member surer than they are would count
    as none (.73 to .91 in AUC on overfit models, .96 to .98 with one spread). Offline: deviations above
    the shadows without the candidate, which ranks as the tail probability that the paper takes.
    """
    _check(confidence, shadows)
    factor, shift = _scale(population, shadows)
    scaled = factor * confidence + shift
    mean, spread = _moments(shadows.candidates, ~shadows.inside)
    if not shadows.online:
        return np.asarray((scaled - mean) / spread, np.float64)
    mean_in, _ = _moments(shadows.candidates, shadows.inside)
    ratio = ((scaled - mean) ** 2 - (scaled - mean_in) ** 2) / (2 * spread**2)
    return np.asarray(ratio, np.float64)


def rmia(confidence: Vectors, population: Vectors, shadows: Shadows) -> Vectors:
    """(n,) share of the population that a candidate beats by RMIA's pairwise likelihood ratio.

    confidence: (n,) and population: (m,), of the released model. Pr(x) is the mean of in- and out-models;
    offline the former are taken to lie between the latter and 1. The share cannot rank below 1 / m, so the
    ratio itself breaks ties in it.
    """
    _check(confidence, shadows)
    factor, shift = _scale(population, shadows)
    ratio = expit(factor * confidence + shift)
    ratio /= _likelihood(shadows.candidates, shadows.inside, shadows.online)
    others = expit(factor * population + shift)
    others /= _likelihood(shadows.population, shadows.population_inside, True)
    beaten = np.searchsorted(np.sort(others), ratio / _GAMMA, side="right") / len(others)
    return np.asarray(beaten + ratio / ratio.max() / (2 * len(others)), np.float64)


def _likelihood(scores: Vectors, inside: NDArray[np.bool_], both: bool) -> Vectors:
    """(n,) Pr(x): the mean of the average in- and out-model."""
    probabilities = expit(scores)
    out = _moments(probabilities, ~inside)[0]
    within = _moments(probabilities, inside)[0] if both else _OFFLINE * out + 1 - _OFFLINE
    return np.asarray(np.maximum((out + within) / 2, 1e-12), np.float64)


@dataclass(frozen=True)
class Scores:
    """Scores of members (n1,) and controls (n0,), larger meaning member, of each attack."""

    loss: tuple[Vectors, Vectors]
    lira_offline: tuple[Vectors, Vectors]
    lira_online: tuple[Vectors, Vectors]
    rmia: tuple[Vectors, Vectors]


def attack(
    members: Candidates,
    controls: Candidates,
    auxiliary: Candidates,
    rng: np.random.Generator,
    shadows: int = SHADOWS,
) -> Scores:
    """Score rows that a model was trained on and rows that it was not; auxiliary is disjoint from both.

    Offline shadows read texts by the public encoder, which knows of no row: their confidence is how hard a
    text is. Online ones read them by the released encoder, as its own head did. Raises NotEnough for fewer
    than 8 rows on a side.
    """
    members, controls = checked(members, "the silo's rows"), checked(controls, "the control rows")
    auxiliary = checked(auxiliary, "the auxiliary text")
    if min(len(members), len(controls)) < _LEAST_ROWS:
        raise NotEnough(
            f"membership of a model needs {_LEAST_ROWS} members and controls; there are {len(members)} and "
            f"{len(controls)}"
        )
    cut, labels = len(members), np.concatenate([members.labels, controls.labels])
    logits = np.concatenate([members.logits, controls.logits])
    confidence = confidences(logits, labels)

    def fitted(layer: Any, online: bool) -> Shadows:
        rows = np.concatenate([layer(members), layer(controls)])
        return fit_shadows(
            rows, labels, layer(auxiliary), auxiliary.labels, rng, shadows=shadows, online=online
        )

    offline = fitted(lambda one: one.base, False)
    online = fitted(lambda one: one.trained, True)
    population = confidences(auxiliary.logits, auxiliary.labels)

    def sides(scores: Vectors) -> tuple[Vectors, Vectors]:
        return scores[:cut], scores[cut:]

    return Scores(
        loss=sides(-losses(logits, labels)),
        lira_offline=sides(lira(confidence, population, offline)),
        lira_online=sides(lira(confidence, population, online)),
        rmia=sides(rmia(confidence, population, offline)),
    )


@dataclass(frozen=True)
class TradeOff:
    """Largest true-positive rates that claims of differential privacy allow in a membership game.

    epsilons, deltas: (k,) points at which the mechanism is (epsilon, delta)-DP under add/remove; every one
    bounds the curve, and so does their minimum. moves: units by which the two worlds of the game differ under
    add/remove: 2 where the number of rows is known, since one goes and another comes (group privacy of
    trade-off functions: Dong, Roth and Su 2022, theorem 2.14); 1 where it is not.
    """

    epsilons: Vectors
    deltas: Vectors
    moves: int = 2

    def tpr(self, fpr: NDArray[np.float64] | float) -> Vectors:
        """Largest true-positive rate at each false-positive rate."""
        rate = np.asarray(fpr, np.float64)
        for _ in range(self.moves):
            flat = rate.reshape(-1, 1)
            up = np.exp(self.epsilons) * flat + self.deltas
            down = 1 - np.exp(-self.epsilons) * (1 - self.deltas - flat)
            rate = np.minimum(1.0, np.minimum(up, down).min(1)).reshape(rate.shape)
        return rate

    def auc(self) -> float:
        """Largest AUC: the area under `tpr`, summed from above, at most 1 / 2000 too large."""
        grid = np.linspace(0, 1, 2001)
        return float(self.tpr(grid[1:]).mean())


def trade_off(claims: Sequence[DpSgd], moves: int = 2) -> TradeOff:
    """What all `claims` about the same rows allow together, by the privacy loss distribution of their steps.

    A claim is of its unit, and bounds a game about one of the unit's rows too. Raises NotEnough without a
    claim. Losses are rounded up, so the curve errs on the side of the attack.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    if not claims:
        raise NotEnough("a cap needs a claim, and the model has none")
    total: Any = None
    for claim in claims:
        part = from_gaussian_mechanism(
            claim.noise_multiplier, sampling_prob=claim.sample_rate, value_discretization_interval=1e-3
        ).self_compose(claim.steps)
        total = part if total is None else total.compose(part)
    epsilons = np.concatenate([np.linspace(0, 4, 161), np.linspace(4.1, 40, 360)])
    deltas = np.clip(np.asarray(total.get_delta_for_epsilon(epsilons), np.float64), 0, 1)
    return TradeOff(epsilons, deltas, moves)
