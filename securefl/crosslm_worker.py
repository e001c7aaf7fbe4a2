"""The server's language-model jobs in CrossLM: generate, reward, train, choose, and train the small model.

Source: Deng et al., arXiv 2312.05842; numbers in brackets are its equations, whose mathematics is in
`methods.crosslm`. A small model that arrives is read and never kept; what comes back is a candidate, which
its silo compares with its own model on its own validation rows. This room sees no silo's rows and no keys,
and does no I/O beyond loading its models.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securefl._language_model import LanguageModel, Written
from securefl._llm_training import Exercise, Lesson, teach
from securefl.config import CrossLm
from securefl.config import Slm as SlmTerms
from securefl.data import Rows
from securefl.errors import ConfigError, ModelError, SecureflError
from securefl.methods import crosslm
from securefl.models import Slm, load_sentence_encoder
from securefl.training import fit, probabilities

Progress = Callable[[int, int], None]

READING = "\nThis text is about"  # what (1) asks after a text, and what M'(y) of (7) begins with
SHORTEST = 4  # words; a shorter text is a heading or a fragment
READ_TOKENS = 64  # of a text, when the language model reads it
LABEL_SMOOTHING = 0.1  # stable mode: the label of a synthetic text is only what was asked for
SAMPLES = 20  # texts of an arrival that go into its report

# The streams of random numbers, told apart within the seed; arrivals count from 1.
_ADAPTER, _LABELS, _TEXTS, _ORDER, _SLM, _JUDGED = range(6)


@dataclass(frozen=True)
class Sample:
    """A synthetic text x, the label y that it was written for, and its tokens as sampled."""

    text: str
    label: int
    written: Written


@dataclass(frozen=True)
class Arrival:
    """What the server made of one small model.

    candidate: its trained tensors after training on the kept texts (`Slm.load_state` takes them), or None,
    and then the report's `note` says why. report: plain JSON. samples: all texts of the arrival.
    """

    candidate: dict[str, NDArray[np.float32]] | None
    report: dict[str, Any]
    samples: tuple[Sample, ...]


def _by_label(name: str, given: Mapping[str, str], labels: Sequence[str], default: str) -> list[str]:
    unknown = sorted(set(given) - set(labels))
    if unknown:
        raise ConfigError(f"crosslm.{name}: {unknown[0]} is not a label; the labels are {', '.join(labels)}")
    if any(not given.get(label, "x").strip() for label in labels):
        raise ConfigError(f"crosslm.{name}: an entry is empty; give it text or leave it out")
    return [given.get(label, default.format(label=label)) for label in labels]


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
        self._prompts = _by_label("prompts", config.prompts, labels, "Here is a text about {label}:")
        self._verbalisers = _by_label("verbalisers", config.verbalisers, labels, "{label}")
        self._encoder = load_sentence_encoder(encoder)
        self.llm = LanguageModel(config.llm, rank=config.lora_rank, seed=self._stream(_ADAPTER))
        self._reading = self.llm.encode_inner(READING)
        self._answers = [self.llm.encode_inner(f" {word}") for word in self._verbalisers]
        # M'(y) is what (1) asks, answered: "This text is about sport."; so (7) practises what (1) measures.
        full_stop = self.llm.encode_inner(".")
        self._sentences = [(*self._reading, *answer, *full_stop) for answer in self._answers]
        self.reports: list[dict[str, Any]] = []

    @property
    def stable(self) -> bool:
        """False for the paper's equations to the letter."""
        return self.config.mode == "stable"

    @property
    def kl(self) -> list[float]:
        """After each arrival that trained the language model: mean KL to the original, nats a token."""
        return [report["kl"] for report in self.reports if report["kl"] is not None]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Some texts of every arrival: silo, label, text, reward, kept."""
        return [{"silo": report["silo"], **row} for report in self.reports for row in report["samples"]]

    def _stream(self, purpose: int, number: int = 0) -> int:
        return int(np.random.SeedSequence([self.seed, purpose, number]).generate_state(1)[0])

    # --- one arrival

    def arrival(self, slm: Slm, silo: str, progress: Progress | None = None) -> Arrival:
        """Steps (2) to (10) and the training of `slm`, which is left as it came.

        progress: called with (units done, units), a unit being one text written, read or learned from.
        Raises ModelError where the model's labels are not this worker's.
        """
        if slm.labels != self.labels:
            raise ModelError(f"the model of {silo} has other labels than the run; it cannot grade texts")
        started = time.monotonic()
        number = len(self.reports) + 1
        count, trained = self.config.synthetic, self.config.epochs if self.train_llm else 0
        units = count * (2 + trained)

        def tell(done: int) -> None:
            if progress is not None:
                progress(done, units)

        samples, dropped = self.synthesise(count, self._stream(_TEXTS, number), progress=tell)
        report: dict[str, Any] = {
            "silo": silo, "arrival": number, "mode": self.config.mode, "generated": count,
            "dropped": dropped, "kept": 0, "per_class": {}, "mean_reward": None, "agreement": None,
            "distinct_1": 0.0, "distinct_2": 0.0, "losses": [], "kl": None, "note": None, "seconds": 0.0,
            "samples": [],
        }  # fmt: skip
        candidate = None
        if not samples:
            report["note"] = "no usable text was generated"
        else:
            labels = torch.tensor([sample.label for sample in samples])
            shares = torch.from_numpy(probabilities(slm, [sample.text for sample in samples]))
            if not shares.isfinite().all():
                report["note"] = (
                    f"the model of {silo} gives probabilities that are not finite; nothing learned"
                )
            else:
                reward = crosslm.rewards(shares, labels)
                report["agreement"] = float((shares.argmax(1) == labels).float().mean())
                if self.train_llm:
                    lesson = self._teach(samples, reward, labels, number, lambda done: tell(count + done))
                    report |= {"losses": lesson.losses, "kl": lesson.kl}
                    if lesson.undone is not None:
                        report["note"] = f"{lesson.undone}; the adapter was put back to before this arrival"
                kept = self._choose(samples, reward, labels)
                report |= self._describe(samples, reward, kept)
                candidate, failure = self._train_slm(slm, [samples[j] for j in kept], number)
                report["note"] = "; ".join(note for note in (report["note"], failure) if note) or None
        report["seconds"] = round(time.monotonic() - started, 3)
        self.reports.append(report)
        tell(units)
        return Arrival(candidate, report, tuple(samples))

    # --- writing: equations (2) and (3)

    def _draw_labels(self, count: int, seed: int) -> list[int]:
        """(2). Stable mode deals the labels out evenly: the same mean, no class without texts by chance."""
        rng = np.random.default_rng(seed)
        classes = len(self.labels)
        if not self.stable:
            drawn: list[int] = rng.integers(classes, size=count).tolist()
            return drawn
        rest = rng.choice(classes, count % classes, replace=False).tolist()
        return [*(label for label in range(classes) for _ in range(count // classes)), *rest]

    def synthesise(
        self, count: int, seed: int, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[list[Sample], int]:
        """(2) and (3): texts for drawn labels by the language model as it is now, and how many were dropped.

        Empty texts are dropped; in stable mode also those below 4 words and repeats of an earlier text.
        The same seed and weights give the same texts.
        """
        labels = self._draw_labels(count, self._mix(seed, _LABELS))
        written = self.llm.write(
            [self._prompts[label] for label in labels],
            max_new_tokens=self.config.max_new_tokens,
            top_p=self.config.top_p,
            seed=self._mix(seed, _TEXTS),
            progress=progress,
        )
        samples: list[Sample] = []
        seen: set[str] = set()
        for label, text in zip(labels, written, strict=True):
            short = len(text.text.split()) < (SHORTEST if self.stable else 1)
            if short or not text.tokens or (self.stable and text.text.lower() in seen):
                continue
            seen.add(text.text.lower())
            samples.append(Sample(text.text, label, text))
        return samples, count - len(samples)

    @staticmethod
    def _mix(seed: int, purpose: int) -> int:
        return int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0])

    # --- training the language model

    def _teach(
        self,
        samples: Sequence[Sample],
        reward: Tensor,
        labels: Tensor,
        number: int,
        progress: Callable[[int], None],
    ) -> Lesson:
        gains = crosslm.baseline(reward, labels) if self.stable else reward
        heads = [tuple(self.llm.encode(prompt)) for prompt in self._prompts]
        exercises = [
            Exercise(heads[s.label], s.written, (*self.llm.encode(s.text), *self._sentences[s.label]))
            for s in samples
        ]
        rng = np.random.default_rng(self._stream(_ORDER, number))
        return teach(self.llm, self.config, exercises, gains, rng, progress)

    # --- choosing by (10), and the small model

    def _choose(self, samples: Sequence[Sample], reward: Tensor, labels: Tensor) -> list[int]:
        vectors = self._encoder.encode(
            [sample.text for sample in samples], convert_to_numpy=True, show_progress_bar=False
        )
        matrix = torch.from_numpy(np.asarray(vectors, np.float32))
        score = crosslm.scores(reward, matrix)
        if self.stable:
            keep, classes = self.config.keep, len(self.labels)
            return crosslm.select_balanced(score, reward, labels, matrix, keep, classes)
        return crosslm.select(score, self.config.keep)

    def _train_slm(
        self, slm: Slm, kept: Sequence[Sample], number: int
    ) -> tuple[dict[str, NDArray[np.float32]] | None, str | None]:
        """The candidate and None, or None and why there is none. `slm` is left as it came."""
        if not kept:
            return None, "no text was kept, so there is no candidate"
        rows = Rows(
            tuple(f"synthetic-{number}-{j}" for j in range(len(kept))),
            tuple(sample.text for sample in kept),
            np.array([sample.label for sample in kept], np.int64),
        )
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
                label_smoothing=LABEL_SMOOTHING if self.stable else 0.0,
            )
            return slm.state(), None
        except SecureflError as error:
            return None, str(error)
        finally:
            slm.load_state(before)

    def _describe(self, samples: Sequence[Sample], reward: Tensor, kept: Sequence[int]) -> dict[str, Any]:
        words = [sample.text.lower().split() for sample in samples]
        made, chosen = Counter(s.label for s in samples), Counter(samples[j].label for j in kept)
        # A spread over the arrival rather than its beginning, which in stable mode is one label.
        shown = np.unique(np.linspace(0, len(samples) - 1, min(SAMPLES, len(samples))).round().astype(int))
        return {
            "kept": len(kept),
            "per_class": {name: {"usable": made[i], "kept": chosen[i]} for i, name in enumerate(self.labels)},
            "mean_reward": float(reward.mean()),
            "distinct_1": crosslm.distinct(words, 1),
            "distinct_2": crosslm.distinct(words, 2),
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

    # --- evaluation

    def label_probabilities(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(1): p(y|x) proportional to P(V(y) | M(x)), shape (n, C).

        M(x) is the first 64 tokens of x followed by `READING`.
        """
        rows = [[*self.llm.encode(text, READ_TOKENS), *self._reading] for text in texts]
        shares: NDArray[np.float32] = self.llm.answer_log_probs(rows, self._answers).softmax(1).numpy()
        return shares

    def nlu_accuracy(self, texts: Sequence[str], labels: Sequence[int] | NDArray[np.int64]) -> float:
        """Share of texts whose likeliest label by (1) is theirs; NaN without texts."""
        if not texts:
            return math.nan
        return float((self.label_probabilities(texts).argmax(1) == np.asarray(labels)).mean())

    def perplexity(self, texts: Sequence[str], *, original: bool = False) -> float:
        """Of a token, over the first 64 tokens of each text; `original` is without what was learned."""
        return self.llm.perplexity(texts, limit=READ_TOKENS, original=original)

    def nlg_accuracy(self, slms: Sequence[Slm], samples: Sequence[Sample] | None = None) -> float:
        """Mean over `slms` of the share of generated texts that they label as asked; NaN without any.

        samples: default `evaluate_rows` new texts of the language model as it is now, always the same draw.
        The small models that gave the rewards are lenient judges; a held-out one says more.
        """
        if samples is None:
            samples, _ = self.synthesise(self.config.evaluate_rows, self._stream(_JUDGED))
        if not samples or not slms:
            return math.nan
        texts, labels = [sample.text for sample in samples], np.array([sample.label for sample in samples])
        return float(np.mean([(probabilities(slm, texts).argmax(1) == labels).mean() for slm in slms]))
