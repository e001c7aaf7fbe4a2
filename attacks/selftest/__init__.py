"""What keeps the auditor honest: its bounds and attacks on data whose truth is known.

`selftest` is all of it (`securefl-audit selftest`); `checks_of` the part that `securefl-audit run` asks for
before it believes the attacks it used, and `require` its refusal where one failed. All is made up: no run, no
file, no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from attacks.selftest.bounds import KNOWN, SIZES, known_checks, null_checks, one_run_checks
from attacks.selftest.check import Check, Progress
from attacks.selftest.leaks import LEAKS, leak_checks
from securefl.errors import ProtocolError, UsageError
from securefl.privacy import noise_source
from securefl.result import versions

__all__ = ["REPETITIONS", "Check", "SelfTest", "checks_of", "require", "selftest"]

REPETITIONS = 20
_QUICK = 3
_MOST = 1000
# Null games are cheap, and false alarms rare: ten for every audit of a known epsilon.
_NULLS = 10
_LIBRARIES = ("securefl", "torch", "scikit-learn", "scipy", "numpy")


class SelfTest(BaseModel):
    """The whole self-test. `schema_` is written as `schema`. Fields may be added, none renamed or removed.

    repetitions: audits of every known epsilon; of every null game there were ten times as many.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["securefl.selftest/1"] = Field("securefl.selftest/1", alias="schema")
    passed: bool
    checks: list[Check]
    quick: bool
    repetitions: int
    seed: int
    seconds: float
    versions: dict[str, str]
    warning: str = (
        "A self-test that passes shows that the auditor finds what was planted for it, and not that it finds "
        "everything."
    )

    def to_json(self) -> str:
        """One JSON document."""
        return self.model_dump_json(by_alias=True, indent=2)


def selftest(
    *,
    repetitions: int | None = None,
    quick: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SelfTest:
    """Null games at every size, known epsilons, planted faults, and a planted leak for every attack.

    repetitions: else 20, and 3 where `quick`, which also leaves out the largest null games and all known
    epsilons but 4. seed: of the repetitions; with another one, each number of false alarms of a sound auditor
    is above its limit with a probability of at most .001. progress: called with a share done and a word.
    Deterministic in its arguments but for `seconds`, of `clock`. Raises UsageError for numbers out of range.
    """
    repeated = (_QUICK if quick else REPETITIONS) if repetitions is None else repetitions
    if not 1 <= repeated <= _MOST:
        raise UsageError(f"the repetitions must be 1 to {_MOST}, not {repeated}")
    if seed < 0:
        raise UsageError(f"the seed must be 0 or more, not {seed}")
    start, say = clock(), progress or (lambda _share, _what: None)
    rng, noise, nulls = np.random.default_rng(seed), noise_source(seed), _NULLS * repeated
    sizes, epsilons = (SIZES[:-1], (4,)) if quick else (SIZES, tuple(KNOWN))
    checks = [
        *null_checks(nulls, rng, noise, _scaled(say, 0.2), sizes),
        *known_checks(repeated, rng, noise, _scaled(say, 0.6), epsilons),
        *one_run_checks(nulls, rng, _scaled(say, 0.05)),
        *_all_leaks(_scaled(say, 0.15)),
    ]
    return SelfTest(
        passed=all(check.passed for check in checks),
        checks=checks,
        quick=quick,
        repetitions=repeated,
        seed=seed,
        seconds=round(clock() - start, 1),
        versions=versions(_LIBRARIES),
    )


def _scaled(say: Progress, part: float) -> Progress:
    return lambda share, what: say(part * share, what)


def _all_leaks(progress: Progress) -> Iterator[Check]:
    for number in LEAKS:
        yield from leak_checks(number)
        progress(1 / len(LEAKS), f"attack {number} on a planted leak")


def checks_of(numbers: Iterable[int]) -> list[Check]:
    """The checks of these attacks on planted leaks and faults, in seconds and always the same.

    Raises SecureflError for an attack that has none.
    """
    return [check for number in sorted(set(numbers)) for check in leak_checks(number)]


def require(checks: Iterable[Check]) -> None:
    """Raises ProtocolError, naming the first check that failed, unless all passed."""
    for check in checks:
        if not check.passed:
            raise ProtocolError(
                f'the auditor\'s self-test failed, so nothing it says can be believed: "{check.name}" had to '
                f"give {check.expected} and gave {check.measured}; `securefl-audit selftest` shows all checks"
            )
