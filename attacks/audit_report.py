"""Audits as sections of a page, as a page of their own, and as a table for a terminal.

Built on `securefl.report.page`. It shows what `Audit` objects hold, worst first, and always beside a figure
its interval, what guessing scores and what the claim allows. It must not run an attack or read a run folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table as RichTable
from rich.text import Text

from attacks.audit_figures import (
    Audits,
    is_membership,
    is_recall,
    membership_pictures,
    metric_key,
    recall_picture,
    worst_first,
)
from attacks.audit_words import (
    MEANINGS,
    WORDS,
    answers,
    claim_cell,
    claimed_words,
    metric_words,
    not_attacked,
    verdict_of,
)
from attacks.findings import Audit, Finding
from attacks.runs import CENTROIDS
from securefl.report.claims import whose
from securefl.report.digest import kind_of, kind_words, parties
from securefl.report.page import (
    Badge,
    Block,
    Cell,
    Fold,
    Items,
    Note,
    Paragraph,
    Section,
    Table,
    Tile,
    Tiles,
    accuracy,
    clean,
    count,
    epsilon,
    interval,
    joined,
    listing,
    write_page,
)
from securefl.report.render import plain_table

_ADVERSARIES = {
    "peer": "another silo", "server": "the server", "outsider": "an outsider", "auditor": "the auditor",
}  # fmt: skip
_MOST_FINDINGS = 300


@dataclass(frozen=True)
class Row:
    """The worst finding of one attack and metric in one run; `low` to `high` over all silos and rounds."""

    run: str
    worst: Finding
    low: float
    high: float
    findings: int


def worst_rows(audits: Audits) -> list[Row]:
    """One row an attack, metric and run, in the order of the attacks' numbers, then of the audits."""
    groups: dict[tuple[int, str, str, int], list[Finding]] = {}
    for index, (_, audit) in enumerate(audits):
        for finding in audit.findings:
            groups.setdefault((finding.number, finding.attack, finding.metric, index), []).append(finding)
    rows = []
    for key in sorted(groups):
        found = groups[key]
        values = [finding.value for finding in found]
        worst = min(found, key=worst_first)
        rows.append(Row(clean(audits[key[3]][0], 40), worst, min(values), max(values), len(found)))
    return rows


def _run_sentence(name: str, audit: Audit) -> str:
    """What the audit of one run found, in plain words."""
    broken = [finding for finding in audit.findings if finding.verdict == "violates_claim"]
    if broken:
        worst = min(broken, key=worst_first)
        figure = f"{metric_words(worst.metric)} {accuracy(worst.value)}, cap {accuracy(worst.cap)}"
        return (
            f"In {name} the attack “{clean(worst.attack, 60)}” got further than the claim allows ({figure}): "
            "the claim is wrong."
        )
    leaks: dict[tuple[int, str], Finding] = {}  # one of the ways to score one attack says enough
    for row in worst_rows([(name, audit)]):
        found, key = row.worst, (row.worst.number, row.worst.metric)
        if found.verdict == "leaks" and (key not in leaks or found.value > leaks[key].value):
            leaks[key] = found
    parts = [_leak_words(finding) for finding in leaks.values()]
    return f"In {name}, at worst, {joined(parts)}." if parts else ""


def _role(finding: Finding) -> str:
    """`peer` of `peer; sees the pooled centroids`."""
    return clean(finding.adversary.split(";")[0], 30)


def _leak_words(finding: Finding) -> str:
    """A leak as part of a sentence for readers who do not know the metric."""
    who = f"{_ADVERSARIES.get(_role(finding), 'an attacker')} (attack {finding.number})"
    value, guess = f"{finding.value:.0%}", f"{finding.baseline:.0%}"
    if finding.cap is not None:
        guess += f", at most by the claim: {finding.cap:.0%}"
    if is_membership(finding):
        return f"{who} told a silo's row from a stranger's in {value} of pairs (guessing: {guess})"
    if finding.metric == "guesses_right":
        shown, held = finding.epsilon_lower_bound, ""
        claimed = finding.details.get("claim_epsilon_add_remove")  # of the game, whatever the claim compares
        if shown is not None and isinstance(claimed, int | float):
            held = f", which proves ε {epsilon(shown)} of the claimed {epsilon(float(claimed))}"
        return (
            f"{who} was right in {value} of guesses which canary texts were put in (guessing: {guess}){held}"
        )
    if is_recall(finding):
        return f"{who} read back {value} of the words of a group of texts (guessing: {guess})"
    figures = f"{accuracy(finding.value)} (guessing: {accuracy(finding.baseline)})"
    return f"{who} reached a {metric_words(finding.metric)} of {figures}"


