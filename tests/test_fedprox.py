"""FedProx: the term's gradient by hand, what it does to a training, and a run of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from securefl.config import Config
from securefl.local import starting_slm, train_locally
from securefl.methods.fedprox import proximal_term
from securefl.privacy import noise_source
from securefl.report.digest import describe
from securefl.slm import Slm
from securefl.workbench import TrainingMemo
from tests import tiny
from tests.federation import tiny_config
from tests.test_simulation import run
from tests.test_training import differ, rows_of


def config_of(encoder: Path, data: Path, mu: float, method: str = "fedprox") -> Config:
    # Sealed: the sums of masked models are coarser than bits, and not what is tested here.
    federation = {"method": method, "mu": mu}
    return tiny_config(encoder, data, federation=federation, protection={"models": "sealed"})


def without_dropout(slm: Slm) -> Slm:
    for module in slm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return slm


def trained(config: Config, epochs: int = 2, seed: int = 3) -> tuple[Slm, dict[str, np.ndarray]]:
    """A tiny model after local training, and the state that it had before."""
    slm = starting_slm(config.slm.models[0], ("a", "b"), config)
    start = slm.state()
    train_locally(slm, rows_of(tiny.make_texts(48)), config, epochs, seed, noise_source(0))
    return slm, start


def distance(slm: Slm, start: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(array - start[name]).sum()) for name, array in slm.state().items()))


def test_the_value_and_the_gradient_by_hand() -> None:
    weights = [
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True),
        torch.tensor([5.0], requires_grad=True),
    ]
    start = [torch.tensor([[1.0, 0.0], [6.0, 4.0]], requires_grad=True), torch.tensor([4.0])]
    term = proximal_term(weights, start, 0.5)
    assert term.item() == 0.25 * (4 + 9 + 1)
    torch.autograd.backward(term)
    assert weights[0].grad is not None
    assert weights[1].grad is not None
    assert weights[0].grad.tolist() == [[0.0, 1.0], [-1.5, 0.0]]
    assert weights[1].grad.tolist() == [0.5]
    assert start[0].grad is None
    with pytest.raises(ValueError, match="shorter"):
        proximal_term(weights, start[:1], 0.5)


def test_the_second_step_is_adamw_on_the_sum_by_hand(tiny_encoder: Path, tiny_data: Path) -> None:
    """At the start the term is 0, so the first of two steps is FedAvg's; the second adds mu (w - w_received).

    Recomputed with torch's AdamW on the gradient of the cross-entropy plus mu (w1 - w0), clipped to norm 1.
    """
    mu = 3.0
    config = config_of(tiny_encoder, tiny_data, mu)
    rows = rows_of(tiny.make_texts(8))  # one batch an epoch
    slm = without_dropout(starting_slm(config.slm.models[0], ("a", "b"), config))
    other = without_dropout(starting_slm(config.slm.models[0], ("a", "b"), config))
    train_locally(slm, rows, config, 2, 0, noise_source(0))

    parameters = other.trained()
    received = [p.detach().clone() for p in parameters]
    head = {id(p) for p in other.model.classifier.parameters()}
    rates = [5e-3 if id(p) in head else 2e-4 for p in parameters]
    groups = [
        {"params": [p], "lr": rate, "weight_decay": 0.01 if p.ndim > 1 else 0.0}
        for p, rate in zip(parameters, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    rng = np.random.default_rng(0)
    for step in range(2):
        order = rng.permutation(8)
        logits = other(other.tokenize([rows.texts[i] for i in order]))
        loss = cross_entropy(logits, torch.from_numpy(rows.labels[order]))
        gradients = torch.autograd.grad(loss, parameters)
        for p, g, before in zip(parameters, gradients, received, strict=True):
            p.grad = g + mu * (p.detach() - before)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1.0, 0.5)[step]  # one step of warm-up, then half-way down to 0
        optimizer.step()
    # AdamW moves a weight by its whole rate also where the gradient is rounding noise (a key's bias), and
    # there the two may differ; everywhere else they agree.
    for (name, array), mine, rate in zip(slm.state().items(), parameters, rates, strict=True):
        if not name.endswith("key.bias"):
            np.testing.assert_allclose(array, mine.detach().numpy(), atol=0.05 * rate, err_msg=name)
    plain = without_dropout(starting_slm(config.slm.models[0], ("a", "b"), config))
    train_locally(plain, rows, config_of(tiny_encoder, tiny_data, 0.0), 2, 0, noise_source(0))
    assert max(np.abs(plain.state()[name] - array).max() for name, array in slm.state().items()) > 1e-4


def test_without_mu_it_is_fedavg_to_the_bit(tiny_encoder: Path, tiny_data: Path) -> None:
    plain, _ = trained(config_of(tiny_encoder, tiny_data, 0.5, "fedavg"))
    zero, _ = trained(config_of(tiny_encoder, tiny_data, 0.0))
    held, _ = trained(config_of(tiny_encoder, tiny_data, 0.01))
    assert differ(plain.state(), zero.state()) == []
    assert len(differ(plain.state(), held.state())) > 10


def test_the_larger_mu_the_nearer_to_the_received_model(tiny_encoder: Path, tiny_data: Path) -> None:
    far = [distance(*trained(config_of(tiny_encoder, tiny_data, mu), epochs=4)) for mu in (0.0, 1.0, 100.0)]
    assert far[0] > far[1] > far[2]
    assert far[2] < 0.5 * far[0]


def test_the_memo_tells_mu_apart(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    memo, rows, states = TrainingMemo(tmp_path), rows_of(tiny.make_texts(16)), []
    for mu, method in ((0.0, "fedprox"), (0.5, "fedavg"), (2.0, "fedprox"), (2.0, "fedprox")):
        config = config_of(tiny_encoder, tiny_data, mu, method)
        slm = starting_slm(config.slm.models[0], ("a", "b"), config)
        memo(slm, rows, config, 2, 0, noise_source(0))
        states.append(slm.state())
    assert len(list(tmp_path.iterdir())) == 2
    assert differ(states[0], states[1]) == differ(states[2], states[3]) == []
    assert differ(states[0], states[2])


def test_runs_of_it(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Without mu a run is FedAvg's; with much of it another, next to the same models trained alone."""
    average = run(config_of(tiny_encoder, tiny_data, 0.01, "fedavg"), tmp_path / "average")
    zero = run(config_of(tiny_encoder, tiny_data, 0.0), tmp_path / "zero")
    held = run(config_of(tiny_encoder, tiny_data, 100.0), tmp_path / "held")
    final = [
        (tmp_path / f"{name}/models/silo-1/model.safetensors").read_bytes()
        for name in ("average", "zero", "held")
    ]
    assert final[0] == final[1]
    assert final[0] != final[2]
    alone = [[row.baseline_accuracy for row in result.clients] for result in (average, zero, held)]
    assert alone[0] == alone[1] == alone[2], "the baseline has no term of the method"
    assert held.method == "fedprox"
    assert "averages them" in describe(held)
    assert "average of the models of 3 silos" in (tmp_path / "held/models/silo-1/README.md").read_text()


def test_an_interrupted_run_goes_on(tiny_encoder: Path, tiny_data: Path, tmp_path: Path) -> None:
    config = config_of(tiny_encoder, tiny_data, 5.0)

    def stop(_: float, what: str) -> None:
        if "round 2, train: silo-2" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", progress=stop)
    run(config, tmp_path / "run", resume=True)
    run(config, tmp_path / "whole")
    weights = [
        (tmp_path / f"{name}/models/silo-1/model.safetensors").read_bytes() for name in ("run", "whole")
    ]
    assert weights[0] == weights[1]
