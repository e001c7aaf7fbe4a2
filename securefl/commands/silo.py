"""`securefl client` and `securefl approve`: one silo, with its own keys, policy and ledger."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from securefl.console import OUT, Json, print_json, say, shown
from securefl.errors import AwaitingApproval, NotAvailable, PolicyRefusal, UsageError
from securefl.files import check_out, make_folder, read_limited, write_new
from securefl.messages import BAD_NAME
from securefl.release import Independent, NonPrivate

if TYPE_CHECKING:
    from securefl.config import Config
    from securefl.crypto.identity import Identity
    from securefl.exchange import Preview

Passphrase = Annotated[
    Path | None, typer.Option("--passphrase-file", help="File (mode 0600) with the key file's passphrase.")
]


def _identity(config: Config, passphrase_file: Path | None) -> Identity:
    from securefl.commands.keys import open_identity
    from securefl.silo import client_terms

    return open_identity(Path(client_terms(config).identity), passphrase_file)[0]


def client(
    file: Annotated[Path, typer.Argument(help="Configuration (TOML) with a \\[client] section.")],
    dry_run: Annotated[
        Path | None,
        typer.Option(
            "--dry-run", metavar="PLAN", help="A sealed plan; print what would leave, send nothing."
        ),
    ] = None,
    passphrase_file: Passphrase = None,
    as_json: Json = False,
) -> None:
    """Show exactly what this silo would answer to a plan, field by field."""
    from securefl.config import load_config
    from securefl.crypto.envelope import DEFAULT_LIMITS
    from securefl.silo import open_client

    config = load_config(file)
    if dry_run is None:
        raise NotAvailable(
            "running over a network is not in this version; use --dry-run, or embed securefl.Client"
        )
    message = read_limited(dry_run, DEFAULT_LIMITS.max_envelope)
    silo = open_client(config, _identity(config, passphrase_file), preview=True)
    found = silo.preview(message)
    if as_json:
        print_json(described(found))
    else:
        _show(found)
    refused = [one for one in found.refusals if not isinstance(one, AwaitingApproval)]
    if refused:
        clauses = ", ".join(dict.fromkeys(one.clause for one in refused))
        raise PolicyRefusal(f"nothing of this would leave; see above what forbids it: {clauses}", clauses)


def described(found: Preview) -> dict[str, Any]:
    """A preview as JSON values: everything that would leave but the arrays' numbers."""
    document: dict[str, Any] = {
        "plan": found.hash,
        "answered": None if found.answered is None else found.answered.entry,
        "asked": found.plan.model_dump(mode="json"),
        "refused": [{"clause": one.clause, "reason": str(one)} for one in found.refusals],
        "answer": None,
    }
    release = found.release
    if release is not None and found.body is not None:
        document["answer"] = {
            "kind": release.kind.value,
            "readable_by": [party.name for party in found.recipients],
            "recipients": [party.model_dump() for party in found.recipients],
            "bytes": len(found.body),
            "claim": release.claim.model_dump(mode="json"),
            "fields": dict(release.info),
            "tensors": {
                name: {"type": str(a.dtype), "shape": list(a.shape), "bytes": a.nbytes}
                for name, a in sorted(release.tensors.items())
            },
            "account_after": None if found.account is None else found.account.model_dump(mode="json"),
        }
    return document


def _show(found: Preview) -> None:
    plan, release = found.plan, found.release
    say(f"Plan {shown(found.hash)}: round {plan.round} of {plan.rounds}, {plan.step}, {shown(plan.method)}")
    if found.answered is not None:
        how = "an answer" if found.answered.entry == "release" else 'a signed "unavailable"'
        say(f"It was answered before with {how}, and the same bytes would go out again. Otherwise:")
    for one in found.refusals:
        say(f"[yellow]{shown(one.clause)}[/]: {shown(str(one).split(f'{one.clause}: ')[-1])}")
    if release is None or found.body is None:
        say('Nothing would leave but a signed "unavailable".')
        return
    whom = ", ".join(party.name for party in found.recipients)
    table = Table(
        "Field",
        Column("Value", overflow="fold"),
        title=f"Would leave: {release.kind.value}, readable by {shown(whom)}",
    )
    for name, value in sorted(release.info.items()):
        table.add_row(shown(name), shown(", ".join(map(str, value)) if isinstance(value, list) else value))
    claim = release.claim
    match claim:
        case NonPrivate():
            private = f"none: {claim.reason}"
        case Independent():
            private = f"independent of the rows: {claim.reason}"
        case _:
            private = f"epsilon {claim.epsilon:.4g} at delta {claim.delta:g}"
    table.add_row("privacy of this release", shown(private))
    numbers = sum(array.size for array in release.tensors.values())
    table.add_row("tensors", f"{len(release.tensors)} with {numbers:,} numbers; --json lists each")
    table.add_row("whole body", f"{len(found.body):,} bytes before sealing")
    OUT.print(table)
    if found.account is not None:
        epsilon = found.account.private_epsilon
        total = "none yet" if epsilon is None else f"epsilon {epsilon:.4g} at delta {found.account.delta:g}"
        say(f"The data set's private releases would then add up to: {total}")
    say("Nothing was sent, charged or written down.")


def approve(
    plan: Annotated[str, typer.Argument(metavar="HASH", help="The waiting plan, 64 hex digits.")],
    config_file: Annotated[Path, typer.Option("--config", help="The client's configuration.")] = Path(
        "client.toml"
    ),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    passphrase_file: Passphrase = None,
    as_json: Json = False,
) -> None:
    """Let one waiting plan go on, where the policy says approval = "manual". The ledger records it.

    On a terminal it shows the plan and asks first.
    """
    from securefl.approval import approve_plan, waiting
    from securefl.config import load_config

    if re.fullmatch("[0-9a-f]{64}", plan) is None:
        raise UsageError("a plan's hash is 64 hexadecimal digits in lower case, and is given whole")
    config = load_config(config_file)
    identity = _identity(config, passphrase_file)
    parameters = waiting(config, identity, plan).model_dump(mode="json")
    if not as_json:
        table = Table("Parameter", Column("Value", overflow="fold"), title=f"Plan {plan}")
        for name, value in parameters.items():
            table.add_row(shown(name), shown(_plain(value)))
        OUT.print(table)
        if sys.stdin.isatty() and not yes:
            typer.confirm("Approve it?", abort=True, err=True)
    approve_plan(config, identity, plan)
    if as_json:
        print_json({"approved": plan, "plan": parameters})
        return
    say("Approved. The client answers it when the server asks again; any other plan waits anew.")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, dict):
        return (
            value["name"]
            if set(value) == {"name", "key"}
            else ", ".join(f"{k} {v}" for k, v in value.items())
        )
    return "none" if value is None else str(value)


def policy(
    name: Annotated[str, typer.Argument(help="The silo's name, as in its keys.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("policy.toml"),
) -> None:
    """Write a policy that permits nothing, with every clause and its meaning, to be filled in."""
    from pydantic import ValidationError

    from securefl.policy import Policy

    place = check_out(out, file=True)
    try:
        text = Policy(name=name).to_toml()
    except ValidationError:
        raise UsageError(BAD_NAME) from None
    make_folder(place.parent)
    write_new(place, text.encode())
    say(f"{shown(out)}: permits nothing yet; set the clauses that may be")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(epilog="Example: securefl client client.toml --dry-run state/HASH.plan")(client)
    app.command(epilog="Example: securefl approve HASH --config client.toml")(approve)
    app.command(epilog="Example: securefl policy hospital-a --out policy.toml")(policy)
