"""Masked sums end to end on the real machines: exact sums, dropouts, refusals, bad input."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest

from securefl.crypto import masking_keys
from securefl.crypto.fixed_point import FixedPoint
from securefl.crypto.masking_client import MaskingClient, Step
from securefl.crypto.masking_messages import (
    ADVERT_CONTEXT,
    SHARES_CONTEXT,
    AdvertList,
    Delivery,
    MaskedInput,
    Message,
    ShareMessage,
    SurvivorList,
    Unmasking,
    UnmaskRequest,
    VectorSpec,
)
from securefl.crypto.masking_server import MaskingServer
from securefl.crypto.masks import CHUNK, pack
from securefl.crypto.weighted import encode_weighted, weighted_mean
from securefl.errors import (
    BadSignature,
    MaskingAborted,
    NonFiniteUpdate,
    PayloadError,
    PolicyRefusal,
    Replayed,
    SecureflError,
    TooFewSilos,
    UnknownSender,
    WrongRound,
    WrongShape,
)
from tests.masked_rounds import HYBRID, SPECS, STEPS, SUITE, Round, terms


def assert_sum(round_: Round, result: Any, silos: list[int]) -> None:
    assert result.survivors == tuple(round_.names[silo] for silo in silos)
    for name, vector in round_.right(silos).items():
        np.testing.assert_array_equal(result.sums[name], vector)


# --- the sum, exact, whoever drops out


@pytest.mark.parametrize("step", STEPS)
def test_one_dropout_at_each_step_leaves_the_exact_sum_of_the_survivors(step: str) -> None:
    round_ = Round(4, suite=HYBRID)
    result = round_.run({2: step})
    assert_sum(round_, result, [0, 1, 2, 3] if step in ("sign", "unmask") else [0, 1, 3])
    assert result.faults == ()


def test_nobody_drops_out() -> None:
    round_ = Round(5, suite=HYBRID)
    assert_sum(round_, round_.run(), [0, 1, 2, 3, 4])


@pytest.mark.parametrize("steps", list(combinations_with_replacement(STEPS, 2)))
def test_as_many_dropouts_as_the_threshold_allows_at_any_steps(steps: tuple[str, str]) -> None:
    round_ = Round(7)  # threshold 5
    result = round_.run({1: steps[0], 5: steps[1]})
    lost = {silo for silo, step in zip((1, 5), steps, strict=True) if step not in ("sign", "unmask")}
    assert_sum(round_, result, sorted(set(range(7)) - lost))


@pytest.mark.parametrize("steps", list(combinations_with_replacement(STEPS, 3)))
def test_one_dropout_more_is_a_clear_abort_and_reveals_nothing(steps: tuple[str, str, str]) -> None:
    given: list[Any] = []

    def keep(message: Any) -> Any:
        given.append(message)
        return message

    round_ = Round(7, relay=keep)
    with pytest.raises(TooFewSilos, match="nothing was revealed"):
        round_.run(dict(zip((0, 3, 6), steps, strict=True)))
    # Of no secret did the server get as many shares as rebuild it, and it keeps no sums.
    counts: dict[tuple[str, str], int] = {}
    for message in given:
        if isinstance(message, Unmasking):
            for kind, parts in (("blind", message.blinds), ("root", message.roots)):
                for one in parts:
                    counts[kind, one.dealer] = counts.get((kind, one.dealer), 0) + 1
    assert max(counts.values(), default=0) < round_.terms.threshold
    assert round_.server._totals == {}
    with pytest.raises(WrongRound):
        round_.server.result()


def test_the_threshold_of_three_silos_allows_no_dropout() -> None:
    assert_sum(round_ := Round(3), round_.run(), [0, 1, 2])
    with pytest.raises(TooFewSilos):
        Round(3).run({0: "unmask"})


def test_a_policy_may_ask_for_everybody() -> None:
    with pytest.raises(TooFewSilos):
        Round(4, threshold=4).run({0: "input"})
    assert_sum(round_ := Round(4, threshold=4), round_.run(), [0, 1, 2, 3])


@pytest.mark.parametrize("bits", [16, 20, 24, 32])
def test_sums_of_every_width_wrap_as_integers_do(bits: int) -> None:
    round_ = Round(4, vectors=(VectorSpec(name="w", length=65, bits=bits),))
    sizes = []

    def weigh(message: Any) -> Any:
        if isinstance(message, MaskedInput):
            sizes.append(len(message.vectors["w"]))
        return message

    round_.relay = weigh
    assert_sum(round_, round_.run({3: "input"}), [0, 1, 2])
    assert sizes == [65 * {16: 2, 20: 3, 24: 3, 32: 4}[bits]] * 3


def test_a_sparse_graph_gives_the_exact_sum_too() -> None:
    round_ = Round(24, degree=12)  # threshold 17 of 24, and 9 of each neighbourhood of 13
    drops = {0: "input", 9: "input", 13: "share", 20: "unmask"}
    assert_sum(round_, round_.run(drops), sorted(set(range(24)) - {0, 9, 13}))


def test_a_neighbourhood_below_its_own_threshold_ends_the_round() -> None:
    round_ = Round(24, degree=8)
    adverts = round_.advertise(range(24))
    near = round_.server._near[round_.names[0]]
    lost = sorted(round_.names.index(name) for name in near)[:3]  # leaves 6 of 9
    deliveries = round_.share(sorted(set(range(24)) - set(lost)), adverts)
    with pytest.raises(TooFewSilos, match="6 of this neighbourhood shared, below the 7 needed"):
        round_.clients[0].masked(deliveries[round_.names[0]], round_.fresh(0))


def test_messages_survive_their_way_through_arrays() -> None:
    seen = set()

    def travel(message: Message) -> Message:
        seen.add(type(message).__name__)
        return type(message).from_tensors(message.tensors())

    round_ = Round(4, relay=travel)
    assert_sum(round_, round_.run({1: "input"}), [0, 2, 3])
    sent = {"Advert", "ShareMessage", "MaskedInput", "SurvivorSignature", "Unmasking"}
    assert seen == sent | {"AdvertList", "Delivery", "SurvivorList", "UnmaskRequest"}


# --- weighted means


def test_a_weighted_mean_with_hidden_weights_equals_the_plain_one() -> None:
    values_as, weight_as = FixedPoint(clip=4.0, bits=32, silos=5), FixedPoint(clip=1.0, bits=32, silos=5)
    specs = (VectorSpec(name="weights", length=500, bits=32), VectorSpec(name="counts", length=1, bits=32))
    sent: list[MaskedInput] = []
    round_ = Round(5, vectors=specs)

    def keep(message: Any) -> Any:
        if isinstance(message, MaskedInput):
            sent.append(message)
        return message

    round_.relay = keep
    rng = np.random.default_rng(3)
    updates = rng.normal(size=(5, 500)).clip(-4, 4).astype(np.float32)
    weights = np.array([0.9, 0.02, 0.5, 0.3, 1.0])
    plain = []
    for silo in range(5):
        coded, count = encode_weighted(updates[silo], float(weights[silo]), values_as, weight_as)
        round_.vectors[silo] = {"weights": coded, "counts": count}
        plain.append(pack(count, 32))
    result = round_.run({2: "input"})
    mean = weighted_mean(result.sums["weights"], result.sums["counts"], values_as, weight_as)
    left = [0, 1, 3, 4]
    right = np.average(updates[left].astype(np.float64), axis=0, weights=weights[left])
    # Each of the two sums is off by less than one resolution a silo (`fixed_point`).
    total = float(weights[left].sum())
    bound = (
        4 * (values_as.resolution + np.abs(right) * weight_as.resolution) / (total - 4 * weight_as.resolution)
    )
    assert (np.abs(mean - right) <= bound).all()
    assert bound.max() < 1e-6
    # What travelled for the weights is none of their encodings.
    travelled = [message.vectors["counts"] for message in sent]
    assert not set(travelled) & set(plain)


def test_a_mean_without_any_weight_is_refused() -> None:
    coding = FixedPoint(clip=1.0, bits=32, silos=3)
    with pytest.raises(PayloadError, match="add up to nothing"):
        weighted_mean(np.zeros(4, np.uint32), np.zeros(1, np.uint32), coding, coding)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_refused_before_it_is_masked(bad: float) -> None:
    coding = FixedPoint(clip=1.0, bits=32, silos=3)
    values = np.zeros(10, np.float32)
    values[7] = bad
    with pytest.raises(NonFiniteUpdate):
        encode_weighted(values, 0.5, coding, coding)


# --- masks


def test_no_two_vectors_of_a_round_share_a_mask() -> None:
    """With one stream for both, the difference of two masked vectors would be that of what they hide."""
    specs = (VectorSpec(name="a", length=64, bits=32), VectorSpec(name="b", length=64, bits=32))
    round_ = Round(3, vectors=specs)
    deliveries = round_.upto_input()
    masked = round_.clients[0].masked(deliveries[round_.names[0]], round_.fresh(0)).vectors
    first, second = (np.frombuffer(masked[name], "<u4") for name in ("a", "b"))
    hidden = round_.vectors[0]["a"] - round_.vectors[0]["b"]
    assert (first - second != hidden).all()  # by chance 64 / 2^32


def test_no_two_rounds_share_a_mask() -> None:
    masked = []
    for number in (1, 2):
        round_ = Round(3, round=number)
        deliveries = round_.upto_input()
        one = round_.clients[0].masked(deliveries[round_.names[0]], round_.fresh(0))
        masked.append(np.frombuffer(one.vectors["weights"], "<u4"))
    assert (masked[0] != masked[1]).all()  # the same vector both times


def test_vectors_are_masked_in_place() -> None:
    round_ = Round(3)
    deliveries = round_.upto_input()
    vectors = round_.fresh(0)
    sent = round_.clients[0].masked(deliveries[round_.names[0]], vectors)
    assert sent.vectors["weights"] == vectors["weights"].astype("<u4").tobytes()
    assert (vectors["weights"] != round_.vectors[0]["weights"]).any()


# --- what a client refuses


def test_a_threshold_or_a_cohort_below_the_policy_is_refused() -> None:
    round_ = Round(6)  # two thirds of six silos and one more: five
    me, roster = round_.ids[0], round_.roster
    for threshold, least in ((4, 0), (5, 6)):
        with pytest.raises(PolicyRefusal, match="threshold") as caught:
            MaskingClient(me, roster, terms(6, threshold=threshold), least_threshold=least)
        assert caught.value.clause == "threshold"
    with pytest.raises(PolicyRefusal, match="cohort") as caught:
        MaskingClient(me, roster, terms(6), least_cohort=7)
    assert caught.value.clause == "cohort"
    # A policy cannot go below what the protocol needs.
    pair = {one.name: one.card for one in round_.ids[:2]}
    with pytest.raises(PolicyRefusal, match="below the policy's 3"):
        MaskingClient(me, pair, terms(2), least_threshold=1, least_cohort=1)


def test_a_changed_roster_is_refused() -> None:
    round_, other = Round(4), Round(5)
    with pytest.raises(MaskingAborted, match="lacks this silo"):
        MaskingClient(round_.ids[0], {one.name: one.card for one in round_.ids[1:]}, terms(3))
    adverts = [one.advertise() for one in round_.clients]
    stranger = next(one for one in other.clients if one._me not in round_.names).advertise()
    listed = tuple(sorted((*adverts[:3], stranger), key=lambda one: one.silo))
    with pytest.raises(MaskingAborted, match=r"not in its roster advertised: \w{16} \(not in the roster\)"):
        round_.clients[0].share(AdvertList(adverts=listed))


def changed_adverts(round_: Round, silo: int, **fields: bytes) -> AdvertList:
    """All adverts, with one changed and signed again by its own silo."""
    adverts = [one.advertise() for one in round_.clients]
    changed = adverts[silo].model_copy(update=fields)
    signature = SUITE.sign(round_.ids[silo], ADVERT_CONTEXT, changed.statement())
    adverts[silo] = changed.model_copy(update={"signature": signature})
    return AdvertList(adverts=tuple(adverts))


def test_its_own_key_echoed_back_is_refused() -> None:
    round_ = Round(4)
    adverts = [one.advertise() for one in round_.clients]
    echo = adverts[2].model_copy(update={"cipher_key": adverts[0].cipher_key})
    echo = echo.model_copy(update={"signature": SUITE.sign(round_.ids[2], ADVERT_CONTEXT, echo.statement())})
    with pytest.raises(MaskingAborted, match="one ephemeral key twice"):
        round_.clients[0].share(AdvertList(adverts=(*adverts[:2], echo, adverts[3])))
    # An honest server does not let it get so far.
    for name, advert in zip(round_.names, adverts[:2], strict=False):
        round_.server.receive_advert(name, advert)
    with pytest.raises(PayloadError, match="occurs twice"):
        round_.server.receive_advert(round_.names[2], echo)


def test_its_own_advert_lost_or_altered_is_refused() -> None:
    round_ = Round(4)
    adverts = [one.advertise() for one in round_.clients]
    with pytest.raises(MaskingAborted, match="lost or altered"):
        round_.clients[0].share(AdvertList(adverts=tuple(adverts[1:])))


def test_too_few_adverts_are_refused() -> None:
    round_ = Round(4)
    adverts = [one.advertise() for one in round_.clients]
    with pytest.raises(TooFewSilos, match="2 silos advertised, below the threshold of 3"):
        round_.clients[0].share(AdvertList(adverts=tuple(adverts[:2])))


def test_adverts_of_another_round_or_run_are_refused() -> None:
    for other in (Round(4, round=2), Round(4, run="f" * 32)):
        round_ = Round(4)
        adverts = [one.advertise() for one in round_.clients]
        adverts[2] = other.clients[2].advertise()
        with pytest.raises(WrongRound, match=f"{round_.ids[2].name} is of another run or round"):
            round_.clients[0].share(AdvertList(adverts=tuple(adverts)))
        with pytest.raises(WrongRound):
            round_.server.receive_advert(round_.names[2], adverts[2])


@pytest.mark.parametrize("field", ["model", "plan"])
def test_two_models_or_plans_are_caught_before_anything_is_masked(field: str) -> None:
    """A server that gives one silo a model of its choice (Pasquini, Francati and Ateniese 2022)."""
    round_ = Round(4)
    victim = MaskingClient(round_.ids[1], round_.roster, terms(4, **{field: b"x" * 32}), suite=SUITE)
    round_.clients[1] = victim
    adverts = AdvertList(adverts=tuple(one.advertise() for one in round_.clients))
    for silo, client in enumerate(round_.clients):
        with pytest.raises(MaskingAborted, match=f"another {field}; nothing was sent"):
            client.share(adverts)
        assert client.step is Step.OVER
        with pytest.raises(WrongRound):
            client.masked(Delivery(shared=(), dealings=()), round_.fresh(silo))


def test_shares_for_another_silo_are_refused() -> None:
    round_ = Round(4)
    adverts = AdvertList(adverts=tuple(one.advertise() for one in round_.clients))
    dealt = [one.share(adverts) for one in round_.clients]
    dealings = [dealt[1].dealing(round_.names[2]), *(one.dealing(round_.names[0]) for one in dealt[2:])]
    with pytest.raises(MaskingAborted, match="for another silo"):
        round_.clients[0].masked(
            Delivery(shared=tuple(round_.names), dealings=tuple(dealings)), round_.fresh(0)
        )


def test_shares_altered_on_the_way_are_not_the_dealers_fault() -> None:
    round_ = Round(4)
    delivery = round_.upto_input()[round_.names[0]]
    deal = delivery.dealings[0].deal.model_copy(
        update={"sealed": bytes(len(delivery.dealings[0].deal.sealed))}
    )
    altered = (delivery.dealings[0].model_copy(update={"deal": deal}), *delivery.dealings[1:])
    with pytest.raises(MaskingAborted, match="are not those that it signed"):
        round_.clients[0].masked(delivery.model_copy(update={"dealings": altered}), round_.fresh(0))


def test_a_forged_unmasking_cannot_name_a_victim_both_alive_and_dead() -> None:
    """Both kinds of share of one silo would give the server its blind and its pair masks: its vector."""
    for survivors, dropped in (([0, 1, 2, 3], [2]), ([0, 1, 3], [2]), ([0, 1, 2], []), ([0, 1, 2, 3], [])):
        round_ = Round(4)
        request = round_.upto_unmask()
        forged = request.model_copy(
            update={
                "survivors": tuple(round_.names[silo] for silo in survivors),
                "dropped": tuple(round_.names[silo] for silo in dropped),
            }
        )
        if (survivors, dropped) == ([0, 1, 2, 3], []):
            assert {one.dealer for one in round_.clients[0].unmask(forged).blinds} == set(round_.names)
            continue
        with pytest.raises(MaskingAborted, match="overlap, or are not what was signed"):
            round_.clients[0].unmask(forged)
    # Nor does the server take an answer with both kinds, whoever made it.
    round_ = Round(4)
    given = round_.clients[0].unmask(round_.upto_unmask())
    with pytest.raises(PayloadError, match="unmasking is malformed"):
        Unmasking.from_document({**given.document(), "roots": given.document()["blinds"][:1]})


def test_a_second_unmasking_is_refused() -> None:
    round_ = Round(4)
    request = round_.upto_unmask({3})
    given = round_.clients[0].unmask(request)
    assert [one.dealer for one in given.blinds] == round_.names[:3]
    assert [one.dealer for one in given.roots] == round_.names[3:]
    with pytest.raises(WrongRound, match="once and in order"):
        round_.clients[0].unmask(request)


def test_a_second_list_of_survivors_is_refused() -> None:
    round_ = Round(4)
    deliveries = round_.upto_input()
    for silo in range(4):
        round_.clients[silo].masked(deliveries[round_.names[silo]], round_.fresh(silo))
    round_.clients[0].sign(SurvivorList(survivors=tuple(round_.names)))
    with pytest.raises(WrongRound):
        round_.clients[0].sign(SurvivorList(survivors=tuple(round_.names[:3])))


def test_lists_of_survivors_that_differ_between_silos_are_refused() -> None:
    round_ = Round(4)
    deliveries = round_.upto_input()
    for silo in range(4):
        round_.clients[silo].masked(deliveries[round_.names[silo]], round_.fresh(silo))
    everybody, three = tuple(round_.names), tuple(round_.names[:3])
    signed = [round_.clients[silo].sign(SurvivorList(survivors=three)) for silo in (0, 1)]
    signed.append(round_.clients[2].sign(SurvivorList(survivors=everybody)))
    request = UnmaskRequest(survivors=three, dropped=everybody[3:], signatures=tuple(signed))
    with pytest.raises(
        MaskingAborted, match=rf"{round_.ids[2].name} did not sign the same round \(survivors differ"
    ):
        round_.clients[0].unmask(request)


def test_a_refusal_is_final() -> None:
    round_ = Round(4)
    adverts = AdvertList(adverts=tuple(one.advertise() for one in round_.clients))
    client = round_.clients[0]
    with pytest.raises(TooFewSilos):
        client.share(AdvertList(adverts=adverts.adverts[:1]))
    assert client.step is Step.OVER
    with pytest.raises(WrongRound):
        client.share(adverts)
    # Nothing is left that a later step could use.
    assert not client._root
    assert not client._blind


def test_masks_are_added_once() -> None:
    round_ = Round(4)
    delivery = round_.upto_input()[round_.names[0]]
    round_.clients[0].masked(delivery, round_.fresh(0))
    with pytest.raises(WrongRound):
        round_.clients[0].masked(delivery, round_.fresh(0))


@pytest.mark.parametrize("half", [0, 3000])
def test_both_halves_of_every_identity_signature_are_needed(half: int) -> None:
    """Byte 0 is in the Ed25519 half, byte 3000 in the ML-DSA-65 half."""

    def torn(message: Any) -> Any:
        signature = bytearray(message.signature)
        signature[half] ^= 1
        return message.model_copy(update={"signature": bytes(signature)})

    name = "Ed25519" if half == 0 else "ML-DSA-65"
    round_ = Round(3, suite=HYBRID)
    adverts = AdvertList(adverts=tuple(one.advertise() for one in round_.clients))
    with pytest.raises(BadSignature, match=name):
        round_.server.receive_advert(round_.names[1], torn(adverts.adverts[1]))
    listed = (adverts.adverts[0], torn(adverts.adverts[1]), adverts.adverts[2])
    with pytest.raises(MaskingAborted, match=f"the advert of {round_.ids[1].name} is not signed by it"):
        round_.clients[0].share(AdvertList(adverts=listed))

    round_ = Round(3, suite=HYBRID)
    adverts = round_.advertise(range(3))
    dealt = [one.share(adverts) for one in round_.clients]
    with pytest.raises(BadSignature, match=name):
        round_.server.receive_shares(round_.names[1], torn(dealt[1]))
    dealings = (torn(dealt[1]).dealing(round_.names[0]), dealt[2].dealing(round_.names[0]))
    with pytest.raises(MaskingAborted, match=f"the shares of {round_.ids[1].name} are not signed by it"):
        round_.clients[0].masked(Delivery(shared=tuple(round_.names), dealings=dealings), round_.fresh(0))

    round_ = Round(3, suite=HYBRID)
    everybody = SurvivorList(survivors=tuple(round_.names))
    deliveries = round_.upto_input()
    round_.input(range(3), deliveries)
    signed = [one.sign(everybody) for one in round_.clients]
    with pytest.raises(BadSignature, match=name):
        round_.server.receive_signature(round_.names[1], torn(signed[1]))
    request = UnmaskRequest(
        survivors=everybody.survivors, dropped=(), signatures=(signed[0], torn(signed[1]), signed[2])
    )
    with pytest.raises(MaskingAborted, match=r"\(signature differ\)"):
        round_.clients[0].unmask(request)


# --- bad shares: named, and the round goes on while enough good ones are left


def spoiled(round_: Round, dealer: int, message: ShareMessage, **fields: Any) -> ShareMessage:
    """A dealer's message with something changed for every holder, under its true signature."""
    changed = message.model_copy(update=fields)
    signature = SUITE.sign(round_.ids[dealer], SHARES_CONTEXT, changed.statement())
    return changed.model_copy(update={"signature": signature})


