"""From the scores of an attack to figures with interval, baseline and cap, and to findings.

A figure keeps its interval as a function of alpha, so that the audit can widen it by the number of findings.
Numbers only: no files, no models, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks import membership, tokens
from attacks.adversary import MEMBERSHIP, TOKENS, Adversary
from attacks.bounds import (
    ALPHA,
    auc,
    auc_cap,
    auc_interval,
    epsilon_lower_bound,
    held_out_errors,
    mu_of_auc,
    ratio_interval,
    replace_one_mu,
    tpr_at,
    tpr_cap,
)
from attacks.findings import Finding, Verdict
from attacks.runs import Recorded
from securefl.privacy import gaussian_epsilon
from securefl.release import Claim, GaussianSums, Noised

Interval = Callable[[float], tuple[float, float]]

MEMBERSHIP_RATIO = "membership, likelihood ratio"
MEMBERSHIP_DOT = "membership, dot product"
TOKEN_RECOVERY = "token recovery"  # noqa: S105
FPR = 0.01
# Below this an interval spans nearly everything; the attack is then reported as not run, never as 0.
MIN_TRIALS = 8
_NO_CLAIM = "no differential privacy is claimed, so nothing is bounded"
_TOKENS_UNBOUNDED = (
    "(epsilon, delta) bounds what one unit changes; most recovered tokens are shared by many rows"
)


@dataclass(frozen=True)
class Figure:
    """A finding before the judgement: its interval is a function of alpha, so it can be widened."""

    attack: str
    number: int
    adversary: Adversary
    target: str
    metric: str
    value: float
    interval: Interval
    baseline: float
    cap: float | None
    cap_reason: str | None
    trials: int
    epsilon_lower_bound: float | None
    adjacency: str | None
    recorded: Recorded
    claim: Claim
    details: Mapping[str, Any]

    def verdict(self, alpha: float) -> Verdict:
        low = self.interval(alpha)[0]
        if self.cap is not None and low > self.cap:
            return "violates_claim"
        return "leaks" if low > self.baseline else "none_shown"

    def finding(self) -> Finding:
        epsilon = self.claim.epsilon if isinstance(self.claim, Noised) else None
        return Finding(
            attack=self.attack,
            number=self.number,
            adversary=self.adversary.describe(),
            knowledge=list(self.adversary.knowledge),
            target=self.target,
            silo=self.recorded.silo,
            round=self.recorded.row.round,
            metric=self.metric,
            value=self.value,
            ci=self.interval(ALPHA),
            baseline=self.baseline,
            cap=self.cap,
            cap_reason=self.cap_reason,
            trials=self.trials,
            claim_epsilon=epsilon,
            epsilon_lower_bound=self.epsilon_lower_bound,
            adjacency=self.adjacency,
            verdict=self.verdict(ALPHA),
            details={**self.details, "nist_class": self.adversary.nist},
        )


def membership_figures(
    recorded: Recorded, target: membership.Target, scores: membership.Scores, rng: np.random.Generator
) -> list[Figure]:
    """The figures of attack 1 on one release.

    The game is replace-one and about rows; a claim of either adjacency is converted to it. A claim about a
    unit of several rows bounds it too: a unit with one row exchanged is another unit.
    """
    claim, (members, others) = target.claim, scores.ratio
    delta = claim.delta if isinstance(claim, GaussianSums) else 0.0
    errors = held_out_errors(members, others, rng, lambda found: epsilon_lower_bound(found, delta))
    shown = epsilon_lower_bound(errors, delta)
    sizes = target.sizes
    details: dict[str, Any] = {
        "rows": float(sizes.mean()),
        "members": len(members),
        "controls": len(others),
        "encoder_alone_auc": scores.encoder_alone[0],
        "smallest_cluster": float(sizes.min()),
    }
    mu = 0.0
    if isinstance(claim, GaussianSums):
        mu = replace_one_mu(claim)
        details |= {
            "claim_adjacency": claim.adjacency,
            "claim_unit": claim.unit,
            "claim_epsilon_replace_one": gaussian_epsilon(mu, claim.delta),
            "claim_auc_cap": auc_cap(mu),
            "simulated": claim.simulated,
        }
        if scores.encoder_alone[1] > 0.5:
            # The round's model was trained on these rows and this claim does not cover it, whether it has one
            # of its own or not: what it shows by itself is composed with the claim (mu adds in squares)
            # before the claim is called broken.
            mu = float(np.hypot(mu, mu_of_auc(scores.encoder_alone[2])))
            details["encoder_in_cap"] = True
    private = isinstance(claim, GaussianSums)

    def figure(attack: str, metric: str, value: float, interval: Interval, base: float, cap: float) -> Figure:
        return Figure(
            attack,
            1,
            MEMBERSHIP,
            f"{len(sizes)} pooled centroids",
            metric,
            value,
            interval,
            base,
            cap if private else None,
            None if private else _NO_CLAIM,
            len(members) + len(others),
            shown if attack == MEMBERSHIP_RATIO else None,
            "replace-one",
            recorded,
            claim,
            details,
        )

    def rate(alpha: float) -> tuple[float, float]:
        at = tpr_at(members, others, FPR, alpha)
        return at.low, at.high

    return [
        figure(
            MEMBERSHIP_RATIO,
            "auc",
            auc(members, others),
            lambda alpha: auc_interval(members, others, alpha),
            0.5,
            auc_cap(mu),
        ),
        figure(
            MEMBERSHIP_RATIO,
            "tpr_at_1_percent_fpr",
            tpr_at(members, others, FPR).value,
            rate,
            FPR,
            tpr_cap(mu, FPR),
        ),
        figure(
            MEMBERSHIP_DOT,
            "auc",
            auc(*scores.dot),
            lambda alpha: auc_interval(*scores.dot, alpha),
            0.5,
            auc_cap(mu),
        ),
    ]


def token_figures(
    recorded: Recorded,
    target: tokens.Target,
    prior: tokens.Prior,
    recovered: tokens.Recovered,
    truth: list[list[tokens.Ids]],
    others: list[list[tokens.Ids]],
    special: frozenset[int],
    rng: np.random.Generator,
) -> list[Figure]:
    """The figures of attack 2: recall of each centroid, F1 and recall of rare tokens over all of them.

    truth, others: [centroid][position] tokens of the rows behind it, and of as many rows that are nobody's.
    """
    counts = tokens.expected_counts(target, prior)
    guesses = tokens.guesses(prior, counts)
    seed = int(rng.integers(2**31))
    figures: list[Figure] = []

    def figure(metric: str, name: str, found: tokens.Overlap, base: float, **details: Any) -> None:
        f1 = metric == "token_f1"
        hits, totals = (2 * found.hits, found.true + found.guessed) if f1 else (found.hits, found.true)
        figures.append(
            Figure(
                TOKEN_RECOVERY,
                2,
                TOKENS,
                name,
                metric,
                float(hits.sum() / totals.sum()),
                lambda alpha: ratio_interval(hits, totals, np.random.default_rng(seed), alpha),
                base,
                None,
                _TOKENS_UNBOUNDED if isinstance(target.claim, GaussianSums) else _NO_CLAIM,
                int(found.true.sum()),
                None,
                None,
                recorded,
                target.claim,
                {"units": len(hits), **details},
            )
        )

    for c, size in enumerate(target.sizes):
        one = tokens.overlap(recovered.tokens[c : c + 1], truth[c : c + 1], special)
        if one.true.sum() < MIN_TRIALS:
            continue
        guess = tokens.overlap(guesses[c : c + 1], truth[c : c + 1], special)
        stranger = tokens.overlap(recovered.tokens[c : c + 1], others[c : c + 1], special)
        figure(
            "token_recall",
            f"embedding-layer centroid {c + 1} of {len(truth)}",
            one,
            guess.recall,
            rows=float(size),
            recall_of_other_texts=stranger.recall if len(stranger.true) else None,
            certain_positions=float(recovered.certain[c][target.mask[c] > 0].mean()),
        )
    every, guess = (tokens.overlap(found, truth, special) for found in (recovered.tokens, guesses))
    bags = tokens.overlap(
        [[tokens.bag(row)] for row in recovered.tokens], [[tokens.bag(row)] for row in truth], special
    )
    name, rows = f"{len(truth)} embedding-layer centroids", float(target.sizes.mean())
    figure("token_f1", name, every, guess.f1, rows=rows, recall=every.recall, bag_recall=bags.recall)
    rare = tokens.overlap(recovered.tokens, truth, special, only=prior.counts == 0)
    if rare.true.sum() >= MIN_TRIALS:
        # No auxiliary text has these tokens, so a frequency prior never guesses one.
        figure("rare_token_recall", name, rare, 0.0, rows=rows)
    return figures
