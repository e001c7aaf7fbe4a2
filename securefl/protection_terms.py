"""The `[protection]` section of the configuration: who gets to see a silo's model, and on which terms.

A pydantic model, as in `config`, which reads it; the protocols are in `crypto`, what is agreed about them in
`agreement`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from securefl.privacy_terms import MOST_ROWS, Section

# Keys that mean nothing where models are not masked, and where they are not summed at all.
MASKED_ONLY = ("threshold", "degree", "bits", "patience")
SUMS_ONLY = (*MASKED_ONLY, "clip", "max_rows", "post_quantum")


class Protection(Section):
    models: Literal["masked", "ckks", "sealed"] | None = Field(
        None,
        description="`masked`: only the sum of the silos' models becomes known; `ckks`: only to the silos; "
        "`sealed`: the server reads each. Unset: `masked` where models are averaged, else `sealed`.",
    )
    threshold: int | None = Field(
        None,
        ge=2,
        le=256,
        description="Fewest silos whose masked sum may become known; unset: more than two thirds of them.",
    )
    degree: int | None = Field(
        None,
        ge=2,
        le=256,
        description="Silos that each masks with: an even number, or all others. Unset: all up to 64 silos, "
        "above as many as withstand a third of colluders and a tenth of drop-outs.",
    )
    clip: float | None = Field(
        None,
        ge=1e-6,
        le=1e6,
        description="Largest magnitude of a value that is summed. Masked: of a round's change of a weight, "
        "larger ones are cut off (unset: 4). CKKS: of a weight, larger ones are refused (unset: 64).",
    )
    bits: int = Field(32, ge=16, le=32, description="Of a masked value; fewer are shorter and coarser.")
    max_rows: int = Field(
        65_536,
        ge=1,
        le=MOST_ROWS,
        description="Most rows that a silo may have where its row count is a hidden weight; nearer to the "
        "truth, the finer the sum.",
    )
    patience: int = Field(
        86_400,
        ge=1,
        le=10**8,
        description="Seconds for which a silo waits for the next step of a masked round; then it forgets it.",
    )
    post_quantum: bool = Field(
        False, description="CKKS parameters within the post-quantum 128-bit bound, with less room for sums."
    )
    average: Literal["mean", "median", "trimmed-mean"] = Field(
        "mean",
        description="How the server makes one model of the silos'; the latter two, coordinate by coordinate "
        "and all silos alike, bear with some that are false, and need `sealed` models.",
    )
    trim: float = Field(
        0.2, gt=0, lt=0.5, description="Share of silos that `trimmed-mean` leaves out at each end."
    )
    max_norm: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Largest L2 norm of a silo's change of the model in a round: a silo scales its own down, "
        "and where models are `sealed` the server refuses a larger one. Unset: no bound.",
    )
    centroids: Literal["peer", "sealed"] = Field("peer", description="`peer`: sealed to each other silo.")
