"""The card (README.md) of a trained model: what it is, how to load it, what it may give away."""

from __future__ import annotations

from securefl.account import Account
from securefl.config import AVERAGING
from securefl.release import ROW, DpSgd
from securefl.result import ClientRow, Result, versions
from securefl.slm import Slm, usage_snippet

_MADE_BY = ("securefl", "torch", "transformers", "peft", "opacus", "dp-accounting")


def _described(slm: Slm) -> str:
    adapter = ""
    if slm.lora is not None:
        adapter = f" Trained were the head and a LoRA adapter of rank {slm.lora.r}, merged into the weights."
    return (
        f"Classes: {', '.join(slm.labels)}. Encoder: {slm.name}, at most {slm.max_length} tokens, mean\n"
        f"pooling and a linear layer.{adapter}"
    )


def model_card(slm: Slm, row: ClientRow, result: Result) -> str:
    """Markdown with a Hugging Face metadata block for the model of one silo.

    The privacy lines are those of the silo's account: no epsilon is printed where none is finite.
    """
    method, test_rows = result.method, result.test_rows
    low, high = row.test_interval
    return f"""---
library_name: transformers
pipeline_tag: text-classification
tags: [securefl, federated-learning]
base_model: {slm.name if "/" in slm.name and not slm.name.startswith(("/", ".")) else row.model}
---

# Text classifier of {row.name} ({method})

{_described(slm)}

Trained by securefl with the method `{method}`: {_whose(row, result)}. Accuracy on {test_rows} test rows:
{row.test_accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}).{_alone(row)}

## How to use it

{usage_snippet(slm.labels, max_length=slm.max_length)}

## Privacy

{_private(row)}
"""


def _alone(row: ClientRow) -> str:
    """What the silo reaches by itself. Not with private weights: it is of a model without noise."""
    if row.training is not None:
        return ""
    return f" {row.name} alone, with as many local passes:\n{row.baseline_accuracy:.3f}."


def _whose(row: ClientRow, result: Result) -> str:
    if result.method not in AVERAGING:
        trained = "" if row.training is not None else f", trained on {row.train_rows} rows"
        return f"the model of {row.name}{trained}"
    last = result.rounds[-1]
    if row.name in last.dropped:
        what = "model" if result.method == "fedsgd" else "average"
        return (
            f"the {what} as {row.name} last received it, or as it trained it on; it dropped out of the last "
            "round"
        )
    rows = {client.name: client.train_rows for client in result.clients}
    summed = [one.silos for one in result.sums if one.round == last.round]
    silos = summed[0] if summed else [name for name in rows if name not in last.dropped]
    if result.method == "fedsgd":
        return f"the last of {len(result.rounds)} steps, along the mean gradient of {len(silos)} silos"
    if row.training is not None:
        return f"the average of the models of {len(silos)} silos in the last round"
    return (
        f"the average of the models of {len(silos)} silos in the last round, "
        f"{sum(rows.get(name, 0) for name in silos)} training rows in all"
    )


_TOLD = "Whoever holds them can test whether a text was among the training rows."


def _private(row: ClientRow) -> str:
    """What the account says of the weights. A claim is of what left, not of a silo's own model."""
    if row.training is not None:
        training = DpSgd.model_validate({**row.training})
        return f"{_trained_privately(training)}\n\n{_all_that_left(row)}"
    if row.no_finite_epsilon:
        return f"None is claimed: the weights were trained without differential privacy. {_TOLD}"
    if row.private_epsilon is None:
        return f"The weights never left the silo; they were trained without differential privacy. {_TOLD}"
    simulated = " (simulated: noise from a seed protects nobody)" if row.simulated else ""
    return (
        f"What left {row.name} has epsilon {row.private_epsilon:.3g} at delta {row.delta:g} for each "
        f"silo's whole data{simulated}. That bounds an average of the noised sums; weights that it trained "
        "on by itself since have no bound."
    )


def _all_that_left(row: ClientRow) -> str:
    if row.private_epsilon is None and not row.no_finite_epsilon:
        return f"Nothing left {row.name}."
    if row.no_finite_epsilon:
        reasons = "; ".join(row.no_finite_epsilon)
        return f"All that left {row.name} together has no finite epsilon, for it holds besides: {reasons}."
    return (
        f"All that left {row.name}, these trainings and whatever else it released, has epsilon "
        f"{row.private_epsilon:.4g} at delta {row.delta:g}, composed by privacy loss distributions (the "
        "table's figure is the larger one of two accountants, and PRV counts its own error in)."
    )


def _trained_privately(training: DpSgd) -> str:
    """The claim on the trainings behind a model, as a table."""
    unit = "row" if training.unit == ROW else f"`{training.unit}`, all of its rows"
    facts = {
        "epsilon": f"{training.epsilon:.4g}",
        "delta": f"{training.delta:g}",
        "unit of privacy": f"each {unit} of a silo, at most {training.per_unit} in a step"
        if training.unit != ROW
        else f"each {unit} of a silo",
        "adjacency": training.adjacency,
        "sampling": f"{training.sampling}, rate {training.sample_rate:g}, {training.steps} steps",
        "clip (L2)": f"{training.clip:g}, of whose square {training.head_share:g} is the head's",
        "noise multiplier": f"{training.noise_multiplier:.5g}",
        "noise": training.generator,
        "accountants": training.accountants,
        "versions": ", ".join(f"{name} {version}" for name, version in versions(_MADE_BY).items()),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    simulated = (
        "\n\nThis was a simulation: its noise came from a seed, which protects nobody. The figures are those "
        "of the mechanism."
        if training.simulated
        else ""
    )
    return (
        "Trained by DP-SGD. The claim is about the weights and all that is made of them, for each silo that "
        f"was trained in the run:\n\n| what | value |\n|---|---|\n{rows}{simulated}\n\n"
        "Learning rates, passes and clip were given in the configuration; where they were chosen by looking "
        "at results on the same rows, that choice is not in the claim."
    )


def silo_card(
    slm: Slm, name: str, method: str, run: str, account: Account, training: DpSgd | None = None
) -> str:
    """The card of a model that a silo keeps of a run of its own, where nobody knows the others' figures.

    training: the claim on all trainings of the run, where they are by DP-SGD.
    """
    private = _account_words(account)
    how = f"What left {name} for it: {private}. " + (_TOLD if training is None else "")
    if training is not None:
        how = f"{_trained_privately(training)}\n\nAll that left {name} so far: {private}."
    return f"""---
library_name: transformers
pipeline_tag: text-classification
tags: [securefl, federated-learning]
---

# Text classifier of {name} ({method})

{_described(slm)}
Trained by securefl in run {run}.

## How to use it

{usage_snippet(slm.labels, max_length=slm.max_length)}

## Privacy

{how}
"""


def _account_words(account: Account) -> str:
    if account.nonprivate:
        return "no finite epsilon"
    if account.private_epsilon is None or account.delta is None:
        return "depends on no row"
    simulated = " (simulated: noise from a seed protects nobody)" if account.simulated else ""
    return (
        f"epsilon {account.private_epsilon:.4g} at delta {account.delta:g} for each {account.unit} under "
        f"{account.adjacency}{simulated}"
    )
