"""Mutants of securefl's formats, for tests: of bytes, JSON text, bodies and envelopes.

Written from the formats alone (WIRE.md, the layout of safetensors): `forge` is a second implementation of the
sealing, so that a mutated header or body can be sealed and signed as a malicious but enrolled sender would.
Everything is drawn from the `random.Random` that is given. Nothing here judges; see `tests.fuzz.subjects`.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from securefl.crypto.identity import Card, Identity
from securefl.release import canonical_json

MARK = "securefl.body/1"
SIGNATURES = 64 + 3309
SEALED_KEY = 1168

# --- bytes


def mutate_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to three of: a bit flipped, a byte set, bytes put in or taken out, a cut, a splice with another."""
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(mutant) + 1)
        match rng.randrange(6):
            case 0 if at < len(mutant):
                mutant[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(mutant):
                mutant[at] = rng.choice(b'0123456789-.eE"{}[],: \\uFI\x00\x7f\xff')
            case 2:
                mutant[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 8, 64)))
            case 3:
                del mutant[at : at + rng.choice((1, 1, 2, 4, 8, 64))]
            case 4:
                del mutant[at:]
            case _:
                other = rng.choice(others)
                start = at if rng.random() < 0.5 else rng.randrange(len(other) + 1)
                mutant[at:] = other[start:]
    return bytes(mutant)


# --- JSON


def _deep(rng: random.Random) -> str:
    depth = rng.choice((30, 190, 210, 900, 980, 1000, 5000))
    return "[" * depth + "]" * depth if rng.random() < 0.5 else '{"a":' * depth + "0" + "}" * depth


def _wide(rng: random.Random) -> str:
    """Much memory for few bytes: every entry becomes an object of its own."""
    entry = rng.choice(("[]", "{}", "0.5", '""', "999"))
    return "[" + ",".join([entry] * rng.choice((10, 100, 1000, 60_000))) + "]"


_TOKENS = (
    *("null", "true", "false", "0", "1", "-1", "-0", "1.0", "-0.0", "01", "0x1", "1e0", "1e400", "-1e400"),
    *("5e-324", "1e-400", "NaN", "Infinity", "-Infinity", "nan", "[]", "{}", "[[]]", '""', '"\\u0000"'),
    *('"\\ud800"', '"\\udfff\\ud800"', '"\\ud83d\\ude00"', '"é"', "'a'", "", ",", '"', "9007199254740993"),
    *(
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
        "9" * 400,
        "9" * 4300,
        "9" * 4301,
    ),
    *('"__metadata__"', '"a' + "b" * 300 + '"', '"model"', '"plan"', '"F64"', '"BF16"', "4294967296"),
)


def token(rng: random.Random) -> str:
    """What may stand where a JSON value is due, and often should not."""
    draw = rng.random()
    if draw < 0.04:
        return _deep(rng)
    if draw < 0.06:
        return _wide(rng)
    return rng.choice(_TOKENS)


Path = tuple[str | int, ...]
_HOLE = "\x01hole\x01"


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where each value of a document lies, the document itself first."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*path, index))


def at(document: Any, path: Path) -> Any:
    for step in path:
        document = document[step]
    return document


