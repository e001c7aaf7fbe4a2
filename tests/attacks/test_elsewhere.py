"""Vectors that another system released: attacked as a run's own, and refused where they do not fit."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from attacks import bench, cli
from attacks.audit import audit_elsewhere
from attacks.bench import pool, token_figures, token_settings
from attacks.elsewhere import Columns, Elsewhere, read_claim
from attacks.evidence import Evidence
from attacks.findings import Audit
from attacks.judgement import Book
from securefl.centroid_privacy import clip_rows
from securefl.console import run_app
from securefl.errors import ProtocolError, SecureflError, UsageError
from securefl.models import base_fingerprint, load_slm
from securefl.privacy import gaussian_epsilon
from securefl.training import embed
from tests import tiny

ROWS = tiny.make_texts(300, seed=3, length=9)
GROUPS = np.arange(60) % 12
CLAIM = {
    "mechanism": "gaussian-sums",
    "clip": 2.0,
    "noise_multiplier": 1.0,
    "count_multiplier": 2.0,
    "delta": 1e-5,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, 12 means of 5 rows each, embeddings of single rows, rows and a pool."""
    folder = tmp_path_factory.mktemp("elsewhere")
    tiny.make_encoder(folder / "encoder", width=64)
    slm = load_slm(str(folder / "encoder"), ["a", "b"], max_length=12, train_embeddings=False, seed=0)
    vectors = embed(slm, [text for text, _ in ROWS[:60]], "pooled").astype(np.float64)
    means = np.stack([vectors[g == GROUPS].mean(0) for g in range(12)])
    np.save(folder / "means.npy", means)
    np.save(folder / "embeddings.npy", vectors)
    sizes = np.full(12, 5.0)
    save_file({"centroids": means, "sizes": sizes}, folder / "means.safetensors")
    rng = np.random.default_rng(0)
    sums = np.stack([clip_rows(vectors[g == GROUPS], 2.0).sum(0) for g in range(12)])
    noisy = np.maximum(sizes + rng.normal(0, 2.0, 12), 1)
    noised = (sums + rng.normal(0, 2.0, sums.shape)) / noisy[:, None]
    save_file({"centroids": noised, "sizes": noisy}, folder / "noised.safetensors")
    _write(folder / "rows.csv", [(t, label, str(g)) for (t, label), g in zip(ROWS[:60], GROUPS, strict=True)])
    _write(folder / "pool.csv", [(t, label, "0") for t, label in ROWS[60:]])
    _write(folder / "all.csv", [(t, label, "0") for t, label in ROWS])
    (folder / "claim.json").write_text(json.dumps(CLAIM))
    return folder


def _write(path: Path, lines: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "cluster"])
        writer.writerows(lines)


def source(made: Path, vectors: str = "means.npy", **changes: Any) -> Elsewhere:
    given: dict[str, Any] = {
        "encoder": str(made / "encoder"), "pool": made / "pool.csv", "rows": made / "rows.csv",
        "columns": Columns("text", "label", "cluster"), "max_length": 12,
    }  # fmt: skip
    return Elsewhere(made / vectors, **{**given, **changes})


def audited(one: Elsewhere, out: Path, *attacks: int) -> Audit:
    return audit_elsewhere(one, out, attacks=frozenset(attacks) if attacks else None)


def test_means_are_attacked_as_a_runs_own(made: Path, tmp_path: Path) -> None:
    found = audited(source(made), tmp_path / "out")
    values = {(f.attack, f.metric): f for f in found.findings}
    membership = values[("membership, likelihood ratio", "auc")]
    assert membership.value > 0.75  # in whichever of the twelve it is looked for
    assert membership.verdict == "leaks"
    search = values[(pool.TOGETHER, "recall")]
    assert search.value == 1.0  # random groups: a row may be in any, wherever it lies
    assert search.details["certain_centroids"] == 12
    assert (found.method, found.run) == ("elsewhere", "means.npy")
    assert {release.kind for release in found.releases} == {"centroids"}
    said = {entry.attack for entry in found.not_run}
    assert "one-run audit with canaries" in said
    for name in ("audit.json", "report.html", "audit.md"):
        content = (tmp_path / "out" / name).read_text()
        assert not any(text in content for text, _ in ROWS[:60])


def test_embeddings_of_single_texts(made: Path, tmp_path: Path) -> None:
    one = source(made, "embeddings.npy", columns=Columns("text", "label"))
    found = audited(one, tmp_path / "out", 1, 8)
    assert {f.value for f in found.findings if f.metric == "auc" and "ratio" in f.attack} == {1.0}
    assert found.releases[0].rows_per_centroid == [1.0] * 60


