"""What the releases of one data set add up to: the composed private part, and the list of what is not.

A function of the claims alone. Touches no file; the ledger writes it down and a policy limits it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from securefl.accountants import AGREEMENT, MOST_STEPS, Sampled, composed_epsilon
from securefl.errors import BudgetExceeded, UsageError
from securefl.privacy import gaussian_epsilon, zcdp_epsilon
from securefl.release import (
    ROW,
    Adjacency,
    Claim,
    DistributedNoise,
    DpSgd,
    Independent,
    Noised,
    NonPrivate,
    Unit,
)

# Epsilon is about mu^2 / 2: at this mu some fifty million, and the root finder still has digits to work with.
_MAX_MU = 1e4
# Trainings of different noise or sampling rate in one account; each takes a tenth of a second to compose.
_MOST_SAMPLED = 256


class Account(BaseModel):
    """What the releases of a data set add up to.

    All of it is about one `unit`, whose rows are there or not there (`adjacency` add-remove) or are exchanged
    for another unit's (replace-one); None before the first private release that says. Releases that speak of
    other units or another adjacency have no common total and are refused. mu: of the Gaussian releases
    together, sqrt(sum of mu_i^2); exact (Dong, Roth and Su 2022, Corollary 3.3). sampled: the trainings by
    DP-SGD, composed by their privacy loss distributions. rho: of the zCDP releases together, sum of rho_i
    (Bun and Steinke 2016, Lemma 2.3); their claims are about exchanging all rows of the silo, so one unit is
    less. delta: the smallest that any claim names; private_epsilon: of the composition of all at that delta,
    which is no less than at any larger one. Both None before the first private release.
    nonprivate: the distinct reasons of the NonPrivate releases, nonprivate_releases their number.
    simulated: some noise came from a seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    private_epsilon: float | None = Field(default=None, ge=0)
    delta: float | None = Field(default=None, gt=0, lt=1)
    mu: float = Field(default=0.0, ge=0)
    rho: float = Field(default=0.0, ge=0)
    sampled: tuple[Sampled, ...] = Field(default=(), max_length=_MOST_SAMPLED)
    unit: Unit = ROW
    adjacency: Adjacency = "add-remove"
    nonprivate: tuple[str, ...] = ()
    nonprivate_releases: int = Field(default=0, ge=0)
    simulated: bool = False

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is newer than the first ledgers is written only where it is used: they stay canonical."""
        document: dict[str, Any] = handler(self)
        for name in _LATER:
            if getattr(self, name) == type(self).model_fields[name].default:
                document.pop(name, None)
        return document

    @property
    def epsilon(self) -> float | None:
        """Of everything that left; None while a NonPrivate release is among it: no finite epsilon."""
        return None if self.nonprivate else self.private_epsilon

    def with_claim(self, claim: Claim) -> Account:
        """The account after one more release. Raises BudgetExceeded where its noise is none."""
        if isinstance(claim, Independent):
            return self
        if isinstance(claim, NonPrivate):
            known = claim.reason in self.nonprivate
            return self.model_copy(
                update={
                    "nonprivate": self.nonprivate if known else (*self.nonprivate, claim.reason),
                    "nonprivate_releases": self.nonprivate_releases + 1,
                }
            )
        mu, rho, sampled = self.mu, self.rho, self.sampled
        match claim:
            case DpSgd():
                sampled = _with_steps(self, claim)
            case DistributedNoise():
                rho += claim.rho
            case _:
                mu = math.hypot(mu, claim.mu)
        about = self._about(claim)
        delta = claim.delta if self.delta is None else min(self.delta, claim.delta)
        if _whole_mu(mu, rho) > _MAX_MU:
            raise BudgetExceeded(
                f"the releases of this data set together have mu {_whole_mu(mu, rho):.3g}: their noise "
                "protects nothing",
                "datasets",
            )
        return self.model_copy(
            update={
                "private_epsilon": _composed_epsilon(mu, rho, sampled, delta),
                "delta": delta,
                "mu": mu,
                "rho": rho,
                "sampled": sampled,
                "unit": about[0],
                "adjacency": about[1],
                "simulated": self.simulated or claim.simulated,
            }
        )

    @property
    def says_unit(self) -> bool:
        """Whether some release so far is about a unit; one about the whole silo covers every unit."""
        return self.mu > 0 or bool(self.sampled)

    def _about(self, claim: Noised) -> tuple[str, Adjacency]:
        """The unit and adjacency of the account with `claim`. Raises BudgetExceeded where they differ."""
        if isinstance(claim, DistributedNoise):
            return self.unit, self.adjacency
        found = (claim.unit, claim.adjacency)
        if self.says_unit and found != (self.unit, self.adjacency):
            raise BudgetExceeded(
                f"this data set's account is for each {self.unit} under {self.adjacency}, and this release "
                f"for each {claim.unit} under {claim.adjacency}: they have no common epsilon; go on with the "
                "unit and adjacency it began with",
                "datasets",
            )
        return found

    def private_epsilon_at(self, delta: float) -> float:
        """Epsilon of all private releases together at another delta than the account's own."""
        return _composed_epsilon(self.mu, self.rho, self.sampled, delta)

    def matches(self, other: Account) -> bool:
        """Equal up to rounding, which differs between machines' mathematics libraries."""
        rest = set(Account.model_fields) - set(_FIGURES) - {"private_epsilon"}
        return (
            self._near_epsilon(other.private_epsilon)
            and all(_near(getattr(self, name), getattr(other, name)) for name in _FIGURES)
            and all(getattr(self, name) == getattr(other, name) for name in rest)
        )

    def _near_epsilon(self, other: float | None) -> bool:
        """Rounding aside; where distributions were composed, what two versions of a library may differ by."""
        own = self.private_epsilon
        if own is None or other is None or not self.sampled:
            return _near(own, other)
        relative, absolute = AGREEMENT
        return math.isclose(own, other, rel_tol=relative, abs_tol=absolute)

    def covers(self, other: Account) -> bool:
        """Whether this can be what `other` became by more claims: no total is lower, and the figures agree.

        Rounding aside, as in `matches`.
        """
        figures: tuple[float | None, float | None]
        if self.mu == 0 and self.rho == 0 and not self.sampled:
            figures = (None, None)
        elif self.delta is None or _whole_mu(self.mu, self.rho) > _MAX_MU:
            return False
        else:
            try:
                figures = (self.private_epsilon_at(self.delta), self.delta)
            except BudgetExceeded:
                return False
        return (
            self._near_epsilon(figures[0])
            and _near(self.delta, figures[1])
            and (self.mu >= other.mu or _near(self.mu, other.mu))
            and (self.rho >= other.rho or _near(self.rho, other.rho))
            and all(_steps(self).get(key, 0) >= steps for key, steps in _steps(other).items())
            and (not other.says_unit or (self.unit, self.adjacency) == (other.unit, other.adjacency))
            and (other.delta is None or (self.delta is not None and self.delta <= other.delta))
            and set(self.nonprivate) >= set(other.nonprivate)
            and self.nonprivate_releases >= max(other.nonprivate_releases, len(self.nonprivate))
            and bool(self.nonprivate) == bool(self.nonprivate_releases)
            and (self.simulated or not other.simulated)
        )


