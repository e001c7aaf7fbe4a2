"""What the releases of one data set add up to: the composed private part, and the list of what is not.

A function of the claims alone. Touches no file; the ledger writes it down and a policy limits it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from securefl.errors import BudgetExceeded, UsageError
from securefl.privacy import gaussian_epsilon, zcdp_epsilon
from securefl.release import Claim, GaussianSums, Independent, NonPrivate

# Epsilon is about mu^2 / 2: at this mu some fifty million, and the root finder still has digits to work with.
_MAX_MU = 1e4


class Account(BaseModel):
    """What the releases of a data set add up to.

    All of it is about one row, added or removed. mu: of the Gaussian releases together, sqrt(sum of mu_i^2);
    exact (Dong, Roth and Su 2022, Corollary 3.3). rho: of the zCDP releases together, sum of rho_i (Bun and
    Steinke 2016, Lemma 2.3); their claims are about exchanging all rows of the silo, so one row is less.
    delta: the smallest that any claim names; private_epsilon: of the composition of both at that delta,
    which is no less than at any larger one. Both None before the first private release.
    nonprivate: the distinct reasons of the NonPrivate releases, nonprivate_releases their number.
    simulated: some noise came from a seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    private_epsilon: float | None = Field(default=None, ge=0)
    delta: float | None = Field(default=None, gt=0, lt=1)
    mu: float = Field(default=0.0, ge=0)
    rho: float = Field(default=0.0, ge=0)
    nonprivate: tuple[str, ...] = ()
    nonprivate_releases: int = Field(default=0, ge=0)
    simulated: bool = False

    @model_serializer(mode="wrap")
    def _without_empty_rho(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written only where there is one: the ledgers from before there was a rho stay canonical."""
        document: dict[str, Any] = handler(self)
        if not self.rho:
            document.pop("rho", None)
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
        mu, rho = self.mu, self.rho
        if isinstance(claim, GaussianSums):
            mu = math.hypot(mu, claim.mu)
        else:
            rho += claim.rho
        delta = claim.delta if self.delta is None else min(self.delta, claim.delta)
        if _whole_mu(mu, rho) > _MAX_MU:
            raise BudgetExceeded(
                f"the releases of this data set together have mu {_whole_mu(mu, rho):.3g}: their noise "
                "protects nothing",
                "datasets",
            )
        return self.model_copy(
            update={
                "private_epsilon": _composed_epsilon(mu, rho, delta),
                "delta": delta,
                "mu": mu,
                "rho": rho,
                "simulated": self.simulated or claim.simulated,
            }
        )

    def private_epsilon_at(self, delta: float) -> float:
        """Epsilon of all private releases together at another delta than the account's own."""
        return _composed_epsilon(self.mu, self.rho, delta)

    def matches(self, other: Account) -> bool:
        """Equal up to rounding, which differs between machines' mathematics libraries."""
        rest = set(Account.model_fields) - set(_FIGURES)
        return all(_near(getattr(self, name), getattr(other, name)) for name in _FIGURES) and all(
            getattr(self, name) == getattr(other, name) for name in rest
        )

    def covers(self, other: Account) -> bool:
        """Whether this can be what `other` became by more claims: no total is lower, and the figures agree.

        Rounding aside, as in `matches`.
        """
        figures: tuple[float | None, float | None]
        if self.mu == 0 and self.rho == 0:
            figures = (None, None)
        elif self.delta is None or _whole_mu(self.mu, self.rho) > _MAX_MU:
            return False
        else:
            figures = (self.private_epsilon_at(self.delta), self.delta)
        return (
            _near(self.private_epsilon, figures[0])
            and _near(self.delta, figures[1])
            and (self.mu >= other.mu or _near(self.mu, other.mu))
            and (self.rho >= other.rho or _near(self.rho, other.rho))
            and (other.delta is None or (self.delta is not None and self.delta <= other.delta))
            and set(self.nonprivate) >= set(other.nonprivate)
            and self.nonprivate_releases >= max(other.nonprivate_releases, len(self.nonprivate))
            and bool(self.nonprivate) == bool(self.nonprivate_releases)
            and (self.simulated or not other.simulated)
        )


_FIGURES = ("private_epsilon", "delta", "mu", "rho")


def _whole_mu(mu: float, rho: float) -> float:
    """The mu of the Gaussian mechanism whose zCDP is that of both parts."""
    return math.hypot(mu, math.sqrt(2 * rho))


def _composed_epsilon(mu: float, rho: float, delta: float) -> float:
    """Exact for Gaussian releases alone; with others among them they count as (mu^2/2)-zCDP ones.

    Bun and Steinke 2016, Proposition 1.6: a Gaussian mechanism of mu has Renyi divergences alpha mu^2 / 2.
    """
    return gaussian_epsilon(mu, delta) if rho == 0 else zcdp_epsilon(mu**2 / 2 + rho, delta)


def _near(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-8)


def only_account(accounts: Mapping[str, Account]) -> Account:
    """The one account, or an empty one for none. Raises UsageError where there are several."""
    if len(accounts) > 1:
        raise UsageError(f"the ledger has an account for each of several data sets: {', '.join(accounts)}")
    return next(iter(accounts.values()), Account())
