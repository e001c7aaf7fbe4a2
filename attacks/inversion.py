"""Attack 9: a text is read off a pooled vector by whoever has the encoder's weights.

Each position holds a mixture of tokens, softmax(theta / temperature) over the vocabulary, the encoder is run
on the mixtures of their vectors, and theta follows the gradient of |f(V^T Z) - x|^2 while the temperature
falls (Song and Raghunathan, CCS 2020). Token by token exchanges, chosen by the same gradient and
tried on the encoder, then clean up what the mixtures left.

Measured on 24 single MiniLM vectors of film reviews with 3,000 auxiliary rows (examples/inversion_study.py,
intervals of 95 %): token F1 .49 [.43, .56] at a cosine of .90, where a random review has .14, as many of the
most frequent tokens .30, and what was read against other reviews .14. The relaxed texts alone reach a cosine
of .74: the exchanges are the attack, and the mixtures serve to measure proposition 3, which of one row never
says anything. Mixtures begun at chance, without what a linear map says of the tokens, read no more than a
random review has (eight targets), though they come within .02 of |x|^2.

This room reads a model, token ids and vectors; it touches no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attacks.covariance import sample_covariance
from attacks.decoder import WEIGHT, Ask, Climb, Gains, cosines
from attacks.dictionary import Ids
from attacks.findings import Bound
from attacks.membership import Vectors, check_vectors, chunks
from attacks.propositions import largest_singular_value, proposition_3
from attacks.word_maps import Reader, Single
from securefl.errors import ModelError, SecureflError
from securefl.release import Claim, GaussianSums
from securefl.slm import Slm

# The relaxation costs as much as the exchanges and adds little to them, so it gets no more.
STEPS = 150
BUDGET = 1000
# Of the mean log-probability of a mixture's tokens, against |f - x|^2 / |x|^2, in the relaxation.
_DRAWN = 0.05
_RATE = 0.1
_WARM, _COLD = 1.0, 0.2
_BATCH = 128


@contextmanager
def _evaluating(slm: Slm) -> Iterator[None]:
    training = slm.training
    slm.eval()
    try:
        yield
    finally:
        slm.train(training)


def token_table(slm: Slm) -> Tensor:
    """(V, e) vectors of the tokens as the encoder looks them up. Raises ModelError without such a table."""
    table = slm.model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ModelError(f"{slm.name}: has no table of token vectors to mix")
    return table.weight.detach()


def pooled_mixtures(slm: Slm, vectors: Tensor, mask: Tensor) -> Tensor:
    """(B, d) pooled vectors of texts given as token vectors (B, S, e); mask: (B, S) int64, 1 at real ones.

    A hook puts them where the encoder looks its tokens up, so that any architecture adds what it adds there.
    """
    token_table(slm)
    # Which tokens stand in for the mixtures says where a text ends: RoBERTa counts its places by them.
    padding = int(slm.tokenizer.pad_token_id)
    ids = torch.where(mask > 0, (padding + 1) % int(slm.model.config.vocab_size), padding)
    hook = slm.model.get_input_embeddings().register_forward_hook(lambda *_: vectors)
    try:
        return slm.pooled({"input_ids": ids, "attention_mask": mask})
    finally:
        hook.remove()


def asking(slm: Slm, unit: bool = False) -> Ask:
    """The encoder as a black box: whole texts as token ids to their pooled vectors (n, d).

    unit: vectors are scaled to length 1, as sentence encoders often do.
    """

    def ask(texts: Sequence[Ids]) -> Single:
        out = np.zeros((len(texts), slm.width), np.float32)
        lengths = np.array([len(text) for text in texts])
        order = np.argsort(lengths, kind="stable")
        with _evaluating(slm), torch.inference_mode():
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                ids, mask = _padded([texts[i] for i in chosen], int(slm.tokenizer.pad_token_id))
                batch = {"input_ids": ids.to(slm.device), "attention_mask": mask.to(slm.device)}
                pooled = slm.pooled(batch)
                out[chosen] = (nn.functional.normalize(pooled, dim=-1) if unit else pooled).cpu().numpy()
        return out

    return ask


def _padded(texts: Sequence[Ids], padding: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), padding)
    mask = torch.zeros((len(texts), longest), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), 1
    return ids, mask


def _released(vectors: Tensor, claim: Claim, unit: bool) -> Tensor:
    """Pooled vectors as they were averaged: of length 1 where `unit`, and clipped as the claim says."""
    if unit:
        vectors = nn.functional.normalize(vectors, dim=-1)
    if not isinstance(claim, GaussianSums):
        return vectors
    shrunk: Tensor = vectors * (claim.clip / vectors.norm(dim=-1, keepdim=True).clamp(min=claim.clip))
    return shrunk


@dataclass(frozen=True, repr=False)
class Relaxed:
    """Mixtures read off q targets.

    shares: of each target (n, c), the mixture of the vocabulary at each of its n inner positions. tokens: the
    whole texts of their largest shares. residuals: (q,) |f(V^T Z) - x|.
    """

    shares: list[Single]
    tokens: list[Ids]
    residuals: Vectors


def relax(
    slm: Slm,
    reader: Reader,
    centroids: Vectors,
    lengths: Ids,
    rng: np.random.Generator,
    *,
    steps: int = STEPS,
    drawn: float = _DRAWN,
    unit: bool = False,
) -> Relaxed:
    """Mixtures of tokens whose pooled vectors are near `centroids` (q, d), all in one batch.

    lengths: (q,) inner positions of each, as the attacker guesses (`Reader.lengths`) or knows them. The
    mixtures are over the reader's vocabulary, the tokens of auxiliary text: MiniLM's whole vocabulary has
    30,522, of which 8,935 hold 95.5 % of the tokens of reviews, and the others are mostly pieces that fit
    anywhere. Special tokens around a text stand fixed. drawn: 0 begins at chance and lets the vectors alone
    decide; else theta begins at the reader's log-probabilities and is drawn to them. unit: see `asking`.
    Memory: 6 q S c numbers. Raises SecureflError for centroids that are not finite, of another width, or
    lengths that no text has.
    """
    aims = check_vectors(centroids, "the released centroids")
    if aims.shape[1] != slm.width or len(lengths) != len(aims):
        raise SecureflError(f"{len(lengths)} lengths for {aims.shape} centroids of an encoder of {slm.width}")
    room = slm.max_length - len(reader.prefix) - len(reader.suffix)
    if steps < 1 or not len(aims) or lengths.min() < 1 or lengths.max() > room:
        raise SecureflError(f"a relaxation needs steps, a target, and texts of 1 to {room} inner tokens")
    device = slm.device
    likely = torch.from_numpy(reader.log_probabilities(aims)).float().to(device)[:, None]
    fixed = [reader.whole(np.zeros(n, np.int64)) for n in lengths]
    ids, mask = (one.to(device) for one in _padded(fixed, int(slm.tokenizer.pad_token_id)))
    first, n = len(reader.prefix), int(lengths.max())
    inner = (torch.arange(n, device=device) < torch.from_numpy(lengths).to(device)[:, None]).float()
    table = token_table(slm)
    words, around = table[torch.from_numpy(reader.vocabulary).to(device)], table[ids]
    place = nn.functional.pad(inner, (first, ids.shape[1] - first - n))[..., None]
    target = torch.from_numpy(aims).float().to(device)
    size = (target**2).sum(1).clamp(min=1e-12)
    draw = rng.standard_normal((len(aims), n, len(reader.vocabulary)), np.float32)
    theta = torch.from_numpy(0.01 * draw).to(device)
    if drawn:
        theta = theta + likely
    theta.requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=_RATE)

    def output(shares: Tensor) -> Tensor:
        mixed = nn.functional.pad(shares @ words, (0, 0, first, ids.shape[1] - first - n))
        pooled = pooled_mixtures(slm, torch.where(place > 0, mixed, around), mask)
        return _released(pooled, reader.claim, unit)

    with _evaluating(slm):
        for step in range(steps):
            temperature = _WARM * (_COLD / _WARM) ** (step / max(1, steps - 1))
            shares = (theta / temperature).softmax(-1)
            loss = (((output(shares) - target) ** 2).sum(1) / size).sum()
            if drawn:
                fit = ((shares * likely).sum(-1) * inner).sum(1) / inner.sum(1)
                loss = loss - drawn * fit.sum()
            (theta.grad,) = torch.autograd.grad(loss, theta)
            optimizer.step()
        with torch.inference_mode():
            shares = (theta / _COLD).softmax(-1)
            left = (output(shares) - target).norm(dim=1)
    found = [one[:length].cpu().numpy() for one, length in zip(shares, lengths, strict=True)]
    texts = [reader.whole(reader.vocabulary[one.argmax(1)]) for one in found]
    return Relaxed(found, texts, np.asarray(left.cpu().numpy(), np.float64))


def distance(reader: Reader, shares: Single, truth: Ids) -> float:
    """|Z - Z*|_F of mixtures (n, c) and a true whole text, over inner positions.

    A position that only one of the two has counts as zeros in the other, and so does, in Z, a token outside
    the reader's vocabulary.
    """
    inner = reader.inner(truth)
    columns = np.searchsorted(reader.vocabulary, inner)
    known = reader.vocabulary[np.minimum(columns, len(reader.vocabulary) - 1)] == inner
    both = min(len(inner), len(shares))
    rows = np.flatnonzero(known[:both])
    overlap = float(shares[rows, columns[rows]].sum())
    return float(np.sqrt(max(0.0, float((shares.astype(np.float64) ** 2).sum()) + len(inner) - 2 * overlap)))


def gradient_gains(slm: Slm, reader: Reader, centroid: Vectors, unit: bool = False) -> Gains:
    """What each exchange should raise the cosine by, to first order in the token's vector."""
    aim = torch.from_numpy(reader.turned(centroid[None])[0]).float().to(slm.device)
    centre, metric = (torch.from_numpy(one).float().to(slm.device) for one in (reader.centre, reader.metric))
    table = token_table(slm)
    words = table[torch.from_numpy(reader.vocabulary).to(slm.device)]

    def gains(text: Ids, _: Vectors) -> Vectors:
        ids = torch.from_numpy(text)[None].to(slm.device)
        vectors = table[ids].clone().requires_grad_()
        with _evaluating(slm):
            pooled = pooled_mixtures(slm, vectors, torch.ones_like(ids))[0]
            turned = (_released(pooled, reader.claim, unit) - centre) @ metric
            (slope,) = torch.autograd.grad((turned @ aim) / turned.norm(), vectors)
        inner = slice(len(reader.prefix), len(text) - len(reader.suffix))
        own = (slope[0, inner] * table[ids][0, inner]).sum(-1, keepdim=True)
        return np.asarray((slope[0, inner] @ words.T - own).cpu().numpy(), np.float64)

    return gains


