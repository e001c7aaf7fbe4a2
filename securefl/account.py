"""What a silo's releases add up to: the composed private part, and the list of what is not private.

A function of the claims alone. Touches no file; the ledger writes it down and a policy limits it.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from securefl.errors import BudgetExceeded
from securefl.privacy import gaussian_epsilon
from securefl.release import GaussianSums, NonPrivate

# Epsilon is about mu^2 / 2: at this mu some fifty million, and the root finder still has digits to work with.
_MAX_MU = 1e4


class Account(BaseModel):
    """What a silo's releases add up to.

    mu: of the Gaussian releases together, sqrt(sum of mu_i^2); exact (Dong, Roth and Su 2022, Corollary
    3.3). delta: the smallest that any of their claims names; private_epsilon: of their composition at that
    delta, which is no less than at any larger one. Both None before the first private release.
    nonprivate: the distinct reasons of the NonPrivate releases, nonprivate_releases their number.
    simulated: some noise came from a seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    private_epsilon: float | None = None
    delta: float | None = None
    mu: float = 0.0
    nonprivate: tuple[str, ...] = ()
    nonprivate_releases: int = 0
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
                f"the releases of this silo together have mu {mu:.3g}: their noise protects nothing"
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

        def near(a: float | None, b: float | None) -> bool:
            return a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-8)

        figures = ("private_epsilon", "delta", "mu")
        rest = set(Account.model_fields) - set(figures)
        return all(near(getattr(self, name), getattr(other, name)) for name in figures) and all(
            getattr(self, name) == getattr(other, name) for name in rest
        )
