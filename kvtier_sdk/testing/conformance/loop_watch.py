"""Finds out that an event loop is blocked, and where, without measuring time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtier_sdk.aio.clock import Clock

#: A loop is blocked when it has not turned while the watch has woken so many times.
_WAKES = 20


class LoopWatch:
    """A thread that wakes again and again and looks whether the loop has turned meanwhile.

    On a machine that is busy the watch wakes late too, so that it takes the loop's standing still
    for what it is only where everything else went on.

    Attributes:
        blocked_at: the loop's stack when it was found blocked first, innermost last; ``None``
            where it was not.

    Args:
        clock: of the loop.
        blocking_s: how long a loop has to stand still, on an idle machine.
    """

    def __init__(self, clock: Clock, blocking_s: float) -> None:
        self.blocked_at: str | None = None
        self._clock = clock
        self._interval_s = blocking_s / _WAKES
        self._turns = 0
        self._over = threading.Event()
        self._watched = threading.get_ident()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[LoopWatch]:
        """Watch the running loop for as long as the block lasts."""
        beat = self._clock.spawn(self._beat(), name="heartbeat")
        thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat
            thread.join()

    async def _beat(self) -> None:
        while True:
            self._turns += 1
            await self._clock.sleep(self._interval_s / 4)

    def _watch(self) -> None:
        seen, wakes = -1, 0
        while not self._over.wait(self._interval_s):
            wakes = wakes + 1 if self._turns == seen else 0
            seen = self._turns
            if wakes >= _WAKES and self.blocked_at is None:
                frame = sys._current_frames().get(self._watched)
                self.blocked_at = "".join(traceback.format_stack(frame, limit=12)[-3:])
