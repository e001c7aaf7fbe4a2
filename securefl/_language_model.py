"""The server's language model: writing, reading, and the logits that losses are made of.

Every draw comes from a seed that the caller gives, and the global generators are left as they were. Which
weights train is `_llm_weights`' business. Nothing here knows silos, small models or rewards, reads rows or
writes files.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import jinja2
import torch
from torch import Tensor
from transformers import DynamicCache

from securefl._llm_weights import Weights
from securefl.errors import ModelError
from securefl.methods.crosslm import nucleus_sample, token_log_probs

_WRITE_BATCH = 64  # decoding reads all weights at every step, so more rows at once cost little
_READ_BATCH = 16
_GOING = 0.75  # share of a batch's rows that go on, below which the others are taken out of it
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Written:
    """One text that the model wrote.

    text: up to the first line break, white space collapsed. tokens: its k ids as they were sampled, without
    the one that ended it. log_probs: (k,) their log-probabilities under the model that sampled, before the
    nucleus was cut, on the CPU.
    """

    text: str
    tokens: tuple[int, ...]
    log_probs: Tensor


class Writer(Protocol):
    """What writes texts: `LanguageModel` itself, or another engine that is given its weights."""

    def write(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        top_p: float,
        seed: int,
        top_k: int | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Written]: ...


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


@dataclass(frozen=True)
class _Read:
    """H heads that the model has read, for B tails: the logits after each head (H, 1, V), `head_log_probs` of
    the tails, the heads' mask (H, S), and their keys and values.
    """

    last: Tensor
    sums: Tensor
    mask: Tensor
    cache: DynamicCache


def _by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Positions in batches of similar length, so that little of a batch is padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class LanguageModel(Weights):
    """A causal language model that learns. B rows, T tokens, V vocabulary; all on the model's device."""

    def __init__(
        self,
        name: str,
        *,
        rank: int | None,
        seed: int,
        device: str = "auto",
        chat: bool = True,
        layers: Literal["upper", "all"] = "all",
    ) -> None:
        """Load `name` (see `models.load_llm`) onto a device (see `device_of`).

        rank: of a LoRA on its linear layers, with alpha = 2 rank and no dropout, which changes nothing before
        it is trained; None trains all weights. layers: that have the adapter, with `upper` the upper half of
        them: below it the model and the original are the same, and `beside_original` computes once. Frozen
        weights are bfloat16 on CUDA, all else is float32. chat: prompts go through the tokenizer's chat
        template, where it has one. Raises ModelError.
        """
        super().__init__(name, rank, seed, device, layers)
        self._chat = chat and self.tokenizer.chat_template is not None
        arguments = inspect.signature(self.model.forward).parameters
        # transformers renamed the argument within version 5.
        caches = [one for one in ("cache", "past_key_values") if one in arguments]
        if not caches or "logits_to_keep" not in arguments:
            raise ModelError(f"{name}: a {self.model.config.model_type} model cannot write with a cache")
        self._cache_name = caches[0]
        self._takes_positions = "position_ids" in arguments
        self.stops = self._ends()
        self._stop_set = frozenset(self.stops)

    def _ends(self) -> list[int]:
        """Tokens that end a text: with a line break in them, special ones, the model's own ends."""
        tokenizer = self.tokenizer
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        ends = {i for i, piece in enumerate(pieces) if "\n" in piece} | set(tokenizer.all_special_ids)
        ends |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        own = self.model.generation_config.eos_token_id
        ends |= set(own if isinstance(own, list) else [] if own is None else [own])
        size = self.model.get_input_embeddings().num_embeddings  # a tokenizer may know more
        return sorted(i for i in ends if i < size)

    # --- tokens

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Token ids of the beginning of a sequence, at most `limit`, as the tokenizer begins one."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids[:limit]

    def encode_inner(self, text: str) -> list[int]:
        """Token ids of a text that goes on after others: no token for a beginning or end."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def prompt(self, text: str) -> list[int]:
        """Token ids of what a text is asked for with: as a user's message by the chat template, else encoded.

        The template brings its own special tokens. Raises ModelError where it does not work.
        """
        if not self._chat:
            return self.encode(text)
        message = [{"role": "user", "content": text}]
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ModelError(
                f"{self.name}: the chat template takes no user message ({type(error).__name__}); "
                "write crosslm.chat = false"
            ) from error
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
        """Logits, float32, of the last `keep` positions (0: all) of `ids` (B, S), after what is in the cache.

        mask: (B, cached + S). Positions are counted over real tokens, so padding on the left moves nothing.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        if cache is not None:
            given[self._cache_name] = cache
        with self._precision():
            output = self.model(
                input_ids=ids, attention_mask=mask, use_cache=cache is not None, logits_to_keep=keep, **given
            )
        logits: Tensor = output.logits.to(self.device, torch.float32)
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
        return self._go_on(self._read(heads, which, whole=whole), which, tails)

    def beside_original(
        self,
        heads: Sequence[Sequence[int]],
        which: Sequence[int],
        tails: Sequence[Sequence[int]],
        *,
        whole: bool = False,
    ) -> tuple[Predictions, Predictions]:
        """`after` by the model, and by the original without gradient; what the two share is computed once."""
        read, read_old = self._both(
            lambda: self._read(heads, which, whole=whole), lambda: self._read(heads, which, whole=whole)
        )
        self.lower.share_cache(read.cache, read_old.cache)
        return self._both(
            lambda: self._go_on(read, which, tails), lambda: self._go_on(read_old, which, tails)
        )

    def _both(self, run: Callable[[], _Result], beside: Callable[[], _Result]) -> tuple[_Result, _Result]:
        with self.lower.kept() as outputs:
            now = run()
        with torch.no_grad(), self.original(), self.lower.given_again(outputs):
            return now, beside()

    def _read(self, heads: Sequence[Sequence[int]], which: Sequence[int], *, whole: bool) -> _Read:
        ids, mask = self._pad(heads, left=True)
        cache = DynamicCache(config=self.model.config)
        said = self._run(ids, mask, 0 if whole else 1, cache)
        sums = said.new_zeros(len(which), 0)
        if whole:
            real = mask[:, 1:] * mask[:, :-1]
            sums = (token_log_probs(said[:, :-1], ids[:, 1:]) * real).sum(1, keepdim=True)[[*which]]
        return _Read(said[:, -1:], sums, mask, cache)

    def _go_on(self, read: _Read, which: Sequence[int], tails: Sequence[Sequence[int]]) -> Predictions:
        ids, mask = self._pad(tails, left=False)
        chosen = torch.tensor(which, device=self.device)
        logits = read.last[chosen]
        if ids.shape[1] > 1:
            read.cache.reorder_cache(chosen)
            before = torch.cat([read.mask[chosen], mask[:, :-1]], 1)
            logits = torch.cat([logits, self._run(ids[:, :-1], before, 0, read.cache)], 1)
        return Predictions(logits, ids, mask.to(logits.dtype), read.sums)

    # --- writing

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
        """One text after each `prompt`, in their order, by nucleus sampling (Holtzman et al. 2020).

        top_k: only so many of the likeliest tokens are drawn from. A text ends at a line break, a special
        token or `max_new_tokens`, and does not begin with one of the former two. The same seed, weights and
        prompts give the same texts. progress: called with the texts done. Raises ModelError where prompt and
        text are longer than the model's positions.
        """
        heads = [self.prompt(prompt) for prompt in prompts]
        self.require_positions(heads, max_new_tokens)
        written: list[Written | None] = [None] * len(prompts)
        generator = torch.Generator(self.device).manual_seed(seed)
        done = 0
        for chosen in _by_length([len(head) for head in heads], _WRITE_BATCH):
            # Weights that are cast for the multiplication are cast once for the whole block.
            with torch.no_grad(), self._precision():
                texts = self._write([heads[i] for i in chosen], max_new_tokens, top_p, top_k, generator)
            for i, text in zip(chosen, texts, strict=True):
                written[i] = text
            done += len(chosen)
            progress(done)
        return [text for text in written if text is not None]

    def unprompted(self, count: int, max_new_tokens: int, seed: int) -> list[tuple[list[int], Written]]:
        """Texts that the original writes after the token that begins one, and that token, in a list.

        The same seed gives the same texts, whatever was learned. Raises ModelError as `write`, and where
        the tokenizer has no token that begins or ends a text.
        """
        first = self.tokenizer.bos_token_id
        first = self.tokenizer.eos_token_id if first is None else first
        if first is None:
            raise ModelError(
                f"{self.name}: the tokenizer has neither a begin-of-text nor an end-of-text token; write "
                "crosslm.rehearsal = 0"
            )
        self.require_positions([[first]], max_new_tokens)
        generator = torch.Generator(self.device).manual_seed(seed)
        written: list[Written] = []
        with torch.no_grad(), self._precision(), self.original():
            for start in range(0, count, _WRITE_BATCH):
                heads = [[first]] * min(_WRITE_BATCH, count - start)
                written += self._write(heads, max_new_tokens, 1.0, None, generator)
        return [([first], text) for text in written if text.tokens]

    def require_positions(self, heads: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raises ModelError where the longest head and a text after it do not fit into the positions."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, heads), default=0)
        if positions is not None and longest + max_new_tokens > positions:
            raise ModelError(
                f"{self.name}: a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into "
                f"its {positions} positions; shorten the prompt or lower crosslm.max_new_tokens"
            )

    def _write(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        top_p: float,
        top_k: int | None,
        generator: torch.Generator,
    ) -> list[Written]:
        # Every different prompt is read once; its cache is then repeated for its texts.
        different = list(dict.fromkeys(tuple(row) for row in rows))
        which = torch.tensor([different.index(tuple(row)) for row in rows], device=self.device)
        ids, mask = self._pad(different, left=True)
        cache = DynamicCache(config=self.model.config)
        logits = self._run(ids, mask, 1, cache)[which, -1]
        cache.reorder_cache(which)
        mask = mask[which]
        stops = torch.tensor(self.stops, device=self.device)
        # A row that is taken out of the batch has its end among its tokens; what follows is never read.
        tokens = torch.zeros(len(rows), max_new_tokens, dtype=torch.int64, device=self.device)
        log_probs = torch.zeros(len(rows), max_new_tokens, device=self.device)
        rest = torch.arange(len(rows), device=self.device)  # the rows still in the batch
        ended = torch.zeros_like(rest, dtype=torch.bool)
        for place in range(max_new_tokens):
            allowed = logits if place else logits.index_fill(1, stops, -torch.inf)
            token = nucleus_sample(allowed, top_p, generator, top_k)
            tokens[rest, place] = token
            log_probs[rest, place] = token_log_probs(logits, token)
            ended |= torch.isin(token, stops)
            going = len(ended) - int(ended.sum())
            if not going or place == max_new_tokens - 1:
                break
            if going <= _GOING * len(ended):
                kept = (~ended).nonzero().squeeze(1)
                cache.reorder_cache(kept)
                rest, token, mask, ended = rest[kept], token[kept], mask[kept], ended[kept]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits = self._run(token.unsqueeze(1), mask, 1, cache)[:, -1]
        shares = log_probs.cpu()
        return [self.read_off(row, shares[i]) for i, row in enumerate(tokens.tolist())]

    def read_off(self, ids: list[int], log_probs: Tensor) -> Written:
        """What was sampled, up to the first token that ends a text."""
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
