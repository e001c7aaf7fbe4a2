"""The `[privacy]` section of the configuration: what is clipped and noised, and for which budget.

Pydantic models, as in `config`, which reads them; the mathematics is in `privacy` and the rooms beside it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

EPSILONS = (0.001, 1000)  # outside, an epsilon is a typing error or says nothing
MOST_ROWS = 10**9  # more than any file that fits in memory has


class Section(BaseModel):
    # Strict: "2", true and 2.0 are no integers. An integer still serves as a float, and a list as a tuple.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _require_one(epsilon: float | None, noise_multiplier: float | None) -> None:
    if epsilon is None and noise_multiplier is None:
        raise ValueError("set epsilon or noise_multiplier, one of them")
    if epsilon is not None and noise_multiplier is not None:
        raise ValueError("both epsilon and noise_multiplier are set; set one of them")


class CentroidPrivacy(Section):
    """Without epsilon or noise_multiplier: KMeans on private rows and a minimum size, which is not DP."""

    min_size: int = Field(4, ge=1, le=MOST_ROWS, description="Clusters below this many rows are withheld.")
    clip: float | None = Field(
        None,
        ge=1e-6,
        le=1e6,
        description="L2 bound of a row around the public centre 0; unset: the median over public texts.",
    )
    epsilon: float | None = Field(None, description="For all centroid releases of the run together.")
    noise_multiplier: float | None = Field(
        None, ge=0.01, le=1e4, description="Sigma of the sums / clip, every round."
    )
    delta: float = Field(1e-5, ge=1e-12, lt=0.1, description="Of the (epsilon, delta) claim.")

    @field_validator("epsilon")
    @classmethod
    def _means_something(cls, value: float | None) -> float | None:
        low, high = EPSILONS
        if value is not None and not low <= value <= high:
            raise ValueError(
                f"is not between {low} and {high}: below, the noise drowns every centroid, and above, the "
                "claim bounds nothing that a reader could rely on (leave it out to share without a claim)"
            )
        return value

    @model_validator(mode="after")
    def _one_of(self) -> CentroidPrivacy:
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError("set epsilon or noise_multiplier, not both")
        return self

    @property
    def noised(self) -> bool:
        return self.epsilon is not None or self.noise_multiplier is not None


class DpSgdPrivacy(Section):
    """Training under differential privacy (see `dp_sgd`)."""

    epsilon: float | None = Field(
        None,
        ge=EPSILONS[0],
        le=100,
        description="Of all training steps of the run together, for a silo's `data.unit`.",
    )
    noise_multiplier: float | None = Field(
        None, ge=0.1, le=1e4, description="Instead: sigma of the noise on a step's sum over the clip."
    )
    delta: float = Field(
        1e-5, ge=1e-12, lt=0.1, description="Of the (epsilon, delta) claim; below 1 / a silo's units."
    )
    clip: float = Field(1.0, ge=1e-6, le=1e6, description="L2 bound of a unit's whole gradient.")
    head_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Of clip^2, what is the bound of the head's part of the gradient, squared; the rest is "
        "the encoder's. Bounded together, the encoder's part soon leaves the head's nothing but noise.",
    )
    sample_rate: float = Field(
        1 / 16,
        ge=1e-4,
        le=1,
        description="Probability with which a unit takes part in a step: a pass is 1 / it steps. Public, as "
        "a number of rows is not.",
    )
    physical_batch: int = Field(
        32, ge=1, le=4096, description="Rows computed at once, at most; memory, not privacy, depends on it."
    )
    engine: Literal["auto", "book-keeping", "hooks"] = Field(
        "auto",
        description="What computes clipped gradients: `book-keeping` (one backward pass), or Opacus's "
        "per-sample `hooks`; `auto`: the first where it knows every trained layer, else hooks.",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of forward and backward passes; sums and noise are float32.",
    )
    accountant: Literal["prv"] = Field(
        "prv", description="Calibrates the noise; checked against dp-accounting's PLD."
    )

    @field_validator("engine", mode="before")
    @classmethod
    def _clips(cls, value: Any) -> Any:
        if value == "ghost":
            raise ValueError(
                "Opacus's ghost norms lose what cancels between tokens, so a gradient may be longer than the "
                "clip; only auto, book-keeping and hooks are offered"
            )
        return value

    @field_validator("accountant", mode="before")
    @classmethod
    def _bounds(cls, value: Any) -> Any:
        if value == "gdp":
            raise ValueError(
                "gdp is an approximation and no bound; only prv, checked against PLD, is offered"
            )
        return value

    @model_validator(mode="after")
    def _one_of(self) -> DpSgdPrivacy:
        _require_one(self.epsilon, self.noise_multiplier)
        return self


class MetricPrivacy(Section):
    """Noise on the numbers of right answers that silos tell, or decide by."""

    epsilon: float | None = Field(
        None, ge=EPSILONS[0], le=EPSILONS[1], description="For all figures of the run together."
    )
    noise_multiplier: float | None = Field(
        None, ge=0.01, le=1e4, description="Instead: sigma of a number over its sensitivity, each time."
    )
    delta: float = Field(1e-5, ge=1e-12, lt=0.1, description="Of the (epsilon, delta) claim.")

    @model_validator(mode="after")
    def _one_of(self) -> MetricPrivacy:
        _require_one(self.epsilon, self.noise_multiplier)
        return self


class ModelPrivacy(Section):
    """Noise on the sum of the silos' model updates, each silo adding its share (see `distributed_noise`)."""

    clip: float = Field(ge=1e-6, le=1e6, description="L2 bound of a silo's whole change of the weights.")
    epsilon: float | None = Field(
        None,
        ge=EPSILONS[0],
        le=EPSILONS[1],
        description="For all rounds together, and for a silo's whole data rather than a row of it.",
    )
    noise_multiplier: float | None = Field(
        None,
        ge=0.01,
        le=1e4,
        description="Sigma of the noise on the sum over its sensitivity (twice the clip), every round.",
    )
    delta: float = Field(1e-5, ge=1e-12, lt=0.1, description="Of the (epsilon, delta) claim.")
    colluders: int = Field(
        0, ge=0, le=254, description="Silos that may tell the server their share of the noise, or add none."
    )

    @model_validator(mode="after")
    def _one_of(self) -> ModelPrivacy:
        _require_one(self.epsilon, self.noise_multiplier)
        return self


class Privacy(Section):
    adjacency: Literal["add-remove", "replace-one"] = Field(
        "add-remove",
        description="What the claims on centroids and figures compare: data with and without a unit, or with "
        "another in its place. DP-SGD: `add-remove` alone.",
    )
    dp_sgd: DpSgdPrivacy | None = Field(
        None, description="Training under differential privacy, `{ epsilon = 8, delta = 1e-5, clip = 1.0 }`."
    )
    metrics: MetricPrivacy | None = Field(
        None,
        description="Noise on the figures; unset: exact ones, and none under DP-SGD or noise on sums.",
    )
    centroids: CentroidPrivacy = Field(CentroidPrivacy(), description="The centroid release.")
    models: ModelPrivacy | None = Field(
        None, description="Noise on the sum of the models; unset: none. Only where models are masked."
    )

    @property
    def claimed(self) -> bool:
        """Whether anything leaves under a claim about a unit."""
        return self.dp_sgd is not None or self.metrics is not None or self.centroids.noised
