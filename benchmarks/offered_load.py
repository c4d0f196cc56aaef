"""Stores and loads that are offered to a tier at a steady rate, even if it does not take them.

Run as a program, it offers them from a process of its own, for ``interference.py``:

Usage: python benchmarks/offered_load.py URL MB_PER_S
"""

from __future__ import annotations

import itertools
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from kvtier_sdk import (
    HostPool,
    Job,
    Namespace,
    Operation,
    PoolLayout,
    RequestContext,
    TierClient,
    TierListener,
    TierSpec,
    Verdict,
    make_offload_key,
    open_tier,
)

CHUNK_BYTES = 2 * 2**20
_SLOTS = 64
_FIRST_CHUNKS = 16
_TURN_S = 0.005
_REQUEST = RequestContext("bench")


class Load(Protocol):
    """A load that is offered to a tier at times."""

    def begin(self) -> None:
        """Start to offer."""

    def turn(self) -> None:
        """Do the work of the engine's thread for one step, without waiting."""

    def rest(self) -> tuple[int, float]:
        """Stop offering, and wait until nothing is in flight.

        Returns:
            Bytes moved since :meth:`begin`, and the seconds that it took.
        """


class OfferedLoad(TierListener):
    """A load that hands over as many chunks at each turn as are due, stores and loads in turns.

    A chunk without a free slot is skipped for good: the tier moves less than it is offered.

    Args:
        url: the tier.
        runner: ``thread`` or ``process``.
        pool: its slots.
        mb_per_s: offered, in millions of bytes of payload a second.
    """

    def __init__(self, url: str, runner: str, pool: HostPool, mb_per_s: float) -> None:
        self._bytes_per_s = mb_per_s * 1e6
        self._moved_bytes = 0
        # No two runs of the benchmark store the same chunk: a tier may skip what it has.
        self._new_keys = map(make_offload_key, _numbers(time.time_ns()))
        self._stored = deque[bytes](maxlen=_FIRST_CHUNKS)
        self._free = list(range(_SLOTS))
        self._next = itertools.cycle((Operation.STORE, Operation.LOAD))
        self._begun_s = self._due_since_s = 0.0
        spec = TierSpec.from_url(url, runner=runner, max_queue=_SLOTS * CHUNK_BYTES)
        self._opening = open_tier(spec, pool, Namespace({"bench": "interference"}), self)
        self._tier = self._opening.__enter__()

    def fill(self) -> None:
        """Store the chunks that are loaded first."""
        for _ in range(_FIRST_CHUNKS):
            self._offer(Operation.STORE)
        self._tier.flush()
        self.rest()

    def close(self) -> None:
        """Close the tier."""
        self._opening.__exit__(None, None, None)

    def begin(self) -> None:
        self._moved_bytes = 0
        self._begun_s = self._due_since_s = time.perf_counter()

    def turn(self) -> None:
        self._tier.poll()
        now_s = time.perf_counter()
        due = int((now_s - self._due_since_s) * self._bytes_per_s / CHUNK_BYTES)
        self._due_since_s += due * CHUNK_BYTES / self._bytes_per_s
        for _ in range(min(due, len(self._free))):
            self._offer(next(self._next))
        self._tier.flush()

    def rest(self) -> tuple[int, float]:
        moved_bytes, spent_s = self._moved_bytes, time.perf_counter() - self._begun_s
        while self._tier.jobs.unreleased:
            time.sleep(0.001)
            self._tier.poll()
        return moved_bytes, spent_s

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._note(job)
        self._stored.append(job.keys[0])

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._note(job)

    def released(self, tier: TierClient, job: Job) -> None:
        self._free += job.slots

    def _offer(self, operation: Operation) -> None:
        slot = [self._free.pop()]
        if operation is Operation.STORE:
            job = self._tier.store([next(self._new_keys)], slot, _REQUEST)
        else:
            # Loads of one request in one turn would be one job; here each chunk is a job.
            job = self._tier.load([self._stored[0]], slot, _REQUEST, tag=slot)
            self._stored.rotate(-1)
        if job is None:
            sys.exit(f"a {operation.value} was refused: {dict(self._tier.stats.dropped)}")

    def _note(self, job: Job) -> None:
        assert job.result is not None
        if job.result.verdicts != [Verdict.OK]:
            sys.exit(f"a {job.operation.value} failed: {job.result.error}")
        self._moved_bytes += job.result.moved_bytes


def _numbers(start: int) -> Iterator[bytes]:
    for number in itertools.count(start):
        yield number.to_bytes(8, "big") * 4


@contextmanager
def offered_here(url: str, mb_per_s: float, runner: str) -> Iterator[Load]:
    """Open a tier with its own pool, and close both at the end.

    Args:
        url: the tier.
        mb_per_s: offered.
        runner: ``thread`` or ``process``.

    Yields:
        The load, at rest.
    """
    pool = HostPool.create(PoolLayout(_SLOTS, CHUNK_BYTES))
    load = OfferedLoad(url, runner, pool, mb_per_s)
    try:
        load.fill()
        yield load
    finally:
        load.close()
        pool.close()


@contextmanager
def offered_apart(url: str, mb_per_s: float) -> Iterator[Load]:
    """Have another program open the tier and offer the load.

    Args:
        url: the tier.
        mb_per_s: offered.

    Yields:
        The load, at rest.
    """
    with subprocess.Popen(
        [sys.executable, Path(__file__), url, str(mb_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        try:
            assert other.stdin is not None
            assert other.stdout is not None
            if not other.stdout.readline():
                sys.exit("the program apart did not begin")
            yield _Apart(other.stdin, other.stdout)
        finally:
            other.kill()


class _Apart:
    def __init__(self, orders: IO[bytes], answers: IO[bytes]) -> None:
        self._orders = orders
        self._answers = answers

    def begin(self) -> None:
        self._order()

    def turn(self) -> None:
        pass

    def rest(self) -> tuple[int, float]:
        self._order()
        moved_bytes, spent_s = self._answers.readline().split()
        return int(moved_bytes), float(spent_s)

    def _order(self) -> None:
        self._orders.write(b"\n")
        self._orders.flush()


def main() -> None:
    """Offer from each line of the standard input to the next, and print the bytes moved."""
    url, mb_per_s = sys.argv[1:]
    with offered_here(url, float(mb_per_s), "thread") as load:
        print("ready", flush=True)
        while sys.stdin.readline():
            load.begin()
            while not select.select([sys.stdin], [], [], _TURN_S)[0]:
                load.turn()
            sys.stdin.readline()
            print(*load.rest(), flush=True)


if __name__ == "__main__":
    main()
