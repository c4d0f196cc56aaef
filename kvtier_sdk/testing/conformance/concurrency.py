"""Checks of concurrent calls: readers see whole objects, and writers leave one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kvtier_sdk.errors import TierError
from kvtier_sdk.testing.conformance.probe import Probe, describe, is_miss
from kvtier_sdk.testing.conformance.rules import Breach, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Medium, OffloadKey

_WRITERS = 4
_ROUNDS = 8
_VERSIONS = range(1, 13)


@check(says="the first or the last complete object stays.")
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
            succeeded = [verdict is None for (verdict,) in outcomes]
            if any(succeeded):
                for probe in probes:
                    await probe.expect(key, *range(_WRITERS))


@check(says="No reader ever sees a partly written object")
async def check_no_partly_written_object_is_visible(subject: TierSubject) -> None:
    """A load that runs during stores of its key gets a whole object or none."""
    async with AsyncExitStack() as stack:
        probes = await _instances(subject, stack)
        (key,) = subject.new_keys(1)
        writer = asyncio.ensure_future(_write(probes[0], key))
        try:
            while not writer.done():
                for probe in probes:
                    await _read(probe, key)
        finally:
            writer.cancel()
            await asyncio.wait([writer])
        writer.result()


async def _instances(subject: TierSubject, stack: AsyncExitStack) -> list[Probe]:
    """Open two instances if instances share a store, else one."""
    count = 2 if subject.tier_class.medium is Medium.STORAGE else 1
    return [await stack.enter_async_context(subject.opened()) for _ in range(count)]


async def _write(probe: Probe, key: OffloadKey) -> None:
    for version in _VERSIONS:
        await probe.store([probe.full(key, version)])


async def _read(probe: Probe, key: OffloadKey) -> None:
    found = await probe.get(key)
    if not isinstance(found, TierError):
        probe.check_content(key, found, _VERSIONS)
    elif not is_miss(found):
        raise Breach(f"loading a chunk while it is being stored gave {describe(found)}")
