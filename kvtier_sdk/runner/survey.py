"""The line of a tier's log that says what its store holds when it is opened."""

from __future__ import annotations

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.types import Capability, Usage

#: How long the store may take to say how full it is.
_SURVEY_S = 5.0


async def log_contents(call: TierCaller, clock: Clock, log: TierLog) -> None:
    """Log what the store of a tier that was just opened holds, as far as it says so."""
    contents = None
    if Capability.USAGE in call.tier.capabilities:
        try:
            async with clock.timeout(_SURVEY_S):
                contents = contents_in_words(await call.usage())
        except (TierError, TimeoutError) as error:
            log.debug("its usage cannot be read: %s", error or "too slow")
    log.info("open%s", "" if contents is None else f": {contents}")


def contents_in_words(usage: Usage) -> str:
    """Write a tier's usage for people: ``"51,200 chunks, 100 GiB of 200 GiB"``."""
    if not (usage.chunks or usage.used_bytes):
        return "empty"
    chunks = "" if usage.chunks is None else f"{usage.chunks:,} chunks, "
    capacity = usage.capacity_bytes
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    return f"{chunks}{format_bytes(usage.used_bytes)}{of}"
