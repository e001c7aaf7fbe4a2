"""Attack 3 as it is put to a run: is the noise that is claimed on sums and sizes there at all?

The auditor has the rows behind each centroid, so what is left of a released sum without them is the noise
itself (`attacks.noise_found`). Too little of it, anywhere, and the claim is false whatever the other attacks
find, as they take the claimed noise for real. Whether the mechanism's code is right is for
`attacks.mechanism`. Noise that is used again in another round is not looked for here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from attacks.adversary import NOISE, NotEnough
from attacks.attack import Attack, Progress, each_scene
from attacks.bounds import ALPHA
from attacks.evidence import Evidence, Scene, check_truth
from attacks.figures import Distance, Figure, Measure, NoiseRatio, at
from attacks.judgement import Book
from attacks.noise_found import CLAIMED, FALSE_ALARM, Left, explain, least, left_over, shape_distance
from securefl.release import ROW, GaussianSums, PayloadKind
from securefl.training import embed

NAME = "noise of a release"
RATIO = "noise_claimed_over_found"
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
    if not scene.members:
        raise NotEnough("no row is behind a centroid that was released")
    rows, mask = _vectors(scene)
    check_truth(scene, rows, mask)
    tensors = scene.release.tensors
    found = left_over(
        claim, rows, mask, scene.groups, tensors["centroids"], tensors["sizes"], tensors.get("mask")
    )
    left = explain(found)
    if claim.unit != ROW:
        # How rows of a unit were clipped together is not known; that no noise is there shows all the same.
        left = next((one for one in found if one.too_little), None)
        if left is None:
            raise NotEnough(f"rows were clipped by {claim.unit}, and which rows are of one is not recorded")
    assert left is not None  # `check_truth` has refused it
    book.figures += _of_sums(scene, claim, left)
    sizes, true = tensors["sizes"].astype(np.float64), np.array([len(group) for group in scene.groups])
    # A small cluster is released only if its noisy count is not too small, so its noise is not a Gaussian's.
    whole = true >= sizes.min() + 4 * claim.count_multiplier
    if whole.any():
        noise = (sizes - true)[whole] / claim.count_multiplier
        book.figures.append(_figure(scene, claim, f"the sizes of {len(noise)} centroids", noise, {}))


def _of_sums(scene: Scene, claim: GaussianSums, left: Left) -> list[Figure]:
    """The size of the noise, and what is wrong with it besides: the parts that have too little, its law."""
    count, noise = len(left.noise), left.noise
    target = f"the sums behind {count} centroids"
    if left.how != CLAIMED:
        # A row that was not clipped moves the sum further than the claim says, by so many clips.
        target += f", which are {left.how}"
    parts, distance = least(noise), shape_distance(noise)
    details = {part.what: round(part.ratio, 3) for part in parts} | {"distance_to_a_gaussian": distance}
    figures = [_figure(scene, claim, target, noise / left.sensitivity, details)]
    for part in parts if left.how == CLAIMED else ():
        if part.too_little:
            cap = _cap(part.count, part.tests)
            measure = NoiseRatio(part.squares, part.count)
            figures.append(_made(scene, claim, f"{target}: {part.what}", measure, RATIO, cap))
    edge = _edge(noise.size)
    if distance > edge:
        measure_of = Distance(distance, noise.size)
        figures.append(
            _made(scene, claim, target, measure_of, "distance_to_a_gaussian", edge - measure_of.half(ALPHA))
        )
    return figures


def _edge(count: int) -> float:
    """Above which no honest noise lies, but with probability `FALSE_ALARM` (Dvoretzky-Kiefer-Wolfowitz)."""
    return Distance(0.0, count).half(FALSE_ALARM)


def _cap(count: int, tests: int = 1) -> float:
    """The lower end of an interval is above this with probability `FALSE_ALARM`, where the claim holds."""
    return math.sqrt(float(chi2.ppf(ALPHA / 2, count) / chi2.ppf(FALSE_ALARM / tests, count)))


def _figure(
    scene: Scene, claim: GaussianSums, target: str, noise: NDArray[np.float64], details: dict[str, Any]
) -> Figure:
    """noise: what is on each number, over its claimed standard deviation."""
    measure = NoiseRatio(float((noise**2).sum()), int(noise.size))
    return _made(scene, claim, target, measure, RATIO, _cap(measure.trials), **details)


def _made(
    scene: Scene, claim: GaussianSums, target: str, measure: Measure, metric: str, cap: float, **details: Any
) -> Figure:
    return Figure(
        attack=NAME,
        number=3,
        adversary=NOISE,
        target=target,
        metric=metric,
        measure=measure,
        baseline=cap,
        cap=cap,
        bears_on=("singling_out",),
        details={"claimed": 1.0 if metric == RATIO else 0.0, **details},
        **at(scene.recorded, claim),
    )


def _vectors(scene: Scene) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    if scene.release.kind is PayloadKind.CENTROIDS:
        return scene.vectors(scene.rows), None
    return embed(scene.slm, scene.rows.texts, scene.layer)


ATTACK = Attack(3, NAME, NOISE, _missing, _run)
