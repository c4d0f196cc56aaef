"""Times of use that stay in order when a clock is wrong or is set."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier_file.chunks import USE_NS
from kvtier_sdk import Clock


class RecencyClock:
    """Gives out times of use: the wall clock's time, but always later than every known use.

    A clock may be ahead for a while, this machine's or another's. Chunks used in that time would
    stay the newest until the other clocks catch up, and chunks stored meanwhile would be evicted
    first. So the times continue from the latest known one instead.

    Args:
        clock: the wall clock.
        latest_ns: returns the latest use known from elsewhere, in nanoseconds since the epoch.
            Called from any thread.
    """

    def __init__(self, clock: Clock, latest_ns: Callable[[], int]) -> None:
        self._clock = clock
        self._latest_ns = latest_ns
        self._lock = threading.Lock()
        self._next_ns = 0

    def take(self, count: int) -> range:
        """Return ``count`` ascending times, in nanoseconds since the epoch, that count no uses.

        Callable from any thread. No time is given out twice.
        """
        with self._lock:
            now_ns = int(self._clock.wall_s() * 1e9)
            start_ns = max(now_ns, self._latest_ns() + 1, self._next_ns)
            start_ns += -start_ns % USE_NS
            self._next_ns = start_ns + count * USE_NS
        return range(start_ns, start_ns + count * USE_NS, USE_NS)
