"""Using what a run trained: copy a model out of it, and classify a file with it."""

from __future__ import annotations

import json
import re
import shutil
import stat
from pathlib import Path

import numpy as np

from securefl._model_files import appearing
from securefl._tables import read_texts
from securefl.errors import ModelError, UsageError
from securefl.files import write_atomic
from securefl.messages import NAME
from securefl.models import load_trained
from securefl.training import probabilities


def export_model(run: Path, name: str, out: Path) -> None:
    """Copy the model of silo `name` out of a run as a Hugging Face folder with its card.

    Raises UsageError where the run or the silo is not there or `out` is taken, ModelError for a broken model.
    """
    if not (run / "result.json").is_file():
        raise UsageError(f"{run}: is not the folder of a finished run (it has no result.json)")
    source = run / "models" / name
    if re.fullmatch(NAME, name) is None or not source.is_dir():
        there = ", ".join(sorted(path.name for path in (run / "models").glob("*"))) or "none"
        raise UsageError(f"{run}: has no model of {name!r}; it has {there}")
    if out.exists():
        raise UsageError(f"{out}: exists already; choose another --out or remove it")
    _check_plain(source)
    load_trained(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    with appearing(out) as draft:
        shutil.copytree(source, draft, dirs_exist_ok=True)


def _check_plain(folder: Path) -> None:
    """Refuse links and devices: a copy would take in what lies outside the folder."""
    for path in (folder.parent, folder, *sorted(folder.rglob("*"))):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ModelError(f"{path}: is a link or a device, which is not copied; a run writes none")


def predict_file(model: Path, source: Path, out: Path, text: str = "text", pair: str | None = None) -> int:
    """Classify the texts of a data file into JSONL: {"row", "label", "probabilities"} a line, no text.

    pair: column with the second text, for a model that was trained on pairs. Rows are numbered from 1 in the
    order of the file. Returns how many there were.
    """
    if out.is_dir():
        raise UsageError(f"{out}: is a folder; name a file for the predictions")
    if out.exists() and source.exists() and out.samefile(source):
        raise UsageError(f"{out}: is the file to classify; name another for the predictions")
    texts = read_texts(source, text, pair)
    slm = load_trained(model)
    chances_of_rows = probabilities(slm, texts)
    if not np.isfinite(chances_of_rows).all():
        raise ModelError(f"{model}: gives probabilities that are not numbers; its weights are broken")
    lines = []
    for number, row in enumerate(chances_of_rows, start=1):
        chances = {label: round(float(p), 6) for label, p in zip(slm.labels, row, strict=True)}
        best = slm.labels[int(np.argmax(row))]
        lines.append(json.dumps({"row": number, "label": best, "probabilities": chances}, ensure_ascii=False))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, ("\n".join(lines) + "\n").encode())
    return len(lines)
