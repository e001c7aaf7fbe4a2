"""Attack 11: one step's gradient gives its texts away where it can, and says so where it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from attacks import gradient_span
from attacks.adversary import NotEnough
from attacks.dictionary import fit_prior, special_ids, token_ids, vocabulary_size
from attacks.gradient_search import recover
from attacks.gradient_span import OneStep, Reader, rouge, span_of
from securefl.config import Lora
from securefl.errors import SecureflError
from securefl.models import load_slm
from securefl.release import Tensors
from securefl.slm import Slm
from tests import tiny

LENGTH = 16


def load(folder: Path, lora: Lora | None = None) -> Slm:
    return load_slm(str(folder), ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0, lora=lora)


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    made = load(tiny.make_encoder(tmp_path_factory.mktemp("wide") / "encoder", width=64))
    for parameter in made.parameters():  # norms without a bias would add a linear relation of their own
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return made


def texts_of(rows: int, seed: int = 0, length: int = 6) -> list[str]:
    """Texts of different lengths; no word stands twice in one."""
    words = np.random.default_rng(seed)
    lengths = [length + i % 3 for i in range(rows)]
    return [" ".join(words.choice(tiny.WORDS, n, replace=False)) for n in lengths]


def gradient(slm: Slm, texts: list[str]) -> dict[str, np.ndarray]:
    slm.zero_grad()
    labels = torch.arange(len(texts)) % 2
    cross_entropy(slm(slm.tokenize(texts)), labels).backward()
    return {
        name: parameter.grad.numpy().copy()
        for name, parameter in slm.model.named_parameters()
        if parameter.grad is not None
    }


def as_sets(texts: list[np.ndarray]) -> set[tuple[int, ...]]:
    return {tuple(ids.tolist()) for ids in texts}


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_texts_of_a_small_batch_come_back_exactly(slm: Slm, rows: int) -> None:
    texts = texts_of(rows)
    truth = token_ids(slm, texts)
    found = recover(slm, OneStep(gradient(slm, texts), {}), 10, np.random.default_rng(0))
    assert as_sets(found.texts) == as_sets(truth)
    assert found.complete
    assert found.tokens_in_batch == sum(map(len, truth))
    for at, ids in enumerate(found.tokens):
        assert {int(text[at]) for text in truth if len(text) > at} <= set(ids.tolist())
    guess, true = (slm.tokenizer.batch_decode(t, skip_special_tokens=True) for t in (found.texts, truth))
    assert rouge(guess, true).rouge2.min() == 1
    # The same texts say nothing of others.
    others = slm.tokenizer.batch_decode(token_ids(slm, texts_of(rows, seed=9)), skip_special_tokens=True)
    assert rouge(guess, others).rouge1.mean() < 0.4


def test_tokens_that_are_not_in_the_batch_are_not_in_the_span(slm: Slm) -> None:
    """Every id that is found at some position is one of the batch's."""
    texts = texts_of(3, seed=4)
    found = recover(slm, OneStep(gradient(slm, texts), {}), 10, np.random.default_rng(0), effort=0)
    batch = {int(i) for ids in token_ids(slm, texts) for i in ids}
    assert found.vocabulary.tolist() == sorted(batch)
    assert found.texts == []
    assert not found.complete
    assert found.by_position() is found.tokens


def test_weights_before_and_after_a_step_serve_as_well(slm: Slm) -> None:
    texts = texts_of(2, seed=2)
    moved = gradient(slm, texts)
    before = slm.state()
    after = {
        name: (value - np.float32(0.1) * moved[name]).astype(np.float32) for name, value in before.items()
    }
    update = OneStep.from_weights(before, after)
    assert all(value > 0 for value in update.noise.values())
    found = recover(slm, update, 10, np.random.default_rng(0))
    assert as_sets(found.texts) == as_sets(token_ids(slm, texts))


