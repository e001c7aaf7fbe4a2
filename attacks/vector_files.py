"""One file of vectors from elsewhere -> arrays: `.npy`, `.safetensors`, Parquet or CSV, every number checked.

A vector is one row of numbers, or, of an embedding layer, one for each position of a text (`.npy` and
`.safetensors` only). What a file states beside its vectors (how many rows each is the mean of, how much each
of them weighs, the encoder that made it) is read too. No pickle; sizes are checked before anything is
allocated. Errors name file, row or column and repeat nothing else: what a library says of a file may quote
its rows, and where a header is missing they are it.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from securefl._tables import _COLUMN
from securefl.errors import DataError, ProtocolError, UsageError

SUFFIXES = (".npy", ".safetensors", ".parquet", ".csv")
MAX_BYTES = 2 * 2**30
# No encoder gives larger numbers; their squares still fit float32, and sums of these as well.
MAX_NUMBER = 1e15
# A count that was noised may be less than 1; float32 still holds this one.
MIN_SIZE = 1e-6
_NAMES = ("centroids", "embeddings", "vectors")
_SIZES, _MASK, _WEIGHTS, _ENCODER = ("sizes", "size"), "mask", "weights", "encoder"


@dataclass(frozen=True, repr=False)
class VectorFile:
    """vectors: (q, d) float64, finite, or (q, S, d) for S positions, zeros where a mask says that none is.
    mask: (q, S) 0/1, None for (q, d). sizes: (q,) rows behind each, None where the file does not say.
    weights: (q, m) of the rows behind each, which sum to 1, then zeros; None where rows count alike.
    encoder: fingerprint that the file states, or None. sha256: of the file."""

    vectors: NDArray[np.float64]
    mask: NDArray[np.float64] | None
    sizes: NDArray[np.float64] | None
    encoder: str | None
    sha256: str
    weights: NDArray[np.float64] | None = None


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
        content = readers[suffix](path)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else "its content is broken"
        raise UsageError(f"{path}: cannot be read ({reason})") from None
    vectors = _checked(path, content.vectors)
    mask = None
    if vectors.ndim == 3:
        mask = _checked_mask(path, content.mask, vectors)
        vectors = vectors * mask[..., None]
    sizes = None if content.sizes is None else _checked_sizes(path, content.sizes, len(vectors))
    weights = None
    if content.weights is not None:
        weights = _checked_weights(path, content.weights, vectors, sizes)
        sizes = np.asarray((weights > 0).sum(1), np.float64)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return VectorFile(vectors, mask, sizes, content.encoder, digest, weights)


def _checked(path: Path, vectors: NDArray[Any]) -> NDArray[np.float64]:
    if vectors.ndim not in (2, 3) or not vectors.size:
        shape = " x ".join(map(str, vectors.shape)) or "a single number"
        raise DataError(
            f"{path}: holds {shape}; vectors are a table of one row each, or one table each of an embedding "
            "layer's positions"
        )
    if vectors.dtype.kind not in "fiu":
        raise DataError(f"{path}: holds {vectors.dtype.name} and not numbers")
    if vectors.size * 8 > MAX_BYTES:  # as float64, whatever it takes in the file
        raise UsageError(f"{path}: holds more than {MAX_BYTES // 8:,} numbers; audit a part of it")
    with np.errstate(over="ignore"):  # of a wider float: infinity, which is refused below
        rows = np.asarray(vectors, np.float64)
    flat = rows.reshape(len(rows), -1)
    bad = np.flatnonzero(~np.isfinite(flat).all(1))
    if len(bad):
        raise DataError(f"{path}: row {bad[0] + 1} holds NaN or infinity, so the audit would mean nothing")
    bad = np.flatnonzero(np.maximum(flat.max(1), -flat.min(1)) > MAX_NUMBER)
    if len(bad):
        raise DataError(
            f"{path}: row {bad[0] + 1} holds a number beyond {MAX_NUMBER:g}, which no encoder gives"
        )
    return rows


def _checked_mask(path: Path, mask: NDArray[Any] | None, vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Which positions there are; without a mask those that are not all zeros."""
    if mask is None:
        found = np.asarray((vectors != 0).any(2), np.float64)
    elif mask.shape != vectors.shape[:2] or mask.dtype.kind not in "fiub" or not np.isin(mask, (0, 1)).all():
        raise DataError(
            f"{path}: mask: must be 0 or 1 for each of {vectors.shape[0]} x {vectors.shape[1]} positions"
        )
    else:
        # A vector of zeros is that of no position, whatever the mask says.
        found = np.asarray(mask, np.float64) * (vectors != 0).any(2)
    empty = np.flatnonzero(found.sum(1) == 0)
    if len(empty):
        raise DataError(
            f"{path}: row {empty[0] + 1} has no position, so there is nothing to audit; remove it"
        )
    return found


