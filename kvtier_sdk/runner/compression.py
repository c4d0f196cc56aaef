"""Compresses chunks before a store if that speeds up loads, and expands them after a load."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import log2
from statistics import linear_regression, mean, median
from typing import NamedTuple, TypeVar

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.errors import ChunkError, TierError
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import JobResult, Operation
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.sealing import ChunkSealer
from kvtier_sdk.types import Transfer

T = TypeVar("T")

#: The coder is tried on one chunk of each of the first 16 stores, then of every 16th store.
_FIRST_STORES, _STORES_PER_TRIAL = 16, 16
_TRIALS = 9
#: The minimum number of calls for an estimate of a tier's speed.
_FEWEST_CALLS = 8
#: Keep this many recent calls for each length. Lengths within a factor of 2**(1/4) count as equal,
#: because they differ too little to separate latency from transfer time.
_CALLS_OF_LENGTH = 16
_LENGTHS_PER_OCTAVE = 4
#: Compression begins when it saves this many times its cost, and ends when it saves less than its
#: cost. The margin keeps the gate steady while saving and cost are nearly equal.
_MARGIN = 1.25


class _Trial(NamedTuple):
    plain_bytes: int
    coded_bytes: int
    expand_s: float
    idle_cores: float


class _Call(NamedTuple):
    stored_bytes: int
    took_s: float
    running: int


@dataclass(eq=False)
class CompressionGate:
    """Times a tier's loads and stores, and decides whether to compress chunks.

    The time per byte comes from loads, or from stores until there are enough loads. Comparing calls
    of different lengths excludes latency. Concurrent calls share a link, so call times are divided
    by their number. Expand times are divided by it too, but at most by the number of idle cores.
    """

    _tier: TierCaller | ChunkSealer
    _coder: Planes
    _alignment: int
    _clock: Clock
    _log: TierLog
    is_open: bool = False  # true if the next store should be compressed
    _stores_begun: int = 0

    def __post_init__(self) -> None:
        self._trials: deque[_Trial] = deque(maxlen=_TRIALS)
        self._calls: dict[Operation, defaultdict[int, deque[_Call]]] = {
            operation: defaultdict(lambda: deque(maxlen=_CALLS_OF_LENGTH))
            for operation in (Operation.LOAD, Operation.STORE)
        }
        self._running: Counter[Operation] = Counter()

    async def transfer(
        self, operation: Operation, batch: Sequence[Transfer]
    ) -> Sequence[TierError | None]:
        self._running[operation] += 1
        running = self._running[operation]
        started_s = self._clock.now_s()
        try:
            errors = await self._tier.transfer(operation, batch)
        finally:
            running = max(running, self._running[operation])
            self._running[operation] -= 1
        if not any(errors):
            stored_bytes = sum(len(transfer.arrived) for transfer in batch)
            took_s = self._clock.now_s() - started_s
            length = round(_LENGTHS_PER_OCTAVE * log2(stored_bytes))
            self._calls[operation][length].append(_Call(stored_bytes, took_s, running))
        return errors

    def begin_store(self) -> bool:
        """Count a store; return true if it should try the coder on one of its chunks."""
        self._stores_begun += 1
        return self._stores_begun <= _FIRST_STORES or self._stores_begun % _STORES_PER_TRIAL == 0

    def try_out(self, plain: memoryview, scratch: memoryview) -> None:
        """Measure the coder on a chunk. Any thread may call this."""
        coded_bytes = self._coder.encode(plain, scratch, self._alignment)
        started_s = self._clock.now_s()
        if coded_bytes:
            self._coder.decode(scratch, coded_bytes, len(plain))
        expand_s = self._clock.now_s() - started_s
        idle_cores = len(os.sched_getaffinity(0)) - os.getloadavg()[0]
        self._trials.append(_Trial(len(plain), coded_bytes or len(plain), expand_s, idle_cores))

    def decide(self) -> None:
        loads, stores = (
            [call for calls in of.values() for call in calls] for of in self._calls.values()
        )
        calls = loads if len(loads) >= _FEWEST_CALLS else stores
        if len(calls) < _FEWEST_CALLS:
            return
        trials = list(self._trials)  # another store's trial may end meanwhile
        last = trials[-1]
        coded_bytes = median(trial.coded_bytes for trial in trials)
        sooner_s = _byte_s(calls) * (last.plain_bytes - coded_bytes)
        expansions = max(1, min(mean(call.running for call in calls), last.idle_cores))
        expand_s = median(trial.expand_s for trial in trials) / expansions
        is_open = sooner_s > expand_s * (1 if self.is_open else _MARGIN)
        if is_open is not self.is_open:
            self.is_open = is_open
            self._log.info(
                "%s: a chunk becomes %.2f times smaller and arrives %.2f ms sooner; "
                "expanding it takes %.2f ms",
                "compresses chunks" if is_open else "stores plain",
                last.plain_bytes / coded_bytes,
                1e3 * sooner_s,
                1e3 * expand_s,
            )


def _byte_s(calls: Sequence[_Call]) -> float:
    """Return the seconds per byte, excluding latency if the calls' lengths differ enough."""
    lengths = [call.stored_bytes for call in calls]
    shares_s = [call.took_s / call.running for call in calls]
    if max(lengths) < min(lengths) * 2 ** (1 / _LENGTHS_PER_OCTAVE):
        return sum(shares_s) / sum(lengths)
    return max(0.0, linear_regression(lengths, shares_s).slope)


