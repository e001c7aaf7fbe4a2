"""The tables of an audit's report: every figure with interval, trials, baseline, control and cap.

Built on `securefl.report.page`, of `Audit` objects; it must not run an attack or read a run folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from attacks.audit_opening import reasons, role
from attacks.audit_rows import Audits, family, number_in, subjects, worst_first, worst_rows
from attacks.audit_words import (
    ATTACKS,
    ELSEWHERE,
    answers,
    attack_words,
    claim_cell,
    claimed_words,
    game_epsilon,
    metric_words,
    not_run_numbers,
    readers_words,
    release_words,
    row_verdict,
    verdict_of,
)
from attacks.findings import Audit, Finding
from securefl.report.claims import is_private, whose
from securefl.report.page import (
    Badge,
    Block,
    Cell,
    Fold,
    Items,
    Note,
    Paragraph,
    Table,
    accuracy,
    clean,
    count,
    epsilon,
    interval,
    joined,
    listing,
)

_MOST_FINDINGS = 300
_MOST_SUBJECTS = 10
_MOST_TEXTS, _LONGEST_TEXT = 20, 300
_MOST_DETAILS = 6
# What stands elsewhere on the page, or is of the schema.
_UNSHOWN = frozenset({"nist_class", "texts_withheld"})


def verdict_table(audits: Audits) -> Table:
    """The three answers of several runs, a row a run."""
    rows: list[tuple[Cell | str, ...]] = []
    for name, audit in audits:
        given = (Cell("", badges=(badge,)) for _, badge in answers(audit))
        judged = count(len(audit.findings), "finding"), f"{len(not_run_numbers(audit))} of {len(ATTACKS)}"
        rows.append((Cell(clean(name, 40), full=name), *given, *judged))
    heads = ("Run", "Singling out", "Linkability", "Inference", "Judged on", "Attacks not run")
    return Table("The three questions, each answered by its worst finding", heads, tuple(rows))


def question_table(audit: Audit) -> Table:
    """The three answers of one run with the finding that says why."""
    rows = tuple(
        (Cell(name.capitalize(), words), Cell("", badges=(badge,)), why)
        for name, words, badge, why in reasons(audit)
    )
    return Table("The three questions", ("Question", "Answer", "Because"), rows, wrap=frozenset({2}))


def departed_table(audit: Audit) -> Table:
    """What left, to whom, and under which claim; alike releases of all silos and rounds in one row."""
    silos = sorted({release.silo for release in audit.releases})
    found: dict[tuple[str, str, str], list[float]] = {}
    who: dict[tuple[str, str, str], set[str]] = {}
    for r in audit.releases:
        known = number_in(r.claim.get("epsilon"))
        if r.claim.get("mechanism") == "independent":
            claim = "independent of the rows"
        elif known is None or not is_private(r.claim):
            claim = "no finite ε"
        else:
            claim = whose(r.claim)
        key = release_words(r), readers_words(r, silos), claim
        found.setdefault(key, []).append(known if claim == whose(r.claim) and known is not None else -1.0)
        who.setdefault(key, set()).add(r.silo)
    rows = []
    for (what, readers, claim), values in found.items():
        low, high = min(values), max(values)
        shown = Cell(claim)
        if low > 0:
            ends = epsilon(high) if low == high else f"{epsilon(low)} to {epsilon(high)}"
            shown = Cell(f"ε {ends} each", f"for {claim}")
        rows.append((
            what, Cell(f"{len(values):,}", f"of {count(len(who[what, readers, claim]), 'silo')}"), readers,
            shown,
        ))  # fmt: skip
    return Table(
        "What was audited" if silos == [ELSEWHERE] else "What left the silos, and who can read it",
        ("What", "Releases", "Readable by", "Claimed"),
        tuple(rows),
        wrap=frozenset({2, 3}),
    )


def _bound_cell(finding: Finding) -> Cell:
    shown = "–" if finding.epsilon_lower_bound is None else epsilon(finding.epsilon_lower_bound)
    words, game = claimed_words([finding]), clean(finding.adjacency or "", 24)
    if game and finding.claim_epsilon is not None and game_epsilon(finding) is None:
        words += f" of the release; the attack's game is {game}"
    elif game:
        words += f" ({game})"
    return Cell(shown, words)


def _reference_cell(finding: Finding, why: bool = True) -> Cell:
    """What guessing scores, and below it the control, and the cap, or why there is none if `why`."""
    control = f"control {accuracy(finding.control)}; " if finding.control is not None else ""
    cap = f"cap {accuracy(finding.cap)}" if finding.cap is not None else "no cap"
    reason = clean(finding.cap_reason or "", 160) if finding.cap is None and why else ""
    return Cell(accuracy(finding.baseline), f"{control}{cap}: {reason}" if reason else f"{control}{cap}")


def side_by_side(audits: Audits) -> Table:
    """The worst finding of every attack, metric and run."""
    several = len(audits) > 1
    rows = []
    for row in worst_rows(audits):
        f = row.worst
        spread = f"; {accuracy(row.low)} to {accuracy(row.high)} over {row.findings}" * (row.findings > 1)
        if 0 < row.leaking < row.findings:
            spread += f", of which {count(row.leaking, 'leaks', 'leak')}"
        place = f"{clean(f.silo, 30)}, round {f.round}"
        rows.append((
            Cell(f"{f.number}: {attack_words(f.attack)}"), metric_words(f.metric),
            Cell(row.run, f"{place}{spread}") if several else Cell(place, spread.removeprefix("; ")),
            Cell(accuracy(f.value), f"{interval(f.ci)}; {count(f.trials, 'trial')}", (row_verdict(row),)),
            _reference_cell(f, why=False), _bound_cell(f),
        ))  # fmt: skip
    where = "Run; over all silos and rounds" if several else "Worst at; over all"
    return Table(
        "The worst finding of every attack, with 95 % intervals",
        ("Attack", "Figure", where, "Value and verdict", "Guessing, control, cap", "ε at least"),
        tuple(rows),
        wrap=frozenset({0, 2, 3, 4, 5}),
        note="The worst of several figures is worse than a typical one; the interval is that of the one. "
        "Control: the same attack where it has nothing to find. Leaks elsewhere: this value has too few "
        "trials to tell it from guessing, and another one of the row was told.",
    )


def attacks_table(audits: Audits) -> Table:
    """Who did what in each attack that was run, knowing what, and its class in NIST AI 100-2."""
    found: dict[int, list[Finding]] = {}
    for _, audit in audits:
        for finding in audit.findings:
            found.setdefault(finding.number, []).append(finding)
    rows = []
    for number, findings in sorted(found.items()):
        names = "; ".join(dict.fromkeys(attack_words(family(f.attack)) for f in findings[:_MOST_FINDINGS]))
        does = ATTACKS[number].does if number in ATTACKS else ""
        if all(f.silo == ELSEWHERE for f in findings):
            does = does.replace("Another silo", "Someone who has the file", 1)
        known = list(dict.fromkeys(fact for f in findings for fact in f.knowledge))[:8]
        knowing = joined([clean(fact, 100) for fact in known]) or "nothing more"
        sees = list(dict.fromkeys(f.adversary for f in findings))[:3]
        classes = list(dict.fromkeys(str(f.details.get("nist_class", "")) for f in findings))[:3]
        rows.append((
            str(number), Cell(does, clean(names, 240)),
            Cell("; or ".join(clean(who, 100) for who in sees), f"knowing {knowing}"),
            clean("; ".join(one for one in classes if one), 160) or "–",
        ))  # fmt: skip
    return Table(
        "The attacks that were run",
        ("Attack", "Who does what", "Adversary", "Class in NIST AI 100-2"),
        tuple(rows),
        wrap=frozenset({1, 2, 3}),
    )


def _details(finding: Finding) -> str:
    """The plain entries of a finding's details, a few of them."""
    parts: list[str] = []
    for key, value in finding.details.items():
        if isinstance(value, bool):
            parts += [clean(str(key), 30).replace("_", " ")] if value else []
        elif isinstance(value, str | int | float) and key not in _UNSHOWN:
            shown = f"{value:.3g}" if isinstance(value, float) else clean(str(value), 60)
            parts.append(f"{clean(str(key), 30).replace('_', ' ')} {shown}")
    return ", ".join(parts[:_MOST_DETAILS])


