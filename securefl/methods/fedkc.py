"""FedKC's knowledge composition: clusters, their means, and the consistency loss against them.

Source: Wang et al., "FedKC: Federated Knowledge Composition for Multilingual Natural Language Understanding",
WWW 2022, doi 10.1145/3485447.3511988; equation numbers are the paper's. Sizes below: n rows, q clusters,
S positions, d numbers a vector, C labels.

Limitations. A mean over a cluster is no anonymity, whatever the minimum size: the tokens behind a mean of
embedding-layer outputs can be read back with the public token table, and the membership of a row in a pooled
mean can be tested. What may leave is decided in `privacy` and by the silo's policy, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans, MiniBatchKMeans
from torch import Tensor

from securefl.errors import NonFiniteUpdate, WrongShape
from securefl.slm import Slm

_MANY = 20_000  # rows, above which clusters are found by mini-batches


@dataclass(frozen=True, repr=False, eq=False)
class Knowledge:
    """What one silo shares: q centroids and what its model says of them. The repr shows the sizes only.

    vectors: (q, d) pooled, or (q, S, d) embedding-layer outputs. mask: None for pooled vectors, else (q, S),
    1 where a centroid has a position. predictions: (q, C), the mean probabilities of a cluster's rows.
    sizes: (q,), how many rows a cluster has (noisy under differential privacy).
    withheld: clusters below the minimum size that were dropped. For the silo's own account; it is not sent,
    and 0 in what a peer receives.
    Raises WrongShape where these shapes disagree and NonFiniteUpdate for NaN or infinity.
    """

    vectors: NDArray[np.float32]
    mask: NDArray[np.float32] | None
    predictions: NDArray[np.float32]
    sizes: NDArray[np.float32]
    withheld: int = 0

    def __post_init__(self) -> None:
        q = len(self.vectors)
        wanted = None if self.vectors.ndim == 2 else self.vectors.shape[:2]
        if self.vectors.ndim not in (2, 3) or (None if self.mask is None else self.mask.shape) != wanted:
            raise WrongShape("centroids are (q, d) without a mask or (q, S, d) with a mask (q, S)")
        if self.predictions.ndim != 2 or len(self.predictions) != q or self.sizes.shape != (q,):
            raise WrongShape("centroids, their predictions and their sizes differ in number")
        for name in ("vectors", "mask", "predictions", "sizes"):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                raise NonFiniteUpdate(f"the {name} of the centroids hold NaN or infinity")

    def __repr__(self) -> str:
        return f"Knowledge({len(self.sizes)} centroids, {self.withheld} withheld)"

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The arrays under the names that they have in a release."""
        found = {"centroids": self.vectors, "predictions": self.predictions, "sizes": self.sizes}
        return found if self.mask is None else {**found, "mask": self.mask}


def cluster(pooled: NDArray[np.floating[Any]], clusters: int, seed: int) -> NDArray[np.int64]:
    """KMeans labels (n,) of the pooled vectors (n, d): at most `clusters`, and no more than distinct rows.

    The paper clusters on the pooled vector for every choice of layer, since S x d numbers are too many. Of
    more than 20,000 rows by mini-batches (Sculley, WWW 2010), which is nearly as good and much faster.
    """
    if len(pooled) == 0:
        return np.zeros(0, np.int64)
    seen: set[bytes] = set()
    for row in np.ascontiguousarray(pooled):
        seen.add(row.tobytes())
        if len(seen) == clusters:
            break
    if len(pooled) > _MANY:
        means: KMeans | MiniBatchKMeans = MiniBatchKMeans(len(seen), n_init=3, random_state=seed)
        return np.asarray(means.fit_predict(pooled), np.int64)
    means = KMeans(len(seen), n_init=4, random_state=seed)
    return np.asarray(means.fit_predict(np.asarray(pooled, np.float64)), np.int64)


def compose(
    vectors: NDArray[np.floating[Any]],
    mask: NDArray[np.floating[Any]] | None,
    predictions: NDArray[np.floating[Any]],
    assignment: NDArray[np.int64],
    min_size: int,
) -> tuple[Knowledge, list[NDArray[np.int64]]]:
    """The means of eq. (6) in each cluster, and the row indices behind each, in the same order.

    vectors: (n, d), or (n, S, d) with `mask` (n, S) of 0 and 1. predictions: (n, C). assignment: (n,), a
    cluster's number for every row. Clusters of fewer than `min_size` rows are withheld: dropped and counted.

    The paper does not say how texts of different length are averaged. Here a centroid's position is the mean
    over those texts of the cluster that have the position, and its mask has the positions present in any of
    them; a position in none is zero.
    """
    groups = [np.flatnonzero(assignment == c) for c in np.unique(assignment)]
    kept = [rows for rows in groups if len(rows) >= min_size]
    q = len(kept)
    centroids = np.zeros((q, *vectors.shape[1:]), np.float32)
    masks = None if mask is None else np.zeros((q, mask.shape[1]), np.float32)
    means = np.zeros((q, predictions.shape[1]), np.float32)
    for c, rows in enumerate(kept):
        means[c] = predictions[rows].mean(0, dtype=np.float64)
        if mask is None or masks is None:
            centroids[c] = vectors[rows].mean(0, dtype=np.float64)
            continue
        present = mask[rows].astype(np.float64)
        total = np.einsum("ns,nsd->sd", present, vectors[rows].astype(np.float64))
        centroids[c] = total / np.maximum(present.sum(0), 1)[:, None]
        masks[c] = present.any(0)
    sizes = np.array([len(rows) for rows in kept], np.float32)
    return Knowledge(centroids, masks, means, sizes, len(groups) - q), kept


