"""Attack 3 on mechanisms with planted faults: each violates its claim, and the real one does not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attacks.mechanism import MechanismAudit, Noising, audit_mechanism, released_sums
from attacks.planted import DELTA, PRESENCE, SUMS, audit_presence, deaf, kept_by_release
from attacks.selftest.check import Check
from securefl.privacy import noise_source

_TRIALS = 4000


def mechanism_checks(rng: np.random.Generator) -> Iterator[Check]:
    """The real noised sums, noise alone, and all faults of `attacks.planted`. rng: of the auditor."""
    noise = noise_source(3)

    def audit(noising: Noising) -> MechanismAudit:
        return audit_mechanism(1.0, 1.0, DELTA, _TRIALS, noise=noise, rng=rng, noising=noising)

    real, quiet = audit(released_sums), audit(deaf)
    yield Check(
        name="mechanism (3): as it is",
        what="the real noised sums are within their claim, and most of it is found",
        passed=real.verdict == "none_shown" and real.mu_lower_bound > 0.7,
        expected="mu .7 to 1",
        measured=f"{real.mu_lower_bound:.3f}",
    )
    yield Check(
        name="mechanism (3): noise alone",
        what="sums that hold nothing of the rows show nothing",
        passed=quiet.mu_lower_bound == 0 and quiet.epsilon_lower_bound_cp == 0,
        expected="mu 0",
        measured=f"{quiet.mu_lower_bound:.3f}",
    )
    for name, fault in SUMS.items():
        found = fault.audit(noise, rng)
        yield Check(
            name=f"fault (3): {name}",
            what="a planted fault of the noised sums is called a violation of their claim",
            passed=found.verdict == "violates_claim",
            expected=f"mu > {found.claim_mu:.2f}",
            measured=f"{found.mu_lower_bound:.2f}",
        )
    for name, (keeping, rows) in PRESENCE.items():
        bad, good = audit_presence(keeping, rows, noise), audit_presence(kept_by_release, rows, noise)
        yield Check(
            name=f"fault (3): {name}",
            what="a centroid that is there for one row is called a violation, and the real decision is not",
            passed=bad.violates_claim and not good.violates_claim,
            expected=f"mu > {bad.claim_mu:g}, really not",
            measured=f"{bad.mu_lower_bound:.2f}, really {good.mu_lower_bound:.2f}",
        )
