"""The SDK's only source of time, timers and tasks.

No other module of the SDK reads a clock, sleeps or starts a task. So a simulation with a virtual
clock can cover hours in milliseconds, and every run has the same result.
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
    """A source of time, timers and tasks.

    One clock serves all threads; timers and tasks belong to the running event loop.
    """

    @abstractmethod
    def now_s(self) -> float:
        """Return the monotonic time in seconds. Any thread may call this."""

    @abstractmethod
    def wall_s(self) -> float:
        """Return the wall-clock time in seconds since the epoch. Any thread may call this."""

    @abstractmethod
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Create an event loop whose timers follow this clock; the caller closes the loop."""

    async def sleep(self, delay_s: float) -> None:
        """Suspend the calling task for ``delay_s`` seconds."""
        await asyncio.sleep(delay_s)

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call ``callback(*args)``, which must not raise, when :meth:`now_s` reaches ``when_s``.

        The running loop makes the call, immediately if ``when_s`` has passed. The returned handle's
        ``cancel()`` prevents the call.
        """
        delay_s = max(0.0, when_s - self.now_s())
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task for ``coroutine`` on the running loop. Logs and debuggers show ``name``.

        The caller must keep a reference to the task, and retrieve the outcome.
        """
        return asyncio.get_running_loop().create_task(coroutine, name=name)

    def timeout(self, delay_s: float) -> asyncio.Timeout:
        """Return an ``async with`` context that raises :class:`TimeoutError` after ``delay_s``."""
        return asyncio.timeout(delay_s)

    async def gather_bounded(
        self, calls: Sequence[Callable[[], Awaitable[T]]], *, limit: int
    ) -> list[T]:
        """Run ``calls``, up to ``limit`` at a time; return their results in the same order.

        If a call raises, the other calls are cancelled, and the first exception is raised after
        they have ended. A cancellation of the caller cancels all calls and waits for them. After
        the return or the exception, no call runs any more.

        ::

            calls = [lambda key=key: tier.contains_chunk(key) for key in keys]
            found = await clock.gather_bounded(calls, limit=8)
        """
        results: list[T | None] = [None] * len(calls)
        pending = iter(enumerate(calls))

        async def work() -> None:
            for index, call in pending:
                results[index] = await call()
                # Do not start another call if this one has suppressed a cancellation.
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
    """Wait until all ``tasks`` have ended; only then raise a cancellation of the caller.

    The SDK reuses the buffers when a tier's coroutine ends. So a tier needs this function if its
    client continues after a cancellation::

        task = context.clock.spawn(tier.store_chunk(transfer), name="put")
        await wait_out([task])
        await task

    This function does not raise the tasks' exceptions.
    """
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        for task in tasks:
            if not task.cancelled():
                task.exception()  # asyncio logs an exception that nobody retrieves
        raise cancelled


async def wait_within(clock: Clock, delay_s: float, tasks: Sequence[asyncio.Future[Any]]) -> bool:
    """Wait for all tasks; return false after ``delay_s``."""
    try:
        async with clock.timeout(delay_s):
            await asyncio.wait(tasks)
    except TimeoutError:
        return False
    return True


class SystemClock(Clock):
    """The machine's clock. Its :meth:`new_event_loop` returns a uvloop loop if uvloop is usable."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        try:
            import uvloop

            # uvloop may abort when it closes file 0, 1 or 2, so require open standard streams.
            for stream_fd in range(3):
                os.fstat(stream_fd)
        except (ImportError, OSError):
            return asyncio.new_event_loop()
        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop
