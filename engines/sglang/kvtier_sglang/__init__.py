"""kvtier as a storage backend of SGLang's hierarchical cache, by configuration alone."""

from kvtier_sglang.storage import KVTierHiCacheStorage

__all__ = ["KVTierHiCacheStorage"]
