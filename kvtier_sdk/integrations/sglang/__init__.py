"""kvtier as a storage backend of SGLang's hierarchical cache, by configuration alone.

A class is imported when SGLang asks for it by name, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_sdk.integrations import import_when_named

if TYPE_CHECKING:
    from kvtier_sdk.integrations.sglang.storage import KVTierHiCacheStorage

__all__ = ["KVTierHiCacheStorage"]

#: Class name to the module of this package that defines it.
HOMES = {"KVTierHiCacheStorage": "storage"}

__getattr__ = import_when_named(__name__, HOMES)
