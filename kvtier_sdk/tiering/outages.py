"""The number of chunks that a tier's outage affected, logged when the outage ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier_sdk.metrics import TierStats
from kvtier_sdk.runner.breaker import Direction

_WHAT = {
    Direction.READ: "chunks were not looked up in it",
    Direction.WRITE: "chunks were not stored in it",
}


class Outages:
    """Counts, per direction, the chunks that were not looked up or stored during an outage."""

    def __init__(self, stats: TierStats, log_end: Callable[[str, str], None]) -> None:
        self._stats = stats
        self._log_end = log_end
        # The count of each direction when its last outage began.
        self._missed_before = dict.fromkeys(Direction, 0)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Detect an outage that begins or ends in the block, which changes the counters."""
        before = self._under_way()
        yield
        for direction, is_out in self._under_way().items():
            if is_out and not before[direction]:
                self._missed_before[direction] = self._missed(direction)
            elif before[direction] and not is_out:
                self._tell(direction)

    def _under_way(self) -> dict[Direction, int]:
        stats = self._stats
        return {
            Direction.READ: stats.reads_open,
            Direction.WRITE: stats.stores_open | stats.is_slow,
        }

    def _missed(self, direction: Direction) -> int:
        dropped, failures = self._stats.dropped, self._stats.failures
        if direction is Direction.READ:
            return dropped["lookup.unavailable"]
        unavailable = "store.unavailable"
        return dropped[unavailable] + dropped["store.slow"] + failures[unavailable]

    def _tell(self, direction: Direction) -> None:
        count = self._missed(direction) - self._missed_before[direction]
        if count:
            message = f"{self._stats.name}: meanwhile {count:,} {_WHAT[direction]}"
            self._log_end(f"missed {direction.value}s", message)
