"""Whole federations under DP-SGD: what leaves, what it is charged, what a server takes, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from securefl import centroid_privacy, dp_sgd
from securefl.account import Account
from securefl.accountants import composed_epsilon
from securefl.cli import app
from securefl.config import Config, parse_config
from securefl.console import run_app
from securefl.data import load_corpus
from securefl.errors import BudgetExceeded, ConfigError, PayloadError
from securefl.inspection import inspect_path
from securefl.ledger import Ledger
from securefl.policy import Ceiling
from securefl.release import (
    DpSgd,
    GaussianCounts,
    Independent,
    NonPrivate,
    PayloadKind,
    encode_release,
)
from securefl.report.claims import withheld
from securefl.simulation import Simulation
from securefl.verification import verify_run
from tests.federation import make_parties, tiny_config
from tests.test_federation import _reseal  # the one way in which a test makes a silo lie

DP_SGD = {"epsilon": 6.0, "delta": 1e-3, "clip": 1.0, "sample_rate": 0.25}


def private(encoder: Path, folder: Path, method: str = "fedavg", **changes: dict[str, Any]) -> Config:
    document: dict[str, dict[str, Any]] = {"federation": {"method": method}, "privacy": {"dp_sgd": DP_SGD}}
    for section, fields in changes.items():
        document.setdefault(section, {}).update(fields)
    return tiny_config(encoder, folder, **document)


CEILING = {"datasets": {f"silo-{n}": Ceiling(max_epsilon=50.0, delta=1e-3) for n in range(1, 5)}}


@pytest.mark.parametrize("protection", ["sealed", "masked", "ckks"])
def test_every_protection(tiny_encoder: Path, tiny_data: Path, tmp_path: Path, protection: str) -> None:
    """No release of a silo tells a row count or an exact figure, and its account is finite: two trainings of
    four steps at the noise of eight, composed as one.
    """
    config = private(tiny_encoder, tiny_data, protection={"models": protection})
    parties = make_parties(config, tmp_path, nonprivate=(), **CEILING)
    parties.play(lambda server: server.finished)
    rows = {str(len(silo.data.train)) for silo in parties.clients.values()}
    for client in parties.clients.values():
        entries = client.ledger.entries
        trainings = [entry.claim for entry in entries if isinstance(entry.claim, DpSgd)]
        assert [claim.steps for claim in trainings] == [4, 4]
        assert {type(entry.claim) for entry in entries} == {DpSgd, Independent}
        account = client.ledger.account(client.dataset)
        (whole,) = account.sampled
        assert whole.steps == 8
        assert account.epsilon == pytest.approx(composed_epsilon(0.0, (whole,), 1e-3))
        assert 5.8 < account.epsilon <= 6.0
    if protection == "sealed":
        return
    for opened in parties.server.sums:
        assert opened.rows is None
        assert not rows & set(str(opened).split())


def test_sealed_models_weigh_the_same_and_say_no_number(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The mean of the three models by hand, whatever the silos' sizes are."""
    parties = make_parties(private(tiny_encoder, tiny_data), tmp_path, nonprivate=(), **CEILING)
    models = []
    for answer in parties.answers().values():
        parties.server.receive(answer)
        models.append(parties.opened(answer))
    assert len({len(silo.data.train) for silo in parties.clients.values()}) > 1, "or the test says nothing"
    parties.server.close_step()
    for name, averaged in parties.server.model.items():
        mean = np.mean([np.float64(release.tensors[name]) for release in models], axis=0)
        np.testing.assert_allclose(averaged, mean, atol=1e-7)
    assert not any("rows" in release.info for release in models)


