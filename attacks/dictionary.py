"""The dictionary of attack 2: what a public embedding layer gives for every token at every position.

Beside the dictionary there is what is known of it before any release is seen: how often its entries occur in
other text (`Prior`), and how they scatter (`Geometry`). A dictionary may be moved (`Moved`), where an encoder
was trained further, or be several encoders' side by side (`Stacked`), where it was released from in rounds.

This room reads weights and token ids; it touches no files, and texts only to count tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securefl.errors import ModelError
from securefl.slm import Slm

Ids = NDArray[np.int64]

_CHUNK = 2048
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


def end_ids(slm: Slm) -> Ids:
    """Ids that end a text: after one of them it has no further position."""
    ends = (slm.tokenizer.sep_token_id, slm.tokenizer.eos_token_id)
    return np.unique([i for i in ends if i is not None]).astype(np.int64)


def vocabulary_size(slm: Slm) -> int:
    """How many ids the token table has."""
    return int(slm.model.config.vocab_size)


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


class Dictionary(Protocol):
    """Vectors (M, d) of tokens `ids` (M,) at a position."""

    def at(self, position: int, ids: Tensor) -> Tensor: ...


class Layer:
    """The public embedding layer at one position for many tokens.

    Where it takes position ids (and gives with them what a whole text gives, which is checked) one position
    is computed alone; otherwise as the last one of a text of that length. Raises ModelError where a model has
    no embedding layer.
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
        return self._slm.layer({"input_ids": texts, "attention_mask": torch.ones_like(texts)}, 0)[:, -1]

    def at(self, position: int, ids: Tensor) -> Tensor:
        """(M, d) outputs for ids (M,) at a position."""
        one = self._one if self._alone else self._last
        with torch.inference_mode():
            return torch.cat([one(part, position) for part in torch.split(ids, _CHUNK)])


@dataclass(frozen=True)
class Moved:
    """A dictionary after one affine map of all its vectors: x matrix + shifts[position].

    matrix: (d, d). shifts: (S, d).
    """

    base: Dictionary
    matrix: Tensor
    shifts: Tensor

    def at(self, position: int, ids: Tensor) -> Tensor:
        return self.base.at(position, ids) @ self.matrix + self.shifts[position]


@dataclass(frozen=True)
class Stacked:
    """Several dictionaries side by side, each divided by its scale: the vectors of T releases of one text.

    A sum of k entries of it is the T sums of the same k tokens, so what one release leaves open the others
    may settle. scales: (T,), in proportion to the releases' noise.
    """

    parts: tuple[Dictionary, ...]
    scales: tuple[float, ...]

    def at(self, position: int, ids: Tensor) -> Tensor:
        pairs = zip(self.parts, self.scales, strict=True)
        return torch.cat([part.at(position, ids) / scale for part, scale in pairs], dim=1)


@dataclass
class Geometry:
    """What is known of the entries: axes and variances under the token frequencies, and means by position.

    basis: (d, d) orthonormal. variances: (d,) along it. means: (S, d) along it, of a text's vector there.
    weight: what a claim's clip leaves of a text on average. reference: (V, d) the entries of one position
    around their mean, along the axes.
    """

    basis: Tensor
    variances: Tensor
    means: Tensor
    weight: float
    reference: Tensor = field(repr=False)
    prior: Prior = field(repr=False)

    @property
    def typical(self) -> float:
        """The length of an ordinary entry around the mean."""
        return self.weight * float(self.reference.norm(dim=1).median())


def geometry(
    dictionary: Dictionary, auxiliary: Sequence[Ids], prior: Prior, positions: int, clip: float | None
) -> Geometry:
    """One position (the second) gives the axes; auxiliary text gives the mean at each of S = `positions`.

    clip: of a whole text's vectors under a claim, None without one.
    """
    reference = dictionary.at(min(1, positions - 1), torch.arange(prior.probability.shape[1]))
    share = torch.from_numpy((prior.counts + 0.02) / (prior.counts + 0.02).sum()).float()
    centred = reference - share @ reference
    covariance = (centred * share[:, None]).T @ centred
    width = len(covariance)
    covariance += 0.1 * covariance.trace() / width * torch.eye(width)
    variances, basis = torch.linalg.eigh(covariance)

    texts = list(auxiliary)[:_AUXILIARY_ROWS]
    sums = torch.zeros((positions, width))
    there, squares = torch.zeros(positions), torch.zeros(len(texts))
    for s in range(positions):
        rows = [row for row, ids in enumerate(texts) if len(ids) > s]
        if rows:
            vectors = dictionary.at(s, torch.tensor([int(texts[row][s]) for row in rows]))
            sums[s], there[s] = vectors.sum(0), len(rows)
            squares[rows] += (vectors**2).sum(1)
    fallback = sums.sum(0) / there.sum().clamp(min=1)
    means = torch.where(there[:, None] > 0, sums / there.clamp(min=1)[:, None], fallback)
    weight = 1.0
    if clip is not None and len(texts):
        weight = float((clip / squares.sqrt()).clamp(max=1.0).mean())
    return Geometry(basis, variances, means @ basis, weight, centred @ basis, prior)
