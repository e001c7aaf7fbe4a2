"""`securefl inspect`: what a file or folder is, as a document that can be printed or given out as JSON.

Reads one thing and describes it; verifies what can be verified without a key and says what was not. It never
prints a row's text or a tensor's values.
"""

from __future__ import annotations

import tomllib
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securefl._ledger_lines import parse_head
from securefl.account import Account
from securefl.config import load_config
from securefl.crypto import envelope
from securefl.crypto.ckks_terms import COLLUSION, DEFAULT, POST_QUANTUM
from securefl.crypto.identity import Card
from securefl.crypto.statements import REVOCATION, ROTATION, Rotation, parse_statement
from securefl.crypto.trust import TrustStore
from securefl.errors import PayloadError, UsageError
from securefl.files import read_limited
from securefl.ledger import verify_ledger
from securefl.ledger_copies import verify_copy
from securefl.outlook import centroid_outlook, private_outlook
from securefl.policy import Policy
from securefl.receipt import RECEIPT
from securefl.release import (
    Limits,
    PayloadKind,
    decode,
    parse_json,
    release_from,
)
from securefl.verification import MAX_DOCUMENT, verify_run

# Beyond this depth a document is cut: nothing that securefl writes is nested as deeply.
_MAX_DEPTH = 32
# Characters that turn the direction of what stands beside them.
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
Document = dict[str, Any]


def inspect_path(path: Path) -> Document:
    """Describe an envelope, release, ledger, card, statement, trust store, policy, run or configuration.

    Its strings can be printed: control characters and lone surrogates are U+FFFD.
    Raises UsageError for what is none of these, ProtocolError for one of them that does not verify.
    """
    return {_printable(key): _clean(value) for key, value in _document(path).items()}


def _printable(text: str) -> str:
    return "".join(
        "\ufffd" if unicodedata.category(char) in ("Cc", "Cs") or char in _DIRECTION else char
        for char in text
    )