def _layered(made: Path) -> None:
    """Means of an embedding layer's outputs at each position, in a file that states sizes, and one that does
    not."""
    slm = load_slm(str(made / "encoder"), ["a", "b"], max_length=12, train_embeddings=False, seed=0)
    vectors, mask = embed(slm, [text for text, _ in ROWS[:60]], 0)
    there = np.stack([mask[g == GROUPS].sum(0) for g in range(12)])
    means = np.stack([vectors[g == GROUPS].sum(0) for g in range(12)]) / np.maximum(there, 1)[..., None]
    sizes = np.full(12, 5.0)
    tensors = {"centroids": means.astype(np.float32), "mask": (there > 0).astype(np.float32), "sizes": sizes}
    save_file(tensors, made / "layered.safetensors")
    np.save(made / "layered.npy", means.astype(np.float32))


def test_centroids_of_an_embedding_layer_are_read_token_by_token(made: Path, tmp_path: Path) -> None:
    _layered(made)
    found = audited(source(made, "layered.safetensors", max_length=None), tmp_path / "out", 2)
    assert {release.kind for release in found.releases} == {"embedding-centroids"}
    values = {(f.attack, f.metric): f for f in found.findings if " of 12" not in f.target}
    assert values[(token_figures.NAME, "token_f1")].value == 1.0
    withheld = values[(token_settings.SIZES, "token_f1")]
    assert withheld.value == 1.0
    assert withheld.details["sizes_right"] == 1.0
    assert withheld.control is not None
    assert withheld.control < 0.9
    with pytest.raises(UsageError, match="has 12 positions"):
        source(made, "layered.npy", max_length=10)
    with pytest.raises(UsageError, match="normalised"):
        source(made, "layered.npy", max_length=None, normalised=True)


@pytest.mark.parametrize("unit", ["row", "patient"])
@pytest.mark.parametrize("name", ["means.safetensors", "layered.safetensors"])
def test_exact_means_under_a_claim_are_a_violation(made: Path, tmp_path: Path, name: str, unit: str) -> None:
    _layered(made)
    claim = tmp_path / "claim.json"
    claim.write_text(json.dumps({**CLAIM, "unit": unit, "clip": 0.5}))  # every row is longer
    length = 12 if name.startswith("means") else None
    found = audited(source(made, name, claim=claim, max_length=length), tmp_path / "out", 3)
    assert found.verdicts.singling_out == "violates_claim"
    worst = max(f.value for f in found.findings if f.metric == "noise_claimed_over_found")
    assert worst > 1e4
    assert "found no noise, or hardly any" in (tmp_path / "out" / "audit.md").read_text()


def test_a_claim_or_sizes_that_lie_hide_nothing_without_the_rows(made: Path, tmp_path: Path) -> None:
    _layered(made)
    blind = {"rows": None, "columns": Columns(), "max_length": None}
    claimed = audited(
        source(made, "layered.safetensors", claim=made / "claim.json", **blind), tmp_path / "c", 2
    )
    (read,) = claimed.findings
    assert (read.value, read.verdict) == (1.0, "leaks")
    assert read.cap_reason is not None
    assert "less of it, or none" in read.cap_reason
    vectors = np.load(made / "layered.npy")
    means = np.load(made / "means.npy")
    for number, size in enumerate((4.0, 1e12)):
        lied = np.full(12, size)
        save_file({"centroids": vectors, "sizes": lied}, tmp_path / f"l{number}.safetensors")
        save_file({"centroids": means, "sizes": lied}, tmp_path / f"p{number}.safetensors")
        encoder = {"encoder": str(made / "encoder"), "columns": Columns(), "rows": None}
        layered = Elsewhere(tmp_path / f"l{number}.safetensors", pool=made / "pool.csv", **encoder)
        assert [f.value for f in audited(layered, tmp_path / f"l{number}", 2).findings] == [1.0]
        pooled = Elsewhere(
            tmp_path / f"p{number}.safetensors", pool=made / "all.csv", max_length=12, **encoder
        )
        assert [f.value for f in audited(pooled, tmp_path / f"p{number}", 8).findings] == [1.0]


