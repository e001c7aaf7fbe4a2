"""Training the server's language model on one arrival: CrossLM's (5), (7), (8) and (9) on real sequences.

Source: Deng et al., arXiv 2312.05842; the losses themselves are in `methods.crosslm`. What trains of the
model that is given changes, and its optimizer; where training went wrong both are put back exactly. Nothing
here generates, reads rows or knows the small models but for their rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from securefl._language_model import LanguageModel, Predictions, Written
from securefl.crosslm_terms import CrossLm
from securefl.methods import crosslm

_ENTROPY_FLOOR = 0.5  # of the original's entropy: below it texts become alike
_CHECKED = 8  # texts on which the model after the last step is measured
_PART = 8  # texts whose activations and logits over the whole vocabulary are in memory at once
_REHEARSED = 4  # texts of a rehearsal in a step
_MAX_GRADIENT_NORM = 1.0
_LOSSES = ("generation", "understanding", "divergence")  # in the order of the gammas
_MEASURES = ("kl", "entropy", "entropy_original")  # means over the tokens of the texts, nats


@dataclass(frozen=True)
class Exercise:
    """One text to learn from: the tokens of M(y), the text as it was written, the tokens of [x, M'(y)]."""

    prompt: tuple[int, ...]
    written: Written
    reading: tuple[int, ...]


@dataclass(frozen=True)
class Lesson:
    """What training came to.

    losses: at each step, before it: the parts of (9), its total, and over the tokens of the texts, in nats,
    the mean KL to the original, the mean entropy of the next token and the original's. kl, entropy: after the
    last step. undone: why weights and optimizer were put back to where they began, or None; then kl and
    entropy are None.
    """

    losses: list[dict[str, float]]
    kl: float | None
    undone: str | None
    entropy: float | None = None


def teach(
    llm: LanguageModel,
    config: CrossLm,
    exercises: Sequence[Exercise],
    gains: Tensor,
    rng: np.random.Generator,
    progress: Callable[[int], None] = lambda _: None,
    rehearsal: Sequence[Exercise] = (),
) -> Lesson:
    """Train by (9), with AdamW as the last lesson left it, over `config.epochs` shuffled passes.

    gains: (n,) rewards, in stable mode minus their baseline. Stable mode stops at a KL above
    `config.kl_ceiling` nats a token or an entropy below half of the original's; both modes stop at NaN or
    infinity. Weights and optimizer are then exactly as before, and so they are when `progress`, which is
    called with texts done, raises.

    rehearsal: of other text. Each step also lowers the KL to the original on a few of these, so that what is
    learned of the task moves the rest of the language little. (Not in the paper, whose (8) is on the texts
    of the task alone.)
    """
    weights, moments = llm.state(), llm.optimizer_state()
    undone: str | None = "stopped"
    try:
        lesson = _train(llm, config, exercises, gains, rng, progress, rehearsal)
        undone = lesson.undone
    finally:
        llm.optimizer.zero_grad()  # gradients are as large as what trains
        if undone is not None:
            llm.load_state(weights)
            llm.load_optimizer_state(moments)
    return lesson


def _train(
    llm: LanguageModel,
    config: CrossLm,
    exercises: Sequence[Exercise],
    gains: Tensor,
    rng: np.random.Generator,
    progress: Callable[[int], None],
    rehearsal: Sequence[Exercise],
) -> Lesson:
    parameters = list(llm.parameters().values())
    optimizer = llm.optimizer
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
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
            if rehearsal:
                some = rng.choice(len(rehearsal), min(_REHEARSED, len(rehearsal)), replace=False)
                step["rehearsal"] = _rehearse(llm, [rehearsal[i] for i in some.tolist()])
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM))
            alarm = _alarm(config, [*step.values(), norm], step)
            if alarm is not None:
                return Lesson(losses, None, alarm)
            optimizer.step()
            losses.append(step)
            done += len(chosen)
            progress(done)
    # The last step has not been looked at yet, and the next arrival would start from it.
    last = measure(llm, [exercises[i] for i in rng.permutation(chosen)[:_CHECKED]])
    alarm = _alarm(config, list(last.values()), last)
    return Lesson(losses, None, alarm) if alarm else Lesson(losses, last["kl"], None, last["entropy"])


def _alarm(config: CrossLm, numbers: Sequence[float], measures: Mapping[str, float]) -> str | None:
    if not all(map(math.isfinite, numbers)):
        return "the language model's loss or gradient became NaN or infinite"
    kl, entropy, original = (measures[name] for name in _MEASURES)
    if not config.stable:
        return None
    if kl > config.kl_ceiling:
        return (
            f"the KL to the original reached {kl:.2f} nats a token, above the ceiling of {config.kl_ceiling}"
        )
    if entropy < _ENTROPY_FLOOR * original:
        return (
            f"the entropy of the next token fell to {entropy:.2f} nats, below half of the original's "
            f"{original:.2f}"
        )
    return None


