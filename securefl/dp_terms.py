"""What one training by DP-SGD is as a mechanism: sampling, clipping, noise, and what is claimed of them.

From the configuration alone, so that every party of a run finds the same and the server can hold a silo's
claim against it. No models and no rows; the training is `dp_sgd`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from securefl.accountants import Sampled, accountants, calibrate, checked_epsilon
from securefl.config import Config
from securefl.errors import ConfigError
from securefl.gaussian import SystemStream
from securefl.privacy import Noise
from securefl.release import DpSgd

_MOST_STEPS = 10**4


@dataclass(frozen=True)
class Mechanism:
    """One training of a run as a mechanism: `steps` of it, of the run's own noise.

    expected_batch: a public guess of how many units take part in a step. It divides the noisy sum, so that a
    learning rate means what it means without noise; privacy does not depend on it, nor does AdamW much.
    """

    noise_multiplier: float
    sample_rate: float
    clip: float
    head_share: float
    steps: int
    delta: float
    unit: str
    per_unit: int
    expected_batch: float

    @property
    def clips(self) -> tuple[float, float]:
        """L2 bounds of a unit's gradient over the encoder (or adapter) and over the head."""
        return self.clip * math.sqrt(1 - self.head_share), self.clip * math.sqrt(self.head_share)

    def claim(self, noise: Noise) -> DpSgd:
        """What is claimed of the weights after these steps. Raises ConfigError where accountants disagree."""
        part = Sampled(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, steps=self.steps)
        return DpSgd(
            epsilon=checked_epsilon(part, self.delta),
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
            clip=self.clip,
            head_share=self.head_share,
            per_unit=self.per_unit,
            accountants=accountants(),
            unit=self.unit,
            generator=f"aes-256-ctr keyed by {noise.name}" if noise.simulated else SystemStream.name,
            simulated=noise.simulated,
        )


def steps_of(epochs: int, sample_rate: float) -> int:
    """Steps of so many passes, in which every unit takes part `epochs` times on average."""
    return max(1, round(epochs / sample_rate))


def training_mechanism(config: Config, epochs: int) -> Mechanism | None:
    """The mechanism of one training of `epochs` passes within the run; None without `privacy.dp_sgd`.

    With `epsilon` the budget is that of the trainings of all rounds together; with `noise_multiplier` each
    step has that. Raises ConfigError where no noise reaches the budget or the accountants disagree.
    """
    terms = config.privacy.dp_sgd
    if terms is None:
        return None
    rate = terms.sample_rate
    rounds = range(1, config.federation.rounds + 1)
    total = sum(steps_of(config.round_epochs(number), rate) for number in rounds)
    if total > _MOST_STEPS:
        raise ConfigError(
            f"privacy.dp_sgd.sample_rate: {rate:g} makes {total} steps of the run's passes, more than "
            f"{_MOST_STEPS}; raise it, or train for fewer passes"
        )
    multiplier = terms.noise_multiplier
    if multiplier is None:
        assert terms.epsilon is not None
        multiplier = calibrate(terms.epsilon, terms.delta, rate, total).noise_multiplier
    return Mechanism(
        noise_multiplier=multiplier,
        sample_rate=rate,
        clip=terms.clip,
        head_share=terms.head_share,
        steps=steps_of(epochs, rate),
        delta=terms.delta,
        unit=config.data.unit_name,
        per_unit=config.data.per_unit if config.data.unit is not None else 1,
        expected_batch=float(config.slm.batch_size),
    )


def round_claim(config: Config, number: int, noise: Noise) -> DpSgd | None:
    """What every silo claims of its training in round `number`; None without DP-SGD."""
    mechanism = training_mechanism(config, config.round_epochs(number))
    return None if mechanism is None else mechanism.claim(noise)


def run_claim(config: Config, rounds: int, noise: Noise) -> DpSgd | None:
    """What the trainings of the first `rounds` rounds add up to; None without DP-SGD or a round."""
    mechanism = training_mechanism(config, 1)
    if mechanism is None or rounds < 1:
        return None
    steps = sum(steps_of(config.round_epochs(n + 1), mechanism.sample_rate) for n in range(rounds))
    return replace(mechanism, steps=steps).claim(noise)


def is_due(given: DpSgd, due: DpSgd) -> bool:
    """Whether a silo's claim is the one that was agreed on, whatever its generator and libraries are.

    Epsilon follows from the rest, by libraries that may differ in version.
    """
    own = {"generator", "simulated", "accountants", "epsilon", "noise_multiplier"}
    same = given.model_dump(exclude=own) == due.model_dump(exclude=own)
    return same and math.isclose(given.noise_multiplier, due.noise_multiplier, rel_tol=2e-3)