def _clean(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return _printable(value)
    if isinstance(value, Mapping | list | tuple):
        if depth >= _MAX_DEPTH:
            return "…"
        if isinstance(value, Mapping):
            return {_printable(str(key)): _clean(entry, depth + 1) for key, entry in value.items()}
        return [_clean(entry, depth + 1) for entry in value]
    return value


def _document(path: Path) -> Document:
    if str(path).startswith("builtin:") or (path / "config.json").is_file():
        from securefl.models import base_fingerprint  # slow to load, and nothing else here needs it

        return {"what": "checkpoint", "name": str(path), "sha256": base_fingerprint(str(path))}
    if any(path.glob("*.answer")) or any(path.glob("*.plan")):
        return _state(path)
    if path.is_dir():
        return _store(path) if (path / "retired").is_dir() else _run(path)
    if not path.is_file():
        raise UsageError(f"{path}: does not exist")
    match path.suffix:
        case ".toml":
            return _toml(path)
        case ".jsonl":
            return _ledger(path)
        case ".json":
            return _json(path)
        case ".safetensors":
            return _release(path)
    with path.open("rb") as file:
        start = file.read(len(envelope.MAGIC))
    if start == envelope.MAGIC:
        return _envelope(path)
    if start.startswith(b'{"format'):
        return _copy(path)
    if path.suffix == ".key":
        raise UsageError(f"{path}: looks like private keys, of which nothing is shown; inspect the card")
    raise UsageError(f"{path}: is not an envelope, release, ledger, card, run or configuration of securefl")


def _toml(path: Path) -> Document:
    try:
        is_policy = "federation" not in tomllib.loads(read_limited(path, MAX_DOCUMENT).decode())
    except (ValueError, RecursionError):
        is_policy = False  # `load_config` says what is wrong with it
    if is_policy:
        return {"what": "policy", **Policy.load(path).model_dump(mode="json", exclude_none=True)}
    config = load_config(path)
    sets = POST_QUANTUM if config.protection.post_quantum else DEFAULT
    return {
        "what": "configuration",
        **_collusion(config.protection.models == "ckks"),
        **({"parameters": sets.security} if config.protection.models == "ckks" else {}),
        "not_checked": "the data: no row was looked at, so a column that is not there, or a delta not "
        "below 1 / a silo's units, shows when the run starts",
        "account": private_outlook(config),
        **({"centroids": centroid_outlook(config)} if config.federation.method == "fedkc" else {}),
        **config.model_dump(mode="json", exclude_none=True),
    }


def _collusion(encrypted: bool) -> Document:
    """What has to be said wherever CKKS protects something."""
    return {"collusion": COLLUSION} if encrypted else {}


def _ledger(path: Path) -> Document:
    summary = verify_ledger(path)
    several = len(summary.accounts) > 1
    encrypted = any(entry.protection == "ckks" for entry in summary.releases)
    return {
        "what": "ledger",
        **_collusion(encrypted),
        "of": summary.name,
        "fingerprint": summary.fingerprint,
        "entries": summary.entries,
        "verified": True,
        "notes": list(summary.notes),
        "head": summary.head_hash,
        "restored": summary.restored,
        **({} if several else _account(summary.account)),
        "data_sets": {name: _account(account) for name, account in summary.accounts.items()},
        "releases": [
            {
                "data_set": entry.dataset,
                "round": entry.round,
                "kind": entry.kind.value,
                "to": [p.name for p in entry.recipients],
                "protection": entry.protection,
                "bytes": entry.bytes,
                "sha256": entry.body_sha256,
                "claim": entry.claim.model_dump(mode="json"),
                "account": _account(entry.account),
            }
            for entry in summary.releases
        ],
        "refusals": [
            {"round": entry.round, "step": entry.step, "clause": entry.clause, "reason": entry.reason}
            for entry in summary.refusals
        ],
        "approvals": [
            {"round": entry.round, "step": entry.step, "plan": entry.plan} for entry in summary.approvals
        ],
    }


def _account(account: Account) -> Document:
    return {
        "epsilon": "no finite epsilon" if account.nonprivate else account.epsilon,
        "private_epsilon": account.private_epsilon,
        "delta": account.delta,
        "unit": account.unit,
        "adjacency": account.adjacency,
        "simulated": account.simulated,
        "mu": account.mu,
        **({"rho": account.rho} if account.rho else {}),
        "trainings": [part.model_dump() for part in account.sampled],
        "not_private": list(account.nonprivate),
    }


def _json(path: Path) -> Document:
    data = read_limited(path, MAX_DOCUMENT)
    try:
        document = parse_json(data)
    except ValueError as error:
        raise UsageError(f"{path}: is not valid JSON") from error
    if isinstance(document, dict) and str(document.get("schema", "")).startswith("securefl.result/"):
        return _run(path.parent)
    kind = document.get("format") if isinstance(document, dict) else None
    if kind in (ROTATION, REVOCATION):
        return _statement(data, path)
    if kind == RECEIPT:
        note = "only the server's card shows whether it said this: securefl ledger confirm"
        document.pop("signature", None)
        return {"what": "receipt", "verified": False, "note": note, **document}
    if isinstance(document, dict) and "history" in document:
        head, _ = parse_head(str(path), data)
        return {
            "what": "head record of a ledger",
            "verified": False,
            "note": "whose it is shows beside its ledger only",
            **head.model_dump(mode="json"),
        }
    return {"what": "card", **_card(Card.from_json(data, str(path)))}


def _copy(path: Path) -> Document:
    summary = verify_copy(path)
    return {"what": "copy of a ledger", "of": summary.name, "entries": summary.entries, "verified": True}


def _card(card: Card) -> Document:
    return {"name": card.name, "fingerprint": card.fingerprint, "read_aloud": card.short_fingerprint}


def _statement(data: bytes, path: Path) -> Document:
    statement = parse_statement(data, str(path))
    if isinstance(statement, Rotation):
        note = "only the old card shows whether its holder said this: securefl trust apply"
        return {
            "what": "rotation",
            "verified": False,
            "note": note,
            "old": statement.old,
            "new": _card(statement.card),
        }
    return {"what": "revocation", "verified": True, **_card(statement.card)}


def _state(path: Path) -> Document:
    return {
        "what": "state folder of a client",
        "answers": sorted(file.stem for file in path.glob("*.answer")),
        "plans that wait": sorted(file.stem for file in path.glob("*.plan")),
    }


def _store(path: Path) -> Document:
    store = TrustStore.open(path)
    return {
        "what": "trust store",
        "cards": [_card(card) for card in store.cards().values()],
        "retired": [
            {"name": one.name, "fingerprint": one.fingerprint, "why": one.why} for one in store.retired()
        ],
    }


def _release(path: Path) -> Document:
    body = decode(read_limited(path, Limits().max_bytes))
    shapes = {name: f"{array.dtype} {list(array.shape)}" for name, array in sorted(body.tensors.items())}
    try:
        release = release_from(body)
    except PayloadError:
        return {"what": "body", "kind": body.kind.value, "document": dict(body.document), "tensors": shapes}
    return {
        "what": "release",
        "kind": release.kind.value,
        "claim": release.claim.model_dump(mode="json"),
        "info": dict(release.info),
        "tensors": shapes,
    }


def _envelope(path: Path) -> Document:
    data = read_limited(path, envelope.Limits().max_envelope)
    header = envelope.read_header(data)
    return {
        "what": "envelope",
        "bytes": len(data),
        "verified": False,
        "note": "the header is readable by anyone; signatures and content were not checked",
        **_collusion(header.kind in (PayloadKind.GROUP_KEY, PayloadKind.ENCRYPTED_MODEL)),
        **header.model_dump(mode="json"),
    }


def _run(folder: Path) -> Document:
    run = verify_run(folder)
    result = run.result
    return {
        "what": "run",
        "method": result.method,
        "name": result.name,
        "seed": result.seed,
        "rounds": len(result.rounds),
        "test_rows": result.test_rows,
        **_collusion(any(one.protection == "ckks" for one in result.sums)),
        "sums": [
            {"round": one.round, "opened_by": one.opened_by, "silos": one.silos, "rows": one.rows}
            for one in result.sums
        ],
        "ledgers": {name: f"{count} entries, verified" for name, count in run.entries.items()},
        "silos": {
            row.name: {
                "train_rows": row.train_rows,
                "test_accuracy": row.test_accuracy,
                "baseline_accuracy": row.baseline_accuracy,
                "releases": len(row.releases),
                "epsilon": "no finite epsilon" if row.no_finite_epsilon else row.epsilon,
            }
            for row in result.clients
        },
    }
