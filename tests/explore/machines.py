"""The clients of an exploration: real machines under cheap public-key operations, run one step at a time."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from securefl.crypto import masking_client, masks
from securefl.crypto.identity import Card, Identity
from securefl.crypto.masking_keys import KeyPair
from securefl.crypto.masking_messages import (
    PUBLIC_KEY,
    SIGNATURE,
    AdvertList,
    Delivery,
    RoundTerms,
    SurvivorList,
    VectorSpec,
)
from securefl.errors import BadSignature, DecryptionFailed, PolicyRefusal, ProtocolError

SOURCE = Path(masking_client.__file__)
RUN, OTHER_RUN = "1" * 32, "2" * 32
ROUND, LAST_ROUND = 2, 1
VECTORS = (VectorSpec(name="w", length=2, bits=32), VectorSpec(name="counts", length=1, bits=16))


Label = tuple[int, tuple[str, ...]]  # of a mask: the place of its vector, and the fingerprints of its parties


class Violation(Exception):
    """What must never happen, happened."""


# --- cheap public-key operations


def _stretch(size: int, *parts: bytes) -> bytes:
    return hashlib.shake_256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest(size)


class CheapSuite:
    """Deterministic, of the true sizes, and honest: nothing verifies or opens that should not."""

    def sign(self, identity: Identity, context: bytes, digest: bytes) -> bytes:
        return _stretch(32, b"sign", identity.card.fingerprint.encode(), context, digest).ljust(
            SIGNATURE, b"\0"
        )

    def verify(self, card: Card, context: bytes, digest: bytes, signature: bytes) -> None:
        if signature[:32] != _stretch(32, b"sign", card.fingerprint.encode(), context, digest):
            raise BadSignature("the signature does not hold")

    def key_pair(self, seed: bytes) -> KeyPair:
        public = _stretch(32, b"key", seed).ljust(PUBLIC_KEY, b"\0")
        return KeyPair(public, public)

    def seal(self, public: bytes, plain: bytes, info: bytes) -> bytes:
        stream = _stretch(len(plain), b"stream", public, info)
        body = bytes(a ^ b for a, b in zip(plain, stream, strict=True))
        return bytes(1120) + body + _stretch(16, b"tag", public, info, body)

    def open(self, private: Any, sealed: bytes, info: bytes) -> bytes:
        body, tag = sealed[1120:-16], sealed[-16:]
        if tag != _stretch(16, b"tag", private, info, body):
            raise DecryptionFailed("it does not open")
        stream = _stretch(len(body), b"stream", private, info)
        return bytes(a ^ b for a, b in zip(body, stream, strict=True))


SUITE = CheapSuite()


@cache
def identities(count: int) -> tuple[Identity, ...]:
    """`count` silos in the order of their fingerprints, and a stranger after them."""
    made = [identity(f"hospital-{place}") for place in range(count)]
    made.sort(key=lambda one: one.card.fingerprint)
    return (*made, identity("stranger"))


def identity(name: str, edition: int = 1) -> Identity:
    """The same keys every time, so that an exploration can be repeated; `edition` tells a renewed card."""
    sizes = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}
    return Identity(
        name, {half: _stretch(size, f"{name} {edition} {half}".encode()) for half, size in sizes.items()}
    )


# --- the client's source, whole or with a check deleted


def client_module(tree: ast.Module | None = None) -> SimpleNamespace:
    """The client compiled from its source, or a mutant's tree; `seeds`: of the masks it last added.

    They are told by the place of the vector and by the parties they were derived for.
    """
    module = ModuleType("masking_client_under_test")
    exec(compile(tree or ast.parse(SOURCE.read_text()), str(SOURCE), "exec"), module.__dict__)  # noqa: S102
    parties_of: dict[bytes, tuple[str, ...]] = {}
    seeds: dict[Label, bytes] = {}

    def stream_seed(secret: bytes, run: str, round: int, vector: str, parties: tuple[str, ...]) -> bytes:
        seed = masks.stream_seed(secret, run, round, vector, parties)
        parties_of[seed] = tuple(sorted(parties))
        return seed

    def add_masks(vector: Any, streams: list[masks.Stream], bits: int) -> None:
        masks.add_masks(vector, streams, bits, threads=1)
        place = len({label[0] for label in seeds})
        seeds.update({(place, parties_of[one.seed]): one.seed for one in streams})

    # All of `masks` as it is, with a look at what it is asked for.
    watched = {**vars(masks), "stream_seed": stream_seed, "add_masks": add_masks}
    module.__dict__["masks"] = SimpleNamespace(**watched)
    return SimpleNamespace(make=module.__dict__["MaskingClient"], seeds=seeds)


def clone(machine: Any) -> Any:
    """A client's machine as it is now. Its attributes are replaced and never changed in place."""
    copy = object.__new__(type(machine))
    copy.__dict__.update(machine.__dict__)
    return copy


