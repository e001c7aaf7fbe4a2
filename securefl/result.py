"""The schema of `result.json`: what every run writes and every reader can rely on.

Touches no file. Fields may be added, none renamed or removed; `securefl.result/1` stays the name until one
is.
"""

from __future__ import annotations

import math
import platform
import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from securefl.errors import ProtocolError
from securefl.messages import NAME, Dropped
from securefl.release import parse_json


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("the lower end of an interval is above its upper end")
    return interval


def _figure(value: Any) -> Any:
    """A model that diverged has a perplexity beyond all floats: no figure, and the run is not lost for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]
Interval = Annotated[tuple[float, float], AfterValidator(_ordered)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RoundRow(_Row):
    """One round. Bytes are those of sealed envelopes; `dropped` names silos, `refusals` says why.

    asked: the silos that took part by the schedule, None in a result of an earlier version.
    """

    round: int = Field(ge=1)
    seconds: Positive
    bytes_up: Count
    bytes_down: Count
    dropped: list[str] = []
    refusals: list[Dropped] = []
    asked: list[str] | None = None


class ReleaseRow(_Row):
    """One release in the result: what left, for whom, readable by whom, under which claim.

    centroids: how many are in it, for a release of centroids; 0 where all were withheld.
    """

    round: int = Field(ge=1)
    kind: str
    recipients: list[str]
    readable_by: list[str]
    bytes: Count
    sha256: str
    claim: dict[str, Any]
    centroids: Count | None = None


class SumRow(_Row):
    """A sum of the silos' models that was opened: by whom, over which silos, with what error at most.

    threshold: the fewest silos that it could have been opened for; 0 under CKKS. rows: of all silos in it.
    resolution: the largest error of the encoding in a weight of the mean. noise: standard deviation of the
    silos' noise in one; all silos then weigh the same, and rows is unknown. faults: bad shares, and whose.
    sha256: of its file below releases/sums.
    """

    round: int = Field(ge=1)
    protection: Literal["masked", "ckks"]
    opened_by: list[str] = Field(min_length=1)
    silos: list[str] = Field(min_length=1)
    threshold: Count
    rows: Count | None
    resolution: Positive
    noise: Positive | None = None
    faults: list[str] = []
    claim: dict[str, Any]
    sha256: str


class LanguageRow(_Row):
    """Test rows of one language. baseline_accuracy: as in `ClientRow`. train_rows: of it, over all silos."""

    rows: Count
    accuracy: Share
    interval: Annotated[tuple[Share, Share], AfterValidator(_ordered)]
    macro_f1: Share
    baseline_accuracy: Share
    train_rows: Count


class ClientRow(_Row):
    """One silo. Accuracies lie in [0, 1] with a 95 % Wilson interval over the test rows.

    baseline_accuracy: the silo's own model after the same number of local passes, nothing exchanged and no
    noise. training: the claim on all its trainings by DP-SGD together. test_macro_f1: mean over the labels of
    the test rows. languages: where `data.language` is set, the figures on the test rows of each.
    epsilon: composed over the releases, or None where a release has no finite one (`no_finite_epsilon`
    says why) or nothing left.
    """

    name: str
    model: str
    train_rows: Count
    validation_rows: Count
    labels: dict[str, Count]
    test_accuracy: Share
    test_interval: Annotated[tuple[Share, Share], AfterValidator(_ordered)]
    baseline_accuracy: Share
    test_macro_f1: Share | None = None
    languages: dict[str, LanguageRow] = {}
    epsilon: Positive | None
    private_epsilon: Positive | None
    delta: Share | None
    simulated: bool
    no_finite_epsilon: list[str]
    releases: list[ReleaseRow]
    training: dict[str, Any] | None = None
    bytes_up: Count
    kept_candidate: bool | None = None


class Difference(_Row):
    """Mean test accuracy over silos minus the baseline's, with a paired bootstrap interval over test rows."""

    value: float = Field(ge=-1, le=1)
    interval: Interval
    within_noise: bool


