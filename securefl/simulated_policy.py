"""The policies that a simulation writes for its silos: what the configuration needs, and nothing more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from securefl.config import PERMIT_EMBEDDINGS, Config
from securefl.distributed_noise import round_multiplier
from securefl.errors import BudgetExceeded, PolicyRefusal
from securefl.policy import ROUNDING, Ceiling, Policy
from securefl.privacy import calibrate_centroids, gaussian_epsilon, zcdp_epsilon
from securefl.release import Limits, PayloadKind


def simulated_policy(config: Config, name: str, server: str, peers: Sequence[str], base: str) -> Policy:
    """The policy of a silo in a simulation: what the configuration needs, and nothing more.

    server, peers: fingerprints of their cards; base: SHA-256 of the checkpoint.
    """
    method = config.federation.method
    kinds: list[PayloadKind] = []
    if method != "standalone":
        kinds += [PayloadKind.MODEL, PayloadKind.METRICS]
    nonprivate = [] if config.privacy.models is not None else list(kinds)
    if method == "fedkc" and config.fedkc.source == "peers":
        layered = config.fedkc.compose == "embeddings"
        kinds.append(PayloadKind.EMBEDDING_CENTROIDS if layered else PayloadKind.CENTROIDS)
        if not config.privacy.centroids.noised:
            nonprivate.append(kinds[-1])
    return Policy(
        name=name,
        simulation=True,
        servers=(server,),
        peers=tuple(peers),
        kinds=tuple(kinds),
        nonprivate=tuple(nonprivate),
        model_protections=(config.protection.models or "sealed",),
        min_cohort=len(peers) + 1 if config.sums_models else None,
        centroid_protections=("peer",),
        min_cluster_size=config.privacy.centroids.min_size,
        min_noise_multiplier=_least_noise(config),
        max_release_bytes=Limits().max_bytes,
        max_bytes_per_day=2**53,
        approval="automatic",
        datasets={name: Ceiling(max_epsilon=config.policy.max_epsilon, delta=_delta(config))},
        base_models=(base,),
        allow_embedding_centroids=config.policy.allow_embedding_centroids,
    )


def _delta(config: Config) -> float:
    """At which a silo's whole account is held against the ceiling: no less than any of its claims names."""
    centroids, models = config.privacy.centroids, config.privacy.models
    deltas = [centroids.delta] if centroids.noised or models is None else []
    return max(deltas if models is None else [*deltas, models.delta])


def _least_noise(config: Config) -> float | None:
    """The smallest multiplier of the private releases that a configuration asks for."""
    terms, models = config.privacy.centroids, config.privacy.models
    found: list[float] = []
    if terms.noised:
        each = calibrate_centroids(terms, 1.0, max(1, config.federation.rounds - 1))
        found += [each.noise_multiplier, each.count_multiplier, each.prediction_multiplier]
    if models is not None:
        found.append(round_multiplier(models, config.federation.rounds))
    return min(found, default=None)


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


def refuse_early(config: Config) -> None:
    """Refuse before the first round what every silo's simulated policy would refuse in a later one.

    Raises PolicyRefusal for un-noised embedding-layer centroids without their sentence, and BudgetExceeded
    for a budget that the ceiling cannot hold, rather than after half of it has left.
    """
    terms, method = config.privacy.centroids, config.federation.method
    _refuse_model_noise(config)
    if method != "fedkc" or config.fedkc.source != "peers":
        return
    exposed = config.fedkc.compose == "embeddings" and not terms.noised
    if exposed and config.policy.allow_embedding_centroids is None:
        raise PolicyRefusal(
            'fedkc.compose = "embeddings" without noise lets peers read tokens back; set an epsilon in '
            f'privacy.centroids, or policy.allow_embedding_centroids = "{PERMIT_EMBEDDINGS}"',
            "allow_embedding_centroids",
        )
    releases = config.federation.rounds - 1
    if terms.noised and releases:
        mu = calibrate_centroids(terms, 1.0, releases).mu * math.sqrt(releases)
        epsilon = gaussian_epsilon(mu, terms.delta)
        if epsilon > config.policy.max_epsilon * (1 + ROUNDING):
            raise BudgetExceeded(
                f"the {releases} centroid releases of a silo would have epsilon {epsilon:.4g} at delta "
                f"{terms.delta:g}, above policy.max_epsilon = {config.policy.max_epsilon:g}; lower "
                "privacy.centroids.epsilon, raise the noise_multiplier, or raise the ceiling",
                "datasets",
            )
