"""Audits as sections of a page, as a page of their own, and as a table for a terminal.

Built on `securefl.report.page`. It shows what `Audit` objects hold, worst first, and always beside a figure
its interval, what guessing scores and what the claim allows. It must not run an attack or read a run folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from attacks.audit_context import accounts_table, channels_list, silo_accounts, utility_table
from attacks.audit_figures import membership_pictures, noise_pictures, recall_picture, recall_rows
from attacks.audit_opening import audit_summary, claim_against_shown, headline, largest_bound, reasons
from attacks.audit_plots import epsilon_picture, roc_pictures, subject_pictures
from attacks.audit_rows import Audits, Row, family, leaking, subjects, worst_rows
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
    ELSEWHERE,
    WORDS,
    attack_words,
    attacked,
    audit_name,
    claim_in_game,
    claimed_words,
    meanings,
    metric_words,
    not_attacked,
    not_run_numbers,
    overlap_words,
    release_words,
    row_verdict,
)
from attacks.findings import ALL_SILOS, UNASKED, Audit
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
    count,
    epsilon,
    joined,
    listing,
    render_page,
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


def _leaking_tile(audit: Audit) -> Tile:
    """How many attacks leak, by the rule of the three questions."""
    ran, found = len({f.number for f in audit.findings}), leaking(audit)
    leaks = len({f.number for f in found})
    alone = sum(f.verdict != "none_shown" for f in audit.findings)
    figures = f"{alone} of {count(len(audit.findings), 'figure')} by {'its' if alone == 1 else 'their'} own"
    detail = f"{figures} 95 % interval" if alone else ""
    return Tile("Attacks that leak", f"{leaks} of {ran}", detail, "bad" if leaks else "plain")


def _attacked_tile(audit: Audit) -> Tile:
    """How many releases some figure is of, and what kinds were never attacked."""
    put = attacked(audit)
    known = {release_words(r) for r in put}
    never = sorted({release_words(r) for r in audit.releases} - known)
    detail = f"never: {listing(never)}" if put and never else ""
    return Tile("Releases attacked", f"{len(put)} of {len(audit.releases)}", detail)


def _summary(audits: Audits, audit: Audit) -> Section:
    """One page for whoever reads no other: what left, the three answers, claim against proof, the limits."""
    missing, largest = not_run_numbers(audit), largest_bound(audit)
    proved = None if largest is None else largest.epsilon_lower_bound
    claimed = claimed_words(audit.findings if largest is None else [largest])
    tiles = Tiles((
        _attacked_tile(audit), _leaking_tile(audit),
        Tile("Largest ε shown", "–" if proved is None else epsilon(proved),
             claimed if audit.findings else "nothing was attacked"),
        Tile("Attacks not run", f"{len(missing)} of {len(ATTACKS)}", joined([str(n) for n in missing])),
    ))  # fmt: skip
    left = [departed_table(audit)] if audit.releases else [Paragraph("Nothing left the silos.")]
    blocks: list[Block] = [
        Paragraph(headline(audit), lead=True), tiles, question_table(audit),
        Paragraph(claim_against_shown(audit), head="Claim and proof."), *silo_accounts(audit), *left,
        *_cautions(audits),
    ]  # fmt: skip
    return Section("Summary", tuple(blocks))


def audit_page(audit: Audit) -> bytes:
    """The audit of one run as a page of its own, in HTML."""
    name, method = audit_name(audit), clean(audit.method, 40)
    audits = [(name, audit)]
    versions = tuple((clean(k, 40), clean(v, 60)) for k, v in sorted(audit.versions.items()))
    identity = (("Run", clean(audit.run, 64)), ("Method", method), ("Seed", str(audit.seed)), *versions)
    last = Section(
        "Seed and versions", (Table("What this audit was made with", ("What", "Value"), identity),)
    )
    subtitle = f"Run {clean(audit.run, 40)}, method {method}, seed {audit.seed}"
    if audit.method == ELSEWHERE:
        subtitle = f"Vectors that another system released, {clean(audit.run, 40)}, seed {audit.seed}"
    footer = "Made by securefl-audit. This page is one file and loads nothing."
    read = _read(audits, [], "") if audit.findings else []
    sections = [_summary(audits, audit), *read, _detail(audits), last]
    return render_page(f"Audit: {name}", subtitle, sections, footer)


# Letters of an attack's name on a line, before columns are left out for it; and then of a verdict.
_LEAST_ATTACK, _LEAST_VERDICT = 16, 10


@dataclass(frozen=True)
class AttackTable:
    """The worst finding of every attack, metric and run, for a terminal: runs below each attack.

    On a narrow terminal columns are left out, so that every row still says which attack it is of.
    """

    audits: Audits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, notes = self._table(frozenset())
        for out in ({"control"}, {"control", "claim ε"}, {"control", "claim ε", "cap"}):
            if Measurement.get(console, options.update(width=1000), table).minimum <= options.max_width:
                break
            table, notes = self._table(frozenset(out))
        yield table
        # Not its caption, which would be as wide as a table that does not fit, and cut off.
        yield notes

    def _table(self, out: frozenset[str]) -> tuple[RichTable, Text]:
        rows_of = worst_rows(self.audits, ways=False)
        several = len(self.audits) > 1
        controlled = any(row.worst.control is not None for row in rows_of)
        left_out = out | (set() if several else {"run"}) | (set() if controlled else {"control"})
        rows: list[dict[str, str]] = []
        attack, heading = "", ""
        for row in rows_of:
            f = row.worst
            name, metric = f"{f.number} {attack_words(family(f.attack))}", metric_words(f.metric)
            head = f"{name}: {metric}"
            # An attack's name stands once, its other figures below it, and runs below each figure.
            shown = "" if head == heading else f"– {metric}" if name == attack else head
            attack, heading = name, head
            rows.append({"attack: figure": shown, **_cells(row)})
        columns = [
            ("attack: figure", False), ("run", False), ("silo", False), ("claim ε", True),
            ("value, 95 %", True), ("guessing", True), ("control", True), ("cap", True), ("verdict", False),
        ]  # fmt: skip
        kept = [column for column in columns if column[0] not in left_out]
        table = plain_table(
            "What an attacker could read (worst silo, round and way to score)",
            kept,
            [[row[head] for head, _ in kept] for row in rows],
        )
        table.columns[0].min_width = _LEAST_ATTACK
        for column, (head, _) in list(zip(table.columns, kept, strict=True))[1:]:
            column.min_width = max(cell_len(text) for text in (head, *(row[head] for row in rows)))
        if out:
            table.columns[-1].no_wrap, table.columns[-1].min_width = False, _LEAST_VERDICT
        return table, Text("\n".join(_notes(self.audits, left_out)))


def _cells(row: Row) -> dict[str, str]:
    f = row.worst
    return {
        "run": clean(row.run, 28),
        "silo": clean(f.silo, 12),
        "claim ε": claim_in_game(f),
        "value, 95 %": f"{f.value:.2f} [{_two(f.ci[0])}, {_two(f.ci[1])}]",
        "guessing": _two(f.baseline),
        "control": _two(f.control),
        "cap": _two(f.cap),
        "verdict": row_verdict(row).text,
    }


def attack_table(audits: Audits) -> AttackTable:
    """The worst findings of some audits, for `print` of a rich console."""
    return AttackTable(audits)


def for_terminal(audit: Audit) -> list[str | AttackTable]:
    """What a terminal shows of an audit, in order: what was found, the three answers, figures, the limits."""
    shown: list[str | AttackTable] = [headline(audit)]
    shown += [f"{name}: {badge.text}. {why}" for name, _, badge, why in reasons(audit)]
    audits = [(audit_name(audit), audit)]
    if audit.findings:
        return [*shown, AttackTable(audits), audit.warning]
    return [*shown, *_not_run_because(audit), *not_attacked(audits), audit.warning]


def _not_run_because(audit: Audit) -> list[str]:
    """One line a reason, with all attacks that have it."""
    found: dict[str, list[str]] = {}
    for one in audit.not_run:
        if one.why != UNASKED:
            found.setdefault(clean(one.why, 200), []).append(clean(one.attack, 60))
    return [f"not run, since {why}: {listing(names)}" for why, names in found.items()]


def _two(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.3f}" if 0 < value < 0.005 else f"{value:.2f}"


def _notes(audits: Audits, left_out: frozenset[str]) -> list[str]:
    findings = [f for _, audit in audits for f in audit.findings]
    attacked = {(f.silo, f.round) for f in findings if f.claim_epsilon is not None}
    scopes = dict.fromkeys(
        whose(r.claim)
        for _, audit in audits
        for r in audit.releases
        if r.kind in CENTROIDS and "epsilon" in r.claim
        and not attacked.isdisjoint(((r.silo, r.round), (ALL_SILOS, r.round)))
    )  # fmt: skip
    whom = f"; it was made for {'; or '.join(scopes)}" if scopes else ""
    notes = [] if "claim ε" in left_out else [
        "claim ε: of the releases attacked, not of the silo; where that is known in the attack's game, one "
        f"row exchanged for another, where ε is larger{whom}"
    ]  # fmt: skip
    notes.append("guessing: what the attacker scores without it")
    if "control" not in left_out:
        notes.append("control: what the same attack scores where it has nothing to find")
    if "cap" not in left_out and any(f.cap is not None for f in findings):
        notes.append(
            "cap: of the attack's game, one row exchanged for another, to which a claim is converted"
        )
    return [*notes, *meanings(findings), *not_attacked(audits)]
