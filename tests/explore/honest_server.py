"""The clients with the real server, under a network that loses, repeats and reorders what it likes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from securefl.crypto import masking_server
from securefl.crypto.masking_messages import Message
from securefl.errors import ProtocolError, TooFewSilos
from tests.explore.machines import SUITE, VECTORS, Count, Move, Node, Violation, World, clone


@dataclass(eq=False)
class ServerNode:
    """The real server after some messages, and what it has sent to whom: step -> silo -> message."""

    machine: Any
    sent: Mapping[int, Mapping[int, Any]]
    sum: Any = None


class HonestWorld(World):
    """The clients with the real server, under a network that loses, repeats and reorders."""

    RECEIVE = ("receive_advert", "receive_shares", "receive_input", "receive_signature", "receive_unmasking")
    CLOSE = ("close_adverts", "close_shares", "close_inputs", "close_signatures", "result")

    def __init__(self, silos: int, module: SimpleNamespace | None = None) -> None:
        super().__init__(silos, None, module)
        self._servers: dict[bytes, ServerNode] = {}
        machine = masking_server.MaskingServer(self.roster, self.terms(), suite=SUITE, threads=1)
        self.first = self._interned(machine, {})
        self._received: dict[tuple[ServerNode, Node], ServerNode] = {}
        self._closed: dict[ServerNode, ServerNode | None] = {}

    def _interned(self, machine: Any, sent: Mapping[int, Mapping[int, Any]], sum: Any = None) -> ServerNode:
        """One node for each state of the server, whatever the order in which its messages came."""
        state = {
            name: value for name, value in vars(machine).items() if name not in ("_suite", "_cards", "_terms")
        }
        text = repr(sorted((name, _canonical(value)) for name, value in state.items()))
        key = hashlib.sha256(text.encode()).digest()
        return self._servers.setdefault(key, ServerNode(machine, sent, sum))

    def server_copy(self, node: ServerNode) -> Any:
        copy = object.__new__(type(node.machine))
        copy.__dict__.update({name: _copied(value) for name, value in vars(node.machine).items()})
        return copy

    def received(self, node: ServerNode, message: Node) -> ServerNode:
        """The server after a client's message, of whatever step; the same one where it refuses it."""
        key = (node, message)
        if key not in self._received:
            machine = self.server_copy(node)
            self.count.steps_run += 1
            try:
                getattr(machine, self.RECEIVE[message.depth - 1])(self.names[message.silo], message.output)
            except ProtocolError:
                self.count.refused += 1
                if self._interned(machine, node.sent) is not node:
                    raise Violation("a message that the server refused changed it") from None
            self._received[key] = self._interned(machine, node.sent)
        return self._received[key]

    def closed(self, node: ServerNode) -> ServerNode | None:
        """The server after it closed its step; None if that ended the round in a clear abort."""
        if node not in self._closed:
            machine, phase = self.server_copy(node), int(node.machine.phase)
            after = None
            try:
                output = getattr(machine, self.CLOSE[phase])()
            except TooFewSilos:
                if machine.phase is not masking_server.Phase.OVER or machine._totals:
                    raise Violation("the server went on, or kept sums, after its abort") from None
                self._must_abort(node, phase)
                self.count.aborts += 1
            else:
                if phase == 4:
                    self._right(node, output)
                    self.count.sums += 1
                addressees = (machine._adverts, machine._shares, machine._inputs, machine._inputs, ())[phase]
                to = {
                    self.place[one]: output[one] if isinstance(output, dict) else output for one in addressees
                }
                after = self._interned(machine, {**node.sent, phase + 1: to}, output if phase == 4 else None)
            self._closed[node] = after
        return self._closed[node]

    def _must_abort(self, node: ServerNode, phase: int) -> None:
        arrived = (
            node.machine._adverts,
            node.machine._shares,
            node.machine._inputs,
            node.machine._signatures,
            node.machine._unmasked,
        )[phase]
        if len(arrived) >= self.threshold:
            raise Violation("the server gave up a round in which enough silos answered")

    def _right(self, node: ServerNode, result: Any) -> None:
        """The sum is that of the survivors' vectors, computed here without any mask."""
        if len(node.machine._unmasked) < self.threshold or len(result.survivors) < self.threshold:
            raise Violation("the server opened a sum with too few silos")
        for spec in VECTORS:
            right = sum(
                self.vectors(self.place[one])[spec.name].astype(np.uint64) for one in result.survivors
            ) % (2**spec.bits)
            if not np.array_equal(result.sums[spec.name], right):
                raise Violation("the opened sum is not that of the survivors' vectors")

    def answers(self, node: Node, sent: Mapping[int, Mapping[int, Any]]) -> Node | None:
        """The client after the server's next message for it, if that was sent."""
        message = sent.get(node.depth, {}).get(node.silo)
        if message is None:
            return None
        acts: dict[int, Callable[[Any], Any]] = {
            1: lambda one: one.share(message),
            2: lambda one: one.masked(message, self.vectors(node.silo)),
            3: lambda one: one.sign(message),
            4: lambda one: one.unmask(message),
        }
        key = (node, "honest", message.model_dump_json())
        if key not in self.tried:
            machine = clone(node.machine)
            move = Move(("an honest message",), True, acts[node.depth])
            output = self.attempt(node, move, machine)
            if output is None:
                raise Violation(f"a client refused an honest server at step {node.depth}")
            if self.attempt(node, move, clone(machine)) is not None:
                raise Violation("a client answered a repeated message again")
            self.tried[key] = Node(node.silo, node.depth + 1, node, machine, output, node.variant)
        return self.tried[key]


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((name, _canonical(inner)) for name, inner in value.items())
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    # The server keeps the very message that its client gave, and every client gives one a step.
    return id(value) if isinstance(value, Message) else value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def explore_honest_server(world: HonestWorld) -> Count:
    """Every order, loss and repetition of messages between the clients and the real server."""
    start: tuple[ServerNode, tuple[Node | None, ...]] = (world.first, (None,) * world.silos)
    seen, frontier = {start}, deque([start])
    while frontier:
        server, clients = frontier.popleft()
        world.count.states += 1
        found: list[tuple[ServerNode, tuple[Node | None, ...]]] = []
        for silo, node in enumerate(clients):
            after = next(world.starts(silo)) if node is None else world.answers(node, server.sent)
            if after is not None:
                found.append((server, (*clients[:silo], after, *clients[silo + 1 :])))
            while node is not None and node.depth:  # everything it ever sent is still on the network
                found.append((world.received(server, node), clients))
                node = node.parent
        if server.machine.phase is not masking_server.Phase.OVER:
            closed = world.closed(server)
            if closed is not None:
                found.append((closed, clients))
        for state in found:
            world.count.transitions += 1
            if state not in seen:
                seen.add(state)
                frontier.append(state)
    return world.count
