"""Results and audits as runs write them, with round numbers, for the tests of the reports."""

from __future__ import annotations

from typing import Any

from attacks.findings import Audit, AuditedRelease, Bound, Finding, NotRun, Verdicts
from securefl.messages import Dropped
from securefl.result import (
    ArrivalRow,
    ClientRow,
    Difference,
    LabelRow,
    ReleaseRow,
    Result,
    RoundRow,
    ServerRow,
)

SILOS = ("silo-1", "silo-2", "silo-3", "silo-4")
LABELS = ("business", "entertainment", "politics", "sport", "tech")
_COUNTS = ((41, 3, 12, 5, 2), (4, 38, 2, 9, 11), (11, 6, 44, 1, 3), (2, 7, 5, 51, 8))
_BASELINE = (0.712, 0.655, 0.690, 0.741)
EXACT = {"mechanism": "none", "reason": "weights trained on the rows without differential privacy"}
CLUSTERS = {
    "mechanism": "none",
    "reason": "exact means of k-means clusters of the rows; a minimum size is not DP",
}
SCORES = {"mechanism": "none", "reason": "exact figures of a model trained on the rows"}


def noised(epsilon: float = 5.28) -> dict[str, Any]:
    return {
        "mechanism": "gaussian-sums",
        "epsilon": epsilon,
        "delta": 1e-5,
        "mu": 1.1,
        "clip": 6.0,
        "noise_multiplier": 1.08,
        "count_multiplier": 4.0,
        "prediction_multiplier": 4.0,
        "unit": "row",
        "adjacency": "add-remove",
        "generator": "numpy.PCG64(seed)",
        "simulated": True,
    }


def _release(number: int, kind: str, silo: str, size: int, claim: dict[str, Any]) -> ReleaseRow:
    to_server = kind in ("model", "metrics")
    readers = ["server"] if to_server else [name for name in SILOS if name != silo]
    return ReleaseRow(
        round=number,
        kind=kind,
        recipients=readers,
        readable_by=readers,
        bytes=size,
        sha256=f"{SILOS.index(silo)}{number}{len(kind):02d}" * 16,
        claim=claim,
    )


