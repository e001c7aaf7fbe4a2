"""Attack 1: is a given text among the rows behind a pooled centroid?

The adversary has the encoder and so the text's vector x. With n rows in a cluster whose rows have mean mu and
covariance Sigma, the centroid c is about N(mu + (x - mu)/n, Sigma (n-1)/n^2 + noise) if x is one of them and
N(mu, Sigma/n + noise) if not; the score is the logarithm of the ratio of the two densities. mu and Sigma come
from auxiliary text, and the noise from the claim, so the attack is fitted on what was really released.
Pure functions on arrays; the auxiliary vectors are read in chunks and may be a memory map. Nothing here reads
files or text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from attacks.bounds import auc, auc_interval
from attacks.covariance import ledoit_wolf
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.release import Claim, GaussianSums

Vectors = NDArray[np.float64]

# Numbers of many vectors in work at once. The ratio has up to eight arrays of this many float64: 64 MiB.
CHUNK = 2**20
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


def chunks(vectors: NDArray[Any], numbers: int = CHUNK, beside: int = 1) -> Iterator[tuple[slice, Vectors]]:
    """Rows in float64, so many at a time that they, and `beside` numbers for each, are about `numbers`."""
    rows = max(1, numbers // max(1, beside, math.prod(vectors.shape[1:])))
    for start in range(0, len(vectors), rows):
        part = slice(start, min(start + rows, len(vectors)))
        yield part, np.asarray(vectors[part], np.float64)


def check_rows(vectors: NDArray[Any], what: str, chunk: int = CHUNK) -> None:
    """Raises SecureflError where vectors are not finite, or all the same; reads them in chunks.

    Either is a broken encoder, and an attack on it would score chance and look like safety.
    """
    low, high = np.full(vectors.shape[1:], np.inf), np.full(vectors.shape[1:], -np.inf)
    for _, rows in chunks(vectors, chunk):
        smallest, largest = rows.min(0), rows.max(0)
        if not (np.isfinite(smallest).all() and np.isfinite(largest).all()):
            raise SecureflError(
                f"the vectors of {what} hold NaN or infinity, so the audit would mean nothing"
            )
        low, high = np.minimum(low, smallest), np.maximum(high, largest)
    if len(vectors) > 1 and float((high - low).max(initial=0)) < 1e-9:
        raise SecureflError(f"the vectors of {what} are all the same, so the audit would mean nothing")


def check_vectors(vectors: NDArray[Any], what: str) -> Vectors:
    """The vectors as float64, once `check_rows` has found nothing."""
    rows = np.asarray(vectors, np.float64)
    check_rows(rows, what)
    return rows


def clipped(vectors: Vectors, claim: Claim) -> Vectors:
    """Candidates as the mechanism would have added them; there may be none."""
    if not isinstance(claim, GaussianSums) or not len(vectors):
        return vectors
    return clip_rows(vectors, claim.clip)


def _squared_distances(a: Vectors, b: Vectors) -> Vectors:
    gaps = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.asarray(np.maximum(gaps, 0), np.float64)


def _anchors(target: Target) -> Vectors:
    """(s, d) the points, of which a row belongs to the nearest: public seeds, or else the centroids."""
    return target.centroids if target.seeds is None else target.seeds


def _nearest(vectors: Vectors, anchors: Vectors) -> NDArray[np.int64]:
    return np.asarray(_squared_distances(vectors, anchors).argmin(1), np.int64)


def _sums(auxiliary: NDArray[Any], anchors: Vectors, claim: Claim, chunk: int) -> tuple[Vectors, Vectors]:
    """(s, d) sums of the clipped auxiliary rows nearest to each anchor, and how many they are (s,)."""
    sums, counts = np.zeros(anchors.shape), np.zeros(len(anchors))
    for _, rows in chunks(auxiliary, chunk, len(anchors)):
        near = _nearest(rows, anchors)
        picked = csr_array((np.ones(len(rows)), (near, np.arange(len(rows)))), (len(anchors), len(rows)))
        sums += np.asarray(picked @ clipped(rows, claim), np.float64)
        counts += np.bincount(near, minlength=len(anchors))
    return sums, counts


def released_by(target: Target, auxiliary: NDArray[Any], chunk: int = CHUNK) -> NDArray[np.int64]:
    """(s,) the centroid of each public seed, -1 where it was withheld; without seeds each centroid's number.

    Which seeds were released is not said when some were withheld, so seeds and centroids are matched by the
    distance of each seed's auxiliary mean.
    """
    anchors = _anchors(target)
    if len(target.centroids) == len(anchors):
        return np.arange(len(anchors))
    sums, counts = _sums(auxiliary, anchors, target.claim, chunk)
    means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], anchors)
    released = np.full(len(anchors), -1, np.int64)
    seeds, centroids = linear_sum_assignment(_squared_distances(means, target.centroids))
    released[seeds] = centroids
    return released


def assign(
    vectors: NDArray[Any],
    target: Target,
    auxiliary: NDArray[Any],
    chunk: int = CHUNK,
) -> NDArray[np.int64]:
    """(n,) the centroid each row would be behind; -1 where its seed's centroid was withheld.

    vectors: unclipped, as the mechanism assigns them. Without public seeds it is the nearest centroid. With
    them, a row belongs to its nearest seed, see `released_by`.
    """
    return _assign(vectors, target, released_by(target, auxiliary, chunk), chunk)


def _assign(
    vectors: NDArray[Any], target: Target, released: NDArray[np.int64], chunk: int
) -> NDArray[np.int64]:
    anchors, found = _anchors(target), np.empty(len(vectors), np.int64)
    for part, rows in chunks(vectors, chunk, len(anchors)):
        found[part] = released[_nearest(rows, anchors)]
    return found


def look(
    vectors: Vectors, target: Target, released: NDArray[np.int64], background: Background
) -> NDArray[np.int64]:
    """(n,) the centroid that each row is looked for in: of `assign`, or, where it may be behind any, the one
    with the largest ratio. released: of `released_by`."""
    if not target.anywhere:
        return _assign(vectors, target, released, CHUNK)
    rotated = clipped(vectors, target.claim) @ background.basis
    best, scores = np.zeros(len(vectors), np.int64), np.full(len(vectors), -np.inf)
    for cell in range(len(target.centroids)):
        found = _ratios(rotated, cell, target, background)
        better = found > scores
        best[better], scores[better] = cell, found[better]
    return best


def fit_background(auxiliary: NDArray[Any], target: Target, chunk: int = CHUNK) -> Background:
    """Means and covariance of the cells from auxiliary rows (m, d), not yet clipped, array or memory map.

    The covariance is that of all auxiliary rows (Ledoit and Wolf 2004): measured against the pooled
    covariance within cells it was never worse, since it has more rows and the ratio forgives a scale.
    chunk: numbers of the rows in work at once. Raises SecureflError where they are not finite, or constant.
    """
    check_rows(auxiliary, "the auxiliary text", chunk)
    # Groups of no known kind are taken for random ones, and all auxiliary text says what their mean is.
    anchors = np.zeros((1, auxiliary.shape[1])) if target.anywhere else _anchors(target)
    sums, counts = _sums(auxiliary, anchors, target.claim, chunk)
    overall = sums.sum(0) / len(auxiliary)
    own, support = np.zeros(target.centroids.shape), np.zeros(len(target.centroids))
    if not target.anywhere:
        released = released_by(target, auxiliary, chunk)
        own[released[released >= 0]] = sums[released >= 0]
        support[released[released >= 0]] = counts[released >= 0]
    prior = float(len(auxiliary)) if target.anywhere else _PRIOR_ROWS
    covariance, _ = ledoit_wolf(
        (clipped(rows, target.claim) for _, rows in chunks(auxiliary, chunk)), overall
    )
    variances, basis = np.linalg.eigh(covariance)
    floor = 1e-9 * float(variances.max())
    return Background(
        basis,
        np.maximum(variances, floor),
        (own + prior * overall) / (support + prior)[:, None],
        support + prior,
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
    rotated = clipped(candidates, target.claim) @ background.basis
    scores = np.empty(len(rotated))
    for cell in np.unique(cells).tolist():
        scores[cells == cell] = _ratios(rotated[cells == cell], cell, target, background)
    return scores


def _ratios(rotated: Vectors, cell: int, target: Target, background: Background) -> Vectors:
    """The ratio of clipped candidates along the background's basis (n, d), all against one cell."""
    mean, n = background.means[cell], max(1.0, float(target.sizes[cell]))
    gap = (target.centroids[cell] - mean) @ background.basis
    spread = _spread(background, target, cell)
    unsure = background.variances / background.support[cell]
    without = background.variances / n + unsure + spread
    # n = 1 without noise leaves no variance: the centroid is the row. A floor keeps the ratio finite.
    within = background.variances * (n - 1) / n**2 + unsure * ((n - 1) / n) ** 2 + spread
    within = np.maximum(within, 1e-9 * without)
    # The centroid's gap less what the row moves it by, (rotated - mean) / n, in standard deviations.
    off = (rotated - (mean @ background.basis + n * gap)) / (n * np.sqrt(within))
    fit = np.einsum("ij,ij->i", off, off) + np.log(within).sum()
    return np.asarray(-0.5 * fit + 0.5 * ((gap**2 / without).sum() + np.log(without).sum()), np.float64)


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
    auxiliary: NDArray[Any],
    members: NDArray[Any],
    controls: NDArray[Any],
    rng: np.random.Generator,
) -> Scores:
    """Score members (n1, d) and controls (n0, d) of one release; auxiliary (m, d) is disjoint from both.

    Every candidate is scored against the cell that the adversary would look in. `encoder_alone` is the AUC of
    the same score against invented centroids, drawn from the same background and noise without any row: what
    a model trained on the members gives away by itself, one half where it does not tell them apart.
    Candidates whose cell was withheld have no score, so either side may come back empty.
    """
    sides = [check_vectors(members, "the silo's rows"), check_vectors(controls, "the control rows")]
    check_vectors(target.centroids, "the released centroids")
    background = fit_background(auxiliary, target)
    released = released_by(target, auxiliary)
    cells = [look(side, target, released, background) for side in sides]
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
