"""The published figures on centroids, measured again on real text. Goes on where it was stopped.

    python examples/audit_centroids.py --out audit-centroids
    python examples/audit_centroids.py --out audit-centroids --parts mechanism,one-run --json

Attacks 1 to 5 at the settings of the published figures (all-MiniLM-L6-v2, film reviews, groups drawn at
random). Each cell of the table is measured once for every seed and kept in OUT/cells.json, so a second call
does only what is left; then the table is printed: means over seeds with 95 % intervals (Student's t), for
bounds on epsilon medians with the interval of order statistics. A figure is "met" within its tolerance,
"better" above and "missed" below. Exit code 1 where one is missed for which no reason is known.

membership: vectors at length 1, as this encoder is meant to be used; 2,000 members in groups of n, 4,500
other rows for the covariance, all others as controls; n known. Noise: clip C = 1, their length, sigma = .6 C
on a sum. tokens: 16 positions. Noise is the standard deviation on each number of the centroid itself: these
vectors are 9.2 long and a number of theirs .48, and .05 of that instead leaves a recall of .99 at k = 32.
mechanism, one-run: made-up rows, delta = 1e-5, as the attacks define them. bag: each centroid is one row,
1,000 of them; all other rows are auxiliary.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binom
from scipy.stats import t as student

from attacks import bag_probe
from attacks.bounds import auc, gaussian_mu_at, tpr_at
from attacks.dictionary import Ids, special_ids, token_ids, vocabulary_size
from attacks.mechanism import audit_mechanism
from attacks.membership import Target, fit_background, likelihood_ratios
from attacks.one_run import audit_sums
from attacks.token_scores import overlap
from attacks.token_study import recall_grid
from securefl.centroid_privacy import clip_rows
from securefl.data import load_texts
from securefl.files import write_atomic
from securefl.models import load_slm
from securefl.privacy import noise_source
from securefl.release import Claim, GaussianSums, NonPrivate
from securefl.slm import Slm
from securefl.training import embed

Vectors = NDArray[np.float64]
Values = dict[str, float]
PARTS = ("membership", "tokens", "mechanism", "one-run", "bag")
DELTA = 1e-5
POSITIONS = 16
FPR = 0.01


@dataclass(frozen=True)
class Sizes:
    """How much is measured; `QUICK` only shows that everything runs."""

    auxiliary: int = 4500
    fewer: int = 1000
    members: int = 2000
    groups: int = 4
    trials: int = 100_000
    canaries: int = 3840
    dimension: int = 384
    token_rows: int = 1500
    rows: int = 1000
    frequent: int = 20
    most: int = 500


QUICK = Sizes(48, 32, 24, 2, 400, 96, 32, 36, 24, 5, 8)


@dataclass(frozen=True)
class Figure:
    """One line of the table. cell: what it is read from, and `metric` there. why: it may be missed."""

    part: str
    name: str
    cell: str
    metric: str
    published: float
    tolerance: float
    median: bool = False
    why: str = ""


# n: AUC and, where it was published, the true-positive rate at 1 % false positives.
MEMBERSHIP = {
    2: (1.00, None),
    10: (1.00, 0.99),
    20: (0.993, 0.91),
    50: (0.951, 0.42),
    100: (0.872, 0.29),
    200: (0.777, 0.15),
    500: (0.637, 0.06),
}
NOISED = {2: 0.84, 10: 0.84, 50: 0.80}
# (k, noise): recall.
TOKENS = {
    **{(k, noise): 1.0 for noise in (0.0, 0.01) for k in (1, 2, 4, 8, 16, 32)},
    **{(k, 0.05): 1.0 for k in (1, 2, 4, 8, 16)},
    (32, 0.05): 0.85,
    (64, 0.0): 0.73,
    (128, 0.0): 0.56,
}
MECHANISM = {1: 0.90, 2: 1.85, 4: 3.87, 8: 7.78}
BAG_WHY = "ours scores every content token, see the line on frequent ones"


def all_figures(sizes: Sizes) -> list[Figure]:
    made = []
    for n, (area, rate) in MEMBERSHIP.items():
        cell = membership_cell(n, 0.0, sizes.auxiliary)
        made.append(Figure("membership", f"AUC, n = {n}", cell, "auc", area, 0.02))
        if rate is not None:
            made.append(Figure("membership", f"TPR at 1 % FPR, n = {n}", cell, "tpr", rate, 0.02))
    for n, area in NOISED.items():
        cell = membership_cell(n, 0.6, sizes.auxiliary)
        made.append(Figure("membership", f"AUC, n = {n}, sigma = .6 C", cell, "auc", area, 0.02))
    for (k, noise), recall in TOKENS.items():
        made.append(
            Figure(
                "tokens", f"recall, k = {k}, noise {noise:g}", token_cell(k, noise), "recall", recall, 0.05
            )
        )
    for epsilon, bound in MECHANISM.items():
        name = f"GDP bound, epsilon = {epsilon}"
        made.append(
            Figure("mechanism", name, f"mechanism/{epsilon}", "gdp", bound, 0.05 * bound, median=True)
        )
    made.append(
        Figure("one-run", "bound, epsilon = 4", "one-run/4", "epsilon", 1.82, 0.05 * 1.82, median=True)
    )
    made += [
        Figure("bag", "F1, n = 1, every token", "bag/1", "f1", 0.51, 0.05, why=BAG_WHY),
        Figure("bag", f"F1, n = 1, tokens of {sizes.frequent} rows", "bag/1", "frequent_f1", 0.51, 0.05),
    ]
    return made


def membership_cell(n: int, noise: float, auxiliary: int) -> str:
    return f"membership/{n}/{noise:g}/{auxiliary}"


def token_cell(k: int, noise: float) -> str:
    return f"tokens/{k}/{noise:g}"


# --- what is measured


def claim_of(noise: float, clip: float) -> Claim:
    if noise == 0:
        return NonPrivate(reason="study")
    # n is known in this game, so the count tells nothing more and its noise is next to none.
    return GaussianSums(
        epsilon=1.0, delta=DELTA, mu=1.0, clip=clip, noise_multiplier=noise, count_multiplier=1e-6,
        prediction_multiplier=1.0, generator="study", simulated=True,
    )  # fmt: skip


def membership(vectors: Vectors, n: int, noise: float, auxiliary: int, sizes: Sizes, seed: int) -> Values:
    """Members in groups of n against the rows that are in none, each scored against one known centroid."""
    rng = np.random.default_rng([seed, n])
    order = rng.permutation(len(vectors))
    most, groups = sizes.auxiliary, sizes.members // n
    known, members = vectors[order[:auxiliary]], vectors[order[most : most + groups * n]]
    controls = vectors[order[most + sizes.members :]]
    clip = 1.0
    rows = clip_rows(members, clip) if noise else members
    sums = rows.reshape(groups, n, -1).sum(1)
    if noise:
        sums = sums + rng.normal(0, noise * clip, sums.shape)
    target = Target(sums / n, np.full(groups, float(n)), claim_of(noise, clip), anywhere=True)
    background = fit_background(known, target)
    inside = likelihood_ratios(members, np.repeat(np.arange(groups), n), target, background)
    outside = likelihood_ratios(controls, np.arange(len(controls)) % groups, target, background)
    return {"auc": auc(inside, outside), "tpr": tpr_at(inside, outside, FPR).value, "trials": len(members)}


def mechanism(epsilon: float, sizes: Sizes, seed: int) -> Values:
    found = audit_mechanism(
        1 / gaussian_mu_at(epsilon, DELTA),
        1.0,
        DELTA,
        sizes.trials,
        noise=noise_source(seed),
        rng=np.random.default_rng([seed, int(epsilon)]),
    )
    return {"gdp": found.epsilon_lower_bound_gdp, "cp": found.epsilon_lower_bound_cp}


def one_run(epsilon: float, sizes: Sizes, seed: int) -> Values:
    found = audit_sums(
        1 / gaussian_mu_at(epsilon, DELTA),
        1.0,
        DELTA,
        sizes.canaries,
        noise=noise_source(seed),
        rng=np.random.default_rng([seed, 4]),
        dimension=sizes.dimension,
    )
    return {"epsilon": found.epsilon_lower_bound, "gdp": found.epsilon_lower_bound_gdp}


def bag(slm: Slm, texts: Sequence[str], vectors: Vectors, sizes: Sizes, seed: int) -> Values:
    """The probe at n = 1: with every token, and with those that `sizes.frequent` auxiliary rows have."""
    order = np.random.default_rng([seed, 5]).permutation(len(texts)).tolist()
    rows, known = order[: sizes.rows], order[sizes.rows :]
    special, vocabulary = special_ids(slm), vocabulary_size(slm)
    ids = token_ids(slm, texts)
    truth, auxiliary = [ids[row] for row in rows], [ids[row] for row in known]
    there = np.asarray(bag_probe.presence(auxiliary, vocabulary, special).sum(axis=0)).ravel()
    found: Values = {}
    for prefix, kept in (("", np.ones(vocabulary, bool)), ("frequent_", there >= sizes.frequent)):
        true = [[one[kept[one]]] for one in truth]
        read = bag_probe.read(
            Target(vectors[rows], np.ones(len(rows)), NonPrivate(reason="study")),
            vectors[known],
            [one[kept[one]] for one in auxiliary],
            vocabulary,
            special,
            np.random.default_rng([seed, 6]),
            groups=len(known),
        )
        sets = [[bag_probe.token_set(one, special)] for one in true]
        for name, guesses in (("f1", read.guesses), ("prior", read.prior)):
            found[prefix + name] = overlap(bags(guesses), sets, special).f1
    return found


def bags(guesses: Sequence[Ids]) -> list[list[Ids]]:
    return [[one] for one in guesses]


# --- cells, kept


class Cells:
    """What was measured, {cell/seed: values}, in a file that is replaced after each."""

    def __init__(self, place: Path, settings: dict[str, Any]) -> None:
        self._place, self._settings = place, settings
        self.values: dict[str, Values] = {}
        if place.exists():
            kept = json.loads(place.read_text(encoding="utf-8"))
            if kept["settings"] != settings:
                sys.exit(f"{place}: was measured with other settings; choose another --out")
            self.values = kept["cells"]

    def keep(self, cell: str, seed: int, values: Values, seconds: float) -> None:
        self.values[f"{cell}/{seed}"] = {**values, "seconds": round(seconds, 2)}
        document = {"settings": self._settings, "cells": self.values}
        write_atomic(self._place, json.dumps(document, indent=2).encode())
        shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        print(f"{cell}, seed {seed}: {shown} in {seconds:.0f} s", file=sys.stderr, flush=True)

    def measure(self, cell: str, seed: int, made: Callable[[], Values]) -> None:
        if f"{cell}/{seed}" not in self.values:
            began = time.monotonic()
            values = made()
            self.keep(cell, seed, values, time.monotonic() - began)

    def of(self, cell: str, metric: str) -> list[float]:
        return [
            values[metric]
            for key, values in self.values.items()
            if key.rpartition("/")[0] == cell and metric in values
        ]


def load_vectors(slm: Slm, model: str, texts: Sequence[str], out: Path) -> Vectors:
    """Pooled vectors at length 1, computed once."""
    key = hashlib.sha256(json.dumps([model, slm.max_length, *texts]).encode()).hexdigest()[:16]
    place = out / f"vectors-{key}.npy"
    if not place.exists():
        print(f"{len(texts)} texts are embedded", file=sys.stderr, flush=True)
        buffer = io.BytesIO()
        np.save(buffer, embed(slm, texts, "pooled"), allow_pickle=False)
        write_atomic(place, buffer.getvalue())
    vectors = np.load(place, allow_pickle=False).astype(np.float64)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def measure(options: argparse.Namespace, cells: Cells, sizes: Sizes) -> None:
    """Every cell of the chosen parts that is not there yet."""
    seeds, audits = range(options.seeds), range(options.audits)
    if "mechanism" in options.parts:
        for epsilon in MECHANISM:
            for seed in audits:
                cells.measure(f"mechanism/{epsilon}", seed, partial(mechanism, epsilon, sizes, seed))
    if "one-run" in options.parts:
        for seed in audits:
            cells.measure("one-run/4", seed, partial(one_run, 4.0, sizes, seed))
    if not {"membership", "tokens", "bag"} & set(options.parts):
        return
    texts = load_texts(options.train, options.test)
    slm = load_slm(options.model, ["a", "b"], max_length=64, train_embeddings=False, seed=0)
    if "membership" in options.parts:
        vectors = load_vectors(slm, options.model, texts, options.out)
        for seed in seeds:
            for n, noise, auxiliary in membership_grid(sizes):
                cells.measure(
                    membership_cell(n, noise, auxiliary),
                    seed,
                    partial(membership, vectors, n, noise, auxiliary, sizes, seed),
                )
    if "tokens" in options.parts:
        for seed in seeds:
            tokens(options.model, texts, cells, sizes, seed)
    if "bag" in options.parts:
        vectors = load_vectors(slm, options.model, texts, options.out)
        for seed in seeds:
            cells.measure("bag/1", seed, partial(bag, slm, texts, vectors, sizes, seed))


def membership_grid(sizes: Sizes) -> Iterator[tuple[int, float, int]]:
    for n in MEMBERSHIP:
        if n <= sizes.most:
            yield n, 0.0, sizes.auxiliary
            yield n, 0.0, sizes.fewer
    for n in NOISED:
        if n <= sizes.most:
            yield n, 0.6, sizes.auxiliary


def tokens(model: str, texts: Sequence[str], cells: Cells, sizes: Sizes, seed: int) -> None:
    """Groups of the first rows, with others for the prior; of small groups there are more."""
    # One position more than is read, or the last one would be the end of every longer text.
    slm = load_slm(model, ["a", "b"], max_length=POSITIONS + 1, train_embeddings=False, seed=0)
    own, others = texts[: sizes.token_rows], texts[sizes.token_rows : 3 * sizes.token_rows]

    def skip(k: int, noise: float, seed: int) -> bool:
        return (k, noise) not in TOKENS or k > sizes.most or f"{token_cell(k, noise)}/{seed}" in cells.values

    noises = sorted({noise for _, noise in TOKENS})
    for few in (True, False):
        ks = sorted({k for k, _ in TOKENS if (k <= 8) == few})
        rows = recall_grid(
            slm, own, others, ks=ks, noises=noises, positions=POSITIONS, seeds=[seed],
            groups=sizes.groups * (4 if few else 1), skip=skip,
        )  # fmt: skip
        began = time.monotonic()
        for row in rows:
            values = {name: float(row[name]) for name in ("recall", "baseline", "control", "tokens")}
            cells.keep(token_cell(row["k"], row["noise"]), seed, values, time.monotonic() - began)
            began = time.monotonic()


# --- what is said of it


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of rates and its 95 % interval over seeds; of one seed no interval is known."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its interval by order statistics, which with less than 6 values covers less than 95 %."""
    ordered = np.sort(values)
    # The largest rank that the median is below with probability at most 2.5 %, from 0.
    low = max(0, int(binom.ppf(0.025, len(ordered), 0.5)) - 1)
    return float(np.median(ordered)), float(ordered[low]), float(ordered[len(ordered) - 1 - low])


