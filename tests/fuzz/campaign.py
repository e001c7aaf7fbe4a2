"""A number of mutants, put before the subjects in fixed shares, and the count of what became of each.

A mutant must be refused by an exception below ProtocolError, or taken and have no second encoding; anything
else ends the campaign with the mutant in the message. A sample is watched for the memory that it costs.
"""

from __future__ import annotations

import base64
import random
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from securefl.errors import EnvelopeError, ProtocolError
from tests.fuzz.messages import Form
from tests.fuzz.subjects import Subject, refusals

# Of a hundred mutants; the cheap subjects get more. The shares of those with three forms are multiples of 3.
SHARES: Mapping[str, int] = {
    **{"body": 28, "envelope": 15, "server": 12, "plan": 6, "relayed": 6, "ledger": 9},
    **{"sums": 6, "summing": 8, "masking": 6, "encrypted": 4},
}
BATCH = sum(SHARES.values())

# A refusal that is only ever raised as one of its subclasses.
ABSTRACT = frozenset({EnvelopeError.__name__})

# Bytes that taking a mutant may hold at once. JSON costs most: "{}," is 3 bytes and becomes a dictionary of
# 80 and a reference of 9, and encoding it again, to see that it is canonical, takes two more references: 36
# for each byte. The rest is for copies of the message and what fails on the way; 42 was the most seen. The
# constant: what is allocated whatever the message.
MEMORY_FACTOR = 64
MEMORY_CONSTANT = 2**20
_WATCH_EVERY = 50
_WATCH_ABOVE = 128 * 2**10  # bytes: a message that size is a mutant made to be large


class Escaped(AssertionError):
    """A mutant that was neither refused properly nor taken properly."""


@dataclass
class Campaign:
    """Mutants so far, by subject, form and outcome."""

    subjects: Mapping[str, Subject]
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    faced: int = 0
    watched: int = 0
    worst: float = 0.0

    def count(self, subject: str, error: BaseException) -> None:
        """Note a refusal that was not of one mutant: TooFewSilos, of a step that only mutants answered."""
        self.counts[subject, "step", type(error).__name__] += 1

    def batch(self, rng: random.Random) -> None:
        """BATCH mutants: every subject's share, its forms in turn."""
        for name, share in SHARES.items():
            subject = self.subjects[name]
            for number in range(share):
                self._face(subject, subject.forms[number % len(subject.forms)], rng)

    def _face(self, subject: Subject, form: Form, rng: random.Random) -> None:
        data = subject.mutant(rng, form)
        self.faced += 1
        watch = self.faced % _WATCH_EVERY == 0 or len(data) > _WATCH_ABOVE
        if watch:
            tracemalloc.start()
        taken, outcome, escaped = None, "taken", None
        try:
            taken = subject.attempt(data)
        except ProtocolError as error:
            outcome = type(error).__name__
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a Rust library is no Exception
            escaped = error
        peak = tracemalloc.get_traced_memory()[1] if watch else 0
        tracemalloc.stop()
        try:
            if escaped is not None:
                raise escaped
            if watch:
                self.watched += 1
                self.worst = max(self.worst, (peak - MEMORY_CONSTANT) / max(len(data), 1))
                allowed = MEMORY_FACTOR * len(data) + MEMORY_CONSTANT
                assert peak <= allowed, f"{peak} bytes for a message of {len(data)}, allowed {allowed}"
            if outcome == "taken":
                subject.check(data, taken, form)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            shown = base64.b64encode(data).decode()
            raise Escaped(f"{subject.name}, {form}: {error!r}, for the message (base64) {shown}") from error
        self.counts[subject.name, form.value, outcome] += 1

    # --- the account

    def unreached(self) -> set[str]:
        """The exceptions below ProtocolError that no mutant met."""
        return set(refusals()) - ABSTRACT - {outcome for _, _, outcome in self.counts}

    def table(self) -> str:
        """Outcomes by subject, as text."""
        names = list(self.subjects)
        outcomes = sorted({outcome for _, _, outcome in self.counts}, key=lambda one: (one == "taken", one))
        rows = [["", *names, "all"]]
        for outcome in outcomes:
            cells = [
                sum(n for (s, _, o), n in self.counts.items() if (s, o) == (name, outcome)) for name in names
            ]
            rows.append([outcome, *map(str, cells), str(sum(cells))])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            row[0].ljust(widths[0])
            + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        memory = (
            f"{self.watched} watched for memory, the worst {self.worst:.1f} x its length above the constant"
        )
        return "\n".join([f"{self.faced} mutants; {memory}", *lines, ""])
