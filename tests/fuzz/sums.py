"""A real server of a masked round before mutants: the envelopes of its five steps, and what is in them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from securefl.agreement import UPDATE, WEIGHT, fixed_points, masked_terms, summed_claim
from securefl.crypto import envelope
from securefl.crypto.masking_client import MaskingClient
from securefl.crypto.masking_messages import Message
from securefl.crypto.masking_server import MaskingServer
from securefl.crypto.weighted import encode_weighted
from securefl.errors import ProtocolError
from securefl.messages import Header, RoundPlan, Step
from securefl.release import Claim, Independent, PayloadKind, Release, decode, encode, encode_release
from securefl.server import Server
from securefl.summation import MaskedSummation
from tests.fuzz.masked import state_of
from tests.fuzz.messages import Form, MessageMutants, Seed, seed_of
from tests.fuzz.subjects import EVE, ROSTER, RUN, SERVER, SILOS, SITTING, require_own_bytes, server_at
from tests.mutants import mutate_body, mutate_bytes, mutate_document, unframe, with_row

STEPS = (Step.ADVERTISE, Step.DEAL, Step.TRAIN, Step.SIGN, Step.UNMASK)
_KINDS = (
    PayloadKind.ADVERT,
    PayloadKind.SHARES,
    PayloadKind.MASKED_MODEL,
    PayloadKind.SURVIVORS,
    PayloadKind.UNMASKING,
)
_ROUND = 2  # the last, so that its sum stays with the server
ROWS = (120, 45, 300)


def mutate_summed(rng: random.Random, body: bytes, others: Sequence[bytes]) -> bytes:
    """A body with its message mutated inside, or a masked vector, or as any body is."""
    tensors = decode(body).tensors
    if "message" not in tensors or rng.random() < 0.3:
        return mutate_body(rng, body, others)
    name = rng.choice(list(tensors))
    row = tensors[name].tobytes()
    if name != "message":
        return with_row(body, name, mutate_bytes(rng, row, [row[::-1]]))
    known = [decode(one).tensors for one in others]
    documents = [json.loads(one["message"].tobytes()) for one in known if "message" in one]
    return with_row(body, name, mutate_document(rng, json.loads(row), documents))


class AdmittedSum:
    """A server, a sitting at a time, at one step of a masked round of three silos, of which it needs all.

    What it refuses must have changed nothing, in it and in the round: the honest messages are then admitted
    and the sum is that of plain integers. A mutant that it takes may end the round, in so many words.
    """

    name = "sums"
    forms = tuple(Form)

    def __init__(self, rng: random.Random, count: Callable[[str, BaseException], None]) -> None:
        self._rng, self._count = rng, count
        self._honest: dict[Step, list[Seed]] = {}
        self._right = self._play(rng)
        absent = encode(PayloadKind.UNAVAILABLE, {}, {})
        self._mutants = {}
        for step, seeds in self._honest.items():
            place = {"run": RUN, "round": _ROUND, "step": step.value, "sequence": 50}
            away = seed_of(rng, absent, "unavailable", SILOS[1], [SERVER.card], **place)
            other = self._honest[rng.choice(STEPS)][0]
            self._mutants[step] = MessageMutants(
                [*seeds, *seeds, away, other], [SERVER, *SILOS], [EVE], mutate_summed
            )
        self._sit()

    def _play(self, rng: random.Random) -> dict[str, Any]:
        """The honest messages, of real clients, and the sums of what they encoded, in plain integers."""
        server = self._new()
        plan: RoundPlan = server._plan(server.model, ())
        terms = masked_terms(plan, 9)
        clients = {silo.name: MaskingClient(silo, ROSTER, terms) for silo in SILOS}
        assert plan.sums is not None
        encoded = {}
        for silo, rows in zip(SILOS, ROWS, strict=True):
            update = np.array([rng.uniform(-1, 1) for _ in range(9)], np.float32)
            weight = rows / plan.sums.max_rows
            values, count = encode_weighted(update, weight, *fixed_points(plan.sums, len(SILOS)))
            encoded[silo.name] = {UPDATE: values, WEIGHT: count}
        bits = {spec.name: spec.bits for spec in terms.vectors}
        right = {
            name: sum(one[name].astype(np.uint64) for one in encoded.values()) % 2 ** bits[name]
            for name in bits
        }
        heard: dict[str, Any] = dict.fromkeys(clients)
        for number, step in enumerate(STEPS):
            machine = cast(MaskedSummation, server._sum)
            self._honest[step] = []
            for silo in SILOS:
                client, relayed = clients[silo.name], heard[silo.name]
                message: Message
                match step:
                    case Step.ADVERTISE:
                        message = client.advertise()
                    case Step.DEAL:
                        message = client.share(relayed)
                    case Step.TRAIN:
                        vectors = {name: vector.copy() for name, vector in encoded[silo.name].items()}
                        message = client.masked(relayed, vectors)
                    case Step.SIGN:
                        message = client.sign(relayed)
                    case _:
                        message = client.unmask(relayed)
                claim: Claim = (
                    summed_claim(plan) if step is Step.TRAIN else Independent(reason="no row in it")
                )
                release = Release(_KINDS[number], message.tensors(), {"round": _ROUND}, claim)
                place = {"run": RUN, "round": _ROUND, "step": step.value, "sequence": 5 + number}
                body = encode_release(release)
                seed = seed_of(rng, body, _KINDS[number].value, silo, [SERVER.card], **place)
                server.receive(seed.data)
                self._honest[step].append(seed)
            server.close_step()
            heard = {silo.name: machine._outgoing.get(silo.name, machine._all) for silo in SILOS}
        return right

    def _new(self) -> Server:
        return server_at(_ROUND, _ROUND, protection="masked")

    def _sit(self) -> None:
        self._step = self._rng.choice(STEPS)
        self.server = self._new()
        for step in STEPS[: STEPS.index(self._step)]:
            self._receive(step)
            self.server.close_step()
        assert self.server.step is self._step
        if self._rng.random() < 0.5:
            self.server.receive(self._honest[self._step][0].data)
        self._faced = self._taken = 0

    def _receive(self, step: Step) -> None:
        for seed in self._honest[step]:
            if seed.sender.name not in self.server.admitted():
                self.server.receive(seed.data)

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        if self._taken or self._faced == SITTING:
            self._rise()
            self._sit()
        self._faced += 1
        return self._mutants[self._step].draw(rng, form)

    @property
    def _machine(self) -> MaskingServer:
        return cast(MaskedSummation, self.server._sum)._machine

    def _state(self) -> Any:
        kept = vars(self.server._sum)
        others = {name: kept[name] for name in ("_claim", "_outgoing", "_all", "_result")}
        held = set(kept["_answered"]), set(kept["_concerned"]), len(self.server.dropped)
        return dict(self.server.admitted()), others, held, state_of(self._machine)

    def attempt(self, data: bytes) -> Header:
        before = self._state()
        try:
            return self.server.receive(data)
        except ProtocolError:
            assert self._state() == before
            raise

    def check(self, data: bytes, taken: Header, form: Form) -> None:
        self._taken += 1
        require_own_bytes(data, taken)
        body = envelope.open_(envelope.verify(data, ROSTER), SERVER)
        honest = {seed.data: seed for seeds in self._mutants.values() for seed in seeds.seeds}
        if form is Form.RAW:
            assert data in honest
        if taken.kind is PayloadKind.UNAVAILABLE:
            assert body == encode(PayloadKind.UNAVAILABLE, {}, {})
            return
        header, _, _ = unframe(body)
        # Nothing but the message is in it.
        assert "message" in header
        assert self.server.admitted()[taken.sender.name] is None

    def _rise(self) -> None:
        """End the round with what is honest of the rest; with a mutant in it, only in our own words."""
        server, altered = self.server, bool(self._taken)
        machine = cast(MaskedSummation, server._sum)
        away = {one.name for one in server.dropped}
        try:
            for step in STEPS[STEPS.index(self._step) :]:
                for seed in self._honest[step]:
                    name = seed.sender.name
                    if name not in server.admitted() and not (step is self._step and name in away):
                        server.receive(seed.data)
                server.close_step()
        except ProtocolError as error:
            if not altered:
                raise AssertionError("an honest round ended") from error
            self._count(self.name, error)
            return
        result = vars(machine)["_result"]
        if not altered:
            for name, vector in self._right.items():
                np.testing.assert_array_equal(result.sums[name], vector)
        assert all(np.isfinite(array).all() for array in server.model.values())
