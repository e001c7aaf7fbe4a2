"""Which findings stand for the rest: the worst of an attack, of a question, and of a centroid.

It sorts and picks what `Audit` objects hold; it writes no words and draws nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attacks.findings import Audit, Finding
from securefl.report.page import clean

Audits = Sequence[tuple[str, Audit]]

_SEVERITY: Mapping[str, int] = {"none_shown": 0, "leaks": 1, "violates_claim": 2}
# The ways to score one attack, which its name ends in.
_WAYS = frozenset({"likelihood ratio", "dot product", "loss", "LiRA", "LiRA, offline", "RMIA"})
_FPR = 0.01  # of the shares of rows found
_CENTROID = re.compile(r"centroid (\d{1,6})\b")


def number_in(value: object) -> float | None:
    """A finite number of a finding's details; None for anything else that stands there."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def worst_first(finding: Finding) -> tuple[int, float]:
    """A sorting key: the gravest verdict first, then the largest lift over the baseline."""
    lift = finding.value - finding.baseline
    return -_SEVERITY[finding.verdict], -lift if math.isfinite(lift) else math.inf


def farthest_first(finding: Finding) -> tuple[bool, float]:
    """A sorting key of one metric: a broken claim, then the largest lift, whatever its own verdict is."""
    return finding.verdict != "violates_claim", worst_first(finding)[1]


def most_telling(finding: Finding) -> tuple[int, float]:
    """The same over several metrics: the lift that is sure, as a share of all that guessing leaves."""
    lift, left = finding.ci[0] - finding.baseline, max(1 - finding.baseline, 1e-3)
    return worst_first(finding)[0], -lift / left if math.isfinite(lift) else math.inf


def metric_key(finding: Finding) -> str:
    """The metric's name in lower case with underscores."""
    return finding.metric.lower().replace(" ", "_").replace("-", "_")


def is_recall(finding: Finding) -> bool:
    """Whether the finding is the share of all tokens read back (not of rare ones or planted names)."""
    return metric_key(finding) == "token_recall"


def is_membership(finding: Finding) -> bool:
    """Whether the finding is the AUC of a membership attack."""
    return metric_key(finding) == "auc" and "member" in finding.attack.lower()


def is_hypothetical(finding: Finding) -> bool:
    """Whether the attack asks what would be seen if a row left between two rounds, which none may have."""
    return "a row that left" in finding.attack


def leaking(audit: Audit) -> list[Finding]:
    """Findings above guessing that bear on a question which leaks over all findings together.

    An answer widens every interval by how many there are (`attacks.judgement.judge`); a finding has its own.
    """
    answers = {question for question, verdict in audit.verdicts if verdict != "none_shown"}
    return [
        f for f in audit.findings
        if f.verdict == "violates_claim" or (f.verdict == "leaks" and answers.intersection(f.bears_on))
    ]  # fmt: skip


def family(attack: str) -> str:
    """The name of an attack without the way in which its scores were made."""
    parts = attack.split(", ")
    for end in (2, 1):
        if len(parts) > end and ", ".join(parts[-end:]) in _WAYS:
            return ", ".join(parts[:-end])
    return attack


@dataclass(frozen=True)
class Row:
    """The worst finding of one attack and metric in one run; `low` to `high` over all silos and rounds.

    leaking: how many of the findings lie above guessing, of which the worst need not be one (few trials).
    """

    run: str
    worst: Finding
    low: float
    high: float
    findings: int
    leaking: int


def worst_rows(audits: Audits, ways: bool = True) -> list[Row]:
    """One row an attack, metric and run, in the order of the attacks' numbers, then of the audits.

    ways: a row for each way to score an attack; else the worst of them.
    """
    groups: dict[tuple[int, str, str, int], list[Finding]] = {}
    for index, (_, audit) in enumerate(audits):
        for finding in audit.findings:
            name = finding.attack if ways else family(finding.attack)
            groups.setdefault((finding.number, name, finding.metric, index), []).append(finding)
    rows = []
    for key in sorted(groups):
        found = groups[key]
        values = [finding.value for finding in found]
        leaking = sum(finding.verdict != "none_shown" for finding in found)
        worst, name = min(found, key=farthest_first), clean(audits[key[3]][0], 40)
        rows.append(Row(name, worst, min(values), max(values), len(found), leaking))
    return rows


def worst_of(audit: Audit, question: str, told: Collection[int] = ()) -> Finding | None:
    """The finding that says most about a question; None where none bears on it.

    told: attacks that a reader was told of already; another that is as grave is more to learn from. An
    attack on what need not have happened comes last of those that are as grave.
    """
    found = [f for f in audit.findings if question in f.bears_on]
    return min(
        found,
        key=lambda f: (worst_first(f)[0], is_hypothetical(f), f.number in told, most_telling(f)[1]),
        default=None,
    )


@dataclass(frozen=True)
class Subject:
    """One centroid and how much of what is behind it was found or read.

    kind: `rows`, the share of its rows that score above 99 of 100 strangers' (attack 1), or `words`, the
    share of its words that were read (attack 2). rows: as released. parts: how many rows or words are behind.
    """

    silo: str
    round: int
    centroid: int
    kind: str
    rows: float
    share: float
    guess: float
    parts: int


def subjects(audit: Audit) -> list[Subject]:
    """Every centroid that an attack was judged on by itself, the most exposed first."""
    found: dict[tuple[str, int, int, str], Subject] = {}
    for finding in audit.findings:
        entries = finding.details.get("by_centroid")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping):
                number, rows, share, parts = (
                    entry.get(key) for key in ("centroid", "rows", "found", "members")
                )
                _add(found, finding, "rows", number, rows, share, _FPR, parts)
        place = _CENTROID.search(finding.target)
        if place is not None and is_recall(finding):
            rows, value = finding.details.get("rows"), finding.value
            _add(found, finding, "words", int(place[1]), rows, value, finding.baseline, finding.trials)
    return sorted(found.values(), key=lambda s: (-s.share, s.rows, s.silo, s.round, s.centroid))


def _add(
    found: dict[tuple[str, int, int, str], Subject],
    finding: Finding,
    kind: str,
    centroid: object,
    rows: object,
    share: object,
    guess: float,
    parts: object,
) -> None:
    known = [number_in(value) for value in (centroid, rows, share, guess, parts)]
    if any(value is None for value in known):
        return
    number, size, value, base, behind = (float(value or 0.0) for value in known)
    if size > 0 and 0 <= value <= 1 and 0 <= number < 1e6 and 0 < behind < 1e12:
        one = Subject(finding.silo, finding.round, int(number), kind, size, value, base, int(behind))
        found.setdefault((one.silo, one.round, one.centroid, kind), one)
