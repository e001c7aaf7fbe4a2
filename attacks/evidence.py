"""What the attacks work on: centroid releases with their encoders, the truth, and other text.

What an attack may see is what its adversary sees; the truth is there to score it, to choose control rows with
the members' labels, and to check that a release is what the run says. This room knows no attack.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from attacks.adversary import NotEnough
from attacks.elsewhere import SILO
from attacks.findings import Overlap
from attacks.noise_found import explain, left_over
from attacks.runs import CENTROIDS, Recorded, Run, Texts
from attacks.vector_cache import VectorCache
from securefl.config import Config
from securefl.errors import ProtocolError
from securefl.release import ROW, GaussianSums, NonPrivate, PayloadKind, Release
from securefl.slm import Slm

# Auxiliary rows below which no covariance is worth estimating.
MIN_AUXILIARY = 16
# Rows of each label that are among some of many, where it has as many: a probe learns no value of fewer.
_OF_EACH_LABEL = 16
# Bytes of pooled vectors kept over all encoders, so that the next attack need not embed the texts again.
_KEPT = 1 << 30


class Source(Protocol):
    """Where releases come from: a run's folder (`attacks.runs.Run`) or elsewhere (`attacks.elsewhere`)."""

    @property
    def name(self) -> str:
        """What the audit calls it."""

    @property
    def title(self) -> str:
        """What a reader knows it by."""

    @property
    def method(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def config(self) -> Config | None:
        """The configuration that made the releases; None where it is not known."""

    @property
    def releases(self) -> Sequence[Recorded]: ...

    @property
    def pool(self) -> Texts:
        """Texts that are nobody's, without those that overlap with a silo's."""

    @property
    def truth(self) -> bool:
        """Whether the rows behind the releases are known."""

    @property
    def overlap(self) -> Overlap:
        """How much of the pool was left out, because it overlaps with a silo's rows."""

    def open(self, recorded: Recorded) -> Release: ...

    def rows(self, silo: str) -> Texts:
        """The rows that a silo trained on, or that are behind what it released."""

    def clusters(self, recorded: Recorded, count: int) -> list[list[int]]:
        """For each of `count` centroids the indices (into `rows`) of the rows behind it."""

    def encoder(self, recorded: Recorded, release: Release) -> Slm:
        """The model that a release was made with."""

    def embed(self, slm: Slm, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, d) what a text's vector is before it is averaged."""


def split_pool(pool: Texts, seed: int) -> tuple[Texts, Texts]:
    """Two halves of the pool with the same labels: auxiliary text of the adversary, and control rows."""
    order = np.random.default_rng([seed, 1]).permutation(len(pool))
    ranked = sorted(order.tolist(), key=lambda row: pool.labels[row])
    return pool.take(ranked[::2]), pool.take(ranked[1::2])


def some_of(texts: Texts, most: int, seed: int) -> Texts:
    """All texts, or `most` of them drawn at random, in their order; of every label some, if there is room.

    With the same seed a larger part holds a smaller one, so that no text is embedded for one of them alone.
    """
    if len(texts) <= most:
        return texts
    first: list[int] = []
    others: list[int] = []
    seen: Counter[str] = Counter()
    for row in np.random.default_rng([seed, 3]).permutation(len(texts)).tolist():
        label = texts.labels[row]
        (first if seen[label] < _OF_EACH_LABEL else others).append(row)
        seen[label] += 1
    return texts.take(sorted([*first, *others][:most]))


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
        return self.evidence.source.encoder(self.recorded, self.release)

    @property
    def layer(self) -> int:
        """The encoder layer whose outputs were averaged, 0 for the embedding layer (and pooled vectors)."""
        composed = self.release.info.get("compose")
        return composed if type(composed) is int else 0

    @property
    def members(self) -> list[int]:
        return [row for group in self.groups for row in group]

    @property
    def where(self) -> str:
        return f"{self.recorded.silo}, round {self.recorded.row.round}"

    def rng(self, attack: int) -> np.random.Generator:
        """The generator of an attack, by its number, on this release."""
        return np.random.default_rng([self.evidence.source.seed, 2, self.index, attack])

    def vectors(self, texts: Texts) -> NDArray[np.float32]:
        """(n, d) vectors of texts under the release's encoder, see `Evidence.vectors`.

        Those of a pool may be on disk: read them in chunks, or ask for `some_auxiliary` only.
        """
        return self.evidence.vectors(self, texts)

    def own_vectors(self) -> NDArray[np.float32]:
        """(n, d) vectors of the silo's rows. Raises ProtocolError where the release is not of them: see
        `check_truth`. Every attack on pooled centroids asks for them before it scores anything."""
        vectors = self.vectors(self.rows)
        check_truth(self, vectors, None)
        return vectors

    def some_auxiliary(self, most: int) -> Texts:
        """At most so many auxiliary rows, the same ones in every round: see `some_of`."""
        return some_of(self.auxiliary, most, self.evidence.source.seed)


class Evidence:
    """Releases as their attacks see them. Nothing is loaded before it is asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._caches: OrderedDict[str, VectorCache] = OrderedDict()

    @cached_property
    def targets(self) -> tuple[Recorded, ...]:
        """The centroid releases by round, since all silos of a round have the same encoder."""
        found = (one for one in self.source.releases if one.row.kind in CENTROIDS)
        return tuple(sorted(found, key=lambda one: (one.row.round, one.silo)))

    @property
    def run(self) -> Run | None:
        """The run, for attacks on what only a run has: models, sums, the code that made a release."""
        return self.source if isinstance(self.source, Run) else None

    @cached_property
    def halves(self) -> tuple[Texts, Texts]:
        """The pool as auxiliary text of the adversary, and control rows."""
        return split_pool(self.source.pool, self.source.seed)

    def scenes(self, kind: PayloadKind) -> Iterator[tuple[Recorded, Scene | NotEnough]]:
        """Every centroid release of a kind, with its scene or why there is none.

        Raises ProtocolError for a release that is malformed or not what the run says.
        """
        for index, one in enumerate(self.targets):
            if one.row.kind == kind.value and not self.source.truth:
                yield one, NotEnough("the rows behind it were not given, so what is read cannot be scored")
            elif one.row.kind == kind.value:
                try:
                    yield one, self._scene(one, index)
                except NotEnough as why:
                    yield one, why

    def blind(self, one: Recorded) -> Scene:
        """A release whose rows are not known; all of the pool is auxiliary text. Raises NotEnough."""
        scene = self._scene(one, self.targets.index(one))
        nobody = self.source.pool.take([])
        return replace(scene, auxiliary=self.source.pool, controls=nobody)

    def _scene(self, one: Recorded, index: int) -> Scene:
        release = self.source.open(one)
        if not isinstance(release.claim, NonPrivate | GaussianSums):
            raise ProtocolError(
                f"{one.path}: {release.claim.mechanism} is no mechanism that releases centroids"
            )
        count = _check_arrays(one, release)
        if not count:
            raise NotEnough("every cluster was withheld, so there is no centroid to attack")
        auxiliary, controls = self.halves
        if len(auxiliary) < MIN_AUXILIARY:
            raise NotEnough(
                f"{len(auxiliary)} auxiliary rows in the pool, at least {MIN_AUXILIARY} are needed"
            )
        groups: list[list[int]] = [[] for _ in range(count)]
        rows = Texts((), (), ())
        if self.source.truth:
            groups, rows = self.source.clusters(one, count), self.source.rows(one.silo)
        return Scene(one, release, rows, groups, auxiliary, controls, index, self)

    @property
    def overlap(self) -> Overlap | None:
        """Of the pool, where an attack has read it."""
        return self.source.overlap if "halves" in self.__dict__ else None

    def vectors(self, scene: Scene, texts: Texts) -> NDArray[np.float32]:
        """(n, d) in the order of `texts`, read-only, and a memory map of a file where they are many.

        Each text is embedded once for each encoder as long as there is room. Raises UsageError where the disk
        has none.
        """
        name = str(scene.release.info["encoder"])
        cache = self._caches.setdefault(name, VectorCache())
        self._caches.move_to_end(name)
        found = cache.take(texts.texts, lambda some: self.source.embed(scene.slm, some))
        while len(self._caches) > 1 and sum(one.nbytes for one in self._caches.values()) > _KEPT:
            self._caches.popitem(last=False)
        return found


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
        _check_noised(scene, vectors, mask)
        return
    for index, (group, size) in enumerate(zip(scene.groups, scene.release.tensors["sizes"], strict=True)):
        if len(group) != size:
            raise ProtocolError(
                f"{scene.recorded.path}: centroid {index + 1} states {size:g} rows, "
                f"the truth names {len(group)} for it{_hint(scene, '--group')}"
            )
        if mask is None:
            mean = vectors[group].mean(0, dtype=np.float64)
        else:
            there = np.maximum(mask[group].sum(0), 1)[:, None]
            mean = (vectors[group] * mask[group][..., None]).sum(0, dtype=np.float64) / there
        if np.abs(centroids[index] - mean).max() > 1e-2 * np.abs(mean).max():
            raise ProtocolError(
                f"{scene.recorded.path}: centroid {index + 1} is not the mean of the rows that the truth "
                "names for it under this encoder, so a score would mean nothing"
                f"{_hint(scene, '--encoder, --normalised, --max-length, --group')}"
            )


def _hint(scene: Scene, options: str) -> str:
    """What a run's folder knows by itself, and who brings vectors from elsewhere has to say."""
    return f"; check {options}" if scene.evidence.source.method == SILO else ""


def _check_noised(scene: Scene, vectors: NDArray[np.floating], mask: NDArray[np.floating] | None) -> None:
    """Noised sums of rows must be as near to those of the rows that the truth names as their noise is.

    Sums that are nearer, or of rows that were not clipped, are for the attacks to find. Rows of a unit are
    clipped together, which is not done again here.
    """
    claim, tensors = scene.release.claim, scene.release.tensors
    if not isinstance(claim, GaussianSums) or claim.unit != ROW or not scene.members:
        return
    found = left_over(
        claim, vectors, mask, scene.groups, tensors["centroids"], tensors["sizes"], tensors.get("mask")
    )
    if explain(found) is None:
        raise ProtocolError(
            f"{scene.recorded.path}: the centroids are {min(one.ratio for one in found):.1f} times as far "
            "from the rows that the truth names as their noise is, so this is another encoder, or other "
            "rows; a score would mean nothing"
        )


def label_ids(texts: Texts, names: Mapping[str, int]) -> NDArray[np.int64]:
    """(n,) numbers of the labels; -1 for one that is not among `names`."""
    return np.array([names.get(label, -1) for label in texts.labels], np.int64)
