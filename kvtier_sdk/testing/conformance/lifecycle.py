"""Checks of opening and closing."""

from __future__ import annotations

import asyncio

from kvtier_sdk.errors import ConfigError, TierError
from kvtier_sdk.testing.conformance.exercise import use
from kvtier_sdk.testing.conformance.probe import Probe, told
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject, tier_spec
from kvtier_sdk.types import Medium

_CLOSE = "Let go of everything, in bounded time, also after open has failed."


@check(says=_CLOSE)
async def check_close_ends(subject: TierSubject) -> None:
    """Close ends, soon, whether the tier was used or not."""
    async with subject.opened() as probe:
        await probe.close()
    async with subject.opened() as probe:
        await use(probe)
        await probe.close()


@check(says="A second call does nothing.")
async def check_closing_twice_is_harmless(subject: TierSubject) -> None:
    """A second close does nothing."""
    async with subject.opened() as probe:
        await probe.put_one()
        await probe.close()
        await probe.close()


@check(says="Calls that are under way end, with a result or an error.")
async def check_close_ends_what_runs(subject: TierSubject) -> None:
    """Calls that are under way when the tier is closed end, and so does close."""
    async with subject.opened() as probe:
        key = await probe.put_one() or subject.new_keys(1)[0]
        transfers = [probe.empty(key).transfer for _ in range(8)]
        calls = [probe.start(probe.tier.load([one]), "under way") for one in transfers]
        await asyncio.sleep(0)
        await probe.close()
        for call in calls:
            if not await probe.ends(call):
                call.cancel()
                raise Breach(f"a load had not ended {subject.patience_s:g} s after close")
            if not call.cancelled():
                # What it came to does not matter.
                call.exception()


@check(Hook.BAD_SETTINGS, says="a setting cannot work.")
async def check_bad_settings_fail_in_open(subject: TierSubject) -> None:
    """Open says what is wrong with a setting that cannot work, and close is possible after it."""
    for what, tier in (subject.bad_settings or {}).items():
        spec = tier_spec(tier)
        probe = Probe(subject, subject.make(spec))
        try:
            await probe.open()
        except (ConfigError, TierError):
            await probe.close()
            continue
        finally:
            await probe.clean_up()
        raise Breach(f"{what}: open succeeded")


@check(Medium.STORAGE, says="None once a later load will find the chunk.")
async def check_chunks_outlive_the_instance(subject: TierSubject) -> None:
    """What one instance stored, the next one finds."""
    async with subject.opened() as probe:
        key = await probe.put_one()
        if key is None:
            return
        await probe.close()
    async with subject.opened() as probe:
        if await probe.lookup([key]) != [True]:
            raise Breach("an instance does not find what the one before it stored")
        found = await probe.get(key)
        if not isinstance(found, bytes):
            raise Breach(f"an instance cannot load what the one before it stored: {told(found)}")
        probe.judge(key, found, [0])
