"""Time, timers and tasks: the one door through which the SDK reaches them.

Nothing else in the SDK reads a clock, sleeps or starts a task, so that a simulation can put a
virtual clock in its place and play hours in milliseconds, the same way each time.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Clock(ABC):
    """Time and task spawning. One object serves every thread; timers belong to the running loop."""

    @abstractmethod
    def now_s(self) -> float:
        """Monotonic seconds. Callable from any thread."""

    @abstractmethod
    def wall_s(self) -> float:
        """Seconds since the epoch, for what outlives the process. Callable from any thread."""

    @abstractmethod
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """A new event loop whose timers follow this clock; the caller closes it."""

    async def sleep(self, delay_s: float) -> None:
        """Suspend the calling task for ``delay_s`` seconds."""
        await asyncio.sleep(delay_s)

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call ``callback(*args)`` on the running loop at ``when_s`` of :meth:`now_s`.

        Args:
            when_s: the moment; one that has passed means as soon as possible.
            callback: called without arguments but ``args``; must not raise.
            args: passed on.

        Returns:
            A handle whose ``cancel()`` takes the call back.
        """
        delay_s = max(0.0, when_s - self.now_s())
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task on the running loop. The caller keeps it and looks at its outcome.

        Args:
            coroutine: what the task runs.
            name: the task's name, for logs and debuggers.

        Returns:
            The task.
        """
        return asyncio.get_running_loop().create_task(coroutine, name=name)

    def timeout(self, delay_s: float) -> asyncio.Timeout:
        """``async with clock.timeout(1.0)``: raises :class:`TimeoutError` after ``delay_s``."""
        return asyncio.timeout(delay_s)

    async def gather_bounded(
        self, calls: Sequence[Callable[[], Awaitable[T]]], *, limit: int
    ) -> list[T]:
        """Run calls concurrently, at most ``limit`` at a time, and wait for all of them.

        Args:
            calls: functions that return an awaitable each.
            limit: how many may run at once, at least 1.

        Returns:
            The results, in the order of ``calls``.

        If one raises, the others are cancelled and waited for, and the first exception is
        raised. If the caller is cancelled, all are cancelled and waited for: when this has
        returned, none of them runs.
        """
        results: list[T | None] = [None] * len(calls)
        pending = iter(enumerate(calls))

        async def work() -> None:
            for index, call in pending:
                results[index] = await call()
                # A call may swallow its cancellation; no other is started after it.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    return

        workers = [
            self.spawn(work(), name=f"fan-out {n}") for n in range(max(1, min(limit, len(calls))))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await wait_out(workers)
        return results  # type: ignore[return-value]  # every index was filled


TimerHandle = asyncio.TimerHandle


async def wait_out(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until all tasks have ended, even if the caller is cancelled meanwhile.

    The caller's cancellation is raised when they have ended, not before. Their outcomes are
    left to whoever holds them.
    """
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class SystemClock(Clock):
    """The machine's own time; event loops are uvloop's where it is installed and can be used."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        try:
            import uvloop
        except ImportError:
            return asyncio.new_event_loop()
        if not _has_standard_streams():
            return asyncio.new_event_loop()
        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop


def _has_standard_streams() -> bool:
    """Whether a loop gets none of their descriptors: closing one, uvloop would abort."""
    try:
        for stream_fd in range(3):
            os.fstat(stream_fd)
    except OSError:
        return False
    return True
