"""A runner without a thread, whose loop runs only when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import end_event_loop


class InlineRunner:
    """A runner on the caller's thread, whose loop runs only in calls such as :meth:`run_for`.

    Args:
        make_loop: makes the tier's loop from one argument, a function that receives the reports.
        clock: makes the event loop. A virtual clock makes the test deterministic.
    """

    def __init__(
        self, make_loop: Callable[[Callable[[Report], None]], TierLoop], clock: Clock
    ) -> None:
        self._clock = clock
        self._reports: list[Report] = []
        self._event_loop = clock.new_event_loop()
        self._tier_loop = make_loop(self._reports.append)

    def start(self) -> bool:
        """Open the tier; return false if the first attempt failed. The loop then tries again."""
        return self._event_loop.run_until_complete(self._tier_loop.open())

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Queue ``jobs`` for the next run of the loop. :meth:`poll` returns the results later."""
        self._event_loop.call_soon(self._tier_loop.submit, jobs)
        return ()

    def poll(self) -> Sequence[Report]:
        """Return the reports since the last poll."""
        taken, self._reports[:] = list(self._reports), []
        return taken

    def peek(self) -> Sequence[Report]:
        """Return the reports since the last poll, and keep them for the next :meth:`poll`."""
        return list(self._reports)

    def suspect(self) -> None:
        """Do nothing: a tier that blocks its loop also blocks the thread that would call this."""

    def options_changed(self) -> None:
        """Notify the loop of changed live options."""
        self._tier_loop.options_changed()

    def log_end(self, topic: str, message: str) -> bool:
        """Log ``message`` under ``topic`` when the loop runs; return false after :meth:`close`."""
        if self._event_loop.is_closed():
            return False
        self._event_loop.call_soon(self._tier_loop.log_end, topic, message)
        return True

    def run_for(self, duration_s: float) -> None:
        """Run the tier's loop for ``duration_s`` seconds; 0 runs only the ready callbacks."""
        self._event_loop.run_until_complete(self._clock.sleep(duration_s))

    def drain(self, timeout_s: float) -> bool:
        """Cancel queued jobs; return true if the running jobs ended within ``timeout_s``."""
        return self._event_loop.run_until_complete(self._tier_loop.drain(timeout_s))

    def close(self, timeout_s: float) -> None:
        """Drain the tier within ``timeout_s``, and close the tier and the event loop."""
        self.drain(timeout_s)
        self._event_loop.run_until_complete(self._tier_loop.close())
        end_event_loop(self._event_loop, self._clock)
