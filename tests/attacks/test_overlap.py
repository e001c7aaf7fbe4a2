"""Auxiliary text that shares a passage with a victim's row is found, and nothing else is."""

from __future__ import annotations

import pytest

from attacks.overlap import PASSAGE, disjoint

WORDS = [f"word{i}" for i in range(40)]
ROW = " ".join(WORDS[:20])


@pytest.mark.parametrize(
    "text",
    [
        ROW,
        ROW.upper(),
        ROW.replace(" ", ",  "),
        " ".join(["other", *WORDS[3 : 3 + PASSAGE], "end"]),
    ],
)
def test_the_row_itself_and_a_passage_of_it_overlap(text: str) -> None:
    assert disjoint(["something else", text], [ROW]) == ([0], 1)


def test_a_shorter_common_passage_does_not() -> None:
    text = " ".join([*WORDS[: PASSAGE - 1], *WORDS[25:40]])
    assert disjoint([text], [ROW]) == ([0], 0)


def test_short_texts_overlap_only_as_wholes() -> None:
    assert disjoint(["Good film", "good", "good film!", "a good film"], ["good FILM"]) == ([1, 3], 2)


def test_texts_without_words_are_compared_as_they_are() -> None:
    assert disjoint(["?!", "...", ""], ["?!"]) == ([1, 2], 1)


def test_repeated_texts_of_the_pool_are_no_overlap_and_stand_once() -> None:
    assert disjoint(["one", "two", "One ", "\ud800"], ["three"]) == ([0, 1, 3], 0)
