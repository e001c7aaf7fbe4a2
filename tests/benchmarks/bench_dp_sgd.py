"""Clipped and noised training against plain training and against Opacus, on MiniLM, in the same run.

A step is one physical batch of 32 x 48 tokens: forward, backward and AdamW, for private training clipping and
noise on every trained parameter besides. No dropout on either side, which flatters the plain one. The goals
are ratios to the plain step, so that a slow or busy machine does not fail them. Time is the least of steps
that take turns; the median is printed too. Memory is the peak of a process of its own above what it held when
the model was loaded.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from securefl.config import Lora
from securefl.gaussian import add_gaussian
from securefl.gradients import Engine, clipped_sum
from securefl.models import load_slm
from securefl.slm import Slm
from tests.benchmarks.memory import resident

ROWS, TOKENS = 32, 48
THREADS = 2
TURNS = 24
OTHERS: dict[str, int] = {"hooks": 1, "ghost": 3}  # turns of what is much slower and has no goal
CLIP, NOISE = 1.0, 1.0
# What is trained -> most time and most memory, in plain steps.
GOALS: dict[str, tuple[float, float | None]] = {
    "all": (1.4, 1.35),
    "frozen": (1.2, None),
    "lora": (1.2, None),
}
ENGINES: tuple[Engine, ...] = ("book-keeping", "ghost", "hooks")


def _slm(what: str) -> Slm:
    return load_slm(
        "builtin:minilm",
        ("a", "b", "c", "d"),
        max_length=TOKENS,
        train_embeddings=what == "all",
        seed=0,
        lora=Lora(r=8) if what == "lora" else None,
    )


def _batch() -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (ROWS, TOKENS), generator=rng)
    batch = {"input_ids": ids, "attention_mask": ids.clamp(max=1), "token_type_ids": ids.clamp(max=0)}
    return batch, torch.randint(0, 4, (ROWS,), generator=rng)


@contextlib.contextmanager
def _plain(slm: Slm) -> Iterator[Callable[[], None]]:
    optimizer = torch.optim.AdamW(slm.trained(), lr=1e-5)
    batch, labels = _batch()

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(slm(batch), labels))
        optimizer.step()

    yield step


@contextlib.contextmanager
def _private(slm: Slm, engine: Engine) -> Iterator[Callable[[], None]]:
    optimizer = torch.optim.AdamW(slm.trained(), lr=1e-5)
    batch, labels = _batch()
    units = torch.arange(ROWS)
    flat = torch.zeros(sum(parameter.numel() for parameter in slm.trained()))
    parts = torch.split(flat, [parameter.numel() for parameter in slm.trained()])
    sums = [part.view_as(parameter) for part, parameter in zip(parts, slm.trained(), strict=True)]
    with clipped_sum(slm, engine) as gradients:

        def step() -> None:
            flat.zero_()
            gradients.add(batch, labels, units, [CLIP], sums)
            add_gaussian(flat, CLIP * NOISE, os.urandom(32), THREADS)
            flat.div_(ROWS)
            for parameter, total in zip(slm.trained(), sums, strict=True):
                parameter.grad = total
            optimizer.step()
            for parameter in slm.trained():
                parameter.grad = None

        yield step


def _stepping(name: str, slm: Slm) -> contextlib.AbstractContextManager[Callable[[], None]]:
    for engine in ENGINES:
        if name == engine:
            return _private(slm, engine)
    return _plain(slm)


def _times(what: str) -> dict[str, list[float]]:
    """Seconds of steps of each; they take turns, so that a busy minute falls on all of them."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", *ENGINES)}
    with contextlib.ExitStack() as stack:
        steps = {name: stack.enter_context(_stepping(name, _slm(what))) for name in times}
        for turn in range(TURNS + 1):
            for name, step in steps.items():
                if turn > OTHERS.get(name, TURNS):
                    continue
                began = time.perf_counter()
                step()
                if turn:  # the first step pays for what is made late
                    times[name].append(time.perf_counter() - began)
    return times


def _peak(name: str, what: str) -> None:
    """Run three steps, and print the peak memory above that of the loaded model."""
    torch.set_num_threads(THREADS)
    if name in ("hooks", "ghost"):
        import securefl.gradients.opacus_engines  # noqa: F401 - code is not what is measured
    slm = _slm(what)
    with torch.no_grad():
        slm(slm.tokenize(["a"]))
    before = resident("VmRSS")
    with _stepping(name, slm) as step:
        for _ in range(3):
            step()
    print(resident("VmHWM") - before)


def _peaks(what: str) -> dict[str, float]:
    found = {}
    for name in ("plain", *ENGINES):
        command = [sys.executable, "-m", "tests.benchmarks.bench_dp_sgd", name, what]
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found[name] = float(run.stdout)
    return found


@pytest.mark.parametrize("what", list(GOALS))
def test_a_private_step(what: str, benchmark: BenchmarkFixture) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        taken = benchmark.pedantic(lambda: _times(what), rounds=1)
    finally:
        torch.set_num_threads(before)
    times = {name: min(one) for name, one in taken.items()}
    peaks = _peaks(what)
    most_time, most_memory = GOALS[what]
    print(f"\nMiniLM, {what} trained, {ROWS} x {TOKENS} tokens, {THREADS} threads")
    for name, one in taken.items():
        print(
            f"  {name:12}  {times[name]:6.3f} s (median {statistics.median(one):6.3f})"
            f"  {times[name] / times['plain']:5.2f} x  {peaks[name] / 2**20:6.0f} MiB"
            f"  {peaks[name] / peaks['plain']:5.2f} x"
        )
    print(f"  goals of book-keeping: {most_time} x time, {most_memory or 'no'} x memory")
    assert times["book-keeping"] <= most_time * times["plain"]
    assert most_memory is None or peaks["book-keeping"] <= most_memory * peaks["plain"]


if __name__ == "__main__":
    _peak(sys.argv[1], sys.argv[2])
