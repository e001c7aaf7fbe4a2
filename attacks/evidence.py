"""What the attacks on a run work on: its centroid releases with their encoders, the truth, and other text.

What an attack may see is what its adversary sees; the truth is there to score it, to choose control rows with
the members' labels, and to check that a release is what the run says. This room knows no attack.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attacks.adversary import NotEnough
from attacks.runs import CENTROIDS, Recorded, Run, Texts, open_recorded
from securefl.errors import ProtocolError
from securefl.models import Slm
from securefl.release import GaussianSums, NonPrivate, PayloadKind, Release
from securefl.training import embed

# Auxiliary rows below which no covariance is worth estimating.
MIN_AUXILIARY = 16
# Bytes of pooled vectors kept over all encoders, so that the next attack need not embed the texts again.
_KEPT = 1 << 30


def split_pool(pool: Texts, seed: int) -> tuple[Texts, Texts]:
    """Two halves of the pool with the same labels: auxiliary text of the adversary, and control rows."""
    order = np.random.default_rng([seed, 1]).permutation(len(pool))
    ranked = sorted(order.tolist(), key=lambda row: pool.labels[row])
    return pool.take(ranked[::2]), pool.take(ranked[1::2])


@dataclass(frozen=True, repr=False)
class Scene:
    """One centroid release with everything that its attacks need.

    auxiliary and controls are disjoint parts of the pool. groups: indices into `rows` behind each centroid.
    """

    recorded: Recorded
    release: Release
    rows: Texts
    groups: list[list[int]]
    auxiliary: Texts
    controls: Texts
    index: int
    evidence: Evidence

    @property
    def slm(self) -> Slm:
        """The encoder that the release names."""
        return self.evidence.run.encoder(self.recorded, self.release)

    @property
    def members(self) -> list[int]:
        return [row for group in self.groups for row in group]

    @property
    def where(self) -> str:
        return f"{self.recorded.silo}, round {self.recorded.row.round}"

    def rng(self, attack: int) -> np.random.Generator:
        """The generator of an attack, by its number, on this release."""
        return np.random.default_rng([self.evidence.run.result.seed, 2, self.index, attack])

    def pooled(self, texts: Texts) -> NDArray[np.float64]:
        """(n, d) vectors of texts under the release's encoder."""
        return self.evidence.pooled(self, texts)


