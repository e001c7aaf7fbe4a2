"""Attack 2 on whole run folders: texts put together, and several noised rounds of the same rows averaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attacks.bench import token_figures, token_settings, token_weights, tokens
from attacks.evidence import Evidence
from attacks.figures import Figure, Proportion
from attacks.judgement import Book
from attacks.runs import Run
from securefl.models import load_slm
from securefl.slm import Slm
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run

# Twenty topics whose five words follow each other in one order, from any of them on.
TOPICS = [tuple(f"{chr(97 + i // 8)}{chr(97 + i % 8)}{letter}" for letter in "vwxyz") for i in range(20)]


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    words = [word for topic in TOPICS for word in topic]
    folder = tiny.make_encoder(tmp_path_factory.mktemp("told") / "encoder", width=64, vocabulary=words)
    return load_slm(str(folder), ["a", "b"], max_length=8, train_embeddings=False, seed=0)


def attacked(slm: Slm, folder: Path, recipe: Recipe, texts: list[str]) -> Book:
    corpus = corpus_of(texts, ["a", "b"] * (len(texts) // 2), 30, recipe)
    book = Book(show_text=True)
    evidence = Evidence(Run(make_run(folder / "run", slm, corpus, recipe)))
    tokens.ATTACK.run(evidence, book, lambda *_: None)
    return book


def found(slm: Slm, folder: Path, recipe: Recipe) -> list[Figure]:
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(240):
        topic, first = TOPICS[rng.integers(20)], rng.integers(5)
        texts.append(" ".join(topic[(first + i) % 5] for i in range(5)))
    return attacked(slm, folder, recipe, texts).figures


def test_texts_of_exact_clusters_are_put_together(slm: Slm, tmp_path: Path) -> None:
    recipe = Recipe(layer="embeddings", clusters=6, random_groups=True)
    every = found(slm, tmp_path, recipe)
    (average,) = [f for f in every if f.attack == token_weights.AVERAGED]
    # Ten rows of two silos in each, equal in number, so that nothing but ends of texts tells the silos apart.
    assert average.details["rows"] == 10
    assert average.measure.value > 0.9
    assert average.control is not None
    assert average.control < 0.1
    assert average.verdict(0.05) == "leaks"
    figures = [f for f in every if f.metric == "exact_texts"]
    assert [(f.silo, f.round) for f in figures] == [("silo-1", 2), ("silo-2", 2)]
    for f in figures:
        assert isinstance(f.measure, Proportion)
        assert f.measure.trials == 30
        assert f.measure.value > 0.7
        assert f.details["dealt_at_random"] < 0.3
        # Some texts of so few words are also in the pool.
        assert f.control is not None
        assert f.control < 0.2
        assert f.verdict(0.05) == "leaks"
        assert "singling_out" in f.bears_on
        assert len(f.texts) == 8
        assert all(len(text.split()) == 5 for text in f.texts)
        assert f.without_texts().texts == ()


def test_clusters_of_many_texts_are_left_out(slm: Slm, tmp_path: Path) -> None:
    recipe = Recipe(layer="embeddings", clusters=1, random_groups=True)
    every = found(slm, tmp_path, recipe)
    assert not [f for f in every if f.metric == "exact_texts" or f.attack == token_weights.AVERAGED]


def test_noised_rounds_of_the_same_rows_are_averaged(slm: Slm, tmp_path: Path) -> None:
    recipe = Recipe(layer="embeddings", clusters=3, noise=0.01, clip=100.0, rounds=4)
    every = [f for f in found(slm, tmp_path, recipe) if f.metric == "token_f1" and f.silo == "silo-1"]
    figures = [f for f in every if f.attack == token_figures.NAME]
    together = [f for f in figures if "average of" in f.target]
    # Of noised silos no average is played.
    assert not [f for f in every if f.attack == token_weights.AVERAGED]
    assert len(figures) == 5
    assert len(together) == 1
    # A cluster may be withheld in one round: then its rows are not the same.
    assert together[0].target[-8:] in ("4 rounds", "3 rounds")
    alone = np.mean([f.measure.value for f in figures if f not in together])
    assert together[0].measure.value > alone + 0.05


def test_a_trained_table_is_read_by_who_has_only_the_public_one(slm: Slm, tmp_path: Path) -> None:
    trained = load_slm(slm.name, ["a", "b"], max_length=8, train_embeddings=True, seed=0)
    words = trained.model.get_input_embeddings().weight
    with torch.no_grad():
        words += 0.2 * words.std() * torch.randn(words.shape, generator=torch.Generator().manual_seed(3))
    recipe = Recipe(layer="embeddings", clusters=6, random_groups=True, slm={"train_embeddings": True})
    figures = found(trained, tmp_path, recipe)
    public = [f for f in figures if f.attack == token_settings.TABLE]
    assert len(public) == 2
    as_it_is = {f.silo: f.measure.value for f in figures if f.attack == token_settings.AS_IT_IS}
    known = {f.silo: f for f in figures if f.attack == token_figures.NAME and f.metric == "token_f1"}
    for f in public:
        assert f.adversary.role == "outsider"
        assert f.baseline + 0.2 < f.measure.value <= known[f.silo].measure.value == 1.0
        assert f.measure.value >= as_it_is[f.silo] - 0.02
        assert f.control is not None
        assert f.control < f.measure.value
    # Where the table is the public one there is nothing to correct.
    plain = found(slm, tmp_path / "plain", Recipe(layer="embeddings", clusters=6, random_groups=True))
    assert not [f for f in plain if f.attack == token_settings.TABLE]
    withheld = [f for f in plain if f.attack == token_settings.SIZES]
    assert [f.details["sizes_right"] for f in withheld] == [1.0, 1.0]


def test_centroids_of_a_deeper_layer_are_read_by_what_other_text_teaches(tmp_path: Path) -> None:
    """The attacker learns where tokens lie at the layer; noised ones are listed as not attacked."""
    folder = tiny.make_encoder(tmp_path / "deep", width=64, layers=2)
    slm = load_slm(str(folder), ["a", "b"], max_length=8, train_embeddings=False, seed=0)
    texts = [text for text, _ in tiny.make_texts(700, seed=1, length=6)]
    figures = attacked(
        slm, tmp_path / "exact", Recipe(layer=1, clusters=12, random_groups=True), texts
    ).figures
    every = [f for f in figures if f.metric == "token_f1"]
    assert [(f.silo, f.target) for f in every] == [
        (silo, "12 layer-1 centroids") for silo in ("silo-1", "silo-2")
    ]
    for f in every:
        assert f.measure.value > f.baseline + 0.2
        assert f.control is not None
        assert f.control < f.measure.value - 0.2
    assert {f.attack for f in figures} <= {token_figures.NAME, token_figures.TEXTS}
    book = attacked(slm, tmp_path / "noised", Recipe(layer=1, clusters=3, noise=0.5), texts)
    assert not book.figures
    assert any("this release is noised" in one.why for one in book.not_run)
