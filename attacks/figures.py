"""A figure of an attack before it is judged, and the finding that it becomes.

A figure keeps its interval as a function of alpha, so that the audit can widen it by the number of findings.
Numbers only: no files, no models, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attacks.adversary import Adversary
from attacks.bounds import ALPHA
from attacks.findings import Finding, Question, Verdict
from attacks.runs import Recorded
from securefl.release import Claim, Noised

Interval = Callable[[float], tuple[float, float]]

# Below this an interval spans nearly everything; the attack is then reported as not run, never as 0.
MIN_TRIALS = 8
NO_CLAIM = "no differential privacy is claimed, so nothing is bounded"


@dataclass(frozen=True)
class Figure:
    """A finding before the judgement: its interval is a function of alpha, so it can be widened.

    bears_on: the questions it answers. control: what the same attack scores where it has nothing to find, on
    rows that were not in the data or a release without any. broken: whether the claim is refuted at
    confidence 1 - alpha by other means than the cap; None where there are none.
    """

    attack: str
    number: int
    adversary: Adversary
    target: str
    metric: str
    value: float
    interval: Interval
    baseline: float
    cap: float | None
    cap_reason: str | None
    trials: int
    epsilon_lower_bound: float | None
    adjacency: str | None
    recorded: Recorded
    claim: Claim
    details: Mapping[str, Any]
    bears_on: tuple[Question, ...]
    control: float | None
    broken: Callable[[float], bool] | None = None

    def verdict(self, alpha: float) -> Verdict:
        low = self.interval(alpha)[0]
        refuted = self.broken is not None and self.broken(alpha)
        if refuted or (self.cap is not None and low > self.cap):
            return "violates_claim"
        return "leaks" if low > self.baseline else "none_shown"

    def finding(self) -> Finding:
        epsilon = self.claim.epsilon if isinstance(self.claim, Noised) else None
        return Finding(
            attack=self.attack,
            number=self.number,
            adversary=self.adversary.describe(),
            knowledge=list(self.adversary.knowledge),
            target=self.target,
            silo=self.recorded.silo,
            round=self.recorded.row.round,
            metric=self.metric,
            value=self.value,
            ci=self.interval(ALPHA),
            baseline=self.baseline,
            cap=self.cap,
            cap_reason=self.cap_reason,
            trials=self.trials,
            claim_epsilon=epsilon,
            epsilon_lower_bound=self.epsilon_lower_bound,
            adjacency=self.adjacency,
            verdict=self.verdict(ALPHA),
            bears_on=list(self.bears_on),
            control=self.control,
            claim_compared=self.cap is not None or self.broken is not None,
            details={**self.details, "nist_class": self.adversary.nist},
        )
