"""A kvtier tier that stores chunks in a Redis or Valkey server, Sentinel group, or Cluster."""

from kvtier_redis.config import RedisTierConfig
from kvtier_redis.tier import RedisTier

__version__ = "0.1.0"

__all__ = ["RedisTier", "RedisTierConfig"]
