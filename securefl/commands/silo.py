"""`securefl client` and `securefl approve`: one silo, with its own keys, policy and ledger."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from securefl.console import ERR, OUT, Json, print_json, say, shown
from securefl.errors import AwaitingApproval, NotAvailable, UsageError
from securefl.files import check_out, read_limited, write_new
from securefl.messages import BAD_NAME

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
    file: Annotated[Path, typer.Argument(help="Configuration (TOML) with a [client] section.")],
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
        raise refused[0]


def described(found: Preview) -> dict[str, Any]:
    """A preview as JSON values: everything that would leave but the arrays' numbers."""
    document: dict[str, Any] = {
        "plan": found.hash,
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
    for one in found.refusals:
        ERR.print(f"[yellow]{shown(one.clause)}: {shown(one)}[/]", soft_wrap=True)
    if release is None or found.body is None:
        say('Nothing would leave but a signed "unavailable".')
        return
    whom = ", ".join(party.name for party in found.recipients)
    table = Table("Field", "Value", title=f"Would leave: {release.kind.value}, readable by {shown(whom)}")
    for name, value in sorted(release.info.items()):
        table.add_row(shown(name), shown(value))
    table.add_row("claim", shown(release.claim.model_dump(mode="json")))
    for name, array in sorted(release.tensors.items()):
        table.add_row(shown(name), f"{array.dtype} {list(array.shape)}, {array.nbytes:,} bytes")
    table.add_row("whole body", f"{len(found.body):,} bytes before sealing")
    OUT.print(table)
    if found.account is not None:
        epsilon = found.account.private_epsilon
        total = "none" if epsilon is None else f"epsilon {epsilon:.4g} at delta {found.account.delta:g}"
        say(f"The data set's private releases would then add up to: {total}")
    say("Nothing was sent, charged or written down.")


def approve(
    plan: Annotated[str, typer.Argument(metavar="HASH", help="The waiting plan, 64 hex digits.")],
    config_file: Annotated[Path, typer.Option("--config", help="The client's configuration.")] = Path(
        "client.toml"
    ),
    passphrase_file: Passphrase = None,
    as_json: Json = False,
) -> None:
    """Let one waiting plan go on, where the policy says approval = "manual". The ledger records it."""
    from securefl.approval import approve_plan
    from securefl.config import load_config

    if re.fullmatch("[0-9a-f]{64}", plan) is None:
        raise UsageError("a plan's hash is 64 hexadecimal digits in lower case, and is given whole")
    config = load_config(config_file)
    approved = approve_plan(config, _identity(config, passphrase_file), plan)
    parameters = approved.model_dump(mode="json")
    if as_json:
        print_json({"approved": plan, "plan": parameters})
        return
    table = Table("Parameter", "Value", title=f"Approved: {plan}")
    for name, value in parameters.items():
        table.add_row(shown(name), shown(value))
    OUT.print(table)
    say("The client answers it when the server asks again; any other plan waits anew.")


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
    place.parent.mkdir(parents=True, exist_ok=True)
    write_new(place, text.encode())
    say(f"{shown(out)}: permits nothing yet; set the clauses that may be")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(epilog="Example: securefl client client.toml --dry-run state/HASH.plan")(client)
    app.command(epilog="Example: securefl approve HASH --config client.toml")(approve)
    app.command(epilog="Example: securefl policy hospital-a --out policy.toml")(policy)
