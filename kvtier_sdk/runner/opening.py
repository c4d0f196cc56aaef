"""Opens a tier within a deadline; further attempts run in the background."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvtier_sdk.aio.clock import Clock, wait_within
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierTimeoutError, TierUnavailableError
from kvtier_sdk.options.units import format_seconds
from kvtier_sdk.runner.breaker import Backoff
from kvtier_sdk.runner.jobs import OpeningEnded
from kvtier_sdk.runner.log import TierLog


@dataclass(eq=False)
class TierOpening:
    """Opens a tier; retries in the background if the first attempt fails.

    An attempt that exceeds ``open_deadline`` is cancelled, and must end before the next attempt. If
    it ignores the cancellation and succeeds late, the tier is open.
    """

    _open_tier: Callable[[], Awaitable[None]]
    _spec: TierSpec
    _clock: Clock
    _rng: random.Random
    _report: Callable[[OpeningEnded], None]
    _log: TierLog
    is_open: bool = False
    _attempt: asyncio.Task[Exception | None] | None = None
    _retrying: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._options = options = self._spec.runner
        self._backoff = Backoff(options.probe_interval_s, options.max_probe_interval_s, self._rng)

    async def begin(self) -> bool:
        """Make the first attempt; return true if the tier is open."""
        # Raise any error of a required tier. Raise a permanent error of an optional tier only while
        # the engine still waits (until ``end_s``). After all other errors, retry in the background.
        end_s = self._clock.now_s() + self._options.open_deadline_s
        error = await self._try()
        if error is None:
            return True
        engine_waits = self._spec.engine_waits and self._clock.now_s() <= end_s
        if self._options.required or (engine_waits and not may_pass(error)):
            raise error
        self._note(error)
        self._retrying = self._clock.spawn(self._retry(), name=f"open {self._log.tier} again")
        return False

    async def stop(self) -> None:
        tasks = [task for task in (self._retrying, self._attempt) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _retry(self) -> None:
        began_s = self._clock.now_s()
        while True:
            await self._clock.sleep(self._backoff.next_s())
            error = await self._try()
            if error is None:
                break
            self._note(error)
        closed_for = format_seconds(self._clock.now_s() - began_s)
        self._log.warning("the tier is open now, %s after it could not be opened", closed_for)
        self._report(OpeningEnded())

    async def _try(self) -> Exception | None:
        """Wait for the running attempt, or make a new one; return its error, if any."""
        attempt = self._attempt
        if attempt is None or (attempt.done() and not self.is_open):
            attempt = self._clock.spawn(self._call(), name=f"open {self._log.tier}")
            self._attempt = attempt
        deadline_s = self._options.open_deadline_s
        in_time = await wait_within(self._clock, deadline_s, [attempt])
        # An attempt that blocked the loop until after the deadline may have ended meanwhile.
        if not in_time and not attempt.done():
            attempt.cancel()
        if not attempt.done() or attempt.cancelled():
            return not_in_time(self._log.tier, deadline_s)
        return attempt.result()

    async def _call(self) -> Exception | None:
        try:
            await self._open_tier()
        except Exception as error:
            return error
        self.is_open = True
        return None

    def _note(self, error: Exception) -> None:
        self._log.often(logging.WARNING, "open", f"{error}; the engine goes on, and tries again")
        self._report(OpeningEnded(str(error)))


def may_pass(error: Exception) -> bool:
    """Return true for an outage or a timeout, because a later attempt may succeed."""
    return isinstance(error, TierUnavailableError | TierTimeoutError)


def not_in_time(tier: str, deadline_s: float) -> TierTimeoutError:
    text = f"it did not open within {deadline_s:g} s ('open_deadline')"
    return TierTimeoutError(text).labelled(tier, "open")