def all_findings(name: str, audit: Audit) -> Fold:
    """Every finding of one run."""
    chosen = sorted(audit.findings, key=lambda f: (f.number, f.attack, f.metric, *worst_first(f)))
    rows = []
    for f in chosen[:_MOST_FINDINGS]:
        nist = clean(str(f.details.get("nist_class", "")), 120)
        knowing = joined([clean(fact, 100) for fact in f.knowledge[:8]]) or "nothing more"
        who = f"attack {f.number}, by {role(f)}, knowing {knowing}{f'; NIST: {nist}' if nist else ''}"
        rows.append((
            Cell(attack_words(f.attack), who), Cell(clean(f.silo, 32), f"round {f.round}"),
            Cell(metric_words(f.metric), f"{clean(f.target, 60)}: {_details(f)}"),
            Cell(accuracy(f.value), f"{interval(f.ci)}, {count(f.trials, 'trial')}", (verdict_of(f),)),
            _reference_cell(f), _bound_cell(f),
        ))  # fmt: skip
    left = len(chosen) - len(rows)
    table = Table(
        f"Every finding: {clean(name, 40)}",
        ("Attack", "Where", "Figure and target", "Value and verdict", "Guessing, control, cap", "ε at least"),
        tuple(rows),
        wrap=frozenset({0, 2, 3, 4, 5}),
        note=f"{left} more are in audit.json." if left else "",
    )
    return Fold(f"Every finding: {clean(name, 40)} ({len(chosen)})", (table,))


