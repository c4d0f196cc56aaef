"""What becomes of a runner's reports: verdicts take effect, pins go, figures are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvtier_sdk.events import PRIMARY, OffloadingEvent
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    Operation,
    ProcessRestarted,
    Report,
    Verdict,
    failure_counts,
)
from kvtier_sdk.tiering.cascade import Cascade
from kvtier_sdk.tiering.lookups import LookupTable
from kvtier_sdk.tiering.promotions import Promotions
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.tiering.tier_port import TierPort
from kvtier_sdk.types import Locality, Medium, OffloadKey

_log = logging.getLogger("kvtier.manager")

_OK, _NOT_FOUND = Verdict.OK, Verdict.NOT_FOUND

#: How long after its deadline a job's conclusion may arrive before the manager does without.
_CONCLUSION_GRACE_S = 1.0


class EventLog:
    """Events since they were last taken; keeps none where nobody takes them.

    Args:
        wanted: whether anybody does.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self._events: list[OffloadingEvent] = []

    def primary(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        """Chunks came into the primary tier, or left it."""
        if self.wanted and keys:
            self._events.append(OffloadingEvent(keys, PRIMARY, Medium.CPU, Locality.LOCAL, removed))

    def secondary(self, port: TierPort, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        """Chunks came into a secondary tier, or left it."""
        if self.wanted and keys:
            self._events.append(port.event(keys, removed=removed))

    def take(self) -> list[OffloadingEvent]:
        """Take them, oldest first."""
        taken, self._events = self._events, []
        return taken


class ReportDesk:
    """Applies the reports of all tiers to the manager's parts. On the engine's thread."""

    def __init__(
        self,
        primary: PrimaryTier,
        questions: LookupTable,
        promotions: Promotions,
        cascade: Cascade,
        events: EventLog,
    ) -> None:
        self._primary = primary
        self._questions = questions
        self._promotions = promotions
        self._cascade = cascade
        self._events = events
        self._on_job: dict[Operation, Callable[[TierPort, Job, JobResult], None]] = {
            Operation.LOOKUP: self._answered,
            Operation.LOAD: self._loaded,
            Operation.STORE: self._stored,
            Operation.TOUCH: lambda port, job, result: None,
            Operation.PURGE: self._purged,
        }

    def take(self, port: TierPort, reports: Sequence[Report], now_s: float) -> None:
        """Apply reports of one tier, in their order."""
        for report in reports:
            if isinstance(report, JobResult):
                self._conclude(port, report, now_s)
            elif isinstance(report, IoEnded):
                self._release(port, report.job_id)
            elif isinstance(report, ChunksRemoved):
                port.stats.evicted_chunks += len(report.keys)
                self._events.secondary(port, report.keys, removed=True)
                if self._events.wanted:
                    port.departures.note(report.keys)
            elif isinstance(report, BreakerMoved):
                port.breaker_moved(report)
            elif isinstance(report, ProcessRestarted):
                port.stats.restarts += 1

    def give_up_overdue(self, port: TierPort, now_s: float) -> None:
        """Conclude jobs in the place of a runner that does not: its loop must be stuck."""
        for job in port.jobs.overdue(now_s, _CONCLUSION_GRACE_S):
            error = f"{port.spec.name} {job.operation.value}: no answer; the tier blocks its loop"
            _log.error("%s", error)
            verdicts = [Verdict.TIMEOUT] * len(job.keys)
            result = JobResult(job.job_id, verdicts, error=error, released=False)
            self._conclude(port, result, now_s)

    def _conclude(self, port: TierPort, result: JobResult, now_s: float) -> None:
        job = port.jobs.conclude(result.job_id)
        if job is not None:
            port.settled(job, result.moved_bytes, now_s)
            self._on_job[job.operation](port, job, result)
            if result.retries:
                port.stats.retries[job.operation.value] += result.retries
            if result.error is not None:
                port.stats.note_error(result.error)
        if result.released:
            self._release(port, result.job_id)

    def _release(self, port: TierPort, job_id: int) -> None:
        """The tier touches the job's slots no more."""
        job = port.jobs.release(job_id)
        if job is None:
            return
        if job.operation is Operation.STORE:
            slots, unpin = self._primary.slots, self._primary.unpin
            for index in job.slots:
                unpin(slots[index])
        elif job.operation is Operation.LOAD:
            self._promotions.released(job)

    def _answered(self, port: TierPort, job: Job, result: JobResult) -> None:
        verdicts = result.verdicts
        found = verdicts.count(_OK)
        absent = verdicts.count(_NOT_FOUND)
        stats = port.stats
        stats.found_chunks += found
        stats.absent_chunks += absent
        # That a chunk is not there is an answer to a lookup, not a failure of it.
        if found + absent < len(verdicts):
            for reason, count in failure_counts(verdicts).items():
                if reason != _NOT_FOUND.value:
                    stats.failures[f"lookup.{reason}"] += count
        self._questions.answered(job.job_id, port.bit, verdicts)

    def _loaded(self, port: TierPort, job: Job, result: JobResult) -> None:
        stats = port.stats
        stats.loaded_chunks += self._count_failures(port, job, result)
        stats.loaded_bytes += result.moved_bytes
        stats.load_s += result.duration_s
        landed = self._promotions.concluded(job, result.verdicts)
        if landed:
            self._primary.publish(landed, job.request)
            self._cascade.landed(landed)
            self._events.primary([slot.key for slot in landed], removed=False)

    def _stored(self, port: TierPort, job: Job, result: JobResult) -> None:
        stats = port.stats
        stored = self._count_failures(port, job, result)
        stats.stored_chunks += stored
        stats.stored_bytes += result.moved_bytes
        stats.store_s += result.duration_s
        self._cascade.settled(port, job, result.verdicts)
        if self._events.wanted:
            verdicts = zip(job.keys, result.verdicts, strict=True)
            keys = [key for key, verdict in verdicts if verdict is _OK]
            self._events.secondary(port, port.departures.without(job, keys), removed=False)

    def _purged(self, port: TierPort, job: Job, result: JobResult) -> None:
        port.purged(succeeded=bool(self._count_failures(port, job, result)))

    def _count_failures(self, port: TierPort, job: Job, result: JobResult) -> int:
        """Count what failed; how many did not."""
        succeeded = result.verdicts.count(_OK)
        if succeeded < len(job.keys):
            for reason, count in failure_counts(result.verdicts).items():
                port.stats.failures[f"{job.operation.value}.{reason}"] += count
        return succeeded
