"""What FedKC adds to FedAvg where each silo speaks another language, and at which layer. Resumable.

    python examples/fedkc_study.py --sib200 SIB200 --model MODEL --out fedkc-study
    python examples/fedkc_study.py --pawsx PAWSX --model MODEL --out fedkc-study --cells pawsx-english

SIB200 is a folder of `<language>/{train,test}.tsv` with the columns index_id, category and text, PAWSX one of
`<language>.tsv` with row, sentence1, sentence2 and label, MODEL a multilingual encoder. The same sentence
stands in all languages, so the test rows are other rows and not only other languages.

Each setting is a whole federation as `securefl simulate` plays it: one silo a language, models by a masked
sum, centroids sealed to the peers. Beside FedKC with what the peers share stands the same loss with a silo's
own centroids, for which nothing is exchanged: what exchange adds is their difference. A finished setting is
kept in OUT, so a second call does only what is left; then come the tables, with intervals over seeds
(Student's t) and paired differences.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from securefl.config import PERMIT_EMBEDDINGS, Config, parse_config
from securefl.data import Corpus, Rows, load_corpus
from securefl.files import write_atomic
from securefl.local import derive_seed, starting_slm, train_locally
from securefl.privacy import noise_source
from securefl.release import decode_release
from securefl.result import Result
from securefl.scoring import macro_f1, mean_interval
from securefl.simulation import Simulation
from securefl.slm import Slm
from securefl.training import probabilities
from securefl.workbench import TrainingMemo

CENTRALISED, FEDAVG = "centralised", "FedAvg"
LAYERS = (0, 3, 6, 9)  # of the sweep; 0 is the embedding layer
EPSILONS = (2.0, 4.0, 8.0)


def fedkc(layer: str | int, **more: Any) -> dict[str, Any]:
    """A setting that composes at a layer."""
    return {"method": "fedkc", "fedkc": {"compose": "embeddings" if layer == 0 else layer, **more}}


def settings() -> dict[str, dict[str, Any]]:
    """What each setting changes of the defaults, by its name."""
    found: dict[str, dict[str, Any]] = {
        CENTRALISED: {"method": "standalone"},
        FEDAVG: {"method": "fedavg"},
        "FedProx": {"method": "fedprox"},
        "FedKC pooled": fedkc("pooled"),
        "FedKC pooled, own": fedkc("pooled", source="own"),
        "FedKC embeddings": fedkc(0),
        "FedKC embeddings, own": fedkc(0, source="own"),
        "FedKC pooled, one cluster": fedkc("pooled", clusters=1),
        "FedKC embeddings, one cluster": fedkc(0, clusters=1),
        "FedKC embeddings, by size": fedkc(0, weights="size"),
    }
    for layer in LAYERS[1:]:
        found[f"FedKC layer {layer}"] = fedkc(layer)
        found[f"FedKC layer {layer}, own"] = fedkc(layer, source="own")
    for epsilon in EPSILONS:
        private = {"privacy": {"centroids": {"epsilon": epsilon, "delta": 1e-3}}}
        found[f"FedKC pooled, epsilon {epsilon:g}"] = fedkc("pooled") | private
        found[f"FedKC embeddings, epsilon {epsilon:g}"] = fedkc(0) | private
    for alpha in (0.1, 4.0):
        found[f"FedKC embeddings, alpha {alpha:g}"] = fedkc(0, alpha=alpha)
        found[f"FedKC pooled, alpha {alpha:g}"] = fedkc("pooled", alpha=alpha)
    return found


SETTINGS = settings()
MAIN = (
    *(CENTRALISED, FEDAVG, "FedProx", "FedKC pooled", "FedKC pooled, own"),
    *("FedKC embeddings", "FedKC embeddings, own"),
)
# Rows of a silo for training: of English, and of each other language.
CELLS = {
    "sib200-english": (700, 70),
    "sib200-balanced": (160, 160),
    "pawsx-english": (500, 300),
}
ENGLISH = ("eng_Latn", "en")


@dataclass(frozen=True)
class Files:
    """A cell's rows as the files of a run."""

    train: Path
    test: Path
    columns: dict[str, Any]


