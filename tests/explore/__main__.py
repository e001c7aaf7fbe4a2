"""The larger sweep: `python -m tests.explore`. Prints what each exploration visited."""

from __future__ import annotations

import sys
import time

from tests.explore.honest_server import HonestWorld, explore_honest_server
from tests.explore.server_moves import ServerWorld, explore_server_moves

# Silos, degree of the graph (None: complete), and who may be given another model or plan.
SWEEP = ((3, None, range(3)), (4, None, range(4)), (4, 2, range(4)), (5, 2, ()))


def main() -> None:
    """Explore, and say of each world how many states there were; a violation ends it."""
    for silos in (3, 4):
        started = time.monotonic()
        count = explore_honest_server(HonestWorld(silos))
        sys.stdout.write(f"honest server: {count}, {time.monotonic() - started:.0f} s\n")
    for silos, degree, targets in SWEEP:
        started = time.monotonic()
        world = ServerWorld(silos, degree, targets=targets)
        count = explore_server_moves(world)
        took = time.monotonic() - started
        sys.stdout.write(
            f"any server, degree {degree}: {count}, sums over {sorted(world.learnt)}, {took:.0f} s\n"
        )


if __name__ == "__main__":
    main()
