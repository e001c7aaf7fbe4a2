"""A sealed plan, verified and opened for one silo: only what the pinned server signed is believed.

Sizes before allocation, signatures before decryption, decryption before parsing, and no look at any row.
Whether the plan may be answered is for `client` to decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from securefl.agreement import brings_sum, ckks_terms, plan_hash, sum_terms
from securefl.config import Config
from securefl.crypto import envelope
from securefl.crypto.ckks_terms import Terms
from securefl.crypto.identity import Card, Identity
from securefl.errors import MalformedEnvelope, WrongRound, WrongRun
from securefl.exchange import Asked
from securefl.messages import parse_plan
from securefl.release import PayloadKind, decode
from securefl.slm import Slm
from securefl.steps import weights_of


@dataclass(frozen=True, repr=False)
class Opening:
    """Who opens a plan, of whom, and for what. peers: how many other silos there are. floor: the oldest
    version of envelopes that is read.
    """

    identity: Identity
    server: Card
    run: str
    config: Config
    dataset: str
    base_sha256: str
    slm: Slm
    peers: int
    floor: int


def _values(slm: Slm) -> int:
    return sum(math.prod(shape) for shape in slm.shapes().values())


def _encrypted(opening: Opening) -> Terms | None:
    """The terms of the run's encrypted sums, of which the silo's own configuration is the source."""
    silos = opening.peers + 1
    sums = sum_terms(opening.config, silos)
    if sums is None or opening.config.protection.models != "ckks":
        return None
    return ckks_terms(sums, _values(opening.slm), silos)


def plan_limits(opening: Opening) -> envelope.Limits:
    """The largest plan of a run: the model, and centroids of every peer. More is refused unread."""
    terms, slm = opening.config.fedkc, opening.slm
    model, encrypted = 4 * _values(slm), _encrypted(opening)
    if encrypted is not None:
        model = max(model, encrypted.ciphertexts * (encrypted.parameters.max_ciphertext + 4))
    positions = slm.max_length if terms.layer is not None else 1
    centroids = 4 * terms.clusters * (positions * 2 * slm.width + len(slm.labels) + 2)
    room = 2**22 + model + opening.peers * (2**20 + centroids)
    return envelope.Limits(max_body=min(room, envelope.DEFAULT_LIMITS.max_body))


def open_plan(message: bytes, opening: Opening) -> Asked:
    """The plan in a sealed message. Raises a ProtocolError for anything but a plan of this server and run."""
    server, identity, config = opening.server, opening.identity, opening.config
    verified = envelope.verify(message, {server.name: server}, plan_limits(opening), opening.floor)
    header = verified.header
    if header.kind is not PayloadKind.PLAN:
        raise MalformedEnvelope(f"the server sent {header.kind} where a plan was due")
    if header.run != opening.run:
        raise WrongRun(f"{identity.name} takes no part in run {header.run}")
    opened = envelope.open_(verified, identity)
    body = decode(opened)
    plan = parse_plan(body)
    if (plan.run, plan.round, plan.step) != (header.run, header.round, header.step):
        raise WrongRound("the plan inside an envelope is for another run, round or step than its header")
    if plan.round > config.federation.rounds:
        # Not a refusal, which takes a line of the ledger: a server could ask for a million of them.
        raise WrongRound(f"round {plan.round} is beyond the {config.federation.rounds} of this run")
    encrypted, summed = _encrypted(opening), brings_sum(plan.round, plan.step, config)
    return Asked(
        plan=plan,
        server=header.sender.key,
        tensors=body.tensors,
        weights=weights_of(plan, body.tensors, opening.slm, encrypted if summed else None),
        verified=verified,
        sequence=header.sequence,
        hash=plan_hash(opened, config, opening.dataset, opening.base_sha256),
        message=message,
    )
