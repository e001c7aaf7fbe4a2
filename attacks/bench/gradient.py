"""Attack 11 as it is put to a run: the texts behind every gradient of one batch that a silo sent.

Of all rounds of a silo together: how well the texts were put together (ROUGE), and which words were proved to
be in the batches. A text that the gradient does not give is guessed from frequencies, as the baseline guesses
all of them; so what is above the baseline was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacks.adversary import GRADIENT, NotEnough
from attacks.attack import Attack, Progress
from attacks.dictionary import Ids, fit_prior, special_ids, token_ids, vocabulary_size
from attacks.evidence import MIN_AUXILIARY, Evidence, label_ids, some_of
from attacks.figures import MIN_TRIALS, NO_CLAIM, Figure, Ratio, at
from attacks.findings import Question
from attacks.gradient_search import EFFORT, recover
from attacks.gradient_span import Found, OneStep, Rouge, frequent_texts, rouge
from attacks.judgement import Book
from attacks.runs import Recorded, Run, Texts
from attacks.token_scores import exact_texts
from securefl.data import Rows
from securefl.errors import ProtocolError
from securefl.release import NonPrivate, PayloadKind, Release, check_tensors
from securefl.slm import Slm
from securefl.training import batch_gradient

NAME = "gradient inversion"
# Auxiliary texts that the frequencies of tokens are counted in; of more the ids alone would fill the memory.
_MOST_AUXILIARY = 2**15
_EVERYTHING: tuple[Question, ...] = ("singling_out", "linkability", "inference")


def _missing(evidence: Evidence) -> str | None:
    if not _targets(evidence):
        return "no gradient was released"
    # Of a gradient from elsewhere nobody says which rows were in its batch.
    return None if evidence.run is not None else "which rows are behind a gradient is known of a run alone"


def _targets(evidence: Evidence) -> dict[str, list[Recorded]]:
    """The recorded gradients of each silo, by round."""
    found: dict[str, list[Recorded]] = {}
    for one in sorted(evidence.source.releases, key=lambda one: (one.silo, one.row.round)):
        if one.row.kind == PayloadKind.GRADIENT.value:
            found.setdefault(one.silo, []).append(one)
    return found


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    run, targets = evidence.run, _targets(evidence)
    assert run is not None  # `_missing` says so
    for done, (silo, gradients) in enumerate(targets.items()):
        say(done / len(targets), f"{silo}: texts from {len(gradients)} gradients")

        def attempt(page: Book, gradients: list[Recorded] = gradients) -> None:
            found = []
            for one in gradients:
                try:
                    found.append(_attack(run, evidence, one))
                except NotEnough as why:
                    page.skip(NAME, one, str(why))
            if found:
                page.figures += _figures(found, run.seed)

        book.part(" ".join(["11", silo, *(one.sha256 for one in gradients)]), attempt)


@dataclass(frozen=True, repr=False)
class _Read:
    """What one gradient gave, and what it is scored by.

    read, guessed, strange: ROUGE of the batch's texts by what was read, by frequencies, and of nobody's texts
    by what was read. proved, there, frequent, others: different tokens that were read, are in the batch, the
    baseline guesses, and are in nobody's texts. tokens: true number in the batch, special ones included.
    """

    recorded: Recorded
    release: Release
    read: Rouge
    guessed: Rouge
    strange: Rouge | None
    proved: set[int]
    there: set[int]
    frequent: set[int]
    others: set[int]
    texts: tuple[str, ...]
    exact: int
    tokens: int
    found: Found


def _attack(run: Run, evidence: Evidence, recorded: Recorded) -> _Read:
    release = run.open(recorded)
    slm = run.encoder(recorded, release)
    batch = run.rows(recorded.silo).take(run.batch(recorded))
    _check_truth(recorded, release, slm, batch)
    truth, special = token_ids(slm, batch.texts), special_ids(slm)
    if len(_content(truth, special)) < MIN_TRIALS:
        raise NotEnough(f"fewer than {MIN_TRIALS} different tokens are in the batch")
    auxiliary, controls = evidence.halves
    if len(auxiliary) < MIN_AUXILIARY:
        raise NotEnough(f"{len(auxiliary)} auxiliary rows in the pool, at least {MIN_AUXILIARY} are needed")
    rng = np.random.default_rng([run.seed, 11, recorded.row.round, *recorded.silo.encode()])
    found = recover(slm, OneStep(release.tensors, {}), slm.max_length, rng, EFFORT)
    known = token_ids(slm, some_of(auxiliary, _MOST_AUXILIARY, run.seed).texts)
    prior = fit_prior(known, slm.max_length, vocabulary_size(slm))
    usual = int(np.rint(np.mean([len(ids) for ids in known])))
    frequent = frequent_texts(prior, [usual] * len(batch))
    # No more texts than rows, whose number a gradient states; what is missing is guessed.
    guess = _words(slm, [*found.texts, *frequent][: len(batch)])
    drawn = rng.permutation(len(controls))[: len(batch)].tolist()
    others = token_ids(slm, controls.take(drawn).texts)
    own = _words(slm, truth)
    return _Read(
        recorded=recorded,
        release=release,
        read=rouge(guess, own),
        guessed=rouge(_words(slm, frequent), own),
        strange=rouge(guess, _words(slm, others)) if others else None,
        proved=_content(found.texts if found.complete else [found.vocabulary], special),
        there=_content(truth, special),
        frequent=_content(frequent, special),
        others=_content(others, special),
        texts=tuple(_words(slm, found.texts)),
        exact=exact_texts(found.texts, truth, special),
        tokens=sum(map(len, truth)),
        found=found,
    )


def _check_truth(recorded: Recorded, release: Release, slm: Slm, batch: Texts) -> None:
    """The gradient must be that of the rows which the truth names, under the model at hand.

    Raises ProtocolError.
    """
    path = recorded.path
    if not isinstance(release.claim, NonPrivate):
        raise ProtocolError(f"{path}: {release.claim.mechanism} is no mechanism that releases gradients")
    if release.info.get("rows") != len(batch):
        raise ProtocolError(f"{path}: is of another number of rows than the truth names")
    check_tensors(release.tensors, slm.shapes(), str(path))
    labels = label_ids(batch, {label: index for index, label in enumerate(slm.labels)})
    again = batch_gradient(slm, Rows(batch.ids, batch.texts, labels))
    size = max(float(np.abs(array).max(initial=0)) for array in again.values())
    for name, array in again.items():
        if np.abs(array - release.tensors[name]).max(initial=0) > 1e-2 * size:
            raise ProtocolError(
                f"{path}: {name}: is not the gradient of the rows that the truth names under this model, so "
                "a score would mean nothing"
            )


def _content(texts: Sequence[Ids], special: frozenset[int]) -> set[int]:
    """The different tokens of texts."""
    return {int(one) for ids in texts for one in ids} - special


def _words(slm: Slm, texts: Sequence[Ids]) -> list[str]:
    return [str(text) for text in slm.tokenizer.batch_decode(list(texts), skip_special_tokens=True)]


def _figures(reads: Sequence[_Read], seed: int) -> list[Figure]:
    last, ranks = reads[-1], [one.found.tokens_in_batch for one in reads]
    details: dict[str, Any] = {
        "gradients": len(reads),
        "texts": sum(len(one.read.rouge1) for one in reads),
        "texts_found_exactly": sum(one.exact for one in reads),
        "complete": sum(one.found.complete for one in reads),
        "tokens": sum(one.tokens for one in reads),
        "tokens_in_batch": None if None in ranks else sum(rank or 0 for rank in ranks),
    }
    common: dict[str, Any] = {
        "attack": NAME,
        "number": 11,
        "adversary": GRADIENT,
        "target": f"{len(reads)} gradients of one batch each",
        "cap_reason": NO_CLAIM,
        **at(last.recorded, last.release.claim),
    }
    figures = []
    for metric in ("rouge1", "rouge2"):
        read, guessed = (
            np.concatenate([getattr(side, metric) for side in sides])
            for sides in ([one.read for one in reads], [one.guessed for one in reads])
        )
        strange = [getattr(one.strange, metric) for one in reads if one.strange is not None]
        figures.append(
            Figure(
                metric=metric,
                measure=Ratio(read, np.ones_like(read), len(read), seed),
                baseline=float(guessed.mean()),
                control=float(np.concatenate(strange).mean()) if strange else None,
                # Two words in a row are read where a text is, and whoever has the text knows it again.
                bears_on=_EVERYTHING if metric == "rouge2" else _EVERYTHING[1:],
                texts=tuple(text for one in reads for text in one.texts) if metric == "rouge1" else (),
                details=details,
                **common,
            )
        )
    hits, guesses, true = _votes(reads)
    figures.append(
        Figure(
            metric="token_f1",
            measure=Ratio(2 * hits, guesses + true, int(true.sum()), seed),
            baseline=_f1([(one.frequent, one.there) for one in reads]),
            control=_f1([(one.proved, one.others) for one in reads]),
            bears_on=_EVERYTHING[1:],
            details={"recall": float(hits.sum() / true.sum()), **details},
            **common,
        )
    )
    return figures


def _votes(reads: Sequence[_Read]) -> NDArray[np.float64]:
    """(3, n): whether each token of a gradient, read or in its batch, is both, was read, is in the batch."""
    rows = [
        (one in read.proved and one in read.there, one in read.proved, one in read.there)
        for read in reads
        for one in sorted(read.proved | read.there)
    ]
    return np.array(rows, np.float64).T


def _f1(pairs: Sequence[tuple[set[int], set[int]]]) -> float:
    """2 |guess and truth| / (|guess| + |truth|), all pairs together."""
    sizes = sum(len(guess) + len(truth) for guess, truth in pairs)
    return 2 * sum(len(guess & truth) for guess, truth in pairs) / sizes


ATTACK = Attack(11, NAME, GRADIENT, _missing, _run)
