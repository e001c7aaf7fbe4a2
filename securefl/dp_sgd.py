"""Training under differential privacy: DP-SGD (Abadi et al., CCS 2016) of a small model, full or an adapter.

What is sampled, clipped, added and claimed is decided by one object, a `dp_terms.Mechanism`, so that no part
can be changed without the others. Touches no files and sends nothing.

Formal guarantees. One step: every unit of privacy (a row, or all rows of one `data.unit`) takes part with
probability q, independently of the others (Poisson sampling; there is no fixed batch). The gradient of its
mean cross-entropy is clipped over the head's parameters to the L2 norm C sqrt(s), over all others to
C sqrt(1 - s), and so to C over all (McMahan et al., ICLR 2018, clip layers apart in the same way). The
clipped gradients are added up, and N(0, (z C)^2) is added to every coordinate of the sum, also when nobody
took part. Adding or removing one unit moves the sum by at most C when it takes part and not at all otherwise:
a Poisson-subsampled Gaussian mechanism of noise multiplier z. Whatever is made of the sum afterwards (the
optimiser, the learning rates, a penalty that knows no rows) is postprocessing. The steps compose adaptively
(`accountants`).

What this rests on. Neither q nor the number of steps depends on the rows, so a silo's number of rows is not
told by them. The sampling and the noise come from the release's own generator, which is the operating
system's: with the run's seed, which the server knows, whoever took part would be known too and the sampling
would hide nobody. Dropout is off, so that a unit's gradient is a function of its rows and the weights and not
of its place in a batch. A unit whose gradient is not finite adds nothing. Sums and noise are float32: the
guarantee is that of the real-valued mechanism up to its rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securefl.batches import padded_lengths
from securefl.data import Rows
from securefl.dp_terms import Mechanism
from securefl.errors import Cancelled, DataError, SecureflError
from securefl.gaussian import Stream, SystemStream, add_gaussian
from securefl.gradients import clipped_sum
from securefl.gradients.clipped import Engine
from securefl.privacy import Noise, check_delta
from securefl.release import DpSgd
from securefl.slm import Slm
from securefl.training import parameter_groups, schedule

_PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


def _limited(rows: Rows, per_unit: int) -> list[NDArray[np.int64]]:
    """Each unit's rows, `per_unit` at most: those whose text has the smallest hash, then by label, a choice
    that depends on the unit's own rows alone. (Rows that still tie are the same.)
    """

    def key(index: np.int64) -> tuple[bytes, int]:
        text = rows.texts[int(index)].encode("utf-8", "surrogatepass")
        return hashlib.sha256(text).digest(), int(rows.labels[index])

    units = rows.by_unit()
    return [
        unit if len(unit) <= per_unit else np.array(sorted(unit, key=key)[:per_unit], np.int64)
        for unit in units
    ]


def _physical(
    units: Sequence[NDArray[np.int64]], lengths: Sequence[int], most: int
) -> Iterator[tuple[list[NDArray[np.int64]], int]]:
    """The units in batches of one padded length and at most `most` rows, and that length.

    A unit stays whole, also where it alone has more rows.
    """
    batch: list[NDArray[np.int64]] = []
    rows = length = 0
    for place in sorted(range(len(units)), key=lengths.__getitem__):
        if batch and (rows + len(units[place]) > most or lengths[place] != length):
            yield batch, length
            batch, rows = [], 0
        length = lengths[place]
        batch.append(units[place])
        rows += len(units[place])
    if batch:
        yield batch, length


class _Sums:
    """The clipped sums of one step: one row of memory for all, cut into the shapes of the parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        parts = torch.split(self.flat, [p.numel() for p in parameters])
        self.parts = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def fit_private(
    slm: Slm,
    rows: Rows,
    mechanism: Mechanism,
    noise: Noise,
    *,
    learning_rate: float,
    head_learning_rate: float,
    physical_batch: int,
    engine: Engine = "auto",
    precision: str = "float32",
    penalty: Callable[[Slm], Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> DpSgd:
    """Train `slm` in place by `mechanism.steps` steps of DP-SGD, and return the claim on its weights.

    AdamW with the learning rates and schedule of `training.fit`, on the noisy mean gradient. penalty: a
    scalar with a gradient that knows nothing of the rows (FedKC's, FedProx's); it is added unclipped.
    physical_batch: rows computed at once, on which nothing but memory depends. noise: where sampling and
    noise come from. `slm` is in evaluation mode before and after.

    Nothing about the rows is told but by the weights: no loss, no norm, no batch size. Raises DataError
    without rows or for a label outside the head, ConfigError as `Mechanism.claim` and for a delta that is no
    less than 1 over the number of units, Cancelled (the model is then half trained; what was computed so far
    must not leave), SecureflError where the weights become infinite.
    """
    if len(rows) == 0:
        raise DataError("there are no rows to train on; give every silo at least one training row")
    if rows.labels.min() < 0 or rows.labels.max() >= len(slm.labels):
        raise DataError(f"a row's label is not one of the {len(slm.labels)} labels of {slm.name}")
    units = _limited(rows, mechanism.per_unit)
    own = padded_lengths(slm, rows.texts)
    lengths = [int(own[unit].max()) for unit in units]
    check_delta(mechanism.delta, len(units), "this silo", "dp_sgd")
    claim = mechanism.claim(noise)
    slm.eval()
    trained = slm.trained()
    optimizer = torch.optim.AdamW(parameter_groups(slm, learning_rate, head_learning_rate), lr=learning_rate)
    sums = _Sums(trained)
    # From a seed only where the claim says so.
    generator: Stream = noise.draw() if noise.simulated else SystemStream()
    head = {id(parameter) for parameter in slm.classifier.parameters()}
    groups = [int(id(parameter) in head) for parameter in trained]
    with clipped_sum(slm, engine, groups=groups, autocast=_PRECISIONS[precision]) as gradients:
        for step in range(mechanism.steps):
            taken = np.flatnonzero(generator.random(len(units)) < mechanism.sample_rate)
            sums.flat.zero_()
            physical = _physical(
                [units[unit] for unit in taken], [lengths[unit] for unit in taken], physical_batch
            )
            for chosen, length in physical:
                _stop(cancelled, slm, step, mechanism.steps)
                gradients.add(*_batch(slm, rows, chosen, length), mechanism.clips, sums.parts)
            _stop(cancelled, slm, step, mechanism.steps)
            add_gaussian(sums.flat, mechanism.noise_multiplier * mechanism.clip, generator.bytes(32))
            sums.flat.div_(mechanism.expected_batch)
            optimizer.zero_grad()
            if penalty is not None:
                with torch.enable_grad():
                    extra = penalty(slm)
                if extra.requires_grad:  # not where all peers' centroids were withheld: a constant then
                    torch.autograd.backward(extra)
            for parameter, part in zip(trained, sums.parts, strict=True):
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(step, mechanism.steps)
            optimizer.step()
            if progress is not None:
                progress(step + 1, mechanism.steps)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
        raise SecureflError(f"training of {slm.name} became NaN or infinite; lower the learning rates")
    return claim


def _stop(cancelled: Callable[[], bool] | None, slm: Slm, step: int, steps: int) -> None:
    if cancelled is not None and cancelled():
        raise Cancelled(f"training of {slm.name} was cancelled after {step} of {steps} steps")


def _batch(
    slm: Slm, rows: Rows, units: Sequence[NDArray[np.int64]], length: int
) -> tuple[Mapping[str, Tensor], Tensor, Tensor]:
    """The rows of some units as the model reads them, their labels, and which unit each is of.

    length: all of them are padded to it; it depends on each unit alone (`batches`).
    """
    chosen = np.concatenate(units)
    whose = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    batch = slm.tokenize([rows.texts[row] for row in chosen], length)
    labels = torch.from_numpy(rows.labels[chosen]).to(slm.device)
    return batch, labels, torch.from_numpy(whose).to(slm.device)
