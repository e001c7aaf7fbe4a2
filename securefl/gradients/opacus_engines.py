"""Per-sample gradients and ghost norms by Opacus, for layers that book-keeping does not know and to check it.

Only Opacus's modules serve here, not its optimizers, samplers or accountants. Its differences are evened
out: it looks at layers in training mode alone (those with parameters are put into it, dropout is not), gives
the row of an embedding's padding token a gradient, cannot take a LayerNorm without bias, and computes norms
in the precision of autocast.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from securefl.errors import SecureflError
from securefl.gradients.bookkeeping import row_losses
from securefl.gradients.layers import wide
from securefl.gradients.units import Units
from securefl.slm import Slm, masked_mean

_root = logging.getLogger()
_handlers = list(_root.handlers)
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping  # noqa: E402

for _handler in set(_root.handlers) - set(_handlers):  # opacus calls logging.basicConfig when imported
    _root.removeHandler(_handler)


class _Logits(nn.Module):
    """(B, C) logits with the head run once, on the tokens: Opacus counts how often a layer runs."""

    def __init__(self, slm: Slm) -> None:
        super().__init__()
        self.model = slm.model

    def forward(self, inputs: Mapping[str, Any], mask: Tensor) -> Tensor:
        return masked_mean(self.model(**inputs).logits, mask)


def _without_padding(sampler: Any) -> Any:
    """Opacus's sampler of an embedding, with no gradient for the row of `padding_idx`, as torch has it."""

    def sample(layer: nn.Embedding, given: Sequence[Tensor], gradient: Tensor) -> Any:
        if layer.padding_idx is not None:
            gradient = gradient * (given[0] != layer.padding_idx).unsqueeze(-1)
        return sampler(layer, given, gradient)

    return sample


def _samplers(known: Mapping[Any, Any], slm: Slm) -> dict[Any, Any]:
    norms = [m for m in slm.model.modules() if type(m) is nn.LayerNorm]
    kept = dict(known)
    if any(m.bias is None for m in norms):
        kept.pop(nn.LayerNorm, None)  # torch.func takes its place
    kept[nn.Embedding] = _without_padding(known[nn.Embedding])
    return kept


@contextmanager
def _unwarned() -> Iterator[None]:
    """Without torch's word that a layer whose input needs no gradient has none to show its hook."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        yield


class _Widening:
    """Mixed into Opacus's modules: what hooks capture is widened to float32 before anything is summed."""

    def rearrange_grad_samples(self, **given: Any) -> tuple[list[Tensor], Tensor]:
        activations, gradient = super().rearrange_grad_samples(**given)  # type: ignore[misc]
        return [wide(one) for one in activations], wide(gradient)


