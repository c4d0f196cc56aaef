from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kvtier_sdk import (
    ChunkNotFoundError,
    MemoryTier,
    TierAuthError,
    TierError,
    Transfer,
    make_offload_key,
)
from kvtier_sdk.testing import (
    CHECKS,
    CheckSkipped,
    Fault,
    FaultKind,
    FaultPlan,
    Probe,
    TierSubject,
    VirtualClock,
    faulty,
)
from kvtier_sdk.testing.conformance.rules import run_check

KEYS = [make_offload_key(bytes([number]) * 32) for number in range(4)]
OK = ["ok"] * 4


class Strict(MemoryTier):
    """A tier that fails on an empty payload, and with ``fixed_length`` also on a short one."""

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        least = self.context.payload_bytes if self.fixed_length else 1
        assert all(len(transfer.payload) >= least for transfer in batch)
        return await super().store(batch)


class StrictOneLength(Strict):
    fixed_length = True


def play(
    plan: FaultPlan,
    body: Callable[[Probe], Awaitable[None]],
    tier_class: type[MemoryTier] = MemoryTier,
) -> None:
    subject = TierSubject(faulty(tier_class, plan), chunk_bytes=256, clock=VirtualClock())

    async def run() -> None:
        async with subject.opened() as probe:
            await body(probe)

    loop = subject.clock.new_event_loop()
    loop.run_until_complete(run())
    loop.close()


async def outcomes(probe: Probe, operation: str, object_bytes: int | None = None) -> list[str]:
    stored = [probe.full(key, object_bytes=object_bytes) for key in KEYS]
    wanted = [one.content for one in stored]
    lent = stored if operation == "store" else [probe.empty(key) for key in KEYS]
    try:
        moved: Any = await getattr(probe.tier, operation)([one.transfer for one in lent])
    except TierError as error:
        moved = [error] * len(lent)
    same = [one.content == content for one, content in zip(lent, wanted, strict=True)]
    return [
        type(error).__name__ if error else "ok" if is_same else "damaged"
        for error, is_same in zip(moved, same, strict=True)
    ]


def test_an_error_is_of_the_class_that_is_asked_for() -> None:
    async def body(probe: Probe) -> None:
        assert await outcomes(probe, "store") == OK
        assert await outcomes(probe, "load") == ["TierAuthError"] * 4
        assert await outcomes(probe, "load") == OK

    play(FaultPlan([Fault(FaultKind.ERROR, "load", error=TierAuthError)]), body)


def test_a_delay_is_on_the_tiers_clock() -> None:
    async def body(probe: Probe) -> None:
        start_s = probe.subject.clock.now_s()
        assert await outcomes(probe, "store") == OK
        assert probe.subject.clock.now_s() - start_s == pytest.approx(1.0)

    play(FaultPlan([Fault(FaultKind.DELAY, delay_s=1.0)]), body)


def test_a_hang_ends_when_it_is_cancelled() -> None:
    async def body(probe: Probe) -> None:
        with pytest.raises(TimeoutError):
            async with probe.subject.clock.timeout(1000.0):
                await outcomes(probe, "store")
        assert await outcomes(probe, "store") == OK

    play(FaultPlan([Fault(FaultKind.HANG)]), body)


@pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.CORRUPT])
@pytest.mark.parametrize("operation", ["store", "load"])
@pytest.mark.parametrize(
    ("tier", "payload_bytes"), [(Strict, 1), (Strict, 100), (Strict, 256), (StrictOneLength, 256)]
)
def test_damage_is_in_the_store_or_in_loaded_buffers(
    kind: FaultKind, operation: str, tier: type[MemoryTier], payload_bytes: int
) -> None:
    plan = FaultPlan([Fault(kind, operation)])

    async def body(probe: Probe) -> None:
        object_bytes = probe.tier.context.header_bytes + payload_bytes
        assert await outcomes(probe, "store", object_bytes) == OK
        assert await outcomes(probe, "load", object_bytes) == ["damaged"] * 4

    play(plan, body, tier)
    assert plan.happened == [(operation, kind)]


@pytest.mark.parametrize("operation", ["store", "load"])
def test_a_part_is_done_and_the_rest_is_not(operation: str) -> None:
    half = ["ok", "ok", "ChunkNotFoundError", "ChunkNotFoundError"]

    async def body(probe: Probe) -> None:
        assert await outcomes(probe, "store") == (half if operation == "store" else OK)
        assert await outcomes(probe, "load") == half
        assert await outcomes(probe, "load") == (half if operation == "store" else OK)

    play(FaultPlan([Fault(FaultKind.PARTIAL, operation, error=ChunkNotFoundError)]), body)


def test_a_disconnection_lasts() -> None:
    async def body(probe: Probe) -> None:
        assert await outcomes(probe, "store") == ["TierUnavailableError"] * 4
        await probe.subject.clock.sleep(0.9)
        assert await outcomes(probe, "load") == ["TierUnavailableError"] * 4
        await probe.subject.clock.sleep(0.2)
        assert await outcomes(probe, "store") == OK

    play(FaultPlan([Fault(FaultKind.DISCONNECT, delay_s=1.0)]), body)


def test_a_script_waits_for_its_operation_and_may_let_a_call_be() -> None:
    plan = FaultPlan([Fault(FaultKind.ERROR, "load"), None, Fault(FaultKind.HANG)])
    faults = [plan.next_fault(call) for call in ("store", "store", "load", "load")]
    kinds = [fault and fault.kind for fault in faults]
    assert kinds == [None, FaultKind.HANG, FaultKind.ERROR, None]


def drawn(seed: int, rate: float) -> list[Fault | None]:
    plan = FaultPlan(seed=seed, rate=rate)
    return [plan.next_fault("load") for _ in range(200)]


def test_the_same_seed_draws_the_same_faults() -> None:
    assert drawn(1, 0.3) == drawn(1, 0.3) != drawn(2, 0.3)
    assert drawn(1, 0.0) == [None] * 200
    assert {fault.kind for fault in drawn(1, 1.0) if fault} == set(FaultKind)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_wrapper_breaks_no_rule_of_its_own(check) -> None:
    if check.name == "check_it_runs_in_a_process":
        return  # the tier in the other process would not have the plan
    with contextlib.suppress(CheckSkipped):
        run_check(check, TierSubject(faulty(MemoryTier, FaultPlan())))
