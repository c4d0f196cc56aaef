"""Logs the host pool, the tiers and their namespace when an engine starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import version
from urllib.parse import unquote

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.core_form import CORE
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.secrets import url_without_password
from kvtier_sdk.options.tier import BoundedTierConfig, ExpiringTierConfig
from kvtier_sdk.options.units import format_bytes, format_seconds
from kvtier_sdk.pool import PoolMemory
from kvtier_sdk.runner import ProcessRunner, TierRunner

_log = logging.getLogger("kvtier")

_COMPRESSED = {"auto": "compressed if faster", "always": "compressed", "fp8": "rounded to fp8"}


def log_start(
    pool: PoolMemory, policy: str, tiers: Iterable[tuple[TierSpec, TierRunner]], engine: Namespace
) -> None:
    chunk_bytes = pool.chunk_bytes
    common = engine.for_chunks(chunk_bytes).fingerprint
    # Some engines' slots overlap, so fewer chunks than slots fit into the memory.
    slots = min(pool.slots, pool.region.size_bytes // chunk_bytes)
    chunks = f"{slots:,} chunks of {format_bytes(chunk_bytes)}"
    memory = "shared between processes" if pool.is_shared else "of this process"
    lines = [
        f"kvtier {version('kvtier-sdk')} ({CORE} core) offloads to",
        f"host pool: {format_bytes(slots * chunk_bytes)}, {chunks}, {memory}; eviction by {policy}",
    ]
    for spec, runner in tiers:
        own = spec.namespace_of(engine, chunk_bytes).fingerprint
        apart = "" if own == common else f", namespace {own}"
        lines.append(f"tier {spec.name} ({spec.backend}): {_tier_in_words(spec, runner)}{apart}")
    lines.append(f"namespace {common}")
    _log.info("%s", "\n  ".join(lines))


def _tier_in_words(spec: TierSpec, runner: TierRunner) -> str:
    config, common = spec.config, spec.runner
    location = config.location()
    facts = [] if location is None else [url_without_password(unquote(location))]
    if isinstance(config, BoundedTierConfig):
        capacity = config.capacity_bytes
        facts += ["no capacity limit" if capacity is None else f"up to {format_bytes(capacity)}"]
    if isinstance(config, ExpiringTierConfig) and config.ttl_s is not None:
        facts += [f"chunks expire after {format_seconds(config.ttl_s)}"]
    if isinstance(config, ExpiringTierConfig) and config.max_age_s is not None:
        facts += [f"chunks expire at an age of {format_seconds(config.max_age_s)}"]
    facts += [f"store policy {common.store_policy}"]
    if common.codec is not None:
        facts += [f"sealed by {common.codec_name}"]
    if common.compress != "never" and not spec.tier_class.fixed_length:
        facts += [_COMPRESSED[common.compress]]
    facts += ["in a process" if isinstance(runner, ProcessRunner) else "in a thread"]
    if common.required:
        facts += ["required"]
    return ", ".join(facts)
