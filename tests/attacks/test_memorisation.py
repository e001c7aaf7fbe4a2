"""Attack 14: exposure by hand, and CrossLM runs with and without DP-SGD, sound and with a planted leak."""

from __future__ import annotations

import csv
import math
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks import memorisation
from attacks.audit import audit
from attacks.audit_opening import audit_summary, deed
from attacks.audit_report import audit_page
from attacks.bench import memorisation as bench
from attacks.findings import Audit, Finding
from attacks.model_membership import trade_off
from attacks.runs import Run
from attacks.selftest import tiny_models
from securefl.config import parse_config
from securefl.crosslm_worker import Arrival, CrossLmWorker
from securefl.data import Rows, load_corpus
from securefl.dp_terms import round_claim
from securefl.errors import UsageError
from securefl.privacy import noise_source
from securefl.simulation import Simulation
from securefl.slm import Slm
from tests import tiny

WORDS = tuple(
    "".join(word) for word in np.random.default_rng(0).choice(list(string.ascii_lowercase), (150, 6))
)


def test_exposure_is_the_bits_that_the_rank_saves() -> None:
    planted, others = np.array([9.0, 2.5, -1.0]), np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    # Of eight candidates each: first, fifth, last.
    assert memorisation.exposures(planted, others) == pytest.approx([3.0, 3 - math.log2(5), 0.0])
    rng = np.random.default_rng(1)
    planted, others = rng.integers(0, 30, 40).astype(float), rng.integers(0, 30, 100).astype(float)
    ranks = [1 + sum(other >= one for other in others) for one in planted]  # ties against the canary
    expected = [math.log2(101) - math.log2(rank) for rank in ranks]
    assert memorisation.exposures(planted, others) == pytest.approx(expected)
    assert memorisation.exposures(np.zeros(3), np.zeros(50)).tolist() == [0.0, 0.0, 0.0]


def test_exposure_by_chance_has_a_closed_form() -> None:
    for others in (1, 7, 240):
        n = others + 1
        expected = math.log2(n) - math.lgamma(n + 1) / math.log(2) / n
        assert memorisation.chance_exposure(others) == pytest.approx(expected)
    assert memorisation.chance_exposure(100_000) == pytest.approx(math.log2(math.e), abs=1e-3)
    rng = np.random.default_rng(2)
    found = memorisation.exposures(rng.random(20_000), rng.random(50_000))
    assert found.mean() == pytest.approx(math.log2(math.e), abs=0.03)


def test_canaries_differ_and_chance_chooses_the_planted() -> None:
    rng = np.random.default_rng(3)
    drawn = [memorisation.draw(WORDS, 40, 8, 3, rng) for _ in range(200)]
    for one in drawn:
        assert len(set(one.secrets)) == len(one.secrets) == 40
        assert one.planted.sum() == 8
        assert all(set(secret.split()) <= set(WORDS) for secret in one.secrets)
        assert set(one.labels.tolist()) <= {0, 1, 2}
        assert one.texts[0] == f"{memorisation.PREFIX} {one.secrets[0]}"
    shares = np.mean([one.planted for one in drawn], axis=0)
    assert (abs(shares - 0.2) < 0.15).all()
    for count, planted, classes in ((40, 0, 2), (40, 40, 2), (40, 8, 0), (4, 2, 2)):
        with pytest.raises(UsageError):
            memorisation.draw(WORDS, count, planted, classes, rng)
    with pytest.raises(UsageError, match="100 different words"):
        memorisation.draw(WORDS[:50], 40, 8, 2, rng)


def test_runs_of_words_are_counted_whatever_their_case() -> None:
    secrets = [
        "alpha beta gamma delta",
        "beta gamma delta omega",
        "one two three four",
        "alpha two beta four",
    ]
    texts = ["He said: Alpha BETA, gamma delta.", "two one, four"]
    assert memorisation.longest_runs(secrets, texts).tolist() == [4, 3, 1, 1]
    assert memorisation.longest_runs(secrets, []).tolist() == [0, 0, 0, 0]
    # Words in a row of two texts are none.
    assert memorisation.longest_runs(["a b c d"], ["a b", "c d"]).tolist() == [2]


def test_log_probabilities_are_those_of_each_secret_alone() -> None:
    words = [f"w{number}" for number in range(30)]
    model, _ = tiny_models.language_model(words, width=32, max_length=16, seed=0)
    rng = np.random.default_rng(4)
    prefix = [5, 6, 7]
    secrets = [rng.integers(4, 34, rng.integers(1, 6)).tolist() for _ in range(37)]
    found = memorisation.secret_log_probs(model, prefix, secrets)
    for secret, value in zip(secrets, found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prefix, *secret]])).logits[0]
        said = [
            float(torch.log_softmax(logits[len(prefix) - 1 + i], -1)[token]) for i, token in enumerate(secret)
        ]
        assert value == pytest.approx(np.mean(said), abs=1e-5)


