"""Each broken tier fails the check for its fault; unusual but correct tiers pass every check."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.tiers import broken
from support.tiers.broken import BROKEN_TIERS, BrokenTier
from support.tiers.odd import ODD_TIERS, LandsLate, OddTier
from support.tiers.shelf import ShelfTier, shelf_subject

from kvtier_sdk import BackendLoadError, Medium, OffloadKey, SystemClock, Transfer
from kvtier_sdk.testing import (
    CHECKS,
    Check,
    CheckSkipped,
    ConformanceError,
    Hook,
    TierConformance,
    TierSubject,
    VirtualClock,
    tier_state_machine,
)
from kvtier_sdk.testing.conformance import chunks, outages
from kvtier_sdk.testing.conformance.machine import run_sequences
from kvtier_sdk.testing.conformance.rules import run_check

#: Checks that need real time. All others run on virtual time, where a hung call times out at once.
REAL_TIME = {
    "check_it_runs_in_a_process",
    "check_it_runs_in_a_thread",
    "check_processes_share_a_place",
    "check_no_descriptor_is_left",
    "check_no_thread_is_left",
    "check_the_loop_is_never_blocked",
}
IN_A_PROCESS = {"check_it_runs_in_a_process", "check_processes_share_a_place"}
#: Small chunks, because the checks spend most of their time filling and comparing chunks.
CHUNK_BYTES = 512


def outcome(check: Check, subject: TierSubject) -> ConformanceError | CheckSkipped | None:
    try:
        run_check(check, subject)
    except (ConformanceError, CheckSkipped) as error:
        return error
    return None


def outcome_of(check: Check, tier: Any) -> Any:
    clock = SystemClock() if check.name in REAL_TIME else VirtualClock()
    options: dict[str, Any] = {"clock": clock, "chunk_bytes": CHUNK_BYTES}
    options |= getattr(tier, "settings", {})
    if check.name != "check_processes_share_a_place":
        return outcome(check, shelf_subject(tier, **options))
    with tempfile.TemporaryDirectory() as directory:
        return outcome(check, shelf_subject(tier, Path(directory), **options))


def outcomes_of(
    tier: type[BrokenTier | OddTier], checks: Iterable[Check]
) -> dict[str, ConformanceError | CheckSkipped]:
    outcomes = {check.name: outcome_of(check, tier) for check in checks}
    return {name: error for name, error in outcomes.items() if error is not None}


@pytest.fixture(autouse=True)
def short_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small chunks in the outage checks, and big batches only in the tests of big batches."""
    monkeypatch.setattr(outages, "_CHUNK_BYTES", CHUNK_BYTES)
    if not re.search("big_?batch", request.node.name, re.IGNORECASE):
        monkeypatch.setattr(chunks, "_BIG_BATCH", 32)


@pytest.mark.parametrize("tier", BROKEN_TIERS, ids=lambda tier: tier.__name__)
def test_a_broken_tier_fails_its_own_check_and_no_other(tier: type[BrokenTier]) -> None:
    own = CHECKS[tier.fails]
    # Running all checks on all tiers takes too long, so a tier gets only every fourth check.
    others = list(CHECKS.values())[BROKEN_TIERS.index(tier) % 4 :: 4]
    checks = [own, *(c for c in others if c.name not in IN_A_PROCESS and c is not own)]
    failed = {name: str(error) for name, error in outcomes_of(tier, checks).items()}
    assert list(failed) == [tier.fails], failed
    assert own.rule in failed[tier.fails]
    assert f'contract: "{own.says}"' in failed[tier.fails]
    assert tier.message in failed[tier.fails]


@pytest.mark.parametrize("tier", ODD_TIERS, ids=lambda tier: tier.__name__)
def test_an_odd_tier_passes_every_check(tier: type[OddTier]) -> None:
    checks = [
        check for check in CHECKS.values() if tier.in_processes or check.name not in IN_A_PROCESS
    ]
    outcomes = outcomes_of(tier, checks)
    assert {
        name: str(error) for name, error in outcomes.items() if isinstance(error, ConformanceError)
    } == {}
    skipped = {str(error) for error in outcomes.values()}
    reasons = {f"capability {one.name} is not declared" for one in ~tier.capabilities}
    if tier.fixed_length:
        reasons.add("fixed_length is declared")
    if tier.medium is Medium.CPU:
        reasons.add("medium CPU is declared, not STORAGE")
    assert skipped == reasons


def test_every_check_but_one_has_a_tier_that_fails_it() -> None:
    # No tier fails only in a thread, because a tier that fails in a thread fails in a process too.
    assert CHECKS.keys() - {tier.fails for tier in BROKEN_TIERS} == {"check_it_runs_in_a_thread"}


