"""What results say, in words and small tables: names, what left, the claims, the opening sentences.

The HTML report and the terminal tables are two views of this one digest. It reads `Result` objects only;
it must not draw, write or know of attacks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from securefl.report.claims import bound, is_private, scopes, under_dp_sgd
from securefl.report.claims import whose as of_whom
from securefl.report.page import accuracy, clean, count, delta, epsilon, interval, listing, signed
from securefl.result import ClientRow, ReleaseRow, Result

SERVER = "server"
SHORT = {
    "model": "weights",
    "gradient": "gradients",
    "masked-model": "masked weights",
    "encrypted-model": "encrypted weights",
    "centroids": "pooled averages",
    "embedding-centroids": "token averages",
    "metrics": "scores",
    "notice": "notices, no score",
    "group-key": "CKKS key",
    "masking": "keys, sealed shares",
}
KINDS = {
    "model": "Trained weights",
    "gradient": "Gradients of one batch",
    "masked-model": "Masked weights",
    "encrypted-model": "Encrypted weights",
    "centroids": "Group averages of pooled vectors",
    "embedding-centroids": "Group averages of token vectors",
    "metrics": "Scores",
    "notice": "Notices without a score",
    "group-key": "CKKS key",
    "masking": "Keys and sealed shares of masked sums",
}
# The four messages around a masked model, none of which any row has a part in, are shown as one.
_MASKING = {
    "advert": "Keys of a masked round",
    "shares": "Shares of masks, sealed to peers",
    "survivors": "Signed list of survivors",
    "unmasking": "Shares that open a sum",
}
DROPPED_MARK = " †"
DROPPED = "dropped out of the last round, so its model is of an earlier one"
NO_EPSILON = "no finite epsilon"


def run_name(result: Result) -> str:
    return clean(result.name or result.method, 40)


def kind_of(kind: str, claim: Mapping[str, Any]) -> str:
    """What a release is shown as. Where no figure is told, the message that ends a run holds none."""
    return "notice" if kind == "metrics" and claim.get("mechanism") == "independent" else kind


def kind_words(kind: str) -> str:
    return KINDS.get(kind) or _MASKING.get(kind) or clean(kind, 40)


def setting(result: Result, *path: str) -> Any:
    """A value of the configuration, None where it is not there."""
    value: Any = result.config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def describe(result: Result) -> str:
    """How the silos of a run learned from each other, and whether their training was private."""
    trained = next((c.training for c in result.clients if c.training is not None), None)
    return _learned(result) + ("" if trained is None else f" Training is by DP-SGD, {bound(trained)}.")


def _learned(result: Result) -> str:
    if result.method == "standalone":
        return "Every silo trains alone; nothing is exchanged."
    if result.method == "fedavg":
        return f"{_averaged(result)}."
    if result.method == "fedprox":
        return f"{_averaged(result)}; a silo's training holds on to the average that it began from."
    if result.method == "fedsgd":
        return (
            "Each round every silo sends the gradient of one batch to the server, which takes one plain step "
            "along their mean."
        )
    if result.method == "crosslm":
        return (
            "Each silo's model goes to the server, where it grades a language model's texts; the best "
            "of them train it further, and the language model keeps what it learned."
        )
    if result.method == "datafree-kd":
        return (
            "Each silo's model goes to the server and is trained further on texts of a fixed language model."
        )
    if result.method == "fedkc":
        if setting(result, "fedkc", "source") == "own":
            own = "each silo also learns from group averages of its own, not exchanged"
            return f"{_averaged(result)}; {own}."
        layer = "pooled vectors" if setting(result, "fedkc", "compose") == "pooled" else "token vectors"
        privacy = setting(result, "privacy", "centroids") or {}
        noised = privacy.get("epsilon") is not None or privacy.get("noise_multiplier") is not None
        noise = "with calibrated noise" if noised else "without noise"
        return f"{_averaged(result)}; the silos also exchange group averages of {layer}, {noise}."
    return f"Method {clean(result.method, 40)}."


def whose(results: Sequence[Result]) -> str:
    """For what the epsilons of these runs hold, the runs named where it is not the same in all."""
    found: dict[str, list[str]] = {}
    for result in results:
        for scope in scopes(result):
            found.setdefault(scope, []).append(run_name(result))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{scope} ({listing(names)})" for scope, names in found.items())


def trained_alone(results: Sequence[Result]) -> list[str]:
    """`fedkc have ε 7.99 at δ = 1e-5 ...` for every run by DP-SGD of which nothing left."""
    return [
        f"{run_name(result)} have {bound(client.training)} for {of_whom(client.training)}"
        f"{' (simulated)' if client.training.get('simulated') else ''}"
        for result in results
        if not any(client.releases for client in result.clients)
        for client in result.clients[:1]
        if client.training is not None
    ]


def dropped_in(result: Result, name: str) -> int | None:
    """The last round, where a silo dropped out of it: its model is then of an earlier one."""
    last = result.rounds[-1]
    return last.round if name in last.dropped else None


def _averaged(result: Result) -> str:
    match setting(result, "protection", "models"):
        case "masked":
            return (
                "The silos' weights are added up under masks, so that the server learns their average alone"
            )
        case "ckks":
            return "The silos' weights are added up encrypted, and only the silos can open the average"
        case _:
            return "The silos send their weights to the server, which averages them"


def mean_accuracy(result: Result) -> float:
    return statistics.fmean(client.test_accuracy for client in result.clients)


def mean_baseline(result: Result) -> float:
    return statistics.fmean(client.baseline_accuracy for client in result.clients)


def number_ranges(numbers: Iterable[int]) -> str:
    """`1 to 3, 5` for 1, 2, 3, 5."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)