def deal_wrongly(round_: Round, dealer: int, holder: int, what: str) -> dict[str, Delivery]:
    """Everybody shares, and `dealer` commits to other shares than it seals to `holder`, or seals nonsense."""
    adverts = round_.advertise(range(len(round_.clients)))
    for silo, client in enumerate(round_.clients):
        message = client.share(adverts)
        if silo == dealer:
            deals = list(message.deals)
            bad = {what: b"\1" * 32} if what != "sealed" else {what: bytes(len(deals[holder].sealed))}
            deals[holder] = deals[holder].model_copy(update=bad)
            message = spoiled(round_, dealer, message, deals=tuple(deals))
        round_.server.receive_shares(round_.names[silo], message)
    return round_.server.close_shares()


def check_bad_share_is_a_fault(make: Callable[..., MaskingClient], what: str) -> None:
    """`what` of a deal is wrong: its holder says whose, gives no share of it, and the sum is right."""
    round_ = Round(4, make=make)
    deliveries = deal_wrongly(round_, dealer=1, holder=2, what=what)
    request = round_.sign(range(4), round_.input(range(4), deliveries))
    given = [one.unmask(request) for one in round_.clients]
    assert given[2].faults == (round_.names[1],)
    assert {one.dealer for one in (*given[2].blinds, *given[2].roots)} == set(round_.names) - {
        round_.names[1]
    }
    for name, answer in zip(round_.names, given, strict=True):
        round_.server.receive_unmasking(name, answer)
    result = round_.server.result()
    assert result.faults == (f"{round_.ids[2].name} says that {round_.ids[1].name} dealt it a bad share",)
    assert_sum(round_, result, [0, 1, 2, 3])


