"""The schema of `result.json`: what every run writes and every reader can rely on.

Fields may be added, none renamed or removed; `securefl.result/1` stays the name until one is.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from securefl.messages import Dropped


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RoundRow(_Row):
    """One round. Bytes are those of sealed envelopes; `dropped` names silos, `refusals` says why."""

    round: int
    seconds: float
    bytes_up: int
    bytes_down: int
    dropped: list[str] = []
    refusals: list[Dropped] = []


class ReleaseRow(_Row):
    """One release in the result: what left, for whom, readable by whom, under which claim."""

    round: int
    kind: str
    recipients: list[str]
    readable_by: list[str]
    bytes: int
    sha256: str
    claim: dict[str, Any]


class ClientRow(_Row):
    """One silo. Accuracies lie in [0, 1] with a 95 % Wilson interval over the test rows.

    baseline_accuracy: the silo's own model after the same number of local passes, nothing exchanged.
    epsilon: composed over the releases, or None where a release has no finite one (`no_finite_epsilon`
    says why) or nothing left.
    """

    name: str
    model: str
    train_rows: int
    validation_rows: int
    labels: dict[str, int]
    test_accuracy: float
    test_interval: tuple[float, float]
    baseline_accuracy: float
    epsilon: float | None
    private_epsilon: float | None
    delta: float | None
    simulated: bool
    no_finite_epsilon: list[str]
    releases: list[ReleaseRow]
    bytes_up: int
    kept_candidate: bool | None = None


class Difference(_Row):
    """Mean test accuracy over silos minus the baseline's, with a paired bootstrap interval over test rows."""

    value: float
    interval: tuple[float, float]
    within_noise: bool


class ServerRow(_Row):
    """The server's view; None where the method has no such figure."""

    test_accuracy: float | None = None
    nlu_accuracy: float | None = None
    nlg_accuracy: float | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    nlu_accuracy_before: float | None = None
    kl: list[float] = []
    synthetic: list[dict[str, Any]] = []


class Result(_Row):
    """The whole of result.json. `schema_` is written as `schema`.

    difference: to each silo alone (None for standalone). against: to other runs on the same rows, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["securefl.result/1"] = Field("securefl.result/1", alias="schema")
    method: str
    name: str
    run: str
    seed: int
    config: dict[str, Any]
    rounds: list[RoundRow]
    clients: list[ClientRow]
    server: ServerRow
    difference: Difference | None
    against: dict[str, Difference] = {}
    test_rows: int
    seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2)


def versions(libraries: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of the installed packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
