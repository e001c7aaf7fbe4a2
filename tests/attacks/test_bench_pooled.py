"""Attacks 5, 6, 7, 8 and 13 on whole run folders: what exact centroids give away, and caps of noised ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from attacks import bench
from attacks.attack import Attack
from attacks.bench import pool, probes, rounds, subtraction
from attacks.evidence import Evidence
from attacks.figures import Figure
from attacks.findings import ALL_SILOS
from attacks.judgement import Book
from attacks.runs import Run
from attacks.vector_cache import VectorCache
from securefl.models import load_slm
from securefl.privacy import gaussian_epsilon
from securefl.slm import Slm
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run

ROWS = tiny.make_texts(700, seed=1, length=9)


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("pooled") / "encoder", width=64)
    return load_slm(str(folder), ["a", "b"], max_length=12, train_embeddings=False, seed=0)


def run_of(slm: Slm, folder: Path, recipe: Recipe, rows: int = 40, pool_rows: int = 400) -> Evidence:
    used = ROWS[: rows * len(recipe.silos) + pool_rows]
    corpus = corpus_of([text for text, _ in used], [label for _, label in used], rows, recipe)
    return Evidence(Run(make_run(folder / "run", slm, corpus, recipe)))


@pytest.fixture(scope="module")
def exact(slm: Slm, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return run_of(slm, tmp_path_factory.mktemp("exact"), Recipe(clusters=6, rounds=2))


@pytest.fixture(scope="module")
def noised(slm: Slm, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return run_of(slm, tmp_path_factory.mktemp("noised"), Recipe(clusters=3, noise=1.0, rounds=2))


def found_by(attack: Attack, evidence: Evidence) -> Book:
    book = Book(show_text=True)
    assert attack.missing(evidence) is None
    attack.run(evidence, book, lambda *_: None)
    return book


def of(book: Book, name: str, metric: str) -> list[Figure]:
    return [f for f in book.figures if f.attack == name and f.metric == metric]


def test_a_pool_gives_up_every_row_of_exact_clusters(exact: Evidence) -> None:
    book = found_by(bench.pool.ATTACK, exact)
    together = of(book, pool.TOGETHER, "recall")
    assert [(f.silo, f.round) for f in together] == [
        ("silo-1", 2),
        ("silo-2", 2),
        ("silo-1", 3),
        ("silo-2", 3),
    ]
    for f in together:
        assert f.measure.value > 0.9 > 0.4 > f.baseline
        assert f.control is not None
        assert f.control < 0.5
        assert f.verdict(0.05) == "leaks"
        assert f.details["certain_centroids"] >= 4
        # What is named first is named with certainty: the silo's own texts, nobody else's.
        assert set(f.texts[:10]) <= set(exact.source.rows(f.silo).texts)
    ranking = of(book, pool.RANKING, "recall")
    assert all(f.measure.value > f.baseline for f in ranking)


def test_a_pool_on_disk_gives_up_the_same(
    exact: Evidence, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path))
    monkeypatch.setattr("attacks.evidence.VectorCache", partial(VectorCache, in_memory=0))
    on_disk = found_by(bench.pool.ATTACK, Evidence(exact.source)).figures
    assert (tmp_path / "securefl").is_dir()
    in_memory = found_by(bench.pool.ATTACK, exact).figures
    assert [f.measure for f in on_disk] == [f.measure for f in in_memory]
    assert [f.texts for f in on_disk] == [f.texts for f in in_memory]


def test_texts_are_counted_unless_they_are_asked_for(exact: Evidence) -> None:
    book = Book()
    bench.pool.ATTACK.run(exact, book, lambda *_: None)
    assert all(not f.texts for f in book.figures)
    assert {f.details["texts_withheld"] for f in of(book, pool.TOGETHER, "recall")} == {20}


def test_search_of_noised_centroids_stays_below_its_cap(noised: Evidence) -> None:
    book = found_by(bench.pool.ATTACK, noised)
    mu = np.sqrt(4.25)  # of multipliers 1, 1, 2 under replace-one
    for f in of(book, pool.RANKING, "recall"):
        k, size = f.details["chosen"], f.details["pool"]
        assert f.cap == pytest.approx(norm.cdf(norm.ppf(k / (size - k)) + mu), abs=0.02)
        assert f.verdict(0.05) != "violates_claim"
    assert book.figures
    # The claim in the attack's game, as attack 1 states it: more than what it is of a row there or not.
    for f in book.figures:
        assert f.details["claim_epsilon_replace_one"] == pytest.approx(gaussian_epsilon(mu, 1e-5))


def test_two_rounds_tell_more_than_one_and_a_row_that_leaves_is_found(exact: Evidence) -> None:
    book = found_by(bench.rounds.ATTACK, exact)
    summed = of(book, rounds.OVER_ROUNDS, "auc")
    assert [(f.silo, f.round, f.details["rounds"]) for f in summed] == [("silo-1", 3, 2), ("silo-2", 3, 2)]
    assert all(f.measure.value > 0.75 and f.cap is None for f in summed)
    (left,) = of(book, rounds.LEFT, "auc")
    # An exact difference is the row, but for the rounding of float32.
    assert left.measure.value == 1.0
    assert left.control is not None
    assert 0.2 < left.control < 0.8


def test_rounds_compose_in_the_cap(noised: Evidence) -> None:
    book = found_by(bench.rounds.ATTACK, noised)
    for f in of(book, rounds.OVER_ROUNDS, "auc"):
        assert f.cap == pytest.approx(norm.cdf(np.sqrt(2 * 4.25) / np.sqrt(2)), abs=0.02)
        assert f.verdict(0.05) != "violates_claim"
    for f in of(book, rounds.LEFT, "auc"):
        assert f.cap == pytest.approx(norm.cdf(np.sqrt(4.25) / np.sqrt(2)), abs=0.02)
        assert f.verdict(0.05) != "violates_claim"


def test_one_round_is_not_several(slm: Slm, tmp_path: Path) -> None:
    book = found_by(bench.rounds.ATTACK, run_of(slm, tmp_path, Recipe(clusters=6)))
    assert [entry.attack for entry in book.not_run] == [rounds.OVER_ROUNDS] * 2
    assert "one round only" in book.not_run[0].why


def test_a_sum_of_two_silos_hides_little_and_one_silo_has_no_sum(exact: Evidence) -> None:
    (f,) = of(found_by(bench.subtraction.ATTACK, exact), subtraction.NAME, "auc")
    # All 40 rows of the other silo are one sum here, so a row is harder to find than in its own cluster.
    assert 0.55 < f.measure.value < 0.95
    assert "less silo-1's part" in f.target
    alone = Evidence(exact.source)
    alone.__dict__["targets"] = tuple(one for one in exact.targets if one.silo == "silo-1")
    assert "nothing to subtract" in str(bench.subtraction.ATTACK.missing(alone))


def test_a_noised_sum_has_the_other_silos_claim(noised: Evidence) -> None:
    (f,) = of(found_by(bench.subtraction.ATTACK, noised), subtraction.NAME, "auc")
    assert f.cap == pytest.approx(norm.cdf(np.sqrt(4.25) / np.sqrt(2)), abs=0.02)
    # Cluster by cluster only where every silo released all three, so that they are the same ones.
    shared = [noised.source.open(r) for r in noised.targets if r.row.round == 3]
    assert f.details["by_cluster"] is all(len(r.tensors["sizes"]) == 3 for r in shared)


def test_the_bag_probe_is_compared_with_the_frequencies_and_with_strangers(exact: Evidence) -> None:
    book = found_by(bench.probes.BAG_ATTACK, exact)
    f1 = of(book, probes.BAG_NAME, "token_f1")
    assert [f.round for f in f1] == [3, 3]  # each silo's last release
    for f in f1:
        assert 0 < f.baseline < 1
        assert f.control is not None
        assert f.measure.value >= f.baseline - 0.1
        assert f.cap is None


def test_the_label_behind_pure_clusters_is_read(slm: Slm, tmp_path: Path) -> None:
    """Texts of two labels that share no word: every cluster of such texts is of one label."""
    words = {"a": ROWS[0][0].split(), "b": ROWS[1][0].split()}
    rng = np.random.default_rng(0)
    labels = ["a" if i % 2 else "b" for i in range(480)]
    texts = [" ".join(rng.choice(words[label], 8)) for label in labels]
    recipe = Recipe(clusters=12)
    corpus = corpus_of(texts, labels, 60, recipe)
    evidence = Evidence(Run(make_run(tmp_path / "run", slm, corpus, recipe)))
    book = found_by(bench.probes.ATTRIBUTE_ATTACK, evidence)
    (accuracy,) = of(book, probes.ATTRIBUTE_NAME, "accuracy")
    assert accuracy.measure.value > 0.8 > accuracy.baseline + 0.1
    assert accuracy.silo == ALL_SILOS
    for f in of(book, probes.ATTRIBUTE_NAME, "auc"):
        assert f.measure.value > 0.9
        assert f.control is not None
        assert f.control < 0.85
