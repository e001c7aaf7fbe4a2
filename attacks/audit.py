"""Runs the attacks over a run's folder and judges what they found: RUN_DIR -> Audit.

The attacks are those of `attacks.bench`. Nothing of a text leaves this room: recovered tokens are counted,
never written.
"""

from __future__ import annotations

import os
from pathlib import Path

from attacks.attack import Progress
from attacks.audit_note import audit_note
from attacks.audit_report import write_audit_report
from attacks.bench import SUITE
from attacks.evidence import Evidence
from attacks.findings import Audit, AuditedRelease, NotRun
from attacks.judgement import Book, attacks_left, judge
from attacks.runs import CENTROIDS, Recorded, Run, open_recorded
from attacks.signature import SIGNATURE
from securefl.errors import UsageError
from securefl.files import write_atomic


def audit(run_dir: Path | str, out: Path | str | None = None, progress: Progress | None = None) -> Audit:
    """Attack every recorded centroid release of a run. Deterministic in the run's seed.

    out: a folder for the files that `audit_files` names, each written whole or not at all; None writes
    nothing.
    progress: called with the share done and what is being done.
    Raises UsageError for a folder that is no run, ProtocolError for a release that was changed or names an
    encoder that cannot be found, SecureflError for vectors that no attack could tell apart.
    """
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise UsageError(f"{out}: is a file; name a folder for the audit")
    run, book = Run(Path(run_dir)), Book()
    inventory = [_inventory(run, one) for one in run.releases]
    say: Progress = progress or (lambda _share, _what: None)
    evidence = Evidence(run)
    reasons = [(attack, attack.missing(evidence)) for attack in SUITE] if run.releases else []
    due = [attack for attack, why in reasons if why is None]
    for number, attack in enumerate(due):

        def tell(share: float, what: str, number: int = number) -> None:
            say((number + share) / len(due), what)

        attack.run(evidence, book, tell)
    book.not_run += [NotRun(attack=attack.name, why=why) for attack, why in reasons if why is not None]
    attacks_left(evidence, book)
    result = judge(run, inventory, book)
    say(1.0, "done")
    if out is not None:
        _write(result, Path(run_dir), Path(out))
    return result


def audit_files(run_dir: Path, out: Path) -> tuple[str, str, str]:
    """The files of an audit in `out`: findings, report and note.

    A run's own folder has a report.html already, which is kept.
    """
    own = Path(out).resolve() == Path(run_dir).resolve()
    return "audit.json", "audit.html" if own else "report.html", "audit.md"


def _write(result: Audit, run_dir: Path, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be made ({os.strerror(error.errno or 0)})") from error
    findings, report, note = audit_files(run_dir, out)
    # A signature that is there is of other files than these.
    (out / SIGNATURE).unlink(missing_ok=True)
    write_atomic(out / findings, (result.to_json() + "\n").encode())
    write_audit_report(result, out / report)
    write_atomic(out / note, audit_note(result).encode())


def _inventory(run: Run, one: Recorded) -> AuditedRelease:
    release = open_recorded(one) if one.row.kind in CENTROIDS else None
    sizes = [] if release is None else [float(size) for size in release.tensors.get("sizes", ())]
    return AuditedRelease(
        silo=one.silo,
        round=one.row.round,
        kind=one.row.kind,
        file=str(one.path.relative_to(run.path)),
        sha256=one.sha256,
        readable_by=one.row.readable_by,
        encoder="" if release is None else str(release.info.get("encoder", "")),
        rows_per_centroid=sizes,
        claim=one.row.claim,
    )
