"""The weighted mean of the silos' models (FedAvg: McMahan et al., AISTATS 2017, algorithm 1), or gradients.

Arrays in, arrays out; who may send what is settled before, and what is done with the mean after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from securefl.errors import ProtocolError, TooFewSilos, WrongShape
from securefl.release import Tensors, check_tensors


def weighted_mean(
    updates: Mapping[str, Tensors], weights: Mapping[str, float]
) -> dict[str, NDArray[np.float32]]:
    """sum_i p_i w_i with p_i = weight_i / sum of weights, one term a silo.

    updates: silo to its float32 arrays, all with the same names and shapes. weights: silo to its weight, the
    number of its training rows in FedAvg; not negative. Sums are float64 in the order of the silos' names, so
    the result does not depend on the order of arrival; it is float32.
    Raises TooFewSilos without an update, ProtocolError for a weight that is missing, negative or not finite
    or where all are 0, WrongShape and NonFiniteUpdate for an array, naming the silo.
    """
    if not updates:
        raise TooFewSilos("no silo sent a model, so there is nothing to average")
    if set(updates) != set(weights):
        odd = sorted(set(updates) ^ set(weights))[0]
        raise ProtocolError(f"silo {odd} has a model or a weight but not both, so it cannot be averaged")
    silos = sorted(updates)
    for silo in silos:
        if not (math.isfinite(weights[silo]) and weights[silo] >= 0):
            raise ProtocolError(f"the weight of {silo} is not a number of at least 0")
    total = sum(weights[silo] for silo in silos)
    if not 0 < total < math.inf:
        raise ProtocolError("the weights of all silos together are not a positive finite number")
    expected = {name: array.shape for name, array in updates[silos[0]].items()}
    if not expected:
        raise WrongShape(f"the update of {silos[0]} has no tensors")
    for silo in silos:
        check_tensors(updates[silo], expected, silo)
    mean = {}
    for name, shape in expected.items():
        accumulated = np.zeros(shape, np.float64)
        for silo in silos:
            accumulated += updates[silo][name] * np.float64(weights[silo] / total)
        mean[name] = accumulated.astype(np.float32)
    return mean


def sgd_step(model: Tensors, gradient: Tensors, rate: float) -> dict[str, NDArray[np.float32]]:
    """w - rate g, of arrays with the same names and shapes: the server's step of FedSGD (ibid., section 2).

    gradient: the mean of the silos', weighted by the rows that each is of, so that the step is the one on the
    mean loss over all of them. Computed in float64; it is float32. Raises WrongShape and NonFiniteUpdate.
    """
    check_tensors(gradient, {name: array.shape for name, array in model.items()}, "the mean gradient")
    return {
        name: (array - np.float64(rate) * gradient[name]).astype(np.float32) for name, array in model.items()
    }
