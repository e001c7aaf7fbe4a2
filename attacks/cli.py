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


@app.command(
    epilog="Examples: securefl-audit run my-run --out my-run-audit\n\n"
    "securefl-audit run --releases centroids.npy --encoder builtin:minilm --pool public.csv "
    "--rows ours.csv --group cluster --out audit"
)
def run(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Folder that a simulation wrote.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for audit.json, the report and the note.", show_default=False)
    ] = None,
    releases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead of a run: vectors (.npy, .safetensors, Parquet, CSV)."),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --releases: the model that made the vectors.")
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(metavar="TEXTS", help="With --releases: texts that are nobody's.")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="TEXTS", help="With --releases: the texts behind the vectors, to score by."),
    ] = None,
    claim: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --releases: the privacy claimed (JSON: mechanism, clip, noise_multiplier, "
            "count_multiplier, delta).",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help='Of --pool and --rows: the text ("text").')
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Of --pool and --rows: a label, if there is one.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Of --rows: which vector a row is behind, counted from 0; else row i is behind vector i.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --releases: tokens of a text that the encoder read (64, or the file's positions).",
        ),
    ] = None,
    normalised: Annotated[
        bool, typer.Option("--normalised", help="With --releases: each text's vector was scaled to length 1.")
    ] = False,
    attacks: Annotated[
        str | None, typer.Option(metavar="N,N", help="Numbers of the attacks to run; else all that apply.")
    ] = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Write the texts that were read back into the files.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="With --releases: of all that is drawn (0).")
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign the files with this private file of `securefl keygen`."),
    ] = None,
    passphrase_file: PassphraseFile = None,
    as_json: Json = False,
) -> None:
    """Attack what left the silos of a run, or what another system shared; write findings, report and a note.

    The files hold no text of a silo, unless --show-text asks for what was read back. An interrupted audit
    goes on where it was when it is started again. With --identity the files are signed: `securefl-audit
    verify` checks that. Exit code 4 where a claim is violated, or an attack fails its self-test.
    """
    from attacks.audit import audit, audit_elsewhere, audit_files
    from attacks.audit_report import for_terminal
    from attacks.elsewhere import Columns, Elsewhere
    from attacks.signature import sign_audit
    from securefl.commands.keys import open_identity

    if out is None:
        raise UsageError("--out: name a folder for the audit")
    if (run_dir is None) == (releases is None):
        raise UsageError("name either the folder of a run or a file of vectors (--releases)")
    extra = {
        "--encoder": encoder, "--pool": pool, "--rows": rows, "--claim": claim, "--text": text,
        "--label": label, "--group": group, "--max-length": max_length,
        "--normalised": normalised or None, "--seed": seed,
    }  # fmt: skip
    for name, value in extra.items():
        if run_dir is not None and value is not None:
            raise UsageError(f"{name}: goes with --releases; a run's folder has its own")
    if seed is not None and seed < 0:
        raise UsageError(f"--seed must be 0 or more, not {seed}")
    chosen = _numbers(attacks)
    out = out if run_dir is not None and out.resolve() == run_dir.resolve() else check_out(out)
    # Asked for before the work: a wrong passphrase must not come after it.
    signer = None if identity is None else open_identity(identity, passphrase_file)[0]
    with progress_bar(1.0) as move:
        done = 0.0

        def to(share: float, what: str) -> None:
            nonlocal done
            move(share - done, what)
            done = share

        if run_dir is not None:
            result = audit(run_dir, out, to, show_text, chosen)
        else:
            if releases is None or encoder is None or pool is None:
                raise UsageError("--releases needs --encoder and --pool")
            source = Elsewhere(
                releases, encoder, pool, rows, claim,
                columns=Columns("text" if text is None else text, label, group),
                max_length=max_length, normalised=normalised, seed=seed or 0,
            )  # fmt: skip
            result = audit_elsewhere(source, out, to, show_text, chosen)
    files = audit_files(run_dir, out)
    if signer is not None:
        sign_audit(out, files, signer, int(time.time()))
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        for part in for_terminal(result):
            OUT.print(part, highlight=False, markup=False)
        OUT.print(str(out / files[1]), highlight=False, soft_wrap=True, markup=False)
    if any(finding.verdict == "violates_claim" for finding in result.findings):
        ERR.print("securefl-audit: a finding lies above the cap of its claim", highlight=False)
        raise typer.Exit(VIOLATION)


def _numbers(attacks: str | None) -> frozenset[int] | None:
    """`1,8` as numbers. Raises UsageError."""
    if attacks is None:
        return None
    parts = [part.strip() for part in attacks.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise UsageError("--attacks: write numbers of attacks, as 1,2,8")
    return frozenset(map(int, parts))


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


@app.command(epilog="Example: securefl-audit selftest --json")
def selftest(
    repetitions: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Audits of each known epsilon (20, or 3 with --quick); null games are ten times as many.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Seconds: fewer repetitions, epsilon 4 only, no null game of 10,000."),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the repetitions.")] = 0,
    as_json: Json = False,
) -> None:
    """Test the auditor itself: nothing found where there is nothing, planted leaks and faults found.

    Exit code 4 where a check fails.
    """
    from attacks.selftest import selftest as test
    from securefl.report.render import plain_table

    with progress_bar(1.0) as move:
        result = test(repetitions=repetitions, quick=quick, seed=seed, progress=move)
    if as_json:
        sys.stdout.write(result.to_json() + "\n")
    else:
        columns = [("check", False), ("expected", False), ("measured", False), ("", False)]
        rows = [(c.name, c.expected, c.measured, "ok" if c.passed else "FAILED") for c in result.checks]
        OUT.print(plain_table(f"{len(rows)} checks in {result.seconds:.0f} s", columns, rows))
        OUT.print(result.warning, highlight=False)
    failed = [check for check in result.checks if not check.passed]
    if failed:
        ERR.print(f"securefl-audit: {len(failed)} failed, first: {failed[0].name}", highlight=False)
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
