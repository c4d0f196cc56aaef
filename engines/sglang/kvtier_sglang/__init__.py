"""kvtier as a storage backend for SGLang's hierarchical cache, enabled in SGLang's options."""

from kvtier_sglang.storage import KVTierHiCacheStorage

__all__ = ["KVTierHiCacheStorage"]