def audit_summary(audits: Audits) -> str:
    """The opening sentences about attacks, ending with what a passed audit does not mean."""
    sentences = []
    quiet = []
    for name, audit in audits:
        sentence = _run_sentence(clean(name, 40), audit)
        if sentence:
            sentences.append(sentence)
        elif audit.findings:
            quiet.append(clean(name, 40))
    if quiet:
        sentences.append(f"In {listing(quiet)} no attack that was run beat guessing.")
    if untouched := [clean(name, 40) for name, audit in audits if not audit.findings]:
        sentences.append(f"In {listing(untouched)} nothing was attacked; why is said below.")
    return " ".join([*sentences, *dict.fromkeys(audit.warning for _, audit in audits)])


def _verdict_table(audits: Audits) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for name, audit in audits:
        given = (Cell("", badges=(badge,)) for _, badge in answers(audit))
        judged = count(len(audit.findings), "finding"), count(len(audit.not_run), "attack")
        rows.append((Cell(clean(name, 40), full=name), *given, *judged))
    heads = ("Run", "Singling out", "Linkability", "Inference", "Judged on", "Not run")
    return Table("The three questions, each answered by its worst finding", heads, tuple(rows))


def _bound_cell(finding: Finding) -> Cell:
    shown = "–" if finding.epsilon_lower_bound is None else epsilon(finding.epsilon_lower_bound)
    game = "" if finding.adjacency is None else f" ({clean(finding.adjacency, 24)})"
    return Cell(shown, f"{claimed_words([finding])}{game}")


def _reference_cell(finding: Finding) -> Cell:
    """What guessing scores, and below it the cap or why there is none."""
    cap = f"cap {accuracy(finding.cap)}" if finding.cap is not None else "no cap"
    why = clean(finding.cap_reason or "", 160) if finding.cap is None else ""
    return Cell(accuracy(finding.baseline), f"{cap}: {why}" if why else cap)


def _side_by_side(audits: Audits) -> Table:
    rows = []
    for row in worst_rows(audits):
        f = row.worst
        spread = f"; {accuracy(row.low)} to {accuracy(row.high)} over {row.findings}" * (row.findings > 1)
        rows.append((
            Cell(f"{clean(f.attack, 60)}: {metric_words(f.metric)}", f"attack {f.number}"),
            Cell(row.run, f"{clean(f.silo, 30)}, round {f.round}{spread}"),
            Cell(accuracy(f.value), interval(f.ci), (verdict_of(f),)),
            accuracy(f.baseline), accuracy(f.cap), _bound_cell(f),
        ))  # fmt: skip
    return Table(
        "The worst finding of every attack, run beside run, with 95 % intervals",
        ("Attack", "Run; over all silos and rounds", "Value and verdict", "Baseline", "Cap", "ε at least"),
        tuple(rows),
        numeric=frozenset({3, 4}),
        wrap=frozenset({1, 2, 5}),
        note="The worst of several figures is worse than a typical one; the interval is that of the one.",
    )


def _details(finding: Finding) -> str:
    """The plain entries of a finding's details, a few of them."""
    parts: list[str] = []
    for key, value in finding.details.items():
        if isinstance(value, str | int | float):
            shown = f"{value:.3g}" if isinstance(value, float) else clean(str(value), 60)
            parts.append(f"{clean(str(key), 30).replace('_', ' ')} {shown}")
    return ", ".join(parts[:4])


