"""Clipped sums against a brute force that sees one row at a time, for every engine and architecture.

Most run in float64, where a right engine agrees to 1e-12 and one that is wrong in any term does not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from securefl._adapter import merged
from securefl.config import Lora
from securefl.errors import SecureflError
from securefl.gradients import Engine, clipped_sum
from securefl.gradients.bookkeeping import _Layer, _Records
from securefl.gradients.units import Units
from securefl.models import load_slm
from securefl.slm import Slm
from tests import tiny

LABELS = ("a", "b", "c")
# Few tokens in either tokenizer, of different number; one text with a padding token of its own.
TEXTS = [
    "the a of to in on",
    "a",
    "the for with and on in of to an",
    "in the in the in the",
    "the [PAD] of <pad> a",
    "and a for the",
    "to it on a",
]
TARGETS = [0, 1, 2, 0, 1, 2, 0]
ROWS = list(range(len(TEXTS)))
SEVERAL = [5, 0, 0, 5, 0, 9, 2]  # units of 3, 2 and 1 rows, numbers with gaps and out of order
NAMES: dict[Engine, str] = {"book-keeping": "book-keeping", "hooks": "opacus hooks", "ghost": "opacus ghost"}
KINDS = ("all", "frozen", "lora")
EXACT = 1e-9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each architecture."""
    folder = tmp_path_factory.mktemp("architectures")
    return {name: tiny.make_architecture(folder / name, name) for name in tiny.ARCHITECTURES}


def load(folder: Path, kind: str = "all", *, double: bool = True) -> Slm:
    lora = Lora(r=3) if kind == "lora" else None
    slm = load_slm(str(folder), LABELS, max_length=64, train_embeddings=kind == "all", seed=0, lora=lora)
    rng = np.random.default_rng(0)
    noisy = {  # B starts at zero, and A's gradient with it; the head's row of a label too small to matter
        name: array + rng.normal(0, 0.05 if "lora" in name else 0.3, array.shape).astype(np.float32)
        if ".lora_" in name or "classifier" in name or "score" in name
        else array
        for name, array in slm.state().items()
    }
    slm.load_state(noisy)
    return slm.double() if double else slm


