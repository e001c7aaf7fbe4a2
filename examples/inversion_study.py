"""How much attacks 9 and 10 read of single pooled embeddings, over seeds and targets. Resumable.

    python examples/inversion_study.py --out inversion-study
    python examples/inversion_study.py --out inversion-study --attacks zero-shot --targets 4 --json

Every target is the pooled vector of one text (or, with --rows-each, the mean of so many), and the attacker
has other text of the same kind. Three attackers read it, with the efforts of an audit: 9 has the encoder's
weights, 10 may only ask it, and zero-shot asks it too, with a language model and none of the other text. What
is read is scored by the F1 of its tokens and by ROUGE-L, beside what needs no vector (a text of the pool, as
many of the most frequent tokens) and what the same reading scores on other targets' texts (control). Of
several rows the best-matching one counts, everywhere. Means over targets with 95 % bootstrap intervals; for
the ratio to a random text's mean both are resampled together. Each finished target is kept in OUT/rows.json,
so a second call does only what is left, and may ask for more seeds, targets or attacks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

from attacks import decoder, inversion, word_maps, zero_shot
from attacks.bench.decoder import best_rows
from attacks.bench.zero_shot import MODEL
from attacks.dictionary import Ids, special_ids, token_ids
from attacks.membership import Vectors
from attacks.word_maps import Reader
from attacks.zero_shot import Box, Proposer
from securefl.data import load_texts
from securefl.errors import ModelError, SecureflError
from securefl.files import write_atomic
from securefl.models import load_llm, load_slm
from securefl.release import NonPrivate
from securefl.slm import Slm
from securefl.training import embed

ATTACKS = ("9", "10", "zero-shot")
NAMES = {"9": "9, optimisation", "10": "10, learned decoder", "zero-shot": "10, zero-shot"}
MAX_LENGTH = 64
# Texts of the pool, and other targets' texts, that a target is compared with.
_RANDOM, _OTHERS = 200, 20
_CLAIM = NonPrivate(reason="a study of exact vectors")
Row = dict[str, Any]


@dataclass(frozen=True, repr=False)
class Group:
    """The rows behind one target: token ids with special tokens, and texts, each of length k."""

    ids: list[Ids]
    texts: list[str]


@dataclass(frozen=True, repr=False)
class Scorer:
    """What a reading of one target is compared with.

    truth: the rows behind it; others: those behind other targets. random: texts of the pool. frequent: the
    pool's content tokens, the most frequent first. special: tokens that no score counts.
    """

    truth: Group
    others: list[Group]
    random: Group
    frequent: Ids
    special: frozenset[int]

    def f1(self, guesses: Sequence[Ids], groups: Sequence[Group]) -> float:
        """Mean token F1 of each guess with the row of its group that it matches best."""
        found = best_rows(guesses, [group.ids for group in groups], self.special)
        return float((2 * found.hits / (found.true + found.guessed)).mean())

    def rouge(self, guesses: Sequence[str], groups: Sequence[Group]) -> float:
        """The same of ROUGE-L."""
        return float(zero_shot.best_scores(guesses, [group.texts for group in groups]).rouge_l.mean())

    def scores(self, ids: Ids, text: str) -> dict[str, float]:
        """Of one reading, as token ids and as text."""
        length = int((~np.isin(ids, list(self.special))).sum())
        pool, others = self.random, self.others
        return {
            "f1": self.f1([ids], [self.truth]),
            "random": self.f1(pool.ids, [self.truth] * len(pool.ids)),
            "frequent": self.f1([self.frequent[:length]], [self.truth]),
            "control": self.f1([ids] * len(others), others),
            "rouge": self.rouge([text], [self.truth]),
            "rouge_random": self.rouge(pool.texts, [self.truth] * len(pool.texts)),
            "rouge_control": self.rouge([text] * len(others), others),
        }


class Seed:
    """The targets of one seed and the text that its attackers have.

    The pool comes first in the seed's order, then the targets, so that more of them move none.
    """

    def __init__(self, slm: Slm, texts: Sequence[str], seed: int, auxiliary: int, rows_each: int) -> None:
        self._slm, self._texts, self._seed, self._k = slm, texts, seed, rows_each
        self._order = np.random.default_rng([seed, 0]).permutation(len(texts))
        self._room = auxiliary
        self.pool, self.special = self._group(self._order[:auxiliary]), special_ids(slm)

    def _group(self, rows: NDArray[np.int64]) -> Group:
        texts = [self._texts[row] for row in rows]
        return Group(token_ids(self._slm, texts), texts)

    def group(self, target: int) -> Group:
        start = self._room + target * self._k
        return self._group(self._order[start : start + self._k])

    def vector(self, target: int) -> Vectors:
        """(1, d) as released: the mean of its rows' pooled vectors."""
        pooled = embed(self._slm, self.group(target).texts, "pooled").astype(np.float64)
        return np.asarray(pooled.mean(0, keepdims=True))

    def scorer(self, target: int) -> Scorer:
        there = (len(self._texts) - self._room) // self._k
        others = [(target + step) % there for step in range(1, min(_OTHERS, there - 1) + 1)]
        drawn = np.random.default_rng([self._seed, 1, target]).permutation(self._room)[:_RANDOM]
        return Scorer(
            self.group(target),
            [self.group(other) for other in others],
            Group([self.pool.ids[i] for i in drawn], [self.pool.texts[i] for i in drawn]),
            word_maps.by_frequency(self.pool.ids, self.special),
            self.special,
        )

    @cached_property
    def vectors(self) -> Vectors:
        """Of the pool."""
        return embed(self._slm, self.pool.texts, "pooled").astype(np.float64)

    @cached_property
    def reader(self) -> Reader:
        rng, sizes = np.random.default_rng([self._seed, 2]), np.full(1, float(self._k))
        return word_maps.fit(self.vectors, self.pool.ids, sizes, _CLAIM, self.special, rng)


