"""Sparse pursuit: which k atoms of a dictionary add up to a given vector, for several vectors at once.

Orthonormal axes in which the atoms' covariance is diagonal, a greedy start, then sweeps that re-choose every
atom (matching pursuit with replacement). Pure tensor mathematics: it knows nothing of models, tokens or runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SWEEPS = 3
# Passes for one vector: sums of more atoms take several atoms a pass.
_PASSES = 64
# Between two looks at the whole dictionary only the best few hundred atoms of each vector are scored: a whole
# pass reads tens of megabytes, and the next few picks are near the top of the last pass.
_ACTIVE = 256
_LOOKS = 10
# Sweeps re-choose one atom while all others are taken as right, up to this share of an atom's variance.
_SWEEP_ERROR = 0.05
# Partial choices kept for each sum of unequal weights.
BEAMS = 8


@dataclass(frozen=True)
class Problem:
    """K vectors over one dictionary of M atoms in d rotated dimensions.

    sums: (K, d), each the sum of `due` (K,) atoms and noise, around the atoms' mean. atoms: (M + 1, d) around
    that mean, the last one zero: a place without an atom. log_rates: (K, M + 1) log of how often each atom is
    expected in each sum; they count as far as noise, not other atoms, is what blurs a sum. variances: (d,) of
    a random atom. deviation: standard deviation of the noise. exact: residual norm of a certain solution.
    """

    sums: Tensor
    due: Tensor
    atoms: Tensor
    log_rates: Tensor
    variances: Tensor
    deviation: float
    exact: float

    @property
    def trust(self) -> Tensor:
        """(K, 1) weight of the rates: the noise's share of the unexplained variance while picking.

        The atoms still due are no noise: they will be explained. Counting them as such, at full weight, cost
        .08 of recall for sums of 64 exact atoms.
        """
        noise = self.deviation**2 * len(self.variances)
        others = (self.due.float() / 2).clamp(min=0.5)[:, None] * self.variances.sum()
        return noise / (noise + others)

    @property
    def blank(self) -> int:
        return len(self.atoms) - 1

    def rows(self, index: Tensor) -> Problem:
        """The same for some of the vectors."""
        return replace(self, sums=self.sums[index], due=self.due[index], log_rates=self.log_rates[index])


class _Search:
    """Scores atoms against residuals in one metric: the log-posterior gain of adding each.

    gain = r' P a - a' P a / 2 + trust log(rate / (1 + times picked)), the last term being the growth of a
    Poisson log-probability: without any evidence the picks are the most frequent atoms with multiplicity.
    """

    def __init__(self, problem: Problem, precision: Tensor) -> None:
        self.problem, self.precision = problem, precision
        half = 0.5 * precision @ (problem.atoms[:-1] ** 2).T
        self._atoms, self._offset = problem.atoms[:-1], problem.trust * problem.log_rates[:, :-1] - half
        self._whole = (self._atoms, self._offset)
        self._active: Tensor | None = None

    def _gain(self, residual: Tensor, penalty: Tensor) -> Tensor:
        gain = torch.addmm(self._offset, residual * self.precision, self._atoms.T)
        if self.problem.deviation == 0:
            return gain
        near = penalty[:, :-1] if self._active is None else penalty[:, self._active]
        return gain.sub_(self.problem.trust * near)

    def look(self, residual: Tensor, penalty: Tensor, keep: int) -> None:
        """Score the whole dictionary and keep the best `keep` of each vector for the coming picks."""
        self._active = None
        self._atoms, self._offset = self._whole
        if self.problem.blank > 2 * keep:
            near = self._gain(residual, penalty).topk(keep, dim=1).indices
            best = torch.zeros(self.problem.blank, dtype=torch.bool).index_fill_(0, near.flatten(), True)
            best = best.nonzero()[:, 0]
            self._active, self._atoms, self._offset = best, self._atoms[best], self._offset[:, best]

    def pick(self, residual: Tensor, penalty: Tensor, wanted: Tensor, width: int) -> Tensor:
        """(K, width) the best atoms, blank beyond the `wanted` (K,) ones. penalty: log(1 + times picked)."""
        found = min(width, len(self._atoms))
        best = self._gain(residual, penalty).topk(found, dim=1).indices
        best = best if self._active is None else self._active[best]
        best = torch.nn.functional.pad(best, (0, width - found), value=self.problem.blank)
        return torch.where(torch.arange(width)[None] < wanted[:, None], best, self.problem.blank)


def solve(problem: Problem) -> tuple[Tensor, Tensor]:
    """(K, k) indices of atoms, M for none, and the norm (K,) of what they leave.

    Greedy picks use the inverse covariance of half the atoms plus the noise: what is left unexplained while
    picking. Sweeps use that of the noise plus a small share of one atom, so without noise the data decide.
    """
    longest = int(problem.due.max())
    width = -(-longest // _PASSES)
    expected = (problem.due.float() / 2).clamp(min=0.5)[:, None] * problem.variances
    search = _Search(problem, 1 / (expected + problem.deviation**2))
    chosen = torch.full((len(problem.sums), longest), problem.blank)
    picked = torch.zeros(len(problem.sums), problem.blank + 1)
    penalty = torch.zeros_like(picked)
    residual = problem.sums.clone()
    places = range(0, longest, width)
    for step, first in enumerate(places):
        if step % max(1, len(places) // _LOOKS) == 0:
            search.look(residual, penalty, _ACTIVE)
        new = search.pick(residual, penalty, problem.due - first, min(width, longest - first))
        chosen[:, first : first + width] = new
        picked.scatter_add_(1, new, torch.ones(new.shape))
        penalty.scatter_(1, new, picked.gather(1, new).log1p_())
        residual = residual - problem.atoms[new].sum(1)
    open_ = (residual.norm(dim=1) > problem.exact).nonzero()[:, 0]
    if len(open_):
        chosen[open_], residual[open_] = _sweep(
            problem.rows(open_), chosen[open_], residual[open_], picked[open_], width
        )
    return chosen, residual.norm(dim=1)


def _sweep(
    problem: Problem, chosen: Tensor, residual: Tensor, picked: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Take atoms out and choose again, at most `SWEEPS` times; only a better posterior is kept."""
    precision = 1 / (_SWEEP_ERROR * problem.variances + problem.deviation**2).expand(len(chosen), -1)
    search = _Search(problem, precision)

    penalty = picked.log1p()

    def worth(left: Tensor, places: Tensor, penalty: Tensor) -> Tensor:
        prior = problem.log_rates.gather(1, places) - penalty.gather(1, places)
        prior = torch.where(places == problem.blank, 0.0, prior)
        return -0.5 * (left**2 * precision).sum(1) + problem.trust[:, 0] * prior.sum(1)

    def count(places: Tensor, sign: float) -> None:
        picked.scatter_add_(1, places, torch.full(places.shape, sign))
        penalty.scatter_(1, places, picked.gather(1, places).log1p_())

    places = range(0, chosen.shape[1], width)
    # Beyond one atom a pass the later sweeps were measured to change nothing but the time.
    for sweep in range(SWEEPS if width == 1 else 1):
        changed = False
        for step, first in enumerate(places):
            old = chosen[:, first : first + width].clone()
            count(old, -1.0)
            free = residual + problem.atoms[old].sum(1)
            # The first sweep looks at the whole dictionary now and then, the others always.
            if sweep or step % max(1, len(places) // _LOOKS) == 0:
                search.look(free, penalty, problem.blank if sweep else _ACTIVE)
            new = search.pick(free, penalty, problem.due - first, old.shape[1])
            tried = free - problem.atoms[new].sum(1)
            better = worth(tried, new, penalty) > worth(residual, old, penalty) + 1e-4
            changed |= bool(better.any())
            new = torch.where(better[:, None], new, old)
            residual = torch.where(better[:, None], tried, residual)
            chosen[:, first : first + width] = new
            count(new, 1.0)
        if (sweep and not changed) or bool((residual.norm(dim=1) <= problem.exact).all()):
            break
    return chosen, residual


def expect(sums: Tensor, due: Tensor, atoms: Tensor, rates: Tensor, deviation: float) -> list[Tensor]:
    """Of sums (K, d) of `due` (K,) atoms each the likeliest `due` indices, by an estimate of all counts.

    For sums of too many atoms, or of too much noise, to be told apart one by one. Counts are taken to have
    mean and variance lambda = due * rates (M,), as Poisson counts do; given the sum their mean is
    lambda + lambda a' C^-1 (sum - A' lambda), C = A' diag(lambda) A + deviation^2, a Wiener filter, and of
    every atom the j-th copy is as likely as a normal count of that mean and variance exceeds j - 1/2.
    """
    wide, share = atoms.double(), rates.double()
    square, mean = (wide * share[:, None]).T @ wide, share @ wide
    width = len(square)
    floor = max(deviation**2, 1e-6 * float(square.trace()) / width)
    out = []
    for total, k in zip(sums.double(), due.tolist(), strict=True):
        inverse = torch.linalg.inv(k * square + floor * torch.eye(width, dtype=torch.float64))
        turned, expected = wide @ inverse, k * share
        count = expected * (1 + turned @ (total - k * mean))
        spread = (expected * (1 - expected * (turned * wide).sum(1))).clamp(min=1e-12).sqrt()
        near = ((count - 0.5) / spread).topk(min(len(count), 4 * k)).indices
        copies = torch.arange(k, dtype=torch.float64) + 0.5
        likely = (count[near, None] - copies) / spread[near, None]
        best = likely.flatten().topk(min(k, likely.numel())).indices
        out.append(near[best // k])
    return out


@dataclass(frozen=True)
class WeightedProblem:
    """K vectors, each the sum of atoms with known weights, over one dictionary of M atoms in d dimensions.

    sums: (K, d). weights: (K, k), falling, 0 for a place without an atom. atoms: (M, d) around their mean.
    variances: (d,) of a random atom, along whose axes the vectors are given.
    """

    sums: Tensor
    weights: Tensor
    atoms: Tensor
    variances: Tensor


def solve_weighted(problem: WeightedProblem, beams: int = BEAMS) -> tuple[Tensor, Tensor]:
    """(K, k) indices of the atom of each weight, and the norm (K,) of what they leave.

    Largest weight first, `beams` partial choices of every vector kept, each pick in the metric of what the
    smaller weights are expected to add. Then sweeps over the best choices: an atom is chosen anew with all
    others taken as right, and two atoms trade weights where that leaves less.
    """
    count, places = problem.weights.shape
    variance = problem.variances[None]
    chosen = torch.zeros((count, 1, places), dtype=torch.int64)
    left = problem.sums[:, None]
    for place in range(places):
        weight = problem.weights[:, place]
        rest = (problem.weights[:, place + 1 :] ** 2).sum(1)
        # After the last pick nothing is left; a thousandth of an atom keeps the metric finite.
        precision = 1 / (variance * (rest + 1e-3 * problem.weights[:, :1].amax(1) ** 2)[:, None])
        gain = (left * (weight[:, None] * precision)[:, None]) @ problem.atoms.T
        gain -= 0.5 * (weight[:, None] ** 2 * (precision @ (problem.atoms**2).T))[:, None]
        near = gain.topk(min(beams, gain.shape[2]), dim=2).indices
        tried = left[:, :, None] - weight[:, None, None, None] * problem.atoms[near]
        cost = (tried**2 * precision[:, None, None]).sum(3).flatten(1)
        best = cost.topk(min(beams, cost.shape[1]), dim=1, largest=False).indices
        parent = best // near.shape[2]
        chosen = chosen.gather(1, parent[:, :, None].expand(-1, -1, places)).clone()
        chosen[:, :, place] = near.flatten(1).gather(1, best)
        left = tried.flatten(1, 2).gather(1, best[:, :, None].expand(-1, -1, left.shape[2]))
    return _trade(problem, chosen)


def _trade(problem: WeightedProblem, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep over (K, B, k) choices, and the best of each vector's with what it leaves."""
    count, beams, places = chosen.shape
    weights = problem.weights[:, None].expand(-1, beams, -1).flatten(0, 1)
    flat = chosen.flatten(0, 1)
    sums = problem.sums[:, None].expand(-1, beams, -1).flatten(0, 1)

    def leave(which: Tensor) -> Tensor:
        return sums - (weights[..., None] * problem.atoms[which]).sum(1)

    precision = 1 / problem.variances
    half = 0.5 * (problem.atoms**2) @ precision
    left = leave(flat)
    for _ in range(SWEEPS):
        before = flat.clone()
        for place in range(places):
            weight = weights[:, place : place + 1]
            free = left + weight * problem.atoms[flat[:, place]]
            new = (weight * ((free * precision) @ problem.atoms.T) - weight**2 * half).argmax(1)
            flat[:, place] = torch.where(weight[:, 0] > 0, new, flat[:, place])
            left = free - weight * problem.atoms[flat[:, place]]
        for first in range(places):
            for second in range(first + 1, places):
                both = problem.atoms[flat[:, second]] - problem.atoms[flat[:, first]]
                traded = left - (weights[:, first] - weights[:, second])[:, None] * both
                better = (traded**2 * precision).sum(1) < (left**2 * precision).sum(1)
                pair = flat[:, [second, first]]
                flat[:, [first, second]] = torch.where(better[:, None], pair, flat[:, [first, second]])
                left = torch.where(better[:, None], traded, left)
        if torch.equal(flat, before):
            break
    error = leave(flat).norm(dim=1).view(count, beams)
    best = error.argmin(1)
    return flat.view(count, beams, places)[torch.arange(count), best], error.amin(1)
