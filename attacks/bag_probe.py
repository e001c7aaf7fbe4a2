"""Attack 5: which tokens are in the texts behind a pooled centroid?

Linear probes, fitted on simulated releases (`attacks.simulated`): ridge regression from a centroid to the
presence of every token in its group, and the log-likelihood ratio of a Gaussian around each token's mean.
Penalty and threshold are chosen on simulated groups of auxiliary rows that the fit has not seen, and so is
whether to guess by the ridge alone or by a logistic regression over (group, token) pairs on both, the token's
frequency and, where it is given, the likeness to a text of that token alone. An infinite penalty is among the
choices, and with it the guess is the frequency prior: noise can make the probe useless but not worse.

Why both: on MiniLM vectors of film reviews the ridge alone has F1 .38 at n = 1 with 1,500 auxiliary rows and
.43 with 7,000, and both together .40 and .48 (prior .31 and .32); boosted trees over the same pairs .49.
At n = 5 and 20 with 1,500 rows it is .37 and .38 (prior .35 and .37). Most of what is missed are tokens of a
few rows: of those in at least 20 of 7,000 rows the ridge reads .51. Multi-label logistic regression was
behind the ridge at n = 1 and took ten times as long.

Arrays and token ids only: it needs no tokenizer, no model, no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from attacks.adversary import NotEnough
from attacks.membership import Target, Vectors, check_rows, check_vectors
from attacks.simulated import Ids, Simulator, buckets, split
from attacks.token_regressions import (
    PAIR_PENALTY,
    Chooser,
    Ridge,
    Single,
    best_number,
    discriminant,
    fit,
    present,
    whitening,
)
from securefl.errors import SecureflError

GROUPS = 4096
# A token in at most this many auxiliary rows, and in none, counts as rare.
RARE_ROWS = 5

# Relative to the mean variance of a centroid along its axes.
_PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, np.inf)
_BLOCK = 16_000_000
# Absent tokens for every present one in the regression over pairs, which moves its intercept only.
_NEGATIVES = 20
_LEAST_HITS = 32


@dataclass(frozen=True)
class Bags:
    """What was read of each of q centroids: sets of ids, for `token_scores.overlap` with `token_set`.

    guesses: of the probe. prior: the most frequent auxiliary tokens, as many as do best on held-out groups
    without the centroid. same_number: as many of them as the probe guessed. rare, rare_prior: the like among
    rare tokens alone, with a threshold of their own, because a guess made for F1 over all tokens names few.
    is_rare: (V,) in at most RARE_ROWS auxiliary rows, also in none. unreachable: (V,) those that no probe
    can name, so that they count as missed: no auxiliary row has them (and no vector of theirs was given,
    which lets the rare guess name them, but never `guesses`).
    """

    guesses: list[Ids]
    prior: list[Ids]
    same_number: list[Ids]
    rare: list[Ids]
    rare_prior: list[Ids]
    is_rare: NDArray[np.bool_]
    unreachable: NDArray[np.bool_]


def token_set(texts: Sequence[Ids], special: frozenset[int]) -> Ids:
    """The distinct content tokens of a group's texts: the truth about a centroid."""
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *texts]))
    return np.asarray(found[~np.isin(found, list(special))], np.int64)


def presence(texts: Sequence[Ids], vocabulary: int, special: frozenset[int]) -> sparse.csr_array:
    """(m, V) 1 where a text has a token, special ones left out. Raises SecureflError for an id beyond V."""
    sets = [token_set([ids], special) for ids in texts]
    ends = np.cumsum([0, *map(len, sets)])
    ids = np.concatenate([np.zeros(0, np.int64), *sets])
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise SecureflError(
            f"auxiliary text has a token id outside 0 to {vocabulary - 1}; use its own model's"
        )
    return sparse.csr_array((np.ones(len(ids), np.float32), ids, ends), shape=(len(texts), vocabulary))


@dataclass(frozen=True)
class _Looked:
    """Tokens to look for, and what speaks for them. ids: (r,); own: their columns of a ridge, those of
    tokens that it has not seen all zero; ratio: `discriminant` of it; directions: (r, d) whitened vectors of
    length 1 of texts of that token alone, or None."""

    ids: Ids
    own: Ridge
    ratio: Ridge
    directions: Single | None

    def features(self, centroids: Vectors) -> Single:
        """(g, r, f): log rate without the centroid; the ridge's lift over it; likelihood ratio; likeness to
        the token alone."""
        rate = self.own.rate
        lift = (self.own.scores(centroids, PAIR_PENALTY) - rate) / np.sqrt(np.maximum(rate, 1e-6))
        parts = [np.broadcast_to(np.log(rate + 1e-4), lift.shape), lift]
        parts.append(self.ratio.scores(centroids, PAIR_PENALTY))
        if self.directions is not None:
            turned = (centroids - self.own.mean) @ self.own.basis / whitening(self.own)
            parts.append(turned.astype(np.float32) @ self.directions.T)
        return np.stack(parts, axis=-1).astype(np.float32)

    def frequent(self, number: int) -> Ids:
        return np.asarray(self.ids[np.argsort(-self.own.rate, kind="stable")[:number]], np.int64)


