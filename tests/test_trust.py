"""Rotations, revocations, and the store of cards that are believed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PublicKey

from securefl.crypto.identity import Card, Identity, from_base64
from securefl.crypto.statements import Revocation, Rotation, parse_statement
from securefl.crypto.trust import TrustStore
from securefl.errors import BadSignature, Refused, Replayed, SecureflError, UnknownSender, UsageError
from securefl.files import write_atomic, write_new

SIZES = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}


def identity(name: str, tag: int) -> Identity:
    return Identity(name, {half: bytes([tag]) * size for half, size in SIZES.items()})


A, B, C, D = (identity("hospital", tag) for tag in (1, 2, 3, 4))
OTHER = identity("clinic", 5)
A_TO_B, B_TO_C, C_TO_D = (Rotation.make(old, new.card).data for old, new in ((A, B), (B, C), (C, D)))
A_REVOKED, B_REVOKED = (Revocation.make(key).data for key in (A, B))


@pytest.fixture
def store(tmp_path: Path) -> TrustStore:
    """A store that believes A."""
    made = TrustStore.open(tmp_path / "store", create=True)
    made.add(A.card, A.card.fingerprint)
    return made


def believed(store: TrustStore) -> list[str]:
    """Fingerprints, read anew from the folder."""
    return [card.fingerprint for card in TrustStore.open(store.path).cards().values()]


def canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def altered(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(data)
    change(document)
    return canonical(document) + b"\n"


# --- statements


@pytest.mark.parametrize(
    ("data", "context", "fields"),
    [
        (A_TO_B, b"securefl/1 rotation", {"format", "old", "card", "signature"}),
        (A_REVOKED, b"securefl/1 revocation", {"format", "card", "signature"}),
    ],
    ids=["rotation", "revocation"],
)
def test_the_signed_bytes_are_those_of_the_written_format(
    data: bytes, context: bytes, fields: set[str]
) -> None:
    document = json.loads(data)
    assert data == canonical(document) + b"\n"
    assert set(document) == fields
    signature = document.pop("signature")
    message = len(context).to_bytes(4, "big") + context + hashlib.sha256(canonical(document)).digest()
    Ed25519PublicKey.from_public_bytes(from_base64(A.card.ed25519, 32)).verify(
        from_base64(signature["ed25519"], 64), message
    )
    MLDSA65PublicKey.from_public_bytes(from_base64(A.card.mldsa65, 1952)).verify(
        from_base64(signature["mldsa65"], 3309), message
    )


@pytest.mark.parametrize("half", ["ed25519", "mldsa65"])
@pytest.mark.parametrize("fault", ["absent", "empty", "other"])
@pytest.mark.parametrize("data", [A_TO_B, A_REVOKED], ids=["rotation", "revocation"])
def test_either_signature_alone_is_not_enough(half: str, fault: str, data: bytes, store: TrustStore) -> None:
    def spoil(document: dict[str, Any]) -> None:
        if fault == "absent":
            del document["signature"][half]
        else:
            others = OTHER.sign(b"securefl/1 rotation", bytes(32)).document()
            document["signature"][half] = "" if fault == "empty" else others[half]

    with pytest.raises(BadSignature, match="hospital"):
        store.apply(altered(data, spoil))
    assert believed(store) == [A.card.fingerprint]
    assert store.retired() == ()


@pytest.mark.parametrize("half", ["ed25519", "mldsa65"])
def test_the_new_card_of_a_rotation_proves_its_own_keys(half: str, store: TrustStore) -> None:
    """A's holder cannot name as successor a card whose keys nobody has shown to have."""
    forged = B.card.model_copy(update={"signature": {**B.card.signature, half: C.card.signature[half]}})
    data = Rotation.make(A, forged).data
    with pytest.raises(BadSignature, match=r"^the statement: the .* does not hold"):
        store.apply(data)
    assert believed(store) == [A.card.fingerprint]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(old=B.card.fingerprint),
        lambda d: d.update(card=C.card.model_dump(mode="json")),
        lambda d: d["card"].update(C.card.model_dump(mode="json")),
    ],
)
def test_no_field_of_a_rotation_can_be_replaced(change: Any, store: TrustStore) -> None:
    with pytest.raises(SecureflError):
        store.apply(altered(A_TO_B, change))
    assert believed(store) == [A.card.fingerprint]


