"""Measures a tier's speed, and detects a slow tier."""

from __future__ import annotations

import math
from typing import Final

from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.runner.jobs import Job, JobResult, Operation, Verdict

#: A tier is slow if its loads or its stores make no progress for this long. The queue of stores is
#: limited to the bytes that the tier stores in this time.
SLOW_S: Final = 2.0

_NEWEST_WEIGHT = 0.2  # the newest sample's weight in the running mean of the speed of loads
#: An estimate without a new sample expires after this long. Otherwise a tier that seemed too slow
#: would get no loads, and so no sample could correct the estimate.
_LIFE_S = 10.0

_LOAD: Final = Operation.LOAD
_STORE: Final = Operation.STORE
_TIMEOUT: Final = Verdict.TIMEOUT


class Pace:
    def __init__(self, options: RunnerOptions, chunk_bytes: int) -> None:
        call_bytes = max(chunk_bytes, options.max_batch_bytes)
        # The bytes that the tier can store in SLOW_S, at the measured speed.
        self.store_bytes = float(call_bytes * options.concurrency)
        self._call_bytes = call_bytes
        # The numbers of running stores and loads, and the times of their last progress. Both are
        # indexed by ``operation is _LOAD``, because hashing an enum member is slow.
        self._under_way = [0, 0]
        self._progress_s = [-math.inf, -math.inf]
        # The latest time of an answer, or of a load's start while no other load ran.
        self._heard_s = 0.0
        self._bytes_per_s = 0.0  # the mean speed of loads, measured only while a load runs
        self._pending_bytes = 0
        self._since_s = 0.0
        self._sampled_s = 0.0

    def begin(self, job: Job, now_s: float) -> None:
        is_load = job.operation is _LOAD
        if not is_load and job.operation is not _STORE:
            return
        if not self._under_way[is_load]:
            self._progress_s[is_load] = now_s
            if is_load:
                self._heard_s = self._since_s = now_s
        self._under_way[is_load] += 1

    def progress(self, operation: Operation, now_s: float) -> None:
        self._heard_s = self._progress_s[operation is _LOAD] = now_s

    def end(self, job: Job, result: JobResult, now_s: float) -> None:
        is_late = _TIMEOUT in result.verdicts
        if not is_late:
            self._heard_s = now_s
        is_load = job.operation is _LOAD
        if not is_load and job.operation is not _STORE:
            return
        self._under_way[is_load] -= 1
        if not is_late:
            self._progress_s[is_load] = now_s
        if is_load:
            self._learn_load(result.moved_bytes, now_s)
        else:
            self._learn_store(job, result)

    def is_slow(self, now_s: float) -> bool:
        return any(
            under_way and now_s - at_s > SLOW_S
            for under_way, at_s in zip(self._under_way, self._progress_s, strict=True)
        )

    def answers(self, now_s: float, within_s: float) -> bool:
        """Return true if no load runs, or the tier answered in the last ``within_s`` seconds."""
        return not self._under_way[True] or now_s - self._heard_s <= within_s

    def expected_s(self, size_bytes: int, now_s: float) -> float:
        """Estimate the seconds to load ``size_bytes``; return 0.0 without a recent sample."""
        if not self._bytes_per_s or now_s - self._sampled_s > _LIFE_S:
            return 0.0
        return size_bytes / self._bytes_per_s

    def _learn_load(self, loaded_bytes: int, now_s: float) -> None:
        self._pending_bytes += loaded_bytes
        # Combine loads that end in the same step into one sample.
        if now_s <= self._since_s or not self._pending_bytes:
            return
        rate = self._pending_bytes / (now_s - self._since_s)
        weight = _NEWEST_WEIGHT if self._bytes_per_s else 1.0
        self._bytes_per_s += weight * (rate - self._bytes_per_s)
        self._pending_bytes = 0
        self._since_s = self._sampled_s = now_s

    def _learn_store(self, store: Job, result: JobResult) -> None:
        # A store waits for earlier stores, so their bytes count too. A short queue may hide the
        # tier's full speed, so a store shorter than SLOW_S can only raise the estimate.
        moved_bytes = store.queue_bytes * SLOW_S / max(result.duration_s, 1e-3)
        is_faster = result.moved_bytes and moved_bytes > self.store_bytes
        if is_faster or result.duration_s > SLOW_S:
            self.store_bytes = max(moved_bytes, self._call_bytes)
