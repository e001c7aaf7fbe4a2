"""A masked round as a whole: the memory of the server's sum, and what small rounds cost.

The memory goal: the server holds at most three vectors of uint32 at a time, its running sum and the incoming
message included, however many silos there are. It is measured over a round of 10 and of 100 silos of which
one drops out, from before the sum is allocated to the sum without masks, twice: by tracemalloc, which sees
numpy's arrays, and by the peak of the process. The incoming vectors are random bytes: so are masked ones, and
the server cannot tell. All else is a true round, with cheap public-key operations and small neighbourhoods;
neither has a part in what is measured. Not counted are the shares that the server keeps for its clients,
3.2 kB for each silo and neighbour whatever the length of the vectors.

`python -m tests.benchmarks.scale` has larger rounds than the table.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from securefl.crypto.masking_messages import MaskedInput, VectorSpec
from securefl.crypto.masking_server import MaskingServer
from tests.benchmarks.memory import resident
from tests.benchmarks.scale import Setting, measure, table
from tests.masked_rounds import SUITE, Round

MODEL = 22_700_000
MEMORY_GOAL = 3.0  # vectors
NAME = "weights"


def _stream(silos: int) -> None:
    """A round whose server sums vectors of MODEL values; prints what it took (see `_STREAMED`)."""
    round_ = Round(silos, degree=8, vectors=(VectorSpec(name=NAME, length=1, bits=32),))
    wide = round_.terms.model_copy(update={"vectors": (VectorSpec(name=NAME, length=MODEL, bits=32),)})
    # The clients mask one value each: of their messages only the masked input depends on the length.
    round_.server = MaskingServer(round_.roster, wide, suite=SUITE, degree=8)
    everybody, rng = range(silos), np.random.default_rng(0)
    adverts = round_.advertise(everybody)
    for silo in everybody:
        round_.server.receive_shares(round_.names[silo], round_.clients[silo].share(adverts))

    tracemalloc.start()
    traced, before = tracemalloc.get_traced_memory()[0], resident("VmRSS")
    deliveries = round_.server.close_shares()
    left, adding = range(1, silos), 0.0
    for silo in left:
        round_.clients[silo].masked(deliveries[round_.names[silo]], round_.fresh(silo))
        # Not rng.bytes, which holds its result twice.
        row = rng.integers(0, 2**32, MODEL, np.uint32).view(np.uint8).data
        made = MaskedInput(adverts=adverts.digest(), vectors={NAME: row}).tensors()
        began = time.perf_counter()
        round_.server.receive_input(round_.names[silo], MaskedInput.from_tensors(made))
        adding += time.perf_counter() - began
        del made, row
    request = round_.sign(left, round_.server.close_inputs())
    began = time.perf_counter()
    result = round_.unmask(left, request)
    unmasking = time.perf_counter() - began
    assert result.sums[NAME].size == MODEL
    peaks = tracemalloc.get_traced_memory()[1] - traced, resident("VmHWM") - before
    print(*(peak / MODEL / 4 for peak in peaks), adding / len(left), unmasking)


@pytest.mark.parametrize("silos", [10, 100])
def test_the_server_holds_three_vectors_at_most(silos: int, benchmark: BenchmarkFixture) -> None:
    # In a process of its own: a peak is that of a whole process, and this one has had its own already.
    command = [sys.executable, "-m", "tests.benchmarks.bench_masked_rounds", str(silos)]
    run = benchmark.pedantic(
        lambda: subprocess.run(command, check=True, capture_output=True, text=True), rounds=1
    )
    traced, resident, adding, unmasking = map(float, run.stdout.split())
    print(
        f"\n{silos} silos, 22.7 M values, one dropped: peak {traced:.2f} vectors by tracemalloc, "
        f"{resident:.2f} of the process, goal {MEMORY_GOAL}; {1000 * adding:.0f} ms a vector added, "
        f"{unmasking:.1f} s to unmask (neighbourhoods of 9)"
    )
    # The sum and the message are always alive: less would be a broken measure.
    assert 2 <= traced <= MEMORY_GOAL
    assert 2 <= resident <= MEMORY_GOAL


def test_small_rounds(benchmark: BenchmarkFixture) -> None:
    """Real suite, 1,000 values; that the sums are right is checked within."""
    setting = Setting(length=1000, part=4)
    measure(4, setting)  # the first round of a process pays for what is loaded late
    found = benchmark.pedantic(lambda: [measure(silos, setting) for silos in (4, 8, 16)], rounds=1)
    print(f"\n1,000 values, CPU seconds, a quarter dropped\n{table(found)}")
    for one in found:
        assert [round_["dropped"] for round_ in one["rounds"]] == [0, one["silos"] // 4]


def test_a_quarter_of_a_hundred_silos_drops_out(benchmark: BenchmarkFixture) -> None:
    """Needs every silo to mask with all others: the default degree withstands a tenth."""
    setting = Setting(length=1000, part=4, complete=True)
    found = benchmark.pedantic(lambda: [measure(100, setting)], rounds=1)
    print(f"\n1,000 values, CPU seconds, a quarter of 100 silos dropped\n{table(found)}")
    assert [round_["dropped"] for round_ in found[0]["rounds"]] == [0, 25]


if __name__ == "__main__":
    _stream(int(sys.argv[1]))
