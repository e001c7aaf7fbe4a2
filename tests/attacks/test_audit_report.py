"""The pages and tables about attacks: worst first, never a figure without what guessing scores."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attacks.audit_figures import membership_pictures, noise_pictures, recall_rows
from attacks.audit_opening import audit_summary, claim_against_shown, deed, headline, reasons
from attacks.audit_plots import epsilon_picture, roc_pictures, subject_pictures
from attacks.audit_report import attack_table, audit_page, audit_sections, for_terminal
from attacks.audit_rows import family, most_telling, subjects, worst_first, worst_of, worst_rows
from attacks.audit_words import (
    ATTACKS,
    MEANINGS,
    WORDS,
    answers,
    attack_number,
    attacked,
    claim_cell,
    claim_in_game,
    claimed_words,
    game_epsilon,
    metric_words,
    not_attacked,
    overlap_words,
    row_verdict,
)
from attacks.bench import SUITE, decoder, gradient, inversion, zero_shot
from attacks.findings import ALL_SILOS, Account, Audit, Finding, NotRun, Overlap, Utility, Verdicts
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
    (tmp_path / "audit.html").write_bytes(audit_page(audit))
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
    (row,) = worst_rows([("run", make_audit().model_copy(update={"findings": [high, mild]}))])
    assert (row.worst, row.leaking, row_verdict(row).text) == (high, 1, "leaks elsewhere")
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
    text = audit_summary([("run", make_audit().model_copy(update={"findings": both}))])
    assert text.count("told a silo's row") == 1
    assert "in 71% of pairs (guessing: 50%, at most by the claim: 84%)" in text


def test_the_answer_to_each_question_is_told_with_guessing_and_the_control() -> None:
    found = [
        make_finding(value=0.97, control=0.51),
        make_finding(
            number=8, attack="search of a text pool, ranking", metric="recall", value=0.8, ci=(0.7, 0.9),
            baseline=0.1, control=0.12, bears_on=["singling_out", "linkability"],
            adversary="outsider; sees the pooled centroids a silo shared",
        ),
        make_finding(
            number=13, attack="attribute probe", metric="accuracy", value=0.75, ci=(0.4, 0.9), baseline=0.6,
            verdict="none_shown", bears_on=["inference"], trials=8,
        ),
    ]  # fmt: skip
    told = reasons(make_audit().model_copy(update={"findings": found}))
    assert [name for name, *_ in told] == ["singling out", "linkability", "inference"]
    assert told[0][3] == (
        "Another silo (attack 1) told a silo's row from a stranger's in 97% of pairs (guessing: 50%, the "
        "same attack on an invented release without the silo's rows: 51%)."
    )
    # The other attack that bears on it is told where one of them was already.
    assert told[1][3].startswith("2 of 2 figures lie above guessing by their own 95 % interval, by no more ")
    assert "an outsider (attack 8) found 80% of a silo's texts in a pool" in told[1][3]
    assert told[2][3].startswith("Another silo (attack 13) gave the right answer in 75%")
    assert most_telling(found[0]) < most_telling(found[1]) < most_telling(found[2])


def test_the_claim_stands_beside_the_largest_bound_that_is_proved() -> None:
    game = {"claim_adjacency": "add-remove", "claim_epsilon_replace_one": 15.5}
    found = [
        make_finding(epsilon_lower_bound=0.4, claim_epsilon=8.0, details=game, silo="silo-1"),
        make_finding(epsilon_lower_bound=1.26, claim_epsilon=8.0, details=game, silo="silo-3"),
    ]
    audit = make_audit(noise=True).model_copy(update={"findings": found})
    assert claim_against_shown(audit) == (
        "The largest ε that an attack proves was lost is 1.26 (attack 1, silo-3, round 2); the claim allows "
        "15.50 in the game that it plays."
    )
    exact = audit.model_copy(update={"findings": [make_finding()]})
    assert claim_against_shown(exact).endswith("no finite ε is claimed for what it attacked.")
    assert game_epsilon(found[0]) == 15.5
    assert game_epsilon(make_finding(claim_epsilon=8.0)) is None
    assert game_epsilon(make_finding(claim_epsilon=8.0, details={"claim_adjacency": "replace-one"})) == 8.0
    nothing = audit.model_copy(update={"findings": []})
    assert claim_against_shown(nothing) == "Nothing was attacked, so no bound is shown."


def test_what_no_finding_bears_on_is_not_tested(tmp_path: Path) -> None:
    """Attack 1 says nothing of content, and no attack says nothing of anything."""
    assert [badge.text for _, badge in answers(make_audit())] == ["leaks", "none shown", "not tested"]
    quiet = make_audit().model_copy(update={"findings": []})
    assert {badge.text for _, badge in answers(quiet)} == {"not tested"}
    (tmp_path / "audit.html").write_bytes(audit_page(quiet))
    text = check(tmp_path / "audit.html").text
    assert text.count("not tested") == 3
    assert "none shown" not in text
    assert "Nothing was attacked; why is said below." in text


def left(kind: str, mechanism: str = "none") -> dict[str, Any]:
    """Changes of an audit whose silos sent one kind of release."""
    releases = [
        release.model_copy(update={"kind": kind, "claim": {"mechanism": mechanism, "reason": "exact"}})
        for release in make_audit().releases
    ]
    return {"releases": releases, "not_run": []}


def test_a_figure_over_all_silos_is_of_each_ones_release() -> None:
    one = make_audit().releases[0].model_copy(update={"kind": "centroids"})
    releases = [one.model_copy(update={"silo": silo}) for silo in ("silo-1", "silo-2")]
    releases += [one.model_copy(update={"round": one.round + 1})]
    found = [make_finding(number=13, attack="attribute probe", silo=ALL_SILOS, round=one.round)]
    audit = make_audit().model_copy(update={"releases": releases, "findings": found})
    assert attacked(audit) == releases[:2]
    found = [make_finding(number=13, attack="attribute probe", silo="silo-2", round=one.round)]
    assert attacked(audit.model_copy(update={"findings": found})) == releases[1:2]


def test_weights_that_were_not_attacked_are_told_by_their_claim() -> None:
    exact = make_audit().model_copy(update=left("model"))
    claimed = exact.model_copy(update={"weights_claimed": True})
    weights = [words for words in not_attacked([("a", exact)]) if words.startswith("Weights")]
    assert weights == [
        "Weights were not attacked (attack 12), though they left: Trained weights. Weights under no claim "
        "are the larger leak, so a run without other findings is not a run without leaks."
    ]
    text = " ".join(not_attacked([("a", claimed)]))
    assert "larger leak" not in text
    assert "They left under a claim" in text
    text = " ".join(not_attacked([("a", claimed), ("b", exact)]))
    assert "In a: weights were not attacked" in text
    assert "In b: weights were not attacked" in text
    # Attack 12 was put to them: nothing of the kind may be said.
    trained = make_finding(attack="membership in a trained model, loss", number=12)
    assert "Weights" not in " ".join(not_attacked([("a", exact.model_copy(update={"findings": [trained]}))]))


def test_what_was_not_attacked_is_told_by_number() -> None:
    text = " ".join(not_attacked([("a", make_audit())]))
    assert "Attacks 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 14 were not run" in text
    everything = [make_finding(number=number) for number in ATTACKS]
    done = make_audit().model_copy(update={"findings": everything, "not_run": []})
    assert not_attacked([("a", done)]) == []
    partly = done.model_copy(
        update={"not_run": [NotRun(attack="token recovery", why="silo-1, round 2: too few")]}
    )
    assert not_attacked([("a", partly)]) == ["Attack 2 could not be put to all that left."]
    scores = done.model_copy(update=left("metrics"))
    assert not_attacked([("a", scores)]) == ["No attack was put to “Scores”, which left too."]
    assert not_attacked([("a", done.model_copy(update=left("metrics", "independent")))]) == []
    gradients = done.model_copy(
        update={**left("gradient"), "findings": [f for f in everything if f.number != 11]}
    )
    assert "“Gradients of one batch” (by attack 11)" in not_attacked([("a", gradients)])[0]


def test_every_attack_of_the_suite_has_its_number_and_its_sentence() -> None:
    every = {*SUITE, decoder.ATTACK, gradient.ATTACK, inversion.ATTACK, zero_shot.ATTACK}
    for attack in every:
        assert attack_number(attack.name) == attack.number, attack.name
    assert attack_number("mechanism audit (3)") == 3
    assert attack_number("all") is None
    assert set(ATTACKS) == set(range(1, 15))
    assert all(words.does.endswith(".") for words in ATTACKS.values())


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
    found = [make_finding(metric=metric) for metric in MEANINGS if metric != "token_recall"]
    text = printed([("run", make_audit().model_copy(update={"findings": found}))])
    for metric in MEANINGS:
        shown = re.search(f"^{re.escape(metric_words(metric))}: ", text, re.MULTILINE)
        assert bool(shown) == (metric != "token_recall"), metric
    explained = " ".join(word for word, _ in WORDS).lower()
    for metric in MEANINGS:
        word = metric_words(metric).lower()
        known = "rouge" if word.startswith("rouge") else word.removeprefix("tpr ")
        assert metric == "cosine" or known in explained, metric
    assert metric_words("tpr_at_0.1_percent_fpr") == "TPR at 0.1 % FPR"
    assert metric_words("tpr_at_bold_percent_fpr") == "tpr at bold percent fpr"


def test_none_shown_is_never_coloured_as_success(tmp_path: Path) -> None:
    (tmp_path / "audit.html").write_bytes(audit_page(make_audit(noise=True)))
    raw = (tmp_path / "audit.html").read_text()
    assert '<span class="badge plain">none shown</span>' in raw
    assert "badge good" not in raw


def test_recall_is_drawn_at_the_size_of_the_release_where_a_finding_has_none(tmp_path: Path) -> None:
    audit = make_audit(embeddings=True)
    bare = [f.model_copy(update={"details": {}}) for f in audit.findings if f.silo == "silo-1"]
    (tmp_path / "audit.html").write_bytes(audit_page(audit.model_copy(update={"findings": bare})))
    check(tmp_path / "audit.html")
    # (4 + 9 + 17 + 33) / 4 = 15.75, drawn and read out as 16 rows.
    assert "16 rows 1.000" in (tmp_path / "audit.html").read_text()


def test_no_audits_no_sections() -> None:
    assert audit_sections([]) == []
    empty = make_audit().model_copy(update={"findings": [], "releases": [], "bounds": [], "not_run": []})
    assert len(audit_sections([("run", empty)])) == 2


def test_the_same_audit_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(audit_page(make_audit(embeddings=True)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_hostile_audits_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    audit = poisoned_audit(f"{HOSTILE}{OVERRIDE}😀")
    (tmp_path / "audit.html").write_bytes(audit_page(audit))
    check(tmp_path / "audit.html")
    raw = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "<script" not in raw
    assert not set(raw) & {"\u202e", "\x1b", "\x00"}


def printed(audits: list[tuple[str, Audit]]) -> str:
    console = Console(width=120, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(attack_table(audits))
    return capture.get()


def test_the_terminal_table_fits_and_keeps_value_interval_and_baseline_together() -> None:
    text = printed(make_audits())
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "…" not in text
    assert re.search(
        r"fedkc-pooled-dp +silo-4 +7\.85 +0\.54 \[0\.48, 0\.60\] +0\.50 +0\.84 +none shown", text
    )
    assert re.search(r"fedkc-embeddings +silo-1 +none +1\.00 \[0\.96, 1\.00\] +0\.27 +– +leaks", text)
    hostile = make_audit().model_copy(
        update={"findings": [make_finding(silo="[red]x\x1b[0m", attack="[/]a")]}
    )
    shown = printed([("[bold]r[/bold]", hostile), ("b", hostile)])
    assert "[bold]r[/bold]" in shown
    assert "[red]x" in shown
    assert "\x1b" not in shown


def test_a_long_table_stays_within_its_width_and_says_each_attack_once() -> None:
    """As many figures as all attacks make; of the ways to score one attack the worst stands in the table."""
    names = {
        1: ("membership, likelihood ratio", "membership, dot product"),
        6: (
            "membership over several rounds, likelihood ratio",
            "membership over several rounds, dot product",
        ),
        7: ("membership in a sum less one's own part, likelihood ratio",),
        12: ("membership in a trained model, LiRA, offline", "membership in a trained model, RMIA"),
    }
    found = [
        make_finding(number=number, attack=name, metric=metric, control=0.5)
        for number, ways in names.items()
        for name in ways
        for metric in ("auc", "tpr_at_1_percent_fpr")
    ]
    text = printed([("run", make_audit().model_copy(update={"findings": found}))])
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 120
    assert len(re.findall(r"^ *– TPR at 1 % FPR", text, re.MULTILINE)) == 4
    assert len(re.findall(r"12 membership in a trained model: AUC", text)) == 1
    assert family("membership in a trained model, LiRA, offline") == "membership in a trained model"
    assert family("membership, a row that left between two rounds").endswith("two rounds")
    assert family("LiRA") == "LiRA"
    assert len(worst_rows([("run", make_audit().model_copy(update={"findings": found}))])) == 14


def rendered(tmp_path: Path, **changes: Any) -> str:
    (tmp_path / "audit.html").write_bytes(audit_page(make_audit().model_copy(update=changes)))
    return check(tmp_path / "audit.html").text


def test_texts_are_counted_and_never_shown_unless_asked_for(tmp_path: Path) -> None:
    counted = make_finding(number=8, attack="search of a text pool, ranking", details={"texts_withheld": 17})
    text = rendered(tmp_path, findings=[counted])
    assert "What was read back" in text
    assert "withheld; run with --show-text to see them" in text
    assert "17" in text
    assert "holds text of the silos" not in text
    assert "What was read back" not in rendered(tmp_path, findings=[make_finding()])


def test_texts_that_were_asked_for_are_cut_escaped_and_come_with_a_warning(tmp_path: Path) -> None:
    texts = [f"{HOSTILE}{OVERRIDE} patient {'y' * 400}", *(f"text number {index}" for index in range(30))]
    text = rendered(tmp_path, findings=[make_finding(texts=texts)])
    raw = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "This page holds text of the silos." in text
    assert "<script" not in raw
    assert not set(raw) & {"\u202e", "\x1b", "\x00"}
    assert "y" * 301 not in text
    assert "text number 18" in text
    assert "text number 19" not in text
    assert "11 more are in audit.json" in text


def test_the_overlap_of_the_pool_is_told(tmp_path: Path) -> None:
    overlap = Overlap(pool=1600, left_out=3)
    assert overlap_words([("a", make_audit().model_copy(update={"overlap": overlap}))]) == [
        "3 of 1,600 pool texts share a passage with a silo's rows and were left out of every attack."
    ]
    assert "3 of 1,600 pool texts share a passage" in rendered(tmp_path, overlap=overlap)
    assert overlap_words([("a", make_audit())]) == []


def test_the_class_of_an_attack_and_its_sentence_stand_in_the_details(tmp_path: Path) -> None:
    nist = "privacy attack: membership inference (2024 edition, section 2.4.2)"
    text = rendered(tmp_path, findings=[make_finding(details={"nist_class": nist}, control=0.4875)])
    assert text.count(nist) >= 2
    assert ATTACKS[1].does in text
    assert text.count("0.487") + text.count("0.488") >= 2


CURVE = [(0.0, 0.0), (0.001, 0.25), (0.01, 0.5), (0.1, 0.75), (1.0, 1.0)]


def test_roc_curves_are_read_at_their_rates_beside_the_cap() -> None:
    """At 0.1 % the step is the last point at or below it; guessing would be the rate itself."""
    capped = make_finding(curve=CURVE, cap_curve=[(0.0, 0.0), (0.01, 0.1), (0.5, 0.8), (1.0, 1.0)])
    (picture,) = roc_pictures("run0", make_audit().model_copy(update={"findings": [capped]}))
    assert "0.250 of the rows found at 0.1% false positives (claim: 0.000)" in picture.alt
    assert "0.500 of the rows found at 1.0% false positives (claim: 0.100)" in picture.alt
    assert "most the claim allows" in picture.svg
    (picture,) = roc_pictures(
        "run0", make_audit().model_copy(update={"findings": [make_finding(curve=CURVE)]})
    )
    assert "most the claim allows" not in picture.svg


@pytest.mark.parametrize(
    "curve", [[(0.0, 1.0)], [(0.5, 0.5)], [(math.nan, 0.5), (0.2, math.nan), (0.3, 0.9)], [(-1.0, 7.0)], []]
)
def test_a_curve_of_few_or_broken_points_is_drawn_or_left_out(curve: list[tuple[float, float]]) -> None:
    audit = make_audit().model_copy(update={"findings": [make_finding(curve=curve, cap_curve=curve)]})
    assert len(roc_pictures("run0", audit)) == any(0 <= x <= 1 and 0 <= y <= 1 for x, y in curve)


def broken(value: float) -> list[Finding]:
    """Findings in which every number that the schema leaves free is the same broken one."""
    entry = {"centroid": value, "rows": value, "members": value, "found": value}
    return [
        make_finding(
            number=number, attack=name, metric=metric, value=value, ci=(value, value), baseline=value,
            control=value, cap=value, epsilon_lower_bound=value, claim_epsilon=value, curve=[(value, value)],
            cap_curve=[(value, value)], target="embedding-layer centroid 1 of 2",
            details={"rows": value, "by_centroid": [entry, "x", 3], "texts_withheld": value,
                     "claim_epsilon_replace_one": value},
        )
        for number, name, metric in (
            (1, "membership, likelihood ratio", "auc"),
            (2, "token recovery", "token_recall"),
            (4, "one-run audit with canaries", "guesses_right"),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_break_no_page(tmp_path: Path, value: float) -> None:
    text = rendered(tmp_path, findings=[*broken(value), make_finding()])
    assert "What an attacker could read" in text
    printed([("run", make_audit().model_copy(update={"findings": broken(value)}))])


def test_lower_bounds_stand_beside_the_claim_of_their_game() -> None:
    game = {"claim_adjacency": "add-remove", "claim_epsilon_replace_one": 15.5}
    found = [
        make_finding(epsilon_lower_bound=0.4, claim_epsilon=8.0, details=game),
        make_finding(epsilon_lower_bound=0.9, claim_epsilon=8.0, details=game, silo="silo-2"),
        make_finding(number=7, attack="membership in a sum less one's own part", epsilon_lower_bound=2.0),
        make_finding(
            number=4, attack="one-run audit with canaries", metric="guesses_right", epsilon_lower_bound=1.5,
            claim_epsilon=8.0, details={"claim_epsilon_add_remove": 8.0},
        ),
        make_finding(number=6, attack="membership over several rounds", claim_epsilon=8.0),
    ]  # fmt: skip
    (picture,) = epsilon_picture([("run", make_audit().model_copy(update={"findings": found}))])
    assert picture.alt == (
        "run, attack 1: at least ε 0.90, claimed ε 15.50. "
        "run, attack 4: at least ε 1.50, claimed ε 8.00. "
        "run, attack 6: at least ε 1.74, claimed ε 8.00 is of another game. "
        "run, attack 7: at least ε 2.00, no finite ε is claimed."
    )
    assert "no finite ε is claimed" in picture.svg
    nothing = make_audit().model_copy(update={"findings": [make_finding(epsilon_lower_bound=None)]})
    assert epsilon_picture([("run", nothing)]) == []


def test_the_ten_worst_centroids_are_named(tmp_path: Path) -> None:
    entries = [
        {"centroid": float(c), "rows": float(c + 2), "members": float(c + 2), "found": 1 - c / 20}
        for c in range(1, 15)
    ]
    read = make_finding(
        number=2, attack="token recovery", metric="token_recall", value=0.99, baseline=0.2, trials=40,
        target="embedding-layer centroid 7 of 9", silo="silo-4", round=3, details={"rows": 5.0},
    )  # fmt: skip
    both = [make_finding(metric=m, details={"by_centroid": entries}) for m in ("auc", "tpr_at_1_percent_fpr")]
    audit = make_audit().model_copy(update={"findings": [*both, read]})
    found = subjects(audit)
    # The same shares stand in each figure of the attack, and count once.
    assert len(found) == 15
    first = found[0]
    assert (first.silo, first.round, first.centroid, first.kind, first.share) == (
        "silo-4", 3, 7, "words", 0.99,
    )  # fmt: skip
    assert [one.centroid for one in found[1:5]] == [1, 2, 3, 4]
    text = rendered(tmp_path, findings=audit.findings)
    assert "The 10 worst centroids" in text
    assert "99% of its words read" in text
    assert "95% of its rows found" in text
    assert "50% of its rows found" not in text  # the eleventh
    (picture,) = subject_pictures("run0", found)
    assert "3 rows 0.95" in picture.alt
    assert subject_pictures("run0", []) == []


def test_membership_of_one_run_is_one_figure_and_of_several_one_an_attack() -> None:
    both = [make_finding(), make_finding(number=7, attack="membership in a sum less one's own part")]
    audit = make_audit().model_copy(update={"findings": both})
    (picture,) = membership_pictures([("run", audit)])
    assert "7, in a sum of all: silo-1 0.972" in picture.alt
    assert len(membership_pictures([("a", audit), ("b", audit)])) == 2


def test_recall_is_drawn_against_size_and_noise() -> None:
    rows: list[dict[str, Any]] = [
        {"k": k, "noise": noise, "seed": seed, "recall": recall + seed / 10, "baseline": 0.2, "control": 0.11}
        for k, noise, recall in ((1, 0.0, 0.8), (1, 0.1, 0.6), (32, 0.0, 0.7), (32, 0.1, 0.3))
        for seed in (0, 1)
    ]
    (picture,) = noise_pictures([*rows, {"k": "x", "noise": 0}, {"k": 1, "noise": math.nan}])
    # The mean of the two seeds.
    assert picture.alt.startswith("1 rows, noise 0: recall 0.850, guessing 0.200. 1 rows, noise 0.1: recall")
    assert "8 groups" in picture.caption
    assert "0.11 at most" in picture.caption
    assert "0.1 noise" in picture.svg
    assert "32 rows" in picture.svg
    assert noise_pictures([row for row in rows if row["noise"] == 0]) == []
    assert noise_pictures([]) == []
    many = [
        {"k": float(k), "noise": noise, "recall": 0.5, "baseline": 0.2}
        for k in range(1, 40)
        for noise in (0, 1 / k)
    ]
    assert "about 32 rows" in noise_pictures(many)[0].svg


def test_audits_of_several_noises_give_the_rows_of_that_figure() -> None:
    """Noise 2 clips of .5 on a sum of 4 rows is .25 on each number of its centroid."""
    exact, noised = make_audit(embeddings=True), make_audit(noise=True, embeddings=True)
    claim = {
        "mechanism": "gaussian-sums",
        "clip": 0.5,
        "noise_multiplier": 2.0,
        "epsilon": 7.85,
        "delta": 1e-3,
    }
    noised = noised.model_copy(
        update={"releases": [one.model_copy(update={"claim": claim}) for one in noised.releases]}
    )
    rows = recall_rows([("a", exact), ("b", noised)])
    assert {row["noise"] for row in rows if row["k"] == 4} == {0.0, 0.25}
    assert len(rows) == len(exact.findings) + len(noised.findings)
    assert len(noise_pictures(rows)) == 1
    sections = audit_sections([("a", exact), ("b", noised)])
    assert any("against the noise" in getattr(block, "caption", "") for s in sections for block in s.blocks)


def test_an_audit_of_everything_fits_its_pages(tmp_path: Path) -> None:
    """A quiet audit and one of nothing have the same opening, and the page says what it does not prove."""
    empty: dict[str, Any] = {"findings": [], "releases": [], "bounds": [], "not_run": []}
    text = rendered(tmp_path, **empty)
    assert "Nothing was attacked" in text
    assert "Nothing left the silos." in text
    assert "Passing proves nothing." in text
    text = rendered(tmp_path)
    assert "Can one row be told from all others?" in text
    assert "What left the silos, and who can read it" in text
    assert "the other silos" in text


def test_accounts_utility_and_channels_stand_beside_the_findings(tmp_path: Path) -> None:
    account = Account(
        silo="hospital-a", releases=7, epsilon=None, private_epsilon=3.5, delta=1e-5,
        no_finite_epsilon=["exact means"], units=["patient_id"], adjacencies=["add-remove"], simulated=True,
        trust="each silo adds its own noise",
    )  # fmt: skip
    worth = Utility(
        silo="hospital-a", train_rows=1234, test_accuracy=0.81, test_interval=(0.78, 0.84),
        baseline_accuracy=0.77,
    )  # fmt: skip
    made = make_audit().model_copy(
        update={"accounts": [account], "utility": [worth], "channels": ["how <b>many</b> rows there are"]}
    )
    (tmp_path / "report.html").write_bytes(audit_page(made))
    text = check(tmp_path / "report.html").text
    for words in ("patient_id", "each silo adds its own noise", "1,234", "0.81", "How <b>many</b> rows"):
        assert words in text


QUIET = Verdicts(singling_out="none_shown", linkability="none_shown", inference="none_shown")


def elsewhere(**changes: Any) -> Audit:
    """The audit of a file of vectors that no run made."""
    made = make_audit()
    one = made.releases[0].model_copy(
        update={"silo": "elsewhere", "readable_by": [], "rows_per_centroid": [1.0, 1.0]}
    )
    found = make_finding(
        silo="elsewhere", number=8, attack="search of a text pool, vectors that name themselves",
        metric="vectors_named", value=0.25, baseline=0.0,
    )  # fmt: skip
    values = {"run": "vectors.npy", "method": "elsewhere", "releases": [one], "findings": [found], **changes}
    return made.model_copy(update=values)


def test_an_audit_of_a_file_says_what_is_known_of_it(tmp_path: Path) -> None:
    (tmp_path / "audit.html").write_bytes(audit_page(elsewhere()))
    text = check(tmp_path / "audit.html").text
    assert "Audit: vectors.npy" in text
    assert (
        "In vectors.npy, at worst, someone who has the file (attack 8) named the pool texts behind 25% of"
        in (audit_summary([("vectors.npy", elsewhere())]))
    )
    assert headline(elsewhere()).startswith("1 attack was put to the file.")
    assert "not stated" in text
    assert "nobody" not in text.replace("nobody's", "")
    assert "Vectors of single texts, as far as is stated" in text
    assert "Another silo" not in text


def test_the_claim_is_told_in_the_game_of_the_attack() -> None:
    """Also where the details do not name the adjacency of the claim, as those of attacks 6, 7 and 8."""
    game = make_finding(number=8, claim_epsilon=5.3, details={"claim_epsilon_replace_one": 9.875})
    assert claimed_words([game]) == "claimed 5.30, which is 9.88 here"
    assert claim_in_game(game) == "9.88"
    assert (claim_in_game(make_finding()), claim_in_game(make_finding(claim_epsilon=5.3))) == ("none", "5.30")
    unknown = rendered_text(make_finding(claim_epsilon=5.3))
    assert "claimed 5.30 of the release; the attack's game is replace-one" in unknown
    assert "claimed 5.30 (replace-one)" not in unknown


def rendered_text(*findings: Finding) -> str:
    blocks = [b for s in audit_sections([("run", make_audit().model_copy(update={"findings": [*findings]}))])
              for b in s.blocks]  # fmt: skip
    tables = [b for b in blocks if isinstance(b, page.Table)]
    cells = [cell for table in tables for _, row in table.cells() for cell in row]
    return " ".join(f"{cell.text} {cell.detail}" for cell in cells)


def test_figures_that_leak_by_themselves_alone_are_told_by_one_rule(tmp_path: Path) -> None:
    found = [make_finding(), *(make_finding(silo=f"silo-{i}", verdict="none_shown") for i in range(2, 6))]
    audit = make_audit().model_copy(update={"findings": found, "verdicts": QUIET})
    words = "1 of 5 figures lies above guessing by its own 95 % interval, by no more than chance explains"
    assert headline(audit) == f"1 attack was put to what left the silos. {words} over so many."
    assert reasons(audit)[0][3].startswith(f"{words} over so many. The nearest")
    assert f"In run {words} over so many." in audit_summary([("run", audit)])
    (tmp_path / "audit.html").write_bytes(audit_page(audit))
    text = check(tmp_path / "audit.html").text
    assert re.search(r"Attacks that leak\s*0 of 1\s*1 of 5 figures by its own 95 % interval", text)
    audit = audit.model_copy(update={"verdicts": make_audit().verdicts})
    assert headline(audit).startswith("1 attack was put to what left the silos. It shows singling out")


def test_how_many_releases_were_attacked_and_which_never(tmp_path: Path) -> None:
    made = make_audit()
    scores = [one.model_copy(update={"kind": "metrics"}) for one in made.releases]
    text = rendered(tmp_path, releases=[*made.releases, *scores])
    assert re.search(r"Releases attacked\s*8 of 16\s*never: Scores", text)


def test_a_row_that_need_not_have_left_answers_no_question_that_another_answers() -> None:
    gone = make_finding(
        number=6, attack="membership, a row that left between two rounds", value=1.0, ci=(0.99, 1.0)
    )
    audit = make_audit().model_copy(update={"findings": [gone, make_finding()]})
    best = worst_of(audit, "linkability", {1})
    assert best is not None
    assert best.number == 1
    assert "would tell, if a row left between two rounds, which one, in 100% of pairs" in deed(gone)
    assert "6 membership, if a row left" in printed([("run", audit)])


def test_texts_read_word_for_word_are_counted_and_false_details_left_out() -> None:
    read = make_finding(
        number=11, attack="gradient inversion", metric="rouge2", value=1.0,
        details={"texts": 4, "texts_found_exactly": 4, "encoder_in_cap": False},
    )  # fmt: skip
    assert "read back 4 of 4 texts word for word" in deed(read)
    part = make_finding(number=8, attack="search", details={"texts_withheld": 20, "chosen": 149})
    assert "the first 20 of 149 texts" in rendered_text(part)
    assert "at least 20 texts" in rendered_text(make_finding(details={"texts_withheld": 20}))
    assert "encoder in cap" not in rendered_text(read)


@pytest.mark.parametrize("width", [80, 60, 120])
def test_a_narrow_terminal_keeps_the_attack_and_the_verdict(width: int) -> None:
    found = [
        make_finding(
            number=12,
            attack="membership in a trained model, RMIA",
            control=0.5,
            cap=0.84,
            silo="hospital-abc",
        ),
        make_finding(attack="membership, dot product", verdict="none_shown"),
    ]
    audit = make_audit().model_copy(update={"findings": found})
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        for part in for_terminal(audit):
            console.print(part, highlight=False, markup=False)
    text = capture.get()
    assert max(len(line) for line in text.splitlines()) <= width
    for word in (
        "membership",
        "trained",
        "leaks",
        "held",
        "none shown" if width > 60 else "none",
        "0.97",
        "guessing",
    ):
        assert word in text, word
    assert ("control" in text.split("claim ε:")[0].split("verdict")[0]) == (width == 120)
    # What was found, the answers, then the table with its words; and what was not run is said once.
    places = [
        text.index(word)
        for word in (
            "was put to" if "was put to" in text else "were put to",
            "singling out:",
            "What an attacker",
            "AUC: share",
        )
    ]
    assert places == sorted(places)
    assert " ".join(text.split()).count("were not run") == 1


def test_the_account_of_each_silo_stands_on_the_first_page(tmp_path: Path) -> None:
    one = Account(
        silo="hospital-a", releases=7, epsilon=3.456, private_epsilon=3.456, delta=1e-5, no_finite_epsilon=[],
        units=["row"], adjacencies=["add-remove"], simulated=True, trust="each silo adds its own noise",
    )  # fmt: skip
    two = one.model_copy(
        update={"silo": "hospital-b", "epsilon": None, "no_finite_epsilon": ["exact"], "simulated": False}
    )
    first = rendered(tmp_path, accounts=[one, two])
    assert re.search(r"hospital-a\s*7\s*ε 3.46\s*simulated\s*1e-5", first)
    assert re.search(r"hospital-b\s*7\s*no finite ε\s*ε 3.46 of what has one\s*1e-5", first)