def check_bad_root_share(make: Callable[..., MaskingClient]) -> None:
    check_bad_share_is_a_fault(make, "root_commitment")


def check_bad_blind_share(make: Callable[..., MaskingClient]) -> None:
    check_bad_share_is_a_fault(make, "blind_commitment")


@pytest.mark.parametrize("what", ["sealed", "root_commitment", "blind_commitment"])
def test_a_bad_share_names_its_dealer_and_the_round_goes_on(what: str) -> None:
    check_bad_share_is_a_fault(MaskingClient, what)


def test_a_bad_share_too_many_ends_the_round_and_names_the_dealer() -> None:
    round_ = Round(3)  # all three shares are needed
    deliveries = deal_wrongly(round_, dealer=1, holder=2, what="sealed")
    request = round_.sign(range(3), round_.input(range(3), deliveries))
    with pytest.raises(
        TooFewSilos, match=f"{round_.ids[2].name} says that {round_.ids[1].name} dealt it a bad"
    ):
        round_.unmask(range(3), request)


@pytest.mark.parametrize("field", ["share", "salt"])
def test_a_bad_share_names_its_holder_and_the_round_goes_on(field: str) -> None:
    round_ = Round(4)
    request = round_.upto_unmask()
    for silo, client in enumerate(round_.clients):
        given = client.unmask(request)
        if silo == 2:
            first = given.blinds[0].model_copy(update={field: b"\7" * 32})
            given = given.model_copy(update={"blinds": (first, *given.blinds[1:])})
        round_.server.receive_unmasking(round_.names[silo], given)
    result = round_.server.result()
    assert result.faults == (f"{round_.ids[2].name} gave a bad share of {round_.ids[0].name}",)
    assert_sum(round_, result, [0, 1, 2, 3])


