"""What audits say, in words: attacks, metrics, verdicts, claims, what was not attacked, terms explained.

Words and cells only, made of `Audit` objects; it draws nothing and reads no run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attacks.audit_rows import Audits, Row, metric_key, number_in
from attacks.findings import ALL_SILOS, Audit, AuditedRelease, Finding
from securefl.report.claims import MECHANISMS, whose
from securefl.report.digest import kind_of, kind_words, parties
from securefl.report.page import Badge, Cell, clean, count, delta, epsilon, joined, listing

ELSEWHERE = "elsewhere"  # method and silo of vectors that no run of securefl made
VERDICTS: Mapping[str, Badge] = {
    # Not green: that an attack finds nothing is no proof.
    "none_shown": Badge("none shown"),
    "leaks": Badge("leaks", "bad"),
    "violates_claim": Badge("violates its claim", "bad"),
}
QUESTIONS: Mapping[str, str] = {
    "singling_out": "Can one row be told from all others?",
    "linkability": "Can a text held elsewhere be tied to a silo's rows?",
    "inference": "Can content be read that was not known before?",
}


@dataclass(frozen=True)
class AttackWords:
    """What an attack is called, who does what in a sentence, and what its control is.

    names: what its entries in an audit begin with. kinds: of the releases that it is put to.
    """

    names: tuple[str, ...]
    does: str
    control: str
    kinds: tuple[str, ...] = ("centroids",)


_NOBODYS = "against texts that were not in the data"
_INVENTED = "on an invented release without the silo's rows"
ATTACKS: Mapping[int, AttackWords] = {
    1: AttackWords(
        ("membership, likelihood ratio", "membership, dot product"),
        "Another silo has a text and asks whether it is among the rows behind a group average.",
        _INVENTED,
    ),
    2: AttackWords(
        ("token recovery", "texts put together from recovered tokens"),
        "Another silo reads the words of the rows back out of averages of the embedding layer, and puts them "
        "together to texts.",
        _NOBODYS,
        ("embedding-centroids",),
    ),
    3: AttackWords(
        ("noise of a release", "mechanism audit"),
        "The auditor, who has the rows, takes them out of a noised sum and asks if what is left is as large "
        "as the noise that is claimed.",
        "",
        ("centroids", "embedding-centroids"),
    ),
    4: AttackWords(
        ("one-run audit with canaries",),
        "The auditor makes a release once more with canary texts that coins put in, and guesses the coins.",
        "",
    ),
    5: AttackWords(
        ("bag-of-words probe",),
        "Another silo trains a probe that says which words are behind a group average.",
        _NOBODYS,
    ),
    6: AttackWords(
        ("membership over several rounds", "membership, a row that left between two rounds"),
        "Another silo adds up what group averages of several rounds say of a text or, if a row left between "
        "two rounds, compares the two.",
        _INVENTED,
    ),
    7: AttackWords(
        ("membership in a sum less one's own part",),
        "Another silo subtracts its own part from the sum of all silos and asks for membership in the rest.",
        _INVENTED,
    ),
    8: AttackWords(
        ("search of a text pool",),
        "An outsider has a pool of texts and picks those that are behind a group average.",
        "on texts or releases without the silo's rows",
    ),
    9: AttackWords(
        ("embedding inversion, white box",),
        "The server has the encoder's weights and computes a text whose vector comes near a group average.",
        _NOBODYS,
    ),
    10: AttackWords(
        ("embedding inversion, learned decoder", "embedding inversion, zero-shot"),
        "An outsider who can only ask the encoder writes texts, by a decoder trained on other text or by a "
        "public language model, whose vectors come near a group average.",
        _NOBODYS,
    ),
    11: AttackWords(
        ("gradient inversion",),
        "The server reads the texts of a batch back out of the gradient of one step.",
        _NOBODYS,
        ("gradient",),
    ),
    12: AttackWords(
        ("membership in a trained model",),
        "Whoever has a trained model and a text asks whether the model was trained on it.",
        "on the model that the run began with",
        ("model", "masked-model", "encrypted-model"),
    ),
    13: AttackWords(
        ("attribute probe",),
        "An outsider trains a probe that says which label the rows behind a group average have.",
        _NOBODYS,
    ),
    14: AttackWords(
        ("memorisation by the language model",),
        "The auditor plants made-up texts among a silo's rows, has its model teach the language model once "
        "more, and asks whether that one writes them, or finds them likelier than texts not planted.",
        "on canaries that were not planted",
        (),
    ),
}  # fmt: skip
_WEIGHTS = ATTACKS[12].kinds
_NUMBERED = re.compile(r"\((\d{1,2})\)$")

_SHORT = {
    "membership": "in a group average",
    "membership over several rounds": "over several rounds",
    "membership, a row that left between two rounds": "if a row left",
    "membership in a sum less one's own part": "in a sum of all",
    "membership in a trained model": "in a trained model",
}
_METRICS = {
    "auc": "AUC", "token_f1": "token F1", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rouge_l": "ROUGE-L",
    "bleu": "BLEU", "recall": "recall in a pool", "accuracy": "accuracy on labels",
    "positions_read": "positions read", "vectors_named": "vectors named",
    "noise_claimed_over_found": "noise claimed over found",
    "distance_to_a_gaussian": "distance to a Gaussian",
    "canary_auc": "AUC on canaries", "canaries_written": "canaries written",
}  # fmt: skip
_RATE = re.compile(r"tpr_at_(\d{1,2}(?:\.\d{1,3})?)_percent_fpr")
# What a metric is, for whoever has only the terminal.
MEANINGS = {
    "auc": "AUC: share of pairs in which a row of the silo scores above a stranger's",
    "tpr_at_1_percent_fpr": "TPR at 1 % FPR: share of the silo's rows found, one stranger's row in 100 taken "
    "for one",
    "tpr_at_0.1_percent_fpr": "TPR at 0.1 % FPR: the same, one stranger's row in 1000",
    "token_recall": "token recall: share of the words written down correctly",
    "token_f1": "token F1: share of words written down correctly, wrong words counted against it",
    "guesses_right": "guesses right: of the auditor's guesses which canary texts coins had put in (as few as "
    "its bound needs), those that were right",
    "rare_token_recall": "rare token recall: of words that no other text has",
    "bag_precision": "bag precision: share of the words written down that stand in any row of the group",
    "exact_texts": "exact texts: share of the texts put together word for word",
    "rouge1": "ROUGE-1: words that a text read back and the true one share",
    "rouge2": "ROUGE-2: pairs of words in a row that they share",
    "rouge_l": "ROUGE-L: longest run of words in the same order that they share",
    "bleu": "BLEU: runs of up to four words that they share",
    "cosine": "cosine: how alike the vectors of the text read back and of the target are",
    "recall": "recall in a pool: share of a silo's texts found in a pool that holds them among others",
    "accuracy": "accuracy on labels: share of answers right, which labels a group has",
    "positions_read": "positions read: share of the positions whose vector is exactly a sum of few words'",
    "vectors_named": "vectors named: share of the vectors that a sum of pool texts gives exactly",
    "distance_to_a_gaussian": "distance to a Gaussian: how differently from it the noise is spread",
    "noise_claimed_over_found": "noise claimed over found: how many times larger the claimed noise is than "
    "that of the release; 1 where the claim is true",
    "canary_auc": "AUC on canaries: share of pairs in which the LLM gained more on the planted canary",
    "canaries_written": "canaries written: share of the planted canaries that the LLM wrote, word for word",
}
WORDS = (
    ("Guessing", "What an attacker scores who guesses without seeing what left."),
    ("Control", "What the same attack scores where it has nothing to find: on texts that were not in the "
     "data, or on a release or a model without the silo's rows. What it scores above its control it read."),
    ("Cap", "The most that the claimed ε allows on this figure; none where a claim does not bound it. A "
     "claim on data with and without a row is first converted to the attack's game, one row exchanged for "
     "another; a claim on a unit of several rows bounds each of them."),
    ("By likelihood ratio or by dot product", "Two ways to score whether a text is behind a centroid: by how "
     "much likelier it makes it, or by how alike they are."),
    ("By loss, LiRA or RMIA", "Ways to score whether a text was trained on: by the model's loss on it, or "
     "by that loss against models trained with and without it."),
    ("Token F1, rare token recall, bag precision", "F1 also counts what was written down wrongly. Rare "
     "tokens, such as names, are those that no auxiliary text has. Bag precision: the share of the words "
     "written down that stand in any row of the group."),
    ("TPR at 1 % FPR, at 0.1 % FPR", "True and false positive rate: the share of members found while one "
     "other row in a hundred, or in a thousand, is taken for one."),
    ("AUC", "How well members are told from others: 0.5 is a coin, 1.0 is always right."),
    ("Token recall", "The share of the words of a group of texts that the attacker wrote down correctly."),
    ("ROUGE, BLEU, exact texts", "How much of a text was read back in its order: words (ROUGE-1), pairs of "
     "words (ROUGE-2), the longest common run (ROUGE-L), runs of up to four (BLEU), or all of it."),
    ("Recall in a pool, accuracy on labels, vectors named, positions read", "The share of a silo's texts "
     "found among others in a pool; of right answers on which labels are behind a group; of the vectors "
     "that a sum of pool texts gives exactly, so that the texts are known; of an embedding layer's "
     "positions whose vector is exactly a sum of few words'."),
    ("Noise claimed over found, distance to a Gaussian", "Attack 3 divides the noise that is claimed on a "
     "sum by what is left of it without its rows: 1 where the claim is true, larger where too little noise "
     "was added. The distance is 0 where the noise is spread as is claimed."),
    ("Canary, one-run audit, guesses right", "Attack 4 makes a release once more with texts of the auditor's "
     "own, canaries, each put in or left out by a coin. From what comes out the auditor guesses some of the "
     "coins. How many guesses are right proves a lower bound on ε, of a row being there or not."),
    ("AUC on canaries, canaries written", "Attack 14 trains a silo's model once more with canaries among its "
     "rows and has it teach the language model. Did that one become surer of those canaries than of others "
     "like them, or write one? Ranked among the others, a canary has an exposure: the bits by which it is "
     "easier to guess, 1.4 by chance."),
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
    key = metric.lower()
    rate = _RATE.fullmatch(key)
    return f"TPR at {rate[1]} % FPR" if rate else _METRICS.get(key, clean(metric, 40).replace("_", " "))


def attack_words(attack: str) -> str:
    """What an audit calls an attack, on one line, and as a condition where it asks what need not happen."""
    return clean(attack, 60).replace("a row that left between", "if a row left between")


def row_verdict(row: Row) -> Badge:
    """The verdict of the worst value, or that others leak where that one has too few trials to."""
    if row.leaking and row.worst.verdict == "none_shown":
        return Badge("leaks elsewhere", "bad")
    return verdict_of(row.worst)


def audit_name(audit: Audit) -> str:
    """What a run is called, or the file that was audited."""
    return clean(audit.name or (audit.run if audit.method == ELSEWHERE else audit.method), 40)


def release_words(release: AuditedRelease) -> str:
    """What a release is; a vector that stands for one text is no average."""
    if release.kind == "centroids" and set(release.rows_per_centroid) == {1.0}:
        return "Vectors of single texts" + (", as far as is stated" if release.silo == ELSEWHERE else "")
    return kind_words(kind_of(release.kind, release.claim))


def readers_words(release: AuditedRelease, silos: Sequence[str]) -> str:
    """Who can read a release; nobody says so of vectors from elsewhere."""
    if not release.readable_by and release.silo == ELSEWHERE:
        return "not stated"
    return parties(release.readable_by, release.silo, silos)


def short_title(number: int, attack: str) -> str:
    """What stands above a small plot of an attack on membership."""
    return f"{number}, {_SHORT.get(attack) or clean(attack, 22)}"


def meanings(findings: Sequence[Finding]) -> list[str]:
    """What the metrics of some findings are."""
    metrics = {metric_key(f) for f in findings}
    return [meaning for metric, meaning in MEANINGS.items() if metric in metrics]


def attack_number(name: str) -> int | None:
    """The number of an attack by what an audit calls it; None for another name."""
    numbered = _NUMBERED.search(name)
    if numbered is not None:
        return int(numbered[1])
    return next(
        (n for n, words in ATTACKS.items() if any(name.startswith(known) for known in words.names)), None
    )


def control_words(finding: Finding) -> str:
    """Where the attack had nothing to find, as part of a sentence."""
    known = ATTACKS.get(finding.number)
    return (known.control if known else "") or "where there was nothing to find"


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


def attack_list(found: Sequence[int]) -> str:
    """`attacks 2 and 3`."""
    return f"attack{'s' if len(found) > 1 else ''} {joined([str(number) for number in found])}"


def not_run_numbers(audit: Audit) -> list[int]:
    """Numbers of the attacks that an audit has no figure of."""
    return sorted(set(ATTACKS) - {finding.number for finding in audit.findings})


def _left_alone(audit: Audit) -> list[str]:
    """What left and no attack was put to, and which attacks were not run, as sentences of one audit."""
    ran = {finding.number for finding in audit.findings}
    kinds: dict[str, dict[str, Any]] = {}
    for release in audit.releases:
        if release.claim.get("mechanism") != "independent":
            kinds.setdefault(release.kind, release.claim)
    sentences = []
    weights = [kind for kind in kinds if kind in _WEIGHTS] if 12 not in ran else []
    if weights:
        words = joined(list(dict.fromkeys(kind_words(kind_of(k, kinds[k])) for k in weights)))
        start = f"Weights were not attacked (attack 12), though they left: {words}."
        if audit.weights_claimed:
            sentences.append(
                f"{start} They left under a claim, and its ε bounds what any attack on them can gain."
            )
        else:
            sentences.append(
                f"{start} Weights under no claim are the larger leak, so a run without other findings is not "
                "a run without leaks."
            )
    others = []
    for kind, claim in kinds.items():
        attacks = [n for n, words in ATTACKS.items() if kind in words.kinds and n != 3]
        if kind not in _WEIGHTS and not ran & set(attacks):
            by = f" (by {attack_list(attacks)})" if attacks else ""
            others.append(f"“{kind_words(kind_of(kind, claim))}”{by}")
    if others:
        sentences.append(f"No attack was put to {joined(others)}, which left too.")
    listed = {attack_number(one.attack) for one in audit.not_run}
    missing = not_run_numbers(audit)
    if missing:
        start = attack_list(missing)
        were = "were" if len(missing) > 1 else "was"
        sentences.append(f"{start[0].upper()}{start[1:]} {were} not run.")
    partly = sorted(number for number in listed if number is not None and number in ran)
    if partly:
        start = attack_list(partly)
        sentences.append(f"{start[0].upper()}{start[1:]} could not be put to all that left.")
    return sentences


def attacked(audit: Audit) -> list[AuditedRelease]:
    """The releases that some figure is of."""
    put = {(f.silo, f.round, kind) for f in audit.findings if f.number in ATTACKS
           for kind in ATTACKS[f.number].kinds}  # fmt: skip
    return [
        one for one in audit.releases
        if not put.isdisjoint(((one.silo, one.round, one.kind), (ALL_SILOS, one.round, one.kind)))
    ]  # fmt: skip


def not_attacked(audits: Audits) -> list[str]:
    """Sentences on what was not attacked, which a reader must not take for safe. Runs that share one are
    named in it."""
    found: dict[str, list[str]] = {}
    for name, audit in audits:
        for sentence in _left_alone(audit):
            found.setdefault(sentence, []).append(name)
    return [
        sentence if len(names) == len(audits) else f"In {listing(names)}: {sentence[0].lower()}{sentence[1:]}"
        for sentence, names in found.items()
    ]


def overlap_words(audits: Audits) -> list[str]:
    """How much of the pool was left out since it is also a silo's."""
    found: dict[str, list[str]] = {}
    for name, audit in audits:
        if (one := audit.overlap) is not None:
            shared = f"{one.left_out:,} of {count(one.pool, 'pool text')} share a passage with a silo's rows"
            told = f"{shared} and were left out of every attack." if one.left_out else f"{shared}."
            found.setdefault(told, []).append(name)
    return [
        told if len(names) == len(audits) else f"In {listing(names)}: {told}" for told, names in found.items()
    ]


