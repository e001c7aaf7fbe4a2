"""CrossLM against data-free KD and training alone, on silos with skewed labels. Resumable.

    python examples/crosslm_study.py --out crosslm-study --cells rotten-tomatoes-0.3 --seeds 5

Of each cell (data, Dirichlet alpha) and seed: four silos train a small model each; then their models arrive
at a language model under every setting that is asked for. What a setting gives is measured before the silo's
rule to keep the better model: each candidate's accuracy on test rows. Beside it: how many candidates a silo
would keep by its own validation rows, and of the language model, before and after, how well it names labels
(plain and calibrated), how often a judge trained on other rows gives its texts the label that they were
written for, and its perplexity on text of another source. A finished setting is kept in OUT, so a second call
does only what is left; then come the tables, with intervals over seeds (Student's t) and paired differences.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

from securefl.config import Slm as SlmTerms
from securefl.config import parse_config
from securefl.crosslm_terms import CrossLm
from securefl.crosslm_worker import CrossLmWorker
from securefl.data import Corpus, Rows, load_corpus
from securefl.files import write_atomic
from securefl.methods.crosslm import distinct
from securefl.models import load_slm
from securefl.scoring import mean_interval
from securefl.slm import Slm
from securefl.training import fit, probabilities

ALONE = "standalone"
# What each setting changes of the defaults; `train_llm` False is data-free KD.
SETTINGS: dict[str, dict[str, Any]] = {
    "data-free KD": {"train_llm": False},
    "CrossLM": {},
    "data-free KD, paper": {"train_llm": False, "mode": "paper"},
    "CrossLM, paper": {"mode": "paper"},
    "data-free KD, own grader": {"train_llm": False, "graders": "own"},
    "CrossLM, own grader": {"graders": "own"},
    "data-free KD, own grader, no prior": {"train_llm": False, "graders": "own", "prior": "none"},
    "CrossLM, own grader, no prior": {"graders": "own", "prior": "none"},
    "data-free KD, soft targets": {"train_llm": False, "targets": "graders"},
    "CrossLM, soft targets": {"targets": "graders"},
    "CrossLM, same texts": {"regenerate": False},
    "CrossLM, no baseline": {"baseline": False},
    "CrossLM, no diversity": {"diversity": False},
    "CrossLM, g1 = 0": {"gammas": [0.0, 0.1, 0.05]},
    "CrossLM, g2 = 0": {"gammas": [1.0, 0.0, 0.05]},
    "CrossLM, g3 = 0": {"gammas": [1.0, 0.1, 0.0]},
}
WORDS = {
    "rotten-tomatoes": {"0": "negative", "1": "positive"},
    "bbc-news": {"tech": "technology"},
}
PROMPTS = {
    "rotten-tomatoes": "Write one sentence of a {label} movie review.",
    "bbc-news": "Write one sentence of a {label} news story.",
}
READINGS = {
    "rotten-tomatoes": "This is a {label} movie review.",
    "bbc-news": "This is {label} news.",
}
FOREIGN = {"rotten-tomatoes": "imdb", "bbc-news": "imdb"}  # text for the perplexity
MOST_TEST_ROWS = {"rotten-tomatoes": 1726, "bbc-news": 436}
SILOS, JUDGE_ROWS, FOREIGN_ROWS = 4, 1500, 200


@dataclass(frozen=True)
class Cell:
    """`rotten-tomatoes-0.3` -> data and alpha."""

    data: str
    alpha: float

    @classmethod
    def named(cls, name: str) -> Cell:
        data, _, alpha = name.rpartition("-")
        if data not in PROMPTS:
            raise SystemExit(f"{name}: is no cell; write one of {', '.join(PROMPTS)}, a dash and an alpha")
        return cls(data, float(alpha))


def corpus_of(cell: Cell, options: argparse.Namespace, seed: int, pool: int) -> Corpus:
    document = {
        "federation": {"method": ALONE, "seed": seed},
        "data": {
            "train": f"builtin:{cell.data}",
            "test": f"builtin:{cell.data}",
            "train_rows": 2 * SILOS * options.rows,  # so that a label rarely runs out
            "test_rows": min(options.test_rows, MOST_TEST_ROWS[cell.data]),
            "pool_rows": pool,
            "split": {"by": "dirichlet", "silos": SILOS, "alpha": cell.alpha, "rows": options.rows},
        },
        "slm": {"models": [options.model]},
    }
    return load_corpus(parse_config(document))


def trained(options: argparse.Namespace, rows: Rows, labels: tuple[str, ...], seed: int) -> Slm:
    terms = SlmTerms()
    slm = load_slm(options.model, labels, max_length=terms.max_length, train_embeddings=False, seed=seed)
    encoder, head = terms.learning_rates(private=False)
    fit(
        slm, rows, epochs=terms.epochs, batch_size=terms.batch_size, learning_rate=encoder,
        head_learning_rate=head, seed=seed,
    )  # fmt: skip
    return slm


def accuracy(slm: Slm, rows: Rows) -> float:
    return float((probabilities(slm, rows.texts).argmax(1) == rows.labels).mean())


class Silos:
    """The silos of a cell and seed with the models that they trained alone, kept in a file."""

    def __init__(self, cell: Cell, options: argparse.Namespace, seed: int, folder: Path) -> None:
        self.corpus = corpus_of(cell, options, seed, JUDGE_ROWS)
        self.names = list(self.corpus.train)
        labels = self.corpus.labels
        kept = folder / f"{cell.data}-{cell.alpha:g}-{options.rows}-{seed}.safetensors"
        self._slm = load_slm(
            options.model, labels, max_length=SlmTerms().max_length, train_embeddings=False, seed=seed
        )
        if not kept.exists():
            states = {n: trained(options, self.corpus.train[n], labels, seed).state() for n in self.names}
            states["judge"] = trained(options, self.corpus.pool, labels, seed + 1000).state()
            draft = kept.with_suffix(".draft")
            save_file({f"{n}/{k}": v for n, state in states.items() for k, v in state.items()}, draft)
            draft.replace(kept)
        self._alone: dict[str, tuple[float, float]] = {}
        self.untaught: dict[str, dict[str, Any]] = {}  # by mode: what was measured of the language model
        self._states: dict[str, dict[str, Any]] = {}
        for key, tensor in load_file(kept).items():
            name, _, part = key.partition("/")
            self._states.setdefault(name, {})[part] = tensor

    def model(self, name: str) -> Slm:
        """The one model, with a silo's (or the judge's) tensors in it."""
        self._slm.load_state(self._states[name])
        return self._slm

    def alone(self, name: str) -> tuple[float, float]:
        """Accuracy of what the silo trained alone, on test rows and on its own validation rows."""
        if name not in self._alone:
            slm = self.model(name)
            self._alone[name] = accuracy(slm, self.corpus.test), accuracy(slm, self.corpus.validation[name])
        return self._alone[name]

    def loaded(self, tensors: dict[str, Any]) -> Slm:
        """The one model, with these tensors in it."""
        self._slm.load_state(tensors)
        return self._slm


def judged(worker: CrossLmWorker, silos: Silos, count: int) -> tuple[float, dict[str, float], list[str]]:
    """Accuracy of the language model's texts by the judge, how varied they are, and some of them."""
    samples, _ = worker.task.synthesise(count, 12345)
    texts = [sample.text for sample in samples]
    right = probabilities(silos.model("judge"), texts).argmax(1) == [sample.label for sample in samples]
    words = [text.lower().split() for text in texts]
    variety = {f"distinct_{n}": distinct(words, n) for n in (1, 2)}
    return float(right.mean()), variety, texts[:: max(1, len(texts) // 10)][:10]


def measure(cell: Cell, options: argparse.Namespace, seed: int, name: str, silos: Silos) -> dict[str, Any]:
    """One setting on one cell and seed."""
    corpus, began = silos.corpus, time.monotonic()
    row: dict[str, Any] = {"cell": f"{cell.data}-{cell.alpha:g}", "seed": seed, "setting": name}
    if name == ALONE:
        found = {n: silos.alone(n)[0] for n in silos.names}
        counts = {
            n: np.bincount(corpus.train[n].labels, minlength=len(corpus.labels)).tolist() for n in silos.names
        }
        judge = accuracy(silos.model("judge"), corpus.test)
        return row | {"accuracy": found, "rows": counts, "judge": judge}
    changes = dict(SETTINGS[name])
    train_llm = changes.pop("train_llm", True)
    terms = CrossLm.model_validate(
        {
            "llm": options.llm, "encoder": options.model, "synthetic": options.synthetic,
            "max_new_tokens": options.tokens, "prompt": PROMPTS[cell.data], "reading": READINGS[cell.data],
            "verbalisers": WORDS[cell.data],
            **json.loads(options.terms), **changes,
        }
    )  # fmt: skip
    worker = CrossLmWorker(terms, corpus.labels, seed=seed, encoder=options.model, train_llm=train_llm)
    foreign = list(load_corpus(parse_config({
        "federation": {"method": ALONE}, "data": {
            "train": f"builtin:{FOREIGN[cell.data]}", "test": f"builtin:{FOREIGN[cell.data]}",
            "test_rows": FOREIGN_ROWS, "train_rows": 400, "pool_rows": 0}})).test.texts)  # fmt: skip
    some = corpus.test.take(range(min(options.judged, len(corpus.test))))

    def language() -> dict[str, Any]:
        nlg, variety, shown = judged(worker, silos, options.judged)
        return {
            "nlg": nlg,
            "nlu": worker.task.nlu_accuracy(some.texts, some.labels),
            "nlu_calibrated": worker.task.nlu_accuracy(some.texts, some.labels, calibrated=True),
            "perplexity": worker.task.perplexity(foreign),
            **variety,
            "texts": shown,
        }

    if terms.mode not in silos.untaught:
        silos.untaught[terms.mode] = language()
    row |= {"before": silos.untaught[terms.mode], "accuracy": {}, "own": {}, "kept": {}, "arrivals": []}
    held: dict[str, dict[str, Any]] = {}  # what a silo kept in place of what it trained alone
    scores = {silo: silos.alone(silo) for silo in silos.names}
    for place, silo in enumerate(silos.names * options.rounds):
        own, checked = scores[silo]
        slm = silos.loaded(held[silo]) if silo in held else silos.model(silo)
        arrival = worker.arrival(slm, silo)
        report = {k: v for k, v in arrival.report.items() if k not in ("losses", "samples")}
        row["arrivals"].append({"place": place, **report})
        row["own"][silo] = row["accuracy"][silo] = own
        row["kept"][silo] = False
        if arrival.candidate is not None:
            candidate = silos.loaded(arrival.candidate)
            new = accuracy(candidate, corpus.test), accuracy(candidate, corpus.validation[silo])
            row["accuracy"][silo] = new[0]
            row["kept"][silo] = new[1] >= checked
            if row["kept"][silo]:
                held[silo], scores[silo] = arrival.candidate, new
        if train_llm:
            row["arrivals"][-1] |= {"nlg": judged(worker, silos, options.judged)[0]}
        say = f"{name}, seed {seed}, {silo}: {own:.3f} -> {row['accuracy'][silo]:.3f}"
        print(f"{say} (kl {report['kl']}, agreement {report['agreement']})", file=sys.stderr, flush=True)
    after = language() if train_llm else row["before"]
    return row | {"after": after, "seconds": round(time.monotonic() - began, 1)}


def interval(values: np.ndarray[Any, Any]) -> str:
    """Mean with Student's 95 % interval over seeds."""
    mean, low, high = mean_interval(values.tolist())
    return f"{mean:.3f}" if len(values) < 2 else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def tables(rows: list[dict[str, Any]]) -> Iterator[Table]:
    for cell in dict.fromkeys(row["cell"] for row in rows):
        here = [row for row in rows if row["cell"] == cell]
        mean = {(row["setting"], row["seed"]): float(np.mean(list(row["accuracy"].values()))) for row in here}
        table = Table(title=f"{cell}: mean accuracy of the silos' models, before they keep the better one")
        for head in ("setting", "seeds", "accuracy", "less standalone", "less data-free KD", "kept"):
            table.add_column(head)
        llm = Table(title=f"{cell}: the language model, before -> after the arrivals")
        for head in (
            "setting",
            "understands",
            "calibrated",
            "its texts by the judge",
            "perplexity",
            "distinct-2",
        ):
            llm.add_column(head)
        for setting in dict.fromkeys(row["setting"] for row in here):
            own = [row for row in here if row["setting"] == setting]
            seeds = [row["seed"] for row in own]
            cells = [interval(np.array([mean[setting, seed] for seed in seeds]))]
            for other in (ALONE, setting.replace("CrossLM", "data-free KD").replace(", same texts", "")):
                both = [s for s in seeds if (other, s) in mean and other != setting]
                fair = bool(both) and setting != ALONE
                gaps = np.array([mean[setting, s] - mean[other, s] for s in both])
                cells.append(interval(gaps) if fair else "")
            kept = [flag for row in own for flag in row.get("kept", {}).values()]
            share = f"{np.mean(kept):.2f}" if kept else ""
            table.add_row(setting, str(len(seeds)), *cells, share)
            if setting != ALONE:
                names = ("nlu", "nlu_calibrated", "nlg", "perplexity", "distinct_2")
                llm.add_row(
                    setting,
                    *(
                        " -> ".join(
                            f"{np.mean([row[when][n] for row in own]):.3f}" for when in ("before", "after")
                        )
                        for n in names
                    ),
                )
        yield table
        yield llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("crosslm-study"), help="folder for what is finished")
    add("--cells", default="rotten-tomatoes-0.3", help="data and Dirichlet alpha, with commas between")
    add("--settings", default="data-free KD;CrossLM", help='with semicolons; "all" for every one')
    add("--seeds", type=int, default=5)
    add("--first-seed", type=int, default=0)
    add("--rows", type=int, default=200, help="of each silo")
    add("--test-rows", type=int, default=1000)
    add("--synthetic", type=int, default=256, help="texts an arrival")
    add("--tokens", type=int, default=24, help="of a text, at most")
    add("--rounds", type=int, default=1, help="arrivals of each silo")
    add("--judged", type=int, default=200, help="texts and rows that the language model is measured on")
    add("--terms", default="{}", help="JSON of further keys of [crosslm] for all settings")
    add("--model", default="builtin:minilm", help="small model, and sentence encoder")
    add("--llm", default="builtin:smollm2")
    add("--json", action="store_true", help="all rows as one JSON document instead of the tables")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "rows.json"
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    named = [ALONE, *(SETTINGS if options.settings == "all" else options.settings.split(";"))]
    unknown = [name for name in named if name not in (ALONE, *SETTINGS)]
    if unknown:
        raise SystemExit(f"{unknown[0]}: is no setting; they are {'; '.join(SETTINGS)}")
    of = [
        options.rows,
        options.synthetic,
        options.tokens,
        options.rounds,
        options.terms,
        options.model,
        options.llm,
    ]
    for cell in map(Cell.named, options.cells.split(",")):
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            done = {
                row["setting"]
                for row in rows
                if (row["cell"], row["seed"], row["of"]) == (f"{cell.data}-{cell.alpha:g}", seed, of)
            }
            todo = [name for name in named if name not in done]
            if not todo:
                continue
            silos = Silos(cell, options, seed, options.out)
            for name in todo:
                rows.append(measure(cell, options, seed, name, silos) | {"of": of})
                write_atomic(kept, json.dumps(rows).encode())
    shown = [row for row in rows if row["of"] == of]
    if options.json:
        print(json.dumps(shown))
        return
    console = Console()
    for table in tables(shown):
        console.print(table)


if __name__ == "__main__":
    main()