def _all_findings(name: str, audit: Audit) -> Fold:
    chosen = sorted(audit.findings, key=lambda f: (f.number, f.attack, f.metric, *worst_first(f)))
    rows = []
    for f in chosen[:_MOST_FINDINGS]:
        knowing = joined([clean(fact, 100) for fact in f.knowledge[:8]]) or "nothing more"
        who = f"attack {f.number}, by {_role(f)}, knowing {knowing}"
        rows.append((
            Cell(clean(f.attack, 60), who), Cell(clean(f.silo, 32), f"round {f.round}"),
            Cell(metric_words(f.metric), f"{clean(f.target, 60)}: {_details(f)}"),
            Cell(accuracy(f.value), f"{interval(f.ci)}, {f.trials:,} trials", (verdict_of(f),)),
            _reference_cell(f), _bound_cell(f),
        ))  # fmt: skip
    left = len(chosen) - len(rows)
    table = Table(
        f"Every finding: {clean(name, 40)}",
        ("Attack", "Where", "Figure and target", "Value and verdict", "Baseline and cap", "ε at least"),
        tuple(rows),
        wrap=frozenset({0, 2, 3, 4, 5}),
        note=f"{left} more are in audit.json." if left else "",
    )
    return Fold(f"Every finding: {clean(name, 40)} ({len(chosen)})", (table,))


def _bounds_table(audits: Audits) -> Table:
    rows = []
    for name, audit in audits:
        for bound in audit.bounds:
            badge = Badge("holds") if bound.holds else Badge("does not hold", "bad")
            empty = (Badge("says nothing", "caution"),) if bound.vacuous else ()
            verdict = Cell("", badges=(badge, *empty))
            rows.append(
                (
                    clean(name, 40),
                    clean(bound.name, 160),
                    f"{bound.bound:.3f}",
                    f"{bound.measured:.3f}",
                    verdict,
                )
            )
    return Table(
        "The papers' propositions on what was really released",
        ("Run", "Proposition", "Bound", "Measured", "Read as"),
        tuple(rows),
        numeric=frozenset({2, 3}),
        wrap=frozenset({1}),
        note="A bound that says nothing holds whatever was released, for example because it is zero.",
    )


def _inventory(name: str, audit: Audit) -> Fold:
    silos = sorted({release.silo for release in audit.releases})
    rows = []
    for r in audit.releases:
        sizes = [f"{size:.0f}" if float(size).is_integer() else f"{size:.1f}" for size in r.rows_per_centroid]
        more = f" and {len(sizes) - 24} more" if len(sizes) > 24 else ""
        kind = kind_of(r.kind, r.claim)
        rows.append((
            Cell(clean(r.silo, 32), full=r.silo), str(r.round),
            Cell(kind_words(kind), clean(r.file, 80)), claim_cell(r.claim),
            parties(r.readable_by, r.silo, silos), ", ".join(sizes[:24]) + more or "–",
            Cell(clean(r.encoder, 13), full=r.encoder), Cell(clean(r.sha256, 13), full=r.sha256),
        ))  # fmt: skip
    heads = (
        "Silo",
        "Round",
        "What",
        "Claim alone",
        "Readable by",
        "Rows (or units) in each group",
        "Encoder",
        "SHA-256",
    )
    table = Table(f"Releases: {clean(name, 40)}", heads, tuple(rows), frozenset({1}), frozenset({2, 3, 5}))
    return Fold(f"Audited releases: {clean(name, 40)} ({len(rows)})", (table,))


def _not_run_table(audits: Audits) -> Table:
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, audit in audits:
        for entry in audit.not_run:
            reasons.setdefault((entry.attack, entry.why), []).append(name)
    rows = tuple(
        (clean(attack, 60), clean(why, 300), "every run" if len(names) == len(audits) > 1 else listing(names))
        for (attack, why), names in reasons.items()
    )
    return Table("Attacks that were not run", ("Attack", "Why", "Run"), rows, wrap=frozenset({1, 2}))


def audit_sections(audits: Sequence[tuple[str, Audit]]) -> list[Section]:
    """The sections about attacks, over several runs: (name of the run, its audit). Empty without audits."""
    if not audits:
        return []
    warnings = list(dict.fromkeys(audit.warning for _, audit in audits))
    first: list[Block] = [
        *(Note("Passing proves nothing.", warning, "caution") for warning in warnings),
        *(Note("Not attacked.", sentence, "caution") for sentence in not_attacked(audits)),
        _verdict_table(audits),
    ]
    if any(audit.findings for _, audit in audits):
        first += [_side_by_side(audits), *membership_pictures(audits), *recall_picture(audits)]
    second: list[Block] = [_all_findings(name, audit) for name, audit in audits if audit.findings]
    if any(audit.bounds for _, audit in audits):
        second.append(_bounds_table(audits))
    if any(audit.not_run for _, audit in audits):
        second.append(_not_run_table(audits))
    second += [_inventory(name, audit) for name, audit in audits if audit.releases]
    second.append(Fold("Words used by the auditor", (Items(terms=WORDS),)))
    return [
        Section("What an attacker could read", tuple(first), audit_summary(audits)),
        Section("The audit in detail", tuple(second)),
    ]


