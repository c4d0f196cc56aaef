"""Blocking calls from coroutines, such that a cancellation never leaves one running unseen."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from kvtier_sdk.aio.clock import wait_out

P = ParamSpec("P")
T = TypeVar("T")

#: Runs, and returns what tells the outcome, which holds no argument of the call any more.
_Call: TypeAlias = Callable[[], Callable[[], None]]

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
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, call: _Call) -> None:
        with self._changed:
            if self._idle <= len(self._calls) and self._started < self._limit:
                name = f"kvtier-blocking-{self._started + 1}"
                # Where this raises, the call is not in the queue and never runs.
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._started += 1
            self._calls.append(call)
            self._changed.notify()

    def withdraw(self, call: _Call) -> bool:
        """Take back a call; whether it had not begun, so that it never will."""
        with self._changed:
            try:
                self._calls.remove(call)
            except ValueError:
                return False
            return True

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
            tell = call()
            # Whoever is told may count on it that nothing here holds the buffers any more.
            del call
            tell()
            del tell


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
    returned: asyncio.Future[None] = loop.create_future()
    # Not in the future: an exception there would be in a cycle with its traceback, which leads to
    # the frames here, and keep the buffers.
    outcome: list[tuple[T, None] | tuple[None, BaseException]] = []

    def call() -> Callable[[], None]:
        try:
            outcome.append((function(*args, **kwargs), None))
        except BaseException as error:
            outcome.append((None, error))
        return tell

    def tell() -> None:
        # A loop that was closed over a call that hung has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(returned.set_result, None)

    threads = _threads_of(loop)
    threads.submit(call)
    try:
        await asyncio.shield(returned)
    except asyncio.CancelledError:
        if not threads.withdraw(call):
            await wait_out([returned])
            outcome.clear()  # the cancellation is what the caller gets
        raise
    result, error = outcome.pop()
    if error is None:
        return result  # type: ignore[return-value]  # T, where there is no error
    try:
        raise error
    finally:
        del error
