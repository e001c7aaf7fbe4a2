"""Data files: what is read unchanged, what is refused, and where the message says the fault is."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from securefl._tables import Table, read_table, read_texts
from securefl.data_terms import PAIR
from securefl.errors import DataError
from tests.leaks import assert_no_leak

SECRET = "the patient said so"  # no message may hold a row's text

# --- writers that do not share code with the readers -----------------------------------------------------


def write_csv(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def write_tsv(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_bytes("".join(f"{a}\t{b}\n" for a, b in [("text", "label"), *rows]).encode())
    return path


def write_jsonl(path: Path, rows: list[tuple[str, str]]) -> Path:
    lines = [json.dumps({"text": a, "label": b}, ensure_ascii=False) for a, b in rows]
    path.write_bytes("\n".join(lines).encode())
    return path


def write_parquet(path: Path, rows: list[tuple[str, str]]) -> Path:
    pq.write_table(pa.table({"text": [a for a, _ in rows], "label": [b for _, b in rows]}), path)
    return path


WRITERS: dict[str, Callable[[Path, list[tuple[str, str]]], Path]] = {
    ".csv": write_csv,
    ".tsv": write_tsv,
    ".jsonl": write_jsonl,
    ".parquet": write_parquet,
}


def read(path: Path) -> Table:
    return read_table(path, "text", "label")


def pairs(table: Table) -> list[tuple[str, str]]:
    return list(zip(table.texts, table.labels, strict=True))


def refusal(path: Path, content: bytes | str) -> str:
    """The message with which a file of this content is refused; it is one line and quotes no text."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert_no_leak(caught.value, SECRET)
    return checked(str(caught.value), path)


def checked(message: str, path: Path) -> str:
    assert message.startswith(str(path))
    assert "\n" not in message
    assert SECRET not in message
    return message


# --- what is data comes out unchanged --------------------------------------------------------------------

# A CSV or JSONL field may hold anything; TSV has no quoting, so no tab or line end.
anything = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda s: s.strip() != "")
tsv_field = anything.filter(lambda s: not set("\t\n\r") & set(s))


