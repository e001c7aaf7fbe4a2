"""The auditor over whole run folders: what it finds, what it refuses, what it writes and never writes."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from attacks import bench, cli, membership
from attacks.adversary import MEMBERSHIP
from attacks.audit import audit as whole_audit
from attacks.audit_words import claimed_words
from attacks.bounds import auc_cap
from attacks.evidence import Evidence
from attacks.figures import Figure, Proportion, at
from attacks.findings import Audit
from attacks.judgement import Book, judge
from attacks.kept import FOLDER, Kept
from attacks.runs import Run
from attacks.signature import SIGNATURE, verify_audit
from securefl.console import run_app
from securefl.crypto.identity import Identity
from securefl.errors import ModelError, PayloadError, ProtocolError, SecureflError, UsageError
from securefl.models import load_slm
from securefl.release import Adjacency, NonPrivate, Release, encode_release
from securefl.slm import Slm
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run
from tests.attacks.test_audit_report import printed

LENGTH = 12
ROWS = tiny.make_texts(260, seed=1, length=9)


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("audit") / "encoder", width=64)
    return load_slm(str(folder), ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0)


# What these tests are about are these; all of them take seconds.
audit = partial(whole_audit, attacks=frozenset({1, 2, 4}))
FEW = ["--attacks", "1,2,4"]


def made(folder: Path, slm: Slm, recipe: Recipe, rows: int = 40, pool: int = 180) -> Path:
    used = ROWS[: rows * len(recipe.silos) + pool]
    corpus = corpus_of([text for text, _ in used], [label for _, label in used], rows, recipe)
    return make_run(folder / "run", slm, corpus, recipe)


@pytest.fixture(scope="module")
def pooled(slm: Slm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("pooled"), slm, Recipe(clusters=6))


@pytest.fixture(scope="module")
def layered(slm: Slm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(layer="embeddings", clusters=8, random_groups=True)
    return made(tmp_path_factory.mktemp("layered"), slm, recipe)


def test_membership_of_exact_centroids_leaks(pooled: Path) -> None:
    found = whole_audit(pooled)
    first = [f for f in found.findings if f.number == 1]
    assert {f.metric for f in first} == {"auc", "tpr_at_1_percent_fpr"}
    ratio = [f for f in first if f.metric == "auc" and "ratio" in f.attack]
    assert [(f.silo, f.round) for f in ratio] == [("silo-1", 2), ("silo-2", 2)]
    for f in ratio:
        assert f.verdict == "leaks"
        assert f.ci[0] > f.baseline == 0.5
        assert f.value > 0.75
        assert (f.cap, f.claim_epsilon) == (None, None)
        assert "no differential privacy" in str(f.cap_reason)
        assert f.trials == f.details["members"] + f.details["controls"]
        assert f.adversary == "peer; sees the pooled centroids another silo shared"
        assert f.details["nist_class"]
    assert found.verdicts.singling_out == found.verdicts.linkability == "leaks"
    scatter = [bound for bound in found.bounds if bound.name.startswith("proposition 1")]
    assert all(bound.holds and not bound.vacuous for bound in scatter)
    assert len(scatter) == 2
    # Of distances once a run.
    assert [bound.name[:13] for bound in found.bounds].count("proposition 2") == 1


def test_tokens_of_exact_centroids_are_read_back(layered: Path) -> None:
    found = audit(layered)
    recalls = [f for f in found.findings if f.metric == "token_recall"]
    assert len(recalls) == 16
    assert all(f.value == 1.0 and f.verdict == "leaks" and f.baseline < 0.6 for f in recalls)
    # An exact recall still has an interval, and texts that are not behind the centroid are not in it.
    assert all(0 < f.ci[0] < 1 for f in recalls)
    assert all(f.details["recall_of_other_texts"] < 0.8 for f in recalls)
    assert found.verdicts.inference == "leaks"
    assert any(entry.attack.startswith("membership, likelihood") for entry in found.not_run)


def test_a_private_release_has_its_cap_and_stays_below_it(slm: Slm, tmp_path: Path) -> None:
    found = audit(made(tmp_path, slm, Recipe(noise=1.0)))
    ratio = [f for f in found.findings if f.metric == "auc" and f.number == 1]
    assert ratio
    for f in ratio:
        # noise_multiplier 1 with shares .8, .1, .1: mu^2 = 1.25, and 4 + 2/8 under replace-one.
        assert f.details["claim_auc_cap"] == pytest.approx(auc_cap(np.sqrt(4.25)), abs=1e-6)
        assert f.cap is not None
        assert f.cap >= f.details["claim_auc_cap"] - 1e-9
        assert f.verdict != "violates_claim"
        assert f.claim_epsilon
        assert f.details["simulated"] is True
        assert (f.adjacency, f.details["claim_adjacency"]) == ("replace-one", "add-remove")


@pytest.mark.parametrize(("adjacency", "per_unit"), [("replace-one", 1), ("add-remove", 2)])
def test_a_claim_by_unit_or_replace_one_is_compared_in_the_attacks_game(
    slm: Slm, tmp_path: Path, adjacency: Adjacency, per_unit: int
) -> None:
    """The cap by hand from what the claim says of its noise. Under replace-one the claim is about the game
    itself, so its own epsilon is that of the game; under add-remove the game allows more.
    """
    found = audit(made(tmp_path, slm, Recipe(noise=1.0, adjacency=adjacency, per_unit=per_unit)))
    unit = "row" if per_unit == 1 else "patient_id"
    claims = [release.claim for release in found.releases]
    assert {(claim["unit"], claim["adjacency"]) for claim in claims} == {(unit, adjacency)}
    figures = [f for f in found.findings if f.metric == "auc" and f.number == 1]
    assert {f.silo for f in figures} == {"silo-1", "silo-2"}
    z, counts, votes = (claims[0][f"{name}_multiplier"] for name in ("noise", "count", "prediction"))
    mu = math.sqrt(max(4 / z**2, 2 / z**2 + 2 / counts**2) + 2 / votes**2)
    for f in figures:
        assert f.details["claim_auc_cap"] == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=1e-9)
        assert f.cap is not None
        assert f.cap >= f.details["claim_auc_cap"] - 1e-9
        assert (f.details["claim_unit"], f.adjacency) == (unit, "replace-one")
        game = f.details["claim_epsilon_replace_one"]
        if adjacency == "replace-one":
            assert game == pytest.approx(f.claim_epsilon, rel=1e-6)
            assert claimed_words([f]) == f"claimed {game:.2f}"
        else:
            assert game > f.claim_epsilon
            assert claimed_words([f]) == f"claimed {f.claim_epsilon:.2f}, which is {game:.2f} here"
    text = " ".join(printed([("run", found)]).split())
    assert f"for {'one row, exchanged' if per_unit == 1 else 'one patient (patient_id) with all'}" in text


def test_noise_on_the_embedding_layer_leaves_the_prior(slm: Slm, tmp_path: Path) -> None:
    found = audit(made(tmp_path, slm, Recipe(layer="embeddings", noise=2.0)))
    recalls = [f for f in found.findings if f.metric == "token_recall"]
    assert recalls
    assert all(f.value == f.baseline and f.verdict == "none_shown" for f in recalls)
    assert "bounds what one unit changes" in str(recalls[0].cap_reason)


def test_a_run_without_releases_says_so(slm: Slm, tmp_path: Path) -> None:
    found = audit(made(tmp_path, slm, Recipe(method="standalone")), tmp_path / "out")
    assert found.findings == []
    assert "nothing left the silos" in found.not_run[0].why
    assert set(found.verdicts.model_dump().values()) == {"none_shown"}
    assert (tmp_path / "out" / "report.html").is_file()


def test_too_few_rows_are_not_a_score_of_zero(slm: Slm, tmp_path: Path) -> None:
    found = audit(made(tmp_path / "members", slm, Recipe(clusters=2), rows=6))
    assert not [f for f in found.findings if "member" in f.attack and f.silo == "silo-1"]
    assert any("6 rows behind centroids" in entry.why for entry in found.not_run)
    found = audit(made(tmp_path / "pool", slm, Recipe(clusters=2), pool=20))
    assert found.findings == []
    assert any("10 auxiliary rows" in entry.why for entry in found.not_run)
    found = audit(made(tmp_path / "withheld", slm, Recipe(min_size=50)))
    assert found.findings == []
    assert any("every cluster was withheld" in entry.why for entry in found.not_run)


def test_a_truth_without_rows_behind_an_exact_centroid_is_an_error(pooled: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(pooled, tmp_path / "run"))
    file = run / "truth" / "silo-1" / "r002-share.json"
    truth = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**truth, "clusters": [[], *truth["clusters"][1:]]}), encoding="utf-8")
    with pytest.raises(ProtocolError, match="the truth names 0"):
        audit(run)


@pytest.mark.parametrize("layer", ["pooled", "embeddings"])
@pytest.mark.parametrize("rows", [0, 3, 7])
def test_noisy_centroids_of_few_rows_are_not_run(slm: Slm, tmp_path: Path, layer: str, rows: int) -> None:
    """Noise alone keeps some centroids: none, or next to none, of the silo's rows may be behind them."""
    recipe = Recipe(layer=layer, clusters=6, noise=9.0, min_size=1)
    run = made(tmp_path, slm, recipe, rows=40)
    for silo in recipe.silos:
        file = run / "truth" / silo / "r002-share.json"
        truth = json.loads(file.read_text(encoding="utf-8"))
        assert truth["clusters"]
        kept = iter(range(rows))
        few = [[row for row in group if next(kept, None) is not None] for group in truth["clusters"]]
        file.write_text(json.dumps({**truth, "clusters": few}), encoding="utf-8")
    found = audit(run)
    attack = "membership, likelihood ratio" if layer == "pooled" else "token recovery"
    if layer == "pooled" or not rows:
        assert found.findings == []
        reasons = [one.why for one in found.not_run if one.attack == attack]
        assert [why.split(",")[0] for why in reasons] == ["silo-1", "silo-2"]
        assert all("needed" in why or "fewer" in why for why in reasons)
    assert all(np.isfinite(f.value) for f in found.findings)


