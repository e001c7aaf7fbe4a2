"""What DP-SGD costs: test accuracy with and without it, over several seeds. Goes on where it was stopped.

    python examples/dp_utility.py --out dp-utility
    python examples/dp_utility.py --out dp-utility --name sst2 --train train.tsv --test dev.tsv

For every seed a sample of the training rows, as one silo would hold them, is trained on without noise and by
DP-SGD at each epsilon, and judged on test rows that nobody trains on. Two recipes: `default` leaves every
setting of `[slm]` and `dp_sgd` as it is, `lora` trains an adapter and the head. A third, `probe`, is what is
to be had without touching the encoder: logistic regression on its vectors, without noise. Each run is a file
of its own in OUT, written when it is finished, so a second call does only what is left; then the table is
printed: means over seeds with 95 % intervals (Student's t), and which share of what training gains over
always answering with the commonest label is kept. The noise is the operating system's, so the claims are real
ones and no two calls of a run would give the same figure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression

from securefl.config import Config, parse_config
from securefl.data import Corpus, Rows, load_corpus
from securefl.files import write_atomic
from securefl.local import derive_seed, starting_slm, train_locally
from securefl.privacy import noise_source
from securefl.training import embed, probabilities

RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "lora": {"lora": {"r": 8}},
    "probe": {},
}


def config_of(options: argparse.Namespace, recipe: str, epsilon: float | None, seed: int) -> Config:
    private = {} if epsilon is None else {"dp_sgd": {"epsilon": epsilon, "delta": options.delta}}
    return parse_config(
        {
            "federation": {"method": "standalone", "rounds": 1, "seed": seed},
            "data": {
                "train": options.train,
                "test": options.test,
                "train_rows": options.rows,
                "pool_rows": 0,
                "split": {"by": "dirichlet", "silos": 2, "alpha": 1e6},
            },
            "slm": {"models": [options.model], **RECIPES[recipe]},
            "privacy": private,
        }
    )


def all_rows(corpus: Corpus) -> Rows:
    """Every training row of the sample, as one silo."""
    parts = [rows for name in corpus.train for rows in (corpus.train[name], corpus.validation[name])]
    return Rows(
        tuple(row for part in parts for row in part.ids),
        tuple(text for part in parts for text in part.texts),
        np.concatenate([part.labels for part in parts]),
    )


def run(options: argparse.Namespace, recipe: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    config = config_of(options, recipe, epsilon, seed)
    corpus = load_corpus(config)
    rows, test = all_rows(corpus), corpus.test.take(range(min(options.test_rows, len(corpus.test))))
    slm = starting_slm(options.model, corpus.labels, config)
    began = time.monotonic()
    claim = None
    if recipe == "probe":
        vectors, unseen = embed(slm, rows.texts, "pooled"), embed(slm, test.texts, "pooled")
        fitted = LogisticRegression(C=0.1, max_iter=1000).fit(vectors, rows.labels)
        right = fitted.predict(unseen) == test.labels
    else:
        train_seed = derive_seed(seed, "train")
        claim = train_locally(slm, rows, config, config.slm.epochs, train_seed, noise_source(None))
        right = probabilities(slm, test.texts).argmax(axis=1) == test.labels
    return {
        "recipe": recipe,
        "epsilon": epsilon,
        "seed": seed,
        "accuracy": float(right.mean()),
        "majority": float(np.bincount(test.labels).max() / len(test)),
        "train_rows": len(rows),
        "test_rows": len(test),
        "seconds": round(time.monotonic() - began, 1),
        "config": config.model_dump(mode="json"),
        "claim": None if claim is None else claim.model_dump(mode="json"),
    }


def interval(values: Sequence[float]) -> str:
    """Mean and half width of the 95 % interval over seeds."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.3f}"
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return f"{mean:.3f} ± {half:.3f}"


def table(name: str, results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each recipe and epsilon."""
    lines = [
        "| data | recipe | epsilon | accuracy | gain kept | noise multiplier | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in dict.fromkeys(one["recipe"] for one in results):
        own = [one for one in results if one["recipe"] == recipe]
        plain = {one["seed"]: one["accuracy"] for one in own if one["epsilon"] is None}
        for epsilon in sorted({one["epsilon"] or np.inf for one in own}, reverse=True):
            part = [one for one in own if (one["epsilon"] or np.inf) == epsilon]
            kept = [
                (one["accuracy"] - one["majority"]) / (plain[one["seed"]] - one["majority"])
                for one in part
                if one["seed"] in plain
            ]
            noise = part[0]["claim"]["noise_multiplier"] if part[0]["claim"] else None
            cells = (
                name,
                recipe,
                "none" if epsilon == np.inf else f"{epsilon:g}",
                interval([one["accuracy"] for one in part]),
                "" if epsilon == np.inf or not kept else interval(kept),
                "" if noise is None else f"{noise:.2f}",
                str(len(part)),
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append(f"| {name} | commonest label | | {own[0]['majority']:.3f} | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("dp-utility"), help="folder for finished runs; made if need be")
    add("--name", default="rotten-tomatoes", help="what the data is called in files and table")
    add("--train", default="builtin:rotten-tomatoes", help="training rows: a file or a builtin name")
    add("--test", default="builtin:rotten-tomatoes", help="test rows, which nobody trains on")
    add("--model", default="builtin:minilm", help="encoder")
    add("--rows", type=int, default=3000, help="training rows of each seed's sample")
    add("--test-rows", type=int, default=1000, help="test rows, at most")
    add("--delta", type=float, default=1e-5, help="of the claims")
    add("--epsilons", type=float, nargs="*", default=[8.0, 3.0], help="beside no noise")
    add("--seeds", type=int, default=3, help="samples and starts")
    add("--recipes", nargs="*", choices=list(RECIPES), default=list(RECIPES), help="how it is trained")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(options.seeds):
        for recipe in options.recipes:
            for epsilon in (None, *(options.epsilons if recipe != "probe" else ())):
                place = options.out / f"{options.name}-{recipe}-{epsilon or 'none'}-{seed}.json"
                if not place.exists():
                    result = run(options, recipe, epsilon, seed)
                    write_atomic(place, json.dumps(result, indent=2).encode())
                    print(f"{place.stem}: {result['accuracy']:.3f} in {result['seconds']:.0f} s", flush=True)
                results.append(json.loads(place.read_text(encoding="utf-8")))
    print(table(options.name, sorted(results, key=lambda one: options.recipes.index(one["recipe"]))))


if __name__ == "__main__":
    main()
