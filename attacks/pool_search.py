"""Attack 8: which texts of a large pool are behind a pooled centroid?

Two searches by an outsider whose pool may hold the rows. `rank` scores every text of the pool by attack 1's
ratio, one by one. `decompose` looks for the rows together: weights w >= 0 over the pool, with sum n, whose
vectors add up to the released sum. As long as a cluster has fewer rows than the vector has numbers, the pool
is no larger than it needs to be and there is little noise, such weights are unique and *are* the rows. On
film reviews (384 numbers, pool of 3,000) it names all rows of random groups of 10 and of 50, where the
ranking has 84 % and 42 % among its first n, and all rows of every k-means cluster of up to 210.
Pure functions on arrays; the pool is read in chunks and may be a memory map; no files, no text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from attacks import membership
from attacks.adversary import NotEnough
from attacks.bounds import ALPHA, lower_bound, replace_one_mu, tpr_cap, upper_bound
from attacks.membership import CHUNK, Background, Target, Vectors, check_rows, check_vectors, chunks, clipped
from securefl.errors import SecureflError
from securefl.release import Claim, GaussianSums

Indices = NDArray[np.int64]

# Least squares starts from the best of the ranking, and from every scan takes in as many as may be wrong.
_START = 300
_ADDED = 200
_SCANS = 40
# How much the weights' sum counts beside a number of the centroid, where the size is exact.
_EXACT_SIZE = 10.0
_TOLERANCE = 1e-6
# Float32 leaves weights of exact centroids within 1e-4 of 0 and 1; other solutions are nowhere near.
_CERTAIN = 0.01


@dataclass(frozen=True)
class Ranking:
    """Of each row of the pool: the ratio (M,), minus infinity where its cell was withheld, and the cell (M,),
    then -1."""

    scores: Vectors
    cells: NDArray[np.int32]

    def order(self) -> Indices:
        """(M,) indices of the pool, the likeliest member first; ties in the pool's order."""
        return np.argsort(-self.scores, kind="stable").astype(np.int64)


def rank(
    pool: NDArray[Any], target: Target, background: Background, auxiliary: NDArray[Any], chunk: int = CHUNK
) -> Ranking:
    """Attack 1's ratio for every row of a pool (M, d), float32 or float64, array or memory map.

    background: of `membership.fit_background(auxiliary, target)`. auxiliary: (m, d), disjoint from the pool.
    chunk: numbers of the pool in work at once; about eight times as many float64 are held, and 12 bytes for
    each row of the pool. Identical rows of the pool tie: leave all but one out beforehand.
    Raises NotEnough for an empty pool, SecureflError where it is not finite, constant, or of another width.
    """
    if pool.ndim != 2 or pool.shape[1:] != target.centroids.shape[1:]:
        raise SecureflError("the pool's vectors have another width than the centroids; use their encoder")
    if not len(pool):
        raise NotEnough("the pool is empty")
    check_vectors(target.centroids, "the released centroids")
    check_rows(pool, "the pool", chunk)
    scores = np.full(len(pool), -np.inf)
    cells = np.full(len(pool), -1, np.int32)
    released = membership.released_by(target, auxiliary, chunk)
    for part, rows in chunks(pool, chunk, len(released)):
        own = membership.look(rows, target, released, background)
        here = own >= 0
        cells[part] = own
        scores[part][here] = membership.likelihood_ratios(rows[here], own[here], target, background)
    return Ranking(scores, cells)


@dataclass(frozen=True)
class Decomposition:
    """The rows of the pool that add up to a centroid.

    indices: (k,) into the pool, the largest weight first; weights: (k,) of 0 to about 1. residual: norm of
    what they leave of the released sum over the norm of that sum, all in the search's metric. certain: every
    weight is 1 and nothing is left, so that without noise these *are* the rows, whatever the truth file says.
    """

    indices: Indices
    weights: Vectors
    residual: float
    certain: bool


