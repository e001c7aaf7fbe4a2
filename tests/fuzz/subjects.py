"""What is put before mutants: the body codec, the envelope, a server.

See also `clients` and `ledgers`, and of sums `sums`, `masked` and `encrypted`.

Each subject is the real code. `attempt` lets it take one mutant and raises what the code raises; `check` then
requires that what was taken has no second encoding. A subject may also raise at the end of a sitting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from securefl.config import AVERAGING, parse_config
from securefl.crypto import envelope
from securefl.crypto.identity import Identity
from securefl.errors import ProtocolError, TooFewSilos
from securefl.messages import Header, Step
from securefl.release import (
    Body,
    GaussianSums,
    NonPrivate,
    PayloadKind,
    Release,
    canonical_json,
    decode,
    decode_release,
    encode,
    encode_release,
    release_from,
)
from securefl.server import Server
from tests.fuzz.messages import Form, MessageMutants, Seed, seed_of
from tests.mutants import Layout, mutate_body

RUN = "0123456789abcdef" * 2
SHAPES = {"b": (3,), "w": (2, 3)}
SITTING = 30  # mutants that one server or client faces before it must still take the honest messages


class Subject(Protocol):
    """name: in the table. forms: of its mutants, in turn."""

    @property
    def name(self) -> str: ...

    @property
    def forms(self) -> Sequence[Form]: ...

    def mutant(self, rng: random.Random, form: Form) -> bytes: ...

    def attempt(self, data: bytes) -> Any: ...

    def check(self, data: bytes, taken: Any, form: Form) -> None: ...


def seeds_of(name: str) -> dict[str, bytes]:
    sizes = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}
    return {half: hashlib.shake_256(f"{name} {half}".encode()).digest(size) for half, size in sizes.items()}


SERVER, EVE, *SILOS = (
    Identity(name, seeds_of(name)) for name in ("server", "eve", "silo-a", "silo-b", "silo-c")
)
ROSTER = {silo.name: silo.card for silo in SILOS}
PLAIN = NonPrivate(reason="weights trained without differential privacy")
NOISED = GaussianSums(
    epsilon=1.5,
    delta=1e-5,
    mu=0.4,
    clip=6.0,
    noise_multiplier=3.0,
    count_multiplier=8.0,
    prediction_multiplier=8.0,
    generator="os",
    simulated=False,
)


def bodies() -> dict[PayloadKind, bytes]:
    """A small valid body of every kind."""
    weights = {
        name: np.arange(6, dtype=np.float32)[: np.prod(shape)].reshape(shape)
        for name, shape in SHAPES.items()
    }
    centroids = {
        "centroids": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4),
        "predictions": np.full((2, 2), 0.5, np.float32),
        "sizes": np.array([5.0, 7.0], np.float32),
    }
    info = {"round": 1, "step": "train", "base": "builtin:minilm", "labels": ["a", "b"], "max_length": 16}
    odd: dict[str, Any] = {
        "ids": np.arange(3, dtype=np.int64),
        "relay/silo-b": np.frombuffer(b"sealed bytes", np.uint8),
    }
    return {
        PayloadKind.MODEL: encode_release(Release(PayloadKind.MODEL, weights, {**info, "rows": 12}, PLAIN)),
        PayloadKind.CENTROIDS: encode_release(Release(PayloadKind.CENTROIDS, centroids, info, NOISED)),
        PayloadKind.METRICS: encode_release(
            Release(PayloadKind.METRICS, {}, {**info, "metrics": {"accuracy": 0.75, "rows": 4}}, PLAIN)
        ),
        PayloadKind.PLAN: encode(PayloadKind.PLAN, {"run": RUN, "weights": [1.5, None, True]}, weights | odd),
        PayloadKind.UNAVAILABLE: encode(PayloadKind.UNAVAILABLE, {}, {}),
    }


class BodyCodec:
    """`decode`, and `release_from` for what it takes."""

    name = "body"
    forms = (Form.RAW,)

    def __init__(self) -> None:
        self._bodies = list(bodies().values())

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        return mutate_body(rng, rng.choice(self._bodies), self._bodies)

    def attempt(self, data: bytes) -> tuple[Body, Release]:
        body = decode(data)
        assert encode(body.kind, body.document, body.tensors) == data
        return body, release_from(body)

    def check(self, data: bytes, taken: tuple[Body, Release], form: Form) -> None:
        assert encode_release(taken[1]) == data


def require_own_bytes(data: bytes, header: Header) -> None:
    """The envelope is exactly what its parsed parts encode to."""
    layout = Layout.of(data)
    assert layout.header == canonical_json(header.model_dump(mode="json"))
    assert layout.joined() == data
    assert len(layout.keys) == len(header.recipients)


class Envelope:
    """`verify` and `open_`, as the server reads what the silos send."""

    name = "envelope"
    forms = tuple(Form)

    def __init__(self, rng: random.Random) -> None:
        content = bodies()
        place = {"run": RUN, "round": 2, "step": "train"}
        model = content[PayloadKind.MODEL]
        seeds = [
            seed_of(rng, model, "model", SILOS[0], [SERVER.card], **place),
            seed_of(rng, model, "model", SILOS[1], [SERVER.card], **{**place, "round": 3}),
            seed_of(
                rng,
                content[PayloadKind.METRICS],
                "metrics",
                SILOS[0],
                [SERVER.card],
                **{**place, "step": "finish"},
            ),
            seed_of(rng, b"", "unavailable", SILOS[2], [SILOS[0].card, SERVER.card], **place),
        ]
        seeds[-1] = dataclasses.replace(seeds[-1], body=content[PayloadKind.UNAVAILABLE])
        self.seeds = seeds
        self._originals = {seed.data: seed.body for seed in seeds[:-1]} | {seeds[-1].data: b""}
        self._mutants = MessageMutants(seeds, [SERVER, *SILOS], [EVE])

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        return self._mutants.draw(rng, form)

    def attempt(self, data: bytes) -> tuple[Header, bytes]:
        verified = envelope.verify(data, ROSTER)
        return verified.header, envelope.open_(verified, SERVER)

    def check(self, data: bytes, taken: tuple[Header, bytes], form: Form) -> None:
        header, body = taken
        require_own_bytes(data, header)
        assert envelope.read_header(data) == header
        if form is not Form.SEALED:
            assert body in self._originals.values(), "opened to what nobody sealed"
        if form is Form.RAW:
            assert self._originals.get(data) == body, "a message that nobody signed was taken"


def server_at(round: int, rounds: int, method: str = "fedavg", protection: str = "sealed") -> Server:
    """A real server at the first step of a round. protection: of the models of the averaging methods."""
    document: dict[str, Any] = {
        "federation": {"method": method, "rounds": rounds},
        "data": {"train": "a.csv", "test": "b.csv"},
    }
    if method in AVERAGING:
        document["protection"] = {"models": protection}
    config = parse_config(document)
    return Server(
        identity=SERVER,
        roster=ROSTER,
        run=RUN,
        config=config,
        shapes=dict.fromkeys(ROSTER, SHAPES),
        model={name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()},
        clock=lambda: 1_760_000_000.0,
        round=round,
    )


class Admission:
    """A real server, a sitting at a time: at its training, sharing and last step, with or without a message.

    Whatever it refused must have changed nothing: at the end the honest messages are admitted. Where mutants
    were admitted the step is closed on them, which raises TooFewSilos where they are too few.
    """

    name = "server"
    forms = tuple(Form)

    def __init__(self, rng: random.Random, count: Callable[[str, BaseException], None]) -> None:
        self._rng, self._count = rng, count
        content = bodies()
        self._honest: dict[Step, list[Seed]] = {}
        for step, kind in (
            (Step.TRAIN, PayloadKind.MODEL),
            (Step.SHARE, PayloadKind.CENTROIDS),
            (Step.FINISH, PayloadKind.METRICS),
        ):
            place = {"run": RUN, "round": 2, "step": step.value}
            self._honest[step] = [
                seed_of(
                    rng,
                    content[kind],
                    kind.value,
                    silo,
                    [SERVER.card] if step is not Step.SHARE else [o.card for o in SILOS if o is not silo],
                    **place,
                    **({"sequence": 6} if step is Step.FINISH else {}),
                )
                for silo in SILOS
            ]
        absent = seed_of(
            rng,
            content[PayloadKind.UNAVAILABLE],
            "unavailable",
            SILOS[1],
            [SERVER.card],
            run=RUN,
            round=2,
            step="train",
        )
        extra = {Step.TRAIN: [absent], Step.SHARE: [], Step.FINISH: []}
        self._mutants = {
            step: MessageMutants([*seeds, *extra[step], self._honest[Step.TRAIN][0]], [SERVER, *SILOS], [EVE])
            for step, seeds in self._honest.items()
        }
        self._sit()

    def _sit(self) -> None:
        self._step = self._rng.choice(list(self._honest))
        if self._step is Step.SHARE:
            self.server = server_at(2, 3, "fedkc")
        else:
            self.server = server_at(2, 2 if self._step is Step.FINISH else 3)
        if self._step is Step.FINISH:
            for seed in self._honest[Step.TRAIN]:
                self.server.receive(seed.data)
            self.server.close_step()
        assert self.server.step is self._step
        self._early = self._rng.random() < 0.5
        if self._early:
            self.server.receive(self._honest[self._step][0].data)
        self._faced = self._taken = 0

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        if self._taken == 2 or self._faced == SITTING:
            self._rise()
            self._sit()
        self._faced += 1
        return self._mutants[self._step].draw(rng, form)

    def _rise(self) -> None:
        if not self._taken:
            for seed in self._honest[self._step][1 if self._early else 0 :]:
                self.server.receive(seed.data)
            assert set(self.server.admitted()) == set(ROSTER)
        try:
            self.server.close_step()
        except TooFewSilos as error:
            assert self._taken
            self._count(self.name, error)
            return
        for array in self.server.model.values():
            assert np.isfinite(array).all()

    def attempt(self, data: bytes) -> Header:
        before = dict(self.server.admitted()), len(self.server.dropped)
        try:
            return self.server.receive(data)
        except ProtocolError:
            after = self.server.admitted()
            assert (list(after), len(self.server.dropped)) == (list(before[0]), before[1])
            assert all(after[name] is before[0][name] for name in after)
            raise

    def check(self, data: bytes, taken: Header, form: Form) -> None:
        self._taken += 1
        require_own_bytes(data, taken)
        if form is Form.RAW:
            assert data in {seed.data for seeds in self._mutants.values() for seed in seeds.seeds}
        if self._step is Step.SHARE and taken.kind is not PayloadKind.UNAVAILABLE:
            return  # sealed to the peers; see `Relayed`
        body = envelope.open_(envelope.verify(data, ROSTER), SERVER)
        if taken.kind is PayloadKind.UNAVAILABLE:
            assert body == encode(PayloadKind.UNAVAILABLE, {}, {})
            return
        release = self.server.admitted()[taken.sender.name]
        assert release is not None
        whole = decode_release(body)
        assert encode_release(whole) == body
        # Of models whose mean is taken as they come the server keeps the facts.
        kept = whole if release.tensors else replace(whole, tensors={})
        assert encode_release(release) == encode_release(kept)


def refusals() -> dict[str, type[ProtocolError]]:
    """Every exception below ProtocolError, by name."""
    found: dict[str, type[ProtocolError]] = {}
    waiting = [ProtocolError]
    while waiting:
        for child in waiting.pop().__subclasses__():
            found[child.__name__] = child
            waiting.append(child)
    return found