def parties(names: Iterable[str], silo: str, silos: Sequence[str]) -> str:
    """Names of a release's recipients or readers in words, seen from `silo`."""
    given = set(names)
    others = set(silos) - {silo}
    peers = given & others
    words = ["the server" if name == SERVER else clean(name, 40) for name in sorted(given - others)]
    if peers:
        words.append("the other silos" if peers == others else "some of the other silos")
    return " and ".join(words) if words else "nobody"


@dataclass(frozen=True)
class Departure:
    """One kind of release, over the silos and rounds it was gathered from.

    epsilons: lowest and highest composed epsilon of a silo's private releases, None without such a claim.
    reasons: why the others have none. `single`: the same for one release alone.
    """

    kind: str
    silos: tuple[str, ...]
    recipients: str
    readers: str
    rounds: str
    releases: int
    bytes: int
    epsilons: tuple[float, float] | None
    single: tuple[float, float] | None
    delta: float | None
    simulated: bool
    reasons: tuple[str, ...]

    @property
    def independent(self) -> bool:
        """Whether no row has a part in it: keys, shares, signatures."""
        return not self.reasons and self.single is None

    def claim(self) -> str:
        """The claim in one line, at its weakest, without the reasons."""
        if self.independent:
            return "of no row"
        parts = []
        if self.epsilons is not None:
            parts.append(f"ε {epsilon(self.epsilons[1])}{' simulated' if self.simulated else ''}")
        return "; ".join([*parts, NO_EPSILON] if self.reasons else parts)


def span(ends: tuple[float, float]) -> str:
    low, high = epsilon(ends[0]), epsilon(ends[1])
    return low if low == high else f"{low} to {high}"


def _departure(kind: str, found: Sequence[tuple[ClientRow, ReleaseRow]], silos: Sequence[str]) -> Departure:
    private = [(client, release) for client, release in found if is_private(release.claim)]
    totals = [client.private_epsilon for client, _ in private if client.private_epsilon is not None]
    single = [float(release.claim["epsilon"]) for _, release in private if "epsilon" in release.claim]
    deltas = [client.delta for client, _ in private if client.delta is not None]
    reasons = dict.fromkeys(
        clean(str(release.claim.get("reason", "not stated")), 200)
        for _, release in found
        if release.claim.get("mechanism") == "none"
    )

    def words(which: str) -> str:
        seen = {parties(getattr(release, which), client.name, silos) for client, release in found}
        return "; ".join(sorted(seen))

    return Departure(
        kind=kind,
        silos=tuple(dict.fromkeys(client.name for client, _ in found)),
        recipients=words("recipients"),
        readers=words("readable_by"),
        rounds=number_ranges(release.round for _, release in found),
        releases=len(found),
        bytes=sum(release.bytes for _, release in found),
        epsilons=(min(totals), max(totals)) if totals else None,
        single=(min(single), max(single)) if single else None,
        delta=max(deltas) if deltas else None,
        simulated=any(bool(release.claim.get("simulated")) for _, release in private),
        reasons=tuple(reasons),
    )


def departures(result: Result, clients: Sequence[ClientRow] | None = None) -> list[Departure]:
    """What left, one entry a kind, over all silos of the run or over `clients` alone."""
    silos = [client.name for client in result.clients]
    found: dict[str, list[tuple[ClientRow, ReleaseRow]]] = {}
    for client in result.clients if clients is None else clients:
        for release in client.releases:
            kind = "masking" if release.kind in _MASKING else kind_of(release.kind, release.claim)
            found.setdefault(kind, []).append((client, release))
    order = [*KINDS, *sorted(set(found) - set(KINDS))]
    return [_departure(kind, found[kind], silos) for kind in order if kind in found]


def total_claim(client: ClientRow) -> str:
    """The account of a silo in words: everything that left it in this run, composed."""
    if not client.releases:
        return "nothing left"
    if client.epsilon is None:
        return NO_EPSILON
    at = "" if client.delta is None else f" at δ = {delta(client.delta)}"
    return f"ε {epsilon(client.epsilon)}{at}"


