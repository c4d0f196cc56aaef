"""Checks of optional capabilities, of full tiers, and of tiers opened for maintenance."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

from kvtier_sdk.errors import ChunkNotFoundError, TierCapacityError
from kvtier_sdk.testing.conformance.probe import Probe, describe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check, check_opened
from kvtier_sdk.testing.conformance.subject import TierSubject, tier_spec
from kvtier_sdk.types import Capability, Medium, OffloadKey

_MORE_THAN_FIT = 100
#: A pause of more than a second, because some stores record times in whole seconds.
_RESOLUTION_S = 1.5


@check_opened(Capability.DELETE, says="Delete chunks; ignore missing chunks.")
async def check_delete_forgets(subject: TierSubject, probe: Probe) -> None:
    """Delete removes the given chunks and no others, and ignores missing chunks."""
    first, middle, last = await probe.put_all(3)
    await probe.delete([first, *subject.new_keys(1), last])
    if any(await probe.lookup([first, last])):
        raise Breach("lookup finds a chunk that was deleted")
    for key in (first, last):
        found = await probe.get(key)
        if not isinstance(found, ChunkNotFoundError):
            raise Breach(f"loading a chunk that was deleted gave {describe(found)}")
    await probe.expect(middle, 0)
    if await probe.put([first], version=1):
        await probe.expect(first, 1)


@check_opened(Capability.TOUCH, says="Mark chunks as just used; ignore unknown chunks.")
async def check_touch_changes_nothing(subject: TierSubject, probe: Probe) -> None:
    """Touch changes no chunk, and ignores unknown keys."""
    stored = await probe.put(subject.new_keys(2))
    (absent,) = subject.new_keys(1)
    await probe.touch([*stored, absent])
    for key in stored:
        await probe.expect(key, 0)
    if await probe.lookup([absent]) != [False]:
        raise Breach("lookup finds a chunk that was touched but never stored")


@check_opened(Capability.SCAN, says="Iterate over the stored chunks of this namespace.")
async def check_scan_lists_what_is_stored(subject: TierSubject, probe: Probe) -> None:
    """Scan lists every stored chunk once, with the length of its object."""
    before = {entry.key for entry in await probe.scan()}
    lengths = dict(zip(subject.new_keys(3), cycle(probe.object_lengths()), strict=False))
    stored = await probe.put(lengths, object_lengths=lengths.values())
    entries = await probe.scan()
    if strangers := {entry.key for entry in entries} - before - set(stored):
        raise Breach(f"scan lists a chunk that was never stored: {strangers.pop().hex()}")
    for key in stored:
        listed = [entry.object_bytes for entry in entries if entry.key == key]
        if listed != [lengths[key]]:
            raise Breach(
                f"an object of {lengths[key]} bytes was stored; scan lists "
                + (f"it with {listed}" if listed else "nothing under its key")
            )


@check_opened(Capability.USAGE, says="Return how full the tier is.")
async def check_usage_counts_what_is_stored(subject: TierSubject, probe: Probe) -> None:
    """Usage counts at least the chunks that were stored, by this instance or another."""
    stored = await probe.put(subject.new_keys(4))
    await _check_usage(probe, len(stored), "")
    if subject.tier_class.medium is Medium.STORAGE:
        async with subject.opened() as other:
            await _check_usage(other, len(stored), " of a second instance")


async def _check_usage(probe: Probe, stored: int, whose: str) -> None:
    usage = await probe.bounded(probe.tier.usage(), "usage")
    least = stored * probe.object_bytes
    is_short = usage.chunks is not None and usage.chunks < stored
    if is_short or usage.used_bytes < least:
        raise Breach(
            f"{stored} chunks of {least} bytes together are stored; usage{whose} returned "
            f"{usage.chunks} chunks of {usage.used_bytes} bytes"
        )


@check(Hook.SMALL_TIER, says="The tier is full and could not make room.")
async def check_a_full_tier_refuses_or_makes_room(subject: TierSubject) -> None:
    """A store into a full tier succeeds or fails with a TierCapacityError, and damages no chunk."""
    small = tier_spec(await subject.call(Hook.SMALL_TIER, subject.context().object_bytes))
    async with subject.opened(small) as probe:
        kept = []
        for key in subject.new_keys(_MORE_THAN_FIT):
            (verdict,) = await probe.store([probe.full(key)])
            if verdict is None:
                kept.append(key)
            elif not isinstance(verdict, TierCapacityError):
                raise Breach(f"a store into a full tier gave {describe(verdict)}")
        there = [await probe.expect(key, 0, may_miss=True, what="from a full tier") for key in kept]
        if sum(there) == _MORE_THAN_FIT:
            raise Breach(
                f"small_tier made a tier with room for {_MORE_THAN_FIT} chunks; it must be smaller"
            )


@check(Hook.SMALL_TIER, says="reports to the SDK that chunks are gone from the tier.")
async def check_a_reported_removal_is_true(subject: TierSubject) -> None:
    """A chunk that a full tier reports as removed was stored before, and is no longer there."""
    small = tier_spec(await subject.call(Hook.SMALL_TIER, subject.context().object_bytes))
    removed: list[OffloadKey] = []

    def report(keys: Iterable[OffloadKey], /, **why: bool) -> None:
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
    """An expired chunk is absent for both lookup and load, and can be stored again."""
    async with subject.opened(tier_spec(await subject.call(Hook.SHORT_LIVED_TIER))) as probe:
        key = await probe.put_one()
        await _wait_for_expiry(probe, key)
        found = await probe.get(key)
        if not isinstance(found, ChunkNotFoundError):
            what = describe(found)
            raise Breach(f"lookup returned False for an expired chunk, and a load gave {what}")
        if await probe.put([key], version=1):
            await probe.expect(key, 1)


@check(Hook.AGING_TIER, says="A missing object is a ChunkNotFoundError.")
async def check_no_use_extends_the_maximum_age(subject: TierSubject) -> None:
    """A chunk is absent after its maximum age, even if it is used all the time."""
    async with subject.opened(tier_spec(await subject.call(Hook.AGING_TIER))) as probe:
        key = await probe.put_one()
        await _wait_for_expiry(probe, key, in_use=True)
        if await probe.put([key], version=1):
            await probe.expect(key, 1)


async def _wait_for_expiry(probe: Probe, key: OffloadKey, *, in_use: bool = False) -> None:
    clock, timeout_s = probe.subject.clock, probe.subject.timeout_s
    end_s = clock.now_s() + timeout_s
    while await probe.lookup([key]) == [True]:
        if clock.now_s() > end_s:
            raise Breach(f"lookup still finds a chunk {timeout_s:g} s after its store")
        if in_use:
            await probe.get(key)
            if Capability.TOUCH in probe.tier.capabilities:
                await probe.touch([key])
        await clock.sleep(probe.subject.settle_s)


@check(
    Capability.NAMESPACES,
    Medium.STORAGE,
    says="Every namespace in the same place that has a chunk or a manifest, also the tier's own.",
)
async def check_namespaces_are_listed(subject: TierSubject) -> None:
    """Every namespace with a chunk is listed once, with the facts of its manifest."""
    stored = []
    for namespace in (subject.namespace, subject.new_namespace()):
        async with subject.opened(namespace=namespace) as probe:
            if await probe.put(subject.new_keys(1)):
                stored.append(namespace)
    async with subject.opened(namespace=subject.new_namespace(), maintenance=True) as probe:
        found = await probe.namespaces()
    for namespace in stored:
        listed = [one for one in found if one.fingerprint == namespace.fingerprint]
        if len(listed) != 1:
            raise Breach(
                f"a chunk was stored in the namespace {namespace.fingerprint}; namespaces lists it "
                f"{len(listed)} times"
            )
        for name, (ours, listed_as) in namespace.differences(listed[0].facts).items():
            raise Breach(f"the fact {name!r} of a namespace is {ours!r}, listed as {listed_as!r}")


@check(Capability.NAMESPACES, Medium.STORAGE, says="``open`` makes no namespace and evicts nothing")
async def check_maintenance_makes_no_namespace(subject: TierSubject) -> None:
    """A tier that is opened for maintenance does not create its namespace."""
    unused = subject.new_namespace()
    async with subject.opened() as probe:
        await probe.put(subject.new_keys(1))
    async with subject.opened(namespace=unused, maintenance=True) as probe:
        keys = subject.new_keys(2)
        if any(await probe.lookup(keys)):
            raise Breach("lookup finds a chunk in a namespace that nothing was stored in")
        await probe.get(keys[0])
        found = await probe.namespaces()
    if any(one.fingerprint == unused.fingerprint for one in found):
        raise Breach("a namespace that was opened for maintenance, and never stored in, is listed")


@check(
    Capability.NAMESPACES,
    Capability.SCAN,
    Medium.STORAGE,
    says="``lookup`` and ``load`` record no use and remove nothing.",
)
async def check_maintenance_records_no_use(subject: TierSubject) -> None:
    """A tier that is opened for maintenance records no use of chunks."""
    async with subject.opened() as engine, subject.opened(maintenance=True) as probe:
        stored = await engine.put(subject.new_keys(2))
        before = {entry.key: entry.used_s for entry in await probe.scan()}
        await subject.clock.sleep(_RESOLUTION_S)
        await probe.lookup(stored)
        for key in stored:
            await probe.expect(key, 0)
        after = {entry.key: entry.used_s for entry in await probe.scan()}
    for key in stored:
        if key not in after:
            raise Breach("a chunk that was read for maintenance is gone")
        used_s, then_s = after[key], before.get(key)
        if used_s is not None and then_s is not None and used_s >= then_s + _RESOLUTION_S:
            raise Breach("a chunk that was read for maintenance counts as used just now")
