"""The `[crosslm]` section of the configuration: keys of CrossLM and of data-free KD, what unset ones mean.

Source of the method: Deng et al., arXiv 2312.05842; numbers in brackets are its equations. This room holds
terms only; `crosslm_worker` does what they say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from securefl.privacy_terms import MOST_ROWS, Section

_Gamma = Annotated[float, Field(ge=0, le=1e4)]
SLOT = "{label}"
_BRACES = re.compile(r"[{}]")
_LABEL_SMOOTHING = 0.1  # stable mode: the label of a synthetic text is only what was asked for

Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class Ingredients:
    """What of the method is on, once the mode has said what unset switches mean."""

    graders: Literal["own", "ensemble"]
    prior: Literal["none", "estimated"]
    targets: Literal["labels", "graders"]
    baseline: bool
    diversity: bool
    regenerate: bool
    label_smoothing: float
    rehearsal: int


class CrossLm(Section):
    llm: str = Field("builtin:smollm2", description="Causal LM folder, hub name or builtin:smollm2.")
    encoder: str = Field("builtin:minilm", description="Sentence encoder of the diversity in (10).")
    mode: Literal["stable", "paper"] = Field(
        "stable", description="`paper`: equations (5)-(10) to the letter."
    )
    synthetic: int = Field(64, ge=2, le=100_000, description="Texts generated an arrival.")
    keep: float = Field(0.25, ge=1e-5, le=1, description="Share kept by the score (10).")
    max_new_tokens: int = Field(32, ge=1, le=1024, description="Tokens generated a text.")
    min_words: int | None = Field(
        None, ge=1, le=1024, description="A text of fewer words is dropped; unset: 4, in paper mode 1."
    )
    top_p: float = Field(0.95, ge=0.01, le=1, description="Nucleus of the sampling (3).")
    top_k: int | None = Field(
        None, ge=1, le=10**6, description="Likeliest tokens that (3) draws from; unset: all."
    )
    gammas: tuple[_Gamma, _Gamma, _Gamma] = Field(
        (1.0, 0.1, 0.05), strict=False, description="g1, g2, g3 of (9); 0 switches one off."
    )
    graders: Literal["own", "ensemble"] | None = Field(
        None,
        description="Who rewards texts: the arriving model, or all models that arrived, each silo's last. "
        "Unset: `ensemble`, in paper mode `own`.",
    )
    prior: Literal["none", "estimated"] | None = Field(
        None,
        description="`estimated`: a grader's taste for the labels that its silo has most of, seen on the "
        "texts themselves, is taken out of its probabilities. Unset: that, in paper mode `none`.",
    )
    targets: Literal["labels", "graders"] | None = Field(
        None,
        description="What the SLM learns of a kept text: the label it was written for, or what the graders "
        "say of it. Unset: `labels`.",
    )
    baseline: bool | None = Field(None, description="Rewards less their label's mean; unset: in stable mode.")
    diversity: bool = Field(True, description="Score by reward times diversity (10), else by reward alone.")
    regenerate: bool | None = Field(
        None,
        description="The SLM learns from new texts, written once the LLM has learned; unset: in stable mode.",
    )
    label_smoothing: float | None = Field(
        None, ge=0, lt=1, description="For the SLM on synthetic texts; unset: 0.1, in paper mode 0."
    )
    rehearsal: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="Texts that the original LLM writes without a prompt; on some of them each step holds "
        "the LLM to the original, so that other text stays about as likely. Unset: a quarter of `synthetic`, "
        "in paper mode none.",
    )
    training: Literal["lora", "full"] = Field(
        "lora", description="`full`: all weights of the LLM, with a second, frozen copy as reference."
    )
    lora_rank: int = Field(16, ge=1, le=512, description="Rank of the LLM's adapter.")
    lora_layers: Literal["upper", "all"] = Field(
        "upper", description="Layers with an adapter; below the upper half nothing is computed twice."
    )
    learning_rate: float = Field(2e-4, gt=0, le=1, description="AdamW's, for the LLM.")
    epochs: int = Field(1, ge=1, le=100, description="Passes over an arrival's texts for the LLM.")
    batch_size: int = Field(16, ge=1, le=4096, description="Texts a step, for the LLM.")
    kl_ceiling: float = Field(
        0.5,
        gt=0,
        le=100,
        description="Nats a token from the original at which stable mode undoes an arrival.",
    )
    slm_epochs: int = Field(16, ge=1, le=100, description="Passes over the kept texts for the SLM.")
    evaluate_rows: int = Field(
        32, ge=1, le=MOST_ROWS, description="Test rows for the LLM's accuracy and perplexity."
    )
    judge_rows: int = Field(
        0,
        ge=0,
        le=MOST_ROWS,
        description="Rows of no silo that a held-out judge of the LLM's texts is trained on; 0: no judge.",
    )
    prompt: str = Field(
        "Write one sentence about {label}:", description="M(y) of (3), with `{label}` where V(y) goes."
    )
    reading: str = Field(
        "This text is about {label}.",
        description="M'(y) of (7), with `{label}`; what stands before it is what (1) asks after a text.",
    )
    prompts: dict[str, str] = Field(
        default={}, description="Label to a whole prompt M(y), in place of `prompt`."
    )
    verbalisers: dict[str, str] = Field(default={}, description="Label to word V(y); unset: the label.")
    chat: bool = Field(True, description="Prompts go through the LLM's chat template, where it has one.")
    backend: Literal["torch", "vllm"] = Field(
        "torch", description="What generates: `vllm` is an extra, for a GPU."
    )
    device: Device = Field("auto", description="Where the LLM is; `auto`: a GPU where there is one.")
    unusable: Literal["go-on", "stop"] = Field(
        "go-on",
        description="When the LLM writes nothing usable for a label: a warning, or the end of the run.",
    )

    @field_validator("prompt", "reading")
    @classmethod
    def _has_one_slot(cls, template: str) -> str:
        if template.count(SLOT) != 1 or _BRACES.search(template.replace(SLOT, "")):
            raise ValueError(f"must have {SLOT} once, where the label's word goes, and no other braces")
        return template

    @field_validator("reading")
    @classmethod
    def _asks(cls, template: str) -> str:
        if not template.split(SLOT)[0].strip():
            raise ValueError(f"must have words before {SLOT}: they are what the LLM is asked after a text")
        return template

    @model_validator(mode="after")
    def _no_other_switches(self) -> CrossLm:
        """Paper mode is the paper's; what it lacks is not silently left out."""
        if self.mode == "paper":
            extra = {
                "graders": self.graders == "ensemble", "prior": self.prior == "estimated",
                "targets": self.targets == "graders", "baseline": self.baseline is True,
                "regenerate": self.regenerate is True,
                "rehearsal": bool(self.rehearsal),
            }  # fmt: skip
            for key, set_ in extra.items():
                if set_:
                    raise ValueError(f'{key} is not in the paper; leave it out, or write mode = "stable"')
        return self

    @property
    def stable(self) -> bool:
        """False for the paper's equations to the letter."""
        return self.mode == "stable"

    @property
    def fewest_words(self) -> int:
        return self.min_words or (4 if self.stable else 1)

    @property
    def ingredients(self) -> Ingredients:
        """Every switch, unset ones as the mode has them."""

        def chosen(switch: bool | None) -> bool:
            return self.stable if switch is None else switch

        smoothing = _LABEL_SMOOTHING if self.stable else 0.0
        return Ingredients(
            graders=self.graders or ("ensemble" if self.stable else "own"),
            prior=self.prior or ("estimated" if self.stable else "none"),
            targets=self.targets or "labels",
            baseline=chosen(self.baseline),
            diversity=self.diversity,
            regenerate=chosen(self.regenerate),
            label_smoothing=smoothing if self.label_smoothing is None else self.label_smoothing,
            rehearsal=(-(-self.synthetic // 4) if self.stable else 0)
            if self.rehearsal is None
            else self.rehearsal,
        )