def decompose(
    pool: NDArray[Any],
    ranking: Ranking,
    target: Target,
    background: Background,
    cell: int,
    chunk: int = CHUNK,
) -> Decomposition:
    """The k rows, k being the size released, of the largest weight in the non-negative least squares.

    Minimises |P (S - sum_i w_i x_i)|^2 + (p (n - sum_i w_i))^2 over w >= 0 and all rows of the pool in the
    cell. P whitens by one row's covariance and the noise, p by the noise on the count. The pool never has to
    fit in memory: least squares over a few hundred rows (Lawson and Hanson 1974, scipy), a scan of the pool
    for rows whose weight would lower the error if it were above 0, and again until there is none; it is then
    the solution over the whole pool. Where noise makes weights tie at 0 the ranking decides.

    Up to how many rows the solution is unique depends on the pool (Donoho and Tanner 2005); `certain` says
    whether it was found. Raises NotEnough for a cell of fewer rows in the pool than in the cluster, and for
    clusters of more rows than a vector has numbers, since no solution found this way has more.
    """
    size = max(1, round(float(target.sizes[cell])))
    allowed = (ranking.cells == cell) | target.anywhere
    inside = np.flatnonzero(allowed)
    width = pool.shape[1]
    if len(inside) < size:
        raise NotEnough(f"the pool has {len(inside)} rows for a cluster of {size}")
    if size > width:
        raise NotEnough(f"{size} rows in vectors of {width} numbers have no unique decomposition")
    problem = _problem(target, background, cell)
    order = inside[np.argsort(-ranking.scores[inside], kind="stable")]
    work = np.sort(order[: max(_START, 2 * size)])
    for scan in range(_SCANS):
        weights, left = problem.solve(clipped(np.asarray(pool[work], np.float64), target.claim))
        new = _violations(pool, allowed, target, problem.gradient(left), work, chunk)
        if not len(new) or scan == _SCANS - 1:
            break
        # Rows of weight 0 may come back by a later scan; what is held stays a few hundred rows.
        work = np.sort(np.concatenate([work[weights > 0], new]))
    best = np.lexsort((-ranking.scores[work], -weights))[:size]
    chosen, rest = weights[best], np.delete(weights, best)
    residual = float(np.linalg.norm(left) / np.linalg.norm(problem.aim))
    certain = (
        not isinstance(target.claim, GaussianSums)
        and bool((np.abs(chosen - 1) < _CERTAIN).all() and (rest < _CERTAIN).all())
        and residual < _CERTAIN / size
    )
    return Decomposition(work[best].astype(np.int64), chosen, residual, certain)


@dataclass(frozen=True)
class _Problem:
    """scale: (d, d) whitening, so that |(S - sum of rows) @ scale| is minimised; even: weight of the weights'
    sum; aim: (d + 1,) the whitened S and n."""

    scale: Vectors
    even: float
    aim: Vectors

    def solve(self, rows: Vectors) -> tuple[Vectors, Vectors]:
        """Weights (n,) and what they leave of the aim (d + 1,)."""
        system = np.concatenate([rows @ self.scale, np.full((len(rows), 1), self.even)], axis=1).T
        try:
            weights, _ = nnls(system, self.aim, maxiter=50 * len(rows))
        except RuntimeError:
            raise SecureflError("the least squares over the pool did not converge") from None
        return weights, self.aim - system @ weights

    def gradient(self, left: Vectors) -> tuple[Vectors, float, float]:
        """(d,) and an offset: x @ gradient + offset is how fast the error falls with the weight of x; and
        above which a fall counts."""
        return self.scale @ left[:-1], self.even * float(left[-1]), _TOLERANCE * float(np.abs(self.aim).max())


def _problem(target: Target, background: Background, cell: int) -> _Problem:
    n = float(target.sizes[cell])
    noise = (n * float(target.noise[cell])) ** 2
    scale = background.basis / np.sqrt(background.variances + noise)
    even = _EXACT_SIZE
    if isinstance(target.claim, GaussianSums):
        even = 1 / target.claim.count_multiplier
    aim = np.append(n * target.centroids[cell] @ scale, even * n)
    return _Problem(np.asarray(scale, np.float64), even, aim)


