"""Training the server's language model on one arrival: CrossLM's (5), (7), (8) and (9) on real sequences.

Source: Deng et al., arXiv 2312.05842; the losses themselves are in `methods.crosslm`. Only the adapter of the
model that is given changes, and where training went wrong it is put back exactly. Nothing here generates,
reads rows or knows the small models but for their rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from securefl._language_model import LanguageModel, Predictions, Written
from securefl.config import CrossLm
from securefl.methods import crosslm

KL_CEILING = 0.5  # nats a token; beyond it texts become alike and perplexity leaves its band
_CHECKED = 8  # texts on which the KL after the last step is measured
_PART = 16  # texts whose logits over the whole vocabulary are in memory at once
_MAX_GRADIENT_NORM = 1.0
_LOSSES = ("generation", "understanding", "divergence")  # in the order of the gammas


@dataclass(frozen=True)
class Exercise:
    """One text to learn from: the tokens of M(y), the text as it was written, the tokens of [x, M'(y)]."""

    prompt: tuple[int, ...]
    written: Written
    reading: tuple[int, ...]


@dataclass(frozen=True)
class Lesson:
    """What training came to.

    losses: at each step, before it: the parts of (9), its total and the mean KL in nats a token. kl: after
    the last step. undone: why the adapter was put back to where it began, or None; then kl is None.
    """

    losses: list[dict[str, float]]
    kl: float | None
    undone: str | None


def teach(
    llm: LanguageModel,
    config: CrossLm,
    exercises: Sequence[Exercise],
    gains: Tensor,
    rng: np.random.Generator,
    progress: Callable[[int], None] = lambda _: None,
) -> Lesson:
    """Train the adapter by (9), AdamW over `config.epochs` shuffled passes.

    gains: (n,) rewards, in stable mode minus their baseline. Stable mode stops at a KL above 0.5 nats a
    token; both stop at NaN or infinity; the adapter is then exactly as before. progress: called with texts
    done.
    """
    before = llm.adapter()
    lesson = _train(llm, config, exercises, gains, rng, progress)
    if lesson.undone is not None:
        llm.load_adapter(before)
    return lesson


def _train(
    llm: LanguageModel,
    config: CrossLm,
    exercises: Sequence[Exercise],
    gains: Tensor,
    rng: np.random.Generator,
    progress: Callable[[int], None],
) -> Lesson:
    parameters = list(llm.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    losses: list[dict[str, float]] = []
    done = 0
    chosen: list[int] = []
    for _ in range(config.epochs):
        order = rng.permutation(len(exercises)).tolist()
        for start in range(0, len(order), config.batch_size):
            # Texts of one prompt stand together, so that a part of the batch reads few prompts.
            chosen = sorted(order[start : start + config.batch_size], key=lambda i: exercises[i].prompt)
            optimizer.zero_grad()
            step = _gradient(llm, config, [exercises[i] for i in chosen], gains[chosen])
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM))
            alarm = _alarm(config, [*step.values(), norm], step["kl"])
            if alarm is not None:
                return Lesson(losses, None, alarm)
            optimizer.step()
            losses.append(step)
            done += len(chosen)
            progress(done)
    # The last step has not been looked at yet, and the next arrival would start from it.
    kl = divergence(llm, [exercises[i] for i in rng.permutation(chosen)[:_CHECKED]])
    alarm = _alarm(config, [kl], kl)
    return Lesson(losses, None if alarm else kl, alarm)


def _alarm(config: CrossLm, numbers: Sequence[float], kl: float) -> str | None:
    if not all(map(math.isfinite, numbers)):
        return "the language model's loss or gradient became NaN or infinite"
    if config.mode == "stable" and kl > KL_CEILING:
        return f"the KL to the original reached {kl:.2f} nats a token, above the ceiling of {KL_CEILING}"
    return None


def _after_prompts(llm: LanguageModel, exercises: Sequence[Exercise], *, whole: bool) -> Predictions:
    """The model on [M(y), x], every different prompt read once."""
    prompts = list(dict.fromkeys(exercise.prompt for exercise in exercises))
    which = [prompts.index(exercise.prompt) for exercise in exercises]
    return llm.after(prompts, which, [exercise.written.tokens for exercise in exercises], whole=whole)


