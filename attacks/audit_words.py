"""What audits say, in words: metrics, verdicts, claims, what was not attacked, and the terms explained.

Words and cells only, made of `Audit` objects; it draws nothing and reads no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attacks.audit_figures import Audits
from attacks.findings import Audit, Finding
from securefl.report.claims import MECHANISMS, whose
from securefl.report.page import Badge, Cell, clean, delta, epsilon, listing

VERDICTS: Mapping[str, Badge] = {
    # Not green: that an attack finds nothing is no proof.
    "none_shown": Badge("none shown"),
    "leaks": Badge("leaks", "bad"),
    "violates_claim": Badge("violates its claim", "bad"),
}
_METRICS = {"auc": "AUC", "tpr_at_1_percent_fpr": "TPR at 1 % FPR", "token_f1": "token F1"}
# What a metric is, for whoever has only the terminal.
MEANINGS = {
    "auc": "AUC: share of pairs in which a row of the silo scores above a stranger's",
    "tpr_at_1_percent_fpr": "TPR at 1 % FPR: share of the silo's rows found, one stranger's row in 100 taken "
    "for one",
    "token_recall": "token recall: share of the words written down correctly",
    "token_f1": "token F1: the same, wrong words counted against it",
    "guesses_right": "guesses right: of the auditor's guesses which canary texts coins had put in (as few as "
    "its bound needs), those that were right",
    "rare_token_recall": "rare token recall: of words that no other text has",
}
WORDS = (
    ("Baseline", "What an attacker scores who guesses without seeing what left."),
    ("Cap", "The most that the claimed ε allows on this figure; none where a claim does not bound it. A "
     "claim on data with and without a row is first converted to the attack's game, one row exchanged for "
     "another; a claim on a unit of several rows bounds each of them."),
    ("Attack 1, by likelihood ratio or by dot product", "Two ways to score whether a text is behind a "
     "centroid: by how much likelier it makes it, or by how alike they are."),
    ("Token F1, rare token recall", "F1 also counts what was written down wrongly. Rare tokens, such as "
     "names, are those that no auxiliary text has."),
    ("TPR at 1 % FPR", "True and false positive rate: the share of members found while one other row in a "
     "hundred is taken for one."),
    ("AUC", "How well members are told from others: 0.5 is a coin, 1.0 is always right."),
    ("Token recall", "The share of the words of a group of texts that the attacker wrote down correctly."),
    ("Canary, one-run audit, guesses right", "Attack 4 makes a release once more with texts of the auditor's "
     "own, canaries, each put in or left out by a coin. From what comes out the auditor guesses some of the "
     "coins. How many guesses are right proves a lower bound on ε, of a row being there or not."),
    ("Claim held", "The attack found something, and no more than the claimed ε allows: by the cap, or for "
     "attack 4 by the lower bound that its guesses prove."),
    ("Singling out", "Telling whether one row is among those behind a release."),
    ("Linkability", "Telling that two releases, or a release and a known record, concern the same row."),
    ("Inference", "Deducing what a row says, or an attribute of it."),
    ("Lower bound on ε", "What the attack itself proves was lost, one row exchanged for another; above the "
     "claimed ε of that game the claim is wrong, unless the model that others hold gave it away."),
)  # fmt: skip


def metric_words(metric: str) -> str:
    """`token_recall` as `token recall`."""
    return _METRICS.get(metric.lower(), clean(metric, 40).replace("_", " "))


def verdict_of(finding: Finding) -> Badge:
    """The verdict of a figure, and whether a claim that bounds it held: a leak may be what was allowed."""
    if finding.verdict == "leaks" and finding.claim_compared:
        return Badge("leaks, claim held", "caution")
    return VERDICTS[finding.verdict]


def answers(audit: Audit) -> list[tuple[str, Badge]]:
    """The three questions with their answers; one that no finding bears on was not tested."""
    tested = {question for finding in audit.findings for question in finding.bears_on}
    return [
        (question.replace("_", " "), VERDICTS[verdict] if question in tested else Badge("not tested"))
        for question, verdict in audit.verdicts
    ]


def not_attacked(audits: Audits) -> list[str]:
    """Sentences on what left and was not attacked, which a reader must not take for safe."""
    if not any(
        entry.attack.startswith("membership in a trained model") for _, a in audits for entry in a.not_run
    ):
        return []
    if all(audit.weights_claimed for _, audit in audits):
        return [
            "Weights were not attacked: this version attacks centroids only. They left under a claim, and "
            "its ε bounds what any attack on them can gain."
        ]
    exact = [name for name, audit in audits if not audit.weights_claimed]
    where = f" that left under no claim, in {listing(exact)}," if len(exact) < len(audits) else ""
    return [
        f"Weights were not attacked: this version attacks centroids only. Weights{where} are the larger "
        "leak, so a run without centroids is not a run without leaks."
    ]


def claimed_words(findings: Sequence[Finding]) -> str:
    """The largest ε claimed, and what it is in the attack's game where the claim compares something else."""
    known = [f for f in findings if f.claim_epsilon is not None]
    if not known:
        return "no finite ε claimed"
    largest = max(known, key=lambda f: f.claim_epsilon or 0.0)
    words = f"claimed {epsilon(largest.claim_epsilon or 0.0)}"
    game = largest.details.get("claim_epsilon_replace_one")
    if largest.details.get("claim_adjacency") == "add-remove" and isinstance(game, int | float):
        words += f", which is {epsilon(float(game))} here"
    return words


def claim_cell(claim: Mapping[str, Any]) -> Cell:
    if claim.get("mechanism") == "independent":
        return Cell("independent of the rows", clean(str(claim.get("reason", "")), 200))
    if "epsilon" not in claim:
        return Cell("", clean(str(claim.get("reason", "")), 200), (Badge("no finite epsilon", "bad"),))
    at = f"at δ = {delta(float(claim['delta']))}, " if "delta" in claim else ""
    how = MECHANISMS.get(str(claim.get("mechanism")), "noise")
    badges = (Badge("simulated", "caution"),) if claim.get("simulated") else ()
    return Cell(f"ε {epsilon(float(claim['epsilon']))}", f"{at}{how}, for {whose(claim)}", badges)
