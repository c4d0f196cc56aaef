"""Stores and loads that are offered to a tier at a steady rate, whatever becomes of them.

Run as a program it offers them from a process of its own, for ``interference.py``:

Usage: python tests/bench/offered_load.py URL MB_PER_S
"""

from __future__ import annotations

import itertools
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier_sdk import HostPool, Namespace, RequestContext, SystemClock, TierSpec, make_offload_key
from kvtier_sdk.jobs import IoEnded, Job, JobResult, JobTable, Operation, Verdict
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.tiering.runners import make_runner

CHUNK_BYTES = 2 * 2**20
_SLOTS = 64
_FIRST_CHUNKS = 16
_TURN_S = 0.005
_DEADLINE_S = 30.0
_REQUEST = RequestContext("bench")


class OfferedLoad:
    """Hands over as many chunks at each turn as the rate says, stores and loads in turns.

    What finds no free slot is not made up for: the tier moves less than it is offered.

    Attributes:
        moved_bytes: payload that arrived so far.

    Args:
        runner: the tier's, started.
        mb_per_s: offered, in millions of bytes of payload a second.
    """

    def __init__(self, runner: TierRunner, mb_per_s: float) -> None:
        self.moved_bytes = 0
        self._runner = runner
        self._bytes_per_s = mb_per_s * 1e6
        self._job_ids = itertools.count()
        # No two runs of the benchmark store the same chunk: a tier may skip what it has.
        self._new_keys = map(make_offload_key, _numbers(time.time_ns()))
        self._stored = deque[bytes](maxlen=_FIRST_CHUNKS)
        self._free = list(range(_SLOTS))
        self._jobs = JobTable()
        self._next = itertools.cycle((Operation.STORE, Operation.LOAD))
        self._due_since_s = 0.0

    def begin(self) -> None:
        """Store the first chunks, and count from now on."""
        self._runner.submit([self._job(Operation.STORE) for _ in range(_FIRST_CHUNKS)])
        while self._jobs.unreleased:
            time.sleep(0.001)
            self._collect()
        self.moved_bytes = 0
        self._due_since_s = time.perf_counter()

    def turn(self) -> None:
        """Take what was reported, and hand over what is due. Waits for nothing."""
        self._collect()
        now_s = time.perf_counter()
        due = int((now_s - self._due_since_s) * self._bytes_per_s / CHUNK_BYTES)
        self._due_since_s += due * CHUNK_BYTES / self._bytes_per_s
        jobs = [self._job(next(self._next)) for _ in range(min(due, len(self._free)))]
        if jobs:
            self._runner.submit(jobs)

    def _job(self, operation: Operation) -> Job:
        if operation is Operation.STORE:
            key = next(self._new_keys)
        else:
            key = self._stored[0]
            self._stored.rotate(-1)
        slots = [self._free.pop()]
        deadline_s = time.monotonic() + _DEADLINE_S
        job = Job(next(self._job_ids), operation, [key], slots, _REQUEST, deadline_s)
        self._jobs.add(job)
        return job

    def _collect(self) -> None:
        for report in self._runner.poll():
            if isinstance(report, JobResult):
                job = self._jobs.conclude(report.job_id)
                assert job is not None
                self._note(job, report)
            if isinstance(report, IoEnded) or (isinstance(report, JobResult) and report.released):
                job = self._jobs.release(report.job_id)
                assert job is not None
                self._free += job.slots

    def _note(self, job: Job, result: JobResult) -> None:
        if result.error is not None:
            sys.exit(f"a {job.operation.value} failed: {result.error}")
        self.moved_bytes += result.moved_bytes
        if job.operation is Operation.STORE and result.verdicts == [Verdict.OK]:
            self._stored.append(job.keys[0])


def _numbers(start: int) -> Iterator[bytes]:
    for number in itertools.count(start):
        yield number.to_bytes(8, "big") * 4


@contextmanager
def offered_load(url: str, mb_per_s: float, runner: str) -> Iterator[OfferedLoad]:
    """Open a tier with a pool of its own, and close both at the end.

    Args:
        url: the tier.
        mb_per_s: offered.
        runner: ``thread`` or ``process``.

    Yields:
        The load, of which :meth:`OfferedLoad.begin` has been called.
    """
    spec = TierSpec.from_url(url, runner=runner)
    pool = HostPool.create(PoolLayout(_SLOTS, CHUNK_BYTES))
    tier_runner = make_runner(
        spec,
        pool,
        namespace=Namespace({"bench": "interference"}),
        clock=SystemClock(),
        notify=None,
        verify=True,
    )
    try:
        tier_runner.start()
        load = OfferedLoad(tier_runner, mb_per_s)
        load.begin()
        yield load
    finally:
        tier_runner.close(5.0)
        pool.close()


def main() -> None:
    """Say when it begins, and offer until the standard input ends; then say what was moved."""
    url, mb_per_s = sys.argv[1:]
    with offered_load(url, float(mb_per_s), "thread") as load:
        print("begun", flush=True)
        started_s = time.perf_counter()
        while not _asked_to_end():
            time.sleep(_TURN_S)
            load.turn()
        print(load.moved_bytes / (time.perf_counter() - started_s) / 1e6, flush=True)


def _asked_to_end() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable)


if __name__ == "__main__":
    main()