def test_no_text_of_the_truth_is_written(layered: Path, tmp_path: Path) -> None:
    audit(layered, tmp_path / "out")
    written = (tmp_path / "out" / "audit.json").read_text(encoding="utf-8")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert Audit.model_validate_json(written).schema_ == "securefl.audit/1"
    for text, _ in ROWS:
        assert text not in written
        assert text not in page
    # Nothing read back either: no two neighbouring words of any text.
    for text, _ in ROWS[:80]:
        assert " ".join(text.split()[2:4]) not in written


def test_the_audit_is_deterministic(pooled: Path) -> None:
    assert audit(pooled).to_json() == audit(pooled).to_json()


def test_the_runs_own_report_is_kept(slm: Slm, tmp_path: Path) -> None:
    run = made(tmp_path, slm, Recipe(method="standalone"))
    (run / "report.html").write_text("the run's", encoding="utf-8")
    audit(run, run)
    assert (run / "report.html").read_text(encoding="utf-8") == "the run's"
    assert (run / "audit.html").is_file()
    assert (run / "audit.json").is_file()


def test_a_changed_release_is_refused(slm: Slm, tmp_path: Path) -> None:
    run = made(tmp_path, slm, Recipe())
    file = run / "releases" / "silo-1" / "r002-share-centroids.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ProtocolError, match="r002-share-centroids"):
        audit(run)


