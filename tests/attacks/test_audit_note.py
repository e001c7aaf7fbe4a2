"""The note for the file: every worst finding with its interval, and nothing that Markdown would obey."""

from __future__ import annotations

import math

from attacks.audit_note import audit_note
from attacks.audit_rows import worst_rows
from attacks.findings import Overlap
from securefl.report.page import accuracy, interval
from tests.samples import make_audit, make_finding, poisoned_audit
from tests.test_report import HOSTILE, OVERRIDE


def test_every_worst_finding_is_in_the_note() -> None:
    audit = make_audit(embeddings=True)
    note = audit_note(audit)
    for row in worst_rows([(audit.method, audit)]):
        assert (
            f"{accuracy(row.worst.value)}, {interval(row.worst.ci)}".replace("[", "\\[").replace("]", "\\]")
            in note
        )
        assert row.worst.silo in note
    assert note.startswith(f"# Audit of run {audit.run}")
    for heading in ("## The three questions", "## What an attacker could read", "## Not run"):
        assert heading in note
    assert "proves nothing" in note
    assert audit_note(audit) == note


def test_an_audit_of_nothing_has_a_note() -> None:
    empty = make_audit().model_copy(update={"findings": [], "releases": [], "bounds": []})
    note = audit_note(empty)
    assert "0 of 0 releases attacked" in note
    assert "at worst" not in note


def test_hostile_names_stay_in_their_cell() -> None:
    audit = poisoned_audit(f"{HOSTILE}{OVERRIDE}\n\n# Heading | <b>x</b> [link](http://x)")
    note = audit_note(audit)
    assert len(note) < 60_000
    assert not set(note) & {"\u202e", "\x1b", "\x00"}
    assert "<b>" not in note.replace("\\<b\\>", "")
    assert "](http" not in note.replace("\\](http", "")
    headings = [line for line in note.split("\n") if line.startswith("#")]
    assert [line.split(" ")[0] for line in headings] == ["#", *["##"] * (len(headings) - 1)]
    columns = {line.replace("\\|", "").count("|") for line in note.split("\n") if line.startswith("|")}
    assert columns <= {4, 6, 12}


def test_texts_are_counted_and_never_shown() -> None:
    """Not even where the auditor had them shown in the other files."""
    texts = ["the secret diagnosis", "another one"]
    shown = make_finding(number=8, attack="search of a text pool, ranking", texts=texts)
    counted = make_finding(number=10, attack="embedding inversion", details={"texts_withheld": 5})
    note = audit_note(make_audit().model_copy(update={"findings": [shown, counted]}))
    told = (
        "7 texts named or put together, of 2 figures (up to 20 a figure are kept); how many are right the "
        "figures say; none is shown here"
    )
    assert f"{told}; they stand in report.html and audit.json" in note
    assert f"{told}." in audit_note(
        make_audit().model_copy(
            update={"findings": [counted, counted.model_copy(update={"details": {"texts_withheld": 2}})]}
        )
    )
    assert not any(text in note for text in texts)
    assert "read back, of" not in audit_note(make_audit())


def test_the_note_says_why_and_what_the_claim_is_worth() -> None:
    found = make_finding(control=0.4912, claim_epsilon=8.0, details={"claim_epsilon_replace_one": 15.5})
    audit = make_audit().model_copy(
        update={"findings": [found], "overlap": Overlap(pool=1600, left_out=3), "not_run": []}
    )
    note = audit_note(audit)
    assert "the claim allows 15.50 in the game that it plays" in note
    assert "the same attack on an invented release without the silo's rows: 49%" in note
    assert "| 320 | 0.500 | 0.491 |" in note
    assert "3 of 1,600 pool texts share a passage" in note
    assert "were not run" in note


def test_numbers_that_are_none_break_no_note() -> None:
    bad = make_finding(
        value=math.nan, ci=(math.nan, math.nan), baseline=math.nan, epsilon_lower_bound=math.nan
    )
    assert "nan" in audit_note(make_audit().model_copy(update={"findings": [bad]}))
