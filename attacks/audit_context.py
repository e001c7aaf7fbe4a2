"""What stands around an audit's findings, as tables: accounts, utility, and channels outside the claims.

It shows what `Audit` objects hold (see `attacks.context`, which reads it off a run).
"""

from __future__ import annotations

from attacks.audit_rows import Audits
from attacks.findings import Account, Audit
from securefl.report.page import Badge, Cell, Items, Table, accuracy, clean, delta, epsilon, interval, listing


def _in_all(one: Account) -> Cell:
    """What the releases of a silo add up to."""
    if one.epsilon is not None:
        return Cell(f"ε {epsilon(one.epsilon)}", f"at δ = {delta(one.delta or 0.0)}")
    if not one.releases:
        return Cell("nothing left")
    private = one.private_epsilon
    what = "of nothing that left" if private is None else f"ε {epsilon(private)} of what has one, not of all"
    return Cell("", what, (Badge("no finite epsilon", "bad"),))


def silo_accounts(audit: Audit) -> list[Table]:
    """What left each silo in all, in short; empty where nobody kept an account."""
    rows = []
    for one in audit.accounts:
        finite = one.epsilon is not None or not one.releases
        least = "" if one.private_epsilon is None else f"ε {epsilon(one.private_epsilon)} of what has one"
        shown = _in_all(one).text if finite else "no finite ε"
        rows.append((
            clean(one.silo, 32), str(one.releases),
            Cell(shown, "" if finite else least, (Badge("simulated", "caution"),) if one.simulated else ()),
            "–" if one.delta is None else delta(one.delta),
        ))  # fmt: skip
    heads = ("Silo", "Releases", "ε of all together", "δ")
    return [Table("What left each silo in all", heads, tuple(rows), frozenset({1, 3}))] if rows else []


def accounts_table(audits: Audits) -> list[Table]:
    """Of each silo what all its releases add up to, about whom, and where noise is added."""
    rows = []
    for name, audit in audits:
        for one in audit.accounts:
            about = listing([clean(unit, 40) for unit in one.units]) if one.units else "–"
            games = listing(one.adjacencies) if one.adjacencies else ""
            simulated = (Badge("simulated", "caution"),) if one.simulated else ()
            rows.append((
                clean(name, 40), clean(one.silo, 32), str(one.releases), _in_all(one),
                Cell(about, games, simulated), clean(one.trust, 300),
            ))  # fmt: skip
    if not rows:
        return []
    heads = ("Run", "Silo", "Releases", "In all", "Unit and adjacency", "Trust")
    table = Table(
        "What left each silo in all, by its ledger", heads, tuple(rows), frozenset({2}), frozenset({3, 4, 5})
    )
    return [table]


def utility_table(audits: Audits) -> list[Table]:
    """What privacy cost: accuracy with what was shared, and of each silo alone without noise."""
    rows = [
        (
            clean(name, 40), clean(one.silo, 32), f"{one.train_rows:,}",
            Cell(accuracy(one.test_accuracy), interval(one.test_interval)),
            accuracy(one.baseline_accuracy),
        )
        for name, audit in audits
        for one in audit.utility
    ]  # fmt: skip
    heads = ("Run", "Silo", "Rows", "Test accuracy, 95 %", "Alone, without noise")
    title = "What it was good for"
    return [Table(title, heads, tuple(rows), frozenset({2, 3, 4}))] if rows else []


def channels_list(audits: Audits) -> list[Items]:
    """What leaves that no claim of these releases covers, each named once, with the runs where not all."""
    found: dict[str, list[str]] = {}
    for name, audit in audits:
        for channel in audit.channels:
            found.setdefault(channel, []).append(clean(name, 40))
    told = tuple(
        f"{channel[:1].upper()}{channel[1:]}"
        + ("" if len(names) == len(audits) else f" (in {listing(names)})")
        + "."
        for channel, names in found.items()
    )
    return [Items(items=told)] if told else []
