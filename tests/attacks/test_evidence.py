"""Of a large pool attacks read vectors in chunks from disk, or take a bounded part of the texts.

The reference is what they find with all vectors in memory, in float64 and in one piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attacks import inversion as white_box
from attacks import membership as chunked
from attacks import simulated, word_maps
from attacks.attack import Attack
from attacks.bench import decoder, inversion, membership, pool, probes, rounds, subtraction
from attacks.dictionary import Ids, token_ids
from attacks.evidence import Evidence, Scene, some_of
from attacks.judgement import Book
from attacks.runs import Run, Texts, pooled_vectors
from attacks.vector_cache import VectorCache
from securefl.models import load_slm
from securefl.slm import Slm
from securefl.training import head_probabilities
from tests import tiny
from tests.attacks.makerun import Recipe, corpus_of, make_run

ROWS = tiny.make_texts(480, seed=1, length=9)
AUXILIARY = 200
ALL = {
    "1": membership.ATTACK,
    "5": probes.BAG_ATTACK,
    "6": rounds.ATTACK,
    "7": subtraction.ATTACK,
    "8": pool.ATTACK,
    "9": inversion.ATTACK,
    "10": decoder.ATTACK,
    "13": probes.ATTRIBUTE_ATTACK,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two silos of 40 rows in six clusters each, two rounds, and 400 texts that are nobody's."""
    folder = tmp_path_factory.mktemp("evidence")
    encoder = tiny.make_encoder(folder / "encoder", width=64)
    slm = load_slm(str(encoder), ["a", "b"], max_length=12, train_embeddings=False, seed=0)
    recipe = Recipe(clusters=6, rounds=2)
    corpus = corpus_of([text for text, _ in ROWS], [label for _, label in ROWS], 40, recipe)
    return Run(make_run(folder / "run", slm, corpus, recipe))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for bench in (decoder, inversion):
        monkeypatch.setattr(bench, "BUDGET", 20)
    monkeypatch.setattr(inversion, "STEPS", 5)
    monkeypatch.setattr(probes, "_GROUPS", 512)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that was embedded, as often as it was."""
    found: list[str] = []

    def embed(_: Run, slm: Slm, texts: Sequence[str]) -> NDArray[np.float32]:
        found.extend(texts)
        return pooled_vectors(slm, texts)

    monkeypatch.setattr(Run, "embed", embed)
    return found


def found_by(attack: Attack, evidence: Evidence) -> Book:
    book = Book(show_text=True)
    assert attack.missing(evidence) is None
    attack.run(evidence, book, lambda *_: None)
    return book


def numbers(book: Book) -> list[tuple[str, str, list[float]]]:
    figures = [
        (one.attack, one.metric, [one.measure.value, one.baseline, one.control or 0.0])
        for one in book.figures
    ]
    return figures + [(one.name.split(",")[0], "", [one.bound, one.measured]) for one in book.bounds]


@pytest.mark.parametrize("attack", ALL.values(), ids=ALL.keys())
def test_chunks_of_a_map_in_float32_are_one_piece_in_float64(
    attack: Attack, source: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seven rows at a time from the disk, against all of them in memory."""
    vectors = Scene.vectors
    with monkeypatch.context() as patch:
        patch.setattr(Scene, "vectors", lambda scene, texts: vectors(scene, texts).astype(np.float64))
        patch.setattr("attacks.bench.membership.head_probabilities", _heads_of_float64())
        expected = found_by(attack, Evidence(source))
    pieces: Counter[int] = Counter()
    real = chunked.chunks

    def chunks(rows: NDArray[Any], *_: int, **__: int) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        for part, some in real(rows, 7 * rows.shape[1]):
            pieces[len(some)] += 1
            yield part, some

    for room in (chunked, word_maps, white_box):
        monkeypatch.setattr(room, "chunks", chunks)
    monkeypatch.setenv("SECUREFL_CACHE", str(tmp_path))
    monkeypatch.setattr("attacks.evidence.VectorCache", partial(VectorCache, in_memory=0))
    found = found_by(attack, Evidence(source))
    assert found.figures
    assert max(pieces) == 7
    assert pieces[7] >= AUXILIARY // 7
    assert (tmp_path / "securefl").is_dir()
    assert [entry.why for entry in found.not_run] == [entry.why for entry in expected.not_run]
    for (*names, ours), (*others, theirs) in zip(numbers(found), numbers(expected), strict=True):
        assert names == others
        assert ours == pytest.approx(theirs, rel=1e-6)


