"""The client of one secondary tier, in the engine's thread."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.events import EventLog, OffloadingEvent
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.registry import build_facts
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.runner.jobs import (
    EVERY_CHUNK,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    Operation,
    Progressed,
    Report,
    RunnerStopped,
    Verdict,
    uniform_result,
)
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.tiering.pace import SLOW_S, Pace
from kvtier_sdk.tiering.spans import span_maker
from kvtier_sdk.tiering.tier_counts import Outages, count_result, note_state
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.tiering.tier_record import JobTable, KnownChunks, Losses
from kvtier_sdk.types import Capability, OffloadKey, RequestContext

#: The request context of jobs that serve no particular request.
NO_REQUEST = RequestContext("kvtier")

#: Time limit of one attempt to empty a tier. The next attempt deletes the remaining chunks.
_PURGE_DEADLINE_S = 600.0
#: A job without a result this long after its deadline gets the verdict TIMEOUT.
_CONCLUSION_GRACE_S = 1.0
_LOOK_S = 0.25  # between two checks for overdue jobs and for a slow tier

_OK: Final = Verdict.OK
_LOOKUP: Final = Operation.LOOKUP
_LOAD: Final = Operation.LOAD
_STORE: Final = Operation.STORE
_TOUCH: Final = Operation.TOUCH
_DELETE: Final = Operation.DELETE
_PURGE: Final = Operation.PURGE

_log = logging.getLogger("kvtier.client")


class TierClient:
    """The client of one secondary tier, for an engine with its own manager.

    During a step, the client collects lookups, loads and stores. :meth:`flush` hands them to the
    tier's runner, and :meth:`poll` passes the results to the listener. Only :meth:`open`,
    :meth:`drain` and :meth:`close` wait, and only :meth:`open` raises storage errors. Call all
    methods on one thread, unless a method's description says otherwise.

    If the tier removes a chunk while storing it, the client reports no event for the store.

    ::

        class Engine(TierListener):
            def loaded(self, tier, job, verdicts):
                ...  # the chunks with Verdict.OK are in their slots

        with open_tier("redis://cache/0", pool, namespace, Engine()) as tier:
            tier.load([key], [slot], RequestContext("r1"))
            tier.flush()
            tier.poll()  # once a step

    Attributes:
        spec: the tier's specification.
        stats: live counters; the caller counts ``hit_chunks``.
        chunk_bytes: payload of a chunk.
        jobs: jobs that were handed to the runner and are not yet released.
        losses: the reasons why chunks are missing from the tier.
        load_bytes: payload of collected and running loads.
        store_bytes: payload of collected and running stores.
        is_drained: true to take the tier out of use. Running jobs still end, but
            :attr:`takes_reads` and :attr:`takes_stores` are false. Any thread may set this.
    """

    def __init__(
        self,
        spec: TierSpec,
        runner: TierRunner,
        listener: TierListener,
        *,
        clock: Clock,
        chunk_bytes: int,
        max_store_bytes: int | None = None,
        events: bool = False,
        note_of: Callable[[OffloadKey], bytes] | None = None,
    ) -> None:
        if spec.runner.max_queue_bytes < chunk_bytes:
            raise ConfigError(
                f"tier {spec.name!r}: option 'max_queue' is "
                f"{format_bytes(spec.runner.max_queue_bytes)}, less than one chunk of "
                f"{format_bytes(chunk_bytes)}; give it at least that, or leave it out"
            )
        self.spec = spec
        self.stats: TierStats = TierStats(
            spec.name,
            spec.backend,
            build_facts(spec.backend, spec.tier_class.contract_version),
        )
        self.jobs: JobTable = JobTable()
        self.load_bytes: int = 0
        self.store_bytes: int = 0
        self.is_drained: bool = False
        self._runner = runner
        self._listener = listener
        self._clock = clock
        self.log: TierLog = TierLog(spec.name, clock)
        self.losses: Losses = Losses(clock)
        self.chunk_bytes: int = chunk_bytes
        self._max_load_bytes = spec.runner.max_queue_bytes
        self._max_store_bytes = min(max_store_bytes or math.inf, spec.runner.max_queue_bytes)
        self.pace: Pace = Pace(spec.runner, chunk_bytes)
        self._outages = Outages(self.stats, self._log_end)
        tier_class = spec.tier_class
        of = spec.name, tier_class.medium, tier_class.locality
        self._events = EventLog(*of, is_enabled=events)
        self._note_of = note_of  # returns a chunk's note, which the tier stores for routers
        self._make_span = span_maker(spec.name, clock)
        self._job_ids = itertools.count(1)
        # The collected jobs, and for each request the load job that gets the request's next chunks.
        self._collected: list[Job] = []
        self._open_loads: dict[str, Job] = {}
        self._touched: Sequence[OffloadKey] = ()
        self._refused: list[JobResult] = []
        self._known = KnownChunks()
        self._next_look_s = -math.inf
        capabilities = tier_class.capabilities
        self._touches = Capability.TOUCH in capabilities
        self._erasable = Capability.SCAN | Capability.DELETE in capabilities
        self._stale = False  # true while a purge is due
        self._purging = False
        self._purge_at_s = -math.inf

    def open(self) -> None:
        """Start the runner and open the tier; wait for up to ``open_deadline``.

        A tier that is not ``required`` may still refuse reads and stores when this method returns.
        The runner opens the tier once the store can be reached; :meth:`poll` updates :attr:`stats`.

        Raises:
            ConfigError: a setting cannot work; the runner has ended.
            BackendError: the tier's process cannot import the backend; the runner has ended.
            TierError: the store refuses the credentials, or it cannot be reached and the tier is
                ``required``; the runner has ended.
        """
        self.stats.note_open(self._runner.start())
        self._outages.update()

    def close(self, timeout_s: float = 10.0) -> None:
        """Hand over the collected jobs, drain and close the tier, and end its runner.

        When this method returns, every job has a result. If a job is not released, its I/O hangs in
        a thread, and its slots must not be reused. Draining and closing may each take
        ``timeout_s``. A second call does nothing.
        """
        self.flush()
        self._runner.close(timeout_s)
        self.poll()
        for job in self.jobs.running:
            self._conclude(
                uniform_result(job, Verdict.CANCELLED, released=False), self._clock.now_s()
            )
        self.log.catch_up()
        self.stats.is_open = 0

    def options_changed(self) -> None:
        """Pass changed live options to the tier's runner. Any thread may call this."""
        self._runner.options_changed()

    def drain(self, timeout_s: float) -> bool:
        """Cancel queued loads and stores, wait for running jobs, and apply the results.

        After ``timeout_s`` seconds, cancel running jobs, and wait as long again for their end.
        Return true if all I/O on the slots has ended.
        """
        ended = self._runner.drain(timeout_s)
        self.poll()
        return ended

    def stats_now(self) -> TierStats:
        """Return a copy of the counters with the tier's current state. Any thread may call this.

        An idle engine does not poll, so the copy includes the reports since the last poll.
        """
        now_s = self._clock.now_s()
        # Copy before the peek. In the other order, a poll in between would count a report twice.
        stats = self.stats.copy()
        reports = self._runner.peek()
        for report in reports:
            note_state(stats, report, now_s)
        # A result since the last poll is progress that the pace has not recorded yet.
        is_stuck = not any(isinstance(report, JobResult | Progressed) for report in reports)
        stats.is_slow = int(is_stuck and self.pace.is_slow(now_s))
        return stats

    @property
    def takes_reads(self) -> bool:
        """False if the read breaker is open, a purge is due, or the tier is drained."""
        return not (self.stats.reads_open or self._stale or self.is_drained)

    @property
    def takes_stores(self) -> bool:
        """False if the write breaker is open, a purge is due, or the tier is drained or slow."""
        stats = self.stats
        return not (stats.stores_open or self._stale or self.is_drained or stats.is_slow)

    @property
    def has_work(self) -> bool:
        """True if jobs are collected or await their results."""
        return bool(self._collected or self.jobs or self._refused)

    @property
    def is_idle(self) -> bool:
        """True if no job is collected or running, and all I/O on the slots has ended."""
        return not self.has_work and not self.jobs.unreleased

    @property
    def load_room(self) -> int:
        """Number of chunks that still fit into the load queue."""
        return max(0, (self._max_load_bytes - self.load_bytes) // self.chunk_bytes)

    @property
    def store_room(self) -> int:
        """Number of chunks that still fit into the store queue; a slow tier has a shorter queue."""
        limit_bytes = min(self._max_store_bytes, self.pace.store_bytes)
        return int(max(0, (limit_bytes - self.store_bytes) // self.chunk_bytes))

    def held_slots(self) -> Iterator[int]:
        """Yield the slots of all loads and stores that are not yet released."""
        for job in [*self._collected, *self.jobs.running, *self.jobs.quarantined]:
            yield from job.slots

    def expected_load_s(self, chunks: int) -> float:
        """Estimate the seconds to load all queued chunks and ``chunks`` more; 0.0 if unknown."""
        size_bytes = self.load_bytes + chunks * self.chunk_bytes
        return self.pace.expected_s(size_bytes, self._clock.now_s())

    def knows(self, key: OffloadKey) -> bool:
        """Return true if the chunk ``key`` can be loaded without a lookup.

        A chunk is known if the tier has stored or loaded it and has not reported its removal. If a
        known chunk was lost, its load fails, and all chunks become unknown. No chunk is known while
        loads run and the tier has been silent for ``lookup_deadline``, because a lookup detects a
        hanging tier sooner than a load.
        """
        within_s = self.spec.runner.lookup_deadline_s
        return key in self._known and self.pace.answers(self._clock.now_s(), within_s)

    def lookup(
        self,
        keys: Sequence[OffloadKey],
        request: RequestContext,
        *,
        tag: Any = None,
        worth_s: float = 0.0,
    ) -> Job:
        """Queue a lookup for the next :meth:`flush`.

        Args:
            keys: the chunks. Do not change the sequence after the call.
            request: the request that needs the chunks.
            tag: any object, which the listener finds in ``job.tag``.
            worth_s: seconds that the engine would need to compute the chunks. The lookup gets
                this time, but at least ``lookup_deadline`` and at most ``max_lookup_deadline``.
        """
        options = self.spec.runner
        within_s = max(options.lookup_deadline_s, min(worth_s, options.max_lookup_deadline_s))
        return self._collect(_LOOKUP, keys, (), request, within_s, tag)

    def load(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        request: RequestContext,
        *,
        whole: bool = False,
        tag: Any = None,
    ) -> Job | None:
        """Queue a load of as many leading chunks as fit into the queue.

        Loads of one request in one step become one job, unless they have a tag.

        Args:
            keys: the chunks.
            slots: a slot index for each chunk; the tier writes the slots until the job is released.
            request: the request that needs the chunks.
            whole: true to accept all chunks or no chunk. An empty queue always accepts all chunks.
            tag: as for :meth:`lookup`.

        Returns:
            The job, or ``None`` if no chunk was accepted. Rejected chunks count as dropped.
        """
        taken = self._admit(_LOAD, keys, whole=whole)
        if not taken:
            return None
        self.load_bytes += taken * self.chunk_bytes
        job = self._open_loads.get(request.request_id) if tag is None else None
        if job is None:
            deadline_s = self.spec.runner.load_deadline_s
            job = self._collect(_LOAD, [], [], request, deadline_s, tag)
            if tag is None:
                self._open_loads[request.request_id] = job
        job.keys += keys[:taken]  # type: ignore[operator]  # a list until it is handed over
        job.slots += slots[:taken]  # type: ignore[operator]
        return job

    def store(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        request: RequestContext,
        *,
        whole: bool = False,
        tag: Any = None,
    ) -> Job | None:
        """Queue a store of as many leading chunks as fit into the queue.

        The parameters ``keys``, ``slots``, ``request``, ``whole`` and ``tag``, and the result, are
        as for :meth:`load`. The tier reads the slots until the job is released.
        """
        taken = self._admit(_STORE, keys, whole=whole)
        if not taken:
            return None
        self.store_bytes += taken * self.chunk_bytes
        if taken < len(keys):
            keys, slots = keys[:taken], slots[:taken]
        job = self._collect(_STORE, keys, slots, request, self.spec.runner.store_deadline_s, tag)
        job.queue_bytes = self.store_bytes
        return job

    def delete(
        self, keys: Sequence[OffloadKey], request: RequestContext = NO_REQUEST, *, tag: Any = None
    ) -> Job:
        """Queue a deletion of ``keys`` for the next :meth:`flush`.

        The tier must have ``Capability.DELETE``. ``request`` and ``tag`` are as for :meth:`lookup`.
        """
        return self._collect(_DELETE, keys, (), request, self.spec.runner.store_deadline_s, tag)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Report to a tier with ``Capability.TOUCH`` that ``keys`` were used, most recent last.

        If this method is called twice in a step, only the second call's ``keys`` count.
        """
        if self._touches and self.takes_reads:
            self._touched = keys

    def purge(self) -> None:
        """Delete every chunk of the namespace, beginning with the next :meth:`flush`.

        The tier gets no lookups, loads or stores until the purge has succeeded; a failed purge is
        retried. A tier that cannot list and delete its chunks stays out of use.
        """
        if not self._stale and not self._erasable:
            _log.warning(
                "tier %s cannot list and delete its chunks: a reset of all tiers puts it out of "
                "use until the engine is started again",
                self.spec.name,
            )
        self._stale = True
        self._known.purge(next(self._job_ids))

    def drop_stores(self, keys: Sequence[OffloadKey]) -> None:
        """Count the chunks ``keys`` as dropped because the tier refuses stores."""
        if keys:
            self._drop(keys, f"store.{self._refusal}")

    def drop_lookups(self, count: int) -> None:
        """Count the lookups of ``count`` chunks as dropped because the tier refuses reads."""
        self.stats.lookup_chunks += count
        self.stats.dropped["lookup.unavailable"] += count

    def withdraw(self) -> None:
        """Cancel the collected jobs. The listener receives only ``released`` for each job."""
        withdrawn = self._collected
        self._collected, self._open_loads, self._touched = [], {}, ()
        for job in withdrawn:
            self._return_bytes(job)
            self._listener.released(self, job)

    def flush(self) -> None:
        """Hand the collected jobs to the tier's runner."""
        if self._touched:
            within_s = self.spec.runner.store_deadline_s
            self._collect(_TOUCH, self._touched, (), NO_REQUEST, within_s)
            self._touched = ()
        if self._stale and not self.is_drained:
            self._collect_purge()
        jobs = self._collected
        if not jobs:
            return
        self._collected, self._open_loads = [], {}
        now_s = self._clock.now_s()
        for job in jobs:
            job.handed_s = now_s
            self.jobs.add(job)
            self.pace.begin(job, now_s)
            if self._note_of is not None and job.operation is _STORE:
                job.notes = [self._note_of(key) for key in job.keys]
            if job.operation is _LOOKUP:
                self.stats.lookup_chunks += len(job.keys)
        self._refused += self._runner.submit(jobs)

    def poll(self) -> None:
        """Apply the tier's reports since the last call, and call the listener."""
        reports = self._runner.poll()
        if not (reports or self.jobs):
            return
        now_s = self._clock.now_s()
        if self._refused:
            refused, self._refused = self._refused, []
            for result in refused:
                self._conclude(result, now_s)
        for report in reports:
            self._apply(report, now_s)
        if self.stats.is_slow or now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._conclude_overdue(now_s)
            self._look_for_slowness(now_s)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, oldest first."""
        return self._events.take()

    def _collect(
        self,
        operation: Operation,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        request: RequestContext,
        within_s: float,
        tag: Any = None,
    ) -> Job:
        deadline_s = self._clock.now_s() + within_s
        job = Job(next(self._job_ids), operation, keys, slots, request, deadline_s, tag)
        self._collected.append(job)
        return job

    def _collect_purge(self) -> None:
        now_s = self._clock.now_s()
        if self._erasable and not self._purging and now_s >= self._purge_at_s:
            self._purging = True
            self._purge_at_s = now_s + self.spec.runner.max_probe_interval_s
            self._collect(_PURGE, [EVERY_CHUNK], (), NO_REQUEST, _PURGE_DEADLINE_S)

    def _admit(self, operation: Operation, keys: Sequence[OffloadKey], *, whole: bool) -> int:
        """Return how many of the chunks the queue accepts; count the others as dropped."""
        is_load = operation is _LOAD
        count = len(keys)
        # A drained tier accepts loads, because the manager may have chosen it before the drain.
        if (self.stats.reads_open or self._stale) if is_load else not self.takes_stores:
            taken, reason = 0, "unavailable" if is_load else self._refusal
        else:
            taken = min(count, self.load_room if is_load else self.store_room)
            if whole and taken < count:
                is_empty = not (self.load_bytes if is_load else self.store_bytes)
                taken = count * is_empty
            reason = "queue_full"
        if taken < count:
            self._drop(keys[taken:], f"{operation.value}.{reason}")
        return taken

    def _drop(self, keys: Sequence[OffloadKey], reason: str) -> None:
        self.stats.dropped[reason] += len(keys)
        if not reason.startswith("load."):
            self.losses.note(keys, reason)

    @property
    def _refusal(self) -> str:
        if self.is_drained:
            return "drained"
        return "unavailable" if self.stats.stores_open or self._stale else "slow"

    def _return_bytes(self, job: Job) -> None:
        if job.operation is _STORE:
            self.store_bytes -= len(job.keys) * self.chunk_bytes
        elif job.operation is _LOAD:
            self.load_bytes -= len(job.keys) * self.chunk_bytes

    def _apply(self, report: Report, now_s: float) -> None:
        if isinstance(report, JobResult):
            self._conclude(report, now_s)
        elif isinstance(report, IoEnded):
            self._release(report.job_id)
        elif isinstance(report, Progressed):
            self.pace.progress(report.operation, now_s)
        elif isinstance(report, ChunksRemoved):
            reason = "purged" if self._purging else "removed"
            if report.evicted:
                self.stats.evicted_chunks += len(report.keys)
                reason = "evicted"
            elif report.expired:
                reason = "expired"
            self.losses.note(report.keys, reason)
            self._listener.removed(self, report.keys, evicted=report.evicted)
            self._known.discard(report.keys)
            self.jobs.note_removed(report.keys)
            self._events.add(report.keys, removed=True)
        else:
            note_state(self.stats, report, now_s)
            self._outages.update()
            if isinstance(report, RunnerStopped):
                self._stopped(report, now_s)

    def _conclude(self, result: JobResult, now_s: float) -> None:
        job = self.jobs.conclude(result.job_id)
        if job is not None:
            if len(result.verdicts) != len(job.keys):
                _log.error("tier %s: a result that does not fit its job", self.spec.name)
                result.verdicts = [Verdict.FAILED] * len(job.keys)
            job.result = result
            self._return_bytes(job)
            count_result(self.stats, job, result, now_s)
            self.pace.end(job, result, now_s)
            self._tell(job, result)
            if self._make_span is not None:
                self._make_span(job, result)
        if result.released:
            self._release(result.job_id)

    def _tell(self, job: Job, result: JobResult) -> None:
        operation, verdicts = job.operation, result.verdicts
        if operation is _LOOKUP:
            self._listener.answered(self, job, verdicts)
        elif operation is _LOAD:
            self._listener.loaded(self, job, verdicts)
            present = self.jobs.without_removed(job, list(job.keys))
            self._known.loaded(job, verdicts, present)
            if verdicts.count(_OK) < len(verdicts):
                self.losses.failed(job, verdicts, set(present))
        elif operation is _STORE:
            self._listener.stored(self, job, verdicts)
            stored = [k for k, v in zip(job.keys, verdicts, strict=True) if v is _OK]
            if len(stored) < len(verdicts):
                self.losses.failed(job, verdicts, ())
            stored = self.jobs.without_removed(job, stored)
            self._known.found(job, stored)
            self._events.add(stored, removed=False)
        elif operation is _DELETE:
            self._known.discard(job.keys)
            self._listener.deleted(self, job, verdicts)
        elif operation is _PURGE:
            # The job serves later calls of purge() too, because no store was accepted while it ran.
            self._purging = False
            self._stale = verdicts[0] is not _OK

    def _look_for_slowness(self, now_s: float) -> None:
        is_slow = self.pace.is_slow(now_s)
        if is_slow == self.stats.is_slow:
            return
        name = self.spec.name
        self.stats.is_slow = int(is_slow)
        if is_slow:
            text = f"no load or store has made progress for {SLOW_S:g} s; it gets no stores"
            self.log.often(logging.WARNING, "slow", f"{name}: slow: {text}")
        else:
            self._log_end("no longer slow", f"{name}: no longer slow")
        self._outages.update()

    def _log_end(self, topic: str, message: str) -> None:
        """Log the end of a condition, after any messages that were held back."""
        self.log.say_held_back()
        if not self._runner.log_end(topic, message):
            self.log.often(logging.WARNING, topic, message)

    def _release(self, job_id: int) -> None:
        job = self.jobs.release(job_id)
        if job is not None:
            self._listener.released(self, job)

    def _stopped(self, report: RunnerStopped, now_s: float) -> None:
        # The chunks are lost if they were in the stopped process's memory.
        self._known.clear()
        for job in self.jobs.running:
            error = None
            if report.reason is not None:
                error = f"{self.spec.name} {job.operation.value}: {report.reason}"
            self._conclude(uniform_result(job, report.verdict, error=error), now_s)
        if report.io_ended:
            for job in self.jobs.quarantined:
                self._release(job.job_id)

    def _conclude_overdue(self, now_s: float) -> None:
        """Time out overdue jobs. They suggest that the tier blocks the runner's event loop."""
        for job in self.jobs.running:
            if now_s > job.deadline_s + _CONCLUSION_GRACE_S:
                name, operation = self.spec.name, job.operation.value
                error = f"{name} {operation}: no answer; the tier blocks its loop"
                self.log.often(logging.ERROR, f"{operation} without an answer", error)
                result = uniform_result(job, Verdict.TIMEOUT, error=error, released=False)
                self._conclude(result, now_s)
                self._runner.suspect()