@dataclass(frozen=True)
class _Rule:
    """weights: (f,) of `_Looked.features`; tokens scoring at least `threshold` are guessed, or without
    weights the `number` most frequent ones, which is also the prior's guess. f1: on the held-out groups."""

    weights: Single | None
    threshold: float
    number: int
    f1: float

    def guess(self, looked: _Looked, centroid: Vectors) -> Ids:
        """Ids for one centroid (1, d)."""
        if self.weights is None:
            return looked.frequent(self.number)
        scores = looked.features(centroid)[0] @ self.weights
        return np.asarray(looked.ids[scores >= self.threshold], np.int64)


def _rule(
    looked: _Looked, centroids: Vectors, truth: sparse.csr_array, rng: np.random.Generator, missed: int = 0
) -> _Rule:
    """Weigh the features by a logistic regression over (group, token) pairs of held-out groups, and choose
    the threshold. truth: (g, r) 0/1; missed: true pairs of tokens that are not looked for. Where that is no
    better than the prior there, the rule is the prior."""
    counts = np.asarray(truth.sum(axis=0), np.float64).ravel()
    order = np.argsort(-looked.own.rate, kind="stable")
    number, floor = best_number(counts, order, len(centroids))
    step = max(1, _BLOCK // (4 * max(1, len(looked.ids))))
    starts = range(0, len(centroids), step)
    pairs, answers = [], []
    for start in starts:
        features, right = looked.features(centroids[start : start + step]), truth[start : start + step]
        yes = right.toarray() > 0
        among = rng.random(yes.shape) < _NEGATIVES * right.nnz / yes.size
        pairs += [features[yes], features[among & ~yes]]
        answers += [np.ones(len(pairs[-2])), np.zeros(len(pairs[-1]))]
    if counts.sum() < _LEAST_HITS or not sum(len(some) for some in answers[1::2]):
        return _Rule(None, 0.0, number, floor)
    table = np.concatenate(pairs).astype(np.float64)
    scale = np.maximum(table.std(0), 1e-12)
    fitted = LogisticRegression(max_iter=200).fit(table / scale, np.concatenate(answers))
    weights = (fitted.coef_[0] / scale).astype(np.float32)
    chooser = Chooser()
    for start in starts:
        scores = looked.features(centroids[start : start + step]) @ weights
        chooser.add(scores, truth[start : start + step])
    f1, threshold = chooser.best(missed)
    return _Rule(weights if f1 > floor else None, threshold, number, max(f1, floor))


@dataclass(frozen=True)
class _Case:
    """What is the same for every released size. tokens: (m, V) of the auxiliary rows; fitted, held: their
    split. seen: (s,) ids of auxiliary text, the columns of a ridge. content: (V,). vectors: (V, d), None."""

    simulator: Simulator
    tokens: sparse.csr_array
    fitted: Ids
    held: Ids
    seen: Ids
    content: NDArray[np.bool_]
    vectors: Vectors | None

    def is_rare(self, rows: Ids) -> tuple[NDArray[np.bool_], Vectors]:
        """(V,) the rare tokens as these of the auxiliary rows alone show them, and how many rows each has.

        So tokens of held-out groups can be as new to the fit as those of a real group are.
        """
        counts = np.asarray(self.tokens[rows].sum(axis=0), np.float64).ravel()
        return self.content & (counts <= RARE_ROWS * len(rows) / self.tokens.shape[0]), counts

    def every(self, rows: Ids, ridge: Ridge) -> _Looked:
        """All tokens of these rows, on which the ridge was fitted.

        Not those of other rows: of held-out ones each is in some held-out group, which would be learnt.
        """
        own = ridge.rate > 0
        return self._looked(rows, self.seen[own], ridge.columns(np.flatnonzero(own)), ridge)

    def rare(self, rows: Ids, ridge: Ridge) -> _Looked:
        """Rare tokens to look for, with a ridge fitted on these rows."""
        among, counts = self.is_rare(rows)
        ids = np.flatnonzero(among if self.vectors is not None else among & (counts > 0))
        places = np.minimum(np.searchsorted(self.seen, ids), len(self.seen) - 1)
        own = ridge.columns(places)
        new = self.seen[places] != ids
        own.slopes[:, new], own.rate[new] = 0, 0
        return self._looked(rows, ids, own, ridge)

    def _looked(self, rows: Ids, ids: Ids, own: Ridge, ridge: Ridge) -> _Looked:
        counts = np.asarray(self.tokens[rows].sum(axis=0), np.float64).ravel()[ids]
        ratio = discriminant(own, counts)
        if self.vectors is None:
            return _Looked(ids, own, ratio, None)
        turned = (self.vectors[ids] - self.vectors[self.content].mean(0)) @ ridge.basis / whitening(ridge)
        turned /= np.maximum(np.linalg.norm(turned, axis=1, keepdims=True), 1e-30)
        return _Looked(ids, own, ratio, turned.astype(np.float32))


def read(
    target: Target,
    auxiliary: NDArray[np.floating],
    texts: Sequence[Ids],
    vocabulary: int,
    special: frozenset[int],
    rng: np.random.Generator,
    *,
    cells: Ids | None = None,
    token_vectors: NDArray[np.floating] | None = None,
    groups: int = GROUPS,
) -> Bags:
    """Guess the set of content tokens behind each of q centroids.

    auxiliary: (m, d) unclipped vectors of rows that are nobody's, texts: their m lists of token ids out of
    V = `vocabulary`, special: ids that are no content. cells: see `Simulator`. token_vectors: (V, d) what the
    encoder gives for a text of that token alone; public, and the only way to name a token that no auxiliary
    row has. groups: simulated ones for the fit; an eighth as many more choose penalty and threshold.
    Memory: 2 d V_seen numbers for the fit, beside blocks of 64 MB.
    Raises NotEnough where the auxiliary rows are too few for the largest centroid, SecureflError for NaN,
    infinity, constant vectors and ids beyond the vocabulary.
    """
    check_rows(auxiliary, "the auxiliary text")
    centroids = check_vectors(target.centroids, "the released centroids")
    if len(texts) != len(auxiliary):
        raise SecureflError(f"{len(auxiliary)} auxiliary vectors for {len(texts)} auxiliary texts")
    fitted, held = split(len(auxiliary), float(target.sizes.max(initial=1.0)), rng)
    every = presence(texts, vocabulary, special)
    there = np.asarray(every.sum(axis=0)).ravel() > 0
    if not there.any():
        raise NotEnough("the auxiliary text has no content tokens")
    content = np.ones(vocabulary, bool)
    content[[token for token in special if token < vocabulary]] = False
    table = None
    if token_vectors is not None:
        table = check_vectors(token_vectors, "the single tokens")
        if table.shape != (vocabulary, auxiliary.shape[1]):
            raise SecureflError(f"the vectors of single tokens are {table.shape}, not one for every token")
    simulator = Simulator(auxiliary, target.claim, cells)
    case = _Case(simulator, every, fitted, held, np.flatnonzero(there), content, table)
    is_rare, _ = case.is_rare(np.arange(len(auxiliary)))
    lists: list[list[Ids]] = [[np.zeros(0, np.int64)] * len(centroids) for _ in range(5)]
    found = Bags(lists[0], lists[1], lists[2], lists[3], lists[4], is_rare, content & ~there)
    for bucket in buckets(target.sizes):
        _read_bucket(case, found, bucket, centroids, target.sizes[bucket], groups, rng)
    return found


def _read_bucket(
    case: _Case,
    found: Bags,
    bucket: Ids,
    centroids: Vectors,
    sizes: Vectors,
    groups: int,
    rng: np.random.Generator,
) -> None:
    """Fit for one class of sizes and write its centroids' guesses into `found`."""
    tokens = sparse.csr_array(case.tokens[:, case.seen])
    everything = np.concatenate([case.fitted, case.held])

    def ridge_of(rows: Ids) -> Ridge:
        made = case.simulator.releases(rows, sizes, groups, rng)
        return fit(present(made, tokens), centroids.shape[1], len(case.seen))

    first = ridge_of(case.fitted)
    made = list(present(case.simulator.releases(case.held, sizes, max(2, groups // 8), rng), case.tokens))
    trials = np.concatenate([some for some, _ in made])
    there = sparse.vstack([answers for _, answers in made], format="csr")
    truth = sparse.csr_array(there[:, case.seen])
    choosers = [Chooser() for _ in _PENALTIES]
    step = max(1, _BLOCK // len(case.seen))
    for start in range(0, len(trials), step):
        for penalty, chooser in zip(_PENALTIES, choosers, strict=True):
            chooser.add(first.scores(trials[start : start + step], penalty), truth[start : start + step])
    results = [chooser.best() for chooser in choosers]
    best = int(np.argmax([f1 for f1, _ in results]))
    penalty, threshold = _PENALTIES[best], results[best][1]
    counts = np.asarray(truth.sum(axis=0), np.float64).ravel()
    number, _ = best_number(counts, np.argsort(-first.rate, kind="stable"), len(trials))
    rare, rule = case.rare(case.fitted, first), None
    if len(rare.ids):
        rule = _rule(rare, trials, sparse.csr_array(there[:, rare.ids]), rng)
    every = case.every(case.fitted, first)
    right = sparse.csr_array(there[:, every.ids])
    joint = _rule(every, trials, right, rng, missed=truth.nnz - right.nnz)
    both = joint if joint.weights is not None and joint.f1 > results[best][0] else None

    # The choice is made; the guesses come from all rows.
    final = ridge_of(everything)
    rare, every = case.rare(everything, final), case.every(everything, final)
    order = np.argsort(-final.rate, kind="stable")
    for at in bucket.tolist():
        one = centroids[at : at + 1]
        guess = case.seen[final.scores(one, penalty)[0] >= threshold]
        if both is not None:
            guess = both.guess(every, one)
        found.guesses[at] = guess
        found.prior[at] = case.seen[order[:number]]
        found.same_number[at] = case.seen[order[: len(guess)]]
        if rule is not None:
            found.rare[at] = rule.guess(rare, one)
            found.rare_prior[at] = rare.frequent(rule.number)
