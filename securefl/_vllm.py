"""Writing with vLLM, on a GPU: the same interface as `LanguageModel.write`, and only that.

UNTESTED: no machine of this project's tests has a GPU that vLLM runs on. It is written against vLLM's
documentation of version 0.10 (offline inference, LoRA adapters). vLLM is an extra and is imported here alone,
when an engine is made. Learning and reading stay with `LanguageModel`, whose adapter is handed over as files
at every call; so the weights of the original are on the GPU twice.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from securefl._language_model import LanguageModel, Written
from securefl.errors import ModelError, NotAvailable

_MEMORY = 0.4  # of the GPU's, for vLLM's weights and cache; the rest is for training
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


class VllmWriter:
    """Writes what `llm` would write: its prompts, its ends of a text, its adapter as it is at the call."""

    def __init__(self, llm: LanguageModel) -> None:
        """Start an engine beside `llm`. Raises NotAvailable without vLLM, a GPU or an adapter, ModelError."""
        if importlib.util.find_spec("vllm") is None:
            raise NotAvailable('crosslm.backend vllm is not installed; pip install "securefl[vllm]"')
        if llm.device.type != "cuda":
            raise NotAvailable(f"vllm writes on CUDA, and the LLM is on {llm.device.type}; use backend torch")
        if llm.rank is None:
            raise NotAvailable('vllm is handed an adapter; write crosslm.training = "lora" or backend torch')
        import vllm
        from vllm.lora.request import LoRARequest

        self._llm = llm
        self._sampling: Any = vllm.SamplingParams
        self._request: Any = LoRARequest
        self._calls = 0
        try:
            self._engine: Any = vllm.LLM(
                model=llm.model.name_or_path,  # the folder that `llm` was read from
                dtype="bfloat16",
                enable_lora=True,
                max_lora_rank=next(rank for rank in _RANKS if rank >= llm.rank),
                gpu_memory_utilization=_MEMORY,
                trust_remote_code=False,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ModelError(
                f"{llm.name}: vllm does not load it ({type(error).__name__}); use backend torch"
            ) from error

    def write(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        top_p: float,
        seed: int,
        top_k: int | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Written]:
        """See `LanguageModel.write`. Log-probabilities are vLLM's raw ones, before any cut (its default)."""
        heads = [self._llm.prompt(prompt) for prompt in prompts]
        self._llm.require_positions(heads, max_new_tokens)
        seeds = np.random.SeedSequence(seed).generate_state(len(heads)).tolist()
        terms = [
            self._sampling(
                temperature=1.0,
                top_p=top_p,
                top_k=0 if top_k is None else top_k,  # 0: all
                max_tokens=max_new_tokens,
                min_tokens=1,  # no end of a text before that
                stop_token_ids=self._llm.stops,
                logprobs=0,  # of the token that was drawn
                detokenize=False,
                seed=one,
            )
            for one in seeds
        ]
        self._calls += 1  # vLLM keeps adapters by number
        with tempfile.TemporaryDirectory() as folder:
            self._llm.save_adapter(Path(folder))
            outputs = self._engine.generate(
                [{"prompt_token_ids": head} for head in heads],
                terms,
                lora_request=self._request(f"lesson-{self._calls}", self._calls, folder),
                use_tqdm=False,
            )
        progress(len(outputs))
        return [self._written(output.outputs[0]) for output in outputs]

    def _written(self, completion: Any) -> Written:
        ids = list(completion.token_ids)
        drawn = [places[token].logprob for token, places in zip(ids, completion.logprobs, strict=True)]
        return self._llm.read_off(ids, torch.tensor(drawn))
