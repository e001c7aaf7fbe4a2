"""What goes into a client and what comes out beside its answers: its people's decisions, plans, previews."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from securefl.account import Account
from securefl.crypto.envelope import Verified
from securefl.crypto.identity import Card
from securefl.errors import Refused
from securefl.ledger import RefusalEntry, ReleaseEntry
from securefl.messages import Party, RoundPlan
from securefl.policy import Policy
from securefl.release import PayloadKind, Release, Tensors


class Witness(Protocol):
    """What a simulation watches; an embedded client has none. `evidence` is the truth behind a release."""

    def __call__(
        self, client: str, plan: RoundPlan, kind: PayloadKind, body: bytes, evidence: Mapping[str, Any]
    ) -> None: ...


@dataclass(frozen=True)
class Standing:
    """What the silo's own people decide: the policy, and the pinned cards of the server and the peers."""

    policy: Policy
    server: Card
    roster: Mapping[str, Card]


@dataclass(frozen=True, repr=False)
class Asked:
    """A plan that was verified and opened. server: fingerprint of who signed it. weights: those among the
    tensors, if any (under CKKS their encrypted sum). verified: the envelope that it came in. hash: what an
    owner approves and the ledger records.
    """

    plan: RoundPlan
    server: str
    tensors: Tensors
    weights: Tensors | None
    sequence: int
    hash: str
    message: bytes
    verified: Verified


@dataclass(frozen=True, repr=False)
class Preview:
    """What would answer a plan, before anything of it happened.

    answered: how this very plan was answered before, if it was; the same bytes would go out again, and what
    is shown would leave otherwise. release, body: None where the policy refuses the plan before anything is
    computed. refusals: everything that the policy says against it. account: of the data set after it, where
    it could be charged.
    """

    plan: RoundPlan
    hash: str
    recipients: tuple[Party, ...]
    release: Release | None
    body: bytes | None
    account: Account | None
    answered: ReleaseEntry | RefusalEntry | None
    refusals: tuple[Refused, ...]
