"""Every attack as it is put to a run: evidence in, scored figures out.

The mathematics of an attack stands in a module of its own beside this package and knows no run; here each
gets what its adversary sees, and what came out becomes figures with interval, baseline, control and cap.
"""

from attacks.attack import Attack
from attacks.bench import canaries, membership, tokens

SUITE: tuple[Attack, ...] = (membership.ATTACK, tokens.ATTACK, canaries.ATTACK)
