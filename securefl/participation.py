"""Who takes part in which round: silos that join late, that leave, and the draw of those that are asked.

A function of the configuration, the run and the silos' names, so that every silo computes the same cohort and
refuses a plan with another one: a server that chose freely could ask the same silo with changing others until
the sums told it apart. (It does choose the run's id, once, and with it one of many schedules.) No keys, no
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from securefl.agreement import check_cohort, least_cohort
from securefl.config import Config
from securefl.errors import ConfigError
from securefl.messages import Step


def enrolled(config: Config, names: Collection[str], number: int) -> tuple[str, ...]:
    """The silos that have joined by a round, counted from 1, and not left before it; sorted."""
    federation = config.federation
    return tuple(
        name
        for name in sorted(names)
        if federation.join.get(name, 1) <= number <= federation.leave.get(name, number)
    )


def cohort(config: Config, names: Collection[str], run: str, number: int, step: Step) -> tuple[str, ...]:
    """The silos that a step of a round asks; sorted.

    With `federation.active` as many of the enrolled ones are drawn for each round. The last model goes to
    all of these.
    """
    there = enrolled(config, names, number)
    active = config.federation.active
    if active is None or active >= len(there) or step is Step.FINISH:
        return there
    ranked = sorted(there, key=lambda name: hashlib.sha256(f"{run}/{number}/{name}".encode()).digest())
    return tuple(sorted(ranked[:active]))


def smallest_cohort(config: Config, silos: int) -> int:
    """Of the rounds of a run with so many silos in all, how many take part in the smallest."""
    federation, rounds = config.federation, range(1, config.federation.rounds + 1)
    there = [
        silos - sum(n < first for first in federation.join.values())
        - sum(last < n for last in federation.leave.values())
        for n in rounds
    ]  # fmt: skip
    return min(min(there), federation.active or silos)


def first_round(config: Config, names: Collection[str], run: str, name: str) -> int | None:
    """The first round in which a silo is asked to train; None where it never is."""
    rounds = range(1, config.federation.rounds + 1)
    return next((n for n in rounds if name in cohort(config, names, run, n, Step.TRAIN)), None)


def check_participation(config: Config, names: Collection[str], run: str, length: int = 1) -> None:
    """Require that every round has silos enough, and that all silos named are of the run.

    length: values of a model. Raises ConfigError.
    """
    federation = config.federation
    asked = {"join": federation.join, "leave": federation.leave, "local_head": federation.local_head}
    for key, silos_of in asked.items():
        for name in silos_of:
            if name not in names:
                raise ConfigError(f"federation.{key}: {name} is none of the silos of this run")
    for number in range(1, federation.rounds + 1):
        silos = len(cohort(config, names, run, number, Step.TRAIN))
        if silos < least_cohort(config):
            raise ConfigError(
                f"federation: round {number} has {silos} of the {len(names)} silos, and at least "
                f"{least_cohort(config)} are needed; change active, join or leave"
            )
        check_cohort(config, silos, length)
