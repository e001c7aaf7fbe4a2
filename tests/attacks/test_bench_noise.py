"""Attack 3 on runs: claimed noise that is missing, or is too little, is a violation; honest noise is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, chi2

from attacks.audit import audit
from attacks.figures import NoiseRatio
from attacks.findings import Audit
from securefl.models import load_slm
from securefl.slm import Slm
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run

ROWS = tiny.make_texts(400, seed=1, length=9)


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("noise") / "encoder", width=64)
    return load_slm(str(folder), ["a", "b"], max_length=12, train_embeddings=False, seed=0)


def audited(slm: Slm, folder: Path, recipe: Recipe, rows: int = 100) -> Audit:
    used = ROWS[: rows * len(recipe.silos) + 100]
    corpus = corpus_of([text for text, _ in used], [label for _, label in used], rows, recipe)
    return audit(make_run(folder / "run", slm, corpus, recipe), attacks=frozenset({3}))


@pytest.mark.parametrize("layer", ["pooled", "embeddings"])
@pytest.mark.parametrize("noise", [0.3, 5.0])
def test_honest_noise_is_as_claimed(slm: Slm, tmp_path: Path, layer: str, noise: float) -> None:
    found = audited(slm, tmp_path, Recipe(layer=layer, noise=noise))
    sums = [f for f in found.findings if "sums" in f.target]
    assert len(sums) == 2
    assert {f.verdict for f in found.findings} == {"none_shown"}
    for f in sums:
        assert f.value == pytest.approx(1.0, abs=0.12)
        assert f.ci[0] < 1.0 < f.ci[1] or f.value == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("layer", ["pooled", "embeddings"])
def test_noise_that_is_missing_is_a_violation(slm: Slm, tmp_path: Path, layer: str) -> None:
    found = audited(slm, tmp_path, Recipe(layer=layer, clusters=4, noise=5.0, clip=2.0, fault="no noise"))
    assert {f.verdict for f in found.findings} == {"violates_claim"}
    assert {f.target.split()[1] for f in found.findings} == {"sums", "sizes"}
    assert found.verdicts.singling_out == "violates_claim"


def test_half_the_noise_is_a_violation(slm: Slm, tmp_path: Path) -> None:
    found = audited(slm, tmp_path, Recipe(noise=1.0, fault="half the noise"))
    sums = [f for f in found.findings if "sums" in f.target]
    assert {f.verdict for f in sums} == {"violates_claim"}
    assert all(f.value == pytest.approx(2.0, abs=0.3) for f in sums)


def test_a_release_about_units_or_without_noise_is_named(slm: Slm, tmp_path: Path) -> None:
    found = audited(slm, tmp_path / "units", Recipe(noise=1.0, per_unit=2))
    assert not found.findings
    assert any("clipped by patient_id" in entry.why for entry in found.not_run)
    plain = audited(slm, tmp_path / "plain", Recipe())
    assert any(entry.why == "no centroid was released with noise" for entry in plain.not_run)


def test_the_interval_is_that_of_a_sample_variance() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        drawn = rng.normal(0, 1, 50)
        low, high = NoiseRatio(float((drawn**2).sum()), 50).interval(0.05)
        held += low <= 1.0 <= high
    assert abs(held / 400 - 0.95) < 0.035
    assert NoiseRatio(0.0, 50).value == NoiseRatio(0.0, 50).interval(0.05)[0] == 1e6
    assert NoiseRatio(50.0, 50).interval(0.05)[1] == pytest.approx(np.sqrt(chi2.ppf(0.975, 50) / 50))


def test_an_honest_claim_is_accused_less_often_than_is_said() -> None:
    """Over 20,000 honest draws of few and of many numbers none, or hardly one, lies above its cap."""
    rng = np.random.default_rng(1)
    for count in (1, 3, 12, 192):
        squares = rng.chisquare(count, 20_000)
        low = np.sqrt(chi2.ppf(0.025, count) / squares)
        cap = np.sqrt(chi2.ppf(0.025, count) / chi2.ppf(1e-4, count))
        assert (low > cap).sum() <= binom.ppf(0.999, 20_000, 1e-4)
