"""How much privacy DP-SGD costs: noise calibrated to a target, and epsilon of what was composed.

Two independent libraries must agree: Opacus's PRV accountant (Gopi, Lee and Wutschitz 2021) calibrates, and
dp-accounting's privacy loss distributions (Doroshenko et al. 2022) check it and add up accounts. Both are
slow to load, so this room loads them when they are needed. Numbers in, numbers out. The Gaussian-DP
approximation of subsampling is not offered: it is no bound (at sigma 0.6, q = 1000/67349, 200 steps and delta
1e-5 it says 3.46 where the truth is 5.83).
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from securefl.errors import BudgetExceeded, ConfigError

# The largest difference between the two accountants that a run may start with: relative, absolute.
AGREEMENT = (0.02, 0.02)
# Epsilon (by Renyi DP, which is quick and never below the truth) above which nothing is computed: it says
# nothing that anybody could rely on, and the distributions would take gigabytes.
MOST_EPSILON = 1000.0
# Spacing of the grid of privacy losses, which are rounded up on it: finer for many steps, whose roundings add
# up, and finest where noise is so large that losses are small and a fine grid is short. The error is below
# half of one per cent then, and a composition takes a tenth of a second.
_COARSE, _FINE, _FINEST = 1e-3, 3e-4, 1e-4
_MANY_STEPS, _LARGE_NOISE = 2000, 2.0
LEAST_MULTIPLIER = 0.1
# Renyi orders: whole ones have closed forms under subsampling; every order is a valid bound.
_ORDERS = (*range(2, 65), 96, 128, 256, 512, 1024)
_TOLERANCE = 1e-3  # relative, of a calibrated noise multiplier; on the side of more noise


# Steps of all trainings of one kind: a hundred times those of any run that this package makes.
MOST_STEPS = 10**6


class Sampled(BaseModel):
    """`steps` Gaussian mechanisms of `noise_multiplier`, each on a Poisson sample at `sample_rate`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    noise_multiplier: float = Field(ge=0.1, le=1e6)
    sample_rate: float = Field(gt=0, le=1)
    steps: int = Field(ge=1, le=MOST_STEPS)


def accountants() -> str:
    """The accountants behind a claim, with their versions."""
    return f"prv (opacus {version('opacus')}), checked by pld (dp-accounting {version('dp-accounting')})"


@lru_cache(maxsize=64)
def _one_step(noise_multiplier: float, sample_rate: float, interval: float) -> Any:
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=interval
    )


@lru_cache(maxsize=8)
def _composed(sampled: tuple[Sampled, ...], interval: float) -> Any:
    """The distribution of all trainings; of an account that grows at its end only the last is new."""
    *before, last = sampled
    one = _one_step(last.noise_multiplier, last.sample_rate, interval).self_compose(last.steps)
    return _composed(tuple(before), interval).compose(one) if before else one


