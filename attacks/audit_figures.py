"""The figures over several audits: membership in each silo, and words read back against size and noise.

They draw what `Finding` objects, or the rows of a study, hold and nothing else, on `securefl.report.figures`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Drawing

from attacks.audit_plots import size_axis
from attacks.audit_rows import Audits, family, is_membership, is_recall, number_in, worst_first
from attacks.audit_words import short_title
from attacks.findings import Audit, AuditedRelease, Finding
from securefl.report.figures import Dot, Panel, dot_panels, dots_alt
from securefl.report.page import INK, MUTED, SERIES, Picture, clean, count, draw

_SIZE_KEYS = ("rows", "cluster_size", "rows_per_centroid", "size", "k", "n")
_MARKERS = "osD^vPX*"
_NOISED = "gaussian-sums"
_DASHES = (0, (4, 3))


def membership_pictures(audits: Audits) -> list[Picture]:
    """A line a silo, with the round and the way of scoring that went worst.

    Of several runs one figure an attack, a panel a run; of one run all attacks in one figure, a panel each.
    """
    chosen: dict[tuple[int, str], list[tuple[str, dict[str, Finding]]]] = {}
    for name, audit in audits:
        found: dict[tuple[int, str], dict[str, Finding]] = {}
        for finding in sorted(filter(is_membership, audit.findings), key=worst_first):
            attack = finding.number, family(finding.attack)
            found.setdefault(attack, {}).setdefault(finding.silo, finding)
        for attack, worst in found.items():
            chosen.setdefault(attack, []).append((name, worst))
    how = (
        "how well a silo's rows are told from strangers', in each silo, where it went worst over rounds and "
        "ways of scoring. 0.5 is guessing, 1.0 always right."
    )
    if len(audits) == 1:
        one = [(short_title(n, attack), runs[0][1]) for (n, attack), runs in sorted(chosen.items())]
        return [_membership("membership", one, f"AUC of each attack on membership: {how}")] if one else []
    return [
        _membership(f"membership-{index}", runs, f"{clean(attack, 60).capitalize()} (attack {n}): {how}")
        for index, ((n, attack), runs) in enumerate(sorted(chosen.items()))
    ]


def _membership(name: str, chosen: Sequence[tuple[str, dict[str, Finding]]], caption: str) -> Picture:
    silos = sorted({silo for _, worst in chosen for silo in worst})[:16]

    def dot(silo: str, f: Finding | None) -> Dot:
        if f is None or not math.isfinite(f.value):
            return Dot(silo, None, None)
        return Dot(silo, f.value, f.ci, f.baseline, f.cap, hollow=f.verdict == "none_shown")

    panels = [
        Panel(title, tuple(dot(silo, worst.get(silo)) for silo in silos), (0.35, 1.03), 0.5, "AUC")
        for title, worst in chosen
    ]
    drawn = [finding for _, worst in chosen for finding in worst.values()]
    legend = ["value: leaks"]
    legend += ["hollow: none shown"] if any(f.verdict == "none_shown" for f in drawn) else []
    legend += ["reference: guessing"]
    legend += ["cap: most the claim allows"] if any(f.cap is not None for f in drawn) else []
    return Picture(dot_panels(name, panels, legend), dots_alt(panels), caption)


def _cluster_size(finding: Finding, audit: Audit) -> float | None:
    """Rows behind what a finding is about: from its details, else the mean of its release's centroids."""
    for key in _SIZE_KEYS:
        value = number_in(finding.details.get(key))
        if value is not None and value > 0:
            return value
    for release in audit.releases:
        if (release.silo, release.round) == (finding.silo, finding.round) and release.rows_per_centroid:
            sizes = [size for size in map(number_in, release.rows_per_centroid) if size is not None]
            return max(statistics.fmean(sizes), 1.0) if sizes else None
    return None