def _read(path: Path) -> list[dict[str, str]]:
    """Rows of a TSV file whose quotes mean nothing."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    heads = list(rows[0])
    lines = ["\t".join(heads), *("\t".join(row[head] for head in heads) for row in rows)]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def files_of(cell: str, options: argparse.Namespace, seed: int) -> Files:
    """Draw the rows of a cell by the seed, and write them as one file for training and one for the test."""
    data = cell.partition("-")[0]
    folder = options.sib200 if data == "sib200" else options.pawsx
    if folder is None:
        raise SystemExit(f"{cell}: say where the data are, by --{data}")
    rng = np.random.default_rng(seed)
    train, test = [], []
    if data == "sib200":
        for path in sorted(folder.iterdir()):
            counted = _rows_of(cell, path.name)
            rows = _read(path / "train.tsv")
            for place in rng.permutation(len(rows))[:counted].tolist():
                train.append(_single(rows[place], path.name, options.prefix))
            test += [_single(row, path.name, options.prefix) for row in _read(path / "test.tsv")]
        columns: dict[str, Any] = {"text": "text", "label": "label"}
    else:
        tables = {path.stem: _read(path) for path in sorted(folder.glob("*.tsv"))}
        ids = sorted({row["row"] for rows in tables.values() for row in rows})
        held = set(np.random.default_rng(0).permutation(ids)[: len(ids) // 4].tolist())
        for language, rows in tables.items():
            own = [row for row in rows if row["row"] not in held]
            for place in rng.permutation(len(own))[: _rows_of(cell, language)].tolist():
                train.append(_pair(own[place], language, options.prefix))
            test += [_pair(row, language, options.prefix) for row in rows if row["row"] in held]
        columns = {"text": "text", "pair": "other", "label": "label"}
    out = options.out / "data" / f"{cell}-{seed}"
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "train.tsv", train)
    _write(out / "test.tsv", test)
    return Files(out / "train.tsv", out / "test.tsv", columns)


def _rows_of(cell: str, language: str) -> int:
    english, other = CELLS[cell]
    return english if language in ENGLISH else other


def _single(row: dict[str, str], language: str, prefix: str) -> dict[str, str]:
    return {"text": prefix + row["text"], "label": row["category"], "lang": language}


def _pair(row: dict[str, str], language: str, prefix: str) -> dict[str, str]:
    first, second = (prefix + row[key] for key in ("sentence1", "sentence2"))
    return {"text": first, "other": second, "label": row["label"], "lang": language}


def config_of(name: str, files: Files, options: argparse.Namespace, seed: int) -> Config:
    change = SETTINGS[name]
    document = {
        "federation": {"method": change["method"], "rounds": options.rounds, "seed": seed},
        "data": {
            "train": str(files.train), "test": str(files.test), **files.columns, "language": "lang",
            "split": {"by": "column", "column": "lang"}, "validation": 0.05, "pool_rows": 0,
        },
        "slm": {
            "models": [options.model], "max_length": options.length, "epochs": options.epochs,
            "round_epochs": options.round_epochs, "learning_rate": options.learning_rate,
        },
        "fedkc": {
            "clusters": options.clusters, "alpha": options.alpha, "per_step": options.per_step,
            **change.get("fedkc", {}),
        },
        "privacy": {"centroids": {"min_size": 2}},
        "policy": {"allow_embedding_centroids": PERMIT_EMBEDDINGS},
    }  # fmt: skip
    document["privacy"]["centroids"] |= change.get("privacy", {}).get("centroids", {})
    return parse_config(document)


def by_language(slm: Slm, test: Rows) -> dict[str, dict[str, float]]:
    """Accuracy and macro-F1 on the test rows of each language."""
    said, spoken = probabilities(slm, test.texts).argmax(1), np.array(test.languages)
    found = {}
    for language in sorted(set(test.languages)):
        rows = spoken == language
        right = float((said[rows] == test.labels[rows]).mean())
        found[language] = {"accuracy": right, "macro_f1": macro_f1(said[rows], test.labels[rows])}
    return found


def all_rows(corpus: Corpus) -> Rows:
    parts = list(corpus.train.values())
    return Rows(
        tuple(row for part in parts for row in part.ids),
        tuple(text for part in parts for text in part.texts),
        np.concatenate([part.labels for part in parts]),
    )


def centralised(config: Config, corpus: Corpus) -> list[dict[str, dict[str, float]]]:
    """After each round the model of who has the rows of all silos, trained as long."""
    slm = starting_slm(config.slm.models[0], corpus.labels, config)
    rows, found, seed = all_rows(corpus), [], config.federation.seed
    for number in range(1, config.federation.rounds + 1):
        epochs = config.round_epochs(number)
        train_locally(slm, rows, config, epochs, derive_seed(seed, "all", number), noise_source(None))
        found.append(by_language(slm, corpus.test))
    return found


def federated(
    config: Config, corpus: Corpus, out: Path, memo: TrainingMemo
) -> tuple[list[dict[str, dict[str, float]]], Result]:
    """After each round the model that the silos got, and the result of the run."""
    shutil.rmtree(out, ignore_errors=True)
    result = Simulation(config, corpus, out, memo=memo).run()
    slm, found = starting_slm(config.slm.models[0], corpus.labels, config), []
    for number in range(2, config.federation.rounds + 2):
        made = (out / f"releases/server/r{number:03d}-model.safetensors").read_bytes()
        slm.load_state(decode_release(made).tensors)
        found.append(by_language(slm, corpus.test))
    shutil.rmtree(out)
    return found, result


def measure(cell: str, options: argparse.Namespace, seed: int, name: str) -> dict[str, Any]:
    """One setting on one cell and seed."""
    began, files = time.monotonic(), files_of(cell, options, seed)
    config = config_of(name, files, options, seed)
    corpus = load_corpus(config)
    row: dict[str, Any] = {"cell": cell, "seed": seed, "setting": name}
    if name == CENTRALISED:
        rounds = centralised(config, corpus)
    else:
        memo = TrainingMemo(options.out / "memo" / f"{cell}-{seed}")
        memo.folder.mkdir(parents=True, exist_ok=True)
        rounds, result = federated(config, corpus, options.out / "run", memo)
        last = result.rounds[-1]
        epsilons = [client.private_epsilon for client in result.clients]
        row |= {
            "bytes_up": last.bytes_up,
            "bytes_down": last.bytes_down,
            "epsilon": None if None in epsilons else max(epsilons),
            "alone": {client.name: client.baseline_accuracy for client in result.clients},
        }
    row |= {"rounds": rounds, "seconds": round(time.monotonic() - began, 1)}
    shown = " ".join(f"{mean_over(found):.3f}" for found in rounds)
    print(f"{cell}, seed {seed}, {name}: {shown} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
    return row


def mean_over(found: dict[str, dict[str, float]], what: str = "accuracy") -> float:
    """Mean over the languages."""
    return float(np.mean([figures[what] for figures in found.values()]))


def interval(values: list[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.3f}" if len(values) < 2 else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def own_of(setting: str) -> str:
    """The control of a setting that composes: the same with a silo's own centroids."""
    return f"{setting}, own"


