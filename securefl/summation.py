"""The server's half of a sum that it sees no part of: what it sends on, takes in, and opens.

One interface for masked sums and CKKS, which `server` drives step by step; the protocols themselves are
`crypto.masking_server` and `crypto.ckks`. State machines without I/O; no model code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from securefl import distributed_noise
from securefl.agreement import (
    LEAST_SILOS,
    RELAYED,
    SEALED_KEY,
    UPDATE,
    WEIGHT,
    check_sum_chunks,
    ckks_terms,
    fixed_points,
    key_maker,
    masked_terms,
    mechanism_of,
    summed_claim,
)
from securefl.crypto.ckks import MAX_KEY_ENVELOPE, RunningSum, Signed, chunk_tensors
from securefl.crypto.envelope import Verified
from securefl.crypto.identity import Card
from securefl.crypto.masking_messages import (
    Advert,
    MaskedInput,
    Message,
    ShareMessage,
    SurvivorSignature,
    Unmasking,
)
from securefl.crypto.masking_server import MaskedSum, MaskingServer
from securefl.crypto.weighted import weighted_mean
from securefl.distributed_noise import decode_mean
from securefl.dp_terms import is_due
from securefl.errors import PayloadError, TooFewSilos, TooLarge, WrongRound
from securefl.messages import RoundPlan, Step
from securefl.privacy import Noise, noise_source
from securefl.release import Claim, DpSgd, PayloadKind, Release, Tensors, flatten, unflatten

_NOBODYS: Final[Noise] = noise_source(None)
# What a claim says of where its noise comes from, which differs between silos.
_SOURCE: Final = {"generator", "simulated"}
# What the silos claim of their training by DP-SGD in a round; None without it.
Training = Callable[[int], DpSgd | None]


@dataclass(frozen=True)
class OpenedSum:
    """What became known of the silos' models in a round.

    silos: names of those in the sum. tensors: the weighted mean of their changes of the weights, float32, or
    None under CKKS, where only silos can open it. rows: of all of them together. resolution: the largest
    error that the encoding makes in a weight of the mean. noise: standard deviation of the silos' noise in
    one. faults: bad shares, and whose.
    """

    round: int
    protection: str
    silos: tuple[str, ...]
    threshold: int
    tensors: Tensors | None = field(default=None, repr=False)
    rows: int | None = None
    resolution: float | None = None
    noise: float | None = None
    faults: tuple[str, ...] = ()
    claim: Claim | None = None

    def release(self) -> Release:
        """The opened sum as it is recorded; only where this server could open it."""
        assert self.tensors is not None
        assert self.claim is not None
        info: dict[str, Any] = {
            "round": self.round,
            "rows": self.rows,
            "resolution": self.resolution,
            "noise": self.noise,
        }
        info |= {"silos": list(self.silos), "holds": "the mean change of the weights in this round"}
        return Release(PayloadKind.SUM, self.tensors, info, self.claim)


@dataclass(frozen=True, repr=False)
class Answer:
    """A silo's answer to a step: its name, the release, and the envelope that it came in."""

    name: str
    release: Release
    verified: Verified


class Summation(Protocol):
    """A round's sum as the server drives it. Silos go by name; a `receive` that raises changes nothing."""

    def concerns(self) -> Collection[str]:
        """The silos that the plan of the step at hand goes to."""

    def relayed(self, name: str, /) -> Tensors:
        """What that plan brings to a silo, beside weights."""

    def receive(self, step: Step, answer: Answer) -> None:
        """Take a silo's answer. Raises ProtocolError, naming it."""

    def close(self, step: Step) -> None:
        """End a step. Raises TooFewSilos where those who answered do not suffice."""

    def opened(self) -> tuple[Tensors, OpenedSum]:
        """After the last step: what the next plans bring as the model, and the record of the sum."""


