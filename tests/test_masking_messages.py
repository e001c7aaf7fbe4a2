"""The messages of masked sums have one form each, and whatever else arrives is refused and not quoted."""

from __future__ import annotations

import numpy as np
import pytest

from securefl.crypto import masking_keys, shares
from securefl.crypto.masking_messages import Advert, MaskedInput, Message, ShareMessage, Unmasking
from securefl.errors import PayloadError, TooLarge, WrongShape
from tests.leaks import assert_no_leak
from tests.masked_rounds import HYBRID, SPECS, SUITE, Round, terms


@pytest.fixture(scope="module")
def messages() -> dict[str, Message]:
    """One of each message, as an honest round makes them."""
    kept: dict[str, Message] = {}
    round_ = Round(4, relay=lambda message: kept.setdefault(type(message).__name__, message) and message)
    round_.run({3: "input"})
    return kept


def test_documents_have_one_form(messages: dict[str, Message]) -> None:
    for message in messages.values():
        kind = type(message)
        if kind is MaskedInput:
            continue
        document = message.document()
        assert kind.from_document(document) == message
        for field in document:
            broken = {name: value for name, value in document.items() if name != field}
            if field != "faults":
                with pytest.raises(PayloadError, match="malformed"):
                    kind.from_document(broken)
        with pytest.raises(PayloadError, match="malformed"):
            kind.from_document({**document, "more": 1})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("Advert", "mask_key", "AAAA"),
        ("Advert", "signature", "A" * 4400),
        ("Advert", "round", 0),
        ("Advert", "round", True),
        ("Advert", "round", "3"),
        ("Advert", "run", "0" * 31),
        ("Advert", "silo", "F" * 64),
        ("Advert", "plan", None),
        ("SurvivorList", "survivors", ["b" * 64, "a" * 64]),
        ("SurvivorList", "survivors", ["a" * 64, "a" * 64]),
        ("SurvivorList", "survivors", [f"{place:064x}" for place in range(1001)]),
        ("SurvivorList", "survivors", ["hospital-a"]),
        ("UnmaskRequest", "dropped", "a" * 64),
        ("Unmasking", "faults", None),
    ],
)
def test_malformed_fields_are_refused(
    messages: dict[str, Message], kind: str, field: str, value: object
) -> None:
    message = messages[kind]
    with pytest.raises(PayloadError, match=f"malformed.*{field}"):
        type(message).from_document({**message.document(), field: value})


def test_lists_of_messages_are_in_order_and_each_once(messages: dict[str, Message]) -> None:
    for kind, field in (
        ("AdvertList", "adverts"),
        ("ShareMessage", "deals"),
        ("Delivery", "dealings"),
        ("UnmaskRequest", "signatures"),
        ("Unmasking", "blinds"),
    ):
        document = messages[kind].document()
        for listed in ([*document[field][::-1]], [document[field][0], *document[field]]):
            with pytest.raises(PayloadError):
                type(messages[kind]).from_document({**document, field: listed})


def test_base64_has_one_form(messages: dict[str, Message]) -> None:
    """Another alphabet, or bits after the end, would give two texts of one message."""
    document = messages["Advert"].document()
    text = document["plan"]
    assert text.endswith("=")
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    spelled = text[:-2] + last[last.index(text[-2]) + 1] + "="
    for other in (spelled, text.rstrip("="), text + "\n"):
        with pytest.raises(PayloadError):
            Advert.from_document({**document, "plan": other})


def test_sealed_parts_have_one_size(messages: dict[str, Message]) -> None:
    document = messages["ShareMessage"].document()
    short = [{**deal, "seed": "AAAA"} for deal in document["deals"]]
    with pytest.raises(PayloadError):
        ShareMessage.from_document({**document, "deals": short})


def test_arrays_have_one_form(messages: dict[str, Message]) -> None:
    advert, masked = messages["Advert"], messages["MaskedInput"]
    row = advert.tensors()["message"]
    with pytest.raises(WrongShape):
        Advert.from_tensors({"message": row, "more": row})
    with pytest.raises(WrongShape):
        Advert.from_tensors({"message": row.astype(np.float32)})
    with pytest.raises(PayloadError, match="not a JSON object"):
        Advert.from_tensors({"message": row[:-1]})
    with pytest.raises(TooLarge):
        Advert.from_tensors({"message": np.zeros(2**24 + 1, np.uint8)})
    arrays = dict(masked.tensors())
    with pytest.raises(WrongShape):
        MaskedInput.from_tensors({**arrays, "weights": row})
    with pytest.raises(WrongShape):
        MaskedInput.from_tensors({**arrays, "vector/weights": arrays["vector/weights"].view("<u4")})
    with pytest.raises(WrongShape):
        MaskedInput.from_tensors({name: one for name, one in arrays.items() if name != "message"})
    with pytest.raises(PayloadError):
        MaskedInput.from_tensors({**arrays, "message": row})
    with pytest.raises(PayloadError, match="a name that is none"):
        MaskedInput.from_tensors({**arrays, "vector/Weights": row})


def test_errors_of_parsing_hold_no_share() -> None:
    canary = "ab" * 20 + "CANARY"
    document = {
        "adverts": canary,
        "blinds": [{"dealer": canary, "share": canary, "salt": canary}],
        "roots": [],
    }
    with pytest.raises(PayloadError) as caught:
        Unmasking.from_document(document)
    assert_no_leak(caught.value, canary)


def test_terms_name_each_vector_once() -> None:
    with pytest.raises(ValueError, match="named twice"):
        terms(3, vectors=(SPECS[0], SPECS[0]))


def test_the_sizes_of_what_is_sealed_are_the_declared_ones(messages: dict[str, Message]) -> None:
    """The cheap suite keeps the sizes of the true one."""
    for suite in (HYBRID, SUITE):
        pair = suite.key_pair(bytes(masking_keys.KEY_SEED))
        assert len(pair.public) == 1216
        assert len(suite.seal(pair.public, bytes(32), b"x")) == 1168
        assert suite.open(pair.private, suite.seal(pair.public, b"secret", b"x"), b"x") == b"secret"
        assert "private" not in repr(pair)
    assert shares.SECRET_BYTES == shares.SALT_BYTES == 32
