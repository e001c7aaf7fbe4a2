"""Two linear maps between pooled vectors and the words of their texts, learned from auxiliary text.

One goes from a released vector to the probability of every token, fitted on releases that are simulated with
the size and noise of the real one; the other from a bag of tokens to the vector of its text. The inversions
(`decoder`, `inversion`) start with the first and search with the second. Arrays and token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge

from attacks.adversary import NotEnough
from attacks.covariance import sample_covariance
from attacks.dictionary import Ids
from attacks.membership import Vectors, check_rows, chunks, clipped
from attacks.simulated import Simulator, split
from securefl.errors import SecureflError
from securefl.release import Claim

Single = NDArray[np.float32]

GROUPS = 2048
VOCABULARY = 8192

_PENALTIES = (0.01, 0.1, 1.0, 10.0, 1e6)
_BAG_PENALTY = 0.02
_LEAST_PROBABILITY = 1e-4
_BAG_ROWS = 4096
_SURE = 0.8


@dataclass(frozen=True)
class Reader:
    """What auxiliary text says of releases of some sizes under one claim.

    vocabulary: (c,) ids that texts are made of. prefix, suffix: special tokens around every text. longest: of
    the inner tokens of a text. centre: (d,) and metric: (d, d), the inverse root of what vectors vary in.
    presence: ridge from a vector to the presence of each of c tokens; length: to the mean number of inner
    tokens. words: (c, d) what a token adds to the unit vector, in the metric, of a text. places: (c,) where
    in a text it stands on average, 0 to 1. frequent: the vocabulary by falling frequency.
    """

    vocabulary: Ids
    prefix: Ids
    suffix: Ids
    longest: int
    claim: Claim
    centre: Vectors
    metric: Vectors
    presence: Ridge
    length: Ridge
    words: Single
    places: Vectors
    frequent: Ids

    def log_probabilities(self, centroids: Vectors) -> Vectors:
        """(q, c) of each token's presence behind a centroid (q, d)."""
        estimate = self.presence.predict(centroids)
        return np.asarray(np.log(np.clip(estimate, _LEAST_PROBABILITY, 1)), np.float64)

    def lengths(self, centroids: Vectors) -> Ids:
        """(q,) inner tokens of a text behind each centroid."""
        guess = np.exp(self.length.predict(centroids))
        return np.asarray(np.clip(np.rint(guess), 1, self.longest), np.int64)

    def whole(self, inner: Ids) -> Ids:
        """A text with its special tokens."""
        return np.concatenate([self.prefix, inner, self.suffix])

    def inner(self, text: Ids) -> Ids:
        return text[len(self.prefix) : len(text) - len(self.suffix)]

    def turned(self, vectors: NDArray[np.floating]) -> Vectors:
        """(n, d) unit vectors in the metric, of text vectors or, already as released, of centroids."""
        moved = (np.asarray(vectors, np.float64) - self.centre) @ self.metric
        lengths = np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-30)
        return np.asarray(moved / lengths, np.float64)

    def start(self, log_probabilities: Vectors, length: int) -> Ids:
        """The most probable tokens, in the order of their usual places, as a whole text.

        Fewer than `length`, since some of a text's tokens stand in it twice and the last ones are doubtful.
        """
        top = np.argsort(-log_probabilities, kind="stable")[: max(1, round(_SURE * length))]
        return self.whole(self.vocabulary[top[np.argsort(self.places[top], kind="stable")]])

    def commonest(self, number: int) -> Ids:
        """As many of the most frequent tokens: the guess without any release."""
        return self.frequent[:number]


def frame(texts: Sequence[Ids], special: frozenset[int]) -> tuple[Ids, Ids]:
    """The special tokens that all texts begin and end with. Raises NotEnough without texts."""
    if not texts:
        raise NotEnough("there is no auxiliary text")
    ends = []
    for sides in (list(texts), [text[::-1] for text in texts]):
        count = 0
        while all(len(t) > count and t[count] == sides[0][count] for t in sides) and (
            int(sides[0][count]) in special
        ):
            count += 1
        ends.append(sides[0][:count])
    return ends[0].copy(), ends[1][::-1].copy()


def by_frequency(texts: Sequence[Ids], special: frozenset[int]) -> Ids:
    """The content tokens of some texts, the most frequent first."""
    counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *texts]))
    counts[[token for token in special if token < len(counts)]] = 0
    frequent = np.argsort(-counts, kind="stable").astype(np.int64)
    return frequent[counts[frequent] > 0]


def _bags(texts: Sequence[Ids], places: Ids, special: frozenset[int]) -> sparse.csr_array:
    """(m, c) how often a text has each token of the vocabulary; places: (V,) its column, or -1."""
    columns = [places[ids[~np.isin(ids, list(special))]] for ids in texts]
    columns = [one[one >= 0] for one in columns]
    ends = np.cumsum([0, *map(len, columns)])
    made = sparse.csr_array(
        (np.ones(ends[-1], np.float32), np.concatenate(columns), ends),
        shape=(len(texts), int(places.max()) + 1),
    )
    made.sum_duplicates()
    return made


