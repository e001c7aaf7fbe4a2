"""A second reader of securefl's formats, from WIRE.md alone: nothing of securefl is imported here.

It stands on `cryptography`, `hashlib` and `json`, and names each refusal as the vectors do. It is made to be
read beside the text, not to be used: it holds everything in memory and says nothing about where a fault lies.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric import ed25519, mldsa, mlkem, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
PUBLIC = {"ed25519": 32, "mldsa65": 1952, "mlkem768": 1184, "x25519": 32}
SEEDS = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}
KINDS = {
    *("plan", "model", "centroids", "embedding-centroids", "metrics", "gradient", "unavailable"),
    *("advert", "shares", "masked-model", "survivors", "unmasking"),
    *("group-key", "encrypted-model", "sum"),
}
NAME, STEP = "[a-z0-9][a-z0-9._-]{0,63}", "[a-z]{1,16}"
Keys = Mapping[str, bytes]


class Refusal(Exception):
    """Its text is the name that the vectors give."""


def require(condition: object, name: str) -> None:
    if not condition:
        raise Refusal(name)


def lp(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def strict(text: bytes) -> Any:
    """JSON without duplicate keys and NaN. Raises ValueError."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError
        return dict(pairs)

    def constant(_: str) -> None:
        raise ValueError

    return json.loads(text, object_pairs_hook=members, parse_constant=constant)


def is_text(pattern: str, value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def is_number(value: object, first: int, last: int) -> bool:
    return type(value) is int and first <= value <= last


# --- keys


def private(seeds: Keys) -> hpke.MLKEM768X25519PrivateKey:
    return hpke.MLKEM768X25519PrivateKey(
        mlkem.MLKEM768PrivateKey.from_seed_bytes(seeds["mlkem768"]),
        x25519.X25519PrivateKey.from_private_bytes(seeds["x25519"]),
    )


def public(seeds: Keys) -> Keys:
    classical = ed25519.Ed25519PrivateKey.from_private_bytes(seeds["ed25519"])
    return {
        "ed25519": classical.public_key().public_bytes_raw(),
        "mldsa65": mldsa.MLDSA65PrivateKey.from_seed_bytes(seeds["mldsa65"]).public_key().public_bytes_raw(),
        "mlkem768": mlkem.MLKEM768PrivateKey.from_seed_bytes(seeds["mlkem768"])
        .public_key()
        .public_bytes_raw(),
        "x25519": x25519.X25519PrivateKey.from_private_bytes(seeds["x25519"]).public_key().public_bytes_raw(),
    }


def fingerprint(name: str, keys: Keys) -> str:
    return hashlib.sha256(lp(b"1", name.encode(), *(keys[half] for half in PUBLIC))).hexdigest()


def holds(keys: Keys, context: bytes, digest: bytes, classical: bytes, post_quantum: bytes) -> bool:
    """Both signatures, or nothing."""
    message = lp(context) + digest
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(keys["ed25519"]).verify(classical, message)
        mldsa.MLDSA65PublicKey.from_public_bytes(keys["mldsa65"]).verify(post_quantum, message)
    except InvalidSignature:
        return False
    return True


def card_keys(card: Any) -> Keys:
    """The keys of a card whose own signature holds."""
    keys = {half: base64.b64decode(card[half], validate=True) for half in PUBLIC}
    digest = bytes.fromhex(fingerprint(card["name"], keys))
    pair = [base64.b64decode(card["signature"][half], validate=True) for half in ("ed25519", "mldsa65")]
    require(holds(keys, b"securefl/1 card", digest, *pair), "BadSignature")
    return keys


# --- envelopes


def _is_party(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"name", "key"}
        and is_text(NAME, value["name"])
        and is_text("[0-9a-f]{64}", value["key"])
    )


def _header(encoded: bytes) -> dict[str, Any]:
    try:
        header = json.loads(encoded)
    except ValueError:
        raise Refusal("MalformedEnvelope") from None
    require(isinstance(header, dict), "MalformedEnvelope")
    known = (
        header.get("version") == 1
        and header.get("suite") == "mlkem768x25519+aes256gcm+ed25519+mldsa65"
        and header.get("kind") in KINDS
    )
    require(known, "UnsupportedEnvelope")
    fields = {"version", "suite", "run", "round", "step", "sender", "recipients", "kind", "sequence", "time"}
    require(set(header) == fields and canonical(header) == encoded, "MalformedEnvelope")
    to = header["recipients"]
    require(
        is_text("[0-9a-f]{32}", header["run"])
        and is_number(header["round"], 1, 10**6)
        and is_text(STEP, header["step"])
        and _is_party(header["sender"])
        and isinstance(to, list)
        and 1 <= len(to) <= 256
        and all(map(_is_party, to))
        and len({one["name"] for one in to}) == len({one["key"] for one in to}) == len(to)
        and is_number(header["sequence"], 1, 2**53)
        and is_number(header["time"], 0, 2**53),
        "MalformedEnvelope",
    )
    return dict(header)


