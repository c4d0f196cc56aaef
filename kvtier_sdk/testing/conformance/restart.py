"""Checks of a store that becomes unreachable during transfers, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager

from kvtier_sdk.aio.clock import Clock, wait_out
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.outage import wait_for_recovery
from kvtier_sdk.testing.conformance.probe import Probe, describe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import OffloadKey

#: More than a socket's buffers hold.
_CHUNK_BYTES = 1 << 20
_MOVERS = 4
_PAUSE_S = 0.0002
_LOOKS = 200


@check(
    Hook.BREAK_CONNECTION,
    Hook.RESTORE_CONNECTION,
    says="No reader ever sees a partly written object, even if a store fails midway.",
)
async def check_an_outage_in_mid_transfer_damages_nothing(subject: TierSubject) -> None:
    """A transfer that an outage interrupts returns no wrong bytes, then or later."""
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
    """After an outage the tier works again, without being reopened."""
    async with _opened(subject) as probe:
        await _moved_through_an_outage(probe)
        error = await wait_for_recovery(probe)
        if error is not None:
            raise Breach(
                f"{subject.timeout_s:g} s after the end of the outage, lookup still gives "
                f"{describe(error)}"
            )
        if (key := await probe.put_one()) is not None:
            await probe.expect(key, 0)


def _opened(subject: TierSubject) -> AbstractAsyncContextManager[Probe]:
    """Open the tier with chunks so large that an outage interrupts their transfers."""
    facts = {**subject.namespace.facts, "chunk_bytes": _CHUNK_BYTES}
    return subject.opened(chunk_bytes=_CHUNK_BYTES, namespace=Namespace(facts))


async def _moved_through_an_outage(probe: Probe) -> list[_Mover]:
    """Store and load without a break, before, during and after an outage."""
    subject = probe.subject
    movers = [_Mover(probe, key) for key in subject.new_keys(_MOVERS)]
    tasks: list[asyncio.Task[None]] = []
    try:
        for mover in movers:
            tasks.append(probe.start(mover.move(), "store and load a chunk"))
            # Start them at different times, so that they do not run in step.
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
    """A loop that stores one chunk and loads it, over and over.

    Attributes:
        calls: number of calls that have ended.
        doing: the operation of the running call, or empty.
        goes_on: set it to ``False``, and the mover stops after its next load.
        breach: the last breach that a call found.
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
        """Store and load until :attr:`goes_on` is ``False``."""
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
            self._probe.check_content(self._key, self._lent.content, [0])

    async def _attempt(self, operation: str, call: Awaitable[None]) -> None:
        self.doing = operation
        try:
            await call
        except Breach as breach:
            self.breach = breach
        self.doing = ""
        self.calls += 1
        # A tier may answer at once; the other movers and the outage need their turn.
        await self._probe.subject.clock.sleep(_PAUSE_S)


async def _moved_on(clock: Clock, movers: Sequence[_Mover]) -> None:
    """Wait until each mover has ended its running call, and a store and a load after it."""
    start = [mover.calls for mover in movers]
    while any(mover.calls < before + 3 for mover, before in zip(movers, start, strict=True)):
        await clock.sleep(_PAUSE_S)


async def _in_mid_transfer(clock: Clock, movers: Sequence[_Mover]) -> None:
    """Wait until both a store and a load are running, unless the tier is too fast for that."""
    for _ in range(_LOOKS):
        if {"store", "load"} <= {mover.doing for mover in movers}:
            return
        await clock.sleep(_PAUSE_S)
