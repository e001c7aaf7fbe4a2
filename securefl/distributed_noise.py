"""Noise on a masked sum, each silo adding a share, so that no server has to be trusted with adding it.

The distributed discrete Gaussian mechanism (Kairouz, Liu and Steinke 2021). A silo clips its update to an L2
norm, scales it to an integer grid, rounds it at random and adds integer noise of a share of the variance, mod
2^bits; then it is masked. Arrays in, arrays out: no masks, no messages, no files.

Formal guarantees. Let c be the clip in grid steps, d the dimension, t the threshold, h = t - colluders, and D
the bound below on the norm of a rounded update, sigma^2 the variance of one silo's noise.
1. Rounding. Each coordinate goes up or down at random, its mean kept. The result's squared norm exceeds
   D^2 = min(c^2 + d/4 + sqrt(2 ln(1/b)) (c + sqrt(d)/2), (c + sqrt(d))^2) with probability at most b
   (Proposition 22 there). It is drawn again until it does not; after some tries it is truncated towards 0,
   which is never longer than c. The norm is computed in integers, so D holds always, whatever floats did
   before, and the sum moves by at most 2 D when one silo's update is exchanged for another.
2. Noise. At least h of the silos in the sum are honest and add noise of sigma^2 = (2 D z)^2 / h each, z the
   noise multiplier. Their sum is nearly a discrete Gaussian: by Theorem 1 there the sum is (e^2/2)-zCDP with
   e = min(sqrt((2 D)^2 / (h sigma^2) + tau d / 2), 2 D / (sqrt(h) sigma) + tau sqrt(d)) and
   tau = 10 sum of exp(-2 pi^2 sigma^2 k / (k + 1)) over k = 1 .. h - 1, next to nothing as sigma >= 4 here.
   Colluders may leave their noise out or subtract it; what more silos than t add is more noise.
3. The modulus. Reducing mod 2^bits and everything after it is postprocessing: where the sum wraps around,
   the mean is wrong and privacy is what it was. The scale is as large as keeps the probability of that below
   2^-30 for all `silos` (a discrete Gaussian's tails are at most exp(-x^2 / (2 sigma^2)) a side).

What this rests on. The sampler is exact but for a statistical distance below 2^-230 a coordinate, given
uniform bits: it decides with integers and floats only where their error cannot matter, else with numbers of
256 bits. The bits are an AES-256-CTR keystream under a key from the release's generator, so the claim is
against adversaries who cannot tell that stream from random, and no stronger than that generator's seed. How
long it takes depends on the values, as in all code of numpy. Every silo has the weight 1: a hidden weight
would want noise of its own. `threshold` must be what the masked round enforces on the whole sum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from securefl.crypto.masks import CHUNK, MAX_BITS, MIN_BITS, SEED_BYTES, Keystream, in_parts
from securefl.errors import ConfigError, PayloadError, SecureflError, UsageError, WrongShape
from securefl.privacy import Noise, zcdp_epsilon, zcdp_rho
from securefl.privacy_terms import ModelPrivacy
from securefl.release import DistributedNoise

WRAP_PROBABILITY = 2.0**-30  # of a round's sum: one round in a billion is lost
_MISS = (
    2.0**-20
)  # b of the module: how often a rounding is drawn again. Smaller would cost next to nothing too.
_ATTEMPTS = 8
_ONE = 1 << 16  # random steps of one rounding, as in `fixed_point`
_LEAST_SIGMA = 4.0  # grid steps: above it tau is below 1e-60
_DIGITS = 110  # decimal digits of the sampler's exact numbers
_EXACT = 256  # bits of its probabilities
_FINE_BITS = 20  # of a random word, for the place within a cell; the others decide whether it is kept
_WIDEST = 2048.0  # sigma of a sampler's table, in cells; below its half only where a cell is one step
_REDRAWS = 64  # a draw is kept with probability 0.98 at least


@dataclass(frozen=True)
class ModelMechanism:
    """One round's noised sum of model updates; see the module for the mathematics.

    clip: L2 bound of an update. scale: grid steps for 1 of an update. norm_squared: D^2, of a rounded update,
    in steps. variance: of one silo's noise, in steps^2. dimension: values of an update. delta: of the claim.
    """

    clip: float
    scale: float
    norm_squared: int
    variance: float
    dimension: int
    silos: int
    threshold: int
    colluders: int
    bits: int
    delta: float

    @property
    def sensitivity(self) -> float:
        """2 D: how far the sum moves when one silo's update is exchanged, in the updates' unit."""
        return 2 * math.sqrt(self.norm_squared) / self.scale

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise of `threshold - colluders` silos, in the updates' unit."""
        return math.sqrt((self.threshold - self.colluders) * self.variance) / self.scale

    @property
    def noise_multiplier(self) -> float:
        """z: `deviation` over `sensitivity`."""
        return self.deviation / self.sensitivity

    @property
    def rho(self) -> float:
        """zCDP of one release (Kairouz, Liu and Steinke 2021, Theorem 1)."""
        honest = self.threshold - self.colluders
        tau = 10 * sum(math.exp(-2 * math.pi**2 * self.variance * k / (k + 1)) for k in range(1, honest))
        ratio = 1 / self.noise_multiplier
        root = min(math.sqrt(ratio**2 + tau * self.dimension / 2), ratio + tau * math.sqrt(self.dimension))
        return root**2 / 2

    @property
    def wrap_probability(self) -> float:
        """That the sum of all `silos` wraps around in some coordinate, at most."""
        room = (1 << self.bits - 1) - 1 - self.silos * (self.clip * self.scale + 2)
        return min(1.0, 2 * self.dimension * math.exp(-(room**2) / (2 * self.silos * self.variance)))


