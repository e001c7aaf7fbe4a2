"""The silos' small model: a text classifier of an encoder, mean pooling and a linear head.

What it computes, which of its weights train and travel, and how it is written to a folder. Loading one by
name is the matter of `models`. This room must not touch rows, keys, policies or training.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from securefl._adapter import add_adapter, merged
from securefl._model_files import appearing, quiet
from securefl.config import Lora
from securefl.data_terms import PAIR
from securefl.errors import ModelError
from securefl.release import Tensors, check_tensors

NOTE = "securefl.json"  # beside the weights: what transformers has no place for
SCHEMA = "securefl.model/1"
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

        length: to pad to instead, no less than the longest. The two texts of a pair (`data_terms.PAIR`
        between them) are joined as the tokenizer does it, and the longer one is cut first. A text without
        any token (an empty one, where the tokenizer adds none of its own) is one end-of-text.
        """
        encoded = self._encode(texts, length)
        empty = encoded["attention_mask"].sum(1) == 0
        if empty.any():
            end = self.tokenizer.eos_token or self.tokenizer.pad_token
            filled = [end if none else text for text, none in zip(texts, empty.tolist(), strict=True)]
            encoded = self._encode(filled, length)
        return {k: v.to(self.device) for k, v in encoded.items() if k in self._arguments}

    def _encode(self, texts: Sequence[str], length: int | None) -> Mapping[str, Tensor]:
        paired = np.array([PAIR in text for text in texts], bool)
        if length is None and paired.any() and not paired.all():
            length = max(self.lengths(texts))  # one for both kinds
        found: dict[str, Tensor] = {}
        for chosen in filter(len, (np.flatnonzero(~paired), np.flatnonzero(paired))):
            encoded = self._tokenized(
                [texts[i] for i in chosen.tolist()],
                padding=True if length is None else "max_length",
                max_length=self.max_length if length is None else length,
                return_tensors="pt",
            )
            for name, rows in encoded.items():
                found.setdefault(name, rows.new_zeros((len(texts), rows.shape[1])))[chosen] = rows
        return found

    def _tokenized(self, texts: Sequence[str], **terms: Any) -> Mapping[str, Any]:
        """The tokenizer's answer on single texts, or on pairs: of each the same number of parts."""
        parts = map(list, zip(*(text.split(PAIR, 1) for text in texts), strict=True))
        answer: Mapping[str, Any] = self.tokenizer(*parts, truncation=True, **terms)
        return answer

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """How many tokens `tokenize` gives each text, at least 1."""
        found = [0] * len(texts)
        for pair in (False, True):
            chosen = [i for i, text in enumerate(texts) if (PAIR in text) is pair]
            if chosen:
                ids = self._tokenized([texts[i] for i in chosen], max_length=self.max_length)["input_ids"]
                for i, one in zip(chosen, ids, strict=True):
                    found[i] = max(1, len(one))
        return found

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

    # --- the layers of FedKC's composition: 0 is the embedding layer, p the output of the p-th encoder layer

    def _encoder_layers(self) -> tuple[nn.Module, str, nn.ModuleList]:
        """The list of encoder layers, the module that has it, and under which name."""
        count = getattr(self.model.config, "num_hidden_layers", None)
        for parent in self.model.base_model.modules():
            for name, child in parent.named_children():
                if isinstance(child, nn.ModuleList) and len(child) == count:
                    return parent, name, child
        raise ModelError(
            f"{self.name}: a {self.model.config.model_type} model has no list of encoder layers; use a "
            'BERT-like encoder, or fedkc.compose = "pooled" or "embeddings"'
        )

    def require_layer(self, number: int) -> None:
        """Raises ModelError for a layer that this encoder lacks, or that cannot be read on its own."""
        self._embedding_layer()
        layers = len(self._encoder_layers()[2]) if number else 0
        if not 0 <= number <= layers:
            raise ModelError(
                f"{self.name}: fedkc.compose is layer {number}, and this encoder has the layers 0 to {layers}"
            )

    @contextmanager
    def _only(self, layers: slice) -> Iterator[None]:
        """With these encoder layers alone, so that no other one is computed."""
        if layers == slice(0, None):
            yield
            return
        parent, name, every = self._encoder_layers()
        setattr(parent, name, nn.ModuleList(every[layers]))
        try:
            yield
        finally:
            setattr(parent, name, every)

    def layer(self, batch: Mapping[str, Tensor], number: int) -> Tensor:
        """(B, S, e): what layer `number` puts out, dropout off; e = d for most encoders.

        0 is the embedding layer after its LayerNorm, p the p-th encoder layer, with no final norm of the
        encoder. Padding positions hold whatever the layers make of padding. Raises ModelError without such a
        layer.
        """
        self.require_layer(number)
        training = self.model.training
        self.model.eval()
        try:
            if number == 0:
                return self._embedded(batch)
            read: list[Tensor] = []

            def keep(_module: nn.Module, _args: Any, output: Any) -> None:
                read.append(output if isinstance(output, Tensor) else output[0])

            hook = self._encoder_layers()[2][number - 1].register_forward_hook(keep)
            try:
                with self._only(slice(0, number)):
                    self.model.base_model(**self.inputs(batch))
            finally:
                hook.remove()
            return read[0]
        finally:
            self.model.train(training)

    def _embedded(self, batch: Mapping[str, Tensor]) -> Tensor:
        layer = self._embedding_layer()
        given = {**batch, **self._positions(batch["input_ids"].shape), "mask": batch["attention_mask"]}
        takes = inspect.signature(layer.forward).parameters
        output: Tensor = layer(**{k: v for k, v in given.items() if k in takes})
        return output

    def from_layer(self, e: Tensor, mask: Tensor, number: int) -> Tensor:
        """(B, d): pooled vectors of the encoder above layer `number`, run on what that layer would put out.

        e: (B, S, e). mask: (B, S), 0 or 1. The encoder runs on zeros and a hook puts `e` in place of what the
        layer says, with the layers below it left out, so any architecture with an embedding layer and a list
        of layers serves; the gradient flows through `e`. Raises ModelError.
        """
        self.require_layer(number)
        ran: list[bool] = []

        def replace(_module: nn.Module, _args: Any, output: Any) -> Any:
            ran.append(True)
            return e if isinstance(output, Tensor) else (e, *output[1:])

        layer = self._encoder_layers()[2][number - 1] if number else self._embedding_layer()
        hook = layer.register_forward_hook(replace)
        try:
            # What enters the embedding layer may be narrower than what the encoder's layers put out.
            width = self.model.base_model.get_input_embeddings().weight.shape[1]
            zeros = torch.zeros((*e.shape[:2], width), dtype=e.dtype, device=e.device)
            inputs = {"inputs_embeds": zeros, "attention_mask": mask.long(), **self._positions(e.shape)}
            with self._only(slice(max(number - 1, 0), None)):
                hidden = self._run(inputs)
        finally:
            hook.remove()
        if not ran:
            raise ModelError(f"{self.name}: its encoder does not run on given layer outputs")
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

    def head_names(self) -> tuple[str, ...]:
        """Of these the names of the linear head's."""
        head = {id(parameter) for parameter in self.classifier.parameters()}
        return tuple(name for name, parameter in self._trained().items() if id(parameter) in head)

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
        if folder.exists() and not (folder / NOTE).is_file():
            raise ModelError(f"{folder} exists and is not a model of this package; name a new folder")
        snippet = usage_snippet(self.labels, max_length=self.max_length)
        readme = card.rstrip() + "\n" + ("" if snippet in card else f"\n## Use\n\n{snippet}")
        note = {
            "schema": SCHEMA,
            "pooling": "mean of the token logits over the attention mask",
            "max_length": self.max_length,
            "train_embeddings": self.train_embeddings,
        }
        with appearing(folder) as draft, quiet():
            (self.model if self.lora is None else merged(self.model)).save_pretrained(draft)
            self.tokenizer.save_pretrained(draft)
            (draft / "README.md").write_text(readme, encoding="utf-8")
            (draft / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


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