def _accuracy_sentences(results: Sequence[Result]) -> list[str]:
    shared = [result for result in results if result.difference is not None]
    rows = sorted({result.test_rows for result in results})
    silos = max(len(result.clients) for result in results)
    scored = count(len(results), "run") + f" over {count(silos, 'silo')}"
    texts = " and ".join(f"{n:,}" for n in rows)
    sentences = [f"{scored} {'was' if len(results) == 1 else 'were'} scored on {texts} test texts."]
    alone = [result for result in results if result.method == "standalone"]
    # The baseline has no noise. Of a run by DP-SGD that exchanges nothing, its own accuracy has.
    bases = [mean_baseline(r) if under_dp_sgd(r) else mean_accuracy(r) for r in alone]
    bases = bases or [mean_baseline(result) for result in results]
    low, high = accuracy(min(bases)), accuracy(max(bases))
    private = [result for result in results if under_dp_sgd(result)]
    sentences.append(
        f"A silo that trains alone{', without noise,' if private else ''} reaches a mean accuracy of "
        + (low if low == high else f"{low} to {high}")
        + "."
    )
    sentences += [
        f"Alone and by DP-SGD, in {run_name(r)}, it reaches {accuracy(mean_accuracy(r))}."
        for r in private
        if r in alone
    ]
    better = [r for r in shared if r.difference and not r.difference.within_noise and r.difference.value > 0]
    worse = [r for r in shared if r.difference and not r.difference.within_noise and r.difference.value < 0]
    same = [r for r in shared if r.difference and r.difference.within_noise]
    for chosen, verb in ((better, "gains"), (worse, "loses")):
        if chosen:
            top = max(chosen, key=lambda r: abs(r.difference.value) if r.difference else 0.0)
            assert top.difference is not None
            most = " most" if len(chosen) > 1 else ""
            sentences.append(
                f"{run_name(top)} {verb}{most}: {accuracy(mean_accuracy(top))}, against "
                f"{accuracy(mean_baseline(top))} alone with as many local passes"
                f"{' and no noise' if under_dp_sgd(top) else ''}, a difference of "
                f"{signed(top.difference.value)} (95 % interval {interval(top.difference.interval, signed)})."
            )
    if same:
        names = listing([run_name(result) for result in same])
        sentences.append(f"Within the noise of the test, and so not to be told from training alone: {names}.")
    return sentences


def where(names: Sequence[str], all_names: Sequence[str]) -> str:
    """`names` among all runs, by whichever of the two lists is shorter."""
    rest = [name for name in all_names if name not in names]
    if not rest:
        return "every run" if len(all_names) > 1 else clean(all_names[0], 48)
    return f"every run but {listing(rest)}" if len(rest) < min(3, len(names)) else listing(names)


def _departure_sentences(results: Sequence[Result]) -> list[str]:
    names = [run_name(result) for result in results]
    models = [f"The models of {words}; none of them left its silo." for words in trained_alone(results)]
    silent = [run_name(result) for result in results if not any(client.releases for client in result.clients)]
    if len(silent) == len(results):
        return ["Nothing left any silo.", *models]
    sentences = [f"Nothing left a silo in {listing(silent)}."] if silent else []
    runs: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for departure in (one for one in departures(result) if not one.independent):
            runs.setdefault((departure.readers, departure.kind), []).append(run_name(result))
    kinds: dict[tuple[str, str], list[str]] = {}
    for (readers, kind), found in runs.items():
        kinds.setdefault((readers, where(found, names)), []).append(kind_words(kind).lower())
    for (readers, place), words in kinds.items():
        place = "" if len(results) == 1 else f"In {place}, "
        sentence = f"{place}{readers} could read {listing(words)}."
        sentences.append(sentence[0].upper() + sentence[1:])
    opened = {one.protection for result in results for one in result.sums}
    if "masked" in opened:
        sentences.append("The server opened sums of masked weights over several silos, listed below.")
    if "ckks" in opened:
        sentences.append(
            "The silos opened sums of encrypted weights, listed below; a silo together with the server could "
            "open each."
        )
    clients = [client for result in results for client in result.clients]
    bounded = [client for client in clients if client.private_epsilon is not None]
    if bounded:
        worst = max(bounded, key=lambda client: client.private_epsilon or 0.0)
        at = "" if worst.delta is None else f" at δ = {delta(worst.delta)}"
        fake = " (simulated: the noise came from a seed)" if any(c.simulated for c in bounded) else ""
        largest = epsilon(worst.private_epsilon or 0.0)
        covers = [r for r in results if any(c.private_epsilon is not None for c in r.clients)]
        sentences.append(
            f"What left a silo with noise has, taken together, a bound of at most ε {largest}{at}{fake}, for "
            f"{whose(covers)}."
        )
    sentences += models
    if any(client.releases and client.epsilon is None for client in clients):
        exact = {d.kind for result in results for d in departures(result) if d.reasons}
        words = [kind_words(kind).lower() for kind in [*KINDS, *sorted(exact - set(KINDS))] if kind in exact]
        sentences.append(
            f"{listing(words).capitalize()} left without noise in at least one run, so all that left a silo "
            "there has, taken together, no finite epsilon."
        )
    return sentences


def summary(results: Sequence[Result], extra: Iterable[str] = ()) -> tuple[str, str, str]:
    """The opening in plain words: accuracy; what left and who could read it; the `extra` sentences."""
    found = [sentence for sentence in extra if sentence] or ["This was not measured here."]
    return " ".join(_accuracy_sentences(results)), " ".join(_departure_sentences(results)), " ".join(found)
