"""What becomes of the silos' models or gradients: the weighted mean, or a robust middle of them.

FedAvg: McMahan et al., AISTATS 2017, algorithm 1.

Arrays in, arrays out; who may send what is settled before, and what is done with the mean after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from securefl.errors import ProtocolError, TooFewSilos, WrongShape
from securefl.release import Tensors, check_tensors

_MOST_WEIGHT = 1e15
_CHUNK = 2**15  # values


class RunningMean:
    """sum_i p_i w_i with p_i = weight_i / sum of weights, one silo after another.

    Sums are float64, so that in memory there are two vectors of float32 beside the one that is added. In
    another order the mean may differ in a last bit.
    """

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._total = 0.0

    def add(self, silo: str, update: Tensors, weight: float) -> None:
        """Take one silo's float32 arrays. weight: in FedAvg the number of its training rows; not negative.

        Raises ProtocolError for a weight that is negative, not finite or above 1e15, WrongShape and
        NonFiniteUpdate for an array, naming the silo; the mean is then what it was.
        """
        if not 0 <= weight <= _MOST_WEIGHT:
            raise ProtocolError(f"the weight of {silo} is not a number from 0 to {_MOST_WEIGHT:g}")
        if not update:
            raise WrongShape(f"the update of {silo} has no tensors")
        like = self._sums or update
        check_tensors(update, {name: array.shape for name, array in like.items()}, silo)
        if not self._sums:
            self._sums = {name: np.zeros(array.shape) for name, array in update.items()}
        for name, array in update.items():
            total, values = self._sums[name].reshape(-1), array.reshape(-1)
            for start in range(0, len(values), _CHUNK):  # a product of the whole would be a vector more
                part = slice(start, start + _CHUNK)
                total[part] += values[part] * np.float64(weight)
        self._total += weight

    def mean(self) -> dict[str, NDArray[np.float32]]:
        """The mean, float32; the sums are used up.

        Raises TooFewSilos without a silo, ProtocolError where all weights are 0.
        """
        if not self._sums:
            raise TooFewSilos("no silo sent a model, so there is nothing to average")
        if not self._total > 0:
            raise ProtocolError("the weights of all silos are 0, so there is nothing to average")
        mean = {}
        for name in list(self._sums):
            total = self._sums.pop(name)
            total /= self._total
            mean[name] = total.astype(np.float32)
        return mean


def weighted_mean(
    updates: Mapping[str, Tensors], weights: Mapping[str, float]
) -> dict[str, NDArray[np.float32]]:
    """The `RunningMean` of all silos at once, in the order of their names, whatever order they are in.

    updates: silo to its float32 arrays, all with the same names and shapes. weights: silo to its weight.
    Raises as `RunningMean`, and ProtocolError for a silo without a weight.
    """
    if set(updates) != set(weights):
        odd = sorted(set(updates) ^ set(weights))[0]
        raise ProtocolError(f"silo {odd} has a model or a weight but not both, so it cannot be averaged")
    running = RunningMean()
    for silo in sorted(updates):
        running.add(silo, updates[silo], weights[silo])
    return running.mean()


def coordinate_median(updates: Mapping[str, Tensors]) -> dict[str, NDArray[np.float32]]:
    """The median of the silos' values, coordinate by coordinate; of an even number the middle two's mean.

    Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, definition 1. Every silo counts alike: a
    weight that a silo states itself would let one outvote the others. Needs more honest silos than others.
    updates, errors: as for `weighted_mean`.
    """
    return _by_coordinate(updates, lambda stacked: np.median(stacked, axis=0))


def trimmed_mean(updates: Mapping[str, Tensors], share: float) -> dict[str, NDArray[np.float32]]:
    """The mean of the silos' values without the largest and the smallest, coordinate by coordinate.

    share: of the n silos floor(share n), and at least 1, are left out at each end (ibid., definition 2); it
    has to be at least the share of silos that may be false. All silos count alike. updates, errors: as for
    `weighted_mean`; TooFewSilos too where nothing would be left.
    """
    cut = max(1, int(share * len(updates)))
    if updates and 2 * cut >= len(updates):
        raise TooFewSilos(
            f"of {len(updates)} silos none is left without {cut} at each end; lower protection.trim, or wait "
            "for more silos"
        )
    return _by_coordinate(updates, lambda stacked: np.sort(stacked, axis=0)[cut : len(stacked) - cut].mean(0))


def _by_coordinate(
    updates: Mapping[str, Tensors], middle: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> dict[str, NDArray[np.float32]]:
    """What `middle` makes of each array of all silos, (silos, ...) float64 to (...)."""
    silos, shapes = _checked(updates)
    return {
        name: middle(np.stack([updates[silo][name] for silo in silos]).astype(np.float64)).astype(np.float32)
        for name in shapes
    }


def _checked(updates: Mapping[str, Tensors]) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """The silos in order, and the shapes that all their arrays have. Raises as `weighted_mean`."""
    if not updates:
        raise TooFewSilos("no silo sent a model, so there is nothing to average")
    silos = sorted(updates)
    expected = {name: array.shape for name, array in updates[silos[0]].items()}
    if not expected:
        raise WrongShape(f"the update of {silos[0]} has no tensors")
    for silo in silos:
        check_tensors(updates[silo], expected, silo)
    return silos, expected


def change_norm(model: Tensors, start: Tensors) -> float:
    """L2 norm of the change of all weights together, from `start` to `model`."""
    squares = (
        float(((np.asarray(array, np.float64) - start[name]) ** 2).sum()) for name, array in model.items()
    )
    return math.sqrt(sum(squares))


def bounded_change(model: Tensors, start: Tensors, most: float) -> dict[str, NDArray[np.float32]]:
    """`model`, with its change from `start` scaled down to an L2 norm of `most` where it is larger."""
    norm = change_norm(model, start)
    factor = most / norm if norm > most else 1.0
    return {
        name: (start[name] + factor * (np.asarray(array, np.float64) - start[name])).astype(np.float32)
        for name, array in model.items()
    }


def sgd_step(model: Tensors, gradient: Tensors, rate: float) -> dict[str, NDArray[np.float32]]:
    """w - rate g, of arrays with the same names and shapes: the server's step of FedSGD (ibid., section 2).

    gradient: the mean of the silos', weighted by the rows that each is of, so that the step is the one on the
    mean loss over all of them. Computed in float64; it is float32. Raises WrongShape and NonFiniteUpdate.
    """
    check_tensors(gradient, {name: array.shape for name, array in model.items()}, "the mean gradient")
    return {
        name: (array - np.float64(rate) * gradient[name]).astype(np.float32) for name, array in model.items()
    }
