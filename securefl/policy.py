"""What one silo permits to leave, in a file that the silo's own people write and the server cannot touch.

Unset means forbidden: an empty policy lets nothing out. Fingerprints, names and hashes match whole or not at
all. Every refusal names the clause. This room decides and changes nothing; `client` asks it before a plan is
acted on and again before anything is sealed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from securefl.account import Account
from securefl.config import PERMIT_EMBEDDINGS, PLACE
from securefl.crypto.keyfiles import check_guarded
from securefl.errors import BudgetExceeded, ConfigError, PolicyRefusal, UsageError
from securefl.files import write_atomic
from securefl.messages import FINGERPRINT, NAME, Party, RoundPlan
from securefl.release import (
    ROW,
    Adjacency,
    GaussianSums,
    Independent,
    Noised,
    NonPrivate,
    PayloadKind,
    Release,
    Unit,
    canonical_json,
)

_CENTROIDS = (PayloadKind.CENTROIDS, PayloadKind.EMBEDDING_CENTROIDS)
# How what is learned from rows is protected on its way: all but a gradient is part of sending a model.
_PROTECTIONS = {
    PayloadKind.MODEL: "sealed",
    PayloadKind.GRADIENT: "sealed",
    PayloadKind.ADVERT: "masked",
    PayloadKind.SHARES: "masked",
    PayloadKind.MASKED_MODEL: "masked",
    PayloadKind.SURVIVORS: "masked",
    PayloadKind.UNMASKING: "masked",
    PayloadKind.GROUP_KEY: "ckks",
    PayloadKind.ENCRYPTED_MODEL: "ckks",
}
_TO_PEERS = (*_CENTROIDS, PayloadKind.GROUP_KEY)
_LISTED = (PayloadKind.MODEL, PayloadKind.METRICS, *_CENTROIDS, PayloadKind.GRADIENT)
_MAX_FILE = 2**20
KILL_SWITCH = "STOP"
# A budget calibrated to the very ceiling may come out above it by the root finder's error.
ROUNDING = 1e-6

DAY = 24 * 60 * 60  # seconds

Fingerprint = Annotated[str, Field(pattern=FINGERPRINT)]
DataSet = Annotated[str, Field(pattern=NAME)]


class Ceiling(BaseModel):
    """What all private releases of one data set may add up to, over its whole life.

    unit, adjacency: whom that is about; releases that protect something else are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    unit: Unit = ROW
    adjacency: Adjacency = "add-remove"


