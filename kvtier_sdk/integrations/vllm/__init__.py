"""kvtier under vLLM's offloading connector, by configuration alone.

A class is imported when vLLM asks for it by name, not before: vLLM also imports this package just
to find the plugin, in processes that offload nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_sdk.integrations import import_when_named

if TYPE_CHECKING:
    from kvtier_sdk.integrations.vllm.cpu_tiering import KVTierCPUTieringSpec
    from kvtier_sdk.integrations.vllm.secondary_tier import KVTierSecondaryTier
    from kvtier_sdk.integrations.vllm.spec import KVTierOffloadingSpec

__all__ = ["KVTierCPUTieringSpec", "KVTierOffloadingSpec", "KVTierSecondaryTier"]

#: Class name to the module of this package that defines it.
HOMES = {
    "KVTierCPUTieringSpec": "cpu_tiering",
    "KVTierOffloadingSpec": "spec",
    "KVTierSecondaryTier": "secondary_tier",
}

__getattr__ = import_when_named(__name__, HOMES)
