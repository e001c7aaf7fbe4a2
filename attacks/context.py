"""What an audit says beside its findings: the account of each silo, what privacy cost, what no claim covers.

Read off a run's record; it attacks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from attacks.evidence import Source
from attacks.findings import Account, Utility
from attacks.runs import CENTROIDS, Run
from securefl.release import CLAIM, DistributedNoise, Independent, Noised, NonPrivate, PayloadKind

_BY_SILO = "each silo adds its own noise before anything leaves it, so nobody is trusted with exact values"
_BY_ALL = (
    "each silo adds a share of the noise, so the guarantee is that of the sum, and holds as long as no more "
    "silos than it allows work with the server"
)
_NOWHERE = "no noise is added"


def accounts(source: Source) -> list[Account]:
    """The account of each silo as its ledger adds up; empty for releases from elsewhere."""
    if not isinstance(source, Run):
        return []
    rows = []
    for client in source.result.clients:
        claims = [CLAIM.validate_python(release.claim) for release in client.releases]
        noised = [claim for claim in claims if isinstance(claim, Noised)]
        shared = any(isinstance(claim, DistributedNoise) for claim in noised)
        rows.append(
            Account(
                silo=client.name,
                releases=len(client.releases),
                epsilon=client.epsilon,
                private_epsilon=client.private_epsilon,
                delta=client.delta,
                no_finite_epsilon=list(client.no_finite_epsilon),
                units=sorted({str(getattr(claim, "unit", "row")) for claim in noised}),
                adjacencies=sorted({str(getattr(claim, "adjacency", "add-remove")) for claim in noised}),
                simulated=client.simulated,
                trust=(_BY_ALL if shared else _BY_SILO) if noised else _NOWHERE,
            )
        )
    return rows


def utility(source: Source) -> list[Utility]:
    """What each silo's model is worth, with what it shared and alone; empty for releases from elsewhere."""
    if not isinstance(source, Run):
        return []
    return [
        Utility(
            silo=client.name,
            train_rows=client.train_rows,
            test_accuracy=client.test_accuracy,
            test_interval=client.test_interval,
            baseline_accuracy=client.baseline_accuracy,
        )
        for client in source.result.clients
    ]


def channels(source: Source) -> list[str]:
    """Ways by which something of the rows leaves that no claim of this audit's releases covers."""
    return list(_channels(source))


def _channels(source: Source) -> Iterator[str]:
    if not isinstance(source, Run):
        yield "whatever else the other system sends, and how and when, is not known here"
        return
    releases = [(one.row.kind, CLAIM.validate_python(one.row.claim)) for one in source.releases]
    if any(kind in CENTROIDS and isinstance(claim, NonPrivate) for kind, claim in releases):
        yield "how many rows are behind each centroid is told exactly"
        yield "that a cluster is missing tells that it had fewer rows than the minimum"
    if any(kind in CENTROIDS and isinstance(claim, Noised) for kind, claim in releases):
        yield "of noised centroids a cluster is withheld by its noisy count, which the claim covers"
    if any(kind == PayloadKind.METRICS.value and isinstance(claim, NonPrivate) for kind, claim in releases):
        yield "the scores that silos send are numbers of right answers on their rows"
    if any(
        kind in (PayloadKind.MODEL.value, PayloadKind.GRADIENT.value)
        and not isinstance(claim, Noised | Independent)
        for kind, claim in releases
    ):
        yield "how many rows a silo has travels with its weights"
    if source.result.sums:
        opened = len(source.result.sums)
        yield f"the sum of the silos' models was opened in {opened} rounds; attack 12 is put to the average"
    yield "the names of the labels travel with every release"
    yield "when a silo answers, and how long it takes, is hidden from nobody who sees the traffic"
    yield "settings chosen by looking at rows, and other runs on the same rows, are not in this account"
