"""Attack 9 as it is put to a run: texts read off the centroids of the fewest rows with the encoder's weights.

Which release and centroids, and how they are judged, is as in `attacks.bench.decoder`. FedKC's propositions 2
and 3 are measured beside it, since what they promise is about these very vectors.
"""

from __future__ import annotations

import numpy as np

from attacks import inversion
from attacks.adversary import INVERSION, NotEnough
from attacks.attack import Attack, lacks
from attacks.bench.decoder import by_size, expose, smallest_clusters, text_figures
from attacks.dictionary import Ids
from attacks.evidence import Scene
from attacks.inversion import BUDGET, STEPS, Relaxed
from attacks.judgement import Book
from attacks.membership import Vectors
from attacks.propositions import proposition_2
from attacks.word_maps import Reader
from securefl.errors import ModelError
from securefl.release import PayloadKind
from securefl.training import embed

NAME = "embedding inversion, white box"
_BOUNDS = 2
_PAIRS_OF = 200


def _attack(scene: Scene, book: Book) -> None:
    # It is about the rows, so it is measured whatever the attack comes to.
    _proposition_2(scene, book)
    exposed = expose(scene, 901)
    slm, auxiliary = scene.slm, scene.vectors(exposed.known)
    measured: list[tuple[int, Reader, Relaxed, int]] = []

    def read(
        reader: Reader, centroids: Vectors, places: Ids, rng: np.random.Generator
    ) -> tuple[list[Ids], Vectors]:
        found = inversion.invert(slm, reader, centroids, rng, steps=STEPS, budget=BUDGET, unit=exposed.unit)
        measured.extend((int(place), reader, found.relaxed, i) for i, place in enumerate(places))
        return found.tokens, found.cosines

    kept, found = by_size(scene, exposed, 902, read)
    gaps = [
        min(inversion.distance(reader, relaxed.shares[i], text) for text in exposed.behind[place])
        for place, reader, relaxed, i in measured
    ]
    book.figures += text_figures(
        scene, kept, found, name=NAME, number=9, adversary=INVERSION, rng=scene.rng(903),
        details={"texts_tried": BUDGET, "relaxed_distance": float(np.mean(gaps))},
    )  # fmt: skip
    # Of one row proposition 3 says nothing.
    several = sorted((one for one in measured if len(exposed.behind[one[0]]) > 1), key=lambda one: one[0])
    for place, reader, relaxed, i in several[:_BOUNDS]:
        book.bounds.append(
            inversion.check_proposition_3(
                f"proposition 3, relaxed tokens of centroid {exposed.chosen[place] + 1} ({scene.where})",
                slm,
                reader,
                relaxed.shares[i],
                float(relaxed.residuals[i]),
                exposed.behind[place],
                auxiliary,
                scene.rng(904),
                exposed.unit,
            )
        )


def _proposition_2(scene: Scene, book: Book) -> None:
    rows = scene.rows.take(range(min(_PAIRS_OF, len(scene.rows))))
    name = "proposition 2, distances of embedding-layer outputs and of pooled vectors"
    try:
        outer, _ = embed(scene.slm, rows.texts, 0)
        book.bounds.append(
            proposition_2(f"{name} ({scene.where})", outer, scene.vectors(rows), scene.rng(905))
        )
    except (ModelError, NotEnough) as why:
        book.skip(name, scene.recorded, str(why))


ATTACK = Attack(
    9, NAME, INVERSION, lacks(PayloadKind.CENTROIDS, "pooled centroid"), smallest_clusters(9, NAME, _attack)
)
