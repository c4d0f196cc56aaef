"""A tier's circuit breakers, one per direction: they say when not to call the tier.

Pure state: a breaker's owner tells it the time and makes the probes.

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
from kvtier_sdk.runner.backoff import Backoff
from kvtier_sdk.types import OffloadKey


class Direction(Enum):
    """The direction of calls that a breaker guards: a full disk must stop stores but not loads."""

    #: Lookups and loads.
    READ = "read"
    #: Stores.
    WRITE = "write"


class BreakerState(Enum):
    """The state of a breaker."""

    #: Calls are made.
    CLOSED = "closed"
    #: No calls are made; a probe follows after a pause.
    OPEN = "open"
    #: A probe is under way; no other calls are made yet.
    HALF_OPEN = "half_open"


class Outcome(Enum):
    """The meaning of one call for a tier's health."""

    #: The tier did its work, even if its answer was no.
    ANSWERED = "answered"
    #: The call was too slow. Load slows a healthy tier too, so a late call neither lengthens nor
    #: ends a run of failures; it counts as a failure only among the last calls.
    LATE = "late"
    #: The tier did not do its work.
    FAILED = "failed"
    #: Single objects were at fault. A few say nothing about the tier; many in a row do.
    FAULTY = "faulty"
    #: The call could not be made: hanging calls leave no room for it or any other call.
    BLOCKED = "blocked"


# Errors of a healthy tier. A lack of room counts against stores only: a full disk can be read.
_ANSWERS: dict[Direction, tuple[type[TierError], ...]] = {
    Direction.READ: (ChunkNotFoundError, CorruptChunkError, TierCapacityError),
    Direction.WRITE: (ChunkNotFoundError, CorruptChunkError),
}


def outcome_of(direction: Direction, errors: Sequence[TierError | None]) -> Outcome:
    """Judge one call by the errors of its chunks."""
    answers = _ANSWERS[direction]
    if None in errors or any(isinstance(error, answers) for error in errors):
        return Outcome.ANSWERED
    faulty = all(isinstance(error, ChunkError) for error in errors)
    return Outcome.FAULTY if faulty else Outcome.FAILED


class Breaker:
    """The breaker of one tier and direction.

    A faulty object counts once, however often it is met. But a dead disk fails object by object
    too, so ``failures`` *distinct* objects open the breaker unless a transfer succeeds in between.
    A successful lookup does not count: it does not show that objects can be read.

    Attributes:
        state: the state.
    """

    def __init__(
        self,
        *,
        failures: int,
        window: int,
        probe_interval_s: float,
        max_probe_interval_s: float,
        rng: random.Random,
    ) -> None:
        self.state = BreakerState.CLOSED
        self._probe_at_s = 0.0
        self._failures = failures
        self._backoff = Backoff(probe_interval_s, max_probe_interval_s, rng)
        self._row = 0
        # One entry for each of the last calls: true if it did not succeed.
        self._recent: deque[bool] = deque(maxlen=window)
        # Faulty objects since the last successful transfer.
        self._faulty: set[OffloadKey] = set()

    @property
    def pause_s(self) -> float:
        """Length of the pause before the next probe, before jitter."""
        return self._backoff.pause_s

    @property
    def is_closed(self) -> bool:
        """True if calls are made."""
        return self.state is BreakerState.CLOSED

    def note(self, outcome: Outcome, now_s: float, objects: Sequence[OffloadKey] = ()) -> bool:
        """Record a call's outcome if the breaker is closed; return true if this opens it."""
        if not self.is_closed:
            return False
        if outcome is Outcome.FAULTY:
            self._faulty.update(objects)
            if len(self._faulty) < self._failures:
                return False
            self._open(now_s)
            return True
        self._recent.append(outcome is not Outcome.ANSWERED)
        if outcome is Outcome.ANSWERED:
            self._row = 0
            if objects:
                self._faulty.clear()
        elif outcome is Outcome.FAILED:
            self._row += 1
        half = 2 * sum(self._recent) >= (self._recent.maxlen or 0)
        if self._row < self._failures and not half and outcome is not Outcome.BLOCKED:
            return False
        self._open(now_s)
        return True

    def wait_s(self, now_s: float) -> float:
        """Return the rest of the pause before the next probe, in seconds; for ``OPEN``."""
        return max(0.0, self._probe_at_s - now_s)

    def begin_probe(self) -> None:
        """Go from ``OPEN`` to ``HALF_OPEN``: the pause is over."""
        self.state = BreakerState.HALF_OPEN

    def end_probe(self, succeeded: bool, now_s: float) -> None:
        """Go from ``HALF_OPEN`` to ``CLOSED``, or back to ``OPEN`` for twice the pause."""
        if succeeded:
            self.state = BreakerState.CLOSED
            self._backoff.reset()
            self._row = 0
            self._recent.clear()
            self._faulty.clear()
        else:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self.state = BreakerState.OPEN
        self._probe_at_s = now_s + self._backoff.next_s()
