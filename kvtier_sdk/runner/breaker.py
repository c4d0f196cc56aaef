"""A tier's circuit breakers, one a direction: they say when the tier is not worth asking.

Pure state: the holder of a breaker tells it the time and makes the probes.

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
    """The calls that a breaker guards: a full disk must stop stores and not loads."""

    #: Lookups and loads.
    READ = "read"
    #: Stores.
    WRITE = "write"


class BreakerState(Enum):
    """The state of a breaker."""

    #: The tier is asked.
    CLOSED = "closed"
    #: The tier is not asked; a probe follows after a pause.
    OPEN = "open"
    #: A probe is under way; no other call is made yet.
    HALF_OPEN = "half_open"


class Outcome(Enum):
    """The meaning of one call for a tier's health."""

    #: The tier did its work, even if its answer was no.
    ANSWERED = "answered"
    #: The call was too slow. Load slows a healthy tier too, so a late call neither lengthens nor
    #: ends a row of failures; it is a failure among the last calls only.
    LATE = "late"
    #: The tier did not do its work.
    FAILED = "failed"
    #: Single objects were at fault. Few of them say nothing of the tier; many in a row do.
    FAULTY = "faulty"
    #: The call could not be made: calls that hang leave no room for it, nor for any other.
    BLOCKED = "blocked"


# Errors of a healthy tier. Room is a matter of stores: a full disk can be read.
_ANSWERS: dict[Direction, tuple[type[TierError], ...]] = {
    Direction.READ: (ChunkNotFoundError, CorruptChunkError, TierCapacityError),
    Direction.WRITE: (ChunkNotFoundError, CorruptChunkError),
}


def outcome_of(direction: Direction, errors: Sequence[TierError | None]) -> Outcome:
    """Judge one call by its verdicts."""
    answers = _ANSWERS[direction]
    if None in errors or any(isinstance(error, answers) for error in errors):
        return Outcome.ANSWERED
    faulty = all(isinstance(error, ChunkError) for error in errors)
    return Outcome.FAULTY if faulty else Outcome.FAILED


class Breaker:
    """The breaker of one tier and direction.

    A single object's fault counts for nothing, however often it is met. But a dead disk fails
    object by object too. So as many *distinct* objects as ``failures`` open the breaker, if between
    them no transfer went well; a lookup that did is no sign that objects can be read.

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
        # Of the last calls, those that did not go well.
        self._recent: deque[bool] = deque(maxlen=window)
        # Objects at fault since a transfer last went well.
        self._faulty: set[OffloadKey] = set()

    @property
    def pause_s(self) -> float:
        """Length of the pause before the next probe, before jitter."""
        return self._backoff.pause_s

    @property
    def is_closed(self) -> bool:
        """True if the tier is asked."""
        return self.state is BreakerState.CLOSED

    def note(self, outcome: Outcome, now_s: float, objects: Sequence[OffloadKey] = ()) -> bool:
        """Take the outcome of a call; one that ends while the breaker is not closed is ignored."""
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
        """Return how long the pause before the next probe goes on; meant for ``OPEN``."""
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
