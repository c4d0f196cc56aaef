"""The lines of the log that say, at an engine's start, what it offloads to."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import version
from urllib.parse import unquote

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.secrets import url_without_password
from kvtier_sdk.options.tier import BoundedTierConfig, ExpiringTierConfig
from kvtier_sdk.options.units import format_bytes, format_seconds
from kvtier_sdk.runner import PoolMemory, ProcessRunner, TierRunner

_log = logging.getLogger("kvtier")


def log_start(pool: str, tiers: Iterable[str]) -> None:
    """Log one block: the host pool, and a line for each tier."""
    lines = [f"kvtier {version('kvtier-sdk')} offloads to", pool, *tiers]
    _log.info("%s", "\n  ".join(lines))


def pool_in_words(pool: PoolMemory, policy: str) -> str:
    """Write a host pool down for people.

    Args:
        pool: the pool.
        policy: the eviction policy's name, or the manager that evicts.
    """
    size = format_bytes(pool.slots * pool.chunk_bytes)
    chunks = f"{pool.slots:,} chunks of {format_bytes(pool.chunk_bytes)}"
    memory = "shared between processes" if pool.is_shared else "of this process"
    return f"host pool: {size}, {chunks}, {memory}; eviction: {policy}"


def tier_in_words(spec: TierSpec, runner: TierRunner, namespace: Namespace) -> str:
    """Write a tier down for people.

    Args:
        spec: the tier.
        runner: runs it.
        namespace: of its chunks.
    """
    config, common = spec.config, spec.runner
    location = config.location()
    facts = [] if location is None else [url_without_password(unquote(location))]
    if isinstance(config, BoundedTierConfig):
        capacity = config.capacity_bytes
        facts += ["no capacity limit" if capacity is None else f"up to {format_bytes(capacity)}"]
    if isinstance(config, ExpiringTierConfig) and config.ttl_s is not None:
        facts += [f"chunks expire after {format_seconds(config.ttl_s)}"]
    facts += [f"store policy {common.store_policy}"]
    if common.codec is not None:
        facts += [f"sealed by {common.codec.partition(':')[0]}"]
    facts += ["a process of its own" if isinstance(runner, ProcessRunner) else "a thread"]
    if common.required:
        facts += ["required"]
    facts += [f"namespace {namespace.fingerprint}"]
    return f"tier {spec.name} ({spec.backend}): {', '.join(facts)}"
