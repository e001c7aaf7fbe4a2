"""One file of vectors from elsewhere -> arrays: `.npy`, `.safetensors`, Parquet or CSV, every number checked.

What a file states beside its vectors (how many rows each is the mean of, the encoder that made it) is read
too. No pickle; sizes are checked before anything is allocated. Errors name file, row or column.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from securefl.errors import DataError, ProtocolError, UsageError

SUFFIXES = (".npy", ".safetensors", ".parquet", ".csv")
MAX_BYTES = 2 * 2**30
_NAMES = ("centroids", "embeddings", "vectors")
_SIZES, _ENCODER = ("sizes", "size"), "encoder"


@dataclass(frozen=True, repr=False)
class VectorFile:
    """vectors: (q, d) float64, finite. sizes: (q,) rows behind each, None where the file does not say.
    encoder: fingerprint that the file states, or None. sha256: of the file."""

    vectors: NDArray[np.float64]
    sizes: NDArray[np.float64] | None
    encoder: str | None
    sha256: str


def read_vectors(path: Path) -> VectorFile:
    """Read a file of vectors, one a row. Raises UsageError, DataError naming the row or column, and
    ProtocolError where the file mixes vectors of several encoders."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path}: is none of {', '.join(SUFFIXES)}; convert the vectors to one of them")
    if not path.is_file():
        raise UsageError(f"{path}: is not a file")
    if path.stat().st_size > MAX_BYTES:
        raise UsageError(f"{path}: is larger than {MAX_BYTES >> 30} GiB; audit a part of it")
    readers = {".npy": _npy, ".safetensors": _safetensors, ".parquet": _parquet, ".csv": _csv}
    try:
        vectors, sizes, encoder = readers[suffix](path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None
    vectors = _checked(path, vectors)
    if sizes is not None:
        if sizes.shape != (len(vectors),) or not np.isfinite(sizes).all() or not (sizes > 0).all():
            raise DataError(f"{path}: sizes: must be one positive number for each of {len(vectors)} vectors")
        sizes = sizes.astype(np.float64)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return VectorFile(vectors, sizes, encoder, digest)


def _checked(path: Path, vectors: NDArray[Any]) -> NDArray[np.float64]:
    if vectors.ndim != 2 or not vectors.size:
        shape = " x ".join(map(str, vectors.shape)) or "a single number"
        raise DataError(f"{path}: holds {shape}; vectors are a table of one row each")
    if vectors.dtype.kind not in "fiu":
        raise DataError(f"{path}: holds {vectors.dtype} and not numbers")
    rows = np.asarray(vectors, np.float64)
    bad = np.flatnonzero(~np.isfinite(rows).all(1))
    if len(bad):
        raise DataError(f"{path}: row {bad[0] + 1} holds NaN or infinity, so the audit would mean nothing")
    return rows


_Read = tuple[NDArray[Any], NDArray[Any] | None, str | None]


def _npy(path: Path) -> _Read:
    try:
        # The header is read and its size held against the file's before the array is mapped.
        return np.load(path, mmap_mode="r", allow_pickle=False), None, None
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: is no .npy file of numbers ({str(error).splitlines()[0]})") from None


def _safetensors(path: Path) -> _Read:
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            metadata = file.metadata() or {}
            found = [name for name in _NAMES if name in names] or (names if len(names) == 1 else [])
            if not found:
                raise DataError(f"{path}: has no tensor named {', '.join(_NAMES)}")
            sizes = next((file.get_tensor(name) for name in _SIZES if name in names), None)
            return file.get_tensor(found[0]), sizes, metadata.get(_ENCODER)
    except (SafetensorError, TypeError) as error:
        raise DataError(f"{path}: is no safetensors file ({str(error).splitlines()[0][:120]})") from None


def _parquet(path: Path) -> _Read:
    try:
        return _table(path, pq.read_table(path))
    except pa.ArrowException as error:
        raise DataError(f"{path}: is no Parquet file ({str(error).splitlines()[0][:120]})") from None


def _csv(path: Path) -> _Read:
    try:
        return _table(path, pyarrow.csv.read_csv(path))
    except pa.ArrowException as error:
        raise DataError(f"{path}: is no CSV file ({str(error).splitlines()[0][:120]})") from None


def _table(path: Path, table: pa.Table) -> _Read:
    """One column of lists, or a column for each number; `size` and `encoder` stand apart."""
    sizes, encoder = None, None
    columns: list[NDArray[Any]] = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count:
            raise DataError(f'{path}: column "{name}" has empty cells; fill them or remove the rows')
        kind = column.type
        if name == _ENCODER:
            stated = sorted(set(map(str, column.to_pylist())))
            if len(stated) > 1:
                raise ProtocolError(
                    f"{path}: mixes vectors of {len(stated)} encoders; audit those of each by themselves"
                )
            encoder = stated[0] if stated else None
        elif name in _SIZES:
            sizes = np.asarray(column.to_pylist(), np.float64) if _numeric(kind) else np.zeros(0)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            columns.append(_lists(path, name, column))
        elif _numeric(kind):
            columns.append(np.asarray(column.to_numpy(), np.float64)[:, None])
        else:
            raise DataError(f'{path}: column "{name}" holds {kind} and not numbers; remove it')
    if not columns:
        raise DataError(f"{path}: has no column of numbers")
    return np.concatenate(columns, axis=1), sizes, encoder


def _numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _lists(path: Path, name: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
    values = column.to_pylist()
    widths = {len(value) for value in values}
    if len(widths) != 1:
        raise DataError(f'{path}: column "{name}" has lists of {len(widths)} lengths; vectors have one')
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError):
        raise DataError(f'{path}: column "{name}" has lists that are not of numbers') from None
