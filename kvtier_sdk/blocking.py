"""Blocking calls from coroutines, such that a cancellation never leaves one running unseen."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from kvtier_sdk.clock import wait_out

P = ParamSpec("P")
T = TypeVar("T")

#: Threads per event loop, that is, per tier.
THREAD_LIMIT = 16


class _Threads:
    """Daemon threads that grow to a limit; unlike an executor's, they never hold up the exit.

    Each event loop has its own, so that system calls that hang on one tier's disk use up that
    tier's threads and nobody else's.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._started = 0
        self._idle = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, call: Callable[[], None]) -> None:
        with self._changed:
            if self._idle <= len(self._calls) and self._started < self._limit:
                name = f"kvtier-blocking-{self._started + 1}"
                # Where this raises, the call is not in the queue and never runs.
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._started += 1
            self._calls.append(call)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._calls and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if not self._calls:
                    return
                call = self._calls.popleft()
            call()


_threads_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads] = WeakKeyDictionary()
_threads_lock = threading.Lock()


def _threads_of(loop: asyncio.AbstractEventLoop) -> _Threads:
    with _threads_lock:
        threads = _threads_by_loop.get(loop)
        if threads is None:
            threads = _threads_by_loop[loop] = _Threads(THREAD_LIMIT)
        return threads


def close_blocking_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Let a loop's threads end once idle; call it when the loop closes."""
    with _threads_lock:
        threads = _threads_by_loop.pop(loop, None)
    if threads is not None:
        threads.close()


async def run_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in a thread and wait for it, come what may.

    Args:
        function: called in a daemon thread that belongs to the running event loop; at most
            :data:`THREAD_LIMIT` of a loop's calls run at once, the rest wait in order.
        args: passed on.
        kwargs: passed on.

    Returns:
        What ``function`` returned; what it raises is raised here.

    A cancellation is held back until the function has returned, then raised: after it nothing
    touches the buffers that the function was given (``asyncio.to_thread`` returns at once and
    leaves the thread writing). A call that has not started is not run at all. A call that never
    returns keeps its thread, and the coroutine, but not the interpreter from exiting.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    # Whoever takes it first decides: the thread that the call runs, a cancellation that it never
    # will.
    claim = threading.Lock()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if isinstance(error, StopIteration):
            # A future refuses it, and nobody would ever hear of the outcome.
            stopped = RuntimeError("the blocking function raised StopIteration")
            stopped.__cause__ = error
            outcome.set_exception(stopped)
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # T, where there is no error

    def call() -> None:
        if not claim.acquire(blocking=False):
            return
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:
            error = raised
        # A loop that was closed over a call that hung has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, result, error)

    _threads_of(loop).submit(call)
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        if claim.acquire(blocking=False):
            outcome.cancel()
            raise
        await wait_out([outcome])
        outcome.exception()  # seen; the cancellation is what the caller gets
        raise
