"""One data file -> its texts, labels and silo values as strings, every row checked.

What cannot be read without guessing is a DataError with one sentence that names file, line and what to do;
no message holds a row's text, and no error that led to it either: a parser's error holds what it read, so
ours is raised when that one has been let go. This room opens the one file it is given and knows nothing of
splits or models.

Formats. Text is UTF-8, a byte order mark is skipped, and wholly empty lines are no rows.
  CSV      RFC 4180 with a header line. Read by the standard `csv` module and not by pandas, which fills a
           row of too few fields silently, accepts text after a closing quote and keeps no line numbers.
  TSV      A header line; quoting is off, since the common corpora hold unpaired quotes: a tab ends a field
           and LF or CR LF a row, whatever stands before it.
  JSONL    One object a line. The text is a string; a label a string, an integer or a boolean.
  Parquet  Columns of the same types.
"""

from __future__ import annotations

import csv
import io
import json
import re
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from securefl.data_terms import PAIR
from securefl.errors import DataError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
_BOM = b"\xef\xbb\xbf"
_SHOWN = 40  # characters of a name or label that a message repeats
_COLUMN = re.compile(r"[\w.-]{1,32}")  # what names a column and is hardly a sentence
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
_csv_lock = threading.Lock()

# A row as a reader yields it: the 1-based line it begins on (Parquet: its row), and the values asked for.
_Record = tuple[int, tuple[Any, ...]]


@dataclass(frozen=True, repr=False, eq=False)
class Table:
    """A source as read; all of length n, the last two and `groups` empty where no such column was asked for.

    places: where a row stands ("line 7"), for messages.
    """

    name: str
    ids: Sequence[str]
    texts: Sequence[str]
    labels: Sequence[str]
    groups: Sequence[str]
    places: Sequence[str]
    units: Sequence[str] = ()
    languages: Sequence[str] = ()


def shown(value: str) -> str:
    """A label, or the value of a split column, as a message may repeat it.

    A long one is not repeated: the configuration then most likely names the text's column.
    """
    return f'"{value}"' if len(value) <= _SHOWN and value.isprintable() else f"({len(value)} characters)"


def read_table(
    path: Path,
    text: str,
    label: str,
    group: str | None = None,
    unit: str | None = None,
    *,
    pair: str | None = None,
    language: str | None = None,
) -> Table:
    """Read the columns `text`, `label` and, if given, `group` (the silo of a row), `unit` (whose it is),
    `pair` (a second text) and `language`.

    Texts come out exactly as written, the two of a pair with `PAIR` between them. Labels and silo values are
    strings: "1" stays "1", "NA" stays "NA"; an integer of JSONL or Parquet is its digits, a boolean "true" or
    "false". A row's id is the file's stem and the row's 1-based number ("train:17"). Raises DataError.
    """
    if text == label:
        raise DataError(f'data.text and data.label both name the column "{text}"; they must differ')
    if pair in (text, label):
        raise DataError(f'data.pair names the column "{pair}", which holds the first text or the label')
    if unit is not None and unit in (text, label, pair):
        raise DataError(f'data.unit names the column "{unit}", which holds texts or labels; name another')
    asked = {"text": text, "pair": pair, "label": label, "group": group, "unit": unit, "language": language}
    at = {what: column for what, column in asked.items() if column is not None}
    columns, texts = tuple(at.values()), 1 if pair is None else 2
    counted, records = _records(path, columns, texts)
    places: list[str] = []
    rows: list[dict[str, str]] = []
    for number, values in records:
        place = f"{counted} {number}"
        row = dict(zip(at, _checked(values, columns, f"{path}: {place}", texts), strict=True))
        if unit is not None and row["unit"] != row["unit"].strip():
            raise DataError(
                f'{path}: {place}: column "{unit}" has white space around its value, which would make it '
                "another unit of privacy; remove it"
            )
        rows.append(row)
        places.append(place)
    if not rows:
        raise DataError(f"{path}: has no rows; add some below the header")
    return Table(
        name=str(path),
        ids=[f"{path.stem}:{row}" for row in range(1, len(rows) + 1)],
        texts=[row["text"] if pair is None else row["text"] + PAIR + row["pair"] for row in rows],
        labels=[row["label"] for row in rows],
        groups=[row["group"] for row in rows] if group is not None else (),
        places=places,
        units=[row["unit"] for row in rows] if unit is not None else (),
        languages=[row["language"] for row in rows] if language is not None else (),
    )