@pytest.mark.parametrize("suffix", WRITERS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_unicode_text_and_label_round_trips(tmp_path: Path, suffix: str, data: st.DataObject) -> None:
    field = tsv_field if suffix == ".tsv" else anything
    rows = data.draw(st.lists(st.tuples(field, field), min_size=1, max_size=6))
    table = read(WRITERS[suffix](tmp_path / f"file{suffix}", rows))
    assert pairs(table) == rows
    assert list(table.ids) == [f"file:{number}" for number in range(1, len(rows) + 1)]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize(
    "text",
    [
        "nul \x00 inside",
        "\x00",
        "emoji \N{GRINNING FACE} and family \U0001f468\u200d\U0001f469",
        "שלום עולם مرحبا",
        "x" * 100_000,
        "wörter " * 40_000,
        "  kept blanks  ",
        "line\u2028separator \x0b \x0c \x85 \x1c",
        'He said "hi"',
        "NA",
        "null",
        "nan",
        "1.0",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_awkward_text_is_data(tmp_path: Path, suffix: str, text: str) -> None:
    rows = [("first", "0"), (text, "NA"), ("last", "1")]
    assert pairs(read(WRITERS[suffix](tmp_path / f"file{suffix}", rows))) == rows


def test_the_csv_field_limit_of_the_process_is_put_back(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    path = write_csv(tmp_path / "long.csv", [("y" * (before + 1), "1")])
    assert len(read(path).texts[0]) == before + 1
    refusal(tmp_path / "bad.csv", f'text,label\n"{SECRET}')
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "unended"])
def test_line_ends_and_byte_order_mark_are_no_data(tmp_path: Path, end: str, bom: bytes, last: bool) -> None:
    contents = {
        ".csv": ["text,label", "a b,0", '"c, d",1'],
        ".tsv": ["text\tlabel", "a b\t0", "c, d\t1"],
        ".jsonl": ['{"text": "a b", "label": "0"}', '{"text": "c, d", "label": "1"}'],
    }
    for suffix, lines in contents.items():
        path = tmp_path / f"file{suffix}"
        path.write_bytes(bom + (end.join(lines) + (end if last else "")).encode())
        assert pairs(read(path)) == [("a b", "0"), ("c, d", "1")], suffix


def test_csv_quotes_line_ends_and_separators_inside_a_field(tmp_path: Path) -> None:
    path = tmp_path / "file.csv"
    path.write_bytes(b'label,more,text\r\n0,x,"one\ntwo\r\nthree ""four"", five"\r\n1,,a "bare" quote\r\n')
    assert pairs(read(path)) == [('one\ntwo\r\nthree "four", five', "0"), ('a "bare" quote', "1")]


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    path = tmp_path / "file.TSV"
    path.write_bytes(b'text\tlabel\n"open\t0\n""\t1\n')
    assert pairs(read(path)) == [('"open', "0"), ('""', "1")]


def test_wholly_empty_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    for suffix, content in {
        ".csv": "\ntext,label\n\na,0\n\n\nb,1\n\n",
        ".tsv": "\ntext\tlabel\n\na\t0\n\n\nb\t1\n\n",
        ".jsonl": '\n\n\n{"text":"a","label":"0"}\n  \n\n{"text":"b","label":"1"}\n\n',
    }.items():
        path = tmp_path / f"file{suffix}"
        path.write_text(content)
        table = read(path)
        assert pairs(table) == [("a", "0"), ("b", "1")]
        assert list(table.places) == ["line 4", "line 7"]
        assert list(table.ids) == ["file:1", "file:2"]


def test_typed_labels_become_their_plain_spelling(tmp_path: Path) -> None:
    lines = [f'{{"text":"a","label":{value}}}' for value in ("1", "1.0", "true", '"1.0"', "-3")]
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(lines))
    assert list(read(path).labels) == ["1", "1", "true", "1.0", "-3"]
    for array, expected in [
        (pa.array([1, 0], pa.int8()), ["1", "0"]),
        (pa.array([1.0, 0.0]), ["1", "0"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
        (pa.array(["x", "y"], pa.large_string()), ["x", "y"]),
    ]:
        pq.write_table(
            pa.table({"other": [0, 0], "text": ["a", "b"], "label": array}), tmp_path / "f.parquet"
        )
        assert list(read(tmp_path / "f.parquet").labels) == expected


# --- what is refused, and where it says the fault is -----------------------------------------------------


def test_a_missing_file_a_directory_and_an_unknown_suffix(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file.xlsx").write_bytes(b"x")
    for name, reason in [
        ("no.csv", "no such file"),
        ("folder.csv", "directory"),
        ("file.xlsx", r'"\.xlsx".*\.jsonl'),
    ]:
        with pytest.raises(DataError, match=reason) as caught:
            read(tmp_path / name)
        checked(str(caught.value), tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        # The row's first physical line, after quoted line ends of both kinds and an empty line.
        ("f.csv", f'text,label\n"a\nb\r\nc",0\n\n"{SECRET}\n",\n', 'line 6: column "label" is empty'),
        ("f.csv", f'text,label\na,0\n"{SECRET}\n",0,1\n', "line 3: has 3 fields and the header 2"),
        ("f.csv", f"text,label\n{SECRET}\n", "line 2: has 1 fields and the header 2"),
        ("f.csv", "text,label\na,0\n,1\n", 'line 3: column "text" is empty'),
        ("f.csv", "text,label\na,0\n \u2003\t,1\n", 'line 3: column "text" is empty'),
        ("f.csv", "text,label\na, \n", 'line 2: column "label" is empty'),
        ("f.csv", f'text,label\na,0\n"{SECRET},1\nb,0\n', "line 3: a quoted field of this row is not closed"),
        ("f.csv", f'text,label\na,0\n"x" {SECRET},1\n', "line 3: a quoted field .* text after"),
        ("f.csv", "text,label\n", "has no rows"),
        ("f.csv", "text,label,text\na,0,b\n", 'two columns "text"'),
        ("f.csv", "text,label,x,x\na,0,b,c\n", 'two columns "x"'),
        ("f.csv", "words,label\na,0\n", r'no column "text" .*it has "words", "label"$'),
        ("f.csv", "text,class,\na,0,1\n", r'no column "label" .*it has "text", "class", a nameless one$'),
        ("f.csv", f"{SECRET},0\n", 'no column "text" .*it has 2 columns whose names are not shown'),
        ("f.csv", f"text,{SECRET},{SECRET}\n", 'no column "label" .*it has 3 columns whose names are not'),
        ("f.csv", f"text,label,{SECRET},{SECRET}\n", r"two columns of one name \(not shown\)"),
        ("f.csv", "a\x1b[2J,\n", "it has 2 columns whose names are not shown"),
        ("f.tsv", f"{SECRET}\t0\n", 'no column "text" .*it has 2 columns whose names are not shown'),
        ("f.tsv", f"text\tlabel\n{SECRET}\t0\t1\n", "line 2: has 3 fields and the header 2"),
        ("f.tsv", f"text\tlabel\na\t0\n{SECRET}\n", "line 3: has 1 fields and the header 2"),
        ("f.tsv", "text\tlabel\na\t0\n \t1\r\n", 'line 3: column "text" is empty'),
        ("f.tsv", "text\tlabel\r\n", "has no rows"),
        ("f.tsv", "text\ttext\na\t0\n", 'no column "label"'),
        ("f.jsonl", f'{{"text":"a","label":"0"}}\n["{SECRET}"]\n', "line 2: is not a JSON object"),
        ("f.jsonl", f'\n{{"text":"{SECRET}"\n', "line 2: is not valid JSON"),
        ("f.jsonl", "[" * 100_000, "line 1: is not valid JSON"),
        ("f.jsonl", '{"text":"a","label":%s}' % ("9" * 5000), "line 1: is not valid JSON"),
        ("f.jsonl", f'{{"text":"{SECRET}"}}', 'line 1: lacks the field "label"'),
        ("f.jsonl", '{"label":"0"}', 'line 1: lacks the field "text"'),
        ("f.jsonl", '{"text":5,"label":"0"}', 'line 1: column "text" is not a string'),
        ("f.jsonl", f'{{"text":["{SECRET}"],"label":"0"}}', 'line 1: column "text" is not a string'),
        ("f.jsonl", '{"text":null,"label":"0"}', 'line 1: column "text" is null'),
        ("f.jsonl", f'{{"text":"{SECRET}","label":null}}', 'line 1: column "label" is null'),
        ("f.jsonl", '{"text":"a","label":0.5}', 'line 1: column "label" is not a string, an integer'),
        ("f.jsonl", '{"text":"a","label":NaN}', 'line 1: column "label" is not a string, an integer'),
        ("f.jsonl", '{"text":"a","label":{}}', 'line 1: column "label" is not a string, an integer'),
        ("f.jsonl", '{"text":"","label":"0"}', 'line 1: column "text" is empty'),
        ("f.jsonl", '{"text":"a","label":""}', 'line 1: column "label" is empty'),
        ("f.jsonl", '{"text":"\\ud83d","label":"0"}', 'line 1: column "text" holds half a surrogate pair'),
        ("f.jsonl", '{"text":"a","text":"b","label":"0"}', "line 1: an object has one field twice"),
        *((f"f{suffix}", "", "is empty") for suffix in (".csv", ".tsv", ".jsonl")),
        *((f"f{suffix}", "\ufeff\n\r\n", "is empty") for suffix in (".csv", ".tsv", ".jsonl")),
        *(
            (f"f{suffix}", b"text,label\nab\xff,0\n", "not UTF-8 at byte offset 13")
            for suffix in (".csv", ".tsv")
        ),
        ("f.csv", b"\xef\xbb\xbftext,label\nab\xff,0\n", "not UTF-8 at byte offset 16"),
        ("f.csv", "text,label\n".encode("utf-16"), "not UTF-8 at byte offset 0"),
        ("f.jsonl", b'{"text":"\xe9t\xe9"}', "not UTF-8 at byte offset 9"),
        # What a parser's own error would hold.
        ("f.csv", f"text,label\n{SECRET}".encode() + b"\xff,0\n", "not UTF-8 at byte offset 30"),
        ("f.jsonl", f'{{"text":"{SECRET}'.encode() + b'\xff"}', "not UTF-8 at byte offset 28"),
        ("f.jsonl", f'{{"text":"{SECRET} \\ud83d","label":"0"}}', "line 1: .* holds half a surrogate pair"),
        ("f.jsonl", f'{{"text":"a","text":"{SECRET}"}}', "line 1: an object has one field twice"),
        ("f.jsonl", f'{{"text":"{SECRET}","label":01}}', "line 1: is not valid JSON"),
        ("f.jsonl", f'"{SECRET}', "line 1: is not valid JSON"),
        ("f.jsonl", f'"{SECRET}"', "line 1: is not a JSON object"),
        ("f.parquet", b"", "not a readable Parquet file"),
        ("f.parquet", SECRET, "not a readable Parquet file"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, fault: str
) -> None:
    message = refusal(tmp_path / name, content)
    assert re.search(fault, message), message


def test_no_error_of_texts_alone_leads_to_one(tmp_path: Path) -> None:
    for name, content in {
        "f.csv": f"text\n{SECRET}".encode() + b"\xff\n",
        "g.csv": f'text\n"{SECRET}" x\n'.encode(),
        "f.tsv": f"text\n{SECRET}\t1\n".encode(),
        "f.jsonl": f'{{"text":"{SECRET}'.encode(),
        "g.jsonl": f'{{"text":"{SECRET}\\udc00"}}'.encode(),
        "f.parquet": f"PAR1{SECRET}PAR1".encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            read_texts(tmp_path / name, "text")
        assert_no_leak(caught.value, SECRET)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.sampled_from('ab",\r\n'), min_size=1).filter(str.strip), max_size=6))
def test_csv_line_numbers_are_physical(tmp_path: Path, texts: list[str]) -> None:
    """The last row is at fault; its line is one more than the line ends before it, counted in the file."""
    written = io.StringIO()
    csv.writer(written).writerows([("text", "label"), *((text, "0") for text in texts)])
    before = written.getvalue()
    line = 1 + len(re.findall("\r\n|\r|\n", before))
    assert f': line {line}: column "label" is empty' in refusal(tmp_path / "file.csv", f"{before}{SECRET},\n")


def test_a_broken_parquet_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "f.parquet", [(f"{SECRET} {i}", str(i % 2)) for i in range(2000)])
    content = path.read_bytes()
    assert "not a readable Parquet file" in refusal(path, content[: len(content) // 2])
    # The magic numbers and the footer stay; a page is overwritten.
    assert "Parquet" in refusal(path, content[:4] + b"\xff" * 600 + content[604:])


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"text": ["a", None], "label": ["0", "1"]}, 'row 2: column "text" is null'),
        ({"text": [SECRET, "b"], "label": [None, 1]}, 'row 1: column "label" is null'),
        ({"text": ["a", "\t"], "label": ["0", "1"]}, 'row 2: column "text" is empty'),
        ({"text": [1, 2], "label": ["0", "1"]}, 'row 1: column "text" is not a string'),
        ({"text": ["a", "b"], "label": [0.5, 1.0]}, 'row 1: column "label" is not a string, an integer'),
        ({"text": ["a", "b"], "class": ["0", "1"]}, 'no column "label" .*it has "text", "class"'),
        ({"text": pa.array([], pa.string()), "label": pa.array([], pa.string())}, "has no rows"),
    ],
)
def test_a_bad_parquet_column(tmp_path: Path, columns: dict[str, Any], fault: str) -> None:
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table(columns), path)
    assert re.search(fault, refusal(path, path.read_bytes()))