def game_epsilon(finding: Finding) -> float | None:
    """The claimed ε in the game that an attack plays; None where none is claimed or an audit does not say."""
    if finding.claim_epsilon is None:
        return None
    if finding.metric == "guesses_right":  # its game is add-remove, whatever the claim compares
        return number_in(finding.details.get("claim_epsilon_add_remove"))
    game = number_in(finding.details.get("claim_epsilon_replace_one"))
    if game is None and finding.details.get("claim_adjacency") == finding.adjacency:
        return number_in(finding.claim_epsilon)
    return game


def claimed_words(findings: Sequence[Finding]) -> str:
    """The largest ε claimed, and what it is in the attack's game where the claim compares something else."""
    known = [f for f in findings if f.claim_epsilon is not None]
    if not known:
        return "no finite ε claimed"
    largest = max(known, key=lambda f: f.claim_epsilon or 0.0)
    words = f"claimed {epsilon(largest.claim_epsilon or 0.0)}"
    game = game_epsilon(largest)
    if game is not None and epsilon(game) != epsilon(largest.claim_epsilon or 0.0):
        words += f", which is {epsilon(game)} here"
    return words


def claim_in_game(finding: Finding) -> str:
    """The claimed ε for a narrow column: in the attack's game where that is known."""
    game = game_epsilon(finding)
    claimed = finding.claim_epsilon if game is None else game
    return "none" if finding.claim_epsilon is None or claimed is None else epsilon(claimed)


def claim_cell(claim: Mapping[str, Any]) -> Cell:
    if claim.get("mechanism") == "independent":
        return Cell("independent of the rows", clean(str(claim.get("reason", "")), 200))
    if "epsilon" not in claim:
        return Cell("", clean(str(claim.get("reason", "")), 200), (Badge("no finite epsilon", "bad"),))
    at = f"at δ = {delta(float(claim['delta']))}, " if "delta" in claim else ""
    how = MECHANISMS.get(str(claim.get("mechanism")), "noise")
    badges = (Badge("simulated", "caution"),) if claim.get("simulated") else ()
    return Cell(f"ε {epsilon(float(claim['epsilon']))}", f"{at}{how}, for {whose(claim)}", badges)
