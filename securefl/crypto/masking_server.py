"""The server's part of one masked round: collect, relay, add up, and remove the masks of the sum alone.

A state machine without I/O. Each step takes messages (`receive_*`) until the caller closes it (`close_*`),
which gives what to send on, or raises TooFewSilos: then the round is over and nothing was revealed. A message
that is refused changes nothing; its silo counts as dropped unless it sends a right one. Masked vectors are
added as they come, so memory does not grow with the silos. Secrets of dropped silos are rebuilt, used and let
go within `result`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from securefl.crypto import graph, masking_keys, masks, shares
from securefl.crypto.identity import Card
from securefl.crypto.masking_keys import HYBRID, Suite
from securefl.crypto.masking_messages import (
    ADVERT_CONTEXT,
    SHARES_CONTEXT,
    SURVIVORS_CONTEXT,
    Advert,
    AdvertList,
    Deal,
    Delivery,
    GivenShare,
    MaskedInput,
    RoundTerms,
    ShareMessage,
    SurvivorList,
    SurvivorSignature,
    Unmasking,
    UnmaskRequest,
    VectorSpec,
    list_hash,
)
from securefl.errors import (
    DecryptionFailed,
    MaskingAborted,
    PayloadError,
    ProtocolError,
    Replayed,
    TooFewSilos,
    UnknownSender,
    WrongRound,
    WrongShape,
)


class Phase(IntEnum):
    """What the server waits for. OVER: the round gave its sum or was ended."""

    ADVERTS = 0
    SHARES = 1
    INPUTS = 2
    SIGNATURES = 3
    SHARES_OF_SECRETS = 4
    OVER = 5


@dataclass(frozen=True)
class MaskedSum:
    """What a round opened. sums: by vector, uint32 (length,), mod 2^bits; survivors: whose vectors it adds.

    faults: one sentence for each bad share, naming who dealt or gave it.
    """

    sums: Mapping[str, NDArray[np.uint32]] = field(repr=False)
    survivors: tuple[str, ...]
    faults: tuple[str, ...]


def _unpacked(data: bytes | memoryview, spec: VectorSpec) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Where each chunk of a packed vector starts, and its values. Raises as `masks.unpack`."""
    width = masks.value_bytes(spec.bits)
    if len(data) != width * spec.length:
        raise WrongShape(
            f"{len(data)} bytes of {spec.name}, which has {width} for each of {spec.length} values"
        )
    for start in range(0, spec.length, masks.CHUNK):
        stop = min(start + masks.CHUNK, spec.length)
        yield start, masks.unpack(bytes(data[width * start : width * stop]), spec.bits, stop - start)


