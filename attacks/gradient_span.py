"""Attack 11: which texts are behind the gradient of one step?

The gradient of a linear map is the sum over tokens of (gradient of its output) x (its input), so its rows
span at most as many dimensions as there are tokens in the batch, and every input lies in that span (Petrov et
al., DAGER, NeurIPS 2024). Below the model's width a candidate is tested: the input of the first block that a
token has at a position is public, and it was in the batch only if its distance to the span of the query, key
and value maps is 0. Where the first block reads the sum of a token's and a position's vector, the span holds
with three corners of a rectangle (token, position) the fourth too, and soon every token of the batch at every
position; which are real, and which stand in one text, the second block's span decides, for which a whole text
must be known (`gradient_search`).

This room reads a model and a gradient; it touches no files and no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attacks.adversary import NotEnough
from attacks.dictionary import Ids, Prior, vocabulary_size
from attacks.token_scores import by_position
from securefl.errors import ModelError, SecureflError
from securefl.release import Tensors
from securefl.slm import Slm

# A gap in the singular values that is the end of the batch's tokens. Below the rank neighbours differ by less
# than 6 on MiniLM, from a full rank on too; at it by 200 to 800,000.
_GAP = 20.0
# Relative distances: float32 leaves 1e-6 to what is in the span, other tokens have .01 and more. A tolerance
# that noise would raise beyond the second one tells nothing.
_EXACT, _VAGUE = 2e-5, 0.03
_SAFETY = 6.0  # of a distance over what the noise on the gradient makes of it on average
_VECTORS = 8192
_SKETCH = 8


@dataclass(frozen=True, repr=False)
class OneStep:
    """A model update of one step as the server sees it, up to a factor.

    gradients: by parameter name, as `Slm.state`. noise: standard deviation of what is on each number beside
    the gradient, in its unit; 0 for float32's own error, which is estimated.
    """

    gradients: Tensors
    noise: Mapping[str, float]

    @classmethod
    def from_weights(cls, before: Tensors, after: Tensors) -> OneStep:
        """The difference of two models: what a plain SGD step moved, and the rounding of the weights."""
        moved, noise = {}, {}
        for name in after:
            if name not in before or before[name].shape != after[name].shape:
                raise SecureflError(f"{name}: the two models of an update have not the same parameters")
            moved[name] = np.asarray(after[name], np.float64) - before[name]
            spacing = np.spacing(np.abs(np.asarray(after[name], np.float32))).astype(np.float64)
            noise[name] = float(np.sqrt((spacing**2).mean() / 12))
        return cls(moved, noise)


class _Stop(Exception):
    """Ends a forward pass at the layer that was asked for."""


class Reader:
    """What the first blocks of a model read: the inputs of their first linear maps, and the maps' names.

    slm: in evaluation mode. names: for each of the first two blocks (one where a model has one) the
    parameters that read its input. causal: whether what a token brings to the second block depends on the
    tokens before it alone.
    """

    def __init__(self, slm: Slm) -> None:
        self._slm = slm
        lists = [m for m in slm.model.base_model.modules() if isinstance(m, nn.ModuleList)]
        if not lists:
            raise ModelError(f"{slm.name}: has no list of blocks, so their inputs cannot be read")
        longest = max(lists, key=lambda one: len(one))
        blocks = list(longest)[:2]
        paths = {module: name for name, module in slm.model.named_modules()}
        groups = [self._first_maps(block) for block in blocks]
        self._maps = [group[0] for group in groups]
        self.names = [[f"{paths[module]}.weight" for module in group] for group in groups]
        self._transposed = {
            f"{paths[module]}.weight" for group in groups for module in group if isinstance(module, Conv1D)
        }
        self.causal = len(blocks) > 1 and self._looks_back_only()

    def _first_maps(self, block: nn.Module) -> list[nn.Module]:
        seen: list[tuple[nn.Module, Tensor]] = []
        maps = [module for module in block.modules() if isinstance(module, nn.Linear | Conv1D)]
        hooks = [m.register_forward_pre_hook(lambda map_, args: seen.append((map_, args[0]))) for m in maps]
        try:
            with torch.inference_mode():
                self._forward(torch.zeros((1, 2), dtype=torch.int64))
        finally:
            for hook in hooks:
                hook.remove()
        return [module for module, read in seen if read is seen[0][1]]

    def _looks_back_only(self) -> bool:
        ids = torch.arange(6)[None] % vocabulary_size(self._slm)
        other = ids.clone()
        other[0, -1] = 0
        return bool(torch.equal(self.inputs(1, ids)[0, 0], self.inputs(1, other)[0, 0]))

    def _forward(self, ids: Tensor) -> None:
        batch = {"input_ids": ids.to(self._slm.device), "attention_mask": torch.ones_like(ids)}
        self._slm.model.base_model(**self._slm.inputs({k: v.to(self._slm.device) for k, v in batch.items()}))

    def inputs(self, block: int, ids: Tensor) -> Tensor:
        """(n, S, d) what a block's first maps read of texts (n, S) of one length."""
        read: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            read.append(args[0])
            raise _Stop

        with torch.inference_mode(), _hooked(self._maps[block], stop):
            for part in torch.split(ids, max(1, _VECTORS // ids.shape[1])):
                try:
                    self._forward(part)
                except _Stop:
                    continue
        return torch.cat(read).cpu()

    def gradient(self, update: OneStep, block: int) -> tuple[NDArray[np.float64], float]:
        """(m, d) the gradients of a block's first maps one above the other, and the noise on each number.

        Raises NotEnough where the update lacks them, SecureflError where it is malformed.
        """
        names = self.names[block]
        missing = [name for name in names if name not in update.gradients]
        if missing:
            raise NotEnough(f"the update has no gradient of {missing[0]}: it does not train in this run")
        parts = []
        for name in names:
            part = np.asarray(update.gradients[name], np.float64)
            parts.append(part.T if name in self._transposed else part)
        if any(part.ndim != 2 or part.shape[1] != parts[0].shape[1] for part in parts):
            raise SecureflError(f"the gradient of {names[0]} has not the shape of the model's parameter")
        stacked = np.concatenate(parts)
        if not np.isfinite(stacked).all():
            raise SecureflError(f"the gradient of {names[0]} holds NaN or infinity")
        return stacked, max((float(update.noise.get(name, 0.0)) for name in names), default=0.0)


@contextmanager
def _hooked(module: nn.Module, hook: Callable[[nn.Module, tuple[Tensor, ...]], None]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Span:
    """The row space of a gradient. basis: (r, d) orthonormal; values: (r,) singular values, falling.

    outside: (d - r, d) orthonormal rows of what is not in it. noise: see `OneStep`, estimated where unknown.
    """

    basis: Tensor
    values: Tensor
    outside: Tensor
    noise: float

    @property
    def rank(self) -> int:
        return len(self.basis)

    def distances(self, vectors: Tensor) -> Tensor:
        """(...) distance of vectors (..., d) to the span, over their norm."""
        lengths: Tensor = (vectors @ self.outside.T).norm(dim=-1) / vectors.norm(dim=-1)
        return lengths

    def excess(self, vectors: Tensor) -> Tensor:
        """(...) `distances` over what is tolerated: a vector counts as inside up to 1.

        An input that is sum_i a_i s_i v_i is off by the noise times |a| in each direction outside (to first
        order), so what is hardly there is tolerated more.
        """
        weight: Tensor = (vectors @ self.basis.T / self.values).norm(dim=-1) / vectors.norm(dim=-1)
        expected = self.noise * len(self.outside) ** 0.5 * weight
        tolerance = (_SAFETY * expected).clamp(_EXACT, _VAGUE)
        excess: Tensor = self.distances(vectors) / tolerance
        return excess


def span_of(gradient: NDArray[np.float64], room: int, noise: float = 0.0) -> Span:
    """The span of a batch's inputs from the gradient (m, d) of the maps that read them.

    room: dimensions that inputs can have at all. Its rank ends at the largest gap of the singular values, or
    where known `noise` begins. Raises NotEnough for a full rank (as many tokens as dimensions, noise of a
    claim, many steps), and for a first step of Adam, which keeps a gradient's signs only.
    """
    sizes = np.abs(gradient[gradient != 0])
    if not len(sizes):
        raise NotEnough("the gradient of the first block is 0, so there is nothing to read")
    half, most = np.quantile(sizes, [0.5, 0.9])
    if gradient.size > 64 and most < 1.1 * half:
        raise NotEnough(
            "all numbers of the update have one size, as after a first step of Adam: signs span no gradient"
        )
    rows, width = gradient.shape
    if rows < width:
        gradient = np.concatenate([gradient, np.zeros((width - rows, width))])
    _, values, axes = np.linalg.svd(gradient, full_matrices=False)
    steps = np.maximum(values, 1e-9 * values[0])
    ratios = steps[:-1] / steps[1:]
    rank = int(ratios.argmax()) + 1
    above = int((values > 1.1 * noise * (np.sqrt(rows) + np.sqrt(width))).sum()) if noise > 0 else width
    if ratios[rank - 1] < _GAP or rank > above:
        rank = above
    if not 0 < rank < min(room, width - 1):
        raise NotEnough(
            f"the gradient has no gap in its {width} singular values, or noise hides all of them: the batch "
            "has as many tokens as the model has dimensions, or it is of many steps, or noised"
        )
    left = float(np.sqrt((values[rank:] ** 2).sum() / max(1, (rows - rank) * (width - rank))))
    directions = torch.from_numpy(axes).float()
    scales = torch.from_numpy(values[:rank].copy()).float()
    return Span(directions[:rank], scales, directions[rank:], max(left, noise))


def tokens_in_span(reader: Reader, span: Span, vocabulary: int, positions: int) -> list[Ids]:
    """For each of S positions the ids whose input to the first block is in the span, rising."""
    found: list[list[Ids]] = [[] for _ in range(positions)]
    for ids in torch.split(torch.arange(vocabulary), max(1, _VECTORS // positions)):
        vectors = reader.inputs(0, ids[:, None].expand(-1, positions))
        # Some directions outside are enough to drop nearly all of the vocabulary.
        near = (vectors @ span.outside[:_SKETCH].T).norm(dim=-1) <= _VAGUE * vectors.norm(dim=-1)
        token, place = near.nonzero(as_tuple=True)
        inside = span.excess(vectors[token, place]) <= 1
        for at in range(positions):
            found[at].append(ids[token[inside & (place == at)]].numpy())
    return [np.sort(np.concatenate(parts)) for parts in found]


def room_of(reader: Reader, vocabulary: int, positions: int) -> int:
    """Dimensions that the inputs of the first block span over tokens and positions: d, or less by a norm."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (4 * _VECTORS // positions, 1)))
    vectors = reader.inputs(0, ids.expand(-1, positions)).flatten(0, 1).double()
    values = torch.linalg.eigvalsh(vectors.T @ vectors)
    return int((values > 1e-10 * values.max()).sum())


@dataclass(frozen=True)
class Found:
    """What a gradient gave away.

    tokens: for each position the ids in the first block's span, a set; it may hold tokens of other positions.
    texts: ids of the texts that were put together, special tokens included; every one is in the second
    block's span too, so it was in the batch (how often is not known). tokens_in_batch: of texts that differ,
    None where the second block does not tell.
    """

    tokens: list[Ids]
    texts: list[Ids]
    tokens_in_batch: int | None

    @property
    def complete(self) -> bool:
        """Whether the texts account for all tokens of the batch."""
        return self.tokens_in_batch is not None and sum(map(len, self.texts)) >= self.tokens_in_batch

    @property
    def vocabulary(self) -> Ids:
        """All tokens found, rising: what the first block alone proves of a batch whose positions mix."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *self.tokens]))

    def by_position(self) -> list[Ids]:
        """The guess for each position: of the texts where they are complete, else the set of tokens."""
        return by_position(self.texts, len(self.tokens)) if self.complete else self.tokens


@dataclass(frozen=True)
class Rouge:
    """F-measures of ROUGE-1 and ROUGE-2 (Lin 2004) for each true text, (n,) each; 0 where none is left."""

    rouge1: NDArray[np.float64]
    rouge2: NDArray[np.float64]


def rouge(guesses: Sequence[str], truths: Sequence[str]) -> Rouge:
    """Scores of each truth against the guess that an optimal one-to-one assignment gives it."""
    if not truths:
        raise NotEnough("there is no true text to compare with")
    scorer = RougeScorer(["rouge1", "rouge2"])
    table = np.zeros((len(truths), len(guesses), 2))
    for i, truth in enumerate(truths):
        for j, guess in enumerate(guesses):
            score: dict[str, Any] = scorer.score(truth, guess)
            table[i, j] = score["rouge1"].fmeasure, score["rouge2"].fmeasure
    best = np.zeros((len(truths), 2))
    rows, columns = linear_sum_assignment(-table.sum(2))
    best[rows] = table[rows, columns]
    return Rouge(best[:, 0], best[:, 1])


def frequent_texts(prior: Prior, lengths: Sequence[int]) -> list[Ids]:
    """The guess without a gradient: texts of these lengths from the most frequent tokens of each position."""
    guesses = [prior.guess(s, len(lengths)) for s in range(max(lengths, default=0))]
    return [np.array([guesses[s][i] for s in range(n)], np.int64) for i, n in enumerate(lengths)]
