"""Attack 1: is a given text among the rows behind a pooled centroid?

The adversary has the encoder and so the text's vector x. With n rows in a cluster whose rows have mean mu and
covariance Sigma, the centroid c is about N(mu + (x - mu)/n, Sigma (n-1)/n^2 + noise) if x is one of them and
N(mu, Sigma/n + noise) if not; the score is the logarithm of the ratio of the two densities. mu and Sigma come
from auxiliary text, and the noise from the claim, so the attack is fitted on what was really released.
Pure functions on arrays; nothing here reads files or text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.covariance import LedoitWolf

from attacks.bounds import auc, auc_interval
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.release import Claim, GaussianSums

Vectors = NDArray[np.float64]

# A cell's mean is shrunk towards the mean of all auxiliary rows as if the latter were this many rows of the
# cell. On k-means clusters of news from 60 to 400 rows a silo, 10 to 100 differ by less than .002 in AUC;
# without it small cells lose up to .03.
_PRIOR_ROWS = 30.0
_ENCODER_DRAWS = 16


@dataclass(frozen=True)
class Target:
    """A pooled centroid release as the adversary sees it.

    centroids: (q, d). sizes: (q,), noisy under a claim and then the divisor that was really used; numbers of
    units, of which the attack takes a row for one: of a unit of m rows it weighs less, and is harder to find.
    seeds: (s, d) public points by which rows were assigned, or None where rows belong to the nearest
    centroid. anywhere: how the rows were grouped is not known, so a row may be behind any of the centroids.
    """

    centroids: Vectors
    sizes: Vectors
    claim: Claim
    seeds: Vectors | None = None
    anywhere: bool = False

    @property
    def noise(self) -> Vectors:
        """(q,) standard deviation of the noise on each number of a centroid."""
        if not isinstance(self.claim, GaussianSums):
            return np.zeros(len(self.sizes))
        return np.asarray(self.claim.clip * self.claim.noise_multiplier / self.sizes, np.float64)


@dataclass(frozen=True)
class Background:
    """What auxiliary text says of a release's cells, rotated so that the covariance is diagonal.

    basis: (d, d) orthonormal columns; variances: (d,) along them. means: (q, d) of each cell, `support`: (q,)
    how many rows each mean is worth. overall: (d,).
    """

    basis: Vectors
    variances: Vectors
    means: Vectors
    support: Vectors
    overall: Vectors


def check_vectors(vectors: NDArray[Any], what: str) -> Vectors:
    """The vectors as float64. Raises SecureflError where they are not finite, or all the same.

    Either is a broken encoder, and an attack on it would score chance and look like safety.
    """
    rows = np.asarray(vectors, np.float64)
    if not np.isfinite(rows).all():
        raise SecureflError(f"the vectors of {what} hold NaN or infinity, so the audit would mean nothing")
    if len(rows) > 1 and float(np.ptp(rows, axis=0).max()) < 1e-9:
        raise SecureflError(f"the vectors of {what} are all the same, so the audit would mean nothing")
    return rows


def clipped(vectors: Vectors, claim: Claim) -> Vectors:
    """Candidates as the mechanism would have added them; there may be none."""
    if not isinstance(claim, GaussianSums) or not len(vectors):
        return vectors
    return clip_rows(vectors, claim.clip)


def _squared_distances(a: Vectors, b: Vectors) -> Vectors:
    gaps = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.asarray(np.maximum(gaps, 0), np.float64)


def assign(vectors: Vectors, target: Target, auxiliary: Vectors) -> NDArray[np.int64]:
    """(n,) the centroid each row would be behind; -1 where its seed's centroid was withheld.

    vectors: unclipped, as the mechanism assigns them. Without public seeds it is the nearest centroid. With
    them, a row belongs to its nearest seed; which seeds were released is not said when some were withheld,
    so seeds and centroids are matched by the distance of each seed's auxiliary mean.
    """
    if target.seeds is None:
        return np.asarray(_squared_distances(vectors, target.centroids).argmin(1), np.int64)
    cells = _squared_distances(vectors, target.seeds).argmin(1)
    released = np.full(len(target.seeds), -1, np.int64)
    if len(target.centroids) == len(target.seeds):
        released = np.arange(len(target.seeds))
    else:
        near = _squared_distances(auxiliary, target.seeds).argmin(1)
        pooled = clipped(auxiliary, target.claim)
        means = np.stack(
            [
                pooled[near == s].mean(0) if (near == s).any() else target.seeds[s]
                for s in range(len(target.seeds))
            ]
        )
        seeds, centroids = linear_sum_assignment(_squared_distances(means, target.centroids))
        released[seeds] = centroids
    return np.asarray(released[cells], np.int64)


def look(vectors: Vectors, target: Target, auxiliary: Vectors, background: Background) -> NDArray[np.int64]:
    """(n,) the centroid that each row is looked for in: of `assign`, or, where it may be behind any, the one
    with the largest ratio."""
    if not target.anywhere:
        return assign(vectors, target, auxiliary)
    best, scores = np.zeros(len(vectors), np.int64), np.full(len(vectors), -np.inf)
    for cell in range(len(target.centroids)):
        found = likelihood_ratios(vectors, np.full(len(vectors), cell), target, background)
        better = found > scores
        best[better], scores[better] = cell, found[better]
    return best


def fit_background(auxiliary: Vectors, target: Target) -> Background:
    """Means and covariance of the cells from auxiliary rows (m, d), not yet clipped.

    The covariance is that of all auxiliary rows (Ledoit and Wolf 2004): measured against the pooled
    covariance within cells it was never worse, since it has more rows and the ratio forgives a scale.
    """
    rows = clipped(auxiliary, target.claim)
    # Groups of no known kind are taken for random ones, and all auxiliary text says what their mean is.
    cells = np.full(len(rows), -1) if target.anywhere else assign(auxiliary, target, auxiliary)
    prior = float(len(rows)) if target.anywhere else _PRIOR_ROWS
    overall = rows.mean(0)
    variances, basis = np.linalg.eigh(LedoitWolf().fit(rows).covariance_)
    means, support = [], []
    for cell in range(len(target.centroids)):
        own = rows[cells == cell]
        means.append((own.sum(0) + prior * overall) / (len(own) + prior))
        support.append(len(own) + prior)
    floor = 1e-9 * float(variances.max())
    return Background(
        basis,
        np.maximum(variances, floor),
        np.array(means).reshape(-1, rows.shape[1]),
        np.array(support),
        overall,
    )


def _spread(background: Background, target: Target, cell: int) -> Vectors:
    """(d,) variance that a centroid has beside that of its rows' mean: noise on sum and on count."""
    extra = np.full(len(background.variances), target.noise[cell] ** 2)
    if isinstance(target.claim, GaussianSums):
        # The noisy count divides, so the whole mean is off by count noise / n: its square, on the diagonal.
        along = background.means[cell] @ background.basis
        extra = extra + (along * target.claim.count_multiplier / target.sizes[cell]) ** 2
    return np.asarray(extra, np.float64)


