"""Runs a tier in a thread of the engine's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierTimeoutError
from kvtier_sdk.events import Announce
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.pool import PoolMemory
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import (
    Job,
    JobResult,
    OpeningEnded,
    Report,
    RunnerStopped,
    Verdict,
    uniform_result,
)
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import TierRunner
from kvtier_sdk.runner.opening import not_in_time

T = TypeVar("T")

_SILENCE: Any = object()


class ThreadRunner(TierRunner):
    """Runs a tier on an event loop in a daemon thread.

    The engine's thread submits and polls without a lock, because a deque's methods are thread-safe.
    Each deque has a flag, so a burst of jobs wakes the loop once, and a burst of reports notifies
    the engine once. The writer appends before it checks the flag, and the reader clears the flag
    before it empties the deque, so the reader misses no entry.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        namespace: Namespace,
        pool: PoolMemory,
        clock: Clock,
        notify: Callable[[], None] | None = None,
        announce: Announce | None = None,
        maintenance: bool = False,
    ) -> None:
        super().__init__(spec, clock, notify)
        self._inbox: deque[Sequence[Job]] = deque()
        self._reports: deque[Report] = deque()
        # True while a wake-up of the loop or a notification of the engine is scheduled.
        self._waking = False
        self._notifying = False
        self._tier_loop = TierLoop(
            spec,
            namespace=namespace,
            memory=pool,
            clock=clock,
            report=self._take_report,
            announce=announce,
            maintenance=maintenance,
        )

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        if not self.is_running:
            return [uniform_result(job, Verdict.CANCELLED) for job in jobs]
        # If the loop ends at this moment, RunnerStopped concludes the jobs left in the inbox.
        self._inbox.append(jobs)
        if not self._waking:
            self._waking = True
            self._call_soon(self._take_jobs)
        return ()

    def poll(self) -> Sequence[Report]:
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def peek(self) -> Sequence[Report]:
        return self._reports.copy()

    def ask(self, question: Callable[[TierCaller], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Call the tier without a job; return the answer, or raise TierTimeoutError."""
        answer = self._call(question(self._tier_loop.call), timeout_s, _SILENCE)
        if answer is _SILENCE:
            raise TierTimeoutError(f"{self._spec.name}: no answer within {timeout_s:g} s")
        return cast(T, answer)

    def options_changed(self) -> None:
        self._call_soon(self._tier_loop.options_changed)

    def log_end(self, topic: str, message: str) -> bool:
        self._call_soon(self._tier_loop.log_end, topic, message)
        return self.is_running

    def _await_opening(self) -> bool:
        options = self._spec.runner
        is_open = None
        if self._spec.engine_waits:
            is_open = self._wait_opened(options.open_deadline_s)
            if is_open is None and options.required:
                raise not_in_time(self._spec.name, options.open_deadline_s)
        if is_open is None:
            self._opened.add_done_callback(self._report_late_opening)
        return bool(is_open)

    # --- in the tier's thread -------------------------------------------------------------------

    async def _open(self) -> bool:
        return await self._tier_loop.open()

    async def _drain(self, timeout_s: float) -> bool:
        return await self._tier_loop.drain(timeout_s)

    async def _close(self, timeout_s: float) -> None:
        await self._tier_loop.close()

    def _ended(self) -> None:
        """Report the loop's end. Hanging calls may still run, so ``io_ended`` is false."""
        self._tier_loop.abandon()
        self._reports.append(RunnerStopped(Verdict.CANCELLED, io_ended=False))
        self._notify_engine()

    def _report_late_opening(self, opened: Future[bool]) -> None:
        if self._closing:
            return
        error = opened.exception()
        if error is not None:
            self._log.error("the tier stays off: %s", error)
            self._take_report(OpeningEnded(str(error)))
        elif opened.result():
            self._take_report(OpeningEnded())

    def _take_jobs(self) -> None:
        self._waking = False
        while self._inbox:
            self._tier_loop.submit(self._inbox.popleft())

    def _take_report(self, report: Report) -> None:
        """Queue a report for the engine. Any thread may call this."""
        self._reports.append(report)
        if self._notify is not None and not self._notifying:
            self._notifying = True
            self._call_soon(self._notify_of_reports)

    def _notify_of_reports(self) -> None:
        self._notifying = False
        self._notify_engine()
