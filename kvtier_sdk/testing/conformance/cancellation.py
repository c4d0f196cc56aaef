"""Checks of cancelled calls: they end, and nothing touches their buffers afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.probe import PIECE_BYTES, Probe, pieces_of
from kvtier_sdk.testing.conformance.rules import Breach, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import OffloadKey

_LENT = "Buffers belong to the SDK, which lends them until the coroutine returns."
#: Delays before a call is cancelled, in turns of the loop and in seconds.
_TURNS = (0, 1, 2, 3, 5, 8, 13)
_DELAYS_S = (0.0005, 0.002, 0.005, 0.01)
#: The version written into a buffer after its call has ended.
_FOREIGN = 255

_Move = Callable[[Probe, Sequence[LentBuffers]], Awaitable[object]]


@check(says="let it through only once nothing touches the buffers.")
async def check_a_cancelled_call_ends(subject: TierSubject) -> None:
    """A cancelled call ends soon."""
    async with subject.opened() as probe:
        for move in (_store, _load):
            for version in (0, None):
                async for _, ended in _cancelled(probe, _new_key(probe, version), move):
                    if not ended:
                        raise Breach(
                            f"a{move.__name__.replace('_', ' ')} had not ended "
                            f"{subject.timeout_s:g} s after it was cancelled"
                        )


@check(says=_LENT)
async def check_a_cancelled_load_writes_nothing_more(subject: TierSubject) -> None:
    """Once a cancelled load has ended, nothing writes into its buffers."""
    async with subject.opened() as probe:
        watched = []
        async for lent, ended in _cancelled(probe, _new_key(probe, 0), _load):
            if not ended:
                return
            lent.fill(probe.content(lent.key, _FOREIGN))
            watched.append(lent)
        await subject.clock.sleep(subject.settle_s)
        if any(lent.content != probe.content(lent.key, _FOREIGN) for lent in watched):
            raise Breach("a buffer was written to after its cancelled load had ended")


@check(says=_LENT)
async def check_a_cancelled_store_reads_nothing_more(subject: TierSubject) -> None:
    """A change to a buffer after its cancelled store has ended is never stored."""
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
                raise Breach(
                    "bytes written to a buffer after its cancelled store had ended are stored"
                )


@check(says="No reader ever sees a partly written object, even if a store fails midway.")
async def check_a_cancelled_store_leaves_no_part(subject: TierSubject) -> None:
    """A cancelled store leaves a whole object under its key, or none."""
    async with subject.opened() as probe:
        for version in (0, None):
            async for lent, ended in _cancelled(probe, _new_key(probe, version), _store):
                if not ended:
                    return
                versions = (1,) if version is None else (0, 1)
                await probe.expect(lent.key, *versions, may_miss=True)


def _new_key(probe: Probe, version: int | None) -> Callable[[], Awaitable[OffloadKey]]:
    """Return a function that makes a key, and stores the version under it if one is given."""

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
    """Start and cancel a call many times, each time on a new key and a little later."""
    clock = probe.subject.clock
    for turns, delay_s in [*((turns, 0.0) for turns in _TURNS), *((0, s) for s in _DELAYS_S)]:
        lent = probe.full(await new_key(), version=1)
        task = probe.start(_call(move, probe, lent), "to be cancelled")
        # A task that is cancelled before its first step never calls the tier.
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        if delay_s:
            await clock.sleep(delay_s)
        task.cancel()
        ended = await probe.ends(task)
        if ended and not task.cancelled():
            # Retrieve the error, or asyncio logs it; other checks judge it.
            task.exception()
        yield lent, ended


async def _call(move: _Move, probe: Probe, lent: LentBuffers) -> None:
    await move(probe, [lent])


def _holds_some(found: bytes, content: bytes) -> bool:
    pieces = zip(pieces_of(found), pieces_of(content), strict=True)
    # A shorter piece at the end may be equal by chance.
    return any(one == other and len(one) == PIECE_BYTES for one, other in pieces)
