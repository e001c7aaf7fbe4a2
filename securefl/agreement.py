"""What the parties of a run agreed on beforehand, and whether a plan asks for just that.

The agreement is the configuration that every party holds. The server schedules and no more: whatever a plan
says must be what the silo's own copy says. Pure functions; no keys, no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from securefl.config import AVERAGING, CLIENT_PLACES, Config
from securefl.crypto.ckks_terms import DEFAULT, POST_QUANTUM, Terms, chunk_name
from securefl.crypto.fixed_point import FixedPoint
from securefl.crypto.graph import threshold
from securefl.crypto.masking_messages import RoundTerms, VectorSpec
from securefl.distributed_noise import ModelMechanism, calibrate_models
from securefl.errors import ConfigError, PolicyRefusal, UsageError, WrongShape
from securefl.messages import MASKING_STEPS, FedKcTerms, NoiseTerms, Party, RoundPlan, Step, SumTerms
from securefl.privacy_terms import ModelPrivacy
from securefl.release import NonPrivate, PayloadKind, Tensors, canonical_json

MOST_SILOS = 256  # recipients of one envelope
LEAST_SILOS = 3  # the sum of two tells each the other's part
_MASKED_CLIP, _CKKS_CLIP = 4.0, 64.0
_WEIGHT_BITS = 32
_CAPACITY_USED = 0.99  # of what a CKKS sum may come to: the largest weights that leave room
UPDATE, WEIGHT = "update", "weight"  # the vectors of a masked round
RELAYED = "masking/message"  # the array of a plan in which the server relays a message of a masked round
SEALED_KEY = "ckks/key"  # and the envelope with the cohort's CKKS key
_ANSWERS = {
    Step.KEY: PayloadKind.GROUP_KEY,
    Step.ADVERTISE: PayloadKind.ADVERT,
    Step.DEAL: PayloadKind.SHARES,
    Step.SIGN: PayloadKind.SURVIVORS,
    Step.UNMASK: PayloadKind.UNMASKING,
}
_MODELS = {
    "sealed": PayloadKind.MODEL,
    "masked": PayloadKind.MASKED_MODEL,
    "ckks": PayloadKind.ENCRYPTED_MODEL,
}


def answer_kind(step: Step, config: Config) -> PayloadKind:
    """The one kind of payload that answers a step."""
    if step in _ANSWERS:
        return _ANSWERS[step]
    if step is Step.TRAIN:
        if config.sends_gradients:
            return PayloadKind.GRADIENT
        return _MODELS[config.protection.models or "sealed"]
    if step is Step.SHARE:
        layered = config.fedkc.layer is not None
        return PayloadKind.EMBEDDING_CENTROIDS if layered else PayloadKind.CENTROIDS
    return PayloadKind.METRICS


def steps_of_round(number: int, config: Config) -> list[Step]:
    """What the silos are asked for in a round, counted from 1, in order; at most once each."""
    federation = config.federation
    if federation.method == "standalone":
        return []
    steps = [Step.TRAIN]
    if config.protection.models == "masked":
        steps = [Step.ADVERTISE, Step.DEAL, Step.TRAIN, Step.SIGN, Step.UNMASK]
    if config.protection.models == "ckks" and number == 1:
        steps.insert(0, Step.KEY)
    if federation.method == "fedkc" and config.fedkc.source == "peers" and number > 1:
        steps.insert(0, Step.SHARE)  # not in round 1: its model has an untrained head and knows nothing
    if federation.method in ("crosslm", "datafree-kd"):
        steps.append(Step.CANDIDATE)
    if number == federation.rounds:
        steps.append(Step.FINISH)
    return steps


def figures(config: Config) -> Literal["exact", "noised", "none"]:
    """How the silos tell the server figures at the end.

    Noised ones where `privacy.metrics` is set. Else none under noise on models, whose bound an exact figure
    would undo, and exact ones without. None under CKKS, where a server could have one silo judge another's
    model in place of the sum.
    """
    privacy = config.privacy
    if config.protection.models == "ckks":
        return "none"
    if privacy.metrics is not None:
        return "noised"
    return "exact" if privacy.models is None and privacy.dp_sgd is None else "none"


def metric_releases(config: Config) -> int:
    """How many figures of a silo leave in a run, and share the budget of `privacy.metrics`."""
    rounds = range(1, config.federation.rounds + 1)
    steps = [step for number in rounds for step in steps_of_round(number, config)]
    return sum(step in (Step.CANDIDATE, Step.FINISH) for step in steps)


def weighs_rows(config: Config) -> bool:
    """Whether a silo's model weighs as much as its rows; else all weigh the same, and no number is told."""
    return config.privacy.models is None and config.privacy.dp_sgd is None


def names_model(step: Step, config: Config) -> bool:
    """Whether the plan of a step names weights; where it does not, a silo goes on from its own."""
    return config.federation.method in AVERAGING or step is Step.CANDIDATE


