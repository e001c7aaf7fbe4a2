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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from attacks.adversary import NotEnough
from attacks.membership import Target, Vectors, check_vectors
from attacks.simulated import Ids, Simulator, buckets, split
from securefl.errors import SecureflError

GROUPS = 4096
# A token in at most this many auxiliary rows, and in none, counts as rare.
RARE_ROWS = 5

Single = NDArray[np.float32]

# Relative to the mean variance of a centroid along its axes.
_PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, np.inf)
_WHITENING = 1.0
_PAIR_PENALTY = 0.1  # of what the regression over pairs weighs
# The mean of the texts with a token is shrunk as if the overall mean were this many more of them.
_PSEUDO_ROWS = 5.0
_BINS = 4096
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
class _Ridge:
    """Ridge regressions of every token at once, for any penalty.

    mean: (d,) of the simulated centroids; basis: (d, d), variances: (d,) of their covariance. slopes: (d, V)
    covariance of rotated centroid and token. rate: (V,) share of groups that have the token.
    """

    mean: Vectors
    basis: Vectors
    variances: Vectors
    slopes: Single
    rate: Single

    def scores(self, centroids: Vectors, penalty: float) -> Single:
        """(g, V) linear estimate of the probability that a token is in the group."""
        shrunk = self.variances + penalty * self.variances.mean()
        turned = (centroids - self.mean) @ self.basis / shrunk
        return np.asarray(turned.astype(np.float32) @ self.slopes + self.rate, np.float32)

    def columns(self, ids: Ids) -> _Ridge:
        return replace(self, slopes=self.slopes[:, ids], rate=self.rate[ids])


Blocks = Iterator[tuple[Vectors, sparse.csr_array]]


def _present(blocks: Blocks, tokens: sparse.csr_array) -> Blocks:
    """Of blocks (centroids, rows of each group): (centroids, 0/1 tokens of each group)."""
    for centroids, whose in blocks:
        there = sparse.csr_array(whose @ tokens)
        there.data[:] = 1
        yield centroids, there


def _fit(blocks: Blocks, width: int, vocabulary: int) -> _Ridge:
    """Normal equations over blocks, around the first block's mean so that nothing cancels."""
    origin: Vectors | None = None
    groups, total, counts = 0, np.zeros(width), np.zeros(vocabulary)
    square, cross = np.zeros((width, width)), np.zeros((vocabulary, width))
    for centroids, there in blocks:
        origin = centroids.mean(0) if origin is None else origin
        moved = centroids - origin
        groups += len(moved)
        total += moved.sum(0)
        square += moved.T @ moved
        counts += there.sum(axis=0)
        cross += there.T @ moved
    if origin is None:
        raise NotEnough("no groups were simulated, so there is nothing to fit")
    mean, rate = total / groups, counts / groups
    variances, basis = np.linalg.eigh(square / groups - np.outer(mean, mean))
    slopes = basis.T @ (cross / groups - np.outer(rate, mean)).T
    floor = max(1e-12, 1e-9 * float(variances.max()))
    return _Ridge(
        origin + mean,
        basis,
        np.maximum(variances, floor),
        slopes.astype(np.float32),
        rate.astype(np.float32),
    )


class _Chooser:
    """The threshold with the best F1 over all (group, token) pairs, counted in bins of the score."""

    def __init__(self) -> None:
        self._ends: tuple[float, float] | None = None
        self._all, self._hits, self._true = np.zeros(_BINS), np.zeros(_BINS), 0

    def add(self, scores: Single, there: sparse.csr_array) -> None:
        """scores: (g, V); there: (g, V) 0/1 truth."""
        if self._ends is None:
            self._ends = float(scores.min()), max(float(scores.max()), float(scores.min()) + 1e-6)
        low, high = self._ends
        bins = np.clip((scores - low) * (_BINS / (high - low)), 0, _BINS - 1).astype(np.int32)
        self._all += np.bincount(bins.ravel(), minlength=_BINS)
        right = there.tocoo()
        self._hits += np.bincount(bins[right.row, right.col], minlength=_BINS)
        self._true += right.nnz

    def best(self, missed: int = 0) -> tuple[float, float]:
        """(F1, threshold): tokens scoring at least the threshold are guessed. missed: true pairs beside."""
        assert self._ends is not None
        hits, guessed = np.cumsum(self._hits[::-1])[::-1], np.cumsum(self._all[::-1])[::-1]
        f1 = 2 * hits / np.maximum(1, guessed + self._true + missed)
        at = int(f1.argmax())
        low, high = self._ends
        return float(f1[at]), low + at * (high - low) / _BINS


def _best_number(counts: Vectors, order: Ids, groups: int) -> tuple[int, float]:
    """How many tokens of `order` to guess for every group, and the F1 of it, the best one.

    counts: (V,) how many of the groups have each.
    """
    hits = np.cumsum(counts[order])
    f1 = 2 * hits / np.maximum(1, groups * np.arange(1, len(order) + 1) + counts.sum())
    return int(f1.argmax()) + 1, float(f1.max())


def _whitening(ridge: _Ridge) -> Vectors:
    """(d,) by which rotated centroids are divided: what they vary in anyway, the noise included."""
    return np.asarray(np.sqrt(ridge.variances + _WHITENING * ridge.variances.mean()), np.float64)


def _discriminant(ridge: _Ridge, rows: Vectors) -> _Ridge:
    """Log-likelihood ratio of "has the token" against "any group", Gaussian with one covariance; its `scores`
    take the penalty `_PAIR_PENALTY`. rows: (V,) how many rows have each token."""
    means = ridge.slopes * (rows / (rows + _PSEUDO_ROWS) / np.maximum(ridge.rate, 1e-9)).astype(np.float32)
    shrunk = (ridge.variances + _PAIR_PENALTY * ridge.variances.mean()).astype(np.float32)
    return replace(ridge, slopes=means, rate=-0.5 * (means**2 / shrunk[:, None]).sum(0))


