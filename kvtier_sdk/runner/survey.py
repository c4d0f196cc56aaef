"""The contents of a tier's store, for the log and for metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierError
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.options.place import brief
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import UsageChanged
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.types import Capability, Usage

#: How long the store may take to tell its usage, and again to list its namespaces.
_ANSWER_S = 5.0
#: Interval between queries of the usage.
_INTERVAL_S = 5.0
#: Namespaces that differ in more facts belong to different models or machines.
_MOST_FACTS = 2
#: Advice on a difference, where the name of the fact is not enough.
_ADVICE = {
    "hash_seed": "set PYTHONHASHSEED to one value for all engines",
    "model_revision": "if both are the same model, set option 'model_revision' to one value",
}


class StoreWatch:
    """Logs the contents of a tier's store once it is open, and reports its usage from then on."""

    def __init__(
        self,
        call: TierCaller,
        clock: Clock,
        log: TierLog,
        report: Callable[[UsageChanged], None],
        may_ask: Callable[[], bool],
    ) -> None:
        self._call = call
        self._clock = clock
        self._log = log
        self._report = report
        self._may_ask = may_ask
        self._told = UsageChanged()

    async def run(self) -> None:
        """Log the contents once, then report the usage at intervals, if the tier can tell it."""
        can_say = Capability.USAGE in self._call.tier.capabilities
        usage = await self._ask() if can_say else None
        await self._log_contents(usage)
        while can_say:
            self._tell(usage)
            await self._clock.sleep(_INTERVAL_S)
            usage = await self._ask()

    async def _ask(self) -> Usage | None:
        if self._may_ask():
            try:
                async with self._clock.timeout(_ANSWER_S):
                    return await self._call.usage()
            except (TierError, TimeoutError) as error:
                self._log.debug("its usage cannot be read: %s", error or "too slow")
        return None

    def _tell(self, usage: Usage | None) -> None:
        told = UsageChanged(usage)
        if told != self._told:
            self._told = told
            self._report(told)

    async def _log_contents(self, usage: Usage | None) -> None:
        if not self._log.isEnabledFor(logging.INFO):
            return
        self._log.info("open%s", "" if usage is None else f": {contents_in_words(usage)}")
        if usage is not None and not usage.chunks:
            return
        try:
            async with self._clock.timeout(_ANSWER_S):
                nearest = await _nearest_namespace(self._call)
        except (TierError, TimeoutError) as error:
            self._log.debug("its namespaces cannot be listed: %s", error or "too slow")
        else:
            if nearest is not None:
                own = self._call.tier.context.namespace
                self._log.warning("%s", _difference_in_words(own, nearest))


def contents_in_words(usage: Usage) -> str:
    """Describe usage in words: ``"40 chunks, 3.1 GiB of 64 GiB, disk has 12 GiB free"``."""
    free = usage.free_bytes
    disk = "" if free is None else f", disk has {format_bytes(free)} free"
    if not (usage.chunks or usage.used_bytes):
        return f"empty{disk}"
    chunks = "" if usage.chunks is None else f"{usage.chunks:,} chunk{'s'[: usage.chunks != 1]}, "
    capacity = usage.capacity_bytes
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    return f"{chunks}{format_bytes(usage.used_bytes)}{of}{disk}"


async def _nearest_namespace(call: TierCaller) -> StoredNamespace | None:
    """Find the namespace most like the tier's own, if its own has no chunks."""
    if Capability.SCAN | Capability.NAMESPACES not in call.tier.capabilities:
        return None
    async for _ in call.entries():
        return None
    own = call.tier.context.namespace
    near = [
        (len(own.differences(found.facts)), found)
        async for found in call.namespaces()
        if found != own
    ]
    few, nearest = min(near, key=lambda item: item[0], default=(0, None))
    return nearest if 0 < few <= _MOST_FACTS else None


def _difference_in_words(own: Namespace, other: StoredNamespace) -> str:
    differences: Mapping[str, tuple[object, object]] = own.differences(other.facts)
    facts = ", ".join(
        f"{brief(name)} ({brief(repr(theirs))} there, {brief(repr(ours))} here)"
        for name, (ours, theirs) in differences.items()
    )
    advice = "; ".join(_ADVICE[name] for name in differences if name in _ADVICE)
    return (
        f"nothing here can be hit yet: there is no chunk of this engine's namespace "
        f"{own.fingerprint}; the nearest one, {other.fingerprint}, differs only in {facts}"
        f"{advice and f'; {advice}'}"
    )
