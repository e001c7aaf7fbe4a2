"""Every attack on a leak planted for it: it must find that, and nothing where the truth is shuffled.

All rows are made up, always the same ones, and few, so that all attacks together take seconds:
`securefl-audit run` asks here before it believes an attack. What the attacks reach on text is not shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attacks import (
    attribute_probe,
    bag_probe,
    gradient_span,
    membership,
    model_membership,
    one_run,
    pool_search,
    rounds,
    subtraction,
    text_canaries,
)
from attacks.bounds import auc, auc_interval
from attacks.membership import Target, Vectors
from attacks.planted import DELTA, repeated
from attacks.selftest.check import Check, at_least, at_most
from attacks.selftest.faults import mechanism_checks
from attacks.selftest.inversions import inversion_checks, text_checks
from attacks.selftest.memories import memory_checks
from attacks.token_scores import overlap
from securefl.centroid_privacy import clip_rows
from securefl.errors import SecureflError
from securefl.privacy import gaussian_mu, noise_source
from securefl.release import Claim, GaussianSums, NonPrivate

_PLAIN = NonPrivate(reason="made up for the self-test")
_WIDTH = 24
_CLIP = 3.0
# Of intervals that have to hold the baseline: the rows are always the same, so what holds once holds always,
# but for the rounding of other machines.
_ALPHA = 0.01

Sides = tuple[Vectors, Vectors]


def _rows(count: int, rng: np.random.Generator) -> Vectors:
    """Wider along some axes, around a mean that is not zero."""
    return np.asarray(rng.standard_normal((count, _WIDTH)) * np.linspace(0.3, 1.5, _WIDTH) + 0.2)


def _claim(sigma: float, counts: float = 1.0) -> GaussianSums:
    """Predictions get noise so large that they tell nothing."""
    return GaussianSums(
        epsilon=1.0, delta=DELTA, mu=1 / sigma, clip=_CLIP, noise_multiplier=sigma, count_multiplier=counts,
        prediction_multiplier=1e6, generator="self-test", simulated=True,
    )  # fmt: skip


def _released(rows: Vectors, claim: Claim, rng: np.random.Generator) -> Target:
    """One centroid of all rows."""
    if not isinstance(claim, GaussianSums):
        return Target(rows.mean(0)[None], np.array([float(len(rows))]), claim)
    size = max(1.0, len(rows) + rng.normal(0, claim.count_multiplier))
    noise = rng.normal(0, claim.clip * claim.noise_multiplier, rows.shape[1])
    return Target((clip_rows(rows, claim.clip).sum(0) + noise)[None] / size, np.array([size]), claim)


def _joined(found: Sequence[Sides]) -> Sides:
    return np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])


def _by_auc(name: str, leak: Sides, nothing: Sides, least: float) -> Iterator[Check]:
    """AUC of members against controls. leak: of a release that holds the members; nothing: of one that holds
    others in their place, or of a truth that was drawn anew."""
    low, high = auc_interval(*nothing, _ALPHA)
    yield at_least(f"{name}: leak", "members are told from others", auc(*leak), least, "AUC")
    yield Check(
        name=f"{name}: shuffled",
        what="who is a member has nothing to do with what was released, and no score says more",
        passed=low <= 0.5 <= high,
        expected="interval holds .5",
        measured=f"{low:.3f} to {high:.3f}",
    )


# --- 1, 6, 7, 8: which rows


def _membership(rng: np.random.Generator) -> Iterator[Check]:
    def scores() -> tuple[membership.Scores, membership.Scores]:
        members, absent = _rows(6, rng), _rows(6, rng)
        target, auxiliary, controls = _released(members, _PLAIN, rng), _rows(300, rng), _rows(24, rng)
        leak, nothing = (
            membership.attack(target, auxiliary, side, controls, rng) for side in (members, absent)
        )
        return leak, nothing

    found = [scores() for _ in range(15)]
    for name, least in (("ratio", 0.85), ("dot", 0.8)):
        leak, nothing = (_joined([getattr(pair[side], name) for pair in found]) for side in (0, 1))
        yield from _by_auc(f"membership (1), {name}", leak, nothing, least)


def _tokens(rng: np.random.Generator) -> Iterator[Check]:
    import torch

    from attacks import pursuit

    count, width, k, sums = 400, 96, 8, 12
    atoms = torch.from_numpy(rng.standard_normal((count, width)).astype(np.float32))
    truth = rng.integers(0, count, (sums, k))
    problem = pursuit.Problem(
        sums=atoms[torch.from_numpy(truth)].sum(1),
        due=torch.full((sums,), k),
        atoms=torch.nn.functional.pad(atoms, (0, 0, 0, 1)),
        log_rates=torch.zeros((sums, count + 1)),
        variances=torch.ones(width),
        deviation=0.0,
        exact=1e-3,
    )
    read = [[row[row < count]] for row in pursuit.solve(problem)[0].numpy()]
    others = [[row] for row in np.roll(truth, 1, axis=0)]
    own = overlap(read, [[row] for row in truth], frozenset())
    mixed = overlap(read, others, frozenset())
    yield at_least(
        "tokens (2): leak",
        f"{k} of {count} atoms are read back from their sum",
        own.recall,
        0.95,
        "recall",
    )
    yield at_most(
        "tokens (2): shuffled", "what is read of one sum is not another's", mixed.recall, 0.1, "recall"
    )


def _rounds(rng: np.random.Generator) -> Iterator[Check]:
    claim = _claim(1.2)

    def scores() -> tuple[Sides, Sides]:
        members, absent, controls, auxiliary = (_rows(count, rng) for count in (8, 8, 16, 150))
        targets = [_released(members, claim, rng) for _ in range(3)]
        leak, nothing = (
            rounds.attack([rounds.Round(one, auxiliary, side, controls) for one in targets], rng).ratio
            for side in (members, absent)
        )
        return leak, nothing

    found = [scores() for _ in range(25)]
    leak, nothing = (_joined([pair[side] for pair in found]) for side in (0, 1))
    yield from _by_auc("several rounds (6)", leak, nothing, 0.7)
    data, others, auxiliary = _rows(100, rng), _rows(200, rng), _rows(300, rng)
    before, after = _released(data[:-1], _PLAIN, rng), _released(data, _PLAIN, rng)
    ratios = rounds.difference(before, after, auxiliary, np.concatenate([data[-1:], others]))
    yield at_most(
        "several rounds (6): difference",
        "the one row that came is named among 200 others",
        float((ratios[1:] >= ratios[0]).sum()),
        0,
        "rows above it",
    )


def _subtraction(rng: np.random.Generator) -> Iterator[Check]:
    def scores() -> tuple[Sides, Sides]:
        mine, theirs, absent = _rows(20, rng), _rows(6, rng), _rows(6, rng)
        part, whole = (
            subtraction.Part(rows.sum(0)[None], np.array([float(len(rows))]))
            for rows in (mine, np.concatenate([mine, theirs]))
        )
        left = subtraction.subtract(whole, part, [_PLAIN])
        auxiliary, controls = _rows(200, rng), _rows(18, rng)
        leak, nothing = (
            subtraction.attack(left, auxiliary, side, controls, rng).ratio for side in (theirs, absent)
        )
        return leak, nothing

    found = [scores() for _ in range(20)]
    leak, nothing = (_joined([pair[side] for pair in found]) for side in (0, 1))
    yield from _by_auc("subtraction (7)", leak, nothing, 0.9)


def _pool(rng: np.random.Generator) -> Iterator[Check]:
    games, size, n = 10, 200, 3
    ranked, others, certain = 0, 0, 0
    for _ in range(games):
        pool, auxiliary = _rows(size, rng), _rows(300, rng)
        chosen = rng.permutation(size)
        members, controls = np.sort(chosen[:n]), np.sort(chosen[n : 2 * n])
        target = _released(pool[members], _PLAIN, rng)
        background = membership.fit_background(auxiliary, target)
        ranking = pool_search.rank(pool, target, background, auxiliary)
        order = ranking.order()
        ranked += pool_search.retrieve(order, members, n, size).hits
        others += pool_search.retrieve_controls(order, members, controls, n).hits
        found = pool_search.decompose(pool, ranking, target, background, 0)
        certain += found.certain and pool_search.retrieve(found.indices, members, n, size).hits == n
    yield at_least(
        "pool search (8), ranking: leak",
        f"the rows behind a centroid are the first of {size}",
        ranked / (games * n),
        0.5,
        "recall at n",
    )
    # By chance 3 * 3 / 197 a game, .5 in all.
    yield at_most(
        "pool search (8), ranking: others",
        "rows of the pool that are in no centroid are not preferred",
        others / (games * n),
        0.1,
        "recall at n",
    )
    yield at_least(
        "pool search (8), decomposition",
        "the sum is taken apart into its rows",
        certain / games,
        0.9,
        "share",
    )


# --- 4: how much one run tells


def _one_run(rng: np.random.Generator) -> Iterator[Check]:
    multiplier = 1 / gaussian_mu(4, DELTA)
    noises = {"honest": noise_source(5), "noise that is reused": repeated(5)}
    for name, noise in noises.items():
        run = one_run.audit_sums(multiplier, 1.0, DELTA, 400, noise=noise, rng=rng, dimension=64)
        assert run.claim_mu is not None
        bad = name != "honest"
        yield Check(
            name=f"one run (4): {name}",
            what="orthogonal canaries in the real sums show a fault, and within the claim else",
            passed=run.violates_claim == bad and run.mu_lower_bound > 0.2,
            expected=f"mu {'>' if bad else 'up to'} {run.claim_mu:.2f}",
            measured=f"{run.mu_lower_bound:.2f}",
        )
    canaries, known = rng.standard_normal((2, 120, 64))
    coins = one_run.fair_coins(len(canaries), rng)
    exact = Target(
        np.concatenate([known, canaries[coins]]).mean(0)[None], np.array([120.0 + coins.sum()]), _PLAIN
    )
    scores, again = text_canaries.text_scores(canaries, known, exact).scores, one_run.fair_coins(120, rng)
    yield from _by_auc(
        "one run (4), text canaries",
        (scores[coins], scores[~coins]),
        (scores[again], scores[~again]),
        0.8,
    )


# --- 5, 13: what the rows say


def _bag(rng: np.random.Generator) -> Iterator[Check]:
    vocabulary, width = 60, 32
    table = rng.standard_normal((vocabulary, width))
    rates = 1 / np.arange(8.0, 8 + vocabulary)
    texts = [rng.choice(vocabulary, 5, False, rates / rates.sum()).astype(np.int64) for _ in range(380)]
    vectors = np.stack([table[ids].mean(0) for ids in texts])
    target = Target(vectors[300:], np.ones(80), _PLAIN)
    found = bag_probe.read(target, vectors[:300], texts[:300], vocabulary, frozenset(), rng, groups=400)
    truth = [[ids] for ids in texts[300:]]

    def f1(guesses: Iterable[NDArray[np.int64]], true: Any) -> float:
        return overlap([[ids] for ids in guesses], true, frozenset()).f1

    yield at_least(
        "bag of words (5): leak",
        "tokens of single rows are read, far above the most frequent ones",
        f1(found.guesses, truth) - f1(found.prior, truth),
        0.25,
        "F1 above the prior's",
    )
    mixed = truth[1:] + truth[:1]
    yield at_most(
        "bag of words (5): shuffled",
        "what is read of one row is not another's",
        f1(found.guesses, mixed) - f1(found.prior, mixed),
        0.03,
        "F1 above the prior's",
    )


def _attribute(rng: np.random.Generator) -> Iterator[Check]:
    known, own = (rng.choice(2, m, p=(0.6, 0.4)) for m in (300, 300))

    def rows(values: NDArray[np.int64]) -> Vectors:
        return rng.standard_normal((len(values), 8)) + 2.0 * np.eye(8)[values]

    centroids = rows(own).reshape(-1, 3, 8).mean(1)
    found = attribute_probe.read(
        Target(centroids, np.full(len(centroids), 3.0), _PLAIN), rows(known), known, rng, groups=400
    )
    truth, asked = found.truth(list(own.reshape(-1, 3))), int(found.values[0])
    yield from _by_auc(
        "attribute (13)", found.sides(truth, asked), found.sides(rng.permutation(truth), asked), 0.8
    )


# --- 12: what a model says of its rows


def _model(rng: np.random.Generator) -> Iterator[Check]:
    from sklearn.linear_model import LogisticRegression

    width, count = 300, 60

    def world(rows: int) -> tuple[Vectors, NDArray[np.int64]]:
        """One direction tells the labels apart, and not always."""
        vectors = rng.standard_normal((rows, width))
        return vectors, (vectors[:, 0] + rng.standard_normal(rows) > 0).astype(np.int64)

    own = world(count)
    model = LogisticRegression(C=10.0, max_iter=5000).fit(*own)

    def seen(vectors: Vectors, labels: NDArray[np.int64]) -> model_membership.Candidates:
        second = model.decision_function(vectors)
        logits = np.stack([np.zeros_like(second), second], axis=1)
        return model_membership.Candidates(logits, labels, vectors, vectors)

    controls, auxiliary = seen(*world(count)), seen(*world(150))
    leak, nothing = (
        model_membership.attack(seen(*rows), controls, auxiliary, rng, shadows=16)
        for rows in (own, world(count))
    )
    for name, least in (("loss", 0.9), ("lira_offline", 0.8), ("lira_online", 0.85), ("rmia", 0.7)):
        yield from _by_auc(
            f"trained model (12), {name.replace('_', ' ')}",
            getattr(leak, name),
            getattr(nothing, name),
            least,
        )


def _gradient(rng: np.random.Generator) -> Iterator[Check]:
    """The gradient of a linear map is a sum over tokens of (gradient of its output) x (its input)."""
    dictionary = torch.from_numpy(rng.standard_normal((400, _WIDTH * 2))).float()
    batch = rng.choice(400, 12, replace=False)

    def read(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        outputs = rng.standard_normal((96, len(tokens)))
        span = gradient_span.span_of(outputs @ dictionary[tokens].double().numpy(), dictionary.shape[1])
        return np.flatnonzero((span.excess(dictionary) <= 1).numpy())

    own, others = read(batch), read(np.setdiff1d(np.arange(400), batch)[:12])
    found = np.isin(batch, own).mean() if len(own) == len(batch) else 0.0
    yield at_least("gradient (11): leak", "the inputs of a linear map are read", float(found), 1.0, "recall")
    yield at_most(
        "gradient (11): shuffled", "another batch's gradient does not hold them",
        float(np.isin(batch, others).mean()), 0.0, "recall",
    )  # fmt: skip


LEAKS: Mapping[int, Callable[[np.random.Generator], Iterator[Check]]] = {
    1: _membership,
    2: _tokens,
    3: mechanism_checks,
    4: _one_run,
    5: _bag,
    6: _rounds,
    7: _subtraction,
    8: _pool,
    9: inversion_checks,
    10: text_checks,
    11: _gradient,
    12: _model,
    13: _attribute,
    14: memory_checks,
}
"""By the attack's number: the checks on rows drawn by a generator."""


def leak_checks(number: int) -> list[Check]:
    """The checks of one attack. An attack that ends in an error of securefl's own has failed one.

    Raises SecureflError for an attack without checks: what is not tested is not believed.
    """
    if number not in LEAKS:
        raise SecureflError(f"attack {number} has no self-test, so nothing it finds can be believed")
    checks: list[Check] = []
    try:
        checks.extend(LEAKS[number](np.random.default_rng(number)))
    except SecureflError as error:
        checks.append(
            Check(
                name=f"attack {number}", what="it works on made-up rows", passed=False,
                expected="no error", measured=str(error),
            )
        )  # fmt: skip
    return checks
