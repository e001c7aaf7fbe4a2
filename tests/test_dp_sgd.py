"""DP-SGD against a brute force by rows, and record and replay: what a neighbour changes before the noise."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.functional import cross_entropy

from securefl import dp_sgd
from securefl.config import Config, Lora, parse_config
from securefl.data import Rows
from securefl.dp_sgd import fit_private
from securefl.dp_terms import Mechanism, round_claim, run_claim, steps_of, training_mechanism
from securefl.errors import Cancelled, ConfigError, DataError
from securefl.gaussian import add_gaussian
from securefl.models import load_slm
from securefl.privacy import Noise, noise_source
from securefl.release import DpSgd
from securefl.slm import Slm
from securefl.training import schedule
from tests import tiny

LABELS = ("a", "b")
RATES = {"learning_rate": 2e-3, "head_learning_rate": 1e-2}


class Recorded:
    """A generator that gives every unit, by its place, and every step the same numbers in each run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, -1

    def random(self, units: int) -> NDArray[np.float64]:
        self.step += 1
        return np.random.default_rng([self.seed, self.step]).random(10_000)[:units]

    def bytes(self, length: int) -> bytes:
        return hashlib.sha256(f"{self.seed}/{self.step}".encode()).digest()[:length]


def recorded(seed: int = 0) -> Noise:
    return Noise(lambda: cast("np.random.Generator", Recorded(seed)), "recorded", True)


def rows_of(count: int, units: tuple[str, ...] = (), seed: int = 0) -> Rows:
    pairs = tiny.make_texts(count, LABELS, seed)
    labels = np.array([LABELS.index(label) for _, label in pairs], np.int64)
    return Rows(tuple(str(i) for i in range(count)), tuple(text for text, _ in pairs), labels, units)


def mechanism(**changes: Any) -> Mechanism:
    terms = {
        "noise_multiplier": 1.0,
        "sample_rate": 0.4,
        "head_share": 0.3,
        "clip": 0.5,
        "steps": 3,
        "delta": 1e-3,
        "unit": "row",
        "per_unit": 1,
        "expected_batch": 8.0,
    }
    return Mechanism(**{**terms, **changes})


def load(folder: Path, lora: bool = False) -> Slm:
    return load_slm(
        str(folder),
        LABELS,
        max_length=16,
        train_embeddings=not lora,
        seed=0,
        lora=Lora(r=2) if lora else None,
    )


def fit(slm: Slm, rows: Rows, terms: Mechanism, noise: Noise | None = None, **changes: Any) -> DpSgd:
    return fit_private(slm, rows, terms, noise or recorded(), **{"physical_batch": 32, **RATES, **changes})


def _gradient(slm: Slm, texts: list[str], labels: list[int], terms: Mechanism) -> NDArray[np.float64]:
    """Of the mean loss of one unit's rows, each row by itself, in float64; clipped, the head's part apart."""
    total: list[NDArray[np.float64]] = []
    for text, label in zip(texts, labels, strict=True):
        loss = cross_entropy(slm(slm.tokenize([text])), torch.tensor([label]))
        parts = torch.autograd.grad(loss, slm.trained())
        total.append(np.concatenate([part.double().numpy().ravel() for part in parts]))
    mean: NDArray[np.float64] = np.mean(total, axis=0)
    names = [name for name, p in slm.model.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in slm.trained()]
    head = np.repeat(["classifier" in name for name in names], sizes)
    for part, share in ((head, terms.head_share), (~head, 1 - terms.head_share)):
        mean[part] *= min(1.0, terms.clip * share**0.5 / np.linalg.norm(mean[part]))
    return mean


