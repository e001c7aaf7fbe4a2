"""The server's language-model jobs in CrossLM: generate, reward, train, choose, and train the small model.

Source: Deng et al., arXiv 2312.05842; numbers in brackets are its equations, whose mathematics is in
`methods.crosslm`. Of each silo the last model is held, to grade texts for others; what comes back is a
candidate, which its silo compares with its own model on its own validation rows. This room sees no silo's
rows and no keys, and does no I/O beyond loading its models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securefl._llm_training import Exercise, Lesson, teach
from securefl.config import Slm as SlmTerms
from securefl.crosslm_terms import CrossLm
from securefl.data import Rows
from securefl.errors import ModelError, SecureflError
from securefl.methods import crosslm
from securefl.models import load_sentence_encoder
from securefl.slm import Slm
from securefl.synthetic_quality import MOST_DRAWN, quality, self_bleu
from securefl.task_model import READ_TOKENS, Sample, TaskModel, seed_of
from securefl.training import fit, probabilities

Progress = Callable[[int, int], None]

SAMPLES = 20  # texts of an arrival that go into its report
# Stable mode undoes a lesson after which texts are that much more alike. Between two draws of as many
# film reviews it differs by a standard deviation of at most 0.02.
_SELF_BLEU_RISE = 0.15
_FEWEST_COMPARED = 8  # texts: of fewer, a chance likeness of two moves the mean

# The streams of random numbers, told apart within the seed; arrivals count from 1. The task's are others.
_TEXTS, _ORDER, _SLM, _AGAIN, _ALIKE, _REHEARSAL = 2, 3, 4, 6, 7, 8


@dataclass(frozen=True, repr=False)
class _Batch:
    """Texts of one writing. labels: (n,); grades: (n, C), the graders' probabilities of the labels."""

    samples: tuple[Sample, ...]
    dropped: int
    labels: Tensor
    grades: Tensor
    graders: tuple[str, ...]


@dataclass(frozen=True)
class Arrival:
    """What the server made of one small model.

    candidate: its trained tensors after training on the kept texts (`Slm.load_state` takes them), or None,
    and then the report's `note` says why. report: plain JSON. samples: all texts that the small
    model could learn from.
    """

    candidate: dict[str, NDArray[np.float32]] | None
    report: dict[str, Any]
    samples: tuple[Sample, ...]


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """What `result.ArrivalRow` has of an arrival's texts, from the worker's report of it."""
    names = ("kl", "agreement", "self_bleu", "distinct_2", "mean_words")
    return {**{name: report.get(name) for name in names}, "per_label": report.get("per_class", {})}


