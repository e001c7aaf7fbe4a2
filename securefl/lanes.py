"""Every silo at its own pace: one round machine a silo ("lane") and one queue to the language model.

For CrossLM and data-free KD, where a silo's exchange with the server concerns no other silo. Like `server`
without I/O, threads and a clock of its own: `outgoing` gives the sealed plans that wait for an answer,
`receive` admits one, `next_job` hands out the arrival whose turn it is, `finish` closes it. A lane whose silo
fails, refuses or is silent misses that round and holds nobody up.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from securefl.announcement import Announcement
from securefl.config import Config
from securefl.crypto import envelope
from securefl.crypto.identity import Card, Identity
from securefl.errors import SecureflError, TooFewSilos, UnknownSender, UsageError
from securefl.messages import Dropped, Header, Step
from securefl.release import Tensors
from securefl.result import ArrivalRow
from securefl.server import Plans, Server


@dataclass(frozen=True)
class Job:
    """One small model on its way through the language model.

    labels: in the order of its head. arrival: counted from 1 over all silos. queued_behind, staleness: as in
    `result.ArrivalRow`.
    """

    silo: str
    round: int
    arrival: int
    queued_behind: int
    staleness: int
    labels: tuple[str, ...]
    model: Tensors = field(repr=False)


@dataclass(frozen=True)
class Past:
    """An arrival that was served before a crash. learned: as for `Lanes.finish`. candidate: what went back;
    needed of each silo's last alone.
    """

    row: ArrivalRow
    learned: bool
    candidate: Tensors | None = field(repr=False)


@dataclass
class Lanes:
    """The server of one run of CrossLM or data-free KD.

    roster: the enrolled silos' cards by name. announced: each silo's kind of model; shapes: the arrays that
    it consists of. past: what was served before a crash, in that order: every silo is asked again from its
    last candidate on, and gives the answers that it gave (one that it no longer has is to be dropped). clock:
    Unix seconds. arrivals: what became of every model, in the order of their coming. dropped: by round, who
    took no part in a step, and why.
    """

    identity: Identity
    roster: Mapping[str, Card]
    run: str
    config: Config
    announced: Mapping[str, Announcement]
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    clock: Callable[[], float]
    past: Sequence[Past] = ()
    arrivals: list[ArrivalRow] = field(default_factory=list)
    dropped: dict[int, list[Dropped]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.roster:
            if name not in self.announced or name not in self.shapes:
                raise UsageError(f"{name} announced no model; say what every silo of the roster trains")
        # One sender has one sequence, whatever the lane; after a crash the clock is above the old one.
        sequences = itertools.count(int(self.clock() * 1e6) if self.past else 1)
        self._lanes = {
            name: Server(
                identity=self.identity,
                roster=self.roster,
                run=self.run,
                config=self.config,
                shapes=self.shapes,
                model={},
                clock=self.clock,
                announced=self.announced,
                only=name,
                sequences=sequences,
            )
            for name in self.roster
        }
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._count = 0
        self._stale = dict.fromkeys(self.roster, 0)
        self._rounds: set[int] = set()  # of which a model arrived
        last: dict[str, Past] = {}
        for one in self.past:
            self.arrivals.append(one.row)
            self._rounds.add(one.row.round)
            self._count = max(self._count, one.row.arrival)
            self._age(one.row.silo, learned=one.learned, answered=one.row.candidate)
            last[one.row.silo] = one
        for name, one in last.items():
            lane = self._lanes[name]
            lane.go_on(one.row.round)
            if one.candidate is not None:
                lane.offer(name, one.candidate)
            self._pass_idle(lane)

    # --- the silos

    @property
    def finished(self) -> bool:
        """Whether every lane is at its end."""
        return all(lane.finished for lane in self._lanes.values())

    def round_of(self, name: str) -> int:
        """The round that a silo is in."""
        return self._lanes[name].round

    def step_of(self, name: str) -> Step:
        """What a silo is being asked for. Raises WrongRound once its lane is over."""
        return self._lanes[name].step

    def outgoing(self) -> Mapping[str, bytes]:
        """The sealed plan of every silo whose answer is due; each is made when it is looked up.

        Raises TooFewSilos where a round went by without any silo's model, or the end without any silo.
        """
        self._check()
        waiting = [name for name in self._lanes if self._awaits_answer(name)]
        return Plans(waiting, lambda name: self._lanes[name].outgoing()[name])

    def receive(self, message: bytes) -> Header:
        """Admit one answer, or raise a ProtocolError that says what is wrong and change nothing.

        As `Server.receive`. A model joins the queue; any other answer moves its lane on.
        """
        name = envelope.read_header(message).sender.name  # says which lane; the lane proves it
        if name not in self._lanes:
            raise UnknownSender(f"{name[:64]} is not in the roster of this run")
        lane = self._lanes[name]
        header = lane.receive(message)
        release = lane.admitted().get(name)
        self._note(name)
        if release is None:
            self._close(name)
        elif lane.step is Step.TRAIN:
            self._enqueue(name, release.tensors, tuple(release.info["labels"]))
        else:
            if lane.step is Step.CANDIDATE:
                self._say_kept(name, lane.round, release.info["metrics"].get("kept"))
            self._close(name)
        return header

    def drop(self, name: str, error: SecureflError) -> None:
        """Note that a silo gave no answer to its step, or one that was refused; its lane goes on without it.

        Raises UsageError where no answer is due.
        """
        self.miss(name, _dropped(name, self._due(name), error))

    def miss(self, name: str, why: Dropped | None) -> None:
        """As `drop`, with what to note: a silo that stays silent for a round is noted once."""
        self._due(name)
        if why is not None:
            self.dropped.setdefault(self.round_of(name), []).append(why)
        self._close(name)

    # --- the language model

    def next_job(self) -> Job | None:
        """The arrival whose turn it is, first come first served; None while one is served, or none waits.

        Its staleness is of this moment: what was learned while it waited counts.
        """
        if self._running is not None or not self._queue:
            return None
        waited = self._queue.popleft()
        self._running = Job(**{**vars(waited), "staleness": self._stale[waited.silo]})
        return self._running

    def finish(
        self,
        job: Job,
        candidate: Tensors | None,
        *,
        learned: bool,
        seconds: float = 0.0,
        note: str | None = None,
        figures: Mapping[str, Any] = {},
    ) -> None:
        """End the job: its silo is offered the candidate at once, if there is one.

        learned: whether the language model is another than before. note, figures: for the arrival's row.
        Raises UsageError for another job than the one being served.
        """
        done = candidate is not None
        self._end(job, outcome="served", candidate=done, seconds=seconds, note=note, **figures)
        self._age(job.silo, learned=learned, answered=candidate is not None)
        if candidate is not None:
            self._lanes[job.silo].offer(job.silo, candidate)
        self._close(job.silo)

    def skip(self, job: Job, error: SecureflError, *, seconds: float = 0.0) -> None:
        """End a job whose model could not be used; its silo goes on from its own model."""
        self._end(job, outcome="skipped", candidate=False, seconds=seconds, note=str(error))
        entry = _dropped(job.silo, Step.TRAIN, error)
        self.dropped.setdefault(job.round, []).append(entry)
        self._close(job.silo)

    # --- inside

    def _awaits_answer(self, name: str) -> bool:
        """A lane waits for its silo unless it is over, or the silo's model is with the language model."""
        lane = self._lanes[name]
        return not lane.finished and name not in lane.admitted()

    def _due(self, name: str) -> Step:
        if not self._awaits_answer(name):
            raise UsageError(f"{name} is not being asked for anything")
        return self._lanes[name].step

    def _enqueue(self, name: str, model: Tensors, labels: tuple[str, ...]) -> None:
        self._count += 1
        ahead = len(self._queue) + (self._running is not None)
        number = self.round_of(name)
        self._rounds.add(number)
        self._queue.append(Job(name, number, self._count, ahead, 0, labels, model))

    def _age(self, silo: str, *, learned: bool, answered: bool) -> None:
        """What a silo last got is older by one for all others, where the language model learned."""
        if learned:
            for other in self._stale:
                self._stale[other] += other != silo
        if answered:
            self._stale[silo] = 0

    def _end(self, job: Job, **row: Any) -> None:
        """row: of the arrival, what the job does not say."""
        if job is not self._running:
            raise UsageError(f"the arrival of {job.silo} in round {job.round} is not the one being served")
        self._running = None
        facts = {key: value for key, value in vars(job).items() if key not in ("labels", "model")}
        self.arrivals.append(ArrivalRow.model_validate({**row, **facts}))

    def _say_kept(self, name: str, number: int, kept: object) -> None:
        for i, row in enumerate(self.arrivals):
            if (row.silo, row.round) == (name, number) and isinstance(kept, bool):
                self.arrivals[i] = row.model_copy(update={"kept_candidate": kept})

    def _note(self, name: str) -> None:
        """Take over what the lane has just noted of its silo."""
        lane = self._lanes[name]
        if lane.dropped:
            self.dropped.setdefault(lane.round, []).extend(lane.dropped)
            lane.dropped.clear()

    def _close(self, name: str) -> None:
        lane = self._lanes[name]
        lane.close_step()
        self._pass_idle(lane)

    @staticmethod
    def _pass_idle(lane: Server) -> None:
        """End every step that asks for nothing: no candidate, no question."""
        while not lane.finished and not lane.outgoing():
            lane.close_step()

    def _check(self) -> None:
        lanes = self._lanes.values()
        for number in range(1, self.config.federation.rounds + 1):
            passed = all(
                lane.finished or lane.round > number or (lane.round == number and lane.step is not Step.TRAIN)
                for lane in lanes
            )
            if passed and number not in self._rounds:
                raise TooFewSilos(f"round {number}: no silo sent a model")
        if self.finished and not any(lane.metrics for lane in lanes):
            raise TooFewSilos("no silo took the last model; see the refusals")


def _dropped(name: str, step: Step, error: SecureflError) -> Dropped:
    return Dropped(name=name, step=step.value, error=type(error).__name__, reason=str(error))