def test_an_encoder_that_is_not_there_is_an_error(slm: Slm, tmp_path: Path) -> None:
    run = made(tmp_path / "other", slm, Recipe(info={"encoder": "0" * 64}))
    with pytest.raises(ProtocolError, match="not among the models"):
        audit(run)
    run = made(tmp_path / "base", slm, Recipe(info={"base_sha256": "0" * 64}))
    with pytest.raises(ModelError, match="another checkpoint"):
        audit(run)
    run = made(tmp_path / "label", slm, Recipe(info={"labels": "a"}))
    with pytest.raises(PayloadError, match="labels"):
        audit(run)


def test_a_model_with_other_weights_than_stated_is_an_error(slm: Slm, tmp_path: Path) -> None:
    run = made(tmp_path, slm, Recipe())
    from attacks.runs import open_release

    file = run / "releases" / "server" / "r002-model.safetensors"
    release = open_release(file)
    name = sorted(release.tensors)[0]
    tensors = {**release.tensors, name: release.tensors[name] + np.float32(1)}
    file.write_bytes(encode_release(type(release)(release.kind, tensors, release.info, release.claim)))
    with pytest.raises(ProtocolError, match="fingerprint"):
        audit(run)


def test_truth_of_another_release_is_an_error(slm: Slm, tmp_path: Path) -> None:
    run = made(tmp_path, slm, Recipe())
    file = run / "truth" / "silo-1" / "r002-share.json"
    truth = json.loads(file.read_text(encoding="utf-8"))
    first, second, *rest = truth["clusters"]
    other = {**truth, "clusters": [[second[0], *first[1:]], [first[0], *second[1:]], *rest]}
    file.write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(ProtocolError, match="is not the mean of the rows"):
        audit(run)
    file.write_text(json.dumps({**truth, "clusters": truth["clusters"][::-1]}), encoding="utf-8")
    with pytest.raises(ProtocolError, match=r"states \d+ rows, the truth names \d+"):
        audit(run)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("sizes", lambda a: a * 0, "sizes: a centroid of no rows"),
        ("sizes", lambda a: a[:-1], "is not a finite array"),
        ("centroids", lambda a: a * np.float32("nan"), "centroids: is not a finite array"),
        ("centroids", lambda a: a[0], "centroids: is not a finite array"),
        ("centroids", lambda a: a[:, :-1], "are not of the width of the encoder"),
        ("predictions", None, "lacks predictions"),
    ],
)
def test_a_malformed_release_is_refused(
    slm: Slm, tmp_path: Path, name: str, change: object, words: str
) -> None:
    """The silo itself released it so: ledger, result and file agree."""

    def spoil(release: Release) -> Release:
        tensors = {**release.tensors}
        array = tensors.pop(name)
        if change is not None:
            tensors[name] = change(array)  # type: ignore[operator]
        return replace(release, tensors=tensors)

    run = made(tmp_path, slm, Recipe(noise=0.1, spoil=spoil))
    with pytest.raises(ProtocolError, match=words):
        audit(run)


