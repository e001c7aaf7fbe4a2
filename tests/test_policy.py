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
from securefl.policy import Ceiling, Policy
from securefl.privacy import gaussian_mu, zcdp_rho
from securefl.release import Claim, GaussianSums, NonPrivate, PayloadKind, Release
from tests.ledgers import distributed

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
    "min_noise_multiplier": 2.0,
    "datasets": {"ward": Ceiling(max_epsilon=8.0, delta=1e-5)},
    "allow_embedding_centroids": PERMIT_EMBEDDINGS,
    "max_release_bytes": 1000,
    "max_bytes_per_day": 5000,
    "approval": "automatic",
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
        "protection": "sealed",
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


def release_of(kind: PayloadKind, claim: Claim | None = None, sizes: tuple[float, ...] = (4, 9)) -> Release:
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
    PERMISSIVE.check_plan(plan_for(kind), SERVER.key, BASE, "ward")
    leave(PERMISSIVE, release_of(kind, claim))


@pytest.mark.parametrize("kind", [*PayloadKind])
def test_an_empty_policy_lets_nothing_out(kind: PayloadKind) -> None:
    empty = Policy(name="silo-1")
    with pytest.raises(PolicyRefusal, match="policy of silo-1 forbids it: approval"):
        empty.check_plan(plan_for(kind), SERVER.key, BASE, "ward")
    for claim in (None, noised()):
        with pytest.raises(PolicyRefusal, match="policy of silo-1 forbids it: kinds"):
            leave(empty, release_of(kind, claim))
    for account in (Account(), Account().with_claim(noised())):
        with pytest.raises(PolicyRefusal, match="datasets: ward is not listed"):
            empty.check_budget("ward", account)
    with pytest.raises(PolicyRefusal, match="max_bytes_per_day: 1 bytes"):
        empty.check_day(1)


# --- clause by clause: the one change from the permissive policy is what refuses


def test_clause_servers() -> None:
    with pytest.raises(PolicyRefusal, match=": servers: the server eeee"):
        PERMISSIVE.check_plan(plan_for(), STRANGER.key, BASE, "ward")
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
        PERMISSIVE.check_plan(plan_for(CENTROIDS, cohort=(PEER, STRANGER)), SERVER.key, BASE, "ward")
    PERMISSIVE.check_plan(
        plan_for(MODEL, cohort=(PEER, STRANGER)), SERVER.key, BASE, "ward"
    )  # nothing goes to them


def test_clause_base_models() -> None:
    with pytest.raises(PolicyRefusal, match=": base_models: "):
        PERMISSIVE.check_plan(plan_for(), SERVER.key, "0" * 64, "ward")


@pytest.mark.parametrize("kind", [MODEL, METRICS, CENTROIDS, EMBEDDINGS])
def test_clause_kinds(kind: PayloadKind) -> None:
    others = tuple(one for one in FULL["kinds"] if one is not kind)
    with pytest.raises(PolicyRefusal, match=f": kinds: {kind.value} is not listed"):
        but(kinds=others).check_plan(plan_for(kind), SERVER.key, BASE, "ward")
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
            policy.check_plan(plan_for(MODEL), SERVER.key, BASE, "ward")
        with pytest.raises(PolicyRefusal, match=": model_protections: sealed"):
            leave(policy, release_of(MODEL))
        leave(policy, release_of(METRICS))


@pytest.mark.parametrize("kind", [CENTROIDS, EMBEDDINGS])
def test_clause_centroid_protections(kind: PayloadKind) -> None:
    for policy in (but(centroid_protections=()), but(centroid_protections=("sealed",))):
        with pytest.raises(PolicyRefusal, match=": centroid_protections: peer"):
            policy.check_plan(plan_for(kind), SERVER.key, BASE, "ward")
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


def test_clause_datasets() -> None:
    PERMISSIVE.check_budget("ward", Account())
    PERMISSIVE.check_budget("ward", Account().with_claim(NonPrivate(reason="no epsilon to count")))
    PERMISSIVE.check_budget("ward", account_at(8.0, 1e-5, 1e-5))  # calibrated to the very ceiling
    with pytest.raises(BudgetExceeded, match=r": datasets\.ward: .*epsilon 8\.01 at delta 1e-05, above 8"):
        PERMISSIVE.check_budget("ward", account_at(8.01, 1e-5, 1e-5))
    # A claim at a laxer or stricter delta is measured at the policy's own.
    with pytest.raises(BudgetExceeded, match=r"epsilon 8\.1 at delta 1e-05"):
        PERMISSIVE.check_budget("ward", account_at(8.1, 1e-5, 0.1))
    PERMISSIVE.check_budget("ward", account_at(7.9, 1e-5, 1e-9))


