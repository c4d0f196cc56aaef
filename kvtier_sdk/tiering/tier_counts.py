"""Updates a tier's counters from the tier's reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvtier_sdk.metrics import TierStats
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    Job,
    JobResult,
    MetricsChanged,
    OpeningEnded,
    Operation,
    ProcessStarted,
    Report,
    RunnerStopped,
    UsageChanged,
    Verdict,
)

_WHAT = {
    Direction.READ: "chunks were not looked up in it",
    Direction.WRITE: "chunks were not stored in it",
}


def count_result(stats: TierStats, job: Job, result: JobResult, now_s: float) -> None:
    verdicts, operation = result.verdicts, job.operation
    succeeded = verdicts.count(Verdict.OK)
    absent = 0
    if operation is Operation.LOOKUP:
        # An absent chunk is a valid answer to a lookup, not a failure.
        absent = verdicts.count(Verdict.NOT_FOUND)
        stats.found_chunks += succeeded
        stats.absent_chunks += absent
    elif operation is Operation.LOAD:
        stats.loaded_chunks += succeeded
        stats.loaded_bytes += result.moved_bytes
        stats.loaded_object_bytes += result.object_bytes
        stats.expand_s += result.coding_s
    elif operation is Operation.STORE:
        stats.stored_chunks += succeeded
        stats.stored_bytes += result.moved_bytes
        stats.stored_object_bytes += result.object_bytes
        stats.compress_s += result.coding_s
    if operation in (Operation.LOOKUP, Operation.LOAD, Operation.STORE):
        stats.job_s[operation.value].observe(result.duration_s)
        stats.job_chunks[operation.value].observe(len(verdicts))
    # A failed touch is not counted, because it loses no chunk.
    if succeeded + absent < len(verdicts) and operation is not Operation.TOUCH:
        for verdict, count in Counter(verdicts).items():
            if verdict is not Verdict.OK and not (absent and verdict is Verdict.NOT_FOUND):
                stats.failures[f"{operation.value}.{verdict.value}"] += count
    if result.retries:
        stats.retries[operation.value] += result.retries
    if result.error is not None:
        stats.note_error(result.error, now_s)


def note_state(stats: TierStats, report: Report, now_s: float) -> None:
    if isinstance(report, BreakerMoved):
        is_open = int(report.state is not BreakerState.CLOSED)
        if report.direction is Direction.READ:
            stats.reads_open = is_open
        else:
            stats.stores_open = is_open
    elif isinstance(report, MetricsChanged):
        stats.note_backend(report.counters, report.gauges)
    elif isinstance(report, UsageChanged):
        stats.note_usage(report.usage)
    elif isinstance(report, RunnerStopped):
        if report.reason is not None:
            stats.note_open(False)
    elif isinstance(report, ProcessStarted):
        stats.restarts += report.is_restart
        stats.note_open(report.is_open)
    elif isinstance(report, OpeningEnded):
        if report.error is None:
            stats.note_open(True)
        else:
            stats.open_failures += 1
            stats.note_error(report.error, now_s)


class Outages:
    """Logs the number of chunks that were not looked up or stored during an outage."""

    def __init__(self, stats: TierStats, log_end: Callable[[str, str], None]) -> None:
        self._stats = stats
        self._log_end = log_end
        # For each direction with an outage, the result of ``_missed`` at the outage's start.
        self._missed_before: dict[Direction, int] = {}

    def update(self) -> None:
        """Record the start of an outage; at its end, log how many chunks it affected."""
        stats = self._stats
        self._follow(Direction.READ, stats.reads_open)
        self._follow(Direction.WRITE, stats.stores_open | stats.is_slow)

    def _follow(self, direction: Direction, is_out: int) -> None:
        if is_out:
            self._missed_before.setdefault(direction, self._missed(direction))
        elif direction in self._missed_before:
            count = self._missed(direction) - self._missed_before.pop(direction)
            if count:
                message = f"{self._stats.name}: meanwhile {count:,} {_WHAT[direction]}"
                self._log_end(f"missed {direction.value}s", message)

    def _missed(self, direction: Direction) -> int:
        dropped, failures = self._stats.dropped, self._stats.failures
        if direction is Direction.READ:
            return dropped["lookup.unavailable"]
        unavailable = "store.unavailable"
        return dropped[unavailable] + dropped["store.slow"] + failures[unavailable]
