"""Who masks with whom: complete for few, regular and connected for many, and the degree by the bound."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import hypergeom

from securefl.crypto.graph import degree_for, failure, hypergeometric_tail, neighbours, threshold
from securefl.errors import UsageError

DIGEST = hashlib.sha256(b"adverts").digest()


def parties(n: int) -> list[str]:
    return [hashlib.sha256(str(i).encode()).hexdigest() for i in range(n)]


@pytest.mark.parametrize("n", [2, 3, 4, 64])
def test_few_silos_mask_with_everybody(n: int) -> None:
    graph = neighbours(parties(n), DIGEST)
    assert {name: set(near) for name, near in graph.items()} == {
        name: set(parties(n)) - {name} for name in parties(n)
    }


@pytest.mark.parametrize(("n", "degree"), [(100, None), (500, None), (300, 12), (101, 2)])
def test_many_silos_have_a_regular_connected_graph(n: int, degree: int | None) -> None:
    graph = neighbours(parties(n), DIGEST, degree)
    index = {name: place for place, name in enumerate(graph)}
    matrix = np.zeros((n, n), np.int8)
    for name, near in graph.items():
        assert name not in near
        assert len(set(near)) == len(near)
        for other in near:
            matrix[index[name], index[other]] = 1
    assert np.array_equal(matrix, matrix.T)
    assert set(matrix.sum(axis=0)) == {min(degree or degree_for(n), n - 1)}
    assert connected_components(csr_array(matrix))[0] == 1


def test_the_graph_is_the_digests_and_nobody_elses() -> None:
    names = parties(200)
    graph = neighbours(names, DIGEST, 20)
    assert neighbours(names[::-1], DIGEST, 20) == graph, "the order of the list changed it"
    assert neighbours(names, hashlib.sha256(b"other").digest(), 20) != graph
    # By the written rule: the ring is the order of SHA-256(label, digest, name).
    ring = sorted(
        names, key=lambda n: hashlib.sha256(b"securefl/1 mask graph" + DIGEST + n.encode()).digest()
    )
    around = {ring[(0 + step) % 200] for step in (*range(-10, 0), *range(1, 11))}
    assert set(graph[ring[0]]) == around


@pytest.mark.parametrize(
    ("population", "marked", "drawn", "least"), [(99, 33, 40, 20), (50, 5, 30, 5), (10, 0, 3, 1)]
)
def test_the_tail_is_scipys(population: int, marked: int, drawn: int, least: int) -> None:
    ours = float(hypergeometric_tail(population, marked, drawn, least))
    assert ours == pytest.approx(hypergeom.sf(least - 1, population, marked, drawn), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("n", [65, 100, 300, 1000])
def test_the_degree_keeps_to_the_bound_and_is_the_least(n: int) -> None:
    k = degree_for(n)
    third, tenth = Fraction(1, 3), Fraction(1, 10)
    c, d, t = n // 3, n // 10, threshold(k + 1)
    if k < n - 1:
        tails = hypergeom.sf(t - 1, n - 1, c, k) + hypergeom.sf(k + 1 - t, n - 1, d, k)
        cut = float(np.prod([(c + d - i) / (n - i) for i in range(k // 2)]))
        assert n * (tails + cut) <= 2.0**-40 * (1 + 1e-6)
        assert float(failure(n, k, third, tenth)) == pytest.approx(n * (tails + cut), rel=1e-6)
    if k > 2:
        below = k - 2 if k < n - 1 else (n - 2) // 2 * 2 - (0 if (n - 2) % 2 else 2)
        assert failure(n, below, third, tenth) > Fraction(1, 2**40)


def test_the_threshold_is_over_two_thirds() -> None:
    assert [threshold(n) for n in (3, 4, 5, 6, 9, 64)] == [3, 3, 4, 5, 7, 43]
    assert all(3 * threshold(n) > 2 * n for n in range(1, 1000))


def test_what_is_no_graph_is_refused() -> None:
    names = parties(70)
    for cohort, digest, degree in [
        (names[:1], DIGEST, None),
        ([*names, names[0]], DIGEST, None),
        (names, DIGEST[:-1], None),
        (names, DIGEST, 0),
        (names, DIGEST, 7),
    ]:
        with pytest.raises(UsageError):
            neighbours(cohort, digest, degree)