@dataclass(eq=False)
class ChunkCompressor:
    """Compresses and expands chunks in threads, because the work would block the tier's loop.

    If the option ``compress`` is ``auto``, the gate decides whether to compress. Compressed chunks
    are expanded whatever the option is, because another engine may have stored them.
    """

    _chunk_bytes: int
    _alignment: int
    _coder: Planes | None
    _scratch: BufferArena | None
    _gate: CompressionGate | None
    _options: RunnerOptions
    _clock: Clock

    @property
    def gate(self) -> CompressionGate | None:
        return self._gate if self._options.compress == "auto" else None

    @asynccontextmanager
    async def compressing(
        self, batch: Sequence[Transfer], result: JobResult
    ) -> AsyncIterator[Sequence[Transfer]]:
        """Yield the transfers to store, with each payload compressed if this shortens it."""
        gate = self.gate
        if self._coder is None or self._scratch is None or self._options.compress == "never":
            yield batch
            return
        scratch = self._scratch.take(len(batch))
        try:
            if gate is not None and gate.begin_store():
                plain = batch[0].payload[: self._chunk_bytes]
                work = partial(gate.try_out, plain, scratch[0])
                await self._timed(result, work)
                gate.decide()
            if gate is None or gate.is_open:
                compress = partial(self._compress, self._coder, batch, scratch)
                batch = await self._timed(result, compress)
            yield batch
        finally:
            self._scratch.give_back(scratch)

    def _compress(
        self, coder: Planes, batch: Sequence[Transfer], scratch: Sequence[memoryview]
    ) -> list[Transfer]:
        sent = []
        for transfer, buffer in zip(batch, scratch, strict=True):
            plain = transfer.payload[: self._chunk_bytes]
            size_bytes = coder.encode(plain, buffer, self._alignment)
            sent.append(transfer.compressed(buffer[:size_bytes]) if size_bytes else transfer)
        return sent

    async def expand(
        self, transfers: Sequence[Transfer], result: JobResult
    ) -> list[ChunkError | None]:
        """Expand compressed chunks in place, after the transfers were loaded and verified."""
        # Return early if no chunk is compressed. A compressed payload is shorter than its buffer.
        if all(len(transfer.arrived) == len(transfer.payload) for transfer in transfers):
            return [None] * len(transfers)
        return await self._timed(result, lambda: [self._expand(transfer) for transfer in transfers])

    def _expand(self, transfer: Transfer) -> ChunkError | None:
        if len(transfer.arrived) < len(transfer.payload):
            try:
                Planes.decode(transfer.payload, len(transfer.arrived), self._chunk_bytes)
            except ChunkError as fault:
                # Drop the traceback, because its frames would keep the buffers alive.
                return fault.with_traceback(None)
        return None

    async def _timed(self, result: JobResult, work: Callable[[], T]) -> T:
        """Run ``work()`` in a thread, and add its duration to ``result.coding_s``."""

        def timed() -> tuple[T, float]:
            started_s = self._clock.now_s()
            return work(), self._clock.now_s() - started_s

        done, took_s = await run_blocking(timed)
        result.coding_s += took_s
        return done
