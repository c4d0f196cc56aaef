from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_sdk import ConfigError, Region
from kvtier_sdk.engine import ROW_ALIGNMENT, EngineMemory

if TYPE_CHECKING:
    from lmcache.v1.distributed.internal_api import L1MemoryDesc


def l1_memory(description: L1MemoryDesc | None) -> EngineMemory:
    if description is None:
        raise ConfigError(
            "kvtier needs an L1 in this machine's memory, and LMCache has none here: leave out "
            "--gds-l1-path"
        )
    if description.align_bytes % ROW_ALIGNMENT or description.ptr % ROW_ALIGNMENT:
        raise ConfigError(
            f"LMCache's objects begin at multiples of {description.align_bytes} bytes; kvtier "
            f"needs {ROW_ALIGNMENT}: give --l1-align-bytes {ROW_ALIGNMENT}"
        )
    return EngineMemory("LMCache", Region(description.ptr, description.size))
