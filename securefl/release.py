"""What may leave a silo, and the one byte format it leaves in.

This room holds the payload kinds, the privacy claims, `Release` (the only thing `privacy` produces and the
only thing a ledger charges) and the codec over safetensors. The codec is canonical: a body has exactly one
byte string, and `decode` refuses every other one. It must not touch files, keys, models or text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from securefl.errors import NonFiniteUpdate, PayloadError, TooLarge, WrongShape

Tensors = Mapping[str, NDArray[Any]]

_MAGIC = "securefl.body/1"
_MAX_INTEGER = 2**64
_MAX_DEPTH = 32  # of a body's document: far below any parser's own limit, so that all readers agree
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8"), "U8": np.dtype("u1")}


class PayloadKind(StrEnum):
    """What the sealed content of an envelope is. Hidden vectors are named in the kind, never smuggled."""

    PLAN = "plan"
    MODEL = "model"
    CENTROIDS = "centroids"
    EMBEDDING_CENTROIDS = "embedding-centroids"
    METRICS = "metrics"
    GRADIENT = "gradient"  # of one batch's mean loss: arrays named and shaped as a model's
    # Of a masked round: its ephemeral keys, its shares, the weighted model behind masks, the signed list of
    # survivors, the shares that take the masks off the sum.
    ADVERT = "advert"
    SHARES = "shares"
    MASKED_MODEL = "masked-model"
    SURVIVORS = "survivors"
    UNMASKING = "unmasking"
    # Under CKKS: the silos' common key, and the weighted model encrypted under it.
    GROUP_KEY = "group-key"
    ENCRYPTED_MODEL = "encrypted-model"
    SUM = "sum"
    UNAVAILABLE = "unavailable"


# What nobody can read of one silo alone; opened is only the sum of many.
SUMMED = (PayloadKind.MASKED_MODEL, PayloadKind.ENCRYPTED_MODEL)
# What its recipients can read and some row has a part in.
READABLE = (
    PayloadKind.MODEL,
    PayloadKind.CENTROIDS,
    PayloadKind.EMBEDDING_CENTROIDS,
    PayloadKind.METRICS,
    PayloadKind.GRADIENT,
)


class _Claim(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class NonPrivate(_Claim):
    """No differential privacy is claimed, for the stated reason."""

    mechanism: Literal["none"] = "none"
    reason: str = Field(min_length=1, max_length=400)


class Independent(_Claim):
    """The same whatever the rows are: keys, shares of masks, signatures. It costs no privacy."""

    mechanism: Literal["independent"] = "independent"
    reason: str = Field(min_length=1, max_length=400)


ROW = "row"
UNIT = r"^[^\x00-\x1f\x7f]{1,64}$"  # "row", or the column that names whose rows belong together
Adjacency = Literal["add-remove", "replace-one"]


def _not_all(unit: str) -> str:
    if unit == "silo":
        raise ValueError("a claim about the whole silo is of another mechanism")
    return unit


Unit = Annotated[str, Field(pattern=UNIT), AfterValidator(_not_all)]


class GaussianSums(_Claim):
    """Noisy sums, counts and mean predictions of every cluster (see `centroid_privacy.release_noisy_sums`).

    The whole release is one Gaussian mechanism of parameter `mu` (Dong, Roth and Su, Gaussian Differential
    Privacy, 2022) for one `unit` under `adjacency`: under add-remove mu^2 = 1/noise_multiplier^2 +
    1/count_multiplier^2 + 1/prediction_multiplier^2, where a multiplier is standard deviation over what one
    unit adds at most (the clip for the sums, 1 for counts and predictions). `epsilon` is that of this
    release alone at `delta`. `simulated` means that the noise came from a seed, so the claim describes the
    mechanism and protects nobody.
    """

    mechanism: Literal["gaussian-sums"] = "gaussian-sums"
    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    mu: float = Field(gt=0)
    clip: float = Field(gt=0)
    noise_multiplier: float = Field(gt=0)
    count_multiplier: float = Field(gt=0)
    prediction_multiplier: float = Field(gt=0)
    unit: Unit = ROW
    adjacency: Adjacency = "add-remove"
    generator: str = Field(min_length=1)
    simulated: bool


class DpSgd(_Claim):
    """Weights trained by DP-SGD (Abadi et al. 2016), and all that is made from them (see `dp_sgd`).

    `steps` times a Poisson sample of the units at `sample_rate`, each unit's gradient clipped to the L2 norm
    `clip` (over the head's parameters to clip * sqrt(head_share), over all others to what is left of it),
    and Gaussian noise of standard deviation `noise_multiplier` * clip on every coordinate of their sum.
    `epsilon` is that of these steps alone at `delta`, the larger of what the `accountants` say; those of a
    run compose in the account. per_unit: rows of one unit that take part, at most. `simulated` as in
    `GaussianSums`.
    """

    mechanism: Literal["dp-sgd"] = "dp-sgd"
    epsilon: float = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    noise_multiplier: float = Field(ge=0.1, le=1e6)
    sample_rate: float = Field(gt=0, le=1)
    steps: int = Field(ge=1, le=10**6)
    clip: float = Field(gt=0)
    head_share: float = Field(gt=0, lt=1)
    sampling: Literal["poisson"] = "poisson"
    per_unit: int = Field(ge=1)
    accountants: str = Field(min_length=1, max_length=200)
    unit: Unit = ROW
    adjacency: Literal["add-remove"] = "add-remove"
    generator: str = Field(min_length=1)
    simulated: bool


class GaussianCounts(_Claim):
    """Numbers of right answers on rows, with noise; what is decided or divided from them is made from them.

    One Gaussian mechanism of parameter mu = 1 / noise_multiplier for one `unit`, whose rows weigh 1 together.
    `epsilon` and `simulated` as in `GaussianSums`.
    """

    mechanism: Literal["gaussian-counts"] = "gaussian-counts"
    epsilon: float = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    mu: float = Field(gt=0)
    noise_multiplier: float = Field(gt=0)
    unit: Unit = ROW
    adjacency: Adjacency = "add-remove"
    generator: str = Field(min_length=1)
    simulated: bool


class DistributedNoise(_Claim):
    """A silo's share of the noise on a masked sum of model updates (see `distributed_noise`).

    The guarantee is that of the opened sum and of all that is made from it, for whoever sees it, the server
    and `colluders` of the silos included: exchanging one silo's whole update for another one (`adjacency`
    replace-one; a row added or removed is less) is (epsilon, delta)-DP, and rho-zCDP (Bun and Steinke 2016),
    where at least `threshold` silos are in the sum. Masks must keep each single vector hidden. clip: L2 bound
    of an update; noise_multiplier: standard deviation of the noise of `threshold - colluders` silos over
    `sensitivity`, both of the sum and in the updates' unit. bits: of the modulus; wrap_probability: that the
    sum of all `silos` wraps around it and is wrong somewhere, which costs accuracy and no privacy.
    `epsilon` is that of this release alone at `delta`; `simulated` as in `GaussianSums`.
    """

    mechanism: Literal["distributed-discrete-gaussian"] = "distributed-discrete-gaussian"
    epsilon: float = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    rho: float = Field(gt=0)
    clip: float = Field(gt=0)
    sensitivity: float = Field(gt=0)
    noise_multiplier: float = Field(gt=0)
    silos: int = Field(ge=2, le=256)
    threshold: int = Field(ge=2, le=256)
    colluders: int = Field(ge=0, le=254)
    bits: int = Field(ge=16, le=32)
    wrap_probability: float = Field(ge=0, lt=1)
    unit: Literal["silo"] = "silo"
    adjacency: Literal["replace-one"] = "replace-one"
    generator: str = Field(min_length=1)
    simulated: bool


Noised = GaussianSums | DistributedNoise | DpSgd | GaussianCounts
Claim = NonPrivate | Independent | GaussianSums | DistributedNoise | DpSgd | GaussianCounts
PrivacyClaim = Annotated[Claim, Field(discriminator="mechanism")]
CLAIM: TypeAdapter[Claim] = TypeAdapter(PrivacyClaim)


@dataclass(frozen=True)
class Limits:
    """Sizes that a receiver accepts; each is checked before anything of that size is allocated.

    max_bytes: the whole body, sealed in an envelope too. 768 MiB holds 190 million parameters in float32, or
    all 22.7 million of all-MiniLM-L6-v2 under CKKS (684 MB).
    max_header: the JSON that describes the tensors. 1 MiB is some 8,000 tensors.
    max_tensors: more than any model this package trains has.
    """

    max_bytes: int = 768 * 2**20
    max_header: int = 2**20
    max_tensors: int = 8192


@dataclass(frozen=True)
class Body:
    """A decoded body: its kind, a JSON document and named arrays (float32, int64 or uint8)."""

    kind: PayloadKind
    document: Mapping[str, Any]
    tensors: Tensors


@dataclass(frozen=True)
class Release:
    """One thing that leaves a silo, with the claim under which it leaves.

    tensors: named arrays, not shown; their shapes depend on `kind` (see `privacy`).
    info: public facts that travel with it (JSON): rows, encoder fingerprint, cluster sizes if released.
    Only `privacy` makes these from private data; a receiver gets them from `decode_release`.
    """

    kind: PayloadKind
    tensors: Tensors = field(repr=False)
    info: Mapping[str, Any]
    claim: Claim


def canonical_json(value: Any) -> bytes:
    """The one JSON encoding used under a hash or a signature: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice")
    return document


