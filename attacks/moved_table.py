"""Attack 2 where the encoder's own table is not public: a silo trained its copy of the embedding layer too.

What an adversary has is the table from before. Its entries are near enough to read many tokens; these say how
the table moved on the whole, one affine map and a shift for every position, fitted by ridge regression from
the public vectors of what was read to the released centroids; and with the map undone the rest is read. How
strong the regression's penalty is, and how far the entries still differ afterwards (the `slack` of
`tokens.recover`), is what leaving out one centroid and position at a time says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV
from torch import Tensor

from attacks.adversary import NotEnough
from attacks.dictionary import Ids, Layer, Moved, Prior, token_ids, vocabulary_size
from attacks.tokens import Recovered, Target, recover
from securefl.slm import Slm

ROUNDS = 4
# Sums of fewer pairs of centroid and position say nothing of a map of the table.
_LEAST = 16
# Relative to the mean square of a centroid's numbers; the last is no map, only shifts.
_PENALTIES = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e7)
_OUTLIER = 2.0
# Of the distance to other rows, above which a centroid is of other rows or of another encoder: of these it is
# about 1; of the rows themselves under a table that moved by x of its entries' scatter about x / sqrt(2); and
# with one wrong row in five .45.
NEAR = 0.4
# The same of x itself. A map that moves the table further may be to another encoder's, where any text fits.
NEARER = NEAR * 2**0.5
# A token of which the frequencies are this sure need not be read.
_SURE = 0.9
_START = 0.1


@dataclass(frozen=True)
class Adapted:
    """recovered: what was read at last. dictionary: the table as it is now thought to be. slack: standard
    deviation of what its entries are still off by, for each number, in every round of reading."""

    recovered: Recovered
    dictionary: Moved
    slack: tuple[float, ...]


def recover_moved(
    slm: Slm,
    target: Target,
    prior: Prior,
    auxiliary: Sequence[str],
    *,
    rounds: int = ROUNDS,
) -> Adapted:
    """Read exact centroids of an unknown table with the public one of `slm`, correct that, and read again.

    Stops after `rounds` corrections, or as soon as one does not bring the dictionary nearer to what was
    released; the reading before it is then the result. Raises NotEnough under a claim, whose noise hides how
    a table moves, and for fewer than 16 pairs of centroid and position.
    """
    if target.private:
        raise NotEnough("the noise of a claim hides how the table moved; read with the round's model instead")
    if int((target.mask > 0).sum()) < _LEAST:
        raise NotEnough(f"fewer than {_LEAST} sums are too few to tell how a table moved")
    positions = target.centroids.shape[1]
    base = Layer(slm, positions)
    shift, slack = _first_look(base, target, prior, token_ids(slm, auxiliary))
    width = target.centroids.shape[2]
    table = Moved(base, torch.eye(width), shift)
    read = recover(slm, target, prior, auxiliary, dictionary=table, slack=slack)
    seen = [slack]
    for _ in range(rounds):
        moved, slack = _correct(base, table, target, read)
        if slack >= 0.99 * seen[-1] and len(seen) > 1:
            break
        again = recover(slm, target, prior, auxiliary, dictionary=moved, slack=slack)
        same = all(
            np.array_equal(np.sort(a), np.sort(b))
            for x, y in zip(read.tokens, again.tokens, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        read, table = again, moved
        seen.append(slack)
        if same:
            break
    return Adapted(read, table, tuple(seen))


def change(slm: Slm, table: Moved) -> float:
    """How far a correction moves an entry, over the entries' scatter; a shift of all alike does not count."""
    ids = torch.arange(vocabulary_size(slm))
    before, after = table.base.at(0, ids), table.at(0, ids)
    return float((after - before).std(0).norm() / before.std(0).norm())


def distances(
    slm: Slm, target: Target, truth: Sequence[Sequence[Ids]], others: Sequence[Sequence[Ids]]
) -> NDArray[np.float64]:
    """(q,) how far a centroid is from its rows' mean under the public table, over how far from other rows'.

    truth, others: [centroid][position] tokens of the rows behind it, and of as many that are nobody's. What
    all sums of a side are off by alike does not count. Not what the adversary sees: says whether the truth
    fits (at most `NEAR`) where the table is not the one that made the centroids. Infinite where the other
    rows say nothing.
    """
    base = Layer(slm, target.centroids.shape[1])
    mine, theirs = (_squares(base, target, side) for side in (truth, others))
    far = np.sqrt(mine / np.where(theirs > 0, theirs, np.nan))
    return np.asarray(np.nan_to_num(far, nan=np.inf), np.float64)


