"""A tier's lifetime with every kind of call, for the checks of leaks and of a blocked loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

from kvtier_sdk.errors import TierError
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.testing.conformance.probe import Probe
from kvtier_sdk.testing.conformance.rules import Breach
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability

#: The longest wait of :func:`wait_until_gone`, in settling times.
_SETTLINGS = 20
_POLL_S = 0.002


async def use(probe: Probe) -> None:
    """Store, look up, load, miss and cancel; other checks judge the outcomes."""
    keys = probe.subject.new_keys(3)
    with contextlib.suppress(Breach, TierError):
        await probe.store([probe.full(key) for key in keys[:2]])
        await probe.lookup(keys)
        await probe.load([probe.empty(key) for key in keys])
        for operation in ("store", "load"):
            lent = probe.full(keys[0])
            task = probe.start(getattr(probe.tier, operation)([lent.transfer]), operation)
            await asyncio.sleep(0)
            task.cancel()
            await probe.ends(task)
        if Capability.SCAN in probe.tier.capabilities:
            await probe.scan()
        if Capability.USAGE in probe.tier.capabilities:
            await probe.bounded(probe.tier.usage(), "usage")


async def run_tier(subject: TierSubject) -> None:
    """Open an instance, use it, and close it."""
    async with subject.opened() as probe:
        await use(probe)


async def run_on_new_loop(subject: TierSubject, body: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function on a new event loop in another thread, and close the loop."""

    raised: list[BaseException] = []

    def run() -> None:
        loop = subject.clock.new_event_loop()
        try:
            loop.run_until_complete(_awaited(body))
        except BaseException as error:
            raised.append(error)
        finally:
            end_event_loop(loop, subject.clock)

    # Not through run_blocking, whose threads stay until this loop is closed.
    thread = threading.Thread(target=run, name="new loop", daemon=True)
    thread.start()
    while thread.is_alive():
        await subject.clock.sleep(_POLL_S)
    if raised:
        raise raised.pop()


async def wait_until_gone(subject: TierSubject, left: Callable[[], list[str]]) -> list[str]:
    """Poll ``left`` until it returns nothing or time is up; return its last answer."""
    for _ in range(_SETTLINGS):
        if not left():
            return []
        await subject.clock.sleep(subject.settle_s)
    return left()


async def _awaited(body: Callable[[], Awaitable[None]]) -> None:
    await body()