def brute_force(
    slm: Slm,
    units: list[list[int]],
    rows: Rows,
    terms: Mechanism,
    penalty: Callable[[Slm], Tensor] | None = None,
) -> None:
    """The same training, by its definition: one unit at a time, torch's AdamW on the noisy mean."""
    head = {id(p) for p in slm.model.classifier.parameters()}
    groups = [
        {
            "params": [p],
            "lr": RATES["head_learning_rate" if id(p) in head else "learning_rate"],
            "weight_decay": 0.01 if p.ndim > 1 else 0.0,
        }
        for p in slm.trained()
    ]
    optimizer = torch.optim.AdamW(groups)
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator = Recorded(0)
    for step in range(terms.steps):
        taken = np.flatnonzero(generator.random(len(units)) < terms.sample_rate)
        total = np.zeros(sum(p.numel() for p in slm.trained()))
        for unit in taken:
            chosen = units[unit]
            texts, labels = [rows.texts[i] for i in chosen], [int(rows.labels[i]) for i in chosen]
            total += _gradient(slm, texts, labels, terms)
        noise = torch.zeros(len(total))
        add_gaussian(noise, terms.noise_multiplier * terms.clip, generator.bytes(32))
        mean = torch.from_numpy((total + noise.numpy()) / terms.expected_batch).float()
        extra = torch.zeros(len(mean))
        if penalty is not None:
            parts = torch.autograd.grad(penalty(slm), slm.trained(), allow_unused=True)
            extra = torch.cat(
                [
                    torch.zeros(p.numel()) if part is None else part.ravel()
                    for part, p in zip(parts, slm.trained(), strict=True)
                ]
            )
        place = 0
        for parameter in slm.trained():
            size = parameter.numel()
            parameter.grad = (mean + extra)[place : place + size].view_as(parameter)
            place += size
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(step, terms.steps)
        optimizer.step()


def assert_same(one: Slm, two: Slm, start: Slm) -> None:
    """The same weights up to a thousandth of how far each array moved (AdamW magnifies rounding)."""
    first = start.state()
    ours, theirs = one.state(), two.state()
    for name in ours:
        moved = np.abs(theirs[name] - first[name]).max()
        assert moved > 0, name
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-3 * moved, err_msg=name)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("engine", ["book-keeping", "hooks"])
def test_it_is_the_definition(tiny_encoder: Path, engine: str, lora: bool) -> None:
    """Weights after three steps, LoRA's factors among them, are those of a training row by row."""
    start = load(tiny_encoder, lora)
    ours, reference = copy.deepcopy(start), copy.deepcopy(start)
    rows = rows_of(12)
    fit(ours, rows, mechanism(), engine=engine)
    brute_force(reference, [[i] for i in range(12)], rows, mechanism())
    assert_same(ours, reference, start)


def test_by_unit_it_is_the_definition(tiny_encoder: Path) -> None:
    """Units of 5, 1, 4 and 2 rows, at most 3 each: those with the smallest hashes of their texts."""
    names = tuple("aaaaabccccdd")
    rows = rows_of(12, names)
    units = []
    for name in "abcd":
        own = [i for i, unit in enumerate(names) if unit == name]
        units.append(sorted(own, key=lambda i: hashlib.sha256(rows.texts[i].encode()).digest())[:3])
    start = load(tiny_encoder)
    ours, reference = copy.deepcopy(start), copy.deepcopy(start)
    terms = mechanism(unit="patient_id", per_unit=3, sample_rate=0.7)
    assert fit(ours, rows, terms).unit == "patient_id"
    brute_force(reference, units, rows, terms)
    assert_same(ours, reference, start)


def test_a_penalty_is_neither_clipped_nor_noised(tiny_encoder: Path) -> None:
    def penalty(slm: Slm) -> Tensor:
        return 3.0 * slm.model.classifier.weight.square().sum()

    start = load(tiny_encoder)
    ours, reference = copy.deepcopy(start), copy.deepcopy(start)
    fit(ours, rows_of(6), mechanism(), penalty=penalty)
    brute_force(reference, [[i] for i in range(6)], rows_of(6), mechanism(), penalty)
    assert_same(ours, reference, start)


def test_a_penalty_without_a_gradient_is_none(tiny_encoder: Path) -> None:
    """FedKC's where every peer withheld all its centroids: a constant 0."""
    start = load(tiny_encoder)
    ours, reference = copy.deepcopy(start), copy.deepcopy(start)
    fit(ours, rows_of(6), mechanism(), penalty=lambda _: torch.zeros(()))
    brute_force(reference, [[i] for i in range(6)], rows_of(6), mechanism())
    assert_same(ours, reference, start)


@pytest.mark.parametrize("physical", [1, 3, 5])
def test_the_physical_batch_changes_nothing(tiny_encoder: Path, physical: int) -> None:
    """Nor does the order of units in it: batches that are oversize for memory are computed in parts."""
    start = load(tiny_encoder)
    ours, whole = copy.deepcopy(start), copy.deepcopy(start)
    fit(ours, rows_of(12), mechanism(sample_rate=0.9), physical_batch=physical)
    fit(whole, rows_of(12), mechanism(sample_rate=0.9), physical_batch=64)
    assert_same(ours, whole, start)


