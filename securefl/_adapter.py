"""Low-rank adapters of a small model's encoder (LoRA: Hu et al., ICLR 2022), by way of peft.

A linear layer W of the encoder becomes W + (alpha / r) B A with W frozen, A of r rows drawn from the seed and
B zero. This room knows modules and nothing of texts, labels or silos.
"""

from __future__ import annotations

import copy

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from securefl._model_files import load_quietly
from securefl.config import Lora

# The embedding layer stays the checkpoint's: FedKC's `embeddings` centroids are read against it.
_KEPT = r"embeddings\..*"


def add_adapter(model: PreTrainedModel, lora: Lora, name: str, seed: int) -> None:
    """Freeze the encoder of a classifier and put an adapter on each of its linear layers, in place.

    What is not the encoder (the head) is left alone. The values of A depend on `seed` and the architecture
    alone, so every silo starts with the same ones; no dropout. Raises ModelError where there is no linear
    layer.
    """
    terms = LoraConfig(
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        exclude_modules=_KEPT if hasattr(model.base_model, "embeddings") else None,
        # GPT-2's layers hold W transposed.
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in model.base_model.modules()),
    )
    load_quietly("LoRA adapter", name, lambda: inject_adapter_in_model(terms, model.base_model), seed)


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the adapter added into the weights: the plain architecture. `model` stays as it is."""
    plain = copy.deepcopy(model)
    adapted = [(name, layer) for name, layer in plain.named_modules() if isinstance(layer, LoraLayer)]
    for name, layer in adapted:
        layer.merge()
        plain.set_submodule(name, layer.get_base_layer())
    del plain.base_model.peft_config
    return plain
