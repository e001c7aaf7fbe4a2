"""A run's folder held against itself: result, signed ledgers and recorded bytes must tell the same.

`verify_run` is what the auditor trusts a run's folder by. Reads the folder and changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from securefl.crypto.identity import Card
from securefl.errors import ProtocolError, UsageError
from securefl.files import read_limited
from securefl.ledger import LedgerSummary, ReleaseEntry, verify_ledger
from securefl.recording import SUMS, readers, release_name, sum_name
from securefl.release import (
    READABLE,
    SUMMED,
    Limits,
    PayloadKind,
    canonical_json,
    decode,
    release_from,
)
from securefl.result import ClientRow, ReleaseRow, Result, parse_result

MAX_DOCUMENT = 64 * 2**20


@dataclass(frozen=True)
class RecordedRelease:
    """One file below releases/SILO that is the one its silo's ledger and the result speak of."""

    silo: str
    path: Path
    row: ReleaseRow


@dataclass(frozen=True)
class VerifiedRun:
    """A run whose result, ledgers and recorded releases agree.

    releases: by silo in the order of the result, then as they left. entries: lines of each silo's ledger.
    """

    result: Result
    releases: tuple[RecordedRelease, ...]
    entries: Mapping[str, int]


def verify_run(folder: Path) -> VerifiedRun:
    """Read a run's result.json and hold it against the signed ledgers and the bytes in releases/.

    All three must name the same releases of the same silos: what is missing, extra or changed in one of them
    is an error, since whoever audits the run would otherwise judge something else than what left.
    Raises UsageError where there is no result.json, ProtocolError for every mismatch.
    """
    path = folder / "result.json"
    if not path.is_file():
        raise UsageError(f"{folder}: is not the folder of a finished run (it has no result.json)")
    result = parse_result(read_limited(path, MAX_DOCUMENT), str(path))
    names = {row.name for row in result.clients}
    _nobody_else(folder / "releases", names | {"server", SUMS}, "")
    _nobody_else(folder / "ledger", names, ".jsonl")
    found: list[RecordedRelease] = []
    sent: dict[int, set[str]] = {}
    entries = {}
    for row in result.clients:
        summary = _ledger_of(folder, row.name)
        _same_releases(path, result.run, row, summary)
        found += _same_files(folder / "releases" / row.name, row, summary)
        entries[row.name] = summary.entries
        for entry in summary.releases:
            if entry.kind in SUMMED:
                sent.setdefault(entry.round, set()).add(row.name)
    _same_sums(folder / "releases" / SUMS, path, result, sent)
    return VerifiedRun(result, tuple(found), entries)


def _visible(folder: Path) -> Iterator[Path]:
    """What lies in a folder, but for hidden files, which desktops leave behind."""
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _nobody_else(folder: Path, names: set[str], suffix: str) -> None:
    for path in _visible(folder):
        if path.name.endswith(suffix) and path.name.removesuffix(suffix) not in names:
            raise ProtocolError(f"{path}: is of no silo that result.json names")


def _ledger_of(folder: Path, name: str) -> LedgerSummary:
    path, card = folder / "ledger" / f"{name}.jsonl", folder / "cards" / f"{name}.json"
    for file in (path, card):
        if not file.is_file():
            raise ProtocolError(f"{file}: is missing, so what left {name} cannot be verified")
    try:
        summary = verify_ledger(path, Card.load(card))
    except UsageError as error:
        raise ProtocolError(str(error)) from error
    if summary.name != name:
        raise ProtocolError(f"{path}: is the ledger of another silo than {name}")
    if len(summary.accounts) > 1:
        raise ProtocolError(f"{path}: is over several data sets, and a run is over one a silo")
    return summary


def _facts(source: ReleaseRow | ReleaseEntry) -> dict[str, Any]:
    """What result.json and the ledger both say of a release, in comparable form."""
    if isinstance(source, ReleaseEntry):
        return {
            "round": source.round,
            "kind": source.kind.value,
            "recipients": [party.name for party in source.recipients],
            "readable_by": readers(source),
            "bytes": source.bytes,
            "sha256": source.body_sha256,
            "claim": source.claim.model_dump(mode="json"),
        }
    return source.model_dump(exclude={"centroids"})