def test_shares_that_do_not_give_the_secret_name_their_dealer() -> None:
    """A dealer that shares something else than what it masked with, under good commitments."""
    round_ = Round(4)
    adverts = round_.advertise(range(4))
    for silo, client in enumerate(round_.clients):
        if silo == 1:
            true, client._blind = client._blind, b"\5" * 32
        message = client.share(adverts)
        if silo == 1:
            client._blind = true
            announced = masking_keys.blind_hash(true, adverts.digest(), round_.names[1])
            message = spoiled(round_, 1, message, blind_hash=announced)
        round_.server.receive_shares(round_.names[silo], message)
    request = round_.sign(range(4), round_.input(range(4), round_.server.close_shares()))
    with pytest.raises(MaskingAborted, match=f"{round_.ids[1].name} dealt do not give the blind"):
        round_.unmask(range(4), request)


def test_shares_that_do_not_give_the_mask_key_name_their_dealer() -> None:
    round_ = Round(4)
    adverts = round_.advertise(range(4))
    for silo, client in enumerate(round_.clients):
        if silo == 3:  # deals no pair seeds, so only the shares show that the root is another
            client._root = b"\5" * 32
        round_.server.receive_shares(round_.names[silo], client.share(adverts))
    deliveries = round_.server.close_shares()
    request = round_.sign(range(3), round_.input(range(3), deliveries))
    with pytest.raises(MaskingAborted, match=f"{round_.ids[3].name} dealt do not give the root"):
        round_.unmask(range(3), request)


