"""The lines of a tier's log that say what its store holds when it is opened."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierError
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.options.place import brief
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.types import Capability, Usage

#: How long the store may take to answer, and again to list what it holds.
_ANSWER_S = 5.0
#: Two namespaces that differ in more facts are those of two models, or of two machines.
_MOST_FACTS = 2
#: What to do about a difference, where the name of the fact does not say it.
_ADVICE = {
    "hash_seed": "set PYTHONHASHSEED to one value for all engines",
    "model_revision": "if both are the same model, set option 'model_revision' to one value",
}


async def log_contents(call: TierCaller, clock: Clock, log: TierLog) -> None:
    """Log what the store of a tier that was just opened holds, as far as it says so."""
    contents = None
    try:
        if Capability.USAGE in call.tier.capabilities:
            async with clock.timeout(_ANSWER_S):
                contents = await call.usage()
    except (TierError, TimeoutError) as error:
        log.debug("its usage cannot be read: %s", error or "too slow")
    log.info("open%s", "" if contents is None else f": {contents_in_words(contents)}")
    if contents is not None and not contents.chunks:
        return
    try:
        async with clock.timeout(_ANSWER_S):
            nearest = await _nearest_namespace(call)
    except (TierError, TimeoutError) as error:
        log.debug("its namespaces cannot be listed: %s", error or "too slow")
    else:
        if nearest is not None:
            log.warning("%s", _difference_in_words(call.tier.context.namespace, nearest))


def contents_in_words(usage: Usage) -> str:
    """Write a tier's usage for people: ``"51,200 chunks, 100 GiB of 200 GiB"``."""
    if not (usage.chunks or usage.used_bytes):
        return "empty"
    chunks = "" if usage.chunks is None else f"{usage.chunks:,} chunk{'s'[: usage.chunks != 1]}, "
    capacity = usage.capacity_bytes
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    return f"{chunks}{format_bytes(usage.used_bytes)}{of}"


async def _nearest_namespace(call: TierCaller) -> StoredNamespace | None:
    """Find the namespace most like the tier's own in a store that has no chunk of the latter."""
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
        f"{name} ({brief(theirs)} there, {brief(ours)} here)"
        for name, (ours, theirs) in differences.items()
    )
    advice = "; ".join(_ADVICE[name] for name in differences if name in _ADVICE)
    return (
        f"nothing here can be hit yet: there is no chunk of this engine's namespace "
        f"{own.fingerprint}; the nearest one, {other.fingerprint}, differs only in {facts}"
        f"{advice and f'; {advice}'}"
    )
