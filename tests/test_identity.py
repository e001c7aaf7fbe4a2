"""Identities, cards and hybrid signatures."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import pickle
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import ValidationError

from securefl.crypto.identity import Card, Identity, Signatures, from_base64, to_base64
from securefl.crypto.keyfiles import read_passphrase
from securefl.crypto.statements import parse_statement
from securefl.crypto.trust import TrustStore
from securefl.errors import BadSignature, DecryptionFailed, SecureflError, UsageError
from tests.leaks import assert_no_leak

DIGEST = hashlib.sha256(b"a message").digest()
SIZES = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}


def seeds_of(tag: int) -> dict[str, bytes]:
    return {half: bytes([tag]) * size for half, size in SIZES.items()}


@pytest.fixture(scope="module")
def alice() -> Identity:
    return Identity("alice", seeds_of(1))


@pytest.fixture(scope="module")
def bob() -> Identity:
    return Identity("bob", seeds_of(2))


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# --- signatures


def test_a_signature_holds_for_its_context_and_digest_only(alice: Identity, bob: Identity) -> None:
    signatures = alice.sign(b"one", DIGEST)
    assert (len(signatures.ed25519), len(signatures.mldsa65)) == (64, 3309)
    alice.card.verify(b"one", DIGEST, signatures)
    for context, digest, card in [
        (b"two", DIGEST, alice.card),
        (b"one", flip(DIGEST, 0), alice.card),
        (b"one", DIGEST, bob.card),
        (b"on", b"e" + DIGEST[:31], alice.card),  # the context is length-prefixed
    ]:
        with pytest.raises(BadSignature, match=card.name):
            card.verify(context, digest, signatures)


@pytest.mark.parametrize(
    ("half", "named"), [("ed25519", "Ed25519"), ("mldsa65", "ML-DSA-65")], ids=["ed25519", "mldsa65"]
)
@pytest.mark.parametrize("fault", ["altered", "emptied", "other", "cut"])
def test_either_half_alone_is_not_enough(
    alice: Identity, bob: Identity, half: str, named: str, fault: str
) -> None:
    good, others = alice.sign(b"c", DIGEST), bob.sign(b"c", DIGEST)
    value = getattr(good, half)
    bad = {"altered": flip(value, 40), "emptied": b"", "other": getattr(others, half), "cut": value[:-1]}[
        fault
    ]
    halves = {"ed25519": good.ed25519, "mldsa65": good.mldsa65, half: bad}
    with pytest.raises(BadSignature, match=named):
        alice.card.verify(b"c", DIGEST, Signatures(**halves))


def test_the_signed_bytes_are_those_of_the_written_format(alice: Identity) -> None:
    signature = alice.sign(b"ctx", DIGEST).ed25519
    key = Ed25519PublicKey.from_public_bytes(from_base64(alice.card.ed25519, 32))
    key.verify(signature, b"\x00\x00\x00\x03ctx" + DIGEST)


def test_only_a_digest_is_signed(alice: Identity) -> None:
    with pytest.raises(ValueError, match="32-byte"):
        alice.sign(b"c", b"short")


# --- sealing keys


@pytest.mark.parametrize("half", ["mlkem768", "x25519"])
def test_a_sealed_key_needs_both_halves(alice: Identity, half: str) -> None:
    sealed = alice.card.seal_key(b"k" * 32, b"info")
    assert len(sealed) == 1168
    assert alice.open_key(sealed, b"info") == b"k" * 32
    crippled = Identity("alice", {**seeds_of(1), half: bytes([9]) * SIZES[half]})
    for identity, info in ((crippled, b"info"), (alice, b"other")):
        with pytest.raises(DecryptionFailed, match="alice"):
            identity.open_key(sealed, info)


def test_a_low_order_x25519_key_is_refused_when_sealing(alice: Identity) -> None:
    forged = alice.card.model_copy(update={"x25519": to_base64(bytes(32))})
    forged.__dict__.pop("_keys", None)
    with pytest.raises(UsageError, match="alice"):
        forged.seal_key(b"k" * 32, b"")


# --- cards


def test_fingerprint_is_the_hash_of_the_written_format(alice: Identity) -> None:
    card = alice.card
    expected = hashlib.sha256()
    for part in (
        b"1",
        b"alice",
        from_base64(card.ed25519, 32),
        from_base64(card.mldsa65, 1952),
        from_base64(card.mlkem768, 1184),
        from_base64(card.x25519, 32),
    ):
        expected.update(len(part).to_bytes(4, "big") + part)
    assert card.fingerprint == expected.hexdigest()
    assert card.short_fingerprint.replace(" ", "") == card.fingerprint[:32]
    assert len(card.short_fingerprint.split()) == 8


def test_a_card_survives_its_file(alice: Identity, tmp_path: Path) -> None:
    alice.card.save(tmp_path / "alice.json")
    again = Card.load(tmp_path / "alice.json")
    assert again == alice.card
    assert again.model_dump() == alice.card.model_dump()
    again.verify(b"c", DIGEST, alice.sign(b"c", DIGEST))
    pretty = json.dumps(json.loads(alice.card.to_json()), indent=2).encode()
    assert Card.from_json(pretty, "x") == alice.card


@pytest.mark.parametrize("field", ["name", "ed25519", "mldsa65", "mlkem768", "x25519"])
def test_no_field_of_a_card_can_be_replaced(alice: Identity, bob: Identity, field: str) -> None:
    document = json.loads(alice.card.to_json())
    document[field] = getattr(bob.card, field)
    with pytest.raises(BadSignature, match=r"^file\.json: .* does not hold"):
        Card.from_json(json.dumps(document).encode(), "file.json")


def test_nobody_puts_anothers_signing_key_on_his_own_card(alice: Identity, bob: Identity) -> None:
    """Eve takes Alice's Ed25519 key for her own ML-DSA key, and signs what she can."""
    mixed = {**alice.card.model_dump(), "mldsa65": bob.card.mldsa65}
    mixed["signature"] = bob.sign(b"securefl/1 card", DIGEST).document()
    with pytest.raises(BadSignature, match="Ed25519"):
        Card.model_validate(mixed)


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"version": 2},
        {"name": "Alice"},
        {"name": "../alice"},
        {"ed25519": "AAAA"},
        {"ed25519": 5},
        {"mlkem768": to_base64(b"\xff" * 1184)},  # coefficients above the modulus (FIPS 203, 7.2)
        {"signature": {"ed25519": "AA=="}},
        {"signature": None},
    ],
)
def test_a_malformed_card_is_one_sentence(alice: Identity, change: dict[str, object]) -> None:
    document = {**json.loads(alice.card.to_json()), **change}
    with pytest.raises(UsageError, match=r"^card\.json: is not a securefl card") as caught:
        Card.from_json(json.dumps(document).encode(), "card.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'{"name":1,"name":2}', b"[" * 100_000])
def test_what_is_no_json_object_is_no_card(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"^f: is not a securefl card"):
        Card.from_json(data, "f")


def test_cards_are_immutable(alice: Identity) -> None:
    with pytest.raises(ValidationError):
        alice.card.name = "bob"  # type: ignore[misc]


@pytest.mark.parametrize("text", ["AA", "AA==\n", "AB==", "AA=A", " AA==", "", None, "é"])
def test_base64_has_one_spelling(text: object) -> None:
    with pytest.raises(ValueError, match="base64"):
        from_base64(text, 1)


# --- identities


def test_generated_identities_differ_and_keep_their_fingerprint(tmp_path: Path) -> None:
    one, two = Identity.generate("silo-1"), Identity.generate("silo-1")
    assert one.card.fingerprint != two.card.fingerprint
    path = tmp_path / "silo-1.key"
    one.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Identity.load(path)
    assert again.card == one.card
    assert again.name == "silo-1"
    again.card.verify(b"c", DIGEST, one.sign(b"c", DIGEST))
    assert again.open_key(one.card.seal_key(b"k" * 32, b""), b"") == b"k" * 32
    assert [file.name for file in tmp_path.iterdir()] == ["silo-1.key"]


def test_mode_is_0600_whatever_the_umask(tmp_path: Path, alice: Identity) -> None:
    before = os.umask(0)
    try:
        alice.save(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("nameless", [True, False], ids=["O_TMPFILE", "a system without it"])
def test_save_never_overwrites(
    nameless: bool, tmp_path: Path, alice: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    alice.save(tmp_path / "new")
    assert Identity.load(tmp_path / "new").card == alice.card
    (tmp_path / "new").unlink()
    path = tmp_path / "key"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        alice.save(path)
    assert path.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_save_into_no_folder_is_one_sentence(tmp_path: Path, alice: Identity) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        alice.save(tmp_path / "absent" / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601, 0o660, 0o644])
def test_load_refuses_a_file_that_others_can_reach(tmp_path: Path, alice: Identity, mode: int) -> None:
    path = tmp_path / "key"
    alice.save(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match="others can reach"):
        Identity.load(path)


def private_text(path: Path) -> list[str]:
    return list(json.loads(path.read_bytes())["seeds"].values())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: {**d, "format": "securefl.identity/2"},
        lambda d: {**d, "name": "bob"},
        lambda d: {**d, "name": "NO"},
        lambda d: {**d, "name": 7},
        lambda d: {**d, "more": 1},
        lambda d: {k: v for k, v in d.items() if k != "seeds"},
        lambda d: {**d, "seeds": {**d["seeds"], "x25519": d["seeds"]["mlkem768"]}},
        lambda d: {**d, "seeds": {**d["seeds"], "x25519": "!" + d["seeds"]["x25519"]}},
        lambda d: {**d, "seeds": {**d["seeds"], "x25519": d["seeds"]["ed25519"]}},
        lambda d: {**d, "seeds": {**d["seeds"], "more": d["seeds"]["ed25519"]}},
        lambda d: {**d, "seeds": list(d["seeds"].values())},
        lambda d: list(d["seeds"].values()),
        lambda d: d["seeds"]["mldsa65"],
    ],
)
def test_a_damaged_identity_is_one_sentence_without_keys(tmp_path: Path, spoil: Callable[[Any], Any]) -> None:
    path = tmp_path / "key"
    Identity.generate("alice").save(path)
    secrets = private_text(path)
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(spoil(document)))
    with pytest.raises(UsageError, match="is not a securefl identity") as caught:
        Identity.load(path)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert not any(secret[:12] in shown for secret in secrets)


