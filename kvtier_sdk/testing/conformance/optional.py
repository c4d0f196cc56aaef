"""Checks of the optional capabilities, and of a full tier."""

from __future__ import annotations

from kvtier_sdk.errors import ChunkNotFoundError, TierCapacityError, TierError
from kvtier_sdk.testing.conformance.probe import describe, is_miss
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject, tier_spec
from kvtier_sdk.types import Capability

_MORE_THAN_FIT = 100
# A runner tries again what may succeed in a moment.
_TRIES = 3


@check(Capability.DELETE, says="Delete chunks; missing ones are ignored.")
async def check_delete_forgets(subject: TierSubject) -> None:
    """Deleted chunks are gone, others stay, and missing ones are ignored."""
    async with subject.opened() as probe:
        kept = await probe.put(subject.new_keys(3))
        if len(kept) < 3:
            return
        first, middle, last = kept
        await probe.delete([first, *subject.new_keys(1), last])
        if any(await probe.lookup([first, last])):
            raise Breach("lookup finds a chunk that was deleted")
        for key in (first, last):
            found = await probe.get(key)
            if not isinstance(found, ChunkNotFoundError):
                what = describe(found) if isinstance(found, TierError) else "success"
                raise Breach(f"loading a chunk that was deleted gave {what}")
        await probe.expect(middle, 0)
        if await probe.put([first], version=1):
            await probe.expect(first, 1)


@check(Capability.TOUCH, says="Mark chunks as just used; unknown ones are ignored.")
async def check_touch_changes_nothing(subject: TierSubject) -> None:
    """Touch changes no chunk and ignores unknown ones."""
    async with subject.opened() as probe:
        stored = await probe.put(subject.new_keys(2))
        (absent,) = subject.new_keys(1)
        await probe.touch([*stored, absent])
        for key in stored:
            await probe.expect(key, 0)
        if await probe.lookup([absent]) != [False]:
            raise Breach("lookup finds a chunk that was touched but never stored")


@check(Capability.SCAN, says="Iterate over the stored chunks of this namespace.")
async def check_scan_lists_what_is_stored(subject: TierSubject) -> None:
    """Scan lists every stored chunk once, with the length of its object."""
    async with subject.opened() as probe:
        before = {entry.key for entry in await probe.scan()}
        stored = await probe.put(subject.new_keys(4))
        entries = await probe.scan()
        if strangers := {entry.key for entry in entries} - before - set(stored):
            raise Breach(f"scan lists a chunk that was never stored: {strangers.pop().hex()}")
        for key in stored:
            lengths = [entry.object_bytes for entry in entries if entry.key == key]
            if lengths != [probe.object_bytes]:
                raise Breach(
                    f"an object of {probe.object_bytes} bytes was stored; scan lists "
                    + (f"it with {lengths}" if lengths else "nothing under its key")
                )


@check(Capability.USAGE, says="Return how full the tier is.")
async def check_usage_counts_what_is_stored(subject: TierSubject) -> None:
    """Usage counts at least the chunks that were stored."""
    async with subject.opened() as probe:
        stored = await probe.put(subject.new_keys(4))
        usage = await probe.bounded(probe.tier.usage(), "usage")
        least = len(stored) * probe.object_bytes
        chunks = len(stored) if usage.chunks is None else usage.chunks
        if chunks < len(stored) or usage.used_bytes < least:
            raise Breach(
                f"{len(stored)} chunks of {least} bytes together are stored; usage returned "
                f"{usage.chunks} chunks of {usage.used_bytes} bytes"
            )


@check(Hook.SMALL_TIER, says="The tier is full and could not make room.")
async def check_a_full_tier_refuses_or_makes_room(subject: TierSubject) -> None:
    """A store into a full tier succeeds or gives a TierCapacityError, and damages nothing."""
    assert subject.small_tier is not None
    small = tier_spec(subject.small_tier(subject.context().object_bytes))
    async with subject.opened(small) as probe:
        kept = []
        for key in subject.new_keys(_MORE_THAN_FIT):
            for _ in range(_TRIES):
                (verdict,) = await probe.store([probe.full(key)])
                if verdict is None or not verdict.retryable:
                    break
            if verdict is None:
                kept.append(key)
            elif not isinstance(verdict, TierCapacityError):
                raise Breach(f"a store into a full tier gave {describe(verdict)}")
        there = 0
        for key in kept:
            found = await probe.get(key)
            if isinstance(found, bytes):
                probe.check_content(key, found, [0])
                there += 1
            elif not is_miss(found):
                raise Breach(f"loading from a full tier gave {describe(found)}")
        if there == _MORE_THAN_FIT:
            raise Breach(
                f"small_tier made a tier with room for {_MORE_THAN_FIT} chunks; it must be smaller"
            )
