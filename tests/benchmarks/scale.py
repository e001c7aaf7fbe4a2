"""How masked rounds scale: `python -m tests.benchmarks.scale --out DIR` runs real rounds and prints a table.

Every silo is simulated with the real machines and the real public-key suite, in one process and one round
after another: without a drop-out, and with a part of the silos dropped after sharing. Both go on from the
same shares and the same masked vectors, and both sums are checked against plain addition. Times are CPU
seconds, those of all threads together, so that a busy machine does not lengthen them. A client's are medians
over a few silos, spread evenly over the order of fingerprints; they and the server parse and encode every
message. The other silos give real messages too, but share what one of them verified already. Sizes are those
of the encoded messages; the sealed envelope around each is left out, of the bytes and of the times.

DIR keeps one file for each size, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from securefl.crypto import graph, masking_keys
from securefl.crypto.identity import Card
from securefl.crypto.masking_client import MaskingClient
from securefl.crypto.masking_keys import HYBRID, HybridSuite
from securefl.crypto.masking_messages import (
    Advert,
    AdvertList,
    Delivery,
    MaskedInput,
    Message,
    ShareMessage,
    SurvivorList,
    SurvivorSignature,
    Unmasking,
    UnmaskRequest,
    VectorSpec,
)
from securefl.crypto.masking_server import MaskingServer
from securefl.files import write_atomic
from securefl.release import Tensors
from tests.explore.machines import clone, identities
from tests.masked_rounds import terms

SIZES = (4, 8, 16, 32, 64, 100, 250, 500, 1000)
STEPS = ("advertise", "share", "mask", "sign", "unmask")
SAMPLED = 5
NAME = "weights"

Given = TypeVar("Given")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Setting:
    """What is the same for all sizes. part: one silo in so many drops out; complete: whatever the size."""

    length: int = 100_000
    bits: int = 32
    part: int = 10
    complete: bool = False


@dataclass
class Client:
    """One silo's costs: CPU seconds of each step, bytes up and down."""

    seconds: dict[str, float] = field(default_factory=dict)
    up: int = 0
    down: int = 0


class _Remembering(HybridSuite):
    """For the silos that are not measured: what one of them verified, the others need not verify again."""

    def __init__(self) -> None:
        self._verified: set[tuple[str, bytes, bytes, bytes]] = set()

    def verify(self, card: Card, context: bytes, digest: bytes, signature: bytes) -> None:
        key = (card.fingerprint, context, digest, signature)
        if key not in self._verified:
            super().verify(card, context, digest, signature)
            self._verified.add(key)


def _size(tensors: Tensors) -> int:
    return sum(array.nbytes for array in tensors.values())


class _Server:
    """A server whose CPU seconds are counted, with the parsing and encoding of its messages."""

    def __init__(self, machine: MaskingServer) -> None:
        self.machine, self.seconds = machine, 0.0

    def run(self, work: Callable[[], Given]) -> Given:
        began = time.process_time()
        result = work()
        self.seconds += time.process_time() - began
        return result

    def take(
        self, kind: type[M], receive: Callable[[str, M], None], sent: Iterable[tuple[str, Tensors]]
    ) -> None:
        for name, tensors in sent:
            self.run(partial(self._parse_and_take, kind, receive, name, tensors))

    @staticmethod
    def _parse_and_take(
        kind: type[M], receive: Callable[[str, M], None], name: str, tensors: Tensors
    ) -> None:
        receive(name, kind.from_tensors(tensors))


