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
NOISE = Adversary(
    role="auditor",
    sees="noised sums of rows",
    knowledge=("the rows behind each of them", _ENCODER, _CLAIM),
    nist="privacy attack: membership inference, as an audit (2024 edition, section 2.4.2)",
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


BAG = Adversary(
    role="peer",
    sees="the pooled centroids another silo shared",
    knowledge=(_ENCODER, _AUXILIARY, _CLAIM),
    nist="privacy attack: data reconstruction (2024 edition, section 2.4.1)",
)
ROUNDS = Adversary(
    role="peer",
    sees="the pooled centroids another silo shared in several rounds",
    knowledge=("the text to be tested", "every round's model", _AUXILIARY, _CLAIM),
    nist=MEMBERSHIP.nist,
)
DIFFERENCE = Adversary(
    role="peer",
    sees="two rounds of pooled centroids between which one row came or went",
    knowledge=ROUNDS.knowledge,
    nist=MEMBERSHIP.nist,
)
SUBTRACTION = Adversary(
    role="peer",
    sees="the sum of all silos' pooled centroids",
    knowledge=("its own part of the sum", "the text to be tested", _ENCODER, _AUXILIARY, _CLAIM),
    nist=MEMBERSHIP.nist,
)
POOL = Adversary(
    role="outsider",
    sees="the pooled centroids a silo shared",
    knowledge=("a pool of texts that may hold the silo's", _ENCODER, _AUXILIARY, _CLAIM),
    nist="privacy attack: data reconstruction and membership inference (2024 edition, sections 2.4.1, 2.4.2)",
)
INVERSION = Adversary(
    role="server",
    sees="one pooled embedding or centroid",
    knowledge=("the encoder's weights", _AUXILIARY, _CLAIM),
    nist=BAG.nist,
)
ZERO_SHOT = Adversary(
    role="outsider",
    sees="one pooled embedding or centroid",
    knowledge=("the encoder as a black box", "a public language model", _CLAIM),
    nist=BAG.nist,
)
DECODER = Adversary(
    role="outsider",
    sees="one pooled embedding or centroid",
    knowledge=("the encoder as a black box", "the public tokenizer", _AUXILIARY, _CLAIM),
    nist=BAG.nist,
)
GRADIENT = Adversary(
    role="server",
    sees="one silo's gradient of one step",
    knowledge=("the model that the step began with", "frequencies of tokens in other text of the same kind"),
    nist=BAG.nist,
)
MODEL_MEMBERSHIP = Adversary(
    role="server",
    sees="a trained model, a silo's or the average",
    knowledge=("the text to be tested and its label", "the model before training", _AUXILIARY, _CLAIM),
    nist=MEMBERSHIP.nist,
)
ATTRIBUTE = Adversary(
    role="outsider",
    sees="the pooled centroids a silo shared",
    knowledge=(_ENCODER, "other text of the same kind that is nobody's, with the attribute", _CLAIM),
    nist="privacy attack: property inference (2024 edition, section 2.4.4)",
)
MEMORISATION = Adversary(
    role="auditor",
    sees="the language model that one more arrival taught, and texts that it writes",
    knowledge=(
        "the canaries among the rows behind it, though not which of them were planted",
        "the language model before it learned",
        _CLAIM,
    ),
    nist=CANARIES.nist,
)


class NotEnough(SecureflError):
    """An attack has too little to work on; the reason goes under `not_run`, never a score of 0."""
