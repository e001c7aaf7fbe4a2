"""What the server must still have after a crash: what its language model learned, and whom it has served.

One folder, mode 0700, for one worker. `state.json` names every other file by its SHA-256, and is replaced in
one rename once they are all there: after a crash it is the state before an arrival or the one after it, never
a mixture. All random numbers of an arrival come from the seed and the arrival's number, so an arrival that is
done over gives what it would have given. This room sees no rows and no keys; the files hold silos' models.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from securefl.crosslm_worker import CrossLmWorker, Progress, figures
from securefl.errors import ProtocolError, SecureflError, UsageError, WrongRound
from securefl.files import make_folder, read_limited, write_atomic
from securefl.lanes import Job, Past
from securefl.messages import FINGERPRINT, NAME
from securefl.models import base_fingerprint
from securefl.release import Tensors, canonical_json, fingerprint, parse_json
from securefl.result import ArrivalRow
from securefl.slm import Slm

_STATE = "state.json"
_SUFFIX = ".safetensors"
_MAX_STATE = 2**27  # bytes of state.json; an arrival's report has some 20 texts
_MAX_TENSORS = 2**36  # bytes: the weights and both moments of a model of 5 billion parameters in float32

_Sha256 = Annotated[str, Field(pattern=FINGERPRINT)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Served(_Part):
    """One arrival. model: fingerprint of what arrived. candidate: the file of what went back, if anything."""

    silo: str = Field(pattern=NAME)
    round: int = Field(ge=1)
    queued_behind: int = Field(ge=0)
    staleness: int = Field(ge=0)
    model: _Sha256
    candidate: _Sha256 | None


class _Held(_Part):
    """A silo's last model, which grades for others; labels in the order of its head."""

    silo: str = Field(pattern=NAME)
    labels: tuple[str, ...]
    tensors: _Sha256


class _State(_Part):
    """All of it. worker: hash of what the worker was made with. files: sizes by hash. served and reports: one
    an arrival, in their order; held: in the order in which they are asked.
    """

    schema_: Literal["securefl.crosslm-state/1"] = Field("securefl.crosslm-state/1", alias="schema")
    worker: _Sha256
    weights: _Sha256
    optimizer: _Sha256
    held: tuple[_Held, ...]
    served: tuple[_Served, ...]
    reports: tuple[dict[str, Any], ...]
    files: dict[_Sha256, Annotated[int, Field(ge=0, le=_MAX_TENSORS)]]


@dataclass(frozen=True)
class Answer:
    """What goes back for one arrival. report: the worker's, plain JSON. again: it was served before."""

    candidate: Tensors | None
    report: Mapping[str, Any]
    again: bool


