"""Every job ends in exactly one result, whatever a tier does and whenever the loop is disturbed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier_sdk import (
    Capability,
    ChunkNotFoundError,
    CorruptChunkError,
    Namespace,
    OffloadKey,
    RequestContext,
    RunnerOptions,
    SecondaryTierManager,
    TierAuthError,
    TierCapacityError,
    TierConfig,
    TierError,
    TierSpec,
    TierTimeoutError,
    TierUnavailableError,
    Transfer,
    make_offload_key,
)
from kvtier_sdk.runner import TierLoop
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    Operation,
    Report,
    Verdict,
)
from kvtier_sdk.runner.probe import CANARY_KEY
from kvtier_sdk.testing import VirtualClock

CHUNK_BYTES = 96
MOVES = (Operation.LOAD, Operation.STORE)


class Account:
    """What the loop has reported, and every rule that was broken on the way."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.job_of: dict[OffloadKey, int] = {}
        self.results: dict[int, JobResult] = {}
        self.released: set[int] = set()
        self.removed: list[OffloadKey] = []
        self.breakers = dict.fromkeys(Direction, BreakerState.CLOSED)
        self.moves: list[BreakerMoved] = []
        self.lent_headers: set[int] = set()
        self.breaches: list[str] = []

    def take(self, report: Report) -> None:
        if isinstance(report, ChunksRemoved):
            self.removed += report.keys
        elif isinstance(report, BreakerMoved):
            if self.breakers[report.direction] is report.state:
                self.breaches.append("a breaker's move that is none")
            self.breakers[report.direction] = report.state
            self.moves.append(report)
        elif isinstance(report, JobResult):
            if report.job_id in self.results:
                self.breaches.append("a second result of one job")
            if len(report.verdicts) != len(self.jobs[report.job_id].keys):
                self.breaches.append("not one verdict a key")
            if not all(isinstance(verdict, Verdict) for verdict in report.verdicts):
                self.breaches.append("a key without a verdict")
            self.results[report.job_id] = report
            if report.released:
                self._release(report.job_id)
        else:
            assert isinstance(report, IoEnded)
            if report.job_id not in self.results:
                self.breaches.append("I/O that ended before its job was concluded")
            self._release(report.job_id)

    def _release(self, job_id: int) -> None:
        if job_id in self.released:
            self.breaches.append("a job that was released twice")
        self.released.add(job_id)

    def touch(self, key: OffloadKey) -> None:
        """Somebody reads or writes a slot's memory."""
        if key != CANARY_KEY and self.job_of[key] in self.released:
            self.breaches.append("memory was touched after its job had been released")

    def verdicts(self, job_id: int) -> list[str]:
        return [verdict.value for verdict in self.results[job_id].verdicts]


