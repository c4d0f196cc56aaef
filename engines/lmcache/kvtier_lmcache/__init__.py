"""kvtier as an L2 adapter for LMCache, enabled in LMCache's configuration."""

from kvtier_lmcache.adapter import KVTierL2Adapter
from kvtier_lmcache.config import KVTierL2AdapterConfig

__all__ = ["KVTierL2Adapter", "KVTierL2AdapterConfig"]
