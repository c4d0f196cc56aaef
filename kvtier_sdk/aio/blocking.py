"""Runs blocking calls for coroutines. A cancellation leaves no call running in the background."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

from kvtier_sdk.aio.clock import wait_out

P = ParamSpec("P")
T = TypeVar("T")

#: Runs a blocking call, and returns a function that reports the outcome. The returned function
#: keeps no reference to the call's arguments.
_Call: TypeAlias = Callable[[], Callable[[], None]]

#: The maximum number of threads per event loop. Each tier has its own event loop.
THREAD_LIMIT = 16


class _Threads:
    """A pool of daemon threads for one loop, so that a hanging disk blocks only one tier."""

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
                # Start the thread first, because a call must not be queued if the start fails.
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._started += 1
            self._calls.append(call)
            self._changed.notify()

    def withdraw(self, call: _Call) -> bool:
        """Remove a queued call; return false if the call has already begun."""
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
            report = call()
            # Drop the references to the call's buffers before reporting the outcome.
            del call
            report()
            del report


_threads_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads] = WeakKeyDictionary()
_threads_lock = threading.Lock()


def close_blocking_threads(loop: asyncio.AbstractEventLoop) -> None:
    """End the loop's threads once they are idle. Call this when the loop is closed."""
    with _threads_lock:
        threads = _threads_by_loop.pop(loop, None)
    if threads is not None:
        threads.close()


async def run_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``function(*args, **kwargs)`` in a thread, and wait until it returns.

    A cancellation is raised only after the function has returned and no longer uses its buffers.
    ``asyncio.to_thread`` would raise immediately, while its thread still uses the buffers. If the
    cancellation comes before the function has started, the function never runs. A function that
    never returns blocks its thread and the coroutine, but the interpreter can still exit. At most
    16 functions run at once per event loop, and further calls wait in order. For example::

        data = await run_blocking(path.read_bytes)
    """
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[None] = loop.create_future()
    has_returned = False
    # Store the outcome in a list. An exception stored in the asyncio future would form a reference
    # cycle with its traceback, and the traceback's frames would keep the buffers alive.
    outcome: list[tuple[T, None] | tuple[None, BaseException]] = []

    def call() -> Callable[[], None]:
        try:
            outcome.append((function(*args, **kwargs), None))
        except BaseException as error:
            outcome.append((None, error))
        return report

    def report() -> None:
        # Ignore a closed loop's error, because the loop may close while the call hangs.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end)

    def end() -> None:
        nonlocal has_returned
        has_returned = True
        if not returned.done():  # a cancelled future is done
            returned.set_result(None)

    with _threads_lock:
        threads = _threads_by_loop.get(loop)
        if threads is None:
            threads = _threads_by_loop[loop] = _Threads(THREAD_LIMIT)
            # asyncio.run does not call close_blocking_threads, so a finalizer ends the threads.
            finalize(loop, threads.close).atexit = False
    threads.submit(call)
    try:
        await returned
    except asyncio.CancelledError:
        if not threads.withdraw(call):
            if not has_returned:
                returned = loop.create_future()
                await wait_out([returned])
            outcome.clear()  # the caller gets the cancellation instead
        raise
    result, error = outcome.pop()
    if error is None:
        return result  # type: ignore[return-value]  # the value is a T if there is no error
    try:
        raise error
    finally:
        del error
