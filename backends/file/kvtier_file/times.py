"""Times of use, in an order that no clock can turn round."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtier_sdk import Clock


class UseTimes:
    """Gives out times of use: the wall clock's, and later than all that are known.

    A clock may be ahead for a while, or another machine's may. What was used by it would stay the
    newest until the others catch up, and whatever is stored meanwhile would go first. So they go on
    from there instead.

    Args:
        clock: tells the time.
        latest_ns: tells the latest time of use that is known from elsewhere, in nanoseconds since
            the epoch. Called from any thread.
    """

    def __init__(self, clock: Clock, latest_ns: Callable[[], int]) -> None:
        self._clock = clock
        self._latest_ns = latest_ns
        self._lock = threading.Lock()
        self._next_ns = 0

    def take(self, count: int) -> range:
        """Times for that many uses, one after the other, in nanoseconds since the epoch.

        Callable from any thread; none is given out twice.
        """
        with self._lock:
            now_ns = int(self._clock.wall_s() * 1e9)
            start_ns = max(now_ns, self._latest_ns() + 1, self._next_ns)
            self._next_ns = start_ns + count
        return range(start_ns, start_ns + count)
