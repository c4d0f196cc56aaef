"""The tiering manager: what an engine's scheduler calls."""

from kvtier_sdk.config.tiering import TieringConfig
from kvtier_sdk.tiering.assembly import open_manager, open_pool
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.outputs import LoadSpec, MissReason, PrepareStoreOutput, ResetScope

__all__ = [
    "LoadSpec",
    "MissReason",
    "PrepareStoreOutput",
    "ResetScope",
    "TieringConfig",
    "TieringManager",
    "open_manager",
    "open_pool",
]
