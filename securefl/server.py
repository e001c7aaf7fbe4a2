"""Admission and the round as a state machine without I/O.

`outgoing` gives the sealed plans of the step at hand, `receive` admits one answer or raises, `close_step`
moves on with those that were admitted. What the server may open it checks; centroids for peers it relays
unread. It keeps no socket, no clock of its own and no model code: weights are named arrays.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from securefl.agreement import (
    answer_kind,
    brings_model,
    fedkc_terms,
    figures,
    names_model,
    steps_of_round,
    sum_terms,
    weighs_rows,
)
from securefl.announcement import Announcement
from securefl.config import AVERAGING, Config
from securefl.crypto import envelope
from securefl.crypto.identity import Card, Identity
from securefl.dp_terms import round_claim
from securefl.errors import (
    MalformedEnvelope,
    PayloadError,
    SecureflError,
    TooFewSilos,
    UnknownSender,
    WrongRecipient,
    WrongRound,
    WrongRun,
)
from securefl.messages import MASKING_STEPS, Dropped, Header, Party, RoundPlan, Step
from securefl.methods.averaging import RunningMean, change_norm, coordinate_median, sgd_step, trimmed_mean
from securefl.participation import check_participation, cohort
from securefl.privacy import Noise, noise_source
from securefl.receipt import make_receipt
from securefl.release import (
    DpSgd,
    GaussianCounts,
    Independent,
    NonPrivate,
    PayloadKind,
    Release,
    Tensors,
    check_tensors,
    decode,
    encode,
    fingerprint,
    release_from,
)
from securefl.summation import (
    Answer,
    EncryptedSummation,
    MaskedSummation,
    OpenedSum,
    Summation,
    check_training,
)

_NOBODYS: Final[Noise] = noise_source(None)
_FIGURES: Final = {"exact": NonPrivate, "noised": GaussianCounts, "none": Independent}
MIN_COHORT = 2  # the "mean" of one silo's weights is that silo's weights
MAX_ROWS = 10**9
_NORM_ROUNDING = 1e-3  # of float32 weights near the bound


@dataclass
class Server:
    """The server of one run.

    roster: the enrolled silos' cards by name. shapes: for each silo, the arrays its model consists of.
    model: the global weights of the averaging methods (round 1: the common start). announced: what silos said
    beforehand of their models; a model of another kind is refused. only: the one silo that this machine asks,
    where each goes its own way (`lanes`). sequences: the numbers of what it sends.
    """

    identity: Identity
    roster: Mapping[str, Card]
    run: str
    config: Config
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    model: Tensors = field(repr=False)
    clock: Callable[[], float]
    announced: Mapping[str, Announcement] = field(default_factory=dict)
    only: str | None = None
    sequences: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)
    round: int = 1
    finished: bool = False
    dropped: list[Dropped] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.config.federation.method in AVERAGING:
            length = sum(array.size for array in self.model.values())
            check_participation(self.config, self.roster, self.run, length)
        self._replay = envelope.ReplayGuard()
        self._steps = self._steps_of_round()
        self._admitted: dict[str, Release | None] = {}
        self._running = RunningMean()
        self._absent: set[str] = set()  # said in this step that they take no part
        self._sealed: dict[str, bytes] = {}
        self._relay: dict[str, bytes] = {}
        self._candidates: dict[str, Tensors] = {}
        self._last: dict[str, tuple[int, str]] = {}
        self.metrics: dict[str, Mapping[str, float]] = {}
        self.sums: list[OpenedSum] = []
        self._sum: Summation | None = self._begin_sum()

    def go_on(self, number: int) -> None:
        """Begin behind the training of a round: what one silo's machine does after a crash."""
        self.round = number
        self._steps = self._steps_of_round()[1:]

    @property
    def step(self) -> Step:
        """What the silos are being asked for. Raises WrongRound once the run is over."""
        if self.finished:
            raise WrongRound("the run is over; no further message belongs to it")
        return self._steps[0]

    @property
    def _due(self) -> PayloadKind:
        return answer_kind(self.step, self.config)

    def _steps_of_round(self) -> list[Step]:
        return steps_of_round(self.round, self.config)

    # --- out

    def outgoing(self) -> Mapping[str, bytes]:
        """The sealed plan of this step for every silo it concerns; each is made when it is looked up.

        So that not all of them are in memory at once: with weights, a plan is as large as the model.
        """
        concerned: Collection[str] = self._cohort() if self.only is None else (self.only,)
        if self.step is Step.CANDIDATE:
            concerned = self._candidates
        elif self._summed and self._sum is not None:
            concerned = self._sum.concerns()
        return Plans([name for name in self.roster if name in concerned], self._plan_for)

    def _cohort(self) -> dict[str, Card]:
        """The cards of the silos that take part in the step at hand, in the roster's order."""
        if self.config.federation.method not in AVERAGING:
            return dict(self.roster)
        chosen = cohort(self.config, self.roster, self.run, self.round, self.step)
        return {name: card for name, card in self.roster.items() if name in chosen}

    @property
    def _summed(self) -> bool:
        """Whether the answers to this step go into a sum, or prepare one."""
        return self.step in (Step.KEY, Step.TRAIN, *MASKING_STEPS) and self._sum is not None

    def _begin_sum(self) -> Summation | None:
        """What adds up the models of the round, under CKKS of the run; None where the server reads them."""
        if not self.config.sums_models:
            return None
        plan = self._plan(self.model, ())
        if self.config.protection.models == "masked":
            return MaskedSummation(self._cohort(), plan, self.model, self._training(self.round))
        length = sum(array.size for array in self.model.values())
        return EncryptedSummation(self.roster, plan, length, self._training)

    def _training(self, number: int) -> DpSgd | None:
        """What a silo claims of its training in a round, but for whose noise it was; None without DP-SGD."""
        return round_claim(self.config, number, _NOBODYS)

    def _plan(self, weights: Tensors, relayed: tuple[str, ...]) -> RoundPlan:
        silos = self._cohort()
        return RoundPlan(
            run=self.run,
            round=self.round,
            rounds=self.config.federation.rounds,
            step=self.step,
            method=self.config.federation.method,
            cohort=tuple(_party(card) for card in silos.values()),
            protection=self.config.protection.models or "sealed",
            sums=sum_terms(self.config, len(silos)),
            model=fingerprint(weights) if names_model(self.step, self.config) else None,
            relayed=relayed,
            epochs=self.config.round_epochs(self.round),
            fedkc=fedkc_terms(self.config),
            answer=self._due,
        )

    def _plan_for(self, name: str) -> bytes:
        tensors: dict[str, NDArray[Any]] = {}
        weights = self._candidates[name] if self.step is Step.CANDIDATE else self.model
        if names_model(self.step, self.config) and brings_model(self.step):
            tensors.update(weights)
        if self._sum is not None and (self._summed or self.config.protection.models == "ckks"):
            tensors.update(self._sum.relayed(name))
        relayed = tuple(peer for peer in self._relay if peer != name) if self.step is Step.TRAIN else ()
        for peer in relayed:
            tensors[f"relay/{peer}"] = np.frombuffer(self._relay[peer], np.uint8)
        plan = self._plan(weights, relayed)
        body = encode(PayloadKind.PLAN, plan.model_dump(mode="json"), tensors)
        header = Header(
            run=self.run,
            round=self.round,
            step=self.step.value,
            sender=_party(self.identity.card),
            recipients=(_party(self.roster[name]),),
            kind=PayloadKind.PLAN,
            sequence=next(self.sequences),
            time=int(self.clock()),
        )
        return envelope.seal(body, header, self.identity, [self.roster[name]])

    # --- in

    def receive(self, message: bytes) -> Header:
        """Admit one answer to this step, or raise a ProtocolError that says what is wrong and change nothing.

        Signature and roster first, then run, round and step, then recipient and sequence, and only then is
        anything decrypted or parsed. "Unavailable" is an answer too: it counts as dropped.
        """
        verified = envelope.verify(message, self.roster)
        header = verified.header
        name = header.sender.name
        if header.run != self.run:
            raise WrongRun(f"{name} answered for another run; its message was refused")
        if (header.round, header.step) != (self.round, self.step.value):
            raise WrongRound(
                f"{name} answered for round {header.round} ({header.step}) in round {self.round} "
                f"({self.step.value}); its message was refused"
            )
        if self.only not in (None, name):
            raise UnknownSender(f"{name} sent a message to the lane of {self.only}")
        if name not in self._cohort():
            raise UnknownSender(f"{name} takes no part in round {self.round}; its message was refused")
        self._replay.check(header)
        if name in self._admitted or name in self._absent:
            raise WrongRound(f"{name} answered this step already; its second message was refused")
        if header.kind not in (self._due, PayloadKind.UNAVAILABLE):
            raise MalformedEnvelope(f"{name} sent {header.kind.value} where {self._due.value} was due")
        release = None
        if header.kind is not PayloadKind.UNAVAILABLE and self.step in (Step.SHARE, Step.KEY):
            self._check_peers(header)
            self._keep_sealed(name, message)
        else:
            release = self._opened(verified, header)
            if release is not None and self._summed:
                assert self._sum is not None
                self._sum.receive(self.step, Answer(name, release, verified))
                release = None  # it is in the sum; a hundred of them need not be kept
            elif release is not None and self._streams:
                self._running.add(name, release.tensors, self._weight(release))
                release = replace(release, tensors={})
        self._replay.accept(header)
        self._last[name] = (header.sequence, hashlib.sha256(message).hexdigest())
        if header.kind is PayloadKind.UNAVAILABLE:
            self._absent.add(name)
            self.dropped.append(
                Dropped(
                    name=name, step=self.step.value, error="Unavailable", reason="takes no part this round"
                )
            )
        else:
            self._admitted[name] = release
        return header

    @property
    def _streams(self) -> bool:
        """Whether the models of the step go into their mean one by one, rather than being kept."""
        averaging = self.config.federation.method in AVERAGING
        return averaging and self.step is Step.TRAIN and self.config.protection.average == "mean"

    def _weight(self, release: Release) -> float:
        """What a silo's model counts in the mean."""
        return float(release.info["rows"]) if weighs_rows(self.config) else 1.0

    def _keep_sealed(self, name: str, message: bytes) -> None:
        if self.step is Step.SHARE:
            self._sealed[name] = message
            return
        assert isinstance(self._sum, EncryptedSummation)
        if name not in self._sum.concerns():
            raise UnknownSender(f"{name} sent a CKKS key that another silo was asked for")
        self._sum.take_key(message)

    def _check_peers(self, header: Header) -> None:
        """What is for peers must be sealed to each of them, so that the server cannot pick who reads it."""
        due = {_party(card) for card in self._cohort().values()}
        if self.step is Step.SHARE:
            due -= {header.sender}
        if set(header.recipients) != due:
            raise WrongRecipient(
                f"the {header.kind.value} of {header.sender.name} is not sealed to exactly its peers"
            )

    def _opened(self, verified: envelope.Verified, header: Header) -> Release | None:
        name = header.sender.name
        body = decode(envelope.open_(verified, self.identity))
        if body.kind is not header.kind:
            raise PayloadError(f"{name} sent {body.kind} in an envelope marked {header.kind}")
        if body.kind is PayloadKind.UNAVAILABLE:
            if body.document or body.tensors:
                raise PayloadError(f"{name} says that it takes no part, and something besides")
            return None
        release = release_from(body)
        if self.step in MASKING_STEPS and not isinstance(release.claim, Independent):
            raise PayloadError(
                f"{name} makes a claim of privacy for a {release.kind.value}, which has no rows"
            )
        self._check_claim(name, release)
        if release.kind in (PayloadKind.MODEL, PayloadKind.GRADIENT):
            check_tensors(release.tensors, self.shapes[name], name)
            most = self.config.protection.max_norm
            if most is not None and change_norm(release.tensors, self.model) > most * (1 + _NORM_ROUNDING):
                raise PayloadError(
                    f"{name} sent a model that is further off than protection.max_norm = {most:g} allows"
                )
            if name in self.announced:
                self.announced[name].check(release.info, name)
            rows = release.info.get("rows")
            most = self.config.slm.batch_size if release.kind is PayloadKind.GRADIENT else MAX_ROWS
            if weighs_rows(self.config) and (type(rows) is not int or not 0 < rows <= most):
                raise PayloadError(f"{name} sent a row count that is not a whole number from 1 to {most}")
        elif release.kind is PayloadKind.METRICS:
            figures = release.info.get("metrics")
            plain = isinstance(figures, dict) and all(
                type(x) in (int, float, bool) and abs(x) <= MAX_ROWS for x in figures.values()
            )
            if not plain or release.tensors:
                raise PayloadError(f"{name} sent metrics that are not figures")
        return release

    def _check_claim(self, name: str, release: Release) -> None:
        """Require the claim that the configuration implies; those of sums are `summation`'s matter."""
        claim, training = release.claim, self._training(self.round)
        match release.kind:
            case PayloadKind.METRICS:
                due = _FIGURES[figures(self.config)]
            case PayloadKind.MODEL if training is not None:
                check_training(name, claim, training)
                return
            case PayloadKind.MODEL | PayloadKind.GRADIENT:
                due = NonPrivate
            case _:
                return
        if not isinstance(claim, due):
            raise PayloadError(f"{name} makes another claim for its {release.kind.value} than was agreed")

    def drop(self, name: str, error: SecureflError) -> None:
        """Note that a silo's message in this step was refused; the round goes on without it."""
        self.dropped.append(
            Dropped(name=name, step=self.step.value, error=type(error).__name__, reason=str(error))
        )

    def receipt(self, name: str) -> bytes | None:
        """The signed word which envelope of a silo was admitted last; None before any (`ledger_copies`)."""
        if name not in self._last:
            return None
        sequence, digest = self._last[name]
        return make_receipt(
            self.identity,
            run=self.run,
            silo=self.roster[name].fingerprint,
            sequence=sequence,
            envelope_sha256=digest,
            time=int(self.clock()),
        )

    def admitted(self) -> Mapping[str, Release | None]:
        """The answers to this step so far (None: sealed to peers, which the server cannot read; without
        tensors: models whose mean is taken as they come)."""
        return dict(self._admitted)

    # --- on

    def _missing(self) -> str:
        """Who has no answer in this round, as a clause of an error."""
        assert self._sum is not None
        silent = sorted(set(self._sum.concerns()) - set(self._admitted))
        return f" (no answer of {', '.join(silent)})" if silent else ""

    def offer(self, name: str, candidate: Tensors) -> None:
        """Put a trained model up for a silo to consider in the next step (CrossLM)."""
        self._candidates[name] = candidate

    def close_step(self) -> None:
        """End the step with the answers there are. Raises TooFewSilos where they do not suffice.

        One silo alone may miss a round; whether too many did is then for `lanes` to say.
        """
        releases = {name: release for name, release in self._admitted.items() if release is not None}
        averaging = self.config.federation.method in AVERAGING
        if self._summed:
            assert self._sum is not None
            try:
                self._sum.close(self.step)
            except TooFewSilos as error:
                raise TooFewSilos(f"round {self.round}, {self.step}: {error}{self._missing()}") from None
            if self.step is (Step.UNMASK if self.config.protection.models == "masked" else Step.TRAIN):
                self.model, opened = self._sum.opened()
                # Of earlier rounds the record stays, and not the arrays.
                self.sums = [*(replace(one, tensors=None) for one in self.sums), opened]
        elif self.step is Step.TRAIN and averaging:
            if len(releases) < MIN_COHORT:
                raise TooFewSilos(
                    f"round {self.round}: {len(releases)} of {len(self._cohort())} silos answered and at "
                    f"least {MIN_COHORT} are needed to average; see the refusals of the others"
                )
            mean = self._averaged(releases)
            gradient, rate = self.config.sends_gradients, self.config.step_rate
            self.model = sgd_step(self.model, mean, rate) if gradient else mean
        elif self.step is Step.FINISH and not releases and self.only is None:
            raise TooFewSilos("no silo took the last model; see the refusals")
        elif self.step is Step.FINISH:
            self.metrics = {name: dict(release.info["metrics"]) for name, release in releases.items()}
        if self.step is Step.CANDIDATE:
            self._candidates = {}
        if self.step is Step.SHARE:
            self._relay, self._sealed = self._sealed, {}
        elif self.step is Step.TRAIN:
            self._relay = {}
        self._admitted, self._absent, self._running = {}, set(), RunningMean()
        self._steps = self._steps[1:]
        if not self._steps:
            if self.round == self.config.federation.rounds:
                self.finished = True
                return
            self.round += 1
            self._steps = self._steps_of_round()
            if self.config.protection.models == "masked":
                self._sum = self._begin_sum()

    def _averaged(self, releases: Mapping[str, Release]) -> dict[str, NDArray[np.float32]]:
        """One model, or gradient, of the silos'."""
        terms, updates = self.config.protection, {name: one.tensors for name, one in releases.items()}
        if terms.average == "median":
            return coordinate_median(updates)
        if terms.average == "trimmed-mean":
            return trimmed_mean(updates, terms.trim)
        return self._running.mean()


class Plans(Mapping[str, bytes]):
    """Plans by the names of their silos, made one by one."""

    def __init__(self, names: Sequence[str], make: Callable[[str], bytes]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _party(card: Card) -> Party:
    return Party(name=card.name, key=card.fingerprint)
