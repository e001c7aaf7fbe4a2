"""Attack 4, the one-run audit: what a single run of a pipeline tells about canaries that coins put into it.

The auditor makes m canaries, tosses a fair coin for each, gives those that fell "in" to one run, scores all
of them from what the run released, and guesses the coins of the highest scores "in" and of the lowest "out".
Under differential privacy only so many guesses can be right, which turns their number into a lower bound on
epsilon (Steinke, Nasr and Jagielski 2023) and, against Gaussian DP, on mu (Mahloujifar, Melis and Chaudhuri
2024). Inclusion by a coin is the add/remove game; a claim about replacing a unit is compared by what the same
noise says of adding one (`bounds.claim_mu`), and the result names both.

The canaries here are orthogonal rows of the noisy sums; `attacks.text_canaries` sends texts through a whole
pipeline. Pure functions on counts, scores and arrays; no files, text or models.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import binom, norm

from attacks.bounds import ALPHA, claim_mu
from attacks.mechanism import Noising, released_sums, sums_alone
from attacks.membership import Vectors
from securefl.centroid_privacy import centroid_mu
from securefl.errors import SecureflError, UsageError
from securefl.privacy import Noise, gaussian_epsilon
from securefl.release import Adjacency, GaussianSums

MIN_CANARIES = 10
# The bound on mu takes 2 s with this many guesses, the bound on epsilon a tenth of that.
MAX_CANARIES = 100_000
# Rows of the canaries that fell in, and copies of them in the mechanism: 8 bytes x 2 in all.
_MAX_NUMBERS = 50_000_000
_MAX_DIMENSION = 1024

_CANARY_NORM = 10.0  # in clips, so that a missing clip shows
_KNOWN_ROWS = 3  # of every cluster, beside the canaries
_MAX_EPSILON = 50.0  # with an error of e^-50 every guess is right under the null as well
_PLANS = 40
_NEAR_BEST = 0.95
# Of fair coins so many more or fewer fall "in" with probability below 1e-9.
_UNFAIR = 6.2


@dataclass(frozen=True)
class OneRunAudit:
    """What one run shows.

    `right` of `guesses` about `canaries` coins were right. The two bounds hold at confidence 1 - alpha, each
    by itself: epsilon_lower_bound at `delta` for every mechanism, mu_lower_bound for what claims to be
    Gaussian-DP, and epsilon_lower_bound_gdp is the latter as an epsilon at `delta`. mu_ceiling is what
    mu_lower_bound would be had all guesses been right: a claim above it could not have been refuted.

    adjacency: of the game, always add/remove. claim_adjacency: of the claim; where it is another one,
    claim_mu is what the claim's noise says of the game's. claim_epsilon: claim_mu as an epsilon at `delta`.
    All three are None where nothing is claimed.
    """

    canaries: int
    guesses: int
    right: int
    epsilon_lower_bound: float
    mu_lower_bound: float
    epsilon_lower_bound_gdp: float
    mu_ceiling: float
    delta: float
    alpha: float
    adjacency: Adjacency
    claim_adjacency: Adjacency | None
    claim_mu: float | None
    claim_epsilon: float | None

    @property
    def violates_claim(self) -> bool:
        """Is the claim of Gaussian DP false? Said of a true one with probability at most alpha.

        By the bound on mu alone: to look at both bounds would be two tests at alpha.
        """
        return self.claim_mu is not None and self.mu_lower_bound > self.claim_mu


# --- the bounds


def check_counts(right: int, guesses: int, canaries: int, alpha: float) -> None:
    """Raises UsageError where an audit cannot have these, each with its range."""
    if not MIN_CANARIES <= canaries <= MAX_CANARIES:
        raise UsageError(
            f"a one-run audit takes {MIN_CANARIES} to {MAX_CANARIES:,} canaries, not {canaries:,}"
        )
    if not 1 <= guesses <= canaries:
        raise UsageError(
            f"about {canaries:,} canaries there can be 1 to {canaries:,} guesses, not {guesses:,}"
        )
    if not 0 <= right <= guesses:
        raise UsageError(f"of {guesses:,} guesses 0 to {guesses:,} can be right, not {right:,}")
    if not 0 < alpha < 1:
        raise UsageError(f"alpha must lie between 0 and 1, not be {alpha:g}")


def check_delta(delta: float) -> None:
    """Raises UsageError for a delta outside (0, 1)."""
    if not 0 < delta < 1:
        raise UsageError(f"delta must lie between 0 and 1, not be {delta:g}")


def _p_value(epsilon: float, right: int, guesses: int, canaries: int, delta: float) -> float:
    """Largest probability of so many right guesses under (epsilon, delta)-DP (Steinke et al., Theorem 5.2).

    Written in wrong guesses, Bin(guesses, 1 - q): at a large epsilon 1 - q keeps its digits and q does not.
    """
    error = 1 / (1 + math.exp(epsilon))
    wrong = guesses - right
    beta = float(binom.cdf(wrong, guesses, error))
    # The mean of the first i terms grows only while terms do, up to the mode. Past it by 40 deviations they
    # are nothing, so a longer list would change no maximum.
    spread = math.sqrt(guesses * error * (1 - error))
    last = min(right, max(1, math.ceil((guesses + 1) * error - wrong + 40 * spread + 40)))
    terms = np.arange(1, last + 1)
    below = np.cumsum(binom.pmf(wrong + terms, guesses, error))  # P[right > Bin(guesses, q) >= right - i]
    return min(1.0, beta + 2 * canaries * delta * float((below / terms).max()))


def epsilon_lower_bound_one_run(
    right: int, guesses: int, canaries: int, delta: float, alpha: float = ALPHA
) -> float:
    """Largest epsilon that an (epsilon, delta)-DP mechanism must have, at confidence 1 - alpha; at least 0.

    With q = 1/(1 + e^-epsilon), beta = P[Bin(guesses, q) >= right] and
    a = max_i P[right > Bin(guesses, q) >= right - i] / i, an epsilon is refuted where
    beta + 2 canaries delta a <= alpha (Steinke et al. 2023, Appendix D). The number of guesses must have
    been fixed without looking at the scores. Raises UsageError for counts that cannot be, and for alpha or
    delta outside (0, 1).
    """
    check_counts(right, guesses, canaries, alpha)
    check_delta(delta)
    if right == 0 or _p_value(0.0, right, guesses, canaries, delta) > alpha:
        return 0.0
    low, high = 0.0, _MAX_EPSILON
    while high - low > 1e-6:
        middle = (low + high) / 2
        if _p_value(middle, right, guesses, canaries, delta) <= alpha:
            low = middle
        else:
            high = middle
    return low


def _refuted(mus: Vectors, right: int, guesses: int, canaries: int, alpha: float) -> NDArray[np.bool_]:
    """Which mus (k,) make so many right guesses less probable than alpha; all of them in one pass."""
    r = np.full(len(mus), alpha * right / canaries)
    h = np.full(len(mus), alpha * (guesses - right) / canaries)
    for i in range(right - 1, -1, -1):
        raised = np.maximum(h, ndtr(ndtri(r) - mus))
        r = np.minimum(1.0, r + i / (guesses - i) * (raised - h))
        h = raised
    return np.asarray(r + h > guesses / canaries)


def gaussian_mu_lower_bound_one_run(right: int, guesses: int, canaries: int, alpha: float = ALPHA) -> float:
    """Largest mu that a mu-Gaussian-DP mechanism must have, at confidence 1 - alpha; at least 0.

    The recursion of Mahloujifar, Melis and Chaudhuri 2024 (Algorithm 3, two possible inputs for a canary) for
    f(x) = Phi(PhiInv(1 - x) - mu). A smaller mu lets h grow faster, so what is refuted is an interval from 0,
    and it is searched on ever finer grids; what is returned is refuted itself. Raises UsageError as
    `epsilon_lower_bound_one_run`.
    """
    check_counts(right, guesses, canaries, alpha)
    # At 40 the null hypothesis explains every number of right guesses: h does not grow in float64.
    low, high = 0.0, 10.0
    if _refuted(np.array([high]), right, guesses, canaries, alpha)[0]:
        low, high = high, 40.0
    for _ in range(3):
        grid = np.linspace(low, high, 49)
        refuted = int(_refuted(grid, right, guesses, canaries, alpha).sum())
        if refuted == 0:
            return 0.0
        low, high = float(grid[refuted - 1]), float(grid[min(refuted, len(grid) - 1)])
    return low


def planned_guesses(canaries: int, mu: float, delta: float, alpha: float = ALPHA) -> int:
    """How many coins to guess, planned before anything is released; an even number.

    If scores are N(0, 1) out and N(mu, 1) in, the k highest and the k lowest are right with probability
    P(t - mu) / (P(t) + P(t - mu)), P the upper tail and t such that a share k / canaries of the mixture is
    above it. The plan is the largest k whose expected right guesses give at least 95 % of the best bound on
    epsilon, since of equally good plans the one with more guesses can show more of a false claim; and it is
    at least so large that all right guesses would show 1.1 mu, where any is: with fewer the audit could find
    no fault at all.

    mu: as claimed, positive. Raises UsageError as `epsilon_lower_bound_one_run`.
    """
    check_counts(0, 1, canaries, alpha)
    check_delta(delta)
    if not 0 < mu < math.inf:
        raise UsageError(f"guesses are planned for a positive mu, not {mu:g}")
    sides = np.unique(np.geomspace(5, canaries // 2, _PLANS).round().astype(int)).tolist()
    goal = np.array([1.1 * mu])
    first = bisect_left(sides, True, key=lambda k: bool(_refuted(goal, 2 * k, 2 * k, canaries, alpha)[0]))
    sides = sides[min(first, len(sides) - 1) :]
    expected = []
    for k in sides:
        share = k / canaries

        def excess(t: float, share: float = share) -> float:
            return float(norm.sf(t) + norm.sf(t - mu)) / 2 - share

        t = float(brentq(excess, -10.0, mu + 10.0))
        right = math.floor(k * float(norm.sf(t - mu)) / share)
        expected.append(epsilon_lower_bound_one_run(min(right, 2 * k), 2 * k, canaries, delta, alpha))
    enough = _NEAR_BEST * max(expected)
    return int(2 * max(k for k, bound in zip(sides, expected, strict=True) if bound >= enough))


# --- the game


def fair_coins(canaries: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(canaries,) which of them are in."""
    return np.asarray(rng.random(canaries) < 0.5)


