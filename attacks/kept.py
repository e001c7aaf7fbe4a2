"""What an audit has found so far, kept by content so that a second run after a crash goes on where it was.

A part of the work is named by what it depends on: the bytes of the run, the attack's release, the attack, the
code. Figures and bounds only, without the texts that were read back; the folder is the auditor's own (0700)
and goes when the audit is written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

import attacks
from attacks.figures import FIGURES, Figure
from attacks.findings import Bound, NotRun
from securefl.errors import UsageError
from securefl.files import read_limited, write_atomic
from securefl.release import canonical_json

FOLDER: Final = ".unfinished"
_MAX_PART = 256 * 2**20


class Part(BaseModel):
    """What one attack found on one release."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    figures: str  # as FIGURES writes them
    bounds: list[Bound]
    not_run: list[NotRun]


class Kept:
    """Parts of an audit on disk, below the folder `out`. subject: hash of all that is audited.

    Raises UsageError where something else than a folder stands in its place: a link would lead elsewhere.
    """

    def __init__(self, out: Path, subject: str) -> None:
        self._folder, self._subject = out / FOLDER, subject
        if self._folder.is_symlink() or (self._folder.exists() and not self._folder.is_dir()):
            raise UsageError(f"{self._folder}: is a link or a file and not the audit's own folder; remove it")
        self._code = _code()

    def load(self, name: str) -> tuple[list[Figure], list[Bound], list[NotRun]] | None:
        """What was kept under a name, or None; a file that cannot be read is as none."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            part = Part.model_validate_json(read_limited(path, _MAX_PART))
            return FIGURES.validate_json(part.figures), part.bounds, part.not_run
        except (ValidationError, ValueError):
            return None

    def store(self, name: str, figures: list[Figure], bounds: list[Bound], not_run: list[NotRun]) -> None:
        make_folder(self._folder.parent)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        part = Part(figures=FIGURES.dump_json(figures).decode(), bounds=bounds, not_run=not_run)
        write_atomic(self._path(name), part.model_dump_json().encode())

    def clear(self) -> None:
        """Delete everything: the audit is written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        key = hashlib.sha256(canonical_json([self._subject, self._code, name])).hexdigest()
        return self._folder / f"{key}.json"


def make_folder(path: Path) -> None:
    """Make the audit's folder. Raises UsageError where that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made ({os.strerror(error.errno or 0)})") from error


def _code() -> str:
    """Hash of this package, since a figure of another version's attack is another figure."""
    digest = hashlib.sha256()
    for path in sorted(Path(attacks.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_of(folder: Path) -> str:
    """Hash of all files below a folder by name and content, links not followed."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and FOLDER not in path.parts:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(canonical_json([str(path.relative_to(folder)), content]))
    return digest.hexdigest()
