"""The server's language model against transformers' own writing, and LoRA against full fine-tuning: SmolLM2.

Writing: prompts of mixed lengths, once by `LanguageModel.write`, once by transformers' `generate` in lists as
they come, at the same batch size, nucleus and ends of a text; what counts is tokens a second. A step: one
batch of CrossLM's losses and AdamW, with an adapter, and of all weights with the original as a second copy.
Both are ratios in one run, and those compared take turns, so that a slow or busy machine does not fail them.
Memory is the peak of a process of its own above what it held before the model was loaded: weights, gradients,
moments and one batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from securefl import _llm_training
from securefl._language_model import _WRITE_BATCH, LanguageModel, Written
from securefl._llm_training import Exercise
from securefl.crosslm_terms import CrossLm
from tests.benchmarks.memory import forget_peak, resident

MODEL = "builtin:smollm2"
THREADS = 2
TURNS = 2
PROMPTS, NEW_TOKENS, TOP_P = 128, 16, 0.95
TEXTS, TEXT_TOKENS, RANK = 16, 24, 16
GOALS = {"writing": 1.5, "time": 0.6, "memory": 0.5}


def _prompts() -> list[str]:
    labels = ("sports", "business", "science and technology", "world politics")
    ask = "Here is a text about {}, of one sentence, as it could stand in a newspaper of a large town:"
    shapes = ("Here is a text about {}:", ask, "A reader asked for news. " * 4 + ask)
    made = [shape.format(label) for shape in shapes for label in labels]
    return [made[i] for i in np.random.default_rng(0).integers(len(made), size=PROMPTS).tolist()]


@torch.no_grad()
def _generate(llm: LanguageModel, prompts: list[str], seed: int) -> int:
    """Tokens that transformers writes; a text ends where one of `LanguageModel.write` does."""
    torch.manual_seed(seed)
    count = 0
    stops = torch.tensor(llm.stops)
    for start in range(0, len(prompts), _WRITE_BATCH):
        heads = [llm.prompt(prompt) for prompt in prompts[start : start + _WRITE_BATCH]]
        batch = llm.tokenizer.pad({"input_ids": heads}, padding=True, return_tensors="pt")
        written = llm.model.generate(
            **batch,
            do_sample=True,
            top_p=TOP_P,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=llm.stops,
            begin_suppress_tokens=llm.stops,
            pad_token_id=llm.tokenizer.pad_token_id,
        )[:, batch["input_ids"].shape[1] :]
        count += int((torch.isin(written, stops).cumsum(1) == 0).sum())
    return count


def _rates(llm: LanguageModel) -> dict[str, list[float]]:
    """Tokens a second of each."""
    prompts = _prompts()

    def ours(seed: int) -> int:
        written = llm.write(prompts, max_new_tokens=NEW_TOKENS, top_p=TOP_P, seed=seed)
        return sum(len(text.tokens) for text in written)

    ways: dict[str, Callable[[int], int]] = {
        "ours": ours,
        "transformers": lambda seed: _generate(llm, prompts, seed),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    llm.write(prompts[:2], max_new_tokens=2, top_p=TOP_P, seed=0)  # what is made late is made now
    for turn in range(TURNS):
        for name, write in ways.items():
            began = time.perf_counter()
            count = write(turn)
            rates[name].append(count / (time.perf_counter() - began))
    return rates


def test_writing(benchmark: BenchmarkFixture) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        llm = LanguageModel(MODEL, rank=RANK, seed=0, device="cpu")
        rates = benchmark.pedantic(lambda: _rates(llm), rounds=1)
    finally:
        torch.set_num_threads(before)
    best = {name: max(one) for name, one in rates.items()}
    ratio = best["ours"] / best["transformers"]
    print(f"\n{PROMPTS} prompts, at most {NEW_TOKENS} tokens each, {THREADS} threads, best of {TURNS}:")
    print(", ".join(f"{name} {rate:.0f} tokens a second" for name, rate in best.items()))
    print(f"{ratio:.2f} times as fast, goal {GOALS['writing']}")
    assert ratio >= GOALS["writing"]


def _exercises(llm: LanguageModel) -> list[Exercise]:
    rng = np.random.default_rng(0)
    heads = [
        tuple(llm.prompt(prompt))
        for prompt in ("Here is a text about sports:", "Here is a text about business:")
    ]
    texts = rng.integers(100, 20_000, (TEXTS, TEXT_TOKENS)).tolist()
    sentence = llm.encode_inner("\nThis text is about sports.")
    return [
        Exercise(heads[i % 2], Written("", tuple(text), torch.full((TEXT_TOKENS,), -8.0)), (*text, *sentence))
        for i, text in enumerate(texts)
    ]


def _step(way: str) -> Callable[[], None]:
    rank = RANK if way == "lora" else None
    llm = LanguageModel(MODEL, rank=rank, seed=0, device="cpu", chat=False, layers=CrossLm().lora_layers)
    exercises, gains, config = _exercises(llm), torch.linspace(-1, 1, TEXTS), CrossLm()
    for group in llm.optimizer.param_groups:
        group["lr"] = 1e-6

    def step() -> None:
        llm.optimizer.zero_grad()
        _llm_training._gradient(llm, config, exercises, gains)
        torch.nn.utils.clip_grad_norm_(llm.parameters().values(), 1.0)
        llm.optimizer.step()

    return step


def _times() -> dict[str, list[float]]:
    """Seconds of steps of each; they take turns."""
    steps = {way: _step(way) for way in ("lora", "full")}
    times: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(TURNS + 1):
        for way, step in steps.items():
            began = time.perf_counter()
            step()
            if turn:  # the first step makes the moments
                times[way].append(time.perf_counter() - began)
    return times


def _peak(way: str) -> None:
    """Run two steps, and print the peak memory above that of the process without a model."""
    torch.set_num_threads(THREADS)
    before = resident("VmRSS")
    step = _step(way)
    forget_peak()  # the peak begins anew: loading is not what is measured
    for _ in range(2):
        step()
    print(resident("VmHWM") - before)


def _peaks() -> dict[str, float]:
    found = {}
    for way in ("lora", "full"):
        command = [sys.executable, "-m", "tests.benchmarks.bench_language_model", way]
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found[way] = float(run.stdout)
    return found


def test_a_step_of_the_adapter(benchmark: BenchmarkFixture) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        taken = benchmark.pedantic(_times, rounds=1)
    finally:
        torch.set_num_threads(before)
    times, peaks = {way: min(one) for way, one in taken.items()}, _peaks()
    print(f"\n{TEXTS} texts of {TEXT_TOKENS} tokens, {THREADS} threads, best of {TURNS}")
    for way in times:
        print(f"  {way}  {times[way]:6.2f} s  {peaks[way] / 2**20:6.0f} MiB")
    share = {"time": times["lora"] / times["full"], "memory": peaks["lora"] / peaks["full"]}
    for what, value in share.items():
        print(f"  {what} {value:.2f} of full fine-tuning, goal {GOALS[what]}")
    assert all(share[what] <= GOALS[what] for what in share)


if __name__ == "__main__":
    _peak(sys.argv[1])
