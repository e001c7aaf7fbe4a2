"""Attack 13: does a centroid tell of an attribute of its rows (label, language, author, a sensitive flag)?

The game, for a centroid and a value of the attribute: is the share of the centroid's rows that have the value
above its share in auxiliary text? So it is defined for rare values and for common ones ("the majority" is
never a rare value), and at n = 1 it asks for the row's own value. Without the centroid the answer is the
same for every centroid of a size, so that the AUC of one value has the baseline 1/2, and its accuracy that
of the more likely answer. Logistic regressions fitted on simulated releases (`attacks.simulated`) answer it.

Arrays only: no files, no text; what a value means is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from attacks.adversary import NotEnough
from attacks.membership import Target, Vectors, check_rows, check_vectors
from attacks.simulated import Ids, Simulator, buckets, split
from securefl.errors import SecureflError

GROUPS = 4096
# Values in fewer auxiliary rows than this have too few simulated groups that differ in them.
LEAST_ROWS = 16
MOST_VALUES = 32
# Inverse L2 penalties on axes of equal mean variance.
_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class Attributes:
    """Answers for q centroids and the K values that could be asked about.

    values: (K,), bases: (K,) their share of auxiliary rows. chances: (q, K) log-odds that the share in the
    group is above the base; priors: (q, K) the same from the released size alone. unasked: other values of
    the auxiliary rows, too rare to learn. Of two values in all only the rarer is asked: the other one's
    answers are the same turned round.
    """

    values: Ids
    bases: Vectors
    chances: Vectors
    priors: Vectors
    unasked: Ids

    def truth(self, groups: Sequence[Ids]) -> NDArray[np.bool_]:
        """(q, K) the right answers for the attribute values of each group's rows; values unseen in auxiliary
        text count as rows that have none of `values`. Raises SecureflError for a group without rows."""
        if not all(len(group) for group in groups):
            raise SecureflError("a centroid has no row whose attribute is known, so there is no truth")
        shares = [[float((group == value).mean()) for value in self.values] for group in groups]
        return np.asarray(np.array(shares).reshape(-1, len(self.values)) > self.bases, np.bool_)

    def sides(self, truth: NDArray[np.bool_], value: int) -> tuple[Vectors, Vectors]:
        """Scores of the centroids whose answer is yes, and no, for `bounds.auc` and `bounds.auc_interval`.

        Every centroid is in it once. Either may be empty: then this value has no AUC on these centroids.
        """
        column = int(np.flatnonzero(self.values == value)[0])
        scores, right = self.chances[:, column], truth[:, column]
        return scores[right], scores[~right]

    def accuracy(self, truth: NDArray[np.bool_]) -> tuple[float, float]:
        """Share of right yes-or-no answers over all pairs: with the centroids, and by the likelier answer."""
        return float(((self.chances > 0) == truth).mean()), float(((self.priors > 0) == truth).mean())


def read(
    target: Target,
    auxiliary: NDArray[np.floating],
    attribute: Ids,
    rng: np.random.Generator,
    *,
    cells: Ids | None = None,
    groups: int = GROUPS,
) -> Attributes:
    """Answer the game for q centroids and each value with at least LEAST_ROWS auxiliary rows, 32 at most.

    auxiliary: (m, d) unclipped vectors of rows that are nobody's; attribute: (m,) their values. cells: see
    `Simulator`. groups: simulated ones for the fit, an eighth as many more choose the penalty.
    Memory: groups x d numbers, beside blocks of 64 MB. Raises NotEnough for too few auxiliary rows and for an
    attribute of one value, SecureflError for NaN, infinity and constant vectors.
    """
    check_rows(auxiliary, "the auxiliary text")
    centroids = check_vectors(target.centroids, "the released centroids")
    if len(attribute) != len(auxiliary):
        raise SecureflError(
            f"{len(auxiliary)} auxiliary vectors for {len(attribute)} values of the attribute"
        )
    parts = split(len(auxiliary), float(target.sizes.max(initial=1.0)), rng)
    every, counts = np.unique(attribute, return_counts=True)
    if len(every) < 2:
        raise NotEnough("all auxiliary rows have one value of the attribute, so there is nothing to tell")
    frequent = np.argsort(-counts, kind="stable")[:MOST_VALUES]
    asked = np.sort(frequent[counts[frequent] >= LEAST_ROWS])
    if len(every) == 2:
        asked = asked[asked == counts.argmin()]
    if not len(asked):
        raise NotEnough(f"no value of the attribute to ask about is in {LEAST_ROWS} auxiliary rows")
    values, bases = every[asked].astype(np.int64), counts[asked] / len(auxiliary)
    has = sparse.csr_array((attribute[:, None] == values[None]).astype(np.float32))
    shape = (len(centroids), len(values))
    chances, priors = np.zeros(shape), np.zeros(shape)
    simulator = Simulator(auxiliary, target.claim, cells)
    for bucket in buckets(target.sizes):
        sizes = target.sizes[bucket]
        first, held = (
            _simulate(simulator, part, sizes, number, has, bases, rng)
            for part, number in zip(parts, (groups, max(2, groups // 8)), strict=True)
        )
        final = _simulate(simulator, np.concatenate(parts), sizes, groups, has, bases, rng)
        for column in range(len(values)):
            yes = float(final[1][:, column].mean())
            priors[bucket, column] = chances[bucket, column] = _log_odds(yes, groups)
            probe = _choose(first, held, column)
            if probe is not None and 0 < yes < 1:
                probe.fit(_scaled(final[0], final[0]), final[1][:, column])
                chances[bucket, column] = probe.decision_function(_scaled(centroids[bucket], final[0]))
    return Attributes(values, bases, chances, priors, np.setdiff1d(every, values).astype(np.int64))


def _log_odds(share: float, trials: int) -> float:
    kept = min(max(share, 0.5 / trials), 1 - 0.5 / trials)
    return float(np.log(kept / (1 - kept)))


def _simulate(
    simulator: Simulator,
    rows: Ids,
    sizes: Vectors,
    groups: int,
    has: sparse.csr_array,
    bases: Vectors,
    rng: np.random.Generator,
) -> tuple[Vectors, NDArray[np.bool_]]:
    """Simulated centroids (g, d) and the game's answers (g, K)."""
    blocks, answers = [], []
    for centroids, whose in simulator.releases(rows, sizes, groups, rng):
        shares = (whose @ has).toarray() / np.asarray(whose.sum(axis=1)).reshape(-1, 1)
        blocks.append(centroids)
        answers.append(shares > bases)
    return np.concatenate(blocks), np.concatenate(answers)


def _scaled(centroids: Vectors, fitted: Vectors) -> Vectors:
    """Around the mean of the fitted ones and in units of their spread: one scale, so that axes that hardly
    vary stay small and the penalty keeps their noise out."""
    return np.asarray((centroids - fitted.mean(0)) / max(1e-12, float(fitted.std(0).mean())), np.float64)


def _choose(
    first: tuple[Vectors, NDArray[np.bool_]], held: tuple[Vectors, NDArray[np.bool_]], column: int
) -> LogisticRegression | None:
    """The probe with the penalty that has the least log loss on held-out groups; None where one answer is
    missing among either's."""
    (x, y), (more, answers) = first, held
    y, answers = y[:, column], answers[:, column]
    if y.all() or not y.any() or answers.all() or not answers.any():
        return None
    x, more = _scaled(x, x), _scaled(more, x)
    losses, probes = [], []
    for strength in _STRENGTHS:
        probe = LogisticRegression(C=strength, solver="newton-cholesky", max_iter=100)
        probes.append(probe.fit(x, y))
        losses.append(log_loss(answers, probe.predict_proba(more)[:, 1]))
    return probes[int(np.argmin(losses))]
