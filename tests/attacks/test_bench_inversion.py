"""Attacks 9 and 10 on whole run folders: small exact clusters give words away, drowned ones nothing."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from attacks.attack import Attack
from attacks.bench import decoder, inversion, zero_shot
from attacks.evidence import Evidence, Scene
from attacks.figures import Figure
from attacks.judgement import Book
from attacks.runs import Run
from attacks.token_scores import overlap
from securefl.models import load_slm
from securefl.release import PayloadKind
from securefl.slm import Slm
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run

BUDGET = 400
RNG = np.random.default_rng(0)
ROWS = [" ".join(RNG.choice(tiny.WORDS[:60], int(RNG.integers(4, 8)), False)) for _ in range(500)]


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("inverted") / "encoder", width=64, layers=1)
    return load_slm(str(folder), ["a", "b"], max_length=12, train_embeddings=False, seed=0)


def run_of(slm: Slm, folder: Path, recipe: Recipe, pool_rows: int = 400, rows: int = 24) -> Evidence:
    used = ROWS[: rows * len(recipe.silos) + pool_rows]
    corpus = corpus_of(used, ["a", "b"] * (len(used) // 2), rows, recipe)
    return Evidence(Run(make_run(folder / "run", slm, corpus, recipe)))


@pytest.fixture(scope="module")
def exact(slm: Slm, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Twelve clusters of two rows in each silo."""
    return run_of(slm, tmp_path_factory.mktemp("exact"), Recipe(clusters=12, random_groups=True))


@pytest.fixture(scope="module")
def single(slm: Slm, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Every row by itself."""
    recipe = Recipe(clusters=24, random_groups=True, min_size=1)
    return run_of(slm, tmp_path_factory.mktemp("single"), recipe)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "BUDGET", BUDGET)
    monkeypatch.setattr(inversion, "BUDGET", BUDGET)
    monkeypatch.setattr(inversion, "STEPS", 30)
    monkeypatch.setattr(zero_shot, "_MOST", 2)


def found_by(attack: Attack, evidence: Evidence, show_text: bool = False) -> Book:
    book = Book(show_text=show_text)
    assert attack.missing(evidence) is None
    attack.run(evidence, book, lambda *_: None)
    return book


def of(book: Book, metric: str) -> Figure:
    (one,) = (figure for figure in book.figures if figure.metric == metric)
    return one


def test_texts_are_read_off_single_rows(single: Evidence) -> None:
    book = found_by(decoder.ATTACK, single, show_text=True)
    f1, precision = of(book, "token_f1"), of(book, "bag_precision")
    for figure in (f1, precision):
        assert figure.number == 10
        assert figure.measure.value > figure.baseline + 0.2
        assert figure.control is not None
        assert figure.measure.value > figure.control + 0.2
        assert figure.verdict(0.05) == "leaks"
        assert figure.baseline >= max(figure.details["random_text"], figure.details["frequent_tokens"])
        assert figure.finding().details["rows"] == 1
    assert len(f1.texts) == f1.details["centroids"] == decoder.MOST
    assert not precision.texts


def test_what_was_read_is_kept_only_where_it_is_asked_for(single: Evidence) -> None:
    book = found_by(decoder.ATTACK, single)
    assert of(book, "token_f1").texts == ()
    assert of(book, "token_f1").details["texts_withheld"] == decoder.MOST


def test_weights_read_them_too_and_the_propositions_are_measured(exact: Evidence) -> None:
    book = found_by(inversion.ATTACK, exact)
    precision = of(book, "bag_precision")
    assert precision.number == 9
    assert precision.measure.value > precision.baseline + 0.1
    assert of(book, "token_f1").details["relaxed_distance"] > 0
    names = [bound.name.split(",")[0] for bound in book.bounds]
    assert names == ["proposition 2", "proposition 3", "proposition 3"]
    assert all(bound.holds for bound in book.bounds[1:])


def test_drowning_noise_leaves_nothing_to_read(slm: Slm, tmp_path: Path) -> None:
    evidence = run_of(slm, tmp_path, Recipe(clusters=4, noise=30.0, min_size=1))
    book = found_by(decoder.ATTACK, evidence)
    for metric in ("token_f1", "bag_precision"):
        figure = of(book, metric)
        assert figure.measure.value < figure.baseline + 0.1
        assert figure.claim_epsilon is not None
        assert figure.cap_reason


def test_one_release_is_attacked_and_it_is_the_one_of_the_smallest_clusters(slm: Slm, tmp_path: Path) -> None:
    evidence = run_of(slm, tmp_path, Recipe(clusters=3))
    seen: list[float] = []

    def work(scene: Scene, _: Book) -> None:
        seen.append(scene.release.tensors["sizes"].mean())

    decoder.smallest_clusters(10, "x", work)(evidence, Book(), lambda *_: None)
    scenes = [scene for _, scene in evidence.scenes(PayloadKind.CENTROIDS) if isinstance(scene, Scene)]
    every = [scene.release.tensors["sizes"].mean() for scene in scenes]
    assert seen == [min(every)]


def test_too_little_auxiliary_text_is_said(slm: Slm, tmp_path: Path) -> None:
    evidence = run_of(slm, tmp_path, Recipe(clusters=12, random_groups=True), pool_rows=80)
    for attack in (decoder.ATTACK, inversion.ATTACK):
        book = found_by(attack, evidence)
        assert not book.figures
        assert "at least 64" in book.not_run[0].why


def test_the_best_row_is_the_one_with_the_largest_f1() -> None:
    guess = [np.array([0, 5, 6, 7, 1])]
    rows = [[np.array([0, 8, 9, 1]), np.array([0, 5, 6, 8, 1]), np.array([0, 7, 1])]]
    special = frozenset({0, 1})
    best = decoder.best_rows(guess, rows, special)
    assert best.f1 == overlap([guess], [[rows[0][1]]], special).f1 == pytest.approx(2 / 3)


def test_a_language_model_writes_near_a_centroid(exact: Evidence, tmp_path: Path) -> None:
    with patch.object(zero_shot, "MODEL", str(tiny.make_llm(tmp_path / "llm"))):
        book = found_by(zero_shot.ATTACK, exact, show_text=True)
    figure = of(book, "rouge_l")
    assert 0 <= figure.measure.value <= 1
    assert figure.control is not None
    assert figure.baseline >= figure.control > 0
    assert len(of(book, "token_f1").texts) == 2
    assert of(book, "token_f1").details["cosine"] > 0.3


def test_without_a_language_model_it_is_not_run(exact: Evidence, tmp_path: Path) -> None:
    with patch.object(zero_shot, "MODEL", str(tmp_path / "nothing")):
        book = found_by(zero_shot.ATTACK, exact)
    assert not book.figures
    assert "language model" in book.not_run[0].why
