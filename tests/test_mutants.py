"""Mutants of every message and record: each refused in securefl's own words, or taken with one encoding.

The count stands in the name. `make fuzz` runs ten times as many, from fresh seeds, and a coverage-guided hunt
besides (tests/fuzz).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from securefl.errors import PayloadError, WrongShape
from securefl.release import PayloadKind, canonical_json, decode, release_from
from tests.federation import make_parties, tiny_config
from tests.fuzz.campaign import BATCH, SHARES, Campaign, Escaped
from tests.fuzz.clients import PlanOpening, Relayed
from tests.fuzz.encrypted import Encrypted
from tests.fuzz.ledgers import LedgerFile
from tests.fuzz.masked import MaskedServer, MaskedSilo
from tests.fuzz.subjects import Admission, BodyCodec, Envelope, Subject, bodies
from tests.fuzz.sums import AdmittedSum
from tests.mutants import unframe, with_document

VALID = bodies()[PayloadKind.MODEL]


def prepare(encoder: Path, data: Path, folder: Path) -> Campaign:
    """A campaign over all subjects: real parties, whose training does nothing."""

    def untrained(*_: object, **__: object) -> None:
        """What a local training gives does not matter to what is refused."""

    campaign = Campaign({})
    rng = random.Random(1)
    plain, sharing = folder / "plain", folder / "sharing"
    plain.mkdir()
    sharing.mkdir()
    opening = PlanOpening(make_parties(tiny_config(encoder, data), plain, untrained), folder)
    config = tiny_config(encoder, data, federation={"method": "fedkc", "rounds": 3})
    federation = make_parties(config, sharing, untrained)
    federation.play(lambda server: server.round == 2)
    subjects: list[Subject] = [
        BodyCodec(),
        Envelope(rng),
        Admission(rng, campaign.count),
        opening,
        Relayed(federation),
        LedgerFile(folder),
        AdmittedSum(rng, campaign.count),
        MaskedServer(rng, campaign.count),
        MaskedSilo(),
        Encrypted(rng),
    ]
    campaign.subjects = {subject.name: subject for subject in subjects}
    assert list(campaign.subjects) == list(SHARES)
    return campaign


def run(campaign: Campaign, mutants: int, *, repeatable: bool) -> None:
    """Exactly `mutants` of them, or AssertionError."""
    assert mutants % BATCH == 0

    @settings(
        max_examples=mutants // BATCH,
        deadline=None,
        derandomize=repeatable,
        database=None,
        phases=(Phase.generate,),  # a seed does not shrink; the mutant itself stands in the message
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=True))
    def batches(rng: random.Random) -> None:
        campaign.batch(rng)

    batches()
    assert campaign.faced == mutants


def require_complete(campaign: Campaign) -> None:
    """Every exception below ProtocolError was met, and every form of every subject."""
    assert not campaign.unreached(), f"no mutant met {sorted(campaign.unreached())}"
    forms = {(name, form.value) for name, one in campaign.subjects.items() for form in one.forms}
    assert forms <= {(name, form) for name, form, _ in campaign.counts}


def test_10_000_mutants_are_refused_in_our_own_words_or_have_one_encoding(
    tiny_encoder: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = prepare(tiny_encoder, tiny_data, tmp_path)
    run(campaign, 10_000, repeatable=True)
    with capsys.disabled():
        sys.stdout.write(f"\n{campaign.table()}")
    require_complete(campaign)


# --- the campaign itself can fail


class Faulty(BodyCodec):
    """The body codec with a fault put in."""

    def __init__(self, broken: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._broken = broken

    def attempt(self, data: bytes) -> Any:
        return self._broken(data)


def raises_another(data: bytes) -> Any:
    raise KeyError("kind")


def takes_all(data: bytes) -> Any:
    """Without its canonical check the codec takes a second encoding: one more space in the header."""
    return decode(VALID), release_from(decode(VALID))


def allocates(data: bytes) -> Any:
    held = bytes(2**26)
    raise PayloadError(f"{len(held)} bytes were held")


@pytest.mark.parametrize(
    ("attempt", "message"),
    [(raises_another, "KeyError"), (takes_all, "AssertionError"), (allocates, "allowed")],
)
def test_a_faulty_codec_is_caught(attempt: Callable[[bytes], Any], message: str) -> None:
    campaign = Campaign({name: Faulty(attempt) for name in SHARES})
    with pytest.raises(Escaped, match=message):
        campaign.batch(random.Random(1))


def test_an_exception_that_no_mutant_meets_is_named() -> None:
    campaign = Campaign({})
    assert "WrongShape" in campaign.unreached()
    campaign.count("body", WrongShape("a tensor"))
    assert "WrongShape" not in campaign.unreached()
    with pytest.raises(AssertionError, match="NonFiniteUpdate"):
        require_complete(campaign)


# --- what mutants found


@pytest.mark.parametrize("value", ["[" * 32 + "]" * 32, '"\\ud800"', '{"\\udfff":0}'])
def test_what_only_some_readers_of_json_take_is_refused(value: str) -> None:
    """Half a surrogate pair breaks who writes UTF-8; deep nesting was taken or not by the caller's depth."""
    header, document, arrays = unframe(VALID)
    text = canonical_json({**document, "document": {**document["document"], "info": {"x": "HOLE"}}})
    assert decode(with_document(header, text, arrays))
    with pytest.raises(PayloadError):
        decode(with_document(header, text.replace(b'"HOLE"', value.encode()), arrays))
