"""A tier's loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvtier_sdk.blocking import close_blocking_threads
from kvtier_sdk.clock import Clock
from kvtier_sdk.jobs import Job, Report
from kvtier_sdk.runner.tier_loop import TierLoop

T = TypeVar("T")


class ThreadRunner:
    """Runs a tier on an event loop in a daemon thread.

    The engine's thread hands over and polls without a lock: deques are safe for one end each,
    and the loop is woken once a submit.

    Args:
        name: the tier's, for the thread's name.
        make_loop: builds the tier's loop around the function that takes its reports.
        clock: makes the event loop.
        notify: called on the tier's thread whenever there is something to poll; must not block.
    """

    def __init__(
        self,
        name: str,
        make_loop: Callable[[Callable[[Report], None]], TierLoop],
        clock: Clock,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._notify = notify
        self._inbox: deque[Sequence[Job]] = deque()
        self._reports: deque[Report] = deque()
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
        assert self._event_loop is not None
        self._inbox.append(jobs)
        self._event_loop.call_soon_threadsafe(self._take_jobs)

    def poll(self) -> Sequence[Report]:
        if not self._reports:
            return ()
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._reports.popleft())
        return taken

    def drain(self, timeout_s: float) -> bool:
        return self._call(self._tier_loop.drain(timeout_s), 2 * timeout_s + 1.0, default=False)

    def close(self, timeout_s: float) -> None:
        """Drain, close the tier and end the thread.

        A tier that does not return from ``close`` in time keeps its daemon thread; the
        interpreter can exit all the same.

        Args:
            timeout_s: for each of draining and closing.
        """
        if self._event_loop is None or self._thread is None:
            return
        if self._opened.done() and self._opened.exception() is None:
            self.drain(timeout_s)
        if not self._call(self._closed(), timeout_s, default=False):
            logging.getLogger(f"kvtier.tier.{self._name}").warning(
                "the tier did not close within %g s; its thread is left behind", timeout_s
            )
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join(timeout_s)
        self._event_loop = None

    async def _closed(self) -> bool:
        try:
            await self._tier_loop.close()
        except Exception:
            logging.getLogger(f"kvtier.tier.{self._name}").exception("closing the tier failed")
        return True

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, *, default: T) -> T:
        assert self._event_loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            return default

    def _run(self, event_loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(event_loop)
        event_loop.call_soon(self._start_opening)
        try:
            event_loop.run_forever()
        finally:
            close_blocking_threads(event_loop)
            event_loop.close()

    def _start_opening(self) -> None:
        # Kept, since a loop holds its tasks weakly.
        self._opening = self._clock.spawn(self._open(), name=f"open {self._name}")

    async def _open(self) -> None:
        try:
            await self._tier_loop.open()
        except BaseException as error:
            self._opened.set_exception(error)
        else:
            self._opened.set_result(None)

    def _take_jobs(self) -> None:
        while self._inbox:
            self._tier_loop.submit(self._inbox.popleft())

    def _take_report(self, report: Report) -> None:
        self._reports.append(report)
        if self._notify is not None:
            self._notify()
