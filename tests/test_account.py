"""What releases of both kinds of noise add up to; the account of a ledger is tested with the ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, ZCDpEvent
from dp_accounting.rdp import RdpAccountant

from securefl.account import Account
from securefl.errors import BudgetExceeded, LedgerCorrupt
from securefl.ledger import Ledger, verify_ledger
from securefl.ledger_copies import export_ledger, restore_ledger
from securefl.privacy import gaussian_epsilon, zcdp_epsilon
from tests.ledgers import PLAIN, SILO, charge, clock, distributed, gaussian


def test_gaussian_releases_alone_keep_their_exact_epsilon() -> None:
    account = Account().with_claim(gaussian(0.3)).with_claim(gaussian(0.4))
    assert account.mu == pytest.approx(0.5, rel=1e-12)
    assert account.rho == 0
    assert account.private_epsilon == pytest.approx(gaussian_epsilon(0.5, 1e-5), rel=1e-9)
    assert account.private_epsilon_at(1e-6) == pytest.approx(gaussian_epsilon(0.5, 1e-6), rel=1e-9)


def test_shares_of_noise_add_their_rho() -> None:
    account = Account().with_claim(distributed(0.02)).with_claim(distributed(0.03, 1e-6, simulated=True))
    assert (account.mu, account.delta, account.simulated) == (0, 1e-6, True)
    assert account.rho == pytest.approx(0.05, rel=1e-12)
    assert account.private_epsilon == account.epsilon == pytest.approx(zcdp_epsilon(0.05, 1e-6), rel=1e-9)


@pytest.mark.parametrize(("mu", "rho"), [(0.5, 0.1), (1.0, 1e-3), (0.05, 2.0)])
def test_both_together_by_dp_accounting(mu: float, rho: float) -> None:
    peer = RdpAccountant(orders=[1 + 1.003**k / 100 for k in range(4000)])
    peer.compose(GaussianDpEvent(1 / mu))
    peer.compose(ZCDpEvent(rho))
    claims = gaussian(mu), distributed(rho)
    orders = (
        Account().with_claim(claims[0]).with_claim(claims[1]),
        Account().with_claim(claims[1]).with_claim(claims[0]),
    )
    for account in orders:
        assert account.private_epsilon == pytest.approx(peer.get_epsilon(1e-5), rel=1e-5)
        assert account.private_epsilon_at(1e-7) == pytest.approx(peer.get_epsilon(1e-7), rel=1e-5)
    assert orders[0].matches(orders[1])


def test_noise_that_is_none_is_refused() -> None:
    """A mu of 10^4 is a rho of 5 x 10^7."""
    assert Account().with_claim(distributed(4.99e7)).private_epsilon == pytest.approx(4.99e7, rel=1e-2)
    with pytest.raises(BudgetExceeded, match="protects nothing"):
        Account().with_claim(distributed(5.01e7))
    with pytest.raises(BudgetExceeded, match="protects nothing"):
        Account().with_claim(gaussian(8e3)).with_claim(distributed(1.9e7))


def test_what_an_account_covers() -> None:
    before = Account().with_claim(gaussian(0.3)).with_claim(distributed(0.02))
    after = before.with_claim(distributed(0.01)).with_claim(PLAIN)
    assert after.covers(before)
    assert not before.covers(after)
    assert before.covers(before)
    assert not after.model_copy(update={"rho": 0.0}).covers(before), "the epsilon does not follow"
    lower = Account().with_claim(gaussian(0.9))
    assert not lower.covers(before), "its rho is lower, though its epsilon is higher"
    assert not after.model_copy(update={"rho": 1e9}).covers(before)
    assert not after.matches(after.model_copy(update={"rho": 0.031}))


def test_rho_is_written_only_where_there_is_one() -> None:
    """What ledgers hold from before there was one is still the one spelling of it."""
    old = Account().with_claim(gaussian(0.3)).model_dump(mode="json")
    assert set(old) == {"private_epsilon", "delta", "mu", "nonprivate", "nonprivate_releases", "simulated"}
    assert Account.model_validate_json(json.dumps(old)).model_dump(mode="json") == old
    new = Account().with_claim(distributed(0.25))
    assert new.model_dump(mode="json")["rho"] == 0.25
    assert Account.model_validate_json(new.model_dump_json()) == new


def test_a_ledger_holds_and_verifies_both(tmp_path: Path) -> None:
    path = tmp_path / "silo-1.jsonl"
    ledger = Ledger.create(path, SILO, clock=clock())
    charge(ledger, round=1, claim=gaussian(0.5))
    charge(ledger, round=2, claim=distributed(0.125))
    account = verify_ledger(path, SILO.card).account
    assert (account.mu, account.rho) == (0.5, 0.125)
    assert account.private_epsilon == pytest.approx(zcdp_epsilon(0.25, 1e-5), rel=1e-9)
    export_ledger(path, tmp_path / "copy")
    restored = tmp_path / "again.jsonl"
    restore_ledger(tmp_path / "copy", restored, SILO)
    with pytest.raises(BudgetExceeded, match="restored"):
        charge(Ledger.open(restored, SILO), round=3, claim=distributed(0.1))
    lines = path.read_bytes().splitlines(keepends=True)
    assert b'"rho":0.125' in lines[-1]
    path.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b'"rho":0.125', b'"rho":0.001')]))
    with pytest.raises(LedgerCorrupt):
        verify_ledger(path, SILO.card)
