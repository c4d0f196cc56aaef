"""Checks of opening and closing."""

from __future__ import annotations

import asyncio

from kvtier_sdk.errors import ConfigError, TierError
from kvtier_sdk.runner.opening import may_pass
from kvtier_sdk.testing.conformance.exercise import use
from kvtier_sdk.testing.conformance.probe import Probe, describe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject, tier_spec
from kvtier_sdk.types import Medium

_CLOSE = "Release everything in bounded time, even if open failed."


@check(says=_CLOSE)
async def check_close_ends(subject: TierSubject) -> None:
    """Close ends soon, whether or not the tier was used."""
    async with subject.opened() as probe:
        await probe.close()
    async with subject.opened() as probe:
        await use(probe)
        await probe.close()


@check(says="A second close does nothing.")
async def check_closing_twice_is_harmless(subject: TierSubject) -> None:
    """A second close does nothing."""
    async with subject.opened() as probe:
        await probe.put_one()
        await probe.close()
        await probe.close()


@check(says="Running calls end, with a result or an error.")
async def check_close_ends_what_runs(subject: TierSubject) -> None:
    """Calls that are running when the tier is closed end, and so does close."""
    async with subject.opened() as probe:
        key = await probe.put_one() or subject.new_keys(1)[0]
        transfers = [probe.empty(key).transfer for _ in range(8)]
        calls = [probe.start(probe.tier.load([one]), "running at close") for one in transfers]
        await asyncio.sleep(0)
        await probe.close()
        for call in calls:
            if not await probe.ends(call):
                call.cancel()
                raise Breach(f"a load had not ended {subject.timeout_s:g} s after close")
            if not call.cancelled():
                # Any outcome is allowed; retrieve an error, or asyncio logs it.
                call.exception()


@check(Hook.BAD_SETTINGS, says="neither is tried again. An outage is, until it ends.")
async def check_bad_settings_fail_in_open(subject: TierSubject) -> None:
    """Open fails on a setting that cannot work, for good, and close still works after it."""
    for what, tier in (subject.bad_settings or {}).items():
        spec = tier_spec(tier)
        probe = Probe(subject, subject.make(spec))
        try:
            await probe.open()
        except (ConfigError, TierError) as error:
            if may_pass(error):
                raise Breach(
                    f"a bad setting ({what}) gave {describe(error)}; that is an outage, and open "
                    "is tried again for ever"
                ) from error
            await probe.close()
            continue
        finally:
            await probe.clean_up()
        raise Breach(f"open succeeded with a bad setting: {what}")


@check(says="each works whether or not others close.")
async def check_instances_are_independent(subject: TierSubject) -> None:
    """An instance goes on working when another one on the same place is closed."""
    async with subject.opened() as first, subject.opened() as second:
        await first.put_one()
        await first.close()
        if (key := await second.put_one()) is not None:
            await second.expect(key, 0)


@check(Medium.STORAGE, says="None once a later load will find the chunk.")
async def check_chunks_outlive_the_instance(subject: TierSubject) -> None:
    """An instance finds the chunks that an earlier one stored."""
    async with subject.opened() as probe:
        key = await probe.put_one()
        if key is None:
            return
        await probe.close()
    async with subject.opened() as probe:
        if await probe.lookup([key]) != [True]:
            raise Breach("lookup does not find a chunk that an earlier instance stored")
        found = await probe.get(key)
        if not isinstance(found, bytes):
            raise Breach(f"loading a chunk that an earlier instance stored gave {describe(found)}")
        probe.check_content(key, found, [0])
