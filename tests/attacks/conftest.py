"""Whole audits in tests read texts with little effort, and without the real language model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks.bench import decoder, inversion, memorisation, tokens, zero_shot


@pytest.fixture(scope="session", autouse=True)
def _little_effort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What these attacks reach with theirs is the business of test_bench_inversion."""
    nothing: Path = tmp_path_factory.mktemp("no-language-model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "BUDGET", 50)
        patch.setattr(inversion, "BUDGET", 50)
        patch.setattr(inversion, "STEPS", 10)
        patch.setattr(memorisation, "CANARIES", 80)
        patch.setattr(zero_shot, "MODEL", str(nothing / "none"))
        patch.setattr(tokens, "_LANGUAGE_MODEL", str(nothing / "none"))
        yield