def test_a_pair_seed_that_does_not_open_names_its_dealer() -> None:
    """Found by the holder; where the holder drops out before it looks, by the server."""
    for dropped in (False, True):
        round_ = Round(4)
        adverts = round_.advertise(range(4))
        for silo, client in enumerate(round_.clients):
            message = client.share(adverts)
            if silo == 0:
                deals = list(message.deals)
                deals[3] = deals[3].model_copy(update={"seed": bytes(len(deals[3].seed))})
                message = spoiled(round_, 0, message, deals=tuple(deals))
            round_.server.receive_shares(round_.names[silo], message)
        deliveries = round_.server.close_shares()
        if not dropped:
            with pytest.raises(
                MaskingAborted, match=f"pair seed that {round_.ids[0].name} dealt does not open"
            ):
                round_.clients[3].masked(deliveries[round_.names[3]], round_.fresh(3))
            continue
        request = round_.sign(range(3), round_.input(range(3), deliveries))
        with pytest.raises(
            MaskingAborted, match=f"{round_.ids[0].name} dealt {round_.ids[3].name} does not open"
        ):
            round_.unmask(range(3), request)


# --- malformed input that reaches a client; each is tried on a client without the check, too


def masking(make: Callable[..., MaskingClient], bits: int = 20) -> tuple[Round, Callable[[Any], MaskedInput]]:
    """A round in which silo 0 is to mask."""
    specs = (SPECS[0], VectorSpec(name="counts", length=1, bits=bits))
    round_ = Round(3, make=make, vectors=specs)
    delivery = round_.upto_input()[round_.names[0]]
    return round_, lambda vectors: round_.clients[0].masked(delivery, vectors)