@dataclass(eq=False)
class Node:
    """A client after some accepted steps: its machine, what it gave last, and what it then believed.

    depth: steps taken. variant: what the server gave it to start with. adverts: the nodes of those it took.
    """

    silo: int
    depth: int
    parent: Node | None
    machine: Any
    output: Any
    variant: str
    adverts: tuple[Node, ...] = ()
    group: frozenset[int] = frozenset()
    needed: int = 0
    shared: frozenset[int] = frozenset()
    survivors: frozenset[int] = frozenset()
    seeds: Mapping[Label, bytes] = field(default_factory=dict)

    def at(self, depth: int) -> Node | None:
        """This client as it was after `depth` steps; None if it has not got there."""
        node: Node | None = self
        while node is not None and node.depth > depth:
            node = node.parent
        return node if node is not None and node.depth == depth else None


@dataclass(frozen=True)
class Move:
    """One thing the server may hand a client. key: what it is made of; founded: it may be accepted."""

    key: tuple[Any, ...]
    founded: bool
    act: Callable[[Any], Any]
    after: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Count:
    """What an exploration visited."""

    silos: int
    states: int = 0
    transitions: int = 0
    steps_run: int = 0
    refused: int = 0
    sums: int = 0
    aborts: int = 0

    def __str__(self) -> str:
        ends = f"; {self.sums} ends in a sum, {self.aborts} in an abort" if self.sums else ""
        return (
            f"{self.states} states and {self.transitions} transitions of {self.silos} clients; "
            f"{self.steps_run} steps run on the machines, {self.refused} of them refused{ends}"
        )


def subsets(silos: Iterable[int], least: int = 0) -> Iterator[frozenset[int]]:
    pool = sorted(silos)
    for size in range(least, len(pool) + 1):
        yield from (frozenset(chosen) for chosen in combinations(pool, size))


