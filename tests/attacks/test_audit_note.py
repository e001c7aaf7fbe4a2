"""The note for the file: every worst finding with its interval, and nothing that Markdown would obey."""

from __future__ import annotations

from attacks.audit_note import audit_note
from attacks.audit_report import worst_rows
from securefl.report.page import accuracy, interval
from tests.samples import make_audit, poisoned_audit
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
    assert "0 releases audited" in note
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
    assert columns <= {3, 6, 10}
