"""kvtier as a storage backend for SGLang's hierarchical cache, enabled by its configuration."""

from kvtier_sglang.storage import KVTierHiCacheStorage

__all__ = ["KVTierHiCacheStorage"]
