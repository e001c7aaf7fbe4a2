"""Attack 2: which tokens are behind a centroid of embedding-layer outputs?

At one position s every vector that can occur is in a public dictionary D_s, the embedding layer's output for
every token of the vocabulary, so a centroid of k texts is the mean of k of its entries: T = k c is a sum of k
atoms. They are read back greedily, each pick minimising the remaining error in the metric of what the atoms
not yet picked (and the noise of a claim) are expected to add, and then sweeps re-choose every atom. Token
frequencies of other text enter as a prior with the weight that noise has in the error: without noise the data
alone decide, and where the noise dominates the guess *is* the frequency prior, never less.

Where to look for the rest of it: `dictionary` the entries and their statistics, `pursuit` the search,
`token_sizes` sizes that were withheld, `weighted_tokens` rows of unequal weight, `token_rounds` several
releases of the same rows, `moved_table` an encoder that was trained further, `layer_tokens` deeper layers,
`assembly` whole texts, `token_scores` the scores, `token_study` recall over sizes, noises and layers.

This room reads weights and token ids; it touches no files, and texts only to count tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.dictionary import Dictionary, Geometry, Ids, Layer, Prior, end_ids, geometry, token_ids
from attacks.pursuit import Problem, WeightedProblem, expect, solve, solve_weighted
from securefl.release import Claim, GaussianSums
from securefl.slm import Slm

# Candidates kept for each centroid and position before the exact search, by cluster size. On film reviews the
# true tokens of 16 texts rank above 300 and those of 32 above 3,000 of 30,522 in the first pass.
_SHORTLIST = ((16, 512), (32, 4096))
_LONGEST_SHORTLIST = 8192
# How much longer it gets for what did not add up; after that every token is looked at.
_WIDER = 8
_EXACT = 0.02
# Partial choices side by side for a small sum of known size that still does not add up.
_INSIST = 32


@dataclass(frozen=True)
class Target:
    """An embedding-layer centroid release as the adversary sees it.

    centroids: (q, S, d); mask: (q, S) 0/1; sizes: (q,), noisy under a claim. rounds: of how many releases
    with independent noise of that claim this is the mean (`token_rounds.average`).
    """

    centroids: NDArray[np.float32]
    mask: NDArray[np.float32]
    sizes: NDArray[np.float32]
    claim: Claim
    rounds: float = 1.0

    @property
    def private(self) -> bool:
        """Whether a noisy sum was divided by a noisy count, instead of a sum by the number of its terms."""
        return isinstance(self.claim, GaussianSums)

    @property
    def clip(self) -> float | None:
        return self.claim.clip if isinstance(self.claim, GaussianSums) else None

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each number of a sum."""
        if not isinstance(self.claim, GaussianSums):
            return 0.0
        return self.claim.clip * self.claim.noise_multiplier / math.sqrt(self.rounds)


def expected_counts(target: Target, prior: Prior) -> NDArray[np.int64]:
    """(q, S) how many tokens to expect at each position: size times the share of texts that are as long."""
    positions = target.centroids.shape[1]
    sizes = np.maximum(1, np.rint(target.sizes))
    counts = np.maximum(1, np.rint(sizes[:, None] * prior.present[None, :positions])).astype(np.int64)
    return np.asarray(counts * (target.mask > 0), np.int64)


def guesses(prior: Prior, counts: NDArray[np.int64]) -> list[list[Ids]]:
    """[centroid][position] what the prior alone says, for `counts` (q, S) tokens each."""
    return [[prior.guess(s, int(k)) for s, k in enumerate(row)] for row in counts]


@dataclass(frozen=True)
class Recovered:
    """What came out. tokens: for centroid and position the ids read, special ones included.

    certain: (q, S), whether the atoms add up to the centroid exactly; another choice that does is not known.
    """

    tokens: list[list[Ids]]
    certain: NDArray[np.bool_]

    def part(self, start: int, stop: int) -> Recovered:
        """The same for some of the centroids."""
        return Recovered(self.tokens[start:stop], self.certain[start:stop])


def readable(slm: Slm, target: Target, prior: Prior, auxiliary: Sequence[str]) -> bool:
    """Whether the noise leaves anything of a token's vector; where not, `recover` gives the prior's guess."""
    positions = target.centroids.shape[1]
    known = geometry(Layer(slm, positions), token_ids(slm, auxiliary), prior, positions, target.clip)
    return not _drowned(target, known)


def _drowned(target: Target, known: Geometry) -> bool:
    return target.private and target.deviation > known.typical