@pytest.mark.parametrize("architecture", ["distilbert", "roberta", "gpt2", "llama"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    """Decoders grow their texts; GPT-2 keeps its maps transposed and Llama knows no positions in a token."""
    slm = load(tiny.make_architecture(tmp_path / architecture, architecture))
    texts = ["the cup", "a song"] if architecture in ("gpt2", "llama") else texts_of(1, length=8)
    truth = token_ids(slm, texts)
    found = recover(slm, OneStep(gradient(slm, texts), {}), max(map(len, truth)), np.random.default_rng(0))
    assert as_sets(found.texts) == as_sets(truth)


def test_the_span_against_least_squares() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((9, 24))
    span = span_of(rng.standard_normal((72, 9)) @ inputs, 24)
    assert span.rank == 9
    vectors = np.concatenate([inputs, rng.standard_normal((5, 24))])
    fitted = np.linalg.lstsq(inputs.T, vectors.T, rcond=None)[0]
    expected = np.linalg.norm(vectors.T - inputs.T @ fitted, axis=0) / np.linalg.norm(vectors, axis=1)
    measured = span.distances(torch.from_numpy(vectors).float()).numpy()
    np.testing.assert_allclose(measured, expected, atol=2e-6)
    assert (span.excess(torch.from_numpy(vectors).float()) <= 1).tolist() == [True] * 9 + [False] * 5


def test_known_noise_is_tolerated_and_no_more() -> None:
    """What noise does to a true input's distance stays within the tolerance, and a strange one's does not."""
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((6, 40))
    noise = 1e-3
    noisy = rng.standard_normal((120, 6)) @ inputs + noise * rng.standard_normal((120, 40))
    span = span_of(noisy, 40, noise)
    assert span.rank == 6
    assert (span.excess(torch.from_numpy(inputs).float()) <= 1).all()
    assert (span.excess(torch.from_numpy(rng.standard_normal((50, 40))).float()) > 1).all()


def declines(slm: Slm, update: Tensors, why: str) -> None:
    with pytest.raises(NotEnough, match=why):
        recover(slm, OneStep(update, {}), 10, np.random.default_rng(0))


def test_as_many_tokens_as_dimensions_are_declined(slm: Slm) -> None:
    declines(slm, gradient(slm, texts_of(30)), "no gap")


def test_adam_and_noise_and_nothing_are_declined(slm: Slm) -> None:
    exact, rng = gradient(slm, texts_of(1)), np.random.default_rng(0)
    declines(slm, {name: 1e-3 * np.sign(value) for name, value in exact.items()}, "first step of Adam")
    sizes = {name: float(np.abs(value).mean()) for name, value in exact.items()}
    noised = {name: value + rng.normal(0, sizes[name], value.shape) for name, value in exact.items()}
    declines(slm, noised, "no gap")
    declines(slm, {name: np.zeros_like(value) for name, value in exact.items()}, "is 0")


def test_dropout_is_declined(slm: Slm) -> None:
    """The inputs were then other vectors than the dictionary's."""
    slm.train()
    torch.manual_seed(0)
    update = gradient(slm, texts_of(1))
    slm.eval()
    declines(slm, update, "dropout")


def test_an_adapter_is_declined(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder, Lora(r=2))
    declines(slm, gradient(slm, texts_of(1)), "does not train")


def test_other_weights_at_the_second_block_leave_the_tokens(slm: Slm) -> None:
    """Without the second block's gap no text is reported, and the first block's tokens still are."""
    texts = texts_of(1, seed=3)
    update = gradient(slm, texts)
    name = Reader(slm).names[1][0]
    update[name] = np.random.default_rng(0).standard_normal(update[name].shape)
    found = recover(slm, OneStep(update, {}), 10, np.random.default_rng(0))
    assert found.texts == []
    assert found.tokens_in_batch is None
    assert sorted(int(i) for ids in found.tokens for i in ids) == sorted(token_ids(slm, texts)[0].tolist())


def test_two_plain_steps_still_show_the_text(slm: Slm) -> None:
    """The first step's gradient is part of the sum, so what it read is in the span."""
    texts, before = texts_of(1, seed=5), slm.state()
    total = gradient(slm, texts)
    slm.load_state({name: value - np.float32(0.5) * total[name] for name, value in before.items()})
    second = gradient(slm, texts)
    slm.load_state(before)
    update = OneStep({name: total[name] + second[name] for name in total}, {})
    found = recover(slm, update, 10, np.random.default_rng(0), effort=20_000)
    assert as_sets(token_ids(slm, texts)) <= as_sets(found.texts)


def test_malformed_updates(slm: Slm) -> None:
    update = gradient(slm, texts_of(1))
    name = Reader(slm).names[0][0]
    for broken, why in ((np.full_like(update[name], np.nan), "NaN"), (np.ones((64, 3)), "shape")):
        with pytest.raises(SecureflError, match=why):
            recover(slm, OneStep({**update, name: broken}, {}), 10, np.random.default_rng(0))
    with pytest.raises(SecureflError, match="1 to 16 positions"):
        recover(slm, OneStep(update, {}), LENGTH + 1, np.random.default_rng(0))
    with pytest.raises(SecureflError, match="same parameters"):
        OneStep.from_weights(slm.state(), {"strange": np.zeros(3, np.float32)})


def test_rouge_assigns_guesses_to_truths() -> None:
    """By hand: the second truth shares two of three words and one of two word pairs with its guess."""
    scores = rouge(["one two four", "red green blue"], ["red green blue", "one two three", "alone"])
    np.testing.assert_allclose(scores.rouge1, [1, 2 / 3, 0])
    np.testing.assert_allclose(scores.rouge2, [1, 1 / 2, 0])
    assert rouge([], ["red"]).rouge1.tolist() == [0]
    with pytest.raises(NotEnough):
        rouge(["red"], [])


def test_the_guess_without_a_gradient(slm: Slm) -> None:
    auxiliary = token_ids(slm, texts_of(50, seed=7))
    prior = fit_prior(auxiliary, 8, vocabulary_size(slm))
    guesses = gradient_span.frequent_texts(prior, [3, 8])
    assert [len(ids) for ids in guesses] == [3, 8]
    assert {int(ids[0]) for ids in guesses} == {slm.tokenizer.cls_token_id} <= special_ids(slm)
