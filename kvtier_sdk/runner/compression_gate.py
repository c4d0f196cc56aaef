"""Decides by measurements whether compressing a tier's chunks brings them back sooner."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from statistics import linear_regression, mean, median
from typing import NamedTuple

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.errors import TierError
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.sealing import ChunkSealer
from kvtier_sdk.types import Transfer

#: The coder is tried with a chunk of each of the first stores, later of every 16th store.
_FIRST_STORES, _STORES_PER_TRIAL = 16, 16
_TRIALS = 9
#: A tier's speed follows from at least this many of its calls.
_FEWEST_CALLS = 8
#: The last calls of each length are kept. Lengths in a ratio below 2**(1/4) count as one, and so
#: say nothing about latency; a compressed chunk's length and a plain one's are farther apart.
_CALLS_OF_LENGTH = 16
_LENGTHS_PER_OCTAVE = 4
#: Compressing begins once it saves this many times its cost, and ends once it saves less than its
#: cost. So the gate does not move with each trial if both are nearly equal.
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected effect of compressing one chunk: ``ratio`` is plain length by compressed."""

    ratio: float
    sooner_s: float
    expand_s: float

    def pays(self, margin: float = _MARGIN) -> bool:
        return self.sooner_s > margin * self.expand_s

    def __str__(self) -> str:
        return (
            f"a chunk becomes {self.ratio:.2f} times smaller and arrives "
            f"{1e3 * self.sooner_s:.2f} ms sooner; expanding it takes {1e3 * self.expand_s:.2f} ms"
        )


class Trial(NamedTuple):
    """The figures of one trial of a coder with a chunk."""

    plain_bytes: int
    coded_bytes: int
    expand_s: float
    idle_cores: float


class CoderTrials:
    """Trials of a coder with real chunks, and what follows from the last of them."""

    def __init__(self, coder: Planes, alignment: int, clock: Clock) -> None:
        self._coder = coder
        self._alignment = alignment
        self._clock = clock
        self._trials: deque[Trial] = deque(maxlen=_TRIALS)

    def try_out(self, plain: memoryview, scratch: memoryview) -> None:
        """Measure the coder with a chunk. Any thread may call this."""
        coded_bytes = self._coder.encode(plain, scratch, self._alignment)
        started_s = self._clock.now_s()
        if coded_bytes:
            self._coder.decode(scratch, coded_bytes, len(plain))
        expand_s = self._clock.now_s() - started_s
        idle_cores = len(os.sched_getaffinity(0)) - os.getloadavg()[0]
        self._trials.append(Trial(len(plain), coded_bytes or len(plain), expand_s, idle_cores))

    def outlook(self, byte_s: float, running: float = 1) -> Outlook:
        """Return what compressing would change for ``running`` loads of ``byte_s`` per byte."""
        last = self._trials[-1]
        coded_bytes = median(trial.coded_bytes for trial in self._trials)
        expand_s = median(trial.expand_s for trial in self._trials)
        return Outlook(
            last.plain_bytes / coded_bytes,
            byte_s * (last.plain_bytes - coded_bytes),
            expand_s / max(1, min(running, last.idle_cores)),
        )


class _Call(NamedTuple):
    stored_bytes: int
    took_s: float
    running: int


class CompressionGate:
    """A wrapper of a tier that times its calls, and compresses stores while loads gain by it.

    How long a load takes for each of its bytes follows from the tier's loads; until there are
    enough, from its stores. While all calls have one length, their latency counts as transfer. It
    does no longer once some are compressed, and calls of other lengths are not forgotten. Calls
    that run at once share a link, so the time of each is divided by their number. Their chunks are
    expanded at once too, as far as cores are idle.
    """

    def __init__(
        self, tier: TierCaller | ChunkSealer, trials: CoderTrials, clock: Clock, log: TierLog
    ) -> None:
        self.is_open = False  # true if the next store should be compressed
        self._tier = tier
        self.trials = trials
        self._clock = clock
        self._log = log
        self._calls: dict[Operation, defaultdict[int, deque[_Call]]] = {
            operation: defaultdict(lambda: deque(maxlen=_CALLS_OF_LENGTH))
            for operation in (Operation.LOAD, Operation.STORE)
        }
        self._running: Counter[Operation] = Counter()
        self._stores_begun = 0

    async def transfer(
        self, operation: Operation, batch: Sequence[Transfer]
    ) -> Sequence[TierError | None]:
        """Call the tier, and record the call if all of its chunks were moved."""
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
        """Count a store; return true if the coder should be tried with one of its chunks."""
        self._stores_begun += 1
        first = self._stores_begun <= _FIRST_STORES
        return first or self._stores_begun % _STORES_PER_TRIAL == 0

    def decide(self) -> None:
        """Open or close the gate by what was measured."""
        loads, stores = (
            [call for calls in of.values() for call in calls] for of in self._calls.values()
        )
        calls = loads if len(loads) >= _FEWEST_CALLS else stores
        if len(calls) < _FEWEST_CALLS:
            return
        outlook = self.trials.outlook(_byte_s(calls), mean(call.running for call in calls))
        is_open = outlook.pays(1 if self.is_open else _MARGIN)
        if is_open is not self.is_open:
            self.is_open = is_open
            self._log.info("%s: %s", "compresses chunks" if is_open else "stores plain", outlook)


def _byte_s(calls: Sequence[_Call]) -> float:
    """Return the slope of the calls' durations by their lengths, without their latency."""
    lengths = [call.stored_bytes for call in calls]
    shares_s = [call.took_s / call.running for call in calls]
    if max(lengths) < min(lengths) * 2 ** (1 / _LENGTHS_PER_OCTAVE):
        return sum(shares_s) / sum(lengths)
    return max(0.0, linear_regression(lengths, shares_s).slope)
