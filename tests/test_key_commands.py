"""`keygen`, `rotate`, `revoke` and `trust` as a user types them, on a terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securefl.cli import app
from securefl.console import run_app
from securefl.crypto.identity import Card, Identity
from securefl.crypto.statements import Revocation, Rotation, parse_statement
from securefl.crypto.trust import TrustStore

SIZES = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}
SECRET = "tr0ub4dor&3"


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def securefl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*arguments: object) -> Ran:
        code = run_app(app, "securefl", [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert SECRET not in captured.out + captured.err
        return Ran(code, captured.out, captured.err)

    return call


Securefl = Callable[..., Ran]


def refused(ran: Ran, code: int, says: str) -> None:
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def key_file(folder: Path, name: str = "hospital", tag: int = 1) -> Path:
    """NAME.key and NAME.card.json, not encrypted."""
    folder.mkdir(exist_ok=True)
    identity = Identity(name, {half: bytes([tag]) * size for half, size in SIZES.items()})
    identity.save(folder / f"{name}.key")
    identity.card.save(folder / f"{name}.card.json")
    return folder / f"{name}.key"


@pytest.fixture
def passphrase_file(tmp_path: Path) -> Path:
    path = tmp_path / "passphrase"
    path.touch(0o600)
    path.write_text(SECRET + "\n")
    return path


@pytest.mark.parametrize(
    "command",
    ["keygen", "rotate", "revoke", "trust add", "trust list", "trust apply", "trust revoke"],
)
def test_help_has_an_example(command: str, securefl: Securefl) -> None:
    ran = securefl(*command.split(), "--help")
    assert f"Example: securefl {command} " in ran.out


# --- keygen


def test_keygen_with_a_passphrase_file(securefl: Securefl, passphrase_file: Path, tmp_path: Path) -> None:
    made = securefl(
        "keygen", "hospital", "--out", tmp_path / "k", "--passphrase-file", passphrase_file, "--json"
    )
    key = tmp_path / "k" / "hospital.key"
    card = Card.load(tmp_path / "k" / "hospital.card.json")
    assert made.document == {
        "name": "hospital",
        "key": str(key),
        "card": str(tmp_path / "k" / "hospital.card.json"),
        "encrypted": True,
        "continued": False,
        "fingerprint": card.fingerprint,
    }
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert json.loads(key.read_bytes())["format"] == "securefl.identity-encrypted/1"
    assert Identity.load(key, SECRET.encode()).card == card


def test_keygen_without_a_passphrase_says_so(securefl: Securefl, tmp_path: Path) -> None:
    made = securefl("keygen", "hospital", "--out", tmp_path / "k")
    assert "hospital.key (not encrypted)" in made.out
    card = Card.load(tmp_path / "k" / "hospital.card.json")
    assert card.short_fingerprint in made.out
    assert Identity.load(tmp_path / "k" / "hospital.key").card == card


def test_keygen_that_cannot_have_its_passphrase_writes_nothing(
    securefl: Securefl, passphrase_file: Path, tmp_path: Path
) -> None:
    out = ("keygen", "hospital", "--out", tmp_path / "k")
    refused(securefl(*out, "--passphrase"), 2, "no terminal")
    refused(securefl(*out, "--passphrase", "--passphrase-file", passphrase_file), 2, "not both")
    refused(securefl(*out, "--passphrase-file", tmp_path / "absent"), 2, "cannot be read")
    passphrase_file.chmod(0o644)
    refused(securefl(*out, "--passphrase-file", passphrase_file), 2, "mode 0644")
    assert not (tmp_path / "k").exists()


# Kills `keygen` before and after every call that changes a file, in one fork each.
KILLED = """
import itertools, os, signal, sys
import securefl.crypto.identity
from securefl.cli import app
from securefl.console import run_app

def arm(point):
    moments = itertools.count(1)
    def killing(real):
        def call(*arguments, **keywords):
            if next(moments) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            done = real(*arguments, **keywords)
            if next(moments) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return done
        return call
    for name in ("open", "fsync", "link", "unlink", "mkdir"):
        setattr(os, name, killing(getattr(os, name)))