def test_a_claim_in_a_release_that_is_not_the_recorded_one_is_refused(slm: Slm, tmp_path: Path) -> None:
    """The body claims more than the ledger charged: the file's hash is right, its claim is not."""

    def spoil(release: Release) -> Release:
        return replace(release, claim=NonPrivate(reason="another"))

    run = made(tmp_path, slm, Recipe(noise=1.0, spoil=spoil))
    with pytest.raises(ProtocolError, match="kind or claim is not the one"):
        audit(run)


def test_pool_rows_that_a_silo_has_are_no_controls(slm: Slm, tmp_path: Path) -> None:
    run = made(tmp_path, slm, Recipe())
    own = json.loads((run / "truth" / "silo-1" / "rows.jsonl").read_text(encoding="utf-8").split("\n")[0])
    before = len(Run(run).pool)
    with (run / "truth" / "pool.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**own, "id": "copy", "text": f" {own['text'].upper()}"}) + "\n")
    assert len(Run(run).pool) == before


def _clusters(clusters: object) -> str:
    return json.dumps({"release": "r002-share-centroids.safetensors", "clusters": clusters})


HALF = '{"id": "a", "text": "b", "label": "c"}\n{"id": "d", "text": "\\ud83d", "label": "c"}\n'
RAW_HALF = '{"id": "a", "text": "\ud83d", "label": "c"}\n'.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda run: (run / "result.json").unlink(), "result.json"),
        (lambda run: (run / "truth" / "pool.jsonl").unlink(), "pool.jsonl"),
        (lambda run: (run / "truth" / "pool.jsonl").write_text("no\n"), "line 1"),
        (lambda run: (run / "truth" / "pool.jsonl").write_text("[" * 200_000), "line 1"),
        (lambda run: (run / "truth" / "pool.jsonl").write_text(HALF), "line 2: holds half a surrogate pair"),
        (lambda run: (run / "truth" / "pool.jsonl").write_bytes(RAW_HALF), "line 1: holds half a surrogate"),
        (lambda run: (run / "truth" / "silo-1" / "rows.jsonl").write_text("\n"), "no rows"),
        (lambda run: (run / "truth" / "silo-1" / "rows.jsonl").write_text('{"id": 1}'), "line 1"),
        (lambda run: (run / "truth" / "silo-1" / "r002-share.json").unlink(), "which rows"),
        *(
            (lambda run, text=text: (run / "truth" / "silo-1" / "r002-share.json").write_text(text), word)
            for text, word in (
                ("[", "r002-share.json"),
                ("[" * 200_000, "r002-share.json"),
                ("[]", "which rows"),
                (_clusters(None), "one list"),
                (_clusters([[], []]), "one list"),
                (_clusters(["row-1", {}, 3]), "one list"),
                (_clusters([["row-1"], ["row-1"], []]), "behind two"),
                (_clusters([[["row-1"]], [], []]), "row id"),
                (_clusters([["no such row"], [], []]), "row id"),
            )
        ),
    ],
)
def test_a_malformed_folder_is_bad_usage(slm: Slm, tmp_path: Path, damage: object, word: str) -> None:
    run = made(tmp_path, slm, Recipe())
    damage(run)  # type: ignore[operator]
    with pytest.raises(UsageError, match=word) as caught:
        audit(run)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_an_encoder_that_makes_all_texts_alike_is_an_error(slm: Slm, tmp_path: Path) -> None:
    state = slm.state()
    try:
        slm.load_state({name: np.zeros_like(array) for name, array in state.items()})
        run = made(tmp_path, slm, Recipe(clusters=1))
    finally:
        slm.load_state(state)
    with pytest.raises(SecureflError, match="would mean nothing"):
        audit(run)


