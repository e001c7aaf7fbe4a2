"""Results as a self-contained HTML page, and as tables for a terminal.

`write_run_report` shows one run, `write_comparison_report` several side by side; both put the sections of
other rooms (the auditor's) behind their own. This room reads `Result` objects and writes the one file it is
given; it must not read run folders, nor import `attacks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from securefl.report import claims, digest
from securefl.report.chapters import (
    accuracy_section,
    client_row,
    data_section,
    difference_cells,
    references,
    rounds_section,
    silo_names,
)
from securefl.report.digest import departures, describe, run_name
from securefl.report.language import language_section
from securefl.report.outflow import outflow_section
from securefl.report.page import (
    Block,
    Cell,
    Fold,
    Items,
    Paragraph,
    Section,
    Table,
    Tile,
    Tiles,
    accuracy,
    clean,
    count,
    delta,
    epsilon,
    listing,
    signed,
    size,
    write_page,
)
from securefl.result import Difference, Result

WORDS = (
    ("Silo", "An institution with its own texts. They are not sent; what is sent may still give them away."),
    ("Release", "One thing that left a silo. Each is written to the silo's ledger before it is sent."),
    ("Group average (centroid)", "The mean of a group of texts as the model sees them: numbers, not words. "
     "Whether words can be read back from it is what the audit measures."),
    ("Gradient", "How every weight should change to fit a batch of texts better. It is made of their words, "
     "and of few texts it gives all of them away."),
    ("Masked sum", "Each silo adds random masks to its weights that cancel in the sum over enough silos, so "
     "that the sum alone becomes known."),
    ("Encrypted sum (CKKS)", "The server adds weights that it cannot read; the silos, who share one key, "
     "open the sum."),
    ("Epsilon (ε) and delta (δ)", "How much one row (or one unit with all its rows, or a silo's whole data, "
     "where it says so) can change what is seen, at most: near 0 almost nothing, "
     "above 10 little is promised. δ is the small probability that the bound fails. They bound every attack, "
     "known or not. “No finite epsilon” means that something left without such a bound."),
    ("Unit", "Whose data a bound hides: a row, or a person with all rows of theirs, named by a column."),
    ("There or not; exchanged for another", "What a bound compares (its adjacency): the data with and "
     "without one unit (add-remove), or with another unit in its place (replace-one)."),
    ("DP-SGD", "Training in steps on a random sample of the units, each one's influence cut to a clip, and "
     "noise added to what they add up to: the weights then tell little of any one unit."),
    ("Clip", "The most that one unit may add (an L2 norm); what would add more is scaled down to it."),
    ("Noise multiplier", "The noise's standard deviation, divided by the clip: more hides better and costs "
     "accuracy."),
    ("Simulated", "The noise came from a fixed seed so that the run can be repeated. Whoever has the seed "
     "can take the noise off: the numbers hold for the mechanism, and protect nobody here."),
    ("Pooled and token vectors", "What a model makes of a text as a whole, and of each word at its place "
     "before any layer of the model mixes them."),
    ("Perplexity", "How surprised the language model is by real text: lower is better."),
    ("95 % interval", "The range in which the true value plausibly lies, given how few rows were tested."),
    ("Within noise", "The interval of a difference contains zero: this test cannot tell the two apart."),
)  # fmt: skip


# --- the opening --------------------------------------------------------------------------------------


def _tiles(results: Sequence[Result]) -> Tiles:
    clients = [client for result in results for client in result.clients]
    means = [digest.mean_accuracy(result) for result in results]
    best = max(range(len(results)), key=lambda index: means[index])
    finite = [client.private_epsilon for client in clients if client.private_epsilon is not None]
    left = sum(client.bytes_up for client in clients)
    unbounded = any(client.releases and client.epsilon is None for client in clients)
    one = len(results) == 1
    bases = [digest.mean_baseline(result) for result in results]
    tiles = [
        Tile(
            "Mean accuracy" if one else "Best mean accuracy",
            accuracy(means[best]),
            f"alone{', no noise,' if claims.under_dp_sgd(results[best]) else ''} {accuracy(bases[best])}"
            + ("" if one else f"; {run_name(results[best])}"),
        ),
        Tile("Silos", str(len(silo_names(results))), f"{max(r.test_rows for r in results):,} test texts"),
        Tile("Left the silos", size(left), "in one run" if one else f"in {count(len(results), 'run')}"),
        Tile(
            "Whole account",
            "no finite ε" if unbounded else ("nothing left" if not left else "finite ε"),
            "of at least one silo" if unbounded else "",
            "bad" if unbounded else "good",
        ),
    ]
    if finite:
        fake = any(client.simulated for client in clients)
        note = "largest, simulated" if fake else "largest of a silo"
        tiles.append(
            Tile("ε of the noised releases", epsilon(max(finite)), note, "caution" if fake else "good")
        )
    return Tiles(tuple(tiles))


def _opening(results: Sequence[Result], extra: Sequence[Section]) -> Section:
    heads = ("Accuracy.", "What left, and who could read it.", "What an attacker got.")
    texts = digest.summary(results, (section.summary for section in extra))
    lead = (Paragraph(text, head, lead=True) for head, text in zip(heads, texts, strict=True))
    rows = tuple(
        (
            Cell(run_name(r), full=r.name),
            describe(r),
            str(len(r.rounds)),
            accuracy(digest.mean_accuracy(r)),
            *difference_cells(r.difference),
        )
        for r in results
    )
    table = Table(
        "The run" if len(results) == 1 else "The runs",
        ("Run", "How the silos learned", "Rounds", "Mean accuracy", "Against alone", "Read as"),
        rows,
        numeric=frozenset({2, 3, 4}),
        wrap=frozenset({1}),
    )
    return Section("Summary", (*lead, _tiles(results), table))


# --- settings -----------------------------------------------------------------------------------------


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        yield prefix, "not set" if value is None else shown or "none"


def _caveats(results: Sequence[Result]) -> Items:
    items = []
    seeds = sorted({r.seed for r in results})
    if len(seeds) == 1:
        items.append(
            f"One seed ({seeds[0]}): another split and another initial head would move every number here."
        )
    smallest = min(r.test_rows for r in results)
    half = 0.98 / smallest**0.5 if smallest else 1.0
    items.append(
        f"{smallest:,} test texts: an accuracy near one half is known to about ±{half:.3f}, and a smaller "
        "difference between two runs may be chance."
    )
    private = [run_name(r) for r in results if claims.under_dp_sgd(r)]
    counts = (
        "" if all(map(claims.tells_no_rows, results)) else "the number of rows that travels with a model, "
    )
    items.append(
        f"A privacy bound covers what left under it. Outside it are {counts}which labels exist, timing, and "
        "settings chosen by looking at results."
    )
    if private:
        items.append(
            "This report is outside it too: a simulation sees all rows, and tells their numbers and what "
            "each silo's model reaches alone without noise."
        )
    if any(c.simulated for r in results for c in r.clients):
        items.append(
            "Noise from a seed protects nobody; a real client uses the operating system's generator."
        )
    return Items(tuple(items))


def _settings_section(results: Sequence[Result]) -> Section:
    ids = tuple(
        (Cell(run_name(r), full=r.name), clean(r.method, 24), str(r.seed), Cell(clean(r.run, 33), full=r.run))
        for r in results
    )
    flats = [dict(_flat(r.config)) for r in results]
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    differing = [key for key in keys if len({flat.get(key, "–") for flat in flats}) > 1]
    blocks: list[Block] = [
        Table("Seeds and identifiers", ("Run", "Method", "Seed", "Run identifier"), ids, frozenset({2})),
    ]
    if differing:
        rows: tuple[tuple[Cell | str, ...], ...] = tuple(
            (clean(k, 60), *(Cell(clean(f.get(k, "–"), 40)) for f in flats)) for k in differing
        )
        blocks.append(Table("Settings that differ", ("Setting", *(run_name(r) for r in results)), rows))
    shared = tuple((clean(k, 60), clean(flats[0][k], 200)) for k in keys if k not in differing)
    if shared:
        name = "All settings" if len(results) == 1 else "Settings that all runs share"
        blocks.append(Fold(name, (Table(name, ("Setting", "Value"), shared, wrap=frozenset({1})),)))
    packages = sorted({package for r in results for package in r.versions})
    versions = tuple(
        (clean(p, 40), listing(list(dict.fromkeys(r.versions[p] for r in results if p in r.versions))))
        for p in packages
    )
    if versions:
        blocks.append(Fold("Versions", (Table("Versions", ("Package", "Version"), versions),)))
    return Section("Settings and versions", tuple(blocks))


def _sections(results: Sequence[Result], extra: Sequence[Section]) -> list[Section]:
    language = language_section(results)
    return [
        _opening(results, extra),
        accuracy_section(results),
        outflow_section(results),
        *extra,
        data_section(results),
        *([language] if language is not None else []),
        rounds_section(results),
        Section("Limits of this report", (_caveats(results),)),
        _settings_section(results),
        Section("Words used here", (Items(terms=WORDS),)),
    ]


def _footer(results: Sequence[Result]) -> str:
    versions = listing(sorted({r.versions["securefl"] for r in results if "securefl" in r.versions}))
    return f"Made by securefl {versions}".rstrip() + ". This page is one file and loads nothing."


def write_run_report(result: Result, path: Path, extra: Sequence[Section] = ()) -> None:
    """Write the report of one run to `path`. `extra`: sections of other rooms. Raises OSError."""
    subtitle = f"Run {clean(result.run, 40)}, method {clean(result.method, 24)}, seed {result.seed}"
    write_page(
        path, f"Run report: {run_name(result)}", subtitle, _sections([result], extra), _footer([result])
    )


def write_comparison_report(
    results: Sequence[Result],
    path: Path,
    extra: Sequence[Section] = (),
    title: str = "What sharing gained, and what it gave away",
) -> None:
    """Write one report over several runs to `path`. Raises ValueError without runs, OSError."""
    if not results:
        raise ValueError("a comparison needs at least one result")
    subtitle = f"{count(len(results), 'run')}: {listing([run_name(r) for r in results], 8)}"
    write_page(path, clean(title, 160), subtitle, _sections(results, extra), _footer(results))


# --- the terminal -------------------------------------------------------------------------------------


def plain_table(title: str, columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> RichTable:
    """A terminal table of plain strings: markup and control characters in them are shown, not obeyed.

    columns: (heading, flush right).
    """
    table = RichTable(
        title=Text(title), box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
    )
    for heading, right in columns:
        table.add_column(
            Text(clean(heading, 24)),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right or heading in ("run", "silo", "verdict"),
        )
    for row in rows:
        table.add_row(*(Text(clean(cell, 120)) for cell in row))
    return table


def accuracy_table(results: Sequence[Result]) -> RichTable:
    """Test accuracy: a row a run, a column a silo (lowest and highest where there are more than six)."""
    silos, others = silo_names(results), references(results)
    wide, dropped = len(silos) <= 6, False
    heads = [clean(silo, 12) for silo in silos] if wide else ["lowest", "highest"]
    rows = []
    for r in results:
        found = [None if (c := client_row(r, silo)) is None else c.test_accuracy for silo in silos]
        known = [value for value in found if value is not None]
        changes = [r.difference, *(r.against.get(name) for name in others)]
        shown = list(map(accuracy, found if wide else [min(known), max(known)]))
        late = [digest.dropped_in(r, silo) is not None and client_row(r, silo) is not None for silo in silos]
        if wide:
            shown = [text + digest.DROPPED_MARK * gone for text, gone in zip(shown, late, strict=True)]
        dropped = dropped or any(late)
        mean = accuracy(digest.mean_accuracy(r)) + digest.DROPPED_MARK * (any(late) and not wide)
        rows.append([clean(r.name or r.method, 26), *shown, mean, *map(_change, changes)])
    columns = [("run", False), *((head, True) for head in heads), ("mean", True), ("against alone", False)]
    columns += [(f"against {clean(name, 16)}", False) for name in others]
    table = plain_table("Test accuracy", columns, rows)
    notes = []
    if any("~" in row[-1] or "~" in row[len(heads) + 2] for row in rows):
        notes.append("~: within noise, its 95 % interval over test rows holds 0")
    if dropped:
        notes.append(f"†: {digest.DROPPED}")
    if any(map(claims.under_dp_sgd, results)):
        notes.append("alone: without noise, so the difference to it also holds what privacy costs")
    return _captioned(table, notes)


def _captioned(table: RichTable, notes: Sequence[str]) -> RichTable:
    """Notes below a table, a line each."""
    if notes:
        table.caption = Text("\n".join(notes))
        table.caption_justify = "left"
    return table


def _change(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    return signed(difference.value) + (" ~" if difference.within_noise else "")


def sums_table(result: Result) -> RichTable | None:
    """Which sums were opened, by whom, over which silos; None where there are none."""
    if not result.sums:
        return None
    everybody = [client.name for client in result.clients]
    rows = []
    for one in result.sums:
        by = digest.parties(one.opened_by, "", everybody).replace("the other silos", "every silo")
        silos = (
            "all" if len(one.silos) == len(everybody) else listing([clean(name, 16) for name in one.silos])
        )
        error = f"{one.resolution:.0e}" + ("" if one.noise is None else f", noise {one.noise:.1e}")
        rows.append([str(one.round), by, silos, "hidden" if one.rows is None else f"{one.rows:,}", error])
    columns = [("round", True), ("opened by", False), ("silos in it", False), ("rows", True), ("error", True)]
    return plain_table("Sums that were opened", columns, rows)


def departures_table(results: Sequence[Result]) -> RichTable:
    """What left the silos: a row a run and kind, over all silos of the run."""
    rows = []
    for r in results:
        name = clean(r.name or r.method, 26)
        for d in departures(r):
            whom = d.readers if d.recipients == d.readers else f"{d.readers} (sent to {d.recipients})"
            kind = digest.SHORT.get(d.kind, clean(d.kind, 20))
            rows.append([name, kind, whom, str(d.releases), size(d.bytes), d.claim()])
            name = ""
        if not any(client.releases for client in r.clients):
            rows.append([name, "nothing", "–", "0", "0 B", "–"])
    columns = [
        ("run", False), ("what left", False), ("to, read by", False), ("releases", True), ("bytes", True),
        ("bound of a silo", False),
    ]  # fmt: skip
    table = plain_table("What left the silos", columns, rows)
    deltas = sorted({c.delta for r in results for c in r.clients if c.delta is not None})
    notes = []
    if deltas:
        covers = [r for r in results if any(c.delta is not None for c in r.clients)]
        notes.append(
            f"ε: the largest of a silo, of all its noised releases, for {digest.whose(covers)}, at δ = "
            f"{listing([delta(value) for value in deltas])}"
        )
    notes += [f"the models of {words}; none left" for words in digest.trained_alone(results)]
    exact = [run_name(r) for r in results if claims.unbounded_weights(r)]
    if exact:
        where = "" if len(results) == 1 else f" in {digest.where(exact, [run_name(r) for r in results])}"
        notes.append(
            f"weights left{where} {claims.NO_NOISE}: whoever holds them, or their sum, can test whether a "
            "text was among the training rows"
        )
    for r in results:
        where = f"{run_name(r)}: " if len(results) > 1 else ""
        notes += [f"{where}{words}" for words in claims.cautions(r)]
    return _captioned(table, notes)