def test_parquet_with_a_column_twice_or_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    twice = pa.table([["a"], ["0"], ["b"]], names=["text", "label", "text"])
    pq.write_table(twice, path)
    assert 'two columns "text"' in refusal(path, path.read_bytes())
    raw = pa.array([SECRET.encode() + b"\xff\xfe"], pa.binary())
    text = pa.StringArray.from_buffers(1, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": text, "label": ["0"]}), path)
    assert 'column "text" is not UTF-8' in refusal(path, path.read_bytes())


ODD_TYPES = {
    "date beyond Python's": pa.array([2**30], pa.int32()).cast(pa.date32()),
    "duration beyond Python's": pa.array([2**62], pa.int64()).cast(pa.duration("s")),
    "time zone that is none": pa.array([0], pa.timestamp("s", tz="Nowhere/\x1b[2J")),
    "decimal": pa.array([1]).cast(pa.decimal128(30, 2)),
    "bytes": pa.array([SECRET.encode()], pa.binary()),
    "list": pa.array([[SECRET]]),
    "struct": pa.array([{SECRET: SECRET}]),
    "dictionary of dates": pa.array([2**30], pa.int32()).cast(pa.date32()).dictionary_encode(),
}


@pytest.mark.parametrize("column", ["text", "label"])
@pytest.mark.parametrize("kind", ODD_TYPES)
def test_parquet_columns_of_odd_types(kind: str, column: str, tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    columns: dict[str, pa.Array] = {"text": pa.array(["a"]), "label": pa.array(["0"])}
    pq.write_table(pa.table({**columns, column: ODD_TYPES[kind]}), path)
    message = refusal(path, path.read_bytes())
    assert f'column "{column}" is not a string' in message
    assert message.isprintable()


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "file.csv").write_text("text,label\n")
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    for name, reason in [
        ("zero.csv", "device"),
        ("file.csv/x.csv", "cannot be read"),
        ("loop.csv", "cannot be read"),
        ("x" * 300 + ".csv", "cannot be read"),
        ("nul\0.csv", "no such file"),
    ]:
        with pytest.raises(DataError, match=reason) as caught:
            read(tmp_path / name)
        checked(str(caught.value), tmp_path / name)


# --- two texts, and a language


def two(tmp_path: Path, suffix: str) -> Path:
    path = tmp_path / f"pairs{suffix}"
    rows = [("the bank", "a bank, they said", "1", "en"), ("das Haus", "ein Haus", "0", "de")]
    heads = ("sentence1", "sentence2", "label", "lang")
    if suffix == ".parquet":
        pq.write_table(pa.table({h: [row[i] for row in rows] for i, h in enumerate(heads)}), path)
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(dict(zip(heads, row, strict=True))) for row in rows))
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="," if suffix == ".csv" else "\t").writerows([heads, *rows])
    return path