def round_multiplier(terms: ModelPrivacy, rounds: int) -> float:
    """z of each of `rounds` sums whose total is `terms`' budget."""
    if terms.noise_multiplier is not None:
        return terms.noise_multiplier
    assert terms.epsilon is not None
    return 1 / math.sqrt(2 * zcdp_rho(terms.epsilon, terms.delta) / rounds)


def calibrate_models(
    terms: ModelPrivacy, rounds: int, silos: int, threshold: int, dimension: int, bits: int
) -> ModelMechanism:
    """The mechanism of each of `rounds` sums whose total is `terms`' budget, on the finest grid that fits.

    With `epsilon` the budget is that of all rounds together (rho adds up); with `noise_multiplier` every
    round has that. threshold: the fewest silos whose sum opens; dimension: values of an update. Raises
    ConfigError where the modulus has no room for the sum, or the colluders leave nobody to add noise.
    """
    if not 2 <= threshold <= silos or rounds < 1 or dimension < 1 or not MIN_BITS <= bits <= MAX_BITS:
        raise ConfigError("a noised sum has 2 or more silos, a threshold up to them, and 16 to 32 bits")
    honest = threshold - terms.colluders
    if honest < 1:
        raise ConfigError(
            f"privacy.models.colluders: {terms.colluders} of the {threshold} silos of a sum leave nobody who "
            "adds noise; lower it or raise the threshold"
        )
    multiplier = round_multiplier(terms, rounds)
    capacity = (1 << bits - 1) - 1
    tail = math.sqrt(2 * math.log(2 * dimension / WRAP_PROBABILITY) * silos)

    def deviation(clip: float) -> float:
        return 2.0 * multiplier * math.sqrt(norm_bound(clip, dimension) / honest)

    def excess(clip: float) -> float:
        return silos * (clip + 2) + tail * deviation(clip) - capacity

    # The most whole steps that fit: every implementation finds the same.
    steps, above = 0, capacity
    while above - steps > 1:
        middle = (steps + above) // 2
        steps, above = (middle, above) if excess(middle) < 0 else (steps, middle)
    # Below, rounding alone would more than double the noise; it would still be private, and useless.
    if steps < 1 or norm_bound(steps, dimension) > 4 * steps**2 or deviation(steps) < _LEAST_SIGMA:
        raise ConfigError(
            f"protection.bits: a sum of {silos} silos with {dimension} values and a noise multiplier of "
            f"{multiplier:.3g} does not fit {bits} bits; use more (32 at most), fewer silos or less noise"
        )
    norm_squared = norm_bound(steps, dimension)
    return ModelMechanism(
        clip=terms.clip,
        scale=steps / terms.clip,
        norm_squared=norm_squared,
        variance=(2 * multiplier) ** 2 * norm_squared / honest,
        dimension=dimension,
        silos=silos,
        threshold=threshold,
        colluders=terms.colluders,
        bits=bits,
        delta=terms.delta,
    )