def test_what_was_read_back_is_for_the_owner_alone(made: Path, tmp_path: Path) -> None:
    _layered(made)
    one = source(made, "layered.npy", max_length=None, columns=Columns("text", None, "cluster"))
    audit_elsewhere(one, tmp_path / "shown", show_text=True, attacks=frozenset({2}))
    audit_elsewhere(one, tmp_path / "plain", attacks=frozenset({2}))
    modes = {
        name: {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / name).iterdir()}
        for name in ("shown", "plain")
    }
    assert set(modes["shown"].values()) == {0}
    assert set(modes["plain"]) == {"audit.json", "report.html", "audit.md"}


@pytest.mark.parametrize("name", ["layered.safetensors", "layered.npy"])
def test_positions_that_add_up_need_no_rows(made: Path, tmp_path: Path, name: str) -> None:
    _layered(made)
    blind = {"rows": None, "columns": Columns(), "max_length": None}
    found = audited(source(made, name, **blind), tmp_path / "out", 2)
    (read,) = found.findings
    assert (read.attack, read.metric, read.value) == (token_settings.BLIND, "positions_read", 1.0)
    assert read.control == 0.0
    assert read.details["rows"] == 5.0
    # Of another encoder's table nothing adds up, which is no score of 0; nor does anything under noise.
    other = str(tiny.make_encoder(tmp_path / "other", width=64, seed=5))
    nothing = audited(source(made, name, encoder=other, **blind), tmp_path / "nothing", 2)
    assert not nothing.findings
    assert any("not known without the rows" in entry.why for entry in nothing.not_run)
    loud = np.random.default_rng(0).normal(0, 1, (12, 12, 64))
    np.save(tmp_path / "loud.npy", np.load(made / "layered.npy") + loud)
    noise = source(tmp_path, "loud.npy", encoder=str(made / "encoder"), pool=made / "pool.csv",
                   claim=made / "claim.json", **blind)  # fmt: skip
    noised = audited(noise, tmp_path / "noised", 2)
    assert not noised.findings
    assert any("give the rows" in entry.why for entry in noised.not_run)


def test_a_claim_caps_what_is_found_and_other_rows_are_refused(made: Path, tmp_path: Path) -> None:
    claim = made / "claim.json"
    found = audited(source(made, "noised.safetensors", claim=claim), tmp_path / "out", 1, 8)
    assert all(f.cap is not None and f.verdict != "violates_claim" for f in found.findings)
    mu = np.sqrt(1 + 1 / 4)
    assert found.findings[0].claim_epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-9)
    # The same vectors, said to be of other rows.
    _write(tmp_path / "others.csv", [(t, label, str(i % 12)) for i, (t, label) in enumerate(ROWS[60:120])])
    loud = np.random.default_rng(1).normal(0, 40, (12, 64))
    np.save(tmp_path / "far.npy", loud)
    with pytest.raises(ProtocolError, match="times as far"):
        audited(source(tmp_path, "far.npy", encoder=str(made / "encoder"), pool=made / "pool.csv",
                       rows=tmp_path / "others.csv", claim=claim), tmp_path / "far", 1)  # fmt: skip


def test_without_the_rows_only_what_proves_itself_is_said(made: Path, tmp_path: Path) -> None:
    one = source(made, "means.safetensors", rows=None, pool=made / "all.csv", columns=Columns())
    found = audited(one, tmp_path / "out")
    (named,) = found.findings
    assert (named.attack, named.metric, named.value) == (pool.NAMED, "vectors_named", 1.0)
    assert named.control == 0.0
    book = Book(show_text=True)
    bench.pool.ATTACK.run(Evidence(one), book, lambda *_: None)
    assert set(book.figures[0].texts) <= {text for text, _ in ROWS[:60]}
    # Means of which nobody says how many texts are behind them are tried with several numbers.
    sizeless = source(made, "means.npy", rows=None, pool=made / "all.csv", columns=Columns())
    assert [f.value for f in audited(sizeless, tmp_path / "sizeless", 8).findings] == [1.0]
    # Where the pool does not hold the rows nothing proves itself, which is no score of 0.
    blind = audited(source(made, "means.safetensors", rows=None, columns=Columns()), tmp_path / "none", 8)
    assert not blind.findings
    assert any("not known without the rows" in entry.why for entry in blind.not_run)


def test_overlap_of_the_pool_is_left_out_and_said(made: Path, tmp_path: Path) -> None:
    found = audited(source(made, pool=made / "all.csv"), tmp_path / "out", 1)
    assert found.overlap is not None
    assert found.overlap.pool == len(ROWS)
    assert found.overlap.left_out >= 60


