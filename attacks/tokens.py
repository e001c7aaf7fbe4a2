"""Attack 2: which tokens are behind a centroid of embedding-layer outputs?

At one position s every vector that can occur is in a public dictionary D_s, the embedding layer's output for
every token of the vocabulary, so a centroid of k texts is the mean of k of its entries: T = k c is a sum of k
atoms. They are read back greedily, each pick minimising the remaining error in the metric of what the atoms
not yet picked (and the noise of a claim) are expected to add, and then sweeps re-choose every atom. Token
frequencies of other text enter as a prior with the weight that noise has in the error: without noise the data
alone decide, and where the noise dominates the guess *is* the frequency prior, never less.

This room reads weights and token ids; it touches no files, and texts only to count tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.pursuit import Problem, solve
from securefl.errors import ModelError
from securefl.models import Slm
from securefl.release import Claim, GaussianSums
from securefl.training import embed

Ids = NDArray[np.int64]

_CHUNK = 2048
# Candidates kept for each centroid and position before the exact search, by cluster size. On film reviews the
# true tokens of 16 texts rank above 300 and those of 32 above 3,000 of 30,522 in the first pass.
_SHORTLIST = ((16, 512), (32, 4096))
_LONGEST_SHORTLIST = 8192
_EXACT = 0.02
_AUXILIARY_ROWS = 512


def token_ids(slm: Slm, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text as the model reads it, special tokens included, cut at `max_length`."""
    out: list[Ids] = []
    for start in range(0, len(texts), 256):
        batch = slm.tokenize(texts[start : start + 256])
        for ids, mask in zip(batch["input_ids"].numpy(), batch["attention_mask"].numpy(), strict=True):
            out.append(ids[mask > 0].astype(np.int64))
    return out


def special_ids(slm: Slm) -> frozenset[int]:
    """Ids that are no content: start, end, padding, mask. The unknown token counts as content."""
    return frozenset(slm.tokenizer.all_special_ids) - {slm.tokenizer.unk_token_id}