@pytest.mark.parametrize("suffix", WRITERS)
def test_two_texts_and_a_language(suffix: str, tmp_path: Path) -> None:
    path = two(tmp_path, suffix)
    table = read_table(path, "sentence1", "label", "lang", pair="sentence2", language="lang")
    assert [text.split(PAIR) for text in table.texts] == [
        ["the bank", "a bank, they said"],
        ["das Haus", "ein Haus"],
    ]
    assert list(table.labels) == ["1", "0"]
    assert list(table.languages) == list(table.groups) == ["en", "de"]
    assert read_texts(path, "sentence1", "sentence2") == list(table.texts)


def test_a_pair_needs_two_columns_and_two_texts(tmp_path: Path) -> None:
    path = two(tmp_path, ".csv")
    for pair in ("sentence1", "label"):
        with pytest.raises(DataError, match=f'data.pair names the column "{pair}"'):
            read_table(path, "sentence1", "label", pair=pair)
    with pytest.raises(DataError, match="cannot hold both texts"):
        read_texts(path, "sentence1", "sentence1")
    with pytest.raises(DataError, match='no column "third"'):
        read_table(path, "sentence1", "label", pair="third")
    path.write_text("sentence1,sentence2,label\na,,1\n")
    with pytest.raises(DataError, match='line 2: column "sentence2" is empty'):
        read_table(path, "sentence1", "label", pair="sentence2")
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"sentence1": "a", "sentence2": 3, "label": 1}')
    with pytest.raises(DataError, match='line 1: column "sentence2" is not a string'):
        read_table(path, "sentence1", "label", pair="sentence2")


def test_what_stands_between_two_texts_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text,label\n{SECRET}{PAIR}b,1\n", encoding="utf-8")
    assert "U+FDD0" in refusal(path, path.read_bytes())
