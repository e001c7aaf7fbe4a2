"""CrossLM and data-free KD in one process: silos at their own pace by a virtual clock, one language model.

A silo's training takes its rows times its passes, divided by its speed; an arrival takes the language model
as many units as it writes texts. So arrivals interleave and queue as in life, and the same seed gives the
same order. Used by `simulation` alone, which plays every party.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from securefl.announcement import announce
from securefl.client import Client
from securefl.config import Config
from securefl.crosslm_state import ServedWorker
from securefl.crosslm_worker import CrossLmWorker, figures
from securefl.crypto.identity import Identity
from securefl.data import Corpus
from securefl.errors import ConfigError, ProtocolError, Refused, SecureflError, TooFewSilos
from securefl.lanes import Job, Lanes
from securefl.local import derive_seed
from securefl.messages import Dropped, Step
from securefl.recording import RunFolder
from securefl.release import canonical_json
from securefl.result import RoundRow, ServerRow
from securefl.slm import Slm
from securefl.training import fit
from securefl.transport.memory import MemoryTransport
from securefl.workbench import Workbench

ARRIVAL_UNITS, EVALUATION_UNITS = 25.0, 30.0
Progress = Callable[[float, str], None]
Silence = Callable[[str, int, Step], bool]


def check_speeds(config: Config, corpus: Corpus) -> None:
    """Require that `federation.speed` is of silos of the run. Raises ConfigError."""
    for name in config.federation.speed:
        if name not in corpus.train:
            raise ConfigError(f"federation.speed: {name} is none of the silos of this run")


def load_worker(config: Config, labels: tuple[str, ...]) -> CrossLmWorker:
    """The language model of a run."""
    return CrossLmWorker(
        config.crosslm,
        labels,
        seed=derive_seed(config.federation.seed, "llm"),
        slm=config.slm,
        encoder=config.crosslm.encoder,
        train_llm=config.federation.method == "crosslm",
    )


def note_silence(name: str, step: Step) -> Dropped:
    """What is noted of a silo that the configuration has fall silent."""
    reason = "fell silent, as federation.drop says"
    return Dropped(name=name, step=step.value, error="Silent", reason=reason)


class Blame:
    """Why too few silos answered, in a process where every silo can be asked."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self._clients = clients
        self._known = {name: set(map(id, client.refusals)) for name, client in clients.items()}
        self.failures: list[SecureflError] = []

    def of(self, error: TooFewSilos) -> SecureflError:
        """The silos' own first refusal or failure since this was made, which says more than `error`."""
        for name, client in self._clients.items():
            for refusal in client.refusals:
                if id(refusal) not in self._known[name]:
                    return refusal
        # A training that became NaN, say: what the silo could not do says more than that it is missing.
        inside = [failure for failure in self.failures if not isinstance(failure, ProtocolError)]
        return inside[0] if inside else error


@dataclass
class _Sums:
    """What a round came to, over silos that may be in it at different times."""

    seconds: float = 0.0
    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class _Figures:
    """Of the language model: accuracy on test rows, perplexity, accuracy of its texts by the judge or NaN."""

    understanding: float
    perplexity: float
    judged: float