class Slots:
    """A slot a key, so that a touch of memory tells the job."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self.holders: set[str] = set()

    def padded_view(self, slot: int, alignment: int, holder: str) -> memoryview:
        self.holders.add(holder)
        return memoryview(self.memory.setdefault(slot, bytearray(CHUNK_BYTES)))


@dataclass
class Act:
    """What a tier does when it is called next.

    Attributes:
        kind: how the call ends.
        after_s: how long it takes.
        stubborn: whether it goes on when it is cancelled.
    """

    kind: str = "fine"
    after_s: float = 0.0
    stubborn: bool = False


ERRORS: dict[str, Callable[[], TierError]] = {
    "not found": lambda: ChunkNotFoundError("gone"),
    "corrupt": lambda: CorruptChunkError("flipped"),
    "unavailable": lambda: TierUnavailableError("refused"),
    "timeout": lambda: TierTimeoutError("slow"),
    "auth": lambda: TierAuthError("denied"),
    "capacity": lambda: TierCapacityError("full"),
    "failed": lambda: TierError("something"),
    "try again": lambda: TierError("in a moment", retryable=True),
}


class PanicError(BaseException):
    """As a client in Rust raises where it panics: no Exception."""


class ScriptedTier(SecondaryTierManager):
    """Does what it is told, call by call; after that, what a healthy tier does."""

    contract_version = 1
    capabilities = Capability.DELETE | Capability.TOUCH
    account: Account
    script: Iterator[Act]
    # What happens to calls behind the script's end, of one operation or all ("").
    always: dict[str, Act]
    let_go: asyncio.Event

    async def open(self) -> None:
        self.stored: dict[OffloadKey, bytes] = {}
        self.calls: list[tuple[str, float]] = []
        self.probes: list[tuple[str, float]] = []
        self.closed = False

    async def close(self) -> None:
        self.closed = True
        self.closed_in_mid_call = bool(self.account.lent_headers)

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        act = await self._begin("lookup", keys, Direction.READ)
        results = [key in self.stored for key in keys]
        return self._finish(act, results, [])  # type: ignore[return-value]

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await self._move("load", batch, Direction.READ, self._get)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await self._move("store", batch, Direction.WRITE, self._put)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._finish(await self._begin("touch", keys, Direction.READ), [], [])

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.stored.pop(key, None)
        self.context.report_removed(keys)

    async def _move(
        self,
        operation: str,
        batch: Sequence[Transfer],
        direction: Direction,
        one: Callable[[Transfer], TierError | None],
    ) -> Sequence[TierError | None]:
        with self._lent(batch):
            act = await self._begin(operation, [t.key for t in batch], direction)
            results: list[TierError | None] = []
            for transfer in batch:
                self.account.touch(transfer.key)
                results.append(one(transfer))
            return self._finish(act, results, batch)

    @contextmanager
    def _lent(self, batch: Sequence[Transfer]) -> Iterator[None]:
        """No two calls at once get the same header."""
        addresses = {np.frombuffer(t.header, np.uint8).ctypes.data for t in batch}
        if len(addresses) < len(batch) or addresses & self.account.lent_headers:
            self.account.breaches.append("a header that was lent twice")
        self.account.lent_headers |= addresses
        try:
            yield
        finally:
            self.account.lent_headers -= addresses

    def _get(self, transfer: Transfer) -> TierError | None:
        stored = self.stored.get(transfer.key)
        if stored is None:
            return ChunkNotFoundError("gone")
        transfer.header[:] = stored[: len(transfer.header)]
        transfer.payload[:] = stored[len(transfer.header) :]
        return None

    def _put(self, transfer: Transfer) -> None:
        self.stored[transfer.key] = b"".join(transfer.buffers)

    async def _begin(self, operation: str, keys: Sequence[OffloadKey], direction: Direction) -> Act:
        now_s = self.context.clock.now_s()
        if CANARY_KEY in keys:
            self.probes.append((operation, now_s))
        else:
            self.calls.append((operation, now_s))
            if self.account.breakers[direction] is not BreakerState.CLOSED:
                self.account.breaches.append("a call through an open breaker")
        always = self.always.get(operation) or self.always.get("") or Act()
        act = next(self.script, always)
        until_s = now_s + act.after_s
        while not self.let_go.is_set() and self.context.clock.now_s() < until_s:
            try:
                async with self.context.clock.timeout(until_s - self.context.clock.now_s()):
                    await self.let_go.wait()
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                if not act.stubborn:
                    raise
        return act

    def _finish(self, act: Act, results: list[Any], batch: Sequence[Transfer]) -> list[Any]:
        if act.kind in ERRORS:
            raise ERRORS[act.kind]()
        if act.kind == "bug":
            raise KeyError("bug")
        if act.kind == "exit":
            raise SystemExit(3)
        if act.kind == "interrupted":
            raise KeyboardInterrupt
        if act.kind == "panic":
            raise PanicError("unwrapped an Err")
        if act.kind == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        elif act.kind == "raises cancelled":
            raise asyncio.CancelledError
        elif act.kind == "too few":
            return results[1:]
        elif act.kind == "nonsense":
            return [True] * len(batch) if batch else results
        elif act.kind == "mixed" and batch:
            kinds = [None, *ERRORS.values()]
            for index in range(len(results)):
                make = kinds[index % len(kinds)]
                results[index] = make() if make else results[index]
        return results


class Rig:
    """A loop over a scripted tier, on a clock of its own."""

    def __init__(self, *script: Act, **options: Any) -> None:
        self.account = Account()
        self.clock = VirtualClock()
        self.slots = Slots()
        self.given_up_s: list[float] = []
        self.event_loop = self.clock.new_event_loop()
        self.event_loop.set_exception_handler(
            lambda loop, context: self.account.breaches.append(f"unhandled: {context}")
        )
        spec = TierSpec(
            "tier", "scripted", ScriptedTier, TierConfig(), RunnerOptions.model_validate(options)
        )
        self.loop = TierLoop(
            spec,
            namespace=Namespace({}),
            memory=self.slots,
            clock=self.clock,
            report=self.account.take,
            give_up=lambda: self.given_up_s.append(self.clock.now_s()),
        )
        assert isinstance(self.loop._tier, ScriptedTier)
        self.tier = self.loop._tier
        self.tier.account = self.account
        self.tier.script = iter(script)
        self.tier.always = {}
        self.tier.let_go = asyncio.Event()
        self.run(self.loop.open())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.event_loop.run_until_complete(coroutine)

    def run_for(self, duration_s: float) -> None:
        self.run(self.clock.sleep(duration_s))

    def job(self, operation: Operation, keys: int = 1, within_s: float = 5.0) -> Job:
        """A new job over keys, and slots, that no other job has."""
        job_id = len(self.account.jobs)
        names = [make_offload_key(b"%d.%d" % (job_id, n)) for n in range(keys)]
        slots = [1000 * job_id + n for n in range(keys)] if operation in MOVES else []
        request = RequestContext("r")
        job = Job(job_id, operation, names, slots, request, self.clock.now_s() + within_s)
        self.account.jobs[job_id] = job
        self.account.job_of.update(dict.fromkeys(names, job_id))
        return job

    def submit(self, *jobs: Job) -> None:
        async def hand_over() -> None:
            self.loop.submit(jobs)

        self.run(hand_over())

    def ask(self, operation: Operation, *, within_s: float = 5.0, run_s: float = 0.0) -> Job:
        """Submit a job of one key and let the loop run."""
        job = self.job(operation, within_s=within_s)
        self.submit(job)
        self.run_for(run_s)
        return job

    def close(self) -> None:
        self.tier.let_go.set()
        self.run(self.loop.close())
        self.run_for(100.0)
        left = asyncio.all_tasks(self.event_loop)
        self.event_loop.close()
        assert not left
        assert self.account.breaches == []
        assert self.account.results.keys() == self.account.jobs.keys() == self.account.released


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(*script: Act, **options: Any) -> Rig:
        rigs.append(Rig(*script, **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


# --- any order of events -----------------------------------------------------------------------

KINDS = ["fine", "mixed", "bug", "exit", "panic", "cancels itself", "raises cancelled", *ERRORS]
ACTS = st.builds(
    Act,
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 0.0, 0.01, 0.3, 4.0, 40.0]),
    st.booleans(),
)
BREACHES = st.builds(Act, st.sampled_from(["too few", "nonsense"]))
JOBS = st.tuples(
    st.sampled_from(Operation), st.integers(0, 9), st.sampled_from([-1.0, 0.0, 0.05, 2.0, 30.0])
)
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.lists(JOBS, min_size=1, max_size=5)),
    st.tuples(st.just("run"), st.sampled_from([0.0, 0.001, 0.02, 0.5, 6.0])),
    st.tuples(st.just("drain"), st.sampled_from([0.0, 0.1, 10.0])),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("close"), st.none()),
)


@settings(max_examples=300)
@given(
    script=st.lists(st.one_of(ACTS, ACTS, ACTS, ACTS, BREACHES), max_size=25),
    steps=st.lists(STEPS, max_size=15),
    concurrency=st.integers(1, 4),
)
@example(
    script=[Act("unavailable")] * 25,
    steps=[("submit", [(Operation.LOAD, 9, 30.0), (Operation.STORE, 9, 30.0)]), ("run", 6.0)],
    concurrency=2,
)
def test_each_job_ends_once_and_nothing_is_left(
    script: list[Act], steps: list[tuple[str, Any]], concurrency: int
) -> None:
    rig = Rig(*script, concurrency=concurrency, max_batch="200B", max_queue="1MiB")
    closed = False
    for step, argument in steps:
        if step == "submit":
            rig.submit(*[rig.job(*job) for job in argument])
        elif step == "run":
            rig.run_for(argument)
        elif step == "drain":
            rig.run(rig.loop.drain(argument))
        elif step == "cancel":
            # As if somebody cancelled one of the loop's tasks behind its back.
            tasks = sorted(asyncio.all_tasks(rig.event_loop), key=lambda task: task.get_name())
            for task in tasks[argument : argument + 1]:
                if task.get_name().endswith(" job"):
                    task.cancel()
        elif not closed:
            closed = True
            rig.run(rig.loop.close())
    rig.tier.let_go.set()
    rig.tier.script = iter(())
    rig.run_for(100.0)
    assert rig.account.breaches == []
    assert rig.account.results.keys() == rig.account.jobs.keys() == rig.account.released
    if not closed and rig.loop._call.quarantine is None:
        assert set(rig.account.breakers.values()) == {BreakerState.CLOSED}
    last = rig.job(Operation.LOOKUP)
    if not closed:
        rig.run(rig.loop.close())
    rig.submit(last)
    assert rig.account.verdicts(last.job_id) == ["cancelled"]
    rig.run_for(1.0)
    assert not asyncio.all_tasks(rig.event_loop)
    rig.event_loop.close()
    assert rig.tier.closed


# --- one rule at a time -------------------------------------------------------------------------

Make = Callable[..., Rig]
LOOKUP, LOAD, STORE, TOUCH = Operation.LOOKUP, Operation.LOAD, Operation.STORE, Operation.TOUCH


def test_a_job_that_cannot_be_started_does_not_take_the_others_with_it(make: Make) -> None:
    rig = make()
    jobs = [rig.job(LOAD) for _ in range(3)]
    jobs[1].operation = "urgent"  # type: ignore[assignment]
    rig.submit(*jobs)
    rig.run_for(1.0)
    assert [rig.account.verdicts(job.job_id) for job in jobs] == [
        ["not_found"],
        ["failed"],
        ["not_found"],
    ]


def test_a_slot_that_is_not_there_fails_its_job(make: Make) -> None:
    rig = make()
    job = rig.job(STORE, 2)
    job.slots = [0]
    rig.submit(job)
    rig.run_for(0.1)
    assert rig.account.verdicts(job.job_id) == ["failed", "failed"]
    assert rig.account.verdicts(rig.ask(STORE, run_s=0.1).job_id) == ["ok"]


def test_an_error_inside_the_sdk_fails_its_batch_and_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(max_batch="1B")
    job = rig.job(STORE, 3)
    seal = rig.loop._mover._header.seal

    def break_one(key: OffloadKey, header: memoryview, payload: memoryview) -> None:
        if key == job.keys[1]:
            raise RuntimeError("no hash for you")
        seal(key, header, payload)

    monkeypatch.setattr(rig.loop._mover._header, "seal", break_one)
    rig.submit(job)
    rig.run_for(0.1)
    assert rig.account.verdicts(job.job_id) == ["ok", "failed", "ok"]


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("bug", "contract"),
        ("exit", "contract"),
        ("panic", "contract"),
        ("raises cancelled", "contract"),
        ("cancels itself", "not_found"),
        ("too few", "contract"),
        ("nonsense", "contract"),
        *[(kind, kind.replace(" ", "_")) for kind in ERRORS if kind != "try again"],
    ],
)
def test_what_a_tier_does_has_its_verdict(make: Make, kind: str, verdict: str) -> None:
    rig = make(Act(kind), retries=0)
    assert rig.account.verdicts(rig.ask(LOAD, run_s=0.1).job_id) == [verdict]


def test_a_result_that_is_none_puts_the_tier_into_quarantine_with_the_reason(make: Make) -> None:
    rig = make(Act("nonsense"))
    first, second = rig.ask(LOAD, run_s=0.1), rig.ask(LOOKUP, run_s=0.1)
    for job in (first, second):
        assert rig.account.verdicts(job.job_id) == ["contract"]
        assert rig.account.results[job.job_id].error == (
            "tier load: returned a bool where None or a TierError belongs; the tier is not used "
            "any more"
        )
    assert [operation for operation, _ in rig.tier.calls] == ["load"]


def test_a_task_that_somebody_else_cancels_ends_its_job(make: Make) -> None:
    rig = make(Act(after_s=4.0))
    job = rig.ask(STORE, run_s=0.1)
    (task,) = [task for task in asyncio.all_tasks(rig.event_loop) if task.get_name() == "store job"]
    task.cancel()
    rig.run_for(0.0)
    assert rig.account.verdicts(job.job_id) == ["cancelled"]


def test_retries_are_counted(make: Make) -> None:
    rig = make(Act("try again"), Act("try again"))
    assert rig.account.results[rig.ask(STORE, run_s=1.0).job_id].retries == 2
    assert rig.account.results[rig.ask(STORE, run_s=1.0).job_id].retries == 0
    rig.tier.script = iter([Act("try again")])
    assert rig.account.results[rig.ask(LOOKUP, run_s=1.0).job_id].retries == 1


def test_views_are_taken_in_the_name_of_the_tier_and_its_operation(make: Make) -> None:
    rig = make()
    rig.ask(STORE, run_s=0.1)
    assert rig.slots.holders == {"tier store"}
    rig.ask(LOAD, run_s=0.1)
    assert rig.slots.holders == {"tier store", "tier load"}


def test_stores_that_hang_leave_calls_to_loads(make: Make) -> None:
    rig = make(concurrency=4)
    rig.tier.always["store"] = Act(after_s=20.0)
    stores = [rig.ask(STORE, within_s=30.0) for _ in range(8)]
    rig.run_for(0.1)
    assert len(rig.tier.calls) == 3
    load = rig.ask(LOAD, run_s=0.1)
    assert rig.account.verdicts(load.job_id) == ["not_found"]
    assert not any(store.job_id in rig.account.results for store in stores)


def test_draining_while_the_tier_opens_leaves_the_opening_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    monkeypatch.setattr(rig.tier, "open", rig.tier.let_go.wait)
    opening = rig.event_loop.create_task(rig.loop.open())
    assert rig.run(rig.loop.drain(1.0)) is True
    assert not opening.done()
    rig.tier.let_go.set()
    rig.run(opening)


def test_draining_cancels_what_waits_and_lets_finish_what_runs(make: Make) -> None:
    rig = make(Act(after_s=1.0), concurrency=1)
    running, waiting = rig.ask(STORE), rig.ask(STORE)
    rig.run_for(0.1)
    assert rig.run(rig.loop.drain(5.0)) is True
    assert rig.account.verdicts(running.job_id) == ["ok"]
    assert rig.account.verdicts(waiting.job_id) == ["cancelled"]


def test_past_its_deadline_a_job_is_concluded_at_once_and_its_calls_are_cancelled(
    make: Make,
) -> None:
    rig = make()
    rig.tier.always["load"] = Act(after_s=40.0)
    easy = rig.ask(LOAD, within_s=2.0)
    rig.tier.always["load"] = Act(after_s=40.0, stubborn=True)
    stubborn = rig.ask(LOAD, within_s=2.0)
    rig.run_for(2.1)
    for job in (easy, stubborn):
        assert rig.account.verdicts(job.job_id) == ["timeout"]
        assert not rig.account.results[job.job_id].released
    assert rig.account.released == {easy.job_id}, "the other still reads into its slot"
    rig.run_for(40.0)
    assert rig.account.released == {easy.job_id, stubborn.job_id}


def test_headers_come_back_whatever_becomes_of_a_call(make: Make) -> None:
    rig = make(retries=0, breaker_failures=1000, breaker_window=1000)
    for kind in ("fine", "bug", "exit", "unavailable", "cancels itself"):
        rig.tier.always["load"] = Act(kind)
        for _ in range(40):
            rig.ask(LOAD, run_s=0.1)
    rig.tier.always["load"] = Act(after_s=40.0)
    for _ in range(40):
        rig.ask(LOAD, within_s=0.1, run_s=0.2)
    # One mapping's worth was ever made: nothing had to be lent anew.
    assert len(rig.loop._mover._headers._free) == rig.loop._mover._headers._PER_MAPPING


def test_closing_without_draining_cancels_everything(make: Make) -> None:
    rig = make(concurrency=1)
    rig.tier.always["store"] = Act(after_s=3.0, stubborn=True)
    jobs = [rig.ask(STORE), rig.ask(STORE), rig.ask(LOOKUP)]
    rig.run_for(0.1)
    rig.run(rig.loop.close())
    rig.submit(late := rig.job(LOAD))
    for job in (jobs[0], jobs[1], late):
        assert rig.account.verdicts(job.job_id) == ["cancelled"]
    assert rig.account.released == {1, 2, 3}, "the first store's I/O still runs"
    rig.run_for(5.0)
    assert 0 in rig.account.released


def test_a_tier_is_closed_when_its_calls_have_ended(make: Make) -> None:
    rig = make()
    rig.tier.always["store"] = Act(after_s=3.0)
    rig.ask(STORE, run_s=0.1)
    rig.run(rig.loop.close())
    assert not rig.tier.closed_in_mid_call


def test_a_call_that_hangs_does_not_keep_a_tier_from_being_closed(make: Make) -> None:
    rig = make()
    rig.tier.always["store"] = Act(after_s=30.0, stubborn=True)
    rig.ask(STORE, run_s=0.1)
    rig.run(rig.loop.close())
    assert rig.tier.closed_in_mid_call
    assert rig.clock.now_s() < 5.0


# --- the breakers -------------------------------------------------------------------------------


def failing(rig: Rig, operation: str, kind: str = "unavailable", calls: int = 5) -> None:
    """Let an operation fail from now on, and so often that its breaker opens."""
    rig.tier.always[operation] = Act(kind)
    for _ in range(calls):
        rig.ask(Operation(operation), run_s=0.01)


def test_an_open_breaker_refuses_at_once_and_without_a_call(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    assert rig.account.breakers == {
        Direction.READ: BreakerState.OPEN,
        Direction.WRITE: BreakerState.CLOSED,
    }
    calls = len(rig.tier.calls)
    for operation in (LOOKUP, LOAD, TOUCH):
        job = rig.job(operation)
        rig.submit(job)  # the loop makes no step behind it
        assert rig.account.verdicts(job.job_id) == ["unavailable"]
    assert len(rig.tier.calls) == calls
    assert rig.account.verdicts(rig.ask(STORE, run_s=0.1).job_id) == ["ok"]


@pytest.mark.parametrize("kind", ["bug", "exit", "panic"])
def test_whatever_a_tier_raises_counts_for_the_breaker(make: Make, kind: str) -> None:
    rig = make()
    rig.tier.always[""] = Act(kind)
    for _ in range(5):
        rig.ask(LOOKUP, run_s=0.01)
    assert rig.account.breakers[Direction.READ] is BreakerState.OPEN


def test_an_interruption_is_not_the_tiers(make: Make) -> None:
    """Where the loop is on the main thread, Ctrl-C arrives in whatever runs."""
    rig = make(Act("interrupted"))
    lookup = rig.loop._call.lookup([make_offload_key(b"k")], RequestContext("r"))
    with pytest.raises(KeyboardInterrupt):
        lookup.send(None)


def test_a_full_disk_stops_stores_and_not_loads(make: Make) -> None:
    rig = make(retries=0)
    kept = rig.ask(STORE, run_s=0.1)
    failing(rig, "store", "capacity")
    assert rig.account.breakers[Direction.WRITE] is BreakerState.OPEN
    assert rig.account.verdicts(rig.ask(STORE).job_id) == ["unavailable"]
    again = rig.job(LOAD)
    again.keys = kept.keys
    rig.account.job_of[kept.keys[0]] = again.job_id
    rig.submit(again)
    rig.run_for(0.1)
    assert rig.account.verdicts(again.job_id) == ["ok"]
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


def test_opening_concludes_what_waits_in_its_direction_and_nothing_else(make: Make) -> None:
    rig = make(retries=0, concurrency=1, breaker_failures=1)
    rig.tier.script = iter([Act("unavailable", after_s=0.5)])
    rig.tier.always["load"] = Act(after_s=1.0)
    jobs = [rig.job(STORE), rig.job(STORE, 3), rig.job(STORE)]
    rig.submit(*jobs)
    rig.run_for(0.1)
    load = rig.ask(LOAD)
    rig.run_for(0.45)
    assert [rig.account.verdicts(job.job_id) for job in jobs] == [
        ["unavailable"],
        ["unavailable"] * 3,
        ["unavailable"],
    ]
    assert len(rig.tier.calls) == 2
    rig.run_for(2.0)
    assert rig.account.verdicts(load.job_id) == ["not_found"]


def test_each_retry_is_a_call_and_none_is_made_once_the_breaker_is_open(make: Make) -> None:
    rig = make(retries=10, breaker_failures=3)
    rig.tier.always["load"] = Act("unavailable")
    job = rig.ask(LOAD, run_s=4.0)
    assert len(rig.tier.calls) == 3
    assert rig.account.verdicts(job.job_id) == ["unavailable"]
    assert rig.account.results[job.job_id].retries == 2
    assert rig.account.results[job.job_id].duration_s < 1.0


def test_transfers_that_hang_open_it_at_their_deadline(make: Make) -> None:
    rig = make(breaker_failures=2)
    rig.tier.always["store"] = Act(after_s=60.0, stubborn=True)
    for _ in range(2):
        rig.ask(STORE, within_s=2.0)
    rig.run_for(1.9)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED
    rig.run_for(0.2)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.OPEN


def test_lookups_that_are_late_are_weaker_evidence(make: Make) -> None:
    rig = make()
    rig.tier.always["lookup"] = Act(after_s=0.2)
    for count in range(1, 11):
        rig.ask(LOOKUP, within_s=0.05, run_s=0.06)
        late_enough = count == 10
        assert (rig.account.breakers[Direction.READ] is BreakerState.OPEN) is late_enough


def test_a_deadline_that_the_queue_used_up_says_nothing_of_the_tier(make: Make) -> None:
    rig = make(concurrency=1, breaker_failures=1)
    rig.tier.always["load"] = Act(after_s=2.0)
    for _ in range(4):
        # One is done in its time, the next has a fifth of its own left, the others none.
        rig.ask(LOAD, within_s=2.5)
    rig.run_for(2.6)
    verdicts = [rig.account.verdicts(job_id) for job_id in range(4)]
    assert verdicts == [["not_found"], ["timeout"], ["timeout"], ["timeout"]]
    assert rig.account.moves == []


@pytest.mark.parametrize("operation", MOVES)
@pytest.mark.parametrize("breaker_failures", [2, 1000])
def test_calls_that_hang_in_every_place_keep_their_direction_refused(
    make: Make, operation: Operation, breaker_failures: int
) -> None:
    """A probe needs no place among the calls: it would succeed, and requests would wait."""
    # Stores have three quarters of the places.
    hung = 3 if operation is STORE else 4
    hangs = Act(after_s=200.0, stubborn=True)
    rig = make(*[hangs] * hung, concurrency=4, breaker_failures=breaker_failures)
    direction = Direction.WRITE if operation is STORE else Direction.READ
    for _ in range(hung):
        rig.ask(operation, within_s=2.0)
    rig.run_for(2.1)
    # Where they were too few to open the breaker, requests wait for one deadline, and no more.
    waiting = [rig.ask(operation, within_s=2.0) for _ in range(3)]
    for _ in range(25):
        # Lookups are answered, and end each row of failures.
        rig.ask(LOOKUP, run_s=0.1)
    assert {job.job_id for job in waiting} <= rig.account.results.keys()
    for _ in range(10):
        assert rig.account.breakers[direction] is not BreakerState.CLOSED
        refused = rig.ask(operation, run_s=0.0)
        assert rig.account.verdicts(refused.job_id) == ["unavailable"]
        rig.run_for(10.0)
    assert rig.loop._queue == []
    # One that ends makes a place.
    rig.tier.let_go.set()
    rig.run_for(35.0)
    assert rig.account.breakers[direction] is BreakerState.CLOSED
    served = "ok" if operation is STORE else "not_found"
    assert rig.account.verdicts(rig.ask(operation, run_s=0.1).job_id) == [served]


def test_a_call_that_hangs_takes_its_own_place_only(make: Make) -> None:
    rig = make(Act(after_s=200.0, stubborn=True), concurrency=2, breaker_failures=1)
    rig.ask(LOAD, within_s=2.0)
    rig.run_for(10.0)
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED
    assert rig.account.verdicts(rig.ask(LOAD, run_s=0.1).job_id) == ["not_found"]


def test_what_expires_in_the_queue_leaves_it(make: Make) -> None:
    rig = make(Act(after_s=20.0), concurrency=1)
    rig.ask(LOAD, within_s=30.0)
    for _ in range(10):
        rig.ask(LOAD, within_s=1.0)
    rig.run_for(1.1)
    assert rig.loop._queue == []
    assert rig.account.moves == [], "the first call is in time: the tier is well, and busy"


def test_a_mixed_batch_is_no_failure(make: Make) -> None:
    rig = make(retries=0, breaker_failures=1)
    rig.tier.always["store"] = Act("mixed")
    job = rig.job(STORE, 8)
    rig.submit(job)
    rig.run_for(0.1)
    assert {"ok", "unavailable", "capacity"} <= set(rig.account.verdicts(job.job_id))
    assert rig.account.moves == []


@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
def test_it_closes_by_itself_when_the_tier_works_again(make: Make, operation: str) -> None:
    rig = make(retries=0)
    failing(rig, operation)
    direction = Direction.WRITE if operation == "store" else Direction.READ
    rig.run_for(10.0)
    assert rig.account.breakers[direction] is BreakerState.OPEN
    times = [0.05, *(at_s for name, at_s in rig.tier.probes if name == operation)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses == [pytest.approx(pause, rel=0.12) for pause in (1, 2, 4)]
    rig.tier.always.clear()
    rig.run_for(8.0)
    assert rig.account.breakers[direction] is BreakerState.CLOSED
    states = [move.state.value for move in rig.account.moves]
    assert states == ["open", *["half_open", "open"] * 3, "half_open", "closed"]
    # And the next outage is probed after a second again.
    rig.tier.probes.clear()
    failing(rig, operation)
    began_s = rig.clock.now_s()
    rig.tier.always.clear()
    rig.run_for(1.0)
    assert rig.account.breakers[direction] is BreakerState.CLOSED
    assert rig.tier.probes[0][1] - began_s <= 1.0


def test_probes_are_at_most_half_a_minute_apart(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    rig.run_for(600.0)
    times = [at_s for _, at_s in rig.tier.probes]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(26.9 <= pause <= 30.1 for pause in pauses[4:])
    assert len(times) > 20


def test_a_read_probe_looks_up_and_loads(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    rig.tier.always = {"load": Act("unavailable")}
    rig.run_for(1.1)
    assert [name for name, _ in rig.tier.probes] == ["lookup", "load"]
    assert rig.account.breakers[Direction.READ] is BreakerState.OPEN


def test_a_write_probe_leaves_nothing_behind_and_nobody_hears_of_it(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "store")
    rig.tier.always.clear()
    rig.run_for(1.1)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED
    assert [name for name, _ in rig.tier.probes] == ["store"]
    assert CANARY_KEY not in rig.tier.stored
    assert rig.account.removed == []
    rig.tier.context.report_removed([CANARY_KEY, b"other"])
    assert rig.account.removed == [b"other"]


def test_a_canary_is_a_chunk_like_others(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "store")
    rig.tier.always.clear()
    seen: list[Transfer] = []
    put = rig.tier._put
    rig.tier._put = lambda transfer: (seen.append(transfer), put(transfer))[1]  # type: ignore[method-assign]
    rig.run_for(1.1)
    (transfer,) = seen
    assert (len(transfer.header), len(transfer.payload)) == (64, CHUNK_BYTES)
    rig.loop._mover._header.check(CANARY_KEY, transfer.header, transfer.payload)


def test_a_slow_first_answer_closes_it_if_the_next_is_in_time(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    rig.tier.always.clear()
    # It has to connect anew, which takes longer than a lookup may.
    rig.tier.script = iter([Act(after_s=0.5)])
    rig.run_for(1.6)
    assert [name for name, _ in rig.tier.probes] == ["lookup", "lookup", "load"]
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


def test_a_tier_that_stays_too_slow_for_lookups_stays_refused(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    rig.tier.always["lookup"] = Act(after_s=0.2)
    rig.run_for(60.0)
    assert rig.account.breakers[Direction.READ] is not BreakerState.CLOSED
    assert "load" not in [name for name, _ in rig.tier.probes]


def test_a_probe_that_hangs_is_given_up_and_never_doubled(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    rig.tier.always["lookup"] = Act(after_s=50.0, stubborn=True)
    rig.run_for(2.1)
    assert [move.state.value for move in rig.account.moves] == ["open", "half_open", "open"]
    rig.run_for(40.0)
    assert len(rig.tier.probes) == 1
    rig.tier.always.clear()
    rig.run_for(10.0 + 30.0)
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


NEVER = Act(after_s=1e6, stubborn=True)
STAY_REFUSED = "stay refused: {}, and nothing but the end of the process ends them"


@pytest.mark.parametrize(("operation", "hung"), [(LOAD, 4), (STORE, 3)])
@pytest.mark.parametrize("interval_s", [0.1, 1.0, 20.0])
def test_calls_that_never_end_are_given_up_after_a_minute(
    make: Make, caplog: pytest.LogCaptureFixture, operation: Operation, hung: int, interval_s: float
) -> None:
    rig = make(*[NEVER] * hung, concurrency=4, breaker_failures=hung, probe_interval=interval_s)
    for _ in range(hung):
        rig.ask(operation, within_s=2.0)
    rig.run_for(2.0 + 50.0)
    assert rig.given_up_s == []
    assert "stay refused" not in caplog.text
    rig.run_for(1000.0)
    (given_up_s,) = rig.given_up_s
    # Jitter shortens pauses, and the one that completes the minute may be a long one.
    assert 2.0 + 54.0 <= given_up_s <= 2.0 + 90.0
    told = STAY_REFUSED.format("calls that hang leave no room for another")
    assert caplog.text.count(f"tier: {'writes' if operation is STORE else 'reads'} {told}") == 1


def test_a_probe_that_never_ends_is_given_up_too(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    rig.tier.always["lookup"] = NEVER
    rig.run_for(50.0)
    assert rig.given_up_s == []
    rig.run_for(1000.0)
    assert len(rig.given_up_s) == 1
    assert len(rig.tier.probes) == 1
    assert caplog.text.count(STAY_REFUSED.format("a probe hangs")) == 1


def test_calls_that_are_slow_to_end_are_not_given_up(make: Make) -> None:
    """Each takes as long as its client waits for the server, and the tier is tried in between."""
    rig = make(concurrency=2, breaker_failures=2)
    rig.tier.always[""] = Act("timeout", after_s=50.0, stubborn=True)
    for _ in range(30):
        rig.ask(LOAD, within_s=2.0, run_s=20.0)
    assert len(rig.tier.probes) > 3
    assert rig.given_up_s == []
    assert rig.account.breakers[Direction.READ] is not BreakerState.CLOSED
    rig.tier.always.clear()
    rig.run_for(80.0)
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


def test_a_slow_tier_gets_its_chance_as_pauses_grow(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "store")
    rig.tier.always["store"] = Act(after_s=3.0)
    rig.run_for(15.0)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED


def test_both_breakers_probe_side_by_side(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    failing(rig, "store")
    rig.tier.always.clear()
    rig.run_for(1.1)
    assert set(rig.account.breakers.values()) == {BreakerState.CLOSED}


def test_a_tier_in_quarantine_has_no_breaker_and_no_probes(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    rig.tier.script = iter([Act("too few")])
    rig.run_for(100.0)
    assert len(rig.tier.probes) == 1
    assert [move.state.value for move in rig.account.moves] == ["open", "half_open", "open"]
    assert rig.account.verdicts(rig.ask(LOOKUP, run_s=0.1).job_id) == ["contract"]
    for _ in range(20):
        rig.ask(STORE, run_s=0.1)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED


def test_a_probe_that_fails_inside_the_sdk_is_a_failed_probe(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(retries=0)
    failing(rig, "store")

    def broken(*args: object) -> None:
        raise RuntimeError("no hash for you")

    with monkeypatch.context() as patch:
        patch.setattr(rig.loop._mover._header, "seal", broken)
        rig.run_for(1.1)
    assert "a probe failed inside the SDK" in caplog.text
    rig.tier.always.clear()
    rig.run_for(2.1)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED


def test_the_log_says_once_that_it_opened_and_once_that_it_closed(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(retries=0)
    caplog.set_level("INFO", logger="kvtier.tier.tier")
    failing(rig, "lookup", calls=20)
    rig.tier.always.clear()
    rig.run_for(2.0)
    lines = [record.getMessage() for record in caplog.records if "reads" in record.getMessage()]
    assert lines == [
        "tier: reads are refused until a probe succeeds; the last failure: tier lookup: refused",
        "tier: reads are taken again",
    ]
