"""Reading a RUN_DIR: what was released, the truth behind it, and the encoder that each release names.

Everything is checked on the way in: releases against ledgers and result (`securefl.verification.verify_run`),
encoders by fingerprint, truth against rows. A release that cannot be tied to its encoder is an error, since
an attack with another one would score chance. This room reads files and never writes; what it holds of rows
is not printed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attacks.findings import Overlap
from attacks.overlap import disjoint
from securefl.config import Config, parse_config
from securefl.errors import DataError, ModelError, PayloadError, ProtocolError, UsageError
from securefl.files import read_limited
from securefl.models import base_fingerprint, load_slm
from securefl.recording import SUMS
from securefl.release import (
    Limits,
    PayloadKind,
    Release,
    canonical_json,
    decode_release,
    fingerprint,
    parse_json,
)
from securefl.result import ReleaseRow
from securefl.slm import Slm
from securefl.training import embed
from securefl.verification import verify_run

CENTROIDS = (PayloadKind.CENTROIDS.value, PayloadKind.EMBEDDING_CENTROIDS.value)
# A result with thousands of rounds is a few megabytes; a silo's rows may be many.
_MAX_JSON = 64 * 2**20
_MAX_ROWS = 1024 * 2**20
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair


@dataclass(frozen=True, repr=False)
class Texts:
    """Rows of the truth: ids, texts and labels, each of length n. The repr shows the count only."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Texts({len(self)})"

    def take(self, indices: Sequence[int]) -> Texts:
        """The rows at `indices`, in that order."""
        return Texts(
            tuple(self.ids[i] for i in indices),
            tuple(self.texts[i] for i in indices),
            tuple(self.labels[i] for i in indices),
        )

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        """The rows of all parts, one after the other."""
        return cls(
            *(tuple(chain(*(getattr(part, name) for part in parts))) for name in ("ids", "texts", "labels"))
        )


@dataclass(frozen=True)
class Recorded:
    """One file below releases/SILO, tied by its hash to the run's record of what left."""

    silo: str
    path: Path
    sha256: str
    row: ReleaseRow


class CentroidInfo(BaseModel):
    """The public facts of a centroid release that an attack needs; others are let through."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    round: int = Field(ge=1)
    encoder: str = Field(pattern=r"^[0-9a-f]{64}$")
    base: str = Field(min_length=1)
    base_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    max_length: int = Field(ge=1)
    labels: list[str] = Field(min_length=2)


def pooled_vectors(slm: Slm, texts: Sequence[str]) -> NDArray[np.float32]:
    """(n, d) on the GPU where there is one, which the model leaves again: attacks work on arrays."""
    if not torch.cuda.is_available():
        return embed(slm, texts, "pooled")
    before = slm.device
    try:
        return embed(slm.to("cuda"), texts, "pooled")
    finally:
        slm.to(before)


def open_release(path: Path) -> Release:
    """Decode a recorded release. Raises the codec's ProtocolError with the file named."""
    data = read_limited(path, Limits().max_bytes)
    try:
        return decode_release(data)
    except ProtocolError as error:
        raise type(error)(f"{path}: {error}") from error


def open_recorded(recorded: Recorded) -> Release:
    """A recorded release, which must be of the kind and under the claim that the run's record states."""
    release = open_release(recorded.path)
    claim = canonical_json(release.claim.model_dump(mode="json"))
    if release.kind.value != recorded.row.kind or claim != canonical_json(recorded.row.claim):
        raise ProtocolError(f"{recorded.path}: its kind or claim is not the one that the run recorded for it")
    return release


