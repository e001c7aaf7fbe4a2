"""Kills a client with SIGKILL at every call that changes a file or sends, one after another, and restarts it.

Run as a program by `test_crash`, in a process of its own that may fork: the parties are made once, then each
kill point gets a fresh copy of the silo's files. Nothing is replaced but training, which does nothing here,
so that a walk takes seconds. Prints one JSON document: what was on the disk after each kill, and what the
restarted client answered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from securefl.client import Client
from securefl.crypto import envelope
from securefl.errors import AwaitingApproval
from securefl.ledger import Ledger, verify_ledger
from securefl.messages import Step
from securefl.privacy import Noise, noise_source
from securefl.release import PayloadKind, fingerprint
from securefl.state import StateFolder
from tests.federation import Parties, make_parties, tiny_config

# Every call by which this package changes a file, a folder or a lock.
CALLS = [
    (os, "open"), (os, "write"), (os, "fsync"), (os, "replace"), (os, "link"), (os, "unlink"),
    (os, "ftruncate"), (os, "mkdir"), (fcntl, "flock"),
]  # fmt: skip
SILO = "silo-1"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: int) -> None:
    """Die at the `point`-th moment: before or after one of CALLS, or half-way through a write."""
    moments = itertools.count(1)

    def at_moment() -> bool:
        return next(moments) == point

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if at_moment():
                die()
            if real is real_write and at_moment():
                real_write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                die()
            done = real(*arguments, **keywords)
            if at_moment():
                die()
            return done

        return call

    real_write = os.write
    for module, name in CALLS:
        setattr(module, name, wrapped(getattr(module, name)))


class CountingNoise:
    """A generator that counts how often it is asked for noise."""

    def __init__(self) -> None:
        self.draws = 0
        self._generator = noise_source(None).draw()

    def normal(self, *arguments: Any) -> Any:
        self.draws += 1
        return self._generator.normal(*arguments)


def restarted(client: Client, folder: Path) -> tuple[Client, CountingNoise]:
    """The same silo as a new process finds it: from its files, with the starting model."""
    counter = CountingNoise()
    fresh = dataclasses.replace(
        client,
        ledger=Ledger.open(folder / "ledger.jsonl", client.identity),
        state=StateFolder(folder / "state"),
        noise=Noise(lambda: counter, "philox4x64, 128-bit key from the OS", False),  # type: ignore[arg-type, return-value]
        ignored=type(client.ignored)(),
        refusals=type(client.refusals)(),
    )
    return fresh, counter


def in_child(work: Callable[[int], None]) -> tuple[bytes, bool]:
    """Run `work` in a fork that writes to a pipe; what it wrote, and whether it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        with contextlib.suppress(BaseException):
            work(write)
            code = 0
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    if not killed and os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit("a child failed")
    return data, killed


def walk(
    client: Client, plan: bytes, later: bytes | None, files: Path, folder: Path
) -> Iterator[dict[str, Any]]:
    """One record for each kill point; the last is the run that nothing killed."""
    start = client.slm.state()
    for point in itertools.count(1):
        place = folder / f"{point:04d}"
        shutil.copytree(files, place)

        def answer(pipe: int, point: int = point, place: Path = place) -> None:
            running, _ = restarted(client, place)
            running._contributor = client._contributor  # until it is killed it has the masks of its round
            send = os.write
            arm(point)
            with contextlib.suppress(AwaitingApproval):
                reply = running.handle(plan)
                os.fsync(os.open(place, os.O_RDONLY))  # a moment between the return and the sending
                send(pipe, reply)
                os.fsync(os.open(place, os.O_RDONLY))  # and one between sending and acknowledgement

        sent, killed = in_child(answer)
        charged = [
            entry.envelope_sha256 for entry in (*verify_ledger(place / "ledger.jsonl").releases,
            *verify_ledger(place / "ledger.jsonl").refusals) if entry.round == envelope_round(plan)
            and entry.step == envelope.read_header(plan).step
        ]  # fmt: skip

        def recover(pipe: int, place: Path = place) -> None:
            running, counter = restarted(client, place)
            found: dict[str, Any] = {}
            with contextlib.suppress(AwaitingApproval):
                reply = running.handle(plan)
                found["reply"] = hashlib.sha256(reply).hexdigest()
                found["again"] = hashlib.sha256(running.handle(plan)).hexdigest()
                found["sequence"] = envelope.read_header(reply).sequence
            found["draws"] = counter.draws
            found["model"] = fingerprint(running.slm.state())
            found["files"] = sorted(path.suffix for path in (place / "state").iterdir())
            if later is not None:
                found["later"] = envelope.read_header(running.handle(later)).sequence
            os.write(pipe, json.dumps(found).encode())

        recovered, _ = in_child(recover)
        summary = verify_ledger(place / "ledger.jsonl")
        yield {
            "point": point,
            "killed": killed,
            "sent": hashlib.sha256(sent).hexdigest() if sent else None,
            "charged": charged,
            "releases": len(summary.releases),
            "refusals": len(summary.refusals),
            "mu": summary.account.mu,
            "start": fingerprint(start),
            **json.loads(recovered),
        }
        shutil.rmtree(place)
        if not killed:
            return


