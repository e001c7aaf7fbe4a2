"""CrossLM's diversity (10) over many texts: peak memory beside the vectors, in a process of its own.

All cosines of 20,000 texts at once are 1.6 GB; the goal is 200 MB. The values are those of the texts one by
one, on some of them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from securefl.methods.crosslm import diversity
from tests.benchmarks.memory import forget_peak, resident

TEXTS, WIDTH, CHECKED = 20_000, 384, 20
GOAL = 200e6


def _vectors() -> torch.Tensor:
    return torch.randn(TEXTS, WIDTH, generator=torch.Generator().manual_seed(0))


def _peak() -> None:
    vectors = _vectors()
    diversity(vectors[:1000])  # what is loaded on first use
    before = resident("VmRSS")
    forget_peak()
    found = diversity(vectors)
    peak = resident("VmHWM") - before
    unit = torch.nn.functional.normalize(vectors, dim=1)
    for i in range(0, TEXTS, TEXTS // CHECKED):
        nearest = max(float((unit[i] * unit[:i]).sum(1).max()) if i else -1.0,
                      float((unit[i] * unit[i + 1 :]).sum(1).max()) if i + 1 < TEXTS else -1.0)  # fmt: skip
        assert abs(float(found[i]) - (1 - nearest)) < 1e-5
    print(peak)


def test_diversity_of_many_texts(benchmark: BenchmarkFixture) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.bench_diversity"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    vectors = _vectors()
    benchmark.pedantic(diversity, (vectors,), rounds=3)
    peak = float(run.stdout)
    print(
        f"\n{TEXTS} texts of {WIDTH} numbers: {peak / 1e6:.0f} MB beside the vectors, goal {GOAL / 1e6:.0f}"
    )
    assert peak <= GOAL


if __name__ == "__main__":
    _peak()
