"""A tier's loop, which accepts jobs, calls the tier, and reports one result for each job."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from kvtier_sdk.aio.clock import Clock, TimerHandle, wait_within
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.codecs.planes import Float8, Planes
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.contract import TierContext
from kvtier_sdk.errors import ChunkNotFoundError, ConfigError, TierError
from kvtier_sdk.events import Announce, EventLog
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.options.units import format_seconds
from kvtier_sdk.pool import HostPool
from kvtier_sdk.pool.layout import ROW_ALIGNMENT, PoolMemory
from kvtier_sdk.registry import load_codec
from kvtier_sdk.runner.breaker import Breaker, Direction, Outcome, outcome_of
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.chunk_mover import ChunkMover
from kvtier_sdk.runner.compression import ChunkCompressor, CompressionGate
from kvtier_sdk.runner.health import CANARY_KEY, NO_ROOM, DirectionHealth
from kvtier_sdk.runner.inventory import Inventory
from kvtier_sdk.runner.jobs import (
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    MetricsChanged,
    Operation,
    Progressed,
    Report,
    Verdict,
    batches_of,
    verdict_of,
)
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.note_segments import NoteSegments
from kvtier_sdk.runner.opening import TierOpening
from kvtier_sdk.runner.sealing import ChunkSealer
from kvtier_sdk.runner.survey import watch_store
from kvtier_sdk.types import Capability, OffloadKey, Transfer

T = TypeVar("T")

#: At close, cancelled calls may take this long to end. Probes and watches then get the same time.
_CALLS_END_S = 1.0

#: Shortest interval between two progress reports for the same operation.
_PROGRESS_INTERVAL_S = 0.5

_METRICS_INTERVAL_S = 1.0

#: The operations that move chunks, in the order in which their queued batches start.
_MOVES = (Operation.LOAD, Operation.STORE)

_READS = (Operation.LOOKUP, Operation.LOAD, Operation.TOUCH)


@dataclass(eq=False, slots=True)
class _Run:
    job: Job
    started_s: float
    verdicts: list[Verdict | None]
    result: JobResult
    open_batches: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # they may still use the slots
    calls_s: list[float] = field(default_factory=list)  # start times of running calls
    timer: TimerHandle | None = None
    concluded: bool = False
    concluded_s: float = math.inf

    @property
    def direction(self) -> Direction:
        return Direction.READ if self.job.operation in _READS else Direction.WRITE


_Batch: TypeAlias = Sequence[int]


class TierLoop:
    """Schedules and runs a tier's jobs on the caller's event loop, in any thread.

    Queued loads start before queued stores. At a job's deadline, the job is concluded and its calls
    are cancelled. An ``IoEnded`` report follows once the calls have ended.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        namespace: Namespace,
        memory: PoolMemory,
        clock: Clock,
        report: Callable[[Report], None],
        announce: Announce | None = None,
        give_up: Callable[[], None] | None = None,
        maintenance: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        alignment = spec.tier_class.alignment
        if not 0 < alignment <= ROW_ALIGNMENT or alignment & (alignment - 1):
            raise ConfigError(
                f"tier {spec.name!r}: alignment {alignment} is not a power of two up to "
                f"{ROW_ALIGNMENT}"
            )
        self.spec = spec
        self.options = options = spec.runner
        self._chunk_bytes = chunk_bytes = memory.chunk_bytes
        self._clock = clock
        self._report = report
        self._rng = rng or random.Random()
        secrets = secrets_of(spec.config)
        self._log = TierLog(spec.name, clock, secrets)
        codec = None if options.codec is None else load_codec(options.codec)
        coder, self._no_coder = self._coder_for(namespace)
        self.options_changed()
        header_length, payload_length = spec.object_lengths(chunk_bytes)
        batch_bytes = min(options.max_batch_bytes, memory.region.size_bytes)
        self._call_keys = spec.tier_class.max_batch_keys or sys.maxsize
        self._batch_chunks = min(max(1, batch_bytes // payload_length), self._call_keys)
        # A hanging call counts toward ``concurrency``, so the next batch always finds free buffers.
        under_way = options.concurrency * self._batch_chunks
        segment = None
        if spec.inventory == "tokens" and Capability.SCAN in spec.tier_class.capabilities:
            segment = HostPool(1, chunk_bytes)
        # Double the headers, because calls start before earlier chunks are verified. Add one for a
        # segment of notes.
        headers = BufferArena(header_length, 2 * under_way + 1)
        sealed = BufferArena(payload_length, under_way + (segment is not None)) if codec else None
        compressed = BufferArena(payload_length, under_way) if coder else None
        probes = BufferArena(header_length + payload_length, len(Direction))
        memories = memory, segment, headers, sealed, compressed, probes
        namespace = spec.namespace_of(namespace, chunk_bytes)
        header = ChunkHeader(
            namespace.fingerprint,
            chunk_bytes,
            alignment,
            verify=spec.verify,
            sealed=codec is not None,
        )
        context = TierContext(
            name=spec.name,
            namespace=namespace,
            chunk_bytes=chunk_bytes,
            header_bytes=header_length,
            payload_bytes=payload_length,
            clock=clock,
            logger=self._log.logger,
            report_removed=self._report_removed,
            regions=tuple(one.region for one in memories if one is not None),
            maintenance=maintenance,
            digest_bytes=header.digest_bytes,
        )
        self.call = TierCaller(partial(spec.tier_class, spec.config, context), secrets, self._log)
        sealer = None
        if codec is not None and sealed is not None:
            sealer = ChunkSealer(self.call, codec, header, sealed)
        gate = None
        if coder is not None:
            gate = CompressionGate(sealer or self.call, coder, alignment, clock, self._log)
        compressor = ChunkCompressor(
            chunk_bytes, alignment, coder, compressed, gate, options, clock
        )
        self._mover = ChunkMover(self.call, header, memory, headers, sealer, compressor)
        self._health = {
            direction: DirectionHealth(
                direction,
                self.call,
                header,
                buffer,
                options,
                Breaker(options, self._rng),
                report,
                self._refuse_queued,
                self._is_blocked,
                give_up,
            )
            for direction, buffer in zip(Direction, probes.take(len(Direction)), strict=True)
        }
        medium, locality = spec.tier_class.medium, spec.tier_class.locality
        is_heard = spec.inventory != "off" and not maintenance
        events = EventLog(spec.name, medium, locality, announce=announce if is_heard else None)
        notes = None
        if segment is not None:
            plain = ChunkCompressor(chunk_bytes, alignment, None, None, None, options, clock)
            mover = ChunkMover(self.call, header, segment, headers, sealer, plain)
            notes = NoteSegments(self.call, mover, segment, self._rng)
        reads = self._health[Direction.READ]
        interval_s = options.scan_interval_s
        self._inventory = Inventory(self.call, interval_s, events, lambda: reads.admits, notes)
        self._opening = TierOpening(self._open_tier, spec, clock, self._rng, report, self._log)
        self._queues: dict[Operation, deque[tuple[_Run, _Batch]]] = {
            operation: deque() for operation in _MOVES
        }
        self._running: Counter[Operation] = Counter()
        # Tasks that verify chunks after the tier's call has returned.
        self._verifying: set[asyncio.Task[None]] = set()
        # Limit the concurrent stores, so that loads can start even if all stores hang.
        self._max_stores = max(1, options.concurrency * 3 // 4)
        self._runs: set[_Run] = set()
        self._progress = asyncio.Event()
        self._metrics_timer: TimerHandle | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._closed = False
        self._progress_told_s = dict.fromkeys(_MOVES, -math.inf)

    def options_changed(self) -> None:
        """Warn about live options that have no effect. Any thread may call this."""
        if self.options.compress != "never" and self._no_coder is not None:
            self._log.warning("option 'compress' has no effect: %s", self._no_coder)

    def _coder_for(self, namespace: Namespace) -> tuple[Planes | None, str | None]:
        """Return the coder of stored chunks, or the reason why there is no coder."""
        dtype = str(namespace.facts.get("dtype", ""))
        make = Float8 if self.options.compress == "fp8" else Planes
        fault = None
        if self.spec.tier_class.fixed_length:
            fault = "all objects of this tier have one length"
        elif not dtype:
            fault = "the engine does not say which dtype the chunks have"
        elif not make.supports(dtype):
            fault = f"it is for {make.FLOATS}, and the chunks' dtype is {dtype}"
        if fault is not None:
            return None, fault
        try:
            return make(dtype), None
        except ConfigError as error:
            if self.options.compress == "never":
                return None, str(error)
            raise ConfigError(f"tier {self.spec.name!r}: {error}") from None

    async def open(self) -> bool:
        """Open the tier; return false if further attempts run in the background."""
        return await self._opening.begin()

    async def _open_tier(self) -> None:
        await self.call.open()
        context = self.call.tier.context
        if context.metrics.complete():
            self._watch_metrics()
        if not context.maintenance:
            reads = self._health[Direction.READ]
            watch = watch_store(self.call, self._report, lambda: reads.admits)
            for work in (watch, self._inventory.watch()):
                self._watches.append(self._clock.spawn(work, name=f"watch {self.spec.name}"))

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start or queue jobs; a closed loop cancels them. Call this on the loop's thread."""
        now_s = self._clock.now_s()
        for job in jobs:
            run = _Run(job, now_s, [None] * len(job.keys), JobResult(job.job_id, []))
            self._runs.add(run)
            self._start(run)
        self._fill()

    def log_end(self, topic: str, message: str) -> None:
        self._log.often(logging.WARNING, topic, message, ends_outage=True)

    async def drain(self, timeout_s: float) -> bool:
        self._drop_queued(Verdict.CANCELLED, *_MOVES)
        if await self._idle_within(timeout_s):
            return True
        self._conclude_all()
        return await self._idle_within(timeout_s)

    async def close(self) -> None:
        """Close the tier. Cancel all jobs, even jobs submitted later. Call :meth:`drain` first."""
        self.abandon()
        # Let cancelled calls end first, so that only hanging calls still run when the tier closes.
        await self._idle_within(_CALLS_END_S)
        # Stop the opening, because a tier must not be opened and closed at the same time.
        await self._opening.stop()
        tasks = [task for health in self._health.values() for task in health.tasks]
        tasks += self._watches
        for task in tasks:
            task.cancel()
        if tasks and not await wait_within(self._clock, _CALLS_END_S, tasks):
            self._log.warning("a probe or a watch did not end within %g s", _CALLS_END_S)
        if all(task.done() for task in self._watches):
            await self._inventory.close()
        if self._metrics_timer is not None:
            self._metrics_timer.cancel()
        await self.call.close()
        self._report_metrics()
        self._log.catch_up()

    def abandon(self) -> None:
        """End all jobs as cancelled, including jobs submitted later."""
        self._closed = True
        self._conclude_all()
        for queue in self._queues.values():
            queue.clear()

    def _conclude_all(self) -> None:
        for run in list(self._runs):
            self._conclude(run)

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            async with self._clock.timeout(timeout_s):
                while self._runs:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    def _start(self, run: _Run) -> None:
        job = run.job
        if self._closed or not job.keys:
            self._conclude(run)
            return
        if not self._opening.is_open or not self._health[run.direction].admits:
            self._conclude(run, Verdict.UNAVAILABLE)
            return
        run.timer = self._clock.call_at(job.deadline_s, self._expire, run)
        if job.operation in _MOVES:
            batches = batches_of(job.keys, self._batch_chunks)
            run.open_batches = len(batches)
            self._queues[job.operation].extend((run, batch) for batch in batches)
        else:
            run.open_batches = 1
            self._spawn(run, range(len(job.keys)))

    def _fill(self) -> None:
        for operation, queue in self._queues.items():
            while queue and self._has_room(operation):
                run, batch = queue.popleft()
                if not run.concluded:
                    self._running[operation] += 1
                    self._spawn(run, batch)

    def _has_room(self, operation: Operation) -> bool:
        if operation is Operation.STORE and self._running[operation] >= self._max_stores:
            return False
        batches, most = self._running.total(), self.options.concurrency
        return batches - len(self._verifying) < most and batches < 2 * most

    def _drop_queued(self, verdict: Verdict, *operations: Operation) -> None:
        for operation in operations:
            dropped, self._queues[operation] = self._queues[operation], deque()
            for run, batch in dropped:
                self._end_batch(run, batch, verdict)

    def _refuse_queued(self, direction: Direction) -> None:
        is_read = direction is Direction.READ
        self._drop_queued(Verdict.UNAVAILABLE, Operation.LOAD if is_read else Operation.STORE)

    def _spawn(self, run: _Run, batch: _Batch) -> None:
        work = {
            Operation.LOOKUP: self._lookup,
            Operation.TOUCH: self._call_in_order,
            Operation.DELETE: self._call_in_order,
            Operation.LOAD: self._transfer,
            Operation.STORE: self._transfer,
            Operation.PURGE: self._purge,
        }[run.job.operation]
        task = self._clock.spawn(work(run, batch), name=f"{run.job.operation.value} job")
        run.tasks.add(task)
        task.add_done_callback(lambda task: self._ended(run, batch, task))

    def _ended(self, run: _Run, batch: _Batch, task: asyncio.Task[None]) -> None:
        run.tasks.discard(task)
        if run.job.operation in _MOVES:
            self._running[run.job.operation] -= 1
            self._verifying.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._log.error("a batch failed inside the SDK", exc_info=failure)
        self._end_batch(run, batch, Verdict.CANCELLED if failure is None else Verdict.FAILED)
        if not run.concluded and run.job.operation in _MOVES:
            now_s = self._clock.now_s()
            if now_s >= self._progress_told_s[run.job.operation] + _PROGRESS_INTERVAL_S:
                self._progress_told_s[run.job.operation] = now_s
                self._report(Progressed(run.job.operation))
        if run.concluded and not run.tasks and run in self._runs:
            self._runs.discard(run)
            self._report(IoEnded(run.job.job_id))
        self._progress.set()
        self._fill()

    def _end_batch(self, run: _Run, batch: _Batch, verdict: Verdict) -> None:
        run.open_batches -= 1
        if run.concluded:
            return
        for index in batch:
            run.verdicts[index] = run.verdicts[index] or verdict
        if run.open_batches == 0:
            self._conclude(run)

    def _expire(self, run: _Run) -> None:
        operation = run.job.operation.value
        count = len(run.verdicts)
        chunks = "1 chunk was" if count == 1 else f"{count} chunks were"
        allowed_s = getattr(self.options, f"{operation}_deadline_s", None)
        when = "in time"
        if allowed_s is not None:
            # The deadline of a lookup may be longer than the option ``lookup_deadline``.
            allowed_s = max(allowed_s, round(run.job.deadline_s - run.started_s, 3))
            when = f"within {format_seconds(allowed_s)} ('{operation}_deadline')"
        self._log.often(
            logging.WARNING,
            f"{operation} deadline",
            f"{self.spec.name} {operation}: {chunks} not done {when}",
        )
        self._conclude(run, Verdict.TIMEOUT)
        # Count a lookup as late, not failed: a busy healthy tier may miss the short deadline.
        outcome = Outcome.LATE if run.job.operation is Operation.LOOKUP else Outcome.FAILED
        health = self._health[run.direction]
        halfway_s = (run.started_s + run.job.deadline_s) / 2
        for started_s in run.calls_s:
            # Ignore a call that began later, because it had too little time.
            if started_s <= halfway_s:
                health.note(outcome, "no answer by the deadline")
        if run.open_batches > len(run.tasks):  # some batches have not started
            queue = self._queues[run.job.operation]
            self._queues[run.job.operation] = deque(item for item in queue if item[0] is not run)
            # Count only jobs concluded by ``halfway_s``. The calls of this job may soon end.
            if self._is_blocked(run.direction, halfway_s):
                health.note(Outcome.BLOCKED, NO_ROOM)

    def _is_blocked(self, direction: Direction, since_s: float) -> bool:
        """Return true if hanging calls of jobs concluded by ``since_s`` block further calls."""
        hung: Counter[Operation] = Counter()
        for run in self._runs:
            if run.concluded_s <= since_s and run.job.operation in _MOVES:
                hung[run.job.operation] += len(run.tasks)
        if direction is Direction.WRITE and hung[Operation.STORE] >= self._max_stores:
            return True
        return hung.total() >= self.options.concurrency

    def _note(
        self, run: _Run, errors: Sequence[TierError | None], objects: Sequence[OffloadKey] = ()
    ) -> None:
        if not run.concluded:
            reason = next((str(error) for error in errors if error is not None), "")
            outcome = outcome_of(run.direction, errors)
            self._health[run.direction].note(outcome, reason, objects)

    async def _timed(self, run: _Run, call: Awaitable[T]) -> T:
        started_s = self._clock.now_s()
        run.calls_s.append(started_s)
        try:
            return await call
        finally:
            run.calls_s.remove(started_s)

    def _conclude(self, run: _Run, verdict: Verdict = Verdict.CANCELLED) -> None:
        """Report the job's result, with ``verdict`` for chunks that have no verdict yet."""
        if run.concluded:
            return
        run.concluded, run.concluded_s = True, self._clock.now_s()
        if run.timer is not None:
            run.timer.cancel()
        for task in run.tasks:
            task.cancel()
        result = copy(run.result)  # a call that outlives its job still changes the original
        result.verdicts = [given or verdict for given in run.verdicts]
        if run.job.operation in _MOVES:
            result.moved_bytes = result.verdicts.count(Verdict.OK) * self._chunk_bytes
        result.duration_s = run.concluded_s - run.started_s
        result.released = not run.tasks
        if result.released:
            self._runs.discard(run)
        if result.error is not None:
            self._log.often(logging.WARNING, f"{run.job.operation.value} error", result.error)
        self._report(result)
        self._progress.set()

    def _settle(self, run: _Run, errors: dict[int, TierError | None]) -> None:
        if run.concluded:
            return
        for index, error in errors.items():
            run.verdicts[index] = verdict_of(error)
            # A chunk evicted since the lookup is an expected miss, which needs no log line.
            is_miss = error is None or isinstance(error, ChunkNotFoundError)
            if run.result.error is None and not is_miss:
                run.result.error = str(error)

    async def _lookup(self, run: _Run, batch: _Batch) -> None:
        parts = batches_of(run.job.keys, self._call_keys)
        if len(parts) == 1:
            await self._look_up(run, batch)
            return
        await self._clock.gather_bounded(
            [partial(self._look_up, run, part) for part in parts], limit=self.options.concurrency
        )

    async def _look_up(self, run: _Run, batch: _Batch) -> None:
        keys = [run.job.keys[index] for index in batch]
        for attempt in itertools.count():
            try:
                found = await self._timed(run, self.call.lookup(keys, run.job.request))
            except TierError as error:
                self._note(run, [error], keys)
                if error.retryable and await self._pause(run, attempt):
                    continue
                self._settle(run, dict.fromkeys(batch, error))
                return
            self._note(run, [None])
            self._inventory.removed(k for k, there in zip(keys, found, strict=True) if not there)
            if not run.concluded:
                for index, there in zip(batch, found, strict=True):
                    run.verdicts[index] = Verdict.OK if there else Verdict.NOT_FOUND
            return

    async def _call_in_order(self, run: _Run, batch: _Batch) -> None:
        """Call the tier for one part after the other, because the order of touches matters."""
        method = self.call.touch if run.job.operation is Operation.TOUCH else self.call.delete
        for part in batches_of(run.job.keys, self._call_keys):
            keys = [run.job.keys[index] for index in part]
            if await self._settle_all(run, part, method(keys)) and method == self.call.delete:
                self._inventory.removed(keys)

    async def _purge(self, run: _Run, batch: _Batch) -> None:
        """Delete every chunk, after all running stores have ended."""
        self._drop_queued(Verdict.CANCELLED, Operation.STORE)
        while self._running[Operation.STORE]:
            self._progress.clear()
            await self._progress.wait()
        if await self._settle_all(run, batch, self.call.delete_all()):
            self._inventory.emptied()

    async def _settle_all(self, run: _Run, batch: _Batch, call: Awaitable[None]) -> bool:
        error: TierError | None = None
        try:
            await call
        except TierError as raised:
            error = raised
        self._settle(run, dict.fromkeys(batch, error))
        return error is None

    async def _transfer(self, run: _Run, batch: _Batch) -> None:
        with self._mover.transfers(run.job, batch) as pending, self._inventory.during() as gone:
            for attempt in itertools.count():
                errors = await self._timed(run, self._move(run, pending))
                self._inventory.moved(run.job, errors, gone)
                self._note(run, list(errors.values()), [pending[index].key for index in errors])
                again = {index for index, error in errors.items() if error and error.retryable}
                if not again or not await self._pause(run, attempt):
                    break
                self._settle(run, {index: errors[index] for index in errors.keys() - again})
                pending = {index: pending[index] for index in sorted(again)}
            self._settle(run, errors)

    async def _move(self, run: _Run, transfers: dict[int, Transfer]) -> dict[int, TierError | None]:
        operation = run.job.operation
        errors = await self._mover.call(operation, transfers, run.result)
        if operation is Operation.STORE:
            return errors
        if not any(error is not None and error.retryable for error in errors.values()):
            # Start the next call before computing digests, so that the tier stays busy.
            task = asyncio.current_task()
            assert task is not None
            self._verifying.add(task)
            self._fill()
            await self._clock.sleep(0)
        await self._mover.verify(transfers, errors, run.result)
        return errors

    async def _pause(self, run: _Run, attempt: int) -> bool:
        """Wait before a retry; return false if the call must not be retried."""
        health = self._health[run.direction]
        if attempt >= self.options.retries or run.concluded or not health.admits:
            return False
        delay_s = self.options.retry_delay_s * 2**attempt * self._rng.uniform(0.5, 1.5)
        if self._clock.now_s() + delay_s >= run.job.deadline_s:
            return False
        await self._clock.sleep(delay_s)
        if not health.admits:
            return False
        run.result.retries += 1
        return True

    def _watch_metrics(self) -> None:
        self._report_metrics()
        due_s = self._clock.now_s() + _METRICS_INTERVAL_S
        self._metrics_timer = self._clock.call_at(due_s, self._watch_metrics)

    def _report_metrics(self) -> None:
        counters, gauges = self.call.tier.context.metrics.take_changes()
        if counters or gauges:
            self._report(MetricsChanged(counters, gauges))

    def _report_removed(
        self, keys: Iterable[OffloadKey], *, evicted: bool = False, expired: bool = False
    ) -> None:
        """Report removed chunks except the probes' chunk. Any thread may call this."""
        # Convert the keys here, so that an invalid key causes an error in the backend's own call.
        removed = [bytes(memoryview(key)) for key in keys if key != CANARY_KEY]
        if removed:
            self._inventory.removed(removed)
            self._report(ChunksRemoved(removed, evicted, expired))