class LabelRow(_Row):
    """Synthetic texts of one label: usable and kept, and their shares of all usable and of all kept ones."""

    usable: Count
    kept: Count
    usable_share: Share
    kept_share: Share


class ArrivalRow(_Row):
    """One small model that came to the language model, in the order of their coming (CrossLM, data-free KD).

    queued_behind: how many were waiting or being served when it came. staleness: how many arrivals of others
    the language model learned from since this silo last got a candidate, or since the start. outcome:
    `skipped` where the model could not be used (`note` says why). candidate: whether one went back;
    kept_candidate: whether the silo kept it, None where it did not say. seconds: of the server's work.

    Of the texts that the small model could learn from, None where there were none: kl, how far the language
    model was from the original once it had learned, nats a token (None where it learned nothing); agreement,
    share that the graders label as asked; self_bleu and distinct_2, how alike and how varied they are (see
    `synthetic_quality`); mean_words, their mean length.
    """

    silo: str
    round: int = Field(ge=1)
    arrival: int = Field(ge=1)
    queued_behind: Count
    staleness: Count
    outcome: Literal["served", "skipped"]
    candidate: bool
    kept_candidate: bool | None = None
    note: str | None = None
    seconds: Positive
    kl: Positive | None = None
    agreement: Share | None = None
    self_bleu: Share | None = None
    distinct_2: Share | None = None
    mean_words: Positive | None = None
    per_label: dict[str, LabelRow] = {}


class ServerRow(_Row):
    """The server's view; None where the method has no such figure.

    nlg_accuracy: share of the language model's texts that the silos' models label as asked; nlg_judged: that
    a judge does which was trained on rows of no silo.
    """

    test_accuracy: Share | None = None
    nlu_accuracy: Share | None = None
    nlg_accuracy: Share | None = None
    nlg_judged: Share | None = None
    nlg_judged_before: Share | None = None
    perplexity_before: Annotated[Positive | None, BeforeValidator(_figure)] = None
    perplexity_after: Annotated[Positive | None, BeforeValidator(_figure)] = None
    nlu_accuracy_before: Share | None = None
    kl: list[float] = []
    synthetic: list[dict[str, Any]] = []
    arrivals: list[ArrivalRow] = []


class Result(_Row):
    """The whole of result.json. `schema_` is written as `schema`.

    sums: of models that no party read alone. difference: to each silo alone (None for standalone).
    against: to other runs on the same rows, by name. shared_units: values of `data.unit` with rows in more
    than one silo.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    schema_: Literal["securefl.result/1"] = Field("securefl.result/1", alias="schema")
    method: str
    name: str
    run: str
    seed: Count
    config: dict[str, Any]
    rounds: list[RoundRow] = Field(min_length=1)
    clients: list[ClientRow] = Field(min_length=1)
    sums: list[SumRow] = []
    server: ServerRow
    difference: Difference | None
    against: dict[str, Difference] = {}
    test_rows: Count
    shared_units: Count = 0
    seconds: Positive
    peak_memory_bytes: Count
    versions: dict[str, str]

    @model_validator(mode="after")
    def _each_silo_once(self) -> Result:
        name, times = Counter(row.name for row in self.clients).most_common(1)[0]
        if times > 1:
            raise ValueError(f"two silos have the name {name[:64]!r}")
        return self

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2)


def parse_result(data: bytes, where: str) -> Result:
    """The bytes of a result.json. `where`, the file, begins the message of a ProtocolError.

    Names of silos become parts of paths for whoever reads a run's folder, so here they must be names.
    """
    try:
        result = Result.model_validate(parse_json(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        place = field[:80].encode("ascii", "backslashreplace").decode() or "the document"
        raise ProtocolError(f"{where}: {place}: is not as a run writes it ({first['msg']})") from None
    except ValueError as error:
        raise ProtocolError(f"{where}: is not strict JSON, as a run writes it") from error
    for index, row in enumerate(result.clients):
        if not re.fullmatch(NAME, row.name):
            raise ProtocolError(f"{where}: clients.{index}.name: is not the name of a silo")
    return result


def versions(libraries: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of the installed packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
