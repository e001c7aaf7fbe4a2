"""The silo's policy: the file, and one test for every clause."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from securefl.account import Account
from securefl.config import PERMIT_EMBEDDINGS
from securefl.errors import BudgetExceeded, ConfigError, PolicyRefusal
from securefl.messages import Party, RoundPlan, Step
from securefl.policy import Policy
from securefl.privacy import gaussian_mu
from securefl.release import GaussianSums, NonPrivate, PayloadKind, Release

MODEL, METRICS = PayloadKind.MODEL, PayloadKind.METRICS
CENTROIDS, EMBEDDINGS = PayloadKind.CENTROIDS, PayloadKind.EMBEDDING_CENTROIDS
SERVER, PEER, STRANGER = (
    Party(name=n, key=c * 64) for n, c in (("server", "a"), ("silo-2", "b"), ("eve", "e"))
)
BASE = "c" * 64
FULL: dict[str, Any] = {
    "name": "silo-1",
    "simulation": True,
    "servers": (SERVER.key,),
    "peers": (PEER.key,),
    "base_models": (BASE,),
    "kinds": (MODEL, METRICS, CENTROIDS, EMBEDDINGS),
    "nonprivate": (MODEL, METRICS, CENTROIDS, EMBEDDINGS),
    "model_protections": ("sealed",),
    "centroid_protections": ("peer",),
    "min_cluster_size": 4,
    "max_epsilon": 8.0,
    "delta": 1e-5,
    "allow_embedding_centroids": PERMIT_EMBEDDINGS,
    "max_release_bytes": 1000,
}
PERMISSIVE = Policy(**FULL)


def but(**changes: Any) -> Policy:
    """The permissive policy with some clauses changed; None leaves a clause out."""
    values = {**FULL, **changes}
    return Policy(**{clause: value for clause, value in values.items() if value is not None})


def plan_for(answer: PayloadKind = MODEL, **changes: Any) -> RoundPlan:
    values: dict[str, Any] = {
        "run": "0" * 32,
        "round": 1,
        "rounds": 2,
        "step": Step.TRAIN,
        "method": "fedkc",
        "cohort": (Party(name="silo-1", key="d" * 64), PEER),
        "epochs": 1,
        "answer": answer,
        **changes,
    }
    return RoundPlan(**values)


def noised(simulated: bool = False) -> GaussianSums:
    return GaussianSums(
        epsilon=1.0,
        delta=1e-5,
        mu=0.25,
        clip=6.0,
        noise_multiplier=2.0,
        count_multiplier=3.0,
        prediction_multiplier=3.0,
        generator="os",
        simulated=simulated,
    )


def release_of(
    kind: PayloadKind, claim: NonPrivate | GaussianSums | None = None, sizes: tuple[float, ...] = (4, 9)
) -> Release:
    tensors: dict[str, Any] = {}
    if kind in (CENTROIDS, EMBEDDINGS):
        shape = (len(sizes), 3) if kind is CENTROIDS else (len(sizes), 2, 3)
        tensors = {"centroids": np.zeros(shape, np.float32), "sizes": np.array(sizes, np.float32)}
    return Release(kind, tensors, {}, claim or NonPrivate(reason="a test"))


def recipients_of(kind: PayloadKind) -> list[Party]:
    return [PEER] if kind in (CENTROIDS, EMBEDDINGS) else [SERVER]


def leave(policy: Policy, release: Release, recipients: list[Party] | None = None, size: int = 10) -> None:
    policy.check_release(release, recipients_of(release.kind) if recipients is None else recipients, size)


# --- what a full policy permits


@pytest.mark.parametrize("kind", [MODEL, METRICS, CENTROIDS, EMBEDDINGS])
@pytest.mark.parametrize("claim", [None, noised(), noised(simulated=True)], ids=["none", "noise", "seeded"])
def test_a_permissive_policy_permits(kind: PayloadKind, claim: GaussianSums | None) -> None:
    PERMISSIVE.check_plan(plan_for(kind), SERVER.key, BASE)
    leave(PERMISSIVE, release_of(kind, claim))


@pytest.mark.parametrize("kind", [*PayloadKind])
def test_an_empty_policy_lets_nothing_out(kind: PayloadKind) -> None:
    empty = Policy(name="silo-1")
    with pytest.raises(PolicyRefusal, match="policy of silo-1 forbids it: servers"):
        empty.check_plan(plan_for(kind), SERVER.key, BASE)
    for claim in (None, noised()):
        with pytest.raises(PolicyRefusal, match="policy of silo-1 forbids it: kinds"):
            leave(empty, release_of(kind, claim))
    with pytest.raises(BudgetExceeded, match="max_epsilon: is not set"):
        empty.check_budget(Account().with_claim(noised()))


# --- clause by clause: the one change from the permissive policy is what refuses


def test_clause_servers() -> None:
    with pytest.raises(PolicyRefusal, match=": servers: the server eeee"):
        PERMISSIVE.check_plan(plan_for(), STRANGER.key, BASE)
    for kind in (MODEL, METRICS):
        for parties in ([STRANGER], [SERVER, STRANGER], [PEER], []):
            with pytest.raises(PolicyRefusal, match=": servers: "):
                leave(PERMISSIVE, release_of(kind), parties)
    with pytest.raises(PolicyRefusal, match=": servers: "):  # the name proves nothing
        leave(PERMISSIVE, release_of(MODEL), [Party(name="server", key=STRANGER.key)])


def test_clause_peers() -> None:
    for kind in (CENTROIDS, EMBEDDINGS):
        for parties in ([STRANGER], [PEER, STRANGER], [SERVER], []):
            with pytest.raises(PolicyRefusal, match=": peers: "):
                leave(PERMISSIVE, release_of(kind), parties)
    with pytest.raises(PolicyRefusal, match=": peers: eve"):
        PERMISSIVE.check_plan(plan_for(CENTROIDS, cohort=(PEER, STRANGER)), SERVER.key, BASE)
    PERMISSIVE.check_plan(plan_for(MODEL, cohort=(PEER, STRANGER)), SERVER.key, BASE)  # nothing goes to them


def test_clause_base_models() -> None:
    with pytest.raises(PolicyRefusal, match=": base_models: "):
        PERMISSIVE.check_plan(plan_for(), SERVER.key, "0" * 64)


@pytest.mark.parametrize("kind", [MODEL, METRICS, CENTROIDS, EMBEDDINGS])
def test_clause_kinds(kind: PayloadKind) -> None:
    others = tuple(one for one in FULL["kinds"] if one is not kind)
    with pytest.raises(PolicyRefusal, match=f": kinds: {kind.value} is not listed"):
        but(kinds=others).check_plan(plan_for(kind), SERVER.key, BASE)
    with pytest.raises(PolicyRefusal, match=f": kinds: {kind.value} is not listed"):
        leave(but(kinds=others), release_of(kind))


@pytest.mark.parametrize("kind", [MODEL, METRICS, CENTROIDS, EMBEDDINGS])
def test_clause_nonprivate(kind: PayloadKind) -> None:
    strict = but(nonprivate=tuple(one for one in FULL["nonprivate"] if one is not kind))
    with pytest.raises(PolicyRefusal, match=f": nonprivate: {kind.value}"):
        leave(strict, release_of(kind))
    leave(strict, release_of(kind, noised()))


def test_clause_model_protections() -> None:
    for policy in (but(model_protections=()), but(model_protections=("masked", "ckks"))):
        with pytest.raises(PolicyRefusal, match=": model_protections: sealed"):
            policy.check_plan(plan_for(MODEL), SERVER.key, BASE)
        with pytest.raises(PolicyRefusal, match=": model_protections: sealed"):
            leave(policy, release_of(MODEL))
        leave(policy, release_of(METRICS))


@pytest.mark.parametrize("kind", [CENTROIDS, EMBEDDINGS])
def test_clause_centroid_protections(kind: PayloadKind) -> None:
    for policy in (but(centroid_protections=()), but(centroid_protections=("sealed",))):
        with pytest.raises(PolicyRefusal, match=": centroid_protections: peer"):
            policy.check_plan(plan_for(kind), SERVER.key, BASE)
        with pytest.raises(PolicyRefusal, match=": centroid_protections: peer"):
            leave(policy, release_of(kind))


@pytest.mark.parametrize("kind", [CENTROIDS, EMBEDDINGS])
def test_clause_min_cluster_size(kind: PayloadKind) -> None:
    leave(PERMISSIVE, release_of(kind, sizes=(4, 4)))
    leave(PERMISSIVE, release_of(kind, sizes=()))
    for sizes in ((4.0, 3.0), (3.999, 4.0), (float("nan"), 4.0), (-5.0,)):
        with pytest.raises(PolicyRefusal, match=r": min_cluster_size: .*fewer than 4"):
            leave(PERMISSIVE, release_of(kind, sizes=sizes))
        leave(PERMISSIVE, release_of(kind, noised(), sizes=sizes))  # noisy counts bind nothing
    with pytest.raises(PolicyRefusal, match=": min_cluster_size: is not set"):
        leave(but(min_cluster_size=None), release_of(kind))
    sizeless = release_of(kind)
    for tensors in (
        {},
        {"centroids": sizeless.tensors["centroids"]},
        {**sizeless.tensors, "sizes": np.ones(1)},
    ):
        with pytest.raises(PolicyRefusal, match=": min_cluster_size: the release does not say"):
            leave(PERMISSIVE, Release(kind, tensors, {}, sizeless.claim))


def test_clause_allow_embedding_centroids() -> None:
    strict = but(allow_embedding_centroids=None)
    with pytest.raises(PolicyRefusal, match=f": allow_embedding_centroids: .*{PERMIT_EMBEDDINGS}"):
        leave(strict, release_of(EMBEDDINGS))
    leave(strict, release_of(EMBEDDINGS, noised()))
    leave(strict, release_of(CENTROIDS))
    for almost in (
        "yes",
        True,
        PERMIT_EMBEDDINGS.capitalize(),
        PERMIT_EMBEDDINGS + ".",
        PERMIT_EMBEDDINGS + " ",
    ):
        with pytest.raises(ValidationError):
            but(allow_embedding_centroids=almost)


def test_clause_simulation() -> None:
    strict = but(simulation=False)
    with pytest.raises(PolicyRefusal, match=": simulation: "):
        leave(strict, release_of(CENTROIDS, noised(simulated=True)))
    leave(strict, release_of(CENTROIDS, noised()))
    leave(strict, release_of(MODEL))


def test_clause_max_release_bytes() -> None:
    leave(PERMISSIVE, release_of(MODEL), size=1000)
    with pytest.raises(PolicyRefusal, match=": max_release_bytes: a release of 1001 bytes is above 1000"):
        leave(PERMISSIVE, release_of(MODEL), size=1001)
    with pytest.raises(PolicyRefusal, match=": max_release_bytes: "):
        leave(but(max_release_bytes=None), release_of(MODEL), size=0)


def account_at(epsilon: float, delta: float, claimed: float) -> Account:
    """An account whose one claim composes to `epsilon` at `delta` and names the delta `claimed`."""
    claim = noised().model_copy(update={"mu": gaussian_mu(epsilon, delta), "delta": claimed})
    return Account().with_claim(claim)


def test_clause_max_epsilon() -> None:
    PERMISSIVE.check_budget(Account())
    PERMISSIVE.check_budget(Account().with_claim(NonPrivate(reason="no epsilon to count")))
    PERMISSIVE.check_budget(account_at(8.0, 1e-5, 1e-5))  # calibrated to the very ceiling
    with pytest.raises(BudgetExceeded, match=r": max_epsilon: .*epsilon 8\.01 at delta 1e-05, above 8"):
        PERMISSIVE.check_budget(account_at(8.01, 1e-5, 1e-5))
    with pytest.raises(BudgetExceeded, match=": max_epsilon: is not set"):
        but(max_epsilon=None).check_budget(account_at(0.1, 1e-5, 1e-5))


def test_clause_delta() -> None:
    with pytest.raises(BudgetExceeded, match=": delta: is not set"):
        but(delta=None).check_budget(account_at(0.1, 1e-5, 1e-5))
    # A claim at a laxer or stricter delta is measured at the policy's own.
    with pytest.raises(BudgetExceeded, match=r"epsilon 8\.1 at delta 1e-05"):
        PERMISSIVE.check_budget(account_at(8.1, 1e-5, 0.1))
    PERMISSIVE.check_budget(account_at(7.9, 1e-5, 1e-9))


def test_a_budget_is_that_of_all_releases_together() -> None:
    """Two releases of mu compose to sqrt(2) mu: one of epsilon 8 may leave, not both."""
    account = account_at(8.0, 1e-5, 1e-5)
    PERMISSIVE.check_budget(account)
    with pytest.raises(BudgetExceeded):
        PERMISSIVE.check_budget(account.with_claim(noised().model_copy(update={"mu": account.mu})))


# --- the file


@pytest.mark.parametrize("policy", [PERMISSIVE, Policy(name="silo-1"), but(max_epsilon=1e-9, delta=None)])
def test_a_policy_survives_its_file(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "p.toml")
    assert Policy.load(tmp_path / "p.toml") == policy
    document = tomllib.loads(policy.to_toml())
    assert document == {
        clause: value for clause, value in policy.model_dump(mode="json").items() if value is not None
    }


def test_every_clause_is_in_the_file_with_its_meaning() -> None:
    text = Policy(name="silo-1").to_toml()
    for clause, field in Policy.model_fields.items():
        assert f"{clause} = " in text
        assert f"# {field.description}\n" in text
    assert "# max_epsilon = (unset)" in text
    assert PERMIT_EMBEDDINGS in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name: Field required"),
        ('name = "silo-1"\nmax_epsilonn = 3', "max_epsilonn: unknown clause"),
        ('name = "silo-1"\nsimulation = "true"', "simulation: "),
        ('name = "silo-1"\nsimulation = 1', "simulation: "),
        ('name = "silo-1"\nmax_epsilon = -1', "max_epsilon: "),
        ('name = "silo-1"\nmax_epsilon = inf', "not finite"),
        ('name = "silo-1"\nmax_epsilon = nan', "not finite"),
        ('name = "silo-1"\nmax_epsilon = 2026-01-01', "a date"),
        ('name = "silo-1"\ndelta = 1', "delta: "),
        ('name = "silo-1"\nmin_cluster_size = 0', "min_cluster_size: "),
        ('name = "silo-1"\nmin_cluster_size = 2.5', "min_cluster_size: "),
        ('name = "silo-1"\nservers = ["server"]', r"servers\.0: "),
        ('name = "silo-1"\nkinds = ["rows"]', r"kinds\.0: "),
        ('name = "silo-1"\nkinds = ["plan"]', "kinds: .*not releases"),
        ('name = "silo-1"\nmodel_protections = ["none"]', r"model_protections\.0: "),
        ('name = "silo-1"\nallow_embedding_centroids = true', "allow_embedding_centroids: "),
        ('name = "Silo 1"', "name: "),
        ("name = ", "is not valid TOML"),
        ('name = "silo-1"\nname = "silo-2"', "is not valid TOML"),
    ],
)
def test_a_bad_file_is_one_sentence_with_the_clause(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"policy\.toml: .*{message}") as caught:
        Policy.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Policy.load(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="is not UTF-8"):
        Policy.load(tmp_path / "latin.toml")


def test_a_policy_is_frozen() -> None:
    with pytest.raises(ValidationError):
        PERMISSIVE.max_epsilon = 100.0  # type: ignore[misc]