def put(document: Any, path: Path, value: Any) -> Any:
    """A copy of the document with another value at the path."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def _perturbed(rng: random.Random, value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, -value, 0, 2**31, 2**53, 2**53 + 1, 2**63, 2**64))
        case float():
            return rng.choice((value * 2, -value, 0.0, 1e-300, 1e300, value + 1e-9))
        case str():
            where = rng.randrange(len(value) + 1)
            return value[:where] + rng.choice(("0", "f", "A", "\n", " ", "\x00", "")) + value[where + 1 :]
        case list():
            shuffled = rng.sample(value, len(value))
            return rng.choice((value[:-1], [*value, *value[:1]], shuffled, value * 2, []))
        case dict():
            keys = list(value)
            if not keys or rng.random() < 0.3:
                return {**value, rng.choice(("extra", "", "claim", "\ud800")): rng.choice((0, [], None))}
            gone = rng.choice(keys)
            rest = {key: inner for key, inner in value.items() if key != gone}
            return rest if rng.random() < 0.5 else {**rest, gone + rng.choice("s_1"): value[gone]}
    return rng.choice((0, "", [], {}, False))


def compact(document: Any, sort: bool) -> str:
    return json.dumps(document, separators=(",", ":"), sort_keys=sort)


def _misspelt(rng: random.Random, document: Any, sort: bool) -> str:
    """The same document in another spelling, which a canonical format must refuse."""
    text = compact(document, sort)
    match rng.randrange(6):
        case 0:
            where = rng.randrange(len(text) + 1)
            return text[:where] + rng.choice(" \t\n\r") + text[where:]
        case 1:
            return json.dumps(document, sort_keys=sort)
        case 2:
            return json.dumps(dict(reversed(document.items())) if isinstance(document, dict) else document)
        case 3:
            letters = [i for i, letter in enumerate(text) if letter.isalpha()]
            where = rng.choice(letters or [0])
            return f"{text[:where]}\\u{ord(text[where]):04x}{text[where + 1 :]}"
        case 4:
            return rng.choice(("\ufeff", "", "[", "/**/")) + text + rng.choice(("", "}", "\x00", text, "{}"))
    inside = [path for path in paths(document) if isinstance(at(document, path), dict) and at(document, path)]
    if not inside:
        return text
    path = rng.choice(inside)
    owner = at(document, path)
    key = rng.choice(list(owner))
    value = owner[key] if rng.random() < 0.5 else _perturbed(rng, owner[key])
    doubled = "{" + compact(key, sort) + ":" + compact(value, sort) + "," + compact(owner, sort)[1:]
    return compact(put(document, path, _HOLE), sort).replace(json.dumps(_HOLE), doubled)


def mutate_json(rng: random.Random, document: Any, sort: bool = True) -> bytes:
    """The JSON text of a document with one thing off: a value, a key, or the spelling.

    sort: whether the text that the format wants has its keys sorted.
    """
    path = rng.choice(list(paths(document)))
    match rng.randrange(4):
        case 0:
            text = compact(put(document, path, _HOLE), sort).replace(json.dumps(_HOLE), token(rng))
        case 1:
            other = at(document, rng.choice(list(paths(document))))
            text = compact(put(document, path, other), sort)
        case 2:
            text = compact(put(document, path, _perturbed(rng, at(document, path))), sort)
        case _:
            text = _misspelt(rng, document, sort)
    return text.encode("utf-8", "surrogatepass")


def mutate_document(rng: random.Random, document: Any, others: Sequence[Any]) -> bytes:
    """The JSON text of a message with one thing off: bytes in base64, a list, a part of another message's."""
    found = list(paths(document))
    match rng.randrange(6):
        case 0:
            return mutate_json(rng, document)
        case 1:
            texts = [path for path in found if isinstance(at(document, path), str)]
            path = rng.choice(texts or [()])
            try:
                inside = base64.urlsafe_b64decode(str(at(document, path)))
            except ValueError:
                inside = b""
            changed = mutate_bytes(rng, inside, [bytes(len(inside))])
            document = put(document, path, base64.urlsafe_b64encode(changed).decode())
        case 2:
            lists = [path for path in found if isinstance(at(document, path), list)]
            if lists:
                path = rng.choice(lists)
                document = put(document, path, _mutated_list(rng, at(document, path)))
        case 3:
            path, other = rng.choice(found), rng.choice(others)
            if path in set(paths(other)):
                document = put(document, path, at(other, path))
        case 4:
            path, whence = rng.choice(found), rng.choice(found)
            document = put(document, path, at(document, whence))
        case _:
            numbers = [path for path in found if isinstance(at(document, path), int)]
            path = rng.choice(numbers or found)
            document = put(document, path, _perturbed(rng, at(document, path)))
    return canonical_json(document)


def _mutated_list(rng: random.Random, values: list[Any]) -> list[Any]:
    """Another order, one fewer, one twice, one of them another's, or far too many."""
    if not values:
        return [rng.choice(("f" * 64, 0, {}, []))]
    place = rng.randrange(len(values))
    rest = values[:place] + values[place + 1 :]
    return rng.choice(
        (
            values[::-1],
            rest,
            rest,
            [*values, values[place]],
            sorted([*rest, rng.choice(values)], key=repr),
            [rng.choice(values) if one is values[place] else one for one in values],
            values * rng.choice((2, 400)),
        )
    )


# --- bodies: 8 bytes of size, a JSON header, the arrays


def frame(header: bytes, arrays: bytes) -> bytes:
    """A body of these parts; safetensors pads its header with spaces to a multiple of 8."""
    padded = header + b" " * (-len(header) % 8)
    return len(padded).to_bytes(8, "little") + padded + arrays


