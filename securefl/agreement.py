"""What the parties of a run agreed on beforehand, and whether a plan asks for just that.

The agreement is the configuration that every party holds. The server schedules and no more: whatever a plan
says must be what the silo's own copy says. Pure functions; no keys, no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from securefl.config import AVERAGING, CLIENT_PLACES, Config
from securefl.errors import PolicyRefusal
from securefl.messages import FedKcTerms, Party, RoundPlan, Step
from securefl.release import PayloadKind, canonical_json


def answer_kind(step: Step, config: Config) -> PayloadKind:
    """The one kind of payload that answers a step."""
    if step is Step.TRAIN:
        return PayloadKind.MODEL
    if step is Step.SHARE:
        layered = config.fedkc.compose == "embeddings"
        return PayloadKind.EMBEDDING_CENTROIDS if layered else PayloadKind.CENTROIDS
    return PayloadKind.METRICS


def steps_of_round(number: int, config: Config) -> list[Step]:
    """What the silos are asked for in a round, counted from 1, in order; at most once each."""
    federation = config.federation
    if federation.method == "standalone":
        return []
    steps = [Step.TRAIN]
    if federation.method == "fedkc" and config.fedkc.source == "peers" and number > 1:
        steps.insert(0, Step.SHARE)  # not in round 1: its model has an untrained head and knows nothing
    if federation.method in ("crosslm", "datafree-kd"):
        steps.append(Step.CANDIDATE)
    if number == federation.rounds:
        steps.append(Step.FINISH)
    return steps


def brings_model(step: Step, config: Config) -> bool:
    """Whether the plan of a step carries weights; where it does not, a silo goes on from its own."""
    return config.federation.method in AVERAGING or step is Step.CANDIDATE


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
    steps = steps_of_round(plan.round, config)
    shared = plan.step is Step.TRAIN and Step.SHARE in steps
    asked = {
        "method": (plan.method, config.federation.method),
        "rounds": (plan.rounds, config.federation.rounds),
        "step": (plan.step in steps, True),
        "model": (plan.model is not None, brings_model(plan.step, config)),
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
