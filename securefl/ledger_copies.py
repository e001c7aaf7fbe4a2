"""A ledger's copy elsewhere, and the way back from it: export, restore, confirm.

A copy is one file: a line of canonical JSON, {"format": "securefl.ledger-copy/1", "head": the head record},
and then the ledger's own lines, byte for byte. It proves itself as the ledger does, and has its mode (0600).

What left after a copy was made is not in it. So a restored ledger counts the whole ceiling as spent: it takes
no private release until it is confirmed, by a head record that the owner kept (its accounts are those of a
later moment), or by the server's receipt for the last release of the copy (nothing has left since). Both are
believed to be the newest there is; that, only the owner can know. Where one copy is restored several times, a
head record of one of the ledgers made of it, confirmed in its turn, confirms the next.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from securefl._ledger_chain import (
    Chain,
    Restore,
    Tip,
    check,
    check_head,
    content_after,
    read_chain,
    require_card,
)
from securefl._ledger_files import (
    MODE,
    LedgerSummary,
    head_path,
    lines_of,
    locked,
    read_locked,
    require_name,
    summary_of,
    verify_ledger,
)
from securefl._ledger_lines import HEAD_CONTEXT, MAX_LINE, Point, entry_line, parse_head
from securefl.crypto.identity import Card, Identity
from securefl.errors import BadSignature, LedgerCorrupt, Refused, UsageError
from securefl.files import read_limited, write_atomic, write_new
from securefl.ledger import Ledger
from securefl.receipt import MAX_RECEIPT, Receipt, read_receipt
from securefl.release import canonical_json, parse_json

_FORMAT = "securefl.ledger-copy/1"
_MAX_COPY = 2**30  # bytes; some 200,000 lines


def export_ledger(path: Path, out: Path) -> LedgerSummary:
    """Verify a ledger and write its copy to the new file `out`; a torn last line is left out.

    Raises LedgerCorrupt, and UsageError where `out` exists or a file cannot be read or written.
    """
    with locked(path, writing=False) as file:
        chain, torn, lags = read_locked(path, file, None)
        if chain.size > _MAX_COPY - MAX_LINE:
            raise UsageError(f"{path}: is larger than a copy may be ({_MAX_COPY} bytes); copy the files")
        head = read_limited(head_path(path), MAX_LINE)
        file.seek(0)
        lines = file.read(chain.size)
    first = canonical_json({"format": _FORMAT, "head": parse_json(head)}) + b"\n"
    write_new(out, first + lines, MODE)
    return summary_of(chain, torn, lags)


def _read_copy(copy: Path) -> tuple[Chain, bytes]:
    """The verified chain of a copy, and its lines."""
    data = read_limited(copy, _MAX_COPY)
    first, _, lines = data.partition(b"\n")
    try:
        document = parse_json(first)
        if set(document) != {"format", "head"} or document["format"] != _FORMAT:
            raise ValueError
        head = canonical_json(document["head"]) + b"\n"
        if canonical_json(document) != first:
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise UsageError(
            f"{copy}: is not a copy of a ledger; make one with `securefl ledger export`"
        ) from None
    chain, torn = read_chain(copy, lines_of(io.BytesIO(lines)), number=2)
    if torn:
        raise LedgerCorrupt(f"{copy}: line {chain.tip.index + 3}: breaks off")
    check_head(copy, f"{copy}: line 1", head, chain, 2)
    return chain, lines


def verify_copy(copy: Path) -> LedgerSummary:
    """What a copy holds, verified as a ledger is. Raises UsageError for what is none, LedgerCorrupt."""
    return summary_of(_read_copy(copy)[0])


def restore_ledger(
    copy: Path, path: Path, identity: Identity, clock: Callable[[], float] = time.time
) -> LedgerSummary:
    """Verify a copy and make a ledger of it at `path`, with a `restored` line; see `confirm_ledger`.

    identity: whose keys the copy's last line is under. The head record is written first: after a crash the
    same call takes its place. Raises LedgerCorrupt, or UsageError where `path` or any other head record
    beside it exists: a newer one is what may confirm the restored ledger.
    """
    require_name(path)
    where, taken = head_path(path), "exists already and is not overwritten; move it away and keep it"
    if os.path.lexists(path):
        raise UsageError(f"{path}: {taken}")
    chain, lines = _read_copy(copy)
    require_card(copy, identity.card, chain, 2)
    head = Point(index=chain.tip.index, hash=chain.tip.hash).model_dump()
    content = content_after(chain.tip, "restored", float(clock()), head=head)
    link = check(f"{path}: line {chain.tip.index + 2}", entry_line(content, identity), chain)
    write = write_new
    if os.path.lexists(where):
        if not _is_of_such_a_restore(where, link.tip, identity):
            raise UsageError(f"{where}: {taken}")
        write = write_atomic
    write(where, link.tip.head(identity), MODE)
    write_new(path, lines + link.line, MODE)
    return verify_ledger(path, identity.card)


def _is_of_such_a_restore(where: Path, tip: Tip, identity: Identity) -> bool:
    """Whether a head record is that of `tip`, the `restored` line, made at another time: it says no more."""
    try:
        head, document = parse_head(str(where), read_limited(where, MAX_LINE))
        document.verify(identity.card, HEAD_CONTEXT)
    except (UsageError, LedgerCorrupt, BadSignature):
        return False
    history = (*tip.history[:-1], Point(index=tip.index, hash=head.hash))
    return replace(tip, hash=head.hash, time=head.time, history=history).agrees(head)


def confirm_ledger(
    path: Path,
    identity: Identity,
    head: Path | None = None,
    receipt: Path | None = None,
    server: Card | None = None,
    clock: Callable[[], float] = time.time,
) -> LedgerSummary:
    """Lift a restore by what shows how much had left: a head record, or the receipt of `server`.

    head: signed by this ledger's keys, no older than the copy, and of the ledger that the copy is from or one
    that was restored from that, at the copy's end or later; its accounts become this ledger's, and what left
    since the restore is added. receipt: for the last release in
    the copy. Raises Refused where either shows too little, BadSignature or LedgerCorrupt where it does not
    verify, UsageError for anything but one of the two.
    """
    if (head is None) == (receipt is None) or (receipt is None) != (server is None):
        raise UsageError(
            "confirm by a head record, or by a receipt with the card of the server that signed it"
        )
    ledger = Ledger.open(path, identity, clock)
    restore = ledger.unconfirmed
    if restore is None:
        raise Refused(f"{path}: was not restored from a copy; there is nothing to confirm")
    if head is not None:
        _by_head(ledger, restore, head)
    elif receipt is not None and server is not None:
        try:
            found = read_receipt(read_limited(receipt, MAX_RECEIPT), server)
        except (UsageError, BadSignature) as error:
            raise type(error)(f"{receipt}: {error}") from None
        _by_receipt(ledger, restore, receipt, found)
    return verify_ledger(path, identity.card)


def _by_head(ledger: Ledger, restore: Restore, where: Path) -> None:
    head, document = parse_head(str(where), read_limited(where, MAX_LINE))
    for card in (ledger.card, restore.copy.card):  # the keys may have been changed since the restore
        try:
            document.verify(card, HEAD_CONTEXT)
            break
        except BadSignature:
            continue
    else:
        raise LedgerCorrupt(
            f"{where}: the signature does not hold, or is not by the keys of this ledger; if it is by newer "
            "ones, go on under those first (securefl ledger rotate)"
        )
    copy = restore.copy
    shared, later = head.history[: len(copy.history)], head.history[len(copy.history) :]
    if shared != copy.history:
        raise Refused(
            f"{where}: is of another ledger than the one that the copy was made from, or of one that was "
            "restored from an older copy of it"
        )
    if later and later[0].index <= copy.index:
        raise Refused(
            f"{where}: is of a ledger that was restored from an older copy (as entry {later[0].index}, this "
            f"copy ends with {copy.index}) and may not know all that this one holds; restore the older one"
        )
    if head.restored:
        raise Refused(
            f"{where}: is of a ledger that was restored and not yet confirmed, so its accounts are not "
            "whole; give a newer one"
        )
    if head.index < copy.index:
        raise Refused(
            f"{where}: is older than the restored copy (entry {head.index}, the copy ends with "
            f"{copy.index}); give the newest head record that was kept"
        )
    if head.index == copy.index and head.hash != copy.hash:
        raise Refused(f"{where}: names another entry {head.index} than the restored copy has")
    ledger.append_confirmation("head", Point(index=head.index, hash=head.hash), head.accounts)


def _by_receipt(ledger: Ledger, restore: Restore, where: Path, receipt: Receipt) -> None:
    last = restore.released
    if restore.copy.restored:
        raise Refused(
            f"{where}: cannot show what was lost before an earlier restore, which was not confirmed; give a "
            "head record"
        )
    if last is None:
        raise Refused(f"{where}: is for a release, and the restored copy has none: entries after it are lost")
    due = (last.entry.run, last.card.fingerprint, last.entry.envelope_sha256)
    if (receipt.run, receipt.silo, receipt.envelope_sha256) != due:
        raise Refused(
            f"{where}: is not for the last release of the restored copy (run {last.entry.run}, round "
            f"{last.entry.round}, {last.entry.step}); if it is for a later one, that is missing here: give a "
            "newer head record"
        )
    ledger.append_confirmation(
        "receipt", Point(index=last.entry.index, hash=last.hash), restore.copy.accounts
    )