def _checked_sizes(path: Path, sizes: NDArray[Any], count: int) -> NDArray[np.float64]:
    if sizes.shape != (count,) or sizes.dtype.kind not in "fiu":
        raise DataError(f"{path}: sizes: must be one positive number for each of {count} vectors")
    found = sizes.astype(np.float64)
    bad = np.flatnonzero(~((found >= MIN_SIZE) & (found <= MAX_NUMBER)))  # refuses NaN too
    if len(bad):
        raise DataError(
            f"{path}: sizes: must be one positive number for each of {count} vectors, "
            f"from {MIN_SIZE:g} to {MAX_NUMBER:g}; that of row {bad[0] + 1} is not"
        )
    return found


def _checked_weights(
    path: Path, weights: NDArray[Any], vectors: NDArray[np.float64], sizes: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    if vectors.ndim != 3:
        raise DataError(f"{path}: weights: go with an embedding layer's positions; leave them out")
    count = len(vectors)
    if weights.ndim != 2 or len(weights) != count or weights.dtype.kind not in "fiu":
        raise DataError(f"{path}: weights: must be a row of numbers for each of {count} vectors")
    found = weights.astype(np.float64)
    # Refuses NaN and infinity too. Zeros stand behind the weights only.
    fit = (found >= 0) & (found <= MAX_NUMBER) & ((found > 0) | (np.cumsum(found[:, ::-1], 1)[:, ::-1] == 0))
    total = found.sum(1)
    bad = np.flatnonzero(~(fit.all(1) & (total >= MIN_SIZE)))
    if len(bad):
        raise DataError(
            f"{path}: weights: row {bad[0] + 1} must be positive numbers, one for each row behind its "
            "vector, and then zeros"
        )
    if sizes is not None and ((found > 0).sum(1) != sizes).any():
        raise DataError(f"{path}: weights: are not as many as the sizes say; correct one of them")
    return np.asarray(found / total[:, None], np.float64)


@dataclass(frozen=True, repr=False)
class _Content:
    """What stands in a file, unchecked."""

    vectors: NDArray[Any]
    sizes: NDArray[Any] | None = None
    encoder: str | None = None
    mask: NDArray[Any] | None = None
    weights: NDArray[Any] | None = None


def _npy(path: Path) -> _Content:
    found: NDArray[Any] | None = None
    # A header is Python source: what its parser may raise, or warn of, is no fixed list.
    with warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.simplefilter("ignore")
        try:
            # The header is read and its size held against the file's before the array is mapped.
            found = np.lib.format.open_memmap(path, mode="r")
        except OSError:
            raise
        except Exception:
            found = None
    if found is None:
        raise DataError(f"{path}: is no .npy file of numbers, or is cut short")
    return _Content(found)


def _safetensors(path: Path) -> _Content:
    fault = "is no safetensors file, or is cut short"
    with suppress(SafetensorError), safe_open(path, framework="numpy") as file:
        names = list(file.keys())
        encoder = (file.metadata() or {}).get(_ENCODER)
        found = [name for name in _NAMES if name in names] or (names if len(names) == 1 else [])
        if not found:
            raise DataError(f"{path}: has no tensor named {', '.join(_NAMES)}")
        with suppress(TypeError, AttributeError):  # of a type that numpy lacks: bfloat16, float8
            sizes = next((file.get_tensor(name) for name in _SIZES if name in names), None)
            mask, weights = (file.get_tensor(name) if name in names else None for name in (_MASK, _WEIGHTS))
            return _Content(file.get_tensor(found[0]), sizes, encoder, mask, weights)
        fault = "holds numbers of a type that cannot be read here; convert them to float32"
    raise DataError(f"{path}: {fault}")


def _parquet(path: Path) -> _Content:
    table: pa.Table | None = None
    try:
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            if sum(group.total_byte_size for group in groups) > MAX_BYTES:  # before it is unpacked
                raise UsageError(f"{path}: unpacks to more than {MAX_BYTES >> 30} GiB; audit a part of it")
            table = file.read()
    except OSError as error:
        if error.errno:  # without: the content, and not the system
            raise
    except (pa.ArrowException, ValueError, KeyError):
        table = None
    if table is None:
        raise DataError(f"{path}: is no Parquet file, or one that cannot be read; write it again")
    return _table(path, table)


def _csv(path: Path) -> _Content:
    table: pa.Table | None = None
    with suppress(pa.ArrowException, ValueError):
        table = pyarrow.csv.read_csv(path)
    if table is None:
        raise DataError(
            f"{path}: is no CSV file with as many fields in every line as in its header; write it again"
        )
    names = _names(path, table)
    if _counts(names) or not all(map(_number, names)):
        return _table(path, table)
    raise DataError(f"{path}: has no header line, so its first vector would be lost; add one")


def _number(cell: str) -> bool:
    with suppress(ValueError):
        float(cell or "0")
        return True
    return False


def _counts(names: Sequence[str]) -> bool:
    """Whether columns are numbered, as pandas does it where they have no names."""
    return any(list(names) == [str(n) for n in range(first, first + len(names))] for first in (0, 1))


def _names(path: Path, table: pa.Table) -> list[str]:
    with suppress(UnicodeDecodeError):
        return list(table.column_names)
    raise DataError(f"{path}: the names of its columns are not UTF-8; convert it")


def _as_shown(names: Sequence[str]) -> list[str]:
    """The columns as a message may name them: by number where one is hardly a name, for they may be a row."""
    if all(_COLUMN.fullmatch(name) for name in names):
        return [f'column "{name}"' for name in names]
    return [f"column {number}" for number in range(1, len(names) + 1)]


def _table(path: Path, table: pa.Table) -> _Content:
    """One column of lists, or a column for each number; `size` and `encoder` stand apart."""
    sizes, encoder = None, None
    columns: list[NDArray[Any]] = []
    names = _names(path, table)
    for name, shown, column in zip(names, _as_shown(names), table.columns, strict=True):
        place, kind = f"{path}: {shown}", column.type
        if column.null_count:
            raise DataError(f"{place} has empty cells; fill them or remove the rows")
        if name == _ENCODER:
            encoder = _one_encoder(path, place, column)
        elif name in _SIZES:
            sizes = np.asarray(column.to_pylist(), np.float64) if _numeric(kind) else np.zeros(0)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            columns.append(_lists(place, column))
        elif _numeric(kind):
            columns.append(np.asarray(column.to_numpy(), np.float64)[:, None])
        else:
            # A type may have fields, whose names are the file's.
            what = str(kind) if _COLUMN.fullmatch(str(kind)) else "values of another type"
            raise DataError(f"{place} holds {what} and not numbers; remove it")
    if not columns:
        raise DataError(f"{path}: has no column of numbers")
    return _Content(np.concatenate(columns, axis=1), sizes, encoder)


def _one_encoder(path: Path, place: str, column: pa.ChunkedArray) -> str | None:
    stated: set[str] | None = None
    with suppress(UnicodeDecodeError, ValueError, pa.ArrowException):
        stated = set(map(str, column.to_pylist()))
    if stated is None:
        raise DataError(f"{place} holds values that cannot be read; convert it")
    if len(stated) > 1:
        raise ProtocolError(
            f"{path}: mixes vectors of {len(stated)} encoders; audit those of each by themselves"
        )
    return next(iter(stated), None)


def _numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _lists(place: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
    if not _numeric(column.type.value_type):
        raise DataError(f"{place} has lists that are not of numbers")
    values = column.to_pylist()
    widths = {len(value) for value in values}
    if len(widths) != 1:
        raise DataError(f"{place} has lists of {len(widths)} lengths; vectors have one")
    return np.array(values, np.float64)  # an empty entry becomes NaN, which is refused with its row
