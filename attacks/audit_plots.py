"""The figures of one audit: ROC curves, lower bounds on epsilon beside the claims, and the worst subjects.

They draw what `Finding` objects hold and nothing else, on `securefl.report.page.draw`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D

from attacks.audit_rows import Audits, Subject, family, is_membership, metric_key, number_in, worst_rows
from attacks.audit_words import attack_words, game_epsilon, short_title
from attacks.findings import Audit, Finding
from securefl.report.page import ACCENT, BAD, INK, MUTED, SERIES, Picture, clean, draw, epsilon

Points = Sequence[tuple[float, float]]

# A false-positive rate below it would need thousands of controls.
_LEAST_RATE = 1e-3
_RATES = (0.001, 0.01, 0.1, 1.0)
_LEAST_COLUMNS, _COLUMNS = 3, 5
_MOST_BOUNDS = 40
_DASHES = (0, (4, 3))


def _usable(curve: Points) -> list[tuple[float, float]]:
    """The points that are rates, by rising false-positive rate, each rate with its highest value."""
    best: dict[float, float] = {}
    for x, y in curve:
        if 0 <= x <= 1 and 0 <= y <= 1:  # NaN is neither
            best[x] = max(y, best.get(x, 0.0))
    return sorted(best.items())


def _rate_at(points: Points, fpr: float) -> float:
    """The largest true-positive rate without more than `fpr` false positives."""
    return max((y for x, y in points if x <= fpr), default=0.0)


def roc_pictures(name: str, audit: Audit) -> list[Picture]:
    """One figure: a panel for each membership attack, its worst release. name: begins its identifiers."""
    rows = worst_rows([(name, audit)], ways=False)
    chosen = [row.worst for row in rows if is_membership(row.worst) and _usable(row.worst.curve)]
    if not chosen:
        return []
    columns = min(max(len(chosen), _LEAST_COLUMNS), _COLUMNS)
    lines = math.ceil(len(chosen) / columns)
    capped = any(_usable(f.cap_curve) for f in chosen)

    def paint(drawing: Drawing) -> None:
        grid = drawing.subplots(lines, columns, squeeze=False, sharey=True)
        for index, axes in enumerate(grid.flat):
            if index >= len(chosen):
                axes.set_axis_off()
                continue
            _paint_roc(axes, chosen[index], index % columns == 0)
        handles = [
            Line2D([], [], color=ACCENT, linewidth=2, label="the attack, on the release where it went best"),
            Line2D([], [], color=MUTED, linewidth=1.2, linestyle=_DASHES, label="guessing"),
        ]
        if capped:
            handles.append(
                Line2D([], [], color=BAD, linewidth=1.5, linestyle="-.", label="most the claim allows")
            )
        drawing.legend(
            handles=handles, loc="outside lower left", ncols=len(handles), fontsize=8.5, labelcolor=INK
        )

    alt = " ".join(
        f"Attack {f.number}, {clean(f.silo, 32)}, round {f.round}: "
        + ", ".join(
            f"{_rate_at(_usable(f.curve), rate):.3f} of the rows found at {rate:.1%} false positives"
            + (f" (claim: {_rate_at(points, rate):.3f})" if (points := _usable(f.cap_curve)) else "")
            for rate in _RATES[:3]
        )
        + "."
        for f in chosen
    )
    caption = (
        "Which share of a silo's rows an attack finds (up) against the share of strangers' rows that it "
        "takes for them (across, from 1 in 1,000). What matters is the left edge: rows that are found almost "
        "without an error."
    )
    return [Picture(draw(f"{name}-roc", 9.6, 0.55 + 2.75 * lines, paint), alt, caption)]


def _paint_roc(axes: Any, finding: Finding, first: bool) -> None:
    span = [_LEAST_RATE * (1000 ** (step / 60)) for step in range(61)]
    axes.plot(span, span, color=MUTED, linewidth=1.2, linestyle=_DASHES)
    cap = _usable(finding.cap_curve)
    if cap:
        left = (_LEAST_RATE, _rate_at(cap, _LEAST_RATE))
        inside = [left, *((x, y) for x, y in cap if x > _LEAST_RATE)]
        axes.plot([x for x, _ in inside], [y for _, y in inside], color=BAD, linewidth=1.5, linestyle="-.")
    points = _usable(finding.curve)
    left = (_LEAST_RATE, _rate_at(points, _LEAST_RATE))
    inside = [left, *((x, y) for x, y in points if x > _LEAST_RATE)]
    xs, ys = [x for x, _ in inside], [y for _, y in inside]
    axes.plot(xs, ys, color=ACCENT, linewidth=2, drawstyle="steps-post")
    if len(points) == 1:
        axes.plot(xs[-1:], ys[-1:], "o", color=ACCENT, markersize=5)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST_RATE, 1)
    axes.set_ylim(-0.02, 1.03)
    axes.set_xticks(_RATES, ["0.1 %", "1 %", "10 %", ""])
    axes.minorticks_off()
    axes.tick_params(length=0, labelsize=8.5)
    axes.set_title(short_title(finding.number, family(finding.attack)), fontsize=9)
    area = f"AUC {finding.value:.3f}" if metric_key(finding) == "auc" else ""
    axes.set_xlabel(f"{clean(finding.silo, 16)}, round {finding.round}: {area}", fontsize=8.5)
    if first:
        axes.set_ylabel("rows found", fontsize=8.5)


def _bounded(audits: Audits) -> list[tuple[str, Finding]]:
    """The largest lower bound of each attack in each run."""
    found: list[tuple[str, Finding]] = []
    for name, audit in audits:
        best: dict[tuple[int, str], Finding] = {}
        for f in audit.findings:
            if number_in(f.epsilon_lower_bound) is None:
                continue
            key = f.number, family(f.attack)
            if key not in best or (f.epsilon_lower_bound or 0) > (best[key].epsilon_lower_bound or 0):
                best[key] = f
        found += [(name, best[key]) for key in sorted(best)]
    return found[:_MOST_BOUNDS]


def _claim_words(finding: Finding) -> str:
    if finding.claim_epsilon is None:
        return "no finite ε is claimed"
    game = game_epsilon(finding)
    if game is None:
        return f"claimed ε {epsilon(finding.claim_epsilon)} is of another game"
    return f"claimed ε {epsilon(game)}"


def epsilon_picture(audits: Audits, name: str = "bounds") -> list[Picture]:
    """What each attack proves was lost beside what is claimed in its game; empty without lower bounds."""
    found = _bounded(audits)
    if not found:
        return []
    bounds = [f.epsilon_lower_bound or 0.0 for _, f in found]
    claims = [number_in(game_epsilon(f)) for _, f in found]
    most = max([*bounds, *(claim for claim in claims if claim is not None), 1.0])

    def paint(drawing: Drawing) -> None:
        axes = drawing.subplots()
        for y, ((_, f), bound, claim) in enumerate(zip(found, bounds, claims, strict=True)):
            axes.plot((0, bound), (y, y), color=ACCENT, linewidth=2.2, solid_capstyle="butt", zorder=2)
            axes.plot([bound], [y], "o", color=ACCENT, markersize=6.2, zorder=3)
            if claim is not None:
                axes.plot([claim], [y], "D", color=BAD, markerfacecolor="none", markersize=6, zorder=3)
            else:
                axes.annotate(
                    _claim_words(f), (1, y), (4, 0), xycoords=("axes fraction", "data"),
                    textcoords="offset points", va="center", fontsize=8.5,
                    color=BAD if f.claim_epsilon is None else MUTED,
                )  # fmt: skip
        several = len({run for run, _ in found}) > 1
        labels = [
            f"{clean(run, 20)}: {short_title(f.number, family(f.attack))}" if several
            else f"{f.number}: {clean(attack_words(family(f.attack)), 48)}"
            for run, f in found
        ]  # fmt: skip
        axes.set_yticks(range(len(found)), labels)
        axes.set_ylim(len(found) - 0.4, -0.6)
        if most > 30:
            axes.set_xscale("symlog", linthresh=1)
            ticks = [tick for tick in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick <= most * 1.3]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
        axes.set_xlim(-most / 100, most * (1.4 if most > 30 else 1.08))
        axes.tick_params(length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("ε, in the game that the attack plays")
        handles = [
            Line2D([], [], marker="o", color=ACCENT, linewidth=2.2, label="proved lost, at least"),
            Line2D([], [], marker="D", color=BAD, markerfacecolor="none", linewidth=0, label="claimed"),
        ]
        drawing.legend(
            handles=handles[: 2 if any(claim is not None for claim in claims) else 1],
            loc="outside lower left", ncols=2, fontsize=8.5, labelcolor=INK,
        )  # fmt: skip

    alt = " ".join(
        f"{clean(run, 40)}, attack {f.number}: at least ε {epsilon(bound)}, {_claim_words(f)}."
        for (run, f), bound in zip(found, bounds, strict=True)
    )
    caption = (
        "What an attack proves was lost, at least, beside the ε that is claimed. A dot beyond its diamond "
        "would prove a claim wrong; a short line proves nothing, since a better attack may go further."
    )
    return [Picture(draw(name, 9.6, 0.95 + 0.3 * len(found), paint), alt, caption)]


def subject_pictures(name: str, found: Sequence[Subject]) -> list[Picture]:
    """How much of each centroid was found or read, against its rows. name: begins the identifiers."""
    kinds = [kind for kind in ("rows", "words") if any(s.kind == kind for s in found)]
    if not kinds:
        return []
    silos = sorted({s.silo for s in found})
    colours = {silo: SERIES[index % len(SERIES)] for index, silo in enumerate(silos)}
    titles = {
        "rows": ("rows of a centroid found, 1 stranger in 100 taken for one", "share of rows found"),
        "words": ("words of a centroid read back", "share of words read"),
    }

    def paint(drawing: Drawing) -> None:
        grid = drawing.subplots(1, len(kinds), squeeze=False)
        for axes, kind in zip(grid.flat, kinds, strict=True):
            drawn = [s for s in found if s.kind == kind]
            for silo in silos:
                own = [s for s in drawn if s.silo == silo]
                axes.plot(
                    [s.rows for s in own], [s.share for s in own], "o", color=colours[silo],
                    markeredgecolor="#ffffff", markeredgewidth=0.6, markersize=6.5, alpha=0.85,
                )  # fmt: skip
            axes.axhline(statistics.fmean(s.guess for s in drawn), color=MUTED, linewidth=1.1,
                         linestyle=_DASHES)  # fmt: skip
            size_axis(axes, [s.rows for s in drawn])
            axes.set_ylim(-0.03, 1.05)
            axes.set_title(titles[kind][0], fontsize=9)
            axes.set_ylabel(titles[kind][1], fontsize=8.5)
        handles = [
            Line2D([], [], marker="o", color=colours[silo], linewidth=0, label=clean(silo, 24).lstrip("_"))
            for silo in silos[:16]
        ]
        handles.append(Line2D([], [], color=MUTED, linewidth=1.1, linestyle=_DASHES, label="guessing"))
        drawing.legend(
            handles=handles, loc="outside upper left", ncols=min(6, len(handles)), fontsize=8.5,
            labelcolor=INK,
        )  # fmt: skip

    told = {
        kind: ", ".join(
            f"{s.rows:.0f} rows {s.share:.2f}" for s in found if s.kind == kind and s.share > s.guess
        )
        for kind in kinds
    }
    alt = " ".join(f"{titles[kind][1]}: {clean(words, 1500) or 'none'}." for kind, words in told.items())
    caption = (
        "One dot a centroid. Means hide the worst subjects: rows of small groups and rows unlike all others "
        "are found first. The ten worst centroids are named below."
    )
    height = 3.2 + 0.2 * math.ceil((min(len(silos), 16) + 1) / 6)
    return [Picture(draw(f"{name}-subjects", 9.6, height, paint), alt, caption)]


def size_axis(axes: Any, sizes: Sequence[float]) -> None:
    """The horizontal axis of figures against the rows of a group, in powers of two."""
    low, high = min(sizes), max(sizes)
    axes.set_xscale("log")
    ticks = [tick for tick in (2**power for power in range(17)) if low / 2 < tick < high * 2]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low / 1.3, high * 1.3)
    axes.tick_params(length=0)
    axes.set_xlabel("rows averaged into one group (as released)", fontsize=8.5)