def brute_force(
    slm: Slm, units: Sequence[int], texts: Sequence[str] = TEXTS, *, mixed: bool = False
) -> dict[int, list[Tensor]]:
    """The gradient of each unit, by plain autograd over single texts: no padding, no batch."""
    gradients: dict[int, list[Tensor]] = {}
    for text, target, unit in zip(texts, TARGETS, units, strict=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits = slm(slm.tokenize([text]))
        logits = logits.float() if mixed else logits
        loss = cross_entropy(logits, torch.tensor([target])) / list(units).count(unit)
        found = torch.autograd.grad(loss, slm.trained(), allow_unused=True)
        row = [
            torch.zeros_like(p).double() if g is None else g.double()
            for p, g in zip(slm.trained(), found, strict=True)
        ]
        gradients[unit] = (
            [a + b for a, b in zip(gradients[unit], row, strict=True)] if unit in gradients else row
        )
    return gradients


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


def clip_and_add(
    gradients: Sequence[Sequence[Tensor]], clip: float, groups: Sequence[int] | None = None
) -> list[Tensor]:
    """groups: as `clipped_sum` has them; group k is clipped to clip * (k + 1)."""
    groups = groups or [0] * len(gradients[0])
    scaled = []
    for one in gradients:
        parts = [
            [g for g, group in zip(one, groups, strict=True) if group == k] for k in range(max(groups) + 1)
        ]
        scales = [min(1.0, clip * (k + 1) / norm(part)) for k, part in enumerate(parts)]
        scaled.append([scales[group] * g for g, group in zip(one, groups, strict=True)])
    return [torch.stack(list(parts)).sum(0) for parts in zip(*scaled, strict=True)]


def zeros(slm: Slm) -> list[Tensor]:
    return [torch.zeros_like(parameter) for parameter in slm.trained()]


def summed(
    slm: Slm,
    engine: Engine,
    units: Sequence[int],
    clip: float,
    texts: Sequence[str] = TEXTS,
    autocast: torch.dtype | None = None,
    groups: Sequence[int] | None = None,
) -> list[Tensor]:
    sums = zeros(slm)
    with clipped_sum(slm, engine, groups=groups, autocast=autocast) as gradients:
        assert gradients.name == NAMES.get(engine, "book-keeping")
        targets = torch.tensor(TARGETS[: len(texts)])
        clips = [clip * (k + 1) for k in range(1 + max(groups or [0]))]
        gradients.add(slm.tokenize(texts), targets, torch.tensor(units), clips, sums)
    return sums


def distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return norm([a.double() - b.double() for a, b in zip(left, right, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_engine_equals_brute_force(architecture: str, kind: str, folders: dict[str, Path]) -> None:
    """Rows as units, at clips that cut none, some and all; then units of several rows."""
    slm = load(folders[architecture], kind)
    # transformers rotates queries and keys, and computes Llama's norms, in float32 whatever it is given.
    tolerance = 1e-6 if architecture in ("llama", "modernbert") else EXACT
    exact = brute_force(slm, ROWS)
    norms = sorted(norm(one) for one in exact.values())
    assert norms[0] > 0
    assert norms[-1] > 1.05 * norms[0]
    engines: list[Engine] = ["book-keeping", "hooks"]
    if architecture != "albert":  # it uses one layer twice, which ghost clipping refuses
        engines.append("ghost")
    for clip in (2 * norms[-1], float(np.median(norms)), norms[0] / 3):
        expected = clip_and_add(list(exact.values()), clip)
        for engine in engines:
            off = distance(summed(slm, engine, ROWS, clip), expected)
            assert off < tolerance * clip, (engine, clip)
    exact = brute_force(slm, SEVERAL)
    clip = sorted(norm(one) for one in exact.values())[1]
    expected = clip_and_add(list(exact.values()), clip)
    for engine in engines[:2]:
        assert distance(summed(slm, engine, SEVERAL, clip), expected) < tolerance * clip, engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "albert"])
def test_groups_of_parameters_are_clipped_apart(
    architecture: str, kind: str, folders: dict[str, Path]
) -> None:
    """Three groups, weights and biases of one layer in different ones, by row and by unit."""
    slm = load(folders[architecture], kind)
    groups = [place % 3 for place in range(len(slm.trained()))]
    for units, engines in ((ROWS, list(NAMES)), (SEVERAL, list(NAMES)[:2])):
        exact = list(brute_force(slm, units).values())
        clip = float(np.median([norm(one) for one in exact])) / 4
        expected = clip_and_add(exact, clip, groups)
        assert distance(expected, clip_and_add(exact, clip)) > 0.01 * clip
        for engine in engines:
            if (architecture, engine) != ("albert", "ghost"):
                off = distance(summed(slm, engine, units, clip, groups=groups), expected)
                assert off < EXACT * clip, engine


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_single_precision(architecture: str, folders: dict[str, Path]) -> None:
    """In float32, as in use: within a few roundings of the exact sum."""
    slm = load(folders[architecture], double=False)
    exact = list(brute_force(copy.deepcopy(slm).double(), ROWS).values())
    clip = float(np.median([norm(one) for one in exact]))
    for engine in ("book-keeping", "hooks"):
        assert distance(summed(slm, engine, ROWS, clip), clip_and_add(exact, clip)) < 3e-6 * clip, engine


def test_many_tokens_take_another_way_than_few(folders: dict[str, Path]) -> None:
    """Rows of 2, 12 and 60 tokens, alone and as one unit: Gram matrices, per-row and direct gradients."""
    slm = load(folders["bert"])
    for texts in (["", ""], ["the " * 10, "a"], ["the of a in " * 15, "to in a on " * 15]):
        for units in ([0, 1], [0, 0]):
            exact = list(brute_force(slm, units, texts).values())
            clip = norm(exact[0]) / 2
            found = summed(slm, "book-keeping", units, clip, texts)
            assert distance(found, clip_and_add(exact, clip)) < EXACT * clip


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_a_norm_that_tokens_hide_by_cancelling(table: bool, several: bool) -> None:
    """Output gradients w and -w + small at the same input: pairs of tokens sum to rounding errors of w."""
    rng = torch.Generator().manual_seed(0)
    w, small = 1e4 * torch.randn(2, 1, 16, generator=rng), torch.randn(2, 1, 16, generator=rng)
    gradient = torch.cat([w, small - w], 1)
    small = gradient.double().sum(1, keepdim=True)  # what float32 left of it
    if table:
        layer, given = _Layer(nn.Embedding(5, 16), 0, None), torch.tensor([[3, 3], [4, 4]])
        exact = small[:, 0].square().sum(1)
        if several:
            exact = exact.sum(0, keepdim=True)
    else:
        layer, given = _Layer(nn.Linear(24, 16, bias=False), 0, None), torch.randn(2, 1, 24, generator=rng)
        products = small.mT @ given.double()
        given = given.expand(2, 2, 24)
        exact = (products.sum(0, keepdim=True) if several else products).square().sum((1, 2))
    records = _Records(2)
    records.note(layer, given, gradient)
    found = records.squares(Units.of(torch.tensor([0, 0] if several else [0, 1])), [0])
    assert torch.allclose(found[0], exact, rtol=1e-2)


def test_units_group_their_rows() -> None:
    units = Units.of(torch.tensor([7, 3, 7, 1, 3, 9]))
    assert units.of_rows.tolist() == [2, 1, 2, 0, 1, 3]
    assert units.weights.tolist() == [0.5, 0.5, 0.5, 1, 0.5, 1]
    assert [(u.tolist(), rows.tolist()) for u, rows in units.groups] == [
        ([0, 3], [[3], [5]]),
        ([1, 2], [[1, 4], [0, 2]]),
    ]
    assert units.summed(torch.tensor([1.0, 2, 4, 8, 16, 32])).tolist() == [8, 18, 5, 32]


@pytest.mark.parametrize("engine", list(NAMES))
def test_batches_add_up_and_an_empty_one_adds_nothing(engine: Engine, folders: dict[str, Path]) -> None:
    slm = load(folders["bert"])
    whole = summed(slm, engine, ROWS, 1.0)
    parts = zeros(slm)
    with clipped_sum(slm, engine) as gradients:
        for rows in (ROWS[:3], ROWS[3:], []):
            batch = slm.tokenize([TEXTS[i] for i in rows] or ["a"])
            batch = {key: tensor[: len(rows)] for key, tensor in batch.items()}
            targets = torch.tensor([TARGETS[i] for i in rows], dtype=torch.int64)
            before = [total.clone() for total in parts]
            gradients.add(batch, targets, torch.arange(len(rows)), [1.0], parts)
            assert (distance(before, parts) == 0) == (not rows)
    assert distance(whole, parts) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", list(NAMES))
def test_a_unit_that_is_not_finite_counts_as_nothing(
    engine: Engine, kind: str, folders: dict[str, Path]
) -> None:
    """One token's embedding is infinite: its rows add nothing, and the others what they add without them."""
    slm = load(folders["bert"], kind)
    texts = [*TEXTS[:4], "the film of a", *TEXTS[5:]]
    token = slm.tokenizer.convert_tokens_to_ids("film")
    exact = brute_force(slm, ROWS, texts)
    del exact[4]
    with torch.no_grad():
        slm.model.base_model.get_input_embeddings().weight[token] = torch.inf
    expected = clip_and_add(list(exact.values()), 1.0)
    assert distance(summed(slm, engine, ROWS, 1.0, texts), expected) < EXACT
    alone = summed(slm, engine, [0], 1.0, ["film"])
    assert norm(alone) == 0
    if engine != "ghost":
        units = [0, 1, 2, 3, 3, 1, 6]  # the bad row takes row 3 with it, which is of its unit
        exact = brute_force(slm, units, texts)
        del exact[3]
        found = summed(slm, engine, units, 1.0, texts)
        assert distance(found, clip_and_add(list(exact.values()), 1.0)) < EXACT


def traces(slm: Slm) -> list[object]:
    """Every attribute of modules and parameters, and their gradients."""
    return [
        *((name, {k: id(v) for k, v in vars(m).items()}) for name, m in slm.named_modules()),
        *(len(v) for m in slm.modules() for k, v in vars(m).items() if k.endswith("_hooks")),
        *((name, dict(vars(p)), id(p.grad)) for name, p in slm.named_parameters()),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", list(NAMES))
def test_the_model_is_left_as_it_was(engine: Engine, kind: str, folders: dict[str, Path]) -> None:
    slm = load(folders["bert"], kind)
    slm.trained()[0].grad = torch.ones_like(slm.trained()[0])
    state, before = slm.state(), traces(slm)
    summed(slm, engine, ROWS, 1.0)
    assert traces(slm) == before

    with pytest.raises(ZeroDivisionError), clipped_sum(slm, engine):
        raise ZeroDivisionError
    assert traces(slm) == before

    expected, sums = summed(slm, engine, ROWS, 1.0), zeros(slm)
    batch, units = slm.tokenize(TEXTS), torch.tensor(ROWS)
    with clipped_sum(slm, engine) as gradients:
        with pytest.raises(IndexError):
            gradients.add(batch, torch.tensor([7] * len(ROWS)), units, [1.0], sums)
        gradients.add(batch, torch.tensor(TARGETS), units, [1.0], sums)
    assert distance(sums, expected) == 0, "a failed pass leaves nothing to the next one"
    assert traces(slm) == before
    assert all(np.array_equal(state[name], array) for name, array in slm.state().items())


@pytest.mark.parametrize("engine", list(NAMES))
def test_plain_training_does_not_notice(engine: Engine, folders: dict[str, Path]) -> None:
    def train(slm: Slm) -> Slm:
        optimizer = torch.optim.AdamW(slm.trained(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(slm(slm.tokenize(TEXTS)), torch.tensor(TARGETS)))
            optimizer.step()
        return slm

    slm, other = load(folders["bert"]), load(folders["bert"])
    start = slm.state()
    summed(slm, engine, ROWS, 1.0)
    left, right = train(slm).state(), train(other).state()
    assert all(np.array_equal(left[name], right[name]) for name in left)
    assert not all(np.array_equal(left[name], start[name]) for name in left)


def test_inside_the_block_the_model_still_answers(folders: dict[str, Path]) -> None:
    slm = load(folders["bert"])
    batch = slm.tokenize(TEXTS)
    plain = slm(batch)
    with clipped_sum(slm, "book-keeping"):
        again = slm(batch)
        torch.autograd.backward(again.sum())
        assert torch.equal(plain, again)
        assert all(parameter.grad is not None for parameter in slm.trained())
    assert all(parameter.grad is None for parameter in slm.trained())


class Odd(nn.Linear):
    """A layer that book-keeping cannot know: it might do anything."""


def test_a_layer_it_does_not_know(folders: dict[str, Path]) -> None:
    slm = load(folders["bert"])
    name = "bert.encoder.layer.1.output.dense"
    odd = Odd(64, 32).double().eval()
    odd.load_state_dict(slm.model.get_submodule(name).state_dict())
    exact = list(brute_force(slm, ROWS).values())
    slm.model.set_submodule(name, odd)
    with pytest.raises(SecureflError, match=name), clipped_sum(slm, "book-keeping"):
        pass
    sums = zeros(slm)
    with clipped_sum(slm) as gradients:
        assert gradients.name == "opacus hooks"
        gradients.add(slm.tokenize(TEXTS), torch.tensor(TARGETS), torch.tensor(ROWS), [1.0], sums)
    assert distance(sums, clip_and_add(exact, 1.0)) < EXACT


def test_two_layers_with_one_weight(folders: dict[str, Path]) -> None:
    slm = load(folders["bert"])
    layers = slm.model.bert.encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    with pytest.raises(SecureflError, match=r"layer\.1\.output\.dense"), clipped_sum(slm, "book-keeping"):
        pass
    exact = list(brute_force(slm, ROWS).values())
    sums = zeros(slm)
    with clipped_sum(slm, "hooks") as gradients:
        gradients.add(slm.tokenize(TEXTS), torch.tensor(TARGETS), torch.tensor(ROWS), [1.0], sums)
    assert distance(sums, clip_and_add(exact, 1.0)) < EXACT


@pytest.mark.parametrize("engine", ["auto", *NAMES])
def test_a_table_looked_up_once_for_all_rows_is_refused(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slm = load(folders["gpt2"])
    monkeypatch.setattr(slm, "_positions", lambda shape: {})
    with pytest.raises(SecureflError, match="wpe"), clipped_sum(slm, engine):
        pass


def test_what_is_refused(folders: dict[str, Path]) -> None:
    slm = load(folders["bert"])
    batch, targets, units = slm.tokenize(TEXTS), torch.tensor(TARGETS), torch.tensor(ROWS)
    with clipped_sum(slm, "ghost") as gradients, pytest.raises(SecureflError, match="several rows"):
        gradients.add(batch, targets, torch.tensor(SEVERAL), [1.0], zeros(slm))
    with clipped_sum(slm) as gradients:
        for clip in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(SecureflError, match="clip"):
                gradients.add(batch, targets, units, [clip], zeros(slm))
        with pytest.raises(SecureflError, match="as many"):
            gradients.add(batch, targets, units[:-1], [1.0], zeros(slm))
        with pytest.raises(SecureflError, match="as many"):
            gradients.add(batch, targets[:-1], units[:-1], [1.0], zeros(slm))
        with pytest.raises(SecureflError, match="shapes"):
            gradients.add(batch, targets, units, [1.0], zeros(slm)[::-1])
        slm.train()
        with pytest.raises(SecureflError, match="training mode"):
            gradients.add(batch, targets, units, [1.0], zeros(slm))
    slm.train()
    with pytest.raises(SecureflError, match="training mode"), clipped_sum(slm):
        pass
    slm.eval()
    for groups in ([0], [1] * len(slm.trained()), [0, *[2] * (len(slm.trained()) - 1)]):
        with pytest.raises(SecureflError, match="group"), clipped_sum(slm, groups=groups):
            pass
    with pytest.raises(SecureflError, match="bfloat16"), clipped_sum(slm, autocast=torch.float16):
        pass


def test_an_adapters_update_is_the_clipped_gradients(folders: dict[str, Path]) -> None:
    """The weights of the merged model move as the factors' clipped gradients say (opacus#820)."""
    slm, rate, clip = load(folders["bert"], "lora"), 1.0, 1.0
    names = slm.trained_names()
    gradient = clip_and_add(list(brute_force(slm, ROWS).values()), clip)
    start = {name: p.detach().clone() for name, p in zip(names, slm.trained(), strict=True)}
    moved = {name: start[name] - rate * g for name, g in zip(names, gradient, strict=True)}
    before = merged(slm.model).state_dict()
    sums = summed(slm, "book-keeping", ROWS, clip)
    with torch.no_grad():
        for parameter, total in zip(slm.trained(), sums, strict=True):
            parameter -= rate * total
    after = merged(slm.model).state_dict()
    adapted = [name.removesuffix(".lora_A.default.weight") for name in names if ".lora_A." in name]
    assert len(adapted) == 12
    for name in adapted:
        down, up = f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight"
        scale = 2.0  # alpha / r, alpha being 2 r unless said
        expected = scale * (moved[up] @ moved[down] - start[up] @ start[down])
        change = after[f"{name}.weight"] - before[f"{name}.weight"]
        assert float(expected.norm()) > 1e-4
        assert float((change - expected).norm()) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", list(NAMES))
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_mixed_precision(architecture: str, engine: Engine, kind: str, folders: dict[str, Path]) -> None:
    """Near the float32 sum, and near plain autograd in the same precision."""
    slm = load(folders[architecture], kind, double=False)
    exact = list(brute_force(slm, ROWS).values())
    clip = float(np.median([norm(one) for one in exact]))
    expected = clip_and_add(exact, clip)
    mixed = clip_and_add(list(brute_force(slm, ROWS, mixed=True).values()), clip)
    found = summed(slm, engine, ROWS, clip, autocast=torch.bfloat16)
    assert all(total.dtype == torch.float32 for total in found)
    assert 0 < distance(found, expected) < 0.03 * norm(expected)
    assert distance(found, mixed) < 0.03 * norm(expected)