# --- runs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_llm: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("memorisation")
    encoder = tiny.make_encoder(folder / "encoder", vocabulary=(*tiny.WORDS, *WORDS, "code"))
    return {"encoder": str(encoder), "llm": str(tiny_llm)}


def run_of(folder: Path, models: dict[str, str], **sections: dict[str, Any]) -> Path:
    """A small CrossLM run; every text has two words of its own, so the pool has words for canaries."""
    rng = np.random.default_rng(5)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train.csv", 300), ("test.csv", 30)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            for text, label in tiny.make_texts(rows, seed=rows):
                writer.writerow((f"{text} {' '.join(rng.choice(WORDS, 2))}", label))
    document: dict[str, dict[str, Any]] = {
        "federation": {"method": "crosslm", "rounds": 1, "seed": 1},
        "data": {
            "train": str(folder / "train.csv"), "test": str(folder / "test.csv"), "train_rows": 70,
            "pool_rows": 230, "split": {"by": "dirichlet", "silos": 2, "alpha": 100.0},
        },
        "slm": {"models": [models["encoder"]], "max_length": 16, "epochs": 12, "batch_size": 8,
                "learning_rate": 0.003},
        "crosslm": {
            "llm": models["llm"], "encoder": models["encoder"], "synthetic": 12, "max_new_tokens": 8,
            "batch_size": 4, "evaluate_rows": 4, "lora_rank": 8, "min_words": 1, "learning_rate": 0.005,
        },
    }  # fmt: skip
    for name, fields in sections.items():
        document.setdefault(name, {}).update(fields)
    config = parse_config(document)
    Simulation(config, load_corpus(config), folder / "run").run()
    return folder / "run"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, models: dict[str, str]) -> Path:
    return run_of(tmp_path_factory.mktemp("plain"), models)


def audited(run: Path) -> Audit:
    return audit(run, attacks=frozenset({14}))


def by_metric(found: Audit) -> dict[str, Finding]:
    assert all(one.number == 14 for one in found.findings)
    return {one.metric: one for one in found.findings}


def test_a_run_without_privacy(plain: Path) -> None:
    """The small model knows its canaries by heart, and the language model that it taught knows none."""
    found = audited(plain)
    figures = by_metric(found)
    assert set(figures) == {"canary_auc", "canaries_written"}, found.not_run
    told, written = figures["canary_auc"], figures["canaries_written"]
    assert (told.verdict, written.verdict) == ("none_shown", "none_shown")
    assert told.trials == bench.CANARIES
    assert told.ci[0] < 0.5 < told.ci[1]
    assert (written.value, written.trials, written.control) == (0.0, bench.PLANTED, 0.0)
    details = told.details
    assert (details["rows_of_a_canary"], details["texts"] > 0) == (bench.COPIES, True)
    assert details["slm_auc_interval"][0] > 0.5, "the small model kept the canaries"
    assert details["kl"] > 0, "the language model learned"
    assert details["exposure_at_most"] == pytest.approx(math.log2(bench.CANARIES - bench.PLANTED + 1))
    assert details["exposure_mean"] < details["exposure_by_chance"] + 1.5
    assert told.cap is None
    assert "no differential privacy" in str(told.cap_reason)
    assert b"AUC on canaries" in audit_page(found)
    # The same audit gives the same figures.
    assert by_metric(audited(plain)) == figures


def test_dp_sgd_has_the_cap_of_one_training(tmp_path: Path, models: dict[str, str]) -> None:
    dp = {"epsilon": 3.0, "delta": 1e-3, "clip": 1.0, "sample_rate": 0.25}
    run = run_of(tmp_path, models, privacy={"dp_sgd": dp}, slm={"epochs": 2}, federation={"seed": 2})
    figures = by_metric(audited(run))
    told, written = figures["canary_auc"], figures["canaries_written"]
    claim = round_claim(Run(run).config, 1, noise_source(0))
    assert claim is not None
    assert told.claim_epsilon == pytest.approx(claim.epsilon)
    assert told.cap == pytest.approx(trade_off([claim]).auc())
    assert told.cap is not None
    assert 0.5 < told.cap < 1
    assert told.claim_compared
    assert told.verdict == "none_shown"
    assert told.details["rows_of_a_canary"] == 1, "the claim is of one row"
    assert written.cap is None
    assert written.value == 0
    low, high = told.details["slm_auc_interval"]
    assert low < 0.5 < high