def _same_releases(path: Path, run: str, row: ClientRow, summary: LedgerSummary) -> None:
    """The result must list the releases of the ledger, in its order, and add them up as it does."""
    for index, (listed, entry) in enumerate(zip_longest(row.releases, summary.releases)):
        known = [_facts(one) for one in (listed, entry) if one is not None]
        what = f"release {index + 1} of {row.name} (round {known[0]['round']})"
        if listed is None:
            raise ProtocolError(f"{path}: lacks {what}, which the silo's ledger holds")
        if entry is None:
            raise ProtocolError(f"{path}: {what} is not in the silo's ledger")
        if entry.run != run:
            raise ProtocolError(f"{path}: {what} is of another run by the silo's ledger")
        for field, value in known[1].items():
            if _encoded(known[0][field]) != _encoded(value):
                raise ProtocolError(f"{path}: {what}: its {field} is not the one in the silo's ledger")
    account = summary.account
    totals = {
        "epsilon": account.epsilon,
        "private_epsilon": account.private_epsilon,
        "delta": account.delta,
        "simulated": account.simulated,
        "no_finite_epsilon": list(account.nonprivate),
    }
    for field, value in totals.items():
        if getattr(row, field) != value:
            raise ProtocolError(f"{path}: {field} of {row.name} is not what its ledger adds up to")


def _encoded(value: Any) -> bytes:
    """Bytes to compare by, so that 1, 1.0 and true differ; none for what no ledger could hold."""
    try:
        return canonical_json(value)
    except (ValueError, RecursionError):
        return b""


def _same_files(folder: Path, row: ClientRow, summary: LedgerSummary) -> Iterator[RecordedRelease]:
    """The files of a silo must be the bodies that its ledger charged and that could be read, no others."""
    read = [entry for entry in summary.releases if entry.kind in READABLE]
    due = {release_name(entry.round, entry.step, entry.kind.value): entry for entry in read}
    rows = [listed for listed in row.releases if listed.kind in READABLE]
    for path in _visible(folder):
        if path.name not in due:
            raise ProtocolError(f"{path}: is none of the releases in the ledger of {row.name}")
    for (name, entry), listed in zip(due.items(), rows, strict=True):
        path = folder / name
        if not path.is_file():
            raise ProtocolError(f"{path}: recorded release missing: {row.name}, round {entry.round}")
        if _sha256(path) != entry.body_sha256:
            raise ProtocolError(
                f"{path}: its hash is not the one recorded for {row.name}, round {entry.round}; "
                "the file was changed, or is not of this run"
            )
        yield RecordedRelease(row.name, path, listed)


def _same_sums(folder: Path, where: Path, result: Result, sent: Mapping[int, set[str]]) -> None:
    """The opened sums in the folder must be those that the result names, of silos that took part.

    sent: for each round, whose ledger says that a model left for a sum.
    """
    due = {sum_name(row.round): row for row in result.sums}
    protection = result.config.get("protection", {})
    summed = isinstance(protection, dict) and protection.get("models") in ("masked", "ckks")
    rounds = [row.round for row in result.sums]
    if rounds != (list(range(1, len(result.rounds) + 1)) if summed else []):
        raise ProtocolError(
            f"{where}: sums: does not have one opened sum for each round of a run that sums models"
        )
    for path in _visible(folder):
        if path.name not in due:
            raise ProtocolError(f"{path}: is none of the sums that result.json names")
    names = [client.name for client in result.clients]
    for name, row in due.items():
        path = folder / name
        if not path.is_file():
            raise ProtocolError(f"{path}: recorded sum missing: round {row.round}")
        if _sha256(path) != row.sha256:
            raise ProtocolError(
                f"{path}: its hash is not the one recorded for round {row.round}; the file was changed, or "
                "is not of this run"
            )
        release = release_from(decode(read_limited(path, Limits().max_bytes)))
        openers = {"server"} if row.protection == "masked" else set(names)
        stated = {
            "kind": (release.kind, PayloadKind.SUM),
            "round": (release.info.get("round"), row.round),
            "rows": (release.info.get("rows"), row.rows),
            "resolution": (release.info.get("resolution"), row.resolution),
            "noise": (release.info.get("noise"), row.noise),
            "claim": (release.claim.model_dump(mode="json"), row.claim),
            "silos": (release.info.get("silos", row.silos), row.silos),
            "protection": (row.protection, protection.get("models")),
            "opened_by": (set(row.opened_by) <= openers, True),
        }
        for field, (found, listed) in stated.items():
            if found != listed:
                raise ProtocolError(f"{where}: sums: the {field} of round {row.round} is not that of {path}")
        if not set(row.silos) <= sent.get(row.round, set()):
            raise ProtocolError(
                f"{where}: sums: round {row.round} names a silo whose ledger has no model that left for it"
            )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
