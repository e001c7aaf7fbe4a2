"""Small federations for tests: a configuration over tiny random models, and parties wired by hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securefl.client import Client
from securefl.config import AVERAGING, Config, parse_config
from securefl.crypto import envelope
from securefl.crypto.identity import Identity
from securefl.data import Corpus, load_corpus
from securefl.ledger import Ledger
from securefl.local import LocalTraining, SiloData, train_locally
from securefl.models import base_fingerprint, load_slm
from securefl.policy import Ceiling, Policy
from securefl.privacy import noise_source
from securefl.release import PayloadKind, Release, decode_release
from securefl.server import Server
from securefl.state import StateFolder

RUN = "0123456789abcdef" * 2


def tiny_config(encoder: Path, data: Path, /, **changes: dict[str, Any]) -> Config:
    """Three silos of a two-label data set; `changes` update sections of the document.

    Averaged models are sealed to the server unless `changes` say otherwise: of one step, and easy to look at.
    """
    document: dict[str, Any] = {
        "federation": {"method": "fedavg", "rounds": 2},
        "data": {
            "train": str(data / "train.csv"),
            "test": str(data / "test.csv"),
            "split": {"by": "dirichlet", "silos": 3, "alpha": 2.0, "min_rows": 12},
        },
        "slm": {"models": [str(encoder)], "max_length": 16, "epochs": 1, "batch_size": 8},
        "fedkc": {"clusters": 3},
        "privacy": {"centroids": {"min_size": 2}},
    }
    for section, fields in changes.items():
        document.setdefault(section, {}).update(fields)
    if document["federation"]["method"] in AVERAGING:
        document.setdefault("protection", {}).setdefault("models", "sealed")
    return parse_config(document)


@dataclass
class Parties:
    """A server and its clients, before the first message."""

    server: Server
    clients: dict[str, Client]
    corpus: Corpus

    def answers(self) -> dict[str, bytes]:
        """Every silo's answer to the server's plans of this step."""
        return {name: self.clients[name].handle(plan) for name, plan in self.server.outgoing().items()}

    def opened(self, answer: bytes) -> Release:
        """What the server reads of a silo's answer that is sealed to it."""
        verified = envelope.verify(answer, self.server.roster)
        return decode_release(envelope.open_(verified, self.server.identity))

    def play(self, until: Callable[[Server], bool]) -> None:
        """Run honest steps until `until` holds for the server."""
        while not until(self.server):
            for answer in self.answers().values():
                self.server.receive(answer)
            self.server.close_step()


ALL_KINDS = (PayloadKind.MODEL, PayloadKind.METRICS, PayloadKind.CENTROIDS, PayloadKind.EMBEDDING_CENTROIDS)


def make_parties(
    config: Config,
    folder: Path,
    train: LocalTraining = train_locally,
    kinds: Sequence[PayloadKind] = ALL_KINDS,
    **policy: Any,
) -> Parties:
    """Real identities, policies and ledgers; `policy` overrides clauses of every silo's policy."""
    corpus = load_corpus(config)
    base = base_fingerprint(config.slm.models[0])
    start = load_slm(
        config.slm.models[0], corpus.labels, max_length=config.slm.max_length, train_embeddings=False, seed=1
    )
    names = list(corpus.train)
    identities = {name: Identity.generate(name) for name in [*names, "server"]}
    cards = {name: identity.card for name, identity in identities.items()}
    server_card = cards.pop("server")
    clients = {}
    for name in names:
        peers = {other: card for other, card in cards.items() if other != name}
        clauses: dict[str, Any] = {
            "name": name,
            "simulation": True,
            "servers": (server_card.fingerprint,),
            "peers": tuple(card.fingerprint for card in peers.values()),
            "base_models": (base,),
            "kinds": tuple(kinds),
            "nonprivate": tuple(kinds),
            "model_protections": (config.protection.models or "sealed",),
            "min_cohort": 3,
            "centroid_protections": ("peer",),
            "min_cluster_size": 2,
            "min_noise_multiplier": 0.01,
            "max_release_bytes": 2**24,
            "max_bytes_per_day": 2**40,
            "approval": "automatic",
            "datasets": {name: Ceiling(max_epsilon=50.0, delta=1e-5)},
            **policy,
        }
        clients[name] = Client(
            identity=identities[name],
            server=server_card,
            roster=peers,
            policy=Policy(**clauses),
            ledger=Ledger.create(folder / f"{name}.jsonl", identities[name]),
            config=config,
            run=RUN,
            data=SiloData(corpus.train[name], corpus.validation[name]),
            dataset=name,
            slm=copy.deepcopy(start),
            base_sha256=base,
            noise=noise_source(3 + names.index(name)),  # the same for two silos would add up, not average
            clock=time.time,
            state=StateFolder(folder / f"{name}.state"),
            train=train,
        )
    server = Server(
        identity=identities["server"],
        roster=cards,
        run=RUN,
        config=config,
        clock=time.time,
        shapes={name: start.shapes() for name in names},
        model=start.state(),
    )
    return Parties(server, clients, corpus)
