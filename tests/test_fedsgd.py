"""FedSGD: a round is one plain SGD step on the union of the batches, and what leaves is told as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from securefl.config import load_config, parse_config
from securefl.crypto import envelope
from securefl.data import load_corpus
from securefl.errors import ConfigError, DataError, NonFiniteUpdate, PayloadError, SecureflError, WrongShape
from securefl.inspection import inspect_path
from securefl.local import derive_seed
from securefl.messages import Party
from securefl.methods.averaging import sgd_step
from securefl.models import load_slm
from securefl.release import (
    NonPrivate,
    PayloadKind,
    Release,
    Tensors,
    decode_release,
    encode_release,
    fingerprint,
)
from securefl.report.claims import unbounded_weights
from securefl.report.digest import describe
from securefl.report.render import departures_table
from securefl.simulated_policy import simulated_policy
from securefl.simulation import Simulation
from securefl.slm import Slm
from securefl.training import batch_gradient, first_batch, fit
from securefl.verification import VerifiedRun, verify_run
from tests import tiny
from tests.federation import ALL_KINDS, Parties, make_parties, tiny_config
from tests.test_training import load, rows_of

GRADIENT, METRICS = PayloadKind.GRADIENT, PayloadKind.METRICS
RATE = 0.5


def config_of(encoder: Path, data: Path, **changes: dict[str, Any]) -> Any:
    # More rows a batch than some silo has, so that the silos do not weigh the same.
    slm = {"batch_size": 20, "learning_rate": RATE, **changes.pop("slm", {})}
    return tiny_config(encoder, data, federation={"method": "fedsgd", "rounds": 2}, slm=slm, **changes)


@pytest.fixture(scope="module")
def folder(tiny_encoder: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    config = config_of(tiny_encoder, tiny_data)
    out = tmp_path_factory.mktemp("fedsgd") / "run"
    Simulation(config, load_corpus(config), out).run()
    return out


@pytest.fixture
def parties(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> Parties:
    return make_parties(config_of(tiny_encoder, tiny_data), tmp_path, kinds=(GRADIENT, METRICS))


def opened(path: Path) -> Release:
    return decode_release(path.read_bytes())


def batch_of(folder: Path, number: int) -> tuple[list[str], list[str], dict[str, int]]:
    """Texts and labels of the rows that the truth names for a round, and how many each silo had."""
    texts, labels, counts = [], [], {}
    for silo in sorted(path for path in (folder / "truth").iterdir() if path.is_dir()):
        truth = json.loads((silo / f"r{number:03d}-train.json").read_text())
        assert truth["release"] == f"r{number:03d}-train-gradient.safetensors"
        lines = map(json.loads, (silo / "rows.jsonl").read_text().splitlines())
        rows = {row["id"]: row for row in lines}
        texts += [rows[one]["text"] for one in truth["rows"]]
        labels += [rows[one]["label"] for one in truth["rows"]]
        counts[silo.name] = len(truth["rows"])
    return texts, labels, counts


def torch_step(
    slm: Slm, weights: Tensors, texts: list[str], labels: list[str]
) -> dict[str, NDArray[np.float32]]:
    """The same step by torch's own SGD."""
    slm.load_state(weights)
    slm.eval()
    optimizer = torch.optim.SGD([p for p in slm.parameters() if p.requires_grad], lr=RATE)
    optimizer.zero_grad()
    target = torch.tensor([slm.labels.index(label) for label in labels])
    torch.autograd.backward(cross_entropy(slm(slm.tokenize(texts)), target))
    optimizer.step()
    return slm.state()


@pytest.mark.parametrize("number", [1, 2])
def test_a_round_is_one_plain_step_on_all_batches(folder: Path, tiny_encoder: Path, number: int) -> None:
    before, after = (
        opened(folder / f"releases/server/r{n:03d}-model.safetensors") for n in (number, number + 1)
    )
    texts, labels, counts = batch_of(folder, number)
    assert len(set(counts.values())) > 1, "the silos must not weigh the same"
    slm = load(tiny_encoder, tuple(before.info["labels"]))
    expected = torch_step(slm, before.tensors, texts, labels)
    assert set(expected) == set(after.tensors)
    for name, array in expected.items():
        np.testing.assert_allclose(after.tensors[name], array, rtol=0, atol=1e-6, err_msg=name)
    assert max(np.abs(after.tensors[name] - before.tensors[name]).max() for name in expected) > 1e-3


