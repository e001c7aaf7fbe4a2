"""`securefl ledger` as a user types it: exit codes, one sentence, one JSON document."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from securefl.cli import app
from securefl.console import run_app
from securefl.crypto.identity import Identity
from securefl.ledger import Ledger, head_path, verify_ledger
from securefl.receipt import make_receipt
from tests.ledgers import RUN, SILO, charge, clock, finished_ledger, gaussian, lines_of, refuse


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def ledger(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> Ran:
        code = run_app(app, "securefl", ["ledger", *map(str, arguments)])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger, and the silo's key beside it."""
    SILO.save(tmp_path / "silo-1.key")
    return finished_ledger(tmp_path / "silo-1.jsonl")


def test_begin(ledger: Command, tmp_path: Path) -> None:
    SILO.save(tmp_path / "closed.key", b"correct horse")
    words, path = tmp_path / "words", tmp_path / "silo-1.jsonl"
    words.write_bytes(b"correct horse\n")
    words.chmod(0o600)
    SILO.save(tmp_path / "silo-1.key")
    arguments = ("begin", path, "--key", tmp_path / "silo-1.key")
    done = ledger(*arguments[:-1], tmp_path / "closed.key", "--passphrase-file", words, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {
        "path": str(path),
        "name": "silo-1",
        "fingerprint": SILO.card.fingerprint,
    }
    assert verify_ledger(path, SILO.card).entries == 1
    again = ledger(*arguments)
    assert (again.code, again.out) == (2, "")
    assert "exists already" in again.err
    charge(Ledger.open(path, SILO))
    path.unlink()
    gone = ledger(*arguments)
    assert (gone.code, gone.out) == (2, "")
    assert "is missing, but had 2 lines" in gone.err


def test_rotate(ledger: Command, path: Path, tmp_path: Path) -> None:
    new = Identity.generate("silo-1")
    new.save(tmp_path / "new.key", b"correct horse")
    words = tmp_path / "words"
    words.write_bytes(b"correct horse\n")
    words.chmod(0o600)
    new.save(tmp_path / "plain.key")
    arguments = ("rotate", path, "--old-key", tmp_path / "silo-1.key", "--new-key")
    assert ledger(*arguments, tmp_path / "silo-1.key").code == 2
    closed = (tmp_path / "new.key", "--new-passphrase-file", words)
    for changed, key in ((True, closed), (False, (tmp_path / "plain.key",))):
        done = ledger(*arguments, *key, "--json")
        assert (done.code, done.err) == (0, "")
        assert json.loads(done.out) == {
            "path": str(path),
            "name": "silo-1",
            "old_fingerprint": SILO.card.fingerprint,
            "fingerprint": new.card.fingerprint,
            "changed": changed,
        }
    said = ledger(*arguments, tmp_path / "plain.key").out
    assert "was done already" in said
    assert f"goes on under the key {new.card.short_fingerprint} of silo-1" in said
    assert verify_ledger(path, new.card).entries == 6
    back = ledger(
        *("rotate", path, "--old-key", tmp_path / "new.key", "--old-passphrase-file", words),
        *("--new-key", tmp_path / "silo-1.key"),
    )
    assert (back.code, back.out) == (2, "")


@pytest.mark.parametrize("place", ["", "/", ".", "/dev/null", "missing/../x/..", "x" * 300 + ".jsonl"])
def test_a_place_that_cannot_be_is_one_sentence(
    ledger: Command, path: Path, tmp_path: Path, place: str
) -> None:
    key = ("--key", tmp_path / "silo-1.key")
    ledger("export", path, "--out", tmp_path / "copy")
    ledger("restore", tmp_path / "copy", "--out", tmp_path / "again.jsonl", *key)
    for arguments in (
        ("begin", place, *key),
        ("restore", tmp_path / "copy", "--out", place, *key),
        ("export", path, "--out", place),
        ("verify", place),
        ("confirm", tmp_path / "again.jsonl", *key, "--head", place),
    ):
        done = ledger(*arguments)
        assert (done.code, done.out) == (2, "")
        assert len(done.err.strip().splitlines()) == 1
        assert "Traceback" not in done.err


def test_verify(ledger: Command, path: Path) -> None:
    refuse(Ledger.open(path, SILO), round=4)
    done = ledger("verify", path)
    first, contents, account = done.out.splitlines()
    assert (done.code, first, done.err) == (0, f"{path}: 6 entries of silo-1 verify", "")
    sizes = sum(entry.bytes for entry in verify_ledger(path).releases)
    assert contents == f"4 releases ({sizes} bytes), 1 refusals, 0 approvals"
    epsilon = verify_ledger(path).account.private_epsilon
    assert f"the private releases have epsilon {epsilon:.4g} at delta 1e-06" in account
    assert account.endswith("; 2 releases have no epsilon")
    document = json.loads(ledger("verify", path, "--json").out)
    summary = verify_ledger(path)
    accounts = document.pop("accounts")
    assert document == {
        "verified": True,
        "name": "silo-1",
        "fingerprint": SILO.card.fingerprint,
        "entries": 6,
        "releases": 4,
        "refusals": 1,
        "approvals": 0,
        "restored": False,
        "head": hashlib.sha256(lines_of(path)[-1]).hexdigest(),
        "notes": [],
    }
    assert accounts == {"notes": summary.account.model_dump(mode="json")}


def test_verify_names_the_first_bad_entry(ledger: Command, path: Path) -> None:
    lines = lines_of(path)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"round":2', b'"round":9'), *lines[3:]]))
    for arguments in (("verify", path), ("verify", path, "--json")):
        done = ledger(*arguments)
        assert (done.code, done.out) == (4, "")
        assert f"{path}: line 3: the signature does not hold" in done.err


def test_verify_shows_what_a_crash_left(ledger: Command, path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"entry"')
    done = ledger("verify", path)
    assert done.code == 0
    assert "note: the last line broke off" in done.out


def test_there_and_back_by_the_head(ledger: Command, path: Path, tmp_path: Path) -> None:
    copy, again, kept = tmp_path / "copy", tmp_path / "again.jsonl", tmp_path / "kept.json"
    assert f"{copy}: a copy of 5 entries of silo-1" in ledger("export", path, "--out", copy).out
    charge(Ledger.open(path, SILO, clock()), round=9, step="share", claim=gaussian(1.2))
    shutil.copy(head_path(path), kept)
    key = ("--key", tmp_path / "silo-1.key")
    done = ledger("restore", copy, "--out", again, *key)
    assert done.code == 0
    assert "no private release is made until `securefl ledger confirm`" in done.out
    assert json.loads(ledger("verify", again, "--json").out)["restored"] is True
    document = json.loads(ledger("confirm", again, *key, "--head", kept, "--json").out)
    assert document["restored"] is False
    assert document["accounts"]["notes"]["mu"] == pytest.approx(1.3, abs=1e-12)
    twice = ledger("confirm", again, *key, "--head", kept)
    assert (twice.code, twice.out) == (3, "")
    assert "nothing to confirm" in twice.err


def test_there_and_back_by_a_receipt(ledger: Command, path: Path, tmp_path: Path) -> None:
    server, copy, again = Identity.generate("server"), tmp_path / "copy", tmp_path / "again.jsonl"
    server.card.save(tmp_path / "server.card.json")
    charge(Ledger.open(path, SILO, clock()), round=9, envelope=b"the last")
    (tmp_path / "receipt.json").write_bytes(
        make_receipt(
            server,
            run=RUN,
            silo=SILO.card.fingerprint,
            sequence=5,
            envelope_sha256=hashlib.sha256(b"the last").hexdigest(),
            time=1_760_000_000,
        )
    )
    exported = json.loads(ledger("export", path, "--out", copy, "--json").out)
    assert (exported["entries"], exported["out"]) == (6, str(copy))
    key = ("--key", tmp_path / "silo-1.key")
    assert json.loads(ledger("restore", copy, "--out", again, *key, "--json").out)["restored"] is True
    alone = ledger("confirm", again, *key, "--receipt", tmp_path / "receipt.json")
    assert alone.code == 2
    assert "card of the server" in alone.err
    done = ledger(
        "confirm",
        again,
        *key,
        *("--receipt", tmp_path / "receipt.json", "--server", tmp_path / "server.card.json"),
    )
    assert done.code == 0
    assert f"{again}: confirmed; 8 entries of silo-1\n" in done.out
    assert "If anything left after that, its budget is not counted." in done.out


def test_an_encrypted_key_opens_by_its_passphrase(ledger: Command, path: Path, tmp_path: Path) -> None:
    SILO.save(tmp_path / "closed.key", b"correct horse")
    words = tmp_path / "words"
    words.write_bytes(b"correct horse\n")
    words.chmod(0o600)
    ledger("export", path, "--out", tmp_path / "copy")
    arguments = (
        "restore",
        tmp_path / "copy",
        "--out",
        tmp_path / "again.jsonl",
        "--key",
        tmp_path / "closed.key",
    )
    assert ledger(*arguments, "--passphrase-file", words).code == 0
    words.write_bytes(b"wrong\n")
    wrong = ledger(
        "confirm", tmp_path / "again.jsonl", *arguments[-2:], "--head", path, "--passphrase-file", words
    )
    assert wrong.code == 2
    assert "passphrase" in wrong.err
    assert "wrong\n" not in wrong.err


def test_what_exists_is_kept(ledger: Command, path: Path, tmp_path: Path) -> None:
    ledger("export", path, "--out", tmp_path / "copy")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert ledger("export", path, "--out", tmp_path / "copy").code == 2
    assert ledger("restore", tmp_path / "copy", "--out", path, "--key", tmp_path / "silo-1.key").code == 2
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", ["begin", "rotate", "verify", "export", "restore", "confirm"])
def test_help_has_an_example(ledger: Command, command: str) -> None:
    done = ledger(command, "--help")
    assert done.code == 0
    assert f"Example: securefl ledger {command} " in done.out
    assert "--json" in done.out
