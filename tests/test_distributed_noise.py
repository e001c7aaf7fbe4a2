"""Noise that each silo adds a share of: sampler, rounding, what the sum is worth, an attack on it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent, ZCDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from attacks.bounds import Confusion, confusion, epsilon_lower_bound
from securefl.crypto.masks import CHUNK
from securefl.distributed_noise import (
    WRAP_PROBABILITY,
    ModelMechanism,
    Sampler,
    _words_at,
    calibrate_models,
    claim,
    decode_mean,
    encode_noised,
    gaussian_sampler,
    norm_bound,
    round_within,
)
from securefl.errors import ConfigError, PayloadError, UsageError, WrongShape
from securefl.privacy import Noise, gaussian_epsilon, noise_source, zcdp_epsilon, zcdp_rho
from securefl.privacy_terms import ModelPrivacy
from securefl.release import CLAIM, DistributedNoise

FINE_ORDERS = 1 + np.geomspace(1e-3, 1e3, 3000)


def terms(**changes: Any) -> ModelPrivacy:
    return ModelPrivacy(**{"clip": 1.0, "noise_multiplier": 1.0, **changes})


def mechanism_of(
    silos: int = 4, threshold: int = 3, dimension: int = 1000, bits: int = 32, rounds: int = 1, **changes: Any
) -> ModelMechanism:
    return calibrate_models(terms(**changes), rounds, silos, threshold, dimension, bits)


def drawn(sampler: Sampler, count: int, key: bytes = b"k" * 32) -> NDArray[np.int64]:
    return sampler.draw(count, *_words_at(key, 0))


# --- zCDP


def delta_of_zcdp(epsilon: float, rho: float) -> float:
    """Canonne, Kamath and Steinke 2020, Proposition 12, on a grid of alpha."""
    alpha = 1 + np.geomspace(1e-6, 1e8, 400_001)
    log = (alpha - 1) * (alpha * rho - epsilon) - np.log(alpha - 1) + alpha * np.log1p(-1 / alpha)
    return float(np.exp(log.min()))


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.1, 1.0, 50.0, 1e4])
def test_the_epsilon_of_zcdp(rho: float, delta: float) -> None:
    epsilon = zcdp_epsilon(rho, delta)
    if epsilon > 0:
        assert math.log(delta_of_zcdp(epsilon, rho)) == pytest.approx(math.log(delta), rel=1e-5, abs=1e-5)
        assert zcdp_rho(epsilon, delta) == pytest.approx(rho, rel=1e-6)
    assert epsilon >= gaussian_epsilon(math.sqrt(2 * rho), delta), "a Gaussian mechanism is rho-zCDP"


def test_zero_rho_has_no_epsilon() -> None:
    assert zcdp_epsilon(0.0, 1e-5) == 0.0
    assert zcdp_epsilon(1e-9, 0.5) == 0.0, "delta alone allows for it"


@pytest.mark.parametrize("rho", [1e-3, 0.05, 0.5, 5.0, 100.0])
def test_the_epsilon_of_zcdp_against_dp_accounting(rho: float) -> None:
    peer = RdpAccountant(orders=FINE_ORDERS)
    peer.compose(ZCDpEvent(rho))
    assert zcdp_epsilon(rho, 1e-5) == pytest.approx(peer.get_epsilon(1e-5), rel=1e-5)


# --- the sampler


def exact(values: NDArray[np.int64], variance: float) -> NDArray[np.float64]:
    """P(k), the sum over all integers by brute force."""
    reach = math.ceil(40 * math.sqrt(variance)) + 1
    everything = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * variance)).sum()
    return np.asarray(np.exp(-(values.astype(np.float64) ** 2) / (2 * variance)) / everything)


@pytest.mark.parametrize("look", [64, 5, 1], ids=["whole", "ties", "nearly-all-ties"])
@pytest.mark.parametrize("variance", [0.05, 0.3, 9.0, 300.5])
@pytest.mark.parametrize("widest", [2048.0, 1.5], ids=["single-steps", "coarse-cells"])
def test_small_noise_has_the_exact_distribution(variance: float, look: int, widest: float) -> None:
    """With a first look of few bits most draws are decided by the exact comparison; coarse cells make many
    be drawn again."""
    count = 20_000
    sampler = gaussian_sampler(variance, look, widest)
    assert (sampler.width > 1) == (math.sqrt(variance) > widest)
    values = drawn(sampler, count)
    inner = np.arange(-math.ceil(2.5 * math.sqrt(variance)), math.ceil(2.5 * math.sqrt(variance)) + 1)
    inner = inner[count * exact(inner, variance) >= 10]
    expected = count * exact(inner, variance)
    seen = np.array([(values == k).sum() for k in inner], np.float64)
    bins = [*seen, count - seen.sum()], [*expected, count - expected.sum()]
    statistic = sum((s - e) ** 2 / e for s, e in zip(*bins, strict=True) if e > 1)
    assert stats.chi2.sf(statistic, len(inner)) > 1e-4


@pytest.mark.parametrize(
    ("variance", "look", "count"),
    [(3e6, 64, 200_000), (5e8, 64, 200_000), (1e16, 64, 200_000), (5e8, 6, 5000)],
)
def test_wide_noise_has_the_distribution(variance: float, look: int, count: int) -> None:
    """At these widths a discrete Gaussian is a rounded Gaussian to far less than such a sample can show."""
    sampler, sigma = gaussian_sampler(variance, look), math.sqrt(variance)
    values = drawn(sampler, count)
    dither = np.random.default_rng(1).random(count) - 0.5
    assert stats.kstest((values + dither) / sigma, "norm").pvalue > 1e-4
    assert stats.chi2.sf((count - 1) * values.var(ddof=1) / variance, count - 1) == pytest.approx(
        0.5, abs=0.4999
    )
    place = np.bincount(values & (sampler.width - 1) & 15, minlength=min(16, sampler.width))
    assert sampler.width == 1 or stats.chisquare(place).pvalue > 1e-4


def test_a_cell_and_a_place_in_it_make_the_density() -> None:
    """P(cell) x P(kept) is in proportion to exp(-k^2 / (2 variance)), by the table itself."""
    variance = 5e8
    sampler = gaussian_sampler(variance)
    assert sampler.width > 1
    edges = [0, *sampler.thresholds, 1 << 256]
    logs = []
    for k in (0, 1, 15, 16, 17, 22_361, 100_000, -1, -15, -16, -17, -32, -22_361, -100_000):
        cell = k // sampler.width
        nearest = min(abs(cell * sampler.width + y) for y in range(sampler.width))
        index = cell + sampler.cells
        share = (edges[index + 1] - edges[index]) / 2**256
        logs.append(math.log(share) - (k**2 - nearest**2) / (2 * variance) + k**2 / (2 * variance))
    assert max(logs) - min(logs) < 1e-9


def test_the_tails_of_the_table_are_beyond_reach() -> None:
    sampler = gaussian_sampler(9.0)
    assert sampler.thresholds[0] < 2
    assert 2**256 - sampler.thresholds[-1] < 2**10
    middle = sampler.thresholds[sampler.cells] - sampler.thresholds[sampler.cells - 1]
    assert middle / 2**256 == pytest.approx(float(exact(np.zeros(1, np.int64), 9.0)[0]), rel=1e-12)
    assert list(sampler.thresholds) == sorted(sampler.thresholds)


# --- rounding


def test_the_norm_bound_by_hand() -> None:
    """d = 2, clip 100 steps: (100 + sqrt 2)^2 = 10284.8; the likely bound has sqrt(40 ln 2) (100 + 0.707)."""
    assert norm_bound(100.0, 2) == math.floor(10_002 + 200 * math.sqrt(2))
    likely = 1e10 + 250_000 + math.sqrt(40 * math.log(2)) * (1e5 + 500)
    assert norm_bound(1e5, 1_000_000) == math.floor(likely)
    # Exchanging (c, 0) for (-c, 0) moves the sum by 2 c, and no exchange by more than 2 D.
    mechanism = mechanism_of(dimension=2)
    assert mechanism.sensitivity == pytest.approx(2.0, rel=1e-6)
    assert mechanism.sensitivity > 2.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 8]),
    st.floats(1.0, 300.0),
)
def test_a_rounded_update_never_exceeds_the_bound(
    values: list[float], seed: int, attempts: int, steps: float
) -> None:
    """On a coarse grid, where a rounding often does; a bound as tight as can be makes most of them fail."""
    row = np.array(values, np.float32)
    mechanism = replace(
        mechanism_of(dimension=row.size), scale=steps, norm_squared=math.ceil(steps**2), clip=1.0
    )
    rng = np.random.default_rng(seed)
    rounded = round_within(row, mechanism, lambda: rng.bytes(32), 1, attempts)
    assert sum(int(q) ** 2 for q in rounded) <= mechanism.norm_squared
    norm = math.sqrt(sum(float(v) ** 2 for v in row))
    clipped = row.astype(np.float64) * steps * min(1.0, 1 / norm if norm else 1.0)
    assert np.abs(rounded - clipped).max() <= 1 + 1e-9


def test_a_rounding_over_the_bound_is_drawn_again() -> None:
    """(0.5, 0.5) rounds to (1, 1) in a quarter of the cases: a bound of 1 makes these be drawn again."""
    mechanism = replace(mechanism_of(dimension=2), scale=math.sqrt(0.5), norm_squared=1)
    rng = np.random.default_rng(3)
    row = np.array([0.7, 0.7], np.float32) / np.float32(0.7) * np.float32(math.sqrt(0.5))
    keys: list[int] = []

    def new_key() -> bytes:
        keys.append(1)
        return rng.bytes(32)

    seen = [tuple(round_within(row, mechanism, new_key, 1).tolist()) for _ in range(600)]
    shares = {pair: seen.count(pair) for pair in itertools.product((0, 1), repeat=2)}
    assert shares[1, 1] == 0
    assert stats.chisquare([shares[0, 0], shares[0, 1], shares[1, 0]]).pvalue > 1e-4
    assert 700 < len(keys) < 900, "600 x 4 / 3"


def test_rounding_is_unbiased() -> None:
    row = np.full(2 * CHUNK, 0.3, np.float32)
    clip = 0.3 * 400
    mechanism = replace(mechanism_of(dimension=row.size), scale=1.0, clip=clip, norm_squared=10**9)
    rounded = round_within(row, mechanism, lambda: b"r" * 32)
    assert set(rounded.tolist()) == {0, 1}
    assert stats.binomtest(int(rounded.sum()), row.size, 0.3).pvalue > 1e-4
    assert not np.array_equal(rounded[:CHUNK], rounded[CHUNK:])


# --- calibration


def test_a_noise_multiplier_is_kept_and_has_its_rho() -> None:
    for silos, threshold, colluders in ((2, 2, 0), (4, 3, 1), (10, 7, 2), (256, 171, 60)):
        mechanism = mechanism_of(silos, threshold, colluders=colluders, noise_multiplier=0.8)
        assert mechanism.noise_multiplier == pytest.approx(0.8, rel=1e-12)
        assert mechanism.rho == pytest.approx(1 / (2 * 0.8**2), rel=1e-9)
        # h shares are the whole, in steps: h sigma^2 = (2 D z)^2
        share = 4 * 0.64 * mechanism.norm_squared / (threshold - colluders)
        assert mechanism.variance == pytest.approx(share, rel=1e-12)


def test_tau_of_the_paper_is_counted_where_it_is_something() -> None:
    """Two silos with sigma^2 = 1/2 step^2: tau = 10 exp(-pi^2 / 2), and both forms of Theorem 1."""
    coarse = replace(mechanism_of(silos=2, threshold=2), variance=0.5, norm_squared=1)
    tau = 10 * math.exp(-(math.pi**2) / 2)
    for dimension in (1, 100):
        first = math.sqrt(4 + tau * dimension / 2)
        second = 2 + tau * math.sqrt(dimension)
        assert replace(coarse, dimension=dimension).rho == pytest.approx(
            min(first, second) ** 2 / 2, rel=1e-12
        )


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.5, 1), (3.0, 10), (20.0, 100)])
def test_a_budget_is_that_of_all_rounds_by_dp_accounting(epsilon: float, rounds: int) -> None:
    mechanism = mechanism_of(epsilon=epsilon, noise_multiplier=None, rounds=rounds)
    peer = RdpAccountant(orders=FINE_ORDERS)
    peer.compose(SelfComposedDpEvent(GaussianDpEvent(mechanism.noise_multiplier), rounds))
    assert peer.get_epsilon(1e-5) == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize(("silos", "bits", "dimension"), [(3, 16, 100), (4, 32, 10**6), (64, 24, 1000)])
def test_a_wrap_around_is_as_unlikely_as_is_said(silos: int, bits: int, dimension: int) -> None:
    mechanism = mechanism_of(silos, max(2, silos * 2 // 3), dimension, bits)
    assert mechanism.wrap_probability <= WRAP_PROBABILITY
    room = 2 ** (bits - 1) - 1 - silos * (mechanism.clip * mechanism.scale + 2)
    spread = math.sqrt(silos * mechanism.variance)
    by_scipy = 2 * dimension * stats.norm.sf(room / spread)
    assert by_scipy <= mechanism.wrap_probability < 50 * by_scipy, "Gaussian tails against their simple bound"
    finer = replace(
        mechanism,
        scale=mechanism.scale * 1.02,
        variance=mechanism.variance * 1.02**2,
    )
    assert finer.wrap_probability > WRAP_PROBABILITY, "the scale is as large as it may be"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colluders": 3}, "colluders"),
        ({"bits": 16, "silos": 64, "threshold": 43, "dimension": 10**7}, "bits"),
        ({"bits": 16, "noise_multiplier": 1e4}, "bits"),
        ({"threshold": 5}, "threshold"),
        ({"threshold": 1}, "threshold"),
    ],
)
def test_what_cannot_be_noised_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mechanism_of(**changes)


# --- encoding and decoding


def add_up(rows: NDArray[np.float32], mechanism: ModelMechanism, noise: Noise) -> NDArray[np.uint32]:
    """The sum of the silos' encodings mod 2^bits; rows: one update a silo."""
    total = np.zeros(mechanism.dimension, np.uint32)
    for row in rows:
        total += encode_noised(row, mechanism, noise)
        total &= np.uint32(2**mechanism.bits - 1)
    return total


