"""The chapters of a report about results: accuracy, data, traffic.

Each function turns results into one `Section`; `render` puts them in order, with that of `language`. They
read `Result` objects only, and must not write or know of attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from securefl.report import claims, digest
from securefl.report.digest import run_name
from securefl.report.figures import Dot, Panel, dot_panels, dots_alt, label_picture
from securefl.report.page import (
    Badge,
    Block,
    Cell,
    Fold,
    Paragraph,
    Picture,
    Section,
    Table,
    accuracy,
    clean,
    duration,
    interval,
    listing,
    named,
    signed,
    size,
)
from securefl.result import ClientRow, Difference, Result

_MOST_PANELS = 9
MOST_LABELS = 12


def _accuracy_cell(result: Result, client: ClientRow) -> Cell:
    mark = "" if digest.dropped_in(result, client.name) is None else digest.DROPPED_MARK
    return Cell(accuracy(client.test_accuracy) + mark, interval(client.test_interval))


def _dropped_words(results: Sequence[Result]) -> str:
    """What the mark beside an accuracy says, where there is one."""
    gone = [
        f"{clean(c.name, 32)} in round {number} of {run_name(r)}"
        for r in results
        for c in r.clients
        if (number := digest.dropped_in(r, c.name)) is not None
    ]
    return f"{digest.DROPPED_MARK}: {digest.DROPPED} ({listing(gone)})." if gone else ""


def _alone_words(results: Sequence[Result]) -> str:
    """What a comparison with training alone says where training is private."""
    private = [run_name(r) for r in results if claims.under_dp_sgd(r)]
    if not private:
        return ""
    which = "" if len(private) == len(results) else f" In {listing(private)}:"
    return f"{which} Alone is trained without noise, so the difference to it also holds what privacy costs."


def difference_cells(difference: Difference | None) -> tuple[Cell, Cell]:
    """A mean difference of accuracies with its interval, and how to read it."""
    if difference is None:
        return Cell("–"), Cell("–")
    if difference.within_noise:
        badge = Badge("within noise", "caution")
    else:
        badge = Badge("better", "good") if difference.value > 0 else Badge("worse", "bad")
    return Cell(signed(difference.value), interval(difference.interval, signed)), Cell("", badges=(badge,))


def references(results: Sequence[Result]) -> list[str]:
    """The runs that others are compared with."""
    return list(dict.fromkeys(name for result in results for name in result.against))


def _against_table(results: Sequence[Result]) -> list[Block]:
    """A row for each run that is compared with another one on the same test rows."""
    rows = [
        (Cell(run_name(r), full=r.name), clean(name, 40), *difference_cells(difference))
        for r in results
        for name, difference in r.against.items()
    ]
    if not rows:
        return []
    heads = ("Run", "Compared with", "Mean difference", "Reading")
    return [Table("Run against run, on the same test rows", heads, tuple(rows), frozenset({2}))]


def silo_names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(client.name for result in results for client in result.clients))


def client_row(result: Result, name: str) -> ClientRow | None:
    return next((client for client in result.clients if client.name == name), None)


# --- accuracy -----------------------------------------------------------------------------------------


def _accuracy_picture(results: Sequence[Result]) -> Picture:
    silos = silo_names(results)[:_MOST_PANELS]
    ends = [end for r in results for c in r.clients for end in (*c.test_interval, c.baseline_accuracy)]
    limits = (max(0.0, min(ends) - 0.03), min(1.0, max(ends) + 0.03))
    panels = []
    for silo in silos:
        found = [(r, client) for r in results if (client := client_row(r, silo)) is not None]
        dots = (Dot(run_name(r), c.test_accuracy, c.test_interval, c.baseline_accuracy) for r, c in found)
        panels.append(Panel(silo, tuple(dots), limits))
    if len(results) == 1:
        dots = (
            Dot(c.name, c.test_accuracy, c.test_interval, c.baseline_accuracy) for c in results[0].clients
        )
        panels = [Panel("Test accuracy", tuple(dots), limits)]
    noiseless = ", no noise" if any(claims.under_dp_sgd(r) for r in results) else ""
    legend = [
        "value: accuracy, 95 % interval",
        f"reference: the silo's own model, nothing exchanged{noiseless}",
    ]
    if len(results) > 1 and any(r.difference is not None for r in results):
        changes = (
            Dot(run_name(r), r.difference.value, r.difference.interval, hollow=r.difference.within_noise)
            if r.difference is not None
            else Dot(run_name(r), None, None)
            for r in results
        )
        panels.append(Panel("Mean change", tuple(changes), at=0.0))
        legend.append("hollow: change within noise")
    caption = (
        "Test accuracy in each silo. Where the grey mark lies inside a bar, the test of that silo alone "
        "shows no difference."
    )
    if len(silo_names(results)) > len(silos) and len(results) > 1:
        caption += (
            f" The first {len(silos)} of {len(silo_names(results))} silos are drawn; the tables have all."
        )
    return Picture(dot_panels("accuracy", panels, legend), dots_alt(panels), caption)


def _accuracy_matrix(results: Sequence[Result]) -> Table:
    silos = silo_names(results)
    served = any(r.server.test_accuracy is not None for r in results)
    rows = []
    for r in results:
        cells: list[Cell | str] = [Cell(run_name(r), full=r.name)]
        for silo in silos:
            client = client_row(r, silo)
            cells.append("–" if client is None else _accuracy_cell(r, client))
        cells += [accuracy(digest.mean_accuracy(r)), *difference_cells(r.difference)]
        cells += [accuracy(r.server.test_accuracy)] if served else []
        rows.append(tuple(cells))
    columns = ("Run", *(clean(silo, 32) for silo in silos), "Mean", "Against alone", "Read as")
    columns += ("Server's model",) if served else ()
    return Table(
        "Test accuracy of every silo's model, with 95 % intervals",
        columns,
        tuple(rows),
        numeric=frozenset(range(1, len(columns))) - {len(silos) + 3},
        note="Intervals of a silo: Wilson. Of a difference: paired bootstrap over the test texts."
        f"{_alone_words(results)}{_dropped_words(results)}",
    )


def _silo_accuracy(results: Sequence[Result]) -> Table:
    rows = []
    for r in results:
        for c in r.clients:
            kept = {None: "", True: "took the server's candidate", False: "kept its own model"}[
                c.kept_candidate
            ]
            rows.append((
                named(c.name), run_name(r), Cell(clean(c.model, 40), kept, full=c.model),
                f"{c.train_rows:,}", f"{c.validation_rows:,}",
                _accuracy_cell(r, c),
                accuracy(c.baseline_accuracy), signed(c.test_accuracy - c.baseline_accuracy),
            ))  # fmt: skip
    return Table(
        "Every silo and its own model, trained as long with nothing exchanged",
        ("Silo", "Run", "Model", "Training rows", "Validation rows", "Accuracy", "Alone", "Change"),
        tuple(rows),
        numeric=frozenset({3, 4, 5, 6, 7}),
        note="The change of a single silo has no interval of its own: read it beside that of its accuracy."
        f"{_alone_words(results)}{_dropped_words(results)}",
    )


def _language_table(results: Sequence[Result]) -> list[Block]:
    """Accuracy and macro-F1 on the test rows of each language; nothing where none is known."""
    rows: list[tuple[Cell | str, ...]] = []
    for r in results:
        for language in sorted({name for c in r.clients for name in c.languages}):
            found = [c.languages[language] for c in r.clients if language in c.languages]
            values, alone = [one.accuracy for one in found], fmean(one.baseline_accuracy for one in found)
            low, high = min(values), max(values)
            spread = interval(found[0].interval) if low == high else f"{accuracy(low)} to {accuracy(high)}"
            trained = f"{found[0].train_rows:,}" if found[0].train_rows else "none"
            rows.append((
                clean(language, 40), Cell(run_name(r), full=r.name), f"{found[0].rows:,}", trained,
                Cell(accuracy(fmean(values)), spread), accuracy(fmean(one.macro_f1 for one in found)),
                accuracy(alone), signed(fmean(values) - alone),
            ))  # fmt: skip
    if not rows:
        return []
    heads = (
        "Language", "Run", "Test rows", "Training rows", "Accuracy", "Macro-F1", "Alone", "Change"
    )  # fmt: skip
    return [
        Table(
            "Language by language, mean over the silos' models",
            heads,
            tuple(rows),
            numeric=frozenset(range(2, 8)),
            note="Below an accuracy: its 95 % Wilson interval where all silos have one model, else the worst "
            "and the best silo. Alone: the mean over the silos' own models, trained as long with nothing "
            "exchanged. A language without training rows was not seen before the test.",
        )
    ]


def accuracy_section(results: Sequence[Result]) -> Section:
    blocks: list[Block] = [_accuracy_matrix(results), _accuracy_picture(results)]
    if len(results) == 1:
        blocks = [_accuracy_picture(results), _silo_accuracy(results)]
        if results[0].server.test_accuracy is not None:
            text = f"The server's model scores {accuracy(results[0].server.test_accuracy)} on the same texts."
            blocks.append(Paragraph(text))
    else:
        blocks += _against_table(results)
        blocks.append(Fold("Silo by silo, beside training alone", (_silo_accuracy(results),)))
    return Section("Accuracy", (*blocks, *_language_table(results)))


# --- data, rounds -------------------------------------------------------------------------------------


def data_section(results: Sequence[Result]) -> Section:
    splits: dict[str, list[Result]] = {}
    for r in results:
        key = repr([(c.name, c.train_rows, c.validation_rows, sorted(c.labels.items())) for c in r.clients])
        splits.setdefault(key, []).append(r)
    blocks: list[Block] = []
    for index, same in enumerate(splits.values()):
        r = same[0]
        whose = "the same in every run" if len(splits) == 1 else f"in {listing([run_name(x) for x in same])}"
        whose = "" if len(results) == 1 else f", {whose}"
        labels = sorted({label for c in r.clients for label in c.labels})
        shown = labels[:MOST_LABELS]
        rows: tuple[tuple[Cell | str, ...], ...] = tuple(
            (named(c.name), f"{c.train_rows:,}", f"{c.validation_rows:,}",
             *(f"{c.labels.get(label, 0):,}" for label in shown))
            for c in r.clients
        )  # fmt: skip
        columns = ("Silo", "Training rows", "Validation rows", *(clean(label, 28) for label in shown))
        rest = len(labels) - len(shown)
        note = f"{rest} more labels are not listed." if rest else ""
        caption = f"Training rows and labels of every silo{whose}."
        silos = {c.name: c.labels for c in r.clients}
        blocks.append(label_picture(f"labels-{index}", silos, caption))
        blocks.append(Table("Rows and labels", columns, rows, frozenset(range(1, len(columns))), note=note))
    return Section("Labels in each silo", tuple(blocks))


def rounds_section(results: Sequence[Result]) -> Section:
    total = tuple(
        (
            Cell(run_name(r), full=r.name), str(len(r.rounds)), size(sum(x.bytes_up for x in r.rounds)),
            size(sum(x.bytes_down for x in r.rounds)), duration(r.seconds), size(r.peak_memory_bytes),
            str(sum(len(x.dropped) for x in r.rounds)), str(sum(len(x.refusals) for x in r.rounds)),
        )
        for r in results
    )  # fmt: skip
    names = ("Run", "Rounds", "Up", "Down", "Time", "Peak memory", "Silos dropped", "Refusals")
    blocks: list[Block] = [
        Table(
            "Traffic and time",
            names,
            total,
            frozenset(range(1, 8)),
            note="Bytes are those of sealed messages.",
        )
    ]
    refused = [
        (
            run_name(r),
            str(x.round),
            named(d.name),
            clean(d.step, 20),
            clean(d.error, 40),
            clean(d.reason, 300),
        )
        for r in results
        for x in r.rounds
        for d in x.refusals
    ]
    if refused:
        heads = ("Run", "Round", "Silo", "Step", "Error", "Reason")
        blocks.append(Table("Refusals and drop-outs", heads, tuple(refused), frozenset({1}), frozenset({5})))
    else:
        blocks.append(Paragraph("No silo was refused in any round."))
    each = tuple(
        (
            run_name(r),
            str(x.round),
            duration(x.seconds),
            size(x.bytes_up),
            size(x.bytes_down),
            listing(x.dropped) or "–",
        )
        for r in results
        for x in r.rounds
    )
    heads = ("Run", "Round", "Time", "Up", "Down", "Dropped")
    blocks.append(Fold("Round by round", (Table("Every round", heads, each, frozenset({1, 2, 3, 4})),)))
    return Section("Rounds and traffic", tuple(blocks))
