"""Checks of a tier that a tool opens beside the engines that use it."""

from __future__ import annotations

from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.rules import Breach, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability, Medium


@check(
    Capability.NAMESPACES,
    Medium.STORAGE,
    says="this tier's own, if it is there, and all others in its place.",
)
async def check_namespaces_are_listed(subject: TierSubject) -> None:
    """Every namespace with a chunk is listed once, with the facts of its manifest."""
    theirs = Namespace({**subject.namespace.facts, "dtype": "another"})
    stored = []
    for namespace in (subject.namespace, theirs):
        async with subject.opened(namespace=namespace) as probe:
            if await probe.put(subject.new_keys(1)):
                stored.append(namespace)
    async with subject.opened(namespace=_unused(subject), maintenance=True) as probe:
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
    """A tier that is opened for maintenance leaves no trace of a namespace without chunks."""
    unused = _unused(subject)
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
    """A tier that is opened for maintenance leaves chunks as recently used as they were."""
    async with subject.opened() as engine, subject.opened(maintenance=True) as probe:
        stored = await engine.put(subject.new_keys(2))
        before = {entry.key: entry.used_s for entry in await probe.scan()}
        # A store may give times in whole seconds.
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


#: Between one and two steps of a store whose times are in whole seconds.
_RESOLUTION_S = 1.5


def _unused(subject: TierSubject) -> Namespace:
    return Namespace({**subject.namespace.facts, "dtype": "of no engine"})