@pytest.mark.parametrize("name", ["", "wards", "war", "Ward", "ward\n", "*", ".*"])
def test_a_data_set_is_named_whole(name: str) -> None:
    with pytest.raises(PolicyRefusal, match=": datasets: "):
        PERMISSIVE.check_plan(plan_for(), SERVER.key, BASE, name)
    with pytest.raises(PolicyRefusal, match=": datasets: "):
        PERMISSIVE.check_budget(name, Account())


def test_each_data_set_has_its_own_ceiling() -> None:
    two = but(
        datasets={
            "ward": Ceiling(max_epsilon=8.0, delta=1e-5),
            "lab": Ceiling(max_epsilon=1.0, delta=1e-7),
        }
    )
    account = account_at(2.0, 1e-5, 1e-5)
    two.check_budget("ward", account)
    with pytest.raises(BudgetExceeded, match=r": datasets\.lab: "):
        two.check_budget("lab", account)


def test_clause_min_noise_multiplier() -> None:
    leave(PERMISSIVE, release_of(CENTROIDS, noised()))  # its smallest multiplier is the clause's 2
    for part in ("noise_multiplier", "count_multiplier", "prediction_multiplier"):
        weaker = noised().model_copy(update={part: 1.99})
        with pytest.raises(PolicyRefusal, match=r": min_noise_multiplier: .* 1\.99 is below 2"):
            leave(PERMISSIVE, release_of(CENTROIDS, weaker))
    with pytest.raises(PolicyRefusal, match=": min_noise_multiplier: is not set"):
        leave(but(min_noise_multiplier=None), release_of(CENTROIDS, noised()))


def test_shares_of_noise_have_a_least_multiplier_and_a_budget_too() -> None:
    share = distributed(1 / 8)  # its multiplier is the clause's 2
    leave(PERMISSIVE, release_of(MODEL, share))
    with pytest.raises(PolicyRefusal, match=r": min_noise_multiplier: .* 1\.99 is below 2"):
        leave(PERMISSIVE, release_of(MODEL, share.model_copy(update={"noise_multiplier": 1.99})))
    with pytest.raises(PolicyRefusal, match=": min_noise_multiplier: is not set"):
        leave(but(min_noise_multiplier=None), release_of(MODEL, share))
    with pytest.raises(PolicyRefusal, match=": simulation: "):
        leave(but(simulation=False), release_of(MODEL, distributed(1 / 8, simulated=True)))
    rho = zcdp_rho(8.0, 1e-5)
    PERMISSIVE.check_budget("ward", Account().with_claim(distributed(rho)))
    with pytest.raises(BudgetExceeded, match=r"epsilon 8\.0\d+ at delta 1e-05, above 8"):
        PERMISSIVE.check_budget("ward", Account().with_claim(distributed(rho)).with_claim(distributed(0.01)))


def test_clause_max_bytes_per_day() -> None:
    PERMISSIVE.check_day(5000)
    with pytest.raises(PolicyRefusal, match=": max_bytes_per_day: 5001 bytes within 24 hours are above 5000"):
        PERMISSIVE.check_day(5001)
    with pytest.raises(PolicyRefusal, match=": max_bytes_per_day: "):
        but(max_bytes_per_day=None).check_day(0)


def test_clause_approval() -> None:
    but(approval="manual").check_plan(
        plan_for(), SERVER.key, BASE, "ward"
    )  # the ledger knows what is approved
    with pytest.raises(PolicyRefusal, match=": approval: is not set"):
        but(approval=None).check_plan(plan_for(), SERVER.key, BASE, "ward")


def test_clause_kill_switch(tmp_path: Path) -> None:
    switch = tmp_path / "deep" / "halt"
    switch.parent.mkdir()
    policy = but(kill_switch=str(switch))
    policy.check_plan(plan_for(), SERVER.key, BASE, "ward")
    leave(policy, release_of(MODEL))
    for throw in (switch.touch, switch.mkdir, lambda: switch.symlink_to(tmp_path / "nowhere")):
        throw()
        assert policy.stopped()
        with pytest.raises(PolicyRefusal, match=": kill_switch: "):
            policy.check_plan(plan_for(), SERVER.key, BASE, "ward")
        with pytest.raises(PolicyRefusal, match=": kill_switch: "):
            leave(policy, release_of(MODEL))
        switch.rmdir() if switch.is_dir() else switch.unlink()
        assert not policy.stopped()
    switch.parent.rmdir()  # a share that is not mounted cannot say that all is well
    assert policy.stopped()
    (tmp_path / "deep").touch()
    assert policy.stopped()