def recall_picture(audits: Audits) -> list[Picture]:
    """Token recall against the rows of a group, all runs in one figure; empty without such findings."""
    points: dict[str, list[tuple[float, Finding]]] = {}
    for name, audit in audits:
        for finding in audit.findings:
            rows = _cluster_size(finding, audit) if is_recall(finding) else None
            if rows is not None and math.isfinite(finding.value):
                points.setdefault(name, []).append((rows, finding))
    if not points:
        return []

    def paint(drawing: Drawing) -> None:
        axes = drawing.subplots()
        everything = [rows for found in points.values() for rows, _ in found]
        for index, (name, found) in enumerate(points.items()):
            colour = SERIES[index % len(SERIES)]
            for rows, f in found:
                axes.plot((rows, rows), f.ci, color=colour, linewidth=1.2, alpha=0.75)
            xs, ys = [rows for rows, _ in found], [f.value for _, f in found]
            marker = _MARKERS[index % len(_MARKERS)]
            label = clean(name, 36).lstrip("_")
            axes.plot(xs, ys, linestyle="none", marker=marker, color=colour, markersize=5.5, label=label)
            guess = statistics.fmean(f.baseline for _, f in found)
            axes.axhline(guess, color=MUTED if index == 0 else colour, linestyle=_DASHES, linewidth=1.1,
                         label="guessing" if index == 0 else None)  # fmt: skip
        size_axis(axes, everything)
        axes.set_ylim(-0.03, 1.05)
        axes.set_ylabel("token recall")
        drawing.legend(loc="outside upper left", ncols=min(3, len(points) + 1), fontsize=8.5, labelcolor=INK)

    lines = [
        f"{clean(name, 40)}: "
        + ", ".join(
            f"{rows:.0f} rows {f.value:.3f}" for rows, f in sorted(found, key=lambda pair: pair[0])[:40]
        )
        + f", guessing {statistics.fmean(f.baseline for _, f in found):.3f}."
        for name, found in points.items()
    ]
    caption = (
        "Share of the words of a group that were read back, against how many rows were averaged into it, "
        "with 95 % intervals. A dashed line is what guessing common words scores."
    )
    return [Picture(draw("recall", 9.6, 3.6, paint), " ".join(lines), caption)]


def _noise(release: AuditedRelease) -> float | None:
    """Standard deviation of the noise on each number of a sum, 0 where there is none; None where unsaid."""
    if release.claim.get("mechanism") != _NOISED:
        return 0.0
    clip, multiplier = (number_in(release.claim.get(key)) for key in ("clip", "noise_multiplier"))
    return None if clip is None or multiplier is None else clip * multiplier


def recall_rows(audits: Audits) -> list[dict[str, float]]:
    """The recall of every centroid of some audits as rows for `noise_pictures`."""
    rows = []
    for _, audit in audits:
        noises = {
            (r.silo, r.round): _noise(r) for r in audit.releases if r.kind == "embedding-centroids"
        }  # fmt: skip
        for f in audit.findings:
            size = _cluster_size(f, audit) if is_recall(f) else None
            noise = noises.get((f.silo, f.round))
            if size is None or noise is None or " rounds" in f.target:
                continue  # an average over rounds has less noise than its releases
            row = {"k": size, "noise": noise / size, "recall": f.value, "baseline": f.baseline}
            rows.append(row if f.control is None else {**row, "control": f.control})
    return rows