def judge(figure: Figure, cells: Cells) -> dict[str, Any] | None:
    values = cells.of(figure.cell, figure.metric)
    if not values:
        return None
    value, low, high = (median_interval if figure.median else mean_interval)(values)
    # Tolerances are of figures printed with two or three digits.
    off = round(value - figure.published, 4)
    verdict = "missed" if off < -figure.tolerance else "better" if off > figure.tolerance else "met"
    return {
        "part": figure.part,
        "figure": figure.name,
        "ours": value,
        "interval": None if math.isnan(low) else [low, high],
        "seeds": len(values),
        "published": figure.published,
        "difference": off,
        "tolerance": figure.tolerance,
        "verdict": verdict,
        "note": notes(figure, cells, verdict),
    }


def notes(figure: Figure, cells: Cells, verdict: str) -> str:
    """What goes with a figure: its baseline, the same with fewer auxiliary rows, why it is missed."""
    said = []
    if figure.part == "membership" and figure.metric == "auc" and figure.cell.split("/")[2] == "0":
        other = figure.cell.rpartition("/")[0] + "/"
        fewer = {key.rpartition("/")[0] for key in cells.values if key.startswith(other)} - {figure.cell}
        said += [
            f"{np.mean(cells.of(one, 'auc')):.3f} with {one.rpartition('/')[2]} auxiliary rows"
            for one in sorted(fewer)
        ]
    if figure.part == "tokens":
        said.append(f"prior {np.mean(cells.of(figure.cell, 'baseline')):.2f}")
    if figure.part == "bag":
        prior = figure.metric.replace("f1", "prior")
        said.append(f"prior {np.mean(cells.of(figure.cell, prior)):.2f}, published .30")
    if verdict == "missed":
        said.append(figure.why)
    return "; ".join(word for word in said if word)


