"""The language model's jobs on a tiny random model, against loops that do one text at a time, uncached."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from securefl import _llm_training, crosslm_worker
from securefl._language_model import LanguageModel, Written
from securefl._llm_training import Exercise, teach
from securefl.crosslm_terms import CrossLm
from securefl.crosslm_worker import CrossLmWorker, _Batch, figures
from securefl.errors import ConfigError, ModelError, NonFiniteUpdate, WrongShape
from securefl.models import load_slm
from securefl.release import fingerprint
from securefl.result import ArrivalRow
from securefl.slm import Slm
from securefl.synthetic_quality import self_bleu
from securefl.task_model import Sample
from securefl.training import probabilities

LABELS = ("a", "b")
GENEROUS: dict[str, Any] = {
    "synthetic": 32, "max_new_tokens": 24, "batch_size": 6, "learning_rate": 1e-3,
    "prompt": "Here is a text about {label}:",
}  # fmt: skip
Make = Callable[..., CrossLmWorker]


@pytest.fixture
def make(tiny_encoder: Path, tiny_llm: Path) -> Make:
    def worker(
        labels: tuple[str, ...] = LABELS, seed: int = 1, train_llm: bool = True, **changes: Any
    ) -> CrossLmWorker:
        config = CrossLm(llm=str(tiny_llm), **{**GENEROUS, **changes})
        return CrossLmWorker(config, labels, seed=seed, encoder=str(tiny_encoder), train_llm=train_llm)

    return worker


@pytest.fixture
def slm(tiny_encoder: Path) -> Slm:
    return make_slm(tiny_encoder)


def make_slm(folder: Path, labels: tuple[str, ...] = LABELS) -> Slm:
    model = load_slm(str(folder), labels, max_length=16, train_embeddings=False, seed=0)
    state = model.state()
    name = next(n for n in state if n.endswith("classifier.weight"))
    model.load_state({**state, name: 40 * state[name]})  # opinions, so that rewards differ
    return model


@pytest.fixture(params=["all", "upper"])
def llm(request: pytest.FixtureRequest, tiny_llm: Path) -> LanguageModel:
    """With an adapter that does something."""
    model = LanguageModel(str(tiny_llm), rank=4, seed=3, layers=request.param)
    shift(model)
    return model


def shift(model: LanguageModel, size: float = 0.05) -> None:
    rng = np.random.default_rng(0)
    model.load_state(
        {n: v + rng.normal(0, size, v.shape).astype(np.float32) for n, v in model.state().items()}
    )


def logits_of(llm: LanguageModel, row: list[int]) -> Tensor:
    """(S, V): one sequence, nothing padded or cached."""
    logits: Tensor = llm.model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
    return logits


def log_probs_of(llm: LanguageModel, row: list[int]) -> Tensor:
    """(S - 1,): of each token after the first, one after another."""
    shares = logits_of(llm, row).log_softmax(-1)
    return shares[range(len(row) - 1), row[1:]]


HEADS = [[5, 9, 30, 7], [11], [40, 2 + 10]]
TAILS = [[20, 21, 22], [33], [50, 60], [21, 20, 19, 18, 17]]
WHICH = [2, 0, 1, 0]


# --- the language model


@torch.no_grad()
def test_tokens_after_shared_heads_are_as_one_by_one(llm: LanguageModel) -> None:
    said = llm.after(HEADS, WHICH, TAILS, whole=True)
    shares = said.logits.log_softmax(-1)
    assert said.mask.sum(1).tolist() == [len(tail) for tail in TAILS]
    for i, tail in enumerate(TAILS):
        head = HEADS[WHICH[i]]
        naive = log_probs_of(llm, head + tail)
        found = [float(shares[i, t, token]) for t, token in enumerate(tail)]
        assert found == pytest.approx(naive[len(head) - 1 :].tolist(), abs=1e-5)
        assert float(said.head_log_probs[i]) == pytest.approx(float(naive[: len(head) - 1].sum()), abs=1e-5)
    assert llm.after(HEADS, WHICH, TAILS).head_log_probs.shape == (4, 0)


def test_the_gradient_flows_through_shared_heads(llm: LanguageModel) -> None:
    def gradient(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(llm.parameters().values())))

    said = llm.after(HEADS, WHICH, TAILS)
    shared = gradient(
        (said.logits.log_softmax(-1).gather(-1, said.tokens.unsqueeze(-1)).squeeze(-1) * said.mask).sum()
    )
    naive = torch.stack(
        [
            log_probs_of(llm, HEADS[w] + tail)[len(HEADS[w]) - 1 :].sum()
            for w, tail in zip(WHICH, TAILS, strict=True)
        ]
    )
    for one, other in zip(shared, gradient(naive.sum()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_tokens_alone_are_as_one_by_one(llm: LanguageModel) -> None:
    said = llm.alone(TAILS)
    shares = said.logits.log_softmax(-1)
    for i, tail in enumerate(TAILS):
        found = [float(shares[i, t, token]) for t, token in enumerate(tail[1:])]
        assert found == pytest.approx(log_probs_of(llm, tail).tolist(), abs=1e-5)
        assert float(said.mask[i].sum()) == len(tail) - 1


def test_the_original_is_what_was_loaded(tiny_llm: Path) -> None:
    llm = LanguageModel(str(tiny_llm), rank=4, seed=3)
    row = HEADS[0]
    with torch.no_grad():
        fresh = logits_of(llm, row)
        shift(llm)
        assert not torch.allclose(logits_of(llm, row), fresh, atol=1e-2)
        with llm.original():
            assert logits_of(llm, row).equal(fresh)
        assert not torch.allclose(logits_of(llm, row), fresh, atol=1e-2)


def test_adapter_round_trip_and_refusals(llm: LanguageModel) -> None:
    before = llm.state()
    names = list(before)
    assert all("lora" in name for name in names)
    assert any("mlp" in name for name in names)
    assert any("attn" in name for name in names)
    shift(llm)
    assert fingerprint(llm.state()) != fingerprint(before)
    with pytest.raises(NonFiniteUpdate):
        llm.load_state({**before, names[-1]: np.full_like(before[names[-1]], np.nan)})
    with pytest.raises(WrongShape):
        llm.load_state({name: before[name] for name in names[1:]})
    llm.load_state(before)
    assert fingerprint(llm.state()) == fingerprint(before)


def test_answers_are_as_one_by_one(llm: LanguageModel) -> None:
    answers = [[20], [33, 34, 35], [50, 60]]
    found = llm.answer_log_probs(HEADS, answers)
    with torch.no_grad():
        for i, head in enumerate(HEADS):
            for j, answer in enumerate(answers):
                naive = log_probs_of(llm, head + answer)[len(head) - 1 :].sum()
                assert float(found[i, j]) == pytest.approx(float(naive), abs=1e-4)


def test_perplexity_is_over_tokens(llm: LanguageModel) -> None:
    texts = ["the team", "x", "this is very good for the people of the world"]
    with torch.no_grad():
        rows = [llm.encode(text)[:20] for text in texts]
        shares = torch.cat([log_probs_of(llm, row) for row in rows])
    assert llm.perplexity(texts, limit=20) == pytest.approx(math.exp(-float(shares.mean())), rel=1e-4)
    assert llm.perplexity(texts, limit=20, original=True) != llm.perplexity(texts, limit=20)
    assert math.isnan(llm.perplexity([" the"], limit=20))


PROMPTS = ["the", "this is a", "the", "on people with"] * 20


def test_writing_repeats_with_the_seed_and_leaves_global_state(llm: LanguageModel) -> None:
    state = torch.random.get_rng_state()
    first = llm.write(PROMPTS, max_new_tokens=10, top_p=0.95, seed=5)
    assert torch.random.get_rng_state().equal(state)
    again = llm.write(PROMPTS, max_new_tokens=10, top_p=0.95, seed=5)
    other = llm.write(PROMPTS, max_new_tokens=10, top_p=0.95, seed=6)
    assert [text.text for text in first] == [text.text for text in again]
    assert [text.tokens for text in first] == [text.tokens for text in again]
    assert [text.text for text in first] != [text.text for text in other]


def test_written_tokens_carry_their_own_log_probabilities(llm: LanguageModel) -> None:
    ends = set(llm.tokenizer.all_special_ids) | set(llm.encode("\n"))
    written = llm.write(PROMPTS, max_new_tokens=40, top_p=0.95, seed=5)
    lengths = {len(text.tokens) for text in written}
    assert max(lengths) == 40
    assert len(lengths) > 3  # some ended by themselves
    with torch.no_grad():
        for prompt, text in zip(PROMPTS, written, strict=True):
            head = llm.encode(prompt)
            assert text.tokens
            assert not ends & set(text.tokens)
            assert "\n" not in text.text
            assert text.text == " ".join(text.text.split())
            naive = log_probs_of(llm, head + list(text.tokens))[len(head) - 1 :]
            torch.testing.assert_close(text.log_probs, naive, rtol=1e-4, atol=1e-4)


# --- training it


def exercises_of(llm: LanguageModel, count: int = 7) -> list[Exercise]:
    prompts = ["this is a", "the people of"]
    chosen = [prompts[i % 2] for i in range(count)]
    written = llm.write(chosen, max_new_tokens=9, top_p=0.95, seed=5)
    return [
        Exercise(tuple(llm.encode(prompt)), text, tuple(llm.encode(f"text {i} is about {prompt}")))
        for i, (prompt, text) in enumerate(zip(chosen, written, strict=True))
    ]


def naive_losses(
    llm: LanguageModel, config: CrossLm, exercises: list[Exercise], gains: list[float]
) -> dict[str, Tensor]:
    """(5), (7), (8) and (9) as they are written, one text at a time."""
    parts: dict[str, list[Tensor]] = {"generation": [], "understanding": [], "divergence": []}
    for exercise, r in zip(exercises, gains, strict=True):
        row, start = [*exercise.prompt, *exercise.written.tokens], len(exercise.prompt)
        now = logits_of(llm, row).log_softmax(-1)
        with torch.no_grad(), llm.original():
            old = logits_of(llm, row).log_softmax(-1)
            old_tokens = log_probs_of(llm, row)
        kl = torch.stack([(now[t].exp() * (now[t] - old[t])).sum() for t in range(start - 1, len(row) - 1)])
        read = -log_probs_of(llm, list(exercise.reading))
        if config.mode == "paper":
            parts["generation"].append(-r * (log_probs_of(llm, row).sum() - old_tokens.sum()))
            parts["understanding"].append(read.sum())
            parts["divergence"].append(kl.sum())
        else:
            ratio = (log_probs_of(llm, row)[start - 1 :] - exercise.written.log_probs).exp()
            parts["generation"].append(-torch.min(ratio * r, ratio.clip(0.8, 1.2) * r).mean())
            parts["understanding"].append(read.mean())
            parts["divergence"].append(kl.mean())
    means = {name: torch.stack(values).mean() for name, values in parts.items()}
    g1, g2, g3 = config.gammas
    total = g1 * means["generation"] + g2 * means["understanding"] + g3 * means["divergence"]
    return {**means, "total": total}


@pytest.mark.parametrize("mode", ["paper", "stable"])
def test_losses_and_gradient_are_as_one_by_one(
    llm: LanguageModel, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_llm_training, "_PART", 3)  # 7 texts in parts of 3, 3 and 1
    config = CrossLm.model_validate({"mode": mode, "gammas": (1.0, 0.3, 0.5)})
    exercises, gains = exercises_of(llm), [0.9, -0.6, 0.3, -0.8, 0.5, 0.7, -0.2]
    shift(llm, 0.02)  # away from the policy that wrote them
    own = llm.parameters()
    found = _llm_training._gradient(llm, config, exercises, torch.tensor(gains))
    gradients = {
        name: parameter.grad.clone() for name, parameter in own.items() if parameter.grad is not None
    }
    naive = naive_losses(llm, config, exercises, gains)
    for name, value in naive.items():
        assert found[name] == pytest.approx(float(value.detach()), rel=1e-3, abs=1e-5), name
    expected = torch.autograd.grad(naive["total"], list(own.values()))
    assert set(gradients) == set(own)
    for name, gradient in zip(own, expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5)


def text_log_prob(llm: LanguageModel, exercise: Exercise) -> float:
    with torch.no_grad():
        row = [*exercise.prompt, *exercise.written.tokens]
        return float(log_probs_of(llm, row)[len(exercise.prompt) - 1 :].mean())


def test_teaching_makes_rewarded_texts_likelier(llm: LanguageModel) -> None:
    config = CrossLm(epochs=3, batch_size=4, learning_rate=3e-3, gammas=(1.0, 0.0, 0.0))
    exercises = exercises_of(llm, 8)
    gains = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2)
    before = [text_log_prob(llm, exercise) for exercise in exercises]
    done: list[int] = []
    lesson = teach(llm, config, exercises, gains, np.random.default_rng(0), done.append)
    change = np.array([text_log_prob(llm, e) for e in exercises]) - before
    assert lesson.undone is None
    assert len(lesson.losses) == 6
    assert done == [4, 8, 12, 16, 20, 24]
    assert change[gains.numpy() > 0].mean() > 0 > change[gains.numpy() < 0].mean()


def test_rehearsed_texts_are_the_originals_whatever_was_learned(llm: LanguageModel) -> None:
    first = llm.unprompted(70, 12, seed=3)
    before = fingerprint(llm.state())
    shift(llm)
    again = llm.unprompted(70, 12, seed=3)
    assert fingerprint(llm.state()) != before
    assert [(head, text.tokens) for head, text in first] == [(head, text.tokens) for head, text in again]
    assert {len(head) for head, _ in first} == {1}
    assert [text.tokens for _, text in llm.unprompted(70, 12, seed=4)] != [text.tokens for _, text in first]
    # Their probabilities are the original's.
    head, text = first[0]
    with llm.original():
        found = log_probs_of(llm, [*head, *text.tokens])[len(head) - 1 :]
    np.testing.assert_allclose(text.log_probs.numpy(), found.numpy(), atol=1e-4)


def test_the_rehearsal_adds_the_gradient_of_the_divergence(llm: LanguageModel) -> None:
    """Against one text at a time: mean over texts of the mean over tokens of the exact KL."""
    shift(llm)
    texts = [Exercise(tuple(head), text, ()) for head, text in llm.unprompted(4, 9, seed=1)]
    total = torch.zeros(())
    for one in texts:
        row = [*one.prompt, *one.written.tokens]
        now = logits_of(llm, row)[len(one.prompt) - 1 : -1].log_softmax(-1)
        with llm.original(), torch.no_grad():
            old = logits_of(llm, row)[len(one.prompt) - 1 : -1].log_softmax(-1)
        total = total + (now.exp() * (now - old)).sum(-1).mean() / len(texts)
    parameters = list(llm.parameters().values())
    expected = torch.autograd.grad(total, parameters)
    llm.optimizer.zero_grad()
    value = _llm_training._rehearse(llm, texts)
    assert value == pytest.approx(float(total.detach()), rel=1e-4)
    for parameter, right in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, right, rtol=2e-3, atol=1e-6)


def test_what_is_rehearsed_moves_less(tiny_llm: Path) -> None:
    """The same lesson with a rehearsal and without: other text of the original keeps its probabilities."""
    moved = []
    for rehearsed in (False, True):
        llm = LanguageModel(str(tiny_llm), rank=4, seed=3)
        config = CrossLm(epochs=8, batch_size=4, learning_rate=3e-3, gammas=(1.0, 0.0, 0.0), kl_ceiling=100.0)
        texts = [Exercise(tuple(head), text, ()) for head, text in llm.unprompted(40, 12, seed=1)]
        rehearsal = texts[:32] if rehearsed else []
        gains = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2)
        exercises, rng = exercises_of(llm, 8), np.random.default_rng(0)
        lesson = teach(llm, config, exercises, gains, rng, rehearsal=rehearsal)
        assert lesson.undone is None
        assert ("rehearsal" in lesson.losses[0]) == rehearsed
        moved.append(_llm_training.measure(llm, texts[32:])["kl"])  # texts that were not rehearsed
    assert moved[1] < 0.7 * moved[0], moved


def test_the_paper_rehearses_nothing(make: Make) -> None:
    assert CrossLm(mode="paper").ingredients.rehearsal == 0
    assert CrossLm(synthetic=10).ingredients.rehearsal == 3
    assert CrossLm(rehearsal=0).ingredients.rehearsal == 0
    with pytest.raises(ValueError, match="rehearsal is not in the paper"):
        CrossLm(mode="paper", rehearsal=4)
    assert make(mode="paper")._rehearsal == []
    assert len(make()._rehearsal) == 8


@pytest.fixture
def low_ceiling() -> float:
    """A ceiling that a random model, whose logits are small, can reach."""
    return 0.05


@pytest.mark.parametrize("mode", ["paper", "stable"])
def test_kl_ceiling_puts_the_adapter_back_in_stable_mode(
    tiny_llm: Path, mode: str, low_ceiling: float
) -> None:
    llm = LanguageModel(str(tiny_llm), rank=4, seed=3)
    before = fingerprint(llm.state())
    config = CrossLm.model_validate(
        {"mode": mode, "batch_size": 4, "learning_rate": 0.3, "kl_ceiling": low_ceiling}
    )
    lesson = teach(llm, config, exercises_of(llm, 8), torch.ones(8), np.random.default_rng(0))
    if mode == "stable":
        assert lesson.undone is not None
        assert "ceiling" in lesson.undone
        assert lesson.kl is None
        assert fingerprint(llm.state()) == before
    else:
        assert lesson.undone is None
        assert lesson.kl is not None
        assert lesson.kl > low_ceiling
        assert fingerprint(llm.state()) != before


def test_the_last_step_is_looked_at_too(tiny_llm: Path, low_ceiling: float) -> None:
    llm = LanguageModel(str(tiny_llm), rank=4, seed=3)
    before = fingerprint(llm.state())
    # One step, whose own losses are those before it.
    config = CrossLm(batch_size=8, learning_rate=0.3, kl_ceiling=low_ceiling)
    lesson = teach(llm, config, exercises_of(llm, 8), torch.ones(8), np.random.default_rng(0))
    assert len(lesson.losses) == 1
    assert lesson.undone is not None
    assert fingerprint(llm.state()) == before


@pytest.mark.parametrize("mode", ["paper", "stable"])
def test_nan_puts_the_adapter_back(llm: LanguageModel, mode: str) -> None:
    before = fingerprint(llm.state())
    config = CrossLm.model_validate({"mode": mode, "batch_size": 4})
    gains = torch.tensor([0.5, 0.5, 0.5, math.nan, 0.5, 0.5, 0.5])
    lesson = teach(llm, config, exercises_of(llm), gains, np.random.default_rng(0))
    assert lesson.undone is not None
    assert "NaN" in lesson.undone
    assert fingerprint(llm.state()) == before


# --- an arrival


def test_an_arrival_trains_both_and_reports(make: Make, slm: Slm, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make()
    learned: list[int] = []

    def counted(llm: LanguageModel, config: CrossLm, exercises: list[Exercise], *rest: Any) -> Any:
        learned.append(len(exercises))
        return teach(llm, config, exercises, *rest)

    monkeypatch.setattr(crosslm_worker, "teach", counted)
    sent, adapter = fingerprint(slm.state()), fingerprint(worker.llm.state())
    seen: list[tuple[int, int]] = []
    arrival = worker.arrival(slm, "silo-1", lambda done, units: seen.append((done, units)))
    report = arrival.report
    assert fingerprint(slm.state()) == sent
    assert fingerprint(worker.llm.state()) != adapter
    assert arrival.candidate is not None
    assert fingerprint(arrival.candidate) != sent
    slm.load_state(arrival.candidate)
    assert seen == sorted(seen)
    assert seen[-1] == (160, 160)  # 32 texts written, read, learned from, and 32 more written and read
    assert json.loads(json.dumps(report)) == report
    usable = len(arrival.samples)
    assert report["silo"] == "silo-1"
    assert report["generated"] == 32
    assert report["dropped"] == 32 - usable
    assert 0 < report["kept"] <= max(1, round(0.25 * usable))
    assert sum(row["usable"] for row in report["per_class"].values()) == usable
    assert sum(row["kept"] for row in report["per_class"].values()) == report["kept"]
    assert len(report["losses"]) == math.ceil(learned[0] / 6)
    assert report["kl"] > 0
    assert report["note"] is None
    assert worker.kl == [report["kl"]]
    assert len(worker.samples) == min(20, usable)
    assert set(worker.samples[0]) == {"silo", "label", "text", "reward", "kept"}
    assert all(row["reward"] > 0 for row in worker.samples if row["kept"])
    texts = [sample.text for sample in arrival.samples]
    assert report["self_bleu"] == pytest.approx(self_bleu(texts, np.random.default_rng(0)))
    lengths = [len(text.split()) for text in texts]
    assert report["mean_words"] == pytest.approx(np.mean(lengths))
    assert min(lengths) <= report["words_5"] <= report["words_95"] <= max(lengths)
    row = ArrivalRow(
        silo="silo-1", round=1, arrival=1, queued_behind=0, staleness=0, outcome="served", candidate=True,
        seconds=1.0, **figures(report),
    )  # fmt: skip
    assert (row.kl, row.self_bleu, row.mean_words) == tuple(
        report[name] for name in ("kl", "self_bleu", "mean_words")
    )
    assert sum(label.kept for label in row.per_label.values()) == report["kept"]


def test_the_same_seed_gives_the_same_arrivals_and_the_next_one_other_texts(
    make: Make, tiny_encoder: Path
) -> None:
    def run(seed: int) -> list[Any]:
        worker = make(seed=seed)
        arrivals = [worker.arrival(make_slm(tiny_encoder), name) for name in ("silo-1", "silo-2")]
        assert all(arrival.candidate is not None for arrival in arrivals)
        texts = [[(s.text, s.label) for s in arrival.samples] for arrival in arrivals]
        return [
            texts,
            *(fingerprint(arrival.candidate or {}) for arrival in arrivals),
            fingerprint(worker.llm.state()),
        ]

    first = run(1)
    assert run(1) == first
    assert run(2)[0] != first[0]
    assert first[0][0] != first[0][1]


def test_datafree_kd_leaves_the_language_model_alone(make: Make, slm: Slm) -> None:
    worker = make(train_llm=False)
    adapter = fingerprint(worker.llm.state())
    arrival = worker.arrival(slm, "silo-1")
    assert arrival.candidate is not None
    assert fingerprint(worker.llm.state()) == adapter
    assert worker.kl == []
    assert arrival.report["losses"] == []


def test_paper_mode_keeps_a_quarter_of_all(make: Make, slm: Slm) -> None:
    arrival = make(mode="paper").arrival(slm, "silo-1")
    assert arrival.report["kept"] == round(0.25 * len(arrival.samples))
    assert arrival.candidate is not None


def test_without_a_good_text_there_is_no_candidate(make: Make, tiny_encoder: Path) -> None:
    slm = load_slm(str(tiny_encoder), LABELS, max_length=16, train_embeddings=False, seed=0)
    state = slm.state()
    for name in state:
        if "classifier" in name:
            state[name][:] = 0.0
    slm.load_state(state)  # every probability is 1/2, so every reward is 0
    arrival = make().arrival(slm, "silo-1")
    assert arrival.candidate is None
    assert arrival.report["kept"] == 0
    assert "no text was kept" in arrival.report["note"]


def test_a_model_that_overflows_teaches_nothing(make: Make, slm: Slm) -> None:
    worker = make()
    adapter = fingerprint(worker.llm.state())
    with torch.no_grad():  # `load_state` would refuse such values
        for name, parameter in slm.model.named_parameters():
            if name in slm.state():
                parameter.fill_(3e38)
    arrival = worker.arrival(slm, "silo-1")
    assert arrival.candidate is None
    assert "not finite" in arrival.report["note"]
    assert fingerprint(worker.llm.state()) == adapter


def test_an_undone_lesson_is_said_and_the_small_model_still_trained(
    make: Make, slm: Slm, low_ceiling: float
) -> None:
    worker = make(learning_rate=0.3, kl_ceiling=low_ceiling)
    adapter = fingerprint(worker.llm.state())
    arrival = worker.arrival(slm, "silo-1")
    assert "put back" in arrival.report["note"]
    assert arrival.candidate is not None
    assert fingerprint(worker.llm.state()) == adapter
    assert worker.kl == []


def test_a_lesson_after_which_texts_are_alike_is_undone(
    make: Make, slm: Slm, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, early = make(), make(regenerate=False)
    worker.arrival(slm, "silo-1")
    early.arrival(slm, "silo-1")  # the same lesson
    before = [fingerprint(state()) for state in (worker.llm.state, worker.llm.optimizer_state)]
    monkeypatch.setattr(crosslm_worker, "self_bleu", lambda *_, said=iter((0.2, 0.36)): next(said))
    arrival, expected = worker.arrival(slm, "silo-1"), early.arrival(slm, "silo-1")
    assert "from a self-BLEU of 0.20 to 0.36; the weights were put back" in arrival.report["note"]
    after = [fingerprint(state()) for state in (worker.llm.state, worker.llm.optimizer_state)]
    assert after == before
    assert arrival.report["kl"] is None
    assert len(worker.kl) == 1
    # The small model learned from what was written before the lesson.
    assert [s.text for s in arrival.samples] == [s.text for s in expected.samples]
    assert arrival.candidate is not None
    assert fingerprint(arrival.candidate) == fingerprint(expected.candidate or {})
    monkeypatch.setattr(crosslm_worker, "self_bleu", lambda *_, said=iter((0.2, 0.34)): next(said))
    assert worker.arrival(slm, "silo-1").report["note"] is None
    assert [fingerprint(worker.llm.state()), fingerprint(worker.llm.optimizer_state())] != before


def test_texts_grow_alike_by_as_many_of_each(make: Make) -> None:
    def batch(texts: list[str]) -> _Batch:
        samples = tuple(Sample(text, 0, Written(text, (7,), torch.zeros(1))) for text in texts)
        labels = torch.zeros(len(texts), dtype=torch.int64)
        return _Batch(samples, 0, labels, torch.full((len(texts), 2), 0.5), ("silo-1",))

    worker = make()
    varied = [" ".join(f"w{i * 9 + j}" for j in range(9)) for i in range(32)]
    alike = [f"today the world is a very good place for number {i}" for i in range(32)]
    why = worker._grown_alike(batch(varied), batch(alike), 1)
    assert why is not None
    assert "self-BLEU of 0.00 to 0." in why
    assert worker._grown_alike(batch(alike), batch(varied), 1) is None
    assert worker._grown_alike(batch(varied), batch(alike[:8]), 1) is not None
    assert worker._grown_alike(batch(varied), batch(alike[:7]), 1) is None, "too few to tell"
    # From one source: the more texts, the more alike they are.
    rng = np.random.default_rng(0)
    drawn = [" ".join(f"w{k}" for k in rng.integers(0, 12, 6)) for _ in range(64)]
    few, many = (self_bleu(texts, rng) for texts in (drawn[:8], drawn))
    assert few is not None
    assert many is not None
    assert many - few > 0.15
    assert worker._grown_alike(batch(drawn[:8]), batch(drawn), 1) is None


def test_labels_are_dealt_out_evenly_in_stable_mode(make: Make) -> None:
    labels = ("a", "b", "c")
    dealt = make(labels).task._draw_labels(11, 5)
    assert sorted(Counter(dealt).values()) == [3, 4, 4]
    drawn = make(labels, mode="paper").task._draw_labels(3000, 5)
    # Uniform draws: 1000 each with a standard deviation of 25.8; five of them, and not dealt out.
    assert all(abs(drawn.count(label) - 1000) < 129 for label in range(3))
    assert drawn != sorted(drawn)


def test_short_and_repeated_texts_are_dropped_in_stable_mode(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["one two three four", "One two three FOUR", "one two", "", "five six seven eight"]
    written = [Written(text, (7,) if text else (), torch.zeros(1)) for text in texts]
    for mode, expected in (("stable", [0, 4]), ("paper", [0, 1, 2, 4])):
        worker = make(mode=mode)
        monkeypatch.setattr(worker.llm, "write", lambda *_, **__: written)
        samples, dropped = worker.task.synthesise(5, seed=0)
        assert [sample.text for sample in samples] == [texts[i] for i in expected]
        assert dropped == 5 - len(expected)


def test_prompts_and_verbalisers_come_from_the_configuration(make: Make, slm: Slm) -> None:
    worker = make(prompts={"b": "This is bad: "}, verbalisers={"a": "good"})
    assert worker.task._prompts == ["Here is a text about good:", "This is bad: "]
    other = make(prompt="Write of {label}, please", reading="All of this is {label} news")
    assert other.task._prompts == ["Write of a, please", "Write of b, please"]
    assert other.llm.tokenizer.decode(other.task._sentences[1]) == "\nAll of this is b news"
    assert [worker.llm.tokenizer.decode(answer) for answer in worker.task._answers] == [" good", " b"]
    assert worker.llm.tokenizer.decode(worker.task._sentences[0]) == "\nThis text is about good."
    for changes in (
        {"prompts": {"c": "x"}},
        {"verbalisers": {"c": "x"}},
        {"verbalisers": {"a": "0"}},
        {"prompts": {"a": "  "}},
    ):
        with pytest.raises(ConfigError):
            make(**changes)


def test_a_model_with_other_labels_is_refused(make: Make, tiny_encoder: Path) -> None:
    with pytest.raises(ModelError, match="silo-1"):
        make().arrival(make_slm(tiny_encoder, ("a", "c")), "silo-1")


def opposite(slm: Slm) -> dict[str, Any]:
    """Tensors of a model that of two labels says the other one."""
    state = slm.state()
    name = next(n for n in state if n.endswith("classifier.weight"))
    return {**state, name: -state[name]}


def test_graders_are_the_last_models_of_all_silos(make: Make, slm: Slm, tiny_encoder: Path) -> None:
    texts = ["the team won", "x", "of the people"]
    labels = torch.tensor([0, 1, 0])
    worker = make(prior="none")
    own = torch.from_numpy(probabilities(slm, texts))
    torch.testing.assert_close(worker._grades(slm, "silo-1", texts, labels)[0], own)
    worker.arrival(slm, "silo-1")
    other = make_slm(tiny_encoder)
    other.load_state(opposite(other))
    both, names = worker._grades(other, "silo-2", texts, labels)
    torch.testing.assert_close(both, torch.full((3, 2), 0.5))  # what one says the other denies
    assert names == ("silo-2", "silo-1")
    # A silo's new model takes the place of its last one; and the one that is held is not touched.
    torch.testing.assert_close(worker._grades(slm, "silo-1", texts, labels)[0], own)
    alone = make(graders="own", prior="none")
    alone.arrival(slm, "silo-1")
    torch.testing.assert_close(alone._grades(other, "silo-2", texts, labels)[0], 1 - own)


def test_a_head_in_another_order_is_the_same_model(make: Make, slm: Slm, tiny_encoder: Path) -> None:
    turned = make_slm(tiny_encoder, ("b", "a"))
    state = slm.state()
    turned.load_state({n: v[::-1].copy() if "classifier" in n else v for n, v in state.items()})
    first, second = (make(graders="own").arrival(model, "silo-1") for model in (slm, turned))
    assert first.report["mean_reward"] == pytest.approx(second.report["mean_reward"], abs=1e-6)
    assert [row["kept"] for row in first.report["samples"]] == [
        row["kept"] for row in second.report["samples"]
    ]
    assert first.candidate is not None
    assert second.candidate is not None
    for name, array in first.candidate.items():
        other = second.candidate[name]
        np.testing.assert_allclose(array, other[::-1] if "classifier" in name else other, atol=2e-4)


def test_a_silo_of_one_label_grades_by_what_differs(make: Make, slm: Slm) -> None:
    """A head with a large bias for one label gives every text that label, and knows the other one still."""
    state = slm.state()
    name = next(n for n in state if n.endswith("classifier.bias"))
    skewed = make_slm(Path(slm.name))
    skewed.load_state({**state, name: state[name] + np.array([9.0, -9.0], np.float32)})
    kept = {
        prior: make(prior=prior, keep=1.0).arrival(skewed, "silo-1").report for prior in ("none", "estimated")
    }
    assert kept["none"]["per_class"]["b"]["kept"] == 0
    assert kept["estimated"]["per_class"]["b"]["kept"] > 0
    plain = make(keep=1.0).arrival(slm, "silo-1").report
    for row, same in zip(kept["estimated"]["samples"], plain["samples"], strict=True):
        assert row == {**same, "reward": pytest.approx(same["reward"], abs=1e-3)}


def test_a_label_without_texts_is_said_or_ends_the_run(
    make: Make, slm: Slm, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written("one two three four", (7, 8), torch.zeros(2))
    nothing = Written("", (), torch.zeros(0))

    def write(prompts: list[str], **_: Any) -> list[Written]:
        return [written if prompt.endswith("a:") else nothing for prompt in prompts]

    for policy in ("go-on", "stop"):
        worker = make(unusable=policy)
        monkeypatch.setattr(worker.llm, "write", write)
        if policy == "stop":
            with pytest.raises(ModelError, match="nothing usable for b"):
                worker.arrival(slm, "silo-1")
        else:
            report = worker.arrival(slm, "silo-1").report
            assert "nothing usable for b; change crosslm.prompts" in report["note"]
            nothing_of_it = {"usable": 0, "kept": 0, "usable_share": 0.0, "kept_share": 0.0}
            assert report["per_class"]["b"] == nothing_of_it


def test_switches_change_what_they_name(make: Make, tiny_encoder: Path) -> None:
    plain = make(keep=0.5).arrival(make_slm(tiny_encoder), "silo-1")
    for changes in ({"diversity": False}, {"baseline": False}, {"regenerate": False}, {"targets": "graders"}):
        other = make(keep=0.5, **changes).arrival(make_slm(tiny_encoder), "silo-1")
        assert fingerprint(other.candidate or {}) != fingerprint(plain.candidate or {}), changes
    # Texts written before the language model learned are what data-free KD learns from.
    early = make(regenerate=False).arrival(make_slm(tiny_encoder), "silo-1")
    never = make(train_llm=False).arrival(make_slm(tiny_encoder), "silo-1")
    assert fingerprint(early.candidate or {}) == fingerprint(never.candidate or {})


# --- evaluation


def test_calibration_takes_out_what_is_likely_after_anything(make: Make) -> None:
    worker = make(verbalisers={"a": "the", "b": "zoology"})
    nothing = worker.task.label_probabilities(("N/A", "...", "[MASK]"))
    texts = ["this is a good day for the team", "x"]
    plain, fair = (worker.task.label_probabilities(texts, calibrated=c) for c in (False, True))
    share = np.exp(np.log(nothing).mean(0))
    expected = plain / share
    assert fair == pytest.approx(expected / expected.sum(1, keepdims=True), rel=1e-4)


def test_understanding_is_equation_1(make: Make) -> None:
    worker = make(verbalisers={"a": "people", "b": "the world"})
    shift(worker.llm)
    texts = ["this is a good day for the team", "x", "said " * 60]
    found = worker.task.label_probabilities(texts)
    llm = worker.llm
    expected = []
    with torch.no_grad():
        for text in texts:
            row = llm.encode(text)[:64] + llm.encode_inner("\nThis text is about")
            sums = []
            for word in ("people", "the world"):
                answer = llm.encode_inner(f" {word}")
                sums.append(float(log_probs_of(llm, row + answer)[-len(answer) :].sum()))
            expected.append(torch.tensor(sums).softmax(0).numpy())
    assert found == pytest.approx(np.array(expected), abs=1e-4)
    best = found.argmax(1)
    assert worker.task.nlu_accuracy(texts, best) == 1.0
    assert worker.task.nlu_accuracy(texts, [best[0], best[1], 1 - best[2]]) == pytest.approx(2 / 3)


def test_generation_accuracy_is_the_mean_over_judges(make: Make, slm: Slm, tiny_encoder: Path) -> None:
    worker = make()
    other = make_slm(tiny_encoder)
    state = other.state()
    name = next(n for n in state if n.endswith("classifier.weight"))
    other.load_state({**state, name: -state[name]})  # of two labels it says the other one
    samples = [
        Sample(text, i % 2, Written(text, (7,), torch.zeros(1)))
        for i, text in enumerate(["the team won", "x", "of"])
    ]
    right = [probabilities(slm, [sample.text])[0].argmax() == sample.label for sample in samples]
    assert worker.task.nlg_accuracy([slm], samples) == pytest.approx(sum(right) / 3)
    assert worker.task.nlg_accuracy([slm, other], samples) == pytest.approx(0.5)
    assert worker.task.nlg_accuracy([slm]) == worker.task.nlg_accuracy([slm])
    assert math.isnan(worker.task.nlg_accuracy([]))


@pytest.mark.real
def test_the_real_models_teach_each_other(smollm2: str, minilm: str) -> None:
    labels = ("business", "sports")
    config = CrossLm(
        llm=smollm2, synthetic=8, max_new_tokens=12, keep=0.5, batch_size=8, lora_rank=4,
        prompts={label: f"The {label} news of today, in one sentence: " for label in labels},
    )  # fmt: skip
    worker = CrossLmWorker(config, labels, seed=1, encoder=minilm)
    slm = load_slm(minilm, labels, max_length=24, train_embeddings=False, seed=0)
    arrival = worker.arrival(slm, "silo-1")
    assert len(arrival.samples) >= 6
    assert arrival.report["note"] is None
    assert 0 < arrival.report["kl"] < 0.1
    texts = [
        "Shares in the bank fell after it reported lower profits.",
        "The striker scored twice as his team won the cup.",
    ]
    assert worker.task.nlu_accuracy(texts, [0, 1]) == 1.0
    backwards = [" ".join(reversed(text.split())) for text in texts]
    assert 3 * worker.task.perplexity(texts) < worker.task.perplexity(backwards)
