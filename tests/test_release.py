"""The body codec: one encoding per body, limits before allocation, and named refusals for everything else."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError

from securefl.errors import NonFiniteUpdate, PayloadError, TooLarge, WrongShape
from securefl.release import (
    Body,
    GaussianSums,
    Limits,
    NonPrivate,
    PayloadKind,
    Release,
    canonical_json,
    check_tensors,
    decode,
    decode_release,
    encode,
    encode_release,
    fingerprint,
    parse_json,
    release_from,
)

CLAIM = GaussianSums(
    epsilon=4.0,
    delta=1e-5,
    mu=0.9,
    clip=6.0,
    noise_multiplier=1.5,
    count_multiplier=4.0,
    prediction_multiplier=4.0,
    generator="os",
    simulated=False,
)
TENSORS: dict[str, Any] = {
    "centroids": np.arange(6, dtype=np.float32).reshape(2, 3),
    "sizes": np.array([4.0, 5.0], np.float32),
    "ids": np.array([1, -2], np.int64),
    "relay/x": np.arange(5, dtype=np.uint8),
}
RELEASE = Release(PayloadKind.CENTROIDS, TENSORS, {"round": 2, "labels": ["a", "é"]}, CLAIM)
GOOD = encode_release(RELEASE)


def frame(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header: JSON values, or bytes as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def metadata(document: str = "{}", kind: str = "metrics") -> dict[str, str]:
    return {"securefl.body/1": f'{{"document":{document},"kind":"{kind}"}}'}


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# --- the round trip


def test_release_survives() -> None:
    again = decode_release(GOOD)
    assert again.kind is RELEASE.kind
    assert again.claim == CLAIM
    assert again.info == RELEASE.info
    assert set(again.tensors) == set(TENSORS)
    for name, array in TENSORS.items():
        assert again.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(again.tensors[name], array)
    assert encode_release(again) == GOOD


@pytest.mark.parametrize(
    "array", [np.zeros((0, 3), np.float32), np.float32(3), np.zeros((), np.int64)], ids=repr
)
def test_empty_and_scalar_arrays_survive(array: Any) -> None:
    again = decode(encode(PayloadKind.METRICS, {}, {"x": np.asarray(array)})).tensors["x"]
    assert again.shape == np.shape(array)


def test_the_order_of_making_does_not_show() -> None:
    backwards = dict(reversed(list(TENSORS.items())))
    info = dict(reversed(list(RELEASE.info.items())))
    assert encode_release(Release(RELEASE.kind, backwards, info, CLAIM)) == GOOD


def test_the_layout_of_memory_does_not_show() -> None:
    strided = np.asfortranarray(TENSORS["centroids"])
    assert (
        encode_release(Release(RELEASE.kind, {**TENSORS, "centroids": strided}, RELEASE.info, CLAIM)) == GOOD
    )


def test_plain_safetensors_reads_the_arrays() -> None:
    read = safetensors.numpy.load(GOOD)
    np.testing.assert_array_equal(read["centroids"], TENSORS["centroids"])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.bool_, np.complex64, ">f4"])
def test_other_types_do_not_travel(dtype: Any) -> None:
    with pytest.raises(PayloadError, match="only float32, int64 and uint8 travel"):
        encode(PayloadKind.MODEL, {}, {"w": np.zeros(2, dtype)})


# --- sizes


def test_a_body_above_the_limit() -> None:
    with pytest.raises(TooLarge, match="above the limit"):
        decode(GOOD, Limits(max_bytes=len(GOOD) - 1))
    assert decode(GOOD, Limits(max_bytes=len(GOOD))).kind is PayloadKind.CENTROIDS


@pytest.mark.parametrize("size", [2**20 + 1, 2**32, 2**63, 2**64 - 1])
def test_a_header_bomb(size: int) -> None:
    with pytest.raises(TooLarge, match="header"):
        decode(size.to_bytes(8, "little") + b"{}")


def test_too_many_tensors() -> None:
    many = {f"t{i}": np.zeros(1, np.uint8) for i in range(5)}
    data = encode(PayloadKind.MODEL, {}, many)
    assert len(decode(data, Limits(max_tensors=5)).tensors) == 5
    with pytest.raises(TooLarge, match="5 tensors"):
        decode(data, Limits(max_tensors=4))


def test_a_lie_about_shape_allocates_nothing() -> None:
    data = frame({"__metadata__": metadata(), "w": tensor([2**40, 2**20], [0, 4 * 2**60])}, bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(WrongShape):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


# --- form


@pytest.mark.parametrize("cut", [*range(0, len(GOOD), 7), len(GOOD) - 1])
def test_truncated(cut: int) -> None:
    with pytest.raises(PayloadError):
        decode(GOOD[:cut])


@pytest.mark.parametrize("extra", [b"\x00", b"\n", bytes(64), GOOD])
def test_trailing_bytes(extra: bytes) -> None:
    with pytest.raises(PayloadError):
        decode(GOOD + extra)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        {"w": tensor([1], [0, 4])},
        {"__metadata__": {}},
        {"__metadata__": {"x": "y"}},
        {"__metadata__": {**metadata(), "x": "y"}},
        {"__metadata__": {"securefl.body/2": metadata()["securefl.body/1"]}},
        {"__metadata__": {"securefl.body/1": {"document": {}, "kind": "metrics"}}},
        {"__metadata__": "x"},
        {"__metadata__": metadata(kind="rows")},
        {"__metadata__": metadata("[]")},
        {"__metadata__": metadata("null")},
        {"__metadata__": metadata('{"a":1,"a":1}')},
        {"__metadata__": metadata('{"a":NaN}')},
        {"__metadata__": metadata('{"a":1e999}')},  # parses to infinity, which JSON cannot say
        {"__metadata__": metadata('{"a":' + "[" * 900 + "]" * 900 + "}")},
        {"__metadata__": metadata("[" * 100_000)},
        {"__metadata__": metadata('{"a":' + "9" * 5000 + "}")},
        {"__metadata__": metadata('{"a": 1}')},
        {"__metadata__": metadata('{"b":1,"a":1}')},
        {"__metadata__": metadata('{"a":1.0e0}')},
        {"__metadata__": metadata('{"a":"\\u0061"}')},
        {"__metadata__": {"securefl.body/1": '{"document":{},"kind":"metrics","more":1}'}},
        {"__metadata__": {"securefl.body/1": '{"document":{}}'}},
        {"__metadata__": {"securefl.body/1": '["metrics",{}]'}},
        {"__metadata__": {"securefl.body/1": '{"document":{},"kind":["metrics"]}'}},
        {"__metadata__": {"securefl.body/1": "\ud800"}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_header_that_encode_would_not_write(header: Any) -> None:
    with pytest.raises(PayloadError):
        decode(frame(header))


def test_nesting_at_the_interpreters_limit_is_refused_or_survives() -> None:
    """Somewhere near the recursion limit a document parses and no longer encodes."""
    outcomes = set()
    for depth in range(700, 1100):
        data = frame({"__metadata__": metadata('{"a":' + "[" * depth + "]" * depth + "}")})
        try:
            decode(data)
        except PayloadError as error:
            outcomes.add(str(error))
    assert "a body does not parse" in outcomes


def test_whitespace_padding_other_than_encodes_is_refused() -> None:
    size = int.from_bytes(GOOD[:8], "little")
    padded = frame(GOOD[8 : 8 + size] + b" " * 8, GOOD[8 + size :])
    assert set(safetensors.numpy.load(padded)) == set(TENSORS)  # the library takes it
    with pytest.raises(PayloadError, match="canonical"):
        decode(padded)


@pytest.mark.parametrize(
    "entry",
    [
        5,
        [],
        {},
        {"dtype": "F32", "shape": [1]},
        {**tensor([1], [0, 4]), "more": 1},
        tensor([1], [0]),
        tensor([1], [0, 2, 4]),
        tensor([1], 5),
        tensor([1], None),
        tensor([1], "04"),
        tensor([1], [0.0, 4.0]),
        tensor([1], [False, 4]),
        tensor([1], [4, 0]),
        tensor([1], [-4, 0]),
        tensor([-1], [0, 4]),
        tensor(1, [0, 4]),
        tensor("1", [0, 4]),
        tensor(None, [0, 4]),
        tensor([1.0], [0, 4]),
        tensor([True], [0, 4]),
        tensor([[1]], [0, 4]),
        tensor([1] * 9, [0, 4]),
        tensor([2], [0, 4]),
        tensor([1], [0, 8]),
        tensor([1], [4, 8]),
        tensor([2**64], [0, 4]),
        tensor([10**4000], [0, 4]),
        tensor([1], [0, 4], "F64"),
        tensor([1], [0, 4], "BF16"),
        tensor([1], [0, 4], ["F32"]),
        tensor([1], [0, 4], None),
    ],
    ids=lambda entry: str(entry)[:70],
)
def test_a_tensors_entry_that_lies(entry: Any) -> None:
    with pytest.raises(PayloadError):
        decode(frame({"__metadata__": metadata(), "w": entry}, bytes(4)))


def test_float64_is_refused_even_where_its_size_is_true() -> None:
    data = frame({"__metadata__": metadata(), "w": tensor([1], [0, 8], "F64")}, bytes(8))
    with pytest.raises(WrongShape, match="float32"):
        decode(data)


@pytest.mark.parametrize(
    "offsets", [([0, 4], [0, 4]), ([0, 4], [8, 12]), ([4, 8], [0, 4]), ([0, 4], [2, 6])], ids=str
)
def test_overlaps_holes_and_another_order_are_refused(offsets: tuple[list[int], list[int]]) -> None:
    header = {"__metadata__": metadata(), "a": tensor([1], offsets[0]), "b": tensor([1], offsets[1])}
    with pytest.raises(PayloadError):
        decode(frame(header, bytes(12)))


# --- what is in a release


def body_of(change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = {"claim": CLAIM.model_dump(mode="json"), "info": {}}
    return encode(PayloadKind.CENTROIDS, change(document) or document, {})


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {"info": {}},
        lambda d: {"claim": d["claim"]},
        lambda d: {**d, "more": 1},
        lambda d: {**d, "info": []},
        lambda d: {**d, "claim": None},
        lambda d: {**d, "claim": {}},
        lambda d: {**d, "claim": {"mechanism": "none"}},
        lambda d: {**d, "claim": {"mechanism": "none", "reason": ""}},
        lambda d: {**d, "claim": {"mechanism": "trust me"}},
        lambda d: {**d, "claim": {**d["claim"], "extra": 1}},
        lambda d: {**d, "claim": {**d["claim"], "epsilon": -1.0}},
        lambda d: {**d, "claim": {**d["claim"], "epsilon": "4"}},
        lambda d: {**d, "claim": {**d["claim"], "epsilon": 4}},  # 4.0 has one spelling
        lambda d: {**d, "claim": {**d["claim"], "delta": 1.0}},
        lambda d: {**d, "claim": {**d["claim"], "unit": "silo"}},
        lambda d: {**d, "claim": {**d["claim"], "simulated": 0}},
        lambda d: {**d, "claim": {k: v for k, v in d["claim"].items() if k != "unit"}},
    ],
)
def test_a_release_without_a_proper_claim(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(PayloadError):
        decode_release(body_of(change))


def test_a_claim_is_frozen_and_positive() -> None:
    with pytest.raises(ValidationError):
        CLAIM.epsilon = 0.1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        GaussianSums(**{**CLAIM.model_dump(), "mu": 0.0})
    with pytest.raises(ValidationError):
        NonPrivate(reason="")


def test_nan_and_infinity_do_not_get_into_a_document() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            encode(PayloadKind.METRICS, {"accuracy": value}, {})


def test_release_from_a_plan_is_refused() -> None:
    with pytest.raises(PayloadError):
        release_from(Body(PayloadKind.PLAN, {"run": "x"}, {}))


# --- agreed tensors


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_check_tensors_refuses_what_is_not_finite(bad: float) -> None:
    weights = np.zeros((2, 2), np.float32)
    weights[1, 0] = bad
    data = decode(encode(PayloadKind.MODEL, {}, {"w": weights})).tensors
    with pytest.raises(NonFiniteUpdate, match="tensor w of silo-1"):
        check_tensors(data, {"w": (2, 2)}, "silo-1")


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"w": np.zeros((2, 3), np.float32)},
        {"w": np.zeros((4,), np.float32)},
        {"w": np.zeros((2, 2), np.int64)},
        {"w": np.zeros((2, 2), np.float64)},
        {"v": np.zeros((2, 2), np.float32)},
        {"w": np.zeros((2, 2), np.float32), "v": np.zeros(1, np.float32)},
    ],
)
def test_check_tensors_wants_exactly_the_agreed(tensors: dict[str, Any]) -> None:
    with pytest.raises(WrongShape, match="silo-1"):
        check_tensors(tensors, {"w": (2, 2)}, "silo-1")


def test_check_tensors_accepts_the_agreed() -> None:
    check_tensors({"w": np.ones((2, 2), np.float32)}, {"w": (2, 2)}, "silo-1")


# --- fingerprints and JSON


def test_a_fingerprint_depends_on_names_shapes_types_and_bytes() -> None:
    base: dict[str, Any] = {"a": np.arange(4, dtype=np.float32), "b": np.zeros(2, np.float32)}
    others: list[dict[str, Any]] = [
        {"a": base["a"].reshape(2, 2), "b": base["b"]},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"]},
        {"a": base["a"].view(np.int32), "b": base["b"]},
        {"a": base["a"] + np.float32(1e-6), "b": base["b"]},
    ]
    assert fingerprint(dict(reversed(base.items()))) == fingerprint(base)
    assert len({fingerprint(one) for one in (base, *others)}) == 6
    assert fingerprint({"a": np.zeros((), np.float32)}) != fingerprint({"a": np.zeros(1, np.float32)})
    empty = np.zeros((0, 2), np.float32)
    assert fingerprint({"a": empty}) != fingerprint({"a": empty.T})


def test_canonical_json_is_what_rfc_8259_readers_read() -> None:
    assert (
        canonical_json({"b": [1, 2.5, None, True], "a": "é\n"}) == rb'{"a":"\u00e9\n","b":[1,2.5,null,true]}'
    )
    assert parse_json(b'{"a":[1]}') == {"a": [1]}


@pytest.mark.parametrize(
    "text",
    [
        *(b'{"a":1,"a":1}', b"NaN", b"[" * 10**5, b"{", b"\xff", b"1 2", b"1e999", b"-1e999"),
        *(b"1" + b"0" * 400, b"-18446744073709551616", b"1" * 5000),
    ],
)
def test_parse_json_is_strict(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


# --- mutants

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**64, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = st.sampled_from([np.float32, np.int64, np.uint8]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*PayloadKind]),
    st.dictionaries(st.text(), JSON_VALUES, max_size=3),
    st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), ARRAYS, max_size=4),
)
def test_every_body_decodes_to_itself(
    kind: PayloadKind, document: dict[str, Any], tensors: dict[str, Any]
) -> None:
    data = encode(kind, document, tensors)
    body = decode(data)
    assert (body.kind, body.document) == (kind, document)
    assert encode(body.kind, body.document, body.tensors) == data
    for name, array in tensors.items():
        assert body.tensors[name].tobytes() == array.tobytes()


@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_every_mutant_is_refused_or_encodes_to_the_same_bytes(data: st.DataObject) -> None:
    mutant = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutant) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "insert"])):
            case "flip":
                mutant[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                mutant[at] = data.draw(st.sampled_from(b'0123456789-.eE"{}[],: \\uFI'))
            case "cut":
                del mutant[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                mutant[at:at] = data.draw(st.binary(min_size=1, max_size=4))
    try:
        release = decode_release(bytes(mutant))
    except (PayloadError, TooLarge):
        return
    assert encode_release(release) == bytes(mutant)