class World:
    """The clients of one round, and every message that exists outside of it."""

    def __init__(
        self,
        silos: int,
        degree: int | None = None,
        module: SimpleNamespace | None = None,
        targets: Iterable[int] = (1,),
    ) -> None:
        """degree: of the graph; module: `client_module`; targets: who may be given another model or plan."""
        self.silos, self.degree, self.targets = silos, degree, frozenset(targets)
        self.module = module or client_module()
        *self.ids, self.stranger = identities(silos)
        self.names = [one.card.fingerprint for one in self.ids]
        self.place = {name: place for place, name in enumerate(self.names)}
        self.roster = {one.name: one.card for one in self.ids}
        self.threshold = 2 * silos // 3 + 1
        self.count = Count(silos)
        self.tried: dict[tuple[Any, ...], Node | None] = {}
        self._roots: dict[tuple[int, str], Node] = {}
        self.last_round = self._whole_round(RUN, LAST_ROUND)
        self.other_run = self._whole_round(OTHER_RUN, ROUND)

    # --- the clients

    def terms(self, run: str = RUN, round: int = ROUND, variant: str = "A") -> RoundTerms:
        """variant: A, or another (B) model or (P) plan, or a threshold that is too (low) or too (high)."""
        return RoundTerms(
            run=run,
            round=round,
            threshold=self.threshold + {"low": -1, "high": self.silos}.get(variant, 0),
            plan=(b"p" if variant == "P" else b"a") * 32,
            model=(b"b" if variant == "B" else b"a") * 32,
            vectors=VECTORS,
        )

    def client(self, silo: int, terms: RoundTerms, roster: Mapping[str, Card], **policy: int) -> Any:
        state = [0]

        def random(size: int) -> bytes:
            state[0] += 1
            return _stretch(size, f"{silo} {terms.run} {terms.round} {state[0]}".encode())

        return self.module.make(
            self.ids[silo], roster, terms, degree=self.degree, suite=SUITE, random=random, **policy
        )

    def vectors(self, silo: int) -> dict[str, Any]:
        return {
            "w": np.array([2**32 - 5 * silo - 1, silo + 1], np.uint32),
            "counts": np.array([40_000 + silo], np.uint32),
        }

    def _whole_round(self, run: str, round: int) -> dict[str, list[Any]]:
        """Another round, which all silos finished: what the server has of it to replay."""
        clients = [self.client(silo, self.terms(run, round), self.roster) for silo in range(self.silos)]
        adverts = [one.advertise() for one in clients]
        dealt = [one.share(AdvertList(adverts=tuple(adverts))) for one in clients]
        seeds: set[bytes] = set()
        for silo, one in enumerate(clients):
            self.module.seeds.clear()
            near = [
                place for place in range(self.silos) if place != silo and self.dealt_to(dealt[place], silo)
            ]
            dealings = tuple(dealt[place].dealing(self.names[silo]) for place in near)
            one.masked(Delivery(shared=tuple(self.names), dealings=dealings), self.vectors(silo))
            seeds |= set(self.module.seeds.values())
        signed = [one.sign(SurvivorList(survivors=tuple(self.names))) for one in clients]
        return {"adverts": adverts, "dealt": dealt, "signed": signed, "seeds": list(seeds)}

    def dealt_to(self, message: Any, silo: int) -> bool:
        return any(deal.holder == self.names[silo] for deal in message.deals)

    def fingerprints(self, silos: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.names[silo] for silo in sorted(silos))

    # --- running one step on a real machine

    def attempt(self, node: Node, move: Move, machine: Any = None) -> Any:
        """What the machine gives for a move, or None if it refuses. Raises Violation for any other end."""
        self.count.steps_run += 1
        try:
            output = move.act(node.machine if machine is None else machine)
        except (ProtocolError, PolicyRefusal):
            self.count.refused += 1
            return None
        except Exception as error:
            raise Violation(f"{move.key[0]} ended neither in an answer nor in a clear refusal") from error
        if output is None:
            raise Violation(f"{move.key[0]} gave no answer and no refusal")
        return output

    def step(self, node: Node, move: Move) -> Node | None:
        """The client after an accepted move; None if it refuses, as it must for one that is not founded."""
        key = (node, move.key)
        if key in self.tried:
            return self.tried[key]
        machine = clone(node.machine)
        self.module.seeds.clear()
        output = self.attempt(node, move, machine)
        made = None
        if output is None:
            again = clone(machine)
            if self.attempt(node, Move(("a step after a refusal",), False, move.act), again) is not None:
                raise Violation("a client went on after it had refused")
        elif not move.founded:
            raise Violation(f"a client accepted what it must refuse: {move.key[:2]}")
        else:
            made = self._made(node, move, machine, output)
        self.tried[key] = made
        return made

    def _made(self, node: Node, move: Move, machine: Any, output: Any) -> Node:
        if node.depth == 4:
            # Whichever signatures convinced it, its answer is one and it is over: one state.
            key = ("answer", node, output)
            found = self.tried.get(key)
            if found is not None:
                return found
        names = ("adverts", "group", "needed", "shared", "survivors", "seeds")
        fields: dict[str, Any] = {name: getattr(node, name) for name in names} | dict(move.after)
        if node.depth == 2:
            fields["seeds"] = dict(self.module.seeds)
        made = Node(node.silo, node.depth + 1, node, machine, output, node.variant, **fields)
        if node.depth == 4:
            self.tried[key] = made
        return made

    # --- step 0: what a client is started with

    def starts(self, silo: int) -> Iterator[Node]:
        """Its states after `advertise`, with the others' model and plan or, for a target, another."""
        for variant in ("A", "B", "P") if silo in self.targets else ("A",):
            key = (silo, variant)
            if key not in self._roots:
                machine = self.client(silo, self.terms(variant=variant), self.roster)
                idle = Node(silo, 0, None, clone(machine), None, variant)
                node = Node(silo, 1, idle, machine, machine.advertise(), variant)
                advertise = Move(("advertising again",), False, lambda one: one.advertise())
                if self.attempt(node, advertise, clone(machine)) is not None:
                    raise Violation("a client advertised twice")
                self._roots[key] = node
            yield self._roots[key]

    def refuse_bad_terms(self) -> None:
        """Terms or a roster that no client may take part under."""
        two = {one.name: one.card for one in self.ids[:2]}
        pair = self.terms().model_copy(update={"threshold": 2})
        others = {one.name: one.card for one in self.ids[1:]} | {"stranger": self.stranger.card}
        renewed = identity(self.ids[0].name, 2)
        for what, terms, roster, policy in (
            ("a threshold of two thirds", self.terms(variant="low"), self.roster, {}),
            (
                "a threshold below its policy",
                self.terms(),
                self.roster,
                {"least_threshold": self.threshold + 1},
            ),
            ("a threshold beyond the cohort", self.terms(variant="high"), self.roster, {}),
            ("a cohort of two", pair, two, {}),
            ("a cohort below its policy", self.terms(), self.roster, {"least_cohort": self.silos + 1}),
            ("a roster without it", self.terms(), others, {}),
            ("a roster with another card of it", self.terms(), {**others, renewed.name: renewed.card}, {}),
        ):
            node = Node(0, 0, None, None, None, "A")
            roster_, policy_, terms_ = roster, policy, terms

            def act(_: Any, terms: Any = terms_, roster: Any = roster_, policy: Any = policy_) -> Any:
                return self.client(0, terms, roster, **policy)

            if self.attempt(node, Move((what,), False, act)) is not None:
                raise Violation(f"a client took part under {what}")