def test_empty_batches_are_noised_and_counted(tiny_encoder: Path) -> None:
    """Nobody takes part in any step; the weights move by the noise alone, as the definition says."""
    start = load(tiny_encoder)
    ours, reference = copy.deepcopy(start), copy.deepcopy(start)
    terms = mechanism(sample_rate=1e-6, noise_multiplier=2.0)
    claim = fit(ours, rows_of(4), terms)
    brute_force(reference, [[0], [1], [2], [3]], rows_of(4), terms)
    assert_same(ours, reference, start)
    assert claim.steps == 3


# --- record and replay


def _sums_before_noise(slm: Slm, rows: Rows, terms: Mechanism, seed: int) -> list[NDArray[np.float64]]:
    """What is added up in each step, before noise is."""
    seen: list[NDArray[np.float64]] = []

    def record(values: Tensor, deviation: float, key: bytes) -> None:
        seen.append(values.double().numpy().copy())
        add_gaussian(values, deviation, key)

    with patch.object(dp_sgd, "add_gaussian", record):
        fit(copy.deepcopy(slm), rows, terms, recorded(seed))
    return seen


def _grown(rows: Rows, texts: list[str], label: int, unit: str | None = None) -> Rows:
    return Rows(
        (*rows.ids, *(f"new-{i}" for i in range(len(texts)))),
        (*rows.texts, *texts),
        np.array([*rows.labels, *[label] * len(texts)], np.int64),
        (*rows.units, *[unit] * len(texts)) if unit else (),
    )


@pytest.mark.parametrize("by_unit", [False, True], ids=["row", "unit"])
def test_a_neighbour_moves_a_sum_by_the_clip_at_most(tiny_encoder: Path, by_unit: bool) -> None:
    """One unit more, whatever it holds, with sampling and noise replayed: the sum of the first step in which
    it takes part moves by no more than the clip, those before not at all; and by all of it where it is cut.
    """
    slm = load(tiny_encoder)
    rows = rows_of(8, tuple("aabbccdd") if by_unit else ())
    terms = mechanism(sample_rate=0.7, **({"unit": "patient_id", "per_unit": 4} if by_unit else {}))
    took, most = 0, 0.0
    for seed, text in enumerate(["goal " * 12, "a", "zebra " * 3, "bank market", "[PAD]", "the of and it"]):
        texts = [text, text + " more", "bank"] if by_unit else [text]
        more = _grown(rows, texts, seed % 2, "new" if by_unit else None)
        without = _sums_before_noise(slm, rows, terms, seed)
        with_it = _sums_before_noise(slm, more, terms, seed)
        place = 4 if by_unit else 8
        for step, (one, two) in enumerate(zip(without, with_it, strict=True)):
            takes = np.random.default_rng([seed, step]).random(10_000)[place] < terms.sample_rate
            moved = float(np.linalg.norm(two - one))
            if not takes:
                assert moved <= 1e-5
                continue
            took += 1
            most = max(most, moved)
            assert moved <= terms.clip * (1 + 1e-5)
            break  # the weights are different ones from here on
    assert took >= 4
    assert most > 0.99 * terms.clip


def test_without_clipping_the_replay_would_show_it(tiny_encoder: Path) -> None:
    """The same test sees a fault: a clip that is ten times what is claimed."""
    slm, rows = load(tiny_encoder), rows_of(8)
    more = _grown(rows, ["goal " * 12], 1)
    faulty = mechanism(sample_rate=1.0, steps=1, clip=5.0)
    one, two = (_sums_before_noise(slm, part, faulty, 0)[0] for part in (rows, more))
    assert np.linalg.norm(two - one) > 0.5 * (1 + 1e-5)


def test_padding_that_overflows_cannot_switch_others_off(tiny_encoder: Path) -> None:
    """Weights that are infinite at padding alone: in batches padded to the longest text one long row would
    make eight short ones count as 0, and the sum move by eight clips.
    """
    slm = load(tiny_encoder, lora=True)
    with torch.no_grad():
        slm.model.base_model.embeddings.word_embeddings.weight[slm.tokenizer.pad_token_id] = float("inf")
    rows = rows_of(8)
    rows = Rows(rows.ids, tuple("the a of to"[: 3 + i] for i in range(8)), rows.labels)
    more = _grown(rows, ["goal match team player " * 5], 1)
    terms = mechanism(sample_rate=1.0, steps=1)
    one, two = (_sums_before_noise(slm, part, terms, 0)[0] for part in (rows, more))
    assert np.linalg.norm(two - one) <= terms.clip * (1 + 1e-5)
    assert np.linalg.norm(two) > 0.5 * terms.clip, "the long one is without padding, and counts"


