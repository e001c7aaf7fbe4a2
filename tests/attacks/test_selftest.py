"""The self-test: passes as shipped, and names what fails once an attack, a bound or a mechanism is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm

from attacks import bounds, cli, planted
from attacks.bench import SUITE
from attacks.bounds import Confusion
from attacks.selftest import Check, checks_of, require, selftest
from attacks.selftest.bounds import known_checks, null_checks, one_run_checks
from attacks.selftest.check import alarms_check, most_alarms
from attacks.selftest.inversions import Coded
from attacks.selftest.leaks import LEAKS
from securefl.console import run_app
from securefl.errors import ProtocolError, SecureflError, UsageError
from securefl.privacy import noise_source

QUICK = ["selftest", "--quick", "--repetitions=1"]


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def null_games(sizes: tuple[int, ...], repetitions: int = 30) -> list[Check]:
    rng = np.random.default_rng(0)
    return list(null_checks(repetitions, rng, noise_source(0), lambda *_: None, sizes, (20,)))


def test_it_passes_as_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(cli.app, "securefl-audit", [*QUICK, "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["schema"], document["passed"], document["quick"]) == ("securefl.selftest/1", True, True)
    assert {"securefl", "numpy", "python"} <= set(document["versions"])
    names = [check["name"] for check in document["checks"]]
    assert len(set(names)) == len(names)
    assert all(check["passed"] for check in document["checks"])
    for number in LEAKS:
        assert any(f"({number})" in name for name in names)
    # Progress: on stderr, a line a tenth.
    assert "planted leak" in shown.err


def test_a_failed_check_is_named_and_ends_with_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attacks.selftest.LEAKS", {1: LEAKS[1]})
    monkeypatch.setattr("attacks.membership.dot_products", lambda rows, *_: np.zeros(len(rows)))
    assert run_app(cli.app, "securefl-audit", QUICK) == 4
    shown = capsys.readouterr()
    assert "1 failed, first: membership (1), dot: leak" in " ".join(shown.err.split())
    assert shown.out.count("FAILED") == 1
    assert "finds everything" in " ".join(shown.out.split())


@pytest.mark.parametrize("more", [["--repetitions=0"], ["--repetitions=1001"], ["--seed=-1"]])
def test_bad_options_exit_2(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(cli.app, "securefl-audit", ["selftest", *more]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="repetitions"):
        selftest(repetitions=0)
    with pytest.raises(UsageError, match="seed"):
        selftest(seed=-1)


# --- every attack, broken

Fill = Callable[[Any], Any]


@pytest.fixture(params=["constant", "noise"])
def fill(request: pytest.FixtureRequest) -> Fill:
    """Scores of the same shape that know nothing."""
    rng = np.random.default_rng(0)
    if request.param == "constant":
        return np.zeros_like
    return lambda scores: rng.standard_normal(np.shape(scores)).astype(np.asarray(scores).dtype)


def arrays(found: Any, fill: Fill) -> Any:
    return fill(found)


def of_a_field(name: str) -> Callable[[Any, Fill], Any]:
    return lambda found, fill: replace(found, **{name: fill(getattr(found, name))})


def picks(found: Any, fill: Fill) -> Any:
    """Of `pursuit.solve`: atoms by number."""
    import torch

    chosen, error = found
    blind = torch.from_numpy(fill(chosen.numpy().astype(float)))
    return (100 * blind.abs()).long() % 400, error


def rows_named(found: Any, fill: Fill) -> Any:
    """Of `pool_search.decompose`: different rows of the pool."""
    order = np.argsort(fill(np.zeros(200)), kind="stable")
    return replace(found, indices=order[: len(found.indices)])


def of_texts(found: Any, fill: Fill) -> Any:
    """Of `Climb._scores`: what is climbed; the vectors stay."""
    scores, vectors = found
    return fill(scores), vectors


def scores_of_trials(found: Any, fill: Fill) -> Any:
    return type(found)(*(fill(getattr(found, side)) for side in ("members", "others", "earlier")))


BROKEN: list[tuple[int, str, Callable[[Any, Fill], Any], str]] = [
    (1, "attacks.membership.likelihood_ratios", arrays, "membership (1), ratio"),
    (1, "attacks.membership.dot_products", arrays, "membership (1), dot"),
    (2, "attacks.pursuit.solve", picks, "tokens (2)"),
    (3, "attacks.mechanism._scores", scores_of_trials, "mechanism (3)"),
    (4, "attacks.text_canaries.text_scores", of_a_field("scores"), "one run (4), text canaries"),
    (5, "attacks.token_regressions.Ridge.scores", arrays, "bag of words (5)"),
    (6, "attacks.rounds.likelihood_ratios", arrays, "several rounds (6): leak"),
    (6, "attacks.rounds.difference", arrays, "several rounds (6): difference"),
    (7, "attacks.membership.likelihood_ratios", arrays, "subtraction (7)"),
    (8, "attacks.membership.likelihood_ratios", arrays, "pool search (8), ranking"),
    (8, "attacks.pool_search.decompose", rows_named, "pool search (8), decomposition"),
    (9, "attacks.decoder.Climb._scores", of_texts, "inversion (9): leak"),
    (10, "attacks.decoder.Climb._scores", of_texts, "inversion (10), learned decoder: leak"),
    (10, "attacks.zero_shot.Box.ask", arrays, "inversion (10), zero-shot: leak"),
    (12, "attacks.model_membership.losses", arrays, "trained model (12), loss"),
    (12, "attacks.model_membership.lira", arrays, "trained model (12), lira offline"),
    (12, "attacks.model_membership.rmia", arrays, "trained model (12), rmia"),
    (13, "attacks.attribute_probe.read", of_a_field("chances"), "attribute (13)"),
    (14, "attacks.memorisation.secret_log_probs", arrays, "memorisation (14): leak"),
    (14, "attacks.memorisation.longest_runs", arrays, "memorisation (14): written"),
]


def resolve(path: str) -> Any:
    import importlib

    module, _, rest = path.partition(".")
    found = importlib.import_module(module)
    for name in rest.split("."):
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(f"attacks.{name}")
    return found


@pytest.mark.parametrize(("number", "path", "break_", "name"), BROKEN, ids=[path for _, path, *_ in BROKEN])
def test_an_attack_that_scores_blindly_is_named(
    number: int, path: str, break_: Callable[[Any, Fill], Any], name: str, fill: Fill,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    original = resolve(path)
    monkeypatch.setattr(path, lambda *given, **named: break_(original(*given, **named), fill))
    # The other faults are of the mechanism, and take their time.
    monkeypatch.setattr("attacks.selftest.faults.SUMS", dict(list(planted.SUMS.items())[:1]))
    checks = checks_of([number])
    assert any(one.startswith(name) for one in failed(checks))
    with pytest.raises(ProtocolError, match="self-test failed") as caught:
        require(checks)
    assert failed(checks)[0] in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("number", "path", "name"),
    [
        (9, "attacks.decoder.Climb.run", "inversion (9): shuffled"),
        (10, "attacks.decoder.Climb.run", "inversion (10), learned decoder: shuffled"),
    ],
)
def test_an_inversion_that_reads_the_same_of_every_text_is_named(
    number: int, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is right once in six, whichever texts it is held against."""
    drawn = Coded.drawn(np.random.default_rng(number))
    monkeypatch.setattr(path, lambda *_: drawn.own[0])
    assert name in failed(checks_of([number]))


