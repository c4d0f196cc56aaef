"""A tier's health: its circuit breakers, and the probes that close them again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierError
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.options.units import format_seconds
from kvtier_sdk.runner.breaker import Breaker, Direction, Outcome, outcome_of
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import BreakerMoved
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.types import OffloadKey

#: After this long a cancelled call is assumed never to end; most clients stop waiting for a server
#: sooner. Measured as the sum of the pauses between probes, so that a suspension of the machine
#: does not count.
_HANG_S = 60.0

_NO_ROOM = "calls that hang leave no room for another"


class TierHealth:
    """Admits calls of a tier, or refuses them and probes in the background until it recovers.

    A tier that has broken the contract is in quarantine: no call reaches it, each fails with the
    reason, and it is not probed.
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
        is_blocked: Callable[[Direction, float], bool],
        give_up: Callable[[], None] | None,
        log: TierLog,
    ) -> None:
        self._call = call
        self._clock = clock
        self._report = report
        self._try_out = try_out
        self._is_blocked = is_blocked
        self._give_up = give_up
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
        # A probe may take as long as the pause before it, but no longer than a request: a short
        # limit finds a quick recovery, a long one gives a slow tier its chance.
        self._timeout_s = {
            Direction.READ: options.load_deadline_s,
            Direction.WRITE: options.store_deadline_s,
        }
        self._probers: set[asyncio.Task[None]] = set()
        # The last probe in each direction, and how long hanging calls have prevented further ones.
        self._attempts: dict[Direction, asyncio.Task[bool]] = {}
        self._hindered_s = dict.fromkeys(Direction, 0.0)

    def admits(self, direction: Direction) -> bool:
        """Return true if calls are made; in quarantine each fails with the reason."""
        return self._breakers[direction].is_closed or self._is_over

    def note(
        self,
        direction: Direction,
        errors: Sequence[TierError | None],
        objects: Sequence[OffloadKey] = (),
    ) -> bool:
        """Record a call's outcome; return true if it opened the breaker."""
        reason = next((str(error) for error in errors if error is not None), "")
        return self._note(direction, outcome_of(direction, errors), reason, objects)

    def note_overdue(self, direction: Direction, outcome: Outcome) -> bool:
        """Record a call that missed its deadline; return true if it opened the breaker."""
        return self._note(direction, outcome, "no answer by the deadline")

    def note_blocked(self, direction: Direction) -> bool:
        """Record that hanging calls block new ones; return true if it opened the breaker."""
        return self._note(direction, Outcome.BLOCKED, _NO_ROOM)

    async def stop(self, timeout_s: float) -> None:
        """Stop probing, and wait for running probes."""
        for prober in self._probers:
            prober.cancel()
        tasks = [*self._probers, *self._attempts.values()]
        if tasks:
            try:
                async with self._clock.timeout(timeout_s):
                    await asyncio.wait(tasks)
            except TimeoutError:
                self._log.warning("a probe did not end within %g s", timeout_s)

    @property
    def _is_over(self) -> bool:
        return self._call.quarantine is not None

    def _note(
        self,
        direction: Direction,
        outcome: Outcome,
        reason: str,
        objects: Sequence[OffloadKey] = (),
    ) -> bool:
        breaker = self._breakers[direction]
        if self._is_over or not breaker.note(outcome, self._clock.now_s(), objects):
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
        refused_s = self._clock.now_s()
        while not breaker.is_closed:
            await self._clock.sleep(breaker.wait_s(self._clock.now_s()))
            if self._is_over:
                return
            breaker.begin_probe()
            self._tell(direction)
            breaker.end_probe(await self._succeeds(direction), self._clock.now_s())
            self._tell(direction)
        self._log.often(
            logging.WARNING,
            f"{direction.value} recovery",
            f"{self._log.tier}: {direction.value}s are taken again, after "
            f"{format_seconds(self._clock.now_s() - refused_s)}",
            ends_outage=True,
        )

    async def _succeeds(self, direction: Direction) -> bool:
        """Make a probe, unless hanging calls prevent it; return true if it succeeded."""
        hindrance = self._hindrance(direction)
        if hindrance is not None:
            self._note_hindered(direction, hindrance)
            return False
        self._hindered_s[direction] = 0.0
        attempt = self._clock.spawn(self._attempt(direction), name=f"{direction.value} probe")
        self._attempts[direction] = attempt
        timeout_s = min(self._breakers[direction].pause_s, self._timeout_s[direction])
        try:
            return await self._within(attempt, timeout_s)
        finally:
            # For the breaker a hanging probe has failed, but the next one waits for its end.
            attempt.cancel()

    def _hindrance(self, direction: Direction) -> str | None:
        """Return why no probe is made, or ``None``. A probe needs no room itself; requests do."""
        before = self._attempts.get(direction)
        if before is not None and not before.done():
            return "a probe hangs"
        return _NO_ROOM if self._is_blocked(direction, self._clock.now_s()) else None

    def _note_hindered(self, direction: Direction, hindrance: str) -> None:
        if self._hindered_s[direction] >= _HANG_S:
            return
        self._hindered_s[direction] += self._breakers[direction].pause_s
        if self._hindered_s[direction] < _HANG_S:
            return
        self._log.warning(
            "%ss stay refused: %s, and nothing but the end of the process ends them",
            direction.value,
            hindrance,
        )
        if self._give_up is not None:
            self._give_up()

    async def _attempt(self, direction: Direction) -> bool:
        try:
            await self._try_out(direction)
        except (TierError, TimeoutError) as error:
            self._log.debug("%s probe: %s", direction.value, error or "too slow")
            return False
        return True

    async def _within(self, attempt: asyncio.Task[bool], timeout_s: float) -> bool:
        """Return true if an attempt succeeds in time; leave a late one running."""
        try:
            async with self._clock.timeout(timeout_s):
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
