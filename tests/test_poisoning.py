"""Silos that poison a model: what a robust average and a bound on changes keep of the accuracy, and what not.

Real runs over tiny models that learn; the poisoning silo is a `LocalTraining` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from securefl.config import Config, parse_config
from securefl.data import Rows, load_corpus
from securefl.errors import ConfigError, NonFiniteUpdate, PayloadError, TooFewSilos, WrongShape
from securefl.local import train_locally
from securefl.messages import Step
from securefl.methods.averaging import (
    bounded_change,
    change_norm,
    coordinate_median,
    trimmed_mean,
    weighted_mean,
)
from securefl.methods.fedkc import Knowledge
from securefl.privacy import Noise
from securefl.release import DpSgd
from securefl.simulation import Simulation
from securefl.slm import Slm
from securefl.workbench import TrainingMemo
from tests import tiny
from tests.federation import make_parties, tiny_config

Training = Callable[..., DpSgd | None]


def arrays(seed: int, silos: int) -> dict[str, dict[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(seed)
    return {
        f"silo-{i}": {
            "a": rng.normal(size=(3, 2)).astype(np.float32),
            "b": rng.normal(size=4).astype(np.float32),
        }
        for i in range(silos)
    }


@pytest.mark.parametrize("silos", [2, 3, 6, 7])
def test_median_and_trimmed_mean_against_loops(silos: int) -> None:
    updates = arrays(silos, silos)
    median = coordinate_median(updates)
    for name in ("a", "b"):
        flat = np.stack([one[name].ravel() for one in updates.values()])
        for c in range(flat.shape[1]):
            ordered = sorted(flat[:, c].tolist())
            middle = ordered[silos // 2] if silos % 2 else (ordered[silos // 2 - 1] + ordered[silos // 2]) / 2
            assert median[name].ravel()[c] == pytest.approx(middle, rel=1e-6)
        if silos > 2:
            cut = max(1, int(0.3 * silos))
            kept = trimmed_mean(updates, 0.3)[name].ravel()
            for c in range(flat.shape[1]):
                expected = np.mean(sorted(flat[:, c].tolist())[cut : silos - cut])
                assert kept[c] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert median["a"].dtype == np.float32


def test_one_false_silo_moves_the_median_no_further_than_the_honest_ones_lie() -> None:
    updates = arrays(1, 5)
    honest = np.stack([one["a"] for name, one in updates.items() if name != "silo-0"])
    updates["silo-0"] = {name: np.full_like(array, 9e5) for name, array in updates["silo-0"].items()}
    for made in (coordinate_median(updates), trimmed_mean(updates, 0.2)):
        assert (made["a"] <= honest.max(0) + 1e-6).all()
        assert (made["a"] >= honest.min(0) - 1e-6).all()
    assert weighted_mean(updates, dict.fromkeys(updates, 1.0))["a"].max() > 1e5


def test_what_cannot_be_averaged_is_refused() -> None:
    for average in (coordinate_median, lambda updates: trimmed_mean(updates, 0.2)):
        with pytest.raises(TooFewSilos):
            average({})
        updates = arrays(0, 3)
        updates["silo-1"]["a"] = updates["silo-1"]["a"][:2]
        with pytest.raises(WrongShape, match="silo-1"):
            average(updates)
        updates = arrays(0, 3)
        updates["silo-2"]["b"][0] = np.nan
        with pytest.raises(NonFiniteUpdate, match="silo-2"):
            average(updates)
    with pytest.raises(TooFewSilos, match=r"protection\.trim"):
        trimmed_mean(arrays(0, 2), 0.4)


def test_a_change_is_scaled_to_its_bound_and_no_smaller_one_is() -> None:
    start, end = arrays(0, 2).values()
    flat = np.concatenate([(end[name] - start[name]).ravel() for name in ("a", "b")])
    norm = float(np.linalg.norm(flat.astype(np.float64)))
    assert change_norm(end, start) == pytest.approx(norm, rel=1e-6)
    for most in (norm / 3, norm * 2):
        sent = bounded_change(end, start, most)
        assert change_norm(sent, start) == pytest.approx(min(most, norm), rel=1e-5)
        moved = np.concatenate([(sent[name] - start[name]).ravel() for name in ("a", "b")])
        np.testing.assert_allclose(moved, flat * min(1.0, most / norm), atol=1e-6)


# --- runs


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    encoder = tiny.make_encoder(tmp_path_factory.mktemp("poison") / "encoder")
    return encoder, tiny.make_dataset(tmp_path_factory.mktemp("poison-data"), rows=400)


def config_with(places: tuple[Path, Path], **protection: Any) -> Config:
    encoder, data = places
    return parse_config(
        {
            "federation": {"method": "fedavg", "rounds": 3, "seed": 1},
            "data": {
                "train": str(data / "train.csv"), "test": str(data / "test.csv"),
                "split": {"by": "dirichlet", "silos": 5, "alpha": 50.0, "min_rows": 12},
            },
            "slm": {
                "models": [str(encoder)], "max_length": 16, "epochs": 2, "batch_size": 8,
                "learning_rate": 2e-3, "head_learning_rate": 2e-2,
            },
            "protection": {"models": "sealed", **protection},
        }
    )  # fmt: skip


def flips(rows: Rows) -> Rows:
    return replace(rows, labels=1 - rows.labels)


def played(config: Config, out: Path, false: Sequence[str], change: Training) -> float:
    """Accuracy of the last model, when the silos of `false` train by `change`."""
    corpus = load_corpus(config)
    theirs = {corpus.train[name].ids for name in false}

    def train(
        slm: Slm,
        rows: Rows,
        config: Config,
        epochs: int,
        seed: int,
        noise: Noise,
        knowledge: Sequence[Knowledge] = (),
        cancelled: Callable[[], bool] | None = None,
    ) -> DpSgd | None:
        work = change if rows.ids in theirs else train_locally
        return work(slm, rows, config, epochs, seed, noise, knowledge, cancelled)

    result = Simulation(config, corpus, out, memo=cast(TrainingMemo, train)).run()
    assert result.server.test_accuracy is not None
    return result.server.test_accuracy


def flipping(slm: Slm, rows: Rows, *more: Any) -> DpSgd | None:
    """Learns the opposite of every label, for long."""
    config, _, *rest = more
    return train_locally(slm, flips(rows), config, 6, *rest)


def scaling(slm: Slm, rows: Rows, *more: Any) -> DpSgd | None:
    """Sends ten times the step away from what its rows say."""
    start = slm.state()
    claim = train_locally(slm, rows, *more)
    slm.load_state({name: start[name] - 10 * (array - start[name]) for name, array in slm.state().items()})
    return claim


def test_robust_averages_keep_what_false_silos_would_take(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Two of five flip their labels, or one of five scales: the mean loses, the robust ones do not."""
    honest = played(config_with(places), tmp_path / "honest", [], train_locally)
    assert honest > 0.9
    for what, false, change in (("scaled", ["silo-2"], scaling), ("flipped", ["silo-2", "silo-4"], flipping)):
        found = {
            average: played(
                config_with(places, average=average, trim=0.4), tmp_path / f"{what}-{average}", false, change
            )
            for average in ("mean", "median", "trimmed-mean")
        }
        assert found["mean"] < honest - 0.1, (what, found)
        assert min(found["median"], found["trimmed-mean"]) > honest - 0.05, (what, found)


