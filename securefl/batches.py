"""Texts in batches, each text padded to a length that depends on itself alone.

In a batch padded to its longest text a text's numbers depend on the others: by rounding for weights as they
are trained, and by as much as they like for weights that somebody chose so that padding overflows. No claim
about one row would then hold, so whatever may end under a claim is computed by way of this room. (What a
matrix product's number of rows does to its rounding remains.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from securefl.slm import Slm

_STEP = 16  # tokens: fine enough that little is padding, coarse enough that batches are full


def padded_lengths(slm: Slm, texts: Sequence[str]) -> NDArray[np.int64]:
    """(n,) tokens of each text, rounded up to a multiple of 16 or to `max_length`."""
    if not len(texts):
        return np.zeros(0, np.int64)
    found = np.array(slm.lengths(texts), np.int64)
    return np.asarray(np.minimum(-(-found // _STEP) * _STEP, slm.max_length))


def by_length(lengths: NDArray[np.int64], most: int) -> list[list[int]]:
    """Places of 0..n-1 in batches of at most `most`, all of one batch of the same length."""
    batches: list[list[int]] = []
    for place in np.argsort(lengths, kind="stable").tolist():
        if batches and len(batches[-1]) < most and lengths[batches[-1][0]] == lengths[place]:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
