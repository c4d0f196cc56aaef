"""Checks of concurrent and cancelled calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import product

from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.probe import PIECE_BYTES, Probe, pieces_of, start_and_cancel
from kvtier_sdk.testing.conformance.rules import Breach, check, check_opened
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Medium, OffloadKey

_LENT = "Buffers belong to the SDK, which lends them until the coroutine ends."
#: Delays before a call is cancelled, in iterations of the loop and in seconds. All are positive,
#: because a task that is cancelled before it starts never calls the tier.
_TURNS = (1, 2, 3, 4, 6, 9, 14)
_DELAYS_S = (0.0005, 0.002, 0.005, 0.01)
#: The version written into a buffer after its call has ended.
_FOREIGN = 255
_WRITERS = 4
_ROUNDS = 8
_VERSIONS = range(1, 13)


@check(says="the tier keeps the first or the last complete object.")
async def check_concurrent_stores_leave_one_whole_object(subject: TierSubject) -> None:
    """Concurrent stores of one key leave one whole object."""
    async with AsyncExitStack() as stack:
        probes = await _instances(subject, stack)
        for _ in range(_ROUNDS):
            (key,) = subject.new_keys(1)
            writers = [probes[number % len(probes)] for number in range(_WRITERS)]
            outcomes = await asyncio.gather(
                *(probe.store([probe.full(key, version)]) for version, probe in enumerate(writers))
            )
            if any(verdict is None for (verdict,) in outcomes):
                for probe in probes:
                    await probe.expect(key, *range(_WRITERS))


@check(says="No reader ever sees a partly written object")
async def check_no_partly_written_object_is_visible(subject: TierSubject) -> None:
    """A load that runs during stores of its key gets a whole object or a miss."""
    async with AsyncExitStack() as stack:
        probes = await _instances(subject, stack)
        (key,) = subject.new_keys(1)
        writer = asyncio.ensure_future(_write(probes[0], key))
        try:
            while not writer.done():
                for probe in probes:
                    await probe.expect(
                        key, *_VERSIONS, may_miss=True, what="a chunk while it is being stored"
                    )
        finally:
            writer.cancel()
            await asyncio.wait([writer])
        writer.result()


async def _instances(subject: TierSubject, stack: AsyncExitStack) -> list[Probe]:
    """Open two instances if instances share a store, otherwise one."""
    count = 2 if subject.tier_class.medium is Medium.STORAGE else 1
    return [await stack.enter_async_context(subject.opened()) for _ in range(count)]


async def _write(probe: Probe, key: OffloadKey) -> None:
    for version in _VERSIONS:
        await probe.store([probe.full(key, version)])


@check_opened(says="A cancelled coroutine must not end before all access to the buffers has ended.")
async def check_a_cancelled_call_ends(subject: TierSubject, probe: Probe) -> None:
    """A cancelled call ends soon."""
    for operation in ("store", "load"):
        async for _, _, ended in _cancelled(probe, operation):
            if not ended:
                within = f"{subject.timeout_s:g} s after it was cancelled"
                raise Breach(f"a {operation} had not ended {within}")


@check_opened(says=_LENT)
async def check_a_cancelled_load_writes_nothing_more(subject: TierSubject, probe: Probe) -> None:
    """Once a cancelled load has ended, its buffers no longer change."""
    for lent in await _overwritten_after_cancelled(probe, "load"):
        if lent.content != probe.content(lent.key, _FOREIGN):
            raise Breach("a buffer was written to after its cancelled load had ended")


@check_opened(says=_LENT)
async def check_a_cancelled_store_reads_nothing_more(subject: TierSubject, probe: Probe) -> None:
    """A change to a buffer after its cancelled store has ended is never stored."""
    for lent in await _overwritten_after_cancelled(probe, "store"):
        found = await probe.get(lent.key)
        if isinstance(found, bytes) and _holds_some(found, probe.content(lent.key, _FOREIGN)):
            raise Breach("bytes written to a buffer after its cancelled store had ended are stored")


@check_opened(says="No reader ever sees a partly written object, even if a store fails midway.")
async def check_a_cancelled_store_leaves_no_part(subject: TierSubject, probe: Probe) -> None:
    """A cancelled store leaves a whole object under its key, or no object."""
    async for lent, versions, ended in _cancelled(probe, "store"):
        if not ended:
            return
        await probe.expect(lent.key, *versions, 1, may_miss=True)


async def _overwritten_after_cancelled(probe: Probe, operation: str) -> Sequence[LentBuffers]:
    """Cancel calls, overwrite their buffers, wait; return the buffers, or [] if a call goes on."""
    overwritten = []
    async for lent, _, ended in _cancelled(probe, operation):
        if not ended:
            return []
        lent.fill(probe.content(lent.key, _FOREIGN))
        overwritten.append(lent)
    await probe.subject.clock.sleep(probe.subject.settle_s)
    return overwritten


async def _cancelled(
    probe: Probe, operation: str
) -> AsyncIterator[tuple[LentBuffers, list[int], bool]]:
    """Cancel calls; for each, yield its buffers, the earlier versions, and true if it ended."""
    delays = [*((turns, 0.0) for turns in _TURNS), *((1, delay_s) for delay_s in _DELAYS_S)]
    for versions, (turns, delay_s) in product(([0], []), delays):
        (key,) = probe.subject.new_keys(1)
        for version in versions:
            await probe.put([key], version)
        lent = probe.full(key, version=1)
        yield lent, versions, await start_and_cancel(probe, operation, lent, turns, delay_s)


def _holds_some(found: bytes, content: bytes) -> bool:
    pieces = zip(pieces_of(found), pieces_of(content), strict=False)
    # Ignore a short last piece, because short pieces can be equal by chance.
    return any(one == other and len(one) == PIECE_BYTES for one, other in pieces)
