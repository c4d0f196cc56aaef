"""Decides by measurements whether compressing a tier's chunks brings them back sooner."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
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
_STORES_PER_TRIAL = 16
_TRIALS = 9
#: A tier's speed follows from this many of its last calls, at the fewest and at the most.
_FEWEST_CALLS, _CALLS = 8, 64
#: Lengths of calls that differ by less, relative to the longest, tell nothing about latency.
_LEAST_SPREAD = 0.1
#: Compressing begins once it saves this many times its cost, and ends once it saves less than its
#: cost. So the gate does not move with each trial if both are nearly equal.
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Outlook:
    """What compressing would change for one chunk.

    Attributes:
        ratio: length of a plain chunk divided by that of a compressed one.
        sooner_s: the seconds by which the tier would bring a compressed chunk sooner.
        expand_s: the seconds that expanding it would take.
    """

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


class CoderTrials:
    """Trials of a coder with real chunks, and what follows from them.

    Args:
        coder: the coder to try.
        alignment: that of the tier, in bytes.
    """

    def __init__(self, coder: Planes, alignment: int, clock: Clock) -> None:
        self._coder = coder
        self._alignment = alignment
        self._clock = clock
        self._trials: deque[tuple[int, int, float]] = deque(maxlen=_TRIALS)
        self._idle_cores = 1.0

    def try_out(self, plain: memoryview, scratch: memoryview) -> None:
        """Measure the coder with a chunk, in the caller's thread."""
        coded_bytes = self._coder.encode(plain, scratch, self._alignment)
        started_s = self._clock.now_s()
        if coded_bytes:
            self._coder.decode(scratch, coded_bytes, len(plain))
        expand_s = self._clock.now_s() - started_s
        self._trials.append((len(plain), coded_bytes or len(plain), expand_s))
        self._idle_cores = len(os.sched_getaffinity(0)) - os.getloadavg()[0]

    def outlook(self, byte_s: float, running: float = 1) -> Outlook:
        """Return what compressing would change, from the trials' medians.

        Args:
            byte_s: the seconds that a load takes for each of its bytes.
            running: the number of loads that run at once.
        """
        chunk_bytes = self._trials[-1][0]
        coded_bytes = median(coded_bytes for _, coded_bytes, _ in self._trials)
        expand_s = median(expand_s for _, _, expand_s in self._trials)
        return Outlook(
            chunk_bytes / coded_bytes,
            byte_s * (chunk_bytes - coded_bytes),
            expand_s / max(1, min(running, self._idle_cores)),
        )


class _Call(NamedTuple):
    stored_bytes: int
    took_s: float
    running: int


class CompressionGate:
    """A wrapper of a tier that times its calls, and has stores compressed where that pays.

    It pays if loads of compressed chunks arrive sooner by more than expanding them takes.

    How long a load takes for each of its bytes follows from the tier's loads; until there are
    enough, from its stores. Calls that run at once share a link, so the time of each is divided by
    their number. Their chunks are expanded at once too, as far as cores are idle.

    Attributes:
        is_open: true if the next store should be compressed.
        trials: what is known about the coder.
    """

    def __init__(
        self, tier: TierCaller | ChunkSealer, trials: CoderTrials, clock: Clock, log: TierLog
    ) -> None:
        self.is_open = False
        self._tier = tier
        self.trials = trials
        self._clock = clock
        self._log = log
        self._calls: dict[Operation, deque[_Call]] = {
            operation: deque(maxlen=_CALLS) for operation in (Operation.LOAD, Operation.STORE)
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
            self._calls[operation].append(_Call(stored_bytes, took_s, running))
        return errors

    def needs_trial(self) -> bool:
        """Count a store; return true if the coder should be tried with one of its chunks."""
        self._stores_begun += 1
        first = self._stores_begun <= _STORES_PER_TRIAL
        return first or self._stores_begun % _STORES_PER_TRIAL == 0

    def decide(self) -> None:
        """Open or close the gate by what was measured."""
        loads, stores = self._calls[Operation.LOAD], self._calls[Operation.STORE]
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
    if max(lengths) - min(lengths) < _LEAST_SPREAD * max(lengths):
        return sum(shares_s) / sum(lengths)
    return max(0.0, linear_regression(lengths, shares_s).slope)
