"""The layers of a language model below its adapter: run once for the model that learns and for the original.

An adapter on the upper half leaves the lower half as it was loaded, so that both models have the same numbers
there. Nothing here knows tokens, adapters or losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from securefl.errors import ModelError


class LowerLayers:
    """The first layers of a model: what they gave can be given again instead of computed."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self._blocks = blocks

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @contextmanager
    def kept(self) -> Iterator[list[deque[Any]]]:
        """Inside the block every layer runs, and what it gives is kept, call by call."""
        outputs: list[deque[Any]] = [deque() for _ in self._blocks]

        def keep(kept: deque[Any]) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, _given, output: kept.append(output)

        with ExitStack() as stack:
            for block, own in zip(self._blocks, outputs, strict=True):
                stack.callback(block.register_forward_hook(keep(own)).remove)
            yield outputs

    @contextmanager
    def given_again(self, outputs: list[deque[Any]]) -> Iterator[None]:
        """Inside the block no layer runs: each gives what it gave, in the same order of calls."""

        def give(kept: deque[Any]) -> Callable[..., Any]:
            return lambda *_, **__: kept.popleft()

        with ExitStack() as stack:
            for block, own in zip(self._blocks, outputs, strict=True):
                stack.callback(setattr, block, "forward", block.forward)
                block.forward = give(own)
            yield

    def share_cache(self, source: DynamicCache, target: DynamicCache) -> None:
        """Give `target`, which these layers did not fill, their keys and values of `source`."""
        for i in range(len(self._blocks)):
            target.layers[i] = copy(source.layers[i])


def upper_half(model: PreTrainedModel, name: str) -> tuple[LowerLayers, list[str]]:
    """The lower half of a causal model's layers, and the full names of the linear maps in the upper half.

    name: of the model, for the error. Of an odd number of layers the middle one is in the upper half. Raises
    ModelError where the model has no list of as many layers as its config says.
    """
    count = model.config.get_text_config().num_hidden_layers
    for path, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList) and len(blocks) == count:
            lower = count // 2
            return LowerLayers([*blocks][:lower]), [
                f"{path}.{i}.{inner}"
                for i in range(lower, count)
                for inner, module in blocks[i].named_modules()
                if isinstance(module, (nn.Linear, Conv1D))
            ]
    raise ModelError(
        f"{name}: a {model.config.model_type} model's layers are in no list, so that its upper half is not "
        'known; write crosslm.lora_layers = "all"'
    )
