"""The tiering manager and the client of a single tier, which run in the engine's thread."""

from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.outputs import LoadSpec, MissReason, PrepareStoreOutput, ResetScope
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener

__all__ = [
    "LoadSpec",
    "MissReason",
    "PrepareStoreOutput",
    "ResetScope",
    "TierClient",
    "TierListener",
    "TieringManager",
]
