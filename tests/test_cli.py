"""The commands as a user types them: exit codes, one sentence, nothing written after bad input."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from securefl.cli import app
from securefl.config import PERMIT_EMBEDDINGS
from securefl.console import clean, new_app, run_app
from securefl.crypto.trust import TrustStore
from securefl.result import Result
from tests.test_simulation import METHODS

Toml = Callable[..., Path]
PERMITTED = f'allow_embedding_centroids = "{PERMIT_EMBEDDINGS}"'


@pytest.fixture
def toml(tiny_encoder: Path, tiny_data: Path, tiny_llm: Path, tmp_path: Path) -> Toml:
    def write(
        train: Path | str = tiny_data / "train.csv",
        test: Path | str = tiny_data / "test.csv",
        method: str = "fedavg",
        extra: str = "",
        data: str = "",
        slm: str = "",
        rounds: int = 2,
    ) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(f"""
[federation]
method = "{method}"
rounds = {rounds}
[data]
train = "{train}"
test = "{test}"
split = {{ by = "dirichlet", silos = 3, alpha = 2.0, min_rows = 12 }}
{data}
[slm]
models = ["{tiny_encoder}"]
max_length = 16
epochs = 1
{slm}
{extra}
""")
        return path

    return write


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def securefl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*arguments: object) -> Ran:
        code = run_app(app, "securefl", [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


Securefl = Callable[..., Ran]


def _csv(folder: Path, content: bytes, name: str = "bad.csv") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"text,class\nhello,a\n", "label"),
        (b"text,label\nhello,a\n,b\n", "line 3"),
        (b"text,label\n   ,a\nworld,b\n", "line 2"),
        (b"text,label\nhello,a\nworld,\n", "line 3"),
        (b"text,label\nhello,a\n\xff\xfe,b\n", "UTF-8"),
        (b"", "empty"),
        (b"text,label\n", "no rows"),
        (b"text,label\n" + b"".join(b"day %d,a\n" % i for i in range(40)), "same label"),
        (b"text,label\nhello,a\nworld,b\n", "2"),
    ],
    ids=[
        "missing column",
        "empty text",
        "blank text",
        "empty label",
        "not UTF-8",
        "empty file",
        "no rows",
        "one class",
        "fewer rows than silos",
    ],
)
def test_bad_data_is_one_sentence_and_writes_nothing(
    content: bytes, says: str, toml: Toml, securefl: Securefl, tmp_path: Path
) -> None:
    bad = _csv(tmp_path, content)
    before = sorted(tmp_path.rglob("*"))
    ran = securefl("simulate", toml(train=bad), "--out", tmp_path / "run")
    assert ran.code == 2
    assert says in ran.err
    assert str(bad) in ran.err
    assert "Traceback" not in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "study.toml"])


def test_a_label_only_in_test_is_refused(toml: Toml, securefl: Securefl, tmp_path: Path) -> None:
    bad = _csv(tmp_path, b"text,label\none more day,a\nanother one,zebra\n")
    ran = securefl("simulate", toml(test=bad), "--out", tmp_path / "run")
    assert ran.code == 2
    assert "zebra" in ran.err
    assert "3" in ran.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"extra": "[fedkc]\nclustres = 3"}, "clustres"),
        ({"rounds": 0}, "rounds"),
        ({"method": "fedavgg"}, "method"),
        ({"slm": "learning_rate = -1"}, "learning_rate"),
        ({"extra": "[protection]\nthreshold = 2"}, "protection.threshold"),
        ({"extra": "[protection]\nbits = 12"}, "protection.bits"),
        ({"extra": "[protection]\nmax_rows = 4"}, "protection.max_rows"),
        (
            {"extra": '[protection]\nmodels = "ckks"\n[privacy]\nmodels = { clip = 1.0, epsilon = 3.0 }'},
            "masked",
        ),
        ({"method": "crosslm", "extra": '[protection]\nmodels = "masked"'}, "nothing to sum"),
        ({"extra": '[federation.drop]\nsilo-9 = { step = "sign" }'}, "silo-9"),
        ({"extra": '[federation.drop]\nsilo-1 = { round = 7, step = "sign" }'}, "no round 7"),
        ({"extra": '[federation.drop]\nsilo-1 = { step = "sleep" }'}, "drop"),
        ({"extra": '[protection]\nmodels = "none"'}, "protection.models"),
        ({"extra": "[privacy]\ndp_sgd = { epsilon = 3.0, delta = 0.1 }"}, "dp_sgd.delta"),
        ({"extra": "[privacy]\ndp_sgd = { epsilon = 1000.0 }"}, "dp_sgd.epsilon"),
        ({"extra": "[privacy]\ndp_sgd = { delta = 1e-5 }"}, "one of them"),
        ({"extra": "[privacy]\ndp_sgd = { epsilon = 3.0, clip = 0 }"}, "dp_sgd.clip"),
        ({"extra": "[privacy]\ndp_sgd = { epsilon = 3.0, sample_rate = 2.0 }"}, "sample_rate"),
        ({"extra": '[privacy]\ndp_sgd = { epsilon = 3.0, accountant = "gdp" }'}, "no bound"),
        ({"extra": '[privacy]\nadjacency = "replace-one"\ndp_sgd = { epsilon = 3.0 }'}, "adjacency"),
        ({"data": 'unit = "patient_id"'}, "patient_id"),
        ({"data": 'unit = "text"'}, "data.unit"),
        ({"extra": "[privacy]\ncentroids = { epsilon = 3.0, noise_multiplier = 1.0 }"}, "not both"),
        ({"extra": "[fedkc]\ncompose = -1"}, "fedkc.compose: must be"),
        (
            {"method": "fedkc", "extra": f"[fedkc]\ncompose = 30\n[policy]\n{PERMITTED}"},
            "this encoder has the layers 0 to",
        ),
        ({"data": 'text = "body"'}, "body"),
        ({"train": "nowhere.csv"}, "nowhere.csv"),
        ({"data": "train_rows = 100000"}, "train_rows"),
        ({"extra": "this is not toml"}, "TOML"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_bad_configuration_is_one_sentence(
    change: dict[str, Any], says: str, toml: Toml, securefl: Securefl, tmp_path: Path
) -> None:
    ran = securefl("simulate", toml(**change), "--out", tmp_path / "run")
    assert ran.code == 2
    assert says in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run.partial").exists()


def test_a_split_that_cannot_reach_the_minimum(toml: Toml, securefl: Securefl, tmp_path: Path) -> None:
    path = toml()
    path.write_text(path.read_text().replace("min_rows = 12", "min_rows = 500"))
    ran = securefl("simulate", path, "--out", tmp_path / "run")
    assert (ran.code, "min_rows" in ran.err) == (2, True)


@pytest.mark.parametrize(
    "content",
    [None, {}, {"config.json": "{"}, {"config.json": '{"model_type": "bert"}'}],
    ids=["no folder", "empty folder", "broken config", "no weights"],
)
def test_a_model_folder_that_is_none(
    content: dict[str, str] | None, toml: Toml, securefl: Securefl, tmp_path: Path, tiny_encoder: Path
) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    path = toml()
    path.write_text(path.read_text().replace(str(tiny_encoder), str(folder)))
    ran = securefl("simulate", path, "--out", tmp_path / "run")
    assert ran.code == 2
    assert str(folder) in ran.err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run.partial").exists()


def test_odd_text_is_data(toml: Toml, securefl: Securefl, tmp_path: Path) -> None:
    odd = ["a\0nul", "an emoji \U0001f600", "עברית من اليمين", "x" * 100_000, "tabs\tand ; signs"]
    lines = [f'"{text} {i}",{label}' for i in range(6) for text in odd for label in ("a", "b")]
    train = _csv(tmp_path, ("text,label\r\n" + "\r\n".join(lines) + "\r\n").encode())
    ran = securefl("simulate", toml(train=train), "--out", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    truth = "".join(path.read_text() for path in (tmp_path / "run/truth").glob("silo-*/rows.jsonl"))
    texts = {json.loads(line)["text"].rsplit(" ", 1)[0] for line in truth.splitlines()}
    assert texts == set(odd)


def test_simulate_prints_one_json_document(toml: Toml, securefl: Securefl, tmp_path: Path) -> None:
    ran = securefl("simulate", toml(), "--out", tmp_path / "run", "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert Result.model_validate(document).method == "fedavg"
    assert document == json.loads((tmp_path / "run/result.json").read_text())


def test_simulate_shows_tables_and_the_policy_and_does_not_overwrite(
    toml: Toml, securefl: Securefl, tmp_path: Path
) -> None:
    ran = securefl("simulate", toml(), "--out", tmp_path / "run")
    assert ran.code == 0
    assert "silo-1" in ran.out
    assert "min_cluster_size" in ran.out
    again = securefl("simulate", toml(), "--out", tmp_path / "run")
    assert (again.code, "exists already" in again.err) == (2, True)
    resumed = securefl("simulate", toml(), "--out", tmp_path / "run", "--resume", "--json")
    assert json.loads(resumed.out) == json.loads((tmp_path / "run/result.json").read_text())
    other = securefl("simulate", toml(rounds=3), "--out", tmp_path / "run", "--resume")
    assert other.code == 2


def test_a_policy_refusal_exits_3(toml: Toml, securefl: Securefl, tmp_path: Path) -> None:
    path = toml(method="fedkc", extra='[fedkc]\ncompose = "embeddings"')
    ran = securefl("simulate", path, "--out", tmp_path / "run")
    assert ran.code == 3
    assert "allow_embedding_centroids" in ran.err
    assert not (tmp_path / "run").exists()


def test_a_budget_that_does_not_suffice_exits_3_and_names_it(
    toml: Toml, securefl: Securefl, tmp_path: Path
) -> None:
    extra = "[privacy]\ncentroids = { epsilon = 8.0, min_size = 2 }\n[policy]\nmax_epsilon = 2.0"
    ran = securefl("simulate", toml(method="fedkc", extra=extra), "--out", tmp_path / "run")
    assert ran.code == 3
    assert "max_epsilon" in ran.err


def test_keygen_inspect_export_predict_verify(toml: Toml, securefl: Securefl, tmp_path: Path) -> None:
    made = securefl("keygen", "hospital-a", "--out", tmp_path / "keys", "--json")
    assert made.code == 0
    paths = json.loads(made.out)
    key = Path(paths["key"])
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secrets = json.loads(key.read_text())["seeds"].values()
    assert not any(secret in made.out + made.err for secret in secrets)
    card = json.loads(securefl("inspect", paths["card"], "--json").out)
    assert card["fingerprint"] == paths["fingerprint"]
    assert securefl("keygen", "hospital-a", "--out", tmp_path / "keys").code == 2, "never overwritten"
    assert securefl("keygen", "Hospital A", "--out", tmp_path / "keys").code == 2
    assert securefl("inspect", key).code == 2, "a private key is not described"

    run = tmp_path / "run"
    assert securefl("simulate", toml(method="fedkc"), "--out", run).code == 0
    ledger = run / "ledger/silo-1.jsonl"
    assert securefl("ledger", "verify", ledger).code == 0
    shown = json.loads(securefl("inspect", ledger, "--json").out)
    assert shown["epsilon"] == "no finite epsilon"
    masked = ["masked-model", "survivors", "unmasking"]
    kinds = ["advert", "shares", *masked, "centroids", "advert", "shares", *masked, "metrics"]
    assert [entry["kind"] for entry in shown["releases"]] == kinds
    total = json.loads(securefl("inspect", run / "releases/sums/r001-sum.safetensors", "--json").out)
    assert (total["kind"], total["info"]["silos"]) == ("sum", ["silo-1", "silo-2", "silo-3"])
    release = json.loads(
        securefl("inspect", run / "releases/silo-1/r002-share-centroids.safetensors", "--json").out
    )
    assert release["claim"]["mechanism"] == "none"
    assert json.loads(securefl("inspect", run, "--json").out)["method"] == "fedkc"
    assert json.loads(securefl("inspect", tmp_path / "study.toml", "--json").out)["what"] == "configuration"
    assert json.loads(securefl("inspect", run / "policy/silo-1.toml", "--json").out)["what"] == "policy"

    model = tmp_path / "model"
    assert securefl("export", run, "silo-2", "--out", model).code == 0
    assert securefl("export", run, "silo-2", "--out", model).code == 2
    assert securefl("export", run, "silo-9", "--out", tmp_path / "x").code == 2
    assert securefl("export", tmp_path, "silo-1", "--out", tmp_path / "x").code == 2
    new = _csv(tmp_path, b"id,text\n1,a good day\n2,another\n", "new.csv")
    assert securefl("predict", model, new, "--out", tmp_path / "labels.jsonl").code == 0
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == [1, 2]
    for row in rows:
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].get)
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert securefl("predict", tmp_path, new, "--out", tmp_path / "y").code == 2
    assert not (tmp_path / "y").exists()

    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(lines[0] + lines[1].replace(b'"round":1', b'"round":2') + b"".join(lines[2:]))
    broken = securefl("ledger", "verify", ledger)
    assert broken.code == 4
    assert "line 2" in broken.err


@pytest.mark.parametrize("name", ["nothing", "text.bin", "broken.safetensors", "broken.jsonl", "broken.json"])
def test_inspect_of_what_it_is_not(name: str, securefl: Securefl, tmp_path: Path) -> None:
    if name != "nothing":
        (tmp_path / name).write_bytes(b"\x00\x01garbage")
    ran = securefl("inspect", tmp_path / name)
    assert ran.code in (2, 4)
    assert len(ran.err.strip().splitlines()) == 1


def test_usage_errors_exit_2(securefl: Securefl) -> None:
    assert securefl("simulate").code == 2
    assert securefl("no-such-command").code == 2
    assert securefl("keygen", "a", "--out").code == 2


def test_help_has_an_example_for_every_command(securefl: Securefl) -> None:
    for command in ("demo", "simulate", "keygen", "inspect", "export", "predict"):
        assert "Example:" in securefl(command, "--help").out
    assert "Example:" in securefl("ledger", "verify", "--help").out


def test_version_and_no_traceback_in_a_real_process(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "securefl"]
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "securefl")
    bad = subprocess.run(
        [*program, "simulate", "nowhere.toml", "--out", str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2
    assert "Traceback" not in bad.stderr


def test_the_method_table_is_whole() -> None:
    from securefl.config import METHODS as names

    assert {fields["federation"]["method"] for fields in METHODS.values()} == set(names)


@pytest.mark.parametrize("out", [".", "/", "x/..", "file", "file/below", "link", "n" * 201])
def test_an_out_that_cannot_be_is_refused_before_any_work(
    out: str, toml: Toml, securefl: Securefl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "file").write_text("kept")
    (work / "link").symlink_to("nowhere")
    commands: list[tuple[object, ...]] = [
        ("simulate", toml()),
        ("simulate", "nowhere.toml"),  # so the place is looked at first
        ("demo",),
        ("keygen", "a"),
    ]
    for command in commands:
        ran = securefl(*command, "--out", out)
        assert ran.code == 2
        assert len(ran.err.strip().splitlines()) == 1
        assert "nowhere.toml" not in ran.err
        assert sorted(path.name for path in work.iterdir()) == ["file", "link"]


def test_predict_replaces_no_device_no_link_and_not_its_input(securefl: Securefl, tmp_path: Path) -> None:
    new = _csv(tmp_path, b"text\nhello\n", "new.csv")
    (tmp_path / "link").symlink_to(new)
    for out in ("/dev/full", tmp_path / "link", tmp_path, new):
        ran = securefl("predict", tmp_path, new, "--out", out)
        assert (ran.code, str(out) in ran.err) == (2, True)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)  # noqa: PTH116
    assert new.read_bytes() == b"text\nhello\n"


@pytest.mark.parametrize("content", ["{", "{}", "[" * 100_000, "", '{"schema": "securefl.result/1"}'])
def test_resume_over_a_broken_result(content: str, toml: Toml, securefl: Securefl, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text(content)
    ran = securefl("simulate", toml(), "--out", tmp_path / "run", "--resume")
    assert (ran.code, len(ran.err.strip().splitlines())) == (2, 1)
    assert "result.json" in ran.err


@pytest.mark.parametrize("taken", ["a.key", "a.card.json", "folder"])
def test_keygen_overwrites_nothing_and_leaves_no_half(taken: str, securefl: Securefl, tmp_path: Path) -> None:
    if taken == "folder":
        (tmp_path / "a.card.json").mkdir()
    else:
        (tmp_path / taken).write_text("kept")
    before = sorted(tmp_path.iterdir())
    ran = securefl("keygen", "a", "--out", tmp_path)
    assert (ran.code, "exists already" in ran.err) == (2, True)
    assert sorted(tmp_path.iterdir()) == before
    assert taken == "folder" or (tmp_path / taken).read_text() == "kept"


@pytest.mark.parametrize("what", ["file", "folder", "model", "deep"])
def test_export_copies_nothing_from_outside_the_run(
    what: str, securefl: Securefl, tmp_path: Path, tiny_encoder: Path
) -> None:
    model = tmp_path / "run/models/silo-1"
    model.parent.mkdir(parents=True)
    (tmp_path / "run/result.json").write_text("{}")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    if what == "model":
        model.symlink_to(tiny_encoder)
    else:
        model.mkdir()
    if what == "file":
        (model / "README.md").symlink_to(secret / "key")
    elif what == "folder":
        (model / "more").symlink_to(secret)
    elif what == "deep":
        (model / "config.json").write_text("[" * 100_000)
    ran = securefl("export", tmp_path / "run", "silo-1", "--out", tmp_path / "out")
    assert ran.code == 2
    assert ("not valid JSON" if what == "deep" else "is a link") in ran.err
    for name in ("..", ".", "../models/silo-1"):
        assert securefl("export", tmp_path / "run", name, "--out", tmp_path / "out").code == 2
    assert not (tmp_path / "out").exists()


def test_a_hostile_name_stays_one_line_and_steers_no_terminal(
    toml: Toml, securefl: Securefl, tmp_path: Path
) -> None:
    path = toml(extra='["x\\u001b[2J\\nsecurefl: all is well\\u009b1m\\u202e"]')
    ran = securefl("simulate", path, "--out", tmp_path / "run")
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert not {"\x1b", "\x9b", "\u202e"} & set(ran.err)
    assert "\ufffd[2J\ufffdsecurefl" in ran.err


def test_clean_keeps_text_and_replaces_what_is_none() -> None:
    assert clean("Zürich 東京 a\tb\x7f\u2028\udcff") == "Zürich 東京 a\ufffdb\ufffd\ufffd\ufffd"
    assert clean("a\nb\r", keep="\n") == "a\nb\ufffd"


def test_a_path_that_cannot_be_is_bad_usage(securefl: Securefl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / ("x" * 300), tmp_path / "file/x", tmp_path / "loop"):
        for command in (
            ("inspect", path),
            ("ledger", "verify", path),
            ("simulate", path, "--out", tmp_path / "o"),
        ):
            ran = securefl(*command)
            assert (ran.code, len(ran.err.strip().splitlines())) == (2, 1), command


ODD = ["", "-", " ", "é", "\udcff", "\ud800", "a\0b", "\x1b[2J", "[red]", "..", "x" * 5000]
COMMANDS: list[list[str]] = [
    ["ODD"],
    ["--ODD"],
    ["keygen", "ODD", "--out", "OUT"],
    ["keygen", "a", "--out", "ODD"],
    ["keygen", "a", "--out", "OUT", "--passphrase-file", "ODD"],
    ["rotate", "ODD", "--out", "OUT"],
    ["revoke", "ODD", "--out", "OUT"],
    ["trust", "add", "ODD", "--store", "OUT"],
    ["trust", "list", "--store", "ODD"],
    ["trust", "apply", "ODD", "--store", "OUT"],
    ["trust", "revoke", "ODD", "--store", "STORE"],
    ["trust", "revoke", "a", "--store", "STORE", "--reason", "ODD"],
    ["simulate", "ODD", "--out", "OUT"],
    ["inspect", "ODD"],
    ["export", "ODD", "a", "--out", "OUT"],
    ["policy", "ODD", "--out", "OUT"],
    ["approve", "ODD"],
    ["client", "ODD"],
    ["ledger", "verify", "ODD"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
def test_odd_arguments_are_refused_in_our_own_words(
    command: list[str], securefl: Securefl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    TrustStore.open(tmp_path / "store", create=True)
    for odd in ODD:
        places = {"OUT": str(tmp_path / "out"), "STORE": str(tmp_path / "store")}
        arguments = [places.get(part, part.replace("ODD", odd)) for part in command]
        if command == ["keygen", "a", "--out", "ODD"] and odd in (" ", "-", "é", "\x1b[2J", "[red]"):
            assert securefl(*arguments).code == 0  # names of folders like others
            continue
        ran = securefl(*arguments)
        assert ran.code in (2, 4), (odd, ran.err)
        assert "fault of securefl" not in ran.err, odd
        assert "\x1b" not in ran.err


def broken_app() -> typer.Typer:
    application = new_app("broken", "Has a fault.")

    @application.command()
    def fail() -> None:
        raise KeyError("a row's text\x1b[2J")

    @application.command()
    def leave() -> None:
        sys.exit("a sentence in place of a code")

    return application


@pytest.mark.parametrize("debug", [None, "0", "1"])
def test_a_fault_of_our_own_is_one_sentence(
    debug: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SECUREFL_DEBUG", raising=False)
    if debug is not None:
        monkeypatch.setenv("SECUREFL_DEBUG", debug)
    assert run_app(broken_app(), "broken", ["fail"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    *before, last = captured.err.splitlines()
    assert last.startswith(
        "broken: this is a fault of securefl (KeyError); report it, with what SECUREFL_DEBUG=1"
    )
    assert (before != [], "Traceback" in captured.err, "a row's text" in captured.err) == (
        (debug == "1"),
    ) * 3
    assert "\x1b" not in captured.err


def test_leaving_with_a_sentence_is_no_success() -> None:
    assert run_app(broken_app(), "broken", ["leave"]) == 1


PROGRAM = [sys.executable, "-m", "securefl"]


def in_ascii(*arguments: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, check=False, cwd=folder, env=environment
    )


def test_output_in_an_encoding_that_lacks_a_character(tmp_path: Path) -> None:
    told = in_ascii("keygen", "a", "--out", "café \U0001f600", folder=tmp_path)
    assert (told.returncode, told.stderr) == (0, b"")
    assert rb"caf\xe9 \U0001f600/a.key" in told.stdout
    made = in_ascii("keygen", "b", "--out", "café \U0001f600", "--json", folder=tmp_path)
    assert (made.returncode, made.stderr) == (0, b"")
    assert json.loads(made.stdout)["key"] == "café \U0001f600/b.key"
    refused = in_ascii("keygen", "b", "--out", "café \U0001f600", folder=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert rb"caf\xe9" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["no-such-command"], 2),
        (["keygen", "A", "--out", "k"], 2),
        (["trust", "list", "--store", "store"], 0),
        (["trust", "revoke", "a", "--store", "store"], 4),
    ],
)
def test_a_full_stderr_changes_no_exit_code(arguments: list[str], code: int, tmp_path: Path) -> None:
    TrustStore.open(tmp_path / "store", create=True)
    with Path("/dev/full").open("w") as full:
        for out in (subprocess.PIPE, full):
            done = subprocess.run([*PROGRAM, *arguments], stdout=out, stderr=full, check=False, cwd=tmp_path)
            assert done.returncode == (code if out != full else code or 1), (
                "a result that is lost is an error"
            )


def test_a_full_stdout_changes_no_exit_code_of_an_error(tmp_path: Path) -> None:
    for arguments, code in ((["keygen", "A", "--out", "k"], 2), (["--version"], 1), (["--help"], 1)):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, check=False, cwd=tmp_path
            )
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, toml: Toml) -> None:
    line = f"{sys.executable} -m securefl inspect --json {toml()} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout != "") == (closed == "2>&-")


def test_a_full_disk_behind_the_output_is_one_sentence(toml: Toml) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "inspect", "--json", str(toml())],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("program", "says"), [("securefl", "--resume"), ("securefl-audit", "when it is started again")]
)
def test_ctrl_c_says_how_this_program_goes_on(
    capsys: pytest.CaptureFixture[str], program: str, says: str
) -> None:
    application = new_app(program, "Wait.")

    @application.command()
    def wait() -> None:
        raise KeyboardInterrupt

    assert run_app(application, program, ["wait"]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert ("--resume" in error) is (program == "securefl")


def test_ctrl_c_says_how_to_go_on(toml: Toml, tmp_path: Path) -> None:
    path = toml(rounds=1000)
    run = subprocess.Popen(
        [*PROGRAM, "simulate", str(path), "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not (tmp_path / "run.partial/truth").is_dir() and time.monotonic() < until:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "--resume" in err
    assert "Traceback" not in err
    assert (tmp_path / "run.partial").is_dir()
