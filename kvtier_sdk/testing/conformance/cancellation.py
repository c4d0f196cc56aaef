"""Checks of what a cancelled call leaves behind: nothing that still touches its buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.probe import Probe, pieces_of
from kvtier_sdk.testing.conformance.rules import Breach, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import OffloadKey

_LENT = "Buffers are the SDK's, lent until the coroutine has returned."
#: How far a call gets before it is cancelled: turns of the loop, then seconds.
_TURNS = (0, 1, 2, 3, 5, 8, 13)
_DELAYS_S = (0.0005, 0.002, 0.005, 0.01)
#: What stands in a buffer that the tier has no business with any more.
_FOREIGN = 255

_Move = Callable[[Probe, Sequence[LentBuffers]], Awaitable[object]]


@check(says="let it through only when nothing touches the buffers any more.")
async def check_a_cancelled_call_ends(subject: TierSubject) -> None:
    """A call that is cancelled ends, soon."""
    async with subject.opened() as probe:
        for key in subject.new_keys(2):
            await probe.put([key])
            for move in (_store, _load):
                async for _, ended in _cancelled(probe, key, move):
                    if not ended:
                        raise Breach(
                            f"a{move.__name__.replace('_', ' ')} that was cancelled had not ended "
                            f"after {subject.patience_s:g} s"
                        )


@check(says=_LENT)
async def check_a_cancelled_load_writes_nothing_more(subject: TierSubject) -> None:
    """When a cancelled load has ended, nothing writes into its buffers any more."""
    async with subject.opened() as probe:
        key = await probe.put_one()
        if key is None:
            return
        foreign = probe.content(key, _FOREIGN)
        watched = []
        async for lent, ended in _cancelled(probe, key, _load):
            if not ended:
                return
            lent.fill(foreign)
            watched.append(lent)
        await subject.clock.sleep(subject.settle_s)
        if any(lent.content != foreign for lent in watched):
            raise Breach("a buffer was written to after the cancelled load had ended")


@check(says=_LENT)
async def check_a_cancelled_store_reads_nothing_more(subject: TierSubject) -> None:
    """What changes in a buffer when its cancelled store has ended is never stored."""
    async with subject.opened() as probe:
        keys = []
        for kept in (True, False):
            (key,) = subject.new_keys(1)
            if kept:
                await probe.put([key])
            keys.append(key)
            async for lent, ended in _cancelled(probe, key, _store):
                if not ended:
                    return
                lent.fill(probe.content(key, _FOREIGN))
        await subject.clock.sleep(subject.settle_s)
        for key in keys:
            found = await probe.get(key)
            if not isinstance(found, bytes):
                continue
            pieces = zip(pieces_of(found), pieces_of(probe.content(key, _FOREIGN)), strict=True)
            if any(one == other for one, other in pieces):
                raise Breach("what was put into a buffer after its store was cancelled is stored")


@check(says="No reader ever sees a partly written object, whatever fails in mid-store.")
async def check_a_cancelled_store_leaves_no_part(subject: TierSubject) -> None:
    """A store that is cancelled midway leaves a whole object under its key, or none."""
    async with subject.opened() as probe:
        (fresh,) = subject.new_keys(1)
        async for _, ended in _cancelled(probe, fresh, _store):
            if not ended:
                return
            await probe.expect(fresh, 1, may_miss=True)
        key = await probe.put_one()
        if key is None:
            return
        async for _, _ended in _cancelled(probe, key, _store):
            await probe.expect(key, 0, 1, may_miss=True)


async def _store(probe: Probe, batch: Sequence[LentBuffers]) -> object:
    return await probe.tier.store([lent.transfer for lent in batch])


async def _load(probe: Probe, batch: Sequence[LentBuffers]) -> object:
    return await probe.tier.load([lent.transfer for lent in batch])


async def _cancelled(
    probe: Probe, key: OffloadKey, move: _Move
) -> AsyncIterator[tuple[LentBuffers, bool]]:
    """Start a call again and again and cancel it, each time a little later.

    Yields:
        The buffers of each, which begin as version 1, and whether the call has ended.
    """
    clock = probe.subject.clock
    for turns, delay_s in [*((turns, 0.0) for turns in _TURNS), *((0, s) for s in _DELAYS_S)]:
        lent = probe.full(key, version=1)
        task = probe.start(_call(move, probe, lent), "to be cancelled")
        # Before its first step a task is only thrown away.
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        if delay_s:
            await clock.sleep(delay_s)
        task.cancel()
        ended = await probe.ends(task)
        if ended and not task.cancelled():
            # Whatever it came to; a failure is another check's business.
            task.exception()
        yield lent, ended


async def _call(move: _Move, probe: Probe, lent: LentBuffers) -> None:
    await move(probe, [lent])
