"""A tier's loop in a thread of the engine's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierTimeoutError
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
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import LoopThread, close_tier
from kvtier_sdk.runner.opening import not_in_time

T = TypeVar("T")

_SILENCE: Any = object()


class ThreadRunner:
    """Runs a tier on an event loop in a daemon thread.

    The engine's thread submits and polls without a lock. A deque is safe with one thread at each
    end, and so is a flag that the writer sets after it appends and the reader clears before it
    looks: the reader then finds everything that was appended while the flag was set. So a burst of
    jobs wakes the loop once, and a burst of reports notifies the engine once.
    """

    def __init__(
        self,
        name: str,
        make_loop: Callable[[Callable[[Report], None]], TierLoop],
        clock: Clock,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._notify = notify
        self._log = TierLog(name, clock)
        self._inbox: deque[Sequence[Job]] = deque()
        self._reports: deque[Report] = deque()
        # True while the loop is due to read the inbox, or the engine to be notified.
        self._waking = False
        self._notifying = False
        self._closing = False
        # True while the tier is opening and the engine does not wait for it, or no longer does.
        self._opens_late = False
        self._tier_loop = make_loop(self._take_report)
        self._thread = LoopThread(name, clock, self._log, self._ended)

    def begin(self) -> None:
        """Start the thread, and begin to open the tier in it."""
        self._thread.start(self._tier_loop.open)

    def start(self) -> bool:
        """Begin if needed; if the engine waits, wait for the opening or its deadline.

        Returns true if the tier is open. An error closes the runner.

        Raises:
            ConfigError: a setting cannot work.
            TierError: the store refuses the credentials, or cannot be reached and the tier is
                required.
        """
        options = self._tier_loop.options
        self.begin()
        if not self._tier_loop.spec.engine_waits:
            self._await_late_opening()
            return False
        try:
            is_open = self._thread.wait_opened(options.open_deadline_s)
            if is_open is None and options.required:
                raise not_in_time(self._name, options.open_deadline_s)
        except BaseException:
            self.close(timeout_s=5.0)
            raise
        if is_open is None:
            self._await_late_opening()
        return bool(is_open)

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Hand over jobs in one hop; before ``start`` and after ``close`` they are cancelled."""
        if not self._thread.is_running:
            return [uniform_result(job, Verdict.CANCELLED) for job in jobs]
        # If the loop ends right now, RunnerStopped concludes the jobs left in the inbox.
        self._inbox.append(jobs)
        if not self._waking:
            self._waking = True
            self._thread.call_soon(self._take_jobs)
        return ()

    def poll(self) -> Sequence[Report]:
        if self._opens_late and not self._closing and self._thread.opened.done():
            self._opens_late = False
            self._take_late_opening()
        if not self._reports:
            return ()
        taken = []
        while self._reports:
            taken.append(self._reports.popleft())
        return taken

    def peek(self) -> Sequence[Report]:
        return self._reports.copy()

    def ask(self, question: Callable[[TierCaller], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Call the tier outside of any job and wait for the answer; for tools, not engines.

        Raises:
            TierError: the tier raised it, or did not answer in time.
        """
        answer = self._thread.call(question(self._tier_loop.call), timeout_s, _SILENCE)
        if answer is _SILENCE:
            raise TierTimeoutError(f"{self._name}: no answer within {timeout_s:g} s")
        return cast(T, answer)

    def suspect(self) -> None:
        """Do nothing: a thread cannot be ended. The job's slots stay in quarantine."""

    def log_end(self, topic: str, message: str) -> bool:
        self._thread.call_soon(self._tier_loop.log_end, topic, message)
        return self._thread.is_running

    def drain(self, timeout_s: float) -> bool:
        default = not self._thread.is_running
        return self._thread.call(self._tier_loop.drain(timeout_s), 2 * timeout_s + 1.0, default)

    def close(self, timeout_s: float) -> None:
        """Drain, close the tier and end the thread. A second call does nothing.

        A tier that does not return from ``close`` in time keeps its daemon thread; the interpreter
        can still exit.
        """
        # Set first: after an interrupt the caller may call again while the first call still drains.
        if self._closing:
            return
        self._closing = True
        if self._thread.is_open and self._thread.is_running:
            self.drain(timeout_s)
        if not self._thread.close(self._close, timeout_s, join_s=timeout_s):
            self._log.warning(
                "the tier did not close within %g s; its thread is left behind", timeout_s
            )

    async def _close(self) -> None:
        await close_tier(self._tier_loop.close, self._log)

    def _ended(self) -> None:
        """Report that the runner stopped; hanging calls may still run in other threads."""
        self._tier_loop.abandon()
        self._reports.append(RunnerStopped(Verdict.CANCELLED, io_ended=False))
        self._notify_engine()

    def _await_late_opening(self) -> None:
        self._opens_late = True
        self._thread.opened.add_done_callback(lambda _: self._notify_engine())

    def _take_late_opening(self) -> None:
        error = self._thread.opened.exception()
        if error is not None:
            self._log.error("the tier stays off: %s", error)
            self._reports.append(OpeningEnded(str(error)))
        elif self._thread.opened.result():
            self._reports.append(OpeningEnded())

    def _take_jobs(self) -> None:
        self._waking = False
        while self._inbox:
            self._tier_loop.submit(self._inbox.popleft())

    def _take_report(self, report: Report) -> None:
        """Queue a report, in the tier's thread or, for removed chunks, in any thread."""
        self._reports.append(report)
        if self._notify is not None and not self._notifying:
            self._notifying = True
            self._thread.call_soon(self._notify_engine)

    def _notify_engine(self) -> None:
        self._notifying = False
        if self._notify is None:
            return
        try:
            self._notify()
        except Exception:
            self._log.exception("notifying the engine failed")
