"""What client and server say to each other: the envelope's header, the plan of a step, the replies.

Frozen, strict models without behaviour; the rooms that seal, admit and act on them are `crypto`, `server`
and `client`. Nothing here holds text or keys.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from securefl.errors import PayloadError
from securefl.release import Body, PayloadKind, canonical_json

SUITE: Final = "mlkem768x25519+aes256gcm+ed25519+mldsa65"
NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
BAD_NAME: Final = "a name is 1 to 64 of a-z, 0-9, '.', '_' and '-', and begins with a letter or digit"
FINGERPRINT = r"^[0-9a-f]{64}$"
RUN = r"^[0-9a-f]{32}$"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Party(_Message):
    """A name in the run and the fingerprint of the card that proves it."""

    name: str = Field(pattern=NAME)
    key: str = Field(pattern=FINGERPRINT)


class Header(_Message):
    """The clear part of an envelope; bound into the sealing and into both signatures.

    round: 1-based; sequence: strictly increasing for a sender within a run; time: Unix seconds.
    """

    version: Literal[1] = 1
    suite: Literal["mlkem768x25519+aes256gcm+ed25519+mldsa65"] = SUITE
    run: str = Field(pattern=RUN)
    round: int = Field(ge=1, le=1_000_000)
    step: str = Field(pattern=r"^[a-z]{1,16}$")
    sender: Party
    recipients: tuple[Party, ...] = Field(min_length=1, max_length=256)
    kind: PayloadKind
    sequence: int = Field(ge=1, le=2**53)
    time: int = Field(ge=0, le=2**53)


class Step(StrEnum):
    """What the server asks for. A silo does one thing a step and answers once."""

    SHARE = "share"
    TRAIN = "train"
    CANDIDATE = "candidate"
    FINISH = "finish"


class FedKcTerms(_Message):
    """The knowledge-composition part of a plan (spec: the consistency loss (8))."""

    compose: Literal["pooled", "embeddings"]
    source: Literal["peers", "own"]
    clusters: int = Field(ge=1, le=4096)
    alpha: float = Field(ge=0)
    weights: Literal["uniform", "size"]


class RoundPlan(_Message):
    """One step of one round, signed by the server.

    model: fingerprint of the weights that travel with the plan (arrays named as the model's parameters), or
    None where the silo goes on from its own model. relayed: names of the peers whose sealed centroids travel
    with it, as uint8 arrays `relay/<name>`. epochs: local passes over the silo's rows. answer: the payload
    kind the silo may answer with.
    """

    run: str = Field(pattern=RUN)
    round: int = Field(ge=1, le=1_000_000)
    rounds: int = Field(ge=1, le=1_000_000)
    step: Step
    method: str = Field(pattern=r"^[a-z-]{1,32}$")
    cohort: tuple[Party, ...] = Field(min_length=1, max_length=256)
    protection: Literal["sealed"] = "sealed"
    model: str | None = Field(default=None, pattern=FINGERPRINT)
    relayed: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(default=(), max_length=256)
    epochs: int = Field(ge=0, le=10_000)
    fedkc: FedKcTerms | None = None
    answer: PayloadKind


def parse_plan(body: Body) -> RoundPlan:
    """The plan in an opened body. Raises PayloadError."""
    if body.kind is not PayloadKind.PLAN:
        raise PayloadError(f"the server sent {body.kind.value} in an envelope marked as a plan")
    try:
        return RoundPlan.model_validate_json(canonical_json(body.document))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"]) or "document"
        raise PayloadError(f"the server's plan is malformed (field {where[:60]})") from error


class Dropped(_Message):
    """A silo that did not take part in a step, and why."""

    name: str
    step: str
    error: str
    reason: str
