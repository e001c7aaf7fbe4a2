"""The schema of `audit.json`: findings, bounds, verdicts, and what was not run.

Fields may be added, none renamed or removed. A finding without an interval, a baseline and the number of
trials cannot be written.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Verdict = Literal["none_shown", "leaks", "violates_claim"]
# Of the European guidance on anonymisation (WP 216): can one row be told from all others; can a text held
# elsewhere be tied to this silo's rows; can content be read that was not known before?
Question = Literal["singling_out", "linkability", "inference"]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


ALL_SILOS = "all silos"  # of a figure over all of them; no silo can be called so


class AuditedRelease(_Row):
    """One release of the inventory. `rows_per_centroid` as released (noisy under a claim)."""

    silo: str
    round: int
    kind: str
    file: str
    sha256: str
    readable_by: list[str]
    encoder: str
    rows_per_centroid: list[float] = []
    claim: dict[str, Any]


class Finding(_Row):
    """One figure of one attack.

    value, baseline and ci are in the metric's unit; ci is a 95 % interval. baseline: what guessing without
    the release scores. cap: the most the claim allows on this metric, None with `cap_reason` where it bounds
    nothing. verdict: `leaks` where the interval lies above the baseline, `violates_claim` above the cap.
    claim_epsilon None means no finite epsilon was claimed. bears_on: which questions it answers. control:
    what the same attack scores where it has nothing to find: on rows that were not in the data, or on a
    release without any; None where there is no such run. claim_compared: a claim bounds this figure, by its
    cap or in the way that `cap_reason` says, so where the verdict is `leaks` the claim held. curve,
    cap_curve: of an AUC, (false-positive rate, true-positive rate) of the attack and the most that the claim
    allows. texts: what was read back, in words, the best first; empty unless the auditor asked to see it.
    """

    attack: str
    number: int
    adversary: str
    knowledge: list[str]
    target: str
    silo: str
    round: int
    metric: str
    value: float
    ci: tuple[float, float]
    baseline: float
    cap: float | None
    cap_reason: str | None
    trials: int
    claim_epsilon: float | None
    epsilon_lower_bound: float | None
    adjacency: str | None = None
    verdict: Verdict
    bears_on: list[Question] = []
    control: float | None = None
    claim_compared: bool = False
    curve: list[tuple[float, float]] = []
    cap_curve: list[tuple[float, float]] = []
    texts: list[str] = []
    details: dict[str, Any] = {}


class Bound(_Row):
    """A proposition checked on what was really released."""

    name: str
    bound: float
    measured: float
    holds: bool
    vacuous: bool


class Verdicts(_Row):
    """The three questions of the European guidance, each answered by its worst finding."""

    singling_out: Verdict
    linkability: Verdict
    inference: Verdict


UNASKED = "it was not asked for"


class NotRun(_Row):
    attack: str
    why: str


class Overlap(_Row):
    """Texts of the pool that are also a silo's, which would make attacks fitted on the pool look stronger.

    pool: its texts. left_out: those of them that no attack used, since they share a passage with a row.
    """

    pool: int
    left_out: int


class Account(_Row):
    """What left one silo in all, as its ledger adds up.

    epsilon: of everything together, None where a release has no finite one (`no_finite_epsilon` says why) or
    nothing left. private_epsilon: of what has one. units, adjacencies: of the claims. trust: where noise is
    added, and who is trusted for it.
    """

    silo: str
    releases: int
    epsilon: float | None
    private_epsilon: float | None
    delta: float | None
    no_finite_epsilon: list[str]
    units: list[str]
    adjacencies: list[str]
    simulated: bool
    trust: str


class Utility(_Row):
    """Test accuracy of one silo's model: with what was shared, and alone without noise."""

    silo: str
    train_rows: int
    test_accuracy: float
    test_interval: tuple[float, float]
    baseline_accuracy: float


class Audit(_Row):
    """The whole of audit.json. `schema_` is written as `schema`.

    name: what the run is called beside its method, or the file that was audited.
    untested: questions that no finding bears on; `none_shown` says nothing of them.
    weights_claimed: all weights that left, and all opened sums of them, did so under a claim.
    overlap: None where no pool was read. channels: what leaves that no claim of these releases covers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["securefl.audit/1"] = Field("securefl.audit/1", alias="schema")
    run: str
    method: str
    name: str = ""
    seed: int
    releases: list[AuditedRelease]
    findings: list[Finding]
    bounds: list[Bound]
    verdicts: Verdicts
    not_run: list[NotRun]
    weights_claimed: bool = False
    untested: list[Question] = []
    overlap: Overlap | None = None
    accounts: list[Account] = []
    utility: list[Utility] = []
    channels: list[str] = []
    warning: str = (
        "An attack that finds nothing proves nothing: these attacks are a lower bound on what can be read."
    )
    versions: dict[str, str]

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2)
