"""CPU tensors: a few threads that copy with ``memmove``, without holding the interpreter lock."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.device import Copy, Device, StreamOrEvent
from kvtier_sdk.worker.planning import CopyPlan, GroupLayout, HostLayout, Int64s, JobPlan

#: More threads do not help: memory bandwidth is the limit.
MAX_THREADS = 4
#: A smaller part is not worth waking a second thread.
MIN_PART_BYTES = 512 * 1024
#: A load that arrives behind a store waits for one part, a few milliseconds.
MAX_PART_BYTES = 16 * 1024 * 1024

#: Destinations, sources, lengths in bytes.
_Part: TypeAlias = tuple[Int64s, Int64s, Int64s]
#: Copies a part's runs; raises if not all of them were copied.
RunCopier: TypeAlias = Callable[[Int64s, Int64s, Int64s], None]


def copy_runs(destinations: Int64s, sources: Int64s, lengths_bytes: Int64s) -> None:
    """Copy each run with ``memmove``; ctypes releases the interpreter lock for the call."""
    runs = zip(destinations.tolist(), sources.tolist(), lengths_bytes.tolist(), strict=True)
    for destination, source, length_bytes in runs:
        ctypes.memmove(destination, source, length_bytes)


class CPUDevice(Device):
    """A thread pool. Loads overtake stores, even a store that has begun."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        threads: int | None = None,
        copy: RunCopier = copy_runs,
    ) -> None:
        self._clock = clock or SystemClock()
        self._copy = copy
        self._cpus = _cpus_of_the_process()
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
        """Do nothing: any memory will do."""

    def start(
        self,
        plan: JobPlan,
        operation: Operation,
        *,
        expedited: bool,
        after: StreamOrEvent | None = None,
    ) -> Copy:
        """See :meth:`Device.start`; ``after`` is ignored, since no work is queued on a CPU."""
        # One part for each thread, or more, so that no part keeps a load waiting for long.
        runs = plan.runs()
        size_bytes = runs.size_bytes
        threads = max(1, min(len(self._threads), size_bytes // MIN_PART_BYTES))
        rounds = -(-size_bytes // (threads * MAX_PART_BYTES))
        parts = [runs] if threads * rounds == 1 else runs.split(threads * rounds)
        copy = _ThreadedCopy(parts, operation, self._help)
        urgency = 2 if operation is Operation.STORE else 0 if expedited else 1
        with self._changed:
            heapq.heappush(self._queue, (urgency, next(self._turns), copy))
            self._changed.notify(len(parts))
        return copy

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        # A new thread inherits its creator's cores, and engines pin their threads to one core each.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                copy = self._queue[0][2]
                part = self._take(copy)
            self._run(copy, part)

    def _help(self, copy: _ThreadedCopy) -> None:
        """Copy the remaining parts in the calling thread, which waits for them anyway."""
        while True:
            with self._changed:
                if not copy.waiting:
                    return
                part = self._take(copy)
            self._run(copy, part)

    def _take(self, copy: _ThreadedCopy) -> _Part:
        part = copy.take(self._clock.now_s())
        if not copy.waiting:
            self._forget(copy)
        return part

    def _run(self, copy: _ThreadedCopy, part: _Part) -> None:
        error: BaseException | None = None
        try:
            self._copy(*part)
        except BaseException as raised:
            error = raised
        with self._changed:
            if error is not None:
                copy.give_up()
                self._forget(copy)
            copy.ended(self._clock.now_s(), error)

    def _forget(self, copy: _ThreadedCopy) -> None:
        self._queue = [entry for entry in self._queue if entry[2] is not copy]
        heapq.heapify(self._queue)


class _ThreadedCopy(Copy):
    """A copy in parts.

    ``waiting``, ``take``, ``give_up`` and ``ended`` are called under the pool's lock.
    """

    def __init__(
        self,
        parts: list[CopyPlan],
        operation: Operation,
        help_with: Callable[[_ThreadedCopy], None],
    ) -> None:
        self._help_with = help_with
        self._parts = parts[::-1]
        self._store = operation is Operation.STORE
        self._running = 0
        self._began_s: float | None = None
        self._ended_s = 0.0
        self._error: BaseException | None = None
        self._done = threading.Event()

    @property
    def waiting(self) -> bool:
        """True while a part has not begun."""
        return bool(self._parts)

    def take(self, now_s: float) -> _Part:
        """Begin the next part; return its destinations, sources and lengths."""
        if self._began_s is None:
            self._began_s = now_s
        self._running += 1
        part = self._parts.pop()
        ends = (part.host, part.device) if self._store else (part.device, part.host)
        return (*ends, part.lengths_bytes)

    def give_up(self) -> None:
        """Begin no further part; the copy is done once the running ones have ended."""
        self._parts.clear()

    def ended(self, now_s: float, error: BaseException | None) -> None:
        """Record the end of a part."""
        self._running -= 1
        self._error = self._error or error
        if not self._running and not self._parts:
            self._ended_s = now_s
            self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._help_with(self)
        self._done.wait()

    def error(self) -> str | None:
        return None if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def duration_s(self) -> float:
        return self._ended_s - (self._ended_s if self._began_s is None else self._began_s)


def _cpus_of_the_process() -> set[int]:
    """Return the cores that any thread of the process may run on."""
    cpus: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            cpus |= os.sched_getaffinity(int(task.name))
        except ProcessLookupError:
            continue
    return cpus
