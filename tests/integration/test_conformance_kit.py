"""The kit rejects each broken tier by the check that its fault belongs to, and no odd one."""

from __future__ import annotations

import pytest

from kvtier_sdk.testing import CHECKS, Check, CheckSkipped, ConformanceError, TierSubject
from kvtier_sdk.testing.broken import BROKEN_TIERS, BrokenTier
from kvtier_sdk.testing.conformance.suite import run_check
from kvtier_sdk.testing.odd import ODD_TIERS, OddTier
from kvtier_sdk.testing.shelf import ShelfTier, shelf_subject

#: How long a broken tier is waited for where its fault is that it never ends. A tier that is well
#: never takes so long, however busy the machine.
_PATIENCE_S = 2.0
_ENDLESS = {
    "check_a_cancelled_call_ends",
    "check_a_tier_comes_back_after_an_outage",
    "check_close_ends",
    "check_close_ends_what_runs",
}


def outcome(check: Check, subject: TierSubject) -> ConformanceError | CheckSkipped | None:
    try:
        run_check(check, subject)
    except (ConformanceError, CheckSkipped) as error:
        return error
    return None


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_tier_that_the_others_are_made_from_is_well(check: Check) -> None:
    assert outcome(check, shelf_subject(ShelfTier)) is None


@pytest.mark.parametrize("tier", BROKEN_TIERS, ids=lambda tier: tier.__name__)
def test_a_broken_tier_fails_its_own_check_and_no_other(tier: type[BrokenTier]) -> None:
    patience = {"patience_s": _PATIENCE_S} if tier.fails in _ENDLESS else {}
    outcomes = {
        name: outcome(check, shelf_subject(tier, **patience)) for name, check in CHECKS.items()
    }
    failed = {name: str(error) for name, error in outcomes.items() if error is not None}
    assert list(failed) == [tier.fails], failed
    check = CHECKS[tier.fails]
    assert check.rule in failed[tier.fails]
    assert f'contract: "{check.says}"' in failed[tier.fails]


@pytest.mark.parametrize("tier", ODD_TIERS, ids=lambda tier: tier.__name__)
def test_an_odd_tier_passes_every_check(tier: type[OddTier]) -> None:
    outcomes = {
        name: outcome(check, shelf_subject(tier, **tier.settings)) for name, check in CHECKS.items()
    }
    assert {
        name: str(error) for name, error in outcomes.items() if isinstance(error, ConformanceError)
    } == {}
    skipped = {str(error) for error in outcomes.values() if isinstance(error, CheckSkipped)}
    undeclared = ~tier.capabilities
    assert skipped == {f"capability {one.name} is not declared" for one in undeclared}


def test_every_check_but_one_has_a_tier_that_fails_it() -> None:
    # What fails in a thread fails in a process too.
    assert CHECKS.keys() - {tier.fails for tier in BROKEN_TIERS} == {"check_it_runs_in_a_thread"}