for point in itertools.count(1):
    if os.fork() == 0:
        arm(point)
        os._exit(run_app(app, "securefl", ["keygen", "hospital", "--out", f"{sys.argv[1]}/{point}/k"]))
    if not os.WIFSIGNALED(os.wait()[1]):
        break
"""


def test_a_killed_keygen_leaves_no_draft_and_is_continued(securefl: Securefl, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
    seen = set()
    for point in sorted(tmp_path.iterdir()):
        left = tuple(sorted(path.name for path in (point / "k").iterdir())) if (point / "k").exists() else ()
        seen.add(left)
        key = point / "k/hospital.key"
        before = key.read_bytes() if key.exists() else None
        again = securefl("keygen", "hospital", "--out", point / "k", "--json")
        if len(left) == 2:
            refused(again, 2, "exists already")
        else:
            assert again.document["continued"] == (before is not None)
        assert before in (None, key.read_bytes())
        assert Card.load(point / "k/hospital.card.json") == Identity.load(key).card
    assert seen == {(), ("hospital.key",), ("hospital.card.json", "hospital.key")}


def test_keygen_writes_the_missing_card_of_a_key_and_says_so(
    securefl: Securefl, passphrase_file: Path, tmp_path: Path
) -> None:
    key = key_file(tmp_path / "k")
    card = tmp_path / "k/hospital.card.json"
    expected, before = Card.load(card), key.read_bytes()
    card.unlink()
    command = ("keygen", "hospital", "--out", tmp_path / "k")
    why = "exists already and is not overwritten, and its missing card cannot be written"
    for options, says in (
        (("--passphrase",), "it is not encrypted, though --passphrase was given"),
        (("--passphrase-file", passphrase_file), "is not encrypted, though a passphrase was given"),
    ):
        ran = securefl(*command, *options)
        refused(ran, 2, says)
        assert why in ran.err
    (tmp_path / "k").chmod(0o777)
    refused(securefl(*command), 2, "others can change a folder of keys (mode 0777)")
    (tmp_path / "k").chmod(0o755)
    assert not card.exists()
    made = securefl(*command)
    assert "The private key was there without its card; no new one was made" in made.out
    assert expected.short_fingerprint in made.out
    assert (Card.load(card), key.read_bytes()) == (expected, before)

    key.rename(tmp_path / "k/clinic.key")
    refused(securefl("keygen", "clinic", "--out", tmp_path / "k"), 2, "it is the key of hospital")
    assert sorted(path.name for path in (tmp_path / "k").iterdir()) == ["clinic.key", "hospital.card.json"]


def test_keygen_writes_the_missing_card_of_an_encrypted_key(
    securefl: Securefl, passphrase_file: Path, tmp_path: Path
) -> None:
    command = ("keygen", "hospital", "--out", tmp_path / "k")
    made = securefl(*command, "--passphrase-file", passphrase_file, "--json").document
    card = Path(made["card"])
    card.unlink()
    refused(securefl(*command), 2, "is encrypted: give --passphrase-file")
    (tmp_path / "wrong").touch(0o600)
    (tmp_path / "wrong").write_text("another")
    refused(securefl(*command, "--passphrase-file", tmp_path / "wrong"), 2, "the passphrase is wrong")
    assert not card.exists()
    again = securefl(*command, "--passphrase-file", passphrase_file, "--json").document
    assert again == {**made, "continued": True}
    assert Card.load(card).fingerprint == made["fingerprint"]


def test_folders_that_commands_make_are_closed_whatever_the_umask(securefl: Securefl, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        key = securefl("keygen", "hospital", "--out", tmp_path / "there/a/b/c", "--json").document["key"]
        card = Card.load(tmp_path / "there/a/b/c/hospital.card.json")
        add = ("trust", "add", tmp_path / "there/a/b/c/hospital.card.json")
        for command in (
            ("rotate", key, "--out", tmp_path / "there/r/new"),
            ("revoke", key, "--out", tmp_path / "there/v/w/r.json"),
            (*add, "--fingerprint", card.fingerprint, "--store", tmp_path / "there/s/t"),
            ("policy", "hospital", "--out", tmp_path / "there/p/q/policy.toml"),
        ):
            assert securefl(*command).code == 0, command
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_dir()}
    assert modes.pop(tmp_path / "there") == 0o755
    assert len(modes) == 3 + 2 + 2 + 3 + 2
    assert set(modes.values()) == {0o700}


# --- rotate


def test_rotate_makes_a_new_key_that_the_old_one_names(securefl: Securefl, tmp_path: Path) -> None:
    old = key_file(tmp_path / "old")
    before = {path.name: path.read_bytes() for path in old.parent.iterdir()}
    made = securefl("rotate", old, "--out", tmp_path / "new", "--json").document
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "hospital.card.json",
        "hospital.key",
        "hospital.rotation.json",
    ]
    assert {path.name: path.read_bytes() for path in old.parent.iterdir()} == before
    new = Identity.load(Path(made["key"]))
    statement = parse_statement(Path(made["rotation"]).read_bytes(), "f")
    assert isinstance(statement, Rotation)
    statement.verify(Identity.load(old).card)
    assert statement.card == new.card == Card.load(Path(made["card"]))
    assert (made["name"], made["fingerprint"], made["encrypted"]) == ("hospital", new.card.fingerprint, False)
    assert made["old_fingerprint"] == Identity.load(old).card.fingerprint


def test_rotate_never_weakens_or_overwrites(
    securefl: Securefl, passphrase_file: Path, tmp_path: Path
) -> None:
    identity = Identity.load(key_file(tmp_path / "plain"))
    (tmp_path / "old").mkdir()
    old = tmp_path / "old" / "a.key"
    identity.save(old, SECRET.encode())
    refused(securefl("rotate", old, "--out", tmp_path / "new"), 2, "give --passphrase-file")
    refused(securefl("rotate", old, "--out", tmp_path / "old"), 2, "folder of the old key")
    assert not (tmp_path / "new").exists()
    arguments = ("rotate", old, "--out", tmp_path / "new", "--passphrase-file", passphrase_file)
    assert securefl(*arguments, "--json").document["encrypted"] is True
    new = tmp_path / "new" / "hospital.key"
    assert Identity.load(new, SECRET.encode()).card != identity.card
    kept = {path: path.read_bytes() for path in new.parent.iterdir()}
    refused(securefl(*arguments), 2, "exists already")
    assert {path: path.read_bytes() for path in new.parent.iterdir()} == kept


def test_rotate_with_a_new_passphrase(securefl: Securefl, passphrase_file: Path, tmp_path: Path) -> None:
    old = key_file(tmp_path / "old")
    wrong = securefl("rotate", old, "--out", tmp_path / "new", "--passphrase-file", passphrase_file)
    refused(wrong, 2, "is not encrypted, though a passphrase was given")
    made = securefl(
        "rotate", old, "--out", tmp_path / "new", "--new-passphrase-file", passphrase_file, "--json"
    )
    assert Identity.load(Path(made.document["key"]), SECRET.encode()).name == "hospital"


@pytest.mark.parametrize("taken", ["hospital.key", "hospital.card.json", "hospital.rotation.json"])
def test_rotate_leaves_no_half(taken: str, securefl: Securefl, tmp_path: Path) -> None:
    old = key_file(tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / taken).write_text("kept")
    refused(securefl("rotate", old, "--out", tmp_path / "new"), 2, "exists already")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [taken]
    assert (tmp_path / "new" / taken).read_text() == "kept"


# --- revoke


def test_revoke_writes_a_statement_of_the_key(
    securefl: Securefl, passphrase_file: Path, tmp_path: Path
) -> None:
    identity = Identity.load(key_file(tmp_path / "plain"))
    identity.save(tmp_path / "a.key", SECRET.encode())
    out = tmp_path / "a.revocation.json"
    refused(securefl("revoke", tmp_path / "a.key", "--out", out), 2, "give --passphrase-file")
    arguments = ("revoke", tmp_path / "a.key", "--out", out, "--passphrase-file", passphrase_file)
    assert securefl(*arguments, "--json").document == {
        "name": "hospital",
        "revocation": str(out),
        "fingerprint": identity.card.fingerprint,
    }
    statement = parse_statement(out.read_bytes(), "f")
    assert isinstance(statement, Revocation)
    assert statement.card == identity.card
    refused(securefl(*arguments), 2, "exists already")
    assert parse_statement(out.read_bytes(), "f") == statement


# --- trust


def test_the_life_of_a_trusted_card(securefl: Securefl, tmp_path: Path) -> None:
    old = key_file(tmp_path / "old")
    card = Card.load(tmp_path / "old" / "hospital.card.json")
    store = ("--store", tmp_path / "store")
    add = ("trust", "add", tmp_path / "old" / "hospital.card.json", *store)
    spoken = card.short_fingerprint.upper()
    assert securefl(*add, "--fingerprint", spoken, "--json").document == {
        "name": "hospital",
        "fingerprint": card.fingerprint,
        "store": str(tmp_path / "store"),
    }
    assert f"trusted  {card.short_fingerprint}  hospital" in securefl("trust", "list", *store).out

    new = securefl("rotate", old, "--out", tmp_path / "new", "--json").document
    apply = ("trust", "apply", new["rotation"], *store)
    applied = securefl(*apply, "--json").document
    assert applied == {
        "name": "hospital",
        "statement": "rotation",
        "changed": True,
        "retired": card.fingerprint,
        "fingerprint": new["fingerprint"],
        "dropped": None,
    }
    assert "was applied before" in securefl(*apply).out
    refused(securefl(*add, "--fingerprint", spoken), 3, "never believed again")
    retired = {
        "name": "hospital",
        "fingerprint": card.fingerprint,
        "why": "rotation",
        "reason": "",
        "successor": new["fingerprint"],
    }
    assert securefl("trust", "list", *store, "--json").document == {
        "store": str(tmp_path / "store"),
        "cards": [{"name": "hospital", "fingerprint": new["fingerprint"]}],
        "retired": [retired],
    }

    assert securefl("revoke", new["key"], "--out", tmp_path / "r.json").code == 0
    gone = securefl("trust", "apply", tmp_path / "r.json", *store)
    assert (gone.code, "hospital is not trusted any more" in gone.out) == (0, True)
    shown = securefl("trust", "list", *store).out
    assert "Nobody is trusted" in shown
    assert "replaced by its holder" in shown
    assert "revoked by its holder" in shown
    refused(securefl("trust", "apply", new["rotation"], *store), 4, "was revoked or replaced")


def test_a_thiefs_successor_is_dropped_and_named(securefl: Securefl, tmp_path: Path) -> None:
    old = key_file(tmp_path / "old")
    store = ("--store", tmp_path / "store")
    card = Card.load(tmp_path / "old" / "hospital.card.json")
    securefl(
        "trust", "add", tmp_path / "old" / "hospital.card.json", *store, "--fingerprint", card.fingerprint
    )
    new = securefl("rotate", old, "--out", tmp_path / "new", "--json").document
    securefl("revoke", old, "--out", tmp_path / "r.json")
    securefl("trust", "apply", new["rotation"], *store)
    told = securefl("trust", "apply", tmp_path / "r.json", *store).out
    assert Card.load(Path(new["card"])).short_fingerprint in told
    assert TrustStore.open(tmp_path / "store").cards() == {}


def test_trust_revoke(securefl: Securefl, tmp_path: Path) -> None:
    key_file(tmp_path / "old")
    store = ("--store", tmp_path / "store")
    card = Card.load(tmp_path / "old" / "hospital.card.json")
    add = ("trust", "add", tmp_path / "old" / "hospital.card.json", *store, "--fingerprint", card.fingerprint)
    assert securefl(*add).code == 0
    refused(securefl("trust", "revoke", "clinic", *store), 4, "'clinic' is not enrolled")
    ended = securefl("trust", "revoke", "hospital", *store, "--reason", "left [red]us[/]", "--json")
    assert ended.document == {"name": "hospital", "retired": card.fingerprint, "reason": "left [red]us[/]"}
    assert "hospital: left [red]us[/]" in securefl("trust", "list", *store).out, "a reason is no markup"
    refused(securefl(*add), 3, "never believed again")


def test_trust_add_without_a_fingerprint_or_with_a_wrong_one(securefl: Securefl, tmp_path: Path) -> None:
    key_file(tmp_path / "old")
    add = ("trust", "add", tmp_path / "old" / "hospital.card.json", "--store", tmp_path / "store")
    refused(securefl(*add), 2, "give --fingerprint")
    assert not (tmp_path / "store").exists()
    refused(securefl(*add, "--fingerprint", "abcd ef01"), 2, "32 hexadecimal digits")
    refused(securefl(*add, "--fingerprint", "0" * 32), 4, "another fingerprint")
    assert TrustStore.open(tmp_path / "store").cards() == {}


def test_trust_of_what_is_none(securefl: Securefl, tmp_path: Path) -> None:
    key = key_file(tmp_path / "old")
    store = ("--store", tmp_path / "absent")
    for command in (("list",), ("apply", key), ("revoke", "hospital")):
        refused(securefl("trust", *command, *store), 2, "is not a usable trust store")
    assert not (tmp_path / "absent").exists()
    TrustStore.open(tmp_path / "store", create=True)
    refused(
        securefl("trust", "apply", key, "--store", tmp_path / "store"), 2, "hospital.key: is not a signed"
    )
    (tmp_path / "store").chmod(0o777)
    refused(securefl("trust", "list", "--store", tmp_path / "store"), 2, "others can change a trust store")


# --- on a terminal

RUN = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from securefl.cli import main; main()"
)


def on_terminal(dialogue: list[tuple[str, str]], *arguments: object) -> tuple[int, str]:
    """Run a command on a terminal of its own, answering what it asks: its exit code and the screen."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        screen, seen, waiting, end = "", 0, list(dialogue), time.monotonic() + 120
        while time.monotonic() < end:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                screen += os.read(ours, 4096).decode()
            except OSError:  # the other side has closed
                break
            if waiting and waiting[0][0] in screen[seen:]:
                question, answer = waiting.pop(0)
                seen = screen.index(question, seen) + len(question)
                os.write(ours, answer.encode("utf-8", "surrogateescape") + b"\n")
        assert not waiting, screen
        return process.wait(timeout=60), screen
    finally:
        os.close(ours)


