"""What an audit collects, and how its findings answer the three questions.

Decides nothing from a text or a file: figures in, an `Audit` out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from attacks.bounds import ALPHA
from attacks.evidence import Evidence, Source
from attacks.figures import Figure
from attacks.findings import Audit, AuditedRelease, Bound, NotRun, Overlap, Question, Verdict, Verdicts
from attacks.kept import Kept
from attacks.runs import Recorded, Run
from securefl.report.claims import unbounded_weights
from securefl.result import versions

LIBRARIES = ("securefl", "torch", "transformers", "scikit-learn", "scipy", "numpy")
_SEVERITY: tuple[Verdict, ...] = ("none_shown", "leaks", "violates_claim")


@dataclass
class Book:
    """What an audit collects on its way. kept: where parts of it outlast a crash, or None.

    show_text: keep the texts that were read back; else only how many there were.
    """

    figures: list[Figure] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    kept: Kept | None = None
    show_text: bool = False

    def skip(self, attack: str, recorded: Recorded, why: str) -> None:
        self.skip_at(attack, f"{recorded.silo}, round {recorded.row.round}", why)

    def skip_at(self, attack: str, where: str, why: str) -> None:
        self.not_run.append(NotRun(attack=attack, why=f"{where}: {why}"))

    def part(self, name: str, work: Callable[[Book], None]) -> None:
        """Add what `work` finds, which is done only once for a name, over all runs of this audit.

        Texts that were read back are never kept, so where they are asked for the work is done again.
        """
        kept = None if self.show_text else self.kept
        found = None if kept is None else kept.load(name)
        if found is None:
            page = Book()
            work(page)
            if not self.show_text:
                page.figures = [figure.without_texts() for figure in page.figures]
            found = page.figures, page.bounds, page.not_run
            if kept is not None:
                kept.store(name, *found)
        figures, bounds, not_run = found
        self.figures += figures
        self.bounds += bounds
        self.not_run += not_run


def attacks_left(evidence: Evidence, book: Book) -> None:
    """Why nothing was attacked."""
    if not evidence.source.releases:
        why = "no release was recorded in the run's folder"
        if evidence.source.method == "standalone":
            why = "nothing left the silos, so there is nothing to attack"
        book.not_run.append(NotRun(attack="all", why=why))
        return


def worst(verdicts: list[Verdict]) -> Verdict:
    return max(verdicts, key=_SEVERITY.index, default="none_shown")


def judge(source: Source, inventory: list[AuditedRelease], overlap: Overlap | None, book: Book) -> Audit:
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
        run=source.name,
        method=source.method,
        name=source.title,
        seed=source.seed,
        releases=inventory,
        findings=[figure.finding() for figure in book.figures],
        bounds=book.bounds,
        verdicts=Verdicts(**{question: worst(found) for question, found in answers.items()}),
        not_run=book.not_run,
        untested=[question for question, found in answers.items() if not found],
        weights_claimed=isinstance(source, Run) and not unbounded_weights(source.result),
        overlap=overlap,
        versions=versions(LIBRARIES),
    )