def write_audit_report(audit: Audit, path: Path) -> None:
    """Write the audit of one run as a page of its own. Raises UsageError where `path` cannot be written."""
    name = clean(audit.method, 40)
    audits = [(name, audit)]
    leaks = sum(finding.verdict != "none_shown" for finding in audit.findings)
    bounds = [f.epsilon_lower_bound for f in audit.findings if f.epsilon_lower_bound is not None]
    tiles = Tiles((
        Tile("Releases audited", str(len(audit.releases))),
        Tile("Findings that leak", f"{leaks} of {len(audit.findings)}", "", "bad" if leaks else "plain"),
        Tile("Largest ε shown", epsilon(max(bounds)) if bounds else "–",
             claimed_words(audit.findings) if audit.findings else "nothing was attacked"),
        Tile("Attacks not run", str(len(audit.not_run))),
    ))  # fmt: skip
    opening = Section("Summary", (Paragraph(audit_summary(audits), lead=True), tiles))
    versions = tuple((clean(k, 40), clean(v, 60)) for k, v in sorted(audit.versions.items()))
    identity = (("Run", clean(audit.run, 64)), ("Method", name), ("Seed", str(audit.seed)), *versions)
    last = Section(
        "Seed and versions", (Table("What this audit was made with", ("What", "Value"), identity),)
    )
    subtitle = f"Run {clean(audit.run, 40)}, method {name}, seed {audit.seed}"
    footer = "Made by securefl-audit. This page is one file and loads nothing."
    write_page(path, f"Audit: {name}", subtitle, [opening, *audit_sections(audits), last], footer)


def attack_table(audits: Sequence[tuple[str, Audit]]) -> RichTable:
    """The worst finding of every attack, metric and run, for a terminal: runs below each attack."""
    columns = [
        ("attack", False), ("run", False), ("silo", False), ("claim ε", True), ("value, 95 %", True),
        ("guess", True), ("cap", True), ("verdict", False),
    ]  # fmt: skip
    rows: list[list[str]] = []
    heading = ""
    for row in worst_rows(audits):
        f = row.worst
        attack = f"{clean(f.attack, 40)}: {metric_words(f.metric)}"
        shown, heading = ("" if attack == heading else attack), attack
        value = f"{f.value:.2f} [{f.ci[0]:.2f}, {f.ci[1]:.2f}]"
        claim = "none" if f.claim_epsilon is None else epsilon(f.claim_epsilon)
        cap = "–" if f.cap is None else f"{f.cap:.2f}"
        verdict = verdict_of(f).text
        rows.append(
            [shown, clean(row.run, 28), clean(f.silo, 12), claim, value, f"{f.baseline:.2f}", cap, verdict]
        )
    table = plain_table("What an attacker could read (worst silo and round)", columns, rows)
    findings = [f for _, audit in audits for f in audit.findings]
    attacked = {(f.silo, f.round) for f in findings if f.claim_epsilon is not None}
    scopes = dict.fromkeys(
        whose(r.claim)
        for _, audit in audits
        for r in audit.releases
        if r.kind in CENTROIDS and (r.silo, r.round) in attacked and "epsilon" in r.claim
    )
    whom = f", for {'; or '.join(scopes)}" if scopes else ""
    notes = [
        f"claim ε: of the one release attacked, not of the silo{whom}",
        "guess: what the attacker scores without it",
    ]
    if any(f.cap is not None for f in findings):
        notes.append(
            "cap: of the attack's game, one row exchanged for another, to which a claim is converted"
        )
    metrics = {metric_key(f) for f in findings}
    notes += [meaning for metric, meaning in MEANINGS.items() if metric in metrics]
    table.caption = Text("\n".join([*notes, *not_attacked(audits)]))
    table.caption_justify = "left"
    return table
