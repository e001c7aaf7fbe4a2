"""Attack 2 on rows of unequal weight: a mean whose terms do not count alike, with the weights known.

A silo may weigh its rows, or centroids of several silos may have been averaged. Known are the weights, not
which row has which. They help: the sum is read largest weight first, each pick in the metric of what the
smaller weights still add; beams keep the best few choices, and sweeps choose tokens anew and swap weights.
And a row keeps its weight at every position, so tokens of the same weight are one text: where all weights
differ, whole texts come out, and no language model is needed to put them together.

Exact releases only. A centroid at a position is sum_i w_i e_i over the rows that have it, where a part's
weights (a silo's, if several were averaged) are scaled so that its present rows carry the part's whole share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.dictionary import Dictionary, Geometry, Ids, Layer, Prior, end_ids, geometry, token_ids
from attacks.pursuit import BEAMS, WeightedProblem, solve_weighted
from attacks.tokens import Target
from securefl.errors import SecureflError
from securefl.slm import Slm

_EXACT = 0.02
_SHORTLIST = 512
# How many more beams for what did not add up, among all tokens.
_WIDER = 4
# Weights that are one and the same; what float32 leaves of a weight's exactness; effort of the search.
_TIE, _SLACK = 1e-9, 1e-4
_STEPS, _OPTIONS = 20_000, 16


@dataclass(frozen=True)
class WeightedTarget:
    """centroids: (q, S, d). mask: (q, S) 0/1. weights: for each centroid those of its k rows, summing to 1,
    in any order. parts: the same shapes, which part (silo) a weight belongs to.

    Raises SecureflError for weights that are not positive or do not sum to 1.
    """

    centroids: NDArray[np.float32]
    mask: NDArray[np.float32]
    weights: Sequence[NDArray[np.float64]]
    parts: Sequence[Ids]

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.parts) == len(self.centroids):
            raise SecureflError("every centroid needs its weights and their parts")
        for weights, parts in zip(self.weights, self.parts, strict=True):
            if weights.shape != parts.shape or weights.ndim != 1 or not len(weights):
                raise SecureflError(
                    "a centroid's weights and their parts differ in number, or there are none"
                )
            if not (weights > 0).all() or abs(weights.sum() - 1) > 1e-6:
                raise SecureflError("the weights of a centroid's rows are positive and sum to 1")


def weighted_mean(
    vectors: NDArray[np.floating], mask: NDArray[np.floating], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(S, d) mean of k rows (k, S, d) with mask (k, S) by weights (k,), at each position over those that have
    it; zeros where none does."""
    share = weights[:, None] * mask
    total = np.einsum("ks,ksd->sd", share, vectors.astype(np.float64))
    return np.asarray(total / np.maximum(share.sum(0), 1e-12)[:, None], np.float64)


def merged(targets: Sequence[Target], weights: Literal["uniform", "size"]) -> WeightedTarget:
    """What an aggregator shows that averages M silos' centroids, by size or alike.

    The c-th centroids belong together. "size": sum_m n_m c_m / sum_m n_m. "uniform": the mean of the c_m.
    """
    sizes = np.stack([one.sizes for one in targets], axis=1).astype(np.float64)  # (q, M)
    shares = sizes if weights == "size" else np.ones_like(sizes)
    shares = shares / shares.sum(1, keepdims=True)
    total = np.einsum(
        "qm,mqsd->qsd", shares, np.stack([one.centroids * one.mask[..., None] for one in targets])
    )
    counts = np.maximum(1, np.rint(sizes)).astype(np.int64)
    return WeightedTarget(
        total.astype(np.float32),
        np.max([one.mask for one in targets], axis=0),
        [np.repeat(share / count, count) for share, count in zip(shares, counts, strict=True)],
        [np.repeat(np.arange(len(count)), count) for count in counts],
    )


