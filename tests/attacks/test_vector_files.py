"""Files of vectors from elsewhere: the same numbers from every format, and one sentence for every bad one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from attacks.vector_files import read_vectors
from securefl.errors import DataError, ProtocolError, SecureflError, UsageError

VECTORS = np.random.default_rng(0).standard_normal((5, 3))
SIZES = np.array([2.0, 3.0, 4.5, 1.0, 7.0])


def _table(**more: Any) -> pa.Table:
    columns: dict[str, Any] = {f"v{i}": VECTORS[:, i] for i in range(3)}
    return pa.table({**columns, **more})


def _npy(path: Path) -> None:
    np.save(path, VECTORS)


def _safetensors(path: Path) -> None:
    tensors = {"centroids": VECTORS.astype(np.float64), "sizes": SIZES}
    save_file(tensors, path, metadata={"encoder": "ab12"})


def _parquet(path: Path) -> None:
    pq.write_table(_table(size=SIZES, encoder=["ab12"] * 5), path)


def _lists(path: Path) -> None:
    pq.write_table(pa.table({"embedding": VECTORS.tolist(), "size": SIZES}), path)


def _csv(path: Path) -> None:
    pyarrow.csv.write_csv(_table(size=SIZES), path)


@pytest.mark.parametrize(
    ("name", "write", "sizes", "encoder"),
    [
        ("a.npy", _npy, False, None),
        ("a.safetensors", _safetensors, True, "ab12"),
        ("a.parquet", _parquet, True, "ab12"),
        ("b.parquet", _lists, True, None),
        ("a.csv", _csv, True, None),
    ],
)
def test_every_format_gives_the_same_numbers(
    tmp_path: Path, name: str, write: Callable[[Path], None], sizes: bool, encoder: str | None
) -> None:
    write(tmp_path / name)
    found = read_vectors(tmp_path / name)
    np.testing.assert_allclose(found.vectors, VECTORS, rtol=1e-12)
    assert (found.sizes is not None) is sizes
    if found.sizes is not None:
        np.testing.assert_array_equal(found.sizes, SIZES)
    assert found.encoder == encoder


def _nan(path: Path) -> None:
    broken = VECTORS.copy()
    broken[2, 1] = np.nan
    np.save(path, broken)


def _objects(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(VECTORS))


def _longer_than_the_file(path: Path) -> None:
    np.save(path, VECTORS)
    path.write_bytes(path.read_bytes().replace(b"(5, 3)", b"(5000000000, 3)"))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "write", "error", "says"),
    [
        ("a.npy", _nan, DataError, "row 3 holds NaN"),
        ("a.npy", _objects, DataError, "no .npy file"),
        ("a.npy", _pickled, DataError, "no .npy file"),
        ("a.npy", _longer_than_the_file, DataError, "no .npy file"),
        ("a.npy", _empty, DataError, "no .npy file"),
        ("a.npy", lambda path: np.save(path, VECTORS[0]), DataError, "a table of one row each"),
        ("a.npy", lambda path: np.save(path, np.float64(3)), DataError, "a single number"),
        ("a.npy", lambda path: np.save(path, np.zeros((0, 3))), DataError, "a table"),
        ("a.npy", lambda path: np.save(path, np.array([["a", "b"]])), DataError, "not numbers"),
        ("a.npy", lambda path: np.save(path, VECTORS * 1j), DataError, "not numbers"),
        ("a.safetensors", _empty, DataError, "no safetensors"),
        ("a.safetensors", _pickled, DataError, "no safetensors"),
        (
            "a.safetensors",
            lambda path: save_file({"x": VECTORS, "y": VECTORS}, path),
            DataError,
            "no tensor named",
        ),
        (
            "a.safetensors",
            lambda path: save_file({"centroids": VECTORS, "sizes": SIZES[:3]}, path),
            DataError,
            "one positive number for each of 5",
        ),
        ("a.parquet", _empty, DataError, "no Parquet"),
        ("a.parquet", _npy, DataError, "no Parquet"),
        ("a.csv", _empty, DataError, "no CSV"),
        ("a.csv", lambda path: path.write_text("a,b\n1,x\n2,y\n"), DataError, 'column "b" holds string'),
        ("a.csv", lambda path: path.write_text("a,b\n1,\n2,3\n"), DataError, 'column "b" has empty cells'),
        ("a.csv", lambda path: path.write_text("a,size\n1,0\n2,3\n"), DataError, "sizes"),
        ("a.csv", lambda path: path.write_text("size\n1\n2\n"), DataError, "no column of numbers"),
        ("a.csv", lambda path: path.write_text("a,encoder\n1,x\n2,y\n"), ProtocolError, "mixes vectors of 2"),
        (
            "a.parquet",
            lambda path: pq.write_table(pa.table({"v": [[1.0], [1.0, 2.0]]}), path),
            DataError,
            "lists of 2 lengths",
        ),
        ("a.parquet", lambda path: pq.write_table(pa.table({"v": [[None, 1.0]]}), path), SecureflError, ""),
        ("a.pt", _npy, UsageError, "convert"),
    ],
)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path,
    name: str,
    write: Callable[[Path], None],
    error: type[SecureflError],
    says: str,
) -> None:
    path = tmp_path / "file"
    write(path if name != "a.npy" else tmp_path / name)
    if name != "a.npy":
        made = path if path.exists() else path.with_suffix(".npy")
        made.rename(tmp_path / name)
    with pytest.raises(error) as caught:
        read_vectors(tmp_path / name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    for name in ("none.npy", "folder.npy"):
        with pytest.raises(UsageError, match="is not a file"):
            read_vectors(tmp_path / name)