def test_a_passphrase_is_asked_for_twice_and_not_shown(tmp_path: Path) -> None:
    new, again = "Passphrase for the new key of hospital: ", "The same again: "
    code, screen = on_terminal(
        [(new, SECRET), (again, SECRET)], "keygen", "hospital", "--out", tmp_path / "k", "--passphrase"
    )
    assert (code, SECRET in screen) == (0, False)
    key = tmp_path / "k" / "hospital.key"
    assert Identity.load(key, SECRET.encode()).name == "hospital"

    code, screen = on_terminal(
        [(f"Passphrase of {key}: ", SECRET)], "revoke", key, "--out", tmp_path / "r.json"
    )
    assert (code, SECRET in screen) == (0, False)
    assert isinstance(parse_statement((tmp_path / "r.json").read_bytes(), "f"), Revocation)

    code, screen = on_terminal(
        [(new, SECRET), (again, "other")], "keygen", "hospital", "--out", tmp_path / "two", "--passphrase"
    )
    assert (code, "the two passphrases differ" in screen) == (2, True)
    assert not (tmp_path / "two").exists()

    code, screen = on_terminal(
        [(new, SECRET + "\udcff")], "keygen", "hospital", "--out", tmp_path / "two", "--passphrase"
    )
    assert (code, "is not text in the terminal's encoding" in screen, SECRET in screen) == (2, True, False)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("right", [True, False])
def test_a_fingerprint_is_asked_for_before_it_is_shown(right: bool, tmp_path: Path) -> None:
    """A "yes" to digits on the screen is given without a call; digits that are typed come from one."""
    key_file(tmp_path / "old")
    card = Card.load(tmp_path / "old" / "hospital.card.json")
    answer = card.short_fingerprint if right else "0000 " + card.short_fingerprint[5:]
    code, screen = on_terminal(
        [("reads out", answer)],
        "trust",
        "add",
        tmp_path / "old" / "hospital.card.json",
        "--store",
        tmp_path / "store",
    )
    assert code == (0 if right else 4)
    assert right or card.short_fingerprint not in screen
    assert (tmp_path / "store" / "hospital.card.json").exists() == right