@dataclass(frozen=True)
class ReadByWeight:
    """texts: for each centroid (k, S) the tokens of the row of each weight, largest first, -1 past its end.

    weights: in that order. certain: (q, S), whether what was read adds up. Rows of one weight in one part are
    interchangeable: their tokens are right as a set, and stand in either's row.
    """

    texts: list[Ids]
    weights: list[NDArray[np.float64]]
    certain: NDArray[np.bool_]

    def tokens(self) -> list[list[Ids]]:
        """[centroid][position] what was read, as `tokens.Recovered.tokens`."""
        return [[column[column >= 0] for column in text.T] for text in self.texts]


def recover_weighted(
    slm: Slm,
    target: WeightedTarget,
    prior: Prior,
    auxiliary: Sequence[str],
    *,
    dictionary: Dictionary | None = None,
) -> ReadByWeight:
    """Read the tokens behind every centroid with the weight of each, position by position.

    A row whose end was read has no further position, so the weights at the next one are known.
    """
    q, positions, _ = target.centroids.shape
    dictionary = Layer(slm, positions) if dictionary is None else dictionary
    known = geometry(dictionary, token_ids(slm, auxiliary), prior, positions, None)
    end = end_ids(slm)
    order = [np.argsort(-weights, kind="stable") for weights in target.weights]
    rows = [
        _Rows(target.weights[c][order[c]], np.asarray(target.parts[c][order[c]], np.int64)) for c in range(q)
    ]
    texts = [np.full((len(row.weights), positions), -1, np.int64) for row in rows]
    options = [[np.ones(len(row.weights), bool)] for row in rows]
    certain = np.zeros((q, positions), bool)
    for s in range(positions):
        reader = _Position(target, known, dictionary, s)
        there = [c for c in range(q) if target.mask[c, s] > 0 and options[c][0].any()]
        present = {c: options[c][0] for c in there}
        for attempt in range(max((len(options[c]) for c in there), default=0)):
            again = [c for c in there if not certain[c, s] and attempt < len(options[c])]
            if not again:
                break
            weights = [rows[c].at_position(options[c][attempt]) for c in again]
            for c, (read, sure) in zip(again, reader.read(again, weights), strict=True):
                if sure or attempt == 0:
                    present[c], certain[c, s] = options[c][attempt], sure
                    texts[c][:, s] = -1
                    texts[c][present[c], s] = read
        for c in there:
            if s and certain[c, s]:
                # Of rows that were alike it was another that ended before than was thought.
                late = present[c] & ~options[c][0]
                early = options[c][0] & ~present[c]
                texts[c][late, s - 1], texts[c][early, s - 1] = texts[c][early, s - 1], texts[c][late, s - 1]
            options[c] = rows[c].after(present[c], np.isin(texts[c][:, s], end))
    return ReadByWeight(texts, [row.weights for row in rows], certain)


