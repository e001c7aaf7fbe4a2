"""The figures of the reports: dots with intervals, stacked shares, and what leaves a silo.

Each takes plain numbers and returns inline SVG with the words that replace it for a reader who cannot see
it. It must not read files, nor know of runs or attacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D

from securefl.report.page import (
    ACCENT,
    BAD,
    INK,
    LINE,
    MUTED,
    SERIES,
    Picture,
    clean,
    draw,
    interval,
    render_template,
)

_COLUMNS = 5


@dataclass(frozen=True)
class Dot:
    """A value with its interval; `reference` and `cap` are small marks on the same line.

    value and ends: None leaves the line empty. hollow: it cannot be told from what it is compared with.
    """

    label: str
    value: float | None
    ends: tuple[float, float] | None
    reference: float | None = None
    cap: float | None = None
    hollow: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot of the row: its dots from top to bottom, and the line `at` they are compared with."""

    title: str
    dots: tuple[Dot, ...]
    limits: tuple[float, float] | None = None
    at: float | None = None
    axis: str = ""


def _paint_panel(axes: Any, panel: Panel, named: bool) -> None:
    for y, dot in enumerate(panel.dots):
        colour = ACCENT
        if dot.value is None or dot.ends is None:
            continue
        axes.plot(dot.ends, (y, y), color=colour, linewidth=1.7, solid_capstyle="round", zorder=2)
        face = "#ffffff" if dot.hollow else colour
        axes.plot([dot.value], [y], "o", color=colour, markerfacecolor=face, markersize=6.2, zorder=3)
        if dot.reference is not None:
            axes.plot([dot.reference], [y], "|", color=MUTED, markersize=13, markeredgewidth=1.8, zorder=2.5)
        if dot.cap is not None:
            axes.plot([dot.cap], [y], "D", color=BAD, markerfacecolor="none", markersize=5.5, zorder=2.5)
    if panel.at is not None:
        axes.axvline(panel.at, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_ylim(len(panel.dots) - 0.4, -0.6)
    axes.set_yticks(range(len(panel.dots)), [clean(dot.label, 30) if named else "" for dot in panel.dots])
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=4)
    axes.set_title(clean(panel.title, 30))
    if panel.limits is not None:
        axes.set_xlim(*panel.limits)
    if panel.axis:
        axes.set_xlabel(clean(panel.axis, 60), fontsize=8.5)


