"""A watch that detects a blocked event loop and its place, without measuring time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtier_sdk.aio.clock import Clock

#: A loop is blocked if it has not turned while the watch woke this many times.
_WAKES = 20


class LoopWatch:
    """A thread that wakes at intervals and checks that the loop has turned since.

    On a busy machine the watch wakes late too, so that it never takes a slow machine for a
    blocked loop.

    Attributes:
        blocked_at: the loop's stack when it was first found blocked, innermost frame last;
            ``None`` if it was not.
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
        """Watch the running loop during the block."""
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