def fit(
    auxiliary: NDArray[np.floating],
    texts: Sequence[Ids],
    sizes: Vectors,
    claim: Claim,
    special: frozenset[int],
    rng: np.random.Generator,
    *,
    cells: Ids | None = None,
    groups: int = GROUPS,
) -> Reader:
    """Learn both maps from auxiliary rows (m, d), unclipped, and their m texts as ids, special ones included.

    The rows may be a memory map, and are read in chunks.

    sizes: released sizes to imitate, near each other (`simulated.buckets`). cells: see `Simulator`.
    Memory: groups x c numbers of 8 bytes. Raises NotEnough where the rows are too few for the largest size,
    SecureflError for NaN, infinity and constant vectors.
    """
    check_rows(auxiliary, "the auxiliary text")
    if len(auxiliary) != len(texts):
        raise SecureflError(f"{len(auxiliary)} auxiliary vectors for {len(texts)} auxiliary texts")
    fitted, held = split(len(auxiliary), float(sizes.max(initial=1.0)), rng)
    frequent = by_frequency(texts, special)[:VOCABULARY]
    if not len(frequent):
        raise NotEnough("the auxiliary text has no content tokens")
    vocabulary = np.sort(frequent)
    columns = np.full(1 + max(int(ids.max(initial=0)) for ids in texts), -1, np.int64)
    columns[vocabulary] = np.arange(len(vocabulary))
    bags = _bags(texts, columns, special)
    inner = np.array([max(1, int((~np.isin(ids, list(special))).sum())) for ids in texts], np.float64)
    simulator = Simulator(auxiliary, claim, cells)
    presence = _ridge(simulator, bags, fitted, held, sizes, groups, rng)
    drawn = list(simulator.releases(np.arange(len(auxiliary)), sizes, groups, rng))
    made = np.concatenate([one for one, _ in drawn])
    whose = sparse.vstack([one for _, one in drawn], format="csr")
    mean = (whose @ inner) / np.asarray(whose.sum(axis=1)).ravel()
    length = Ridge(presence.alpha).fit(made, np.log(mean))

    centre, covariance = sample_covariance(clipped(rows, claim) for _, rows in chunks(auxiliary))
    # What a release varies in beside its text: the rows, evened out, and the noise of the claim.
    scatter = float(np.trace(covariance)) / len(centre) * (1 - 1 / len(auxiliary))
    noise = float(np.maximum(0, made.var(0).mean() - scatter / max(1.0, float(sizes.mean()))))
    variances, basis = np.linalg.eigh(covariance)
    spread = np.maximum(variances, 0) + variances.mean() + noise
    metric = (basis / np.sqrt(spread)) @ basis.T
    prefix, suffix = frame(texts, special)
    reader = Reader(
        vocabulary,
        prefix,
        suffix,
        int(inner.max()),
        claim,
        centre,
        metric,
        presence,
        length,
        np.zeros((len(vocabulary), auxiliary.shape[1]), np.float32),
        _places(texts, columns, len(vocabulary)),
        frequent,
    )
    some = rng.permutation(len(auxiliary))[:_BAG_ROWS]
    shares = sparse.csr_array(sparse.diags_array(1 / inner[some]) @ bags[some])
    pooled = clipped(np.asarray(auxiliary[some], np.float64), claim)
    dual = KernelRidge(alpha=_BAG_PENALTY, kernel="linear").fit(shares, reader.turned(pooled))
    reader.words[:] = shares.T @ dual.dual_coef_
    return reader


def _places(texts: Sequence[Ids], columns: Ids, number: int) -> Vectors:
    """(c,) mean relative place of each token of the vocabulary."""
    sums, counts = np.zeros(number), np.zeros(number)
    for ids in texts:
        at = columns[ids]
        relative = np.linspace(0, 1, len(ids))
        np.add.at(sums, at[at >= 0], relative[at >= 0])
        np.add.at(counts, at[at >= 0], 1)
    return np.asarray(sums / np.maximum(counts, 1), np.float64)


def _ridge(
    simulator: Simulator,
    bags: sparse.csr_array,
    fitted: Ids,
    held: Ids,
    sizes: Vectors,
    groups: int,
    rng: np.random.Generator,
) -> Ridge:
    """From simulated releases to the presence of tokens, with the penalty that held-out groups like best."""

    def drawn(rows: Ids, number: int) -> tuple[Vectors, Single]:
        blocks = list(simulator.releases(rows, sizes, number, rng))
        there = [np.minimum((whose @ bags).toarray(), 1).astype(np.float32) for _, whose in blocks]
        return np.concatenate([one for one, _ in blocks]), np.concatenate(there)

    trials, truth = drawn(held, max(2, groups // 8))
    made, there = drawn(fitted, groups)
    scale = float(made.var(0).mean()) * len(made)
    reached = [
        _found(Ridge(penalty * scale).fit(made, there).predict(trials), truth) for penalty in _PENALTIES
    ]
    made, there = drawn(np.concatenate([fitted, held]), groups)
    return Ridge(_PENALTIES[int(np.argmax(reached))] * scale).fit(made, there)


def _found(estimate: NDArray[np.floating], truth: Single) -> float:
    """Share of the true tokens of groups (g, c) that are among as many with the largest estimates.

    The squared error would do for a probability, but most of it is of tokens that are nowhere: a penalty
    chosen by it starts texts at a token F1 of .33 where this one's has .40.
    """
    hits = 0.0
    for row, there in zip(estimate, truth, strict=True):
        number = int(there.sum())
        if number:
            hits += float(there[np.argpartition(-row, number - 1)[:number]].sum())
    return hits / max(1.0, float(truth.sum()))
