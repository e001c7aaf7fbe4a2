"""The chapter of a report about the language model of CrossLM and data-free KD: figures, arrivals, texts.

Beside `chapters`, and like them: it reads `Result` objects only, and must not write or know of attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from securefl.report.chapters import MOST_LABELS
from securefl.report.digest import run_name
from securefl.report.page import Block, Cell, Fold, Section, Table, accuracy, clean, named
from securefl.result import ArrivalRow, Result

_MOST_TEXTS = 20
_FIRST_KEYS = ("silo", "client", "round", "label", "text")


def _change(before: float | None, after: float | None, digits: int = 3) -> str:
    if before is None and after is None:
        return "–"
    return " → ".join("–" if value is None else f"{value:.{digits}f}" for value in (before, after))


def _series(values: Sequence[float]) -> str:
    more = " …" if len(values) > 24 else ""
    return ", ".join(f"{value:.3f}" for value in values[:24]) + more or "–"


def _synthetic_table(result: Result) -> Table:
    texts = result.server.synthetic[:_MOST_TEXTS]
    known = list(dict.fromkeys(key for text in texts for key in text))
    keys = [key for key in _FIRST_KEYS if key in known] + [key for key in known if key not in _FIRST_KEYS][:4]

    def show(value: Any) -> Cell:
        if isinstance(value, bool):
            return Cell("yes" if value else "no")
        if isinstance(value, float):
            return Cell(f"{value:.3f}")
        return Cell("–" if value is None else clean(str(value), 280))

    numeric = frozenset(i for i, key in enumerate(keys) if any(isinstance(t.get(key), float) for t in texts))
    total = len(result.server.synthetic)
    note = f"{len(texts)} of {total} texts." if total > len(texts) else ""
    return Table(
        f"Synthetic texts: {run_name(result)}",
        tuple(clean(key, 24).replace("_", " ").capitalize() for key in keys),
        tuple(tuple(show(text.get(key)) for key in keys) for text in texts),
        numeric,
        frozenset(i for i, key in enumerate(keys) if key == "text"),
        note=note,
    )


def _fate(row: ArrivalRow) -> str:
    """What became of what an arrival gave its silo."""
    if not row.candidate:
        return "none" if row.outcome == "served" else "not served"
    return {None: "sent", True: "kept by the silo", False: "left by the silo"}[row.kept_candidate]


def _kept(row: ArrivalRow) -> str:
    texts = row.per_label.values()
    return f"{sum(x.kept for x in texts)} of {sum(x.usable for x in texts)}" if texts else "–"


def _arrivals_table(result: Result) -> Table:
    rows = tuple(
        (
            named(a.silo), str(a.round), str(a.queued_behind), str(a.staleness), accuracy(a.kl),
            accuracy(a.agreement), accuracy(a.self_bleu), accuracy(a.distinct_2),
            "–" if a.mean_words is None else f"{a.mean_words:.1f}", _kept(a), _fate(a),
        )
        for a in result.server.arrivals
    )  # fmt: skip
    return Table(
        f"Small models that came to the language model: {run_name(result)}",
        ("Silo", "Round", "Ahead", "Staleness", "KL", "Agreement", "Self-BLEU", "Distinct-2", "Words", "Kept",
         "Candidate"),
        rows,
        frozenset(range(1, 10)),
        note="In the order of their coming. Ahead: models in the queue before it. Staleness: arrivals of "
        "others that the language model learned from since this silo last had a candidate. Agreement: share "
        "of the texts that the graders label as asked. Self-BLEU: how alike the texts are, 1 for one text "
        "over and over. Distinct-2: different pairs of words over all. Words: mean length of a text. Kept: "
        "texts that the silo's model learned from, of the usable ones.",
    )  # fmt: skip


def _balance_table(result: Result) -> Table:
    names = list(dict.fromkeys(label for a in result.server.arrivals for label in a.per_label))
    shown, rest = names[:MOST_LABELS], len(names[MOST_LABELS:])

    def shares(row: ArrivalRow, label: str) -> str:
        texts = row.per_label.get(label)
        return "–" if texts is None else _change(texts.usable_share, texts.kept_share, 2)

    return Table(
        f"Share of each label in the usable → in the kept texts: {run_name(result)}",
        ("Silo", "Round", *(clean(label, 28) for label in shown)),
        tuple(
            (named(a.silo), str(a.round), *(shares(a, label) for label in shown))
            for a in result.server.arrivals
        ),
        frozenset(range(1, 2 + len(shown))),
        note=f"{rest} more labels are not listed." if rest else "",
    )


def _arrival_tables(result: Result) -> list[Table]:
    """Every arrival with the figures of its texts; what was noted of some; the labels of the texts."""
    arrivals, tables = result.server.arrivals, [_arrivals_table(result)]
    notes = tuple((named(a.silo), str(a.round), clean(a.note, 300)) for a in arrivals if a.note)
    if notes:
        caption = f"Noted of arrivals: {run_name(result)}"
        tables.append(Table(caption, ("Silo", "Round", "Note"), notes, frozenset({1}), frozenset({2})))
    if any(a.per_label for a in arrivals):
        tables.append(_balance_table(result))
    return tables


def language_section(results: Sequence[Result]) -> Section | None:
    figures: tuple[str, ...] = ("nlu_accuracy", "nlg_accuracy", "perplexity_after", "perplexity_before")
    figures += ("nlu_accuracy_before", "nlg_judged", "nlg_judged_before")
    chosen = [
        r
        for r in results
        if r.server.synthetic
        or r.server.kl
        or r.server.arrivals
        or any(getattr(r.server, f) is not None for f in figures)
    ]
    if not chosen:
        return None
    rows = tuple(
        (
            Cell(run_name(r), full=r.name), _change(r.server.nlu_accuracy_before, r.server.nlu_accuracy),
            accuracy(r.server.nlg_accuracy), _change(r.server.nlg_judged_before, r.server.nlg_judged),
            _change(r.server.perplexity_before, r.server.perplexity_after, 2),
            _series(r.server.kl),
        )
        for r in chosen
    )  # fmt: skip
    heads = (
        "Run",
        "Understanding, before → after",
        "Generation",
        "By the judge, before → after",
        "Perplexity, before → after",
        "KL at each arrival",
    )
    table = Table(
        "The language model on the server",
        heads,
        rows,
        frozenset({1, 2, 3, 4}),
        frozenset({5}),
        note="Understanding: share of test texts whose label the language model names. Generation: share of "
        "its texts that the silos' models label as asked; they also graded it while it learned. The judge: a "
        "small model trained on rows of no silo, which graded nothing. KL: how far it moved from where it "
        "began, in nats a token.",
    )
    blocks: list[Block] = [table]
    for r in chosen:
        if r.server.arrivals:
            tables = _arrival_tables(r)
            blocks += tables if len(results) == 1 else [Fold(f"Its arrivals: {run_name(r)}", tuple(tables))]
        if r.server.synthetic:
            blocks.append(Fold(f"What it wrote: {run_name(r)}", (_synthetic_table(r),)))
    return Section("The language model", tuple(blocks))