class _Opacus(ABC):
    """What hooks and ghost share: attaching, and clearing what an earlier pass left on parameters."""

    name: str

    def __init__(self, slm: Slm) -> None:
        self._slm = slm
        self._module: Any = None

    @abstractmethod
    def _wrap(self) -> Any:
        """The Opacus module around the model."""

    def _layers(self) -> list[nn.Module]:
        return [
            module
            for module in self._slm.model.modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on inside the block. The caller puts modules and parameters back as they were."""
        for layer in self._layers():
            if any(True for _ in layer.children()) or getattr(layer, "dropout", None):
                raise SecureflError(
                    f"{self._slm.name}: a {type(layer).__name__} has parameters of its own beside further "
                    "layers or dropout, so Opacus cannot be run on it without dropout"
                )
        with self._refusing():
            self._module = self._wrap()
        self._module.disable_hooks()
        for layer in self._layers():
            layer.training = True
        try:
            yield
        finally:
            self._module.cleanup()
            self._module = None

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            raise SecureflError(f"{self._slm.name}: Opacus cannot handle this model ({error})") from error

    def _pass(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Units,
        precision: AbstractContextManager[object],
        *,
        keep_graph: bool,
    ) -> Tensor:
        """(B,) losses of a forward and a backward pass; hooks are on during these alone."""
        for layer in self._layers():
            for attribute in ("activations", "max_batch_len"):
                vars(layer).pop(attribute, None)
        for parameter in self._slm.trained():
            vars(parameter).update(grad_sample=None, _forward_counter=0)
            vars(parameter).pop("_current_grad_sample", None)
            vars(parameter).pop("_norm_sample", None)
        self._module.enable_hooks()
        try:
            with self._refusing(), precision:
                logits = self._module(self._slm.inputs(batch), batch["attention_mask"])
            losses = row_losses(logits, labels, units)
            with _unwarned():
                trained = self._slm.trained()
                torch.autograd.grad(losses.sum(), trained, retain_graph=keep_graph, allow_unused=True)
        finally:
            self._module.disable_hooks()
        return losses


class _Samples:
    """Per-unit gradients of every parameter."""

    def __init__(self, losses: Tensor, gradients: list[Tensor | None]) -> None:
        self.losses = losses
        self._gradients = gradients

    def squares(self, units: Units, groups: Sequence[int]) -> Tensor:
        """(G, U) float64: squared norms over each group of parameters."""
        shape = 1 + max(groups), units.count
        squares = torch.zeros(shape, dtype=torch.float64, device=units.of_rows.device)
        for i, rows in enumerate(self._gradients):
            if rows is not None:
                self._gradients[i] = per_unit = units.summed(rows)
                norms = torch.linalg.vector_norm(per_unit.flatten(1), dim=1)
                squares[groups[i]] += norms.double().square()
        self._of_units = units
        return squares

    def add_to(self, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """Add the sum of the units' gradients times each parameter's `scales` (B,) of their rows."""
        units = self._of_units
        for total, gradients, rows in zip(sums, self._gradients, scales, strict=True):
            if gradients is not None:
                own = rows.new_zeros(units.count).index_copy_(0, units.of_rows, rows)
                total.view(-1).addmv_(gradients.flatten(1).T, own.to(gradients.dtype))


class Hooks(_Opacus):
    """Opacus's GradSampleModule: per-sample gradients of every parameter, B times the model's size."""

    name = "opacus hooks"

    def _wrap(self) -> Any:
        class Module(_Widening, GradSampleModule):  # type: ignore[misc, unused-ignore]
            GRAD_SAMPLERS = _samplers(GradSampleModule.GRAD_SAMPLERS, self._slm)

        return Module(_Logits(self._slm), loss_reduction="sum")

    def run(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Units,
        precision: AbstractContextManager[object],
    ) -> _Samples:
        """One forward pass in a `precision` and one backward pass."""
        losses = self._pass(batch, labels, units, precision, keep_graph=False)
        gradients = [vars(p).pop("grad_sample") for p in self._slm.trained()]
        return _Samples(losses.detach(), gradients)


class _Graph:
    """Norms of every row's gradient, and the graph that gives their weighted sum."""

    def __init__(self, engine: Ghost, losses: Tensor, norms: list[Tensor | None]) -> None:
        self.losses = losses
        self._engine, self._norms = engine, norms

    def squares(self, units: Units, groups: Sequence[int]) -> Tensor:
        """(G, U) float64: squared norms over each group of parameters; units are rows."""
        assert units.single
        shape = 1 + max(groups), units.count
        squares = torch.zeros(shape, dtype=torch.float64, device=units.of_rows.device)
        for group, norm in zip(groups, self._norms, strict=True):
            if norm is not None:
                squares[group] += norm.double().square()
        self._groups = groups
        return squares

    def add_to(self, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """Add the sum of the rows' gradients times each parameter's `scales` (B,), by a backward pass for
        each group.
        """
        for group in range(1 + max(self._groups)):
            places = [place for place, its in enumerate(self._groups) if its == group]
            with torch.enable_grad():
                weighted = (self.losses * scales[places[0]].to(self.losses.dtype)).sum()
            for place, gradient in zip(places, self._engine.second(weighted, places), strict=True):
                if gradient is not None:
                    sums[place] += gradient


class Ghost(_Opacus):
    """Opacus's fast gradient clipping: norms from a first backward pass, the clipped sum from a second."""

    name = "opacus ghost"

    def _wrap(self) -> Any:
        class Module(_Widening, GradSampleModuleFastGradientClipping):  # type: ignore[misc, unused-ignore]
            GRAD_SAMPLERS = _samplers(GradSampleModuleFastGradientClipping.GRAD_SAMPLERS, self._slm)
            NORM_SAMPLERS = {  # noqa: RUF012 - as Opacus has it
                **GradSampleModuleFastGradientClipping.NORM_SAMPLERS,
                nn.Embedding: _without_padding(
                    GradSampleModuleFastGradientClipping.NORM_SAMPLERS[nn.Embedding]
                ),
            }

        return Module(_Logits(self._slm), loss_reduction="sum", max_grad_norm=1.0)

    def run(
        self,
        batch: Mapping[str, Tensor],
        labels: Tensor,
        units: Units,
        precision: AbstractContextManager[object],
    ) -> _Graph:
        """One forward pass in a `precision` and one backward pass; SecureflError for units of many rows."""
        if not units.single:
            raise SecureflError(
                "Opacus's ghost clipping knows norms of rows alone; take another for units of several rows"
            )
        losses = self._pass(batch, labels, units, precision, keep_graph=True)
        norms = [vars(p).pop("_norm_sample", None) for p in self._slm.trained()]
        return _Graph(self, losses, norms)

    def second(self, loss: Tensor, places: Sequence[int]) -> Sequence[Tensor | None]:
        """Gradients of some of the trained parameters; the graph is kept."""
        trained = self._slm.trained()
        with _unwarned():
            return torch.autograd.grad(
                loss, [trained[place] for place in places], retain_graph=True, allow_unused=True
            )