def test_fedkc_and_figures_compose(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Trainings, one centroid release and a noisy figure stand in one account, composed by one method."""
    config = private(
        tiny_encoder,
        tiny_data,
        "fedkc",
        privacy={
            "dp_sgd": DP_SGD,
            "centroids": {"epsilon": 2.0, "delta": 1e-3, "min_size": 2},
            "metrics": {"epsilon": 1.0, "delta": 1e-3},
        },
    )
    parties = make_parties(config, tmp_path, nonprivate=(), **CEILING)
    parties.play(lambda server: server.finished)
    for client in parties.clients.values():
        account = client.ledger.account(client.dataset)
        kinds = [entry.claim.mechanism for entry in client.ledger.entries]
        assert kinds == ["dp-sgd", "gaussian-sums", "dp-sgd", "gaussian-counts"]
        mus = [entry.claim.mu for entry in client.ledger.entries if hasattr(entry.claim, "mu")]
        assert account.mu == pytest.approx(float(np.linalg.norm(mus)))
        assert account.epsilon == pytest.approx(composed_epsilon(account.mu, account.sampled, 1e-3))
        assert 6.0 < account.epsilon < 9.0
        figures = parties.server.metrics[client.identity.name]
        assert 0 <= figures["validation_accuracy"] <= 1


def test_what_a_server_takes(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """A silo that claims no privacy, other steps or less noise than was agreed is refused by name."""
    parties = make_parties(private(tiny_encoder, tiny_data), tmp_path, nonprivate=(), **CEILING)
    answers = parties.answers()
    parties.server.receive(answers["silo-1"])
    release = parties.server.admitted()["silo-1"]
    assert release is not None
    assert isinstance(release.claim, DpSgd)
    assert "rows" not in release.info
    for claim in (
        NonPrivate(reason="none"),
        release.claim.model_copy(update={"steps": 3}),
        release.claim.model_copy(update={"noise_multiplier": release.claim.noise_multiplier * 0.9}),
        release.claim.model_copy(update={"clip": 2.0}),
        release.claim.model_copy(update={"unit": "patient_id"}),
    ):
        body = encode_release(dataclasses.replace(release, claim=claim))
        with pytest.raises(PayloadError, match="silo-2 makes another claim"):
            parties.server.receive(_reseal(parties, "silo-2", body, PayloadKind.MODEL))


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("trained for a release that may not leave")


def test_the_release_that_would_cross_the_ceiling_is_refused(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Epsilon 6 for both rounds, a ceiling for one: the second is neither trained, nor charged, nor sent."""
    ceilings = {f"silo-{n}": Ceiling(max_epsilon=5.0, delta=1e-3) for n in range(1, 4)}
    parties = make_parties(private(tiny_encoder, tiny_data), tmp_path, nonprivate=(), datasets=ceilings)
    client = parties.clients["silo-1"]
    parties.play(lambda server: server.round == 2)
    spent = client.ledger.account("silo-1")
    client.train = _never
    assert spent.epsilon is not None
    assert spent.epsilon < 5.0
    answer = client.handle(parties.server.outgoing()["silo-1"])
    assert client.refusals[-1].clause == "datasets"
    assert "would have epsilon 5.9" in str(client.refusals[-1])
    parties.server.receive(answer)
    assert "silo-1" not in parties.server.admitted()
    again = Ledger.open(client.ledger.path, client.identity)
    assert again.account("silo-1") == spent


def _unit_data(folder: Path) -> Path:
    folder.mkdir(parents=True)
    from tests import tiny

    for name, rows in (("train.csv", 90), ("test.csv", 30)):
        pairs = tiny.make_texts(rows, seed=len(name))
        lines = ["text,label,patient_id"] + [f"{t},{label},p{i // 3}" for i, (t, label) in enumerate(pairs)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_by_patient(tiny_encoder: Path, tmp_path: Path) -> None:
    """Rows of a patient lie in one silo, on one side of its validation, and every claim names the unit; a
    ceiling that is for rows refuses it.
    """
    data = _unit_data(tmp_path / "data")
    config = private(
        tiny_encoder,
        data,
        "fedkc",
        data={
            "unit": "patient_id",
            "per_unit": 2,
            "split": {"by": "dirichlet", "silos": 3, "alpha": 50.0, "min_rows": 5},
        },
        privacy={"dp_sgd": DP_SGD, "centroids": {"epsilon": 2.0, "delta": 1e-3, "min_size": 1}},
    )
    corpus = load_corpus(config)
    homes: dict[str, set[tuple[str, str]]] = {}
    for side, parts in (("train", corpus.train), ("validation", corpus.validation)):
        for name, rows in parts.items():
            for unit in rows.units:
                homes.setdefault(unit, set()).add((side, name))
    assert len(homes) == 30
    assert all(len(home) == 1 for home in homes.values())
    by_patient = {f"silo-{n}": Ceiling(max_epsilon=50.0, delta=1e-3, unit="patient_id") for n in range(1, 4)}
    for name in ("run", "rows"):
        (tmp_path / name).mkdir()
    parties = make_parties(config, tmp_path / "run", nonprivate=(), datasets=by_patient)
    parties.play(lambda server: server.finished)
    for client in parties.clients.values():
        claims = [entry.claim for entry in client.ledger.entries if not isinstance(entry.claim, Independent)]
        assert {claim.unit for claim in claims if not isinstance(claim, NonPrivate)} == {"patient_id"}
        assert client.ledger.account(client.dataset).unit == "patient_id"
    rows_only = make_parties(config, tmp_path / "rows", nonprivate=(), **CEILING)
    refused = rows_only.clients["silo-1"]
    refused.handle(rows_only.server.outgoing()["silo-1"])
    assert "for each row" in str(refused.refusals[-1])


def test_units_and_adjacencies_do_not_mix() -> None:
    training = DpSgd(
        epsilon=1.0,
        delta=1e-5,
        noise_multiplier=2.0,
        sample_rate=0.1,
        steps=10,
        clip=1.0,
        head_share=0.5,
        per_unit=1,
        accountants="x",
        generator="x",
        simulated=True,
    )
    counts = GaussianCounts(
        epsilon=1.0, delta=1e-5, mu=0.2, noise_multiplier=5.0, generator="x", simulated=True
    )
    account = Account().with_claim(training)
    assert account.with_claim(counts).unit == "row"
    for other in ({"unit": "patient_id"}, {"adjacency": "replace-one"}):
        with pytest.raises(BudgetExceeded, match="no common epsilon"):
            account.with_claim(counts.model_copy(update=other))
        assert Account().with_claim(counts.model_copy(update=other)).epsilon is not None


def test_a_canary_and_no_exact_value_leaves(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every un-noised sum of the run is kept aside; no file of the run but `truth` holds one, or the canary.

    Searched for are the bytes of eight consecutive values, as float32 and float64, of what was clipped and
    added up before noise, and the words of a row that only one silo has.
    """
    exact: list[NDArray[Any]] = []
    clean = dp_sgd.add_gaussian

    def training_sums(values: torch.Tensor, deviation: float, key: bytes) -> None:
        exact.append(values.double().numpy().copy())
        clean(values, deviation, key)

    noisy = centroid_privacy.noisy_sums

    def cluster_sums(local: Any, assignment: Any, clusters: int, *rest: Any, **more: Any) -> Any:
        vectors = np.asarray(local.tensors["vectors"], np.float64)
        for cluster in range(clusters):
            if (assignment == cluster).any():
                exact.append(vectors[assignment == cluster].sum(0))
                exact.append(vectors[assignment == cluster].mean(0))
        return noisy(local, assignment, clusters, *rest, **more)

    monkeypatch.setattr(dp_sgd, "add_gaussian", training_sums)
    monkeypatch.setattr(centroid_privacy, "noisy_sums", cluster_sums)
    canary = "xylophone quagmire zeppelin"
    rows = (tiny_data / "train.csv").read_text(encoding="utf-8")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.csv").write_text(rows + f"{canary},a\n", encoding="utf-8")
    (data / "test.csv").write_bytes((tiny_data / "test.csv").read_bytes())
    config = private(
        tiny_encoder,
        data,
        "fedkc",
        privacy={
            "dp_sgd": DP_SGD,
            "centroids": {"epsilon": 4.0, "delta": 1e-3, "min_size": 1},
            "metrics": {"epsilon": 1.0, "delta": 1e-3},
        },
        protection={"models": "masked"},
    )
    Simulation(config, load_corpus(config), tmp_path / "run").run()
    assert len(exact) > 20
    assert canary in "".join(
        path.read_text(encoding="utf-8") for path in (tmp_path / "run" / "truth").rglob("*.jsonl")
    ), "the canary is one of the rows"
    needles = {
        array.ravel()[place : place + 8].astype(kind).tobytes()
        for array in exact
        for place in (0, array.size // 2)
        for kind in (np.float32, np.float64)
        if np.count_nonzero(array.ravel()[place : place + 8]) == 8
    }
    assert len(needles) > 20
    searched = 0
    for path in sorted((tmp_path / "run").rglob("*")):
        if not path.is_file() or "truth" in path.relative_to(tmp_path / "run").parts:
            continue
        content = path.read_bytes()
        searched += 1
        assert not [needle for needle in needles if needle in content], path
        if path.suffix not in (".safetensors",) and path.name not in ("tokenizer.json", "vocab.txt"):
            assert canary.encode() not in content, path
    assert searched > 20


def test_the_card_inspect_and_the_report_say_it(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = private(tiny_encoder, tiny_data, "standalone", federation={"method": "standalone", "rounds": 2})
    result = Simulation(config, load_corpus(config), tmp_path / "run").run()
    card = (tmp_path / "run" / "models" / "silo-1" / "README.md").read_text(encoding="utf-8")
    for fact in (
        "| delta | 0.001 |",
        "each row of a silo",
        "add-remove",
        "poisson, rate 0.25, 8 steps",
        "| clip (L2) | 1, of whose square 0.5 is the head's |",
        "noise multiplier",
        "prv (opacus",
        "dp-accounting",
        "protects nobody",
        "Nothing left silo-1",
    ):
        assert fact in card
    assert str(result.clients[0].train_rows) not in card.split("## Privacy")[1]
    assert result.clients[0].training is not None
    assert 5.8 < result.clients[0].training["epsilon"] <= 6.0
    assert result.clients[0].epsilon is None


def test_inspect_a_ledger_prints_the_account_by_release(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    parties = make_parties(private(tiny_encoder, tiny_data), tmp_path, nonprivate=(), **CEILING)
    parties.play(lambda server: server.finished)
    document = inspect_path(tmp_path / "silo-1.jsonl")
    so_far = [release["account"]["private_epsilon"] for release in document["releases"]]
    assert so_far == sorted(so_far)
    assert so_far[-1] == document["private_epsilon"]
    assert so_far[0] < so_far[1]
    assert document["unit"] == "row"
    assert document["trainings"][0]["steps"] == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"privacy": {"adjacency": "replace-one"}}, "adjacency"),
        (
            {"privacy": {"models": {"clip": 1.0, "epsilon": 3.0}}, "protection": {"models": "masked"}},
            "one of",
        ),
        ({"federation": {"method": "fedkc"}, "fedkc": {"source": "own"}}, "own"),
        ({"privacy": {"dp_sgd": {**DP_SGD, "engine": "ghost"}}}, "ghost"),
        ({"data": {"unit": "row"}}, "means something else"),
        ({"privacy": {"metrics": {"epsilon": 1.0}}, "protection": {"models": "ckks"}}, "ckks"),
    ],
)
def test_contradictions_are_refused(
    tiny_encoder: Path, tiny_data: Path, changes: dict[str, dict[str, Any]], says: str
) -> None:
    base: dict[str, dict[str, Any]] = {"privacy": {"dp_sgd": DP_SGD}}
    merged = {key: {**base.get(key, {}), **changes.get(key, {})} for key in {*base, *changes}}
    with pytest.raises(ConfigError, match=says):
        tiny_config(tiny_encoder, tiny_data, **merged)


def test_a_budget_above_the_ceiling_exits_3(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "study.toml"
    document = private(tiny_encoder, tiny_data).model_dump(mode="json", exclude_none=True)
    document["privacy"]["dp_sgd"]["epsilon"] = 60.0
    parse_config(document)
    lines = [
        '[federation]\nmethod = "fedavg"\nrounds = 2',
        f'[data]\ntrain = "{tiny_data}/train.csv"\ntest = "{tiny_data}/test.csv"',
        'split = { by = "dirichlet", silos = 3, alpha = 2.0, min_rows = 12 }',
        f'[slm]\nmodels = ["{tiny_encoder}"]\nmax_length = 16\nepochs = 1',
        "[privacy]\ndp_sgd = { epsilon = 60.0, delta = 1e-3, sample_rate = 0.25 }",
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert run_app(app, "securefl", ["simulate", str(file), "--out", str(tmp_path / "run")]) == 3
    assert "max_epsilon" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    file.write_text("\n".join([*lines, "[policy]\nmax_epsilon = 61.0"]), encoding="utf-8")
    assert run_app(app, "securefl", ["simulate", str(file), "--out", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clients"][0]["epsilon"] > 55


@pytest.mark.parametrize("figures", [False, True], ids=["unseen", "noised"])
def test_crosslm_chooses_without_an_unaccounted_look(
    tiny_encoder: Path, tiny_llm: Path, tiny_data: Path, tmp_path: Path, figures: bool
) -> None:
    """The server's candidate is taken unseen, or by a noisy comparison that is charged; every account is
    finite, and the figures at the end are noisy or none.
    """
    metrics = {"metrics": {"epsilon": 2.0, "delta": 1e-3}} if figures else {}
    config = private(
        tiny_encoder,
        tiny_data,
        "crosslm",
        federation={"method": "crosslm", "rounds": 2},
        privacy={"dp_sgd": DP_SGD, **metrics},
        crosslm={
            "llm": str(tiny_llm),
            "encoder": str(tiny_encoder),
            "synthetic": 8,
            "keep": 0.5,
            "max_new_tokens": 4,
            "evaluate_rows": 4,
            "lora_rank": 2,
        },
    )
    simulation = Simulation(config, load_corpus(config), tmp_path / "run")
    result = simulation.run()
    for name, client in simulation.clients.items():
        told = [entry.claim for entry in client.ledger.entries if entry.kind is PayloadKind.METRICS]
        assert {type(claim) for claim in told} == {GaussianCounts if figures else Independent}
        account = client.ledger.account(name)
        assert account.epsilon is not None
        assert account.sampled[0].steps == 8
        assert (account.mu > 0) == figures
        if not figures:
            assert client.kept_candidate in (None, True)
    assert all(row.no_finite_epsilon == [] for row in result.clients)


def test_a_seed_is_refused_outside_a_simulation(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Before anything is trained: the claim that a seed would make says so."""
    config = private(tiny_encoder, tiny_data)
    parties = make_parties(config, tmp_path, nonprivate=(), simulation=False, **CEILING)
    client = parties.clients["silo-1"]
    client.train = _never
    client.handle(parties.server.outgoing()["silo-1"])
    assert client.refusals[-1].clause == "simulation"
    assert client.ledger.account("silo-1") == Account()


def test_fedprox_and_an_adapter(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = private(
        tiny_encoder, tiny_data, "fedprox", slm={"lora": {"r": 2}}, protection={"models": "masked"}
    )
    result = Simulation(config, load_corpus(config), tmp_path / "run").run()
    assert all(5.8 < (row.epsilon or 0) <= 6.0 for row in result.clients)
    again = verify_run(tmp_path / "run")
    assert {one.row.claim["mechanism"] for one in again.releases} == {"independent"}, (
        "masked ones are no files"
    )


def test_where_all_centroids_are_withheld_the_run_goes_on_and_says_so(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """A minimum size above a silo's rows: no knowledge is shared, and terminal and report say that."""
    config = private(
        tiny_encoder,
        tiny_data,
        "fedkc",
        privacy={"dp_sgd": DP_SGD, "centroids": {"epsilon": 2.0, "delta": 1e-3, "min_size": 1000}},
    )
    result = Simulation(config, load_corpus(config), tmp_path / "run").run()
    shared = [release for row in result.clients for release in row.releases if release.kind == "centroids"]
    assert [release.centroids for release in shared] == [0] * 3
    words = withheld(result)
    assert words is not None
    assert "silo-1, silo-2, silo-3 were withheld" in words
    assert words in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert verify_run(tmp_path / "run").result.clients[0].releases[1].centroids == 0


@pytest.mark.parametrize("section", ["dp_sgd", "centroids", "metrics"])
def test_a_delta_that_would_give_a_row_away_is_refused(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, section: str
) -> None:
    terms = {"dp_sgd": DP_SGD, "centroids": {"epsilon": 2.0, "min_size": 1}, "metrics": {"epsilon": 1.0}}
    terms[section] = {**terms[section], "delta": 0.09}
    config = private(tiny_encoder, tiny_data, "fedkc", data={"validation": 0.5}, privacy=terms)
    with pytest.raises(ConfigError, match=f"privacy.{section}.delta: 0.09"):
        Simulation(config, load_corpus(config), tmp_path / "run")
