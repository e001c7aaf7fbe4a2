"""Ten times the mutants of tests/test_mutants.py, from fresh seeds; `make fuzz` runs it by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.test_mutants import prepare, require_complete, run


def test_100_000_mutants_are_refused_in_our_own_words_or_have_one_encoding(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = prepare(tiny_encoder, tiny_data, tmp_path)
    try:
        run(campaign, 100_000, repeatable=False)
    finally:
        with capsys.disabled():
            sys.stdout.write(f"\n{campaign.table()}")
    require_complete(campaign)
