"""Submits stores and loads to a tier at a steady rate."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection

from kvtier_sdk import (
    HostPool,
    Job,
    Namespace,
    Operation,
    PoolLayout,
    RequestContext,
    TierSpec,
    Verdict,
    make_offload_key,
)
from kvtier_sdk.engine import TierClient, TierListener, open_tier

CHUNK_BYTES = 2 * 2**20
_SLOTS = 64
_FIRST_CHUNKS = 16
_TURN_S = 0.005
_REQUEST = RequestContext("bench")


class OfferedLoad(TierListener):
    """A load generator for a tier. At each engine step, it submits the chunks that are due.

    Stores and loads alternate. A slow tier may leave no slot free; then chunks are skipped.
    """

    def __init__(self, url: str, runner: str, pool: HostPool, mb_per_s: float) -> None:
        self._bytes_per_s = mb_per_s * 1e6
        self._moved_bytes = 0
        # Use new keys in each run, because a tier may skip the store of a chunk that it holds.
        numbers = itertools.count(time.time_ns())
        self._new_keys = (make_offload_key(number.to_bytes(8, "big") * 4) for number in numbers)
        self._stored = deque[bytes](maxlen=_FIRST_CHUNKS)
        self._free = list(range(_SLOTS))
        self._next = itertools.cycle((Operation.STORE, Operation.LOAD))
        self._begun_s = self._due_since_s = 0.0
        spec = TierSpec.from_url(url, runner=runner, max_queue=_SLOTS * CHUNK_BYTES)
        self.opening = open_tier(spec, pool, Namespace({"bench": "interference"}), self)

    def fill(self, tier: TierClient) -> None:
        self._tier = tier
        for _ in range(_FIRST_CHUNKS):
            self._offer(Operation.STORE)
        self._tier.flush()
        self.rest()

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
        """Wait for all jobs; return the bytes and seconds between :meth:`begin` and this call."""
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
            # Without a tag, all loads of a request in one step would be combined into a single job.
            job = self._tier.load([self._stored[0]], slot, _REQUEST, tag=slot)
            self._stored.rotate(-1)
        if job is None:
            sys.exit(f"a {operation.value} was refused: {dict(self._tier.stats.dropped)}")

    def _note(self, job: Job) -> None:
        assert job.result is not None
        if job.result.verdicts != [Verdict.OK]:
            sys.exit(f"a {job.operation.value} failed: {job.result.error}")
        self._moved_bytes += job.result.moved_bytes


@contextmanager
def offered_here(url: str, mb_per_s: float, runner: str) -> Iterator[OfferedLoad]:
    """Open a tier in this process; yield a load generator. Its ``begin`` starts the load."""
    pool = HostPool.create(PoolLayout(_SLOTS, CHUNK_BYTES))
    for slot in range(_SLOTS):
        pool.view(slot)[:] = os.urandom(CHUNK_BYTES)
    with closing(pool):
        load = OfferedLoad(url, runner, pool, mb_per_s)
        with load.opening as tier:
            load.fill(tier)
            yield load


@contextmanager
def offered_apart(url: str, mb_per_s: float) -> Iterator[_Apart]:
    """Open a tier in another process; yield a load generator. Its ``begin`` starts the load."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=_offer, args=(url, mb_per_s, there), daemon=True)
    other.start()
    there.close()
    try:
        here.recv()
        yield _Apart(here)
    finally:
        here.close()
        other.join()


class _Apart:
    """A load generator in another process. Messages alternately start and stop the load."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        self._pipe.send(None)

    def turn(self) -> None:
        pass

    def rest(self) -> tuple[int, float]:
        self._pipe.send(None)
        moved: tuple[int, float] = self._pipe.recv()
        return moved


def _offer(url: str, mb_per_s: float, pipe: Connection) -> None:
    """Start or stop the load at each message. After a stop, send the result of ``rest``."""
    with offered_here(url, mb_per_s, "thread") as load, suppress(EOFError):
        pipe.send(None)
        while True:
            pipe.recv()
            load.begin()
            while not pipe.poll(_TURN_S):
                load.turn()
            pipe.recv()
            pipe.send(load.rest())