def envelope_round(message: bytes) -> int:
    return envelope.read_header(message).round


def _lay_out(parties: Parties, folder: Path) -> Client:
    """The files of the silo as its own process would have them, and its client, closed."""
    client = parties.clients[SILO]
    assert client.state is not None
    files = folder / "files"
    files.mkdir()
    shutil.copy(client.ledger.path, files / "ledger.jsonl")
    shutil.copy(client.ledger.path.with_suffix(".head.json"), files / "ledger.head.json")
    shutil.copytree(client.state.path, files / "state")
    client.state.close()  # and not the client, which would forget its masked round
    return client


def main(case: str, encoder: str, data: str, place: str) -> None:
    """Prepare one case and walk it."""
    folder = Path(place)
    folder.mkdir()

    def no_training(*arguments: Any) -> None:
        """The model stays as it was; where it must differ, the case changes it."""

    changes: dict[str, dict[str, Any]] = {"federation": {"method": "fedavg"}}
    policy: dict[str, Any] = {}
    if case == "noisy share":
        changes = {
            "federation": {"method": "fedkc"},
            "privacy": {"centroids": {"epsilon": 4.0, "clip": 5.0, "min_size": 2}},
        }
    elif case == "masked model":
        changes["protection"] = {"models": "masked"}
    elif case == "own model":
        changes = {"federation": {"method": "datafree-kd"}}
    elif case == "refusal":
        policy = {"kinds": (PayloadKind.METRICS,)}
    elif case == "waiting":
        policy = {"approval": "manual"}
    elif case == "forgetful":  # a planted fault: the answer is charged and was never kept
        StateFolder.keep_answer = _keep_nothing  # type: ignore[method-assign]

    def shift(slm: Any, *arguments: Any) -> None:
        slm.load_state({name: array + 1 for name, array in slm.state().items()})

    train = shift if case == "own model" else no_training
    parties = make_parties(tiny_config(Path(encoder), Path(data), **changes), folder, train, **policy)
    if case == "noisy share":
        parties.play(lambda server: server.round == 2)
    elif case == "masked model":
        parties.play(lambda server: server.step is Step.TRAIN)
    plan = parties.server.outgoing()[SILO]
    later = None
    if case in ("plain", "own model"):  # the plan of the next round, as an honest server would make it
        parties.server.close_step = _skip(parties)  # type: ignore[method-assign]
        parties.server.close_step()
        later = parties.server.outgoing()[SILO]
    client = _lay_out(parties, folder)
    print(json.dumps(list(walk(client, plan, later, folder / "files", folder))))


def _keep_nothing(_: StateFolder, envelope: bytes, terms: str) -> str:
    return hashlib.sha256(envelope).hexdigest()


def _skip(parties: Parties) -> Callable[[], None]:
    def skip() -> None:
        server = parties.server
        server.round += 1
        server._steps = server._steps_of_round()

    return skip


if __name__ == "__main__":
    main(*sys.argv[1:])
