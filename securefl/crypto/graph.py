"""Who masks with whom: everybody up to 64 silos, above that a k-regular graph drawn from the round's digest.

The graph is a Harary graph on a random permutation, as in Bell, Bonawitz, Gascon, Lepoint and Raykova 2020
("Secure Single-Server Aggregation with (Poly)Logarithmic Overhead"): the silos on a ring in the
order of SHA-256(label, digest, fingerprint), each joined to the k/2 before and the k/2 after it. The digest
is over all signed advertisements, so every silo computes the graph itself, the same on every machine, and the
server does not choose it. No messages, no keys.

The degree. Let c = floor(gamma n) silos collude with the server and d = floor(delta n) drop out, and let
t = floor(2 (k + 1) / 3) + 1 be the threshold in a neighbourhood of k + 1 silos. Over the permutation, three
events may each break a round (their definition of a good graph):
  E1  a neighbourhood whose corrupt neighbours reach t, who could rebuild its secrets:
      n P[Hypergeometric(n - 1, c, k) >= t]
  E2  the honest survivors are not connected, which takes k/2 removed silos in a row on the ring:
      n prod_{i < k/2} (c + d - i) / (n - i)   <=  n (gamma + delta)^(k/2)
  E3  a neighbourhood with fewer than t left, whose masks cannot be removed (the round aborts):
      n P[Hypergeometric(n - 1, d, k) >= k + 1 - (t - 1)]
with Hypergeometric(N, K, k) the marked ones among k drawn of N of which K are marked. By Hoeffding 1963
P[Hypergeometric(N, K, k) >= s] <= exp(-k D(s/k || K/N)) for s/k > K/N, with
D(a || b) = a ln(a/b) + (1 - a) ln((1 - a)/(1 - b)), so k = O(log n) is enough. `degree_for` takes the least
even k at which E1 + E2 + E3, in exact integers, are at most 2^-40; where none below n - 1 is enough, the
graph is complete.

What this does not cover. E2 and E3 hold for dropouts that do not depend on the graph. A server that picks,
after seeing it, whom to call dropped may cut the ring and learn the sum over a stretch of it instead of over
all survivors. Each silo of a stretch needs t of its neighbourhood left to be unmasked, so a stretch with s
honest silos takes t - s colluders among one silo's neighbours: improbable for one or two silos (n = 1,000:
at most 2e-13 and 1e-12), not for twenty (5e-3). Nor does it cover colluders who try many advertisements
until a graph suits them: every try has the stated odds. Whoever must exclude both asks for degree n - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from hashlib import sha256
from math import comb, prod

from securefl.errors import UsageError

COMPLETE_UP_TO = 64
# Colluders below a third are what the cohort's threshold (more than two thirds) allows; a tenth may drop out.
CORRUPT = Fraction(1, 3)
DROPPED = Fraction(1, 10)
FAILURE = Fraction(1, 2**40)
_LABEL = b"securefl/1 mask graph"
_DIGEST_BYTES = 32


def neighbours(
    parties: Sequence[str], digest: bytes, degree: int | None = None
) -> Mapping[str, tuple[str, ...]]:
    """Each party's neighbours, sorted: symmetric, connected, nobody its own.

    parties: fingerprints, each once, in any order; digest: 32 bytes over the round's advertisements. degree:
    even, or at least len(parties) - 1 for the complete graph; None: `degree_for` the cohort. Raises
    UsageError for other values.
    """
    n = len(parties)
    if n < 2 or len(set(parties)) != n:
        raise UsageError("a mask graph joins at least two silos, each named once")
    if len(digest) != _DIGEST_BYTES:
        raise UsageError("a mask graph is drawn from a digest of 32 bytes")
    k = degree_for(n) if degree is None else degree
    if k >= n - 1:
        return {one: tuple(sorted(set(parties) - {one})) for one in parties}
    if k < 2 or k % 2:
        raise UsageError(
            "degree: an even number from 2, or the number of silos less one for the complete graph"
        )
    ring = sorted(parties, key=lambda name: (sha256(_LABEL + digest + name.encode()).digest(), name))
    steps = [step for step in range(-k // 2, k // 2 + 1) if step]
    return {
        name: tuple(sorted(ring[(place + step) % n] for step in steps)) for place, name in enumerate(ring)
    }


@cache
def degree_for(silos: int, corrupt: Fraction = CORRUPT, dropped: Fraction = DROPPED) -> int:
    """The degree of a cohort: silos - 1 (complete) up to 64; above, the least that keeps to 2^-40 (module).

    corrupt, dropped: gamma and delta, fractions whose sum is below one.
    """
    if min(corrupt, dropped) < 0 or corrupt + dropped >= 1:
        raise UsageError("a mask graph needs corrupt and dropped silos to be less than all of them")
    if silos <= COMPLETE_UP_TO:
        return silos - 1
    enough = (k for k in range(2, silos - 1, 2) if failure(silos, k, corrupt, dropped) <= FAILURE)
    return next(enough, silos - 1)


def threshold(members: int) -> int:
    """How many of a neighbourhood's `members` (a silo and its neighbours) rebuild a secret: over 2/3."""
    return 2 * members // 3 + 1


def failure(silos: int, degree: int, corrupt: Fraction, dropped: Fraction) -> Fraction:
    """The bound E1 + E2 + E3 of the module for a k-regular graph, exact; may exceed one."""
    c, d = int(corrupt * silos), int(dropped * silos)
    t = threshold(degree + 1)
    rebuilt = hypergeometric_tail(silos - 1, c, degree, t)
    lost = hypergeometric_tail(silos - 1, d, degree, degree + 2 - t)
    half = degree // 2
    cut = (
        Fraction(prod(range(c + d, c + d - half, -1)), prod(range(silos, silos - half, -1)))
        if c + d >= half
        else 0
    )
    return silos * (rebuilt + lost + cut)


def hypergeometric_tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """P[X >= least] of the marked ones among `drawn` of a population, without replacement; exact."""
    ways = sum(
        comb(marked, hit) * comb(population - marked, drawn - hit)
        for hit in range(max(least, 0), min(marked, drawn) + 1)
    )
    return Fraction(ways, comb(population, drawn))