def recover(
    slm: Slm,
    target: Target,
    prior: Prior,
    auxiliary: Sequence[str],
    progress: Callable[[float], None] | None = None,
    *,
    dictionary: Dictionary | None = None,
    slack: float = 0.0,
) -> Recovered:
    """Read the tokens behind every centroid, position by position.

    auxiliary: texts that are nobody's, from which `prior` was counted too. How many texts have a position is
    not released; it is the size times the share of auxiliary texts that are as long, or, where the position
    before is certain, the number there less the end tokens read. Where the atoms of an exact release do not
    add up the neighbouring numbers are tried.

    dictionary: instead of the embedding layer of `slm`. slack: standard deviation by which each number of its
    entries differs from the one that was used (`moved_table`); 0 where the table is known.
    """
    q, positions, _ = target.centroids.shape
    dictionary = Layer(slm, positions) if dictionary is None else dictionary
    known = geometry(dictionary, token_ids(slm, auxiliary), prior, positions, target.clip)
    sizes = np.maximum(1, np.rint(target.sizes)).astype(np.int64)
    counts = expected_counts(target, prior)
    tokens: list[list[Ids]] = [[np.zeros(0, np.int64)] * positions for _ in range(q)]
    certain = np.zeros((q, positions), bool)
    if _drowned(target, known):
        return Recovered(guesses(prior, counts), certain)
    due = np.zeros(q, np.int64)
    end = end_ids(slm)
    for s in range(positions):
        rows = np.flatnonzero(target.mask[:, s] > 0)
        if not len(rows):
            continue
        k = np.where(due[rows] > 0, due[rows], counts[rows, s])
        solver = Solver(target, known, dictionary, s, shortlist(target, known, rows, s, k, slack), slack)
        found, good, _ = solver.solve(rows, k)
        for wider in (_WIDER, len(known.reference)):
            again = np.flatnonzero(~good & (k <= _SHORTLIST[-1][0]) & (solver.reach(k) >= 1))
            if not len(again):
                break
            # A small sum of known atoms that does not add up lacks an atom, or its number is wrong.
            ids = shortlist(target, known, rows[again], s, k[again], slack, wider)
            solver = Solver(target, known, dictionary, s, ids, slack)
            most = np.where((wider == _WIDER) & (due[rows] > 0), k, sizes[rows] + 2 * target.private)[again]
            second, sure = solver.solve_counting(rows[again], k[again], most)
            if not target.deviation + slack:
                solver.insist(second, sure, rows[again], np.where(due[rows] > 0, k, 0)[again])
            for index, read, ok in zip(again, second, sure, strict=True):
                found[index], good[index] = (read, ok) if ok or not target.private else (found[index], False)
        crowds = np.flatnonzero(~good & crowded(target, known, k))
        if len(crowds):
            solver = Solver(target, known, dictionary, s, torch.arange(len(known.reference)), slack)
            for index, read in zip(crowds, solver.expect(rows[crowds], k[crowds]), strict=True):
                found[index] = read
        for row, read, sure in zip(rows, found, good, strict=True):
            tokens[row][s], certain[row, s] = read, sure and not target.deviation
            due[row] = len(read) - int(np.isin(read, end).sum()) if sure else 0
        if progress is not None:
            progress((s + 1) / positions)
    return Recovered(tokens, certain)