def test_signatures_of_one_statement_are_none_of_another(store: TrustStore) -> None:
    rotation, revocation = json.loads(A_TO_B), json.loads(A_REVOKED)
    for document in (
        rotation | {"signature": revocation["signature"]},
        revocation | {"signature": rotation["signature"]},
    ):
        with pytest.raises(BadSignature):
            store.apply(canonical(document) + b"\n")


def test_a_rotation_by_another_key_is_refused(store: TrustStore) -> None:
    """A thief of the channel, not of the key."""
    forged = json.loads(Rotation.make(D, B.card).data) | {"old": A.card.fingerprint}
    with pytest.raises(BadSignature, match="hospital"):
        store.apply(canonical(forged) + b"\n")
    assert believed(store) == [A.card.fingerprint]


def test_a_rotation_keeps_the_name_and_no_key() -> None:
    with pytest.raises(UsageError, match="keeps the name hospital"):
        Rotation.make(A, OTHER.card)
    for half in SIZES:
        seeds = {name: bytes([9]) * size for name, size in SIZES.items()}
        with pytest.raises(UsageError, match="replaces all four keys"):
            Rotation.make(A, Identity("hospital", seeds | {half: bytes([1]) * SIZES[half]}).card)


def test_a_rotation_signed_to_another_name_is_refused_by_its_reader() -> None:
    """The maker's own check is not what the reader relies on."""
    card = OTHER.card.model_dump(mode="json")
    content = {"format": "securefl.rotation/1", "old": A.card.fingerprint, "card": card}
    signed = A.sign(b"securefl/1 rotation", hashlib.sha256(canonical(content)).digest()).document()
    statement = parse_statement(canonical(content | {"signature": signed}) + b"\n", "f")
    assert isinstance(statement, Rotation)
    with pytest.raises(UsageError, match="changes it to clinic"):
        statement.verify(A.card)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n",
        b"[]\n",
        b"\xff",
        b"[" * 50_000,
        A_TO_B[:-1],
        A_TO_B + b"\n",
        A_TO_B + b" " * 70_000,
        A_TO_B[:4000],
        b" " + A_TO_B,
        json.dumps(json.loads(A_TO_B), indent=1).encode(),
        A_TO_B.replace(b'{"card"', b'{"card":1,"card"', 1),
        altered(A_TO_B, lambda d: d.update(extra=1)),
        altered(A_TO_B, lambda d: d.update(format="securefl.rotation/2")),
        altered(A_TO_B, lambda d: d.update(format=["securefl.rotation/1"])),
        altered(A_TO_B, lambda d: d.update(old=7)),
        altered(A_TO_B, lambda d: d.update(old="A" * 64)),
        altered(A_TO_B, lambda d: d.update(card=None)),
        altered(A_REVOKED, lambda d: d["card"].update(extra=1)),
        altered(A_REVOKED, lambda d: d.update(old=A.card.fingerprint)),
        altered(A_REVOKED, lambda d: d.pop("signature")),
        A.card.to_json(),
    ],
)
def test_what_is_no_statement_is_one_sentence(data: bytes, store: TrustStore) -> None:
    with pytest.raises(UsageError, match=r"^file\.json: ") as caught:
        store.apply(data, "file.json")
    assert "\n" not in str(caught.value)
    assert believed(store) == [A.card.fingerprint]


# --- enrolment


@pytest.mark.parametrize(
    "spell", [str, str.upper, lambda text: text.replace(" ", ""), lambda text: f" {text}\n"]
)
def test_the_fingerprint_as_it_is_read_aloud(spell: Callable[[str], str], tmp_path: Path) -> None:
    store = TrustStore.open(tmp_path / "store", create=True)
    for given in (A.card.short_fingerprint, A.card.fingerprint):
        store.add(A.card, spell(given))
        assert store.card("hospital") == A.card


@pytest.mark.parametrize(
    "given", ["", "a", A.card.fingerprint[:31], A.card.fingerprint[:33], A.card.fingerprint + "0", "z" * 32]
)
def test_a_shorter_fingerprint_is_refused(given: str, tmp_path: Path) -> None:
    store = TrustStore.open(tmp_path / "store", create=True)
    with pytest.raises(UsageError, match="32 hexadecimal digits, or all 64"):
        store.add(A.card, given)
    assert store.cards() == {}


