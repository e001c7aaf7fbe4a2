"""Rows: the configured files or builtin corpora -> texts and labels, spread over silos.

All randomness comes from `federation.seed`, one stream a purpose, so that for example another `test_rows`
does not move a training row to another silo. What a file may look like is said in `_tables`, what the builtin
corpora are in `_builtin`. This room reads the sources it is told to, keeps nothing, and knows no models.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from securefl._builtin import PREFIX, in_test_part, load_builtin, normalise, unique
from securefl._tables import Table, read_table, shown
from securefl.config import Config, parse_config
from securefl.data_terms import ColumnSplit, Data, DirichletSplit
from securefl.errors import ConfigError, DataError
from securefl.messages import NAME

DRAWS = 100
MAX_SILOS = 256
# Names that a run's folders use for others than silos, and for files beside the silos' folders.
RESERVED = ("server", "sums", "pool.jsonl")
# One stream of random numbers for each purpose, told apart by the spawn key of the seed.
_TRAIN, _TEST, _POOL, _SPLIT, _VALIDATION = range(5)


@dataclass(frozen=True, repr=False, eq=False)
class Rows:
    """Labelled texts. ids, texts: length n; labels: (n,) int64, indices into `Corpus.labels`.

    units: length n, whose each row is; empty where every row is a unit of privacy by itself. languages:
    length n, or empty where `data.language` is not set. Two texts of a pair are one, with `PAIR` between.
    """

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    labels: NDArray[np.int64]
    units: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.texts) == len(self.labels):
            raise ValueError("ids, texts and labels differ in length")
        if self.units and len(self.units) != len(self.ids):
            raise ValueError("not every row has a unit")
        if self.languages and len(self.languages) != len(self.ids):
            raise ValueError("not every row has a language")

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Rows({len(self)})"

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> Rows:
        """The rows at `indices`, in that order."""
        picked = np.asarray(indices, dtype=np.int64)
        where = picked.tolist()
        return Rows(
            tuple(self.ids[i] for i in where),
            tuple(self.texts[i] for i in where),
            self.labels[picked],
            tuple(self.units[i] for i in where) if self.units else (),
            tuple(self.languages[i] for i in where) if self.languages else (),
        )

    def by_unit(self) -> list[NDArray[np.int64]]:
        """The indices of each unit's rows, in the order in which the units first occur."""
        return _by_unit(self.units) if self.units else [np.array([i]) for i in range(len(self))]


@dataclass(frozen=True)
class Corpus:
    """What the silos and the auditor work on; all rows stand in a seeded random order.

    labels: sorted, the index is the label id. train, validation: a silo's rows, disjoint; the union over all
    silos is the train source (or the `train_rows` drawn of it). test: no text of the train source; the
    `test_duplicates` rows that had one were dropped. pool: at most `data.pool_rows` rows that are
    nobody's, which are train rows not drawn, or else test rows.
    """

    labels: tuple[str, ...]
    train: Mapping[str, Rows]
    validation: Mapping[str, Rows]
    test: Rows
    pool: Rows
    test_duplicates: int = 0

    @property
    def shared_units(self) -> int:
        """How many units have rows in more than one silo."""
        silos = Counter(
            unit for name in self.train for unit in {*self.train[name].units, *self.validation[name].units}
        )
        return sum(number > 1 for number in silos.values())


def _by_unit(units: Sequence[str]) -> list[NDArray[np.int64]]:
    places: dict[str, list[int]] = {}
    for index, unit in enumerate(units):
        places.setdefault(unit, []).append(index)
    return [np.array(rows, np.int64) for rows in places.values()]


