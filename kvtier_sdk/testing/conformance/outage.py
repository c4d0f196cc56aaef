"""Checks of what a tier says while its store cannot be reached, and afterwards."""

from __future__ import annotations

import contextlib

from kvtier_sdk.errors import TierError, TierUnavailableError
from kvtier_sdk.testing.conformance.probe import Probe, told
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject

_OUTAGE = "An outage is a TierUnavailableError, never False from lookup."


@check(Hook.BREAK_CONNECTION, says=_OUTAGE)
async def check_an_outage_is_no_miss(subject: TierSubject) -> None:
    """While the store cannot be reached, lookup, store and load say TierUnavailableError."""
    async with subject.opened() as probe:
        stored = await probe.put_one()
        (absent,) = subject.new_keys(1)
        await subject.call(Hook.BREAK_CONNECTION)
        try:
            await _check_lookup(probe, absent, stored)
            await _check_transfers(probe, absent, stored)
        finally:
            await _restore(subject)


@check(
    Hook.BREAK_CONNECTION,
    Hook.RESTORE_CONNECTION,
    says="whether the same call may succeed in a moment",
)
async def check_a_tier_comes_back_after_an_outage(subject: TierSubject) -> None:
    """When the store can be reached again, so can the tier, without being opened anew."""
    async with subject.opened() as probe:
        await probe.put_one()
        await subject.call(Hook.BREAK_CONNECTION)
        try:
            with contextlib.suppress(TierError):
                await probe.lookup(subject.new_keys(1))
        finally:
            await _restore(subject)
        said = await _said_until_well(probe)
        if said is not None:
            raise Breach(
                f"{subject.patience_s:g} s after the store could be reached again, lookup still "
                f"says {told(said)}"
            )
        if (key := await probe.put_one()) is not None:
            await probe.expect(key, 0)


async def _check_lookup(probe: Probe, *keys: bytes | None) -> None:
    for key in keys:
        if key is None:
            continue
        try:
            (answer,) = await probe.lookup([key])
        except TierUnavailableError:
            continue
        except TierError as error:
            raise Breach(f"the store cannot be reached, and lookup says {told(error)}") from error
        if not answer:
            raise Breach("the store cannot be reached, and lookup says False")


async def _check_transfers(probe: Probe, absent: bytes, stored: bytes | None) -> None:
    verdicts = await probe.store([probe.full(absent)])
    for key in (absent, stored):
        if key is not None:
            lent = probe.empty(key)
            verdicts += await probe.load([lent])
            if verdicts[-1] is None:
                # A tier may have it in a cache, but then whole.
                probe.judge(key, lent.content, [0])
    for verdict in verdicts:
        if verdict is not None and not isinstance(verdict, TierUnavailableError):
            raise Breach(f"the store cannot be reached, and the tier says {told(verdict)}")


async def _restore(subject: TierSubject) -> None:
    if subject.has(Hook.RESTORE_CONNECTION):
        await subject.call(Hook.RESTORE_CONNECTION)


async def _said_until_well(probe: Probe) -> TierError | None:
    """Ask until the tier answers; its last complaint where it does not."""
    subject = probe.subject
    end_s = subject.clock.now_s() + subject.patience_s
    while True:
        try:
            await probe.lookup(subject.new_keys(1))
        except TierError as error:
            if subject.clock.now_s() > end_s:
                return error
            await subject.clock.sleep(subject.settle_s)
        else:
            return None