@lru_cache(maxsize=1024)
def renyi_epsilon(mu: float, sampled: tuple[Sampled, ...], delta: float) -> float:
    """An upper bound on `composed_epsilon`, in milliseconds (Mironov, Talwar and Zhang 2019)."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # of orders that it leaves out, which is sound
    accountant = RdpAccountant(_ORDERS)
    for part in sampled:
        event = PoissonSampledDpEvent(part.sample_rate, GaussianDpEvent(part.noise_multiplier))
        accountant.compose(event, part.steps)
    if mu > 0:
        accountant.compose(GaussianDpEvent(1 / mu))
    return float(accountant.get_epsilon(delta))


def _require_meaning(mu: float, sampled: tuple[Sampled, ...], delta: float) -> None:
    if not renyi_epsilon(mu, sampled, delta) <= MOST_EPSILON:
        raise BudgetExceeded(
            f"trainings with so little noise have an epsilon in the hundreds at delta {delta:g}, which "
            "protects nothing; raise the noise multiplier or lower epsilon",
            "datasets",
        )


@lru_cache(maxsize=1024)
def composed_epsilon(mu: float, sampled: tuple[Sampled, ...], delta: float) -> float:
    """Epsilon at `delta` of a mu-Gaussian-DP mechanism together with subsampled ones, under add/remove.

    By privacy loss distributions, rounded towards the larger loss: an upper bound. Raises BudgetExceeded
    where the noise is so small that the composition protects nothing.
    """
    _require_meaning(mu, sampled, delta)
    interval = _FINE if sum(part.steps for part in sampled) > _MANY_STEPS else _COARSE
    if all(part.noise_multiplier >= _LARGE_NOISE for part in sampled) and mu <= 1 / _LARGE_NOISE:
        interval = _FINEST
    total = _composed(sampled, interval)
    if mu > 0:
        total = total.compose(_one_step(1 / mu, 1.0, interval))
    return max(0.0, float(total.get_epsilon_for_delta(delta)))


@lru_cache(maxsize=1024)
def prv_epsilon(sampled: Sampled, delta: float) -> float:
    """Epsilon of `sampled` at `delta` by Opacus's PRV accountant: its upper bound. Raises as above."""
    _require_meaning(0.0, (sampled,), delta)
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sampled.noise_multiplier, sampled.sample_rate, sampled.steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its choice of a grid, which is on the safe side
        return float(accountant.get_epsilon(delta))


def checked_epsilon(sampled: Sampled, delta: float) -> float:
    """The larger epsilon of both accountants. Raises ConfigError where they differ by more than AGREEMENT."""
    pld, prv = composed_epsilon(0.0, (sampled,), delta), prv_epsilon(sampled, delta)
    relative, absolute = AGREEMENT
    if not abs(prv - pld) <= max(relative * min(prv, pld), absolute):
        raise ConfigError(
            f"privacy.dp_sgd: the accountants disagree on epsilon (prv {prv:.4g}, pld {pld:.4g} at delta "
            f"{delta:g}, noise multiplier {sampled.noise_multiplier:.4g}, sample rate "
            f"{sampled.sample_rate:g}, {sampled.steps} steps), so none is claimed; change the sample rate, "
            "the delta or the epochs"
        )
    return max(prv, pld)


@dataclass(frozen=True)
class Calibration:
    """Noise for a target: sigma over the clip, and the larger epsilon of both accountants at it."""

    noise_multiplier: float
    epsilon: float


@lru_cache(maxsize=64)
def calibrate(epsilon: float, delta: float, sample_rate: float, steps: int) -> Calibration:
    """The least noise with which `steps` subsampled steps have at most `epsilon` at `delta`.

    By PRV, then checked by PLD; the claim is the larger of both and never above the target. Raises
    ConfigError where the accountants disagree or no noise up to 10,000 times the clip is enough.
    """

    def part(multiplier: float) -> Sampled:
        return Sampled(noise_multiplier=multiplier, sample_rate=sample_rate, steps=steps)

    # Renyi DP asks for more noise than is needed: from there down.
    low, high = LEAST_MULTIPLIER, 1.0
    while renyi_epsilon(0.0, (part(high),), delta) > epsilon:
        low, high = high, high * 2
        if high > 1e5:
            raise ConfigError(
                f"privacy.dp_sgd.epsilon: {epsilon:g} at delta {delta:g} is out of reach in {steps} steps at "
                f"sample rate {sample_rate:g}; raise it, or train for fewer steps"
            )
    while high - low > 1e-2 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if renyi_epsilon(0.0, (part(middle),), delta) <= epsilon else (middle, high)

    def fits(multiplier: float) -> bool:
        return prv_epsilon(part(multiplier), delta) <= epsilon

    while not fits(high):  # PRV adds its own error of 0.01, which is much where epsilon is small
        high *= 1.05
    low = high
    while low > LEAST_MULTIPLIER and fits(low):
        low, high = max(LEAST_MULTIPLIER, low * 0.93), low
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    # PLD is the nearer of both; where it is the larger one all the same, it decides.
    while (found := checked_epsilon(part(high), delta)) > epsilon:
        high *= 1 + _TOLERANCE
    return Calibration(high, found)
