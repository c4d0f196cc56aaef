"""kvtier-mooncake stores chunks as objects of a Mooncake Store, in the memory of many machines."""

from kvtier_mooncake.config import MooncakeTierConfig
from kvtier_mooncake.tier import MooncakeTier

__version__ = "0.1.0"

__all__ = ["MooncakeTier", "MooncakeTierConfig"]
