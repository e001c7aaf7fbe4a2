"""The pages and tables about attacks: worst first, never a figure without what guessing scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from attacks.audit_figures import worst_first
from attacks.audit_report import attack_table, audit_sections, audit_summary, worst_rows, write_audit_report
from attacks.audit_words import WORDS, answers, claim_cell, not_attacked
from attacks.findings import Audit, NotRun
from securefl.report import page
from securefl.report.render import write_comparison_report
from tests.samples import make_audit, make_audits, make_finding, make_results, poisoned_audit
from tests.test_report import HOSTILE, OVERRIDE, check


def numbers_of(audit: Audit) -> set[str]:
    found: set[str] = set()
    for f in audit.findings:
        found |= {f"{x:.3f}" for x in (f.value, *f.ci, f.baseline, f.cap) if x is not None} | {
            f"{f.trials:,}"
        }
        found |= {page.epsilon(x) for x in (f.claim_epsilon, f.epsilon_lower_bound) if x is not None}
    for bound in audit.bounds:
        found |= {f"{bound.bound:.3f}", f"{bound.measured:.3f}"}
    for release in audit.releases:
        found |= {f"{rows:.0f}" for rows in release.rows_per_centroid} | {release.file, release.sha256[:12]}
    return found


@pytest.mark.parametrize("name", range(4))
def test_every_number_of_an_audit_is_on_its_page(tmp_path: Path, name: int) -> None:
    audit = make_audits()[name][1]
    write_audit_report(audit, tmp_path / "audit.html")
    parsed = check(tmp_path / "audit.html")
    assert not {number for number in numbers_of(audit) if number not in parsed.text}
    assert audit.warning in parsed.text
    assert "no release is the gradient of a single step" in parsed.text
    assert "encoder weights and text pool" in parsed.text
    assert str(audit.seed) in parsed.text


def test_the_demo_page_carries_the_audits(tmp_path: Path) -> None:
    audits = make_audits()
    write_comparison_report(make_results(), tmp_path / "report.html", audit_sections(audits))
    parsed = check(tmp_path / "report.html")
    for _, audit in audits:
        assert not {number for number in numbers_of(audit) if number not in parsed.text}
    # The opening paragraph of the page says what the attackers got and what a passed audit does not mean.
    assert (
        "In fedkc-pooled, at worst, another silo (attack 1) told a silo's row from a stranger's in 99%"
        in parsed.text
    )
    assert "In fedkc-pooled-dp and fedkc-embeddings-dp no attack that was run beat guessing." in parsed.text
    assert parsed.text.count(audits[0][1].warning) == 2


def test_the_worst_finding_is_chosen_by_verdict_then_lift() -> None:
    mild = make_finding(value=0.6, verdict="leaks")
    high = make_finding(value=0.9, verdict="none_shown")
    broken = make_finding(value=0.55, cap=0.52, verdict="violates_claim")
    assert sorted([high, mild, broken], key=worst_first) == [broken, mild, high]
    audit = make_audit().model_copy(update={"findings": [high, mild, broken]})
    (row,) = worst_rows([("run", audit)])
    assert row.worst == broken
    assert (row.low, row.high, row.findings) == (0.55, 0.9, 3)


def test_a_violated_claim_leads_the_summary() -> None:
    broken = make_finding(value=0.95, ci=(0.92, 0.97), cap=0.842, cap_reason=None, verdict="violates_claim")
    audit = make_audit(noise=True)
    audit = audit.model_copy(update={"findings": [*audit.findings, broken]})
    text = audit_summary([("run", audit)])
    assert "got further than the claim allows (AUC 0.950, cap 0.842): the claim is wrong." in text
    assert text.endswith(audit.warning)


def test_one_attack_scored_in_two_ways_is_told_once_with_what_its_claim_allows() -> None:
    both = [
        make_finding(attack=f"membership, {how}", value=value, cap=0.842, cap_reason=None)
        for how, value in (("likelihood ratio", 0.71), ("dot product", 0.62))
    ]
    text = audit_summary([("run", make_audit(noise=True).model_copy(update={"findings": both}))])
    assert text.count("told a silo's row") == 1
    assert "in 71% of pairs (guessing: 50%, at most by the claim: 84%)" in text


def test_what_no_finding_bears_on_is_not_tested(tmp_path: Path) -> None:
    """Attack 1 says nothing of content, and no attack says nothing of anything."""
    assert [badge.text for _, badge in answers(make_audit())] == ["leaks", "none shown", "not tested"]
    quiet = make_audit().model_copy(update={"findings": []})
    assert {badge.text for _, badge in answers(quiet)} == {"not tested"}
    write_audit_report(quiet, tmp_path / "audit.html")
    text = check(tmp_path / "audit.html").text
    assert text.count("not tested") == 3
    assert "none shown" not in text
    assert "In fedkc nothing was attacked" in text


def test_weights_that_were_not_attacked_are_told_by_their_claim() -> None:
    entry = NotRun(attack="membership in a trained model (12)", why="not in this version")
    exact = make_audit().model_copy(update={"not_run": [entry]})
    claimed = exact.model_copy(update={"weights_claimed": True})
    assert not_attacked([("a", make_audit())]) == []
    (sentence,) = not_attacked([("a", exact)])
    assert sentence.endswith(
        "Weights are the larger leak, so a run without centroids is not a run without leaks."
    )
    (sentence,) = not_attacked([("a", claimed)])
    assert "larger leak" not in sentence
    assert "left under a claim" in sentence
    (sentence,) = not_attacked([("a", claimed), ("b", exact)])
    assert "Weights that left under no claim, in b, are the larger leak" in sentence


def test_claims_of_the_inventory_in_words() -> None:
    training = {
        "mechanism": "dp-sgd", "epsilon": 5.881, "delta": 1e-3, "unit": "patient_id",
        "adjacency": "add-remove", "simulated": True,
    }  # fmt: skip
    cell = claim_cell(training)
    assert (cell.text, [badge.text for badge in cell.badges]) == ("ε 5.88", ["simulated"])
    assert (
        cell.detail
        == "at δ = 0.001, training by DP-SGD, for one patient (patient_id) with all its rows of a silo, "
        "there or not"
    )
    counts = {"mechanism": "gaussian-counts", "epsilon": 1.0, "delta": 1e-3, "adjacency": "replace-one"}
    assert claim_cell(counts).detail == "at δ = 0.001, noised scores, for one row, exchanged for another"
    nothing = claim_cell({"mechanism": "independent", "reason": "no figure"})
    assert (nothing.text, nothing.badges) == ("independent of the rows", ())
    exact = claim_cell({"mechanism": "none", "reason": "exact"})
    assert [badge.text for badge in exact.badges] == ["no finite epsilon"]


def test_every_metric_in_the_terminal_is_explained_below_it() -> None:
    found = [make_finding(metric=m) for m in ("auc", "tpr_at_1_percent_fpr", "token_f1", "rare_token_recall")]
    text = printed([("run", make_audit().model_copy(update={"findings": found}))])
    for meaning in ("AUC: share of pairs", "TPR at 1 % FPR: share of", "token F1: ", "rare token recall: "):
        assert re.search(f"^{meaning}", text, re.MULTILINE)
    assert "token recall: share of the words" not in text
    assert {"AUC", "TPR at 1 % FPR", "Token F1, rare token recall"} <= {word for word, _ in WORDS}


def test_none_shown_is_never_coloured_as_success(tmp_path: Path) -> None:
    write_audit_report(make_audit(noise=True), tmp_path / "audit.html")
    raw = (tmp_path / "audit.html").read_text()
    assert '<span class="badge plain">none shown</span>' in raw
    assert "badge good" not in raw


def test_recall_is_drawn_at_the_size_of_the_release_where_a_finding_has_none(tmp_path: Path) -> None:
    audit = make_audit(embeddings=True)
    bare = [f.model_copy(update={"details": {}}) for f in audit.findings if f.silo == "silo-1"]
    write_audit_report(audit.model_copy(update={"findings": bare}), tmp_path / "audit.html")
    check(tmp_path / "audit.html")
    # (4 + 9 + 17 + 33) / 4 = 15.75, drawn and read out as 16 rows.
    assert "16 rows 1.000" in (tmp_path / "audit.html").read_text()


def test_no_audits_no_sections() -> None:
    assert audit_sections([]) == []
    empty = make_audit().model_copy(update={"findings": [], "releases": [], "bounds": [], "not_run": []})
    assert len(audit_sections([("run", empty)])) == 2


def test_the_same_audit_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_audit_report(make_audit(embeddings=True), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_hostile_audits_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    audit = poisoned_audit(f"{HOSTILE}{OVERRIDE}😀")
    write_audit_report(audit, tmp_path / "audit.html")
    check(tmp_path / "audit.html")
    raw = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "<script" not in raw
    assert not set(raw) & {"\u202e", "\x1b", "\x00"}


def printed(audits: list[tuple[str, Audit]]) -> str:
    console = Console(width=100, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(attack_table(audits))
    return capture.get()


def test_the_terminal_table_fits_and_keeps_value_interval_and_baseline_together() -> None:
    text = printed(make_audits())
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert re.search(
        r"fedkc-pooled-dp +silo-4 +7\.85 +0\.54 \[0\.48, 0\.60\] +0\.50 +0\.84 +none shown", text
    )
    assert re.search(r"fedkc-embeddings +silo-1 +none +1\.00 \[0\.96, 1\.00\] +0\.27 +– +leaks", text)
    hostile = make_audit().model_copy(
        update={"findings": [make_finding(silo="[red]x\x1b[0m", attack="[/]a")]}
    )
    shown = printed([("[bold]r[/bold]", hostile)])
    assert "[bold]r[/bold]" in shown
    assert "[red]x" in shown
    assert "\x1b" not in shown
