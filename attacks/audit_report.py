"""Audits as sections of a page, as a page of their own, and as a table for a terminal.

Built on `securefl.report.page`. It shows what `Audit` objects hold, worst first, and always beside a figure
its interval, what guessing scores and what the claim allows. It must not run an attack or read a run folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as RichTable
from rich.text import Text

from attacks.audit_context import accounts_table, channels_list, utility_table
from attacks.audit_figures import membership_pictures, noise_pictures, recall_picture, recall_rows
from attacks.audit_opening import audit_summary, claim_against_shown, headline, largest_bound
from attacks.audit_plots import epsilon_picture, roc_pictures, subject_pictures
from attacks.audit_rows import Audits, family, subjects, worst_rows
from attacks.audit_tables import (
    all_findings,
    attacks_table,
    bounds_table,
    departed_table,
    inventory,
    not_run_table,
    question_table,
    read_back,
    side_by_side,
    subject_table,
    verdict_table,
)
from attacks.audit_words import (
    ATTACKS,
    WORDS,
    claimed_words,
    meanings,
    metric_words,
    not_attacked,
    not_run_numbers,
    overlap_words,
    verdict_of,
)
from attacks.findings import Audit
from attacks.runs import CENTROIDS
from securefl.report.claims import whose
from securefl.report.page import (
    Block,
    Fold,
    Items,
    Note,
    Paragraph,
    Section,
    Table,
    Tile,
    Tiles,
    clean,
    epsilon,
    joined,
    write_page,
)
from securefl.report.render import plain_table


def _cautions(audits: Audits) -> list[Block]:
    """What a passed audit does not mean, and what was not attacked."""
    warnings = dict.fromkeys(audit.warning for _, audit in audits)
    left = not_attacked(audits)
    if left and any(audit.not_run for _, audit in audits):
        left.append("Why is said below, in the list of attacks that were not run.")
    return [
        *(Note("Passing proves nothing.", warning, "caution") for warning in warnings),
        *([Note("Not attacked.", " ".join(left), "caution")] if left else []),
    ]


def _of_one_run(index: int, name: str, audit: Audit) -> list[Block]:
    """ROC curves and the worst subjects of one run."""
    found = subjects(audit)
    return [
        *roc_pictures(f"run{index}", audit), *subject_pictures(f"run{index}", found),
        *subject_table(name, audit),
    ]  # fmt: skip


def _detail(audits: Audits) -> Section:
    blocks: list[Block] = [Paragraph(words, head="The text pool.") for words in overlap_words(audits)]
    if any(audit.findings for _, audit in audits):
        blocks.append(attacks_table(audits))
    blocks += [all_findings(name, audit) for name, audit in audits if audit.findings]
    if any(audit.bounds for _, audit in audits):
        blocks.append(bounds_table(audits))
    if any(audit.not_run for _, audit in audits):
        blocks.append(not_run_table(audits))
    blocks += accounts_table(audits)
    if told := channels_list(audits):
        blocks += [Paragraph("What leaves beside it.", head="Outside the claims."), *told]
    blocks += utility_table(audits)
    blocks += [inventory(name, audit) for name, audit in audits if audit.releases]
    blocks.append(Fold("Words used by the auditor", (Items(terms=WORDS),)))
    return Section("The audit in detail", tuple(blocks))


def _read(audits: Audits, first: Sequence[Block], summary: str) -> list[Section]:
    """What an attacker could read, after `first`, and what was read back."""
    blocks = list(first)
    if any(audit.findings for _, audit in audits):
        blocks += [
            side_by_side(audits), *epsilon_picture(audits), *membership_pictures(audits),
            *recall_picture(audits), *noise_pictures(recall_rows(audits)),
        ]  # fmt: skip
    for index, (name, audit) in enumerate(audits):
        found = _of_one_run(index, name, audit)
        if len(audits) == 1:
            blocks += found
        elif found:
            blocks.append(Fold(f"ROC curves and worst subjects: {clean(name, 40)}", tuple(found)))
    texts = read_back(audits)
    back = [Section("What was read back", tuple(texts))] if texts else []
    return [Section("What an attacker could read", tuple(blocks), summary), *back]


def audit_sections(audits: Audits) -> list[Section]:
    """The sections about attacks, over several runs: (name of the run, its audit). Empty without audits."""
    if not audits:
        return []
    first = [*_cautions(audits), verdict_table(audits)]
    return [*_read(audits, first, audit_summary(audits)), _detail(audits)]


def _summary(audits: Audits, audit: Audit) -> Section:
    """One page for whoever reads no other: what left, the three answers, claim against proof, the limits."""
    leaks = sum(finding.verdict != "none_shown" for finding in audit.findings)
    missing, largest = not_run_numbers(audit), largest_bound(audit)
    proved = None if largest is None else largest.epsilon_lower_bound
    claimed = claimed_words(audit.findings if largest is None else [largest])
    tiles = Tiles((
        Tile("Releases audited", str(len(audit.releases))),
        Tile("Findings that leak", f"{leaks} of {len(audit.findings)}", "", "bad" if leaks else "plain"),
        Tile("Largest ε shown", "–" if proved is None else epsilon(proved),
             claimed if audit.findings else "nothing was attacked"),
        Tile("Attacks not run", f"{len(missing)} of {len(ATTACKS)}", joined([str(n) for n in missing])),
    ))  # fmt: skip
    left = [departed_table(audit)] if audit.releases else [Paragraph("Nothing left the silos.")]
    blocks: list[Block] = [
        Paragraph(headline(audit), lead=True), tiles, question_table(audit),
        Paragraph(claim_against_shown(audit), head="Claim and proof."), *left, *_cautions(audits),
    ]  # fmt: skip
    return Section("Summary", tuple(blocks))


def write_audit_report(audit: Audit, path: Path) -> None:
    """Write the audit of one run as a page of its own. Raises UsageError where `path` cannot be written."""
    name = clean(audit.method, 40)
    audits = [(name, audit)]
    versions = tuple((clean(k, 40), clean(v, 60)) for k, v in sorted(audit.versions.items()))
    identity = (("Run", clean(audit.run, 64)), ("Method", name), ("Seed", str(audit.seed)), *versions)
    last = Section(
        "Seed and versions", (Table("What this audit was made with", ("What", "Value"), identity),)
    )
    subtitle = f"Run {clean(audit.run, 40)}, method {name}, seed {audit.seed}"
    footer = "Made by securefl-audit. This page is one file and loads nothing."
    read = _read(audits, [], "") if audit.findings else []
    sections = [_summary(audits, audit), *read, _detail(audits), last]
    write_page(path, f"Audit: {name}", subtitle, sections, footer)


def attack_table(audits: Audits) -> RichTable:
    """The worst finding of every attack, metric and run, for a terminal: runs below each attack."""
    rows_of = worst_rows(audits, ways=False)
    several = len(audits) > 1
    controlled = any(row.worst.control is not None for row in rows_of)
    rows: list[list[str]] = []
    attack, heading = "", ""
    for row in rows_of:
        f = row.worst
        name, metric = f"{f.number} {clean(family(f.attack), 60)}", metric_words(f.metric)
        head = f"{name}: {metric}"
        # An attack's name stands once, its other figures below it, and runs below each figure.
        shown = "" if head == heading else f"– {metric}" if name == attack else head
        attack, heading = name, head
        cells = [shown, *([clean(row.run, 28)] if several else []), clean(f.silo, 12)]
        cells += ["none" if f.claim_epsilon is None else epsilon(f.claim_epsilon)]
        cells += [f"{f.value:.2f} [{f.ci[0]:.2f}, {f.ci[1]:.2f}]", _two(f.baseline)]
        cells += [_two(f.control)] if controlled else []
        rows.append([*cells, _two(f.cap), verdict_of(f).text])
    columns = [
        ("attack: figure", False), *([("run", False)] if several else []), ("silo", False), ("claim ε", True),
        ("value, 95 %", True), ("guess", True), *([("control", True)] if controlled else []), ("cap", True),
        ("verdict", False),
    ]  # fmt: skip
    table = plain_table("What an attacker could read (worst silo, round and way to score)", columns, rows)
    table.caption = Text("\n".join(_notes(audits, controlled)))
    table.caption_justify = "left"
    return table


def _two(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.3f}" if 0 < value < 0.005 else f"{value:.2f}"


def _notes(audits: Audits, controlled: bool) -> list[str]:
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
    if controlled:
        notes.append("control: what the same attack scores where it has nothing to find")
    if any(f.cap is not None for f in findings):
        notes.append(
            "cap: of the attack's game, one row exchanged for another, to which a claim is converted"
        )
    return [*notes, *meanings(findings), *not_attacked(audits)]
