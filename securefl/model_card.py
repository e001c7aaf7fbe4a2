"""The card (README.md) of a trained model: what it is, how to load it, what it may give away."""

from __future__ import annotations

from securefl.account import Account
from securefl.config import AVERAGING
from securefl.models import Slm, usage_snippet
from securefl.result import ClientRow, Result


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
{row.test_accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}). {row.name} alone, with as many local passes:
{row.baseline_accuracy:.3f}.

## How to use it

{usage_snippet(slm.labels, max_length=slm.max_length)}

## Privacy

{_private(row)}
"""


def _whose(row: ClientRow, result: Result) -> str:
    if result.method not in AVERAGING:
        return f"the model of {row.name}, trained on {row.train_rows} rows"
    last = result.rounds[-1]
    if row.name in last.dropped:
        return (
            f"the average as {row.name} last received it, or as it trained it on; it dropped out of the last "
            "round"
        )
    rows = {client.name: client.train_rows for client in result.clients}
    summed = [one.silos for one in result.sums if one.round == last.round]
    silos = summed[0] if summed else [name for name in rows if name not in last.dropped]
    return (
        f"the average of the models of {len(silos)} silos in the last round, "
        f"{sum(rows.get(name, 0) for name in silos)} training rows in all"
    )


def _private(row: ClientRow) -> str:
    """What the account says of the weights. A claim is of what left, not of a silo's own model."""
    told = "Whoever holds them can test whether a text was among the training rows."
    if row.no_finite_epsilon:
        return f"None is claimed: the weights were trained without differential privacy. {told}"
    if row.private_epsilon is None:
        return f"The weights never left the silo; they were trained without differential privacy. {told}"
    simulated = " (simulated: noise from a seed protects nobody)" if row.simulated else ""
    return (
        f"What left {row.name} has epsilon {row.private_epsilon:.3g} at delta {row.delta:g} for each "
        f"silo's whole data{simulated}. That bounds an average of the noised sums; weights that it trained "
        "on by itself since have no bound."
    )


def silo_card(slm: Slm, name: str, method: str, run: str, account: Account) -> str:
    """The card of a model that a silo keeps of a run of its own, where nobody knows the others' figures."""
    private = "no finite epsilon" if account.nonprivate else f"epsilon {account.epsilon}"
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

What left {name} for it has {private}. Whoever holds the weights can test whether a text was among the
training rows.
"""
