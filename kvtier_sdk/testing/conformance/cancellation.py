"""Checks of what a cancelled call leaves behind: nothing that still touches its buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.probe import PIECE_BYTES, Probe, pieces_of
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
        for move in (_store, _load):
            for version in (0, None):
                async for _, ended in _cancelled(probe, _new_key(probe, version), move):
                    if not ended:
                        raise Breach(
                            f"a{move.__name__.replace('_', ' ')} that was cancelled had not ended "
                            f"after {subject.patience_s:g} s"
                        )


@check(says=_LENT)
async def check_a_cancelled_load_writes_nothing_more(subject: TierSubject) -> None:
    """When a cancelled load has ended, nothing writes into its buffers any more."""
    async with subject.opened() as probe:
        watched = []
        async for lent, ended in _cancelled(probe, _new_key(probe, 0), _load):
            if not ended:
                return
            lent.fill(probe.content(lent.key, _FOREIGN))
            watched.append(lent)
        await subject.clock.sleep(subject.settle_s)
        if any(lent.content != probe.content(lent.key, _FOREIGN) for lent in watched):
            raise Breach("a buffer was written to after the cancelled load had ended")


@check(says=_LENT)
async def check_a_cancelled_store_reads_nothing_more(subject: TierSubject) -> None:
    """What changes in a buffer when its cancelled store has ended is never stored."""
    async with subject.opened() as probe:
        watched = []
        for version in (0, None):
            async for lent, ended in _cancelled(probe, _new_key(probe, version), _store):
                if not ended:
                    return
                lent.fill(probe.content(lent.key, _FOREIGN))
                watched.append(lent.key)
        await subject.clock.sleep(subject.settle_s)
        for key in watched:
            found = await probe.get(key)
            if isinstance(found, bytes) and _holds_some(found, probe.content(key, _FOREIGN)):
                raise Breach("what was put into a buffer after its store was cancelled is stored")


@check(says="No reader ever sees a partly written object, whatever fails in mid-store.")
async def check_a_cancelled_store_leaves_no_part(subject: TierSubject) -> None:
    """A store that is cancelled midway leaves a whole object under its key, or none."""
    async with subject.opened() as probe:
        for version in (0, None):
            async for lent, ended in _cancelled(probe, _new_key(probe, version), _store):
                if not ended:
                    return
                versions = (1,) if version is None else (0, 1)
                await probe.expect(lent.key, *versions, may_miss=True)


def _new_key(probe: Probe, version: int | None) -> Callable[[], Awaitable[OffloadKey]]:
    """Makes keys under which a version is stored, or nothing."""

    async def make() -> OffloadKey:
        (key,) = probe.subject.new_keys(1)
        if version is not None:
            await probe.put([key], version)
        return key

    return make


async def _store(probe: Probe, batch: Sequence[LentBuffers]) -> object:
    return await probe.tier.store([lent.transfer for lent in batch])


async def _load(probe: Probe, batch: Sequence[LentBuffers]) -> object:
    return await probe.tier.load([lent.transfer for lent in batch])


async def _cancelled(
    probe: Probe, new_key: Callable[[], Awaitable[OffloadKey]], move: _Move
) -> AsyncIterator[tuple[LentBuffers, bool]]:
    """Start a call again and again, on another key, and cancel it, each time a little later.

    Yields:
        The buffers of each, which begin as version 1, and whether the call has ended.
    """
    clock = probe.subject.clock
    for turns, delay_s in [*((turns, 0.0) for turns in _TURNS), *((0, s) for s in _DELAYS_S)]:
        lent = probe.full(await new_key(), version=1)
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


def _holds_some(found: bytes, content: bytes) -> bool:
    pieces = zip(pieces_of(found), pieces_of(content), strict=True)
    # A shorter one at the end may be the same by chance.
    return any(one == other and len(one) == PIECE_BYTES for one, other in pieces)
