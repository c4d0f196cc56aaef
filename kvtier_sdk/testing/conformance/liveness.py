"""The check that a tier never blocks its event loop."""

from __future__ import annotations

from kvtier_sdk.testing.conformance.exercise import use
from kvtier_sdk.testing.conformance.loop_watch import LoopWatch
from kvtier_sdk.testing.conformance.rules import Breach, check
from kvtier_sdk.testing.conformance.subject import TierSubject

_MANY = 64


@check(says="A tier never blocks that loop")
async def check_the_loop_is_never_blocked(subject: TierSubject) -> None:
    """The event loop keeps turning, from open to close."""
    watch = LoopWatch(subject.clock, subject.blocking_s)
    async with watch.watching(), subject.opened() as probe:
        await use(probe)
        await probe.lookup(subject.new_keys(_MANY))
        await probe.store([probe.full(key) for key in subject.new_keys(_MANY)])
    if watch.blocked_at is not None:
        raise Breach(
            f"the event loop stood still for {subject.blocking_s:g} s in\n{watch.blocked_at}"
        )
