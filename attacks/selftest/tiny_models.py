"""Models of a few thousand random weights, so that attacks on a model have one to be tested on.

They are of the classes of real ones, and know nothing but a vocabulary. Made in memory: no file, no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from securefl.slm import Slm

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_LAYERS, _HEADS = 2, 2


def _tokenizer(words: Sequence[str], *, framed: bool) -> PreTrainedTokenizerFast:
    """One token a word. framed: whether a text is put between [CLS] and [SEP], as encoders read it."""
    pieces = [*_SPECIAL, *words]
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    if framed:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        model_input_names=["input_ids", "attention_mask"],
    )


def encoder(words: Sequence[str], *, width: int, max_length: int, seed: int) -> Slm:
    """A random BERT over `words`. seed: of its weights; torch's own generator is left as it was."""
    tokenizer = _tokenizer(words, framed=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        intermediate_size=2 * width,
        max_position_embeddings=max_length,
        initializer_range=0.05,  # larger than BERT's, so that untrained layers tell words apart
        num_labels=2,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = BertForTokenClassification(config)
    return Slm(model, tokenizer, ("a", "b"), max_length=max_length, name="self-test", train_embeddings=False)


def language_model(
    words: Sequence[str], *, width: int, max_length: int, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random causal language model over `words` and its tokenizer. seed: see `encoder`."""
    tokenizer = _tokenizer(words, framed=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval(), tokenizer
