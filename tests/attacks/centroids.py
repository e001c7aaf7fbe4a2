"""Embedding-layer centroids of made-up texts under a tiny encoder, for the tests of attack 2."""

from __future__ import annotations

import numpy as np

from attacks import dictionary, token_scores, tokens
from securefl.methods.fedkc import compose
from securefl.release import GaussianSums, NonPrivate
from securefl.slm import Slm
from securefl.training import embed
from tests import tiny

LENGTH = 10
PLAIN = NonPrivate(reason="a test")


def texts_of(rows: int, seed: int, ragged: bool = True) -> list[str]:
    made = [text for text, _ in tiny.make_texts(rows, seed=seed, length=8)]
    lengths = np.random.default_rng(seed).integers(2, 9, rows) if ragged else [8] * rows
    return [" ".join(text.split()[:n]) for text, n in zip(made, lengths, strict=True)]


def noisy(deviation: float) -> GaussianSums:
    """A claim with `deviation` on each number of a sum and a clip that cuts nothing."""
    return GaussianSums(
        epsilon=1.0, delta=1e-5, mu=1.0, clip=1e4, noise_multiplier=deviation / 1e4, count_multiplier=1.0,
        prediction_multiplier=1.0, generator="test", simulated=True,
    )  # fmt: skip


def exact_target(slm: Slm, texts: list[str], k: int) -> tokens.Target:
    vectors, mask = embed(slm, texts, 0)
    means, _ = compose(vectors, mask, np.full((len(texts), 2), 0.5), np.arange(len(texts)) // k, 1)
    assert means.mask is not None
    return tokens.Target(means.vectors, means.mask, means.sizes, PLAIN)


def noisy_target(slm: Slm, texts: list[str], k: int, deviation: float, seed: int = 9) -> tokens.Target:
    vectors, _ = embed(slm, texts, 0)
    q = len(texts) // k
    sums = vectors.reshape(q, k, *vectors.shape[1:]).sum(1)
    sums = sums + np.random.default_rng(seed).normal(0, deviation, sums.shape)
    return tokens.Target(
        (sums / k).astype(np.float32), np.ones((q, LENGTH), np.float32), np.full(q, k, np.float32),
        noisy(deviation),
    )  # fmt: skip


def truth_of(slm: Slm, texts: list[str], k: int) -> list[list[dictionary.Ids]]:
    ids = dictionary.token_ids(slm, texts)
    return [token_scores.by_position(ids[start : start + k], LENGTH) for start in range(0, len(ids), k)]


def prior_of(slm: Slm, auxiliary: list[str]) -> dictionary.Prior:
    return dictionary.fit_prior(dictionary.token_ids(slm, auxiliary), LENGTH, dictionary.vocabulary_size(slm))
