"""An event loop in a daemon thread of its own, driven from another thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from kvtier_sdk.aio.blocking import close_blocking_threads
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierError
from kvtier_sdk.runner.log import TierLog

T = TypeVar("T")
Call: TypeAlias = Callable[[], Coroutine[Any, Any, T]]

#: When the log first says that an opening goes on; the time doubles for each further line.
_PROGRESS_S = 5.0


class LoopThread:
    """Runs an event loop in a thread, from an asynchronous opening to an asynchronous closing.

    The thread is a daemon: a tier that is stuck in a system call cannot keep the interpreter from
    exiting. A forked copy of the process lacks the thread: there it counts as ended, and nothing
    touches the loop, because its descriptors are also the parent's.
    """

    def __init__(self, name: str, clock: Clock, log: TierLog, on_end: Callable[[], None]) -> None:
        self._name = name
        self._clock = clock
        self._log = log
        self._on_end = on_end
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Id of the process that has the thread.
        self._pid = -1
        self._opened: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._opening: asyncio.Task[None] | None = None
        self._closing_task: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._stopped = threading.Event()
        self._closed = threading.Event()
        self._loop_ends = False
        self._closing = False

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop; only after :meth:`start`."""
        assert self._event_loop is not None
        return self._event_loop

    @property
    def is_here(self) -> bool:
        """True in the process that started the thread, false in its forked copies."""
        return self._pid == os.getpid()

    @property
    def is_running(self) -> bool:
        """True from the start until the loop has ended or is left behind."""
        return self.is_here and not self._stopped.is_set()

    @property
    def is_open(self) -> bool:
        """True once the opening has ended without an error."""
        return self.is_here and self._opened.done() and self._opened.exception() is None

    @property
    def opened(self) -> concurrent.futures.Future[bool]:
        """The outcome of the opening, which may go on after :meth:`start`."""
        return self._opened

    def start(self, opening: Call[bool]) -> None:
        """Start the thread, and run ``opening`` in it. A second call does nothing."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        self._started_s = self._clock.now_s()
        self._event_loop = self._clock.new_event_loop()
        self._event_loop.set_exception_handler(self._log_unhandled)
        self._thread = threading.Thread(
            target=self._run,
            args=(self._event_loop, opening),
            name=f"kvtier-{self._name}",
            daemon=True,
        )
        self._thread.start()

    def wait_opened(self, timeout_s: float | None = None) -> bool | None:
        """Return the opening's result, or ``None`` after ``timeout_s``; log while waiting.

        Raises:
            Exception: the error of the opening.
        """
        next_s = _PROGRESS_S
        while True:
            waited_s = self._clock.now_s() - self._started_s
            while next_s < waited_s:
                next_s *= 2
            end_s = next_s if timeout_s is None else min(next_s, timeout_s)
            try:
                return self._opened.result(max(0.0, end_s - waited_s))
            except TimeoutError:
                # The opening itself may have raised the error.
                if self._opened.done():
                    return self._opened.result()
            if end_s == timeout_s:
                return None
            self._log.warning("still opening after %g s", end_s)
            next_s *= 2

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, default: T) -> T:
        """Run a coroutine in the thread; return its result, or ``default`` if there is none."""
        if self._event_loop is None or not self.is_here:
            coroutine.close()
            return default
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        except RuntimeError:  # the loop has been closed
            coroutine.close()
            return default
        try:
            return future.result(timeout_s)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            return default

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in the thread, unless its loop has ended."""
        if self._event_loop is None or not self.is_here:
            return
        try:
            self._event_loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has been closed
            return

    def close(self, closing: Call[None], timeout_s: float, *, join_s: float) -> bool:
        """Cancel an opening that goes on, run ``closing`` in the thread, and end the thread.

        A thread that takes longer is left behind and ends later by itself; this returns false.
        """
        if self._thread is None or self._closing or not self.is_here:
            return True
        self._closing = True
        self.call_soon(self._start_closing, closing)
        closed = self._closed.wait(timeout_s)
        if closed:
            self._thread.join(join_s)
        # A thread that is left behind counts as ended, though it still closes the tier when it can.
        self._stopped.set()
        return closed

    def _run(self, event_loop: asyncio.AbstractEventLoop, opening: Call[bool]) -> None:
        asyncio.set_event_loop(event_loop)
        event_loop.call_soon(self._start_opening, opening)
        try:
            run_until(event_loop, lambda: self._loop_ends, self._log)
        except BaseException:
            self._log.exception("the tier's loop has ended; the tier is not used any longer")
        finally:
            # Set first, so that jobs submitted from now on are refused.
            self._stopped.set()
            self._closed.set()
            self._on_end()
            end_event_loop(event_loop, self._clock)
            if not self._opened.done():
                self._opened.set_exception(TierError("its loop ended while it was opened"))

    def _log_unhandled(
        self, event_loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Log an error that no task handled, in the tier's log, which masks its secrets."""
        self._log.error("%s", context["message"], exc_info=context.get("exception"))

    def _stop(self) -> None:
        self._loop_ends = True
        asyncio.get_running_loop().stop()

    def _start_opening(self, opening: Call[bool]) -> None:
        # Kept here, because a loop holds its tasks only weakly.
        self._opening = self._clock.spawn(self._open(opening), name=f"open {self._name}")

    async def _open(self, opening: Call[bool]) -> None:
        try:
            self._opened.set_result(await opening())
        except Exception as error:
            self._opened.set_exception(error)
        except asyncio.CancelledError:
            # The thread is being closed, so nobody waits for the opening any longer.
            self._opened.set_exception(TierError("it was closed while it was opened"))

    def _start_closing(self, closing: Call[None]) -> None:
        self._closing_task = self._clock.spawn(self._close(closing), name=f"close {self._name}")

    async def _close(self, closing: Call[None]) -> None:
        try:
            # An opening that does not end in time must not go on while the tier is closed.
            if self._opening is not None:
                self._opening.cancel()
                await asyncio.wait([self._opening])
            await closing()
        finally:
            self._closed.set()
            self._stop()


def run_until(
    event_loop: asyncio.AbstractEventLoop, ends: Callable[[], bool], log: TierLog
) -> None:
    """Run a loop until ``ends`` says so, even if a tier ends it early."""
    while not ends():
        try:
            event_loop.run_forever()
        except SystemExit:
            # A task of the tier's own raised it. It would end the thread, not the process.
            log.exception("a task raised SystemExit, and was ended by it")


async def close_tier(close: Call[None], log: TierLog) -> None:
    """Close a tier, and log its error."""
    try:
        await close()
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):  # not the tier's errors
        raise
    except BaseException:
        log.exception("closing the tier failed")


def end_event_loop(event_loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """Close a loop that has stopped, with its blocking threads.

    A task that a tier left behind would be destroyed while pending: it is cancelled first, and
    runs until its next wait.
    """
    for task in asyncio.all_tasks(event_loop):
        task.cancel()
    event_loop.run_until_complete(clock.sleep(0))
    close_blocking_threads(event_loop)
    event_loop.close()
