"""What must hold of everything that the clients of one round gave away, whatever the server did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tests.explore.machines import Label, Node, Violation


def one_kind(node: Node, place: Mapping[str, int]) -> None:
    """What an unmasking gives: one share for each neighbour that shared, of the kind its list says."""
    blinds = {place[one.dealer] for one in node.output.blinds}
    roots = {place[one.dealer] for one in node.output.roots}
    mine = node.group & node.shared
    if blinds & roots:
        raise Violation("a client gave both kinds of share of one silo")
    if blinds != mine & node.survivors or roots != mine - node.survivors:
        raise Violation("a client gave another kind of share than the list it signed asks for")


def masks_once(inputs: Iterable[Node], spent: Collection[bytes]) -> None:
    """Every seed masks one vector, of one silo or of one pair; spent: the seeds of other rounds."""
    used: dict[bytes, Label] = {}
    for node in inputs:
        if len(set(node.seeds.values())) != len(node.seeds):
            raise Violation("a client used one mask for two vectors")
        for label, seed in node.seeds.items():
            if used.setdefault(seed, label) != label or seed in spent:
                raise Violation("a mask served twice")


def known_secrets(
    inputs: Mapping[int, Node],
    given: Mapping[int, Any],
    needed: Mapping[int, int],
    place: Mapping[str, int],
    traitor: int | None,
) -> set[tuple[str, int]]:
    """Which ("blind", silo) and ("root", silo) follow from the shares given, and from all a traitor holds."""
    shares: dict[tuple[str, int], set[int]] = {}
    for holder, answer in given.items():
        for kind, parts in (("blind", answer.blinds), ("root", answer.roots)):
            for one in parts:
                shares.setdefault((kind, place[one.dealer]), set()).add(holder)
    known: set[tuple[str, int]] = set()
    if traitor is not None:
        known = {("blind", traitor), ("root", traitor)}
        for dealer in inputs[traitor].group & inputs[traitor].shared:
            for kind in ("blind", "root"):
                shares.setdefault((kind, dealer), set()).add(traitor)
    return known | {key for key, holders in shares.items() if len(holders) >= needed[key[1]]}


def computable_sums(
    inputs: Mapping[int, Node], known: Collection[tuple[str, int]], place: Mapping[str, int]
) -> list[set[int]]:
    """The smallest sets of silos whose vectors' sum can be computed from their masked inputs.

    Masks whose seeds do not follow from what is known are as good as random. A combination of masked inputs
    says something only if they cancel in it: an input with an unknown blind cannot be used, two that share an
    unknown pair mask only together. So the smallest computable sums are the connected parts.
    """
    dead: set[int] = set()
    ties: dict[int, set[int]] = {silo: set() for silo in inputs}
    for silo, node in inputs.items():
        for vector, parties in node.seeds:
            if vector != 0:
                continue
            if len(parties) == 1:
                if ("blind", silo) not in known:
                    dead.add(silo)
                continue
            (peer,) = {place[name] for name in parties} - {silo}
            if ("root", silo) in known or ("root", peer) in known:
                continue
            other = inputs.get(peer)
            if other is None or other.seeds.get((vector, parties)) != node.seeds[vector, parties]:
                dead.add(silo)
            else:
                ties[silo].add(peer)
    parts = []
    left = set(inputs)
    while left:
        part, edge = set(), {left.pop()}
        while edge:
            one = edge.pop()
            part.add(one)
            edge |= ties[one] - part
        left -= part
        if not part & dead:
            parts.append(part)
    return parts