def test_a_one_run_audit_that_guesses_blindly_is_named(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    from attacks import one_run

    original = one_run.audit_scores
    monkeypatch.setattr(
        one_run, "audit_scores", lambda scores, *given, **named: original(fill(scores), *given, **named)
    )
    assert failed(checks_of([4])) == ["one run (4): honest", "one run (4): noise that is reused"]
    checks = list(one_run_checks(10, np.random.default_rng(0), lambda *_: None))
    assert failed(checks) == ["epsilon 4, one run: any mechanism", "epsilon 4, one run: Gaussian"]


def test_a_search_that_prefers_rows_for_other_reasons_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members' own text in the background: an attack that peeks tells absent rows from controls too."""
    from attacks import membership

    original = membership.attack

    def peeking(target: Any, auxiliary: Any, members: Any, controls: Any, rng: Any) -> Any:
        found = original(target, auxiliary, members, controls, rng)
        return replace(found, ratio=(found.ratio[0] + 5, found.ratio[1]))

    monkeypatch.setattr(membership, "attack", peeking)
    assert failed(checks_of([1])) == ["membership (1), ratio: shuffled"]


def test_an_attack_that_ends_in_an_error_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise SecureflError("the vectors are all the same")

    monkeypatch.setattr("attacks.membership.attack", refuse)
    (check,) = [check for check in checks_of([7]) if not check.passed]
    assert (check.name, check.measured) == ("attack 7", "the vectors are all the same")


def test_what_has_no_self_test_is_refused_and_every_attack_of_the_suite_has_one() -> None:
    with pytest.raises(SecureflError, match="attack 99 has no self-test"):
        checks_of([1, 99])
    assert {attack.number for attack in SUITE} <= set(LEAKS)
    require(checks_of([13, 13]))


# --- bounds, broken


def test_the_size_of_a_negative_mu_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A released library does that, and reports an epsilon of 8.6 where nothing is known."""

    def size(errors: Confusion, alpha: float = bounds.ALPHA) -> float:
        fpr, fnr = errors.rates(alpha)
        return 0.0 if max(fpr, fnr) >= 1 else abs(float(norm.ppf(1 - fpr) - norm.ppf(fnr)))

    monkeypatch.setattr(bounds, "gaussian_mu_lower_bound", size)
    assert failed(null_games((20,))) == ["null scores: epsilon, Gaussian", "null scores: mechanism"]


def break_split(members: Any, others: Any, _rng: Any, bound: Any) -> Confusion:
    """The threshold is the best one on the very scores that are counted."""
    return bounds.confusion(members, others, bounds.best_threshold(members, others, bound))


@pytest.mark.parametrize(
    ("name", "wrong", "caught"),
    [
        ("held_out_errors", break_split, "null scores: held-out half"),
        ("upper_bound", lambda k, n, alpha: min(1, (k + 0.5) / n), "interval of a probability"),
        ("auc_interval", lambda a, b: (bounds.auc(a, b) - 0.01, 1.0), "null scores: AUC"),
        ("tpr_at", lambda a, b, fpr: bounds.RateAtFpr(0.02, 0.02, 1, True), "null scores: true positives"),
    ],
)
def test_a_broken_bound_is_caught(
    name: str, wrong: Callable[..., Any], caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, name, wrong)
    assert any(one.startswith(caught) for one in failed(null_games((50, 100))))


def test_a_mechanism_with_too_little_noise_is_caught_at_its_known_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from attacks import mechanism

    wrong = planted.sigma_for(lambda sigma, _: 0.8 * sigma)
    original = mechanism.audit_mechanism
    monkeypatch.setattr(
        mechanism, "audit_mechanism", lambda *given, **named: original(*given, **named, noising=wrong)
    )
    checks = list(known_checks(3, np.random.default_rng(0), noise_source(0), lambda *_: None, (8,)))
    assert failed(checks)[0] == "epsilon 8: Gaussian"


# --- what chance explains


def test_false_alarms_up_to_the_binomial_quantile_are_chance() -> None:
    assert most_alarms(200, 0.05) == 21
    assert binom.sf(21, 200, 0.05) <= 0.001 < binom.sf(20, 200, 0.05)
    assert alarms_check("a", "b", [21, 0], 200, 0.05).passed
    assert not alarms_check("a", "b", [0, 22], 200, 0.05).passed