@dataclass(frozen=True, repr=False)
class Inverted:
    """What was read of q targets. tokens: whole texts. cosines: (q,) of their vectors and the targets, with
    relaxed_cosines before the exchanges. relaxed: the mixtures."""

    tokens: list[Ids]
    cosines: Vectors
    relaxed: Relaxed
    relaxed_cosines: Vectors


def invert(
    slm: Slm,
    reader: Reader,
    centroids: Vectors,
    rng: np.random.Generator,
    *,
    lengths: Ids | None = None,
    steps: int = STEPS,
    budget: int = BUDGET,
    weight: float = WEIGHT,
    unit: bool = False,
) -> Inverted:
    """Relax, then exchange tokens, for each of q centroids (q, d) as released.

    lengths: (q,) inner tokens where they are known; else the reader's guess. budget: texts tried a target.
    The exchanges begin at the better of the relaxed text and the reader's most probable tokens.
    """
    aims = check_vectors(centroids, "the released centroids")
    given = reader.lengths(aims) if lengths is None else lengths
    relaxed = relax(slm, reader, aims, given, rng, steps=steps, unit=unit)
    ask = asking(slm, unit)
    tokens = []
    for aim, likely, text, n in zip(aims, reader.log_probabilities(aims), relaxed.tokens, given, strict=True):
        climb = Climb(reader, ask, aim, likely, rng, weight, gradient_gains(slm, reader, aim, unit))
        starts = [text, reader.start(likely, int(n))]
        tokens.append(climb.run(starts[int(climb.score(starts).argmax())], budget))
    return Inverted(
        tokens,
        cosines(reader, ask, tokens, aims),
        relaxed,
        cosines(reader, ask, relaxed.tokens, aims),
    )