def test_rows_that_tie_are_chosen_by_their_label(tiny_encoder: Path) -> None:
    """A unit of eight rows with one text and both labels, of which one takes part: the same, in whatever
    order the rows stand, which depends on how many others there are.
    """
    labels = np.array([0, 1] * 4)
    terms = mechanism(unit="patient_id", per_unit=1, sample_rate=1.0, steps=1)
    slm, texts = load(tiny_encoder), ("no findings",) * 8
    sums = [
        _sums_before_noise(slm, Rows(tuple("12345678"), texts, order, ("p",) * 8), terms, 0)[0]
        for order in (labels, labels[::-1].copy())
    ]
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-7)


def test_a_row_that_overflows_adds_nothing(tiny_encoder: Path) -> None:
    """Weights that are infinite on one word: its rows count as 0 and those of others are what they were."""
    slm, rows = load(tiny_encoder, lora=True), rows_of(8)
    word = slm.tokenizer.convert_tokens_to_ids("z")
    with torch.no_grad():
        slm.model.base_model.embeddings.word_embeddings.weight[word] = float("inf")
    more = _grown(rows, ["z"], 1)
    terms = mechanism(sample_rate=1.0, steps=1)
    one, two = (_sums_before_noise(slm, part, terms, 0)[0] for part in (rows, more))
    np.testing.assert_allclose(one, two, atol=1e-6)
    assert np.isfinite(two).all()


def test_in_bfloat16_a_long_text_leaves_the_others_as_they_were(tiny_encoder: Path) -> None:
    """A long text beside short ones moves the sum by its own clipped gradient and by nothing more; in batches
    padded to the longest it would move the roundings of all.
    """
    slm, rows = load(tiny_encoder), rows_of(10)
    rows = Rows(rows.ids, tuple(text[:4] for text in rows.texts), rows.labels)
    terms = mechanism(sample_rate=1.0, steps=1)

    def total(part: Rows) -> NDArray[np.float64]:
        seen: list[NDArray[np.float64]] = []

        def record(values: Tensor, deviation: float, key: bytes) -> None:
            seen.append(values.double().numpy().copy())

        with patch.object(dp_sgd, "add_gaussian", record):
            fit(copy.deepcopy(slm), part, terms, precision="bfloat16")
        return seen[0]

    long = _grown(rows, ["goal match team player " * 5], 1)
    own = total(long.take([10]))
    np.testing.assert_allclose(total(long) - total(rows), own, atol=1e-5)


# --- sampling, noise and the claim


def _taken(units: int, terms: Mechanism, noise: Noise, slm: Slm) -> list[NDArray[np.int64]]:
    """Which units took part in each step; what they compute is left out, for time."""
    steps: list[NDArray[np.int64]] = []

    def record(chosen: list[NDArray[np.int64]], *_: Any) -> list[Any]:
        steps.append(np.array([int(unit[0]) for unit in chosen], np.int64))
        return []

    with patch.object(dp_sgd, "_physical", record):
        fit(copy.deepcopy(slm), rows_of(units), terms, noise)
    return steps


def test_units_take_part_by_poisson_sampling(tiny_encoder: Path) -> None:
    """Each with the rate, independently: the numbers of a step have a binomial's mean and variance, and each
    unit's own number too. Six standard errors; no fixed batch size.
    """
    units, terms = 60, mechanism(sample_rate=0.25, steps=200, delta=1e-3)
    steps = _taken(units, terms, noise_source(3), load(tiny_encoder, lora=True))
    sizes = np.array([len(step) for step in steps])
    assert len(steps) == 200
    assert abs(sizes.mean() - 15) < 6 * (units * 0.1875 / 200) ** 0.5
    assert abs(sizes.var() / (units * 0.1875) - 1) < 6 * (2 / 200) ** 0.5
    counts = np.bincount(np.concatenate(steps), minlength=units)
    assert all(binomtest(int(count), 200, 0.25).pvalue > 1e-7 for count in counts)


def test_with_the_systems_noise_no_two_trainings_are_alike(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder, lora=True)
    one, two = copy.deepcopy(slm), copy.deepcopy(slm)
    claims = [fit(model, rows_of(6), mechanism(steps=1), noise_source(None)) for model in (one, two)]
    assert not np.array_equal(one.state()["classifier.weight"], two.state()["classifier.weight"])
    assert [claim.simulated for claim in claims] == [False, False]
    assert claims[0].generator == "aes-256-ctr, keys of 256 bits from the OS"


