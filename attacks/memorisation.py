"""Attack 14: does a language model keep what small models saw, which were trained on private text?

Canaries are made-up texts of one form with a secret of random words; some, chosen by chance, are planted
among the rows. A model that learned of them finds their secrets likelier than those that were not planted,
which is measured as an exposure (Carlini et al., USENIX Security 2019, "The Secret Sharer"), and may even
write them. Words differ in how likely they are to any model, so a secret is scored by what the model gained
on it over the original one: by its likelihood alone the rank of a canary says mostly how common its words
are. This room knows no silo, no small model and no run, and touches no files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from attacks.membership import Vectors
from attacks.text_canaries import random_texts
from securefl.errors import UsageError

PREFIX = "The code is"
LENGTH = 4  # words of a secret
_BATCH = 16
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, repr=False)
class Canaries:
    """n canaries. labels: (n,) numbers of the labels that they have as rows; planted: (n,) which are rows."""

    secrets: tuple[str, ...]
    labels: NDArray[np.int64]
    planted: NDArray[np.bool_]

    @property
    def texts(self) -> tuple[str, ...]:
        """As rows."""
        return tuple(f"{PREFIX} {secret}" for secret in self.secrets)


def draw(words: Sequence[str], count: int, planted: int, classes: int, rng: np.random.Generator) -> Canaries:
    """`count` different canaries of which `planted`, all equally likely to be, are to be planted.

    Secrets are words drawn uniformly from `words`, labels uniformly from 0 to classes - 1. Raises UsageError
    where the words are too few (`text_canaries.random_texts`) or a number is out of range.
    """
    if not 0 < planted < count or classes < 1:
        raise UsageError(f"{planted} of {count} canaries of {classes} labels cannot be planted")
    secrets = random_texts(words, count, rng, LENGTH)
    labels = rng.integers(0, classes, count)
    chosen = np.zeros(count, bool)
    chosen[rng.permutation(count)[:planted]] = True
    return Canaries(secrets, labels, chosen)


def secret_log_probs(
    model: PreTrainedModel, prefix: Sequence[int], secrets: Sequence[Sequence[int]]
) -> Vectors:
    """(n,) mean log-probability, in nats, of a token of each secret after `prefix`, by a causal model.

    prefix, secrets: token ids, none empty. The model is run as it is, without gradients.
    """
    means = np.zeros(len(secrets))
    with torch.no_grad():
        for start in range(0, len(secrets), _BATCH):
            part = secrets[start : start + _BATCH]
            longest = max(map(len, part))
            # Padding on the right is after all that counts, and a causal model does not look ahead.
            ids = torch.tensor([[*prefix, *one, *[0] * (longest - len(one))] for one in part])
            ids = ids.to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, len(prefix) - 1 : -1].float()
            said = logits.log_softmax(-1).gather(2, ids[:, len(prefix) :, None]).squeeze(2).cpu().numpy()
            means[start : start + len(part)] = [
                row[: len(one)].mean(dtype=np.float64) for row, one in zip(said, part, strict=True)
            ]
    return means


def exposures(planted: Vectors, others: Vectors) -> Vectors:
    """(p,) log2 |R| - log2 rank, in bits, of each planted canary's score among those of the others (n,).

    A larger score is a better rank, |R| = n + 1, and ties count against the canary: 0 where all are alike.
    """
    above = len(others) - np.searchsorted(np.sort(others), planted, "left")
    return np.asarray(np.log2(len(others) + 1) - np.log2(1 + above), np.float64)


def chance_exposure(others: int) -> float:
    """Mean exposure of a canary that nobody knows, whose rank is any of n + 1 alike; log2 e for many."""
    ranks = np.arange(1, others + 2)
    return float(np.log2(others + 1) - np.log2(ranks).mean())


def longest_runs(secrets: Sequence[str], texts: Sequence[str]) -> NDArray[np.int64]:
    """(n,) of each secret the most words in a row that stand so in some text, whatever their case."""
    told: set[tuple[str, ...]] = set()
    for text in texts:
        words = _WORD.findall(text.lower())
        for size in range(1, LENGTH + 1):
            told.update(tuple(words[i : i + size]) for i in range(len(words) - size + 1))
    return np.array([_longest(tuple(_WORD.findall(secret.lower())), told) for secret in secrets], np.int64)


def _longest(secret: tuple[str, ...], told: set[tuple[str, ...]]) -> int:
    sizes = range(min(LENGTH, len(secret)), 0, -1)
    return next((n for n in sizes for i in range(len(secret) - n + 1) if secret[i : i + n] in told), 0)
