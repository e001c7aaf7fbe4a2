"""The policies of a simulation hold its own noised centroids to what its configuration asks for."""

from __future__ import annotations

import math

import pytest

from securefl.config import Config, parse_config
from securefl.errors import BudgetExceeded
from securefl.privacy import gaussian_epsilon
from securefl.release import Adjacency
from securefl.simulated_policy import refuse_early, simulated_policy


def configuration(adjacency: Adjacency, ceiling: float) -> Config:
    """One centroid release, whose sums have noise of one clip."""
    return parse_config(
        {
            "federation": {"method": "fedkc", "rounds": 2},
            "data": {"train": "a.csv", "test": "b.csv", "unit": "patient_id"},
            "privacy": {"adjacency": adjacency, "centroids": {"noise_multiplier": 1.0}},
            "policy": {"max_epsilon": ceiling},
        }
    )


# Sums have 0.8 of mu^2 = 1 / z^2 under add-remove, and 0.9 of mu^2 = 4 / z^2 under replace-one.
@pytest.mark.parametrize(
    ("adjacency", "mu"), [("add-remove", math.sqrt(1 / 0.8)), ("replace-one", math.sqrt(4 / 0.9))]
)
def test_the_ceiling_is_held_against_the_adjacency_of_the_claims(adjacency: Adjacency, mu: float) -> None:
    epsilon = gaussian_epsilon(mu, 1e-5)
    refuse_early(configuration(adjacency, epsilon * 1.001))
    with pytest.raises(BudgetExceeded, match=r"above policy\.max_epsilon"):
        refuse_early(configuration(adjacency, epsilon * 0.999))


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_the_least_noise_is_that_of_the_least_noised_block(adjacency: Adjacency) -> None:
    """Sums have the least under both: counts 2.8 and as much, predictions 2.8 and sqrt(0.225 / 0.05)."""
    config = configuration(adjacency, 50.0)
    policy = simulated_policy(config, "silo-1", "0" * 64, ["1" * 64, "2" * 64], "3" * 64)
    assert policy.min_noise_multiplier == pytest.approx(1.0)