class Rounds:
    """The silos of one size, and the two rounds that they go through."""

    def __init__(self, silos: int, setting: Setting, say: Callable[[str], None]) -> None:
        self.setting, self.silos, self.say = setting, silos, say
        self.degree = silos - 1 if setting.complete else graph.degree_for(silos)
        self.terms = terms(silos, vectors=(VectorSpec(name=NAME, length=setting.length, bits=setting.bits),))
        self.ids = identities(silos)[:silos]
        self.names = [one.card.fingerprint for one in self.ids]
        self.roster = {one.name: one.card for one in self.ids}
        gone = -(-silos // setting.part)
        count = min(SAMPLED, silos - gone)
        self.sampled = {round((2 * place + 1) * silos / (2 * count) - 0.5) for place in range(count)}
        others = sorted(set(range(silos)) - self.sampled)
        chosen = np.random.default_rng(silos).choice(others, gone, replace=False)
        self.dropped = frozenset(int(silo) for silo in chosen)
        shared = _Remembering()
        self.clients: list[Any] = [
            MaskingClient(
                one,
                self.roster,
                self.terms,
                suite=HYBRID if silo in self.sampled else shared,
                degree=self.degree,
            )
            for silo, one in enumerate(self.ids)
        ]
        self.costs = {silo: Client() for silo in self.sampled}

    def vector(self, silo: int) -> NDArray[np.uint32]:
        rng = np.random.default_rng((self.silos, silo))
        vector: NDArray[np.uint32] = rng.integers(0, 2**self.setting.bits, self.setting.length, np.uint32)
        return vector

    def plain_sum(self, silos: Iterable[int]) -> NDArray[np.uint32]:
        total = np.zeros(self.setting.length, np.uint64)
        for silo in silos:
            total += self.vector(silo)
        return (total % (1 << self.setting.bits)).astype(np.uint32)

    def server(self) -> _Server:
        machine = MaskingServer(self.roster, self.terms, degree=self.degree, threads=1)
        return _Server(machine)

    def step(
        self,
        name: str,
        silos: Iterable[int],
        act: Callable[[Any, int, Any], Message],
        down: Callable[[int], Message | None],
        costs: Mapping[int, Client],
    ) -> list[tuple[str, Tensors]]:
        """The encoded answers of some silos to what `down` gives each."""
        sent = []
        for done, silo in enumerate(silos):
            message = down(silo)
            if silo in costs:
                came = None if message is None else message.tensors()
                began = time.process_time()
                if message is not None and came is not None:
                    message = type(message).from_tensors(came)
                answer = act(self.clients[silo], silo, message).tensors()
                costs[silo].seconds[name] = time.process_time() - began
                costs[silo].up += _size(answer)
                costs[silo].down += 0 if came is None else _size(came)
            else:
                answer = act(self.clients[silo], silo, message).tensors()
            sent.append((self.names[silo], answer))
            if done % 50 == 49:
                self.say(f"{self.silos} silos: {name} {done + 1}")
        return sent

    def both(self) -> dict[str, Any]:
        everybody = range(self.silos)
        first = self.server()
        adverts = self.step("advertise", everybody, lambda c, i, m: c.advertise(), lambda i: None, self.costs)
        listed = self._adverts(first, adverts)
        dealt = self.step("share", everybody, lambda c, i, m: c.share(m), lambda i: listed, self.costs)
        deliveries = self._deals(first, dealt)

        def mask(client: Any, silo: int, message: Any) -> Message:
            masked: Message = client.masked(message, {NAME: self.vector(silo)})
            return masked

        inputs = self.step("mask", everybody, mask, lambda i: deliveries[self.names[i]], self.costs)
        deliveries.clear()
        second = self.server()
        self._adverts(second, adverts)
        self._deals(second, dealt)
        dealt.clear()
        members = self.degree + 1
        return {
            **asdict(self.setting),
            "silos": self.silos,
            "degree": self.degree,
            "threshold": self.terms.threshold,
            "needed": masking_keys.share_threshold(self.terms.threshold, self.silos, self.silos, members),
            "sampled": len(self.sampled),
            "rounds": [self._rest(first, frozenset(), inputs), self._rest(second, self.dropped, inputs)],
        }

    def _adverts(self, server: _Server, sent: Iterable[tuple[str, Tensors]]) -> AdvertList:
        server.take(Advert, server.machine.receive_advert, sent)
        listed = server.run(server.machine.close_adverts)
        server.run(listed.tensors)
        return listed

    def _deals(self, server: _Server, sent: Iterable[tuple[str, Tensors]]) -> dict[str, Delivery]:
        server.take(ShareMessage, server.machine.receive_shares, sent)
        deliveries = server.run(server.machine.close_shares)
        for one in deliveries.values():
            server.run(one.tensors)
        return deliveries

    def _rest(
        self, server: _Server, dropped: frozenset[int], inputs: Sequence[tuple[str, Tensors]]
    ) -> dict[str, Any]:
        """The round from the masked inputs on, with clones of the clients and of their costs so far."""
        machine, kept = server.machine, self.clients
        self.clients = [clone(client) for client in kept]
        costs = {i: Client(dict(one.seconds), one.up, one.down) for i, one in self.costs.items()}
        left = [silo for silo in range(self.silos) if silo not in dropped]
        server.take(MaskedInput, machine.receive_input, [inputs[silo] for silo in left])
        survivors: SurvivorList = server.run(machine.close_inputs)
        server.run(survivors.tensors)
        signed = self.step("sign", left, lambda c, i, m: c.sign(m), lambda i: survivors, costs)
        server.take(SurvivorSignature, machine.receive_signature, signed)
        request: UnmaskRequest = server.run(machine.close_signatures)
        server.run(request.tensors)
        given = self.step("unmask", left, lambda c, i, m: c.unmask(m), lambda i: request, costs)
        server.take(Unmasking, machine.receive_unmasking, given)
        self.clients = kept
        collected, server.seconds = server.seconds, 0.0
        self.say(f"{self.silos} silos, {len(dropped)} dropped: unmasking")
        result = server.run(machine.result)
        if not np.array_equal(result.sums[NAME], self.plain_sum(left)) or result.faults:
            raise RuntimeError(f"the masked sum of {self.silos} silos is not that of their vectors")
        return {
            "dropped": len(dropped),
            "client": {
                step: statistics.median(one.seconds[step] for one in costs.values()) for step in STEPS
            },
            "total": statistics.median(sum(one.seconds.values()) for one in costs.values()),
            "up": statistics.median(one.up for one in costs.values()),
            "down": statistics.median(one.down for one in costs.values()),
            "collect": collected,
            "unmask": server.seconds,
        }


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(silos: int, setting: Setting, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Both rounds of one size; say: what is told of the progress."""
    return Rounds(silos, setting, say).both()


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    head = (
        "silos",
        "dropped",
        "degree",
        "shares needed",
        *(f"{step}, s" for step in STEPS),
        "client in all, s",
        "up, MB",
        "down, MB",
        "server collects, s",
        "server unmasks, s",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * len(head)}"]
    for one in found:
        for round_ in one["rounds"]:
            cells = (
                *(str(number) for number in (one["silos"], round_["dropped"], one["degree"], one["needed"])),
                *(f"{round_['client'][step]:.3f}" for step in STEPS),
                f"{round_['total']:.2f}",
                *(f"{round_[way] / 1e6:.2f}" for way in ("up", "down")),
                *(f"{round_[part]:.2f}" for part in ("collect", "unmask")),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Seconds and bytes over silos, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    sizes = [one["silos"] for one in found]
    none, some = ([one["rounds"][which] for one in found] for which in (0, 1))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    left.plot(sizes, [one["unmask"] for one in some], "o-", label="server unmasks")
    left.plot(sizes, [one["collect"] for one in some], "s-", label="server collects")
    left.plot(sizes, [one["total"] for one in some], "^-", label="one client")
    left.set(ylabel="CPU seconds a round", title="Time")
    right.plot(sizes, [one["down"] / 1e6 for one in none], "v-", label="down")
    right.plot(sizes, [one["up"] / 1e6 for one in none], "^-", label="up")
    vector = found[0]["length"] * -(-found[0]["bits"] // 8) / 1e6
    right.axhline(vector, color="gray", linestyle=":", label="the masked vector")
    right.set(ylabel="MB a client and round", title="Bytes")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="silos")
        axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=7)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _measured(out: Path, silos: int, setting: Setting) -> dict[str, Any]:
    """What DIR has of this size, or what it has then."""
    path = out / f"{silos}.json"
    if not path.exists():
        _say(f"{silos} silos")
        write_atomic(path, json.dumps(measure(silos, setting, _say), indent=1).encode())
    found: dict[str, Any] = json.loads(path.read_text())
    if any(found[name] != value for name, value in asdict(setting).items()):
        raise SystemExit(f"{path} was measured with other settings; give another --out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results of each size")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="silos, separated by commas")
    parser.add_argument("--length", type=int, default=Setting.length, help="values of each vector")
    parser.add_argument("--part", type=int, default=Setting.part, help="one silo in so many drops out")
    parser.add_argument("--complete", action="store_true", help="mask with everybody above 64 silos too")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(given.length, part=given.part, complete=given.complete)
    found = [_measured(given.out, int(size), setting) for size in given.sizes.split(",")]
    print(table(found))
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
