"""Runs a tier's loop on virtual time, over a scripted tier, and records broken rules."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvtier_sdk import (
    Capability,
    ChunkError,
    ChunkNotFoundError,
    CorruptChunkError,
    Namespace,
    OffloadKey,
    Region,
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
from kvtier_sdk.runner.health import CANARY_KEY
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    MetricsChanged,
    Operation,
    Progressed,
    Report,
    Verdict,
)
from kvtier_sdk.testing import VirtualClock
from support.promises import fault_of_batch, fault_of_keys

CHUNK_BYTES = 96
_SLOTS = 1 << 20
LOOKUP, LOAD, STORE, TOUCH = Operation.LOOKUP, Operation.LOAD, Operation.STORE, Operation.TOUCH
MOVES = (LOAD, STORE)


class Account:
    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.job_of: dict[OffloadKey, int] = {}
        self.results: dict[int, JobResult] = {}
        self.released: set[int] = set()
        self.removed: list[OffloadKey] = []
        self.metrics: list[MetricsChanged] = []
        self.breakers = dict.fromkeys(Direction, BreakerState.CLOSED)
        self.moves: list[BreakerMoved] = []
        self.lent_headers: set[int] = set()
        self.breaches: list[str] = []

    def take(self, report: Report) -> None:
        if isinstance(report, ChunksRemoved):
            self.removed += report.keys
        elif isinstance(report, MetricsChanged):
            self.metrics.append(report)
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
        elif not isinstance(report, Progressed):
            assert isinstance(report, IoEnded)
            if report.job_id not in self.results:
                self.breaches.append("I/O that ended before its job was concluded")
            self._release(report.job_id)

    def _release(self, job_id: int) -> None:
        if job_id in self.released:
            self.breaches.append("a job that was released twice")
        self.released.add(job_id)

    def touch(self, key: OffloadKey) -> None:
        if key != CANARY_KEY and self.job_of[key] in self.released:
            self.breaches.append("memory was touched after its job had been released")

    def verdicts(self, job_id: int) -> list[str]:
        return [verdict.value for verdict in self.results[job_id].verdicts]


class Slots:
    """Memory with so many slots that no two jobs of a test share a slot."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self) -> None:
        # This mapping can be large, because pages that are never accessed take no memory.
        self._memory = memoryview(mmap.mmap(-1, _SLOTS * CHUNK_BYTES))
        self.region = Region.of(self._memory)

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        assert slot < _SLOTS
        return self._memory[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]


@dataclass
class Act:
    #: The call's outcome: "fine", a key of ``RAISED``, or a name that ``_finish`` handles.
    kind: str = "fine"
    after_s: float = 0.0
    #: True if a cancellation does not end the call.
    stubborn: bool = False


ERRORS: dict[str, Callable[[], TierError]] = {
    "not found": lambda: ChunkNotFoundError("gone"),
    "corrupt": lambda: CorruptChunkError("flipped"),
    "faulty": lambda: ChunkError("a bad sector"),
    "unavailable": lambda: TierUnavailableError("refused"),
    "timeout": lambda: TierTimeoutError("slow"),
    "auth": lambda: TierAuthError("denied"),
    "capacity": lambda: TierCapacityError("full"),
    "failed": lambda: TierError("something"),
    "try again": lambda: TierError("in a moment", retryable=True),
}


class PanicError(BaseException):
    """A panic in a Rust client. It does not derive from :class:`Exception`."""


RAISED: dict[str, Callable[[], BaseException]] = {
    **ERRORS,
    "bug": lambda: KeyError("bug"),
    "exit": lambda: SystemExit(3),
    "interrupted": KeyboardInterrupt,
    "panic": lambda: PanicError("unwrapped an Err"),
    "raises cancelled": asyncio.CancelledError,
}