def test_another_fingerprint_is_refused(tmp_path: Path) -> None:
    store = TrustStore.open(tmp_path / "store", create=True)
    last = "0" if A.card.fingerprint[-1] != "0" else "1"
    for given in (B.card.fingerprint, B.card.short_fingerprint, A.card.fingerprint[:-1] + last):
        with pytest.raises(UnknownSender, match="hospital has another fingerprint"):
            store.add(A.card, given)
    assert store.cards() == {}


def test_a_name_has_one_key(store: TrustStore) -> None:
    with pytest.raises(UsageError, match=r"another key pinned .*trust revoke hospital"):
        store.add(B.card, B.card.fingerprint)
    store.add(A.card, A.card.fingerprint)
    store.add(OTHER.card, OTHER.card.fingerprint)
    assert store.cards() == {"clinic": OTHER.card, "hospital": A.card}


@pytest.mark.parametrize("name", ["nobody", "../hospital", "", "HOSPITAL", "retired", "hospital\n"])
def test_an_unknown_name_says_how_to_enrol(name: str, store: TrustStore) -> None:
    with pytest.raises(UnknownSender, match=r"is not enrolled .* securefl trust add") as caught:
        store.card(name)
    assert "\n" not in str(caught.value)


# --- rotation and revocation


def test_a_chain_of_rotations_in_order(store: TrustStore) -> None:
    for data, new in ((A_TO_B, B), (B_TO_C, C), (C_TO_D, D)):
        done = store.apply(data)
        assert (done.changed, done.card) == (True, new.card)
        assert believed(store) == [new.card.fingerprint]
        again = store.apply(data)
        assert (again.changed, again.card) == (False, new.card)
    assert [(key.fingerprint, key.why, key.successor) for key in store.retired()] == sorted(
        (old.card.fingerprint, "rotation", new.card.fingerprint) for old, new in ((A, B), (B, C), (C, D))
    )


def test_out_of_order_the_error_says_which_is_missing(store: TrustStore) -> None:
    with pytest.raises(UsageError, match=f"apply the rotation from {A.card.short_fingerprint} first"):
        store.apply(B_TO_C)
    assert believed(store) == [A.card.fingerprint]
    store.apply(A_TO_B)
    store.apply(B_TO_C)
    assert believed(store) == [C.card.fingerprint]


def test_nothing_brings_a_retired_key_back(store: TrustStore) -> None:
    store.apply(A_TO_B)
    store.apply(B_TO_C)
    with pytest.raises(Replayed, match="is of the past"):
        store.apply(A_TO_B)
    for old in (A, B):
        assert store.is_retired(old.card.fingerprint)
        with pytest.raises(Refused, match="never believed again"):
            store.add(old.card, old.card.fingerprint)
        with pytest.raises(Refused, match="never believed again"):
            store.apply(Rotation.make(C, old.card).data)
    (store.path / "hospital.card.json").write_bytes(A.card.to_json())
    assert believed(store) == []
    with pytest.raises(UnknownSender):
        store.card("hospital")


def test_a_rotation_of_nobody(tmp_path: Path) -> None:
    store = TrustStore.open(tmp_path / "store", create=True)
    with pytest.raises(UnknownSender, match="trust add"):
        store.apply(A_TO_B)
    assert (store.cards(), store.retired()) == ({}, ())


def test_a_second_successor_of_one_key_is_refused(store: TrustStore) -> None:
    store.apply(A_TO_B)
    with pytest.raises(Replayed):
        store.apply(Rotation.make(A, C.card).data)
    assert believed(store) == [B.card.fingerprint]


def test_a_revocation_is_for_ever(store: TrustStore) -> None:
    store.add(OTHER.card, OTHER.card.fingerprint)
    done = store.apply(A_REVOKED)
    assert (done.changed, done.card, done.retired) == (True, None, A.card.fingerprint)
    assert store.apply(A_REVOKED).changed is False
    assert believed(store) == [OTHER.card.fingerprint]
    with pytest.raises(Refused):
        store.add(A.card, A.card.fingerprint)
    with pytest.raises(UnknownSender):
        store.apply(A_TO_B)
    store.add(B.card, B.card.fingerprint)
    assert store.card("hospital") == B.card


def test_a_revocation_before_its_card_was_ever_seen(tmp_path: Path) -> None:
    store = TrustStore.open(tmp_path / "store", create=True)
    store.apply(A_REVOKED)
    with pytest.raises(Refused):
        store.add(A.card, A.card.fingerprint)


