"""Decoders as classifiers: GPT-2 and Llama beside the encoders of test_models and test_lora."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, AutoTokenizer

from securefl.config import Lora
from securefl.errors import ModelError
from securefl.models import load_slm, load_trained
from securefl.slm import Slm, masked_mean
from securefl.training import fit
from tests import tiny
from tests.test_training import rows_of

LABELS = ("a", "b", "c")
TEXTS = ["the goal of the team was great", "bank", "Film & actor: a new show!", "on the"]
TABLES = {
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "llama": {"model.embed_tokens.weight"},
}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_architecture(tmp_path_factory.mktemp("decoders") / architecture, architecture)


def load(folder: Path, *, train_embeddings: bool = False, lora: Lora | None = None) -> Slm:
    return load_slm(str(folder), LABELS, max_length=64, train_embeddings=train_embeddings, seed=0, lora=lora)


def logits(slm: Slm, texts: list[str] = TEXTS) -> Tensor:
    with torch.no_grad():
        out: Tensor = slm(slm.tokenize(texts))
    return out


def test_the_head_on_the_mean_is_the_mean_of_the_token_logits(tmp_path: Path) -> None:
    for architecture in tiny.ARCHITECTURES:
        slm = load(tiny.make_architecture(tmp_path / architecture, architecture))
        batch = slm.tokenize(TEXTS)
        with torch.no_grad():
            tokens = slm.model(**slm.inputs(batch)).logits
            assert (masked_mean(tokens, batch["attention_mask"]) - slm(batch)).abs().max() < 1e-5


def test_padding_changes_nothing(folder: Path) -> None:
    slm = load(folder)
    together = logits(slm)
    for i, text in enumerate(TEXTS):
        assert (logits(slm, [text]) - together[i]).abs().max() < 1e-5


def test_padding_is_on_the_right_and_has_a_token(architecture: str, folder: Path) -> None:
    slm = load(folder)
    batch = slm.tokenize(["a", "the goal"])
    assert batch["attention_mask"][0].tolist() == [1, *[0] * (batch["attention_mask"].shape[1] - 1)]
    filler = slm.tokenizer.eos_token_id if architecture == "gpt2" else slm.tokenizer.pad_token_id
    assert set(batch["input_ids"][0, 1:].tolist()) == {filler}


def test_an_empty_text_is_one_end_of_text(folder: Path) -> None:
    """Neither tokenizer adds a token of its own."""
    slm = load(folder)
    for texts in ([""], ["", "bank"]):
        batch = slm.tokenize(texts)
        assert batch["attention_mask"].sum(1)[0] == 1
        assert batch["input_ids"][0, 0] == slm.tokenizer.eos_token_id
        assert (logits(slm, texts)[0] - logits(slm, [slm.tokenizer.eos_token])[0]).abs().max() < 1e-5


def test_the_tables_are_frozen_unless_asked(architecture: str, folder: Path) -> None:
    frozen, free = load(folder), load(folder, train_embeddings=True)
    assert set(free.trained_names()) - set(frozen.trained_names()) == TABLES[architecture]
    assert set(free.trained_names()) == {name for name, _ in free.model.named_parameters()}


def test_they_have_no_embedding_layer_to_read(folder: Path) -> None:
    slm = load(folder)
    with pytest.raises(ModelError, match="embedding layer"):
        slm.layer(slm.tokenize(TEXTS), 0)
    with pytest.raises(ModelError, match="embedding layer"):
        slm.from_layer(torch.zeros(1, 2, 32), torch.ones(1, 2), 0)


@pytest.mark.parametrize("lora", [None, Lora(r=3)], ids=["full", "lora"])
def test_saved_it_is_the_plain_model(lora: Lora | None, folder: Path, tmp_path: Path) -> None:
    """A saved folder, with its adapter merged (GPT-2 keeps W transposed), in plain transformers."""
    slm = load(folder, lora=lora)
    rng = np.random.default_rng(0)
    slm.load_state({k: v + rng.normal(0, 0.05, v.shape).astype(np.float32) for k, v in slm.state().items()})
    before = logits(slm)
    assert (before - logits(load(folder))).abs().max() > 1e-2
    slm.save(tmp_path / "out", "# Card\n")
    assert torch.equal(logits(slm), before)
    assert (logits(load_trained(tmp_path / "out")) - before).abs().max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        mean = (plain(**batch).logits * mask).sum(1) / mask.sum(1)
    assert (mean - before).abs().max() < 1e-5


def test_an_adapter_is_on_every_linear_layer(architecture: str, folder: Path) -> None:
    slm = load(folder, lora=Lora(r=3))
    names = slm.trained_names()
    layers = {"gpt2": 4, "llama": 7}[architecture]
    assert sum(".lora_A." in name for name in names) == 2 * layers
    rest = {name for name in names if ".lora_" not in name}
    head = {"gpt2": "classifier", "llama": "score"}[architecture]
    assert rest == {f"{head}.weight", f"{head}.bias"}
    assert torch.equal(logits(slm), logits(load(folder)))


@pytest.mark.parametrize("lora", [None, Lora(r=3)], ids=["full", "lora"])
def test_they_learn(lora: Lora | None, folder: Path) -> None:
    slm = load(folder, lora=lora)
    rows = rows_of(tiny.make_texts(48, LABELS), LABELS)
    fit(slm, rows, epochs=20, batch_size=16, learning_rate=2e-2, head_learning_rate=2e-2, seed=0)
    assert (logits(slm, list(rows.texts)).argmax(1).numpy() == rows.labels).mean() > 0.9


def test_no_token_to_pad_with(folder: Path, tmp_path: Path) -> None:
    made = tiny.make_architecture(tmp_path / "made", "gpt2")
    tokenizer = tiny.byte_level()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(made)
    with pytest.raises(ModelError, match="neither a padding nor an end-of-text token"):
        load(made)
