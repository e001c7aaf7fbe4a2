"""What an audit collects, and how its findings answer the three questions.

Decides nothing from a text or a file: figures in, an `Audit` out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from attacks.bounds import ALPHA
from attacks.evidence import Evidence
from attacks.figures import Figure
from attacks.findings import Audit, AuditedRelease, Bound, NotRun, Question, Verdict, Verdicts
from attacks.runs import CENTROIDS, Recorded, Run
from securefl.release import GaussianSums, PayloadKind
from securefl.report.claims import unbounded_weights
from securefl.result import versions

_NOISED = GaussianSums.model_fields["mechanism"].default
LIBRARIES = ("securefl", "torch", "transformers", "scikit-learn", "scipy", "numpy")
_SEVERITY: tuple[Verdict, ...] = ("none_shown", "leaks", "violates_claim")


@dataclass
class Book:
    """What an audit collects on its way."""

    figures: list[Figure] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)

    def skip(self, attack: str, recorded: Recorded, why: str) -> None:
        self.not_run.append(NotRun(attack=attack, why=f"{recorded.silo}, round {recorded.row.round}: {why}"))


def attacks_left(evidence: Evidence, book: Book) -> None:
    """Runs without anything to attack, and what this version does not run on releases of these kinds."""
    run = evidence.run
    kinds = {one.row.kind for one in run.releases}
    if not kinds:
        why = "nothing left the silos, so there is nothing to attack"
        if run.result.method != "standalone":
            why = "no release was recorded in the run's folder"
        book.not_run.append(NotRun(attack="all", why=why))
        return
    if run.result.sums:
        kinds.add(PayloadKind.SUM.value)
    if kinds & set(CENTROIDS):
        noised = any(one.row.claim.get("mechanism") == _NOISED for one in run.releases)
        why = "no centroid was released with noise, so there is no mechanism to audit"
        if noised:
            why = "it needs releases of its own: `securefl-audit mechanism` audits the noise on the sums"
        book.not_run.append(NotRun(attack="mechanism audit (3)", why=why))
    book.not_run += [NotRun(attack=name, why="not in this version") for name in _later(kinds)]


def _later(kinds: set[str]) -> Iterator[str]:
    if kinds & set(CENTROIDS):
        yield from ("attribute probe (13)", "membership over several rounds (6)")
    if PayloadKind.CENTROIDS.value in kinds:
        yield from ("bag-of-words probe (5)", "search of a text pool (8)", "embedding inversion (9, 10)")
    if kinds & {PayloadKind.MODEL.value, PayloadKind.SUM.value}:
        yield from ("subtraction from an aggregate (7)", "membership in a trained model (12)")


def worst(verdicts: list[Verdict]) -> Verdict:
    return max(verdicts, key=_SEVERITY.index, default="none_shown")


def judge(run: Run, inventory: list[AuditedRelease], book: Book) -> Audit:
    """Findings and the three questions, each answered by its worst finding.

    A finding is judged by its own 95 % interval. The three answers look at all findings together, so there
    each interval is widened to 1 - .05 / (number of findings) (Bonferroni): else one of many would leak by
    chance.
    """
    alpha = ALPHA / max(1, len(book.figures))
    answers: dict[Question, list[Verdict]] = {"singling_out": [], "linkability": [], "inference": []}
    for figure in book.figures:
        verdict = figure.verdict(alpha)
        for question in figure.bears_on:
            answers[question].append(verdict)
    return Audit(
        run=run.result.run,
        method=run.result.method,
        seed=run.result.seed,
        releases=inventory,
        findings=[figure.finding() for figure in book.figures],
        bounds=book.bounds,
        verdicts=Verdicts(**{question: worst(found) for question, found in answers.items()}),
        not_run=book.not_run,
        untested=[question for question, found in answers.items() if not found],
        weights_claimed=not unbounded_weights(run.result),
        versions=versions(LIBRARIES),
    )
