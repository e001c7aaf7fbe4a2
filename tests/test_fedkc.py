"""Clusters, centroids and the consistency loss, against numpy, hand computation and proposition 1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from securefl.errors import NonFiniteUpdate, WrongShape
from securefl.methods.fedkc import Composition, Knowledge, cluster, compose
from securefl.models import load_slm
from securefl.slm import Slm

Array = NDArray[np.float32]


@pytest.fixture
def slm(tiny_encoder: Path) -> Slm:
    return load_slm(str(tiny_encoder), ("a", "b"), max_length=16, train_embeddings=False, seed=0)


def arrays(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def simplex(n: int, c: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).dirichlet(np.ones(c), n).astype(np.float32)


def consistency_loss(
    slm: Slm, knowledge: list[Knowledge], weights: Literal["uniform", "size"], layer: int | None = None
) -> torch.Tensor:
    return Composition(knowledge, weights, layer).loss(slm)


def test_cluster_finds_three_far_groups_and_is_seeded() -> None:
    centres = np.array([[0, 0], [50, 0], [0, 50]], np.float32)
    truth = np.arange(30) % 3
    points = centres[truth] + arrays(30, 2)
    labels = cluster(points, 3, seed=1)
    assert len({(int(t), int(g)) for t, g in zip(truth, labels, strict=True)}) == 3
    assert labels.tolist() == cluster(points, 3, seed=1).tolist()


def test_cluster_never_asks_for_more_clusters_than_distinct_rows() -> None:
    points = np.repeat(arrays(2, 4), 5, axis=0)
    assert len(set(cluster(points, 8, seed=0).tolist())) == 2
    assert cluster(points[:1], 8, seed=0).tolist() == [0]
    assert cluster(points[:0], 8, seed=0).tolist() == []


def test_compose_means_of_pooled_vectors() -> None:
    vectors, predictions = arrays(6, 3), simplex(6, 2)
    assignment = np.array([2, 0, 2, 0, 2, 1])
    knowledge, rows = compose(vectors, None, predictions, assignment, min_size=2)
    assert [r.tolist() for r in rows] == [[1, 3], [0, 2, 4]]
    assert knowledge.sizes.tolist() == [2, 3]
    assert knowledge.withheld == 1  # row 5 was alone
    assert knowledge.mask is None
    for c, chosen in enumerate(rows):
        np.testing.assert_allclose(knowledge.vectors[c], vectors[chosen].mean(0), rtol=1e-6)
        np.testing.assert_allclose(knowledge.predictions[c], predictions[chosen].mean(0), rtol=1e-6)


def test_compose_means_per_position_of_embeddings() -> None:
    # Two texts of 3 and 1 tokens: position 0 is the mean of both, 1 and 2 the first's own, 3 nobody's.
    vectors = np.zeros((2, 4, 1), np.float32)
    vectors[0, :, 0] = [2, 4, 6, 99]
    vectors[1, :, 0] = [8, 77, 77, 77]
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], np.float32)
    knowledge, _ = compose(vectors, mask, simplex(2, 2), np.zeros(2, np.int64), min_size=1)
    assert knowledge.vectors[0, :, 0].tolist() == [5, 4, 6, 0]
    assert knowledge.mask is not None
    assert knowledge.mask.tolist() == [[1, 1, 1, 0]]


def test_compose_withholds_everything_below_the_minimum() -> None:
    knowledge, rows = compose(arrays(3, 2), None, simplex(3, 2), np.arange(3), min_size=2)
    assert rows == []
    assert knowledge.withheld == 3
    assert knowledge.vectors.shape == (0, 2)
    assert knowledge.predictions.shape == (0, 2)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**16), st.data())
def test_proposition_1_any_partition_lowers_the_spread(
    n: int, d: int, seed: int, data: st.DataObject
) -> None:
    """sum |e - ebar|^2 + |y - ybar|^2 >= the same inside the clusters, for every partition."""
    assignment = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    vectors, predictions = arrays(n, d, seed=seed), simplex(n, 3, seed=seed)
    knowledge, rows = compose(vectors, None, predictions, assignment, min_size=1)
    whole = ((vectors - vectors.mean(0)) ** 2).sum() + ((predictions - predictions.mean(0)) ** 2).sum()
    inside = sum(
        ((vectors[chosen] - knowledge.vectors[c]) ** 2).sum()
        + ((predictions[chosen] - knowledge.predictions[c]) ** 2).sum()
        for c, chosen in enumerate(rows)
    )
    assert sum(len(chosen) for chosen in rows) == n
    assert whole >= inside - 1e-4 * (1 + whole)


def head_of(slm: Slm, weight: list[list[float]], bias: list[float]) -> None:
    """Give the head known numbers: logits read the first pooled coordinates."""
    with torch.no_grad():
        slm.model.classifier.weight.zero_()
        slm.model.classifier.weight[:, : len(weight[0])] = torch.tensor(weight)
        slm.model.classifier.bias.copy_(torch.tensor(bias))


def known(slm: Slm, first: list[float], predictions: list[list[float]], sizes: list[float]) -> Knowledge:
    vectors = np.zeros((len(first), slm.width), np.float32)
    vectors[:, 0] = first
    return Knowledge(vectors, None, np.array(predictions, np.float32), np.array(sizes, np.float32))


def by_hand(first: float, p: float) -> float:
    """CE of the target (p, 1 - p) against softmax((x, 0)), written with the logistic function."""
    q = 1 / (1 + math.exp(-first))
    return -(p * math.log(q) + (1 - p) * math.log(1 - q))


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_consistency_loss_by_hand(slm: Slm, weights: Literal["uniform", "size"]) -> None:
    head_of(slm, [[1.0], [0.0]], [0.0, 0.0])
    one = known(slm, [0.5, -2.0], [[0.9, 0.1], [0.3, 0.7]], [30, 10])
    two = known(slm, [1.0], [[0.2, 0.8]], [5])
    a = (0.5, 0.5) if weights == "uniform" else (0.75, 0.25)
    silo_one = a[0] * by_hand(0.5, 0.9) + a[1] * by_hand(-2.0, 0.3)
    loss = consistency_loss(slm, [one, two], weights)
    assert loss.item() == pytest.approx((silo_one + by_hand(1.0, 0.2)) / 2, rel=1e-6)


def test_negative_noisy_sizes_count_as_nothing(slm: Slm) -> None:
    head_of(slm, [[1.0], [0.0]], [0.0, 0.0])
    part = known(slm, [0.5, -2.0], [[0.9, 0.1], [0.3, 0.7]], [-3.5, 4])
    assert consistency_loss(slm, [part], "size").item() == pytest.approx(by_hand(-2.0, 0.3), rel=1e-6)
    part = known(slm, [0.5, -2.0], [[0.9, 0.1], [0.3, 0.7]], [-3.5, -1])
    both = (by_hand(0.5, 0.9) + by_hand(-2.0, 0.3)) / 2
    assert consistency_loss(slm, [part], "size").item() == pytest.approx(both, rel=1e-6)


def test_pooled_gradient_is_softmax_minus_target(slm: Slm) -> None:
    """d/dW of CE(y, softmax(W e + b)) is (softmax - y) e^T, and no weight but the head's has a gradient."""
    vectors, target = arrays(1, slm.width), simplex(1, 2)
    knowledge = Knowledge(vectors, None, target, np.ones(1, np.float32))
    torch.autograd.backward(consistency_loss(slm, [knowledge], "uniform"))
    with torch.no_grad():
        probability = slm.head(torch.from_numpy(vectors)).softmax(-1).numpy()
    head = slm.model.classifier
    np.testing.assert_allclose(head.bias.grad.numpy(), (probability - target)[0], atol=1e-6)
    np.testing.assert_allclose(head.weight.grad.numpy(), (probability - target).T @ vectors, atol=1e-5)
    others = [p for p in slm.parameters() if p is not head.weight and p is not head.bias]
    assert all(p.grad is None for p in others)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_centroids_of_single_texts_give_the_models_own_loss(slm: Slm, layer: int) -> None:
    """With one text a cluster (8) is (3): the cross-entropy of the model on the text itself, at any layer."""
    texts = ["the goal of the team", "a film and the bank"]
    batch = slm.tokenize(texts)
    target = simplex(2, 2)
    with torch.no_grad():
        vectors = slm.layer(batch, layer).numpy()
        logits = slm(batch).numpy().astype(np.float64)
    mask = batch["attention_mask"].float().numpy()
    knowledge, _ = compose(vectors, mask, target, np.arange(2), min_size=1)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = consistency_loss(slm, [knowledge], "uniform", layer)
    assert loss.item() == pytest.approx(float(-(target * log_softmax).sum(-1).mean()), rel=1e-5)
    torch.autograd.backward(loss)
    trained = {name for name, p in slm.model.named_parameters() if p.grad is not None}
    below = {name for name in slm.trained_names() if any(f"layer.{n}." in name for n in range(layer))}
    assert trained == set(slm.trained_names()) - below
    given = dict(slm.model.named_parameters())
    queries = [name for name in trained if name.endswith("query.weight")]
    assert len(queries) == 2 - layer
    assert all(bool(given[name].grad.abs().sum() > 0) for name in queries)


