"""Attack 10: which text is behind a pooled vector, for an outsider who was taught nothing of this encoder?

A public causal language model proposes how a text may go on: some of what it likes, and of what it likes the
tokens whose own vectors have most of what is still lacking. The encoder says of every beginning how near its
vector is to the target, and the nearest are kept: a beam search whose score is that cosine plus a little of
what the language model thinks of the text (after Zhang, Morris and Shmatikov, "Universal zero-shot embedding
inversion", 2025). Every beginning is a text too, so the best one seen at any length is the answer. The
encoder is a black box here.

Measured on 24 single MiniLM vectors of film reviews with SmolLM2-135M (examples/inversion_study.py, intervals
of 95 %): ROUGE-L .13 [.11, .16] where a random review has .07, at a cosine of .67; token F1 .22 [.19, .26],
more than a random review's .14 and less than the .29 of as many of the most frequent tokens. A larger search
reads more: six beams of twelve proposals that look at 256 tokens took one target to a cosine of .90.

This room reads no weights but the language model's; it touches no files and knows no rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from attacks.adversary import NotEnough
from attacks.membership import Vectors, check_vectors
from securefl.errors import SecureflError

Encode = Callable[[Sequence[str]], NDArray[Any]]

# Beams that one beam may leave to the next step, so that they do not all end up as one text.
_CHILDREN = 3
_PATIENCE = 6


@dataclass(frozen=True)
class Effort:
    """How far to search.

    beams are kept of beams x proposals candidates at each of at most `steps` tokens. top_p: nucleus that the
    proposals are drawn from. looked_at: of what the language model likes best after a beam, tokens that are
    also looked at for what they mean. weight: of its mean log-probability of a token in the score.
    """

    beams: int = 4
    proposals: int = 8
    steps: int = 20
    top_p: float = 0.98
    looked_at: int = 48
    weight: float = 0.02

    def __post_init__(self) -> None:
        least = min(self.beams, self.proposals, self.steps, self.looked_at)
        if least < 1 or not 0 < self.top_p <= 1 or self.weight < 0:
            raise SecureflError(
                "a beam search needs at least one beam, proposal, step and token to look at, and a top_p in "
                "(0, 1]"
            )


@dataclass(frozen=True)
class Found:
    """The best texts of one target, the nearest first, their cosines to it, and how many were encoded."""

    texts: tuple[str, ...]
    cosines: tuple[float, ...]
    encoded: int


class Proposer:
    """A causal language model that says how texts may go on.

    prompt: read before every text and no part of it; empty: the tokenizer's own beginning or end of text.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str = "") -> None:
        self._model, self._tokenizer = model, tokenizer
        ids = tokenizer(prompt).input_ids if prompt else []
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if not ids and start is None:
            raise SecureflError("the language model has no token that begins a text; give a prompt")
        self._head: list[int] = ids or [start]
        takes = inspect.signature(model.forward).parameters
        # transformers renamed the argument within version 5.
        self._name = "cache" if "cache" in takes else "past_key_values"

    @cached_property
    def _stops(self) -> Tensor:
        """Ids that end a text or begin a new line: none of them is part of a text."""
        pieces = self._tokenizer.batch_decode([[i] for i in range(len(self._tokenizer))])
        ends = {i for i, piece in enumerate(pieces) if "\n" in piece or not piece}
        return torch.tensor(sorted(ends | set(self._tokenizer.all_special_ids)))

    def text(self, ids: Sequence[int]) -> str:
        written: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return written.strip()

    def begin(self) -> tuple[Tensor, DynamicCache]:
        """(1, V) log-probabilities of a text's first token, and the cache to go on from."""
        cache = DynamicCache(config=self._model.config)
        return self._read(torch.tensor([self._head]), cache), cache

    def write(self, number: int, tokens: int, rng: np.random.Generator, top_p: float = 0.98) -> list[str]:
        """`number` texts of up to `tokens` tokens about anything: what vectors of this encoder have in common
        anyway is seen on them."""
        ids: list[list[int]] = [[] for _ in range(number)]
        with torch.inference_mode():
            log_probs, cache = self.begin()
            log_probs = log_probs.expand(number, -1)
            for step in range(tokens):
                for own, row in zip(ids, log_probs, strict=True):
                    own += _nucleus(row, 1, top_p, rng)
                if step < tokens - 1:
                    parents = range(number) if step else [0] * number
                    log_probs = self.go_on([own[-1] for own in ids], list(parents), cache)
        return [self.text(own) for own in ids]

    def go_on(self, last: Sequence[int], parents: Sequence[int], cache: DynamicCache) -> Tensor:
        """(B, V) log-probabilities after B texts, each its parent in the cache and one more token."""
        cache.batch_select_indices(torch.tensor(parents))
        return self._read(torch.tensor(last)[:, None], cache)

    def _read(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        given: dict[str, Any] = {self._name: cache}
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
        logits: Tensor = output.logits[:, -1].float().index_fill(1, self._stops, -torch.inf)
        return logits.log_softmax(-1)


def _nucleus(log_probs: Tensor, number: int, top_p: float, rng: np.random.Generator) -> list[int]:
    """Up to `number` ids of one row (V,), drawn without repetition from the nucleus (the Gumbel trick)."""
    ordered, ids = log_probs.sort(descending=True)
    size = int((ordered.exp().cumsum(0) < top_p).sum()) + 1
    size = min(size, int(torch.isfinite(ordered).sum()))
    drawn = ordered[:size].double().numpy() + rng.gumbel(size=size)
    return [int(ids[i]) for i in np.argsort(-drawn)[:number]]


@dataclass(frozen=True)
class _Beam:
    """One beginning: its ids, their summed log-probability, its cosine, its score, its parent's place and
    what its unit vector lacks of the target's."""

    ids: tuple[int, ...]
    log_prob: float
    cosine: float
    score: float
    parent: int
    lacks: Vectors


class Box:
    """The encoder as an outsider can ask it, and the language model whose texts it is asked about.

    encode: texts to vectors (n, d). centre: (d,) from which cosines are seen, the mean vector of any text
    (`centre_of`); 0 where it is not known. asked: texts so far. Vectors of single tokens are kept, so one box
    is to serve all targets of an encoder.
    """

    def __init__(self, encode: Encode, proposer: Proposer, centre: Vectors | None = None) -> None:
        self.proposer, self.asked = proposer, 0
        self._encode, self._centre = encode, centre
        self._words: dict[int, NDArray[np.float32]] = {}

    def aim(self, target: Vectors) -> Vectors:
        """(d,) unit vector of a target (d,). Raises SecureflError where it is not one finite vector."""
        vector = np.asarray(target, np.float64)
        if vector.ndim != 1 or not np.isfinite(vector).all() or not vector.any():
            raise SecureflError(
                "the target of an inversion is not one finite vector, so it would mean nothing"
            )
        return np.asarray(self._turned(vector[None])[0], np.float64)

    def ask(self, texts: Sequence[str], width: int) -> Vectors:
        """(n, d) unit vectors. Raises SecureflError for an answer that is not finite, or of another width."""
        rows = np.asarray(self._encode(texts), np.float64)
        if rows.shape != (len(texts), width) or not np.isfinite(rows).all():
            raise SecureflError("the encoder gives something else than one finite vector for every text")
        self.asked += len(texts)
        return self._turned(rows)

    def _turned(self, rows: Vectors) -> Vectors:
        moved = rows if self._centre is None else rows - self._centre
        return np.asarray(moved / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-30), np.float64)

    def words(self, ids: Sequence[int], width: int) -> NDArray[np.float32]:
        """(n, d) unit vectors of tokens alone."""
        new = [i for i in ids if i not in self._words]
        if new:
            texts = [self.proposer.text([i]) for i in new]
            self._words.update(zip(new, self.ask(texts, width).astype(np.float32), strict=True))
        return np.asarray(np.stack([self._words[i] for i in ids]), np.float32)


