"""kvtier-file stores chunks as files in a directory, where they survive a restart."""

from kvtier_file.config import FileTierConfig
from kvtier_file.tier import FileTier

__version__ = "0.1.0"

__all__ = ["FileTier", "FileTierConfig"]
