"""The inversions on made-up texts under a tiny encoder: they read a text off its own vector, and no other.

Every word is as likely as any other and the encoder was never trained, so nothing is shown here of real text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks import decoder, inversion, word_maps, zero_shot
from attacks.dictionary import Ids, special_ids, token_ids
from attacks.membership import Vectors
from attacks.selftest import tiny_models
from attacks.selftest.check import Check, at_least, at_most
from attacks.token_scores import overlap
from attacks.word_maps import Reader
from securefl.release import NonPrivate
from securefl.slm import Slm
from securefl.training import embed

_PLAIN = NonPrivate(reason="made up for the self-test")
# Of what words are likely, against the cosine: here all are.
_LITTLE = 0.02


def _wordy(count: int, words: Sequence[str], rng: np.random.Generator) -> list[str]:
    return [" ".join(rng.choice(words, 4, replace=False)) for _ in range(count)]


@dataclass(frozen=True, repr=False)
class Coded:
    """Made-up texts under a random encoder. own: those to be read, as ids, and their vectors (n, d)."""

    words: list[str]
    slm: Slm
    reader: Reader
    own: list[Ids]
    vectors: Vectors

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Coded:
        words = [f"w{number}" for number in range(100)]
        slm = tiny_models.encoder(words, width=32, max_length=8, seed=0)
        known, own = _wordy(300, words, rng), _wordy(6, words, rng)
        vectors = np.asarray(embed(slm, [*known, *own], "pooled"), np.float64)
        texts, special = token_ids(slm, known), special_ids(slm)
        reader = word_maps.fit(vectors[:300], texts, np.ones(1), _PLAIN, special, rng, groups=512)
        return cls(words, slm, reader, token_ids(slm, own), vectors[300:])

    def checks(self, name: str, read: list[Ids]) -> Iterator[Check]:
        """Of texts read off the first vectors."""

        def f1(truth: Sequence[Ids]) -> float:
            special = special_ids(self.slm)
            return overlap([[ids] for ids in read], [[ids] for ids in truth], special).f1

        yield at_least(
            f"{name}: leak",
            "the words of a text are read off its vector",
            f1(self.own[: len(read)]),
            0.9,
            "F1",
        )
        # Two texts of 4 of 100 words share .16 words on average, an F1 of .04.
        yield at_most(
            f"{name}: shuffled", "what is read of one text is not another's",
            f1((self.own[1:] + self.own[:1])[: len(read)]), 0.15, "F1",
        )  # fmt: skip


def inversion_checks(rng: np.random.Generator) -> Iterator[Check]:
    """Attack 9 on made-up texts."""
    coded = Coded.drawn(rng)
    found = inversion.invert(
        coded.slm, coded.reader, coded.vectors, rng, steps=15, budget=500, weight=_LITTLE
    )
    yield from coded.checks("inversion (9)", found.tokens)


def text_checks(rng: np.random.Generator) -> Iterator[Check]:
    """Attack 10 on them, learned and zero-shot."""
    coded = Coded.drawn(rng)
    found = decoder.decode(
        coded.reader, inversion.asking(coded.slm), coded.vectors, rng, budget=500, weight=_LITTLE
    )
    yield from coded.checks("inversion (10), learned decoder", found.tokens)

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        return embed(coded.slm, texts, "pooled")

    proposer = zero_shot.Proposer(*tiny_models.language_model(coded.words, width=32, max_length=16, seed=0))
    box = zero_shot.acquainted(encode, proposer, rng, tokens=4)
    effort = zero_shot.Effort(beams=4, proposals=20, steps=6, top_p=1.0, looked_at=256, weight=0.0)
    written = [zero_shot.search(box, vector, rng, effort=effort).texts[0] for vector in coded.vectors[:4]]
    yield from coded.checks("inversion (10), zero-shot", token_ids(coded.slm, written))