def _fitting(log_probs: Tensor, number: int, beam: _Beam, box: Box, effort: Effort) -> list[int]:
    """Of the likeliest ids of a row (V,) the `number` whose vectors alone have most of what a beam lacks."""
    top = log_probs.topk(min(effort.looked_at, int(torch.isfinite(log_probs).sum())))
    ids = [int(i) for i in top.indices]
    promise = box.words(ids, len(beam.lacks)) @ beam.lacks + effort.weight * top.values.double().numpy()
    return [ids[i] for i in np.argsort(-promise, kind="stable")[:number]]


def search(
    box: Box, target: Vectors, rng: np.random.Generator, *, effort: Effort = Effort(), keep: int = 4
) -> Found:
    """Texts whose vectors are near `target` (d,), written by a language model that never saw it.

    keep: how many of the best texts to return. Raises SecureflError for vectors that are not finite or of
    another width.
    """
    aim, proposer, before = box.aim(target), box.proposer, box.asked
    best: dict[str, _Beam] = {}
    stalled, top = 0, -math.inf
    with torch.inference_mode():
        log_probs, cache = proposer.begin()
        beams = [_Beam((), 0.0, -1.0, -math.inf, 0, aim)]
        for step in range(effort.steps):
            # The first token has one beginning only, and everything after depends on it.
            number = effort.proposals * (effort.beams if step == 0 else 1)
            options = [
                (place, token, beam.log_prob + float(log_probs[place, token]))
                for place, beam in enumerate(beams)
                for token in dict.fromkeys(
                    _nucleus(log_probs[place], number - number // 2, effort.top_p, rng)
                    + _fitting(log_probs[place], number // 2, beam, box, effort)
                )
            ]
            written = [proposer.text((*beams[place].ids, token)) for place, token, _ in options]
            vectors = box.ask(written, len(aim))
            made = [
                _Beam(
                    (*beams[place].ids, token),
                    total,
                    cosine,
                    cosine + effort.weight * total / (step + 1),
                    place,
                    aim - cosine * vector,
                )
                for (place, token, total), cosine, vector in zip(
                    options, (vectors @ aim).tolist(), vectors, strict=True
                )
            ]
            beams = _kept(made, written, effort.beams)
            if not beams:
                break
            for text, beam in zip(written, made, strict=True):
                if text and (text not in best or beam.score > best[text].score):
                    best[text] = beam
            best = dict(sorted(best.items(), key=lambda item: -item[1].score)[: max(keep, effort.beams)])
            reached = max(beam.score for beam in best.values()) if best else -math.inf
            stalled = 0 if reached > top + 1e-4 else stalled + 1
            top = max(top, reached)
            if stalled >= _PATIENCE or step == effort.steps - 1:
                break
            log_probs = proposer.go_on([b.ids[-1] for b in beams], [b.parent for b in beams], cache)
    ranked = sorted(best.items(), key=lambda item: -item[1].cosine)[:keep]
    return Found(tuple(t for t, _ in ranked), tuple(b.cosine for _, b in ranked), box.asked - before)


def _kept(made: Sequence[_Beam], texts: Sequence[str], number: int) -> list[_Beam]:
    """The best beams, no two of the same text, and `_CHILDREN` at most of one parent where it has peers."""
    order = sorted(range(len(made)), key=lambda i: -made[i].score)
    chosen: list[_Beam] = []
    seen: set[str] = set()
    children: dict[int, int] = {}
    parents = len({beam.parent for beam in made})
    for i in order:
        beam = made[i]
        full = parents > 1 and children.get(beam.parent, 0) >= _CHILDREN
        if texts[i] in seen or full:
            continue
        seen.add(texts[i])
        children[beam.parent] = children.get(beam.parent, 0) + 1
        chosen.append(beam)
        if len(chosen) == number:
            break
    return chosen


@dataclass(frozen=True)
class TextScores:
    """rouge_l: (n,) F-measure of the longest common subsequence; bleu: (n,) of a sentence, 0 to 1."""

    rouge_l: Vectors
    bleu: Vectors


def text_scores(guesses: Sequence[str], truths: Sequence[str]) -> TextScores:
    """Compare n guessed texts with n true ones (rouge-score; sacrebleu). Raises NotEnough without any."""
    if len(guesses) != len(truths):
        raise SecureflError(f"{len(guesses)} texts to compare with {len(truths)}")
    if not truths:
        raise NotEnough("there is no text to compare with")
    rouge, bleu = RougeScorer(["rougeL"]), BLEU(effective_order=True)
    pairs = list(zip(guesses, truths, strict=True))
    return TextScores(
        np.array([rouge.score(truth, guess)["rougeL"].fmeasure for guess, truth in pairs], np.float64),
        np.array([bleu.sentence_score(guess, [truth]).score / 100 for guess, truth in pairs], np.float64),
    )


def best_scores(guesses: Sequence[str], rows: Sequence[Sequence[str]]) -> TextScores:
    """Each guess against the one of its group of texts that has the largest ROUGE-L with it."""
    best = []
    for guess, group in zip(guesses, rows, strict=True):
        scores = text_scores([guess] * len(group), list(group))
        at = int(scores.rouge_l.argmax())
        best.append((scores.rouge_l[at], scores.bleu[at]))
    table = np.array(best, np.float64).reshape(-1, 2)
    return TextScores(table[:, 0], table[:, 1])


def acquainted(
    encode: Encode, proposer: Proposer, rng: np.random.Generator, *, texts: int = 32, tokens: int = 12
) -> Box:
    """A box that sees cosines from the mean of what the encoder gives for texts about anything: as many, of
    so many tokens, that the language model writes."""
    return Box(encode, proposer, centre_of(encode(proposer.write(texts, tokens, rng))))


def centre_of(vectors: NDArray[Any]) -> Vectors:
    """(d,) the mean of the vectors of some texts, checked; what an outsider gets by encoding any text."""
    return np.asarray(check_vectors(vectors, "the texts that the outsider encoded").mean(0), np.float64)