def optimised(slm: Slm, seed: Seed, target: int, budget: int, steps: int, rng: np.random.Generator) -> Row:
    """Attack 9, and proposition 3 on what its relaxation found."""
    vector, scorer = seed.vector(target), seed.scorer(target)
    found = inversion.invert(slm, seed.reader, vector, rng, steps=steps, budget=budget)
    (shares,), residual = found.relaxed.shares, float(found.relaxed.residuals[0])
    bound = inversion.check_proposition_3(
        "proposition 3", slm, seed.reader, shares, residual, scorer.truth.ids, seed.vectors, rng
    )
    said = {"bound": bound.bound, "distance": bound.measured, "holds": bound.holds, "vacuous": bound.vacuous}
    return {"relaxed_cosine": float(found.relaxed_cosines[0]), **said} | scored(
        slm, scorer, found.tokens[0], float(found.cosines[0])
    )


def decoded(slm: Slm, seed: Seed, target: int, budget: int, rng: np.random.Generator) -> Row:
    """Attack 10, learned."""
    found = decoder.decode(seed.reader, inversion.asking(slm), seed.vector(target), rng, budget=budget)
    return scored(slm, seed.scorer(target), found.tokens[0], float(found.cosines[0]))


def searched(slm: Slm, box: Box, seed: Seed, target: int, rng: np.random.Generator) -> Row:
    """Attack 10, zero-shot. The search sees cosines from the centre of the box; this one is not."""
    (vector,) = seed.vector(target)
    found = zero_shot.search(box, vector, rng)
    (text,) = found.texts[:1] or ("",)
    (own,) = embed(slm, [text], "pooled").astype(np.float64)
    cosine = float(own @ vector / np.linalg.norm(own) / np.linalg.norm(vector))
    return {"cosine": cosine, **seed.scorer(target).scores(token_ids(slm, [text])[0], text)}


def scored(slm: Slm, scorer: Scorer, ids: Ids, cosine: float) -> Row:
    return {"cosine": cosine, **scorer.scores(ids, slm.tokenizer.decode(ids, skip_special_tokens=True))}


# --- targets, kept

Key = tuple[str, int, int]  # attack, seed, target


