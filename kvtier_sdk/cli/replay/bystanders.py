"""Checks that a replay or a benchmark cannot evict engines' chunks from a shared store."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

import typer

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.cli.tier.maintenance import MaintainedTier, open_for_maintenance
from kvtier_sdk.cli.tier.selection import named
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError, ReplayError
from kvtier_sdk.options.tier import BoundedTierConfig
from kvtier_sdk.types import Capability

EvictOthersOption = Annotated[
    bool,
    typer.Option("--evict-others", help="Go on although a tier's capacity evicts others' chunks."),
]
#: Namespaces of these tools need no protection, because the chunks of an earlier replay are
#: useless, and a check leaves only a manifest behind.
_OURS = ("kvtier replay", "kvtier bench", "kvtier check")


def check_bystanders(tiers: Iterable[TierSpec], clock: Clock, tool: str = "replay") -> None:
    """Raise :class:`ReplayError` if a tier that lists namespaces could evict others' chunks."""
    for spec in tiers:
        if Capability.NAMESPACES not in spec.tier_class.capabilities:
            continue
        limits = None
        if isinstance(spec.config, BoundedTierConfig) and not (limits := _limits(spec.config)):
            continue
        # Ignore a ConfigError. Either the store does not exist yet and holds nothing, or the replay
        # reports the mistake when it opens the tier.
        with suppress(ConfigError), open_for_maintenance(spec, clock=clock) as tier:
            if limits:
                _check(tier, tool, limits, f"a root or prefix of its own, or leave out {limits}")
            elif tier.usage().capacity_bytes is not None:
                _check(tier, tool, "the server's memory limit", "a server of its own")


def _limits(config: BoundedTierConfig) -> str:
    """Return the names of the options that make a tier evict other namespaces' chunks."""
    given = {"capacity": config.capacity_bytes, "ttl": config.ttl_s, "max_age": config.max_age_s}
    return " and ".join(f"'{name}'" for name, value in given.items() if value is not None)


def _check(tier: MaintainedTier, tool: str, limit: str, advice: str) -> None:
    for found in tier.namespaces():
        if found.facts.get("engine") not in _OURS:
            raise ReplayError(
                f"tier {tier.client.spec.name!r}: {limit} would evict chunks that no {tool} has "
                f"stored, of namespace {named(found)}; give the {tool} {advice}; or let it evict "
                "them with --evict-others"
            )
