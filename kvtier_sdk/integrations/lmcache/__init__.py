"""kvtier under LMCache's multiprocess mode, by configuration alone.

A class is imported when LMCache asks for it by name, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_sdk.integrations.lmcache.adapter import KVTierL2Adapter
    from kvtier_sdk.integrations.lmcache.config import KVTierL2AdapterConfig

__all__ = ["KVTierL2Adapter", "KVTierL2AdapterConfig"]

#: Class name to the module of this package that defines it.
HOMES = {"KVTierL2Adapter": "adapter", "KVTierL2AdapterConfig": "config"}


def __getattr__(name: str) -> type:
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: type = getattr(import_module(f"{__name__}.{home}"), name)
    return found
