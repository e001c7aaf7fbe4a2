"""A budget that is spent twice: what the audit of the mechanism sees of it, and what the books show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attacks.mechanism import MechanismAudit, Noising, audit_mechanism, released_sums
from securefl.centroid_privacy import CentroidMechanism
from securefl.client import Client
from securefl.ledger import Ledger
from securefl.privacy import Noise, gaussian_epsilon, gaussian_mu, noise_source
from securefl.release import NonPrivate
from tests.federation import make_parties, tiny_config

Array = NDArray[np.float64]
FOR_ONE, FOR_TWO = 1 / gaussian_mu(1.0, 1e-5), 1 / gaussian_mu(2.0, 1e-5)


def audited(claimed: float, noising: Noising) -> MechanismAudit:
    """At 50,000 trials a side, from a seed; an honest mechanism is called violating in one run of twenty."""
    rng = np.random.default_rng(5)
    return audit_mechanism(claimed, 1.0, 1e-5, 50_000, noise=noise_source(5), rng=rng, noising=noising)


def with_noise_of(multiplier: float) -> Noising:
    def noised(rows: Array, groups: Any, q: int, mechanism: CentroidMechanism, noise: Noise) -> Array:
        return released_sums(rows, groups, q, replace(mechanism, noise_multiplier=multiplier), noise)

    return noised


def released(times: int) -> Noising:
    """The same rows released so often, each time with noise of its own: their mean is what is known."""

    def noised(*arguments: Any) -> Array:
        return np.asarray(np.mean([released_sums(*arguments) for _ in range(times)], axis=0))

    return noised


def test_epsilon_two_against_one() -> None:
    """Noise for epsilon 2 under a claim of 1 is seen as nearly 2; under a claim of 2 it is none."""
    false = audited(FOR_ONE, with_noise_of(FOR_TWO))
    assert false.claim_epsilon == pytest.approx(1.0, abs=1e-6)
    assert false.verdict == "violates_claim"
    assert 1.7 < false.epsilon_lower_bound_gdp < 2.0
    assert audited(FOR_TWO, released_sums).verdict == "none_shown"


@pytest.mark.parametrize("times", [2, 4])
def test_a_release_that_is_made_again_under_one_charge(times: int) -> None:
    """Two of epsilon 1 are 1.47 together and four 2.18: sqrt(n) mu in closed form, and the bound is below."""
    together = gaussian_epsilon(np.sqrt(times) / FOR_ONE, 1e-5)
    found = audited(FOR_ONE, released(times))
    assert found.verdict == "violates_claim"
    assert 1.0 < found.epsilon_lower_bound_gdp < together
    assert audited(FOR_ONE / np.sqrt(times), released(1)).claim_epsilon == pytest.approx(together, rel=1e-6)


def _draws(client: Client) -> Callable[[], int]:
    """How often a silo's source of noise is asked from now on."""
    count = 0
    source = client.noise

    def draw() -> np.random.Generator:
        nonlocal count
        count += 1
        return source.draw()

    client.noise = replace(source, draw=draw, seed=None)
    return lambda: count


def _private(ledger: Ledger) -> int:
    return sum(not isinstance(entry.claim, NonPrivate) for entry in ledger.entries)


@pytest.fixture
def noisy(tiny_encoder: Path, tiny_data: Path) -> Any:
    return tiny_config(
        tiny_encoder,
        tiny_data,
        federation={"method": "fedkc", "rounds": 3},
        privacy={"centroids": {"epsilon": 3.0, "min_size": 1}, "metrics": {"epsilon": 1.0}},
    )


def test_each_draw_of_noise_is_one_charge(noisy: Any, tmp_path: Path) -> None:
    """Two centroid releases and a figure: three draws and three private entries, the account their sum; a
    plan that comes again is answered by the same bytes, without a draw.
    """
    parties = make_parties(noisy, tmp_path)
    client = parties.clients["silo-1"]
    drawn = _draws(client)
    while not parties.server.finished:
        plans = parties.server.outgoing()
        for name, plan in plans.items():
            answer = parties.clients[name].handle(plan)
            assert parties.clients[name].handle(plan) == answer
            parties.server.receive(answer)
        parties.server.close_step()
    assert drawn() == _private(client.ledger) == 3
    mus = [entry.claim.mu for entry in client.ledger.entries if hasattr(entry.claim, "mu")]
    assert client.ledger.account("silo-1").mu == pytest.approx(float(np.linalg.norm(mus)))


def test_a_release_without_its_charge_shows_in_the_books(
    noisy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same count sees a planted fault: a ledger that forgets the last charge. (An earlier one shows at
    once: the next release then has the sequence number of one that was sent, and the server refuses it.)
    """
    parties = make_parties(noisy, tmp_path)
    client = parties.clients["silo-1"]
    drawn, append, calls = _draws(client), Ledger.append, 0

    def forgets(ledger: Ledger, **fields: Any) -> Any:
        nonlocal calls
        if ledger is client.ledger and not isinstance(fields["claim"], NonPrivate):
            calls += 1
            if calls == 3:
                return ledger.entries[-1]
        return append(ledger, **fields)

    monkeypatch.setattr(Ledger, "append", forgets)
    parties.play(lambda server: server.finished)
    assert drawn() > _private(client.ledger)
