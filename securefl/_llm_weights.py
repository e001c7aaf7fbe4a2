"""The weights of the server's language model: which of them train, what they were at first, their optimizer.

With LoRA one copy serves twice: with the adapter it is the model that learns, without it the frozen original.
Full fine-tuning trains every weight and keeps the original as a second copy. Nothing here knows tokens or
losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from securefl._llm_place import Place, device_of, precision
from securefl._lower_layers import LowerLayers, upper_half
from securefl._model_files import load_quietly
from securefl.errors import ModelError
from securefl.models import load_llm
from securefl.release import Tensors, check_tensors

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter
_TRAINED_BYTES = 16  # a float32 weight, its gradient and its two moments


class Weights:
    """A causal language model as loaded, with what trains of it.

    `lower` are the layers below the adapter, which the two have in common. `model` is what runs: the model
    that learns, and inside `original` the one that was loaded. `optimizer` is the AdamW over all that trains;
    it keeps its moments from one lesson to the next.
    """

    def __init__(
        self, name: str, rank: int | None, seed: int, device: str, layers: Literal["upper", "all"]
    ) -> None:
        """See `LanguageModel`."""
        self.name = name
        self.rank = rank
        self.lower = LowerLayers([])
        where = device_of(device)
        frozen = Place(where, precision(where), precision(where).itemsize)
        self._reference: Any = None
        if rank is None:
            trained = Place(where, torch.float32, _TRAINED_BYTES + frozen.bytes_each)
            self.model, self.tokenizer = load_llm(name, trained)
            # Not a deep copy: one of a model that is spread over devices would run the first one's layers.
            self._reference, _ = load_llm(name, frozen)
            self._reference.requires_grad_(False)
            for parameter in self.model.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
            self._learner = self.model
        else:
            base, self.tokenizer = load_llm(name, frozen)
            targets: str | list[str] = "all-linear"
            if layers == "upper":
                self.lower, targets = upper_half(base, name)
            adapter = LoraConfig(
                r=rank,
                lora_alpha=2 * rank,
                lora_dropout=0.0,
                target_modules=targets,
                task_type="CAUSAL_LM",
                # GPT-2's layers hold W transposed.
                fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in base.modules()),
            )
            self._learner = load_quietly("LoRA adapter", name, lambda: get_peft_model(base, adapter), seed)
            self.model = self._learner.get_base_model()
        self._learner.eval()
        # Named once: inside `original` an adapter's parameters do not ask for gradients.
        self._trained = {n: p for n, p in self._learner.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self._trained.values(), lr=0.0, weight_decay=0.0)
        self._autocast = frozen.dtype if rank is None and frozen.dtype != torch.float32 else None

    @property
    def device(self) -> torch.device:
        """Where tokens go: the device of the weights, or of the first of them."""
        device: torch.device = self.model.device
        return device

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All that trains by name: the adapter, or every weight once, tied ones too. float32."""
        return dict(self._trained)

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the parameters that train."""
        return {name: p.detach().cpu().numpy().copy() for name, p in self._trained.items()}

    def load_state(self, tensors: Tensors) -> None:
        """Set exactly what `state` gives. Raises WrongShape or NonFiniteUpdate and then changes nothing."""
        shapes = {name: tuple(p.shape) for name, p in self._trained.items()}
        check_tensors(tensors, shapes, "a language model to load")
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(torch.from_numpy(np.array(tensors[name])))

    def optimizer_state(self) -> dict[str, NDArray[np.float32]]:
        """Copies of AdamW's step and moments, named PARAMETER.step and so on; empty before the first step."""
        return {
            f"{name}.{key}": value.detach().cpu().numpy().copy()
            for name, parameter in self._trained.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load_optimizer_state(self, tensors: Tensors) -> None:
        """Set exactly what `optimizer_state` gives. Raises WrongShape or NonFiniteUpdate, as `load_state`."""
        known = {name: p for name, p in self._trained.items() if f"{name}.step" in tensors}
        shapes = {
            f"{name}.{key}": () if key == "step" else tuple(p.shape)
            for name, p in known.items()
            for key in _MOMENTS
        }
        check_tensors(tensors, shapes, "an optimizer to load")
        self.optimizer.state.clear()
        for name, parameter in known.items():
            copies = {key: torch.from_numpy(np.array(tensors[f"{name}.{key}"])) for key in _MOMENTS}
            self.optimizer.state[parameter] = {
                # AdamW reads its steps on the CPU.
                key: copy if key == "step" else copy.to(parameter.device)
                for key, copy in copies.items()
            }

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as peft does. Raises ModelError where all weights train."""
        if self.rank is None:
            raise ModelError(f"{self.name}: all weights train, so there is no adapter to write")
        self._learner.save_pretrained(folder, save_embedding_layers=False)

    @contextmanager
    def original(self) -> Iterator[None]:
        """Inside the block this is p_old: the adapter is off, or `model` is the second copy."""
        if self._reference is None:
            with self._learner.disable_adapter():
                yield
            return
        learner, self.model = self.model, self._reference
        try:
            yield
        finally:
            self.model = learner

    def _precision(self) -> AbstractContextManager[Any]:
        """float32 weights that train are multiplied in the precision of the frozen ones."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)