def test_a_bound_on_changes_is_kept_by_silos_and_checked_by_the_server(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    """A scaling silo that keeps to its bound does little; one that does not is refused and named."""
    free = played(config_with(places), tmp_path / "free", ["silo-2"], scaling)
    bounded = played(config_with(places, max_norm=1.0), tmp_path / "bounded", ["silo-2"], scaling)
    assert bounded > free + 0.1
    config = config_with(places, max_norm=1.0)
    parties = make_parties(config, tmp_path)
    rogue = parties.clients["silo-2"]
    rogue.config = config_with(places)
    rogue.train = cast(Any, scaling)
    answers = parties.answers()
    with pytest.raises(
        PayloadError, match=r"silo-2 sent a model that is further off than protection.max_norm"
    ):
        parties.server.receive(answers["silo-2"])
    for name in set(answers) - {"silo-2"}:
        parties.server.receive(answers[name])
    assert set(parties.server.admitted()) == set(answers) - {"silo-2"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"protection": {"average": "median", "models": "masked"}}, "the median needs each model"),
        ({"protection": {"average": "trimmed-mean", "models": "ckks"}}, "the trimmed-mean needs each model"),
        (
            {"federation": {"method": "datafree-kd"}, "protection": {"average": "median"}},
            "averages no models",
        ),
        ({"federation": {"method": "fedsgd"}, "protection": {"max_norm": 1.0}}, "averages no models"),
        ({"federation": {"method": "crosslm", "local_head": ["silo-1"]}}, "averages no models"),
        ({"protection": {"max_norm": 0.0}}, "max_norm"),
        ({"protection": {"trim": 0.5}}, "trim"),
    ],
)
def test_averages_without_a_place_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tiny_config(Path("encoder"), Path("data"), **changes)