@pytest.mark.parametrize("bits", [16, 19, 32])
@pytest.mark.parametrize("survivors", [3, 4])
def test_the_mean_has_the_noise_that_is_claimed_and_no_other_error(bits: int, survivors: int) -> None:
    dimension = 2000
    mechanism = mechanism_of(dimension=dimension, bits=bits, colluders=1, clip=2.5)
    rows = np.random.default_rng(5).normal(size=(survivors, dimension)).astype(np.float32)
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    assert (norms > 2.5).all(), "all are clipped"
    truth = (rows * (2.5 / norms)).mean(axis=0)
    mean = decode_mean(add_up(rows, mechanism, noise_source(7)), survivors, mechanism)
    # Each of the survivors adds the share of one of the threshold - colluders = 2; a rounding at most 1/4.
    variance = survivors * (mechanism.deviation**2 / 2 + 0.25 / mechanism.scale**2) / survivors**2
    errors = (mean - truth) / math.sqrt(variance)
    assert stats.kstest(errors, "norm").pvalue > 1e-4
    assert abs(errors.mean()) * math.sqrt(dimension) < 4
    assert abs(errors.var() - 1) < 5 * math.sqrt(2 / dimension)


def test_a_small_update_is_not_scaled_up() -> None:
    mechanism = mechanism_of(dimension=4, noise_multiplier=0.01)
    row = np.array([0.3, -0.2, 0.1, 0.0], np.float32)
    totals = [add_up(np.array([row] * 4), mechanism, noise_source(seed)) for seed in range(50)]
    means = np.array([decode_mean(total, 4, mechanism) for total in totals])
    assert np.abs(means.mean(axis=0) - row).max() < 5 * mechanism.deviation / math.sqrt(3 * 4 * 50)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_counts_as_zero(bad: float) -> None:
    """As noise alone would: with the same seed it is the same bits."""
    mechanism = mechanism_of(dimension=3)
    broken = encode_noised(np.array([1.0, bad, 0.0], np.float32), mechanism, noise_source(1))
    # A zero update takes one key more from the generator, for its rounding.
    generator = np.random.Generator(np.random.Philox(1))
    noise = gaussian_sampler(mechanism.variance).draw(3, *_words_at(generator.bytes(32), 0))
    assert broken.tolist() == noise.astype(np.uint32).tolist()


