"""A silo's client from its files, and the commands that work on it."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securefl.cli import app
from securefl.config import Config, load_config
from securefl.console import run_app
from securefl.crypto import envelope
from securefl.crypto.trust import TrustStore
from securefl.errors import (
    AwaitingApproval,
    ConfigError,
    DataError,
    PolicyRefusal,
    SecureflError,
    UsageError,
)
from securefl.ledger import verify_ledger
from securefl.models import load_trained
from securefl.policy import Policy
from securefl.release import PayloadKind, decode, fingerprint, release_from
from securefl.silo import open_client
from tests.silos import PASSPHRASE, Laid, lay_out

Made = Callable[..., Laid]


@pytest.fixture
def lay(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Made:
    def laid(**changes: Any) -> Laid:
        return lay_out(tmp_path / "silo", tiny_encoder, tiny_data, **changes)

    return laid


def trained_on(config: Config) -> int:
    """Rows of a silo that are not kept from training, by hand."""
    with Path(config.data.train).open(newline="", encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    digests = [hashlib.sha256(f"{config.federation.seed}/4/{text}".encode()).digest() for text in texts]
    return sum(int.from_bytes(digest[:6], "big") / 2**48 >= 0.2 for digest in digests)


def _run(*arguments: object) -> int:
    return run_app(app, "securefl", [str(argument) for argument in arguments])


def test_a_client_from_its_files_answers_a_real_server(lay: Made) -> None:
    silo = lay()
    server = silo.serve()
    client = open_client(silo.config, silo.identity)
    plan = server.outgoing()["hospital-a"]
    answer = client.handle(plan)
    server.receive(answer)
    (release,) = server.admitted().values()
    assert release is not None
    rows, held = trained_on(silo.config), 80 - trained_on(silo.config)
    assert release.info["rows"] == rows
    assert abs(held - 16) <= 5 * 12.8**0.5, "a fifth, each row by the fall of its own hash"
    client.close()
    # A new process finds the ledger and the answer again.
    again = open_client(silo.config, silo.identity)
    assert again.handle(plan) == answer
    again.close()
    summary = verify_ledger(silo.folder / "ledger.jsonl", silo.identity.card)
    assert [entry.dataset for entry in summary.releases] == ["ward-7"]
    assert not again.noise.simulated, "noise of a client comes from the operating system"


def test_a_label_that_a_silo_lacks_does_not_shrink_its_head(lay: Made) -> None:
    silo = lay()
    text = silo.config_file.read_text().replace('["a", "b"]', '["a", "b", "never seen here"]')
    silo.config_file.write_text(text)
    client = open_client(silo.config, silo.identity)
    assert client.slm.labels == ("a", "b", "never seen here")
    client.close()


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ('labels = ["a", "b"]', "", ConfigError, "data.labels: is required for a client"),
        ('labels = ["a", "b"]', 'labels = ["b", "a"]', ConfigError, "data.labels: .*must be sorted"),
        ('labels = ["a", "b"]', 'labels = ["a", "c"]', DataError, "label .* does not occur in data.labels"),
        ('server = "coordinator"', 'server = "nobody"', ConfigError, "nobody"),
        ('server = "coordinator"', 'server = "hospital-b"', ConfigError, "client.peers"),
        ('"hospital-b", "hospital-c"', '"hospital-b", "hospital-a"', ConfigError, "client.peers"),
        ("fedcba", "FEDCBA", ConfigError, "client.run"),
        ("policy.toml", "absent.toml", ConfigError, "absent.toml: cannot be read"),
        ('dataset = "ward-7"', 'dataset = "Ward 7"', ConfigError, "client.dataset"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_files_is_one_sentence(
    lay: Made, old: str, new: str, error: type[Exception], message: str
) -> None:
    silo = lay()
    text = silo.config_file.read_text()
    assert old in text
    silo.config_file.write_text(text.replace(old, new, 1))
    with pytest.raises(error, match=message) as caught:
        open_client(silo.config, silo.identity)
    assert "\n" not in str(caught.value)


def test_a_client_without_its_section(lay: Made) -> None:
    silo = lay()
    silo.config_file.write_text(silo.config_file.read_text().split("[client]")[0])
    with pytest.raises(ConfigError, match="client: the section is missing"):
        open_client(silo.config, silo.identity)


def test_a_ledger_that_is_gone_is_not_begun_anew(lay: Made) -> None:
    """Deleting the ledger would give the data set its whole budget back."""
    silo = lay()
    for path in silo.folder.glob("ledger.*"):
        path.unlink()
    with pytest.raises(UsageError, match=r"ledger\.jsonl: there is no ledger"):
        open_client(silo.config, silo.identity)
    assert not (silo.folder / "ledger.jsonl").exists()


def test_a_silo_has_one_ledger_wherever_it_is_started(lay: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    silo = lay()
    (silo.folder / "elsewhere").mkdir()
    monkeypatch.chdir(silo.folder)
    here = load_config("client.toml").client
    monkeypatch.chdir(silo.folder / "elsewhere")
    there = load_config("../client.toml").client
    assert here is not None
    assert there is not None
    for key in ("identity", "trust", "policy", "ledger", "state"):
        assert Path(getattr(here, key)).resolve() == Path(getattr(there, key)).resolve()
        assert Path(getattr(here, key)).resolve().is_relative_to(silo.folder.resolve())


def test_a_policy_that_another_may_write_stops_the_client(lay: Made) -> None:
    silo = lay()
    (silo.folder / "policy.toml").chmod(0o666)
    with pytest.raises(ConfigError, match="others can change"):
        open_client(silo.config, silo.identity)


def test_a_changed_policy_counts_at_the_next_plan(lay: Made) -> None:
    """The client runs for months; its owner must not have to restart it to be obeyed."""
    silo = lay()
    client = open_client(silo.config, silo.identity)
    server, path = silo.serve(), silo.folder / "policy.toml"
    plan = server.outgoing()["hospital-a"]
    permissive = path.read_text()
    path.write_text("no TOML")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        client.handle(plan)
    path.write_text(permissive.replace('kinds = ["model", "metrics"]', 'kinds = ["metrics"]'))
    assert [refusal.clause for refusal in client.preview(plan).refusals] == ["kinds"]
    path.write_text(permissive)
    assert envelope.read_header(client.handle(plan)).kind is PayloadKind.MODEL
    TrustStore.open(silo.folder / "trust").revoke("hospital-b", "its key was stolen")
    with pytest.raises(SecureflError, match="hospital-b"):
        client.handle(plan)
    client.close()


def test_the_kill_switch_lies_beside_the_policy(lay: Made) -> None:
    silo = lay()
    client = open_client(silo.config, silo.identity)
    (silo.folder / "STOP").touch()
    plan = silo.serve().outgoing()["hospital-a"]
    answer = client.handle(plan)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert client.handle(plan) == answer
    client.close()


def test_an_old_answer_is_not_sent_again_against_the_policy(lay: Made) -> None:
    """It was charged, but may never have arrived; to send it now would be to release it now."""
    silo = lay()
    client = open_client(silo.config, silo.identity)
    plan = silo.serve().outgoing()["hospital-a"]
    answer = client.handle(plan)
    (silo.folder / "STOP").touch()
    with pytest.raises(PolicyRefusal, match="kill_switch"):
        client.handle(plan)
    (silo.folder / "STOP").unlink()
    assert client.handle(plan) == answer
    assert len(client.ledger.entries) == 1
    assert not client.ledger.refusals
    client.close()


def test_a_clock_that_is_set_back_does_not_reopen_the_day(lay: Made) -> None:
    silo = lay(max_bytes_per_day=120_000)  # one of its releases, of which each has some 80 kB
    now = [1_700_000_000.0]
    client = open_client(silo.config, silo.identity, clock=lambda: now[0])
    server = silo.serve()
    sealed = client.handle(server.outgoing()["hospital-a"])
    assert envelope.read_header(sealed).kind is PayloadKind.MODEL
    assert 60_000 < len(sealed) < 120_000
    kinds = []
    for number, moment in enumerate((-10 * 86400, 3600, 86400 - 1, 86400 + 1), start=2):
        now[0] = 1_700_000_000.0 + moment
        server.round, server.config = number, _rounds(silo, number)
        client.config = server.config
        server._steps = server._steps_of_round()
        kinds.append(envelope.read_header(client.handle(server.outgoing()["hospital-a"])).kind)
    assert kinds == [PayloadKind.UNAVAILABLE] * 3 + [PayloadKind.MODEL]
    assert {refusal.clause for refusal in client.refusals} == {"max_bytes_per_day"}
    client.close()


def _rounds(silo: Laid, number: int) -> Config:
    federation = silo.config.federation.model_copy(update={"rounds": number + 1})
    return silo.config.model_copy(update={"federation": federation})


# --- commands


def _plan_file(silo: Laid) -> Path:
    path = silo.folder / "plan"
    path.write_bytes(silo.serve().outgoing()["hospital-a"])
    return path


def test_a_dry_run_prints_what_would_leave(lay: Made, capsys: pytest.CaptureFixture[str]) -> None:
    silo = lay(passphrase=PASSPHRASE)
    secret = silo.folder / "passphrase"
    secret.write_bytes(PASSPHRASE + b"\n")
    secret.chmod(0o600)
    plan = _plan_file(silo)
    before = {path: path.read_bytes() for path in silo.folder.rglob("*") if path.is_file()}
    assert _run("client", silo.config_file, "--dry-run", plan, "--passphrase-file", secret, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["answer"]["kind"] == "model"
    assert document["answer"]["readable_by"] == ["coordinator"]
    assert document["answer"]["fields"]["rows"] == trained_on(silo.config)
    assert document["asked"]["round"] == 1
    assert document["refused"] == []
    # Field by field the release that then leaves.
    client = open_client(silo.config, silo.identity)
    sealed = client.handle(plan.read_bytes())
    client.close()
    body = envelope.open_(envelope.verify(sealed, {"hospital-a": silo.identity.card}), silo.server)
    release = release_from(decode(body))
    assert document["answer"]["bytes"] == len(body)
    assert document["answer"]["fields"] == dict(release.info)
    assert document["answer"]["claim"] == release.claim.model_dump(mode="json")
    assert {name: entry["shape"] for name, entry in document["answer"]["tensors"].items()} == {
        name: list(array.shape) for name, array in release.tensors.items()
    }
    after = {path: path.read_bytes() for path in before}
    changed = {path.name for path in before if after[path] != before[path]}
    assert changed == {"ledger.jsonl", "ledger.head.json"}, "and only by the real answer"


def test_a_dry_run_as_a_table(lay: Made, capsys: pytest.CaptureFixture[str]) -> None:
    silo = lay()
    assert _run("client", silo.config_file, "--dry-run", _plan_file(silo)) == 0
    out = capsys.readouterr().out
    for part in (
        "Would leave: model, readable by coordinator",
        "rows",
        str(trained_on(silo.config)),
        "whole body",
        "Nothing was sent",
    ):
        assert part in out


def test_a_dry_run_of_what_the_policy_forbids_exits_3(lay: Made, capsys: pytest.CaptureFixture[str]) -> None:
    silo = lay(kinds=(PayloadKind.METRICS,))
    assert _run("client", silo.config_file, "--dry-run", _plan_file(silo), "--json") == 3
    streams = capsys.readouterr()
    document = json.loads(streams.out)
    assert document["answer"] is None
    assert document["refused"][0]["clause"] == "kinds"
    assert "model is not listed" in document["refused"][0]["reason"]
    assert "forbids it: kinds" in streams.err


def test_a_dry_run_names_every_clause_at_once(lay: Made, capsys: pytest.CaptureFixture[str]) -> None:
    silo = lay(kinds=(), servers=(), approval=None)
    assert _run("client", silo.config_file, "--dry-run", _plan_file(silo), "--json") == 3
    clauses = [one["clause"] for one in json.loads(capsys.readouterr().out)["refused"]]
    assert clauses == ["approval", "servers", "kinds"]


def test_a_dry_run_of_an_answered_plan_says_so(lay: Made, capsys: pytest.CaptureFixture[str]) -> None:
    silo = lay(kinds=(PayloadKind.METRICS,))
    plan = _plan_file(silo)
    client = open_client(silo.config, silo.identity)
    client.handle(plan.read_bytes())
    client.close()
    path = silo.folder / "policy.toml"
    path.write_text(path.read_text().replace('kinds = ["metrics"]', 'kinds = ["model", "metrics"]'))
    assert _run("client", silo.config_file, "--dry-run", plan) == 0
    assert 'answered before with a signed "unavailable"' in capsys.readouterr().out
    other = silo.serve()
    other.model = {name: array + 1 for name, array in other.model.items()}
    plan.write_bytes(other.outgoing()["hospital-a"])
    assert _run("client", silo.config_file, "--dry-run", plan) == 4
    assert "another plan" in capsys.readouterr().err


def test_a_refusal_that_is_asked_for_again_names_its_clause_again(lay: Made) -> None:
    silo = lay(kinds=(PayloadKind.METRICS,))
    plan = silo.serve().outgoing()["hospital-a"]
    client = open_client(silo.config, silo.identity)
    client.handle(plan)
    client.close()
    again = open_client(silo.config, silo.identity)
    again.handle(plan)
    assert [refusal.clause for refusal in again.refusals] == ["kinds"]
    again.close()


def test_the_trained_model_can_be_kept(lay: Made, tmp_path: Path) -> None:
    silo = lay()
    server, client = silo.serve(), open_client(silo.config, silo.identity)
    client.handle(server.outgoing()["hospital-a"])
    client.save_model(tmp_path / "model")
    kept = load_trained(tmp_path / "model")
    assert fingerprint(kept.state()) == fingerprint(client.slm.state())
    assert "no finite epsilon" in (tmp_path / "model" / "README.md").read_text()
    client.close()


def test_a_dry_run_beside_the_running_client(lay: Made, capsys: pytest.CaptureFixture[str]) -> None:
    silo = lay()
    running = open_client(silo.config, silo.identity)
    assert _run("client", silo.config_file, "--dry-run", _plan_file(silo), "--json") == 0
    running.close()


@pytest.mark.parametrize("data", [b"", b"SECUREFL", b"x" * 5000])
def test_a_dry_run_of_rubbish_exits_4(lay: Made, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    silo = lay()
    (silo.folder / "plan").write_bytes(data)
    assert _run("client", silo.config_file, "--dry-run", silo.folder / "plan") == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_a_client_over_a_network_is_not_pretended(lay: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("client", lay().config_file) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_an_owner_approves_one_plan_while_the_client_runs(
    lay: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    silo = lay(approval="manual")
    server = silo.serve()
    client = open_client(silo.config, silo.identity)
    plan = server.outgoing()["hospital-a"]
    with pytest.raises(AwaitingApproval) as waits:
        client.handle(plan)
    name = waits.value.plan
    # The owner looks at the waiting plan first.
    waiting = silo.folder / "state" / f"{name}.plan"
    assert _run("client", silo.config_file, "--dry-run", waiting, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"] == name
    # A hash is given whole: neither a part of it nor another one approves anything.
    for other, code in ((name[:32], 2), (name.upper(), 2), ("0" * 64, 2), (name + "\n", 2)):
        assert _run("approve", other, "--config", silo.config_file) == code
    capsys.readouterr()
    with pytest.raises(AwaitingApproval):
        client.handle(plan)
    assert _run("approve", name, "--config", silo.config_file, "--json") == 0
    approved = json.loads(capsys.readouterr().out)
    assert approved["approved"] == name
    assert approved["plan"]["epochs"] == 1
    # The running client sees it in the ledger.
    assert envelope.read_header(client.handle(plan)).kind is PayloadKind.MODEL
    client.close()
    (entry,) = verify_ledger(silo.folder / "ledger.jsonl").approvals
    assert entry.plan == name


def test_a_plan_is_approved_under_the_configuration_it_was_shown_under(
    lay: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    silo = lay(approval="manual")
    client = open_client(silo.config, silo.identity)
    with pytest.raises(AwaitingApproval) as waits:
        client.handle(silo.serve().outgoing()["hospital-a"])
    client.close()
    silo.config_file.write_text(silo.config_file.read_text().replace("batch_size = 8", "batch_size = 4"))
    assert _run("approve", waits.value.plan, "--config", silo.config_file) == 2
    assert "under the present configuration" in capsys.readouterr().err
    assert not verify_ledger(silo.folder / "ledger.jsonl").approvals


def test_a_revoked_server_is_not_worked_with(lay: Made) -> None:
    silo = lay()
    TrustStore.open(silo.folder / "trust").revoke("coordinator", "its key was stolen")
    with pytest.raises(SecureflError, match="coordinator"):
        open_client(silo.config, silo.identity)


def test_the_policy_file_says_what_the_client_does(lay: Made) -> None:
    silo = lay(min_envelope_version=2)
    assert Policy.load(silo.folder / "policy.toml").min_envelope_version == 2
    assert load_config(silo.config_file).client is not None
