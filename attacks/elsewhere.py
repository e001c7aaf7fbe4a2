"""Vectors that another system released, made ready for the same attacks as a run's own.

The auditor gives the file, the encoder, a claim if there is one, texts that are nobody's, and, to score what
is read, the rows behind the vectors. A vector is the mean of its rows' pooled vectors or, where the file has
one for each position, of what the embedding layer gives for them. This room reads files and never writes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attacks.findings import Overlap
from attacks.mechanism import CLIPS, MULTIPLIERS
from attacks.overlap import disjoint
from attacks.runs import Recorded, Texts, pooled_vectors
from attacks.vector_files import VectorFile, read_vectors
from securefl._tables import _COLUMN, read_table, read_texts
from securefl.centroid_privacy import centroid_mu
from securefl.errors import DataError, ModelError, ProtocolError, UsageError
from securefl.files import read_limited
from securefl.models import base_fingerprint, load_slm
from securefl.privacy import gaussian_epsilon
from securefl.release import (
    ROW,
    Adjacency,
    Claim,
    GaussianSums,
    NonPrivate,
    PayloadKind,
    Release,
    Unit,
    canonical_json,
    parse_json,
)
from securefl.result import ReleaseRow
from securefl.slm import Slm

SILO: Final = "elsewhere"
MAX_LENGTH: Final = 8192
_LENGTH = 64
_MAX_CLAIM = 64 * 2**10
_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}")
# Of what an exact mean may be off, over its largest number: float16 on the way is within.
_EPSILON_SLACK = 0.01
_MAX_EPSILON = 1e6
_MAX_DIGITS = 18  # of the number of a vector
# What a sentence about a column calls the configuration's fields, and what they are called here.
_FIELDS, _OPTIONS = " (data.text, pair, label, unit, language or split);", " (--text, --label, --group);"


class ClaimFile(BaseModel):
    """A claim about noised means: sums of clipped vectors with Gaussian noise over noisy counts.

    Multipliers are standard deviations over the clip, and over 1 for the counts. epsilon: as the other
    system states it; it must be what the noise gives.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mechanism: str
    clip: float = Field(ge=CLIPS[0], le=CLIPS[1])
    noise_multiplier: float = Field(ge=MULTIPLIERS[0], le=MULTIPLIERS[1])
    count_multiplier: float = Field(ge=MULTIPLIERS[0], le=MULTIPLIERS[1])
    delta: float = Field(gt=0, lt=1)
    epsilon: float | None = Field(None, gt=0, le=_MAX_EPSILON)
    adjacency: Adjacency = "add-remove"
    unit: Unit = ROW


def read_claim(path: Path) -> GaussianSums:
    """A claim file as a claim. Raises UsageError naming the field, and where the stated epsilon is smaller
    than what the noise gives."""
    try:
        document = parse_json(read_limited(path, _MAX_CLAIM))
    except ValueError:
        raise UsageError(f"{path}: is not JSON, names a field twice or has a number beyond all") from None
    if not isinstance(document, dict) or document.get("mechanism") != "gaussian-sums":
        raise UsageError(
            f'{path}: mechanism: must be "gaussian-sums", the noise that the audit knows; an epsilon without '
            "a mechanism bounds nothing that could be checked"
        )
    try:
        stated = ClaimFile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"]]
        where = ".".join(names) if all(map(_COLUMN.fullmatch, names)) else "a field (its name is not shown)"
        raise UsageError(f"{path}: {where}: {first['msg'].lower()}") from None
    mu = centroid_mu(stated.noise_multiplier, stated.count_multiplier, math.inf, stated.adjacency)
    epsilon = gaussian_epsilon(mu, stated.delta)
    if not epsilon > 0:
        raise UsageError(
            f"{path}: delta: at {stated.delta:g} this noise gives an epsilon of 0; state a smaller one"
        )
    if stated.epsilon is not None and stated.epsilon < epsilon * (1 - _EPSILON_SLACK):
        raise UsageError(
            f"{path}: epsilon: {stated.epsilon:g} is claimed, but this noise gives {epsilon:.3g}; "
            "correct the claim before it is audited"
        )
    return GaussianSums(
        epsilon=stated.epsilon or epsilon,
        delta=stated.delta,
        mu=mu,
        clip=stated.clip,
        noise_multiplier=stated.noise_multiplier,
        count_multiplier=stated.count_multiplier,
        prediction_multiplier=1e12,  # no predictions were released
        unit=stated.unit,
        adjacency=stated.adjacency,
        generator="as claimed",
        simulated=False,
    )