def norm_bound(clip: float, dimension: int) -> int:
    """D^2 for an update of norm `clip`, both in grid steps (the module's step 1)."""
    root = math.sqrt(dimension)
    likely = clip**2 + dimension / 4 + math.sqrt(-2 * math.log(_MISS)) * (clip + root / 2)
    return math.floor(min(likely, (clip + root) ** 2))


def claim(mechanism: ModelMechanism, noise: Noise) -> DistributedNoise:
    """What is claimed of the sum that a silo's `encode_noised` goes into."""
    return DistributedNoise(
        epsilon=zcdp_epsilon(mechanism.rho, mechanism.delta),
        delta=mechanism.delta,
        rho=mechanism.rho,
        clip=mechanism.clip,
        sensitivity=mechanism.sensitivity,
        noise_multiplier=mechanism.noise_multiplier,
        silos=mechanism.silos,
        threshold=mechanism.threshold,
        colluders=mechanism.colluders,
        bits=mechanism.bits,
        wrap_probability=mechanism.wrap_probability,
        generator=f"aes-256-ctr keyed by {noise.name}",
        simulated=noise.simulated,
    )


def encode_noised(
    values: NDArray[np.float32], mechanism: ModelMechanism, noise: Noise, threads: int = 2
) -> NDArray[np.uint32]:
    """A silo's update, clipped, rounded and noised, as integers mod 2^bits, to be masked and never shown.

    values: float32 (dimension,). Where it holds NaN or infinity it counts as 0: a refusal would tell that
    the rows made it so. Returns uint32 (dimension,), below 2^bits. Raises WrongShape for another array. Asks
    `noise` for its generator once: encode once a release and send the same again.
    """
    if values.dtype != np.float32 or values.shape != (mechanism.dimension,):
        raise WrongShape(f"an update to be noised is one row of {mechanism.dimension} float32 values")
    generator = noise.draw()
    rounded = round_within(values, mechanism, lambda: generator.bytes(SEED_BYTES), threads)
    encoded = rounded.view(np.uint32)
    sampler, key = gaussian_sampler(mechanism.variance), generator.bytes(SEED_BYTES)
    top = np.uint32(2**mechanism.bits - 1)

    def work(start: int, stop: int) -> None:
        for begin in range(start, stop, CHUNK):
            chunk = encoded[begin : min(begin + CHUNK, stop)]
            # A negative integer's two's complement is its residue mod 2^32.
            chunk += sampler.draw(chunk.size, *_words_at(key, begin)).astype(np.uint32)
            chunk &= top

    in_parts(values.size, threads, work)
    return encoded


def decode_mean(total: NDArray[np.uint32], survivors: int, mechanism: ModelMechanism) -> NDArray[np.float64]:
    """The noised mean of the updates of `survivors` silos, whose encodings add up to `total` mod 2^bits.

    total: uint32 (dimension,). Returns float64 (dimension,). Raises WrongShape for another array, UsageError
    for a number of survivors that the mechanism is not made for, PayloadError for a value not below 2^bits.
    """
    if total.dtype != np.uint32 or total.shape != (mechanism.dimension,):
        raise WrongShape(f"a noised sum is one row of {mechanism.dimension} uint32 values")
    if not mechanism.threshold <= survivors <= mechanism.silos:
        raise UsageError(f"survivors: {mechanism.threshold} to {mechanism.silos} silos, not {survivors}")
    if int(total.max()) >> mechanism.bits:
        raise PayloadError(f"a noised sum has a value that does not fit {mechanism.bits} bits")
    signed = total.astype(np.int64)
    signed[signed >= 2 ** (mechanism.bits - 1)] -= 2**mechanism.bits
    return np.asarray(signed / (mechanism.scale * survivors), np.float64)


