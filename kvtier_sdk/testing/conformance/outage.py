"""The check of a tier whose store is unreachable."""

from __future__ import annotations

from collections.abc import Awaitable

from kvtier_sdk.errors import TierError, TierUnavailableError
from kvtier_sdk.testing.conformance.probe import Probe, describe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability

_OUTAGE = "An outage is a TierUnavailableError, never False from lookup."


@check(Hook.BREAK_CONNECTION, says=_OUTAGE)
async def check_an_outage_is_no_miss(subject: TierSubject) -> None:
    """While the store is unreachable, each call that needs it gives a TierUnavailableError."""
    async with subject.opened() as probe:
        stored = await probe.put_one()
        (absent,) = subject.new_keys(1)
        await subject.call(Hook.BREAK_CONNECTION)
        try:
            await _check_lookup(probe, absent, stored)
            await _check_transfers(probe, absent, stored)
            if stored is not None and Capability.DELETE in subject.tier_class.capabilities:
                await _check_raises(probe.bounded(probe.tier.delete([stored]), "delete"), "delete")
            if Capability.SCAN in subject.tier_class.capabilities:
                await _check_raises(probe.scan(), "scan")
        finally:
            await _restore(subject)


async def _check_lookup(probe: Probe, *keys: bytes | None) -> None:
    for key in keys:
        if key is None:
            continue
        try:
            (answer,) = await probe.lookup([key])
        except TierUnavailableError:
            continue
        except TierError as error:
            raise Breach(f"the store is unreachable, and lookup gave {describe(error)}") from error
        if not answer:
            raise Breach("the store is unreachable, and lookup returned False")


async def _check_transfers(probe: Probe, absent: bytes, stored: bytes | None) -> None:
    verdicts = await probe.store([probe.full(absent)])
    for key in (absent, stored):
        if key is not None:
            lent = probe.empty(key)
            verdicts += await probe.load([lent])
            if verdicts[-1] is None:
                # A tier may have the chunk in a cache, but then whole.
                probe.check_content(key, lent.content, [0])
    for verdict in verdicts:
        if verdict is not None and not isinstance(verdict, TierUnavailableError):
            raise Breach(f"the store is unreachable, and the tier gave {describe(verdict)}")


async def _check_raises(call: Awaitable[object], operation: str) -> None:
    try:
        await call
    except TierUnavailableError:
        return
    except TierError as error:
        what = f"the store is unreachable, and {operation} raised {describe(error)}"
        raise Breach(what) from error
    raise Breach(f"the store is unreachable, and {operation} succeeded")


async def _restore(subject: TierSubject) -> None:
    if subject.has(Hook.RESTORE_CONNECTION):
        await subject.call(Hook.RESTORE_CONNECTION)


async def wait_for_recovery(probe: Probe) -> TierError | None:
    """Look up until the tier answers; return its last error if that takes too long."""
    subject = probe.subject
    end_s = subject.clock.now_s() + subject.timeout_s
    while True:
        try:
            await probe.lookup(subject.new_keys(1))
        except TierError as error:
            if subject.clock.now_s() > end_s:
                return error
            await subject.clock.sleep(subject.settle_s)
        else:
            return None
