"""What a figure proves: exact intervals, lower bounds on epsilon, and the caps a claim implies.

Pure mathematics on counts, scores and arrays; no files, models or text. Adjacency matters here. A claim is
add/remove (a unit is there or not) or replace-one (it, or another one, is there), and so is a game: a
membership game in which the number of rows is known is replace-one. `claim_mu` converts before anything is
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta, norm
from scipy.stats import t as student

from securefl.centroid_privacy import centroid_mu
from securefl.privacy import gaussian_delta, gaussian_epsilon
from securefl.release import Adjacency, GaussianSums

ALPHA = 0.05
_FEW_UNITS = 8


def upper_bound(successes: int, trials: int, alpha: float) -> float:
    """One-sided Clopper-Pearson upper bound of a probability at confidence 1 - alpha; 1 without trials."""
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    if successes == trials:
        return 1.0
    return float(beta.ppf(1 - alpha, successes + 1, trials - successes))


def lower_bound(successes: int, trials: int, alpha: float) -> float:
    """One-sided Clopper-Pearson lower bound of a probability at confidence 1 - alpha; 0 without trials."""
    return 1.0 - upper_bound(trials - successes, trials, alpha)


@dataclass(frozen=True)
class Confusion:
    """Errors of a membership guess: `fp` of `n0` non-members called members, `fn` of `n1` members missed."""

    fp: int
    n0: int
    fn: int
    n1: int

    def rates(self, alpha: float) -> tuple[float, float]:
        """Upper bounds (FPR+, FNR+) that hold together at confidence 1 - alpha."""
        return upper_bound(self.fp, self.n0, alpha / 2), upper_bound(self.fn, self.n1, alpha / 2)


def _log_ratio(power: float, error: float) -> float:
    return math.log(power / error) if power > 0 and error > 0 else 0.0


def epsilon_lower_bound(errors: Confusion, delta: float = 0.0, alpha: float = ALPHA) -> float:
    """Largest epsilon that an (epsilon, delta)-DP mechanism must have, at confidence 1 - alpha; at least 0.

    max{0, ln((1 - FNR+ - delta) / FPR+), ln((1 - FPR+ - delta) / FNR+)} (Kairouz, Oh and Viswanath 2015;
    Nasr et al. 2021). Valid for a threshold chosen without looking at these counts.
    """
    fpr, fnr = errors.rates(alpha)
    return max(0.0, _log_ratio(1 - fnr - delta, fpr), _log_ratio(1 - fpr - delta, fnr))


def gaussian_mu_lower_bound(errors: Confusion, alpha: float = ALPHA) -> float:
    """The same as a Gaussian-DP parameter: PhiInv(1 - FPR+) - PhiInv(FNR+), at least 0, never its size.

    Valid against Gaussian mechanisms only (Nasr et al. 2023).
    """
    fpr, fnr = errors.rates(alpha)
    if fpr >= 1 or fnr >= 1:
        return 0.0
    return max(0.0, float(norm.ppf(1 - fpr) - norm.ppf(fnr)))


def gaussian_epsilon_lower_bound(errors: Confusion, delta: float, alpha: float = ALPHA) -> float:
    """`gaussian_mu_lower_bound` as an epsilon at `delta`; 0 where nothing is shown."""
    mu = gaussian_mu_lower_bound(errors, alpha)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def best_threshold(
    members: NDArray[np.float64], others: NDArray[np.float64], bound: Callable[[Confusion], float]
) -> float:
    """The threshold ("member" above it) with the largest `bound` on these scores, for use on *others*."""
    grid = np.unique(np.concatenate([members, others]))
    if len(grid) > 512:
        grid = np.quantile(grid, np.linspace(0, 1, 512), method="nearest")
    missed = np.searchsorted(np.sort(members), grid, "right")
    passed = len(others) - np.searchsorted(np.sort(others), grid, "right")
    bounds = [
        bound(Confusion(int(fp), len(others), int(fn), len(members)))
        for fp, fn in zip(passed, missed, strict=True)
    ]
    return float(grid[int(np.argmax(bounds))])


def confusion(members: NDArray[np.float64], others: NDArray[np.float64], threshold: float) -> Confusion:
    """Errors of calling "member" what scores above `threshold`. members: (n1,), others: (n0,)."""
    return Confusion(
        int((others > threshold).sum()), len(others), int((members <= threshold).sum()), len(members)
    )


def held_out_errors(
    members: NDArray[np.float64],
    others: NDArray[np.float64],
    rng: np.random.Generator,
    bound: Callable[[Confusion], float],
) -> Confusion:
    """Split both sides at random, choose the threshold by `bound` on one half, count errors on the other."""
    first, second = (rng.permutation(side) for side in (members, others))
    half1, half0 = len(first) // 2, len(second) // 2
    threshold = best_threshold(first[:half1], second[:half0], bound)
    return confusion(first[half1:], second[half0:], threshold)


def claim_mu(claim: GaussianSums, adjacency: Adjacency) -> float:
    """Gaussian-DP parameter of a claimed release in a game of this adjacency, whichever one the claim names.

    The multipliers say the same of the mechanism under both, so one formula converts either claim exactly
    (`securefl.centroid_privacy.centroid_mu`). It is that of the claim's unit, and so bounds a game about a
    single row of a unit too.
    """
    multipliers = claim.noise_multiplier, claim.count_multiplier, claim.prediction_multiplier
    return centroid_mu(*multipliers, adjacency)


def replace_one_mu(claim: GaussianSums) -> float:
    """Gaussian-DP parameter of a claimed release when one unit is replaced by another one."""
    return claim_mu(claim, "replace-one")


def auc_cap(mu: float) -> float:
    """Largest AUC of a test against a mu-Gaussian-DP mechanism: Phi(mu / sqrt 2)."""
    return float(norm.cdf(mu / math.sqrt(2)))


def mu_of_auc(auc: float) -> float:
    """Inverse of `auc_cap`; 0 below one half."""
    return max(0.0, math.sqrt(2) * float(norm.ppf(min(auc, 1 - 1e-12))))


def tpr_cap(mu: float, fpr: float) -> float:
    """Largest true-positive rate at false-positive rate `fpr`: Phi(PhiInv(fpr) + mu)."""
    return float(norm.cdf(norm.ppf(fpr) + mu))


def auc(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Probability that a member scores above a non-member, ties counted half."""
    return float(_placements(members, others).mean())


