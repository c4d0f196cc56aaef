"""The device for CPU tensors: threads copy with ``memmove``, without the interpreter lock."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.device import Copy, Device, StreamOrEvent
from kvtier_sdk.worker.planning import GroupLayout, HostLayout, Int64s, JobPlan

#: More threads would not help, because memory bandwidth is the limit.
MAX_THREADS = 4
#: Waking another thread for a smaller part would cost more than it saves.
MIN_PART_BYTES = 512 * 1024
#: A load waits for the store parts that threads are copying: a few milliseconds at this size.
MAX_PART_BYTES = 16 * 1024 * 1024

#: The destination addresses, source addresses and lengths in bytes of several runs.
_Part: TypeAlias = tuple[Int64s, Int64s, Int64s]


def copy_runs(destinations: Int64s, sources: Int64s, lengths_bytes: Int64s) -> None:
    runs = zip(destinations.tolist(), sources.tolist(), lengths_bytes.tolist(), strict=True)
    for destination, source, length_bytes in runs:
        ctypes.memmove(destination, source, length_bytes)


class CPUDevice(Device):
    """A device whose threads copy part by part. Between parts, loads overtake stores."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        copy: Callable[[Int64s, Int64s, Int64s], None] = copy_runs,
    ) -> None:
        self._copy = copy
        self._cpus = _cpus_of_the_process()
        #: An entry for each part, the most urgent first. ``None`` ends a thread.
        self._queue = queue.PriorityQueue[tuple[int, int, _ThreadedCopy | None]]()
        self._turns = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-copy-{number}", daemon=True)
            for number in range(threads or min(MAX_THREADS, len(self._cpus)))
        ]
        for thread in self._threads:
            thread.start()

    def register(self, host: HostLayout, groups: Sequence[GroupLayout]) -> None:
        """Do nothing, because ``memmove`` needs no pinned memory."""

    def start(self, plan: JobPlan, after: StreamOrEvent | None) -> Copy:
        """Start a copy. Ignore ``after``, because torch queues no work on a CPU."""
        # Cut one part for each thread, or more if large parts would delay a load for too long.
        runs = plan.runs()
        threads = max(1, min(len(self._threads), runs.size_bytes // MIN_PART_BYTES))
        rounds = -(-runs.size_bytes // (threads * MAX_PART_BYTES))
        plans = [runs] if threads * rounds == 1 else runs.split(threads * rounds)
        store = plan.operation is Operation.STORE
        parts = [
            (*((part.host, part.device) if store else (part.device, part.host)), part.lengths_bytes)
            for part in plans
        ]
        copy = _ThreadedCopy(parts, self._copy)
        urgency = 2 if store else 0 if plan.expedited else 1
        for _ in parts:
            self._queue.put((urgency, next(self._turns), copy))
        return copy

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put((3, next(self._turns), None))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        # This thread has inherited the engine thread's affinity, so allow all cores of the process.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        while (copy := self._queue.get()[2]) is not None:
            copy.copy_part()


class _ThreadedCopy(Copy):
    """A copy in parts. Any number of threads may copy parts at the same time."""

    def __init__(self, parts: list[_Part], copy: Callable[[Int64s, Int64s, Int64s], None]) -> None:
        self._parts = parts
        self._copy = copy
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._running = 0
        self._began_s = self._ended_s = 0.0
        self._failure: BaseException | None = None
        self._has_ended = threading.Event()

    def copy_part(self) -> bool:
        """Copy the next part; return false if all parts have begun already."""
        with self._lock:
            if not self._parts:
                return False
            part = self._parts.pop(0)
            self._began_s = self._began_s or self._clock.now_s()
            self._running += 1
        failure: BaseException | None = None
        try:
            self._copy(*part)
        except BaseException as raised:
            failure = raised
        with self._lock:
            self._running -= 1
            if failure is not None:
                self._failure = self._failure or failure
                self._parts.clear()
            if not self._running and not self._parts:
                self._ended_s = self._clock.now_s()
                self._has_ended.set()
        return True

    def done(self) -> bool:
        return self._has_ended.is_set()

    def wait(self) -> None:
        # Copy the remaining parts in the calling thread, which must wait for them anyway.
        while self.copy_part():
            pass
        self._has_ended.wait()

    def outcome(self) -> tuple[str | None, float]:
        failure = self._failure
        error = None if failure is None else f"{type(failure).__name__}: {failure}"
        return error, self._ended_s - self._began_s


def _cpus_of_the_process() -> set[int]:
    cpus: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # Skip a thread that has ended since it was listed.
        with contextlib.suppress(ProcessLookupError):
            cpus |= os.sched_getaffinity(int(task.name))
    return cpus
