"""Time, timers and tasks, which the whole SDK gets from one object.

No other module of the SDK reads a clock, sleeps or starts a task. So a simulation can pass in a
virtual clock and play hours in milliseconds, with the same result each time.
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
        """Return monotonic seconds. Callable from any thread."""

    @abstractmethod
    def wall_s(self) -> float:
        """Return seconds since the epoch, for times that outlive the process. Any thread."""

    @abstractmethod
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Make an event loop whose timers follow this clock; the caller closes it."""

    async def sleep(self, delay_s: float) -> None:
        """Suspend the calling task for ``delay_s`` seconds."""
        await asyncio.sleep(delay_s)

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call ``callback(*args)``, which must not raise, when :meth:`now_s` reaches ``when_s``.

        The call is made on the running loop; its handle can ``cancel()`` it. A time in the past
        means as soon as possible.
        """
        delay_s = max(0.0, when_s - self.now_s())
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task on the running loop that runs ``coroutine``.

        The caller must keep the task and retrieve its outcome. Logs and debuggers show its
        ``name``.
        """
        return asyncio.get_running_loop().create_task(coroutine, name=name)

    def timeout(self, delay_s: float) -> asyncio.Timeout:
        """Raise :class:`TimeoutError` in an ``async with`` block after ``delay_s`` seconds."""
        return asyncio.timeout(delay_s)

    async def gather_bounded(
        self, calls: Sequence[Callable[[], Awaitable[T]]], *, limit: int
    ) -> list[T]:
        """Run calls concurrently, at most ``limit`` at a time, and wait for all of them.

        If one raises, the others are cancelled and waited for, and the first exception is
        raised. If the caller is cancelled, all are cancelled and waited for. Once this has
        returned or raised, no call runs any more.

        ::

            calls = [lambda key=key: tier.contains_chunk(key) for key in keys]
            found = await clock.gather_bounded(calls, limit=8)

        Args:
            calls: functions that return one awaitable each.
            limit: the maximum number of calls at once, at least 1.

        Returns:
            The results, in the order of ``calls``.
        """
        results: list[T | None] = [None] * len(calls)
        pending = iter(enumerate(calls))

        async def work() -> None:
            for index, call in pending:
                results[index] = await call()
                # A call may swallow its cancellation; start no further call then.
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
    """Wait until all tasks have ended; only then raise a cancellation of the caller.

    The tasks' outcomes are left to their owners.
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
    """The machine's own time; event loops are uvloop's if it is installed and can be used."""

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
    """Return true if descriptors 0 to 2 are open; uvloop aborts when it closes one of them."""
    try:
        for stream_fd in range(3):
            os.fstat(stream_fd)
    except OSError:
        return False
    return True
