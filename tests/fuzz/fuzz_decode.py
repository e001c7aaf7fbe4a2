"""A coverage-guided hunt (atheris, libFuzzer) through one parser: `python -m tests.fuzz.fuzz_decode TARGET`.

TARGET is `body`, `envelope` or `ledger`; what follows goes to libFuzzer: a folder for the corpus and its
options. Any exception outside ProtocolError, or a second encoding of one message, ends it with a crash file
and exit status 77. Its mutations are libFuzzer's own and, every second time, ours of tests.mutants, which
keep lengths and nesting true so that the code behind them is reached.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=[
        "securefl.release",
        "securefl.messages",
        "securefl.account",
        "securefl.crypto.envelope",
        "securefl.crypto.documents",
        "securefl.crypto.identity",
        "securefl._ledger_lines",
        "securefl._ledger_chain",
    ]
):
    from securefl._ledger_chain import Chain, check, check_head, read_chain
    from securefl.crypto import envelope
    from securefl.errors import BadSignature, ProtocolError
    from securefl.messages import parse_plan
    from securefl.release import PayloadKind, decode, encode, encode_release, parse_json, release_from
    from tests.fuzz import ledgers, subjects
    from tests.ledgers import signed
    from tests.mutants import SIGNATURES, mutate_body, mutate_json, mutate_layout, sign

Target = Callable[[bytes], None]
Mutator = Callable[[random.Random, bytes], bytes]
SENDER = subjects.SILOS[0]


# --- bodies


def body(data: bytes) -> None:
    """A body as it lies in an envelope: a plan, or a release."""
    opened = decode(data)
    assert encode(opened.kind, opened.document, opened.tensors) == data
    if opened.kind is PayloadKind.PLAN:
        parse_plan(opened)
    assert encode_release(release_from(opened)) == data


def mutated_body(rng: random.Random, data: bytes) -> bytes:
    return mutate_body(rng, data, BODIES)


BODIES = list(subjects.bodies().values())

# --- envelopes


def sealed(data: bytes) -> None:
    """An envelope without its signatures, which an enrolled sender makes where all before them holds."""
    try:
        envelope.verify(data + bytes(SIGNATURES), subjects.ROSTER)
    except BadSignature:
        message = sign(data, SENDER)
        verified = envelope.verify(message, subjects.ROSTER)
    else:
        raise AssertionError("zeros were taken for signatures")
    subjects.require_own_bytes(message, verified.header)
    envelope.open_(verified, subjects.SERVER)


def mutated_envelope(rng: random.Random, data: bytes) -> bytes:
    unsigned = [one + bytes(SIGNATURES) for one in (data, *ENVELOPES)]
    return mutate_layout(rng, unsigned[0], unsigned)[:-SIGNATURES]


ENVELOPES = [seed.data[:-SIGNATURES] for seed in subjects.Envelope(random.Random(1)).seeds]

# --- ledger lines

_PREVIOUS, _COPY = b"0" * 64, b"1" * 64  # stand for hashes, which the fresh signatures of every run change


def ledger_line(data: bytes) -> None:
    """A byte that says after which line, and a line (or, above 127, a head record) without its signatures.

    The owner signs it, with whatever it says, where it is a JSON object; else it is put as it is.
    """
    if not data:
        return
    chain = CHAINS[data[0] % 128 % len(CHAINS)]
    copy = chain.before or chain.tip
    text = data[1:].replace(_PREVIOUS, chain.tip.hash.encode()).replace(_COPY, copy.hash.encode())
    context = b"securefl/1 ledger-head" if data[0] > 127 else b"securefl/1 ledger"
    signer = ledgers.ROTATED if len(chain.cards) > 1 else ledgers.OWNER
    try:
        line = signed(parse_json(text), signer, context)
    except (ValueError, AttributeError, RecursionError):
        line = text + b"\n"
    if data[0] > 127:
        check_head("ledger", "head", line, chain)
        return
    link = check("line", line, chain)
    assert link.line == line
    # The head that a ledger would write after it is one that it reads.
    after = Chain(link.tip, 0, None, chain.cards, chain.tip)
    owner = ledgers.ROTATED if link.tip.card == ledgers.ROTATED.card else ledgers.OWNER
    assert not check_head("ledger", "head", link.tip.head(owner), after)


def mutated_line(rng: random.Random, data: bytes) -> bytes:
    place = data[:1] if rng.random() < 0.9 else rng.randbytes(1)
    return place + mutate_json(rng, json.loads(data[1:]))


def _true_ledger() -> tuple[list[Chain], list[bytes]]:
    """The chain before each line of a true ledger, and that line as a seed; and its head record."""
    with tempfile.TemporaryDirectory() as folder:
        lines, head = ledgers.LedgerFile(Path(folder)).ledgers[1]
    chains = [read_chain("ledger", lines[:number])[0] for number in range(1, len(lines) + 1)]
    seeds = []
    for number, (chain, line) in enumerate(zip(chains, [*lines[1:], head], strict=True)):
        document = json.loads(line)
        del document["signature"]
        text = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
        text = text.replace(chain.tip.hash.encode(), _PREVIOUS)
        if chain.before is not None:
            text = text.replace(chain.before.hash.encode(), _COPY)
        seeds.append(bytes([number + (128 if line is head else 0)]) + text)
    return chains, seeds


CHAINS, LINES = _true_ledger()
TARGETS: dict[str, tuple[Target, Mutator, list[bytes]]] = {
    "body": (body, mutated_body, BODIES),
    "envelope": (sealed, mutated_envelope, ENVELOPES),
    "ledger": (ledger_line, mutated_line, LINES),
}


def main(arguments: list[str]) -> None:
    """Runs until libFuzzer's own limits end it."""
    if len(arguments) < 3 or arguments[1] not in TARGETS:
        raise SystemExit(f"usage: python -m tests.fuzz.fuzz_decode {'|'.join(TARGETS)} CORPUS [OPTION...]")
    target, structural, seeds = TARGETS[arguments[1]]
    corpus = Path(arguments[2])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            target(data)
        except ProtocolError:
            return

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            try:
                return structural(rng, data)[:max_size]
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
                pass  # no longer of the form that these mutations take apart
        return bytes(atheris.Mutate(data, max_size))

    crashes = f"-artifact_prefix={corpus.parent}/crash-{arguments[1]}-"
    options = ["-max_len=65536", "-timeout=20", "-rss_limit_mb=4096", crashes, *arguments[3:]]
    atheris.Setup([arguments[0], *options, str(corpus)], once, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