@pytest.mark.parametrize("order", [[A_TO_B, A_REVOKED], [A_REVOKED, A_TO_B], [A_TO_B, B_TO_C, A_REVOKED]])
def test_who_stole_a_key_gains_nothing_by_rotating_it(order: list[bytes], store: TrustStore) -> None:
    """The outcome does not depend on who was faster: the thief's rotation, or the owner's revocation."""
    for data in order:
        try:
            store.apply(data)
        except UnknownSender:
            assert order[0] == A_REVOKED
    assert believed(store) == []
    tip = C if B_TO_C in order else B
    store.add(tip.card, tip.card.fingerprint)  # its holder has confirmed it
    assert store.apply(A_REVOKED).changed is False
    assert believed(store) == [tip.card.fingerprint]


def test_a_revocation_leaves_what_another_key_named(store: TrustStore) -> None:
    store.apply(A_TO_B)
    store.apply(B_TO_C)
    store.revoke("hospital", "lost")
    store.add(D.card, D.card.fingerprint)
    done = store.apply(B_REVOKED)
    assert (done.card, done.dropped) == (D.card, None)
    assert believed(store) == [D.card.fingerprint]


def test_the_owners_own_decision(store: TrustStore) -> None:
    assert store.revoke("hospital", "left the consortium") == A.card
    assert believed(store) == []
    (key,) = store.retired()
    assert (key.name, key.fingerprint, key.why, key.reason) == (
        "hospital",
        A.card.fingerprint,
        "owner",
        "left the consortium",
    )
    with pytest.raises(Refused):
        store.add(A.card, A.card.fingerprint)
    with pytest.raises(UnknownSender):
        store.revoke("hospital", "again")
    store.add(B.card, B.card.fingerprint)
    for reason in ("", "x" * 401):
        with pytest.raises(UsageError, match="reason"):
            store.revoke("hospital", reason)
    assert believed(store) == [B.card.fingerprint]


# --- crashes


class Crash(BaseException):
    """The power fails."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Make change `number` (from 1) of the store's folder fail before it happens; the changes that began."""
    begun: list[str] = []

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def change(*arguments: object, **named: object) -> object:
            begun.append(name)
            if len(begun) == number:
                raise Crash
            return real(*arguments, **named)

        return change

    monkeypatch.setattr("securefl.crypto.trust.write_new", counted("write_new", write_new))
    monkeypatch.setattr("securefl.crypto.trust.write_atomic", counted("write_atomic", write_atomic))
    monkeypatch.setattr(TrustStore, "_unpin", counted("unpin", TrustStore._unpin))
    return begun


