"""The policies that a simulation writes for its silos: what the configuration needs, and nothing more."""

from __future__ import annotations

import json
from collections.abc import Sequence

from securefl.account import Account
from securefl.agreement import figures, metric_releases, weighs_rows
from securefl.centroid_privacy import CentroidMechanism, calibrate_centroids
from securefl.config import PERMIT_EMBEDDINGS, Config
from securefl.distributed_noise import round_multiplier
from securefl.dp_terms import run_claim, training_mechanism
from securefl.errors import BudgetExceeded, PolicyRefusal
from securefl.participation import smallest_cohort
from securefl.policy import ROUNDING, Ceiling, Policy
from securefl.privacy import (
    MetricMechanism,
    calibrate_metrics,
    noise_source,
    zcdp_epsilon,
)
from securefl.release import Limits, PayloadKind


def simulated_policy(config: Config, name: str, server: str, peers: Sequence[str], base: str) -> Policy:
    """The policy of a silo in a simulation: what the configuration needs, and nothing more.

    server, peers: fingerprints of their cards; base: SHA-256 of the checkpoint.
    """
    return Policy(
        name=name,
        simulation=True,
        servers=(server,),
        peers=tuple(peers),
        kinds=tuple(released_kinds(config)),
        nonprivate=tuple(exact_kinds(config)),
        model_protections=(config.protection.models or "sealed",),
        min_cohort=smallest_cohort(config, len(peers) + 1) if config.sums_models else None,
        centroid_protections=("peer",),
        min_cluster_size=config.privacy.centroids.min_size,
        min_noise_multiplier=_least_noise(config),
        max_release_bytes=Limits().max_bytes,
        max_bytes_per_day=2**53,
        approval="automatic",
        datasets={
            name: Ceiling(
                max_epsilon=config.policy.max_epsilon,
                delta=_delta(config),
                unit=config.data.unit_name,
                adjacency=config.privacy.adjacency,
            )
        },
        base_models=(base,),
        allow_embedding_centroids=config.policy.allow_embedding_centroids,
    )


def released_kinds(config: Config) -> list[PayloadKind]:
    """What leaves a silo in a run."""
    if config.federation.method == "standalone":
        return []
    kinds = [PayloadKind.GRADIENT if config.sends_gradients else PayloadKind.MODEL, PayloadKind.METRICS]
    if config.federation.method == "fedkc" and config.fedkc.source == "peers":
        layered = config.fedkc.layer is not None
        kinds.append(PayloadKind.EMBEDDING_CENTROIDS if layered else PayloadKind.CENTROIDS)
    return kinds


def exact_kinds(config: Config) -> list[PayloadKind]:
    """Of these, what leaves under no claim."""
    claimed = {
        PayloadKind.MODEL: not weighs_rows(config),
        PayloadKind.GRADIENT: False,
        PayloadKind.METRICS: figures(config) != "exact",
    }
    return [kind for kind in released_kinds(config) if not claimed.get(kind, config.privacy.centroids.noised)]


def _delta(config: Config) -> float:
    """At which a silo's whole account is held against the ceiling: no less than any of its claims names."""
    privacy = config.privacy
    asked = [privacy.models, privacy.dp_sgd, privacy.metrics]
    deltas = [terms.delta for terms in asked if terms is not None]
    return max([*deltas, privacy.centroids.delta] if privacy.centroids.noised or not deltas else deltas)


def _least_noise(config: Config) -> float | None:
    """The smallest multiplier of the private releases that a configuration asks for."""
    terms, models = config.privacy.centroids, config.privacy.models
    found: list[float] = []
    if terms.noised:
        each = _centroid_mechanism(config)
        found += [each.noise_multiplier, each.count_multiplier, each.prediction_multiplier]
    if models is not None:
        found.append(round_multiplier(models, config.federation.rounds))
    training, metrics = training_mechanism(config, 1), metric_mechanism(config)
    found += [mechanism.noise_multiplier for mechanism in (training, metrics) if mechanism is not None]
    return min(found, default=None)


