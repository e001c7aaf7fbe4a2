"""Attack 14 as it is put to a run: an arrival of CrossLM made once more, with canaries among a silo's rows.

The language model of a run is not kept, so it is taught again: the silo's small model is trained as the run
trains it, with DP-SGD where the run has that, on its rows and the planted canaries, and arrives at a fresh
language model by the very code that a run has. What that model gained on canaries that were planted is held
against those that were not; chance chose between them. All it learns of the rows it learns from the small
model, so a claim on that one's weights bounds what can be told here.

How often the small model itself gives its canaries away is stated beside it: where it kept nothing, that the
language model kept nothing either shows little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from attacks.adversary import MEMORISATION, NotEnough
from attacks.attack import Attack, Progress
from attacks.bench.models import sorted_labels
from attacks.bounds import ALPHA, auc, auc_interval
from attacks.evidence import Evidence, label_ids
from attacks.figures import NO_CLAIM, UNBOUNDED, Auc, Figure, Proportion
from attacks.judgement import Book
from attacks.membership import Vectors
from attacks.memorisation import (
    LENGTH,
    PREFIX,
    Canaries,
    chance_exposure,
    draw,
    exposures,
    longest_runs,
    secret_log_probs,
)
from attacks.model_membership import trade_off
from attacks.runs import Run
from securefl.crosslm_worker import CrossLmWorker
from securefl.data import Rows
from securefl.dp_terms import training_mechanism
from securefl.errors import SecureflError, UsageError
from securefl.local import derive_seed, starting_slm, train_locally
from securefl.models import base_fingerprint
from securefl.privacy import noise_source
from securefl.release import DpSgd
from securefl.result import ClientRow
from securefl.slm import Slm
from securefl.training import probabilities

NAME = "memorisation by the language model"
CANARIES, PLANTED = 128, 16
# Rows of a planted canary where no claim is made; of one who is protected there is but one, or a unit's.
COPIES = 4
_LEAST_ROWS = 16
_WORD = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True, repr=False)
class _Taught:
    """What one arrival with canaries came to.

    gained: (n,) nats a token of each canary's secret by the taught model over the original. runs: (n,) words
    of it in a row in what that model wrote, in `texts` texts. surer: (n,) log-probability of its label by the
    small model. claim: on that one's weights. kl: of the taught model to the original, nats a token.
    """

    canaries: Canaries
    copies: int
    gained: Vectors
    runs: NDArray[np.int64]
    texts: int
    surer: Vectors
    claim: DpSgd | None
    kl: float

    def sides(self, scores: Vectors) -> tuple[Vectors, Vectors]:
        """Of the planted canaries, and of the others."""
        return scores[self.canaries.planted], scores[~self.canaries.planted]


def _missing(evidence: Evidence) -> str | None:
    run = evidence.run
    learned = run is not None and run.method == "crosslm"
    return None if learned else "no language model learned in this run"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    run = evidence.run
    assert run is not None  # `_missing` says so
    # One silo is enough: what teaches the language model is the same for all.
    client = run.result.clients[0]
    where = f"{client.name}, its first arrival once more"
    say(0, f"{where}, with canaries")

    def attempt(page: Book) -> None:
        try:
            page.figures += _figures(client, _attack(run, evidence, client))
        except NotEnough as why:
            page.skip_at(NAME, where, str(why))

    book.part(f"14 {client.name}", attempt)


def _attack(run: Run, evidence: Evidence, client: ClientRow) -> _Taught:
    own, labels = run.rows(client.name), sorted_labels(run)
    if len(own) < _LEAST_ROWS:
        raise NotEnough(f"{len(own)} rows, among which no canary is hidden; {_LEAST_ROWS} are needed")
    words = sorted({word for text in evidence.halves[0].texts for word in _WORD.findall(text.lower())})
    try:
        rng = np.random.default_rng([run.seed, 14])
        canaries = draw(words, CANARIES, PLANTED, len(labels), rng)
    except UsageError as error:
        raise NotEnough(f"the auxiliary text has too few words to make canaries of: {error}") from error
    names = {label: number for number, label in enumerate(labels)}
    rows = Rows(own.ids, own.texts, label_ids(own, names))
    try:
        return _teach(run, client, rows, labels, canaries)
    except SecureflError as error:
        raise NotEnough(f"the arrival could not be made again: {error}") from error


def _teach(run: Run, client: ClientRow, known: Rows, labels: tuple[str, ...], canaries: Canaries) -> _Taught:
    config = run.config
    # The auditor's machine is not the run's: what computes is not what is learned.
    terms = config.crosslm.model_copy(update={"device": "auto", "backend": "torch", "unusable": "go-on"})
    worker = CrossLmWorker(
        terms, labels, seed=derive_seed(run.seed, "llm"), slm=config.slm, encoder=terms.encoder
    )
    slm, epochs = starting_slm(client.model, labels, config), config.round_epochs(1)
    mechanism = training_mechanism(config, epochs)
    copies = COPIES if mechanism is None else min(COPIES, mechanism.per_unit)
    rows = _with_canaries(known, canaries, copies, by_unit=config.data.unit is not None)
    noise = noise_source(derive_seed(run.seed, client.name, "canaries"))
    claim = train_locally(slm, rows, config, epochs, derive_seed(run.seed, "canaries"), noise)
    report = worker.arrival(slm, client.name).report
    if report["kl"] is None:
        raise NotEnough(f"the language model learned nothing in it: {report['note']}")
    texts = _written(worker, run.seed)
    return _Taught(
        canaries=canaries,
        copies=copies,
        gained=_gained(worker, canaries),
        runs=longest_runs(canaries.secrets, texts),
        texts=len(texts),
        surer=_surer(slm, canaries),
        claim=claim,
        kl=float(report["kl"]),
    )


def _with_canaries(known: Rows, canaries: Canaries, copies: int, *, by_unit: bool) -> Rows:
    """A silo's rows and `copies` of every planted canary, which are one unit; each other text is one too."""
    planted = np.repeat(np.flatnonzero(canaries.planted), copies)
    marks = tuple(f"canary-{index}-{number % copies}" for number, index in enumerate(planted))
    units = (*known.ids, *(f"canary-{index}" for index in planted)) if by_unit else ()
    texts = tuple(canaries.texts[index] for index in planted)
    labels = np.concatenate([known.labels, canaries.labels[planted]])
    return Rows((*known.ids, *marks), (*known.texts, *texts), labels, units)


