"""Loading, the pooled classifier, saving: on random models of five architectures, and on MiniLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel

from securefl import models
from securefl.data_terms import PAIR
from securefl.errors import ModelError, NonFiniteUpdate, WrongShape
from securefl.models import load_llm, load_slm, load_trained
from securefl.slm import Slm, usage_snippet
from tests import tiny

TEXTS = [
    "the goal of the team was great",
    "bank",
    "",
    "Film & actor: a new show, and people said it is good!",
]
LABELS = ("a", "b", "c")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def bare(architecture: str) -> PreTrainedModel:
    """A random encoder of an architecture, without a head."""
    vocabulary = len(tiny.wordpiece(tiny.WORDS))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        match architecture:
            case "distilbert":
                return transformers.DistilBertModel(
                    transformers.DistilBertConfig(
                        vocab_size=vocabulary,
                        max_position_embeddings=128,
                        dim=32,
                        n_layers=2,
                        n_heads=2,
                        hidden_dim=64,
                    )
                )
            case "roberta":
                return transformers.RobertaModel(
                    transformers.RobertaConfig(vocab_size=vocabulary, pad_token_id=0, **SIZES),
                    add_pooling_layer=False,
                )
            case "xlm-roberta":
                return transformers.XLMRobertaModel(
                    transformers.XLMRobertaConfig(vocab_size=vocabulary, pad_token_id=0, **SIZES),
                    add_pooling_layer=False,
                )
            case "electra":
                return transformers.ElectraModel(
                    transformers.ElectraConfig(vocab_size=vocabulary, embedding_size=16, **SIZES)
                )
            case "modernbert":
                ids = {
                    "pad_token_id": 0,
                    "cls_token_id": 2,
                    "sep_token_id": 3,
                    "bos_token_id": 2,
                    "eos_token_id": 3,
                }
                return transformers.ModernBertModel(
                    transformers.ModernBertConfig(vocab_size=vocabulary, **SIZES, **ids)
                )
    raise ValueError(architecture)


@pytest.fixture(
    scope="module", params=["bert", "distilbert", "roberta", "xlm-roberta", "electra", "modernbert"]
)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path
) -> Path:
    """A folder with a random encoder of each architecture."""
    if request.param == "bert":
        return tiny_encoder
    return tiny.save(
        bare(request.param), tiny.wordpiece(tiny.WORDS), tmp_path_factory.mktemp("x") / request.param
    )


def load(folder: Path | str, *, seed: int = 0, max_length: int = 32, train_embeddings: bool = False) -> Slm:
    return load_slm(str(folder), LABELS, max_length=max_length, train_embeddings=train_embeddings, seed=seed)


def check_the_encoder_runs_from_every_layer(slm: Slm) -> None:
    batch, layers = slm.tokenize(TEXTS), slm.model.config.num_hidden_layers
    with torch.no_grad():
        pooled = slm.pooled(batch)
        assert pooled.shape == (len(TEXTS), slm.width)
        for number in range(layers + 1):
            outputs = slm.layer(batch, number)
            assert outputs.shape[:2] == batch["input_ids"].shape
            assert not torch.allclose(outputs[0, 1], outputs[0, 3])
            assert (slm.from_layer(outputs, batch["attention_mask"], number) - pooled).abs().max() < 1e-6
            # Not a copy of the input ids' path: other outputs give another vector.
            other = slm.from_layer(2 * outputs.flip(1), batch["attention_mask"], number)
            if number < layers:
                assert (other - pooled).abs().max() > 1e-3
        assert torch.equal(slm.pooled(batch), pooled)  # all layers are back in their place
    with pytest.raises(ModelError, match=f"this encoder has the layers 0 to {layers}"):
        slm.layer(batch, layers + 1)
    with pytest.raises(ModelError, match=f"layer {layers + 1}"):
        slm.from_layer(outputs, batch["attention_mask"], layers + 1)


def check_padding_changes_nothing(slm: Slm) -> None:
    """A text alone and the same text in a padded batch have the same logits."""
    with torch.no_grad():
        together = slm(slm.tokenize(TEXTS))
        for i, text in enumerate(TEXTS):
            assert (slm(slm.tokenize([text])) - together[i]).abs().max() < 1e-5


def check_the_folder_works_in_plain_transformers(slm: Slm, folder: Path) -> None:
    """Only transformers: token logits, averaged over the tokens by a loop, are the model's logits."""
    slm.save(folder, "# A model\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert [plain.config.id2label[i] for i in range(3)] == list(LABELS)
    with torch.no_grad():
        for text in TEXTS:
            batch = tokenizer([text], return_tensors="pt", truncation=True, max_length=slm.max_length)
            logits = plain(**batch).logits[0].mean(0)
            assert (logits - slm(slm.tokenize([text]))[0]).abs().max() < 1e-5


def test_the_encoder_runs_from_every_layer(folder: Path) -> None:
    check_the_encoder_runs_from_every_layer(load(folder))


def test_padding_changes_nothing(folder: Path) -> None:
    check_padding_changes_nothing(load(folder))


def test_pairs_are_joined_as_the_tokenizer_does(folder: Path) -> None:
    slm = load(folder, max_length=12)
    pairs = [("the goal of the team", "bank"), ("a film", "a new show and people said it is good")]
    joined = [PAIR.join(pair) for pair in pairs]
    texts = [joined[0], "bank", *joined[1:], ""]
    batch = slm.tokenize(texts)
    plain = slm.tokenizer
    for place, pair in zip((0, 2), pairs, strict=True):
        ids = plain(*pair, truncation=True, max_length=12)["input_ids"]
        real = batch["attention_mask"][place].bool()
        assert batch["input_ids"][place][real].tolist() == ids
    single = batch["input_ids"][1][batch["attention_mask"][1].bool()].tolist()
    assert single == plain("bank")["input_ids"]
    assert slm.lengths(texts) == batch["attention_mask"].sum(1).clamp(min=1).tolist()
    assert int(batch["attention_mask"].sum(1).max()) == 12  # the long one was cut
    with torch.no_grad():
        together = slm(batch)
        for place, text in enumerate(texts):
            assert (slm(slm.tokenize([text])) - together[place]).abs().max() < 1e-5


def test_saved_folder_in_plain_transformers(folder: Path, tmp_path: Path) -> None:
    check_the_folder_works_in_plain_transformers(load(folder), tmp_path / "out")


@pytest.mark.real
def test_minilm(minilm: str, tmp_path: Path) -> None:
    slm = load(minilm)
    assert slm.width == 384
    check_the_encoder_runs_from_every_layer(slm)
    check_padding_changes_nothing(slm)
    check_the_folder_works_in_plain_transformers(slm, tmp_path / "out")


def test_embeddings_frozen_unless_asked(folder: Path) -> None:
    frozen, free = load(folder), load(folder, train_embeddings=True)
    layer = {
        f"{frozen.model.base_model_prefix}.embeddings." + n
        for n, _ in frozen._embedding_layer().named_parameters()
    }
    assert layer
    assert set(free.trained_names()) - set(frozen.trained_names()) == layer
    assert set(free.trained_names()) == {name for name, _ in free.model.named_parameters()}


def test_gradient_reaches_the_given_embeddings(folder: Path) -> None:
    slm = load(folder)
    batch = slm.tokenize(TEXTS)
    embeddings = slm.layer(batch, 0).detach().requires_grad_()
    torch.autograd.backward(slm.from_layer(embeddings, batch["attention_mask"], 0).square().sum())
    assert embeddings.grad is not None
    real = batch["attention_mask"].bool()
    assert (embeddings.grad[real].abs().sum(-1) > 0).all()


def test_embeddings_are_the_three_tables_and_their_layernorm(tiny_encoder: Path) -> None:
    """For BERT by hand: LayerNorm(word + position + type), dropout off even in training mode."""
    slm = load(tiny_encoder).train()
    batch = slm.tokenize(TEXTS)
    weights = load_file(tiny_encoder / "model.safetensors")
    words = weights["embeddings.word_embeddings.weight"][batch["input_ids"]]
    positions = weights["embeddings.position_embeddings.weight"][: words.shape[1]]
    total = words + positions + weights["embeddings.token_type_embeddings.weight"][0]
    centred = total - total.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    expected = expected * weights["embeddings.LayerNorm.weight"] + weights["embeddings.LayerNorm.bias"]
    with torch.no_grad():
        assert (slm.layer(batch, 0) - expected).abs().max() < 1e-5
    assert slm.model.base_model.embeddings.training


def test_head_depends_on_the_seed_alone(tiny_encoder: Path) -> None:
    torch.manual_seed(1)
    first = load(tiny_encoder, seed=3).state()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again, other = load(tiny_encoder, seed=3).state(), load(tiny_encoder, seed=4).state()
    assert torch.equal(before, torch.get_rng_state())
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert [n for n in first if not np.array_equal(first[n], other[n])] == ["classifier.weight"]
    assert not first["classifier.bias"].any()
    assert 0.01 < first["classifier.weight"].std() < 0.03


def test_a_part_the_checkpoint_lacks_is_seeded_too(tmp_path: Path) -> None:
    """ModernBERT's classifier has a dense layer before it, which a bare encoder does not bring."""
    made = tiny.save(bare("modernbert"), tiny.wordpiece(tiny.WORDS), tmp_path / "m")
    torch.manual_seed(1)
    first = load(made).state()
    torch.manual_seed(2)
    again = load(made).state()
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_state_is_a_copy_and_loads_back(tiny_encoder: Path) -> None:
    slm, other = load(tiny_encoder, seed=0), load(tiny_encoder, seed=1)
    state = other.state()
    assert {name: array.shape for name, array in state.items()} == slm.shapes()
    assert all(array.dtype == np.float32 for array in state.values())
    slm.load_state(state)
    batch = slm.tokenize(TEXTS)
    with torch.no_grad():
        assert torch.equal(slm(batch), other(batch))
    state["classifier.bias"][:] = 7
    assert not slm.state()["classifier.bias"].any()


def test_load_state_is_strict_and_changes_nothing_on_refusal(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    before = slm.state()
    missing = {name: array for name, array in before.items() if name != "classifier.bias"}
    table = {**before, "bert.embeddings.word_embeddings.weight": np.zeros((2, 2), np.float32)}
    shape = {**before, "classifier.bias": np.zeros(4, np.float32)}
    for wrong in (missing, table, shape):
        with pytest.raises(WrongShape):
            slm.load_state(wrong)
    with pytest.raises(NonFiniteUpdate):
        slm.load_state({**before, "classifier.bias": np.array([0, np.nan, 0], np.float32)})
    assert all(np.array_equal(before[name], array) for name, array in slm.state().items())


def test_tokenize_cuts_and_pads(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder, max_length=8)
    batch = slm.tokenize(["the " * 50, "the"])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [8, 3]


def test_save_and_load_trained(tiny_encoder: Path, tmp_path: Path) -> None:
    slm = load(tiny_encoder, seed=5)
    slm.save(tmp_path / "deep" / "out", "# Card\n\nTrained by nobody.\n")
    back = load_trained(tmp_path / "deep" / "out")
    assert (back.labels, back.max_length, back.train_embeddings) == (LABELS, 32, False)
    batch = slm.tokenize(TEXTS)
    with torch.no_grad():
        assert torch.equal(slm(batch), back(batch))
    readme = (tmp_path / "deep" / "out" / "README.md").read_text()
    assert readme.startswith("# Card\n\nTrained by nobody.\n")
    assert usage_snippet(LABELS, max_length=32) in readme
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_the_usage_in_the_card_runs(
    tiny_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slm = load(tiny_encoder)
    slm.save(tmp_path / "out", "# Card\n")
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace("path/to/this/folder", str(tmp_path / "out")), {})  # noqa: S102 - our own snippet
    with torch.no_grad():
        best = int(slm(slm.tokenize(["some text"])).argmax())
    assert capsys.readouterr().out.strip().splitlines()[-1] == f"['{LABELS[best]}']"


def test_save_replaces_its_own_folder_and_no_other(tiny_encoder: Path, tmp_path: Path) -> None:
    slm = load(tiny_encoder)
    card = "# Two\n" + usage_snippet(LABELS, max_length=32)
    slm.save(tmp_path / "out", "# One\n")
    slm.save(tmp_path / "out", card)
    assert (tmp_path / "out" / "README.md").read_text() == card
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelError, match="mine exists"):
        slm.save(tmp_path / "mine", "# One\n")


def test_loading_is_silent_and_leaves_the_settings(
    tiny_encoder: Path, tiny_llm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = transformers.utils.logging
    before = (log.get_verbosity(), log.is_progress_bar_enabled())
    load(tiny_encoder)
    load_llm(str(tiny_llm))
    models.load_sentence_encoder(str(tiny_encoder))
    assert capfd.readouterr() == ("", "")
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


def broken(source: Path, folder: Path, what: str) -> Path:
    """A copy of a model folder with one thing wrong."""
    shutil.copytree(source, folder)
    weights = folder / "model.safetensors"
    match what:
        case "no config":
            (folder / "config.json").unlink()
        case "config is no JSON":
            (folder / "config.json").write_text("{")
        case "config is deep":
            (folder / "config.json").write_text("[" * 100_000)
        case "config is a list":
            (folder / "config.json").write_text("[]")
        case "unknown type":
            (folder / "config.json").write_text('{"model_type": "nothing-like-it"}')
        case "no weights":
            weights.unlink()
        case "only a pickle":
            weights.rename(folder / "pytorch_model.bin")
        case "weights cut short":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "weights of another model":
            save_file({"x": torch.zeros(2)}, weights, metadata={"format": "pt"})
        case "weights of another width":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "tokenizer is no JSON":
            (folder / "tokenizer.json").write_text("{")
        case _:
            raise ValueError(what)
    return folder


WRONG = {
    "no config": "no readable config.json",
    "config is no JSON": "not valid JSON",
    "config is deep": "not valid JSON",
    "config is a list": "no model_type",
    "unknown type": "does not load",
    "no weights": "no weights",
    "only a pickle": "pickle",
    "weights cut short": "does not load",
    "weights of another model": "not of this encoder",
    "weights of another width": "not of this encoder",
    "no tokenizer": "tokenizer",
    "tokenizer is no JSON": "tokenizer does not load",
}


@pytest.mark.parametrize("what", WRONG)
def test_broken_folders(what: str, tiny_encoder: Path, tmp_path: Path) -> None:
    folder = broken(tiny_encoder, tmp_path / "broken", what)
    with pytest.raises(ModelError, match=WRONG[what]) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "what", ["no config", "only a pickle", "weights cut short", "weights of another model"]
)
def test_broken_llm_folders(what: str, tiny_llm: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="broken"):
        load_llm(str(broken(tiny_llm, tmp_path / "broken", what)))


@pytest.mark.parametrize(
    "name",
    [
        "builtin:nothing",
        "no/such/folder/here",
        "./here",
        "nobody/has-this-model",
        "",
        "~no-such-user/model",
        "nul\0",
        "x" * 300,
        "x/" * 5000,
    ],
    ids=lambda name: ascii(name[:20]),
)
def test_names_that_lead_nowhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for read in (load, load_llm, models.load_sentence_encoder, models.base_fingerprint):
        with pytest.raises(ModelError):
            read(name)


def test_code_in_a_folder_never_runs(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(tiny_encoder, folder)
    config = json.loads((folder / "config.json").read_text())
    mapping = {
        "AutoConfig": "evil.C",
        "AutoModelForTokenClassification": "evil.M",
        "AutoTokenizer": ["evil.T", None],
    }
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": mapping}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_labels_and_lengths_that_cannot_be(tiny_encoder: Path) -> None:
    for labels in ((), ("a",), ("a", "a")):
        with pytest.raises(ModelError, match="labels"):
            load_slm(str(tiny_encoder), labels, max_length=8, train_embeddings=False, seed=0)
    with pytest.raises(ModelError, match="128 positions"):
        load(tiny_encoder, max_length=129)


def test_roberta_has_fewer_places_than_rows_in_its_table(tmp_path: Path) -> None:
    made = tiny.save(bare("roberta"), tiny.wordpiece(tiny.WORDS), tmp_path / "r")
    with pytest.raises(ModelError, match="127 positions"):
        load(made, max_length=128)
    slm = load(made, max_length=127)
    with torch.no_grad():
        assert slm(slm.tokenize(["the " * 200])).isfinite().all()


def test_an_old_head_of_another_size_is_replaced(tiny_encoder: Path, tmp_path: Path) -> None:
    load(tiny_encoder, seed=9).save(tmp_path / "three", "# Three labels\n")
    slm = load_slm(str(tmp_path / "three"), ("x", "y"), max_length=16, train_embeddings=False, seed=0)
    fresh = load_slm(str(tiny_encoder), ("x", "y"), max_length=16, train_embeddings=False, seed=0)
    assert all(np.array_equal(array, fresh.state()[name]) for name, array in slm.state().items())


@pytest.mark.parametrize("what", ["no note", "another schema", "length is text", "labels gone", "head gone"])
def test_load_trained_refuses_what_save_did_not_write(what: str, tiny_encoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    load(tiny_encoder).save(folder, "# Card\n")
    note, config = folder / "securefl.json", folder / "config.json"
    match what:
        case "no note":
            note.unlink()
        case "another schema":
            note.write_text(note.read_text().replace("securefl.model/1", "securefl.model/9"))
        case "length is text":
            note.write_text(note.read_text().replace("32", '"32"'))
        case "labels gone":
            config.write_text(
                json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "id2label"})
            )
        case "head gone":
            weights = load_file(folder / "model.safetensors")
            del weights["classifier.weight"]
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="out"):
        load_trained(folder)


