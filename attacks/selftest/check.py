"""One line of the self-test, and how many false alarms chance alone explains. Numbers and words only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict
from scipy.stats import binom

Progress = Callable[[float, str], None]

# A sound bound gives more false alarms than the limit with at most this probability.
UNLUCKY = 0.001


class Check(BaseModel):
    """What was tested, what it had to give, and what it gave; `what` says what a failure would mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    what: str
    passed: bool
    expected: str
    measured: str


def most_alarms(repetitions: int, rate: float) -> int:
    """The quantile of Bin(repetitions, rate) that is passed with probability at most `UNLUCKY`."""
    return int(binom.ppf(1 - UNLUCKY, repetitions, rate))


def alarms_check(name: str, what: str, alarms: Sequence[int], repetitions: int, rate: float) -> Check:
    """False alarms in `repetitions` of each of several cases, each of which has `rate` of them at most."""
    most = most_alarms(repetitions, rate)
    return Check(
        name=name,
        what=what,
        passed=max(alarms) <= most,
        expected=f"at most {most} of {repetitions}",
        measured=f"{', '.join(map(str, alarms))} of {repetitions}",
    )


def at_least(name: str, what: str, value: float, least: float, metric: str) -> Check:
    """Passes where the value is not below `least`."""
    return Check(
        name=name,
        what=what,
        passed=value >= least,
        expected=f"{metric} >= {least:g}",
        measured=f"{value:.3f}",
    )


def at_most(name: str, what: str, value: float, most: float, metric: str) -> Check:
    """Passes where the value is not above `most`."""
    return Check(
        name=name, what=what, passed=value <= most, expected=f"{metric} <= {most:g}", measured=f"{value:.3f}"
    )
