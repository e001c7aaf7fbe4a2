"""What the releases of one data set add up to: the composed private part, and the list of what is not.

A function of the claims alone. Touches no file; the ledger writes it down and a policy limits it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from securefl.errors import BudgetExceeded, UsageError
from securefl.privacy import gaussian_epsilon
from securefl.release import GaussianSums, NonPrivate

# Epsilon is about mu^2 / 2: at this mu some fifty million, and the root finder still has digits to work with.
_MAX_MU = 1e4


class Account(BaseModel):
    """What the releases of a data set add up to.

    mu: of the Gaussian releases together, sqrt(sum of mu_i^2); exact (Dong, Roth and Su 2022, Corollary
    3.3). delta: the smallest that any of their claims names; private_epsilon: of their composition at that
    delta, which is no less than at any larger one. Both None before the first private release.
    nonprivate: the distinct reasons of the NonPrivate releases, nonprivate_releases their number.
    simulated: some noise came from a seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    private_epsilon: float | None = Field(default=None, ge=0)
    delta: float | None = Field(default=None, gt=0, lt=1)
    mu: float = Field(default=0.0, ge=0)
    nonprivate: tuple[str, ...] = ()
    nonprivate_releases: int = Field(default=0, ge=0)
    simulated: bool = False

    @property
    def epsilon(self) -> float | None:
        """Of everything that left; None while a NonPrivate release is among it: no finite epsilon."""
        return None if self.nonprivate else self.private_epsilon

    def with_claim(self, claim: NonPrivate | GaussianSums) -> Account:
        """The account after one more release. Raises BudgetExceeded where its noise is none."""
        if isinstance(claim, NonPrivate):
            known = claim.reason in self.nonprivate
            return self.model_copy(
                update={
                    "nonprivate": self.nonprivate if known else (*self.nonprivate, claim.reason),
                    "nonprivate_releases": self.nonprivate_releases + 1,
                }
            )
        mu = math.hypot(self.mu, claim.mu)
        delta = claim.delta if self.delta is None else min(self.delta, claim.delta)
        if mu > _MAX_MU:
            raise BudgetExceeded(
                f"the releases of this data set together have mu {mu:.3g}: their noise protects nothing",
                "datasets",
            )
        epsilon = gaussian_epsilon(mu, delta)
        return self.model_copy(
            update={
                "private_epsilon": epsilon,
                "delta": delta,
                "mu": mu,
                "simulated": self.simulated or claim.simulated,
            }
        )

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
        if self.mu == 0:
            figures = (None, None)
        elif self.delta is None or self.mu > _MAX_MU:
            return False
        else:
            figures = (gaussian_epsilon(self.mu, self.delta), self.delta)
        return (
            _near(self.private_epsilon, figures[0])
            and _near(self.delta, figures[1])
            and (self.mu >= other.mu or _near(self.mu, other.mu))
            and (other.delta is None or (self.delta is not None and self.delta <= other.delta))
            and set(self.nonprivate) >= set(other.nonprivate)
            and self.nonprivate_releases >= max(other.nonprivate_releases, len(self.nonprivate))
            and bool(self.nonprivate) == bool(self.nonprivate_releases)
            and (self.simulated or not other.simulated)
        )


_FIGURES = ("private_epsilon", "delta", "mu")


def _near(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-8)


def only_account(accounts: Mapping[str, Account]) -> Account:
    """The one account, or an empty one for none. Raises UsageError where there are several."""
    if len(accounts) > 1:
        raise UsageError(f"the ledger has an account for each of several data sets: {', '.join(accounts)}")
    return next(iter(accounts.values()), Account())
