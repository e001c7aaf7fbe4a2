"""Files of vectors from elsewhere: the same numbers from every format, and one sentence for every bad one."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from attacks import vector_files
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


LAYERED = np.random.default_rng(1).standard_normal((4, 6, 3)) * (np.arange(6) < 5)[None, :, None]


def test_an_embedding_layers_positions_and_their_mask(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", LAYERED)
    found = read_vectors(tmp_path / "a.npy")
    np.testing.assert_array_equal(found.vectors, LAYERED)
    assert found.mask is not None
    assert found.mask.tolist() == [[1, 1, 1, 1, 1, 0]] * 4
    shorter = np.tile(np.arange(6) < 2, (4, 1)).astype(np.float32)
    save_file({"centroids": LAYERED, "mask": shorter, "sizes": SIZES[:4]}, tmp_path / "a.safetensors")
    found = read_vectors(tmp_path / "a.safetensors")
    assert found.mask is not None
    assert found.mask.tolist() == shorter.tolist()
    assert not found.vectors[:, 2:].any()
    assert found.vectors[:, :2].tolist() == LAYERED[:, :2].tolist()
    # A mask that says of a vector of zeros that it is one is not believed.
    save_file({"centroids": LAYERED, "mask": np.ones((4, 6))}, tmp_path / "b.safetensors")
    found = read_vectors(tmp_path / "b.safetensors")
    assert found.mask is not None
    assert found.mask.tolist() == [[1, 1, 1, 1, 1, 0]] * 4


@pytest.mark.parametrize(
    ("vectors", "mask", "says"),
    [
        (LAYERED, np.ones((4, 5)), "mask: must be 0 or 1 for each of 4 x 6"),
        (LAYERED, np.full((4, 6), 0.5), "mask: must be 0 or 1"),
        (LAYERED, np.full((4, 6), np.nan), "mask: must be 0 or 1"),
        (LAYERED, np.zeros((4, 6)), "row 1 has no position"),
        (LAYERED * np.array([1, 0, 1, 1])[:, None, None], None, "row 2 has no position"),
        (np.where(np.arange(3) == 2, np.nan, LAYERED), None, "row 1 holds NaN"),
        (LAYERED[None], None, "holds 1 x 4 x 6 x 3"),
    ],
)
def test_positions_that_are_none_are_refused(tmp_path: Path, vectors: Any, mask: Any, says: str) -> None:
    tensors = {"centroids": np.ascontiguousarray(vectors)}
    save_file(tensors if mask is None else {**tensors, "mask": mask}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=says):
        read_vectors(tmp_path / "a.safetensors")


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


SECRET = "from a match goal win to a very long night"


def _header(text: str) -> Callable[[Path], None]:
    """A .npy file of version 1.0 with this header and numbers enough."""

    def write(path: Path) -> None:
        content = text.encode()
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(content)) + content + bytes(8192))

    return write


def _shaped(shape: str, kind: str = "<f8") -> Callable[[Path], None]:
    return _header(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}\n")


def _zipped(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=VECTORS)


@pytest.mark.parametrize(
    "write",
    [
        *map(_shaped, ["(-12, 64)", "(-12, -64)", f"({10**30}, 64)", "(2**40,)", "(0, 2**70)", "('a',)"]),
        *map(_shaped, [f"({2**40}, {2**40})", f"({2**62}, 4)", f"(0, {2**70})"]),
        *map(_header, ["((((", "(" * 5000, "'\\d'", "\n", "{'descr': SECRET}", "{}", "\x00", "1L"]),
        _shaped("(4, 4)", "no such type"),
        _zipped,
    ],
)
def test_a_header_that_is_none_is_one_sentence(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"a\.npy: is no \.npy file of numbers, or is cut short$"):
        read_vectors(tmp_path / "a.npy")


@pytest.mark.parametrize(("kind", "width"), [("F8_E4M3", 1), ("F8_E5M2", 1), ("BF16", 2), ("C64", 8)])
def test_tensors_of_types_that_numpy_lacks(tmp_path: Path, kind: str, width: int) -> None:
    tensor = {"dtype": kind, "shape": [2, 2], "data_offsets": [0, 4 * width]}
    header = json.dumps({"centroids": tensor}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * width))
    with pytest.raises(DataError, match=r"convert them to float32|complex64 and not numbers"):
        read_vectors(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (f"a,b\n1,2\n{SECRET}\n", "as many fields in every line"),
        (f"{SECRET},1\n{SECRET},2\n", "column 1 holds string"),
        (f"1,{SECRET * 9}\n1,2\n1,\n", "column 2 has empty cells"),
        (f"win,{SECRET}\nwin,2\n", "column 1 holds string"),
        ("größe,b\n1,2\n".encode("latin-1"), "not UTF-8"),
        (b"encoder,b\n\xff\xfe,2\n\xff,3\n", "mixes vectors of 2"),
        ("0.5,-1e-3,2\n0.5,1,2\n", "has no header line"),
        ("7,8,9\n1,2,3\n", "has no header line"),
        ("0.5,nan,\n1,2,3\n", "has no header line"),
        ("a,b\n1,2\n3,1e39\n", "row 2 holds a number beyond 1e+15"),
        ("a,b\n1,2\n-1e300,4\n", "row 2 holds a number beyond 1e+15"),
        ("a,size\n1,1e300\n2,4\n", "that of row 1 is not"),
        ("a,size\n1,1\n2,1e-300\n", "that of row 2 is not"),
    ],
)
def test_a_bad_csv_is_one_sentence_without_its_rows(tmp_path: Path, content: str | bytes, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises((DataError, ProtocolError)) as caught:
        read_vectors(path)
    assert says in str(caught.value)
    assert "match" not in str(caught.value)
    assert "win" not in str(caught.value)


@pytest.mark.parametrize("header", ["0,1,2", "1,2,3", "0.1,0.2,c"])
def test_columns_that_are_numbered_have_a_header(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n4,5,6\n7,8,9\n")
    np.testing.assert_array_equal(read_vectors(tmp_path / "a.csv").vectors, [[4, 5, 6], [7, 8, 9]])


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({SECRET: ["x"]}, "column 1 holds string"),
        ({"a": [{SECRET: 1.0}]}, 'column "a" holds values of another type'),
        ({SECRET: [[1.0], [1.0, 2.0]]}, "column 1 has lists of 2 lengths"),
        ({"a": [[SECRET]]}, 'column "a" has lists that are not of numbers'),
        ({"a": [["1.5"]]}, 'column "a" has lists that are not of numbers'),
        ({"a": [[[1.0]]]}, 'column "a" has lists that are not of numbers'),
    ],
)
def test_a_bad_table_is_one_sentence_without_its_rows(
    tmp_path: Path, table: dict[str, Any], says: str
) -> None:
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        read_vectors(tmp_path / "a.parquet")
    assert says in str(caught.value)
    assert "match" not in str(caught.value)


def test_a_folder_that_looks_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    (tmp_path / "year=2020").mkdir()
    _parquet(tmp_path / "year=2020" / "a.parquet")
    np.testing.assert_allclose(read_vectors(tmp_path / "year=2020" / "a.parquet").vectors, VECTORS)


@pytest.mark.parametrize("value", [1.1e15, -3.5e38, 1e308])
def test_numbers_that_single_precision_cannot_work_with(tmp_path: Path, value: float) -> None:
    vectors = VECTORS.copy()
    vectors[3, 1] = value
    np.save(tmp_path / "a.npy", vectors)
    with pytest.raises(DataError, match="row 4 holds a number beyond"):
        read_vectors(tmp_path / "a.npy")
    vectors[3, 1] = np.sign(value) * 1e15
    np.save(tmp_path / "a.npy", vectors)
    read_vectors(tmp_path / "a.npy")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    for name in ("none.npy", "folder.npy"):
        with pytest.raises(UsageError, match="is not a file"):
            read_vectors(tmp_path / name)


def test_what_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_files, "MAX_BYTES", 100_000)
    np.save(tmp_path / "small.npy", np.zeros((1000, 64), np.int8) + 1)
    with pytest.raises(UsageError, match="more than 12,500 numbers"):
        read_vectors(tmp_path / "small.npy")
    pq.write_table(pa.table({"v": np.zeros(200_000)}), tmp_path / "packed.parquet", compression="zstd",
                   use_dictionary=False)  # fmt: skip
    assert (tmp_path / "packed.parquet").stat().st_size < 100_000
    with pytest.raises(UsageError, match="unpacks to more"):
        read_vectors(tmp_path / "packed.parquet")