@dataclass
class LaneRun:
    """One run. silent: whether a silo is to give no answer to a step of a round."""

    config: Config
    corpus: Corpus
    workbench: Workbench
    clients: Mapping[str, Client]
    identity: Identity
    run: str
    transport: MemoryTransport
    worker: CrossLmWorker
    folder: RunFolder
    silent: Silence
    progress: Progress
    _rounds: dict[int, _Sums] = field(default_factory=dict)
    _noted: set[tuple[str, int]] = field(default_factory=set)

    def play(self) -> tuple[list[RoundRow], ServerRow]:
        """All rounds of all silos. Raises as `Simulation.run`."""
        judge = self._judge()
        before = self._figures(judge)  # ahead of what an interrupted run has learned
        served = ServedWorker(self.worker, self._place(), self._fresh, keep="all")
        try:
            lanes = self._serve(served)
        finally:
            served.close()
        return [self._round(number, lanes) for number in self._numbers()], self._row(
            lanes, before, self._figures(judge)
        )

    def _serve(self, served: ServedWorker) -> Lanes:
        lanes = Lanes(
            identity=self.identity,
            roster={name: client.identity.card for name, client in self.clients.items()},
            run=self.run,
            config=self.config,
            announced={name: announce(one.slm, one.base_sha256) for name, one in self.clients.items()},
            shapes={name: client.slm.shapes() for name, client in self.clients.items()},
            clock=time.time,
        )
        self._rounds = {number: _Sums() for number in self._numbers()}
        blame = Blame(self.clients)
        # What happens next: when, in which order where that is the same, and to whom.
        events: list[tuple[float, int, str | Job]] = []
        order, asked, now = itertools.count(), set[str](), 0.0
        while True:
            try:
                due = lanes.outgoing()
            except TooFewSilos as error:
                raise blame.of(error) from None
            for name in due:
                if name not in asked:
                    asked.add(name)
                    heapq.heappush(events, (now + self._takes(lanes, name), next(order), name))
            job = lanes.next_job()
            if job is not None:
                heapq.heappush(events, (now + self.config.crosslm.synthetic, next(order), job))
            if not events:
                return lanes
            now, _, who = heapq.heappop(events)
            if isinstance(who, Job):
                self._arrive(lanes, served, who)
            else:
                asked.remove(who)
                self._exchange(lanes, who, due, blame)

    def _numbers(self) -> range:
        return range(1, self.config.federation.rounds + 1)

    def _takes(self, lanes: Lanes, name: str) -> float:
        """Units of the virtual clock until a silo answers."""
        if lanes.step_of(name) is not Step.TRAIN:
            return 0.0
        passes = self.config.round_epochs(lanes.round_of(name))
        return len(self.corpus.train[name]) * passes / self.config.federation.speed.get(name, 1.0)

    def _exchange(self, lanes: Lanes, name: str, due: Mapping[str, bytes], blame: Blame) -> None:
        number, step, began = lanes.round_of(name), lanes.step_of(name), time.monotonic()
        sums, up, down = self._rounds[number], self._up(name), self.transport.bytes_down
        if self.silent(name, number, step):
            first = (name, number) not in self._noted
            self._noted.add((name, number))
            lanes.miss(name, note_silence(name, step) if first else None)
        else:
            try:
                lanes.receive(self.transport.request(name, due[name]))
            except Refused:
                raise
            except SecureflError as error:
                lanes.drop(name, error)
                blame.failures.append(error)
        sums.seconds += time.monotonic() - began
        sums.up += self._up(name) - up
        sums.down += self.transport.bytes_down - down
        units = float(self.config.round_epochs(number)) if step is Step.TRAIN else 0.0
        self.progress(units, f"round {number}, {step.value}: {name}")

    def _up(self, name: str) -> int:
        return self.transport.bytes_up.get(name, 0)

    # --- the language model

    def _fresh(self, name: str, labels: tuple[str, ...]) -> Slm:
        return self.workbench.slm(self.clients[name].slm.name, labels, self.config)[0]

    def _place(self) -> Path:
        """Of the server's state: `--resume` goes on from it where configuration and rows are the same.

        The arrivals of an interrupted run are hours of work, and a replay asks for each again.
        """
        digest = hashlib.sha256(canonical_json(self.config.model_dump(mode="json")))
        for name, rows in self.corpus.train.items():
            texts = [text.encode("utf-8", "surrogatepass").hex() for text in rows.texts]
            digest.update(canonical_json([name, list(rows.ids), texts, rows.labels.tolist()]))
        return self.folder.state / f"server-{digest.hexdigest()[:32]}"

    def _arrive(self, lanes: Lanes, served: ServedWorker, job: Job) -> None:
        """The language model and the small model that has come teach each other."""
        began = time.monotonic()
        slm = self._fresh(job.silo, job.labels)
        slm.load_state(job.model)
        answer = served.arrival(slm, job)
        lanes.finish(
            job,
            answer.candidate,
            learned=answer.report["kl"] is not None,
            seconds=answer.report["seconds"],
            note=answer.report["note"],
            figures=figures(answer.report),
        )
        self._rounds[job.round].seconds += time.monotonic() - began
        self.progress(ARRIVAL_UNITS, f"the LLM and the model of {job.silo} teach each other")

    def _figures(self, judge: Slm | None) -> _Figures:
        rows = self.corpus.test.take(range(min(self.config.crosslm.evaluate_rows, len(self.corpus.test))))
        figures = _Figures(
            self.worker.task.nlu_accuracy(rows.texts, rows.labels),
            self.worker.task.perplexity(rows.texts),
            math.nan if judge is None else self.worker.task.nlg_accuracy([judge]),
        )
        self.progress(EVALUATION_UNITS / 2, "reading test texts with the LLM")
        return figures

    def _judge(self) -> Slm | None:
        """A small model trained on rows of no silo, which gave no reward for any text."""
        asked, pool, terms = self.config.crosslm.judge_rows, self.corpus.pool, self.config.slm
        if not asked:
            return None
        if len(pool) < asked:
            raise ConfigError(
                f"crosslm.judge_rows: is {asked}, and {len(pool)} rows are of no silo; lower it, or leave "
                "more with data.pool_rows and data.train_rows"
            )
        slm, _ = self.workbench.slm(terms.models[0], self.corpus.labels, self.config)
        encoder, head = terms.learning_rates(private=False)
        fit(
            slm,
            pool.take(range(asked)),
            epochs=terms.epochs,
            batch_size=terms.batch_size,
            learning_rate=encoder,
            head_learning_rate=head,
            seed=derive_seed(self.config.federation.seed, "judge"),
        )
        return slm

    # --- the result

    def _round(self, number: int, lanes: Lanes) -> RoundRow:
        sums, refusals = self._rounds[number], lanes.dropped.get(number, [])
        return RoundRow(
            round=number,
            seconds=round(sums.seconds, 3),
            bytes_up=sums.up,
            bytes_down=sums.down,
            dropped=sorted({entry.name for entry in refusals}),
            refusals=refusals,
        )

    def _row(self, lanes: Lanes, before: _Figures, after: _Figures) -> ServerRow:
        return ServerRow(
            nlu_accuracy=after.understanding,
            nlu_accuracy_before=before.understanding,
            perplexity_before=_figure(before.perplexity),
            perplexity_after=_figure(after.perplexity),
            nlg_judged=_figure(after.judged),
            nlg_judged_before=_figure(before.judged),
            nlg_accuracy=_figure(
                self.worker.task.nlg_accuracy([client.slm for client in self.clients.values()])
            ),
            kl=self.worker.kl,
            synthetic=self.worker.samples,
            arrivals=lanes.arrivals,
        )


def _figure(value: float) -> float | None:
    """None where there was nothing to measure (a language model that wrote no usable text)."""
    return value if math.isfinite(value) else None
