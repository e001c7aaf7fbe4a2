"""Reading a RUN_DIR: what was released, the truth behind it, and the encoder that each release names.

Everything is checked on the way in: hashes against the run's own record, encoders by fingerprint, truth
against rows. A release that cannot be tied to its encoder is an error, since an attack with another one would
score chance. This room reads files and never writes; what it holds of rows is not printed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from securefl.config import Config, parse_config
from securefl.errors import DataError, ModelError, PayloadError, ProtocolError, UsageError
from securefl.files import read_limited
from securefl.models import Slm, base_fingerprint, load_slm
from securefl.release import Limits, PayloadKind, Release, decode_release, fingerprint
from securefl.result import ReleaseRow, Result

CENTROIDS = (PayloadKind.CENTROIDS.value, PayloadKind.EMBEDDING_CENTROIDS.value)
# A result with thousands of rounds is a few megabytes; a silo's rows may be many.
_MAX_JSON = 64 * 2**20
_MAX_ROWS = 1024 * 2**20


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


def _plain(text: str) -> str:
    """A text without what does not make it another one: case and white space."""
    return " ".join(text.casefold().split())


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def open_release(path: Path) -> Release:
    """Decode a recorded release. Raises the codec's ProtocolError with the file named."""
    data = read_limited(path, Limits().max_bytes)
    try:
        return decode_release(data)
    except ProtocolError as error:
        raise type(error)(f"{path}: {error}") from error


class Run:
    """A run's folder. Raises UsageError where it is not one."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: is not a folder; name the folder that a simulation wrote")
        file = self.path / "result.json"
        try:
            self.result = Result.model_validate_json(read_limited(file, _MAX_JSON))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise UsageError(f"{file}: {where}: is not as a run writes it ({first['msg']})") from error
        self._rows: dict[str, Texts] = {}
        self._encoder: tuple[str, Slm] | None = None

    @cached_property
    def config(self) -> Config:
        """The run's configuration. Raises ConfigError."""
        return parse_config(self.result.config, f"{self.path / 'result.json'}: config")

    @cached_property
    def releases(self) -> tuple[Recorded, ...]:
        """Every recorded release of every silo, by silo and file name.

        Raises ProtocolError where a file is not one of those that the run says have left.
        """
        found = []
        for client in self.result.clients:
            known = {row.sha256: row for row in client.releases}
            for path in sorted((self.path / "releases" / client.name).glob("*.safetensors")):
                digest = _sha256(path)
                if digest not in known:
                    raise ProtocolError(
                        f"{path}: its hash is none of those that the run recorded for {client.name}; "
                        "the file was changed, or is not of this run"
                    )
                found.append(Recorded(client.name, path, digest, known[digest]))
        return tuple(found)

    @cached_property
    def pool(self) -> Texts:
        """Rows that are nobody's, without those whose text is also a silo's and without repeated texts."""
        pool = _read_rows(self.path / "truth" / "pool.jsonl")
        seen = {_plain(text) for client in self.result.clients for text in self.rows(client.name).texts}
        keep = []
        for index, text in enumerate(map(_plain, pool.texts)):
            if text not in seen:
                seen.add(text)
                keep.append(index)
        return pool.take(keep)

    def rows(self, silo: str) -> Texts:
        """The rows that a silo trained on."""
        if silo not in self._rows:
            self._rows[silo] = _read_rows(self.path / "truth" / silo / "rows.jsonl")
        return self._rows[silo]

    def clusters(self, recorded: Recorded, count: int) -> list[list[int]]:
        """For each of `count` centroids the indices (into `rows`) of the rows behind it."""
        folder = self.path / "truth" / recorded.silo
        index = {row: i for i, row in enumerate(self.rows(recorded.silo).ids)}
        for path in sorted(folder.glob("*.json")):
            document = _read_json(path)
            if not isinstance(document, dict) or document.get("release") != recorded.path.name:
                continue
            clusters = document.get("clusters")
            if not isinstance(clusters, list) or len(clusters) != count:
                raise DataError(f"{path}: clusters: there must be one list of row ids for each centroid")
            try:
                return [[index[row] for row in cluster] for cluster in clusters]
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{path}: clusters: a row id is not one of {folder / 'rows.jsonl'}"
                ) from error
        raise DataError(f"{folder}: no file says which rows are behind {recorded.path.name}")

    def encoder(self, recorded: Recorded, release: Release) -> Slm:
        """The model that a centroid release was made with, found among what the server sent out.

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
        )
        slm.load_state(tensors.tensors)
        if fingerprint(slm.state()) != info.encoder:
            raise ProtocolError(f"{recorded.path}: the loaded encoder does not have the fingerprint it names")
        self._encoder = (info.encoder, slm)
        return slm

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


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_limited(path, _MAX_JSON))
    except ValueError as error:
        raise DataError(f"{path}: is not JSON") from error


def _read_rows(path: Path) -> Texts:
    """A JSON Lines file of id, text and label. Raises UsageError or DataError naming the line."""
    try:
        # Texts may hold line separators other than the newline, and lone surrogates.
        lines = read_limited(path, _MAX_ROWS).decode("utf-8", "surrogatepass").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 (byte {error.start})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            fields = (row["id"], row["text"], row["label"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: line {number} is not a row with id, text and label") from error
        if not all(isinstance(field, str) for field in fields):
            raise DataError(f"{path}: line {number}: id, text and label must be strings")
        rows.append(fields)
    ids = [row[0] for row in rows]
    if len(set(ids)) != len(ids):
        raise DataError(f"{path}: an id occurs twice")
    return Texts(tuple(ids), tuple(row[1] for row in rows), tuple(row[2] for row in rows))
