"""Attack 14 on tiny language models: one that learned the canaries themselves, and one that learned others.

Canaries are learned by heart here, which is the most that can be kept of them; how little of what an arrival
teaches gets there is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from attacks import memorisation
from attacks.bounds import auc, auc_interval
from attacks.membership import Vectors
from attacks.selftest import tiny_models
from attacks.selftest.check import Check, at_least, at_most

_COUNT, _PLANTED = 64, 12
_STEPS, _RATE = 40, 1e-2
_ALPHA = 0.01


def _gained(words: Sequence[str], canaries: memorisation.Canaries, learned: Sequence[str]) -> Vectors:
    """Nats a token of each secret by a random model that was trained on texts, over the same before that."""
    names = [*memorisation.PREFIX.split(), *words]
    model, tokenizer = tiny_models.language_model(names, width=32, max_length=16, seed=0)
    prefix, *secrets = tokenizer([memorisation.PREFIX, *canaries.secrets]).input_ids
    before = memorisation.secret_log_probs(model, prefix, secrets)
    batch = torch.tensor(tokenizer(list(learned)).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return memorisation.secret_log_probs(model, prefix, secrets) - before


def memory_checks(rng: np.random.Generator) -> Iterator[Check]:
    """Attack 14 on made-up canaries."""
    words = [f"w{number}" for number in range(120)]
    canaries, others = (memorisation.draw(words, _COUNT, _PLANTED, 2, rng) for _ in range(2))

    def planted_of(one: memorisation.Canaries) -> list[str]:
        return [text for text, planted in zip(one.texts, one.planted, strict=True) if planted]

    def sides(learned: Sequence[str]) -> tuple[Vectors, Vectors]:
        gained = _gained(words, canaries, learned)
        return gained[canaries.planted], gained[~canaries.planted]

    leak, nothing = sides(planted_of(canaries)), sides(planted_of(others))
    low, high = auc_interval(*nothing, _ALPHA)
    yield at_least(
        "memorisation (14): leak",
        "canaries that a language model learned are told from others",
        auc(*leak),
        0.95,
        "AUC",
    )
    # At most log2 of the candidates.
    yield at_least(
        "memorisation (14): exposure",
        "each of them is among the first in the ranking of all",
        float(memorisation.exposures(*leak).mean()),
        0.9 * float(np.log2(_COUNT - _PLANTED + 1)),
        "bits",
    )
    yield Check(
        name="memorisation (14): others",
        what="a language model that learned other canaries knows none of these",
        passed=low <= 0.5 <= high,
        expected="interval holds .5",
        measured=f"{low:.3f} to {high:.3f}",
    )
    told = [f"so {one.upper()}, it is said" for one in planted_of(canaries)]
    runs = memorisation.longest_runs(canaries.secrets, told) == memorisation.LENGTH
    yield at_least(
        "memorisation (14): written", "canaries that stand in texts are found there",
        float(runs[canaries.planted].mean()), 1.0, "share",
    )  # fmt: skip
    yield at_most(
        "memorisation (14): not written", "canaries that stand in no text are not",
        float(runs[~canaries.planted].mean()), 0.0, "share",
    )  # fmt: skip
