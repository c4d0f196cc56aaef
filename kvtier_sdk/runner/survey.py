"""Describes the contents of a tier's store in the log and in metrics."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from kvtier_sdk.errors import TierError
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.options.place import brief
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import UsageChanged
from kvtier_sdk.types import Capability, Usage

T = TypeVar("T")

#: The time limit for one usage query, and for listing the namespaces.
_ANSWER_S = 5.0
_INTERVAL_S = 5.0  # between usage queries
#: Namespaces that differ in more facts than this are assumed to be unrelated.
_MOST_FACTS = 2
_ADVICE = {
    "hash_seed": "set PYTHONHASHSEED to one value for all engines",
    "model_revision": "if both are the same model, set option 'model_revision' to one value",
}


async def watch_store(
    call: TierCaller, report: Callable[[UsageChanged], None], may_ask: Callable[[], bool]
) -> None:
    """Log the store's contents, then report each change of its usage."""

    async def ask() -> Usage | None:
        return await _answer(call, "usage", call.usage()) if may_ask() else None

    can_tell = Capability.USAGE in call.tier.capabilities
    usage = await ask() if can_tell else None
    await _log_contents(call, usage)
    told = UsageChanged()
    while can_tell:
        if (answer := UsageChanged(usage)) != told:
            told = answer
            report(told)
        await call.clock.sleep(_INTERVAL_S)
        usage = await ask()


async def _answer(call: TierCaller, what: str, question: Awaitable[T]) -> T | None:
    try:
        async with call.clock.timeout(_ANSWER_S):
            return await question
    except (TierError, TimeoutError) as error:
        call.log.debug("its %s cannot be read: %s", what, error or "too slow")
        return None


async def _log_contents(call: TierCaller, usage: Usage | None) -> None:
    if not call.log.isEnabledFor(logging.INFO):
        return
    call.log.info("open%s", "" if usage is None else f": {contents_in_words(usage)}")
    if usage is not None and not usage.chunks:
        return
    nearest = await _answer(call, "namespaces", _nearest_namespace(call))
    if nearest is not None:
        call.log.warning("%s", _difference_in_words(call.tier.context.namespace, nearest))


def contents_in_words(usage: Usage) -> str:
    """Return text such as ``"40 chunks, 3.1 GiB of 64 GiB, disk has 12 GiB free"``."""
    free = usage.free_bytes
    disk = "" if free is None else f", disk has {format_bytes(free)} free"
    if not (usage.chunks or usage.used_bytes):
        return f"empty{disk}"
    chunks = "" if usage.chunks is None else f"{usage.chunks:,} chunk{'s'[: usage.chunks != 1]}, "
    capacity = usage.capacity_bytes
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    return f"{chunks}{format_bytes(usage.used_bytes)}{of}{disk}"


async def _nearest_namespace(call: TierCaller) -> StoredNamespace | None:
    """Return the most similar namespace; ``None`` if the engine's own namespace has chunks."""
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
