"""Attack 4 on runs: exact releases give canaries away, noise hides them, missing noise is found out."""

from __future__ import annotations

import string
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from attacks.audit import audit
from attacks.audit_opening import audit_summary
from attacks.audit_words import verdict_of
from attacks.bench import canaries
from attacks.findings import Audit, Finding, Verdicts
from securefl.models import load_slm
from securefl.privacy import gaussian_epsilon
from securefl.report.page import epsilon
from securefl.slm import Slm
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run, silence

RNG = np.random.default_rng(0)
WORDS = tuple("".join(RNG.choice(list(string.ascii_lowercase), 6)) for _ in range(240))


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("canaries") / "encoder", width=64, vocabulary=WORDS)
    return load_slm(str(folder), ["a", "b"], max_length=10, train_embeddings=False, seed=0)


def _audited(slm: Slm, folder: Path, recipe: Recipe, words: tuple[str, ...] = WORDS) -> Audit:
    texts = [" ".join(RNG.choice(words, 8)) for _ in range(160)]
    corpus = corpus_of(texts, ["a", "b"] * 80, 30, recipe)
    return audit(make_run(folder / "run", slm, corpus, recipe), attacks=frozenset({4}))


def _finding(found: Audit) -> Finding:
    (one,) = (finding for finding in found.findings if finding.number == 4)
    return one


def test_an_exact_release_gives_the_canaries_away(slm: Slm, tmp_path: Path) -> None:
    found = _finding(_audited(slm, tmp_path, Recipe(clusters=6)))
    assert (found.verdict, found.cap, found.claim_epsilon) == ("leaks", None, None)
    assert not found.claim_compared
    assert verdict_of(found).text == "leaks"
    assert found.epsilon_lower_bound is not None
    assert found.epsilon_lower_bound > 1
    assert found.trials <= canaries.TEXTS == found.details["canaries"]


def test_noise_hides_them_and_its_absence_breaks_the_claim(slm: Slm, tmp_path: Path) -> None:
    recipe = Recipe(clusters=6, noise=2.0)
    honest = _finding(_audited(slm, tmp_path / "honest", recipe))
    assert honest.verdict != "violates_claim"
    assert honest.details["mu_lower_bound"] <= honest.details["claim_mu"]
    assert honest.claim_compared
    told = verdict_of(honest.model_copy(update={"verdict": "leaks"}))
    assert told.text == "leaks, claim held"
    leaking = honest.model_copy(update={"verdict": "leaks", "epsilon_lower_bound": 0.25})
    claimed = gaussian_epsilon(honest.details["claim_mu"], 1e-5)
    leaks = Verdicts(singling_out="leaks", linkability="leaks", inference="none_shown")
    again = _audited(slm, tmp_path / "again", recipe)
    words = audit_summary([("run", again.model_copy(update={"findings": [leaking], "verdicts": leaks}))])
    assert f"proves ε 0.25 of the claimed {epsilon(claimed)}" in words
    with patch.object(canaries, "noise_source", lambda _seed: silence()):
        broken = _finding(_audited(slm, tmp_path / "broken", recipe))
    assert broken.verdict == "violates_claim"
    assert broken.details["mu_lower_bound"] > broken.details["claim_mu"]


def test_a_release_about_units_is_made_again_too(slm: Slm, tmp_path: Path) -> None:
    """Every canary is a unit by itself."""
    found = _finding(_audited(slm, tmp_path, Recipe(clusters=6, noise=2.0, per_unit=3)))
    assert found.details["canaries"] == canaries.TEXTS
    assert found.verdict != "violates_claim"


def test_too_few_words_are_no_score(slm: Slm, tmp_path: Path) -> None:
    found = _audited(slm, tmp_path, Recipe(clusters=2), WORDS[:60])
    assert not [one for one in found.findings if one.number == 4]
    (why,) = (one.why for one in found.not_run if one.attack == canaries.NAME)
    assert "at least 100 different words" in why


def test_two_audits_agree(slm: Slm, tmp_path: Path) -> None:
    _audited(slm, tmp_path, Recipe(clusters=3))
    first, second = (audit(tmp_path / "run", attacks=frozenset({1, 4, 8})) for _ in range(2))
    assert first.to_json() == second.to_json()
