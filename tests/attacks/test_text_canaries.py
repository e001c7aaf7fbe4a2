"""Text canaries through the real noisy sums, with an encoder that gives every text its own random vector."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import multivariate_normal

from attacks.adversary import NotEnough
from attacks.membership import Target, clipped
from attacks.one_run import OneRunAudit
from attacks.text_canaries import Pipeline, audit_texts, random_texts, text_scores
from securefl.centroid_privacy import CentroidMechanism, nearest_seed, release_noisy_sums
from securefl.errors import SecureflError, UsageError
from securefl.privacy import LocalResult, gaussian_mu, noise_source
from securefl.release import ROW, NonPrivate

DELTA, WIDTH = 1e-5, 64
WORDS = [f"word{i}" for i in range(500)]
KNOWN = tuple(f"a row of the silo, number {i}" for i in range(200))
SEEDS = np.random.default_rng(5).standard_normal((4, WIDTH))
FOUR = CentroidMechanism(
    clip=6.0, noise_multiplier=1 / gaussian_mu(4, DELTA), count_multiplier=1e6, prediction_multiplier=1e6,
    delta=DELTA, min_size=1,
)  # fmt: skip


def embed(texts: Sequence[str]) -> NDArray[np.float64]:
    """N(0, I) by the text's checksum, norm about 8, so nearly orthogonal and above the clip of 6."""
    return np.stack([np.random.default_rng(zlib.crc32(t.encode())).standard_normal(WIDTH) for t in texts])


def silo(
    mechanism: CentroidMechanism, *, seed: int = 0, added: float = 1.0, units: tuple[str, ...] = ()
) -> Pipeline:
    """The real release. added: the share of the claimed noise that the sums get."""
    # The count noise of the claim is for `mu` alone; the release is made with little, so nothing is withheld.
    real = replace(mechanism, noise_multiplier=mechanism.noise_multiplier * added, count_multiplier=0.1)

    def pipeline(included: Sequence[str]) -> Target:
        rows = embed([*KNOWN, *included])
        local = LocalResult({"vectors": rows, "predictions": np.full((len(rows), 2), 0.5)}, len(rows))
        owners = (*units, *(f"canary {i}" for i in range(len(included)))) if units else ()
        noise = noise_source(seed)
        release, _ = release_noisy_sums(local, nearest_seed(rows, SEEDS), len(SEEDS), real, noise, {}, owners)
        sizes = np.maximum(release.tensors["sizes"].astype(float), real.min_size)
        return Target(release.tensors["centroids"].astype(float), sizes, mechanism.claim(noise), SEEDS)

    return pipeline


def exact(included: Sequence[str]) -> Target:
    """Means without noise, of the cells of the seeds."""
    rows = embed([*KNOWN, *included])
    cells = nearest_seed(rows, SEEDS)
    means = np.stack([rows[cells == k].mean(0) for k in range(len(SEEDS))])
    sizes = np.bincount(cells, minlength=len(SEEDS)).astype(float)
    return Target(means, sizes, NonPrivate(reason="a test"), SEEDS)


def audited(pipeline: Pipeline, seed: int = 0, count: int = 300, units: tuple[str, ...] = ()) -> OneRunAudit:
    canaries = random_texts(WORDS, count, np.random.default_rng(11))
    return audit_texts(pipeline, embed, canaries, KNOWN, DELTA, rng=np.random.default_rng(seed), units=units)


def test_an_honest_pipeline_shows_less_than_it_claims() -> None:
    runs = [audited(silo(FOUR, seed=seed), seed) for seed in range(5)]
    assert not any(run.violates_claim for run in runs)
    assert runs[0].claim_epsilon == pytest.approx(4, abs=1e-4)
    assert runs[0].adjacency == "add-remove"
    assert 0.3 < np.median([run.epsilon_lower_bound for run in runs]) < 4


def test_noise_that_is_missing_is_caught() -> None:
    run = audited(silo(FOUR, added=0.01))
    assert run.violates_claim
    assert run.right > 0.95 * run.guesses


def test_exact_means_give_the_canaries_away_and_a_pipeline_without_them_nothing() -> None:
    """The planted leak, and the same with the canaries left out of the run."""
    leak = audited(exact)
    assert (leak.guesses, leak.claim_mu) == (150, None)
    assert leak.right > 0.95 * leak.guesses
    assert leak.epsilon_lower_bound > 2
    nothing = audited(lambda _: exact([]))
    assert (nothing.epsilon_lower_bound, nothing.mu_lower_bound) == (0, 0)