_FIGURES = ("delta", "mu", "rho")
_LATER = ("rho", "sampled", "unit", "adjacency")


def _steps(account: Account) -> dict[tuple[float, float], int]:
    """Steps of DP-SGD by noise multiplier and sample rate."""
    return {(part.noise_multiplier, part.sample_rate): part.steps for part in account.sampled}


def _with_steps(account: Account, claim: DpSgd) -> tuple[Sampled, ...]:
    """`account.sampled` with a training's steps; those of the same noise and sampling count together."""
    steps = _steps(account)
    key = (claim.noise_multiplier, claim.sample_rate)
    steps[key] = min(steps.get(key, 0) + claim.steps, MOST_STEPS + 1)
    if steps[key] > MOST_STEPS:
        raise BudgetExceeded(
            f"this data set was trained on for more than {MOST_STEPS} steps, and an account holds no more; "
            "use another sample rate",
            "datasets",
        )
    if len(steps) > _MOST_SAMPLED:
        raise BudgetExceeded(
            f"this data set was trained on with {_MOST_SAMPLED} different noises or sampling rates, and an "
            "account holds no more; train with one of those again",
            "datasets",
        )
    return tuple(
        Sampled(noise_multiplier=noise, sample_rate=rate, steps=count)
        for (noise, rate), count in steps.items()
    )


def _whole_mu(mu: float, rho: float) -> float:
    """The mu of the Gaussian mechanism whose zCDP is that of both parts."""
    return math.hypot(mu, math.sqrt(2 * rho))


def _composed_epsilon(mu: float, rho: float, sampled: tuple[Sampled, ...], delta: float) -> float:
    """Exact for Gaussian releases alone; an upper bound with others among them.

    With zCDP ones, Gaussian ones count as (mu^2/2)-zCDP (Bun and Steinke 2016, Proposition 1.6). Of trainings
    and zCDP releases each has half of delta, and their epsilons add up (basic composition).
    """
    if not sampled:
        return gaussian_epsilon(mu, delta) if rho == 0 else zcdp_epsilon(mu**2 / 2 + rho, delta)
    if rho == 0:
        return composed_epsilon(mu, sampled, delta)
    return composed_epsilon(mu, sampled, delta / 2) + zcdp_epsilon(rho, delta / 2)


def _near(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-8)


def only_account(accounts: Mapping[str, Account]) -> Account:
    """The one account, or an empty one for none. Raises UsageError where there are several."""
    if len(accounts) > 1:
        raise UsageError(f"the ledger has an account for each of several data sets: {', '.join(accounts)}")
    return next(iter(accounts.values()), Account())
