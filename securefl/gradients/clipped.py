"""Sums of clipped gradients; see the package."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from securefl.errors import SecureflError
from securefl.gradients.bookkeeping import BookKeeping
from securefl.gradients.units import Units
from securefl.slm import Slm

Engine = Literal["auto", "book-keeping", "hooks", "ghost"]


class ClippedSum(Protocol):
    """Adds up clipped gradients of units; `name` is the engine's, for the record."""

    name: str

    def add(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Tensor,
        clips: Sequence[float],
        sums: Sequence[Tensor],
    ) -> None:
        """Add the clipped gradients of a physical batch's units to `sums`, in place.

        batch: what `Slm.tokenize` gives for B rows. labels: (B,) int64. units: (B,) int64, the unit of each
        row; all rows of a unit are in this batch. clips: C_k > 0, a gradient's largest L2 norm over the
        parameters of group k. sums: float32, one for each of `Slm.trained()`, in its order and shapes.

        With g_u the gradient of the mean cross-entropy of unit u's rows over the trained parameters of one
        group, what is added is the sum over u of min(1, C_k / |g_u|) g_u: with a single group that of Abadi
        et al. (CCS 2016, algorithm 1) without its noise, with several that of McMahan et al. (ICLR 2018,
        per-layer clipping); one unit moves all sums together by at most the root of the sum of the C_k^2. A
        unit whose loss or gradient is not finite adds nothing, and whether it is depends on its own rows
        alone. No rows, no pass: an empty Poisson batch adds nothing.
        Raises SecureflError for a model in training mode and for tensors that do not fit.
        """


