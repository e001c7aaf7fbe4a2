"""The figures of an audit: membership in each silo, and words read back against the size of a group.

They draw what `Finding` objects hold and nothing else, on `securefl.report.figures`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure as Drawing

from attacks.findings import Audit, Finding
from securefl.report.figures import Dot, Panel, dot_panels, dots_alt
from securefl.report.page import INK, MUTED, SERIES, Picture, clean, draw

Audits = Sequence[tuple[str, Audit]]

_SEVERITY: Mapping[str, int] = {"none_shown": 0, "leaks": 1, "violates_claim": 2}
_SIZE_KEYS = ("rows", "cluster_size", "rows_per_centroid", "size", "k", "n")
_MARKERS = "osD^vPX*"


def worst_first(finding: Finding) -> tuple[int, float]:
    """A sorting key: the gravest verdict first, then the largest lift over the baseline."""
    return -_SEVERITY[finding.verdict], finding.baseline - finding.value


def metric_key(finding: Finding) -> str:
    """The metric's name in lower case with underscores."""
    return finding.metric.lower().replace(" ", "_").replace("-", "_")


def is_recall(finding: Finding) -> bool:
    """Whether the finding is the share of all tokens read back (not of rare ones or planted names)."""
    return metric_key(finding) == "token_recall"


def is_membership(finding: Finding) -> bool:
    """Whether the finding is the AUC of a membership attack."""
    return metric_key(finding) == "auc" and "member" in finding.attack.lower()


def membership_pictures(audits: Audits) -> list[Picture]:
    """One figure an attack: a panel a run, a line a silo, the round with the worst value."""
    attacks = sorted(
        {(f.number, f.attack) for _, audit in audits for f in audit.findings if is_membership(f)}
    )
    pictures = []
    for index, (number, attack) in enumerate(attacks):
        chosen: list[tuple[str, dict[str, Finding]]] = []
        for name, audit in audits:
            worst: dict[str, Finding] = {}
            for finding in sorted(audit.findings, key=worst_first):
                if is_membership(finding) and (finding.number, finding.attack) == (number, attack):
                    worst.setdefault(finding.silo, finding)
            if worst:
                chosen.append((name, worst))
        silos = sorted({silo for _, worst in chosen for silo in worst})[:16]

        def dot(silo: str, f: Finding | None) -> Dot:
            if f is None:
                return Dot(silo, None, None)
            return Dot(silo, f.value, f.ci, f.baseline, f.cap, hollow=f.verdict == "none_shown")

        panels = [
            Panel(name, tuple(dot(silo, worst.get(silo)) for silo in silos), (0.35, 1.03), 0.5, "AUC")
            for name, worst in chosen
        ]
        drawn = [finding for _, worst in chosen for finding in worst.values()]
        legend = ["value: leaks"]
        legend += ["hollow: none shown"] if any(f.verdict == "none_shown" for f in drawn) else []
        legend += ["reference: guessing"]
        legend += ["cap: most the claim allows"] if any(f.cap is not None for f in drawn) else []
        caption = (
            f"{clean(attack, 60).capitalize()} (attack {number}): how well rows behind a release are told "
            "from others, in each silo, in the round where it went best. 0.5 is guessing, 1.0 always right."
        )
        pictures.append(Picture(dot_panels(f"membership-{index}", panels, legend), dots_alt(panels), caption))
    return pictures


def _cluster_size(finding: Finding, audit: Audit) -> float | None:
    """Rows behind what a finding is about: from its details, else the mean of its release's centroids."""
    for key in _SIZE_KEYS:
        value = finding.details.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
    for release in audit.releases:
        if (release.silo, release.round) == (finding.silo, finding.round) and release.rows_per_centroid:
            return max(statistics.fmean(release.rows_per_centroid), 1.0)
    return None


def recall_picture(audits: Audits) -> list[Picture]:
    """Token recall against the rows of a group, all runs in one figure; empty without such findings."""
    points: dict[str, list[tuple[float, Finding]]] = {}
    for name, audit in audits:
        for finding in audit.findings:
            rows = _cluster_size(finding, audit) if is_recall(finding) else None
            if rows is not None:
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
            axes.axhline(guess, color=MUTED if index == 0 else colour, linestyle=(0, (4, 3)), linewidth=1.1,
                         label="guessing" if index == 0 else None)  # fmt: skip
        axes.set_xscale("log")
        low, high = min(everything), max(everything)
        ticks = [tick for tick in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if low / 2 < tick < high * 2]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(low / 1.3, high * 1.3)
        axes.set_ylim(-0.03, 1.05)
        axes.tick_params(length=0)
        axes.set_xlabel("rows averaged into one group (as released)")
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