class CrossLmWorker:
    """One language model and the small models that arrive, one after another; it keeps what it learned."""

    def __init__(
        self,
        config: CrossLm,
        labels: Sequence[str],
        *,
        seed: int,
        slm: SlmTerms = SlmTerms(),
        encoder: str = "builtin:minilm",
        train_llm: bool = True,
    ) -> None:
        """Load the language model and the sentence encoder of (10).

        slm: batch size and learning rates for the arriving models. train_llm: False is data-free KD, where
        the original language model writes for everyone. Raises ModelError, ConfigError.
        """
        self.config = config
        self.labels = tuple(labels)
        self.seed = seed
        self.slm = slm
        self.train_llm = train_llm
        self.terms = config.ingredients
        self._encoder = load_sentence_encoder(encoder)
        self.task = TaskModel(config, labels, seed)
        self.llm = self.task.llm
        # Each silo's last model, to grade for others: the model it is loaded into, and its tensors.
        self.held: dict[str, tuple[Slm, dict[str, NDArray[np.float32]]]] = {}
        self.reports: list[dict[str, Any]] = []

    @property
    def stable(self) -> bool:
        """False for the paper's equations to the letter."""
        return self.config.stable

    @property
    def kl(self) -> list[float]:
        """After each arrival that trained the language model: mean KL to the original, nats a token."""
        return [report["kl"] for report in self.reports if report["kl"] is not None]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Some texts of every arrival: silo, label, text, reward, kept."""
        return [{"silo": report["silo"], **row} for report in self.reports for row in report["samples"]]

    def _stream(self, purpose: int, number: int) -> int:
        return seed_of(self.seed, purpose, number)

    # --- one arrival

    def arrival(self, slm: Slm, silo: str, progress: Progress | None = None) -> Arrival:
        """Steps (2) to (10) and the training of `slm`, which is left as it came.

        progress: called with (units done, units), a unit being one text written, read or learned from.
        Raises ModelError where the model's labels are not this worker's.
        """
        if sorted(slm.labels) != sorted(self.labels):
            raise ModelError(f"the model of {silo} has other labels than the run; it cannot grade texts")
        started = time.monotonic()
        number = len(self.reports) + 1
        count, trained = self.config.synthetic, self.config.epochs if self.train_llm else 0
        again = bool(trained) and self.terms.regenerate
        units = count * (2 + trained + 2 * again)

        def tell(done: int) -> None:
            if progress is not None:
                progress(min(done, units), units)

        report: dict[str, Any] = {
            "silo": silo, "arrival": number, "mode": self.config.mode, "generated": count,
            "dropped": 0, "kept": 0, "per_class": {}, "mean_reward": None, "agreement": None,
            "self_bleu": None, "distinct_1": None, "distinct_2": None, "mean_words": None, "words_5": None,
            "words_95": None, "losses": [], "kl": None, "entropy": None, "note": None, "seconds": 0.0,
            "graders": [], "samples": [],
        }  # fmt: skip
        notes: list[str | None] = []
        candidate, batch = None, self._written(slm, silo, _TEXTS, number, tell, 0)
        if batch.samples and not batch.grades.isfinite().all():
            notes.append(f"the model of {silo} gives probabilities that are not finite; nothing learned")
        elif batch.samples:
            if self.train_llm:
                before = (self.llm.state(), self.llm.optimizer_state()) if again else None
                lesson = self._teach(batch, number, lambda done: tell(count + done))
                report |= {"losses": lesson.losses, "kl": lesson.kl, "entropy": lesson.entropy}
                if lesson.undone is not None:
                    notes.append(f"{lesson.undone}; the weights were put back to before this arrival")
                elif before is not None:
                    new = self._written(slm, silo, _AGAIN, number, tell, count * (1 + trained))
                    alike = self._grown_alike(batch, new, number)
                    if alike is None:
                        batch = new
                    else:
                        self.llm.load_state(before[0])
                        self.llm.load_optimizer_state(before[1])
                        report |= {"kl": None, "entropy": None}
                        notes.append(f"{alike}; the weights were put back to before this arrival")
            if batch.samples:
                kept = self._choose(batch)
                report |= self._describe(batch, kept, number)
                candidate, failure = self._train_slm(slm, batch, kept, number)
                notes.append(failure)
        notes += [*self._missing(batch), None if batch.samples else "no usable text was generated"]
        report |= {"dropped": batch.dropped, "graders": sorted(batch.graders)}
        report["note"] = "; ".join(note for note in notes if note) or None
        report["seconds"] = round(time.monotonic() - started, 3)
        if batch.samples and batch.grades.isfinite().all():
            self.held[silo] = (slm, slm.state())
        self.reports.append(report)
        tell(units)
        return Arrival(candidate, report, batch.samples)

    def _missing(self, batch: _Batch) -> list[str]:
        """A sentence on each label without a usable text; raises ModelError where that is to stop the run."""
        made = {sample.label for sample in batch.samples}
        missing = [name for i, name in enumerate(self.labels) if i not in made]
        if not missing:
            return []
        said = f"{self.config.llm} wrote nothing usable for {', '.join(missing)}; change crosslm.prompts"
        if self.config.unusable == "stop":
            raise ModelError(f"{said}, or set crosslm.max_new_tokens higher")
        return [said]

    def _grown_alike(self, before: _Batch, after: _Batch, number: int) -> str | None:
        """Why a lesson is undone, by the texts written before it and after it; None where it may stand."""
        # As many of each: with more texts there are more to be like.
        count = min(len(before.samples), len(after.samples), MOST_DRAWN)
        if count < _FEWEST_COMPARED:
            return None
        rng = np.random.default_rng(self._stream(_ALIKE, number))
        first, second = (self_bleu([s.text for s in b.samples], rng, count) for b in (before, after))
        if first is None or second is None or second - first <= _SELF_BLEU_RISE:
            return None
        return f"the texts grew alike, from a self-BLEU of {first:.2f} to {second:.2f}"

    # --- grading: equation (4)

    def _written(
        self, slm: Slm, silo: str, purpose: int, number: int, tell: Callable[[int], None], done: int
    ) -> _Batch:
        """New texts of the language model as it is now, and what the graders say of them."""
        samples, dropped = self.task.synthesise(
            self.config.synthetic, self._stream(purpose, number), progress=lambda made: tell(done + made)
        )
        if not samples:
            nothing = torch.zeros(0, len(self.labels))
            return _Batch((), dropped, torch.zeros(0, dtype=torch.int64), nothing, ())
        labels = torch.tensor([sample.label for sample in samples])
        grades, graders = self._grades(slm, silo, [sample.text for sample in samples], labels)
        return _Batch(tuple(samples), dropped, labels, grades, graders)

    def _grades(
        self, slm: Slm, silo: str, texts: Sequence[str], labels: Tensor
    ) -> tuple[Tensor, tuple[str, ...]]:
        """(n, C) probabilities of this worker's labels by the arriving model, or by all that arrived."""
        found = [self._graded(slm, texts, labels)]
        others = self.held if self.terms.graders == "ensemble" else {}
        for name, (model, tensors) in others.items():
            if name == silo:
                continue
            before = model.state()
            try:
                model.load_state(tensors)
                found.append(self._graded(model, texts, labels))
            finally:
                model.load_state(before)
        return torch.stack(found).mean(0), (silo, *(name for name in others if name != silo))

    def _graded(self, slm: Slm, texts: Sequence[str], labels: Tensor) -> Tensor:
        own = probabilities(slm, texts)[:, [slm.labels.index(label) for label in self.labels]]
        said = torch.from_numpy(own)
        if self.terms.prior == "none" or not bool(said.isfinite().all()):
            return said
        return crosslm.without_prior(said, labels)

    # --- training the language model

    def _teach(self, batch: _Batch, number: int, progress: Callable[[int], None]) -> Lesson:
        reward = crosslm.rewards(batch.grades, batch.labels)
        gains = crosslm.baseline(reward, batch.labels) if self.terms.baseline else reward
        exercises = self.task.exercises(batch.samples)
        rng = np.random.default_rng(self._stream(_ORDER, number))
        return teach(self.llm, self.config, exercises, gains, rng, progress, self._rehearsal)

    @cached_property
    def _rehearsal(self) -> list[Exercise]:
        """Texts of the original without a prompt; the same after a restart, since what is learned is off."""
        seed = self._stream(_REHEARSAL, 0)
        written = self.llm.unprompted(self.terms.rehearsal, READ_TOKENS, seed) if self.terms.rehearsal else []
        return [Exercise(tuple(head), text, ()) for head, text in written]

    # --- choosing by (10), and the small model

    def _choose(self, batch: _Batch) -> list[int]:
        vectors = self._encoder.encode(
            [sample.text for sample in batch.samples], convert_to_numpy=True, show_progress_bar=False
        )
        matrix = torch.from_numpy(np.asarray(vectors, np.float32))
        reward, good = crosslm.above_chance(batch.grades, batch.labels)
        if not self.stable:
            reward = crosslm.rewards(batch.grades, batch.labels)
        score = crosslm.scores(reward, matrix) if self.terms.diversity else reward
        if self.stable:
            keep, classes = self.config.keep, len(self.labels)
            return crosslm.select_balanced(score, good, batch.labels, matrix, keep, classes)
        return crosslm.select(score, self.config.keep)

    def _train_slm(
        self, slm: Slm, batch: _Batch, kept: Sequence[int], number: int
    ) -> tuple[dict[str, NDArray[np.float32]] | None, str | None]:
        """The candidate and None, or None and why there is none. `slm` is left as it came."""
        if not kept:
            return None, "no text was kept, so there is no candidate"
        place = [slm.labels.index(label) for label in self.labels]
        rows = Rows(
            tuple(f"synthetic-{number}-{j}" for j in kept),
            tuple(batch.samples[j].text for j in kept),
            np.array([place[batch.samples[j].label] for j in kept], np.int64),
        )
        targets = None
        if self.terms.targets == "graders":
            targets = np.zeros((len(kept), len(place)), np.float32)
            targets[:, place] = batch.grades[list(kept)].numpy()
        before = slm.state()
        encoder_rate, head_rate = self.slm.learning_rates(private=False)
        try:
            fit(
                slm,
                rows,
                epochs=self.config.slm_epochs,
                batch_size=self.slm.batch_size,
                learning_rate=encoder_rate,
                head_learning_rate=head_rate,
                seed=self._stream(_SLM, number),
                label_smoothing=self.terms.label_smoothing,
                targets=targets,
            )
            return slm.state(), None
        except SecureflError as error:
            return None, str(error)
        finally:
            slm.load_state(before)

    def _describe(self, batch: _Batch, kept: Sequence[int], number: int) -> dict[str, Any]:
        samples, reward = batch.samples, crosslm.rewards(batch.grades, batch.labels)
        found = quality(
            [sample.text for sample in samples],
            [sample.label for sample in samples],
            kept,
            self.labels,
            np.random.default_rng(self._stream(_ALIKE, number)),
        )
        # A spread over the arrival rather than its beginning, which in stable mode is one label.
        shown = np.unique(np.linspace(0, len(samples) - 1, min(SAMPLES, len(samples))).round().astype(int))
        return {
            "kept": len(kept),
            **found.row(),
            "mean_reward": float(reward.mean()),
            "agreement": float((batch.grades.argmax(1) == batch.labels).float().mean()),
            "samples": [
                {
                    "label": self.labels[samples[j].label],
                    "text": samples[j].text,
                    "reward": round(float(reward[j]), 4),
                    "kept": j in kept,
                }
                for j in shown.tolist()
            ],
        }
