"""What the language model's work costs on a GPU, against what that GPU can do: `make gpu-check`.

GPT2-Large and Llama-7B by their shapes, with random weights: nothing is downloaded. Writing is held against
the memory bandwidth, since every step reads all weights and the whole cache; a step of learning with LoRA
against the rate of matrix products. Both ceilings are measured in the same run, by a copy and by a product in
bfloat16. Prints JSON and a table; `--tiny` takes shapes for which any machine's CPU is enough, to see that
the code works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from securefl import _llm_training, _llm_weights
from securefl._language_model import _WRITE_BATCH, LanguageModel, Written
from securefl._llm_place import Place, device_of
from securefl._llm_training import Exercise
from securefl.crosslm_terms import CrossLm
from tests import tiny

RANK = 16
GPT2_LARGE = {"vocab_size": 50257, "n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024}
LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
TINY_GPT2 = {"vocab_size": 400, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
TINY_LLAMA = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Size:
    """How much is done: tokens a text, texts a step, turns, and the ceilings' arrays."""

    tokens: int
    texts: int
    turns: int
    copied: int  # bytes
    side: int  # of the square matrices


FULL = Size(tokens=128, texts=64, turns=3, copied=2**32, side=8192)
SMALL = Size(tokens=8, texts=4, turns=1, copied=2**20, side=64)


@dataclass(frozen=True)
class Row:
    """One model's figures; a share is of the ceiling."""

    model: str
    weights: int
    tokens_a_second: float
    writing_ceiling: float
    writing_share: float
    step_seconds: float
    step_ceiling: float
    step_share: float
    peak_gib: float


def seconds(work: Callable[[], object], device: torch.device, turns: int) -> float:
    """The least time of `turns`, after one that makes what is made late."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(turns + 1):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def bandwidth(device: torch.device, size: Size) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(size.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size.copied / seconds(lambda: target.copy_(source), device, size.turns)


def product_rate(device: torch.device, size: Size) -> float:
    """Multiplications and additions a second of a product of square bfloat16 matrices."""
    a = torch.randn(size.side, size.side, device=device, dtype=torch.bfloat16)
    return 2 * size.side**3 / seconds(lambda: a @ a, device, size.turns)


def random_model(config: GPT2Config | LlamaConfig, device: torch.device) -> Callable[..., Any]:
    """What stands in for `models.load_llm`: the shape with random weights, made where they stay."""

    def load(_: str, place: Place) -> tuple[PreTrainedModel, Any]:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=place.dtype)
        tokenizer = tiny.byte_level()
        tokenizer.padding_side = "left"
        return model.eval(), tokenizer

    return load


def cache_bytes(config: Any, rows: int, tokens: float, itemsize: int) -> float:
    """Keys and values of `rows` texts of `tokens` each."""
    return 2.0 * config.num_hidden_layers * config.hidden_size * rows * tokens * itemsize


def check(
    name: str, config: GPT2Config | LlamaConfig, device: torch.device, size: Size, speeds: tuple[float, float]
) -> Row:
    with mock.patch.object(_llm_weights, "load_llm", random_model(config, device)):
        llm = LanguageModel(name, rank=RANK, seed=0, device=device.type)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    frozen = [p for p in llm.model.parameters() if not p.requires_grad]
    weights, itemsize = sum(p.numel() for p in frozen), frozen[0].element_size()
    if not config.tie_word_embeddings:
        weights -= llm.model.get_input_embeddings().weight.numel()  # looked up, neither read nor multiplied
    prompts, rng = ["Here is a text about the world:"] * _WRITE_BATCH, np.random.default_rng(0)
    head = tuple(llm.prompt(prompts[0]))

    counts: list[int] = []

    def write() -> None:
        texts = llm.write(prompts, max_new_tokens=size.tokens, top_p=0.95, seed=0)
        counts.append(sum(len(text.tokens) for text in texts))

    rate_of = seconds(write, device, size.turns)
    rate = counts[-1] / rate_of
    read = weights * itemsize + cache_bytes(config, len(prompts), len(head) + size.tokens / 2, itemsize)
    most = len(prompts) * speeds[0] / read

    texts = rng.integers(3, config.vocab_size, (size.texts, size.tokens)).tolist()
    exercises = [
        Exercise(head, Written("", tuple(text), torch.full((size.tokens,), -8.0)), tuple(text))
        for text in texts
    ]
    gains, terms = torch.linspace(-1, 1, size.texts), CrossLm()

    def step() -> None:
        llm.optimizer.zero_grad()
        _llm_training._gradient(llm, terms, exercises, gains)
        torch.nn.utils.clip_grad_norm_(llm.parameters().values(), 1.0)
        llm.optimizer.step()

    took = seconds(step, device, size.turns)
    # Products of a token with every weight, forth by the adapted and the original model and back for
    # [M(y), x], forth and back for [x, M'(y)]; frozen weights have no gradient of their own.
    least = 2.0 * weights * size.texts * size.tokens * 5 / speeds[1]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Row(name, weights, rate, most, rate / most, took, least, least / took, peak / 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that it runs")
    small = parser.parse_args().tiny
    if not small and not torch.cuda.is_available():
        sys.exit("gpu-check needs a CUDA GPU, and there is none here; --tiny runs the same code on the CPU.")
    device, size = (device_of("cpu"), SMALL) if small else (device_of("cuda"), FULL)
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    shapes: dict[str, GPT2Config | LlamaConfig] = {
        "gpt2-large": GPT2Config(**(TINY_GPT2 if small else GPT2_LARGE), **ends),
        "llama-7b": LlamaConfig(**(TINY_LLAMA if small else LLAMA_7B), **ends),
    }
    speeds = bandwidth(device, size), product_rate(device, size)
    rows = []
    for name, config in shapes.items():
        rows.append(check(name, config, device, size, speeds))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, tiny shapes"
    figures = {"machine": machine, "bytes_a_second": speeds[0], "operations_a_second": speeds[1]}
    print(json.dumps({**figures, "models": [asdict(row) for row in rows]}))
    print(f"{machine}: copy {speeds[0] / 1e9:.0f} GB/s, product {speeds[1] / 1e12:.1f} T operations/s")
    for row in rows:
        print(
            f"{row.model:11} writes {row.tokens_a_second:9.0f} tokens/s ({row.writing_share:5.1%} of its"
            f" ceiling), step {row.step_seconds:7.3f} s ({row.step_share:5.1%}), peak {row.peak_gib:.1f} GiB"
        )


if __name__ == "__main__":
    main()