@pytest.mark.parametrize("layer", [None, 0, 1])
def test_the_gradient_is_that_of_the_loss_written_out(slm: Slm, layer: int | None) -> None:
    """Against a loop over silos and centroids, and finite differences of it in the head's weights."""
    shape = (slm.width,) if layer is None else (5, slm.width)
    mask = None if layer is None else np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], np.float32)
    parts = [
        Knowledge(arrays(2, *shape, seed=s), mask, simplex(2, 2, s), np.array([s, 2.0], np.float32))
        for s in (1, 2)
    ]

    def written_out() -> float:
        total = 0.0
        for part in parts:
            for c in range(2):
                e = torch.from_numpy(part.vectors[c : c + 1])
                if layer is not None:
                    assert part.mask is not None
                    e = slm.from_layer(e, torch.from_numpy(part.mask[c : c + 1]), layer)
                with torch.no_grad():
                    logs = slm.head(e).double().log_softmax(-1)[0].numpy()
                share = part.sizes[c] / part.sizes.sum()
                total -= share * float(part.predictions[c] @ logs) / 2
        return total

    term = Composition(parts, "size", layer)
    loss = term.loss(slm)
    assert loss.item() == pytest.approx(written_out(), rel=1e-5)
    torch.autograd.backward(loss)
    weight = slm.classifier.weight
    assert weight.grad is not None
    for place in ((0, 3), (1, 7)):
        before = weight.data[place].item()
        ends = []
        for step in (1e-2, -1e-2):
            weight.data[place] = before + step
            ends.append(written_out())
        weight.data[place] = before
        assert weight.grad[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=2e-2, abs=1e-4)