class ServedWorker:
    """A `CrossLmWorker` whose every arrival is on the disk before its candidate can leave.

    fresh: gives a model as a silo announced it, with the labels of its head in the order given, to load the
    silo's tensors into. keep: of candidates, each silo's `last`, all that a silo can still ask for, or
    `all`, for a caller that will replay a run from its beginning.
    """

    def __init__(
        self,
        worker: CrossLmWorker,
        folder: Path,
        fresh: Callable[[str, tuple[str, ...]], Slm],
        *,
        keep: Literal["last", "all"] = "last",
    ) -> None:
        """Go on from what lies in `folder`, or begin there.

        Raises UsageError where it is not this worker's or cannot be written, ProtocolError where it was
        damaged: nothing of it is then used.
        """
        self.worker, self._folder, self._fresh, self._keep = worker, folder, fresh, keep
        self._identity = _identity(worker)
        self._known: dict[str, int] = {}  # files that lie there, whole, and their sizes
        self._hashed: dict[str, tuple[Tensors, str]] = {}  # each silo's held model, and its file
        self._lock = _lock(folder)
        if (folder / _STATE).exists():
            self._state = self._read()
            self._load()
        else:
            self._state = self._save(())

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def served(self) -> tuple[tuple[str, int], ...]:
        """Silo and round of every arrival that was served, in their order."""
        return tuple((one.silo, one.round) for one in self._state.served)

    def past(self) -> tuple[Past, ...]:
        """What was served, for `Lanes` to go on from. Raises ProtocolError for a damaged candidate."""
        last = {one.silo: one for one in self._state.served}
        found = []
        pairs = zip(self._state.served, self._state.reports, strict=True)
        for number, (one, report) in enumerate(pairs, start=1):
            row = ArrivalRow(
                silo=one.silo,
                round=one.round,
                arrival=number,
                queued_behind=one.queued_behind,
                staleness=one.staleness,
                outcome="served",
                candidate=one.candidate is not None,
                note=report["note"],
                seconds=report["seconds"],
                **figures(report),
            )
            wanted = one.candidate if last[one.silo] is one else None
            candidate = None if wanted is None else self._get(wanted)
            found.append(Past(row, learned=report["kl"] is not None, candidate=candidate))
        return tuple(found)

    def arrival(self, slm: Slm, job: Job, progress: Progress | None = None) -> Answer:
        """Serve the job's model, `slm`, which is left as it came; one that was served gets what it got.

        Where serving fails the language model is as before. Raises WrongRound for another model in a round of
        the silo's that was served, or in one that is over, and as `CrossLmWorker.arrival`.
        """
        silo, model = job.silo, fingerprint(slm.state())
        for one, report in zip(self._state.served, self._state.reports, strict=True):
            if (one.silo, one.round) == (silo, job.round):
                return self._again(one, model, report)
        try:
            done = self.worker.arrival(slm, silo, progress)
            candidate = None if done.candidate is None else self._put(done.candidate)
            entry = _Served(
                silo=silo,
                round=job.round,
                queued_behind=job.queued_behind,
                staleness=job.staleness,
                model=model,
                candidate=candidate,
            )
            self._state = self._save((*self._state.served, entry))
        except BaseException:
            self._load()
            raise
        return Answer(done.candidate, done.report, again=False)

    def _again(self, one: _Served, model: str, report: Mapping[str, Any]) -> Answer:
        if one.model != model:
            raise WrongRound(
                f"{one.silo} sent another model for round {one.round} than the one that was served; it was "
                "refused"
            )
        if one.candidate is None:
            return Answer(None, report, again=True)
        if one.candidate not in self._state.files:
            raise WrongRound(f"round {one.round} of {one.silo} is over; its candidate is no longer kept")
        return Answer(self._get(one.candidate), report, again=True)

    # --- writing

    def _save(self, served: Sequence[_Served]) -> _State:
        """Files first, then the state that names them, then what no state names any longer goes."""
        worker, llm = self.worker, self.worker.llm
        held = tuple(
            _Held(silo=silo, labels=slm.labels, tensors=self._put_held(silo, tensors))
            for silo, (slm, tensors) in worker.held.items()
        )
        weights, optimizer = self._put(llm.state()), self._put(llm.optimizer_state())
        kept = served if self._keep == "all" else {one.silo: one for one in served}.values()
        candidates = {one.candidate for one in kept if one.candidate is not None}
        named = {weights, optimizer, *(one.tensors for one in held), *candidates}
        state = _State(
            worker=self._identity,
            weights=weights,
            optimizer=optimizer,
            held=held,
            served=tuple(served),
            reports=tuple(worker.reports),
            files={name: self._known[name] for name in sorted(named)},
        )
        document = state.model_dump(mode="json", by_alias=True)
        outer = {"sha256": hashlib.sha256(canonical_json(document)).hexdigest(), "state": document}
        write_atomic(self._folder / _STATE, canonical_json(outer), 0o600)
        self._tidy(named)
        return state

    def _put(self, tensors: Tensors) -> str:
        """The arrays in a file of their own; gives its hash, which is its name. Those that lie there stay."""
        data = safetensors.numpy.save(dict(tensors))
        name = hashlib.sha256(data).hexdigest()
        if name not in self._known:
            write_atomic(self._folder / f"{name}{_SUFFIX}", data, 0o600)
            self._known[name] = len(data)
        return name

    def _put_held(self, silo: str, tensors: Tensors) -> str:
        """As `_put`, without a hash over every silo's model at each arrival of one."""
        before = self._hashed.get(silo)
        if before is None or before[0] is not tensors:
            self._hashed[silo] = before = (tensors, self._put(tensors))
        return before[1]

    def _tidy(self, named: set[str]) -> None:
        """Forget what the state does not name, and what a crash left half written; what stays is no harm."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                draft = path.name.startswith(".") and path.suffix == ".tmp"
                if draft or (path.suffix == _SUFFIX and path.stem not in named):
                    path.unlink(missing_ok=True)
                    self._known.pop(path.stem, None)

    # --- reading

    def _read(self) -> _State:
        """The state and no tensors, checked against its own hash and this worker."""
        path = self._folder / _STATE
        damaged = ProtocolError(
            f"{path}: was damaged or written by another version; restore the whole folder from a copy, or "
            "begin a new run in an empty one"
        )
        try:
            outer = parse_json(read_limited(path, _MAX_STATE))
            document = canonical_json(outer["state"])
            if set(outer) != {"sha256", "state"} or outer["sha256"] != hashlib.sha256(document).hexdigest():
                raise ValueError("hash")
            state = _State.model_validate_json(document)
        except (ValueError, TypeError, KeyError, ValidationError):
            raise damaged from None
        if len(state.served) != len(state.reports):
            raise damaged
        if state.worker != self._identity:
            raise UsageError(
                f"{path}: belongs to another run (language model, seed, labels or [crosslm] differ); name "
                "another folder"
            )
        self._known = dict(state.files)
        return state

    def _load(self) -> None:
        """Put the worker where the state is. Everything is read and checked before anything changes."""
        state, worker = self._state, self.worker
        weights, optimizer = self._get(state.weights), self._get(state.optimizer)
        held: dict[str, tuple[Slm, dict[str, NDArray[np.float32]]]] = {}
        for one in state.held:
            slm, tensors = self._fresh(one.silo, one.labels), self._get(one.tensors)
            try:
                slm.load_state(tensors)
            except ProtocolError as error:
                raise self._odd(one.tensors, f"is no model as {one.silo} announced it") from error
            held[one.silo] = (slm, tensors)
        try:
            worker.llm.load_state(weights)
            worker.llm.load_optimizer_state(optimizer)
        except SecureflError as error:
            raise self._odd(state.weights, "does not fit the language model") from error
        worker.held = held
        self._hashed = {one.silo: (held[one.silo][1], one.tensors) for one in state.held}
        worker.reports[:] = [dict(report) for report in state.reports]

    def _get(self, name: str) -> dict[str, NDArray[Any]]:
        path = self._folder / f"{name}{_SUFFIX}"
        size = self._known.get(name)
        try:
            if size is None or path.stat().st_size != size:
                raise self._odd(name, "is missing or has another size than the state says")
        except OSError:
            raise self._odd(name, "is missing") from None
        data = read_limited(path, size)
        if hashlib.sha256(data).hexdigest() != name:
            raise self._odd(name, "has other bytes than the state says")
        try:
            tensors: dict[str, NDArray[Any]] = safetensors.numpy.load(data)
        except SafetensorError:
            raise self._odd(name, "holds no arrays") from None
        return tensors

    def _odd(self, name: str, what: str) -> ProtocolError:
        return ProtocolError(
            f"{self._folder / name}{_SUFFIX}: {what}; restore the whole folder from a copy, or begin a new "
            "run in an empty one"
        )


def _lock(folder: Path) -> int:
    """A handle that keeps the folder for this process: two that learn side by side would undo each other."""
    make_folder(folder)
    try:
        if folder.stat().st_mode & 0o077:
            raise UsageError(f"{folder}: others can reach this folder; chmod 700 it")
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be used ({error.strerror})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(f"{folder}: another server is running on this folder; stop it first") from None
    return handle


def _identity(worker: CrossLmWorker) -> str:
    """Hash of everything that a worker's arrivals depend on but for the arrivals."""
    facts = {
        "crosslm": worker.config.model_dump(mode="json"),
        "llm": base_fingerprint(worker.config.llm),
        "labels": list(worker.labels),
        "seed": worker.seed,
        "slm": worker.slm.model_dump(mode="json"),
        "train_llm": worker.train_llm,
    }
    return hashlib.sha256(canonical_json(facts)).hexdigest()