class MaskedSummation:
    """A masked round, from its first plan to the mean of the survivors' models."""

    def __init__(
        self, roster: Mapping[str, Card], plan: RoundPlan, model: Tensors, training: DpSgd | None = None
    ) -> None:
        """plan: of any step of the round; model: the weights that it names; training: what the silos claim of
        a training by DP-SGD, whose models weigh the same. Raises TooFewSilos.
        """
        self._training = training
        self._keys = {name: card.fingerprint for name, card in roster.items()}
        self._names = {card.fingerprint: name for name, card in roster.items()}
        self._plan, self._model = plan, model
        length = sum(array.size for array in model.values())
        self._mechanism = mechanism_of(plan, length)
        self._claim: Claim | None = None
        degree = None if plan.sums is None else plan.sums.degree
        self._machine = MaskingServer(roster, masked_terms(plan, length), degree=degree)
        self._outgoing: dict[str, Message] = {}
        self._all: Message | None = None
        self._concerned: set[str] = set(roster)
        self._answered: set[str] = set()
        self._result: MaskedSum | None = None

    def concerns(self) -> Collection[str]:
        return self._concerned

    def relayed(self, name: str, /) -> Tensors:
        message = self._outgoing.get(name, self._all)
        return {} if message is None else {RELAYED: message.tensors()["message"]}

    def receive(self, step: Step, answer: Answer) -> None:
        machine, key, arrays = self._machine, self._keys[answer.name], answer.release.tensors
        match step:
            case Step.ADVERTISE:
                machine.receive_advert(key, Advert.from_tensors(arrays))
            case Step.DEAL:
                machine.receive_shares(key, ShareMessage.from_tensors(arrays))
            case Step.TRAIN:
                self._check_claim(answer)
                machine.receive_input(key, MaskedInput.from_tensors(arrays))
                if self._claim is None or getattr(answer.release.claim, "simulated", False):
                    self._claim = answer.release.claim  # only of what is in the sum
            case Step.SIGN:
                machine.receive_signature(key, SurvivorSignature.from_tensors(arrays))
            case Step.UNMASK:
                machine.receive_unmasking(key, Unmasking.from_tensors(arrays))
            case _:
                raise WrongRound(f"{step} is no step of a masked round")
        self._answered.add(answer.name)

    def close(self, step: Step) -> None:
        machine = self._machine
        self._outgoing, self._all = {}, None
        match step:
            case Step.ADVERTISE:
                self._all = machine.close_adverts()
            case Step.DEAL:
                self._outgoing = {self._names[key]: one for key, one in machine.close_shares().items()}
            case Step.TRAIN:
                self._all = machine.close_inputs()
            case Step.SIGN:
                self._all = machine.close_signatures()
            case Step.UNMASK:
                self._result = machine.result()
        # Those who sent their masked input are asked to the end: a signature that was late is no fault.
        if step in (Step.ADVERTISE, Step.DEAL, Step.TRAIN):
            self._concerned, self._answered = self._answered, set()

    def opened(self) -> tuple[Tensors, OpenedSum]:
        result, terms = self._result, self._plan.sums
        assert result is not None
        assert terms is not None
        survivors = tuple(sorted(self._names[key] for key in result.survivors))
        if self._mechanism is not None:
            mechanism = self._mechanism
            mean = decode_mean(result.sums[UPDATE], len(survivors), mechanism)
            noise = math.sqrt(mechanism.variance / len(survivors)) / mechanism.scale
            return self._record(mean, survivors, resolution=1 / mechanism.scale, noise=noise)
        values_as, weight_as = fixed_points(terms, len(self._plan.cohort))
        mean = weighted_mean(result.sums[UPDATE], result.sums[WEIGHT], values_as, weight_as)
        weight = float(weight_as.decode(result.sums[WEIGHT])[0])
        # Of the values' sum, and of the row count that divides it.
        step = values_as.resolution + values_as.clip * weight_as.resolution
        error = len(survivors) * step / weight
        # One silo can make a sum that honest ones could not: of a weight near 0, and so of any mean at all.
        least = len(survivors) * (1 / terms.max_rows - weight_as.resolution)
        rows = round(weight * terms.max_rows) if self._training is None else None
        if self._training is not None:
            least = len(survivors) * (1 - weight_as.resolution)
        if weight < least or float(np.abs(mean).max()) > values_as.clip + error:
            raise PayloadError(
                "the opened sum is none that its silos can make: one of them sent something else than a model"
            )
        return self._record(mean, survivors, rows=rows, resolution=error)

    def _record(
        self, mean: NDArray[np.float64], survivors: tuple[str, ...], **figures: Any
    ) -> tuple[Tensors, OpenedSum]:
        """The new weights, and the record of their mean change with these figures."""
        assert self._result is not None
        assert self._plan.sums is not None
        update = mean.astype(np.float32)
        shapes = {name: array.shape for name, array in self._model.items()}
        record = OpenedSum(
            round=self._plan.round,
            protection=self._plan.protection,
            silos=survivors,
            threshold=self._plan.sums.threshold,
            tensors=unflatten(update, shapes),
            faults=self._result.faults,
            claim=self._claim,
            **figures,
        )
        return unflatten(flatten(self._model) + update, shapes), record

    def _check_claim(self, answer: Answer) -> None:
        """All silos of a sum claim the same; whether each adds its share of noise, no server can see."""
        if self._training is not None:
            check_training(answer.name, answer.release.claim, self._training)
            return
        due: dict[str, Any] = summed_claim(self._plan).model_dump()
        if self._mechanism is not None:
            due = distributed_noise.claim(self._mechanism, _NOBODYS).model_dump()
        given = answer.release.claim
        stated = {**given.model_dump(), **{key: due[key] for key in _SOURCE & due.keys()}}
        if not _same(stated, due):
            raise PayloadError(f"{answer.name} makes another claim for its masked model than was agreed")