@pytest.mark.parametrize("cut", [0, 1, 100, 300])
def test_a_truncated_identity_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "key"
    Identity.generate("alice").save(path)
    secrets = private_text(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UsageError, match="is not a securefl identity") as caught:
        Identity.load(path)
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(secret[:12] in shown for secret in secrets)


def test_load_of_nothing_a_folder_or_too_much(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, says in (
        (tmp_path / "absent", "cannot be read"),
        (tmp_path, "not an ordinary file"),
        (tmp_path / "pipe", "not an ordinary file"),
    ):
        with pytest.raises(UsageError, match=says):
            Identity.load(path)
    big = tmp_path / "big"
    big.touch(0o600)
    big.write_bytes(b" " * 70_000)
    with pytest.raises(UsageError, match="too large"):
        Identity.load(big)


def test_private_keys_do_not_show(alice: Identity) -> None:
    seeds = [*seeds_of(1).values()]
    shown = [repr(alice), str(alice), f"{alice!r} {alice}", repr([alice]), repr(alice.card), str(alice.card)]
    for text in shown:
        assert "alice" in text
        assert not any(seed.hex()[:16] in text or to_base64(seed)[:12] in text for seed in seeds)
    assert not hasattr(alice, "__dict__")


def test_an_identity_is_neither_pickled_nor_copied(alice: Identity) -> None:
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SecureflError, match="cannot be serialised"):
            leak(alice)


