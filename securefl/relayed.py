"""The peers' centroids that a plan brings to a silo: each is checked as if it had come alone.

The server relays what it cannot open, and is trusted with none of it: signature, sender, run, round, kind,
shapes and values are checked here, by the silo that is going to train with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from securefl.crypto import envelope
from securefl.crypto.identity import Card, Identity
from securefl.errors import PayloadError, ProtocolError, UnknownSender, WrongRound, WrongShape
from securefl.local import knowledge_of, public_clip, public_seeds
from securefl.messages import Dropped, FedKcTerms, Header, RoundPlan, Step
from securefl.methods.fedkc import Knowledge
from securefl.release import (
    GaussianSums,
    PayloadKind,
    Release,
    Tensors,
    check_tensors,
    decode,
    fingerprint,
    release_from,
)
from securefl.slm import Slm
from securefl.training import embed

_SURE = 8.0  # standard deviations
_FAR, _PUBLIC = 10.0, 16  # times the length that so many public texts have


@dataclass(frozen=True)
class Reader:
    """Who reads relayed centroids, and with which model. floor: oldest version of envelopes that it reads.
    seen: of each peer the round and hash of the last centroids, which this room adds to."""

    identity: Identity
    roster: Mapping[str, Card]
    slm: Slm
    floor: int
    seen: dict[str, tuple[int, str]] = field(default_factory=dict)


def relayed_knowledge(
    tensors: Tensors, plan: RoundPlan, terms: FedKcTerms, reader: Reader
) -> tuple[list[Knowledge], list[Dropped]]:
    """What holds, as knowledge to train with; and what does not, with the peer's name and the reason.

    One bad peer must not silence the others. Raises PayloadError where the plan itself is inconsistent.
    """
    found, ignored = [], []
    if len(set(plan.relayed)) != len(plan.relayed):
        raise PayloadError("the server relayed one silo's centroids twice")
    for name in plan.relayed:
        sealed = tensors.get(f"relay/{name}")
        if sealed is None or sealed.dtype != np.uint8:
            raise PayloadError("a plan names relayed centroids that did not come with it")
        try:
            found.append(_opened(sealed.tobytes(), plan, terms, name, reader))
        except ProtocolError as error:
            ignored.append(
                Dropped(name=name, step=Step.SHARE.value, error=type(error).__name__, reason=str(error))
            )
    return found, ignored


def _opened(sealed: bytes, plan: RoundPlan, terms: FedKcTerms, name: str, reader: Reader) -> Knowledge:
    verified = envelope.verify(sealed, reader.roster, floor=reader.floor)
    header = verified.header
    if header.sender.name != name or name == reader.identity.name:
        raise UnknownSender(f"centroids relayed as those of {name} are signed by another silo")
    if (header.run, header.round, header.step) != (plan.run, plan.round, Step.SHARE.value):
        raise WrongRound(f"centroids of {name} were relayed from another run, round or step")
    release = release_from(decode(envelope.open_(verified, reader.identity)))
    if release.info.get("encoder") != plan.model:
        raise WrongShape(f"the centroids of {name} were made with another model than this round's")
    _check_centroids(release, terms, name, header, reader.slm)
    _check_new(release, plan.round, name, reader.seen)
    return knowledge_of(release)


def _check_new(release: Release, number: int, name: str, seen: dict[str, tuple[int, str]]) -> None:
    """Require other centroids than a peer sent before: under another model none stay the same."""
    found = fingerprint({"centroids": release.tensors["centroids"]})
    before = seen.get(name)
    if before is not None and before[0] < number and before[1] == found and len(release.tensors["sizes"]):
        raise PayloadError(f"{name} sent the same centroids as in round {before[0]}")
    seen[name] = (number, found)


def _check_centroids(release: Release, terms: FedKcTerms, name: str, header: Header, slm: Slm) -> None:
    layered = terms.layer is not None
    due = PayloadKind.EMBEDDING_CENTROIDS if layered else PayloadKind.CENTROIDS
    q = (*release.tensors.get("sizes", np.zeros(0)).shape, 0)[0]
    if q > terms.clusters:
        raise WrongShape(f"{name} sent {q} centroids, more than were agreed")
    if release.kind is not due or header.kind is not due:
        raise WrongShape(f"{name} sent {release.kind} where {due} were agreed")
    middle = (slm.max_length,) if layered else ()
    # The embedding layer of some architectures is narrower than the encoder.
    width = slm.width if terms.layer is None else embed(slm, ["x"], terms.layer)[0].shape[-1]
    expected: dict[str, tuple[int, ...]] = {
        "centroids": (q, *middle, width),
        "predictions": (q, len(slm.labels)),
        "sizes": (q,),
    }
    if layered:
        expected["mask"] = (q, *middle)
    check_tensors(release.tensors, expected, name)
    votes = release.tensors["predictions"]
    if q and (votes.min() < -1e-4 or np.abs(votes.sum(axis=1) - 1).max() > 1e-3):
        raise PayloadError(f"the mean predictions of {name} are not probabilities")
    if q and release.tensors["sizes"].min() <= 0:
        raise PayloadError(f"{name} sent a centroid of no rows")
    if layered and not np.isin(release.tensors["mask"], (0, 1)).all():
        raise PayloadError(f"{name} sent a mask that is not 0 or 1")
    _check_length(release, terms.layer, name, slm)


def _check_length(release: Release, layer: int | None, name: str, slm: Slm) -> None:
    """Require centroids no longer than rows can make them, so that a false one cannot outweigh the others.

    Under noise: than `clip` times the rows that the noisy size may stand for, and the noise, each at eight
    standard deviations. Exact ones: than ten times what public texts have, a mean being no longer than its
    longest row.
    """
    if not len(release.tensors["sizes"]):
        return
    vectors = release.tensors["centroids"].astype(np.float64)
    sizes = release.tensors["sizes"].astype(np.float64)
    lengths = np.sqrt((vectors.reshape(len(vectors), -1) ** 2).sum(1))
    texts, _ = public_seeds(slm, _PUBLIC)
    far = _FAR * public_clip(slm, texts, layer)
    if isinstance(release.claim, GaussianSums):
        claim, numbers = release.claim, float(np.prod(vectors.shape[1:]))
        if claim.clip > far:
            raise PayloadError(f"{name} claims a clip of {claim.clip:.3g}, far above the model's vectors")
        rows = sizes + _SURE * claim.count_multiplier
        most = claim.clip * (rows + claim.noise_multiplier * (np.sqrt(numbers) + _SURE)) / sizes
    else:
        most = np.full(len(sizes), far)
    if (lengths > most).any():
        place = int(np.argmax(lengths / most))
        raise PayloadError(
            f"centroid {place + 1} of {name} is {lengths[place]:.3g} long, and rows make none longer than "
            f"{most[place]:.3g}"
        )
