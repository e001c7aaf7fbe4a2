"""Attack 2, second half: from the tokens at each position to whole texts.

A centroid gives away which k tokens stand at each position, not which of them stand in one text. Language
does: texts grow position by position, and at every one the next k tokens are dealt to the k texts by the
assignment that a language model finds most likely. A few alternatives are kept (`beams`), made by exchanging
the continuations of two texts where that costs least, because a later word may settle an earlier doubt.

The language model is anything that scores the next token (`Scorer`): n-gram counts of other text (`NGrams`),
which need no model, or a causal language model (`CausalScorer`). A random deal is the baseline (`deal`).
This room touches no files; recovered texts are returned and nowhere written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attacks.dictionary import Ids
from securefl.errors import SecureflError

BEAMS = 4
_LOG_FLOOR = -1e6


class Scorer(Protocol):
    """(n, m) log-probability that each of m tokens follows each of n beginnings of texts."""

    def __call__(self, beginnings: Sequence[tuple[int, ...]], tokens: Ids) -> NDArray[np.float64]: ...


class NGrams:
    """Interpolated counts of auxiliary text: P_n(t | c) = (count(c t) + a P_(n-1)(t | c')) / (count(c) + a),
    c' being c without its first token, a = `strength`; P_0 is even over `vocabulary` ids.

    order: 2 for bigrams, 3 for trigrams.
    """

    def __init__(
        self, texts: Sequence[Ids], vocabulary: int, *, order: int = 3, strength: float = 1.0
    ) -> None:
        if order < 1 or vocabulary < 1 or strength <= 0:
            raise SecureflError(
                "an n-gram model has an order of at least 1, a vocabulary and a strength above 0"
            )
        self._order, self._vocabulary, self._strength = order, vocabulary, strength
        self._grams: Counter[tuple[int, ...]] = Counter()
        self._contexts: Counter[tuple[int, ...]] = Counter()
        for ids in texts:
            row = tuple(ids.tolist())
            for end in range(1, len(row) + 1):
                for width in range(1, min(order, end) + 1):
                    gram = row[end - width : end]
                    self._grams[gram] += 1
                    self._contexts[gram[:-1]] += 1

    def __call__(self, beginnings: Sequence[tuple[int, ...]], tokens: Ids) -> NDArray[np.float64]:
        known: dict[tuple[tuple[int, ...], int], float] = {}
        out = np.empty((len(beginnings), len(tokens)))
        for i, beginning in enumerate(beginnings):
            context = beginning[len(beginning) - min(len(beginning), self._order - 1) :]
            for j, token in enumerate(tokens.tolist()):
                if (context, token) not in known:
                    known[context, token] = float(np.log(self._probability(context, token)))
                out[i, j] = known[context, token]
        return out

    def _probability(self, context: tuple[int, ...], token: int) -> float:
        lower = self._probability(context[1:], token) if context else 1 / self._vocabulary
        counted = self._grams[(*context, token)] + self._strength * lower
        return counted / (self._contexts[context] + self._strength)


class CausalScorer:
    """A causal language model as `models.load_llm` gives it, on texts decoded from the encoder's tokens.

    decode: token ids of a beginning to text. A token's score is the log-probability of the text with it less
    that of the text without, each with a start token where the model has one, so that pieces of a word are
    read as the model would cut the word. special: ids that end a text; scored as the model's own end.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        decode: Callable[[Sequence[int]], str],
        special: frozenset[int],
        *,
        batch_size: int = 64,
    ) -> None:
        self._model, self._tokenizer, self._decode = model, tokenizer, decode
        self._special, self._batch = special, batch_size
        start = tokenizer.bos_token_id
        self._start: int = tokenizer.eos_token_id if start is None else start
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, beginnings: Sequence[tuple[int, ...]], tokens: Ids) -> NDArray[np.float64]:
        wanted = [one for b in beginnings for one in (b, *((*b, int(t)) for t in tokens))]
        self._read([one for one in dict.fromkeys(wanted) if one not in self._known])
        return np.array(
            [[self._known[(*b, int(t))] - self._known[b] for t in tokens] for b in beginnings]
        ).reshape(len(beginnings), len(tokens))

    def _read(self, texts: Sequence[tuple[int, ...]]) -> None:
        rows = [(text, self._encode(text)) for text in texts]
        rows.sort(key=lambda row: len(row[1]))
        for start in range(0, len(rows), self._batch):
            part = rows[start : start + self._batch]
            longest = max(len(ids) for _, ids in part)
            # Padding stands on the right, behind everything that is scored.
            ids = torch.tensor([row + [self._start] * (longest - len(row)) for _, row in part])
            with torch.inference_mode():
                logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
                scores = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(2)
            for (text, row), score in zip(part, scores, strict=True):
                self._known[text] = float(score[: len(row) - 1].sum())

    def _encode(self, text: tuple[int, ...]) -> list[int]:
        ended = bool(text) and text[-1] in self._special and len(text) > 1
        inner = self._decode([i for i in text if i not in self._special])
        ids: list[int] = self._tokenizer.encode(inner, add_special_tokens=False)
        return [self._start, *ids, *([self._start] if ended else [])]


