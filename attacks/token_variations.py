"""How much attack 2 reads where something is withheld, or better known, than `token_study` takes for granted.

Sizes withheld; rows of unequal weight; silos' centroids averaged by size; several noised rounds of the same
rows; a table that the silo trained; a causal language model to put texts together. Groups are drawn at random
and rows come one at a time, as there. Scores only: no text leaves this room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attacks import moved_table, token_rounds, token_sizes, tokens, weighted_tokens
from attacks.assembly import Scorer, assemble
from attacks.dictionary import Ids, Prior, end_ids, fit_prior, special_ids, token_ids, vocabulary_size
from attacks.token_scores import exact_texts
from attacks.token_study import draw, release, scores
from securefl.slm import Slm
from securefl.training import embed

Row = dict[str, Any]

ROUNDS: Final = 4
# Of a sum; at 16 rows about where one round stops being read.
_DEVIATION = 2.0
# Rows of the second silo for each row of the first.
_LARGER = 2


@dataclass(frozen=True, repr=False)
class Study:
    """What every variation is read from.

    trained: the encoder with a table that one of the silos trained further; None leaves that variation out.
    counts, model: put texts together by n-grams and by a causal language model; None leaves it out. largest:
    of the sizes tried.
    """

    slm: Slm
    texts: Sequence[str]
    auxiliary: Sequence[str]
    positions: int
    groups: int = 8
    trained: Slm | None = None
    counts: Scorer | None = None
    model: Scorer | None = None
    largest: int = 16

    def rows(
        self, seeds: Sequence[int], skip: Callable[[str, int, int], bool] = lambda *_: False
    ) -> Iterator[Row]:
        """A row for every variation, size and seed, save those that `skip(variation, k, seed)` names.

        A row: variation, k, seed, groups, what (which of its figures this is), recall, baseline (of the
        frequency prior), control (of as many other texts), and, where there are such, sizes_right, texts and
        exact_texts. Raises NotEnough where `texts` has less than two groups of k.
        """
        known = token_ids(self.slm, self.auxiliary)
        prior = fit_prior(known, self.positions, vocabulary_size(self.slm))
        ids = [one[: self.positions] for one in token_ids(self.slm, self.texts)]
        for name, (sizes, work) in VARIATIONS.items():
            if (name == _TABLE and self.trained is None) or (name == _MODEL and self.model is None):
                continue
            for k in (size for size in sizes if size <= self.largest):
                for seed in seeds:
                    if skip(name, k, seed):
                        continue
                    rng = np.random.default_rng([seed, k, 3])
                    members, others = draw(len(ids), k, self.groups, rng)
                    bench = _Bench(self, prior, ids, members, others, rng)
                    for what, row in list(work(bench, k)):  # all of a cell, or none of it
                        cell = {"variation": name, "k": k, "seed": seed, "groups": len(members)}
                        yield cell | {"what": what, **row}


@dataclass(frozen=True, repr=False)
class _Bench:
    """Groups (`members`, and `others` for the control) as a variation sees them."""

    study: Study
    prior: Prior
    ids: list[Ids]
    members: list[Ids]
    others: list[Ids]
    rng: np.random.Generator

    def target(self, members: Sequence[Ids], noise: float = 0.0, slm: Slm | None = None) -> tokens.Target:
        vectors, mask = self._vectors(members, slm)
        places = np.cumsum([0, *map(len, members)])
        local = [np.arange(*ends) for ends in itertools.pairwise(places)]
        return release(vectors, mask, local, noise, self.rng)

    def _vectors(
        self, members: Sequence[Ids], slm: Slm | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(n, S, d) of the members' rows, group after group, and their mask."""
        texts = [self.study.texts[row] for group in members for row in group]
        vectors, mask = embed(slm or self.study.slm, texts, 0)
        return vectors[:, : self.study.positions], mask[:, : self.study.positions]

    def read(self, target: tokens.Target) -> tokens.Recovered:
        return tokens.recover(self.study.slm, target, self.prior, self.study.auxiliary)

    def scored(
        self, target: tokens.Target, read: list[list[Ids]], members: Sequence[Ids] | None = None
    ) -> Row:
        members = self.members if members is None else members
        return scores(self.study.slm, target, self.prior, read, self.ids, members, self._as_many(members))

    def _as_many(self, members: Sequence[Ids]) -> list[Ids]:
        return [np.resize(other, len(own)) for own, other in zip(members, self.others, strict=False)]

    def weighted(self, weights: Sequence[NDArray[np.float64]]) -> weighted_tokens.WeightedTarget:
        """Weighted means: at each position over the rows that have it."""
        vectors, mask = self._vectors(self.members)
        means, masks, start = [], [], 0
        for one in weights:
            rows = slice(start, start + len(one))
            means.append(weighted_tokens.weighted_mean(vectors[rows], mask[rows], one))
            masks.append(mask[rows].max(0))
            start += len(one)
        # Known are the weights, not whose each is.
        return weighted_tokens.WeightedTarget(
            np.array(means, np.float32),
            np.array(masks, np.float32),
            [self.rng.permutation(one) for one in weights],
            [np.zeros(len(one), np.int64) for one in weights],
        )


