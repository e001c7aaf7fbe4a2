"""Mechanisms with a fault planted in them, and what catches each: the auditor's proof that it can find one.

Most faults are of the noised sums, and `mechanism.audit_mechanism` sees them. Which centroids are released at
all is another output, which the sums do not show, so it has an attack of its own here. None of this is ever
run on a silo's rows; nothing outside the self-test and its tests may import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attacks.bounds import Confusion, gaussian_mu_lower_bound
from attacks.mechanism import MechanismAudit, Noising, audit_mechanism, released_sums
from securefl.centroid_privacy import CentroidMechanism, release_noisy_sums
from securefl.privacy import LocalResult, Noise
from securefl.release import Adjacency

Rows = NDArray[np.float64]
Cells = NDArray[np.int64]

DELTA = 1e-5
# The closest of the faults, a tenth too little noise, has mu 1.85 for a claimed 1.67; this many trials a side
# tell them apart.
TRIALS = 20_000


# --- faults of the sums


def sigma_for(wrong: Callable[[float, CentroidMechanism], float]) -> Noising:
    """The real release with `wrong(sigma, mechanism)` as the standard deviation of the noise on the sums."""

    def noised(rows: Rows, cells: Cells, q: int, mechanism: CentroidMechanism, noise: Noise) -> Rows:
        sigma = wrong(mechanism.clip * mechanism.noise_multiplier, mechanism)
        return released_sums(
            rows, cells, q, replace(mechanism, noise_multiplier=sigma / mechanism.clip), noise
        )

    return noised


def clipped_by(clip: Callable[[Rows, float], Rows]) -> Noising:
    """Noise as it should be, and `clip(rows, C)` in place of the clipping."""

    def noised(rows: Rows, cells: Cells, q: int, mechanism: CentroidMechanism, noise: Noise) -> Rows:
        open_wide = replace(
            mechanism, clip=mechanism.clip * 1e3, noise_multiplier=mechanism.noise_multiplier / 1e3
        )
        return released_sums(clip(rows, mechanism.clip), cells, q, open_wide, noise)

    return noised


def one_draw_a_sum(rows: Rows, cells: Cells, q: int, mechanism: CentroidMechanism, noise: Noise) -> Rows:
    """One number of noise for all coordinates of a sum."""
    bare = released_sums(rows, cells, q, replace(mechanism, noise_multiplier=1e-9), noise)
    sigma = mechanism.clip * mechanism.noise_multiplier
    return np.asarray(bare + noise.draw().normal(0, sigma, (q, 1)))


deaf: Noising = clipped_by(lambda rows, _: 0 * rows)
"""Not a fault: noise alone, a release that tells nothing of any row."""


def repeated(key: int) -> Noise:
    """The same noise in every release: a generator that is made anew from `key` each time."""
    return Noise(lambda: np.random.Generator(np.random.Philox(key)), "the same for every release", True)


SEED = 7
"""A seed that anyone may know."""


@dataclass(frozen=True)
class Fault:
    """A mechanism of sums that is not what it claims. noise: makes the noise from an honest source."""

    noise_multiplier: float
    noising: Noising = released_sums
    clip: float = 1.0
    adjacency: Adjacency = "add-remove"
    noise: Callable[[Noise], Noise] = lambda honest: honest

    def audit(self, noise: Noise, rng: np.random.Generator, trials: int = TRIALS) -> MechanismAudit:
        """Attack 3 on it. noise: an honest source. rng: of the auditor."""
        return audit_mechanism(
            self.noise_multiplier, self.clip, DELTA, trials, noise=self.noise(noise), rng=rng,
            adjacency=self.adjacency, noising=self.noising,
        )  # fmt: skip


def _kept(honest: Noise) -> Noise:
    """Noise that is drawn once and kept for all rounds."""
    return repeated(int(honest.draw().integers(2**63)))


SUMS: Mapping[str, Fault] = {
    "noise for half the sensitivity": Fault(1.0, sigma_for(lambda s, _: s / 2)),
    "noise of a tenth too little": Fault(0.6, sigma_for(lambda s, _: 0.9 * s)),
    "noise not scaled by the clip": Fault(1.0, sigma_for(lambda _, m: m.noise_multiplier), clip=4.0),
    "sigma squared for sigma": Fault(0.7, sigma_for(lambda s, _: s**2)),
    "its root for sigma": Fault(2.0, sigma_for(lambda s, _: math.sqrt(s))),
    # A calibration for a row that comes or goes has half the noise that exchanging one needs.
    "replace-one claimed from add/remove": Fault(2.0, sigma_for(lambda s, _: s / 2), adjacency="replace-one"),
    "no clip": Fault(3.73, clipped_by(lambda rows, _: rows)),
    "each coordinate clipped": Fault(3.73, clipped_by(lambda rows, c: np.clip(rows, -c, c))),
    "clipped by the largest coordinate": Fault(
        3.73, clipped_by(lambda rows, c: rows / np.maximum(1, np.abs(rows).max(1, keepdims=True) / c))
    ),
    "noise taken from a seed": Fault(3.73, noise=lambda _: repeated(SEED)),
    "noise reused across rounds": Fault(3.73, noise=_kept),
    "one draw for all coordinates": Fault(3.73, one_draw_a_sum),
}
"""Each is called violating at TRIALS trials a side, and its bound on epsilon lies above its claim."""


# --- faults of which centroids are released

Keeping = Callable[[Cells, int, CentroidMechanism, Noise], Cells]
"""(cluster of each row (n,), clusters q, mechanism, noise) -> the clusters whose centroid is released."""


def kept_by_release(cells: Cells, clusters: int, mechanism: CentroidMechanism, noise: Noise) -> Cells:
    """What `release_noisy_sums` keeps."""
    local = LocalResult(
        {"vectors": np.ones((len(cells), 2)), "predictions": np.full((len(cells), 2), 0.5)}, len(cells)
    )
    return release_noisy_sums(local, cells, clusters, mechanism, noise, {})[1]


def empty_skipped(cells: Cells, _clusters: int, mechanism: CentroidMechanism, noise: Noise) -> Cells:
    """Clusters without a row get no noise, and so are never released."""
    filled, own = np.unique(cells, return_inverse=True)
    return np.asarray(filled[kept_by_release(own.astype(np.int64), len(filled), mechanism, noise)])


def true_count(cells: Cells, clusters: int, mechanism: CentroidMechanism, _noise: Noise) -> Cells:
    """The count without its noise decides."""
    return np.flatnonzero(np.bincount(cells, minlength=clusters) >= mechanism.min_size).astype(np.int64)


@dataclass(frozen=True)
class Presence:
    """What a centroid's being there tells of one row: the bound on mu holds at 95 %, claim_mu is that of the
    noise on the counts, on which alone the decision may rest."""

    mu_lower_bound: float
    claim_mu: float

    @property
    def violates_claim(self) -> bool:
        return self.mu_lower_bound > self.claim_mu


def audit_presence(
    keeping: Keeping, rows: int, noise: Noise, *, count_multiplier: float = 2.0, trials: int = 2000
) -> Presence:
    """Attack the decision to release a centroid: is the cluster's last row there or not?

    Every trial is a cluster of `rows` rows, or of one more, which is then just the minimum size; it is called
    the larger one where its centroid is released. No threshold is chosen, so all trials count.
    """
    mechanism = CentroidMechanism(1.0, 1.0, count_multiplier, 1.0, DELTA, rows + 1)

    def seen(size: int) -> int:
        # One more cluster that is never empty, so that there are rows at all.
        cells = np.repeat(np.arange(trials + 1), [size] * trials + [100]).astype(np.int64)
        return int((keeping(cells, trials + 1, mechanism, noise) < trials).sum())

    errors = Confusion(fp=seen(rows), n0=trials, fn=trials - seen(rows + 1), n1=trials)
    return Presence(gaussian_mu_lower_bound(errors), 1 / count_multiplier)


PRESENCE: Mapping[str, tuple[Keeping, int]] = {
    "empty clusters skipped": (empty_skipped, 0),
    "true count used for suppression": (true_count, 9),
}
"""What is faulty, and the rows of a cluster at which `audit_presence` sees it."""