def _log_probs(said: Predictions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities (B, T, V), tokens, mask and head sums; the logits, which are as large, go."""
    return said.logits.log_softmax(-1), said.tokens, said.mask, said.head_log_probs


@torch.no_grad()
def divergence(llm: LanguageModel, exercises: Sequence[Exercise]) -> float:
    """Mean KL to the original at the tokens of the texts, nats a token."""
    now = _after_prompts(llm, exercises, whole=False)
    with llm.original():
        old = _after_prompts(llm, exercises, whole=False)
    log_p, log_old = now.logits.log_softmax(-1), old.logits.log_softmax(-1)
    return float(crosslm.divergences(log_p, log_old, now.mask).sum() / now.mask.sum())


def _gradient(
    llm: LanguageModel, config: CrossLm, exercises: Sequence[Exercise], gains: Tensor
) -> dict[str, float]:
    """Add the gradient of (9) on a batch, in parts that fit in memory; gives its losses and mean KL.

    Every loss is a mean over texts, so a part counts by its share of the batch.
    """
    sums = dict.fromkeys((*_LOSSES, "kl"), 0.0)
    tokens = 0.0
    for start in range(0, len(exercises), _PART):
        part = exercises[start : start + _PART]
        share = len(part) / len(exercises)
        losses, kl, count = _part_gradient(llm, config, part, gains[start : start + _PART], share)
        for name, value in losses.items():
            sums[name] += share * value
        sums["kl"] += kl
        tokens += count
    sums["kl"] /= tokens
    parts = [torch.tensor(sums[name]) for name in _LOSSES]
    sums["total"] = float(crosslm.total_loss(parts[0], parts[1], parts[2], config.gammas))
    return sums


def _part_gradient(
    llm: LanguageModel, config: CrossLm, part: Sequence[Exercise], gains: Tensor, share: float
) -> tuple[dict[str, float], float, float]:
    """Add `share` of the gradient of (9); gives the losses, the summed KL and the number of tokens of x.

    One forward pass of [M(y), x] with the adapter and one without serve (5) and (8). The gradient of (7) is
    taken on its own: the logits of both sequences are never in memory together.
    """
    stable, gains, zero = config.mode == "stable", gains.to(llm.device), torch.zeros((), device=llm.device)
    with torch.no_grad(), llm.original():
        old_log_p, _, _, old_heads = _log_probs(_after_prompts(llm, part, whole=not stable))
    log_p, tokens, mask, heads = _log_probs(_after_prompts(llm, part, whole=not stable))
    said_p = crosslm.pick(log_p, tokens)
    if stable:
        sampled = pad_sequence([exercise.written.log_probs for exercise in part], batch_first=True)
        loss_g = crosslm.clipped_generation_loss(said_p, sampled, mask, gains)
    else:
        loss_g = crosslm.generation_loss(
            torch.cat([heads, said_p], 1),
            torch.cat([old_heads, crosslm.pick(old_log_p, tokens)], 1),
            torch.cat([torch.ones_like(heads), mask], 1),
            gains,
        )
    kl = crosslm.divergences(log_p, old_log_p, mask)
    loss_r = crosslm.divergence_loss(kl, mask, per_token=stable)
    torch.autograd.backward(share * crosslm.total_loss(loss_g, zero, loss_r, config.gammas))
    values = {"generation": float(loss_g.detach()), "divergence": float(loss_r.detach())}
    total_kl, count = float(kl.detach().sum()), float(mask.sum())
    del log_p, old_log_p, said_p, kl, loss_g, loss_r

    said = llm.alone([exercise.reading for exercise in part])
    log_t = crosslm.token_log_probs(said.logits, said.tokens)
    loss_t = crosslm.understanding_loss(log_t, said.mask, per_token=stable)
    torch.autograd.backward(share * crosslm.total_loss(zero, loss_t, zero, config.gammas))
    values["understanding"] = float(loss_t.detach())
    return values, total_kl, count
