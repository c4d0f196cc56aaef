"""Times of use that stay in order when a clock is set back a little."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier_file.chunks import MOST_AHEAD_NS, USE_NS
from kvtier_sdk import Clock


class RecencyClock:
    """Gives out times of use: the wall clock's time, but later than every known use.

    Clocks differ a little, and are set back a little, but uses stay in order. A known use further
    ahead is ignored: chunks with times that continued from it would never expire.
    """

    def __init__(self, clock: Clock, latest_ns: Callable[[], int]) -> None:
        self._clock = clock
        self._latest_ns = latest_ns
        self._lock = threading.Lock()
        self._next_ns = 0

    def take(self, count: int) -> range:
        """Return ``count`` ascending times, in nanoseconds since the epoch, with a count of 0.

        Callable from any thread. No time is given out twice, unless the clock is set back.
        """
        with self._lock:
            now_ns = int(self._clock.wall_s() * 1e9)
            known_ns = (now_ns, self._latest_ns() + 1, self._next_ns)
            start_ns = max(one for one in known_ns if one <= now_ns + MOST_AHEAD_NS)
            start_ns += -start_ns % USE_NS
            self._next_ns = start_ns + count * USE_NS
        return range(start_ns, start_ns + count * USE_NS, USE_NS)