_Found = Iterator[tuple[str, Row]]


def _sizes_withheld(bench: _Bench, k: int) -> _Found:
    target = bench.target(bench.members)
    blind = replace(target, sizes=np.ones(len(target.sizes), np.float32))
    study = bench.study
    found = token_sizes.estimate_sizes(study.slm, blind, bench.prior, study.auxiliary)
    row = bench.scored(target, bench.read(replace(blind, sizes=found.sizes)).tokens)
    yield "sizes estimated", row | {"sizes_right": float((found.sizes == k).mean())}


def _weights(bench: _Bench, k: int) -> _Found:
    drawn = [bench.rng.uniform(0.5, 1.5, k) for _ in bench.members]
    target = bench.weighted([one / one.sum() for one in drawn])
    slm = bench.study.slm
    read = weighted_tokens.recover_weighted(slm, target, bench.prior, bench.study.auxiliary)
    plain = bench.target(bench.members)
    row = bench.scored(plain, read.tokens())
    whole = sum(
        exact_texts([text[text >= 0] for text in texts], [bench.ids[i] for i in group], special_ids(slm))
        for texts, group in zip(read.texts, bench.members, strict=True)
    )
    yield "weights known", row | {"texts": k * len(bench.members), "exact_texts": whole}


def _by_size(bench: _Bench, _k: int) -> _Found:
    """Centroids of a silo with k rows and of one with twice as many, averaged by size."""
    members, step = bench.members, 1 + _LARGER
    used = len(members) // step * step
    first = [members[i] for i in range(0, used, step)]
    second = [np.concatenate(members[i + 1 : i + step]) for i in range(0, used, step)]
    if not first:
        return
    target = weighted_tokens.merged([bench.target(first), bench.target(second)], "size")
    read = weighted_tokens.recover_weighted(bench.study.slm, target, bench.prior, bench.study.auxiliary)
    both = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    yield "two silos by size", bench.scored(bench.target(both), read.tokens(), both)


def _rounds(bench: _Bench, k: int) -> _Found:
    releases = [bench.target(bench.members, _DEVIATION / k) for _ in range(ROUNDS)]
    for count in (1, ROUNDS):
        target = token_rounds.average(releases[:count])
        yield f"rounds of noise {_DEVIATION:g}: {count}", bench.scored(target, bench.read(target).tokens)


def _table(bench: _Bench, _k: int) -> _Found:
    study = bench.study
    target = bench.target(bench.members, slm=study.trained)
    yield "public table as it is", bench.scored(target, bench.read(target).tokens)
    found = moved_table.recover_moved(study.slm, target, bench.prior, study.auxiliary)
    yield "public table, corrected", bench.scored(target, found.recovered.tokens)


def _language_model(bench: _Bench, k: int) -> _Found:
    study, slm = bench.study, bench.study.slm
    target = bench.target(bench.members)
    read = bench.read(target).tokens
    row, ends, special = bench.scored(target, read), end_ids(slm), special_ids(slm)
    for what, score in (("n-grams", study.counts), ("language model", study.model)):
        if score is not None:
            made = [assemble(tokens_of, ends, score) for tokens_of in read]
            whole = sum(
                exact_texts(texts, [bench.ids[i] for i in group], special)
                for texts, group in zip(made, bench.members, strict=True)
            )
            yield what, row | {"texts": k * len(bench.members), "exact_texts": whole}


_TABLE, _MODEL = "a table that was trained", "texts put together"
VARIATIONS: Final[dict[str, tuple[tuple[int, ...], Callable[[_Bench, int], _Found]]]] = {
    "sizes withheld": ((1, 2, 4, 8, 16), _sizes_withheld),
    "rows of unequal weight": ((2, 4, 8, 16), _weights),
    "silos averaged": ((2, 4), _by_size),
    "several rounds": ((8, 16), _rounds),
    _TABLE: ((1, 4, 8, 16), _table),
    _MODEL: ((2, 3, 4, 6), _language_model),
}
"""Sizes at which each variation is tried, and how it is read."""