# --- rounding


def round_within(
    values: NDArray[np.float32],
    mechanism: ModelMechanism,
    new_key: Callable[[], bytes],
    threads: int = 2,
    attempts: int = _ATTEMPTS,
) -> NDArray[np.int32]:
    """The update on the grid, without noise: int32 (d,) of squared norm at most `norm_squared`, always.

    new_key: a fresh key of 32 bytes for each of at most `attempts` draws.
    """
    squares = sum(
        float(np.square(values[i : i + CHUNK], dtype=np.float64).sum()) for i in range(0, values.size, CHUNK)
    )
    if not math.isfinite(squares):
        return np.zeros(values.size, np.int32)
    factor = mechanism.scale * min(1.0, mechanism.clip / max(math.sqrt(squares), 1e-300))
    rounded = np.empty(values.size, np.int32)
    for _ in range(attempts):
        if _round(values, factor, new_key(), rounded, threads) <= mechanism.norm_squared:
            return rounded
    if _round(values, factor, None, rounded, threads) > mechanism.norm_squared:
        raise SecureflError("an update is longer on the grid than its clip; nothing was sent")
    return rounded


def _round(
    values: NDArray[np.float32], factor: float, key: bytes | None, out: NDArray[np.int32], threads: int
) -> int:
    """values * factor into `out`, at random or, without a key, towards 0. Returns the squared norm, exact."""
    norms: list[int] = []

    def work(start: int, stop: int) -> None:
        for begin in range(start, stop, CHUNK):
            chunk = values[begin : min(begin + CHUNK, stop)]
            scaled = chunk.astype(np.float64)
            scaled *= factor
            if key is None:
                np.trunc(scaled, out=scaled)
            else:
                drawn = np.empty(2 * chunk.size, np.uint8)
                Keystream(key, 2 * begin).fill(np.zeros_like(drawn), drawn)
                scaled += (drawn.view("<u2") + 0.5) / _ONE
                np.floor(scaled, out=scaled)
            whole = scaled.astype(np.int64)
            norms.append(int(whole @ whole))
            out[begin : begin + chunk.size] = whole

    in_parts(values.size, threads, work)
    return sum(norms)


# --- the discrete Gaussian


