"""Figures of a result: accuracies with intervals, and whether a difference is more than noise.

Pure functions on arrays of right and wrong answers; no models, no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from scipy.stats import t as student
from sklearn.metrics import f1_score

from securefl.result import Difference

RESAMPLES = 2000


def wilson(right: NDArray[np.bool_]) -> tuple[float, float]:
    """95 % Wilson interval of an accuracy from its (n,) answers."""
    interval = binomtest(int(right.sum()), len(right)).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def macro_f1(said: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """Mean over the labels that occur in `truth` (n,) of the F1 of `said` (n,) for that label.

    2 TP / (2 TP + FP + FN); a label that nobody has and nobody says does not count.
    """
    labels = np.unique(truth)
    return float(f1_score(truth, said, labels=labels, average="macro", zero_division=0.0))


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the ends of Student's 95 % interval over repetitions such as seeds; NaN ends for one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, mean - half, mean + half


def paired_difference(method: NDArray[np.bool_], baseline: NDArray[np.bool_], seed: int) -> Difference:
    """Mean accuracy over silos of a method minus the baseline's, on the same test rows.

    method, baseline: (silos, n) right or wrong. The 95 % percentile interval resamples test rows, keeping
    the answers of all models on a row together, since they are not independent. It speaks of the choice of
    test rows only, not of the seed of the training.
    """
    gaps = method.mean(axis=0, dtype=np.float64) - baseline.mean(axis=0, dtype=np.float64)
    draw = np.random.default_rng(seed).integers(0, len(gaps), (RESAMPLES, len(gaps)))
    low, high = np.quantile(gaps[draw].mean(axis=1), (0.025, 0.975))
    return Difference(
        value=float(gaps.mean()), interval=(float(low), float(high)), within_noise=bool(low <= 0 <= high)
    )