def brings_model(step: Step) -> bool:
    """Whether the weights that a plan names travel with it: not while a masked round is being prepared."""
    return step is not Step.KEY and step not in MASKING_STEPS


def brings_sum(plan_round: int, step: Step, config: Config) -> bool:
    """Whether what travels are not weights but their encrypted sum, which only silos can open."""
    summed = config.protection.models == "ckks" and brings_model(step)
    return summed and (plan_round > 1 or step is Step.FINISH)


# --- sums that nobody sees the parts of


def sum_terms(config: Config, silos: int) -> SumTerms | None:
    """How the models of a cohort of `silos` are added up; None where the server reads each."""
    if not config.sums_models:
        return None
    own, masked = config.protection, config.protection.models == "masked"
    noise = config.privacy.models
    return SumTerms(
        threshold=(own.threshold or threshold(silos)) if masked else 0,
        degree=own.degree if masked else None,
        clip=own.clip if own.clip is not None else (_MASKED_CLIP if masked else _CKKS_CLIP),
        bits=own.bits,
        max_rows=own.max_rows,
        post_quantum=own.post_quantum,
        noise=None if noise is None else NoiseTerms.model_validate(noise.model_dump()),
    )


def least_cohort(config: Config) -> int:
    """The fewest silos of a round: the mean of one silo's weights is that silo's weights."""
    if config.federation.method not in AVERAGING:
        return 1
    return LEAST_SILOS if config.sums_models else 2


def check_cohort(config: Config, silos: int, length: int = 1) -> None:
    """Require that the models of so many silos, of `length` values, can be summed as the configuration says.

    Raises ConfigError.
    """
    terms = sum_terms(config, silos)
    if terms is None:
        return
    if silos > MOST_SILOS:
        raise ConfigError(f"{silos} silos are more than the {MOST_SILOS} that a run takes")
    if silos < LEAST_SILOS:
        raise ConfigError(
            f'protection.models = "{config.protection.models}" takes at least {LEAST_SILOS} silos, here are '
            f"{silos}: the sum and one's own model give the other's; add silos, or write \"sealed\" if the "
            "server may read each model"
        )
    try:
        if config.protection.models == "ckks":
            ckks_terms(terms, 1, silos)
            return
        fixed_points(terms, silos)
    except UsageError as error:
        raise ConfigError(f"protection: {error}") from error
    if not threshold(silos) <= terms.threshold <= silos:
        raise ConfigError(
            f"protection.threshold: {terms.threshold} of {silos} silos; it is from {threshold(silos)} (more "
            f"than two thirds) to {silos}"
        )
    if terms.degree is not None and terms.degree % 2 and terms.degree < silos - 1:
        raise ConfigError(f"protection.degree: an even number, or {silos - 1} or more for all {silos} silos")
    noise_mechanism(terms, config.federation.rounds, silos, length)


def check_rows(config: Config, rows: int, whose: str) -> None:
    """Require that a row count can be a hidden weight. Raises ConfigError."""
    most = config.protection.max_rows
    if config.sums_models and weighs_rows(config) and rows > most:
        raise ConfigError(
            f"protection.max_rows: {whose} trains on {rows} rows, more than the {most} that a hidden row "
            "count can be; all silos must agree on a larger one"
        )


def fixed_points(terms: SumTerms, silos: int) -> tuple[FixedPoint, FixedPoint]:
    """How the change of a weight, and a row count as a share of `max_rows`, become integers."""
    return FixedPoint(terms.clip, terms.bits, silos), FixedPoint(1.0, _WEIGHT_BITS, silos)


def noise_mechanism(terms: SumTerms, rounds: int, silos: int, length: int) -> ModelMechanism | None:
    """The noise on each masked sum of models of `length` values; None where none was agreed on.

    Raises ConfigError where the bits have no room for it.
    """
    if terms.noise is None:
        return None
    asked = ModelPrivacy.model_validate(terms.noise.model_dump())
    return calibrate_models(asked, rounds, silos, terms.threshold, length, terms.bits)


def mechanism_of(plan: RoundPlan, length: int) -> ModelMechanism | None:
    """`noise_mechanism` of a plan."""
    assert plan.sums is not None
    return noise_mechanism(plan.sums, plan.rounds, len(plan.cohort), length)


def ckks_terms(terms: SumTerms, length: int, silos: int) -> Terms:
    """What is encrypted: `length` weights times the row count, which is scaled up as far as sums have room.

    Raises UsageError where they have none.
    """
    parameters = POST_QUANTUM if terms.post_quantum else DEFAULT
    room = parameters.capacity * _CAPACITY_USED / (silos * max(terms.clip, 1.0))
    return Terms(length, silos, room, terms.clip, parameters)