def check_names_of_vectors(make: Callable[..., MaskingClient]) -> None:
    round_, masked = masking(make)
    vectors = round_.fresh(0)
    with pytest.raises(WrongShape, match="not those agreed"):
        masked({**vectors, "more": vectors["counts"].copy()})


def check_type_of_vectors(make: Callable[..., MaskingClient]) -> None:
    round_, masked = masking(make)
    floats = round_.fresh(0)["weights"].astype(np.int32)
    with pytest.raises(WrongShape, match=r"weights is int32 \(40,\), agreed was"):
        masked({**round_.fresh(0), "weights": floats})


def check_length_of_vectors(make: Callable[..., MaskingClient]) -> None:
    round_, masked = masking(make)
    with pytest.raises(WrongShape, match=r"weights is uint32 \(41,\), agreed was"):
        masked({**round_.fresh(0), "weights": np.zeros(41, np.uint32)})


def check_layout_of_vectors(make: Callable[..., MaskingClient]) -> None:
    round_, masked = masking(make)
    frozen = round_.fresh(0)["weights"]
    frozen.setflags(write=False)
    with pytest.raises(WrongShape, match="contiguous, writable"):
        masked({**round_.fresh(0), "weights": frozen})


def check_modulus_of_vectors(make: Callable[..., MaskingClient]) -> None:
    round_, masked = masking(make)
    with pytest.raises(PayloadError, match="does not fit 20 bits"):
        masked({**round_.fresh(0), "counts": np.array([2**20], np.uint32)})


def check_unusable_key(make: Callable[..., MaskingClient]) -> None:
    """A signed advert whose key is on no curve, so to say: all zeros is a point of low order."""
    round_ = Round(3, suite=HYBRID, make=make)
    adverts = [one.advertise() for one in round_.clients]
    changed = adverts[1].model_copy(update={"cipher_key": bytes(len(adverts[1].cipher_key))})
    signature = HYBRID.sign(round_.ids[1], ADVERT_CONTEXT, changed.statement())
    adverts[1] = changed.model_copy(update={"signature": signature})
    with pytest.raises(
        MaskingAborted, match=f"{round_.ids[1].name} advertised a key that nothing can be sealed"
    ):
        round_.clients[0].share(AdvertList(adverts=tuple(adverts)))


def check_not_serialisable(make: Callable[..., MaskingClient]) -> None:
    client = Round(3, make=make).clients[0]
    client.advertise()
    for attempt in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(SecureflError, match="cannot be serialised"):
            attempt(client)


MALFORMED = (
    check_names_of_vectors,
    check_type_of_vectors,
    check_length_of_vectors,
    check_layout_of_vectors,
    check_modulus_of_vectors,
    check_unusable_key,
    check_not_serialisable,
    check_bad_root_share,
    check_bad_blind_share,
)


@pytest.mark.parametrize("check", MALFORMED, ids=lambda check: check.__name__)
def test_malformed_input_is_refused(check: Callable[[Any], None]) -> None:
    check(MaskingClient)


def test_a_client_shows_no_secret() -> None:
    round_ = Round(3)
    round_.upto_unmask()
    client = round_.clients[0]
    assert repr(client) == f"MaskingClient({round_.ids[0].name}, round 3, UNMASK, secrets hidden)"
    assert client._root.hex() not in repr(vars(client)["_held"])
    assert repr(client._kept) == "SharePair()"


def test_messages_do_not_show_their_bytes() -> None:
    round_ = Round(3)
    request = round_.upto_unmask()
    given = round_.clients[0].unmask(request)
    assert repr(given.blinds[0]) == f"GivenShare(dealer='{round_.names[0]}')"
    assert "share=" not in repr(given)
    assert "signature=" not in repr(request)


