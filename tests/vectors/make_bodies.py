"""The content of body-1.json: bodies written by hand, from the layout alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

MARK = "securefl.body/1"


def frame(header: Any, arrays: bytes = b"", padding: int | None = None) -> bytes:
    """header: members in the order of writing, or the bytes."""
    if isinstance(header, bytes):
        raw = header
    else:
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8 if padding is None else padding)
    return len(raw).to_bytes(8, "little") + raw + arrays


def mark(document: str = "{}", kind: str = "metrics") -> dict[str, Any]:
    return {"__metadata__": {MARK: f'{{"document":{document},"kind":"{kind}"}}'}}


def tensor(shape: Any, offsets: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def nested(depth: int) -> str:
    """A document of so many objects and lists inside each other, itself counted."""
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def _accepted() -> list[tuple[str, str, str, str, dict[str, tuple[str, list[int], bytes]]]]:
    floats = struct.pack("<6f", 0, 1, -2, 0.5, 1e-45, 3e38)
    odd = struct.pack("<3I", 0x7FC00000, 0xFF800000, 0x80000000)
    every = {
        "c": ("I64", [2], struct.pack("<2q", 1, -2)),
        "a": ("F32", [2, 3], floats),
        "b": ("F32", [], struct.pack("<f", 1)),
        "relay/x": ("U8", [3], b"\x00\x7f\xff"),
    }
    numbers = (
        '{"a":1.0,"b":1e-05,"c":0.0001,"d":1e+16,"e":1000000000000000.0,"f":-0.0,"g":5e-324,'
        '"h":12345678901234567890}'
    )
    text = (
        r'{"A":"\"\\/\b\f\n\r\t\u0001\u007f","a":"\u00e9\ud83d\ude00","b":[true,false],'
        r'"\ue000":1,"\ud83d\ude00":null}'
    )
    return [
        ("smallest", "No document and no arrays.", "metrics", "{}", {}),
        (
            "types",
            "Wider types first, then by name; a scalar has no dimensions.",
            "model",
            '{"rows":3}',
            every,
        ),
        ("empty-array", "No bytes, two dimensions.", "model", "{}", {"x": ("F32", [0, 3], b"")}),
        (
            "not-finite",
            "The codec takes any bits; whoever uses numbers looks at them.",
            "model",
            "{}",
            {"x": ("F32", [3], odd)},
        ),
        ("numbers", "The one spelling of numbers.", "metrics", numbers, {}),
        ("text", "The one spelling of text: ASCII, keys sorted by code point.", "metrics", text, {}),
        (
            "name",
            "In the outer header, names are raw UTF-8 with the short escapes.",
            "model",
            "{}",
            {'\u00e9/\n"\x01': ("U8", [1], b"\x05")},
        ),
        ("depth-32", "As deep as a document may be.", "metrics", nested(32), {}),
    ]


def _joined(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> tuple[dict[str, Any], bytes]:
    header, arrays = {}, b""
    for name, (dtype, shape, data) in tensors.items():  # given in the order of writing
        header[name] = tensor(shape, [len(arrays), len(arrays) + len(data)], dtype)
        arrays += data
    return header, arrays


def _refused() -> list[tuple[str, str, str, bytes]]:
    one, four = tensor([1], [0, 4]), bytes(4)
    good = frame({**mark(), "x": one}, four)
    bad, shape = "PayloadError", "WrongShape"

    def documents(name: str, why: str, document: str, kind: str = "metrics") -> tuple[str, str, str, bytes]:
        return name, bad, why, frame(mark(document, kind))

    def entry(
        name: str, error: str, why: str, value: Any, arrays: bytes = four
    ) -> tuple[str, str, str, bytes]:
        return name, error, why, frame({**mark(), "x": value}, arrays)

    def pair(name: str, why: str, a: Any, b: Any, arrays: bytes) -> tuple[str, str, str, bytes]:
        return name, bad, why, frame({**mark(), "a": a, "b": b}, arrays)

    return [
        ("seven-bytes", bad, "No room for the length.", bytes(7)),
        (
            "header-above",
            "TooLarge",
            "A header of 2^20 + 1 bytes is declared.",
            (2**20 + 1).to_bytes(8, "little"),
        ),
        ("header-huge", "TooLarge", "A header of 2^64 - 1 bytes is declared.", b"\xff" * 8),
        (
            "header-limit",
            bad,
            "2^20 bytes may be declared; they are not there.",
            (2**20).to_bytes(8, "little"),
        ),
        ("cut", bad, "The header's last byte is missing.", frame(mark())[:-1]),
        ("not-json", bad, "The header is not JSON.", frame(b"{")),
        ("not-an-object", bad, "The header is a list.", frame(b"[]")),
        ("not-utf8", bad, "The header is not UTF-8.", frame(b'{"__metadata__":{"\xff":""}}')),
        ("nan-in-header", bad, "NaN is not JSON.", frame(b'{"__metadata__":NaN}')),
        (
            "tensor-twice",
            bad,
            "A key of the header occurs twice.",
            frame(good[8:-4].rstrip()[:-1] + b',"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', four),
        ),
        entry("entry-a-number", bad, "A tensor's entry is no object.", 5),
        entry("entry-with-more", bad, "A tensor's entry has a member more.", {**one, "more": 1}),
        entry(
            "entry-with-less", bad, "A tensor's entry has no shape.", {"dtype": "F32", "data_offsets": [0, 4]}
        ),
        entry(
            "float64",
            shape,
            "Only F32, I64 and U8 travel, even where the size is true.",
            tensor([1], [0, 8], "F64"),
            bytes(8),
        ),
        entry("bfloat16", shape, "Only F32, I64 and U8 travel.", tensor([2], [0, 4], "BF16")),
        entry(
            "float64-and-negative",
            shape,
            "The type is looked at before the shape.",
            tensor([-1], [0, 8], "F64"),
        ),
        entry("negative", bad, "A dimension is negative.", tensor([-1], [4, 0])),
        entry("truth", bad, "A dimension is `true`.", tensor([True], [0, 4])),
        entry("float-dimension", bad, "A dimension is written 1.0.", tensor([1.0], [0, 4])),
        entry("nine-dimensions", bad, "No more than eight.", tensor([1] * 9, [0, 4])),
        entry("three-offsets", bad, "Offsets are two.", tensor([1], [0, 2, 4])),
        entry("beyond", shape, "The array ends after the body.", tensor([2], [0, 8])),
        entry("other-size", shape, "Two numbers in the bytes of one.", tensor([2], [0, 4])),
        entry(
            "huge",
            shape,
            "2^60 numbers in 4 bytes; nothing of that size may be taken.",
            tensor([2**60], [0, 4]),
        ),
        pair("overlap", "Two arrays share their bytes.", one, one, four),
        pair("hole", "Four bytes belong to nobody.", one, tensor([1], [8, 12]), bytes(12)),
        pair(
            "backwards",
            "The arrays lie in another order than their names.",
            tensor([1], [4, 8]),
            one,
            bytes(8),
        ),
        pair(
            "narrow-first",
            "A wider type comes after a narrow one.",
            tensor([8], [0, 8], "U8"),
            tensor([1], [8, 16], "I64"),
            bytes(16),
        ),
        ("trailing-byte", bad, "A byte follows the arrays.", good + b"\0"),
        ("no-metadata", bad, "Not marked as a body of securefl.", frame({"x": one}, four)),
        (
            "other-mark",
            bad,
            "Marked as version 2.",
            frame({"__metadata__": {"securefl.body/2": mark()["__metadata__"][MARK]}}),
        ),
        (
            "two-marks",
            bad,
            "A second metadata key.",
            frame({"__metadata__": {**mark()["__metadata__"], "a": "b"}}),
        ),
        (
            "mark-not-text",
            bad,
            "The mark is an object, not its text.",
            frame({"__metadata__": {MARK: {"document": {}, "kind": "metrics"}}}),
        ),
        (
            "wrong-shape-unmarked",
            shape,
            "Every entry is looked at before the mark.",
            frame({"x": tensor([2], [0, 4])}, four),
        ),
        documents("other-kind", "A kind that there is not.", "{}", "rows"),
        documents("document-a-list", "The document is no object.", "[]"),
        documents("nan", "NaN is not JSON.", '{"a":NaN}'),
        documents("infinity", "A number above every float.", '{"a":1e999}'),
        documents("key-twice", "A key of the document occurs twice.", '{"a":1,"a":1}'),
        documents("document-space", "A space in the document.", '{"a": 1}'),
        documents("document-unsorted", "Keys are not in order.", '{"b":1,"a":1}'),
        documents("raw-letter", "Text beyond ASCII is escaped.", '{"a":"\u00e9"}'),
        documents("needless-escape", "An ASCII letter is escaped.", '{"a":"\\u0061"}'),
        documents("capital-escape", "Escapes have lower-case digits.", '{"a":"\\u00E9"}'),
        documents("raw-delete", "U+007F is escaped.", '{"a":"\x7f"}'),
        documents("escaped-slash", "A slash is not escaped.", '{"a":"\\/"}'),
        documents("surrogate", "Half of a surrogate pair is no text.", '{"a":"\\ud800"}'),
        documents("surrogate-key", "Nor is it a key.", '{"\\udc00":1}'),
        documents("long-number", "1.50 is spelt 1.5.", '{"a":1.50}'),
        documents("exponent", "100000.0 has no exponent.", '{"a":1e5}'),
        documents("short-exponent", "Exponents have two digits: 1e-05.", '{"a":1e-5}'),
        documents("minus-zero", "A whole number has no negative zero.", '{"a":-0}'),
        documents("depth-33", "Nested one level too deep.", nested(33)),
        (
            "member-more",
            bad,
            "A third member beside kind and document.",
            frame({"__metadata__": {MARK: '{"document":{},"kind":"metrics","more":1}'}}),
        ),
        (
            "kind-first",
            bad,
            "Members are not in order.",
            frame({"__metadata__": {MARK: '{"kind":"metrics","document":{}}'}}),
        ),
        ("metadata-last", bad, "The mark comes first.", frame({"x": one, **mark()}, four)),
        (
            "entry-order",
            bad,
            "A tensor's members come as dtype, shape, data_offsets.",
            frame({**mark(), "x": {"shape": [1], "dtype": "F32", "data_offsets": [0, 4]}}, four),
        ),
        (
            "escaped-name",
            bad,
            "Names in the header are raw where they can be.",
            frame(good[8:-4].rstrip().replace(b'"x"', b'"\\u0078"'), four),
        ),
        ("more-padding", bad, "Eight spaces too many.", frame(good[8:-4] + b" " * 8, four)),
        (
            "no-padding",
            bad,
            "The header is not padded to a multiple of 8.",
            frame(good[8:-4].rstrip(), four, 0),
        ),
    ]


def bodies() -> dict[str, Any]:
    accepted = []
    for name, why, kind, document, tensors in _accepted():
        header, arrays = _joined(tensors)
        accepted.append(
            {
                "name": name,
                "why": why,
                "error": None,
                "kind": kind,
                "document": document,
                "tensors": {
                    key: {"dtype": dtype, "shape": shape, "data": data.hex()}
                    for key, (dtype, shape, data) in tensors.items()
                },
                "body": frame({**mark(document, kind), **header}, arrays).hex(),
            }
        )
    refused = [
        {"name": name, "why": why, "error": error, "body": body.hex()}
        for name, error, why, body in _refused()
    ]
    return {
        "format": "securefl bodies, version 1: which decode, and how the others are refused",
        "cases": [*accepted, *refused],
    }
