"""The base class of both runners: an event loop in a daemon thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvtier_sdk.aio.blocking import close_blocking_threads
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierError
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.runner.log import TierLog

T = TypeVar("T")

#: Time until the first log line about a slow opening; the time doubles for each further line.
_PROGRESS_S = 5.0
#: Time limit for closing a tier whose start failed or was cancelled.
FAILED_CLOSE_S = 5.0


class TierRunner(ABC):
    """Runs a tier's jobs. Only the engine's thread may call it, except where noted.

    The runner reports one :class:`~kvtier_sdk.runner.jobs.JobResult` per submitted job. If the
    tier's loop or process ends, one ``RunnerStopped`` report replaces all missing results.

    The event loop runs in a daemon thread, so that the interpreter can exit even if a tier is stuck
    in a system call. A forked copy of the engine lacks the thread, so the runner counts as ended
    there. The copy must not use the loop, because both processes share the loop's descriptors.
    """

    _grace_s = 0.0  # extra time that closing may take beyond its limit

    def __init__(self, spec: TierSpec, clock: Clock, notify: Callable[[], None] | None) -> None:
        self._spec = spec
        self._clock = clock
        self._notify = notify
        self._log = TierLog(spec.name, clock)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = -1
        self._opened: concurrent.futures.Future[bool] = concurrent.futures.Future()
        # Keep strong references to these tasks, because an event loop keeps only weak ones.
        self._opening: asyncio.Task[None] | None = None
        self._closing_task: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._stopped = threading.Event()
        self._closed = threading.Event()
        self._closing = False

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Submit jobs without waiting; return the results of refused jobs."""

    @abstractmethod
    def poll(self) -> Sequence[Report]:
        """Return the reports since the last call, without waiting."""

    @abstractmethod
    def peek(self) -> Sequence[Report]:
        """Return the new reports but keep them for :meth:`poll`. Any thread may call this."""

    @abstractmethod
    def options_changed(self) -> None:
        """Pass changed live options to the tier's loop. Any thread may call this."""

    @abstractmethod
    def log_end(self, topic: str, message: str) -> bool:
        """Let the tier's loop log the end of an outage; return false if the loop is unreachable."""

    def suspect(self) -> None:  # noqa: B027
        """Kill the tier's process if it is stuck. The client calls this when a job is overdue."""

    @property
    def is_running(self) -> bool:
        """True from the start until the loop ends; false in a forked copy of the engine."""
        return self._is_here and not self._stopped.is_set()

    @property
    def _is_here(self) -> bool:
        return self._pid == os.getpid()

    def begin(self) -> None:
        """Start the thread and begin to open the tier. A second call does nothing."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        self._started_s = self._clock.now_s()
        self._event_loop = self._clock.new_event_loop()
        self._event_loop.set_exception_handler(self._log_unhandled)
        self._thread = threading.Thread(
            target=self._run,
            args=(self._event_loop,),
            name=f"kvtier-{self._spec.name}",
            daemon=True,
        )
        self._thread.start()

    def start(self) -> bool:
        """Open the tier; return true if it is open. An error also closes the runner."""
        self.begin()
        try:
            return self._await_opening()
        except BaseException:
            self.close(FAILED_CLOSE_S)
            raise

    def drain(self, timeout_s: float) -> bool:
        """Cancel queued batches, and wait for running batches; return true if all have ended."""
        if not self.is_running:
            return True
        return self._call(self._drain(timeout_s), 2 * timeout_s + 1.0, default=False)

    def close(self, timeout_s: float) -> None:
        """Drain and close the tier, and end its thread. A second call does nothing."""
        # Set the flag first, because an interrupted drain may lead to a second call.
        if self._closing:
            return
        self._closing = True
        if self._thread is None or not self._is_here:
            return
        if self._opened.done() and self._opened.exception() is None:
            self.drain(timeout_s)
        self._call_soon(self._start_closing, timeout_s)
        if self._closed.wait(timeout_s + self._grace_s):
            self._thread.join(timeout_s)
        else:
            self._log.warning(
                "the tier did not close within %g s; its thread is left behind", timeout_s
            )
        self._stopped.set()

    @abstractmethod
    def _await_opening(self) -> bool:
        """Wait until the tier is open; return false if the opening continues in the background."""

    @abstractmethod
    async def _open(self) -> bool: ...

    @abstractmethod
    async def _drain(self, timeout_s: float) -> bool: ...

    @abstractmethod
    async def _close(self, timeout_s: float) -> None: ...

    @abstractmethod
    def _ended(self) -> None: ...

    def _wait_opened(self, timeout_s: float | None = None) -> bool | None:
        """Return the opening's result or raise its error; return ``None`` after ``timeout_s``."""
        next_s = _PROGRESS_S
        while True:
            waited_s = self._clock.now_s() - self._started_s
            while next_s < waited_s:
                next_s *= 2
            end_s = next_s if timeout_s is None else min(next_s, timeout_s)
            try:
                return self._opened.result(max(0.0, end_s - waited_s))
            except TimeoutError:
                # Check the outcome, because the opening itself may have raised this TimeoutError.
                if self._opened.done():
                    return self._opened.result()
            if end_s == timeout_s:
                return None
            self._log.warning("still opening after %g s", end_s)
            next_s *= 2

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, default: T) -> T:
        """Run a coroutine in the thread; return ``default`` if it does not end in time."""
        if self._event_loop is None or not self._is_here:
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

    def _call_soon(self, callback: Callable[..., object], *args: object) -> None:
        if self._event_loop is None or not self._is_here:
            return
        try:
            self._event_loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has been closed
            return

    def _notify_engine(self) -> None:
        if self._notify is None:
            return
        try:
            self._notify()
        except Exception:
            self._log.exception("notifying the engine failed")

    # --- in the thread ------------------------------------------------------------------------

    def _run(self, event_loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(event_loop)
        event_loop.call_soon(self._start_opening)
        try:
            run_until(event_loop, self._closed.is_set, self._log)
        except BaseException:
            self._log.exception("the tier's loop has ended; the tier is not used any longer")
        finally:
            # Set the flag first, so that jobs submitted after the loop's end are refused.
            self._stopped.set()
            self._closed.set()
            self._ended()
            end_event_loop(event_loop, self._clock)
            if not self._opened.done():
                self._opened.set_exception(TierError("its loop ended while it was opened"))

    def _log_unhandled(
        self, event_loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Log an error in the tier's log, because asyncio's log does not mask secrets."""
        self._log.error("%s", context["message"], exc_info=context.get("exception"))

    def _start_opening(self) -> None:
        self._opening = self._clock.spawn(self._run_opening(), name=f"open {self._spec.name}")

    async def _run_opening(self) -> None:
        try:
            self._opened.set_result(await self._open())
        except Exception as error:
            self._opened.set_exception(error)
        except asyncio.CancelledError:
            # The cancellation came from the runner's own close, so do not raise it again.
            self._opened.set_exception(TierError("it was closed while it was opened"))

    def _start_closing(self, timeout_s: float) -> None:
        closing = self._run_closing(timeout_s)
        self._closing_task = self._clock.spawn(closing, name=f"close {self._spec.name}")

    async def _run_closing(self, timeout_s: float) -> None:
        try:
            # End the opening first, because a tier must not be closed while it is being opened.
            if self._opening is not None:
                self._opening.cancel()
                await asyncio.wait([self._opening])
            await self._close(timeout_s)
        except Exception:
            self._log.exception("closing the tier failed")
        finally:
            self._closed.set()
            asyncio.get_running_loop().stop()


def run_until(
    event_loop: asyncio.AbstractEventLoop, ends: Callable[[], bool], log: TierLog
) -> None:
    """Run the loop until ``ends`` returns true, even if a tier stops the loop early."""
    while not ends():
        try:
            event_loop.run_forever()
        except SystemExit:
            # A task of the tier raised SystemExit. Keep the loop running for the other tasks.
            log.exception("a task raised SystemExit, and was ended by it")


def end_event_loop(event_loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    # Cancel the tier's leftover tasks, so that asyncio does not report them as destroyed.
    for task in asyncio.all_tasks(event_loop):
        task.cancel()
    event_loop.run_until_complete(clock.sleep(0))
    close_blocking_threads(event_loop)
    event_loop.close()
