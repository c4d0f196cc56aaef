"""A clock whose time passes only while all tasks wait."""

from __future__ import annotations

import asyncio
import selectors

from kvtier_sdk.aio.clock import Clock

# Start at 2026-01-01 UTC, because failing tests would otherwise show dates in 1970.
_WALL_START_S = 1_767_225_600.0


class VirtualClock(Clock):
    """A clock whose idle event loop jumps to its next timer instead of waiting.

    All event loops of a clock share its time. Run only one loop at a time.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return _WALL_START_S + self._now_s

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(_VirtualSelector(self))
        loop.time = self.now_s  # type: ignore[method-assign]
        # Allow asyncio to run a timer up to 1 ns early. The default would depend on the machine.
        loop._clock_resolution = 1e-9  # type: ignore[attr-defined]
        return loop

    def advance(self, delay_s: float) -> None:
        """Advance the time by ``delay_s`` (at least 0). Call this only while no loop runs."""
        self._now_s += delay_s


class _VirtualSelector(selectors.SelectSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("virtual time: every task waits, and no timer will wake one")
            self._clock.advance(max(0.0, timeout))
        return ready