def _placements(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each of `a`, the share of `b` below it, ties counted half."""
    ordered = np.sort(b)
    below, upto = np.searchsorted(ordered, a, "left"), np.searchsorted(ordered, a, "right")
    return np.asarray((below + upto) / (2 * len(b)), np.float64)


def auc_interval(
    members: NDArray[np.float64], others: NDArray[np.float64], alpha: float = ALPHA
) -> tuple[float, float]:
    """Two-sided interval of the AUC at confidence 1 - alpha.

    DeLong, DeLong and Clarke-Pearson 1988 on the logit scale. Where all scores are separated its variance is
    0 and proves nothing, so the bound there is Clopper-Pearson's over min(n1, n0) disjoint pairs, which also
    limits how narrow the other intervals may be at the ends.
    """
    value, pairs = auc(members, others), min(len(members), len(others))
    if pairs < 2:
        return 0.0, 1.0
    if value in (0.0, 1.0):
        return lower_bound(round(value * pairs), pairs, alpha / 2), upper_bound(
            round(value * pairs), pairs, alpha / 2
        )
    spread = _placements(members, others).var(ddof=1) / len(members)
    spread += _placements(others, members).var(ddof=1) / len(others)
    reach = float(norm.ppf(1 - alpha / 2)) * math.sqrt(spread) / (value * (1 - value))
    centre = math.log(value / (1 - value))
    return 1 / (1 + math.exp(reach - centre)), 1 / (1 + math.exp(-reach - centre))


@dataclass(frozen=True)
class RateAtFpr:
    """True-positive rate at a false-positive rate. `resolved`: there are enough non-members to see it."""

    value: float
    low: float
    high: float
    resolved: bool


def tpr_at(
    members: NDArray[np.float64], others: NDArray[np.float64], fpr: float = 0.01, alpha: float = ALPHA
) -> RateAtFpr:
    """TPR at `fpr` with an interval that also carries the uncertainty of the threshold.

    The threshold is the j-th largest non-member score, whose expected FPR is j / (n0 + 1); where even j = 1
    is above `fpr`, an attacker reaches `fpr` by believing a positive with probability fpr (n0 + 1) only, so
    the rate is scaled by that. Without information the expected value is `fpr` for every n0. The lower end
    scales the Clopper-Pearson bound of the TPR by fpr / FPR+ in the same way; the upper end takes the
    threshold whose FPR is surely at least `fpr`. Each of the four bounds is at alpha / 4.
    """
    n0, n1 = len(others), len(members)
    ordered = np.sort(others)[::-1]
    j = max(1, math.floor(fpr * (n0 + 1)))
    above = int((members > ordered[j - 1]).sum())
    scale = min(1.0, fpr * (n0 + 1) / j)
    surely = upper_bound(int((others > ordered[j - 1]).sum()), n0, alpha / 4)
    low = lower_bound(above, n1, alpha / 4) * min(1.0, fpr / surely)
    high = 1.0
    for k in range(j, n0):
        if lower_bound(k, n0, alpha / 4) >= fpr:
            high = upper_bound(int((members >= ordered[k]).sum()), n1, alpha / 4)
            break
    value = above / n1 * scale
    return RateAtFpr(value, min(low, value), max(high, value), fpr * (n0 + 1) >= 1)


def ratio_interval(
    hits: NDArray[np.float64], totals: NDArray[np.float64], rng: np.random.Generator, alpha: float = ALPHA
) -> tuple[float, float]:
    """Percentile bootstrap of sum(hits) / sum(totals) over units. hits, totals: (n,), hits <= totals.

    Where every unit is all right or all wrong resampling shows no spread; the bound is then Clopper-Pearson's
    over the units. Of fewer than 8 units there are too few different samples, and the interval is Student's
    with the jackknife's standard error.
    """
    value, units = float(hits.sum() / totals.sum()), len(hits)
    if value in (0.0, 1.0):
        right = round(value * units)
        return lower_bound(right, units, alpha / 2), upper_bound(right, units, alpha / 2)
    if units == 1:
        return 0.0, 1.0
    if units < _FEW_UNITS:
        rest = (hits.sum() - hits) / np.maximum(totals.sum() - totals, 1e-12)
        error = math.sqrt((units - 1) / units * float(((rest - rest.mean()) ** 2).sum()))
        reach = float(student.ppf(1 - alpha / 2, units - 1)) * error
        return max(0.0, value - reach), min(1.0, value + reach)
    draw = rng.integers(0, units, (2000, units))
    sums = totals[draw].sum(1)
    rates = hits[draw].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(rates, (alpha / 2, 1 - alpha / 2))
    return min(float(low), value), max(float(high), value)


def gaussian_mu_at(epsilon: float, delta: float) -> float:
    """The mu at which delta(epsilon) equals `delta` (solves Dong, Roth and Su's Corollary 2.13 for mu)."""
    return float(brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, 1e-6, 1e3))
