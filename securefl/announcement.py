"""What a silo says beforehand of its small model, and whether a model that arrives is of that kind.

The server runs an arriving model on its own copy of the architecture and the tokenizer, so weights of another
kind might not fail: they would quietly read other words, or grade other labels. Sees no rows and no keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securefl.errors import WrongShape
from securefl.release import canonical_json

if TYPE_CHECKING:
    from securefl.slm import Slm

# State of a tokenizer's last call, which changes from batch to batch.
_OF_A_CALL = ("padding", "truncation")


def tokenizer_sha256(slm: Slm) -> str:
    """SHA-256 (hex) over all that decides how a text becomes tokens, but for how many are kept."""
    backend = getattr(slm.tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python: its vocabulary is what can be named
        facts: Any = [type(slm.tokenizer).__name__, slm.tokenizer.get_vocab()]
    else:
        facts = {key: value for key, value in json.loads(backend.to_str()).items() if key not in _OF_A_CALL}
    return hashlib.sha256(canonical_json(facts)).hexdigest()


@dataclass(frozen=True)
class Announcement:
    """One silo's kind of model.

    base_sha256: of the checkpoint's files (`models.base_fingerprint`). tokenizer: `tokenizer_sha256`.
    max_length: tokens kept of a text. labels: in any order; each release says the order of its own head.
    """

    base_sha256: str
    tokenizer: str
    max_length: int
    labels: tuple[str, ...]

    def check(self, info: Mapping[str, Any], silo: str) -> None:
        """Require that a release's public facts are of this kind; raises WrongShape, naming what differs.

        A silo states them in words of its own, so this finds mistakes; what a liar may send is only ever run
        as weights of the announced kind.
        """
        labels = info.get("labels")
        known = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        facts = {
            "labels": known and sorted(labels or ()) == sorted(self.labels),
            "checkpoint (architecture or weights)": info.get("base_sha256") == self.base_sha256,
            "tokenizer": info.get("tokenizer") == self.tokenizer,
            "max_length": info.get("max_length") == self.max_length,
        }
        for what, same in facts.items():
            if not same:
                raise WrongShape(
                    f"the model of {silo} has another {what} than {silo} announced; it was refused, and both "
                    "sides should configure the same model"
                )


def announce(slm: Slm, base_sha256: str) -> Announcement:
    """What a silo announces of `slm`, made from the checkpoint of that hash."""
    return Announcement(base_sha256, tokenizer_sha256(slm), slm.max_length, slm.labels)