@dataclass(frozen=True)
class Columns:
    """Names of columns in the files of texts. label and group may be absent."""

    text: str = "text"
    label: str | None = None
    group: str | None = None


class Elsewhere:
    """A `Source` of one release.

    vectors: file of (q, d), or of (q, S, d) of an embedding layer with texts cut at S tokens. encoder:
    checkpoint, of which the token table may have been trained since. Weights in the file are of a vector's
    rows in their order. pool, rows: files of texts; without rows nothing that needs the truth is scored. With
    `columns.group` a row is behind the vector of that number, counted from 0; else row i is behind vector i.
    max_length: tokens of a text, 64 where nothing says otherwise. normalised: vectors were scaled to length 1
    before they were averaged.
    Raises UsageError and DataError for files that do not fit each other, ProtocolError where the encoder is
    another than the one that the file names.
    """

    def __init__(
        self,
        vectors: Path,
        encoder: str,
        pool: Path,
        rows: Path | None = None,
        claim: Path | None = None,
        *,
        columns: Columns | None = None,
        max_length: int | None = None,
        normalised: bool = False,
        seed: int = 0,
    ) -> None:
        self.path, self._encoder, self._seed = vectors, encoder, seed
        columns = Columns() if columns is None else columns
        for option, column in (("--label", columns.label), ("--group", columns.group)):
            if column == columns.text:
                raise UsageError(f"--text and {option} name the same column; they must differ")
        self._file = read_vectors(vectors)
        self._max_length, self._normalised = self._length(max_length, normalised), normalised
        self._claim: Claim = NonPrivate(reason="no claim was given") if claim is None else read_claim(claim)
        fingerprint = base_fingerprint(encoder)
        if self._file.encoder is not None and self._file.encoder != fingerprint:
            stated = self._file.encoder
            named = stated[:12] if _FINGERPRINT.fullmatch(stated) else "no fingerprint"
            raise ProtocolError(
                f"{vectors}: was made with another encoder than {encoder} (it names "
                f"{named}, this one is {fingerprint[:12]}); attacked with the wrong one it "
                "would seem safe"
            )
        self._fingerprint = fingerprint
        self._rows, self._groups = _read_rows(rows, columns, len(self._file.vectors))
        self._pool, self._overlap = _read_pool(pool, columns, self._rows)
        self._sizes = _sizes(self._file, self._groups)
        self._check_weights()
        files = [path for path in (vectors, pool, rows, claim) if path is not None]
        terms = [columns.text, columns.label, columns.group, self._max_length, normalised, seed]
        content = canonical_json([terms, fingerprint, [_sha256(path) for path in files]])
        self.digest = hashlib.sha256(content).hexdigest()

    def _length(self, max_length: int | None, normalised: bool) -> int:
        """Tokens at which a text is cut; a file of an embedding layer's positions says it itself."""
        positions = None if self._file.mask is None else self._file.mask.shape[1]
        length = max_length if max_length is not None else positions or _LENGTH
        if not 1 <= length <= MAX_LENGTH:
            raise UsageError(f"the length of a text must be 1 to {MAX_LENGTH:,} tokens, not {length:,}")
        if positions is not None and (length != positions or normalised):
            raise UsageError(
                f"{self.path}: has {positions} positions, so texts were cut there and nothing was scaled; "
                "leave out --max-length and --normalised"
            )
        return length

    def _check_weights(self) -> None:
        """Where rows weigh differently: their number, and no claim, which is one of rows that count alike."""
        if self._file.weights is None:
            return
        if not isinstance(self._claim, NonPrivate):
            raise UsageError(f"{self.path}: weights: noise on unequal weights is not known; drop --claim")
        for number, (group, size) in enumerate(zip(self._groups, self._sizes, strict=bool(self._groups))):
            if len(group) != size:
                raise DataError(
                    f"{self.path}: weights: row {number + 1} has {size:g}, but {len(group)} rows are behind "
                    "that vector; check --group"
                )

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def title(self) -> str:
        return self.path.name

    @property
    def method(self) -> str:
        return SILO

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def config(self) -> None:
        """What made the vectors is not known."""
        return None

    @property
    def _kind(self) -> PayloadKind:
        return PayloadKind.CENTROIDS if self._file.mask is None else PayloadKind.EMBEDDING_CENTROIDS

    @cached_property
    def releases(self) -> tuple[Recorded, ...]:
        row = ReleaseRow(
            round=1,
            kind=self._kind.value,
            recipients=[],
            readable_by=[],
            bytes=self.path.stat().st_size,
            sha256=self._file.sha256,
            claim=self._claim.model_dump(mode="json"),
        )
        return (Recorded(SILO, self.path, self._file.sha256, row),)

    @property
    def pool(self) -> Texts:
        return self._pool

    @property
    def overlap(self) -> Overlap:
        return self._overlap

    @property
    def sizes_known(self) -> bool:
        """Whether the file, or the rows, say how many texts are behind each vector."""
        return self._file.sizes is not None or self._rows is not None

    @property
    def truth(self) -> bool:
        return self._rows is not None

    def open(self, recorded: Recorded) -> Release:
        count = len(self._sizes)
        tensors: dict[str, NDArray[Any]] = {
            "centroids": self._file.vectors.astype(np.float32),
            "sizes": self._sizes.astype(np.float32),
            "predictions": np.zeros((count, 0), np.float32),
        }
        if self._file.mask is not None:
            tensors["mask"] = self._file.mask.astype(np.float32)
        if self._file.weights is not None:
            tensors["weights"] = self._file.weights
        info = {"encoder": self._fingerprint, "base": self._encoder, "round": recorded.row.round}
        info["base_sha256"] = self._fingerprint
        return Release(self._kind, tensors, info, self._claim)

    def rows(self, silo: str) -> Texts:
        if self._rows is None:
            raise UsageError(f"{silo}: the rows behind the vectors were not given (--rows)")
        return self._rows

    def clusters(self, recorded: Recorded, count: int) -> list[list[int]]:
        self.rows(recorded.silo)
        return self._groups[:count]

    @cached_property
    def _slm(self) -> Slm:
        try:
            return load_slm(
                self._encoder, ["no", "yes"], max_length=self._max_length, train_embeddings=False, seed=0
            )
        except ModelError as error:
            said = str(error).replace(
                "slm.max_length", f"the length of a text in {self.path}, or --max-length,"
            )
            raise ModelError(said) from None

    def encoder(self, recorded: Recorded, release: Release) -> Slm:
        del recorded, release  # there is one
        return self._slm

    def embed(self, slm: Slm, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = pooled_vectors(slm, texts)
        if self._normalised:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _options() -> Iterator[None]:
    """A sentence about a missing column names the options of the command: there is no configuration here."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(_FIELDS, _OPTIONS)) from None


def _read_rows(path: Path | None, columns: Columns, count: int) -> tuple[Texts | None, list[list[int]]]:
    if path is None:
        return None, []
    if columns.group is None:
        texts = _read_texts(path, columns)
        if len(texts) != count:
            raise UsageError(
                f"{path}: has {len(texts)} rows for {count} vectors; name the column that says which vector "
                "a row is behind (--group)"
            )
        return texts, [[row] for row in range(count)]
    with _options():
        table = read_table(path, columns.text, columns.label or columns.group, columns.group)
    groups: list[list[int]] = [[] for _ in range(count)]
    for row, (value, place) in enumerate(zip(table.groups, table.places, strict=True)):
        if not value.isascii() or not value.isdigit() or len(value) > _MAX_DIGITS or int(value) >= count:
            raise DataError(
                f'{path}: {place}: column "{columns.group}" must be the number of a vector, 0 to {count - 1}'
            )
        groups[int(value)].append(row)
    empty = [number for number, group in enumerate(groups) if not group]
    if empty:
        raise DataError(f'{path}: no row has {empty[0]} in column "{columns.group}"; every vector has some')
    labels = tuple(table.labels) if columns.label else ("",) * len(table.texts)
    return Texts(tuple(table.ids), tuple(table.texts), labels), groups


def _read_texts(path: Path, columns: Columns) -> Texts:
    if columns.label is None:
        with _options():
            texts = read_texts(path, columns.text)
        ids = tuple(f"{path.stem}:{number}" for number in range(1, len(texts) + 1))
        return Texts(ids, tuple(texts), ("",) * len(texts))
    with _options():
        table = read_table(path, columns.text, columns.label)
    return Texts(tuple(table.ids), tuple(table.texts), tuple(table.labels))


def _read_pool(path: Path, columns: Columns, rows: Texts | None) -> tuple[Texts, Overlap]:
    pool = _read_texts(path, columns)
    kept, left_out = disjoint(pool.texts, () if rows is None else rows.texts)
    return pool.take(kept), Overlap(pool=len(pool), left_out=left_out)


def _sizes(file: VectorFile, groups: list[list[int]]) -> NDArray[np.float64]:
    if file.sizes is not None:
        return file.sizes
    if groups:
        return np.array([len(group) for group in groups], np.float64)
    return np.ones(len(file.vectors))