def _squares(base: Layer, target: Target, side: Sequence[Sequence[Ids]]) -> NDArray[np.float64]:
    """(q,) mean square of what the sums of a centroid's positions are off by, for each of their tokens."""
    off, behind, numbers = [], [], []
    for c, row in enumerate(side):
        for s, ids in enumerate(row):
            if len(ids) and target.mask[c, s] > 0:
                off.append(target.centroids[c, s] - base.at(s, torch.from_numpy(ids)).mean(0).numpy())
                behind.append(c)
                numbers.append(len(ids))
    if not off:
        return np.zeros(len(side))
    rest = np.array(off, np.float64)
    # The median: rows that do not fit must not move those that do.
    squares = np.square(rest - np.median(rest, axis=0)).mean(1) * numbers
    total, times = (np.bincount(behind, part, len(side)) for part in (squares, np.ones(len(off))))
    return np.asarray(total / np.maximum(times, 1), np.float64)


def _first_look(base: Layer, target: Target, prior: Prior, auxiliary: Sequence[Ids]) -> tuple[Tensor, float]:
    """Shifts (S, d) and slack before anything was read.

    Every text begins with the same special token in most models, so how far that one moved is plain. Where
    the centroids of the other positions are nearer to what other text expects once they are moved back by as
    much, the whole table is taken to have moved so. The slack is a tenth of an entry's scatter, a guess.
    """
    positions, width = target.centroids.shape[1:]
    rates = prior.probability[:positions]
    sure = [s for s in range(positions) if rates[s].max() > _SURE and (target.mask[:, s] > 0).any()]
    moves: list[NDArray[np.float32]] = []
    apart: list[NDArray[np.float32]] = []
    for s in range(positions):
        rows = target.mask[:, s] > 0
        ids = [int(one[s]) for one in auxiliary if len(one) > s]
        if rows.any() and ids:
            given = rates[s].argmax(keepdims=True) if s in sure else np.array(ids)
            expected = base.at(s, torch.from_numpy(given)).mean(0).numpy()
            (moves if s in sure else apart).append(target.centroids[rows, s].mean(0) - expected)
    shift = np.mean(moves, axis=0) if moves else np.zeros(width)
    if not apart or np.square(np.array(apart) - shift).sum() >= np.square(apart).sum():
        shift = np.zeros(width)
    some = base.at(0, torch.arange(min(1024, rates.shape[1])))
    shifts = torch.from_numpy(np.tile(shift, (positions, 1))).float()
    return shifts, _START * float(some.std(0).mean())


def _correct(base: Layer, table: Moved, target: Target, read: Recovered) -> tuple[Moved, float]:
    """The affine map and shifts that bring the public vectors of what was read nearest to the centroids."""
    means, wanted, off, places, numbers = [], [], [], [], []
    positions, width = target.centroids.shape[1:]
    for c, row in enumerate(read.tokens):
        for s, ids in enumerate(row):
            if len(ids):
                given = torch.from_numpy(ids)
                means.append(base.at(s, given).mean(0).numpy())
                wanted.append(target.centroids[c, s])
                off.append(wanted[-1] - table.at(s, given).mean(0).numpy())
                places.append(s)
                numbers.append(len(ids))
    k, at = np.array(numbers, np.float64), np.array(places)
    # A sum with a wrong token is further off than the table's movement makes the others.
    sizes = np.sqrt((np.array(off, np.float64) ** 2).mean(1) * k)
    kept = sizes <= _OUTLIER * np.median(sizes)
    x, y, k, at = np.array(means, np.float64)[kept], np.array(wanted, np.float64)[kept], k[kept], at[kept]
    moved = y - x
    common = np.average(moved, axis=0, weights=k)
    shifts = np.tile(common, (positions, 1))
    spread = float(np.average(((moved - common) ** 2).mean(1) * k))
    for s in range(positions):
        here = at == s
        if here.any():
            own = np.average(moved[here], axis=0, weights=k[here]) - common
            noise = spread / k[here].sum()
            # Shrunk by the share of it that is more than the scatter of so few sums (James and Stein).
            shifts[s] += own * max(0.0, 1 - noise / max(1e-30, float((own**2).mean())))
    rest = (moved - shifts[at]) * np.sqrt(k)[:, None]
    centre = np.average(x, axis=0, weights=k)
    features = (x - centre) * np.sqrt(k)[:, None]
    penalties = np.array(_PENALTIES) * float((features**2).mean()) * width
    fit = RidgeCV(alphas=penalties, fit_intercept=False).fit(features, rest)
    matrix = np.eye(width) + np.asarray(fit.coef_, np.float64).T
    shifts += centre - centre @ matrix
    slack = float(np.sqrt(-fit.best_score_))
    return (
        Moved(base, torch.from_numpy(matrix).float(), torch.from_numpy(shifts).float()),
        max(slack, 1e-5),
    )
