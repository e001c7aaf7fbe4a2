"""The card (README.md) of a trained model: what it is, how to load it, what it may give away."""

from __future__ import annotations

from securefl.models import Slm, usage_snippet
from securefl.result import ClientRow


def model_card(slm: Slm, row: ClientRow, method: str, test_rows: int) -> str:
    """Markdown with a Hugging Face metadata block for the model of one silo.

    The privacy lines are those of the silo's account: no epsilon is printed where none is finite.
    """
    low, high = row.test_interval
    private = (
        "None is claimed: " + "; ".join(row.no_finite_epsilon) + "."
        if row.no_finite_epsilon
        else "The weights never left the silo; they were trained without differential privacy."
    )
    labels = ", ".join(slm.labels)
    return f"""---
library_name: transformers
pipeline_tag: text-classification
tags: [securefl, federated-learning]
base_model: {slm.name if "/" in slm.name and not slm.name.startswith(("/", ".")) else row.model}
---

# Text classifier of {row.name} ({method})

Classes: {labels}. Encoder: {slm.name}, at most {slm.max_length} tokens, mean pooling and a linear layer.

Trained by securefl with the method `{method}` on {row.train_rows} rows of {row.name}. Accuracy on
{test_rows} test rows: {row.test_accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}); the silo alone,
with the same number of local passes: {row.baseline_accuracy:.3f}.

## How to use it

{usage_snippet(slm.labels)}

## Privacy

{private} Whoever holds these weights can test whether a text was among the training rows.
"""