def test_a_silo_sends_the_gradient_of_its_batch(folder: Path, tiny_encoder: Path) -> None:
    """By hand for one silo; the batch is the one that a training would begin with."""
    model = opened(folder / "releases/server/r001-model.safetensors")
    release = opened(folder / "releases/silo-2/r001-train-gradient.safetensors")
    rows = [json.loads(line) for line in (folder / "truth/silo-2/rows.jsonl").read_text().splitlines()]
    order = np.random.default_rng(derive_seed(0, "silo-2", 1, "train")).permutation(len(rows))[:20]
    truth = json.loads((folder / "truth/silo-2/r001-train.json").read_text())
    assert truth["rows"] == [rows[i]["id"] for i in order]
    assert release.info["rows"] == len(order)
    assert release.info["encoder"] == fingerprint(model.tensors)
    slm = load(tiny_encoder, tuple(model.info["labels"]))
    slm.load_state(model.tensors)
    target = torch.tensor([slm.labels.index(rows[i]["label"]) for i in order])
    torch.autograd.backward(cross_entropy(slm(slm.tokenize([rows[i]["text"] for i in order])), target))
    due = {name: p.grad for name, p in slm.model.named_parameters() if p.requires_grad}
    assert set(due) == set(release.tensors)
    for name, grad in due.items():
        assert grad is not None
        np.testing.assert_allclose(release.tensors[name], grad.numpy(), rtol=0, atol=1e-6, err_msg=name)


def test_the_batch_is_the_first_one_of_a_training(
    tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slm, rows, seen = load(tiny_encoder), rows_of(tiny.make_texts(30)), []
    tokenize = slm.tokenize

    def spy(texts: list[str]) -> Any:
        seen.append(list(texts))
        return tokenize(texts)

    monkeypatch.setattr(slm, "tokenize", spy)
    fit(slm, rows, epochs=1, batch_size=8, learning_rate=1e-3, head_learning_rate=1e-3, seed=5)
    assert list(first_batch(rows, 8, 5).texts) == seen[0]
    assert sorted(first_batch(rows, 64, 5).ids) == sorted(rows.ids)


@pytest.mark.parametrize("trained", ["head and encoder", "embeddings too", "adapter"])
def test_only_what_trains_is_sent(tiny_encoder: Path, trained: str) -> None:
    slm = load(tiny_encoder, train_embeddings=trained == "embeddings too")
    if trained == "adapter":
        slm = load_slm(
            str(tiny_encoder),
            ("a", "b"),
            max_length=16,
            train_embeddings=False,
            seed=0,
            lora=config_of(Path("e"), Path("d"), slm={"lora": {"r": 2}}).slm.lora,
        )
    before = slm.state()
    slm.train()
    gradient = batch_gradient(slm, rows_of(tiny.make_texts(4)))
    assert slm.training
    assert {name: array.shape for name, array in gradient.items()} == slm.shapes()
    assert {array.dtype for array in gradient.values()} == {np.dtype(np.float32)}
    assert any("embeddings" in name for name in gradient) == (trained == "embeddings too")
    assert all("lora" in name or "classifier" in name for name in gradient) == (trained == "adapter")
    assert all(np.array_equal(before[name], array) for name, array in slm.state().items())
    assert all(parameter.grad is None for parameter in slm.parameters()), (
        "nothing is left behind in the model"
    )


def test_a_gradient_that_cannot_be_computed(tiny_encoder: Path) -> None:
    slm, rows = load(tiny_encoder), rows_of(tiny.make_texts(4))
    with pytest.raises(DataError, match="no rows"):
        batch_gradient(slm, rows.take([]))
    with pytest.raises(DataError, match="label"):
        batch_gradient(slm, rows_of([("the cup", "c")], ("a", "b", "c")))
    with torch.no_grad():
        slm.classifier.weight.fill_(float("inf"))
    with pytest.raises(SecureflError, match="NaN or infinite"):
        batch_gradient(slm, rows)


def test_the_step_by_hand() -> None:
    model = {"w": np.array([[1.0, -2.0]], np.float32), "b": np.array([0.5], np.float32)}
    gradient = {"w": np.array([[4.0, 0.0]], np.float32), "b": np.array([-1.0], np.float32)}
    stepped = sgd_step(model, gradient, 0.25)
    assert stepped["w"].tolist() == [[0.0, -2.0]]
    assert stepped["b"].tolist() == [0.75]
    assert {array.dtype for array in stepped.values()} == {np.dtype(np.float32)}
    with pytest.raises(WrongShape):
        sgd_step(model, {"w": gradient["w"]}, 0.25)
    with pytest.raises(NonFiniteUpdate):
        sgd_step(model, {**gradient, "b": np.array([np.nan], np.float32)}, 0.25)


# --- the configuration


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, r'protection\.models: fedsgd .*write "sealed"'),
        ({"protection": {"models": "masked"}}, r'protection\.models: fedsgd .*write "sealed"'),
        ({"protection": {"models": "ckks"}}, r'protection\.models: fedsgd .*write "sealed"'),
        (
            {"protection": {"models": "sealed"}, "privacy": {"dp_sgd": {"epsilon": 8.0}}},
            r"privacy\.dp_sgd: the gradients of fedsgd leave without noise; .*use fedavg",
        ),
        ({"protection": {"models": "sealed"}, "slm": {"models": ["one", "two"]}}, r"slm\.models: fedsgd"),
        (
            {"protection": {"models": "sealed"}, "privacy": {"models": {"clip": 1.0, "epsilon": 8.0}}},
            r"privacy\.models: ",
        ),
    ],
)
def test_refused_configurations(changes: dict[str, Any], says: str) -> None:
    document = {"federation": {"method": "fedsgd"}, "data": {"train": "a.csv", "test": "b.csv"}, **changes}
    with pytest.raises(ConfigError, match=rf"^study\.toml: {says}"):
        parse_config(document, "study.toml")


