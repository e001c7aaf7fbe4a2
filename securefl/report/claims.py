"""What privacy claims say, in words: for whom they hold, by which mechanism, and how a silo's add up.

It reads the claims of a `Result` as they stand there, whoever wrote them; it must not draw or write, nor know
of attacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from securefl.release import ROW, SUMMED, PayloadKind
from securefl.report.page import clean, count, delta, epsilon, joined
from securefl.result import ClientRow, Result

Claimed = Mapping[str, Any]

DP_SGD = "dp-sgd"
# What tells the weights that were trained on a silo's rows: whoever has the gradients has the next model.
WEIGHTS = (PayloadKind.MODEL.value, PayloadKind.GRADIENT.value, *(kind.value for kind in SUMMED))
MECHANISMS = {
    DP_SGD: "training by DP-SGD",
    "gaussian-sums": "noised group averages",
    "gaussian-counts": "noised scores",
    "distributed-discrete-gaussian": "noise of all silos on their sum",
}
_COUNTED = {
    DP_SGD: ("training by DP-SGD", "trainings by DP-SGD"),
    "gaussian-sums": ("release of noised group averages", "releases of noised group averages"),
    "gaussian-counts": ("release of noised scores", "releases of noised scores"),
    "distributed-discrete-gaussian": ("part in a noised sum", "parts in noised sums"),
}
NO_NOISE = "trained without noise and under no claim"


def is_private(claim: Claimed) -> bool:
    return claim.get("mechanism") not in ("none", "independent")


def whose(claim: Claimed) -> str:
    """For what a claim's epsilon holds: the unit, and what its adjacency compares."""
    unit, exchanged = str(claim.get("unit", ROW)), claim.get("adjacency") == "replace-one"
    if unit == "silo":
        return "a silo's whole data"
    who, rows = "one row", ""
    if unit != ROW:
        column = clean(unit, 64)
        named = column.removesuffix("_id")
        who = f"one {named.replace('_', ' ')} ({column})" if named not in ("", column) else f"one {column}"
        rows = " with all its rows of a silo"
    return f"{who}{rows}, {'exchanged for another' if exchanged else 'there or not'}"


def _claims(result: Result) -> Iterable[Claimed]:
    for client in result.clients:
        yield from (release.claim for release in client.releases if is_private(release.claim))
        if client.training is not None:
            yield client.training


def scopes(result: Result) -> list[str]:
    """For what the epsilons of a run hold. Claims on a silo's whole data cover each unit in it too, so where
    both are composed it is the unit.
    """
    words = {whose(claim): claim.get("unit") == "silo" for claim in _claims(result)}
    return [scope for scope, silo in words.items() if not silo] or list(words)


def under_dp_sgd(result: Result) -> bool:
    return any(client.training is not None for client in result.clients)


def tells_no_rows(result: Result) -> bool:
    """Whether no silo's number of rows left it: under DP-SGD none is told."""
    return all(client.training is not None or not client.releases for client in result.clients)


def unbounded_weights(result: Result) -> bool:
    """Whether weights left, or a sum of them was opened, under no claim."""
    weights = [r.claim for c in result.clients for r in c.releases if r.kind in WEIGHTS]
    return any(not is_private(claim) for claim in (*weights, *(one.claim for one in result.sums)))


def number(claim: Claimed, key: str, digits: int = 4) -> str:
    """A number of a claim in a few digits; an en dash where it has none."""
    value = claim.get(key)
    return f"{value:.{digits}g}" if isinstance(value, int | float) else "–"


def bound(claim: Claimed) -> str:
    """`ε 7.99 at δ = 1e-5`."""
    value, at = claim.get("epsilon"), claim.get("delta")
    shown = f"ε {epsilon(float(value))}" if isinstance(value, int | float) else "–"
    return f"{shown} at δ = {delta(float(at))}" if isinstance(at, int | float) else shown


