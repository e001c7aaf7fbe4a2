"""The server's language model with a LoRA adapter: writing, reading, and the logits that losses are made of.

One copy of the weights serves twice: with the adapter it is the model that learns, without it the frozen
original. Every draw comes from a seed that the caller gives, and the global generators are left as they were.
Nothing here knows silos, small models or rewards, reads rows or writes files.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache

from securefl.methods.crosslm import nucleus_sample, token_log_probs
from securefl.models import load_llm
from securefl.release import Tensors, check_tensors

_WRITE_BATCH = 64  # decoding reads all weights at every step, so more rows at once cost little
_READ_BATCH = 16


@dataclass(frozen=True)
class Written:
    """One text that the model wrote.

    text: up to the first line break, white space collapsed. tokens: its k ids as they were sampled, without
    the one that ended it. log_probs: (k,) their log-probabilities under the model that sampled, before the
    nucleus was cut.
    """

    text: str
    tokens: tuple[int, ...]
    log_probs: Tensor


@dataclass(frozen=True)
class Predictions:
    """What the model says of tokens after what came before them.

    logits: (B, T, V), each position's before its token. tokens: (B, T). mask: (B, T), 1.0 at real tokens.
    head_log_probs: (B, 1) sums over the head's tokens after its first; (B, 0) where it was not asked for.
    """

    logits: Tensor
    tokens: Tensor
    mask: Tensor
    head_log_probs: Tensor


def _by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Positions in batches of similar length, so that little of a batch is padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class LanguageModel:
    """A causal language model and its adapter. B rows, T tokens, V vocabulary; all on the model's device."""

    def __init__(self, name: str, *, rank: int, seed: int) -> None:
        """Load `name` (see `models.load_llm`) and put a LoRA of `rank` on its linear layers.

        alpha = 2 rank, no dropout; it changes nothing before it is trained. Raises ModelError.
        """
        base, self.tokenizer = load_llm(name)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapter = LoraConfig(
                r=rank,
                lora_alpha=2 * rank,
                lora_dropout=0.0,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
            self._peft = get_peft_model(base, adapter)
        self._peft.eval()
        self.model = self._peft.get_base_model()
        parameters = inspect.signature(self.model.forward).parameters
        # transformers renamed the argument within version 5.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        pieces = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        ends = {i for i, piece in enumerate(pieces) if "\n" in piece}
        self._stops = sorted(ends | set(self.tokenizer.all_special_ids))
        self._stop_set = frozenset(self._stops)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    # --- the adapter

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name: all that trains."""
        return {name: p for name, p in self._peft.named_parameters() if p.requires_grad}

    def adapter(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the adapter's parameters."""
        return {name: p.detach().cpu().numpy().copy() for name, p in self.parameters().items()}

    def load_adapter(self, tensors: Tensors) -> None:
        """Set exactly what `adapter` gives. Raises WrongShape or NonFiniteUpdate and then changes nothing."""
        own = self.parameters()
        check_tensors(tensors, {name: tuple(p.shape) for name, p in own.items()}, "an adapter to load")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.from_numpy(np.array(tensors[name])))

    @contextmanager
    def original(self) -> Iterator[None]:
        """Inside the block the adapter is off: this is p_old."""
        with self._peft.disable_adapter():
            yield

    # --- tokens

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Token ids of the beginning of a sequence, at most `limit`, as the tokenizer begins one."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids[:limit]

    def encode_inner(self, text: str) -> list[int]:
        """Token ids of a text that goes on after others: no token for a beginning or end."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _pad(self, rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        """ids and mask (B, S) int64. Heads are padded on the left, so that what follows them lines up."""
        longest = max(map(len, rows))
        ids = [[self.tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
        mask = [[0] * len(padding) for padding in ids]
        for padding, flags, row in zip(ids, mask, rows, strict=True):
            padding[len(padding) if left else 0 : len(padding) if left else 0] = row
            flags[len(flags) if left else 0 : len(flags) if left else 0] = [1] * len(row)
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def _run(self, ids: Tensor, mask: Tensor, keep: int, cache: DynamicCache | None = None) -> Tensor:
        """Logits of the last `keep` positions (0: all) of `ids` (B, S), which follow what is in the cache.

        mask: (B, cached + S). Positions are counted over real tokens, so padding on the left moves nothing.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        if cache is not None:
            given[self._cache_name] = cache
        output = self.model(
            input_ids=ids, attention_mask=mask, use_cache=cache is not None, logits_to_keep=keep, **given
        )
        logits: Tensor = output.logits
        return logits

    def alone(self, rows: Sequence[Sequence[int]]) -> Predictions:
        """Of each row's tokens after its first, which has nothing before it and so no probability."""
        ids, mask = self._pad(rows, left=False)
        logits = self._run(ids, mask, 0)
        return Predictions(
            logits[:, :-1], ids[:, 1:], mask[:, 1:].to(logits.dtype), logits.new_zeros(len(rows), 0)
        )

    def after(
        self,
        heads: Sequence[Sequence[int]],
        which: Sequence[int],
        tails: Sequence[Sequence[int]],
        *,
        whole: bool = False,
    ) -> Predictions:
        """Of the tokens of `tails` (B rows), each after the head that `which` numbers; `whole`: heads too.

        Heads are not empty. Each is run once and its cache of keys and values repeated for its tails, through
        which the gradient flows as it would through a copy: the same numbers for less work.
        """
        head_ids, head_mask = self._pad(heads, left=True)
        ids, mask = self._pad(tails, left=False)
        chosen = torch.tensor(which, device=self.device)
        cache = DynamicCache(config=self.model.config)
        said = self._run(head_ids, head_mask, 0 if whole else 1, cache)
        sums = said.new_zeros(len(tails), 0)
        if whole:
            real = head_mask[:, 1:] * head_mask[:, :-1]
            sums = (token_log_probs(said[:, :-1], head_ids[:, 1:]) * real).sum(1, keepdim=True)[chosen]
        logits = said[:, -1:][chosen]
        if ids.shape[1] > 1:
            cache.batch_select_indices(chosen)
            before = torch.cat([head_mask[chosen], mask[:, :-1]], 1)
            logits = torch.cat([logits, self._run(ids[:, :-1], before, 0, cache)], 1)
        return Predictions(logits, ids, mask.to(logits.dtype), sums)

    # --- writing

    def write(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        top_p: float,
        seed: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Written]:
        """One text after each prompt, by nucleus sampling (Holtzman et al. 2020), in the order of `prompts`.

        A text ends at a line break, a special token or `max_new_tokens`, and does not begin with one of the
        former two. The same seed and weights give the same texts. progress: called with the texts done.
        """
        heads = [self.encode(prompt) for prompt in prompts]
        written: list[Written | None] = [None] * len(prompts)
        generator = torch.Generator(self.device).manual_seed(seed)
        done = 0
        for chosen in _by_length([len(head) for head in heads], _WRITE_BATCH):
            texts = self._write([heads[i] for i in chosen], max_new_tokens, top_p, generator)
            for i, text in zip(chosen, texts, strict=True):
                written[i] = text
            done += len(chosen)
            progress(done)
        return [text for text in written if text is not None]

    @torch.no_grad()
    def _write(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int, top_p: float, generator: torch.Generator
    ) -> list[Written]:
        # Every different prompt is read once; its cache is then repeated for its texts.
        different = list(dict.fromkeys(tuple(row) for row in rows))
        which = torch.tensor([different.index(tuple(row)) for row in rows], device=self.device)
        ids, mask = self._pad(different, left=True)
        cache = DynamicCache(config=self.model.config)
        logits = self._run(ids, mask, 1, cache)[which, -1]
        cache.batch_select_indices(which)
        mask = mask[which]
        stops = torch.tensor(self._stops, device=self.device)
        tokens: list[Tensor] = []
        log_probs: list[Tensor] = []
        ended = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        while True:
            allowed = logits if tokens else logits.index_fill(1, stops, -torch.inf)
            token = nucleus_sample(allowed, top_p, generator)
            tokens.append(token)
            log_probs.append(token_log_probs(logits, token))
            ended |= torch.isin(token, stops)
            if len(tokens) == max_new_tokens or bool(ended.all()):
                break
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            logits = self._run(token.unsqueeze(1), mask, 1, cache)[:, -1]
        columns, shares = torch.stack(tokens, 1).tolist(), torch.stack(log_probs, 1)
        return [self._read_off(columns[i], shares[i]) for i in range(len(rows))]

    def _read_off(self, ids: list[int], log_probs: Tensor) -> Written:
        end = next((i for i, token in enumerate(ids) if token in self._stop_set), len(ids))
        # A token such as ".\n" ends the text and still has a full stop of it.
        shown = self.tokenizer.decode(ids[: end + 1], skip_special_tokens=True)
        text = " ".join(shown.split("\n")[0].split())
        return Written(text, tuple(ids[:end]), log_probs[:end].clone())

    # --- reading

    def answer_log_probs(self, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Tensor:
        """log P(answer | row) of every answer after every row: (n, C), sums over an answer's tokens.

        Each row is read once, for all answers.
        """
        count = len(answers)
        out = torch.zeros(len(rows), count)
        with torch.no_grad():
            for chosen in _by_length([len(row) for row in rows], _READ_BATCH):
                which = [k for k in range(len(chosen)) for _ in range(count)]
                said = self.after([rows[i] for i in chosen], which, [*answers] * len(chosen))
                shares = token_log_probs(said.logits, said.tokens) * said.mask
                out[chosen] = shares.sum(1).view(len(chosen), count).cpu()
        return out

    def perplexity(self, texts: Sequence[str], *, limit: int, original: bool = False) -> float:
        """exp of the mean negative log-likelihood of a token, over all texts' first `limit` tokens.

        A text's first token is not counted (it has nothing before it). NaN where no token is.
        """
        rows = [row for text in texts if len(row := self.encode(text, limit)) > 1]
        total, tokens = 0.0, 0.0
        with torch.no_grad(), self.original() if original else nullcontext():
            for chosen in _by_length([len(row) for row in rows], _READ_BATCH):
                said = self.alone([rows[i] for i in chosen])
                total -= float((token_log_probs(said.logits, said.tokens) * said.mask).sum())
                tokens += float(said.mask.sum())
        return math.exp(min(total / tokens, 700.0)) if tokens else math.nan
