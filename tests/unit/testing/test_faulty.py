"""Faults around a tier: each comes as planned, and the runner copes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pytest

from kvtier_sdk import (
    ChunkNotFoundError,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    RequestContext,
    RunnerOptions,
    TierAuthError,
    TierSpec,
    make_offload_key,
)
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.runner import TierLoop
from kvtier_sdk.runner.jobs import Job, JobResult, Operation, Verdict
from kvtier_sdk.testing import (
    CHECKS,
    CheckSkipped,
    Fault,
    FaultKind,
    FaultPlan,
    InlineRunner,
    TierSubject,
    VirtualClock,
    faulty,
)
from kvtier_sdk.testing.conformance.suite import run_check

KEYS = [make_offload_key(bytes([number]) * 32) for number in range(4)]
CHUNK_BYTES = 256


class Bench:
    """A faulty memory tier in a loop that is stepped by hand."""

    def __init__(self, plan: FaultPlan, **options: object) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.pool = HostPool.create(PoolLayout(4, CHUNK_BYTES))
        spec = TierSpec(
            "faulty",
            "memory",
            faulty(MemoryTier, plan),
            MemoryTierConfig.model_validate({}),
            RunnerOptions.model_validate({"retries": 0, "breaker_failures": 100, **options}),
        )
        self.runner = InlineRunner(
            lambda report: TierLoop(
                spec,
                namespace=Namespace({"model": "m"}),
                memory=self.pool,
                clock=self.clock,
                report=report,
            ),
            self.clock,
        )
        self.runner.start()
        self._jobs = 0
        for slot in range(4):
            self.pool.view(slot)[:] = bytes([slot + 1]) * CHUNK_BYTES

    def do(self, operation: Operation, count: int = 4, run_s: float = 0.001) -> list[str]:
        self._jobs += 1
        slots = range(count) if operation is not Operation.LOOKUP else ()
        deadline_s = self.clock.now_s() + 2
        request = RequestContext("r")
        job = Job(self._jobs, operation, KEYS[:count], list(slots), request, deadline_s)
        self.runner.submit([job])
        self.runner.run_for(run_s)
        results = [one for one in self.runner.poll() if isinstance(one, JobResult)]
        return [verdict.value for one in results for verdict in one.verdicts]

    def close(self) -> None:
        self.runner.close(1.0)
        self.pool.close()


@pytest.fixture
def make_bench(request: pytest.FixtureRequest):
    def make(*script: Fault | None, **options: object) -> Bench:
        bench = Bench(FaultPlan(script), **options)
        request.addfinalizer(bench.close)
        return bench

    return make


def test_an_error_is_of_the_class_that_is_asked_for(make_bench) -> None:
    bench = make_bench(Fault(FaultKind.ERROR, "load", error=TierAuthError))
    assert bench.do(Operation.STORE) == ["ok"] * 4
    assert bench.do(Operation.LOAD) == ["auth"] * 4
    assert bench.do(Operation.LOAD) == ["ok"] * 4


def test_a_delay_is_on_the_tiers_clock(make_bench) -> None:
    bench = make_bench(Fault(FaultKind.DELAY, delay_s=1.0))
    assert bench.do(Operation.STORE, run_s=0.9) == []
    bench.runner.run_for(0.2)
    (result,) = bench.runner.poll()
    assert result.verdicts == [Verdict.OK] * 4


def test_a_hang_ends_with_the_deadline(make_bench) -> None:
    bench = make_bench(Fault(FaultKind.HANG))
    assert bench.do(Operation.STORE, run_s=1.9) == []
    bench.runner.run_for(0.2)
    assert bench.runner.poll()[0].verdicts == [Verdict.TIMEOUT] * 4


@pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.CORRUPT])
@pytest.mark.parametrize("operation", ["store", "load"])
def test_damage_is_found_by_the_digest(make_bench, kind: FaultKind, operation: str) -> None:
    bench = make_bench(Fault(kind, operation))
    before = [bytes(bench.pool.view(slot)) for slot in range(4)]
    assert bench.do(Operation.STORE) == ["ok"] * 4
    # A store must not damage the slots.
    assert [bytes(bench.pool.view(slot)) for slot in range(4)] == before
    assert bench.do(Operation.LOAD) == ["corrupt"] * 4
    assert bench.plan.happened == [(operation, kind)]


@pytest.mark.parametrize("operation", [Operation.STORE, Operation.LOAD])
def test_a_part_is_done_and_the_rest_is_not(make_bench, operation: Operation) -> None:
    bench = make_bench(Fault(FaultKind.PARTIAL, operation.value, error=ChunkNotFoundError))
    first = bench.do(Operation.STORE)
    verdicts = first if operation is Operation.STORE else bench.do(Operation.LOAD)
    assert verdicts == ["ok", "ok", "not_found", "not_found"]
    expected = verdicts if operation is Operation.STORE else ["ok"] * 4
    assert bench.do(Operation.LOAD) == expected


def test_a_disconnection_lasts(make_bench) -> None:
    bench = make_bench(Fault(FaultKind.DISCONNECT, delay_s=1.0))
    assert bench.do(Operation.STORE) == ["unavailable"] * 4
    assert bench.do(Operation.LOOKUP, run_s=0.9) == ["unavailable"] * 4
    bench.runner.run_for(0.2)
    assert bench.do(Operation.STORE) == ["ok"] * 4


def test_a_script_waits_for_its_operation_and_may_let_a_call_be() -> None:
    plan = FaultPlan([Fault(FaultKind.ERROR, "load"), None, Fault(FaultKind.HANG)])
    faults = [plan.next_fault(call) for call in ("store", "store", "load", "load")]
    kinds = [fault and fault.kind for fault in faults]
    assert kinds == [None, FaultKind.HANG, FaultKind.ERROR, None]


def drawn(seed: int, rate: float, faults: Iterable[Fault] | None = None) -> list[object]:
    plan = FaultPlan(seed=seed, rate=rate, drawn=None if faults is None else list(faults))
    return [plan.next_fault("load") for _ in range(200)]


def test_the_same_seed_draws_the_same_faults() -> None:
    assert drawn(1, 0.3) == drawn(1, 0.3) != drawn(2, 0.3)
    assert drawn(1, 0.0) == [None] * 200
    assert {fault.kind for fault in drawn(1, 1.0)} == set(FaultKind)
    assert drawn(1, 1.0, [Fault(FaultKind.HANG, "store")]) == [None] * 200


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_wrapper_breaks_no_rule_of_its_own(check) -> None:
    if check.name == "check_it_runs_in_a_process":
        return  # the plan is of this process
    with contextlib.suppress(CheckSkipped):
        run_check(check, TierSubject(faulty(MemoryTier, FaultPlan())))
