"""The server's language model on a task: what it is asked for a label, the texts it writes, how it reads.

Source: Deng et al., arXiv 2312.05842; numbers in brackets are its equations. This room turns labels into
prompts and texts into answers; it knows no silo, no reward and no training but for what a text is to teach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from securefl._language_model import LanguageModel, Writer, Written
from securefl._llm_training import Exercise
from securefl._tables import shown
from securefl.crosslm_terms import SLOT, CrossLm
from securefl.errors import ConfigError
from securefl.slm import Slm
from securefl.training import probabilities

READ_TOKENS = 64  # of a text, when the language model reads it
# Texts that say nothing, by which (1) is calibrated.
_NOTHING = ("N/A", "...", "[MASK]")

# Streams of random numbers, told apart within a seed; the other numbers are the worker's.
_ADAPTER, _LABELS, _TEXTS, _JUDGED = 0, 1, 2, 5


def seed_of(*entropy: int) -> int:
    """A seed for one stream of random numbers: the run's seed, the stream, what is counted in it."""
    return int(np.random.SeedSequence(list(entropy)).generate_state(1)[0])


@dataclass(frozen=True)
class Sample:
    """A synthetic text x, the label y that it was written for, and its tokens as sampled."""

    text: str
    label: int
    written: Written


def _by_label(
    name: str, given: Mapping[str, str], labels: Sequence[str], default: Sequence[str]
) -> list[str]:
    unknown = sorted(set(given) - set(labels))
    if unknown:
        raise ConfigError(f"crosslm.{name}: {unknown[0]} is not a label; the labels are {', '.join(labels)}")
    if any(not given.get(label, "x").strip() for label in labels):
        raise ConfigError(f"crosslm.{name}: an entry is empty; give it text or leave it out")
    return [given.get(label, other) for label, other in zip(labels, default, strict=True)]


def _reading(template: str, words: Sequence[str]) -> tuple[str, list[str], str]:
    """What (1) asks after a text, each label's answer to it, and how M'(y) of (7) ends.

    M'(y) is what (1) asks, answered ("This text is about sport."), so that (7) practises what (1) measures.
    """
    before, end = template.split(SLOT)
    gap = before[len(before.rstrip()) :]
    return "\n" + before.rstrip(), [gap + word for word in words], end


def _writer(config: CrossLm, llm: LanguageModel) -> Writer:
    if config.backend == "torch":
        return llm
    from securefl._vllm import VllmWriter  # an extra

    return VllmWriter(llm)


