"""Circuit breakers stop calls to a failing tier; backoffs set the pauses between attempts.

A breaker only keeps state. The breaker's owner waits, and makes the trial calls, called probes.

::

                 5 failures in a row, or half of 20
        CLOSED ------------------------------------> OPEN <-----------+
           ^                                          | a pause       | the probe fails:
           |                                          v               | the pause doubles
           +---------- the probe succeeds ------- HALF_OPEN ----------+
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from enum import Enum

from kvtier_sdk.errors import (
    ChunkError,
    ChunkNotFoundError,
    CorruptChunkError,
    TierCapacityError,
    TierError,
)
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.types import OffloadKey

#: Jitter shortens pauses by up to this fraction. Longer pauses would delay recovery.
_JITTER = 0.1


class Backoff:
    """Pauses that double up to a limit. ``pause_s`` is the current pause, without jitter."""

    def __init__(self, first_s: float, longest_s: float, rng: random.Random | None = None) -> None:
        self.pause_s = first_s
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._next_s = first_s

    def next_s(self) -> float:
        self.pause_s = self._next_s
        self._next_s = min(2 * self._next_s, self._longest_s)
        return self.pause_s * (self._rng.uniform(1 - _JITTER, 1) if self._rng else 1.0)

    def reset(self) -> None:
        self.pause_s = self._next_s = self._first_s


class Direction(Enum):
    """The direction of calls that a breaker guards: a full disk must stop stores, but not loads."""

    READ = "read"  # lookups, loads and touches
    WRITE = "write"  # stores, deletes and purges


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"  # no calls are made; a probe follows after a pause
    HALF_OPEN = "half_open"  # a probe runs, but no other call


class Outcome(Enum):
    ANSWERED = "answered"  # even if the chunk is missing
    #: Does not count toward failures in a row, because a healthy tier may be slow under load.
    LATE = "late"
    FAILED = "failed"
    #: Each error concerns only one object. If several objects fail, the tier may be broken.
    FAULTY = "faulty"
    #: The call could not start, because hanging calls use up the allowed number of calls.
    BLOCKED = "blocked"


# Errors of healthy tiers. A full tier can be read, so lack of room is a failure only for stores.
_ANSWERS: dict[Direction, tuple[type[TierError], ...]] = {
    Direction.READ: (ChunkNotFoundError, CorruptChunkError, TierCapacityError),
    Direction.WRITE: (ChunkNotFoundError, CorruptChunkError),
}


def outcome_of(direction: Direction, errors: Sequence[TierError | None]) -> Outcome:
    answers = _ANSWERS[direction]
    if None in errors or any(isinstance(error, answers) for error in errors):
        return Outcome.ANSWERED
    faulty = all(isinstance(error, ChunkError) for error in errors)
    return Outcome.FAULTY if faulty else Outcome.FAILED


class Breaker:
    """The breaker of one tier and direction.

    A faulty object counts once, even if it is loaded many times. With a dead disk, every object is
    faulty, so several *distinct* faulty objects open the breaker unless a transfer succeeds in
    between. A successful lookup does not reset the count, because a lookup reads no object.
    """

    def __init__(self, options: RunnerOptions, rng: random.Random) -> None:
        self.state = BreakerState.CLOSED
        self.wait_s = 0.0
        self._failures = options.breaker_failures
        self.backoff = Backoff(options.probe_interval_s, options.max_probe_interval_s, rng)
        self._row = 0
        # False for each recent call that the tier answered, true for the others.
        self._recent: deque[bool] = deque(maxlen=options.breaker_window)
        self._faulty: set[OffloadKey] = set()  # faulty objects since the last successful transfer

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def note(self, outcome: Outcome, objects: Sequence[OffloadKey] = ()) -> bool:
        """Record an outcome if the breaker is closed; return true if the breaker opens."""
        if not self.is_closed or not self._is_enough(outcome, objects):
            return False
        self._open()
        return True

    def _is_enough(self, outcome: Outcome, objects: Sequence[OffloadKey]) -> bool:
        if outcome is Outcome.FAULTY:
            self._faulty.update(objects)
            return len(self._faulty) >= self._failures
        self._recent.append(outcome is not Outcome.ANSWERED)
        if outcome is Outcome.ANSWERED:
            self._row = 0
            if objects:
                self._faulty.clear()
        elif outcome is Outcome.FAILED:
            self._row += 1
        half = 2 * sum(self._recent) >= (self._recent.maxlen or 0)
        return self._row >= self._failures or half or outcome is Outcome.BLOCKED

    def begin_probe(self) -> None:
        self.state = BreakerState.HALF_OPEN

    def end_probe(self, succeeded: bool) -> None:
        if not succeeded:
            self._open()
            return
        self.state = BreakerState.CLOSED
        self.backoff.reset()
        self._row = 0
        self._recent.clear()
        self._faulty.clear()

    def _open(self) -> None:
        self.state = BreakerState.OPEN
        self.wait_s = self.backoff.next_s()