class MaskingServer:
    """The untrusted middle of one round. Silos are named by fingerprint; errors use their names."""

    def __init__(
        self,
        roster: Mapping[str, Card],
        terms: RoundTerms,
        *,
        degree: int | None = None,
        suite: Suite = HYBRID,
        threads: int = 2,
    ) -> None:
        """roster: the cards of the cohort by name; terms, degree: as the clients'.

        Raises TooFewSilos for a cohort below the threshold.
        """
        self._cards = {card.fingerprint: card for card in roster.values()}
        self._terms, self._degree, self._suite, self._threads = terms, degree, suite, threads
        self._phase = Phase.ADVERTS
        self._digest = b""
        self._adverts: dict[str, Advert] = {}
        self._near: Mapping[str, tuple[str, ...]] = {}
        self._groups: Mapping[str, list[str]] = {}  # a silo and its neighbours, in order
        self._shares: dict[str, ShareMessage] = {}
        self._totals: dict[str, NDArray[np.uint32]] = {}
        self._inputs: frozenset[str] = frozenset()
        self._signatures: dict[str, SurvivorSignature] = {}
        self._unmasked: frozenset[str] = frozenset()
        self._blinds: dict[str, dict[int, bytes]] = {}
        self._roots: dict[str, dict[int, bytes]] = {}
        self._faults: tuple[str, ...] = ()
        self._require(self._cards, "belong to the cohort")

    @property
    def phase(self) -> Phase:
        return self._phase

    def __repr__(self) -> str:
        return f"MaskingServer(round {self._terms.round}, {self._phase.name})"

    # --- rules common to the steps

    def _name(self, silo: str) -> str:
        return self._cards[silo].name if silo in self._cards else f"{silo[:16]} (not in the roster)"

    def _admit(self, phase: Phase, sender: str, expected: Iterable[str], done: Iterable[str]) -> str:
        """The name of a sender that may send now, once."""
        name = self._name(sender)
        if sender not in expected:
            raise UnknownSender(f"{name} has no part in this step of the masked round")
        if self._phase is not phase:
            raise WrongRound(f"a message of {name} came at {self._phase.name} of the masked round")
        if sender in done:
            raise Replayed(f"{name} sent its message of this step already")
        return name

    def _own(self, name: str, adverts: bytes) -> None:
        if adverts != self._digest:
            raise WrongRound(f"a message of {name} is of another round, or of other adverts")

    def _close(self, phase: Phase, arrived: Iterable[str], what: str) -> tuple[str, ...]:
        if self._phase is not phase:
            raise WrongRound(f"the masked round is at {self._phase.name}, not at {phase.name}")
        self._require(arrived, what)
        self._phase = Phase(phase + 1)
        return tuple(sorted(arrived))

    def _require(self, silos: Iterable[str], what: str) -> None:
        count = len(set(silos))
        if count < self._terms.threshold:
            self._end()
            raise TooFewSilos(
                f"{count} silos {what}, below the threshold of {self._terms.threshold}; the masked round is "
                "over and nothing was revealed"
            )

    def _end(self) -> None:
        self._phase = Phase.OVER
        self._totals, self._blinds, self._roots = {}, {}, {}

    # --- step 0

    def receive_advert(self, sender: str, advert: Advert) -> None:
        """Take a silo's advert. Raises ProtocolError naming the silo; the round goes on without it."""
        name = self._admit(Phase.ADVERTS, sender, self._cards, self._adverts)
        terms = self._terms
        if advert.silo != sender:
            raise UnknownSender(f"{name} sent the advert of another silo")
        if (advert.run, advert.round) != (terms.run, terms.round):
            raise WrongRound(f"the advert of {name} is of another run or round")
        if (advert.plan, advert.model) != (terms.plan, terms.model):
            raise MaskingAborted(f"{name} advertised for another plan or model than was sent")
        self._suite.verify(self._cards[sender], ADVERT_CONTEXT, advert.statement(), advert.signature)
        keys = {key for one in self._adverts.values() for key in (one.mask_key, one.cipher_key)}
        if keys & {advert.mask_key, advert.cipher_key} or advert.mask_key == advert.cipher_key:
            raise PayloadError(f"{name} advertised a key that occurs twice")
        for key in (advert.mask_key, advert.cipher_key):
            # One bad key would end the round for every client that had to seal to it.
            self._suite.seal(key, bytes(32), b"securefl/1 masked check")
        self._adverts[sender] = advert

    def close_adverts(self) -> AdvertList:
        """To every silo that advertised. Raises TooFewSilos, which ends the round."""
        silos = self._close(Phase.ADVERTS, self._adverts, "advertised")
        adverts = AdvertList(adverts=tuple(self._adverts[silo] for silo in silos))
        self._digest = adverts.digest()
        self._near = graph.neighbours(silos, self._digest, self._degree)
        self._groups = {silo: sorted((silo, *near)) for silo, near in self._near.items()}
        return adverts

    # --- step 1

    def _needed(self, silo: str) -> int:
        return masking_keys.share_threshold(
            self._terms.threshold, len(self._cards), len(self._adverts), len(self._near[silo]) + 1
        )

    def receive_shares(self, sender: str, message: ShareMessage) -> None:
        """Take a silo's deals. Raises ProtocolError naming the silo."""
        name = self._admit(Phase.SHARES, sender, self._adverts, self._shares)
        self._own(name, message.adverts)
        if message.dealer != sender:
            raise UnknownSender(f"{name} sent the shares of another silo")
        if [deal.holder for deal in message.deals] != self._groups[sender]:
            raise PayloadError(f"{name} did not deal to its neighbours alone")
        if any(
            bool(deal.sealed) != (deal.holder != sender) or bool(deal.seed) != (deal.holder > sender)
            for deal in message.deals
        ):
            raise PayloadError(f"a deal of {name} lacks a part, or has one too many")
        self._suite.verify(self._cards[sender], SHARES_CONTEXT, message.statement(), message.signature)
        self._shares[sender] = message

    def close_shares(self) -> dict[str, Delivery]:
        """To each silo that shared, by fingerprint. Raises TooFewSilos, which ends the round."""
        shared = self._close(Phase.SHARES, self._shares, "shared")
        self._totals = {spec.name: np.zeros(spec.length, np.uint32) for spec in self._terms.vectors}
        leaves = {dealer: message.leaves() for dealer, message in self._shares.items()}
        return {
            silo: Delivery(
                shared=shared,
                dealings=tuple(
                    self._shares[dealer].dealing(silo, leaves[dealer])
                    for dealer in sorted(self._near[silo])
                    if dealer in self._shares
                ),
            )
            for silo in shared
        }

    # --- step 2

    def receive_input(self, sender: str, message: MaskedInput) -> None:
        """Add a silo's masked vectors, all of them or none. Raises ProtocolError naming the silo."""
        name = self._admit(Phase.INPUTS, sender, self._shares, self._inputs)
        self._own(name, message.adverts)
        specs = self._terms.vectors
        if message.vectors.keys() != {spec.name for spec in specs}:
            raise WrongShape(f"{name} sent other vectors than those agreed")
        # Every vector is gone through once before any is added, in chunks: no unpacked copy of one exists.
        try:
            for spec in specs:
                for _ in _unpacked(message.vectors[spec.name], spec):
                    pass
        except ProtocolError as error:
            raise WrongShape(f"{name}: {error}") from None
        for spec in specs:
            total, top = self._totals[spec.name], np.uint32((1 << spec.bits) - 1)
            for start, values in _unpacked(message.vectors[spec.name], spec):
                part = total[start : start + values.size]
                np.add(part, values, out=part)
                np.bitwise_and(part, top, out=part)
        self._inputs |= {sender}

    def close_inputs(self) -> SurvivorList:
        """To every silo whose input came. Raises TooFewSilos, which ends the round."""
        return SurvivorList(survivors=self._close(Phase.INPUTS, self._inputs, "sent their masked input"))

    # --- step 3

    def receive_signature(self, sender: str, message: SurvivorSignature) -> None:
        """Take a survivor's signature of this server's own view. Raises ProtocolError naming the silo."""
        name = self._admit(Phase.SIGNATURES, sender, self._inputs, self._signatures)
        terms = self._terms
        if message.signer != sender:
            raise UnknownSender(f"{name} sent the signature of another silo")
        mine = SurvivorSignature(
            run=terms.run,
            round=terms.round,
            signer=sender,
            adverts=self._digest,
            shared=list_hash(self._shares),
            survivors=list_hash(self._inputs),
            plan=terms.plan,
            model=terms.model,
            signature=message.signature,
        )
        if message != mine:
            raise WrongRound(f"{name} signed another view of the round")
        self._suite.verify(self._cards[sender], SURVIVORS_CONTEXT, mine.statement(), mine.signature)
        self._signatures[sender] = message

    def close_signatures(self) -> UnmaskRequest:
        """To every survivor. Raises TooFewSilos, which ends the round."""
        signers = self._close(Phase.SIGNATURES, self._signatures, "signed")
        return UnmaskRequest(
            survivors=tuple(sorted(self._inputs)),
            dropped=tuple(sorted(self._shares.keys() - self._inputs)),
            signatures=tuple(self._signatures[silo] for silo in signers),
        )

    # --- step 4

    def receive_unmasking(self, sender: str, message: Unmasking) -> None:
        """Take a survivor's shares. One that its dealer did not commit to is a fault, the rest counts.

        Raises ProtocolError naming the silo, for shares that nobody asked it for.
        """
        name = self._admit(Phase.SHARES_OF_SECRETS, sender, self._inputs, self._unmasked)
        self._own(name, message.adverts)
        near = self._shares.keys() & set(self._groups[sender])
        for given, allowed in ((message.blinds, self._inputs), (message.roots, near - self._inputs)):
            if not {one.dealer for one in given} <= near & allowed:
                raise PayloadError(f"{name} gave shares of silos that it was not asked for")
        given_of = {one.dealer for one in (*message.blinds, *message.roots)}
        if not set(message.faults) <= near - given_of - {sender}:
            raise PayloadError(f"{name} reports bad shares of silos that dealt it none, or that it gave on")
        faults = [f"{name} says that {self._name(dealer)} dealt it a bad share" for dealer in message.faults]
        blinds = [one for one in message.blinds if self._committed(sender, one, "blind", faults)]
        roots = [one for one in message.roots if self._committed(sender, one, "root", faults)]
        for known, good in ((self._blinds, blinds), (self._roots, roots)):
            for one in good:
                place = self._groups[one.dealer].index(sender) + 1
                known.setdefault(one.dealer, {})[place] = one.share
        self._faults += tuple(faults)
        self._unmasked |= {sender}

    def _committed(
        self, holder: str, given: GivenShare, kind: Literal["blind", "root"], faults: list[str]
    ) -> bool:
        deal = self._dealt(given.dealer, holder)
        commitment = deal.blind_commitment if kind == "blind" else deal.root_commitment
        try:
            shares.check(1, given.share, given.salt, commitment)
        except ProtocolError:
            faults.append(f"{self._name(holder)} gave a bad share of {self._name(given.dealer)}")
            return False
        return True

    def _dealt(self, dealer: str, holder: str) -> Deal:
        return self._shares[dealer].deals[self._groups[dealer].index(holder)]

    def result(self) -> MaskedSum:
        """Rebuild the survivors' blinds and the dropped silos' roots, and take their masks off the sums.

        Ends the round either way. Raises TooFewSilos where a secret has too few good shares, MaskingAborted
        naming a dealer whose shares do not give what it announced, WrongRound if it is not time yet.
        """
        self._close(Phase.SHARES_OF_SECRETS, self._inputs, "are left")
        totals, survivors = self._totals, tuple(sorted(self._inputs))
        try:
            dropped = [
                silo
                for silo in sorted(self._shares.keys() - self._inputs)
                if self._inputs & set(self._near[silo])
            ]
            self._require_shares(self._blinds, survivors)
            self._require_shares(self._roots, dropped)
            secrets: list[tuple[bytes, Literal[1, -1], tuple[str, ...]]] = [
                (self._blind(silo), -1, (silo,)) for silo in survivors
            ]
            for silo in dropped:
                secrets += self._pairs(silo)
            for spec in self._terms.vectors:
                streams = [
                    masks.Stream(
                        masks.stream_seed(secret, self._terms.run, self._terms.round, spec.name, parties),
                        sign,
                    )
                    for secret, sign, parties in secrets
                ]
                masks.add_masks(totals[spec.name], streams, spec.bits, self._threads)
        finally:
            self._end()
        return MaskedSum(totals, survivors, self._faults)

    def _require_shares(self, known: Mapping[str, Mapping[int, bytes]], silos: Iterable[str]) -> None:
        for silo in silos:
            count, needed = len(known.get(silo, {})), self._needed(silo)
            if count < needed:
                faults = "".join(f"; {fault}" for fault in self._faults)
                raise TooFewSilos(
                    f"{count} good shares of {self._name(silo)} of the {needed} needed; the masked round is "
                    f"over and nothing was revealed{faults}"
                )

    def _blind(self, silo: str) -> bytes:
        blind = shares.combine(self._blinds[silo], self._needed(silo))
        if masking_keys.blind_hash(blind, self._digest, silo) != self._shares[silo].blind_hash:
            raise MaskingAborted(
                f"the shares that {self._name(silo)} dealt do not give the blind it announced"
            )
        return blind

    def _pairs(self, dropped: str) -> list[tuple[bytes, Literal[1, -1], tuple[str, ...]]]:
        """The pair masks of a dropped silo that are left in the sums, each with the sign that removes it."""
        terms, name = self._terms, self._name(dropped)
        root = shares.combine(self._roots[dropped], self._needed(dropped))
        key = self._suite.key_pair(masking_keys.mask_key_seed(root, terms.run, terms.round, dropped))
        if key.public != self._adverts[dropped].mask_key:
            raise MaskingAborted(f"the shares that {name} dealt do not give the root of its mask key")
        found: list[tuple[bytes, Literal[1, -1], tuple[str, ...]]] = []
        for peer in sorted(self._inputs & set(self._near[dropped])):
            if dropped < peer:
                seed = masking_keys.pair_seed(root, terms.run, terms.round, dropped, peer, self._digest)
                found.append((seed, 1, (peer, dropped)))
                continue
            info = masking_keys.seal_info(b"pair", terms.run, terms.round, peer, dropped, self._digest)
            try:
                seed = self._suite.open(key.private, self._dealt(peer, dropped).seed, info)
            except DecryptionFailed:
                raise MaskingAborted(
                    f"the pair seed that {self._name(peer)} dealt {name} does not open"
                ) from None
            found.append((seed, -1, (peer, dropped)))
        return found