def check_sum_chunks(tensors: Tensors, terms: Terms) -> None:
    """Require the chunks of one encrypted vector, and all of them. Raises WrongShape."""
    if set(tensors) != {chunk_name(number) for number in range(terms.chunks)}:
        raise WrongShape("an encrypted vector lacks chunks, or has others than its own")


def masked_terms(plan: RoundPlan, length: int) -> RoundTerms:
    """What all silos of a masked round of models of `length` values agree on, from any of its plans.

    The steps' plans differ in what they ask for and relay, and in nothing else.
    """
    assert plan.sums is not None
    assert plan.model is not None
    shared = plan.model_dump(mode="json", exclude={"step", "relayed", "answer"})
    update = VectorSpec(name=UPDATE, length=length, bits=plan.sums.bits)
    # Under noise all silos weigh the same: a hidden weight would want noise of its own.
    weight = () if plan.sums.noise else (VectorSpec(name=WEIGHT, length=1, bits=_WEIGHT_BITS),)
    return RoundTerms(
        run=plan.run,
        round=plan.round,
        threshold=plan.sums.threshold,
        plan=hashlib.sha256(b"securefl/1 masked plan" + canonical_json(shared)).digest(),
        model=bytes.fromhex(plan.model),
        vectors=(update, *weight),
    )


def summed_claim(plan: RoundPlan) -> NonPrivate:
    """The claim on a silo's part in a sum."""
    assert plan.sums is not None
    whose = f"at least {plan.sums.threshold} silos" if plan.protection == "masked" else "the cohort"
    reason = (
        f"a sum over {whose} of weights trained on the rows without differential privacy; of one silo alone "
        "only its part in it"
    )
    return NonPrivate(reason=reason)


def key_maker(cohort: Sequence[Party]) -> Party:
    """The silo that makes the CKKS key of the cohort: the first by name, so that no server chooses it."""
    return min(cohort, key=lambda party: (party.name, party.key))


def fedkc_terms(config: Config) -> FedKcTerms | None:
    """The knowledge-composition part of every plan of the run; None for other methods."""
    if config.federation.method != "fedkc":
        return None
    return FedKcTerms.model_validate(config.fedkc.model_dump(include=set(FedKcTerms.model_fields)))


def check_agreed(plan: RoundPlan, config: Config, cohort: Sequence[Party]) -> None:
    """Require that a plan asks what the silo's own configuration and roster say.

    A server that claims fewer rounds would get more of the budget a round, one that asks to share in a round
    that has no sharing would get one release more, and one that names a smaller cohort would choose who
    reads the centroids. Raises PolicyRefusal, naming what differs.
    """
    terms = plan.fedkc
    own = fedkc_terms(config)
    sums = sum_terms(config, len(cohort))
    steps = steps_of_round(plan.round, config)
    shared = plan.step is Step.TRAIN and Step.SHARE in steps
    asked = {
        "method": (plan.method, config.federation.method),
        "rounds": (plan.rounds, config.federation.rounds),
        "step": (plan.step in steps, True),
        "model": (plan.model is not None, names_model(plan.step, config)),
        "protection": (plan.protection, config.protection.models),
        "sums": (plan.sums and plan.sums.model_dump(), sums and sums.model_dump()),
        "relay": (_relays_well(plan, cohort) and (shared or not plan.relayed), True),
        "epochs": (plan.epochs, config.round_epochs(plan.round)),
        "answer": (plan.answer, answer_kind(plan.step, config)),
        "cohort": (_sorted(plan.cohort), _sorted(cohort)),
        "fedkc": (terms and terms.model_dump(), own and own.model_dump()),
    }
    for what, (found, agreed) in asked.items():
        if found != agreed:
            raise PolicyRefusal(
                f"the plan of round {plan.round} does not ask what was agreed: its {what} differs from this "
                "silo's own configuration",
                f"agreed.{what}",
            )


def _relays_well(plan: RoundPlan, cohort: Sequence[Party]) -> bool:
    """Whether what a plan relays is of silos of the run, each once."""
    return len(set(plan.relayed)) == len(plan.relayed) and {p.name for p in cohort}.issuperset(plan.relayed)


def _sorted(parties: Sequence[Party]) -> list[tuple[str, str]]:
    return sorted((party.name, party.key) for party in parties)


def plan_hash(body: bytes, config: Config, dataset: str, base_sha256: str) -> str:
    """What an owner approves: SHA-256 (hex) over all that decides what a plan does in this silo.

    body: the opened plan as it came, with the weights and the peers' envelopes in it. config: the silo's own,
    with every training parameter and prompt. dataset: whose account is charged. base_sha256: of the
    checkpoint. One changed parameter is another hash.
    """
    # Where a silo's files lie is no part of what it does.
    own = canonical_json(config.model_dump(mode="json", exclude={"client": set(CLIENT_PLACES)}))
    parts = [b"securefl/1 plan", hashlib.sha256(body).digest(), own, dataset.encode()]
    parts.append(bytes.fromhex(base_sha256))
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()