def _no_constants(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # 1e999 is a number in JSON, and none in a float
        raise ValueError("a number is too large")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) >= _MAX_INTEGER:  # a reader that makes a float of it gets infinity, or another number
        raise ValueError("a number is too large")
    return value


def parse_json(data: bytes) -> Any:
    """Strict JSON: no duplicate keys, no NaN, infinity, number beyond a float or integer beyond 64 bits.

    Raises ValueError, deep nesting included; nothing in its chain holds the data, which may be secret.
    """
    try:
        return json.loads(
            data,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constants,
            parse_float=_finite,
            parse_int=_whole,
        )
    except (ValueError, RecursionError):
        pass  # a parser's error holds what it parsed, and one raised in here would hold that error
    raise ValueError("not strict JSON")


def _require_plain(value: Any, depth: int = 0) -> None:
    """Nothing that one reader of JSON takes and another does not. Raises ValueError."""
    if isinstance(value, str):
        value.encode()  # fails for half a surrogate pair, which JSON can spell and no text holds
    elif isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ValueError("a number is too large")
    elif isinstance(value, Mapping | list | tuple):
        if depth == _MAX_DEPTH:
            raise ValueError("nested too deeply")
        for inner in (*value, *value.values()) if isinstance(value, Mapping) else value:
            _require_plain(inner, depth + 1)


