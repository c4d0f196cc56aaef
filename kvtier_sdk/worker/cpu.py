"""The device for CPU tensors: threads copy with ``memmove``, without the interpreter lock."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import os
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
#: A load waits for store parts that have begun. A part of this size takes a few milliseconds.
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
        self._clock = SystemClock()
        self._copy = copy
        self._cpus = _cpus_of_the_process()
        #: Copies with parts that have not begun, the most urgent first.
        self._queue: list[tuple[int, int, _ThreadedCopy]] = []
        self._turns = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-copy-{number}", daemon=True)
            for number in range(threads or min(MAX_THREADS, len(self._cpus)))
        ]
        for thread in self._threads:
            thread.start()

    def register(self, host: HostLayout, groups: Sequence[GroupLayout]) -> None:
        """Do nothing, because ``memmove`` needs no pinned memory."""

    def start(
        self,
        plan: JobPlan,
        operation: Operation,
        *,
        expedited: bool,
        after: StreamOrEvent | None = None,
    ) -> Copy:
        """Start a copy. Ignore ``after``, because torch queues no work on a CPU."""
        # Cut one part for each thread, or more if large parts would delay a load for too long.
        runs = plan.runs()
        threads = max(1, min(len(self._threads), runs.size_bytes // MIN_PART_BYTES))
        rounds = -(-runs.size_bytes // (threads * MAX_PART_BYTES))
        plans = [runs] if threads * rounds == 1 else runs.split(threads * rounds)
        store = operation is Operation.STORE
        parts = [
            (*((part.host, part.device) if store else (part.device, part.host)), part.lengths_bytes)
            for part in plans
        ]
        copy = _ThreadedCopy(parts, self._help)
        urgency = 2 if store else 0 if expedited else 1
        with self._changed:
            bisect.insort(self._queue, (urgency, next(self._turns), copy))
            self._changed.notify(len(parts))
        return copy

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        # This thread has inherited the engine thread's pinning, so allow all cores of the process.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                copy = self._queue[0][2]
                part = self._begin_part(copy)
            self._run(copy, part)

    def _help(self, copy: _ThreadedCopy) -> None:
        """Copy the remaining parts in the calling thread, which must wait for them anyway."""
        while True:
            with self._changed:
                if not copy.parts:
                    return
                part = self._begin_part(copy)
            self._run(copy, part)

    def _begin_part(self, copy: _ThreadedCopy) -> _Part:
        if copy.began_s is None:
            copy.began_s = self._clock.now_s()
        copy.running += 1
        part = copy.parts.pop(0)
        if not copy.parts:
            self._forget(copy)
        return part

    def _run(self, copy: _ThreadedCopy, part: _Part) -> None:
        failure: BaseException | None = None
        try:
            self._copy(*part)
        except BaseException as raised:
            failure = raised
        with self._changed:
            copy.running -= 1
            if failure is not None:
                copy.failure = copy.failure or failure
                copy.parts.clear()
                self._forget(copy)
            if not copy.running and not copy.parts:
                copy.ended_s = self._clock.now_s()
                copy.has_ended.set()

    def _forget(self, copy: _ThreadedCopy) -> None:
        self._queue = [entry for entry in self._queue if entry[2] is not copy]


class _ThreadedCopy(Copy):
    """A copy in parts. Only a thread that holds the device's lock may change the attributes."""

    def __init__(self, parts: list[_Part], help_with: Callable[[_ThreadedCopy], None]) -> None:
        self.parts = parts
        self.running = 0
        self.began_s: float | None = None
        self.ended_s = 0.0
        self.failure: BaseException | None = None
        self.has_ended = threading.Event()
        self._help_with = help_with

    def done(self) -> bool:
        return self.has_ended.is_set()

    def wait(self) -> None:
        self._help_with(self)
        self.has_ended.wait()

    def error(self) -> str | None:
        return None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"

    def duration_s(self) -> float:
        return 0.0 if self.began_s is None else self.ended_s - self.began_s


def _cpus_of_the_process() -> set[int]:
    cpus: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # Skip a thread that has ended since it was listed.
        with contextlib.suppress(ProcessLookupError):
            cpus |= os.sched_getaffinity(int(task.name))
    return cpus
