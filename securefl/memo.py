"""Finished local trainings, kept by content: the same start, rows and seed give the same weights.

A simulation asks for the same training more than once (a silo's first round is the same in every method,
and an interrupted run is replayed), so results are stored under a hash of everything that they depend on.
The files hold silos' secret weights: the folder is for one simulation and removed with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from securefl.client import train_locally
from securefl.config import Config
from securefl.data import Rows
from securefl.errors import ProtocolError
from securefl.files import write_atomic
from securefl.methods.fedkc import Knowledge
from securefl.models import Slm
from securefl.release import PayloadKind, canonical_json, check_tensors, decode, encode, fingerprint


def _digest_rows(rows: Rows) -> str:
    digest = hashlib.sha256()
    for text, label in zip(rows.texts, rows.labels, strict=True):
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw + int(label).to_bytes(8, "big"))
    return digest.hexdigest()


@dataclass(frozen=True)
class TrainingMemo:
    """A `LocalTraining` that looks in `folder` first."""

    folder: Path

    def __call__(
        self,
        slm: Slm,
        rows: Rows,
        config: Config,
        epochs: int,
        seed: int,
        knowledge: Sequence[Knowledge] = (),
    ) -> None:
        """Train `slm` in place, or load what the same training gave before."""
        facts = [
            slm.name,
            slm.max_length,
            list(slm.labels),
            fingerprint(slm.state()),
            _digest_rows(rows),
            config.slm.model_dump(mode="json"),
            epochs,
            seed,
            [fingerprint({k: np.asarray(v) for k, v in one.tensors().items()}) for one in knowledge],
            [config.fedkc.alpha, config.fedkc.weights] if knowledge else [],
        ]
        path = self.folder / f"{hashlib.sha256(canonical_json(facts)).hexdigest()}.safetensors"
        if path.exists():
            try:
                tensors = decode(path.read_bytes()).tensors
                check_tensors(tensors, slm.shapes(), path.name)
            except ProtocolError:
                path.unlink()  # cut short by a full disk or an old version: train again
            else:
                slm.load_state(tensors)
                return
        train_locally(slm, rows, config, epochs, seed, knowledge)
        write_atomic(path, encode(PayloadKind.MODEL, {}, slm.state()), mode=0o600)