def _written(worker: CrossLmWorker, seed: int) -> list[str]:
    """What the taught model writes: as for the next silo, and as often what it is asked to go on with."""
    count = worker.config.synthetic
    samples, _ = worker.task.synthesise(count, derive_seed(seed, "canaries", "texts"))
    asked = worker.llm.write(
        [PREFIX] * count,
        max_new_tokens=worker.config.max_new_tokens,
        top_p=worker.config.top_p,
        top_k=worker.config.top_k,
        seed=derive_seed(seed, "canaries", "asked"),
    )
    return [sample.text for sample in samples] + [one.text for one in asked]


def _gained(worker: CrossLmWorker, canaries: Canaries) -> Vectors:
    llm = worker.llm
    prefix, secrets = llm.encode(PREFIX), [llm.encode_inner(f" {secret}") for secret in canaries.secrets]
    after = secret_log_probs(llm.model, prefix, secrets)
    with llm.original():
        before = secret_log_probs(llm.model, prefix, secrets)
    return after - before


def _surer(slm: Slm, canaries: Canaries) -> Vectors:
    said = probabilities(slm, canaries.texts)[np.arange(len(canaries.labels)), canaries.labels]
    return np.log(np.maximum(said.astype(np.float64), 1e-30))


def _figures(client: ClientRow, taught: _Taught) -> list[Figure]:
    planted, others = taught.sides(taught.gained)
    known, unknown = taught.sides(taught.surer)
    written, strange = taught.sides(taught.runs.astype(np.float64))
    found = exposures(planted, others)
    cap = None if taught.claim is None else trade_off([taught.claim])
    # A report shows the first few.
    details: dict[str, object] = {
        "slm_auc": auc(known, unknown),
        "slm_auc_interval": list(auc_interval(known, unknown, ALPHA)),
        "kl": taught.kl,
        "rows_of_a_canary": taught.copies,
        "canaries": len(taught.gained),
        "planted": len(planted),
        "texts": taught.texts,
        "base": client.model,
        "base_sha256": base_fingerprint(client.model),
    }
    exposure = {
        "exposure_mean": float(found.mean()),
        "exposure_by_chance": chance_exposure(len(others)),
        "exposure_most": float(found.max()),
        "exposure_at_most": float(np.log2(len(others) + 1)),
    }
    runs = {"words_in_a_row_planted": float(written.mean()), "words_in_a_row_others": float(strange.mean())}
    told = Auc(planted, others)
    right = Proportion(int((written == LENGTH).sum()), len(written))
    claim_epsilon = None if taught.claim is None else taught.claim.epsilon
    figure = partial(
        Figure,
        attack=NAME,
        number=14,
        adversary=MEMORISATION,
        target=f"{len(planted)} canaries among the rows behind one arrival",
        silo=client.name,
        round=1,
        claim_epsilon=claim_epsilon,
    )
    return [
        figure(
            metric="canary_auc",
            measure=told,
            baseline=0.5,
            cap=None if cap is None else cap.auc(),
            cap_reason=NO_CLAIM if cap is None else None,
            adjacency="replace-one",
            bears_on=("singling_out", "linkability"),
            details={**exposure, **details},
        ),
        figure(
            metric="canaries_written",
            measure=right,
            baseline=0.0,
            cap_reason=NO_CLAIM if cap is None else UNBOUNDED,
            bears_on=("inference",),
            control=float((strange == LENGTH).mean()),
            details={**runs, **details},
        ),
    ]


ATTACK = Attack(14, NAME, MEMORISATION, _missing, _run)