class ScriptedTier(SecondaryTierManager):
    contract_version = 1
    capabilities = Capability.DELETE | Capability.TOUCH
    account: Account
    script: Iterator[Act]
    # The acts after the script's end, by operation. The act of the key "" is the default.
    always: dict[str, Act]
    let_go: asyncio.Event

    async def open(self) -> None:
        self.stored: dict[OffloadKey, bytes] = {}
        self.calls: list[tuple[str, float]] = []
        self.probes: list[tuple[str, float]] = []
        self.replaced: list[OffloadKey] = []
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
        if fault := fault_of_keys(self, keys):
            self.account.breaches.append(fault)
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
        """Record a breach if transfers share a header, or if the batch breaks the contract."""
        if fault := fault_of_batch(self, batch):
            self.account.breaches.append(fault)
        addresses = {transfer.regions[0].address for transfer in batch}
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
        transfer.fill(stored)
        return None

    def _put(self, transfer: Transfer) -> None:
        self.stored[transfer.key] = b"".join(transfer.buffers)
        if transfer.replace and transfer.key != CANARY_KEY:
            self.replaced.append(transfer.key)

    async def _begin(self, operation: str, keys: Sequence[OffloadKey], direction: Direction) -> Act:
        now_s = self.context.clock.now_s()
        if fault := fault_of_keys(self, keys):
            self.account.breaches.append(fault)
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
        if act.kind in RAISED:
            raise RAISED[act.kind]()
        if act.kind == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
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
    """A loop over a scripted tier; ``declares`` sets attributes of the tier's class."""

    def __init__(
        self,
        *script: Act,
        declares: Mapping[str, Any] = MappingProxyType({}),
        verify: bool = True,
        **options: Any,
    ) -> None:
        self.account = Account()
        self.clock = VirtualClock()
        self.slots = Slots()
        self.given_up_s: list[float] = []
        self.event_loop = self.clock.new_event_loop()
        self.event_loop.set_exception_handler(
            lambda loop, context: self.account.breaches.append(f"unhandled: {context}")
        )
        spec = TierSpec(
            "tier",
            "scripted",
            type("DeclaringTier", (ScriptedTier,), dict(declares)),
            TierConfig(),
            RunnerOptions.model_validate(options),
            verify=verify,
        )
        self.loop = TierLoop(
            spec,
            namespace=Namespace({}),
            memory=self.slots,
            clock=self.clock,
            report=self.account.take,
            give_up=lambda: self.given_up_s.append(self.clock.now_s()),
        )
        assert isinstance(self.loop.call.tier, ScriptedTier)
        self.tier = self.loop.call.tier
        self.tier.account = self.account
        self.tier.script = iter(script)
        self.tier.always = {}
        self.tier.let_go = asyncio.Event()
        self.run(self.loop.open())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.event_loop.run_until_complete(coroutine)

    def run_for(self, duration_s: float) -> None:
        self.run(self.clock.sleep(duration_s))

    def job(
        self,
        operation: Operation,
        keys: int = 1,
        within_s: float = 5.0,
        *,
        names: Sequence[OffloadKey] = (),
    ) -> Job:
        """Create a job in new slots, for ``names`` or for ``keys`` new keys."""
        job_id = len(self.account.jobs)
        names = names or [make_offload_key(b"%d.%d" % (job_id, n)) for n in range(keys)]
        slots = [1000 * job_id + n for n in range(len(names))] if operation in MOVES else []
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
        job = self.job(operation, within_s=within_s)
        self.submit(job)
        self.run_for(run_s)
        return job

    def do(
        self, operation: Operation, *names: OffloadKey, keys: int = 1, run_s: float = 1.0
    ) -> list[str]:
        job = self.job(operation, keys, names=names)
        self.submit(job)
        self.run_for(run_s)
        return self.account.verdicts(job.job_id)

    def close(self) -> None:
        self.tier.let_go.set()
        self.run(self.loop.close())
        self.run_for(100.0)
        left = asyncio.all_tasks(self.event_loop)
        self.event_loop.close()
        assert not left
        assert self.account.breaches == []
        assert self.account.results.keys() == self.account.jobs.keys() == self.account.released


Make = Callable[..., Rig]


def failing(rig: Rig, operation: str, kind: str = "unavailable", calls: int = 5) -> None:
    """Make all calls of an operation fail from now on, and submit ``calls`` jobs."""
    rig.tier.always[operation] = Act(kind)
    for _ in range(calls):
        rig.ask(Operation(operation), run_s=0.01)
