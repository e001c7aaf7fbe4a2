"""What an audit collects, and how its findings answer the three questions.

Decides nothing from a text or a file: figures in, an `Audit` out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from attacks.bounds import ALPHA
from attacks.figures import MEMBERSHIP_RATIO, TOKEN_RECOVERY, Figure
from attacks.findings import Audit, AuditedRelease, Bound, NotRun, Verdict, Verdicts
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


def attacks_left(run: Run, recorded: tuple[Recorded, ...], book: Book) -> None:
    """What this version does not run on releases of these kinds, and runs without anything to attack."""
    kinds = {one.row.kind for one in recorded}
    later = "not in this version"
    if not recorded:
        why = "nothing left the silos, so there is nothing to attack"
        if run.result.method != "standalone":
            why = "no release was recorded in the run's folder"
        book.not_run.append(NotRun(attack="all", why=why))
        return
    if PayloadKind.CENTROIDS.value not in kinds:
        why = "no pooled centroid was released"
        book.not_run.append(NotRun(attack=MEMBERSHIP_RATIO, why=why))
    if PayloadKind.EMBEDDING_CENTROIDS.value not in kinds:
        why = "no embedding-layer centroid was released"
        book.not_run.append(NotRun(attack=TOKEN_RECOVERY, why=why))
    if run.result.sums:
        kinds.add(PayloadKind.SUM.value)
    if kinds & set(CENTROIDS):
        noised = any(one.row.claim.get("mechanism") == _NOISED for one in recorded)
        why = "no centroid was released with noise, so there is no mechanism to audit"
        if noised:
            why = "it needs releases of its own: `securefl-audit mechanism` audits the noise on the sums"
        book.not_run.append(NotRun(attack="mechanism audit (3)", why=why))
    book.not_run += [NotRun(attack=name, why=later) for name in _later(kinds)]


def _later(kinds: set[str]) -> Iterator[str]:
    if kinds & set(CENTROIDS):
        yield from ("one-run audit with canaries (4)", "attribute probe (13)")
        yield "membership over several rounds (6)"
    if PayloadKind.CENTROIDS.value in kinds:
        yield from ("bag-of-words probe (5)", "search of a text pool (8)", "embedding inversion (9, 10)")
    if kinds & {PayloadKind.MODEL.value, PayloadKind.SUM.value}:
        yield from ("subtraction from an aggregate (7)", "membership in a trained model (12)")


def worst(verdicts: list[Verdict]) -> Verdict:
    return max(verdicts, key=_SEVERITY.index, default="none_shown")


def judge(run: Run, inventory: list[AuditedRelease], book: Book) -> Audit:
    """Findings and the three questions, each answered by its worst finding.

    - singling out: can one row be told from all others? Attack 1, and of attack 2 the tokens that no
      auxiliary text has (names, identifiers), since few rows can have them.
    - linkability: can a text held elsewhere be tied to this silo's rows? Attack 1, and attack 2 too: whoever
      reads a row's tokens knows the text again.
    - inference: can content be read that was not known before? Attack 2.

    A finding is judged by its own 95 % interval. The three answers look at all findings together, so there
    each interval is widened to 1 - .05 / (number of findings) (Bonferroni): else one of many would leak by
    chance.
    """
    alpha = ALPHA / max(1, len(book.figures))
    answers: dict[str, list[Verdict]] = {"singling_out": [], "linkability": [], "inference": []}
    for figure in book.figures:
        verdict = figure.verdict(alpha)
        if figure.number == 1:
            answers["singling_out"].append(verdict)
            answers["linkability"].append(verdict)
        else:
            answers["inference"].append(verdict)
            answers["linkability"].append(verdict)
            if figure.metric == "rare_token_recall":
                answers["singling_out"].append(verdict)
    return Audit(
        run=run.result.run,
        method=run.result.method,
        seed=run.result.seed,
        releases=inventory,
        findings=[figure.finding() for figure in book.figures],
        bounds=book.bounds,
        verdicts=Verdicts(**{question: worst(found) for question, found in answers.items()}),
        not_run=book.not_run,
        weights_claimed=not unbounded_weights(run.result),
        versions=versions(LIBRARIES),
    )