def test_drawn_centroids_give_the_loss_on_average(slm: Slm) -> None:
    parts = [
        Knowledge(arrays(3, slm.width, seed=s), None, simplex(3, 2, s), np.ones(3, np.float32))
        for s in (1, 2)
    ]
    term = Composition(parts, "uniform")
    rng = np.random.default_rng(0)
    with torch.no_grad():
        whole = term.loss(slm).item()
        drawn = [term.loss(slm, 2, rng).item() for _ in range(3000)]
        assert term.loss(slm, 6, rng).item() == whole
    assert len({round(x, 6) for x in drawn}) == 15  # pairs of six
    assert np.mean(drawn) == pytest.approx(whole, abs=4 * np.std(drawn) / np.sqrt(3000))


def test_no_centroid_no_loss(slm: Slm) -> None:
    nothing, _ = compose(arrays(1, slm.width), None, simplex(1, 2), np.zeros(1, np.int64), min_size=2)
    assert consistency_loss(slm, [], "uniform").item() == 0
    assert consistency_loss(slm, [nothing], "uniform").item() == 0
    part = known(slm, [0.5], [[0.9, 0.1]], [3])
    alone = consistency_loss(slm, [part], "uniform").item()
    assert consistency_loss(slm, [nothing, part], "uniform").item() == pytest.approx(alone)


def test_knowledge_that_does_not_fit_is_refused(slm: Slm) -> None:
    one = np.ones(1, np.float32)
    with pytest.raises(WrongShape):
        consistency_loss(slm, [Knowledge(arrays(1, 3), None, simplex(1, 2), one)], "uniform")
    with pytest.raises(WrongShape):
        consistency_loss(slm, [Knowledge(arrays(1, slm.width), None, simplex(1, 3), one)], "uniform")
    with pytest.raises(WrongShape):
        Knowledge(arrays(1, 4, 3), None, simplex(1, 2), one)
    with pytest.raises(WrongShape):
        Knowledge(arrays(1, 3), one[None], simplex(1, 2), one)
    with pytest.raises(WrongShape):
        Knowledge(arrays(2, 3), None, simplex(1, 2), one)
    with pytest.raises(NonFiniteUpdate):
        Knowledge(np.full((1, 3), np.nan, np.float32), None, simplex(1, 2), one)


def test_repr_shows_no_numbers_of_the_centroids() -> None:
    knowledge = Knowledge(np.full((1, 2), 3.25, np.float32), None, simplex(1, 2), np.ones(1, np.float32))
    assert repr(knowledge) == "Knowledge(1 centroids, 0 withheld)"
