"""Masked rounds before mutants: of what silos send their server, and of what a server sends its silos.

The machines are the real ones. Most rounds are of the cheap suite of `tests.explore`, some of the real one;
the messages are as they lie in an opened body, so that parsing them is part of it. RAW: somebody who holds no
silo's key changes a message. SIGNED: a silo changes its own, also one that the server relays, and signs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from securefl.crypto.masking_client import MaskingClient, Step
from securefl.crypto.masking_messages import (
    ADVERT_CONTEXT,
    SHARES_CONTEXT,
    SURVIVORS_CONTEXT,
    Advert,
    AdvertList,
    Dealing,
    Delivery,
    MaskedInput,
    Message,
    ShareMessage,
    SurvivorList,
    SurvivorSignature,
    Unmasking,
    UnmaskRequest,
)
from securefl.crypto.masking_server import MaskingServer, Phase
from securefl.crypto.masks import pack, unpack
from securefl.errors import PayloadError, ProtocolError, WrongRound
from securefl.release import PayloadKind, canonical_json, decode, encode
from tests.explore.machines import clone
from tests.fuzz.messages import Form
from tests.fuzz.subjects import SITTING
from tests.masked_rounds import HYBRID, SUITE, Round
from tests.mutants import mutate_body, mutate_bytes, mutate_document, with_row

SILOS = 4  # threshold 3
Count = Callable[[str, BaseException], None]
_SENT: tuple[type[Message], ...] = (Advert, ShareMessage, MaskedInput, SurvivorSignature, Unmasking)
_RELAYED: dict[Step, type[Message]] = {
    Step.SHARE: AdvertList,
    Step.MASK: Delivery,
    Step.SIGN: SurvivorList,
    Step.UNMASK: UnmaskRequest,
}
_CONTEXTS = {
    "Advert": ADVERT_CONTEXT,
    "ShareMessage": SHARES_CONTEXT,
    "Dealing": SHARES_CONTEXT,
    "SurvivorSignature": SURVIVORS_CONTEXT,
}


def body_of(message: Message) -> bytes:
    """The message as the body of an envelope holds it. The kind does not matter to what parses its arrays."""
    return encode(PayloadKind.ADVERT, {}, message.tensors())


def require_own_arrays(data: bytes, message: Message) -> None:
    """The arrays of the body are exactly those in which the message travels."""
    body = decode(data)
    assert encode(body.kind, body.document, message.tensors()) == data


class Honest:
    """One round, with everything that was said in it, and every silo's client as it was before each step.

    dropped: the silos that fall silent before they send their masked input.
    """

    def __init__(self, suite: Any = SUITE, dropped: Iterable[int] = (), **terms: Any) -> None:
        self.round = Round(SILOS, suite=suite, **terms)
        self.suite, self.names = suite, self.round.names
        self.left = [silo for silo in range(SILOS) if silo not in set(dropped)]
        self.clients: dict[Step, dict[int, MaskingClient]] = {
            Step.ADVERTISE: dict(enumerate(self.round.clients))
        }
        self.relayed: dict[Step, dict[int, Any]] = {}
        self.sent: dict[Phase, dict[int, Any]] = {}
        server: MaskingServer = self.round.server
        broadcast: Any = None
        for phase in list(Phase)[:5]:
            step, silos = Step(phase), range(SILOS) if phase < Phase.INPUTS else self.left
            before = self.clients.setdefault(step, {})
            self.relayed[step] = {silo: self.heard(step, silo, broadcast) for silo in silos}
            self.sent[phase] = {}
            after = self.clients[Step(step + 1)] = {}
            for silo in silos:
                machine = before[silo]
                before[silo], after[silo] = clone(machine), machine
                self.sent[phase][silo] = self.step(machine, step, silo, self.relayed[step][silo])
                self.receive(server, phase, silo, self.sent[phase][silo])
            broadcast = self.close(server, phase)

    def heard(self, step: Step, silo: int, broadcast: Any) -> Any:
        return broadcast[self.names[silo]] if step is Step.MASK else broadcast

    def step(self, client: MaskingClient, step: Step, silo: int, heard: Any) -> Any:
        match step:
            case Step.ADVERTISE:
                return client.advertise()
            case Step.SHARE:
                return client.share(heard)
            case Step.MASK:
                return client.masked(heard, self.round.fresh(silo))
            case Step.SIGN:
                return client.sign(heard)
            case _:
                return client.unmask(heard)

    def receive(self, server: MaskingServer, phase: Phase, silo: int, message: Any) -> None:
        receivers: tuple[Callable[[str, Any], None], ...] = (
            server.receive_advert,
            server.receive_shares,
            server.receive_input,
            server.receive_signature,
            server.receive_unmasking,
        )
        receivers[phase](self.names[silo], message)

    def close(self, server: MaskingServer, phase: Phase) -> Any:
        closers: tuple[Callable[[], Any], ...] = (
            server.close_adverts,
            server.close_shares,
            server.close_inputs,
            server.close_signatures,
            server.result,
        )
        return closers[phase]()

    def server_at(self, phase: Phase) -> MaskingServer:
        """A server that heard the same up to a phase."""
        terms = self.round.terms
        server = MaskingServer(self.round.roster, terms, suite=self.suite, threads=1)
        for before in list(Phase)[:phase]:
            for silo, message in self.sent[before].items():
                self.receive(server, before, silo, message)
            self.close(server, before)
        return server

    def sign(self, message: Any, old: Any, but: str = "") -> Any:
        """The message with the parts that silos sign in it signed by them, whatever they now say.

        old: the honest message, to find the hash of a deal that changed. but: a silo that does not sign.
        """
        match message:
            case AdvertList():
                parts = tuple(self.sign(one, None, but) for one in message.adverts)
                return message.model_copy(update={"adverts": parts})
            case Delivery():
                before = {one.dealer: one for one in old.dealings}
                parts = tuple(self.sign(one, before.get(one.dealer), but) for one in message.dealings)
                return message.model_copy(update={"dealings": parts})
            case UnmaskRequest():
                parts = tuple(self.sign(one, None, but) for one in message.signatures)
                return message.model_copy(update={"signatures": parts})
            case Dealing() if old is not None:
                leaves = tuple(
                    message.deal.leaf() if leaf == old.deal.leaf() else leaf for leaf in message.leaves
                )
                message = message.model_copy(update={"leaves": leaves})
        signer = next(
            (getattr(message, one) for one in ("silo", "dealer", "signer") if hasattr(message, one)), ""
        )
        if signer not in self.names or signer == but:
            return message
        identity = self.round.ids[self.names.index(signer)]
        signature = self.suite.sign(identity, _CONTEXTS[type(message).__name__], message.statement())
        return message.model_copy(update={"signature": signature})


def rounds() -> list[Honest]:
    """Of the cheap suite, whole, with a silo that dropped out, and another round; and of the real one."""
    dropped = {SILOS - 1}
    return [Honest(), Honest(dropped=dropped), Honest(round=4), Honest(HYBRID, dropped)]


def mutated(
    rng: random.Random, honest: Honest, message: Message, others: list[Message], sign: bool, but: str = ""
) -> bytes:
    """A body with the message mutated. others: of its kind, other silos' and of another round."""
    body = body_of(message)
    draw = rng.random()
    if draw < 0.1:
        return mutate_body(rng, body, [body_of(other) for other in others])
    if isinstance(message, MaskedInput) and draw < 0.7:
        name = rng.choice(list(message.tensors()))
        row = message.tensors()[name].tobytes()
        theirs = [other.tensors()[name].tobytes() for other in others]
        return with_row(body, name, mutate_bytes(rng, row, theirs))
    if isinstance(message, MaskedInput):
        document, known = {"adverts": message.document()["adverts"]}, [one.document() for one in others]
    else:
        document, known = message.document(), [one.document() for one in others]
    text = mutate_document(rng, document, known)
    if sign:
        try:
            parsed = type(message).from_tensors({"message": np.frombuffer(text, np.uint8)})
            text = canonical_json(honest.sign(parsed, message, but).document())
        except ProtocolError:
            pass  # it has another form altogether, and goes as it is
    return with_row(body, "message", text)