def subject_table(name: str, audit: Audit) -> list[Table]:
    """The most exposed centroids by name; empty where no attack was judged on one by itself."""
    found = [one for one in subjects(audit) if one.share > one.guess][:_MOST_SUBJECTS]
    if not found:
        return []
    words = {"rows": "its rows found", "words": "its words read"}
    rows = tuple(
        (
            Cell(clean(one.silo, 32), full=one.silo), str(one.round), str(one.centroid), f"{one.rows:.0f}",
            Cell(f"{one.share:.0%} of {words[one.kind]}", f"of {one.parts:,}; guessing {one.guess:.0%}"),
        )
        for one in found
    )  # fmt: skip
    return [Table(
        f"The {count(len(found), 'worst centroid')}: {clean(name, 40)}",
        ("Silo", "Round", "Centroid", "Rows, as released", "Exposed"),
        rows,
        numeric=frozenset({1, 2, 3}),
        note="Of rows: the share that attack 1 scores above 99 of 100 strangers' rows. Of words: the share "
        "that attack 2 reads back.",
    )]  # fmt: skip


def texts_kept(finding: Finding) -> str:
    """How many texts of a figure are kept, of how many that were read back where that is known."""
    kept = len(finding.texts) or int(number_in(finding.details.get("texts_withheld")) or 0)
    chosen = number_in(finding.details.get("chosen"))
    if chosen is not None and chosen > kept:
        return f"the first {kept:,} of {chosen:,.0f} texts"
    return f"at least {count(kept, 'text')}" if kept == _MOST_TEXTS else count(kept, "text")


def read_back(audits: Audits) -> list[Block]:
    """What was read back of texts: shown where the auditor asked for it, else counted. Empty without any."""
    withheld: list[tuple[Cell | str, ...]] = []
    shown: list[Block] = []
    for name, audit in audits:
        run = f"{clean(name, 40)}: " if len(audits) > 1 else ""
        for f in audit.findings:
            place = f"{run}{clean(f.silo, 32)}, round {f.round}"
            if f.texts:
                kept = tuple(clean(text, _LONGEST_TEXT) or "–" for text in f.texts[:_MOST_TEXTS])
                left = len(f.texts) - len(kept)
                head = f"Attack {f.number}, {attack_words(f.attack)}, {place} ({texts_kept(f)})"
                more = (Paragraph(f"{left} more are in audit.json."),) if left else ()
                shown.append(Fold(head, (Items(kept), *more)))
            elif (number := number_in(f.details.get("texts_withheld"))) is not None and number > 0:
                withheld.append((f"{f.number}: {attack_words(f.attack)}", place, texts_kept(f)))
    blocks: list[Block] = []
    if shown:
        text = (
            "What follows the attacks put together; how many are right their figures say. The page is to be "
            "kept as the silos' data are."
        )
        blocks += [Note("This page holds text of the silos.", text, "bad"), *shown]
    if withheld:
        blocks.append(
            Table(
                "Texts read back, withheld; run with --show-text to see them",
                ("Attack", "Where", "Texts withheld"),
                tuple(withheld[:_MOST_FINDINGS]),
                wrap=frozenset({1}),
                note="Up to 20 a figure are kept. They are guesses: how many are right is what the attack's "
                "figures say.",
            )
        )
    return blocks


def bounds_table(audits: Audits) -> Table:
    """The papers' propositions on what was really released."""
    rows = []
    for name, audit in audits:
        for bound in audit.bounds:
            badge = Badge("holds") if bound.holds else Badge("does not hold", "bad")
            empty = (Badge("says nothing", "caution"),) if bound.vacuous else ()
            verdict = Cell("", badges=(badge, *empty))
            values = f"{bound.bound:.3f}", f"{bound.measured:.3f}"
            rows.append((clean(name, 40), clean(bound.name, 160), *values, verdict))
    return Table(
        "The papers' propositions on what was really released",
        ("Run", "Proposition", "Bound", "Measured", "Read as"),
        tuple(rows),
        numeric=frozenset({2, 3}),
        wrap=frozenset({1}),
        note="A bound that says nothing holds whatever was released, for example because it is zero.",
    )


def inventory(name: str, audit: Audit) -> Fold:
    """Every audited release."""
    silos = sorted({release.silo for release in audit.releases})
    rows = []
    for r in audit.releases:
        sizes = [f"{size:.0f}" if float(size).is_integer() else f"{size:.1f}" for size in r.rows_per_centroid]
        more = f" and {len(sizes) - 24} more" if len(sizes) > 24 else ""
        rows.append((
            Cell(clean(r.silo, 32), full=r.silo), str(r.round),
            Cell(release_words(r), clean(r.file, 80)), claim_cell(r.claim),
            readers_words(r, silos), ", ".join(sizes[:24]) + more or "–",
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


def not_run_table(audits: Sequence[tuple[str, Audit]]) -> Table:
    """What was not run and why; runs with the same reason share a row."""
    reasons_of: dict[tuple[str, str], list[str]] = {}
    for name, audit in audits:
        for entry in audit.not_run:
            reasons_of.setdefault((entry.attack, entry.why), []).append(name)
    rows = tuple(
        (clean(attack, 60), clean(why, 300), "every run" if len(names) == len(audits) > 1 else listing(names))
        for (attack, why), names in reasons_of.items()
    )
    return Table("Attacks that were not run", ("Attack", "Why", "Run"), rows, wrap=frozenset({1, 2}))