def encode(kind: PayloadKind, document: Mapping[str, Any], tensors: Tensors) -> bytes:
    """The canonical bytes of a body.

    Raises PayloadError for an array of a type that may not travel, and ValueError for a document that is not
    JSON of Unicode text and numbers of 64 bits, or nests its values too deeply.
    """
    _require_plain(document)
    ready: dict[str, NDArray[Any]] = {}
    for name in sorted(tensors):
        array = np.asarray(tensors[name], order="C")
        if array.dtype not in _DTYPES.values():
            raise PayloadError(f"tensor {name} has type {array.dtype}; only float32, int64 and uint8 travel")
        ready[name] = array
    # One metadata key: safetensors keeps metadata in a hash map, whose order is not canonical.
    metadata = {_MAGIC: canonical_json({"kind": kind.value, "document": dict(document)}).decode()}
    return bytes(safetensors.numpy.save(ready, metadata=metadata))


def _checked_header(data: bytes, limits: Limits) -> dict[str, Any]:
    if len(data) > limits.max_bytes:
        raise TooLarge(f"a body of {len(data)} bytes is above the limit of {limits.max_bytes}")
    if len(data) < 8:
        raise PayloadError("a body of fewer than 8 bytes is truncated")
    size = int.from_bytes(data[:8], "little")
    if size > limits.max_header:
        raise TooLarge(f"a body declares a header of {size} bytes, above the limit of {limits.max_header}")
    if 8 + size > len(data):
        raise PayloadError("a body ends inside its header")
    try:
        header = parse_json(data[8 : 8 + size])
    except ValueError as error:
        raise PayloadError("a body's header is not strict JSON") from error
    if not isinstance(header, dict):
        raise PayloadError("a body's header is not a JSON object")
    if len(header) - 1 > limits.max_tensors:
        raise TooLarge(f"a body declares {len(header) - 1} tensors, above the limit of {limits.max_tensors}")
    return header