def test_llm_pads_on_the_left_and_generates(tiny_llm: Path) -> None:
    model, tokenizer = load_llm(str(tiny_llm))
    assert (tokenizer.padding_side, model.training, model.dtype) == ("left", False, torch.float32)
    batch = tokenizer(["the", "the people of the world"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0
    assert batch["attention_mask"][:, -1].tolist() == [1, 1]
    out = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape[1] == batch["input_ids"].shape[1] + 4


def test_llm_without_padding_token_pads_with_the_end(tiny_llm: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llm, tmp_path / "llm")
    settings = json.loads((tmp_path / "llm" / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (tmp_path / "llm" / "tokenizer_config.json").write_text(json.dumps(settings))
    _, tokenizer = load_llm(str(tmp_path / "llm"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def weights_of(model: PreTrainedModel) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def test_gguf_gives_the_weights_and_tokens_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path / "cache"))
    folder = tiny.make_gguf(tmp_path / "g")
    capfd.readouterr()
    model, tokenizer = load_llm(str(folder))
    assert capfd.readouterr() == ("", "")
    original, their_tokenizer = load_llm(str(tmp_path / "g-source"))
    assert weights_of(model) == weights_of(original)
    text = "It is the goal, é!"
    assert tokenizer(text)["input_ids"] == their_tokenizer(text)["input_ids"]
    assert (tokenizer.padding_side, model.training, model.dtype) == ("left", False, torch.float32)


def test_gguf_is_converted_once_and_again_when_the_copy_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path / "cache"))
    folder = tiny.make_gguf(tmp_path / "g")
    expected = weights_of(load_llm(str(folder))[0])
    cache = tmp_path / "cache" / "securefl"
    assert cache.stat().st_mode & 0o777 == 0o700
    (entry,) = cache.iterdir()
    copy = entry / "model.safetensors"
    written = copy.stat().st_mtime_ns
    assert weights_of(load_llm(str(folder))[0]) == expected
    assert copy.stat().st_mtime_ns == written
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # one bit of a weight
    assert weights_of(load_llm(str(folder))[0]) == expected
    assert copy.read_bytes() == content
    (entry / "config.json").unlink()
    assert weights_of(load_llm(str(folder))[0]) == expected
    assert [path.name for path in cache.iterdir()] == [entry.name]
    shutil.rmtree(tmp_path / "g")
    tiny.make_gguf(tmp_path / "g", seed=1)
    assert weights_of(load_llm(str(folder))[0]) != expected
    assert len(list(cache.iterdir())) == 2


def test_gguf_that_is_none_and_two_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "g"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF, it says")
    with pytest.raises(ModelError, match="does not load"):
        load_llm(str(folder))
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="2 GGUF files"):
        load_llm(str(folder))


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"SECUREFL_CACHE": "one", "XDG_CACHE_HOME": "two"}, "one"),
        ({"XDG_CACHE_HOME": "two"}, "two"),
        ({}, "home/.cache"),
    ],
)
def test_where_the_cache_is(
    variables: dict[str, str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("SECUREFL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    load_llm(str(tiny.make_gguf(tmp_path / "g")))
    assert [path.name[:5] for path in (tmp_path / where / "securefl").iterdir()] == ["gguf-"]


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set SECUREFL_CACHE"):
        load_llm(str(tiny.make_gguf(tmp_path / "g")))


@pytest.mark.real
def test_smollm2_continues_a_sentence(smollm2: str) -> None:
    model, tokenizer = load_llm(smollm2)
    batch = tokenizer(["The capital of France is"], return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])


def test_sentence_encoder_of_a_plain_folder_is_the_mean(tiny_encoder: Path) -> None:
    encoder = models.load_sentence_encoder(str(tiny_encoder))
    slm = load(tiny_encoder, max_length=128)
    with torch.no_grad():
        pooled = slm.pooled(slm.tokenize(TEXTS)).numpy()
    np.testing.assert_allclose(encoder.encode(TEXTS), pooled, atol=1e-5)


def test_sentence_encoder_with_a_pickled_layer_is_refused(tiny_encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "s")
    (tmp_path / "s" / "2_Dense").mkdir()
    (tmp_path / "s" / "2_Dense" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickle"):
        models.load_sentence_encoder(str(tmp_path / "s"))


def test_base_fingerprint_follows_weights_and_config(tiny_encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "copy")
    name = str(tmp_path / "copy")
    first = models.base_fingerprint(str(tiny_encoder))
    assert models.base_fingerprint(name) == first
    (tmp_path / "copy" / "README.md").write_text("# Other\n")
    assert models.base_fingerprint(name) == first
    for file in ("config.json", "model.safetensors"):
        path = tmp_path / "copy" / file
        original = path.read_bytes()
        path.write_bytes(original.replace(b"bert", b"tree"))
        changed = models.base_fingerprint(name) if original != path.read_bytes() else None
        path.write_bytes(original + b" ")
        assert first not in (changed, models.base_fingerprint(name))
        path.write_bytes(original)
