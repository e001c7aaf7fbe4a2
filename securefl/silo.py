"""A silo's client from its files: configuration, keys, pinned cards, policy, rows, ledger, state folder.

For `securefl client` and for programs that embed one. Nothing here decides anything: what may leave is the
policy's matter, what left is the ledger's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from securefl.agreement import check_cohort, check_rows
from securefl.client import Client
from securefl.config import ClientTerms, Config
from securefl.crypto.identity import Identity
from securefl.crypto.trust import TrustStore
from securefl.data import load_silo
from securefl.errors import ConfigError, UnknownSender, UsageError
from securefl.exchange import Standing
from securefl.ledger import Ledger
from securefl.local import SiloData, starting_slm
from securefl.models import base_fingerprint
from securefl.policy import Policy
from securefl.privacy import noise_source
from securefl.state import StateFolder


def client_terms(config: Config) -> ClientTerms:
    """The `[client]` section. Raises ConfigError where there is none."""
    if config.client is None:
        raise ConfigError("client: the section is missing; it says where this silo's keys and policy are")
    return config.client


def open_client(
    config: Config,
    identity: Identity,
    *,
    cancelled: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.time,
    preview: bool = False,
) -> Client:
    """The client that `[client]` describes. Its ledger must be there: one that is lost is not begun anew.

    identity: the silo's keys, loaded by the caller, who alone knows where its passphrase comes from.
    cancelled: asked between training steps. preview: for `Client.preview` only, beside the running client.
    Noise comes from the operating system. Close it to let another process have the state folder.
    Raises UsageError and its kin naming the file or field, LedgerCorrupt for a ledger that does not hold.
    """
    terms = client_terms(config)

    def standing() -> Standing:
        store = TrustStore.open(Path(terms.trust))
        roster = {name: store.card(name) for name in terms.peers}
        return Standing(Policy.load(Path(terms.policy)), store.card(terms.server), roster)

    if {identity.name, terms.server} & set(terms.peers) or identity.name == terms.server:
        raise ConfigError("client.peers: names this silo or the server; list the other silos")
    check_cohort(config, len(terms.peers) + 1)
    try:
        now = standing()
    except UnknownSender as error:  # here it is the configuration that names somebody unknown
        raise ConfigError(f"client: {error}") from error
    labels, train, validation = load_silo(config)
    check_rows(config, len(train), identity.name)
    name = _own_model(config)
    slm, base = starting_slm(name, labels, config), base_fingerprint(name)
    path = Path(terms.ledger)
    if not path.exists():
        raise UsageError(
            f"{path}: there is no ledger; `securefl ledger begin` makes a silo's first, and "
            "`securefl ledger restore` brings one back that was lost"
        )
    ledger = (Ledger.look if preview else Ledger.open)(path, identity, clock)
    state = StateFolder(Path(terms.state), look=preview)
    try:
        return Client(
            identity=identity,
            server=now.server,
            roster=now.roster,
            policy=now.policy,
            ledger=ledger,
            config=config,
            run=terms.run,
            data=SiloData(train, validation),
            dataset=terms.dataset,
            slm=slm,
            base_sha256=base,
            noise=noise_source(None),
            clock=clock,
            state=state,
            cancelled=cancelled,
            standing=standing,
        )
    except BaseException:
        state.close()
        raise


def _own_model(config: Config) -> str:
    if len(config.slm.models) != 1:
        raise ConfigError("slm.models: names several models; a client trains one, its own")
    return config.slm.models[0]
