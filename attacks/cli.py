"""The `securefl-audit` command: reads arguments, calls one function, prints a table or one JSON document.

Exit codes are those of `securefl`; 4 also where a finding violates its claim, after the files are written.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from securefl.commands.keys import PassphraseFile
from securefl.console import ERR, OUT, Json, new_app, progress_bar, run_app
from securefl.errors import UsageError
from securefl.files import check_out

if TYPE_CHECKING:
    from attacks.mechanism import MechanismAudit

VIOLATION = 4

app = new_app("securefl-audit", "Measure what an attacker could read from what left the silos.")


def main() -> None:
    """Entry point of the `securefl-audit` command."""
    sys.exit(run_app(app, "securefl-audit"))


@app.command(epilog="Example: securefl-audit run my-run --out my-run-audit")
def run(
    run_dir: Annotated[Path, typer.Argument(help="Folder that a simulation wrote.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="Folder for audit.json, the report and the note.", show_default=False)
    ],
    identity: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign the files with this private file of `securefl keygen`."),
    ] = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Attack every recorded release of a run and write audit.json, an HTML report and a note in Markdown.

    The files hold no text of a silo. With --identity they are signed: `securefl-audit verify` checks that.
    """
    from attacks.audit import audit, audit_files
    from attacks.audit_report import attack_table
    from attacks.audit_words import answers, not_attacked
    from attacks.signature import sign_audit
    from securefl.commands.keys import open_identity
    from securefl.report.page import count

    out = check_out(out) if out.resolve() != run_dir.resolve() else out
    # Asked for before the work: a wrong passphrase must not come after it.
    signer = None if identity is None else open_identity(identity, passphrase_file)[0]
    with progress_bar(1.0) as move:
        done = 0.0

        def to(share: float, what: str) -> None:
            nonlocal done
            move(share - done, what)
            done = share

        result = audit(run_dir, out, to)
    if signer is not None:
        sign_audit(out, audit_files(run_dir, out), signer, int(time.time()))
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        if result.findings:
            OUT.print(attack_table([(result.method, result)]))
        for question, answer in answers(result):
            OUT.print(f"{question}: {answer.text}", highlight=False)
        left = count(len(result.not_run), "attack was", "attacks were")
        OUT.print(f"{left} not run; the report says why.", highlight=False)
        untouched = [] if result.findings else not_attacked([(result.method, result)])
        for sentence in (*untouched, result.warning):
            OUT.print(sentence, highlight=False)
        report = out / audit_files(run_dir, out)[1]
        OUT.print(str(report), highlight=False, soft_wrap=True, markup=False)
    if any(finding.verdict == "violates_claim" for finding in result.findings):
        ERR.print("securefl-audit: a finding lies above the cap of its claim", highlight=False)
        raise typer.Exit(VIOLATION)


@app.command(epilog="Example: securefl-audit verify my-run-audit --card auditor.card.json")
def verify(
    audit_dir: Annotated[Path, typer.Argument(help="Folder that `run` wrote.", show_default=False)],
    card: Annotated[Path, typer.Option(help="The auditor's card, compared with its holder.")],
    as_json: Json = False,
) -> None:
    """Check that an audit's files are as the auditor signed them. Exit code 4 where they are not."""
    from attacks.signature import verify_audit
    from securefl.crypto.identity import Card

    holder = Card.load(card)
    signed = verify_audit(audit_dir, holder)
    if as_json:
        sys.stdout.write(signed.model_dump_json(indent=2) + "\n")
        return
    when = datetime.fromtimestamp(signed.time, UTC).isoformat(timespec="seconds")
    OUT.print(
        f"signed by {holder.name} ({holder.short_fingerprint}) at {when}: {', '.join(sorted(signed.files))}",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip


@app.command(
    epilog="Example: securefl-audit mechanism --noise-multiplier 1.08 --clip 1 --delta 1e-5 --trials 100000"
)
def mechanism(
    noise_multiplier: Annotated[
        float, typer.Option(metavar="Z", help="Standard deviation of the noise on the sums, in clips.")
    ],
    clip: Annotated[float, typer.Option(metavar="C", help="L2 bound of one row.")],
    delta: Annotated[float, typer.Option(metavar="D", help="The delta at which epsilon is given.")],
    trials: Annotated[int, typer.Option(metavar="N", help="Releases attacked on each side.")],
    adjacency: Annotated[
        Literal["add-remove", "replace-one"],
        typer.Option(help="A row is there or not; or it is replaced by another one."),
    ] = "add-remove",
    seed: Annotated[
        int | None,
        typer.Option(metavar="S", help="Repeatable, with seeded noise; else noise as in real releases."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack the noised sums of securefl with and without a canary row: a lower bound on their epsilon.

    Of the release of centroids only the sums are attacked, and the claim is theirs alone. Exit code 4 where
    they violate it.
    """
    import numpy as np

    from attacks.mechanism import audit_mechanism
    from securefl.privacy import noise_source

    if seed is not None and seed < 0:
        raise UsageError(f"--seed must be 0 or more, not {seed}")
    with progress_bar(float(trials)) as move:
        result = audit_mechanism(
            noise_multiplier,
            clip,
            delta,
            trials,
            adjacency=adjacency,
            noise=noise_source(seed),
            rng=np.random.default_rng(seed),
            progress=move,
        )
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        _show_mechanism(result)
    if result.verdict == "violates_claim":
        ERR.print("securefl-audit: the lower bound lies above the claim", highlight=False)
        raise typer.Exit(VIOLATION)


def _show_mechanism(result: MechanismAudit) -> None:
    from securefl.report.render import plain_table

    sure = f"{result.confidence:.0%}"
    title = (
        f"Sums with noise of {result.noise_multiplier:g} clips, {result.adjacency}, "
        f"{result.trials:,} trials a side"
    )
    columns = [("", False), (f"ε at δ = {result.delta:g}", True), ("μ", True)]
    rows = [
        ("claim", f"{result.claim_epsilon:.2f}", f"{result.claim_mu:.3f}"),
        (
            f"at least, {sure} sure, for a Gaussian mechanism",
            f"{result.epsilon_lower_bound_gdp:.2f}",
            f"{result.mu_lower_bound:.3f}",
        ),
        (f"at least, {sure} sure, for any mechanism", f"{result.epsilon_lower_bound_cp:.2f}", "–"),
    ]
    OUT.print(plain_table(title, columns, rows))
    OUT.print(f"verdict: {result.verdict.replace('_', ' ')}", highlight=False)
    OUT.print(result.warning, highlight=False)