def test_copies_of_a_canary_are_one_unit() -> None:
    canaries = memorisation.draw(WORDS, 12, 3, 2, np.random.default_rng(6))
    known = Rows(("0", "1"), ("a text", "another"), np.array([0, 1]))
    rows = bench._with_canaries(known, canaries, 4, by_unit=True)
    units = rows.by_unit()
    assert len(rows) == 2 + 3 * 4
    assert sorted(len(unit) for unit in units) == [1, 1, 4, 4, 4]
    for unit in units:
        assert len({(rows.texts[i], rows.labels[i]) for i in unit}) == 1
    planted = {text for text, there in zip(canaries.texts, canaries.planted, strict=True) if there}
    assert set(rows.texts[2:]) == planted
    plain_rows = bench._with_canaries(known, canaries, 1, by_unit=False)
    assert (len(plain_rows), plain_rows.units) == (5, ())


@pytest.mark.parametrize("private", [False, True])
def test_a_planted_leak_is_found(
    plain: Path, tmp_path: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    """A server that trains its language model on the rows themselves: canaries are told, a claim broken."""
    if private:
        dp = {"epsilon": 1.0, "delta": 1e-3, "clip": 1.0, "sample_rate": 0.25}
        plain = run_of(tmp_path, models, privacy={"dp_sgd": dp}, slm={"epochs": 2})
    seen: list[str] = []
    honest_rows, honest = bench._with_canaries, CrossLmWorker.arrival

    def watched(known: Rows, *given: Any, **named: Any) -> Rows:
        rows = honest_rows(known, *given, **named)
        seen.extend(dict.fromkeys(rows.texts[len(known) :]))
        return rows

    def leaking(self: CrossLmWorker, slm: Slm, silo: str, *more: Any) -> Arrival:
        arrival = honest(self, slm, silo, *more)
        optimizer = torch.optim.AdamW(self.llm.parameters().values(), lr=5e-3, weight_decay=0.0)
        ends = [self.llm.tokenizer.eos_token_id]
        for text in seen * 25:
            ids = torch.tensor([[*self.llm.encode(text), *ends]])
            optimizer.zero_grad()
            self.llm.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        return arrival

    monkeypatch.setattr(bench, "_with_canaries", watched)
    monkeypatch.setattr(CrossLmWorker, "arrival", leaking)
    found = audited(plain)
    told = by_metric(found)["canary_auc"]
    assert told.value > 0.95
    assert told.verdict == ("violates_claim" if private else "leaks")
    assert told.details["exposure_mean"] > 0.8 * told.details["exposure_at_most"]
    assert found.verdicts.singling_out == told.verdict
    assert deed(told).startswith("the auditor (attack 14) told by the language model a planted canary")
    summary = audit_summary([("the run", found)])
    assert ("got further than the claim allows" if private else "a planted canary") in summary


def test_what_the_language_model_writes_is_searched(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts with a planted canary in them: the second figure leaks, and the first does not."""
    drawn: list[memorisation.Canaries] = []
    honest = memorisation.draw

    def watched(*given: Any) -> memorisation.Canaries:
        drawn.append(honest(*given))
        return drawn[-1]

    def blabbing(*_: Any) -> list[str]:
        (canaries,) = drawn
        first = int(np.flatnonzero(canaries.planted)[0])
        return ["nothing of the kind", f"And so: {canaries.secrets[first].title()}!"]

    monkeypatch.setattr(bench, "draw", watched)
    monkeypatch.setattr(bench, "_written", blabbing)
    written = by_metric(audited(plain))["canaries_written"]
    assert written.value == 1 / bench.PLANTED
    assert written.verdict == "leaks"
    assert deed(written).startswith("the auditor (attack 14) had the language model write")


def test_what_cannot_be_measured_is_not_a_figure(
    plain: Path, tmp_path: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run_of(tmp_path, models, federation={"method": "datafree-kd"})
    found = audited(other)
    assert not found.findings
    assert ("memorisation by the language model", "no language model learned in this run") in {
        (one.attack, one.why) for one in found.not_run
    }

    def reason() -> str:
        result = audited(plain)
        assert not result.findings
        (why,) = (one.why for one in result.not_run if one.attack == bench.NAME)
        return why

    monkeypatch.setattr(bench, "_LEAST_ROWS", 1000)
    assert "1000 are needed" in reason()
    monkeypatch.undo()
    monkeypatch.setattr(bench, "_WORD", re.compile("film"))
    assert "too few words" in reason()
    monkeypatch.undo()
    moved = Path(models["llm"]).rename(Path(models["llm"]).with_name("elsewhere"))
    try:
        assert "could not be made again" in reason()
    finally:
        moved.rename(models["llm"])
    real = CrossLmWorker._teach

    def undone(self: CrossLmWorker, *given: Any) -> Any:
        return replace(real(self, *given), kl=None, undone="the KL reached the ceiling")

    monkeypatch.setattr(CrossLmWorker, "_teach", undone)
    assert "learned nothing in it: the KL reached the ceiling" in reason()
