"""Random two-layer models and small data sets, written to a folder in a fraction of a second.

They have the file formats and the classes of the real ones, so the tests that use them run the real loading,
training and saving; only what a trained model knows is missing. Nothing here is downloaded.
"""

from __future__ import annotations

import csv
import json
import string
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

MAX_POSITIONS = 128

# Words that belong to one label each; a label beyond the second gets words of its own made from its name.
_TOPICS = (
    ("goal", "match", "team", "player", "coach", "league", "score", "cup", "win", "season"),
    ("bank", "market", "price", "profit", "share", "trade", "cost", "growth", "rate", "stock"),
    ("film", "actor", "music", "song", "award", "star", "show", "album", "band", "screen"),
    ("vote", "law", "party", "minister", "election", "tax", "policy", "leader", "speech", "poll"),
    ("phone", "software", "game", "network", "computer", "device", "user", "web", "data", "chip"),
)
_COMMON = (
    *("the", "a", "an", "of", "to", "in", "on", "for", "with", "and", "or", "is", "was", "are", "were", "it"),
    *("this", "that", "he", "she", "they", "we", "said", "has", "had", "will", "would", "new", "year", "day"),
    *(
        "people",
        "time",
        "world",
        "good",
        "bad",
        "great",
        "not",
        "very",
        "from",
        "by",
        "at",
        "as",
        "be",
        "but",
    ),
)
WORDS: tuple[str, ...] = (*_COMMON, *(word for topic in _TOPICS for word in topic))


def wordpiece(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer: the words, and all of ASCII, so any ASCII text tokenises."""
    characters = [c for c in map(chr, range(33, 127)) if not c.isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *("##" + c for c in characters)]
    pieces += [word for word in dict.fromkeys(words) if word not in pieces]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges but for the common words: about 200 to 300 tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    pieces = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in _COMMON[:20]:
        left = "Ġ"  # how the byte-level alphabet writes the space before a word
        for letter in word:
            if (left, letter) not in merges:
                merges.append((left, letter))
                pieces[left + letter] = len(pieces)
            left += letter
    tokenizer = Tokenizer(BPE(pieces, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Write a model and its tokenizer as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_encoder(
    folder: Path, *, layers: int = 2, width: int = 32, vocabulary: Sequence[str] | None = None, seed: int = 0
) -> Path:
    """A random BERT encoder over `vocabulary` (words; WORDS unless given), as a Hugging Face folder."""
    tokenizer = wordpiece(WORDS if vocabulary is None else vocabulary)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(
            BertConfig(
                vocab_size=len(tokenizer),
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=2,
                intermediate_size=2 * width,
                max_position_embeddings=MAX_POSITIONS,
                initializer_range=0.2,  # larger than BERT's: an untrained layer then still tells words apart
            ),
            add_pooling_layer=False,
        )
    return save(model, tokenizer, folder)


ARCHITECTURES = (
    *("bert", "distilbert", "roberta", "xlm-roberta", "electra", "albert", "modernbert"),
    *("gpt2", "llama"),
)


def make_architecture(folder: Path, architecture: str, seed: int = 0) -> Path:
    """A random two-layer model of width 32 of one of ARCHITECTURES, without a head, as a Hugging Face folder.

    The tokenizer is WordPiece, and for gpt2 and llama byte-level; that of gpt2 has no padding token.
    """
    decoder = architecture in ("gpt2", "llama")
    tokenizer = byte_level() if decoder else wordpiece(WORDS)
    names = {
        "distilbert": "DistilBert",
        "xlm-roberta": "XLMRoberta",
        "modernbert": "ModernBert",
        "gpt2": "GPT2",
    }
    name = names.get(architecture, architecture.capitalize())
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 64, "max_position_embeddings": MAX_POSITIONS}
    special = {"bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")
    match architecture:
        case "distilbert":
            terms = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 128}
        case "gpt2":
            tokenizer.pad_token = None
            terms = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "eos_token_id": 1}
        case "electra" | "albert":
            terms = {**sizes, **more, "embedding_size": 16, "pad_token_id": 0}
        case "llama":
            terms = {**sizes, **more, "num_key_value_heads": 1, "eos_token_id": 1, "pad_token_id": 0}
        case _:
            terms = {**sizes, **more, **special}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        bare = getattr(transformers, f"{name}Model")
        model = bare(config(vocab_size=len(tokenizer), initializer_range=0.1, **terms))
        for parameter in model.parameters():  # what starts at zero or one would hide a wrong gradient
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return save(model, tokenizer, folder)


def make_llm(folder: Path, *, layers: int = 2, width: int = 32, seed: int = 0) -> Path:
    """A random Llama-style causal language model with a byte-level tokenizer, as a Hugging Face folder."""
    tokenizer = byte_level()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=256,
                initializer_range=0.1,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                tie_word_embeddings=True,
            )
        )
    return save(model, tokenizer, folder)


def make_gguf(folder: Path, seed: int = 0) -> Path:
    """The model of `make_llm` as a folder with one float32 GGUF file, as llama.cpp's converter writes it."""
    source = make_llm(folder.with_name(folder.name + "-source"), seed=seed)
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    weights = load_file(source / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_token_types([3, 3] + [1] * (config["vocab_size"] - 2))  # 3 is control, 1 is normal
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    for name, array in weights.items():
        stored = array
        if name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):  # the halves of a rotary pair lie side by side there
            stored = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def label_words(labels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The words that only rows of a label contain."""
    invented = {
        label: tuple(f"{label.lower()}{letter}" for letter in string.ascii_lowercase[:10]) for label in labels
    }
    return {label: _TOPICS[i] if i < len(_TOPICS) else invented[label] for i, label in enumerate(labels)}


def make_texts(
    rows: int, labels: Sequence[str] = ("a", "b"), seed: int = 0, length: int = 8
) -> list[tuple[str, str]]:
    """`rows` pairs (text, label), labels in turn: three in four of a text's words are its label's own."""
    rng = np.random.default_rng(seed)
    words = label_words(labels)
    made = []
    for i in range(rows):
        label = labels[i % len(labels)]
        own = rng.choice(words[label], 3 * length // 4)
        common = rng.choice(_COMMON, length - len(own))
        text = " ".join(str(word) for word in rng.permutation(np.concatenate([own, common])))
        made.append((text, label))
    return made


def make_dataset(folder: Path, rows: int = 80, labels: Sequence[str] = ("a", "b"), seed: int = 0) -> Path:
    """Write train.csv (`rows` rows) and test.csv (half as many) with the columns text and label."""
    folder.mkdir(parents=True, exist_ok=True)
    made = make_texts(rows + rows // 2, labels, seed)
    for name, part in (("train.csv", made[:rows]), ("test.csv", made[rows:])):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows(part)
    return folder
