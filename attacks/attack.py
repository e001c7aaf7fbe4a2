"""What an attack is to the audit: declared adversary and knowledge in, scored figures out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attacks.adversary import Adversary
from attacks.evidence import Evidence
from attacks.judgement import Book

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Attack:
    """One attack as it is put to a run.

    missing: why a run has nothing for it to attack; None where it has. run: puts its figures into the book,
    and what it could not attack with the reason; told the share done and what is being done. A broken
    release or encoder raises.
    """

    number: int
    name: str
    adversary: Adversary
    missing: Callable[[Evidence], str | None]
    run: Callable[[Evidence, Book, Progress], None]
