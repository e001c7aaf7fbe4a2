"""What client and server say to each other: the envelope's header, the plan of a step, the replies.

Frozen, strict models without behaviour; the rooms that seal, admit and act on them are `crypto`, `server`
and `client`. Nothing here holds text or keys.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

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
    """What the server asks for, in the order within a round. A silo does one thing a step and answers once.

    key: of CKKS; advertise, deal, sign and unmask: of a masked round, whose masked input answers `train`.
    """

    KEY = "key"
    SHARE = "share"
    ADVERTISE = "advertise"
    DEAL = "deal"
    TRAIN = "train"
    SIGN = "sign"
    UNMASK = "unmask"
    CANDIDATE = "candidate"
    FINISH = "finish"


# The steps of a masked round whose answer does not depend on any row.
MASKING_STEPS: Final = (Step.ADVERTISE, Step.DEAL, Step.SIGN, Step.UNMASK)


def _composed(value: object) -> object:
    if value in ("pooled", "embeddings") or (type(value) is int and 1 <= value <= 1024):
        return value
    raise ValueError('must be "pooled", "embeddings", or the number of an encoder layer, counted from 1')


# What FedKC's centroids average: pooled vectors, or the outputs of a layer.
Compose = Annotated[Literal["pooled", "embeddings"] | int, BeforeValidator(_composed)]


def layer_of(compose: Literal["pooled", "embeddings"] | int) -> int | None:
    """What `fedkc.compose` means: a layer's number, 0 for the embedding layer; None for pooled vectors."""
    return {"pooled": None, "embeddings": 0}[compose] if isinstance(compose, str) else compose


class FedKcTerms(_Message):
    """The knowledge-composition part of a plan (spec: the consistency loss (8))."""

    compose: Compose
    source: Literal["peers", "own"]
    clusters: int = Field(ge=1, le=4096)
    alpha: float = Field(ge=0)
    weights: Literal["uniform", "size"]
    per_step: int | None = Field(ge=1)

    @property
    def layer(self) -> int | None:
        """The layer whose outputs are averaged, 0 for the embedding layer; None for pooled vectors."""
        return layer_of(self.compose)


class NoiseTerms(_Message):
    """Noise that the silos add to their sum, each a share (`distributed_noise`); as in the configuration."""

    clip: float = Field(gt=0)
    epsilon: float | None = Field(gt=0)
    noise_multiplier: float | None = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    colluders: int = Field(ge=0, le=254)


class SumTerms(_Message):
    """How models are added up unseen, masked or under CKKS; every silo encodes alike.

    threshold: the fewest silos whose masked sum may become known (0 under CKKS, which cannot enforce one).
    degree: neighbours of a silo in a masked round; None: chosen by `crypto.graph`. clip: the largest
    magnitude of a coordinate. bits: of a masked value. max_rows: the rows that are weight 1. post_quantum:
    the CKKS set that is within the post-quantum bound. noise: on a masked sum, whose silos then all have the
    same weight; its clip is that of the whole change.
    """

    threshold: int = Field(ge=0, le=256)
    degree: int | None = Field(ge=2, le=256)
    clip: float = Field(gt=0)
    bits: int = Field(ge=16, le=32)
    max_rows: int = Field(ge=1, le=10**9)
    post_quantum: bool
    noise: NoiseTerms | None


class RoundPlan(_Message):
    """One step of one round, signed by the server.

    model: fingerprint of the weights of the step (arrays named as the model's parameters; under CKKS from
    round 2 on the chunks of the encrypted sum), or None where the silo goes on from its own model. They
    travel with the plan, but in the other steps of a masked round, which name the weights to be trained.
    relayed: names of the peers whose sealed centroids, or group key, travel with it, as uint8 arrays
    `relay/<name>`. epochs: local passes over the silo's rows. answer: the payload kind the silo may answer
    with. What the server relays of a masked round is the uint8 array `masking/message`.
    """

    run: str = Field(pattern=RUN)
    round: int = Field(ge=1, le=1_000_000)
    rounds: int = Field(ge=1, le=1_000_000)
    step: Step
    method: str = Field(pattern=r"^[a-z-]{1,32}$")
    cohort: tuple[Party, ...] = Field(min_length=1, max_length=256)
    protection: Literal["sealed", "masked", "ckks"]
    sums: SumTerms | None = None
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