def test_threads_do_not_matter_and_chunks_differ() -> None:
    dimension = 2 * CHUNK + 100
    mechanism = mechanism_of(dimension=dimension)
    row = np.zeros(dimension, np.float32)
    one, three = (encode_noised(row, mechanism, noise_source(2), threads) for threads in (1, 3))
    assert np.array_equal(one, three)
    assert not np.array_equal(one[:CHUNK], one[CHUNK : 2 * CHUNK])
    assert not np.array_equal(one, encode_noised(row, mechanism, noise_source(3)))


def test_no_two_chunks_share_random_words() -> None:
    streams = [words for begin in (0, CHUNK, 7 * CHUNK) for words in _words_at(b"k" * 32, begin)]
    taken = np.concatenate([words.take(2 * CHUNK) for words in streams])
    assert len(np.unique(taken)) == taken.size


def test_noise_from_the_operating_system_is_fresh() -> None:
    mechanism, noise, row = mechanism_of(), noise_source(None), np.zeros(1000, np.float32)
    assert not np.array_equal(encode_noised(row, mechanism, noise), encode_noised(row, mechanism, noise))


def test_arrays_and_survivors_that_do_not_fit_are_refused() -> None:
    mechanism, noise = mechanism_of(dimension=3, bits=24), noise_source(1)
    rows: list[NDArray[Any]] = [np.zeros(4, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)]
    for wrong in rows:
        with pytest.raises(WrongShape):
            encode_noised(wrong, mechanism, noise)
    totals: list[NDArray[Any]] = [np.zeros(4, np.uint32), np.zeros(3, np.int64)]
    for total in totals:
        with pytest.raises(WrongShape):
            decode_mean(total, 3, mechanism)
    for survivors in (2, 5):
        with pytest.raises(UsageError, match="survivors"):
            decode_mean(np.zeros(3, np.uint32), survivors, mechanism)
    with pytest.raises(PayloadError, match="24 bits"):
        decode_mean(np.array([0, 1 << 24, 0], np.uint32), 3, mechanism)


