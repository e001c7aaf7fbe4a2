"""Attack 7: what does a peer learn of the others' rows from an aggregate that holds its own part?

The peer takes its own part off the sum and runs attack 1 on what is left: the pooled centroids of all other
silos' rows, with the noise that all of them added together. The more silos, the more rows share a centroid;
of two silos an aggregate hides nothing from either.
Pure functions on arrays; nothing here reads files or text.

What cannot be identified, and is refused: which silo a row is from (the parts of several others are one sum
here); a mean over more than two silos in which every silo weighs the same, since a row then weighs by the
unknown size of its silo; sums without counts; and clusters that are no public partition, as k-means of every
silo's own rows, whose numbers mean something else in each silo: sum those over all clusters first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attacks import membership
from attacks.adversary import NotEnough
from attacks.membership import Scores, Target, Vectors, check_rows, check_vectors
from securefl.centroid_privacy import centroid_mu
from securefl.errors import SecureflError
from securefl.privacy import gaussian_epsilon
from securefl.release import Claim, GaussianSums, NonPrivate

# Auxiliary rows of the clusters that are left which the background is fitted to, where some are not: they are
# copied, 96 MiB of 384 numbers, and estimate its covariance to within a hundredth.
_MOST_COPIED = 2**16


@dataclass(frozen=True)
class Part:
    """Sums (q, d) and counts (q,) of the rows of one silo, or of several, per cluster."""

    sums: Vectors
    counts: Vectors

    def __post_init__(self) -> None:
        if self.sums.ndim != 2 or self.counts.shape != (len(self.sums),):
            raise SecureflError("an aggregate needs sums (q, d) and one count for each of the q clusters")
        if not (np.isfinite(self.sums).all() and np.isfinite(self.counts).all()):
            raise SecureflError("the sums or counts of an aggregate hold NaN or infinity")

    def pooled(self) -> Part:
        """All clusters as one: what is left to attack where no public partition says which is which."""
        return Part(self.sums.sum(0, keepdims=True), self.counts.sum(keepdims=True))


def part_of_means(centroids: Vectors, counts: Vectors) -> Part:
    """The part behind size-weighted means (q, d) of `counts` (q,) rows.

    counts: noisy under a claim, and then the divisor that was really used, so that the sum is the noisy sum.
    """
    return Part(np.asarray(centroids, np.float64) * np.asarray(counts, np.float64)[:, None], counts)


def part_of_uniform_mean(means: Vectors, counts: Vectors, silos: int, own: Part) -> Part:
    """The part behind means (q, d) over silos that all weigh the same, `counts` (q,) being those of all rows.

    Raises NotEnough for more than two silos: the other ones' sizes would have to be known.
    """
    if silos != 2:
        raise NotEnough(
            f"in a mean over {silos} silos that weigh the same a row counts by the unknown size of its silo, "
            "so the sum of the others' rows cannot be told"
        )
    if not (own.counts > 0).all():
        raise NotEnough("without a row of one's own in a cluster its mean over the silos is not identified")
    others = 2 * np.asarray(means, np.float64) - own.sums / own.counts[:, None]
    return Part(own.sums + others * (counts - own.counts)[:, None], counts)


def combined_claim(claims: Sequence[Claim]) -> Claim:
    """The claim that the noises on several parts make together on their sum.

    claims: one for each noise that is in the sum: of every other silo, or a single one where the sum itself
    was noised. Independent Gaussian noises add in squares; a multiplier is over what one unit adds, which is
    at most the common clip. So it holds for whoever sees the sum and no single part, as long as every silo
    drew its noise: each silo's own claim, which needs no other silo's, is weaker.

    Raises NotEnough where it is not one mechanism: without a claim, for parts of which some are noised and
    some are not, and for other clips, units or mechanisms.
    """
    noised = [claim for claim in claims if isinstance(claim, GaussianSums)]
    exact = [claim for claim in claims if isinstance(claim, NonPrivate)]
    if not claims or len(noised) + len(exact) != len(claims):
        raise NotEnough("every other silo's part needs the claim of its release of centroids")
    if not noised:
        return exact[0]
    first = noised[0]
    if exact or any((one.clip, one.unit, one.adjacency) != _terms(first) for one in noised):
        raise NotEnough("the other silos' parts differ in clip, unit or adjacency, or some have no noise")

    def together(multipliers: Iterable[float]) -> float:
        return math.sqrt(sum(each**2 for each in multipliers))

    sums = together(one.noise_multiplier for one in noised)
    counts = together(one.count_multiplier for one in noised)
    predictions = together(one.prediction_multiplier for one in noised)
    mu = centroid_mu(sums, counts, predictions, first.adjacency)
    delta = min(one.delta for one in noised)
    return GaussianSums(
        epsilon=gaussian_epsilon(mu, delta),
        delta=delta,
        mu=mu,
        clip=first.clip,
        noise_multiplier=sums,
        count_multiplier=counts,
        prediction_multiplier=predictions,
        unit=first.unit,
        adjacency=first.adjacency,
        generator=", ".join(sorted({one.generator for one in noised})),
        simulated=any(one.simulated for one in noised),
    )


def _terms(claim: GaussianSums) -> tuple[float, str, str]:
    return claim.clip, claim.unit, claim.adjacency


@dataclass(frozen=True)
class Left:
    """What remains of an aggregate. target: the clusters in which others have rows; kept: (p,) their numbers
    among the q of the aggregate. seeds: (q, d) of all clusters, or None for a single one."""

    target: Target
    kept: NDArray[np.int64]
    seeds: Vectors | None


def subtract(total: Part, own: Part, others: Sequence[Claim], seeds: Vectors | None = None) -> Left:
    """Take one's own part (exactly as it went into the sum, own noise included) off the total.

    others: the claims of all other parts (see `combined_claim`). seeds: (q, d) public points by which every
    silo assigned its rows. A cluster in which the others have no row, or fewer than one by a noisy count, is
    dropped. Raises NotEnough where none is left, or clusters are several without seeds; SecureflError where
    `own` cannot have been a part of `total`.
    """
    if total.sums.shape != own.sums.shape:
        raise SecureflError("one's own part has other clusters or vectors than the aggregate")
    if seeds is None and len(total.counts) > 1:
        raise NotEnough(
            f"{len(total.counts)} clusters without public seeds are not the same ones in every silo; "
            "pool them into one"
        )
    if seeds is not None and seeds.shape != total.sums.shape:
        raise SecureflError("the public seeds are not one for each cluster of the aggregate")
    claim = combined_claim(others)
    counts, sums = total.counts - own.counts, total.sums - own.sums
    if not isinstance(claim, GaussianSums):
        counts = np.rint(counts)
        if (counts < 0).any():
            raise SecureflError("one's own part has more rows than the aggregate, so it is no part of it")
    kept = np.flatnonzero(counts >= 1)
    if not len(kept):
        raise NotEnough("nothing of other silos is left in the aggregate")
    target = Target(
        sums[kept] / counts[kept, None], counts[kept], claim, None if seeds is None else seeds[kept]
    )
    return Left(target, kept, seeds)


def attack(
    left: Left,
    auxiliary: NDArray[np.floating],
    members: NDArray[np.floating],
    controls: NDArray[np.floating],
    rng: np.random.Generator,
) -> Scores:
    """Attack 1 on what is left: members (n1, d) are rows of the other silos, controls (n0, d) of nobody.

    One's own rows make a second set of controls: they were in the aggregate and are in it no more.
    auxiliary: (m, d), array or memory map. Candidates of a cluster that is not left have no score, so a side
    may come back empty. Raises NotEnough where fewer than two auxiliary rows are of the clusters left,
    SecureflError as `membership.attack`.
    """
    check_rows(auxiliary, "the auxiliary text")
    sides = [check_vectors(members, "the other silos' rows"), check_vectors(controls, "the control rows")]
    if left.seeds is not None and len(left.kept) < len(left.seeds):
        # Which seeds are left is known here, so nothing has to be matched as for a withheld centroid.
        whole = replace(left.target, centroids=left.seeds, sizes=np.ones(len(left.seeds)), seeds=left.seeds)
        found = np.flatnonzero(np.isin(membership.assign(auxiliary, whole, auxiliary), left.kept))
        if len(found) > _MOST_COPIED:
            found = np.sort(rng.choice(found, _MOST_COPIED, replace=False))
        auxiliary = auxiliary[found]
        sides = [rows[np.isin(membership.assign(rows, whole, rows), left.kept)] for rows in sides]
    if len(auxiliary) < 2:
        raise NotEnough("fewer than two auxiliary rows are of the clusters that are left")
    return membership.attack(left.target, auxiliary, sides[0], sides[1], rng)
