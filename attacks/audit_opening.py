"""What an audit says first, in plain words, for readers who know neither the attacks nor their metrics.

Sentences made of `Audit` objects, each figure with what guessing scores, what the same attack scores where it
has nothing to find, and what the claim allows. It makes no tables and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from attacks.audit_rows import (
    Audits,
    is_hypothetical,
    is_membership,
    is_recall,
    leaking,
    metric_key,
    most_telling,
    number_in,
    worst_first,
    worst_of,
)
from attacks.audit_words import (
    ELSEWHERE,
    QUESTIONS,
    answers,
    attack_list,
    claimed_words,
    control_words,
    game_epsilon,
    metric_words,
)
from attacks.findings import Audit, Finding
from securefl.report.page import Badge, accuracy, clean, count, epsilon, joined, listing

_ADVERSARIES = {
    "peer": "another silo", "server": "the server", "outsider": "an outsider", "auditor": "the auditor",
}  # fmt: skip
# What an attacker did, of a share in percent.
_DEEDS = {
    "token_recall": "read back {} of the words of a group of texts",
    "rare_token_recall": "read back {} of the words that no other text has, such as names",
    "bag_precision": "wrote words of which {} stand in the texts of the group",
    "exact_texts": "put together {} of the texts word for word",
    "rouge1": "read back texts that share {} of their words with the true ones",
    "rouge2": "read back texts that share {} of their pairs of words with the true ones",
    "rouge_l": "wrote texts of which {} stand in the true ones, in the same order",
    "token_f1": "wrote down the words of texts with an F1 of {}",
    "recall": "found {} of a silo's texts in a pool that holds them among others",
    "noise_claimed_over_found": "found the noise of a release {} times smaller than is claimed",
    "positions_read": "wrote down the words at {} of the positions of a group of texts",
    "distance_to_a_gaussian": "found that the noise of a release is not spread as is claimed, by {}",
    "vectors_named": "named the pool texts behind {} of the vectors",
    "accuracy": "gave the right answer in {} of questions which labels a group has",
    "canary_auc": "told by the language model a planted canary from one that was not in {} of pairs",
    "canaries_written": "had the language model write {} of the canaries that were planted, word for word",
    "tpr_at_1_percent_fpr": "found {} of a silo's rows and took one stranger's row in 100 for one",
    "tpr_at_0.1_percent_fpr": "found {} of a silo's rows and took one stranger's row in 1000 for one",
}
_MOST_LEAKS = 3
_HARDLY_ANY = 50.0


def role(finding: Finding) -> str:
    """`peer` of `peer; sees the pooled centroids`."""
    return clean(finding.adversary.split(";")[0], 30)


def _percent(value: float) -> str:
    return f"{value:.0%}" if abs(value) >= 0.01 or not value else f"{value:.1%}"


def deed(finding: Finding) -> str:
    """Who did what, and beside it what guessing, the control and the claim come to; part of a sentence."""
    someone = "an attacker" if finding.silo != ELSEWHERE else "someone who has the file"
    known = {} if finding.silo == ELSEWHERE else _ADVERSARIES
    who = f"{known.get(role(finding), someone)} (attack {finding.number})"
    show, key = _percent, metric_key(finding)
    exact, texts = (number_in(finding.details.get(name)) for name in ("texts_found_exactly", "texts"))
    if is_hypothetical(finding) and is_membership(finding):
        did = f"would tell, if a row left between two rounds, which one, in {show(finding.value)} of pairs"
    elif is_membership(finding):
        did = f"told a silo's row from a stranger's in {show(finding.value)} of pairs"
    elif key == "auc":
        did = f"told groups with a label from groups without it in {show(finding.value)} of pairs"
    elif key == "guesses_right":
        did = f"was right in {show(finding.value)} of guesses which canary texts were put in"
    elif key == "noise_claimed_over_found" and finding.value > _HARDLY_ANY:
        show, did = accuracy, "found no noise, or hardly any, in a release that is claimed to have it"
    elif key in _DEEDS:
        show = _percent if key != "noise_claimed_over_found" else accuracy
        did = _DEEDS[key].format(show(finding.value))
    else:
        show = accuracy
        did = f"reached a {metric_words(finding.metric)} of {accuracy(finding.value)}"
    if exact and texts:
        did = f"read back {exact:.0f} of {count(int(texts), 'text')} word for word and {did}"
    beside = [f"guessing: {show(finding.baseline)}"]
    if finding.control is not None:
        beside.append(f"the same attack {control_words(finding)}: {show(finding.control)}")
    if finding.cap is not None:
        beside.append(f"at most by the claim: {show(finding.cap)}")
    shown, held = finding.epsilon_lower_bound, ""
    claimed = game_epsilon(finding)
    if key == "guesses_right" and shown is not None and claimed is not None:
        held = f", which proves ε {epsilon(shown)} of the claimed {epsilon(claimed)}"
    return f"{who} {did} ({', '.join(beside)}){held}"


def broken_claim(audit: Audit) -> Finding | None:
    """The worst figure above what its claim allows."""
    return min((f for f in audit.findings if f.verdict == "violates_claim"), key=worst_first, default=None)


def by_chance(findings: Sequence[Finding], total: int) -> str:
    """Part of a sentence: figures that leak by themselves where all together they do not; empty if none.

    total: how many figures the whole audit has, over which chance is reckoned.
    """
    above = sum(f.verdict != "none_shown" for f in findings)
    if not above:
        return ""
    lie, their = ("lies", "its") if above == 1 else ("lie", "their")
    return (
        f"{above} of {count(len(findings), 'figure')} {lie} above guessing by {their} own 95 % interval, by "
        f"no more than chance explains over {'so many' if total == len(findings) else f'all {total}'}"
    )


def _told_first(finding: Finding) -> tuple[bool, int, float]:
    return is_hypothetical(finding), *most_telling(finding)


def _run_sentence(name: str, audit: Audit) -> str:
    """What the audit of one run found."""
    worst = broken_claim(audit)
    if worst is not None:
        figure = f"{metric_words(worst.metric)} {accuracy(worst.value)}, cap {accuracy(worst.cap)}"
        return (
            f"In {name} the attack “{clean(worst.attack, 60)}” got further than the claim allows ({figure}): "
            "the claim is wrong."
        )
    found = leaking(audit)
    if not found:
        few = by_chance(audit.findings, len(audit.findings))
        return f"In {name} {few}." if few else ""
    leaks: dict[int, Finding] = {}  # one figure of an attack says enough here
    for finding in sorted(found, key=_told_first):
        # What was read weighs more than how well it was told apart, and AUC is easier to say than TPR.
        known = leaks.setdefault(finding.number, finding)
        if not (is_membership(known) or is_recall(known)) and is_membership(finding):
            leaks[finding.number] = finding
    told = sorted(leaks.values(), key=_told_first)[:_MOST_LEAKS]
    parts = [deed(finding) for finding in sorted(told, key=lambda f: f.number)]
    more = len(leaks) - len(told)
    rest = f" {count(more, 'other attack')} beat guessing too." if more else ""
    return f"In {name}, at worst, {joined(parts)}.{rest}"


def audit_summary(audits: Audits) -> str:
    """The opening sentences about attacks, ending with what a passed audit does not mean."""
    sentences = []
    quiet = []
    for name, audit in audits:
        sentence = _run_sentence(clean(name, 40), audit)
        if sentence:
            sentences.append(sentence)
        elif audit.findings:
            quiet.append(clean(name, 40))
    if quiet:
        sentences.append(f"In {listing(quiet)} no attack that was run beat guessing.")
    if untouched := [clean(name, 40) for name, audit in audits if not audit.findings]:
        sentences.append(f"In {listing(untouched)} nothing was attacked; why is said below.")
    return " ".join([*sentences, *dict.fromkeys(audit.warning for _, audit in audits)])


def reasons(audit: Audit) -> list[tuple[str, str, Badge, str]]:
    """The three questions: name, in plain words, answer, and the sentence that says why."""
    found: list[tuple[str, str, Badge, str]] = []
    told: set[int] = set()
    for (question, verdict), (name, badge) in zip(audit.verdicts, answers(audit), strict=True):
        worst, words = worst_of(audit, question, told), QUESTIONS[question]
        if worst is None:
            why = "No attack that was run says anything about it."
        elif verdict == "none_shown":
            few = by_chance([f for f in audit.findings if question in f.bears_on], len(audit.findings))
            start = few or (
                "No attack beat guessing by more than chance explains where there are "
                if len(audit.findings) != 1 else "No attack beat guessing where there is "
            ) + count(len(audit.findings), "figure")  # fmt: skip
            why = f"{start}. The nearest, of {count(worst.trials, 'trial')}: {deed(worst)}."
        else:
            sentence = deed(worst)
            why = f"{sentence[0].upper()}{sentence[1:]}."
        found.append((name, words, badge, why))
        told |= set() if worst is None else {worst.number}
    return found


def headline(audit: Audit) -> str:
    """One sentence of what was found, for the top of the page."""
    if not audit.findings:
        return "Nothing was attacked; why is said below."
    if broken_claim(audit) is not None:
        return f"At least one claim is wrong: {_run_sentence('this run', audit)}"
    leaks = [name for name, badge in answers(audit) if badge.text == "leaks"]
    ran = len({f.number for f in audit.findings})
    what = "the file" if audit.method == ELSEWHERE else "what left the silos"
    start = f"{count(ran, 'attack')} {'was' if ran == 1 else 'were'} put to {what}"
    if not leaks:
        few = by_chance(audit.findings, len(audit.findings))
        if few:
            return f"{start}. {few}."
        none = "it did not beat" if ran == 1 else "none beat"
        return f"{start}, and {none} guessing by more than chance explains."
    held = [f for f in leaking(audit) if f.claim_compared]
    free = sorted({f.number for f in leaking(audit) if not f.claim_compared})
    within = " Where a claim bounds what was found, it held." if held else ""
    if free:
        within += f" No claim bounds what {attack_list(free)} found."
    show = "It shows" if ran == 1 else "They show"
    return f"{start}. {show} {joined(leaks)} to be possible.{within}"


def largest_bound(audit: Audit) -> Finding | None:
    """The finding that proves the largest ε lost; None where no attack proves any."""
    shown = [f for f in audit.findings if number_in(f.epsilon_lower_bound) is not None]
    return max(shown, key=lambda f: f.epsilon_lower_bound or 0.0, default=None)


def claim_against_shown(audit: Audit) -> str:
    """The claimed ε beside the largest lower bound that an attack proves, in words."""
    if not audit.findings:
        return "Nothing was attacked, so no bound is shown."
    largest = largest_bound(audit)
    if largest is None:
        return f"No attack that was run proves a lower bound on ε ({claimed_words(audit.findings)})."
    game = game_epsilon(largest)
    if largest.claim_epsilon is None:
        against = "no finite ε is claimed for what it attacked"
    elif game is None:
        against = f"{claimed_words([largest])} for one release"
    else:
        against = f"the claim allows {epsilon(game)} in the game that it plays"
    return (
        f"The largest ε that an attack proves was lost is {epsilon(largest.epsilon_lower_bound or 0.0)} "
        f"(attack {largest.number}, {clean(largest.silo, 32)}, round {largest.round}); {against}."
    )