@dataclass(frozen=True)
class _Hypothesis:
    """Texts so far, those that ended, and what their deal is worth."""

    texts: tuple[tuple[int, ...], ...]
    worth: float


def assemble(positions: Sequence[Ids], ends: Ids, score: Scorer, *, beams: int = BEAMS) -> list[Ids]:
    """Texts of one centroid from the tokens read at each position, those of the first being their beginnings.

    ends: ids after which a text has no further token. Where a position has more tokens than open texts (a
    misread count) the least likely are left out; where it has fewer, the texts that fit none of them end.
    Deterministic. Raises SecureflError where there are no tokens at the first position.
    """
    if not len(positions) or not len(positions[0]):
        raise SecureflError("there are no tokens at the first position to begin a text with")
    final = set(ends.tolist())
    kept = [_Hypothesis(tuple((token,) for token in sorted(positions[0].tolist())), 0.0)]
    for place, tokens in enumerate(positions[1:], 1):
        if not len(tokens):
            break
        grown: list[_Hypothesis] = []
        for one in kept:
            open_ = [i for i, text in enumerate(one.texts) if len(text) == place and text[-1] not in final]
            if open_:
                grown += _deals(one, open_, np.sort(tokens), score, beams)
        if not grown:
            break
        # The same texts in another order are the same hypothesis.
        best = {tuple(sorted(one.texts)): one for one in sorted(grown, key=lambda one: one.worth)}
        kept = sorted(best.values(), key=lambda one: -one.worth)[:beams]
    return [np.array(text, np.int64) for text in kept[0].texts]


def _deals(
    one: _Hypothesis, open_: Sequence[int], tokens: Ids, score: Scorer, beams: int
) -> list[_Hypothesis]:
    """The likeliest deal of tokens to the open texts, and the nearest others by one exchange."""
    distinct, where = np.unique(tokens, return_inverse=True)
    table = np.maximum(score([one.texts[i] for i in open_], distinct)[:, where], _LOG_FLOOR)
    rows, columns = linear_sum_assignment(table, maximize=True)
    worth = float(table[rows, columns].sum())
    deals = [(worth, columns)]
    for i in range(len(rows)):
        for j in range(i):
            if (
                tokens[columns[i]] == tokens[columns[j]]
                or one.texts[open_[rows[i]]] == one.texts[open_[rows[j]]]
            ):
                continue
            loss = (
                table[rows[i], columns[i]] + table[rows[j], columns[j]]
                - table[rows[i], columns[j]] - table[rows[j], columns[i]]
            )  # fmt: skip
            other = columns.copy()
            other[[i, j]] = columns[[j, i]]
            deals.append((worth - float(loss), other))
    deals.sort(key=lambda deal: -deal[0])
    out = []
    for value, dealt in deals[:beams]:
        texts = list(one.texts)
        for row, column in zip(rows.tolist(), dealt.tolist(), strict=True):
            texts[open_[row]] = (*texts[open_[row]], int(tokens[column]))
        out.append(_Hypothesis(tuple(texts), one.worth + value))
    return out


def deal(positions: Sequence[Ids], ends: Ids, rng: np.random.Generator) -> list[Ids]:
    """The baseline: as `assemble`, with tokens dealt to the open texts at random."""

    def even(beginnings: Sequence[tuple[int, ...]], tokens: Ids) -> NDArray[np.float64]:
        return rng.random((len(beginnings), len(tokens)))

    return assemble(positions, ends, even, beams=1)