def _violations(
    pool: NDArray[Any],
    allowed: NDArray[np.bool_],
    target: Target,
    slope: tuple[Vectors, float, float],
    work: Indices,
    chunk: int,
) -> Indices:
    """The rows outside `work` whose weight should not be 0: those that lower the error fastest."""
    direction, offset, least = slope
    best, falls = np.zeros(0, np.int64), np.zeros(0)
    for part, rows in chunks(pool, chunk):
        fall = clipped(rows, target.claim) @ direction + offset
        here = np.arange(part.start, part.stop)
        wanted = allowed[part] & (fall > least) & ~np.isin(here, work, assume_unique=True)
        best, falls = np.append(best, here[wanted]), np.append(falls, fall[wanted])
        first = np.argsort(-falls, kind="stable")[:_ADDED]
        best, falls = best[first], falls[first]
    return best


@dataclass(frozen=True)
class Retrieval:
    """How many of the `members` among `pool` rows are among the `k` that were chosen."""

    hits: int
    k: int
    members: int
    pool: int

    @property
    def recall(self) -> float:
        return self.hits / self.members

    @property
    def precision(self) -> float:
        return self.hits / self.k

    @property
    def recall_baseline(self) -> float:
        """Of a guess without information: k / pool."""
        return self.k / self.pool

    @property
    def precision_baseline(self) -> float:
        """Of a guess without information: members / pool."""
        return self.members / self.pool

    def recall_interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Clopper-Pearson at confidence 1 - alpha over the members."""
        return (
            lower_bound(self.hits, self.members, alpha / 2),
            upper_bound(self.hits, self.members, alpha / 2),
        )


def _checked(indices: NDArray[Any], pool: int, what: str) -> Indices:
    rows = np.asarray(indices, np.int64)
    if not len(rows):
        raise NotEnough(f"{what}: there is none in the pool")
    if rows.min() < 0 or rows.max() >= pool or len(np.unique(rows)) != len(rows):
        raise SecureflError(f"{what}: not distinct rows of the pool")
    return rows


def retrieve(order: Indices, members: NDArray[Any], k: int, pool: int) -> Retrieval:
    """Score the first k of `order` (indices into a pool of `pool` rows, as `Ranking.order` or
    `Decomposition.indices`) against the true members (n,).

    Raises NotEnough for k beyond `order`, or without members.
    """
    rows = _checked(members, pool, "the true members")
    if not 1 <= k <= len(order):
        raise NotEnough(f"the first {k} of {len(order)} candidates were asked for")
    return Retrieval(int(np.isin(order[:k], rows).sum()), k, len(rows), pool)


def retrieve_controls(order: Indices, members: NDArray[Any], controls: NDArray[Any], k: int) -> Retrieval:
    """The same for rows of the pool that were not in the data, in `Ranking.order` without the members.

    By chance k / (pool - members) of them are found; more means that the ranking prefers rows for other
    reasons than having been in the data.
    """
    own = _checked(members, len(order), "the true members")
    others = _checked(controls, len(order), "the control rows")
    if np.isin(others, own).any():
        raise SecureflError("the control rows: some were in the data")
    rest = order[~np.isin(order, own)]
    if not 1 <= k <= len(rest):
        raise NotEnough(f"the first {k} of {len(rest)} candidates were asked for")
    return Retrieval(int(np.isin(rest[:k], others).sum()), k, len(others), len(rest))


def recall_cap(claim: Claim, found: Retrieval, beside: float = 0.0) -> tuple[float | None, str | None]:
    """Largest expected recall at k under a claim, or None and the reason.

    The first k of the pool hold at most k of its pool - members other rows, so whatever chose them has a
    false-positive rate of at most k / (pool - members); the game is replace-one (`bounds.tpr_cap`, concave in
    that rate, so it holds for the mean over members too). beside: Gaussian-DP parameter of what else the
    adversary saw of the rows, as an encoder trained on them; it is composed with the claim's.
    """
    if not isinstance(claim, GaussianSums):
        return None, "no differential privacy is claimed, so nothing is bounded"
    others = found.pool - found.members
    if found.k >= others:
        return 1.0, None
    return tpr_cap(float(np.hypot(replace_one_mu(claim), beside)), found.k / others), None