# --- bad input that reaches the server


def test_the_server_takes_one_message_a_step_from_those_who_have_a_part_in_it() -> None:
    round_ = Round(4)
    advert = round_.clients[0].advertise()
    with pytest.raises(UnknownSender, match="not in the roster"):
        round_.server.receive_advert("0" * 64, advert)
    with pytest.raises(UnknownSender, match="advert of another silo"):
        round_.server.receive_advert(round_.names[1], advert)
    round_.server.receive_advert(round_.names[0], advert)
    with pytest.raises(Replayed, match=f"{round_.ids[0].name} sent its message of this step already"):
        round_.server.receive_advert(round_.names[0], advert)
    adverts = round_.advertise([1, 2])  # silo 3 does not
    with pytest.raises(WrongRound, match="came at SHARES"):
        round_.server.receive_advert(round_.names[3], round_.clients[3].advertise())
    dealt = [round_.clients[silo].share(adverts) for silo in (0, 1, 2)]
    with pytest.raises(UnknownSender, match="no part in this step"):
        round_.server.receive_shares(round_.names[3], dealt[0])
    with pytest.raises(UnknownSender, match="shares of another silo"):
        round_.server.receive_shares(round_.names[1], dealt[0])
    for silo in (0, 1, 2):
        round_.server.receive_shares(round_.names[silo], dealt[silo])
    deliveries = round_.server.close_shares()
    masked = [one.masked(deliveries[one._me], round_.fresh(i)) for i, one in enumerate(round_.clients[:3])]
    for silo in (0, 1, 2):
        round_.server.receive_input(round_.names[silo], masked[silo])
        with pytest.raises(Replayed):
            round_.server.receive_input(round_.names[silo], masked[silo])
    with pytest.raises(UnknownSender):
        round_.server.receive_input(round_.names[3], masked[0])
    request = round_.sign([0, 1, 2], round_.server.close_inputs())
    assert_sum(round_, round_.unmask([0, 1, 2], request), [0, 1, 2])


@pytest.mark.parametrize(
    ("vectors", "match"),
    [
        ({"weights": bytes(160)}, "other vectors than those agreed"),
        ({"weights": bytes(160), "counts": bytes(3), "more": b""}, "other vectors than those agreed"),
        ({"weights": bytes(156), "counts": bytes(3)}, "156 bytes"),
        ({"weights": bytes(160), "counts": bytes(2)}, "2 bytes"),
        ({"weights": bytes(160), "counts": b"\xff\xff\xff"}, "20 bits"),
    ],
)
def test_a_masked_vector_of_another_form_is_refused_and_changes_nothing(
    vectors: dict[str, bytes], match: str
) -> None:
    round_ = Round(4)
    deliveries = round_.upto_input()
    honest = round_.clients[0].masked(deliveries[round_.names[0]], round_.fresh(0))
    with pytest.raises(WrongShape, match=match) as caught:
        round_.server.receive_input(round_.names[0], honest.model_copy(update={"vectors": vectors}))
    assert round_.ids[0].name in str(caught.value)
    stray = honest.model_copy(update={"adverts": bytes(32)})
    with pytest.raises(WrongRound, match="another round"):
        round_.server.receive_input(round_.names[0], stray)
    request = round_.sign([1, 2, 3], round_.input([1, 2, 3], deliveries))
    assert_sum(round_, round_.unmask([1, 2, 3], request), [1, 2, 3])


@pytest.mark.parametrize("fault", ["holder", "sealed", "seed", "more"])
def test_deals_that_are_not_one_for_each_neighbour_are_refused(fault: str) -> None:
    round_ = Round(4)
    adverts = round_.advertise(range(4))
    message = round_.clients[0].share(adverts)
    deals = list(message.deals)
    match fault:
        case "holder":
            deals[3] = deals[3].model_copy(update={"holder": "f" * 64})
        case "sealed":
            deals[3] = deals[3].model_copy(update={"sealed": b""})
        case "seed":
            deals[3] = deals[3].model_copy(update={"seed": b""})
        case _:
            deals.pop()
    with pytest.raises(PayloadError, match=round_.ids[0].name):
        round_.server.receive_shares(round_.names[0], spoiled(round_, 0, message, deals=tuple(deals)))


def test_an_advert_that_would_stop_everybody_is_refused() -> None:
    round_ = Round(3, suite=HYBRID)
    advert = round_.clients[0].advertise()
    changed = advert.model_copy(update={"mask_key": bytes(len(advert.mask_key))})
    signature = HYBRID.sign(round_.ids[0], ADVERT_CONTEXT, changed.statement())
    with pytest.raises(PayloadError, match="nothing can be sealed to"):
        round_.server.receive_advert(round_.names[0], changed.model_copy(update={"signature": signature}))


def test_a_signature_of_another_view_is_refused() -> None:
    round_ = Round(4)
    survivors = round_.input(range(4), round_.upto_input())
    signed = round_.clients[0].sign(SurvivorList(survivors=survivors.survivors[:3]))
    with pytest.raises(WrongRound, match="another view"):
        round_.server.receive_signature(round_.names[0], signed)
    with pytest.raises(UnknownSender):
        round_.server.receive_signature(round_.names[1], signed)


