"""A tier's loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvtier_sdk.aio.blocking import close_blocking_threads
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierContractError, TierError
from kvtier_sdk.runner.base import JobLoop
from kvtier_sdk.runner.jobs import Job, JobResult, Report, Verdict
from kvtier_sdk.runner.log import TierLog

T = TypeVar("T")


class ThreadRunner:
    """Runs a tier on an event loop in a daemon thread.

    The engine's thread hands over and polls without a lock. Deques are safe for one end each, and
    so is a flag that one side sets after it has appended and the other clears before it looks:
    whatever is appended while the flag is up is found by the look that follows. Thus a burst of
    jobs wakes the loop once, and a burst of reports the engine.

    Args:
        name: the tier's, for the thread's name.
        make_loop: builds the tier's loop around the function that takes its reports.
        clock: makes the event loop.
        notify: called on the tier's thread when there is something to poll, once for all that was
            reported meanwhile; must not block.
    """

    #: What closing may take beyond its timeout.
    _parting_s = 0.0

    def __init__(
        self,
        name: str,
        make_loop: Callable[[Callable[[Report], None]], JobLoop],
        clock: Clock,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._notify = notify
        self._log = TierLog(name, clock)
        self._inbox: deque[Sequence[Job]] = deque()
        self._reports: deque[Report] = deque()
        # Whether the loop is about to look into the inbox, the engine about to be notified.
        self._waking = False
        self._notifying = False
        # Whether the loop will look into the inbox no more, or does not yet.
        self._over = True
        self._closing = False
        self._stopped = False
        self._tier_loop = make_loop(self._take_report)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self) -> None:
        """Start the thread and open the tier in it.

        Raises:
            ConfigError: a setting cannot work; nothing runs any more.
            TierError: the store cannot be reached; nothing runs any more.
        """
        self._event_loop = self._clock.new_event_loop()
        self._over = False
        self._thread = threading.Thread(
            target=self._run, args=(self._event_loop,), name=f"kvtier-{self._name}", daemon=True
        )
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.close(timeout_s=5.0)
            raise

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over jobs, all in one hop; before ``start`` and after ``close`` they are cancelled.

        Args:
            jobs: each ends in exactly one result.
        """
        self._inbox.append(jobs)
        if self._over:
            self._refuse_inbox()
        elif not self._waking:
            self._waking = True
            # A loop that closes right now leaves the inbox to its thread, which empties it last.
            self._call_soon(self._take_jobs)

    def poll(self) -> Sequence[Report]:
        if not self._reports:
            return ()
        taken = []
        while self._reports:
            taken.append(self._reports.popleft())
        return taken

    def drain(self, timeout_s: float) -> bool:
        return self._call(self._tier_loop.drain(timeout_s), 2 * timeout_s + 1.0, default=self._over)

    def close(self, timeout_s: float) -> None:
        """Drain, close the tier and end the thread. A second call does nothing.

        A tier that does not return from ``close`` in time keeps its daemon thread; the
        interpreter can exit all the same.

        Args:
            timeout_s: for each of draining and closing.
        """
        if self._event_loop is None or self._thread is None or self._closing:
            return
        self._closing = True
        if self._opened.done() and self._opened.exception() is None:
            self.drain(timeout_s)
        if not self._call(self._closed(), timeout_s + self._parting_s, default=self._over):
            self._log.warning(
                "the tier did not close within %g s; its thread is left behind", timeout_s
            )
        self._call_soon(self._stop)
        self._thread.join(timeout_s)
        # Also for a thread that is left behind.
        self._over = True
        self._refuse_inbox()

    async def _closed(self) -> bool:
        try:
            # One that does not open in time must not go on while it is closed.
            self._opening.cancel()
            await asyncio.wait([self._opening])
            await self._tier_loop.close()
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):  # not the tier's
            raise
        except BaseException:
            self._log.exception("closing the tier failed")
        return True

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, *, default: T) -> T:
        if self._event_loop is None:
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

    def _call_soon(self, callback: Callable[[], object]) -> None:
        """Run a callback on the tier's thread, unless its loop has been closed."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return

    def _run(self, event_loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(event_loop)
        event_loop.call_soon(self._start_opening)
        try:
            while not self._stopped:
                try:
                    event_loop.run_forever()
                except SystemExit:
                    # Raised in a task of the tier's own. It would end the thread, not the process.
                    self._log.exception("a task raised SystemExit, and was ended by it")
        except BaseException:
            self._log.exception("the tier's loop has ended; nothing more is asked of the tier")
        finally:
            self._tier_loop.abandon()
            end_event_loop(event_loop, self._clock)
            self._over = True
            self._refuse_inbox()
            if not self._opened.done():
                self._opened.set_exception(TierError("its loop ended while it was opened"))
            self._notify_engine()

    def _stop(self) -> None:
        self._stopped = True
        asyncio.get_running_loop().stop()

    def _start_opening(self) -> None:
        # Kept, since a loop holds its tasks weakly.
        self._opening = self._clock.spawn(self._open(), name=f"open {self._name}")

    async def _open(self) -> None:
        try:
            await self._tier_loop.open()
        except Exception as error:
            self._opened.set_exception(error)
        except BaseException as error:
            # A SystemExit or CancelledError is the tier's, and would end the engine.
            told = TierContractError(f"raised {error!r}")
            told.tier, told.operation = self._name, "open"
            told.__cause__ = error
            self._opened.set_exception(told)
        else:
            self._opened.set_result(None)

    def _take_jobs(self) -> None:
        self._waking = False
        while self._inbox:
            self._tier_loop.submit(self._inbox.popleft())

    def _refuse_inbox(self) -> None:
        """Conclude what the loop will not take. On both threads at once, each takes its share."""
        with contextlib.suppress(IndexError):
            while True:
                for job in self._inbox.popleft():
                    self._reports.append(JobResult(job.job_id, [Verdict.CANCELLED] * len(job.keys)))

    def _take_report(self, report: Report) -> None:
        """On the tier's thread or, for removed chunks, any other."""
        self._reports.append(report)
        if self._notify is not None and not self._notifying:
            self._notifying = True
            self._call_soon(self._notify_engine)

    def _notify_engine(self) -> None:
        self._notifying = False
        if self._notify is None:
            return
        try:
            self._notify()
        except Exception:
            self._log.exception("notifying the engine failed")


def end_event_loop(event_loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """Close a loop that has stopped, and what belongs to it.

    What a tier left behind would be destroyed pending: it is cancelled first, and runs until its
    next wait.

    Args:
        event_loop: the loop.
        clock: that made it.
    """
    for task in asyncio.all_tasks(event_loop):
        task.cancel()
    event_loop.run_until_complete(clock.sleep(0))
    close_blocking_threads(event_loop)
    event_loop.close()
