"""How much attack 2 reads: recall over sizes and noises (`recall_grid`), and over layers (`layer_recall`).

Groups are drawn at random, as the published figures are. Rows come one at a time, so that a script may keep
each and skip what it has. Scores only: no text leaves this room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks import layer_tokens
from attacks.adversary import NotEnough
from attacks.assembly import Scorer, assemble, deal
from attacks.dictionary import Ids, Prior, end_ids, fit_prior, special_ids, token_ids, vocabulary_size
from attacks.token_scores import by_position, exact_texts, overlap
from attacks.tokens import Target, expected_counts, guesses, recover
from securefl.release import GaussianSums, NonPrivate
from securefl.slm import Slm
from securefl.training import embed

Row = dict[str, Any]
# So large that it cuts nothing; what is studied is the noise.
_CLIP = 1e4


def recall_grid(
    slm: Slm,
    texts: Sequence[str],
    auxiliary: Sequence[str],
    *,
    ks: Sequence[int],
    noises: Sequence[float],
    positions: int,
    seeds: Sequence[int],
    groups: int = 8,
    score: Scorer | None = None,
    skip: Callable[[int, float, int], bool] | None = None,
) -> Iterator[Row]:
    """A row for every size, noise and seed, in this order, save those that `skip(k, noise, seed)` names.

    texts: to draw groups and, from the rest, control texts from; auxiliary: other text, for the prior. noise:
    standard deviation on each number of a *centroid*, so k times as much on its sum. positions: at most
    `slm.max_length`. score: puts tokens together to texts; None leaves that out.

    Into one text of every group a made-up name is planted, two words that no auxiliary text has.

    A row: k, noise, seed, groups, tokens (content tokens behind the centroids), recall, baseline (of the
    frequency prior), control (recall of as many other texts by the same reading), certain (share of
    positions), names (share of planted names whose words were read next to each other), names_control (the
    same of each group's name in what was read of another); with `score` also texts, exact_texts,
    exact_texts_random (tokens dealt at random) and exact_texts_control (of the other texts). Raises NotEnough
    where `texts` has less than two groups of k.
    """
    ids, known = token_ids(slm, texts), token_ids(slm, auxiliary)
    prior = fit_prior(known, positions, vocabulary_size(slm))
    vectors, mask = embed(slm, texts, 0)
    vectors, mask = vectors[:, :positions], mask[:, :positions]
    ids = [one[:positions] for one in ids]
    for k in ks:
        for noise in noises:
            for seed in seeds:
                if skip is not None and skip(k, noise, seed):
                    continue
                rng = np.random.default_rng([seed, k])
                members, others = draw(len(texts), k, groups, rng)
                names = _names(slm, prior, len(members), np.random.default_rng([seed, k, 2]))
                hosts = [int(group[0]) for group in members]
                planted = [_planted(texts[host], name) for host, name in zip(hosts, names, strict=True)]
                own, seen, there = list(ids), vectors.copy(), mask.copy()
                changed, changed_mask = embed(slm, planted, 0)
                seen[hosts], there[hosts] = changed[:, :positions], changed_mask[:, :positions]
                for host, new in zip(hosts, token_ids(slm, planted), strict=True):
                    own[host] = new[:positions]
                target = release(seen, there, members, noise, np.random.default_rng([seed, k, 1]))
                read = recover(slm, target, prior, auxiliary)
                row: Row = {"k": k, "noise": noise, "seed": seed, "groups": len(members)}
                row |= scores(slm, target, prior, read.tokens, own, members, others)
                row |= _named(slm, read.tokens, names)
                row["certain"] = float(read.certain[target.mask > 0].mean())
                if score is not None:
                    row |= _whole(slm, read.tokens, own, members, others, score, rng)
                yield row


def layer_recall(
    slm: Slm,
    texts: Sequence[str],
    auxiliary: Sequence[str],
    *,
    layers: Sequence[int],
    ks: Sequence[int],
    positions: int,
    seed: int = 0,
    groups: int = 8,
) -> Iterator[Row]:
    """A row for every layer and size of exact means: layer, k, groups, tokens, recall, baseline, control, and
    for k = 1 nearest, the recall of the nearest contexts. Arguments as for `recall_grid`."""
    ids, known = ([one[:positions] for one in token_ids(slm, part)] for part in (texts, auxiliary))
    prior = fit_prior(known, positions, vocabulary_size(slm))
    for layer in layers:
        vectors, mask = (array[:, :positions] for array in embed(slm, texts, layer))
        aside, other_mask = (array[:, :positions] for array in embed(slm, auxiliary, layer))
        learnt = layer_tokens.learn(slm, auxiliary, aside, other_mask)
        for k in ks:
            members, others = draw(len(texts), k, groups, np.random.default_rng([seed, k]))
            target = release(vectors, mask, members, 0.0, np.random.default_rng(0))
            read = layer_tokens.recover_layer(slm, target, prior, auxiliary, learnt).tokens
            row: Row = {"layer": layer, "k": k, "seed": seed, "groups": len(members)}
            row |= scores(slm, target, prior, read, ids, members, others)
            if k == 1:
                found = layer_tokens.nearest(target, learnt, aside, other_mask, known)
                row["nearest"] = scores(slm, target, prior, found, ids, members, others)["recall"]
            yield row


def _names(slm: Slm, prior: Prior, count: int, rng: np.random.Generator) -> list[str]:
    """Names of two words of one token each, all different, that no auxiliary text has."""
    words: list[str] = []
    for token in rng.permutation(np.flatnonzero(prior.counts == 0)).tolist():
        word = slm.tokenizer.convert_ids_to_tokens(token)
        if isinstance(word, str) and word.isascii() and word.isalpha() and len(word) > 2:
            words.append(word)
        if len(words) == 2 * count:
            break
    if len(words) < 2 * count:
        raise NotEnough("the vocabulary has too few words that no auxiliary text has, to make up names of")
    return [" ".join(words[2 * i : 2 * i + 2]) for i in range(count)]


def _planted(text: str, name: str) -> str:
    first, *rest = text.split(" ", 1)
    return " ".join([first, name, *rest])


def _named(slm: Slm, read: list[list[Ids]], names: Sequence[str]) -> Row:
    """How many names were read, and how many of them in what was read of the next group."""
    special = special_ids(slm)
    wanted = [[int(i) for i in ids if i not in special] for ids in token_ids(slm, names)]

    def holds(row: list[Ids], name: list[int]) -> bool:
        return any(
            all(np.isin(token, row[start + at]) for at, token in enumerate(name))
            for start in range(len(row) - len(name) + 1)
        )

    own = [holds(row, name) for row, name in zip(read, wanted, strict=True)]
    other = [holds(row, name) for row, name in zip(read, [*wanted[1:], *wanted[:1]], strict=True)]
    control = float(np.mean(other)) if len(names) > 1 else 0.0
    return {"names": float(np.mean(own)), "names_control": control}


def draw(rows: int, k: int, groups: int, rng: np.random.Generator) -> tuple[list[Ids], list[Ids]]:
    """Random groups of k rows, and as many groups of other rows (the same k for all where there are few)."""
    if k < 1 or rows < 2 * k:
        raise NotEnough(f"{rows} texts; centroids of {k} and as many other texts need at least {2 * k}")
    order = rng.permutation(rows).astype(np.int64)
    count = min(groups, rows // k - 1)
    members = [order[c * k : (c + 1) * k] for c in range(count)]
    rest = order[count * k :]
    others = [np.resize(np.roll(rest, -c * k), k) for c in range(count)]
    return members, others


def release(
    vectors: NDArray[np.float32],
    mask: NDArray[np.float32],
    members: Sequence[Ids],
    noise: float,
    rng: np.random.Generator,
) -> Target:
    """The mean of each group at each position, or under noise its noised sum over its size."""
    k = len(members[0])
    sizes = np.full(len(members), k, np.float32)
    there = np.stack([mask[rows].sum(0) for rows in members])
    sums = np.stack([np.einsum("ns,nsd->sd", mask[rows], vectors[rows]) for rows in members])
    if noise == 0:
        means = sums / np.maximum(there, 1)[..., None]
        return Target(
            means.astype(np.float32), (there > 0).astype(np.float32), sizes, NonPrivate(reason="study")
        )
    centroids = (sums / k + rng.normal(0, noise, sums.shape)).astype(np.float32)
    claim = GaussianSums(
        epsilon=1.0, delta=1e-5, mu=1.0, clip=_CLIP, noise_multiplier=noise * k / _CLIP, count_multiplier=1.0,
        prediction_multiplier=1.0, generator="study", simulated=True,
    )  # fmt: skip
    return Target(centroids, np.ones(there.shape, np.float32), sizes, claim)


def scores(
    slm: Slm,
    target: Target,
    prior: Prior,
    read: list[list[Ids]],
    ids: Sequence[Ids],
    members: Sequence[Ids],
    others: Sequence[Ids],
) -> Row:
    ignore, positions = special_ids(slm), target.centroids.shape[1]
    truth, strangers = (
        [by_position([ids[row] for row in group], positions) for group in side] for side in (members, others)
    )
    found = overlap(read, truth, ignore)
    return {
        "tokens": int(found.true.sum()),
        "recall": found.recall,
        "baseline": overlap(guesses(prior, expected_counts(target, prior)), truth, ignore).recall,
        "control": overlap(read, strangers, ignore).recall,
    }


def _whole(
    slm: Slm,
    read: list[list[Ids]],
    ids: Sequence[Ids],
    members: Sequence[Ids],
    others: Sequence[Ids],
    score: Scorer,
    rng: np.random.Generator,
) -> Row:
    ends, ignore = end_ids(slm), special_ids(slm)
    counts = dict.fromkeys(("exact_texts", "exact_texts_random", "exact_texts_control"), 0)
    for row, group, strangers in zip(read, members, others, strict=True):
        found, dealt = assemble(row, ends, score), deal(row, ends, rng)
        true = [ids[one] for one in group]
        counts["exact_texts"] += exact_texts(found, true, ignore)
        counts["exact_texts_random"] += exact_texts(dealt, true, ignore)
        counts["exact_texts_control"] += exact_texts(found, [ids[one] for one in strangers], ignore)
    return {"texts": sum(map(len, members)), **counts}