def test_shares_that_nobody_asked_for_are_refused() -> None:
    round_ = Round(4)
    request = round_.upto_unmask({3})
    given = round_.clients[0].unmask(request)
    swapped = given.model_copy(update={"blinds": given.roots, "roots": ()})
    with pytest.raises(PayloadError, match="not asked for"):
        round_.server.receive_unmasking(round_.names[0], swapped)
    swapped = given.model_copy(update={"blinds": (), "roots": given.blinds})
    with pytest.raises(PayloadError, match="not asked for"):
        round_.server.receive_unmasking(round_.names[0], swapped)


def test_a_result_before_its_time_is_refused() -> None:
    round_ = Round(3)
    with pytest.raises(WrongRound):
        round_.server.result()
    with pytest.raises(WrongRound):
        round_.server.close_inputs()
    assert_sum(round_, round_.run(), [0, 1, 2])


def test_a_cohort_that_cannot_reach_the_threshold_is_refused() -> None:
    with pytest.raises(TooFewSilos, match="3 silos belong to the cohort, below the threshold of 4"):
        MaskingServer(Round(3).roster, terms(4, threshold=4))


# --- what mutants found


@pytest.mark.parametrize("spelling", ["space", "escape", "twice", "newline"])
def test_a_message_has_one_encoding(spelling: str) -> None:
    survivors = SurvivorList(survivors=tuple(Round(3).names))
    text = survivors.tensors()["message"].tobytes()
    other = {
        "space": text.replace(b":", b": "),
        "escape": text.replace(b"survivors", b"\\u0073urvivors"),
        "twice": text[:-1] + b"," + text[1:],
        "newline": text + b"\n",
    }[spelling]
    assert SurvivorList.from_tensors({"message": np.frombuffer(text, np.uint8)}) == survivors
    with pytest.raises(PayloadError, match="survivor list is not"):
        SurvivorList.from_tensors({"message": np.frombuffer(other, np.uint8)})


_ADVERT = b'{"cipher_key":"","mask_key":"","model":"","plan":"","round":"","run":"","signature":"","silo":""}'


@pytest.mark.parametrize(
    "text",
    [
        b'{"adverts":[' + b",".join([b"{}"] * 60_000) + b"]}",
        b'{"adverts":[' + b",".join([b"[]"] * 60_000) + b"]}",
        b'{"adverts":[{"run":[' + b",".join([b"[]"] * 60_000) + b"]}]}",
        b'{"adverts":[{' + b",".join(b'"%05d":0' % number for number in range(30_000)) + b"}]}",
        b'{"adverts":[],' + b",".join(b'"b%05d":0' % number for number in range(30_000)) + b"}",
        b'{"adverts":[' + b",".join([_ADVERT] * 1000) + b"]}",
        b'{"adverts":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=["objects", "lists", "a list for a name", "fields", "fields outside", "adverts", "depth"],
)
def test_a_message_that_is_none_costs_little_memory(text: bytes) -> None:
    """A parser that notes every fault, each with what it is a fault of, would take hundreds of times this."""
    array = np.frombuffer(text, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match="advert list"):
            AdvertList.from_tensors({"message": array})
        assert tracemalloc.get_traced_memory()[1] < 36 * len(text) + 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("whose", ["stranger", "own", "given"])
def test_reports_of_bad_shares_that_nobody_dealt_are_refused(whose: str) -> None:
    round_ = Round(4)
    request = round_.upto_unmask({3})
    given = round_.clients[0].unmask(request)
    fault = {"stranger": "f" * 64, "own": round_.names[0], "given": round_.names[1]}[whose]
    with pytest.raises(PayloadError, match=f"{round_.ids[0].name} reports bad shares"):
        round_.server.receive_unmasking(round_.names[0], given.model_copy(update={"faults": (fault,)}))
    round_.server.receive_unmasking(round_.names[0], given)
    assert_sum(round_, round_.unmask([1, 2], request), [0, 1, 2])


@pytest.mark.parametrize("bits", [20, 24])
def test_a_vector_of_many_chunks_is_added_whole_or_not_at_all(bits: int) -> None:
    """A fault in the last of three chunks leaves the totals alone, also those of a vector before it."""
    length, last = 150_001, 2 * CHUNK
    assert last < length < 3 * CHUNK
    vectors = (VectorSpec(name="first", length=3, bits=16), VectorSpec(name="long", length=length, bits=bits))
    round_ = Round(3, vectors=vectors)
    deliveries = round_.upto_input()
    sent = [
        round_.clients[silo].masked(deliveries[round_.names[silo]], round_.fresh(silo)) for silo in range(3)
    ]
    round_.server.receive_input(round_.names[0], sent[0])
    totals = {name: total.copy() for name, total in round_.server._totals.items()}
    good, width = bytes(sent[1].vectors["long"]), 3
    bad = [good[:-1], good + b"\0", good[: width * last]]
    if bits < 8 * width:  # of 24 bits every value fits its three bytes
        bad.append(good[: width * (length - 1)] + (1 << bits).to_bytes(width, "little"))
    for data in bad:
        spoilt = sent[1].model_copy(update={"vectors": {**sent[1].vectors, "long": data}})
        with pytest.raises(WrongShape, match=round_.ids[1].name):
            round_.server.receive_input(round_.names[1], spoilt)
        for name, total in totals.items():
            np.testing.assert_array_equal(round_.server._totals[name], total)
    for silo in (1, 2):
        round_.server.receive_input(round_.names[silo], sent[silo])
    request = round_.sign(range(3), round_.server.close_inputs())
    assert_sum(round_, round_.unmask(range(3), request), [0, 1, 2])