def test_the_kill_switch_lies_beside_the_policy_unless_named(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    for given, switch in ((None, tmp_path / "STOP"), ("halt", tmp_path / "halt"), ("/x/y", Path("/x/y"))):
        but(kill_switch=given).save(path)
        assert Policy.load(path).kill_switch == str(switch)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_policy_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "policy.toml"
    PERMISSIVE.save(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"policy\.toml: others can change a policy"):
        Policy.load(path)


def test_a_budget_is_that_of_all_releases_together() -> None:
    """Two releases of mu compose to sqrt(2) mu: one of epsilon 8 may leave, not both."""
    account = account_at(8.0, 1e-5, 1e-5)
    PERMISSIVE.check_budget("ward", account)
    with pytest.raises(BudgetExceeded):
        PERMISSIVE.check_budget("ward", account.with_claim(noised().model_copy(update={"mu": account.mu})))


# --- the file


@pytest.mark.parametrize(
    "policy",
    [
        but(kill_switch="/run/état/\u4e2d\U0001f6d1"),
        Policy(name="silo-1", kill_switch="/s"),
        but(
            kill_switch="/s",
            datasets={
                "a.b": Ceiling(max_epsilon=1e-9, delta=0.5),
                "0-9": Ceiling(max_epsilon=1e9, delta=1e-300),
            },
        ),
    ],
)
def test_a_policy_survives_its_file(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "p.toml")
    assert Policy.load(tmp_path / "p.toml") == policy
    document = tomllib.loads(policy.to_toml())
    assert document == {
        clause: value for clause, value in policy.model_dump(mode="json").items() if value not in (None, {})
    }


def test_every_clause_is_in_the_file_with_its_meaning() -> None:
    text = Policy(name="silo-1").to_toml()
    for clause, field in Policy.model_fields.items():
        assert clause == "datasets" or f"{clause} = " in text
        assert f"# {field.description}\n" in text
    assert "# max_bytes_per_day = (unset)" in text
    assert PERMIT_EMBEDDINGS in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name: Field required"),
        ('name = "silo-1"\nmax_epsilon = 3', "max_epsilon: unknown clause"),
        ('name = "silo-1"\napproval = "yes"', "approval: "),
        ('name = "silo-1"\nmin_envelope_version = 0', "min_envelope_version: "),
        ('name = "silo-1"\n[datasets.Ward]\nmax_epsilon = 1\ndelta = 0.1', r"datasets\.Ward"),
        ('name = "silo-1"\n[datasets.ward]\nmax_epsilon = 1', r"datasets\.ward\.delta: Field required"),
        ('name = "silo-1"\nsimulation = "true"', "simulation: "),
        ('name = "silo-1"\nsimulation = 1', "simulation: "),
        ('name = "silo-1"\n[datasets.ward]\ndelta = 0.1\nmax_epsilon = -1', r"datasets\.ward\.max_epsilon: "),
        ('name = "silo-1"\n[datasets.ward]\ndelta = 0.1\nmax_epsilon = inf', "not finite"),
        ('name = "silo-1"\n[datasets.ward]\ndelta = 0.1\nmax_epsilon = nan', "not finite"),
        ('name = "silo-1"\n[datasets.ward]\ndelta = 0.1\nmax_epsilon = 2026-01-01', "a date"),
        ('name = "silo-1"\n[datasets.ward]\nmax_epsilon = 1\ndelta = 1', r"datasets\.ward\.delta: "),
        ('name = "silo-1"\nmin_cluster_size = 0', "min_cluster_size: "),
        ('name = "silo-1"\nmin_cluster_size = 2.5', "min_cluster_size: "),
        ('name = "silo-1"\nservers = ["server"]', r"servers\.0: "),
        ('name = "silo-1"\nkinds = ["rows"]', r"kinds\.0: "),
        ('name = "silo-1"\nkinds = ["plan"]', "kinds: .*not listed by itself"),
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
        PERMISSIVE.max_release_bytes = 10**6  # type: ignore[misc]