def unframe(body: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, document inside it and array bytes of a valid body."""
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    return header, json.loads(header["__metadata__"][MARK]), body[8 + size :]


_FLOATS = [
    struct.pack("<f", x) for x in (float("nan"), float("inf"), float("-inf"), 3e38, -2e6, 1e6, 1e-45, -0.0)
]
_SIZES = (0, 1, 7, 8, 2**16, 2**20, 2**20 + 1, 2**31, 2**32, 2**63, 2**64 - 1)


def _lying_entry(rng: random.Random, entry: dict[str, Any]) -> dict[str, Any]:
    """A tensor's entry with another type, shape or place."""
    first, last = entry["data_offsets"]
    match rng.randrange(4):
        case 0:
            return {**entry, "dtype": rng.choice(("F64", "BF16", "I32", "U8", "I64", "F32", "BOOL", "f32"))}
        case 1:
            huge = rng.choice(_SIZES)
            shape = entry["shape"]
            return {
                **entry,
                "shape": rng.choice(([huge], shape[::-1], [*shape, 1], shape[1:], [huge, 0], [1] * 9)),
            }
        case 2:
            step = rng.choice((-8, -4, -1, 1, 4, 8, 2**40))
            return {**entry, "data_offsets": [max(first + step, 0), max(last + step, 0)]}
    return {**entry, "data_offsets": rng.choice(([last, first], [first], [0, last], [first, last + 4]))}


def mutate_body(rng: random.Random, body: bytes, others: Sequence[bytes]) -> bytes:
    """A body with one thing off, at any level: bytes, sizes, header, a tensor's entry, document, a number."""
    header, document, arrays = unframe(body)
    names = [name for name in header if name != "__metadata__"]
    match rng.randrange(8):
        case 0:
            return mutate_bytes(rng, body, others)
        case 1:
            size = int.from_bytes(body[:8], "little")
            lie = rng.choice((*_SIZES, size - 8, size - 1, size + 1, size + 8, len(body) - 8))
            return max(lie, 0).to_bytes(8, "little") + body[8:]
        case 2:
            return frame(mutate_json(rng, header, sort=False), arrays)
        case 3 if names:
            name = rng.choice(names)
            changed = {**header, name: _lying_entry(rng, header[name])}
            return frame(compact(changed, False).encode(), arrays)
        case 4 if arrays:
            spot = 4 * rng.randrange(len(arrays) // 4 + 1)
            return frame(
                compact(header, False).encode(), arrays[:spot] + rng.choice(_FLOATS) + arrays[spot + 4 :]
            )
        case 5:
            other_header, other_document, other_arrays = unframe(rng.choice(others))
            if rng.random() < 0.5:
                return with_document(header, canonical_json(other_document), arrays)
            return with_document(other_header, canonical_json(document), other_arrays)
        case _:
            return with_document(header, mutate_json(rng, document), arrays)


def with_row(body: bytes, name: str, row: bytes) -> bytes:
    """The body, whose arrays are all rows of uint8, with other bytes as the one of that name."""
    header, _, arrays = unframe(body)
    offsets = {key: entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"}
    rows = {key: arrays[first:last] for key, (first, last) in offsets.items()} | {name: row}
    joined, spot = b"", 0
    for key in sorted(rows):
        size = len(rows[key])
        header[key] = {"dtype": "U8", "shape": [size], "data_offsets": [spot, spot + size]}
        joined, spot = joined + rows[key], spot + size
    ordered = {key: header[key] for key in ("__metadata__", *sorted(rows))}
    return frame(json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode(), joined)


def with_document(header: dict[str, Any], document: bytes, arrays: bytes) -> bytes:
    """The body with other bytes as its document."""
    changed = {**header, "__metadata__": {MARK: document.decode("utf-8", "surrogatepass")}}
    # Not ASCII: what the header's own text holds raw must reach the parser raw.
    text = json.dumps(changed, separators=(",", ":"), ensure_ascii=False)
    return frame(text.encode("utf-8", "surrogatepass"), arrays)


# --- envelopes


@dataclass(frozen=True)
class Layout:
    """The parts of an envelope. `lengths` overrides a declared length by the name of its field."""

    header: bytes
    commitment: bytes
    keys: tuple[bytes, ...]
    ciphertext: bytes
    signatures: bytes

    @classmethod
    def of(cls, data: bytes) -> Layout:
        """Of a well-formed envelope; ValueError for anything else."""
        spot = 12 + int.from_bytes(data[8:12], "big")
        header, commitment = data[12:spot], data[spot : spot + 32]
        count = int.from_bytes(data[spot + 32 : spot + 34], "big")
        spot += 34
        keys = []
        for _ in range(count):
            size = int.from_bytes(data[spot : spot + 2], "big")
            keys.append(data[spot + 2 : spot + 2 + size])
            spot += 2 + size
        size = int.from_bytes(data[spot : spot + 8], "big")
        body = data[spot + 8 : spot + 8 + size]
        found = cls(header, commitment, tuple(keys), body, data[spot + 8 + size :])
        if found.joined() != data or len(found.signatures) != SIGNATURES:
            raise ValueError("not the layout of an envelope")
        return found

    def pieces(self) -> list[bytes]:
        """Every field in order, the declared lengths as fields of their own; signatures last."""
        keys = [piece for key in self.keys for piece in (len(key).to_bytes(2, "big"), key)]
        return [
            b"SECUREFL",
            len(self.header).to_bytes(4, "big"),
            self.header,
            self.commitment,
            len(self.keys).to_bytes(2, "big"),
            *keys,
            len(self.ciphertext).to_bytes(8, "big"),
            self.ciphertext,
            self.signatures,
        ]

    def joined(self) -> bytes:
        return b"".join(self.pieces())


def sign(unsigned: bytes, sender: Identity) -> bytes:
    """`unsigned` and both signatures of `sender` over it."""
    signatures = sender.sign(b"securefl/1 envelope", hashlib.sha256(unsigned).digest())
    return unsigned + signatures.ed25519 + signatures.mldsa65


def _lp(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def forge(rng: random.Random, header: bytes, body: bytes, cards: Sequence[Card], sender: Identity) -> bytes:
    """Any header bytes and any body, sealed to `cards` and signed by `sender` as WIRE.md says."""
    key = rng.randbytes(32)
    digest = hashlib.sha256(header).digest()
    body_key, commitment = (
        HKDF(SHA256(), 32, None, _lp(label, digest)).derive(key)
        for label in (b"securefl/1 content", b"securefl/1 commitment")
    )
    sealed = [
        card.seal_key(key, _lp(b"securefl/1 key", header, bytes.fromhex(card.fingerprint))) for card in cards
    ]
    ciphertext = AESGCM(body_key).encrypt(bytes(12), body, header)
    return sign(Layout(header, commitment, tuple(sealed), ciphertext, b"").joined(), sender)


def mutate_layout(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """An envelope with one thing off in its parts: a length, a part of another one, keys, its header."""
    mine, theirs = Layout.of(data), Layout.of(rng.choice(others))
    match rng.randrange(7):
        case 0:
            pieces = mine.pieces()
            # The first bytes, the header's length, the count, the length of a key and that of the body.
            which = rng.choice((0, 1, 4, 5, len(pieces) - 3))
            old = pieces[which]
            size = int.from_bytes(old, "big")
            lie = rng.choice(
                (*_SIZES, 15, 16, 768 * 2**20 + 16, 768 * 2**20 + 17, size + 1, size - 1, size * 2)
            )
            pieces[which] = (max(lie, 0) % 256 ** len(old)).to_bytes(len(old), "big")
            return b"".join(pieces)
        case 1:
            field = rng.choice(("header", "commitment", "keys", "ciphertext", "signatures"))
            return replace(mine, **{field: getattr(theirs, field)}).joined()
        case 2:
            keys = list(mine.keys)
            keys = rng.choice(
                (keys[::-1], keys[1:], [*keys, *theirs.keys], [key[:-1] for key in keys], keys * 2)
            )
            return replace(mine, keys=tuple(keys)).joined()
        case 3:
            return replace(mine, header=mutate_json(rng, json.loads(mine.header))).joined()
        case 4:
            pieces = mine.pieces()
            which = rng.randrange(len(pieces))
            pieces[which] = mutate_bytes(rng, pieces[which], theirs.pieces())
            return b"".join(pieces)
        case 5:
            one, two = mine.pieces(), theirs.pieces()
            cut = rng.randrange(len(one) + 1)
            return b"".join(one[:cut] + two[rng.choice((cut, rng.randrange(len(two) + 1))) :])
        case _:
            return mutate_bytes(rng, data, others)
