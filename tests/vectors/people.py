"""The identities of the vectors, all from seeds that their labels give."""

from __future__ import annotations

import hashlib
from typing import Any

from securefl.crypto.identity import Identity

SIZES = {"ed25519": 32, "mldsa65": 32, "mlkem768": 64, "x25519": 32}


def seeds_of(label: str) -> dict[str, bytes]:
    return {half: hashlib.shake_256(f"{label} {half}".encode()).digest(size) for half, size in SIZES.items()}


_LABELS: dict[Identity, str] = {}


def _made(label: str, name: str, **other: bytes) -> Identity:
    one = Identity(name, {**seeds_of(label), **other})
    _LABELS[one] = label
    return one


ALICE, BOB, CAROL, EVE, MALLORY = (_made(name, name) for name in ("alice", "bob", "carol", "eve", "mallory"))
OTHER_ALICE = _made("other-alice", "alice")
# Alice's own Ed25519 key beside others: what an attacker has once that half is broken.
AMY = _made("half-alice", "alice", ed25519=seeds_of("alice")["ed25519"])
SILO, NEXT_SILO, SERVER = _made("silo-1", "silo-1"), _made("silo-1-next", "silo-1"), _made("server", "server")


def identities(*people: Identity) -> dict[str, dict[str, Any]]:
    """What a vector says of them: seeds in hexadecimal digits, and what follows from those."""
    found = {}
    for one in people:
        label = _LABELS[one]
        seeds = {half: seed.hex() for half, seed in seeds_of(label).items()}
        found[label] = {"name": one.name, "seeds": seeds, "fingerprint": one.card.fingerprint}
    return found
