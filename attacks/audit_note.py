"""An audit as a note for the file: one page of Markdown that says what the report says first.

It shows what an `Audit` object holds and no text of anybody, not even where the audit has texts; it must not
run an attack or read a run folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attacks.audit_opening import audit_summary, claim_against_shown, reasons
from attacks.audit_rows import number_in, worst_rows
from attacks.audit_words import (
    ELSEWHERE,
    attack_words,
    attacked,
    audit_name,
    claim_in_game,
    metric_words,
    not_attacked,
    overlap_words,
    row_verdict,
)
from attacks.findings import Audit
from securefl.report.page import accuracy, clean, count, epsilon, interval

_MOST_REASONS = 40
# What Markdown, or the HTML that it is made into, would take for more than a letter.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~])")


def _plain(text: str, most: int = 200) -> str:
    return _SPECIAL.sub(r"\\\1", clean(text, most))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _findings(name: str, audit: Audit) -> list[str]:
    rows = []
    for row in worst_rows([(name, audit)]):
        f = row.worst
        shown = "" if f.epsilon_lower_bound is None else epsilon(f.epsilon_lower_bound)
        rows.append((
            f"{f.number}: {_plain(attack_words(f.attack))}", _plain(metric_words(f.metric)),
            f"{_plain(f.silo, 32)}, round {f.round}", f"{accuracy(f.value)}, {_plain(interval(f.ci))}",
            f"{f.trials:,}", accuracy(f.baseline), "" if f.control is None else accuracy(f.control),
            "" if f.cap is None else accuracy(f.cap), claim_in_game(f), shown, row_verdict(row).text,
        ))  # fmt: skip
    heads = (
        "attack", "figure", "worst at", "value, 95 %", "trials", "guessing", "control", "cap of the claim",
        "ε claimed", "ε at least", "verdict",
    )  # fmt: skip
    told = "ε claimed: of the release, in the game that the attack plays where that is known."
    return ["## What an attacker could read, at worst", "", *_table(heads, rows), told, ""]


def _read_back(audit: Audit) -> list[str]:
    """How many texts were put together, and where they stand."""
    # Where nothing was read above guessing what was put together is guesses.
    leaks = [f for f in audit.findings if f.verdict != "none_shown"]
    found = [number_in(f.details.get("texts_withheld")) or len(f.texts) for f in leaks]
    texts = int(sum(found))
    if not texts:
        return []
    where = "none is shown here"
    if any(f.texts for f in audit.findings):
        where += "; they stand in report.html and audit.json, to be kept as the silos' data are"
    kept = f"{count(texts, 'text')} named or put together, of {count(sum(map(bool, found)), 'figure')}"
    return [f"{kept} (up to 20 a figure are kept); how many are right the figures say; {where}.", ""]


def audit_note(audit: Audit) -> str:
    """Markdown: the summary, the three questions, the worst finding of each attack, bounds, what was not run.

    Names and reasons come from files that others wrote; they are cut and escaped.
    """
    name = audit_name(audit)
    whose = f"run {_plain(audit.run, 64)}, method {_plain(name)}"
    if audit.method == ELSEWHERE:
        whose = f"vectors that another system released, {_plain(audit.run, 64)}"
    questions = [
        (f"{word}: {asked}", badge.text, _plain(why, 600)) for word, asked, badge, why in reasons(audit)
    ]
    lines = [
        f"# Audit of {whose}, seed {audit.seed}",
        "",
        _plain(audit_summary([(name, audit)]), 4000),
        "",
        f"{len(attacked(audit))} of {count(len(audit.releases), 'release')} attacked. "
        f"{_plain(claim_against_shown(audit), 400)}",
        "",
        "## The three questions",
        "",
        *_table(("question", "answer", "because"), questions),
    ]
    if audit.findings:
        lines += _findings(name, audit)
    lines += _read_back(audit)
    if audit.bounds:
        kept = [
            (
                _plain(b.name),
                f"{b.bound:.4g}",
                f"{b.measured:.4g}",
                "yes" if b.holds else "no",
                "yes" if b.vacuous else "no",
            )
            for b in audit.bounds[:_MOST_REASONS]
        ]
        lines += ["## The papers' propositions", ""]
        lines += _table(("proposition", "bound", "measured", "holds", "says nothing"), kept)
    if audit.not_run:
        lines += ["## Not run", ""]
        lines += [f"- {_plain(one.attack, 60)}: {_plain(one.why)}" for one in audit.not_run[:_MOST_REASONS]]
        left = len(audit.not_run) - _MOST_REASONS
        lines += [f"- {left} more, in audit.json"] if left > 0 else []
        lines += [""]
    told = [*not_attacked([(name, audit)]), *overlap_words([(name, audit)])]
    lines += [_plain(sentence, 400) for sentence in told]
    versions = ", ".join(
        f"{_plain(key, 40)} {_plain(value, 60)}" for key, value in sorted(audit.versions.items())
    )
    return "\n".join([*lines, "", f"Made by securefl-audit with {versions}.", ""])
