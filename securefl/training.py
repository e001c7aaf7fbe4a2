"""Fine-tuning of a small model on one silo's rows, and running it: probabilities and embeddings.

Pure in the sense that matters for a repeatable simulation: the result depends on the model's weights, the
rows and the seed alone, and the global generators are left as they were found. (The same
bits come out on the same machine and number of threads; on a GPU the sums of some kernels have no fixed
order.) Nothing here reads files, adds noise or sends anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from securefl.batches import by_length, padded_lengths
from securefl.data import Rows
from securefl.errors import Cancelled, DataError, SecureflError
from securefl.slm import Slm

_WEIGHT_DECAY = 0.01
_MAX_GRADIENT_NORM = 1.0
_WARM_UP = 0.1


def schedule(step: int, steps: int) -> float:
    """Factor on the learning rates at `step` (from 0) of `steps`: up over the first tenth, then down to 0.

    Never 0 at a step that is taken.
    """
    warm = max(1, round(_WARM_UP * steps))
    return (step + 1) / warm if step < warm else (steps - step) / (steps - warm + 1)


def parameter_groups(slm: Slm, learning_rate: float, head_learning_rate: float) -> list[dict[str, object]]:
    """AdamW's groups: encoder and head, each with decay on its matrices only."""
    head = {id(parameter) for parameter in slm.classifier.parameters()}
    return [
        {
            "params": [p for p in slm.trained() if (id(p) in head) == is_head and (p.ndim > 1) == is_matrix],
            "peak": head_learning_rate if is_head else learning_rate,
            "weight_decay": _WEIGHT_DECAY if is_matrix else 0.0,
        }
        for is_head in (False, True)
        for is_matrix in (False, True)
    ]


@contextmanager
def _training(slm: Slm, seed: int) -> Iterator[None]:
    """Training mode, with dropout drawn from `seed`; evaluation mode and the old global state after it."""
    devices = [slm.device] if slm.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        slm.train()
        try:
            yield
        finally:
            slm.eval()


