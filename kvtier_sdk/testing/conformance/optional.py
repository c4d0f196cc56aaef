"""Checks of what a tier can do beyond the three, each only where it is declared."""

from __future__ import annotations

from kvtier_sdk.errors import ChunkNotFoundError, TierCapacityError, TierError
from kvtier_sdk.testing.conformance.probe import is_miss, told
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject, tier_spec
from kvtier_sdk.types import Capability

_MORE_THAN_FIT = 100


@check(Capability.DELETE, says="Forget chunks; those that are not there are no error.")
async def check_delete_forgets(subject: TierSubject) -> None:
    """What is deleted is gone, what is not stays, and what is not there is no error."""
    async with subject.opened() as probe:
        kept = await probe.put(subject.new_keys(3))
        if len(kept) < 3:
            return
        first, middle, last = kept
        await probe.bounded(probe.tier.delete([first, *subject.new_keys(1), last, first]), "delete")
        if any(await probe.lookup([first, last])):
            raise Breach("lookup finds a chunk that was deleted")
        for key in (first, last):
            found = await probe.get(key)
            if not isinstance(found, ChunkNotFoundError):
                what = told(found) if isinstance(found, TierError) else "success"
                raise Breach(f"loading a chunk that was deleted: {what}")
        await probe.expect(middle, 0)
        if await probe.put([first], version=1):
            await probe.expect(first, 1)


@check(
    Capability.TOUCH,
    says="Count chunks as used just now; unknown ones are ignored.",
)
async def check_touch_changes_nothing(subject: TierSubject) -> None:
    """Touch changes no chunk, and ignores what it does not know."""
    async with subject.opened() as probe:
        stored = await probe.put(subject.new_keys(2))
        (absent,) = subject.new_keys(1)
        await probe.bounded(probe.tier.touch([*stored, absent, *stored]), "touch")
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
            raise Breach(f"scan lists what was never stored: {strangers.pop().hex()}")
        for key in stored:
            lengths = [entry.object_bytes for entry in entries if entry.key == key]
            if lengths != [probe.object_bytes]:
                raise Breach(
                    f"a chunk of {probe.object_bytes} bytes was stored, and scan lists it with "
                    f"{lengths or 'nothing'}"
                )


@check(Capability.USAGE, says="Say how full the tier is.")
async def check_usage_counts_what_is_stored(subject: TierSubject) -> None:
    """Usage counts at least what was stored."""
    async with subject.opened() as probe:
        stored = await probe.put(subject.new_keys(4))
        usage = await probe.bounded(probe.tier.usage(), "usage")
        least = len(stored) * probe.object_bytes
        if usage.chunks < len(stored) or usage.used_bytes < least:
            raise Breach(
                f"{len(stored)} chunks of {least} bytes are stored; usage says {usage.chunks} "
                f"of {usage.used_bytes} bytes"
            )


@check(Hook.SMALL_TIER, says="The tier is full and could not make room.")
async def check_a_full_tier_refuses_or_makes_room(subject: TierSubject) -> None:
    """A store into a full tier succeeds or is a TierCapacityError, and nothing is torn."""
    assert subject.small_tier is not None
    small = tier_spec(subject.small_tier(subject.context().object_bytes))
    async with subject.opened(small) as probe:
        kept = []
        for key in subject.new_keys(_MORE_THAN_FIT):
            (verdict,) = await probe.store([probe.full(key)])
            if verdict is None:
                kept.append(key)
            elif not isinstance(verdict, TierCapacityError):
                raise Breach(f"a store into a full tier: {told(verdict)}")
        there = 0
        for key in kept:
            found = await probe.get(key)
            if isinstance(found, bytes):
                probe.judge(key, found, [0])
                there += 1
            elif not is_miss(found):
                raise Breach(f"loading from a full tier: {told(found)}")
        if there == _MORE_THAN_FIT:
            raise Breach(f"small_tier made a tier that holds {_MORE_THAN_FIT} chunks")
