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
    cap or in the way that `cap_reason` says, so where the verdict is `leaks` the claim held.
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


class NotRun(_Row):
    attack: str
    why: str


class Audit(_Row):
    """The whole of audit.json. `schema_` is written as `schema`.

    untested: questions that no finding bears on; `none_shown` says nothing of them.
    weights_claimed: all weights that left, and all opened sums of them, did so under a claim.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["securefl.audit/1"] = Field("securefl.audit/1", alias="schema")
    run: str
    method: str
    seed: int
    releases: list[AuditedRelease]
    findings: list[Finding]
    bounds: list[Bound]
    verdicts: Verdicts
    not_run: list[NotRun]
    weights_claimed: bool = False
    untested: list[Question] = []
    warning: str = (
        "An attack that finds nothing proves nothing: these attacks are a lower bound on what can be read."
    )
    versions: dict[str, str]

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2)