def _after_prompts(
    llm: LanguageModel, exercises: Sequence[Exercise], *, whole: bool
) -> tuple[Predictions, Predictions]:
    """The model and the original on [M(y), x], every different prompt read once."""
    prompts = list(dict.fromkeys(exercise.prompt for exercise in exercises))
    which = [prompts.index(exercise.prompt) for exercise in exercises]
    tails = [exercise.written.tokens for exercise in exercises]
    return llm.beside_original(prompts, which, tails, whole=whole)


def _total_entropy(log_p: Tensor, mask: Tensor) -> float:
    """Sum of the entropies of log_p (B, T, V) where mask (B, T) counts, row by row: V is large."""
    rows = zip(log_p.detach(), mask, strict=True)
    return float(sum(-((row.exp() * row).sum(-1) * counted).sum() for row, counted in rows))


@torch.no_grad()
def measure(llm: LanguageModel, exercises: Sequence[Exercise]) -> dict[str, float]:
    """At the tokens of the texts, nats a token: mean KL to the original, mean entropy, the original's."""
    now, old = _after_prompts(llm, exercises, whole=False)
    log_p, log_old = now.logits.log_softmax(-1), old.logits.log_softmax(-1)
    kl = float(crosslm.divergences(log_p, log_old, now.mask).sum())
    sums = (kl, _total_entropy(log_p, now.mask), _total_entropy(log_old, now.mask))
    return {name: value / float(now.mask.sum()) for name, value in zip(_MEASURES, sums, strict=True)}


def _gradient(
    llm: LanguageModel, config: CrossLm, exercises: Sequence[Exercise], gains: Tensor
) -> dict[str, float]:
    """Add the gradient of (9) on a batch, in parts that fit in memory; gives what `Lesson.losses` has of it.

    Every loss is a mean over texts, so a part counts by its share of the batch.
    """
    sums = dict.fromkeys((*_LOSSES, *_MEASURES), 0.0)
    tokens = 0.0
    for start in range(0, len(exercises), _PART):
        part = exercises[start : start + _PART]
        share = len(part) / len(exercises)
        losses, totals, count = _part_gradient(llm, config, part, gains[start : start + _PART], share)
        for name, value in losses.items():
            sums[name] += share * value
        for name, value in zip(_MEASURES, totals, strict=True):
            sums[name] += value
        tokens += count
    for name in _MEASURES:
        sums[name] /= tokens
    parts = [torch.tensor(sums[name]) for name in _LOSSES]
    sums["total"] = float(crosslm.total_loss(parts[0], parts[1], parts[2], config.gammas))
    return sums


def _rehearse(llm: LanguageModel, exercises: Sequence[Exercise]) -> float:
    """Add the gradient of the mean KL to the original, nats a token, on these texts; gives the KL."""
    now, old = _after_prompts(llm, exercises, whole=False)
    kl = crosslm.divergences(now.logits.log_softmax(-1), old.logits.log_softmax(-1), now.mask)
    loss = crosslm.divergence_loss(kl, now.mask, per_token=True)
    torch.autograd.backward(loss)
    return float(loss.detach())


def _part_gradient(
    llm: LanguageModel, config: CrossLm, part: Sequence[Exercise], gains: Tensor, share: float
) -> tuple[dict[str, float], tuple[float, ...], float]:
    """Add `share` of the gradient of (9); gives the losses, the sums of the measures and the tokens of x.

    One forward pass of [M(y), x] and one by the original serve (5) and (8). The gradient of (7) is taken on
    its own: the logits of both sequences are never in memory together.
    """
    stable, gains, zero = config.stable, gains.to(llm.device), torch.zeros((), device=llm.device)
    now, old = _after_prompts(llm, part, whole=not stable)
    old_log_p, old_heads = old.logits.log_softmax(-1), old.head_log_probs
    log_p, tokens, mask, heads = now.logits.log_softmax(-1), now.tokens, now.mask, now.head_log_probs
    del now, old
    said_p = crosslm.pick(log_p, tokens)
    if stable:
        sampled = pad_sequence([exercise.written.log_probs for exercise in part], batch_first=True)
        loss_g = crosslm.clipped_generation_loss(said_p, sampled.to(llm.device), mask, gains)
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
    totals = (float(kl.detach().sum()), _total_entropy(log_p, mask), _total_entropy(old_log_p, mask))
    count = float(mask.sum())
    del log_p, old_log_p, said_p, kl, loss_g, loss_r

    said = llm.alone([exercise.reading for exercise in part])
    log_t = crosslm.token_log_probs(said.logits, said.tokens)
    loss_t = crosslm.understanding_loss(log_t, said.mask, per_token=stable)
    torch.autograd.backward(share * crosslm.total_loss(zero, loss_t, zero, config.gammas))
    values["understanding"] = float(loss_t.detach())
    return values, totals, count
