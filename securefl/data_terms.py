"""The `[data]` section of the configuration: which rows there are, and how they are spread over the silos.

Pydantic models, as in `config`, which reads them; the rows themselves are in `data`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from securefl.privacy_terms import MOST_ROWS, Section
from securefl.release import ROW, UNIT

# Between the two texts of a row: a noncharacter, which Unicode keeps for use inside a program.
PAIR = "\ufdd0"


class DirichletSplit(Section):
    by: Literal["dirichlet"] = "dirichlet"
    silos: int = Field(4, ge=2, le=256, description="How many silos.")
    alpha: float = Field(0.3, ge=1e-6, le=1e6, description="Concentration: small means skewed labels.")
    min_rows: int = Field(
        16, ge=2, le=MOST_ROWS, description="Every silo gets at least this many rows, or it is an error."
    )
    rows: int | None = Field(
        None,
        ge=2,
        le=MOST_ROWS,
        description="Rows of every silo, so that only labels are skewed; unset: sizes are skewed too.",
    )

    @model_validator(mode="after")
    def _rows_reach_the_least(self) -> DirichletSplit:
        if self.rows is not None and self.rows < self.min_rows:
            raise ValueError(f"rows is {self.rows}, below min_rows = {self.min_rows}; lower min_rows")
        return self


class ColumnSplit(Section):
    by: Literal["column"]
    column: str = Field(description="One silo for every value of this column.")
    min_rows: int = Field(
        16, ge=2, le=MOST_ROWS, description="Every silo has at least this many rows, or it is an error."
    )


class Data(Section):
    train: str = Field(
        description="CSV, TSV, JSONL or Parquet file, or builtin:bbc-news, builtin:imdb, "
        "builtin:rotten-tomatoes."
    )
    test: str | None = Field(
        None, description="The same for the test rows, which no silo trains on; required but for a client."
    )
    labels: tuple[str, ...] | None = Field(
        None,
        min_length=2,
        max_length=4096,
        strict=False,
        description="All labels of the federation, sorted; required for a client, whose rows may lack some.",
    )
    text: str = Field("text", description="Column with the text.")
    pair: str | None = Field(
        None,
        description="Column with a second text, for tasks on pairs such as paraphrases; the model reads both "
        "as its tokenizer joins them.",
    )
    label: str = Field("label", description="Column with the label.")
    language: str | None = Field(
        None,
        description="Column with the language of a row, or another group: accuracy and macro-F1 on the test "
        "rows are then also reported for each of its values.",
    )
    train_rows: int | None = Field(
        None, ge=4, le=MOST_ROWS, description="Use this many rows, drawn by the seed."
    )
    test_rows: int | None = Field(
        None, ge=1, le=MOST_ROWS, description="Use this many test rows, drawn by the seed."
    )
    pool_rows: int = Field(
        1000,
        ge=0,
        le=MOST_ROWS,
        description="Rows of no silo kept for the audit: auxiliary text and controls, at most.",
    )
    unit: str | None = Field(
        None,
        pattern=UNIT,
        description="Column that says whose rows belong together (`patient_id`): privacy is then each of "
        "theirs in a silo, all rows at once; a split but by column leaves them in one. Compared letter by "
        "letter. Unset: a row.",
    )
    per_unit: int = Field(
        16, ge=1, le=4096, description="Rows of one unit that DP-SGD trains on in a step, at most."
    )
    validation: float = Field(0.2, ge=0.05, le=0.5, description="Share of a silo's rows kept from training.")
    split: Annotated[DirichletSplit | ColumnSplit, Field(discriminator="by")] = Field(
        DirichletSplit(), description="How the training rows are spread over the silos."
    )

    @property
    def unit_name(self) -> str:
        """What a claim names as the unit of privacy."""
        return self.unit or ROW

    @field_validator("unit")
    @classmethod
    def _not_a_row(cls, unit: str | None) -> str | None:
        if unit in (ROW, "silo"):
            raise ValueError(f'"{unit}" means something else in a claim; rename the column')
        return unit

    @field_validator("labels")
    @classmethod
    def _in_order(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if labels is not None and list(labels) != sorted(set(labels)):
            raise ValueError("must be sorted, and each once: every silo's model has them in this order")
        return labels
