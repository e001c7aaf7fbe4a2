"""Who attacks, what they see and what they know: declared once, printed in every finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from securefl.errors import SecureflError

Role = Literal["outsider", "server", "peer", "auditor"]


@dataclass(frozen=True)
class Adversary:
    """role: who it is in the federation. sees: the one thing attacked. knowledge: everything else it uses.

    nist: its class in NIST AI 100-2, the taxonomy of adversarial machine learning.
    """

    role: Role
    sees: str
    knowledge: tuple[str, ...]
    nist: str

    def describe(self) -> str:
        """One line: role and what it sees."""
        return f"{self.role}; sees {self.sees}"


_ENCODER = "the round's model, which every silo has"
_CLAIM = "the claim: clip, noise and the released sizes"
_AUXILIARY = "other text of the same kind that is nobody's"

MEMBERSHIP = Adversary(
    role="peer",
    sees="the pooled centroids another silo shared",
    knowledge=("the text to be tested", _ENCODER, _AUXILIARY, _CLAIM),
    nist="privacy attack: membership inference (2024 edition, section 2.4.2)",
)
TOKENS = Adversary(
    role="peer",
    sees="the embedding-layer centroids another silo shared",
    knowledge=("the public token table", "frequencies of tokens in other text of the same kind", _CLAIM),
    nist="privacy attack: data reconstruction (2024 edition, section 2.4.1)",
)
CANARIES = Adversary(
    role="auditor",
    sees="the pooled centroids of one more release, with the auditor's canary texts in it",
    knowledge=(
        "the canaries, though not which of them the coins put in",
        "all other rows of the silo",
        _ENCODER,
        _CLAIM,
    ),
    nist="privacy attack: membership inference, as an audit (2024 edition, section 2.4.2)",
)


class NotEnough(SecureflError):
    """An attack has too little to work on; the reason goes under `not_run`, never a score of 0."""
