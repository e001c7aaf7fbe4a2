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
from attacks.bounds import lower_bound, upper_bound
from attacks.evidence import Evidence, Scene
from attacks.figures import NO_CLAIM, Figure
from attacks.judgement import Book
from attacks.membership import Target
from attacks.one_run import OneRunAudit, gaussian_mu_lower_bound_one_run
from attacks.runs import Texts
from attacks.text_canaries import audit_texts, random_texts
from securefl.agreement import fedkc_terms
from securefl.data import Rows
from securefl.errors import ProtocolError, UsageError
from securefl.local import CentroidJob, release_centroids
from securefl.privacy import noise_source
from securefl.release import GaussianSums, PayloadKind

NAME = "one-run audit with canaries"
TEXTS = 384
_DELTA = 1e-5  # of the bound where nothing is claimed
_WORD = re.compile(r"[^\W\d_]{4,}")


def _missing(evidence: Evidence) -> str | None:
    kinds = {one.row.kind for one in evidence.targets}
    return None if PayloadKind.CENTROIDS.value in kinds else "no pooled centroid was released"


def _run(evidence: Evidence, book: Book, say: Progress) -> None:
    # One release is enough: what makes it is the same in every silo and round.
    *_, (recorded, scene) = evidence.scenes(PayloadKind.CENTROIDS)
    say(0, f"{recorded.silo}, round {recorded.row.round}: the release again, with canaries")
    try:
        if isinstance(scene, NotEnough):
            raise scene
        book.figures.append(_figure(scene, _audit(scene)))
    except NotEnough as why:
        book.skip(NAME, recorded, str(why))


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

    def embed(texts: Sequence[str]) -> NDArray[np.float64]:
        return scene.pooled(Texts(tuple(texts), tuple(texts), ("",) * len(texts)))

    delta = claim.delta if isinstance(claim, GaussianSums) else _DELTA
    return audit_texts(pipeline, embed, canaries, known, delta, rng=rng)


def _released(scene: Scene, known: tuple[str, ...], included: tuple[str, ...]) -> Target:
    """What the silo would have released with these texts among its own; every text is a unit by itself."""
    config, texts = scene.evidence.run.config, (*known, *included)
    terms = fedkc_terms(config)
    if terms is None:
        raise NotEnough(
            f"{config.federation.method} shares no centroids, so there is no release to make again"
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
    rows = Rows(tuple(map(str, range(len(texts)))), texts, np.zeros(len(texts), np.int64))
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
    def interval(alpha: float) -> tuple[float, float]:
        ends = (lower_bound, upper_bound)
        low, high = (end(found.right, found.guesses, alpha / 2) for end in ends)
        return low, high

    claimed = found.claim_mu

    def broken(alpha: float) -> bool:
        shown = gaussian_mu_lower_bound_one_run(found.right, found.guesses, found.canaries, alpha)
        return claimed is not None and shown > claimed

    return Figure(
        NAME,
        4,
        CANARIES,
        f"{found.canaries} canary texts in one release",
        "guesses_right",
        found.right / found.guesses,
        interval,
        0.5,
        None,
        NO_CLAIM
        if claimed is None
        else "the claim bounds all guesses together, so it is compared by the bound on mu",
        found.guesses,
        found.epsilon_lower_bound,
        found.adjacency,
        scene.recorded,
        scene.release.claim,
        {
            "canaries": found.canaries,
            "mu_lower_bound": found.mu_lower_bound,
            "mu_ceiling": found.mu_ceiling,
            "claim_mu": claimed,
            "claim_epsilon_add_remove": found.claim_epsilon,
            "epsilon_lower_bound_gdp": found.epsilon_lower_bound_gdp,
        },
        bears_on=("singling_out", "linkability"),
        control=None,
        broken=None if claimed is None else broken,
    )


ATTACK = Attack(4, NAME, CANARIES, _missing, _run)