@dataclass(frozen=True)
class _Looked:
    """Tokens to look for, and what speaks for them. ids: (r,); own: their columns of a ridge, those of
    tokens that it has not seen all zero; ratio: `_discriminant` of it; directions: (r, d) whitened vectors of
    length 1 of texts of that token alone, or None."""

    ids: Ids
    own: _Ridge
    ratio: _Ridge
    directions: Single | None

    def features(self, centroids: Vectors) -> Single:
        """(g, r, f): log rate without the centroid; the ridge's lift over it; likelihood ratio; likeness to
        the token alone."""
        rate = self.own.rate
        lift = (self.own.scores(centroids, _PAIR_PENALTY) - rate) / np.sqrt(np.maximum(rate, 1e-6))
        parts = [np.broadcast_to(np.log(rate + 1e-4), lift.shape), lift]
        parts.append(self.ratio.scores(centroids, _PAIR_PENALTY))
        if self.directions is not None:
            turned = (centroids - self.own.mean) @ self.own.basis / _whitening(self.own)
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
    number, floor = _best_number(counts, order, len(centroids))
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
    chooser = _Chooser()
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

    def every(self, rows: Ids, ridge: _Ridge) -> _Looked:
        """All tokens of these rows, on which the ridge was fitted.

        Not those of other rows: of held-out ones each is in some held-out group, which would be learnt.
        """
        own = ridge.rate > 0
        return self._looked(rows, self.seen[own], ridge.columns(np.flatnonzero(own)), ridge)

    def rare(self, rows: Ids, ridge: _Ridge) -> _Looked:
        """Rare tokens to look for, with a ridge fitted on these rows."""
        among, counts = self.is_rare(rows)
        ids = np.flatnonzero(among if self.vectors is not None else among & (counts > 0))
        places = np.minimum(np.searchsorted(self.seen, ids), len(self.seen) - 1)
        own = ridge.columns(places)
        new = self.seen[places] != ids
        own.slopes[:, new], own.rate[new] = 0, 0
        return self._looked(rows, ids, own, ridge)

    def _looked(self, rows: Ids, ids: Ids, own: _Ridge, ridge: _Ridge) -> _Looked:
        counts = np.asarray(self.tokens[rows].sum(axis=0), np.float64).ravel()[ids]
        ratio = _discriminant(own, counts)
        if self.vectors is None:
            return _Looked(ids, own, ratio, None)
        turned = (self.vectors[ids] - self.vectors[self.content].mean(0)) @ ridge.basis / _whitening(ridge)
        turned /= np.maximum(np.linalg.norm(turned, axis=1, keepdims=True), 1e-30)
        return _Looked(ids, own, ratio, turned.astype(np.float32))


def read(
    target: Target,
    auxiliary: Vectors,
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
    rows = check_vectors(auxiliary, "the auxiliary text")
    centroids = check_vectors(target.centroids, "the released centroids")
    if len(texts) != len(rows):
        raise SecureflError(f"{len(rows)} auxiliary vectors for {len(texts)} auxiliary texts")
    fitted, held = split(len(rows), float(target.sizes.max(initial=1.0)), rng)
    every = presence(texts, vocabulary, special)
    there = np.asarray(every.sum(axis=0)).ravel() > 0
    if not there.any():
        raise NotEnough("the auxiliary text has no content tokens")
    content = np.ones(vocabulary, bool)
    content[[token for token in special if token < vocabulary]] = False
    table = None
    if token_vectors is not None:
        table = check_vectors(token_vectors, "the single tokens")
        if table.shape != (vocabulary, rows.shape[1]):
            raise SecureflError(f"the vectors of single tokens are {table.shape}, not one for every token")
    simulator = Simulator(rows, target.claim, cells)
    case = _Case(simulator, every, fitted, held, np.flatnonzero(there), content, table)
    is_rare, _ = case.is_rare(np.arange(len(rows)))
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

    def ridge_of(rows: Ids) -> _Ridge:
        made = case.simulator.releases(rows, sizes, groups, rng)
        return _fit(_present(made, tokens), centroids.shape[1], len(case.seen))

    first = ridge_of(case.fitted)
    made = list(_present(case.simulator.releases(case.held, sizes, max(2, groups // 8), rng), case.tokens))
    trials = np.concatenate([some for some, _ in made])
    present = sparse.vstack([there for _, there in made], format="csr")
    truth = sparse.csr_array(present[:, case.seen])
    choosers = [_Chooser() for _ in _PENALTIES]
    step = max(1, _BLOCK // len(case.seen))
    for start in range(0, len(trials), step):
        for penalty, chooser in zip(_PENALTIES, choosers, strict=True):
            chooser.add(first.scores(trials[start : start + step], penalty), truth[start : start + step])
    results = [chooser.best() for chooser in choosers]
    best = int(np.argmax([f1 for f1, _ in results]))
    penalty, threshold = _PENALTIES[best], results[best][1]
    counts = np.asarray(truth.sum(axis=0), np.float64).ravel()
    number, _ = _best_number(counts, np.argsort(-first.rate, kind="stable"), len(trials))
    rare, rule = case.rare(case.fitted, first), None
    if len(rare.ids):
        rule = _rule(rare, trials, sparse.csr_array(present[:, rare.ids]), rng)
    every = case.every(case.fitted, first)
    right = sparse.csr_array(present[:, every.ids])
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
