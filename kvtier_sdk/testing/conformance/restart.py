"""Checks of a store that goes away in the middle of transfers, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager

from kvtier_sdk.aio.clock import Clock, wait_out
from kvtier_sdk.errors import TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.probe import Probe, told
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import OffloadKey

#: More than the buffers of a socket hold.
_CHUNK_BYTES = 1 << 20
_MOVERS = 4
_PAUSE_S = 0.0002
_LOOKS = 200


@check(
    Hook.BREAK_CONNECTION,
    Hook.RESTORE_CONNECTION,
    says="No reader ever sees a partly written object, whatever fails in mid-store.",
)
async def check_an_outage_in_mid_transfer_damages_nothing(subject: TierSubject) -> None:
    """A transfer that an outage cuts short brings no wrong bytes, then or later."""
    async with _opened(subject) as probe:
        for mover in await _moved_through_an_outage(probe):
            if mover.breach is not None:
                raise mover.breach


@check(
    Hook.BREAK_CONNECTION,
    Hook.RESTORE_CONNECTION,
    says="whether the same call may succeed in a moment",
)
async def check_a_tier_comes_back_after_an_outage(subject: TierSubject) -> None:
    """When the store can be reached again, so can the tier, without being opened again."""
    async with _opened(subject) as probe:
        await _moved_through_an_outage(probe)
        said = await _said_until_well(probe)
        if said is not None:
            raise Breach(
                f"{subject.patience_s:g} s after the store could be reached again, lookup still "
                f"says {told(said)}"
            )
        if (key := await probe.put_one()) is not None:
            await probe.expect(key, 0)


def _opened(subject: TierSubject) -> AbstractAsyncContextManager[Probe]:
    """The tier with chunks so large that an outage cuts them in two."""
    facts = {**subject.namespace.facts, "chunk_bytes": _CHUNK_BYTES}
    return subject.opened(chunk_bytes=_CHUNK_BYTES, namespace=Namespace(facts))


async def _moved_through_an_outage(probe: Probe) -> list[_Mover]:
    """Store and load all the time, before, during and after an outage."""
    subject = probe.subject
    movers = [_Mover(probe, key) for key in subject.new_keys(_MOVERS)]
    tasks: list[asyncio.Task[None]] = []
    try:
        for mover in movers:
            tasks.append(probe.start(mover.move(), "move a chunk there and back"))
            # Not in step with the others.
            await subject.clock.sleep(_PAUSE_S)
        await _moved_on(subject.clock, movers)
        await _in_mid_transfer(subject.clock, movers)
        await subject.call(Hook.BREAK_CONNECTION)
        try:
            await _moved_on(subject.clock, movers)
        finally:
            await subject.call(Hook.RESTORE_CONNECTION)
        await _moved_on(subject.clock, movers)
    finally:
        for mover in movers:
            mover.goes_on = False
        await wait_out(tasks)
    return movers


class _Mover:
    """Stores one chunk and loads it, over and over.

    Attributes:
        calls: how many calls have ended.
        doing: the call that is under way, or empty.
        goes_on: set it to ``False``, and the mover stops after its next load.
        breach: the last rule that one of them broke.
    """

    def __init__(self, probe: Probe, key: OffloadKey) -> None:
        self.calls = 0
        self.doing = ""
        self.goes_on = True
        self.breach: Breach | None = None
        self._probe = probe
        self._key = key
        self._content = probe.content(key)
        self._empty = bytes(len(self._content))
        self._lent = probe.empty(key)

    async def move(self) -> None:
        """Store and load until told to stop."""
        while self.goes_on:
            await self._attempt("store", self._store())
            await self._attempt("load", self._load())

    async def _store(self) -> None:
        self._lent.fill(self._content)
        await self._probe.store([self._lent])

    async def _load(self) -> None:
        self._lent.fill(self._empty)
        verdicts = await self._probe.load([self._lent])
        if verdicts == [None] and self._lent.content != self._content:
            self._probe.judge(self._key, self._lent.content, [0])

    async def _attempt(self, operation: str, call: Awaitable[None]) -> None:
        self.doing = operation
        try:
            await call
        except Breach as breach:
            self.breach = breach
        self.doing = ""
        self.calls += 1
        # A tier may answer at once; the others, and the outage, have to get their turn.
        await self._probe.subject.clock.sleep(_PAUSE_S)


async def _moved_on(clock: Clock, movers: Sequence[_Mover]) -> None:
    """Wait until each mover has ended the call that it is in, and a store and a load after it."""
    start = [mover.calls for mover in movers]
    while any(mover.calls < before + 3 for mover, before in zip(movers, start, strict=True)):
        await clock.sleep(_PAUSE_S)


async def _in_mid_transfer(clock: Clock, movers: Sequence[_Mover]) -> None:
    """Wait until both a store and a load are under way, unless the tier is too fast for that."""
    for _ in range(_LOOKS):
        if {"store", "load"} <= {mover.doing for mover in movers}:
            return
        await clock.sleep(_PAUSE_S)


async def _said_until_well(probe: Probe) -> TierError | None:
    """Ask until the tier answers; its last complaint where it does not."""
    subject = probe.subject
    end_s = subject.clock.now_s() + subject.patience_s
    while True:
        try:
            await probe.lookup(subject.new_keys(1))
        except TierError as error:
            if subject.clock.now_s() > end_s:
                return error
            await subject.clock.sleep(subject.settle_s)
        else:
            return None
