"""Ledgers for tests: entries by default values, and the tools of somebody who alters or forges one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from securefl.crypto.identity import Identity
from securefl.ledger import Ledger, RefusalEntry, ReleaseEntry, head_path
from securefl.messages import Party
from securefl.release import DistributedNoise, DpSgd, GaussianSums, NonPrivate, PayloadKind, canonical_json

RUN, PLAN = "ab" * 16, "c" * 64
SILO, OTHER = Identity.generate("silo-1"), Identity.generate("silo-2")
SERVER = Party(name="server", key="5" * 64)
PEERS = (Party(name="silo-2", key="6" * 64), Party(name="silo-3", key="7" * 64))
PLAIN = NonPrivate(reason="weights trained without differential privacy")


def gaussian(mu: float, delta: float = 1e-5, simulated: bool = False) -> GaussianSums:
    return GaussianSums(
        epsilon=1.0,  # of the one release; the account composes mu
        delta=delta,
        mu=mu,
        clip=6.0,
        noise_multiplier=2.0,
        count_multiplier=3.0,
        prediction_multiplier=3.0,
        generator="os",
        simulated=simulated,
    )


def distributed(rho: float, delta: float = 1e-5, simulated: bool = False) -> DistributedNoise:
    return DistributedNoise(
        epsilon=1.0,
        delta=delta,
        rho=rho,
        clip=1.0,
        sensitivity=2.0,
        noise_multiplier=2.0,
        silos=4,
        threshold=3,
        colluders=0,
        bits=32,
        wrap_probability=1e-9,
        generator="os",
        simulated=simulated,
    )


def sampled(steps: int, noise: float = 1.0, delta: float = 1e-5) -> DpSgd:
    return DpSgd(
        epsilon=1.0,  # of the one release; the account composes the steps
        delta=delta,
        noise_multiplier=noise,
        sample_rate=0.1,
        steps=steps,
        clip=1.0,
        head_share=0.5,
        per_unit=1,
        accountants="two",
        generator="os",
        simulated=False,
    )


def charge(ledger: Ledger, **fields: Any) -> ReleaseEntry:
    values: dict[str, Any] = {
        "run": RUN,
        "round": 1,
        "step": "train",
        "plan": PLAN,
        "plan_sequence": 3,
        "kind": PayloadKind.MODEL,
        "recipients": [SERVER],
        "protection": "sealed",
        "envelope": b"the envelope",
        "body": b"the body",
        "dataset": "notes",
        "claim": PLAIN,
        "permit": lambda account: None,
        **fields,
    }
    return ledger.append(**values)


def refuse(ledger: Ledger, **fields: Any) -> RefusalEntry:
    values: dict[str, Any] = {
        "run": RUN,
        "round": 1,
        "step": "train",
        "plan": PLAN,
        "plan_sequence": 3,
        "clause": "methods",
        "reason": "the policy of silo-1 forbids it",
        "envelope": b"unavailable",
        **fields,
    }
    return ledger.append_refusal(**values)


def clock() -> Callable[[], float]:
    ticks = iter(range(10_000))
    return lambda: 1_760_000_000.5 + next(ticks)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def signed(document: dict[str, Any], by: Identity = SILO, context: bytes = b"securefl/1 ledger") -> bytes:
    """A line as the written format has it, signed again: what the silo's own keys can forge."""
    unsigned = {key: value for key, value in document.items() if key != "signature"}
    digest = hashlib.sha256(canonical_json(unsigned)).digest()
    return canonical_json({**unsigned, "signature": by.sign(context, digest).document()}) + b"\n"


def point(lines: list[bytes], index: int) -> dict[str, Any]:
    return {"index": index, "hash": hashlib.sha256(lines[index]).hexdigest()}


def head_of(lines: list[bytes]) -> dict[str, Any]:
    """The head record, unsigned, of these lines: worked out from what they say, by the written format."""
    documents = [json.loads(line) for line in lines]
    hashes = [hashlib.sha256(line).hexdigest() for line in lines]
    accounts: dict[str, Any] = {}
    history, restored = [point(lines, 0)], False
    for index, document in enumerate(documents):
        match document["entry"]:
            case "release":
                accounts[document["dataset"]] = document["account"]
            case "restored":
                history, restored = [*history, point(lines, index)], True
            case "confirmed":
                accounts, restored = document["accounts"], False
    return {
        "version": 2,
        "index": len(lines) - 1,
        "hash": hashes[-1],
        "time": documents[-1]["time"],
        "history": history,
        "restored": restored,
        "accounts": accounts,
    }


def write_head(path: Path, lines: list[bytes], by: Identity = SILO, **changed: Any) -> None:
    head_path(path).write_bytes(signed({**head_of(lines), **changed}, by, b"securefl/1 ledger-head"))


def rechain(path: Path, documents: list[dict[str, Any]]) -> None:
    """Lines signed and chained again from the first altered one on, and a head: by who has the keys."""
    written: list[bytes] = []
    known = lines_of(path)
    for number, document in enumerate(documents):
        previous = hashlib.sha256(written[-1]).hexdigest() if written else None
        line = known[number] if number < len(known) else b"{}"
        if written != known[:number] or json.loads(line) != document:
            line = signed({**document, "index": number, "previous": previous})
        written.append(line)
    path.write_bytes(b"".join(written))
    write_head(path, written)


def finished_ledger(path: Path) -> Path:
    """Genesis, a model, two noised centroid releases and a last model."""
    ledger = Ledger.create(path, SILO, clock())
    charge(ledger)
    share = {"step": "share", "kind": PayloadKind.CENTROIDS, "recipients": PEERS, "protection": "peer"}
    charge(ledger, round=2, claim=gaussian(0.3), **share)
    charge(ledger, round=3, claim=gaussian(0.4, 1e-6, True), **share)
    charge(ledger, round=3)
    return path


def copied(finished: Path, folder: Path) -> Path:
    """A ledger's files in another folder."""
    for file in finished.parent.iterdir():
        shutil.copy(file, folder)
    return folder / finished.name
