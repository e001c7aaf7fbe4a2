"""The auditor's signature: it holds for the very files and the very auditor, and for nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attacks import cli
from attacks.signature import SIGNATURE, sign_audit, verify_audit
from securefl.console import run_app
from securefl.crypto.identity import Identity
from securefl.errors import BadSignature, UsageError

FILES = ("audit.json", "report.html", "audit.md")


@pytest.fixture(scope="module")
def auditor() -> Identity:
    return Identity.generate("auditor")


@pytest.fixture
def folder(tmp_path: Path, auditor: Identity) -> Path:
    for name in FILES:
        (tmp_path / name).write_text(f"this is {name}")
    sign_audit(tmp_path, FILES, auditor, 1_800_000_000)
    return tmp_path


def test_it_holds_and_says_who_and_what(folder: Path, auditor: Identity) -> None:
    signed = verify_audit(folder, auditor.card)
    assert (signed.auditor, signed.time) == (auditor.card.fingerprint, 1_800_000_000)
    assert sorted(signed.files) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_named(folder: Path, auditor: Identity, name: str) -> None:
    (folder / name).write_text(f"this is {name}.")
    with pytest.raises(BadSignature, match=f"{name}: was changed after auditor signed"):
        verify_audit(folder, auditor.card)
    (folder / name).unlink()
    with pytest.raises(UsageError, match=name):
        verify_audit(folder, auditor.card)


def test_another_auditor_and_another_text_do_not_hold(folder: Path, auditor: Identity) -> None:
    other = Identity.generate("auditor")
    with pytest.raises(BadSignature, match="by another"):
        verify_audit(folder, other.card)
    path = folder / SIGNATURE
    document = json.loads(path.read_bytes())
    for change in ({"time": 1}, {"files": {"../audit.json": "0" * 64}}, {"auditor": other.card.fingerprint}):
        forged = json.dumps({**document, **change}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        path.write_bytes(forged)
        with pytest.raises(BadSignature):
            verify_audit(folder, auditor.card)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"signature":1}\n', b'{"files":{},"signature":{}}\n']
)
def test_bytes_that_are_no_signature(folder: Path, auditor: Identity, data: bytes) -> None:
    (folder / SIGNATURE).write_bytes(data)
    with pytest.raises(UsageError, match=SIGNATURE):
        verify_audit(folder, auditor.card)


def test_the_command(folder: Path, auditor: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    card = folder / "auditor.card.json"
    auditor.card.save(card)
    arguments = ["verify", str(folder), "--card", str(card)]
    assert run_app(cli.app, "securefl-audit", arguments) == 0
    assert "signed by auditor" in capsys.readouterr().out
    assert run_app(cli.app, "securefl-audit", [*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auditor"] == auditor.card.fingerprint
    (folder / "audit.json").write_text("{}")
    assert run_app(cli.app, "securefl-audit", arguments) == 4
    assert "was changed" in capsys.readouterr().err