def fit(
    slm: Slm,
    rows: Rows,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    head_learning_rate: float,
    seed: int,
    penalty: Callable[[Slm], Tensor] | None = None,
    label_smoothing: float = 0.0,
    targets: NDArray[np.float32] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> None:
    """Train `slm` in place on `rows`, and leave it in evaluation mode.

    AdamW (decay 0.01 on matrices), gradient norm clipped at 1, learning rates warmed up over the first tenth
    of the steps and lowered linearly after it. Every epoch is a new shuffle of all rows. The loss of a step
    is the cross-entropy of its batch plus, where given, `penalty(slm)`: a scalar with a gradient, as FedKC
    and FedProx add it. The head keeps a row for every label, also for labels that `rows` does not have.
    targets: (n, C) probabilities to learn in place of the labels.

    progress: called with (steps done, steps). cancelled: asked before every step.
    Raises DataError without rows or for a label outside the head, Cancelled, and SecureflError as soon as a
    loss or gradient is not finite; the model is then left half trained.
    """
    _check_labels(slm, rows)
    count = len(rows)
    if targets is not None and targets.shape != (count, len(slm.labels)):
        raise DataError(f"targets are {targets.shape}, and {count} rows have {len(slm.labels)} labels")
    groups = parameter_groups(slm, learning_rate, head_learning_rate)
    optimizer = torch.optim.AdamW(groups, lr=learning_rate)
    trained = slm.trained()
    steps = epochs * math.ceil(count / batch_size)
    rng = np.random.default_rng(seed)
    done = 0
    with _training(slm, seed):
        for _ in range(epochs):
            order = rng.permutation(count)
            for start in range(0, count, batch_size):
                if cancelled is not None and cancelled():
                    raise Cancelled(f"training of {slm.name} was cancelled after {done} of {steps} steps")
                chosen = order[start : start + batch_size]
                batch = slm.tokenize([rows.texts[i] for i in chosen])
                target = torch.from_numpy((rows.labels if targets is None else targets)[chosen])
                loss = cross_entropy(slm(batch), target.to(slm.device), label_smoothing=label_smoothing)
                if penalty is not None:
                    loss = loss + penalty(slm)
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * schedule(done, steps)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                norm = torch.nn.utils.clip_grad_norm_(trained, _MAX_GRADIENT_NORM)
                if not (torch.isfinite(loss) and torch.isfinite(norm)):
                    raise SecureflError(
                        f"training of {slm.name} became NaN or infinite at step {done + 1} of {steps}; lower "
                        "slm.learning_rate or slm.head_learning_rate"
                    )
                optimizer.step()
                done += 1
                if progress is not None:
                    progress(done, steps)


def first_batch(rows: Rows, batch_size: int, seed: int) -> Rows:
    """The rows, at most `batch_size`, that `fit` would take its first step on."""
    return rows.take(np.random.default_rng(seed).permutation(len(rows))[:batch_size])


def batch_gradient(slm: Slm, rows: Rows) -> dict[str, NDArray[np.float32]]:
    """The gradient of the mean cross-entropy of `rows`, all in one batch, by name and shape as `Slm.state`.

    Dropout off, float32; a parameter that the loss does not depend on has 0. The weights stay as they are.
    Raises DataError without rows or for a label outside the head, SecureflError where it is not finite.
    """
    _check_labels(slm, rows)
    training = slm.training
    slm.eval()
    try:
        target = torch.from_numpy(rows.labels).to(slm.device)
        loss = cross_entropy(slm(slm.tokenize(rows.texts)), target)
        found = torch.autograd.grad(loss, slm.trained(), allow_unused=True, materialize_grads=True)
    finally:
        slm.train(training)
    if not all(bool(torch.isfinite(one).all()) for one in found):
        raise SecureflError(f"the gradient of {slm.name} is NaN or infinite; lower slm.learning_rate")
    return {name: one.cpu().numpy() for name, one in zip(slm.trained_names(), found, strict=True)}


def _check_labels(slm: Slm, rows: Rows) -> None:
    if len(rows) == 0:
        raise DataError("there are no rows to train on; give every silo at least one training row")
    if rows.labels.min() < 0 or rows.labels.max() >= len(slm.labels):
        raise DataError(f"a row's label is not one of the {len(slm.labels)} labels of {slm.name}")


def _batches(
    slm: Slm, texts: Sequence[str], batch_size: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Places of texts, and these as a batch, padded as `batches` says."""
    lengths = padded_lengths(slm, texts)
    for chosen in by_length(lengths, batch_size):
        yield chosen, slm.tokenize([texts[i] for i in chosen], int(lengths[chosen[0]]))


@contextmanager
def _evaluating(slm: Slm) -> Iterator[None]:
    training = slm.training
    slm.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        slm.train(training)


def probabilities(slm: Slm, texts: Sequence[str], batch_size: int = 64) -> NDArray[np.float32]:
    """(n, C): the model's probabilities of the labels, in the order of `texts`, dropout off."""
    out = np.zeros((len(texts), len(slm.labels)), np.float32)
    with _evaluating(slm):
        for chosen, batch in _batches(slm, texts, batch_size):
            out[chosen] = slm(batch).softmax(-1).cpu().numpy()
    return out


def head_probabilities(slm: Slm, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, C): what `probabilities` gives for texts whose pooled vectors (n, d) are at hand already."""
    with _evaluating(slm):
        return np.asarray(slm.head(torch.from_numpy(pooled).to(slm.device)).softmax(-1).cpu().numpy())


@overload
def embed(
    slm: Slm, texts: Sequence[str], layer: Literal["pooled"], batch_size: int = 64
) -> NDArray[np.float32]: ...


@overload
def embed(
    slm: Slm, texts: Sequence[str], layer: int, batch_size: int = 64
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...


def embed(
    slm: Slm, texts: Sequence[str], layer: Literal["pooled"] | int, batch_size: int = 64
) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Vectors of n texts, in their order, dropout off.

    "pooled": (n, d), the masked mean of the last layer. A number: the outputs of that layer (`Slm.layer`; 0
    is the embedding layer), (n, S, e) with S = `slm.max_length` and zeros past a text's end, and the mask
    (n, S) of its tokens.
    """
    parts: list[tuple[list[int], NDArray[np.float32], NDArray[np.float32]]] = []
    with _evaluating(slm):
        for chosen, batch in _batches(slm, texts, batch_size):
            mask = batch["attention_mask"].float()
            if layer == "pooled":
                values = slm.pooled(batch)
            else:
                room = slm.max_length - mask.shape[1]
                mask = torch.nn.functional.pad(mask, (0, room))
                values = torch.nn.functional.pad(slm.layer(batch, layer), (0, 0, 0, room)) * mask.unsqueeze(
                    -1
                )
            parts.append((chosen, values.cpu().numpy(), mask.cpu().numpy()))
    # Every model has vectors of some width, also where there is no text to show it.
    shape = (
        parts[0][1].shape[1:] if parts else (slm.width,) if layer == "pooled" else (slm.max_length, slm.width)
    )
    vectors = np.zeros((len(texts), *shape), np.float32)
    for chosen, values_of, _ in parts:
        vectors[chosen] = values_of
    if layer == "pooled":
        return vectors
    masks = np.zeros((len(texts), slm.max_length), np.float32)
    for chosen, _, mask_of in parts:
        masks[chosen] = mask_of
    return vectors, masks
