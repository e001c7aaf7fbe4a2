"""Attack 4 on a whole pipeline: canary texts that coins put among a silo's rows, through encoder and noise.

`attacks.one_run` has the game and its bounds. Here are texts that make good canaries, and their scores from a
release of noisy sums. The game is add/remove: a text is there or not, and how many fell in is secret. This
room reads no files and no models: pipeline and encoder are callables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary import NotEnough
from attacks.bounds import ALPHA, claim_mu
from attacks.membership import Target, Vectors, assign, check_vectors, clipped
from attacks.one_run import (
    MAX_CANARIES,
    MIN_CANARIES,
    OneRunAudit,
    audit_scores,
    check_counts,
    check_delta,
    fair_coins,
    planned_guesses,
)
from securefl.errors import SecureflError, UsageError
from securefl.privacy import unit_weights
from securefl.release import ROW, GaussianSums

# Of the claimed deviation; the scores take the noise for one of these.
_SHARES: list[float] = np.geomspace(0.01, 10, 61).tolist()

Embed = Callable[[Sequence[str]], NDArray[Any]]
"""Texts -> pooled vectors (n, d) under the encoder that the pipeline uses."""
Pipeline = Callable[[Sequence[str]], Target]
"""Canary texts to include -> what one run on them and the pipeline's own rows releases."""


def random_texts(
    words: Sequence[str], count: int, rng: np.random.Generator, length: int = 4
) -> tuple[str, ...]:
    """`count` different texts of `length` words, each drawn uniformly from `words`.

    With rare words they are far from each other and from real text. Few words are better than many: a pooled
    vector is a mean over tokens, and the longer the text, the shorter the vector and the more it is like all
    others. Under MiniLM random rare words have norm 6.3 and cosine .12 in sixes, 2.8 and .27 in
    twenty-fours, and the clip from public texts is 6.5. Raises UsageError where `words` are fewer than 100 or
    too few for so many texts, or a count or length is out of range.
    """
    pool = sorted(set(words))
    if len(pool) < 100 or not all(pool):
        raise UsageError(f"canary texts are drawn from at least 100 different words, not {len(pool)}")
    if not (MIN_CANARIES <= count <= MAX_CANARIES and 2 <= length <= 64):
        raise UsageError(
            f"there can be {MIN_CANARIES} to {MAX_CANARIES:,} canary texts of 2 to 64 words, "
            f"not {count:,} of {length}"
        )
    if len(pool) ** length < 10 * count:
        raise UsageError(f"{len(pool)} words are too few for {count:,} different texts of {length}")
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[" ".join(pool[i] for i in rng.integers(0, len(pool), length))] = None
    return tuple(texts)