# --- a head of one's own


def test_a_head_that_stays_is_neither_sent_nor_replaced(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_encoder, tiny_data, federation={"rounds": 3, "local_head": ["silo-1"]})
    parties = make_parties(config, tmp_path)
    server, silo = parties.server, parties.clients["silo-1"]
    names = silo.slm.head_names()
    assert len(names) == 2
    heads = []
    while not server.finished:
        before, step = dict(server.model), server.step
        for name, answer in parties.answers().items():
            server.receive(answer)
            if name == "silo-1" and step is Step.TRAIN:
                sent = parties.opened(answer)
                heads.append({key: silo.slm.state()[key] for key in names})
                for key, array in sent.tensors.items():
                    assert np.array_equal(array, before[key]) == (key in names)
                assert not np.array_equal(heads[-1][names[0]], before[names[0]])
        server.close_step()
    last = silo.slm.state()
    for key in names:
        assert np.array_equal(last[key], heads[-1][key]), "the last average did not replace it"
    assert all(np.array_equal(last[key], server.model[key]) for key in last if key not in names)
    other = parties.clients["silo-2"].slm.state()
    assert all(np.array_equal(other[key], server.model[key]) for key in other)


def test_a_head_that_stays_survives_a_restart(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """A silo that is opened again goes on from the head that it had trained."""
    config = tiny_config(tiny_encoder, tiny_data, federation={"rounds": 2, "local_head": ["silo-1"]})
    states = []
    for again in (False, True):
        folder = tmp_path / str(again)
        folder.mkdir()
        parties = make_parties(config, folder)
        parties.play(lambda server: server.round == 2)
        silo = parties.clients["silo-1"]
        if again:
            silo.close()
            slm = parties.clients["silo-2"].slm
            silo.slm.load_state({name: 0 * array for name, array in slm.state().items()})
            assert silo.state is not None
            parties.clients["silo-1"] = replace(
                silo, state=type(silo.state)(silo.state.path), kept_candidate=None
            )
        parties.play(lambda server: server.finished)
        states.append(parties.clients["silo-1"].slm.state())
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("protection", ["masked", "ckks"])
def test_a_head_stays_where_models_are_summed(
    protection: str, tiny_encoder: Path, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny_config(
        tiny_encoder, tiny_data, federation={"local_head": ["silo-1"]}, protection={"models": protection}
    )
    result = Simulation(config, load_corpus(config), tmp_path / "run").run()
    assert len(result.clients) == 3
    wrong = tiny_config(tiny_encoder, tiny_data, federation={"local_head": ["silo-9"]})
    with pytest.raises(ConfigError, match=r"federation\.local_head: silo-9"):
        Simulation(wrong, load_corpus(wrong), tmp_path / "wrong")