def training_facts(claim: Claimed) -> list[tuple[str, str]]:
    """What a claim on trainings by DP-SGD says, as (what, value)."""
    each = "row" if claim.get("unit", ROW) == ROW else clean(str(claim["unit"]), 64)
    facts = [
        ("Epsilon and delta, all trainings of the run", bound(claim)),
        ("Holds for", f"{whose(claim)} ({clean(str(claim.get('adjacency', '–')), 24)})"),
    ]
    if each != "row":
        facts.append((f"Rows of one {each} in a step", f"at most {number(claim, 'per_unit')}"))
    sampling = clean(str(claim.get("sampling", "–")), 24)
    return [
        *facts,
        ("Sampling", f"{sampling}: each {each} takes part in a step with probability "
         f"{number(claim, 'sample_rate')}; {number(claim, 'steps', 8)} steps"),
        ("Clip", f"L2 norm {number(claim, 'clip')}, the whole gradient of a {each}"),
        ("Noise multiplier", f"{number(claim, 'noise_multiplier')}: standard deviation over clip, on every "
         "coordinate of a step's sum"),
        ("Noise from", clean(str(claim.get("generator", "–")), 80)),
        ("Accountants", clean(str(claim.get("accountants", "–")), 200)),
    ]  # fmt: skip


def composed(client: ClientRow) -> str:
    """What a silo's epsilon is composed of and how; empty where nothing noised left it."""
    found = Counter(str(r.claim.get("mechanism")) for r in client.releases if is_private(r.claim))
    if not found:
        return ""
    parts = [
        count(found[name], *_COUNTED.get(name, (f"release under {clean(name, 40)}", ""))) for name in found
    ]
    sampled, zcdp = DP_SGD in found, "distributed-discrete-gaussian" in found
    if sum(found.values()) == 1:
        return parts[0]
    if sampled and zcdp:
        how = "the trainings by their loss distributions, the sums as zCDP, each at half of δ, and added"
    elif sampled:
        how = "by their privacy loss distributions"
    else:
        how = "as zero-concentrated DP" if zcdp else "as one Gaussian mechanism, without a loss"
    return f"{joined(parts)}, composed {how}"


def cautions(result: Result) -> list[str]:
    """Sentences on what weakens a run's claims or its method and would not be seen in its figures."""
    found = [_gradients(result), withheld(result), _few_clusters(result)]
    if result.shared_units:
        unit = clean(str(result.config.get("data", {}).get("unit")), 64)
        found.append(
            f"{count(result.shared_units, 'value')} of {unit} in rows of more than one silo: "
            "each silo's ε is about its own rows of them, and for them the silos' ε add up."
        )
    return [words for words in found if words is not None]


def _gradients(result: Result) -> str | None:
    """A sentence where gradients left."""
    kinds = {release.kind for client in result.clients for release in client.releases}
    if PayloadKind.GRADIENT.value not in kinds:
        return None
    return (
        "Whoever reads the gradient of one batch can read back its texts, word for word where the batch has "
        "fewer tokens than the model has dimensions. The method is there for study."
    )


def _few_clusters(result: Result) -> str | None:
    """A sentence where silos shared fewer centroids than there are clusters, but some."""
    clusters = result.config.get("fedkc", {}).get("clusters")
    shared = {
        client.name: [one.centroids for one in client.releases if one.centroids] for client in result.clients
    }
    few = {name: min(found) for name, found in shared.items() if found and min(found) < (clusters or 0)}
    if not few:
        return None
    why = "the others were empty or below privacy.centroids.min_size"
    if any(r.centroids and is_private(r.claim) for c in result.clients for r in c.releases):
        why += "; under a claim a row goes to the nearest of public texts, and one of them may be near to all"
    names = ", ".join(f"{name} {least}" for name, least in few.items())
    return f"Of {clusters} clusters' centroids these silos shared, at the least: {names}; {why}."


def withheld(result: Result) -> str | None:
    """A sentence where silos withheld all centroids of a round: the method then had nothing of theirs."""
    empty = [
        (client.name, release.round)
        for client in result.clients
        for release in client.releases
        if release.centroids == 0
    ]
    if not empty:
        return None
    rounds = ", ".join(str(number) for number in sorted({number for _, number in empty}))
    names = ", ".join(dict.fromkeys(name for name, _ in empty))
    return (
        f"In round {rounds} all centroids of {names} were withheld, being below privacy.centroids.min_size: "
        "there the method shared nothing of theirs."
    )