def load_corpus(config: Config) -> Corpus:
    """Read the configured sources and spread the training rows over silos. Deterministic in the seed.

    Raises DataError with one sentence for anything that cannot be used as it stands.
    """
    data, seed = config.data, config.federation.seed
    train_table, test_table = _read(data)
    labels = data.labels or tuple(sorted(set(train_table.labels)))
    if len(labels) < 2:
        raise DataError(f"{data.train}: every row has the same label; at least two classes are needed")
    where = "the training rows" if data.labels is None else "data.labels"
    train, test = _encode(train_table, labels, where), _encode(test_table, labels, where)

    trained = {normalise(text) for text in train.texts}
    kept = [row for row, text in enumerate(test.texts) if normalise(text) not in trained]
    if not kept:
        raise DataError(f"{data.test}: every row is also one of {data.train}; hold rows apart for the test")
    duplicates = len(test) - len(kept)
    test = test.take(kept)
    test = test.take(_draw(test.labels, data.test_rows, _rng(seed, _TEST), f"{data.test}: data.test_rows"))

    drawn = _draw(train.labels, data.train_rows, _rng(seed, _TRAIN), f"{data.train}: data.train_rows")
    if len(np.unique(train.labels[drawn])) < 2:
        raise DataError(f"{data.train}: the {len(drawn)} rows drawn have one label; raise data.train_rows")
    groups = [train_table.groups[row] for row in drawn.tolist()] if train_table.groups else []
    parts = _split(train.take(drawn), groups, data, _rng(seed, _SPLIT))

    fitted: dict[str, Rows] = {}
    validation: dict[str, Rows] = {}
    for name, part in parts.items():
        rows = train.take(drawn[part])
        if data.unit is not None and len(rows.by_unit()) < 2:
            raise DataError(_one_unit(data, f"silo {name}"))
        fitted[name], validation[name] = _hold_apart(rows, data.validation, seed)
    pool = _pool(train, drawn, test, data.pool_rows, _rng(seed, _POOL))
    return Corpus(labels, fitted, validation, test, pool, duplicates)


def load_texts(train: str, test: str) -> list[str]:
    """All texts of two sources in a seeded order, none twice, for studies that ask for nothing else.

    train, test: each a file or the name of a builtin corpus, as in `Data`; what `load_corpus` refuses is
    refused here.
    """
    split = {"by": "dirichlet", "silos": 2, "alpha": 1e6}
    data = {"train": train, "test": test, "pool_rows": 0, "split": split}
    corpus = load_corpus(parse_config({"federation": {"method": "standalone"}, "data": data}))
    parts = [*corpus.train.values(), *corpus.validation.values(), corpus.test]
    texts = list(dict.fromkeys(text for part in parts for text in part.texts))
    return [texts[row] for row in np.random.default_rng(0).permutation(len(texts))]


def load_silo(config: Config) -> tuple[tuple[str, ...], Rows, Rows]:
    """One silo's own rows: the labels of the federation, the rows it trains on, those it keeps from training.

    All of `data.train` is the silo's, so `data.split` and `data.test` say nothing here. Raises DataError, and
    ConfigError where `data.labels` is not set: a class that this silo lacks must not shrink its model's head.
    """
    data = config.data
    if data.labels is None:
        raise ConfigError("data.labels: is required for a client; list all labels of the federation, sorted")
    rows = _encode(_load(data.train, data, None, test=False), data.labels, "data.labels")
    if len(rows) < 2:
        raise DataError(
            f"{data.train}: has {len(rows)} row; at least two are needed, one is kept from training"
        )
    if len(rows.by_unit()) < 2:
        raise DataError(_one_unit(data, "the silo"))
    if data.train_rows is not None and config.privacy.claimed:
        raise ConfigError(
            "data.train_rows: which rows are drawn depends on all rows, so no claim about one would hold; "
            "leave it out, or put the rows to use in a file of their own"
        )
    rng = _rng(config.federation.seed, _TRAIN)
    drawn = _draw(rows.labels, data.train_rows, rng, f"{data.train}: data.train_rows")
    fitted, held = _hold_apart(rows.take(drawn), data.validation, config.federation.seed)
    return data.labels, fitted, held


def _one_unit(data: Data, whose: str) -> str:
    return (
        f'{data.train}: {whose} has rows of one "{data.unit}" only; at least two are needed, one of them is '
        "kept from training"
    )