def likelihood_ratios(
    candidates: Vectors, cells: NDArray[np.int64], target: Target, background: Background
) -> Vectors:
    """(n,) log-likelihood ratio of "is one of the rows" against "is not", each against its own cell.

    candidates: (n, d) unclipped; cells: (n,) from `assign`, none of them -1. The uncertainty of a cell's
    mean, Sigma / support, is part of both variances.
    """
    rows = clipped(candidates, target.claim)
    scores = np.empty(len(rows))
    for cell in np.unique(cells):
        mean, n = background.means[cell], max(1.0, float(target.sizes[cell]))
        gap = (target.centroids[cell] - mean) @ background.basis
        moved = (rows[cells == cell] - mean) @ background.basis / n
        spread = _spread(background, target, int(cell))
        unsure = background.variances / background.support[cell]
        without = background.variances / n + unsure + spread
        # n = 1 without noise leaves no variance: the centroid is the row. A floor keeps the ratio finite.
        within = background.variances * (n - 1) / n**2 + unsure * ((n - 1) / n) ** 2 + spread
        within = np.maximum(within, 1e-9 * without)
        fit = ((gap - moved) ** 2 / within).sum(1) + np.log(within).sum()
        scores[cells == cell] = -0.5 * fit + 0.5 * ((gap**2 / without).sum() + np.log(without).sum())
    return scores