def noise_pictures(rows: Sequence[Mapping[str, Any]], name: str = "noise") -> list[Picture]:
    """Token recall against size and against noise, in two plots of one figure.

    rows: {k, noise, recall, baseline} and, where there is one, control; of a study (`attacks.token_study`) or
    of audits (`recall_rows`). noise: standard deviation on each number of a centroid. Rows of the same k and
    noise are averaged, and a line spans their lowest and highest. Rows without finite numbers are left out;
    empty unless there are at least two noises. name: begins the identifiers in the SVG.
    """
    cells: dict[tuple[float, float], list[dict[str, float]]] = {}
    for row in rows:
        known = {key: number_in(row.get(key)) for key in ("k", "noise", "recall", "baseline", "control")}
        usable = {key: value for key, value in known.items() if value is not None}
        if {"k", "noise", "recall", "baseline"} <= set(usable) and usable["k"] > 0 and usable["noise"] >= 0:
            cells.setdefault((usable["k"], usable["noise"]), []).append(usable)
    if len({noise for _, noise in cells}) < 2:
        return []
    sizes, noises = _levels([k for k, _ in cells]), _levels([noise for _, noise in cells])

    def paint(drawing: Drawing) -> None:
        left, right = drawing.subplots(1, 2, sharey=True)
        _paint_lines(left, cells, noises, by_noise=True)
        size_axis(left, [k for k, _ in cells])
        left.set_ylabel("token recall")
        _paint_lines(right, cells, sizes, by_noise=False)
        least = min(noise for _, noise in cells if noise > 0)
        most = max(noise for _, noise in cells)
        right.set_xscale("symlog", linthresh=least, linscale=0.6)
        right.set_xlim(-least / 8, most * 1.4)
        ticks = [0.0, *noises[1:]] if len(noises) <= 7 and noises[0] == 0 else []
        if ticks:
            right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        right.minorticks_off()
        right.tick_params(length=0)
        right.set_xlabel("standard deviation of the noise on each number of a centroid", fontsize=8.5)
        for axes in (left, right):
            axes.set_ylim(-0.03, 1.05)
            axes.legend(
                fontsize=8, labelcolor=INK, loc="upper left" if axes is right else "best",
                bbox_to_anchor=(1.01, 1.0) if axes is right else None,
            )  # fmt: skip

    alt = " ".join(
        f"{k:g} rows, noise {noise:.3g}: recall {_mean(found, 'recall'):.3f}, guessing "
        f"{_mean(found, 'baseline'):.3f}."
        for (k, noise), found in sorted(cells.items())[:60]
    )
    controls = [row["control"] for found in cells.values() for row in found if "control" in row]
    beside = ""
    if controls:
        beside = f" On texts that were not in the data the same reading scores {max(controls):.2f} at most."
    number = count(sum(map(len, cells.values())), "group")
    caption = (
        f"Share of the words of a group that were read back, {number}: against how many rows were averaged "
        "into it, a line for each noise, and against the noise, a line for each number of rows. A dashed "
        f"line is what guessing common words scores.{beside}"
    )
    return [Picture(draw(name, 9.6, 3.7, paint), alt, caption)]


def _mean(found: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.fmean(row[key] for row in found)


def _levels(values: Sequence[float]) -> list[float]:
    """The different values; where there are more than eight, the powers of two (and 0) next to them."""
    different = sorted(set(values))
    return different if len(different) <= len(SERIES) else sorted({_level(value) for value in different})


def _level(value: float) -> float:
    return 2.0 ** round(math.log2(value)) if value > 0 else 0.0


def _paint_lines(
    axes: Any,
    cells: Mapping[tuple[float, float], Sequence[Mapping[str, float]]],
    levels: Sequence[float],
    by_noise: bool,
) -> None:
    """A line for each noise over the sizes, or for each size over the noises, at most eight of them."""
    exact = set(levels) == {noise if by_noise else k for k, noise in cells}
    for index, level in enumerate(levels[: len(SERIES)]):
        line: dict[float, list[Mapping[str, float]]] = {}
        for (k, noise), found in cells.items():
            own, at = (noise, k) if by_noise else (k, noise)
            if (own if exact else _level(own)) == level:
                line.setdefault(at, []).extend(found)
        xs = sorted(line)
        colour = SERIES[index]
        for x in xs:
            recalls = [row["recall"] for row in line[x]]
            axes.plot((x, x), (min(recalls), max(recalls)), color=colour, linewidth=1.2, alpha=0.75)
        about = "" if exact else "about "
        label = f"{about}{level:.3g} noise" if by_noise else f"{about}{level:g} row{'s' * (level != 1)}"
        marker = _MARKERS[index % len(_MARKERS)]
        axes.plot(xs, [_mean(line[x], "recall") for x in xs], color=colour, marker=marker, markersize=5,
                  linewidth=1.5, label=label)  # fmt: skip
        if index == 0 or not by_noise:
            axes.plot(xs, [_mean(line[x], "baseline") for x in xs], color=MUTED if by_noise else colour,
                      linewidth=1.0, linestyle=_DASHES, alpha=0.6)  # fmt: skip
