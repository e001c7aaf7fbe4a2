"""Attack 9: a tiny encoder's texts are read back with its weights; against other texts they are chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from attacks import inversion, word_maps
from attacks.dictionary import Ids, special_ids, token_ids
from attacks.inversion import Inverted
from attacks.membership import Vectors
from attacks.token_scores import overlap
from attacks.word_maps import Reader
from securefl.errors import SecureflError
from securefl.models import load_slm
from securefl.slm import Slm
from securefl.training import embed
from tests import tiny
from tests.attacks.synthetic import PLAIN, claim

LENGTH = 12
WORDS = tiny.WORDS[:50]


def load(folder: Path) -> Slm:
    return load_slm(str(folder), ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0)


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    return load(tiny.make_encoder(tmp_path_factory.mktemp("encoder") / "tiny", width=48))


def texts_of(rows: int, rng: np.random.Generator) -> list[str]:
    return [" ".join(rng.choice(WORDS, int(rng.integers(3, 7)), False)) for _ in range(rows)]


def vectors_of(slm: Slm, texts: Sequence[str]) -> Vectors:
    return embed(slm, texts, "pooled").astype(np.float64)


@pytest.fixture(scope="module")
def reader(slm: Slm) -> Reader:
    rng = np.random.default_rng(0)
    texts = texts_of(400, rng)
    return word_maps.fit(
        vectors_of(slm, texts), token_ids(slm, texts), np.ones(1), PLAIN, special_ids(slm), rng, groups=800
    )


@pytest.fixture(scope="module")
def read(slm: Slm, reader: Reader) -> tuple[list[Ids], Vectors, Inverted]:
    rng = np.random.default_rng(1)
    texts = texts_of(8, rng)
    vectors = vectors_of(slm, texts)
    found = inversion.invert(slm, reader, vectors, rng, steps=80, budget=500, weight=0.02)
    return token_ids(slm, texts), vectors, found


def f1(slm: Slm, guesses: Sequence[Ids], truths: Sequence[Ids]) -> float:
    return overlap([[one] for one in guesses], [[one] for one in truths], special_ids(slm)).f1


def test_texts_are_read_back(slm: Slm, read: tuple[list[Ids], Vectors, Inverted]) -> None:
    own, _, found = read
    assert f1(slm, found.tokens, own) > 0.6
    assert found.cosines.mean() > 0.9
    assert found.cosines.mean() > found.relaxed_cosines.mean()


def test_shuffled_truth_falls_to_a_random_text(slm: Slm, read: tuple[list[Ids], Vectors, Inverted]) -> None:
    own, _, found = read
    rng = np.random.default_rng(2)
    chance = np.mean([f1(slm, token_ids(slm, texts_of(8, rng)), own) for _ in range(20)])
    mixed = np.mean([f1(slm, found.tokens, own[i:] + own[:i]) for i in range(1, 8)])
    assert abs(mixed - chance) < 0.08


def test_the_cosines_are_those_of_the_texts(
    slm: Slm, reader: Reader, read: tuple[list[Ids], Vectors, Inverted]
) -> None:
    _, vectors, found = read
    words = [slm.tokenizer.decode(ids, skip_special_tokens=True) for ids in found.tokens]
    assert [ids.tolist() for ids in token_ids(slm, words)] == [ids.tolist() for ids in found.tokens]
    again = vectors_of(slm, words)
    expected = (again * vectors).sum(1) / np.linalg.norm(again, axis=1) / np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(found.cosines, expected, atol=1e-5)


def test_mixtures_are_nearer_the_own_text_than_another(
    slm: Slm, reader: Reader, read: tuple[list[Ids], Vectors, Inverted]
) -> None:
    own, vectors, found = read
    gaps = np.array([[inversion.distance(reader, z, text) for text in own] for z in found.relaxed.shares])
    assert np.diag(gaps).mean() < gaps[~np.eye(8, dtype=bool)].mean()
    assert (found.relaxed.residuals < 0.6 * np.linalg.norm(vectors, axis=1)).all()
    for shares in found.relaxed.shares:
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-4)


def test_without_the_linear_map_the_vectors_alone_decide(slm: Slm, reader: Reader) -> None:
    rng = np.random.default_rng(3)
    texts = texts_of(4, rng)
    vectors, own = vectors_of(slm, texts), token_ids(slm, texts)
    lengths = np.array([len(ids) - 2 for ids in own])
    loose = inversion.relax(slm, reader, vectors, lengths, rng, steps=150, drawn=0.0)
    few = inversion.relax(slm, reader, vectors, lengths, rng, steps=2, drawn=0.0)
    assert (loose.residuals < few.residuals).all()
    assert [len(ids) for ids in loose.tokens] == [len(ids) for ids in own]
    assert f1(slm, loose.tokens, own) > f1(slm, few.tokens, own)


def test_distance_is_frobenius_of_the_padded_matrices(reader: Reader) -> None:
    rng = np.random.default_rng(4)
    c = len(reader.vocabulary)
    shares = rng.dirichlet(np.ones(c), 3).astype(np.float32)
    unknown = int(np.setdiff1d(np.arange(1000), reader.vocabulary)[0])
    for inner in ([reader.vocabulary[2]], reader.vocabulary[[0, 5, 5, 1]], [unknown, reader.vocabulary[3]]):
        n = max(3, len(inner))
        relaxed, true = np.zeros((n, c + 1)), np.zeros((n, c + 1))
        relaxed[:3, :c] = shares
        for place, token in enumerate(inner):
            column = np.flatnonzero(reader.vocabulary == token)
            true[place, column[0] if len(column) else c] = 1
        found = inversion.distance(reader, shares, reader.whole(np.array(inner, np.int64)))
        assert found == pytest.approx(np.linalg.norm(relaxed - true), rel=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "electra", "albert", "gpt2"])
def test_mixtures_of_one_token_each_are_the_text(tmp_path: Path, architecture: str) -> None:
    slm = load(tiny.make_architecture(tmp_path / architecture, architecture))
    batch = slm.tokenize(["the goal of a match", "a bank"])
    vectors = inversion.token_table(slm)[batch["input_ids"]]
    with torch.inference_mode():
        mixed = inversion.pooled_mixtures(slm, vectors, batch["attention_mask"])
        torch.testing.assert_close(mixed, slm.pooled(batch), atol=1e-5, rtol=1e-4)


def test_asking_is_embedding(slm: Slm) -> None:
    texts = texts_of(5, np.random.default_rng(5))
    np.testing.assert_allclose(
        inversion.asking(slm)(token_ids(slm, texts)), vectors_of(slm, texts), atol=1e-5
    )


def test_promised_gains_are_the_derivative(slm: Slm, reader: Reader) -> None:
    """Along the way from a token's vector to another's, by finite differences."""
    first, second = token_ids(slm, texts_of(2, np.random.default_rng(6)))
    aim = inversion.asking(slm)([second])[0].astype(np.float64)
    gains = inversion.gradient_gains(slm, reader, aim)(first, np.zeros(slm.width))
    assert gains.shape == (len(first) - 2, len(reader.vocabulary))
    table, toward = inversion.token_table(slm), reader.turned(aim[None])[0]
    vectors = table[torch.from_numpy(first)].double()
    step = 1e-2
    for place, column in ((0, 3), (len(first) - 3, 10)):
        values = []
        for sign in (1, -1):
            moved = vectors.clone()
            other = table[int(reader.vocabulary[column])].double()
            moved[1 + place] += sign * step * (other - moved[1 + place])
            with torch.inference_mode():
                out = inversion.pooled_mixtures(
                    slm, moved[None].float(), torch.ones((1, len(first)), dtype=torch.int64)
                )
            values.append(float(reader.turned(out.numpy())[0] @ toward))
        assert gains[place, column] == pytest.approx((values[0] - values[1]) / (2 * step), rel=0.05, abs=2e-4)


def test_proposition_3_is_measured_on_a_mean(slm: Slm, reader: Reader) -> None:
    rng = np.random.default_rng(7)
    texts = texts_of(3, rng)
    vectors, own = vectors_of(slm, texts), token_ids(slm, texts)
    relaxed = inversion.relax(slm, reader, vectors.mean(0)[None], np.array([4]), rng, steps=20)
    auxiliary = vectors_of(slm, texts_of(100, rng))
    arguments = slm, reader, relaxed.shares[0], float(relaxed.residuals[0])
    found = inversion.check_proposition_3("p", *arguments, own, auxiliary, rng)
    gaps = [inversion.distance(reader, relaxed.shares[0], text) for text in own]
    assert found.measured == pytest.approx(min(gaps))
    assert found.holds
    assert inversion.check_proposition_3("p", *arguments, own[:1], auxiliary, rng).vacuous


def test_a_clip_of_the_claim_is_in_both_sides(slm: Slm) -> None:
    rng = np.random.default_rng(8)
    texts, own = texts_of(300, rng), texts_of(4, rng)
    raw, terms = vectors_of(slm, texts), claim(0.001, 1e-3, clip=1.0)
    fitted = word_maps.fit(raw, token_ids(slm, texts), np.ones(1), terms, special_ids(slm), rng, groups=600)
    vectors = vectors_of(slm, own)
    targets = vectors / np.maximum(1, np.linalg.norm(vectors, axis=1, keepdims=True))
    found = inversion.invert(slm, fitted, targets, rng, steps=40, budget=300, weight=0.02)
    assert f1(slm, found.tokens, token_ids(slm, own)) > 0.6


def test_vectors_of_length_1_are_read_as_such(slm: Slm) -> None:
    rng = np.random.default_rng(11)
    texts, own = texts_of(300, rng), texts_of(4, rng)
    ask = inversion.asking(slm, unit=True)
    known, ids = token_ids(slm, texts), token_ids(slm, own)
    np.testing.assert_allclose(np.linalg.norm(ask(ids), axis=1), 1, atol=1e-5)
    fitted = word_maps.fit(
        ask(known).astype(np.float64), known, np.ones(1), PLAIN, special_ids(slm), rng, groups=600
    )
    targets = ask(ids).astype(np.float64)
    found = inversion.invert(slm, fitted, targets, rng, steps=40, budget=300, weight=0.02, unit=True)
    assert f1(slm, found.tokens, ids) > 0.5
    assert found.relaxed.residuals.max() < 1


def test_bad_targets_are_refused(slm: Slm, reader: Reader) -> None:
    rng = np.random.default_rng(9)
    good, lengths = vectors_of(slm, texts_of(2, rng)), np.array([3, 3])
    for bad in (np.full_like(good, np.nan), np.ones_like(good)):
        with pytest.raises(SecureflError, match="would mean nothing"):
            inversion.invert(slm, reader, bad, rng)
    with pytest.raises(SecureflError, match="of an encoder of 48"):
        inversion.relax(slm, reader, good[:, :-1], lengths, rng)
    for wrong in (np.array([0, 3]), np.array([3, LENGTH - 1])):
        with pytest.raises(SecureflError, match="1 to 10 inner tokens"):
            inversion.relax(slm, reader, good, wrong, rng)


def test_the_model_is_left_as_it_was(slm: Slm, reader: Reader) -> None:
    slm.train()
    try:
        rng = np.random.default_rng(10)
        inversion.invert(slm, reader, vectors_of(slm, texts_of(2, rng)), rng, steps=2, budget=60)
        assert slm.training
        assert all(parameter.grad is None for parameter in slm.parameters())
    finally:
        slm.eval()
