"""Attack 4 as it is put to a run: a silo's release made once more, with canary texts that coins put in.

The auditor has the rows and the encoder of the run's last centroid release, so the release can be made
again, by the very code that made it, with texts of the auditor's own among the rows. Its noise comes from the
run's seed, so that an audit can be repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attacks.adversary import CANARIES, NotEnough
from attacks.attack import Attack, Progress
from attacks.bench.membership import as_seen
from attacks.evidence import Evidence, Scene
from attacks.figures import NO_CLAIM, Figure, OneRunTest, Proportion, at
from attacks.judgement import Book
from attacks.membership import Target
from attacks.one_run import OneRunAudit
from attacks.runs import Texts
from attacks.text_canaries import audit_texts, random_texts
from securefl.agreement import fedkc_terms
from securefl.data import Rows
from securefl.errors import ProtocolError, UsageError
from securefl.local import CentroidJob, release_centroids
from securefl.privacy import noise_source
from securefl.release import ROW, GaussianSums, PayloadKind

NAME = "one-run audit with canaries"
TEXTS = 384
_DELTA = 1e-5  # of the bound where nothing is claimed
_WORD = re.compile(r"[^\W\d_]{4,}")


def _missing(evidence: Evidence) -> str | None:
    if PayloadKind.CENTROIDS.value not in {one.row.kind for one in evidence.targets}:
        return "no pooled centroid was released"
    if evidence.source.config is None:
        return "what made these releases is not at hand, so none can be made with canaries in it"
    return None


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    # One release is enough: what makes it is the same in every silo and round.
    *_, (recorded, scene) = evidence.scenes(PayloadKind.CENTROIDS)
    say(0, f"{recorded.silo}, round {recorded.row.round}: the release again, with canaries")

    def attempt(page: Book) -> None:
        try:
            if isinstance(scene, NotEnough):
                raise scene
            page.figures.append(_figure(scene, _audit(scene)))
        except NotEnough as why:
            page.skip(NAME, recorded, str(why))

    book.part("4", attempt)


def _audit(scene: Scene) -> OneRunAudit:
    rng, claim = scene.rng(4), scene.release.claim
    words = sorted({word for text in scene.auxiliary.texts for word in _WORD.findall(text.lower())})
    try:
        canaries = random_texts(words, TEXTS, rng)
    except UsageError as error:
        raise NotEnough(f"the auxiliary text has too few words to make canaries of: {error}") from error
    known = tuple(dict.fromkeys(scene.rows.texts))

    def pipeline(included: Sequence[str]) -> Target:
        return _released(scene, known, tuple(included))

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        return scene.vectors(Texts(tuple(texts), tuple(texts), ("",) * len(texts)))

    delta = claim.delta if isinstance(claim, GaussianSums) else _DELTA
    by_unit = isinstance(claim, GaussianSums) and claim.unit != ROW
    units = tuple(map(str, range(len(known)))) if by_unit else ()
    return audit_texts(pipeline, embed, canaries, known, delta, rng=rng, units=units)


def _released(scene: Scene, known: tuple[str, ...], included: tuple[str, ...]) -> Target:
    """What the silo would have released with these texts among its own; every text is a unit by itself."""
    config, texts = scene.evidence.source.config, (*known, *included)
    terms = None if config is None else fedkc_terms(config)
    if config is None or terms is None:
        raise NotEnough(
            f"{scene.evidence.source.method} shares no centroids, so there is no release to make again"
        )
    job = CentroidJob(
        terms,
        config.privacy.centroids,
        config.federation.rounds - 1,
        config.federation.seed,
        noise_source(config.federation.seed),
        config.data.unit_name,
        config.privacy.adjacency,
    )
    ids = tuple(map(str, range(len(texts))))
    units = ids if config.data.unit is not None else ()
    rows = Rows(ids, texts, np.zeros(len(texts), np.int64), units)
    release, _ = release_centroids(scene.slm, rows, job, {})
    if type(release.claim) is not type(scene.release.claim):
        raise ProtocolError(
            f"{scene.recorded.path}: was not made as the run's configuration says: its claim is "
            f"{scene.release.claim.mechanism}, and the configuration's {release.claim.mechanism}"
        )
    if not len(release.tensors["sizes"]):
        raise NotEnough("with canaries among the rows every cluster was withheld")
    return as_seen(scene, release)


def _figure(scene: Scene, found: OneRunAudit) -> Figure:
    claimed = found.claim_mu
    reason = "the claim bounds all guesses together, so it is compared by the bound on mu"
    test = None
    if claimed is not None:
        test = OneRunTest(found.right, found.guesses, found.canaries, claimed)
    return Figure(
        attack=NAME,
        number=4,
        adversary=CANARIES,
        target=f"{found.canaries} canary texts in one release",
        metric="guesses_right",
        measure=Proportion(found.right, found.guesses),
        baseline=0.5,
        cap_reason=NO_CLAIM if claimed is None else reason,
        epsilon_lower_bound=found.epsilon_lower_bound,
        adjacency=found.adjacency,
        bears_on=("singling_out", "linkability"),
        broken=test,
        details={
            "canaries": found.canaries,
            "mu_lower_bound": found.mu_lower_bound,
            "mu_ceiling": found.mu_ceiling,
            "claim_mu": claimed,
            "claim_epsilon_add_remove": found.claim_epsilon,
            "epsilon_lower_bound_gdp": found.epsilon_lower_bound_gdp,
        },
        **at(scene.recorded, scene.release.claim),
    )


ATTACK = Attack(4, NAME, CANARIES, _missing, _run)
