"""One silo's part of a round: `Client.handle` takes the server's sealed plan and returns a sealed answer.

The client trusts the server with nothing but the schedule: the silo's own policy decides what may leave, and
the ledger is charged before the bytes exist outside this object. The ledger is also its memory: what was
answered is never answered differently, and after a crash the very same bytes go out again. It opens no
socket, starts no thread, prints nothing and keeps no global state.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from securefl.account import Account
from securefl.agreement import check_agreed, steps_of_round
from securefl.config import AVERAGING, Config
from securefl.contribution import Contributor, Member
from securefl.crypto import envelope
from securefl.crypto.identity import Card, Identity
from securefl.dp_terms import round_claim, run_claim
from securefl.errors import (
    AwaitingApproval,
    Cancelled,
    PolicyRefusal,
    Refused,
    Replayed,
    SecureflError,
    UnknownSender,
    UsageError,
    WrongRound,
)
from securefl.exchange import Asked, Preview, Standing, Witness
from securefl.ledger import Ledger, ReleaseEntry
from securefl.local import LocalTraining, SiloData, train_locally
from securefl.messages import MASKING_STEPS, Dropped, Header, Party, RoundPlan, Step
from securefl.model_card import silo_card
from securefl.opening import Opening, open_plan
from securefl.participation import cohort, first_round
from securefl.policy import DAY, Policy
from securefl.privacy import Noise
from securefl.relayed import Reader
from securefl.release import (
    PayloadKind,
    Release,
    check_tensors,
    decode,
    encode,
    encode_release,
)
from securefl.slm import Slm
from securefl.state import StateFolder
from securefl.steps import Bench, Done

log = logging.getLogger(__name__)

ORDER = tuple(Step)
_KEPT = 256  # refusals and ignored peers kept in memory; all refusals are in the ledger
_UNAVAILABLE = encode(PayloadKind.UNAVAILABLE, {}, {})


@dataclass
class Client:
    """One silo. `handle` is the whole interface; everything else is construction and what it saw.

    identity: the silo's private keys. server: the pinned card of the server. roster: cards of the peers by
    name. policy, ledger: the silo's own. state: its folder for answers on their way; without one a crash
    loses them (a simulation). slm: its model, trained in place. base_sha256: hash of the checkpoint's files.
    dataset: what the rows are called in policy and ledger. noise: the source for private releases (a seeded
    one is refused unless the policy says `simulation = true`). cancelled: asked between training steps; True
    ends `handle` with Cancelled, and nothing has happened. standing: asked at every plan, so that a policy
    that was changed or a key that was revoked counts at once; without it, those given stand.

    refusals: the last PolicyRefusals, of which the server is told nothing. ignored: peers whose centroids
    were not used lately, and why.

    Memory: a few times the largest of plan, model and answer; plans above what the run needs are refused
    unread. Threads may share a client; they take turns.
    """

    identity: Identity
    server: Card
    roster: Mapping[str, Card]
    policy: Policy
    ledger: Ledger
    config: Config
    run: str
    data: SiloData
    dataset: str
    slm: Slm
    base_sha256: str
    noise: Noise
    clock: Callable[[], float]
    state: StateFolder | None = None
    cancelled: Callable[[], bool] | None = None
    standing: Callable[[], Standing] | None = None
    train: LocalTraining = train_locally
    witness: Witness | None = None
    refusals: deque[Refused] = field(default_factory=lambda: deque(maxlen=_KEPT))
    ignored: deque[Dropped] = field(default_factory=lambda: deque(maxlen=_KEPT))
    kept_candidate: bool | None = None

    def __post_init__(self) -> None:
        self._turn = threading.Lock()
        self._process = os.getpid()
        self._after: str | None = None  # the answer that the model in memory belongs to
        self._contributor = Contributor()
        self._seen: dict[str, tuple[int, str]] = {}  # of peers' centroids
        self._settle()
        self._recall()

    def _settle(self) -> None:
        """Take the policy and cards as they stand now."""
        if os.getpid() != self._process:
            raise UsageError("a client was carried into another process by a fork; open one there")
        if self.standing is not None:
            now = self.standing()
            self.policy, self.server, self.roster = now.policy, now.server, now.roster
        self._floor = self.policy.min_envelope_version or envelope.VERSION
        if self.policy.name != self.identity.name:
            raise UsageError(f"the policy is that of {self.policy.name}, the keys are {self.identity.name}'s")
        if self.policy.approval == "manual" and self.state is None:
            raise UsageError("a policy with manual approval needs a state folder, where plans can wait")

    def __repr__(self) -> str:
        return f"Client({self.identity.name})"

    # --- the interface

    def handle(self, message: bytes) -> bytes:
        """Answer one sealed plan with one sealed envelope; the same plan again, with the same bytes.

        Where the policy forbids what the plan asks, or where it cannot be computed, the answer is a signed
        "unavailable" that says nothing more; the reason is in `refusals` and in the ledger. Raises
        ProtocolError for a message that is not a valid plan of the pinned server, AwaitingApproval for one
        that an owner has to approve first (ask again with the same bytes), Cancelled where `cancelled` said
        so, PolicyRefusal where the policy has changed since an old answer that is asked for once more,
        UsageError where policy, cards, ledger or state cannot be read or written. An exception means that
        nothing has left; the plan may be handed in again.
        """
        with self._turn:
            self._settle()
            self.ledger.refresh()
            self._contributor.expire(self._now(), self.config.protection.patience)
            self._recall()
            asked = self._open(message)
            answered = self._answered(asked)
            if answered is not None:
                return answered
            before = self.slm.state()
            try:
                try:
                    self._permit(asked)
                    return self._commit(asked, self._compute(asked))
                except AwaitingApproval:
                    assert self.state is not None
                    self.state.pend(asked.hash, asked.message)
                    raise
                except Refused as refusal:
                    self.slm.load_state(before)
                    self._contributor.forget()
                    return self._refuse(asked, refusal)
            except BaseException as error:
                # Where the answer was charged all the same, `_recall` finds its model again.
                self.slm.load_state(before)
                if not isinstance(error, AwaitingApproval | Cancelled):
                    self._contributor.forget()
                raise

    def preview(self, message: bytes) -> Preview:
        """What `handle` would send for this plan: computed, but not charged, sealed, sent or remembered.

        Raises ProtocolError as `handle` does. Noise, where there is any, is another draw than the one that
        will leave.
        """
        with self._turn:
            self._settle()
            asked = self._open(message)
            plan = asked.plan
            answer = self.ledger.answer_at(plan.run, plan.round, plan.step.value)
            if answer is None or answer.plan != asked.hash:
                self._answered(asked)  # raises for what comes too late
            found: dict[str, Any] = {"recipients": (), "release": None, "body": None, "account": None}
            refusals: list[Refused] = [
                _bare(one)
                for one in self.policy.plan_refusals(
                    plan, self.server.fingerprint, self.base_sha256, self.dataset
                )
            ]
            before = self.slm.state()
            try:
                try:
                    self._permit(asked)
                except AwaitingApproval as waits:
                    refusals.append(_bare(waits))
                done = self._compute(asked, preview=True)
                recipients, body = self._recipients(asked), encode_release(done.release)
                found.update(recipients=_parties(recipients), release=done.release, body=body)
                found["account"] = self._check(done.release, recipients, body)
                self._check_day(len(body))
            except Refused as refusal:
                if not refusals:
                    refusals.append(_bare(refusal))
            finally:
                self.slm.load_state(before)
        return Preview(plan=plan, hash=asked.hash, answered=answer, refusals=tuple(refusals), **found)

    def save_model(self, folder: Path | str) -> None:
        """Write the model as it is now as a Hugging Face folder with a card.

        After the last step of an averaging method that is the average, which the plan brought. Raises
        ModelError where the folder is there and is none of this package.
        """
        with self._turn:
            account = self.ledger.account(self.dataset)
            training = run_claim(self.config, self.config.federation.rounds, self.noise)
            card = silo_card(
                self.slm, self.identity.name, self.config.federation.method, self.run, account, training
            )
            self.slm.save(Path(folder), card)

    def abandon(self) -> None:
        """Forget the secrets of a masked round whose server is silent; the silo takes part in the next one.

        Happens by itself when a plan comes after `protection.patience`; a program that knows sooner, or wants
        the secrets out of memory, calls it.
        """
        with self._turn:
            self._contributor.forget()

    def close(self) -> None:
        """Let another process have the state folder, and forget the masked round."""
        self.abandon()
        if self.state is not None:
            self.state.close()

    # --- what came

    def _open(self, message: bytes) -> Asked:
        return open_plan(
            message,
            Opening(
                identity=self.identity,
                server=self.server,
                run=self.run,
                config=self.config,
                dataset=self.dataset,
                base_sha256=self.base_sha256,
                slm=self.slm,
                peers=len(self.roster),
                floor=self._floor,
            ),
        )

    def _answered(self, asked: Asked) -> bytes | None:
        """The bytes that answered this plan before, if any did. Raises for what comes too late."""
        plan = asked.plan
        answer = self.ledger.answer_at(plan.run, plan.round, plan.step.value)
        if answer is not None:
            if answer.plan != asked.hash:
                raise WrongRound(f"another plan for round {plan.round}, {plan.step}, was answered before")
            kept = self.state and self.state.answer(answer.envelope_sha256)
            if not kept:
                raise Replayed(f"the plan of round {plan.round}, {plan.step}, was answered before")
            sealed, terms = kept
            if isinstance(answer, ReleaseEntry):
                self._permit_again(asked, answer, terms)
            else:
                self.refusals.append(PolicyRefusal(answer.reason, answer.clause))
            log.info("%s: round %d: sent the same answer again", self.identity.name, plan.round)
            return sealed
        last = self.ledger.last_answer(plan.run)
        if last is not None:
            if asked.sequence <= last.plan_sequence:
                raise Replayed(
                    f"the server sent sequence {asked.sequence} after {last.plan_sequence} was answered"
                )
            if (plan.round, ORDER.index(plan.step)) <= (last.round, ORDER.index(Step(last.step))):
                raise WrongRound(f"a plan for round {plan.round} came after a later one was answered")
        return None

    def _permit_again(self, asked: Asked, answer: ReleaseEntry, terms: str) -> None:
        """An old answer may never have arrived: to send it now is to release it now."""
        self.policy.check_running()
        if terms != self.policy.fingerprint:
            raise PolicyRefusal("the policy was changed since this plan was answered", "policy")
        if answer.recipients != _parties(self._recipients(asked)):
            raise PolicyRefusal("this plan was answered to other keys than those trusted now", "policy")

    # --- whether it may be answered

    def _permit(self, asked: Asked) -> None:
        plan = asked.plan
        self.policy.check_plan(plan, self.server.fingerprint, self.base_sha256, self.dataset)
        names = (*self.roster, self.identity.name)
        begins = first_round(self.config, names, self.run, self.identity.name) or 1
        if self.config.federation.method not in AVERAGING:
            begins = 1
        first = (plan.round, [plan.step]) == (begins, steps_of_round(begins, self.config)[:1])
        if self.ledger.interrupted(plan.run, first=first):
            raise PolicyRefusal(
                f"the ledger was restored from a copy within run {plan.run}: what was answered since is not "
                "known; take part in a new run",
                "ledger",
            )
        check_agreed(plan, self.config, self._cohort(plan))
        training = round_claim(self.config, plan.round, self.noise) if plan.step is Step.TRAIN else None
        if training is not None:  # before hours of training for what may not leave
            self.policy.check_noise(training)
            self.policy.check_budget(self.dataset, self.ledger.account_with(self.dataset, training))
        # What no row has a part in needs no owner: a masked round asks for its one approval to train.
        bound = plan.step in (Step.KEY, *MASKING_STEPS)
        if self.policy.approval == "manual" and not (bound or self.ledger.is_approved(asked.hash)):
            raise AwaitingApproval(
                f"the plan of round {plan.round}, {plan.step}, waits for its owner: securefl approve "
                f"{asked.hash}",
                asked.hash,
            )

    def _cohort(self, plan: RoundPlan) -> tuple[Party, ...]:
        """Who takes part in a step, by this silo's own configuration; PolicyRefusal where it does not."""
        cards = {**self.roster, self.identity.name: self.identity.card}
        if self.config.federation.method not in AVERAGING:
            return _parties(list(cards.values()))
        chosen = cohort(self.config, cards, self.run, plan.round, plan.step)
        if self.identity.name not in chosen:
            raise PolicyRefusal(
                f"the plan asks {self.identity.name} in round {plan.round}, in which it takes no part",
                "agreed.cohort",
            )
        return _parties([cards[name] for name in chosen])

    def _refuse(self, asked: Asked, refusal: Refused) -> bytes:
        self.refusals.append(_bare(refusal))
        log.warning(
            "%s: round %d: plan refused by policy (%s)",
            self.identity.name,
            asked.plan.round,
            refusal.clause,
        )
        sealed = self._seal(_UNAVAILABLE, asked.plan, PayloadKind.UNAVAILABLE, [self.server])
        kept = self._keep(sealed)
        self.ledger.append_refusal(
            run=self.run,
            round=asked.plan.round,
            step=asked.plan.step.value,
            plan=asked.hash,
            plan_sequence=asked.sequence,
            clause=refusal.clause,
            reason=str(refusal)[:400],
            envelope=sealed,
        )
        if self.state is not None:
            self.state.tidy(kept)
        self._after = kept
        return sealed

    # --- what the answer is

    def _stop(self) -> bool:
        return self.policy.stopped() or (self.cancelled is not None and self.cancelled())

    def _compute(self, asked: Asked, preview: bool = False) -> Done:
        """What answers a plan; to preview it, without a change to the masked round.

        Whether it can be computed may tell something of the rows: weights can be made to overflow on rows
        with a certain word. So every failure is a refusal, which uses the step up and stands in the ledger;
        an exception would let the server ask again and again.
        """
        plan = asked.plan
        bench = Bench(
            name=self.identity.name,
            config=self.config,
            data=self.data,
            slm=self.slm,
            base_sha256=self.base_sha256,
            noise=self.noise,
            train=self.train,
            stop=self._stop,
            reader=Reader(self.identity, self.roster, self.slm, self._floor, self._seen),
            head=self._head(),
        )
        try:
            done = self._contributor.carry_out(asked, bench, self._member(), preview)
        except Cancelled:
            self.policy.check_running()  # the kill switch is a refusal, which the server gets an answer to
            raise
        except Refused:
            raise
        except Exception as error:
            # The text of an error that is not ours may quote a row.
            why = str(error) if isinstance(error, SecureflError) else type(error).__name__
            raise PolicyRefusal(f"round {plan.round}, {plan.step}: {why}", "computation") from None
        for peer in done.ignored:
            log.warning("%s: round %d: centroids of %s ignored", self.identity.name, plan.round, peer.name)
        return done

    def _head(self) -> dict[str, Any]:
        """The head that this silo keeps to itself, once it has trained it; else nothing."""
        rounds = range(1, self.config.federation.rounds + 1)
        answers = (self.ledger.answer_at(self.run, number, Step.TRAIN.value) for number in rounds)
        if not self._keeps_head or not any(isinstance(one, ReleaseEntry) for one in answers):
            return {}
        own = self.slm.state()
        return {name: own[name] for name in self.slm.head_names()}

    def _member(self) -> Member:
        return Member(
            identity=self.identity,
            roster=self.roster,
            shapes=self.slm.shapes(),
            least_threshold=self.policy.min_threshold or 0,
            least_cohort=self.policy.min_cohort or 0,
            floor=self._floor,
        )

    def _recipients(self, asked: Asked) -> list[Card]:
        """The cards, as they are pinned now, that an answer is sealed to."""
        plan = asked.plan
        if plan.step is Step.KEY:  # its maker too, who has it from there after a restart
            return [*self.roster.values(), self.identity.card]
        if plan.step is not Step.SHARE:
            if self.server.fingerprint != asked.server:
                raise UnknownSender(f"the card of {self.server.name} is another than the plan's by now")
            return [self.server]
        peers = [self._peer(party) for party in plan.cohort if party.name != self.identity.name]
        if not peers:
            raise PolicyRefusal("no peer takes part, so there is nobody to release to", "peers")
        return peers

    def _peer(self, party: Party) -> Card:
        """The pinned card of a peer that a plan names; never one that the plan brought."""
        card = self.roster.get(party.name)
        if card is None or card.fingerprint != party.key:
            raise UnknownSender(f"the plan names {party.name} with a key that is not in this silo's roster")
        return card

    # --- what leaves

    def _check(self, release: Release, recipients: Sequence[Card], body: bytes) -> Account:
        """Raises Refused where the policy forbids the release; else the account with it."""
        self.policy.check_release(release, _parties(recipients), len(body))
        account = self.ledger.account_with(self.dataset, release.claim)
        self.policy.check_budget(self.dataset, account)
        return account

    def _now(self) -> float:
        now = float(self.clock())
        if not 0 <= now < 2**53:  # NaN, too, is neither
            raise UsageError("the clock gives no time since 1970 in seconds; set it right")
        return now

    def _check_day(self, size: int) -> None:
        self.policy.check_day(self.ledger.bytes_since(self._now() - DAY) + size)

    def _commit(self, asked: Asked, done: Done) -> bytes:
        """Policy, then seal, then keep, then ledger, then out: charged before anyone can have the bytes."""
        plan, release = asked.plan, done.release
        body = encode_release(release)
        # A training may have taken hours: what the silo's people decided meanwhile counts.
        self._settle()
        try:
            self._permit(asked)
        except AwaitingApproval:
            if plan.protection != "masked":
                raise
            # The masks of the round are used up: there would be nothing left to approve.
            raise PolicyRefusal("the policy asks for an approval since this was masked", "approval") from None
        recipients = self._recipients(asked)
        self._check(release, recipients, body)
        sealed = self._seal(body, plan, release.kind, recipients)
        kept = self._keep(sealed)

        def permit(account: Account) -> None:
            # Under the ledger's lock: what another process has just charged counts too.
            self.policy.check_budget(self.dataset, account)
            self._check_day(len(sealed))

        self.ledger.append(
            run=self.run,
            round=plan.round,
            step=plan.step.value,
            plan=asked.hash,
            plan_sequence=asked.sequence,
            kind=release.kind,
            recipients=_parties(recipients),
            protection=_protection(plan),
            envelope=sealed,
            body=body,
            dataset=self.dataset,
            claim=release.claim,
            permit=permit,
        )
        self.ignored.extend(done.ignored)
        if done.kept_candidate is not None:
            self.kept_candidate = done.kept_candidate
        if self.witness is not None:
            self.witness(self.identity.name, plan, release.kind, body, done.evidence)
            if done.opened is not None:
                opened = encode_release(done.opened)
                self.witness(self.identity.name, plan, done.opened.kind, opened, {})
        if self.state is not None:
            self.state.tidy(kept)
        self._after = kept
        return sealed

    def _seal(self, body: bytes, plan: RoundPlan, kind: PayloadKind, recipients: Sequence[Card]) -> bytes:
        header = Header(
            run=self.run,
            round=plan.round,
            step=plan.step.value,
            sender=_party(self.identity.card),
            recipients=_parties(recipients),
            kind=kind,
            sequence=self.ledger.next_sequence,
            time=int(self._now()),
        )
        return envelope.seal(body, header, self.identity, recipients)

    # --- what a restart finds

    @property
    def _keeps_head(self) -> bool:
        """Whether the head of the silo's model stays with it."""
        return self.identity.name in self.config.federation.local_head

    @property
    def _own_model(self) -> bool:
        """Whether the silo goes on from weights of its own, which no plan brings again."""
        return self.config.federation.method not in AVERAGING or self._keeps_head

    def _keep(self, sealed: bytes) -> str:
        """Write what a crash must not take, before the charge; gives the SHA-256 that it is kept under."""
        if self.state is None:
            return hashlib.sha256(sealed).hexdigest()
        answer = self.state.keep_answer(sealed, self.policy.fingerprint)
        if self._own_model:
            self.state.keep_model(answer, encode(PayloadKind.MODEL, {}, self.slm.state()))
        return answer

    def _recall(self) -> None:
        """Go on from the model that belongs to the last answer, if that is not the one in memory."""
        last = self.ledger.last_answer(self.run)
        due = None if last is None else last.envelope_sha256
        if due in (None, self._after) or not self._own_model:
            return
        assert last is not None
        kept = self.state and self.state.model(last.envelope_sha256)
        if not kept:
            raise UsageError(
                f"the model of {self.identity.name} after round {last.round} is missing from its state "
                "folder; restore the folder, or take part in a new run"
            )
        tensors = decode(kept).tensors
        check_tensors(tensors, self.slm.shapes(), "the state folder's model")
        self.slm.load_state(tensors)
        self._after = due


def _bare(refusal: Refused) -> Refused:
    """A refusal without its way here, whose frames hold models, messages and secrets of a round."""
    refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
    return refusal


def _protection(plan: RoundPlan) -> str:
    """How an answer is protected on its way, as the ledger names it."""
    if plan.step in (Step.SHARE, Step.KEY):
        return "peer"
    return plan.protection if plan.step is Step.TRAIN or plan.step in MASKING_STEPS else "sealed"


def _party(card: Card) -> Party:
    return Party(name=card.name, key=card.fingerprint)


def _parties(cards: Sequence[Card]) -> tuple[Party, ...]:
    return tuple(_party(card) for card in cards)
