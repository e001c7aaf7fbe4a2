"""Attack 10, learned, as it is put to a run: texts read off the centroids of the fewest rows.

Reading one text takes seconds, so of a run only the release of its last round with the smallest clusters is
attacked, and of that only a handful of centroids: the most exposed ones. A centroid of several rows is judged
by the row that the text read off it matches best, and so are its baseline and its control, which have as many
rows to choose from; and by how many of its tokens stand in any of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks import decoder, membership, word_maps
from attacks.adversary import DECODER, Adversary, NotEnough
from attacks.attack import Attack, Progress, lacks
from attacks.bench.membership import as_seen
from attacks.decoder import BUDGET
from attacks.dictionary import Ids, special_ids, token_ids
from attacks.evidence import Evidence, Scene
from attacks.figures import MIN_TRIALS, NO_CLAIM, UNBOUNDED, Figure, Ratio, at
from attacks.inversion import asking
from attacks.judgement import Book
from attacks.membership import Target, Vectors
from attacks.runs import Texts
from attacks.simulated import buckets, enough_rows
from attacks.token_scores import Overlap, bag, overlap
from attacks.word_maps import Reader
from securefl.release import GaussianSums, PayloadKind

NAME = "embedding inversion, learned decoder"
MOST = 8
_RANDOM = 20

Run = Callable[[Evidence, Book, Progress], None]


def smallest_clusters(number: int, name: str, work: Callable[[Scene, Book], None]) -> Run:
    """`run` of an attack on one release alone: of the last round, that with the smallest clusters."""

    def run(evidence: Evidence, book: Book, say: Progress) -> None:
        usable: list[Scene] = []
        for recorded, scene in evidence.scenes(PayloadKind.CENTROIDS):
            if isinstance(scene, NotEnough):
                book.skip(name, recorded, str(scene))
            else:
                usable.append(scene)
        if not usable:
            return
        last = max(scene.recorded.row.round for scene in usable)
        scene = min(
            (one for one in usable if one.recorded.row.round == last),
            key=lambda one: float(np.sort(one.release.tensors["sizes"])[:MOST].mean()),
        )
        say(0, f"{scene.where}: {name}")

        def attempt(page: Book) -> None:
            try:
                work(scene, page)
            except NotEnough as why:
                page.skip(name, scene.recorded, str(why))

        book.part(f"{number} {name} {scene.recorded.silo} {scene.recorded.sha256}", attempt)

    return run


@dataclass(frozen=True, repr=False)
class Exposed:
    """The centroids attacked, those of the fewest rows, and what only the scoring may see.

    target: all of the release; chosen: (q,) its centroids attacked. unit: whether vectors have length 1.
    known: as many auxiliary texts as a decoder learns from; auxiliary: their token ids. behind: those of the
    rows behind each centroid attacked; strangers: of as many control rows each.
    """

    target: Target
    chosen: Ids
    unit: bool
    special: frozenset[int]
    known: Texts
    auxiliary: list[Ids]
    behind: list[list[Ids]]
    strangers: list[list[Ids]]

    def only(self, kept: Sequence[int]) -> Exposed:
        """The same for some of the attacked centroids."""
        return Exposed(
            self.target,
            self.chosen[list(kept)],
            self.unit,
            self.special,
            self.known,
            self.auxiliary,
            [self.behind[i] for i in kept],
            [self.strangers[i] for i in kept],
        )


def expose(scene: Scene, attack: int, most: int = MOST) -> Exposed:
    """Up to `most` centroids of a release. Raises NotEnough where there are none or too few tokens."""
    scene.own_vectors()
    slm, target, rng = scene.slm, as_seen(scene, scene.release), scene.rng(attack)
    special = special_ids(slm)
    order = [int(c) for c in np.argsort(target.sizes, kind="stable") if scene.groups[int(c)]][:most]
    known = scene.some_auxiliary(enough_rows(float(target.sizes[order].max(initial=1.0))))
    behind = [token_ids(slm, scene.rows.take(scene.groups[c]).texts) for c in order]
    # Of a large pool the ids of all control rows would be more than their vectors.
    drawn = [rng.permutation(len(scene.controls))[: len(rows)].tolist() for rows in behind]
    strangers = [token_ids(slm, scene.controls.take(rows).texts) for rows in drawn]
    auxiliary = token_ids(slm, known.texts)
    found = Exposed(
        target,
        np.array(order, np.int64),
        _unit(scene, known, auxiliary),
        special,
        known,
        auxiliary,
        behind,
        strangers,
    )
    tokens = sum(int((~np.isin(ids, list(special))).sum()) for rows in behind for ids in rows)
    if tokens < MIN_TRIALS:
        raise NotEnough(f"{tokens} tokens are behind the centroids, at least {MIN_TRIALS} are needed")
    return found


def _unit(scene: Scene, known: Texts, tokens: Sequence[Ids]) -> bool:
    """Whether the release is of vectors of length 1; NotEnough where the encoder makes it of others."""
    some = known.take(range(min(4, len(known))))
    vectors = scene.vectors(some)
    for unit in (False, True):
        made = asking(scene.slm, unit)(tokens[: len(some)])
        if np.abs(made - vectors).max() <= 1e-3 * np.abs(vectors).max():
            return unit
    raise NotEnough("what was averaged is neither what the encoder pools nor that at length 1")


@dataclass(frozen=True, repr=False)
class Read:
    """Of q centroids: whole texts, cosines, and the most frequent tokens, as many: a guess without any."""

    tokens: list[Ids]
    cosines: Vectors
    commonest: list[Ids]


def by_size(
    scene: Scene,
    exposed: Exposed,
    attack: int,
    read: Callable[[Reader, Vectors, Ids, np.random.Generator], tuple[list[Ids], Vectors]],
) -> tuple[Exposed, Read]:
    """Fit a reader for each class of sizes and let `read` use it: on (reader, centroids, places in exposed).

    Sizes too large for the auxiliary rows drop out; NotEnough where all of them are.
    """
    target, auxiliary = exposed.target, scene.vectors(exposed.known)
    cells = membership.assign(auxiliary, target, auxiliary) if len(target.centroids) > 1 else None
    kept: dict[int, tuple[Ids, float, Ids]] = {}
    why: NotEnough | None = None
    for places in buckets(target.sizes[exposed.chosen]):
        rng, chosen = scene.rng(attack), exposed.chosen[places]
        try:
            reader = word_maps.fit(
                auxiliary, exposed.auxiliary, target.sizes[chosen], target.claim, exposed.special, rng,
                cells=cells,
            )  # fmt: skip
        except NotEnough as small:
            why = small
            continue
        tokens, cosines = read(reader, target.centroids[chosen], places, rng)
        for place, text, cosine in zip(places.tolist(), tokens, cosines.tolist(), strict=True):
            kept[place] = text, cosine, reader.commonest(len(reader.inner(text)))
    if not kept:
        raise why or NotEnough("there is no centroid to read")
    order = sorted(kept)
    found = [kept[place] for place in order]
    return exposed.only(order), Read(
        [text for text, _, _ in found],
        np.array([cosine for _, cosine, _ in found]),
        [common for _, _, common in found],
    )


def best_rows(guesses: Sequence[Ids], rows: Sequence[Sequence[Ids]], special: frozenset[int]) -> Overlap:
    """Each guess against the row of its group that it matches best by token F1."""
    best = []
    for guess, group in zip(guesses, rows, strict=True):
        f1 = [overlap([[guess]], [[ids]], special) for ids in group]
        best.append(group[int(np.argmax([one.f1 if len(one.true) else 0.0 for one in f1]))])
    return overlap([[guess] for guess in guesses], [[ids] for ids in best], special)


def text_figures(
    scene: Scene,
    exposed: Exposed,
    read: Read,
    *,
    name: str,
    number: int,
    adversary: Adversary,
    rng: np.random.Generator,
    details: dict[str, Any],
) -> list[Figure]:
    """Token F1 against the best-matching row, and precision against all rows' tokens.

    baseline: the better of two guesses without the release, a random text and the most frequent tokens.
    """
    special, behind = exposed.special, exposed.behind
    usable = [i for i, rows in enumerate(exposed.strangers) if rows]
    texts = exposed.auxiliary
    drawn = [[texts[int(i)] for i in rng.integers(0, len(texts), len(behind))] for _ in range(_RANDOM)]
    bags = [bag(rows) for rows in behind]

    def precision(guesses: Sequence[Ids], against: Sequence[Ids]) -> Overlap:
        return overlap([[ids] for ids in guesses], [[ids] for ids in against], special)

    def share(one: Overlap) -> float:
        return float(one.hits.sum() / max(1.0, float(one.guessed.sum())))

    row, whole = best_rows(read.tokens, behind, special), precision(read.tokens, bags)
    random = (
        [best_rows(one, behind, special).f1 for one in drawn],
        [share(precision(one, bags)) for one in drawn],
    )
    common = best_rows(read.commonest, behind, special).f1, share(precision(read.commonest, bags))
    guesses, others = [read.tokens[i] for i in usable], [exposed.strangers[i] for i in usable]
    control = (
        best_rows(guesses, others, special).f1,
        share(precision(guesses, [bag(rows) for rows in others])),
    )
    seed = int(rng.integers(2**31))
    measures = (
        ("token_f1", Ratio(2 * row.hits, row.true + row.guessed, int(row.true.sum()), seed)),
        ("bag_precision", Ratio(whole.hits, whole.guessed, int(whole.guessed.sum()), seed)),
    )
    shown = [scene.slm.tokenizer.decode(ids, skip_special_tokens=True) for ids in read.tokens]
    order = np.argsort(-read.cosines, kind="stable")
    return [
        Figure(
            attack=name,
            number=number,
            adversary=adversary,
            target=f"the {len(behind)} pooled centroids of the fewest rows",
            metric=metric,
            measure=measure,
            baseline=max(float(np.mean(random[which])), common[which]),
            cap_reason=UNBOUNDED if isinstance(exposed.target.claim, GaussianSums) else NO_CLAIM,
            bears_on=("inference",),
            control=control[which] if usable else None,
            texts=tuple(shown[i] for i in order) if which == 0 else (),
            details={
                "rows": float(exposed.target.sizes[exposed.chosen].mean()),
                "centroids": len(behind),
                "cosine": float(read.cosines.mean()),
                "random_text": float(np.mean(random[which])),
                "frequent_tokens": common[which],
                **details,
            },
            **at(scene.recorded, scene.release.claim),
        )
        for which, (metric, measure) in enumerate(measures)
    ]


def _attack(scene: Scene, book: Book) -> None:
    exposed = expose(scene, 1001)
    ask = asking(scene.slm, exposed.unit)

    def read(
        reader: Reader, centroids: Vectors, _: Ids, rng: np.random.Generator
    ) -> tuple[list[Ids], Vectors]:
        found = decoder.decode(reader, ask, centroids, rng, budget=BUDGET)
        return found.tokens, found.cosines

    exposed, found = by_size(scene, exposed, 1002, read)
    book.figures += text_figures(
        scene, exposed, found, name=NAME, number=10, adversary=DECODER, rng=scene.rng(1003),
        details={"texts_tried": BUDGET},
    )  # fmt: skip


ATTACK = Attack(
    10, NAME, DECODER, lacks(PayloadKind.CENTROIDS, "pooled centroid"), smallest_clusters(10, NAME, _attack)
)
