"""kvtier under LMCache's multiprocess mode, by configuration alone.

A class is imported when LMCache asks for it by name, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_sdk.integrations import import_when_named

if TYPE_CHECKING:
    from kvtier_sdk.integrations.lmcache.adapter import KVTierL2Adapter
    from kvtier_sdk.integrations.lmcache.config import KVTierL2AdapterConfig

__all__ = ["KVTierL2Adapter", "KVTierL2AdapterConfig"]

#: Class name to the module of this package that defines it.
HOMES = {"KVTierL2Adapter": "adapter", "KVTierL2AdapterConfig": "config"}

__getattr__ = import_when_named(__name__, HOMES)