def _hold_apart(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """The rows to train on, and about a `share` kept from training: at least one unit of each.

    A hash of the seed and the unit (of a row: its text) decides, each by itself: were it a draw among all, a
    row that comes or goes would move others between training and validation, and no claim about one row
    would hold for a silo's data. Only where all would be on one side, one with the outermost hash changes it,
    which moves one more unit where that one comes or goes.
    """
    units = rows.by_unit()
    keys = [_place(seed, rows.units[unit[0]] if rows.units else rows.texts[unit[0]]) for unit in units]
    order = sorted(range(len(units)), key=lambda number: keys[number])
    held = min(max(1, sum(key < share for key in keys)), len(units) - 1)
    kept = set(order[:held])
    return (
        rows.take(np.concatenate([unit for number, unit in enumerate(units) if number not in kept])),
        rows.take(np.concatenate([unit for number, unit in enumerate(units) if number in kept])),
    )


def _place(seed: int, unit: str) -> float:
    """A number in [0, 1) that depends on both alone."""
    digest = hashlib.sha256(
        f"{seed}/{_VALIDATION}/".encode() + unit.encode("utf-8", "surrogatepass")
    ).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def dirichlet_split(
    labels: NDArray[np.int64], silos: int, alpha: float, min_rows: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Label-skewed partition of rows: for each class, its shares over the silos are ~ Dir(alpha, ..., alpha).

    labels: (n,). Returns one ascending index array a silo; together they hold every row once. Drawn again, at
    most 100 times, until every silo has `min_rows` rows. The skew of Hsu, Qi and Brown 2019
    (arXiv:1909.06335), drawn class by class as in Yurochkin et al. 2019 (arXiv:1905.12022).

    Raises DataError where the minimum cannot be or was not reached.
    """
    if len(labels) < silos * min_rows:
        raise DataError(
            f"data.split: {len(labels)} training rows cannot give {silos} silos {min_rows} rows each; "
            "take more rows, or lower silos or min_rows"
        )
    reached = 0
    for _ in range(DRAWS):
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(silos)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(silos, alpha))
            cuts = np.floor(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
            for part, piece in zip(parts, np.split(rows, cuts), strict=True):
                part.append(piece)
        merged = [np.sort(np.concatenate(part)) for part in parts]
        smallest = min(len(part) for part in merged)
        if smallest >= min_rows:
            return merged
        reached = max(reached, smallest)
    raise DataError(
        f"data.split: in {DRAWS} draws the smallest silo had at most {reached} rows and min_rows is "
        f"{min_rows}; raise alpha, or lower silos or min_rows"
    )


def equal_dirichlet_split(
    labels: NDArray[np.int64], silos: int, alpha: float, rows: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Silos of one size and skewed labels: of each silo, the classes' shares are ~ Dir(alpha, ..., alpha).

    labels: (n,). Returns one ascending index array of `rows` rows a silo; no row is in two, and some are in
    none. As in Hsu, Qi and Brown 2019 (arXiv:1909.06335): row by row the class is drawn by the silo's shares,
    and a class that has run out no more. Raises DataError where there are too few rows.
    """
    if len(labels) < silos * rows:
        raise DataError(
            f"data.split: {len(labels)} training rows cannot give {silos} silos {rows} rows each; take more "
            "rows, or lower silos or rows"
        )
    classes = [rng.permutation(np.flatnonzero(labels == label)).tolist() for label in np.unique(labels)]
    parts = []
    for _ in range(silos):
        shares = rng.dirichlet(np.full(len(classes), alpha))
        part: list[int] = []
        while len(part) < rows:
            left = shares * [len(of) > 0 for of in classes]
            if not left.any():  # the silo has no taste for what is left
                left = np.array([float(len(of)) for of in classes])
            part.append(classes[rng.choice(len(classes), p=left / left.sum())].pop())
        parts.append(np.sort(np.array(part, np.int64)))
    return parts


def _rng(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=purpose)))


def _draw(
    labels: NDArray[np.int64], count: int | None, rng: np.random.Generator, asked_by: str
) -> NDArray[np.int64]:
    """`count` row indices in random order, each class in its share of the rows (largest remainder)."""
    total = len(labels)
    if count is None:
        return rng.permutation(total).astype(np.int64)
    if count > total:
        raise DataError(f"{asked_by} asks for {count} rows and there are {total}; lower it")
    classes, sizes = np.unique(labels, return_counts=True)
    quota, remainder = np.divmod(sizes * count, total)
    quota[np.argsort(-remainder, kind="stable")[: count - int(quota.sum())]] += 1
    picked = [
        rng.permutation(np.flatnonzero(labels == label))[:size]
        for label, size in zip(classes, quota, strict=True)
    ]
    return rng.permutation(np.concatenate(picked)).astype(np.int64)


def _pool(train: Rows, drawn: NDArray[np.int64], test: Rows, most: int, rng: np.random.Generator) -> Rows:
    owned = {normalise(train.texts[row]) for row in drawn.tolist()}
    left: list[int] = []
    for row in np.setdiff1d(np.arange(len(train)), drawn).tolist():
        key = normalise(train.texts[row])
        if key not in owned:
            owned.add(key)
            left.append(row)
    nobodys = train.take(left) if left else test
    return nobodys.take(rng.permutation(len(nobodys))[:most])


