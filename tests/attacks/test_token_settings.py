"""Attack 2 on releases from elsewhere that fit no plain mean of the public table.

A table that the institution trained, and rows of unequal weight.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from attacks import cli
from attacks.audit import audit_elsewhere
from attacks.bench import token_settings, token_weights
from attacks.elsewhere import Columns, Elsewhere
from attacks.findings import Audit
from attacks.vector_files import read_vectors
from securefl.console import run_app
from securefl.errors import DataError, ProtocolError, SecureflError, UsageError
from securefl.models import load_slm
from securefl.slm import Slm
from securefl.training import embed
from tests import tiny

LENGTH = 12
MADE = [text for text, _ in tiny.make_texts(300, seed=3, length=9)]
# Some end early, so that weights change from a position to the next.
ROWS = [" ".join(text.split()[: 9 - number % 4]) for number, text in enumerate(MADE)]
OURS, POOL = ROWS[:60], ROWS[60:]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The public encoder, beside the pool."""
    folder = tmp_path_factory.mktemp("settings")
    _write(folder / "pool.csv", POOL, np.zeros(len(POOL), np.int64))
    return tiny.make_encoder(folder / "encoder", width=64)


def _write(path: Path, texts: list[str], groups: NDArray[np.int64]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text", "cluster"], *zip(texts, groups.tolist(), strict=True)])


def _load(encoder: Path) -> Slm:
    return load_slm(str(encoder), ["a", "b"], max_length=LENGTH, train_embeddings=False, seed=0)


def _tuned(encoder: Path, each: float, common: float = 0.0) -> Slm:
    """The encoder after its word table moved: every entry at random by `each` of the table's scatter, and all
    entries together by `common` of it."""
    slm, generator = _load(encoder), torch.Generator().manual_seed(3)
    words = slm.model.get_input_embeddings().weight
    with torch.no_grad():
        scatter = words.std()
        words += each * scatter * torch.randn(words.shape, generator=generator)
        words += common * scatter * torch.randn(words.shape[1], generator=generator)
    return slm


def _release(folder: Path, slm: Slm, drawn: list[NDArray[np.float64]], **more: NDArray[Any]) -> None:
    """means.safetensors and rows.csv: weighted means of the first rows, group after group, by hand."""
    sizes = [len(one) for one in drawn]
    groups = np.repeat(np.arange(len(sizes)), sizes)
    vectors, mask = embed(slm, OURS[: len(groups)], 0)
    means, masks = np.zeros((len(sizes), LENGTH, vectors.shape[2])), np.zeros((len(sizes), LENGTH))
    for c, one in enumerate(drawn):
        behind = np.flatnonzero(groups == c)
        for s in range(LENGTH):
            there = [(w, row) for w, row in zip(one, behind, strict=True) if mask[row, s]]
            if there:
                masks[c, s] = 1
                means[c, s] = sum(w * vectors[row, s] for w, row in there) / sum(w for w, _ in there)
    tensors = {"centroids": means.astype(np.float32), "mask": masks.astype(np.float32), **more}
    save_file(tensors, folder / "means.safetensors")
    _write(folder / "rows.csv", OURS[: len(groups)], groups)


def _source(encoder: Path, folder: Path, rows: bool = True, **changes: Any) -> Elsewhere:
    given = {"rows": folder / "rows.csv", "columns": Columns("text", None, "cluster")} if rows else {}
    pool = encoder.parent / "pool.csv"
    return Elsewhere(folder / "means.safetensors", str(encoder), pool, **{**given, **changes})


def _audited(encoder: Path, folder: Path, rows: bool = True, **changes: Any) -> Audit:
    source = _source(encoder, folder, rows, **changes)
    return audit_elsewhere(source, folder / "out", attacks=frozenset({2}))


def _alike(count: int) -> list[NDArray[np.float64]]:
    return [np.ones(60 // count)] * count


@pytest.mark.parametrize(
    ("each", "common", "count", "most"),
    [(0.1, 1.0, 20, 0.5), (0.1, 0.5, 12, 0.5), (0.05, 0.0, 60, 1.0)],
)
def test_a_table_that_the_institution_trained(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    each: float, common: float, count: int, most: float,
) -> None:  # fmt: skip
    _release(tmp_path, _tuned(encoder, each, common), _alike(count))
    words = ["run", "--releases", str(tmp_path / "means.safetensors"), "--encoder", str(encoder), "--pool",
             str(encoder.parent / "pool.csv"), "--rows", str(tmp_path / "rows.csv"), "--group", "cluster",
             "--attacks", "2", "--out", str(tmp_path / "out"), "--json"]  # fmt: skip
    assert run_app(cli.app, "securefl-audit", words) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    every = {f["attack"]: f for f in found if f["metric"] == "token_f1"}
    plain, corrected = every[token_settings.AS_IT_IS], every[token_settings.TABLE]
    assert set(every) == {token_settings.AS_IT_IS, token_settings.TABLE}
    assert plain["value"] <= most
    assert corrected["value"] > 0.97
    assert corrected["verdict"] == "leaks"
    assert corrected["control"] < corrected["ci"][0]
    assert corrected["baseline"] < corrected["ci"][0]
    assert plain["control"] is not None
    # What is left is what every entry moved by itself, or less: the layer norm gives entries a variance of 1.
    assert corrected["details"]["table_still_off_by"] < each


def test_the_public_table_itself_needs_no_correction(encoder: Path, tmp_path: Path) -> None:
    _release(tmp_path, _load(encoder), _alike(20))
    attacks = {f.attack for f in _audited(encoder, tmp_path).findings}
    assert not attacks & {token_settings.AS_IT_IS, token_settings.TABLE}


@pytest.mark.parametrize("fault", ["far", "other", "swapped", "one row"])
def test_other_rows_or_another_encoder_are_no_trained_table(
    encoder: Path, tmp_path: Path, fault: str
) -> None:
    """A score would be low for the wrong reason."""
    slm = _tuned(encoder, 2.0 if fault == "far" else 0.05)
    if fault == "other":
        slm = _load(tiny.make_encoder(tmp_path / "other", width=64, seed=5))
    _release(tmp_path, slm, _alike(12))
    groups = np.repeat(np.arange(12), 5)
    if fault == "swapped":
        _write(tmp_path / "rows.csv", OURS, np.roll(groups, 5))
    if fault == "one row":
        groups[[0, 5]] = groups[[5, 0]]
        _write(tmp_path / "rows.csv", OURS, groups)
    with pytest.raises(ProtocolError, match="not the mean of the rows"):
        _audited(encoder, tmp_path)


@pytest.mark.parametrize("count", [20, 60])
def test_a_trained_table_without_the_rows(encoder: Path, tmp_path: Path, count: int) -> None:
    sizes = np.full(count, 60 / count)
    _release(tmp_path, _tuned(encoder, 0.1), _alike(count), sizes=sizes)
    (read,) = _audited(encoder, tmp_path, rows=False).findings
    assert (read.attack, read.verdict, read.control) == (token_settings.BLIND_TABLE, "leaks", 0.0)
    assert read.value > 0.75
    # With as many numbers to an entry as there are entries a map to another table fits sums of one token.
    other = _load(tiny.make_encoder(tmp_path / "other", width=64, seed=5))
    _release(tmp_path, other, _alike(count), sizes=sizes)
    nothing = _audited(encoder, tmp_path, rows=False)
    assert not nothing.findings
    assert any("not known without the rows" in entry.why for entry in nothing.not_run)


# Rows of unequal weight.


def _drawn(count: int, each: int) -> list[NDArray[np.float64]]:
    """Weights of which each is about half the one before, in any order."""
    rng = np.random.default_rng(each)
    drawn = [rng.permutation(0.5 ** np.arange(each) * rng.uniform(0.9, 1.1, each)) for _ in range(count)]
    return [one / one.sum() for one in drawn]


def test_weights_in_the_file_give_texts_away(encoder: Path, tmp_path: Path) -> None:
    drawn = _drawn(12, 4)
    # Any scale, and zeros where a centroid has fewer rows.
    drawn[0], padded = drawn[0][:3] / drawn[0][:3].sum(), np.zeros((12, 5))
    for row, one in zip(padded, drawn, strict=True):
        row[: len(one)] = 7 * one
    _release(tmp_path, _load(encoder), drawn, weights=padded)
    found = {f.attack: f for f in _audited(encoder, tmp_path).findings}
    assert set(found) == {token_weights.ALIKE, token_weights.WEIGHTS, token_weights.WHOLE}
    known, withheld = found[token_weights.WEIGHTS], found[token_weights.ALIKE]
    assert known.value == 1.0
    assert known.verdict == "leaks"
    assert withheld.value < 0.9
    assert known.control is not None
    assert known.control < 0.5
    texts = found[token_weights.WHOLE]
    assert (texts.value, texts.trials) == (1.0, 47)
    assert texts.control == 0.0
    assert known.details["centroids_left_out"] == 0
    blind = audit_elsewhere(
        _source(encoder, tmp_path, rows=False), tmp_path / "blind", attacks=frozenset({2})
    )
    assert not blind.findings
    assert any("do not count alike" in entry.why for entry in blind.not_run)


def test_of_many_rows_of_unequal_weight_the_smallest_centroids_are_read() -> None:
    assert token_weights._few([17, 16, 20, 3]) == [1, 3]
    assert token_weights._few([16] * 6) == [0, 1, 2, 3]  # 64 rows in all
    assert token_weights._few([17]) == []


def test_weights_that_are_not_those_of_the_rows(encoder: Path, tmp_path: Path) -> None:
    drawn = _drawn(12, 4)
    _release(tmp_path, _load(encoder), drawn, weights=np.array(drawn)[:, ::-1].copy())
    with pytest.raises(ProtocolError, match="by its weights"):
        _audited(encoder, tmp_path)
    _release(tmp_path, _load(encoder), drawn, weights=np.array(drawn)[:, :3].copy())
    with pytest.raises(DataError, match="row 1 has 3, but 4 rows"):
        _source(encoder, tmp_path)
    _release(tmp_path, _load(encoder), drawn, weights=np.array(drawn))
    claim = tmp_path / "claim.json"
    claim.write_text(json.dumps({"mechanism": "gaussian-sums", "clip": 2.0, "noise_multiplier": 1.0,
                                 "count_multiplier": 2.0, "delta": 1e-5}))  # fmt: skip
    with pytest.raises(UsageError, match="unequal weights"):
        _source(encoder, tmp_path, claim=claim)


@pytest.mark.parametrize(
    ("weights", "sizes", "says"),
    [
        ([[0.5, 0.5], [0.0, 1.0]], None, "row 2 must be positive"),
        ([[0.5, -0.5], [1.0, 1.0]], None, "row 1 must be positive"),
        ([[0.5, 0.5], [0.0, 0.0]], None, "row 2 must be positive"),
        ([[0.5, np.nan], [1.0, 1.0]], None, "row 1 must be positive"),
        ([[0.5, 0.5]], None, "each of 2 vectors"),
        ([0.5, 0.5], None, "each of 2 vectors"),
        ([[0.5, 0.5], [1.0, 0.0]], [2.0, 2.0], "as many as the sizes"),
    ],
)
def test_weights_are_checked(tmp_path: Path, weights: Any, sizes: Any, says: str) -> None:
    tensors = {"centroids": np.ones((2, 3, 4)), "weights": np.array(weights)}
    if sizes is not None:
        tensors["sizes"] = np.array(sizes)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(SecureflError, match=says):
        read_vectors(tmp_path / "a.safetensors")


def test_weights_are_scaled_and_count_the_rows(tmp_path: Path) -> None:
    weights = np.array([[3.0, 1.0, 0.0], [1.0, 1.0, 2.0]])
    save_file({"centroids": np.ones((2, 3, 4)), "weights": weights}, tmp_path / "a.safetensors")
    found = read_vectors(tmp_path / "a.safetensors")
    assert found.weights is not None
    assert found.weights.tolist() == [[0.75, 0.25, 0.0], [0.25, 0.25, 0.5]]
    assert found.sizes is not None
    assert found.sizes.tolist() == [2, 3]
    save_file({"centroids": np.ones((2, 4)), "weights": weights}, tmp_path / "b.safetensors")
    with pytest.raises(DataError, match="positions"):
        read_vectors(tmp_path / "b.safetensors")