def make_result(
    name: str = "fedkc-pooled-dp",
    method: str = "fedkc",
    gains: tuple[float, float, float, float] = (0.05, 0.08, 0.06, 0.02),
    difference: Difference | None = Difference(value=0.053, interval=(0.021, 0.086), within_noise=False),
    shared: str | None = "centroids",
    noise: bool = True,
    embeddings: bool = False,
    server: ServerRow = ServerRow(test_accuracy=0.755),
) -> Result:
    """One run of three rounds over four silos. `shared`: kind of the centroids, None where none travel."""
    clients = []
    for index, silo in enumerate(SILOS):
        releases = []
        if method != "standalone":
            for number in (1, 2, 3):
                releases.append(_release(number, "model", silo, 43_210_987, EXACT))
                releases.append(_release(number, "metrics", silo, 3_456, SCORES))
            for number in (2, 3):
                if shared:
                    size = 402_300 if embeddings else 9_876
                    releases.append(_release(number, shared, silo, size, noised() if noise else CLUSTERS))
        value = round(_BASELINE[index] + gains[index], 4)
        reasons = list(dict.fromkeys(r.claim["reason"] for r in releases if "reason" in r.claim))
        private = 7.85 + index / 100 if shared and noise and releases else None
        clients.append(
            ClientRow(
                name=silo,
                model="builtin:minilm",
                train_rows=sum(_COUNTS[index]),
                validation_rows=16 + index,
                labels=dict(zip(LABELS, _COUNTS[index], strict=True)),
                test_accuracy=value,
                test_interval=(round(value - 0.046, 4), round(value + 0.043, 4)),
                baseline_accuracy=_BASELINE[index],
                epsilon=None,
                private_epsilon=private,
                delta=1e-5 if private else None,
                simulated=bool(private),
                no_finite_epsilon=reasons,
                releases=releases,
                bytes_up=sum(r.bytes for r in releases),
                kept_candidate=index % 2 == 0 if method in ("crosslm", "datafree-kd") else None,
            )
        )
    return Result(
        method=method,
        name=name,
        run="0123456789abcdef0123456789abcdef",
        seed=7,
        config={
            "federation": {"method": method, "rounds": 3, "seed": 7},
            "data": {"train": "builtin:bbc-news", "split": {"by": "dirichlet", "silos": 4, "alpha": 0.3}},
            "fedkc": {"clusters": 4, "compose": "embeddings" if embeddings else "pooled", "source": "peers"},
            "privacy": {"centroids": {"min_size": 4, "noise_multiplier": 1.08 if noise else None}},
        },
        rounds=[
            RoundRow(
                round=n,
                seconds=11.1 * n,
                bytes_up=sum(r.bytes for c in clients for r in c.releases if r.round == n),
                bytes_down=172_000_000 * (n > 1) if method != "standalone" else 0,
            )
            for n in (1, 2, 3)
        ],
        clients=clients,
        server=server,
        difference=difference,
        test_rows=445,
        seconds=66.6,
        peak_memory_bytes=1_234_567_890,
        versions={"securefl": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
    )


def make_arrivals() -> list[ArrivalRow]:
    """Two rounds of four silos, of which the last lesson was undone and one model could not be used."""
    counts = ((9, 3), (8, 4), (10, 1), (12, 5), (11, 3))
    usable, kept = (sum(pair[i] for pair in counts) for i in (0, 1))
    labels = {
        label: LabelRow(usable=u, kept=k, usable_share=u / usable, kept_share=k / kept)
        for label, (u, k) in zip(LABELS, counts, strict=True)
    }
    rows = [
        ArrivalRow(
            silo=SILOS[i % 4],
            round=1 + i // 4,
            arrival=1 + i,
            queued_behind=i % 3,
            staleness=min(i, 3),
            outcome="served",
            candidate=i != 5,
            kept_candidate=None if i == 5 else i % 2 == 0,
            seconds=12.5,
            kl=0.061 + i / 40,
            agreement=0.655 + i / 50,
            self_bleu=0.217 + i / 30,
            distinct_2=0.834 - i / 40,
            mean_words=21.4 - i,
            per_label=labels,
        )
        for i in range(8)
    ]
    skipped = {"outcome": "skipped", "candidate": False, "kept_candidate": None, "per_label": {}}
    figures = dict.fromkeys(("kl", "agreement", "self_bleu", "distinct_2", "mean_words"))
    rows[3] = rows[3].model_copy(update={**skipped, **figures, "note": "tensor head holds NaN; refused"})
    note = "the texts grew alike, from a self-BLEU of 0.24 to 0.61; the weights were put back"
    rows[7] = rows[7].model_copy(update={"kl": None, "note": note})
    return rows


def make_results() -> list[Result]:
    """The seven runs of the demo."""

    def differs(value: float, low: float, high: float) -> Difference:
        return Difference(value=value, interval=(low, high), within_noise=low <= 0 <= high)

    texts = [
        {
            "silo": SILOS[i % 4],
            "label": LABELS[i % 5],
            "kept": i % 3 == 0,
            "score": 0.91 - i / 50,
            "text": f"The {LABELS[i % 5]} desk reports that the quarter closed above the forecasts ({i}).",
        }
        for i in range(26)
    ]
    llm = ServerRow(
        nlu_accuracy=0.594,
        nlu_accuracy_before=0.531,
        nlg_accuracy=0.781,
        nlg_judged_before=0.652,
        nlg_judged=0.718,
        perplexity_before=54.52,
        perplexity_after=56.88,
        kl=[0.061, 0.114, 0.207, 0.263],
        synthetic=texts,
        arrivals=make_arrivals(),
    )
    refusal = Dropped(
        name="silo-3", step="train", error="NonFiniteUpdate", reason="tensor head holds NaN; refused"
    )
    crosslm = make_result(
        "crosslm", "crosslm", (0.01, -0.02, 0.03, 0.0), differs(0.005, -0.021, 0.03), None, server=llm
    )
    last = crosslm.rounds[2].model_copy(update={"dropped": ["silo-3"], "refusals": [refusal]})
    crosslm = crosslm.model_copy(update={"rounds": [*crosslm.rounds[:2], last]})
    return [
        make_result("standalone", "standalone", (0, 0, 0, 0), None, None, server=ServerRow()),
        make_result("fedavg", "fedavg", (0.04, 0.07, 0.055, 0.015), differs(0.045, 0.012, 0.079), None),
        make_result("fedkc-pooled", gains=(0.05, 0.08, 0.06, 0.02), noise=False),
        make_result(
            "fedkc-pooled-dp", gains=(0.03, 0.06, 0.02, 0.0), difference=differs(0.028, -0.004, 0.06)
        ),
        make_result(
            "fedkc-embeddings",
            shared="embedding-centroids",
            noise=False,
            embeddings=True,
            gains=(0.06, 0.1, 0.07, 0.03),
            difference=differs(0.065, 0.031, 0.098),
        ),
        make_result(
            "fedkc-embeddings-dp",
            shared="embedding-centroids",
            embeddings=True,
            gains=(-0.08, -0.05, -0.06, -0.09),
            difference=differs(-0.07, -0.104, -0.036),
        ),
        crosslm,
    ]


def make_finding(**changes: Any) -> Finding:
    """Membership in an exact pooled centroid, plainly above the baseline."""
    values: dict[str, Any] = {
        "attack": "membership",
        "number": 1,
        "adversary": "peer; sees the pooled centroids another silo shared",
        "knowledge": ["encoder weights", "text pool"],
        "target": "pooled centroid",
        "silo": "silo-1",
        "round": 2,
        "metric": "auc",
        "value": 0.972,
        "ci": (0.951, 0.988),
        "baseline": 0.5,
        "cap": None,
        "cap_reason": "no differential privacy is claimed",
        "trials": 320,
        "claim_epsilon": None,
        "epsilon_lower_bound": 1.74,
        "adjacency": "replace-one",
        "verdict": "leaks",
        "bears_on": ["singling_out", "linkability"],
        "details": {},
    }
    values["claim_compared"] = changes.get("cap") is not None
    if changes.get("number") == 2:
        values["bears_on"] = ["inference", "linkability"]
    return Finding(**(values | changes))


def make_audit(method: str = "fedkc", noise: bool = False, embeddings: bool = False) -> Audit:
    """The audit of one run: membership in every silo and round, tokens where token vectors are shared."""
    kind = "embedding-centroids" if embeddings else "centroids"
    releases, findings = [], []
    claim = noised() if noise else CLUSTERS
    sizes = ([4.0, 9.0, 17.0, 33.0], [6.0, 8.0, 20.0, 30.0], [5.0, 10.0, 21.0, 29.0], [7.0, 12.0, 24.0, 30.0])
    capped: dict[str, Any] = {"cap": 0.842, "cap_reason": None, "claim_epsilon": 7.85} if noise else {}
    for index, silo in enumerate(SILOS):
        peers = [name for name in SILOS if name != silo]
        for number in (2, 3):
            releases.append(
                AuditedRelease(
                    silo=silo,
                    round=number,
                    kind=kind,
                    file=f"r{number:03d}-share-{kind}.safetensors",
                    sha256=f"{index}{number}" * 32,
                    readable_by=peers,
                    encoder="ab" * 32,
                    rows_per_centroid=sizes[index],
                    claim=claim,
                )
            )
            if not embeddings:
                value = round((0.511 if noise else 0.961) + index / 100 + number / 1000, 4)
                findings.append(
                    make_finding(
                        silo=silo,
                        round=number,
                        value=value,
                        ci=(round(value - 0.06, 4), min(1.0, round(value + 0.055, 4))),
                        verdict="none_shown" if noise else "leaks",
                        epsilon_lower_bound=0.0 if noise else 1.7,
                        **capped,
                    )
                )
            for k, rows in enumerate(sizes[index] if embeddings else []):
                value = round((0.29 - k / 100) if noise else (1.0 - 0.03 * k), 4)
                findings.append(
                    make_finding(
                        attack="token recovery",
                        number=2,
                        target="embedding-layer centroid",
                        silo=silo,
                        round=number,
                        metric="token_recall",
                        value=value,
                        ci=(round(value - 0.04, 4), min(1.0, round(value + 0.03, 4))),
                        baseline=0.271,
                        trials=int(rows) * 12,
                        verdict="none_shown" if noise else "leaks",
                        cap=None,
                        cap_reason="an epsilon does not bound recall of tokens",
                        claim_epsilon=7.85 if noise else None,
                        epsilon_lower_bound=None,
                        details={"rows": rows},
                    )
                )
    leak = "none_shown" if noise else "leaks"
    return Audit(
        run="0123456789abcdef0123456789abcdef",
        method=method,
        seed=7,
        releases=releases,
        findings=findings,
        bounds=[
            Bound(
                name="proposition 1: within-cluster spread",
                bound=12.5,
                measured=9.75,
                holds=True,
                vacuous=False,
            ),
            Bound(
                name="proposition 3: distance to the true tokens",
                bound=0.0,
                measured=4.31,
                holds=True,
                vacuous=True,
            ),
        ],
        verdicts=Verdicts(
            singling_out="none_shown" if embeddings else leak, linkability="none_shown", inference=leak
        ),
        not_run=[NotRun(attack="gradient inversion", why="no release is the gradient of a single step")],
        versions={"securefl": "0.1.0", "numpy": "2.3.0"},
    )


def poisoned_audit(hostile: str) -> Audit:
    """An audit with `hostile` before every string that its schema leaves free, each thousands of letters."""
    fixed = ("schema", "verdict", "bears_on", "mechanism", "metric", "attack")
    fixed += ("singling_out", "linkability", "inference")

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: poison(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [poison(entry, key) for entry in value]
        free = isinstance(value, str) and key not in fixed
        return f"{hostile} {value}{'x' * 3000}" if free else value

    return Audit.model_validate(poison(make_audit(embeddings=True).model_dump(by_alias=True)))


def make_audits() -> list[tuple[str, Audit]]:
    return [
        ("fedkc-pooled", make_audit()),
        ("fedkc-pooled-dp", make_audit(noise=True)),
        ("fedkc-embeddings", make_audit(embeddings=True)),
        ("fedkc-embeddings-dp", make_audit(noise=True, embeddings=True)),
    ]
