"""`securefl inspect`: what a file or folder is, as a document that can be printed or given out as JSON.

Reads one thing and describes it; verifies what can be verified without a key and says what was not. It never
prints a row's text or a tensor's values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from securefl.config import Config, load_config
from securefl.crypto import envelope
from securefl.crypto.identity import Card
from securefl.errors import PayloadError, ProtocolError, UsageError
from securefl.files import read_limited
from securefl.ledger import verify_ledger
from securefl.policy import Policy
from securefl.release import Limits, decode, release_from
from securefl.result import Result

MAX_DOCUMENT = 64 * 2**20
Document = dict[str, Any]


def inspect_path(path: Path) -> Document:
    """Describe an envelope, a release, a ledger, a card, a policy, a run or a configuration.

    Raises UsageError for what is none of these, ProtocolError for one of them that does not verify.
    """
    if path.is_dir():
        return _run(path)
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
    raise UsageError(f"{path}: is not an envelope, release, ledger, card, run or configuration of securefl")


def _toml(path: Path) -> Document:
    try:
        return {"what": "policy", **Policy.load(path).model_dump(mode="json", exclude_none=True)}
    except UsageError:
        return {"what": "configuration", **_described(load_config(path))}


def _described(config: Config) -> Document:
    return config.model_dump(mode="json", exclude_none=True)


def _ledger(path: Path) -> Document:
    summary = verify_ledger(path)
    account = summary.account
    return {
        "what": "ledger",
        "of": summary.name,
        "fingerprint": summary.fingerprint,
        "entries": summary.entries,
        "verified": True,
        "notes": list(summary.notes),
        "head": summary.head_hash,
        "epsilon": "no finite epsilon" if account.nonprivate else account.epsilon,
        "private_epsilon": account.private_epsilon,
        "delta": account.delta,
        "simulated": account.simulated,
        "not_private": list(account.nonprivate),
        "releases": [
            {
                "round": entry.round,
                "kind": entry.kind.value,
                "to": [p.name for p in entry.recipients],
                "protection": entry.protection,
                "bytes": entry.bytes,
                "sha256": entry.body_sha256,
                "claim": entry.claim.model_dump(mode="json"),
            }
            for entry in summary.releases
        ],
    }


def _json(path: Path) -> Document:
    data = read_limited(path, MAX_DOCUMENT)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not valid JSON") from error
    if isinstance(document, dict) and str(document.get("schema", "")).startswith("securefl.result/"):
        return _run(path.parent)
    card = Card.from_json(data, str(path))
    return {
        "what": "card",
        "name": card.name,
        "fingerprint": card.fingerprint,
        "read_aloud": card.short_fingerprint,
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
        **header.model_dump(mode="json"),
    }


def _run(folder: Path) -> Document:
    path = folder / "result.json"
    if not path.is_file():
        raise UsageError(f"{folder}: is not the folder of a finished run (it has no result.json)")
    try:
        result = Result.model_validate_json(read_limited(path, MAX_DOCUMENT))
    except ValidationError as error:
        raise ProtocolError(f"{path}: does not follow the schema securefl.result/1") from error
    ledgers = {}
    for row in result.clients:
        ledger = folder / "ledger" / f"{row.name}.jsonl"
        ledgers[row.name] = f"{verify_ledger(ledger).entries} entries, verified"
    return {
        "what": "run",
        "method": result.method,
        "name": result.name,
        "seed": result.seed,
        "rounds": len(result.rounds),
        "test_rows": result.test_rows,
        "ledgers": ledgers,
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
