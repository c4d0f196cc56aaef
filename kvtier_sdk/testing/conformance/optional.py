"""Checks of the optional capabilities, and of a full tier."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_sdk.errors import ChunkNotFoundError, TierCapacityError, TierError
from kvtier_sdk.testing.conformance.probe import Probe, describe, is_miss
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject, tier_spec
from kvtier_sdk.types import Capability, Medium, OffloadKey

_MORE_THAN_FIT = 100


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
    """Usage counts at least the chunks that were stored, by this instance or another."""
    async with subject.opened() as probe:
        stored = await probe.put(subject.new_keys(4))
        await _check_usage(probe, len(stored), "")
        if subject.tier_class.medium is Medium.STORAGE:
            async with subject.opened() as other:
                await _check_usage(other, len(stored), " of a second instance")


async def _check_usage(probe: Probe, stored: int, whose: str) -> None:
    usage = await probe.bounded(probe.tier.usage(), "usage")
    least = stored * probe.object_bytes
    chunks = stored if usage.chunks is None else usage.chunks
    if chunks < stored or usage.used_bytes < least:
        raise Breach(
            f"{stored} chunks of {least} bytes together are stored; usage{whose} returned "
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
            (verdict,) = await probe.store([probe.full(key)])
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


@check(Hook.SMALL_TIER, says="tells the SDK that chunks are gone from the tier")
async def check_a_reported_removal_is_true(subject: TierSubject) -> None:
    """A chunk that a full tier reports as removed is gone, and was there."""
    assert subject.small_tier is not None
    small = tier_spec(subject.small_tier(subject.context().object_bytes))
    removed: list[OffloadKey] = []

    def report(keys: Iterable[OffloadKey], /, *, evicted: bool = False) -> None:
        removed.extend(keys)

    async with subject.opened(small, report_removed=report) as probe:
        keys = subject.new_keys(_MORE_THAN_FIT)
        for key in keys:
            await probe.store([probe.full(key)])
        if set(removed) - set(keys):
            raise Breach("a chunk that was never stored is reported as removed")
        gone = sorted(set(removed))
        if any(await probe.lookup(gone)):
            raise Breach("a chunk that is reported as removed is still found")


@check(Hook.SHORT_LIVED_TIER, says="A missing object is a ChunkNotFoundError.")
async def check_an_expired_chunk_is_absent(subject: TierSubject) -> None:
    """An expired chunk is absent for lookup and load alike, and can be stored again."""
    assert subject.short_lived_tier is not None
    clock = subject.clock
    async with subject.opened(tier_spec(subject.short_lived_tier())) as probe:
        key = await probe.put_one()
        if key is None:
            return
        end_s = clock.now_s() + subject.timeout_s
        while await probe.lookup([key]) == [True]:
            if clock.now_s() > end_s:
                raise Breach(f"lookup still finds a chunk {subject.timeout_s:g} s after its store")
            await clock.sleep(subject.settle_s)
        found = await probe.get(key)
        if not isinstance(found, ChunkNotFoundError):
            what = describe(found) if isinstance(found, TierError) else "success"
            raise Breach(f"lookup returned False for an expired chunk, and a load gave {what}")
        if await probe.put([key], version=1):
            await probe.expect(key, 1)


@check(Hook.AGING_TIER, says="A missing object is a ChunkNotFoundError.")
async def check_no_use_extends_the_maximum_age(subject: TierSubject) -> None:
    """A chunk that is used all the time is absent once it has its maximum age."""
    assert subject.aging_tier is not None
    clock, aging = subject.clock, tier_spec(subject.aging_tier())
    async with subject.opened(aging) as probe:
        key = await probe.put_one()
        if key is None:
            return
        end_s = clock.now_s() + subject.timeout_s
        while await probe.lookup([key]) == [True]:
            if clock.now_s() > end_s:
                raise Breach(f"a chunk that is used is still there {subject.timeout_s:g} s later")
            await probe.get(key)
            if Capability.TOUCH in aging.tier_class.capabilities:
                await probe.touch([key])
            await clock.sleep(subject.settle_s)
        if await probe.put([key], version=1):
            await probe.expect(key, 1)