TOML = """
[federation]
method = "fedsgd"
[data]
train = "a.csv"
test = "b.csv"
[protection]
models = "sealed"
[slm]
batch_size = 2
"""


@pytest.mark.parametrize("line", ["epochs = 2", "round_epochs = 1", "head_learning_rate = 0.1"])
def test_a_setting_of_trainings_is_not_ignored(line: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(TOML + line)
    with pytest.raises(ConfigError, match=rf"slm\.{line.split()[0]}: has no effect under fedsgd"):
        load_config(path)


def test_what_is_said_before_a_run(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(TOML)
    config = load_config(path)
    assert (config.step_rate, config.round_epochs(1), config.sums_models) == (0.1, 1, False)
    told = inspect_path(path)
    assert told["account"]["epsilon"] is None
    assert "without a claim, so no total is finite: gradient, metrics" in told["account"]["note"]
    assert "texts of a batch can be read back" in told["account"]["note"]


# --- the policy


@pytest.mark.parametrize(
    ("clause", "changes"),
    [
        ("kinds", {"kinds": tuple(kind for kind in ALL_KINDS if kind is not GRADIENT)}),
        ("nonprivate", {"nonprivate": tuple(kind for kind in ALL_KINDS if kind is not GRADIENT)}),
        ("model_protections", {"model_protections": ("masked", "ckks")}),
        ("max_release_bytes", {"max_release_bytes": 1000}),
    ],
)
def test_a_policy_has_to_allow_gradients(parties: Parties, clause: str, changes: dict[str, Any]) -> None:
    """One that lets models, figures and centroids out lets no gradient out."""
    client = parties.clients["silo-1"]
    plan = parties.server.outgoing()["silo-1"]
    client.policy = client.policy.model_copy(update=changes)
    answer = client.handle(plan)
    assert envelope.read_header(answer).kind is PayloadKind.UNAVAILABLE
    assert [refusal.clause for refusal in client.refusals] == [clause]
    assert not client.ledger.entries
    other = parties.clients["silo-2"].handle(parties.server.outgoing()["silo-2"])
    assert envelope.read_header(other).kind is GRADIENT


def test_the_policy_of_a_simulation(tiny_encoder: Path, tiny_data: Path) -> None:
    def kinds(config: Any) -> tuple[Any, ...]:
        policy = simulated_policy(config, "silo-1", "0" * 64, ["1" * 64], "3" * 64)
        return policy.kinds, policy.nonprivate, policy.model_protections

    both = (GRADIENT, METRICS)
    assert kinds(config_of(tiny_encoder, tiny_data)) == (both, both, ("sealed",))
    assert GRADIENT not in kinds(tiny_config(tiny_encoder, tiny_data))[0]


# --- the server

Change = Callable[[Release], Release]


def _info(**facts: Any) -> Change:
    return lambda one: Release(one.kind, one.tensors, {**one.info, **facts}, one.claim)


def _tensors(change: Callable[[Tensors], Tensors]) -> Change:
    return lambda one: Release(one.kind, change(one.tensors), one.info, one.claim)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_info(rows=21), PayloadError, "from 1 to 20"),
        (_info(rows=0), PayloadError, "from 1 to 20"),
        (_info(rows=True), PayloadError, "from 1 to 20"),
        (_tensors(lambda found: dict(list(found.items())[1:])), WrongShape, "lacks or adds"),
        (_tensors(lambda found: {**found, "strange": np.zeros(3, np.float32)}), WrongShape, "lacks or adds"),
        (_tensors(lambda found: {k: v[..., None] for k, v in found.items()}), WrongShape, "agreed was"),
        (
            _tensors(lambda found: {k: v * np.float32("nan") for k, v in found.items()}),
            NonFiniteUpdate,
            "NaN",
        ),
        (
            _tensors(lambda found: {k: v + np.float32(2e6) for k, v in found.items()}),
            NonFiniteUpdate,
            "above",
        ),
    ],
)
def test_the_server_checks_a_gradient(
    parties: Parties, change: Change, error: type[Exception], says: str
) -> None:
    server, client = parties.server, parties.clients["silo-1"]
    answer = client.handle(server.outgoing()["silo-1"])
    verified = envelope.verify(answer, server.roster)
    release = change(decode_release(envelope.open_(verified, server.identity)))
    forged = envelope.seal(encode_release(release), verified.header, client.identity, [client.server])
    with pytest.raises(error, match=says):
        server.receive(forged)
    server.receive(answer)
    assert isinstance(release.claim, NonPrivate)
    assert [Party(name=p.name, key=p.key).name for p in verified.header.recipients] == ["server"]


