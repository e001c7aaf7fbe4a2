"""Attack 11 on runs: FedSGD of a small batch gives its texts away word for word, FedAvg's models do not."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from attacks.adversary import NotEnough
from attacks.bench import gradient
from attacks.evidence import Evidence
from attacks.figures import Figure
from attacks.gradient_search import recover
from attacks.gradient_span import OneStep
from attacks.judgement import Book
from attacks.runs import Run, open_release
from securefl.config import Config, parse_config
from securefl.data import load_corpus
from securefl.errors import DataError, ProtocolError
from securefl.models import load_slm
from securefl.simulation import Simulation
from tests import tiny


def encoder_of(folder: Path) -> Path:
    """A wide tiny encoder whose norms have a bias, as those of trained ones have."""
    tiny.make_encoder(folder, width=64)
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return tiny.save(model, tokenizer, folder)


def data_of(folder: Path) -> Path:
    """Texts of 6 to 8 words, none twice in one, more of them than a run trains on."""
    words = np.random.default_rng(3)
    folder.mkdir()
    for name, rows in (("train.csv", 160), ("test.csv", 20)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            for i in range(rows):
                writer.writerow((" ".join(words.choice(tiny.WORDS, 6 + i % 3, replace=False)), "ab"[i % 2]))
    return folder


def config_of(encoder: Path, data: Path, method: str, **slm: Any) -> Config:
    return parse_config(
        {
            "federation": {"method": method, "rounds": 2},
            "data": {
                "train": str(data / "train.csv"),
                "test": str(data / "test.csv"),
                "train_rows": 80,
                "split": {"by": "dirichlet", "silos": 2, "alpha": 10.0, "min_rows": 12},
            },
            "slm": {"models": [str(encoder)], "max_length": 12, "epochs": 1, "batch_size": 2, **slm},
            "protection": {"models": "sealed"},
        }
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("gradient")
    return encoder_of(folder / "encoder"), data_of(folder / "data"), folder


def simulated(places: tuple[Path, Path, Path], name: str, method: str = "fedsgd", **slm: Any) -> Run:
    encoder, data, folder = places
    if not (folder / name).exists():
        config = config_of(encoder, data, method, **slm)
        Simulation(config, load_corpus(config), folder / name).run()
    return Run(folder / name)


def attacked(run: Run, show_text: bool = False) -> Book:
    evidence, book = Evidence(run), Book(show_text=show_text)
    assert gradient.ATTACK.missing(evidence) is None
    shares: list[float] = []
    gradient.ATTACK.run(evidence, book, lambda share, _: shares.append(share))
    assert shares == sorted(shares)
    return book


def figure(book: Book, silo: str, metric: str) -> Figure:
    (one,) = (one for one in book.figures if (one.silo, one.metric) == (silo, metric))
    return one


def test_texts_of_a_batch_of_two_come_back_exactly(places: tuple[Path, Path, Path]) -> None:
    run = simulated(places, "run")
    book = attacked(run, show_text=True)
    assert book.not_run == []
    assert len(book.figures) == 2 * 3
    for silo in ("silo-1", "silo-2"):
        first, second, tokens = (figure(book, silo, metric) for metric in ("rouge1", "rouge2", "token_f1"))
        truth = []
        for number in (1, 2):
            named = json.loads((run.path / f"truth/{silo}/r{number:03d}-train.json").read_text())["rows"]
            assert len(named) == 2
            rows = run.rows(silo)
            truth += [rows.texts[rows.ids.index(one)] for one in named]
        assert sorted(first.texts) == sorted(truth)
        assert second.texts == tokens.texts == ()
        assert not any(text in repr(first) for text in truth)
        for one in (first, second, tokens):
            assert one.measure.value == 1
            assert one.round == 2
            assert one.baseline < 0.6
            assert one.control is not None
            assert one.control < 0.6
            assert (one.cap, one.claim_epsilon) == (None, None)
            # A word is a token here, and every text has a start and an end.
            count = sum(len(text.split()) + 2 for text in truth)
            assert one.details["tokens"] == one.details["tokens_in_batch"] == count
            assert (one.details["texts_found_exactly"], one.details["texts"]) == (4, 4)
            assert (one.details["gradients"], one.details["complete"]) == (2, 2)
        assert tokens.verdict(0.05) == "leaks"
        assert second.verdict(0.05) == "leaks"
        assert tokens.measure.trials == sum(
            len(set(" ".join(pair).split())) for pair in (truth[:2], truth[2:])
        )


def test_texts_are_withheld_unless_asked_for(places: tuple[Path, Path, Path]) -> None:
    book = attacked(simulated(places, "run"))
    assert all(one.texts == () for one in book.figures)
    assert figure(book, "silo-1", "rouge1").details["texts_withheld"] == 4


def test_two_audits_agree(places: tuple[Path, Path, Path]) -> None:
    run = simulated(places, "run")
    both = [[one.finding().model_dump() for one in attacked(run).figures] for _ in range(2)]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("name", "slm", "why"),
    [
        ("full", {"batch_size": 40}, "no gap"),
        ("adapter", {"batch_size": 2, "lora": {"r": 2}}, "does not train"),
    ],
)
def test_a_full_batch_and_an_adapter_are_declined(
    places: tuple[Path, Path, Path], name: str, slm: dict[str, Any], why: str
) -> None:
    book = attacked(simulated(places, name, **slm))
    assert book.figures == []
    assert [one.attack for one in book.not_run] == [gradient.NAME] * 4
    assert all(why in one.why for one in book.not_run)


def test_models_of_fedavg_are_no_gradients(places: tuple[Path, Path, Path]) -> None:
    """There is nothing for the attack in the run, and the change of the weights gives it nothing either."""
    run = simulated(places, "fedavg", "fedavg")
    assert gradient.ATTACK.missing(Evidence(run)) == "no gradient was released"
    before = open_release(run.path / "releases/server/r001-model.safetensors")
    after = open_release(run.path / "releases/silo-1/r001-train-model.safetensors")
    slm = load_slm(str(places[0]), ["a", "b"], max_length=12, train_embeddings=False, seed=0)
    slm.load_state(before.tensors)
    with pytest.raises(NotEnough):
        recover(slm, OneStep.from_weights(before.tensors, after.tensors), 12, np.random.default_rng(0))


def test_a_truth_that_is_not_behind_the_gradient(places: tuple[Path, Path, Path]) -> None:
    run = simulated(places, "run")
    path = run.path / "truth/silo-2/r001-train.json"
    kept = path.read_text()
    document = json.loads(kept)
    other = next(one for one in run.rows("silo-2").ids if one not in document["rows"])
    try:
        for rows, error, says in (
            ([document["rows"][0], other], ProtocolError, "is not the gradient of the rows"),
            (document["rows"][:1], ProtocolError, "another number of rows"),
            ([document["rows"][0], "no such row"], DataError, "a row id is not one of"),
            ([document["rows"][0]] * 2, DataError, "in a batch twice"),
            ([1, 2], DataError, "a row id is not one of"),
            (None, DataError, "ids of the rows"),
        ):
            path.write_text(json.dumps({**document, "rows": rows}))
            with pytest.raises(error, match=says):
                attacked(run)
        path.unlink()
        with pytest.raises(DataError, match="no file says which rows"):
            attacked(run)
    finally:
        path.write_text(kept)
