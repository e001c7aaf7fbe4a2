"""The server's language model on tiny random models: its place, prompts, what trains and is kept of it."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import scipy.stats
import torch
from safetensors.numpy import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from securefl import _llm_place, _llm_training, _llm_weights
from securefl._language_model import LanguageModel, Written
from securefl._llm_place import NoRoom, Place, count_weights, device_of, precision, weight_files
from securefl._llm_training import Exercise, teach
from securefl._lower_layers import upper_half
from securefl._vllm import VllmWriter
from securefl.crosslm_terms import CrossLm
from securefl.errors import ModelError, NonFiniteUpdate, NotAvailable, WrongShape
from securefl.methods.crosslm import nucleus_sample
from securefl.models import load_llm
from securefl.release import fingerprint
from tests import tiny

TEMPLATE = (
    "{{ '<eos>' }}user:{{ messages[0]['content'] }}{% if add_generation_prompt %} assistant:{% endif %}"
)
PROMPTS = ["the", "this is a", "the", "on people with"] * 20


def make_gpt2(folder: Path, positions: int = 128) -> Path:
    """A random two-layer GPT-2 with its head; its tokenizer has no padding token."""
    tokenizer = tiny.byte_level()
    tokenizer.pad_token = None
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": positions}
        ends = {"bos_token_id": 1, "eos_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), initializer_range=0.1, **sizes, **ends))
    return tiny.save(model, tokenizer, folder)


@pytest.fixture(scope="module")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2(tmp_path_factory.mktemp("tiny") / "gpt2")


@pytest.fixture(params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tiny_llm: Path, tiny_gpt2: Path) -> Path:
    return tiny_gpt2 if request.param == "gpt2" else tiny_llm


def shift(llm: LanguageModel, size: float = 0.05) -> None:
    rng = np.random.default_rng(0)
    llm.load_state({n: v + rng.normal(0, size, v.shape).astype(np.float32) for n, v in llm.state().items()})


def logits_of(llm: LanguageModel, row: list[int]) -> Tensor:
    """(S, V): one sequence, nothing padded or cached."""
    logits: Tensor = llm.model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits


@torch.no_grad()
def require_own_log_probs(llm: LanguageModel, heads: list[list[int]], written: list[Written]) -> None:
    for head, text in zip(heads, written, strict=True):
        shares = logits_of(llm, head + list(text.tokens)).log_softmax(-1)[len(head) - 1 : -1]
        naive = shares[range(len(text.tokens)), list(text.tokens)]
        torch.testing.assert_close(text.log_probs, naive, rtol=1e-4, atol=1e-4)


# --- what it is asked


def with_template(source: Path, folder: Path, template: str) -> Path:
    """A model whose tokenizer has a chat template, and begins what it encodes with <eos> besides."""
    shutil.copytree(source, folder)
    tokenizer = tiny.byte_level()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts_go_through_the_chat_template(tiny_llm: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_llm, tmp_path / "chat", TEMPLATE)
    llm = LanguageModel(str(folder), rank=2, seed=0)
    assert llm.encode("the")[0] == 1  # the tokenizer's own beginning, which the template brings already
    assert llm.prompt("of x") == [1, *llm.encode_inner("user:of x assistant:")]
    plain = LanguageModel(str(folder), rank=2, seed=0, chat=False)
    assert plain.prompt("of x") == plain.encode("of x")
    without = LanguageModel(str(tiny_llm), rank=2, seed=0)
    assert without.prompt("of x") == without.encode("of x")
    written = llm.write(PROMPTS[:6], max_new_tokens=6, top_p=0.9, seed=1)
    require_own_log_probs(llm, [llm.prompt(prompt) for prompt in PROMPTS[:6]], written)


def test_a_template_that_takes_no_user_is_said(tiny_llm: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_llm, tmp_path / "chat", "{{ raise_exception('only systems') }}")
    llm = LanguageModel(str(folder), rank=2, seed=0)
    with pytest.raises(ModelError, match=r"chat template .* crosslm\.chat = false"):
        llm.prompt("the secret")
    assert LanguageModel(str(folder), rank=2, seed=0, chat=False).prompt("the")


# --- the lower half, which the model and the original share


def test_an_upper_adapter_leaves_the_lower_layers_alone(folder: Path) -> None:
    llm = LanguageModel(str(folder), rank=2, seed=0, layers="upper")
    everywhere = LanguageModel(str(folder), rank=2, seed=0, layers="all")
    assert all(".1." in name for name in llm.parameters())  # of layers 0 and 1
    assert set(llm.parameters()) == {name for name in everywhere.parameters() if ".1." in name}


@torch.no_grad()
def test_beside_the_original_the_lower_layers_run_once(folder: Path) -> None:
    llm = LanguageModel(str(folder), rank=2, seed=0, layers="upper")
    shift(llm)
    heads, which, tails = [[5, 9, 30], [11]], [1, 0, 1], [[20, 21, 22], [33], [50, 60]]
    expected = llm.after(heads, which, tails, whole=True)
    with llm.original():
        expected_old = llm.after(heads, which, tails, whole=True)
    assert not torch.allclose(expected.logits, expected_old.logits, atol=1e-2)
    runs = [0, 0]
    blocks = next(m for m in llm.model.modules() if isinstance(m, torch.nn.ModuleList))
    inner = [next(m for m in block.modules() if "Norm" in type(m).__name__) for block in blocks]
    for i, norm in enumerate(inner):
        norm.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    now, old = llm.beside_original(heads, which, tails, whole=True)
    assert runs == [2, 4]  # heads and tails; in the upper layer twice
    for found, wanted in ((now, expected), (old, expected_old)):
        torch.testing.assert_close(found.logits, wanted.logits)
        torch.testing.assert_close(found.head_log_probs, wanted.head_log_probs)
        assert found.mask.equal(wanted.mask)
    torch.testing.assert_close(
        llm.after(heads, which, tails).logits, expected.logits
    )  # nothing is left behind


def test_a_model_whose_layers_are_in_no_list_is_said(tiny_gpt2: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(tiny_gpt2)
    model.config.n_layer = 3
    with pytest.raises(ModelError, match=r'lora_layers = "all"'):
        upper_half(model, "odd")


# --- writing


def test_rows_that_ended_leave_the_batch_and_change_nothing_else(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "llm")
    settings = tmp_path / "llm" / "generation_config.json"
    ends = {"eos_token_id": list(range(20))}  # of some 280 tokens, so that texts end early and not together
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **ends}))
    llm = LanguageModel(str(tmp_path / "llm"), rank=4, seed=3)
    shift(llm)
    sizes: list[int] = []
    hook = llm.model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    written = llm.write(PROMPTS, max_new_tokens=60, top_p=1.0, seed=5)
    hook.remove()
    lengths = [len(text.tokens) for text in written]
    assert max(lengths) > 2 * np.mean(lengths) > 4
    # A row costs a step for each of its tokens, and a third more of that at most before it is taken out.
    assert sum(sizes) < 1.4 * sum(lengths)
    require_own_log_probs(llm, [llm.encode(prompt) for prompt in PROMPTS], written)


def test_texts_do_not_begin_with_an_end_and_end_at_every_end(tiny_llm: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llm, tmp_path / "llm")
    tokenizer = tiny.byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.save_pretrained(tmp_path / "llm")
    model, _ = load_llm(str(tiny_llm))
    model.resize_token_embeddings(len(tokenizer) - 1)  # no row for <turn>
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(tmp_path / "llm")
    llm = LanguageModel(str(tmp_path / "llm"), rank=2, seed=0)
    line = llm.encode_inner("\n")
    assert set(llm.stops) == {0, 1, 7, *line}
    assert len(tokenizer) - 1 not in llm.stops  # a token that the model cannot write
    written = llm.write(["the"] * 64, max_new_tokens=30, top_p=1.0, seed=0)
    assert all(text.tokens and not set(llm.stops) & set(text.tokens) for text in written)


def test_the_likeliest_token_alone_is_greedy(folder: Path) -> None:
    llm = LanguageModel(str(folder), rank=2, seed=0)
    (written,) = llm.write(["this is"], max_new_tokens=12, top_p=1.0, top_k=1, seed=0)
    row = llm.encode("this is")
    start = len(row)
    with torch.no_grad():
        while len(row) - start < 12:
            last = logits_of(llm, row)[-1]
            if len(row) == start:
                last[llm.stops] = -torch.inf
            token = int(last.argmax())
            if token in llm.stops:
                break
            row.append(token)
    assert list(written.tokens) == row[start:]


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 0.8), (8, 1.0), (100, 0.7)])
def test_sampling_is_that_of_transformers(top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
    cut = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(min(top_k, 40))(None, logits))
    shares = cut.softmax(-1)[0].double()
    drawn = nucleus_sample(
        logits.expand(20_000, -1), top_p, torch.Generator().manual_seed(0), top_k
    ).bincount(minlength=40)
    inside = shares > 0
    assert bool((drawn[~inside] == 0).all())
    expected = shares[inside] / shares[inside].sum() * 20_000
    assert scipy.stats.chisquare(drawn[inside].numpy(), expected.numpy()).pvalue > 1e-3


def test_what_does_not_fit_into_the_positions_is_said(tmp_path: Path) -> None:
    llm = LanguageModel(str(make_gpt2(tmp_path / "short", positions=16)), rank=2, seed=0)
    head = llm.encode("the people")
    llm.write(["the people"], max_new_tokens=16 - len(head), top_p=0.9, seed=0)
    with pytest.raises(
        ModelError, match=f"prompt of {len(head)} tokens and {17 - len(head)} .* 16 positions"
    ):
        llm.write(["the people"], max_new_tokens=17 - len(head), top_p=0.9, seed=0)


def test_a_model_without_a_cache_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level()
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=len(tokenizer), **sizes))
    folder = tiny.save(model, tokenizer, tmp_path / "gpt1")
    with pytest.raises(ModelError, match="openai-gpt model cannot write with a cache"):
        LanguageModel(str(folder), rank=2, seed=0)


def test_vllm_that_is_missing_is_said(tiny_llm: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed")
    with pytest.raises(NotAvailable, match=r"securefl\[vllm\]"):
        VllmWriter(LanguageModel(str(tiny_llm), rank=2, seed=0))


# --- what trains


def test_full_fine_tuning_trains_everything_and_keeps_the_original(folder: Path) -> None:
    llm = LanguageModel(str(folder), rank=None, seed=0)
    plain, _ = load_llm(str(folder))
    assert sum(v.size for v in llm.state().values()) == plain.num_parameters()  # a tied table counts once
    row = [20, 21, 22, 23]
    with torch.no_grad():
        fresh = logits_of(llm, row)
        torch.testing.assert_close(fresh, plain(input_ids=torch.tensor([row])).logits[0])
        shift(llm)
        assert not torch.allclose(logits_of(llm, row), fresh, atol=1e-2)
        with llm.original():
            assert logits_of(llm, row).equal(fresh)
        assert not torch.allclose(logits_of(llm, row), fresh, atol=1e-2)
    tables = llm.model.get_input_embeddings().weight, llm.model.get_output_embeddings().weight
    assert tables[0] is tables[1]
    assert not tables[0].equal(plain.get_input_embeddings().weight)
    logits_of(llm, row).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in llm.parameters().values())
    with llm.original():
        assert not any(p.requires_grad for p in llm.model.parameters())


def test_an_adapter_depends_on_the_seed_alone(folder: Path) -> None:
    state = torch.random.get_rng_state()
    first = LanguageModel(str(folder), rank=2, seed=1)
    assert torch.random.get_rng_state().equal(state)
    assert fingerprint(LanguageModel(str(folder), rank=2, seed=1).state()) == fingerprint(first.state())
    assert fingerprint(LanguageModel(str(folder), rank=2, seed=2).state()) != fingerprint(first.state())
    named = set(first.parameters())
    with first.original():
        assert set(first.parameters()) == named


def test_an_adapter_is_written_as_peft_reads_it(tiny_llm: Path, tmp_path: Path) -> None:
    llm = LanguageModel(str(tiny_llm), rank=2, seed=0)
    shift(llm)
    llm.save_adapter(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    own = {name.replace(".default", ""): value for name, value in llm.state().items()}
    assert fingerprint(stored) == fingerprint(own)
    with pytest.raises(ModelError, match="no adapter"):
        LanguageModel(str(tiny_llm), rank=None, seed=0).save_adapter(tmp_path)


def exercises_of(llm: LanguageModel, count: int = 8) -> list[Exercise]:
    prompts = ["this is a", "the people of"]
    chosen = [prompts[i % 2] for i in range(count)]
    written = llm.write(chosen, max_new_tokens=9, top_p=0.95, seed=5)
    return [
        Exercise(tuple(llm.prompt(prompt)), text, tuple(llm.encode(f"text {i} is about {prompt}")))
        for i, (prompt, text) in enumerate(zip(chosen, written, strict=True))
    ]


GAINS = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.2, -0.2, 0.9, -0.9])
CONFIG: dict[str, Any] = {"batch_size": 4, "learning_rate": 1e-3, "kl_ceiling": 100.0}


def lesson(
    llm: LanguageModel, exercises: list[Exercise], number: int, **changes: Any
) -> _llm_training.Lesson:
    config = CrossLm.model_validate({**CONFIG, **changes})
    return teach(llm, config, exercises, GAINS, np.random.default_rng(number))


@pytest.mark.parametrize("rank", [4, None])
def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(
    folder: Path, rank: int | None, tmp_path: Path
) -> None:
    through = LanguageModel(str(folder), rank=rank, seed=0)
    exercises = exercises_of(through)
    assert through.optimizer_state() == {}
    assert lesson(through, exercises, 1).undone is None
    assert all(parameter.grad is None for parameter in through.parameters().values())
    save_file(through.state(), tmp_path / "weights.safetensors")
    save_file(through.optimizer_state(), tmp_path / "optimizer.safetensors")
    lesson(through, exercises, 2)
    again = LanguageModel(str(folder), rank=rank, seed=7)
    again.load_state(load_file(tmp_path / "weights.safetensors"))
    again.load_optimizer_state(load_file(tmp_path / "optimizer.safetensors"))
    lesson(again, exercises, 2)
    assert fingerprint(again.state()) == fingerprint(through.state())
    assert fingerprint(again.optimizer_state()) == fingerprint(through.optimizer_state())
    fresh = LanguageModel(str(folder), rank=rank, seed=7)
    fresh.load_state(load_file(tmp_path / "weights.safetensors"))
    lesson(fresh, exercises, 2)
    assert fingerprint(fresh.state()) != fingerprint(through.state())  # the moments matter


def test_an_optimizer_of_another_model_is_refused(tiny_llm: Path, tiny_gpt2: Path) -> None:
    llm, other = (LanguageModel(str(one), rank=4, seed=0) for one in (tiny_llm, tiny_gpt2))
    exercises = exercises_of(llm)
    lesson(llm, exercises, 1)
    kept = llm.optimizer_state()
    with pytest.raises(WrongShape):
        other.load_optimizer_state(kept)
    name = next(name for name in kept if name.endswith(".exp_avg"))
    with pytest.raises(WrongShape):
        llm.load_optimizer_state({n: v for n, v in kept.items() if n != name})
    with pytest.raises(NonFiniteUpdate):
        llm.load_optimizer_state({**kept, name: np.full_like(kept[name], np.inf)})
    assert fingerprint(llm.optimizer_state()) == fingerprint(kept)
    llm.load_optimizer_state({})
    assert llm.optimizer_state() == {}


@pytest.mark.parametrize("rank", [4, None])
def test_what_is_undone_is_as_before_the_optimizer_too(tiny_llm: Path, rank: int | None) -> None:
    llm = LanguageModel(str(tiny_llm), rank=rank, seed=0)
    exercises = exercises_of(llm)
    lesson(llm, exercises, 1)
    before = fingerprint(llm.state()), fingerprint(llm.optimizer_state())
    undone = lesson(llm, exercises, 2, kl_ceiling=0.001, learning_rate=0.1)
    assert undone.undone is not None
    assert "ceiling of 0.001" in undone.undone
    assert (undone.kl, undone.entropy) == (None, None)
    assert (fingerprint(llm.state()), fingerprint(llm.optimizer_state())) == before

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    config = CrossLm.model_validate(CONFIG)
    with pytest.raises(KeyboardInterrupt):
        teach(llm, config, exercises, GAINS, np.random.default_rng(2), stop)
    assert (fingerprint(llm.state()), fingerprint(llm.optimizer_state())) == before


# --- the entropy floor


def test_entropy_by_hand() -> None:
    log_p = torch.tensor(
        [[[0.25] * 4, [0.5, 0.5, 1e-30, 1e-30]], [[0.75, 0.25, 1e-30, 1e-30], [0.25] * 4]]
    ).log()
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    by_hand = math.log(4) + math.log(2) + (0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert _llm_training._total_entropy(log_p, mask) == pytest.approx(by_hand, rel=1e-6)


def test_measures_are_as_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_llm_training, "_PART", 3)
    llm = LanguageModel(str(folder), rank=4, seed=0)
    exercises = exercises_of(llm)
    shift(llm)
    totals, tokens = np.zeros(3), 0
    for exercise in exercises:
        row, start = [*exercise.prompt, *exercise.written.tokens], len(exercise.prompt)
        with torch.no_grad():
            now = logits_of(llm, row).log_softmax(-1)[start - 1 : -1].double()
            with llm.original():
                old = logits_of(llm, row).log_softmax(-1)[start - 1 : -1].double()
        totals += [
            float((now.exp() * (now - old)).sum()),
            -float((now.exp() * now).sum()),
            -float((old.exp() * old).sum()),
        ]
        tokens += len(exercise.written.tokens)
    found = _llm_training.measure(llm, exercises)
    assert list(found) == ["kl", "entropy", "entropy_original"]
    assert list(found.values()) == pytest.approx((totals / tokens).tolist(), rel=1e-3)
    step = _llm_training._gradient(llm, CrossLm.model_validate(CONFIG), exercises, GAINS)
    assert {name: step[name] for name in found} == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("mode", ["stable", "paper"])
def test_a_model_that_has_become_sure_is_undone_in_stable_mode(tiny_llm: Path, mode: str) -> None:
    llm = LanguageModel(str(tiny_llm), rank=None, seed=0)
    exercises = exercises_of(llm)
    state = llm.state()
    name = next(n for n in state if n.endswith("norm.weight") and "layers" not in n)
    llm.load_state({**state, name: 12 * state[name]})  # logits twelve times as large
    before = fingerprint(llm.state())
    found = lesson(llm, exercises, 1, mode=mode, learning_rate=1e-6)
    if mode == "paper":
        assert found.undone is None
        assert found.entropy is not None
        assert found.entropy < 0.5 * found.losses[0]["entropy_original"]
        assert fingerprint(llm.state()) != before
    else:
        assert found.undone is not None
        assert "entropy of the next token fell" in found.undone
        assert found.losses == []
        assert fingerprint(llm.state()) == before


# --- where it goes


def test_devices() -> None:
    assert device_of("cpu").type == "cpu"
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    for name, is_there in there.items():
        if is_there:
            assert device_of(name).type == name
        else:
            with pytest.raises(ModelError, match=f"crosslm.device is {name}"):
                device_of(name)
    assert device_of("auto").type == ("cuda" if there["cuda"] else "mps" if there["mps"] else "cpu")
    assert precision(torch.device("cuda")) == torch.bfloat16
    assert precision(torch.device("cpu")) == precision(torch.device("mps")) == torch.float32


def test_a_device_that_is_not_there_is_a_model_error(tiny_llm: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(ModelError, match="cuda"):
        LanguageModel(str(tiny_llm), rank=2, seed=0, device="cuda")


def test_weights_are_counted_without_loading_them(tmp_path: Path) -> None:
    whole = tiny.make_gguf(tmp_path / "g")
    source = tmp_path / "g-source"
    model, tokenizer = load_llm(str(source))
    count = model.num_parameters()
    assert count_weights(weight_files(source)) == count
    assert count_weights([whole / "tiny.gguf"]) == count
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert len(weight_files(tmp_path / "parts")) > 1
    assert count_weights(weight_files(tmp_path / "parts")) == count
    tokenizer.save_pretrained(tmp_path / "parts")
    assert load_llm(str(tmp_path / "parts"))[0].num_parameters() == count


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda free: monkeypatch.setattr(_llm_place, "available", lambda _: free)


def test_a_model_larger_than_memory_is_said_before_it_is_loaded(
    tiny_llm: Path, tmp_path: Path, memory: Callable[[int], None]
) -> None:
    count = load_llm(str(tiny_llm))[0].num_parameters()
    memory(4 * count)
    load_llm(str(tiny_llm))
    memory(4 * count - 1)
    with pytest.raises(NoRoom):
        load_llm(str(tiny_llm))
    for rank, each in ((2, 4), (None, 20)):  # a weight, its gradient, two moments and the original: 5 x 4
        memory(each * count - 1)
        with pytest.raises(ModelError, match=f"{count:,} weights, {each} bytes"):
            LanguageModel(str(tiny_llm), rank=rank, seed=0)
    # 3.00 GiB are 805,306,368 float32 numbers: a header says so, and there is nothing behind it.
    huge = tmp_path / "huge"
    shutil.copytree(tiny_llm, huge)
    header = b'{"x":{"dtype":"F32","shape":[805306368],"data_offsets":[0,3221225472]}}'
    with (huge / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 3_221_225_472)  # a hole, which takes no room on the disk
    memory(2**31)
    with pytest.raises(NoRoom, match=r"huge: .* needs 3\.00 GiB on cpu .* 2\.00 GiB are available"):
        load_llm(str(huge))


def test_a_gguf_file_that_does_not_fit_is_not_converted_anew(
    tmp_path: Path, memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path / "cache"))
    folder = tiny.make_gguf(tmp_path / "g")
    memory(1000)
    with pytest.raises(NoRoom):
        load_llm(str(folder))
    assert list((tmp_path / "cache" / "securefl").iterdir()) == []
    memory(10**9)
    count = load_llm(str(folder))[0].num_parameters()
    (entry,) = (tmp_path / "cache" / "securefl").iterdir()
    written = (entry / "config.json").stat().st_mtime_ns
    memory(4 * count)
    with pytest.raises(NoRoom):
        load_llm(str(folder), Place(torch.device("cpu"), torch.float32, 20))
    assert (entry / "config.json").stat().st_mtime_ns == written


def test_a_container_may_have_less_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(_llm_place, "_CONTAINER_LIMIT", limit)
    cpu, machine = torch.device("cpu"), psutil.virtual_memory().total
    assert 0 < _llm_place.available(cpu) <= machine
    limit.write_text("max\n")
    assert 1000 < _llm_place.available(cpu) <= machine
    limit.write_text("1000\n")
    assert _llm_place.available(cpu) == 1000


@pytest.mark.parametrize("rank", [4, None])
def test_half_precision_is_for_frozen_weights_and_losses_stay_whole(
    folder: Path, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens on CUDA, on the CPU: bfloat16 keeps 8 bits of a number, so figures agree to about 1 %."""
    exact = LanguageModel(str(folder), rank=rank, seed=0)
    exercises = exercises_of(exact)
    monkeypatch.setattr(_llm_weights, "precision", lambda _: torch.bfloat16)
    llm = LanguageModel(str(folder), rank=rank, seed=0)
    with llm.original():
        frozen = {p.dtype for p in llm.model.parameters() if not p.requires_grad}
    assert torch.bfloat16 in frozen
    assert {p.dtype for p in llm.parameters().values()} == {torch.float32}
    assert {v.dtype for v in llm.state().values()} == {np.dtype(np.float32)}
    said = llm.alone([list(exercise.reading) for exercise in exercises])
    assert said.logits.dtype == torch.float32
    found, expected = lesson(llm, exercises, 1), lesson(exact, exercises, 1)
    assert found.undone is None
    for one, other in zip(found.losses, expected.losses, strict=True):
        assert one["understanding"] == pytest.approx(other["understanding"], rel=0.02)
        assert one["entropy"] == pytest.approx(other["entropy"], rel=0.02)
    assert found.losses[0]["kl"] < 0.01
    written = llm.write(PROMPTS[:6], max_new_tokens=6, top_p=0.9, seed=1)
    assert all(text.log_probs.dtype == torch.float32 and text.tokens for text in written)