def test_another_encoder_is_an_error_and_no_low_score(made: Path, tmp_path: Path) -> None:
    other = tiny.make_encoder(tmp_path / "other", width=64, seed=5)
    with pytest.raises(ProtocolError, match="not the mean of the rows"):
        audited(source(made, encoder=str(other)), tmp_path / "out", 1)
    vectors = np.load(made / "means.npy")
    save_file({"centroids": vectors}, tmp_path / "named.safetensors", metadata={"encoder": "0" * 64})
    with pytest.raises(ProtocolError, match="made with another encoder"):
        Elsewhere(tmp_path / "named.safetensors", str(made / "encoder"), made / "pool.csv")
    mine = base_fingerprint(str(made / "encoder"))
    save_file({"centroids": vectors}, tmp_path / "named.safetensors", metadata={"encoder": mine})
    Elsewhere(tmp_path / "named.safetensors", str(made / "encoder"), made / "pool.csv")
    np.save(tmp_path / "narrow.npy", vectors[:, :50])
    one = Elsewhere(tmp_path / "narrow.npy", str(made / "encoder"), made / "pool.csv", max_length=12)
    with pytest.raises(ProtocolError, match="made with another one"):
        audited(one, tmp_path / "out", 8)


@pytest.mark.parametrize("attack", [1, 5, 8, 9, 13])
def test_no_attack_scores_vectors_that_are_not_of_the_rows(made: Path, tmp_path: Path, attack: int) -> None:
    for changes in (
        {"encoder": str(tiny.make_encoder(tmp_path / "other", width=64, seed=5))},
        {"max_length": 6},
    ):
        with pytest.raises(ProtocolError, match="not the mean of the rows"):
            audited(source(made, **changes), tmp_path / "out", attack)