def open_envelope(data: bytes, roster: Mapping[str, Keys], me: str, seeds: Keys) -> bytes:
    """The body. roster: public keys by name."""
    place = 0

    def take(size: int) -> bytes:
        nonlocal place
        require(place + size <= len(data), "MalformedEnvelope")
        place += size
        return data[place - size : place]

    def number(size: int, limit: int) -> int:
        value = int.from_bytes(take(size), "big")
        require(value <= limit, "TooLarge")
        return value

    require(take(8) == b"SECUREFL", "MalformedEnvelope")
    encoded = take(number(4, 65_536))
    header = _header(encoded)
    commitment = take(32)
    require(int.from_bytes(take(2), "big") == len(header["recipients"]), "MalformedEnvelope")
    sealed = []
    for _ in header["recipients"]:
        require(int.from_bytes(take(2), "big") == 1168, "MalformedEnvelope")
        sealed.append(take(1168))
    size = number(8, 805_306_384)
    require(size >= 16, "MalformedEnvelope")
    ciphertext, end = take(size), place
    signatures = take(64), take(3309)
    require(place == len(data), "MalformedEnvelope")

    sender = header["sender"]
    keys = roster.get(sender["name"])
    if keys is None or fingerprint(sender["name"], keys) != sender["key"]:
        raise Refusal("UnknownSender")
    digest = hashlib.sha256(data[:end]).digest()
    require(holds(keys, b"securefl/1 envelope", digest, *signatures), "BadSignature")

    mine = {"name": me, "key": fingerprint(me, public(seeds))}
    require(mine in header["recipients"], "WrongRecipient")
    info = lp(b"securefl/1 key", encoded, bytes.fromhex(mine["key"]))

    def derived(secret: bytes, label: bytes) -> bytes:
        context = lp(label, hashlib.sha256(encoded).digest())
        return HKDF(hashes.SHA256(), 32, None, context).derive(secret)

    try:
        secret = SUITE.decrypt(sealed[header["recipients"].index(mine)], private(seeds), info)
        require(derived(secret, b"securefl/1 commitment") == commitment, "DecryptionFailed")
        return AESGCM(derived(secret, b"securefl/1 content")).decrypt(bytes(12), ciphertext, encoded)
    except (InvalidTag, ValueError):
        raise Refusal("DecryptionFailed") from None


# --- bodies

WIDTH = {"I64": 8, "F32": 4, "U8": 1}  # the order of the arrays: wider types first
MARK = "securefl.body/1"


def _is_plain(value: Any, depth: int = 1) -> bool:
    """Whole Unicode text, and no more than 32 objects and lists inside each other."""
    if isinstance(value, str):
        return re.search("[\ud800-\udfff]", value) is None
    if isinstance(value, dict | list):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return depth <= 32 and all(_is_plain(inner, depth + 1) for inner in inside)
    return True