class Rows:
    """What was measured, in a file that is replaced after each target."""

    def __init__(self, place: Path, settings: dict[str, Any]) -> None:
        self._place, self._settings = place, settings
        self._rows: list[Row] = []
        if place.exists():
            kept = json.loads(place.read_text(encoding="utf-8"))
            if kept["settings"] != settings:
                sys.exit(f"{place}: was measured with other settings; choose another --out")
            self._rows = kept["rows"]

    def by_key(self) -> dict[Key, Row]:
        return {(row["attack"], row["seed"], row["target"]): row for row in self._rows}

    def keep(self, key: Key, values: Row, seconds: float) -> None:
        named = dict(zip(("attack", "seed", "target"), key, strict=True))
        self._rows.append({**named, **values, "seconds": round(seconds, 2)})
        document = {"settings": self._settings, "rows": self._rows}
        write_atomic(self._place, json.dumps(document, indent=1).encode())
        said = f"token F1 {values['f1']:.3f}, cosine {values['cosine']:.3f} in {seconds:.0f} s"
        print(f"{NAMES[key[0]]}, seed {key[1]}, target {key[2]}: {said}", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, rows: Rows, wanted: Sequence[Key]) -> list[str]:
    """All that is wanted and not there yet; what could not be measured is said."""
    kept, notes = rows.by_key(), []
    left = [key for key in wanted if key not in kept]
    if not left:
        return []
    texts = load_texts(options.train, options.test)
    needed = options.auxiliary + max(2, options.targets) * options.rows_each
    if len(texts) < needed:
        sys.exit(f"{options.train}: {len(texts)} texts, {needed} are needed; lower --auxiliary or --targets")
    slm = load_slm(options.model, ["a", "b"], max_length=MAX_LENGTH, train_embeddings=False, seed=0)
    box: Box | None = None
    if any(attack == "zero-shot" for attack, _, _ in left):
        try:
            proposer = Proposer(*load_llm(options.language_model))
        except ModelError as why:
            notes.append(f"zero-shot was left out, it needs a language model: {why}")
        else:
            rng = np.random.default_rng(0)
            box = zero_shot.acquainted(lambda some: embed(slm, some, "pooled"), proposer, rng)
    for number, keys in groupby(left, key=lambda key: key[1]):
        seed = Seed(slm, texts, number, options.auxiliary, options.rows_each)
        for key in keys:
            attack, _, target = key
            rng = np.random.default_rng([number, 3 + ATTACKS.index(attack), target])
            if attack != "zero-shot":
                _ = seed.reader  # is fitted once, outside of the first target's time
            began = time.monotonic()
            if attack == "9":
                values = optimised(slm, seed, target, options.budget, options.steps, rng)
            elif attack == "10":
                values = decoded(slm, seed, target, options.budget, rng)
            elif box is not None:
                values = searched(slm, box, seed, target, rng)
            else:
                continue
            rows.keep(key, values, time.monotonic() - began)
    return notes


# --- what is said of them


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95 % percentile bootstrap interval over targets."""
    found = bootstrap(
        (np.asarray(values, np.float64),), np.mean, method="percentile", rng=np.random.default_rng(0)
    )
    return float(np.mean(values)), float(found.confidence_interval.low), float(found.confidence_interval.high)


def ratio_interval(values: Sequence[float], floor: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two means and its interval, for which targets are drawn with both of their values."""

    def ratio(above: NDArray[Any], below: NDArray[Any], axis: int = -1) -> NDArray[Any]:
        return np.asarray(above.mean(axis=axis) / below.mean(axis=axis))

    pair = np.asarray(values, np.float64), np.asarray(floor, np.float64)
    rng = np.random.default_rng(0)
    found = bootstrap(pair, ratio, paired=True, vectorized=True, method="percentile", rng=rng)
    return float(ratio(*pair)), float(found.confidence_interval.low), float(found.confidence_interval.high)


MEANS = ("f1", "random", "frequent", "control", "rouge", "rouge_random", "rouge_control", "cosine", "seconds")