def state_of(server: MaskingServer) -> dict[str, Any]:
    """All that a server of a masked round holds, as values that compare."""
    return {
        name: {key: one.tobytes() if isinstance(one, np.ndarray) else one for key, one in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in vars(server).items()
    } | {name: {who: dict(one) for who, one in vars(server)[name].items()} for name in ("_blinds", "_roots")}


class MaskedServer:
    """A `MaskingServer` at one step of a round, facing mutants of what one silo would send it.

    What it refuses must have changed nothing: the honest message is then taken, and the sum is that of plain
    integers. What it takes of a silo that signs mutants may end the round, in so many words, or leave a silo
    out of it; the sum is then exactly that of the others, or has in it exactly what that silo put there.
    """

    name = "summing"
    forms = (Form.RAW, Form.SIGNED)

    def __init__(self, rng: random.Random, count: Count) -> None:
        self._rng, self._count, self._rounds = rng, count, rounds()
        self._sit()

    def _sit(self) -> None:
        self._honest = self._rng.choices(self._rounds, (4, 8, 0, 1))[0]
        self._phase = self._rng.choice(list(Phase)[:5])
        self._server = self._honest.server_at(self._phase)
        due = self._honest.sent[self._phase]
        self._silo = self._rng.choice(list(due))
        if self._rng.random() < 0.5:
            for silo in due.keys() - {self._silo}:
                self._honest.receive(self._server, self._phase, silo, due[silo])
        self._faced, self._taken = 0, cast(Any, None)

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        if self._taken is not None or self._faced == SITTING:
            self._rise()
            self._sit()
        self._faced += 1
        sent = self._honest.sent[self._phase]
        others = [*sent.values(), *self._rounds[2].sent[self._phase].values()]
        seed = sent[self._silo] if rng.random() < 0.9 else rng.choice(others)
        return mutated(rng, self._honest, seed, others, form is Form.SIGNED)

    def attempt(self, data: bytes) -> Message:
        before = state_of(self._server)
        try:
            message = _SENT[self._phase].from_tensors(decode(data).tensors)
            self._honest.receive(self._server, self._phase, self._silo, message)
        except ProtocolError:
            assert state_of(self._server) == before
            raise
        return message

    def check(self, data: bytes, taken: Any, form: Form) -> None:
        self._taken = taken
        require_own_arrays(data, taken)
        honest = self._honest.sent[self._phase][self._silo]
        if form is Form.RAW and hasattr(taken, "statement"):
            assert taken.statement() == honest.statement(), "what its silo did not sign was taken"

    def _rise(self) -> None:
        """Finish the round with the honest clients."""
        honest, server = self._honest, self._server
        clients = {silo: clone(one) for silo, one in honest.clients[Step(self._phase + 1)].items()}
        sent = dict(honest.sent[self._phase])
        if self._taken is not None:
            sent[self._silo] = self._taken
        try:
            for phase in list(Phase)[self._phase : 5]:
                for silo, message in sent.items():
                    if honest.names[silo] in self._arrived(server, phase):
                        continue
                    try:
                        honest.receive(server, phase, silo, message)
                    except PayloadError as error:
                        # Whoever knows another's advert before the server does may claim its key.
                        if self._taken is None or phase is not Phase.ADVERTS:
                            raise AssertionError("an honest message was refused") from error
                        self._count(self.name, error)
                        del clients[silo]
                broadcast = honest.close(server, phase)
                if phase < Phase.SHARES_OF_SECRETS:
                    sent = self._sent(clients, Step(phase + 1), broadcast)
        except ProtocolError as error:
            if self._taken is None:
                raise AssertionError("an honest round ended") from error
            self._count(self.name, error)
            assert server.phase is Phase.OVER
            return
        self._require_sum(broadcast)

    def _sent(self, clients: dict[int, MaskingClient], step: Step, broadcast: Any) -> dict[int, Any]:
        """What the clients answer, of those that are still in the round and were not refused."""
        sent = {}
        for silo in list(clients):
            if step is Step.MASK and (
                silo not in self._honest.left or self._honest.names[silo] not in broadcast
            ):
                del clients[silo]
                continue
            try:
                heard = self._honest.heard(step, silo, broadcast)
                sent[silo] = self._honest.step(clients[silo], step, silo, heard)
            except ProtocolError as error:
                if self._taken is None:
                    raise AssertionError("an honest client refused") from error
                self._count(self.name, error)
                del clients[silo]
        return sent

    @staticmethod
    def _arrived(server: MaskingServer, phase: Phase) -> Any:
        names = ("_adverts", "_shares", "_inputs", "_signatures", "_unmasked")
        return vars(server)[names[phase]]

    def _require_sum(self, result: Any) -> None:
        """By plain addition; with what a silo sent instead of its masked vector put in the place of that."""
        honest = self._honest
        silos = [honest.names.index(name) for name in result.survivors]
        right = honest.round.right(silos)
        for spec in honest.round.terms.vectors:
            expected = right[spec.name].astype(np.int64)
            if self._silo in silos and self._phase is Phase.INPUTS and self._taken is not None:
                mine = honest.sent[Phase.INPUTS][self._silo].vectors[spec.name]
                new, old = (
                    unpack(bytes(data), spec.bits, spec.length).astype(np.int64)
                    for data in (self._taken.vectors[spec.name], mine)
                )
                expected = (expected + new - old) % 2**spec.bits
            np.testing.assert_array_equal(result.sums[spec.name], expected)


class MaskedSilo:
    """A `MaskingClient` at one step of a round, facing a mutant of what its server would send it.

    What it refuses ends its round: its secrets are gone, and neither the honest message nor any later one
    gives anything. Without a silo's key nothing is taken but what the silos said, or less of it.
    """

    name = "masking"
    forms = (Form.RAW, Form.SIGNED)

    def __init__(self) -> None:
        self._rounds = rounds()

    def mutant(self, rng: random.Random, form: Form) -> bytes:
        self._honest = rng.choices(self._rounds, (4, 8, 0, 1))[0]
        self._step = rng.choice(list(_RELAYED))
        heard = self._honest.relayed[self._step]
        self._silo = rng.choice(list(heard))
        others = [*heard.values(), *self._rounds[2].relayed[self._step].values()]
        seed = heard[self._silo] if rng.random() < 0.9 else rng.choice(others)
        me = self._honest.names[self._silo]
        return mutated(rng, self._honest, seed, others, form is Form.SIGNED, me)

    def attempt(self, data: bytes) -> Message:
        message = _RELAYED[self._step].from_tensors(decode(data).tensors)
        client = clone(self._honest.clients[self._step][self._silo])
        try:
            given = self._honest.step(client, self._step, self._silo, message)
        except ProtocolError:
            self._require_over(client)
            raise
        assert isinstance(given, _SENT[self._step])
        if isinstance(given, MaskedInput):
            self._require_masked(given)
        return message

    def _require_over(self, client: MaskingClient) -> None:
        assert client.step is Step.OVER
        kept = vars(client)
        assert not kept["_root"] + kept["_blind"] + kept["_mask_key"].public + kept["_cipher_key"].public
        assert not kept["_held"]
        for step in list(Step)[self._step : 5]:
            heard = self._honest.relayed[step].get(self._silo, self._honest.relayed[Step.SIGN][0])
            try:
                self._honest.step(client, step, self._silo, heard)
            except WrongRound:
                continue
            raise AssertionError("a client went on after it had refused")

    def _require_masked(self, given: MaskedInput) -> None:
        for spec in self._honest.round.terms.vectors:
            plain: Mapping[str, Any] = self._honest.round.vectors[self._silo]
            assert given.vectors[spec.name] != pack(plain[spec.name], spec.bits)

    def check(self, data: bytes, taken: Any, form: Form) -> None:
        require_own_arrays(data, taken)
        honest, heard = self._honest, self._honest.relayed[self._step][self._silo]
        if form is Form.SIGNED:
            return
        said: set[Any]
        parts: list[Any]
        match taken:
            case AdvertList():
                said = {one.statement() for one in heard.adverts}
                parts = [one.statement() for one in taken.adverts]
            case Delivery():
                assert set(taken.shared) <= set(heard.shared)
                said = {(one.statement(), one.deal.leaf()) for one in heard.dealings}
                parts = [(one.statement(), one.deal.leaf()) for one in taken.dealings]
            case SurvivorList():
                said, parts = set(honest.relayed[Step.MASK][self._silo].shared), list(taken.survivors)
            case _:
                assert (taken.survivors, taken.dropped) == (heard.survivors, heard.dropped)
                said, parts = set(heard.survivors), [one.signer for one in taken.signatures]
        assert set(parts) <= said, "a silo took what no silo said"
        if not isinstance(taken, Delivery):
            assert len(parts) >= honest.round.terms.threshold
