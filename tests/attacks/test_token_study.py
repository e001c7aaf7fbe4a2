"""Recall over sizes, noises and layers; deeper layers, where a token's vector depends on its text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attacks import dictionary, layer_tokens, token_scores, tokens
from attacks.adversary import NotEnough
from attacks.assembly import NGrams
from attacks.token_study import layer_recall, recall_grid
from securefl.models import load_slm
from securefl.slm import Slm
from securefl.training import embed
from tests import tiny
from tests.attacks.centroids import LENGTH, exact_target, noisy_target, prior_of, texts_of, truth_of


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("deep") / "encoder", width=64, layers=2)
    return load_slm(str(folder), ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0)


def layer_target(slm: Slm, texts: list[str], k: int, layer: int) -> tokens.Target:
    vectors, mask = embed(slm, texts, layer)
    q, shape = len(texts) // k, vectors.shape[1:]
    there = mask.reshape(q, k, -1).sum(1)
    means = vectors.reshape(q, k, *shape).sum(1) / np.maximum(there, 1)[..., None]
    base = exact_target(slm, texts, k)
    return replace(base, centroids=means.astype(np.float32))


@pytest.mark.parametrize(("layer", "k", "least"), [(0, 4, 0.98), (1, 1, 0.95), (2, 1, 0.5), (1, 4, 0.5)])
def test_a_layer_learnt_from_other_text_is_read(slm: Slm, layer: int, k: int, least: float) -> None:
    texts, auxiliary = texts_of(12 * k, seed=40), texts_of(400, seed=41)
    vectors, mask = embed(slm, auxiliary, layer)
    learnt, prior = layer_tokens.learn(slm, auxiliary, vectors, mask), prior_of(slm, auxiliary)
    target, truth = layer_target(slm, texts, k, layer), truth_of(slm, texts, k)
    read = layer_tokens.recover_layer(slm, target, prior, auxiliary, learnt).tokens
    ignore = dictionary.special_ids(slm)
    guess = tokens.guesses(prior, tokens.expected_counts(target, prior))
    base = token_scores.overlap(guess, truth, ignore).recall
    assert token_scores.overlap(read, truth, ignore).recall >= max(least, base + 0.2)
    # Other texts' tokens are read no more often than they are guessed.
    assert token_scores.overlap(read, truth[1:] + truth[:1], ignore).recall <= base + 0.1
    if k == 1:
        ids = dictionary.token_ids(slm, auxiliary)
        near = layer_tokens.nearest(target, learnt, vectors, mask, ids)
        assert token_scores.overlap(near, truth, ignore).recall >= base + 0.2
    else:
        with pytest.raises(NotEnough):
            layer_tokens.nearest(target, learnt, vectors, mask, dictionary.token_ids(slm, auxiliary))


def test_scatter_is_one_in_the_learnt_axes(slm: Slm) -> None:
    """Vectors of texts that were not learnt from lie around their tokens with the identity as covariance."""
    auxiliary, texts = texts_of(600, seed=42), texts_of(300, seed=43)
    vectors, mask = embed(slm, auxiliary, 1)
    learnt = layer_tokens.learn(slm, auxiliary, vectors, mask)
    own, there = embed(slm, texts, 1)
    ids = dictionary.token_ids(slm, texts)
    off = []
    for s in range(1, 4):
        rows = np.flatnonzero(there[:, s] > 0)
        given = torch.tensor([int(ids[row][s]) for row in rows])
        off.append(torch.from_numpy(own[rows, s]) @ learnt.whitening - learnt.at(s, given))
    scatter = torch.cat(off)
    assert float((scatter**2).mean()) == pytest.approx(1.0, rel=0.25)


def test_what_a_layer_cannot_be_learnt_from_is_refused(slm: Slm) -> None:
    auxiliary = texts_of(100, seed=44)
    vectors, mask = embed(slm, auxiliary, 1)
    with pytest.raises(NotEnough):
        layer_tokens.learn(slm, auxiliary[:20], vectors[:20], mask[:20])
    learnt = layer_tokens.learn(slm, auxiliary, vectors, mask)
    noised = noisy_target(slm, texts_of(8, 1, ragged=False), 4, 1.0)
    with pytest.raises(NotEnough):
        layer_tokens.recover_layer(slm, noised, prior_of(slm, auxiliary), auxiliary, learnt)


def test_a_grid_of_recall(slm: Slm) -> None:
    texts, auxiliary = texts_of(120, 45, ragged=False), texts_of(200, 46, ragged=False)
    score = NGrams(dictionary.token_ids(slm, auxiliary), dictionary.vocabulary_size(slm))
    grid = {
        "ks": [1, 4],
        "noises": [0.0, 1.0],
        "positions": LENGTH,
        "seeds": [0],
        "groups": 6,
        "score": score,
    }
    rows = list(recall_grid(slm, texts, auxiliary, **grid))  # type: ignore[arg-type]
    assert [(row["k"], row["noise"]) for row in rows] == [(1, 0.0), (1, 1.0), (4, 0.0), (4, 1.0)]
    by = {(row["k"], row["noise"]): row for row in rows}
    for k in (1, 4):
        exact, noised = by[k, 0.0], by[k, 1.0]
        assert exact["recall"] == exact["certain"] == exact["names"] == 1.0
        assert exact["names_control"] == 0.0
        assert exact["tokens"] == 6 * k * 8
        assert exact["control"] <= exact["baseline"] + 0.1
        assert exact["texts"] == 6 * k
        assert noised["baseline"] - 0.05 <= noised["recall"] < 1.0
    # One text a centroid needs no putting together; of other texts none comes out.
    assert by[1, 0.0]["exact_texts"] == 6
    assert by[1, 0.0]["exact_texts_control"] == 0
    # A row does not depend on which others are made.
    again = recall_grid(slm, texts, auxiliary, **grid, skip=lambda k, noise, _: (k, noise) != (4, 1.0))  # type: ignore[arg-type]
    assert list(again) == [by[4, 1.0]]
    with pytest.raises(NotEnough):
        list(recall_grid(slm, texts[:7], auxiliary, **{**grid, "ks": [4]}))  # type: ignore[arg-type]


def test_recall_by_layer(slm: Slm) -> None:
    texts, auxiliary = texts_of(60, 47), texts_of(200, 48)
    rows = list(layer_recall(slm, texts, auxiliary, layers=[0, 2], ks=[1, 4], positions=6, groups=5))
    assert [(row["layer"], row["k"]) for row in rows] == [(0, 1), (0, 4), (2, 1), (2, 4)]
    assert rows[0]["recall"] == 1.0
    assert rows[3]["recall"] <= rows[1]["recall"]
    assert all(("nearest" in row) == (row["k"] == 1) for row in rows)
