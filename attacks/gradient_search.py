"""Attack 11, second half: putting texts together from the tokens that a gradient gave away.

Of a candidate text every token's input to the second block must be in the span of that block's gradient. In
a decoder that input depends on the tokens before alone, so texts grow token by token (Petrov et al. 2024). In
an encoder it depends on all; but the distances fall with every token that is right, also where most of the
others are wrong. So many tokens are first sifted in random company, and texts then found by local search.
What is reported was checked token by token; how it was found does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attacks.adversary import NotEnough
from attacks.dictionary import Ids, vocabulary_size
from attacks.gradient_span import Found, OneStep, Reader, Span, room_of, span_of, tokens_in_span
from securefl.errors import SecureflError
from securefl.slm import Slm

# Texts that each token is tried in while sifting, and how many tokens of a position need no sifting.
_COMPANY = 8
_MANY = 128
_SWEEPS = 12
_SAME = 1e-4
EFFORT = 2_000_000
_REACH = 6


def recover(
    slm: Slm, update: OneStep, positions: int, rng: np.random.Generator, effort: int = EFFORT
) -> Found:
    """Read the tokens, and where the second block allows the texts, behind one step's gradient.

    positions: of the longest text, at most `slm.max_length`. effort: tokens that the search for an encoder's
    texts may put through the first block, some 10,000 a second on one core for MiniLM.
    `slm` has the weights that the step began with. Raises NotEnough where the gradient shows no span or no
    token is in it.
    """
    if not 1 <= positions <= slm.max_length:
        raise SecureflError(f"a text of {slm.name} has 1 to {slm.max_length} positions, not {positions}")
    training = slm.training
    slm.eval()
    try:
        return _recover(slm, update, positions, rng, effort)
    finally:
        slm.train(training)


def _recover(slm: Slm, update: OneStep, positions: int, rng: np.random.Generator, effort: int) -> Found:
    reader, vocabulary = Reader(slm), vocabulary_size(slm)
    gradient, noise = reader.gradient(update, 0)
    room = room_of(reader, vocabulary, positions)
    sets = tokens_in_span(reader, span_of(gradient, room, noise), vocabulary, positions)
    if sum(map(len, sets)) == 0:
        raise NotEnough(
            "no token of the vocabulary is in the span of the gradient: it was made with dropout, with other "
            "weights, or is noise"
        )
    if sum(map(len, sets)) > vocabulary * positions // 2:
        raise NotEnough("most of the vocabulary is in the span of the gradient, so it tells no token apart")
    if len(reader.names) < 2:
        return Found(sets, [], None)
    gradient, noise = reader.gradient(update, 1)
    try:
        span = span_of(gradient, gradient.shape[1], noise)
    except NotEnough:
        return Found(sets, [], None)
    if reader.causal:
        texts = _grow(reader, span, sets)
    else:
        texts = _Search(slm, reader, span, sets, rng, effort).texts()
    return Found(sets, texts, span.rank)


def _grow(reader: Reader, span: Span, sets: Sequence[Ids]) -> list[Ids]:
    """All texts whose every token is in the span, of a causal model; those that begin another drop out.

    Without positions in the tokens a text of one repeated token is the same vector all along, which says
    nothing of its length: such repetitions are not grown.
    """
    prefixes = [np.zeros(0, np.int64)]
    ended: list[Ids] = []
    for ids in sets:
        if not prefixes or not len(ids):
            break
        longer = np.concatenate([np.tile(p, (len(ids), 1)) for p in prefixes])
        tried = np.concatenate([longer, np.tile(ids, len(prefixes))[:, None]], axis=1)
        inputs = reader.inputs(1, torch.from_numpy(tried))[:, -2:]
        new = (inputs[:, -1] - inputs[:, 0]).norm(dim=-1) > _SAME * inputs[:, -1].norm(dim=-1)
        kept = ((span.excess(inputs[:, -1]) <= 1) & (new | (inputs.shape[1] < 2))).numpy()
        if kept.sum() > 4 * span.rank:  # a span that takes everything would grow without end
            raise NotEnough("the second block's span takes more prefixes than it has dimensions")
        alive = kept.reshape(len(prefixes), len(ids)).any(1)
        ended += [p for p, goes_on in zip(prefixes, alive, strict=True) if not goes_on and len(p)]
        prefixes = list(tried[kept])
    return ended + [p for p in prefixes if len(p)]


@dataclass(frozen=True)
class _State:
    """A candidate text (n,), the mean distance of its tokens, and whether all are in the span."""

    ids: Ids
    distance: float
    exact: bool


class _Search:
    """Texts of an encoder from the sets of tokens at each position."""

    def __init__(
        self,
        slm: Slm,
        reader: Reader,
        span: Span,
        sets: Sequence[Ids],
        rng: np.random.Generator,
        effort: int,
    ) -> None:
        self._left = effort
        self._reader, self._span, self._rng = reader, span, rng
        tokenizer = slm.tokenizer
        ends = [i for i in (tokenizer.sep_token_id, tokenizer.eos_token_id) if i is not None]
        frame = [*ends, *(i for i in (tokenizer.cls_token_id, tokenizer.pad_token_id) if i is not None)]
        self._first = sets[0]
        self._inner = [ids[~np.isin(ids, frame)] for ids in sets]
        # A text is a start, inner tokens and an end; without end tokens any inner token ends it.
        self._ends = [
            ids[np.isin(ids, ends)] if ends else inner for ids, inner in zip(sets, self._inner, strict=True)
        ]
        filled = np.cumprod([1, *(len(ids) > 0 for ids in self._inner[1:])])
        self._lengths = [n for n in range(2, len(sets) + 1) if len(self._ends[n - 1]) and filled[n - 2]]
        self._rank = span.rank
        self._means: list[NDArray[np.float64]] = [np.zeros(len(ids)) for ids in self._inner]
        self._end_means = np.zeros(len(sets) + 1)

    def texts(self) -> list[Ids]:
        """Texts that are in the span, until they account for its rank or the effort is spent."""
        found: list[Ids] = []
        if not self._lengths or not len(self._first) or self._left <= 0:
            return found
        self._sift()
        attempt = 0
        while self._left > 0 and sum(map(len, found)) < self._rank:
            begin = self._start(found, attempt)
            if begin is None:
                break
            state = self._descend(*begin)
            if state.exact and not any(np.array_equal(state.ids, text) for text in found):
                found.append(state.ids)
            attempt += 1
        return found

    def _distances(self, texts: NDArray[np.int64]) -> NDArray[np.float64]:
        """(m, n) distances of the tokens of texts (m, n) to the second block's span."""
        # At least one, so that what costs nothing ends too.
        self._left -= max(1, texts.size)
        return np.asarray(self._span.distances(self._reader.inputs(1, torch.from_numpy(texts))), np.float64)

    def _sift(self) -> None:
        """Halve the tokens of each position by their mean distance in random texts, while they are many."""
        self._average()
        while max(len(ids) for ids in self._inner) > _MANY:
            for at, means in enumerate(self._means):
                keep = np.sort(np.argsort(means)[: max(_MANY, len(means) // 2)])
                self._inner[at], self._means[at] = self._inner[at][keep], means[keep]
            self._average()

    def _average(self) -> None:
        """Mean distance of every token at its position, and of an end at every length, in random texts."""
        most = max(len(ids) for ids in self._inner)
        sums = [np.zeros(len(ids)) for ids in self._inner]
        counts = [np.zeros(len(ids)) for ids in self._inner]
        each = max(4, -(-_COMPANY * most // len(self._lengths)))
        for n in self._lengths:
            inner = self._inner[1 : n - 1]
            # Every token about equally often, in random order.
            places = [
                self._rng.permutation(np.resize(self._rng.permutation(len(ids)), each)) for ids in inner
            ]
            columns = [self._rng.choice(self._first, each)]
            columns += [ids[place] for ids, place in zip(inner, places, strict=True)]
            columns.append(self._rng.choice(self._ends[n - 1], each))
            distances = self._distances(np.stack(columns, axis=1))
            for at, place in enumerate(places, 1):
                np.add.at(sums[at], place, distances[:, at])
                np.add.at(counts[at], place, 1)
            self._end_means[n] = distances[:, -1].mean()
        self._means = [
            np.where(count > 0, total / np.maximum(count, 1), np.inf)
            for total, count in zip(sums, counts, strict=True)
        ]

    def _start(self, found: list[Ids], attempt: int) -> tuple[Ids, int] | None:
        """A first guess and how often to kick it, or None where no length is left.

        Lengths take turns, those with the nearest end tokens first, with more patience every time round. No
        text is longer than what the rank leaves. Tokens that no found text has at a position come first.
        """
        left = self._rank - sum(map(len, found))
        lengths = sorted((n for n in self._lengths if n <= left), key=lambda n: self._end_means[n])
        if not lengths:
            return None
        n, turn = lengths[attempt % len(lengths)], attempt // len(lengths)
        text = np.empty(n, np.int64)
        text[0], text[-1] = self._rng.choice(self._first), self._rng.choice(self._ends[n - 1])
        for at in range(1, n - 1):
            used = np.isin(self._inner[at], [text[at] for text in found if len(text) > at])
            order = self._means[at] + used + self._rng.exponential(0.02 * turn, len(used))
            text[at] = self._inner[at][order.argmin()]
        return text, 1 + 2 * turn

    def _descend(self, ids: Ids, kicks: int) -> _State:
        """Local search for the lowest mean distance: one token at a time, then a token moved past others;
        where both stop, the tokens that are farthest off are drawn again."""
        best = self._settle(self._state(ids[None]))
        for _ in range(kicks):
            if best.exact or self._left <= 0:
                break
            best = min(best, self._settle(self._kicked(best)), key=lambda one: one.distance)
        return best

    def _settle(self, state: _State) -> _State:
        for _ in range(_SWEEPS):
            before = state.distance
            for at in self._rng.permutation(np.arange(1, len(state.ids) - 1)):
                others = self._inner[at]
                if len(others) < 2 or state.exact or self._left <= 0:
                    continue
                tried = np.repeat(state.ids[None], len(others), axis=0)
                tried[:, at] = others
                state = min(state, self._state(tried), key=lambda one: one.distance)
            if state.distance > before * 0.99 and not state.exact:
                moved = self._moved(state.ids)
                if len(moved):
                    state = min(state, self._state(moved), key=lambda one: one.distance)
            if state.exact or state.distance > before * (1 - 1e-6):
                break
        return state

    def _moved(self, ids: Ids) -> NDArray[np.int64]:
        """All texts (m, n) with one token moved up to `_REACH` places, that the sets of tokens allow."""
        out = []
        for at in range(1, len(ids) - 1):
            for to in range(max(1, at - _REACH), min(len(ids) - 2, at + _REACH) + 1):
                low, high = min(at, to), max(at, to)
                if at == to:
                    continue
                other = np.insert(np.delete(ids, at), to, ids[at])
                if all(other[i] in self._inner[i] for i in range(low, high + 1)):
                    out.append(other)
        return np.array(out, np.int64).reshape(-1, len(ids))

    def _kicked(self, state: _State) -> _State:
        distances = self._distances(state.ids[None])[0]
        off = distances > self._rng.uniform(0.3, 0.8) * distances[1:-1].max()
        ids = state.ids.copy()
        for at in np.flatnonzero(off):
            if 0 < at < len(ids) - 1:
                ids[at] = self._rng.choice(self._inner[at])
        return self._state(ids[None])

    def _state(self, tried: NDArray[np.int64]) -> _State:
        """The best of texts (m, n)."""
        distances = self._distances(tried)
        best = int(distances.mean(1).argmin())
        ids = tried[best]
        near = distances[best].max() < 0.05
        exact = near and bool(
            (self._span.excess(self._reader.inputs(1, torch.from_numpy(ids[None]))) <= 1).all()
        )
        return _State(ids, float(distances[best].mean()), exact)
