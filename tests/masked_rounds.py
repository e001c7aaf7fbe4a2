"""One masked round with the real machines, step by step, and silos that drop out in the middle of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.crypto.identity import Identity
from securefl.crypto.masking_client import MaskingClient
from securefl.crypto.masking_keys import HYBRID, Suite
from securefl.crypto.masking_messages import AdvertList, Delivery, RoundTerms, SurvivorList, VectorSpec
from securefl.crypto.masking_server import MaskedSum, MaskingServer
from tests.explore.machines import SUITE, identities

Vectors = dict[str, NDArray[np.uint32]]
SPECS = (VectorSpec(name="weights", length=40, bits=32), VectorSpec(name="counts", length=1, bits=20))
# Where a silo may fall silent: before it sends the message of that step.
STEPS = ("advertise", "share", "input", "sign", "unmask")


def terms(silos: int, **fields: Any) -> RoundTerms:
    """The terms of a round of `silos` with the default threshold."""
    default: dict[str, Any] = {
        "run": "0123456789abcdef" * 2,
        "round": 3,
        "threshold": 2 * silos // 3 + 1,
        "plan": b"p" * 32,
        "model": b"m" * 32,
        "vectors": SPECS,
    }
    return RoundTerms(**{**default, **fields})


class Round:
    """The silos 0 .. n-1, in the order of their fingerprints, and the server of one round.

    relay: what happens to every message on its way; a test may keep or change it.
    """

    def __init__(
        self,
        silos: int,
        *,
        suite: Suite = SUITE,
        degree: int | None = None,
        make: Callable[..., MaskingClient] = MaskingClient,
        relay: Callable[[Any], Any] = lambda message: message,
        **fields: Any,
    ) -> None:
        self.terms, self.relay = terms(silos, **fields), relay
        self.ids: tuple[Identity, ...] = identities(silos)[:silos]
        self.names = [one.card.fingerprint for one in self.ids]
        self.roster = {one.name: one.card for one in self.ids}
        self.clients = [make(one, self.roster, self.terms, suite=suite, degree=degree) for one in self.ids]
        self.server = MaskingServer(self.roster, self.terms, suite=suite, degree=degree, threads=1)
        rng = np.random.default_rng(7)
        self.vectors: list[Vectors] = [
            {
                one.name: rng.integers(0, 2**one.bits, one.length).astype(np.uint32)
                for one in self.terms.vectors
            }
            for _ in self.ids
        ]

    def fresh(self, silo: int) -> Vectors:
        """A silo's vectors, to be masked in place."""
        return {name: vector.copy() for name, vector in self.vectors[silo].items()}

    def right(self, silos: Iterable[int]) -> Vectors:
        """The sum of some silos' vectors, in plain integers."""
        chosen = list(silos)
        sums: Vectors = {}
        for one in self.terms.vectors:
            stacked = np.stack([self.vectors[silo][one.name] for silo in chosen]).astype(np.uint64)
            sums[one.name] = (stacked.sum(axis=0) % 2**one.bits).astype(np.uint32)
        return sums

    # --- the steps, each for those who take part in it

    def advertise(self, silos: Iterable[int]) -> AdvertList:
        for silo in silos:
            self.server.receive_advert(self.names[silo], self.relay(self.clients[silo].advertise()))
        return self.relay(self.server.close_adverts())  # type: ignore[no-any-return]

    def share(self, silos: Iterable[int], adverts: AdvertList) -> dict[str, Delivery]:
        for silo in silos:
            self.server.receive_shares(self.names[silo], self.relay(self.clients[silo].share(adverts)))
        return {name: self.relay(one) for name, one in self.server.close_shares().items()}

    def input(self, silos: Iterable[int], deliveries: Mapping[str, Delivery]) -> SurvivorList:
        for silo in silos:
            masked = self.clients[silo].masked(deliveries[self.names[silo]], self.fresh(silo))
            self.server.receive_input(self.names[silo], self.relay(masked))
        return self.relay(self.server.close_inputs())  # type: ignore[no-any-return]

    def sign(self, silos: Iterable[int], survivors: SurvivorList) -> Any:
        for silo in silos:
            self.server.receive_signature(self.names[silo], self.relay(self.clients[silo].sign(survivors)))
        return self.relay(self.server.close_signatures())

    def unmask(self, silos: Iterable[int], request: Any) -> MaskedSum:
        for silo in silos:
            given = self.relay(self.clients[silo].unmask(request))
            self.server.receive_unmasking(self.names[silo], given)
        return self.server.result()

    def run(self, drops: Mapping[int, str] | None = None) -> MaskedSum:
        """The whole round; drops: silo -> the step before whose message it falls silent."""
        left = dict(drops or {})

        def still(step: str, among: Collection[int]) -> list[int]:
            gone = {silo for silo, at in left.items() if STEPS.index(at) <= STEPS.index(step)}
            return sorted(set(among) - gone)

        everybody = range(len(self.clients))
        adverts = self.advertise(still("advertise", everybody))
        deliveries = self.share(still("share", everybody), adverts)
        survivors = self.input(still("input", everybody), deliveries)
        request = self.sign(still("sign", everybody), survivors)
        return self.unmask(still("unmask", everybody), request)

    def upto_input(self) -> dict[str, Delivery]:
        """Everybody shared; what the server then has for each."""
        everybody = range(len(self.clients))
        return self.share(everybody, self.advertise(everybody))

    def upto_unmask(self, dropped: Collection[int] = ()) -> Any:
        """The request to unmask, after all but `dropped` sent their input."""
        everybody = [silo for silo in range(len(self.clients)) if silo not in dropped]
        return self.sign(everybody, self.input(everybody, self.upto_input()))


__all__ = ["HYBRID", "SPECS", "STEPS", "SUITE", "Round", "terms"]
