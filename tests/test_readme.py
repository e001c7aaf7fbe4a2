"""The README tells the truth: its table is the code's, its Python and its example configuration run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from securefl.cli import app
from securefl.config import parse_config, reference
from securefl.crypto.trust import TrustStore
from securefl.release import PayloadKind
from tests.federation import RUN, make_parties, tiny_config
from tests.silos import lay_out

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def _block(language: str, heading: str) -> str:
    """The one block of a language below a heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", section, re.S)
    assert len(found) == 1
    return str(found[0])


def test_the_table_of_keys_is_the_models() -> None:
    assert reference() in README, (
        "paste `python -c 'from securefl.config import reference; print(reference())'`"
    )


def test_the_example_configuration_is_valid() -> None:
    assert parse_config(tomllib.loads(_block("toml", "Your own data"))).federation.method == "fedkc"


def test_the_example_of_a_client_is_valid() -> None:
    config = parse_config(tomllib.loads(_block("toml", "In a silo")))
    assert config.client is not None
    assert config.client.peers == ("hospital-b", "hospital-c")


def test_a_client_of_a_few_lines_runs(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo = lay_out(tmp_path / "silo", tiny_encoder, tiny_data, passphrase=b"...")
    keys = silo.folder / "keys"
    keys.mkdir()
    (silo.folder / "hospital-a.key").rename(keys / "hospital-a.key")
    monkeypatch.chdir(silo.folder)
    names: dict[str, Any] = {"plan": silo.serve().outgoing()["hospital-a"]}
    exec(_block("python", "In a silo"), names)  # noqa: S102 - the README's own lines
    names["client"].close()
    assert silo.serve().receive(names["reply"]).kind is PayloadKind.MODEL


def test_the_coordinators_lines_run(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties = make_parties(tiny_config(tiny_encoder, tiny_data, protection={"models": "masked"}), tmp_path)
    labels = parties.corpus.labels
    coordinator = parties.server.identity
    (tmp_path / "keys").mkdir()
    coordinator.save(tmp_path / "keys" / "coordinator.key")
    store = TrustStore.open(tmp_path / "trust", create=True)
    for card in parties.server.roster.values():
        store.add(card, card.fingerprint)
    (tmp_path / "run.toml").write_text(f"""
[federation]
method = "fedavg"
rounds = 2
[data]
train = "nobody reads this.csv"
labels = {list(labels)}
[slm]
models = ["{tiny_encoder}"]
max_length = 16
epochs = 1
batch_size = 8
""")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "run": RUN,
        "exchange": lambda silo, plan: parties.clients[silo].handle(plan),
    }
    exec(_block("python", "The coordinator"), names)  # noqa: S102 - the README's own lines
    assert names["server"].finished
    assert not names["server"].dropped
    assert set(names["server"].metrics) == set(parties.clients)
    assert [len(opened.silos) for opened in names["server"].sums] == [3, 3], "masked is the default"


def test_every_command_in_it_exists() -> None:
    commands = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    for name in re.findall(r"^\s*(?:`)?securefl (\w[\w-]*)", README, re.M):
        assert name in commands | {"ledger", "trust"}, name


def test_ten_lines_of_python_run(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(f"""
[federation]
method = "fedkc"
rounds = 2
[data]
train = "{tiny_data / "train.csv"}"
test = "{tiny_data / "test.csv"}"
split = {{ by = "dirichlet", silos = 3, alpha = 5.0 }}
[slm]
models = ["{tiny_encoder}"]
max_length = 16
epochs = 1
[fedkc]
clusters = 2
""")
    code = _block("python", "In Python")
    assert len(code.strip().splitlines()) <= 12
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "silo-1" in done.stdout
    assert "attack=" in done.stdout


@pytest.mark.parametrize(
    "file", ["SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "securefl/crypto/WIRE.md"]
)
def test_linked_files_exist(file: str) -> None:
    assert f"({file})" in README
    assert (Path(__file__).resolve().parent.parent / file).is_file()