def test_from_a_seed_it_repeats_and_says_so(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder, lora=True)
    one, two, other = (copy.deepcopy(slm) for _ in range(3))
    seeded = noise_source(7)
    for model, purpose in ((one, "a"), (two, "a"), (other, "b")):
        claim = fit(model, rows_of(6), mechanism(steps=2), seeded.for_purpose(purpose))
        assert claim.simulated
        assert claim.epsilon > 0
    assert one.state()["classifier.weight"].tobytes() == two.state()["classifier.weight"].tobytes()
    assert one.state()["classifier.weight"].tobytes() != other.state()["classifier.weight"].tobytes()


def test_the_claim_is_the_mechanism(tiny_encoder: Path) -> None:
    terms = mechanism(steps=2)
    claim = fit(load(tiny_encoder, lora=True), rows_of(5), terms, noise_source(1))
    assert (claim.noise_multiplier, claim.sample_rate, claim.steps, claim.clip) == (1.0, 0.4, 2, 0.5)
    assert (claim.delta, claim.unit, claim.per_unit, claim.sampling) == (1e-3, "row", 1, "poisson")
    assert claim.adjacency == "add-remove"


def test_dropout_is_off_and_the_model_left_ready(tiny_encoder: Path) -> None:
    """With dropout a row's gradient would depend on its place in a batch, and so on the rows before it."""
    slm = load(tiny_encoder)
    slm.train()
    fit(slm, rows_of(4), mechanism(steps=1))
    assert not any(module.training for module in slm.modules())
    assert all(parameter.grad is None for parameter in slm.parameters())


def test_delta_must_be_below_one_over_the_units(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    with pytest.raises(ConfigError, match="delta"):
        fit(slm, rows_of(10), mechanism(delta=0.1))
    with pytest.raises(ConfigError, match="delta"):
        fit(slm, rows_of(10, tuple("aabbccddee")), mechanism(delta=0.2, unit="patient_id", per_unit=2))
    fit(slm, rows_of(10, tuple("aabbccddee")), mechanism(delta=0.1, unit="patient_id", per_unit=2, steps=1))


def test_bad_rows_and_cancelling(tiny_encoder: Path) -> None:
    slm = load(tiny_encoder)
    with pytest.raises(DataError, match="no rows"):
        fit(slm, rows_of(0), mechanism())
    with pytest.raises(DataError, match="label"):
        fit(slm, Rows(("1",), ("a",), np.array([5])), mechanism())
    with pytest.raises(Cancelled, match="after 0 of 3"):
        fit(slm, rows_of(4), mechanism(), cancelled=lambda: True)
    assert all(parameter.grad is None for parameter in slm.parameters())


# --- from a configuration


def config(**dp_sgd: Any) -> Config:
    return parse_config(
        {
            "federation": {"method": "fedavg", "rounds": 3},
            "data": {"train": "t.csv", "test": "u.csv"},
            "slm": {"epochs": 2, "round_epochs": 1},
            "privacy": {"dp_sgd": dp_sgd},
        }
    )


def test_the_budget_is_that_of_all_rounds() -> None:
    """Three rounds of 2, 1 and 1 passes at rate 1/16: 32, 16 and 16 steps whose composition is epsilon 4."""
    terms = config(epsilon=4.0, delta=1e-5)
    seeded = noise_source(0)
    each = [round_claim(terms, number, seeded) for number in (1, 2, 3)]
    assert [claim.steps for claim in each if claim] == [32, 16, 16]
    whole = run_claim(terms, 3, seeded)
    assert whole is not None
    assert whole.steps == 64
    assert 3.9 < whole.epsilon <= 4.0
    assert all(claim is not None and claim.epsilon < whole.epsilon for claim in each)


def test_a_given_noise_multiplier_is_taken() -> None:
    found = training_mechanism(config(noise_multiplier=1.7), 1)
    assert found is not None
    assert found.noise_multiplier == 1.7
    assert found.steps == 16


@pytest.mark.parametrize(
    ("epochs", "rate", "steps"), [(1, 1.0, 1), (3, 1 / 16, 48), (2, 0.3, 7), (1, 0.9, 1)]
)
def test_steps_of_passes(epochs: int, rate: float, steps: int) -> None:
    assert steps_of(epochs, rate) == steps