STEPS: dict[str, tuple[list[bytes], Callable[[TrustStore], object], Identity | None]] = {
    "rotation": ([], lambda store: store.apply(A_TO_B), B),
    "revocation": ([], lambda store: store.apply(A_REVOKED), None),
    "revocation after rotation": ([A_TO_B], lambda store: store.apply(A_REVOKED), None),
    "owner": ([], lambda store: store.revoke("hospital", "lost"), None),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_between_two_writes_trusts_no_retired_key_and_can_be_repeated(
    step: str, store: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, act, after = STEPS[step]
    for data in before:
        store.apply(data)
    with monkeypatch.context() as patch:
        begun = crash_at(patch, 2)
        with pytest.raises(Crash):
            act(store)
    assert len(begun) == 2, "there is a place between two writes"
    assert TrustStore.open(store.path).is_retired(A.card.fingerprint)
    assert believed(store) == []
    with pytest.raises(UnknownSender):
        store.card("hospital")
    with pytest.raises(Refused):
        store.add(A.card, A.card.fingerprint)
    act(TrustStore.open(store.path))
    assert believed(store) == ([after.card.fingerprint] if after else [])


def test_a_crash_at_the_first_write_changes_nothing(
    store: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        crash_at(patch, 1)
        with pytest.raises(Crash):
            store.apply(A_TO_B)
    assert believed(store) == [A.card.fingerprint]
    assert store.retired() == ()


def test_an_unfinished_rotation_is_finished_from_its_own_record(
    store: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        crash_at(patch, 2)
        with pytest.raises(Crash):
            store.apply(A_TO_B)
    record = store.path / "retired" / f"{A.card.fingerprint}.json"
    with pytest.raises(UnknownSender, match=f"trust apply {record} --store {store.path}"):
        store.card("hospital")
    with pytest.raises(Refused):  # by the thief of A, in the meantime
        store.apply(Rotation.make(A, C.card).data)
    store.apply(record.read_bytes())
    assert believed(store) == [B.card.fingerprint]


def test_leftovers_of_a_crash_are_no_cards(store: TrustStore) -> None:
    (store.path / ".hospital.card.json.0123456789abcdef.tmp").write_bytes(b"{")
    (store.path / "retired" / f".{B.card.fingerprint}.json.0123456789abcdef.tmp").write_bytes(b"{")
    assert believed(store) == [A.card.fingerprint]
    assert store.retired() == ()
    assert not store.is_retired(B.card.fingerprint)


# --- hostile folders


def replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pin: replace(pin, b"{"), "is not a securefl card"),
        (lambda pin: replace(pin, b"x" * 100_000), "too large"),
        (lambda pin: replace(pin, OTHER.card.to_json()), "holds the card of clinic"),
        (
            lambda pin: replace(pin, altered(A.card.to_json(), lambda d: d.update(x25519=B.card.x25519))),
            "does not hold",
        ),
        (lambda pin: pin.chmod(0o664), "others can change a card"),
        (lambda pin: pin.chmod(0o646), "others can change a card"),
        (lambda pin: pin.parent.chmod(0o770), "others can change a trust store"),
        (lambda pin: pin.parent.chmod(0o1777), "others can change a trust store"),
        (lambda pin: (pin.parent / "retired").chmod(0o772), "others can change a trust store"),
        (lambda pin: (pin.parent / "retired").rmdir(), "is not a usable trust store"),
        (lambda pin: (pin.unlink(), pin.mkdir()), "not an ordinary file"),
        (make_pipe, "not an ordinary file"),
        (link, "it is a link"),
    ],
)
def test_a_store_that_is_not_to_be_believed(
    spoil: Callable[[Path], object], says: str, store: TrustStore
) -> None:
    spoil(store.path / "hospital.card.json")
    for act in (
        lambda: TrustStore.open(store.path).cards(),
        lambda: store.cards(),
        lambda: store.card("hospital"),
        lambda: store.apply(A_TO_B),
        lambda: store.revoke("hospital", "lost"),
    ):
        with pytest.raises(SecureflError, match=says) as caught:
            act()
        assert str(store.path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_believed(store: TrustStore) -> None:
    pin = store.path / "hospital.card.json"
    os.chown(pin, 12345, -1)
    with pytest.raises(UsageError, match="must belong to the user"):
        store.card("hospital")
    os.chown(pin, 0, -1)
    os.chown(store.path, 12345, -1)
    with pytest.raises(UsageError, match="must belong to the user"):
        TrustStore.open(store.path)


def test_a_file_that_is_named_after_no_card(store: TrustStore) -> None:
    (store.path / "Hospital B.card.json").write_bytes(B.card.to_json())
    with pytest.raises(UsageError, match=r"Hospital B\.card\.json: is not named after a card"):
        store.cards()


@pytest.mark.parametrize("content", [b"", b"junk", B_REVOKED, b"x" * 100_000])
def test_a_damaged_record_still_retires_its_key(content: bytes, store: TrustStore) -> None:
    record = store.path / "retired" / f"{A.card.fingerprint}.json"
    record.write_bytes(content)
    assert believed(store) == []
    with pytest.raises(Refused):
        store.add(A.card, A.card.fingerprint)
    with pytest.raises(UsageError, match=str(record)):
        store.retired()


def test_a_store_is_made_in_a_new_or_empty_folder_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="securefl trust add"):
        TrustStore.open(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    (tmp_path / "keys").mkdir()
    A.card.save(tmp_path / "keys" / "hospital.card.json")
    with pytest.raises(UsageError, match="is not a usable trust store"):
        TrustStore.open(tmp_path / "keys", create=True)
    (tmp_path / "empty").mkdir(mode=0o755)
    made = TrustStore.open(tmp_path / "empty", create=True)
    made.add(A.card, A.card.fingerprint)
    assert TrustStore.open(tmp_path / "empty", create=True).cards() == {"hospital": A.card}


def test_a_card_read_from_the_store_is_that_of_its_file(store: TrustStore) -> None:
    assert Card.load(store.path / "hospital.card.json") == store.card("hospital")
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        store.is_retired("../hospital.card")
