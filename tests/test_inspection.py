"""A run's folder against its ledgers, result.json against its schema, and documents that can be printed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attacks.runs import Run
from securefl.cli import app
from securefl.config import load_config
from securefl.console import run_app
from securefl.crypto.ckks_terms import COLLUSION, POST_QUANTUM
from securefl.crypto.identity import Identity
from securefl.crypto.statements import Revocation, Rotation
from securefl.crypto.trust import TrustStore
from securefl.data import load_corpus
from securefl.errors import ConfigError, ProtocolError, UsageError
from securefl.inspection import inspect_path
from securefl.ledger import Ledger
from securefl.ledger_copies import export_ledger
from securefl.models import load_slm
from securefl.policy import Policy
from securefl.receipt import make_receipt
from securefl.release import NonPrivate, PayloadKind, Release, decode_release, encode_release
from securefl.result import Result, ServerRow, parse_result
from securefl.simulation import Simulation
from securefl.state import StateFolder
from securefl.verification import verify_run
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run
from tests.federation import tiny_config
from tests.samples import make_result

SHARED = "r002-share-centroids.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspection")
    slm = load_slm(
        str(tiny.make_encoder(folder / "encoder")), ["a", "b"], max_length=12, train_embeddings=False, seed=0
    )
    rows = tiny.make_texts(60, seed=1, length=9)
    # Everything that leaves has a claim with a finite epsilon, which somebody could rewrite.
    recipe = Recipe(noise=1.0, min_size=1)
    corpus = corpus_of([text for text, _ in rows], [label for _, label in rows], 20, recipe)
    return make_run(folder / "run", slm, corpus, recipe)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rewrite(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = run / "result.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    change(document)
    file.write_text(json.dumps(document), encoding="utf-8")


def test_a_whole_run_verifies(run: Path) -> None:
    verified = verify_run(run)
    assert [(one.silo, one.path.name) for one in verified.releases] == [
        ("silo-1", SHARED),
        ("silo-2", SHARED),
    ]
    assert verified.entries == {"silo-1": 2, "silo-2": 2}
    assert inspect_path(run)["ledgers"]["silo-2"] == "2 entries, verified"
    (run / "releases" / ".DS_Store").write_bytes(b"of a desktop")
    assert inspect_path(run / "result.json")["what"] == "run"


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "release deleted": (
        lambda run: (run / "releases/silo-2" / SHARED).unlink(),
        r"silo-2/r002-share-centroids.safetensors: recorded release missing: silo-2, round 2",
    ),
    "all releases deleted": (lambda run: shutil.rmtree(run / "releases"), "recorded release missing"),
    "release is a folder": (
        lambda run: (
            (run / "releases/silo-1" / SHARED)
            .rename(run / "releases/silo-1/.moved")
            .with_name(SHARED)
            .mkdir()
        ),
        "recorded release missing",
    ),
    "release renamed": (
        lambda run: (run / "releases/silo-1" / SHARED).rename(
            run / "releases/silo-1/r003-share-centroids.safetensors"
        ),
        "r003-share-centroids.safetensors: is none of the releases",
    ),
    "release swapped": (
        lambda run: shutil.copy(run / "releases/silo-1" / SHARED, run / "releases/silo-2" / SHARED),
        "its hash is not the one recorded for silo-2, round 2",
    ),
    "extra release": (
        lambda run: shutil.copy(run / "releases/silo-1" / SHARED, run / "releases/silo-1/extra.safetensors"),
        "extra.safetensors: is none of the releases",
    ),
    "extra silo": (
        lambda run: shutil.copytree(run / "releases/silo-1", run / "releases/silo-9"),
        "silo-9: is of no silo",
    ),
    "extra ledger": (
        lambda run: shutil.copy(run / "ledger/silo-1.jsonl", run / "ledger/silo-9.jsonl"),
        "silo-9.jsonl: is of no silo",
    ),
    "ledger deleted": (lambda run: (run / "ledger/silo-1.jsonl").unlink(), "silo-1.jsonl: is missing"),
    "head deleted": (lambda run: (run / "ledger/silo-1.head.json").unlink(), "head record is missing"),
    "card deleted": (lambda run: (run / "cards/silo-1.json").unlink(), "cards/silo-1.json: is missing"),
    "card of another": (
        lambda run: shutil.copy(run / "cards/silo-2.json", run / "cards/silo-1.json"),
        "another identity",
    ),
    "ledger of another": (
        lambda run: [
            shutil.copy(run / f"{kind}/silo-2{end}", run / f"{kind}/silo-1{end}")
            for kind, end in (("cards", ".json"), ("ledger", ".jsonl"), ("ledger", ".head.json"))
        ],
        "ledger of another silo",
    ),
    "ledger cut": (
        lambda run: (run / "ledger/silo-1.jsonl").write_bytes(
            (run / "ledger/silo-1.jsonl").read_bytes().split(b"\n")[0] + b"\n"
        ),
        "line 2: is missing",
    ),
    "ledger line rewritten": (
        lambda run: (run / "ledger/silo-1.jsonl").write_bytes(
            (run / "ledger/silo-1.jsonl").read_bytes().replace(b'"round":2', b'"round":3')
        ),
        "line 2",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_run_that_does_not_match_its_ledgers_is_refused(what: str, run: Path) -> None:
    damage, words = DAMAGE[what]
    damage(run)
    for read in (verify_run, inspect_path, Run):
        with pytest.raises(ProtocolError, match=words) as caught:
            read(run)
        assert caught.value.exit_code == 4
        assert "\n" not in str(caught.value)


def _first(document: dict[str, Any]) -> Any:
    return document["clients"][0]["releases"][0]


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "epsilon of a claim": (lambda d: _first(d)["claim"].update(epsilon=0.01), "its claim is not"),
    "empty claim": (lambda d: _first(d).update(claim={}), "its claim is not"),
    "claim beyond floats": (lambda d: _first(d)["claim"].update(epsilon=10**400), "is not strict JSON"),
    "round": (lambda d: _first(d).update(round=1), "its round is not"),
    "kind": (lambda d: _first(d).update(kind="metrics"), "its kind is not"),
    "recipients": (lambda d: _first(d).update(recipients=["server"]), "its recipients is not"),
    "readers": (lambda d: _first(d).update(readable_by=[]), "its readable_by is not"),
    "bytes": (lambda d: _first(d).update(bytes=1), "its bytes is not"),
    "hash": (lambda d: _first(d).update(sha256="0" * 64), "its sha256 is not"),
    "release left out": (lambda d: d["clients"][0]["releases"].clear(), "lacks release 1 of silo-1"),
    "release added": (lambda d: d["clients"][0]["releases"].append(_first(d)), "release 2 of silo-1"),
    "silo left out": (lambda d: d["clients"].pop(), "silo-2: is of no silo"),
    "total epsilon": (lambda d: d["clients"][1].update(epsilon=0.01), "epsilon of silo-2 is not"),
    "total simulated": (lambda d: d["clients"][1].update(simulated=False), "simulated of silo-2 is not"),
    "another run": (lambda d: d.update(run="f" * 32), "of another run"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_result_that_says_something_else_than_the_ledgers_is_refused(what: str, run: Path) -> None:
    change, words = FORGED[what]
    rewrite(run, change)
    for read in (inspect_path, Run):
        with pytest.raises(ProtocolError, match=words) as caught:
            read(run)
        assert "\n" not in str(caught.value)


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no number": lambda d: d.update(seconds=float("nan")),
    "infinite": lambda d: d["clients"][0].update(test_accuracy=float("inf")),
    "negative bytes": lambda d: _first(d).update(bytes=-1),
    "negative rows": lambda d: d["clients"][0].update(train_rows=-1),
    "negative label count": lambda d: d["clients"][0]["labels"].update(a=-1),
    "negative test rows": lambda d: d.update(test_rows=-1),
    "negative seed": lambda d: d.update(seed=-1),
    "negative epsilon": lambda d: d["clients"][0].update(epsilon=-1.0),
    "round 0": lambda d: d["rounds"][0].update(round=0),
    "no rounds": lambda d: d.update(rounds=[]),
    "no silos": lambda d: d.update(clients=[]),
    "above one": lambda d: d["clients"][0].update(test_accuracy=1.5),
    "interval out of order": lambda d: d["clients"][0].update(test_interval=[0.9, 0.1]),
    "difference out of order": lambda d: d["difference"].update(interval=[0.9, 0.1]),
    "the same silo twice": lambda d: d["clients"].append(d["clients"][0]),
    "path for a name": lambda d: d["clients"][0].update(name="../../etc"),
    "NUL in a name": lambda d: d["clients"][0].update(name="a\x00b"),
    "newline after a name": lambda d: d["clients"][0].update(name="silo-1\n"),
    "another schema": lambda d: d.update(schema="securefl.result/9"),
    "field with a newline": lambda d: d.update({"a\nb\ud800": 1}),
    "missing field": lambda d: d.pop("method"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_result_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    document = json.loads(make_result().to_json())
    assert parse_result(json.dumps(document).encode(), "x") == make_result()
    MALFORMED[what](document)
    (tmp_path / "result.json").write_text(json.dumps(document), encoding="utf-8")
    for read in (inspect_path, Run):
        with pytest.raises(ProtocolError, match=r"result\.json: ") as caught:
            read(tmp_path)
        assert caught.value.exit_code == 4
        assert str(caught.value).isprintable()
        str(caught.value).encode()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"[" * 200_000, b"\xff", b'{"seed": 1, "seed": 1}', b"1" * 9999]
)
def test_bytes_that_are_no_result_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(data)
    with pytest.raises(ProtocolError, match=r"result\.json: "):
        verify_run(tmp_path)


def test_a_folder_without_a_result_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"result\.json") as caught:
        verify_run(tmp_path)
    assert caught.value.exit_code == 2


def test_a_perplexity_beyond_floats_is_no_figure_and_loses_no_run() -> None:
    row = ServerRow(perplexity_before=float("inf"), perplexity_after=float("nan"))
    assert (row.perplexity_before, row.perplexity_after) == (None, None)
    text = make_result(server=row).to_json()
    assert parse_result(text.encode(), "x").server == row
    assert Result.model_validate_json(text).server == row


HOSTILE = "\x9b \x1b[31m red \u202e back \n\x00"


def test_documents_can_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep: Any = HOSTILE
    for _ in range(29):  # as deep as a body may nest its values
        deep = [deep]
    info = {"base": HOSTILE, HOSTILE: [{"in": HOSTILE}], "deep": deep}
    release = Release(PayloadKind.MODEL, {"w": np.zeros(2, np.float32)}, info, NonPrivate(reason="\x1b[31m"))
    file = tmp_path / "a.safetensors"
    file.write_bytes(encode_release(release))
    shown = json.dumps(inspect_path(file), ensure_ascii=False)
    assert shown.isprintable()
    shown.encode()
    assert inspect_path(file)["info"]["base"] == "\ufffd \ufffd[31m red \ufffd back \ufffd\ufffd"
    for options in ([], ["--json"]):
        assert run_app(app, "securefl", ["inspect", str(file), *options]) == 0
        assert json.loads(capsys.readouterr().out)["claim"]["mechanism"] == "none"


def test_what_else_lies_in_a_silo_is_described(tmp_path: Path) -> None:
    old, new = Identity.generate("hospital-a"), Identity.generate("hospital-a")
    rotation = tmp_path / "hospital-a.rotation.json"
    rotation.write_bytes(Rotation.make(old, new.card).data)
    found = inspect_path(rotation)
    assert (found["what"], found["verified"], found["old"]) == ("rotation", False, old.card.fingerprint)
    assert found["new"]["fingerprint"] == new.card.fingerprint
    revocation = tmp_path / "revocation.json"
    revocation.write_bytes(Revocation.make(old).data)
    assert inspect_path(revocation)["fingerprint"] == old.card.fingerprint
    store = TrustStore.open(tmp_path / "trust", create=True)
    store.add(new.card, new.card.fingerprint)
    assert [card["name"] for card in inspect_path(tmp_path / "trust")["cards"]] == ["hospital-a"]
    Ledger.create(tmp_path / "ledger.jsonl", old)
    assert inspect_path(tmp_path / "ledger.head.json")["index"] == 0
    export_ledger(tmp_path / "ledger.jsonl", tmp_path / "copy")
    assert inspect_path(tmp_path / "copy")["what"] == "copy of a ledger"
    receipt = make_receipt(
        old, run="0" * 32, silo=new.card.fingerprint, sequence=3, envelope_sha256="1" * 64, time=5
    )
    (tmp_path / "receipt.json").write_bytes(receipt)
    assert inspect_path(tmp_path / "receipt.json")["sequence"] == 3
    state = StateFolder(tmp_path / "state")
    state.pend("2" * 64, b"a plan")
    assert inspect_path(tmp_path / "state")["plans that wait"] == ["2" * 64]
    old.save(tmp_path / "hospital-a.key")
    with pytest.raises(UsageError, match="private keys, of which nothing is shown"):
        inspect_path(tmp_path / "hospital-a.key")
    policy = tmp_path / "policy.toml"
    Policy(name="hospital-a").save(policy)
    assert inspect_path(policy)["what"] == "policy"
    policy.chmod(0o666)
    with pytest.raises(ConfigError, match="others can change a policy"):
        inspect_path(policy)


def test_the_truth_is_its_owners_alone(whole: Path) -> None:
    truth = whole / "truth"
    paths = [truth, *truth.rglob("*")]
    assert {path.name for path in paths} >= {"truth", "silo-1", "rows.jsonl", "r002-share.json", "pool.jsonl"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_limit_of_ckks_is_said_wherever_it_protects(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[federation]\nmethod = "fedavg"\nrounds = 1\n[protection]\nmodels = "ckks"\npost_quantum = true\n'
        f'[data]\ntrain = "{tiny_data / "train.csv"}"\ntest = "{tiny_data / "test.csv"}"\n'
        'split = { by = "dirichlet", silos = 3, alpha = 2.0, min_rows = 12 }\n'
        f'[slm]\nmodels = ["{tiny_encoder}"]\nmax_length = 16\nepochs = 1\n'
    )
    config = load_config(file)
    Simulation(config, load_corpus(config), tmp_path / "run").run()
    shown = inspect_path(file)
    assert shown["parameters"] == POST_QUANTUM.security
    for document in (
        shown,
        inspect_path(tmp_path / "run"),
        inspect_path(tmp_path / "run/ledger/silo-2.jsonl"),
    ):
        assert document["collusion"] == COLLUSION
    run = inspect_path(tmp_path / "run")
    assert [(one["round"], sorted(one["opened_by"])) for one in run["sums"]] == [
        (1, ["silo-1", "silo-2", "silo-3"])
    ]
    page = (tmp_path / "run/report.html").read_text()
    assert "any one silo together with the server" in page
    assert not (tmp_path / "run/releases/server/r002-model.safetensors").exists(), "the server has no model"
    # A sum that was changed, or is not of the run, is noticed.
    path = tmp_path / "run/releases/sums/r001-sum.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(ProtocolError, match="its hash is not the one recorded for round 1"):
        inspect_path(tmp_path / "run")
    path.rename(path.with_name("r007-sum.safetensors"))
    with pytest.raises(ProtocolError, match="none of the sums"):
        inspect_path(tmp_path / "run")
    path.with_name("r007-sum.safetensors").unlink()
    with pytest.raises(ProtocolError, match="recorded sum missing"):
        inspect_path(tmp_path / "run")


@pytest.fixture(scope="module")
def summed(tiny_encoder: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(tiny_encoder, tiny_data, protection={"models": "masked"})
    folder = tmp_path_factory.mktemp("summed") / "run"
    Simulation(config, load_corpus(config), folder).run()
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": 7}, "the rows of round 1"),
        ({"resolution": 1e-30}, "the resolution of round 1"),
        ({"noise": 0.5}, "the noise of round 1"),
        ({"silos": ["silo-1", "silo-2"]}, "the silos of round 1"),
        ({"opened_by": ["silo-1"]}, "the opened_by of round 1"),
        ({"protection": "ckks"}, "the protection of round 1"),
        ({"claim": {"mechanism": "none", "reason": "another"}}, "the claim of round 1"),
        ({"round": 2}, "one opened sum for each round"),
        ({"sha256": "ab" * 32}, "its hash is not the one"),
        (None, "one opened sum for each round"),
    ],
)
def test_a_changed_record_of_a_sum_is_noticed(
    summed: Path, tmp_path: Path, change: dict[str, Any] | None, says: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(summed, run)
    verify_run(run)
    result = json.loads((run / "result.json").read_text())
    if change is None:
        result["sums"] = []
    else:
        result["sums"][0].update(change)
    (run / "result.json").write_text(json.dumps(result))
    with pytest.raises(ProtocolError, match=says):
        verify_run(run)


def test_a_sum_names_silos_whose_ledgers_say_so(summed: Path, tmp_path: Path) -> None:
    """File, hash and record changed together: the signed ledgers still know who sent a model."""
    run = tmp_path / "run"
    shutil.copytree(summed, run)
    path = run / "releases/sums/r001-sum.safetensors"
    release = decode_release(path.read_bytes())
    names = [*release.info["silos"], "silo-9"]
    body = encode_release(dataclasses.replace(release, info={**release.info, "silos": names}))
    path.write_bytes(body)
    result = json.loads((run / "result.json").read_text())
    result["sums"][0].update({"silos": names, "sha256": hashlib.sha256(body).hexdigest()})
    (run / "result.json").write_text(json.dumps(result))
    with pytest.raises(ProtocolError, match="a silo whose ledger has no model"):
        verify_run(run)
