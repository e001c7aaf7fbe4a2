"""The auditor's canary: known epsilons from below, planted faults caught, bad input refused.

Everything is seeded. Where it were not, an honest mechanism would be called violating with probability at
most 5 % a run (the confidence of the bounds); the planted faults are missed far more rarely than that.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from attacks import cli, planted
from attacks.mechanism import MAX_TRIALS, MechanismAudit, Noising, audit_mechanism, released_sums
from securefl.centroid_privacy import CentroidMechanism
from securefl.console import run_app
from securefl.errors import SecureflError, UsageError
from securefl.privacy import Noise, noise_source
from securefl.release import Adjacency

# Sigma over clip of the Gaussian mechanism at delta 1e-5, as published (and tested in test_bounds).
PUBLISHED = {1: 3.73, 2: 1.99, 4: 1.08, 8: 0.60}
Rows: TypeAlias = NDArray[np.float64]
Groups: TypeAlias = NDArray[np.int64]


def audited(
    multiplier: float,
    noising: Noising = released_sums,
    *,
    clip: float = 1.0,
    trials: int = 20_000,
    seed: int = 0,
    adjacency: Adjacency = "add-remove",
    noise: Noise | None = None,
) -> MechanismAudit:
    return audit_mechanism(
        multiplier, clip, 1e-5, trials, noise=noise or noise_source(seed), rng=np.random.default_rng(seed),
        adjacency=adjacency, noising=noising,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("epsilon", "floor", "classic"), [(1, 0.8, 0.5), (2, 1.7, 1.1), (4, 3.5, 2.4), (8, 7.0, 4.4)]
)
def test_known_epsilons_come_out_just_below(epsilon: int, floor: float, classic: float) -> None:
    """The real release; floors and Clopper-Pearson figures are those published for 100,000 trials a side."""
    found = audited(PUBLISHED[epsilon], trials=100_000, seed=3)
    assert found.claim_epsilon == pytest.approx(epsilon, rel=0.005)
    assert floor <= found.epsilon_lower_bound_gdp <= found.claim_epsilon
    assert found.epsilon_lower_bound_cp == pytest.approx(classic, rel=0.25)
    assert found.verdict == "none_shown"
    assert found.simulated


def test_replacing_a_row_tells_twice_as_much() -> None:
    """Opposite canaries: mu = 2 / z, of which 20,000 trials show most; the add/remove bound is below half."""
    single, double = audited(2.0), audited(2.0, adjacency="replace-one")
    assert (single.claim_mu, double.claim_mu) == (0.5, 1.0)
    assert 0.9 < double.mu_lower_bound <= 1.0
    assert 0.42 < single.mu_lower_bound <= 0.5
    assert double.verdict == "none_shown"


def test_an_honest_mechanism_is_rarely_called_violating() -> None:
    """At most 5 % a run by the theorem; 5 of 20 or more would then have probability below .003."""
    runs = [audited(1.0, trials=2_000, seed=seed) for seed in range(20)]
    assert sum(run.verdict == "violates_claim" for run in runs) < 5
    assert max(run.epsilon_lower_bound_cp for run in runs) < runs[0].claim_epsilon


def test_the_systems_own_noise_is_audited() -> None:
    """Unseeded, as real releases are, so the bound may pass its claim in 5 % of runs, and seldom does.

    Asked is only what fails with probability below 1e-9: the errors of 10,000 trials leave mu within .2 of 1.
    """
    found = audited(1.0, noise=noise_source(None))
    assert not found.simulated
    assert found.generator == noise_source(None).name
    assert 0.75 < found.mu_lower_bound < 1.2


@pytest.mark.parametrize("name", planted.SUMS)
def test_planted_faults_are_caught(name: str) -> None:
    found = planted.SUMS[name].audit(noise_source(0), np.random.default_rng(0))
    assert found.verdict == "violates_claim"
    assert found.epsilon_lower_bound_gdp > found.claim_epsilon


@pytest.mark.parametrize("name", planted.PRESENCE)
def test_a_centroid_that_is_there_for_one_row_is_caught_and_the_real_decision_is_not(name: str) -> None:
    """Of 40 honest audits one in 20 may be called violating; 9 or more have probability below .001."""
    keeping, rows = planted.PRESENCE[name]
    assert planted.audit_presence(keeping, rows, noise_source(0)).violates_claim
    honest = [
        planted.audit_presence(planted.kept_by_release, rows, noise_source(seed), trials=400)
        for seed in range(40)
    ]
    assert sum(found.violates_claim for found in honest) < 9
    assert np.median([found.mu_lower_bound for found in honest]) > 0


def test_what_presence_tells_is_the_noise_on_the_counts() -> None:
    """Released where n + N(0, z^2) is at least n + 1: with one row more half the time, else Phi(-1 / z)."""
    mechanism = CentroidMechanism(1.0, 1.0, 2.0, 1.0, 1e-5, 10)
    for size, expected in ((9, norm.cdf(-0.5)), (10, 0.5)):
        kept = planted.kept_by_release(np.repeat(np.arange(20_000), size), 20_000, mechanism, noise_source(1))
        assert len(kept) / 20_000 == pytest.approx(expected, abs=0.02)


def test_noise_that_is_too_large_is_no_violation() -> None:
    found = audited(1.0, planted.sigma_for(lambda s, m: 3 * s))
    assert found.verdict == "none_shown"
    assert found.mu_lower_bound < 1 / 3


def test_a_mechanism_that_tells_nothing_shows_nothing() -> None:
    """A null: 0 unless both one-sided bounds fail, below 5 % a run, so for 3 of 10 seeds below .012."""
    runs = [audited(1.0, planted.deaf, trials=500, seed=seed) for seed in range(10)]
    assert sum(run.epsilon_lower_bound_gdp > 0 for run in runs) <= 2
    assert {run.verdict for run in runs} == {"none_shown"}


def test_what_is_observed_is_the_noised_sum() -> None:
    """Five rows by hand, the third one clipped from norm 10 to 5; the noise is N(0, (clip z)^2)."""
    rows = np.array([[1.0, 0.0], [2.0, 2.0], [6.0, 8.0], [-1.0, -1.0], [0.0, 3.0]])
    groups = np.array([0, 0, 0, 1, 1])
    mechanism = CentroidMechanism(5.0, 1e-4, 0.1, 1.0, 1e-5, 1)
    sums = released_sums(rows, groups, 2, mechanism, noise_source(1))
    assert sums == pytest.approx(np.array([[6.0, 6.0], [-1.0, 2.0]]), abs=5e-3)
    q = 4000
    noised = released_sums(
        np.tile([[3.0, 4.0]], (3 * q, 1)), np.repeat(np.arange(q), 3), q,
        replace(mechanism, noise_multiplier=2.0), noise_source(2),
    )  # fmt: skip
    # Two-sided intervals of mean and deviation of 8,000 draws, each missed with probability 1e-6.
    z = norm.isf(5e-7)
    assert (noised - [9.0, 12.0]).mean() == pytest.approx(0, abs=z * 10 / math.sqrt(2 * q))
    assert (noised - [9.0, 12.0]).std() == pytest.approx(10, abs=z * 10 / math.sqrt(4 * q))


def test_a_withheld_or_broken_sum_ends_the_audit() -> None:
    mechanism = CentroidMechanism(1.0, 1.0, 0.1, 1.0, 1e-5, 10)
    with pytest.raises(SecureflError, match="withheld"):
        released_sums(np.ones((3, 2)), np.zeros(3, np.int64), 1, mechanism, noise_source(0))
    with pytest.raises(SecureflError, match="not finite"):
        audited(1.0, lambda rows, groups, q, mechanism, noise: np.full((q, 8), np.nan), trials=100)


@pytest.mark.parametrize(("trials", "last"), [(100, 100), (16_384, 16_384), (16_385, 1)])
def test_trials_come_in_pieces_and_all_are_made(trials: int, last: int) -> None:
    sizes: list[float] = []
    clusters: list[int] = []

    def noised(rows: Rows, groups: Groups, q: int, mechanism: CentroidMechanism, noise: Noise) -> Rows:
        clusters.append(q)
        return released_sums(rows, groups, q, mechanism, noise)

    found = audit_mechanism(
        1.0, 1.0, 1e-5, trials, noise=noise_source(0), rng=np.random.default_rng(0), noising=noised,
        progress=lambda done, what: sizes.append(done),
    )  # fmt: skip
    assert (sum(sizes), sizes[-1], found.trials) == (trials, last, trials)
    assert sum(clusters) == 3 * trials  # an earlier release, and one a side
    assert max(clusters) <= 16_384


@pytest.mark.parametrize(("multiplier", "clip"), [(0.01, 1e6), (1e6, 1e-6), (1e6, 1e6), (0.01, 1e-6)])
def test_the_ends_of_the_ranges_work(multiplier: float, clip: float) -> None:
    found = audited(multiplier, clip=clip, trials=2_000)
    assert found.verdict == "none_shown"
    assert (found.mu_lower_bound > 4) == (multiplier < 1)


BAD: dict[str, list[dict[str, float]]] = {
    "the noise multiplier": [{"noise_multiplier": v} for v in (0.0, -1.0, math.nan, math.inf, 1e-3)],
    "the clip": [{"clip": v} for v in (0.0, -1.0, math.nan, math.inf)],
    "delta": [{"delta": v} for v in (0.0, 1.0, -0.1, math.nan)],
    "the trials": [{"trials": v} for v in (99, 0, -5, MAX_TRIALS + 1, 10**30)],
}


@pytest.mark.parametrize(("named", "bad"), [(name, bad) for name, many in BAD.items() for bad in many])
def test_bad_parameters_are_one_sentence_and_exit_2(
    named: str, bad: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    good: dict[str, Any] = {"noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-5, "trials": 100}
    with pytest.raises(UsageError, match=f"^{named} must"):
        audit_mechanism(**{**good, **bad}, noise=noise_source(0), rng=np.random.default_rng(0))
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in {**good, **bad}.items()]
    assert run_app(cli.app, "securefl-audit", ["mechanism", *arguments, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert "Traceback" not in shown.err
    assert shown.err.count("\n") == 1


COMMAND = ["mechanism", "--noise-multiplier=0.6", "--clip=2", "--delta=1e-5", "--trials=5000"]


@pytest.mark.parametrize("more", [["--seed=-1"], ["--adjacency=swap"], ["--trials=many"]])
def test_bad_options_exit_2(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(cli.app, "securefl-audit", [*COMMAND, *more]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_command_prints_one_json_document() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from attacks.cli import main; main()", *COMMAND, "--json", "--seed=1",
         "--adjacency=replace-one"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["schema"] == "securefl.mechanism-audit/1"
    assert document["claim_mu"] == pytest.approx(2 / 0.6)
    assert (
        document["epsilon_lower_bound_cp"] <= document["epsilon_lower_bound_gdp"] <= document["claim_epsilon"]
    )
    stated = (document["adjacency"], document["trials"], document["confidence"], document["delta"])
    assert stated == ("replace-one", 5000, 0.95, 1e-5)
    assert (document["clip"], document["noise_multiplier"], document["verdict"]) == (2, 0.6, "none_shown")
    assert document["simulated"]


def test_a_seed_repeats_the_audit_and_another_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(seed: int) -> str:
        assert run_app(cli.app, "securefl-audit", [*COMMAND, "--json", f"--seed={seed}"]) == 0
        return capsys.readouterr().out

    assert printed(4) == printed(4) != printed(5)


def test_command_prints_a_table_and_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(cli.app, "securefl-audit", [*COMMAND, "--seed=1"]) == 0
    shown = capsys.readouterr().out
    assert "claim" in shown
    assert "none shown" in shown
    assert "proves nothing" in shown
    assert "5,000 trials a side" in shown


def test_command_ends_with_4_where_the_claim_is_false(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is planted below the command: the release draws the same noise every time."""
    monkeypatch.setattr("securefl.privacy.noise_source", lambda seed: planted.repeated(planted.SEED))
    assert run_app(cli.app, "securefl-audit", [*COMMAND, "--json"]) == 4
    shown = capsys.readouterr()
    assert json.loads(shown.out)["verdict"] == "violates_claim"
    assert "above the claim" in shown.err