def test_one_of_many_findings_does_not_leak_by_chance(pooled: Path) -> None:
    """A finding is judged by its own interval, the answers by intervals widened for all findings."""
    found = audit(pooled).findings[0]
    run = Run(pooled)

    def figure(right: int) -> Figure:
        # Of 100 trials 61 put the lower end just above one half at a level of .05, and below it at .0025.
        return Figure(
            attack="membership", number=1, adversary=MEMBERSHIP, target="t", metric="auc",
            measure=Proportion(right, 100), baseline=0.5, bears_on=("singling_out",),
            **at(run.releases[0], NonPrivate(reason="x")),
        )  # fmt: skip

    result = judge(run, [], None, Book(figures=[figure(61)] + [figure(50)] * 19))
    assert result.findings[0].verdict == "leaks"
    assert result.verdicts.singling_out == "none_shown"
    assert found.verdict == "leaks"


@pytest.mark.parametrize("name", ["releases", "truth", "releases/silo-1/audit", "audit"])
def test_an_audit_does_not_go_into_the_runs_folder(pooled: Path, name: str) -> None:
    before = sorted(pooled.rglob("*"))
    with pytest.raises(UsageError, match="lies in the run's folder"):
        audit(pooled, pooled / name)
    assert sorted(pooled.rglob("*")) == before


def test_figures_survive_being_kept(pooled: Path, tmp_path: Path) -> None:
    """A second audit after a crash says what an undisturbed one says, and does only what was left."""
    whole, calls = audit(pooled), 0
    real = membership.attack

    def falling(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "attack", falling)
        with pytest.raises(KeyboardInterrupt):
            audit(pooled, tmp_path / "out")
        kept = tmp_path / "out" / FOLDER
        assert kept.stat().st_mode & 0o077 == 0
        assert any(kept.iterdir())
        calls = 2
        assert audit(pooled, tmp_path / "out") == whole
        assert calls == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "audit.json", "audit.md", "report.html",
    ]  # fmt: skip