def shown(lines: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table("figure", "ours [95 %]", "published", "difference", "verdict", "note", title=title)
    for before, line in zip([None, *lines], lines, strict=False):
        if before is None or before["part"] != line["part"]:
            table.add_section()
        ends = line["interval"]
        interval = "" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]"
        table.add_row(
            f"{line['part']}: {line['figure']}",
            f"{line['ours']:.3f}{interval}",
            f"{line['published']:.3f}",
            f"{line['difference']:+.3f}",
            line["verdict"],
            line["note"],
        )
    return table


def parts_of(text: str) -> list[str]:
    parts = text.split(",")
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"parts are {','.join(PARTS)}")
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("audit-centroids"), help="folder for what is finished")
    add("--parts", type=parts_of, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    add("--train", default="builtin:rotten-tomatoes", help="a file or a builtin name")
    add("--test", default="builtin:rotten-tomatoes", help="more rows; all serve alike")
    add("--model", default="builtin:minilm", help="encoder")
    add("--seeds", type=int, default=3, help="of membership, tokens and bag")
    add("--audits", type=int, default=20, help="of mechanism and one-run")
    add("--quick", action="store_true", help="small: shows that it runs, and its figures mean nothing")
    add("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if options.quick else Sizes()
    named = {name: str(getattr(options, name)) for name in ("train", "test", "model", "quick")}
    cells = Cells(options.out / "cells.json", named)
    measure(options, cells, sizes)
    lines = [
        line
        for figure in all_figures(sizes)
        if figure.part in options.parts and (line := judge(figure, cells)) is not None
    ]
    missed = [line for line in lines if line["verdict"] == "missed" and not line["note"].endswith(BAG_WHY)]
    title = f"{options.model} on {options.train}, groups at random"
    if options.json:
        print(json.dumps({"settings": named, "grouping": "random", "figures": lines, "missed": len(missed)}))
    else:
        Console(width=None if sys.stdout.isatty() else 150).print(shown(lines, title))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