class _Gradients(Protocol):
    losses: Tensor

    def squares(self, units: Units, groups: Sequence[int]) -> Tensor: ...

    def add_to(self, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None: ...


class _Engine(Protocol):
    name: str

    def attached(self) -> AbstractContextManager[None]: ...

    def run(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Units,
        precision: AbstractContextManager[object],
    ) -> _Gradients: ...


class _Sum:
    def __init__(
        self, slm: Slm, engine: _Engine, groups: Sequence[int], autocast: torch.dtype | None
    ) -> None:
        self.name = engine.name
        self._slm, self._engine, self._groups, self._autocast = slm, engine, groups, autocast

    def add(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Tensor,
        clips: Sequence[float],
        sums: Sequence[Tensor],
    ) -> None:
        self._check(batch, labels, units, clips, sums)
        while len(labels):
            grouped = Units.of(units)
            with torch.enable_grad():
                gradients = self._engine.run(batch, labels, grouped, self._precision())
            with torch.no_grad():
                squares = gradients.squares(grouped, self._groups)
                finite = squares.isfinite().all(0) & grouped.summed(gradients.losses.detach()).isfinite()
                if finite.all():
                    scales = (squares.new_tensor(clips)[:, None] / squares.sqrt()).clamp_(max=1)
                    rows = scales[:, grouped.of_rows]
                    gradients.add_to(sums, [rows[group] for group in self._groups])
                    return
                del gradients
                # Zero times NaN is NaN, so such rows must not be in the batch at all.
                kept = finite[grouped.of_rows]
                batch = {key: tensor[kept] for key, tensor in batch.items()}
                labels, units = labels[kept], units[kept]

    def _precision(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._slm.device.type, self._autocast)

    def _check(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Tensor,
        clips: Sequence[float],
        sums: Sequence[Tensor],
    ) -> None:
        if self._slm.training:
            raise SecureflError(
                f"{self._slm.name} is in training mode; clipped gradients are without dropout"
            )
        if len(clips) != 1 + max(self._groups) or not all(math.isfinite(clip) and clip > 0 for clip in clips):
            raise SecureflError("the clip norm of every group of parameters must be a positive number")
        rows = len(labels)
        if labels.ndim != 1 or units.shape != labels.shape or any(len(one) != rows for one in batch.values()):
            raise SecureflError("rows, labels and units of a batch must be as many")
        shapes = [parameter.shape for parameter in self._slm.trained()]
        if [total.shape for total in sums] != shapes or not all(total.is_contiguous() for total in sums):
            raise SecureflError(
                f"the sums do not have the shapes of the trained parameters of {self._slm.name}"
            )


@contextmanager
def _as_it_was(slm: Slm) -> Iterator[None]:
    """Every attribute of modules and parameters, hook and .grad is after the block what it was before it."""
    holders: list[nn.Module | nn.Parameter] = [*slm.modules(), *slm.parameters()]
    attributes = [(holder, dict(vars(holder))) for holder in holders]
    hooks = [
        (registered, dict(registered))
        for module in slm.modules()
        for name, registered in vars(module).items()
        if name.endswith("_hooks")
    ]
    gradients = [(parameter, parameter.grad) for parameter in slm.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for holder, before in attributes:
            vars(holder).clear()
            vars(holder).update(before)
        for registered, hooks_before in hooks:
            registered.clear()
            registered.update(hooks_before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _check_rows(slm: Slm) -> None:
    """Refuse a model in which a trained layer sees anything but one entry for each row of the batch.

    A table of places that is looked up once for all rows, say, gives no row a gradient of its own, and
    with as many tokens as rows no shape would tell.
    """
    one = slm.tokenize([""])
    rows = one["input_ids"].shape[1] + 2
    wrong: list[str] = []
    hooks = []
    for name, module in slm.model.named_modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):

            def look(
                _: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], name: str = name
            ) -> None:
                if (*given, *named.values())[0].shape[0] != rows:
                    wrong.append(name)

            hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
    try:
        with torch.no_grad():
            slm({key: tensor.expand(rows, -1).contiguous() for key, tensor in one.items()})
    finally:
        for hook in hooks:
            hook.remove()
    if wrong:
        raise SecureflError(
            f"{slm.name}: its module {wrong[0]} does not treat rows one by one, so there is no clipped sum; "
            "take another model or slm.train_embeddings = false"
        )


def _engine(slm: Slm, engine: Engine) -> _Engine:
    if engine in ("auto", "book-keeping"):
        own = BookKeeping(slm)
        uncovered = own.uncovered()
        if uncovered is None:
            return own
        if engine == "book-keeping":
            raise SecureflError(
                f"{slm.name}: book-keeping does not know the module {uncovered}; use the engine auto or hooks"
            )
    # Seconds to import, and most models need none of it.
    from securefl.gradients.opacus_engines import Ghost, Hooks

    return Ghost(slm) if engine == "ghost" else Hooks(slm)


@contextmanager
def clipped_sum(
    slm: Slm,
    engine: Engine = "auto",
    *,
    groups: Sequence[int] | None = None,
    autocast: torch.dtype | None = None,
) -> Iterator[ClippedSum]:
    """Sums of clipped gradients of `slm`, which must be in evaluation mode and is left exactly as it was.

    engine: "book-keeping" (one backward pass; the common layers), "hooks" (Opacus, per-sample gradients, any
    layer), "ghost" (Opacus, two backward passes, units of one row), or "auto": book-keeping where it
    knows every trained layer, hooks otherwise. groups: for each of `Slm.trained()` the number, from 0 on, of
    the group that it is clipped with; None: all together. autocast: torch.bfloat16 runs the passes in mixed
    precision; norms and sums are float32. Raises SecureflError.

    It may stay open over many steps, which saves a small pass each: between calls of `add` the model is as
    ever, and may run, change its weights and have gradients. Its .grad are set aside meanwhile.

        with clipped_sum(slm) as gradients:
            for batch, labels, units in physical_batches:
                gradients.add(batch, labels, units, [clip], sums)
    """
    if any(module.training for module in slm.modules()):
        raise SecureflError(f"{slm.name} is in training mode; clipped gradients are without dropout")
    if autocast not in (None, torch.bfloat16):
        raise SecureflError("mixed precision is bfloat16 or none: float16 needs a loss scale")
    trained = len(slm.trained())
    chosen_groups = tuple(groups or (0,) * trained)
    if len(chosen_groups) != trained or set(chosen_groups) != set(range(1 + max(chosen_groups, default=0))):
        raise SecureflError("every trained parameter has the number of a group, from 0 on without gaps")
    with _as_it_was(slm):
        _check_rows(slm)
        chosen = _engine(slm, engine)
        with chosen.attached():
            yield _Sum(slm, chosen, chosen_groups, autocast)
