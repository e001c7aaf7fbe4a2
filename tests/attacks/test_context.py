"""What an audit says beside its findings is what the run's record says."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks.context import accounts, channels, utility
from attacks.runs import Run
from securefl.models import load_slm
from securefl.slm import Slm
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run

ROWS = tiny.make_texts(120, seed=1, length=9)


@pytest.fixture(scope="module")
def slm(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    folder = tiny.make_encoder(tmp_path_factory.mktemp("context") / "encoder")
    return load_slm(str(folder), ["a", "b"], max_length=12, train_embeddings=False, seed=0)


def run_of(slm: Slm, folder: Path, recipe: Recipe) -> Run:
    corpus = corpus_of([text for text, _ in ROWS], [label for _, label in ROWS], 40, recipe)
    return Run(make_run(folder / "run", slm, corpus, recipe))


def test_an_exact_release_has_no_epsilon_and_tells_its_counts(slm: Slm, tmp_path: Path) -> None:
    run = run_of(slm, tmp_path, Recipe(clusters=4))
    for account in accounts(run):
        assert (account.epsilon, account.units, account.adjacencies) == (None, [], [])
        assert account.no_finite_epsilon
        assert account.trust == "no noise is added"
    told = " ".join(channels(run))
    assert "how many rows are behind each centroid is told exactly" in told
    assert "labels" in told
    assert "how long it takes" in told


def test_a_noised_release_has_its_ledgers_account(slm: Slm, tmp_path: Path) -> None:
    run = run_of(slm, tmp_path, Recipe(noise=2.0, adjacency="replace-one"))
    for account, client in zip(accounts(run), run.result.clients, strict=True):
        assert account.epsilon == client.epsilon is not None
        assert (account.units, account.adjacencies) == (["row"], ["replace-one"])
        assert account.trust.startswith("each silo adds its own noise")
    assert "which the claim covers" in " ".join(channels(run))


def test_utility_is_that_of_the_result(slm: Slm, tmp_path: Path) -> None:
    run = run_of(slm, tmp_path, Recipe())
    assert [(u.silo, u.train_rows, u.test_accuracy) for u in utility(run)] == [
        (client.name, client.train_rows, client.test_accuracy) for client in run.result.clients
    ]