def write_body(kind: str, document: Any, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """tensors: type, shape and little-endian bytes by name."""
    header: dict[str, Any] = {
        "__metadata__": {MARK: canonical({"kind": kind, "document": document}).decode()}
    }
    arrays = b""
    for name in sorted(tensors, key=lambda name: (-WIDTH[tensors[name][0]], name.encode())):
        dtype, shape, data = tensors[name]
        offsets = [len(arrays), len(arrays) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        arrays += data
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + arrays


def _check_entry(entry: Any, room: int) -> None:
    good = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    require(good, "PayloadError")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    require(isinstance(dtype, str) and dtype in WIDTH, "WrongShape")
    good = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and len(shape) <= 8
    require(good and all(type(x) is int and x >= 0 for x in (*shape, *offsets)), "PayloadError")
    size = math.prod(shape) * WIDTH[dtype]
    require(offsets[1] <= room and offsets[1] - offsets[0] == size, "WrongShape")


def read_body(data: bytes) -> tuple[str, Any, dict[str, tuple[str, list[int], bytes]]]:
    """Kind, document, and type, shape and bytes of each array."""
    require(len(data) <= 3 * 2**28, "TooLarge")
    require(len(data) >= 8, "PayloadError")
    size = int.from_bytes(data[:8], "little")
    require(size <= 2**20, "TooLarge")
    require(8 + size <= len(data), "PayloadError")
    arrays = data[8 + size :]
    try:
        header = strict(data[8 : 8 + size])
        require(isinstance(header, dict), "PayloadError")
        metadata = header.pop("__metadata__", None)
        require(len(header) <= 8192, "TooLarge")
        for entry in header.values():
            _check_entry(entry, len(arrays))
        require(isinstance(metadata, dict) and set(metadata) == {MARK}, "PayloadError")
        require(isinstance(metadata[MARK], str), "PayloadError")
        content = strict(metadata[MARK].encode())
        require(isinstance(content, dict) and set(content) == {"kind", "document"}, "PayloadError")
        kind, document = content["kind"], content["document"]
        require(kind in KINDS and isinstance(document, dict) and _is_plain(document), "PayloadError")
        tensors = {
            name: (entry["dtype"], entry["shape"], arrays[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        }
        require(write_body(kind, document, tensors) == data, "PayloadError")
    except (ValueError, TypeError, RecursionError):
        raise Refusal("PayloadError") from None
    return kind, document, tensors


# --- signed documents, identity files, ledgers


def read_document(data: bytes, keys: Keys, context: bytes) -> dict[str, Any]:
    """A rotation, revocation, receipt, ledger line or head record without its signature, which holds."""
    document = strict(data)
    require(canonical(document) + b"\n" == data, "NotCanonical")
    signature = document.pop("signature")
    pair = [base64.b64decode(signature[half], validate=True) for half in ("ed25519", "mldsa65")]
    require(holds(keys, context, hashlib.sha256(canonical(document)).digest(), *pair), "BadSignature")
    return dict(document)


def open_identity(data: bytes, passphrase: bytes) -> Keys:
    """The seeds in an encrypted identity file."""
    document = strict(data)
    ciphertext = base64.b64decode(document.pop("ciphertext"), validate=True)
    salt, nonce = (base64.b64decode(document[field], validate=True) for field in ("salt", "nonce"))
    key = Scrypt(salt=salt, length=32, n=2**17, r=8, p=1).derive(passphrase)
    plain, seeds = AESGCM(key).decrypt(nonce, ciphertext, canonical(document)), {}
    for half, size in SEEDS.items():
        seeds[half], plain = plain[:size], plain[size:]
    require(fingerprint(document["name"], public(seeds)) == document["fingerprint"], "Damaged")
    return seeds


def epsilon(mu: float, delta: float) -> float:
    """Where Phi(-e/mu + mu/2) - exp(e) Phi(-e/mu - mu/2) = delta, by halving (for mu below 5)."""

    def excess(at: float) -> float:
        first, second = (math.erfc((at / mu + sign * mu / 2) / math.sqrt(2)) / 2 for sign in (-1, 1))
        return first - math.exp(at) * second - delta

    low, high = 0.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def read_ledger(lines: list[bytes], head: bytes) -> list[dict[str, Any]]:
    """The entries of a ledger: signatures, chain, change of keys, head record."""
    keys = card_keys(strict(lines[0])["card"])
    entries: list[dict[str, Any]] = []
    for index, line in enumerate(lines):
        entry = read_document(line, keys, b"securefl/1 ledger")
        before = hashlib.sha256(lines[index - 1]).hexdigest() if index else None
        require((entry["version"], entry["index"], entry["previous"]) == (2, index, before), "Chain")
        if entry["entry"] == "rotation":
            new = card_keys(entry["card"])
            rest = {key: value for key, value in entry.items() if key != "consent"}
            pair = [base64.b64decode(entry["consent"][half]) for half in ("ed25519", "mldsa65")]
            digest = hashlib.sha256(canonical(rest)).digest()
            require(holds(new, b"securefl/1 ledger-rotation", digest, *pair), "BadSignature")
            keys = new
        entries.append(entry)
    record = read_document(head, keys, b"securefl/1 ledger-head")
    last = (len(lines) - 1, hashlib.sha256(lines[-1]).hexdigest(), entries[-1]["time"])
    require((record["index"], record["hash"], record["time"]) == last, "Head")
    accounts, restored, history = {}, False, []
    for entry, line in zip(entries, lines, strict=True):
        if entry["entry"] in ("genesis", "restored"):
            history.append({"index": entry["index"], "hash": hashlib.sha256(line).hexdigest()})
            restored = entry["entry"] == "restored"
        elif entry["entry"] == "confirmed":
            accounts, restored = dict(entry["accounts"]), False
        elif entry["entry"] == "release":
            accounts[entry["dataset"]] = entry["account"]
    require(record["accounts"] == accounts and record["restored"] == restored, "Head")
    require(len(history) <= 64 and record["history"] == history, "Head")
    return entries


def may_confirm(head: Mapping[str, Any], copy: Mapping[str, Any]) -> bool:
    """Whether a head record knows all that a copy holds; both are records, and their signatures hold."""
    ours, theirs = copy["history"], head["history"]
    return (
        theirs[: len(ours)] == ours
        and all(entry["index"] > copy["index"] for entry in theirs[len(ours) :])
        and (head["index"] > copy["index"] or (head["index"], head["hash"]) == (copy["index"], copy["hash"]))
        and not head["restored"]
    )
