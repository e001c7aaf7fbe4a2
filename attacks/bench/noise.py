"""Attack 3 as it is put to a run: is the noise that is claimed on sums and sizes there at all?

The auditor has the rows behind each centroid, so what is left of a released sum without them is the noise
itself. Its size is a sample variance: too small, and the claim is false whatever the other attacks find, as
they take the claimed noise for real. Whether the mechanism's code is right is for `attacks.mechanism`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from attacks.adversary import NOISE, NotEnough
from attacks.attack import Attack, Progress, each_scene
from attacks.bounds import ALPHA
from attacks.evidence import Evidence, Scene, check_truth
from attacks.figures import Figure, NoiseRatio, at
from attacks.judgement import Book
from securefl.centroid_privacy import clip_rows
from securefl.release import ROW, GaussianSums, PayloadKind
from securefl.training import embed

NAME = "noise of a release"
# Every noised release of an audit is tested; an honest one lies above its cap less often than this.
_FALSE_ALARM = 1e-4
_KINDS = (PayloadKind.CENTROIDS, PayloadKind.EMBEDDING_CENTROIDS)


def _noised(evidence: Evidence) -> Iterator[str]:
    mechanism = GaussianSums.model_fields["mechanism"].default
    return (one.row.kind for one in evidence.targets if one.row.claim.get("mechanism") == mechanism)


def _missing(evidence: Evidence) -> str | None:
    return None if any(_noised(evidence)) else "no centroid was released with noise"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    kinds = set(_noised(evidence))
    for kind in _KINDS:
        if kind.value in kinds:
            each_scene(3, NAME, kind, _attack)(evidence, book, say)


def _attack(scene: Scene, book: Book) -> None:
    claim = scene.release.claim
    if not isinstance(claim, GaussianSums):
        raise NotEnough("it was released without noise")
    if claim.unit != ROW:
        raise NotEnough(f"rows were clipped by {claim.unit}, and which rows are of one is not recorded")
    if not scene.members:
        raise NotEnough("no row is behind a centroid that was released")
    rows, mask = _vectors(scene)
    check_truth(scene, rows, mask)
    flat = rows.reshape(len(rows), -1)
    sums = np.stack([clip_rows(flat[group], claim.clip).sum(0) for group in scene.groups])
    tensors = scene.release.tensors
    centroids = tensors["centroids"].astype(np.float64).reshape(len(sums), -1)
    left = centroids * tensors["sizes"].astype(np.float64)[:, None] - sums
    if mask is not None:
        # Positions that no public length reaches are not released.
        left = left[:, np.repeat(tensors["mask"].max(0) > 0, rows.shape[-1])]
    unit = claim.clip * claim.noise_multiplier
    book.figures.append(_figure(scene, claim, f"the sums behind {len(sums)} centroids", left / unit))
    sizes, true = tensors["sizes"].astype(np.float64), np.array([len(group) for group in scene.groups])
    # A small cluster is released only if its noisy count is not too small, so its noise is not a Gaussian's.
    whole = true >= sizes.min() + 4 * claim.count_multiplier
    if whole.any():
        noise = (sizes - true)[whole] / claim.count_multiplier
        book.figures.append(_figure(scene, claim, f"the sizes of {len(noise)} centroids", noise))


def _figure(scene: Scene, claim: GaussianSums, target: str, noise: NDArray[np.float64]) -> Figure:
    """noise: what is on each number, over its claimed standard deviation."""
    count = int(noise.size)
    # The lower end of an interval is above this with probability `_FALSE_ALARM`, where the claim holds.
    cap = math.sqrt(float(chi2.ppf(ALPHA / 2, count) / chi2.ppf(_FALSE_ALARM, count)))
    return Figure(
        attack=NAME,
        number=3,
        adversary=NOISE,
        target=target,
        metric="noise_claimed_over_found",
        measure=NoiseRatio(float((noise**2).sum()), count),
        baseline=cap,
        cap=cap,
        bears_on=("singling_out", "linkability"),
        details={"claimed": 1.0},
        **at(scene.recorded, claim),
    )


def _vectors(scene: Scene) -> tuple[NDArray[np.float64], NDArray[np.float32] | None]:
    if scene.release.kind is PayloadKind.CENTROIDS:
        return scene.pooled(scene.rows), None
    vectors, mask = embed(scene.slm, scene.rows.texts, "embeddings")
    return vectors.astype(np.float64), mask


ATTACK = Attack(3, NAME, NOISE, _missing, _run)