def check_proposition_3(
    name: str,
    slm: Slm,
    reader: Reader,
    shares: Single,
    residual: float,
    truths: Sequence[Ids],
    auxiliary: NDArray[np.floating],
    rng: np.random.Generator,
    unit: bool = False,
) -> Bound:
    """Proposition 3 on one target: mixtures (n, c) and what they left, against the k true texts behind it.

    The true text that is nearest is the one measured: as it stands it has no residual, and the local constant
    of the encoder is taken there. sigma is of auxiliary vectors, as if they were a round Gaussian's. Zbar is
    what the relaxation reached, with its own residual, so nothing is unreached.
    """
    _, covariance = sample_covariance(rows for _, rows in chunks(auxiliary))
    gaps = [distance(reader, shares, text) for text in truths]
    nearest = truths[int(np.argmin(gaps))]
    table = token_table(slm)
    ids = torch.from_numpy(nearest).to(slm.device)
    mask = torch.ones_like(ids)[None]
    with _evaluating(slm):
        steepness = largest_singular_value(
            lambda vectors: _released(pooled_mixtures(slm, vectors[None], mask)[0], reader.claim, unit),
            table[ids],
            rng,
        )
    return proposition_3(
        name,
        width=slm.width,
        k=len(truths),
        sigma=float(np.sqrt(np.trace(covariance) / len(covariance) * (1 - 1 / len(auxiliary)))),
        residuals=residual,
        lipschitz=steepness,
        table_norm=float(table.norm()),
        measured=min(gaps),
    )
