"""What an attack is to the audit: declared adversary and knowledge in, scored figures out.

And the walk that most attacks share: one release after the other, each a part of the audit by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attacks.adversary import Adversary, NotEnough
from attacks.evidence import Evidence, Scene
from attacks.judgement import Book
from securefl.release import PayloadKind

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


def lacks(kind: PayloadKind, words: str) -> Callable[[Evidence], str | None]:
    """`missing` of attacks on releases of a kind; words: what such a release is called."""

    def missing(evidence: Evidence) -> str | None:
        kinds = {one.row.kind for one in evidence.source.releases}
        return None if kind.value in kinds else f"no {words} was released"

    return missing


def each_scene(
    number: int, name: str, kind: PayloadKind, work: Callable[[Scene, Book], None], last: bool = False
) -> Callable[[Evidence, Book, Progress], None]:
    """`run` of attacks on one centroid release at a time; `work` may raise NotEnough.

    last: each silo's last release only, for attacks that take long and would read the same rows again.
    """

    def run(evidence: Evidence, book: Book, say: Progress) -> None:
        found = list(evidence.scenes(kind))
        if last:
            found = list({recorded.silo: (recorded, scene) for recorded, scene in found}.values())
        for done, (recorded, scene) in enumerate(found):
            say(done / len(found), f"{recorded.silo}, round {recorded.row.round}: {name}")

            def attempt(page: Book, scene: Scene | NotEnough = scene) -> None:
                try:
                    if isinstance(scene, NotEnough):
                        raise scene
                    work(scene, page)
                except NotEnough as why:
                    page.skip(name, recorded, str(why))  # noqa: B023

            book.part(f"{number} {name} {recorded.silo} {recorded.path.name} {recorded.sha256}", attempt)

    return run
