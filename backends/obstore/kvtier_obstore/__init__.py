"""kvtier-obstore stores chunks as objects in Google Cloud Storage, Azure Blob Storage or S3."""

from kvtier_obstore.config import ObstoreTierConfig
from kvtier_obstore.tier import ObstoreTier

__version__ = "0.1.0"

__all__ = ["ObstoreTier", "ObstoreTierConfig"]
