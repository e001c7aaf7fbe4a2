"""One silo's part of a round: `Client.handle` takes the server's sealed plan and returns a sealed answer.

The client trusts the server with nothing but the schedule: the silo's own policy decides what may leave,
and the ledger is charged before the bytes exist outside this object. It opens no socket, starts no thread,
prints nothing and keeps no global state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError

from securefl.config import Config
from securefl.crypto import envelope
from securefl.crypto.identity import Card, Identity
from securefl.data import Rows
from securefl.errors import (
    MalformedEnvelope,
    PayloadError,
    PolicyRefusal,
    ProtocolError,
    Refused,
    UnknownSender,
    WrongRound,
    WrongRun,
    WrongShape,
)
from securefl.ledger import Ledger
from securefl.local import (
    CentroidJob,
    LocalTraining,
    SiloData,
    derive_seed,
    knowledge_of,
    release_centroids,
    train_locally,
)
from securefl.messages import Dropped, FedKcTerms, Header, Party, RoundPlan, Step
from securefl.methods.fedkc import Knowledge
from securefl.models import Slm
from securefl.policy import Policy
from securefl.privacy import LocalResult, Noise, release_metrics, release_model
from securefl.release import (
    Body,
    PayloadKind,
    Release,
    Tensors,
    canonical_json,
    check_tensors,
    decode,
    encode,
    encode_release,
    fingerprint,
    release_from,
)
from securefl.training import embed, probabilities

log = logging.getLogger(__name__)

ORDER = tuple(Step)
SEED_TEXTS = ("{}", "a text about {}", "news about {}", "the topic is {}", "{}, in short", "more on {}")


class Witness(Protocol):
    """What a simulation watches; an embedded client has none. `evidence` is the truth behind a release."""

    def __call__(
        self, client: str, plan: RoundPlan, kind: PayloadKind, body: bytes, evidence: Mapping[str, Any]
    ) -> None: ...


@dataclass
class Client:
    """One silo. `handle` is the whole interface; everything else is construction and what it saw.

    identity: the silo's private keys. server: the pinned card of the server. roster: cards of the peers by
    name. policy, ledger: the silo's own. slm: its model, trained in place. noise: the source for private
    releases (a seeded one is refused unless the policy says `simulation = true`). base_sha256: hash of the
    checkpoint's files. refusals: every PolicyRefusal, which the server is told nothing about. ignored: peers
    whose centroids were not used, and why.
    """

    identity: Identity
    server: Card
    roster: Mapping[str, Card]
    policy: Policy
    ledger: Ledger
    config: Config
    run: str
    data: SiloData
    slm: Slm
    base_sha256: str
    noise: Noise
    clock: Callable[[], float]
    train: LocalTraining = train_locally
    witness: Witness | None = None
    refusals: list[Refused] = field(default_factory=list)
    ignored: list[Dropped] = field(default_factory=list)
    kept_candidate: bool | None = None

    def __post_init__(self) -> None:
        self._replay = envelope.ReplayGuard()
        self._sequence = 0
        self._place = (0, 0)

    def __repr__(self) -> str:
        return f"Client({self.identity.name})"

    def handle(self, message: bytes) -> bytes:
        """Answer one sealed plan with one sealed envelope.

        Raises ProtocolError for a message that is not a valid plan of the pinned server. Where the policy
        forbids what the plan asks, the answer is a signed "unavailable" that says nothing more; the
        reason is kept in `refusals`.
        """
        plan, body = self._open_plan(message)
        try:
            self.policy.check_plan(plan, self.server.fingerprint, self.base_sha256)
            self._check_agreed(plan)
            return self._answer(plan, body)
        except Refused as refusal:
            self.refusals.append(refusal)
            log.warning("%s: round %d: plan refused by policy", self.identity.name, plan.round)
            return self._seal(
                encode(PayloadKind.UNAVAILABLE, {}, {}), plan, PayloadKind.UNAVAILABLE, [self.server]
            )

    def _check_agreed(self, plan: RoundPlan) -> None:
        """What a plan asks must be what this silo's own configuration says: the server schedules, no more.

        A server that claims fewer rounds would get more of the budget a round, and one that names a smaller
        cohort would choose who reads the centroids.
        """
        config, terms = self.config, plan.fedkc
        asked = {
            "method": (plan.method, config.federation.method),
            "rounds": (plan.rounds, config.federation.rounds),
            "round": (plan.round <= config.federation.rounds, True),
            "epochs": (plan.epochs, config.round_epochs(plan.round)),
            "answer": (plan.answer, self._answer_kind(plan.step)),
            "cohort": (
                sorted((party.name, party.key) for party in plan.cohort),
                sorted((card.name, card.fingerprint) for card in [*self.roster.values(), self.identity.card]),
            ),
            "fedkc": (
                None if terms is None else terms.model_dump(),
                config.fedkc.model_dump(include=set(FedKcTerms.model_fields))
                if config.federation.method == "fedkc"
                else None,
            ),
        }
        for what, (found, agreed) in asked.items():
            if found != agreed:
                raise PolicyRefusal(f"the plan of round {plan.round} asks for another {what} than was agreed")

    def _answer_kind(self, step: Step) -> PayloadKind:
        if step is Step.TRAIN:
            return PayloadKind.MODEL
        if step is Step.SHARE:
            layered = self.config.fedkc.compose == "embeddings"
            return PayloadKind.EMBEDDING_CENTROIDS if layered else PayloadKind.CENTROIDS
        return PayloadKind.METRICS

    def _open_plan(self, message: bytes) -> tuple[RoundPlan, Body]:
        verified = envelope.verify(message, {self.server.name: self.server})
        header = verified.header
        if header.kind is not PayloadKind.PLAN:
            raise MalformedEnvelope(f"the server sent {header.kind} where a plan was due")
        if header.run != self.run:
            raise WrongRun(f"{self.identity.name} takes no part in run {header.run}")
        body = decode(envelope.open_(verified, self.identity))
        if body.kind is not PayloadKind.PLAN:
            raise PayloadError(f"the server sent {body.kind.value} in an envelope marked as a plan")
        try:
            plan = RoundPlan.model_validate_json(canonical_json(body.document))
        except ValidationError as error:
            field = ".".join(str(part) for part in error.errors()[0]["loc"]) or "document"
            raise PayloadError(f"the server's plan is malformed (field {field[:60]})") from error
        place = (plan.round, ORDER.index(plan.step))
        if (plan.run, plan.round, plan.step) != (header.run, header.round, header.step):
            raise WrongRound("the plan inside an envelope is for another run, round or step than its header")
        self._replay.check(header)
        if place <= self._place:
            raise WrongRound(f"a plan for round {plan.round} came after that round was answered")
        self._replay.accept(header)
        self._place = place
        return plan, body

    def _answer(self, plan: RoundPlan, body: Body) -> bytes:
        if plan.model is not None:
            received = {name: array for name, array in body.tensors.items() if not name.startswith("relay/")}
            check_tensors(received, self.slm.shapes(), "the server's model")
            if fingerprint(received) != plan.model:
                raise WrongShape("the model that came with a plan is not the one that the plan names")
            if plan.step is not Step.CANDIDATE:
                self.slm.load_state(received)
        match plan.step:
            case Step.SHARE:
                return self._share(plan)
            case Step.TRAIN:
                return self._train(plan, body)
            case Step.CANDIDATE:
                return self._consider(plan, received if plan.model is not None else None)
            case Step.FINISH:
                return self._finish(plan)

    # --- the steps

    def _info(self, plan: RoundPlan) -> dict[str, Any]:
        return {
            "round": plan.round,
            "step": plan.step.value,
            "base": self.slm.name,
            "base_sha256": self.base_sha256,
            "max_length": self.slm.max_length,
            "labels": list(self.slm.labels),
        }

    def _share(self, plan: RoundPlan) -> bytes:
        if plan.fedkc is None:
            raise MalformedEnvelope("a plan to share knowledge does not say how")
        peers = [self._peer(party) for party in plan.cohort if party.name != self.identity.name]
        release, clusters = self._centroids(plan, plan.fedkc)
        return self._release(release, plan, peers, {"clusters": clusters})

    def _peer(self, party: Party) -> Card:
        """The pinned card of a peer that a plan names; never one that the plan brought."""
        card = self.roster.get(party.name)
        if card is None or card.fingerprint != party.key:
            raise UnknownSender(f"the plan names {party.name} with a key that is not in this silo's roster")
        return card

    def _centroids(self, plan: RoundPlan, terms: FedKcTerms) -> tuple[Release, list[list[str]]]:
        info = {**self._info(plan), "encoder": fingerprint(self.slm.state()), "compose": terms.compose}
        seed = derive_seed(self.config.federation.seed, self.identity.name, plan.round, "kmeans")
        # Rounds after the first share once each: the budget of the run is theirs together.
        job = CentroidJob(terms, self.config.privacy.centroids, plan.rounds - 1, seed, self.noise)
        return release_centroids(self.slm, self.data.train, job, info)

    def _train(self, plan: RoundPlan, body: Body) -> bytes:
        knowledge = self._knowledge(plan, body)
        seed = derive_seed(self.config.federation.seed, self.identity.name, plan.round, "train")
        self.train(self.slm, self.data.train, self.config, plan.epochs, seed, knowledge)
        result = LocalResult(self.slm.state(), len(self.data.train))
        return self._release(release_model(result, self._info(plan)), plan, [self.server], {})

    def _knowledge(self, plan: RoundPlan, body: Body) -> list[Knowledge]:
        """The peers' centroids that the server relayed; each is checked as if it came alone.

        What does not hold is not used and noted in `ignored`: one bad peer must not silence the others.
        """
        terms = plan.fedkc
        if terms is None or plan.round == 1:
            return []
        if terms.source == "own":
            release, _ = self._centroids(plan, terms)
            return [knowledge_of(release)]
        found = []
        if len(set(plan.relayed)) != len(plan.relayed):
            raise PayloadError("the server relayed one silo's centroids twice")
        for name in plan.relayed:
            sealed = body.tensors.get(f"relay/{name}")
            if sealed is None or sealed.dtype != np.uint8:
                raise PayloadError("a plan names relayed centroids that did not come with it")
            try:
                found.append(self._relayed_knowledge(sealed.tobytes(), plan, name))
            except ProtocolError as error:
                log.warning("%s: round %d: centroids of %s ignored", self.identity.name, plan.round, name)
                self.ignored.append(
                    Dropped(name=name, step=Step.SHARE.value, error=type(error).__name__, reason=str(error))
                )
        return found

    def _relayed_knowledge(self, sealed: bytes, plan: RoundPlan, name: str) -> Knowledge:
        verified = envelope.verify(sealed, self.roster)
        header = verified.header
        if header.sender.name != name or name == self.identity.name:
            raise UnknownSender(f"centroids relayed as those of {name} are signed by another silo")
        if (header.run, header.round, header.step) != (plan.run, plan.round, Step.SHARE.value):
            raise WrongRound(f"centroids of {name} were relayed from another run, round or step")
        release = release_from(decode(envelope.open_(verified, self.identity)))
        return self._checked_knowledge(release, plan, name, header)

    def _checked_knowledge(self, release: Release, plan: RoundPlan, name: str, header: Header) -> Knowledge:
        terms = plan.fedkc
        layered = terms is not None and terms.compose == "embeddings"
        due = PayloadKind.EMBEDDING_CENTROIDS if layered else PayloadKind.CENTROIDS
        q = (*release.tensors.get("sizes", np.zeros(0)).shape, 0)[0]
        if terms is None or q > terms.clusters:
            raise WrongShape(f"{name} sent {q} centroids, more than were agreed")
        if release.kind is not due or header.kind is not due:
            raise WrongShape(f"{name} sent {release.kind} where {due} were agreed")
        middle = (self.slm.max_length,) if layered else ()
        # The embedding layer of some architectures is narrower than the encoder.
        width = embed(self.slm, ["x"], "embeddings")[0].shape[-1] if layered else self.slm.width
        expected: dict[str, tuple[int, ...]] = {
            "centroids": (q, *middle, width),
            "predictions": (q, len(self.slm.labels)),
            "sizes": (q,),
        }
        if layered:
            expected["mask"] = (q, *middle)
        check_tensors(release.tensors, expected, name)
        votes = release.tensors["predictions"]
        if q and (votes.min() < -1e-4 or np.abs(votes.sum(axis=1) - 1).max() > 1e-3):
            raise PayloadError(f"the mean predictions of {name} are not probabilities")
        if q and release.tensors["sizes"].min() <= 0:
            raise PayloadError(f"{name} sent a centroid of no rows")
        if layered and not np.isin(release.tensors["mask"], (0, 1)).all():
            raise PayloadError(f"{name} sent a mask that is not 0 or 1")
        if release.info.get("encoder") != plan.model:
            raise WrongShape(f"the centroids of {name} were made with another model than this round's")
        return knowledge_of(release)

    def _consider(self, plan: RoundPlan, candidate: Tensors | None) -> bytes:
        """Keep the candidate or one's own model, whichever is better on rows kept from training."""
        before = self._accuracy(self.data.validation)
        own = self.slm.state()
        self.kept_candidate = False
        if candidate is not None:
            self.slm.load_state(candidate)
            self.kept_candidate = self._accuracy(self.data.validation) >= before
            if not self.kept_candidate:
                self.slm.load_state(own)
        metrics = {"kept": self.kept_candidate}
        return self._release(release_metrics(metrics, self._info(plan)), plan, [self.server], {})

    def _finish(self, plan: RoundPlan) -> bytes:
        rows = self.data.validation
        metrics = {"validation_accuracy": self._accuracy(rows), "validation_rows": len(rows)}
        return self._release(release_metrics(metrics, self._info(plan)), plan, [self.server], {})

    def _accuracy(self, rows: Rows) -> float:
        return float((probabilities(self.slm, rows.texts).argmax(axis=1) == rows.labels).mean())

    # --- what leaves

    def _release(
        self, release: Release, plan: RoundPlan, recipients: Sequence[Card], evidence: Mapping[str, Any]
    ) -> bytes:
        """Policy, then seal, then ledger, then out: the bytes are charged before anyone can have them."""
        if not recipients:
            raise PolicyRefusal("no peer takes part, so there is nobody to release to")
        body = encode_release(release)
        parties = [Party(name=card.name, key=card.fingerprint) for card in recipients]
        self.policy.check_release(release, parties, len(body))
        self.policy.check_budget(self.ledger.account_with(release.claim))
        sealed = self._seal(body, plan, release.kind, recipients)
        self.ledger.append(
            run=self.run,
            round=plan.round,
            step=plan.step.value,
            kind=release.kind,
            recipients=parties,
            protection="sealed" if recipients[0] is self.server else "peer",
            envelope=sealed,
            body=body,
            claim=release.claim,
        )
        if self.witness is not None:
            self.witness(self.identity.name, plan, release.kind, body, evidence)
        return sealed

    def _seal(self, body: bytes, plan: RoundPlan, kind: PayloadKind, recipients: Sequence[Card]) -> bytes:
        self._sequence += 1
        header = Header(
            run=self.run,
            round=plan.round,
            step=plan.step.value,
            sender=Party(name=self.identity.name, key=self.identity.card.fingerprint),
            recipients=tuple(Party(name=card.name, key=card.fingerprint) for card in recipients),
            kind=kind,
            sequence=self._sequence,
            time=int(self.clock()),
        )
        return envelope.seal(body, header, self.identity, recipients)
