"""What a configuration and its rows cannot do together, found before a simulation trains anything.

Looks at the silos' numbers of rows, which only somebody who plays all parties may see.
"""

from __future__ import annotations

from securefl.agreement import (
    check_cohort,
    check_rows,
    fixed_points,
    steps_of_round,
    sum_terms,
    weighs_rows,
)
from securefl.config import AVERAGING, Config
from securefl.data import Corpus
from securefl.dp_terms import training_mechanism
from securefl.errors import ConfigError, NotAvailable
from securefl.participation import check_participation
from securefl.privacy import check_delta
from securefl.simulated_policy import refuse_early

COARSEST = 1e-2  # largest error of a weight in a masked mean; weights of encoders are some hundredths


def refuse_impossible(config: Config, corpus: Corpus) -> None:
    """Refuse what would fail in a later round, or spoil the result without a word.

    Raises ConfigError, NotAvailable, and as `simulated_policy.refuse_early`.
    """
    refuse_early(config)
    check_cohort(config, len(corpus.train))
    if config.federation.method in AVERAGING:
        check_participation(config, corpus.train, "")
    for name, rows in corpus.train.items():
        check_rows(config, len(rows), name)
    training_mechanism(config, 1)
    _check_deltas(config, corpus)
    _check_resolution(config, corpus)
    _check_drops(config, corpus)
    models = config.slm.models
    if len(models) not in (1, len(corpus.train)):
        raise NotAvailable(
            f"slm.models names {len(models)} models for {len(corpus.train)} silos; "
            "name one for all, or one for each"
        )


def _check_resolution(config: Config, corpus: Corpus) -> None:
    """Refuse a masked sum so coarse that it would spoil the model without a word."""
    terms = sum_terms(config, len(corpus.train))
    if terms is None or terms.noise is not None or config.protection.models != "masked":
        return
    rows = {name: len(part) for name, part in corpus.train.items()}
    values, counts = fixed_points(terms, len(rows))
    step = values.resolution + values.clip * counts.resolution
    weight = sum(rows.values()) / terms.max_rows if weighs_rows(config) else float(len(rows))
    error = len(rows) * step / weight
    if error > COARSEST:
        raise ConfigError(
            f"protection: every weight of the sum would be off by up to {error:.1e}, above {COARSEST:g}"
            f"; set max_rows near the largest silo's {max(rows.values())} rows, lower the clip of "
            f"{terms.clip:g}, or use more than {terms.bits} bits"
        )


def _check_deltas(config: Config, corpus: Corpus) -> None:
    """Whether each delta is small enough for every silo's units."""
    privacy, validation = config.privacy, corpus.validation
    centroids = privacy.centroids if privacy.centroids.noised else None
    for section, terms, parts in (
        ("dp_sgd", privacy.dp_sgd, corpus.train),
        ("centroids", centroids, corpus.train),
        ("metrics", privacy.metrics, validation),
    ):
        if terms is not None:
            for name, rows in parts.items():
                check_delta(terms.delta, len(rows.by_unit()), name, section)


def _check_drops(config: Config, corpus: Corpus) -> None:
    federation = config.federation
    for name, drop in federation.drop.items():
        if name not in corpus.train:
            raise ConfigError(f"federation.drop: {name} is none of the silos of this run")
        numbers = range(1, federation.rounds + 1) if drop.round is None else [drop.round]
        if drop.round is not None and drop.round > federation.rounds:
            raise ConfigError(f"federation.drop.{name}: there is no round {drop.round} in this run")
        if not any(drop.step in steps_of_round(number, config) for number in numbers):
            known = dict.fromkeys(step.value for number in numbers for step in steps_of_round(number, config))
            raise ConfigError(
                f"federation.drop.{name}: there is no step {drop.step} in that round, but: {', '.join(known)}"
            )