def audit_scores(
    scores: Vectors,
    included: NDArray[np.bool_],
    guesses: int,
    delta: float,
    *,
    claim: GaussianSums | None = None,
    sums_multiplier: float | None = None,
    alpha: float = ALPHA,
) -> OneRunAudit:
    """Guess the coins from scores and say what that proves.

    scores: (m,), larger meaning in. included: (m,) the coins, fair and independent of each other, of the
    order of the canaries and of `guesses`. The highest half of the guesses are "in", the lowest half "out",
    the rest abstain; equal scores are taken in the order of the canaries, which tells nothing of their coins.
    claim: of the whole release, or sums_multiplier: the noise multiplier of sums that alone were scored; with
    neither nothing is claimed.
    Raises SecureflError for scores that are not finite, UsageError for counts that cannot be and for coins
    that no fair coin throws.
    """
    m = len(scores)
    check_counts(0, guesses, m, alpha)
    check_delta(delta)
    if included.shape != (m,) or scores.shape != (m,) or included.dtype != np.bool_:
        raise UsageError("a one-run audit takes one score and one true or false coin for every canary")
    if not np.isfinite(scores).all():
        raise SecureflError("the canaries' scores hold NaN or infinity, so the audit would mean nothing")
    if abs(2 * int(included.sum()) - m) > _UNFAIR * math.sqrt(m):
        raise UsageError(f"{int(included.sum()):,} of {m:,} canaries are in: that is no fair coin's doing")
    order = np.argsort(scores, kind="stable")
    lowest = guesses // 2
    right = int((~included[order[:lowest]]).sum() + included[order[m - (guesses - lowest) :]].sum())
    mu_bound = gaussian_mu_lower_bound_one_run(right, guesses, m, alpha)
    adjacency, claimed = _claimed(claim, sums_multiplier)
    return OneRunAudit(
        canaries=m,
        guesses=guesses,
        right=right,
        epsilon_lower_bound=epsilon_lower_bound_one_run(right, guesses, m, delta, alpha),
        mu_lower_bound=mu_bound,
        epsilon_lower_bound_gdp=gaussian_epsilon(mu_bound, delta),
        mu_ceiling=gaussian_mu_lower_bound_one_run(guesses, guesses, m, alpha),
        delta=delta,
        alpha=alpha,
        adjacency="add-remove",
        claim_adjacency=adjacency,
        claim_mu=claimed,
        claim_epsilon=None if claimed is None else gaussian_epsilon(claimed, delta),
    )


