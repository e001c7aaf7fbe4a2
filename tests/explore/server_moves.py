"""The clients of one round against a server that does what it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from tests.explore.invariants import computable_sums, known_secrets, masks_once, one_kind
from tests.explore.machines import Count, Node, Violation, clone
from tests.explore.menu import Menu


class ServerWorld(Menu):
    """A world with its successors. learnt: of how many silos each sum is that some state made computable."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.learnt: set[int] = set()
        self._moves: dict[tuple[Any, ...], tuple[Node, ...]] = {}
        self._known: set[tuple[Any, ...]] = set()
        self._spent = {*self.last_round["seeds"], *self.other_run["seeds"]}

    def moves(self, node: Node, others: tuple[Node | None, ...]) -> tuple[Node, ...]:
        """All states of one client after its next step, while the others have got to `others`."""
        key = (node, others)
        if key not in self._moves:
            menu = (self.share_moves, self.masked_moves, self.sign_moves, self.unmask_moves)[node.depth - 1]
            offered = list(menu(node, others))
            made = list(dict.fromkeys(one for move in offered if (one := self.step(node, move)) is not None))
            for move in offered:
                # The same messages before their time, and once more after one of them was accepted.
                for early_or_again in (node.parent, *made[:1]):
                    key_ = (early_or_again, "out of order", move.key)
                    if early_or_again is None or key_ in self.tried:
                        continue
                    self.tried[key_] = None
                    if self.attempt(early_or_again, move, clone(early_or_again.machine)) is not None:
                        raise Violation(f"a client took {move.key[0]} before their time or a second time")
            self._moves[key] = tuple(made)
        return self._moves[key]

    def check(self, state: tuple[Node | None, ...]) -> None:
        """What must hold of all that was sent so far, for the server alone and with any one silo's memory."""
        key = tuple((one and one.at(3), one and one.at(5)) for one in state)
        if key in self._known:
            return
        self._known.add(key)
        inputs = {silo: sent for silo, (sent, _) in enumerate(key) if sent is not None}
        for _, answer in key:
            if answer is not None:
                one_kind(answer, self.place)
        masks_once(inputs.values(), self._spent)
        given = {silo: answer.output for silo, (_, answer) in enumerate(key) if answer is not None}
        needed = {one.silo: one.needed for one in state if one is not None and one.depth >= 2}
        for traitor in (None, *inputs):
            known = known_secrets(inputs, given, needed, self.place, traitor)
            least = self.threshold - (traitor is not None)
            for part in computable_sums(inputs, known, self.place):
                others = part - {traitor}
                if traitor is None:
                    self.learnt.add(len(part))
                if others and len(others) < least:
                    raise Violation(f"a sum over {len(others)} silos can be computed, below {least}")


def explore_server_moves(world: ServerWorld, breadth_first: bool = True) -> Count:
    """Every state that some server can bring the clients into. Raises Violation for one that must not be."""
    world.refuse_bad_terms()
    start: tuple[Node | None, ...] = (None,) * world.silos
    seen, frontier = {start}, deque([start])
    while frontier:
        state = frontier.popleft() if breadth_first else frontier.pop()
        world.count.states += 1
        depths = [tuple(one and one.at(depth) for one in state) for depth in range(5)]
        for silo, node in enumerate(state):
            if node is None:
                found: Iterable[Node] = world.starts(silo)
            elif node.depth == 5:
                continue
            else:
                found = world.moves(node, () if node.depth == 3 else depths[node.depth])
            for made in found:
                world.count.transitions += 1
                after = (*state[:silo], made, *state[silo + 1 :])
                if after not in seen:
                    seen.add(after)
                    world.check(after)
                    frontier.append(after)
    return world.count