def check_training(name: str, claim: Claim, due: DpSgd) -> None:
    """Require the claim that was agreed on for a training. Raises PayloadError."""
    if not (isinstance(claim, DpSgd) and is_due(claim, due)):
        raise PayloadError(f"{name} makes another claim for its training than was agreed")


def _same(stated: Mapping[str, Any], due: Mapping[str, Any]) -> bool:
    """Equal up to rounding, which differs between machines' mathematics libraries."""
    return stated.keys() == due.keys() and all(
        math.isclose(stated[key], value, rel_tol=1e-9)
        if type(value) is float and type(stated[key]) is float
        else stated[key] == value
        for key, value in due.items()
    )


class EncryptedSummation:
    """Sums of a run under CKKS: the server adds what it cannot read, and sends it on."""

    def __init__(self, roster: Mapping[str, Card], plan: RoundPlan, length: int, training: Training) -> None:
        """plan: of any step of the run; length: values of a model; training: what the silos claim of a
        round's training by DP-SGD, if it is.
        """
        self._training = training
        assert plan.sums is not None
        self._roster, self._maker = roster, key_maker(plan.cohort).name
        self._claim = summed_claim(plan)
        self._terms = ckks_terms(plan.sums, length, len(plan.cohort))
        self._key: Tensors = {}
        self._sum = RunningSum(self._terms)
        self._round = plan.round
        self._chunks: Tensors = {}
        self._silos: tuple[str, ...] = ()

    def concerns(self) -> Collection[str]:
        return set(self._roster) if self._key else {self._maker}

    def relayed(self, _name: str, /) -> Tensors:
        return self._key

    def take_key(self, sealed: bytes) -> None:
        """Keep the sealed key, to send it with every plan. Raises TooLarge."""
        if len(sealed) > MAX_KEY_ENVELOPE:
            raise TooLarge(f"a CKKS key of {len(sealed)} bytes is above the limit of {MAX_KEY_ENVELOPE}")
        self._key = {SEALED_KEY: np.frombuffer(sealed, np.uint8)}

    def receive(self, step: Step, answer: Answer) -> None:
        if step is not Step.TRAIN:
            raise WrongRound(f"{step} has nothing to add to an encrypted sum")
        check_sum_chunks(answer.release.tensors, self._terms)  # a part alone would spoil the sum for all
        training = self._training(self._round)
        if training is not None:
            check_training(answer.name, answer.release.claim, training)
        elif answer.release.claim != self._claim:
            raise PayloadError(f"{answer.name} makes another claim for its encrypted model than was agreed")
        self._sum.add(Signed(answer.verified, answer.release.tensors))

    def close(self, step: Step) -> None:
        if step is Step.KEY and not self._key:
            raise TooFewSilos(
                f"{self._maker}, which was to make the CKKS key, did not; nothing can be summed"
            )
        if step is Step.TRAIN:
            self._silos = self._sum.finish()
            if len(self._silos) < LEAST_SILOS:
                raise TooFewSilos(
                    f"{len(self._silos)} silos sent an encrypted model, and the sum of fewer than "
                    f"{LEAST_SILOS} would tell them about each other"
                )
            self._chunks = chunk_tensors(0, self._sum.chunks())

    def opened(self) -> tuple[Tensors, OpenedSum]:
        record = OpenedSum(round=self._round, protection="ckks", silos=self._silos, threshold=0)
        self._sum, self._round = RunningSum(self._terms), self._round + 1
        return self._chunks, record
