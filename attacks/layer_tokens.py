"""Attack 2 at a deeper layer: tokens behind a mean of the outputs of encoder layer p.

There a token's vector depends on its whole text, so no dictionary holds it. What can be learnt from other
text is where the vectors of a token lie: around a linear image of its embedding, moved by what its own
occurrences say (the fewer, the less), and scattered by its contexts with a covariance that is estimated on
texts held out. In axes where that scatter is 1 in every direction this is a dictionary that is off by 1, and
the search of attack 2 reads sums of it (`tokens.recover` with `slack`). At p = 0 it is the dictionary itself.

For single texts there is a second way, the nearest vector of any context in other text (`nearest`).
This room reads a model and texts that are nobody's; it touches no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.adversary import NotEnough
from attacks.dictionary import Dictionary, Ids, Layer, Prior, token_ids, vocabulary_size
from attacks.tokens import Recovered, Target, recover
from securefl.slm import Slm

_LEAST_TEXTS = 64
_HELD_OUT = 0.25
# Occurrences of a token that weigh as much as the linear image of its embedding.
_TRUST = 4.0
_RIDGE = 1e-3


@dataclass(frozen=True)
class Learnt:
    """Where the vectors of every token lie at a layer, in axes where they scatter by 1 in every direction.

    base: embeddings. matrix: (d, d), shifts: (S, d), the linear image of an embedding at a position. offsets:
    (V, d), how far each token lies from it. whitening: (d, d) from the layer's outputs to these axes.
    """

    base: Dictionary
    matrix: Tensor
    shifts: Tensor
    offsets: Tensor
    whitening: Tensor

    def at(self, position: int, ids: Tensor) -> Tensor:
        return self.base.at(position, ids) @ self.matrix + self.shifts[position] + self.offsets[ids]


def learn(
    slm: Slm, auxiliary: Sequence[str], vectors: NDArray[np.float32], mask: NDArray[np.float32]
) -> Learnt:
    """Fit on other text: vectors (n, S, d) and mask (n, S) of `training.embed` for these n texts.

    Raises NotEnough for fewer than 64 texts.
    """
    if len(auxiliary) < _LEAST_TEXTS:
        raise NotEnough(f"{len(auxiliary)} auxiliary texts; a layer is learnt from at least {_LEAST_TEXTS}")
    base, positions = Layer(slm, vectors.shape[1]), vectors.shape[1]
    row, place = np.nonzero(mask)
    ids = np.concatenate([one[:positions] for one in token_ids(slm, auxiliary)])
    outputs = torch.from_numpy(vectors[row, place])
    inputs = torch.empty_like(outputs)
    for s in range(positions):
        here = np.flatnonzero(place == s)
        if len(here):
            inputs[here] = base.at(s, torch.from_numpy(ids[here]))
    token, where = torch.from_numpy(ids), torch.from_numpy(place)
    fitted = torch.from_numpy(row < len(auxiliary) * (1 - _HELD_OUT))
    part = _fit(inputs[fitted], outputs[fitted], token[fitted], where[fitted], positions, slm)
    rest = ~fitted
    off = outputs[rest] - (inputs[rest] @ part.matrix + part.shifts[where[rest]] + part.offsets[token[rest]])
    covariance = (off.T @ off).double() / len(off)
    # A floor keeps directions apart in which nothing scatters, as all do at layer 0.
    covariance += max(1e-8, 1e-4 * float(covariance.trace()) / len(covariance)) * torch.eye(len(covariance))
    values, axes = torch.linalg.eigh(covariance)
    whitening = (axes / values.sqrt()).float()
    whole = _fit(inputs, outputs, token, where, positions, slm)
    return Learnt(
        base, whole.matrix @ whitening, whole.shifts @ whitening, whole.offsets @ whitening, whitening
    )


@dataclass(frozen=True)
class _Fit:
    matrix: Tensor
    shifts: Tensor
    offsets: Tensor


def _fit(inputs: Tensor, outputs: Tensor, token: Tensor, where: Tensor, positions: int, slm: Slm) -> _Fit:
    width = inputs.shape[1]
    counts = torch.zeros(positions).index_add_(0, where, torch.ones(len(where)))
    means = [
        torch.zeros((positions, width)).index_add_(0, where, values) / counts.clamp(min=1)[:, None]
        for values in (inputs, outputs)
    ]
    x, y = inputs - means[0][where], outputs - means[1][where]
    square = x.T @ x
    matrix = torch.linalg.solve(square + _RIDGE * square.trace() / width * torch.eye(width), x.T @ y)
    rest = y - x @ matrix
    vocabulary = vocabulary_size(slm)
    often = torch.zeros(vocabulary).index_add_(0, token, torch.ones(len(token)))
    offsets = torch.zeros((vocabulary, width)).index_add_(0, token, rest) / (often + _TRUST)[:, None]
    return _Fit(matrix, means[1] - means[0] @ matrix, offsets)


def recover_layer(
    slm: Slm, target: Target, prior: Prior, auxiliary: Sequence[str], learnt: Learnt
) -> Recovered:
    """Read the tokens behind exact means (q, S, d) of a layer's outputs. `certain` is then never more than a
    guess. Raises NotEnough under a claim: its noise would have to be learnt with the scatter."""
    if target.private:
        raise NotEnough("the attack on deeper layers reads exact means; this release is noised")
    turned = target.centroids @ learnt.whitening.numpy()
    return recover(slm, replace(target, centroids=turned), prior, auxiliary, dictionary=learnt, slack=1.0)


def nearest(
    target: Target,
    learnt: Learnt,
    vectors: NDArray[np.float32],
    mask: NDArray[np.float32],
    texts: Sequence[Ids],
) -> list[list[Ids]]:
    """[text][position] the token of the nearest vector of other text, for centroids of single texts.

    vectors, mask, texts: of the auxiliary text, as `training.embed` and `token_ids` give them. Raises
    NotEnough for centroids of several texts, which are near to no single one.
    """
    if (target.sizes > 1).any():
        raise NotEnough("the nearest context is that of a single text; these centroids are of several")
    contexts = torch.from_numpy(vectors[mask > 0]) @ learnt.whitening
    ids = np.concatenate(list(texts))
    length = 0.5 * (contexts**2).sum(1)
    out = []
    for centroid, there in zip(target.centroids, target.mask, strict=True):
        turned = torch.from_numpy(np.ascontiguousarray(centroid)) @ learnt.whitening
        best = (turned @ contexts.T - length).argmax(1).numpy()
        read = ids[best]
        out.append([read[s : s + 1] if there[s] else read[:0] for s in range(len(read))])
    return out
