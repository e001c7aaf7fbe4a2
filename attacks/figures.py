"""A figure of an attack before it is judged, and the finding that it becomes.

A figure keeps what its interval is made of, so that the audit can widen it by the number of findings and that
it can be kept on disk between two runs of an audit. Numbers only: no files, no models.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter
from scipy.stats import chi2

from attacks.adversary import Adversary
from attacks.bounds import ALPHA, auc, auc_interval, lower_bound, ratio_interval, tpr_at, tpr_cap, upper_bound
from attacks.findings import Finding, Question, Verdict
from attacks.one_run import gaussian_mu_lower_bound_one_run
from attacks.runs import Recorded
from securefl.release import Claim, Noised

# Below this an interval spans nearly everything; the attack is then reported as not run, never as 0.
MIN_TRIALS = 8
NO_CLAIM = "no differential privacy is claimed, so nothing is bounded"
NO_NOISE = "under the noise that is claimed sums do not add up, so there is less of it, or none"
UNBOUNDED = "(epsilon, delta) does not bound this figure"
_CURVE = 64
_MOST_RATIO = 1e6  # of noise that is not there

Floats = Annotated[
    NDArray[np.float64],
    PlainValidator(lambda value: np.asarray(value, np.float64)),
    PlainSerializer(lambda value: value.tolist()),
]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Auc:
    """Area under the ROC curve of scores, larger meaning member. members: (n1,), others: (n0,)."""

    members: Floats
    others: Floats
    kind: Literal["auc"] = "auc"

    @property
    def value(self) -> float:
        return auc(self.members, self.others)

    @property
    def trials(self) -> int:
        return len(self.members) + len(self.others)

    def interval(self, alpha: float) -> tuple[float, float]:
        return auc_interval(self.members, self.others, alpha)

    def curve(self) -> Points:
        """The ROC curve as (false-positive rate, true-positive rate), at most 64 points."""
        edges = np.unique(np.concatenate([self.members, self.others]))[::-1]
        if len(edges) > _CURVE:
            # Evenly among the other rows' scores and among the members', so neither rate jumps.
            ends = [np.quantile(side, np.linspace(1, 0, _CURVE // 2)) for side in (self.members, self.others)]
            edges = np.unique(np.concatenate(ends))[::-1]
        points = [(0.0, 0.0)]
        points += [
            (float((self.others >= edge).mean()), float((self.members >= edge).mean())) for edge in edges
        ]
        return tuple(dict.fromkeys([*points, (1.0, 1.0)]))


@dataclass(frozen=True)
class RateAt:
    """True-positive rate of the same scores at the false-positive rate `fpr`."""

    members: Floats
    others: Floats
    fpr: float
    kind: Literal["rate"] = "rate"

    @property
    def value(self) -> float:
        return tpr_at(self.members, self.others, self.fpr).value

    @property
    def trials(self) -> int:
        return len(self.members) + len(self.others)

    def interval(self, alpha: float) -> tuple[float, float]:
        at = tpr_at(self.members, self.others, self.fpr, alpha)
        return at.low, at.high


@dataclass(frozen=True)
class Ratio:
    """sum(hits) / sum(totals) over units (n,), with a bootstrap over units that `seed` makes repeatable."""

    hits: Floats
    totals: Floats
    trials: int
    seed: int
    kind: Literal["ratio"] = "ratio"

    @property
    def value(self) -> float:
        return float(self.hits.sum() / self.totals.sum())

    def interval(self, alpha: float) -> tuple[float, float]:
        return ratio_interval(self.hits, self.totals, np.random.default_rng(self.seed), alpha)


@dataclass(frozen=True)
class Proportion:
    """`right` of `trials` independent trials, with Clopper and Pearson's interval."""

    right: int
    trials: int
    kind: Literal["proportion"] = "proportion"

    @property
    def value(self) -> float:
        return self.right / self.trials

    def interval(self, alpha: float) -> tuple[float, float]:
        low, high = (end(self.right, self.trials, alpha / 2) for end in (lower_bound, upper_bound))
        return low, high


@dataclass(frozen=True)
class NoiseRatio:
    """Claimed over found standard deviation of Gaussian noise: 1 as claimed, more where there is less of it.

    squares: sum over `trials` numbers of the noise found, each over the claimed deviation, squared.
    """

    squares: float
    trials: int
    kind: Literal["noise"] = "noise"

    @property
    def value(self) -> float:
        return min(_MOST_RATIO, math.sqrt(self.trials / max(self.squares, 1e-300)))

    def interval(self, alpha: float) -> tuple[float, float]:
        """Exact, by the chi-square law of the sample variance."""
        ends = (chi2.ppf(alpha / 2, self.trials), chi2.ppf(1 - alpha / 2, self.trials))
        low, high = (min(_MOST_RATIO, math.sqrt(float(end) / max(self.squares, 1e-300))) for end in ends)
        return low, high


