"""The in-memory transport: the simulator's network and the tests' hostile one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Handler = Callable[[bytes], bytes]
Meddler = Callable[[str, bytes], bytes]


@dataclass
class MemoryTransport:
    """Delivers a message to a silo and gives back its answer, counting bytes.

    handlers: one for every silo. meddler: what an attacker on the wire does to an answer on its way up,
    given the silo's name and the bytes; None leaves them alone.
    """

    handlers: Mapping[str, Handler]
    meddler: Meddler | None = None
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: int = 0

    def request(self, name: str, message: bytes) -> bytes:
        """Send `message` to the silo `name` and return what arrives back."""
        self.bytes_down += len(message)
        answer = self.handlers[name](message)
        if self.meddler is not None:
            answer = self.meddler(name, answer)
        self.bytes_up[name] = self.bytes_up.get(name, 0) + len(answer)
        return answer