def _centroid_mechanism(config: Config) -> CentroidMechanism:
    """Of each centroid release, but for its clip, which no limit of a policy looks at."""
    privacy, releases = config.privacy, config.federation.rounds - 1
    unit = config.data.unit_name
    return calibrate_centroids(privacy.centroids, 1.0, releases, unit=unit, adjacency=privacy.adjacency)


def metric_mechanism(config: Config) -> MetricMechanism | None:
    """Of each private figure of the run; None where figures are exact or none are told."""
    terms, releases = config.privacy.metrics, metric_releases(config)
    if terms is None or not releases:
        return None
    return calibrate_metrics(terms, config.privacy.adjacency, releases, config.data.unit_name)


def planned_account(config: Config) -> Account:
    """What the private releases of a silo in the whole run will add up to.

    Raises ConfigError or BudgetExceeded where they have no sum that means anything.
    """
    seeded, account = noise_source(config.federation.seed), Account()
    rounds, method = config.federation.rounds, config.federation.method
    if method == "fedkc" and config.fedkc.source == "peers" and config.privacy.centroids.noised:
        claim = _centroid_mechanism(config).claim(seeded)
        for _ in range(rounds - 1):
            account = account.with_claim(claim)
    metrics = metric_mechanism(config)
    if metrics is not None:
        for _ in range(metric_releases(config)):
            account = account.with_claim(metrics.claim(seeded))
    # Last: every composition with it takes a tenth of a second.
    training = None if method == "standalone" else run_claim(config, rounds, seeded)
    if training is not None:
        account = account.with_claim(training)
    return account


def _refuse_model_noise(config: Config) -> None:
    models, rounds = config.privacy.models, config.federation.rounds
    if models is None:
        return
    epsilon = zcdp_epsilon(rounds / (2 * round_multiplier(models, rounds) ** 2), models.delta)
    if epsilon > config.policy.max_epsilon * (1 + ROUNDING):
        raise BudgetExceeded(
            f"the {rounds} noised sums would have epsilon {epsilon:.4g} at delta {models.delta:g}, above "
            f"policy.max_epsilon = {config.policy.max_epsilon:g}; lower privacy.models.epsilon, raise the "
            "noise_multiplier, or raise the ceiling",
            "datasets",
        )


def refuse_total(config: Config) -> None:
    """Require that what leaves a silo in the whole run fits `policy.max_epsilon`. Raises BudgetExceeded."""
    delta, ceiling = _delta(config), config.policy.max_epsilon
    account = planned_account(config)
    if account.private_epsilon is None:
        return
    epsilon = account.private_epsilon_at(delta)
    if epsilon > ceiling * (1 + ROUNDING):
        raise BudgetExceeded(
            f"what leaves a silo in this run would have epsilon {epsilon:.4g} at delta {delta:g} together, "
            f"above policy.max_epsilon = {ceiling:g}; lower the epsilons in privacy, or raise the ceiling",
            "datasets",
        )


def refuse_early(config: Config) -> None:
    """Refuse before the first round what every silo's simulated policy would refuse in a later one.

    Raises PolicyRefusal for un-noised embedding-layer centroids without their sentence, and BudgetExceeded
    for a budget that the ceiling cannot hold, rather than after half of it has left.
    """
    terms, method = config.privacy.centroids, config.federation.method
    _refuse_model_noise(config)
    refuse_total(config)
    if method != "fedkc" or config.fedkc.source != "peers":
        return
    exposed = config.fedkc.layer is not None and not terms.noised
    if exposed and config.policy.allow_embedding_centroids is None:
        raise PolicyRefusal(
            f"fedkc.compose = {json.dumps(config.fedkc.compose)} without noise lets peers read tokens back; "
            f'set privacy.centroids.epsilon, or policy.allow_embedding_centroids = "{PERMIT_EMBEDDINGS}"',
            "allow_embedding_centroids",
        )
