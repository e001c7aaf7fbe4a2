"""Runs the attacks over a run's folder, or releases from elsewhere, and judges what they found.

The attacks are those of `attacks.bench`. What they read back of a text leaves this room only where the
auditor asked to see it; else it is counted.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attacks.attack import Attack, Progress
from attacks.audit_note import audit_note
from attacks.audit_report import audit_page
from attacks.bench import SUITE
from attacks.context import accounts, channels, utility
from attacks.elsewhere import Elsewhere
from attacks.evidence import Evidence, Source
from attacks.findings import UNASKED, Audit, AuditedRelease, NotRun
from attacks.judgement import Book, attacks_left, judge
from attacks.kept import Kept, digest_of, make_folder
from attacks.runs import CENTROIDS, Recorded, Run
from attacks.signature import SIGNATURE
from securefl.errors import UsageError
from securefl.files import write_together


def audit(
    run_dir: Path | str,
    out: Path | str | None = None,
    progress: Progress | None = None,
    show_text: bool = False,
    attacks: frozenset[int] | None = None,
) -> Audit:
    """Attack every recorded release of a run. Deterministic in the run's seed.

    out: a folder for the files that `audit_files` names, each written whole or not at all; None writes
    nothing. What is found on the way is kept there, so that after a crash a second audit goes on.
    progress: called with the share done and what is being done. show_text: with the texts read back.
    attacks: numbers of the attacks to run; None runs all.
    Raises UsageError for a folder that is no run, ProtocolError for a release that was changed or names an
    encoder that cannot be found, SecureflError for vectors that no attack could tell apart.
    """
    folder = _place(out)
    run = Run(Path(run_dir))
    if folder is not None and run.path.resolve() in folder.resolve().parents:
        raise UsageError(f"{folder}: lies in the run's folder, where it would change the run; name another")
    kept = None if folder is None else Kept(folder, digest_of(run.path))
    result = _audit(run, kept, progress, show_text, attacks)
    if folder is not None:
        _write(result, folder, audit_files(run.path, folder))
    return _finished(result, kept)


def audit_elsewhere(
    source: Elsewhere,
    out: Path | str,
    progress: Progress | None = None,
    show_text: bool = False,
    attacks: frozenset[int] | None = None,
) -> Audit:
    """The same for vectors that another system released."""
    folder = _place(out)
    assert folder is not None
    kept = Kept(folder, source.digest)
    result = _audit(source, kept, progress, show_text, attacks)
    _write(result, folder, audit_files(None, folder))
    return _finished(result, kept)


def _finished(result: Audit, kept: Kept | None) -> Audit:
    if kept is not None:
        kept.clear()
    return result


@cache
def _require_sound(numbers: tuple[int, ...]) -> None:
    """Raises ProtocolError where one of these attacks fails its self-test; asked once in a process."""
    from attacks.selftest import checks_of, require

    require(checks_of(numbers))


def _audit(
    source: Source,
    kept: Kept | None,
    progress: Progress | None,
    show_text: bool,
    attacks: frozenset[int] | None,
) -> Audit:
    unknown = sorted((attacks or frozenset()) - {attack.number for attack in SUITE})
    if unknown:
        known = ", ".join(map(str, sorted({attack.number for attack in SUITE})))
        raise UsageError(f"there is no attack {unknown[0]} to put to a run; there are {known}")
    evidence, book = Evidence(source), Book(kept=kept, show_text=show_text)
    inventory = [_inventory(source, one) for one in source.releases]
    say: Progress = progress or (lambda _share, _what: None)
    reasons = [
        (attack, _unasked(attack, attacks) or attack.missing(evidence)) for attack in SUITE if source.releases
    ]
    due = [attack for attack, why in reasons if why is None]
    say(0.0, "testing the attacks")
    _require_sound(tuple(sorted({attack.number for attack in due})))
    for number, attack in enumerate(due):

        def tell(share: float, what: str, number: int = number) -> None:
            say((number + share) / len(due), what)

        attack.run(evidence, book, tell)
    book.not_run += [NotRun(attack=attack.name, why=why) for attack, why in reasons if why is not None]
    attacks_left(evidence, book)
    result = judge(source, inventory, evidence.overlap, book).model_copy(
        update={"accounts": accounts(source), "utility": utility(source), "channels": channels(source)}
    )
    say(1.0, "done")
    return result


def _unasked(attack: Attack, attacks: frozenset[int] | None) -> str | None:
    return None if attacks is None or attack.number in attacks else UNASKED


def _place(out: Path | str | None) -> Path | None:
    if out is None:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file; name a folder for the audit")
    return folder


def audit_files(run_dir: Path | None, out: Path) -> tuple[str, str, str]:
    """The files of an audit in `out`: findings, report and note.

    A run's own folder has a report.html already, which is kept.
    """
    own = run_dir is not None and Path(out).resolve() == Path(run_dir).resolve()
    return "audit.json", "audit.html" if own else "report.html", "audit.md"


def _write(result: Audit, out: Path, names: tuple[str, str, str]) -> None:
    findings, report, note = names
    # What was read back is to be kept as the rows are.
    shown = any(finding.texts for finding in result.findings)
    make_folder(out)
    # A signature that is there is of other files than these.
    (out / SIGNATURE).unlink(missing_ok=True)
    write_together(
        {
            out / findings: (result.to_json() + "\n").encode(),
            out / report: audit_page(result),
            out / note: audit_note(result).encode(),
        },
        0o600 if shown else 0o644,
    )


def _inventory(source: Source, one: Recorded) -> AuditedRelease:
    release = source.open(one) if one.row.kind in CENTROIDS else None
    sizes = [] if release is None else [float(size) for size in release.tensors.get("sizes", ())]
    base = source.path if isinstance(source, Run) else one.path.parent
    return AuditedRelease(
        silo=one.silo,
        round=one.row.round,
        kind=one.row.kind,
        file=str(one.path.relative_to(base)),
        sha256=one.sha256,
        readable_by=one.row.readable_by,
        encoder="" if release is None else str(release.info.get("encoder", "")),
        rows_per_centroid=sizes,
        claim=one.row.claim,
    )
