"""CrossLM's mathematics against values derived by hand on a vocabulary of two tokens.

Probabilities are written as fractions; a logit is the logarithm of one (plus any constant).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from securefl.methods import crosslm

LN2, LN3 = math.log(2), math.log(3)
JUNK = -7.0  # what stands at masked positions; it must not count


def F(text: str) -> float:
    return float(Fraction(text))


def logs(*rows: list[str]) -> Tensor:
    """Rows of probabilities as logs, padded with junk, and nothing else."""
    longest = max(map(len, rows))
    return torch.tensor(
        [[math.log(F(p)) for p in row] + [JUNK] * (longest - len(row)) for row in rows], dtype=torch.float64
    )


def mask(*lengths: int) -> Tensor:
    longest = max(lengths)
    return torch.tensor([[1.0] * k + [0.0] * (longest - k) for k in lengths], dtype=torch.float64)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rewards() -> None:
    # r = 2 p - 1: 2 * 3/4 - 1 = 1/2; 2 * 1/4 - 1 = -1/2; 2 * 1 - 1 = 1.
    probabilities = torch.tensor([[3 / 4, 1 / 4], [3 / 4, 1 / 4], [0.0, 1.0]])
    assert crosslm.rewards(probabilities, torch.tensor([0, 1, 1])).tolist() == [0.5, -0.5, 1.0]


def test_token_log_probs_do_not_depend_on_the_constant_in_the_logits() -> None:
    logits = torch.tensor([[[F("3/4"), F("1/4")], [F("1/3"), F("2/3")]]], dtype=torch.float64).log()
    found = crosslm.token_log_probs(logits + 5.0, torch.tensor([[1, 0]]))
    assert found.tolist() == [[pytest.approx(math.log(1 / 4)), pytest.approx(math.log(1 / 3))]]


def test_generation_loss_of_the_paper() -> None:
    # Text 1, r = 1/2: p_theta = 3/4 * 1/2 * 2/3 = 1/4 and p_old = 1/2 * 1/2 * 1/3 = 1/12, so the term is
    # -1/2 ln 3. Text 2, r = -1/2, one token: 1/4 against 1/2, so +1/2 ln(1/2) = -1/2 ln 2.
    # Mean of the two: -1/4 (ln 3 + ln 2).
    log_p = logs(["3/4", "1/2", "2/3"], ["1/4"]).requires_grad_()
    log_old = logs(["1/2", "1/2", "1/3"], ["1/2"])
    loss = crosslm.generation_loss(log_p, log_old, mask(3, 1), vector(0.5, -0.5))
    assert loss.item() == pytest.approx(-(LN3 + LN2) / 4)
    torch.autograd.backward(loss)
    # d/d log p = -r / B at real tokens: -1/4 and +1/4; nothing at padding.
    assert log_p.grad is not None
    assert log_p.grad.tolist() == [[-0.25, -0.25, -0.25], [0.25, 0.0, 0.0]]


def test_clipped_generation_loss() -> None:
    # Clip 1/5. Text 1, A = 1: ratios (3/4)/(1/2) = 3/2, clipped to 6/5, and (1/2)/(1/2) = 1; mean 11/10.
    # Text 2, A = -1/2: ratio (1/4)/(1/2) = 1/2; min(-1/4, -1/2 * 4/5) = -2/5.
    # The loss is minus half of 11/10 - 2/5.
    log_p = logs(["3/4", "1/2"], ["1/4"]).requires_grad_()
    sampled = logs(["1/2", "1/2"], ["1/2"])
    loss = crosslm.clipped_generation_loss(log_p, sampled, mask(2, 1), vector(1.0, -0.5), clip=0.2)
    assert loss.item() == pytest.approx(-7 / 20)
    torch.autograd.backward(loss)
    # Clipped tokens have no gradient left; the other: -(rho A) / (2 tokens * 2 texts) = -1/4.
    assert log_p.grad is not None
    assert log_p.grad.flatten().tolist() == pytest.approx([0.0, -0.25, 0.0, 0.0])


def test_clipping_does_not_stop_the_way_back() -> None:
    # A = 1 and ratio (1/4)/(1/2) = 1/2: min(1/2, 4/5) = 1/2 is not clipped, so the token can recover.
    log_p = logs(["1/4"]).requires_grad_()
    torch.autograd.backward(
        crosslm.clipped_generation_loss(log_p, logs(["1/2"]), mask(1), vector(1.0), clip=0.2)
    )
    assert log_p.grad is not None
    assert log_p.grad.tolist() == [[pytest.approx(-0.5)]]


def test_baseline_is_the_mean_of_the_same_label() -> None:
    # Label 0: mean of 1 and 0 is 1/2; label 1 has one text.
    found = crosslm.baseline(vector(1.0, 0.0, -1.0), torch.tensor([0, 0, 1]))
    assert found.tolist() == [0.5, -0.5, 0.0]


def test_understanding_loss() -> None:
    # Text 1: -ln(1/2 * 1/4) = 3 ln 2 over 2 tokens; text 2: ln 3 over 1.
    log_p = logs(["1/2", "1/4"], ["1/3"])
    whole = crosslm.understanding_loss(log_p, mask(2, 1), per_token=False)
    assert whole.item() == pytest.approx((3 * LN2 + LN3) / 2)
    mean = crosslm.understanding_loss(log_p, mask(2, 1), per_token=True)
    assert mean.item() == pytest.approx((1.5 * LN2 + LN3) / 2)


def test_divergence_over_the_whole_vocabulary() -> None:
    # Position 1: KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 ln(3/2) + 1/4 ln(1/2) = 3/4 ln 3 - ln 2.
    # Position 2: KL((1/2, 1/2) || (1/4, 3/4)) = 1/2 ln 2 + 1/2 ln(2/3) = ln 2 - 1/2 ln 3.
    # Text 2 has position 1 alone, KL((1/2, 1/2) || (1/4, 3/4)).
    now = torch.tensor([[[3 / 4, 1 / 4], [1 / 2, 1 / 2]], [[1 / 2, 1 / 2], [0.9, 0.1]]]).log()
    old = torch.tensor([[[1 / 2, 1 / 2], [1 / 4, 3 / 4]], [[1 / 4, 3 / 4], [0.1, 0.9]]]).log()
    first, second = 0.75 * LN3 - LN2, LN2 - 0.5 * LN3
    real = mask(2, 1).float()
    found = crosslm.divergences(now, old, real)
    assert found.flatten().tolist() == pytest.approx([first, second, second, 0.0], abs=1e-6)
    summed = crosslm.divergence_loss(found, real, per_token=False)
    assert summed.item() == pytest.approx((first + second + second) / 2, abs=1e-6)
    mean = crosslm.divergence_loss(found, real, per_token=True)
    assert mean.item() == pytest.approx(((first + second) / 2 + second) / 2, abs=1e-6)


_logits = st.lists(st.floats(-30, 30, width=32), min_size=5, max_size=5)


@given(now=_logits, old=_logits)
@settings(deadline=None)
def test_divergence_is_never_negative_and_zero_for_equals(now: list[float], old: list[float]) -> None:
    a, b = (torch.tensor([[logits]]).log_softmax(-1) for logits in (now, old))
    shares, other = a.double().exp(), b.double().exp()
    found = crosslm.divergences(a, b, torch.ones(1, 1)).item()
    assert found >= 0.0
    # Pinsker: the divergence is at least half the squared distance of the shares, so 0 for equals alone.
    assert found >= 0.5 * float((shares - other).abs().sum()) ** 2 - 1e-5
    assert crosslm.divergences(a, a, torch.ones(1, 1)).item() == 0.0


def test_total() -> None:
    # 1 * 2 + 0.1 * 30 + 0.05 * 40 = 7
    parts = [torch.tensor(x) for x in (2.0, 30.0, 40.0)]
    assert crosslm.total_loss(parts[0], parts[1], parts[2], (1.0, 0.1, 0.05)).item() == pytest.approx(7.0)


def test_batched_and_padded_equals_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 1, 3]
    real = mask(*lengths)
    log_p, log_old = (-torch.rand(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    now, old = (
        torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    gain = vector(0.7, -0.4, 0.1)

    def same(function: Callable[..., Tensor], *tensors: Tensor, **options: bool) -> None:
        rows = [
            function(*(t[i : i + 1, :k] if t.ndim > 1 else t[i : i + 1] for t in tensors), **options)
            for i, k in enumerate(lengths)
        ]
        batched = function(*tensors, **options)
        assert batched.item() == pytest.approx(torch.stack(rows).mean().item())

    same(crosslm.generation_loss, log_p, log_old, real, gain)
    same(crosslm.clipped_generation_loss, log_p, log_old, real, gain)
    for per_token in (False, True):
        same(crosslm.understanding_loss, log_p, real, per_token=per_token)
        kl = crosslm.divergences(now, old, real)
        rows = [
            crosslm.divergences(now[i : i + 1, :k], old[i : i + 1, :k], real[i : i + 1, :k])
            for i, k in enumerate(lengths)
        ]
        parts = [
            crosslm.divergence_loss(row, torch.ones_like(row), per_token=per_token).item() for row in rows
        ]
        assert crosslm.divergence_loss(kl, real, per_token=per_token).item() == pytest.approx(sum(parts) / 3)


def test_diversity_and_score() -> None:
    # Cosines: (1,0).(0,1) = 0, (1,0).(3/5,4/5) = 3/5, (0,1).(3/5,4/5) = 4/5; lengths do not matter.
    vectors = torch.tensor([[2.0, 0.0], [0.0, 5.0], [3.0, 4.0]])
    assert crosslm.diversity(vectors).tolist() == pytest.approx([2 / 5, 1 / 5, 1 / 5])
    found = crosslm.scores(torch.tensor([0.5, 1.0, -1.0]), vectors)
    assert found.tolist() == pytest.approx([1 / 5, 1 / 5, -1 / 5])


def test_diversity_of_a_text_alone_and_of_twins() -> None:
    assert crosslm.diversity(torch.tensor([[3.0, 4.0]])).tolist() == [1.0]
    assert crosslm.diversity(torch.tensor([[3.0, 4.0], [6.0, 8.0]])).tolist() == pytest.approx(
        [0.0, 0.0], abs=1e-6
    )


def test_kept_count() -> None:
    assert [crosslm.kept_count(n, 0.25) for n in (64, 8, 2, 1, 0)] == [16, 2, 1, 1, 0]
    assert crosslm.kept_count(7, 1.0) == 7


def test_select_takes_the_highest_scores() -> None:
    score = torch.tensor([0.1, 0.9, -0.5, 0.9, 0.3, 0.0, 0.2, 0.4])
    assert crosslm.select(score, 0.25) == [1, 3]
    assert crosslm.select(score, 0.5) == [1, 3, 7, 4]


def test_the_papers_choice_may_take_bad_texts_and_the_stable_one_not() -> None:
    reward = torch.tensor([-0.9, -0.2, -0.5, 0.1])
    diversity = torch.tensor([0.01, 0.9, 0.5, 0.5])
    score = reward * diversity
    # -0.009 beats -0.18: the worst and least diverse text comes second.
    assert crosslm.select(score, 0.5) == [3, 0]
    assert crosslm.select_balanced(score, reward > 0, torch.zeros(4).long(), torch.eye(4), 0.5, 1) == [3]


def test_select_balanced_shares_the_places() -> None:
    # 5 of 10 places for 2 labels: at most 3 each, and label 1 has only 2 good texts.
    score = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, -0.1, -0.2, 0.2])
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 0])
    assert crosslm.select_balanced(score, score > 0, labels, torch.eye(10), 0.5, 2) == [0, 5, 1, 6, 2]
    # 4 places: 2 each. Where label 1 has nothing, its places stay empty.
    assert crosslm.select_balanced(score, score > 0, labels, torch.eye(10), 0.4, 2) == [0, 5, 1, 6]
    assert crosslm.select_balanced(score, score > 0, labels * 0, torch.eye(10), 0.4, 2) == [0, 1]


def test_select_balanced_keeps_the_best_of_twins() -> None:
    score = torch.tensor([0.2, 0.5, 0.4])
    vectors = torch.tensor([[1.0, 0.0], [2.0, 0.001], [0.0, 1.0]])
    assert crosslm.select_balanced(score, score > 0, torch.zeros(3).long(), vectors, 1.0, 1) == [1, 2]


def test_select_balanced_keeps_nothing_where_no_reward_is_positive() -> None:
    zero = torch.zeros(3)
    assert crosslm.select_balanced(zero, zero > 0, torch.zeros(3).long(), torch.eye(3), 1.0, 1) == []


def test_nucleus_sampling_has_the_renormalised_shares() -> None:
    # Shares 1/2, 1/4, 1/8, 1/8 and a nucleus of 0.7: 1/2 does not reach it, 3/4 does. So 2/3 and 1/3.
    logits = torch.tensor([[1 / 8, 1 / 2, 1 / 8, 1 / 4]]).log().repeat(9000, 1)
    drawn = crosslm.nucleus_sample(logits, 0.7, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=4).tolist()
    assert counts[0] == counts[2] == 0
    # Standard deviation sqrt(9000 * 2/9) = 44.7; five of them.
    assert abs(counts[1] - 6000) < 224


def test_nucleus_sampling_agrees_with_transformers_where_the_nucleus_is_wide() -> None:
    logits = 0.5 * torch.randn(1, 1500, generator=torch.Generator().manual_seed(1))
    allowed = TopPLogitsWarper(0.9)(None, logits).isfinite()[0]
    drawn = crosslm.nucleus_sample(logits.repeat(8000, 1), 0.9, torch.Generator().manual_seed(2))
    assert bool(allowed[drawn].all())
    assert len(set(drawn.tolist())) > 0.95 * int(allowed.sum()) > 600


def test_nucleus_sampling_repeats_with_the_seed_and_can_be_whole() -> None:
    logits = torch.randn(50, 700, generator=torch.Generator().manual_seed(1))
    first, again = (crosslm.nucleus_sample(logits, 0.95, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.equal(again)
    drawn = crosslm.nucleus_sample(torch.zeros(4000, 600), 1.0, torch.Generator().manual_seed(3))
    assert len(set(drawn.tolist())) > 590


def test_distinct() -> None:
    # Words: a b a a b, 2 of 5 differ. Pairs: ab ba | ab, 2 of 3 differ.
    texts = [["a", "b", "a"], ["a", "b"]]
    assert crosslm.distinct(texts, 1) == pytest.approx(2 / 5)
    assert crosslm.distinct(texts, 2) == pytest.approx(2 / 3)
    assert crosslm.distinct([["a"]], 2) == 0.0


def test_diversity_in_parts_is_diversity_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(23, 5, generator=torch.Generator().manual_seed(0))
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    naive = [1 - max(float(unit[j] @ unit[k]) for k in range(23) if k != j) for j in range(23)]
    for rows in (1, 7, 23, 512):
        monkeypatch.setattr(crosslm, "_ROWS", rows)
        assert crosslm.diversity(vectors).tolist() == pytest.approx(naive, abs=1e-6)


def test_a_text_that_graders_know_is_good_with_many_labels_too() -> None:
    two = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]])
    labels = torch.tensor([0, 0, 0])
    reward, good = crosslm.above_chance(two, labels)
    assert reward.tolist() == crosslm.rewards(two, labels).tolist() == [0.5, -0.5, 0.0]
    assert good.tolist() == [True, False, False]
    five = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1], [0.3, 0.4, 0.1, 0.1, 0.1], [0.2] * 5])
    reward, good = crosslm.above_chance(five, labels)
    assert reward.tolist() == pytest.approx([0.25, 0.125, 0.0], abs=1e-6)
    assert good.tolist() == [True, False, False]
    assert float(crosslm.rewards(five, labels)[0]) < 0  # (4) would have dropped it


def test_a_taste_for_labels_is_taken_out_exactly() -> None:
    """Bayes' rule by hand: p = q pi / sum(q pi), and q has the same mean for every label."""
    fair = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.6, 0.4], [0.4, 0.6]])
    skewed = fair * torch.tensor([0.999, 0.001])
    skewed = skewed / skewed.sum(1, keepdim=True)
    assert bool((skewed.argmax(1) == 0).all())
    even = torch.tensor([0, 1, 0, 1])
    torch.testing.assert_close(crosslm.without_prior(skewed, even), fair, atol=1e-5, rtol=0)
    torch.testing.assert_close(crosslm.without_prior(fair, even), fair, atol=1e-5, rtol=0)
    # A label with fewer texts counts as much: each text of it more.
    three = torch.tensor([[0.98, 0.01, 0.01], [0.97, 0.02, 0.01], [0.97, 0.01, 0.02], [0.9, 0.05, 0.05]])
    found = crosslm.without_prior(three, torch.tensor([0, 0, 1, 2]))
    weighted = torch.tensor([0.5, 0.5, 1.0, 1.0]) @ found / 3
    torch.testing.assert_close(weighted, torch.full((3,), 1 / 3), atol=1e-5, rtol=0)


def test_a_grader_that_says_one_label_of_everything_says_nothing() -> None:
    sure = torch.tensor([[1.0, 0.0]] * 4)
    found = crosslm.without_prior(sure, torch.tensor([0, 0, 0, 1]))
    torch.testing.assert_close(found, torch.full((4, 2), 0.5), atol=1e-5, rtol=0)
    alone = crosslm.without_prior(
        torch.tensor([[0.2, 0.8]]), torch.tensor([0])
    )  # nothing for the other label
    assert alone.tolist() == [[1.0, 0.0]]
