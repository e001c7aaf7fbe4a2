"""Everything a server may hand a client at each step, and which of it is founded in what the others did."""

from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from typing import Any

from securefl.crypto import graph, masking_keys
from securefl.crypto.identity import Identity
from securefl.crypto.masking_messages import (
    ADVERT_CONTEXT,
    SEALED_SHARES,
    SHARES_CONTEXT,
    SIGNATURE,
    SURVIVORS_CONTEXT,
    Advert,
    AdvertList,
    Dealing,
    Delivery,
    SurvivorList,
    UnmaskRequest,
)
from tests.explore.machines import SUITE, Move, Node, World, subsets


class Menu(World):
    """The moves of a server against the clients of a round."""

    # --- step 1: lists of adverts

    def share_moves(self, node: Node, others: tuple[Node | None, ...]) -> Iterator[Move]:
        """others: every silo's advert node, None for those that did not advertise."""
        me = node.silo
        there = {silo: one for silo, one in enumerate(others) if one is not None}
        for chosen in subsets(there, 1):
            nodes = tuple(there[silo] for silo in sorted(chosen))
            agree = all(one.variant == node.variant for one in nodes)
            founded = me in chosen and len(chosen) >= self.threshold and agree
            adverts = AdvertList(adverts=tuple(one.output for one in nodes))
            after: dict[str, Any] = {"adverts": nodes}
            if founded:
                near = graph.neighbours(self.fingerprints(chosen), adverts.digest(), self.degree)[
                    self.names[me]
                ]
                after["group"] = frozenset({me, *(self.place[name] for name in near)})
                after["needed"] = masking_keys.share_threshold(
                    self.threshold, self.silos, len(chosen), len(after["group"])
                )
            yield Move(("adverts", nodes), founded, methodcaller("share", adverts), after)
        if len(there) < self.silos:
            return
        true = {silo: one.output for silo, one in there.items()}
        nodes = tuple(there.values())
        false: list[tuple[str, dict[Any, Advert]]] = []
        for peer in (min(true.keys() - {me}), max(true.keys() - {me})):
            signer, theirs = self.ids[peer], true[peer]
            echo = {"mask_key": true[me].mask_key, "cipher_key": true[me].cipher_key}
            served = SUITE.key_pair(b"the server's").public
            false += [
                ("a replay of the last round", true | {peer: self.last_round["adverts"][peer]}),
                ("a replay of another run", true | {peer: self.other_run["adverts"][peer]}),
                ("its own keys echoed", true | {peer: self.signed_advert(signer, theirs, **echo)}),
                (
                    "its own mask key echoed",
                    true | {peer: self.signed_advert(signer, theirs, mask_key=true[me].mask_key)},
                ),
                ("a key of the server", true | {peer: theirs.model_copy(update={"cipher_key": served})}),
                (
                    "one key for both uses",
                    true | {peer: self.signed_advert(signer, theirs, mask_key=theirs.cipher_key)},
                ),
            ]
        stranger = true[me].model_copy(
            update={
                "silo": self.stranger.card.fingerprint,
                "mask_key": SUITE.key_pair(b"1").public,
                "cipher_key": SUITE.key_pair(b"2").public,
            }
        )
        false.append(("a stranger", true | {"stranger": self.signed_advert(self.stranger, stranger)}))
        mine = self.signed_advert(self.ids[me], true[me], cipher_key=SUITE.key_pair(b"3").public)
        false.append(("its own advert altered", true | {me: mine}))
        for what, listed in false:
            adverts = AdvertList(adverts=tuple(sorted(listed.values(), key=lambda one: one.silo)))
            yield Move((what, nodes, adverts), False, methodcaller("share", adverts))

    def signed_advert(self, signer: Identity, advert: Advert, **fields: bytes) -> Advert:
        changed = advert.model_copy(update=fields)
        return changed.model_copy(
            update={"signature": SUITE.sign(signer, ADVERT_CONTEXT, changed.statement())}
        )

    # --- step 2: deliveries

    def masked_moves(self, node: Node, others: tuple[Node | None, ...]) -> Iterator[Move]:
        """others: every silo's share node, None for those that did not share."""
        me, name = node.silo, self.names[node.silo]
        took = {one.silo for one in node.adverts}
        there = {
            silo: one
            for silo, one in enumerate(others)
            if one is not None and silo != me and self.dealt_to(one.output, me)
        }
        for shared in subsets(range(self.silos), 1):
            dealers = sorted(shared & node.group & took - {me})
            if not all(silo in there for silo in dealers):
                continue
            nodes = tuple(there[silo] for silo in dealers)
            founded = (
                me in shared <= took
                and len(shared) >= self.threshold
                and len(shared & node.group) >= node.needed
                and all(one.adverts == node.adverts for one in nodes)
            )
            dealings = [one.output.dealing(name) for one in nodes]
            yield self._delivery("shares", shared, dealings, founded, nodes)
        near = sorted(node.group - {me})
        if not all(silo in there and there[silo].adverts == node.adverts for silo in near):
            return
        nodes = tuple(there[silo] for silo in near)
        true = {silo: there[silo].output.dealing(name) for silo in near}
        shared = frozenset(took)
        last = self.last_round["dealt"]
        for peer in (near[0], near[-1]):
            false = self._false_dealings(me, peer, there[peer].output, true[peer])
            if self.dealt_to(last[peer], me):
                false["shares of the last round"] = last[peer].dealing(name)
            for what, dealing in false.items():
                changed = sorted((true | {peer: dealing}).values(), key=lambda one: one.dealer)
                if len({one.dealer for one in changed}) == len(changed):
                    yield self._delivery(what, shared, changed, False, (*nodes, peer))
            rest = [dealing for silo, dealing in true.items() if silo != peer]
            yield self._delivery("shares withheld", shared, rest, False, (*nodes, peer))
            yield self._delivery(
                "shares of one that did not share",
                shared - {peer},
                list(true.values()),
                False,
                (*nodes, peer),
            )

    def _delivery(
        self,
        what: str,
        shared: frozenset[int],
        dealings: list[Dealing],
        founded: bool,
        nodes: tuple[Any, ...],
    ) -> Move:
        delivery = Delivery(shared=self.fingerprints(shared), dealings=tuple(dealings))
        return Move(
            (what, shared, nodes),
            founded,
            lambda one: one.masked(delivery, self.vectors(self.place[one._me])),
            {"shared": shared},
        )

    def _false_dealings(self, me: int, peer: int, message: Any, true: Dealing) -> dict[str, Dealing]:
        """What the server, or the dealer, may do to a dealing of `peer` for `me`."""
        elsewhere = next(
            deal for deal in message.deals if deal.holder not in (self.names[me], self.names[peer])
        )
        torn = true.deal.model_copy(update={"sealed": bytes(SEALED_SHARES)})
        mine = tuple(torn.leaf() if leaf == true.deal.leaf() else leaf for leaf in true.leaves)
        false = {
            "shares for another silo": message.dealing(elsewhere.holder),
            "shares altered": true.model_copy(update={"deal": torn}),
            "shares of the server": true.model_copy(update={"deal": torn, "leaves": mine}),
        }
        if peer < me:
            bad = true.deal.model_copy(update={"seed": elsewhere.seed or bytes(len(true.deal.seed))})
            leaves = tuple(bad.leaf() if leaf == true.deal.leaf() else leaf for leaf in true.leaves)
            made = true.model_copy(update={"deal": bad, "leaves": leaves})
            signature = SUITE.sign(self.ids[peer], SHARES_CONTEXT, made.statement())
            false["a pair seed that does not open"] = made.model_copy(update={"signature": signature})
        return false

    # --- step 3: lists of survivors

    def sign_moves(self, node: Node, others: tuple[Node | None, ...]) -> Iterator[Move]:
        """The server may list whom it likes."""
        for listed in subsets(range(self.silos), 1):
            founded = node.silo in listed <= node.shared and len(listed) >= self.threshold
            survivors = SurvivorList(survivors=self.fingerprints(listed))
            yield Move(
                ("survivors", listed),
                founded,
                methodcaller("sign", survivors),
                {"survivors": listed},
            )

    # --- step 4: signatures

    def unmask_moves(self, node: Node, others: tuple[Node | None, ...]) -> Iterator[Move]:
        """others: every silo's node after it signed, None for those that did not."""
        there = {silo: one for silo, one in enumerate(others) if one is not None}
        survivors, dropped = node.survivors, node.shared - node.survivors
        for signers in subsets(there, self.threshold - 1):
            nodes = tuple(there[silo] for silo in sorted(signers))
            agree = all(
                (one.adverts, one.shared, one.survivors) == (node.adverts, node.shared, survivors)
                for one in nodes
            )
            founded = signers <= survivors and len(signers) >= self.threshold and agree
            yield self._request(
                "signatures", survivors, dropped, [one.output for one in nodes], founded, nodes
            )
        nodes = tuple(
            one
            for silo, one in there.items()
            if (one.adverts, one.shared, one.survivors) == (node.adverts, node.shared, survivors)
        )
        if len(nodes) < self.threshold:
            return
        signed = [one.output for one in nodes]
        victim = max(survivors - {node.silo})
        lists = {
            "a victim alive and dead": (survivors, dropped | {victim}),
            "a survivor called dropped": (survivors - {victim}, dropped | {victim}),
            "a survivor left out": (survivors - {victim}, dropped),
        }
        if dropped:
            lists["a dropped silo alive and dead"] = (survivors | dropped, dropped)
            lists["a dropped silo called a survivor"] = (survivors | dropped, frozenset())
            lists["a dropped silo left out"] = (survivors, frozenset())
        for what, (alive, dead) in lists.items():
            yield self._request(what, alive, dead, signed, False, nodes)
        for silo in sorted(set(range(self.silos)) - survivors):
            # Of the server's own: it signs what they ask for, in a survivor's place.
            signature = SUITE.sign(self.ids[silo], SURVIVORS_CONTEXT, signed[0].statement())
            false = signed[0].model_copy(update={"signer": self.names[silo], "signature": signature})
            changed = sorted([*signed[1:], false], key=lambda one: one.signer)
            yield self._request(
                "a signature of none of them", survivors, dropped, changed, False, (*nodes, silo)
            )
        forged = signed[-1].model_copy(update={"signature": bytes(SIGNATURE)})
        replayed = self.last_round["signed"][self.place[forged.signer]]
        for what, false in (("a forged signature", forged), ("a signature of the last round", replayed)):
            yield self._request(what, survivors, dropped, [*signed[:-1], false], False, nodes)

    def _request(
        self,
        what: str,
        survivors: frozenset[int],
        dropped: frozenset[int],
        signed: list[Any],
        founded: bool,
        nodes: tuple[Any, ...],
    ) -> Move:
        request = UnmaskRequest(
            survivors=self.fingerprints(survivors),
            dropped=self.fingerprints(dropped),
            signatures=tuple(signed),
        )
        return Move((what, survivors, dropped, nodes), founded, methodcaller("unmask", request))
