"""A clock whose time passes only while every task waits."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from kvtier_sdk.aio.clock import Clock

# 2026-01-01, so that dates in a failing test look like dates.
_WALL_START_S = 1_767_225_600.0


class VirtualClock(Clock):
    """Virtual time: an idle loop jumps to its next timer instead of waiting for it.

    All loops that one clock makes share its time. Run only one of them at a time.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return _WALL_START_S + self._now_s

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _VirtualLoop(self)

    def advance(self, delay_s: float) -> None:
        """Move time forward by ``delay_s``, 0 or more, while no loop runs."""
        self._now_s += delay_s


class _VirtualSelector(selectors.SelectSelector):
    """Moves the clock forward instead of waiting for a timer."""

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


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_VirtualSelector(clock))
        self._clock = clock
        # asyncio rounds timers to this resolution; virtual time needs no rounding.
        self._clock_resolution: Any = 1e-9

    def time(self) -> float:
        return self._clock.now_s()
