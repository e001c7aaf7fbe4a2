"""One silo's part of one masked round: what it gives, in which order, and everything that it refuses.

A state machine without I/O. Every step is taken once and in order, and whatever is refused within one ends
the round for this client: its secrets are forgotten, the others go on without it. So no mask serves twice,
and a client gives one kind of share for a peer, once, about the one list of survivors that it signed. The
secrets are drawn here, live as long as the object, and have no serialiser: a client that was restarted sits
the round out. A caller that must repeat an answer keeps the answer.

The server is trusted with nothing but with going on. What it can do: leave silos out, down to the thresholds,
and end the round. What another silo can do: add what it likes to the sum, masks that do not cancel included.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from securefl.crypto import graph, masking_keys, masks, shares
from securefl.crypto.identity import Card, Identity
from securefl.crypto.masking_keys import HYBRID, KeyPair, SharePair, Suite
from securefl.crypto.masking_messages import (
    ADVERT_CONTEXT,
    SHARES_CONTEXT,
    SIGNATURE,
    SURVIVORS_CONTEXT,
    Advert,
    AdvertList,
    Deal,
    Dealing,
    Delivery,
    GivenShare,
    MaskedInput,
    RoundTerms,
    ShareMessage,
    SurvivorList,
    SurvivorSignature,
    Unmasking,
    UnmaskRequest,
    list_hash,
)
from securefl.errors import (
    BadSignature,
    DecryptionFailed,
    MaskingAborted,
    PayloadError,
    PolicyRefusal,
    ProtocolError,
    SecureflError,
    TooFewSilos,
    WrongRound,
    WrongShape,
)

# With two silos, the sum and one's own vector give the other's.
LEAST_COHORT = 3


class Step(IntEnum):
    """What a client does next; each once, in this order. OVER: nothing, whether it is done or has refused."""

    ADVERTISE = 0
    SHARE = 1
    MASK = 2
    SIGN = 3
    UNMASK = 4
    OVER = 5


class MaskingClient:
    """One silo in one round of one run. Shows its name and step only; cannot be pickled or copied."""

    def __init__(
        self,
        identity: Identity,
        roster: Mapping[str, Card],
        terms: RoundTerms,
        *,
        least_threshold: int = 0,
        least_cohort: int = LEAST_COHORT,
        degree: int | None = None,
        suite: Suite = HYBRID,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """roster: the cards of the whole cohort by name, as pinned, its own among them.

        least_threshold, least_cohort: the silo's own policy; it may ask for more than two thirds and three
        silos, never for less. degree: of the graph, from the policy and not from the server; None: chosen by
        `graph`. Raises PolicyRefusal for a cohort or a threshold below the policy, MaskingAborted for a
        roster without this identity or fewer silos than the threshold.
        """
        self._cards = {card.fingerprint: card for card in roster.values()}
        self._me = identity.card.fingerprint
        if self._me not in self._cards:
            raise MaskingAborted("the cohort of a masked round lacks this silo, or has another card of it")
        silos = len(self._cards)
        least = max(least_cohort, LEAST_COHORT)
        if silos < least:
            raise PolicyRefusal(f"a cohort of {silos} silos is below the policy's {least}", "cohort")
        least = max(least_threshold, graph.threshold(silos))
        if terms.threshold < least:
            raise PolicyRefusal(
                f"a threshold of {terms.threshold} is below the policy's {least} of {silos} silos",
                "threshold",
            )
        if terms.threshold > silos:
            raise MaskingAborted(f"{silos} silos cannot reach the threshold of {terms.threshold}")
        self._identity, self._terms, self._degree = identity, terms, degree
        self._suite, self._random = suite, random
        self._step = Step.ADVERTISE
        self._forget()

    def _forget(self) -> None:
        self._root: bytes = b""
        self._blind: bytes = b""
        self._mask_key = self._cipher_key = KeyPair(b"", None)
        self._advert: Advert | None = None
        self._adverts: Mapping[str, Advert] = {}
        self._digest: bytes = b""
        self._group: frozenset[str] = frozenset()  # itself and its neighbours
        self._needed = 0
        self._kept = SharePair(b"", b"", b"", b"")
        self._held: Mapping[str, SharePair] = {}
        self._faults: tuple[str, ...] = ()
        self._shared: frozenset[str] = frozenset()
        self._survivors: frozenset[str] = frozenset()
        self._view: SurvivorSignature | None = None

    @property
    def step(self) -> Step:
        return self._step

    def __repr__(self) -> str:
        terms = self._terms
        return f"MaskingClient({self._identity.name}, round {terms.round}, {self._step.name}, secrets hidden)"

    def __reduce__(self) -> NoReturn:
        raise SecureflError("a client of a masked round holds secrets and cannot be serialised")

    @contextmanager
    def _take(self, step: Step) -> Iterator[None]:
        """`step`, if it is the next one. The round is over for this client unless all of it succeeds."""
        if self._step is not step:
            raise WrongRound(
                f"asked for step {step.name} of a masked round while at "
                f"{self._step.name}; each is taken once and in order"
            )
        self._step = Step.OVER
        try:
            yield
            self._step = Step(step + 1)
        finally:
            if self._step is Step.OVER:
                self._forget()

    def close(self) -> None:
        """End the round for this client, and forget its secrets."""
        self._step = Step.OVER
        self._forget()

    def _name(self, silo: str) -> str:
        return self._cards[silo].name if silo in self._cards else f"{silo[:16]} (not in the roster)"

    def _below(self, count: int, what: str) -> str:
        return f"{count} {what}, below the threshold of {self._terms.threshold}; nothing was sent"

    # --- step 0

    def advertise(self) -> Advert:
        """Draw the secrets of the round, and sign its two public keys. Raises WrongRound if asked again."""
        with self._take(Step.ADVERTISE):
            terms = self._terms
            self._root, self._blind = self._random(32), self._random(32)
            seed = masking_keys.mask_key_seed(self._root, terms.run, terms.round, self._me)
            self._mask_key = self._suite.key_pair(seed)
            self._cipher_key = self._suite.key_pair(self._random(masking_keys.KEY_SEED))
            advert = Advert(
                run=terms.run,
                round=terms.round,
                silo=self._me,
                plan=terms.plan,
                model=terms.model,
                mask_key=self._mask_key.public,
                cipher_key=self._cipher_key.public,
                signature=bytes(SIGNATURE),
            )
            signature = self._suite.sign(self._identity, ADVERT_CONTEXT, advert.statement())
            self._advert = advert.model_copy(update={"signature": signature})
            return self._advert

    # --- step 1

    def share(self, adverts: AdvertList) -> ShareMessage:
        """Check the adverts, and share root and blind among the neighbours that follow from them.

        Raises WrongRound, MaskingAborted or TooFewSilos, naming the silo and what is wrong with it.
        """
        with self._take(Step.SHARE):
            self._adverts = {advert.silo: advert for advert in adverts.adverts}
            for advert in adverts.adverts:
                self._check_advert(advert)
            if self._adverts.get(self._me) != self._advert:
                raise MaskingAborted("the server lost or altered this silo's advert")
            keys = [key for one in adverts.adverts for key in (one.mask_key, one.cipher_key)]
            if len(set(keys)) != len(keys):
                raise MaskingAborted("the server relayed one ephemeral key twice")
            if len(self._adverts) < self._terms.threshold:
                raise TooFewSilos(self._below(len(self._adverts), "silos advertised"))
            self._digest = adverts.digest()
            near = graph.neighbours(sorted(self._adverts), self._digest, self._degree)[self._me]
            self._group = frozenset((self._me, *near))
            self._needed = masking_keys.share_threshold(
                self._terms.threshold, len(self._cards), len(self._adverts), len(self._group)
            )
            return self._deal()

    def _check_advert(self, advert: Advert) -> None:
        terms, name = self._terms, self._name(advert.silo)
        card = self._cards.get(advert.silo)
        if card is None:
            raise MaskingAborted(f"a silo that is not in its roster advertised: {name}")
        if (advert.run, advert.round) != (terms.run, terms.round):
            raise WrongRound(f"the advert of {name} is of another run or round")
        if (advert.plan, advert.model) != (terms.plan, terms.model):
            raise MaskingAborted(
                f"the server gave {name} another "
                f"{'plan' if advert.plan != terms.plan else 'model'}; nothing was sent"
            )
        try:
            self._suite.verify(card, ADVERT_CONTEXT, advert.statement(), advert.signature)
        except BadSignature:
            raise MaskingAborted(f"the advert of {name} is not signed by it") from None

    def _deal(self) -> ShareMessage:
        holders = sorted(self._group)
        roots = shares.split(self._root, self._needed, len(holders))
        blinds = shares.split(self._blind, self._needed, len(holders))
        deals = []
        for holder, root, blind in zip(holders, roots, blinds, strict=True):
            held = SharePair(root, self._random(shares.SALT_BYTES), blind, self._random(shares.SALT_BYTES))
            sealed = seed = b""
            if holder == self._me:
                self._kept = held
            else:
                sealed = self._seal(b"shares", holder, self._adverts[holder].cipher_key, held.packed())
            if holder > self._me:
                pair = self._pair_seed(holder)
                seed = self._seal(b"pair", holder, self._adverts[holder].mask_key, pair)
            deals.append(
                Deal(
                    holder=holder,
                    root_commitment=shares.commit(held.root, held.root_salt),
                    blind_commitment=shares.commit(held.blind, held.blind_salt),
                    sealed=sealed,
                    seed=seed,
                )
            )
        message = ShareMessage(
            adverts=self._digest,
            dealer=self._me,
            blind_hash=masking_keys.blind_hash(self._blind, self._digest, self._me),
            deals=tuple(deals),
            signature=bytes(SIGNATURE),
        )
        signature = self._suite.sign(self._identity, SHARES_CONTEXT, message.statement())
        return message.model_copy(update={"signature": signature})

    def _info(self, purpose: bytes, dealer: str, holder: str) -> bytes:
        terms = self._terms
        return masking_keys.seal_info(purpose, terms.run, terms.round, dealer, holder, self._digest)

    def _seal(self, purpose: bytes, holder: str, key: bytes, plain: bytes) -> bytes:
        try:
            return self._suite.seal(key, plain, self._info(purpose, self._me, holder))
        except PayloadError:
            raise MaskingAborted(
                f"{self._name(holder)} advertised a key that nothing can be sealed to"
            ) from None

    def _pair_seed(self, holder: str) -> bytes:
        terms = self._terms
        return masking_keys.pair_seed(self._root, terms.run, terms.round, self._me, holder, self._digest)

    # --- step 2

    def masked(self, delivery: Delivery, vectors: Mapping[str, NDArray[np.uint32]]) -> MaskedInput:
        """Check the deals, and mask the vectors, by name, in place: what is left in them is what travels.

        vectors: those of the terms, uint32 (length,), each value below 2^bits, contiguous and writable; of
        real numbers, `weighted.encode_weighted`. A peer's bad share is a fault to report; the round goes on.
        Raises WrongRound, WrongShape, PayloadError, MaskingAborted or TooFewSilos.
        """
        with self._take(Step.MASK):
            self._check_vectors(vectors)
            self._shared = frozenset(delivery.shared)
            if not self._shared <= self._adverts.keys():
                odd = min(self._shared - self._adverts.keys())
                raise MaskingAborted(f"a silo shared that did not advertise: {self._name(odd)}")
            if self._me not in self._shared:
                raise MaskingAborted("the server left out that this silo shared")
            mine = self._shared & self._group
            if len(self._shared) < self._terms.threshold:
                raise TooFewSilos(self._below(len(self._shared), "silos shared"))
            if len(mine) < self._needed:
                raise TooFewSilos(
                    f"{len(mine)} of this neighbourhood shared, below the {self._needed} needed"
                )
            dealings = {dealing.dealer: dealing for dealing in delivery.dealings}
            if dealings.keys() != mine - {self._me}:
                raise MaskingAborted("the server relayed shares of other silos than those that shared")
            held, seeds = {self._me: self._kept}, {}
            for dealer, dealing in dealings.items():
                self._check_dealing(dealing)
                seeds[dealer] = self._pair_seed(dealer) if dealer > self._me else self._open_seed(dealing)
                if (opened := self._open_shares(dealing)) is not None:
                    held[dealer] = opened
            self._held = held
            self._faults = tuple(sorted(dealings.keys() - held.keys()))
            for spec in self._terms.vectors:
                masks.add_masks(vectors[spec.name], self._streams(spec.name, seeds), spec.bits)
            packed = {spec.name: masks.pack(vectors[spec.name], spec.bits) for spec in self._terms.vectors}
            return MaskedInput(adverts=self._digest, vectors=packed)

    def _check_vectors(self, vectors: Mapping[str, NDArray[np.uint32]]) -> None:
        if vectors.keys() != {spec.name for spec in self._terms.vectors}:
            raise WrongShape("the vectors to be masked are not those agreed")
        for spec in self._terms.vectors:
            vector = vectors[spec.name]
            if vector.dtype != np.uint32 or vector.shape != (spec.length,) or not vector.flags.carray:
                raise WrongShape(
                    f"vector {spec.name} is {vector.dtype} {vector.shape}, agreed was a "
                    f"contiguous, writable uint32 ({spec.length},)"
                )
            if int(vector.max()) >> spec.bits:
                raise PayloadError(f"vector {spec.name} has a value that does not fit {spec.bits} bits")

    def _check_dealing(self, dealing: Dealing) -> None:
        name = self._name(dealing.dealer)
        if dealing.adverts != self._digest:
            raise MaskingAborted(f"{name} shared upon other adverts than this silo has")
        try:
            statement = dealing.statement()
            self._suite.verify(self._cards[dealing.dealer], SHARES_CONTEXT, statement, dealing.signature)
        except BadSignature:
            raise MaskingAborted(f"the shares of {name} are not signed by it") from None
        if dealing.deal.leaf() not in dealing.leaves:
            raise MaskingAborted(f"the shares relayed of {name} are not those that it signed")
        if dealing.deal.holder != self._me:
            raise MaskingAborted(f"the server relayed shares of {name} for another silo")

    def _open_seed(self, dealing: Dealing) -> bytes:
        dealer = dealing.dealer
        try:
            info = self._info(b"pair", dealer, self._me)
            return self._suite.open(self._mask_key.private, dealing.deal.seed, info)
        except DecryptionFailed:
            raise MaskingAborted(f"the pair seed that {self._name(dealer)} dealt does not open") from None

    def _open_shares(self, dealing: Dealing) -> SharePair | None:
        """The shares, or None where their dealer is at fault: it signed what does not open or match."""
        deal, info = dealing.deal, self._info(b"shares", dealing.dealer, self._me)
        try:
            held = SharePair.unpacked(self._suite.open(self._cipher_key.private, deal.sealed, info))
            place = sorted(self._group).index(self._me) + 1
            shares.check(place, held.root, held.root_salt, deal.root_commitment)
            shares.check(place, held.blind, held.blind_salt, deal.blind_commitment)
        except ProtocolError:
            return None
        return held

    def _streams(self, vector: str, seeds: Mapping[str, bytes]) -> list[masks.Stream]:
        terms = self._terms

        def seed(secret: bytes, *parties: str) -> bytes:
            return masks.stream_seed(secret, terms.run, terms.round, vector, parties)

        pairs = [
            masks.Stream(seed(secret, self._me, peer), 1 if self._me < peer else -1)
            for peer, secret in seeds.items()
        ]
        return [masks.Stream(seed(self._blind, self._me), 1), *pairs]

    # --- step 3

    def sign(self, survivors: SurvivorList) -> SurvivorSignature:
        """Sign the list of survivors, with the plan and the model that this client was given.

        Raises WrongRound (a second list of a round included), MaskingAborted or TooFewSilos.
        """
        with self._take(Step.SIGN):
            terms, listed = self._terms, frozenset(survivors.survivors)
            if not listed <= self._shared:
                odd = min(listed - self._shared)
                raise MaskingAborted(f"a survivor is listed that did not share: {self._name(odd)}")
            if self._me not in listed:
                raise MaskingAborted("the list of survivors leaves this silo out")
            if len(listed) < terms.threshold:
                raise TooFewSilos(self._below(len(listed), "survivors"))
            view = SurvivorSignature(
                run=terms.run,
                round=terms.round,
                signer=self._me,
                adverts=self._digest,
                shared=list_hash(self._shared),
                survivors=list_hash(listed),
                plan=terms.plan,
                model=terms.model,
                signature=bytes(SIGNATURE),
            )
            signature = self._suite.sign(self._identity, SURVIVORS_CONTEXT, view.statement())
            self._survivors = listed
            self._view = view.model_copy(update={"signature": signature})
            return self._view

    # --- step 4

    def unmask(self, request: UnmaskRequest) -> Unmasking:
        """Check that a threshold of survivors signed the same, and give one share for each neighbour.

        Raises WrongRound (a second time included), MaskingAborted or TooFewSilos.
        """
        with self._take(Step.UNMASK):
            dropped = self._shared - self._survivors
            if frozenset(request.survivors) != self._survivors or frozenset(request.dropped) != dropped:
                raise MaskingAborted(
                    "the lists of survivors and dropped silos overlap, or are not what was signed"
                )
            for signature in request.signatures:
                self._check_signature(signature)
            if len(request.signatures) < self._terms.threshold:
                raise TooFewSilos(self._below(len(request.signatures), "signatures"))
            held = sorted(self._held.items())
            return Unmasking(
                adverts=self._digest,
                blinds=tuple(
                    GivenShare(dealer=dealer, share=one.blind, salt=one.blind_salt)
                    for dealer, one in held
                    if dealer in self._survivors
                ),
                roots=tuple(
                    GivenShare(dealer=dealer, share=one.root, salt=one.root_salt)
                    for dealer, one in held
                    if dealer not in self._survivors
                ),
                faults=self._faults,
            )

    def _check_signature(self, signed: SurvivorSignature) -> None:
        mine, name = self._view, self._name(signed.signer)
        if signed.signer not in self._survivors:
            raise MaskingAborted(f"{name} signed and is not among the survivors")
        assert mine is not None
        try:
            card = self._cards[signed.signer]
            self._suite.verify(card, SURVIVORS_CONTEXT, mine.statement(), signed.signature)
        except BadSignature:
            fields = ("model", "plan", "survivors", "shared", "adverts")
            differ = [one for one in fields if getattr(signed, one) != getattr(mine, one)]
            raise MaskingAborted(
                f"{name} did not sign the same round "
                f"({', '.join(differ) or 'signature'} differ); nothing was unmasked"
            ) from None
