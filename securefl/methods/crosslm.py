"""CrossLM's mathematics: rewards, the three losses, scores and the choice of what to keep.

Source: Deng et al., "Mutual Enhancement of Large and Small Language Models with Cross-Silo Knowledge
Transfer", arXiv 2312.05842; numbers in brackets are its equations. Everything here is a function of plain
tensors: no model, no tokenizer, no text (`securefl.crosslm_worker` has those), and no generator of its own.

Shapes: B texts, T token positions, V tokens in the vocabulary, C classes, n texts of an arrival, d the width
of a sentence vector. A mask is 1.0 where a position counts and 0.0 where it is padding. Logarithms are
natural, so divergences are in nats.

Two forms of the losses. `paper` is (5), (7), (8) to the letter: sums over the tokens of a text, averaged over
the texts. `stable` replaces what makes the letter diverge: REINFORCE without a baseline pushes every
likelihood down when most rewards are negative, a sum rewards length, and a policy that has moved away from
the one that sampled makes the estimate meaningless.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PRIOR_STEPS = 200
_SAME = 0.999  # cosine above which two texts count as one
_SORTED = 512
_CHANCE = 1e-6  # what rounding leaves of a grader's saying nothing
_ROWS = 512  # of the matrix of cosines, in memory at once


def rewards(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(4): r = 2 S(y|x) - 1, in [-1, 1].

    probabilities: (n, C), the small model's; labels: (n,) the label each text was generated for. Gives (n,).
    """
    return 2.0 * probabilities.gather(1, labels.unsqueeze(1)).squeeze(1) - 1.0


