"""The chapter on what left each silo: to whom, readable by whom, under which claim.

It reads `Result` objects only, and must not write or know of attacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from securefl.crypto.ckks_terms import COLLUSION
from securefl.report import claims, digest
from securefl.report.digest import Departure, departures, run_name
from securefl.report.figures import Flow, flow_picture
from securefl.report.page import (
    Badge,
    Block,
    Cell,
    Fold,
    Items,
    Note,
    Paragraph,
    Section,
    Table,
    clean,
    count,
    delta,
    epsilon,
    listing,
    named,
    size,
)
from securefl.result import Result


def _claim_cell(departure: Departure) -> Cell:
    badges = [Badge("simulated", "caution")] if departure.simulated else []
    text, details = "", []
    if departure.epsilons is not None or departure.single is not None:
        ends = departure.epsilons or departure.single
        assert ends is not None
        text = f"ε {digest.span(ends)}"
        if departure.delta is not None:
            details.append(f"at δ = {delta(departure.delta)}, all noised releases of a silo together")
        if departure.single is not None:
            details.append(f"ε {digest.span(departure.single)} a release")
    if departure.reasons:
        badges.append(Badge(digest.NO_EPSILON, "bad"))
    if departure.independent:
        text = "independent of the rows"
    return Cell(text, "; ".join(details), tuple(badges))


def _reasons(results: Sequence[Result]) -> Items:
    """Why what left has no finite epsilon, each reason once."""
    found: dict[str, dict[str, None]] = {}
    for r in results:
        for d in departures(r):
            found.setdefault(digest.kind_words(d.kind), {}).update(dict.fromkeys(d.reasons))
    return Items(terms=tuple((f"{kind}:", "; ".join(why)) for kind, why in found.items() if why))


def _departure_row(departure: Departure, *first: Cell | str) -> tuple[Cell | str, ...]:
    mean = departure.bytes / departure.releases
    return (
        *first, digest.kind_words(departure.kind), _readers_cell(departure.recipients, departure.readers),
        departure.rounds, f"{departure.releases:,}", Cell(size(departure.bytes), f"{size(mean)} each"),
        _claim_cell(departure),
    )  # fmt: skip


def _readers_cell(recipients: str, readers: str) -> Cell:
    return Cell(readers, "" if recipients == readers else f"sent to {recipients}")


def _departures_table(results: Sequence[Result]) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for r in results:
        gathered = departures(r)
        name = Cell(run_name(r), count(len(r.clients), "silo"), full=r.name)
        rows += [_departure_row(d, name) for d in gathered]
        if not gathered:
            rows.append((name, "Nothing", "–", "–", "0", "0 B", "–"))
    return Table(
        "What left the silos, over all silos of a run",
        ("Run", "What", "Sent to and readable by", "Rounds", "Releases", "Bytes", "Privacy bound"),
        tuple(rows),
        numeric=frozenset({4, 5}),
        wrap=frozenset({1, 2, 6}),
    )


def _training_tables(results: Sequence[Result]) -> list[Table]:
    """What DP-SGD did in each run and what is claimed of it; runs with the same claim share a table."""
    found: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for r in results:
        for c in r.clients:
            if c.training is not None:
                names = found.setdefault(repr(sorted(c.training.items())), ([], c.training))[0]
                names += [] if run_name(r) in names else [run_name(r)]
    tables = []
    for names, claim in found.values():
        badges = (Badge("simulated", "caution"),) if claim.get("simulated") else ()
        rows = tuple(
            (what, Cell(value, badges=badges if index == 0 else ()))
            for index, (what, value) in enumerate(claims.training_facts(claim))
        )
        caption = f"Training by DP-SGD: {listing(names)}"
        note = (
            "Of each silo. It bounds the weights and all that is made of them, whether they left or not; "
            "what else left is composed with it in the account."
        )
        tables.append(Table(caption, ("What", "Value"), rows, wrap=frozenset({1}), note=note))
    return tables


def _told(results: Sequence[Result]) -> list[Paragraph]:
    """How exact the scores are that silos told the server."""
    words = {
        "gaussian-counts": "the silos told the server numbers of right answers, with noise",
        "independent": "no silo told a score",
        "none": "the silos told exact scores",
    }
    found: dict[str, list[str]] = {}
    for r in results:
        kinds = {str(x.claim.get("mechanism")) for c in r.clients for x in c.releases if x.kind == "metrics"}
        for kind in words:
            if kind in kinds:
                found.setdefault(kind, []).append(run_name(r))
    if not set(found) - {"none"}:
        return []
    parts = [f"In {listing(names)} {words[kind]}." for kind, names in found.items()]
    return [Paragraph(" ".join(parts), head="Scores.")]


def _totals(results: Sequence[Result]) -> list[Block]:
    """What the epsilons in the account are composed of, and for whom they hold."""
    terms = []
    for r in results:
        scope = "; ".join(claims.scopes(r))
        sums = dict.fromkeys(words for c in r.clients if (words := claims.composed(c)))
        terms += [(f"{run_name(r)}, for {scope}:", f"{words}.") for words in sums]
    if not terms:
        return []
    return [
        Paragraph("", head="What a silo's ε is composed of, and for whom it holds"),
        Items(terms=tuple(terms)),
    ]


def _cautions(results: Sequence[Result]) -> list[Note]:
    held = [Note(f"Mind ({run_name(r)}).", words, "caution") for r in results for words in claims.cautions(r)]
    exact = [run_name(r) for r in results if claims.unbounded_weights(r)]
    if not exact:
        return held
    where = "" if len(results) == 1 else f" in {digest.where(exact, [run_name(r) for r in results])}"
    text = (
        f"Weights left{where} {claims.NO_NOISE}. Whoever holds them can test whether a text was among the "
        "training rows. Masks and encryption hide which silo a row is in, not what the sum tells about it."
    )
    return [*held, Note("Weights without a bound.", text, "caution")]


def _account_table(result: Result) -> Table:
    rows: list[tuple[Cell | str, ...]] = []
    for c in result.clients:
        badges = (Badge("simulated", "caution"),) if c.simulated else ()
        tone = Badge(digest.NO_EPSILON, "bad")
        whole = digest.total_claim(c)
        account = Cell("", badges=(tone,)) if whole == digest.NO_EPSILON else Cell(whole, badges=badges)
        private = (
            Cell("–") if c.private_epsilon is None else Cell(f"ε {epsilon(c.private_epsilon)}", badges=badges)
        )
        why = "; ".join(clean(reason, 300) for reason in c.no_finite_epsilon) or "–"
        sent = Cell(size(c.bytes_up), count(len(c.releases), "release"))
        rows.append((named(c.name), sent, account, private, why))
    return Table(
        f"The account of every silo: {run_name(result)}",
        ("Silo", "Sent", "Whole account", "Its noised releases alone", "Why there is no finite epsilon"),
        tuple(rows),
        numeric=frozenset({1}),
        wrap=frozenset({4}),
    )


def _releases_table(result: Result) -> Table:
    silos = [client.name for client in result.clients]
    rows = []
    for c in result.clients:
        for release in c.releases:
            claim = release.claim
            bound = Cell(
                "independent of rows" if claim.get("mechanism") == "independent" else digest.NO_EPSILON
            )
            if "epsilon" in claim:
                badges = (Badge("simulated", "caution"),) if claim.get("simulated") else ()
                how = claims.MECHANISMS.get(str(claim.get("mechanism")), "")
                bound = Cell(f"ε {epsilon(float(claim['epsilon']))}", how, badges)
            rows.append((
                named(c.name), str(release.round), digest.kind_words(digest.kind_of(release.kind, claim)),
                _readers_cell(
                    digest.parties(release.recipients, c.name, silos),
                    digest.parties(release.readable_by, c.name, silos),
                ),
                size(release.bytes), bound,
                Cell(clean(release.sha256, 13), full=release.sha256),
            ))  # fmt: skip
    return Table(
        f"Every release: {run_name(result)}",
        ("Silo", "Round", "What", "Sent to and readable by", "Bytes", "Bound alone", "SHA-256"),
        tuple(rows),
        numeric=frozenset({1, 4}),
    )


def _sums_table(results: Sequence[Result]) -> Table:
    """Which sums were opened, by whom, and how exact they are."""
    known = [one for r in results for one in r.sums]
    noised, faulty = any(one.noise is not None for one in known), any(one.faults for one in known)
    rows: list[tuple[Cell | str, ...]] = []
    for r in results:
        for one in r.sums:
            by = digest.parties(one.opened_by, "", [client.name for client in r.clients])
            by = by.replace("the other silos", "every silo")
            least = f"{one.threshold} of {len(r.clients)}" if one.protection == "masked" else "not enforced"
            rows.append((
                run_name(r), str(one.round), one.protection, by, Cell(listing(one.silos)), least,
                "hidden" if one.rows is None else f"{one.rows:,}", f"{one.resolution:.1e}",
                *(["–" if one.noise is None else f"{one.noise:.1e}"] if noised else []),
                *([Cell("; ".join(clean(fault, 200) for fault in one.faults) or "–")] if faulty else []),
            ))  # fmt: skip
    heads = ["Run", "Round", "Protection", "Opened by", "Silos in it", "Needed", "Rows", "Error"]
    note = "Error: the largest that the encoding makes in a weight of the mean."
    if noised:
        note += " Noise: its standard deviation there, where the silos added some."
    return Table(
        "Sums that were opened; of a single silo's weights nothing else became known",
        (*heads, *(["Noise"] if noised else []), *(["Faults"] if faulty else [])),
        tuple(rows),
        numeric=frozenset({1, 6, 7, *([8] if noised else [])}),
        wrap=frozenset({4, *([len(heads) + noised] if faulty else [])}),
        note=note,
    )


def _flows(results: Sequence[Result]) -> list[Flow]:
    """What left, gathered: kinds that the same readers got in the same runs under the same claim are one."""
    runs: dict[tuple[str, str, str], list[str]] = {}
    for r in results:
        for d in (one for one in departures(r) if not one.independent):
            if d.reasons:
                claim = "exact: no finite epsilon" if d.single is None else "partly exact: no finite epsilon"
            else:
                claim = "under a noise bound (ε)" + (", simulated" if d.simulated else "")
            runs.setdefault((d.kind, d.readers, claim), []).append(run_name(r))
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for (kind, readers, claim), names in runs.items():
        where = digest.where(names, [run_name(r) for r in results])
        kinds.setdefault((readers, claim, where), []).append(digest.kind_words(kind))
    return [
        Flow(
            clean(listing([words[0], *map(str.lower, words[1:])])),
            readers,
            relayed="server" not in readers and "silo" in readers,
            bounded="no finite" not in claim,
            claim=claim,
            runs=where,
        )
        for (readers, claim, where), words in kinds.items()
    ]


def outflow_section(results: Sequence[Result]) -> Section:
    blocks: list[Block] = [
        flow_picture(_flows(results), "What leaves a silo and who can read it. Red: without a privacy bound; "
                     "green: with one. Dashed: sealed to the reader, passed on by the server unopened."),
        _departures_table(results),
    ]  # fmt: skip
    if any(r.sums for r in results):
        blocks.append(_sums_table(results))
    if any(one.protection == "ckks" for r in results for one in r.sums):
        blocks.append(Note("Collusion.", COLLUSION, "caution"))
    reasons = _reasons(results)
    if reasons.terms:
        blocks += [Paragraph("", head="Why there is no finite epsilon"), reasons]
    blocks += _cautions(results)
    blocks += _training_tables(results)
    blocks += _totals(results)
    blocks += _told(results)
    if any(client.simulated for r in results for client in r.clients):
        text = (
            "It came from a seed so that the run can be repeated. The bounds describe the mechanism; in this "
            "run they protect nobody."
        )
        blocks.append(Note("Simulated noise.", text, "caution"))
    for r in results:
        if any(client.releases for client in r.clients):
            tables = (_account_table(r), _releases_table(r))
            blocks += [Fold(f"Silo by silo: {run_name(r)}", tables)] if len(results) > 1 else []
            blocks += [tables[0], Fold("Every release", tables[1:])] if len(results) == 1 else []
    return Section("What left each silo", tuple(blocks))
