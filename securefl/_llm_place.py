"""Where a language model goes: on which device, in which precision, and whether its weights fit there.

Weights are counted from the headers of their files, so that a model that does not fit is said before it is
loaded. Nothing here loads weights, and no other room asks what devices there are for a language model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from gguf import GGUFReader
from safetensors import safe_open

from securefl.errors import ModelError

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes, or "max"; psutil sees the whole machine
_AUTO = ("cuda", "mps", "cpu")


class NoRoom(ModelError):
    """The weights do not fit into the memory that is available."""


@dataclass(frozen=True)
class Place:
    """Where weights go and as what. bytes_each: all the memory that one of them will cost its user there."""

    device: torch.device
    dtype: torch.dtype
    bytes_each: int


PLAIN = Place(torch.device("cpu"), torch.float32, 4)


def device_of(choice: str) -> torch.device:
    """The device of crosslm.device: `auto` is CUDA, else MPS, else the CPU. Raises ModelError."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if choice == "auto":
        return torch.device(next(name for name in _AUTO if there[name]))
    if not there.get(choice, False):
        raise ModelError(f"crosslm.device is {choice}, and there is none here; write cpu or auto")
    return torch.device(choice)


def precision(device: torch.device) -> torch.dtype:
    """What weights that do not train are kept in: bfloat16 on CUDA, where memory is read twice as fast."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads of a folder: the one, or those of the index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [folder / name for name in sorted(names)]


def count_weights(files: Sequence[Path]) -> int:
    """Numbers in all tensors of safetensors and GGUF files, from their headers; errors are the readers'."""
    total = 0
    for file in files:
        if file.suffix == ".gguf":
            total += sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
        else:
            with safe_open(file, framework="np") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def available(device: torch.device) -> int:
    """Bytes that are free on a device: of all GPUs together for CUDA, of main memory for the CPU and MPS."""
    if device.type == "cuda":
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    free = int(psutil.virtual_memory().available)
    try:
        return min(free, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return free


def require_room(name: str, weights: int, place: Place) -> None:
    """Raises NoRoom where `weights` numbers do not fit into what is available."""
    needed, free = weights * place.bytes_each, available(place.device)
    if needed > free:
        raise NoRoom(
            f"{name}: the language model needs {needed / 2**30:.2f} GiB on {place.device.type} "
            f"({weights:,} weights, {place.bytes_each} bytes for each and what training keeps of it) and "
            f"{free / 2**30:.2f} GiB are available; take a smaller model or a larger machine"
        )


def device_map(weights: int, place: Place) -> str | dict[str, int] | None:
    """transformers' `device_map`: None for main memory, the first GPU, or `auto` over several GPUs.

    Layers are spread over GPUs (by accelerate) only where the first one is too small: what passes between
    them costs time.
    """
    if place.device.type != "cuda":
        return None
    one = torch.cuda.mem_get_info(0)[0]
    if torch.cuda.device_count() > 1 and weights * place.bytes_each > one:
        return "auto"
    return {"": 0}