def above_chance(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The stable form of (4) for choosing: (C p - 1) / (C - 1), 0 at chance, and whether a text is good.

    probabilities: (n, C); labels: (n,). Gives (n,) and (n,) bool. With two labels it is (4) itself. With
    more, 2 p - 1 > 0 asks for more than half of the probability, which the mean of several graders rarely has
    even where all find the label likeliest; a good text is one of which no other label is likelier, and this
    one likelier than by chance.
    """
    classes = probabilities.shape[1]
    own = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
    reward = (classes * own - 1.0) / (classes - 1.0)
    return reward, (own >= probabilities.max(1).values) & (reward > _CHANCE)


def without_prior(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Probabilities (n, C) of a grader whose taste for some labels is taken out: logit adjustment.

    labels: (n,) that the texts were written for. A silo with 95 % of one label makes a model that gives
    nearly every text that label. With one offset a label on its log-probabilities, chosen so that over these
    texts, each label's counting alike, every label has the same mean probability, what is left is how the
    texts differ. It is Saerens, Latinne and Decaestecker's correction for new priors (2002) with the new ones
    known and the old ones found, so the silo need not say how many rows of a label it has. A label without
    texts gets probability 0.
    """
    counts = torch.bincount(labels, minlength=probabilities.shape[1]).double()
    present = counts > 0
    weights = 1 / counts[labels]
    logs = probabilities.double().clamp(min=1e-30).log().masked_fill(~present, -torch.inf)
    offsets = torch.zeros(len(counts), dtype=torch.float64)
    wanted = present / present.sum()
    for _ in range(_PRIOR_STEPS):
        mean = weights @ (logs + offsets).softmax(1) / weights.sum()
        if float((mean - wanted).abs().max()) < 1e-9:
            break
        offsets[present] += (wanted.log() - mean.log())[present]
    return (logs + offsets).softmax(1).to(probabilities.dtype)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token: logits (..., V) of the positions that predict `tokens` (...)."""
    return pick(logits, tokens) - logits.logsumexp(-1)


def pick(values: Tensor, tokens: Tensor) -> Tensor:
    """The value of each token: values (..., V), tokens (...)."""
    return values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def nucleus_sample(
    logits: Tensor, top_p: float, generator: torch.Generator, top_k: int | None = None
) -> Tensor:
    """(3): one token (B,) for each row of logits (B, V), from the fewest tokens whose share reaches `top_p`.

    Nucleus sampling (Holtzman et al. 2020). With `top_k` (Fan et al. 2018) only the k likeliest tokens take
    part, and their shares are of each other, as in transformers. Sorting the whole vocabulary costs more than
    a small model's step, so only as many of the likeliest tokens are sorted as the nuclei turn out to need.
    """
    if top_k is not None:
        logits, among = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    shares = logits.softmax(-1)
    size = min(_SORTED, shares.shape[-1])
    while True:
        largest, tokens = shares.topk(size, dim=-1)
        inside = largest.cumsum(-1) - largest < top_p  # the share of the likelier ones does not reach it yet
        if size == shares.shape[-1] or not bool(inside[:, -1].any()):
            break
        size = min(4 * size, shares.shape[-1])
    drawn = torch.multinomial(largest * inside, 1, generator=generator)
    token = tokens.gather(1, drawn)
    return (token if top_k is None else among.gather(1, token)).squeeze(1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the counted positions of each row: (B, T) to (B,); 0 for a row with none."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)


def baseline(reward: Tensor, labels: Tensor) -> Tensor:
    """Advantages (n,): each reward minus the mean reward of its own label's texts in the arrival.

    A label with one text has advantage 0: one text says nothing about what is better than usual.
    """
    same = (labels.unsqueeze(0) == labels.unsqueeze(1)).to(reward.dtype)
    return reward - same @ reward / same.sum(1)


def generation_loss(log_p: Tensor, log_old: Tensor, mask: Tensor, reward: Tensor) -> Tensor:
    """(5) to the letter: mean over texts of -r (log p_theta([M(y), x]) - log p_old([M(y), x])).

    log_p, log_old, mask: (B, T) over the tokens of prompt and text; reward: (B,).
    """
    return -(reward * ((log_p - log_old) * mask).sum(-1)).mean()


def clipped_generation_loss(
    log_p: Tensor, log_sampled: Tensor, mask: Tensor, advantage: Tensor, clip: float = 0.2
) -> Tensor:
    """The stable form of (5): the clipped surrogate of PPO (Schulman et al. 2017, equation 7).

    Mean over texts of the mean over a text's tokens of -min(rho A, clip(rho, 1 - clip, 1 + clip) A), where
    rho is the probability ratio of a token to the policy that sampled it. log_p, log_sampled, mask: (B, T)
    over the tokens of the text alone; advantage: (B,), see `baseline`.
    """
    ratio = (log_p - log_sampled).exp()
    gain = advantage.unsqueeze(1)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1.0 - clip, 1.0 + clip) * gain)
    return -masked_mean(surrogate, mask).mean()


def understanding_loss(log_p: Tensor, mask: Tensor, *, per_token: bool) -> Tensor:
    """(7): mean over texts of -log p_theta([x, M'(y)]); `per_token` divides each by its number of tokens.

    log_p, mask: (B, T) over the tokens of text and sentence.
    """
    return -(masked_mean(log_p, mask) if per_token else (log_p * mask).sum(-1)).mean()


def divergences(log_p: Tensor, log_old: Tensor, mask: Tensor) -> Tensor:
    """KL(p_theta || p_old) of the next token at each sampled prefix, over the whole vocabulary: (B, T), >= 0.

    log_p, log_old: (B, T, V) log-probabilities; mask: (B, T), and the result is 0 where it is. The sequence
    KL of (8) is a sum over all texts there are; at the prefixes that were sampled each term is exact, so
    that, unlike an estimate from the sampled token alone, none is negative.
    """
    # Rounding may leave -1e-8 where the two agree.
    return (log_p.exp() * (log_p - log_old)).sum(-1).clamp(min=0.0) * mask


def divergence_loss(divergence: Tensor, mask: Tensor, *, per_token: bool) -> Tensor:
    """(8): mean over texts of the sum of `divergences` over a text's tokens, or of their mean."""
    return (masked_mean(divergence, mask) if per_token else (divergence * mask).sum(-1)).mean()


def total_loss(
    generation: Tensor, understanding: Tensor, divergence: Tensor, gammas: tuple[float, float, float]
) -> Tensor:
    """(9): L = g1 L_g + g2 L_t + g3 L_r."""
    g1, g2, g3 = gammas
    return g1 * generation + g2 * understanding + g3 * divergence


def diversity(vectors: Tensor) -> Tensor:
    """D_j = 1 - max over k != j of cos(v_j, v_k): (n, d) to (n,), in [0, 2]; a text alone has D = 1.

    The paper leaves a lone text undefined; 1 is what a text orthogonal to all others has.
    """
    if len(vectors) < 2:
        return torch.ones(len(vectors), dtype=vectors.dtype)
    unit = torch.nn.functional.normalize(vectors, dim=1)
    nearest = []
    for start in range(0, len(unit), _ROWS):
        # All pairs of 20,000 texts at once would be 1.6 GB.
        cosine = unit[start : start + _ROWS] @ unit.T
        own = torch.arange(len(cosine))
        cosine[own, start + own] = -torch.inf
        nearest.append(cosine.max(1).values)
    return 1.0 - torch.cat(nearest).clamp(-1.0, 1.0)


def scores(reward: Tensor, vectors: Tensor) -> Tensor:
    """(10): r_j D_j, shape (n,)."""
    return reward * diversity(vectors)


def kept_count(texts: int, keep: float) -> int:
    """How many of `texts` the share `keep` is, at least one where there is any."""
    return min(texts, max(1, round(keep * texts)))


def _best_first(score: Tensor) -> list[int]:
    order: list[int] = score.argsort(descending=True, stable=True).tolist()
    return order


def select(score: Tensor, keep: float) -> list[int]:
    """The paper's choice: the share `keep` with the highest scores, best first; ties by position."""
    return _best_first(score)[: kept_count(len(score), keep)]


def select_balanced(
    score: Tensor, good: Tensor, labels: Tensor, vectors: Tensor, keep: float, classes: int
) -> list[int]:
    """The stable choice: only `good` texts (n,), no duplicates, and no class more than its share.

    Of `kept_count` places each of the `classes` labels gets an equal number (one more where it does not
    divide, to the best scores). Places that a label cannot fill stay empty: giving them to another would
    teach the small model that the label is rare. Of texts whose vectors (n, d) have a cosine above 0.999 only
    the best is kept. Gives positions, every label's best first.
    """
    places = kept_count(len(score), keep)
    most = -(-places // classes)
    unit = torch.nn.functional.normalize(vectors, dim=1)
    taken = [0] * classes
    ranked: list[tuple[int, int]] = []
    for j in _best_first(score):
        label = int(labels[j])
        chosen = [k for _, k in ranked]
        if not bool(good[j]) or taken[label] >= most or bool((unit[chosen] @ unit[j] > _SAME).any()):
            continue
        ranked.append((taken[label], j))
        taken[label] += 1
    ranked.sort(key=lambda pair: pair[0])  # stable: within a rank the best score comes first
    return [j for _, j in ranked[:places]]


def distinct(tokens: Sequence[Sequence[str]], n: int) -> float:
    """distinct-n (Li et al. 2016): different n-grams over all n-grams of the texts, in [0, 1]; 0 with none.

    It falls when the texts begin to repeat each other, which a rising mean reward does not show.
    """
    grams = [tuple(text[i : i + n]) for text in tokens for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
