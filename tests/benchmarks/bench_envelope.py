"""Sealing a model for the wire: our envelope against the library's bare HPKE on the same bytes, same run.

The goal is a ratio, so that a slow or busy machine does not fail it: sealing, signing, verifying and opening
90 MB may take at most twice what HPKE alone takes to seal and open them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, Suite
from pytest_benchmark.fixture import BenchmarkFixture

from securefl.crypto import envelope
from securefl.crypto.identity import Identity
from securefl.messages import Header, Party
from securefl.release import PayloadKind

BODY = os.urandom(90_000_000)
GOAL = 2.0
ROUNDS = 5


def _party(identity: Identity) -> Party:
    return Party(name=identity.name, key=identity.card.fingerprint)


def _median(function: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def test_round_trip_of_90_mb(benchmark: BenchmarkFixture) -> None:
    silo, server = Identity.generate("silo-1"), Identity.generate("server")
    header = Header(
        run="0" * 32,
        round=1,
        step="train",
        sender=_party(silo),
        recipients=(_party(server),),
        kind=PayloadKind.MODEL,
        sequence=1,
        time=0,
    )
    roster = {"silo-1": silo.card}

    def ours() -> bytes:
        sealed = envelope.seal(BODY, header, silo, [server.card])
        return envelope.open_(envelope.verify(sealed, roster), server)

    suite = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    key = MLKEM768X25519PrivateKey(MLKEM768PrivateKey.generate(), X25519PrivateKey.generate())

    def bare() -> bytes:
        return suite.decrypt(suite.encrypt(BODY, key.public_key(), b"info"), key, b"info")

    assert ours() == bare() == BODY
    peer = _median(bare)
    benchmark.pedantic(ours, rounds=ROUNDS)
    ratio = benchmark.stats.stats.median / peer
    benchmark.extra_info["ratio to bare HPKE"] = round(ratio, 2)
    took = benchmark.stats.stats.median
    print(f"\n90 MB: securefl {took:.3f} s, HPKE {peer:.3f} s, ratio {ratio:.2f}, goal {GOAL}")
    assert ratio <= GOAL