def test_what_was_kept_of_another_run_or_was_cut_is_not_used(slm: Slm, pooled: Path, tmp_path: Path) -> None:
    kept = Kept(tmp_path, "one run")
    figures = [figure for figure in _book(pooled).figures if figure.number == 1]
    kept.store("1", figures, [], [])
    assert kept.load("1") is not None
    assert kept.load("2") is None
    assert Kept(tmp_path, "another run").load("1") is None
    path = next((tmp_path / FOLDER).iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    assert kept.load("1") is None


def test_what_is_kept_does_not_go_through_a_link(pooled: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    for make in (lambda p: p.symlink_to(tmp_path / "elsewhere"), lambda p: p.symlink_to("none"), Path.touch):
        make(out / FOLDER)
        with pytest.raises(UsageError, match="is a link or a file"):
            audit(pooled, out, attacks=frozenset({1}))
        (out / FOLDER).unlink()
    assert not any((tmp_path / "elsewhere").iterdir())
    assert not any(out.iterdir())


def _book(run_dir: Path) -> Book:
    book = Book()
    bench.membership.ATTACK.run(Evidence(Run(run_dir)), book, lambda *_: None)
    return book


def test_command_prints_one_json_document(pooled: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from attacks.cli import main; main()", "run", str(pooled), "--out",
         str(tmp_path / "out"), "--json", *FEW],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == json.loads((tmp_path / "out" / "audit.json").read_text(encoding="utf-8"))


def test_command_signs_what_it_wrote(pooled: Path, tmp_path: Path) -> None:
    """Report, findings and note; a second audit into the same folder takes the old signature away."""
    auditor, out = Identity.generate("auditor"), tmp_path / "out"
    auditor.save(tmp_path / "auditor.key", b"correct horse")
    (tmp_path / "words").write_text("correct horse")
    (tmp_path / "words").chmod(0o600)
    command = ["run", str(pooled), "--out", str(out), *FEW]
    key = ["--identity", str(tmp_path / "auditor.key"), "--passphrase-file", str(tmp_path / "words")]
    assert run_app(cli.app, "securefl-audit", [*command, *key]) == 0
    assert set(verify_audit(out, auditor.card).files) == {"audit.json", "report.html", "audit.md"}
    assert "# Audit of run" in (out / "audit.md").read_text(encoding="utf-8")
    (tmp_path / "words").write_text("wrong")
    assert run_app(cli.app, "securefl-audit", [*command, *key]) == 2
    assert verify_audit(out, auditor.card), "a wrong passphrase is found out before anything is done"
    assert run_app(cli.app, "securefl-audit", command) == 0
    assert not (out / SIGNATURE).exists()


def test_command_prints_a_table(pooled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(cli.app, "securefl-audit", ["run", str(pooled), "--out", str(tmp_path / "out"), *FEW]) == 0
    shown = capsys.readouterr().out
    assert "singling out: leaks" in shown
    assert "proves nothing" in shown


def test_command_ends_with_4_on_a_broken_claim_and_still_writes(
    slm: Slm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault: the release claims the noise of its mechanism, and none was added."""
    recipe = Recipe(noise=3.0, clusters=2, random_groups=True, fault="no noise")
    run = made(tmp_path, slm, recipe, rows=12)
    out = tmp_path / "out"
    code = run_app(cli.app, "securefl-audit", ["run", str(run), "--out", str(out), *FEW])
    written = Audit.model_validate_json((out / "audit.json").read_text(encoding="utf-8"))
    assert code == 4
    assert (out / "report.html").is_file()
    assert any(
        f.verdict == "violates_claim" and f.cap is not None and f.ci[0] > f.cap for f in written.findings
    )
    assert "above the cap" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("missing", 2), ("changed", 4)])
def test_command_errors_are_one_sentence(
    slm: Slm, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    run = tmp_path / "nothing"
    if name == "changed":
        run = made(tmp_path, slm, Recipe())
        (run / "releases" / "silo-2" / "r002-share-centroids.safetensors").write_bytes(b"\0" * 40)
    assert run_app(cli.app, "securefl-audit", ["run", str(run), "--out", str(tmp_path / "out")]) == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("securefl-audit:")
    assert "Traceback" not in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()
