"""The folder of a run: what a simulation writes of releases, truth, policies, cards and models.

Everything goes to `OUT.partial` and is renamed to `OUT` when the run is complete, so that a folder with the
asked-for name is always whole. Releases are the very bytes that left, as their intended recipient could
read them; the truth behind them is written apart, readable by its owner alone, and only the scoring of an
attack reads it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securefl.account import only_account
from securefl.data import Corpus, Rows
from securefl.errors import UsageError
from securefl.files import make_folder, write_atomic
from securefl.ledger import Ledger, ReleaseEntry
from securefl.messages import RoundPlan
from securefl.privacy import release_average
from securefl.release import (
    READABLE,
    SUMMED,
    Claim,
    DpSgd,
    PayloadKind,
    Tensors,
    decode_release,
    encode_release,
    fingerprint,
)
from securefl.result import ReleaseRow

_PRIVATE = "truth"
SUMS = "sums"


def release_name(round: int, step: str, kind: str) -> str:
    """The file name of a release below releases/NAME."""
    return f"r{round:03d}-{step}-{kind}.safetensors"


@dataclass(frozen=True)
class KnownSum:
    """A sum that was written: its file's SHA-256 (hex), public facts and claim, and who opened it."""

    sha256: str
    info: Mapping[str, Any]
    claim: Claim
    openers: list[str]


def sum_name(round: int) -> str:
    """The file name of an opened sum below releases/sums."""
    return f"r{round:03d}-sum.safetensors"


def readers(entry: ReleaseEntry) -> list[str]:
    """Who can read a release of one silo: its recipients, or nobody where only a sum is ever opened."""
    return [] if entry.kind in SUMMED else [party.name for party in entry.recipients]


class RunFolder:
    """A run being written. `path` is `OUT.partial` until `finish` renames it.

    Raises UsageError where OUT is taken, or an interrupted run lies there and `resume` is False.
    """

    def __init__(self, out: Path, resume: bool = False) -> None:
        self.out = out
        self.sums: dict[int, KnownSum] = {}
        self.path = out.with_name(out.name + ".partial")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out}: exists already and is not empty; choose another --out or remove it")
        if self.path.exists() and not resume:
            raise UsageError(f"{self.path}: holds an interrupted run; continue it with --resume or remove it")

    def open(self) -> None:
        """Make the folder, keeping only the finished trainings of an interrupted run."""
        if self.path.exists():
            for child in self.path.iterdir():
                if child.name != "state":
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        make_folder(self.state)

    @property
    def state(self) -> Path:
        """Finished local trainings, for `--resume`; secret, and removed at the end."""
        return self.path / "state"

    def witness(
        self, client: str, plan: RoundPlan, kind: PayloadKind, body: bytes, evidence: Mapping[str, Any]
    ) -> None:
        """Record what can be read: a release, and apart from it the rows behind it, or a sum.

        The rows are `clusters`, for each centroid a list of ids, or `rows`, those of a gradient's batch.

        Of a model that is masked or encrypted, and of the keys and shares of that, nothing is written.
        """
        if kind is PayloadKind.SUM:
            self.sum(client, body)
        if kind not in READABLE:
            return
        name = release_name(plan.round, plan.step.value, kind.value)
        write_atomic(self._sub("releases", client) / name, body)
        if evidence:
            truth = {"release": name, **evidence}
            target = self._sub(_PRIVATE, client) / f"r{plan.round:03d}-{plan.step.value}.json"
            write_atomic(target, json.dumps(truth).encode(), mode=0o600)

    def global_model(
        self, number: int, tensors: Tensors, base: str, labels: Sequence[str], claim: DpSgd | None = None
    ) -> None:
        """Record the weights that the server sent to all silos at the start of a round (or at the end).

        claim: on the trainings that they were made from.
        """
        info = {"round": number, "base": base, "labels": list(labels), "encoder": fingerprint(tensors)}
        body = encode_release(release_average(tensors, info, claim))
        write_atomic(self._sub("releases", "server") / f"r{number:03d}-model.safetensors", body)

    def sum(self, opener: str, body: bytes) -> None:
        """Record the opened sum of a round; the silos under CKKS open the same one."""
        release = decode_release(body)
        number = int(release.info["round"])
        if number not in self.sums:
            write_atomic(self._sub("releases", SUMS) / sum_name(number), body)
            self.sums[number] = KnownSum(hashlib.sha256(body).hexdigest(), release.info, release.claim, [])
        if opener not in self.sums[number].openers:
            self.sums[number].openers.append(opener)

    def truth(self, corpus: Corpus) -> None:
        """Write the rows that each silo trains on, and the rows that are nobody's."""
        for name, rows in corpus.train.items():
            self._rows(self._sub(_PRIVATE, name) / "rows.jsonl", rows, corpus.labels)
        self._rows(self._sub(_PRIVATE) / "pool.jsonl", corpus.pool, corpus.labels)

    def _rows(self, path: Path, rows: Rows, labels: Sequence[str]) -> None:
        lines = [
            json.dumps({"id": row, "text": text, "label": labels[int(label)]}, ensure_ascii=False)
            for row, text, label in zip(rows.ids, rows.texts, rows.labels, strict=True)
        ]
        write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"), mode=0o600)

    def text(self, relative: str, content: str) -> Path:
        """Write a text file of the run."""
        path = self.path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.encode("utf-8", "surrogatepass"))
        return path

    def _sub(self, *parts: str) -> Path:
        path = self.path
        for part in parts:
            path = path / part
            path.mkdir(parents=True, exist_ok=True, mode=0o700 if parts[0] == _PRIVATE else 0o777)
        return path

    def finish(self) -> None:
        """Drop the working state and give the folder its name."""
        shutil.rmtree(self.state, ignore_errors=True)
        if self.out.exists():
            self.out.rmdir()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.path.replace(self.out)


def ledger_facts(ledger: Ledger, releases: Path | None = None) -> dict[str, Any]:
    """The fields of a silo's `ClientRow` that its ledger decides: the account, and what left.

    releases: the silo's recorded ones, which say how many centroids each has.

    Raises UsageError for a ledger of several data sets, which have an account each.
    """
    account = only_account(ledger.accounts())
    return {
        "epsilon": account.epsilon,
        "private_epsilon": account.private_epsilon,
        "delta": account.delta,
        "simulated": account.simulated,
        "no_finite_epsilon": list(account.nonprivate),
        "releases": [
            ReleaseRow(
                round=entry.round,
                kind=entry.kind.value,
                recipients=[party.name for party in entry.recipients],
                readable_by=readers(entry),
                bytes=entry.bytes,
                sha256=entry.body_sha256,
                claim=entry.claim.model_dump(mode="json"),
                centroids=_centroids(entry, releases),
            )
            for entry in ledger.entries
        ],
    }


def _centroids(entry: ReleaseEntry, releases: Path | None) -> int | None:
    if releases is None or entry.kind not in (PayloadKind.CENTROIDS, PayloadKind.EMBEDDING_CENTROIDS):
        return None
    release = decode_release(
        (releases / release_name(entry.round, entry.step, entry.kind.value)).read_bytes()
    )
    return len(release.tensors["centroids"])


def link_duplicates(files: Sequence[Path]) -> None:
    """Let files of the same bytes share their place on disk, as silos that end with the same weights do."""
    seen: dict[bytes, Path] = {}
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if digest in seen:
            twin = path.with_name(f".{path.name}.link")
            twin.hardlink_to(seen[digest])
            twin.replace(path)
        else:
            seen[digest] = path
