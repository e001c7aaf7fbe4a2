"""Every attack as it is put to a run: evidence in, scored figures out.

The mathematics of an attack stands in a module of its own beside this package and knows no run; here each
gets what its adversary sees, and what came out becomes figures with interval, baseline, control and cap.
"""

from attacks.attack import Attack
from attacks.bench import (
    canaries,
    decoder,
    gradient,
    inversion,
    membership,
    memorisation,
    models,
    noise,
    pool,
    probes,
    rounds,
    subtraction,
    tokens,
    zero_shot,
)

SUITE: tuple[Attack, ...] = (
    membership.ATTACK,
    tokens.ATTACK,
    noise.ATTACK,
    canaries.ATTACK,
    probes.BAG_ATTACK,
    rounds.ATTACK,
    subtraction.ATTACK,
    pool.ATTACK,
    inversion.ATTACK,
    zero_shot.ATTACK,
    decoder.ATTACK,
    gradient.ATTACK,
    models.ATTACK,
    probes.ATTRIBUTE_ATTACK,
    memorisation.ATTACK,
)
