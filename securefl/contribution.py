"""How a silo's model joins the sum of its cohort so that nobody sees it alone: behind masks, or under CKKS.

Between `steps`, which computes the model, and `client`, which lets something leave: everything here ends in a
`Release`, or opens a sum for this silo. The protocols are `crypto.masking_client` and `crypto.ckks`; what
was agreed about them is in `agreement`. No files, no ledger, no training.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.agreement import (
    RELAYED,
    SEALED_KEY,
    UPDATE,
    WEIGHT,
    brings_sum,
    ckks_terms,
    fixed_points,
    key_maker,
    masked_terms,
    mechanism_of,
    summed_claim,
    weighs_rows,
)
from securefl.crypto import envelope
from securefl.crypto.ckks import (
    GroupKey,
    Signed,
    chunk_tensors,
    decrypt_sum,
    encrypt,
    group_key_release,
    open_group_key,
)
from securefl.crypto.identity import Card, Identity
from securefl.crypto.masking_client import MaskingClient
from securefl.crypto.masking_messages import AdvertList, Delivery, Message, SurvivorList, UnmaskRequest
from securefl.crypto.weighted import encode_weighted
from securefl.distributed_noise import claim as claim_of
from securefl.distributed_noise import encode_noised
from securefl.dp_terms import round_claim
from securefl.errors import (
    MaskingAborted,
    NonFiniteUpdate,
    PayloadError,
    PolicyRefusal,
    UsageError,
    WrongRound,
)
from securefl.exchange import Asked
from securefl.messages import MASKING_STEPS, Party, RoundPlan, Step
from securefl.privacy import LocalResult, Noise
from securefl.release import (
    Claim,
    DpSgd,
    Independent,
    PayloadKind,
    Release,
    Tensors,
    flatten,
    unflatten,
)
from securefl.steps import Bench, Done, carry_out, plan_info

log = logging.getLogger(__name__)

_KINDS = {
    Step.ADVERTISE: PayloadKind.ADVERT,
    Step.DEAL: PayloadKind.SHARES,
    Step.SIGN: PayloadKind.SURVIVORS,
    Step.UNMASK: PayloadKind.UNMASKING,
}
_PLAYS_NO_PART = Independent(
    reason="keys, shares and signatures of a masked round, which no row has a part in"
)


@dataclass(frozen=True, repr=False)
class Member:
    """Who contributes. roster: the peers' cards by name, as pinned now. shapes: of the model's arrays.
    least_threshold, least_cohort: of the silo's policy. floor: the oldest version of envelopes it reads.
    """

    identity: Identity
    roster: Mapping[str, Card]
    shapes: Mapping[str, tuple[int, ...]]
    least_threshold: int
    least_cohort: int
    floor: int

    @property
    def cohort(self) -> dict[str, Card]:
        return {**self.roster, self.identity.name: self.identity.card}

    @property
    def length(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())


class MaskedRound:
    """One silo's part in one masked round: from the plans of its five steps to what leaves.

    Holds the round's secrets in memory alone; they are gone with the object.
    """

    def __init__(self, plan: RoundPlan, member: Member) -> None:
        """Raises PolicyRefusal or MaskingAborted as `MaskingClient`."""
        self._member = member
        self._terms = masked_terms(plan, member.length)
        silos = {party.name for party in plan.cohort}
        self._client = MaskingClient(
            member.identity,
            {name: card for name, card in member.cohort.items() if name in silos},
            self._terms,
            least_threshold=member.least_threshold,
            least_cohort=member.least_cohort,
            degree=None if plan.sums is None else plan.sums.degree,
        )

    def __repr__(self) -> str:
        return f"MaskedRound({self._client!r})"

    def close(self) -> None:
        """Forget the secrets of the round."""
        self._client.close()

    def _message(self, asked: Asked) -> Tensors:
        """What the server relays, in a plan that asks for the same as the first one of the round."""
        if masked_terms(asked.plan, self._member.length) != self._terms:
            raise MaskingAborted("the plans of one masked round do not ask for the same; nothing was sent")
        relayed = asked.tensors.get(RELAYED)
        if relayed is None:
            raise PayloadError("a plan of a masked round lacks what the server relays")
        return {"message": relayed}

    def answer(self, asked: Asked, info: Mapping[str, Any]) -> Release:
        """What answers a step that no row has a part in: advertise, deal, sign or unmask.

        Raises as the methods of `MaskingClient`; the round is then over for this silo.
        """
        message: Message
        match asked.plan.step:
            case Step.ADVERTISE:
                message = self._client.advertise()
            case Step.DEAL:
                message = self._client.share(AdvertList.from_tensors(self._message(asked)))
            case Step.SIGN:
                message = self._client.sign(SurvivorList.from_tensors(self._message(asked)))
            case Step.UNMASK:
                message = self._client.unmask(UnmaskRequest.from_tensors(self._message(asked)))
            case step:
                raise WrongRound(f"{step} is no such step of a masked round")
        return Release(_KINDS[asked.plan.step], message.tensors(), dict(info), _PLAYS_NO_PART)

    def mask(
        self,
        asked: Asked,
        trained: LocalResult,
        info: Mapping[str, Any],
        noise: Noise,
    ) -> Release:
        """The change of the weights, masked: with this silo's share of noise where that was agreed, else
        times the row count, which is masked too.

        noise: where the share comes from; one from a seed also rounds repeatably.
        Raises UsageError for more rows than agreed, NonFiniteUpdate, and as `MaskingClient.masked`.
        """
        assert asked.weights is not None
        assert asked.plan.sums is not None
        delivery = Delivery.from_tensors(self._message(asked))
        update = flatten(trained.tensors) - flatten(asked.weights)
        mechanism = mechanism_of(asked.plan, update.size)
        if mechanism is not None:
            noised = encode_noised(update, mechanism, noise)
            masked = self._client.masked(delivery, {UPDATE: noised})
            return Release(PayloadKind.MASKED_MODEL, masked.tensors(), dict(info), claim_of(mechanism, noise))
        rng = noise.draw() if noise.simulated else None
        values_as, weight_as = fixed_points(asked.plan.sums, len(asked.plan.cohort))
        weight = _weight(trained, asked.plan.sums.max_rows)
        cut = int((np.abs(update) > values_as.clip).sum())
        if cut:
            log.warning("%s: %d values were cut off at the agreed clip", self._member.identity.name, cut)
        values, count = encode_weighted(update, weight, values_as, weight_as, rng)
        masked = self._client.masked(delivery, {UPDATE: values, WEIGHT: count})
        claim = trained.claim or summed_claim(asked.plan)
        return Release(PayloadKind.MASKED_MODEL, masked.tensors(), dict(info), claim)


def before_sum(plan: RoundPlan, trained: Release, noise: Noise) -> Release:
    """What a preview shows of a model that will be masked or encrypted: what goes into the sum, but noise."""
    info = {key: value for key, value in trained.info.items() if key != "rows"}
    mechanism = mechanism_of(plan, sum(array.size for array in trained.tensors.values()))
    claim: Claim = summed_claim(plan) if mechanism is None else claim_of(mechanism, noise)
    if isinstance(trained.claim, DpSgd):
        claim = trained.claim
    return Release(plan.answer, trained.tensors, info, claim)


def _weight(trained: LocalResult, max_rows: int) -> float:
    rows = trained.rows
    if rows is None:  # all weigh the same
        return 1.0
    if rows > max_rows:  # would weigh as fewer than they are; `agreement.check_rows` says so sooner
        raise UsageError(f"this silo has {rows} rows, more than protection.max_rows = {max_rows}")
    return rows / max_rows


# --- CKKS


def make_group_key(plan: RoundPlan, me: Party, info: Mapping[str, Any]) -> Release:
    """The key of the cohort, from the one silo that makes it. Raises PolicyRefusal for any other."""
    assert plan.sums is not None
    if key_maker(plan.cohort) != me:
        raise PolicyRefusal(
            "the server asked another silo than the first of the cohort for its key", "agreed.key"
        )
    return group_key_release(GroupKey.generate(ckks_terms(plan.sums, 1, len(plan.cohort)).parameters), info)


class Encrypting:
    """A silo's use of the cohort's CKKS key in one step; every plan brings the key, sealed by its maker."""

    def __init__(self, asked: Asked, member: Member) -> None:
        """Raises PayloadError, UnknownSender, WrongRound and as `open_group_key`."""
        plan = asked.plan
        assert plan.sums is not None
        self._asked, self._member = asked, member
        self._terms = ckks_terms(plan.sums, member.length, len(plan.cohort))
        sealed = asked.tensors.get(SEALED_KEY)
        if sealed is None or sealed.dtype != np.uint8:
            raise PayloadError("a plan under CKKS lacks the group key")
        verified = envelope.verify(sealed.tobytes(), member.cohort, floor=member.floor)
        header = verified.header
        if (header.run, header.round, header.step) != (plan.run, 1, Step.KEY.value):
            raise WrongRound("the group key that came with a plan is of another run, round or step")
        maker = key_maker(plan.cohort)
        self._key = open_group_key(verified, member.identity, maker, self._terms.parameters)

    def encrypt(self, trained: LocalResult, info: Mapping[str, Any]) -> Release:
        """The weights times the hidden row count, and the row count, encrypted.

        Raises UsageError for more rows than agreed, and as `ckks.encrypt`.
        """
        plan = self._asked.plan
        assert plan.sums is not None
        weight = _weight(trained, plan.sums.max_rows) * self._terms.max_weight
        chunks = encrypt(self._key, self._terms, flatten(trained.tensors), weight)
        kind = PayloadKind.ENCRYPTED_MODEL
        claim = trained.claim or summed_claim(plan)
        return Release(kind, chunk_tensors(0, chunks), dict(info), claim)

    def open_sum(self, bench: Bench) -> tuple[dict[str, NDArray[np.float32]], Release]:
        """The mean behind the encrypted sum that came with the plan, as weights, and as what was opened.

        bench: whose configuration says how the models in it were trained. Raises as `ckks.decrypt_sum`.
        """
        asked, plan = self._asked, self._asked.plan
        assert asked.weights is not None
        assert plan.sums is not None
        total = decrypt_sum(self._key, self._terms, [Signed(asked.verified, asked.weights)])
        values = total.mean()
        if float(np.abs(values).max()) > self._terms.clip + self._terms.tolerance / total.weight:
            raise NonFiniteUpdate("the encrypted sum opens to weights that no silo may send; it was altered")
        mean = unflatten(values, self._member.shapes)
        number = plan.round if plan.step is Step.FINISH else plan.round - 1
        rows = total.weight / self._terms.max_weight * plan.sums.max_rows
        info = {
            "round": number,
            "rows": round(rows) if weighs_rows(bench.config) else None,
            "resolution": self._terms.tolerance / total.weight,
            "encoder": plan.model,
            "holds": "the mean of the weights after this round",
        }
        claim = round_claim(bench.config, number, bench.noise) or summed_claim(plan)
        return mean, Release(PayloadKind.SUM, mean, info, claim)


# --- a step, whatever the protection


class Contributor:
    """Carries out the steps of plans, and remembers the one masked round that the silo has a part in."""

    def __init__(self) -> None:
        self._masked: MaskedRound | None = None
        self._last = 0.0

    def expire(self, now: float, patience: float) -> None:
        """Forget the masked round where the server was silent for longer than `patience` seconds.

        Called at every plan, with the time of it. A clock that was set back ends the round too.
        """
        if not 0 <= now - self._last <= patience:
            self.forget()
        self._last = now

    def forget(self) -> None:
        """Take no further part in the masked round at hand, whoever still holds it."""
        if self._masked is not None:
            self._masked.close()
        self._masked = None

    def carry_out(self, asked: Asked, bench: Bench, member: Member, preview: bool) -> Done:
        """What answers a plan that was agreed and permitted; to preview it, without a change to the round.

        A preview of a model that is summed shows what goes into the sum. Raises as `steps.carry_out` and the
        protocols do; PolicyRefusal where the silo has no part in the masked round.
        """
        plan, weights, opened = asked.plan, asked.weights, None
        info = plan_info(plan, bench.slm, bench.base_sha256)
        if plan.step is Step.KEY:
            me = Party(name=bench.name, key=member.identity.card.fingerprint)
            return Done(make_group_key(plan, me, info))
        if plan.step in MASKING_STEPS:
            return Done(self._round(plan, member, preview).answer(asked, info))
        encrypting = Encrypting(asked, member) if plan.protection == "ckks" else None
        if encrypting is not None and brings_sum(plan.round, plan.step, bench.config):
            weights, opened = encrypting.open_sum(bench)
        joins = plan.step is Step.TRAIN and plan.protection == "masked" and not preview
        # Before hours of training: whether there still is a round to join.
        joined = self._round(plan, member, preview) if joins else None
        done = replace(carry_out(plan, asked.tensors, weights, bench), opened=opened)
        if plan.step is not Step.TRAIN or plan.protection == "sealed":
            return done
        if preview:
            return replace(done, release=before_sum(plan, done.release, bench.noise))
        assert done.trained is not None
        if encrypting is not None:
            return replace(done, release=encrypting.encrypt(done.trained, info))
        assert joined is not None
        return replace(done, release=joined.mask(asked, done.trained, info, bench.noise))

    def _round(self, plan: RoundPlan, member: Member, preview: bool) -> MaskedRound:
        """This silo's part in the masked round of a plan; its first step begins a new one."""
        if plan.step is Step.ADVERTISE:
            begun = MaskedRound(plan, member)
            if not preview:
                self.forget()
                self._masked = begun
            return begun
        if preview:
            raise PolicyRefusal(
                f"what answers {plan.step} depends on no row, and on secrets of the masked round that only "
                "the running client has; preview the plans to advertise and to train",
                "preview",
            )
        if self._masked is None:
            raise PolicyRefusal(
                f"{member.identity.name} has no part in the masked round {plan.round}: it did not advertise, "
                "or refused a step, was restarted or left waiting too long; it takes part in the next",
                "masking",
            )
        return self._masked
