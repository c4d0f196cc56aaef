"""Opens host pools, managers and tiers for engines and for tools."""

from kvtier_sdk.opening.pools import open_pool
from kvtier_sdk.opening.tiers import open_manager, open_tier

__all__ = ["open_manager", "open_pool", "open_tier"]