class TaskModel:
    """The language model with the prompts, words and readings of a run's labels."""

    def __init__(self, config: CrossLm, labels: Sequence[str], seed: int) -> None:
        """Load the language model. Raises ModelError, ConfigError."""
        self.config = config
        self.labels = tuple(labels)
        self.seed = seed
        words = _by_label("verbalisers", config.verbalisers, labels, labels)
        for label, word in zip(labels, words, strict=True):
            if not any(map(str.isalpha, word)):
                raise ConfigError(
                    f"crosslm.verbalisers: {shown(label)} has no letter, so a prompt with it says nothing; "
                    'give the word that the language model is to write about, as in { "0" = "negative" }'
                )
        prompts = [config.prompt.replace(SLOT, word) for word in words]
        self._prompts = _by_label("prompts", config.prompts, labels, prompts)
        self.llm = LanguageModel(
            config.llm,
            rank=config.lora_rank if config.training == "lora" else None,
            seed=seed_of(seed, _ADAPTER, 0),
            device=config.device,
            chat=config.chat,
            layers=config.lora_layers,
        )
        self.writer: Writer = _writer(config, self.llm)
        question, answers, end = _reading(config.reading, words)
        self._reading = self.llm.encode_inner(question)
        self._answers = [self.llm.encode_inner(answer) for answer in answers]
        last = self.llm.encode_inner(end) if end else []
        self._sentences = [(*self._reading, *answer, *last) for answer in self._answers]

    def exercises(self, samples: Sequence[Sample]) -> list[Exercise]:
        """What texts are to teach: (5) after their prompts, (7) before the sentence of their label."""
        heads = [tuple(self.llm.prompt(prompt)) for prompt in self._prompts]
        return [
            Exercise(heads[s.label], s.written, (*self.llm.encode(s.text), *self._sentences[s.label]))
            for s in samples
        ]

    # --- writing: equations (2) and (3)

    def _draw_labels(self, count: int, seed: int) -> list[int]:
        """(2). Stable mode deals the labels out evenly: the same mean, no class without texts by chance."""
        rng = np.random.default_rng(seed)
        classes = len(self.labels)
        if not self.config.stable:
            drawn: list[int] = rng.integers(classes, size=count).tolist()
            return drawn
        rest = rng.choice(classes, count % classes, replace=False).tolist()
        return [*(label for label in range(classes) for _ in range(count // classes)), *rest]

    def synthesise(
        self, count: int, seed: int, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[list[Sample], int]:
        """(2) and (3): texts for drawn labels by the language model as it is now, and how many were dropped.

        Empty texts are dropped; as are those of fewer words than `min_words` and, in stable mode, repeats of
        an earlier text. The same seed and weights give the same texts.
        """
        labels = self._draw_labels(count, seed_of(seed, _LABELS))
        written = self.writer.write(
            [self._prompts[label] for label in labels],
            max_new_tokens=self.config.max_new_tokens,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            seed=seed_of(seed, _TEXTS),
            progress=progress,
        )
        samples: list[Sample] = []
        seen: set[str] = set()
        for label, text in zip(labels, written, strict=True):
            short = len(text.text.split()) < self.config.fewest_words
            if short or not text.tokens or (self.config.stable and text.text.lower() in seen):
                continue
            seen.add(text.text.lower())
            samples.append(Sample(text.text, label, text))
        return samples, count - len(samples)

    # --- evaluation

    def label_probabilities(self, texts: Sequence[str], *, calibrated: bool = False) -> NDArray[np.float32]:
        """(1): p(y|x) proportional to P(V(y) | M(x)), shape (n, C).

        M(x) is the first 64 tokens of x followed by what stands before the slot of `crosslm.reading`.
        calibrated: over P(V(y) | M(x0)) of texts x0 that say nothing, which takes out that some words are
        likely after any text (Zhao et al. 2021, "Calibrate before use").
        """

        def said(of: Sequence[str]) -> Tensor:
            rows = [[*self.llm.encode(text, READ_TOKENS), *self._reading] for text in of]
            return self.llm.answer_log_probs(rows, self._answers)

        logs = said(texts)
        if calibrated:
            logs = logs - said(_NOTHING).log_softmax(1).mean(0)
        shares: NDArray[np.float32] = logs.softmax(1).numpy()
        return shares

    def nlu_accuracy(
        self, texts: Sequence[str], labels: Sequence[int] | NDArray[np.int64], *, calibrated: bool = False
    ) -> float:
        """Share of texts whose likeliest label by (1) is theirs; NaN without texts."""
        if not texts:
            return math.nan
        said = self.label_probabilities(texts, calibrated=calibrated)
        return float((said.argmax(1) == np.asarray(labels)).mean())

    def perplexity(self, texts: Sequence[str], *, original: bool = False) -> float:
        """Of a token, over the first 64 tokens of each text; `original` is without what was learned."""
        return self.llm.perplexity(texts, limit=READ_TOKENS, original=original)

    def nlg_accuracy(self, slms: Sequence[Slm], samples: Sequence[Sample] | None = None) -> float:
        """Mean over `slms` of the share of generated texts that they label as asked; NaN without any.

        samples: default `evaluate_rows` new texts of the language model as it is now, always the same draw.
        The small models that gave the rewards are lenient judges; a held-out one says more.
        """
        if samples is None:
            samples, _ = self.synthesise(self.config.evaluate_rows, seed_of(self.seed, _JUDGED, 0))
        if not samples or not slms:
            return math.nan
        texts, labels = [sample.text for sample in samples], np.array([sample.label for sample in samples])
        return float(np.mean([(probabilities(slm, texts).argmax(1) == labels).mean() for slm in slms]))