# --- what a run writes


def test_the_run_verifies_and_says_what_left(folder: Path) -> None:
    run: VerifiedRun = verify_run(folder)
    names = [one.path.name for one in run.releases if one.silo == "silo-1"]
    assert names == [
        "r001-train-gradient.safetensors",
        "r002-train-gradient.safetensors",
        "r002-finish-metrics.safetensors",
    ]
    for row in run.result.clients:
        gradients = [one for one in row.releases if one.kind == "gradient"]
        assert [(one.round, one.readable_by, one.claim["mechanism"]) for one in gradients] == [
            (number, ["server"], "none") for number in (1, 2)
        ]
        assert row.epsilon is None
        assert "the exact gradient of one batch of rows, from which their texts can be read back" in (
            row.no_finite_epsilon
        )
    truth = folder / "truth/silo-1/r001-train.json"
    assert truth.stat().st_mode & 0o777 == 0o600


def test_a_changed_gradient_does_not_verify(folder: Path, tmp_path: Path) -> None:
    path = folder / "releases/silo-1/r001-train-gradient.safetensors"
    body = path.read_bytes()
    release = decode_release(body)
    other = {name: array + np.float32(1) for name, array in release.tensors.items()}
    try:
        path.write_bytes(encode_release(Release(release.kind, other, release.info, release.claim)))
        with pytest.raises(SecureflError, match="its hash is not the one recorded"):
            verify_run(folder)
    finally:
        path.write_bytes(body)


def test_the_baseline_takes_as_many_steps_alone(folder: Path, tiny_encoder: Path, tiny_data: Path) -> None:
    """Its accuracy by torch's SGD on the silo's own batches."""
    result = verify_run(folder).result
    corpus = load_corpus(config_of(tiny_encoder, tiny_data))
    for row in result.clients:
        slm = load(tiny_encoder, corpus.labels)
        start = opened(folder / "releases/server/r001-model.safetensors").tensors
        rows = corpus.train[row.name]
        for number in (1, 2):
            order = np.random.default_rng(derive_seed(0, row.name, number, "train")).permutation(len(rows))[
                :20
            ]
            labels = [corpus.labels[rows.labels[i]] for i in order]
            start = torch_step(slm, start, [rows.texts[i] for i in order], labels)
        with torch.no_grad():
            said = slm(slm.tokenize(corpus.test.texts)).argmax(-1).numpy()
        assert row.baseline_accuracy == pytest.approx((said == corpus.test.labels).mean())


def test_reports_and_inspection_have_words_for_it(folder: Path) -> None:
    result = verify_run(folder).result
    page = (folder / "report.html").read_text()
    for words in ("Gradients of one batch", "one plain step along their mean", "read back its texts"):
        assert words in page
    assert "one plain step along their mean" in describe(result)
    assert "read back its texts" in str(departures_table([result]).caption)
    assert unbounded_weights(result), "whoever has the gradients has the weights"
    told = inspect_path(folder / "releases/silo-1/r001-train-gradient.safetensors")
    assert (told["what"], told["kind"]) == ("release", "gradient")
    assert "texts can be read back" in told["claim"]["reason"]
    assert inspect_path(folder)["silos"]["silo-1"]["epsilon"] == "no finite epsilon"
    card = (folder / "models/silo-1/README.md").read_text()
    assert "the last of 2 steps, along the mean gradient of 3 silos" in card
