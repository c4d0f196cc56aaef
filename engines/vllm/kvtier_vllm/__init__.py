"""kvtier under vLLM's offloading connector, enabled through vLLM's configuration.

Each class is imported at its first use, because vLLM imports this package in every process to find
the plugin, even if the process offloads nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_vllm.cache_policy import KVTierCachePolicy
    from kvtier_vllm.cpu_tiering import KVTierCPUTieringSpec
    from kvtier_vllm.secondary_tier import KVTierSecondaryTier
    from kvtier_vllm.spec import KVTierOffloadingSpec

__all__ = [
    "KVTierCPUTieringSpec",
    "KVTierCachePolicy",
    "KVTierOffloadingSpec",
    "KVTierSecondaryTier",
]

#: The module that defines each public class.
HOMES = {
    "KVTierCachePolicy": "cache_policy",
    "KVTierCPUTieringSpec": "cpu_tiering",
    "KVTierOffloadingSpec": "spec",
    "KVTierSecondaryTier": "secondary_tier",
}


def __getattr__(name: str) -> type:
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: type = getattr(import_module(f"{__name__}.{home}"), name)
    return found
