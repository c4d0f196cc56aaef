"""The tiering manager: what an engine's scheduler calls."""

from kvtier_sdk.tiering.assembly import open_manager
from kvtier_sdk.tiering.manager import LoadSpec, PrepareStoreOutput, TieringManager

__all__ = ["LoadSpec", "PrepareStoreOutput", "TieringManager", "open_manager"]