def read_texts(path: Path, column: str, pair: str | None = None) -> list[str]:
    """The texts of one column of a data file (of two, as pairs), in its order, checked as by `read_table`."""
    columns = (column,) if pair is None else (column, pair)
    if len(set(columns)) < len(columns):
        raise DataError(f'the column "{column}" cannot hold both texts of a pair; name another')
    unit, records = _records(path, columns, len(columns))
    texts = [
        PAIR.join(_checked(values, columns, f"{path}: {unit} {number}", len(columns)))
        for number, values in records
    ]
    if not texts:
        raise DataError(f"{path}: has no rows; add some below the header")
    return texts


def _checked(values: tuple[Any, ...], columns: tuple[str, ...], place: str, texts: int) -> tuple[str, ...]:
    """The values as strings, of which the first `texts` are texts."""
    fields: list[str] = []
    for position, (value, column) in enumerate(zip(values, columns, strict=True)):
        field = value if isinstance(value, str) else None if position < texts else _label(value)
        if value is None:
            raise DataError(f'{place}: column "{column}" is null; fill it or remove the row')
        if field is None:
            kind = "a string" if position < texts else "a string, an integer or a boolean"
            raise DataError(f'{place}: column "{column}" is not {kind}; convert it')
        if not field.strip():
            raise DataError(f'{place}: column "{column}" is empty; fill it or remove the row')
        # JSON can spell half a surrogate pair, which no UTF-8 writer and no tokenizer takes.
        if _HALF.search(field):
            raise DataError(
                f'{place}: column "{column}" holds half a surrogate pair; write the whole character'
            )
        if PAIR in field:
            raise DataError(
                f'{place}: column "{column}" holds the character U+FDD0, which no text may; remove it'
            )
        fields.append(field)
    return tuple(fields)