def dot_panels(name: str, panels: Sequence[Panel], legend: Sequence[str]) -> Markup:
    """Panels side by side, at most five a row; every panel lists the same labels.

    legend: which of "value", "hollow", "reference" and "cap" to explain, each as `key: words`.
    """
    columns = min(len(panels), _COLUMNS)
    lines = math.ceil(len(panels) / columns)
    tallest = max(len(panel.dots) for panel in panels)

    def paint(drawing: Drawing) -> None:
        grid = drawing.subplots(lines, columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index < len(panels):
                _paint_panel(axes, panels[index], named=index % columns == 0)
            else:
                axes.set_axis_off()
        marks: dict[str, dict[str, Any]] = {
            "value": {"marker": "o", "color": ACCENT, "linewidth": 1.7},
            "hollow": {"marker": "o", "color": ACCENT, "markerfacecolor": "#ffffff", "linewidth": 1.7},
            "reference": {
                "marker": "|",
                "color": MUTED,
                "markersize": 12,
                "markeredgewidth": 1.8,
                "linewidth": 0,
            },
            "cap": {
                "marker": "D",
                "color": BAD,
                "markerfacecolor": "none",
                "markersize": 5.5,
                "linewidth": 0,
            },
        }
        pairs = [entry.split(": ", 1) for entry in legend]
        handles = [Line2D([], [], **marks[key]) for key, _ in pairs]
        drawing.legend(
            handles, [words for _, words in pairs], loc="outside lower left", ncols=len(pairs), fontsize=8.5,
            labelcolor=INK,
        )  # fmt: skip

    return draw(name, 9.6, 0.62 + lines * (0.62 + 0.29 * tallest), paint)


def dots_alt(panels: Sequence[Panel]) -> str:
    """The same figures in words, for a screen reader."""
    parts = []
    for panel in panels:
        dots = "; ".join(
            f"{clean(d.label, 40)} {d.value:.3f} ({interval(d.ends)})"
            for d in panel.dots
            if d.value is not None and d.ends is not None
        )
        parts.append(f"{clean(panel.title, 40)}: {dots}.")
    return " ".join(parts)


def label_picture(name: str, silos: Mapping[str, Mapping[str, int]], caption: str) -> Picture:
    """Rows of each label in each silo as stacked bars. Beyond eight labels the rarest are drawn together."""
    totals: dict[str, int] = {}
    for labels in silos.values():
        for label, rows in labels.items():
            totals[label] = totals.get(label, 0) + rows
    ranked = sorted(totals, key=lambda label: (-totals[label], label))
    kept = ranked if len(ranked) <= len(SERIES) else ranked[: len(SERIES) - 1]
    series = {label: [labels.get(label, 0) for labels in silos.values()] for label in kept}
    if len(kept) < len(ranked):
        rest = ranked[len(kept) :]
        series[f"{len(rest)} other labels"] = [
            sum(labels.get(x, 0) for x in rest) for labels in silos.values()
        ]

    across = 3 if any(len(label) > 16 for label in series) else 5

    def paint(drawing: Drawing) -> None:
        axes = drawing.subplots()
        left = [0] * len(silos)
        for (label, rows), colour in zip(series.items(), SERIES, strict=False):
            bars = axes.barh(
                range(len(silos)),
                rows,
                left=left,
                height=0.62,
                color=colour,
                edgecolor="#ffffff",
                linewidth=0.8,
            )
            bars.set_label(clean(label, 28).lstrip("_") or "–")
            left = [a + b for a, b in zip(left, rows, strict=True)]
        for y, total in enumerate(left):
            axes.annotate(
                f"{total:,}", (total, y), (5, 0), textcoords="offset points", va="center", color=MUTED
            )
        axes.set_yticks(range(len(silos)), [clean(silo, 30) for silo in silos])
        axes.set_ylim(len(silos) - 0.5, -0.5)
        axes.margins(x=0.08)
        axes.tick_params(length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("training rows")
        drawing.legend(loc="outside upper left", ncols=min(across, len(series)), fontsize=8.5, labelcolor=INK)

    legend_lines = math.ceil(len(series) / across)
    svg = draw(name, 9.6, 0.65 + 0.25 * legend_lines + 0.36 * len(silos), paint)
    alt = " ".join(
        f"{clean(silo, 40)}: "
        + ", ".join(f"{clean(label, 40)} {rows}" for label, rows in labels.items())
        + "."
        for silo, labels in silos.items()
    )
    return Picture(svg, alt, caption)


@dataclass(frozen=True)
class Flow:
    """One kind of thing that leaves, who reads it, in which runs. bounded: under a finite epsilon."""

    what: str
    readers: str
    relayed: bool
    bounded: bool
    claim: str
    runs: str


def flow_picture(flows: Sequence[Flow], caption: str) -> Picture:
    """What stays in a silo, and an arrow for everything that leaves it."""
    height = max(176, 84 * len(flows) + 4)
    svg = render_template(
        "flow.svg.j2", flows=[_cut(flow) for flow in flows], height=height, ink=INK, line=LINE
    )
    alt = "Texts, labels, private keys and the privacy account stay in the silo. " + " ".join(
        f"{flow.what} leave for {flow.readers} ({flow.claim}) in: {flow.runs}." for flow in flows
    )
    return Picture(svg, alt if flows else alt + "Nothing leaves.", caption)


def _cut(flow: Flow) -> Flow:
    return Flow(
        clean(flow.what, 44), clean(flow.readers, 26), flow.relayed, flow.bounded, clean(flow.claim, 46),
        clean(flow.runs, 62),
    )  # fmt: skip
