"""Real clients before mutants: of the server's plans, and of the centroids that it relays.

Apart from `subjects` because a client needs a model: importing it loads torch.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from itertools import count
from pathlib import Path

import numpy as np

from securefl.client import Client
from securefl.crypto import envelope
from securefl.ledger import Ledger
from securefl.messages import parse_plan
from securefl.methods.fedkc import Knowledge
from securefl.policy import Policy
from securefl.relayed import Reader, relayed_knowledge
from securefl.release import PayloadKind, decode, encode, encode_release, release_from
from tests.federation import Parties
from tests.fuzz.messages import Form, MessageMutants, Seed
from tests.fuzz.subjects import EVE, SITTING, refusals, require_own_bytes


class PlanOpening:
    """A real client under a policy that lets nothing out: what opens as a plan is answered "unavailable"."""

    name = "plan"
    forms = tuple(Form)

    def __init__(self, parties: Parties, folder: Path) -> None:
        """folder: for the client's ledgers, one a sitting."""
        self._client = parties.clients["silo-1"]
        self._server = parties.server.identity
        self._ledgers = (folder / f"{number}.jsonl" for number in count())
        plans = parties.server.outgoing()
        self._seeds = [self._seed(data, parties.clients[name]) for name, data in plans.items()]
        known = [self._server, *(one.identity for one in parties.clients.values())]
        self._mutants = MessageMutants([self._seeds[0], *self._seeds], known, [EVE])
        self._sit()

    def _seed(self, data: bytes, client: Client) -> Seed:
        verified = envelope.verify(data, {self._server.name: self._server.card})
        body = envelope.open_(verified, client.identity)
        header = verified.header.model_dump(mode="json")
        return Seed(data, header, body, self._server, (client.identity.card,))

    def _sit(self) -> None:
        self._facing = dataclasses.replace(
            self._client,
            policy=Policy(name="silo-1", approval="automatic"),
            ledger=Ledger.create(next(self._ledgers), self._client.identity),
            refusals=deque(),
            ignored=deque(),
        )
        self._faced = self._taken = 0

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        if self._faced == SITTING or self._taken:
            if not self._taken:
                # What was refused changed nothing: the honest plan is still due.
                self._require_unavailable(self._facing.handle(self._seeds[0].data))
            self._sit()
        self._faced += 1
        return self._mutants.draw(rng, form)

    def attempt(self, data: bytes) -> bytes:
        return self._facing.handle(data)

    def check(self, data: bytes, taken: bytes, form: Form) -> None:
        self._taken += 1
        verified = envelope.verify(data, {self._server.name: self._server.card})
        require_own_bytes(data, verified.header)
        if form is Form.RAW:
            assert data == self._seeds[0].data
        body = envelope.open_(verified, self._client.identity)
        opened = decode(body)
        assert encode(opened.kind, opened.document, opened.tensors) == body
        self._require_unavailable(taken)

    def _require_unavailable(self, answer: bytes) -> None:
        me = self._client.identity
        opened = envelope.open_(envelope.verify(answer, {me.name: me.card}), self._server)
        assert opened == encode(PayloadKind.UNAVAILABLE, {}, {})


class Relayed:
    """A silo that reads relayed centroids: a mutant is noted as ignored, by its reason, or used."""

    name = "relayed"
    forms = tuple(Form)

    def __init__(self, parties: Parties) -> None:
        """parties: a FedKC federation at its sharing step."""
        answers = parties.answers()
        for answer in answers.values():
            parties.server.receive(answer)
        parties.server.close_step()
        self._clients = parties.clients
        client = self._clients["silo-1"]
        server = parties.server.identity
        due = envelope.verify(parties.server.outgoing()["silo-1"], {server.name: server.card})
        self._plan = parse_plan(decode(envelope.open_(due, client.identity)))
        self._reader = Reader(client.identity, client.roster, client.slm, envelope.VERSION)
        self._honest = np.frombuffer(answers["silo-3"], np.uint8)
        seeds = [self._seed(answers[name], self._clients[name]) for name in ("silo-2", "silo-3")]
        known = [server, *(one.identity for one in self._clients.values())]
        self._mutants = MessageMutants([seeds[0], *seeds], known, [EVE])

    def _seed(self, answer: bytes, sender: Client) -> Seed:
        verified = envelope.verify(answer, {sender.identity.name: sender.identity.card})
        header = verified.header.model_dump(mode="json")
        body = envelope.open_(verified, self._reader.identity)
        to = tuple(self._clients[party.name].identity.card for party in verified.header.recipients)
        return Seed(answer, header, body, sender.identity, to)

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        return self._mutants.draw(rng, form)

    def attempt(self, data: bytes) -> Knowledge:
        """Raises what was noted of the relayed mutant, as the exception of that name."""
        assert self._plan.fedkc is not None
        tensors = {"relay/silo-2": np.frombuffer(data, np.uint8), "relay/silo-3": self._honest}
        found, ignored = relayed_knowledge(tensors, self._plan, self._plan.fedkc, self._reader)
        for dropped in ignored:
            assert dropped.name == "silo-2", f"the centroids of {dropped.name} were honest"
            raise refusals()[dropped.error](dropped.reason)
        return found[0]

    def check(self, data: bytes, taken: Knowledge, form: Form) -> None:
        verified = envelope.verify(data, {"silo-2": self._clients["silo-2"].identity.card})
        require_own_bytes(data, verified.header)
        if form is Form.RAW:
            assert data == self._mutants.seeds[0].data
        body = envelope.open_(verified, self._reader.identity)
        release = release_from(decode(body))
        assert encode_release(release) == body
        assert np.isfinite(taken.vectors).all()
        np.testing.assert_array_equal(taken.vectors, release.tensors["centroids"])
