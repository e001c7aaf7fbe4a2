"""The bounds on scores whose law is known: nothing found where there is nothing, and the truth from below.

Scores are drawn here, or come from the real mechanism of noised sums; no attack on text is in this room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.stats import binom, norm

from attacks import bounds, mechanism, one_run
from attacks.bounds import ALPHA, Confusion
from attacks.planted import DELTA, deaf
from attacks.selftest.check import UNLUCKY, Check, Progress, alarms_check, most_alarms
from securefl.privacy import Noise, gaussian_mu

SIZES = (20, 50, 100, 1000, 10_000)
"""Scores on a side of a null game."""
CANARIES = (20, 100, 1000)
FPR = 0.01
TRIALS = 100_000
KNOWN: dict[int, tuple[float, float]] = {1: (0.8, 0.5), 2: (1.7, 1.1), 4: (3.5, 2.4), 8: (7.0, 4.4)}
"""True epsilon: the least median of the Gaussian bound, and about what the bound for any mechanism shows."""
_ABOUT = 0.2
_ONE_RUN = (4, 300)  # a true epsilon, and the canaries to show some of it with


def separation(errors: Confusion) -> float:
    """How many deviations of chance the two error rates are below it: cheap, and as partial as can be to
    thresholds that were lucky."""
    fpr, fnr = (errors.fp + 1) / (errors.n0 + 2), (errors.fn + 1) / (errors.n1 + 2)
    return (1 - fpr - fnr) / math.sqrt(fpr * (1 - fpr) / errors.n0 + fnr * (1 - fnr) / errors.n1)


def _coverage() -> Check:
    """Exactly, by the binomial law: how often a Clopper-Pearson bound is below the truth, at the worst p."""
    p, worst = np.linspace(0.001, 0.999, 999), 0.0
    for n in (20, 100):
        above = np.array([bounds.upper_bound(k, n, ALPHA) for k in range(n + 1)])
        misses = binom.pmf(np.arange(n + 1)[:, None], n, p[None]) * (above[:, None] < p[None])
        worst = max(worst, float(misses.sum(0).max()))
    return Check(
        name="interval of a probability",
        what="the truth is above its upper bound with probability at most alpha, and nearly that somewhere",
        passed=0.9 * ALPHA <= worst <= ALPHA + 1e-9,
        expected=f"{0.9 * ALPHA:.1%} to {ALPHA:.0%}",
        measured=f"{worst:.2%}",
    )


def null_checks(
    repetitions: int,
    rng: np.random.Generator,
    noise: Noise,
    progress: Progress,
    sizes: Sequence[int] = SIZES,
    canaries: Sequence[int] = CANARIES,
) -> Iterator[Check]:
    """Scores that know nothing, `repetitions` times at every number of them.

    A bound on epsilon or mu holds at 1 - ALPHA and so may be above 0 in that share of them; an interval's
    lower end, one of two, may be above chance in half of it.
    """
    yield _coverage()
    advantages: list[float] = []
    names = ("epsilon, any mechanism", "epsilon, Gaussian", "AUC", "true positives at 1 %")
    alarms = {name: [0] * len(sizes) for name in names}
    for at, n in enumerate(sizes):
        for _ in range(repetitions):
            members, others = rng.standard_normal((2, n))
            errors = bounds.held_out_errors(members, others, rng, separation)
            advantages.append(separation(errors))
            found = (
                bounds.epsilon_lower_bound(errors, DELTA) > 0,
                bounds.gaussian_epsilon_lower_bound(errors, DELTA) > 0,
                bounds.auc_interval(members, others)[0] > 0.5,
                bounds.tpr_at(members, others, FPR).low > FPR,
            )
            for name, alarm in zip(names, found, strict=True):
                alarms[name][at] += alarm
        progress(1 / (len(sizes) + len(canaries) + 1), f"null scores, {n:,} a side")
    mean, most = float(np.mean(advantages)), float(norm.isf(UNLUCKY)) / math.sqrt(len(advantages))
    yield Check(
        name="null scores: held-out half",
        what="a threshold that suits one half of the scores is no better than chance on the other",
        passed=mean <= most,
        expected=f"mean <= {most:.2f} deviations",
        measured=f"{mean:.2f}",
    )
    listed = ", ".join(f"{n:,}" for n in sizes)
    for name, rate in zip(names, (ALPHA, ALPHA, ALPHA / 2, ALPHA / 2), strict=True):
        yield alarms_check(
            f"null scores: {name}",
            f"what knows nothing is not called a leak; {listed} scores a side",
            alarms[name],
            repetitions,
            rate,
        )
    epsilons, mus = [0] * len(canaries), [0] * len(canaries)
    for at, m in enumerate(canaries):
        for _ in range(repetitions):
            found_ = one_run.audit_scores(
                rng.standard_normal(m), one_run.fair_coins(m, rng), 2 * (m // 4), DELTA
            )
            epsilons[at] += found_.epsilon_lower_bound > 0
            mus[at] += found_.mu_lower_bound > 0
        progress(1 / (len(sizes) + len(canaries) + 1), f"null scores of {m:,} canaries")
    listed = ", ".join(f"{m:,}" for m in canaries)
    for name, counted in (("epsilon", epsilons), ("mu", mus)):
        yield alarms_check(
            f"null scores: {name}, one run",
            f"coins that no score knows are not called a leak; {listed} canaries",
            counted,
            repetitions,
            ALPHA,
        )
    shown = [
        mechanism.audit_mechanism(
            1.0, 1.0, DELTA, mechanism.MIN_TRIALS, noise=noise, rng=rng, noising=deaf
        ).epsilon_lower_bound_gdp
        for _ in range(repetitions)
    ]
    progress(1 / (len(sizes) + len(canaries) + 1), "a mechanism that tells nothing")
    yield alarms_check(
        "null scores: mechanism",
        f"sums of noise alone show nothing; {mechanism.MIN_TRIALS} trials a side",
        [sum(value > 0 for value in shown)],
        repetitions,
        ALPHA,
    )


def known_checks(
    repetitions: int,
    rng: np.random.Generator,
    noise: Noise,
    progress: Progress,
    epsilons: Sequence[int] = tuple(KNOWN),
) -> Iterator[Check]:
    """The real noised sums at a known epsilon, `repetitions` audits of TRIALS trials on each side.

    Threshold and weight come from one half of the trials, errors from the other.
    """
    most = most_alarms(repetitions, ALPHA)
    for epsilon in epsilons:
        least, classic = KNOWN[epsilon]
        gaussian, general = [], []
        for _ in range(repetitions):
            found = mechanism.audit_mechanism(
                1 / gaussian_mu(epsilon, DELTA), 1.0, DELTA, TRIALS, noise=noise, rng=rng
            )
            gaussian.append(found.epsilon_lower_bound_gdp)
            general.append(found.epsilon_lower_bound_cp)
            progress(1 / (repetitions * len(epsilons)), f"noised sums of epsilon {epsilon}")
        for bound, values, wanted, good in (
            ("Gaussian", gaussian, f"median >= {least}", lambda v, least=least: v >= least),
            ("any mechanism", general, f"median {classic} within {_ABOUT:.0%}", _about(classic)),
        ):
            middle, above = float(np.median(values)), sum(value > epsilon for value in values)
            yield Check(
                name=f"epsilon {epsilon}: {bound}",
                what=f"noised sums of known epsilon, {TRIALS:,} trials a side, {repetitions} times: most of "
                "it is found, and the truth is not passed",
                passed=good(middle) and above <= most,
                expected=f"{wanted}, over {epsilon} in <= {most}",
                measured=f"median {middle:.2f}, over in {above}",
            )


def _about(value: float) -> Callable[[float], bool]:
    return lambda found: abs(found - value) <= _ABOUT * value


def one_run_checks(repetitions: int, rng: np.random.Generator, progress: Progress) -> Iterator[Check]:
    """The one-run bounds on true Gaussian games: above the truth in at most ALPHA of them."""
    epsilon, canaries = _ONE_RUN
    mu = gaussian_mu(epsilon, DELTA)
    guesses = one_run.planned_guesses(canaries, mu, DELTA)
    runs = []
    for _ in range(repetitions):
        coins = one_run.fair_coins(canaries, rng)
        scores = rng.standard_normal(canaries) + mu * coins
        runs.append(one_run.audit_scores(scores, coins, guesses, DELTA))
        progress(1 / repetitions, f"one run of {canaries} canaries at epsilon {epsilon}")
    most = most_alarms(repetitions, ALPHA)
    for name, values in (
        ("any mechanism", [run.epsilon_lower_bound for run in runs]),
        ("Gaussian", [run.epsilon_lower_bound_gdp for run in runs]),
    ):
        middle, above = float(np.median(values)), sum(value > epsilon for value in values)
        yield Check(
            name=f"epsilon {epsilon}, one run: {name}",
            what=f"scores of {canaries} canaries under known epsilon: some of it is found, and the truth is "
            "not passed",
            passed=middle > 0.1 * epsilon and above <= most,
            expected=f"median > {0.1 * epsilon:.1f}, over {epsilon} in <= {most}",
            measured=f"median {middle:.2f}, over in {above}",
        )