def test_rows_of_a_unit_weigh_less_and_are_still_taken_off() -> None:
    """50 patients of four rows each; without their weights the known rows would drown the canaries."""
    units = tuple(f"patient {i // 4}" for i in range(len(KNOWN)))
    mechanism = replace(FOUR, unit="patient")
    run = audited(silo(mechanism, added=0.01, units=units), units=units)
    assert run.right > 0.95 * run.guesses
    with pytest.raises(SecureflError, match="patient"):
        audited(silo(mechanism, units=units))
    assert FOUR.unit == ROW


def test_scores_are_the_naive_log_likelihood_ratios() -> None:
    """Dense covariances, one canary taken out of each; 12 canaries and 6 dimensions are not orthogonal."""
    rng = np.random.default_rng(2)
    canaries, known = rng.standard_normal((12, 6)) * 2, rng.standard_normal((5, 6))
    mechanism = replace(FOUR, clip=3.0)
    claim = mechanism.claim(noise_source(0))
    rows, base = clipped(canaries, claim), clipped(known, claim)
    sigma = 3.0 * mechanism.noise_multiplier
    total = base.sum(0) + rows[:6].sum(0) + rng.normal(0, sigma, 6)
    found = text_scores(
        canaries, known, Target(total[None] / 11.0, np.array([11.0]), claim, np.zeros((1, 6)))
    )
    noise = (found.noise_share * sigma) ** 2 * np.eye(6)
    for j in range(12):
        rest = np.delete(rows, j, 0)
        centre, spread = base.sum(0) + rest.sum(0) / 2, noise + rest.T @ rest / 4
        out, within = (multivariate_normal(centre + b * rows[j], spread).logpdf(total) for b in (0, 1))
        assert found.scores[j] == pytest.approx(within - out, rel=1e-6)


def test_the_noise_is_estimated() -> None:
    canaries = embed(random_texts(WORDS, 40, np.random.default_rng(3)))
    for added in (0.1, 1.0):
        target = silo(FOUR, added=added)([])
        assert text_scores(canaries, embed(KNOWN), target).noise_share == pytest.approx(added, rel=0.8)


def test_canaries_of_withheld_clusters_stay_in_the_middle() -> None:
    canaries = embed(random_texts(WORDS, 100, np.random.default_rng(3)))
    whole = silo(FOUR)([])
    cells = nearest_seed(canaries, SEEDS)
    some = Target(whole.centroids[:1], whole.sizes[:1], whole.claim, SEEDS)
    scores = text_scores(canaries, embed(KNOWN), some).scores
    assert 0 < (scores == 0).sum() < len(scores)
    far = Target(whole.centroids[:1], whole.sizes[:1], whole.claim, SEEDS)
    lost = canaries[cells == int(np.bincount(cells[scores == 0]).argmax())]
    with pytest.raises(NotEnough, match="withheld"):
        text_scores(lost[:3], embed(KNOWN), far)


def test_random_texts_are_different_and_repeatable() -> None:
    first, second = (random_texts(WORDS, 1000, np.random.default_rng(4), 3) for _ in range(2))
    assert first == second
    assert len(set(first)) == 1000
    assert {len(text.split()) for text in first} == {3}
    for words, count, length in ((WORDS[:99], 10, 4), (WORDS, 9, 4), (WORDS, 10, 1), (WORDS[:100], 2000, 2)):
        with pytest.raises(UsageError):
            random_texts(words, count, np.random.default_rng(0), length)


def test_bad_input_is_refused() -> None:
    canaries = random_texts(WORDS, 20, np.random.default_rng(6))
    rng = np.random.default_rng(0)

    def run(
        texts: Sequence[str] = canaries, known: Sequence[str] = KNOWN, pipeline: Pipeline = exact
    ) -> None:
        audit_texts(pipeline, embed, texts, known, DELTA, rng=rng)

    for texts, known in ((canaries[:9], KNOWN), ((*canaries, canaries[0]), KNOWN), (canaries, ()),
                         (canaries, canaries[:1])):  # fmt: skip
        with pytest.raises(UsageError):
            run(texts, known)
    whole = exact(())
    for broken in (
        replace(whole, centroids=whole.centroids[:, :5]),
        replace(whole, centroids=np.full_like(whole.centroids, math.nan)),
        replace(whole, centroids=whole.centroids[:0], sizes=whole.sizes[:0]),
    ):
        with pytest.raises(SecureflError):
            run(pipeline=lambda _, broken=broken: broken)  # type: ignore[misc]
    with pytest.raises(SecureflError, match="all the same"):
        audit_texts(exact, lambda texts: np.ones((len(texts), 4)), canaries, KNOWN, DELTA, rng=rng)
    with pytest.raises(SecureflError, match="NaN"):
        audit_texts(exact, lambda texts: np.full((len(texts), 4), np.nan), canaries, KNOWN, DELTA, rng=rng)