def _heads_of_float64() -> Callable[[Slm, NDArray[np.floating]], NDArray[np.float32]]:
    return lambda slm, rows: head_probabilities(slm, rows.astype(np.float32))


@pytest.mark.parametrize("name", ["5", "9", "10", "13"])
def test_what_learns_from_a_pool_embeds_a_bounded_part_of_it(
    name: str, source: Run, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 160  # of 200; enough for clusters of up to 20 rows
    read: list[str] = []

    def counted(slm: Slm, texts: Sequence[str]) -> list[Ids]:
        read.extend(texts)
        return token_ids(slm, texts)

    monkeypatch.setattr(simulated, "_ENOUGH_ROWS", most)
    for bench in (decoder, probes):
        monkeypatch.setattr(bench, "token_ids", counted)
    evidence = Evidence(source)
    assert max(float(source.open(one).tensors["sizes"].max()) for one in evidence.targets) <= most / 8
    assert found_by(ALL[name], evidence).figures
    auxiliary, controls = (set(half.texts) for half in evidence.halves)
    assert len(auxiliary) == AUXILIARY
    # The same part for both silos.
    assert len(auxiliary & set(asked)) == most
    assert not controls & set(asked)
    assert len(auxiliary & set(read)) == (0 if name == "13" else most)
    # As many control rows as are behind the centroids, of both silos at most.
    assert len(controls & set(read)) <= 80


def test_a_large_cluster_has_the_rows_that_its_probe_needs() -> None:
    """`split` takes a quarter of the rows, twice the largest cluster, whatever the bound is."""
    for largest in (1.0, 10.3, 42.7, 4096.0, 5000.0, 12345.6):
        rows = simulated.enough_rows(largest)
        assert rows >= 2**15
        _, held = simulated.split(rows, largest, np.random.default_rng(0))
        assert len(held) >= 2 * largest
    assert simulated.enough_rows(5000.0) == 40_000


def test_no_attack_embeds_a_text_twice_for_one_encoder(source: Run, asked: list[str]) -> None:
    evidence = Evidence(source)
    for attack in (membership.ATTACK, probes.BAG_ATTACK, subtraction.ATTACK):
        found_by(attack, evidence)
    encoders = len({str(source.open(one).info["encoder"]) for one in evidence.targets})
    assert max(Counter(asked).values()) <= encoders


def texts_of(labels: str) -> Texts:
    names = tuple(map(str, range(len(labels))))
    return Texts(names, names, tuple(labels))


def test_some_of_few_texts_are_all_of_them() -> None:
    texts = texts_of("abab")
    assert some_of(texts, 4, 0) is texts
    assert some_of(texts, 9, 0) is texts


def test_some_of_many_texts_are_a_random_part_in_their_order() -> None:
    texts = texts_of("a" * 5000 + "b" * 5000)
    part = some_of(texts, 1000, 7)
    rows = [int(one) for one in part.ids]
    assert len(part) == 1000
    assert rows == sorted(set(rows))
    assert [texts.labels[row] for row in rows] == list(part.labels)
    # Of a hypergeometric count five standard deviations: sqrt(1000 / 4 * 0.9) each.
    assert abs(part.labels.count("a") - 500) < 75
    assert abs(np.mean(rows) - 5000) < 5 * 10_000 / np.sqrt(12 * 1000)
    assert some_of(texts, 1000, 7).ids == part.ids
    assert some_of(texts, 1000, 8).ids != part.ids
    assert set(part.ids) < set(some_of(texts, 1500, 7).ids)


def test_a_rare_label_is_in_every_part() -> None:
    """A shadow knows no label of which no text is left, and a probe none of fewer than 16."""
    part = some_of(texts_of("a" * 50_000 + "b" * 20 + "c" * 3), 500, 1)
    counts = Counter(part.labels)
    assert counts["c"] == 3
    assert 16 <= counts["b"] <= 20
    assert len(part) == 500
    # More labels than there is room for.
    many = Texts.joined([texts_of(letter * 10) for letter in "abcdefgh"])
    assert len(some_of(many, 40, 1)) == 40
