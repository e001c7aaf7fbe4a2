"""An owner's approval of one plan that waits, written into the silo's ledger.

Runs beside the client that is waiting: it reads the plan from the client's folder, opens it with the silo's
keys, makes sure that it is the plan of that hash under today's configuration, and appends one signed line.
"""

from __future__ import annotations

from pathlib import Path

from securefl.agreement import plan_hash
from securefl.config import Config
from securefl.crypto import envelope
from securefl.crypto.identity import Identity
from securefl.crypto.trust import TrustStore
from securefl.errors import UsageError
from securefl.ledger import Ledger
from securefl.messages import RoundPlan, parse_plan
from securefl.models import base_fingerprint
from securefl.release import decode
from securefl.silo import client_terms
from securefl.state import waiting_plan


def waiting(config: Config, identity: Identity, plan: str) -> RoundPlan:
    """What the waiting plan of that hash asks.

    Raises UsageError where none waits, or where it would be another plan by now (the configuration or the
    checkpoint changed since), ProtocolError where it is none of the pinned server's.
    """
    terms = client_terms(config)
    message = waiting_plan(Path(terms.state), plan)
    server = TrustStore.open(Path(terms.trust)).card(terms.server)
    verified = envelope.verify(message, {server.name: server})
    opened = envelope.open_(verified, identity)
    found = plan_hash(opened, config, terms.dataset, base_fingerprint(config.slm.models[0]))
    if found != plan:
        raise UsageError(f"the plan {plan} would be {found} under the present configuration; ask for it anew")
    return parse_plan(decode(opened))


def approve_plan(config: Config, identity: Identity, plan: str) -> None:
    """Approve the waiting plan of that hash. Raises as `waiting`, and Refused for a second time."""
    asked = waiting(config, identity, plan)
    ledger = Ledger.open(Path(client_terms(config).ledger), identity)
    ledger.append_approval(plan=plan, run=asked.run, round=asked.round, step=asked.step.value)