def dot_products(
    candidates: Vectors, cells: NDArray[np.int64], target: Target, background: Background
) -> Vectors:
    """(n,) inner product of candidate and centroid around the cell's mean: an attack without a covariance."""
    rows = clipped(candidates, target.claim)
    means = background.means[cells]
    return np.asarray(((rows - means) * (target.centroids[cells] - means)).sum(1), np.float64)


@dataclass(frozen=True)
class Scores:
    """Scores of members and non-members, larger meaning member. encoder_alone: an AUC with its
    95 % interval, see `attack`."""

    ratio: tuple[Vectors, Vectors]
    dot: tuple[Vectors, Vectors]
    encoder_alone: tuple[float, float, float]


def attack(
    target: Target,
    auxiliary: Vectors,
    members: Vectors,
    controls: Vectors,
    rng: np.random.Generator,
) -> Scores:
    """Score members (n1, d) and controls (n0, d) of one release; auxiliary (m, d) is disjoint from both.

    Every candidate is scored against the cell that the adversary would look in. `encoder_alone` is the AUC of
    the same score against invented centroids, drawn from the same background and noise without any row: what
    a model trained on the members gives away by itself, one half where it does not tell them apart.
    Candidates whose cell was withheld have no score, so either side may come back empty.
    """
    auxiliary = check_vectors(auxiliary, "the auxiliary text")
    sides = [check_vectors(members, "the silo's rows"), check_vectors(controls, "the control rows")]
    check_vectors(target.centroids, "the released centroids")
    background = fit_background(auxiliary, target)
    cells = [look(side, target, auxiliary, background) for side in sides]
    sides = [side[cell >= 0] for side, cell in zip(sides, cells, strict=True)]
    cells = [cell[cell >= 0] for cell in cells]

    def both(score: Any, aim: Target) -> tuple[Vectors, Vectors]:
        first, second = (score(side, cell, aim, background) for side, cell in zip(sides, cells, strict=True))
        return first, second

    invented = [(0.5, 0.0, 1.0)]
    if all(len(side) > 1 for side in sides):
        drawn = [both(likelihood_ratios, invent(target, background, rng)) for _ in range(_ENCODER_DRAWS)]
        invented = [(auc(*pair), *auc_interval(*pair)) for pair in drawn]
    value, low, high = np.mean(invented, axis=0).tolist()
    return Scores(both(likelihood_ratios, target), both(dot_products, target), (value, low, high))


def invent(target: Target, background: Background, rng: np.random.Generator) -> Target:
    """A release with the same sizes and noise, made of the background alone."""
    centroids = []
    for cell in range(len(target.centroids)):
        n = max(1.0, float(target.sizes[cell]))
        spread = background.variances * (1 / n + 1 / background.support[cell]) + _spread(
            background, target, cell
        )
        noise = background.basis @ (rng.standard_normal(len(spread)) * np.sqrt(spread))
        centroids.append(background.means[cell] + noise)
    return replace(target, centroids=np.array(centroids))


def match_labels(
    members: NDArray[np.int64], pool: NDArray[np.int64], rng: np.random.Generator, most: int
) -> NDArray[np.int64]:
    """Indices into `pool` of as many rows as possible, up to `most`, with the label proportions of `members`.

    So a skew of labels is not counted as leakage. Labels of less than 5 % of the members may fall short.
    """
    labels, counts = np.unique(members, return_counts=True)
    shares = counts / counts.sum()
    rooms = np.array([(pool == label).sum() for label in labels])
    weighty = shares >= 0.05
    size = min(float(most), float((rooms[weighty] / shares[weighty]).min())) if weighty.any() else 0.0
    chosen = [
        rng.permutation(np.flatnonzero(pool == label))[: min(int(room), round(share * size))]
        for label, share, room in zip(labels, shares, rooms, strict=True)
    ]
    return np.sort(np.concatenate(chosen)).astype(np.int64) if chosen else np.zeros(0, np.int64)