@pytest.mark.parametrize("name", ["", "Alice", "a" * 65, "a/b", ".a", "a b", "a\n", "é", "\udcff", "a\0"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="a name is"):
        Identity.generate(name)


def test_seeds_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="four seeds"):
        Identity("alice", {**seeds_of(1), "mlkem768": bytes(32)})


# --- what an error leads to


def as_retired(path: Path) -> None:
    """The file as the record of a retired key in a trust store."""
    store = TrustStore.open(path.parent / "store", create=True)
    (store.path / "retired" / f"{'0' * 64}.json").write_bytes(path.read_bytes())
    store.retired()


def as_pinned(path: Path) -> None:
    """The file as the card of somebody in a trust store."""
    store = TrustStore.open(path.parent / "store", create=True)
    (store.path / "alice.card.json").write_bytes(path.read_bytes())
    store.card("alice")


READERS: dict[str, Callable[[Path], object]] = {
    "key": Identity.load,
    "key with a passphrase": lambda path: Identity.load(path, b"p"),
    "card": Card.load,
    "statement": lambda path: parse_statement(path.read_bytes(), "f"),
    "pinned card": as_pinned,
    "retired key": as_retired,
}
SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "whole": lambda data: data,
    "cut": lambda data: data[:-3],
    "not UTF-8": lambda data: data.replace(b"seeds", b"se\xffds"),
    "not UTF-8 in a seed": lambda data: data.replace(b'=="', b'\xff=="'),
    "not ASCII in a seed": lambda data: data.replace(b'=="', '\u00e9=="'.encode()),
    "half a surrogate pair": lambda data: data.replace(b'"alice"', b'"\\ud800"'),
    "a list of seeds": lambda data: json.dumps(list(json.loads(data)["seeds"].values())).encode(),
    "a seed": lambda data: json.dumps(json.loads(data)["seeds"]["mldsa65"]).encode(),
    "a list for the seeds": lambda data: data.replace(b'"seeds":{', b'"seeds":[').replace(b"}}", b"]}"),
    "seeds as the name": lambda data: json.dumps({**(d := json.loads(data)), "name": d["seeds"]}).encode(),
    "seeds twice": lambda data: data.replace(b'"name"', b'"seeds":{},"name"'),
    "a deep name": lambda data: data.replace(b'"alice"', b"[" * 900 + b"]" * 900),
}


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("reader", READERS)
def test_no_error_leads_to_what_a_private_file_holds(reader: str, spoil: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    Identity.generate("alice").save(path)
    secrets = [seed[:12] for seed in private_text(path)]
    path.write_bytes(SPOILT[spoil](path.read_bytes()))
    if (reader, spoil) == ("key", "whole"):
        Identity.load(path)
        return
    with pytest.raises(SecureflError) as caught:
        READERS[reader](path)
    assert_no_leak(caught.value, *secrets)


def test_the_walk_finds_what_an_error_leads_to() -> None:
    def parse(text: str) -> None:
        try:
            json.loads(text)
        except ValueError:
            raise UsageError("hidden, not gone") from None

    with pytest.raises(UsageError) as parsed:
        parse('"canary')
    with pytest.raises(ValidationError) as invalid:
        Card.model_validate({"name": "a", "canary": 1})
    with pytest.raises(UnicodeDecodeError) as undecoded:
        b"canary\xff".decode()
    for caught in (parsed, invalid, undecoded):
        with pytest.raises(AssertionError, match="holds it"):
            assert_no_leak(caught.value, "canary")


# --- passphrases

PASSPHRASE = "correct horse, Батарея".encode()


@pytest.fixture(scope="module")
def closed(alice: Identity, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of an encrypted file."""
    path = tmp_path_factory.mktemp("closed") / "key"
    alice.save(path, PASSPHRASE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def written(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "key"
    path.touch(0o600)
    path.write_text(json.dumps(document))
    return path


def scrypt(passphrase: bytes, salt: bytes) -> bytes:
    """RFC 7914 as the standard library has it."""
    return hashlib.scrypt(passphrase, salt=salt, n=2**17, r=8, p=1, maxmem=2**28, dklen=32)


def test_a_second_implementation_opens_an_encrypted_file(closed: dict[str, Any], alice: Identity) -> None:
    raw = {field: base64.b64decode(closed[field]) for field in ("salt", "nonce", "ciphertext")}
    assert {field: len(value) for field, value in raw.items()} == {"salt": 16, "nonce": 12, "ciphertext": 176}
    clear = (
        f'{{"fingerprint":"{alice.card.fingerprint}","format":"securefl.identity-encrypted/1","name":"alice",'
        f'"nonce":"{closed["nonce"]}","salt":"{closed["salt"]}"}}'
    ).encode()
    plain = AESGCM(scrypt(PASSPHRASE, raw["salt"])).decrypt(raw["nonce"], raw["ciphertext"], clear)
    assert plain == b"\1" * (32 + 32 + 64 + 32), "seeds_of(1), and nothing else"


def test_a_file_of_a_second_implementation_is_opened(tmp_path: Path, bob: Identity) -> None:
    salt, nonce = bytes(range(16)), bytes(range(12))
    document = {
        "fingerprint": bob.card.fingerprint,
        "format": "securefl.identity-encrypted/1",
        "name": "bob",
        "nonce": base64.b64encode(nonce).decode(),
        "salt": base64.b64encode(salt).decode(),
    }
    clear = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    sealed = AESGCM(scrypt(b"p", salt)).encrypt(nonce, b"\2" * 160, clear)
    path = written(tmp_path, {**document, "ciphertext": base64.b64encode(sealed).decode()})
    assert Identity.is_encrypted(path)
    assert Identity.load(path, b"p").card == bob.card


def test_no_seed_is_in_an_encrypted_file_and_nothing_repeats(closed: dict[str, Any], tmp_path: Path) -> None:
    Identity("alice", seeds_of(1)).save(tmp_path / "again", PASSPHRASE)
    again = json.loads((tmp_path / "again").read_bytes())
    assert {field for field in closed if closed[field] != again[field]} == {"salt", "nonce", "ciphertext"}
    for seed in seeds_of(1).values():
        assert to_base64(seed)[:12] not in json.dumps(closed)


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "passphrase": lambda d: d,
    "name": lambda d: {**d, "name": "bob"},
    "fingerprint": lambda d: {**d, "fingerprint": "0" * 64},
    "salt": lambda d: {**d, "salt": to_base64(bytes(16))},
    "nonce": lambda d: {**d, "nonce": to_base64(bytes(12))},
    "ciphertext": lambda d: {**d, "ciphertext": to_base64(flip(base64.b64decode(d["ciphertext"]), 100))},
    "tag": lambda d: {**d, "ciphertext": to_base64(flip(base64.b64decode(d["ciphertext"]), 175))},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_passphrase_and_an_altered_file_say_the_same(
    fault: str, closed: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path, WRONG[fault](closed))
    with pytest.raises(UsageError) as caught:
        Identity.load(path, b"wrong" if fault == "passphrase" else PASSPHRASE)
    assert str(caught.value) == f"{path}: does not open; the passphrase is wrong, or the file was altered"
    assert_no_leak(caught.value, "correct horse", "InvalidTag")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: {**d, "n": 2**30},  # other parameters than the format's
        lambda d: {**d, "kdf": {"name": "scrypt", "n": 2**17, "r": 8, "p": 1}},
        lambda d: {**d, "format": "securefl.identity-encrypted/2"},
        lambda d: {**d, "format": ["securefl.identity-encrypted/1"]},
        lambda d: {**d, "salt": d["salt"][:-4]},
        lambda d: {**d, "salt": to_base64(bytes(17))},
        lambda d: {**d, "nonce": None},
        lambda d: {**d, "ciphertext": to_base64(bytes(60_000 // 2))},
        lambda d: {**d, "ciphertext": ""},
        lambda d: {field: value for field, value in d.items() if field != "nonce"},
        lambda d: {**d, "seeds": {}},
    ],
)
def test_a_malformed_encrypted_file_is_refused_before_any_work(
    spoil: Callable[[Any], Any], closed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("scrypt was started")

    monkeypatch.setattr("securefl.crypto.keyfiles.Scrypt", never)
    with pytest.raises(UsageError, match="is not a securefl identity"):
        Identity.load(written(tmp_path, spoil(closed)), PASSPHRASE)


def test_a_key_is_opened_as_it_was_saved_only(
    closed: dict[str, Any], alice: Identity, tmp_path: Path
) -> None:
    path = written(tmp_path, closed)
    with pytest.raises(UsageError, match=r"is encrypted; give --passphrase-file, or .* when asked"):
        Identity.load(path)
    plain = tmp_path / "plain"
    alice.save(plain)
    assert (Identity.is_encrypted(path), Identity.is_encrypted(plain)) == (True, False)
    with pytest.raises(UsageError, match="is not encrypted, though a passphrase was given"):
        Identity.load(plain, PASSPHRASE)
    path.chmod(0o640)
    for attempt in (Identity.is_encrypted, Identity.load):
        with pytest.raises(UsageError, match="others can reach"):
            attempt(path)


@pytest.mark.parametrize("passphrase", [b"", b"x" * 1025])
def test_a_passphrase_that_is_none_writes_nothing(
    passphrase: bytes, alice: Identity, closed: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="passphrase"):
        alice.save(tmp_path / "new", passphrase)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="passphrase"):
        Identity.load(written(tmp_path, closed), passphrase)


def nobody() -> str:
    raise AssertionError("nobody is asked where there is a file")


@pytest.mark.parametrize(
    ("content", "passphrase"),
    [
        (b"secret", b"secret"),
        (b"secret\n", b"secret"),
        (b"secret\r\n", b"secret"),
        (b"secret\n\n", b"secret\n"),
        (b" a b \n", b" a b "),
        (b"x" * 1024 + b"\n", b"x" * 1024),
        (b"", None),
        (b"\n", None),
        (b"x" * 1025, None),
        (b"x" * 5000, None),
        (b"xxx\xff" * 300, None),
    ],
)
def test_a_passphrase_file(content: bytes, passphrase: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "passphrase"
    path.touch(0o600)
    path.write_bytes(content)
    if passphrase is not None:
        assert read_passphrase(path, nobody) == passphrase
        return
    with pytest.raises(UsageError, match=str(path)) as caught:
        read_passphrase(path, nobody)
    assert_no_leak(caught.value, "xxx")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_passphrase_file_that_others_can_reach(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "passphrase"
    path.write_bytes(b"secret")
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}"):
        read_passphrase(path, nobody)


def test_a_passphrase_that_is_asked_for_is_utf8() -> None:
    assert read_passphrase(None, lambda: "žluť") == b"\xc5\xbelu\xc5\xa5"
    with pytest.raises(UsageError, match="empty"):
        read_passphrase(None, lambda: "")
    with pytest.raises(UsageError, match="half a surrogate pair") as caught:
        read_passphrase(None, lambda: "canary \ud800")
    assert_no_leak(caught.value, "canary")