@pytest.mark.parametrize("tier", [broken.MixesABatchUp, broken.LeavesAPart, broken.LeavesTheOldEnd])
def test_the_state_machine_finds_wrong_bytes(tier: type[BrokenTier]) -> None:
    machine = tier_state_machine(lambda: shelf_subject(tier, clock=VirtualClock()))
    with pytest.raises(ConformanceError, match="a load succeeded, but"):
        run_state_machine_as_test(
            machine,
            # One failing example is enough, so Hypothesis does not search for a shorter one.
            settings=settings(
                max_examples=500, deadline=None, database=None, phases=[Phase.generate]
            ),
        )


def test_the_state_machine_allows_a_cancelled_store_to_land_after_a_deletion() -> None:
    run_sequences(shelf_subject(LandsLate, clock=VirtualClock()), sequences=200)


def sequences_until_failure(shrink_s: int) -> int:
    opened = []

    class Counting(broken.AbsentIsSuccess):
        async def open(self) -> None:
            opened.append(None)
            await super().open()

    suite = TierConformance()
    suite.sequences, suite.shrink_s = 500, shrink_s  # type: ignore[misc]
    with pytest.raises(ConformanceError, match="a load succeeded, but"):
        suite.test_any_sequence_of_calls(shelf_subject(Counting, clock=VirtualClock()))
    return len(opened)


def test_the_search_for_a_shorter_sequence_is_bounded() -> None:
    assert sequences_until_failure(0) < sequences_until_failure(60)


class Unsteady(ShelfTier):
    async def load_chunk(self, transfer: Transfer) -> None:
        await super().load_chunk(transfer)
        if "unsteady" not in self.shelf.marks:
            self.shelf.marks.add("unsteady")
            transfer.payload[:] = bytes(len(transfer.payload))


def test_a_failure_that_does_not_repeat_is_shown_as_its_rule() -> None:
    subject = shelf_subject(Unsteady, clock=VirtualClock())
    with pytest.raises(ConformanceError, match="After any sequence of calls"):
        TierConformance().test_any_sequence_of_calls(subject)


def test_the_sequences_come_last() -> None:
    tests = [name for name in vars(TierConformance) if name.startswith("test_")]
    assert tests[-1] == "test_any_sequence_of_calls"
    assert len(tests) == 1 + len(CHECKS)


def raises_at_once(*_: object) -> None:
    raise LookupError("of its author")


@pytest.mark.parametrize("hook", ["read_raw", "write_raw", "break_connection", "lose_part"])
def test_an_exception_of_a_hook_is_shown_as_the_rule(hook: str) -> None:
    subject = shelf_subject(ShelfTier, clock=VirtualClock())
    setattr(subject, hook, raises_at_once)
    checks = [check for check in CHECKS.values() if Hook(hook) in check.needs]
    assert checks
    for check in checks:
        error = outcome(check, subject)
        assert isinstance(error, ConformanceError)
        assert check.rule in str(error)
        assert "LookupError: of its author" in str(error)
        assert "test_conformance_kit.py:" in str(error)


class NoVersion(ShelfTier):
    contract_version = 2


def test_a_fault_of_the_class_is_named_before_any_check() -> None:
    with pytest.raises(BackendLoadError, match="it declares contract_version 2"):
        shelf_subject(NoVersion, clock=VirtualClock())


def test_an_object_that_the_store_cannot_hold_is_passed_over() -> None:
    subject = shelf_subject(ShelfTier, clock=VirtualClock())
    write, written = subject.write_raw, []
    assert write is not None

    def declines_some(key: OffloadKey, data: bytes) -> bool:
        written.append(len(data))
        if len(written) % 2:
            write(key, data)
        return bool(len(written) % 2)

    subject.write_raw = declines_some
    checks = [check for check in CHECKS.values() if Hook.WRITE_RAW in check.needs]
    assert [outcome(check, subject) for check in checks] == [None] * len(checks)
    assert written
    subject.write_raw = lambda key, data: False
    for check in checks:
        assert str(outcome(check, subject)) == "write_raw declined every object"


def test_a_tier_that_fails_in_a_thread_is_told_so() -> None:
    subject = shelf_subject(ShelfTier)
    subject.break_connection()  # type: ignore[misc]
    error = outcome(CHECKS["check_it_runs_in_a_thread"], subject)
    assert isinstance(error, ConformanceError)
    assert "with runner 'thread': TierUnavailableError: " in str(error)