def _claimed(
    claim: GaussianSums | None, sums_multiplier: float | None
) -> tuple[Adjacency | None, float | None]:
    """The claim's own adjacency, and its mu in the add/remove game."""
    if claim is not None:
        return claim.adjacency, claim_mu(claim, "add-remove")
    if sums_multiplier is not None:
        return "add-remove", centroid_mu(sums_multiplier, math.inf, math.inf, "add-remove")
    return None, None


# --- orthogonal canaries in the sums


def audit_sums(
    noise_multiplier: float,
    clip: float,
    delta: float,
    canaries: int,
    *,
    noise: Noise,
    rng: np.random.Generator,
    dimension: int = 384,
    guesses: int | None = None,
    alpha: float = ALPHA,
    noising: Noising = released_sums,
) -> OneRunAudit:
    """One release of noisy sums in which `canaries` orthogonal rows were put or not.

    Every cluster of three known rows has room for `dimension` canaries, 10 * clip times the columns of a
    random orthogonal matrix; with 3,840 of them in 10 clusters of 384 dimensions and noise that claims
    epsilon = 4 at delta = 1e-5 the median bound over 40 seeds is 1.8, and that by mu 2.6. A canary's score is
    its inner product with its cluster's sum, less the known rows, less what an earlier release of the known
    rows alone tells about the noise (nothing, where noise is drawn anew; its weight is fitted). The earlier
    release knows no coin and so costs nothing.

    The claim is that of the sums alone, mu = 1 / noise_multiplier. guesses: else `planned_guesses` of it.
    noise: of the mechanism. rng: of the auditor, for coins, rows and directions.
    Raises UsageError for parameters outside their ranges, SecureflError for sums that are not finite.
    """
    mechanism = sums_alone(noise_multiplier, clip, delta)
    check_counts(0, 1 if guesses is None else guesses, canaries, alpha)
    if not 2 <= dimension <= _MAX_DIMENSION or canaries * dimension > _MAX_NUMBERS:
        raise UsageError(
            f"the dimension must be 2 to {_MAX_DIMENSION}, and times the canaries at most {_MAX_NUMBERS:,}"
        )
    if guesses is None:
        guesses = planned_guesses(canaries, 1 / noise_multiplier, delta, alpha)
    clusters = math.ceil(canaries / dimension)
    included = fair_coins(canaries, rng)
    directions = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0].T
    known = rng.standard_normal((clusters * _KNOWN_ROWS, dimension))
    known *= clip / 2 / np.linalg.norm(known, axis=1, keepdims=True)
    cells = np.repeat(np.arange(clusters, dtype=np.int64), _KNOWN_ROWS)
    offset = known.reshape(clusters, _KNOWN_ROWS, dimension).sum(1)
    chosen = np.flatnonzero(included)
    rows = np.concatenate([known, directions[chosen % dimension] * (_CANARY_NORM * clip)])

    def surplus(rows: Vectors, cells: NDArray[np.int64]) -> Vectors:
        sums = noising(rows, cells, clusters, mechanism, noise)
        if not np.isfinite(sums).all():
            raise SecureflError("the mechanism released sums that are not finite; the audit cannot read them")
        return np.asarray(sums - offset, np.float64)

    earlier = surplus(known, cells)
    found = surplus(rows, np.concatenate([cells, (chosen // dimension).astype(np.int64)]))
    spread = float((earlier**2).sum())
    found = found - (float((found * earlier).sum()) / spread if spread > 0 else 0.0) * earlier
    scores = (found @ directions.T).reshape(-1)[:canaries] / clip
    return audit_scores(scores, included, guesses, delta, sums_multiplier=noise_multiplier, alpha=alpha)
