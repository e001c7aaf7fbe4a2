"""The rounds of an averaging method in one process: plans out, answers in, the model and the sums on record.

The counterpart of `simulated_lanes`, for methods in which the server waits for all silos in every round. Used
by `simulation` alone, which plays every party.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from securefl.client import Client
from securefl.config import AVERAGING, Config
from securefl.crypto.identity import Identity
from securefl.data import Corpus
from securefl.dp_terms import run_claim
from securefl.errors import Refused, SecureflError, TooFewSilos
from securefl.messages import Dropped, Step
from securefl.participation import cohort
from securefl.privacy import noise_source
from securefl.recording import RunFolder
from securefl.release import DpSgd, encode_release
from securefl.result import RoundRow, ServerRow, SumRow
from securefl.server import Server
from securefl.simulated_lanes import Blame, Progress, Silence, note_silence
from securefl.transport.memory import MemoryTransport
from securefl.workbench import Workbench


@dataclass
class RoundRun:
    """One run. silent: whether a silo is to give no answer to a step of a round."""

    config: Config
    corpus: Corpus
    workbench: Workbench
    clients: Mapping[str, Client]
    identity: Identity
    run: str
    transport: MemoryTransport
    folder: RunFolder
    silent: Silence
    progress: Progress
    _noted: dict[int, set[str]] = field(default_factory=dict)

    def play(self) -> tuple[list[RoundRow], ServerRow, list[SumRow]]:
        """All rounds, and every sum that was opened in them. Raises as `Simulation.run`."""
        server = Server(
            identity=self.identity,
            roster={name: client.identity.card for name, client in self.clients.items()},
            run=self.run,
            config=self.config,
            clock=time.time,
            shapes={name: client.slm.shapes() for name, client in self.clients.items()},
            model=next(iter(self.clients.values())).slm.state(),
        )
        rounds, row = self._federate(server, self.transport)
        return rounds, row, self._sum_rows(server)

    def _federate(self, server: Server, transport: MemoryTransport) -> tuple[list[RoundRow], ServerRow]:
        rounds: list[RoundRow] = []
        while not server.finished:
            number, began, dropped = server.round, time.monotonic(), len(server.dropped)
            asked = sorted(cohort(self.config, self.clients, self.run, number, Step.TRAIN))
            up, down = sum(transport.bytes_up.values()), transport.bytes_down
            if self._server_reads:
                self.folder.global_model(number, server.model, *self._base(), self._so_far(number - 1))
            while not server.finished and server.round == number:
                self._step(server, transport)
            refusals = server.dropped[dropped:] + self._ignored_peers()
            rounds.append(
                RoundRow(
                    round=number,
                    seconds=round(time.monotonic() - began, 3),
                    bytes_up=sum(transport.bytes_up.values()) - up,
                    bytes_down=transport.bytes_down - down,
                    dropped=sorted({entry.name for entry in refusals}),
                    refusals=refusals,
                    asked=asked,
                )
            )
        if self.config.protection.models == "ckks":
            return rounds, ServerRow()  # only silos can open the sum
        self.folder.global_model(len(rounds) + 1, server.model, *self._base(), self._so_far(len(rounds)))
        slm, _ = self.workbench.slm(self.config.slm.models[0], self.corpus.labels, self.config)
        slm.load_state(server.model)
        right = self.workbench.answers(slm, self.corpus.test)
        return rounds, ServerRow(test_accuracy=float(right.mean()))

    def _step(self, server: Server, transport: MemoryTransport) -> None:
        step, number = server.step, server.round
        blame = Blame(self.clients)
        for name, plan in server.outgoing().items():
            try:
                if self.silent(name, number, step):
                    self._note_silence(server, name)
                else:
                    server.receive(transport.request(name, plan))
            except Refused:
                raise
            except SecureflError as error:
                server.drop(name, error)
                blame.failures.append(error)
            units = float(self.config.round_epochs(number)) if step in (Step.SHARE, Step.TRAIN) else 0.0
            self.progress(units, f"round {number}, {step.value}: {name}")
        try:
            server.close_step()
            self._record_sums(server)
        except TooFewSilos as error:
            raise blame.of(error) from None

    def _note_silence(self, server: Server, name: str) -> None:
        """Once a round: the first step that a silo did not answer."""
        noted = self._noted.setdefault(server.round, set())
        if name not in noted:
            noted.add(name)
            server.dropped.append(note_silence(name, server.step))

    def _ignored_peers(self) -> list[Dropped]:
        """Peers whose centroids some silo could not use in this round, each once."""
        found: dict[str, Dropped] = {}
        for client in self.clients.values():
            for entry in client.ignored:
                found.setdefault(entry.name, entry)
            client.ignored.clear()
        return list(found.values())

    @property
    def _server_reads(self) -> bool:
        """Whether the server has a global model that it can read."""
        return self.config.federation.method in AVERAGING and self.config.protection.models != "ckks"

    def _so_far(self, rounds: int) -> DpSgd | None:
        """The claim on what was made of so many rounds' trainings, for each silo alike."""
        return run_claim(self.config, rounds, noise_source(self.config.federation.seed))

    def _base(self) -> tuple[str, tuple[str, ...]]:
        return self.config.slm.models[0], self.corpus.labels

    def _record_sums(self, server: Server) -> None:
        """What the server opened of the round that it has just closed."""
        for opened in server.sums:
            if opened.tensors is not None:
                self.folder.sum(server.identity.name, encode_release(opened.release()))

    def _sum_rows(self, server: Server) -> list[SumRow]:
        rows = []
        for opened in (one for one in server.sums if one.round in self.folder.sums):
            known = self.folder.sums[opened.round]
            rows.append(
                SumRow(
                    round=opened.round,
                    protection="ckks" if opened.protection == "ckks" else "masked",
                    opened_by=known.openers,
                    silos=list(opened.silos),
                    threshold=opened.threshold,
                    rows=known.info["rows"],
                    resolution=known.info["resolution"],
                    noise=known.info.get("noise"),
                    faults=list(opened.faults),
                    claim=known.claim.model_dump(mode="json"),
                    sha256=known.sha256,
                )
            )
        return rows
