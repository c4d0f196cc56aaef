"""Tracks a tier's health, for reads or for writes, with a circuit breaker and probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier_sdk.aio.clock import wait_within
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.errors import TierError
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.options.units import format_seconds
from kvtier_sdk.runner.breaker import Breaker, Direction, Outcome, outcome_of
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import BreakerMoved, Operation
from kvtier_sdk.types import OffloadKey, RequestContext, Transfer, make_offload_key

#: The key of the probes' chunk. Its KV-cache group is higher than any model's.
CANARY_KEY: OffloadKey = make_offload_key(b"kvtier canary".ljust(32, b"\0"), 0xFFFF_FFFF)

NO_ROOM = "calls that hang leave no room for another"

_PROBER = RequestContext("kvtier probe")

#: A cancelled call that runs for this long is assumed to hang forever. The time is the sum of the
#: pauses between probes, so a suspension of the machine does not count.
_HANG_S = 60.0


@dataclass(eq=False)
class DirectionHealth:
    """The health of a tier in one direction. After failures, probes run until the tier recovers.

    A probe makes the same calls as a request, with a chunk that belongs to no engine. A tier in
    quarantine is neither called nor probed.
    """

    _direction: Direction
    _call: TierCaller
    _header: ChunkHeader
    _memory: memoryview  # for all probes, because only one probe runs at a time
    _options: RunnerOptions
    _breaker: Breaker
    _report: Callable[[BreakerMoved], None]
    _refuse_queued: Callable[[Direction], None]
    _is_blocked: Callable[[Direction, float], bool]
    _give_up: Callable[[], None] | None
    _prober: asyncio.Task[None] | None = None
    _attempt: asyncio.Task[bool] | None = None
    _hindered_s: float = 0.0  # the time for which hanging calls have prevented probes

    @property
    def admits(self) -> bool:
        """True if jobs may start. In quarantine, they start and fail without a call to the tier."""
        return self._breaker.is_closed or self._call.quarantine is not None

    @property
    def tasks(self) -> list[asyncio.Task[bool] | asyncio.Task[None]]:
        """The tasks to cancel at close. A hanging probe may outlive the task that started it."""
        return [task for task in (self._prober, self._attempt) if task is not None]

    def note(self, outcome: Outcome, reason: str, objects: Sequence[OffloadKey] = ()) -> None:
        if self._call.quarantine is not None or not self._breaker.note(outcome, objects):
            return
        self._call.log.often(
            logging.WARNING,
            f"{self._direction.value} breaker",
            f"{self._call.log.tier}: {self._direction.value}s are refused until a probe succeeds; "
            f"the last failure: {reason}",
        )
        self._tell()
        self._prober = self._call.clock.spawn(self._probe(), name=f"{self._direction.value} prober")
        self._refuse_queued(self._direction)

    def _tell(self) -> None:
        self._report(BreakerMoved(self._direction, self._breaker.state))

    async def _probe(self) -> None:
        refused_s = self._call.clock.now_s()
        while not self._breaker.is_closed:
            await self._call.clock.sleep(self._breaker.wait_s)
            if self._call.quarantine is not None:
                return
            self._breaker.begin_probe()
            self._tell()
            self._breaker.end_probe(await self._succeeds())
            self._tell()
        refused_for = format_seconds(self._call.clock.now_s() - refused_s)
        self._call.log.often(
            logging.WARNING,
            f"{self._direction.value} recovery",
            f"{self._call.log.tier}: {self._direction.value}s are taken again, after {refused_for}",
            ends_outage=True,
        )

    async def _succeeds(self) -> bool:
        if self._attempt is not None and not self._attempt.done():
            self._note_hindered("a probe hangs")
            return False
        if self._is_blocked(self._direction, self._call.clock.now_s()):
            self._note_hindered(NO_ROOM)
            return False
        self._hindered_s = 0.0
        name = f"{self._direction.value} probe"
        self._attempt = attempt = self._call.clock.spawn(self._attempt_once(), name=name)
        try:
            is_read = self._direction is Direction.READ
            options = self._options
            deadline_s = options.load_deadline_s if is_read else options.store_deadline_s
            # The first probes detect a quick recovery; later probes give a slow tier more time.
            within_s = min(self._breaker.backoff.pause_s, deadline_s)
            if not await wait_within(self._call.clock, within_s, [attempt]):
                return False
        finally:
            # A probe that ignores the cancellation prevents further probes until it ends.
            attempt.cancel()
        return not attempt.cancelled() and attempt.result()

    def _note_hindered(self, hindrance: str) -> None:
        if self._hindered_s >= _HANG_S:
            return
        self._hindered_s += self._breaker.backoff.pause_s
        if self._hindered_s < _HANG_S:
            return
        self._call.log.warning(
            "%ss stay refused: %s, and nothing but the end of the process ends them",
            self._direction.value,
            hindrance,
        )
        if self._give_up is not None:
            self._give_up()

    async def _attempt_once(self) -> bool:
        try:
            if self._direction is Direction.READ:
                await self._look()
                await self._move(Operation.LOAD)
            else:
                await self._move(Operation.STORE)
                if self._call.can_delete:
                    # After a successful store the tier is usable, even if the delete fails.
                    with contextlib.suppress(TierError):
                        await self._call.delete([CANARY_KEY])
        except (TierError, TimeoutError) as error:
            self._call.log.debug("%s probe: %s", self._direction.value, error or "too slow")
            return False
        except Exception:
            self._call.log.exception("a probe failed inside the SDK")
            return False
        return True

    async def _look(self) -> None:
        asked_s = self._call.clock.now_s()
        await self._call.lookup([CANARY_KEY], _PROBER)
        # The first lookup may exceed the lookup deadline, because it may need to reconnect. If so,
        # a second lookup uses the open connection and must meet the deadline.
        deadline_s = self._options.lookup_deadline_s
        if self._call.clock.now_s() - asked_s > deadline_s:
            async with self._call.clock.timeout(deadline_s):
                await self._call.lookup([CANARY_KEY], _PROBER)

    async def _move(self, operation: Operation) -> None:
        split = self._call.tier.context.header_bytes
        header, payload = self._memory[:split], self._memory[split:]
        if operation is Operation.STORE:
            self._header.seal(CANARY_KEY, header, payload)
        # Replace the chunk of an earlier probe, because a skipped store would prove nothing.
        transfer = Transfer(CANARY_KEY, _PROBER, header, payload, replace=True)
        errors = await self._call.transfer(operation, [transfer])
        # An absent or damaged chunk is also an answer, so a load probe needs no stored chunk.
        if outcome_of(self._direction, errors) is not Outcome.ANSWERED:
            for error in filter(None, errors):
                raise error