def _check_tensors(header: dict[str, Any], room: int) -> None:
    """Every declared size must be true before safetensors allocates anything for it."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise PayloadError("a tensor's entry is malformed")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise WrongShape("a tensor has a type other than float32, int64 or uint8")
        if not isinstance(shape, list) or not isinstance(offsets, list):
            raise PayloadError("a tensor's shape or offsets are malformed")
        numbers = (*shape, *offsets)
        if len(offsets) != 2 or len(shape) > 8 or any(type(x) is not int or x < 0 for x in numbers):
            raise PayloadError("a tensor's shape or offsets are malformed")
        if offsets[1] > room or offsets[1] - offsets[0] != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise WrongShape("a tensor's declared shape does not match its bytes")


def decode(data: bytes, limits: Limits = Limits()) -> Body:
    """Parse a body, refusing everything that `encode` would not have written.

    Raises TooLarge, WrongShape or PayloadError; never allocates more than a few times `len(data)`.
    """
    header = _checked_header(data, limits)
    room = len(data) - 8 - int.from_bytes(data[:8], "little")
    _check_tensors(header, room)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or set(metadata) != {_MAGIC} or not isinstance(metadata[_MAGIC], str):
        raise PayloadError("a body is not marked as securefl's")
    try:
        head = parse_json(metadata[_MAGIC].encode())
        kind = PayloadKind(head["kind"])
        document = head["document"]
        if not isinstance(document, dict):
            raise TypeError
        tensors = safetensors.numpy.load(data)
        # Encoding again fails for what JSON parses and may not hold: a number that overflows to infinity.
        canonical = encode(kind, document, tensors) == data
    except (ValueError, TypeError, KeyError, RecursionError, safetensors.SafetensorError) as error:
        raise PayloadError("a body does not parse") from error
    if not canonical:
        raise PayloadError("a body is not in its canonical encoding")
    return Body(kind, document, tensors)


def encode_release(release: Release) -> bytes:
    """The bytes of a release, claim included."""
    document = {"claim": release.claim.model_dump(mode="json"), "info": dict(release.info)}
    return encode(release.kind, document, release.tensors)


def release_from(body: Body) -> Release:
    """A decoded body as a release. Raises PayloadError where the claim is missing or malformed."""
    if set(body.document) != {"claim", "info"} or not isinstance(body.document["info"], dict):
        raise PayloadError("a release must carry exactly a claim and its public facts")
    try:
        claim = CLAIM.validate_python(body.document["claim"])
    except ValidationError as error:
        raise PayloadError("a release's privacy claim is malformed") from error
    if canonical_json(claim.model_dump(mode="json")) != canonical_json(body.document["claim"]):
        raise PayloadError("a release's privacy claim is not in its canonical encoding")
    return Release(body.kind, body.tensors, body.document["info"], claim)


def decode_release(data: bytes, limits: Limits = Limits()) -> Release:
    """Parse the bytes of a release. Raises as `decode` does."""
    return release_from(decode(data, limits))


# No weight or hidden value of a working model comes near it; what does is meant to overflow somebody's sums.
MAX_MAGNITUDE = 1e6


def check_tensors(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """Require exactly the float32 arrays of `expected` (name to shape), all finite and below MAX_MAGNITUDE.

    `whose` names the sender in the message. Raises WrongShape or NonFiniteUpdate.
    """
    if set(tensors) != set(expected):
        odd = sorted(set(tensors) ^ set(expected))[0]
        raise WrongShape(f"the update of {whose} lacks or adds tensors (first difference: {odd[:80]})")
    for name, shape in expected.items():
        array = tensors[name]
        if array.dtype != np.float32 or array.shape != shape:
            raise WrongShape(
                f"tensor {name} of {whose} is {array.dtype} {array.shape}, agreed was float32 {shape}"
            )
        if not array.size:
            continue
        ends = float(array.min()), float(array.max())  # NaN where one value is; no second array in memory
        if not all(map(math.isfinite, ends)):
            raise NonFiniteUpdate(f"tensor {name} of {whose} holds NaN or infinity; its update was refused")
        if max(map(abs, ends)) > MAX_MAGNITUDE:
            raise NonFiniteUpdate(
                f"tensor {name} of {whose} holds values above {MAX_MAGNITUDE:g}, which would overflow; "
                "its update was refused"
            )


def flatten(tensors: Tensors) -> NDArray[np.float32]:
    """All values in one row (d,), float32: the arrays in the order of their names, each in C order."""
    return np.concatenate([np.asarray(tensors[name], np.float32).ravel() for name in sorted(tensors)])


def unflatten(row: NDArray[Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """The inverse of `flatten` for arrays of these shapes. Raises WrongShape for a row of another length."""
    sizes = [math.prod(shapes[name]) for name in sorted(shapes)]
    if row.shape != (sum(sizes),):
        raise WrongShape(f"a row of {row.size} values is not a model of {sum(sizes)}")
    parts = np.split(row, np.cumsum(sizes)[:-1])
    return {
        name: part.reshape(shapes[name]).astype(np.float32)
        for name, part in zip(sorted(shapes), parts, strict=True)
    }


def fingerprint(tensors: Tensors) -> str:
    """SHA-256 (hex) over names, types, shapes and bytes of arrays: the identity of a model's weights."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.asarray(tensors[name], order="C")
        label = canonical_json([name, array.dtype.str, list(array.shape)])
        digest.update(len(label).to_bytes(4, "big") + label)
        digest.update(array.data)
    return digest.hexdigest()
