"""kvtier-redis stores chunks as values of a Redis or Valkey server, sentinel group, or cluster."""

from kvtier_redis.config import RedisTierConfig
from kvtier_redis.tier import RedisTier

__version__ = "0.1.0"

__all__ = ["RedisTier", "RedisTierConfig"]
