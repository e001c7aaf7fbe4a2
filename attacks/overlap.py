"""Auxiliary text that overlaps with the victims' own: found before an attack is fitted on it.

A pool that holds a row, or a passage of it, teaches an attack what it is then scored on. Two texts overlap
where they share a passage of `PASSAGE` words in a row, or all their words if they are shorter; case, white
space and punctuation aside. Words only; no vectors, no files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

# As in the decontamination of language models' test sets (Brown et al. 2020, appendix C).
PASSAGE = 13
_WORD = re.compile(r"\w+")


def passages(text: str) -> Iterator[bytes]:
    """Hashes of the passages of a text; of the whole text where it has no more words than one passage."""
    words = _WORD.findall(text.casefold())
    if not words:  # what has no words is compared as it is
        words = [text.strip()]
    for start in range(max(1, len(words) - PASSAGE + 1)):
        passage = "\x1f".join(words[start : start + PASSAGE]).encode("utf-8", "surrogatepass")
        yield hashlib.blake2b(passage, digest_size=16).digest()


def disjoint(pool: Iterable[str], victims: Iterable[str]) -> tuple[list[int], int]:
    """Indices of the pool's texts that overlap with no victim and repeat no text of the pool, and how many
    overlap with a victim."""
    theirs = {passage for text in victims for passage in passages(text)}
    seen: set[str] = set()
    kept, left_out = [], 0
    for index, text in enumerate(pool):
        plain = " ".join(text.casefold().split())
        if any(passage in theirs for passage in passages(text)):
            left_out += 1
        elif plain not in seen:
            seen.add(plain)
            kept.append(index)
    return kept, left_out
