"""securefl: train language models across institutions that may not pool their text.

The names below are the public interface; they load on first use, so that `import securefl` stays quick and
does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from securefl.client import Client as Client
    from securefl.config import Config as Config
    from securefl.config import load_config as load_config
    from securefl.config import parse_config as parse_config
    from securefl.crypto.identity import Card as Card
    from securefl.crypto.identity import Identity as Identity
    from securefl.crypto.trust import TrustStore as TrustStore
    from securefl.data import Corpus as Corpus
    from securefl.data import load_corpus as load_corpus
    from securefl.errors import AwaitingApproval as AwaitingApproval
    from securefl.errors import Cancelled as Cancelled
    from securefl.errors import SecureflError as SecureflError
    from securefl.ledger import Ledger as Ledger
    from securefl.local import starting_slm as starting_slm
    from securefl.policy import Policy as Policy
    from securefl.result import Result as Result
    from securefl.server import Server as Server
    from securefl.silo import client_terms as client_terms
    from securefl.silo import open_client as open_client
    from securefl.simulation import Simulation as Simulation

__version__ = "0.1.0"

_HOMES = {
    "AwaitingApproval": "errors",
    "Cancelled": "errors",
    "Card": "crypto.identity",
    "Client": "client",
    "Config": "config",
    "Corpus": "data",
    "Identity": "crypto.identity",
    "Ledger": "ledger",
    "Policy": "policy",
    "Result": "result",
    "SecureflError": "errors",
    "Server": "server",
    "Simulation": "simulation",
    "TrustStore": "crypto.trust",
    "client_terms": "silo",
    "load_config": "config",
    "load_corpus": "data",
    "open_client": "silo",
    "parse_config": "config",
    "starting_slm": "local",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'securefl' has no attribute {name!r}")
    return getattr(import_module(f"securefl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
