from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import end_event_loop


class InlineRunner:
    """A runner on the caller's thread, whose loop runs only in calls such as :meth:`run_for`."""

    def __init__(
        self, make_loop: Callable[[Callable[[Report], None]], TierLoop], clock: Clock
    ) -> None:
        self._clock = clock
        self._reports: list[Report] = []
        self._event_loop = clock.new_event_loop()
        self._tier_loop = make_loop(self._reports.append)

    def start(self) -> bool:
        """Open the tier; return false if the first attempt failed."""
        return self._event_loop.run_until_complete(self._tier_loop.open())

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        self._event_loop.call_soon(self._tier_loop.submit, jobs)
        return ()

    def poll(self) -> Sequence[Report]:
        taken, self._reports[:] = list(self._reports), []
        return taken

    def peek(self) -> Sequence[Report]:
        """Return the reports that the next :meth:`poll` will return."""
        return list(self._reports)

    def suspect(self) -> None:
        """Do nothing, because a tier that blocks its loop also blocks the caller of this method."""

    def options_changed(self) -> None:
        self._tier_loop.options_changed()

    def log_end(self, topic: str, message: str) -> bool:
        if self._event_loop.is_closed():
            return False
        self._event_loop.call_soon(self._tier_loop.log_end, topic, message)
        return True

    def run_for(self, duration_s: float) -> None:
        """Run the tier's loop for ``duration_s`` seconds; 0 runs only the ready callbacks."""
        self._event_loop.run_until_complete(self._clock.sleep(duration_s))

    def drain(self, timeout_s: float) -> bool:
        return self._event_loop.run_until_complete(self._tier_loop.drain(timeout_s))

    def close(self, timeout_s: float) -> None:
        self.drain(timeout_s)
        self._event_loop.run_until_complete(self._tier_loop.close())
        end_event_loop(self._event_loop, self._clock)