class Evidence:
    """A run as its attacks see it. Nothing is loaded before it is asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._vectors: OrderedDict[str, dict[str, NDArray[np.float32]]] = OrderedDict()

    @cached_property
    def targets(self) -> tuple[Recorded, ...]:
        """The centroid releases by round, since all silos of a round have the same encoder."""
        found = (one for one in self.run.releases if one.row.kind in CENTROIDS)
        return tuple(sorted(found, key=lambda one: (one.row.round, one.silo)))

    @cached_property
    def _pool(self) -> tuple[Texts, Texts]:
        return split_pool(self.run.pool, self.run.result.seed)

    def scenes(self, kind: PayloadKind) -> Iterator[tuple[Recorded, Scene | NotEnough]]:
        """Every centroid release of a kind, with its scene or why there is none.

        Raises ProtocolError for a release that is malformed or not what the run says.
        """
        for index, one in enumerate(self.targets):
            if one.row.kind == kind.value:
                try:
                    yield one, self._scene(one, index)
                except NotEnough as why:
                    yield one, why

    def _scene(self, one: Recorded, index: int) -> Scene:
        release = open_recorded(one)
        if not isinstance(release.claim, NonPrivate | GaussianSums):
            raise ProtocolError(
                f"{one.path}: {release.claim.mechanism} is no mechanism that releases centroids"
            )
        count = _check_arrays(one, release)
        if not count:
            raise NotEnough("every cluster was withheld, so there is no centroid to attack")
        auxiliary, controls = self._pool
        if len(auxiliary) < MIN_AUXILIARY:
            raise NotEnough(
                f"{len(auxiliary)} auxiliary rows in truth/pool.jsonl, at least {MIN_AUXILIARY} are needed"
            )
        groups = self.run.clusters(one, count)
        return Scene(one, release, self.run.rows(one.silo), groups, auxiliary, controls, index, self)

    def pooled(self, scene: Scene, texts: Texts) -> NDArray[np.float64]:
        """(n, d) in the order of `texts`, embedded once for each encoder as long as there is room."""
        name = str(scene.release.info["encoder"])
        known = self._vectors.setdefault(name, {})
        self._vectors.move_to_end(name)
        missing = [text for text in dict.fromkeys(texts.texts) if text not in known]
        if missing:
            known.update(zip(missing, embed(scene.slm, missing, "pooled"), strict=True))
        found = np.array([known[text] for text in texts.texts], np.float64)
        while len(self._vectors) > 1 and self._bytes() > _KEPT:
            self._vectors.popitem(last=False)
        return found

    def _bytes(self) -> int:
        return sum(len(one) * next(iter(one.values())).nbytes for one in self._vectors.values() if one)


def _check_arrays(one: Recorded, release: Release) -> int:
    """The number of centroids, once their arrays are those of such a release: shapes, and finite numbers."""
    layered = release.kind is PayloadKind.EMBEDDING_CENTROIDS
    axes = {"centroids": 3 if layered else 2, "sizes": 1, "predictions": 2}
    if layered:
        axes["mask"] = 2
    if not set(axes) <= set(release.tensors):
        raise ProtocolError(f"{one.path}: lacks {sorted(set(axes) - set(release.tensors))[0]}")
    arrays = {name: release.tensors[name] for name in axes}
    count = len(arrays["sizes"]) if arrays["sizes"].ndim == 1 else -1
    for name, array in arrays.items():
        if array.ndim != axes[name] or len(array) != count or not np.isfinite(array).all():
            raise ProtocolError(f"{one.path}: {name}: is not a finite array with one entry for each centroid")
    if layered and arrays["mask"].shape != arrays["centroids"].shape[:2]:
        raise ProtocolError(f"{one.path}: mask: does not fit the centroids")
    if (arrays["sizes"] <= 0).any():
        raise ProtocolError(f"{one.path}: sizes: a centroid of no rows cannot have been released")
    return count


def check_truth(scene: Scene, vectors: NDArray[np.floating], mask: NDArray[np.floating] | None) -> None:
    """Exact centroids must be the means of the rows that the truth names, under the encoder at hand.

    vectors: (n, d) of the silo's rows, or (n, S, d) with mask (n, S). Raises ProtocolError.
    """
    centroids = scene.release.tensors["centroids"]
    if centroids.shape[1:] != vectors.shape[1:]:
        raise ProtocolError(f"{scene.recorded.path}: centroids: are not of the width of the encoder it names")
    if not isinstance(scene.release.claim, NonPrivate):
        return
    for index, (group, size) in enumerate(zip(scene.groups, scene.release.tensors["sizes"], strict=True)):
        if len(group) != size:
            raise ProtocolError(
                f"{scene.recorded.path}: centroid {index} states {size:g} rows, "
                f"the truth names {len(group)} for it"
            )
        if mask is None:
            mean = vectors[group].mean(0)
        else:
            there = np.maximum(mask[group].sum(0), 1)[:, None]
            mean = (vectors[group] * mask[group][..., None]).sum(0) / there
        if np.abs(centroids[index] - mean).max() > 1e-2 * np.abs(mean).max():
            raise ProtocolError(
                f"{scene.recorded.path}: centroid {index} is not the mean of the rows that the truth names "
                "for it under this encoder, so a score would mean nothing"
            )


def label_ids(texts: Texts, names: Mapping[str, int]) -> NDArray[np.int64]:
    """(n,) numbers of the labels; -1 for one that is not among `names`."""
    return np.array([names.get(label, -1) for label in texts.labels], np.int64)
