"""The demo's federation: what `securefl demo` runs, and in which order.

Four silos hold BBC news and start from the same models in every method; the embedding-layer runs exist to
show what that layer gives away, and the demo's own policy says so in so many words. Auditing is handed in
by the caller, since this package never imports the attacks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securefl.config import PERMIT_EMBEDDINGS, Config, parse_config
from securefl.data import Corpus, load_corpus
from securefl.recording import RunFolder, link_duplicates
from securefl.result import Result
from securefl.simulation import Progress, Simulation, work_units
from securefl.workbench import TrainingMemo, Workbench

AUDIT_UNITS = 12.0
# The quick ones of the attacks; `securefl-audit run` puts the others to a finished run.
DEMO_ATTACKS = frozenset({1, 2, 3, 4, 6, 7, 8})
ALPHA = 0.3
REFERENCE = "fedavg"  # the run that later ones are compared with, besides each silo alone
PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "min_size": 4}
# In the form that SmolLM2-Instruct was tuned on: after a plain "A report about X:" it often leaves X.
PROMPTS = {
    label: f"Write one sentence from a BBC news report about {what}."
    for label, what in {
        "business": "a company or the economy",
        "entertainment": "a film, a band or an actor",
        "politics": "a British minister or an election",
        "sports": "a football, rugby or tennis match",
        "tech": "software, video games or the internet",
    }.items()
}


def _base() -> dict[str, Any]:
    return {
        "federation": {"method": "standalone", "rounds": 3, "seed": 7},
        "data": {
            "train": "builtin:bbc-news",
            "test": "builtin:bbc-news",
            "train_rows": 280,
            "test_rows": 200,
            "pool_rows": 400,
            "split": {"by": "dirichlet", "silos": 4, "alpha": ALPHA, "min_rows": 28},
        },
        "slm": {"models": ["builtin:minilm"], "max_length": 32, "epochs": 3, "round_epochs": 1},
        "fedkc": {"clusters": 5, "alpha": 0.5},
        "crosslm": {
            "synthetic": 64,
            "max_new_tokens": 16,
            "top_p": 0.9,
            "evaluate_rows": 24,
            "prompts": PROMPTS,
        },
    }


def demo_configs() -> dict[str, Config]:
    """Name of the run to its configuration, in the order in which they run."""
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "standalone": {},
        "fedavg": {"federation": {"method": "fedavg"}},
        "fedkc-pooled": {"federation": {"method": "fedkc"}},
        "fedkc-pooled-dp": {"federation": {"method": "fedkc"}, "privacy": {"centroids": PRIVATE}},
        "fedkc-embeddings": {
            "federation": {"method": "fedkc"},
            "fedkc": {"compose": "embeddings"},
            "policy": {"allow_embedding_centroids": PERMIT_EMBEDDINGS},
        },
        "fedkc-embeddings-dp": {
            "federation": {"method": "fedkc"},
            "fedkc": {"compose": "embeddings"},
            "privacy": {"centroids": PRIVATE},
        },
        "crosslm": {"federation": {"method": "crosslm", "rounds": 1}},
    }
    configs = {}
    for name, change in changes.items():
        document = _base()
        for section, fields in change.items():
            document.setdefault(section, {}).update(fields)
        configs[name] = parse_config(document, f"demo {name}")
    return configs


def describe(corpus: Corpus, configs: dict[str, Config]) -> str:
    """One paragraph: the sizes of everything that the demo is about to do."""
    config = next(iter(configs.values()))
    slm = config.slm
    rows = ", ".join(f"{name} {len(part)}" for name, part in corpus.train.items())
    kept = sum(len(part) for part in corpus.validation.values())
    return (
        f"{len(corpus.train)} silos hold BBC news, spread by Dirichlet {ALPHA} "
        f"(training rows: {rows}; {kept} more "
        f"kept from training), {len(corpus.test)} test rows, {slm.max_length} tokens a text, "
        f"{config.federation.rounds} rounds ({slm.epochs} local passes, then {slm.round_epochs}), "
        f"{config.fedkc.clusters} centroids a silo, {config.crosslm.synthetic} synthetic texts an arrival, "
        f"seed {config.federation.seed}."
    )


def demo_units(configs: dict[str, Config]) -> float:
    """Total work in the units of `simulation.work_units`."""
    audits = AUDIT_UNITS * sum(config.federation.method == "fedkc" for config in configs.values())
    return audits + sum(work_units(config, 4) for config in configs.values())


def run_demo(
    folder: RunFolder,
    configs: dict[str, Config],
    progress: Progress,
    audit: Callable[[Path, str], None],
    say: Callable[[str], None],
) -> list[Result]:
    """Run every configuration below `folder`, calling `audit` on the runs that share centroids."""
    corpus = load_corpus(next(iter(configs.values())))
    say(describe(corpus, configs))
    folder.open()
    memo, workbench, results = TrainingMemo(folder.state), Workbench(), []
    answers: dict[str, NDArray[np.bool_]] = {}
    for name, config in configs.items():

        def tick(amount: float, what: str, run: str = name) -> None:
            progress(amount, f"{run}: {what}")

        simulation = Simulation(
            config,
            corpus,
            folder.path / name,
            workbench=workbench,
            memo=memo,
            progress=tick,
            name=name,
            compare={REFERENCE: answers[REFERENCE]} if REFERENCE in answers else {},
        )
        results.append(simulation.run())
        answers[name] = simulation.answers
        if config.federation.method == "fedkc":
            audit(folder.path / name, name)
            progress(AUDIT_UNITS, f"{name}: attacked")
    # Every method starts from the same models, so a third of the files are the same bytes.
    link_duplicates(sorted(folder.path.glob("*/releases/*/*-model.safetensors")))
    return results