def summary(attack: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Each score's [mean, low, high], the two ratios', and of attack 9 what proposition 3 says."""
    columns = {name: [row[name] for row in rows] for name in (*MEANS, "seed")}
    made: dict[str, Any] = {
        "attack": NAMES[attack],
        "targets": len(rows),
        "seeds": len(set(columns["seed"])),
        **{name: list(mean_interval(columns[name])) for name in MEANS},
        "ratio": list(ratio_interval(columns["f1"], columns["random"])),
        "rouge_ratio": list(ratio_interval(columns["rouge"], columns["rouge_random"])),
    }
    if attack == "9":
        made["proposition_3"] = {
            "largest_bound": max(row["bound"] for row in rows),
            "least_distance": min(row["distance"] for row in rows),
            "distance": float(np.mean([row["distance"] for row in rows])),
            "vacuous": sum(row["vacuous"] for row in rows),
            "broken": sum(not row["holds"] for row in rows),
        }
    return made


def proposition_line(line: dict[str, Any], rows_each: int) -> str:
    said, of_one = line["proposition_3"], ", as it is of any one row" if rows_each == 1 else ""
    return (
        f"Proposition 3 on what attack 9 relaxed: the largest bound is {said['largest_bound']:.4f}, and the "
        f"distance is {said['least_distance']:.2f} or more, {said['distance']:.2f} on average; it is vacuous "
        f"for {said['vacuous']} of {line['targets']} targets{of_one}, and broken for {said['broken']}."
    )


def shown(lines: Sequence[dict[str, Any]], title: str) -> Table:
    def interval(values: Sequence[float], digits: int = 3) -> str:
        mean, low, high = (f"{value:.{digits}f}" for value in values)
        return f"{mean} [{low}, {high}]"

    table = Table("", *(f"{line['attack']} ({line['targets']})" for line in lines), title=title)
    for name, key, digits in (
        ("token F1", "f1", 3),
        ("  a random text", "random", 3),
        ("  the most frequent tokens", "frequent", 3),
        ("  control: other targets", "control", 3),
        ("  times the random text", "ratio", 2),
        ("ROUGE-L", "rouge", 3),
        ("  a random text", "rouge_random", 3),
        ("  control: other targets", "rouge_control", 3),
        ("  times the random text", "rouge_ratio", 2),
        ("cosine to the vector", "cosine", 3),
        ("seconds", "seconds", 1),
    ):
        table.add_row(name, *(interval(line[key], digits) for line in lines))
    return table


def attacks_of(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(ATTACKS):
        raise argparse.ArgumentTypeError(f"attacks are {','.join(ATTACKS)}")
    return chosen


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("inversion-study"), help="folder for what is finished")
    add("--attacks", type=attacks_of, default=list(ATTACKS), help=f"some of {','.join(ATTACKS)}")
    add("--train", default="builtin:rotten-tomatoes", help="texts: a file or a builtin name")
    add("--test", default="builtin:rotten-tomatoes", help="more rows; all serve alike")
    add("--model", default="builtin:minilm", help="encoder")
    add("--language-model", default=MODEL, help="of zero-shot")
    add("--seeds", type=positive, default=3)
    add("--targets", type=positive, default=8, help="of each seed")
    add("--rows-each", type=positive, default=1, help="texts behind each target")
    add("--auxiliary", type=positive, default=3000, help="texts that the attacker has")
    add("--budget", type=positive, default=decoder.BUDGET, help="texts that 9 and 10 try on a target")
    add("--steps", type=positive, default=inversion.STEPS, help="of 9's relaxation")
    add("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args(arguments)
    if options.seeds * options.targets < 2:
        parser.error("an interval needs two targets; raise --targets or --seeds")
    options.out.mkdir(parents=True, exist_ok=True)
    fixed = ("train", "test", "model", "language_model", "rows_each", "auxiliary", "budget", "steps")
    settings = {name: getattr(options, name) for name in fixed}
    rows = Rows(options.out / "rows.json", settings)
    grid = product(range(options.seeds), options.attacks, range(options.targets))
    wanted = [(attack, seed, target) for seed, attack, target in grid]
    try:
        notes = measure(options, rows, wanted)
    except SecureflError as why:
        sys.exit(str(why))
    kept = rows.by_key()
    found = [kept[key] for key in wanted if key in kept]
    of = {attack: [row for row in found if row["attack"] == attack] for attack in options.attacks}
    lines = [summary(attack, own) for attack, own in of.items() if len(own) > 1]
    if options.json:
        print(json.dumps({"settings": settings, "summary": lines, "rows": found, "notes": notes}))
        return
    console = Console(width=None if sys.stdout.isatty() else 150)
    behind = "single texts" if options.rows_each == 1 else f"means of {options.rows_each} texts"
    console.print(shown(lines, f"{options.model} on {options.train}, pooled vectors of {behind}"))
    said = [proposition_line(line, options.rows_each) for line in lines if "proposition_3" in line]
    print("\n".join(said + notes))


if __name__ == "__main__":
    main()
