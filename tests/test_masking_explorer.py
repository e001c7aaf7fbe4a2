"""The exploration of masked sums finds nothing in the machines as they are, and sees what is taken out.

How many states it visited is printed. `python -m tests.explore` is the larger sweep.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from securefl.crypto import graph, masking_keys, shares
from securefl.crypto.masking_messages import AdvertList, Delivery, SurvivorList, UnmaskRequest
from securefl.crypto.masks import Stream, add_masks, stream_seed, unpack
from securefl.errors import MaskingAborted
from tests import test_masking as unit
from tests.explore.honest_server import HonestWorld, explore_honest_server
from tests.explore.machines import SOURCE, SUITE, Count, Violation, client_module
from tests.explore.mutants import Mutant, mutants
from tests.explore.server_moves import ServerWorld, explore_server_moves
from tests.masked_rounds import Round

World = tuple[int, int | None]
THREE: World = (3, None)
FOUR: World = (4, None)
RING: World = (4, 2)  # of four silos each masks with two: a neighbourhood is less than all
RING_OF_FIVE: World = (5, 2)

# Every check of the client, and what notices that it is gone: a world of the exploration, or, where it is
# about input that is malformed, the unit test of that name.
NOTICED_BY: dict[str, World | Callable[[Any], None]] = {
    "__init__: if self._me not in self._cards": THREE,
    "__init__: if silos < least": THREE,
    "__init__: if terms.threshold < least": THREE,
    "__init__: if terms.threshold > silos": THREE,
    "__reduce__: raise": unit.check_not_serialisable,
    "_take: if self._step is not step": THREE,
    "share: self._check_advert(advert)": THREE,
    "share: if self._adverts.get(self._me) != self._advert": THREE,
    "share: if len(set(keys)) != len(keys)": THREE,
    "share: if len(self._adverts) < self._terms.threshold": THREE,
    "_check_advert: if card is None": THREE,
    "_check_advert: if (advert.run, advert.round) != (terms.run, terms.round)": THREE,
    "_check_advert: if (advert.plan, advert.model) != (terms.plan, terms.model)": THREE,
    "_check_advert: self._suite.verify(card, ADVERT_CONTEXT, advert.statement(), advert.signature)": THREE,
    "_check_advert: except BadSignature": THREE,
    "_seal: except PayloadError": unit.check_unusable_key,
    "masked: self._check_vectors(vectors)": unit.check_modulus_of_vectors,
    "masked: if not self._shared <= self._adverts.keys()": FOUR,
    "masked: if self._me not in self._shared": FOUR,
    "masked: if len(self._shared) < self._terms.threshold": RING_OF_FIVE,
    "masked: if len(mine) < self._needed": RING,
    "masked: if dealings.keys() != mine - {self._me}": THREE,
    "masked: self._check_dealing(dealing)": THREE,
    (
        "_check_vectors: if vectors.keys() != {spec.name for spec in self._terms.vectors}"
    ): unit.check_names_of_vectors,
    "_check_vectors: operand vector.dtype != np.uint32": unit.check_type_of_vectors,
    "_check_vectors: operand vector.shape != (spec.length,)": unit.check_length_of_vectors,
    "_check_vectors: operand not vector.flags.carray": unit.check_layout_of_vectors,
    (
        "_check_vectors: if vector.dtype != np.uint32 or vector.shape != (spec.length,) "
        "or (not vector.flags.carray)"
    ): (unit.check_length_of_vectors),
    "_check_vectors: if int(vector.max()) >> spec.bits": unit.check_modulus_of_vectors,
    "_check_dealing: if dealing.adverts != self._digest": THREE,
    (
        "_check_dealing: self._suite.verify(self._cards[dealing.dealer], SHARES_CONTEXT, "
        "statement, dealing.signature)"
    ): (THREE),
    "_check_dealing: except BadSignature": THREE,
    "_check_dealing: if dealing.deal.leaf() not in dealing.leaves": THREE,
    "_check_dealing: if dealing.deal.holder != self._me": THREE,
    "_open_seed: except DecryptionFailed": THREE,
    (
        "_open_shares: shares.check(place, held.root, held.root_salt, deal.root_commitment)"
    ): unit.check_bad_root_share,
    "_open_shares: shares.check(place, held.blind, held.blind_salt, deal.blind_commitment)": (
        unit.check_bad_blind_share
    ),
    "sign: if not listed <= self._shared": FOUR,
    "sign: if self._me not in listed": FOUR,
    "sign: if len(listed) < terms.threshold": THREE,
    "unmask: operand frozenset(request.survivors) != self._survivors": THREE,
    "unmask: operand frozenset(request.dropped) != dropped": THREE,
    (
        "unmask: if frozenset(request.survivors) != self._survivors or frozenset(request.dropped) != dropped"
    ): THREE,
    "unmask: self._check_signature(signature)": THREE,
    "unmask: if len(request.signatures) < self._terms.threshold": THREE,
    "_check_signature: if signed.signer not in self._survivors": FOUR,
    (
        "_check_signature: self._suite.verify(card, SURVIVORS_CONTEXT, mine.statement(), signed.signature)"
    ): THREE,
    "_check_signature: except BadSignature": THREE,
}


def say(capsys: pytest.CaptureFixture[str], what: str, count: Count) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{what}: {count}\n")


@pytest.mark.parametrize("world", [THREE, FOUR, RING], ids=str)
def test_no_server_learns_a_sum_of_too_few(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    silos, degree = world
    explored = ServerWorld(silos, degree)
    count = explore_server_moves(explored)
    say(capsys, f"{silos} clients against any server, degree {degree}", count)
    # The exploration goes all the way: some states open a sum, over everybody or as few as the threshold.
    assert explored.learnt == set(range(explored.threshold, silos + 1))
    assert count.refused > count.states / 2


@pytest.mark.parametrize("silos", [3, 4])
def test_every_honest_round_ends_in_the_right_sum_or_a_clear_abort(
    silos: int, capsys: pytest.CaptureFixture[str]
) -> None:
    count = explore_honest_server(HonestWorld(silos))
    say(capsys, f"{silos} clients and the server on a bad network", count)
    assert count.sums > 0
    assert count.aborts > 0


def test_every_check_of_the_client_is_listed() -> None:
    found = [mutant.check for mutant in mutants()]
    assert len(set(found)) == len(found)
    assert set(found) == set(NOTICED_BY)


def test_every_raise_of_the_client_is_among_the_checks() -> None:
    """Counted in the text, so that the list does not only agree with itself."""
    lines = [line.strip() for line in SOURCE.read_text().splitlines()]
    raises = sum(line.startswith("raise ") for line in lines)
    assert (
        sum(": if " in check or ": except" in check or check.endswith("raise") for check in NOTICED_BY)
        == raises
    )


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.check)
def test_a_client_without_one_check_is_noticed(mutant: Mutant) -> None:
    witness = NOTICED_BY[mutant.check]
    module = client_module(mutant.tree)
    if isinstance(witness, tuple):
        with pytest.raises(Violation):
            explore_server_moves(ServerWorld(*witness, module), breadth_first=False)
        return
    # A unit test that fails, by what it asserts or by what then breaks; the same passes on the client itself.
    with pytest.raises((Exception, pytest.fail.Exception)):
        witness(module.make)


def test_the_unmutated_source_passes_the_unit_tests_that_notice() -> None:
    whole = client_module()
    for witness in NOTICED_BY.values():
        if callable(witness):
            witness(whole.make)


# Changes of what a client gives away, not of what it accepts: each is seen by one invariant.
CARELESS = {
    "the kinds of share swapped": (
        [("if dealer in self._survivors", "if dealer not in self._survivors")],
        "another kind of share",
    ),
    "one mask for every vector": (
        [("terms.round, vector, parties)", 'terms.round, "w", parties)')],
        "one mask for two vectors",
    ),
    "no mask of its own": (
        [("return [masks.Stream(seed(self._blind, self._me), 1), *pairs]", "return pairs")],
        "a sum over 1 silos can be computed",
    ),
    "no pair masks": (
        [("1), *pairs]", "1)]")],
        "a sum over 1 silos can be computed",
    ),
}


@pytest.mark.parametrize(("changes", "seen"), CARELESS.values(), ids=CARELESS)
def test_a_client_that_gives_too_much_is_noticed(changes: list[tuple[str, str]], seen: str) -> None:
    source = SOURCE.read_text()
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    with pytest.raises(Violation, match=seen):
        explore_server_moves(ServerWorld(4, None, client_module(ast.parse(source))), breadth_first=False)


# --- what the signatures of the survivors are for


def sum_of_a_part(
    round_: Round, dealt: list[Any], masked: list[Any], given: list[Any], part: list[int]
) -> Any:
    """What a server computes of the masked inputs of `part`, from shares given for lists that differ."""
    terms, names, digest = round_.terms, round_.names, dealt[0].adverts
    total = np.zeros(terms.vectors[0].length, np.uint32)
    name, bits, length = terms.vectors[0].name, terms.vectors[0].bits, terms.vectors[0].length

    def rebuilt(kind: str, silo: int) -> bytes:
        parts = {
            holder + 1: one.share
            for holder, answer in enumerate(given)
            for one in getattr(answer, kind)
            if one.dealer == names[silo]
        }
        return shares.combine(parts, terms.threshold)

    def seed(secret: bytes, *parties: int) -> bytes:
        return stream_seed(secret, terms.run, terms.round, name, [names[one] for one in parties])

    others = sorted(set(range(len(names))) - set(part))
    roots = {silo: rebuilt("roots", silo) for silo in others}
    for silo in part:
        total += unpack(masked[silo].vectors[name], bits, length)
        streams = [Stream(seed(rebuilt("blinds", silo), silo), -1)]
        for other in others:
            if other < silo:
                pair = masking_keys.pair_seed(
                    roots[other], terms.run, terms.round, names[other], names[silo], digest
                )
            else:
                key = SUITE.key_pair(
                    masking_keys.mask_key_seed(roots[other], terms.run, terms.round, names[other])
                )
                info = masking_keys.seal_info(
                    b"pair", terms.run, terms.round, names[silo], names[other], digest
                )
                pair = SUITE.open(key.private, dealt[silo].deals[other].seed, info)
            streams.append(Stream(seed(pair, silo, other), 1 if other < silo else -1))
        add_masks(total, streams, bits, 1)
    return total


def unmask_with_lists(round_: Round, lists: list[list[int]]) -> tuple[list[Any], list[Any], list[Any]]:
    """All take part; the server tells silo i that `lists[i]` survived, with signatures of other lists."""
    silos, names = range(len(round_.ids)), round_.names
    adverts = AdvertList(adverts=tuple(one.advertise() for one in round_.clients))
    dealt = [one.share(adverts) for one in round_.clients]
    masked, signed, given = [], [], []
    for silo in silos:
        dealings = tuple(dealt[peer].dealing(names[silo]) for peer in silos if peer != silo)
        delivery = Delivery(shared=tuple(names), dealings=dealings)
        masked.append(round_.clients[silo].masked(delivery, round_.fresh(silo)))
    for silo in silos:
        listed = tuple(names[one] for one in lists[silo])
        signed.append(round_.clients[silo].sign(SurvivorList(survivors=listed)))
    for silo in silos:
        survivors = [names[one] for one in lists[silo]]
        request = UnmaskRequest(
            survivors=tuple(survivors),
            dropped=tuple(name for name in names if name not in survivors),
            signatures=tuple(signed[one] for one in lists[silo]),
        )
        given.append(round_.clients[silo].unmask(request))
    return dealt, masked, given


# Ten silos, threshold seven. Each list has the same six silos and one of the other four; so each of the four
# is called dropped by seven silos or more, and each of the six a survivor by all ten.
PART = [4, 5, 6, 7, 8, 9]
LISTS = [sorted([*PART, one]) for one in (0, 1, 2, 3, 0, 0, 1, 1, 2, 3)]


def test_without_the_signatures_a_server_opens_a_sum_of_too_few() -> None:
    (mutant,) = (one for one in mutants() if one.check.startswith("_check_signature: self._suite.verify"))
    round_ = Round(10, make=client_module(mutant.tree).make)
    assert graph.threshold(10) == round_.terms.threshold == 7 > len(PART)
    dealt, masked, given = unmask_with_lists(round_, LISTS)
    opened = sum_of_a_part(round_, dealt, masked, given, PART)
    np.testing.assert_array_equal(opened, round_.right(PART)["weights"])


def test_with_the_signatures_nobody_answers_to_lists_that_differ() -> None:
    with pytest.raises(MaskingAborted, match=r"did not sign the same round \(survivors differ\)"):
        unmask_with_lists(Round(10), LISTS)