@dataclass(frozen=True)
class Distance:
    """Kolmogorov-Smirnov distance of `trials` numbers from the law that is claimed for them."""

    value: float
    trials: int
    kind: Literal["distance"] = "distance"

    def half(self, alpha: float) -> float:
        """Half the interval's width (Dvoretzky, Kiefer and Wolfowitz 1956; Massart 1990)."""
        return math.sqrt(math.log(2 / alpha) / (2 * self.trials))

    def interval(self, alpha: float) -> tuple[float, float]:
        return max(0.0, self.value - self.half(alpha)), min(1.0, self.value + self.half(alpha))


Measure = Auc | RateAt | Ratio | Proportion | NoiseRatio | Distance


@dataclass(frozen=True)
class OneRunTest:
    """Whether guesses about `canaries` coins refute a claim of mu-Gaussian DP (Mahloujifar et al. 2024)."""

    right: int
    guesses: int
    canaries: int
    claim_mu: float

    def refuted(self, alpha: float) -> bool:
        return gaussian_mu_lower_bound_one_run(self.right, self.guesses, self.canaries, alpha) > self.claim_mu


@dataclass(frozen=True)
class Figure:
    """A finding before the judgement.

    silo, round: of the release attacked, the last one where there are several. measure: what its value and
    its intervals are made of. bears_on: the questions it answers. control: what the same attack scores where
    it has nothing to find, on rows that were not in the data or a release without any. cap: the most that the
    claim allows, with cap_curve, (FPR, TPR), where the figure has a ROC curve. broken: a test that refutes
    the claim by other means than the cap. texts: what was read back, in words, the best first.
    """

    _: KW_ONLY
    attack: str
    number: int
    adversary: Adversary
    target: str
    silo: str
    round: int
    metric: str
    measure: Measure = field(repr=False)
    baseline: float
    claim_epsilon: float | None
    bears_on: tuple[Question, ...]
    cap: float | None = None
    cap_reason: str | None = None
    cap_curve: Points = ()
    epsilon_lower_bound: float | None = None
    adjacency: str | None = None
    control: float | None = None
    broken: OneRunTest | None = None
    texts: tuple[str, ...] = field(default=(), repr=False)
    details: dict[str, Any] = field(default_factory=dict)

    def without_texts(self) -> Figure:
        """The same, saying only how many texts were read back."""
        if not self.texts:
            return self
        return replace(self, texts=(), details={**self.details, "texts_withheld": len(self.texts)})

    def verdict(self, alpha: float) -> Verdict:
        low = self.measure.interval(alpha)[0]
        refuted = self.broken is not None and self.broken.refuted(alpha)
        if refuted or (self.cap is not None and low > self.cap):
            return "violates_claim"
        # What the same attack scores where it has nothing to find was not read, whatever guessing scores.
        return "leaks" if low > max(self.baseline, self.control or 0.0) else "none_shown"

    def finding(self) -> Finding:
        return Finding(
            attack=self.attack,
            number=self.number,
            adversary=self.adversary.describe(),
            knowledge=list(self.adversary.knowledge),
            target=self.target,
            silo=self.silo,
            round=self.round,
            metric=self.metric,
            value=self.measure.value,
            ci=self.measure.interval(ALPHA),
            baseline=self.baseline,
            cap=self.cap,
            cap_reason=self.cap_reason,
            trials=self.measure.trials,
            claim_epsilon=self.claim_epsilon,
            epsilon_lower_bound=self.epsilon_lower_bound,
            adjacency=self.adjacency,
            verdict=self.verdict(ALPHA),
            bears_on=list(self.bears_on),
            control=self.control,
            claim_compared=self.cap is not None or self.broken is not None,
            curve=list(self.measure.curve()) if isinstance(self.measure, Auc) else [],
            cap_curve=list(self.cap_curve),
            texts=list(self.texts),
            details={**self.details, "nist_class": self.adversary.nist},
        )


FIGURES: TypeAdapter[list[Figure]] = TypeAdapter(
    list[Figure], config=ConfigDict(arbitrary_types_allowed=True, ser_json_inf_nan="constants")
)


def at(recorded: Recorded, claim: Claim) -> dict[str, Any]:
    """silo, round and claim_epsilon of a `Figure` on one release."""
    epsilon = claim.epsilon if isinstance(claim, Noised) else None
    return {"silo": recorded.silo, "round": recorded.row.round, "claim_epsilon": epsilon}


def gaussian_curve(mu: float) -> Points:
    """(FPR, largest TPR) that a mu-Gaussian-DP mechanism allows."""
    grid = np.unique(np.concatenate([np.geomspace(1e-4, 0.1, 16), np.linspace(0.1, 1, 19)]))
    return ((0.0, 0.0), *((float(fpr), tpr_cap(mu, float(fpr))) for fpr in grid))