class _Words:
    """A keystream as 64-bit words."""

    def __init__(self, key: bytes, position: int) -> None:
        self._stream = Keystream(key, position)

    def take(self, count: int) -> NDArray[np.uint64]:
        drawn = np.empty(8 * count, np.uint8)
        self._stream.fill(np.zeros_like(drawn), drawn)
        return drawn.view("<u8")

    def integer(self, bits: int) -> int:
        """A uniform integer of so many bits, a multiple of 64 or fewer of the last word."""
        whole = int.from_bytes(self.take(-(-bits // 64)).tobytes(), "little")
        return whole & ((1 << bits) - 1)


def _words_at(key: bytes, begin: int) -> tuple[_Words, _Words]:
    """The words of the chunk that begins there, and, from a part of the stream that no chunk's first draw
    reaches, those of its further ones, 2^40 bytes apart."""
    return _Words(key, 16 * begin), _Words(key, (1 << 62) + (begin // CHUNK << 40))


@dataclass(frozen=True, repr=False)
class Sampler:
    """Draws of the discrete Gaussian: P(k) in proportion to exp(-k^2 / (2 variance)) over all integers k.

    The integers are cut into cells of `width` = 2^n steps, cell x from x width on. A cell is drawn by its
    cumulated probability from a table, where every step of it weighs like the one nearest to 0; then a step
    of it, which is kept with the probability that makes up for that (rejection, as Ducas et al. 2013 do).
    thresholds: cumulated probabilities in units of 2^-256, all but the last; first_look: their upper `look`
    bits. A random number that agrees with a threshold in those gets further bits and is compared in whole.
    """

    variance: float
    width: int
    cells: int
    thresholds: tuple[int, ...]
    first_look: NDArray[np.uint64]
    look: int

    def draw(self, count: int, words: _Words, more: _Words) -> NDArray[np.int64]:
        """int64 (count,). words: two for each draw; more: for what these do not decide."""
        values, kept = self._propose(words.take(2 * count), more)
        left = np.flatnonzero(~kept)
        for _ in range(_REDRAWS):
            if not left.size:
                return values
            values[left], kept = self._propose(more.take(2 * left.size), more)
            left = left[~kept]
        raise SecureflError("no noise could be drawn: its random bits are not random")

    def _propose(
        self, words: NDArray[np.uint64], more: _Words
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        first, second = np.split(words, 2)
        first = first >> np.uint64(64 - self.look)
        index = np.searchsorted(self.first_look, first, side="right")
        for i in np.flatnonzero(self.first_look[np.maximum(index, 1) - 1] == first):
            rest = _EXACT - self.look
            index[i] = bisect_right(self.thresholds, int(first[i]) << rest | more.integer(rest))
        cell = index.astype(np.int64) - self.cells
        if self.width == 1:
            return cell, np.ones(cell.size, np.bool_)
        values = self.width * cell + (second & np.uint64(self.width - 1)).astype(np.int64)
        nearest = np.where(cell >= 0, self.width * cell, -self.width * (cell + 1) + 1)
        beyond = np.abs(values) - nearest
        product = beyond * (2 * nearest + beyond)  # k^2 - nearest^2, below 2^53
        keep = min(64 - _FINE_BITS, self.look)
        drawn = (second >> np.uint64(64 - keep)).astype(np.float64)
        limit = np.exp(product / (-2 * self.variance)) * 2.0**keep  # its error is below 2^-6
        kept = drawn < limit
        for i in np.flatnonzero(np.abs(drawn + 0.5 - limit) < 1):
            kept[i] = self._keeps(int(product[i]), int(drawn[i]), keep, more)
        return values, kept

    def _keeps(self, product: int, drawn: int, bits: int, more: _Words) -> bool:
        rest = _EXACT - bits
        with localcontext(prec=_DIGITS):
            probability = (Decimal(-product) / (2 * Decimal(self.variance))).exp()
            return Decimal(drawn << rest | more.integer(rest)) < probability * (1 << _EXACT)


@lru_cache(maxsize=2)
def gaussian_sampler(variance: float, look: int = 64, widest: float = _WIDEST) -> Sampler:
    """The sampler for a variance in steps^2, up to 2^60.

    look: bits of the first look; widest: sigma in cells, at most. Smaller in tests, to make the rare common.
    """
    sigma = math.sqrt(variance)
    width = 1 << max(0, math.ceil(math.log2(sigma / widest)))
    if width > 1 << _FINE_BITS:
        raise UsageError("the noise is too wide for its sampler")
    # What lies further out has a probability below 2^-256.
    cells = math.ceil(math.sqrt(2 * _EXACT * math.log(2)) * sigma / width) + 2
    below, above = (_weights(variance, width, first, cells) for first in (1, 0))
    total, cumulated = 0, []
    for weight in (*reversed(below), *above):
        total += weight
        cumulated.append(total)
    whole = (1 << _EXACT) - 1  # where the last weights are 0
    thresholds = tuple(min((weight << _EXACT) // total, whole) for weight in cumulated[:-1])
    first_look = np.array([one >> (_EXACT - look) for one in thresholds], np.uint64)
    return Sampler(variance, width, cells, thresholds, first_look, look)


def _weights(variance: float, width: int, first: int, cells: int) -> list[int]:
    """exp(-m^2 / (2 variance)) in units of 2^-320 for m = first, first + width, ..., of which `cells`."""
    with localcontext(prec=_DIGITS):
        unit = 1 / (2 * Decimal(variance))
        weight = (-first * first * unit).exp() * (1 << 320)
        ratio = (-width * (2 * first + width) * unit).exp()
        change = (-2 * width * width * unit).exp()
        weights = []
        for _ in range(cells):
            weights.append(int(weight))
            weight *= ratio
            ratio *= change
    return weights