def audit_texts(
    pipeline: Pipeline,
    embed: Embed,
    canaries: Sequence[str],
    known: Sequence[str],
    delta: float,
    *,
    rng: np.random.Generator,
    units: Sequence[str] = (),
    guesses: int | None = None,
    alpha: float = ALPHA,
) -> OneRunAudit:
    """One run of a pipeline on its own rows and on the canary texts whose coins fell "in".

    canaries: different texts, as from `random_texts`. known: the pipeline's own rows, which the auditor has.
    The released sums, less the known rows, are a sum of canaries and noise; a canary's score is the
    log-likelihood ratio of in and out with all other coins of its cluster as Gaussian noise, so canaries need
    not be orthogonal. One whose cluster was withheld scores 0 and stays in the middle. Under MiniLM 384 texts
    show noise that is missing, but not noise that is halved, for which there is `one_run.audit_sums`.

    units: whose each known row is, where the claim's unit is not a row; every canary is a unit by itself.
    guesses: else `planned_guesses` of the claim, which no coin changes, or half of the canaries where nothing
    is claimed. The claim is the release's own (`Target.claim`), and is compared in the add/remove game
    whatever it names. rng: of the auditor, for the coins.
    Raises UsageError for texts that repeat or counts that cannot be, SecureflError for vectors or a release
    that are not finite or do not fit each other.
    """
    m = len(canaries)
    check_counts(0, 1 if guesses is None else guesses, m, alpha)
    check_delta(delta)
    if len(set(canaries)) != m or not known or set(canaries) & set(known):
        raise UsageError(
            "canary texts must differ from each other and from the known rows, of which one is needed"
        )
    vectors = check_vectors(embed(canaries), "the canary texts")
    others = check_vectors(embed(known), "the known rows")
    included = fair_coins(m, rng)
    target = pipeline([text for text, coin in zip(canaries, included.tolist(), strict=True) if coin])
    q = len(target.sizes)
    width = vectors.shape[1:]
    if vectors.shape != (m, *width) or others.shape != (len(known), *width) or len(width) != 1:
        raise SecureflError("the encoder must give one vector for every text, all of the same width")
    if target.centroids.shape != (q, *width):
        raise SecureflError("the pipeline's centroids and the encoder's vectors have different shapes")
    if not (np.isfinite(target.centroids).all() and np.isfinite(target.sizes).all() and q):
        raise SecureflError("the pipeline released nothing, or numbers that are not finite, to be audited")
    found = text_scores(vectors, others, target, units)
    claim = target.claim if isinstance(target.claim, GaussianSums) else None
    if guesses is None:
        guesses = 2 * (m // 4)
        if claim is not None:
            guesses = planned_guesses(m, claim_mu(claim, "add-remove"), delta, alpha)
    return audit_scores(found.scores, included, guesses, delta, claim=claim, alpha=alpha)


@dataclass(frozen=True)
class _Sum:
    """One cluster's canaries (indices `here`) and what its released sum holds beyond the known rows' and half
    of each canary, in the singular basis of the canaries: left (m, r), size (r,), along (r,); beside: squared
    length of the rest, in `free` dimensions. sigma: deviation of the noise on each number, as claimed.
    """

    here: NDArray[np.int64]
    left: Vectors
    size: Vectors
    along: Vectors
    beside: float
    free: int
    sigma: float

    def log_likelihood(self, share: float) -> float:
        """Of the sum, where the noise has `share` of its claimed deviation and coins are as if normal."""
        noise = (share * self.sigma) ** 2
        spread = noise + self.size**2 / 4
        fit = float((self.along**2 / spread + np.log(spread)).sum())
        return -0.5 * (fit + self.beside / noise + self.free * math.log(noise))

    def ratios(self, share: float) -> Vectors:
        """Log-likelihood ratios of the canaries."""
        strength = self.size / ((share * self.sigma) ** 2 + self.size**2 / 4)
        u, g = self.left @ (strength * self.along), self.left**2 @ (strength * self.size)
        return np.asarray(u / np.maximum(1 - g / 4, 1e-9))


@dataclass(frozen=True)
class TextScores:
    """scores: (m,) log-likelihood ratios of in and out. noise_share: the deviation that the noise seems to
    have, of the claimed one.
    """

    scores: Vectors
    noise_share: float


def text_scores(canaries: Vectors, known: Vectors, target: Target, units: Sequence[str] = ()) -> TextScores:
    """Score canaries (m, d) by a release of sums of some of them and of the known rows (n, d), all unclipped.

    With rows x_j of a cluster, sum s = known + sum_j b_j x_j + N(0, sigma^2 I) and fair b_j: for
    A = sigma^2 I + 1/4 sum_j x_j x_j^T, u_j = x_j^T A^-1 (s - E s) and g_j = x_j^T A^-1 x_j, taking x_j
    itself out of A (Sherman-Morrison) gives the ratio u_j / (1 - g_j / 4). Because it is the noise that is in
    doubt, sigma is the claim's times the factor that makes all sums most likely.
    units: as in `audit_texts`. Raises NotEnough where no canary's cluster was released.
    """
    everything = np.concatenate([known, canaries])
    cells, start = assign(everything, target, everything), len(known)
    rows = clipped(everything, target.claim)
    unit = target.claim.unit if isinstance(target.claim, GaussianSums) else ROW
    base = rows[:start] * unit_weights(units, start, unit)[:, None]
    # Without noise the sums are still uncertain by about one row: which cluster each known row fell into.
    floor = math.sqrt(float((rows[start:] ** 2).sum(1).mean()) / rows.shape[1])
    sums = []
    for cell in range(len(target.sizes)):
        here = np.flatnonzero(cells[start:] == cell)
        if not len(here):
            continue
        own = rows[start + here]
        centre = base[cells[:start] == cell].sum(0) + own.sum(0) / 2
        surplus = target.centroids[cell] * target.sizes[cell] - centre
        left, size, right = np.linalg.svd(own, full_matrices=False)
        along = right @ surplus
        beside = max(0.0, float(surplus @ surplus - along @ along))
        sigma = float(target.noise[cell] * target.sizes[cell]) or floor
        sums.append(_Sum(here, left, size, along, beside, rows.shape[1] - len(size), sigma))
    if not sums:
        raise NotEnough("the clusters of all canaries were withheld, so the audit saw none of them")
    share = max(_SHARES, key=lambda share: sum(one.log_likelihood(share) for one in sums))
    scores = np.zeros(len(canaries))
    for one in sums:
        scores[one.here] = one.ratios(share)
    return TextScores(scores, share)
