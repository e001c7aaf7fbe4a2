"""What the runs of one process share: loaded checkpoints, finished local trainings, answers on test rows.

A simulation asks for the same training more than once (a silo's first round is the same in every method,
and an interrupted run is replayed), so results are stored under a hash of everything that they depend on.
Sharing changes the time that a run takes, never its result.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from securefl.config import Config
from securefl.data import Rows
from securefl.dp_terms import training_mechanism
from securefl.errors import ProtocolError, SecureflError
from securefl.files import write_atomic
from securefl.local import require_composed, starting_slm, train_locally
from securefl.methods.fedkc import Knowledge
from securefl.models import base_fingerprint
from securefl.privacy import Noise
from securefl.release import DpSgd, PayloadKind, canonical_json, check_tensors, decode, encode, fingerprint
from securefl.slm import Slm
from securefl.training import probabilities


@dataclass
class Workbench:
    """What the runs of one process share: loaded checkpoints, answers of a model on the test rows.

    Nothing here depends on a method, so sharing changes time and not results.
    """

    _loaded: dict[str, tuple[Slm, str]] = field(default_factory=dict)
    _said: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def slm(self, name: str, labels: tuple[str, ...], config: Config) -> tuple[Slm, str]:
        """A fresh copy of a checkpoint with the run's initial head, and the hash of its files."""
        terms = config.slm
        seed = config.federation.seed
        key = repr((name, labels, terms.max_length, terms.train_embeddings, terms.lora, seed))
        if key not in self._loaded:
            model = starting_slm(name, labels, config)
            self._loaded[key] = (model, base_fingerprint(name))
        model, base = self._loaded[key]
        require_composed(model, config)
        return copy.deepcopy(model), base

    def answers(self, slm: Slm, rows: Rows) -> NDArray[np.bool_]:
        """(n,) whether the model is right on each test row."""
        return np.asarray(self.said(slm, rows) == rows.labels)

    def said(self, slm: Slm, rows: Rows) -> NDArray[np.int64]:
        """(n,) the label that the model finds likeliest for each test row."""
        key = hashlib.sha256(
            repr((slm.name, slm.lora, fingerprint(slm.state()), rows.ids)).encode()
        ).hexdigest()
        if key not in self._said:
            self._said[key] = probabilities(slm, rows.texts).argmax(axis=1)
        return self._said[key]


def _digest_rows(rows: Rows) -> str:
    digest = hashlib.sha256()
    for text, label in zip(rows.texts, rows.labels, strict=True):
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw + int(label).to_bytes(8, "big"))
    return digest.hexdigest()


@dataclass(frozen=True)
class TrainingMemo:
    """A `LocalTraining` that looks in `folder` first.

    The files hold silos' secret weights: the folder is for one simulation and removed with it.
    """

    folder: Path

    def __call__(
        self,
        slm: Slm,
        rows: Rows,
        config: Config,
        epochs: int,
        seed: int,
        noise: Noise,
        knowledge: Sequence[Knowledge] = (),
        cancelled: Callable[[], bool] | None = None,
    ) -> DpSgd | None:
        """Train `slm` in place, or load what the same training gave before, with its claim.

        Under DP-SGD `noise` must be from a seed, for one purpose (`Noise.for_purpose`): a training that is
        remembered draws nothing.
        """
        private = config.privacy.dp_sgd
        if private is not None and not noise.simulated:
            raise SecureflError(
                "a private training with noise of the operating system is not to be remembered"
            )
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
            config.fedkc.model_dump(mode="json") if knowledge else {},
            config.mu,
        ]
        if private is not None:
            first = noise.draw().bytes(16).hex()  # stands for the seed and the purpose
            facts += [private.model_dump(mode="json"), repr(training_mechanism(config, epochs)), first]
            facts.append(list(rows.units))
        path = self.folder / f"{hashlib.sha256(canonical_json(facts)).hexdigest()}.safetensors"
        if path.exists():
            try:
                body = decode(path.read_bytes())
                check_tensors(body.tensors, slm.shapes(), path.name)
                claim = DpSgd.model_validate(body.document["claim"]) if private is not None else None
            except (ProtocolError, KeyError, ValidationError):
                path.unlink()  # cut short by a full disk or an old version: train again
            else:
                slm.load_state(body.tensors)
                return claim
        claim = train_locally(slm, rows, config, epochs, seed, noise, knowledge, cancelled)
        document = {} if claim is None else {"claim": claim.model_dump(mode="json")}
        write_atomic(path, encode(PayloadKind.MODEL, document, slm.state()), mode=0o600)
        return claim
