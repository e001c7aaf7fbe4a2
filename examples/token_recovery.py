"""How much attack 2 reads of embedding-layer centroids, by size, noise and layer. Resumable.

    python examples/token_recovery.py --out token-recovery

Groups of k texts are drawn at random; the attacker knows k, the public token table, and other text of the
same kind. For every k and noise: the share of tokens read (recall), of a guess from frequencies (baseline),
of as many other texts by the same reading (control), of planted names, and of whole texts put together with
a trigram model; for exact centroids of a deeper layer, how recall falls; and the same attack where sizes are
withheld, rows are weighted, silos averaged, rounds repeated, or the silo trained the table, and with a
language model in place of trigrams. Each finished row is kept in OUT, so a second call does only what is
left; then come the tables, and a page with the plots.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from attacks.adversary import NotEnough
from attacks.assembly import CausalScorer, NGrams
from attacks.audit_figures import noise_pictures
from attacks.dictionary import special_ids, token_ids, vocabulary_size
from attacks.token_study import layer_recall, recall_grid
from attacks.token_variations import Study
from securefl.config import parse_config
from securefl.data import Rows, load_corpus, load_texts
from securefl.errors import ModelError
from securefl.files import write_atomic
from securefl.models import load_llm, load_slm
from securefl.report.page import Section, write_page
from securefl.slm import Slm
from securefl.training import fit

POSITIONS = 16
KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NOISES = (0.0, 0.01, 0.05, 0.1)
LAYERS = (0, 1, 2, 3, 4, 5, 6)
LAYER_KS = (1, 4, 16)
_COLUMNS = ("recall", "baseline", "control", "names", "names_control", "exact", "exact_control")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("token-recovery"), help="folder for what is finished")
    add("--train", default="builtin:rotten-tomatoes", help="texts: a file or a builtin name")
    add("--test", default="builtin:rotten-tomatoes", help="more rows; all serve alike")
    add("--model", default="builtin:minilm", help="encoder")
    add("--rows", type=int, default=1200, help="texts to draw groups from, and as many for the attacker")
    add("--groups", type=int, default=4, help="groups of each size")
    add("--seeds", type=int, default=2)
    add(
        "--language-model",
        default="builtin:smollm2",
        help="puts texts together; left out where not installed",
    )
    add("--most", type=int, default=max(KS), help="largest k")
    add("--json", action="store_true", help="one JSON document instead of the tables")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells, layers, varied = measure(options)
    if options.json:
        print(json.dumps({"grid": cells, "layers": layers, "variations": varied}))
        return
    console = Console()
    console.print(table(f"{options.model} on {options.train}, {POSITIONS} positions, random groups", cells))
    console.print(layer_table(layers))
    console.print(variation_table(varied))
    page = [Section("Recall by size and noise", tuple(noise_pictures(cells)))]
    path = options.out / "report.html"
    write_page(
        path, "Token recovery", f"{options.model} on {options.train}", page, "This page loads nothing."
    )
    console.print(str(path))


Kept = list[dict[str, Any]]


def measure(options: argparse.Namespace) -> tuple[Kept, Kept, Kept]:
    """All rows of the grid, layers and variations; those that are kept are not measured again."""
    kept = options.out / "rows.json"
    named = [options.train, options.model, options.rows, options.groups]
    document = json.loads(kept.read_text()) if kept.exists() else {}
    if document.get("of") != named:
        document = {"of": named, "grid": [], "layers": []}
    document.setdefault("variations", [])
    texts = load_texts(options.train, options.test)[: 2 * options.rows]
    own, others = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    # One position more than is read, or the last one would be the end of every longer text.
    slm = load_slm(options.model, ["a", "b"], max_length=POSITIONS + 1, train_embeddings=False, seed=0)
    known = [ids[:POSITIONS] for ids in token_ids(slm, others)]
    score = NGrams(known, vocabulary_size(slm))
    have = {(row["k"], row["noise"], row["seed"]) for row in document["grid"]}

    def keep(part: str, row: dict[str, Any]) -> None:
        document[part].append(row)
        write_atomic(kept, json.dumps(document).encode())

    ks = [k for k in KS if k <= min(options.most, len(own) // 2)]
    rows = recall_grid(
        slm, own, others, ks=ks, noises=NOISES, positions=POSITIONS, seeds=range(options.seeds),
        groups=options.groups, score=score, skip=lambda k, noise, seed: (k, noise, seed) in have,
    )  # fmt: skip
    for row in rows:
        keep("grid", row)
    if not document["layers"]:
        depth = int(slm.model.config.num_hidden_layers)
        chosen, few = [p for p in LAYERS if p <= depth], [k for k in LAYER_KS if k in ks]
        read = layer_recall(
            slm, own, others, layers=chosen, ks=few, positions=POSITIONS, groups=4 * options.groups
        )
        try:
            for row in read:
                keep("layers", row)
        except NotEnough as why:
            print(f"no deeper layers: {why}", file=sys.stderr)
    have_varied = {(row["variation"], row["k"], row["seed"]) for row in document["variations"]}
    study = Study(
        slm,
        own,
        others,
        POSITIONS,
        options.groups,
        trained(options, own),
        score,
        language_model(options, slm),
    )
    try:
        for row in study.rows(range(options.seeds), lambda *cell: cell in have_varied):
            keep("variations", row)
    except NotEnough as why:
        print(f"no further variations: {why}", file=sys.stderr)
    return document["grid"], document["layers"], document["variations"]


def trained(options: argparse.Namespace, own: list[str]) -> Slm:
    """The encoder after an epoch on the rows themselves, its embedding layer included."""
    split = {"by": "dirichlet", "silos": 2, "alpha": 1e6}
    data = {"train": options.train, "test": options.test, "pool_rows": 0, "split": split}
    corpus = load_corpus(parse_config({"federation": {"method": "standalone"}, "data": data}))
    parts = [*corpus.train.values(), *corpus.validation.values(), corpus.test]
    label = {text: int(one) for part in parts for text, one in zip(part.texts, part.labels, strict=True)}
    rows = Rows(
        tuple(map(str, range(len(own)))), tuple(own), np.array([label[text] for text in own], np.int64)
    )
    slm = load_slm(options.model, corpus.labels, max_length=POSITIONS + 1, train_embeddings=True, seed=0)
    fit(slm, rows, epochs=1, batch_size=32, learning_rate=1e-4, head_learning_rate=1e-3, seed=0)
    return slm


def language_model(options: argparse.Namespace, slm: Slm) -> CausalScorer | None:
    try:
        model, tokenizer = load_llm(options.language_model)
    except ModelError as why:
        print(f"no language model: {why}", file=sys.stderr)
        return None
    return CausalScorer(model, tokenizer, slm.tokenizer.decode, special_ids(slm))


def table(title: str, cells: list[dict[str, Any]]) -> Table:
    """Means over seeds."""
    made = Table("k", "noise", *(name.replace("_", " ") for name in _COLUMNS), title=title)
    for k, noise in dict.fromkeys((row["k"], row["noise"]) for row in cells):
        rows = [row for row in cells if (row["k"], row["noise"]) == (k, noise)]
        for row in rows:
            row["exact"] = row["exact_texts"] / row["texts"]
            row["exact_control"] = row["exact_texts_control"] / row["texts"]
        made.add_row(
            str(k), f"{noise:g}", *(f"{np.mean([row[name] for row in rows]):.3f}" for name in _COLUMNS)
        )
    return made


def layer_table(rows: list[dict[str, Any]]) -> Table:
    made = Table("layer", "k", "recall", "prior", "control", title="Exact centroids of a deeper layer")
    for row in rows:
        values = (f"{row[name]:.3f}" for name in ("recall", "baseline", "control"))
        made.add_row(str(row["layer"]), str(row["k"]), *values)
    return made


def variation_table(rows: list[dict[str, Any]]) -> Table:
    """Means over seeds; exact texts and sizes right are shares."""
    names = ("k", "read with", "recall", "prior", "control", "sizes right", "exact texts")
    made = Table("attack 2 with", *names, title=f"{POSITIONS} positions, random groups")
    for cell in dict.fromkeys((row["variation"], row["k"], row["what"]) for row in rows):
        same = [row for row in rows if (row["variation"], row["k"], row["what"]) == cell]
        values = [f"{np.mean([row[name] for row in same]):.3f}" for name in ("recall", "baseline", "control")]
        right = f"{np.mean([row['sizes_right'] for row in same]):.2f}" if "sizes_right" in same[0] else ""
        whole = (
            f"{np.mean([row['exact_texts'] / row['texts'] for row in same]):.2f}"
            if "texts" in same[0]
            else ""
        )
        made.add_row(cell[0], str(cell[1]), cell[2], *values, right, whole)
    return made


if __name__ == "__main__":
    main()
