"""Attack 2 by adversaries who know less or more: rows of the study, against what must come out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attacks import token_variations
from attacks.adversary import NotEnough
from attacks.assembly import NGrams
from attacks.dictionary import token_ids, vocabulary_size
from attacks.token_variations import Study
from securefl.models import load_slm
from securefl.slm import Slm
from tests import tiny
from tests.attacks.centroids import LENGTH, texts_of

TEXTS, AUXILIARY = texts_of(160, seed=50), texts_of(300, seed=51)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Slm, Slm]:
    """An encoder, and the same with every entry of its table moved a little and all of them together."""
    folder = tiny.make_encoder(tmp_path_factory.mktemp("wide") / "encoder", width=128, layers=1)
    public, trained = (
        load_slm(str(folder), ["a", "b"], max_length=LENGTH, train_embeddings=moved, seed=0)
        for moved in (False, True)
    )
    words = trained.model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        # The layer norm behind the table brings every vector to one length, so this is a fair share of it.
        words += 0.3 * words.std() * torch.randn(words.shape, generator=generator)
    return public, trained


@pytest.fixture(scope="module")
def rows(pair: tuple[Slm, Slm]) -> list[token_variations.Row]:
    slm, trained = pair
    ids = token_ids(slm, TEXTS)
    told, other = (NGrams(known, vocabulary_size(slm)) for known in (ids, token_ids(slm, AUXILIARY)))
    return list(Study(slm, TEXTS, AUXILIARY, LENGTH, 6, trained, other, told, largest=8).rows([0]))


def of(rows: list[token_variations.Row], what: str) -> Iterator[token_variations.Row]:
    found = [row for row in rows if row["what"] == what]
    assert found
    return iter(found)


def test_what_is_withheld_of_exact_sums_is_found(rows: list[token_variations.Row]) -> None:
    for row in of(rows, "sizes estimated"):
        assert row["sizes_right"] == row["recall"] == 1.0
        assert row["control"] < 0.9
    for row in of(rows, "two silos by size"):
        # On one machine 2 of 56 tokens of two rows a silo come out wrong, on another none; why is not known.
        assert row["recall"] > 0.95
    for row in of(rows, "weights known"):
        assert row["recall"] == 1.0
        assert row["exact_texts"] == row["texts"] == row["k"] * row["groups"]


def test_rounds_and_a_corrected_table_read_more(rows: list[token_variations.Row]) -> None:
    one, four = (next(of(rows, f"rounds of noise 2: {n}")) for n in (1, 4))
    assert four["recall"] > one["recall"] + 0.1
    plain, corrected = (
        np.mean([row["recall"] for row in of(rows, what)])
        for what in ("public table as it is", "public table, corrected")
    )
    assert corrected >= plain
    assert corrected > 0.9


def test_who_knows_the_language_puts_texts_together(rows: list[token_variations.Row]) -> None:
    """Counts of the very texts stand for a model that knows the language; those of others know less."""
    knows, counts = (
        {row["k"]: row["exact_texts"] / row["texts"] for row in of(rows, what)}
        for what in ("language model", "n-grams")
    )
    assert knows[2] > 0.9
    assert all(knows[k] > counts[k] for k in (2, 3, 4))


def test_cells_that_are_kept_are_left_out_and_small_data_says_so(pair: tuple[Slm, Slm]) -> None:
    study = Study(pair[0], TEXTS[:20], AUXILIARY, LENGTH, 2, largest=2)
    everything = [(row["variation"], row["k"], row["seed"]) for row in study.rows([0, 1])]
    assert "a table that was trained" not in {name for name, _, _ in everything}
    assert not list(study.rows([0, 1], lambda *cell: cell in everything))
    with pytest.raises(NotEnough):
        list(Study(pair[0], TEXTS[:7], AUXILIARY, LENGTH, 2).rows([0]))