def _split(
    rows: Rows, groups: Sequence[str], data: Data, rng: np.random.Generator
) -> dict[str, NDArray[np.int64]]:
    split = data.split
    if isinstance(split, DirichletSplit):
        try:
            units = rows.by_unit()
            first = rows.labels[[unit[0] for unit in units]]
            # With units their first rows' labels decide, and `min_rows` and `rows` count units.
            if split.rows is None:
                drawn = dirichlet_split(first, split.silos, split.alpha, split.min_rows, rng)
            else:
                drawn = equal_dirichlet_split(first, split.silos, split.alpha, split.rows, rng)
            parts = [np.sort(np.concatenate([units[unit] for unit in part])) for part in drawn]
        except DataError as error:
            raise DataError(f"{data.train}: {error}") from error
        return {f"silo-{number}": part for number, part in enumerate(parts, start=1)}
    return _by_column(groups, split, data.train)


def _by_column(groups: Sequence[str], split: ColumnSplit, name: str) -> dict[str, NDArray[np.int64]]:
    """Row indices of each silo, by the slug of the column's value."""
    column = f'{name}: column "{split.column}"'
    values = sorted(set(groups))
    if not 2 <= len(values) <= MAX_SILOS:
        raise DataError(f"{column} has {len(values)} different values; a split needs 2 to {MAX_SILOS}")
    slugs: dict[str, str] = {}
    for value in values:
        slug = _slug(value)
        if re.fullmatch(NAME, slug) is None or slug in RESERVED:
            raise DataError(f"{column}: the value {shown(value)} gives no usable silo name; rename it")
        if slug in slugs:
            raise DataError(
                f"{column}: the values {shown(slugs[slug])} and {shown(value)} "
                f"both give the silo name {slug}; rename one"
            )
        slugs[slug] = value
    array = np.array(groups, dtype=object)
    parts = {slug: np.flatnonzero(array == slugs[slug]) for slug in sorted(slugs)}
    for slug, part in parts.items():
        if len(part) < split.min_rows:
            raise DataError(
                f"{column}: silo {slug} has {len(part)} rows and data.split.min_rows is {split.min_rows}; "
                "give it more rows or lower min_rows"
            )
    return parts


def _slug(value: str) -> str:
    """A silo's name (`messages.NAME`): accents dropped, lower case, what is left out as hyphens."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", value) if not unicodedata.combining(c))
    return re.sub(r"[^a-z0-9._-]+", "-", plain.casefold()).strip("-._")[:64]


def _encode(table: Table, labels: tuple[str, ...], where: str) -> Rows:
    index = {label: number for number, label in enumerate(labels)}
    for place, label in zip(table.places, table.labels, strict=True):
        if label not in index:
            raise DataError(
                f"{table.name}: {place}: the label {shown(label)} does not occur in {where}; "
                "remove the row or add the label there"
            )
    encoded = np.array([index[label] for label in table.labels], dtype=np.int64)
    return Rows(tuple(table.ids), tuple(table.texts), encoded, tuple(table.units), tuple(table.languages))


def _read(data: Data) -> tuple[Table, Table]:
    """Both sources, with ids that differ: two files may have the same stem."""
    if data.test is None:
        raise ConfigError("data.test: is required here; name rows that no silo trains on")
    files = [Path(source) for source in (data.train, data.test) if not source.startswith(PREFIX)]
    if len(files) == 2 and all(map(os.path.exists, files)) and files[0].samefile(files[1]):
        raise DataError(f"{data.test}: is data.train and data.test at once; hold rows apart for the test")
    group = data.split.column if isinstance(data.split, ColumnSplit) else None
    train = _load(data.train, data, group, test=False)
    test = _load(data.test, data.model_copy(update={"unit": None}), None, test=True)
    if not set(train.ids).isdisjoint(test.ids):
        train = replace(train, ids=[f"train/{row}" for row in train.ids])
        test = replace(test, ids=[f"test/{row}" for row in test.ids])
    return train, test


def _load(source: str, config: Data, group: str | None, *, test: bool) -> Table:
    if not source.startswith(PREFIX):
        return read_table(
            Path(source), config.text, config.label, group, config.unit,
            pair=config.pair, language=config.language,
        )  # fmt: skip
    for key, column in (("unit", config.unit), ("pair", config.pair), ("language", config.language)):
        if column is not None:
            raise DataError(f'{source}: has no column "{column}", so data.{key} cannot name it; leave it out')
    if group is not None:
        raise DataError(f'{source}: has no column "{group}"; set data.split.by to "dirichlet"')
    documents = [d for d in unique(load_builtin(source)) if in_test_part(d.text) == test]
    ids, texts, labels = zip(*documents, strict=True)
    return Table(source, ids, texts, labels, (), ids)