def _label(value: Any) -> str | None:
    """A typed label as a string; None for what is no label. 1.0 is 1: pandas makes floats of integers."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) else None


def _records(path: Path, columns: tuple[str, ...], texts: int) -> tuple[str, Iterable[_Record]]:
    """The unit in which the format counts, and its records. texts: how many of the columns hold texts."""
    suffix = path.suffix.lower()
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, ValueError) as error:  # ValueError: a NUL in the name
        raise DataError(
            f"{path}: there is no such file; correct the path, which starts from the current folder"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if stat.S_ISDIR(mode):
        raise DataError(f"{path}: is a directory; name a file")
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: is a device or a pipe; name a file")
    if suffix not in SUFFIXES:
        raise DataError(f'{path}: the suffix "{suffix}" is unknown; use one of {", ".join(SUFFIXES)}')
    if suffix == ".parquet":
        return "row", _parquet(path, columns, texts)
    content = _decode(path)
    if suffix == ".jsonl":
        return "line", _jsonl(path, content, columns)
    lines = _csv_lines(path, content) if suffix == ".csv" else _tsv_lines(content)
    return "line", _under_header(path, lines, columns)


def _decode(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    start = len(_BOM) if content.startswith(_BOM) else 0
    try:
        text = content[start:].decode("utf-8")
        if text.strip():
            return text
        fault = "is empty; add a header and rows"
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 at byte offset {start + error.start}; convert it"
    raise DataError(f"{path}: {fault}")


def _listed(present: Sequence[str]) -> str:
    """The columns as a message may name them. Where the header is missing they are a row's text: if one of
    them does not look like a name, none is shown."""
    if all(not name or _COLUMN.fullmatch(name) for name in present):
        return ", ".join(f'"{name}"' if name else "a nameless one" for name in present)
    return f"{len(present)} columns whose names are not shown (is the header line missing?)"


def _positions(path: Path, present: Sequence[str], columns: tuple[str, ...]) -> list[int]:
    """Where the columns stand."""
    for column in columns:
        if column not in present:
            raise DataError(
                f'{path}: has no column "{column}" (data.text, pair, label, unit, language or split); '
                f"it has {_listed(present)}"
            )
    counts = Counter(present)
    twice = [name for name in present if counts[name] > 1]
    if twice:
        both = f'columns "{twice[0]}"' if _COLUMN.fullmatch(twice[0]) else "columns of one name (not shown)"
        raise DataError(f"{path}: has two {both}; rename or remove one")
    return [present.index(column) for column in columns]


def _under_header(
    path: Path, lines: Iterable[tuple[int, list[str]]], columns: tuple[str, ...]
) -> Iterator[_Record]:
    header: list[str] = []
    positions: list[int] = []
    for number, fields in lines:
        if not header:
            header, positions = fields, _positions(path, fields, columns)
            continue
        if len(fields) != len(header):
            raise DataError(
                f"{path}: line {number}: has {len(fields)} fields and the header {len(header)}; "
                "repair the line, or quote the field that holds the separator (CSV only)"
            )
        yield number, tuple(fields[position] for position in positions)


def _csv_lines(path: Path, content: str) -> list[tuple[int, list[str]]]:
    rows: list[tuple[int, list[str]]] = []
    # The module's field limit (131,072 characters) is a setting of the whole process and cannot be given to
    # one reader. It is raised while this file is read and put back; the lock keeps two loads from putting
    # back each other's value.
    with _csv_lock:
        limit = csv.field_size_limit()
        csv.field_size_limit(max(limit, len(content)))
        try:
            reader = csv.reader(io.StringIO(content, newline=""), strict=True)
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return rows
                except csv.Error as error:
                    raise DataError(
                        f"{path}: line {line}: a quoted field of this row is not closed, or has text after "
                        'its closing quote; write a quote inside it as ""'
                    ) from error
                if fields:
                    rows.append((line, fields))
        finally:
            csv.field_size_limit(limit)


def _tsv_lines(content: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(content.split("\n"), start=1):
        row = line.removesuffix("\r")
        if row:
            yield number, row.split("\t")


def _jsonl(path: Path, content: str, columns: tuple[str, ...]) -> Iterator[_Record]:
    # Only LF ends a line: JSON strings may hold U+2028 and the other line ends of str.splitlines as they are.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        value, fault = None, "is not a JSON object; write one object a line"
        try:
            value = json.loads(line, object_pairs_hook=_no_duplicates)
        except _DuplicateKey:
            fault = "an object has one field twice; remove one"
        except (ValueError, RecursionError):
            fault = "is not valid JSON; write one object a line"
        if not isinstance(value, dict):
            raise DataError(f"{place}: {fault}")
        for column in columns:
            if column not in value:
                raise DataError(f'{place}: lacks the field "{column}"; add it or remove the line')
        yield number, tuple(value[column] for column in columns)


class _DuplicateKey(Exception):
    """A JSON object names a field twice; which of the two is meant would be a guess."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _DuplicateKey
    return fields


def _parquet(path: Path, columns: tuple[str, ...], texts: int) -> Iterator[_Record]:
    # The library's own messages may quote values.
    table = None
    with suppress(pa.ArrowException, OSError, ValueError, KeyError), pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        _positions(path, schema.names, columns)
        for position, column in enumerate(columns):
            if not _plain(schema.field(column).type):
                kind = "a string" if position < texts else "a string, an integer or a boolean"
                raise DataError(f'{path}: column "{column}" is not {kind}; convert it')
        table = file.read(columns=list(columns))
    if table is None:
        raise DataError(f"{path}: is not a readable Parquet file; write it again")
    values = [_parquet_values(path, table.column(column), column) for column in columns]
    return iter(enumerate(zip(*values, strict=True), start=1))


def _plain(kind: pa.DataType) -> bool:
    """Whether every value of a type has a plain Python value; a date, for one, may lie beyond Python's."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    plain = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_null,
    )
    return any(is_one(kind) for is_one in plain)


def _parquet_values(path: Path, column: Any, name: str) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        fault = "is not UTF-8; write it again"
    except (pa.ArrowException, ValueError, OverflowError):
        fault = "holds values that cannot be read; convert it"
    raise DataError(f'{path}: column "{name}" {fault}')