class Run:
    """A run's folder. Raises UsageError where it is not one.

    Raises ProtocolError where result.json is malformed, or the releases in the folder, in the silos' ledgers
    and in result.json are not the same.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: is not a folder; name the folder that a simulation wrote")
        verified = verify_run(self.path)
        self.result = verified.result
        self.releases = tuple(
            Recorded(one.silo, one.path, one.row.sha256, one.row)
            for one in sorted(verified.releases, key=lambda one: (one.silo, one.path.name))
        )
        self._rows: dict[str, Texts] = {}
        self._encoder: tuple[str, Slm] | None = None

    @property
    def name(self) -> str:
        return self.result.run

    @property
    def title(self) -> str:
        return self.result.name

    @property
    def method(self) -> str:
        return self.result.method

    @property
    def seed(self) -> int:
        return self.result.seed

    @property
    def truth(self) -> bool:
        """A run always knows the rows behind its releases."""
        return True

    def open(self, recorded: Recorded) -> Release:
        """A recorded release, which must be of the kind and under the claim that the run's record states."""
        return open_recorded(recorded)

    @cached_property
    def config(self) -> Config:
        """The run's configuration. Raises ConfigError."""
        return parse_config(self.result.config, f"{self.path / 'result.json'}: config")

    @cached_property
    def _pool(self) -> tuple[Texts, Overlap]:
        pool = _read_rows(self.path / "truth" / "pool.jsonl")
        victims = (text for client in self.result.clients for text in self.rows(client.name).texts)
        kept, left_out = disjoint(pool.texts, victims)
        return pool.take(kept), Overlap(pool=len(pool), left_out=left_out)

    @property
    def pool(self) -> Texts:
        """Rows that are nobody's, without those that overlap with a silo's and without repeated texts."""
        return self._pool[0]

    @property
    def overlap(self) -> Overlap:
        """How much of the pool was left out."""
        return self._pool[1]

    def rows(self, silo: str) -> Texts:
        """The rows that a silo trained on. Raises DataError where there are none."""
        if silo not in self._rows:
            path = self.path / "truth" / silo / "rows.jsonl"
            self._rows[silo] = _read_rows(path)
            if not len(self._rows[silo]):
                raise DataError(f"{path}: holds no rows")
        return self._rows[silo]

    def clusters(self, recorded: Recorded, count: int) -> list[list[int]]:
        """For each of `count` centroids the indices (into `rows`) of the rows behind it."""
        path, clusters = self._truth(recorded, "clusters")
        lists = isinstance(clusters, list) and all(isinstance(cluster, list) for cluster in clusters)
        if not isinstance(clusters, list) or not lists or len(clusters) != count:
            raise DataError(f"{path}: clusters: there must be one list of row ids for each centroid")
        return [self._indices(recorded, path, "clusters", cluster) for cluster in _once(path, clusters)]

    def batch(self, recorded: Recorded) -> list[int]:
        """The indices (into `rows`) of the rows in the batch behind a gradient."""
        path, rows = self._truth(recorded, "rows")
        if not isinstance(rows, list) or not rows:
            raise DataError(f"{path}: rows: must be the ids of the rows in a batch")
        return self._indices(recorded, path, "rows", _once(path, [rows])[0])

    def _truth(self, recorded: Recorded, field: str) -> tuple[Path, Any]:
        """The file that says which rows are behind a release, and what it says in a field."""
        folder = self.path / "truth" / recorded.silo
        for path in sorted(folder.glob("*.json")):
            document = _read_json(path)
            if isinstance(document, dict) and document.get("release") == recorded.path.name:
                return path, document.get(field)
        raise DataError(f"{folder}: no file says which rows are behind {recorded.path.name}")

    def _indices(self, recorded: Recorded, path: Path, field: str, rows: list[Any]) -> list[int]:
        index = {row: i for i, row in enumerate(self.rows(recorded.silo).ids)}
        try:
            return [index[row] for row in rows]
        except (KeyError, TypeError):
            raise DataError(f"{path}: {field}: a row id is not one of {path.parent / 'rows.jsonl'}") from None

    def encoder(self, recorded: Recorded, release: Release) -> Slm:
        """The model that a centroid release was made with, found among what the server sent or silos opened.

        Raises ProtocolError where none has the fingerprint that the release names, ModelError where the
        checkpoint at hand is another than the silos'.
        """
        info = centroid_info(recorded, release)
        if self._encoder is not None and self._encoder[0] == info.encoder:
            return self._encoder[1]
        tensors = self._global_model(info, recorded)
        checkpoint = base_fingerprint(info.base)
        if checkpoint != info.base_sha256:
            raise ModelError(
                f"{recorded.path}: was made with another checkpoint of {info.base} than the one installed "
                "here, so an attack would score chance; install that one"
            )
        slm = load_slm(
            info.base,
            info.labels,
            max_length=info.max_length,
            train_embeddings=self.config.slm.train_embeddings,
            seed=0,
            lora=self.config.slm.lora,
        )
        slm.load_state(tensors.tensors)
        # An encrypted sum is named by its ciphertexts; which opened sum it is stands in the sum itself.
        if tensors.kind is PayloadKind.MODEL and fingerprint(slm.state()) != info.encoder:
            raise ProtocolError(f"{recorded.path}: the loaded encoder does not have the fingerprint it names")
        self._encoder = (info.encoder, slm)
        return slm

    def embed(self, slm: Slm, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, d) pooled vectors of texts."""
        return pooled_vectors(slm, texts)

    def _global_model(self, info: CentroidInfo, recorded: Recorded) -> Release:
        folder = self.path / "releases" / "server"
        first = folder / f"r{info.round:03d}-model.safetensors"
        others = [path for path in sorted(folder.glob("*model*.safetensors")) if path != first]
        for path in [first, *others] if first.exists() else others:
            release = open_release(path)
            if release.kind is PayloadKind.MODEL and release.info.get("encoder") == info.encoder:
                if fingerprint(release.tensors) != info.encoder:
                    raise ProtocolError(f"{path}: its weights do not have the fingerprint that it states")
                return release
        for path in sorted((self.path / "releases" / SUMS).glob("*.safetensors")):
            release = open_release(path)
            if release.kind is PayloadKind.SUM and release.info.get("encoder") == info.encoder:
                return release
        raise ProtocolError(
            f"{recorded.path}: names an encoder that is not among the models in {folder}; attacked with "
            "another one it would seem safe, so it is not attacked"
        )


def centroid_info(recorded: Recorded, release: Release) -> CentroidInfo:
    """The public facts of a centroid release. Raises PayloadError for what is missing or malformed."""
    try:
        return CentroidInfo.model_validate(dict(release.info))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise PayloadError(f"{recorded.path}: its public facts lack a usable {where}") from error


def _once(path: Path, groups: list[list[Any]]) -> list[list[Any]]:
    """The same; raises DataError where a row stands twice."""
    used = [canonical_json(row) for group in groups for row in group]
    if len(set(used)) != len(used):
        raise DataError(f"{path}: a row is behind two centroids, or in a batch twice")
    return groups


def _read_json(path: Path) -> Any:
    try:
        return parse_json(read_limited(path, _MAX_JSON))
    except ValueError as error:
        raise DataError(f"{path}: is not JSON") from error


def _read_rows(path: Path) -> Texts:
    """A JSON Lines file of id, text and label. Raises UsageError or DataError naming the line."""
    try:
        # Texts may hold line separators other than the newline. Lone surrogates are refused with their line.
        lines = read_limited(path, _MAX_ROWS).decode("utf-8", "surrogatepass").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 (byte {error.start})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.encode("utf-8", "surrogatepass"))
            fields = (row["id"], row["text"], row["label"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: line {number} is not a row with id, text and label") from error
        if not all(isinstance(field, str) for field in fields):
            raise DataError(f"{path}: line {number}: id, text and label must be strings")
        # No federation takes such a text, and no tokenizer.
        if any(map(_HALF.search, fields)):
            raise DataError(f"{path}: line {number}: holds half a surrogate pair; it is not what a run wrote")
        rows.append(fields)
    ids = [row[0] for row in rows]
    if len(set(ids)) != len(ids):
        raise DataError(f"{path}: an id occurs twice")
    return Texts(tuple(ids), tuple(row[1] for row in rows), tuple(row[2] for row in rows))
