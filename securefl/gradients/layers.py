"""Layers whose backward pass notes what their weight gradient is made of, and does not make it.

Each function below gives the layer's output and its input gradient; (input, output gradient) goes to a `Note`
instead of into a weight gradient ("book-keeping": Bu, Wang, Zha, Karypis, ICML 2023). Nothing here knows of
units, clipping or texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

Note = Callable[..., None]

# y = weight * x / sqrt(mean(x^2) + variance_epsilon). By name, so that no architecture is imported; Gemma's,
# for one, is another function.
_RMS_NORMS: Final = frozenset(
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}RMSNorm"
    for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "Granite")
)


def wide(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class _Linear(torch.autograd.Function):
    """x (..., d), weight (p, d), or (d, p) where `transposed`; notes x and the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, note: Note
    ) -> Tensor:
        out = functional.linear(x, weight.T if transposed else weight, bias)
        ctx.save_for_backward(x.to(out.dtype), weight)
        ctx.transposed, ctx.note = transposed, note
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.note(x, gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        weight = weight.to(gradient.dtype)
        return gradient @ (weight.T if ctx.transposed else weight), None, None, None, None


class _LayerNorm(torch.autograd.Function):
    """Over the last dimension; notes the normalised input and the gradient of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, note: Note) -> Tensor:
        out, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        ctx.note = note
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, weight, bias = ctx.saved_tensors
        ctx.note((x - mean).mul_(scale), gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        backward = torch.ops.aten.native_layer_norm_backward
        wanted = [True, False, False]
        into, _, _ = backward(gradient, x, weight.shape, mean, scale, weight, bias, wanted)
        return into, None, None, None, None


class _RmsNorm(torch.autograd.Function):
    """Over the last dimension; notes the normalised input and the gradient of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, note: Note) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.note = note
        return weight * (x * scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        normal = x * scale
        ctx.note(normal.clone(), gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        into = gradient * weight
        return (into - normal * (into * normal).mean(-1, keepdim=True)).mul_(scale), None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of `weight` by index; notes the indices and the gradient of the output."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, note: Note) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.note = note
        return functional.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        ctx.note(indices, gradient)
        return None, None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def _unrounded(x: Tensor) -> Tensor:
    """Norms are computed in float32 under autocast, as torch does on a GPU."""
    return wide(x) if torch.is_autocast_enabled(x.device.type) else x


def is_linear(layer: nn.Module) -> bool:
    """Whether the layer is y = W x + b, W transposed (GPT-2's Conv1D) or not."""
    return type(layer) in (nn.Linear, Conv1D)


def noting(layer: nn.Module, note: Note) -> Callable[[Tensor], Tensor] | None:
    """The layer's forward as one that notes; None for a layer that this module does not know."""
    weight: Any = getattr(layer, "weight", None)
    bias: Any = getattr(layer, "bias", None)
    if is_linear(layer):
        transposed = type(layer) is Conv1D
        return lambda x: _apply(_Linear, x, weight, bias, transposed, note)
    if type(layer) is nn.LayerNorm and weight is not None and weight.ndim == 1:
        return lambda x: _apply(_LayerNorm, _unrounded(x), weight, bias, layer.eps, note)
    if (
        type(layer) is nn.Embedding
        and not layer.scale_grad_by_freq
        and layer.max_norm is None
        and not layer.sparse
    ):
        return lambda indices: _apply(_Embedding, weight, indices, note)
    kind = type(layer)
    if f"{kind.__module__}.{kind.__qualname__}" in _RMS_NORMS:
        eps: Any = layer.variance_epsilon
        return lambda x: _apply(_RmsNorm, _unrounded(x), weight, eps, note)
    return None