def crowded(target: Target, known: Geometry, k: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(K,) whether exact sums of k atoms are better read by an estimate of all counts than singly.

    Measured on film reviews with 384 numbers: singly a recall of .63 against .53 for 128 atoms, but of .33
    against .48 for 256, where the prior has .45. Under noise the prior guards the picks.
    """
    return np.asarray((k > len(known.variances) / 2) & (target.deviation == 0), np.bool_)


def _shortlist_size(k: int, vocabulary: int) -> int:
    return min(vocabulary, next((size for most, size in _SHORTLIST if k <= most), _LONGEST_SHORTLIST))


def shortlist(
    target: Target,
    known: Geometry,
    rows: Ids,
    position: int,
    counts: Ids,
    slack: float = 0.0,
    wider: int = 1,
) -> Tensor:
    """Ids worth an exact look at a position, by the entries of another position moved to its mean.

    rows: (K,) centroids, taken as sums of `counts` (K,) atoms. wider: factor on the number of ids.
    """
    vocabulary = len(known.reference)
    if max(_shortlist_size(int(k), vocabulary) for k in counts) * wider >= vocabulary // 2:
        return torch.arange(vocabulary)
    k = torch.from_numpy(np.ascontiguousarray(counts))
    around = sums(target, known, rows, position, k)
    expected = (k.float() / 2).clamp(min=0.5)[:, None] * known.weight**2 * known.variances
    noise = target.deviation**2 + float(counts.mean()) * slack**2
    precision = 1 / (expected + noise)
    gain = known.weight * (around * precision) @ known.reference.T
    gain -= 0.5 * known.weight**2 * precision @ (known.reference**2).T
    trust = noise * len(known.variances) / (noise * len(known.variances) + expected.sum(1, keepdim=True))
    gain += trust * torch.from_numpy(known.prior.probability[position]).log()
    keep = torch.zeros(vocabulary, dtype=torch.bool)
    for row, size in zip(gain, k.tolist(), strict=True):
        keep[row.topk(wider * _shortlist_size(size, vocabulary)).indices] = True
    return keep.nonzero()[:, 0]


def sums(target: Target, known: Geometry, rows: Ids, position: int, k: Tensor) -> Tensor:
    """(K, d) sums of the atoms around their expected mean, in rotated axes.

    Without a claim the released mean is over the k texts that have the position; under one it is the noisy
    sum over the noisy count of the whole cluster.
    """
    centroids = torch.from_numpy(np.ascontiguousarray(target.centroids[rows, position]))
    divisor = torch.from_numpy(np.ascontiguousarray(target.sizes[rows])) if target.private else k.float()
    mean = known.weight * known.means[position]
    return (centroids @ known.basis) * divisor[:, None] - k.float()[:, None] * mean


class Solver:
    """All centroids at one position, over the atoms of `ids` (M,)."""

    def __init__(
        self,
        target: Target,
        known: Geometry,
        dictionary: Dictionary,
        position: int,
        ids: Tensor,
        slack: float = 0.0,
    ) -> None:
        self._target, self._known, self._position, self._slack = target, known, position, slack
        self.ids = ids
        atoms = known.weight * (dictionary.at(position, ids) @ known.basis - known.means[position])
        self.atoms = torch.nn.functional.pad(atoms, (0, 0, 0, 1))
        self.typical = float(atoms.norm(dim=1).median())
        rates = torch.from_numpy(known.prior.probability[position])[ids].log()
        self.rates = torch.nn.functional.pad(rates, (0, 1))

    def reach(self, k: NDArray[np.int64]) -> NDArray[np.float64]:
        """(K,) how often what noise and slack leave of a right sum fits into what a token too many would.

        Below 1 no sum of k atoms can be told from a wrong one by what it leaves.
        """
        off = self._target.deviation**2 + 9 * self._slack**2 * k
        return np.asarray(self.typical / np.sqrt(np.maximum(self.atoms.shape[1] * off, 1e-24)), np.float64)

    def solve(self, rows: Ids, k: NDArray[np.int64]) -> tuple[list[Ids], NDArray[np.bool_], Tensor]:
        """Token ids of each centroid of `rows` taken as a sum of k (K,) atoms, whether they add up but for
        noise and slack, and the norm (K,) of what they leave."""
        due = torch.from_numpy(np.ascontiguousarray(k))
        noise, slack = self._target.deviation, self._slack
        deviation = math.sqrt(noise**2 + slack**2 * float(k.mean()))
        left = np.sqrt(self.atoms.shape[1] * ((1.1 * noise) ** 2 + (1.5 * slack) ** 2 * k))
        most = np.where(self.reach(k) >= 1, np.maximum(_EXACT * self.typical, left), -1.0)
        problem = Problem(
            sums=sums(self._target, self._known, rows, self._position, due),
            due=due,
            atoms=self.atoms,
            log_rates=self.rates[None] + due.float().log()[:, None],
            deviation=deviation,
            exact=_EXACT * self.typical,
            variances=self._known.weight**2 * self._known.variances,
        )
        chosen, error = solve(problem)
        found = [self.ids[row[row < len(self.ids)]].numpy() for row in chosen]
        return found, np.asarray(error.numpy() <= most, np.bool_), error

    def expect(self, rows: Ids, k: NDArray[np.int64]) -> list[Ids]:
        """The likeliest k (K,) tokens of each centroid of `rows` by a linear estimate (`pursuit.expect`)."""
        due = torch.from_numpy(np.ascontiguousarray(k))
        around = sums(self._target, self._known, rows, self._position, due)
        deviation = math.sqrt(self._target.deviation**2 + self._slack**2 * float(k.mean()))
        found = expect(around, due, self.atoms[:-1], self.rates[:-1].exp(), deviation)
        return [self.ids[one].numpy() for one in found]

    def solve_counting(
        self, rows: Ids, k: NDArray[np.int64], most: NDArray[np.int64]
    ) -> tuple[list[Ids], NDArray[np.bool_]]:
        """As `solve`, trying other numbers of atoms up to `most` where k does not add up; k itself only where
        it is `most`, which is then known."""
        found, good, _ = self.solve(rows, k)
        for step in (-1, 1, -2, 2):
            again = np.flatnonzero(~good & (k != most) & (k + step >= 1) & (k + step <= most))
            if not len(again):
                continue
            others, sure, _ = self.solve(rows[again], k[again] + step)
            for index, ids, ok in zip(again, others, sure, strict=True):
                if ok:
                    found[index], good[index] = ids, True
        return found, good

    def insist(self, found: list[Ids], good: NDArray[np.bool_], rows: Ids, k: NDArray[np.int64]) -> None:
        """Try once more, with many partial choices side by side, where k (K,) atoms are sure (else 0)."""
        again = np.flatnonzero(~good & (k > 0) & (k <= _SHORTLIST[0][0]))
        if not len(again):
            return
        due = torch.from_numpy(np.ascontiguousarray(k[again]))
        problem = WeightedProblem(
            sums=sums(self._target, self._known, rows[again], self._position, due),
            weights=(torch.arange(int(due.max()))[None] < due[:, None]).float(),
            atoms=self.atoms[:-1],
            variances=self._known.variances,
        )
        chosen, error = solve_weighted(problem, _INSIST)
        for index, number, read, left in zip(again, due.tolist(), chosen, error, strict=True):
            if float(left) <= _EXACT * self.typical:
                found[index], good[index] = self.ids[read[:number]].numpy(), True
