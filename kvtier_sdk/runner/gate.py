"""The gate in front of a tier: its circuit breakers, and the probes that close them again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from kvtier_sdk.breaker import Breaker, Direction, Outcome, outcome_of
from kvtier_sdk.clock import Clock, wait_out
from kvtier_sdk.config import RunnerOptions
from kvtier_sdk.errors import TierError
from kvtier_sdk.jobs import BreakerMoved
from kvtier_sdk.runner.tier_caller import TierCaller
from kvtier_sdk.runner.tier_log import TierLog


class TierGate:
    """Says whether a tier is asked, and finds out in the background when it can be asked again.

    A tier that has broken the contract is past this: no call reaches it any more, each fails with
    the reason, and nothing is probed.

    Args:
        call: the tier.
        options: the tier's.
        clock: time and tasks.
        rng: jitters the probes.
        report: told of each change of a breaker.
        try_out: makes a tier do what requests ask of it in one direction, and raises where it
            does not.
        log: the tier's.
    """

    def __init__(
        self,
        call: TierCaller,
        options: RunnerOptions,
        *,
        clock: Clock,
        rng: random.Random,
        report: Callable[[BreakerMoved], None],
        try_out: Callable[[Direction], Awaitable[None]],
        log: TierLog,
    ) -> None:
        self._call = call
        self._clock = clock
        self._report = report
        self._try_out = try_out
        self._log = log
        self._breakers = {
            direction: Breaker(
                failures=options.breaker_failures,
                window=options.breaker_window,
                probe_interval_s=options.probe_interval_s,
                max_probe_interval_s=options.max_probe_interval_s,
                rng=rng,
            )
            for direction in Direction
        }
        # A probe has as long as the pause before it, but no longer than a request would have: a
        # short one finds a quick recovery, a long one gives a slow tier its chance.
        self._patience_s = {
            Direction.READ: options.load_deadline_s,
            Direction.WRITE: options.store_deadline_s,
        }
        self._probers: set[asyncio.Task[None]] = set()

    def admits(self, direction: Direction) -> bool:
        """Whether calls are made."""
        return self._breakers[direction].is_closed or self._is_over

    def note(self, direction: Direction, errors: Sequence[TierError | None]) -> bool:
        """Take what a call returned.

        Args:
            direction: of the call.
            errors: a verdict a chunk; one for a call that failed as a whole.

        Returns:
            Whether the tier is not asked any more because of it.
        """
        reason = next((str(error) for error in errors if error is not None), "")
        return self._note(direction, outcome_of(direction, errors), reason)

    def note_overdue(self, direction: Direction, outcome: Outcome) -> bool:
        """Take a call that was not done by its deadline.

        Args:
            direction: of the call.
            outcome: how grave that is.

        Returns:
            As :meth:`note`.
        """
        return self._note(direction, outcome, "no answer by the deadline")

    def note_blocked(self, direction: Direction) -> bool:
        """Take it that calls which hang leave no room for another.

        Args:
            direction: of the calls that cannot be made.

        Returns:
            As :meth:`note`.
        """
        return self._note(direction, Outcome.BLOCKED, "calls that hang leave no room for another")

    async def stop(self, patience_s: float) -> None:
        """Probe no more, and wait for what runs.

        Args:
            patience_s: for how long.
        """
        for prober in self._probers:
            prober.cancel()
        if self._probers:
            try:
                async with self._clock.timeout(patience_s):
                    await asyncio.wait(self._probers)
            except TimeoutError:
                self._log.warning("a probe did not end within %g s", patience_s)

    @property
    def _is_over(self) -> bool:
        return self._call.quarantine is not None

    def _note(self, direction: Direction, outcome: Outcome, reason: str) -> bool:
        breaker = self._breakers[direction]
        if self._is_over or not breaker.note(outcome, self._clock.now_s()):
            return False
        self._log.often(
            logging.WARNING,
            f"{direction.value} breaker",
            f"{self._log.tier}: {direction.value}s are refused until a probe succeeds; "
            f"the last failure: {reason}",
        )
        self._tell(direction)
        prober = self._clock.spawn(self._probe(direction), name=f"{direction.value} prober")
        self._probers.add(prober)
        prober.add_done_callback(self._ended)
        return True

    def _ended(self, prober: asyncio.Task[None]) -> None:
        self._probers.discard(prober)
        if not prober.cancelled() and (error := prober.exception()) is not None:
            self._log.error("probing failed inside the SDK", exc_info=error)

    async def _probe(self, direction: Direction) -> None:
        """Probe until the breaker is closed, or the tier has broken the contract."""
        breaker = self._breakers[direction]
        while not breaker.is_closed:
            await self._clock.sleep(breaker.wait_s(self._clock.now_s()))
            if self._is_over:
                return
            breaker.begin_probe()
            self._tell(direction)
            attempt = self._clock.spawn(self._attempt(direction), name=f"{direction.value} probe")
            try:
                succeeded = await self._within(
                    attempt, min(breaker.pause_s, self._patience_s[direction])
                )
                breaker.end_probe(succeeded, self._clock.now_s())
                self._tell(direction)
            finally:
                # One that hangs is over for the breaker; the next begins when it has ended.
                attempt.cancel()
                await wait_out([attempt])
        self._log.info("%ss are taken again", direction.value)

    async def _attempt(self, direction: Direction) -> bool:
        try:
            await self._try_out(direction)
        except (TierError, TimeoutError) as error:
            self._log.debug("%s probe: %s", direction.value, error or "too slow")
            return False
        return True

    async def _within(self, attempt: asyncio.Task[bool], patience_s: float) -> bool:
        """Whether an attempt succeeds in time. It is left running where it does not."""
        try:
            async with self._clock.timeout(patience_s):
                await asyncio.wait([attempt])
        except TimeoutError:
            return False
        if attempt.cancelled():
            return False
        error = attempt.exception()
        if error is not None:
            self._log.error("a probe failed inside the SDK", exc_info=error)
            return False
        return attempt.result()

    def _tell(self, direction: Direction) -> None:
        self._report(BreakerMoved(direction, self._breakers[direction].state))
