"""The interfaces that extensions implement: tiers, codecs, store policies, eviction policies."""

from kvtier_sdk.contract.codec import ChunkCodec
from kvtier_sdk.contract.policies import EvictionPolicy, StoreMoment, StorePolicy
from kvtier_sdk.contract.tier import (
    CONTRACT_RELEASES,
    CONTRACT_VERSION,
    ChunkTierManager,
    ReportRemoved,
    SecondaryTierManager,
    TierContext,
)
from kvtier_sdk.contract.tier_metrics import TierCounter, TierGauge, TierMetrics

__all__ = [
    "CONTRACT_RELEASES",
    "CONTRACT_VERSION",
    "ChunkCodec",
    "ChunkTierManager",
    "EvictionPolicy",
    "ReportRemoved",
    "SecondaryTierManager",
    "StoreMoment",
    "StorePolicy",
    "TierContext",
    "TierCounter",
    "TierGauge",
    "TierMetrics",
]
