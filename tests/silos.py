"""One silo laid out in files, as its own people would: keys, pinned cards, policy, configuration, rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securefl.config import Config, load_config
from securefl.crypto.identity import Identity
from securefl.crypto.trust import TrustStore
from securefl.ledger import Ledger
from securefl.local import starting_slm
from securefl.models import base_fingerprint
from securefl.policy import Ceiling, Policy
from securefl.release import PayloadKind
from securefl.server import Server

RUN = "fedcba9876543210" * 2
LABELS = ("a", "b")
PASSPHRASE = b"correct horse"


@dataclass
class Laid:
    """Where a silo's files lie, and who the others are."""

    folder: Path
    identity: Identity
    peers: tuple[Identity, ...]
    server: Identity
    config_file: Path

    @property
    def config(self) -> Config:
        return load_config(self.config_file)

    def serve(self) -> Server:
        """The server of the run, at its first step."""
        config = self.config
        start = starting_slm(config.slm.models[0], LABELS, config)
        cards = {one.name: one.card for one in (self.identity, *self.peers)}
        return Server(
            identity=self.server,
            roster=cards,
            run=RUN,
            config=config,
            shapes={name: start.shapes() for name in cards},
            model=start.state(),
            clock=lambda: 1_700_000_000.0,
        )


def toml(document: dict[str, dict[str, Any]]) -> str:
    """A document of flat sections as TOML."""
    lines = []
    for section, fields in document.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    return "\n".join(lines) + "\n"


def lay_out(
    folder: Path,
    encoder: Path,
    data: Path,
    *,
    passphrase: bytes | None = None,
    peers: Sequence[str] = ("hospital-b", "hospital-c"),
    client: dict[str, Any] | None = None,
    **policy: Any,
) -> Laid:
    """Write everything that hospital-a needs to take part in a run of FedAvg with two others."""
    folder.mkdir(parents=True)
    identity, server = Identity.generate("hospital-a"), Identity.generate("coordinator")
    others = tuple(Identity.generate(name) for name in peers)
    identity.save(folder / "hospital-a.key", passphrase)
    Ledger.create(folder / "ledger.jsonl", identity)
    store = TrustStore.open(folder / "trust", create=True)
    for card in (server.card, *(other.card for other in others)):
        store.add(card, card.fingerprint)
    clauses: dict[str, Any] = {
        "name": "hospital-a",
        "servers": (server.card.fingerprint,),
        "base_models": (base_fingerprint(str(encoder)),),
        "kinds": (PayloadKind.MODEL, PayloadKind.METRICS),
        "nonprivate": (PayloadKind.MODEL, PayloadKind.METRICS),
        "model_protections": ("sealed",),
        "max_release_bytes": 2**24,
        "max_bytes_per_day": 2**30,
        "approval": "automatic",
        "datasets": {"ward-7": Ceiling(max_epsilon=8.0, delta=1e-6)},
        **policy,
    }
    Policy(**clauses).save(folder / "policy.toml")
    document: dict[str, dict[str, Any]] = {
        "federation": {"method": "fedavg", "rounds": 2},
        "data": {"train": str(data / "train.csv"), "labels": list(LABELS)},
        "slm": {"models": [str(encoder)], "max_length": 16, "epochs": 1, "batch_size": 8},
        "protection": {"models": "sealed"},
        "client": {
            "identity": "hospital-a.key",
            "trust": "trust",
            "policy": "policy.toml",
            "server": "coordinator",
            "peers": list(peers),
            "run": RUN,
            "dataset": "ward-7",
            **(client or {}),
        },
    }
    config_file = folder / "client.toml"
    config_file.write_text(toml(document))
    return Laid(folder, identity, others, server, config_file)