def tables(rows: list[dict[str, Any]]) -> Iterator[Table]:
    for cell in dict.fromkeys(row["cell"] for row in rows):
        here = [row for row in rows if row["cell"] == cell]
        last = {(row["setting"], row["seed"]): mean_over(row["rounds"][-1]) for row in here}
        table = Table(title=f"{cell}: accuracy of the silos' model, mean over the languages")
        for head in (
            "setting",
            "seeds",
            "by round",
            "accuracy",
            "macro-F1",
            "less FedAvg",
            "less own",
            "MB up",
        ):
            table.add_column(head)
        languages = Table(title=f"{cell}: accuracy by language")
        names = sorted(here[0]["rounds"][-1])
        for head in ("setting", *names):
            languages.add_column(head)
        for setting in dict.fromkeys(row["setting"] for row in here):
            own = [row for row in here if row["setting"] == setting]
            seeds = [row["seed"] for row in own]
            path = " ".join(
                f"{np.mean([mean_over(row['rounds'][n]) for row in own]):.3f}"
                for n in range(min(len(row["rounds"]) for row in own))
            )
            gaps = []
            for other in (FEDAVG, own_of(setting)):
                both = [s for s in seeds if (other, s) in last and other != setting]
                gaps.append(interval([last[setting, s] - last[other, s] for s in both]) if both else "")
            sent = [row["bytes_up"] for row in own if "bytes_up" in row]
            table.add_row(
                setting, str(len(seeds)), path, interval([last[setting, s] for s in seeds]),
                f"{np.mean([mean_over(row['rounds'][-1], 'macro_f1') for row in own]):.3f}", *gaps,
                f"{np.mean(sent) / 1e6:.1f}" if sent else "",
            )  # fmt: skip
            languages.add_row(
                setting,
                *(f"{np.mean([row['rounds'][-1][n]['accuracy'] for row in own]):.3f}" for n in names),
            )
        yield table
        yield languages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sib200", type=Path, help="folder of SIB-200")
    add("--pawsx", type=Path, help="folder of PAWS-X")
    add("--model", required=True, help="multilingual encoder, a folder or a hub name")
    add("--prefix", default="", help='before every text; "query: " for the E5 family')
    add("--out", type=Path, default=Path("fedkc-study"), help="folder for what is finished")
    add("--cells", default="sib200-english", help=f"with commas, of {', '.join(CELLS)}")
    add("--settings", default=";".join(MAIN), help='with semicolons; "all" for every one')
    add("--seeds", type=int, default=3)
    add("--first-seed", type=int, default=0)
    add("--rounds", type=int, default=3)
    add("--epochs", type=int, default=1, help="local passes of round 1")
    add("--round-epochs", type=int, default=1, help="and of each later one")
    add("--learning-rate", type=float, default=5e-5)
    add("--length", type=int, default=64, help="tokens of a text, at most")
    add("--clusters", type=int, default=4)
    add("--alpha", type=float, default=1.0)
    add("--per-step", type=int, default=4, help="centroids in the loss of a step")
    add("--json", action="store_true", help="all rows as one JSON document instead of the tables")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "rows.json"
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    named = list(SETTINGS) if options.settings == "all" else options.settings.split(";")
    cells = options.cells.split(",")
    for unknown in [*(set(named) - set(SETTINGS)), *(set(cells) - set(CELLS))]:
        raise SystemExit(f"{unknown}: is no setting or cell; they are {'; '.join((*CELLS, *SETTINGS))}")
    of = [
        Path(options.model).name, options.prefix, options.rounds, options.epochs, options.round_epochs,
        options.learning_rate, options.length, options.clusters, options.alpha, options.per_step,
    ]  # fmt: skip
    for cell in cells:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for name in named:
                if not any(
                    (r["cell"], r["seed"], r["setting"], r["of"]) == (cell, seed, name, of) for r in rows
                ):
                    rows.append(measure(cell, options, seed, name) | {"of": of})
                    write_atomic(kept, json.dumps(rows).encode())
            # Trainings that the settings of a seed share: gigabytes.
            shutil.rmtree(options.out / "memo" / f"{cell}-{seed}", ignore_errors=True)
    shown = [row for row in rows if row["of"] == of]
    if options.json:
        print(json.dumps(shown))
        return
    console = Console()
    for table in tables(shown):
        console.print(table)


if __name__ == "__main__":
    main()