def _cluster_weights(knowledge: Knowledge, weights: Literal["uniform", "size"]) -> NDArray[np.float64]:
    """(q,), summing to 1. Noisy sizes can be negative; they then count as 0, and as equal if all are."""
    q = len(knowledge.sizes)
    sizes = np.maximum(knowledge.sizes.astype(np.float64), 0)
    if weights == "uniform" or sizes.sum() <= 0:
        return np.full(q, 1 / q)
    shares: NDArray[np.float64] = sizes / sizes.sum()
    return shares


class Composition:
    """The centroids of several silos as one consistency loss, equation (8).

    The loss is the mean over silos m of sum_c a_c CE( yhat_c^m, f(e_c^m; w_i) ). f is the part of a model
    above the composed layer: the head for pooled vectors, the encoder from a layer on for its outputs.
    a_c = 1/q ("uniform", the paper's) or |C_c| / n_m ("size", the exact expansion of eq. (3)). Centroids and
    predictions are constants: the gradient reaches the weights w_i alone. The paper sums over silos; the mean
    keeps alpha's meaning when their number changes.
    """

    def __init__(
        self, knowledge: Sequence[Knowledge], weights: Literal["uniform", "size"], layer: int | None = None
    ) -> None:
        """layer: whose outputs the centroids average, 0 for the embedding layer; None for pooled vectors.

        Raises WrongShape for knowledge that does not fit its fellows, or the layer.
        """
        given = [part for part in knowledge if len(part.sizes)]
        self.layer = layer
        self.count = sum(len(part.sizes) for part in given)
        if not given:
            return
        shapes = {(part.vectors.shape[1:], part.predictions.shape[1]) for part in given}
        if len(shapes) > 1 or given[0].vectors.ndim != (2 if layer is None else 3):
            raise WrongShape(
                "the centroids of two silos, or their predictions and their layer, differ in shape"
            )
        self._vectors = np.concatenate([part.vectors for part in given]).astype(np.float32)
        self._targets = np.concatenate([part.predictions for part in given]).astype(np.float32)
        self._masks: NDArray[np.float32] | None = None
        if layer is not None:
            masks = [part.mask for part in given if part.mask is not None]
            # A position that no centroid has would be computed for nothing.
            length = max(1, max(int(np.flatnonzero(mask.any(0)).max(initial=0)) + 1 for mask in masks))
            self._masks = np.concatenate(masks).astype(np.float32)[:, :length]
            self._vectors = self._vectors[:, :length]
        # Every centroid carries its weight within its silo.
        self._weights = np.concatenate([_cluster_weights(part, weights) / len(given) for part in given])

    def loss(self, slm: Slm, most: int | None = None, rng: np.random.Generator | None = None) -> Tensor:
        """A scalar; 0 without any centroid. Raises WrongShape where the centroids do not fit `slm`.

        most: of more centroids than that, so many are drawn by `rng` without replacement, and their mean
        scaled so that its expectation is the loss over all.
        """
        if not self.count:
            return torch.zeros((), device=slm.device)
        if self._targets.shape[1] != len(slm.labels):
            raise WrongShape(
                f"the centroids' predictions are not over the {len(slm.labels)} labels of {slm.name}"
            )
        if self.layer is None and self._vectors.shape[1] != slm.width:
            raise WrongShape(
                f"pooled centroids of {self._vectors.shape[1]} numbers do not fit {slm.name}, of {slm.width}"
            )
        chosen: NDArray[np.int64] | slice = slice(None)
        scale = 1.0
        if most is not None and most < self.count:
            assert rng is not None
            chosen = rng.choice(self.count, most, replace=False)
            scale = self.count / most

        def constant(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array[chosen], np.float32)).to(slm.device)

        pooled = constant(self._vectors)
        if self.layer is not None:
            assert self._masks is not None
            pooled = slm.from_layer(pooled, constant(self._masks), self.layer)
        cross_entropies = -(constant(self._targets) * slm.head(pooled).log_softmax(-1)).sum(-1)
        return scale * (constant(self._weights) * cross_entropies).sum()
