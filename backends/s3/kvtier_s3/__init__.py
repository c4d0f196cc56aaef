"""A kvtier tier that stores chunks as objects of an S3 bucket."""

from kvtier_s3.config import S3TierConfig
from kvtier_s3.tier import S3Tier

__version__ = "0.1.0"

__all__ = ["S3Tier", "S3TierConfig"]