# --- the claim


def test_the_claim_says_all_of_it_and_travels() -> None:
    mechanism = mechanism_of(10, 7, colluders=2, clip=0.5, delta=1e-6)
    made = claim(mechanism, noise_source(None))
    assert CLAIM.validate_json(made.model_dump_json()) == made
    assert (
        made.epsilon == zcdp_epsilon(0.5, 1e-6) == pytest.approx(zcdp_epsilon(mechanism.rho, 1e-6), rel=1e-6)
    )
    document = made.model_dump(
        exclude={"epsilon", "rho", "sensitivity", "noise_multiplier", "wrap_probability"}
    )
    assert document == {
        "mechanism": "distributed-discrete-gaussian",
        "delta": 1e-6,
        "clip": 0.5,
        "silos": 10,
        "threshold": 7,
        "colluders": 2,
        "bits": 32,
        "unit": "silo",
        "adjacency": "replace-one",
        "generator": "aes-256-ctr keyed by philox4x64, 128-bit key from the OS",
        "simulated": False,
    }
    assert (made.noise_multiplier, made.sensitivity) == pytest.approx((1.0, 1.0), rel=1e-6)
    assert claim(mechanism, noise_source(1)).simulated
    assert isinstance(made, DistributedNoise)


def attack(mechanism: ModelMechanism, honest: int, runs: int) -> Confusion:
    """A server that knows all but one silo's update, and the colluders' noise, tells +clip from -clip.

    Every coordinate is a run of the one-dimensional mechanism. The threshold is chosen beforehand: where a
    Gaussian of the noise that is really there separates best at a false-positive rate of 1 in 1,000.
    """
    many = replace(
        mechanism,
        dimension=runs,
        clip=mechanism.clip * math.sqrt(runs),
        norm_squared=mechanism.norm_squared * runs,
    )
    rest = np.zeros((honest - 1, runs), np.float32)
    sums = []
    for seed, sign in enumerate((1, -1)):
        victim = np.full((1, runs), sign * mechanism.clip, np.float32)
        total = add_up(np.concatenate([victim, rest]), many, noise_source(seed))
        sums.append(decode_mean(total, mechanism.threshold, many) * mechanism.threshold)
    spread = math.sqrt(honest * mechanism.variance) / mechanism.scale
    return confusion(sums[0], sums[1], -mechanism.clip + 3.09 * spread)


def test_an_attack_stays_below_the_claim_and_would_find_noise_that_is_too_little() -> None:
    silos, threshold, colluders, runs = 9, 7, 5, 100_000
    mechanism = mechanism_of(silos, threshold, dimension=1, colluders=colluders)
    made = claim(mechanism, noise_source(1))
    honest = threshold - colluders
    shown = epsilon_lower_bound(attack(mechanism, honest, runs), made.delta, alpha=1e-3)
    assert 1.5 < shown <= made.epsilon, "the attack works, and the claim holds"
    # Shares of 1/silos, as if all were honest and none dropped out.
    careless = replace(mechanism, variance=mechanism.variance * honest / silos)
    assert epsilon_lower_bound(attack(careless, honest, runs), made.delta, alpha=1e-3) > made.epsilon