def test_right_vectors_at_the_wrong_words_are_another_encoders(made: Path, tmp_path: Path) -> None:
    """Of a table whose entries stand elsewhere sums add up too, but to words that nobody writes."""
    unused = [f"unused{number}" for number in range(300)]
    mine = tiny.make_encoder(tmp_path / "encoder", width=64, vocabulary=(*tiny.WORDS, *unused))
    theirs = load_slm(str(mine), ["a", "b"], max_length=12, train_embeddings=False, seed=0)
    words = theirs.model.get_input_embeddings().weight
    known = theirs.tokenizer.convert_tokens_to_ids(list(tiny.WORDS))
    rare = theirs.tokenizer.convert_tokens_to_ids(unused[: len(known)])
    with torch.no_grad():
        words[[*known, *rare]] = words[[*rare, *known]].clone()
    right = load_slm(str(mine), ["a", "b"], max_length=12, train_embeddings=False, seed=0)
    for name, slm in (("right", right), ("wrong", theirs)):
        vectors, mask = embed(slm, [text for text, _ in ROWS[:60]], 0)
        save_file({"vectors": vectors, "mask": mask.astype(np.float32)}, tmp_path / f"{name}.safetensors")
    blind = {"rows": None, "columns": Columns(), "max_length": None, "encoder": str(mine),
             "pool": made / "pool.csv"}  # fmt: skip
    (read,) = audited(source(tmp_path, "right.safetensors", **blind), tmp_path / "a", 2).findings
    assert read.value == 1.0
    with pytest.raises(ProtocolError, match="no more than of any words"):
        audited(source(tmp_path, "wrong.safetensors", **blind), tmp_path / "b", 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mechanism": "laplace"}, "mechanism"),
        ({"mechanism": None}, "an epsilon without a mechanism bounds nothing"),
        ({"clip": 0}, "clip"),
        ({"clip": float("nan")}, "JSON"),
        ({"noise_multiplier": -1}, "noise_multiplier"),
        ({"extra": 1}, "extra"),
        ({"epsilon": 0.5}, "this noise gives"),
        ({"delta": 1}, "delta"),
        ({"unit": "silo"}, "unit"),
        *(
            ({name: value}, name)
            for name in ("noise_multiplier", "count_multiplier", "clip", "epsilon")
            for value in (1e308, 1e-308, 5e-324)
        ),
        ({"count_multiplier": 0.009}, "count_multiplier: input should be greater than or equal to 0.01"),
        ({"clip": 1e7}, "clip: input should be less than or equal to 1000000"),
        ({"noise_multiplier": 1e6, "count_multiplier": 1e6, "delta": 0.9}, "delta: at 0.9 .* epsilon of 0"),
        ({"a patient with": 1}, "a field .its name is not shown.: extra"),
        ({"x" * 40: 1}, "its name is not shown"),
    ],
)
def test_a_claim_without_a_mechanism_or_with_too_little_noise(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = tmp_path / "claim.json"
    path.write_text(json.dumps({**CLAIM, **change}))
    with pytest.raises(UsageError, match=says):
        read_claim(path)
    path.write_text("[1]")
    with pytest.raises(UsageError, match="mechanism"):
        read_claim(path)
    path.write_text(json.dumps(CLAIM).replace('"clip"', '"clip": 1, "clip"'))
    with pytest.raises(UsageError, match="names a field twice"):
        read_claim(path)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (["x"] * 60, "must be the number"),
        (["9" * 5000] * 60, "must be the number"),
        (["12"] * 60, "must be the number"),
        (["0"] * 60, "no row has 1"),
    ],
)
def test_rows_must_name_every_vector(made: Path, tmp_path: Path, groups: list[str], says: str) -> None:
    rows = tmp_path / "rows.csv"
    _write(rows, [(t, label, g) for (t, label), g in zip(ROWS[:60], groups, strict=True)])
    with pytest.raises(SecureflError, match=says):
        source(made, rows=rows)
    with pytest.raises(UsageError, match="60 rows for 12 vectors"):
        source(made, columns=Columns("text", "label"))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (Columns("absent"), r"has no column \"absent\" \(--text, --label, --group\); it has \"text\""),
        (Columns("text", "absent"), "--text, --label, --group"),
        (Columns("text", None, "absent"), "--text, --label, --group"),
        (Columns("text", "text"), "--text and --label name the same"),
        (Columns("text", None, "text"), "--text and --group name the same"),
    ],
)
def test_a_column_is_named_as_the_command_names_it(made: Path, columns: Columns, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        source(made, columns=columns)
    assert "data." not in str(caught.value)


def test_a_fingerprint_that_is_none_is_not_repeated(made: Path, tmp_path: Path) -> None:
    save_file({"centroids": np.ones((12, 64))}, tmp_path / "a.safetensors", metadata={"encoder": "a win"})
    with pytest.raises(ProtocolError, match="it names no fingerprint"):
        source(tmp_path, "a.safetensors", encoder=str(made / "encoder"), pool=made / "pool.csv",
               rows=made / "rows.csv")  # fmt: skip


def test_unscaled_vectors_that_are_said_to_be_scaled(made: Path, tmp_path: Path) -> None:
    says = "a score would mean nothing; check --encoder, --normalised, --max-length, --group$"
    with pytest.raises(ProtocolError, match=says):
        audited(source(made, normalised=True), tmp_path / "out", 1)
    save_file(
        {"centroids": np.load(made / "means.npy"), "sizes": np.full(12, 4.0)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(ProtocolError, match="states 4 rows, the truth names 5 for it; check --group"):
        audited(source(tmp_path, "a.safetensors", encoder=str(made / "encoder"), pool=made / "pool.csv",
                       rows=made / "rows.csv"), tmp_path / "out", 1)  # fmt: skip


def test_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--releases", str(made / "means.npy"), "--encoder", str(made / "encoder"), "--pool",
             str(made / "pool.csv"), "--rows", str(made / "rows.csv"), "--group", "cluster", "--max-length",
             "12", "--attacks", "1,8", "--out", str(tmp_path / "out"), "--json"]  # fmt: skip
    assert run_app(cli.app, "securefl-audit", words) == 0
    document = json.loads(capsys.readouterr().out)
    assert {finding["number"] for finding in document["findings"]} == {1, 8}
    assert document["overlap"]["left_out"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name either"),
        (["x", "--releases", "y.npy"], "name either"),
        (["--releases", "y.npy"], "needs --encoder and --pool"),
        (["x", "--pool", "p.csv"], "--pool: goes with --releases"),
        *(
            (["x", *option], f"{option[0]}: goes with --releases")
            for option in (
                ["--text", "text"],
                ["--label", "l"],
                ["--max-length", "64"],
                ["--seed", "0"],
                ["--normalised"],
            )
        ),
        (["--releases", "y.npy", "--seed", "-1"], "--seed must be 0 or more"),
        (["x", "--attacks", "1,b"], "--attacks"),
        (["--releases", "y.npy", "--encoder", "e", "--pool", "p.csv"], "is not a file"),
    ],
)
def test_command_errors_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert run_app(cli.app, "securefl-audit", ["run", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


def test_an_unknown_attack(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no attack 99"):
        audited(source(made), tmp_path / "out", 99)