class Policy(BaseModel):
    """A silo's limits. The methods raise PolicyRefusal or BudgetExceeded, naming the clause."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(pattern=NAME, description="The silo whose policy this is.")
    simulation: bool = Field(
        False, description="Permit noise from a seed. It protects nobody: for simulations only."
    )
    servers: tuple[Fingerprint, ...] = Field(
        (), description="Fingerprints of the servers it works with: 64 hex digits (`securefl inspect CARD`)."
    )
    peers: tuple[Fingerprint, ...] = Field(
        (), description="Fingerprints of the silos that may read its centroids, or the sums that CKKS opens."
    )
    base_models: tuple[Fingerprint, ...] = Field(
        (), description="SHA-256 of the public checkpoints it may train (`securefl inspect FOLDER`)."
    )
    kinds: tuple[PayloadKind, ...] = Field(
        (),
        description="Kinds of payload that may leave, of: model, metrics, centroids, embedding-centroids, "
        "gradient. Every method needs model and metrics (without metrics no accuracy is told), FedKC "
        "centroids too; FedSGD gradient in place of model, from which a batch's texts can be read back.",
    )
    nonprivate: tuple[PayloadKind, ...] = Field(
        (),
        description="Of these, the kinds that may leave without differential privacy; model and metrics "
        "do, unless `privacy.dp_sgd` or `privacy.models` is set, and gradient always does.",
    )
    model_protections: tuple[Literal["sealed", "masked", "ckks"], ...] = Field(
        (),
        description="How models may be protected, of: masked (nobody reads one, the server their sum), ckks "
        "(the silos their sum, and any silo with the server's help each), sealed (the server reads each).",
    )
    min_cohort: int | None = Field(
        None,
        ge=3,
        description="Silos of a run whose models are summed, at least, so that one's own hides among them.",
    )
    min_threshold: int | None = Field(
        None,
        ge=2,
        description="Silos whose masked sum may become known, at least; unset: more than two thirds.",
    )
    centroid_protections: tuple[Literal["peer", "sealed"], ...] = Field(
        (),
        description="How centroids may be protected, of: peer (the other silos read them), sealed (not "
        "in this version).",
    )
    min_cluster_size: int | None = Field(
        None, ge=1, description="Rows that every centroid without noise stands for, at least."
    )
    min_noise_multiplier: float | None = Field(
        None,
        gt=0,
        description="Standard deviation over sensitivity that every part of a private release has, at least; "
        "`securefl inspect` on the run's configuration prints them.",
    )
    allow_embedding_centroids: (
        Literal["the tokens of these rows can be read back from what is shared"] | None
    ) = Field(
        None,
        description="Needed, word for word, for centroids of the embedding layer without noise: "
        f'"{PERMIT_EMBEDDINGS}".',
    )
    max_release_bytes: int | None = Field(
        None,
        ge=1,
        description="Largest body of one release, in bytes; the weights of all-MiniLM-L6-v2 take 43 million.",
    )
    max_bytes_per_day: int | None = Field(
        None, ge=1, description="Sealed bytes of all releases within any 24 hours, by the ledger."
    )
    min_envelope_version: int | None = Field(
        None, ge=1, description="Oldest version of the wire format it reads; unset: the newest there is."
    )
    approval: Literal["automatic", "manual"] | None = Field(
        None,
        description="`manual`: every plan waits until an owner runs `securefl approve`; `automatic`: what "
        "the other clauses permit goes without asking.",
    )
    kill_switch: str | None = Field(
        None,
        pattern=PLACE,
        description="While this file exists nothing leaves; relative to the policy; unset: STOP beside it.",
    )
    datasets: dict[DataSet, Ceiling] = Field(
        default={},
        description="Its data sets, by the name in the client's configuration, and the epsilon and delta "
        "that all private releases of each may reach over its life, for each `unit` (unset: row) under "
        "`adjacency` (unset: add-remove).",
    )

    @field_validator("kinds", "nonprivate")
    @classmethod
    def _are_releases(cls, kinds: tuple[PayloadKind, ...]) -> tuple[PayloadKind, ...]:
        for kind in kinds:
            if kind not in _LISTED:
                raise ValueError(f"{kind.value} is not listed by itself; of: {', '.join(map(str, _LISTED))}")
        return kinds

    # --- the file

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over all clauses."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json"))).hexdigest()

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read a TOML file. Raises ConfigError naming the file and the field.

        A file that others than its owner can write is refused: they would decide what leaves.
        """
        try:
            document = tomllib.loads(_read_own(path).decode("utf-8"))
            # As JSON text: strict validation then takes lists for tuples and strings for enumerations.
            policy = cls.model_validate_json(json.dumps(document, allow_nan=False))
            switch = path.parent.resolve() / (policy.kill_switch or KILL_SWITCH)
            return policy.model_copy(update={"kill_switch": str(switch)})
        except UsageError as error:
            raise ConfigError(str(error)) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not UTF-8 (byte {error.start})") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: is not valid TOML: {error}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            reason = "unknown clause" if first["type"] == "extra_forbidden" else first["msg"]
            raise ConfigError(f"{path}: {where}: {reason}") from error
        except RecursionError as error:
            raise ConfigError(f"{path}: is nested too deeply") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: has a date or a number that is not finite") from error

    def to_toml(self) -> str:
        """The TOML of this policy, every clause with its meaning; an unset clause is a comment."""
        lines = ["# What this silo permits to leave. Unset means forbidden."]
        values: dict[str, Any] = self.model_dump(mode="json")
        for clause, field in type(self).model_fields.items():
            value = values[clause]
            if isinstance(value, dict):  # the tables, which TOML wants last
                lines += ["", f"# {field.description}"]
                if not value:
                    lines += [f"# [{clause}.letters-2026]", "# max_epsilon = 3.0", "# delta = 1e-6"]
                    lines += ['# unit = "row"', '# adjacency = "add-remove"']
                for name, ceiling in value.items():
                    lines += [f"[{clause}.{json.dumps(name)}]"]
                    lines += [f"{key} = {json.dumps(part)}" for key, part in ceiling.items()]
                continue
            # Numbers, booleans and text, on which JSON and TOML agree.
            written = (
                f"# {clause} = (unset)"
                if value is None
                else f"{clause} = {json.dumps(value, ensure_ascii=False)}"
            )
            lines += ["", f"# {field.description}", written]
        return "\n".join(lines) + "\n"

    def save(self, path: Path) -> None:
        """Write the TOML file, atomically."""
        write_atomic(path, self.to_toml().encode())

    # --- decisions

    def _refusal(self, clause: str, why: str) -> PolicyRefusal:
        return PolicyRefusal(f"the policy of {self.name} forbids it: {clause}: {why}", clause)

    def _refuse(self, clause: str, why: str) -> NoReturn:
        raise self._refusal(clause, why)

    def stopped(self) -> bool:
        """Whether the kill switch is thrown. Where that cannot be told, it is."""
        if self.kill_switch is None:
            return False
        switch = Path(self.kill_switch)
        try:
            switch.lstat()
        except FileNotFoundError:
            # A folder that is gone (a share that is not mounted) cannot hold the file and cannot deny it.
            return not switch.parent.is_dir()
        except OSError:
            return True
        return True

    def check_running(self) -> None:
        """Raises PolicyRefusal while the kill switch is thrown."""
        if self.stopped():
            self._refuse("kill_switch", f"{self.kill_switch} is there, or cannot be looked for")

    def check_plan(self, plan: RoundPlan, server_fingerprint: str, base_sha256: str, dataset: str) -> None:
        """Whether to act on a plan at all. What it produces is checked again by `check_release`.

        server_fingerprint: whose signature the plan carries. base_sha256: of the checkpoint that this silo
        trains; dataset: on which rows. Raises PolicyRefusal.
        """
        for refusal in self.plan_refusals(plan, server_fingerprint, base_sha256, dataset):
            raise refusal

    def plan_refusals(
        self, plan: RoundPlan, server_fingerprint: str, base_sha256: str, dataset: str
    ) -> Iterator[PolicyRefusal]:
        """Everything that this policy says against a plan, each clause by itself; see `check_plan`."""
        peers = [party for party in plan.cohort if party.name != self.name]
        to_peers = plan.answer in _TO_PEERS
        for clause, against in (
            ("kill_switch", self.stopped() and f"{self.kill_switch} is there, or cannot be looked for"),
            ("approval", self.approval is None and "is not set, so nobody has said who approves a plan"),
            ("datasets", dataset not in self.datasets and f"{dataset} is not listed"),
            (
                "servers",
                server_fingerprint not in self.servers
                and f"the server {server_fingerprint[:16]} is not listed",
            ),
            (
                "base_models",
                base_sha256 not in self.base_models and f"the checkpoint {base_sha256[:16]} is not listed",
            ),
        ):
            if against:
                yield self._refusal(clause, against)
        for check in (
            partial(self._check_kind, plan.answer),
            partial(self._check_protection, plan.answer),
            partial(self._check_peers, peers if to_peers or plan.protection == "ckks" else []),
            partial(self._check_sums, plan),
        ):
            try:
                check()
            except PolicyRefusal as refusal:
                yield refusal

    def check_release(self, release: Release, recipients: Sequence[Party], size: int) -> None:
        """Whether a release may leave to these recipients; size: of its body, in bytes. PolicyRefusal."""
        self.check_running()
        self._check_kind(release.kind)
        if self.max_release_bytes is None or size > self.max_release_bytes:
            limit = self.max_release_bytes or 0
            self._refuse("max_release_bytes", f"a release of {size} bytes is above {limit}")
        self._check_recipients(release.kind, recipients)
        if isinstance(release.claim, Noised):
            self.check_noise(release.claim)
        elif not isinstance(release.claim, Independent):
            self._check_nonprivate(release)

    def check_day(self, sealed: int) -> None:
        """Whether the bytes of the last 24 hours, the next release's among them, are few enough."""
        if self.max_bytes_per_day is None or sealed > self.max_bytes_per_day:
            limit = self.max_bytes_per_day or 0
            self._refuse("max_bytes_per_day", f"{sealed} bytes within 24 hours are above {limit}")

    def check_budget(self, dataset: str, account_after: Account) -> None:
        """Whether a data set's account, with the next release in it, stays below its ceiling.

        Compares at the policy's own delta; what is NonPrivate has no epsilon and is `nonprivate`'s matter.
        Raises BudgetExceeded, or PolicyRefusal for a data set that is not listed.
        """
        ceiling = self.datasets.get(dataset)
        if ceiling is None:
            self._refuse("datasets", f"{dataset} is not listed")
        if account_after.private_epsilon is None:
            return
        about = (account_after.unit, account_after.adjacency)
        if account_after.says_unit and about != (ceiling.unit, ceiling.adjacency):
            raise BudgetExceeded(
                f"the policy of {self.name} forbids it: datasets.{dataset}: its ceiling is for each "
                f"{ceiling.unit} under {ceiling.adjacency}, and this release for each {about[0]} under "
                f"{about[1]}",
                "datasets",
            )
        epsilon = account_after.private_epsilon_at(ceiling.delta)
        if not epsilon <= ceiling.max_epsilon * (1 + ROUNDING):
            raise BudgetExceeded(
                f"the policy of {self.name} forbids it: datasets.{dataset}: the releases together would have "
                f"epsilon {epsilon:.4g} at delta {ceiling.delta:g}, above {ceiling.max_epsilon:g}",
                "datasets",
            )

    def _check_kind(self, kind: PayloadKind) -> None:
        listed = _listed(kind)
        if listed not in self.kinds:
            self._refuse("kinds", f"{listed.value} is not listed")

    def _check_protection(self, kind: PayloadKind) -> None:
        if kind in _CENTROIDS and "peer" not in self.centroid_protections:
            self._refuse("centroid_protections", "peer is not listed")
        if kind in _PROTECTIONS and _PROTECTIONS[kind] not in self.model_protections:
            self._refuse("model_protections", f"{_PROTECTIONS[kind]} is not listed")

    def _check_sums(self, plan: RoundPlan) -> None:
        """Whether enough silos take part in a sum that one's own model hides in it."""
        if plan.protection == "sealed":
            return
        silos = len(plan.cohort)
        if self.min_cohort is None:
            self._refuse("min_cohort", "is not set, so no sum of models is joined")
        if silos < self.min_cohort:
            self._refuse("min_cohort", f"a cohort of {silos} silos is below {self.min_cohort}")
        asked = plan.sums.threshold if plan.sums is not None else 0
        if plan.protection == "masked" and asked < (self.min_threshold or 0):
            self._refuse("min_threshold", f"a threshold of {asked} silos is below {self.min_threshold}")

    def _check_peers(self, parties: Sequence[Party]) -> None:
        for party in parties:
            if party.key not in self.peers:
                self._refuse("peers", f"{party.name} with the key {party.key[:16]} is not listed")

    def _check_recipients(self, kind: PayloadKind, recipients: Sequence[Party]) -> None:
        self._check_protection(kind)
        if not recipients:
            self._refuse("peers" if kind in _TO_PEERS else "servers", "a release without recipients")
        if kind in _TO_PEERS:
            self._check_peers([party for party in recipients if party.name != self.name])
            if kind is PayloadKind.GROUP_KEY and {p.key for p in recipients} & set(self.servers):
                self._refuse("peers", "a server would get the key that keeps the models from it")
            return
        for party in recipients:
            if party.key not in self.servers:
                self._refuse("servers", f"{party.name} with the key {party.key[:16]} is not listed")

    def check_noise(self, claim: Noised) -> None:
        """Whether a private claim has noise enough, and from where it must be. Raises PolicyRefusal."""
        if claim.simulated and not self.simulation:
            self._refuse("simulation", "the noise comes from a seed, which protects nobody")
        least = claim.noise_multiplier
        if isinstance(claim, GaussianSums):
            least = min(least, claim.count_multiplier, claim.prediction_multiplier)
        if self.min_noise_multiplier is None:
            self._refuse("min_noise_multiplier", "is not set, so no private release may leave")
        if not least >= self.min_noise_multiplier * (1 - ROUNDING):
            self._refuse(
                "min_noise_multiplier",
                f"a noise multiplier of {least:.4g} is below {self.min_noise_multiplier:g}",
            )

    def _check_nonprivate(self, release: Release) -> None:
        assert isinstance(release.claim, NonPrivate)
        kind = release.kind
        listed = _listed(kind)
        if listed not in self.nonprivate:
            self._refuse("nonprivate", f"{listed.value} may not leave without differential privacy")
        if kind is PayloadKind.EMBEDDING_CENTROIDS and self.allow_embedding_centroids is None:
            self._refuse(
                "allow_embedding_centroids",
                f"without noise {PERMIT_EMBEDDINGS}; the clause must hold exactly this sentence",
            )
        if kind in _CENTROIDS:
            self._check_sizes(release)

    def _check_sizes(self, release: Release) -> None:
        sizes, centroids = release.tensors.get("sizes"), release.tensors.get("centroids")
        if sizes is None or centroids is None or sizes.shape != centroids.shape[:1]:
            self._refuse(
                "min_cluster_size", "the release does not say how many rows each centroid stands for"
            )
        if self.min_cluster_size is None:
            self._refuse("min_cluster_size", "is not set, so no centroid without noise may leave")
        # Written so that NaN, which is not below anything, is refused too.
        if not bool(np.all(sizes >= self.min_cluster_size)):
            self._refuse("min_cluster_size", f"a centroid stands for fewer than {self.min_cluster_size} rows")


def _listed(kind: PayloadKind) -> PayloadKind:
    """Under which kind a policy speaks of a payload."""
    return PayloadKind.MODEL if kind in _PROTECTIONS and kind not in _LISTED else kind


def _read_own(path: Path) -> bytes:
    """The bytes of a file that nobody but its owner can write; checked on the open file, not on its name."""
    try:
        # Opening a pipe would wait for its writer without O_NONBLOCK.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            check_guarded(os.fstat(file.fileno()), str(path), "a policy", private=False)
            # Whoever can write to the folder can put another policy there, or take the kill switch away.
            folder = path.parent
            check_guarded(folder.stat(), str(folder), "the folder of a policy", private=False, folder=True)
            data = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise UsageError(f"{path!s}: cannot be read ({reason})") from error
    if len(data) > _MAX_FILE:
        raise UsageError(f"{path}: is larger than the {_MAX_FILE} bytes that a policy may have")
    return data
