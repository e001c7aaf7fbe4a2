"""The peers' centroids that a plan brings to a silo: each is checked as if it had come alone.

The server relays what it cannot open, and is trusted with none of it: signature, sender, run, round, kind,
shapes and values are checked here, by the silo that is going to train with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from securefl.crypto import envelope
from securefl.crypto.identity import Card, Identity
from securefl.errors import PayloadError, ProtocolError, UnknownSender, WrongRound, WrongShape
from securefl.local import knowledge_of
from securefl.messages import Dropped, FedKcTerms, Header, RoundPlan, Step
from securefl.methods.fedkc import Knowledge
from securefl.release import PayloadKind, Release, Tensors, check_tensors, decode, release_from
from securefl.slm import Slm
from securefl.training import embed


@dataclass(frozen=True)
class Reader:
    """Who reads relayed centroids, and with which model. floor: oldest version of envelopes that it reads."""

    identity: Identity
    roster: Mapping[str, Card]
    slm: Slm
    floor: int


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
    return knowledge_of(release)


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