@dataclass(frozen=True)
class _Rows:
    """The rows of a centroid: weights (k,), falling, and the part (k,) of each."""

    weights: NDArray[np.float64]
    parts: Ids

    def at_position(self, present: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Weights of the present rows at a position: a part's present rows carry its whole share."""
        share = np.bincount(self.parts, self.weights)
        there = np.bincount(self.parts, self.weights * present)
        scale = share[self.parts] / np.where(there[self.parts] > 0, there[self.parts], 1)
        return np.asarray((self.weights * scale)[present], np.float64)

    def after(self, present: NDArray[np.bool_], ended: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        """Which rows may be there at the next position, likeliest first.

        ended: (k,) whose end was read. Where another part has a row of the same weight the end may be its.
        """
        scaled = np.zeros(len(present))
        scaled[present] = self.at_position(present)
        choices = []
        for row in np.flatnonzero(ended & present):
            alike = present & ~ended & (self.parts != self.parts[row]) & (abs(scaled - scaled[row]) < _TIE)
            _, first = np.unique(self.parts[alike], return_index=True)
            choices.append([row, *np.flatnonzero(alike)[first]])
        found = [present & ~ended]
        for chosen in itertools.islice(itertools.product(*choices), _OPTIONS):
            left = present.copy()
            left[list(chosen)] = False
            if left.sum() == found[0].sum() and not any((left == one).all() for one in found):
                found.append(left)
        return found


class _Position:
    """Reading at one position."""

    def __init__(
        self, target: WeightedTarget, known: Geometry, dictionary: Dictionary, position: int
    ) -> None:
        self._target, self._known, self._dictionary, self._at = target, known, dictionary, position

    def read(self, rows: Sequence[int], weights: Sequence[NDArray[np.float64]]) -> list[tuple[Ids, bool]]:
        """The token of each weight of these centroids, and whether they add up."""
        known, mean = self._known, self._known.means[self._at]
        padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(w).float() for w in weights], True)
        given = torch.from_numpy(np.ascontiguousarray(self._target.centroids[list(rows), self._at]))
        around = given @ known.basis - padded.sum(1, keepdim=True) * mean
        smallest = torch.tensor([float(one.min()) for one in weights])
        found = torch.zeros(padded.shape, dtype=torch.int64)
        good = torch.zeros(len(rows), dtype=torch.bool)
        every = torch.arange(len(known.reference))
        for ids, beams in ((_near(known, around, padded), BEAMS), (every, _WIDER * BEAMS)):
            again = (~good).nonzero()[:, 0]
            if not len(again):
                break
            atoms = self._dictionary.at(self._at, ids) @ known.basis - mean
            problem = WeightedProblem(around[again], padded[again], atoms, known.variances)
            chosen, error = solve_weighted(problem, beams)
            small = _EXACT * atoms.norm(dim=1).median() * smallest[again]
            for index, places, left, most in zip(again.tolist(), chosen, error, small, strict=True):
                places = places[: len(weights[index])]
                if left > most:
                    places = _match(around[index], weights[index], atoms, places)
                    left = (around[index] - padded[index, : len(places)] @ atoms[places]).norm()
                found[index, : len(places)], good[index] = ids[places], bool(left <= most)
        return [
            (row[: len(one)].numpy(), bool(sure)) for row, one, sure in zip(found, weights, good, strict=True)
        ]


def _match(total: Tensor, weights: NDArray[np.float64], atoms: Tensor, places: Tensor) -> Tensor:
    """The same tokens with other weights, where there is a way for them to add up to `total` (d,).

    Single trades of weights do not get from {a, b, b} to {b, a, a}. But how much weight each of the tokens
    has in all follows by least squares, and then each weight goes to a token that still has room for it.
    """
    distinct = torch.from_numpy(np.unique(places.numpy()))
    room = torch.linalg.lstsq(atoms[distinct].T, total[:, None]).solution[:, 0].double().numpy()
    steps = 0

    def fill(place: int, left: NDArray[np.float64]) -> list[int] | None:
        nonlocal steps
        steps += 1
        if place == len(weights):
            return []
        for at in np.argsort(-left):
            if left[at] < weights[place] - _SLACK or steps > _STEPS:
                return None
            rest = left.copy()
            rest[at] -= weights[place]
            more = fill(place + 1, rest)
            if more is not None:
                return [int(at), *more]
        return None

    dealt = fill(0, room)
    return places if dealt is None else distinct[dealt]


def _near(known: Geometry, around: Tensor, weights: Tensor) -> Tensor:
    """Ids worth a look: the nearest to any of the sums (K, d), by the entries of another position."""
    precision = 1 / ((weights**2).sum(1, keepdim=True) * known.variances)
    weight = weights.amax(1, keepdim=True)
    gain = weight * (around * precision) @ known.reference.T
    gain -= 0.5 * weight**2 * precision @ (known.reference**2).T
    keep = torch.zeros(gain.shape[1], dtype=torch.bool)
    keep[gain.topk(min(_SHORTLIST, gain.shape[1])).indices.flatten()] = True
    return keep.nonzero()[:, 0]