@dataclass(frozen=True)
class Prior:
    """Token frequencies of auxiliary text.

    probability: (S, V) at each position, smoothed by the frequencies over all positions. present: (S,) the
    share of texts that have the position. counts: (V,) over all positions, unsmoothed.
    """

    probability: NDArray[np.float32]
    present: NDArray[np.float64]
    counts: Ids

    def guess(self, position: int, k: int) -> Ids:
        """The k tokens with the largest expected counts, with multiplicity: the guess without any release."""
        rates = self.probability[position]
        if k < 1:
            return np.zeros(0, np.int64)
        top = np.argpartition(-rates, min(k, len(rates) - 1))[: k + 1]
        shares = rates[top][:, None] / np.arange(1, k + 1)[None]
        best = np.argsort(-shares, axis=None, kind="stable")[:k]
        return np.asarray(top[best // k], np.int64)


def fit_prior(texts: Sequence[Ids], positions: int, vocabulary: int) -> Prior:
    """Count tokens of auxiliary texts at S = `positions` positions over V = `vocabulary` ids."""
    counts = np.zeros((positions, vocabulary), np.float32)
    for ids in texts:
        counts[np.arange(len(ids[:positions])), ids[:positions]] += 1
    total = counts.sum(0)
    overall = (total + 0.02) / (total + 0.02).sum()
    here = counts.sum(1, keepdims=True)
    present = here[:, 0] / max(1, len(texts))
    # Five pseudo-rows of the overall frequencies: a token not seen at a position may still stand there.
    probability = (counts + 5 * overall) / (here + 5)
    return Prior(probability.astype(np.float32), present.astype(np.float64), total.astype(np.int64))


@dataclass(frozen=True)
class Target:
    """An embedding-layer centroid release as the adversary sees it.

    centroids: (q, S, d); mask: (q, S) 0/1; sizes: (q,), noisy under a claim.
    """

    centroids: NDArray[np.float32]
    mask: NDArray[np.float32]
    sizes: NDArray[np.float32]
    claim: Claim


def vocabulary_size(slm: Slm) -> int:
    """How many ids the token table has."""
    return int(slm.model.config.vocab_size)


def expected_counts(target: Target, prior: Prior) -> NDArray[np.int64]:
    """(q, S) how many tokens to expect at each position: size times the share of texts that are as long."""
    positions = target.centroids.shape[1]
    sizes = np.maximum(1, np.rint(target.sizes))
    counts = np.maximum(1, np.rint(sizes[:, None] * prior.present[None, :positions])).astype(np.int64)
    return np.asarray(counts * (target.mask > 0), np.int64)


def guesses(prior: Prior, counts: NDArray[np.int64]) -> list[list[Ids]]:
    """[centroid][position] what the prior alone says, for `counts` (q, S) tokens each."""
    return [[prior.guess(s, int(k)) for s, k in enumerate(row)] for row in counts]


@dataclass
class _Geometry:
    """The public geometry of the dictionary: axes and variances of the prior, means by position."""

    basis: Tensor
    variances: Tensor
    means: Tensor
    weight: float
    reference: Tensor = field(repr=False)
    prior: Prior = field(repr=False)


class _Layer:
    """The public embedding layer at one position for many tokens.

    Where it takes position ids (and gives with them what a whole text gives, which is checked) one position
    is computed alone; otherwise as the last one of a text of that length.
    """

    def __init__(self, slm: Slm, positions: int) -> None:
        self._slm = slm
        self._layer: Any = getattr(slm.model.base_model, "embeddings", None)
        if self._layer is None:
            raise ModelError(f"{slm.name}: has no embedding layer, so there is no dictionary of tokens")
        padding = getattr(getattr(self._layer, "position_embeddings", None), "padding_idx", None)
        # RoBERTa counts positions from behind the index of the padding.
        self._first = 0 if padding is None else padding + 1
        self._alone = "position_ids" in inspect.signature(self._layer.forward).parameters
        some = torch.arange(vocabulary_size(slm))[:: max(1, vocabulary_size(slm) // 7)]
        for at in {0, positions - 1} if self._alone else ():
            alone, whole = self._one(some, at), self._last(some, at)
            self._alone &= alone.shape == whole.shape and bool(torch.allclose(alone, whole, atol=1e-5))

    def _one(self, ids: Tensor, position: int) -> Tensor:
        places = torch.full((len(ids), 1), self._first + position)
        outputs: Tensor = self._layer(input_ids=ids[:, None], position_ids=places)
        return outputs[:, 0]

    def _last(self, ids: Tensor, position: int) -> Tensor:
        texts = ids[:, None].expand(-1, position + 1)
        return self._slm.embeddings({"input_ids": texts, "attention_mask": torch.ones_like(texts)})[:, -1]

    def at(self, position: int, ids: Tensor) -> Tensor:
        """(M, d) outputs for ids (M,) at a position."""
        one = self._one if self._alone else self._last
        with torch.inference_mode():
            return torch.cat([one(part, position) for part in torch.split(ids, _CHUNK)])


def _geometry(slm: Slm, layer: _Layer, auxiliary: Sequence[str], prior: Prior, target: Target) -> _Geometry:
    """One dictionary (position 1) gives the axes; auxiliary text gives the mean at every position."""
    positions = target.centroids.shape[1]
    reference = layer.at(min(1, positions - 1), torch.arange(prior.probability.shape[1]))
    share = torch.from_numpy((prior.counts + 0.02) / (prior.counts + 0.02).sum()).float()
    centred = reference - share @ reference
    covariance = (centred * share[:, None]).T @ centred
    width = len(covariance)
    covariance += 0.1 * covariance.trace() / width * torch.eye(width)
    variances, basis = torch.linalg.eigh(covariance)

    vectors, mask = embed(slm, list(auxiliary)[:_AUXILIARY_ROWS], "embeddings")
    there = mask[:, :positions].sum(0)
    sums = np.einsum("ns,nsd->sd", mask[:, :positions], vectors[:, :positions])
    fallback = sums.sum(0) / max(1.0, float(there.sum()))
    means = np.where(there[:, None] > 0, sums / np.maximum(there, 1)[:, None], fallback)
    weight = 1.0
    if isinstance(target.claim, GaussianSums):
        norms = np.sqrt((vectors.astype(np.float64) ** 2).sum((1, 2)))
        weight = float(np.minimum(1.0, target.claim.clip / norms).mean())
    return _Geometry(
        basis, variances, torch.from_numpy(means).float() @ basis, weight, centred @ basis, prior
    )


def _shortlist_size(k: int, vocabulary: int) -> int:
    return min(vocabulary, next((size for most, size in _SHORTLIST if k <= most), _LONGEST_SHORTLIST))


def _shortlist(target: Target, geometry: _Geometry, rows: Ids, position: int, counts: Ids) -> Tensor:
    """Ids worth an exact look at a position, by the dictionary of position 1 moved to its mean."""
    vocabulary = len(geometry.reference)
    if max(_shortlist_size(int(k), vocabulary) for k in counts) >= vocabulary // 2:
        return torch.arange(vocabulary)
    k = torch.from_numpy(counts)
    sums = _sums(target, geometry, rows, position, k)
    expected = (k.float() / 2).clamp(min=0.5)[:, None] * geometry.weight**2 * geometry.variances
    precision = 1 / (expected + _deviation(target.claim) ** 2)
    gain = geometry.weight * (sums * precision) @ geometry.reference.T
    gain -= 0.5 * geometry.weight**2 * precision @ (geometry.reference**2).T
    noise = _deviation(target.claim) ** 2 * len(geometry.variances)
    trust = noise / (noise + expected.sum(1, keepdim=True))
    gain += trust * torch.from_numpy(geometry.prior.probability[position]).log()
    keep = torch.zeros(vocabulary, dtype=torch.bool)
    for row, size in zip(gain, k.tolist(), strict=True):
        keep[row.topk(_shortlist_size(size, vocabulary)).indices] = True
    return keep.nonzero()[:, 0]


def _deviation(claim: Claim) -> float:
    return claim.clip * claim.noise_multiplier if isinstance(claim, GaussianSums) else 0.0


def _drowned(claim: Claim, geometry: _Geometry) -> bool:
    """Whether the claimed noise on a number exceeds a whole token's vector: then only the prior is left."""
    typical = geometry.weight * float(geometry.reference.norm(dim=1).median())
    return _deviation(claim) > typical


def _sums(target: Target, geometry: _Geometry, rows: Ids, position: int, k: Tensor) -> Tensor:
    """(K, d) sums of the atoms around their expected mean, in rotated axes.

    Without a claim the released mean is over the k texts that have the position; under one it is the noisy
    sum over the noisy count of the whole cluster.
    """
    centroids = torch.from_numpy(np.ascontiguousarray(target.centroids[rows, position]))
    private = isinstance(target.claim, GaussianSums)
    divisor = torch.from_numpy(np.ascontiguousarray(target.sizes[rows])) if private else k.float()
    mean = geometry.weight * geometry.means[position]
    return (centroids @ geometry.basis) * divisor[:, None] - k.float()[:, None] * mean


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


def recover(
    slm: Slm,
    target: Target,
    prior: Prior,
    auxiliary: Sequence[str],
    progress: Callable[[float], None] | None = None,
) -> Recovered:
    """Read the tokens behind every centroid, position by position.

    auxiliary: texts that are nobody's, from which `prior` was counted too. How many texts have a position is
    not released; it is the size times the share of auxiliary texts that are as long, or, where the position
    before is certain, the number there less the end tokens read. Where the atoms of an exact release do not
    add up the neighbouring numbers are tried.
    """
    q, positions, _ = target.centroids.shape
    layer = _Layer(slm, positions)
    geometry = _geometry(slm, layer, auxiliary, prior, target)
    private = isinstance(target.claim, GaussianSums)
    sizes = np.maximum(1, np.rint(target.sizes)).astype(np.int64)
    counts = expected_counts(target, prior)
    tokens: list[list[Ids]] = [[np.zeros(0, np.int64)] * positions for _ in range(q)]
    certain = np.zeros((q, positions), bool)
    if private and _drowned(target.claim, geometry):
        return Recovered(guesses(prior, counts), certain)
    due = np.zeros(q, np.int64)
    end = [i for i in (slm.tokenizer.sep_token_id, slm.tokenizer.eos_token_id) if i is not None]
    for s in range(positions):
        rows = np.flatnonzero(target.mask[:, s] > 0)
        if not len(rows):
            continue
        k = counts[rows, s] if private else np.where(due[rows] > 0, due[rows], counts[rows, s])
        ids = _shortlist(target, geometry, rows, s, k)
        atoms = geometry.weight * (layer.at(s, ids) @ geometry.basis - geometry.means[s])
        solver = _Solver(target, geometry, s, atoms, ids)
        found, good = solver.solve(rows, k)
        again = np.flatnonzero(~good & (k <= _SHORTLIST[-1][0])) if not private else k[:0]
        if len(again):
            # A small sum of exact atoms that does not add up lacks an atom, or its number is wrong.
            every = torch.arange(len(geometry.reference))
            atoms = layer.at(s, every) @ geometry.basis - geometry.means[s]
            solver = _Solver(target, geometry, s, atoms, every)
            second, sure = solver.solve_counting(rows[again], k[again], sizes[rows][again])
            for index, read, ok in zip(again, second, sure, strict=True):
                found[index], good[index] = read, ok
        for row, read, sure in zip(rows, found, good, strict=True):
            tokens[row][s], certain[row, s] = read, sure
            due[row] = len(read) - int(np.isin(read, end).sum()) if sure else 0
        if progress is not None:
            progress((s + 1) / positions)
    return Recovered(tokens, certain)


@dataclass
class _Solver:
    """All centroids at one position. atoms: (M, d) weighted; ids: (M,) their tokens."""

    target: Target
    geometry: _Geometry
    position: int
    atoms: Tensor
    ids: Tensor

    def solve(self, rows: Ids, k: NDArray[np.int64]) -> tuple[list[Ids], NDArray[np.bool_]]:
        """Token ids of each centroid of `rows` taken as a sum of k (K,) atoms, and whether they add up."""
        due = torch.from_numpy(np.ascontiguousarray(k))
        rates = torch.from_numpy(self.geometry.prior.probability[self.position])[self.ids].log()
        log_rates = torch.nn.functional.pad(rates, (0, 1))[None] + due.float().log()[:, None]
        typical = float(self.atoms.norm(dim=1).median())
        problem = Problem(
            sums=_sums(self.target, self.geometry, rows, self.position, due),
            due=due,
            atoms=torch.nn.functional.pad(self.atoms, (0, 0, 0, 1)),
            log_rates=log_rates,
            deviation=_deviation(self.target.claim),
            exact=_EXACT * typical,
            variances=self.geometry.weight**2 * self.geometry.variances,
        )
        chosen, error = solve(problem)
        found = [self.ids[row[row < len(self.ids)]].numpy() for row in chosen]
        exact = (error <= problem.exact).numpy() & (problem.deviation == 0)
        return found, np.asarray(exact, np.bool_)

    def solve_counting(
        self, rows: Ids, k: NDArray[np.int64], most: NDArray[np.int64]
    ) -> tuple[list[Ids], NDArray[np.bool_]]:
        """As `solve`, trying other numbers of atoms up to `most` where k does not add up."""
        found, good = self.solve(rows, k)
        for step in (-1, 1, -2, 2):
            again = np.flatnonzero(~good & (k + step >= 1) & (k + step <= most))
            if not len(again):
                continue
            others, sure = self.solve(rows[again], k[again] + step)
            for index, ids, ok in zip(again, others, sure, strict=True):
                if ok:
                    found[index], good[index] = ids, True
        return found, good


@dataclass(frozen=True)
class Overlap:
    """Multiset overlap by unit, (centroid, position) or centroid: hits, true and guessed tokens (n,)."""

    hits: NDArray[np.float64]
    true: NDArray[np.float64]
    guessed: NDArray[np.float64]

    @property
    def recall(self) -> float:
        return float(self.hits.sum() / self.true.sum())

    @property
    def f1(self) -> float:
        return float(2 * self.hits.sum() / (self.true.sum() + self.guessed.sum()))


def overlap(
    guesses: Sequence[Sequence[Ids]],
    truths: Sequence[Sequence[Ids]],
    ignore: frozenset[int],
    only: NDArray[np.bool_] | None = None,
) -> Overlap:
    """Compare guesses with true tokens, both [centroid][unit] multisets; units without truth drop out.

    ignore: special tokens, which are in every text. only: (V,) mask of the tokens that count.
    """
    rows: list[tuple[int, int, int]] = []
    for guess_row, truth_row in zip(guesses, truths, strict=True):
        for guess, truth in zip(guess_row, truth_row, strict=True):
            kept = [_content(ids, ignore, only) for ids in (guess, truth)]
            size = 1 + max((int(ids.max()) for ids in kept if len(ids)), default=0)
            first, second = (np.bincount(ids, minlength=size) for ids in kept)
            if second.sum():
                rows.append((int(np.minimum(first, second).sum()), int(second.sum()), int(first.sum())))
    table = np.array(rows, np.float64).reshape(-1, 3)
    return Overlap(table[:, 0], table[:, 1], table[:, 2])


def _content(ids: Ids, ignore: frozenset[int], only: NDArray[np.bool_] | None) -> Ids:
    kept = ids[~np.isin(ids, list(ignore))]
    return kept if only is None else kept[only[kept]]


def by_position(texts: Sequence[Ids], positions: int) -> list[Ids]:
    """The true tokens of a cluster's texts at each position."""
    return [np.array([ids[s] for ids in texts if len(ids) > s], dtype=np.int64) for s in range(positions)]


def bag(row: Sequence[Ids]) -> Ids:
    """All positions of a cluster as one multiset."""
    return np.concatenate([np.zeros(0, np.int64), *row])
