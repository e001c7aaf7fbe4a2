"""How the tests read the vectors of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from securefl.errors import SecureflError

FOLDER = Path(__file__).parent
Case = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """A file's content."""
    return dict(json.loads((FOLDER / name).read_text()))


def cases_of(file: dict[str, Any]) -> pytest.MarkDecorator:
    """A test for each case of a file."""
    return pytest.mark.parametrize("case", file["cases"], ids=lambda case: case["name"])


def seeds_of(file: dict[str, Any]) -> dict[str, dict[str, bytes]]:
    """The raw private keys of its identities, by label."""
    return {
        label: {half: bytes.fromhex(seed) for half, seed in one["seeds"].items()}
        for label, one in file["identities"].items()
    }


@contextmanager
def refused(case: Case) -> Iterator[None]:
    """By the exception that the case names, and by none derived from it."""
    with pytest.raises(SecureflError) as caught:
        yield
    assert type(caught.value).__name__ == case["error"]
