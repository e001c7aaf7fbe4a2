"""Attack 10, zero-shot: a language model that knows nothing finds a text by a black box's answers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from attacks import zero_shot
from attacks.adversary import NotEnough
from attacks.membership import Vectors
from attacks.zero_shot import Box, Effort, Found, Proposer, acquainted, best_scores, search, text_scores
from securefl.errors import SecureflError
from securefl.models import load_llm
from tests import tiny

# Of letters, as the byte-level model writes them: what the text is, without knowing a word.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SECRETS = ("fog at sea", "blue jazz", "seven hymns")
WIDE = Effort(beams=6, proposals=150, steps=14, top_p=1.0, weight=0.0)


def encode(texts: Sequence[str]) -> Vectors:
    """Letters counted, and a little of where they stand."""
    rows = np.zeros((len(texts), 2 * len(LETTERS)))
    for row, text in zip(rows, texts, strict=True):
        for place, letter in enumerate(text.lower()):
            at = LETTERS.find(letter)
            if at >= 0:
                row[at] += 1
                row[len(LETTERS) + at] += 0.1 * place
    return rows


@pytest.fixture(scope="module")
def proposer(tmp_path_factory: pytest.TempPathFactory) -> Proposer:
    return Proposer(*load_llm(str(tiny.make_llm(tmp_path_factory.mktemp("llm") / "tiny"))))


@pytest.fixture(scope="module")
def found(proposer: Proposer) -> list[Found]:
    rng = np.random.default_rng(0)
    box = Box(encode, proposer)
    return [search(box, vector, rng, effort=WIDE) for vector in encode(SECRETS)]


def letters_f1(guess: str, truth: str) -> float:
    hits = sum(min(guess.lower().count(letter), truth.count(letter)) for letter in LETTERS)
    return 2 * hits / sum(sum(text.lower().count(letter) for letter in LETTERS) for text in (guess, truth))


def test_a_text_is_found_by_the_answers_alone(found: list[Found]) -> None:
    for one, secret in zip(found, SECRETS, strict=True):
        assert one.cosines[0] > 0.9
        assert letters_f1(one.texts[0], secret) > 0.6
        assert list(one.cosines) == sorted(one.cosines, reverse=True)
        assert len(set(one.texts)) == len(one.texts)


def test_shuffled_truth_falls_to_another_text(found: list[Found]) -> None:
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    mixed = np.mean([letters_f1(found[i].texts[0], SECRETS[j]) for i, j in pairs])
    chance = np.mean([letters_f1(SECRETS[i], SECRETS[j]) for i, j in pairs])
    assert abs(mixed - chance) < 0.15


def test_the_cosines_are_those_of_the_texts(found: list[Found]) -> None:
    for one, secret in zip(found, SECRETS, strict=True):
        aim = encode([secret])[0]
        vectors = encode(one.texts)
        expected = vectors @ aim / np.linalg.norm(vectors, axis=1) / np.linalg.norm(aim)
        np.testing.assert_allclose(one.cosines, expected, atol=1e-12)


def test_the_same_seed_finds_the_same_and_a_cache_is_a_whole_text(proposer: Proposer) -> None:
    aim, small = encode(["a sea"])[0], Effort(beams=3, proposals=20, steps=6)
    first, second = (
        search(Box(encode, proposer), aim, np.random.default_rng(1), effort=small) for _ in range(2)
    )
    assert first == second


def test_going_on_is_reading_the_whole(proposer: Proposer) -> None:
    with torch.inference_mode():
        log_probs, cache = proposer.begin()
        order = log_probs[0].argsort(descending=True)[:3].tolist()
        stepwise = proposer.go_on(order, [0, 0, 0], cache)
        again = proposer.go_on([order[1], order[0]], [2, 0], cache)
        model = proposer._model
        for row, ids in zip([*stepwise, *again], [[0], [1], [2], [2, 1], [0, 0]], strict=True):
            whole = torch.tensor([[*proposer._head, *(order[i] for i in ids)]])
            logits = model(input_ids=whole).logits[0, -1].index_fill(0, proposer._stops, -torch.inf)
            torch.testing.assert_close(row, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_texts_about_anything_are_drawn_from_the_model(proposer: Proposer) -> None:
    texts = proposer.write(40, 5, np.random.default_rng(4))
    assert len(texts) == 40
    assert len(set(texts)) > 30
    assert proposer.write(40, 5, np.random.default_rng(4)) == texts
    assert all("\n" not in text for text in texts)


def test_a_nucleus_keeps_its_number_and_its_mass() -> None:
    rng = np.random.default_rng(2)
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log()
    assert set(zero_shot._nucleus(log_probs, 5, 0.7, rng)) == {0, 1}
    assert set(zero_shot._nucleus(log_probs, 9, 1.0, rng)) == {0, 1, 2, 3}
    first = [zero_shot._nucleus(log_probs, 1, 1.0, rng)[0] for _ in range(2000)]
    assert np.mean(np.array(first) == 0) == pytest.approx(0.5, abs=0.04)


def test_texts_are_scored_by_the_libraries() -> None:
    scores = text_scores(["the cat sat here", "nothing"], ["the cat sat there", "of the kind"])
    # The longest common subsequence has 3 of 4 words on both sides.
    assert scores.rouge_l.tolist() == pytest.approx([0.75, 0.0])
    assert 0.4 < scores.bleu[0] < 0.8
    assert scores.bleu[1] < 0.05
    assert text_scores(["same old text"], ["same old text"]).bleu[0] == pytest.approx(1)
    with pytest.raises(NotEnough):
        text_scores([], [])
    with pytest.raises(SecureflError, match="1 texts to compare with 2"):
        text_scores(["a"], ["a", "b"])


def test_bad_targets_answers_and_efforts_are_refused(proposer: Proposer) -> None:
    rng, aim = np.random.default_rng(3), encode(["a sea"])[0]
    for bad in (np.full_like(aim, np.nan), np.zeros_like(aim), aim[None]):
        with pytest.raises(SecureflError, match="would mean nothing"):
            search(Box(encode, proposer), bad, rng)
    for answer in (np.full(len(aim), np.inf), aim[:-1]):
        with pytest.raises(SecureflError, match="the encoder gives something else"):
            search(Box(lambda texts, a=answer: np.repeat(a[None], len(texts), 0), proposer), aim, rng)
    for wrong in ({"beams": 0}, {"steps": 0}, {"looked_at": 0}, {"top_p": 0.0}, {"weight": -1.0}):
        with pytest.raises(SecureflError, match="beam search"):
            Effort(**wrong)
    with pytest.raises(SecureflError, match="would mean nothing"):
        zero_shot.centre_of(np.ones((4, 3)))


def test_a_model_without_a_beginning_needs_a_prompt(tmp_path: Path) -> None:
    model, tokenizer = load_llm(str(tiny.make_llm(tmp_path / "tiny")))
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(SecureflError, match="give a prompt"):
        Proposer(model, tokenizer)
    assert search(
        Box(encode, Proposer(model, tokenizer, "a text:")), encode(["sea"])[0], np.random.default_rng(0),
        effort=Effort(beams=2, proposals=20, steps=3),
    ).texts  # fmt: skip


def test_of_several_texts_the_best_matching_one_counts() -> None:
    found = best_scores(["a b c d", "x"], [["a y", "a b c", "z"], ["w"]])
    # Three of four words in order, all three of the text's: 2 (3/4) 1 / (3/4 + 1).
    assert found.rouge_l.tolist() == pytest.approx([6 / 7, 0])
    assert found.bleu[0] == text_scores(["a b c d"], ["a b c"]).bleu[0] > found.bleu[1]


def test_a_box_sees_cosines_from_the_mean_of_what_the_model_writes(proposer: Proposer) -> None:
    box = acquainted(encode, proposer, np.random.default_rng(3), texts=16, tokens=5)
    centre = encode(proposer.write(16, 5, np.random.default_rng(3))).mean(0)
    aim = encode(["a sea"])[0] - centre
    np.testing.assert_allclose(box.aim(encode(["a sea"])[0]), aim / np.linalg.norm(aim))
